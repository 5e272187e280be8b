"""`counterparts`: which call of B computes what a call of A does."""

from __future__ import annotations

import math

from opintercept.runs.compare.index import Index, Pairs
from opintercept.runs.compare.pairing import Ids, first_models, module_name
from opintercept.runs.explain.program import Program, Step


def counterparts(a: Program, b: Program) -> dict[int, int]:
    """The places of B's calls by those of A's.

    Calls pair as in `runs.diff`: by module, operator and order. Where a module has other operators, such as another
    activation or a quantised layer, the last ones of such stretches do, if their outputs have the same size.
    """
    ids = Ids()
    one, other = (Index(side.run.columns(side.rank), ids, None) for side in (a, b))
    one.model, other.model = first_models(one.names, other.names) or ("", "")
    of_a = Pairs(one, other).of_a()
    found = {place: b.numbers[of_a[number]] for number, place in a.numbers.items() if of_a.get(number) in b.numbers}
    found = {i: j for i, j in found.items() if _same_size(a.steps[i], b.steps[j])}
    taken = set(found.values())
    left_b = _stretches([step for step in b.steps if step.number not in taken])
    for module, stretches in _stretches([step for step in a.steps if step.number not in found]).items():
        for mine, theirs in zip(stretches, left_b.get(module, []), strict=False):
            if _same_size(mine[-1], theirs[-1]):
                found[mine[-1].number] = theirs[-1].number
    return found


def _same_size(one: Step, other: Step) -> bool:
    """Whether the outputs hold the same number of elements; the program may have flattened some dimensions."""
    sizes = [[math.prod(each.shape) for each in step.outputs if each is not None][:1] for step in (one, other)]
    return sizes[0] == sizes[1]


def _stretches(steps: list[Step]) -> dict[str | None, list[list[Step]]]:
    """The stretches of consecutive calls by module."""
    found: dict[str | None, list[list[Step]]] = {}
    before = -2
    for step in steps:
        module = module_name(step.stored.record.module)
        parts = found.setdefault(module, [])
        if step.number == before + 1 and parts and parts[-1][-1].number == before:
            parts[-1].append(step)
        else:
            parts.append([step])
        before = step.number
    return found
