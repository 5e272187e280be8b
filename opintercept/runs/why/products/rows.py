"""Compares joined rows of two weights, each beside what its dtype or its quantisation may do to it.

Invariant: equal rows in other dtypes, scaled whole numbers and quantised ones differ by no more than rounding. Imports
torch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from opintercept._core.tensors import TensorMeta
from opintercept._values import rounding
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.why.weights import gaps_of, grid_of

_SCALE = 0.01  # the error of the scale of a block, which may be quantised itself
_PIECE = 1 << 20  # elements that are compared at once
_HALF = 1.05 / 16  # of the distance of numbers of four significant bits, those of the coarser dtype of 8 bits
_SIGNIFICANDS = 16  # that rows have at most which were scaled and rounded to 8 bits: of the 8, few are rounded twice
_TINY = torch.finfo(torch.float64).tiny
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, slots=True)
class RowErrors:
    """How rows of B differ from those of A."""

    dtypes: Dtypes  # the coarsest that have all values
    scale: torch.Tensor | None  # of each row of B, where one run's weight is whole numbers, scaled afterwards
    error: torch.Tensor  # of each row, relative to A's
    changed: torch.Tensor  # whether it is more than rounding
    quantised: tuple[bool, bool]  # whether rows of A, and of B, are only within half a step of each other

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, dtypes: Dtypes, low: torch.Tensor | float, coded: bool) -> RowErrors:
        """Compare rows, `float64[n, k]` each, of which `low` is the part that was added to one side.

        They are compared up to a factor if one side's are `coded`: whole numbers, which the program scales afterwards.

        An element may be off by a rounding in its dtype, or by half a step of a quantised row; and the errors of a row
        must not all go the same way: their sum is within `SIGMA` standard deviations of independent errors.
        """
        dtypes = _held_in(a, dtypes[0]), _held_in(b, dtypes[1])
        size = max(1, _PIECE // max(1, a.size(1)))
        lows = low.split(size) if isinstance(low, torch.Tensor) else itertools.repeat(low)
        parts = [
            cls._of(x, y, dtypes, each, coded) for x, y, each in zip(a.split(size), b.split(size), lows, strict=False)
        ]
        return cls(
            dtypes=dtypes,
            scale=torch.cat([each.scale for each in parts if each.scale is not None]) if coded else None,
            error=torch.cat([each.error for each in parts]),
            changed=torch.cat([each.changed for each in parts]),
            quantised=(any(each.quantised[0] for each in parts), any(each.quantised[1] for each in parts)),
        )

    @classmethod
    def _of(cls, a: torch.Tensor, b: torch.Tensor, dtypes: Dtypes, low: torch.Tensor | float, coded: bool) -> RowErrors:
        if not coded and torch.equal(a, b):
            return cls(dtypes, None, a.new_zeros(len(a)), torch.zeros(len(a), dtype=torch.bool), (False, False))
        square = (a * a).sum(1).clamp_min(_TINY)
        scale = (a * b).sum(1) / square if coded else None
        if scale is not None:
            b = b / scale.where(scale != 0, 1)[:, None]
        difference, size = b - a, a.abs()
        usual = (square / a.size(1)).sqrt()[:, None]
        fine, coarse = sorted(map(eps_of, dtypes))
        allowed = 2 * (coarse if fine == coarse else fine) * torch.maximum(size + low, usual)
        if fine != coarse or isinstance(low, torch.Tensor):
            allowed = allowed + coarse * 0.505 * (size + 2 * low) + _smallest(dtypes)  # merged in the coarser dtype
        steps = torch.zeros(2, len(a), dtype=torch.float64)
        wrong = (difference.abs() > allowed).any(1) & ((difference != 0).double().mean(1) > 0.5)
        if wrong.any():  # quantising moves most elements, and puts one side's on a grid
            grids = [grid_of(each[wrong]) for each in (a, b)]
            alone = ((grids[0] == 0) | (grids[1] == 0)).all(1, keepdim=True)
            allowed[wrong] += (0.51 if scale is None else 0.75) * _alone(grids, alone, steps, wrong)  # for an estimate
            left = wrong & (steps.amax(0) == 0)
            if scale is None and bool(left.any()):
                gaps = [gaps_of(each[left]) for each in (a, b)]
                gap = _alone(gaps, (gaps[0] == 0) | (gaps[1] == 0), steps, left)
                allowed[left] += torch.where(gap > 0, 0.51 * gap + _SCALE * size[left], 0.0)
            wrong &= (difference.abs() > allowed).any(1)
            short = torch.stack([_is_short(each) & wrong for each in (a, b)])
            steps[short & ~short.flip(0)] = 1.0
            allowed += _HALF * size * (short[0] ^ short[1])[:, None]
        together = (difference * a).sum(1).abs()
        drawn = rounding.SIGMA / math.sqrt(3) * (allowed * a).square().sum(1).sqrt()
        changed = (difference.abs() > allowed).any(1) | ((together > drawn) & (steps.amax(0) == 0))
        one, other = ((steps > 0) & ~changed).any(1).tolist()
        return cls(dtypes, scale, difference.norm(dim=1) / square.sqrt(), changed, (one, other))


def _alone(pair: list[torch.Tensor], alone: torch.Tensor, steps: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The steps of the side that has some, where it is `alone` in that; `steps` keeps the largest of each of `rows`."""
    own = torch.stack(pair).where(alone, 0)
    steps[:, rows] = own.amax(2)
    return own.amax(0)


def _is_short(rows: torch.Tensor) -> torch.Tensor:
    """Whether each of `[n, k]` has numbers of few significands, as of a scaled floating point dtype of 8 bits."""
    found = (rows.abs().frexp().mantissa * 512).round().sort(1).values
    return (rows.size(1) > 2 * _SIGNIFICANDS) & ((found.diff(dim=1) > 1).sum(1) < _SIGNIFICANDS)


def eps_of(dtype: torch.dtype) -> float:
    """How far apart numbers of a dtype are, relative to their size; 0 for whole numbers of more than a byte."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 2.0**-7 if dtype.itemsize == 1 else 0.0


def dtype_of(call: StoredCall, role: str) -> torch.dtype:
    """The dtype of an operand or output of a call; float32 if it is not known."""
    meta = getattr(call.record, role)
    found = getattr(torch, meta.dtype, None) if isinstance(meta, TensorMeta) else None
    return found if isinstance(found, torch.dtype) else torch.float32


def is_coded(w: torch.Tensor) -> bool:
    """Whether a weight is whole numbers but for a few rows."""
    rows = w.reshape(-1, w.size(-1))
    return float((rows == rows.round()).all(1).double().mean()) > 0.5 if w.is_floating_point() else True


def _held_in(rows: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The coarsest dtype that has all values, as of a router whose weight a bfloat16 model widens; else their own."""
    for each in (torch.bfloat16, torch.float16):
        if 0 < eps_of(dtype) < torch.finfo(each).eps and bool((rows.to(each).double() == rows).all()):
            return each
    return dtype


def _smallest(dtypes: Dtypes) -> float:
    """The largest error of a number that is too small for one of these dtypes."""
    found = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point]
    return max((each.tiny * each.eps for each in found), default=0.0)
