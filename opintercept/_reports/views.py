"""The reports of `opintercept show`: groups of calls, steps, or calls, each as rows and as text.

Invariant: a name that no call has is refused, before anything is printed if all calls are read by then.
Must not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from opintercept._core.tables import Part
from opintercept._reports.calls import (
    BATCH,
    CALL_COLUMNS,
    OpenedRun,
    call_json,
    call_row,
    first_rows,
    in_order,
    ranks_of,
)
from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import LONGEST, MAX_GROUPS, Groups, GroupTotals, Row, RunSums, Series
from opintercept._reports.text import (
    call_table,
    cell_text,
    group_table,
    overview,
    runs_table,
    series_parts,
    source_text,
)
from opintercept.runs.store.codec import StoredCall

_OF_STEPS = ("calls", "seconds", "min", "max", "mean", "rms", "nonfinite")


class View(NamedTuple):
    """A report."""

    heads: list[Row]  # what JSON says of each run before the rows
    name: str  # of the rows in JSON
    rows: Iterable[Row]  # for JSON and CSV
    columns: Sequence[str]  # of CSV
    parts: Iterable[Part]  # the text


def show_groups(opened: list[OpenedRun], choice: Choice, names: NameFilter) -> View:
    """Show groups of calls that share the keys of `--by`."""
    found = Groups(choice, names)
    sums = [RunSums(run) for _, run in opened]
    for (name, run), own in zip(opened, sums, strict=True):
        for rank in ranks_of(run, choice):
            found.add(name, run.title(rank), run.columns(rank), own)
        run.close()
    groups = found.groups
    names.check(source_text(opened))
    chosen = sum(own.chosen.seconds for own in sums)

    def row(key: tuple[Any, ...]) -> Row:
        made = groups[key].row(zip(choice.by, key, strict=True))
        return made | {"share": made["seconds"] / chosen if chosen > 0 else None}

    keys = first_rows(groups, row, choice.sort or "time", choice.limit)

    def parts() -> Iterator[Part]:
        if len(opened) == 1:
            yield from overview(opened[0].run, sums[0], choice.steps is not None)
        else:
            yield runs_table(opened, sums)
        if keys:
            values = any(info.tensors != "none" for _, run in opened for info in run.infos.values())
            yield from ("", group_table(list(map(row, keys)), choice.by, values=values))
        if len(keys) < len(groups):
            yield f"... and {len(groups) - len(keys)} more rows; --limit all shows them"

    heads = [
        {"calls": own.total.row(()), "chosen": own.chosen.row(()), "first_nonfinite": own.first.as_dict()}
        for own in sums
    ]
    columns = [*choice.by, *GroupTotals().row(()), "share"]
    return View(heads, "rows", map(row, keys), columns, parts())


def show_steps(opened: list[OpenedRun], choice: Choice, names: NameFilter, bars: bool) -> View:
    """Show figures of the chosen calls in each step, with bars if stdout can print `BARS`."""
    series = [Series(choice, names, choice.limit or MAX_GROUPS) for _ in opened]
    for (_, run), own in zip(opened, series, strict=True):
        for rank in ranks_of(run, choice):
            own.add(run.columns(rank))
        run.close()
    names.check(source_text(opened))
    several = len(opened) > 1
    found = [own.rows() for own in series]
    rows = (_named(name, row, several) for (name, _), rows in zip(opened, found, strict=True) for row in rows)

    def parts() -> Iterator[Part]:
        for number, ((name, _), own, rows) in enumerate(zip(opened, series, found, strict=True)):
            if number:
                yield ""
            if several:
                yield f"run       {cell_text(name, LONGEST)}"
            yield from series_parts(own, rows, bars)

    heads: list[Row] = [{"width": own.width, "modules": list(own.modules)} for own in series]
    return View(heads, "rows", rows, [*["run"] * several, "step", "last", *_OF_STEPS], parts())


def show_calls(opened: list[OpenedRun], choice: Choice, names: NameFilter, as_json: bool) -> View:
    """Show single calls as they are read."""
    calls = in_order(opened, choice, names)
    # Wait for the first call, or the end of the run, before printing anything.
    first = list(itertools.islice(calls, 1))
    if not first:
        names.check(source_text(opened))
    rest: list[Any] = []  # a call that the limit leaves out
    several = len(opened) > 1
    titles = {name: run.titles for name, run in opened if len(run.titles) > 1}

    def rows(row: Callable[[StoredCall], Row]) -> Iterator[Row]:
        while first:
            yield _named(first[0][0], titled(*first[0], row(first.pop()[1])), several)
        limit = None if choice.limit is None else choice.limit - 1
        for name, call in itertools.islice(calls, limit):
            yield _named(name, titled(name, call, row(call)), several)
        rest.extend(itertools.islice(calls, 1))
        if not rest:  # the filters have seen every call
            names.check(source_text(opened))

    def titled(name: str, call: StoredCall, row: Row) -> Row:
        return {"process": titles.get(name, {}).get(call.rank)} | row if titles else row

    def parts() -> Iterator[Part]:
        ranks = any(len(run.ranks) > 1 for _, run in opened)
        made = rows(call_row)
        while batch := list(itertools.islice(made, BATCH)):
            yield call_table(batch, ranks=ranks)
        if rest:
            yield "... and more; --limit all shows them"

    columns = [*["run"] * several, *["process"] * bool(titles), *CALL_COLUMNS]
    return View([{} for _ in opened], "calls", rows(call_json if as_json else call_row), columns, parts())


def _named(name: str, row: Row, several: bool) -> Row:
    return {"run": name} | row if several else row
