"""Rows of weights: how far the levels of quantised ones are apart."""

from __future__ import annotations

import pytest
import torch

from opintercept.runs.why.joining.rows import step_of
from opintercept.runs.why.quantised import quantised


@pytest.mark.parametrize("bits", [4, 8])
def test_the_step_of_a_quantised_row_is_found(bits: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 512)
    steps = rows.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    found = step_of(((rows / steps).round() * steps).double())
    assert found == pytest.approx(steps[:, 0].double(), rel=1e-5)  # of float32
    assert not step_of(rows.double()).any()


@pytest.mark.parametrize("large", [[5.0], [0.7, -0.7, 5.0]])
def test_a_row_of_few_levels_besides_zero_is_quantised(large: list[float]) -> None:
    torch.manual_seed(0)
    rows = torch.randn(8, 512) * 0.01
    rows[3, 400 : 400 + len(large)] = torch.tensor(large)  # beyond the first elements
    steps = rows.abs().amax(1, keepdim=True) / 7
    bits, wrong = quantised(rows.double(), ((rows / steps).round() * steps).double())
    assert (bits, wrong.any().item()) == ("a grid of int8 or int4", False)


def test_a_row_of_one_number_is_on_the_grid_of_the_others() -> None:
    torch.manual_seed(0)
    rows = torch.randn(64, 2)
    rows[5] = torch.tensor([0.5, 0.501])
    steps = rows.abs().amax(1, keepdim=True) / 127
    others = ((rows / steps).round() * steps).double()
    assert others[5, 0] == others[5, 1]
    bits, wrong = quantised(rows.double(), others)
    assert (bits, wrong.any().item()) == ("a grid of int8 or int4", False)
    others[5] *= 1.5
    assert quantised(rows.double(), others)[1].nonzero().tolist() == [[5]]


def test_rows_of_one_element_are_quantised_by_none() -> None:
    rows = torch.randn(16, 1).double()
    bits, _ = quantised(rows, rows * 1.1)
    assert bits == ""
