"""Hooks that read values in C++ report what they report with torch's operators, field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from native import reading
from numpy_stats import FLOATS
from torch import Tensor

from opintercept import hooks, intercept

pytestmark = [pytest.mark.slow, needs_compiler]


def products() -> None:
    """Products of every dtype and layout, with odd values in some, and of tensors that are not read in C++."""
    generator = torch.Generator().manual_seed(3)
    for dtype in FLOATS:
        for shape in ((3, 5), (40, 40), (300, 260)):
            x = (torch.randn(shape, generator=generator) * 3 + 1).to(dtype)
            x[:, 1] = 0
            for operand in (x, x.t(), x[::2], x[:, ::2], x[:1].expand(7, -1), x[:0]):
                torch.mm(operand, operand.mT)
            if dtype is not torch.float16:
                x[-1, :2] = torch.tensor([float("inf"), float("nan")])
                torch.mm(x, x.mT)
    torch.mm(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))
    phased = torch.randn(4, 4, dtype=torch.complex64, generator=generator)
    torch.mm(phased, phased.conj())
    torch.mm(torch.eye(4).to_sparse(), torch.ones(4, 4))


def both(report: Callable[[], Any]) -> tuple[Any, Any]:
    """What is reported of values that are read in C++, and with torch's operators."""
    with reading(True):
        native = report()
    with reading(False):
        return native, report()


def near(value: Any) -> Any:
    """Floats to the precision that the hooks promise; what is a rounding error of other values, to that."""
    return pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True) if isinstance(value, float) else value


@pytest.mark.parametrize("options", [{}, {"for_dtype": torch.float8_e4m3fn, "histogram": True}], ids=["plain", "all"])
def test_stats_have_the_same_fields(options: dict[str, Any]) -> None:
    def report() -> hooks.Stats:
        found = hooks.Stats(("lhs", "rhs", "output"), **options)
        with intercept(found):
            products()
        return found

    native, expected = both(report)
    assert len(native.rows()) == len(expected.rows()) > 2
    assert native.skipped == expected.skipped
    for one, other in zip(native.rows(), expected.rows(), strict=True):
        for field in dataclasses.fields(one):
            exact = field.name not in ("mean", "std", "rms")
            value, other_value = getattr(one, field.name), getattr(other, field.name)
            assert value == (other_value if exact else near(other_value)), field.name
    if options:
        for operand in ("lhs", "output"):
            assert native.histogram("", operand) == expected.histogram("", operand)


def test_channels_are_the_same() -> None:
    def report() -> list[Tensor]:
        found = hooks.Stats(channels="lhs")
        with intercept(found):
            for shape in ((6, 40), (700, 40)):
                x = torch.arange(float(shape[0] * shape[1])).view(shape)
                for operand in (x, x.view(40, -1).t(), x * float("inf")):
                    torch.mm(operand, torch.ones(40, 2))
        return [found.channels("")]

    native, expected = both(report)
    assert torch.equal(native[0].nan_to_num(-1.0), expected[0].nan_to_num(-1.0))
