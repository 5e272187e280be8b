"""The statistics that NumPy computes of the values that `Stats` reads, and the ways in which it reads them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compiler import BUILDS
from hypothesis import strategies as st
from native import reading
from torch import Tensor

from opintercept import hooks
from opintercept._values import read as _values
from opintercept._values import sums
from opintercept.hooks import StatsRow, stats

# Small tensors are read many at a time, large ones in pieces, those on other devices there; the pieces are small. Or
# all are read in C++ if they can be.
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in pieces": {"SMALL": 0, "CHUNK": 8, "ROW": 4},
    "on a device": {"ON_HOST": (), "PIECE": 7},
}
if BUILDS:
    WAYS["natively"] = {}


ways = pytest.mark.parametrize("way", WAYS)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TINY_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
TARGETS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *TINY_FLOATS]


@contextmanager
def read(way: str, **sizes: int) -> Iterator[None]:
    """Read values in one of the ways, with pieces of other sizes."""
    with reading(way == "natively"), pytest.MonkeyPatch.context() as patch:
        for name, value in (WAYS[way] | sizes).items():
            patch.setattr({"ROW": _values, "CHUNK": sums, "PIECE": sums}.get(name, stats), name, value)
        yield


def call(output: Any = None, **other: Any) -> Any:
    """The part of a call that `Stats` reads."""
    known = {"module": "m", "op": "aten::mm", "phase": "forward", "lhs": None, "rhs": None, "bias": None}
    return SimpleNamespace(**(known | other), is_quantized=lambda role: False, output=output, func=None)


def seen(*outputs: Tensor, **arguments: Any) -> hooks.Stats:
    found = hooks.Stats(**arguments)
    for output in outputs:
        found.post(call(output))
    return found


def one_row(*outputs: Tensor, **arguments: Any) -> StatsRow:
    (row,) = seen(*outputs, **arguments).rows()
    return row


def float64(tensor: Tensor) -> np.ndarray:
    """The values for NumPy; of complex values the moduli, which torch computes in the tensor's precision."""
    return (tensor.abs() if tensor.is_complex() else tensor).detach().to(torch.float64).numpy().ravel()


def assert_row_is(row: StatsRow, values: np.ndarray, narrow: bool = False) -> None:
    """Compare with NumPy: counts, range and shares exactly, mean and standard deviation to 1e-5.

    If values cancel, their mean is accurate only to the rounding error of their sum, relative to the mean magnitude:
    that of float32 if `narrow`, where it adds up rows of 16-bit values. A standard deviation below the rounding error
    of the values, in float64, is not compared.
    """
    finite = values[np.isfinite(values)]
    assert row.count == values.size
    assert row.nan == np.isnan(values).sum()
    assert row.inf == np.isinf(values).sum()
    if values.size:
        assert row.zeros == (values == 0).sum() / values.size
    else:
        assert math.isnan(row.zeros)
    moments = (row.min, row.max, row.absmax, row.mean, row.std, row.rms)
    if not finite.size:
        assert all(map(math.isnan, moments))
        return
    magnitude, largest = np.abs(finite).mean(), np.abs(finite).max()
    assert moments[:3] == (finite.min(), finite.max(), largest)
    assert row.mean == pytest.approx(finite.mean(), rel=1e-5, abs=(1e-6 if narrow else 1e-14) * magnitude)
    assert row.std == pytest.approx(finite.std(), rel=1e-5, abs=1e-14 * largest)
    assert row.rms == pytest.approx(np.sqrt(np.square(finite).mean()), rel=1e-5)


# Their squares neither overflow nor vanish in float64; another test covers those that do.
_reals = st.one_of(
    st.floats(-1e100, 1e100).filter(lambda x: x == 0 or abs(x) > 1e-100),
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 1e-45, 1e-30, 3e38, 1e4, 1e4 + 1]),
    st.integers(-3, 3).map(float),
)
_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_layouts: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "transposed": lambda t: t.movedim(0, -1) if t.dim() else t,
    "every other one": lambda t: t[..., ::2] if t.dim() else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "a column": lambda t: t[..., :1] if t.dim() else t,
    "with gaps": lambda t: torch.stack([t, t])[0],
    "a parameter": lambda t: t.clone().requires_grad_() if t.is_floating_point() and t.element_size() > 1 else t,
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([*FLOATS, *TINY_FLOATS, *INTEGERS, *COMPLEX]))
    shape = draw(_shapes)
    count = math.prod(shape)
    if dtype in INTEGERS:
        low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        whole = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        tensor = torch.tensor(whole, dtype=dtype)
    elif dtype.is_complex:
        parts = draw(st.lists(st.tuples(_reals, _reals), min_size=count, max_size=count))
        tensor = torch.tensor([complex(*pair) for pair in parts], dtype=torch.complex128).to(dtype)
    else:
        numbers = draw(st.lists(_reals, min_size=count, max_size=count))
        tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    tensor = _layouts[draw(st.sampled_from(sorted(_layouts)))](tensor.reshape(shape))
    return tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of dtypes up to 16 bits; of wider ones the limits of the targets and their neighbours."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    ends = [info.max for info in map(torch.finfo, TARGETS[:-1])]
    halves = [info.smallest_normal * info.eps / 2 for info in map(torch.finfo, TARGETS[:-1])]
    around = torch.tensor([*ends, *halves, 0.0, math.inf, math.nan], dtype=dtype)
    around = torch.cat([around, around.nextafter(torch.tensor(math.inf)), around.nextafter(torch.tensor(-math.inf))])
    return torch.cat([around, -around, around * 2, around / 2])


def powers_by_numpy(values: np.ndarray) -> dict[int, int]:
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    powers, counts = np.unique(np.clip(np.floor(np.log2(magnitudes)), -149, 127), return_counts=True)
    return dict(zip(powers.astype(int).tolist(), counts.tolist(), strict=True))


def sizes(rows: list[StatsRow]) -> dict[str | None, tuple[int, int]]:
    return {row.module: (row.calls, row.count) for row in rows}


def parts_of(rows: list[StatsRow]) -> list[tuple[Any, ...]]:
    """The numbers that must be equal bit for bit, however values were added up; the others are rounded."""
    return [(*dataclasses.astuple(r)[:9], r.absmax, r.zeros, r.underflow, r.overflow) for r in rows]
