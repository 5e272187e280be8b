"""`opintercept show`: what recorded runs consist of, as text, JSON or CSV.

Invariant: calls are read piece by piece and not kept. Sorting keeps only keys and places in the file.
Must not import torch.
"""

from __future__ import annotations

import argparse
import csv
import glob
import heapq
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import counted, csv_cell, printable, short_name
from opintercept._values.stats import Values
from opintercept.cli.filters import NameFilter
from opintercept.cli.options import add_module_and_phase, add_op, count, steps
from opintercept.cli.show.over import BARS, COLUMNS, Series, sparkline
from opintercept.cli.show.sums import (
    LONGEST,
    MAX_GROUPS,
    Chosen,
    First,
    Groups,
    Row,
    RunSums,
    Sum,
    call_filter,
    dtype_of,
    rate,
    shape_of,
)
from opintercept.cli.terminal.output import (
    can_print,
    finite_json,
    fitted,
    listed,
    nonfinite,
    plain_warnings,
    safe_stdout,
)
from opintercept.cli.terminal.progress import progress
from opintercept.cli.terminal.style import styled
from opintercept.runs.record.compaction import open_compacted
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run, RunInfo, is_run

_KEYS = ("module", "op", "phase", "shape", "dtype", "step", "rank", "source", "run")
_SORTS = ("time", "flops", "rate", "calls", "nonfinite", "max", "min", "index", "module", "op")
_ROWS = 40  # of text, by default
_STEPS = 1000  # rows of `--over steps` in JSON and CSV, by default
_WIDTH = 60
_BATCH = 100  # rows of text that are laid out together
_READ = 4096  # calls that are read together
MAX_OPEN = 256  # files that are open at once


class _Opened(NamedTuple):
    """A run and its name in the rows."""

    name: str
    run: Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "run", nargs="+", help="folder of a run, or a pattern such as 'runs/*'; with several, rows name it"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--calls", action="store_true", help="show a row for each call, in the order the calls ended")
    what.add_argument(
        "--over", choices=["steps"], help="show figures of the chosen calls and their outputs in each step"
    )
    parser.add_argument(
        "--by",
        type=_keys,
        default=_KEYS[:3],
        metavar="KEYS",
        help=f"group calls that share these keys, out of {','.join(_KEYS)} (default module,op,phase)",
    )
    add_op(parser, "show")
    add_module_and_phase(parser, "show")
    parser.add_argument("--step", metavar="A:B", type=steps, help="show only step A, or steps A to B - 1")
    parser.add_argument("--rank", type=int, help="show only the calls of this process")
    parser.add_argument(
        "--nonfinite", action="store_true", help="show only calls with NaN or Inf in an operand or output"
    )
    parser.add_argument(
        "--sort", choices=_SORTS, help="show the largest first, or the smallest for min, index and names"
    )
    parser.add_argument(
        "--limit", metavar="N", type=_limit, default=0, help=f"number of rows, or all (default {_ROWS} in text)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, with null for numbers that are not finite")
    form.add_argument("--csv", action="store_true", help="print CSV")


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(text.split(",")))
    if unknown := [key for key in keys if key not in _KEYS]:
        raise argparse.ArgumentTypeError(f"unknown key {unknown[0]!r}; choose from {','.join(_KEYS)}")
    return keys


def _limit(text: str) -> int | None:
    return None if text == "all" else count(text)


