"""The calls that `opintercept show` prints, in the order that it prints them.

Invariant: calls are read piece by piece and not kept. Sorting keeps only keys and places in the file.
Must not import torch.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from opintercept.cli.filters import NameFilter
from opintercept.cli.show.columns import call_row
from opintercept.cli.show.sums import LONGEST, Chosen, Row
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import Run

BATCH = 100  # rows of text that are laid out together
_READ = 4096  # calls that are read together
MAX_OPEN = 256  # files that are open at once


class OpenedRun(NamedTuple):
    """A run and its name in the rows."""

    name: str
    run: Run


def ranks_of(run: Run, arguments: argparse.Namespace) -> tuple[int, ...]:
    """Return the ranks of a run that `--rank` chooses."""
    return run.ranks if arguments.rank is None else tuple(rank for rank in run.ranks if rank == arguments.rank)


def sorted_keys(keys: Iterable[Any], row: Callable[[Any], Row], sort: str, limit: int | None) -> list[Any]:
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

    def of(rank: int) -> Iterator[tuple[int, int, StoredCall]]:
        return _in_columns(run, rank, arguments, names)

    ranks = ranks_of(run, arguments)
    if len(ranks) > MAX_OPEN:
        return itertools.chain.from_iterable(map(of, ranks))
    return heapq.merge(*map(of, ranks), key=lambda entry: entry[2].place)


def _in_columns(
    run: Run, rank: int, arguments: argparse.Namespace, names: NameFilter
) -> Iterator[tuple[int, int, StoredCall]]:
    columns = run.columns(rank)
    for start, _, _, rows in Chosen(columns, arguments, names).stretches(()):
        numbers = np.flatnonzero(rows) + start
        size = BATCH  # the first calls are soon there, and the rest is read in larger pieces
        while len(numbers):
            part, numbers = numbers[:size], numbers[size:]
            for number, call in zip(part.tolist(), columns.calls_at(part), strict=True):
                yield rank, number, call
            size = _READ


def in_order(
    opened: list[OpenedRun], arguments: argparse.Namespace, names: NameFilter
) -> Iterator[tuple[str, StoredCall]]:
    """Yield the chosen calls with the names of their runs, in the order of `--sort`."""
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
            calls[process, position] = call_row(call)
            yield process, position

    chosen = sorted_keys(places(), lambda place: calls[place], arguments.sort, arguments.limit)
    for (number, rank), position in chosen:
        name, run = opened[number]
        yield name, run.at(rank, position)
