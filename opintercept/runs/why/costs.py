"""What causes cost the loss: A's loss with B's results put into it, one cause after the other.

Invariant: the costs add up to what all of them change, and none is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from opintercept.runs.program.evaluate import computed, read, recorded
from opintercept.runs.program.program import ProgramMemory, Step, last_uses
from opintercept.runs.why.answer import Cause, Loss
from opintercept.runs.why.changes.wording import place_of
from opintercept.runs.why.flow import Flow

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both


def loss_of(flow: Flow, changed: Mapping[int, torch.Tensor | None], end: int) -> float:
    """The loss of a program, in float64 from the first of some calls on.

    Args:
        flow: The program.
        changed: What these calls make; None for what was recorded.
        end: The place of the call that makes the loss.
    """
    program, memory, other = flow.program, ProgramMemory(flow.program.sizes), set[int]()
    last = last_uses(flow.steps[: end + 1])
    for step in flow.steps[: end + 1]:
        inputs = [region for _, region in step.inputs]
        if step.number in changed or any(inputs[place].memory in other for place in step.reads):
            made = computed(program, step, [read(program, each, memory) for each in inputs])
            if step.number in changed:
                own = changed[step.number]
                made = recorded(program, step) if own is None else [own, *made[1:]]
            for region, value in zip(step.outputs, made, strict=False):
                if region is not None and value is not None and value.is_floating_point():
                    memory.write(region, value.reshape(region.shape))
                    other.add(region.memory)
        else:
            for region in filter(None, step.outputs):
                if region.memory in other:
                    memory.write(region, torch.full(region.shape, torch.nan))
        if step.number != end:
            memory.forget(last.get(step.number, ()))
    region = flow.steps[end].outputs[0]
    assert region is not None
    return float(read(program, region, memory))


def loss_step(both: Both) -> Step | None:
    """The call of A that makes the loss: the root of backward, or else the last single number that both have."""
    flow, ends = both.a, both.counterparts.ends
    root = flow.program.root
    if root is not None and root < len(flow.steps) and root in ends:
        return flow.steps[root]
    single = (flow.steps[number] for number in reversed(flow.ends) if number in ends)
    return next((step for step in single if step.outputs[0] is not None and not step.outputs[0].shape), None)


def with_costs(both: Both, found: Sequence[tuple[Cause, list[int]]]) -> tuple[dict[int, Cause], Loss | None]:
    """The causes with their costs, by their ids, and the loss.

    Args:
        both: The programs.
        found: Each cause, and the places of the calls at which B's values were put into A's program.
    """
    step = loss_step(both)
    if step is None or step.outputs[0] is None:
        return {}, None
    recorded_a = float(both.a.program.value(step.outputs[0]).double())
    recorded_b = float(both.joints.values(both.counterparts.ends[step.number]))
    name = str(place_of(step))
    difference = recorded_b - recorded_a
    places = [number for _, numbers in found for number in numbers if number <= step.number]
    costs: dict[int, Cause] = {}
    if not places or not math.isfinite(difference):
        return {}, Loss(name, recorded_a, recorded_b)
    changed: dict[int, torch.Tensor | None] = dict.fromkeys(places)
    before = start = loss_of(both.a, changed, step.number)
    for cause, numbers in sorted(found, key=lambda each: min(each[1])):
        changed |= {number: both.forced[number].values for number in numbers if number in changed}
        now = loss_of(both.a, changed, step.number)
        cost = now - before
        costs[id(cause)] = replace(cause, cost=cost, share=cost / difference if difference else math.nan)
        before = now
    return costs, Loss(name, recorded_a, recorded_b, difference - (before - start))
