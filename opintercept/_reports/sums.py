"""`Groups` adds up the calls of runs by the keys of `--by`, and `Series` by step; `Chosen` applies the filters.

Invariant: columns are read piece by piece, and the memory of groups, of their keys and of steps is bounded.
Must not import torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept._core.text import amount, counted, duration
from opintercept._reports.filters import Choice, NameFilter
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import FIGURES, Array, Arrays, CallSignature, Columns, StoredCallSite, in_steps
from opintercept.runs.store.run import Run
from opintercept.runs.sums import (
    COUNTS,
    CallKinds,
    EarliestCall,
    GroupSums,
    first_output,
    first_outputs,
    nonfinite,
    seconds_of,
    slot_figures,
)

# A run may be made to fill the memory: beyond this many groups, or bytes of their keys, the rest share one group.
MAX_GROUPS = 100_000
MAX_KEYS_SIZE = 1 << 27
LONGEST = 200  # characters of a key

Row = dict[str, Any]


@dataclass(slots=True)
class GroupTotals:
    """Totals over calls; `flops` or `bytes` is None if no call's is known, and the range that of first outputs."""

    calls: int = 0
    flops: int | None = None
    bytes: int | None = None
    seconds: float = 0.0
    nonfinite: int = 0
    raised: int = 0
    min: float | None = None
    max: float | None = None

    def add(self, figures: Mapping[str, float]) -> None:
        """Add sums over calls."""
        self.calls += int(figures["calls"])
        self.seconds += float(figures["seconds"])
        self.nonfinite += int(figures["nonfinite"])
        self.raised += int(figures["raised"])
        if figures["counted"]:
            self.flops = (self.flops or 0) + int(figures["flops"])
        if figures["sized"]:
            self.bytes = (self.bytes or 0) + int(figures["bytes"])

    def row(self, key: Iterable[tuple[str, Any]]) -> Row:
        """The totals with the key in front."""
        return {**dict(key), **asdict(self), "flops_per_second": rate(self.flops, self.seconds)}

    def __str__(self) -> str:
        text = f"{counted(self.calls, 'call')}, {amount(self.flops or 0, 'FLOP')}, {duration(self.seconds)} in total"
        return f"{text}, {self.nonfinite:,} not finite, {self.raised:,} raised"


def rate(flops: int | None, seconds: float | None) -> float | None:
    """FLOP per second, if both are known."""
    return flops / seconds if flops and seconds and seconds > 0 else None


class FirstNonfinite:
    """The first call whose output has NaN or Inf; without one, the first call whose operands do."""

    def __init__(self, run: Run) -> None:
        self._made, self._any = EarliestCall(run.place), EarliestCall(run.place)

    @property
    def call(self) -> StoredCall | None:
        """The call; None if all are finite."""
        return self._made.call or self._any.call

    def add(self, columns: Columns, start: int, chunk: Arrays, bad: Array) -> None:
        """Add those calls of a chunk that are not finite."""
        if bad.any():
            self._any.add(columns, start, chunk, bad)
            self._made.add(columns, start, chunk, bad & nonfinite(columns, start, chunk, outputs=True))

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


def key_of(record: CallRecord, rank: int, process: str, name: str) -> Any:
    """The value of a key of `--by`."""
    if name in ("rank", "process"):
        return rank if name == "rank" else process[:LONGEST]
    value = getattr(record, name)
    return value[:LONGEST] if isinstance(value, str) else value


