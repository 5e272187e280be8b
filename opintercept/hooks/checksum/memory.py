"""`Memory`: the checksums of weights, from one call to the next.

Invariant: what torch has written to is never taken for what it was. Must not import the hook.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from opintercept._values.late import place_of
from opintercept._values.read import parameter_of, storage_ref

REMEMBERED = 1024
"""How many weights and biases have their checksums remembered."""


class WeightSums(NamedTuple):
    """What is remembered of a weight."""

    inner: torch.Tensor  # its checksums, [*b, k, g]
    factor: torch.Tensor  # norms of rows of lhs times this are norms of rows of the product, [*b, 1, g]


class NewWeight(NamedTuple):
    """The same of a weight on a device that one product has had: its factor is `scale * left * floor`."""

    inner: torch.Tensor
    scale: torch.Tensor
    left: torch.Tensor
    floor: float


class BiasSums(NamedTuple):
    """What is remembered of a bias."""

    sums: torch.Tensor  # its checksums, [*b, m, g]
    norms: torch.Tensor  # about the norms of its elements in each group


class BiasCopy(NamedTuple):
    """The same of a bias on a device, with a copy of its one row."""

    row: torch.Tensor
    sums: torch.Tensor
    norms: torch.Tensor
    is_new: bool


Remembered = WeightSums | NewWeight | BiasSums | BiasCopy


class Memory:
    """Checksums of weights and biases, which hold until torch writes to the weight."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[weakref.ref[torch.UntypedStorage], int, Remembered]] = {}

    def look_up(self, tensor: torch.Tensor, matrix: torch.Tensor) -> Remembered | None:
        """What was kept of a weight or a view of one; None if nothing was, or torch has written to the weight since."""
        weight = parameter_of(tensor)
        if weight is None:
            return None
        found = self._kept.get(_key(weight, tensor, matrix))
        if found is None or found[0]() is not weight.untyped_storage() or found[1] != weight._version:
            return None
        return found[2]

    def keep(self, tensor: torch.Tensor, matrix: torch.Tensor, sums: Remembered) -> None:
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
