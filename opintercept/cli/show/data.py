"""The JSON and CSV of `opintercept show`. Must not import torch."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable

from opintercept._core.text import csv_cell
from opintercept._reports.calls import OpenedRun
from opintercept._reports.sums import Row
from opintercept.cli.terminal.output import finite_json
from opintercept.runs.store.run import Run


def write_json(head: Row, name: str, rows: Iterable[Row]) -> None:
    """Print the head, then the rows one by one: there may be many."""
    print(f'{json.dumps(finite_json(head), allow_nan=False)[:-1]},\n"{name}": [', end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", end="")
        print(json.dumps(finite_json(row), allow_nan=False), end="")
    print("\n]}")


def head_of(opened: list[OpenedRun], heads: list[Row]) -> Row:
    """Return what JSON says before the rows: one run under `run`, several as a list under `runs`."""
    if len(opened) == 1:
        return {"run": _about(opened[0].run)} | heads[0]
    return {"runs": [_about(run) | {"path": name} | head for (name, run), head in zip(opened, heads, strict=True)]}


def _about(run: Run) -> Row:
    return {"path": str(run.path), "ranks": {str(rank): info.as_dict() for rank, info in run.infos.items()}} | (
        {"processes": {str(rank): title for rank, title in run.titles.items()}} if run.titles else {}
    )


def write_csv(rows: Iterable[Row], columns: Iterable[str]) -> None:
    """Print the rows as CSV."""
    columns = tuple(columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(csv_cell(row[name]) for name in columns)
