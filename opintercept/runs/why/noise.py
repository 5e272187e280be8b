"""`Spread`: how far rounding may move values that a program computes, as perturbed replays of it show.

Invariant: no bound depends on the values that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from opintercept.runs.why.layouts import Layout

LIMIT = 6.0
"""How many times its noise a row may be off: where nothing is planted, rows are off by 3 at most."""
MASKED = -9e3
"""Scores up to this one are masked: programs write -1e4, -1e9, the least number of a dtype or minus infinity."""
UNIFORM = 3**-0.5
"""The standard deviation of a number between -1 and 1."""
_SURE = 32  # numbers that tell the noise of a row; narrower rows have that of the whole tensor at least
_FEW = 3.0  # times the noise that so few numbers show, for a tensor that has no more
_LEAST = 1.0  # unit roundoffs of the mean modulus: what cancels to nothing is off by what it was
_PIECE = 1 << 20  # numbers that are compared at once
_MANY = 1 << 16  # numbers of which to read all takes longer than to look for a few
_PROBED = 4  # rows that are looked at first
_SCALED = 8  # the least power of two that is the scale of a loss, as scales of float16 begin with 16
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
        self._square: torch.Tensor | None = None
        if others:
            self._square = torch.zeros_like(base)
            for each in others:
                self._square += (each - base).nan_to_num_(0, 0, 0).square_() / len(others)
            if self._finite is not base:
                self._square[base <= MASKED] = 0.0
        self._count = max(len(others), 1)
        self._rows: dict[float, torch.Tensor] = {}
        self._usual: dict[float, float] = {}
        self._std: float | None = None

    def part(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Spread:
        """Some of the values, with their noise."""
        found = Spread(of(self.base), (), self._unit)
        found._square, found._count = None if self._square is None else of(self._square), self._count
        return found

    def rows(self, unit: float) -> torch.Tensor:
        """The noise of each row if B holds the values in a dtype of this unit roundoff, `float64[..., 1]`."""
        if unit not in self._rows:
            square = (min(unit, self._unit) * UNIFORM * self._finite).square_()
            if self._square is not None:
                torch.maximum(self._square, square, out=square)
            rows = square.mean(-1, keepdim=True) if square.dim() else square
            if not square.dim() or self._count * square.shape[-1] < _SURE:
                rows = rows.clamp_min(float(square.mean()) if square.numel() else 0.0)
            if self._count * square.numel() < _SURE:
                rows = rows * _FEW**2
            size = float(torch.linalg.vector_norm(self._finite, 1)) / max(square.numel(), 1)
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

    def misses(self, other: torch.Tensor, layout: Layout, unit: float) -> bool:
        """Whether some rows tell that others, in a layout, are none of these values; to read all takes far longer."""
        width = self.base.shape[-1] if self.base.dim() else 1
        count = self.base.numel() // width
        if self.base.numel() < _MANY or count < 4 * _PROBED:
            return False
        rows = torch.arange(_PROBED) * (count - 1) // (_PROBED - 1)
        places = rows[:, None] * width + torch.arange(width)
        own, noise = self.base.reshape(-1, width)[rows], self.rows(unit).reshape(-1, 1)[rows]
        return not ratio(own, layout.at(other, places), noise) <= LIMIT

    def ratio(self, other: torch.Tensor, unit: float) -> float:
        """How far the worst row of other values is off, in units of its noise."""
        return ratio(self.base, other, self.rows(unit))


def unmasked(values: torch.Tensor) -> torch.Tensor:
    """The values with 0 for what is masked or not finite, whose rounding would drown all others."""
    if not values.numel() or (float(values.min()) > MASKED and float(values.max()) < math.inf):
        return values
    found = values.nan_to_num(0.0, 0.0, 0.0)
    return torch.where(found <= MASKED, 0.0, found)


def unscaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """B's gradients without the power of two by which one trainer scales its loss: what undoes it is no product."""
    power = round(math.log2(norm_ratio(a, b)))
    return b / 2**power if abs(power) >= _SCALED else b


def norm_ratio(a: torch.Tensor, b: torch.Tensor) -> float:
    """How many times as large one tensor is as another; 1 where that cannot be told."""
    found = float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(a))
    return found if math.isfinite(found) and found else 1.0


def apart(x: torch.Tensor, y: torch.Tensor) -> float:
    """The square of the distance of two tensors, but for what is no number in one of them."""
    parts = zip(x.reshape(-1).split(_PIECE), y.reshape(-1).split(_PIECE), strict=True)
    return math.fsum(float((one - other).nan_to_num_(0, 0, 0).square_().sum()) for one, other in parts)


def ratio(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> float:
    """How far the worst row of `y` is off from `x`, in units of noise; infinite where only one is a number."""
    if x.shape != y.shape:
        return math.inf
    if not x.numel():
        return 0.0
    if x.dim() and x.numel() <= _PIECE:
        return _ratio(x, y, rows)
    width = x.shape[-1] if x.dim() else 1
    noise = rows.expand(*x.shape[:-1], 1).reshape(-1, 1)
    parts = (each.split(max(_PIECE // width, 1)) for each in (x.reshape(-1, width), y.reshape(-1, width), noise))
    return max(_ratio(*each) for each in zip(*parts, strict=True))


def _ratio(x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor) -> float:
    same = (x == y) | ((x <= MASKED) & (y <= MASKED)) | ~(x.isfinite() | y.isfinite())
    square = (x - y).square_().nan_to_num_(math.inf, math.inf, math.inf).masked_fill_(same, 0.0)
    found = float((square.mean(-1, keepdim=True).sqrt_() / rows).max())
    return found if found == found else math.inf
