"""What a run keeps of a tensor's values: a content hash and statistics, in a few passes and without waiting.

Invariant: integer arithmetic makes the hash, so it is the same on every device and for every stride; the statistics
are sums in floating point and may differ in their last digits.
"""

from __future__ import annotations

import math
import threading
import weakref
from functools import lru_cache
from typing import Any

import torch

from opintercept._tensors import is_strided
from opintercept.hooks._values import moments, stored_values
from opintercept.runs.codec import Values

_BLOCK = 1 << 16  # weights of a table; longer rows and more of them are taken in blocks
_FEW = 1 << 12  # weights of the first table, which torch makes without waking its threads
_SMALL = 1 << 14  # elements whose weights are kept whole, and whose squares float32 can add up
_PIECE = 1 << 18  # elements that are widened to 64 bits at a time; fresh memory for more takes longer than the sum
_WIDE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
# Devices whose values are read at once; those of others are read when the work queued there is done.
_ON_HOST = ("cpu",)
_MEMO = 4096
_LONGEST = 1 << 17  # rows and columns of what is remembered

_tables: dict[tuple[torch.device, int, bool], torch.Tensor] = {}  # parts of one, too: slicing takes its time
_memo: dict[Any, tuple[weakref.ref[torch.Tensor], int | None, tuple[int, float], Values]] = {}
_alike: dict[tuple[int, torch.dtype, int], Values] = {}  # by hash, dtype and count
_lock = threading.RLock()  # a signal's handler may record a call while its thread does


class Content:
    """Hash and statistics that may still be under way on a device."""

    __slots__ = ("_known", "_packed", "_ready")

    def __init__(self, known: Values | None, packed: torch.Tensor | None = None) -> None:
        self._known = known
        self._ready: torch.cuda.Event | None = None
        self._packed = packed
        if packed is not None and packed.is_cuda:
            with torch.cuda.device(packed.device):
                self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
                self._packed.copy_(packed, non_blocking=True)
                self._ready = torch.cuda.Event()
                self._ready.record()

    @property
    def at_hand(self) -> Values | None:
        """The values if they need not be waited for."""
        return self._known

    def read(self) -> Values:
        """The values; waits for the device."""
        if self._known is None:
            assert self._packed is not None
            if self._ready is not None:
                self._ready.synchronize()
            self._known = _unpacked(self._packed.cpu())
        return self._known


def content_of(tensor: Any) -> Content | None:
    """Hash and statistics of a tensor as it is now; None for one without values.

    The hash is a multilinear one, mod 2**64, of the elements' bits in at most 32 bits each, whose weights are
    products of one for the row and one for the column: D. Lemire and O. Kaser, "Strongly universal string hashing
    is fast", The Computer Journal 57(11), 2014. A transposed matrix is so read in the order of memory.
    """
    try:
        return _content_of(tensor)
    except Exception:  # a dtype that torch cannot reduce, one value for many, whatever a subclass raises
        return None


def _content_of(tensor: Any) -> Content | None:
    values = stored_values(tensor)
    if values is None:
        return None
    bits = _bits(tensor) if is_strided(tensor) and not tensor.is_quantized else None
    count = values.numel()
    if not count:
        return Content(Values(None if bits is None else f"{0:016x}", 0, 0, 0, None, None, None, None))
    if values.device.type not in _ON_HOST:
        return Content(None, _packed(values, bits))
    if bits is not None and count <= _SMALL:
        return Content(_remembered(values, bits))
    if bits is None or (sums := _sums(values, bits[0])) is None:
        return Content(_on_host(values, bits, bits and _hash(*bits)))
    # Weights come by again and again, and q, k and v share an operand. The sums take a tenth of the hash's time.
    # The same tensor, which has lived since, and an equal version mean that nothing was written but past autograd,
    # by `.data` say; that, the sums tell.
    version = None if tensor.is_inference() else tensor._version
    lives = tensor._base if tensor._is_view() else tensor
    key = (values.data_ptr(), values.shape, values.stride(), values.dtype)
    known = _memo.get(key)
    if known is not None and known[0]() is lives and known[1:3] == (version, sums):
        return Content(known[3])
    read = _on_host(values, bits, _hash(*bits))
    with _lock:
        if len(_memo) >= _MEMO:
            _memo.clear()
        _memo[key] = (weakref.ref(lives), version, sums, read)
    return Content(read)


def _remembered(values: torch.Tensor, bits: tuple[torch.Tensor, bool]) -> Values:
    """Those of a small tensor, whose hash takes less time than its statistics, and tells whether they are known."""
    hashed = _hash(*bits)
    key = (int(hashed), values.dtype, values.numel())
    known = _alike.get(key)
    if known is None:
        known = _on_host(values, bits, hashed)
        with _lock:
            if len(_alike) >= _MEMO:
                _alike.clear()
            _alike[key] = known
    return known


