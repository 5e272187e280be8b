"""`Budget`: what each call, weight and input of B adds to the loss, beside A.

A's program is computed in float64, with A's values and with B's. Where a call has a counterpart, what was recorded
takes the place of what was computed, so that nothing is carried on: their difference is what the call has added.
Invariant: the differences of a program lead from A's values to B's, one after the other.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from opintercept._values import rounding
from opintercept.runs.compare.pairing import operator_name
from opintercept.runs.explain.program import Program, ProgramMemory, Region, Step, in_double, last_uses, role_of

Measure = Callable[[torch.Tensor], torch.Tensor]
Inputs = dict[tuple[int, int], int]  # where inputs are kept, by the place of a call and their own
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
_FEW = 8.0  # units in the last place by which a function that is no sum may be off


class Spill:
    """Tensors of float64 in a temporary file, so that a step of any size is explained in little memory."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._end = 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def put(self, tensor: torch.Tensor) -> int:
        """Write a tensor, and return where it is."""
        start = self._end
        self._file.seek(start)
        self._file.write(tensor.double().contiguous().numpy().tobytes())
        self._end = self._file.tell()
        return start

    def get(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Read it again."""
        self._file.seek(start)
        read = bytearray(self._file.read(8 * int(np.prod(shape, dtype=np.int64))))
        return torch.from_numpy(np.frombuffer(read, np.float64)).reshape(shape)


@dataclass(slots=True)
class Added:
    """What B's program has in one place beside A's.

    Attributes:
        step: A's call.
        other: B's call; None if it has none.
        region: The output of the call, or the input that differs before it.
        name: `"output"`, or the parameter's name for an input.
        kind: `"call"`: the call's own result. `"leaf"`: a weight or another tensor that no recorded call has made.
            `"between"`: an input that A's calls before would have made otherwise.
        start: Where the difference is kept.
        roundings: Its largest element, in units of the rounding that it may have.
        rounded: Whether B's values are A's in a coarser dtype.
        dtype: The coarser dtype of the two, `"bfloat16"`.
        integers: The names of the call's inputs that are no real numbers and differ.
        values: How many values of B are others than A's.
        cost: What it changes in the loss.
    """

    step: Step
    other: Step | None
    region: Region
    name: str
    kind: Literal["call", "leaf", "between"]
    start: int
    roundings: float
    rounded: bool
    dtype: str
    integers: tuple[str, ...]
    values: int
    cost: float = 0.0


class Budget:
    """The differences of two programs, and what they cost.

    Args:
        a: The program that the loss is explained by.
        b: The other one.
        pairs: The places of B's calls by those of A's.
        end: The place of the call of A that makes the loss.
        spill: Where differences are kept. It must stay open while the budget is used.

    Attributes:
        added: The differences, in A's order.
        uncomputed: How many calls could not be computed in float64, by operator: their own results are not judged.
    """

    def __init__(self, a: Program, b: Program, pairs: Mapping[int, int], end: int, spill: Spill) -> None:
        self.added: list[Added] = []
        self.uncomputed: Counter[str] = Counter()
        self._a, self._b, self._end = a, b, end
        self._steps = a.steps[: end + 1]
        self._spill = spill
        self._inputs_b: Inputs = {}  # those that differ from A's
        self._made_b: torch.Tensor | None = None
        mine, theirs = ProgramMemory(a.sizes), ProgramMemory(a.sizes)
        self._last_uses, self._first_uses = last_uses(self._steps), last_uses(reversed(self._steps))
        for step in self._steps:
            self._compare(step, b.steps[pairs[step.number]] if step.number in pairs else None, mine, theirs)
            for memory in mine, theirs:
                memory.forget(self._last_uses.get(step.number, []))

    def _compare(self, step: Step, other: Step | None, mine: ProgramMemory, theirs: ProgramMemory) -> None:
        """Compute a call in both programs, and keep what they have beside that."""
        given = {} if other is None or not _is_same(step, other) else dict(other.inputs)
        inputs_a, inputs_b = [], []
        for place, (name, region) in enumerate(step.inputs):
            a = b = recorded = self._a.value(region)
            if recorded.is_floating_point() and place in step.reads:
                a, b = self._input(step, other, name, region, given.get(name), mine, theirs)
            inputs_a.append(a)
            inputs_b.append(b)
            if not (a is b or torch.equal(a, b)):
                self._inputs_b[step.number, place] = self._spill.put(b)
        made_a = made_b = self._computed(step, inputs_a)
        if made_a is not None and any((step.number, place) in self._inputs_b for place in range(len(inputs_b))):
            made_b = self._computed(step, inputs_b)
        for place, output in enumerate(step.outputs):
            if output is None or output.name is None:
                continue
            recorded = self._a.value(output)
            a = recorded if made_a is None else _at(made_a, place, recorded)
            b = a if made_b is None else _at(made_b, place, recorded)
            if other is not None and recorded.is_floating_point():
                actual = self._like(other.outputs[place] if place < len(other.outputs) else None, recorded)
                if actual is not None:
                    size = None if made_a is None else a
                    self._keep(step, other, output, role_of(place), "call", recorded, a, actual, b, inputs_a, size)
                    a, b = recorded, actual
            mine.write(output, a)
            theirs.write(output, b)
            if step.number == self._end and self._made_b is None:
                self._made_b = b.double()

    def _input(
        self,
        step: Step,
        other: Step | None,
        name: str,
        region: Region,
        found: Region | None,
        mine: ProgramMemory,
        theirs: ProgramMemory,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An input of a call in both programs."""
        recorded = self._a.value(region)
        a, b = mine.read(region), theirs.read(region)
        new = a.isnan()
        a, b = torch.where(new, recorded.double(), a), torch.where(b.isnan(), recorded.double(), b)
        actual = self._like(found, recorded)
        if actual is not None:
            kind: Literal["leaf", "between"] = "leaf" if bool(new.any()) else "between"
            self._keep(step, other, region, name, kind, recorded, a, actual, b)
            a, b = recorded.double(), actual.double()
        mine.write(region, a)
        theirs.write(region, b)
        return a, b

    def _like(self, found: Region | None, recorded: torch.Tensor) -> torch.Tensor | None:
        """B's values in the shape of A's; None if they do not fit."""
        if found is None or found.name is None:
            return None
        values = self._b.value(found)
        fits = values.is_floating_point() and values.numel() == recorded.numel()
        return values.reshape(recorded.shape) if fits else None

    def _keep(
        self,
        step: Step,
        other: Step | None,
        region: Region,
        name: str,
        kind: Literal["call", "leaf", "between"],
        recorded: torch.Tensor,
        a: torch.Tensor,
        actual: torch.Tensor,
        b: torch.Tensor,
        inputs: Sequence[torch.Tensor] = (),
        computed: torch.Tensor | None = None,
    ) -> None:
        """Keep `(actual - b) - (recorded - a)` unless it is zero."""
        difference = _gap(b, actual) - _gap(a, recorded)
        if not bool(difference.any()):
            return
        dtype = max((recorded.dtype, actual.dtype), key=rounding.unit)
        bound = self._bound(step, inputs, recorded if computed is None else computed, dtype)
        roundings = float((difference.abs() / bound.clamp_min(torch.finfo(torch.float64).tiny)).max())
        rounded = kind == "leaf" and bool(torch.equal(recorded.to(dtype), actual.to(dtype)))
        text = str(dtype).removeprefix("torch.")
        region = region.once
        difference = difference[tuple(slice(size) for size in region.shape)]
        integers = self._other_integers(step, other) if kind == "call" and other is not None else ()
        start = self._spill.put(difference)
        values = int((actual != recorded).sum())
        self.added.append(Added(step, other, region, name, kind, start, roundings, rounded, text, integers, values))

    def _other_integers(self, step: Step, other: Step) -> tuple[str, ...]:
        given = dict(other.inputs)
        found = []
        for place, (name, region) in enumerate(step.inputs):
            if place in step.reads and name in given and not (value := self._a.value(region)).is_floating_point():
                theirs = self._b.value(given[name])
                if value.numel() != theirs.numel() or not torch.equal(value.reshape(-1), theirs.reshape(-1)):
                    found.append(name)
        return tuple(found)

    def _bound(
        self, step: Step, inputs: Sequence[torch.Tensor], values: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """How far rounding may move each element of a call's output, in A and in B together."""
        values = values.double()
        terms = step.stored.record.terms
        if terms and inputs and (moduli := self._computed(step, [_modulus(each) for each in inputs])) is not None:
            return 2 * (rounding.ulp(values, dtype) + rounding.of_sums(dtype, terms) * _at(moduli, 0, values))
        scale = values.abs() + values.square().mean().sqrt()
        return 2 * _FEW * rounding.unit(dtype) * scale

    def _computed(self, step: Step, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The outputs of a call; None where what was recorded stands for them."""
        if step.overload is None or not any(inputs[place].is_floating_point() for place in step.reads):
            return None
        try:
            with torch.no_grad():
                return step.compute([in_double(each) for each in inputs])
        except _FAILURES:
            self.uncomputed[step.stored.record.op] += 1
            return None

    def weigh(self, measure: Measure) -> tuple[float, float]:
        """Set the costs, and return the losses of A and of B.

        With a part `t` of all that was added, the loss `L(t)` leads from A's to B's, and its derivative is the sum of
        the gradients by what was added, times that. So the costs are an integral over `t`, by Simpson's rule: exact up
        to the fourth order (integrated gradients of Sundararajan, Taly and Yan, ICML 2017, for a program).

        Args:
            measure: The loss as a function of the output of its call, `float64`.
        """
        places: dict[int, list[Added]] = {}
        for each in self.added:
            places.setdefault(each.step.number, []).append(each)
        assert self._made_b is not None
        halfway: Inputs = {}
        middle = self._run({id(each): 0.5 for each in self.added}, halfway)
        start: tuple[torch.Tensor, Inputs] = self._a.value(self._loss_region()), {}
        points = (start, (middle, halfway), (self._made_b, self._inputs_b))
        losses = []
        for weight, (made, inputs) in zip((1 / 6, 4 / 6, 1 / 6), points, strict=True):
            with torch.enable_grad():
                output = made.double().detach().requires_grad_()
                loss = measure(output)
                (first,) = torch.autograd.grad(loss, [output])
            losses.append(loss.item())
            for each, gradient in self._gradients(places, inputs, first):
                each.cost += weight * float((gradient * self.difference(each)).sum())
        return losses[0], losses[2]

    def _loss_region(self) -> Region:
        return next(each for each in self._steps[-1].outputs if each is not None and each.name is not None)

    def difference(self, added: Added) -> torch.Tensor:
        """What was added, `float64` in the shape of its region."""
        return self._spill.get(added.start, added.region.shape)

    def _gradients(
        self, places: Mapping[int, list[Added]], other: Inputs, first: torch.Tensor
    ) -> Iterator[tuple[Added, torch.Tensor]]:
        """The gradient of the loss by each of the places that differ; inputs are A's but for some others."""
        adjoint = ProgramMemory(self._a.sizes, 0.0)
        adjoint.write(self._loss_region(), first)
        for step in reversed(self._steps):
            here = places.get(step.number, [])
            yield from ((each, adjoint.read(each.region)) for each in here if each.kind == "call")
            self._pull_back(step, adjoint, other)
            yield from ((each, adjoint.read(each.region)) for each in here if each.kind != "call")
            adjoint.forget(self._first_uses.get(step.number, []))

    def _pull_back(self, step: Step, adjoint: ProgramMemory, other: Inputs) -> None:
        """Turn the gradient by the outputs of a call into that by its inputs."""
        outputs = [None if region is None or region.name is None else region for region in step.outputs]
        gradients = [None if region is None else adjoint.read(region) for region in outputs]
        for region in filter(None, outputs):
            adjoint.write(region, torch.zeros(region.shape))
        if step.overload is None or not any(each is not None and bool(each.any()) for each in gradients):
            return
        inputs = [in_double(self._a.value(region)) for _, region in step.inputs]
        for place in range(len(inputs)):
            if (start := other.get((step.number, place))) is not None:
                inputs[place] = self._spill.get(start, step.inputs[place][1].shape)
        wanted = [place for place in sorted(step.reads) if inputs[place].is_floating_point()]
        try:
            found = _pulled_back(step, inputs, wanted, gradients)
        except _FAILURES:
            self.uncomputed[step.stored.record.op] += 1
            return
        for place, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                adjoint.add(step.inputs[place][1], gradient)

    def confirmed(self, measure: Measure, added: Sequence[Added]) -> float:
        """What the loss of A's program, computed in float64, changes by if some differences are put into it."""
        return float(measure(self._run({id(each): 1.0 for each in added}))) - float(measure(self._run({})))

    def _run(self, parts: Mapping[int, float], kept: Inputs | None = None) -> torch.Tensor:
        """The output of the loss's call if A's program is computed in float64, with parts of what was added.

        Args:
            parts: How much of it, by the `id` of each `Added`.
            kept: Where to note the inputs of calls.
        """
        memory = ProgramMemory(self._a.sizes)
        added = {(each.step.number, each.kind == "call", each.name): each for each in self.added if id(each) in parts}

        def with_added(step: Step, is_output: bool, name: str, value: torch.Tensor) -> torch.Tensor:
            each = added.get((step.number, is_output, name))
            return value if each is None else value + parts[id(each)] * self.difference(each)

        for step in self._steps:
            inputs = []
            for place, (name, region) in enumerate(step.inputs):
                value = recorded = self._a.value(region)
                if recorded.is_floating_point() and place in step.reads:
                    value = memory.read(region)
                    value = with_added(step, False, name, torch.where(value.isnan(), recorded.double(), value))
                    memory.write(region, value)
                    if kept is not None and not torch.equal(value, recorded.double()):
                        kept[step.number, place] = self._spill.put(value)
                inputs.append(value)
            made = self._computed(step, inputs)
            for place, output in enumerate(step.outputs):
                if output is not None and output.name is not None:
                    recorded = self._a.value(output)
                    value = recorded if made is None else _at(made, place, recorded)
                    memory.write(output, with_added(step, True, role_of(place), value))
            if step.number != self._end:
                memory.forget(self._last_uses.get(step.number, []))
        return memory.read(self._loss_region())


def _pulled_back(
    step: Step, inputs: list[torch.Tensor], wanted: list[int], gradients: list[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients by some inputs of a call."""
    for place in wanted:
        inputs[place] = inputs[place].detach().requires_grad_()
    with torch.enable_grad():
        made = step.compute(inputs)
    pairs = [
        (each, gradient.reshape(each.shape))
        for each, gradient in zip(made, gradients, strict=False)
        if each is not None and gradient is not None and each.requires_grad
    ]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, [inputs[place] for place in wanted], given, allow_unused=True)


def _is_same(step: Step, other: Step) -> bool:
    """Whether both calls take the same arguments: another operator is compared by what it returns alone."""
    return operator_name(step.stored.record.op) == operator_name(other.stored.record.op)


def _gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other - one` in float64, and 0 where they are equal, infinities too."""
    return torch.where(other == one, 0.0, other.double() - one)


def _modulus(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs() if tensor.is_floating_point() else tensor


def _at(made: Sequence[torch.Tensor | None], place: int, recorded: torch.Tensor) -> torch.Tensor:
    """An output that was computed, in the shape of the recorded one."""
    found = made[place] if place < len(made) else None
    return recorded if found is None else found.detach().reshape(recorded.shape)
