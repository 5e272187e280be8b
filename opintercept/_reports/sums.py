"""`Groups`: adds up the calls of runs by the keys of `--by`; `Chosen` applies its filters.

Invariant: columns are read piece by piece, and the memory of groups and of their keys is bounded.
Must not import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept._core.text import amount, counted, duration
from opintercept._reports.filters import Choice, NameFilter
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import Array, Arrays, Columns
from opintercept.runs.sums import COUNTS, CallKinds, Grouping, ends_of, first_output, joined, nonfinite

# A run may be made to fill the memory: beyond this many groups, or bytes of their keys, the rest share one group.
MAX_GROUPS = 100_000
MAX_KEYS_SIZE = 1 << 27
LONGEST = 200  # characters of a key

Row = dict[str, Any]


class GroupTotals:
    """Totals over calls."""

    __slots__ = ("calls", "counted", "flops", "max", "min", "nonfinite", "raised", "seconds")

    def __init__(self) -> None:
        self.calls = self.flops = self.nonfinite = self.raised = 0
        self.counted = False  # whether the FLOP of any call is known
        self.seconds = 0.0
        self.min: float | None = None
        self.max: float | None = None

    def add(self, calls: int, flops: int | None, seconds: float, nonfinite: int, raised: int) -> None:
        """Add calls of one signature, each of so many FLOP."""
        self.calls += calls
        if flops is not None:
            self.flops += flops * calls
            self.counted = True
        self.seconds += seconds
        self.nonfinite += nonfinite
        self.raised += raised

    def stretch(self, low: float, high: float) -> None:
        """Add the range of outputs."""
        if not math.isnan(low) and not math.isnan(high):
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)

    def row(self, key: Iterable[tuple[str, Any]]) -> Row:
        """The totals with the key in front."""
        own = {name: getattr(self, name) for name in ("calls", "flops", "seconds", "nonfinite", "raised", "min", "max")}
        own |= {} if self.counted else {"flops": None}
        return {**dict(key), **own, "flops_per_second": rate(own["flops"], self.seconds)}

    def __str__(self) -> str:
        text = f"{counted(self.calls, 'call')}, {amount(self.flops, 'FLOP')}, {duration(self.seconds)} in total"
        return f"{text}, {self.nonfinite:,} not finite, {self.raised:,} raised"


def rate(flops: int | None, seconds: float | None) -> float | None:
    """FLOP per second, if both are known."""
    return flops / seconds if flops and seconds and seconds > 0 else None


class FirstNonfinite:
    """The first call whose output has NaN or Inf; without one, the first call whose operands do."""

    def __init__(self) -> None:
        self.call: StoredCall | None = None
        self._made = False

    def add(self, call: StoredCall) -> None:
        """Add a call."""
        if finite(call):
            return
        made = any(is_output(role) and not values.finite for role, values in call.values.items())
        if self.call is None or (not made, call.place) < (not self._made, self.call.place):
            self.call, self._made = call, made

    def as_dict(self) -> Row | None:
        """The call as plain data."""
        if self.call is None:
            return None
        record = self.call.record
        row = {name: getattr(record, name) for name in ("index", "step", "phase", "module", "source", "op")}
        values = {
            role: {"nan": v.nan, "inf": v.inf, "count": v.count} for role, v in self.call.values.items() if not v.finite
        }
        return {"rank": self.call.rank, **row, "values": values}


def finite(call: StoredCall) -> bool:
    """Whether no recorded tensor of a call has NaN or Inf."""
    return all(values.finite for values in call.values.values())


def key_of(record: CallRecord, rank: int, name: str) -> Any:
    """The value of a key of `--by`."""
    if name == "rank":
        return rank
    if name == "shape":
        return shape_of(record)
    if name == "dtype":
        return dtype_of(record)
    value = getattr(record, name)
    return value[:LONGEST] if isinstance(value, str) else value


def shape_of(record: CallRecord) -> str:
    """The GEMM, or the shape of the first operand."""
    if record.gemm is not None:
        return str(record.gemm)
    return "" if record.lhs is None else str(list(record.lhs.shape))[:LONGEST]


def dtype_of(record: CallRecord) -> str:
    """The dtypes of the operands."""
    return ", ".join(dict.fromkeys(t.dtype[:50] for t in (record.lhs, record.rhs) if t is not None))


class Chosen:
    """Applies the options to the calls of a process, in columns.

    Args:
        columns: The calls.
        choice: What is asked for.
        names: Those of modules and operators.

    Attributes:
        kinds: The kinds of the calls that were looked at.
    """

    def __init__(self, columns: Columns, choice: Choice, names: NameFilter) -> None:
        self.kinds = CallKinds(columns)
        self._columns, self._choice, self._names = columns, choice, names
        self._admitted: list[bool] = []

    def kinds_of(self, chunk: Arrays) -> tuple[Array, range]:
        """The kind of each call of a chunk, and the kinds that are new in it."""
        of = self.kinds.of(chunk)
        new = range(len(self._admitted), len(self.kinds))
        for kind in new:
            call_site, signature = self.kinds[kind]
            record = signature.record_at(call_site)
            self._admitted.append(self._names(record) and self._choice.phase in (None, record.phase))
        return of, new

    def rows(self, of: Array, chunk: Arrays) -> Array:
        """Which calls of a chunk are admitted, whether they are finite or not."""
        return np.array(self._admitted, bool)[of] & self.of_steps(chunk)

    def of_steps(self, chunk: Arrays) -> Array:
        """Which calls of a chunk are of the steps that are asked for."""
        steps = self._choice.steps
        if steps is None:
            return np.ones(len(chunk["step"]), bool)
        return np.asarray((chunk["step"] >= steps.start) & (chunk["step"] < steps.stop))

    def stretches(self, names: Sequence[str]) -> Iterator[tuple[int, Arrays, Array, Array]]:
        """Yield stretches of calls that begin and end with an admitted one, reading only call sites for the others.

        Yields:
            The number of the first call, its columns of these names, the kinds, and which of the calls are admitted.
        """
        names = tuple({*names, *(("has_more", *COUNTS) if self._choice.nonfinite else ())})
        for start, places in self._columns.chunks(("site", "look", "step"), steps=self._choice.steps):
            of, _ = self.kinds_of(places)
            rows = self.rows(of, places)
            found = np.flatnonzero(rows)
            if not len(found):
                continue
            low, high = int(found[0]), int(found[-1]) + 1
            chunk = self._columns.read(names, start + low, start + high)
            rows = rows[low:high]
            if self._choice.nonfinite:
                rows = rows & nonfinite(self._columns, start + low, chunk)
            yield start + low, chunk | {"step": places["step"][low:high]}, of[low:high], rows


_SUMMED = ("index", "step", "site", "look", "elapsed", "has_error", "has_more", *COUNTS)
_SUMMED += ("output_min", "output_max", "output1_min", "output1_max")


class RunSums:
    """The totals of one run.

    Attributes:
        total: All calls of the steps and the process that are asked for.
        chosen: Those that the other options admit, too.
        first: The first of `total` that is not finite.
    """

    def __init__(self) -> None:
        self.total, self.chosen, self.first = GroupTotals(), GroupTotals(), FirstNonfinite()


class Groups:
    """Adds up the calls of runs by the keys.

    Attributes:
        groups: The sums by the values of the keys.
    """

    def __init__(self, choice: Choice, names: NameFilter) -> None:
        self.groups: dict[tuple[Any, ...], GroupTotals] = {}
        self._choice, self._names = choice, names
        self._others = tuple(None if key in ("step", "rank", "run") else "(others)" for key in choice.by)
        self._size = 0

    def add(self, run: str, columns: Columns, sums: RunSums) -> None:
        """Add the calls of a process of a run."""
        choice = self._choice
        chosen = Chosen(columns, choice, self._names)
        slots: list[str | None] = []
        keys: list[tuple[Any, ...]] = []
        for start, chunk in columns.chunks(_SUMMED, steps=choice.steps):
            of, new = chosen.kinds_of(chunk)
            for kind in new:
                call_site, signature = chosen.kinds[kind]
                record = signature.record_at(call_site)
                slots.append(first_output(signature))
                given = {"run": run, "step": None}
                keys.append(
                    tuple(given[key] if key in given else key_of(record, columns.rank, key) for key in choice.by)
                )
            in_steps = chosen.of_steps(chunk)
            bad = nonfinite(columns, start, chunk) & in_steps
            _find_first(sums.first, columns, start, chunk, bad)
            rows = chosen.rows(of, chunk)
            if choice.nonfinite:
                rows &= bad
            codes = of.astype(np.int64) * 3 + rows + in_steps
            if "step" in choice.by:  # those of calls that are not admitted do not matter
                codes = joined(codes, np.where(rows, chunk["step"], 0))
            groups = Grouping(codes)
            seconds = groups.sum(np.where(np.isnan(chunk["elapsed"]), 0.0, chunk["elapsed"])).tolist()
            added_up = zip(seconds, groups.sum(bad).tolist(), groups.sum(chunk["has_error"]).tolist(), strict=True)
            low, high = (ends.tolist() for ends in ends_of(groups, chunk, of, slots))
            for place, (first, calls, (elapsed, not_finite, raised)) in enumerate(
                zip(groups.firsts.tolist(), groups.counts.tolist(), added_up, strict=True)
            ):
                if not in_steps[first]:
                    continue
                kind = int(of[first])
                _, signature = chosen.kinds[kind]
                added = (calls, signature.record.flops, elapsed, int(not_finite), int(raised))
                sums.total.add(*added)
                if not rows[first]:
                    continue
                sums.chosen.add(*added)
                group = self._group(keys[kind], int(chunk["step"][first]))
                group.add(*added)
                group.stretch(low[place], high[place])

    def _group(self, key: tuple[Any, ...], step: int) -> GroupTotals:
        if "step" in self._choice.by:
            key = tuple(step if name == "step" else part for name, part in zip(self._choice.by, key, strict=True))
        group = self.groups.get(key)
        if group is None:
            self._size += sum(map(sys.getsizeof, key))
            key = key if len(self.groups) < MAX_GROUPS and self._size < MAX_KEYS_SIZE else self._others
            group = self.groups.setdefault(key, GroupTotals())
        return group


def _find_first(first: FirstNonfinite, columns: Columns, start: int, chunk: Arrays, bad: Array) -> None:
    if not bad.any():
        return
    rows = np.flatnonzero(bad)
    made = nonfinite(columns, start, chunk, outputs=True)[rows]
    row = rows[np.lexsort((chunk["index"][rows], chunk["step"][rows], ~made))[0]]
    (call,) = columns.calls_at(np.array([start + row]), given=False)
    first.add(call)