class Chosen:
    """Applies the options to the calls of a process, in columns.

    `learn` returns numbers for a call site, a signature, and whether the options admit their calls.
    """

    def __init__(
        self,
        columns: Columns,
        choice: Choice,
        names: NameFilter,
        learn: Callable[[StoredCallSite, CallSignature, bool], Sequence[float]] = lambda *_: (),
    ) -> None:
        def learn_all(call_site: StoredCallSite, signature: CallSignature) -> list[float]:
            admitted = names(signature.record_at(call_site))
            return [admitted, *learn(call_site, signature, admitted)]

        self._columns, self._choice = columns, choice
        self._kinds = CallKinds(columns, learn_all)

    def of(self, chunk: Arrays) -> tuple[Array, list[Array]]:
        """Which calls of a chunk are admitted, whether they are finite or not; and the numbers that `learn` returns."""
        admitted, *learned = self._kinds.of(chunk)
        return (admitted > 0) & in_steps(chunk["step"], self._choice.steps), learned

    def stretches(self, names: Sequence[str]) -> Iterator[tuple[int, Arrays, list[Array], Array]]:
        """Yield stretches of calls that begin and end with an admitted one, reading only call sites for the others.

        Each is the number of its first call, columns, the numbers that `learn` returns, and which calls are admitted.
        """
        names = tuple({*names, *(("has_more", *COUNTS) if self._choice.nonfinite else ())})
        for start, places in self._columns.chunks(("site", "look", "step"), steps=self._choice.steps):
            rows, learned = self.of(places)
            found = np.flatnonzero(rows)
            if not len(found):
                continue
            part = slice(int(found[0]), int(found[-1]) + 1)
            first = start + part.start
            chunk = self._columns.read(names, first, start + part.stop) | {"step": places["step"][part]}
            rows = rows[part]
            if self._choice.nonfinite:
                rows = rows & nonfinite(self._columns, first, chunk)
            yield first, chunk, [numbers[part] for numbers in learned], rows


_SUMMED = ("index", "step", "site", "look", "elapsed", "has_error", "has_more", *COUNTS)
_SUMMED += ("output_min", "output_max", "output1_min", "output1_max")


class RunSums:
    """The totals of one run."""

    def __init__(self, run: Run) -> None:
        self.total = GroupTotals()  # of the steps and the process that are asked for
        self.chosen = GroupTotals()  # of those calls that the other options admit, too
        self.first = FirstNonfinite(run)  # of `total`


class Groups:
    """Adds up the calls of runs by the keys."""

    def __init__(self, choice: Choice, names: NameFilter) -> None:
        self._choice, self._names = choice, names
        others = tuple(None if key in ("step", "rank", "process", "run") else "(others)" for key in choice.by)
        self._codes: dict[tuple[Any, ...], int] = {others: 0}  # of keys, without the step
        self._size = 0
        self._sums = GroupSums()  # by code and step
        self._seen = 0

    def add(self, run: str, process: str, columns: Columns, sums: RunSums) -> None:
        """Add the calls of a process of a run."""

        def learn(call_site: StoredCallSite, signature: CallSignature, admitted: bool) -> list[float]:
            record = signature.record_at(call_site)
            code = self._code(run, columns.rank, process, record) if admitted else 0
            work = [math.nan if each is None else each for each in (record.flops, record.bytes)]
            return [code, *work, first_output(signature)[1]]

        chosen = Chosen(columns, self._choice, self._names, learn)
        for start, chunk in columns.chunks(_SUMMED, steps=self._choice.steps):
            rows, (codes, flops, size, is_second) = chosen.of(chunk)
            of_steps = in_steps(chunk["step"], self._choice.steps)
            bad = nonfinite(columns, start, chunk)
            sums.first.add(columns, start, chunk, bad & of_steps)
            if self._choice.nonfinite:
                rows &= bad
            summed = {
                "calls": np.ones(len(rows)),
                "flops": np.nan_to_num(flops),
                "counted": ~np.isnan(flops),
                "bytes": np.nan_to_num(size),
                "sized": ~np.isnan(size),
                "seconds": seconds_of(chunk),
                "nonfinite": bad,
                "raised": chunk["has_error"],
            }
            for total, which in ((sums.total, of_steps), (sums.chosen, rows)):
                total.add({name: column[which].sum() for name, column in summed.items()})
            outputs = first_outputs(chunk, is_second > 0)
            figures = summed | {name: outputs[name] for name in ("output_min", "output_max")}
            figures["place_first"] = np.arange(len(rows)) + (self._seen + start)
            steps = chunk["step"] if "step" in self._choice.by else np.zeros(len(rows), np.int64)
            keys = [codes[rows].astype(np.int64), steps[rows]]
            self._sums.add(keys, {name: column[rows] for name, column in figures.items()})
            self._join_others()
        self._seen += len(columns)

    def _code(self, run: str, rank: int, process: str, record: CallRecord) -> int:
        given = {"run": run, "step": None}
        key = tuple(given[name] if name in given else key_of(record, rank, process, name) for name in self._choice.by)
        if key not in self._codes:
            self._size += sum(map(sys.getsizeof, key))
            if len(self._codes) > MAX_GROUPS or self._size >= MAX_KEYS_SIZE:
                return 0
        return self._codes.setdefault(key, len(self._codes))

    def _join_others(self) -> None:
        """Let groups beyond the limit share one: those whose first calls came last."""
        if len(self._sums) > MAX_GROUPS:
            codes, steps = self._sums.keys
            late = np.argsort(self._sums.figures["place_first"])[MAX_GROUPS:]
            codes[late], steps[late] = 0, -1
            self._sums.regroup(codes, steps)

    @property
    def groups(self) -> dict[tuple[Any, ...], GroupTotals]:
        """The totals by the values of the keys, in the order of the first calls."""
        if not len(self._sums):
            return {}
        found, keys = {}, list(self._codes)
        codes, steps = (column.tolist() for column in self._sums.keys)
        columns = {name: column.tolist() for name, column in self._sums.figures.items()}
        for place in np.argsort(self._sums.figures["place_first"]).tolist():
            step = steps[place] if steps[place] >= 0 else None
            parts = zip(self._choice.by, keys[codes[place]], strict=True)
            figures = {name: column[place] for name, column in columns.items()}
            low, high = figures["output_min"], figures["output_max"]
            group = GroupTotals(min=None if math.isnan(low) else low, max=None if math.isnan(high) else high)
            group.add(figures)
            found[tuple(step if name == "step" else part for name, part in parts)] = group
        return found


