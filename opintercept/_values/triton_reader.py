"""Reads a tensor on a device in one launch, in Triton: counts, range, sums, and the hash of `_values.hash`.

Invariant: no program of the kernel reads what another has written. Each writes a row, and the rows are added up in
their order where they are read, so that a tensor always has the same sums. Only `_values.on_device` may import this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from opintercept._values.hash import WORDS, in_blocks

VERSION: str = triton.__version__

TILE = 1 << 10
"""How many values a program reads at a time."""

_WIDTHS = (1024, 256, 64, 16)  # of a tile; each makes Triton compile another kernel
_TILES, _PROGRAMS = 4, 256  # the fewest tiles of a program, and the most programs with so few
_LONGEST = 1 << 30  # rows and columns that are counted in 32 bits

# The bits of the mantissa, the bias of the exponent, and the first magnitude that is infinite or NaN. Zero stands for
# the dtypes whose only NaN is -0.0.
_FORMATS = {
    torch.float32: (23, 127, 0),
    torch.bfloat16: (7, 127, 0),
    torch.float16: (10, 15, 0x7C00),
    torch.float8_e5m2: (2, 15, 0x7C),
    torch.float8_e4m3fn: (3, 7, 0x7F),
    torch.float8_e5m2fnuz: (2, 16, 0),
    torch.float8_e4m3fnuz: (3, 8, 0),
}


def _jit(function: Callable[..., Any]) -> Any:
    return triton.jit(function, do_not_specialize=("height", "sizes", "down", "tiles", "each"))


def read(tensor: torch.Tensor, limits: tuple[float, float] | None, hashed: bool) -> torch.Tensor | None:
    """Read a tensor, without waiting for its device.

    Args:
        tensor: A strided tensor whose memory is there.
        limits: As `target` of `_native.values.Read`.
        hashed: Whether to compute the hash.

    Returns:
        Rows that together are what was found, int64 `[n, 11]`: the hash, and as the bits of float64 what `Sums.add`
        of `_values.stats` takes. All but total and spread is exact. Where a program reads t tiles, which are four up to
        a million values in wide rows, the total is off by at most `(t + 270) * 2**-53` times the sum of the
        magnitudes. None for what cannot be read here.
    """
    known = _FORMATS.get(tensor.dtype)
    size = tensor.numel()
    if known is None or not size:
        return None
    (*outer, width), strides, swapped = _layout(tensor, hashed)
    height = math.prod(outer)
    if max(height, width) > _LONGEST:
        return None
    across = next((each for each in _WIDTHS if -width % each <= width // 4), _WIDTHS[-1])
    down = -(-height // (TILE // across))
    tiles = down * -(-width // across)
    each = max(_TILES, -(-tiles // _PROGRAMS))
    programs = -(-tiles // each)
    rows = torch.empty((programs, 11), dtype=torch.int64, device=tensor.device)
    bits = tensor.detach().view(WORDS[tensor.element_size()])
    blocked = in_blocks(height, width)
    with torch.cuda.device_of(tensor):
        kernel[(programs,)](
            *(bits, rows, height, width, tuple(outer), strides, down, tiles, each),
            *(*known, limits, hashed, swapped, blocked, TILE // across, across),
        )
    return rows


def _layout(tensor: torch.Tensor, in_order: bool) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Sizes and strides, the last one that of the columns; and whether the columns are the rows of the matrix.

    Dimensions that lie one in the other are joined. For the hash, the columns are what `_values.hash` takes them for.
    """
    dims = list(zip(tensor.shape, tensor.stride(), strict=True)) or [(1, 1)]
    swapped = in_order and len(dims) == 2 and dims[0][1] == 1 != dims[1][1]
    if swapped:
        dims.reverse()
    elif not in_order:
        dims.sort(key=lambda dim: dim[1], reverse=True)
    last = [dims.pop()] if in_order else []
    joined: list[tuple[int, int]] = []
    for size, stride in dims:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = joined[-1][0] * size, stride
        elif size > 1:
            joined.append((size, stride))
    both = joined + last
    sizes, strides = zip(*([(1, 0)] * (2 - len(both)) + both), strict=True)
    return sizes, strides, swapped


@_jit
def _splitmix64(number: tl.tensor) -> tl.tensor:
    z = number * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@_jit
def _weights(place: tl.tensor, of_rows: tl.constexpr, BLOCKED: tl.constexpr) -> tl.tensor:
    """The weights of rows or columns, with the factors of their blocks."""
    place = place.to(tl.uint64)
    found = _splitmix64(2 * (place & 0xFFFF) + (of_rows + (1 << 40)))
    if BLOCKED:
        found *= _splitmix64(2 * (place >> 16) + (of_rows + (1 << 32))) | 1
    return found


