"""The panels of a report on one run: totals, a map of modules over steps, a table of matmuls, histograms of outputs.

Invariant: each panel adds up groups of calls. Its size is bounded however long the run is, and it counts what it leaves
out. Needs numpy. Must not import torch, except to read tensors.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._core.text import printable
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import FIGURES, Array, CallSignature, Columns, StoredCallSite
from opintercept.runs.store.run import Run
from opintercept.runs.sums import CallKinds, Grouping, SlotStatistics, joined

if TYPE_CHECKING:
    import torch

MODULES = 400  # rows of the map
COLUMNS = 200  # of the map; steps are merged two by two until it fits
CELLS = 24_000  # of the maps of a page
MATMULS = 1000  # rows of the table
MATMULS_ADDED_UP = 10_000  # rows that are told apart before the table is cut
NAME = 200  # characters of a name
NAMED = 16  # operands, arguments and processes that a sentence names
PAIRS = 64  # versions, devices and flags
HISTOGRAMS = 120  # modules and phases whose tensors are read
SPOTS = 8  # histograms over the steps, and one at the end
SAMPLES = 8  # samples that make one histogram
TENSOR = 1 << 26  # bytes of a tensor that is read
TENSORS = 1 << 30  # bytes of all tensors that are read
BINS = 60
PHASES = ("forward", "backward", "recompute")
ROLES = ("output", "lhs", "rhs", "bias")
MOMENTS = ("count", "nan", "inf", *FIGURES)
_READ: tuple[str, ...] = ("index", "step", "site", "look", "elapsed", "has_error", "has_tensors")
_READ += tuple(f"{role}_{name}" for role in ROLES for name in ("nan", "inf", *FIGURES))


def panels_of(run: Run, cells: int = CELLS) -> tuple[dict[str, Any], HeatMap]:
    """The panels of a run as plain data, and its map, which has so many cells at most. Reads the calls twice."""
    info = run.info
    heat = HeatMap(cells, replayable=info.tensors == "full")
    for rank in run.ranks:
        heat.lay_out(run.columns(rank))
    totals, matmuls, histograms = RunTotals(), MatmulTable(), Histograms()
    for rank in run.ranks:
        _add_up(run.columns(rank), totals, heat, matmuls, histograms)
    path = str(run.path)
    shown = {
        "path": shown_text(path, 4 * NAME),
        "exact": shown_text(path, 4 * NAME) == path,
        "ranks": len(run.ranks),
        "about": {
            "command": shown_text(" ".join(info.argv), 4 * NAME),
            "started": shown_text(info.started),
            "tensors": info.tensors,
            "processes": f"{len(run.ranks)} of {info.world_size}",
            "finished": all(each.finished for each in run.infos.values()),
            "versions": _pairs(info.versions.items()),
            "devices": [shown_text(name) for name in info.devices[:PAIRS]],
            "flags": _pairs(info.flags.items()),
        },
        "totals": totals.as_dict() | {"modules": len(heat.modules), "more_modules": heat.calls_left_out > 0},
        "heat": heat.as_dict(),
        "gemms": matmuls.as_dict(),
        "histograms": histograms.as_dict(run),
    }
    if totals.first is not None:
        totals.first["row"] = heat.modules.get(totals.first_module)
    return shown, heat


def _add_up(columns: Columns, totals: RunTotals, heat: HeatMap, matmuls: MatmulTable, histograms: Histograms) -> None:
    """Add the calls of a process to the panels, group by group: call by call takes a hundred times as long."""
    kinds = CallKinds(columns)
    known: list[_KindCost] = []
    for start, chunk in columns.chunks(_READ):
        of = kinds.of(chunk)
        known += [_KindCost(*kinds[kind], heat) for kind in range(len(known), len(kinds))]
        elapsed = chunk["elapsed"]
        elapsed = np.where((elapsed >= 0) & np.isfinite(elapsed), elapsed, 0.0)
        column = chunk["step"] // heat.width
        groups = Grouping(joined(np.array([kind.spot + 1 for kind in known])[of], column))
        flops = groups.sum(np.array([kind.flops for kind in known], np.float64)[of]).tolist()
        seconds = groups.sum(elapsed).tolist()
        moments = {}
        for role in ROLES:
            counts = np.array([kind.signature.roles.get(role, (-1,))[0] for kind in known], np.float64)[of]
            if (counts >= 0).any():
                moments[role] = SlotStatistics(groups, chunk, role, counts)
        for place, (first, calls) in enumerate(zip(groups.firsts.tolist(), groups.counts.tolist(), strict=True)):
            cell = _HeatCell(calls, int(flops[place]), seconds[place], (columns.rank, int(chunk["index"][first])))
            for role, each in moments.items():
                if each.calls[place]:
                    cell.roles[role] = _CellValues.of(each, place)
            heat.add_cell(known[int(of[first])].spot, int(column[first]), cell)
        for kind, calls, time in zip(
            known,
            np.bincount(of, minlength=len(known)).tolist(),
            np.bincount(of, elapsed, len(known)).tolist(),
            strict=True,
        ):
            kind.calls += calls
            kind.seconds += time
        totals.errors += int(chunk["has_error"].sum())
        totals.stretch(int(chunk["step"].min()), int(chunk["step"].max()))
        bad = np.flatnonzero((chunk["output_nan"] > 0) | (chunk["output_inf"] > 0))
        if len(bad):
            row = bad[np.lexsort((chunk["index"][bad], chunk["step"][bad]))[0]]
            totals.nonfinite += len(bad)
            totals.add_first(next(columns.calls_at(np.array([start + row]), given=False)))
        kept = np.flatnonzero(chunk["has_tensors"]) + start
        for call in columns.calls_at(kept, given=False):
            row_of = heat.modules.get(call.record.module)
            if row_of is not None:
                histograms.add(row_of, call)
    for kind in known:
        totals.add(kind.calls, kind.flops * kind.calls, kind.seconds)
        matmuls.add(kind.signature.record_at(kind.call_site), kind.calls, kind.seconds)


class _KindCost:
    """The cost of the calls with one call site and one signature.

    Args:
        call_site: Their call site.
        signature: Their signature.
        heat: The map that shows them.
    """

    __slots__ = ("call_site", "calls", "flops", "seconds", "signature", "spot")

    def __init__(self, call_site: StoredCallSite, signature: CallSignature, heat: HeatMap) -> None:
        self.call_site, self.signature = call_site, signature
        self.spot = heat.spot(call_site)
        self.flops = signature.record.flops or 0  # of one call
        self.calls, self.seconds = 0, 0.0


def _pairs(items: Iterable[tuple[str, str]]) -> list[list[str]]:
    return [[shown_text(key), shown_text(value)] for key, value in list(items)[:PAIRS]]


def shown_text(text: str, most: int = NAME) -> str:
    """A text of the run as the page shows it."""
    return printable(text, most)


def _ends(text: str) -> str:
    """The parts of a long name that `shown_text` may show."""
    return text if len(text) <= 2 * NAME else f"{text[:NAME]}{text[-NAME:]}"


def module_label(name: str | None) -> str:
    """A module's name as the page shows it."""
    return "(not attributed)" if name is None else shown_text(name) or "(outside of modules)"


