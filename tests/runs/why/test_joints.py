"""Tensors of one program among those of another, by their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opintercept import intercept, runs
from opintercept._values import rounding
from opintercept.runs.program.program import Program
from opintercept.runs.why.joints import Joints
from opintercept.runs.why.layouts import layouts
from opintercept.runs.why.noise import LIMIT, Spread

UNIT = rounding.unit(torch.float32)


def joints_of(folder: Path, program: Callable[[], object]) -> Joints:
    with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
        program()
    recorded = Program(runs.open_run(folder), 0)
    return Joints(recorded, recorded.steps)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def all_layouts(values: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """The values in each order of the dimensions of either shape, in the plain way."""
    found = [values.permute(order).reshape(shape) for order in itertools.permutations(range(values.dim()))]
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(place) for place in range(len(order))]
        found.append(values.reshape([shape[place] for place in order]).permute(back))
    return found


@given(st.permutations([1, 2, 3, 4]), st.sampled_from([(24,), (4, 6), (6, 4), (2, 3, 4), (3, 1, 8)]))
def test_layouts_are_the_orders_of_either_shape_each_once(own: list[int], shape: tuple[int, ...]) -> None:
    values = torch.arange(24).reshape(own)
    found = [layout.laid(values, shape) for layout in layouts(tuple(own), shape)]
    assert torch.equal(found[0], values.reshape(shape))
    texts = [str(each.tolist()) for each in found]
    assert len({*texts}) == len(texts)
    assert {*texts} == {str(each.tolist()) for each in all_layouts(values, shape)}
    places = torch.tensor([0, 5, 23])
    for layout, each in zip(layouts(tuple(own), shape), found, strict=True):
        assert torch.equal(layout.at(values, places), each.reshape(-1)[places])


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_a_tensor_is_found_in_another_layout(order: tuple[int, ...], tmp_path: Path) -> None:
    x = drawn(0, 20, 50, 80)
    joints = joints_of(tmp_path, lambda: x.permute(order).contiguous() * 2)
    found = joints.find(Spread(2 * x.double(), (), UNIT))
    assert found is not None
    assert found.whole
    assert torch.equal(found.values, 2 * x.double())


@pytest.mark.parametrize("row", [0, 17, 299])
def test_one_row_that_is_off_is_seen(row: int, tmp_path: Path) -> None:
    x = drawn(0, 300, 256)
    joints = joints_of(tmp_path, lambda: x * 2)
    base = 2 * x.double()
    assert joints.find(Spread(base, (), UNIT), by_rows=False) is not None
    base[row] += 20 * UNIT * base.abs().max()
    assert joints.find(Spread(base, (), UNIT), by_rows=False) is None


def test_the_makers_of_pieces_are_as_few_as_have_all_rows(tmp_path: Path) -> None:
    x = drawn(0, 6, 16)

    def program() -> None:
        for row in range(6):
            torch.cat([drawn(row + 1, 3, 16), x[row : row + 1] * 2])  # has a row of it by chance
        for part in x.split(3):
            part * 2

    joints = joints_of(tmp_path, program)
    found = joints.find(Spread(2 * x.double(), (), UNIT))
    assert found is not None
    assert torch.equal(found.values, 2 * x.double())
    outputs = [joints.program.steps[number].outputs[0] for number in sorted(found.makers)]
    assert [each and each.shape for each in outputs] == [(3, 16)] * 2


def test_rows_of_a_few_numbers_are_found_together(tmp_path: Path) -> None:
    x = drawn(0, 3, 6, 4)
    joints = joints_of(tmp_path, lambda: [row[None] * 2 for row in x])
    found = joints.find(Spread(2 * x.double(), (), UNIT))
    assert found is not None
    assert torch.equal(found.values, 2 * x.double())
    base = 2 * x.double()
    base[2, 3] += 20 * UNIT * base.abs().max()
    assert joints.find(Spread(base, (), UNIT)) is None


def test_a_sample_of_one_row_is_found_in_a_batch(tmp_path: Path) -> None:
    x = drawn(0, 5, 16)
    joints = joints_of(tmp_path, lambda: x * 2)
    found = joints.find(Spread(2 * x[3:4].double(), (), UNIT))
    assert found is not None
    assert (found.whole, torch.equal(found.values, 2 * x[3:4].double())) == (False, True)


def test_a_row_that_is_off_is_not_lost_in_all_that_is_too_narrow(tmp_path: Path) -> None:
    x = drawn(0, 200, 4)
    joints = joints_of(tmp_path, lambda: x * 2)
    base = 2 * x.double()
    base[100] += 8 * UNIT * base.abs().max()
    assert joints.find(Spread(base, (), UNIT)) is None


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (1, 1 << 21), ((1 << 21) + 3, 1)])
def test_the_ratio_of_large_tensors_is_that_of_their_rows(shape: tuple[int, ...]) -> None:
    base = torch.linspace(1, 2, math.prod(shape), dtype=torch.float64).reshape(shape)
    spread = Spread(base, (), UNIT)
    assert spread.ratio(base, UNIT) == 0
    other = base.clone().reshape(-1)
    other[-1] = torch.nan
    assert spread.ratio(other.reshape(shape), UNIT) == math.inf
    far = base + 100 * UNIT * (1 if not base.dim() else base.shape[-1] ** 0.5)
    assert spread.ratio(far, UNIT) > LIMIT
