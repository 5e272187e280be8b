"""Recognises weights and products that are those of another run in fewer bits. Imports torch."""

from __future__ import annotations

import torch

from opintercept._values import rounding
from opintercept.runs.why.joining.rows import gaps_of, grid_of

_HALF = 0.55  # of the distance of two levels that a rounded number may be off
_SLACK = 1e-6  # of the largest number, which scales of their own may move
_COARSEST = 1 / 7  # of the largest number of a row that a step of four bits is
_VALUES = 256  # that numbers of eight bits have
_STEPS = 127  # of eight bits from 0 to the largest number


def quantised(a: torch.Tensor, b: torch.Tensor) -> tuple[str, torch.Tensor]:
    """How the rows `b` are those of `a` in fewer bits, in words, and which rows are not.

    Args:
        a: The rows, `float64[n, k]`.
        b: The same rows, as the other run has them.

    Returns:
        `"bfloat16"`, `"a grid of int8 or int4"`, `"few levels"` or `"float8"`, empty if most rows are not; and a flag
        for each row that is off by more than that.
    """
    off, size = (a - b).abs(), a.abs().max() * _SLACK
    nothing = torch.zeros(len(a), dtype=torch.bool)
    if not bool(off.any()):
        return "", nothing
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(b.to(dtype).double(), b):
            wrong = (off > 1.01 * rounding.unit(dtype) * a.abs() + size * 1e-3).any(1)
            if float(wrong.double().mean()) <= 0.25:
                return str(dtype).removeprefix("torch."), wrong
    for levels, name in ((grid_of, "a grid of int8 or int4"), (gaps_of, "few levels")):
        apart, largest = levels(b), b.abs().amax(1, keepdim=True)
        told = (apart / largest)[(apart > 0).all(1)]
        if len(told):  # a row of one number tells no step, which may be that of others
            apart = apart.maximum(largest * told.median().clamp_max(_COARSEST) * (b == b[:, :1]).all(1, keepdim=True))
        plain = (apart <= 0).any(1)  # as where a row is 0 in both
        wrong = (plain & off.any(1)) | (off > _HALF * apart + size).any(1)
        if float((plain | wrong).double().mean()) <= 0.25:
            return name, wrong
    if len(b.unique()) <= _VALUES < b.numel():
        wrong = (off > 2.0**-4 * b.abs() + b.abs().max() / 2**14).any(1)
        if float(wrong.double().mean()) <= 0.25:
            return "float8", wrong
    return "", nothing


def eight_bits(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """How far operands of eight bits bring the columns of a product, `float64[n]`.

    Args:
        x: The left operand, `float64[m, k]`.
        rows: The rows of the weight, `float64[n, k]`.
    """
    step_x = (x.max() - x.min()).abs().clamp_min(x.abs().max()) / _STEPS
    step_w = rows.abs().max() / _STEPS
    variance = (step_x.square() * rows.square().sum(1) + step_w.square() * x.square().sum(1).max()) / 12
    return rounding.SIGMA * variance.sqrt() + step_x * step_w
