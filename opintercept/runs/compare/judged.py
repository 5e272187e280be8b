"""`judged`: what the judge of `why` says of two runs that `diff` compares, and `story`: the kinds of pairs by that.

Invariant: `diff` blames nothing that the judge acquits. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept.runs.compare.tolerance import OPERANDS
from opintercept.runs.compare.totals import ADDED, ARGUMENT, INHERITED, NOT_COMPARED, OPERAND, ROUNDING
from opintercept.runs.store.columns import Array, Columns
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer, Cause
from opintercept.runs.why.why import why

_MOST_CALLS = 2_000  # of a run that is judged here: the judge takes more than linear time
_MOST_BYTES = 1 << 31  # of recorded values
_MOST_TEXT = 4 << 20  # bytes of all else that the judge keeps of a run
_WEIGHTS = OPERANDS["rhs"] | OPERANDS["bias"]


def unjudged(a: Run, b: Run, sides: tuple[Columns, Columns]) -> str:
    """Why two runs are not judged, in words; empty if they are."""
    kept = {info.tensors for run in (a, b) for info in run.infos.values()}
    if kept != {"full"}:
        return "no values were recorded" if kept <= {"none", "stats"} else "not all values were recorded"
    if any(len(run.ranks) > 1 for run in (a, b)):
        return "runs of several processes are not judged"
    held = [_held(run) for run in (a, b)]
    if not all(values for values, _ in held):
        return "no values were recorded"
    large = any(values > _MOST_BYTES or text > _MOST_TEXT for values, text in held)
    if max(map(len, sides)) > _MOST_CALLS or large:
        return "there are too many calls or values to judge them here"
    return ""


def _held(run: Run) -> tuple[int, int]:
    """How many bytes a run has of values, and of all else."""
    sizes = [
        (path.suffix == ".safetensors", path.stat().st_size) for path in Path(run.path).rglob("*") if path.is_file()
    ]
    return sum(size for values, size in sizes if values), sum(size for values, size in sizes if not values)


def judged(a: Run, b: Run) -> Answer | str:
    """What `why` says of two runs; or why it says nothing, in words."""
    try:
        return why(a, b)
    except OpInterceptError as failed:
        return f"they cannot be judged: {failed}"


def decides(answer: Answer | str) -> bool:
    """Whether the judge has compared what the programs come to."""
    if not isinstance(answer, Answer) or (answer.equal and answer.operators == "products"):
        return False
    return answer.verdict != "not compared"


def story(rows: Array, index: Array, begins: int, answer: Answer) -> Array:
    """Set the kinds and the changed operands of pairs that are not known to be equal, in the order of A's calls.

    Return which of them stand for what the judge blames, or inherit it where that has no counterpart. `index` has
    `CallRecord.index` of A's calls, and `begins` that of its first product: weights and inputs made before it are not
    judged by themselves.
    """
    own, changed, kinds = rows["kind"].copy(), rows["changed"].copy(), rows["kind"]
    kinds[own != NOT_COMPARED] = ROUNDING
    blamed = np.zeros(len(rows), bool)
    rows["changed"] = 0
    causes = sorted((*answer.causes, *answer.coarser), key=lambda cause: cause.place.index)
    if answer.equal or not len(rows) or not causes:  # a generated kernel may be wrong where nothing else comes of it
        return blamed
    of_index = {place.index: cause for cause in reversed(causes) for place in (*cause.also, cause.place)}
    found = {row: of_index[each] for row, each in enumerate(index.tolist()) if each in of_index}
    if (first := _first(index, own, causes[0])) is not None:
        found[first] = causes[0]
    begin = min([causes[0].place.index, *index[[*found]].tolist()])
    kinds[(index > begin) & (rows["differing"] > 0)] = INHERITED
    early = index < begins
    kinds[early], rows["changed"][early] = own[early], changed[early]
    for row, cause in found.items():
        operands = int(rows["differing"][row])
        blamed[row] = True
        if own[row] == ARGUMENT:
            kinds[row] = ARGUMENT
        elif cause.kind == "result" or not operands:
            kinds[row] = ADDED
        else:
            kinds[row] = OPERAND
            rows["changed"][row] = (operands & _WEIGHTS if cause.kind == "weight" else 0) or operands
    if not blamed.any():  # what is blamed has no counterpart
        blamed = kinds == INHERITED
    if not blamed.any():
        blamed = own != NOT_COMPARED
        kinds[blamed] = own[blamed]
    return blamed


def _first(index: Array, own: Array, cause: Cause) -> int | None:
    """The pair that stands for the first cause: at its place, or in the region of it."""
    upto = index <= cause.place.index
    inside = upto & (index > max((place.index for place in cause.after), default=-1))
    arguments = upto & (own == ARGUMENT) & (not cause.what)  # an argument says more than "I do not know"
    for found in (arguments, index == cause.place.index, inside & (own != NOT_COMPARED)):
        if found.any():
            return int(np.argmax(found))
    return None
