"""What B does otherwise in a region of A: the single changes with which A makes what B does.

Invariant: a change is named only if B's values are reproduced to rounding with it, computed from B's own inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from opintercept._core.text import counted, listed
from opintercept._values import rounding
from opintercept.runs.program.evaluate import Perturber
from opintercept.runs.why.answer import Cause, CauseKind, Place
from opintercept.runs.why.changes import other_arguments, other_operands, other_operators, unrecorded
from opintercept.runs.why.changes.accused import ODD, Accused, is_whole, off_record
from opintercept.runs.why.changes.edits import Change
from opintercept.runs.why.changes.narrowing import narrowed
from opintercept.runs.why.changes.wording import apart, name_of, operand_words, place_of, rows_differ
from opintercept.runs.why.counterparts import weight_place
from opintercept.runs.why.flow import LEAF, is_real
from opintercept.runs.why.joints import DTYPES, Joint
from opintercept.runs.why.noise import LIMIT, Spread
from opintercept.runs.why.sweep import Sweep

if TYPE_CHECKING:
    from opintercept.runs.why.both import Both

_WORK = 4e8  # numbers that the search for one cause may read, some seconds of one core
_ALL_WORK = 12e8  # that for all
_LARGEST = 1 << 27  # elements that a region reads, above which nothing is tried
_REST = 1e-4  # of the difference that may be left with an argument of B, whose kernels compute its effects coarsely
_LITTLE = 10  # operators that differ, which are named although nothing was tried that reproduces B
_MOST = 3  # changes that are named
_PRODUCTS = frozenset(("mm", "addmm", "linear", "bmm", "baddbmm", "matmul", "convolution"))
_PLAIN = (  # B's own numbers, tensors and calls
    *(other_operands.weights, other_arguments.arguments, other_arguments.theirs, other_arguments.together),
    *(other_operands.draws, other_operands.tensors, other_operands.tables, other_operands.states),
    *(other_operands.reads, other_operands.parts, other_operators.calls, unrecorded.parameters, unrecorded.rows),
)
_OTHERS = (  # other operators, roundings and numbers
    *(other_operators.operators, other_operators.functions, other_operators.not_updated, other_operators.left_out),
    *(other_operators.added, other_operators.roundings, other_operands.exchanged, other_operands.exchanged_results),
    *(other_arguments.variants, other_arguments.numbers),
)
IDLE = frozenset(("clone", "_to_copy", "copy", "contiguous", "empty", "empty_like", "zeros", "zero", "detach", "alias"))
"""Operators that compute nothing of their own."""


class Explained(NamedTuple):
    """What was found of a region.

    Attributes:
        cause: The cause; None if calls of the region say nothing.
        uniform: Whether B is coarser throughout in this way.
        closed: B's tensors for what the changed calls make, by their places. What B has there goes other ways, too.
    """

    cause: Cause | None
    uniform: bool = False
    closed: Mapping[int, Joint] = MappingProxyType({})


def explained(whole: Accused) -> Explained:
    """The cause of a region."""
    good = [each for each in (_in_eight_bits(whole),) if each is not None]
    near: list[Change] = []
    with torch.no_grad():
        accused = whole if good else narrowed(whole)
        for region in dict.fromkeys((accused, whole)):
            if not good and not region.is_blind:
                good, near = _search(region)
        good = good or near
    names = [Counter(s.operator for s in steps if s.operator not in IDLE) for steps in (accused.steps, accused.steps_b)]
    only = [names[0] - names[1], names[1] - names[0] if accused.steps_b else Counter()]
    if whole.judge.partial:  # B's other operators were not recorded
        only = [Counter(), Counter()]
    exact = bool(good)
    drawn = next(other_operands.draws(accused), None) if whole.is_blind else None
    choice = turned(whole.judge, whole.sweep, whole.judge.a.before(accused.part)) if accused.is_blind else None
    good = good or [each for each in (drawn, choice, _diagnosis(accused)) if each is not None]
    end, other = whole.end, whole.found.step
    same = other is not None and other.operator == end.operator and whole.found.by == "operands"
    same = names[0].keys() == names[1].keys() or (same and end.number in whole.sweep.blind)
    if not good and whole.is_blind and (same or whole.judge.partial):
        return Explained(None)  # nobody knows what the same operators make of B's values, nor how often they are called
    kept: dict[str, Change] = {}
    for change in good:
        kept.setdefault(change.what, change)
    chosen = [*kept.values()][:_MOST]
    first = chosen[0] if chosen else None
    active = (step for step in accused.steps if step.number in accused.judge.a.active and step.operator in only[0])
    begin = next(active, accused.end) if accused.steps_b else accused.end
    cause = Cause(
        kind=first.kind if first is not None else _kind(accused, names),
        what=first.what if first is not None else _differently(accused, only),
        place=place_of(first.step if first is not None else begin),
        until=place_of(whole.end),
        other=None if accused.found.step is None else place_of(accused.found.step),
        after=_places_before(accused),
        only_a=tuple(only[0].elements()),
        only_b=tuple(only[1].elements()),
        calls=len([step for step in accused.steps if step.number in accused.judge.a.active]),
        roundings=accused.spread.ratio(accused.target, accused.found.joint.tensor.unit),
        exact=exact,
        others=tuple(change.what for change in chosen[1:]),
    )
    closed = _closed(accused, first) if first is not None and exact else {}
    if exact and accused is not whole:
        closed[accused.end.number] = accused.found.joint
    return Explained(cause, first is not None and first.uniform, closed)


def _closed(accused: Accused, change: Change) -> dict[int, Joint]:
    """B's tensors for what the changed calls make with the change, where B has them."""
    judge, found = accused.judge, dict[int, Joint]()
    steps = [judge.a.steps[number] for number in change.edits if number != accused.end.number]
    for number, value in accused.rerun(accused.steps, change.edits, steps).items() if steps else ():
        joint = judge.joints.find(Spread(value, (), rounding.unit(judge.dtype)), by_rows=False)
        if joint is not None and joint.whole:
            found[number] = Joint(joint.tensor, joint.values)
    return found


