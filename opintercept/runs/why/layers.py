"""What the rounding of each layer costs the loss, where nothing but rounding differs: which layer should stay in full.

Invariant: the costs add up to what B's values change, and none is estimated.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from opintercept.runs.program.names import module_name
from opintercept.runs.program.program import Step
from opintercept.runs.why.answer import Layer, Loss
from opintercept.runs.why.costs import loss_step, losses_changed
from opintercept.runs.why.sweep import Sweep

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both

_WORK = 1 << 29  # numbers that may be read and made
_CALL = 1 << 14  # numbers as long to read as a call takes
_LEAST = 8  # parts that a program is cut into, however large it is


def with_layers(both: Both, sweep: Sweep, loss: Loss) -> tuple[tuple[Layer, ...], Loss]:
    """What each layer costs, in A's order, and the loss with what is left.

    B's values are put into A's program, one module after the other: a module's cost is what the loss changes by when
    it has B's values, too. The names are as deep as time allows.

    Args:
        both: The programs.
        sweep: B's values, by the places of A's calls.
        loss: The loss of both.
    """
    end = loss_step(both)
    if end is None or not math.isfinite(loss.b - loss.a):
        return (), loss
    flow = both.a
    places = [
        number
        for number in sorted(sweep.joined)
        if number in flow.active and number < end.number and flow.makes_real(flow.steps[number])
    ]
    read = sum(
        max(_CALL, sum(math.prod(region.shape) for _, region in step.inputs)) for step in flow.steps[: end.number]
    )
    parts = _parts([flow.steps[number] for number in places], max(_LEAST, 2 * _WORK // max(read, 1)))
    costs: dict[str, float] = {}
    values = ({number: sweep.joined[number].values for number in part} for _, part in parts)
    changed = losses_changed(flow, ((each, {}) for each in values), end.number, 0)
    for (name, _), cost in zip(parts, changed, strict=True):
        costs[name] = costs.get(name, 0.0) + cost
    change = loss.b - loss.a
    layers = tuple(Layer(name, cost, cost / change if change else math.nan) for name, cost in costs.items())
    return layers, Loss(loss.name, loss.a, loss.b, change - sum(costs.values()))


def _parts(steps: list[Step], most: int) -> list[tuple[str, list[int]]]:
    """Calls that follow each other and are of one module, by names as deep as gives no more parts than asked for."""
    names = [
        (module_name(step.stored.record.module) or (step.stored.record.source or "").partition(" ")[0]).split(".")
        for step in steps
    ]
    found: list[tuple[str, list[int]]] = []
    for depth in range(1, 1 + max(map(len, names), default=0)):
        cut = (".".join(name[:depth]) for name in names)
        runs = itertools.groupby(zip(cut, steps, strict=True), key=lambda each: each[0])
        deeper = [(name, [step.number for _, step in each]) for name, each in runs]
        if found and len(deeper) > most:
            break
        found = deeper
    return found
