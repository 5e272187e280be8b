"""The text of `opintercept show`: the overview of a run, and its tables. Must not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.text import counted, listed, printable
from opintercept.cli.show.calls import OpenedRun
from opintercept.cli.show.over import Series, sparkline
from opintercept.cli.show.sums import LONGEST, Row, RunSums
from opintercept.runs.compare.words import nonfinite
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

_WIDTH = 60


def source_text(opened: list[OpenedRun]) -> str:
    """What the calls come from, for errors."""
    return cell_text(opened[0].run.path, LONGEST) if len(opened) == 1 else f"these {len(opened)} runs"


def overview(run: Run, sums: RunSums, of_steps: bool) -> Iterator[Part]:
    """Say what a run is and what its calls add up to; `of_steps` if only those of some steps do."""
    yield from run.parts()
    yield f"calls     {sums.total}{', of the chosen steps' if of_steps else ''}"
    if sums.first.call is not None:
        yield Marked(f"nonfinite {_first_text(sums.first.call)}", "wrong")
    if sums.chosen.calls != sums.total.calls:
        yield f"chosen    {sums.chosen}"


def runs_table(opened: list[OpenedRun], sums: list[RunSums]) -> Cells:
    """Lay out a row for each of several runs."""
    rows = []
    for (name, run), own in zip(opened, sums, strict=True):
        first = own.first.call
        where = "" if first is None else f"step {first.record.step}, {_name('module', first.record.module)}"
        state = "finished" if all(info.finished for info in run.infos.values()) else "not finished"
        figures = (f"{own.total.calls:,}", _number(own.total.seconds, 1e-3), f"{own.total.nonfinite:,}", where)
        rows.append([cell_text(name), cell_text(run.info.started), state, str(len(run.ranks)), *figures])
    head = ["run", "started", "state", "ranks", "calls", "ms", "not finite", "first not finite"]
    return Cells(head, rows, left=3, last=["run"], spare=["started", "ranks"])


def _first_text(call: StoredCall) -> str:
    record = call.record
    text = f"first in call {record.index}, step {record.step}, rank {call.rank}, {record.phase}: "
    text += f"{_name('op', record.op)} in {_name('module', record.module)}"
    text += f" at {cell_text(record.source)}" if record.source is not None else ""
    sides = []
    for outputs in (True, False):
        found = ((role, nonfinite(v)) for role, v in call.values.items() if is_output(role) is outputs)
        sides.append(", ".join([f"{role} ({counts})" for role, counts in found if counts][:16]))
    text += f"; {sides[0]}" if sides[0] else ""
    if sides[1]:
        return f"{text}; already in {sides[1]}"
    known = any(not is_output(role) for role in call.values)
    return f"{text}; its operands are {'finite' if known else 'not recorded'}"


def series_parts(series: Series, rows: list[Row], bars: bool) -> Iterator[Part]:
    """The figures of the steps, with bars if stdout can show them."""
    modules = [_name("module", module) for module in itertools.islice(series.modules, 4)]
    yield f"modules   {listed(modules, 3)}" + (f" ({len(series.modules):,} in all)" if len(series.modules) > 3 else "")
    if series.width > 1:
        yield f"steps     {counted(series.width, 'step')} a row; --limit sets the number of rows"
    for name in ("seconds", "rms", "max") if bars and len(rows) > 1 else ():
        values = [row[name] for row in rows]
        if known := [value for value in values if value is not None]:
            unit = 1e3 if name == "seconds" else 1.0
            ends = f"{_value(min(known) * unit)} to {_value(max(known) * unit)}{' ms' if unit > 1 else ''}"
            yield f"{'time' if unit > 1 else name:9} {sparkline(values)}  {ends}"
    cells = []
    for row in rows:
        step = f"{row['step']}" if series.width == 1 else f"{row['step']}-{row['last']}"
        figures = [_value(row[name]) for name in ("min", "max", "mean", "rms")]
        cells.append([step, f"{row['calls']:,}", _number(row["seconds"], 1e-3), *figures, f"{row['nonfinite']:,}"])
    if rows:
        yield from ("", Cells(["step", "calls", "ms", "min", "max", "mean", "rms", "not finite"], cells, left=1))


def cell_text(value: Any, most: int = _WIDTH) -> str:
    """Write a value in one line that is safe for a terminal."""
    return printable(str(value), most)


def group_table(rows: list[Row], keys: tuple[str, ...], *, values: bool) -> Cells:
    """Lay out groups of calls."""
    raised = any(row["raised"] for row in rows)
    head = [*keys, "calls", "MFLOP", "ms", "share", "GFLOP/s"]
    head += ["not finite", "min", "max"] * values + ["raised"] * raised
    table = []
    for row in rows:
        cells = [_name(name, row[name]) for name in keys]
        cells += [f"{row['calls']:,}", _number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        cells += ["" if row["share"] is None else f"{row['share']:.1%}", _number(row["flops_per_second"], 1e9)]
        cells += [f"{row['nonfinite']:,}", _value(row["min"]), _value(row["max"])] * values
        cells += [f"{row['raised']:,}"] * raised
        table.append(cells)
    return Cells(head, table, left=len(keys), last=["run", "module"], spare=["max", "min", "GFLOP/s", "MFLOP"])


def call_table(rows: list[Row], *, ranks: bool) -> Cells:
    """Lay out calls."""
    values = any(row["min"] is not None or row["nan"] for row in rows)
    first = [*["run"] * ("run" in rows[0]), *["rank"] * ranks]
    names = [*first, "index", "step", "phase", "module", "op", "shape", "dtype"]
    head = [*names, "MFLOP", "ms", *("nan", "inf", "min", "max", "mean") * values, ""]
    table = []
    for row in rows:
        cells = [_name(name, row[name]) for name in names]
        cells += [_number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        if values:
            cells += ["" if row[name] is None else f"{row[name]:,}" for name in ("nan", "inf")]
            cells += [_value(row[name]) for name in ("min", "max", "mean")]
        table.append([*cells, "" if row["error"] is None else cell_text(row["error"], 100)])
    return Cells(head, table, left=len(names), last=["run", "module"], spare=["mean", "max", "min", "dtype", "MFLOP"])


def _name(column: str, value: Any) -> str:
    if value is None:
        return "?"
    if column == "module":
        return cell_text(value) or "-"
    return cell_text(value.removeprefix("aten::") if column == "op" else value)


def _number(value: float | None, unit: float) -> str:
    return "?" if value is None else f"{value / unit:,.2f}"


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
