"""What causes cost the loss: A's loss with B's results put into it, one cause after the other.

Invariant: the costs add up to what all of them change, and none is estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from opintercept.runs.program.evaluate import computed, read
from opintercept.runs.program.program import ProgramMemory, Region, Step, last_uses
from opintercept.runs.why.answer import Cause, Loss
from opintercept.runs.why.changes.wording import place_of
from opintercept.runs.why.flow import Flow

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both

Weights = Mapping[int, tuple[Region, torch.Tensor]]


def loss_with(flow: Flow, forced: Mapping[int, torch.Tensor], end: int, begin: int, weights: Weights) -> float:
    """The loss of a program, in float64, of which nothing is computed that the loss does not need.

    Args:
        flow: The program.
        forced: What these calls make, in place of what the program computes.
        end: The place of the call that makes the loss.
        begin: The place of the first call that is computed; what earlier ones make is as it was recorded.
        weights: The values of weights that are others, and where they lie, by their memory.
    """
    program, memory = flow.program, ProgramMemory(flow.program.sizes)
    known = {number for number in forced if number != end and _makes_one(flow, number)}
    part = flow.before([end], {*known, *range(begin)}, ())
    read_by = (writers for number in part for writers in flow.writers[number])
    steps = [flow.steps[number] for number in sorted(part.union(*(writers & known for writers in read_by)))]
    last, left = last_uses(steps), {**weights}
    for step in steps:
        for place in step.reads - step.written:
            if (weight := left.pop(step.inputs[place][1].memory, None)) is not None:
                memory.write(weight[0], weight[1].reshape(weight[0].shape))
        made = []
        if step.number not in known:
            made = computed(program, step, [read(program, region, memory) for _, region in step.inputs])
        if step.number in forced:
            made[:1] = [forced[step.number]]
        for region, value in zip(step.outputs, made, strict=False):
            if region is not None and value is not None and value.is_floating_point():
                memory.write(region, value.reshape(region.shape))
        if step.number != end:
            memory.forget(last.get(step.number, ()))
    region = flow.steps[end].outputs[0]
    assert region is not None
    return float(read(program, region, memory))


def losses_changed(
    flow: Flow, puts: Iterable[tuple[Mapping[int, torch.Tensor], Weights]], end: int, begin: int
) -> Iterator[float]:
    """What the loss changes by, as `loss_with` computes it, with one result or weight of B after the other."""
    forced, weights = dict[int, torch.Tensor](), dict[int, tuple[Region, torch.Tensor]]()
    before = loss_with(flow, forced, end, begin, weights)
    for values, others in puts:
        forced |= values
        weights |= others
        now = loss_with(flow, forced, end, begin, weights)
        yield now - before
        before = now


def _makes_one(flow: Flow, number: int) -> bool:
    """Whether later calls read nothing of a call but its first output."""
    others = {region.memory for region in flow.steps[number].outputs[1:] if region is not None}
    return not any(flow.steps[user].inputs[place][1].memory in others for user, place in flow.users[number])


def loss_step(both: Both) -> Step | None:
    """The call of A that makes the loss: the root of backward, or else the last single number that both have."""
    flow, ends = both.a, both.counterparts.ends
    root = flow.program.root
    able = [root] if root is not None and root < len(flow.steps) else []
    steps = (flow.steps[number] for number in (*able, *reversed(flow.ends)) if number in ends)
    return next((step for step in steps if step.outputs[0] is not None and not step.outputs[0].shape), None)


def with_costs(
    both: Both, found: Sequence[tuple[Cause, list[int]]], weights: Weights
) -> tuple[list[Cause], Loss | None]:
    """The causes with their costs, and the loss.

    Args:
        both: The programs.
        found: Each cause, and the places of the calls at which B's values were put into A's program; none for that of
            weights in fewer bits.
        weights: These, as in B, by their memory.
    """
    step = loss_step(both)
    if step is None or step.outputs[0] is None:
        return [cause for cause, _ in found], None
    recorded_a = float(both.a.program.value(step.outputs[0]).double())
    recorded_b = float(both.joints.values(both.counterparts.ends[step.number]))
    name = str(place_of(step))
    difference = recorded_b - recorded_a
    places = [number for _, numbers in found for number in numbers if number <= step.number]
    readers = [each.number for each in both.a.steps if any(region.memory in weights for _, region in each.inputs)]
    starts = [*places, *readers[:1]]
    if not starts or not math.isfinite(difference):
        return [cause for cause, _ in found], Loss(name, recorded_a, recorded_b)
    # One by one, for B's values have the effects of what lies before, of other causes too.
    order = sorted((number, at) for at, (_, numbers) in enumerate(found) for number in numbers or (-1,))
    order = [each for each in order if each[0] <= step.number]
    puts = (({}, weights) if number < 0 else ({number: both.forced[number].values}, {}) for number, _ in order)
    totals = [0.0 for _ in found]
    for (_, at), cost in zip(order, losses_changed(both.a, puts, step.number, min(starts)), strict=True):
        totals[at] += cost
    costed = [
        replace(cause, cost=cost, share=cost / difference if difference else math.nan)
        for (cause, _), cost in zip(found, totals, strict=True)
    ]
    return costed, Loss(name, recorded_a, recorded_b, difference - sum(totals))