def _places_before(accused: Accused) -> tuple[Place, ...]:
    """The calls right before a region, whose results are still those of B."""
    flow = accused.judge.a
    writers = {
        writer: None
        for number in accused.part
        for found in flow.writers[number]
        for writer in sorted(found - {LEAF} - accused.part)
        if writer in flow.active
    }
    places = (place_of(flow.steps[writer]) for writer in writers)
    return tuple({str(place): place for place in places}.values())


def _differently(accused: Accused, only: Sequence[Counter[str]]) -> str:
    """What B seems to compute in a region, which nothing verifies; empty if it is much, or of products, which are
    written in many ways.
    """
    sides = ((accused.steps, accused.judge.a), (accused.steps_b, accused.judge.b))
    active = [{step.operator for step in steps if step.number in flow.active} for steps, flow in sides]
    pairs = zip(only, active, strict=True)
    less, more = ([each.removesuffix("_") for each in names if each in own] for names, own in pairs)
    many = {*less, *more} & _PRODUCTS or any("attention" in each for each in (*less, *more))
    if many or len(less) + len(more) > _LITTLE:
        return ""
    if not more:
        return f"seems to leave out {listed(less, _LITTLE)}" if less else ""
    instead = f"where A computes {listed(less, _LITTLE)}" if less else "besides"
    return f"seems to compute {listed(more, _LITTLE)} {instead}"


def _kind(accused: Accused, names: Sequence[Counter[str]]) -> CauseKind:
    """What kind of cause it must be that no change explains: operators differ, or else what a call reads."""
    if accused.judge.partial:
        return "unknown"
    if names[0] != names[1] and accused.steps_b:
        return "operator"
    return "weight" if len(accused.steps) == 1 and accused.found.by == "weight" else "unknown"


def _in_eight_bits(accused: Accused) -> Change | None:
    """That one of both computes in int8, if B is as near as that allows."""
    bound = accused.eight_bits
    if bound is None or bool(((accused.target - accused.spread.base).abs() > bound).any()):
        return None
    step = next((step for step in accused.steps if is_whole(step)), None)
    words = "computes products in int8" if step is None else "computes in full what A computes in int8"
    return Change(0, "dtype", words, step or accused.end, {}, True)


def turned(judge: Both, sweep: Sweep, numbers: Iterable[int]) -> Change | None:
    """That B has what one of these calls chooses by in another dtype, and chooses otherwise, where else it is as A."""
    for number in sorted(sweep.turned.keys() & {*numbers}) if judge.dtypes[0] == judge.dtypes[1] else ():
        step = judge.a.steps[number]
        place = min(place for place in step.reads if is_real(judge.a.program, step.inputs[place][1]))
        region, joint = step.inputs[place][1], judge.counterparts.joint_of(sweep, number, place)
        mine = DTYPES[judge.a.program.dtype(region)]
        if joint is not None and joint.tensor.unit > rounding.unit(mine):
            maker = judge.a.steps[max(judge.a.writers[number][place] - {LEAF}, default=number)]
            names = [str(dtype).removeprefix("torch.") for dtype in (joint.tensor.dtype, mine)]
            words = (
                f"computes {name_of(maker)} in {names[0]} where A computes it in {names[1]}, which turns "
                f"{counted(sweep.turned[number], 'choice')} of {name_of(step)}"
            )
            return Change(0, "dtype", words, maker, {})
    return None


