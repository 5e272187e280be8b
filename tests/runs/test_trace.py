"""Traces: every call, in slices of its modules, with arrows, as viewers read them."""

from __future__ import annotations

import gzip
import json
import math
import os
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import call, ranked, write
from torch import nn

from opintercept import OpInterceptError, hooks, intercept, runs
from opintercept.cli import main
from opintercept.runs import trace

Event = dict[str, Any]


def nested(events: list[Event]) -> list[tuple[Event, ...]]:
    """Each slice with those around it, as a viewer nests them: in order of their time, then of the file."""
    found = []
    tracks: dict[Any, list[Event]] = defaultdict(list)
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        around = tracks[event["pid"], event["tid"]]
        while around and _end(around[-1]) <= event["ts"] and not _starts_with(around[-1], event):
            around.pop()
        assert not around or round(_end(event), 3) <= round(_end(around[-1]), 3), "slices overlap in part"
        around.append(event)
        found.append(tuple(around))
    return found


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _starts_with(around: Event, event: Event) -> bool:
    """Whether a slice without length is one of those around a call without length."""
    alike = around["dur"] == 0 == event["dur"] and around["ts"] == event["ts"]
    return bool(alike and around["cat"] in ("step", "module"))


def read(path: Path) -> list[Event]:
    raw = path.read_bytes()
    return list(json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"])


def written(folder: Path, run: runs.Run) -> list[Event]:
    """The events of the trace of a run."""
    trace.write(folder / "trace.json", run)
    return read(folder / "trace.json")


def calls_of(events: list[Event]) -> list[tuple[Event, ...]]:
    return [slices for slices in nested(events) if slices[-1]["name"].startswith("aten::")]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(self.up(x).relu())
        return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a model, with a product in another thread."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    model = nn.Sequential(Layer(), Layer())
    watch = intercept([runs.RunRecorder(folder), hooks.Stats()], threads="all")
    with watch:
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            watch.step()
        thread = threading.Thread(target=lambda: torch.ones(2, 2) @ torch.ones(2, 2))
        thread.start()
        thread.join()
    return folder


def test_every_call_lies_in_the_slices_of_its_modules(trained: Path, tmp_path: Path) -> None:
    run = runs.open_run(trained)
    recorded = {call.record.index: call.record for call in run.calls()}
    assert trace.write(tmp_path / "trace.json", run) == len(recorded)
    found = calls_of(read(tmp_path / "trace.json"))
    assert {slices[-1]["args"]["index"] for slices in found} == recorded.keys()
    assert len(found) == len(recorded)
    for *around, event in found:
        record = recorded[event["args"]["index"]]
        modules = record.module.split(".") if record.module else []
        assert [each["name"] for each in around] == [f"step {record.step}", record.phase, *modules]
        assert event["name"] == record.op
        assert event["tid"] == record.thread
        assert event["args"]["product"] == str(record.gemm)
        assert record.elapsed is not None
        assert event["dur"] == pytest.approx(record.elapsed * 1e6, abs=2)  # less where two clocks disagree


def test_times_are_those_of_the_calls(trained: Path, tmp_path: Path) -> None:
    run = runs.open_run(trained)
    trace.write(tmp_path / "trace.json", run)
    whole = json.loads((tmp_path / "trace.json").read_text())
    started = {call.record.index: call.record.started for call in run.calls()}
    for *_, event in calls_of(whole["traceEvents"]):
        expected = started[event["args"]["index"]]
        assert expected is not None
        assert whole["baseTimeNanoseconds"] + event["ts"] * 1e3 == pytest.approx(expected, rel=0, abs=2e3)


def test_arrows_lead_from_forward_calls_to_their_backward_calls(trained: Path, tmp_path: Path) -> None:
    run = runs.open_run(trained)
    events = written(tmp_path, run)
    found = [slices[-1] for slices in calls_of(events)]

    def at(end: Event) -> int:
        (index,) = [
            each["args"]["index"]
            for each in found
            if each["tid"] == end["tid"] and each["ts"] <= end["ts"] <= _end(each)
        ]
        return int(index)

    starts = {event["id"]: at(event) for event in events if event["ph"] == "s"}
    ends = {event["id"]: at(event) for event in events if event["ph"] == "f"}
    expected = {call.record.index: call.record.forward for call in run.calls() if call.record.forward is not None}
    assert expected
    assert {ends[key]: starts[key] for key in ends} == expected
    assert all(event["bp"] == "e" for event in events if event["ph"] == "f")


def test_only_the_chosen_steps_are_written(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "trace.json.gz"
    assert main(["export", str(trained), "--format", "perfetto", "--steps", "1", "-o", str(out)]) == 0
    found = calls_of(read(out))
    assert {slices[0]["name"] for slices in found} == {"step 1"}
    assert len(found) == sum(call.record.step == 1 for call in runs.open_run(trained).calls())
    assert capsys.readouterr().out.startswith(f"{out}: {len(found)} calls, 0.0 MB")


def test_ranks_are_processes(tmp_path: Path) -> None:
    run = ranked(tmp_path, [call("a", "x", "w", "y")], [call("a", "x", "w", "y"), call("b", "y", "w", "z")])
    events = written(tmp_path, run)
    assert Counter(slices[-1]["pid"] for slices in calls_of(events)) == {1: 1, 2: 2}
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name[:18] for name in names] == ["opintercept rank 0", "opintercept rank 1"]


def test_calls_that_raised_or_overlap_lie_beside_each_other(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    calls = [
        call("a", "x", "w", "y", started=base, elapsed=1e-6),
        call("a", "x", "w", "y", started=base + 900, elapsed=1e-6),  # began, by another clock, before the last ended
        call("d", "x", "w", "y", started=base + 2_000, elapsed=1e-7),  # inside the next
        call("b.c", "x", "w", "y", started=base + 2_000, elapsed=1e-6),
        call("b", "x", "w", None, started=base + 4_000, elapsed=None, error="RuntimeError: no"),
        call("b.c", "x", "w", "y", started=base + 4_100, elapsed=1e-7),
        call("c", "x", "w", "y", started=base + 5_000, elapsed=math.inf),
        call("c", "x", "w", "y", started=base + 10**16, elapsed=-1.0),
    ]
    events = written(tmp_path, write(tmp_path / "run", calls))
    found = {slices[-1]["args"]["index"]: slices for slices in calls_of(events)}
    assert found.keys() == set(range(8))
    assert [each["name"] for each in found[5][:-1]] == ["step 0", "forward", "b", "c"]
    assert [(each["ts"], each["dur"]) for each in (found[0][-1], found[1][-1])] == [(0.0, 1.0), (1.0, 0.9)]
    assert found[2][-2] is found[3][-1]
    assert [each["name"] for each in found[2][:-2]] == ["step 0", "forward", "b", "c"]
    assert [each["name"] for each in found[4][:-1]] == ["step 0", "forward", "b"]
    assert found[4][-1]["args"]["error"] == "RuntimeError: no"


def test_an_arrow_begins_in_a_thread_that_comes_later(tmp_path: Path) -> None:
    base = 1_700_000_000_000_000_000
    calls = [
        call("a", "x", "w", "y", started=base, thread=7),
        call("a", "x", "w", "y", started=base + 10**7, thread=5, phase="backward", forward=0, grad_of="lhs"),
        call("a", "x", "w", "y", started=base + 2 * 10**7, thread=5, phase="backward", forward=9, grad_of="lhs"),
    ]
    arrows = [event for event in written(tmp_path, write(tmp_path / "run", calls)) if event["ph"] in "sf"]
    assert [(event["ph"], event["tid"], event["ts"]) for event in arrows] == [("s", 7, 500.0), ("f", 5, 10500.0)]


def test_a_run_without_times_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [call("a", "x", "w", "y", started=None, thread=None)])
    with pytest.raises(OpInterceptError, match="have no times; record it again"):
        trace.write(tmp_path / "trace.json", run)
    assert not (tmp_path / "trace.json").exists()
    with pytest.raises(OpInterceptError, match=r"cannot write the trace to .*which is not a plain file"):
        trace.write(tmp_path, write(tmp_path / "other", [call("a", "x", "w", "y")]))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"traceEvents": 1}', "\x1f\x8b", '{"traceEvents": [], "baseTimeNanoseconds": "1"}']
)
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(text)
    run = write(tmp_path / "run", [call("a", "x", "w", "y")])
    with pytest.raises(OpInterceptError, match=r"profile.json' must be a trace in JSON; write one with"):
        trace.write(tmp_path / "trace.json", run, profile=tmp_path / "profile.json")


def test_a_run_joins_the_profile_of_the_same_program(tmp_path: Path) -> None:
    model = Layer()
    with torch.profiler.profile() as profiler, intercept(runs.RunRecorder(tmp_path / "run")):
        model(torch.randn(3, 4))
    profiler.export_chrome_trace(str(tmp_path / "profile.json"))
    out = tmp_path / "trace.json"
    assert main(["export", str(tmp_path / "run"), "--profile", str(tmp_path / "profile.json"), "-o", str(out)]) == 0
    events = read(out)
    products = [each for each in events if each["ph"] == "X" and each["name"] == "aten::addmm"]
    theirs = [each for each in products if each["pid"] == os.getpid()]
    ours = [each for each in products if each["pid"] != os.getpid()]
    assert len(theirs) == len(ours) == 2
    for one, other in zip(theirs, ours, strict=True):
        assert one["ts"] - 50 <= other["ts"]  # microseconds, by another clock
        assert _end(other) <= _end(one) + 50
        assert one["tid"] == other["tid"]
    assert {each["pid"] for each in ours}.isdisjoint(
        each.get("pid") for each in json.loads((tmp_path / "profile.json").read_text())["traceEvents"]
    )
