"""Writes what `explain` has found as an HTML page: what makes the difference, and the path of the error.

Invariant: as in `page`. All costs add up to what is explained: the page has no room for the smallest ones of many, and
shows their sum. Must not import torch.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from opintercept.runs.compare.words import short_op
from opintercept.runs.explain.explanation import Explanation, OutputDistance, ShareBy
from opintercept.runs.report.page import filled, save
from opintercept.runs.report.panels import NAME, module_label, rounded, shown_text

SHARES = 3000  # rows of the largest costs
STRETCHES = 800  # places of the path


def write(path: str | os.PathLike[str], found: Explanation) -> None:
    """Write the page. If that fails, `path` stays as it was."""
    save(path, page(found))


def page(found: Explanation) -> str:
    """The page as text: less than 2 MB."""
    largest = sorted(range(len(found.all)), key=lambda place: -abs(found.all[place].cost))
    rest = [found.all[place].cost for place in largest[SHARES:]]
    sums = found.confirmed if found.by != "call" else {}  # of calls, `_shares` has it
    data = {
        "runs": [shown_text(each.path, 4 * NAME) for each in (found.a, found.b)],
        "loss": shown_text(found.loss, 4 * NAME),
        "losses": [_finite(each) for each in found.losses],
        "difference": _finite(found.difference),
        "by": "module" if found.by == "call" else found.by,
        "confirmed": [[_label(key, found.by), _finite(each)] for key, each in sums.items()],
        "shares": _shares(found, sorted(largest[:SHARES])),
        "rest": [len(rest), _finite(sum(rest))],
        "path": _path(found),
        "notes": [shown_text(str(note), 4 * NAME) for note in (*found.doubts(), *found.notes)],
    }
    return filled("explain", "explained", "plots modules parts costs path explained", data)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _label(key: Any, by: ShareBy) -> str:
    """The name of a row."""
    return module_label(key) if by == "module" else short_op(key or "") if by == "op" else shown_text(key or "")


def _shares(found: Explanation, places: Sequence[int]) -> dict[str, Any]:
    """Some shares as lists of columns, which compress better than rows."""
    shown = [found.all[place] for place in places]
    modules = list(dict.fromkeys(each.module for each in shown))
    numbers = {module: number for number, module in enumerate(modules)}
    names = [module_label(each) for each in modules]
    return {
        "modules": names,
        "exact": [name == module for name, module in zip(names, modules, strict=True)],
        "module": [numbers[each.module] for each in shown],
        "op": [_label(each.op, "op") for each in shown],
        "line": [_label(each.source, "line") for each in shown],
        "dtype": [_label(each.dtype, "dtype") for each in shown],
        "cause": [shown_text(each.cause) for each in shown],
        "index": [each.index for each in shown],
        "cost": [_finite(each.cost) for each in shown],
        "roundings": [rounded(each.roundings) for each in shown],
        "confirmed": [_finite(found.confirmed.get(place)) if found.by == "call" else None for place in places],
    }


def _path(found: Explanation) -> dict[str, Any]:
    """The errors of the last output of each stretch, as lists of columns, and what the shares up to there cost."""
    stretches = _stretches(found.path)
    ends = [calls[-1].index for _, calls in stretches]
    costs = [0.0] * len(stretches)
    for each in found.all if stretches else ():
        costs[min(bisect_left(ends, each.index or 0), len(ends) - 1)] += each.cost
    return {
        "module": [name for name, _ in stretches],
        "calls": [len(calls) for _, calls in stretches],
        "index": ends,
        "op": [_label(calls[-1].op, "op") for _, calls in stretches],
        "dtype": [_label(calls[-1].dtype, "dtype") for _, calls in stretches],
        "relative": [rounded(calls[-1].relative) for _, calls in stretches],
        "roundings": [rounded(calls[-1].roundings) for _, calls in stretches],
        "cost": [_finite(each) for each in costs],
    }


def _stretches(path: Sequence[OutputDistance]) -> list[tuple[str, list[OutputDistance]]]:
    """Consecutive calls of a module: of the modules that hold it if there are too many, or else of equal length."""
    names = [module_label(each.module).split(".") for each in path]
    for depth in range(max(map(len, names), default=0), 0, -1):
        calls_of = groupby(zip([name[:depth] for name in names], path, strict=True), itemgetter(0))
        found = [(".".join(name), [each for _, each in calls]) for name, calls in calls_of]
        if len(found) <= STRETCHES:
            return found
    size = -(-len(path) // STRETCHES) or 1
    equal = [list(path[start : start + size]) for start in range(0, len(path), size)]
    return [(module_label(calls[-1].module), calls) for calls in equal]
