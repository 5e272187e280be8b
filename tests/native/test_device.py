"""The kernel for devices, run on the host, reads what the reader in C++ does, whatever goes wrong with its driver."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_cuda
import fake_devices
import pytest
import torch
from compiler import needs_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tensors import LAYOUTS, assert_sums_are, made, ordinary, random_bits, shapes
from native import library
from numpy_stats import FLOATS, TARGETS, TINY_FLOATS, every_value, float64
from torch import Tensor

from opintercept._native import values
from opintercept._values import hash as _hash
from opintercept._values import sums

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # NumPy's, of what the kernel leaves out
]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
few = shapes.filter(lambda shape: math.prod(shape) <= 5000)
LIMITS = {target: sums.Reader(target, False).limits for target in TARGETS}


@pytest.fixture(autouse=True)
def _well_behaved() -> Any:
    fake_cuda.behave()
    yield
    fake_cuda.behave()


def launched(
    tensor: Tensor, limits: tuple[float, float] | None = None, hashed: bool = True, lasts: bool = False
) -> Any:
    return fake_devices.reader().read_on_device(tensor, limits, hashed, lasts)


def read(
    tensor: Tensor, limits: tuple[float, float] | None = None, hashed: bool = True, lasts: bool = False
) -> values.Found:
    """What `_native.values.read` returns."""
    reading = launched(tensor, limits, hashed, lasts)
    if reading is None:
        assert not tensor.numel()
        return (0, 0, 0, 0, 0, 0, 0.0, 0.0), -math.inf, -math.inf, 0, None, None
    found = reading.found()
    assert repr(found) == repr(reading.found())
    return found  # type: ignore[no-any-return]


def assert_same(found: values.Found, tensor: Tensor) -> None:
    """Compare with the reader in C++: sums to their rounding, all else exactly."""
    native = library().read(tensor, None, False, False, True)
    assert (found[0][:6], *found[1:4]) == (native[0][:6], *native[1:4])
    assert_sums_are(found, float64(tensor))


@settings(max_examples=300)
@given(few, st.sampled_from([*FLOATS, *WHOLE]), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_any_tensor_is_read_as_in_cpp(shape: Any, dtype: torch.dtype, layout: str, make: Any, seed: int) -> None:
    if layout == "a parameter" and dtype in WHOLE:
        layout = "as it is"
    tensor = LAYOUTS[layout]((random_bits if dtype in WHOLE else make)(shape, dtype, seed))
    assert_same(read(tensor), tensor)


@settings(max_examples=100)
@given(few, st.sampled_from(FLOATS), st.sampled_from(sorted(LAYOUTS)), made, st.integers(0, 2**16))
def test_without_a_hash_each_value_of_an_expanded_tensor_counts(
    shape: Any, dtype: torch.dtype, layout: str, make: Any, seed: int
) -> None:
    tensor = LAYOUTS[layout](make(shape, dtype, seed))
    found = read(tensor, hashed=False)
    if tensor.numel():
        assert found[3] is None
        assert_sums_are(found, float64(tensor))


@settings(max_examples=100)
@given(few.filter(math.prod), st.sampled_from(TINY_FLOATS), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 2**16))
def test_a_float8_tensor_is_read_as_by_torchs_operators(shape: Any, dtype: torch.dtype, layout: str, seed: int) -> None:
    tensor = LAYOUTS["as it is" if layout == "a parameter" else layout](random_bits(shape, dtype, seed))
    if tensor.numel():
        found = read(tensor)
        assert_sums_are(found, float64(tensor))
        assert found[3] == int(_hash.hash_of(*_hash.bits_of(tensor))) % 2**64


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", [*FLOATS[1:], *TINY_FLOATS], ids=str)
def test_values_that_a_target_cannot_hold_are_counted(dtype: torch.dtype, target: torch.dtype) -> None:
    tensor = every_value(dtype)[:: 37 if dtype.itemsize == 2 else 1]
    found, (figures, *_) = read(tensor, LIMITS[target], hashed=False), sums.Reader(target, False).read(tensor)
    assert_sums_are(found, float64(tensor))
    assert list(found[0][:6]) == figures[:6]


# On both sides of each number of rows and columns at which another way of reading or hashing begins.
@pytest.mark.parametrize(
    "shape",
    [(), (70000,), (65537, 2), (2, 65537), (513, 512), (3, 5, 7, 1030), (1 << 20,), (1 << 18, 1), (1, 1 << 18), (3, 7)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_a_large_tensor_is_read_as_in_cpp(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = ordinary(shape, dtype, 1)
    turned = tensor.mT.contiguous().mT if len(shape) == 2 else tensor
    for each in (tensor, turned, tensor[..., :-1] if shape else tensor, tensor.flatten()[1:]):
        assert_same(read(each), each)


@pytest.mark.parametrize("mean", [0.1, 1e4, -3e4])
def test_a_large_mean_costs_the_spread_no_digits(mean: float) -> None:
    tensor = torch.full((500_000,), mean)
    tensor[:100] = math.nan
    assert read(tensor)[0][-1] == pytest.approx(0, abs=1e-24 * mean**2)
    tensor[::7] = torch.tensor(mean).nextafter(torch.tensor(math.inf))
    assert_sums_are(read(tensor), float64(tensor))


def test_the_order_of_blocks_changes_no_bit() -> None:
    """The stand-in runs them in another order each time."""
    tensor = torch.randn(3000, 700, dtype=torch.float64)
    assert len({repr(read(tensor)) for _ in range(5)}) == 1


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(2, 2, dtype=torch.complex64),
    lambda: torch.zeros(2, 2, dtype=torch.complex64).conj().imag,
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.zeros(0, 3),
    lambda: torch.zeros(2, dtype=torch.uint16),
    lambda: torch.zeros((3,) * 9)[..., ::2, ::2, ::2, ::2, ::2, ::2, ::2, ::2],
    lambda: torch.nested.nested_tensor([torch.ones(2)]),
], ids=["complex", "negative", "sparse", "meta", "empty", "a dtype", "many dimensions", "nested"])  # fmt: skip
def test_what_the_kernel_does_not_know_is_left_alone(make: Any) -> None:
    fake_cuda.driver().fake_count(b"cuLaunchKernel")
    assert launched(make()) is None
    assert fake_cuda.driver().fake_count(b"cuLaunchKernel") == 0


# Ways to write to a weight, and whether all of its values are others afterwards.
WRITINGS: dict[str, Any] = {
    "in place": lambda w: w.data.mul_(2),  # which leaves its version alone
    "with a version": lambda w: w.detach()[3, 5].fill_(7),  # a version of the memory, so one value is enough
    "other memory": lambda w: setattr(w, "data", w.data + 1),
    "not at all": lambda w: None,
    "the same again": lambda w: w.data.copy_(w.data.clone()),
}


@pytest.mark.parametrize("writing", WRITINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_is_read_again_only_when_it_has_changed(writing: str, dtype: torch.dtype, turned: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(1100, 1000, dtype=dtype))

    def given() -> Tensor:
        return weight.mT if turned else weight

    assert [is_read(given()) for _ in range(3)] == [True, False, False]
    with torch.no_grad():
        WRITINGS[writing](weight)
    assert is_read(given()) == (writing not in ("not at all", "the same again"))
    assert not is_read(given())


def is_read(weight: Tensor, hashed: bool = True) -> bool:
    """Whether a weight is read, and not only a sample of it. What is found is the same."""
    fake_cuda.driver().fake_blocks_that_read()
    found = read(weight, None, hashed, lasts=True)
    blocks: int = fake_cuda.driver().fake_blocks_that_read()
    assert repr(found) == repr(read(weight, None, hashed))
    return blocks > 0


def test_a_weight_is_known_by_how_it_is_read() -> None:
    weight = torch.randn(1100, 1000)
    assert is_read(weight)
    for other in (weight[:, 1:], weight[1:], weight.mT, weight.view(-1)):
        assert is_read(other)
        assert not is_read(other)
    assert is_read(weight, hashed=False)
    counted = read(weight, LIMITS[torch.float8_e4m3fn], lasts=True)
    assert repr(counted) == repr(read(weight, LIMITS[torch.float8_e4m3fn]))


def test_a_small_tensor_and_one_that_counts_no_versions_are_read_each_time() -> None:
    with torch.inference_mode():
        cache = torch.randn(1100, 1000)
    for tensor in (torch.randn(10, 10), torch.ones(1, 1).expand(2000, 2000), cache):
        assert [is_read(tensor, hashed=False) for _ in range(2)] == [True, True]


def test_memory_that_another_tensor_gets_is_read_again() -> None:
    """The allocator gives the memory of one to the next, in which most values are the same."""
    for number in range(3):
        tensor = torch.zeros(1 << 20)
        tensor[7] = number
        assert is_read(tensor)
        del tensor


def test_there_is_no_end_of_weights() -> None:
    memory = torch.zeros((1 << 18) + 2100, dtype=torch.float64)
    weights = [memory[place : place + (1 << 18)] for place in range(2100)]
    for weight in weights:
        launched(weight, hashed=False, lasts=True).found()
    assert not is_read(weights[-1], hashed=False)
    assert is_read(weights[0], hashed=False)


def test_a_weight_that_changes_while_it_is_looked_at_is_read() -> None:
    """Of some blocks that see the old values and others that see the new ones, the last one reads all."""
    weight, blocks = torch.randn(1100, 1000), list[int]()
    read(weight, lasts=True)
    new = torch.randn(1100, 1000)

    def between_blocks() -> None:
        blocks.append(1)
        if len(blocks) == 3:
            ctypes.memmove(weight.data_ptr(), new.data_ptr(), new.nbytes)

    use = ctypes.CFUNCTYPE(None)(between_blocks)
    fake_cuda.driver().fake_between_blocks(use)
    try:
        found = read(weight, lasts=True)
    finally:
        fake_cuda.driver().fake_between_blocks(None)
    assert len(blocks) == 64
    assert repr(found) == repr(read(new))
    assert not is_read(weight)


def test_a_launch_that_fails_leaves_no_weight_known() -> None:
    weight = torch.randn(1100, 1000)
    fake_cuda.driver().fake_fail(b"cuLaunchKernel", 1)
    assert launched(weight, lasts=True) is None
    assert is_read(weight)


def test_freed_memory_is_not_read() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    assert launched(tensor) is None
    assert launched(tensor[:10]) is not None


def test_a_row_that_comes_late_is_waited_for() -> None:
    fake_cuda.behave(late=True)
    tensors = [torch.full((2,), float(number)) for number in range(5)]
    readings = [launched(each) for each in tensors]
    assert not any(each.has_arrived() for each in readings)
    assert [each.found()[0][6] for each in readings] == [0, 2, 4, 6, 8]
    assert all(each.has_arrived() for each in readings)


def test_rows_are_used_again_only_when_they_have_been_written() -> None:
    fake_cuda.behave(late=True)
    kept = launched(torch.full((3,), 7.0))
    for _ in range(3000):
        launched(torch.ones(2))  # and dropped before its row is written
    assert kept.found()[0][6] == 21.0
    gc.collect()
    fake_cuda.behave()
    assert {read(torch.ones(2))[0][6] for _ in range(3000)} == {2.0}


def test_there_is_no_end_of_rows_that_wait() -> None:
    """There is: the caller then reads the tensor with torch's operators."""
    module = fake_devices.loaded()
    fake_cuda.behave(late=True)
    x, held = torch.ones(2), []
    while (reading := module.read_on_device(x, None, True, False)) is not None:
        held.append(reading)
    assert len(held) == 64 * 1024 - 1
    assert {each.found()[0][6] for each in held} == {2.0}
    held.clear()
    assert module.read_on_device(x, None, True, False).found()[0][6] == 2.0


