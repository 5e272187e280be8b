"""Runs of all operators: both kinds of kernels write the same, views have no values, and a call takes few bytes."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler

from opintercept import OpCall, hooks, intercept, runs
from opintercept._engines.overloads import everything
from opintercept._ops.families import makes_values
from opintercept._ops.scratch import UNREAD

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("values_in_cpp")]

LEFT_OUT = ("aten::detach", "aten::alias")  # which kernels in Python do not see


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.batch = torch.nn.Embedding(20, 8), torch.nn.LayerNorm(8), torch.nn.BatchNorm1d(8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.linear(self.norm(self.embed(x))))
        h = torch.cat([h, self.batch(h), h * 2])
        h = h.masked_fill(h > 1, 0.5).softmax(-1) + (x.repeat(3) + 1).unsqueeze(-1)
        a, b = h.unbind(1)[:2]
        return torch.stack([a, b]).tanh().sum()


def record(path: Path, engine: Any, steps: int) -> list[runs.StoredCall]:
    torch.manual_seed(0)
    model = Net()
    with intercept(runs.RunRecorder(path), ops="all", engine=engine):
        optimizer = torch.optim.Adam(model.parameters(), foreach=steps % 2 > 0)
        for _ in range(steps):
            model(torch.arange(5)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(runs.open_run(path).calls())


def seen(call: runs.StoredCall) -> tuple[Any, ...]:
    record = call.record
    return (
        record.op,
        record.module,
        record.source,
        record.phase,
        list(call.values.items()),
        call.arguments,
        record.output,
    )


@pytest.mark.parametrize("steps", [2, 3])
def test_both_kinds_of_kernels_write_the_same_run_of_all_operators(tmp_path: Path, steps: int) -> None:
    found = [record(tmp_path / engine, engine, steps) for engine in ("kernel", "compiled")]
    one, other = ([seen(call) for call in calls if call.record.op not in LEFT_OUT] for calls in found)
    assert one == other
    assert len(one) > 100


def take_many(path: Path, engine: Any, **options: Any) -> list[runs.StoredCall]:
    """Calls with more tensors than a record has slots for: lists that are read, written and returned."""
    block = intercept(runs.RunRecorder(path, **options), ops="all", engine=engine)
    with contextlib.suppress(LookupError), block:
        for number in range(6):
            many = [torch.full((place + 1,), number + place / 8) for place in range(12)]
            torch.cat(many)
            torch._foreach_add_(torch._foreach_mul(many, 2.0), many)
            torch.stack([many[0], *many[:1] * 5]) @ torch.ones(1, 2)
        raise LookupError("so that a flight recorder writes its calls")
    return list(runs.open_run(path).calls())


@pytest.mark.parametrize("options", [{}, {"flight": 256}], ids=str)
def test_tensors_for_which_a_record_has_no_slot_are_written_as_well(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = take_many(tmp_path / "kernel", "kernel", **options)
    shown: list[str] = []
    post = runs.RunRecorder.post

    def show(self: runs.RunRecorder, call: OpCall) -> None:
        shown.append(call.op)
        post(self, call)

    monkeypatch.setattr(runs.RunRecorder, "post", show)
    other = take_many(tmp_path / "compiled", "compiled", **options)
    assert list(map(seen, one)) == list(map(seen, other))
    if options:  # the file of a flight recorder has slots alone
        assert shown.count("aten::_foreach_add_") == 6
    else:
        assert shown.count("aten::_foreach_add_") == 1
        last = [call for call in other if call.record.op == "aten::_foreach_mul"][-1]
        assert last.values["output.11"].mean == 2 * last.values["self[11]"].mean
        assert len(last.values) == 24


@pytest.mark.filterwarnings("ignore:stopped recording")
def test_a_run_that_gets_full_has_whole_calls_of_many_tensors(tmp_path: Path) -> None:
    whole = take_many(tmp_path / "whole", "compiled")
    size = sum(file.stat().st_size for file in (tmp_path / "whole").iterdir())
    part = take_many(tmp_path / "part", "compiled", max_bytes=size - 4000)
    assert list(map(seen, part)) == list(map(seen, whole[: len(part)]))
    assert 20 < len(part) < len(whole)


def overwrite(path: Path, engine: Any, first: float) -> list[Any]:
    """What hooks find of operators that overwrite values, some of them with NaN."""
    recorder, stats, nonfinite = (
        hooks.Recorder(),
        hooks.Stats(("lhs", "rhs", "output")),
        hooks.NonFinite(action="record"),
    )
    with intercept([recorder, stats, nonfinite, runs.RunRecorder(path)], ops="all", engine=engine):
        for change in (first, 1.0, 1.0, math.nan, 1.0, math.nan):
            torch.ones(8).sub_(torch.full((8,), change))
            torch.addmm(torch.ones(2), torch.ones(2, 2), torch.full((2, 2), change), out=torch.empty(2, 2))
            torch.zeros(2, 2).addmm_(torch.ones(2, 2), torch.full((2, 2), change))
    calls = list(runs.open_run(path).calls())
    assert [call.values["self"].mean for call in calls if call.record.op == "aten::sub_"] == [1] * 6
    return [
        [(record.index, record.op) for record in recorder.records],
        [(row.op, row.operand, row.calls, row.nan, row.mean) for row in stats.rows()],
        [(finding.record.index, finding.record.op, finding.kind) for finding in nonfinite.findings],
        [(call.record.index, call.record.op, values_of(call)) for call in calls],
    ]


def values_of(call: Any) -> dict[str, Any]:
    return {role: (values.nan, str(values.mean), values.hash) for role, values in call.values.items()}


@pytest.mark.parametrize("first", [1.0, math.nan])
def test_what_an_operator_overwrites_with_a_nan_is_read_before(tmp_path: Path, first: float) -> None:
    one, other = (overwrite(tmp_path / engine, engine, first) for engine in ("kernel", "compiled"))
    assert str(one) == str(other)
    assert all(one)


@pytest.mark.parametrize("engine", ["kernel", "compiled"])
def test_fractions_that_change_in_each_step_do_not_fill_a_run(tmp_path: Path, engine: Any) -> None:
    x = torch.ones(3)
    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine=engine):
        for step in range(600):
            torch.mul(x, 1 + step / 1000, out=x) if step % 2 else x.div_(1 + step / 1000)
    calls = list(runs.open_run(tmp_path / "run").calls())
    told = {name: [c.arguments for c in calls if c.record.op == f"aten::{name}"] for name in ("mul", "div_")}
    assert [len(each) for each in told.values()] == [300, 300]
    for name, arguments in told.items():
        assert arguments[1] == {"other": 1 + (3 if name == "mul" else 2) / 1000}
        assert arguments[255:257] == [{"other": 1 + (511 if name == "mul" else 510) / 1000}, {"other": "varies"}]
    assert len((tmp_path / "run/signatures.jsonl").read_text().splitlines()) == 2 * 257


def test_kernels_show_the_recorder_no_call_of_a_known_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(runs.RunRecorder, "post", lambda _, call: shown.append(call.op))
    model = Net().eval()
    with torch.no_grad(), intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled"):
        for _ in range(3):
            before = len(shown)
            model(torch.arange(5))
    assert (before > 10, shown[before:]) == (True, [])


def test_a_training_step_takes_few_bytes_a_call(tmp_path: Path) -> None:
    few, many = (len(record(tmp_path / str(steps), "compiled", steps)) for steps in (2, 12))
    size = [sum(file.stat().st_size for file in (tmp_path / str(steps)).iterdir()) for steps in (2, 12)]
    assert (size[1] - size[0]) / (many - few) < 220


def test_values_that_a_record_has_no_place_for_take_few_bytes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all", engine="compiled"):
        for _ in range(5):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    lists = [call.values for call in runs.open_run(tmp_path / "run").calls() if len(call.values) > 40]
    assert len(lists) > 20
    assert (tmp_path / "run/texts.jsonl").stat().st_size < 25 * sum(map(len, lists))


def test_views_have_no_values_and_are_known_by_their_names(tmp_path: Path) -> None:
    calls = record(tmp_path / "run", "compiled", 2)
    unread = {call.record.op for call in calls if not call.values}
    assert {"aten::t", "aten::unbind", "aten::unsqueeze"} <= unread
    assert {op.removeprefix("aten::") for op in unread} <= UNREAD
    overloads = everything(())
    names = {
        name.partition(".")[0] for name in overloads if name.startswith("aten::") and not makes_values(overloads[name])
    }
    assert {name.removeprefix("aten::") for name in names} <= UNREAD
