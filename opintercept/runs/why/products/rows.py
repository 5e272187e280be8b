"""Compares joined rows of two weights, each beside what its dtype or its quantisation may do to it.

Invariant: equal rows in other dtypes, scaled whole numbers and quantised ones differ by no more than rounding. Imports
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from opintercept._core.tensors import TensorMeta
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.why.quantised import quantised

_HALF = 0.75  # of the distance of two whole numbers, whose scale is an estimate
_FEW = 0.25  # of the rows, which are changed, since quantising changes most
_HAS = "has its weights in ", "has in full the weights that A has in "
_TINY = torch.finfo(torch.float64).tiny
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, slots=True)
class RowErrors:
    """How rows of B differ from those of A."""

    scale: torch.Tensor | None  # of each row of B, where one run's weight is whole numbers, scaled afterwards
    error: torch.Tensor  # of each row, relative to A's
    changed: torch.Tensor  # whether it is more than rounding
    coarser: str = ""  # that one run has the rows in fewer bits, after "B"

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, dtypes: Dtypes, low: torch.Tensor | float, coded: bool) -> RowErrors:
        """Compare rows, `float64[n, k]` each, of which `low` is the part that was added to one side.

        They are compared up to a factor if one side's are `coded`: whole numbers, which the program scales afterwards.
        """
        size = a.nan_to_num(0, 0, 0).abs()
        square = size.square().sum(1).clamp_min(_TINY)
        if coded:
            scale, whole = (a * b).sum(1) / square, is_coded(a)
            scale = scale.where(scale != 0, 1)
            off = b / scale[:, None] - a
            changed = (off.abs() > _HALF * (1.0 if whole else 1 / scale.abs()[:, None])).any(1)
            return cls(scale, off.norm(dim=1) / square.sqrt(), changed, _HAS[whole] + "a grid of int8 or int4")
        dtypes, off = (
            (_held_in(a, dtypes[0]), _held_in(b, dtypes[1])),
            (b - a).where((a != b) & ~(a.isnan() & b.isnan()), 0),
        )
        eps, usual = [eps_of(each) for each in dtypes], (square / a.size(1)).sqrt()[:, None]
        allowed = 2 * (eps[0] if eps[0] == eps[1] else min(eps)) * torch.maximum(size + low, usual)
        coarser = ""
        if eps[0] != eps[1]:
            coarser = _HAS[eps[0] > eps[1]] + str(max(dtypes, key=eps_of)).removeprefix("torch.")
        if coarser or isinstance(low, torch.Tensor):  # merged in the coarser dtype, which has no smaller numbers
            least = max(torch.finfo(each).smallest_normal * eps_of(each) for each in dtypes if each.is_floating_point)
            allowed = allowed + max(eps) * 0.505 * (size + 2 * low) + least
        changed = ~(off.abs() <= allowed).all(1)
        if float(changed.double().mean()) > _FEW:
            for finer, (one, other) in enumerate(((a, b), (b, a))):
                bits, wrong = quantised(one, other)
                if bits:
                    changed, coarser = wrong, _HAS[finer] + bits
                    break
        return cls(None, (off.norm(dim=1) / square.sqrt()).nan_to_num(torch.inf), changed, coarser)


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