def test_a_device_that_fails_is_not_waited_for() -> None:
    fake_cuda.behave(late=True)
    reading = launched(torch.ones(3))
    fake_cuda.behave(late=True, lost=True)
    assert reading.found() is None
    assert launched(torch.ones(3)) is None


def test_a_graph_that_is_captured_gets_no_row() -> None:
    fake_cuda.behave(capturing=True)
    assert launched(torch.ones(3)) is None
    row, scratch = torch.full((12,), -1), torch.zeros(1 << 17, dtype=torch.uint8)
    tensor = torch.tensor([1.0, 5.0]).expand(3, 2)
    assert fake_devices.reader().read_on_device(tensor, None, False, False, row, scratch) == 3
    assert (row[1].item(), row[7:11].view(torch.float64).tolist()) == (2, [6.0, 8.0, 1.0, 5.0])
    assert not scratch[:40].any()  # as the next launch needs it


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemAlloc", "cuMemHostAlloc"])
def test_a_launch_that_fails_leaves_the_row_to_the_next(name: str) -> None:
    module = fake_devices.loaded()
    fake_cuda.driver().fake_fail(name.encode(), 3)
    x = torch.ones(2)
    assert [module.read_on_device(x, None, True, False) for _ in range(3)] == [None] * 3
    assert module.read_on_device(x, None, True, False).found()[0][6] == 2.0


