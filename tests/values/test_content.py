"""The content hash and the statistics of a tensor: what they depend on, and that no stale value is remembered."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tensors import random_bits
from native import reading
from torch import Tensor

from opintercept._values import content as _content
from opintercept._values import hash as _hash
from opintercept._values.content import content_of
from opintercept._values.read import in_memory
from opintercept._values.stats import Values

pytestmark = pytest.mark.slow

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the values of other tests, and treat every tensor like a large one."""
    _content.forget()
    monkeypatch.setattr(_hash, "SMALL", 0)


@pytest.fixture
def by_torch() -> Iterator[None]:
    """Read with torch's operators, which remember what they have read."""
    with reading(False):
        yield


def values(tensor: Tensor) -> Values:
    content = content_of(tensor)
    assert content is not None
    return content.read()


def hash_of(tensor: Tensor) -> str:
    hashed = values(tensor).hash
    assert hashed is not None
    return hashed


def on_device(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> Values:
    """The values as a device other than the CPU computes them."""
    with reading(False), monkeypatch.context() as patched:
        patched.setattr(_content, "ON_HOST", ())
        return values(tensor)


def laid_out(tensor: Tensor, draw: st.DataObject) -> Tensor:
    """The same values with other strides, and elsewhere in a storage."""
    order = draw.draw(st.permutations(range(tensor.dim())))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    gap = draw.draw(st.integers(0, 3))
    base = torch.zeros(gap + 2 * tensor.numel(), dtype=tensor.dtype)
    step = draw.draw(st.sampled_from((1, 2)))
    inner = base[gap : gap + step * tensor.numel() : step][: tensor.numel()]
    inner.copy_(tensor.permute(order).reshape(-1))
    return inner.as_strided(
        [tensor.shape[d] for d in order],
        [step * math.prod(tensor.shape[e] for e in order[i + 1 :]) for i in range(len(order))],
        gap,
    ).permute(back)


def bits(tensor: Tensor) -> bytes:
    dense = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    return dense.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), data=st.data())
