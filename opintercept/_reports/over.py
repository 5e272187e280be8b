"""`Series`: the time and the outputs of calls by step, for `show --by step`.

Invariant: memory is bounded, since steps are merged two by two when there are too many. Must not import torch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opintercept._reports.filters import Choice, NameFilter
from opintercept._reports.sums import Chosen, Row
from opintercept.runs.store.columns import FIGURES, CallSignature, Columns, StoredCallSite
from opintercept.runs.sums import COUNTS, GroupSums, first_output, first_outputs, nonfinite, seconds_of, slot_figures

_READ = ("elapsed", "has_more", *COUNTS, *(f"{slot}_{name}" for slot in ("output", "output1") for name in FIGURES))
_MODULES = 1000  # whose names are counted
BARS = "▁▂▃▄▅▆▇█"
COLUMNS = ("calls", "seconds", "min", "max", "mean", "rms", "nonfinite")


class Series:
    """Figures by step of the calls that the options admit, over the finite values of their first outputs."""

    def __init__(self, choice: Choice, names: NameFilter, most: int) -> None:
        self.width = 1  # steps of a row; there are `most` rows at most
        self.modules: dict[str | None, None] = {}  # their names, at most `_MODULES`
        self._choice, self._names, self._most = choice, names, most
        self._sums = GroupSums()  # by step, in units of `width`

    def add(self, columns: Columns) -> None:
        """Add the calls of a process."""
        modules: list[str | None] = []

        def learn(call_site: StoredCallSite, signature: CallSignature, _: bool) -> list[float]:
            modules.append(call_site.module)
            return [len(modules) - 1, *first_output(signature)]

        chosen = Chosen(columns, self._choice, self._names, learn)
        for start, chunk, (module, counts, is_second), rows in chosen.stretches(_READ):
            for number in np.unique(module[rows]).astype(int).tolist():
                if len(self.modules) < _MODULES:
                    self.modules.setdefault(modules[number])
            figures = slot_figures(first_outputs(chunk, is_second > 0), "output", counts)
            figures["calls"] = np.ones(len(rows))
            figures["seconds"] = seconds_of(chunk)
            figures["nonfinite"] = nonfinite(columns, start, chunk)
            steps = chunk["step"] // self.width
            self._sums.add([steps[rows]], {name: column[rows] for name, column in figures.items()})
            while len(self._sums) > self._most:
                self.width *= 2
                self._sums.regroup(self._sums.keys[0] // 2)

    def rows(self) -> list[Row]:
        """A row for the steps from `step` to `last`, in order."""
        if not len(self._sums):
            return []
        figures, values = self._sums.figures, self._sums.statistics("output")
        columns = {
            "step": self._sums.keys[0] * self.width,
            "last": (self._sums.keys[0] + 1) * self.width - 1,
            "calls": figures["calls"].astype(int),
            "seconds": figures["seconds"],
            **{name: values[name] for name in FIGURES},
            "nonfinite": figures["nonfinite"].astype(int),
        }
        lists = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [
            {name: None if value != value else value for name, value in zip(columns, row, strict=True)} for row in lists
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