def rounded(value: float | None) -> float | None:
    """Four digits, as many as a picture shows; None for a value that JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


class RunTotals:
    """Counts over all calls, and the first output that is not finite, by step and index over all processes."""

    def __init__(self) -> None:
        self.calls = self.flops = self.errors = self.nonfinite = 0
        self.seconds = 0.0
        self.steps = (0, 0)
        self.first: dict[str, Any] | None = None
        self.first_place = (0, 0, 0)
        self.first_module: str | None = None
        self._stretched = False

    def add(self, calls: int, flops: int, seconds: float) -> None:
        self.calls += calls
        self.flops += flops
        self.seconds += seconds

    def stretch(self, first: int, last: int) -> None:
        """Add the steps of some calls."""
        known = self.steps if self._stretched else (first, last)
        self.steps = min(known[0], first), max(known[1], last)
        self._stretched = True

    def add_first(self, call: StoredCall) -> None:
        """Add a call whose output is not finite."""
        record, output = call.record, call.values["output"]
        if self.first is None or call.place < self.first_place:
            operands = {role: values for role, values in call.values.items() if not is_output(role)}
            self.first_place, self.first_module = call.place, record.module
            self.first = {
                "index": record.index,
                "rank": call.rank,
                "step": record.step,
                "op": shown_text(record.op.removeprefix("aten::")),
                "phase": record.phase,
                "module": module_label(record.module),
                "source": shown_text(record.source or ""),
                "nan": output.nan,
                "inf": output.inf,
                "count": output.count,
                "from": [role for role, v in operands.items() if not v.finite][:NAMED] if operands else None,
            }

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "flops": self.flops,
            "seconds": self.seconds,
            "errors": self.errors,
            "nonfinite": self.nonfinite,
            "steps": list(self.steps),
            "first": self.first,
        }


class _CellValues:
    """The `Values` of several tensors, combined."""

    __slots__ = ("count", "finite", "inf", "max", "min", "nan", "square", "sum")

    def __init__(self) -> None:
        self.count = self.nan = self.inf = self.finite = 0
        self.sum = self.square = 0.0
        self.min, self.max = math.inf, -math.inf

    @classmethod
    def of(cls, moments: SlotStatistics, group: int) -> _CellValues:
        """Those of a group of calls."""
        made = cls()
        made.count, made.nan, made.inf, made.finite = (
            int(sums[group]) for sums in (moments.count, moments.nan, moments.inf, moments.finite)
        )
        made.sum, made.square = float(moments.sum[group]), float(moments.square[group])
        made.min, made.max = float(moments.min[group]), float(moments.max[group])
        return made

    def merge(self, other: _CellValues) -> None:
        for name in ("count", "nan", "inf", "finite", "sum", "square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def as_list(self) -> list[Any]:
        known = self.finite > 0
        mean = self.sum / self.finite if known else None
        # In a hostile run, the mean square can be negative.
        square = self.square / self.finite if known else -1.0
        return [
            self.count,
            self.nan,
            self.inf,
            *map(rounded, (self.min, self.max, mean, math.sqrt(square) if square >= 0.0 else None)),
        ]


class _HeatCell:
    """The calls of one module, in one phase and the steps of one column."""

    __slots__ = ("call", "calls", "flops", "roles", "seconds")

    def __init__(self, calls: int, flops: int, seconds: float, call: tuple[int, int]) -> None:
        self.calls, self.flops, self.seconds = calls, flops, seconds
        self.call = call  # rank and index of one of them
        self.roles: dict[str, _CellValues] = {}

    def merge(self, other: _HeatCell) -> None:
        self.calls += other.calls
        self.flops += other.flops
        self.seconds += other.seconds
        self.call = min(self.call, other.call)
        for role, moments in other.roles.items():
            self.roles.setdefault(role, _CellValues()).merge(moments)


class HeatMap:
    """Modules, in the order of their first calls, over steps. A column has as many steps as it takes to fit.

    Attributes:
        modules: The row of each module.
        calls_left_out: How many calls belong to modules that the map has no room for.
        width: How many steps a column has.
        cells: By phase, row and column.

    Args:
        most: How many cells there may be.
        replayable: Whether cells name a call of theirs.
    """

    def __init__(self, most: int = CELLS, *, replayable: bool = False) -> None:
        self._most, self._replayable = most, replayable
        self.modules: dict[str | None, int] = {}
        self.calls_left_out = 0
        self.width = 1
        self.cells: dict[tuple[str, int, int], _HeatCell] = {}
        self._filled = np.empty((0, 2), np.int64)  # phase and row, and column of each cell that there will be

    def lay_out(self, columns: Columns) -> None:
        """Make room for the calls of a process: give the modules rows, and the columns a width."""
        rows: list[int] = []
        kinds = CallKinds(columns)
        for _, chunk in columns.chunks(("site", "look", "step")):
            of = kinds.of(chunk)
            for kind in range(len(rows), len(kinds)):
                call_site, _ = kinds[kind]
                if call_site.module not in self.modules and len(self.modules) < MODULES:
                    self.modules[call_site.module] = len(self.modules)
                rows.append(self.spot(call_site))
            self._fill(np.array(rows, np.int64)[of], chunk["step"])

    def _fill(self, rows: Array, steps: Array) -> None:
        known = rows >= 0
        rows, columns = rows[known], steps[known] // self.width
        firsts = np.unique(joined(rows, columns), return_index=True)[1]
        new = np.stack([rows[firsts], columns[firsts]], axis=1)
        self._filled = np.unique(np.concatenate([self._filled, new]), axis=0)
        while (used := len(np.unique(self._filled[:, 1]))) > COLUMNS or (len(self._filled) > self._most and used > 1):
            self.width *= 2
            self._filled[:, 1] //= 2
            self._filled = np.unique(self._filled, axis=0)

    def spot(self, call_site: StoredCallSite) -> int:
        """The row of a module and the number of a phase as one number; -1 if there is no row for the module."""
        row = self.modules.get(call_site.module)
        return -1 if row is None else row * len(PHASES) + PHASES.index(call_site.phase)

    def add_cell(self, spot: int, column: int, cell: _HeatCell) -> None:
        """Add calls of one module in one phase, and in the steps of one column."""
        if spot < 0:
            self.calls_left_out += cell.calls
            return
        row, phase = divmod(spot, len(PHASES))
        known = self.cells.setdefault((PHASES[phase], row, column), cell)
        if known is not cell:
            known.merge(cell)

    @property
    def columns(self) -> dict[int, int]:
        """The number of each column that has calls."""
        return {column: number for number, column in enumerate(sorted({key[2] for key in self.cells}))}

    def as_dict(self) -> dict[str, Any]:
        """The map as lists of columns, which compress better than rows."""
        columns = self.columns
        roles = [role for role in ROLES if any(role in cell.roles for cell in self.cells.values())]
        names = [module_label(name) for name in self.modules]
        return {
            "modules": names,
            "exact": [label == name for label, name in zip(names, self.modules, strict=True)],
            "steps": [column * self.width for column in columns],
            "width": self.width,
            "roles": roles,
            "phases": {phase: self._phase(phase, columns, roles) for phase in self._phases()},
            "left_out": self.calls_left_out,
        }

    def _phases(self) -> list[str]:
        used = {phase for phase, _, _ in self.cells}
        return [phase for phase in PHASES if phase in used]

    def _phase(self, phase: str, columns: dict[int, int], roles: list[str]) -> dict[str, Any]:
        cells = [(row, columns[column], cell) for (of, row, column), cell in self.cells.items() if of == phase]
        cells.sort(key=lambda entry: entry[:2])
        lists: dict[str, Any] = {
            "row": [row for row, _, _ in cells],
            "column": [column for _, column, _ in cells],
            "calls": [cell.calls for _, _, cell in cells],
            "flops": [cell.flops for _, _, cell in cells],
            "seconds": [rounded(cell.seconds) for _, _, cell in cells],
        }
        if self._replayable:
            lists["rank"], lists["index"] = ([cell.call[side] for _, _, cell in cells] for side in (0, 1))
        for role in roles:
            moments = [cell.roles[role].as_list() if role in cell.roles else [None] * 7 for _, _, cell in cells]
            lists[role] = dict(zip(MOMENTS, map(list, zip(*moments, strict=True)), strict=True))
        return lists


class _MatmulCost:
    """What the calls of one row of the table add up to."""

    __slots__ = ("bytes", "calls", "flops", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.flops: int | None = 0
        self.bytes: int | None = 0
        self.seconds = 0.0

    def add(self, calls: int, flops: int | None, size: int | None, seconds: float) -> None:
        self.calls += calls
        self.flops = None if flops is None or self.flops is None else self.flops + flops
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.seconds += seconds


class MatmulTable:
    """Calls, work and time by operator, phase, group of modules, shape, dtype and kind of device."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, ...], _MatmulCost] = {}
        self.rest, self.rest_rows = _MatmulCost(), 0

    def add(self, record: CallRecord, calls: int, seconds: float) -> None:
        lhs, gemm = record.lhs, record.gemm
        dtypes = gemm.dtypes if gemm is not None else () if lhs is None else (lhs.dtype,)
        module = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", record.module or "") if record.module is not None else "\0"
        shape = str(gemm) if gemm is not None else "" if lhs is None else str(list(lhs.shape))
        device = "" if lhs is None else lhs.device.partition(":")[0]
        texts = (
            record.op.removeprefix("aten::"),
            record.phase,
            module,
            shape,
            ", ".join(dict.fromkeys(dtypes)),
            device,
        )
        key = tuple(map(_ends, texts))
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) == MATMULS_ADDED_UP:
                row = self.rest
            else:
                row = self.rows[key] = _MatmulCost()
        flops, size = (None if each is None else each * calls for each in (record.flops, record.bytes))
        row.add(calls, flops, size, seconds)

    def as_dict(self) -> dict[str, Any]:
        rows = sorted(self.rows.items(), key=lambda item: (-item[1].seconds, -(item[1].flops or 0)))
        rest = _MatmulCost()
        for row in (self.rest, *(row for _, row in rows[MATMULS:])):
            rest.add(row.calls, row.flops, row.bytes, row.seconds)
        return {
            "rows": [[*self._names(key), *_work(row)] for key, row in rows[:MATMULS]],
            "rest": _work(rest) if rest.calls else None,
        }

    @staticmethod
    def _names(key: tuple[str, ...]) -> Iterator[str]:
        op, phase, module, shape, dtype, device = key
        yield shown_text(op)
        yield phase
        yield module_label(None if module == "\0" else module)
        yield from map(shown_text, (shape, dtype, device))


