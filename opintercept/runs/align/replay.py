"""`ProgramReplay`: A's program in float64 on B's values, which tells what B does otherwise between two joined products.

At each joined product A's operand is compared with B's, in units of what further replays with perturbed operators show,
and B's output takes the place of A's. Invariant: nothing that B has done otherwise is carried past a joined product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._ops import scratch
from opintercept._ops.families import belongs
from opintercept._ops.table import row_of
from opintercept._values import rounding
from opintercept.runs.explain.budget import Spill
from opintercept.runs.explain.program import Program, ProgramMemory, Region, Step, last_uses
from opintercept.runs.program.again import FAILURES

LIMIT = 6.0
"""How many times its noise a row of an operand may be off: where nothing is planted, rows are off by 3 at most."""
_TRIALS = 3
_SURE = 32  # numbers that tell the noise of a row; narrower rows have that of the whole operand at least
_EXPONENTIAL = 2.0**-20  # the error of exponentials in fused attention on CPUs (`fexp_u20` of ATen)
_UNIFORM = 3**-0.5  # the standard deviation of a number between -1 and 1
_MOVERS = (
    "cat stack index index_select gather embedding roll flip repeat constant_pad_nd where tril triu index_put_"
    " slice_scatter select_scatter masked_fill masked_fill_ new_zeros zeros_like"
)
_MOVE = scratch.MOVES | {*_MOVERS.split()}
Edit = Callable[[Step, Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Target:
    """B's operand of a joined product, beside A's.

    Attributes:
        step: A's product.
        region: Its operand.
        take: The rows of this operand that B has too, `[m, k]` of the region's values.
        values: B's, `float64[m, k]`.
        noise: The root mean square of the noise of each row, `float64[m]`.
        ratio: How far the worst row is off, in units of that.
        suspects: The places of the calls that B does otherwise, as far as is known.
        independent: Whether no difference before explains this one.
        coded: Whether B's are whole numbers, which its program scales afterwards, row by row.
    """

    step: Step
    region: Region
    take: Take
    values: torch.Tensor
    noise: torch.Tensor
    ratio: float
    suspects: frozenset[int] = frozenset()
    independent: bool = False
    coded: bool = False

    def distance(self, made: torch.Tensor) -> float:
        """How far B's operand is from what a replay has made, in units of the noise."""
        return float((_squares(*self._both(made)).mean(-1).sqrt() / self.noise).max())

    def off(self, made: torch.Tensor) -> torch.Tensor:
        """What a replay has made less B's operand, in units of the noise, `float64[m, k]`."""
        x, y = self._both(made)
        return (x - y) / self.noise[:, None]

    def _both(self, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self.take(made), self.values
        square = (y * y).sum(1, keepdim=True).clamp_min(1e-300)
        return x, y * (x * y).sum(1, keepdim=True) / square if self.coded else y


Scales = tuple[torch.Tensor, torch.Tensor]
"""Relative standard deviations of a scale for each row and for each column, `float64[m, 1]` and `float64[g, 1, n]`."""


class _Injected(NamedTuple):
    """B's output of a product of A."""

    output: int  # where it is kept
    known: torch.Tensor | None  # the elements that B has, if not all
    unsure: Scales  # how far the scales are off with which they were made A's


class ProgramReplay:
    """One replay as it is, and some whose operators are off by the unit roundoff.

    Args:
        program: A's.
        spill: Where B's outputs are kept.
        dtype: That of the coarser program.

    Attributes:
        targets: What was compared, by the place of the product: the worst, where B computes it in pieces.
        acquitted: The places of the calls that made operands which agree.
        fixed: Those of calls whose results come from no weight, such as positions.
    """

    def __init__(self, program: Program, spill: Spill, dtype: torch.dtype) -> None:
        self.program = program
        self.targets: dict[int, Target] = {}
        self.acquitted: set[int] = set()
        self.fixed: set[int] = set()
        self._spill, self._dtype, self._unit, self._next = spill, dtype, rounding.unit(dtype), 0
        self._memories = [ProgramMemory(program.sizes) for _ in range(_TRIALS + 1)]
        self._active: set[int] = set()  # memory with what comes from weights or from B
        self._stale: set[int] = set()  # memory with what could not be computed again
        self._injected: dict[int, _Injected] = {}
        self._unlike: set[int] = set()
        self._last = last_uses(program.steps)
        self._by_index = {step.stored.record.index: step for step in program.steps}
        self._random = torch.Generator().manual_seed(0)

    def step_of(self, index: int) -> Step | None:
        """The call with this index, if the program has it and can compute it."""
        step = self._by_index.get(index)
        return None if step is None or step.overload is None else step

    def operand(self, step: Step) -> list[torch.Tensor] | None:
        """Run what is before a product, and return its left operand in all replays; None if it is not known."""
        region = region_of(step, "lhs")
        if region is None or step.number < self._next:
            return None
        try:
            for each in self.program.steps[self._next : step.number]:
                self._run(each)
            self._next = step.number
            found = self.read(region, self._memories)
            return found if region.memory not in self._stale and found[0].is_floating_point() else None
        except OpInterceptError:  # the run lacks values
            self._next = len(self.program.steps)
            return None

    def compare(
        self,
        step: Step,
        copies: Sequence[torch.Tensor],
        take: Take,
        y: torch.Tensor,
        dtype: torch.dtype,
        factor: torch.Tensor | None,
    ) -> None:
        """Compare an operand of A with B's `y`, which B holds in a dtype, or as whole numbers, `factor` times `y`."""
        region, coded = region_of(step, "lhs"), factor is not None
        assert region is not None
        base, *others = map(take, copies)
        own = _own_rounding(y, dtype, factor)
        noise = sum((_squares(each, base) for each in others), torch.zeros_like(base)) / len(others)
        noise = torch.maximum(noise, own.square().expand_as(base))
        rows = noise.mean(-1)
        if _TRIALS * base.size(-1) < _SURE:
            rows = rows.clamp_min(float(rows.mean()))
        least = max(1e-3 * self._unit * float(base.abs().nan_to_num(0, 0, 0).mean()), 1e-150)
        target = Target(step, region, take, y, rows.sqrt().clamp_min(least), 0.0, coded=coded)
        target.ratio = target.distance(copies[0]) if base.numel() else 0.0
        if target.ratio <= LIMIT:
            target.values = target.noise = torch.empty(0)
        if step.number not in self.targets or self.targets[step.number].ratio < target.ratio:
            self.targets[step.number] = target

    def put(self, step: Step, output: torch.Tensor, known: torch.Tensor, unsure: Scales) -> None:
        """Set the output of the product that is next, where B's is known; all replays go on with it."""
        region = step.outputs[0]
        if region is None or step.number != self._next:
            return
        output, known = output.reshape(region.shape), known.reshape(region.shape)
        self._injected[step.number] = _Injected(self._spill.put(output), None if bool(known.all()) else known, unsure)
        self._run(step)
        self._next += 1

    def read(self, region: Region, memories: Sequence[ProgramMemory]) -> list[torch.Tensor]:
        """The values of a region in each memory; those that no call has made are as recorded."""
        found = [memory.read(region) for memory in memories]
        unknown = [each.isnan() for each in found]
        if not any(bool(each.any()) for each in unknown):
            return found
        recorded = self.program.value(region)
        if not recorded.is_floating_point():
            return [recorded] * len(memories)
        return [torch.where(nan, recorded.double(), each) for nan, each in zip(unknown, found, strict=True)]

    def _run(self, step: Step) -> None:
        """Compute a call in all replays."""
        own, whole = self._injected.get(step.number), self._has_output(step.number)
        inputs = [] if whole else [self.read(region, self._memories) for _, region in step.inputs]
        memory_in = {region.memory for place, (_, region) in enumerate(step.inputs) if place in step.reads}
        active = own is not None or bool(memory_in & self._active) or any(r.weight for _, r in step.inputs)
        stale = bool(memory_in & self._stale) and not whole
        if not active:
            self.fixed.add(step.number)
        exact: Sequence[torch.Tensor | None] | None = None
        for turn, memory in enumerate(self._memories):
            given = [each[turn] for each in inputs]
            if turn and own is None:
                given = self._perturbed(step, given, active)
            made = self.computed(step, given)
            exact = made if not turn else exact
            for place, region in enumerate(step.outputs):
                value = None if made is None or place >= len(made) else made[place]
                if region is not None and value is not None and value.is_floating_point():
                    noisy = turn and own is None and not moves(step)
                    value = self._output_off(step, given, value, self._unit_of(step, active)) if noisy else value
                    memory.write(
                        region, self._rescaled(value, own) if turn and own is not None else value.reshape(region.shape)
                    )
        stale = stale or (active and own is None and self._differs(step, exact))
        for region in filter(None, step.outputs):
            keep, drop = (self._stale, self._active) if stale else (self._active, self._stale)
            if active or stale:
                keep.add(region.memory)
            drop.discard(region.memory)
        for memory in self._memories:
            memory.forget(self._last.get(step.number, []))

    def _rescaled(self, value: torch.Tensor, own: _Injected) -> torch.Tensor:
        """B's output of a product whose scales are off as they may be."""
        rows, columns = (each * torch.randn(each.shape, generator=self._random) for each in own.unsure)
        return (value.reshape(len(columns), len(rows), -1) * (1 + rows + columns)).reshape(value.shape)

    def computed(
        self, step: Step, inputs: Sequence[torch.Tensor], edit: Edit | None = None
    ) -> Sequence[torch.Tensor | None] | None:
        """The outputs of a call: B's, or computed, or as they were recorded; None if none is known."""
        own = self._injected.get(step.number)
        region = step.outputs[0]
        if own is not None and own.known is None and edit is None and region is not None:
            return [self._spill.get(own.output, region.shape)]
        found: Sequence[torch.Tensor | None] | None = None
        if step.overload is not None and any(inputs[place].is_floating_point() for place in step.reads):
            with torch.no_grad(), suppress(*FAILURES):
                doubles = [each.double() if each.is_floating_point() else each for each in inputs]
                found = step.compute(doubles) if edit is None else edit(step, doubles)
        elif edit is not None:
            with suppress(*FAILURES):
                found = edit(step, inputs)
        if found is None:
            found = [None if r is None or r.name is None else self.program.value(r) for r in step.outputs]
        if own is not None and own.known is not None and region is not None and found[0] is not None:
            b = self._spill.get(own.output, region.shape)
            found = [torch.where(own.known, b, found[0].reshape(region.shape))]
        return found

    def _differs(self, step: Step, exact: Sequence[torch.Tensor | None] | None) -> bool:
        """Whether a call was not computed again, or makes other whole numbers than those that were recorded."""
        if step.overload is None or exact is None:
            return True
        whole = [
            (region, value)
            for region, value in zip(step.outputs, exact, strict=False)
            if region is not None and region.name is not None and value is not None and not value.is_floating_point()
        ]
        return any(not torch.equal(value.reshape(r.shape), self.program.value(r)) for r, value in whole)

    def _perturbed(self, step: Step, inputs: list[torch.Tensor], active: bool) -> list[torch.Tensor]:
        """The inputs off by the unit roundoff; of calls that only move values, the weights."""
        unit, still, found = self._unit_of(step, active), moves(step), []
        for place, (value, (_, region)) in enumerate(zip(inputs, step.inputs, strict=True)):
            rounds = value.is_floating_point() and place in step.reads and place not in step.written
            found.append(self._off(value, unit) if rounds and (region.weight or not still) else value)
        if "scaled_dot_product" in step.stored.record.op:  # which rounds scores and weights, too
            units = unit, unit, max(unit, _EXPONENTIAL)
            found[:3] = [
                each * self._off(torch.ones(*each.shape[:-1], 1), own) for each, own in zip(found, units, strict=False)
            ]
        return found

    def _unit_of(self, step: Step, active: bool) -> float:
        """The unit roundoff of a call: B's for what weights take part in; positions are as exact as in A."""
        output = step.stored.record.output
        meta = output[0] if isinstance(output, tuple) and output else output
        dtype = getattr(torch, meta.dtype, torch.float32) if meta is not None and not isinstance(meta, tuple) else None
        return self._unit if active else rounding.unit(dtype or torch.float32)

    def _output_off(self, step: Step, inputs: list[torch.Tensor], value: torch.Tensor, unit: float) -> torch.Tensor:
        """An output off by the unit roundoff, and rows of what is made of sums by those of the sums, which are float32.

        Kernels of GELU add numbers whose sum may be far smaller.
        """
        if not inputs:  # it draws numbers, or what it was given is not known
            return self._off(value, unit)
        if value.dim() and inputs[0].dim() and _sums(step):
            sums = rounding.unit(torch.float32) * math.sqrt(1 + inputs[0].size(-1) / 6)
            value = value * self._off(torch.ones(*value.shape[:-1], 1), sums)
        if "gelu" in step.stored.record.op and value.shape == inputs[0].shape:
            value = value + self._off(inputs[0], unit) - inputs[0]
        return self._off(value, unit)

    def _off(self, value: torch.Tensor, unit: float) -> torch.Tensor:
        turn = unit * (2 * torch.rand(value.shape, generator=self._random, dtype=torch.float64) - 1)
        least = torch.finfo(self._dtype).tiny if unit == self._unit else 0.0  # smaller ones round as coarsely
        return value * (1 + turn) + turn * (least - value.abs()).clamp_min(0) * (value != 0)

    def distrust(self, step: Step) -> None:
        """B's output of a product is not known in A's order, so that what comes after it is explained by it."""
        self._unlike.add(step.number)

    def accuse(self) -> None:
        """Find what the products that are off accuse: calls that no product before has acquitted."""
        accused = {*self._unlike}
        given: set[int] = set()  # memory that no call has made, such as the program's input, which accused calls read
        made = {region.memory for step in self.program.steps for region in step.outputs if region is not None}
        agreed: set[int] = set()
        for _, target in sorted(self.targets.items()):
            steps = self.part(target.step, [target.region])
            inputs = [region for number in steps for _, region in self.program.steps[number].inputs]
            read = {region.memory for region in (target.region, *inputs)} - made
            if target.ratio <= LIMIT:
                self.acquitted |= steps
                agreed |= read
            else:
                target.independent = not (steps & accused or read & given)
                given |= read - agreed
                target.suspects = frozenset(steps - self.acquitted)
                accused |= target.suspects

    def part(self, end: Step, regions: Iterable[Region]) -> frozenset[int]:
        """The calls that make these inputs of a call out of B's outputs and of what no call has made."""
        need = {region.memory for region in regions}
        found = set()
        for step in reversed(self.program.steps[: end.number]):
            made = {region.memory for region in step.outputs if region is not None} & need
            if not made:
                continue
            given = {region.memory for _, region in step.inputs}
            need -= made - given
            if not self._has_output(step.number):
                found.add(step.number)
                need |= given
        return frozenset(found)

    def roots(self, part: Iterable[int], target: Target | None = None) -> list[int]:
        """The products whose outputs, as B has them, some calls or a target read."""
        read = {region.memory for number in part for _, region in self.program.steps[number].inputs}
        read |= set() if target is None else {target.region.memory}
        made = {number: self.program.steps[number].outputs[0] for number in filter(self._has_output, self._injected)}
        return [number for number, region in made.items() if region is not None and region.memory in read]

    def _has_output(self, number: int) -> bool:
        """Whether B has all of the output of a product."""
        own = self._injected.get(number)
        return own is not None and own.known is None

    def output(self, number: int) -> torch.Tensor:
        """B's output of a product, in A's layout."""
        region = self.program.steps[number].outputs[0]
        assert region is not None
        return self._spill.get(self._injected[number].output, region.shape)


def region_of(step: Step, role: str) -> Region | None:
    """Where the operand in a role lies."""
    where = row_of(step.stored.record.op).roles.get(role)
    if where is None or step.overload is None:
        return None
    return dict(step.inputs).get(step.overload._schema.arguments[where[0]].name)


def _own_rounding(y: torch.Tensor, dtype: torch.dtype, factor: torch.Tensor | None) -> torch.Tensor:
    """The standard deviation of B's operand about what its program meant: its dtype's, or that of a quantised row."""
    if factor is not None:
        return (1 / factor).abs() * _UNIFORM / 2
    least = torch.finfo(dtype).tiny if dtype.is_floating_point else 0.0
    return rounding.unit(dtype) * _UNIFORM * y.abs().nan_to_num(0, 0, 0).clamp_min(least)


def _squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared differences, 0 where neither is a number; infinite where one is."""
    same = (x == y) | ~(x.isfinite() | y.isfinite())
    return (x - y).square().nan_to_num(math.inf).where(~same, 0.0)


def _sums(step: Step) -> bool:
    op, overload = step.stored.record.op, step.overload
    return overload is not None and any(
        belongs(op, lambda: overload, each) for each in ("norm", "softmax", "reduction")
    )


def moves(step: Step) -> bool:
    """Whether a call computes nothing but where values go."""
    op = step.stored.record.op
    name = scratch.torchs_name(op).partition(".")[0]
    return name in _MOVE or (step.overload is not None and belongs(op, lambda: step.overload, "copy"))
