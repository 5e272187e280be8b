"""A recorded program: where its tensors lie, and what of a run from elsewhere is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opintercept import OpInterceptError, intercept, runs
from opintercept.runs.program.program import Program, ProgramMemory, Region, last_uses
from opintercept.runs.store.codec import StoredCall


@st.composite
def regions(draw: Any) -> Region:
    """A region of a memory of 64 elements, whose elements may share memory."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    stride = tuple(draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape))))
    return Region(None, shape, 1, draw(st.integers(0, 8)), stride)


@given(regions())
def test_memory_does_as_a_tensor_with_these_strides(region: Region) -> None:
    memory, flat = ProgramMemory({1: 64}), torch.full((64,), torch.nan, dtype=torch.float64)
    values = torch.arange(1.0, math.prod(region.shape) + 1, dtype=torch.float64).reshape(region.shape)
    view = flat.as_strided(region.shape, region.stride, region.offset)
    memory.write(region, values)
    for place in itertools.product(*map(range, region.shape)):
        flat[region.offset + sum(map(int.__mul__, place, region.stride))] = values[place]
    torch.testing.assert_close(memory.read(region), view, rtol=0, atol=0, equal_nan=True)
    memory.write(region, torch.full(region.shape, 7.0))
    assert bool((memory.read(region) == 7).all())


def test_memory_that_nobody_has_written_is_unknown() -> None:
    memory = ProgramMemory({1: 8})
    part, whole = Region(None, (4,), 1, 2, (1,)), Region(None, (8,), 1, 0, (1,))
    assert memory.read(whole).isnan().all()
    memory.write(part, torch.ones(4))
    assert memory.read(whole).isnan().tolist() == [True] * 2 + [False] * 4 + [True] * 2
    memory.forget([1])
    assert memory.read(whole).isnan().all()


def record(folder: Path) -> runs.Run:
    x = torch.ones(3, 4, requires_grad=True)
    with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
        ((x * 2).t() @ torch.ones(3, 2)).sum().backward()
    return runs.open_run(folder)


def test_a_call_may_write_a_list_of_tensors_and_one_beside_it(tmp_path: Path) -> None:
    gradients, found, scale = [torch.ones(2, 3), torch.ones(2)], torch.zeros(()), torch.tensor(0.5)
    with intercept(runs.RunRecorder(tmp_path, tensors="full"), ops="all"):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, scale)  # of a GradScaler
    step = Program(runs.open_run(tmp_path), 0).steps[0]
    assert [None if each is None else each.shape for each in step.outputs] == [(2, 3), (2,), ()]
    written = {step.inputs[place][1].memory for place in step.written}
    assert [each and each.memory in written for each in step.outputs] == [True] * 3


def test_a_program_has_the_calls_that_compute(tmp_path: Path) -> None:
    program = Program(record(tmp_path / "run"), 0)
    assert [step.stored.record.op for step in program.steps[: program.backward]] == [
        "aten::mul",
        "aten::fill_",
        "aten::mm",
        "aten::sum",
        "aten::ones_like",
    ]
    product, total = program.steps[2], program.steps[3]
    assert program.root == total.number
    (_, left), (_, right) = product.inputs
    made = program.steps[0].outputs[0]
    assert made is not None
    assert (left.memory, left.shape, left.stride) == (made.memory, (4, 3), (1, 4))
    assert right.memory != left.memory
    assert torch.equal(program.value(left), torch.full((4, 3), 2.0))
    (result, *_) = product.compute([torch.ones(4, 3).double(), torch.ones(3, 2).double()])
    assert result is not None
    assert (result.dtype, result.tolist()) == (torch.float64, [[3.0, 3.0]] * 4)
    assert made.memory in last_uses(program.steps)[2]


