"""`Histories`: tells changed operands from inherited ones by how they vary over the differing calls of a module.

Invariant: memory grows with the modules, not with the calls. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from opintercept.runs.compare.columns import OPERANDS, OTHERS, starts_of
from opintercept.runs.store.columns import Array, Arrays


class _History:
    """What the differing calls of one module of A, paired with one of B, have in common.

    Attributes:
        same: In how many of them each operand is bit for bit the same as in the first.
        varies: Whether the output changes from call to call.
    """

    __slots__ = ("_first", "_output", "same", "varies")

    def __init__(self) -> None:
        self.same: Counter[int] = Counter()
        self.varies = False
        self._first: dict[int, Any] = {}
        self._output: tuple[int, int] | None = None

    def add_output(self, a: Array, b: Array) -> None:
        """Add the hashes of outputs."""
        if self._output is None:
            self._output = int(a[0]), int(b[0])
        if not self.varies:
            self.varies = bool(((a != np.uint64(self._output[0])) & (b != np.uint64(self._output[1]))).any())

    def add_operand(self, operand: int, a: Array, b: Array) -> None:
        """Add the hashes of an operand that differs."""
        first = self._first.setdefault(operand, (int(a[0]), int(b[0])))
        self.same[operand] += int(((a == np.uint64(first[0])) & (b == np.uint64(first[1]))).sum())


class Differing(NamedTuple):
    """Pairs of calls that differ.

    Attributes:
        keys: A number for the modules of both.
        a: The hashes of the first calls, by slot; 0 for none.
        b: The hashes of the second calls.
        operands: Which operands differ.
        others: A hash of those of their other tensors that differ; 0 for none.
    """

    keys: Array
    a: Arrays
    b: Arrays
    operands: Array
    others: Array


class Histories:
    """The histories by the number of the modules."""

    def __init__(self) -> None:
        self._known: dict[int, _History] = {}

    def get(self, key: int) -> _History | None:
        """The history of a pair of modules; None if none of their calls differs."""
        return self._known.get(key)

    def add(self, rows: Differing) -> None:
        """Add pairs that differ, in the order of the calls."""
        if not len(rows.keys):
            return
        order = np.argsort(rows.keys, kind="stable")
        starts = starts_of(rows.keys[order])
        sides = {slot: (rows.a[slot][order], rows.b[slot][order]) for slot in (*OPERANDS, "output")}
        known = {slot: (a != 0) & (b != 0) for slot, (a, b) in sides.items()}
        operands, others = rows.operands[order], rows.others[order]
        for slot, operand in OPERANDS.items():
            known[slot] &= (operands & operand) > 0
        used = {slot for slot, which in known.items() if which.any()}
        has_others = bool(others.any())
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
            key = int(rows.keys[order[start]])
            history = self._known.setdefault(key, _History())
            for slot in used:
                which = known[slot][start:end]
                if not which.any():
                    continue
                a, b = (side[start:end][which] for side in sides[slot])
                if slot == "output":
                    history.add_output(a, b)
                else:
                    history.add_operand(OPERANDS[slot], a, b)
            if has_others and (found := others[start:end][others[start:end] != 0]).size:
                history.add_operand(OTHERS, found, found)

    def constant(self, order: list[int], calls: Array) -> dict[int, int]:
        """Find operands that stay the same over a module's calls while all outputs that differed before it varied.

        Args:
            order: The modules in the order in which they first differ.
            calls: How many calls each has.
        """
        found: dict[int, int] = {}
        varied = True
        for key in order:
            history = self._known.get(key)
            found[key] = 0
            if history is not None and varied and calls[key] > 1:
                found[key] = sum(operand for operand, same in history.same.items() if same == calls[key])
            varied = varied and history is not None and history.varies
        return found
