"""`compare_ranks`: compares a process of one run with its counterpart in another.

Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.compare.blame import ProcessPair
from opintercept.runs.compare.difference import Absent
from opintercept.runs.compare.index import Index
from opintercept.runs.compare.pairing import Ids, first_models
from opintercept.runs.compare.totals import DiffTotals
from opintercept.runs.compare.values import Comparer
from opintercept.runs.store.run import Run


def compare_ranks(
    total: DiffTotals,
    run_a: Run,
    rank_a: int | None,
    run_b: Run,
    rank_b: int | None,
    comparer: Comparer,
    select: Callable[[CallRecord], bool] | None,
) -> None:
    """Compare a process of each run; None stands for one that the run does not have."""
    ids = Ids()
    a = Index(None if rank_a is None else run_a.columns(rank_a), ids, select)
    b = Index(None if rank_b is None else run_b.columns(rank_b), ids, select)
    if (models := first_models(a.names, b.names)) is not None:
        a.number(models[0])
        b.number(models[1])
    total.calls[0] += len(a)
    total.calls[1] += len(b)
    if rank_a is not None and rank_b is not None:
        total.ranks.append((rank_a, rank_b))
        if len(a) and len(b):
            ProcessPair(a, b, (rank_a, rank_b), comparer).compare(total)
            return
        if len(a) == len(b):
            return
    if len(a):
        _add_alone("a", total, a, rank_a)
    else:
        total.absent.append(Absent("a", _first(rank_a, rank_b), rank_a is not None, len(b)))
    if len(b):
        _add_alone("b", total, b, rank_b)
    else:
        total.absent.append(Absent("b", _first(rank_b, rank_a), rank_b is not None, len(a)))


def _add_alone(side: str, total: DiffTotals, index: Index, rank: int | None) -> None:
    assert rank is not None
    total.add_unmatched("a" if side == "a" else "b", rank, index, np.full(len(index), -1))


def _first(rank: int | None, other: int | None) -> int:
    """The rank, or that of the other run's process if this one has none."""
    found = rank if rank is not None else other
    assert found is not None
    return found
