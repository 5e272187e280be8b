"""`Flow`: which calls of a program make what each of its calls reads.

Invariant: it follows elements of memory, so a call that writes a part of a tensor makes that part alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from opintercept._ops.scratch import UNWRITTEN
from opintercept.runs.program.program import Program, Region, Step, is_dense, places_of

LEAF = -1
"""Stands among the writers of an input for what no call has made."""
_CONSTANT = frozenset(("ones_like", "zeros_like", "full_like", "new_zeros", "new_ones", "new_full", "zeros", "ones"))


class _Owners:
    """Which call has last written to each element of a memory."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self._sizes = sizes
        self._of: dict[int, int | torch.Tensor] = {}  # a number if one call has written all of it

    def read(self, region: Region) -> frozenset[int]:
        owner = self._of.get(region.memory, LEAF)
        if isinstance(owner, int):
            return frozenset((owner,))
        found = owner.as_strided(region.shape, region.stride, region.offset)
        return frozenset(found.unique().tolist())

    def write(self, region: Region, number: int) -> None:
        size = self._sizes[region.memory]
        if math.prod(region.shape) >= size:
            self._of[region.memory] = number
            return
        owner = self._of.get(region.memory, LEAF)
        if isinstance(owner, int):
            owner = self._of[region.memory] = torch.full((size,), owner, dtype=torch.int32)
        if is_dense(region.shape, region.stride):
            owner.as_strided(region.shape, region.stride, region.offset).fill_(number)
        else:
            owner[places_of(region)] = number


class Flow:
    """The data flow of a program.

    Args:
        program: The program.
        end: Where to stop, before the call at this place; None for all of it.

    Attributes:
        program: The program.
        steps: Its calls, up to the end.
        writers: The places of the calls that make each input of a call, with `LEAF` for what no call has made; empty
            for inputs that are not read.
        users: The places of the calls that read what a call makes, and the places of these inputs.
        active: The places of the calls whose results come from weights, inputs or random numbers, and not from
            constants and positions alone.
        ends: The places of the calls whose real results nothing reads: logits, a loss.
    """

    def __init__(self, program: Program, end: int | None = None) -> None:
        self.program, self.steps = program, program.steps[:end]
        self.writers: list[list[frozenset[int]]] = []
        self.users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.active: set[int] = set()
        owners = _Owners(program.sizes)
        for step in self.steps:
            read = [
                owners.read(region) if place in step.reads else frozenset[int]()
                for place, (_, region) in enumerate(step.inputs)
            ]
            self.writers.append(read)
            for place, found in enumerate(read):
                for writer in found - {LEAF}:
                    self.users[writer].append((step.number, place))
            if self._is_active(step, read):
                self.active.add(step.number)
            for region in filter(None, step.outputs):
                owners.write(region, step.number)
        if not self.active:
            self.active = {step.number for step in self.steps}
        self.ends = self._ends()

    def _is_active(self, step: Step, read: list[frozenset[int]]) -> bool:
        if step.operator in _CONSTANT:
            return False
        if step.is_random or not (step.inputs or step.arguments or step.operator in UNWRITTEN):
            return True
        leaves = (step.inputs[place][1] for place, found in enumerate(read) if LEAF in found)
        return any(is_real(self.program, each) and math.prod(each.shape) > 1 for each in leaves) or any(
            writer in self.active for found in read for writer in found
        )

    def _ends(self) -> list[int]:
        heavy = (s.number for s in self.steps if s.stored.record.gemm is not None or s.operator == "embedding")
        first = next(heavy, 0)
        return [
            step.number
            for step in self.steps[first:]
            if step.number in self.active
            and self.makes_real(step)
            and not any(
                user in self.active and self.makes_real(self.steps[user]) for user, _ in self.users[step.number]
            )
        ]

    def last_products(self) -> list[int]:
        """The products from which single numbers such as a loss are computed: logits, which tell more than these."""
        found: set[int] = set()
        for end in self.ends:
            region = self.steps[end].outputs[0]
            left = [end] if region is not None and math.prod(region.shape) == 1 else []
            seen = {*left}
            while left:
                number = left.pop()
                if self.steps[number].stored.record.gemm is not None:
                    found.add(number)
                    continue
                new = {each for writers in self.writers[number] for each in writers & self.active} - seen
                seen |= new
                left += new
        after: set[int] = set()
        for number in found:
            left = [user for user, _ in self.users[number]]
            while left:
                user = left.pop()
                if user not in after:
                    after.add(user)
                    left += [each for each, _ in self.users[user]]
        return sorted(found - after)

    def makes_real(self, step: Step) -> bool:
        """Whether the first output of a call is of real numbers."""
        region = step.outputs[0] if step.outputs else None
        return region is not None and is_real(self.program, region)

    def before(self, number: int, known: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[int]:
        """A call and those that lead to it, back to calls whose results are known and to inputs that are."""
        stop, cut = {*known}, {*edges}
        found, left = {number}, [number]
        while left:
            at = left.pop()
            for place, writers in enumerate(self.writers[at]):
                if (at, place) not in cut:
                    new = writers - found - stop - {LEAF}
                    found |= new
                    left += new
        return sorted(found)


def is_real(program: Program, region: Region) -> bool:
    """Whether a region has real numbers."""
    return program.dtype(region)[:1] in ("F", "B") and program.dtype(region) != "BOOL"
