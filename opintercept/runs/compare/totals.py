"""`ProcessTotals` adds up the pairs of two processes, `DiffTotals` those of all, and both keep the rows to report.

Invariant: memory grows with the modules, not with the calls. Needs numpy. Must not import torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.compare.difference import KINDS, Absent, CallDifference, Kind, ModuleDifference, Unmatched
from opintercept.runs.compare.fused import fused
from opintercept.runs.compare.pairing import BY, PAIRINGS, Pairing
from opintercept.runs.compare.pairs import Index
from opintercept.runs.compare.result import Difference
from opintercept.runs.store.columns import CHUNK, Array
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer

# Takes calls of a process that differ: all calls of its run, their numbers, and the relative errors of their outputs,
# negative if unknown.
ErrorListener = Callable[[Index, Array, Array], None]
_Place = tuple[int, int, int]  # `StoredCall.place`

EQUAL, ADDED, ARGUMENT, OPERAND, INHERITED, ROUNDING, UNCLEAR, NOT_COMPARED = range(len(KINDS))
NEVER = 1 << 62  # the number of no call
# A pair: its calls, the relative error of the output, -1 if unknown, a number for the keys of both, its kind, which
# operands differ, those that no call before can explain, how it is paired, by what it is equal, and whether a shape or
# dtype differs.
ROW = np.dtype(
    [("a", "i8"), ("b", "i8"), ("relative", "f8"), ("key", "i4")]
    + [(name, "u1") for name in ("kind", "differing", "changed", "how", "by", "metadata")]
)
# Of the pairs of one key: the first; of those that are selected, the largest error and the first that differs.
_KEY = np.dtype([("begins", "i8"), ("relative", "f8"), ("first", ROW)])


def differ(kinds: Array) -> Array:
    """Which of some kinds are those of pairs that differ."""
    return np.asarray((kinds != EQUAL) & (kinds != NOT_COMPARED))


class ProcessTotals:
    """Adds up the pairs of two processes. Of counts, errors and the worst, it takes those that the caller selects.

    Attributes:
        keys: What is known of each key.
        counts: How many pairs there are of each key and kind.
        first: The first pair that differs, in an array of one, whether it is selected or not.
        metadata: How many pairs differ in a shape or dtype.
        by, how: How many equal pairs there are by index into `BY`, and how many pairs by index into `PAIRINGS`.
        worst: The pairs with the largest errors, the largest first.
        elapsed: Host times in A and B.
        uncompared: The first pair of a backward pass of which nothing shows whether it is equal.
    """

    def __init__(self, worst_limit: int) -> None:
        self.keys, self.counts = np.zeros(0, _KEY), np.zeros((0, len(KINDS)), np.int64)
        self.first, self.worst = np.zeros(1, ROW), np.zeros(0, ROW)
        self.metadata = 0
        self.by, self.how = np.zeros(len(BY), np.int64), np.zeros(len(PAIRINGS), np.int64)
        self.elapsed: tuple[list[float], list[float]] = ([], [])
        self.uncompared = self.first["a"][0] = NEVER
        self._limit = worst_limit

    def add(self, found: Array, chosen: Array, backward: Array) -> None:
        """Add pairs in the order of the calls; `backward` says which keys are of a backward pass."""
        if more := len(backward) - len(self.keys):
            new = np.zeros(more, _KEY)
            new["relative"], new["begins"], new["first"]["a"] = -1.0, NEVER, NEVER
            self.keys, self.counts = np.append(self.keys, new), np.pad(self.counts, ((0, more), (0, 0)))
        key, number, kind = found["key"], found["a"], found["kind"]
        differs = differ(kind)
        early = np.flatnonzero(number < self.keys["begins"][key])[::-1]
        self.keys["begins"][key[early]] = number[early]
        firsts = found[np.flatnonzero(differs)[:1]]
        self.first = min(self.first, firsts, key=lambda rows: rows["a"][0]) if len(firsts) else self.first
        blank = number[(kind == NOT_COMPARED) & backward[key]]
        self.uncompared = min([self.uncompared, *blank[:1].tolist()])
        if not chosen.all():
            found, differs = found[chosen], differs[chosen]
            key, kind = found["key"], found["kind"]
        self.metadata += int(found["metadata"].sum())
        self.by += np.bincount(found["by"][~differs], minlength=len(BY))
        self.how += np.bincount(found["how"], minlength=len(PAIRINGS))
        self.counts += np.bincount(key * len(KINDS) + kind, minlength=self.counts.size).reshape(self.counts.shape)
        known = np.flatnonzero(found["relative"] >= 0)
        np.maximum.at(self.keys["relative"], key[known], found["relative"][known])
        apart = found[differs]
        self._add_firsts(apart[apart["a"] < self.keys["first"]["a"][apart["key"]]])
        least = self.worst["relative"].min() if len(self.worst) == self._limit else -np.inf
        apart = apart[apart["relative"] >= least]
        if len(apart) > self._limit:
            apart = apart[apart["relative"] >= np.partition(apart["relative"], -self._limit)[-self._limit]]
        worst = np.append(self.worst, apart)
        self.worst = worst[np.lexsort((worst["a"], -worst["relative"]))][: self._limit]

    def _add_firsts(self, rows: Array) -> None:
        self.keys["first"][rows["key"][::-1]] = rows[::-1]

    def settle(self) -> None:
        """The pair that differs first has inherited nothing: all of its operands that differ count as changed."""
        ((number, key, kind),) = self.first[["a", "key", "kind"]].tolist()
        for rows in (self.first, self.keys["first"], self.worst):
            at = np.flatnonzero(rows["a"] == number)
            rows["changed"][at] = rows["differing"][at]
            rows["kind"][at] = OPERAND if kind == INHERITED else kind
        if kind == INHERITED and self.keys["first"]["a"][key] == number:  # it is selected
            self.counts[key, [INHERITED, OPERAND]] += [-1, 1]

    def replace(self, rows: Array, chosen: Array) -> None:
        """Take these pairs, in the order of the calls, in place of all that are not known to be equal."""
        self.counts[:, np.arange(len(KINDS)) != EQUAL] = 0
        np.add.at(self.counts, (rows["key"][chosen], rows["kind"][chosen]), 1)
        self.keys["first"]["a"] = NEVER
        self._add_firsts(rows[chosen & (rows["kind"] != NOT_COMPARED)])
        self.worst = rows[np.searchsorted(rows["a"], self.worst["a"])]


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
        self.fused = [0, 0]
        self.judged: Answer | str = ""
        self._first: CallDifference | None = None
        self._before, self._optimizer = (0, 0), False
        self._worst: list[tuple[float, CallDifference]] = []
        self._modules: list[tuple[_Place, ModuleDifference]] = []  # with the place of the first call that differs
        self._unmatched: list[Unmatched] = []

    def add_unmatched(self, *sides: tuple[Literal["a", "b"], Index, Sequence[int] | Array]) -> None:
        """Add the calls of a process that have no counterpart, or of two."""
        alone = [_alone(index, numbers) for _, index, numbers in sides]
        if len(sides) == 2 and any(_has_kernels(index) for _, index, _ in sides):
            records = [_records(index, rows) for (_, index, _), rows in zip(sides, alone, strict=True)]
            for at, (own, others) in enumerate(zip(records, reversed(records), strict=True)):
                in_other = fused(own, others)
                self.fused[at] += sum(count for (_, count), is_in in zip(alone[at], in_other, strict=True) if is_in)
                alone[at] = [row for row, is_in in zip(alone[at], in_other, strict=True) if not is_in]
        for (side, index, _), rows in zip(sides, alone, strict=True):
            self.unmatched_calls[side == "b"] += sum(count for _, count in rows)
            rows = rows[: max(self.limit - len(self._unmatched), 0)]
            for (_, count), record in zip(rows, _records(index, rows), strict=True):
                key = record.module, record.op, record.phase, record.grad_of
                self._unmatched.append(Unmatched(side, index.columns.rank, *key, count, record.index))

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
            judged=self.judged,
            first=self._first,
            before=self._before,
            optimizer=self._optimizer,
            elapsed=(_total(self.elapsed[0]), _total(self.elapsed[1])),
            worst=tuple(call for _, call in self._worst),
            modules=tuple(module for _, module in self._modules),
            modules_in_all=self.modules_in_all,
            unmatched=tuple(self._unmatched),
            unmatched_calls=(self.unmatched_calls[0], self.unmatched_calls[1]),
            fused=(self.fused[0], self.fused[1]),
        )


def _alone(index: Index, numbers: Sequence[int] | Array) -> list[list[int]]:
    """The first of these calls with each key that is selected, and how many there are, in the order of the calls."""
    found: dict[int, list[int]] = {}
    for start in range(0, len(numbers), CHUNK):
        some = np.asarray(numbers[start : start + CHUNK], np.int64)
        kinds = index.gather(some)["kind"]
        chosen = index.chosen(some, kinds)
        some = some[chosen]
        each = np.unique(index.kinds["key"][kinds[chosen]], return_index=True, return_counts=True)
        for key, at, count in zip(*(column.tolist() for column in each), strict=True):
            found.setdefault(key, [int(some[at]), 0])[1] += count
    return sorted(found.values())


def _records(index: Index, rows: Sequence[Sequence[int]]) -> list[CallRecord]:
    """The records of the calls with which rows begin."""
    firsts = np.array([first for first, _ in rows], np.int64)
    return [call.record for call in index.columns.calls_at(firsts, given=False)] if rows else []


def _has_kernels(index: Index) -> bool:
    return any(index.columns.signature(number).record.ops is not None for number in index.columns.used)


def _order(call: CallDifference) -> tuple[bool, _Place]:
    return call.kind in ("inherited", "rounding"), call.a.place


def _total(times: list[float]) -> float | None:
    total = float(np.sum(times))
    return None if total != total else total
