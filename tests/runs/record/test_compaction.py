"""Runs whose calls are in columns: what compaction keeps, and what it leaves when it is interrupted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import ATTENTION, attention, call, chain, ranked, write

from opintercept import OpInterceptError, OpInterceptWarning, intercept, runs
from opintercept.cli import main
from opintercept.runs.record import claim, compaction
from opintercept.runs.store.codec import StoredCall

pytest.importorskip("duckdb")

CALLS = [
    *chain("a", "b", "c"),
    call("a", "x", "w", None, error="RuntimeError: no"),
    *attention(attn_mask="m"),
    *attention(attn_bias="m"),
    call(
        "b",
        "x",
        {"hash": None, "count": 4, "nan": 1, "inf": 0, "min": None, "max": None, "mean": None, "rms": None},
        "y",
    ),
    call(None, "x", "w", "y", bias="b", step=3, elapsed=None, forward=2, phase="backward", grad_of="lhs"),
    call(None, "x", "w", "y", started=None, thread=None),
    call("\u00e9\"'", "x", "w", "y", elapsed=0.1 + 2**-40, kept=False, autocast="bfloat16"),
]


def with_short_sums(call: StoredCall) -> StoredCall:
    """The call with means and root mean squares of 27 bits, as columns have them."""

    def short(value: float | None) -> float | None:
        if value is None:
            return None
        mantissa, exponent = math.frexp(value)
        return math.ldexp(round(math.ldexp(mantissa, 27)), exponent - 27)

    values = {role: replace(each, mean=short(each.mean), rms=short(each.rms)) for role, each in call.values.items()}
    return replace(call, values=values)


def compacted(run: runs.Run) -> runs.Run:
    runs.compact(run.path)
    return runs.open_run(run.path)


def test_a_compacted_run_has_the_calls_that_it_had(tmp_path: Path) -> None:
    run = write(tmp_path / "run", CALLS)
    before = list(run.calls())
    after = compacted(run)
    assert list(after.calls()) == before
    assert sorted(entry.name for entry in run.path.iterdir()) == ["columns", "run.json"]
    assert [after.at(0, place) for place, _ in after.located(0)] == before


def test_a_recorded_run_with_tensors_keeps_everything(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        layer(torch.randn(2, 3, 8)).sum().backward()
    before = list(runs.open_run(tmp_path / "run").calls())
    runs.compact(tmp_path / "run")
    run = runs.open_run(tmp_path / "run")
    assert list(run.calls()) == [with_short_sums(call) for call in before] != before
    tensor = run.tensor(before[0], "rhs")
    assert tensor is not None
    assert tensor.numel() == before[0].values["rhs"].count


@pytest.mark.parametrize("names", ["a", "b", "ab"])
@pytest.mark.parametrize("options", [{}, {"rtol": 1e-3}, {"limit": 1}], ids=["exact", "rtol", "limit"])
def test_diff_finds_the_same_in_columns(names: str, options: dict[str, Any], tmp_path: Path) -> None:
    other = [*chain("a", "b", "c", of="b"), *CALLS[4:], *CALLS[:2], *attention(attn_mask="n")]
    pair = {"a": write(tmp_path / "a", CALLS), "b": write(tmp_path / "b", other)}
    expected = runs.diff(pair["a"], pair["b"], **options)
    pair |= {name: compacted(pair[name]) for name in names}
    assert runs.diff(pair["a"], pair["b"], **options) == expected


@pytest.mark.parametrize(
    "command", [["show"], ["show", "--calls"], ["show", "--calls", "--sort", "time"], ["show", "--by", "step,shape"]]
)
def test_show_prints_the_same_of_columns(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", CALLS)
    assert main([*command, str(run.path)]) == 0
    expected = capsys.readouterr().out
    runs.compact(run.path)
    assert main([*command, str(run.path)]) == 0
    assert capsys.readouterr().out == expected


def test_each_process_has_columns_of_its_own(tmp_path: Path) -> None:
    run = ranked(tmp_path / "run", chain("a"), chain("a", "b"))
    before = list(run.calls())
    assert list(compacted(run).calls()) == before


def test_lines_that_are_no_calls_are_still_counted(tmp_path: Path) -> None:
    run = write(tmp_path / "run", CALLS)
    with (run.path / "calls.jsonl").open("a") as file:
        file.write("{torn")
    with pytest.warns(OpInterceptWarning, match=r"skipped 1 unreadable line in .*calls.jsonl"):
        list(compacted(run).calls())


def test_a_command_compacts_a_large_run_and_leaves_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path / "run", CALLS)
    main(["show", str(run.path)])
    assert (run.path / "calls.jsonl").exists()
    monkeypatch.setattr(compaction, "LEAST", 1000)
    main(["show", str(run.path)])
    assert (run.path / "calls.jsonl").exists()  # the process may have run elsewhere, and still do so
    hours_ago = time.time() - 3 * compaction.IDLE
    os.utime(run.path / "calls.jsonl", (hours_ago, hours_ago))
    main(["show", str(run.path)])
    assert (run.path / "columns").exists()
    assert not (run.path / "calls.jsonl").exists()
    assert capsys.readouterr().err == ""


RECORDS = """
import sys, torch
from opintercept import intercept, runs
recorder = runs.RunRecorder(sys.argv[1])
for _ in range(2):
    with intercept(recorder):
        for _ in range(50):
            torch.ones(2, 2) @ torch.ones(2, 2)
    print("left", flush=True)
    sys.stdin.readline()
