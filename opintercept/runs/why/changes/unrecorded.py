"""The changes of A in parameters that a run of products does not show: weights and biases of norms, and of products.

Invariant: a parameter is solved for from more numbers than it has, so that not any values of B follow from one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.edits import Change, constant, with_operand
from opintercept.runs.why.changes.wording import apart, biases_of, operand_words, place_of
from opintercept.runs.why.flow import LEAF, is_product
from opintercept.runs.why.noise import LIMIT

_ROWS = 4  # that tell each number of a parameter


def parameters(accused: Accused) -> Iterator[Change]:
    """Another vector of factors or of what is added, which B's result says: that is linear in them."""
    flow, width = accused.judge.a, accused.target.shape[-1:]
    for step in accused.steps if accused.judge.partial else ():
        for place, (name, region) in enumerate(step.inputs):
            if region.shape != width or flow.writers[step.number][place] != {LEAF}:
                continue
            own = accused.given(step)[place].double()
            made = [accused.run(with_operand(step, place, torch.full_like(own, each))) for each in (0.0, 1.0)]
            if made[0] is None or made[1] is None or made[0].shape != accused.target.shape:
                continue
            base, slope = (each.reshape(-1, len(own)) for each in (made[0], made[1] - made[0]))
            square = slope.square().sum(0)
            if len(slope) < _ROWS or not bool((square > 0).all()):
                continue
            other = (slope * (accused.target.reshape(base.shape) - base)).sum(0) / square
            noise = LIMIT * accused.rows.square().mean().sqrt() * (len(slope) / square).sqrt()
            other = other.where((other - own).abs() > noise, own)
            if not torch.equal(other, own):
                words = f"has another {operand_words(step, name, region)}: {apart(own, other)}"
                yield Change(2, "weight", words, step, with_operand(step, place, other))


def biases(accused: Accused) -> Iterator[Change]:
    """No bias in a product right before, of which B may add one or none outside of it."""
    for step in accused.steps:
        bias, joint = accused.judge.counterparts.unseen_bias(step.number), accused.sweep.joined.get(step.number)
        if bias is not None and joint is not None:
            yield Change(1, "operator", "has no bias here", step, {step.number: constant(joint.values - bias)})


def rows(accused: Accused) -> Iterator[Change]:
    """Other rows of what a call makes, of which a product reads a part, as those of another token."""
    judge, step, other = accused.judge, accused.end, accused.found.step
    if not judge.partial or other is None or not is_product(step.stored):
        return
    place, there = (min(each.reads - biases_of(each), default=None) for each in (step, other))
    if place is None or there is None:  # a packed product tells nothing of what it reads
        return
    (maker, *others) = judge.a.writers[step.number][place]
    theirs = judge.joints.of(other.inputs[there][1])
    if others or theirs is None or maker not in accused.sweep.made:
        return
    spread, own = accused.sweep.made[maker], accused.given(step)[place]
    values = judge.joints.values(theirs)
    if values.numel() != own.numel() or spread.base.numel() == own.numel() or spread.base.shape[-1:] != own.shape[-1:]:
        return
    near = torch.cdist(values.reshape(-1, own.shape[-1]), spread.base.reshape(-1, own.shape[-1])).amin(1)
    if bool((near <= LIMIT * spread.usual(theirs.unit) * math.sqrt(own.shape[-1])).all()):
        words = f"reads another part of the result of {place_of(judge.a.steps[maker])}"
        yield Change(1, "operand", words, step, with_operand(step, place, values.reshape(own.shape)))
