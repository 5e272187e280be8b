"""The content hash of a tensor: a multilinear hash mod 2**64 of its elements' bits, in at most 32 bits each.

The weight of an element is the product of one for its row and one for its column: D. Lemire and O. Kaser, "Strongly
universal string hashing is fast", The Computer Journal 57(11), 2014. A transposed matrix is therefore read in the order
of memory. Invariant: integer arithmetic makes the hash, so it is the same on every device and for all strides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from opintercept._values.late import graph_of, place_of
from opintercept._values.splitmix import WORD, signed, splitmix64

BLOCK = 1 << 16  # the most weights of rows or columns in a table; larger tensors are read in blocks
FIRST = 1 << 12  # weights of the first table, which torch makes without waking its threads
SMALL = 1 << 14  # the most elements whose weights are kept as a whole
PIECE = 1 << 18  # elements that are widened to 64 bits at once; more would take longer to allocate than to add up

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that hold the bits of a dtype, by its size in bytes."""
_LANES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
Bits = tuple[torch.Tensor, bool]
"""What `bits_of` returns."""
# Weights by device, stream, number, and whether they are those of rows; parts of a table, too, as slicing takes time.
_tables: dict[tuple[torch.device, Any, int, bool], torch.Tensor] = {}


def bits_of(tensor: torch.Tensor) -> Bits:
    """The tensor `[..., n]` in the order of memory, and whether its last two dimensions are swapped for that."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        # A dimension of one may have any stride, and torch then refuses a view of another dtype.
        can_view = not tensor.dim() or tensor.stride(-1) == 1
        return (tensor if can_view else tensor.clone(memory_format=torch.contiguous_format)), False
    if tensor.dim() == 2 and tensor.mT.is_contiguous():
        return tensor.mT, True
    return tensor.contiguous(), False


def hash_of(dense: torch.Tensor, swapped: bool) -> torch.Tensor:
    """The hash of what `bits_of` returns: an int64 tensor of no dimension, on the tensor's device."""
    if not dense.numel():
        return torch.zeros((), dtype=torch.int64, device=dense.device)
    dense = dense if dense.dim() else dense.view(1)
    lanes = dense.view(_LANES[dense.element_size()])
    wide = lanes.numel() // dense.numel()  # an element of 64 bits has two lanes
    width = dense.size(-1)
    if wide == 1:
        return form(lanes if lanes.dim() == 2 else lanes.view(-1, width), swapped)
    lanes = lanes.view(-1, width, wide)
    parts = [form(lanes[..., lane], swapped) * signed(splitmix64(lane + 2)) for lane in range(wide)]
    return torch.stack(parts).sum()


def digits_of(number: int, count: int) -> str:
    """The hash of `count` elements in hex digits; the count makes zeros of different shapes differ."""
    return f"{(number + splitmix64(count)) & WORD:016x}"


def form(lanes: torch.Tensor, swapped: bool) -> torch.Tensor:
    """The sum over `[r, c]` of row[r] * lanes[r, c] * column[c]; over `[c, r]` if swapped."""
    height, width = lanes.shape
    device, stream = place_of(lanes)
    if height * width <= SMALL and graph_of(lanes) is None:  # what a graph computes must not be kept
        # One product and one sum: a matmul of our own would have to pass the interceptor.
        return (lanes * _products(device, stream, height, width, swapped)).sum()
    if not in_blocks(height, width):
        products = _summed(lanes.to(torch.int64), weights(device, width, swapped, stream))
        return _summed(products, weights(device, height, not swapped, stream))
    total = torch.zeros((), dtype=torch.int64, device=device)
    for right in range(0, width, BLOCK):
        columns = lanes[:, right : right + BLOCK]
        # A divisor of BLOCK, so that no piece lies in two blocks.
        step = min(BLOCK, 1 << (PIECE // columns.size(1)).bit_length() - 1)
        for top in range(0, height, step):
            piece = columns[top : top + step].to(torch.int64)
            start = top % BLOCK
            rows = weights(device, start + piece.size(0), not swapped, stream)[start:]
            part = _summed(_summed(piece, weights(device, piece.size(1), swapped, stream)), rows)
            row, column = top // BLOCK, right // BLOCK
            total += part * signed(factor(row, not swapped) * factor(column, swapped))
    return total


def weights(device: torch.device, size: int, of_rows: bool, stream: Any = None) -> torch.Tensor:
    """The first weights of rows or of columns, `[size]`, at most `BLOCK`."""
    known = _tables.get((device, stream, size, of_rows))
    if known is None:
        whole = min(FIRST, BLOCK) if size <= FIRST else BLOCK
        if (table := _tables.get((device, stream, whole, of_rows))) is None:
            table = check_unwrapped(
                splitmix64(2 * torch.arange(whole, device="cpu") + (of_rows + 2**40)).to(device, non_blocking=True)
            )
            _tables[device, stream, whole, of_rows] = table
        known = _tables[device, stream, size, of_rows] = check_unwrapped(table[:size])
    return known


def in_blocks(height: int, width: int) -> bool:
    """Whether the weights of a matrix have a factor for each block, the first one too."""
    return height > BLOCK or width > BLOCK or height * width > PIECE


def factor(block: int, of_rows: bool) -> int:
    """The factor of all weights in a block of rows or columns."""
    return splitmix64(2 * block + of_rows + 2**32) | 1


def check_unwrapped(table: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is to be kept; raise if a torch.func transform wraps it, which it could not outlive."""
    table.data_ptr()
    return table


def forget() -> None:
    """Drop the tables of weights."""
    _tables.clear()
    _products.cache_clear()


@lru_cache(256)
def _products(device: torch.device, stream: Any, height: int, width: int, swapped: bool) -> torch.Tensor:
    """The weights of all elements, `[height, width]`."""
    inner, outer = weights(device, width, swapped, stream), weights(device, height, not swapped, stream)
    return check_unwrapped(outer.unsqueeze(1) * inner)


def _summed(lanes: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The products of the last dimension with the weights `by`, added up mod 2**64."""
    if lanes.device.type == "cpu":
        return torch.mv(lanes, by) if lanes.dim() == 2 else torch.dot(lanes, by)
    return (lanes * by).sum(-1)  # CUDA has neither for integers
