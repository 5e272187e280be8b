"""`Accused`: a region of A that does not make what B does, which can be computed again with edits.

Invariant: it is given B's values wherever B has what the region reads.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._values import rounding
from opintercept.runs.program.again import FAILURES
from opintercept.runs.program.evaluate import Perturber, computed, read
from opintercept.runs.program.program import ProgramMemory, Step, in_double
from opintercept.runs.why.changes.edits import Edits, constant
from opintercept.runs.why.changes.wording import biases_of
from opintercept.runs.why.counterparts import Counterpart, nearest, weight_place
from opintercept.runs.why.flow import LEAF, is_real
from opintercept.runs.why.joints import Joint
from opintercept.runs.why.noise import LIMIT, Spread, apart, ratio
from opintercept.runs.why.quantised import eight_bits
from opintercept.runs.why.sweep import Sweep

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both

_BROKEN = 1e3  # times its noise that another result is off, which a change must not move
_NEARER = 0.25  # of the square of the distance of a result, which no value brings about by chance
ODD = 20.0  # times its noise that a recorded result may be off, before its call is not computed again
_ROUNDER = 600.0  # times A's noise that B's own rounding may be, as where it computes large angles
_CALL = 1 << 14  # numbers that a call counts for beside those that it reads


class Accused:
    """A region of A that does not make what B does.

    Attributes:
        steps: Its calls.
        steps_b: The calls of B that make the same.
        found: What B makes of it.
        end: The call at whose output that is known.
        eight_bits: How far each column may be off, if one of both computes it from whole numbers of eight bits.
    """

    def __init__(self, sweep: Sweep, part: Sequence[int], found: Counterpart, judge: Both) -> None:
        self.sweep, self.found, self.judge = sweep, found, judge
        self.steps = [judge.a.steps[number] for number in part]
        self.end = judge.a.steps[found.number]
        self.part = {*part}
        self.spread = sweep.made[found.number]
        self.tensor, self.target = found.joint.tensor, found.joint.values
        self.rows = self.spread.rows(found.joint.tensor.unit) * _larger(self.target, self.spread.base)
        if judge.joints.share is not None or found.by in ("weight", "piece"):  # what B does not compute is A's own
            self.rows = self.rows.masked_fill((self.target == self.spread.base).all(-1, keepdim=True), math.inf)
        self.steps_b = self._steps_b()
        self.eight_bits = self._eight_bits()
        counts = [Counter(step.operator for step in steps) for steps in (self.steps, self.steps_b)]
        self.less, self.more = counts[0] - counts[1], counts[1] - counts[0]

    def _steps_b(self) -> list[Step]:
        """B's calls back to what A has, too."""
        judge, flow, known = self.judge, self.judge.b, set[int]()
        self.before_b: list[Step] = []
        if self.found.step is None:
            return []
        for joint in (*self.sweep.joined.values(), *self.sweep.edges.values()):
            if joint.whole or joint.pieces:  # rows that happen to be the same tell too little
                known |= {each for each in joint.makers if judge.joints.made_by(flow.steps[each]) is joint.tensor}
        last = self.found.step.number
        known -= {last} | ({*range(len(flow.steps))} - flow.active)
        found = flow.before([last], known)
        before = {writer for number in found for writers in flow.writers[number] for writer in writers - {LEAF}}
        self.before_b = [flow.steps[number] for number in sorted(before - found)]
        return [flow.steps[number] for number in sorted(found)]

    def _eight_bits(self) -> torch.Tensor | None:
        sides = (self.steps, self.judge.a), (self.steps_b, self.judge.b)
        whole = [any(is_whole(step) for step in steps) for steps, _ in sides]
        if whole[0] == whole[1] or not self.spread.base.dim():
            return None
        steps, flow = sides[whole[0]]
        for step in reversed(steps):
            place = weight_place(step)
            if place is None or step.stored.record.gemm is None:
                continue
            left = min(step.reads - {place, *biases_of(step)})
            x, weight = (flow.program.value(step.inputs[at][1]).double() for at in (left, place))
            rows = weight if step.operator == "linear" else weight.mT
            if x.shape[-1] == rows.shape[1]:
                bound = eight_bits(x.reshape(-1, x.shape[-1]), rows)
                return bound if len(bound) == self.spread.base.shape[-1] else bound.max()  # of a part of the product
        return None

    @property
    def is_blind(self) -> bool:
        """Whether calls of it are as they were recorded, and not what B's values make of them."""
        return bool(self.part & self.sweep.blind)

    def not_recomputed(self) -> set[int]:
        """The calls whose recorded results are not what they make of their recorded operands."""
        program, found = self.judge.a.program, set()
        perturber = Perturber(self.judge.dtypes[0])
        for step in self.steps:
            if step.overload is None or step.number in self.judge.taken:
                continue
            off = off_record(program, step, perturber, step.number in self.judge.a.active)
            if off > ODD:
                found.add(step.number)
        return found

    def rounds_alone(self) -> bool:
        """Whether B's calls make what A's do if they are computed in float64, so that B rounds more, and no more."""
        judge, memory = self.judge, ProgramMemory(self.judge.b.program.sizes)
        program, unit = judge.b.program, rounding.unit(judge.dtype)
        made = [judge.joints.of(region) for step in self.steps_b for region in step.outputs]
        if (
            not self.found.joint.whole
            or not self.steps_b
            or self.spread.ratio(self.target, unit) > _ROUNDER
            or any(each is not None and each.unit > unit for each in made)
        ):
            return False
        with suppress(OpInterceptError):  # values were not kept
            for step in self.steps_b:
                given = [read(program, region, memory) for _, region in step.inputs]
                if not any(each.is_floating_point() for each in given) and judge.b.makes_real(step):
                    given = [each.double() for each in given]  # what torch makes of whole numbers is of float32
                found = computed(program, step, given)
                for region, value in zip(step.outputs, found, strict=False):
                    if region is not None and value is not None:
                        memory.write(region, value.reshape(region.shape))
            return self.spread.ratio(nearest(memory.read(self.tensor.region), self.spread.base), unit) <= LIMIT
        return False

    def given(self, step: Step) -> list[torch.Tensor]:
        """What a call reads, with B's values where they are known."""
        kept = self.sweep.given.get(step.number, [None] * len(step.inputs))
        program, found = self.judge.a.program, []
        for place, (value, (_, region)) in enumerate(zip(kept, step.inputs, strict=True)):
            if value is not None:
                found.append(value)
                continue
            joint = self.judge.counterparts.joint_of(self.sweep, step.number, place)
            is_edge = (step.number, place) in self.sweep.edges
            fits = joint is not None and (is_edge or joint.tensor.region.shape == region.shape)
            found.append(joint.values if joint is not None and fits else in_double(program.value(region)))
        return found

    def widened(self) -> Accused:
        """The region with the calls right before it, and all that make its constants and positions."""
        flow = self.judge.a
        nearest = {each for number in self.part for writers in flow.writers[number] for each in writers - {LEAF}}
        part = self.part | nearest | flow.before(nearest - flow.active - self.part)
        return Accused(self.sweep, sorted(part), self.found, self.judge)

    def groups(self) -> Iterator[list[Step]]:
        """The calls that a line makes of one operator, together and then alone."""
        groups: dict[Any, list[Step]] = defaultdict(list)
        for step in self.steps:
            groups[step.operator, step.stored.record.source or step.number].append(step)
        yield from groups.values()
        yield from ([step] for group in groups.values() if len(group) > 1 for step in group)

    def ratio(self, edits: Edits) -> float:
        """How far B is from the region with these edits, in units of noise."""
        made = self.run(edits)
        if made is None or made.shape != self.target.shape:
            return math.inf
        return min(ratio(made, target, rows) for target, rows in self._targets())

    def _targets(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """B's values and their noise; then those in the order in which B has them, for A's may be far from them all."""
        yield self.target, self.rows
        values, unit = self.judge.joints.values(self.tensor), self.tensor.unit
        if self.found.joint.whole and values.numel() == self.target.numel():
            plain = values.reshape(self.target.shape)
            if not torch.equal(plain, self.target):
                yield plain, self.spread.rows(unit) * _larger(plain, self.spread.base)

    def run(self, edits: Edits) -> torch.Tensor | None:
        """What the region makes with some edits; None if they do not matter or fail."""
        found = self.rerun(self.steps, edits, [self.end])
        return found.get(self.end.number)

    def rerun(self, steps: Sequence[Step], edits: Edits, ends: Sequence[Step]) -> dict[int, torch.Tensor]:
        """What some calls make of what they read with some edits, by the places of those that change."""
        judge, memory, changed = self.judge, ProgramMemory(self.judge.a.program.sizes), set[int]()
        found: dict[int, torch.Tensor] = {}
        wanted = {each.number for each in ends}
        for step in steps:
            edit = edits.get(step.number)
            if edit is None and not any(region.memory in changed for _, region in step.inputs):
                continue
            inputs = []
            self.judge.searched += _CALL + sum(math.prod(region.shape) for _, region in step.inputs)
            for (_, region), own in zip(step.inputs, self.given(step), strict=True):
                value = own
                if region.memory in changed:
                    kept = memory.read(region)
                    value = torch.where(kept.isnan(), own.double(), kept).to(in_double(own).dtype)
                inputs.append(value)
            with suppress(*FAILURES, OpInterceptError), torch.no_grad():
                if edit is not None:
                    made = list(edit(step, [in_double(each) for each in inputs]))
                elif step.number in judge.taken or step.overload is None:
                    continue
                else:
                    made = computed(judge.a.program, step, inputs)
                for at, each in zip(step.outputs, made, strict=False):
                    if at is not None and each is not None and not each.is_complex():
                        memory.write(at, each.reshape(at.shape).double())
                        changed.add(at.memory)
                out = step.outputs[0]
                if step.number in wanted and out is not None and out.memory in changed:
                    found[step.number] = memory.read(out)
                continue
            return {}
        return found

    def breaks(self, edits: Edits) -> bool:
        """Whether what both have outside the region would not be the same with these edits."""
        flow, known = self.judge.a, self.sweep.joined.keys()
        after = flow.after(edits, known - edits.keys())
        joined = [flow.steps[user] for user in after & known & flow.active - edits.keys() - self.judge.forced.keys()]
        steps = [flow.steps[number] for number in sorted(after)]
        made = self.rerun(steps, edits, [step for step in joined if step is not self.end])
        for number, value in made.items():
            base = self.sweep.joined[number].values
            if (
                value.shape == base.shape
                and not Spread(base, (), self.tensor.unit).ratio(value, self.tensor.unit) <= _BROKEN
            ):
                return True
        return False

    def helps(self, ends: Sequence[Step], bad: set[int]) -> bool:
        """Whether a result of A is nearer to B's with B's values here, far nearer with those of another operator.

        So it is where no result shows it. What B makes of a weight stands for what A does, for it may round more in all
        layers.
        """
        own, other = self.end, self.found.step
        alike = self.found.by == "weight" or (other is not None and other.operator == own.operator)
        least = 1.0 if alike else _NEARER
        nearer = []
        for made, value, joint in self._results(ends, bad):
            sizes = [apart(each, joint.values) for each in (made.base, value)]
            nearer.append(sizes[1] < least * sizes[0])
        return any(nearer) or not nearer

    def suffices(self, ends: Sequence[Step], bad: set[int]) -> bool:
        """Whether A's results are B's with B's values here."""
        results = [*self._results(ends, bad)]
        ratios = (ratio(value, joint.values, made.rows(joint.tensor.unit)) for made, value, joint in results)
        return bool(results) and all(each <= LIMIT for each in ratios)

    def _results(self, ends: Sequence[Step], bad: set[int]) -> Iterator[tuple[Spread, torch.Tensor, Joint]]:
        """Results of A, what they are with B's values here, and what B has for them."""
        steps = [step for step in self.judge.a.steps if step.number in bad and step.number >= self.end.number]
        for number, value in self.rerun(steps, {self.end.number: constant(self.target)}, ends).items():
            end = self.judge.counterparts.end(self.sweep, number)
            if end is not None and value.shape == end.joint.values.shape:
                yield self.sweep.made[number], value, end.joint


def _larger(target: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """How much larger the rows of B are than those of A, 1 at least: their rounding is, too."""
    sizes = [each.nan_to_num(0, 0, 0).square().mean(-1 if each.dim() else (), keepdim=True) for each in (target, base)]
    return (sizes[0] / sizes[1].clamp_min(1e-300)).sqrt().clamp(1, 1e6)


def is_whole(step: Step) -> bool:
    """Whether a call is of those that compute in whole numbers."""
    name = step.stored.record.op
    return name.startswith("quantized::") or step.operator in ("_int_mm", "round", "quantize_per_tensor")


def off_record(program: Any, step: Step, perturber: Perturber, active: bool) -> float:
    """How far what was recorded of a call is from what it makes of its recorded operands, in units of noise."""
    region = step.outputs[0] if step.outputs else None
    if region is None or not is_real(program, region) or not program.has_record(step):
        return 0.0
    try:
        inputs = [in_double(program.value(each)) for _, each in step.inputs]
    except Exception:  # noqa: BLE001 - values are missing
        return 0.0
    base = computed(program, step, inputs)[0]
    others = [perturber.compute(program, step, inputs, active)[0] for _ in range(3)]
    if base is None or any(each is None for each in others):
        return 0.0
    shaped = [each.reshape(region.shape).double() for each in others if each is not None]
    return Spread(base.reshape(region.shape).double(), shaped, perturber.unit).ratio(
        program.value(region).double(), perturber.unit
    )
