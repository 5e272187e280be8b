"""Bounds of rounding hold what kernels do, and not ten times that."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from opintercept._values import rounding

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 16, 1000])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_a_product_is_within_its_rounding(biased: bool, k: int, dtype: torch.dtype) -> None:
    x, w, b = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((8, k), (12, k), (12,)))
    bias = b if biased else None
    wide = None if bias is None else bias.double()
    exact = linear(x.double(), w.double(), wide)
    bound = rounding.of_product(x.double(), w.double().mT, exact, dtype, dtype, wide)
    out = linear(x, w, bias)
    assert bool(((out - exact).abs() <= bound).all())
    assert bool((bound <= 4 * torch.finfo(dtype).eps * exact.abs().amax() + 1e-4 * k).all())
    assert bool(((out + 3 * bound - exact).abs() > bound).all())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_an_attention_is_within_its_rounding(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, 40, 16).to(dtype) for _ in range(3))
    wide = [each.double() for each in (q, k, v)]
    scores, sizes = wide[0] @ wide[1].mT / 4, wide[0].abs() @ wide[1].abs().mT / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1)
    bound = rounding.of_attention(scores, sizes, weights, wide[2], 16, dtype, dtype)
    error = (scaled_dot_product_attention(q, k, v, is_causal=causal) - weights @ wide[2]).abs()
    assert bool((error <= bound).all())
    assert float(bound.mean()) < 16 * torch.finfo(dtype).eps + 2e-5


def test_whole_numbers_do_not_round() -> None:
    x, w = torch.randint(-9, 9, (3, 5)), torch.randint(-9, 9, (5, 4))
    exact = (x @ w).double()
    assert not rounding.of_product(x.double(), w.double(), exact, torch.int8, torch.int32).any()
