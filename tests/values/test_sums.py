"""How `Stats` reads values: its numbers agree with NumPy in float64, however they are read, in bounded memory."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native import reading
from numpy_stats import (
    FLOATS,
    TARGETS,
    TINY_FLOATS,
    WAYS,
    assert_row_is,
    call,
    every_value,
    float64,
    one_row,
    powers_by_numpy,
    read,
    seen,
    tensors,
    ways,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from opintercept import HookError, hooks, intercept
from opintercept._values import sums
from opintercept.hooks import stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:ComplexHalf support is experimental:UserWarning",
        "ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning",
    ),
]


@ways
@settings(deadline=None)
@given(tensor=tensors())
def test_every_number_agrees_with_numpy(way: str, tensor: Tensor) -> None:
    with read(way):
        row = one_row(tensor)
    assert_row_is(row, float64(tensor), narrow=tensor.element_size() <= 2)
    assert row.calls == 1


@ways
def test_equal_values_beside_nan_do_not_deviate(way: str) -> None:
    with read(way):
        assert one_row(torch.tensor([math.nan, math.nan, 34973.82060296421], dtype=torch.float64)).std == 0.0


@ways
@settings(deadline=None)
@given(several=st.lists(tensors(), min_size=2, max_size=5))
def test_several_calls_give_the_statistics_of_all_their_values(way: str, several: list[Tensor]) -> None:
    with read(way):
        row = one_row(*several)
    assert_row_is(row, np.concatenate([float64(tensor) for tensor in several]), narrow=True)
    assert row.calls == len(several)


@pytest.mark.parametrize("count", [1, 8191, 8192, 8193, 9 * 1024, 2**19, 2**19 + 3, 2**20 + 1024])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("broken", [False, True])
def test_tensors_of_every_size_are_read_whole(count: int, dtype: torch.dtype, broken: bool) -> None:
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
    with read(way, CHUNK=1 << 13, ROW=1 << 10, PIECE=1 << 12):
        row = one_row(*tensor.split(4000), tensor)
    values = float64(tensor)
    assert row.mean == pytest.approx(values.mean(), rel=1e-7)
    assert row.std == pytest.approx(values.std(), rel=1e-5)


@ways
@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_the_default_device_does_not_matter(way: str, mean: float) -> None:
    tensor = torch.randn(40) + mean
    expected = one_row(tensor)
    with read(way), torch.device("meta"):
        row = one_row(tensor, for_dtype=torch.float16, histogram=True)
    assert (row.count, row.min, row.max) == (40, expected.min, expected.max)
    assert row.std == pytest.approx(expected.std, rel=1e-5)


@ways
def test_float64_keeps_the_spread_of_values_that_differ_only_in_their_last_digits(way: str) -> None:
    with read(way):
        row = one_row(torch.randn(300, dtype=torch.float64) + 1e9)
        constant = one_row(torch.full((300,), 0.1), torch.full((2, 7), 0.1))
    assert row.std == pytest.approx(1.0, rel=0.2)
    assert constant.std < 1e-16
    assert constant.mean == pytest.approx(np.float32(0.1), rel=1e-15)


@ways
@pytest.mark.parametrize("means", [(0, 1e4, -3e4, 0.1), range(-1000, 2000, 7)], ids=["a few", "many"])
def test_the_spread_of_calls_with_different_means_is_around_the_common_mean(way: str, means: Iterable[float]) -> None:
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
def test_squares_of_bfloat16_signs_add_up_without_drift(scale: float) -> None:
    # Equal squares are the worst case of a sum in float32: each addition rounds in the same direction.
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
    expected: dict[str, Callable[[], np.ndarray]] = {
        "quantized": lambda: float64(tensor.dequantize()),
        "nested": lambda: np.concatenate([float64(plain), float64(plain[:1])]),
        "jagged": lambda: np.concatenate([float64(plain), float64(plain[:1])]),
        "negated": lambda: float64(-plain),
        "zero": lambda: np.zeros(24),
    }
    values = expected.get(layout, lambda: float64(plain))()
    for way in WAYS:
        with read(way):
            assert_row_is(one_row(tensor), values)


def test_a_tensor_in_another_order_is_read_without_a_copy() -> None:
    dense = torch.randn(3, 4, 5)
    for view in (dense, dense.permute(2, 0, 1), dense.transpose(0, 2), dense[1:]):
        assert sums.flat(view).untyped_storage().data_ptr() == dense.untyped_storage().data_ptr()
    assert torch.equal(sums.flat(dense[..., 0]).sort().values, dense[..., 0].flatten().sort().values)


@ways
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, *TINY_FLOATS], ids=str)
def test_underflow_and_overflow_agree_with_a_cast_to_the_target(
    way: str, target: torch.dtype, dtype: torch.dtype
) -> None:
    values = every_value(dtype)
    lost = (values.to(torch.float32) != 0) & (values.to(torch.float32).to(target).to(torch.float32) == 0)
    beyond = values.to(torch.float64).abs() > torch.finfo(target).max
    with read(way, CHUNK=1 << 14, ROW=1 << 7, PIECE=1 << 13):
        row = one_row(values, for_dtype=target)
        below_limits = one_row(values[values.to(torch.float32).abs() < 1e14], for_dtype=target)
    assert row.underflow == int(lost.sum()) / values.numel()
    assert row.overflow == int(beyond.sum()) / values.numel()
    # Without NaN and huge values, 16-bit values are read in float32.
    few = values.to(torch.float32).abs() < 1e14
    assert below_limits.underflow == int(lost[few].sum()) / int(few.sum())
    assert below_limits.overflow == int(beyond[few].sum()) / int(few.sum())


def test_there_is_no_underflow_without_a_target() -> None:
    row = one_row(torch.ones(2))
    assert (row.underflow, row.overflow) == (None, None)
    empty = one_row(torch.ones(0), for_dtype=torch.float16)
    assert (empty.underflow, empty.overflow) == (None, None)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
def test_the_histogram_agrees_with_the_floor_of_the_logarithm(way: str, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    with read(way, CHUNK=1 << 14, PIECE=1 << 13):
        found = seen(values, values[:300], histogram=True)
    expected = powers_by_numpy(np.concatenate([float64(values), float64(values[:300])]))
    assert found.histogram("m") == expected


def test_the_ends_of_the_histogram_include_all_values_beyond() -> None:
    values = torch.tensor([1e-300, 5e-324, 2.0**-149, 2.0**127, 1e300, 0.0, math.inf], dtype=torch.float64)
    assert seen(values, histogram=True).histogram("m") == {-149: 3, 127: 2}
    assert seen(torch.zeros(3), histogram=True).histogram("m") == {}


def test_a_histogram_adds_up_the_operators_of_a_module_and_keeps_phases_apart() -> None:
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
    # NaN stays NaN, in torch and in NumPy.
    expected = np.abs(float64(tensor)).reshape(-1, tensor.shape[-1]).max(0)
    assert np.array_equal(found.channels("m").numpy(), expected, equal_nan=True)
    assert found.channels("m").dtype is torch.float64


def test_channels_of_the_rhs_are_output_channels_but_input_channels_for_a_linear() -> None:
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


def test_a_changed_number_of_channels_raises_and_keeps_the_rows() -> None:
    found = hooks.Stats(channels="output")
    found.post(call(torch.ones(2, 3)))
    with pytest.raises(HookError, match=r"last dimension stays the same .* got 4 channels after 3; choose calls with"):
        found.post(call(torch.ones(2, 4)))
    assert found.channels("m").tolist() == [1.0] * 3
    assert [(row.calls, row.count) for row in found.rows()] == [(1, 6)]
    found.post(call(torch.ones(2, 4), op="aten::bmm"))
    with pytest.raises(ValueError, match=r"have different numbers of channels, float64\[3\]"):
        found.channels("m")


class Waits(TorchDispatchMode):
    """Finds the operators that make the host wait for a device."""

    WAITING = frozenset(
        (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "index",
            "item",
            "is_nonzero",
            "equal",
            "unique",
            "bincount",
        )
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran += 1
        if func.overloadpacket.__name__ in self.WAITING:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_call_waits_for_a_device_and_reading_does() -> None:
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
    assert "aten._local_scalar_dense.default" in waits.found  # the host reads the sums now
    assert {row.operand: row.calls for row in found.rows()} == {"lhs": 3, "output": 6}


@ways
def test_sums_started_in_inference_mode_go_on_outside_it(way: str) -> None:
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


def resident() -> int:
    """Resident memory of the process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
