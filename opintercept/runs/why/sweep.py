"""`Sweep`: A's program in float64 with B's values in the place of A's wherever B has them.

Invariant: nothing that B has done otherwise is carried past a joint. What both runs have bit for bit is not computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from opintercept.runs.program.evaluate import Made, Perturber, attempted, read, recorded
from opintercept.runs.program.program import ProgramMemory, Region, Step, last_uses
from opintercept.runs.why.flow import LEAF, Flow, is_real
from opintercept.runs.why.joints import Joint, Joints, Tensor, is_trivial
from opintercept.runs.why.noise import LIMIT, Spread

_TRIALS = 3
_ALIKE = 100.0  # times as far may bits be that both runs have
_KEPT = 1 << 24  # numbers that a call may read, if they are to be kept


@dataclass(slots=True)
class Sweep:
    """What was found.

    Attributes:
        joined: B's tensor for the first output of each call that B has, by the call's place.
        edges: That for inputs, by the places of the call and of the input: of leaves, and of parts of outputs.
        given: What the other calls read, by their places; None for what is that of an edge, or as it was recorded.
        made: What they make, with its noise.
        turned: The places of calls that choose otherwise than A has, since B's values are others, and how often.
        blind: The places of calls that cannot be computed from what B has, so that what was recorded stands for it.
    """

    joined: dict[int, Joint] = field(default_factory=dict)
    edges: dict[tuple[int, int], Joint] = field(default_factory=dict)
    given: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)
    made: dict[int, Spread] = field(default_factory=dict)
    turned: dict[int, int] = field(default_factory=dict)
    blind: set[int] = field(default_factory=set)


class Sweeper:
    """Sweeps through a program.

    Args:
        flow: A's program.
        joints: B's tensors.
        perturber: Moves values as rounding may.
        taken: The places of calls that are not computed again, whose results are as they were recorded.
        weights: B's values of weights that it has in another precision, by their memory.
        follows: Whether rows are B's for which B has chosen otherwise, if most are the same.
    """

    def __init__(
        self,
        flow: Flow,
        joints: Joints,
        perturber: Perturber,
        taken: set[int],
        weights: Mapping[int, tuple[Region, torch.Tensor]],
        *,
        follows: bool,
    ) -> None:
        self.flow, self.joints, self.perturber, self.taken = flow, joints, perturber, taken
        self._weights, self._follows = weights, follows
        self._program = flow.program
        self._last = last_uses(flow.steps)

    def sweep(self, forced: Mapping[int, Joint]) -> Sweep:
        """Sweep, with the outputs of some calls as they are in B."""
        found = Sweep()
        self._memories = [ProgramMemory(self._program.sizes) for _ in range(_TRIALS + 1)]
        self._other: set[int] = set()  # memory that is not as it was recorded
        self._chosen: set[int] = set()  # the places of calls that make other things since choices are others
        self._mostly: set[Tensor] = set()  # B's tensors of which A has most rows, but for other choices
        self._sized = False  # whether the program itself reads a choice, so that the sizes of parts are not B's
        left = {**self._weights}
        for step in self.flow.steps:
            for place in step.reads - step.written:  # what initialises them writes to them only
                if (own := left.pop(step.inputs[place][1].memory, None)) is not None:
                    self._put(*own)
            self._step(step, found, forced)
            for memory in self._memories:
                memory.forget(self._last.get(step.number, ()))
        self._memories = []
        return found

    def _step(self, step: Step, found: Sweep, forced: Mapping[int, Joint]) -> None:
        for place in sorted(step.reads):
            self._join_input(step, place, found)
            chosen = self.flow.writers[step.number][place] & self._chosen
            if chosen - found.joined.keys():
                self._chosen.add(step.number)
            if self._sized and chosen and not self._is_whole(chosen, step.inputs[place][1]):
                self._chosen.add(step.number)
                found.blind.add(step.number)
        pure = not any(step.inputs[place][1].memory in self._other for place in step.reads)
        if step.number in forced:
            found.joined[step.number] = forced[step.number]
            copies = self._computed(step, found, pure)
            self._write(step, copies, found)
            region = step.outputs[0]
            assert region is not None
            self._put(region, forced[step.number].values)
            return
        if pure and self._is_exact(step, found):
            for region in filter(None, step.outputs):
                self._as_recorded(region)
            return
        copies = self._computed(step, found, pure)
        self._write(step, copies, found)
        for place, region in enumerate(step.outputs):
            if region is not None and copies[0][place] is not None and is_real(self._program, region):
                joint = self._join_output(step, place, region, copies, found)
                if joint is not None:
                    self._put(region, joint.values)

    def _join_input(self, step: Step, place: int, found: Sweep) -> None:
        """Look for an input that no call has made, or that is a part of what calls have made."""
        region, writers = step.inputs[place][1], self.flow.writers[step.number][place]
        if region.memory in self._weights:
            return
        if region.name is None or not is_real(self._program, region) or not writers:
            return
        if region.memory not in self._other and (exact := self.joints.exact(self._program, region)) is not None:
            found.edges[step.number, place] = exact
            return
        joint: Joint | None
        if writers == {LEAF}:
            joint = self._leaf(region)
        elif all(writer in found.joined for writer in writers) or self._is_whole(writers, region):
            return
        else:
            copies = [read(self._program, region, memory) for memory in self._memories]
            joint = self.joints.find(Spread(copies[0], copies[1:], self.perturber.unit))
            if joint is not None:  # what is beside it is A's own, so it is as far off as A's is
                found.edges[step.number, place] = joint
                self._other.add(region.memory)
                self._memories[0].write(region, joint.values.reshape(region.shape))
            return
        if joint is not None:
            found.edges[step.number, place] = joint
            self._put(region, joint.values)

    def _leaf(self, region: Region) -> Joint | None:
        if region.memory in self._other:
            return None  # an earlier call that reads it has joined it
        return self.joints.find(Spread(self._program.value(region).double(), (), self.perturber.unit), by_rows=False)

    def _is_whole(self, writers: frozenset[int], region: Region) -> bool:
        """Whether an input is all that one call has made, which was looked for already."""
        outputs = [self.flow.steps[writer].outputs for writer in writers]
        return len(outputs) == 1 and any(each is not None and each[1:5] == region[1:5] for each in outputs[0])

    def _is_exact(self, step: Step, found: Sweep) -> bool:
        """Whether B has what a call was recorded to make, bit for bit, so that it need not be computed."""
        real = [(at, each) for at, each in enumerate(step.outputs) if each is not None and is_real(self._program, each)]
        for place, region in real:
            joint = self.joints.exact(self._program, region)
            if joint is None:
                if region.name is not None and is_trivial(self._program.value(region)):
                    continue
                return False
            if place == 0:
                found.joined[step.number] = joint
        return True

    def _computed(self, step: Step, found: Sweep, pure: bool) -> list[Made]:
        """What a call makes in each replay."""
        program, number, active = self._program, step.number, step.number in self.flow.active
        first = [read(program, region, self._memories[0]) for _, region in step.inputs]
        inputs = [first]
        for memory in self._memories[1:] if not pure else ():
            own = [
                each if memory.has_that_of(self._memories[0], region.memory) else read(program, region, memory)
                for each, (_, region) in zip(first, step.inputs, strict=True)
            ]
            inputs.append(own)
        if sum(each.numel() for each in first) <= _KEPT:
            writers = self.flow.writers[number]
            found.given[number] = [
                None
                if writers[place] == {LEAF} and ((number, place) in found.edges or region.memory not in self._other)
                else value
                for place, (value, (_, region)) in enumerate(zip(first, step.inputs, strict=True))
            ]
        made = None if number in self.taken else attempted(step, first)
        if made is None:
            found.blind |= set() if pure or step.is_random else {number}
            return [recorded(program, step)] * len(self._memories)
        copies = [made]
        for turn in range(1, len(self._memories)):
            copies.append(self.perturber.compute(program, step, inputs[turn if not pure else 0], active))
        return copies

    def _write(self, step: Step, copies: list[Made], found: Sweep) -> None:
        for place, region in enumerate(step.outputs):
            if region is None or region.memory in self._weights:  # as they are initialised
                continue
            values = [made[place] if place < len(made) else None for made in copies]
            if values[0] is None or values[0].is_complex():
                continue
            base = values[0]
            if not is_real(self._program, region):  # a choice: all replays make that of the first
                turned = base.reshape(region.shape) != self._program.value(region) if region.name is not None else None
                if turned is None or not bool(turned.any()):
                    continue
                self._chosen.add(step.number)
                self._sized |= not self.flow.users[step.number]
                if any(is_real(self._program, step.inputs[at][1]) for at in step.reads):
                    found.turned[step.number] = int(turned.sum())
                values = [base] * len(values)
            self._other.add(region.memory)
            if all(value is values[0] for value in values):
                self._put(region, base.double())
                continue
            for memory, value in zip(self._memories, values, strict=True):
                if value is not None:
                    memory.write(region, value.reshape(region.shape))

    def _join_output(self, step: Step, place: int, region: Region, copies: list[Made], found: Sweep) -> Joint | None:
        values = [made[place] for made in copies if place < len(made)]
        base, *others = [each.reshape(region.shape).double() for each in values if each is not None]
        spread = Spread(base, others, self.perturber.unit)
        joint = self.joints.find(spread) or self._recorded_alike(spread, region)
        if (
            self._follows and step.number in self._chosen and (joint is None or not joint.whole)
        ):  # rows are others' by chance
            most = self.joints.mostly(spread, self._mostly)
            self._mostly |= set() if most is None else {most.tensor}
            joint = most or joint
        if place == 0:
            found.made[step.number] = spread
            if joint is not None:
                found.joined[step.number] = joint
        return joint

    def _recorded_alike(self, spread: Spread, region: Region) -> Joint | None:
        """B's tensor with the bits that A has recorded, if they are near what is computed: noise may be misjudged."""
        exact = self.joints.exact(self._program, region)
        if exact is None or not spread.ratio(exact.values, exact.tensor.unit) <= _ALIKE * LIMIT:
            return None
        return exact

    def _put(self, region: Region, values: torch.Tensor) -> None:
        self._other.add(region.memory)
        first, *others = self._memories
        whole = region.once.shape == region.shape and math.prod(region.shape) == self._program.sizes[region.memory]
        if whole:
            first.write(region, values.reshape(region.shape))
            first.share(region.memory, others)
            return
        for memory in self._memories:
            memory.write(region, values.reshape(region.shape))

    def _as_recorded(self, region: Region) -> None:
        """Let the recorded values of an output stand for what was there."""
        if region.memory in self._other:
            for memory in self._memories:
                memory.write(region, torch.full(region.shape, torch.nan))
