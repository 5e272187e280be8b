"""`DiffTotals`: adds up the comparisons of processes: counts, the first difference, and the rows to report.

Needs numpy. Must not import torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Literal

import numpy as np

from opintercept.runs.compare.difference import KINDS, Absent, CallDifference, Kind, ModuleDifference, Unmatched
from opintercept.runs.compare.index import Index
from opintercept.runs.compare.pairing import PAIRINGS, Pairing
from opintercept.runs.compare.result import Difference
from opintercept.runs.store.columns import Array
from opintercept.runs.store.run import Run

# Takes the calls of a process that were compared: all calls of its run, the numbers of those, the relative errors of
# their outputs, negative if unknown, which of them differ, and the ranks in both runs.
ErrorListener = Callable[[Index, Array, Array, Array, tuple[int, int]], None]
_Place = tuple[int, int, int]  # `StoredCall.place`


class DiffTotals:
    """Adds up what is found in each pair of processes, with counts as in `Difference`."""

    def __init__(self, limit: int, worst_limit: int, watch: ErrorListener | None = None) -> None:
        self.limit, self.worst_limit, self.watch = limit, worst_limit, watch
        self.calls, self.pairs, self.metadata = [0, 0], 0, 0
        self.kinds: Counter[Kind] = Counter()
        self.by: Counter[str] = Counter()
        self.pairings: Counter[Pairing] = Counter()
        self.ranks: list[tuple[int, int]] = []
        self.elapsed: tuple[list[float], list[float]] = ([], [])
        self.absent: list[Absent] = []
        self.modules_in_all = 0
        self.unmatched_calls = [0, 0]
        self._first: CallDifference | None = None
        self._before, self._optimizer = (0, 0), False
        self._worst: list[tuple[float, CallDifference]] = []
        self._modules: list[tuple[_Place, ModuleDifference]] = []  # with the place of the first call that differs
        self._unmatched: list[Unmatched] = []

    def add_unmatched(self, side: Literal["a", "b"], rank: int, index: Index, alone: Array) -> None:
        """Add the calls of a process that have no counterpart: those that `alone` marks."""
        numbers = np.flatnonzero(alone)
        numbers = numbers[index.chosen(numbers)]
        self.unmatched_calls[side == "b"] += len(numbers)
        _keys, firsts, counts = np.unique(index.key[index.kind[numbers]], return_index=True, return_counts=True)
        in_order = np.argsort(firsts)[: max(self.limit - len(self._unmatched), 0)]
        if not len(in_order):
            return
        firsts, counts = numbers[firsts[in_order]], counts[in_order]
        indexes = index.columns.gather(firsts, ("index",))["index"]
        for number, calls, at in zip(firsts.tolist(), counts.tolist(), indexes.tolist(), strict=True):
            kind = index.kind[number]
            record = index.columns.signature(int(index.signature[kind])).record_at(
                index.columns.call_site(int(index.call_site[kind]))
            )
            self._unmatched.append(
                Unmatched(side, rank, record.module, record.op, record.phase, record.grad_of, calls, at)
            )

    def add_first(self, call: CallDifference, before: tuple[int, int], optimizer: bool) -> None:
        """Add `first`, `before` and `optimizer` of a process."""
        if self._first is None or _order(call) < _order(self._first):
            self._first, self._before, self._optimizer = call, before, optimizer

    def add_rows(
        self, worst: list[tuple[float, CallDifference]], modules: list[tuple[_Place, ModuleDifference]]
    ) -> None:
        """Add the worst calls and the modules of a process, and keep as many as are to be reported."""
        self._worst = heapq.nlargest(self.worst_limit, [*self._worst, *worst], key=lambda entry: entry[0])
        if self._modules:
            modules = sorted([*self._modules, *modules], key=lambda entry: entry[0])
        self._modules = modules[: self.limit]

    def difference(self, a: Run, b: Run, settings: tuple[tuple[str, str, str], ...]) -> Difference:
        """Return the result for all processes."""
        return Difference(
            a=a.head(),
            b=b.head(),
            settings=settings,
            ranks=tuple(self.ranks),
            absent=tuple(self.absent),
            calls=(self.calls[0], self.calls[1]),
            pairs=self.pairs,
            kinds={kind: self.kinds[kind] for kind in KINDS if self.kinds[kind]},
            by=dict(self.by),
            pairings={how: self.pairings[how] for how in PAIRINGS if self.pairings[how]},
            metadata=self.metadata,
            first=self._first,
            before=self._before,
            optimizer=self._optimizer,
            elapsed=(_total(self.elapsed[0]), _total(self.elapsed[1])),
            worst=tuple(call for _, call in self._worst),
            modules=tuple(module for _, module in self._modules),
            modules_in_all=self.modules_in_all,
            unmatched=tuple(self._unmatched),
            unmatched_calls=(self.unmatched_calls[0], self.unmatched_calls[1]),
        )


def _order(call: CallDifference) -> tuple[bool, _Place]:
    return call.kind in ("inherited", "rounding"), call.a.place


def _total(times: list[float]) -> float | None:
    total = float(np.sum(times))
    return None if total != total else total
