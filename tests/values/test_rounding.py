"""Bounds of rounding: they hold for what kernels compute, and are not much too large."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import linear, scaled_dot_product_attention

from opintercept._values import rounding
from opintercept._values.rounding import noise, of_adding, operand_roundings, unit, widened

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


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_a_copy_in_float64_is_one_of_numbers_that_round() -> None:
    x, mask = torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bool)
    assert [widened(each).dtype for each in (x, x.double(), mask)] == [torch.float64, torch.float64, torch.bool]
    double = x.double()
    widened(double).zero_()
    assert double.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function",
    [lambda x: x * 3, torch.exp, lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.softmax(-1)],
    ids=["mul", "exp", "norm", "softmax"],
)
def test_noise_is_about_what_the_roundoff_of_the_operands_makes(
    function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    x = drawn(6, 64).to(dtype)
    exact = function(x.double())
    found = noise(lambda change: function(change(x)), exact)
    rounded = (function(x.double() * (1 + unit(dtype))) - exact).abs()
    assert found.shape == exact.shape
    assert bool((found > 0).all())
    # Errors of one sign cancel in a norm, those of both do not.
    assert float(rounded.mean()) < 3 * float(found.mean())
    assert float(found.max()) < 40 * unit(dtype) * float(exact.abs().max())
    assert torch.equal(found, noise(lambda change: function(change(x)), exact))


def test_operands_that_are_rounded_first_make_more_noise() -> None:
    x = drawn(4, 32)
    small, large = (noise(lambda change: change(x) * 2, 2 * x.double(), least) for least in (0.0, 2.0**-8))
    assert torch.allclose(large, small * 2.0**16, rtol=1e-6)


def test_a_sum_of_numbers_one_after_the_other_is_within_its_bound() -> None:
    x = drawn(64, 4096)
    total = torch.zeros(64)
    for column in x.unbind(1):
        total = total + column
    exact = x.double().sum(1)
    error = (total - exact).abs().max()
    bound = of_adding(4096) * noise(lambda change: change(x).sum(1), exact)
    assert bool(((total - exact).abs() <= bound).all())
    assert float(bound.max()) < 100 * error


@pytest.mark.parametrize(
    ("change", "roundings"),
    [
        (lambda x: x, 0.0),
        (lambda x: x.bfloat16(), 1.0),
        (lambda x: x.double(), 0.0),
        (lambda x: x.reshape(-1), math.inf),
        (lambda x: x / 0, math.inf),
        (lambda x: x.int(), math.inf),
    ],
    ids=["equal", "narrower", "wider", "another shape", "infinite", "integers"],
)
def test_operands_are_apart_in_unit_roundoffs_of_a_row(
    change: Callable[[torch.Tensor], torch.Tensor], roundings: float
) -> None:
    x = drawn(5, 16)
    found = operand_roundings(x, change(x))
    assert found == roundings or 0.3 < found <= roundings < 2


def test_each_row_of_an_operand_has_its_own_size() -> None:
    x = torch.tensor([[1.0, 1.0], [1e-6, 1e-6]])
    y = x.clone()
    y[1, 0] += 1e-9
    assert operand_roundings(x, y) == pytest.approx(1e-3 / 2.0**-24, rel=1e-3)
    nan = torch.tensor([[math.nan, 1.0]])
    assert operand_roundings(nan, nan.clone()) == 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_operands_without_numbers_are_equal(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert operand_roundings(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) == 0
    assert operand_roundings(torch.empty(shape), torch.empty(*shape, 1)) == math.inf
