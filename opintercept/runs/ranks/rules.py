"""The rules by which ranks of one run diverge: `Alike` by hashes, `Counts` by calls, `OutlierFinder` by statistics.

Invariant: the work is sorting and adding up columns. A single call is read only where the expectation is not known
yet, or where ranks diverge. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from opintercept._ranks.expectations import CONSTANT, MOST_KEYS, WEIGHT, Expectations, Group, RankOperand, by_value
from opintercept._values.splitmix import splitmix64
from opintercept.runs.ranks.windows import Window
from opintercept.runs.store.columns import Array
from opintercept.runs.sums import ordinals, starts_of

FACTOR, SPREAD, STREAK, HUGE = 2.0, 16.0, 5, 1000.0
"""An output is far off if it is more than `FACTOR` times larger or smaller than the median of the ranks, and `SPREAD`
times as far from it, in logarithms, as half of the outputs of its place are. One batch of two samples may be. A rank is
an outlier if `STREAK` outputs in a row are, or one by a factor of `HUGE`, as a flipped bit makes it."""
_SAMPLES = 12  # calls that say what spread is usual
_NEAR = 16  # steps that have the same spread
_CELLS = 1 << 22  # of a table of calls by processes
_TINY = 1e-30  # stands for 0, which has no logarithm


class MatchedCalls(NamedTuple):
    """Rows of calls of several processes with the same place, step and number in that step; an entry is one call."""

    key: Array  # the place of each row: rows are in its order, then in that of time
    time: Array  # of each row
    starts: Array  # the first entry of each row, and the number of all entries
    process: Array  # of each entry
    call: Array  # its number in the window's part of that process
    order: Array  # sorts what is known of the calls, process after process, in the order of the entries

    def of_entries(self) -> Array:
        """The row of each entry."""
        return np.repeat(np.arange(len(self.key)), np.diff(self.starts))


def _tables(starts: Array, process: Array, value: Array, size: int) -> Iterator[tuple[slice, Array]]:
    """Some rows after the other as tables of values, with a column for each of `size` processes; 0 without an entry."""
    step = max(1, _CELLS // size)
    for low in range(0, len(starts) - 1, step):
        bounds = starts[low : low + step + 1]
        entries = slice(bounds[0], bounds[-1])
        table = np.zeros((len(bounds) - 1, size), value.dtype)
        table[np.repeat(np.arange(len(table)), np.diff(bounds)), process[entries]] = value[entries]
        yield slice(low, low + len(table)), table


class Alike:
    """Learns what should be equal on which processes, and finds where they diverge."""

    def __init__(self, size: int, weight: Sequence[bool]) -> None:
        self.agreed: dict[int, tuple[Group, ...]] = {}  # by key, as it was when this was decided
        self._size, self._weight = size, weight  # whether each key is that of a weight: grows
        self._expected = Expectations(size)
        self._groups: list[tuple[Group, ...]] = [()]
        self._numbers: dict[tuple[Group, ...], int] = {(): 0}
        self._pattern = np.zeros(0, np.int32)  # the number of each key's groups; -1 if they are not known yet

    def asks(self, key: Array) -> Array:
        """Whether calls with these keys have to be compared."""
        old = self._pattern
        if len(old) < len(self._weight):
            self._pattern = np.full(min(len(self._weight), MOST_KEYS), -1, np.int32)
            self._pattern[: len(old)] = old
        known = (key >= 0) & (key < len(self._pattern))
        found = np.zeros(len(key), bool)
        found[known] = self._pattern[key[known]] != 0
        return found

    def diverged(self, rows: MatchedCalls, value: Array, constant: Array) -> Iterator[tuple[int, tuple[Group, ...]]]:
        """Yield the rows in which processes diverge that were equal before, and the processes with each value."""
        constants = np.bincount(rows.of_entries(), constant, len(rows.key)) > 0
        for which, table in _tables(rows.starts, rows.process, value, self._size):
            for number, parts in self._in_table(rows.key[which], table, constants[which]):
                yield which.start + number, parts

    def _in_table(self, keys: Array, table: Array, constant: Array) -> Iterator[tuple[int, tuple[Group, ...]]]:
        self.asks(keys)
        rows = np.arange(len(keys))
        while len(rows):
            rows = rows[self._unexpected(self._pattern[keys[rows]], table, rows)]
            if not len(rows):
                return
            # One after the other for each key: each may change what is expected of the next.
            firsts = rows[starts_of(keys[rows])]
            for row in firsts.tolist():
                parts = self._judge(int(keys[row]), table[row], bool(constant[row]))
                if parts:
                    yield row, parts
            # What was as expected may no longer be: all later rows of these keys are looked at again.
            later = np.searchsorted(keys, keys[firsts], "right")
            rows = np.concatenate([np.arange(row + 1, end) for row, end in zip(firsts, later, strict=True)])

    def _unexpected(self, pattern: Array, table: Array, rows: Array) -> Array:
        """Return which rows need a closer look: processes differ, or it is not known yet which should be equal."""
        found = pattern < 0
        for number in np.unique(pattern[pattern > 0]).tolist():
            which = np.flatnonzero(pattern == number)
            for group in self._groups[number]:
                values = table[rows[which]][:, group]
                high = values.max(axis=1)
                low = np.where(values == 0, high[:, None], values).min(axis=1)
                found[which] |= low != high
        return found

    def _judge(self, key: int, values: Array, constant: bool) -> tuple[Group, ...]:
        flags = WEIGHT * int(self._weight[key]) | CONSTANT * constant
        signed = values.view(np.int64).tolist()
        tables = [[RankOperand(key, value, flags)] if value else [] for value in signed]
        new = self._pattern[key] < 0
        diverged = self._expected.judge(tables)
        groups = self._expected.of(key)
        if groups is None:
            return ()
        if groups not in self._numbers:
            self._numbers[groups] = len(self._groups)
            self._groups.append(groups)
        self._pattern[key] = self._numbers[groups]
        if not new:
            return diverged[0].ranks if diverged else ()
        there = {process: table[0] for process, table in enumerate(tables) if table}
        if len(there) > 1:
            self.agreed[key] = groups
        if self._weight[key] and len(groups) == 1 and len(there) / 2 < len(groups[0]) < len(there):
            # Equal on most ranks when it first appears: the parts of a sharded weight are equal on equally many.
            return by_value(there, there)
        return ()


class Counts:
    """Compares how many calls of each place the processes make in each step, and in which order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._members = np.zeros((0, size), bool)  # which processes have made a call of a place
        self._sets: dict[bytes, int] = {}
        self.shared: list[bool] = []  # true for each set of processes that make calls of the same places

    def uneven(self, window: Window, keys: list[Array], end: Array) -> Iterator[tuple[int, int, dict[int, int]]]:
        """Places and times, with the numbers of calls of the processes that ever make such calls."""
        most = 1 + max(int(key.max(initial=-1)) for key in keys)
        self._members = np.pad(self._members, ((0, max(most - len(self._members), 0)), (0, 0)))
        times = np.unique(np.concatenate([part.time for part in window]))
        rows = [key * len(times) + np.searchsorted(times, part.time) for part, key in zip(window, keys, strict=True)]
        codes = np.concatenate([row * self._size + process for process, row in enumerate(rows)])
        found, counts = np.unique(codes, return_counts=True)
        row, processes = np.divmod(found, self._size)
        firsts = starts_of(row)
        for which, table in _tables(np.r_[firsts, len(row)], processes, counts, self._size):
            key, at = np.divmod(row[firsts[which]], len(times))
            yield from self._in_table(key, times[at], table, end)

    def _in_table(self, key: Array, time: Array, table: Array, end: Array) -> Iterator[tuple[int, int, dict[int, int]]]:
        numbers = np.arange(len(key))[:, None]
        first = np.searchsorted(key, key, "left")[:, None]
        seen = np.maximum.accumulate(np.where(table > 0, numbers, -1), axis=0) >= first
        taking_part = (seen | self._members[key]) & (time[:, None] < end)
        high = np.where(taking_part, table, 0).max(axis=1)[:, None]
        for row in np.flatnonzero((taking_part & (table != high)).any(axis=1)).tolist():
            who = np.flatnonzero(taking_part[row]).tolist()
            yield int(key[row]), int(time[row]), {process: int(table[row, process]) for process in who}
        last = np.flatnonzero(np.r_[key[1:] != key[:-1], True][: len(key)])
        self._members[key[last]] |= seen[last]

    def sets(self, key: Array) -> Array:
        """A number for the set of processes that make calls of each place."""
        members, places = np.unique(key, return_inverse=True)
        found = [self._sets.setdefault(row.tobytes(), len(self._sets)) for row in self._members[members]]
        self.shared.extend([True] * (len(self._sets) - len(self.shared)))
        return np.array(found, np.int64)[places]

    def orders(self, window: Window, keys: list[Array], end: Array, uneven: set[int]) -> tuple[MatchedCalls, Array]:
        """A row for each step and set of processes, with a number for the order of the calls that all of them make."""
        parts = []
        for process, (part, key) in enumerate(zip(window, keys, strict=True)):
            sets = self.sets(key)
            signs = splitmix64(key ^ splitmix64(ordinals(sets, part.time) + 1))
            calls = np.argsort(sets, kind="stable")
            sets, times = sets[calls], part.time[calls]
            firsts = starts_of(sets, times)
            sums = np.add.reduceat(signs[calls], firsts) if len(firsts) else signs[:0]
            parts.append((sets[firsts], times[firsts], np.full(len(firsts), process), sums.view(np.uint64)))
        sets, times, processes, numbers = map(np.concatenate, zip(*parts, strict=True))
        kept = np.flatnonzero((times < end[processes]) & ~np.isin(times, [*uneven]))
        kept = kept[np.lexsort((processes[kept], times[kept], sets[kept]))]
        sets, times, places = sets[kept], times[kept], np.zeros(len(kept), np.int64)
        firsts = starts_of(sets, times)
        made = MatchedCalls(sets[firsts], times[firsts], np.r_[firsts, len(kept)], processes[kept], places, places)
        return made, numbers[kept] | np.uint64(1)


