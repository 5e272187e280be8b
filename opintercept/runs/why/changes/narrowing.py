"""Narrows a region of A: to the least one in whose place a value of B makes what B makes of all.

Invariant: what A computes behind the narrower region is what B computes there.
"""

from __future__ import annotations

import math

from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.edits import constant
from opintercept.runs.why.counterparts import Counterpart, nearest
from opintercept.runs.why.flow import is_real
from opintercept.runs.why.joints import Joint
from opintercept.runs.why.noise import LIMIT

_WORK = 1e8  # numbers that may be read for it
_LARGEST = 1 << 22  # numbers of a value that is tried
_MOST = 12  # values of B that are tried in one place


def narrowed(accused: Accused) -> Accused:
    """The narrowest region that can be found; the region itself if it is that."""
    end, found = accused.judge.searched + _WORK, accused
    for number in sorted(accused.part, reverse=True):
        if accused.judge.searched > end or len(found.steps) == 1:
            break
        if number in found.part and number != found.end.number:
            found = _up_to(accused, found, number) or found
    return found


def _up_to(accused: Accused, found: Accused, number: int) -> Accused | None:
    """The part of a region that ends with a call, if B has a value for that which makes B's result."""
    judge, sweep = accused.judge, accused.sweep
    step = judge.a.steps[number]
    region = step.outputs[0] if step.outputs else None
    if (
        region is None
        or number not in sweep.made
        or number not in judge.a.active
        or not is_real(judge.a.program, region)
    ):
        return None
    size, base = math.prod(region.shape), sweep.made[number].base
    others = [other for other in found.steps_b if other.number in judge.b.active and other.outputs]
    tried = 0
    for other in sorted(others, key=lambda each: (each.operator != step.operator, each.number)):
        made = judge.joints.made_by(other)
        if made is None or not 1 < math.prod(made.region.shape) == size <= _LARGEST or tried == _MOST:
            continue
        tried += 1
        values = nearest(judge.joints.values(made), base)
        if accused.ratio({number: constant(values)}) <= LIMIT:
            part = sorted(judge.a.before([number], sweep.joined, sweep.edges))
            return Accused(sweep, part, Counterpart(number, Joint(made, values), other, "operands"), judge)
    return None
