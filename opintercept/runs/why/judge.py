"""Judges two programs by outcome: what of A's program, computed on B's values, differs and stays so up to a result.

Invariant: a difference that is gone at the next joint accuses nobody; each cause is found on B's own values.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

from opintercept._values import rounding
from opintercept.runs.program.evaluate import Perturber
from opintercept.runs.program.program import Program
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer, Cause, Loss, Place, Verdict
from opintercept.runs.why.both import Both
from opintercept.runs.why.causes import explained
from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.wording import place_of
from opintercept.runs.why.coarse import CoarseWeights, coarse_weights
from opintercept.runs.why.costs import with_costs
from opintercept.runs.why.counterparts import Counterpart
from opintercept.runs.why.joints import content_of
from opintercept.runs.why.noise import LIMIT, Spread
from opintercept.runs.why.quantised import quantised
from opintercept.runs.why.sweep import Sweep, Sweeper

_MOST = 40  # sweeps
_EIGHT_BITS = 0.05  # how far a product of int8 may be off, relative to its norm
_IN = "has its weight in "
_FULL = "computes in full what A computes in int8"
_UNIFORM = 0.4  # of the products that are quantised where all are meant to be


def judged(a: Run, b: Run) -> Answer:
    """Judge two runs of which A has all operators."""
    starts = _starts(a, b)
    one, other = (Program(run, run.ranks[0], whole=True, start=at) for run, at in zip((a, b), starts, strict=True))
    alike = len(one.roots) == len(other.roots)  # another number of passes computes other batches
    judge = Judge(one, other, forward=alike)
    judge.run()
    if alike and not judge.found and one.backward is not None and other.backward is not None:
        judge = Judge(one, other, forward=False)
        judge.run()
    return judge.answer(a, b)


def _starts(a: Run, b: Run) -> tuple[int, int]:
    """The step that each run is judged from: where one goes on from a step of the other, that step."""
    read: list[dict[int, set[str]]] = []
    for run in (a, b):
        read.append(defaultdict(set))
        for call in run.calls(run.ranks[0]):
            if call.record.phase == "forward" and call.record.gemm is not None:
                names = (call.tensors.get(role) for role in ("lhs", "rhs", "bias"))
                read[-1][call.record.step].update(content_of(name) for name in names if name is not None)
    if not all(read):
        return 0, 0
    firsts = min(read[0]), min(read[1])
    found = [
        (len(steps[step] & read[1 - side][firsts[1 - side]]), step == firsts[side], side, step)
        for side, steps in enumerate(read)
        for step in steps
    ]
    _, is_first, side, step = max(found, key=lambda each: each[:2])
    if is_first:
        return 0, 0
    return (step, 0) if side == 0 else (0, step)


class _Head(NamedTuple):
    """A cause, and the place of the call at which B's values were put into A's program."""

    cause: Cause
    number: int
    is_coarse: bool
    operator: str


class Judge(Both):
    """The judgement of two programs.

    Args:
        a: A's program.
        b: B's.
        forward: Whether only the first forward pass is judged.

    Attributes:
        results: The places of the calls whose results must agree: those that nothing reads, and logits behind a loss.
        coarse: The weights that one program has in fewer bits throughout.
        last: The last sweep.
    """

    def __init__(self, a: Program, b: Program, *, forward: bool) -> None:
        super().__init__(a, b, forward=forward)
        self.results = [*self.a.last_products(), *self.a.ends] if forward else self.a.ends
        self.coarse: CoarseWeights | None = None
        self.last = Sweep()
        self._accused: set[int] = set()
        self._heads: list[_Head] = []

    def run(self) -> None:
        """Find the causes, one sweep after the other."""
        for _ in range(_MOST):
            self.last = Sweeper(
                self.a, self.joints, Perturber(self.dtype), self.taken, self.coarse.values if self.coarse else {}
            ).sweep(self.forced)
            ends = self._bad_ends(self.last)
            if ends and self.coarse is None:
                self.coarse = coarse_weights(self.counterparts, self.dtype) if self._has_others(self.last) else None
                self.coarse = self.coarse or CoarseWeights()
                if self.coarse.values:
                    continue
            if not ends or not self._accuse(self.last, self._bad(self.last, ends), ends):
                return

    def _has_others(self, sweep: Sweep) -> bool:
        """Whether B lacks some weight of A."""
        return any(
            region.weight and (step.number, place) not in sweep.edges
            for step in self.a.steps
            for place, (_, region) in enumerate(step.inputs)
            if place in step.reads and math.prod(region.shape) > 1
        )

    def _bad_ends(self, sweep: Sweep) -> set[int]:
        """The results that differ."""
        found = set()
        known = {maker for joint in sweep.joined.values() for maker in joint.makers}
        for number in self.results:
            if number in sweep.joined and self._goes_on(sweep, number, known):
                spread = Spread(sweep.joined[number].values, (), rounding.unit(self.dtype))
                sweep.made.setdefault(number, spread)
                del sweep.joined[number]
            if number in sweep.joined:
                continue
            if number not in sweep.made:  # a constant that both need not have
                region = self.a.steps[number].outputs[0]
                if region is None or region.name is None:
                    continue
                sweep.made[number] = Spread(self.a.program.value(region).double(), (), rounding.unit(self.dtype))
            end = self.counterparts.end(sweep, number)
            if end is not None and not sweep.made[number].ratio(end.joint.values, end.joint.tensor.unit) <= LIMIT:
                found.add(number)
        return found

    def _goes_on(self, sweep: Sweep, number: int, known: set[int]) -> bool:
        """Whether B computes something else of a result of A, and has that as its result."""
        end = self.counterparts.ends.get(number)
        makers = set() if end is None else {*end.makers}
        return (
            number not in self.forced
            and bool(makers)
            and not makers & known
            and (not sweep.joined[number].makers & {*self.b.ends})
        )

    def _bad(self, sweep: Sweep, ends: set[int]) -> set[int]:
        """The calls from which a way leads to a result that differs, on which no joint lies."""
        bad: set[int] = set()
        for step in reversed(self.a.steps):
            number = step.number
            if number not in sweep.joined and (
                number in ends
                or any(user in bad and (user, place) not in sweep.edges for user, place in self.a.users[number])
            ):
                bad.add(number)
        return bad

    def _accuse(self, sweep: Sweep, bad: set[int], ends: set[int]) -> bool:
        """Close regions, accuse them, and put B's values in; return whether there was one."""
        stale: set[int] = set()
        again = False
        for found in self.counterparts.of(sweep, bad, ends, stale):
            number = found.number
            if number in sweep.joined or number in stale:
                continue
            agrees = sweep.made[number].ratio(found.joint.values, found.joint.tensor.unit) <= LIMIT
            if agrees and number in ends and found.by != "result":
                continue  # B goes on from there
            part = self.a.before(number, sweep.joined, sweep.edges)
            own = {each for each in part if each != number and each in self.a.active} or {number}
            stale |= self._after(number, bad)
            if not agrees and not own & self._accused:
                accused = Accused(sweep, part, found, self)
                untrusted = accused.not_recomputed()
                if untrusted - self.taken:
                    self.taken |= untrusted
                    return True
                if self._is_doubtful(found) and not accused.helps([self.a.steps[end] for end in ends], bad):
                    stale -= self._after(number, bad)
                    continue
                cause, is_coarse = self._in_eight_bits(accused) or explained(accused)
                self._heads.append(_Head(cause, number, is_coarse, accused.end.operator))
                self._accused |= own if not is_coarse else set()
            self.forced[number] = found.joint
            sweep.joined[number] = found.joint
            again = True
        return again

    def _in_eight_bits(self, accused: Accused) -> tuple[Cause, bool] | None:
        """That B computes in full what A computes in whole numbers, if it is as near as these allow."""
        whole = [step for step in accused.steps if step.operator in ("_int_mm", "linear_dynamic")]
        base, target = accused.spread.base, accused.target
        columns = (target - base).reshape(-1, base.shape[-1] if base.dim() else 1).square().mean(0)
        sizes = base.reshape(columns.numel() and -1, columns.numel()).square().mean(0) if whole else columns
        if not whole or bool((columns > _EIGHT_BITS**2 * (sizes + sizes.mean())).any()):
            return None
        return Cause("dtype", _FULL, place_of(whole[0]), until=place_of(accused.end), exact=True), True

    def _is_doubtful(self, found: Counterpart) -> bool:
        """Whether the same weight may not mean the same result: other operators may add their bias elsewhere."""
        other = found.step
        return found.by in ("weight", "parameter") and (
            other is None or other.operator != self.a.steps[found.number].operator
        )

    def _after(self, number: int, bad: set[int]) -> set[int]:
        """What bad calls a call leads to, with itself."""
        found, left = {number}, [number]
        while left:
            for user, _ in self.a.users[left.pop()]:
                if user in bad and user not in found:
                    found.add(user)
                    left.append(user)
        return found

    @property
    def found(self) -> bool:
        """Whether anything was accused."""
        return bool(self._heads)

    def _grouped(self) -> tuple[list[Cause], list[Cause], Loss | None]:
        """The causes, of which those of the same words are one, and what is coarser throughout."""
        uniform = {
            what for what in {head.cause.what for head in self._heads if head.is_coarse} if self._is_uniform(what)
        }
        groups: dict[Any, list[_Head]] = {}
        for head in self._heads:
            coarse = head.is_coarse and head.cause.what in uniform
            line = head.cause.place.source if head.cause.what and not coarse else None
            key = (coarse, head.cause.what, line) if coarse or head.cause.what else (head.number,)
            groups.setdefault(key, []).append(head)
        named = [
            (
                replace(heads[0].cause, also=tuple(head.cause.place for head in heads[1:])),
                [h.number for h in heads],
                key[0],
            )
            for key, heads in groups.items()
        ]
        costed, loss = with_costs(self, [(cause, numbers) for cause, numbers, _ in named])
        causes = [costed.get(id(cause), cause) for cause, _, coarse in named if coarse is not True]
        coarser = [costed.get(id(cause), cause) for cause, _, coarse in named if coarse is True]
        if self.coarse is not None and self.coarse.what:
            first = min(self.counterparts.by_weight, default=0)
            coarser.insert(0, Cause("dtype", self.coarse.what, place_of(self.a.steps[first]), exact=True))
        return causes, coarser, loss

    def _is_uniform(self, what: str) -> bool:
        """Whether a rounding is that of most calls that could have it."""
        if what in (_FULL, "computes products in int8"):
            return True
        heads = [head for head in self._heads if head.is_coarse and head.cause.what == what]
        products = [number for number in self.counterparts.by_weight if number in self.a.active]
        if what.startswith(_IN):
            found = (self.counterparts.weight_rows(number) for number in products)
            bits = what.removeprefix(_IN)
            return sum(rows is not None and quantised(*rows)[0] == bits for rows in found) >= _UNIFORM * len(products)
        if all(head.number in self.counterparts.by_weight for head in heads):
            return len(heads) >= _UNIFORM * len(products)
        operators = Counter(self.a.steps[number].operator for number in self.a.active)
        return len(heads) >= min(operators[head.operator] for head in heads)

    def answer(self, a: Run, b: Run) -> Answer:
        """What was found."""
        causes, coarser, loss = self._grouped()
        known = {*self.last.joined, *self.counterparts.ends}
        unpaired = [number for number in self.a.ends if number not in known]
        unpaired = [number for number in unpaired if number not in self.counterparts.by_weight] if unpaired else []
        paired = [number for number in self.a.ends if number not in unpaired]
        upto = str(place_of(self.a.steps[paired[-1]])) if paired else ""
        notes = [*self.counterparts.reasons]
        if unpaired:
            names = ", ".join(str(place_of(self.a.steps[each])) for each in unpaired[:4])
            notes.append(f"results of A without a counterpart in B, not compared: {names}")
        if self.taken:
            names = ", ".join(dict.fromkeys(self.a.steps[each].operator for each in sorted(self.taken)))
            notes.append(f"taken as recorded, since A's own replay makes something else: {names}")
        if refused := self.a.program.refused():
            notes.append(f"not on the list of operators that may run again, taken as recorded: {', '.join(refused)}")
        return Answer(
            a=a.head(),
            b=b.head(),
            verdict=self._verdict(causes, coarser, bool(paired) and paired[-1] == max(self.a.ends, default=-1)),
            same_program=self._same_program(),
            operators="all",
            joined=len(self.a.active & self.last.joined.keys()),
            calls=len(self.a.active),
            upto=upto,
            causes=tuple(causes),
            coarser=tuple(coarser),
            rewritten=self._rewritten(),
            loss=loss,
            notes=tuple(notes),
        )

    def _rewritten(self) -> tuple[Place, ...]:
        """Where A computes what B does not have, and nothing comes of it."""
        alone = [step for step in self.a.steps if step.number in self.a.active and step.number in self.last.made]
        lines: dict[Any, Place] = {}
        for step in alone:
            if step.number not in self.last.joined and step.number not in self._accused:
                lines.setdefault((step.stored.record.module, step.stored.record.source), place_of(step))
        return tuple(lines.values())

    def _verdict(self, causes: list[Cause], coarser: list[Cause], compared: bool) -> Verdict:
        if causes:
            return "difference"
        if coarser:
            return "coarser"
        if not compared:
            return "not compared"
        regions = [self.a.steps[number].outputs[0] for number in self.results]
        exact = all(each is None or self.joints.has_bits(self.a.program, each) for each in regions)
        return "equal" if exact else "rounding"

    def _same_program(self) -> bool:
        names = [
            Counter((step.operator, step.stored.record.module) for step in flow.steps) for flow in (self.a, self.b)
        ]
        common = sum((names[0] & names[1]).values())
        return 2 * common > max(sum(each.values()) for each in names)