_BY_STEP = ("elapsed", "has_more", *COUNTS, *(f"{slot}_{name}" for slot in ("output", "output1") for name in FIGURES))


class Series:
    """Figures by step of the calls that the options admit, over the finite values of their first outputs."""

    def __init__(self, choice: Choice, names: NameFilter, most: int) -> None:
        self.width = 1  # steps of a row; there are `most` rows at most
        self.modules: dict[str | None, None] = {}  # their names
        self._choice, self._names, self._most = choice, names, most
        self._sums = GroupSums()  # by step, in units of `width`

    def add(self, columns: Columns) -> None:
        """Add the calls of a process."""
        modules: list[str | None] = []

        def learn(call_site: StoredCallSite, signature: CallSignature, _: bool) -> list[float]:
            modules.append(call_site.module)
            return [len(modules) - 1, *first_output(signature)]

        chosen = Chosen(columns, self._choice, self._names, learn)
        for start, chunk, (module, counts, is_second), rows in chosen.stretches(_BY_STEP):
            self.modules |= dict.fromkeys(modules[number] for number in np.unique(module[rows]).astype(int).tolist())
            figures = slot_figures(first_outputs(chunk, is_second > 0), "output", counts)
            figures["calls"] = np.ones(len(rows))
            figures["seconds"] = seconds_of(chunk)
            figures["nonfinite"] = nonfinite(columns, start, chunk)
            steps = chunk["step"] // self.width
            self._sums.add([steps[rows]], {name: column[rows] for name, column in figures.items()})
            while len(self._sums) > self._most:
                self.width *= 2
                self._sums.regroup(self._sums.keys[0] // 2)

    def rows(self) -> list[Row]:
        """A row for the steps from `step` to `last`, in order."""
        if not len(self._sums):
            return []
        figures, values = self._sums.figures, self._sums.statistics("output")
        columns = {
            "step": self._sums.keys[0] * self.width,
            "last": (self._sums.keys[0] + 1) * self.width - 1,
            "calls": figures["calls"].astype(int),
            "seconds": figures["seconds"],
            **{name: values[name] for name in FIGURES},
            "nonfinite": figures["nonfinite"].astype(int),
        }
        lists = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            {name: None if value != value else value for name, value in zip(columns, row, strict=True)} for row in lists
        ]
