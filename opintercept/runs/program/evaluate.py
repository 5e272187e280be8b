"""Computes calls of a program again, in float64: as they are, edited, or off by what rounding may do to them.

Invariant: what cannot be computed is as it was recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from opintercept._ops import scratch
from opintercept._ops.families import belongs
from opintercept._values import rounding
from opintercept.runs.program.again import FAILURES
from opintercept.runs.program.program import Program, ProgramMemory, Region, Step, in_double

Made = list[torch.Tensor | None]
Edit = Callable[[Step, Sequence[torch.Tensor]], Sequence[torch.Tensor | None]]
_EXPONENTIAL = 2.0**-20  # the error of exponentials in fused attention on CPUs (`fexp_u20` of ATen)
_MOVERS = (
    "cat stack index index_select gather embedding roll flip repeat constant_pad_nd where tril triu index_put_"
    " slice_scatter select_scatter masked_fill masked_fill_ new_zeros zeros_like"
)
_MOVE = scratch.MOVES | {*_MOVERS.split()}


def computed(program: Program, step: Step, inputs: Sequence[torch.Tensor]) -> Made:
    """The outputs of a call for these inputs; as they were recorded where it cannot be computed, None of no tensor."""
    made = attempted(step, inputs)
    return recorded(program, step) if made is None else made


def attempted(step: Step, inputs: Sequence[torch.Tensor]) -> Made | None:
    """The outputs of a call for these inputs, computed in float32 by kernels that have no float64; None if it fails."""
    given = [in_double(each) for each in inputs]
    single = [each.float() if each.is_floating_point() else each for each in given]
    for operands in (given, single) if step.overload is not None and step.reads else ():
        with torch.no_grad(), suppress(*FAILURES):
            found = [None if each is None else in_double(each) for each in step.compute(operands)]
            return [*found, *[None] * (len(step.outputs) - len(found))]
    return None


def recorded(program: Program, step: Step) -> Made:
    """The outputs of a call as they were recorded; None for what is no tensor or was not kept."""
    kept = (None if each is None or each.name is None else program.value(each) for each in step.outputs)
    return [None if each is None else in_double(each) for each in kept]


def read(program: Program, region: Region, memory: ProgramMemory) -> torch.Tensor:
    """The values of a region, in float64 or of a whole dtype; where nothing has been written they are as recorded."""
    if not memory.has(region.memory):
        return in_double(program.value(region))
    found = memory.read(region)
    if region.name is None:
        return found
    values, unknown = program.value(region), found.isnan()
    found = torch.where(unknown, values.double(), found) if bool(unknown.any()) else found
    return found if values.is_floating_point() else found.to(values.dtype)


class Perturber:
    """Moves what a call reads and makes as rounding may.

    Args:
        dtype: That of the coarser program.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.unit = dtype, rounding.unit(dtype)
        self._random = torch.Generator().manual_seed(0)

    def compute(self, program: Program, step: Step, inputs: Sequence[torch.Tensor], active: bool) -> Made:
        """The outputs of a call whose operands and results are off by the unit roundoff.

        Args:
            program: The program.
            step: The call.
            inputs: What it reads.
            active: Whether what it computes comes from weights or inputs, and not from constants and positions, which
                are as exact as in A.
        """
        given = self._inputs(step, inputs, active)
        made = computed(program, step, given)
        if moves(step):
            return made
        return [
            each if each is None or not each.is_floating_point() else self._output(step, given, each, active)
            for each in made
        ]

    def _inputs(self, step: Step, inputs: Sequence[torch.Tensor], active: bool) -> list[torch.Tensor]:
        unit, still, found = self._unit_of(step, active), moves(step), []
        if (gemm := step.stored.record.gemm) is not None:  # partial sums are rounded, in float32 at least
            sums = min(self.unit, rounding.unit(torch.float32))
            unit = math.hypot(unit, sums * math.sqrt((step.stored.record.terms or gemm.k) / 6))
        for place, (value, (_, region)) in enumerate(zip(inputs, step.inputs, strict=True)):
            rounds = value.is_floating_point() and place in step.reads and place not in step.written
            found.append(self.off(value, unit) if rounds and not region.weight and not still else value)
        if step.is_attention:  # which rounds scores and weights, too
            units = unit, unit, max(unit, _EXPONENTIAL)
            found[:3] = [
                each * self.off(torch.ones(*each.shape[:-1], 1), own) for each, own in zip(found, units, strict=False)
            ]
        return found

    def _unit_of(self, step: Step, active: bool) -> float:
        output = step.stored.record.outputs
        name = output[0].dtype if output and output[0] is not None else ""
        return self.unit if active else rounding.unit(getattr(torch, name, torch.float32))

    def _output(self, step: Step, inputs: Sequence[torch.Tensor], value: torch.Tensor, active: bool) -> torch.Tensor:
        unit = self._unit_of(step, active)
        if not inputs or step.overload is None:
            return self.off(value, unit)
        x = inputs[0]
        if value.dim() and x.dim() and _sums(step):
            # Rows are off together by the rounding of their sums, which are of float32.
            sums = rounding.unit(torch.float32) * math.sqrt(1 + x.size(-1) / 6)
            value = value * self.off(torch.ones(*value.shape[:-1], 1), sums)
        if x.is_floating_point() and step.operator in ("sum", "mean", "linalg_vector_norm", "var", "std"):
            # A sum that cancels is off by what its numbers are, which may be far larger.
            terms = max(x.numel() / max(value.numel(), 1), 1)
            size = float(x.nan_to_num(0, 0, 0).square().mean().sqrt()) if x.numel() else 0.0
            far = unit * size * math.sqrt(terms) / (1 if step.operator == "sum" else terms)
            value = value + far * torch.randn(value.shape, generator=self._random, dtype=torch.float64)
        if "gelu" in step.stored.record.op and value.shape == x.shape:
            value = value + self.off(x, unit) - x  # kernels add numbers whose sum may be far smaller
        return self.off(value, unit)

    def off(self, value: torch.Tensor, unit: float) -> torch.Tensor:
        """Values off by up to a unit roundoff, those below the smallest normal number by one of that.

        Whole numbers that the dtype has are as they are: a mask is 0 or 1 times the lowest number, and not nearly so.
        """
        turn = torch.rand(value.shape, generator=self._random, dtype=torch.float64).mul_(2).sub_(1).mul_(unit)
        turn *= (value != value.round()) | (value.abs() * unit > 1)
        least = torch.finfo(self.dtype).tiny if unit == self.unit else 0.0
        small = (value.abs() < least) & (value != 0)
        found = value * (1 + turn)
        return found + turn * (least - value.abs()) * small if bool(small.any()) else found


def moves(step: Step) -> bool:
    """Whether a call computes nothing but where values go."""
    op = step.stored.record.op
    name = scratch.torchs_name(op).partition(".")[0]
    return name in _MOVE or (step.overload is not None and belongs(op, lambda: step.overload, "copy"))


def _sums(step: Step) -> bool:
    op, overload = step.stored.record.op, step.overload
    return overload is not None and any(
        belongs(op, lambda: overload, each) for each in ("norm", "softmax", "reduction")
    )
