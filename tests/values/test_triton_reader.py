"""The kernel in Triton reads what the reader in C++ does: under Triton's interpreter, or on a GPU if there is one."""

from __future__ import annotations

import math
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tensors import LAYOUTS, assert_sums_are, made, ordinary, random_bits, shapes
from native import library, reading, run_python
from numpy_stats import TARGETS, TINY_FLOATS, every_value, float64, one_row, parts_of
from torch import Tensor

from opintercept._native import values
from opintercept._values import content as _content
from opintercept._values import hash as _hash
from opintercept._values import on_device, sums
from opintercept._values.stats import Sums
from opintercept.hooks import stats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, of what the kernel leaves out
]
triton_reader = pytest.importorskip(
    "opintercept._values.triton_reader", reason="Triton is not installed; `pip install triton` brings its interpreter"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
few = shapes.filter(lambda shape: math.prod(shape) <= 5000)
LIMITS = {target: sums.Reader(target, False).limits for target in TARGETS}


def read(tensor: Tensor, limits: tuple[float, float] | None = None, hashed: bool = True) -> values.Found:
    """What `_native.values.read` returns: the rows of the kernel, added up."""
    rows = triton_reader.read(tensor, limits, hashed)
    if rows is None:
        assert not tensor.numel()
        return (0, 0, 0, 0, 0, 0, 0.0, 0.0), -math.inf, -math.inf, 0, None, None
    added = Sums()
    for *figures, below, high in rows.cpu()[:, 1:].view(torch.float64).tolist():
        added.add(figures, below, high)
    counts = added.count, added.finite, added.nan, added.nonzero, added.underflow, added.overflow
    figures = *map(int, counts), added.total, added.spread
    return figures, -added.low, added.high, int(rows[:, 0].sum()) % 2**64, None, None


def assert_same(found: values.Found, tensor: Tensor) -> None:
    """Compare with the reader in C++: sums to their rounding, all else exactly."""
    native = library().read(tensor.cpu(), None, False, False, True)
    assert (found[0][:6], *found[1:4]) == (native[0][:6], *native[1:4])
    assert_sums_are(found, float64(tensor.cpu()))


@needs_compiler
@settings(max_examples=100)
@given(few, st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_any_tensor_is_read_as_in_cpp(shape: Any, dtype: torch.dtype, layout: str, make: Any, seed: int) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, seed).to(DEVICE))
    assert_same(read(tensor), tensor)


@settings(max_examples=50)
@given(few.filter(math.prod), st.sampled_from(TINY_FLOATS), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2**16))
def test_a_float8_tensor_is_read_as_by_torchs_operators(shape: Any, dtype: torch.dtype, layout: str, seed: int) -> None:
    tensor = LAYOUTS["as it is" if layout == "a parameter" else layout](random_bits(shape, dtype, seed).to(DEVICE))
    if tensor.numel():
        found = read(tensor)
        assert_sums_are(found, float64(tensor.cpu()))
        assert found[3] == int(_hash.hash_of(*_hash.bits_of(tensor))) % 2**64


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS, *TINY_FLOATS], ids=str)
def test_values_that_a_target_cannot_hold_are_counted(dtype: torch.dtype, target: torch.dtype) -> None:
    tensor = every_value(dtype)[:: 37 if dtype.itemsize == 2 else 1].to(DEVICE)
    found, (figures, *_) = read(tensor, LIMITS[target], hashed=False), sums.Reader(target, False).read(tensor.cpu())
    assert_sums_are(found, float64(tensor.cpu()))
    assert list(found[0][:6]) == figures[:6]


@needs_compiler
@pytest.mark.parametrize("shape", [(), (70000,), (65537, 2), (2, 65537), (513, 512), (3, 5, 7, 1030)], ids=str)
def test_a_large_tensor_is_read_as_in_cpp(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_reader, "TILE", triton_reader.TILE if len(shape) == 4 else 1 << 14)
    tensor = ordinary(shape, torch.bfloat16, 1).to(DEVICE)
    turned = tensor.mT.contiguous().mT if len(shape) == 2 else tensor
    assert_same(read(tensor), tensor)
    assert_same(read(turned), tensor)


@pytest.mark.parametrize("mean", [0.1, 1e4, -3e4])
def test_a_large_mean_costs_the_spread_no_digits(mean: float) -> None:
    tensor = torch.full((5000,), mean, device=DEVICE)
    tensor[:100] = math.nan
    assert read(tensor)[0][-1] == pytest.approx(0, abs=1e-24 * mean**2)
    tensor[::7] = torch.tensor(mean).nextafter(torch.tensor(math.inf))
    assert_sums_are(read(tensor), float64(tensor.cpu()))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_tensor_takes_one_launch_and_no_copy(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = LAYOUTS[layout](torch.ones(6, 4, 5))
    monkeypatch.setattr(triton_reader, "kernel", kernel := MagicMock())
    triton_reader.read(tensor, None, True)
    launch = kernel.__getitem__.return_value
    launch.assert_called_once()
    assert launch.call_args.args[0].data_ptr() == tensor.data_ptr()


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Read every tensor as on a device, by the kernel."""
    monkeypatch.setattr(_content, "ON_HOST", ())
    monkeypatch.setattr(stats, "ON_HOST", ())
    monkeypatch.setattr(on_device, "DEVICES", (DEVICE,))
    monkeypatch.setattr(on_device, "known", (triton_reader, ""))
    with reading(False):
        yield


@pytest.mark.parametrize("shape", [(2, 3), (5000,), (70, 300)], ids=str)
def test_runs_and_stats_take_what_the_kernel_reads(
    shape: Any, by_kernel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_bits(shape, torch.float16, 5).to(DEVICE)
    content, row = _content.content_of(tensor), one_row(tensor, tensor.movedim(0, -1), for_dtype=torch.float8_e5m2)
    monkeypatch.setattr(on_device, "known", (None, ""))
    other, other_row = _content.content_of(tensor), one_row(tensor, tensor.movedim(0, -1), for_dtype=torch.float8_e5m2)
    assert content is not None
    assert other is not None
    for one, two in zip(content.read().as_dict().values(), other.read().as_dict().values(), strict=True):
        assert one == (pytest.approx(two, rel=1e-12) if isinstance(two, float) else two)
    assert parts_of([row]) == parts_of([other_row])
    assert (row.mean, row.std) == pytest.approx((other_row.mean, other_row.std), rel=1e-12)


COMPILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from opintercept._values import triton_reader

class Driver:
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)

class Launcher:
    def __getitem__(self, grid):
        return lambda *args: print("ld.global.v4" in kernel.run(*args, grid=grid, warmup=True).asm["ptx"])

triton.runtime.driver.set_active(Driver())
kernel, triton_reader.kernel = triton_reader.kernel, Launcher()
triton_reader.read(torch.zeros(600, 704), None, True)
triton_reader.read(torch.zeros(2, 4, 3, 64).transpose(1, 2).bfloat16(), None, True)
triton_reader.read(torch.zeros(50, 64).T.half(), (2.0**-10, 448.0), True)
triton_reader.read(torch.zeros(()).to(torch.float8_e4m3fn), (2.0**-150, 1e300), False)
"""


def test_the_kernel_compiles_for_a_gpu_that_is_not_there() -> None:
    vectors = run_python(COMPILES, sys.executable, TRITON_INTERPRET="0")[
        :4
    ]  # whether 16 bytes are loaded at once; some Tritons add lines
    assert vectors == ["True", "True", "True", "False"]