@dataclass(slots=True)
class Streak:
    """Consecutive outputs of one process at one place that are all far too large, or all far too small."""

    first: int | None  # the entry of the first output, until the caller has taken it
    value: float  # what that output has
    usual: float  # what the median process has there
    times: int = 0  # how many outputs there have been
    reported: int = 0  # how many have to be reported now
    note: Any = None  # the caller's


class OutlierFinder:
    """Finds processes whose outputs are outliers, by one statistic."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[int, Streak]] = {}  # by place and process, with the side

    def of(self, rows: MatchedCalls, values: Array) -> list[Streak]:
        """Streaks that begin or go on in these rows of outputs, by the statistic of each entry."""
        known = np.flatnonzero(np.isfinite(values))
        row = rows.of_entries()[known]
        logs = np.log(np.maximum(values[known], _TINY))
        middle = medians(logs, row, len(rows.key))
        apart = logs - middle[row]
        _, near = np.unique(np.stack([rows.key, rows.time // _NEAR]), axis=1, return_inverse=True)
        near = near.reshape(-1)[row]
        usual = np.maximum(np.log(FACTOR), SPREAD * medians(np.abs(apart), near, len(rows.key))[near])
        enough = np.bincount(near, minlength=1)[near] >= _SAMPLES
        enough &= (np.bincount(row, minlength=len(rows.key)) > 2)[row]
        side = np.where(enough & (np.abs(apart) > usual), np.sign(apart), 0).astype(np.int8)
        # One process at one place after the other.
        order = np.lexsort((row, rows.process[known], rows.key[row]))
        key, process, side = rows.key[row][order], rows.process[known][order], side[order]
        begins, bounds = starts_of(key, process), starts_of(key, process, side)
        ends = np.r_[bounds[1:], len(key)]
        first, last = np.isin(bounds, begins), np.isin(ends, [*begins, len(key)])
        there = set(zip(key[begins].tolist(), process[begins].tolist(), strict=True)) if self._open else set()
        before = self._open
        self._open = {own: streak for own, streak in before.items() if own not in there}
        found = []
        for place in np.flatnonzero(side[bounds]).tolist():
            start, end = int(bounds[place]), int(ends[place])
            own, on = (int(key[start]), int(process[start])), int(side[start])
            entry = order[start]
            streak = Streak(int(known[entry]), float(values[known[entry]]), float(np.exp(middle[row[entry]])))
            if own in before and before[own][0] == on and first[place]:
                streak = before[own][1]
            reporting = streak.times >= STREAK
            streak.times += end - start
            huge = bool((np.abs(apart[order[start:end]]) > np.log(HUGE)).any())
            long = streak.times >= STREAK
            streak.reported = (end - start if reporting else streak.times) if long else int(huge)
            if last[place]:
                self._open[own] = on, streak
            found.append(streak)
        return found


def medians(values: Array, group: Array, size: int) -> Array:
    """The median of each group; NaN for an empty one."""
    order = np.lexsort((values, group))
    values = values[order]
    counts = np.bincount(group, minlength=size)
    ends = np.cumsum(counts)
    found = np.full(size, np.nan)
    some = counts > 0
    starts, counts = (ends - counts)[some], counts[some]
    found[some] = (values[starts + (counts - 1) // 2] + values[starts + counts // 2]) / 2
    return found
