"""The calls that `opintercept show` prints, in the order that it prints them, and the columns of a call.

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

from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import LONGEST, Chosen, Row, rate
from opintercept._values.stats import Values
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

BATCH = 100  # rows of text that are laid out together
_READ = 4096  # calls that are read together
MAX_OPEN = 256  # processes whose calls are merged
T = TypeVar("T")
_FIGURES = ("hash", "nan", "inf", "min", "max", "mean", "rms")  # of the first output
CALL_COLUMNS = (
    "rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds",
    "flops_per_second", "forward", "grad_of", "replayed", "nonfinite", *_FIGURES, "error",
)  # fmt: skip


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
    """Yield the chosen calls with the names of their runs, by `--sort` or, of several processes, by `Run.place`."""

    def of(name: str, run: Run) -> Iterator[tuple[str, StoredCall]]:
        calls = [_of_rank(run, rank, choice, names) for rank in ranks_of(run, choice)]
        merged = itertools.chain(*calls) if len(calls) > MAX_OPEN else heapq.merge(*calls, key=run.place)
        return ((name, call) for call in merged)

    found = itertools.chain.from_iterable(of(name, run) for name, run in opened)
    if not choice.sort:
        return found
    return iter(first_rows(found, lambda each: call_row(each[1]), choice.sort, choice.limit))


def call_row(call: StoredCall) -> Row:
    """Return the values of the columns for a call."""
    record = call.record
    output: Values | None = next((values for role, values in call.values.items() if is_output(role)), None)
    row = {
        "rank": call.rank,
        "shape": record.shape[:LONGEST],
        "dtype": record.dtype[:LONGEST],
        "seconds": record.elapsed,
        "flops_per_second": rate(record.flops, record.elapsed),
        "nonfinite": sum(values.nan + values.inf for values in call.values.values()),
        "error": call.error,
        **({} if output is None else output.as_dict()),
    }
    return {name: row.get(name) if name in row or name in _FIGURES else getattr(record, name) for name in CALL_COLUMNS}


def call_json(call: StoredCall) -> Row:
    """Return a call as plain data, with the statistics of all its tensors."""
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}
