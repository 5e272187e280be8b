"""Runs of several processes that are no ranks: what belongs together, in which order, and by which names."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from opintercept import OpInterceptError, hooks, intercept, runs
from opintercept._reports.filters import Choice, NameFilter
from opintercept.cli import main
from opintercept.runs.record.writer import remove_run
from opintercept.runs.store.run import is_run


class Process:
    """A process of a program, as `opintercept run` describes it. One without a name is the first."""

    def __init__(self, base: Path, name: str | None, born: int, program: str = "p", folder: str | None = None) -> None:
        self.child = name is not None
        self._folder = base / (folder or f"{name}-{born}") if self.child else base
        self._about = {"program": program, "name": name or "main", "pid": str(born), "born": str(born)}
        self._about |= {"parent": "1"} if self.child else {}

    def about(self) -> dict[str, str]:
        return self._about

    def folder(self) -> Path | None:
        self._folder.mkdir(parents=True)
        return self._folder


def record(base: Path, name: str | None, born: int, sizes: Sequence[int], **more: str) -> None:
    """Record products of these sizes in a process."""
    process = Process(base, name, born, **more)
    with intercept(runs.RunRecorder(base, member=process)):
        for size in sizes:
            torch.ones(2, size) @ torch.full((size, 2), float("nan") if size == 13 else 1.0)


def sizes(run: runs.Run, number: int | None = None) -> list[int]:
    return [call.record.lhs.shape[1] for call in run.calls(number) if call.record.lhs is not None]


def test_processes_are_numbered_by_birth_and_called_by_name(tmp_path: Path) -> None:
    record(tmp_path, "b", 30, [4])
    record(tmp_path, None, 10, [3])
    record(tmp_path, "a", 20, [5, 6])
    run = runs.open_run(tmp_path)
    assert run.titles == {0: "main", 1: "a", 2: "b"}
    assert [sizes(run, number) for number in run.ranks] == [[3], [5, 6], [4]]
    assert not run.alone
    assert next(iter(run.parts())) == f"run       {tmp_path}: finished; 3 processes: main, a, b"


def test_processes_of_one_name_are_called_by_their_folders(tmp_path: Path) -> None:
    for born in (30, 20):
        record(tmp_path, "w", born, [born])
    assert runs.open_run(tmp_path).titles == {0: "w-20", 1: "w-30"}


def test_a_child_makes_no_folder_before_its_first_call(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path, member=Process(tmp_path, "a", 1))
    with intercept(recorder):
        assert not [*tmp_path.iterdir()]
        torch.ones(2, 2) + 1
        assert not [*tmp_path.iterdir()]
        torch.ones(2, 2) @ torch.ones(2, 2)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a-1"]
    assert recorder.path == tmp_path / "a-1"


def test_a_process_without_calls_is_left_out_where_another_has_some(tmp_path: Path) -> None:
    record(tmp_path, None, 10, [])
    assert runs.open_run(tmp_path).ranks == (0,)
    record(tmp_path, "a", 20, [5])
    run = runs.open_run(tmp_path)
    assert (run.titles, run.alone, sizes(run)) == ({0: "a"}, True, [5])


def test_children_of_another_program_are_left_out(tmp_path: Path) -> None:
    record(tmp_path, "a", 10, [3], program="old")
    record(tmp_path, "b", 20, [4], program="new")
    assert runs.open_run(tmp_path).titles == {0: "b"}  # the newest
    record(tmp_path, None, 5, [5], program="old")
    assert runs.open_run(tmp_path).titles == {0: "main", 1: "a"}  # those of the process that began


def test_a_folder_of_runs_is_no_run(tmp_path: Path) -> None:
    record(tmp_path / "a", None, 1, [3])
    record(tmp_path / "b", None, 2, [3])
    assert not is_run(tmp_path)
    with pytest.raises(OpInterceptError, match="a run must be a folder with"):
        runs.open_run(tmp_path)


def test_a_path_or_a_pattern_chooses_processes(tmp_path: Path) -> None:
    for number, name in enumerate((None, "a1", "a2")):
        record(tmp_path / "run", name, number, [number + 2])
    run = runs.open_run(tmp_path / "run")
    assert sizes(run.matching("a*")) == [3, 4]
    assert sizes(run.matching("main")) == sizes(runs.open_run(tmp_path / "run/main")) == [2]
    assert sizes(runs.open_run(tmp_path / "run/a2")) == sizes(runs.open_run(tmp_path / "run/a2-2")) == [4]
    with pytest.raises(OpInterceptError, match="--process must match some of main, a1, a2, got 'b'"):
        run.matching("b")
    with pytest.raises(OpInterceptError, match="a run must be a folder with"):
        runs.open_run(tmp_path / "run/b")


def test_calls_are_in_the_order_of_time_and_name_their_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (Process(tmp_path, name, number) for number, name in enumerate("ab"))
    with intercept(runs.RunRecorder(tmp_path, member=a)) as in_a:
        torch.ones(2, 3) @ torch.ones(3, 2)
        with in_a.paused(), intercept(runs.RunRecorder(tmp_path, member=b)):
            torch.ones(2, 4) @ torch.full((4, 2), float("nan"))
            torch.ones(2, 5) @ torch.ones(5, 2)
        torch.ones(2, 6) @ torch.full((6, 2), float("nan"))
    assert main(["show", str(tmp_path), "--calls", "--csv"]) == 0
    head, *rows = (line.split(",") for line in capsys.readouterr().out.splitlines())
    assert head[:3] == ["process", "rank", "index"]
    assert [row[:3] for row in rows] == [["a", "0", "0"], ["b", "1", "0"], ["b", "1", "1"], ["a", "0", "1"]]
    assert main(["show", str(tmp_path), "--by", "process"]) == 0
    out = capsys.readouterr().out
    assert "nonfinite first in call 0, step 0, b, forward: mm" in out
    assert sorted(line.split()[:2] for line in out.splitlines()[-2:]) == [["a", "2"], ["b", "2"]]


def test_two_runs_pair_processes_by_name_then_by_birth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, names in (("a", (None, "w", "w", "x")), ("b", (None, "w", "y", "w"))):
        for number, name in enumerate(names):
            size = {"x": 7, "y": 7}.get(name or "", number if run == "a" or number < 3 else 2)
            record(tmp_path / run, name, number, [size + 2])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "processes compared, A with B: main with main, w-1 with w-1, w-2 with w-3, x with y\n" in out
    assert "4 compared: 4 equal" in out
    shutil.rmtree(tmp_path / "b/w-3")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "process x is missing in B: 1 call of A was not compared" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--process", "main"]) == 0


def test_nothing_is_said_where_one_process_of_each_multiplies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in "ab":
        record(tmp_path / run, None, 1, [])
        record(tmp_path / run, f"engine{run}", 2, [3])
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "engine" not in capsys.readouterr().out


def test_ranks_beside_other_processes_keep_their_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, None, 1, [3])
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path, "python", 5 - rank, [4, 4 + rank], folder=f"rank{rank}")
    run = runs.open_run(tmp_path)
    assert run.titles == {0: "rank0", 1: "rank1", 2: "main"}
    assert [sizes(run, number) for number in run.ranks] == [[4, 4], [4, 5], [3]]
    found = runs.diff_ranks(run)
    assert found.ranks == (0, 1)


def test_a_run_is_removed_with_its_processes(tmp_path: Path) -> None:
    record(tmp_path, "a", 1, [3])
    (tmp_path / "a-1/summary.json").write_text("{}")
    remove_run(tmp_path)
    assert [*tmp_path.iterdir()] == []


def test_filters_and_reports_take_all_processes(tmp_path: Path) -> None:
    record(tmp_path, None, 1, [3])
    record(tmp_path, "a", 2, [4])
    from opintercept._reports.calls import OpenedRun, in_order

    opened = [OpenedRun("r", runs.open_run(tmp_path))]
    names = NameFilter(None, None, None, str, str)
    assert [call.rank for _, call in in_order(opened, Choice(rank=1), names)] == [1]
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    assert main(["export", str(tmp_path), "-o", str(tmp_path / "trace.json")]) == 0
    assert "opintercept a: " in (tmp_path / "trace.json").read_text()


def test_a_hook_that_makes_a_call_first_wakes_the_recorder_once(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path, member=Process(tmp_path, "a", 1))
    with intercept([hooks.Stats(), recorder]):
        for _ in range(3):
            torch.ones(2, 2) @ torch.ones(2, 2)
    assert recorder.calls == 3