def _diagnosis(accused: Accused) -> Change | None:
    """What is plain of a region although no change reproduces B."""
    if (leaf := _other_leaf(accused)) is not None:
        return leaf
    end, base = accused.end, accused.spread.base
    handle = accused.found.by == "piece" and len(accused.steps) == 1 and weight_place(end) is not None
    if not (handle or end.number in accused.judge.counterparts.by_weight) or not base.dim():
        return None
    bound, more = accused.eight_bits, " by more than int8 explains"
    if bound is None:
        bound, more = LIMIT * accused.rows, ""
    far = ((base - accused.target).abs() > bound).reshape(-1, base.shape[-1]).any(0)
    if 0 < 4 * int(far.sum()) <= len(far):
        which = rows_differ(far.nonzero()[:, 0].tolist(), len(far))
        return Change(5, "weight", f"seems to have another weight: {which}{more}", end, {})
    if handle:  # the same rows, multiplied
        return Change(5, "weight", "seems to have another weight, which was not recorded", end, {})
    return None


def _other_leaf(accused: Accused) -> Change | None:
    """B's weight or input, where that is all that differs in a call that is not computed again."""
    end, other, judge = accused.end, accused.found.step, accused.judge
    fails = accused.run({end.number: lambda step, x: step.compute(x)}) is None
    if not fails or other is None or other.operator != end.operator:
        return None
    found = []
    for place, ((name, mine), (_, theirs)) in enumerate(zip(end.inputs, other.inputs, strict=False)):
        values = [judge.a.program.value(mine), judge.b.program.value(theirs)]
        if values[0].shape == values[1].shape and not torch.equal(*values):
            found.append((place, name, mine, values))
    if len(found) != 1:
        return None
    place, name, region, values = found[0]
    if not (region.weight or judge.a.writers[end.number][place] <= {LEAF}):
        return None
    what = operand_words(end, name, region)
    kind: CauseKind = "input" if what == "input" else "weight"
    return Change(5, kind, f"has another {what}: {apart(values[0], values[1])}", end, {})


def _search(accused: Accused) -> tuple[list[Change], list[Change]]:
    """The changes that reproduce B, the plainest first; and B's arguments that nearly do."""
    if sum(math.prod(region.shape) for step in accused.steps for _, region in step.inputs) > _LARGEST:
        return [], []
    for change in plainly(accused):
        return [change], []
    began = accused.judge.searched
    end = began + min(_WORK, max(_ALL_WORK - began, _WORK / 20))
    good: list[Change] = []
    near: list[Change] = []
    off = accused.spread.ratio(accused.target, accused.found.joint.tensor.unit)
    wide = accused.widened()
    for region, changes in (
        (accused, (change for tried in _PLAIN for change in tried(accused))),
        (wide, other_arguments.arguments(wide)),
        (wide, unrecorded.biases(wide)),
        (accused, (change for tried in _OTHERS for change in tried(accused))),
        (wide, other_arguments.numbers(wide) if wide.judge.partial else ()),
    ):
        for change in changes:
            if accused.judge.searched > end:
                break
            own = change.kind == "argument" and change.rank <= 1
            rest = region.ratio(change.edits)
            if not rest <= (max(LIMIT, _REST * off) if own else LIMIT):
                continue
            if not (own and change.step is accused.end) and region.breaks(change.edits):
                continue  # an argument of the very call may be made up for by another, as of Adam's two
            if rest > LIMIT:
                near.append(change)
            else:
                good.append(change)
                if len({each.what for each in good}) > _MOST:
                    break
        if good and min(each.rank for each in good) == 0:
            break
    order = {step.number: place for place, step in enumerate(wide.steps)}
    for found in (good, near):
        found.sort(key=lambda change: (change.rank, -order.get(change.step.number, 0)))
    return good, near


def plainly(accused: Accused) -> Iterator[Change]:
    """B draws random numbers, or its call does not make what its operands say."""
    drawn = [step for step in accused.steps_b if step.is_random]
    if drawn and not any(step.is_random for step in accused.steps):
        words = f"draws random numbers ({name_of(drawn[0])}), as for dropout"
        yield Change(0, "operator", words, accused.end, {})
    other = accused.found.step
    if other is None or other.overload is None or other.operator not in _PRODUCTS or accused.found.by == "result":
        return
    made = accused.judge.joints.made_by(other)
    dtypes = (accused.judge.dtypes[1], torch.float32 if made is None else made.dtype)
    off = off_record(accused.judge.b.program, other, Perturber(max(dtypes, key=rounding.unit)), True)
    if off > ODD:
        words = (
            f"makes another result than the operands of its {name_of(other)} say, {off:.2g} times what rounding may do"
        )
        yield Change(0, "result", words, accused.end, {})
