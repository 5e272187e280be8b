"""`opintercept show`: prints what recorded runs consist of, as text, JSON or CSV. Must not import torch."""

from __future__ import annotations

import argparse
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import short_name
from opintercept.cli.filters import NameFilter
from opintercept.cli.options import add_module_and_phase, add_op, count, steps
from opintercept.cli.show.calls import BATCH, OpenedRun, in_order, ranks_of, sorted_keys
from opintercept.cli.show.columns import CALL_COLUMNS, call_json, call_row
from opintercept.cli.show.data import head_of, write_csv, write_json
from opintercept.cli.show.over import COLUMNS, Series
from opintercept.cli.show.sums import LONGEST, MAX_GROUPS, Groups, GroupTotals, Row, RunSums
from opintercept.cli.show.text import (
    call_table,
    cell_text,
    group_table,
    print_overview,
    print_series,
    runs_table,
    source_text,
)
from opintercept.cli.terminal.output import listed, plain_warnings, safe_stdout
from opintercept.cli.terminal.progress import progress
from opintercept.runs import open_run
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import is_run

_KEYS = ("module", "op", "phase", "shape", "dtype", "step", "rank", "source", "run")
_SORTS = ("time", "flops", "rate", "calls", "nonfinite", "max", "min", "index", "module", "op")
_ROWS = 40  # of text, by default
_STEPS = 1000  # rows of `--over steps` in JSON and CSV, by default


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


def _opened(paths: Iterable[str]) -> Iterator[OpenedRun]:
    """Open the runs. Of the folders that match a pattern, those without a run are left out."""
    for path in dict.fromkeys(paths):
        try:
            yield OpenedRun(path, open_run(path))
            continue
        except OpInterceptError:
            if not glob.has_magic(path) or os.path.lexists(path):
                raise
        found = 0
        for match in sorted(filter(os.path.isdir, glob.iglob(path)), key=_natural):
            if is_run(match):
                found += 1
                yield OpenedRun(match, open_run(match))
        if not found:
            raise OpInterceptError(f"a pattern must match the folder of a run, got {path!r}")


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts `run9` before `run10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", path)]


def _show_groups(opened: list[OpenedRun], arguments: argparse.Namespace, names: NameFilter) -> None:
    found = Groups(arguments, names)
    sums = [RunSums() for _ in opened]
    with progress():
        for (name, run), own in zip(opened, sums, strict=True):
            for rank in ranks_of(run, arguments):
                found.add(name, run.columns(rank), own)
            run.close()
    groups = found.groups
    names.check(source_text(opened))
    chosen = sum(own.chosen.seconds for own in sums)

    def row(key: tuple[Any, ...]) -> Row:
        made = groups[key].row(zip(arguments.by, key, strict=True))
        return made | {"share": made["seconds"] / chosen if chosen > 0 else None}

    keys = sorted_keys(groups, row, arguments.sort or "time", arguments.limit)
    shown = map(row, keys)
    if arguments.json:
        heads = [
            {"calls": own.total.row(()), "chosen": own.chosen.row(()), "first_nonfinite": own.first.as_dict()}
            for own in sums
        ]
        write_json(head_of(opened, heads), "rows", shown)
    elif arguments.csv:
        write_csv(shown, [*arguments.by, *GroupTotals().row(()), "share"])
    else:
        if len(opened) == 1:
            print_overview(opened[0].run, sums[0], arguments)
        else:
            print(runs_table(opened, sums))
        if keys:
            print()
            values = any(info.tensors != "none" for _, run in opened for info in run.infos.values())
            print(group_table(list(shown), arguments.by, values=values))
        if len(keys) < len(groups):
            print(f"... and {len(groups) - len(keys)} more rows; --limit all shows them")


def _show_steps(opened: list[OpenedRun], arguments: argparse.Namespace, names: NameFilter) -> None:
    most = arguments.limit or MAX_GROUPS
    series = [Series(arguments, names, most) for _ in opened]
    with progress():
        for (_, run), own in zip(opened, series, strict=True):
            for rank in ranks_of(run, arguments):
                own.add(run.columns(rank))
            run.close()
    names.check(source_text(opened))
    several = len(opened) > 1
    found = [own.rows() for own in series]
    shown = (
        ({"run": name} if several else {}) | row for (name, _), rows in zip(opened, found, strict=True) for row in rows
    )
    if arguments.json:
        heads = [{"width": own.width, "modules": list(own.modules)} for own in series]
        write_json(head_of(opened, heads), "rows", shown)
    elif arguments.csv:
        write_csv(shown, [*["run"] * several, "step", "last", *COLUMNS])
    else:
        for number, ((name, _), own, rows) in enumerate(zip(opened, series, found, strict=True)):
            if number:
                print()
            if several:
                print(f"run       {cell_text(name, LONGEST)}")
            print_series(own, rows)


def _show_calls(opened: list[OpenedRun], arguments: argparse.Namespace, names: NameFilter) -> None:
    calls = in_order(opened, arguments, names)
    # Wait for the first call, or the end of the run, before printing anything.
    first = next(calls, None)
    if first is None:
        names.check(source_text(opened))
    calls = itertools.chain(() if first is None else (first,), calls)
    del first
    shown = itertools.islice(calls, arguments.limit)
    several = len(opened) > 1

    def rows(row: Callable[[StoredCall], Row]) -> Iterator[Row]:
        return (({"run": name} if several else {}) | row(call) for name, call in shown)

    if arguments.json:
        write_json(head_of(opened, [{} for _ in opened]), "calls", rows(call_json))
    elif arguments.csv:
        write_csv(rows(call_row), [*["run"] * several, *CALL_COLUMNS])
    else:
        ranks = any(len(run.ranks) > 1 for _, run in opened)
        made = rows(call_row)
        while batch := list(itertools.islice(made, BATCH)):
            print(call_table(batch, ranks=ranks))
    more = next(calls, None) is not None
    if more and not (arguments.json or arguments.csv):
        print("... and more; --limit all shows them")
    if not more:  # the filters have seen every call
        names.check(source_text(opened))
