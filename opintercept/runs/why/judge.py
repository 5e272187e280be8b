"""Judges two programs by outcome: what of A's program, computed on B's values, differs and stays so up to a result.

Invariant: a difference that is gone at the next joint accuses nobody; each cause is found on B's own values.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from opintercept._core.text import counted
from opintercept._ops.fragment import UNKNOWN
from opintercept._values import rounding
from opintercept.runs.program.evaluate import Perturber
from opintercept.runs.program.program import Program, Step
from opintercept.runs.store.run import Run
from opintercept.runs.why.answer import Answer, Cause, Layer, Loss, Place, Verdict
from opintercept.runs.why.both import Both
from opintercept.runs.why.causes import IDLE, Explained, explained, turned
from opintercept.runs.why.changes.accused import ODD, Accused, off_record
from opintercept.runs.why.changes.wording import UNSEEN_BIAS, UNSEEN_FACTOR, name_of, place_of
from opintercept.runs.why.coarse import CoarseWeights, coarse_weights
from opintercept.runs.why.costs import with_costs
from opintercept.runs.why.counterparts import line_of, updates, weight_place
from opintercept.runs.why.flow import LEAF, holds_products, is_product, passes
from opintercept.runs.why.joints import Joint, content_of
from opintercept.runs.why.layers import with_layers
from opintercept.runs.why.lookups import other_lookups
from opintercept.runs.why.noise import LIMIT, Spread, norm_ratio, unscaled
from opintercept.runs.why.sweep import Sweep, Sweeper

_MOST = 40  # sweeps
_DENOMINATOR = 64  # of a fraction that a loss is multiplied by


def judged(a: Run, b: Run) -> Answer:
    """Judge two runs of which A has all operators."""
    starts = _starts(a, b)
    one, other = (Program(run, run.ranks[0], at) for run, at in zip((a, b), starts, strict=True))
    counts = [passes(each) if holds_products(b, other.rank) else len(each.roots) for each in (one, other)]
    alike = counts[0] == counts[1]  # another number of passes computes other batches
    judge = Judge(one, other, forward=alike)
    judge.run()
    trains = alike and one.backward is not None and other.backward is not None
    if trains and (not judge.found or judge.scaled_losses):
        whole = Judge(one, other, forward=False)
        whole.run()
        # as where a loss is divided, and its gradients are multiplied; or these tell by what number it is divided
        if not judge.found or whole.gradients_agree or (whole.is_exact and not judge.says_what):
            judge = whole
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
    """A cause, and the places of the calls at which B's values were put into A's program: of its first, then others."""

    cause: Cause
    numbers: list[int]
    uniform: bool  # as all calls of its kind are coarser
    part: set[int]  # the places of the calls that are accused


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
        scaled_losses: Whether nothing differs but that losses from which `backward` began are multiples of A's.
    """

    def __init__(self, a: Program, b: Program, *, forward: bool) -> None:
        super().__init__(a, b, forward=forward)
        self.results = [*self.a.last_products(), *self.a.ends] if forward else self.a.ends
        self.coarse: CoarseWeights | None = None
        self.last = Sweep()
        self.scaled_losses = False
        self._accused: dict[int, _Head] = {}
        self._blind: set[int] = set()
        self._fused = {step.number for step in self.a.steps if step.stored.record.ops is not None}  # see `Unfused`
        self._states: set[int] = set()  # last ones of loops, which B keeps in another form
        self._unscaled: set[int] = set()  # last products that B may scale behind them
        self._wrong: set[int] = set()  # the calls of which B has what A does not make
        self._heads: list[_Head] = []
        self._follows = True  # whether what B chooses otherwise is rounding, and is taken

    def run(self) -> None:
        """Find the causes, one sweep after the other."""
        for _ in range(_MOST):
            weights = self.coarse.values if self.coarse else {}
            sweeper = Sweeper(self.a, self.joints, Perturber(self.dtype), self.taken, weights, follows=self._follows)
            self.last = Sweep()  # the one before need not stay in memory
            self.last = sweeper.sweep(self.forced)
            if self._follows and turned(self, self.last, self.last.turned) is not None:
                self._follows = False
                continue
            ends = self._bad_ends(self.last)
            if not self._heads:
                roots = {*self.a.program.roots}
                self.scaled_losses = bool(ends) and ends <= roots and all(map(self._is_multiple, ends))
            if ends and self.coarse is None:
                self.coarse = coarse_weights(self.counterparts, self.dtype) if self._has_others(self.last) else None
                self.coarse = self.coarse or CoarseWeights()
                if self.coarse.values:
                    continue
            bad = self._bad(self.last, ends)
            if not ends or not (self._looked_up(sweeper, bad) or self._accuse(self.last, bad, ends)):
                break
        self._accuse_records(self.last)

    def _accuse_records(self, sweep: Sweep) -> None:
        """Accuse calls of A that were not recorded to make what B makes of the same, and what A's replay does."""
        program, perturber = self.a.program, Perturber(self.dtypes[0])
        for number in sorted(self.a.active & sweep.joined.keys() & sweep.made.keys() - self.forced.keys()):
            step, joint = self.a.steps[number], sweep.joined[number]
            region = step.outputs[0]
            if region is None or region.name is None or not joint.whole or self.joints.has_bits(program, region):
                continue
            off = sweep.made[number].ratio(program.value(region).double(), self.unit_a)
            if off > ODD and off_record(program, step, perturber, True) > ODD:
                words = f"makes what the operands of A's {name_of(step)} say, which A's own result is not"
                self.forced[number] = Joint(joint.tensor, joint.values)
                cause = Cause("result", words, place_of(step), exact=True)
                self._heads.append(_Head(cause, [number], False, {number}))

    def _looked_up(self, sweeper: Sweeper, bad: set[int]) -> bool:
        """Accuse a lookup of A if fewer calls differ with what B looks up instead."""
        for number, joint, cause in other_lookups(self, self.last):
            trial = sweeper.sweep(self.forced | {number: joint})
            if number not in self.forced and len(self._bad(trial, self._bad_ends(trial))) < len(bad):
                self.forced[number] = joint
                self._heads.append(_Head(cause, [number], False, {number}))
                self._accused[number] = self._heads[-1]
                return True
        return False

    def _has_others(self, sweep: Sweep) -> bool:
        """Whether B lacks some weight of A, or multiplies by another one although it has that."""
        theirs = [step.inputs[place][1] for step in self.b.steps if (place := weight_place(step)) is not None]
        tensors = {*map(self.joints.of, theirs)}

        def lacks(step: Step, place: int) -> bool:
            joint = sweep.edges.get((step.number, place))
            if joint is None or place != weight_place(step) or joint.tensor in tensors:
                return joint is None
            return not any(self.counterparts.reads(each, joint) for each in theirs)

        return any(
            lacks(step, place)
            for step in self.a.steps
            for place, (_, region) in enumerate(step.inputs)
            if place in step.reads and math.prod(region.shape) > 1
            if region.weight or (place == weight_place(step) and self.a.writers[step.number][place] == {LEAF})
        )

    def _bad_ends(self, sweep: Sweep) -> set[int]:
        """The results that differ."""
        found = set[int]()
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
            if self._mixes(sweep, number) or self._is_of_another(sweep, number):
                self.counterparts.ends.pop(number, None)
            end = self.counterparts.end(sweep, number)
            if end is None:
                continue
            made, values = sweep.made[number], end.joint.values
            if self.partial and self.a.steps[number].stored.record.phase == "backward":
                values = unscaled(made.base, values)
                if self._comes_to_nothing(sweep, number, values):
                    continue
            if not made.ratio(values, end.joint.tensor.unit) <= LIMIT and not self.joints.has_noise(made):
                (self._unscaled if self._is_unscaled(sweep, number, end.joint) else found).add(number)
        self._states = {number for number in found if self._comes_of_none(sweep, number, found)}
        return {number for number in found - self._states if not self._only_chooses(number, found)}

    def _comes_of_none(self, sweep: Sweep, number: int, bad: set[int]) -> bool:
        """Whether a result is the last state of a loop, and all that A makes of such a state before agrees with B."""
        step = self.a.steps[number]
        like = [each for each in self.a.steps[:number] if line_of(each) == line_of(step)]
        if not like or like[-1].number in sweep.joined.keys() | self._accused.keys() or number in self.a.program.roots:
            return False
        after = self.a.after([like[-1].number]) & {*self.results}
        if not after & sweep.joined.keys():
            return False
        last = {end for end in bad if any(line_of(each) == line_of(self.a.steps[end]) for each in self.a.steps[:end])}
        return after <= last | sweep.joined.keys()

    def _only_chooses(self, number: int, bad: set[int]) -> bool:
        """Whether A only chooses by a result, B by that of another operator, and the choice or what follows agrees."""
        end, after = self.counterparts.ends.get(number), self.a.after([number]) & {*self.a.ends} - {number}
        operators = {self.b.steps[maker].operator for maker in ([] if end is None else end.makers)}
        if not operators or not after or self.a.steps[number].operator in operators:
            return False
        made = (region for user, _ in self.a.users[number] for region in self.a.steps[user].outputs)
        return not after & bad or all(each is not None and self.joints.has_bits(self.a.program, each) for each in made)

    def _comes_to_nothing(self, sweep: Sweep, number: int, values: torch.Tensor) -> bool:
        """Whether a gradient is A's times a number, as in an earlier step, of which B's next weights show nothing."""
        step, factor = self.a.steps[number], norm_ratio(sweep.made[number].base, values)
        if not sweep.made[number].ratio(values / factor, rounding.unit(self.dtype)) <= LIMIT:
            return False
        for each in (each for each in self.a.steps[:number] if line_of(each) == line_of(step)):
            made = sweep.made.get(each.number)
            if (
                made is not None
                and each.number not in sweep.joined
                and self.joints.find(made.part(lambda x: x * factor))
            ):
                later = self.a.after([each.number], sweep.joined)
                return any(updates(self.a.steps[at]) for at in later & sweep.joined.keys() - self.forced.keys())
        return False

    def _mixes(self, sweep: Sweep, number: int) -> bool:
        """Whether a result is of all samples of A's batch, as a mean over them is, and B computes some of these."""
        share = self.joints.share
        if share is None:
            return False
        for step in (self.a.steps[each] for each in self.a.before([number], sweep.joined, sweep.edges)):
            made, read = (
                [share.size(math.prod(region.shape)) for region in regions if region is not None and not region.weight]
                for regions in (step.outputs[:1], [step.inputs[place][1] for place in step.reads])
            )
            if made == [0] and any(read):
                return True
        return False

    def _is_unscaled(self, sweep: Sweep, number: int, end: Joint) -> bool:
        """Whether A alone multiplies by one number before its last product, as B may behind its own, unrecorded."""
        for step in (self.a.steps[each] for each in self.a.before([number], sweep.joined, sweep.edges)):
            if not self.partial or step.operator not in ("mul", "div"):
                continue
            single = [region for _, region in step.inputs if math.prod(region.shape) == 1 and region.name is not None]
            factors = [float(self.a.program.value(region)) for region in single]
            factors += [each for each in step.arguments.values() if isinstance(each, float)]
            powers = ((factor or 1.0) ** (1 if step.operator == "mul" else -1) for factor in factors)
            if any(sweep.made[number].ratio(end.values * power, end.tensor.unit) <= LIMIT for power in powers):
                return True
        return False

    def _is_of_another(self, sweep: Sweep, number: int) -> bool:
        """Whether B's result is another one of A's, of which B has not as many."""
        end = self.counterparts.ends.get(number)
        joints = (sweep.joined[each] for each in self.a.ends if each != number and each in sweep.joined)
        return (
            end is not None
            and len(self.a.ends) > len(self.b.ends)
            and any(joint.makers & {*end.makers} for joint in joints)
        )

    def _is_multiple(self, number: int) -> bool:
        """Whether B's result is A's times a plain fraction, as that of a part of a batch."""
        made, end = self.last.made[number], self.counterparts.end(self.last, number)
        if end is None or made.base.numel() != 1:
            return False
        values = float(made.base), float(end.joint.values)
        if not all(map(math.isfinite, values)) or not all(values):
            return False
        factor = Fraction(max(values, key=abs) / min(values, key=abs)).limit_denominator(_DENOMINATOR)
        plain = factor if abs(values[1]) > abs(values[0]) else 1 / factor
        return made.ratio(end.joint.values / float(plain), end.joint.tensor.unit) <= LIMIT

    def _goes_on(self, sweep: Sweep, number: int, known: set[int]) -> bool:
        """Whether B computes something else of a result of A, and has that as its result."""
        end, joint = self.counterparts.ends.get(number), sweep.joined[number]
        tensors = (joint.tensor, *joint.others)
        return (
            end is not None
            and number not in self.forced
            and bool(end.makers)
            and not {*end.makers} & known
            and not any(self.b.is_end(maker, each.region) for each in tensors for maker in each.makers)
            and math.prod(end.region.shape) == sum(math.prod(each.region.shape) for each in tensors)  # and no part
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
            part = sorted(self.a.before([number], sweep.joined, sweep.edges))
            after = self.a.after([number], sweep.joined, sweep.edges)
            own = {each for each in part if each != number and each in self.a.active} or {number}
            stale |= after
            known = [self._accused[each] for each in sorted(own & self._accused.keys())]
            if known and not agrees:
                known[-1].numbers.append(number)  # what was accused reaches here by another way
            elif not agrees:
                accused = Accused(sweep, part, found, self)
                untrusted = accused.not_recomputed()
                if untrusted - self.taken:
                    self.taken |= untrusted
                    return True
                accused = self._meant(accused, ends, bad)
                found = accused.found
                agrees = accused.rounds_alone()
                if not (agrees or self._is_same(accused, ends, bad)):
                    stale -= after
                    continue
            if not (known or agrees):
                guessed, unknown = self._guessed(accused), self._fused & self._around(accused)
                said = Explained(None) if guessed or unknown else explained(accused)
                if guessed is not None:
                    guessed.numbers.append(number)
                elif said.cause is None:
                    self._blind |= accused.part & sweep.blind | unknown
                else:
                    self.forced |= said.closed
                    self._heads.append(_Head(said.cause, [number, *said.closed], said.uniform, own))
                    self._accused |= dict.fromkeys(own if not said.uniform else (), self._heads[-1])
            self._wrong |= set() if agrees else {number}
            self.forced[number] = found.joint
            sweep.joined[number] = found.joint
            again = True
        return again

    def _meant(self, accused: Accused, ends: set[int], bad: set[int]) -> Accused:
        """What B has there: of a product and what is scaled behind it, that with which all that follows is B's."""
        steps, part = [self.a.steps[end] for end in sorted(ends)], [step.number for step in accused.steps]
        found = (Accused(accused.sweep, part, each, self) for each in (accused.found, *accused.found.others))
        return next((each for each in found if each.suffices(steps, bad)), accused) if accused.found.others else accused

    def _around(self, accused: Accused) -> set[int]:
        """The calls of a region, and those that make what it reads."""
        return accused.part.union(*(found for each in accused.part for found in self.a.writers[each]))

    def _guessed(self, accused: Accused) -> _Head | None:
        """What was accused before, if a region reads it in an order that is a guess, so nothing is known."""
        before = self._around(accused) & self._accused.keys()
        matches = ((number, self.counterparts.match(number)) for number in sorted(before))
        found = (self._accused[number] for number, match in matches if match is not None and match.by == "neighbours")
        return next(found, None)

    def _is_same(self, accused: Accused, ends: set[int], bad: set[int]) -> bool:
        """Whether a counterpart is the same result, and no other: if in doubt, whether it brings A's results to B's.

        Other operators on the same weight may add their bias elsewhere, and where B computes what is a weight of A, a
        norm may be folded into it. What B did otherwise at this line before, as in an earlier step, came to nothing.
        """
        sweep, step, other = accused.sweep, accused.end, accused.found.step
        sure = other is not None and other.operator == step.operator
        if accused.found.by == "operands" and other is not None and sure:
            pairs = zip(self.a.writers[step.number], self.b.writers[other.number], strict=False)
            before = (each for each in self.a.steps[: step.number] if each.number in sweep.made)
            harmless = (each for each in before if each.number not in sweep.joined and each.number not in self._accused)
            sure = not any(mine == {LEAF} and written & self.b.active for mine, written in pairs)
            sure = sure and not any(line_of(each) == line_of(step) for each in harmless)
        known = sure or accused.found.by in ("result", "piece")
        return known or accused.helps([self.a.steps[end] for end in sorted(ends)], bad)

    @property
    def found(self) -> bool:
        """Whether anything was accused."""
        return bool(self._heads)

    @property
    def is_exact(self) -> bool:
        """Whether each cause reproduces B."""
        return all(head.cause.exact for head in self._heads)

    @property
    def says_what(self) -> bool:
        """Whether something is said of a cause beside its place."""
        return any(head.cause.what for head in self._heads)

    @property
    def gradients_agree(self) -> bool:
        """Whether what was accused first, if anything was, comes after a backward pass."""
        first = min((head.cause.place.index for head in self._heads), default=None)
        calls = (step for step in self.a.steps[self.a.program.backward :] if step.stored.record.index == first)
        return first is None or any(step.stored.record.phase != "backward" for step in calls)

    def _grouped(self) -> tuple[list[Cause], list[Cause], Loss | None]:
        """The causes, of which those of one line and the same words are one, and what is coarser throughout."""
        groups: dict[Any, list[_Head]] = {}
        for head in map(self._placed, self._heads):
            line = None if head.uniform else head.cause.place.source
            what = head.cause.what or (head.cause.place.op, head.cause.place.module)
            groups.setdefault((what, line), []).append(head)
        told = [
            (
                replace(heads[0].cause, also=tuple(head.cause.place for head in heads[1:])),
                [number for head in heads for number in head.numbers],
            )
            for heads in groups.values()
        ]
        uniform = [heads[0].uniform for heads in groups.values()]
        coarse = self.coarse or CoarseWeights()
        if coarse.what:
            first = min(self.counterparts.by_weight, default=0)
            told.insert(0, (Cause("dtype", coarse.what, place_of(self.a.steps[first]), exact=True), []))
            uniform.insert(0, True)
        costed, loss = with_costs(self, told, coarse.values)
        causes, coarser = (
            [cause for cause, its in zip(costed, uniform, strict=True) if its == of] for of in (False, True)
        )
        return causes, coarser, loss

    def _placed(self, head: _Head) -> _Head:
        """An unknown cause at a call that is not vindicated: from which nothing leads to what B has, too.

        What autograd makes of what B has is right.
        """
        if head.cause.what:
            return head
        known, right = (self.last.joined.keys() - self._wrong) & self.a.active, set[int]()
        for _ in range(2):  # autograd reads what leads to what B has, too
            for step in self.a.steps[self.a.program.backward :]:
                derived = frozenset[int]().union(*self.a.writers[step.number]) <= known | right | {LEAF}
                if step.stored.record.phase == "backward" and step.number not in self._wrong and derived:
                    right.add(step.number)
            for step in reversed(self.a.steps):
                users = {user for user, _ in self.a.users[step.number]}
                if step.number not in self._wrong and users & (known | right):
                    right.add(step.number)
        doubtful = [self.a.steps[number] for number in sorted((head.part & self.a.active) - right)]
        fits = not self.partial and any(step.stored.record.index == head.cause.place.index for step in doubtful)
        if fits or not doubtful:
            return head
        return head._replace(cause=replace(head.cause, place=place_of(doubtful[0])))

    def answer(self, a: Run, b: Run) -> Answer:
        """What was found."""
        causes, coarser, loss = self._grouped()
        layers: tuple[Layer, ...] = ()
        if loss is not None and not causes and (coarser or self.dtypes[0] != self.dtypes[1]):
            layers, loss = with_layers(self, self.last, loss)
        seen = {each for each in self.a.active if not self.partial or is_product(self.a.steps[each].stored)}
        paired = [number for number in self.a.ends if self._is_paired(number)]
        upto = f"{'the last product, ' * self.partial}{place_of(self.a.steps[paired[-1]])}" if paired else ""
        verdict = self._verdict(causes, coarser, bool(paired) and paired[-1] == max(self.a.ends, default=-1))
        behind = self._behind() if verdict in ("equal", "rounding") else ()
        return Answer(
            a=a.head(),
            b=b.head(),
            verdict="not compared" if behind else verdict,
            same_program=self._same_program(),
            operators="products" if self.partial else "all",
            joined=len(seen & {*self.last.joined, *(self.counterparts.by_weight if self.partial else ())}),
            calls=len(seen),
            upto=upto,
            behind=behind,
            causes=tuple(causes),
            coarser=tuple(coarser),
            layers=layers,
            rewritten=() if self.partial else self._rewritten(),  # B's other operators are not known
            loss=loss,
            notes=(*self._notes([number for number in self.a.ends if number not in paired]),),
            unknown=tuple(place_of(self.a.steps[number]) for number in sorted(self._blind & self._fused)),
        )

    def _behind(self) -> tuple[str, ...]:
        """The operators by which A goes on from products to its results, of which neither B nor gradients tell."""
        if not self.partial or self.a.program.backward is not None:
            return ()
        products = {step.number for step in self.a.steps if is_product(step.stored)}
        steps = [self.a.steps[number] for number in sorted(self.a.before({*self.tails} - products, products))]
        reached = any(writers & products for step in steps for writers in self.a.writers[step.number])
        seen = {self.counterparts.bias_behind(number) for number in self.a.ends}
        active = (step for step in steps if step.number in self.a.active - seen and self.a.makes_real(step))
        names = (step.operator for step in active)
        return (*dict.fromkeys(name for name in names if name not in IDLE),) if reached else ()

    def _is_paired(self, number: int) -> bool:
        """Whether a result of A has a counterpart in B."""
        if number in self.last.joined or number in self.counterparts.ends:
            return True
        if not self.partial and number in self.counterparts.by_weight:
            return True
        return number in self.last.made and self.counterparts.end(self.last, number) is not None

    def _notes(self, unpaired: list[int]) -> Iterator[str]:
        """What was not compared, or was taken as it is."""
        yield from self.counterparts.reasons
        if (share := self.joints.share) is not None:
            yield f"B computes {len(share.kept)} of {counted(share.samples, 'part')} of A's batch, and no other"
        for ends, which in (
            (unpaired, "results of A without a counterpart in B, not compared"),
            (sorted(self._states), "states after the last step of a loop, which B keeps in another form, not compared"),
        ):
            if ends:
                yield f"{which}: {', '.join(str(place_of(self.a.steps[each])) for each in ends[:4])}"
        for found, why in (
            (self.taken, "taken as recorded, since A's own replay makes something else"),
            (self._blind, "not compared, since they cannot be computed from what B has"),
        ):
            if found:
                yield f"{why}: {', '.join(dict.fromkeys(self.a.steps[each].operator for each in sorted(found)))}"
        if self._blind & self._fused:
            yield f"A can be the run that is not compiled; of a generated kernel, {UNKNOWN}"
        for number, count in self.last.turned.items():
            choices = f"{counted(count, 'choice')} of {place_of(self.a.steps[number])}"
            yield f"rounding turns {choices}, and B's are taken"
        if self._unscaled:
            yield UNSEEN_FACTOR
        if any(self.counterparts.unseen_bias(number) is not None for number in self.a.ends):
            yield UNSEEN_BIAS
        if refused := self.a.program.refused():
            yield f"not on the list of operators that may run again, taken as recorded: {', '.join(refused)}"

    def _rewritten(self) -> tuple[Place, ...]:
        """Where A computes what B does not have, and nothing comes of it."""
        alone = [step for step in self.a.steps if step.number in self.a.active and step.number in self.last.made]
        lines: dict[Any, Place] = {}
        for step in alone:
            has = all(each is not None and self.joints.has_bits(self.a.program, each) for each in step.outputs)
            if not has and step.number not in self.last.joined and step.number not in self._accused:
                lines.setdefault((step.stored.record.module, step.stored.record.source), place_of(step))
        return tuple(lines.values())

    def _verdict(self, causes: list[Cause], coarser: list[Cause], compared: bool) -> Verdict:
        if causes:
            return "difference"
        if coarser:
            return "coarser"
        if not compared or self._blind & self._fused:
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
