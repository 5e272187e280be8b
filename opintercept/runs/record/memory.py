"""`MemoryNumbers`: which memory each tensor of a run lies in, so that a reader can follow values from call to call.

Invariant: no memory is kept alive, and none gets the number of another that had its address before.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from opintercept._native import values as native
from opintercept._values.read import parameter_of

_MOST = 1 << 16  # storages that are remembered


class _Holder(StorageWeakRef):
    """Keeps the address of a storage from others, and not its memory."""

    def __del__(self) -> None:
        if hasattr(self, "_free_weak_ref"):  # as it has not if Ctrl-C came while it was made
            super().__del__()  # type: ignore[no-untyped-call]


class MemoryNumbers:
    """Numbers storages from 1, in the order in which calls use them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, Any]] = {}
        self._next = itertools.count(1)

    def place(self, tensor: torch.Tensor) -> list[Any]:
        """The number of a strided tensor's memory, its offset and strides there, and whether it is a parameter's.

        Raises TypeError for one that has no memory, as a tensor that a `torch.func` transform has wrapped.
        """
        found = native.storage(tensor)
        if found is None:
            try:
                holder = _Holder(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            except RuntimeError as wrong:
                raise TypeError("a tensor of a recorded program must have memory") from wrong
            found = holder.cdata, holder
        key, holder = found
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST:
                self._known.pop(next(iter(self._known.copy())), None)
            known = self._known.setdefault(key, (next(self._next), holder))
        return [known[0], tensor.storage_offset(), list(tensor.stride()), parameter_of(tensor) is not None]
