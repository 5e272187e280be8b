"""How the values of tensors are added up, on the host and on other devices: for `Stats`, and for `Print` and `Log`.

Invariant: nothing here waits for a device except `LateSums.read`, `Cell.read` and `summarize`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from opintercept._core.errors import HookError
from opintercept._native import values as native
from opintercept._values import on_device
from opintercept._values.hash import BLOCK, Bits, check_unwrapped, hash_of, weights
from opintercept._values.late import Lot, Lots, Numbers, Place, place_of
from opintercept._values.read import moments, real_values
from opintercept._values.stats import Sums

CHUNK = 1 << 19
"""How many values are read at a time on the host, so that they stay in the CPU's cache."""
PIECE = 1 << 22
"""How many values are reduced at a time on another device, which limits the memory for intermediate results."""
BATCH = 64
"""How many small tensors of one size are read together."""

# The powers of two that a histogram distinguishes are those of bfloat16 and float32. Its ends include all beyond.
LOWEST, HIGHEST = -149, 127

Read = tuple[Sequence[float], float, float]
"""What `Sums.add` takes."""


class Cell(Sums):
    """The sums of one row."""

    __slots__ = ("calls", "channels", "histogram")

    def __init__(self, calls: int = 0) -> None:
        super().__init__()
        self.calls = calls
        self.histogram: torch.Tensor | None = None
        self.channels: torch.Tensor | None = None

    def copy(self) -> Cell:
        """Return a cell with the same sums that may be changed."""
        copy = Cell()
        copy.merge(self)
        return copy

    def add_arrays(self, powers: bytearray | None, channels: bytearray | None) -> None:
        """Add counts by power of two, and largest magnitudes of channels, as `native.read` returns them."""
        if powers:
            self.add_histogram(torch.frombuffer(powers, dtype=torch.int64))
        if channels:
            self.add_channels(torch.frombuffer(channels, dtype=torch.float64))

    def add_histogram(self, counts: torch.Tensor) -> None:
        """Add counts by power of two."""
        self.histogram = counts if self.histogram is None else self.histogram.to(counts.device) + counts

    def add_channels(self, absmax: torch.Tensor) -> None:
        """Add the largest magnitudes of channels."""
        if self.channels is None:
            self.channels = absmax
        else:
            check_width(absmax.shape[0], self.channels.shape[0])
            self.channels = torch.maximum(self.channels.to(absmax.device), absmax)

    def merge(self, other: Sums) -> None:
        """Add another cell."""
        super().merge(other)
        assert isinstance(other, Cell)
        self.calls += other.calls
        if other.histogram is not None:
            self.add_histogram(other.histogram)
        if other.channels is not None:
            self.add_channels(other.channels)

    @property
    def is_read(self) -> bool:
        """Whether all counts are on the host."""
        return all(tensor is None or tensor.device.type == "cpu" for tensor in (self.histogram, self.channels))

    def read(self) -> None:
        """Bring counts on devices to the host; waits for the devices."""
        for tensor in (self.histogram, self.channels):
            if tensor is not None and tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)  # calls may have run on any stream
        self.histogram = None if self.histogram is None else self.histogram.cpu()
        self.channels = None if self.channels is None else self.channels.cpu()


class LateSums:
    """What a device adds up of a tensor, or still does.

    Args:
        pieces: The results of each piece, and what makes of their numbers the part of its hash, and what
            `Sums.add` takes.
    """

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[on_device.Piece]) -> None:
        self._pieces = pieces

    @property
    def is_sent(self) -> bool:
        """Whether `read` runs no operator on the device."""
        return all(late.is_sent for late, _ in self._pieces)

    @property
    def at_hand(self) -> bool:
        """Whether `read` does not wait for the device."""
        return all(late.at_hand for late, _ in self._pieces)

    def of(self, lot: Lot) -> LateSums:
        """The same of another replay of the graph that computes these."""
        return LateSums([(late.of(lot), found) for late, found in self._pieces])

    def read(self) -> tuple[int, Sums]:
        """The hash mod 2**64, and the sums; waits for the device."""
        terms, sums = 0, Sums()
        for late, found in self._pieces:
            more, read = found(late.read())
            terms += more
            sums.add(*read)
        return terms, sums


