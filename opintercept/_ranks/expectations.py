"""`Expectations`: learns which operands should be equal on which ranks, and finds those that no longer are.

Invariant: only tables that every rank has change it, so it is the same on every rank. Must not import torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

from opintercept._values.splitmix import WORD, splitmix64

PATIENCE = 4
"""In how many steps an operand may appear before it is decided whether its ranks should be equal."""
MOST_KEYS = 1 << 17
"""How many operands are known at most. Later ones are not compared."""
CONSTANT, WEIGHT = 1, 2
"""Flags of an entry: all elements are equal, and it is a parameter."""

Group = tuple[int, ...]
"""Ranks in ascending order."""


class RankOperand(NamedTuple):
    """One operand of a rank, by its hash."""

    key: int  # its place, from `key_of`
    value: int  # a hash of its values
    flags: int = 0  # CONSTANT, WEIGHT, or both


class DivergedOperand(NamedTuple):
    """Ranks whose operands should be equal and are not."""

    key: int  # the place of the operand
    ranks: tuple[Group, ...]  # those with each value, the largest group first


class _Candidate:
    """An operand that may turn out to be equal on several ranks."""

    __slots__ = ("seen", "values")

    def __init__(self) -> None:
        self.seen = 0
        # The groups that have been equal so far, and which values they had.
        self.values: dict[Group, set[int]] | None = None


class Expectations:
    """The groups of ranks that should be equal, by operand: all of them in every operand if `all_equal`.

    Otherwise a weight should be equal on the ranks that have it in common when it first appears. Another operand should
    be equal on the ranks that have had it in common in two steps with different values. Constants do not count, since
    ranks have zeros in common by chance.
    """

    def __init__(self, size: int, all_equal: bool = False) -> None:
        self._all: Group = tuple(range(size))
        self._default = (self._all,) if all_equal else None
        self._groups: dict[int, tuple[Group, ...]] = {}
        self._candidates: dict[int, _Candidate] = {}
        self.version = 0

    def clear(self) -> None:
        """Forget what should be equal."""
        self._groups.clear()
        self._candidates.clear()
        self.version = 0

    def of(self, key: int) -> tuple[Group, ...] | None:
        """The groups that should be equal in an operand; None if that is not known yet."""
        return self._groups.get(key, self._default)

    def wants(self, key: int, rank: int) -> bool:
        """Whether a rank should hash an operand."""
        groups = self._groups.get(key, self._default)
        if groups is None:
            return len(self._groups) + len(self._candidates) < MOST_KEYS or key in self._candidates
        return any(rank in group for group in groups)

    def summed(self, rank: int, step: int, entries: Iterable[RankOperand]) -> tuple[int, int]:
        """What the entries of a rank contribute to the sums over all ranks, in its comparison number `step`.

        The first sum is 0 mod 2**64 if all ranks agree and, but for a chance of about 2**-60, only then. The second
        counts operands of which it is not known whether they should be equal.
        """
        share = _share(self._all, rank)
        total, unknown = share * splitmix64(step) + share * splitmix64(self.version ^ 1 << 63), 0
        for key, value, _ in entries:
            groups = self._groups.get(key, self._default)
            if groups is None:
                unknown += 1
                continue
            for group in groups:
                if rank in group:
                    total += (splitmix64(key) | 1) * _share(group, rank) * splitmix64(value)
        return total & WORD, unknown

    def judge(self, tables: Sequence[Sequence[RankOperand]]) -> list[DivergedOperand]:
        """Compare the operands of all ranks in one step, and learn which of them should be equal.

        The table of a rank has its operands in the order of its calls, and so has the result. Operands that only some
        ranks have are compared on those. Ranks that diverge are not expected to be equal again.
        """
        found: dict[int, dict[int, RankOperand]] = {}
        first: dict[int, int] = {}
        for rank, table in enumerate(tables):
            for place, entry in enumerate(table):
                found.setdefault(entry.key, {})[rank] = entry
                first[entry.key] = min(place, first.get(entry.key, place))
        diverged = []
        for key in sorted(found, key=lambda key: (first[key], key)):
            groups = self.of(key)
            if groups is None:
                self._learn(key, found[key])
            elif len(classes := self._classes(groups, found[key])) > len(groups):
                diverged.append(DivergedOperand(key, self._apart(groups, found[key])))
                self._groups[key] = tuple(group for group in classes if len(group) > 1)
        self.version = _digest(self.version, tables)
        return diverged

    def _classes(self, groups: tuple[Group, ...], entries: Mapping[int, RankOperand]) -> tuple[Group, ...]:
        """The groups, split by value. Ranks that did not make the call stay with the largest part."""
        found: list[Group] = []
        for group in groups:
            parts = by_value(group, entries)
            absent = tuple(rank for rank in group if rank not in entries)
            largest = parts[0] if parts else ()
            found += [tuple(sorted(largest + absent)), *parts[1:]]
        return tuple(found)

    def _apart(self, groups: tuple[Group, ...], entries: Mapping[int, RankOperand]) -> tuple[Group, ...]:
        """Return the parts of the first group that has diverged."""
        return next(parts for group in groups if len(parts := by_value(group, entries)) > 1)

    def _learn(self, key: int, entries: Mapping[int, RankOperand]) -> None:
        candidate = self._candidates.get(key)
        if candidate is None:
            if len(self._groups) + len(self._candidates) >= MOST_KEYS:
                return
            candidate = self._candidates[key] = _Candidate()
        candidate.seen += 1
        parts = [part for part in by_value(entries, entries) if len(part) > 1]
        constant = any(entry.flags & CONSTANT for entry in entries.values())
        weight = all(entry.flags & WEIGHT for entry in entries.values())
        known = candidate.values
        if not constant and len(entries) > 1:
            if known is None:
                candidate.values = {part: {entries[part[0]].value} for part in parts}
            else:
                both = {
                    tuple(sorted({*old} & {*new})): values | {entries[new[0]].value}
                    for old, values in known.items()
                    for new in parts
                }
                candidate.values = {part: values for part, values in both.items() if len(part) > 1}
        known = candidate.values
        enough = 1 if weight else 2
        settled = known is not None and all(len(values) >= enough for values in known.values())
        if settled or candidate.seen >= PATIENCE:
            self._groups[key] = tuple(sorted(part for part, values in (known or {}).items() if len(values) >= enough))
            del self._candidates[key]


def key_of(*place: Hashable) -> int:
    """A number for the place of an operand, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=8).digest(), "big", signed=True)