@_jit
def _as_float32(bits: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr) -> tl.tensor:
    """The bits of the same values in float32, in integer arithmetic: not every device knows every float8."""
    if BIAS == 127:
        return bits << (23 - MANTISSA)
    magnitude = bits & (0x7FFF if MANTISSA == 10 else 0x7F)
    found = (magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)
    subnormal = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
    found = tl.where((magnitude >> MANTISSA) == 0, subnormal.to(tl.int32, bitcast=True), found)
    if SPECIAL:
        found = tl.where(magnitude >= SPECIAL, (magnitude << (23 - MANTISSA)) | 0x7F800000, found)
    else:
        found = tl.where(bits == -0x80, 0x7FC00000, found)
    return found | (bits & -0x80000000)


@_jit
def _value_of(key: tl.tensor) -> tl.tensor:
    """The value, in float64, of what has its order among numbers of 32 bits."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True).to(tl.float64)


@_jit
def kernel(
    values: tl.tensor,
    rows: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    sizes: tl.tensor,
    strides: tl.tensor,
    down: tl.tensor,
    tiles: tl.tensor,
    each: tl.tensor,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    SPECIAL: tl.constexpr,
    LIMITS: tl.constexpr,
    HASHED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Read the `each` tiles of a program, which go down the columns of the matrix."""
    nothing = tl.zeros([ROWS, COLUMNS], tl.int32)
    finite, odd, nan, zeros, under, over = nothing, nothing, nothing, nothing, nothing, nothing
    low, high, pivot = nothing + 0x7FFFFFFF, ~(nothing + 0x7FFFFFFF), nothing.to(tl.float32)
    total = nothing.to(tl.float64)
    distances, squares = total, total  # from the pivot
    hashed = nothing.to(tl.uint64)
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, tiles)
    for block in range(first // down, (last - 1) // down + 1):  # down the columns, whose weights are computed once
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        across = column.to(tl.int64) * strides[-1]
        if HASHED:
            by = _weights(column, SWAPPED, BLOCKED)
        for tile in range(tl.maximum(first, block * down), tl.minimum(last, (block + 1) * down)):
            row = (tile - block * down) * ROWS + tl.arange(0, ROWS)
            rest, along = row, tl.zeros([ROWS], tl.int64)
            for d in tl.static_range(len(sizes) - 1, 0, -1):
                along += (rest % sizes[d]).to(tl.int64) * strides[d]
                rest = rest // sizes[d]
            along += rest.to(tl.int64) * strides[0]
            inside = (row < height)[:, None] & (column < width)[None, :]
            bits = tl.load(values + along[:, None] + across[None, :], mask=inside, other=0).to(tl.int32)
            if HASHED:
                weights = _weights(row, not SWAPPED, BLOCKED)[:, None] * by[None, :]
                hashed += bits.to(tl.int64).to(tl.uint64, bitcast=True) * weights
            bits = _as_float32(bits, MANTISSA, BIAS, SPECIAL)
            magnitude = bits & 0x7FFFFFFF
            is_finite = inside & (magnitude < 0x7F800000)
            odd += inside & (magnitude >= 0x7F800000)
            nan += magnitude > 0x7F800000
            zeros += inside & (magnitude == 0)
            key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of the same order as the value, also for zeros
            low = tl.minimum(low, tl.where(is_finite, key, 0x7FFFFFFF))
            high = tl.maximum(high, tl.where(is_finite, key, -0x80000000))
            # Squares of the distances from one of the values lose no digits of the spread, whatever the mean.
            value = bits.to(tl.float32, bitcast=True)
            pivot = tl.where(is_finite & (finite == 0), value, pivot)
            finite += is_finite
            apart = tl.where(is_finite, value, pivot).to(tl.float64) - pivot.to(tl.float64)
            total += tl.where(is_finite, value, 0.0)
            distances += apart
            squares += apart * apart
            if LIMITS is not None:
                size = magnitude.to(tl.float32, bitcast=True).to(tl.float64)
                under += inside & (size <= LIMITS[0]) & (magnitude != 0)
                over += size > LIMITS[1]
    number = finite.to(tl.float64)
    count, unlike, total = tl.sum(number), tl.sum(odd), tl.sum(total)
    mean = distances / tl.maximum(number, 1.0)
    apart = pivot.to(tl.float64) + mean - total / tl.maximum(count, 1.0)
    spread = tl.maximum(tl.sum(squares - distances * mean), 0.0)
    spread += tl.sum(number * apart * apart)  # Chan, Golub and LeVeque (1979)
    every = count + unlike
    over = unlike - tl.sum(nan) if LIMITS is None else tl.sum(over)
    low, high = tl.min(low), tl.max(high)
    below = tl.where(count == 0, float("-inf"), -_value_of(low))
    above = tl.where(count == 0, float("-inf"), _value_of(high))
    found = (every, count, tl.sum(nan), every - tl.sum(zeros), tl.sum(under), over, total, spread, below, above)
    at = rows + tl.program_id(0) * 11
    tl.store(at, tl.sum(hashed).to(tl.int64, bitcast=True))
    for i in tl.static_range(10):
        tl.store(at + 1 + i, found[i].to(tl.float64).to(tl.int64, bitcast=True))
