"""`Memory`: the checksums of weights, from one call to the next.

Invariant: what torch has written to is never taken for what it was. Must not import the hook.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from opintercept._values.late import place_of
from opintercept._values.read import parameter_of, storage_ref

REMEMBERED = 1024
"""How many weights and biases have their checksums remembered."""

ColumnSums = tuple[Any, ...]
"""Checksums of a matrix, `[*b, k, g]`, and what the norms of rows of lhs are multiplied by for the norms of rows of the
product, `[*b, 1, g]`, as one tensor, or as two and a number to multiply; of a bias, its checksums and norms, or a copy
of it, both, and whether they are new. The factor is that of the first product with a weight.
"""


class Memory:
    """Checksums of weights and biases, which hold until torch writes to the weight."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[weakref.ref[torch.UntypedStorage], int, ColumnSums]] = {}

    def look_up(self, tensor: torch.Tensor, matrix: torch.Tensor) -> ColumnSums | None:
        """What was kept of a weight or a view of one; None if nothing was, or torch has written to the weight since."""
        weight = parameter_of(tensor)
        if weight is None:
            return None
        found = self._kept.get(_key(weight, tensor, matrix))
        if found is None or found[0]() is not weight.untyped_storage() or found[1] != weight._version:
            return None
        return found[2]

    def keep(self, tensor: torch.Tensor, matrix: torch.Tensor, sums: ColumnSums) -> None:
        """Remember the checksums of `tensor` with the signs in `matrix` if it is a weight."""
        weight = parameter_of(tensor)
        if weight is None:
            return
        if len(self._kept) >= REMEMBERED:
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0]() is not None}
            if len(self._kept) >= REMEMBERED:
                self._kept = {}
        self._kept[_key(weight, tensor, matrix)] = storage_ref(weight), weight._version, sums

    def forget(self, tensor: torch.Tensor, matrix: torch.Tensor) -> None:
        """Forget a weight that has changed without torch's knowing."""
        weight = parameter_of(tensor)
        if weight is not None:
            self._kept.pop(_key(weight, tensor, matrix), None)


def _key(weight: torch.Tensor, view: torch.Tensor, matrix: torch.Tensor) -> Any:
    look = view.shape, view.stride(), view.dtype, view.is_conj()
    return id(weight), view.data_ptr(), *look, id(matrix), place_of(view)
