"""Finds which rows of two runs are of the same token, where one run computes in pieces or pads.

Invariant: a row has at most one counterpart. Needs numpy. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from opintercept.runs.store.columns import Array

MOST = 1 << 22  # pairs of rows that are compared
MANY = 8  # rows whose roundings cancel in a column, and whose usual error says more than that of the worst
_UNLIKE = 0.5  # the least distance of rows that are not of the same token; unrelated rows have about 1


def row_errors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The relative error of each row of `y`, `[..., m]`; a row smaller than others counts as their root mean square."""
    size = x.nan_to_num(0, 0, 0).norm(dim=-1)
    usual = size.square().mean().sqrt() if size.numel() else size.new_zeros(())
    error = (y - x).where((x != y) & ~(x.isnan() & y.isnan()), 0).norm(dim=-1)
    found: torch.Tensor = (error / torch.maximum(size, usual)).where(error != 0, 0).nan_to_num(torch.inf, torch.inf)
    return found


def row_error(x: torch.Tensor, y: torch.Tensor) -> float:
    """The largest of `row_errors`; 0 if there is no row."""
    return float(row_errors(x, y).max()) if x.numel() else 0.0


def usual_error(errors: torch.Tensor) -> float:
    """The root mean square of the errors of many rows; 0 of few, which say no more than the worst one."""
    return float(errors.square().mean().sqrt()) if errors.numel() >= MANY else 0.0


def distances(x: torch.Tensor, y: torch.Tensor) -> Array:
    """Squared distances of rows `[m, k]` and `[n, k]` relative to their squared norms, `float64[m, n]`."""
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None]
    found: Array = (torch.cdist(x, y).square() / squares.clamp_min(torch.finfo(torch.float64).tiny)).numpy()
    return found


def alike(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many rows of `[m, k]` may be of the same token as those of another."""
    squares = x.square().sum(1) + y.square().sum(1)
    return int(((x - y).square().sum(1) < _UNLIKE * squares).sum())


def same_tokens(costs: Iterable[Array]) -> tuple[Array, Array]:
    """The rows of the same token, by distances of all pairs in several tensors: in order, or each with the nearest."""
    cost: Array = np.mean([*costs], axis=0)
    ordered, free = in_order(cost), nearest(cost)
    total = [cost[rows, columns].sum() for rows, columns in (ordered, free)]
    rows, columns = ordered if total[0] <= total[1] * (1 + 1e-6) + 1e-9 else free
    alike = cost[rows, columns] < _UNLIKE
    steps = (np.diff(rows) == 1) & (np.diff(columns) == 1)
    beside = np.r_[False, steps & alike[:-1]] | np.r_[steps & alike[1:], False]  # another token in a row of the same
    return rows[alike | beside], columns[alike | beside]


def in_order(cost: Array) -> tuple[Array, Array]:
    """The pairs of least cost that keep the order of both sides, as many as the shorter side has rows."""
    if cost.shape[0] > cost.shape[1]:
        columns, rows = in_order(cost.T)
        return rows, columns
    width = cost.shape[1]
    chosen = np.empty(cost.shape, np.int64)
    best = np.zeros(width + 1)  # the least cost of the rows so far within the first columns
    for row, each in enumerate(cost):
        here = np.r_[np.inf, best[:-1] + each]
        new = np.minimum.accumulate(here)
        improved = np.where(here == new, np.arange(width + 1), 0)
        chosen[row] = np.maximum.accumulate(improved)[1:]
        best = new
    places = np.empty(len(cost), np.int64)
    end = width
    for row in range(len(cost) - 1, -1, -1):
        end = int(chosen[row][end - 1]) - 1
        places[row] = end
    return np.arange(len(cost)), places


def nearest(cost: Array) -> tuple[Array, Array]:
    """The pairs of rows that are nearest to each other, then those of what is left, by the distances `[m, n]`."""
    cost = cost.copy()
    rows, columns = [], []
    for _ in range(min(cost.shape)):
        best, back = cost.argmin(1), cost.argmin(0)
        left = np.flatnonzero((back[best] == np.arange(len(best))) & np.isfinite(cost[np.arange(len(best)), best]))
        if not len(left):
            break
        rows.append(left)
        columns.append(best[left])
        cost[left], cost[:, best[left]] = np.inf, np.inf
    nothing = np.empty(0, np.int64)  # as of rows with NaN
    found = np.concatenate([nothing, *rows]), np.concatenate([nothing, *columns])
    order = np.argsort(found[0])
    return found[0][order], found[1][order]
