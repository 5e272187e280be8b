"""`Stats`: every number against NumPy in float64, on every way in which values are read."""

from __future__ import annotations

import copy
import csv
import dataclasses
import errno
import math
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import minilm
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from opintercept import HookError, OpInterceptError, hooks, intercept
from opintercept.hooks import StatsRow, _values, stats

# Small tensors are read many together, larger ones in pieces, those of other devices there: all with small pieces.
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "in pieces": {"_SMALL": 0, "_CHUNK": 8, "_ROW": 4},
    "on a device": {"_ON_HOST": (), "_PIECE": 7},
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
)
ways = pytest.mark.parametrize("way", WAYS)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TINY_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool]
COMPLEX = [torch.complex128, torch.complex64, torch.complex32]
TARGETS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, *TINY_FLOATS]


@contextmanager
def read(way: str, **sizes: int) -> Iterator[None]:
    """Have values read in one of the ways, with pieces of other sizes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (WAYS[way] | sizes).items():
            patch.setattr(_values if name == "_ROW" else stats, name, value)
        yield


def call(output: Any = None, **other: Any) -> Any:
    """All of a call that `Stats` looks at."""
    known = {"module": "m", "op": "aten::mm", "phase": "forward", "lhs": None, "rhs": None, "bias": None}
    return SimpleNamespace(**(known | other), output=output)


def seen(*outputs: Tensor, **arguments: Any) -> hooks.Stats:
    found = hooks.Stats(**arguments)
    for output in outputs:
        found.post(call(output))
    return found


def one_row(*outputs: Tensor, **arguments: Any) -> StatsRow:
    (row,) = seen(*outputs, **arguments).rows()
    return row


def float64(tensor: Tensor) -> np.ndarray:
    """The values for NumPy, of complex ones the moduli, in the tensor's precision as torch has them."""
    return (tensor.abs() if tensor.is_complex() else tensor).detach().to(torch.float64).numpy().ravel()


