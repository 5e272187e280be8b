"""`CallKinds` and `Grouping`: sort the calls of a chunk into groups and add them up.

Invariant: groups are in the order of their first calls. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opintercept.runs.store.codec import is_output
from opintercept.runs.store.columns import FIGURES, ROLES, SLOTS, Array, Arrays, CallSignature, Columns, StoredCallSite

COUNTS = tuple(f"{slot}_{name}" for slot in SLOTS for name in ("nan", "inf"))


class CallKinds:
    """Numbers the distinct (call site, signature) pairs from 0; such a pair is the kind of a call.

    Args:
        columns: The calls.
    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._known: dict[int, int] = {}
        self._codes: list[int] = []

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, kind: int) -> tuple[StoredCallSite, CallSignature]:
        call_site, signature = divmod(self._codes[kind], self._columns.signatures)
        return self._columns.call_site(call_site), self._columns.signature(signature)

    def numbers(self, kind: int) -> tuple[int, int]:
        """The numbers of the call site and the signature."""
        call_site, signature = divmod(self._codes[kind], self._columns.signatures)
        return call_site, signature

    def of(self, chunk: Arrays) -> Array:
        """The kind of each call of a chunk, which has the columns `site` and `look`."""
        groups = Grouping(chunk["site"].astype(np.int64) * self._columns.signatures + chunk["look"])
        kinds = np.empty(len(groups.codes), np.int32)
        for place, code in enumerate(groups.codes.tolist()):
            kind = self._known.get(code)
            if kind is None:
                kind = self._known[code] = len(self._codes)
                self._codes.append(code)
            kinds[place] = kind
        return np.asarray(kinds[groups.group])


class Grouping:
    """Groups of rows that share a code.

    Args:
        codes: Of each row.

    Attributes:
        codes: Of each group.
        firsts: The first row of each group.
        group: The group of each row.
        counts: How many rows each has.
    """

    def __init__(self, codes: Array) -> None:
        found, firsts, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
        in_order = np.argsort(firsts)
        place = np.empty_like(in_order)
        place[in_order] = np.arange(len(in_order))
        self.codes, self.firsts, self.counts = found[in_order], firsts[in_order], counts[in_order]
        self.group = place[inverse]
        small = self.group.astype(np.uint16) if len(found) < 1 << 16 else self.group  # sorted in linear time
        self._rows = np.argsort(small, kind="stable")
        self._starts = np.r_[0, np.cumsum(self.counts)[:-1]] if len(found) else np.empty(0, int)

    def sum(self, values: Array) -> Array:
        """The sums of numbers, as floats."""
        return np.bincount(self.group, values, len(self.codes))

    def min(self, values: Array) -> Array:
        """The smallest numbers; NaN only if there is no other."""
        return np.asarray(np.fmin.reduceat(values[self._rows], self._starts)) if len(self.codes) else values

    def max(self, values: Array) -> Array:
        """The largest numbers; NaN only if there is no other."""
        return np.asarray(np.fmax.reduceat(values[self._rows], self._starts)) if len(self.codes) else values


def joined(few: Array, many: Array) -> Array:
    """Return a code for each pair of numbers. The first are small, and neither is negative."""
    found, codes = np.unique(many, return_inverse=True)
    return np.asarray(few.astype(np.int64) * max(len(found), 1) + codes)


def nonfinite(columns: Columns, start: int, chunk: Arrays, *, outputs: bool = False) -> Array:
    """Return which calls have NaN or Inf in a tensor, or in an output.

    Args:
        columns: All calls.
        start: The number of the first call of the chunk.
        chunk: Has the columns `COUNTS` and `has_more`.
        outputs: Whether to look at outputs only.
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


def first_output(signature: CallSignature) -> str | None:
    """Return the slot of a signature's first output; None if it has no output, or none in columns."""
    role = next((role for role in signature.roles if is_output(role)), None)
    return None if role is None else ROLES.get(role)


def ends_of(groups: Grouping, chunk: Arrays, kinds: Array, slots: Sequence[str | None]) -> tuple[Array, Array]:
    """The smallest and the largest value of the first output in each group; NaN if unknown.

    Args:
        groups: The groups.
        chunk: Has the ranges of the outputs.
        kinds: The kind of each call.
        slots: `first_output` of each kind.
    """
    low, high = np.full(len(kinds), np.nan), np.full(len(kinds), np.nan)
    for slot in ("output", "output1"):
        which = np.array([each == slot for each in slots], bool)[kinds]
        if which.any():
            known = which & ~np.isnan(chunk[f"{slot}_min"]) & ~np.isnan(chunk[f"{slot}_max"])
            low, high = np.where(known, chunk[f"{slot}_min"], low), np.where(known, chunk[f"{slot}_max"], high)
    return groups.min(low), groups.max(high)


class SlotStatistics:
    """The statistics of one slot, added up for each group.

    Args:
        groups: The groups.
        chunk: Has the columns of the slot.
        slot: The slot.
        counts: How many values each tensor has; -1 for calls without one.
    """

    def __init__(self, groups: Grouping, chunk: Arrays, slot: str, counts: Array) -> None:
        nan, inf = chunk[f"{slot}_nan"], chunk[f"{slot}_inf"]
        figures = {name: chunk[f"{slot}_{name}"] for name in FIGURES}
        here = counts >= 0
        known = here & ~np.any([np.isnan(each) for each in figures.values()], axis=0)
        finite = np.where(known, np.maximum(counts - nan - inf, 0), 0)
        self.calls = groups.sum(here)
        self.count, self.nan, self.inf = (groups.sum(np.where(here, each, 0)) for each in (counts, nan, inf))
        self.finite = groups.sum(finite)
        with np.errstate(over="ignore", invalid="ignore"):  # in a hostile run
            self.sum = groups.sum(np.where(known, figures["mean"] * finite, 0.0))
            self.square = groups.sum(np.where(known, figures["rms"] ** 2 * finite, 0.0))
        self.min = groups.min(np.where(known, figures["min"], np.inf))
        self.max = groups.max(np.where(known, figures["max"], -np.inf))
