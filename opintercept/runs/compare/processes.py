"""`compare_ranks`: compares a process of one run with its counterpart in another.

Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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
    a, b = (
        None if rank is None else Index(run.columns(rank), ids, select)
        for run, rank in ((run_a, rank_a), (run_b, rank_b))
    )
    sizes = [0 if index is None else len(index) for index in (a, b)]
    total.calls = [before + size for before, size in zip(total.calls, sizes, strict=True)]
    if a is not None and b is not None:
        total.ranks.append((a.columns.rank, b.columns.rank))
        if all(sizes):
            if (models := first_models(a.names, b.names)) is not None:
                a.number(models[0])
                b.number(models[1])
            ProcessPair(a, b, total.ranks[-1], comparer).compare(total)
            return
        if not any(sizes):
            return
    sides: tuple[Literal["a", "b"], ...] = ("a", "b")
    for side, index, other, others in zip(sides, (a, b), (b, a), reversed(sizes), strict=True):
        if index is not None and len(index):
            total.add_unmatched(side, index.columns.rank, index, np.full(len(index), -1))
        else:
            there = other if index is None else index
            assert there is not None
            total.absent.append(Absent(side, there.columns.rank, index is not None, others))
