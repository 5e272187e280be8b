"""`Change`: what calls of A compute instead of what they do, and why; and the functions that they compute.

Invariant: an edit computes from what its call is given, and changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as _replace
from typing import Any, NamedTuple

import torch

from opintercept.runs.program.evaluate import Edit
from opintercept.runs.program.program import Step
from opintercept.runs.why.answer import CauseKind

Edits = Mapping[int, Edit]


class Change(NamedTuple):
    """A change of A's program.

    Attributes:
        rank: How far it is from plain; the least is named first.
        kind: What kind of cause it is.
        what: What B does, after "B".
        step: The call that it changes.
        edits: What calls compute instead, by their places.
        uniform: Whether B has it throughout, as products in int8.
    """

    rank: int
    kind: CauseKind
    what: str
    step: Step
    edits: Edits
    uniform: bool = False


def with_arguments(group: Sequence[Step], values: Mapping[str, Any]) -> Edits:
    """Other arguments; outputs that are of another size with them, such as statistics, are left out."""

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        made = _replace(step, arguments=step.arguments | {**values}, outputs=step.outputs[:1]).compute(x)
        sizes = [None if each is None else math.prod(each.shape) for each in step.outputs]
        return [
            each if each is not None and each.numel() == size else None for each, size in zip(made, sizes, strict=False)
        ]

    return dict.fromkeys((step.number for step in group), edit)


def with_number(group: Sequence[Step], name: str, value: float) -> Edits:
    """Another number for an argument."""
    return with_arguments(group, {name: value})


def with_operand(step: Step, place: int, value: torch.Tensor) -> Edits:
    return {step.number: replaced(None, place, value)}


def applying(function: Callable[[torch.Tensor], torch.Tensor], place: int) -> Edit:
    return lambda step, x: [function(x[place])]


def replaced(before: Edit | None, place: int, value: torch.Tensor) -> Edit:
    """Another tensor in a place, beside what was changed before."""

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        given = [value if at == place else each for at, each in enumerate(x)]
        return step.compute(given) if before is None else before(step, given)

    return edit


def called(other: Step, values: Mapping[str, torch.Tensor]) -> Edit:
    """B's call on A's operands, by the names of its parameters."""

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        own = {name: each for (name, _), each in zip(step.inputs, x, strict=True)}
        given = [values[name] if name in values else own[name].reshape(region.shape) for name, region in other.inputs]
        return _replace(other, outputs=step.outputs).compute(given)

    return edit


def swapped(one: int, two: int) -> Edit:
    """Two operands in each other's place."""
    places = {one: two, two: one}
    return lambda step, x: step.compute([x[places.get(at, at)] for at in range(len(x))])


def as_given(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    """What a call that writes to its first operands was given."""
    return x[: len(step.outputs)]


def constant(value: torch.Tensor) -> Edit:
    return lambda step, x: [value]


def scaled(group: Sequence[Step], factor: float) -> Edits:
    """Multiply what calls make."""

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        return [None if each is None else each * factor for each in step.compute(x)[:1]]

    return dict.fromkeys((step.number for step in group), edit)


def like(other: Step) -> Edit:
    """B's operator on A's operands."""

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        return _replace(other, outputs=step.outputs, stored=other.stored).compute(x[: len(other.inputs)])

    return edit


def before(other: Step, at: int, place: int, rest: Sequence[torch.Tensor | None]) -> Edit:
    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        changed = _applied(other, at, x[place], rest)
        return step.compute([changed.reshape(each.shape) if n == place else each for n, each in enumerate(x)])

    return edit


def behind(other: Step, at: int, rest: Sequence[torch.Tensor | None]) -> Edit:
    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        made = step.compute(x)
        first = made[0]
        return made if first is None else [_applied(other, at, first, rest).reshape(first.shape), *made[1:]]

    return edit


def _applied(other: Step, at: int, value: torch.Tensor, rest: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """What B's call makes of a value in one of its places, and of B's tensors in the others."""
    operands = [value.reshape(other.inputs[at][1].shape) if n == at else each for n, each in enumerate(rest)]
    if any(each is None for each in operands):
        raise ValueError("all operands must be known")
    found = other.compute([each for each in operands if each is not None])[0]
    if found is None:
        raise ValueError("an operator must make a tensor")
    return found


def rounded(dtype: torch.dtype, *, read: bool = False, made: bool = False) -> Edit:
    def down(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(torch.float64) if value.is_floating_point() else value

    def edit(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        found = step.compute([down(each) for each in x] if read else x)
        return [None if each is None else down(each) if made else each for each in found]

    return edit