class Edited:
    """A run whose calls of an operator are edited, as somebody may have written it."""

    def __init__(self, run: runs.Run, op: str, **edits: Any) -> None:
        self.path, self._run, self._op, self._edits = run.path, run, op, edits

    def located(self, rank: int) -> Iterator[tuple[int, StoredCall]]:
        for number, call in self._run.located(rank):
            if call.record.op == self._op:
                func = self._edits.get("func", call.record.func)
                given = dict(call.given or {})
                given |= {"args": self._edits.get("args", given["args"])}
                call = replace(call, given=given, record=replace(call.record, func=func))
            yield number, call

    def load(self, rank: int, name: str) -> torch.Tensor:
        return self._run.load(rank, name)

    def kept(self, rank: int, name: str) -> tuple[int, str]:
        return self._run.kept(rank, name)

    def check_trusted(self) -> None:
        self._run.check_trusted()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"tensor": "0/0", "shape": [4], "memory": [1, 0, "no", False]}, "must say where it lies in memory"),
        ({"tensor": "0/0", "shape": [4], "memory": [1, -1, [1], False]}, "must say where it lies in memory"),
        ({"tensor": "0/0", "shape": [4], "memory": [1, 1 << 40, [1], False]}, "must say where it lies in memory"),
        ({"tensor": "0/0", "shape": [4]}, "must say where it lies in memory"),
        ({"torch": "load"}, "a recorded argument must be a tensor, a number or a dtype, got {'torch': 'load'}"),
        ({"call": "os.system"}, "a recorded argument must be a tensor, a number or a dtype"),
    ],
)
def test_an_argument_is_checked(argument: Any, message: str, tmp_path: Path) -> None:
    edited: Any = Edited(record(tmp_path / "run"), "aten::mul", args=[argument, 2])
    with pytest.raises(OpInterceptError, match=message):
        Program(edited, 0)


@pytest.mark.parametrize("func", ["os.system", "aten.from_file.default", "aten.mul.out"])
def test_only_operators_of_the_recorded_name_are_called(func: str, tmp_path: Path) -> None:
    edited: Any = Edited(record(tmp_path / "run"), "aten::mul", func=func)
    step = next(step for step in Program(edited, 0).steps if step.stored.record.op == "aten::mul")
    assert step.overload in (None, torch.ops.aten.mul.out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": [77, 1 << 32, [2, 1], False]}, r"not be far larger than what was recorded of it, got 4,294,967,3"),
        (
            {"shape": [1 << 20, 1 << 20]},
            r"as large as its recorded values, got the shape \(1048576, 1048576\) for 6 num",
        ),
    ],
)
def test_memory_that_was_not_recorded_is_not_made(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = record(tmp_path / "run")
    given = next(call.given for call in run.calls() if call.record.op == "aten::mm")
    assert given is not None
    edited: Any = Edited(run, "aten::mm", args=[given["args"][0], given["args"][1] | change])
    with pytest.raises(OpInterceptError, match=message):
        Program(edited, 0)


def test_an_output_of_another_size_is_not_computed(tmp_path: Path) -> None:
    program = Program(record(tmp_path / "run"), 0)
    step = program.steps[0]
    with pytest.raises(ValueError, match="an output must have the recorded size"):
        step.compute([torch.ones(30, 40).double()])


@pytest.mark.parametrize("lazy", [False, True])
def test_complex_numbers_are_pairs_of_real_ones(lazy: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    with intercept(runs.RunRecorder(tmp_path, tensors="full"), ops="all"):
        made = torch.view_as_complex((x * 2).unflatten(-1, (4, 2)))
        _ = torch.view_as_real((made.conj() if lazy else made) * made[0]) + 1
    program = Program(runs.open_run(tmp_path), 0)
    *_, product = (step for step in program.steps if step.operator == "mul" and len(step.inputs) == 2)
    if lazy:  # its memory has other numbers
        assert not product.pairs
        return
    assert [region.shape for _, region in product.inputs] == [(3, 4, 2), (4, 2)]
    (found,) = product.compute([program.value(region).double() for _, region in product.inputs])
    real = (x * 2).double().unflatten(-1, (4, 2))
    expected = torch.view_as_real(torch.view_as_complex(real) * torch.view_as_complex(real[0]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    scaled = program.steps[0].outputs[0]
    assert scaled is not None
    assert (scaled.memory, scaled.end) == (product.inputs[0][1].memory, product.inputs[0][1].end)
