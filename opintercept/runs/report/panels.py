"""The panels of a report on one run: totals, a map of modules over steps, a table of matmuls, histograms of outputs.

Invariant: each panel adds up groups of calls. Its size is bounded however long the run is, and it counts what it leaves
out. Needs numpy. Must not import torch, except to read tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.text import printable
from opintercept.runs.compare.pairs import PHASES
from opintercept.runs.program.words import module_text
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import FIGURES, Array, Arrays, CallSignature, Columns, StoredCallSite
from opintercept.runs.store.run import Run
from opintercept.runs.sums import CallKinds, EarliestCall, GroupSums, seconds_of, slot_figures, starts_of

if TYPE_CHECKING:
    import torch

MODULES = 400  # rows of the map
COLUMNS = 200  # of the map; steps are merged two by two until it fits
CELLS = 24_000  # of the maps of a page
MATMULS = 1000  # rows of the table
MATMULS_ADDED_UP = 10_000  # rows that are told apart before the table is cut
NAME = 200  # characters of a name
NAMED = 16  # operands, arguments and processes that a sentence names
ROWS = 20  # of a table of a result
HISTOGRAMS = 120  # modules and phases whose tensors are read
SPOTS = 8  # histograms over the steps, and one at the end
SAMPLES = 8  # samples that make one histogram
TENSOR = 1 << 26  # bytes of a tensor that is read
TENSORS = 1 << 30  # bytes of all tensors that are read
BINS = 60
ROLES = ("output", "lhs", "rhs", "bias")
_READ: tuple[str, ...] = ("index", "step", "site", "look", "elapsed", "has_error", "has_tensors")
_READ += tuple(f"{role}_{name}" for role in ROLES for name in ("nan", "inf", *FIGURES))


def panels_of(run: Run, cells: int = CELLS) -> tuple[dict[str, Any], HeatMap]:
    """The panels of a run as plain data, and its map, which has so many cells at most."""
    info = run.info
    heat = HeatMap(cells, replayable=info.tensors == "full")
    earliest, matmuls, histograms = EarliestCall(run.place), MatmulTable(), Histograms()
    for rank in run.ranks:
        _add_up(run.columns(rank), earliest, heat, matmuls, histograms)
    path = str(run.path)
    shown = {
        "path": shown_text(path, 4 * NAME),
        "exact": shown_text(path, 4 * NAME) == path,
        "ranks": len(run.ranks),
        "about": [part_of(part) for part in run.parts()],
        "totals": {
            **matmuls.totals(),
            "modules": len(heat.modules),
            "more_modules": heat.left_out > 0,
            "first": None if earliest.call is None else _first(earliest.call, heat),
        },
        "heat": heat.as_dict(),
        "gemms": matmuls.as_dict(),
        "histograms": histograms.as_dict(run),
    }
    return shown, heat


def _add_up(
    columns: Columns, earliest: EarliestCall, heat: HeatMap, matmuls: MatmulTable, histograms: Histograms
) -> None:
    """Add the calls of a process to the panels, group by group: call by call takes a hundred times as long."""

    def learn(call_site: StoredCallSite, signature: CallSignature) -> list[float]:
        record = signature.record_at(call_site)
        work = [math.nan if each is None else each for each in (record.flops, record.bytes)]
        counts = [signature.roles[role][0] if role in signature.slots else -1 for role in ROLES]
        return [heat.spot(call_site), matmuls.row(record), *work, *counts]

    kinds = CallKinds(columns, learn)
    for start, chunk in columns.chunks(_READ):
        spot, row, flops, size, *counts = kinds.of(chunk)
        work = {"calls": np.ones(len(spot)), "flops": np.nan_to_num(flops), "seconds": seconds_of(chunk)}
        bad = (chunk["output_nan"] > 0) | (chunk["output_inf"] > 0)
        earliest.add(columns, start, chunk, bad)
        unknown = {"no_flops": np.isnan(flops), "no_bytes": np.isnan(size)}
        counted = {"errors": chunk["has_error"], "nonfinite": bad, "step_min": chunk["step"], "step_max": chunk["step"]}
        matmuls.add(row, work | {"bytes": np.nan_to_num(size)} | unknown | counted)
        heat.add(columns.rank, spot, chunk, work, dict(zip(ROLES, counts, strict=True)))
        kept = np.flatnonzero(chunk["has_tensors"])
        histograms.add(columns.rank, kept + start, spot[kept], chunk["step"][kept])


def shown_text(text: str, most: int = NAME) -> str:
    """A text of the run as the page shows it."""
    return printable(text, most)


def part_of(part: Part) -> Any:
    """A line of a result with its mark, or a table, as plain data."""
    if not isinstance(part, Cells):
        return [shown_text(part, 16 * NAME), part.mark if isinstance(part, Marked) else ""]
    more = len(part.rows) - ROWS
    notes = [f"... and {more:,} more"] if more > 0 else [*part.notes]
    return {"head": part.head, "rows": part.rows[:ROWS], "left": part.left, "notes": notes}


def _ends(text: str) -> str:
    """The parts of a long name that `shown_text` may show."""
    return text if len(text) <= 2 * NAME else f"{text[:NAME]}{text[-NAME:]}"


def module_label(name: str | None) -> str:
    """A module's name as the page shows it."""
    return shown_text(name) if name else module_text(name)


