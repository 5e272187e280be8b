"""`opintercept show`: prints what recorded runs consist of, as text, JSON or CSV. Must not import torch."""

from __future__ import annotations

import argparse
import csv
import glob
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import csv_cell, listed, short_name
from opintercept._reports.calls import OpenedRun
from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import Row
from opintercept._reports.text import BARS
from opintercept._reports.views import show_calls, show_groups, show_steps
from opintercept.cli.options import add_filters, add_process, count
from opintercept.cli.terminal.output import can_print, finite_json, print_parts
from opintercept.cli.terminal.progress import progress
from opintercept.runs import open_run
from opintercept.runs.store.run import Run, is_run

_KEYS = ("module", "op", "phase", "shape", "dtype", "step", "rank", "process", "source", "run")
_SORTS = ("time", "flops", "rate", "calls", "nonfinite", "max", "min", "index", "module", "op")
_ROWS = 40  # of text, by default
_STEPS = 1000  # rows of `--by step` in JSON and CSV, by default


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "run", nargs="+", help="folder of a run, or a pattern such as 'runs/*'; with several, rows name it"
    )
    parser.add_argument("--calls", action="store_true", help="show a row for each call, in the order the calls ended")
    parser.add_argument(
        "--by",
        type=_keys,
        default=_KEYS[:3],
        metavar="KEYS",
        help=f"group calls that share these keys, out of {','.join(_KEYS)} (default module,op,phase); step alone shows "
        "the steps in their order, with the mean and root mean square of outputs",
    )
    add_filters(parser, "show", "op", "module", "phase", "steps")
    parser.add_argument("--rank", type=int, help="show only the calls of this process")
    add_process(parser, "show")
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
    with progress():
        opened = [OpenedRun(name, run.matching(arguments.process)) for name, run in _opened(arguments.run)]
    runs = [run for _, run in opened]
    if arguments.rank is not None and all(arguments.rank not in run.ranks for run in runs):
        ranks = sorted({rank for run in runs for rank in run.ranks})
        raise OpInterceptError(f"--rank must be one of {listed(ranks)}, got {arguments.rank}")
    if arguments.nonfinite and all(info.tensors == "none" for run in runs for info in run.infos.values()):
        which = "this run was" if len(runs) == 1 else "these runs were"
        raise OpInterceptError(f"--nonfinite needs statistics, but {which} recorded with --tensors none")
    # Sorted steps are groups like any others.
    in_steps = {*arguments.by} - {"run"} == {"step"} and not arguments.calls and not arguments.sort
    if arguments.limit == 0:
        arguments.limit = (_STEPS if in_steps else None) if arguments.json or arguments.csv else _ROWS
    if arguments.calls and arguments.sort and arguments.limit is None:
        raise OpInterceptError("--calls with --sort needs a --limit, since every call might not fit into memory")
    if len(opened) > 1 and "run" not in arguments.by:
        arguments.by = ("run", *arguments.by)
    choice = Choice(**{field.name: getattr(arguments, field.name) for field in fields(Choice)})
    names = NameFilter(arguments.module, arguments.op, arguments.phase, lambda name: name, short_name)
    with progress():
        if in_steps:
            view = show_steps(opened, choice, names, can_print(BARS))
        elif arguments.calls:
            view = show_calls(opened, choice, names, arguments.json)
        else:
            view = show_groups(opened, choice, names)
    if arguments.json:
        _write_json(_head_of(opened, view.heads), view.name, view.rows)
    elif arguments.csv:
        _write_csv(view.rows, view.columns)
    else:
        print_parts(view.parts)
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
        found = list(filter(is_run, sorted(filter(os.path.isdir, glob.iglob(path)), key=_natural)))
        if not found:
            raise OpInterceptError(f"a pattern must match the folder of a run, got {path!r}")
        yield from (OpenedRun(match, open_run(match)) for match in found)


def _natural(path: str) -> list[tuple[int, str]]:
    """A key that sorts `run9` before `run10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split("([0-9]+)", path)]


def _write_json(head: Row, name: str, rows: Iterable[Row]) -> None:
    """Print the head, then the rows one by one: there may be many."""
    print(f'{json.dumps(finite_json(head), allow_nan=False)[:-1]},\n"{name}": [', end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", end="")
        print(json.dumps(finite_json(row), allow_nan=False), end="")
    print("\n]}")


def _head_of(opened: list[OpenedRun], heads: list[Row]) -> Row:
    """Return what JSON says before the rows: one run under `run`, several as a list under `runs`."""
    if len(opened) == 1:
        return {"run": _about(opened[0].run)} | heads[0]
    return {"runs": [_about(run) | {"path": name} | head for (name, run), head in zip(opened, heads, strict=True)]}


def _about(run: Run) -> Row:
    return {"path": str(run.path), "ranks": {str(rank): info.as_dict() for rank, info in run.infos.items()}} | (
        {"processes": {str(rank): title for rank, title in run.titles.items()}} if run.titles else {}
    )


def _write_csv(rows: Iterable[Row], columns: Iterable[str]) -> None:
    """Print the rows as CSV."""
    columns = tuple(columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(csv_cell(row[name]) for name in columns)
