"""`GroupSums` adds up calls by keys, in columns, for `show`, `report` and what they print over steps.

Invariant: memory holds a chunk of calls and a row for each group. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import FIGURES, ROLES, SLOTS, Array, Arrays, CallSignature, Columns, StoredCallSite

COUNTS = tuple(f"{slot}_{name}" for slot in SLOTS for name in ("nan", "inf"))
STATISTICS = ("count", "nan", "inf", *FIGURES)
_REDUCE: dict[str, Any] = {"min": np.fmin, "max": np.fmax}


class GroupSums:
    """Groups of calls that share their keys, sorted by these, and figures of each group.

    Of figures whose names end in `min` and `max`, a group has the smallest and the largest number, NaN only if there is
    no other; of those that end in `first`, that of its first call; of all others the sum, as a float.

    Attributes:
        keys: Columns of whole numbers.
        figures: Columns of numbers.
    """

    def __init__(self) -> None:
        self.keys: list[Array] = []
        self.figures: Arrays = {}

    def __len__(self) -> int:
        return len(self.keys[0]) if self.keys else 0

    def add(self, keys: Sequence[Array], figures: Arrays) -> None:
        """Add calls, or groups of them. A figure that others have and these lack is 0, or NaN for `min` and `max`."""
        if self.keys:
            sizes = len(self), len(keys[0])
            keys = [np.concatenate(both) for both in zip(self.keys, keys, strict=True)]
            names = dict.fromkeys((*self.figures, *figures))
            parts = {name: [self.figures.get(name), figures.get(name)] for name in names}
            figures = {name: _joined(name, both, sizes) for name, both in parts.items()}
        if not len(keys[0]):
            return
        order = np.lexsort(keys[::-1])
        keys = [column[order] for column in keys]
        starts = starts_of(*keys)
        self.keys = [column[starts] for column in keys]
        self.figures = {name: _reduced(name, column[order], starts) for name, column in figures.items()}

    def regroup(self, *keys: Array) -> None:
        """Replace the keys of the groups, and join those that now share theirs."""
        figures, self.keys, self.figures = self.figures, [], {}
        self.add(keys, figures)

    def statistics(self, slot: str) -> Arrays:
        """The statistics of the values of a slot in each group, by `STATISTICS`; NaN where there are none."""
        own = {name: self.figures[f"{slot}_{name}"] for name in (*_SUMMED, "min", "max")}
        with np.errstate(all="ignore"):  # in a hostile run, also the root of a negative number
            finite = np.where(own["finite"] > 0, own["finite"], np.nan)
            own |= {name: np.where(own["finite"] > 0, own[name], np.nan) for name in ("min", "max")}
            own["mean"], own["rms"] = own["total"] / finite, np.sqrt(own["square"] / finite)
        return {name: own[name] for name in STATISTICS}


def starts_of(*keys: Array) -> Array:
    """The first row of each stretch of rows with equal keys."""
    new = np.ones(len(keys[0]), bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(new)


def ordinals(*keys: Array) -> Array:
    """The number of each row among those of its keys, in whose order rows with the same first key are."""
    order = np.argsort(keys[0], kind="stable")
    starts = starts_of(*(key[order] for key in keys))
    found = np.empty(len(order), np.int64)
    found[order] = np.arange(len(order)) - np.repeat(starts, np.diff(np.r_[starts, len(order)]))
    return found


_SUMMED = ("calls", "count", "nan", "inf", "finite", "total", "square")


def slot_figures(chunk: Arrays, slot: str, counts: Array) -> Arrays:
    """Figures from which `GroupSums.statistics` are made; `counts` is negative for calls without such a tensor."""
    column = {name: chunk[f"{slot}_{name}"] for name in ("nan", "inf", *FIGURES)}
    here = counts >= 0
    known = here & ~np.any([np.isnan(column[name]) for name in FIGURES], axis=0)
    finite = np.where(known, np.maximum(counts - column["nan"] - column["inf"], 0), 0)
    made = {"calls": here, "finite": finite}
    made |= {name: np.where(here, each, 0) for name, each in (("count", counts), *list(column.items())[:2])}
    with np.errstate(over="ignore", invalid="ignore"):  # in a hostile run
        made["total"] = np.where(known, column["mean"] * finite, 0.0)
        made["square"] = np.where(known, column["rms"] ** 2 * finite, 0.0)
    made |= {name: np.where(known, column[name], np.nan) for name in ("min", "max")}
    return {f"{slot}_{name}": each for name, each in made.items()}


def _joined(name: str, both: list[Array | None], sizes: tuple[int, int]) -> Array:
    blank = np.nan if name.rpartition("_")[2] in _REDUCE else 0.0
    return np.concatenate(
        [np.full(size, blank) if each is None else each for each, size in zip(both, sizes, strict=True)]
    )


def _reduced(name: str, column: Array, starts: Array) -> Array:
    how = name.rpartition("_")[2]
    if how == "first":
        return column[starts]
    if how in _REDUCE:
        return np.asarray(_REDUCE[how].reduceat(column, starts))
    return np.add.reduceat(column.astype(np.float64), starts)


Learn = Callable[[StoredCallSite, CallSignature], Sequence[float]]


class CodeNumbers:
    """Numbers codes from 0, as they come."""

    def __init__(self) -> None:
        self._codes, self._numbers = np.zeros((2, 0), np.int64)  # in the order of the codes

    def of(self, codes: Array) -> tuple[Array, Array]:
        """The numbers of codes, and the places of those that are new, each once and in the order of their numbers."""
        places = np.searchsorted(self._codes, codes)
        lacking = np.flatnonzero(np.append(self._codes, -1)[places] != codes)
        if not len(lacking):
            return self._numbers[places], lacking
        new, firsts = np.unique(codes[lacking], return_index=True)
        at = np.searchsorted(self._codes, new)
        self._numbers = np.insert(self._numbers, at, len(self._codes) + np.argsort(np.argsort(firsts)))
        self._codes = np.insert(self._codes, at, new)
        return self._numbers[np.searchsorted(self._codes, codes)], lacking[np.sort(firsts)]

    def codes(self) -> Array:
        """The codes in the order of their numbers."""
        return np.asarray(self._codes[np.argsort(self._numbers)])


class KindNumbers:
    """Numbers the kinds of a process's calls, the distinct (call site, signature) pairs, as they come."""

    def __init__(self, columns: Columns) -> None:
        self._signatures = columns.signatures
        self._kinds = CodeNumbers()

    def of(self, chunk: Arrays) -> tuple[Array, list[tuple[int, int]]]:
        """The kinds of the calls of a chunk, and the call sites and signatures of those kinds that are new."""
        codes = chunk["site"].astype(np.int64) * self._signatures + chunk["look"]
        numbers, new = self._kinds.of(codes)
        return numbers, [divmod(code, self._signatures) for code in codes[new].tolist()]


