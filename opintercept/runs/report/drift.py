"""`Drift`: the error of each module between two runs over the steps, and the first step where it exceeds their noise.

Invariant: the map has a bounded size; the first step above the noise is exact, however many steps a column of the map
has. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opintercept.runs.compare.index import Index
from opintercept.runs.report.panels import PHASES, HeatMap, about, rounded
from opintercept.runs.store.columns import Array
from opintercept.runs.sums import GroupSums

PART, MOST = 10, 50  # the first tenth of the steps, and at most so many, show the noise
ABOVE = 10.0  # an error is above the noise if it is so many times as large
_TOGETHER = 1 << 20  # calls that are grouped together, which takes fifty bytes each


class Drift:
    """Errors of the outputs of calls of run A, in the cells of its map, which has all of them.

    The noise of a module in a pass is the median error of its first steps: of a tenth, at least one, at most `MOST`.
    The error of a step is the largest of its calls. Of an even number of steps, the median is the smaller middle one.
    A call is above the noise if its error is more than `ABOVE` times that; where the runs begin equal, if it has any.
    A module that does not run in the first steps has the median noise of those that do.
    """

    def __init__(self, heat: HeatMap) -> None:
        self._heat = heat
        self._cells = GroupSums()  # by `HeatMap.spot` and column: the largest error, how many calls differ, and by Inf
        self._above: tuple[tuple[int, int, int], dict[str, Any]] | None = None
        self._steps = 0
        self._noise: float | None = None

    def add(self, index: Index, numbers: Array, relative: Array, differs: Array, ranks: tuple[int, int]) -> None:
        """Add those calls of run A, by `numbers`, that have a counterpart in another process.

        `relative` has the errors of their outputs, negative if unknown, and `differs` says which calls differ.
        """
        if not len(numbers):
            return
        kinds = index.kind[numbers]
        steps = index.columns.gather(numbers, ("step",))["step"]
        rows = [
            self._heat.modules.get(index.columns.call_site(call_site).module, -1)
            for call_site in index.call_site.tolist()
        ]
        place = np.array(rows, np.int64) * len(PHASES) + index.phase
        for start in range(0, len(kinds), _TOGETHER):
            some = slice(start, start + _TOGETHER)
            of = differs[some]
            self._add_cells(place[kinds[some][of]], steps[some][of] // self._heat.width, relative[some][of])
        codes = index.module.astype(np.int64) * len(PHASES) + index.phase
        noise = self._noise_of(codes, kinds, steps, relative)
        if noise is None:
            return
        found = np.flatnonzero(relative > (noise * ABOVE)[kinds])
        if not len(found):
            return
        indexes = index.columns.gather(numbers[found], ("index",))["index"]
        at = found[np.lexsort((indexes, steps[found]))[0]]
        (call,) = index.columns.calls_at(numbers[[at]], given=False)
        if self._above is None or call.place < self._above[0]:
            error = float(relative[at])
            figures = {
                "row": self._heat.modules.get(call.record.module),
                "error": "inf" if np.isinf(error) else rounded(error),
                "noise": rounded(float(noise[kinds[at]])),
            }
            self._above = call.place, about(call) | figures

    def _add_cells(self, places: Array, columns: Array, relative: Array) -> None:
        known = places >= 0
        relative = relative[known]
        figures = {
            "error_max": np.where((relative >= 0) & np.isfinite(relative), relative, np.nan),
            "calls": np.ones(len(relative)),
            "inf": np.isinf(relative),
        }
        self._cells.add([places[known], columns[known]], figures)

    def _noise_of(self, codes: Array, kinds: Array, steps: Array, relative: Array) -> Array | None:
        """The noise of the module and pass (`codes`) of each kind of call; None if there is only one step."""
        all_steps = np.unique(steps)
        if len(all_steps) < 2:
            return None
        count = max(1, min(MOST, len(all_steps) // PART))
        early = np.flatnonzero(steps <= all_steps[count - 1])
        mine, errors = codes[kinds[early]], np.fmax(relative[early], 0.0)
        groups = GroupSums()
        groups.add([mine, steps[early]], {"error_max": errors})
        modules, of_steps = groups.keys[0], groups.figures["error_max"]
        order = np.lexsort((of_steps, modules))
        found, starts, counts = np.unique(modules[order], return_index=True, return_counts=True)
        medians = of_steps[order][starts + (counts - 1) // 2]
        usual = float(np.sort(medians)[(len(medians) - 1) // 2])
        self._steps, self._noise = max(self._steps, count), max(self._noise or 0.0, usual)
        noise = np.full(int(codes.max()) + 1, usual)
        noise[found] = medians
        return np.asarray(noise[codes])

    def as_dict(self) -> dict[str, Any]:
        """The errors and what is above the noise, as plain data."""
        columns = {column: number for number, column in enumerate(self._heat.columns.tolist())}
        phases: dict[str, dict[str, list[Any]]] = {}
        cells = zip(*(each.tolist() for each in (*self._cells.keys, *self._cells.figures.values())), strict=True)
        for place, column, error, calls, infinite in cells:
            row, phase = divmod(place, len(PHASES))
            if column not in columns:  # not in a run that stays as it is
                continue
            lists = phases.setdefault(PHASES[phase], {name: [] for name in ("row", "column", "error", "calls", "inf")})
            cell = (row, columns[column], rounded(error), int(calls), int(infinite))
            for values, value in zip(lists.values(), cell, strict=True):
                values.append(value)
        noise = None if self._noise is None else {"steps": self._steps, "usual": rounded(self._noise), "times": ABOVE}
        return {"phases": phases, "noise": noise, "above": None if self._above is None else self._above[1]}
