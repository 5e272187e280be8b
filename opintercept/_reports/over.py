"""`Series`: the time and the outputs of calls by step, for `show --by step`.

Invariant: memory is bounded, since steps are merged two by two when there are too many. Must not import torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import Chosen, Row
from opintercept.runs.store.columns import FIGURES, Columns
from opintercept.runs.sums import COUNTS, Grouping, SlotStatistics, first_output, nonfinite

_SLOTS = ("output", "output1")
_READ = ("elapsed", "has_more", *COUNTS, *(f"{slot}_{name}" for slot in _SLOTS for name in FIGURES))
_MODULES = 1000  # whose names are counted
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = ("calls", "seconds", "min", "max", "mean", "rms", "nonfinite")


class _Figures:
    """The calls of some steps."""

    __slots__ = ("calls", "finite", "max", "min", "nonfinite", "seconds", "square", "sum")

    def __init__(self) -> None:
        self.calls = self.nonfinite = 0
        self.seconds = self.finite = self.sum = self.square = 0.0
        self.min, self.max = math.inf, -math.inf

    def merge(self, other: _Figures) -> None:
        for name in ("calls", "nonfinite", "seconds", "finite", "sum", "square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def row(self) -> Row:
        known = self.finite > 0
        square = self.square / self.finite if known else -1.0  # negative in a hostile run, too
        return {
            "calls": self.calls,
            "seconds": self.seconds,
            "min": self.min if known else None,
            "max": self.max if known else None,
            "mean": self.sum / self.finite if known else None,
            "rms": math.sqrt(square) if square >= 0.0 else None,
            "nonfinite": self.nonfinite,
        }


class Series:
    """Figures by step of the calls that the options admit, over the finite values of their first outputs.

    Args:
        choice: What is asked for.
        names: Those of modules and operators.
        most: How many rows there may be.

    Attributes:
        width: How many steps a row has.
        modules: The names of the modules, at most `_MODULES` of them.
    """

    def __init__(self, choice: Choice, names: NameFilter, most: int) -> None:
        self.width = 1
        self.modules: dict[str | None, None] = {}
        self._choice, self._names, self._most = choice, names, most
        self._rows: dict[int, _Figures] = {}

    def add(self, columns: Columns) -> None:
        """Add the calls of a process."""
        chosen = Chosen(columns, self._choice, self._names)
        for start, chunk, of, rows in chosen.stretches(_READ):
            used = np.unique(of[rows]).tolist()
            for kind in used:
                if len(self.modules) < _MODULES:
                    self.modules.setdefault(chosen.kinds[kind][0].module)
            steps = np.where(rows, chunk["step"], -1)
            while len(np.unique(steps[rows] // self.width)) > 2 * self._most:
                self._double()
            places = np.where(rows, steps // self.width, -1)
            groups = Grouping(places)
            seconds = groups.sum(np.nan_to_num(chunk["elapsed"], posinf=0.0, neginf=0.0))
            bad = groups.sum(nonfinite(columns, start, chunk))
            signatures = [chosen.kinds[kind][1] for kind in range(len(chosen.kinds))]
            slots = [first_output(signature) for signature in signatures]
            moments = []
            for slot, role in zip(_SLOTS, ("output", "output.1"), strict=True):
                sizes = [
                    signature.roles[role][0] if one == slot else -1
                    for one, signature in zip(slots, signatures, strict=True)
                ]
                counts = np.array(sizes, np.float64)[of]
                if (counts >= 0).any():
                    moments.append(SlotStatistics(groups, chunk, slot, counts))
            for number, place in enumerate(groups.codes.tolist()):
                if place < 0:
                    continue
                added = _Figures()
                added.calls, added.nonfinite = int(groups.counts[number]), int(bad[number])
                added.seconds = float(seconds[number])
                for each in moments:
                    added.finite += float(each.finite[number])
                    added.sum += float(each.sum[number])
                    added.square += float(each.square[number])
                    added.min = min(added.min, float(each.min[number]))
                    added.max = max(added.max, float(each.max[number]))
                known = self._rows.setdefault(place, added)
                if known is not added:
                    known.merge(added)
            while len(self._rows) > self._most:
                self._double()

    def _double(self) -> None:
        self.width *= 2
        rows, self._rows = self._rows, {}
        for place, figures in rows.items():
            known = self._rows.setdefault(place // 2, figures)
            if known is not figures:
                known.merge(figures)

    def rows(self) -> list[Row]:
        """A row for the steps from `step` to `last`, in order."""
        return [
            {"step": place * self.width, "last": (place + 1) * self.width - 1, **self._rows[place].row()}
            for place in sorted(self._rows)
        ]


def sparkline(values: list[Any]) -> str:
    """Values as bars from the smallest to the largest; a blank where there is none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    span = high / 2 - low / 2  # does not overflow

    def bar(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        part = (value / 2 - low / 2) / span if span > 0 else 0.5
        return BARS[min(int(part * len(BARS)), len(BARS) - 1)]

    return "".join(map(bar, values))
