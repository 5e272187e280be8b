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
from opintercept.runs.program.again import FAILURES
from opintercept.runs.program.evaluate import Perturber, computed
from opintercept.runs.program.program import ProgramMemory, Step, in_double
from opintercept.runs.why.changes.edits import (
    Edits,
    constant,
)
from opintercept.runs.why.changes.wording import biases_of
from opintercept.runs.why.counterparts import Counterpart, nearest
from opintercept.runs.why.flow import LEAF, is_real
from opintercept.runs.why.joints import Tensor
from opintercept.runs.why.noise import Spread, ratio
from opintercept.runs.why.sweep import Sweep

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both

_BROKEN = 1e3  # times its noise that another result is off, which a change must not move
ODD = 20.0  # times its noise that a recorded result may be off, before its call is not computed again
_CALL = 1 << 14  # numbers that a call counts for beside those that it reads


class Accused:
    """A region of A that does not make what B does.

    Attributes:
        steps: Its calls.
        steps_b: The calls of B that make the same.
        found: What B makes of it.
        end: The call at whose output that is known.
    """

    def __init__(self, sweep: Sweep, part: Sequence[int], found: Counterpart, judge: Both) -> None:
        self.sweep, self.found, self.judge = sweep, found, judge
        self.steps = [judge.a.steps[number] for number in part]
        self.end = judge.a.steps[found.number]
        self.part = {*part}
        self.spread = sweep.made[found.number]
        self.last_b = found.step
        self.tensor, self.target = found.joint.tensor, found.joint.values
        if found.by in ("weight", "parameter") and (tensor := self._with_bias()) is not None:
            self.tensor, self.target = tensor, nearest(judge.joints.values(tensor), self.spread.base)
        self.rows = self.spread.rows(found.joint.tensor.unit) * _larger(self.target, self.spread.base)
        self.steps_b = self._steps_b()
        counts = [Counter(step.operator for step in steps) for steps in (self.steps, self.steps_b)]
        self.less, self.more = counts[0] - counts[1], counts[1] - counts[0]

    def _steps_b(self) -> list[Step]:
        """B's calls back to what A has, too."""
        judge, known = self.judge, set[int]()
        self.before_b: list[Step] = []
        if self.last_b is None:
            return []
        for joint in (*self.sweep.joined.values(), *self.sweep.edges.values()):
            known |= joint.makers if joint.whole else set()  # rows that happen to be the same tell too little
        flow, last = judge.b, self.last_b.number
        known -= {last} | ({*range(len(flow.steps))} - flow.active)
        found = {*flow.before(last, known, ())}
        before = {writer for number in found for writers in flow.writers[number] for writer in writers - {LEAF}}
        self.before_b = [flow.steps[number] for number in sorted(before - found)]
        return [flow.steps[number] for number in sorted(found)]

    def _with_bias(self) -> Tensor | None:
        """What B makes in the end with A's bias, where B adds that in the next call."""
        flow, joint, other = self.judge.b, self.found.joint, self.found.step
        mine = biases_of(self.end)
        if other is None or not mine or biases_of(other) or not joint.whole:
            return None
        for user, place in flow.users[other.number]:
            step = flow.steps[user]
            made = self.judge.joints.made_by(step)
            rest = [region for at, (_, region) in enumerate(step.inputs) if at != place]
            if step.operator != "add" or made is None or len(rest) != 1 or made.region.shape == rest[0].shape:
                continue
            own = self.judge.a.program.value(self.end.inputs[min(mine)][1]).double().flatten()
            theirs = flow.program.value(rest[0]).double().flatten()
            alike = torch.equal(own, theirs) or (rest[0].weight and own.shape == theirs.shape)
            if alike and math.prod(made.region.shape) == joint.values.numel():
                self.last_b = step
                return made
        return None

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

    def given(self, step: Step) -> list[torch.Tensor]:
        """What a call reads, with B's values where they are known."""
        if step.number in self.sweep.given:
            return self.sweep.given[step.number]
        program, found = self.judge.a.program, []  # both runs have it bit for bit, or it is large
        for place, (_, region) in enumerate(step.inputs):
            joint = self.judge.counterparts.joint_of(self.sweep, step.number, place)
            fits = joint is not None and joint.tensor.region.shape == region.shape
            found.append(joint.values if joint is not None and fits else in_double(program.value(region)))
        return found

    def widened(self) -> Accused:
        """The region with the calls right before it, and all that make its constants and positions."""
        flow = self.judge.a
        part, left = {*self.part}, []
        for number in self.part:
            left += [writer for writers in flow.writers[number] for writer in writers - {LEAF} - self.part]
        while left:
            number = left.pop()
            if number in part:
                continue
            part.add(number)
            if number not in flow.active:
                left += [writer for writers in flow.writers[number] for writer in writers - {LEAF}]
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
        flow, left, users = self.judge.a, [*edits], set[int]()
        known = self.sweep.joined.keys()
        while left:
            new = {user for user, _ in flow.users[left.pop()] if user < len(flow.steps)} - users
            users |= new
            left += new - known
        joined = [flow.steps[user] for user in users & known & flow.active - edits.keys() - self.judge.forced.keys()]
        steps = [flow.steps[number] for number in sorted({*edits, *users})]
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
        """Whether A's results are nearer to B's with B's values here; so it is where no result shows it."""
        steps = [step for step in self.judge.a.steps if step.number in bad and step.number >= self.end.number]
        made = self.rerun(steps, {self.end.number: constant(self.target)}, ends)
        nearer = []
        for number, value in made.items():
            end = self.judge.counterparts.end(self.sweep, number)
            if end is not None and value.shape == end.joint.values.shape:
                target, base = end.joint.values, self.sweep.made[number].base
                sizes = [float((each - target).nan_to_num(0, 0, 0).square().sum()) for each in (base, value)]
                nearer.append(sizes[1] < sizes[0])
        return any(nearer) or not nearer


def _larger(target: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """How much larger the rows of B are than those of A, 1 at least: their rounding is, too."""
    sizes = [each.nan_to_num(0, 0, 0).square().mean(-1 if each.dim() else (), keepdim=True) for each in (target, base)]
    return (sizes[0] / sizes[1].clamp_min(1e-300)).sqrt().clamp(1, 1e6)


def off_record(program: Any, step: Step, perturber: Perturber, active: bool) -> float:
    """How far what was recorded of a call is from what it makes of its recorded operands, in units of noise."""
    region = step.outputs[0] if step.outputs else None
    if region is None or not is_real(program, region):
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
