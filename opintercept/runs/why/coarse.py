"""Finds weights that one program has in fewer bits throughout: that is told once, and accuses nobody.

Invariant: a weight of which a row is off by more than that is left to the judge.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from opintercept.runs.program.program import Region
from opintercept.runs.why.counterparts import Counterparts, weight_place
from opintercept.runs.why.quantised import quantised

_UNIFORM = 1 / 3  # of the weights that are quantised where all are meant to be
_CLOSE = 0.3  # how far a table may be from the other run's, relative to its norm


@dataclass(frozen=True, slots=True)
class CoarseWeights:
    """Weights in fewer bits.

    Attributes:
        what: What B has, after "B"; empty if weights are not coarser throughout.
        values: B's values of A's weights, `float64`, with where they lie, by their memory.
    """

    what: str = ""
    values: dict[int, tuple[Region, torch.Tensor]] = field(default_factory=dict)


def coarse_weights(counterparts: Counterparts, dtype: torch.dtype) -> CoarseWeights:
    """The weights of products and tables that B has in fewer bits, or in more, if most are.

    Args:
        counterparts: What belongs to what in two programs.
        dtype: That of the coarser program, whose rounding is none of this.
    """
    flow = counterparts.a
    found: dict[int, tuple[str, Region, torch.Tensor]] = {}
    seen, heads, last = set[int](), set[int](), {*flow.final_products(backward=False)}
    partly: Counter[str] = Counter()  # weights of which a row is another one
    for number in (*sorted(counterparts.by_weight), *(s.number for s in flow.steps if s.operator == "embedding")):
        step = flow.steps[number]
        place = weight_place(step)
        region = None if place is None else step.inputs[place][1]
        if region is None or region.memory in seen:
            continue
        seen.add(region.memory)
        heads |= {region.memory} if number in last else set()
        if _is_equal(counterparts, number, region):
            continue
        rows = counterparts.weight_rows(number) if number in counterparts.by_weight else _table(counterparts, region)
        if rows is None or rows[0].shape != rows[1].shape or torch.equal(*rows):
            continue
        mine, theirs = rows
        if torch.equal(theirs, theirs.round()):  # codes, which are scaled behind the product
            theirs = theirs * _scales(counterparts, number, mine, theirs)[:, None]
        match = counterparts.match(number)
        both = mine, theirs
        words, whole = _words(*(both if match is None else map(match.as_in_b, both)))
        if words is not None and words.endswith(str(dtype).removeprefix("torch.")):
            continue
        if words is not None and not whole:
            partly[words] += 1
        elif words is not None and mine.numel() == math.prod(region.shape):
            turned = mine.shape != region.shape or step.operator not in ("linear", "embedding")
            moved = (theirs - mine).mT if turned else theirs - mine  # both with what low-rank products add
            found[region.memory] = words, region, flow.program.value(region).double() + moved
    most = Counter(words for words, _, _ in found.values()).most_common(1)
    rounded = bool(most) and most[0][0].endswith("float16")
    least = min(2, len(seen - heads) or 1)  # quantisers leave the last product in full
    if not most or most[0][1] + partly[most[0][0]] < max(least, 0 if rounded else _UNIFORM * len(seen)):
        return CoarseWeights()
    chosen = {memory: (region, values) for memory, (words, region, values) in found.items() if words == most[0][0]}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        if most[0][0].endswith(name):
            tables = {region.memory for step in flow.steps if step.operator == "embedding" for _, region in step.inputs}
            whole = seen - tables <= chosen.keys()  # so are those that a run of products does not show
            chosen |= _rounded(counterparts, dtype, {*chosen}, assumed=counterparts.partial and whole)
    return CoarseWeights(f"{most[0][0]}: {most[0][1]} of {len(seen)} weights", chosen)


def _is_equal(counterparts: Counterparts, number: int, region: Region) -> bool:
    """Whether B multiplies by the same bits, which need not be read to see it."""
    joints, exact = counterparts.joints, counterparts.joints.exact(counterparts.a.program, region)
    steps = [piece.step for piece in counterparts.by_weight.get(number, ())]
    theirs = [joints.of(step.inputs[place][1]) for step in steps if (place := weight_place(step)) is not None]
    return (
        exact is not None and bool(steps) and all(each is exact.tensor for each in theirs) and len(theirs) == len(steps)
    )


def _words(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[str | None, bool]:
    """What B has of the weights of A, None if it is neither coarser nor finer; and whether of all of their rows."""
    partly = None
    for one, other, words in (
        (mine, theirs, "has its weights in"),
        (theirs, mine, "has in full the weights that A has in"),
    ):
        for x, y in ((one, other), (one.mT, other.mT)):
            bits, wrong = quantised(x.contiguous(), y.contiguous())
            if bits and not bool(wrong.any()):
                return f"{words} {bits}", True
            partly = partly or (f"{words} {bits}" if bits else None)
    return partly, False


def _rounded(
    counterparts: Counterparts, dtype: torch.dtype, known: set[int], *, assumed: bool
) -> dict[int, tuple[Region, torch.Tensor]]:
    """The other parameters of A that B has rounded to a dtype, as of norms; all of them if that is `assumed`."""
    flow, joints, found = counterparts.a, counterparts.joints, dict[int, tuple[Region, torch.Tensor]]()
    for step in flow.steps:
        for _, region in step.inputs:
            if region.memory in known or not region.weight or joints.exact(flow.program, region) is not None:
                continue
            known.add(region.memory)
            mine = flow.program.value(region)
            for tensor in joints.of_shape(region.shape):
                theirs = joints.values(tensor)
                if torch.equal(theirs, mine.to(dtype).double()):
                    found[region.memory] = region, theirs
            if assumed:
                found[region.memory] = region, mine.to(dtype).double()
    return found


def _scales(counterparts: Counterparts, number: int, mine: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """What B multiplies each row of codes by, as what it makes shows; else what brings them nearest to A's."""
    raw, scaled = counterparts.scaled(number)
    if raw is not None and scaled is not None and raw.shape == scaled.shape and raw.shape[1] == len(codes):
        return (raw * scaled).sum(0) / raw.square().sum(0).clamp_min(1e-300)
    return (mine * codes).sum(1) / codes.square().sum(1).clamp_min(1)


def _table(counterparts: Counterparts, region: Region) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A table of A and the nearest one of B that is as large."""
    mine = counterparts.a.program.value(region).double()
    size, best = float(mine.norm()), None
    for tensor in counterparts.joints.of_shape(region.shape):
        theirs = counterparts.joints.values(tensor)
        far = float((theirs - mine).norm())
        if far <= _CLOSE * size and (best is None or far < best[0]):
            best = far, theirs
    return None if best is None else (mine, best[1])