class Reader:
    """Adds up the values of flat tensors.

    Args:
        target: A floating-point dtype: count the values that it would round to zero or could not hold.
        histogram: Whether to count magnitudes by power of two.
    """

    def __init__(self, target: torch.dtype | None, histogram: bool) -> None:
        self.target = target
        self.histogram = histogram
        self._plain = target is None and not histogram
        self._tiny = self._huge = 0.0
        if target is not None:
            # The smallest number has the bit pattern 1. torch.finfo is wrong about float8_e5m2fnuz: eps is not 0.125.
            bits = (torch.uint8, torch.int16, torch.int32, torch.int64)[target.itemsize.bit_length() - 1]
            smallest = torch.ones(1, dtype=bits, device="cpu").view(target)
            self._tiny, self._huge = smallest.to(torch.float64).item() / 2, torch.finfo(target).max
            _targets.add(_both_sides(self._tiny, self._huge))

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.target, self.histogram)

    @property
    def limits(self) -> tuple[float, float] | None:
        """The largest magnitude that the target rounds to zero, and the largest that it holds."""
        return None if self.target is None else (self._tiny, self._huge)

    def read_natively(self, tensor: Any, channels: bool) -> native.Found | None:
        """Read a tensor in one pass in C++; None if that cannot be done."""
        if self._plain and not channels:
            return native.read(tensor)
        return native.read(tensor, self.limits, self.histogram, channels, False)

    def add(self, values: torch.Tensor, to: Sums) -> None:
        """Add values on the host to sums, or to a cell."""
        for piece in values.split(CHUNK) if values.numel() > CHUNK else (values,):
            to.add(*self.read(piece))
            if self.histogram and isinstance(to, Cell):
                to.add_histogram(powers(piece))

    def read(self, values: torch.Tensor) -> Read:
        """Read values on the CPU, in as few passes and operators as possible."""
        count = values.numel()
        wide, nan, low, high, total, squares = scan(values)
        finite = wide.numel()
        if not finite:
            return [count, 0, nan, count, 0.0, count - nan, 0.0, 0.0], -math.inf, -math.inf
        spread = squares - total * total / finite if math.isfinite(squares) else math.inf
        nonzero = finite
        if low <= 0 <= high and not wide.abs().amin():
            nonzero = int(torch.ne(wide, 0, out=torch.empty_like(wide)).sum())
        if 4 * spread < squares:  # the difference has lost digits
            rest, squares = moments(wide - total / finite)
            spread = max(0.0, squares - rest * rest / finite)
        lost, underflow = count - finite, 0
        overflow = lost - nan
        if self.target is not None:
            magnitudes = wide.to(torch.float64).abs()  # the limits of the target are float64
            underflow = int((magnitudes <= self._tiny).sum()) - (finite - nonzero)
            if max(-low, high) > self._huge:
                overflow += int((magnitudes > self._huge).sum())
        return [count, finite, nan, nonzero + lost, underflow, overflow, total, spread], -low, high

    def read_together(self, tensors: list[torch.Tensor]) -> list[Read | None]:
        """Read tensors of one size at once; None for a tensor that is not finite."""
        count = tensors[0].numel()
        wide = torch.stack(tensors)
        low, high = torch.aminmax(wide, dim=1)
        nonzero, total = torch.count_nonzero(wide, dim=1), wide.sum(1)
        nothing = torch.zeros_like(total)
        misfits = self._misfits(wide.abs()) if self.target else (nothing, nothing)
        spread = torch.linalg.vector_norm(wide.sub_((total / count)[:, None]), dim=1).square()
        columns = [nonzero, *misfits, total, spread, -low, high]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            ([count, count, 0, *sums], below, above) if math.isfinite(sums[-2]) else None
            for *sums, below, above in rows
        ]

    def _misfits(self, magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many values in the last dimension the target would round to zero, and how many it could not hold."""
        underflow = ((magnitudes <= self._tiny) & (magnitudes > 0)).sum(-1, dtype=torch.float64)
        return underflow, (magnitudes > self._huge).sum(-1, dtype=torch.float64)

    def read_later(self, values: torch.Tensor, lots: Lots, bits: Bits | None = None) -> LateSums:
        """Add up values on a device without waiting for it, and hash their bits."""
        if bits is None and (piece := on_device.read(values, self.limits, False)) is not None:
            return LateSums([piece])
        found = []
        for place, piece in enumerate(flat(values.detach()).split(PIECE)):  # without tangents, which `out=` refuses
            parts = self._reduce(piece)
            if bits is not None and not place:
                parts.append(hash_of(*bits))
            found.append((lots.put(parts), partial(_found, piece.numel())))
        return LateSums(found)

    def _reduce(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Counts, the ends, the variance and the mean, in as few operators as possible."""
        factors, limits = _column(place_of(values), *_FACTORS), _both_sides(*(self.limits or ()))
        small = values.is_floating_point() and values.element_size() == 1
        counted = torch.empty((len(_FACTORS) + len(limits), values.numel()), dtype=torch.int64, device=values.device)
        products = torch.empty((len(_FACTORS), values.numel()), dtype=torch.float64, device=values.device)
        # float8 is not promoted, and only `out=` multiplies what torch knows to be zeros
        torch.mul(values.to(torch.float64) if small else values, factors, out=products)
        torch.eq(products, products, out=counted[: len(_FACTORS)])
        if limits:
            torch.le(products[1], _column(place_of(values), *limits), out=counted[len(_FACTORS) :])
        finite = counted[0].view(torch.bool)[::8]  # the lowest byte of each
        filled = torch.where(finite, products[1], _column(place_of(values), *_FILLS))
        return [counted.sum(1), *torch.aminmax(filled[:2], dim=1), *torch.var_mean(filled[2], correction=0)]


def _found(count: int, numbers: list[Numbers]) -> tuple[int, Read]:
    """The hash, if it is there, and what `Reader._reduce` has found of so many values."""
    counts, lows, highs, (variance,), (mean,), *hashed = numbers
    finite, real, nonzero, *limits = counts
    zeros = real - nonzero
    underflow, overflow = (limits[0] - limits[1] - zeros, real - limits[2] + limits[3]) if limits else (0, 0)
    total, spread = mean * count, variance * count
    if not math.isfinite(spread):
        spread = math.inf
    elif lows[0] == highs[1]:
        spread = 0.0  # and not what rounding leaves of it
    elif finite < count and finite:  # zeros have stood for the others
        apart_from_zeros = mean * count / finite
        spread -= finite * (apart_from_zeros - mean) ** 2 + (count - finite) * mean * mean
    sums = [count, finite, count - real, count - zeros, underflow, overflow, total, max(0.0, spread)]
    return int(hashed[0][0]) if hashed else 0, (sums, -lows[0], highs[1])


# A value times these is NaN if it is not finite; if it is NaN; if it is NaN or zero.
_FACTORS = 0.0, 1.0, math.inf
_FILLS = math.inf, -math.inf, 0.0
_targets: set[tuple[float, ...]] = set()  # the limits of all readers


def _both_sides(*limits: float) -> tuple[float, ...]:
    """Each limit of a magnitude, and the largest number that is less than its negative."""
    return tuple(each for limit in limits for each in (limit, math.nextafter(-limit, -math.inf)))


def prepare(place: Place) -> None:
    """Copy the constants of all readers to a place: while a graph is captured, they could not be copied."""
    for numbers in (_FACTORS, _FILLS, *_targets):
        _column(place, *numbers)
    for of_rows in (False, True):
        weights(place[0], BLOCK, of_rows, place[1])
        weights(place[0], 1, of_rows, place[1])


@lru_cache(64)
def _column(place: Place, *numbers: float) -> torch.Tensor:
    """Numbers on a device, `float64[n, 1]`."""
    with torch.inference_mode(False):
        column = torch.tensor(numbers, dtype=torch.float64, device="cpu")[:, None]
        return check_unwrapped(column.to(place[0], non_blocking=True))


def scan(values: torch.Tensor, few: bool = False) -> tuple[torch.Tensor, int, float, float, float, float]:
    """Scan values on the CPU, flat ones unless they are `few`, in as few passes and operators as possible.

    Sums of `few` values have enough digits in float32, which takes less time. Returns the finite values in the dtype
    that they were added up in; how many are NaN; of the finite ones the smallest, the largest, the sum, and the sum of
    squares.
    """
    # For values of up to 32 bits float32 is enough, at half the work, if their squares stay within its range.
    narrow = values.is_floating_point() and values.element_size() <= 4
    # The code of each operator is rarely in the cache, which costs 5 to 10 us beside the computation.
    wide = values if values.dtype is torch.float32 else values.to(torch.float32 if narrow else torch.float64)
    ends = torch.aminmax(wide)
    low, high = ends[0].item(), ends[1].item()  # `map(float, ends)` takes half a microsecond more
    if narrow and not 1e-12 < max(-low, high) < 1e15:  # true for NaN too
        wide = values.to(torch.float64)
    nan = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        nan = int(wide.isnan().sum())
        wide = wide[wide.isfinite()]
        if not wide.numel():
            return wide, nan, math.inf, -math.inf, 0.0, 0.0
        low, high = map(float, torch.aminmax(wide))
    if few:
        total, norm = wide.sum().item(), torch.linalg.vector_norm(wide).item()
        return wide, nan, low, high, total, norm * norm
    return wide, nan, low, high, *moments(wide)


def summarize(tensor: Any) -> Sums | None:
    """Add up a tensor's values; None if it has none that can be read."""
    sums = Sums()
    found = native.read(tensor)
    if found is not None:
        sums.add(*found[:3])
    elif (values := real_values(tensor)) is not None and values.numel():
        try:
            Reader(None, False).add(values, sums)
        except RuntimeError:  # under vmap there is no single value to read for a whole batch
            return None
    return sums if sums.count else None


def flat(values: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, in any order, without a copy if they are dense in some order."""
    if values.is_contiguous():
        return values.view(-1)
    order = sorted(range(values.dim()), key=values.stride, reverse=True)
    return values.permute(order).reshape(-1)


def powers(values: torch.Tensor) -> torch.Tensor:
    """Counts of a flat tensor's magnitudes by power of two, `[277]`, without waiting for a device."""
    wide = values.to(torch.float64)
    counted = wide.isfinite() & (wide != 0)
    # frexp returns a mantissa in [0.5, 1), so the power of two is one less than its exponent.
    _, exponents = torch.frexp(torch.where(counted, wide, 1.0))
    places = (exponents.long() - 1).clamp(LOWEST, HIGHEST) - LOWEST
    counts = torch.zeros(HIGHEST - LOWEST + 1, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, places, counted.long())


def check_width(width: int, known: int) -> None:
    """Refuse another number of channels than before."""
    if width != known:
        raise HookError(
            "channels needs an operand whose last dimension stays the same from call to call, "
            f"got {width} channels after {known}; choose calls with hooks.when(...)"
        )
