"""`Budget`: what each call, weight and input of B adds to the loss, beside A.

A's program is computed in float64, with A's values and with B's. Where a call has a counterpart, what was recorded
takes the place of what was computed, so that nothing is carried on: their difference is what the call has added.
Invariant: the differences of a program lead from A's values to B's, one after the other.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from opintercept._values import rounding
from opintercept.runs.compare.computed import modulus
from opintercept.runs.explain.explanation import OutputDistance
from opintercept.runs.explain.program import Program, ProgramMemory, Region, Step, in_double, last_uses
from opintercept.runs.program.again import FAILURES
from opintercept.runs.store.codec import role_of

Measure = Callable[[torch.Tensor], torch.Tensor]
Inputs = dict[tuple[int, int], int]  # where inputs are kept, by the place of a call and their own
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


class _Pair(NamedTuple):
    """A call of A, and what computes the same in B; None if nothing does."""

    step: Step
    other: Step | None

    def input(self, name: str) -> Region | None:
        """B's input of this name; None of another operator, which is compared by what it returns alone."""
        same = self.other is not None and self.step.operator == self.other.operator
        return dict(self.other.inputs).get(name) if same and self.other else None

    def output(self, place: int) -> Region | None:
        """B's output."""
        return self.other.outputs[place] if self.other is not None and place < len(self.other.outputs) else None