def command(arguments: argparse.Namespace) -> int:
    """Print groups of calls, single calls, or figures over steps."""
    with plain_warnings("show"), progress():
        opened = list(_opened(arguments.run))
    runs = [run for _, run in opened]
    if arguments.rank is not None and all(arguments.rank not in run.ranks for run in runs):
        ranks = sorted({rank for run in runs for rank in run.ranks})
        raise OpInterceptError(f"--rank must be one of {listed(ranks)}, got {arguments.rank}")
    if arguments.nonfinite and all(info.tensors == "none" for run in runs for info in run.infos.values()):
        which = "this run was" if len(runs) == 1 else "these runs were"
        raise OpInterceptError(f"--nonfinite needs statistics, but {which} recorded with --tensors none")
    if arguments.over and arguments.sort:
        raise OpInterceptError("--over steps takes no --sort, since its rows are in the order of the steps")
    if arguments.limit == 0:
        arguments.limit = None if arguments.json or arguments.csv else _ROWS
        if arguments.over:
            arguments.limit = arguments.limit or _STEPS
    if arguments.calls and arguments.sort and arguments.limit is None:
        raise OpInterceptError("--calls with --sort needs a --limit, since every call might not fit into memory")
    if len(opened) > 1 and "run" not in arguments.by:
        arguments.by = ("run", *arguments.by)
    names = NameFilter(arguments.module, arguments.op, lambda name: name, short_name)
    show = _show_steps if arguments.over else _show_calls if arguments.calls else _show_groups
    with safe_stdout(), plain_warnings("show"):
        show(opened, arguments, names)
    return 0