def assert_row_is(row: StatsRow, values: np.ndarray, narrow: bool = False) -> None:
    """Compare with NumPy: counts, range and shares exactly, mean and standard deviation to 1e-5.

    A mean of values that cancel has fewer digits than they: it is right to the rounding of the sum, relative to
    the mean magnitude, which is that of float32 where rows of 16-bit values are added up in it. A standard deviation
    below the rounding of the values, in float64, is nothing but that.
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


# Their squares neither overflow nor vanish in float64; what happens then has a test of its own.
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
        numbers = draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        tensor = torch.tensor(numbers, dtype=dtype)
    elif dtype.is_complex:
        parts = draw(st.lists(st.tuples(_reals, _reals), min_size=count, max_size=count))
        tensor = torch.tensor([complex(*pair) for pair in parts], dtype=torch.complex128).to(dtype)
    else:
        numbers = draw(st.lists(_reals, min_size=count, max_size=count))
        tensor = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    tensor = _layouts[draw(st.sampled_from(sorted(_layouts)))](tensor.reshape(shape))
    return tensor.conj() if dtype.is_complex and draw(st.booleans()) else tensor


@ways
@settings(deadline=None)
@given(tensor=tensors())
def test_every_number_is_numpys(way: str, tensor: Tensor) -> None:
    with read(way):
        row = one_row(tensor)
    assert_row_is(row, float64(tensor), narrow=tensor.element_size() <= 2)
    assert row.calls == 1


@ways
@settings(deadline=None)
@given(several=st.lists(tensors(), min_size=2, max_size=5))
def test_calls_add_up_to_what_all_their_values_together_are(way: str, several: list[Tensor]) -> None:
    with read(way):
        row = one_row(*several)
    assert_row_is(row, np.concatenate([float64(tensor) for tensor in several]), narrow=True)
    assert row.calls == len(several)


@pytest.mark.parametrize("count", [1, 8191, 8192, 8193, 9 * 1024, 2**19, 2**19 + 3, 2**20 + 1024])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("broken", [False, True])
def test_every_size_is_read_whole(count: int, dtype: torch.dtype, broken: bool) -> None:
    tensor = torch.randn(count).to(dtype)
    tensor[tensor.abs() < 0.1] = 0.0
    if broken:
        tensor[::5], tensor[::7], tensor[::11] = math.nan, math.inf, -math.inf
    row = one_row(tensor, for_dtype=torch.float8_e4m3fn)
    values = float64(tensor)
    assert_row_is(row, values)
    assert row.underflow == 0.0
    assert row.overflow == np.isinf(values).sum() / count


@ways
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mean", [1e2, -1e4, 3e4])
def test_a_large_mean_costs_no_digits(way: str, dtype: torch.dtype, mean: float) -> None:
    tensor = (torch.randn(40_000, dtype=torch.float64) + mean).to(dtype)
    with read(way, _CHUNK=1 << 13, _ROW=1 << 10, _PIECE=1 << 12):
        row = one_row(*tensor.split(4000), tensor)
    values = float64(tensor)
    assert row.mean == pytest.approx(values.mean(), rel=1e-7)
    assert row.std == pytest.approx(values.std(), rel=1e-5)


@ways
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_a_default_device_is_not_where_values_are_read(way: str, mean: float) -> None:
    tensor = torch.randn(40) + mean
    expected = one_row(tensor)
    with read(way), torch.device("meta"):
        row = one_row(tensor, for_dtype=torch.float16, histogram=True)
    assert (row.count, row.min, row.max) == (40, expected.min, expected.max)
    assert row.std == pytest.approx(expected.std, rel=1e-5)


@ways
def test_float64_keeps_the_spread_of_values_that_differ_in_their_last_digits_only(way: str) -> None:
    with read(way):
        row = one_row(torch.randn(300, dtype=torch.float64) + 1e9)
        constant = one_row(torch.full((300,), 0.1), torch.full((2, 7), 0.1))
    assert row.std == pytest.approx(1.0, rel=0.2)
    assert constant.std < 1e-16
    assert constant.mean == pytest.approx(np.float32(0.1), rel=1e-15)


@ways
@pytest.mark.parametrize("means", [(0, 1e4, -3e4, 0.1), range(-1000, 2000, 7)], ids=["a few", "many"])
def test_calls_of_other_means_are_spread_around_the_common_one(way: str, means: Iterable[float]) -> None:
    lots = [torch.randn(50) + mean for mean in means]
    lots[1:1] = [torch.empty(0), torch.full((3,), math.nan)]
    with read(way):
        assert_row_is(one_row(*lots), np.concatenate([float64(lot) for lot in lots]))


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-13, 1e14, 1e19, 3e37])
def test_tiny_and_huge_values_keep_their_digits(way: str, dtype: torch.dtype, scale: float) -> None:
    tensor = (torch.randn(64, dtype=torch.float64) * scale).to(dtype)
    with read(way):
        assert_row_is(one_row(tensor), float64(tensor), narrow=True)


def test_a_spread_that_float64_cannot_hold_is_infinite_and_not_zero() -> None:
    huge = torch.tensor([1e200, -1e200, 1e199] * 4, dtype=torch.float64)
    for way in WAYS:
        with read(way):
            row = one_row(huge)
        assert (row.std, row.rms, row.max) == (math.inf, math.inf, 1e200)
        assert row.mean == pytest.approx(huge.mean().item())


@pytest.mark.parametrize("scale", [1.1, 0.37, 1.9921875])
def test_bfloat16_signs_add_up_without_a_drift(scale: float) -> None:
    # Equal squares, the worst for a sum in float32: each addition rounds the same way.
    signs = torch.randn(2**20).sign().bfloat16() * scale
    assert_row_is(one_row(signs), float64(signs), narrow=True)


OTHER_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.25, 3, torch.qint8),
    "nested": lambda t: torch.nested.nested_tensor([t, t[:1]]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:1]], layout=torch.jagged),
    "mkldnn": lambda t: t.to_mkldnn(),
    "negated": lambda t: torch.complex(t, t).conj().imag,
    "zero": lambda t: torch._efficientzerotensor(t.shape),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_values_of_every_layout_are_read(layout: str) -> None:
    if layout == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    plain = torch.randn(4, 6) * (torch.rand(4, 6) > 0.5)
    tensor = OTHER_LAYOUTS[layout](plain)
    values = {
        "quantized": lambda: float64(tensor.dequantize()),
        "nested": lambda: np.concatenate([float64(plain), float64(plain[:1])]),
        "jagged": lambda: np.concatenate([float64(plain), float64(plain[:1])]),
        "negated": lambda: float64(-plain),
        "zero": lambda: np.zeros(24),
    }.get(layout, lambda: float64(plain))()
    for way in WAYS:
        with read(way):
            assert_row_is(one_row(tensor), values)


def test_a_tensor_in_another_order_is_read_without_a_copy() -> None:
    dense = torch.randn(3, 4, 5)
    for view in (dense, dense.permute(2, 0, 1), dense.transpose(0, 2), dense[1:]):
        assert stats._flat(view).untyped_storage().data_ptr() == dense.untyped_storage().data_ptr()
    assert torch.equal(stats._flat(dense[..., 0]).sort().values, dense[..., 0].flatten().sort().values)


def every_value(dtype: torch.dtype) -> Tensor:
    """All of 16 bits and fewer; of more those around which targets begin and end, and their neighbours."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    ends = [info.max for info in map(torch.finfo, TARGETS[:-1])]
    halves = [info.smallest_normal * info.eps / 2 for info in map(torch.finfo, TARGETS[:-1])]
    around = torch.tensor([*ends, *halves, 0.0, math.inf, math.nan], dtype=dtype)
    around = torch.cat([around, around.nextafter(torch.tensor(math.inf)), around.nextafter(torch.tensor(-math.inf))])
    return torch.cat([around, -around, around * 2, around / 2])