"""


def test_a_command_leaves_the_lines_of_a_process_that_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compaction, "LEAST", 1000)
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", RECORDS, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "left\n"
            assert main(["show", str(folder)]) == 0
            assert (folder / "calls.jsonl").exists()
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
    assert main(["show", str(folder)]) == 0
    assert not (folder / "calls.jsonl").exists()
    assert sum(1 for _ in runs.open_run(folder).calls()) == 100
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("process", [None, 3, {}, {"pid": 10**30}, {"pid": "1"}], ids=str)
def test_a_process_that_is_not_known_is_taken_to_run(process: Any) -> None:
    assert claim.has_ended(process) is None
    assert claim.has_ended(claim.this_process()) is False
    assert claim.has_ended(claim.this_process() | {"pid": 10**30}) is True
    assert claim.has_ended(claim.this_process() | {"began": "1", "pid": os.getppid()}) is True


def test_a_run_that_is_being_recorded_stays_lines(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.ones(2, 2) @ torch.ones(2, 2)
        with pytest.raises(OpInterceptError, match="is recording to"):
            runs.compact(tmp_path / "run")
    assert (tmp_path / "run" / "calls.jsonl").exists()


def test_a_recorder_does_not_continue_a_compacted_run(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder):
        torch.ones(2, 2) @ torch.ones(2, 2)
    runs.compact(tmp_path / "run")
    with pytest.raises(OpInterceptError, match="no longer holds the run that this recorder began"):
        with intercept(recorder):
            pass
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        torch.ones(3, 2) @ torch.ones(2, 2)
    (found,) = runs.open_run(tmp_path / "run").calls()
    assert found.record.lhs is not None
    assert found.record.lhs.shape == (3, 2)
    assert not (tmp_path / "run" / "columns").exists()


def test_lines_count_alone_where_columns_are_left_beside_them(tmp_path: Path) -> None:
    """An interrupted compaction may leave both; a recorder may have written further lines."""
    run = write(tmp_path / "run", chain("a"))
    lines = (run.path / "calls.jsonl").read_text()
    runs.compact(run.path)
    (run.path / "calls.jsonl").write_text(lines * 2)
    assert len(list(runs.open_run(run.path).calls())) == 2
    assert len(list(compacted(runs.open_run(run.path)).calls())) == 2


@pytest.mark.slow
def test_a_killed_compaction_loses_nothing(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [call("a", n, "w", f"y{n}", step=n) for n in range(1000)])
    before = list(run.calls())
    lines, info = ((run.path / name).read_bytes() for name in ("calls.jsonl", "run.json"))
    # Each is a fork of one process that has imported all: a new one would take seconds.
    program = """
