"""The changes of A in which something else is computed, as B does: another operator, one less or one more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from opintercept._core.text import listed
from opintercept.runs.program.evaluate import moves
from opintercept.runs.program.program import Step, in_double
from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.edits import (
    Change,
    Edits,
    applying,
    as_given,
    before,
    behind,
    called,
    constant,
    like,
    rounded,
)
from opintercept.runs.why.changes.wording import (
    LONGEST,
    argument_words,
    differing,
    left_out_words,
    name_of,
    operand_words,
)
from opintercept.runs.why.counterparts import ACTIVATIONS

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
}


def calls(accused: Accused) -> Iterator[Change]:
    """B's call with all of its own arguments and tensors, on the operands that A has, too."""
    judge = accused.judge
    for step in accused.steps:
        for other in accused.steps_b:
            if other.operator != step.operator or other.overload is None or not step.inputs:
                continue
            mine = {name: place for place, (name, _) in enumerate(step.inputs)}
            more = [name for name, region in other.inputs if name not in mine and region.name is not None]
            less = [name for name, _ in step.inputs if name not in dict(other.inputs)]
            if not more and not less:
                continue
            values = {name: in_double(judge.b.program.value(dict(other.inputs)[name])) for name in more}
            words = [f"has a {operand_words(step, name, step.inputs[0][1])} where A has none" for name in more]
            words += [f"has no {operand_words(step, name, step.inputs[0][1])}" for name in less]
            words += [
                f"uses {argument_words(name, *pair)}"
                for name, pair in differing(step, other).items()
                if name not in (*more, *less)
            ]
            yield Change(1, "operand", " and ".join(words), step, {step.number: called(other, values)})


def operators(accused: Accused) -> Iterator[Change]:
    """B's operator in the place of A's."""
    for step in accused.steps:
        for other in accused.steps_b:
            if (
                step.operator in accused.less
                and other.operator in accused.more
                and step.overload is not None
                and other.overload is not None
                and len(other.reads) <= len(step.reads)
                and not moves(other)
            ):
                words = f"computes {name_of(other)} where A computes {name_of(step)}"
                yield Change(1, "operator", words, step, {step.number: like(other)})


def functions(accused: Accused) -> Iterator[Change]:
    """Another activation, which B may write in other operators."""
    for step in accused.steps:
        for name, function in _FUNCTIONS.items() if step.operator in ACTIVATIONS else ():
            words = f"computes {name} where A computes {name_of(step)}"
            yield Change(2, "operator", words, step, {step.number: applying(function, min(step.reads))})


def not_updated(accused: Accused) -> Iterator[Change]:
    """Weights stay as they are."""
    for group in accused.groups():
        if all(0 in step.written and step.inputs[0][1].weight for step in group):
            words = f"does not update {'the weight' if len(group) == 1 else 'the weights'}, by {name_of(group[0])}"
            edits: Edits = dict.fromkeys((step.number for step in group), as_given)
            yield Change(1, "operator", words, group[0], edits)


def left_out(accused: Accused) -> Iterator[Change]:
    """Operators are left out, as few as will do: what the first was given goes on in their place."""
    for count in range(1, LONGEST + 1):
        for first in range(len(accused.steps) - count + 1):
            steps = accused.steps[first : first + count]
            last = steps[-1]
            region = last.outputs[0] if last.outputs else None
            if region is None or (count > 1 and not all(_follows(one, two) for one, two in itertools.pairwise(steps))):
                continue
            if count == 1 and last.operator.startswith("_foreach") and last.written:
                words = f"leaves out {name_of(last).removeprefix('_foreach_')}"
                yield Change(1, "operator", words, last, {last.number: as_given})
            for place in steps[0].reads:
                own = accused.given(steps[0])[place]
                if own.numel() != math.prod(region.shape) or not own.is_floating_point():
                    continue
                words = left_out_words(steps, accused.given(last))
                value = own.reshape(region.shape)
                edit = constant(value) if count > 1 else applying(lambda x: x, place)
                yield Change(1 + count // 2, "operator", words, steps[0], {last.number: edit})


def added(accused: Accused) -> Iterator[Change]:
    """B's operator before one of A's, with B's other operands."""
    program = accused.judge.b.program
    for other in accused.steps_b:
        made = other.outputs[0] if other.outputs else None
        if other.operator not in accused.more or other.overload is None or made is None or not other.reads:
            continue
        if moves(other):
            continue
        rest = [in_double(program.value(region)) if region.name else None for _, region in other.inputs]
        places = [at for at, (_, region) in enumerate(other.inputs) if math.prod(region.shape) == math.prod(made.shape)]
        numbers = [f"{value:.5g}" for value in other.arguments.values() if isinstance(value, float)]
        words = f"computes {_with_makers(accused, other, ' '.join([name_of(other), *numbers]))} besides"
        for at in places:
            for step in accused.steps:
                for place in step.reads:
                    own = accused.given(step)[place]
                    if own.is_floating_point() and own.numel() == math.prod(made.shape):
                        yield Change(2, "operator", words, step, {step.number: before(other, at, place, rest)})
            end = accused.end
            yield Change(2, "operator", words, end, {end.number: behind(other, at, rest)})


def roundings(accused: Accused) -> Iterator[Change]:
    """What calls read or make is rounded to a coarser dtype of B."""
    judge = accused.judge
    made = (judge.joints.made_by(step) for step in accused.steps_b)
    dtypes = {each.dtype for each in made if each is not None and each.unit > judge.unit_a}
    for dtype in sorted(dtypes, key=str):
        name = str(dtype).removeprefix("torch.")
        for step in accused.steps:
            if step.overload is None or step.number in judge.taken:
                continue
            words = f"rounds what {name_of(step)} makes to {name}"
            yield Change(1, "dtype", words, step, {step.number: rounded(dtype, made=True)})
            words = f"rounds what {name_of(step)} reads to {name}"
            yield Change(1, "dtype", words, step, {step.number: rounded(dtype, read=True)})
            words = f"computes {name_of(step)} in {name}"
            yield Change(1, "dtype", words, step, {step.number: rounded(dtype, read=True, made=True)})
        chosen = {
            step.number: rounded(dtype, read=True, made=True) for step in accused.steps if step.overload is not None
        }
        words = f"computes {listed(list(dict.fromkeys(map(name_of, accused.steps))), 4)} in {name}"
        yield Change(2, "dtype", words, accused.steps[0], chosen)


def _with_makers(accused: Accused, other: Step, words: str) -> str:
    """A call of B's in words, after the calls of the region that make its operands from what A has, too."""
    makers = {writer for writers in accused.judge.b.writers[other.number] for writer in writers}
    before = [
        " ".join([name_of(step), *(f"{value:.5g}" for value in step.arguments.values() if isinstance(value, float))])
        for step in accused.steps_b
        if step.number in makers and step.operator in accused.more and not moves(step)
    ]
    return f"{listed(before, LONGEST)} and {words}" if 0 < len(before) <= 2 else words


def _follows(one: Step, two: Step) -> bool:
    """Whether a call reads what another makes."""
    made = {region.memory for region in one.outputs if region is not None}
    return any(two.inputs[place][1].memory in made for place in two.reads)
