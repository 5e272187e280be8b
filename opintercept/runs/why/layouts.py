"""`Layout`: where the values of one tensor lie in another that has the same ones; `Share`: where those of samples lie.

Invariant: no layout is tried twice. A few values are found without a copy of all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from opintercept.runs.program.program import contiguous

_PERMUTED = 5  # dimensions whose orders are all tried


class Layout(NamedTuple):
    """Where the values of a tensor lie among those of another, one after the other."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def laid(self, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The values in a shape."""
        return values.contiguous().as_strided(self.sizes, self.strides).reshape(shape)

    def at(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The values that have these places then."""
        found = torch.zeros_like(places)
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            found += places % size * stride
            places = places // size
        return values.reshape(-1)[found]


class Share(NamedTuple):
    """Which samples of a batch another program computes, too: blocks of rows, as few as possible."""

    samples: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, kept: set[int]) -> Share:
        """The share that has some of so many rows."""
        sizes = (size for size in range(rows, 0, -1) if rows % size == 0)
        size = next(each for each in sizes if len({row // each for row in kept}) * each == len(kept))
        return cls(rows // size, (*sorted({row // size for row in kept}),))

    def size(self, size: int) -> int:
        """How many numbers of a tensor of so many are of these samples; 0 if it has none for each."""
        return size // self.samples * len(self.kept) if size % self.samples == 0 else 0

    def dims(self, shape: Sequence[int]) -> list[int]:
        """The dimensions of a tensor that samples may follow each other in."""
        return [dim for dim, size in enumerate(shape) if size and size % self.samples == 0]

    def part(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The values of these samples, which follow each other in a dimension."""
        return values.index_select(dim, self._rows(values, dim))

    def put(self, values: torch.Tensor, own: torch.Tensor, dim: int) -> torch.Tensor:
        """The values with others for these samples."""
        return values.index_copy(dim, self._rows(values, dim), own)

    def _rows(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.arange(values.shape[dim]).reshape(self.samples, -1)[[*self.kept]].flatten()


@functools.lru_cache(4096)
def layouts(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Layout, ...]:
    """What a tensor of one shape may be in another, by each order of the dimensions of either, most likely first."""
    found = [_layout(own, contiguous(own))]
    if len(own) <= _PERMUTED:
        strides = contiguous(own)
        orders = itertools.permutations(range(len(own)))
        found += (_layout([own[at] for at in order], [strides[at] for at in order]) for order in orders)
    if len(shape) <= _PERMUTED:
        for order in itertools.permutations(range(len(shape))):
            strides = contiguous(tuple(shape[at] for at in order))
            found.append(_layout(shape, [strides[order.index(at)] for at in range(len(shape))]))
    return (*dict.fromkeys(found),)


def _layout(sizes: Sequence[int], strides: Sequence[int]) -> Layout:
    """The layout in as few dimensions as possible, which is the same for the same places."""
    kept: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if kept and kept[-1][1] == size * stride:
            kept[-1] = kept[-1][0] * size, stride
        elif size != 1:
            kept.append((size, stride))
    return Layout(tuple(size for size, _ in kept), tuple(stride for _, stride in kept))
