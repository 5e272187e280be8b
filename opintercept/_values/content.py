"""Computes the statistics and the content hash that a run keeps of a tensor, in a few passes.

Invariant: nothing here waits for a device before `Content.read`. The statistics are floating-point sums, whose last
digits may differ from device to device.
"""

from __future__ import annotations

import math
import random
import threading
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from opintercept._core.tensors import is_strided
from opintercept._native import values as native
from opintercept._origin.links import graph_task
from opintercept._values import hash as _hash
from opintercept._values import on_device
from opintercept._values.late import Lot, Lots, graph_of
from opintercept._values.read import ON_HOST, parameter_of, stored_values
from opintercept._values.stats import Values
from opintercept._values.sums import LateSums, Reader, flat, scan

EMPTY = f"{0:016x}"  # the hash of no values
REMEMBERED = 4096  # tensors whose values are remembered
_LONGEST = 1 << 17  # rows and columns of a tensor that is remembered

_READER = Reader(None, False)
LOTS = Lots()
"""What devices are computing: `LOTS.send()` begins to copy it to the host."""
# What was read of tensors, by memory and look: the storage, the tensor's version, its sums, the values.
_known: dict[Any, tuple[weakref.ref[torch.UntypedStorage], int | None, tuple[int, float], Values]] = {}
# What devices read of parameters, likewise.
_on_devices: dict[Any, tuple[weakref.ref[torch.UntypedStorage], int, Content]] = {}
_small: dict[tuple[int, torch.dtype, int], Values] = {}  # of small tensors, by hash, dtype and count
_lock = threading.RLock()  # a signal's handler may record a call while its thread does


class Content:
    """Hash and statistics of a tensor, which a device may still be computing."""

    __slots__ = ("_hashed", "_known", "_late")

    def __init__(self, known: Values | None, late: LateSums | None = None, hashed: bool = False) -> None:
        self._known, self._late, self._hashed = known, late, hashed

    @property
    def at_hand(self) -> Values | None:
        """The values, or None if a device is still computing them."""
        return self._known

    def of(self, lot: Lot) -> Content:
        """The same of another replay of the graph that computes this; itself if it is not from a graph."""
        return self if self._late is None else Content(None, self._late.of(lot), self._hashed)

    @property
    def is_sent(self) -> bool:
        """Whether `read` runs no operator on a device; `LOTS.send()` makes it so."""
        return self._late is None or self._late.is_sent

    def read(self) -> Values:
        """The values; waits for the device."""
        if self._known is None:
            assert self._late is not None
            terms, sums = self._late.read()
            digits = _hash.digits_of(terms, int(sums.count)) if self._hashed else None
            counts = sums.count, sums.finite, sums.nan
            self._known = _values_of(digits, (*counts, sums.total, sums.spread), -sums.low, sums.high)
        return self._known


def content_of(tensor: Any) -> Content | None:
    """Hash and statistics of a tensor as it is now; None for a tensor without values."""
    try:
        return _content_of(tensor)
    except Exception:  # a dtype that torch cannot reduce, one value for many, whatever a subclass raises
        return None


def content_found(found: native.Found) -> Content:
    """Hash and statistics of a tensor that was read in C++, faster than finding out whether it has changed."""
    sums, below, high, number, *_ = found
    assert number is not None
    return Content(_values_of(_hash.digits_of(number, sums[0]) if sums[0] else EMPTY, sums, below, high))


def forget() -> None:
    """Drop all remembered values."""
    _known.clear()
    _on_devices.clear()
    _small.clear()
    _spread.cache_clear()


def _content_of(tensor: Any) -> Content | None:
    found = native.read(tensor, None, False, False, True)
    if found is not None:
        return content_found(found)
    values = stored_values(tensor)
    if values is None:
        return None
    count = values.numel()
    if count and values.device.type not in ON_HOST:
        return _read_later(tensor, values)
    bits = _bits_of(tensor)
    if not count:
        return Content(Values(None if bits is None else EMPTY, 0, 0, 0, None, None, None, None))
    if bits is not None and count <= _hash.SMALL:
        return Content(_of_small(values, bits))
    alive = tensor._base if tensor._is_view() else tensor
    if bits is None or not _may_remember(alive) or (sums := _sums(values, bits[0])) is None:
        return Content(_read_now(values, bits and _hash.hash_of(*bits)))
    # A weight is an operand of many calls, and q, k and v may share theirs. The sums take a tenth of the hash's time.
    # The same living memory of the same version was not written to, unless past autograd, by `.data` say. The sums
    # find that.
    version = None if tensor.is_inference() else tensor._version
    key = (values.data_ptr(), values.shape, values.stride(), values.dtype)
    storage, known = alive.untyped_storage(), _known.get(key)
    if known is not None and known[0]() is storage and known[1:3] == (version, sums):
        return Content(known[3])
    read = _read_now(values, _hash.hash_of(*bits))
    with _lock:
        if len(_known) >= REMEMBERED:
            _known.clear()
        _known[key] = (weakref.ref(storage), version, sums, read)
    return Content(read)