@ways
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *TINY_FLOATS], ids=str)
def test_what_a_target_cannot_hold_is_what_a_cast_loses(way: str, target: torch.dtype, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    lost = (values.to(torch.float32) != 0) & (values.to(torch.float32).to(target).to(torch.float32) == 0)
    beyond = values.to(torch.float64).abs() > torch.finfo(target).max
    with read(way, _CHUNK=1 << 14, _ROW=1 << 7, _PIECE=1 << 13):
        row = one_row(values, for_dtype=target)
        below_limits = one_row(values[values.to(torch.float32).abs() < 1e14], for_dtype=target)
    assert row.underflow == int(lost.sum()) / values.numel()
    assert row.overflow == int(beyond.sum()) / values.numel()
    # Without NaN and huge values the narrow way of 16 bits is taken.
    few = values.to(torch.float32).abs() < 1e14
    assert below_limits.underflow == int(lost[few].sum()) / int(few.sum())
    assert below_limits.overflow == int(beyond[few].sum()) / int(few.sum())


def test_there_is_no_underflow_without_a_target() -> None:
    row = one_row(torch.ones(2))
    assert (row.underflow, row.overflow) == (None, None)
    empty = one_row(torch.ones(0), for_dtype=torch.float16)
    assert (empty.underflow, empty.overflow) == (None, None)


def powers_by_numpy(values: np.ndarray) -> dict[int, int]:
    magnitudes = np.abs(values[np.isfinite(values) & (values != 0)])
    powers, counts = np.unique(np.clip(np.floor(np.log2(magnitudes)), -149, 127), return_counts=True)
    return dict(zip(powers.astype(int).tolist(), counts.tolist(), strict=True))


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_the_histogram_is_that_of_the_floor_of_the_logarithm(way: str, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    with read(way, _CHUNK=1 << 14, _PIECE=1 << 13):
        found = seen(values, values[:300], histogram=True)
    expected = powers_by_numpy(np.concatenate([float64(values), float64(values[:300])]))
    assert found.histogram("m") == expected


def test_the_ends_of_the_histogram_stand_for_all_beyond() -> None:
    found = seen(
        torch.tensor([1e-300, 5e-324, 2.0**-149, 2.0**127, 1e300, 0.0, math.inf], dtype=torch.float64), histogram=True
    )
    assert found.histogram("m") == {-149: 3, 127: 2}
    assert seen(torch.zeros(3), histogram=True).histogram("m") == {}


def test_a_histogram_adds_up_the_operators_of_a_module_and_keeps_passes_apart() -> None:
    found = hooks.Stats(histogram=True)
    found.post(call(torch.tensor([1.0])))
    found.post(call(torch.tensor([4.0]), op="aten::bmm"))
    found.post(call(torch.tensor([8.0]), phase="backward"))
    found.post(call(torch.tensor([16.0]), module=None, phase="backward"))
    assert found.histogram("m") == {0: 1, 2: 1}
    assert found.histogram("m", phase="backward") == {3: 1}
    assert found.histogram(None, phase="backward") == {4: 1}


@ways
@settings(deadline=None)
@given(tensor=tensors())
def test_channels_are_the_largest_magnitudes_along_the_last_dimension(way: str, tensor: Tensor) -> None:
    assume(tensor.dim() and tensor.numel())
    with read(way):
        found = hooks.Stats(channels="lhs")
        found.pre(call(lhs=tensor))
    # NaN stays NaN, in torch as in NumPy.
    expected = np.abs(float64(tensor)).reshape(-1, tensor.shape[-1]).max(0)
    assert np.array_equal(found.channels("m").numpy(), expected, equal_nan=True)
    assert found.channels("m").dtype is torch.float64


def test_channels_of_the_rhs_are_those_of_the_output_and_of_a_whole_linear_those_of_the_input() -> None:
    layer = nn.Linear(3, 2)
    below, above = hooks.Stats(channels="rhs"), hooks.Stats(channels="rhs")
    with intercept(below), intercept(above, level="function"):
        layer(torch.ones(4, 3))
    assert torch.equal(below.channels("Linear"), layer.weight.detach().abs().amax(1).double())
    assert torch.equal(above.channels("Linear"), layer.weight.detach().abs().amax(0).double())
    assert {row.operand for row in below.rows()} == {"rhs", "output"}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_channels_of_nested_tensors_are_those_of_their_parts(layout: torch.layout) -> None:
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    found = hooks.Stats(channels="lhs")
    for _ in range(2):
        found.pre(call(lhs=torch.nested.nested_tensor(parts, layout=layout)))
        parts.append(torch.randn(1, 3))
    assert torch.equal(found.channels("m"), torch.cat(parts[:3]).abs().amax(0).double())
    assert found.skipped == 0


def test_channels_that_change_their_number_are_an_error_that_keeps_what_was_seen() -> None:
    found = hooks.Stats(channels="output")
    found.post(call(torch.ones(2, 3)))
    with pytest.raises(HookError, match=r"last dimension stays the same .* got 4 channels after 3; choose calls with"):
        found.post(call(torch.ones(2, 4)))
    assert found.channels("m").tolist() == [1.0] * 3
    assert [(row.calls, row.count) for row in found.rows()] == [(1, 6)]
    found.post(call(torch.ones(2, 4), op="aten::bmm"))
    with pytest.raises(ValueError, match=r"must have the same number of channels, got \['float64\[3\]'"):
        found.channels("m")


def sizes(rows: list[StatsRow]) -> dict[str | None, tuple[int, int]]:
    return {row.module: (row.calls, row.count) for row in rows}


def test_a_step_returns_what_came_in_it_and_the_totals_keep_all() -> None:
    found = hooks.Stats(histogram=True)
    lots = [torch.randn(3, 5) for _ in range(4)]
    assert found.step() == []
    found.post(call(lots[0], module="a"))
    found.post(call(lots[1], module="a"))
    first = found.step()
    found.post(call(lots[2], module="b"))
    found.post(call(lots[3], module="a"))
    assert sizes(first) == {"a": (2, 30)}
    assert_row_is(first[0], float64(torch.cat(lots[:2])))
    assert sizes(found.step()) == {"b": (1, 15), "a": (1, 15)}
    assert found.step() == []
    assert sizes(found.rows()) == {"a": (3, 45), "b": (1, 15)}
    assert_row_is(found.rows()[0], float64(torch.cat([lots[0], lots[1], lots[3]])))
    assert sum(found.histogram("a").values()) == 45
    assert found.rows() == found.rows()


def parts_of(rows: list[StatsRow]) -> list[tuple[Any, ...]]:
    """What must be equal to the bit, however values were added up; the rest is rounded."""
    return [(*dataclasses.astuple(r)[:9], r.absmax, r.zeros, r.underflow, r.overflow) for r in rows]


@ways
@settings(deadline=None)
@given(mine=st.lists(tensors(), max_size=4), theirs=st.lists(tensors(), max_size=4), after=st.booleans())
def test_merging_two_is_one_over_both(way: str, mine: list[Tensor], theirs: list[Tensor], after: bool) -> None:
    asked: dict[str, Any] = {"histogram": True, "for_dtype": torch.float16}
    with read(way):
        first, second, both = seen(*mine, **asked), seen(*theirs, **asked), seen(*mine, *theirs, **asked)
        second.post(call(torch.ones(2, 2), module="other"))
        both.post(call(torch.ones(2, 2), module="other"))
        if after:
            first.step()
        second_rows = second.rows()
        first.merge(second)
    assert repr(parts_of(first.rows())) == repr(parts_of(both.rows())) or (not mine and not theirs)
    for row, expected in zip(first.rows(), both.rows(), strict=True):
        assert row.mean == pytest.approx(expected.mean, rel=1e-9, abs=1e-14 * expected.absmax, nan_ok=True)
        assert row.std == pytest.approx(expected.std, rel=1e-6, abs=1e-13 * expected.absmax, nan_ok=True)
    if mine or theirs:
        assert first.histogram("m") == both.histogram("m")
    assert repr(second.rows()) == repr(second_rows)


def test_merging_adds_what_was_skipped_and_may_be_with_oneself() -> None:
    first, second = hooks.Stats(channels="output"), hooks.Stats(channels="output")
    first.post(call(torch.ones(2, 3)))
    second.post(call(torch.full((1, 3), 2.0)))
    second.post(call(torch.ones(2, device="meta")))
    first.merge(second)
    assert first.skipped == 1
    assert first.channels("m").tolist() == [2.0] * 3
    first.merge(first)
    assert sizes(first.rows()) == {"m": (4, 18)}
    assert first.skipped == 2


@pytest.mark.parametrize(
    "other", [{"of": "lhs"}, {"for_dtype": torch.float16}, {"histogram": True}, {"channels": "output"}]
)
def test_merging_what_was_made_otherwise_is_refused(other: dict[str, Any]) -> None:
    found = seen(torch.ones(2))
    with pytest.raises(ValueError, match=r"can be merged that were made alike, got .* make both with the same arg"):
        found.merge(hooks.Stats(**other))
    assert sizes(found.rows()) == {"m": (1, 2)}


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
def test_statistics_go_to_another_process_whole(duplicate: Callable[[hooks.Stats], hooks.Stats]) -> None:
    found = hooks.Stats(("lhs", "output"), histogram=True, channels="lhs", for_dtype=torch.float16)
    for _ in range(3):
        found.pre(call(lhs=torch.randn(2, 3)))
        found.post(call(torch.randn(200, 300)))
        found.step()
    found.post(call(torch.randn(2, 2)))
    found.post(call(torch.ones(2, device="meta")))
    twin = duplicate(found)
    assert twin.rows() == found.rows()
    assert (twin.histogram("m"), twin.skipped) == (found.histogram("m"), 1)
    assert torch.equal(twin.channels("m"), found.channels("m"))
    assert sizes(twin.step()) == {"m": (1, 4)}
    twin.pre(call(lhs=torch.ones(1, 3)))
    twin.post(call(torch.ones(1)))
    found.merge(twin)
    assert sum(row.calls for row in found.rows()) == 3 + 4 + 3 + 4 + 2


RANK = """
import sys, torch
import torch.distributed as dist
from types import SimpleNamespace
from opintercept import hooks

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

def call(output, module):
    return SimpleNamespace(module=module, op="aten::mm", phase="forward", output=output)

def lot(of, step):
    return torch.arange(12.0).reshape(3, 4) * (of + 1) + 100 * step

stats = hooks.Stats(histogram=True, channels="output", for_dtype=torch.float16)
single = hooks.Stats(histogram=True, channels="output", for_dtype=torch.float16)
for of in range(2):
    single.post(call(lot(of, 0), "shared"))
    single.post(call(lot(of, 0), f"only {of}"))
single.step()
single.post(call(lot(0, 1), "shared"))
single.post(call(lot(1, 1), "shared"))

stats.post(call(lot(rank, 0), "shared"))
stats.post(call(lot(rank, 0), f"only {rank}"))
stats.step()
stats.post(call(lot(rank, 1), "shared"))
stats.post(call(torch.ones(2, device="meta"), "shared"))
alone = dist.new_group([0])
stats.all_reduce(group=alone)
assert sum(row.calls for row in stats.rows()) == 3, stats.rows()
stats.all_reduce()
assert str(stats) == str(single), f"{stats}\\n{single}"
assert [(r.module, r.calls, r.count) for r in stats.step()] == [("shared", 2, 24)]
for row in single.rows():
    assert stats.histogram(row.module) == single.histogram(row.module)
    assert torch.equal(stats.channels(row.module), single.channels(row.module))
assert stats.skipped == 2
try:
    hooks.Stats(histogram=rank == 0).all_reduce()
except ValueError as error:
    assert "every rank must make its statistics with the same arguments" in str(error), error
else:
    raise AssertionError("unlike ranks were added up")
dist.barrier()
dist.destroy_process_group()
print("well")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_get_what_one_would_have_seen(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert all(text.endswith("well\n") for text in said)


def test_all_reduce_without_ranks_says_what_to_call() -> None:
    with pytest.raises(OpInterceptError, match="which is not initialised; call init_process_group first"):
        hooks.Stats().all_reduce()


def test_threads_add_up() -> None:
    found = hooks.Stats(("lhs", "output"), histogram=True)
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(300):
            size = 1 + (number + turn) % 5
            found.pre(call(lhs=torch.ones(size), module=f"m{turn % 3}"))
            found.post(call(torch.full((size,), 2.0), module="all"))
            found.post(call(torch.ones(1, device="meta")))
            if turn % 50 == 0:
                found.step()
                found.rows()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = {row.module: row for row in found.rows()}
    count = sum(1 + (number + turn) % 5 for number in range(8) for turn in range(300))
    assert (rows["all"].calls, rows["all"].count, rows["all"].mean) == (2400, count, 2.0)
    assert sum(rows[f"m{m}"].count for m in range(3)) == count
    assert found.histogram("all") == {1: count}
    assert found.skipped == 2400


def test_every_thread_of_a_block_for_all_is_counted() -> None:
    found = hooks.Stats(("lhs", "output"))
    a = torch.randn(8, 8)

    def work() -> None:
        for _ in range(50):
            a @ a

    with intercept(found, threads="all"):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {(row.operand, row.calls, row.count) for row in found.rows()} == {
        ("lhs", 400, 400 * 64),
        ("output", 400, 400 * 64),
    }


class Waits(TorchDispatchMode):
    """Keeps the operators that make the host wait for a device."""

    WAITING = frozenset(
        [
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "index",
            "item",
            "is_nonzero",
            "equal",
            "unique",
            "bincount",
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.ran = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran += 1
        if func.overloadpacket.__name__ in self.WAITING:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_waits_for_a_device_until_somebody_looks() -> None:
    found = hooks.Stats(("lhs", "output"), histogram=True, channels="lhs", for_dtype=torch.float16)
    broken = torch.tensor([[1.0, math.nan], [math.inf, 0.0]])
    with read("on a device"):
        with Waits() as waits:
            for _ in range(3):
                found.pre(call(lhs=broken))
                found.post(call(torch.randn(5, 5)))
                found.post(call(torch.randn(4).half()))
        assert waits.found == []
        assert waits.ran > 100
    with read("in pieces"), Waits() as waits:
        hooks.Stats().post(call(torch.randn(5, 5)))
    assert "aten._local_scalar_dense.default" in waits.found  # as it is for a host's tensors
    assert {row.operand: row.calls for row in found.rows()} == {"lhs": 3, "output": 6}


@ways
def test_sums_begun_in_inference_mode_go_on_outside_of_it(way: str) -> None:
    found = hooks.Stats(histogram=True, channels="output", for_dtype=torch.float16)
    tensor = torch.randn(30, 10)
    with read(way):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                found.post(call(tensor.clone()))
        found.merge(copy.deepcopy(found))
        (row,) = found.rows()
    assert (row.calls, found.skipped) == (6, 0)
    assert_row_is(row, float64(torch.cat([tensor] * 6)))
    assert sum(found.histogram("m").values()) == 1800


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gpu_adds_up_what_the_host_does_without_a_wait(dtype: torch.dtype) -> None:
    a, b = torch.randn(300, 200).to("cuda", dtype), torch.randn(200, 100).to("cuda", dtype)
    asked: dict[str, Any] = {"of": ("lhs", "output"), "histogram": True, "channels": "lhs", "for_dtype": torch.float16}
    found, host = hooks.Stats(**asked), hooks.Stats(**asked)
    a @ b  # cuBLAS sets itself up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with intercept(found):
            outputs = [a @ b for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for output in outputs:
        host.pre(call(lhs=a.cpu(), module=""))
        host.post(call(output.cpu(), module=""))
    assert parts_of(found.rows()) == parts_of(host.rows())
    for row, expected in zip(found.rows(), host.rows(), strict=True):
        assert row.mean == pytest.approx(expected.mean, rel=1e-5, abs=1e-6 * expected.absmax)
        assert row.std == pytest.approx(expected.std, rel=1e-5)
    assert found.histogram("") == host.histogram("")
    assert torch.equal(found.channels(""), host.channels(""))


@gpu
def test_a_cuda_graph_leaves_its_calls_out_with_one_warning() -> None:
    a, found = torch.randn(8, 8, device="cuda"), hooks.Stats()
    a @ a
    with intercept(found), pytest.warns(match="Stats leaves out calls that a CUDA graph captures"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            a @ a
    assert (found.rows(), found.skipped) == ([], 1)


LEVELS = [
    pytest.param({}, id="kernel"),
    pytest.param({"engine": "mode"}, id="mode"),
    pytest.param({"level": "function"}, id="function"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(lambda x: self.first(x).relu(), x, use_reentrant=False)
        return self.second(hidden)


@pytest.mark.parametrize("engine", LEVELS[:2])
def test_rows_are_by_module_operand_and_pass(engine: dict[str, Any]) -> None:
    net, x = Net(), torch.randn(5, 6)
    found = hooks.Stats(("lhs", "rhs", "bias", "output"))
    with intercept(found, **engine):
        net(x).sum().backward()
    rows = {(row.module, row.op, row.operand, row.phase): row for row in found.rows()}
    linears = {(m, "aten::addmm", o, "forward") for m in ("first", "second") for o in ("lhs", "rhs", "bias", "output")}
    again = {("first", "aten::addmm", operand, "recompute") for operand in ("lhs", "rhs", "bias", "output")}
    back = {(m, "aten::mm", o, "backward") for m in ("first", "second") for o in ("lhs", "rhs", "output")}
    assert set(rows) == linears | again | back
    hidden = net.first(x).relu()
    for key, tensor in {
        ("first", "aten::addmm", "lhs", "forward"): x,
        ("first", "aten::addmm", "rhs", "forward"): net.first.weight,
        ("first", "aten::addmm", "bias", "recompute"): net.first.bias,
        ("second", "aten::addmm", "lhs", "forward"): hidden,
        ("second", "aten::addmm", "output", "forward"): net.second(hidden),
    }.items():
        assert_row_is(rows[key], float64(tensor))
    assert rows["second", "aten::mm", "output", "backward"].calls == 2  # for the operand and for the weight


def test_a_linear_is_one_row_at_function_level() -> None:
    net, x = Net(), torch.randn(5, 6)
    found = hooks.Stats(("lhs", "rhs", "output"))
    with intercept(found, level="function"):
        net(x).sum().backward()
    assert {(row.module, row.op, row.operand, row.calls) for row in found.rows()} == {
        (module, "torch.nn.functional.linear", operand, 1)
        for module in ("first", "second")
        for operand in ("lhs", "rhs", "output")
    }
    assert_row_is(found.rows()[1], float64(net.first.weight))


@pytest.mark.parametrize("engine", LEVELS)
def test_operands_are_read_before_the_operator_overwrites_them(engine: dict[str, Any]) -> None:
    into, a = torch.full((3, 3), 7.0), torch.eye(3)
    found = hooks.Stats(("lhs", "bias", "output"))
    with intercept(found, **engine):
        into.addmm_(a, a)
        torch.mm(a, torch.full((3, 3), 2.0), out=a)
    rows = [(row.op.split("::")[-1].split(".")[-1], row.operand, row.mean) for row in found.rows()]
    third = pytest.approx(1 / 3)
    assert rows == [
        ("addmm_", "lhs", third),
        ("addmm_", "bias", 7.0),
        ("addmm_", "output", pytest.approx(7 + 1 / 3)),
        ("mm", "lhs", third),
        ("mm", "output", a.mean().item()),  # torch clears what it writes to first, so 0
    ]


@pytest.mark.parametrize("engine", LEVELS)
def test_under_autocast_the_values_are_those_of_the_operator(engine: dict[str, Any]) -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    found = hooks.Stats(("lhs", "output"))
    with torch.autocast("cpu", torch.bfloat16), intercept(found, **engine):
        output = layer(x)
    assert output.dtype is torch.bfloat16
    rows = {row.operand: row for row in found.rows()}
    assert_row_is(rows["output"], float64(output))
    # What the program passed, above autocast, or what the operator got, below it.
    assert_row_is(rows["lhs"], float64(x if "level" in engine else x.bfloat16()))


@pytest.mark.parametrize("engine", LEVELS)
def test_under_inference_mode_nothing_is_different(engine: dict[str, Any]) -> None:
    layer, x = nn.Linear(6, 3), torch.randn(4, 6)
    found = hooks.Stats(("lhs", "output"))
    with intercept(found, **engine):
        layer(x)
        with torch.inference_mode():
            layer(x)
    assert found.skipped == 0
    for operand, tensor in (("lhs", x), ("output", layer(x))):
        rows = [row for row in found.rows() if row.operand == operand]
        assert sum(row.calls for row in rows) == 2
        for row in rows:
            assert_row_is(row, float64(torch.cat([tensor] * row.calls)))


def test_vmapped_tensors_have_no_values_of_their_own_and_leave_no_row() -> None:
    x, w = torch.randn(4, 2, 3), torch.randn(3, 5)
    found, below = hooks.Stats(("lhs", "output"), histogram=True, channels="lhs"), hooks.Stats()
    with intercept(found, level="function"), intercept(below):
        output = torch.func.vmap(lambda t: t @ w)(x)
    assert (found.skipped, found.rows()) == (2, [])
    assert str(found) == "module  op  operand  phase  calls  mean  std  min  max  zeros  nan  inf"
    (row,) = below.rows()
    assert_row_is(row, float64(output))


@pytest.mark.parametrize("engine", LEVELS)
def test_fake_tensors_are_skipped(engine: dict[str, Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = hooks.Stats()
    with intercept(found, **engine), FakeTensorMode():
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert found.rows() == []


def test_of_several_outputs_it_is_the_first() -> None:
    q = torch.randn(1, 2, 8, 4)
    found = hooks.Stats()
    with intercept(found), torch.no_grad():
        output = nn.functional.scaled_dot_product_attention(q, q, q)
    (row,) = found.rows()
    assert_row_is(row, float64(output))


def test_an_operand_that_a_call_has_not_is_left_out() -> None:
    found = hooks.Stats(("bias", "output"))
    with intercept(found):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert [row.operand for row in found.rows()] == ["output"]
    assert found.skipped == 0


def test_a_hook_of_outputs_costs_nothing_before_the_call() -> None:
    assert not hasattr(hooks.Stats(), "pre")
    assert hasattr(hooks.Stats("lhs"), "pre")


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def trained(hook: Any, engine: dict[str, Any]) -> dict[str, Tensor]:
    """Everything that three steps of training leave behind."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(11, (4, 7))
    left: dict[str, Tensor] = {}
    for step in range(3):
        with intercept(hook, **engine):
            logits = model(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        left |= {f"{step} logits": logits, f"{step} random": torch.get_rng_state()}
        left |= {f"{step} {name}": parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[dict-item]
    return left | dict(model.state_dict())


@pytest.mark.parametrize("engine", LEVELS)
@pytest.mark.parametrize("way", ["together", "on a device"])
def test_training_is_the_same_to_the_bit(engine: dict[str, Any], way: str) -> None:
    found = hooks.Stats(("lhs", "rhs", "bias", "output"), histogram=True, for_dtype=torch.float8_e4m3fn)
    with read(way, _PIECE=1 << 23):
        observed = trained(found, engine)
        rows = found.rows()
    alone = trained((), engine)
    assert observed.keys() == alone.keys()
    for name, tensor in alone.items():
        assert torch.equal(tensor, observed[name]), name
    assert len(rows) > 10
    assert found.skipped == 0


def test_the_linear_layers_of_a_pretrained_model_agree_with_numpy() -> None:
    model, tokenizer = minilm.load()
    texts = tokenizer(["See every matmul.", "Change nothing, cost nothing."], padding=True, return_tensors="pt")
    kept: dict[str, dict[str, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            kept[name] = {"lhs": inputs[0].clone(), "output": output.clone(), "rhs": module.weight, "bias": module.bias}  # type: ignore[dict-item]

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep(name))
    found = hooks.Stats(("lhs", "rhs", "bias", "output"), for_dtype=torch.float8_e4m3fn, histogram=True, channels="lhs")
    with intercept(hooks.when(found, op="addmm")), torch.no_grad():
        model(**texts)
    rows = {(row.module, row.operand): row for row in found.rows()}
    assert len(kept) == 37
    assert set(rows) == {(name, operand) for name in kept for operand in ("lhs", "rhs", "bias", "output")}
    for (name, operand), row in rows.items():
        tensor = kept[name][operand].detach()
        values = float64(tensor)
        assert_row_is(row, values)
        cast = tensor.to(torch.float8_e4m3fn).to(torch.float32)
        assert row.underflow == int(((tensor != 0) & (cast == 0)).sum()) / tensor.numel()
        assert row.overflow == int((tensor.abs() > 448).sum()) / tensor.numel()
        assert found.histogram(name, operand) == powers_by_numpy(values)
    for name, operands in kept.items():
        assert torch.equal(found.channels(name), operands["lhs"].abs().flatten(0, -2).amax(0).double())


def a_few() -> hooks.Stats:
    found = hooks.Stats(for_dtype=torch.float16)
    found.post(call(torch.tensor([1.0, 0.0, 1e-9, 1e9]), module="net.0"))
    found.post(call(torch.tensor([math.nan, math.inf]), module=""))
    found.post(call(torch.tensor([0.1, 0.2], dtype=torch.float64), module=None, phase="backward"))
    found.post(call(torch.empty(0), module='an "odd",\nname', op="mkldnn::_linear_pointwise"))
    return found


def test_the_table_shows_every_row() -> None:
    lines = [" ".join(line.split()) for line in str(a_few()).splitlines()]
    assert lines[:4] == [
        "module op operand phase calls mean std min max zeros nan inf underflow overflow",
        "net.0 mm output forward 1 2.5e+08 4.33e+08 0 1e+09 25.0% 0 0 25.00% 25.00%",
        "- mm output forward 1 nan nan nan nan 0.0% 1 1 0.00% 50.00%",
        "? mm output backward 1 0.15 0.05 0.1 0.2 0.0% 0 0 0.00% 0.00%",
    ]
    assert "mkldnn::_linear_pointwise  output   forward" in str(a_few())
    assert "underflow" not in str(seen(torch.ones(1)))


def test_csv_has_every_number_to_the_last_digit(tmp_path: Path) -> None:
    found, path = a_few(), tmp_path / "stats.csv"
    path.write_text("what was there before")
    found.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found.rows()) == 4
    for line, row in zip(lines, found.rows(), strict=True):
        for field in dataclasses.fields(row):
            value, text = getattr(row, field.name), line[field.name]
            if value is None:
                assert text == ("?" if field.name == "module" else "")
            elif isinstance(value, float):
                assert repr(float(text)) == repr(value)
            else:
                assert text == str(value)
    assert os.listdir(tmp_path) == ["stats.csv"]


class FullDisk:
    """An open file that takes so many characters."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def write(self, text: str) -> int:
        self.room -= len(text)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(text))


@pytest.mark.parametrize("room", [0, 200])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    found, path = a_few(), tmp_path / "stats.csv"
    path.write_text("what was there before")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *args, **kwargs: FullDisk(_open(*args, **kwargs), room))
        with pytest.raises(OSError, match="No space left on device"):
            found.to_csv(path)
    assert path.read_text() == "what was there before"
    assert os.listdir(tmp_path) == ["stats.csv"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        found.to_csv(tmp_path / "nowhere" / "stats.csv")


_open = open


@pytest.mark.parametrize("of", ["weight", ("lhs", "wieght"), (), "", ("lhs", 3)])
def test_unknown_operands_are_refused(of: Any) -> None:
    with pytest.raises(ValueError, match=r"operands must be some of lhs, rhs, bias, output, got"):
        hooks.Stats(of)


@pytest.mark.parametrize("channels", ["weight", ["lhs", "rhs"], "", 1])
def test_unknown_channels_are_refused(channels: Any) -> None:
    with pytest.raises(ValueError, match="channels must be one of lhs, rhs, bias, output, got"):
        hooks.Stats(channels=channels)


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, "float16", float, 16],
)
def test_a_target_without_a_floating_point_range_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"for_dtype must be a floating-point torch.dtype with a sign, got"):
        hooks.Stats(for_dtype=dtype)


def test_what_was_not_asked_for_or_seen_is_told() -> None:
    found = seen(torch.ones(2))
    with pytest.raises(ValueError, match="must be made with histogram=True to have histograms"):
        found.histogram("m")
    with pytest.raises(ValueError, match="must be made with channels='lhs', say, to have channels"):
        found.channels("m")
    found = seen(torch.ones(2), histogram=True, channels="output")
    with pytest.raises(KeyError, match="no output of module 'n' was seen in forward; seen: m"):
        found.histogram("n")
    with pytest.raises(KeyError, match="no output of module 'm' was seen in backward; seen: m"):
        found.channels("m", phase="backward")
    with pytest.raises(KeyError, match="seen: none"):
        hooks.Stats(histogram=True).histogram("m")


def resident() -> int:
    """Bytes of memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize("way", ["together", "on a device"])
def test_memory_is_flat_over_many_calls_of_any_size(way: str) -> None:
    found = hooks.Stats(for_dtype=torch.float16)
    calls = 100_000 if way == "together" else 5_000
    with read(way, _PIECE=1 << 23):
        counts = torch.randint(1, 40, (calls,)).tolist()
        source = torch.randn(40)
        for number, size in enumerate(counts):
            found.post(call(source[:size], module=f"m{number % 7}"))
            if number == calls // 10:
                before = resident()
            if number % 1000 == 0:
                found.step()
        grown = resident() - before
        rows = found.rows()
    # What waits is at most a million values of 8 bytes, and is let go once a thousand calls.
    assert grown < 24 << 20
    assert sum(row.count for row in rows) == sum(counts)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_what_waits_to_be_read_together_is_bounded() -> None:
    found = hooks.Stats()
    source = torch.randn(8192)
    before = resident()
    for size in range(8192, 4096, -1):  # all different: none ever has company
        for _ in range(3):
            found.post(call(source[:size]))
        assert found._state.held <= stats._WAITING
    assert resident() - before < 64 << 20
    assert found.rows()[0].calls == 3 * 4096


def test_a_real_block_takes_no_memory_either() -> None:
    found = hooks.Stats(("lhs", "output"))
    a = torch.randn(4, 4)
    with intercept(found) as interceptor:
        for _ in range(3000):
            a @ a
            interceptor.step()
    assert [(row.operand, row.calls) for row in found.rows()] == [("lhs", 3000), ("output", 3000)]
    assert len(found._state.window) == 2
    assert found._state.waiting == {}


class Unstacked(Tensor):
    """A wrapper whose values can be read one by one, and which has no `stack` and little else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.cat):
            raise NotImplementedError(f"{func} of {cls}")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("histogram", [False, True])
def test_values_that_cannot_be_stacked_are_read_one_by_one(histogram: bool) -> None:
    found = hooks.Stats(histogram=histogram)
    for number in range(100):
        plain = torch.full((3, 3), float(number))
        found.post(call(plain.as_subclass(Unstacked) if number % 2 else plain, module=f"m{number}"))
    rows = found.rows()
    assert [(row.module, row.calls, row.count, row.min, row.max) for row in rows] == [
        (f"m{number}", 1, 9, float(number), float(number)) for number in range(100)
    ]
    assert found.skipped == 0


def test_a_failed_allocation_skips_one_tensor_and_moves_no_value_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_stack, reads = hooks.Stats._read, torch.stack, iter(range(1000))

    def stack(tensors: Any, *more: Any) -> Tensor:
        if len(tensors) == stats._BATCH:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real_stack(tensors, *more)

    def read_one(self: hooks.Stats, values: Tensor) -> Any:
        if next(reads) % 3 == 0:
            raise MemoryError
        return real_read(self, values)

    monkeypatch.setattr(torch, "stack", stack)
    monkeypatch.setattr(hooks.Stats, "_read", read_one)
    found = hooks.Stats()
    for number in range(stats._BATCH):
        found.post(call(torch.full((2, 2), float(number)), module=f"m{number}"))
    rows = found.rows()
    assert (len(rows), found.skipped) == (42, 22)
    for row in rows:
        assert row.module == f"m{row.min:.0f}"
        assert (row.calls, row.count, row.min, row.max) == (1, 4, row.mean, row.mean)


def test_a_batch_of_one_size_and_tensors_of_others_come_in_the_order_of_the_calls() -> None:
    found = hooks.Stats()
    for number in range(200):
        size = 10_000 if number % 7 == 0 else number % 5 + 1
        found.post(call(torch.full((size,), float(number)), module=f"m{number}"))
    assert [row.module for row in found.rows()] == [f"m{number}" for number in range(200)]
    assert [row.mean for row in found.rows()] == [float(number) for number in range(200)]


def test_an_empty_nested_operand_leaves_torch_its_own_error() -> None:
    empty = torch.nested.nested_tensor([])
    with pytest.raises(RuntimeError, match=r"\w") as bare:
        nn.functional.linear(empty, torch.ones(2, 3))
    found = hooks.Stats("lhs", channels="lhs")
    for level in ("function", "dispatch"):
        with pytest.raises(RuntimeError, match=re.escape(str(bare.value)[:80])), intercept(found, level=level):
            nn.functional.linear(empty, torch.ones(2, 3))
