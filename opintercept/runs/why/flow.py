"""`Flow`: which calls of a program make what each of its calls reads.

Invariant: it follows elements of memory, so a call that writes a part of a tensor makes that part alone.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterable

import torch

from opintercept._ops.scratch import UNWRITTEN
from opintercept.runs.program.program import Program, Region, Step, is_dense, places_of
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import Run

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
        self._computed: set[int] = set()  # active calls whose results come from real numbers, as counts do not
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
                reals = [
                    found for found, (_, region) in zip(read, step.inputs, strict=True) if is_real(program, region)
                ]
                drawn = step.is_random or not step.inputs
                if drawn or any(LEAF in found or found & self._computed for found in reals):
                    self._computed.add(step.number)
            for region in filter(None, step.outputs):
                owners.write(region, step.number)
        if not self.active:
            self.active = self._computed = {step.number for step in self.steps}
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
            if step.number in self._computed
            and self.makes_real(step)
            and not any(self.goes_into(user) for user, _ in self.users[step.number])
        ]

    def is_end(self, number: int, region: Region) -> bool:
        """Whether nothing reads one real result of a call, as of a generated kernel that makes several."""
        readers = (user for user, place in self.users[number] if self._read(user, place).memory == region.memory)
        return number in self._computed and not any(map(self.goes_into, readers))

    def _read(self, number: int, place: int) -> Region:
        return self.steps[number].inputs[place][1]

    def goes_into(self, number: int) -> bool:
        """Whether a call computes real numbers of what comes from weights and inputs."""
        return number in self.active and self.makes_real(self.steps[number])

    def last_products(self) -> list[int]:
        """The products from which single numbers such as a loss are computed: logits, which tell more than these."""
        regions = ((end, self.steps[end].outputs[0]) for end in self.ends)
        single = {end for end, region in regions if region is not None and math.prod(region.shape) == 1}
        products = {step.number for step in self.steps if step.stored.record.gemm is not None}
        between = self.before(single - products, products)
        found = products & single.union(*(writers for number in between for writers in self.writers[number]))
        return sorted(found - self.after({user for number in found for user, _ in self.users[number]}))

    def final_products(self, *, backward: bool) -> list[int]:
        """The products that lead to no other product, of the forward passes or with those `backward`."""
        counted = {
            s.number for s in self.steps if is_product(s.stored) and (backward or s.stored.record.phase == "forward")
        }
        before: set[int] = set()
        found = []
        for step in reversed(self.steps):
            if any(user in before or user in counted for user, _ in self.users[step.number]):
                before.add(step.number)
            elif step.number in counted & self.active:
                found.append(step.number)
        return found[::-1]

    def makes_real(self, step: Step) -> bool:
        """Whether the first output of a call is of real numbers."""
        region = step.outputs[0] if step.outputs else None
        return region is not None and is_real(self.program, region)

    def before(
        self, numbers: Iterable[int], stop: Container[int] = (), cut: Container[tuple[int, int]] = ()
    ) -> set[int]:
        """Calls and those that lead to them, back to calls whose results are known and to inputs that are.

        Args:
            numbers: The places of the calls.
            stop: Those of the calls whose results are known.
            cut: The inputs that are, by the places of the call and of the input.
        """
        found, left = {*numbers}, [*numbers]
        while left:
            at = left.pop()
            for place, writers in enumerate(self.writers[at]):
                if writers and (at, place) not in cut:
                    new = {each for each in writers - found if each != LEAF and each not in stop}
                    found |= new
                    left += new
        return found

    def after(
        self, numbers: Iterable[int], stop: Container[int] = (), cut: Container[tuple[int, int]] = ()
    ) -> set[int]:
        """Calls and those that they lead to, up to and with those whose results are known."""
        found, left = {*numbers}, [*numbers]
        while left:
            new = {user for user, place in self.users[left.pop()] if (user, place) not in cut} - found
            found |= new
            left += [each for each in new if each not in stop]
        return found


def passes(program: Program) -> int:
    """How many backward passes there are."""
    phases = [step.stored.record.phase == "forward" for step in program.steps]
    return sum(one and not other for one, other in itertools.pairwise(phases))


def holds_products(run: Run, rank: int | None = None) -> bool:
    """Whether products alone were recorded, of one process or of all."""
    calls = (call for call in run.calls(rank) if call.record.phase == "forward" and call.error is None)
    return all(is_product(call) for call in calls)  # views tell, too


def is_product(call: StoredCall) -> bool:
    """Whether a call is recorded where products alone are: a product of two matrices, or an attention."""
    return call.record.lhs is not None and "conv" not in call.record.op


def is_real(program: Program, region: Region) -> bool:
    """Whether a region has real numbers."""
    return program.dtype(region)[:1] in ("F", "B") and program.dtype(region) != "BOOL"