def test_the_hash_depends_on_the_values_and_not_on_the_strides(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = random_bits(shape, dtype, seed)
    other = laid_out(tensor, data)
    assert bits(other) == bits(tensor)
    assert hash_of(other) == hash_of(tensor)


@settings(max_examples=100, deadline=None)
@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), data=st.data())
def test_a_device_gives_the_hash_and_counts_of_the_host(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = laid_out(random_bits(shape, dtype, seed), data)
    with pytest.MonkeyPatch.context() as patch:
        there = on_device(tensor, patch)
    here = values(tensor)
    assert (there.hash, there.count, there.nan, there.inf) == (here.hash, here.count, here.nan, here.inf)
    assert (there.min, there.max) == (here.min, here.max)


@settings(max_examples=150, deadline=None)
@given(shape=SHAPES.filter(math.prod), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32), data=st.data())
def test_one_flipped_bit_changes_the_hash(shape: Any, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = random_bits(shape, dtype, seed)
    before = hash_of(tensor)
    raw = tensor.view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    raw[place] ^= 1 if dtype is torch.bool else 1 << data.draw(st.integers(0, 7))
    assert hash_of(tensor) != before


def test_a_device_reads_a_parameter_again_once_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward pass; each forward call reads it, since some optimizers write to it past autograd."""
    monkeypatch.setattr(_content, "ON_HOST", ())
    weight, other = torch.nn.Parameter(torch.randn(40, 30)), torch.randn(40, 30)
    with reading(False):
        assert content_of(weight) is not content_of(weight)
        first, view = content_of(weight), content_of(weight.mT)
        assert first is not None
        assert view is not None
        monkeypatch.setattr(_content, "graph_task", lambda: 0)
        assert content_of(weight) is first
        assert content_of(weight.mT) is view
        assert content_of(other) is not content_of(other)
        with torch.no_grad():
            weight[3, 5] += 1
        again = content_of(weight)
        assert again is not None
        assert again.read().hash not in (first.read().hash, view.read().hash)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(300,), (40, 50), (2, 2, 33000)], ids=str)
def test_the_hash_tells_apart_values_with_equal_sums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    changed = [tensor]
    for one, other in ((0, 1), (3, 17), (1, -1)):
        swapped, flipped = tensor.clone().view(-1), tensor.clone().view(-1)
        swapped[one], swapped[other] = tensor.view(-1)[other], tensor.view(-1)[one]
        flipped[one], flipped[other] = -flipped[one], -flipped[other]
        changed += [swapped.view(shape), flipped.view(shape)]
    changed += [tensor.flip(0), tensor.roll(1, -1), -tensor, tensor.flip(-1)]
    if len(shape) > 1:
        rows = torch.arange(shape[0]).roll(1)
        changed += [tensor[rows], tensor.mT.contiguous()]
    hashes = [hash_of(variant) for variant in changed]
    distinct = {bits(variant) + str(tuple(variant.shape)).encode() for variant in changed}
    assert len(set(hashes)) == len(distinct) >= 8


def test_signs_of_zeros_and_ones_change_the_hash() -> None:
    signs = torch.ones(8, 8)
    seen = {hash_of(torch.zeros(8, 8)), hash_of(-torch.zeros(8, 8))}
    for row in range(8):
        for column in range(8):
            other = signs.clone()
            other[row] *= -1
            other[:, column] *= -1
            seen.add(hash_of(other))
    assert len(seen) == 2 + 64


def test_different_numbers_of_zeros_have_different_hashes() -> None:
    assert len({hash_of(torch.zeros(count)) for count in range(20)}) == 20


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 70000), (70000, 1), (70000, 3), (65536, 2), (65537, 2), (3, 65536), (2, 65537), (140000,), (70000, 12)),
        # Each number of values and each side at which another way of reading begins: 2**14, 2**18, 2**22 and 2**16.
        *((128, 128), (128, 129), (256, 1024), (257, 1024), (512, 1024), (1000, 1000), (4096, 256), (5, 65536)),
        *((4096, 1024), (4097, 1024), (64, 65536), (2, 3, 100_000), (3, 300, 400)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8], ids=str)
def test_blocks_and_the_transpose_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(shape, dtype, 1)
    expected = hash_of(tensor)
    if len(shape) == 2:
        assert hash_of(tensor.t().contiguous().t()) == expected
    with pytest.MonkeyPatch.context() as patch:
        assert on_device(tensor, patch).hash == expected
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    assert hash_of(tensor) != expected


@settings(max_examples=60, deadline=None)
@given(height=st.integers(1, 40), width=st.integers(1, 40), piece=st.integers(0, 8), block=st.integers(2, 5))
def test_a_hash_in_pieces_follows_the_definition(height: int, width: int, piece: int, block: int) -> None:
    lanes = random_bits((height, width), torch.int32, height * 41 + width)
    size = 1 << block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hash, "SMALL", 0)
        patch.setattr(_hash, "BLOCK", size)
        patch.setattr(_hash, "PIECE", 1 << block + piece)
        _hash.forget()
        got = int(_hash.form(lanes, False))
        rows, columns = (_hash.weights(lanes.device, size, of_rows).tolist() for of_rows in (True, False))
    _hash.forget()
    whole = height <= size and width <= size and height * width <= 1 << block + piece
    expected = 0
    for row, numbers in enumerate(lanes.tolist()):
        for column, number in enumerate(numbers):
            weight = rows[row % size] * columns[column % size]
            if not whole:
                weight *= _hash.factor(row // size, True) * _hash.factor(column // size, False)
            expected += weight * number
    assert (got - expected) % 2**64 == 0


def reference(tensor: Tensor) -> tuple[int, int, float | None, float | None, float | None, float | None]:
    """The statistics in float64, by their definition."""
    numbers = [abs(v) if isinstance(v, complex) else float(v) for v in tensor.reshape(-1).tolist()]
    finite = [v for v in numbers if math.isfinite(v)]
    nan, inf = sum(map(math.isnan, numbers)), sum(map(math.isinf, numbers))
    if not finite:
        return nan, inf, None, None, None, None
    mean = math.fsum(finite) / len(finite)
    rms = math.sqrt(math.fsum(v * v for v in finite) / len(finite))
    return nan, inf, min(finite), max(finite), mean, rms


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("odd", ["finite", "nan", "inf", "all nan", "all inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_cover_the_finite_values(
    dtype: torch.dtype, odd: str, device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = (torch.randn(40, 30) * 3).to(dtype)
    if dtype is torch.float8_e4m3fn and "inf" in odd:
        pytest.skip("has no infinity")
    if odd != "finite":
        if not (dtype.is_floating_point or dtype.is_complex):
            pytest.skip("has neither")
        places = slice(None) if odd.startswith("all") else (slice(3, 5), slice(7))
        filled = tensor.to(torch.complex128 if dtype.is_complex else torch.float64)
        filled[places] = float(odd.removeprefix("all "))
        tensor = filled.to(dtype)
    nan, inf, low, high, mean, rms = reference(tensor)
    got = on_device(tensor, monkeypatch) if device else values(tensor)
    assert (got.count, got.nan, got.inf) == (tensor.numel(), nan, inf)
    if low is None:
        assert (got.min, got.max, got.mean, got.rms) == (None, None, None, None)
        return
    # Sums of 1200 float32 values: some roundings of 2**-24; moduli of complex64 are rounded, too.
    near: dict[str, Any] = {"rel": 1e-5, "abs": 1e-6}
    assert got.min == pytest.approx(low, **near)
    assert got.max == pytest.approx(high, **near)
    assert got.mean == pytest.approx(mean, **near)
    assert got.rms == pytest.approx(rms, **near)
    assert got.finite == (odd == "finite")


@pytest.mark.parametrize("count", [1, 5, 64, 5000, 70_000])
@pytest.mark.parametrize("scale", [3e38, 1e30, 1.0, 1e-30, 1e-44])
def test_statistics_hold_over_the_whole_range_of_float32(scale: float, count: int) -> None:
    tensor = torch.full((count,), scale)
    expected = tensor[0].item()
    got = values(tensor)
    assert (got.min, got.max) == (expected, expected)
    assert got.mean == pytest.approx(expected, rel=1e-6)  # sums are rounded
    assert got.rms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_root_mean_square_of_a_large_tensor_is_precise(dtype: torch.dtype) -> None:
    tensor = torch.rand(1 << 12, 1 << 12).to(dtype)  # torch's own norm is 5e-4 off
    got = values(tensor)
    exact = tensor.to(torch.float64)
    assert got.rms == pytest.approx(exact.square().mean().sqrt().item(), rel=1e-6)
    assert got.mean == pytest.approx(exact.mean().item(), rel=1e-6)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.add_(1),
        lambda t: t[3].zero_(),
        lambda t: t.t()[2].neg_(),
        lambda t: t.data.neg_(),
        lambda t: t.data.mul_(2),
        lambda t: t.data.copy_(t.data.flip(0)),
        lambda t: t.data.copy_(t.data.flip(1)),
        lambda t: t.data.copy_(t.data.roll(1, 1)),
        lambda t: t.data.copy_(t.data[torch.randperm(16)]),
        lambda t: t.data.copy_(t.data.t().clone()),
        lambda t: t.data[2:4].neg_(),
        lambda t: t.detach()[0, :2].copy_(t.detach()[0, :2].flip(0).clone()),
        lambda t: t.set_(torch.randn(16, 16, dtype=t.dtype)),
    ],
    ids=[
        *("add_", "a view", "a transpose", "data neg_", "data mul_", "data rows", "data columns", "data roll"),
        *("data permutation", "data transpose", "data some signs", "swap", "set_"),
    ],
)
def test_a_write_is_never_missed(write: Any, dtype: torch.dtype) -> None:
    tensor = torch.randn(16, 16, dtype=dtype)
    stale = hash_of(tensor)
    assert hash_of(tensor) == stale
    write(tensor)
    fresh = hash_of(tensor.clone())
    assert fresh != stale
    assert hash_of(tensor) == fresh


@pytest.mark.usefixtures("forgetful")
def test_writes_through_numpy_are_seen() -> None:
    tensor = torch.randn(16, 16)
    array = tensor.numpy()
    for change in (lambda: array.sort(), lambda: array.__setitem__((1, 2), 7.0), lambda: array.__imul__(-1)):
        stale = hash_of(tensor)
        change()
        assert hash_of(tensor) == hash_of(tensor.clone()) != stale


@pytest.mark.usefixtures("forgetful")
@pytest.mark.slow
def test_memory_that_is_used_again_is_read_again() -> None:
    source = torch.randn(32, 32)
    addresses = []
    for order in (torch.arange(32), torch.arange(32).flip(0), *(torch.randperm(32) for _ in range(30))):
        fresh = source[order]
        addresses.append(fresh.data_ptr())
        assert hash_of(fresh) == hash_of(fresh.t().contiguous().t())
        # Permutation matrices have the same sums of rows and of columns.
        del fresh
        matrix = torch.eye(32)[order]
        addresses.append(matrix.data_ptr())
        assert hash_of(matrix) == hash_of(matrix.t().contiguous().t())
        del matrix
    assert len(set(addresses)) < len(addresses)  # otherwise this tests nothing


@pytest.mark.usefixtures("forgetful", "by_torch")
@pytest.mark.parametrize("kind", ["written to", "another at its address"])
def test_equal_sums_alone_do_not_make_tensors_equal(kind: str) -> None:
    # One value is so large that rounding hides the exchange of two others in the sum of floats.
    tensor = torch.rand(16, 16).index_fill(1, torch.tensor([0]), 1e30)
    stale = hash_of(tensor)
    exchanged = tensor.clone()
    exchanged[3, 4:8] = tensor[3, 4:8].roll(2)
    assert _content._sums(tensor, tensor) == _content._sums(exchanged, exchanged)
    if kind == "written to":
        tensor.copy_(exchanged)
    else:
        array, address = tensor.numpy(), tensor.data_ptr()
        array[:] = exchanged.numpy()
        tensor = torch.from_numpy(array)
        assert tensor.data_ptr() == address
        assert tensor._version == 0
    assert hash_of(tensor) != stale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_a_dimension_of_one_may_have_any_stride(dtype: torch.dtype) -> None:
    row = torch.arange(8).to(dtype)
    for tensor in (row[::2][1:2], row.view(4, 2).t()[:1, 1:2], row[3:].as_strided((3, 1), (1, 5)), row[2]):
        assert hash_of(tensor) == hash_of(tensor.clone(memory_format=torch.contiguous_format))


@pytest.mark.usefixtures("forgetful", "by_torch")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_an_unchanged_tensor_is_hashed_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Mock(wraps=_hash.hash_of)
    monkeypatch.setattr(_hash, "hash_of", hashed)
    weight = torch.nn.Parameter(torch.randn(16, 16, dtype=dtype))
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            assert hash_of(weight) == hash_of(weight.clone())
            assert hash_of(weight.t()) == hash_of(weight.t().clone())
    assert hashed.call_count == 2 + 6  # the weight, its transpose, and each clone


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("odd", [math.nan, math.inf, 6e4, 1e-7])
def test_values_of_16_bits_that_make_odd_pairs_are_read_again_after_a_change(dtype: torch.dtype, odd: float) -> None:
    tensor = torch.full((16, 16), odd, dtype=dtype)
    for place in ((0, 0), (7, 8), (15, 15)):
        stale = hash_of(tensor)
        assert hash_of(tensor) == stale
        tensor.data[place] = 1.0
        assert hash_of(tensor) == hash_of(tensor.clone()) != stale


@pytest.mark.usefixtures("by_torch")
def test_small_tensors_of_the_same_values_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(wraps=_hash.digits_of)
    monkeypatch.setattr(_hash, "digits_of", read)
    _content.forget()
    tensor = torch.randn(16, 16)
    for same in (tensor, tensor.clone(), tensor.t().contiguous().t()):
        assert values(same) == values(tensor)
    assert read.call_count == 1
    # Other numbers with the same bits.
    assert values(tensor.view(torch.int32)).max == tensor.view(torch.int32).max().item()
    assert values(tensor.view(16, 8, 2)).hash != values(tensor).hash
    assert values(torch.zeros(3)).count == 3
    assert values(torch.zeros(4)).count == 4


@pytest.mark.usefixtures("by_torch")
def test_few_values_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_content, "REMEMBERED", 50)
    _content.forget()
    for size in (2, 200):
        tensors = [torch.randn(size, size) for _ in range(120)]
        tracked = [values(tensor) for tensor in tensors]
        assert tracked == [values(tensor) for tensor in tensors]
    assert 0 < len(_content._small) <= 50
    assert 0 < len(_content._known) <= 50


@pytest.mark.usefixtures("forgetful", "by_torch")
def test_nothing_is_kept_alive() -> None:
    tensor = torch.randn(16, 16)
    gone = weakref.ref(tensor)
    hash_of(tensor)
    assert _content._known
    del tensor
    assert gone() is None


@pytest.mark.parametrize("tensor", [torch.ones(3, device="meta"), torch.ones(3).to(torch.uint16), None, 3], ids=repr)
def test_a_tensor_that_cannot_be_reduced_has_no_values_or_all(tensor: Any) -> None:
    content = content_of(tensor)
    assert content is None or content.read().count == 3


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_sparse_and_quantized_tensors_have_statistics_and_no_hash() -> None:
    dense = torch.tensor([[0.0, 2.0], [0.0, -4.0]])
    quantized = torch.quantize_per_tensor(dense, 0.5, 128, torch.quint8)
    for tensor in (dense.to_sparse(), dense.to_sparse_csr(), quantized):
        got = values(tensor)
        assert (got.hash, got.count, got.nan, got.inf, got.min, got.max) == (None, 4, 0, 0, -4.0, 2.0)
        assert got.mean == -0.5
        assert got.rms == pytest.approx(math.sqrt(5), rel=1e-6)  # a norm in float32


def test_conjugate_and_negative_bits_are_resolved() -> None:
    tensor = torch.randn(3, 4, dtype=torch.complex64)
    assert hash_of(tensor.conj()) == hash_of(tensor.conj().resolve_conj()) != hash_of(tensor)
    negative = tensor.conj().imag
    assert negative.is_neg()
    assert hash_of(negative) == hash_of(negative.resolve_neg())


@pytest.mark.usefixtures("by_torch")
def test_tensors_that_a_transform_has_wrapped_are_not_kept() -> None:
    tensors = [torch.randn(size, size) for size in (4, 20, 200)]
    expected = [hash_of(tensor) for tensor in tensors]
    _hash.forget()
    _content.forget()

    def function(x: Tensor) -> Tensor:
        for tensor in tensors:
            content_of(tensor)
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(3, 3))
    for size in (4, 20, 200):
        for of_rows in (True, False):
            _hash.weights(torch.device("cpu"), size, of_rows).data_ptr()
        _content._spread(size, False, torch.float32).data_ptr()
    assert [hash_of(tensor) for tensor in tensors] == expected


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    _content.forget()
    hash_of(torch.ones(123, 45))
    assert torch.equal(before, torch.get_rng_state())


def test_a_wrapper_without_memory_has_no_content() -> None:
    class Wrapper(Tensor):  # as that of AOTAutograd, which runs `squeeze_` and its like on itself, too
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise NotImplementedError

    wrapper = Tensor._make_wrapper_subclass(Wrapper, (3, 4), dtype=torch.float32)
    with torch.utils._mode_utils.no_dispatch():
        readable = in_memory(wrapper)
    assert not readable
    assert content_of(wrapper) is None