class _Sides(NamedTuple):
    """A tensor of A and of B, as they were recorded and as A's program computes them."""

    recorded_a: torch.Tensor
    computed_a: torch.Tensor
    recorded_b: torch.Tensor
    computed_b: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The coarser dtype."""
        return max((self.recorded_a.dtype, self.recorded_b.dtype), key=rounding.unit)

    def difference(self) -> torch.Tensor:
        """What B has added beside what A has."""
        return _gap(self.computed_b, self.recorded_b) - _gap(self.computed_a, self.recorded_a)


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
        path: How far the first outputs of calls are apart as they were recorded, in A's order.
        uncomputed: Why calls could not be computed in float64, by their places: their own results are not judged.
    """

    def __init__(self, a: Program, b: Program, pairs: Mapping[int, int], end: int, spill: Spill) -> None:
        self.added: list[Added] = []
        self.path: list[OutputDistance] = []
        self._coarsest = torch.float64
        self.uncomputed: dict[int, Exception] = {}
        self._a, self._b, self._end = a, b, end
        self._steps = a.steps[: end + 1]
        self._spill = spill
        self._inputs_b: Inputs = {}  # those that differ from A's
        self._made_b: torch.Tensor | None = None
        self._memory = ProgramMemory(a.sizes), ProgramMemory(a.sizes)
        self._last_uses, self._first_uses = last_uses(self._steps), last_uses(reversed(self._steps))
        for step in self._steps:
            self._compare(_Pair(step, b.steps[pairs[step.number]] if step.number in pairs else None))
            for memory in self._memory:
                memory.forget(self._last_uses.get(step.number, []))

    def _compare(self, pair: _Pair) -> None:
        """Compute a call in both programs, and keep what they have beside that."""
        step = pair.step
        inputs = [self._input(pair, place) for place in range(len(step.inputs))]
        differing = {place: b for place, (a, b) in enumerate(inputs) if not (a is b or torch.equal(a, b))}
        for place, b in differing.items():
            self._inputs_b[step.number, place] = self._spill.put(b)
        made_a = made_b = self._computed(step, [a for a, _ in inputs])
        if made_a is not None and differing:
            made_b = self._computed(step, [b for _, b in inputs])
        for place, region in enumerate(step.outputs):
            if region is None or region.name is None:
                continue
            recorded = self._a.value(region)
            a = recorded if made_a is None else _at(made_a, place, recorded)
            b = a if made_b is None else _at(made_b, place, recorded)
            actual = self._like(pair.output(place), recorded)
            if actual is not None:
                sides = _Sides(recorded, a, actual, b)
                self._keep(pair, region, role_of(place), "call", sides, [a for a, _ in inputs])
                if place == 0:
                    self._coarsest = max(self._coarsest, sides.dtype, key=rounding.unit)
                    self.path.append(_distance(step, sides, self._coarsest))
                a, b = recorded, actual
            self._write(region, a, b)
            if step.number == self._end and self._made_b is None:
                self._made_b = b.double()

    def _input(self, pair: _Pair, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An input of a call in both programs."""
        name, region = pair.step.inputs[place]
        recorded = self._a.value(region)
        if not recorded.is_floating_point() or place not in pair.step.reads:
            return recorded, recorded
        a, b = (memory.read(region) for memory in self._memory)
        kind: Literal["leaf", "between"] = "leaf" if bool(a.isnan().any()) else "between"
        a, b = (torch.where(each.isnan(), recorded.double(), each) for each in (a, b))
        actual = self._like(pair.input(name), recorded)
        if actual is not None:
            self._keep(pair, region, name, kind, _Sides(recorded, a, actual, b))
            a, b = recorded.double(), actual.double()
        self._write(region, a, b)
        return a, b

    def _write(self, region: Region, a: torch.Tensor, b: torch.Tensor) -> None:
        for memory, value in zip(self._memory, (a, b), strict=True):
            memory.write(region, value)

    def _like(self, found: Region | None, recorded: torch.Tensor) -> torch.Tensor | None:
        """B's values in the shape of A's; None if they do not fit."""
        if found is None or found.name is None:
            return None
        values = self._b.value(found)
        fits = values.is_floating_point() and recorded.is_floating_point() and values.numel() == recorded.numel()
        return values.reshape(recorded.shape) if fits else None

    def _keep(
        self,
        pair: _Pair,
        region: Region,
        name: str,
        kind: Literal["call", "leaf", "between"],
        sides: _Sides,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        """Keep what B has beside A, unless that is nothing."""
        difference = sides.difference()
        if not bool(difference.any()):
            return
        dtype = sides.dtype
        bound = self._bound(pair.step, inputs, sides).clamp_min(torch.finfo(torch.float64).tiny)
        region = region.once
        kept = difference[tuple(slice(size) for size in region.shape)]
        same = kind == "leaf" and bool(torch.equal(sides.recorded_a.to(dtype), sides.recorded_b.to(dtype)))
        self.added.append(
            Added(
                step=pair.step,
                other=pair.other,
                region=region,
                name=name,
                kind=kind,
                start=self._spill.put(kept),
                roundings=float((difference.abs() / bound).max()),
                rounded=same,
                dtype=str(dtype).removeprefix("torch."),
                integers=self._other_integers(pair) if kind == "call" else (),
                values=int((sides.recorded_a != sides.recorded_b).sum()),
            )
        )

    def _other_integers(self, pair: _Pair) -> tuple[str, ...]:
        """The names of inputs that are no real numbers and differ."""
        found = []
        for place, (name, region) in enumerate(pair.step.inputs):
            other = pair.input(name)
            if place in pair.step.reads and other is not None:
                a, b = self._a.value(region).reshape(-1), self._b.value(other).reshape(-1)
                if not a.is_floating_point() and not (a.shape == b.shape and torch.equal(a, b)):
                    found.append(name)
        return tuple(found)

    def _bound(self, step: Step, inputs: Sequence[torch.Tensor], sides: _Sides) -> torch.Tensor:
        """How far rounding may move each element, in A and in B together; of an output, with the call's inputs."""
        values, dtype, terms = sides.computed_a.double(), sides.dtype, step.stored.record.terms
        if terms and inputs and (moduli := self._computed(step, [modulus(each) for each in inputs])) is not None:
            sums = rounding.of_sums(dtype, terms) * _at(moduli, 0, values).abs()
            return 2 * (rounding.ulp(values, dtype) + sums)
        return 2 * _FEW * rounding.unit(dtype) * (values.abs() + values.square().mean().sqrt())

    def _computed(self, step: Step, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """The outputs of a call; None where what was recorded stands for them."""
        if step.overload is None or not any(inputs[place].is_floating_point() for place in step.reads):
            return None
        try:
            with torch.no_grad():
                return step.compute([in_double(each) for each in inputs])
        except FAILURES as failed:
            self.uncomputed.setdefault(step.number, failed)
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
        except FAILURES as failed:
            self.uncomputed.setdefault(step.number, failed)
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


def _distance(step: Step, sides: _Sides, coarsest: torch.dtype) -> OutputDistance:
    """How far an output is from A's; where both are infinite alike, not at all."""
    record, output = step.stored.record, sides.recorded_a.double()
    apart = float(_gap(output, sides.recorded_b).norm())
    size = float(output.where(output.isfinite(), 0).norm())
    relative = apart / size if size else math.inf * apart if apart else 0.0
    dtype, unit = str(coarsest).removeprefix("torch."), rounding.unit(coarsest)
    return OutputDistance(record.index, record.op, record.module, dtype, relative, relative / unit)


def _gap(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other - one` in float64, and 0 where they are equal, infinities too."""
    return torch.where(other == one, 0.0, other.double() - one)


def _at(made: Sequence[torch.Tensor | None], place: int, recorded: torch.Tensor) -> torch.Tensor:
    """An output that was computed, in the shape of the recorded one."""
    found = made[place] if place < len(made) else None
    return recorded if found is None else found.detach().reshape(recorded.shape)