def test_threads_that_wait_for_the_same_row_all_get_it() -> None:
    """The stand-in writes it once a thread has asked for the stream, which takes a while."""
    fake_cuda.behave(late=True)
    for _ in range(20):
        reading = launched(torch.ones(3))
        with ThreadPoolExecutor(4) as threads:
            found = [each.result() for each in [threads.submit(reading.found) for _ in range(4)]]
        assert [each[0][6] for each in found] == [3.0] * 4


def test_threads_launch_and_wait_side_by_side() -> None:
    fake_cuda.behave(late=True)
    wrong: list[Any] = []

    def work(number: int) -> None:
        x = torch.full((50,), float(number))
        for _ in range(300):
            readings = [launched(x) for _ in range(3)]
            wrong.extend(each for each in readings[1:] if each.found()[0][6] != 50 * number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_driver_that_lacks_a_function_is_named() -> None:
    module = fake_devices.fresh()
    with pytest.raises(RuntimeError, match="cannot open shared object file"):
        module.set_up_device("libno_cuda.so", "cpu")
    with pytest.raises(RuntimeError, match="the driver has no cuDeviceGet"):
        module.set_up_device("libc.so.6", "cpu")
    assert module.read_on_device(torch.ones(2), None, True, False) is None
    module.set_up_device(fake_cuda.driver()._name, "cpu")
    with pytest.raises(RuntimeError, match="cuModuleLoadData: invalid argument"):
        module.load_on_device(0, b"other")
