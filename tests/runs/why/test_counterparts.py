"""Which tensor of B a call of A would make, and in which layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opintercept import intercept, runs
from opintercept.runs.why.counterparts import nearest

SEEDS = range(20)


def _drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def why(folder: Path, a: Callable[[], Any], b: Callable[[], Any]) -> runs.Answer:
    recorded = []
    for name, program in (("a", a), ("b", b)):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, tensors="full"), ops="all"):
            program()
        recorded.append(runs.open_run(folder / name))
    return runs.why(*recorded)


@pytest.mark.parametrize("seed", SEEDS)
def test_nearest_keeps_the_order_of_values_that_are_alike_in_none(seed: int) -> None:
    values, like = _drawn(seed, 6, 6), _drawn(seed + 100, 6, 6)
    assert torch.equal(nearest(values, like), values)


@pytest.mark.parametrize("seed", SEEDS)
def test_nearest_keeps_the_order_where_only_masks_differ(seed: int) -> None:
    like = _drawn(seed, 6, 6)
    values = like.masked_fill(torch.ones(6, 6).tril(-1).bool(), -1e9)
    assert torch.equal(nearest(values, like.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)), values)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(6, 6), (2, 3, 4), (2, 300, 16)])
def test_nearest_finds_the_order_of_noisy_values(seed: int, shape: tuple[int, ...]) -> None:
    like = _drawn(seed, *shape)
    values = (like + 0.3 * _drawn(seed + 100, *shape)).transpose(0, 1)
    assert torch.equal(nearest(values.contiguous(), like), values.transpose(0, 1))
    flat = values.reshape(-1, shape[-1]) if len(shape) == 3 else values
    last = len(shape) == 3
    assert torch.equal(nearest(flat.contiguous(), like, keep_last=last), values.transpose(0, 1))


def test_a_wrong_bias_that_b_adds_in_the_next_call_is_one_cause(tmp_path: Path) -> None:
    one, two, x = nn.Linear(16, 16), nn.Linear(16, 8), _drawn(0, 6, 16).float()
    bias = nn.Parameter(one.bias + 3 * _drawn(1, 16).float())

    found = why(tmp_path, lambda: two(one(x).tanh()), lambda: two((x @ one.weight.T + bias).tanh()))
    (cause,) = found.causes
    assert cause.kind == "weight"
    assert "bias" in cause.what


def test_products_of_the_same_operand_are_told_apart(tmp_path: Path) -> None:
    layer, x = nn.Linear(16, 8), _drawn(0, 6, 16).float()

    def turned(base: float, sin_first: bool) -> Callable[[], Any]:
        def program() -> Tensor:
            y = layer(x)
            angles = torch.arange(6)[:, None] * base ** -(torch.arange(8) / 8)
            sin, cos = angles.sin(), angles.cos()
            one = y * sin if sin_first else y * cos
            other = y * cos if sin_first else y * sin
            return torch.cat((other, one) if sin_first else (one, other))

        return program

    found = why(tmp_path, turned(100.0, False), turned(90.0, True))
    assert [cause.what for cause in found.causes] == ["uses 90 where A uses 100"]
