"""`Drift`: the error of each module between two runs over the steps, and the first step where it exceeds their noise.

Invariant: the map has a bounded size; the first step above the noise is exact, however many steps a column of the map
has, and never has an error within `ABOVE` times its rounding. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.compare.index import PHASES, Index
from opintercept.runs.report.panels import HeatMap, about, rounded
from opintercept.runs.store.columns import Array
from opintercept.runs.sums import GroupSums

PART, MOST = 10, 50  # the first tenth of the steps, and at most so many, show the noise
ABOVE = 10.0  # an error is above the noise if it is so many times as large
TOGETHER = 1 << 18  # calls that are grouped together, which takes fifty bytes each
_BITS = {"float64": 52, "complex128": 52, "float16": 10, "bfloat16": 7, "float8_e4m3fn": 3, "float8_e4m3fnuz": 3}
_BITS |= {"float8_e5m2": 2, "float8_e5m2fnuz": 2}  # of a mantissa; other dtypes count as float32


class Drift:
    """Errors of the outputs of calls of run A, in the cells of its map, which has all of them.

    The noise of a module in a pass is the median error of its first steps: of a tenth, at least one, at most `MOST`.
    The error of a step is the largest of its calls. Of an even number of steps, the median is the smaller middle one.
    A module that begins within its rounding, or does not run in the first steps, has the median noise of those that
    begin above theirs, as it will inherit that. A call is above the noise if its error is more than `ABOVE` times the
    noise and more than `ABOVE` times its own rounding.
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
        read = index.gather(numbers, ("step",))
        kinds, steps = read["kind"], read["step"]
        rows = [
            self._heat.modules.get(index.columns.call_site(call_site).module, -1)
            for call_site in index.call_site.tolist()
        ]
        place = np.array(rows, np.int64) * len(PHASES) + index.phase
        for start in range(0, len(kinds), TOGETHER):
            some = slice(start, start + TOGETHER)
            of = differs[some]
            self._add_cells(place[kinds[some][of]], steps[some][of] // self._heat.width, relative[some][of])
        noise = self._noise_of(index, numbers, kinds, steps, relative)
        if noise is None:
            return
        first: tuple[int, int, int] | None = None  # step, index and place of the first call above the noise
        for start in range(0, len(numbers), TOGETHER):
            part = slice(start, start + TOGETHER)
            found = np.flatnonzero(relative[part] > (noise * ABOVE)[kinds[part]]) + start
            if first is not None:
                found = found[steps[found] <= first[0]]
            found = found[relative[found] > ABOVE * rounding_of(index, numbers[found])]
            indexes = index.columns.gather(numbers[found], ("index",))["index"]
            for at in np.lexsort((indexes, steps[found]))[:1].tolist():
                here = int(steps[found[at]]), int(indexes[at]), int(found[at])
                first = here if first is None else min(first, here)
        if first is not None:
            self._keep(index, numbers[first[2]], float(relative[first[2]]), noise)

    def _keep(self, index: Index, number: Any, error: float, noise: Array) -> None:
        """Keep a call that is above the noise, unless one of another process comes before it."""
        (call,) = index.columns.calls_at(np.array([number]), given=False)
        if self._above is None or call.place < self._above[0]:
            figures = {
                "row": self._heat.modules.get(call.record.module),
                "error": "inf" if np.isinf(error) else rounded(error),
                "noise": rounded(float(noise[index.gather(np.array([number]))["kind"][0]])),
                "rounding": rounded(float(rounding_of(index, np.array([number]))[0])),
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

    def _noise_of(self, index: Index, numbers: Array, kinds: Array, steps: Array, relative: Array) -> Array | None:
        """The noise of the module and pass of each kind of call; None if there is only one step."""
        all_steps = np.unique(steps)
        if len(all_steps) < 2:
            return None
        count = max(1, min(MOST, len(all_steps) // PART))
        codes = index.module.astype(np.int64) * len(PHASES) + index.phase
        groups = GroupSums()
        early = np.flatnonzero(steps <= all_steps[count - 1])
        for start in range(0, len(early), TOGETHER):
            some = early[start : start + TOGETHER]
            errors, rounding = np.fmax(relative[some], 0.0), np.zeros(len(some))
            rounding[errors > 0] = rounding_of(index, numbers[some[errors > 0]])
            figures = {"error_max": errors, "rounding_max": rounding}
            groups.add([codes[kinds[some]], steps[some]], figures)
        modules, errors = groups.keys[0], groups.figures["error_max"]
        order = np.lexsort((errors, modules))
        found, starts, counts = np.unique(modules[order], return_index=True, return_counts=True)
        medians = errors[order][starts + (counts - 1) // 2]
        above = medians > np.maximum.reduceat(groups.figures["rounding_max"][order], starts)
        usual = float(np.sort(medians[above])[(above.sum() - 1) // 2]) if above.any() else 0.0
        self._steps, self._noise = max(self._steps, count), max(self._noise or 0.0, usual)
        noise = np.full(int(codes.max()) + 1, usual)
        noise[found[above]] = medians[above]
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


def rounding_of(index: Index, numbers: Array) -> Array:
    """By how much rounding may change the outputs of some calls, as a part of the largest magnitude of each.

    To an ulp of the coarsest dtype it adds what k terms in float32 gather, which are k in a product, and as many as the
    longest dimension elsewhere: `eps * sqrt(k)` of the output, or of `sqrt(k) rms(A) rms(B)` if the terms cancel. That
    leaves room for operands that differ by rounding.
    """
    rules = np.array([_rounds(index.columns.signature(each).record) for each in index.signature.tolist()])
    read = index.gather(numbers, ("lhs_rms", "rhs_rms", "output_min", "output_max"))
    ulp, wide, terms = rules[read["kind"]].T
    with np.errstate(all="ignore"):  # in a hostile run
        peaks = np.fmax(np.abs(read["output_min"]), np.abs(read["output_max"]))
        cancels = np.sqrt(terms) * read["lhs_rms"] * read["rhs_rms"] / peaks
    return np.asarray(ulp + wide * np.sqrt(terms) * np.where(np.isfinite(cancels), np.maximum(cancels, 1.0), 1.0))


def _rounds(record: CallRecord) -> tuple[float, float, int]:
    """The distance from 1 to the next number in the coarsest dtype and in sums, and how many terms these have."""
    tensors = [each for each in (record.lhs, record.rhs, *record.outputs) if each is not None]
    ulps = [2.0 ** -_BITS.get(each.dtype, 23) for each in tensors] or [2.0**-23]
    longest = max((size for each in tensors for size in each.shape), default=1)
    return max(ulps), min(max(ulps), 2.0**-23), max(1, longest if record.gemm is None else record.gemm.k)