def _opened(paths: Iterable[str]) -> Iterator[_Opened]:
    """Open the runs. Of the folders that match a pattern, those without a run are left out."""
    for path in dict.fromkeys(paths):
        try:
            yield _Opened(path, open_compacted(path))
            continue
        except OpInterceptError:
            if not glob.has_magic(path) or os.path.lexists(path):
                raise
        found = 0
        for match in sorted(filter(os.path.isdir, glob.iglob(path)), key=_natural):
            if is_run(match):
                found += 1
                yield _Opened(match, open_compacted(match))
        if not found:
            raise OpInterceptError(f"a pattern must match the folder of a run, got {path!r}")


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts `run9` before `run10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", path)]


def _ranks(run: Run, arguments: argparse.Namespace) -> tuple[int, ...]:
    return run.ranks if arguments.rank is None else tuple(rank for rank in run.ranks if rank == arguments.rank)


def _source(opened: list[_Opened]) -> str:
    """What the calls come from, for errors."""
    return _cell(opened[0].run.path, LONGEST) if len(opened) == 1 else f"these {len(opened)} runs"


def _show_groups(opened: list[_Opened], arguments: argparse.Namespace, names: NameFilter) -> None:
    found = Groups(arguments, names)
    sums = [RunSums() for _ in opened]
    with progress():
        for (name, run), own in zip(opened, sums, strict=True):
            for rank in _ranks(run, arguments):
                found.add(name, run.columns(rank), own)
            run.close()
    groups = found.groups
    names.check(_source(opened))
    chosen = sum(own.chosen.seconds for own in sums)

    def row(key: tuple[Any, ...]) -> Row:
        made = groups[key].row(zip(arguments.by, key, strict=True))
        return made | {"share": made["seconds"] / chosen if chosen > 0 else None}

    keys = _sorted(groups, row, arguments.sort or "time", arguments.limit)
    shown = map(row, keys)
    if arguments.json:
        heads = [
            {"calls": own.total.row(()), "chosen": own.chosen.row(()), "first_nonfinite": own.first.as_dict()}
            for own in sums
        ]
        _write_json(_head(opened, heads), "rows", shown)
    elif arguments.csv:
        _write_csv(shown, [*arguments.by, *Sum().row(()), "share"])
    else:
        if len(opened) == 1:
            _print_overview(opened[0].run, sums[0], arguments)
        else:
            print(_runs_table(opened, sums))
        if keys:
            print()
            values = any(info.tensors != "none" for _, run in opened for info in run.infos.values())
            print(_group_table(list(shown), arguments.by, values=values))
        if len(keys) < len(groups):
            print(f"... and {len(groups) - len(keys)} more rows; --limit all shows them")


def _print_overview(run: Run, sums: RunSums, arguments: argparse.Namespace) -> None:
    for name, text in _overview(run, sums.total, arguments):
        print(f"{name:9} {text}")
    if sums.first.call is not None:
        print(styled(f"nonfinite {_first_text(sums.first)}", "wrong"))
    if sums.chosen.calls != sums.total.calls:
        print(f"{'chosen':9} {sums.chosen}")


def _runs_table(opened: list[_Opened], sums: list[RunSums]) -> str:
    table = [["run", "started", "state", "ranks", "calls", "ms", "not finite", "first not finite"]]
    for (name, run), own in zip(opened, sums, strict=True):
        first = own.first.call
        where = "" if first is None else f"step {first.record.step}, {_name('module', first.record.module)}"
        state = "finished" if all(info.finished for info in run.infos.values()) else "not finished"
        figures = (f"{own.total.calls:,}", _number(own.total.seconds, 1e-3), f"{own.total.nonfinite:,}", where)
        table.append([_cell(name), _cell(run.info.started), state, str(len(run.ranks)), *figures])
    return fitted(table, left=3, last=["run"], spare=["started", "ranks"])


def _first_text(first: First) -> str:
    call = first.call
    assert call is not None
    record = call.record
    text = f"first in call {record.index}, step {record.step}, rank {call.rank}, {record.phase}: "
    text += f"{_name('op', record.op)} in {_name('module', record.module)}"
    text += f" at {_cell(record.source)}" if record.source is not None else ""
    sides = []
    for outputs in (True, False):
        found = ((role, nonfinite(v)) for role, v in call.values.items() if is_output(role) is outputs)
        sides.append(", ".join([f"{role} ({counts})" for role, counts in found if counts][:16]))
    text += f"; {sides[0]}" if sides[0] else ""
    if sides[1]:
        return f"{text}; already in {sides[1]}"
    known = any(not is_output(role) for role in call.values)
    return f"{text}; its operands are {'finite' if known else 'not recorded'}"


def _show_steps(opened: list[_Opened], arguments: argparse.Namespace, names: NameFilter) -> None:
    most = arguments.limit or MAX_GROUPS
    series = [Series(arguments, names, most) for _ in opened]
    with progress():
        for (_, run), own in zip(opened, series, strict=True):
            for rank in _ranks(run, arguments):
                own.add(run.columns(rank))
            run.close()
    names.check(_source(opened))
    several = len(opened) > 1
    found = [own.rows() for own in series]
    shown = (
        ({"run": name} if several else {}) | row for (name, _), rows in zip(opened, found, strict=True) for row in rows
    )
    if arguments.json:
        heads = [{"width": own.width, "modules": list(own.modules)} for own in series]
        _write_json(_head(opened, heads), "rows", shown)
    elif arguments.csv:
        _write_csv(shown, [*["run"] * several, "step", "last", *COLUMNS])
    else:
        for number, ((name, _), own, rows) in enumerate(zip(opened, series, found, strict=True)):
            if number:
                print()
            if several:
                print(f"run       {_cell(name, LONGEST)}")
            _print_series(own, rows)


def _print_series(series: Series, rows: list[Row]) -> None:
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


def _first_output(call: StoredCall) -> Values | None:
    return next((values for role, values in call.values.items() if is_output(role)), None)


def _sorted(keys: Iterable[Any], row: Callable[[Any], Row], sort: str, limit: int | None) -> list[Any]:
    """Return the first keys in the order of their rows, which are not kept; rows without a value come last."""
    by = {"time": "seconds", "rate": "flops_per_second"}.get(sort, sort)
    up = sort in ("min", "index", "module", "op")

    def place(key: Any) -> Any:
        made = row(key)
        value = made.get(by)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return True, 0
        if by == "index":
            return False, (made["step"], value)
        return False, value[:LONGEST] if isinstance(value, str) else value if up else -value

    return sorted(keys, key=place) if limit is None else heapq.nsmallest(limit, keys, key=place)


def _located(run: Run, arguments: argparse.Namespace, names: NameFilter) -> Iterator[tuple[int, int, StoredCall]]:
    """Yield rank, place and call of those that the filters admit; several processes are merged by step and index."""
    admits = call_filter(arguments, names)

    def of(rank: int) -> Iterator[tuple[int, int, StoredCall]]:
        if run.in_columns(rank):
            return _in_columns(run, rank, arguments, names)
        return ((rank, position, call) for position, call in run.located(rank) if admits(call))

    ranks = _ranks(run, arguments)
    if len(ranks) > MAX_OPEN:
        return itertools.chain.from_iterable(map(of, ranks))
    return heapq.merge(*map(of, ranks), key=lambda entry: entry[2].place)


def _in_columns(
    run: Run, rank: int, arguments: argparse.Namespace, names: NameFilter
) -> Iterator[tuple[int, int, StoredCall]]:
    columns = run.columns(rank)
    for start, _, _, rows in Chosen(columns, arguments, names).stretches(()):
        numbers = np.flatnonzero(rows) + start
        size = _BATCH  # the first calls are soon there, and the rest is read in larger pieces
        while len(numbers):
            part, numbers = numbers[:size], numbers[size:]
            for number, call in zip(part.tolist(), columns.calls_at(part), strict=True):
                yield rank, number, call
            size = _READ


def _in_order(
    opened: list[_Opened], arguments: argparse.Namespace, names: NameFilter
) -> Iterator[tuple[str, StoredCall]]:
    located = (
        ((number, rank), position, call)
        for number, (_, run) in enumerate(opened)
        for rank, position, call in _located(run, arguments, names)
    )
    if not arguments.sort:
        yield from ((opened[number].name, call) for (number, _), _, call in located)
        return
    calls: dict[tuple[tuple[int, int], int], Row] = {}  # only the current one

    def places() -> Iterator[tuple[tuple[int, int], int]]:
        for process, position, call in located:
            calls.clear()
            calls[process, position] = _call_row(call)
            yield process, position

    chosen = _sorted(places(), lambda place: calls[place], arguments.sort, arguments.limit)
    with ExitStack() as files:
        readers: dict[tuple[int, int], Callable[[int], StoredCall]] = {}
        for process, position in chosen:
            name, run = opened[process[0]]
            if process not in readers:
                if len(readers) == MAX_OPEN:
                    files.close()
                    readers.clear()
                readers[process] = files.enter_context(run.reader(process[1]))
            yield name, readers[process](position)


def _show_calls(opened: list[_Opened], arguments: argparse.Namespace, names: NameFilter) -> None:
    calls = _in_order(opened, arguments, names)
    # Wait for the first call, or the end of the run, before printing anything.
    first = next(calls, None)
    if first is None:
        names.check(_source(opened))
    calls = itertools.chain(() if first is None else (first,), calls)
    del first
    shown = itertools.islice(calls, arguments.limit)
    several = len(opened) > 1

    def rows(row: Callable[[StoredCall], Row]) -> Iterator[Row]:
        return (({"run": name} if several else {}) | row(call) for name, call in shown)

    if arguments.json:
        _write_json(_head(opened, [{} for _ in opened]), "calls", rows(_call_json))
    elif arguments.csv:
        _write_csv(rows(_call_row), [*["run"] * several, *_CALL_COLUMNS])
    else:
        ranks = any(len(run.ranks) > 1 for _, run in opened)
        made = rows(_call_row)
        while batch := list(itertools.islice(made, _BATCH)):
            print(_call_table(batch, ranks=ranks))
    more = next(calls, None) is not None
    if more and not (arguments.json or arguments.csv):
        print("... and more; --limit all shows them")
    if not more:  # the filters have seen every call
        names.check(_source(opened))


def _write_json(head: Row, name: str, rows: Iterable[Row]) -> None:
    """Print the head, then the rows one by one: there may be many."""
    print(f'{json.dumps(finite_json(head), allow_nan=False)[:-1]},\n"{name}": [', end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", end="")
        print(json.dumps(finite_json(row), allow_nan=False), end="")
    print("\n]}")


def _call_row(call: StoredCall) -> Row:
    record, output = call.record, _first_output(call)
    values = {} if output is None else output.as_dict()
    return {
        "rank": call.rank,
        "index": record.index,
        "step": record.step,
        "phase": record.phase,
        "module": record.module,
        "source": record.source,
        "op": record.op,
        "shape": shape_of(record),
        "dtype": dtype_of(record),
        "flops": record.flops,
        "bytes": record.bytes,
        "seconds": record.elapsed,
        "flops_per_second": rate(record.flops, record.elapsed),
        "forward": record.forward,
        "grad_of": record.grad_of,
        "nonfinite": sum(v.nan + v.inf for v in call.values.values()),
        "hash": values.get("hash"),
        "nan": values.get("nan"),
        "inf": values.get("inf"),
        "min": values.get("min"),
        "max": values.get("max"),
        "mean": values.get("mean"),
        "rms": values.get("rms"),
        "error": call.error,
    }


_CALL_COLUMNS = (
    "rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds",
    "flops_per_second", "forward", "grad_of", "nonfinite", "hash", "nan", "inf", "min", "max", "mean", "rms", "error",
)  # fmt: skip


def _call_json(call: StoredCall) -> Row:
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}


def _head(opened: list[_Opened], heads: list[Row]) -> Row:
    """What JSON says before the rows: of one run as it always was, of several a list."""
    if len(opened) == 1:
        return {"run": _about(opened[0].run)} | heads[0]
    return {"runs": [_about(run) | {"path": name} | head for (name, run), head in zip(opened, heads, strict=True)]}


def _about(run: Run) -> Row:
    return {"path": str(run.path), "ranks": {str(rank): info.as_dict() for rank, info in run.infos.items()}}


def _write_csv(rows: Iterable[Row], columns: Iterable[str]) -> None:
    columns = tuple(columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(csv_cell(row[name]) for name in columns)


def _overview(run: Run, total: Sum, arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    infos = list(run.infos.values())
    info = infos[0]
    unfinished = [rank for rank, info in run.infos.items() if not info.finished]
    state = "finished"
    if unfinished:
        which = f" (ranks {listed(unfinished)})" if len(infos) > 1 else ""
        state = f"not finished{which}: still running, or killed"
    world = f"; {len(infos)} of {info.world_size} ranks" if max(info.world_size, len(infos)) > 1 else ""
    yield "run", f"{_cell(run.path, 200)}: {state}{world}"
    yield "started", _cell(info.started)
    yield "command", _cell(" ".join(info.argv), 200)
    yield "versions", _pairs(info, "versions", " ")
    yield "devices", _cell(", ".join(info.devices), 200) or "the CPU"
    yield "flags", _pairs(info, "flags", "=")
    yield "tensors", info.tensors
    yield "calls", f"{total}{'' if arguments.step is None else ', of the chosen steps'}"


def _pairs(info: RunInfo, name: str, between: str) -> str:
    pairs = itertools.islice(getattr(info, name).items(), 64)
    return ", ".join(f"{_cell(key)}{between}{_cell(value)}" for key, value in pairs)


def _cell(value: Any, most: int = _WIDTH) -> str:
    return printable(str(value), most)


def _group_table(rows: list[Row], keys: tuple[str, ...], *, values: bool) -> str:
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


def _call_table(rows: list[Row], *, ranks: bool) -> str:
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
        table.append([*cells, "" if row["error"] is None else _cell(row["error"], 100)])
    return fitted(table, left=len(names), last=["run", "module"], spare=["mean", "max", "min", "dtype", "MFLOP"])


def _name(column: str, value: Any) -> str:
    if value is None:
        return "?"
    if column == "module":
        return _cell(value) or "-"
    return _cell(value.removeprefix("aten::") if column == "op" else value)


def _number(value: float | None, unit: float) -> str:
    return "?" if value is None else f"{value / unit:,.2f}"


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