def _may_remember(tensor: torch.Tensor) -> bool:
    """Whether to ask for the storage, as `torch.utils.swap_tensors` refuses a tensor that has a weak reference.

    Autograd copies a gradient whose storage Python has asked for. So in a backward pass only weights are remembered.
    """
    return graph_task() == -1 or isinstance(tensor, torch.nn.Parameter)


def _values_of(digits: str | None, sums: Sequence[float], below: float, high: float) -> Values:
    count, finite, nan = map(int, sums[:3])
    if not finite:
        return Values(digits, count, nan, count - nan, None, None, None, None)
    *_, total, spread = sums
    mean = total / finite
    rms = math.sqrt(spread / finite + mean * mean)
    return Values(digits, count, nan, count - finite - nan, -below, high, _number(mean), _number(rms))


def _of_small(values: torch.Tensor, bits: _hash.Bits) -> Values:
    """The values of a small tensor. Its hash takes less time than its statistics, and finds those that are known."""
    hashed = _hash.hash_of(*bits)
    key = (int(hashed), values.dtype, values.numel())
    known = _small.get(key)
    if known is None:
        known = _read_now(values, hashed)
        with _lock:
            if len(_small) >= REMEMBERED:
                _small.clear()
            _small[key] = known
    return known


def _sums(values: torch.Tensor, dense: torch.Tensor) -> tuple[int, float] | None:
    """The sum of 64-bit words, which any one change changes, and a weighted sum of values, which an exchange changes.

    None if the memory does not consist of such words, or BLAS does not multiply the dtype. Two values of 16 bits are
    read as one of 32, whatever that is. If it is NaN, it equals nothing, and the tensor is read again.
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
    rows = torch.mv(dense.view(height, width), _spread(width, False, dense.dtype))
    weighted = torch.dot(rows, _spread(height, True, dense.dtype)).item()
    return int(flat.view(torch.int64).sum()), weighted


@lru_cache(256)
def _spread(size: int, of_rows: bool, dtype: torch.dtype) -> torch.Tensor:
    """Weights from 1 to 2, `[size]`; with the same ones for rows and columns, a square would equal its transpose."""
    drawn = bytearray(random.Random(2 * size + of_rows).randbytes(4 * size))  # by Python, since vmap has no torch.rand
    return _hash.check_unwrapped((torch.frombuffer(drawn, dtype=torch.int32).double() / 2**32 + 1.5).to(dtype))


def _read_now(values: torch.Tensor, hashed: torch.Tensor | None) -> Values:
    """Statistics of values on the host, and their hash as digits."""
    count = values.numel()
    digits = None if hashed is None else _hash.digits_of(int(hashed), count)
    few = count <= _hash.SMALL
    wide, nan, low, high, total, squares = scan(values if few else flat(values), few)
    finite = wide.numel()
    if not finite:
        return Values(digits, count, nan, count - nan, None, None, None, None)
    mean, rms = _number(total / finite), _number(math.sqrt(squares / finite))
    return Values(digits, count, nan, count - finite - nan, low, high, mean, rms)


def _bits_of(tensor: torch.Tensor) -> _hash.Bits | None:
    return _hash.bits_of(tensor) if is_strided(tensor) and not tensor.is_quantized else None


def _read_later(tensor: torch.Tensor, values: torch.Tensor) -> Content:
    """What a device finds of a tensor; in a backward pass, what it found of a parameter before.

    Each forward call reads it again: an optimizer of another library may have written to it past autograd.
    """
    parameter = parameter_of(tensor) if graph_of(values) is None else None  # each replay reads it
    key = None if parameter is None else (values.data_ptr(), values.shape, values.stride(), values.dtype)
    if graph_task() != -1 and (known := _on_devices.get(key)) is not None and parameter is not None:
        storage, version, content = known
        if storage() is parameter.untyped_storage() and version == parameter._version:
            return content
    if (piece := on_device.read(tensor, None, True)) is not None:
        LOTS.is_used = True
        content = Content(None, LateSums([piece]), True)
    else:
        bits = _bits_of(tensor)
        content = Content(None, _READER.read_later(values, LOTS, bits), bits is not None)
    if parameter is not None:
        with _lock:
            if len(_on_devices) >= REMEMBERED:
                _on_devices.clear()
            _on_devices[key] = weakref.ref(parameter.untyped_storage()), parameter._version, content
    return content


def _number(value: float) -> float | None:
    """The value; None if JSON has no word for it: a mean of float64 values can overflow."""
    return value if math.isfinite(value) else None