def rounded(value: float | None) -> float | None:
    """Four digits, as many as a picture shows; None for a value that JSON lacks."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def _first(call: StoredCall, heat: HeatMap) -> dict[str, Any]:
    """The first call whose output is not finite."""
    record, output = call.record, call.values["output"]
    operands = {role: values for role, values in call.values.items() if not is_output(role)}
    return {
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
        "from": [role for role, values in operands.items() if not values.finite][:NAMED] if operands else None,
        "row": heat.modules.get(record.module),
    }


class HeatMap:
    """Modules, in the order of their first calls, over steps. A column has as many steps as it takes to fit.

    There are `most` cells at most, which name a call of theirs if the run is `replayable`.
    """

    def __init__(self, most: int = CELLS, *, replayable: bool = False) -> None:
        self._most, self._replayable = most, replayable
        self.modules: dict[str | None, int] = {}  # their rows
        self.left_out = 0  # calls of modules that the map has no room for
        self.width = 1  # steps of a column
        self._cells = GroupSums()  # by `spot` and column

    def spot(self, call_site: StoredCallSite) -> int:
        """The row of a module and the number of a phase as one number; -1 if there is no room for the module."""
        if call_site.module not in self.modules and len(self.modules) == MODULES:
            return -1
        row = self.modules.setdefault(call_site.module, len(self.modules))
        return row * len(PHASES) + PHASES.index(call_site.phase)

    def add(self, rank: int, spot: Array, chunk: Arrays, work: Arrays, counts: dict[str, Array]) -> None:
        """Add a chunk of calls; `counts` says by role how many values each tensor has, negative if there is none."""
        figures = work | {"rank_first": np.full(len(spot), rank), "index_first": chunk["index"]}
        for role, count in counts.items():
            if (count >= 0).any():
                figures |= slot_figures(chunk, role, count)
        known = spot >= 0
        self.left_out += len(spot) - int(known.sum())
        keys = spot.astype(np.int64), chunk["step"] // self.width
        self._cells.add([key[known] for key in keys], {name: each[known] for name, each in figures.items()})
        while (used := len(self.columns)) > COLUMNS or (len(self._cells) > self._most and used > 1):
            self.width *= 2
            spots, places = self._cells.keys
            self._cells.regroup(spots, places // 2)

    @property
    def columns(self) -> Array:
        """The columns that have calls, in order."""
        return np.unique(self._cells.keys[1]) if len(self._cells) else np.empty(0, np.int64)

    def table(self, name: str) -> Array:
        """A figure of all cells, `"calls"`, or a statistic, `"lhs_rms"`, by `spot` and column; NaN where it lacks."""
        made = np.full((len(self.modules) * len(PHASES), len(self.columns)), np.nan)
        role, _, figure = name.rpartition("_")
        known = self._cells.figures if not role else {}
        if f"{role}_calls" in self._cells.figures:
            known = self._cells.statistics(role)
        if figure in known:
            made[self._cells.keys[0], np.searchsorted(self.columns, self._cells.keys[1])] = known[figure]
        return made

    def as_dict(self) -> dict[str, Any]:
        """The map as lists of columns, which compress better than rows."""
        figures = self._cells.figures
        roles = [role for role in ROLES if f"{role}_calls" in figures]
        names = [module_label(name) for name in self.modules]
        return {
            "modules": names,
            "exact": [label == name for label, name in zip(names, self.modules, strict=True)],
            "steps": (self.columns * self.width).tolist(),
            "width": self.width,
            "roles": roles,
            "phases": dict(self._phases(roles)),
            "left_out": self.left_out,
        }

    def _phases(self, roles: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        if not len(self._cells):
            return
        (spots, places), figures = self._cells.keys, self._cells.figures
        rows, phases = np.divmod(spots, len(PHASES))
        places = np.searchsorted(self.columns, places)
        statistics = {role: self._cells.statistics(role) for role in roles}
        for number, phase in enumerate(PHASES):
            of = phases == number
            if not of.any():
                continue
            lists: dict[str, Any] = {"row": rows[of].tolist(), "column": places[of].tolist()}
            lists |= {name: _whole(figures[name][of]) for name in ("calls", "flops")}
            lists["seconds"] = _rounded(figures["seconds"][of])
            if self._replayable:
                lists |= {name: figures[f"{name}_first"][of].tolist() for name in ("rank", "index")}
            for role, columns in statistics.items():
                known = figures[f"{role}_calls"][of] > 0
                shown = {name: (_rounded if name in FIGURES else _whole)(each[of]) for name, each in columns.items()}
                lists[role] = {
                    name: [value if here else None for value, here in zip(values, known.tolist(), strict=True)]
                    for name, values in shown.items()
                }
            yield phase, lists


def _whole(column: Array) -> list[int]:
    return [int(value) for value in column.tolist()]


def _rounded(column: Array) -> list[float | None]:
    return [rounded(value) for value in column.tolist()]


class MatmulTable:
    """Calls, work and time by operator, phase, group of modules, shape, dtype and kind of device."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, ...], int] = {}
        self._modules: dict[int, str] = {}  # of rows: their only module, or `*` for the numbers in which several differ
        self._sums = GroupSums()  # by row; -1 for those that were not told apart

    def row(self, record: CallRecord) -> int:
        """The number of the row of a call."""
        module = "\0" if record.module is None else record.module
        pattern = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", module)
        device = "" if record.main is None else record.main.device.partition(":")[0]
        names = (record.op.removeprefix("aten::"), record.phase, pattern, record.shape, record.dtype, device)
        key = tuple(map(_ends, names))
        if key not in self._rows and len(self._rows) == MATMULS_ADDED_UP:
            return -1
        row = self._rows.setdefault(key, len(self._rows))
        short = module if len(module) <= 2 * NAME else key[2]
        known = self._modules.setdefault(row, short)
        if known != short:  # names with one pattern have as many parts
            parts = zip(known.split("."), short.split("."), strict=True)
            self._modules[row] = ".".join(one if one == other else "*" for one, other in parts)
        return row

    def add(self, rows: Array, work: Arrays) -> None:
        """Add the work of calls to rows."""
        self._sums.add([rows.astype(np.int64)], work)

    def totals(self) -> dict[str, Any]:
        """What all calls add up to."""
        figures = self._sums.figures
        sums = {name: float(figures[name].sum()) if figures else 0.0 for name in _TOTALS}
        steps = [int(figures["step_min"].min()), int(figures["step_max"].max())] if figures else [0, 0]
        return {name: value if name == "seconds" else int(value) for name, value in sums.items()} | {"steps": steps}

    def as_dict(self) -> dict[str, Any]:
        """The rows that take most time, and what the others add up to."""
        if not len(self._sums):
            return {"rows": [], "rest": None}
        (rows,), figures = self._sums.keys, self._sums.figures
        flops = np.where(figures["no_flops"] > 0, 0.0, figures["flops"])
        order = np.lexsort((rows, -flops, -figures["seconds"], rows < 0))
        shown = order[: min(MATMULS, int((rows >= 0).sum()))]
        keys = list(self._rows)
        rest = {name: column[order[len(shown) :]].sum() for name, column in figures.items()}
        return {
            "rows": [
                [
                    *self._names(keys[row], self._modules[row]),
                    *_work({name: each[place] for name, each in figures.items()}),
                ]
                for place, row in zip(shown.tolist(), rows[shown].tolist(), strict=True)
            ],
            "rest": _work(rest) if rest["calls"] else None,
        }

    @staticmethod
    def _names(key: tuple[str, ...], module: str) -> Iterator[str]:
        op, phase, _, shape, dtype, device = key
        yield shown_text(op)
        yield phase
        yield module_label(None if module == "\0" else module)
        yield from map(shown_text, (shape, dtype, device))


