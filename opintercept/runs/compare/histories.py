"""`Histories`: tells changed operands from inherited ones by how they vary over the differing calls of a module.

Invariant: memory grows with the modules, not with the calls. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opintercept.runs.compare.columns import OPERANDS, OTHERS
from opintercept.runs.store.columns import Array, Arrays

_OUTPUT = 0  # the output's number beside those of operands
_NUMBERS = (*OPERANDS.values(), OTHERS, _OUTPUT)


class Histories:
    """What the differing calls of modules have in common. A key is a number for a module of A paired with one of B."""

    def __init__(self) -> None:
        self._first = np.zeros((len(_NUMBERS), 2, 0), np.uint64)  # the hashes in both runs; 0 if there were none yet
        self._same = np.zeros((len(_NUMBERS), 0), np.int64)  # how many calls have the first hashes
        self._varies = np.zeros(0, bool)  # whether the output changes from call to call

    def add(self, keys: Array, a: Arrays, b: Arrays, operands: Array, others: Array) -> None:
        """Add pairs that differ, in the order of the calls.

        Args:
            keys: Their keys.
            a: The hashes of the first calls, by slot; 0 for none.
            b: The hashes of the second calls.
            operands: Which operands differ.
            others: A hash of those of their other tensors that differ; 0 for none.
        """
        if (more := keys.max(initial=-1) + 1 - len(self._varies)) > 0:
            self._first = np.pad(self._first, ((0, 0), (0, 0), (0, more)))
            self._same, self._varies = np.pad(self._same, ((0, 0), (0, more))), np.pad(self._varies, (0, more))
        for slot, number in (OPERANDS | {"output": _OUTPUT}).items():
            hashes = np.stack([a[f"{slot}_hash"], b[f"{slot}_hash"]])
            known = hashes.all(0) & (((operands & number) > 0) | (number == _OUTPUT))
            self._add(number, keys[known], hashes[:, known])
        known = others != 0
        self._add(OTHERS, keys[known], np.stack([others[known]] * 2))

    def _add(self, number: int, keys: Array, hashes: Array) -> None:
        if not len(keys):
            return
        first = self._first[_NUMBERS.index(number)]
        new = np.flatnonzero(first[0, keys] == 0)[::-1]  # of the calls of one key, the first is written last
        first[:, keys[new]] = hashes[:, new]
        equal = hashes == first[:, keys]
        if number == _OUTPUT:
            self._varies[keys[~equal.any(0)]] = True
        else:
            self._same[_NUMBERS.index(number)] += np.bincount(keys[equal.all(0)], minlength=len(self._varies))

    def constant(self, order: Sequence[int], calls: Array) -> Array:
        """Find operands that stay the same over a module's calls while all outputs that differed before it varied.

        Args:
            order: The keys in the order in which they first differ.
            calls: How many calls each key has.
        """
        keys = np.array(order)
        varied = np.r_[True, np.logical_and.accumulate(self._varies[keys])[:-1]]
        keys = keys[varied & (calls[keys] > 1)]
        found = np.zeros(len(calls), np.uint8)
        for number, same in zip(_NUMBERS, self._same, strict=True):
            found[keys] |= np.where(same[keys] == calls[keys], np.uint8(number), np.uint8(0))
        return found
