"""The calls that `opintercept show` prints, in the order that it prints them.

Invariant: calls are read piece by piece, and only those that `--limit` admits are kept for sorting.
Must not import torch.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from opintercept._reports.columns import call_row
from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import LONGEST, Chosen, Row
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import Run

BATCH = 100  # rows of text that are laid out together
_READ = 4096  # calls that are read together
MAX_OPEN = 256  # processes whose calls are merged
T = TypeVar("T")


class OpenedRun(NamedTuple):
    """A run and its name in the rows."""

    name: str
    run: Run


def ranks_of(run: Run, choice: Choice) -> tuple[int, ...]:
    """Return the ranks of a run that `--rank` chooses."""
    return run.ranks if choice.rank is None else tuple(rank for rank in run.ranks if rank == choice.rank)


def first_rows(found: Iterable[T], row: Callable[[T], Row], sort: str, limit: int | None) -> list[T]:
    """Return what comes first in the order of its rows, which are not kept; rows without a value come last."""
    by = {"time": "seconds", "rate": "flops_per_second"}.get(sort, sort)
    up = sort in ("min", "index", "module", "op")

    def place(each: T) -> Any:
        made = row(each)
        value = made.get(by)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return True, 0
        if by == "index":
            return False, (made["step"], value)
        return False, value[:LONGEST] if isinstance(value, str) else value if up else -value

    return sorted(found, key=place) if limit is None else heapq.nsmallest(limit, found, key=place)


def _of_rank(run: Run, rank: int, choice: Choice, names: NameFilter) -> Iterator[StoredCall]:
    columns = run.columns(rank)
    for start, _, _, rows in Chosen(columns, choice, names).stretches(()):
        numbers = np.flatnonzero(rows) + start
        size = BATCH  # the first calls are soon there, and the rest is read in larger pieces
        while len(numbers):
            part, numbers = numbers[:size], numbers[size:]
            yield from columns.calls_at(part, given=False)
            size = _READ


def in_order(opened: list[OpenedRun], choice: Choice, names: NameFilter) -> Iterator[tuple[str, StoredCall]]:
    """Yield the chosen calls with the names of their runs, by `--sort` or, of several processes, by step and index."""

    def of(name: str, run: Run) -> Iterator[tuple[str, StoredCall]]:
        calls = [_of_rank(run, rank, choice, names) for rank in ranks_of(run, choice)]
        merged = itertools.chain(*calls) if len(calls) > MAX_OPEN else heapq.merge(*calls, key=lambda call: call.place)
        return ((name, call) for call in merged)

    found = itertools.chain.from_iterable(of(name, run) for name, run in opened)
    if not choice.sort:
        return found
    return iter(first_rows(found, lambda each: call_row(each[1]), choice.sort, choice.limit))