@pytest.mark.parametrize("way", ["together", "on a device"])
def test_memory_is_flat_over_many_calls_of_any_size(way: str) -> None:
    found = hooks.Stats(for_dtype=torch.float16)
    calls = 100_000 if way == "together" else 5_000
    with read(way, PIECE=1 << 23):
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
    # At most a million values of 8 bytes wait, and they are read about every thousand calls.
    assert grown < 24 << 20
    assert sum(row.count for row in rows) == sum(counts)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_the_number_of_waiting_values_is_bounded() -> None:
    source = torch.randn(8192)

    def fill() -> hooks.Stats:
        found = hooks.Stats()
        for size in range(8192, 4096, -1):  # all sizes differ, so that no tensor finds others of its size
            for _ in range(3):
                found.post(call(source[:size]))
            assert found._state.held <= stats.WAITING
        return found

    fill()  # the allocator keeps memory in pieces of the sizes that it has seen
    before = resident()
    found = fill()
    assert resident() - before < 64 << 20
    assert found.rows()[0].calls == 3 * 4096


def test_many_steps_of_a_block_take_no_memory() -> None:
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
    """A subclass without `stack` and `cat`, whose tensors can be read one by one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.stack, torch.cat):
            raise NotImplementedError(f"{func} of {cls}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


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


def test_a_failed_allocation_skips_single_tensors_and_mixes_up_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_stack, reads = sums.Reader.read, torch.stack, iter(range(1000))

    def stack(tensors: Any, *more: Any) -> Tensor:
        if len(tensors) == sums.BATCH:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real_stack(tensors, *more)

    def read_one(self: sums.Reader, values: Tensor) -> Any:
        if next(reads) % 3 == 0:
            raise MemoryError
        return real_read(self, values)

    monkeypatch.setattr(torch, "stack", stack)
    monkeypatch.setattr(sums.Reader, "read", read_one)
    found = hooks.Stats()
    with reading(False):
        for number in range(sums.BATCH):
            found.post(call(torch.full((2, 2), float(number)), module=f"m{number}"))
    rows = found.rows()
    assert (len(rows), found.skipped) == (42, 22)
    for row in rows:
        assert row.module == f"m{row.min:.0f}"
        assert (row.calls, row.count, row.min, row.max) == (1, 4, row.mean, row.mean)


def test_rows_keep_the_order_of_the_calls_whatever_the_sizes() -> None:
    found = hooks.Stats()
    for number in range(200):
        size = 10_000 if number % 7 == 0 else number % 5 + 1
        found.post(call(torch.full((size,), float(number)), module=f"m{number}"))
    assert [row.module for row in found.rows()] == [f"m{number}" for number in range(200)]
    assert [row.mean for row in found.rows()] == [float(number) for number in range(200)]


def test_an_empty_nested_operand_raises_torchs_own_error() -> None:
    empty = torch.nested.nested_tensor([])
    with pytest.raises(RuntimeError, match=r"\w") as bare:
        nn.functional.linear(empty, torch.ones(2, 3))
    found = hooks.Stats("lhs", channels="lhs")
    for level in ("function", "dispatch"):
        with pytest.raises(RuntimeError, match=re.escape(str(bare.value)[:80])), intercept(found, level=level):
            nn.functional.linear(empty, torch.ones(2, 3))
