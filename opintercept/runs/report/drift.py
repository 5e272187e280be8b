"""`Drift`: the error of each module between two runs over the steps, and where it first exceeds their noise.

Invariant: it has a bounded size, however many steps a column of the map has. An error within `ABOVE` times its rounding
is not above the noise. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept._values.roundoff import eps, of_terms
from opintercept.runs.compare.pairs import PHASES, Index
from opintercept.runs.report.panels import HeatMap, rounded
from opintercept.runs.store.columns import Array
from opintercept.runs.sums import GroupSums

PART, MOST = 10, 50  # the first tenth of the columns, and at most so many, show the noise
ABOVE = 10.0  # an error is above the noise if it is so many times as large
TOGETHER = 1 << 18  # calls that are grouped together, which takes fifty bytes each


class Drift:
    """Errors of the outputs of calls of run A, in the cells of its map, which has all of them.

    The noise of a module in a pass is the median error of its first columns: of a tenth, at least one, at most `MOST`.
    Of an even number of columns, the median is the smaller middle one. A module that begins within its rounding, or
    does not run in the first columns, has the median noise of those that begin above theirs, as it will inherit that.
    A cell is above the noise if its error is more than `ABOVE` times that and more than `ABOVE` times its rounding.
    """

    def __init__(self, heat: HeatMap) -> None:
        self._heat = heat
        self._cells = GroupSums()  # by `HeatMap.spot` and column: the largest error, how many calls differ, and by Inf
        self._rounds = np.zeros((len(heat.modules) * len(PHASES), 2))  # of each spot, as `_rounds` has it

    def add(self, index: Index, numbers: Array, relative: Array) -> None:
        """Add calls of run A that differ, with the relative errors of their outputs, negative if unknown."""
        sites = (index.columns.call_site(call_site).module for call_site in index.kinds["call_site"].tolist())
        rows = np.array([self._heat.modules.get(module, -1) for module in sites], np.int64)
        of_kinds = rows * len(PHASES) + index.kinds["phase"]
        rounds = [_rounds(index.columns.signature(each).record) for each in index.kinds["signature"].tolist()]
        np.maximum.at(self._rounds, of_kinds[rows >= 0], np.array(rounds)[rows >= 0])
        for start in range(0, len(numbers), TOGETHER):
            read = index.gather(numbers[start : start + TOGETHER], ("step",))
            known = rows[read["kind"]] >= 0
            spots, columns = of_kinds[read["kind"]][known], read["step"][known] // self._heat.width
            errors = relative[start : start + TOGETHER][known]
            finite = np.where((errors >= 0) & np.isfinite(errors), errors, np.nan)
            figures = {"error_max": finite, "calls": np.ones(len(errors)), "inf": np.isinf(errors)}
            self._cells.add([spots, columns], figures)

    def as_dict(self) -> dict[str, Any]:
        """The errors and what is above the noise, as plain data."""
        columns = {column: number for number, column in enumerate(self._heat.columns.tolist())}
        phases: dict[str, dict[str, list[Any]]] = {}
        errors = self._heat.table("calls") * 0.0  # NaN where a module has no calls
        cells = zip(*(each.tolist() for each in (*self._cells.keys, *self._cells.figures.values())), strict=True)
        for spot, column, error, calls, infinite in cells:
            row, phase = divmod(spot, len(PHASES))
            if column not in columns:  # not in a run that stays as it is
                continue
            lists = phases.setdefault(PHASES[phase], {name: [] for name in ("row", "column", "error", "calls", "inf")})
            cell = (row, columns[column], rounded(error), int(calls), int(infinite))
            for values, value in zip(lists.values(), cell, strict=True):
                values.append(value)
            errors[spot, columns[column]] = np.inf if infinite else np.fmax(error, 0.0)
        return {"phases": phases} | self._above(errors)

    def _above(self, errors: Array) -> dict[str, Any]:
        """The noise, and the first cell whose error is above it."""
        if errors.shape[1] < 2:
            return {"noise": None, "above": None}
        count = max(1, min(MOST, errors.shape[1] // PART))
        early = np.sort(errors[:, :count], axis=1)  # NaN comes last
        middle = np.maximum((~np.isnan(early)).sum(1) - 1, 0) // 2
        medians = np.nan_to_num(early[np.arange(len(early)), middle])
        rounding = self._rounding()
        begins_above = medians > np.nan_to_num(rounding[:, :count]).max(1)
        usual = float(np.sort(medians[begins_above])[(begins_above.sum() - 1) // 2]) if begins_above.any() else 0.0
        noise = np.where(begins_above, medians, usual)[:, None]
        columns, spots = np.nonzero((errors > ABOVE * np.fmax(noise, rounding)).T)
        found = {"steps": count * self._heat.width, "usual": rounded(usual), "times": ABOVE}
        if not len(spots):
            return {"noise": found, "above": None}
        at = int(spots[0]), int(columns[0])
        row, phase = divmod(at[0], len(PHASES))
        figures = zip(("error", "noise", "rounding"), (errors[at], noise[at[0], 0], rounding[at]), strict=True)
        sizes = {name: "inf" if np.isinf(size) else rounded(size) for name, size in figures}
        return {"noise": found, "above": {"row": row, "phase": PHASES[phase], "column": at[1]} | sizes}

    def _rounding(self) -> Array:
        """By how much rounding may change the outputs of each cell, as a part of their largest magnitude."""
        eps, terms = self._rounds.T[:, :, None]
        with np.errstate(all="ignore"):  # in a hostile run
            peaks = np.fmax(np.abs(self._heat.table("output_min")), np.abs(self._heat.table("output_max")))
            operands = self._heat.table("lhs_rms") * self._heat.table("rhs_rms") / peaks
            usual = terms**-0.5  # as large as products whose sums do not cancel
            operands = np.where(np.isfinite(operands), np.maximum(operands, usual), usual)
            return np.asarray(of_terms(eps, terms, operands, 1.0))


def _rounds(record: CallRecord) -> tuple[float, int]:
    """The distance from 1 to the next number in the coarsest dtype, and how many terms the sums have."""
    tensors = [each for each in (record.lhs, record.rhs, *record.outputs) if each is not None]
    longest = max((size for each in tensors for size in each.shape), default=1)
    return max((eps(each.dtype) for each in tensors), default=0.0), max(1, record.gemm.k if record.gemm else longest)
