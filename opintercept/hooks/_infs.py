"""`Infs`: which call made the Inf that lies in a tensor's memory.

Invariant: no memory is kept alive, and none is taken for another that got its address or for itself before a write:
a tensor's version counts those. Without the library in C++, memory is known by its address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from opintercept._native import values as native
from opintercept._values.read import in_memory

_MOST = 4096  # storages to remember


class MemoryPlace(NamedTuple):
    """The memory of a tensor, which views share with their base, and the writes to it that torch has counted.

    `one_more` says that an operator is writing to it, which torch counts once it has returned, if at all. `holder`
    keeps the number of the storage from being used again, and not its memory.
    """

    key: tuple[torch.device, int]
    version: int | None
    one_more: bool
    holder: Any


def places(tensors: Iterable[torch.Tensor], *, written: bool = False) -> list[MemoryPlace]:
    """Where the memory of these tensors is, to which an operator may have `written`. Storages are left alone."""
    plain = (t for t in tensors if t.layout is torch.strided and not t.is_nested and in_memory(t) and t.numel())
    return [_place(tensor, written) for tensor in plain]


def _place(tensor: torch.Tensor, written: bool) -> MemoryPlace:
    found = native.storage(tensor)
    number, holder = found or (tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size(), None)
    version = None if tensor.is_inference() else tensor._version
    return MemoryPlace((tensor.device, number), version, written, holder)


class Infs:
    """Findings by the memory in which their Inf was last seen."""

    def __init__(self) -> None:
        self._made: dict[tuple[torch.device, int], tuple[Any, MemoryPlace]] = {}

    def of(self, memory: Iterable[MemoryPlace]) -> Any:
        """The first finding that explains an Inf in this memory, or None."""
        known = ((place, *self._made[place.key]) for place in memory if place.key in self._made)
        return next((finding for place, finding, before in known if _is_unchanged(before, place)), None)

    def put(self, memory: Iterable[MemoryPlace], finding: Any) -> None:
        """Note what has made the Inf in this memory; None for an Inf that is meant or comes from elsewhere."""
        for place in memory:
            self._made.pop(place.key, None)
            if finding is not None:
                self._made[place.key] = finding, place
        while len(self._made) > _MOST:
            del self._made[next(iter(self._made))]


def _is_unchanged(before: MemoryPlace, now: MemoryPlace) -> bool:
    if before.version is None or now.version is None:
        return True
    return before.version <= now.version <= before.version + before.one_more
