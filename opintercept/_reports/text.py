"""The text of `opintercept show`: the overview of a run, and its tables. Must not import torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.text import counted, listed, number, printable, rate_text, work_text
from opintercept._reports.calls import OpenedRun
from opintercept._reports.sums import LONGEST, Row, RunSums, Series
from opintercept.runs.program.words import nonfinite
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

_WIDTH = 60
BARS = "▁▂▃▄▅▆▇█"


def source_text(opened: list[OpenedRun]) -> str:
    """What the calls come from, for errors."""
    return cell_text(opened[0].run.path, LONGEST) if len(opened) == 1 else f"these {len(opened)} runs"


def overview(run: Run, sums: RunSums, of_steps: bool) -> Iterator[Part]:
    """Say what a run is and what its calls add up to; `of_steps` if only those of some steps do."""
    yield from run.parts()
    yield f"calls     {sums.total}{', of the chosen steps' if of_steps else ''}"
    if sums.first.call is not None:
        yield Marked(f"nonfinite {_first_text(run, sums.first.call)}", "wrong")
    if sums.chosen.calls != sums.total.calls:
        yield f"chosen    {sums.chosen}"


def runs_table(opened: list[OpenedRun], sums: list[RunSums]) -> Cells:
    """Lay out a row for each of several runs."""
    rows = []
    for (name, run), own in zip(opened, sums, strict=True):
        first = own.first.call
        where = "" if first is None else f"step {first.record.step}, {_name('module', first.record.module)}"
        state = "finished" if all(info.finished for info in run.infos.values()) else "not finished"
        figures = (f"{own.total.calls:,}", number(own.total.seconds, 1e-3), f"{own.total.nonfinite:,}", where)
        rows.append([cell_text(name), cell_text(run.info.started), state, str(len(run.ranks)), *figures])
    head = ["run", "started", "state", "ranks", "calls", "ms", "not finite", "first not finite"]
    return Cells(head, rows, left=3, last=["run"], spare=["started", "ranks"])


_NO_NUMBERS = ("nan", "inf", "-inf")  # as a run has them among the arguments of a call


def _first_text(run: Run, call: StoredCall) -> str:
    record = call.record
    where = cell_text(run.title(call.rank))
    text = f"first in call {record.index}, step {record.step}, {where}, {record.phase}: "
    text += f"{_name('op', record.op)} in {_name('module', record.module)}"
    text += f" at {cell_text(record.source)}" if record.source is not None else ""
    sides = []
    for outputs in (True, False):
        found = ((role, nonfinite(v)) for role, v in call.values.items() if is_output(role) is outputs)
        sides.append(", ".join([f"{role} ({counts})" for role, counts in found if counts][:16]))
    text += f"; {sides[0]}" if sides[0] else ""
    numbers = [f"{cell_text(name)}={value}" for name, value in (call.arguments or {}).items() if value in _NO_NUMBERS]
    if sides[1] or numbers:
        return f"{text}; already in {', '.join([*filter(None, sides[1:]), *numbers[:16]])}"
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
            yield f"{'time' if unit > 1 else name:9} {_sparkline(values)}  {ends}"
    if rows:
        if series.width > 1:
            rows = [row | {"step": f"{row['step']}-{row['last']}"} for row in rows]
        yield from ("", _table(rows, ["step", "calls", "seconds", "min", "max", "mean", "rms", "nonfinite"], left=1))


def _sparkline(values: list[Any]) -> str:
    """Values as bars from the smallest to the largest; a blank where there is none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    span = high / 2 - low / 2  # does not overflow

    def bar(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        part = (value / 2 - low / 2) / span if span > 0 else 0.5
        return BARS[min(int(part * len(BARS)), len(BARS) - 1)]

    return "".join(map(bar, values))


def cell_text(value: Any, most: int = _WIDTH) -> str:
    """Write a value in one line that is safe for a terminal."""
    return printable(str(value), most)


def group_table(rows: list[Row], keys: tuple[str, ...], *, values: bool) -> Cells:
    """Lay out groups of calls."""
    names = [*keys, "calls", "flops", "seconds", "share", "flops_per_second"]
    names += ["nonfinite", "min", "max"] * values + ["raised"] * any(row["raised"] for row in rows)
    return _table(rows, names, len(keys), spare=["max", "min", "GFLOP/s", "MFLOP"])


def call_table(rows: list[Row], *, ranks: bool) -> Cells:
    """Lay out calls."""
    values = any(row["min"] is not None or row["nan"] for row in rows)
    process = "process" in rows[0]
    first = [*["run"] * ("run" in rows[0]), *["process"] * process, *["rank"] * (ranks and not process)]
    first += ["index", "step", "phase", "module", "op", "shape", "dtype"]
    replays = ["replayed"] * any(row["replayed"] is not None for row in rows)
    names = [*first, *replays, "flops", "seconds", *("nan", "inf", "min", "max", "mean") * values, "error"]
    return _table(rows, names, len(first), spare=["mean", "max", "min", "dtype", "MFLOP"])


def _table(rows: list[Row], names: list[str], left: int, spare: Sequence[str] = ()) -> Cells:
    columns = {name: _FORMS.get(name) or (name, partial(_name, name)) for name in names}
    cells = [
        [_OF_ROW[name](row) if name in _OF_ROW else form(row[name]) for name, (_, form) in columns.items()]
        for row in rows
    ]
    return Cells([head for head, _ in columns.values()], cells, left, last=["run", "module"], spare=spare)


def _name(column: str, value: Any) -> str:
    if value is None:
        return "?"
    if column == "module":
        return cell_text(value) or "-"
    return cell_text(value.removeprefix("aten::") if column == "op" else value)


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


# The heads of columns, and how their numbers are written; other columns are texts with their own names.
_FORMS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "flops": ("MFLOP", str),  # see `_OF_ROW`
    "seconds": ("ms", partial(number, unit=1e-3)),
    "flops_per_second": ("GFLOP/s", str),
    "share": ("share", lambda value: "" if value is None else f"{value:.1%}"),
    "nonfinite": ("not finite", _count),
    "replayed": ("replay of", _count),
    "error": ("", lambda value: "" if value is None else cell_text(value, 100)),
    **{name: (name, _count) for name in ("calls", "raised", "nan", "inf")},
    **{name: (name, _value) for name in ("min", "max", "mean", "rms")},
}

_OF_ROW: dict[str, Callable[[Row], str]] = {
    "flops": lambda row: work_text(row["flops"], row["bytes"]),
    "flops_per_second": lambda row: rate_text(row["flops"], row["bytes"], row["seconds"]),
}
