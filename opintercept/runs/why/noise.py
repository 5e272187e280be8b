"""`Spread`: how far rounding may move values that a program computes, as perturbed replays of it show.

Invariant: no bound depends on the values that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

LIMIT = 6.0
"""How many times its noise a row may be off: where nothing is planted, rows are off by 3 at most."""
MASKED = -9e3
"""Scores up to this one are masked: programs write -1e4, -1e9, the least number of a dtype or minus infinity."""
UNIFORM = 3**-0.5
"""The standard deviation of a number between -1 and 1."""
_SURE = 32  # numbers that tell the noise of a row; narrower rows have that of the whole tensor at least
_FEW = 3.0  # times the noise that so few numbers show, for a tensor that has no more
_LEAST = 1.0  # unit roundoffs of the mean modulus: what cancels to nothing is off by what it was
_TOLD = 0.2  # of its spread that the noise of a tensor may be, if its values are to tell it from others


class Spread:
    """Values of A, and the root mean square of the noise of their rows.

    Args:
        base: The values, `float64[..., n]`.
        others: What perturbed replays have made in their place.
        unit: The unit roundoff of the coarser program.
    """

    def __init__(self, base: torch.Tensor, others: Sequence[torch.Tensor], unit: float) -> None:
        self.base, self._unit = base, unit
        self._finite = unmasked(base)
        self._square = torch.zeros_like(base)
        for each in others:
            self._square += (each - base).nan_to_num(0, 0, 0).square() / len(others)
        if others:
            self._square[base <= MASKED] = 0.0
        self._count = max(len(others), 1)
        self._rows: dict[float, torch.Tensor] = {}
        self._usual: dict[float, float] = {}
        self._std: float | None = None

    def rows(self, unit: float) -> torch.Tensor:
        """The noise of each row if B holds the values in a dtype of this unit roundoff, `float64[..., 1]`."""
        if unit not in self._rows:
            own = (min(unit, self._unit) * UNIFORM * self._finite).square()
            square = torch.maximum(self._square, own)
            rows = square.mean(-1, keepdim=True) if square.dim() else square
            if not square.dim() or self._count * square.shape[-1] < _SURE:
                rows = rows.clamp_min(float(square.mean()) if square.numel() else 0.0)
            if self._count * square.numel() < _SURE:
                rows = rows * _FEW**2
            size = float(self._finite.abs().mean()) if square.numel() else 0.0
            self._rows[unit] = rows.sqrt().clamp_min(max(_LEAST * self._unit * size, 1e-150))
        return self._rows[unit]

    def usual(self, unit: float) -> float:
        """The root mean square of the noise of all values."""
        if unit not in self._usual:
            rows = self.rows(unit)
            self._usual[unit] = float(rows.square().mean().sqrt()) if self.base.numel() else 0.0
        return self._usual[unit]

    def tells(self, unit: float) -> bool:
        """Whether the values are far enough apart that rounding does not make them others'."""
        if self._std is None:
            self._std = float(self._finite.std()) if self.base.numel() > 1 else math.inf
        return self.usual(unit) <= _TOLD * self._std

    def ratio(self, other: torch.Tensor, unit: float) -> float:
        """How far the worst row of other values is off, in units of its noise."""
        return ratio(self.base, other, self.rows(unit))


def unmasked(values: torch.Tensor) -> torch.Tensor:
    """The values with 0 for what is masked or not finite, whose rounding would drown all others."""
    found = values.nan_to_num(0.0, 0.0, 0.0)
    return torch.where(found <= MASKED, 0.0, found) if found.numel() and float(found.min()) <= MASKED else found


def ratio(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> float:
    """How far the worst row of `y` is off from `x`, in units of noise; infinite where only one is a number."""
    if x.shape != y.shape:
        return math.inf
    if not x.numel():
        return 0.0
    same = (x == y) | ((x <= MASKED) & (y <= MASKED)) | ~(x.isfinite() | y.isfinite())
    square = (x - y).square().nan_to_num(math.inf, math.inf, math.inf).where(~same, 0.0)
    found = float(((square.mean(-1, keepdim=True) if square.dim() else square).sqrt() / rows).max())
    return found if found == found else math.inf