class CallKinds:
    """Gives calls the numbers that `learn` returns for their call site and signature, asked in order, once for each."""

    def __init__(self, columns: Columns, learn: Learn) -> None:
        self._columns, self._learn = columns, learn
        self._kinds = KindNumbers(columns)
        self._learned: list[Sequence[float]] = []

    def of(self, chunk: Arrays) -> Array:
        """The numbers of the calls of a chunk, which has the columns `site` and `look`: `[numbers, calls]`."""
        kinds, new = self._kinds.of(chunk)
        self._learned += [self._learn(self._columns.call_site(s), self._columns.signature(n)) for s, n in new]
        return np.array(self._learned, np.float64).T[:, kinds]


def seconds_of(chunk: Arrays) -> Array:
    """How long each call took; 0 if that is not known."""
    elapsed = chunk["elapsed"]
    return np.where((elapsed >= 0) & np.isfinite(elapsed), elapsed, 0.0)


def nonfinite(columns: Columns, start: int, chunk: Arrays, *, outputs: bool = False) -> Array:
    """Return which calls of a chunk have NaN or Inf in a tensor, or with `outputs` in an output.

    The chunk begins with the call of the number `start` and has the columns `COUNTS` and `has_more`.
    """
    found = np.zeros(len(chunk["has_more"]), bool)
    for slot, role in SLOTS.items():
        if not outputs or is_output(role):
            found |= (chunk[f"{slot}_nan"] > 0) | (chunk[f"{slot}_inf"] > 0)
    more = np.flatnonzero(chunk["has_more"] & ~found)
    if len(more):
        found[more] = [
            any((each.nan or each.inf) and (is_output(role) or not outputs) for role, each in texts.more.items())
            for texts in columns.texts(more + start)
        ]
    return found


class EarliestCall:
    """The first of some calls, over all processes; `call` is None if there was none.

    Args:
        place: What puts calls of several processes in one order, see `Run.place`.
    """

    def __init__(self, place: Callable[[StoredCall], tuple[int, ...]]) -> None:
        self.call: StoredCall | None = None
        self._place = place

    def add(self, columns: Columns, start: int, chunk: Arrays, rows: Array) -> None:
        """Add those calls of a chunk that `rows` marks."""
        numbers = np.flatnonzero(rows)
        if len(numbers):
            first = np.lexsort((chunk["index"][numbers], chunk["step"][numbers]))[:1]
            (call,) = columns.calls_at(numbers[first] + start, given=False)
            self.call = call if self.call is None else min(self.call, call, key=self._place)


def first_output(signature: CallSignature) -> tuple[float, bool]:
    """Return how many values the first output has, and whether it is `output1`; -1 if there is none in columns."""
    role = next((role for role in signature.roles if is_output(role)), None)
    slot = None if role is None else ROLES.get(role)
    if role is None or slot not in ("output", "output1"):
        return -1, False
    return signature.roles[role][0], slot == "output1"


def first_outputs(chunk: Arrays, is_second: Array) -> Arrays:
    """The columns of the first outputs as those of `output`, where some calls have theirs in `output1`."""
    own = {name: column for name, column in chunk.items() if name.startswith("output_")}
    if not is_second.any():
        return own
    return {name: np.where(is_second, chunk[name.replace("_", "1_")], column) for name, column in own.items()}
