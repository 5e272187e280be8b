"""Tensors of any bits, shape and strides, and the figures of their values that NumPy computes in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from opintercept._native import values

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.mT if t.dim() > 1 else t,
    "reversed": lambda t: t.permute([*reversed(range(t.dim()))]),
    "moved": lambda t: t.movedim(0, -1) if t.dim() else t,
    "every other one": lambda t: t[..., ::2] if t.dim() else t,
    "every third row": lambda t: t[::3] if t.dim() else t,
    "without the first": lambda t: t[1:] if t.dim() else t,
    "a column": lambda t: t[..., :1] if t.dim() else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "expanded last": lambda t: t[..., None].expand(*t.shape, 4),
    "a diagonal": lambda t: t.diagonal(dim1=-2, dim2=-1) if t.dim() > 1 else t,
    "windows": lambda t: t.unfold(-1, 2, 1) if t.dim() and t.shape[-1] > 1 else t,
    "a parameter": lambda t: torch.nn.Parameter(t.clone()),
}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits: NaN, infinite and subnormal values among them; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Values around a mean, a tenth of them zero."""
    generator = torch.Generator().manual_seed(seed)
    mean = (0.0, 0.3, 1e3)[seed % 3]
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64) + mean
    return (tensor * (torch.rand(shape, generator=generator) > 0.1)).to(dtype)


def assert_sums_are(found: values.Found, array: np.ndarray) -> None:
    """Compare with NumPy: counts and range exactly, the total to the rounding of a sum in float64."""
    (count, finite, nan, nonzero, *_, total, spread), below, high, *_ = found
    kept = array[np.isfinite(array)]
    assert (count, finite, nan) == (array.size, kept.size, np.isnan(array).sum())
    assert nonzero == (array != 0).sum()
    if not kept.size:
        assert (total, spread, below, high) == (0, 0, -math.inf, -math.inf)
        return
    assert (-below, high) == (kept.min(), kept.max())
    with np.errstate(over="ignore", invalid="ignore"):
        if not np.isfinite(np.square(kept).sum()):
            assert spread == math.inf
            return
    assert total == pytest.approx(math.fsum(kept), rel=1e-12, abs=1e-14 * np.abs(kept).sum())
    exact = np.square(kept - math.fsum(kept) / kept.size).sum()
    # Of values whose spread is lost next to their mean, only its magnitude is kept.
    assert spread == pytest.approx(exact, rel=1e-9, abs=1e-27 * np.square(kept).sum())


shapes = st.lists(st.sampled_from((0, 1, 2, 3, 5, 7, 16, 37)), max_size=4).map(tuple)
made = st.sampled_from((random_bits, ordinary))
