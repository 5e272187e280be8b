"""Values that are read in C++: the figures of NumPy in float64, and those of torch's operators."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tensors import LAYOUTS, assert_sums_are, made, ordinary, random_bits, shapes
from native import library, run_python
from numpy_stats import COMPLEX, FLOATS, INTEGERS, TARGETS, TINY_FLOATS, every_value, float64
from torch import Tensor

from opintercept._native import values
from opintercept._values import hash as _hash
from opintercept._values import sums as _sums

pytestmark = [pytest.mark.slow, needs_compiler]

# Around the sizes of a vector, of a block, of a chunk, and of what several threads read.
COUNTS = (1, 2, 7, 8, 31, 33, 67, 1009, 4095, 4096, 4097, 8209, 65535, 65537, 131_101, 2**18 - 1, 2**18 + 3)

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def read(tensor: Tensor, **asked: Any) -> values.Found:
    found = library().read(
        tensor,
        asked.get("target"),
        *(name in asked for name in ("powers", "channels", "hashed")),
    )
    assert found is not None
    if not asked:
        assert repr(library().read(tensor)) == repr(found)  # a total may be NaN: Inf - Inf
    return found  # type: ignore[no-any-return]


@settings(max_examples=400, deadline=None)
@given(shapes, st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_sums_agree_with_numpy(shape: tuple[int, ...], dtype: torch.dtype, layout: str, make: Any, seed: int) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, seed))
    assert_sums_are(read(tensor), float64(tensor))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [random_bits, ordinary])
def test_tensors_of_every_size_are_read_whole(count: int, dtype: torch.dtype, make: Any) -> None:
    tensor = make((count,), dtype, count)
    assert_sums_are(read(tensor), float64(tensor))
    gaps = tensor.repeat_interleave(2)[::2]
    assert not gaps.is_contiguous() or count == 1
    assert repr(read(gaps)) == repr(read(tensor))


@pytest.mark.parametrize("place", [0, 1, 63, 4095, 4096, -1])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 0.0, -0.0])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_odd_value_is_found_wherever_it_is(place: int, odd: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(2**13 + 5, dtype=dtype)
    tensor[place] = odd
    assert_sums_are(read(tensor), float64(tensor))
    low, high = library().extent(tensor)
    expected = torch.aminmax(tensor)
    assert torch.equal(torch.tensor([low, high]).isnan(), torch.stack(list(expected)).isnan())
    assert math.isnan(odd) or (low, high) == (expected[0].item(), expected[1].item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_value_of_16_bits_is_read(dtype: torch.dtype) -> None:
    for value, bits in zip(every_value(dtype).tolist(), every_value(dtype).split(1), strict=True):
        for tensor in (bits, bits.expand(40).contiguous()):  # alone, and in a vector
            (count, finite, nan, nonzero, *_), below, high, *_ = read(tensor)
            assert count == tensor.numel()
            assert (finite, nan) == (math.isfinite(value) * count, math.isnan(value) * count)
            assert nonzero == (value != 0) * count
            assert not finite or (-below, high) == (value, value)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mean", [0.1, 1e4, -3e4])
def test_equal_values_have_no_spread_and_a_large_mean_costs_no_digits(dtype: torch.dtype, mean: float) -> None:
    constant = torch.full((70_001,), mean, dtype=dtype)
    (_, finite, *_, total, spread), *_ = read(constant)
    assert total / finite == pytest.approx(constant[0].item(), rel=1e-15)
    assert math.sqrt(spread / finite) < 1e-14 * abs(mean)
    if dtype is torch.float64:
        around = torch.randn(70_001, dtype=dtype) + 1e5 * mean
        spread = read(around)[0][-1]
        assert math.sqrt(spread / 70_001) == pytest.approx(around.std(correction=0).item(), rel=1e-6)


@pytest.mark.parametrize("scale", [5e-324, 1e-40, 1e-30, 1e15, 1e30, 3e38, 1e100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_tiny_and_huge_values_keep_their_digits(scale: float, dtype: torch.dtype) -> None:
    tensor = (torch.rand(5001, dtype=torch.float64) * scale).to(dtype)
    assert_sums_are(read(tensor), float64(tensor))


def test_a_spread_that_float64_cannot_hold_is_infinite() -> None:
    huge = torch.tensor([1e200, -1e200, 1.7e308, 3.0] * 2000, dtype=torch.float64)
    sums, below, high, *_ = read(huge)
    assert sums[-1] == math.inf
    assert (-below, high) == (-1e200, 1.7e308)
    assert read(huge[:2])[0][-1] == math.inf


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@layouts
@pytest.mark.parametrize("shape", [(2**19 + 11,), (1031, 601), (7, 300, 257)], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> None:
    tensor = LAYOUTS[layout](ordinary(shape, dtype, 1))
    before = torch.get_num_threads()
    found, extents = [], []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((read(tensor), read(tensor, target=(1e-3, 2.0), powers=1, channels=1, hashed=1)))
            extents.append(library().extent(tensor))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
    assert extents == [tuple(end.item() for end in torch.aminmax(tensor.detach()))] * 3


@settings(max_examples=400, deadline=None)
@given(shapes, st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_the_hash_is_that_of_torchs_operators(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, make: Any, seed: int
) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, seed))
    hashed = read(tensor, hashed=1)[3]
    assert hashed == (int(_hash.hash_of(*_hash.bits_of(tensor))) % 2**64 if tensor.numel() else 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(70000,), (1, 70000), (70000, 1), (70000, 3), (65536, 2), (65537, 2), (3, 65536), (2, 65537), (513, 512)],
    ids=str,
)
def test_the_hash_of_a_large_tensor_is_that_of_torchs_operators(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(shape, dtype, 3)
    turned = tensor.mT.contiguous().mT if len(shape) > 1 else tensor
    for each in (tensor, turned, tensor[..., ::2], tensor.expand(2, *shape)):
        assert read(each, hashed=1)[3] == int(_hash.hash_of(*_hash.bits_of(each))) % 2**64


@settings(max_examples=200, deadline=None)
@given(shapes, st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.sampled_from(TARGETS))
def test_misfits_and_powers_are_those_of_torchs_operators(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, make: Any, target: torch.dtype
) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, 5))
    reader = _sums.Reader(target, True)
    found = read(tensor, target=reader.limits, powers=1)
    flat = tensor.detach().reshape(-1)
    assert found[4] == bytearray(_sums.powers(flat).numpy().tobytes())
    if flat.numel():
        assert list(found[0][4:6]) == reader.read(flat)[0][4:6]
    assert repr(found[:3]) == repr(read(tensor, target=reader.limits)[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_value_has_its_power(dtype: torch.dtype) -> None:
    tensor = every_value(dtype)
    assert read(tensor, powers=1)[4] == bytearray(_sums.powers(tensor).numpy().tobytes())
    smallest = torch.tensor([1, 2, 3, 1 << 6], dtype=BITS[dtype.itemsize]).view(dtype)  # subnormal
    assert read(smallest, powers=1)[4] == bytearray(_sums.powers(smallest).numpy().tobytes())


@settings(max_examples=200, deadline=None)
@given(shapes.filter(len), st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_channels_are_those_of_torchs_operators(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, make: Any, seed: int
) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, seed))
    if not tensor.numel() or not tensor.dim():
        return
    raw = read(tensor, channels=1)[5]
    assert raw is not None
    expected = tensor.detach().abs().reshape(-1, tensor.shape[-1]).amax(0).to(torch.float64)
    assert torch.equal(torch.frombuffer(raw, dtype=torch.float64).nan_to_num(-1.0), expected.nan_to_num(-1.0))


class Plain(Tensor):
    """A subclass with its own memory."""


def freed(count: int, left: int = 0) -> Tensor:
    tensor = torch.ones(count)
    tensor.untyped_storage().resize_(left)
    return tensor


OTHERS: dict[str, Callable[[], Any]] = {
    **{f"{dtype}": functools.partial(torch.ones(3).to, dtype) for dtype in (*INTEGERS, *COMPLEX, *TINY_FLOATS)},
    "a number": lambda: 3.0,
    "None": lambda: None,
    "a list": lambda: [torch.ones(3)],
    "a subclass": lambda: torch.ones(3).as_subclass(Plain),
    "meta": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
    "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "zero": lambda: torch._efficientzerotensor((3,)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "freed": lambda: freed(8),
    "partly freed": lambda: freed(8, left=28),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)
def test_what_is_not_a_plain_tensor_of_floats_is_not_read(kind: str) -> None:
    other = OTHERS[kind]()
    assert library().read(other) is None
    assert library().read(other, None, True, True, True) is None
    assert library().extent(other) is None


def test_tensors_that_a_transform_has_wrapped_and_fake_tensors_are_not_read() -> None:
    found = []

    def function(x: Tensor) -> Tensor:
        found.append((library().read(x), library().extent(x)))
        return x.sum()

    torch.func.vmap(function)(torch.ones(3, 3))
    torch.func.grad(function)(torch.ones(3))
    with torch._subclasses.FakeTensorMode() as mode:
        function(mode.from_tensor(torch.ones(3)))
    assert found == [(None, None)] * 3


def test_a_lazy_copy_is_read_and_stays_lazy() -> None:
    tensor = torch.randn(100)
    lazy = torch._lazy_clone(tensor)
    assert read(lazy) == read(tensor)
    assert torch._C._is_cow_tensor(lazy)  # type: ignore[attr-defined]


def test_a_tensor_of_many_dimensions_is_not_read() -> None:
    assert library().read(torch.ones([1] * 17)) is None
    assert read(torch.ones([1] * 16))[0][0] == 1


def test_other_threads_run_while_a_large_tensor_is_read() -> None:
    tensor = torch.ones(1 << 24)
    gate, ran = threading.Lock(), []

    def other() -> None:
        with gate:
            ran.append(True)

    gate.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(100)  # nothing but a release hands the lock over
        gate.release()
        for _ in range(1000):  # on a busy machine it may take the system longer than a read to wake the thread
            library().read(tensor)
            if ran:
                break
        while_reading = list(ran)
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert while_reading == [True]


def test_options_are_given_all_or_none() -> None:
    with pytest.raises(TypeError, match="a tensor and 4 options, got 2 values"):
        library().read(torch.ones(1), None)
    with pytest.raises(TypeError, match="function takes exactly 2 arguments"):
        library().read(torch.ones(1), (1.0,), False, False, False)


FIND = """
import sys, torch
from opintercept._native import values
print([name for name in ("torch.utils.cpp_extension", "opintercept._engines") if name in sys.modules])
print(values.extent(torch.ones(3)), values.read(torch.ones(3)) is not None)
"""


def test_a_library_that_was_built_is_found_and_nothing_is_built(tmp_path: Path) -> None:
    library()
    assert run_python(FIND) == ["[]", "(1.0, 1.0) True"]
    assert run_python(FIND, TORCH_EXTENSIONS_DIR=str(tmp_path)) == ["[]", "None False"]
    assert list(tmp_path.iterdir()) == []


def test_a_library_that_does_not_load_is_left_alone_and_named_once(tmp_path: Path) -> None:
    broken = "\n".join(
        [
            "from opintercept._native import build",
            "path = build.cached_library()",
            "path.parent.mkdir(parents=True)",
            "path.write_text('no library')",
            "build.checksum_file(path).write_text(build._sum_of(path))",
            "",
        ]
    )
    first, second, *said = run_python(broken + FIND, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert (first, second) == ("[]", "None False")
    assert len(said) == 1
    assert "hooks use torch's operators, since the compiled kernels cannot be loaded: " in said[0]


def test_a_cache_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert run_python(FIND, TORCH_EXTENSIONS_DIR=str(tmp_path / "file")) == ["[]", "None False"]


def test_the_library_of_the_engine_is_used_from_then_on() -> None:
    code = (
        "import torch\nfrom opintercept import intercept\nfrom opintercept._native import values\n"
        "values.read = values.extent = values.unread\n"
        "with intercept((), engine='compiled'):\n    print(values.extent(torch.ones(3)))"
    )
    assert run_python(code) == ["(1.0, 1.0)"]