def _work(row: _MatmulCost) -> list[Any]:
    return [row.calls, row.flops, row.bytes, rounded(row.seconds)]


_Stored = tuple[int, int, str]  # rank, step and name of a recorded tensor


class _Spots:
    """Outputs of one module in one phase, spread evenly over the steps, and the last ones.

    Args:
        size: How many make one histogram.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: list[list[_Stored]] = []
        self._last: deque[_Stored] = deque(maxlen=size)
        self._every, self._seen, self._step = 1, 0, -1
        self._left = 0  # how many more belong to the histogram that has begun
        self._kept_now = False

    def add(self, sample: _Stored) -> None:
        step = sample[1]
        if step < self._step:  # of another process; the first one is shown
            return
        self._last.append(sample)
        later, self._step = step > self._step, step
        if self._left:
            self._left -= 1
            if self._kept_now:
                self._kept[-1].append(sample)
        elif later:
            self._kept_now, self._left = self._seen % self._every == 0, self._size - 1
            self._seen += 1
            if self._kept_now:
                self._kept.append([sample])
                if len(self._kept) > SPOTS:  # an even number, so that the last one stays
                    self._kept = self._kept[::2]
                    self._every *= 2

    def groups(self) -> list[list[_Stored]]:
        """The outputs of each histogram, in order."""
        known = set(self._kept[-1])
        rest = [sample for sample in self._last if sample not in known]
        return [*self._kept, rest] if rest and rest[-1][1] > self._kept[-1][-1][1] else self._kept


class Histograms:
    """Recorded outputs of each module in each phase, over the steps."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], _Spots] = {}
        self.left_out: set[tuple[str, int]] = set()
        self.sampled = False

    def add(self, row: int, call: StoredCall) -> None:
        name = call.tensors.get("output")
        if name is None:
            return
        key = (call.record.phase, row)
        # A sample is too small for a histogram of its own.
        sampled = name.endswith(".sample")
        self.sampled |= sampled
        if key not in self.calls:
            if len(self.calls) == HISTOGRAMS:
                self.left_out.add(key)  # bounded, as there are at most MODULES rows
                return
            self.calls[key] = _Spots(SAMPLES if sampled else 1)
        self.calls[key].add((call.rank, call.record.step, name))

    def as_dict(self, run: Run) -> dict[str, Any]:
        left, shown, unread = TENSORS, [], 0
        for (phase, row), spots in self.calls.items():
            drawn, read = [], []
            for samples in spots.groups():
                tensors = []
                for rank, _, name in samples:
                    try:
                        tensor = run.load(rank, name, min(left, TENSOR))
                    except OpInterceptError:
                        unread += 1
                    else:
                        left -= tensor.nbytes
                        tensors.append(tensor)
                if tensors:
                    steps = [step for _, step, _ in samples]
                    drawn.append({"steps": [min(steps), max(steps)], "calls": len(tensors)})
                    read.append(tensors)
            if drawn:
                edges, histograms = histograms_of(read)
                for one, histogram in zip(drawn, histograms, strict=True):
                    one |= histogram
                shown.append({"module": row, "phase": phase, "edges": edges, "drawn": drawn})
        return {"shown": shown, "unread": unread, "left_out": len(self.left_out), "sampled": self.sampled}


def histograms_of(groups: Sequence[Sequence[torch.Tensor]]) -> tuple[list[float], list[dict[str, Any]]]:
    """The first and the last edge of bins that all groups share, and for each group what falls into each bin."""
    import torch

    finite, counts = [], []
    for group in groups:
        # float64 holds the values of every other dtype. Complex numbers count by their moduli.
        values = torch.cat([(t.abs() if t.is_complex() else t).reshape(-1).double() for t in group])
        finite.append(values[values.isfinite()])
        counts.append(values.numel())
    known = torch.cat(finite)
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
    bins = min(BINS, max(10, math.isqrt(max(counts))))
    if not (low < high and math.isfinite(high - low)):
        bins = 1
    return [low, high], [
        {
            "count": count,
            "nonfinite": count - values.numel(),
            "counts": torch.histc(values, bins, low, high).long().tolist() if bins > 1 else [values.numel()],
        }
        for values, count in zip(finite, counts, strict=True)
    ]
