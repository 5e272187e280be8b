"""The changes of A in which a call is given another number, flag or list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from opintercept.runs.program.evaluate import moves
from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.edits import Change, Edits, scaled, with_arguments, with_number
from opintercept.runs.why.changes.wording import argument_of, argument_words, differing, name_of, others_of
from opintercept.runs.why.noise import LIMIT

_FEW = 8  # numbers of a result that do not tell whether a number that fits them is B's


def arguments(accused: Accused) -> Iterator[Change]:
    """B's number, flag or list for an argument."""
    done = set()
    for group in accused.groups():
        for other in (*accused.steps_b, *accused.before_b):
            for name, (mine, theirs) in differing(group[0], other).items():
                key = (*(each.number for each in group), name, repr(theirs))
                if key not in done:
                    done.add(key)
                    words = f"uses {argument_words(name, mine, theirs)}"
                    yield Change(0, "argument", words, group[0], with_arguments(group, {name: theirs}))


def theirs(accused: Accused) -> Iterator[Change]:
    """B's numbers for an argument, where B has other operators, as an engine's norm in one call."""
    own = {step.operator for step in accused.steps}
    others = (step for step in accused.steps_b if step.operator not in own)
    found = dict.fromkeys(each for step in others for each in step.arguments.values() if isinstance(each, float))
    for group in accused.groups():
        for argument in group[0].overload._schema.arguments if group[0].overload is not None else ():
            mine = argument_of(group[0], argument.name)
            for value in found if isinstance(mine, float) else ():
                if value != mine:
                    words = f"uses {argument_words(argument.name, mine, value)}"
                    yield Change(0, "argument", words, group[0], with_number(group, argument.name, value))


def together(accused: Accused) -> Iterator[Change]:
    """All of B's numbers, flags and lists at once, where several differ."""
    for group in accused.groups():
        for other in accused.steps_b:
            differ = differing(group[0], other)
            if len(differ) > 1:
                words = " and ".join(argument_words(name, *pair) for name, pair in differ.items())
                values = {name: theirs for name, (_, theirs) in differ.items()}
                yield Change(1, "argument", f"uses {words}", group[0], with_arguments(group, values))


def variants(accused: Accused) -> Iterator[Change]:
    """Other flags and small whole numbers, for B may have other operators and no such argument."""
    for step in accused.steps:
        schema = getattr(step.overload, "_schema", None)
        for argument in () if schema is None else schema.arguments:
            mine = argument_of(step, argument.name)
            for theirs in others_of(mine):
                words = f"uses {argument_words(argument.name, mine, theirs)}"
                yield Change(3, "argument", words, step, with_arguments([step], {argument.name: theirs}))


def numbers(accused: Accused) -> Iterator[Change]:
    """Numbers that are fitted to B: arguments, and factors of what calls make."""
    for group in accused.groups():
        step = group[0]
        for argument in step.overload._schema.arguments if step.overload is not None else ():
            given = argument_of(step, argument.name)
            kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
            if kind in ("number", "float", "Tensor") and isinstance(given, float):
                value = _fitted(accused, partial(with_number, group, argument.name), given)
                if value is not None:
                    words = f"uses {argument_words(argument.name, given, float(f'{value:.5g}'))}"
                    yield Change(3, "argument", words, step, with_number(group, argument.name, value))
        if not moves(step) and step.overload is not None and accused.target.numel() > _FEW:
            value = _fitted(accused, partial(scaled, group), 1.0)
            if value is not None:
                words = f"multiplies what {name_of(step)} makes by {value:.5g}"
                yield Change(4, "argument", words, step, scaled(group, value))


def _fitted(accused: Accused, make: Callable[[float], Edits], start: float) -> float | None:
    """The number with which a change is nearest to B, by the secant method; None if it does not matter."""
    rows, target = accused.rows, accused.target

    def off(c: float) -> torch.Tensor | None:
        made = accused.run(make(c))
        if made is None or made.shape != target.shape:
            return None
        found = (made - target) / rows
        return found if bool(found.isfinite().all()) else None

    c, here = start, off(start)
    for _ in range(8):
        h = 1e-4 * abs(c) or 1e-6
        there = off(c + h)
        if here is None or there is None:
            return None
        slope = (there - here) / h
        square = float(slope.square().sum())
        if not square or not math.isfinite(square):
            return None
        move = -float((slope * here).sum()) / square
        if not math.isfinite(move) or abs(c + move) > 1e8:
            return None
        c, here = c + move, off(c + move)
        if abs(move) <= 1e-10 * abs(c):
            break
    if here is None or abs(c - start) <= 1e-9 * abs(start):
        return None
    # Some number fits a loss alone, whatever B does otherwise: only one that somebody would write is named then.
    few = target.numel() <= _FEW
    short = [0.0, *(float(f"{c:.{count}g}") for count in range(1, 3 if few else 6)), *([] if few else [c])]
    return next((each for each in short if each != start and accused.ratio(make(each)) <= LIMIT), None)
