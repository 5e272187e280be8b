"""Which single edits of A's program make it compute what B does: a constant, a flag, another function, and their like.

Invariant: an edit is named only if B's operand is reproduced to rounding. All that do so are named, none if none does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from opintercept._core.text import listed
from opintercept.runs.align.replay import LIMIT, Edit, ProgramReplay, Target, moves
from opintercept.runs.compare.pairing import operator_name
from opintercept.runs.explain.program import Leaf, ProgramMemory, Region, Step
from opintercept.runs.program.again import FAILURES

_MOST = 1 << 32  # elements that are computed for one cause
_LARGEST = 1 << 27  # elements of a part that fits in memory
_LONGEST = 8  # operators that may be left out together
_STEPS = 12  # of Gauss and Newton
_ZERO = 1e-6  # a number that may stand for none
_TAG = 1e-3  # how far a tag may be off
_SAME = 1e-5  # how far apart numbers are the same beside the largest of a tensor
Function = Callable[[torch.Tensor], torch.Tensor]
_FUNCTIONS: dict[str, Function] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
}
_COMMUTE = frozenset(("add", "mul", "maximum", "minimum"))
Edits = Mapping[int, Edit]  # by the places of calls
Make = Callable[[float], Edits]


def causes(replay: ProgramReplay, target: Target) -> tuple[tuple[str, ...], int, bool]:
    """Try single edits of the calls that are suspected.

    Returns:
        Those that make the operand B's, in words that follow "if"; how many were tried; and whether these are all that
        are known, and no limit has stopped the search.
    """
    search = _Search(replay, target)
    found: dict[str, None] = {}
    complete = False
    with suppress(_EnoughError), torch.no_grad():
        for words, edits in itertools.chain(search.exchanged(), search.functions()):
            if search.ratio(edits) <= LIMIT:
                found[words] = None
        found |= dict.fromkeys(search.left_out())
        found |= dict.fromkeys(search.tensors())
        for words, make, start in search.numbers():
            value = search.fitted(make, start)
            if value is not None:
                found[words.format(value=f"{value:.5g}")] = None
        complete = True
    return tuple(found), search.tried, complete


class _EnoughError(Exception):
    """What may be computed for one cause has been."""


class _Search:
    def __init__(self, replay: ProgramReplay, target: Target) -> None:
        self._replay, self._target, self._left, self.tried = replay, target, float(_MOST), 0
        part = replay.part(target.step, [target.region])
        steps = [replay.program.steps[number] for number in sorted(part & (target.suspects | replay.fixed))]
        self._roots = [replay.program.steps[number] for number in replay.roots(target.suspects, target)]
        self._fixed = [step for step in steps if step.number in replay.fixed]
        made = {region.memory: step for step in replay.program.steps for region in step.outputs if region is not None}
        read = {region.memory for step in steps for _, region in step.inputs}
        self._tables = {memory for memory in read if memory not in made or made[memory].number in replay.fixed}
        self._groups = _repeated([step for step in steps if step.reads])
        self._steps = [replay.program.steps[number] for number in sorted({*part, *replay.roots(part, target)})]
        self._size = sum(math.prod(region.shape) for step in self._steps for _, region in step.inputs)
        self._inputs: dict[int, list[torch.Tensor]] = {}
        self._operand = torch.empty(0)
        if self._size < _LARGEST:
            self._operand = self._run({})

    def _each(self) -> Iterator[list[Step]]:
        """Groups of calls that are edited together, then each call of a group alone."""
        yield from self._groups
        yield from ([step] for group in self._groups if len(group) > 1 for step in group)

    def _made(self, edits: Edits) -> torch.Tensor | None:
        self._left -= self._size
        if self._left < 0 or not self._inputs:
            raise _EnoughError
        with suppress(*FAILURES):
            return self._run(edits)
        return None

    def _run(self, edits: Edits) -> torch.Tensor:
        """The operand if some calls compute otherwise; the first time as it is.

        Only what comes after an edit is computed again.
        """
        first, memory, changed = not self._inputs, ProgramMemory(self._replay.program.sizes), set[int]()
        inputs: dict[int, list[torch.Tensor]] = {}
        for step in self._steps:
            number, given = step.number, []
            if first:
                given = inputs[number] = [self._replay.read(region, [memory])[0] for _, region in step.inputs]
            elif number in edits or any(region.memory in changed for _, region in step.inputs):
                for (_, region), own in zip(step.inputs, self._inputs[number], strict=True):
                    given.append(_read(memory, region, own) if region.memory in changed else own)
            else:
                continue
            made = self._replay.computed(step, given, edits.get(number)) or ()
            for place, value in zip(step.outputs, made, strict=False):
                if place is not None and value is not None and (value.is_floating_point() or number in edits):
                    memory.write(place, value.reshape(place.shape))
                    changed.add(place.memory)
        region = self._target.region
        if first:
            self._inputs = inputs
            return self._replay.read(region, [memory])[0]
        return _read(memory, region, self._operand) if region.memory in changed else self._operand

    def ratio(self, edits: Edits) -> float:
        """How far B is from the program with these edits, in units of the noise."""
        self.tried += 1
        return self._distance(edits)

    def _distance(self, edits: Edits) -> float:
        made = self._made(edits)
        found = math.inf if made is None else self._target.distance(made)
        return found if found == found else math.inf

    def exchanged(self) -> Iterator[tuple[str, Edits]]:
        """Outputs of two products, or the operands of an operator, change places."""
        for one, other in itertools.combinations(self._roots, 2):
            outputs = self._replay.output(one.number), self._replay.output(other.number)
            if outputs[0].shape == outputs[1].shape:
                edits = {one.number: _constant(outputs[1]), other.number: _constant(outputs[0])}
                yield f"the outputs of {_module(one)} and {_module(other)} change places", edits
        for group in self._each():
            shapes = [region.shape for _, region in group[0].inputs]
            if len(shapes) == 2 and shapes[0] == shapes[1] and _name(group[0]) not in _COMMUTE:
                words = f"the operands of {_words(group)} change places"
                yield words, _edits(group, lambda step, x: step.compute(x[::-1]))

    def functions(self) -> Iterator[tuple[str, Edits]]:
        """Another activation or norm, another mask."""
        for group in self._each():
            name, step = _name(group[0]), group[0]
            own = f"{name} by {given}" if (given := step.arguments.get("approximate")) else name
            for other, function in _FUNCTIONS.items() if name in _FUNCTIONS else ():
                if other != own:
                    yield f"{other} takes the place of {_words(group)}", _edits(group, _applied(function))
            if name == "native_layer_norm":
                yield f"RMSNorm takes the place of {_words(group)}", _edits(group, _rms_norm)
            if name == "_fused_rms_norm":
                yield f"LayerNorm takes the place of {_words(group)}", _edits(group, _layer_norm)
            if "scaled_dot_product" in name:
                given = step.arguments.get("is_causal")
                if isinstance(given, bool):
                    yield f"is_causal of {_words(group)} is {not given}", _with(group, "is_causal", not given)
                for mask in ("attn_mask", "attn_bias"):
                    if isinstance(step.arguments.get(mask), Leaf):
                        yield f"{mask} of {_words(group)} is left out", _with(group, mask, None)
            if step.overload is not None and step.outputs[0] and len(step.outputs[0].shape) > 1:
                yield f"the mean of each row is subtracted from what {_words(group)} makes", _edits(group, _centred)

    def left_out(self) -> Iterator[str]:
        """Operators are left out, as few as will do: what the first of them was given goes on in their place."""
        done: list[set[int]] = []
        for count, first in itertools.product(range(1, _LONGEST + 1), range(len(self._groups))):
            groups = self._groups[first : first + count]
            out = {group[0].number for group in groups}
            if len(groups) < count or not all(_same_shape(step) for group in (groups[0], groups[-1]) for step in group):
                continue
            for turn in (0, 1) if any(len(_same_shape(group[0])) > 1 for group in groups) else (0,):
                passed = partial(_passed, turn=turn)
                edits = {step.number: passed for group in groups for step in group if _same_shape(step)}
                if not any(each <= out for each in done) and self.ratio(edits) <= LIMIT:
                    done.append(out)
                    yield f"{_words([group[0] for group in groups])} {'are' if count > 1 else 'is'} left out"

    def numbers(self) -> Iterator[tuple[str, Make, float]]:
        """Numbers that operators are given, times which outputs are, or that are added to positions; with A's."""
        for group in self._groups:
            step = group[0]
            for argument in step.overload._schema.arguments if step.overload is not None else ():
                given = step.arguments.get(argument.name)
                if given is None and argument.name == "scale" and "scaled_dot_product" in _name(step):
                    given = step.inputs[0][1].shape[-1] ** -0.5
                real = str(argument.type).removeprefix("Optional[").removesuffix("]") in ("number", "float", "Tensor")
                if real and isinstance(given, (int, float)) and not isinstance(given, bool):
                    words = f"{argument.name} of {_words(group)} is {{value}} and not {given:.5g}"
                    yield words, partial(_with, group, argument.name), float(given)

        outputs = [([step], _module(step)) for step in self._roots]
        outputs += [(group, _words(group)) for group in self._groups if not moves(group[0])]
        for group, name in outputs:
            words = f"the output of {name} is multiplied by {{value}}"
            yield words, partial(self._changed, group, more=0.0), 1.0
        for step in self._fixed:
            words = f"{{value}} is added to the output of {_words([step])}"
            yield words, partial(self._changed, [step], 1.0), 0.0

    def tensors(self) -> Iterator[str]:
        """Another tensor for a parameter or a table of which each element of B's operand depends on one element."""
        for group in (group for group in self._groups if group[0].number not in self._replay.fixed):
            for place, (name, region) in enumerate(group[0].inputs):
                several = len({step.inputs[place][1][1:] for step in group if place < len(step.inputs)}) > 1
                if several or not (region.weight or region.memory in self._tables) or math.prod(region.shape) < 2:
                    continue
                self.tried += 1
                old = self._inputs[group[0].number][place].double()
                new = self._solved(group, place, old)
                if new is not None and self._distance(_given(group, place, new)) <= LIMIT:
                    apart = (new - old).abs()
                    count = int((apart > _SAME * torch.maximum(new.abs(), old.abs()).max()).sum())
                    others = f"{count} of its {old.numel()} numbers {'differs' if count == 1 else 'differ'}"
                    yield f"{name} of {_words(group)} is another: {others}, by up to {float(apart.max()):.2g}"

    def _solved(self, group: Sequence[Step], place: int, old: torch.Tensor) -> torch.Tensor | None:
        """The tensor with which a call computes B's operand; None if no single element decides each of that.

        A tag on each element, and the same change of all, tell which element of the operand depends on which.
        """
        tags = torch.arange(1, old.numel() + 1, dtype=torch.float64).reshape(old.shape)
        made = [self._made(_given(group, place, old + change)) for change in (0.0, 1.0, tags)]
        if any(each is None for each in made):
            return None
        off, *others = (self._target.off(each) for each in made if each is not None)
        slope, tagged = (each - off for each in others)
        moved = slope.abs() > _ZERO * slope.abs().max()
        which = tagged[moved] / slope[moved]
        index = which.round().long() - 1
        if bool(((which - which.round()).abs() > _TAG).any()) or bool((index != index.clamp(0, old.numel() - 1)).any()):
            return None
        sums = [
            torch.zeros(old.numel(), dtype=torch.float64).index_add(0, index, each)
            for each in (slope[moved] * off[moved], slope[moved].square())
        ]
        return old - (sums[0] / sums[1].clamp_min(1e-300)).reshape(old.shape)

    def _changed(self, group: Sequence[Step], factor: float, more: float) -> Edits:
        def edit(step: Step, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
            made = self._replay.computed(step, inputs) or ()
            return [None if each is None else each.double() * factor + more for each in made[:1]]

        return _edits(group, edit)

    def fitted(self, make: Make, start: float) -> float | None:
        """The number with which a change reproduces B; None if there is none. By trial, then as Gauss and Newton do."""

        def off(c: float) -> torch.Tensor | None:
            made = self._made(make(c))
            found = None if made is None else self._target.off(made)
            return found if found is not None and bool(found.isfinite().all()) else None

        def size(found: torch.Tensor | None) -> float:
            return math.inf if found is None else float(found.square().mean())

        if len({size(off(start + h)) for h in (0, 1)}) == 1:
            return None  # it does not matter
        grid = [start * 2.0**k for k in range(-16, 17, 4)] if start else []
        trials = sorted((size(off(c)), c) for c in dict.fromkeys((*grid, *(start + k for k in (-2, -1, 1, 2)), -start)))
        best = math.inf, start
        for least, c in trials[:2]:
            for _ in range(_STEPS):
                h = 1e-5 * abs(c) or 1e-7
                here, there = off(c), off(c + h)
                if here is None or there is None:
                    break
                slope = (there - here) / h
                square = float(slope.square().sum())
                step = -float((slope * here).sum()) / square if square else 0.0
                new = size(off(c + step))
                while new > least and abs(step) > 1e-9 * abs(c):
                    step /= 4
                    new = size(off(c + step))
                if not new < 0.9 * least:
                    break
                least, c = new, c + step
            best = min(best, (least, c))
        self.tried += 1
        short = [float(f"{best[1]:.{count}g}") for count in range(1, 6)]
        short = [0.0, *short, best[1]] if abs(best[1]) < _ZERO else [*short, best[1]]
        return next((c for c in short if c != start and self._distance(make(c)) <= LIMIT), None)


def _read(memory: ProgramMemory, region: Region, own: torch.Tensor) -> torch.Tensor:
    """The values of a region; `own` where nothing has been written, and in its dtype."""
    found = memory.read(region)
    return torch.where(found.isnan(), own.double(), found).to(own.dtype)


def _repeated(steps: Sequence[Step]) -> list[list[Step]]:
    """Calls that a line makes again and again are of one group, as where a function is called for q and for k."""
    lines: dict[str | None, list[Step]] = defaultdict(list)
    for step in steps:
        lines[step.stored.record.source].append(step)
    found = []
    for made in lines.values():
        names = [step.stored.record.op for step in made]
        period = next(p for p in range(1, len(names) + 1) if not len(names) % p and names[p:] == names[:-p])
        found += [made[at::period] for at in range(period)]
    return sorted(found, key=lambda group: group[0].number)


def _name(step: Step) -> str:
    return operator_name(step.stored.record.op).partition(".")[0].removesuffix("_")


def _module(step: Step) -> str:
    """`"layers.0.q"`; `"mm (model.py:15)"` outside of modules."""
    return step.stored.record.module or _words([step])


def _words(steps: Sequence[Step]) -> str:
    """`"silu (model.py:15)"`."""
    names = [*dict.fromkeys(map(_name, steps))] if len({each.number for each in steps}) > 1 else [_name(steps[0])]
    source = (steps[0].stored.record.source or "").partition(" ")[0]
    return listed(names, _LONGEST) + (f" ({source})" if source else "")


def _edits(group: Sequence[Step], edit: Edit) -> Edits:
    return {step.number: edit for step in group}


def _constant(output: torch.Tensor) -> Edit:
    return lambda step, x: [output]


def _applied(function: Function) -> Edit:
    return lambda step, x: [function(x[min(step.reads)])]


def _with(group: Sequence[Step], name: str, value: Any) -> Edits:
    """Each call with another argument."""
    return _edits(group, lambda step, x: replace(step, arguments=step.arguments | {name: value}).compute(x))


def _given(group: Sequence[Step], place: int, value: torch.Tensor) -> Edits:
    """Each call with another tensor in a place."""
    return _edits(group, lambda step, x: step.compute([value if at == place else each for at, each in enumerate(x)]))


def _named(step: Step, x: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for (name, _), value in zip(step.inputs, x, strict=True)}


def _rms_norm(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    given = _named(step, x)
    shape = step.arguments["normalized_shape"]
    made = F.rms_norm(given["input"], shape, given.get("weight"), step.arguments.get("eps"))
    return [made + given["bias"] if "bias" in given else made]


def _layer_norm(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    given = _named(step, x)
    eps = step.arguments.get("eps") or torch.finfo(torch.float32).eps
    return [F.layer_norm(given["input"], step.arguments["normalized_shape"], given.get("weight"), None, eps)]


def _centred(step: Step, x: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
    return [None if each is None else each - each.mean(-1, keepdim=True) for each in step.compute(x)[:1]]


def _same_shape(step: Step) -> list[int]:
    """The places of the inputs that may stand for the output."""
    shape = step.outputs[0].shape if step.outputs[0] is not None else None
    return [place for place, (_, region) in enumerate(step.inputs) if region.shape == shape and place in step.reads]


def _passed(step: Step, inputs: Sequence[torch.Tensor], turn: int) -> Sequence[torch.Tensor | None]:
    """What a call was given stands for its output."""
    return [inputs[_same_shape(step)[: turn + 1][-1]]]
