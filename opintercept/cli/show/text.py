"""The text of `opintercept show`: the overview of a run, and its tables. Must not import torch."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

from opintercept._core.text import counted, printable
from opintercept.cli.show.calls import OpenedRun
from opintercept.cli.show.over import BARS, Series, sparkline
from opintercept.cli.show.sums import LONGEST, FirstNonfinite, GroupTotals, Row, RunSums
from opintercept.cli.terminal.output import can_print, fitted, listed, nonfinite
from opintercept.cli.terminal.style import styled
from opintercept.runs.store.codec import is_output
from opintercept.runs.store.run import Run, RunInfo

_WIDTH = 60


def source_text(opened: list[OpenedRun]) -> str:
    """What the calls come from, for errors."""
    return cell_text(opened[0].run.path, LONGEST) if len(opened) == 1 else f"these {len(opened)} runs"


def print_overview(run: Run, sums: RunSums, arguments: argparse.Namespace) -> None:
    """Print what a run is and what its calls add up to."""
    for name, text in _overview(run, sums.total, arguments):
        print(f"{name:9} {text}")
    if sums.first.call is not None:
        print(styled(f"nonfinite {_first_text(sums.first)}", "wrong"))
    if sums.chosen.calls != sums.total.calls:
        print(f"{'chosen':9} {sums.chosen}")


def runs_table(opened: list[OpenedRun], sums: list[RunSums]) -> str:
    """Lay out a row for each of several runs."""
    table = [["run", "started", "state", "ranks", "calls", "ms", "not finite", "first not finite"]]
    for (name, run), own in zip(opened, sums, strict=True):
        first = own.first.call
        where = "" if first is None else f"step {first.record.step}, {_name('module', first.record.module)}"
        state = "finished" if all(info.finished for info in run.infos.values()) else "not finished"
        figures = (f"{own.total.calls:,}", _number(own.total.seconds, 1e-3), f"{own.total.nonfinite:,}", where)
        table.append([cell_text(name), cell_text(run.info.started), state, str(len(run.ranks)), *figures])
    return fitted(table, left=3, last=["run"], spare=["started", "ranks"])


def _first_text(first: FirstNonfinite) -> str:
    call = first.call
    assert call is not None
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


def print_series(series: Series, rows: list[Row]) -> None:
    """Print the figures of the steps, with bars where the terminal can show them."""
    modules = [_name("module", module) for module in itertools.islice(series.modules, 4)]
    print(f"modules   {listed(modules, 3)}" + (f" ({len(series.modules):,} in all)" if len(series.modules) > 3 else ""))
    if series.width > 1:
        print(f"steps     {counted(series.width, 'step')} a row; --limit sets the number of rows")
    if can_print(BARS) and len(rows) > 1:
        for name in ("seconds", "rms", "max"):
            values = [row[name] for row in rows]
            known = [value for value in values if value is not None]
            if known:
                unit = 1e3 if name == "seconds" else 1.0
                ends = f"{_value(min(known) * unit)} to {_value(max(known) * unit)}{' ms' if unit > 1 else ''}"
                print(f"{'time' if unit > 1 else name:9} {sparkline(values)}  {ends}")
    table = [["step", "calls", "ms", "min", "max", "mean", "rms", "not finite"]]
    for row in rows:
        step = f"{row['step']}" if series.width == 1 else f"{row['step']}-{row['last']}"
        cells = [step, f"{row['calls']:,}", _number(row["seconds"], 1e-3)]
        table.append([*cells, *(_value(row[name]) for name in ("min", "max", "mean", "rms")), f"{row['nonfinite']:,}"])
    if rows:
        print(f"\n{fitted(table, left=1)}")


def _overview(run: Run, total: GroupTotals, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    infos = list(run.infos.values())
    info = infos[0]
    unfinished = [rank for rank, info in run.infos.items() if not info.finished]
    state = "finished"
    if unfinished:
        which = f" (ranks {listed(unfinished)})" if len(infos) > 1 else ""
        state = f"not finished{which}: still running, or killed"
    world = f"; {len(infos)} of {info.world_size} ranks" if max(info.world_size, len(infos)) > 1 else ""
    yield "run", f"{cell_text(run.path, 200)}: {state}{world}"
    yield "started", cell_text(info.started)
    yield "command", cell_text(" ".join(info.argv), 200)
    yield "versions", _pairs(info, "versions", " ")
    yield "devices", cell_text(", ".join(info.devices), 200) or "the CPU"
    yield "flags", _pairs(info, "flags", "=")
    yield "tensors", info.tensors
    yield "calls", f"{total}{'' if arguments.step is None else ', of the chosen steps'}"


def _pairs(info: RunInfo, name: str, between: str) -> str:
    pairs = itertools.islice(getattr(info, name).items(), 64)
    return ", ".join(f"{cell_text(key)}{between}{cell_text(value)}" for key, value in pairs)


def cell_text(value: Any, most: int = _WIDTH) -> str:
    """Write a value in one line that is safe for a terminal."""
    return printable(str(value), most)


def group_table(rows: list[Row], keys: tuple[str, ...], *, values: bool) -> str:
    """Lay out groups of calls."""
    raised = any(row["raised"] for row in rows)
    head = [*keys, "calls", "MFLOP", "ms", "share", "GFLOP/s"]
    head += ["not finite", "min", "max"] * values + ["raised"] * raised
    table = [head]
    for row in rows:
        cells = [_name(name, row[name]) for name in keys]
        cells += [f"{row['calls']:,}", _number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        cells += ["" if row["share"] is None else f"{row['share']:.1%}", _number(row["flops_per_second"], 1e9)]
        cells += [f"{row['nonfinite']:,}", _value(row["min"]), _value(row["max"])] * values
        cells += [f"{row['raised']:,}"] * raised
        table.append(cells)
    return fitted(table, left=len(keys), last=["run", "module"], spare=["max", "min", "GFLOP/s", "MFLOP"])


def call_table(rows: list[Row], *, ranks: bool) -> str:
    """Lay out calls."""
    values = any(row["min"] is not None or row["nan"] for row in rows)
    names = (
        *["run"] * ("run" in rows[0]),
        *["rank"] * ranks,
        "index",
        "step",
        "phase",
        "module",
        "op",
        "shape",
        "dtype",
    )
    table = [[*names, "MFLOP", "ms", *("nan", "inf", "min", "max", "mean") * values, ""]]
    for row in rows:
        cells = [_name(name, row[name]) for name in names]
        cells += [_number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        if values:
            cells += ["" if row[name] is None else f"{row[name]:,}" for name in ("nan", "inf")]
            cells += [_value(row[name]) for name in ("min", "max", "mean")]
        table.append([*cells, "" if row["error"] is None else cell_text(row["error"], 100)])
    return fitted(table, left=len(names), last=["run", "module"], spare=["mean", "max", "min", "dtype", "MFLOP"])


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