import os, sys
import duckdb
from opintercept import runs
from opintercept.runs.record import compaction
for _ in sys.stdin:
    child = os.fork()
    if not child:
        runs.compact(sys.argv[1])
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""
    draw = random.Random(0)
    lasted = 0.0
    killed = 0
    command = [sys.executable, "-c", program, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for number in range(20):
            (run.path / "calls.jsonl").write_bytes(lines)
            (run.path / "run.json").write_bytes(info)
            server.stdin.write("\n")
            child = int(server.stdout.readline())
            began = time.perf_counter()
            if number:
                time.sleep(draw.uniform(0, 1.1 * lasted))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                    killed += 1
            assert server.stdout.readline() == "ended\n"
            lasted = lasted or time.perf_counter() - began  # of the first, which ends by itself
            assert list(runs.open_run(run.path).calls()) == before
            runs.compact(run.path)
            assert list(runs.open_run(run.path).calls()) == before
    assert killed > 5


def test_a_full_disk_leaves_the_lines(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [call("a", n, "w", f"y{n}", step=n) for n in range(3000)])
    before = list(run.calls())
    program = """
import resource, sys
from opintercept import runs
from opintercept.runs.record import compaction
from opintercept.runs.store import parquet
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))  # bytes of a file
print(len(list(compaction.open_compacted(sys.argv[1], least=0).calls())))
for action in (lambda: runs.compact(sys.argv[1]), lambda: runs.open_run(sys.argv[1]).columns(0)):
    parquet.IN_MEMORY = parquet.ROWS = 100
    try:
        action()
    except Exception as failed:
        print(type(failed).__name__, failed)
"""
    command = [sys.executable, "-c", program, str(run.path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    number, compacting, reading = done.stdout.splitlines()
    assert number == "3000"
    assert re.fullmatch(r"OSError \[Errno 27\] File too large: '.*-00000000.parquet'", compacting)
    assert re.fullmatch(r"OpInterceptError \[Errno 27\] .*: '.*'; set TMPDIR to a folder with more room", reading)
    assert sorted(path.name for path in run.path.iterdir()) == ["calls.jsonl", "run.json"]
    assert list(runs.open_run(run.path).calls()) == before
    assert list(compacted(runs.open_run(run.path)).calls()) == before


def test_without_duckdb_a_compacted_run_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = write(tmp_path / "run", CALLS), write(tmp_path / "other", CALLS)
    runs.compact(run.path)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert runs.diff(other, other).equal
    with pytest.raises(ImportError, match=r"needs duckdb; pip install 'opintercept\[cli\]'"):
        list(runs.open_run(run.path).calls())


def test_a_run_of_another_schema_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    run = write(tmp_path / "run", CALLS)
    info = json.loads((run.path / "run.json").read_text()) | {"schema": 7, "versions": {"opintercept": "9.1"}}
    (run.path / "run.json").write_text(json.dumps(info))
    with pytest.raises(OpInterceptError, match=r"must have schema 1 or 2, got 7; read it with opintercept 9\.1, which"):
        runs.open_run(run.path)


def test_older_versions_refuse_columns(tmp_path: Path) -> None:
    run = compacted(write(tmp_path / "run", CALLS))
    assert json.loads((run.path / "run.json").read_text())["schema"] == 2


@pytest.mark.parametrize("name", ["store.json", "calls-00000000.parquet", "looks-00000000.parquet"])
@pytest.mark.parametrize("how", ["gone", "link", "pipe", "empty"])
def test_a_damaged_store_is_refused(name: str, how: str, tmp_path: Path) -> None:
    run = compacted(write(tmp_path / "run", CALLS))
    path = run.path / "columns" / name
    kept = tmp_path / "kept"
    path.rename(kept)
    if how == "link":
        path.symlink_to(kept)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "empty":
        path.touch()
    with pytest.raises(OpInterceptError, match=r"store|damaged|plain file"):
        list(runs.open_run(run.path).calls())


@pytest.mark.parametrize(
    "change",
    [{"calls": 10**9}, {"calls": -1}, {"looks": 0}, {"blocks": {}}, {"blocks": {"looks": [5, 1]}}, {"schema": 9}],
    ids=str,
)
def test_a_store_that_promises_what_it_has_not_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    run = compacted(write(tmp_path / "run", CALLS))
    path = run.path / "columns" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OpInterceptError, match="store"):
        list(runs.open_run(run.path).calls())


def test_other_programs_read_the_columns(tmp_path: Path) -> None:
    import duckdb

    run = compacted(write(tmp_path / "run", CALLS))
    with duckdb.connect() as connection:
        rows = connection.execute(
            f"""SELECT module, op, count(*) FROM '{run.path}/columns/calls-*.parquet'
            JOIN '{run.path}/columns/sites-*.parquet' USING (rank, site)
            JOIN '{run.path}/columns/looks-*.parquet' USING (rank, look) GROUP BY ALL ORDER BY ALL"""
        ).fetchall()
    assert sum(count for module, op, count in rows if (module, op) == ("attn", ATTENTION)) == 2
    assert sum(count for *_, count in rows) == len(CALLS)
