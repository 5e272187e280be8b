"""`ProcessTotals` adds up the pairs of two processes, `DiffTotals` those of all, and both keep the rows to report.

Invariant: memory grows with the modules, not with the calls. Needs numpy. Must not import torch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from opintercept.runs.compare.difference import KINDS, Absent, CallDifference, Kind, ModuleDifference, Unmatched
from opintercept.runs.compare.index import Index
from opintercept.runs.compare.pairing import BY, PAIRINGS, Pairing
from opintercept.runs.compare.result import Difference
from opintercept.runs.store.columns import CHUNK, Array, Arrays
from opintercept.runs.store.run import Run
from opintercept.runs.sums import CodeNumbers
from opintercept.runs.why.answer import Answer

# Takes the calls of a process that were compared: all calls of its run, the numbers of those, the relative errors of
# their outputs, negative if unknown, which of them differ, and the ranks in both runs.
ErrorListener = Callable[[Index, Array, Array, Array, tuple[int, int]], None]
_Place = tuple[int, int, int]  # `StoredCall.place`


EQUAL, ADDED, ARGUMENT, OPERAND, INHERITED, ROUNDING, UNCLEAR, NOT_COMPARED = range(len(KINDS))
NEVER = 1 << 62  # the number of no call
# A pair: its calls, the relative error of the output, -1 if unknown, a number for the keys of both, what it would be if
# no operand differed, as an index into `KINDS`, which operands differ, those that no call before can explain, and how
# it is paired.
ROW = np.dtype(
    [("a", "i8"), ("b", "i8"), ("relative", "f8"), ("key", "i4")]
    + [(name, "u1") for name in ("own", "differing", "changed", "how")]
)
# Of the pairs of one key: how many there are, how many selected ones are equal, the first, the largest error, and the
# first that differs, of all and of those that are selected.
_KEY = np.dtype(
    [("calls", "i8"), ("equal", "i8"), ("begins", "i8"), ("relative", "f8"), ("first", ROW), ("chosen", ROW)]
)


def kinds_of(rows: Any) -> Any:
    """The kinds of some pairs, or of one, as indexes into `KINDS`."""
    kinds = np.where(rows["differing"] > 0, np.uint8(INHERITED), rows["own"])
    kinds = np.where(rows["changed"] > 0, np.uint8(OPERAND), kinds)
    return np.where(rows["own"] == ARGUMENT, np.uint8(ARGUMENT), kinds)


def differ(kinds: Array) -> Array:
    """Which of some kinds are those of pairs that differ."""
    return np.asarray((kinds != EQUAL) & (kinds != NOT_COMPARED))


class ProcessTotals:
    """Adds up the pairs of two processes. Of counts, errors and the worst, it takes those that the caller selects.

    Attributes:
        keys: What is known of each key.
        pairs, metadata: How many pairs there are, and how many differ in a shape or dtype.
        by, how: How many equal pairs there are by index into `BY`, and how many pairs by index into `PAIRINGS`.
        worst: The pairs with the largest errors, the largest first.
        elapsed: Host times in A and B.
        uncompared: The first pair of a backward pass of which nothing shows whether it is equal.
    """

    def __init__(self, worst_limit: int) -> None:
        self.keys, self.worst = np.zeros(0, _KEY), np.zeros(0, ROW)
        self.pairs = self.metadata = 0
        self.by, self.how = np.zeros(len(BY), np.int64), np.zeros(len(PAIRINGS), np.int64)
        self.elapsed: tuple[list[float], list[float]] = ([], [])
        self.uncompared = NEVER
        self._limit = worst_limit
        self._codes, self._counts = CodeNumbers(), np.zeros(0, np.int64)  # by what decides a kind

    def add(self, found: Arrays, chosen: Array, backward: Array) -> None:
        """Add pairs in the order of the calls, in columns; `backward` says which keys are of a backward pass."""
        if more := len(backward) - len(self.keys):
            new = np.zeros(more, _KEY)
            new["relative"], new["begins"], new["first"]["a"], new["chosen"]["a"] = -1.0, NEVER, NEVER, NEVER
            self.keys = np.append(self.keys, new)
        key, number, differs = found["key"], found["a"], (found["differing"] > 0) | differ(found["own"])
        self.keys["calls"] += np.bincount(key, minlength=len(backward))
        early = np.flatnonzero(number < self.keys["begins"][key])[::-1]
        self.keys["begins"][key[early]] = number[early]
        self._add_firsts("first", found, np.flatnonzero(differs))
        blank = number[(found["own"] == NOT_COMPARED) & backward[key]]
        self.uncompared = min([self.uncompared, *blank[:1].tolist()])
        if not chosen.all():
            found = {name: column[chosen] for name, column in found.items()}
            key, differs = found["key"], differs[chosen]
        self.pairs += len(key)
        self.metadata += int(found["metadata"].sum())
        self.by += np.bincount(found["by"][~differs], minlength=len(BY))
        self.how += np.bincount(found["how"], minlength=len(PAIRINGS))
        known = np.flatnonzero(found["relative"] >= 0)
        np.maximum.at(self.keys["relative"], key[known], found["relative"][known])
        self._add_firsts("chosen", found, np.flatnonzero(differs))
        equal = ~differs & (found["own"] == EQUAL)
        self.keys["equal"] += np.bincount(key[equal], minlength=len(backward))
        key, *decisive = (found[name][~equal].astype(np.int64) for name in ("key", "own", "differing", "changed"))
        numbers, made = self._codes.of(key << 24 | decisive[0] << 16 | decisive[1] << 8 | decisive[2])
        self._counts = np.pad(self._counts, (0, len(made)))
        self._counts += np.bincount(numbers, minlength=len(self._counts))
        least = self.worst["relative"].min() if len(self.worst) == self._limit else -np.inf
        rows = np.flatnonzero(differs & (found["relative"] >= least))
        if len(rows) > self._limit:
            relative = found["relative"][rows]
            rows = rows[relative >= np.partition(relative, -self._limit)[-self._limit]]
        worst = np.append(self.worst, rows_of(found, rows))
        self.worst = worst[np.lexsort((worst["a"], -worst["relative"]))][: self._limit]

    def _add_firsts(self, name: str, found: Arrays, rows: Array) -> None:
        rows = rows[found["a"][rows] < self.keys[name]["a"][found["key"][rows]]][::-1]
        self.keys[name][found["key"][rows]] = rows_of(found, rows)

    def counts(self, constant: Array) -> Array:
        """How many pairs there are of each key and kind.

        Args:
            constant: For each key, the operands that count as changed wherever they differ. All that differ do in the
                first pair that differs.
        """
        first = self.keys["first"][np.argmin(self.keys["first"]["a"])].copy()
        codes = self._codes.codes()
        rows = np.zeros(len(codes) + 2, ROW)
        rows["key"][:-2], rows["own"][:-2] = codes >> 24, codes >> 16 & 255
        rows["differing"][:-2], rows["changed"][:-2] = codes >> 8 & 255, codes & 255
        rows[-2:] = first
        for each in (rows, self.keys["first"], self.keys["chosen"], self.worst):
            each["changed"] |= each["differing"] & constant[each["key"]]
        rows["changed"][-1] = first["differing"]
        for each in (self.keys["first"], self.keys["chosen"], self.worst):
            each["changed"][each["a"] == first["a"]] = first["differing"]
        moved = int(first["a"] < NEVER and first["a"] == self.keys["chosen"]["a"][first["key"]])
        found = np.zeros((len(self.keys), len(KINDS)), np.int64)
        found[:, EQUAL] = self.keys["equal"]
        np.add.at(found, (rows["key"], kinds_of(rows)), np.r_[self._counts, -moved, moved])
        return found


def rows_of(found: Arrays, which: Array) -> Array:
    """Some of the pairs in columns, as rows."""
    made = np.zeros(len(which), ROW)
    for name in ROW.names or ():
        made[name] = found[name][which]
    return made


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
        self.judged: Answer | str = ""
        self._first: CallDifference | None = None
        self._before, self._optimizer = (0, 0), False
        self._worst: list[tuple[float, CallDifference]] = []
        self._modules: list[tuple[_Place, ModuleDifference]] = []  # with the place of the first call that differs
        self._unmatched: list[Unmatched] = []

    def add_unmatched(self, side: Literal["a", "b"], rank: int, index: Index, numbers: Sequence[int] | Array) -> None:
        """Add the calls of a process that have no counterpart."""
        found: dict[int, list[int]] = {}  # the first call of each key, and how many there are
        for start in range(0, len(numbers), CHUNK):
            some = np.asarray(numbers[start : start + CHUNK], np.int64)
            kinds = index.gather(some)["kind"]
            chosen = index.chosen(some, kinds)
            self.unmatched_calls[side == "b"] += int(chosen.sum())
            some = some[chosen]
            each = np.unique(index.key[kinds[chosen]], return_index=True, return_counts=True)
            for key, at, count in zip(*(column.tolist() for column in each), strict=True):
                found.setdefault(key, [int(some[at]), 0])[1] += count
        rows = sorted(found.values())[: max(self.limit - len(self._unmatched), 0)]
        if not rows:
            return
        calls = index.columns.calls_at(np.array([first for first, _ in rows]), given=False)
        for (_, count), call in zip(rows, calls, strict=True):
            record = call.record
            self._unmatched.append(
                Unmatched(side, rank, record.module, record.op, record.phase, record.grad_of, count, record.index)
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
        )


def _order(call: CallDifference) -> tuple[bool, _Place]:
    return call.kind in ("inherited", "rounding"), call.a.place


def _total(times: list[float]) -> float | None:
    total = float(np.sum(times))
    return None if total != total else total