_TOTALS = ("calls", "flops", "seconds", "errors", "nonfinite")


def _work(figures: dict[str, float]) -> list[Any]:
    flops, size = (None if figures[f"no_{name}"] else int(figures[name]) for name in ("flops", "bytes"))
    return [int(figures["calls"]), flops, size, rounded(figures["seconds"])]


def spread(steps: Array, size: int) -> list[slice]:
    """Which calls of one module and pass make a histogram each: some of them, evenly over the steps, and the last ones.

    So many (`size`) make one histogram, which begins with a step.
    """
    begins = starts_of(steps).tolist()
    groups, end = [], 0
    for start in begins:
        if start >= end:
            end = min(start + size, len(steps))
            groups.append(slice(start, end))
    while len(groups) > SPOTS:
        groups = groups[::2]
    rest = max(len(steps) - size, groups[-1].stop)
    return [*groups, slice(rest, len(steps))] if steps[-1] > steps[groups[-1].stop - 1] else groups


class Histograms:
    """Recorded outputs of each module in each phase, over the steps."""

    def __init__(self) -> None:
        self._calls = [np.empty((4, 0), np.int64)]  # `HeatMap.spot`, step, rank and number

    def add(self, rank: int, numbers: Array, spot: Array, step: Array) -> None:
        """Add calls with recorded tensors."""
        known = spot >= 0
        columns = spot.astype(np.int64), step, np.full(len(spot), rank), numbers
        self._calls.append(np.stack(columns)[:, known])

    def as_dict(self, run: Run) -> dict[str, Any]:
        """The histograms as plain data; of the modules and passes that come first, if there are many."""
        calls = np.hstack(self._calls)
        spots, firsts = np.unique(calls[0], return_index=True)
        left, shown, unread = TENSORS, [], 0
        sampled = run.info.tensors == "sample"
        for spot in spots[np.argsort(firsts)][:HISTOGRAMS].tolist():
            own = calls[1:, calls[0] == spot]
            # Of several processes, the first one is shown.
            steps, ranks, numbers = own[:, own[0] >= np.maximum.accumulate(own[0])]
            drawn, read = [], []
            for group in spread(steps, SAMPLES if sampled else 1):  # a sample is too small for a histogram of its own
                tensors = []
                for rank, number in zip(ranks[group].tolist(), numbers[group].tolist(), strict=True):
                    try:
                        tensor = run.tensor(run.at(rank, number), "output", min(left, TENSOR))
                    except OpInterceptError:
                        unread += 1
                        continue
                    if tensor is not None:
                        left -= tensor.nbytes
                        tensors.append(tensor)
                if tensors:
                    between = [int(steps[group].min()), int(steps[group].max())]
                    drawn.append({"steps": between, "calls": len(tensors)})
                    read.append(tensors)
            if drawn:
                edges, histograms = histograms_of(read)
                row, phase = divmod(spot, len(PHASES))
                drawn = [one | histogram for one, histogram in zip(drawn, histograms, strict=True)]
                shown.append({"module": row, "phase": PHASES[phase], "edges": edges, "drawn": drawn})
        left_out = max(len(spots) - HISTOGRAMS, 0)
        return {"shown": shown, "unread": unread, "left_out": left_out, "sampled": sampled}


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