def _sums(values: torch.Tensor, dense: torch.Tensor) -> tuple[int, float] | None:
    """The sum of 64-bit words, which any one change changes, and one of weighted values, which an exchange does.

    None where memory is not made of such words, and for other dtypes than BLAS multiplies. Two values of 16 bits are
    taken for one of 32, whatever that is; if one is a NaN, it equals none, and the tensor is read again.
    """
    if dense.dtype is not values.dtype or not dense.dim():
        return None
    if dense.dtype in (torch.bfloat16, torch.float16) and not dense.size(-1) % 2 and not dense.data_ptr() % 4:
        dense = dense.view(torch.float32)
    if dense.dtype not in (torch.float32, torch.float64):
        return None
    flat = dense.view(-1)
    size = flat.element_size()
    width = dense.size(-1)
    height = flat.numel() // width
    if (flat.numel() * size) % 8 or flat.data_ptr() % 8 or max(width, height) > _LONGEST:
        return None
    rows = torch.mv(dense.view(height, width), _spread(width, dense.dtype))
    weighted = torch.dot(rows, _spread(height, dense.dtype)).item()
    return int(flat.view(torch.int64).sum()), weighted


@lru_cache(256)
def _spread(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Weights from 1 to 2, `[size]`."""
    generator = torch.Generator("cpu").manual_seed(size)
    return _plain(torch.rand(size, dtype=dtype, generator=generator, device="cpu") + 1)


def _plain(table: torch.Tensor) -> torch.Tensor:
    """The table, to be kept; a RuntimeError for one that a transform of torch.func has wrapped, and ends."""
    table.data_ptr()
    return table


def _bits(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The tensor `[..., n]` in the order of memory, and whether its last two dimensions are swapped for that."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        # A dimension of one may have any stride, and its tensor no view of another dtype.
        plain = not tensor.dim() or tensor.stride(-1) == 1
        return (tensor if plain else tensor.clone(memory_format=torch.contiguous_format)), False
    if tensor.dim() == 2 and tensor.mT.is_contiguous():
        return tensor.mT, True
    return tensor.contiguous(), False


def _hash(dense: torch.Tensor, swapped: bool) -> torch.Tensor:
    """The hash as an int64 tensor of no dimension, on the tensor's device."""
    dense = dense if dense.dim() else dense.view(1)
    lanes = dense.view(_WIDE[dense.element_size()])
    wide = lanes.numel() // dense.numel()  # two lanes of 32 bits for an element of 64
    width = dense.size(-1)
    if wide == 1:
        return _form(lanes if lanes.dim() == 2 else lanes.view(-1, width), swapped)
    lanes = lanes.view(-1, width, wide)
    parts = [_form(lanes[..., lane], swapped) * _signed(_mixed(lane + 2)) for lane in range(wide)]
    return torch.stack(parts).sum()


def _form(lanes: torch.Tensor, swapped: bool) -> torch.Tensor:
    """The sum over `[r, c]` of row[r] * lanes[r, c] * column[c]; over `[c, r]` if swapped."""
    height, width = lanes.shape
    device = lanes.device
    if height * width <= _SMALL:
        # One product and one sum; what a matmul of ours costs is the way through the interceptor.
        return (lanes * _products(device, height, width, swapped)).sum()
    if height <= _BLOCK and width <= _BLOCK and height * width <= _PIECE:
        products = _summed(lanes.to(torch.int64), _weights(device, width, swapped))
        return _summed(products, _weights(device, height, not swapped))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for right in range(0, width, _BLOCK):
        columns = lanes[:, right : right + _BLOCK]
        # Divides _BLOCK, so no piece is in two blocks.
        step = min(_BLOCK, 1 << (_PIECE // columns.size(1)).bit_length() - 1)
        for top in range(0, height, step):
            piece = columns[top : top + step].to(torch.int64)
            start = top % _BLOCK
            rows = _weights(device, start + piece.size(0), not swapped)[start:]
            part = _summed(_summed(piece, _weights(device, piece.size(1), swapped)), rows)
            row, column = top // _BLOCK, right // _BLOCK
            total += part * _signed(_factor(row, not swapped) * _factor(column, swapped))
    return total


@lru_cache(256)
def _products(device: torch.device, height: int, width: int, swapped: bool) -> torch.Tensor:
    """The weights of elements, `[height, width]`."""
    inner, outer = _weights(device, width, swapped), _weights(device, height, not swapped)
    return _plain(outer.unsqueeze(1) * inner)


def _factor(block: int, of_rows: bool) -> int:
    """What the weights of a block are multiplied by."""
    return _mixed(2 * block + of_rows + 2**32) | 1


def _summed(lanes: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The products of the last dimension with the weights, added up mod 2**64."""
    if lanes.device.type == "cpu":
        return torch.mv(lanes, weights) if lanes.dim() == 2 else torch.dot(lanes, weights)
    return (lanes * weights).sum(-1)  # CUDA has neither for integers


def _weights(device: torch.device, size: int, of_rows: bool) -> torch.Tensor:
    """The first weights of the rows or the columns, `[size]`, at most `_BLOCK`."""
    known = _tables.get((device, size, of_rows))
    if known is None:
        whole = min(_FEW, _BLOCK) if size <= _FEW else _BLOCK
        if (table := _tables.get((device, whole, of_rows))) is None:
            table = _plain(_mixed_all(2 * torch.arange(whole, device="cpu") + (of_rows + 2**40)).to(device))
            _tables[device, whole, of_rows] = table
        known = _tables[device, size, of_rows] = _plain(table[:size])
    return known


def _mixed(number: int) -> int:
    """A number of 64 bits that looks random: splitmix64, S. Vigna, https://prng.di.unimi.it/splitmix64.c."""
    z = (number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def _mixed_all(numbers: torch.Tensor) -> torch.Tensor:
    """`_signed(_mixed(number))` of each: int64 arithmetic is mod 2**64, and a shift fills up with the sign."""
    z = numbers * _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30 & 2**34 - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & 2**37 - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & 2**33 - 1)


def _signed(number: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _floats(values: torch.Tensor) -> torch.Tensor:
    """The values in a dtype that reductions take, and in which their squares seldom overflow."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.float32 if values.is_floating_point() else torch.float64)


def _on_host(values: torch.Tensor, bits: tuple[torch.Tensor, bool] | None, number: torch.Tensor | None) -> Values:
    count = values.numel()
    hashed = None if number is None else _digits(int(number), count)
    if bits is not None and bits[0].dtype is values.dtype and bits[0].numel() == count:
        values = bits[0]  # the same values in the order of memory, where reductions are faster
    floats = values if values.dtype in (torch.float32, torch.float64) else _floats(values)
    ends = torch.aminmax(floats)
    low, high = ends[0].item(), ends[1].item()
    if count <= _SMALL:
        total, norm = floats.sum().item(), torch.linalg.vector_norm(floats).item()
    else:
        total, squares = moments(floats.reshape(-1))
        norm = math.sqrt(squares)
    if math.isfinite(low) and math.isfinite(high):
        if not (math.isfinite(total) and math.isfinite(norm)):
            double = floats.to(torch.float64)
            total, norm = double.sum().item(), torch.linalg.vector_norm(double).item()
        return Values(hashed, count, 0, 0, low, high, _number(total / count), _number(norm / math.sqrt(count)))
    return _unpacked(_packed(values, None), hashed)


def _digits(number: int, count: int) -> str:
    """The hash as it is written; zeros of other shapes have another."""
    return f"{(number + _mixed(count)) & (2**64 - 1):016x}"


def _packed(values: torch.Tensor, bits: tuple[torch.Tensor, bool] | None) -> torch.Tensor:
    """Everything in one tensor, `int64[9]`, with nothing to wait for; numbers as the bits of a float64."""
    floats = _floats(values).to(torch.float64)
    nan, inf = floats.isnan(), floats.isinf()
    odd = nan | inf
    zeros = floats.masked_fill(odd, 0.0)
    numbers = torch.stack(
        [
            floats.masked_fill(odd, math.inf).amin(),
            floats.masked_fill(odd, -math.inf).amax(),
            zeros.sum(),
            torch.linalg.vector_norm(zeros),
        ]
    ).view(torch.int64)
    hashed = torch.zeros((), dtype=torch.int64, device=values.device) if bits is None else _hash(*bits)
    known = torch.full((), bits is not None, dtype=torch.int64, device=values.device)
    count = torch.full((), values.numel(), dtype=torch.int64, device=values.device)
    return torch.cat([torch.stack([known, hashed, count, nan.sum(), inf.sum()]), numbers])


def _unpacked(packed: torch.Tensor, hashed: str | None = None) -> Values:
    known, number, count, nan, inf = packed[:5].tolist()
    low, high, total, norm = packed[5:].view(torch.float64).tolist()
    if known:
        hashed = _digits(number, count)
    finite = count - nan - inf
    if not finite:
        return Values(hashed, count, nan, inf, None, None, None, None)
    mean, rms = _number(total / finite), _number(norm / math.sqrt(finite))
    return Values(hashed, count, nan, inf, _number(low), _number(high), mean, rms)


def _number(value: float) -> float | None:
    """None for one that JSON has no word for: a mean of float64 values near the end of their range."""
    return value if math.isfinite(value) else None