def mixed(value: int, *more: int) -> int:
    """A signed number of 64 bits that depends on all bits of others."""
    for each in more:
        value = splitmix64(value) + each
    value = splitmix64(value)
    return value - 2**64 if value >= 2**63 else value


def by_value(ranks: Iterable[int], entries: Mapping[int, RankOperand]) -> tuple[Group, ...]:
    """The ranks that have an entry, by its value: the largest group first, then the one with the lowest rank."""

    def value(rank: int) -> int:
        return entries[rank].value

    there = sorted((rank for rank in ranks if rank in entries), key=lambda rank: (value(rank), rank))
    parts = [tuple(part) for _, part in groupby(there, value)]
    return tuple(sorted(parts, key=lambda part: (-len(part), part)))


def named_ranks(ranks: Sequence[int]) -> str:
    """Write some ranks in ascending order: `rank 1`, `ranks 0, 2 to 63`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    shown = [" to ".join(map(str, span)) if span[-1] - span[0] != 1 else f"{span[0]}, {span[-1]}" for span in spans]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def who_diverged(parts: tuple[tuple[int, ...], ...]) -> str:
    """Write which ranks have diverged: `rank 1 diverged from ranks 0, 2, 3`."""
    if len(parts) > 2 and len(parts[0]) == 1:
        return f"{named_ranks(sorted(rank for part in parts for rank in part))} diverged from each other"
    first, *others = map(named_ranks, parts)
    return f"{' and '.join(others)} diverged from {first}"


@cache
def _share(group: Group, rank: int) -> int:
    """A factor for each rank of a group. Their sum is 0, and all but the last are odd."""
    if rank == group[-1]:
        return -sum(_share(group, other) for other in group[:-1])
    return splitmix64(rank + 2**32) | 1


def _digest(version: int, tables: Sequence[Sequence[RankOperand]]) -> int:
    state = hashlib.blake2b(version.to_bytes(8, "big"), digest_size=7)
    for table in tables:
        state.update(len(table).to_bytes(8, "big"))
        state.update(array("q", [number for entry in table for number in entry]).tobytes())
    return int.from_bytes(state.digest(), "big")
