"""Several processes record one run, each in a folder of its own."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import FILES, calls_of, files_in

from opintercept import OpInterceptError, OpInterceptWarning, intercept, runs
from opintercept.runs import open_run

pytestmark = pytest.mark.usefixtures("no_writer_left")


def test_each_rank_writes_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        with intercept(runs.RunRecorder(tmp_path / "run")):
            torch.full((2, 2), float(rank)) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.ranks == (0, 1)
    assert [run.infos[rank].world_size for rank in run.ranks] == [2, 2]
    assert [call.values["lhs"].max for call in run.calls()] == [0.0, 1.0]
    assert [call.rank for call in run.calls(1)] == [1]


def record(
    monkeypatch: pytest.MonkeyPatch, path: Path, value: float, ranks: Any, world_size: int, **options: Any
) -> None:
    """Record a product of this value in each of these ranks, one after the other."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        with intercept(runs.RunRecorder(path, "full", **options)):
            torch.full((2, 2), value) @ torch.eye(2)


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (4, 2), (2, 4)], ids=str)
def test_a_run_of_other_ranks_is_replaced_as_a_whole(
    old: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(old), old)
    record(monkeypatch, tmp_path, 2.0, reversed(range(new)), new, overwrite=True)
    run = open_run(tmp_path)
    assert run.ranks == tuple(range(new))
    assert [call.values["lhs"].max for call in run.calls()] == [2.0] * new
    parts = [f"rank{rank}/" for rank in range(new)] if new > 1 else [""]
    assert files_in(tmp_path) == [f"{part}{name}" for part in parts for name in FILES]


@pytest.mark.parametrize(("old", "rank"), [(1, 0), (1, 1), (4, 0), (4, 1)], ids=str)
def test_no_rank_adds_to_an_existing_run(old: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path, 1.0, range(old)[-1:], old)
    later = files_in(tmp_path)
    with pytest.raises(ValueError, match=r"already holds a run; name another folder, or pass overwrite=True"):
        record(monkeypatch, tmp_path, 2.0, [rank], 2)
    assert files_in(tmp_path) == later


def test_the_first_rank_to_start_replaces_a_run_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path, 1.0, [0], 1)
    (tmp_path / "notes.txt").write_text("mine")
    record(monkeypatch, tmp_path, 2.0, [1], 2, overwrite=True)
    assert [call.values["lhs"].max for call in calls_of(tmp_path)] == [2.0]
    assert files_in(tmp_path) == ["notes.txt", *(f"rank1/{name}" for name in FILES)]


def test_ranks_of_an_older_run_that_no_new_one_replaced_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(4), 4)
    with monkeypatch.context() as later:
        later.setattr("time.strftime", lambda form: "2126-01-01T00:00:00+0000")
        record(monkeypatch, tmp_path, 2.0, [1], 2, overwrite=True)
    with pytest.warns(OpInterceptWarning, match=r"skipped rank0 in .* older run of 4 processes instead of 2"):
        run = open_run(tmp_path)
    assert [call.values["lhs"].max for call in run.calls()] == [2.0]
    assert run.ranks == (1,)


def as_of(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let recorders begin at another time."""
    started = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
    monkeypatch.setattr("time.strftime", lambda form: started)


def torchrun(monkeypatch: pytest.MonkeyPatch, **named: str) -> None:
    """Set what torchrun sets in the environment of its processes."""
    names = {"id": "TORCHELASTIC_RUN_ID", "node": "GROUP_RANK", "attempt": "TORCHELASTIC_RESTART_COUNT"}
    for name, value in named.items():
        monkeypatch.setenv(names[name], value)


def test_a_rank_that_ended_before_the_others_began_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path, 1.0, range(3), 3)
    as_of(monkeypatch, 30)
    record(monkeypatch, tmp_path, 3.0, range(2), 3, overwrite=True)
    assert open_run(tmp_path).ranks == (0, 1, 2)  # they may be of one run: rank 2 stopped early
    written = time.time() - 3600
    for name in ("calls.bin", "run.json"):
        os.utime(tmp_path / "rank2" / name, (written, written))
    as_of(monkeypatch, 120)
    record(monkeypatch, tmp_path, 2.0, range(2), 3, overwrite=True)
    with pytest.warns(
        OpInterceptWarning,
        match=r"skipped rank2 in .*, left over from an older run that had ended before the other ranks began; remove",
    ):
        run = open_run(tmp_path)
    assert [call.values["lhs"].max for call in run.calls()] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"id": "a"}, {"id": "b"}),
        ({"id": "none", "node": "0", "attempt": "0"}, {"id": "none", "node": "0", "attempt": "1"}),
    ],
    ids=["another launch", "another attempt"],
)
def test_a_rank_of_another_launch_of_torchrun_is_skipped(
    old: dict[str, str], new: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun(monkeypatch, **old)
    record(monkeypatch, tmp_path, 1.0, range(3), 3)
    torchrun(monkeypatch, **new)
    as_of(monkeypatch, 5)
    record(monkeypatch, tmp_path, 2.0, range(2), 3, overwrite=True)
    with pytest.warns(OpInterceptWarning, match=r"skipped rank2 in .*, left over from an older run of another launch;"):
        run = open_run(tmp_path)
    assert run.ranks == (0, 1)
    assert run.info.launch is not None
    assert run.info.launch["attempt" if "attempt" in new else "id"] == new["attempt" if "attempt" in new else "id"]


def test_nodes_of_one_launch_may_count_their_attempts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, attempt in ((0, "1"), (1, "0")):
        torchrun(monkeypatch, id="job", node=str(rank), attempt=attempt)
        record(monkeypatch, tmp_path, 1.0, [rank], 2)
    assert open_run(tmp_path).ranks == (0, 1)


def test_a_restart_with_fewer_ranks_replaces_those_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(4), 4)
    for rank in range(4):  # as `kill -9` leaves them
        info = tmp_path / f"rank{rank}/run.json"
        info.write_text(info.read_text().replace('"finished": true', '"finished": false'))
        with open(tmp_path / f"rank{rank}/calls.bin", "ab") as file:
            file.write(b"torn")
    with pytest.raises(ValueError, match=r"already holds a run; name another folder, or pass overwrite=True"):
        record(monkeypatch, tmp_path, 2.0, [0], 3)
    record(monkeypatch, tmp_path, 2.0, range(3), 3, overwrite=True)
    run = open_run(tmp_path)
    assert [call.values["lhs"].max for call in run.calls()] == [2.0] * 3
    assert not (tmp_path / "rank3").exists()


def test_no_rank_replaces_what_another_program_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1}')
    with pytest.raises(OpInterceptError, match=r"cannot overwrite .*: it holds other files"):
        record(monkeypatch, tmp_path, 2.0, [0], 2, overwrite=True)
    assert files_in(tmp_path) == ["run.json"]


def test_no_rank_deletes_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path / "elsewhere", 1.0, [0], 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank7").symlink_to(tmp_path / "elsewhere")
    record(monkeypatch, tmp_path / "run", 2.0, [0, 1], 2, overwrite=True)
    assert open_run(tmp_path / "run").ranks == (0, 1)
    assert files_in(tmp_path / "elsewhere") == FILES


@pytest.mark.parametrize("rank", ["", "-1", "x", "²"])
def test_odd_ranks_in_the_environment_are_ignored(rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.eye(2) @ torch.eye(2)
    assert open_run(tmp_path / "run").ranks == (0,)
