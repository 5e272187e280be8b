"""The changes of A in which a call reads something else, as B does: a weight, a table, what another call makes."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from opintercept.runs.program.evaluate import Edit, moves
from opintercept.runs.program.program import Region, Step, in_double
from opintercept.runs.why.answer import CauseKind, Place
from opintercept.runs.why.changes.accused import Accused
from opintercept.runs.why.changes.edits import (
    Change,
    Edits,
    constant,
    replaced,
    swapped,
    with_arguments,
    with_operand,
)
from opintercept.runs.why.changes.wording import (
    LONGEST,
    apart,
    biases_of,
    differing,
    left_out_words,
    name_of,
    operand_words,
    place_of,
    weight_words,
)
from opintercept.runs.why.counterparts import nearest, updates, weight_place
from opintercept.runs.why.flow import LEAF, Flow


def weights(accused: Accused) -> Iterator[Change]:
    """B's rows of the weight of a product."""
    for step in accused.steps:
        if step.number not in accused.judge.counterparts.by_weight:
            continue
        found, place = accused.judge.counterparts.weight_rows(step.number), weight_place(step)
        if found is None or place is None or torch.equal(*found):
            continue
        own = [accused.judge.a.steps[each] for each in accused.judge.a.writers[step.number][place] & accused.part]
        if any(updates(each) for each in own):
            continue  # these are the cause, and not their result
        kind, words = weight_words(*found)
        rank = 5 if own else 0  # what makes it says more
        end, base = accused.end, accused.spread.base
        if end.number != step.number and base.dim() and base.shape[-1] == len(found[0]):  # with its adapters
            x = accused.given(step)[min(step.reads - {place, *biases_of(step)})].double()
            moved = x.reshape(-1, x.shape[-1]) @ (found[1] - found[0]).mT
            if moved.numel() == base.numel():
                edits: Edits = {end.number: constant(base + moved.reshape(base.shape))}
                yield Change(rank, kind, words, step, edits)
        value = found[1] if step.operator == "linear" else found[1].mT
        yield Change(rank, kind, words, step, with_operand(step, place, value))


def tensors(accused: Accused) -> Iterator[Change]:
    """B's tensor for one that no call of the region makes, of the same size and role."""
    judge = accused.judge
    for step in accused.steps:
        for place, (name, region) in enumerate(step.inputs):
            own, seen = accused.given(step)[place], list[torch.Tensor]()
            inside = judge.a.writers[step.number][place] & accused.part
            what = operand_words(step, name, region)
            if place not in step.reads or (inside and own.is_floating_point() and what != "mask"):
                continue
            is_leaf = judge.a.writers[step.number][place] == {LEAF}
            is_product = step.number in judge.counterparts.by_weight and place == weight_place(step)
            for other, theirs, there, is_made, leaf_b in _operands_b(accused, own, what == "mask"):
                whole = not own.is_floating_point()
                masks = "mask" in theirs or "bias" in theirs
                alike = whole or (theirs == name and (other.operator == step.operator or masks))
                leaves = is_leaf and leaf_b and region.weight == there.weight and not is_product
                if not alike and not leaves:
                    continue
                value = in_double(judge.b.program.value(there))
                if value.numel() != own.numel():
                    value = value.expand(own.shape)
                value = value.reshape(own.shape) if alike else nearest(value, own)
                if value.is_floating_point() == whole or torch.equal(value, own) or _is_in(value, seen):
                    continue
                seen.append(value)
                moved = not whole and _same_numbers(value, own)
                same = theirs == name and other.operator == step.operator
                parameter = same and region.weight and place not in step.written
                if is_made and not (moved or parameter or whole or what == "mask"):
                    continue
                kind: CauseKind = "operand" if moved or not is_leaf or "mask" in name else "input"
                kind = "weight" if region.weight or (kind == "input" and what in ("weight", "bias")) else kind
                words = f"has another {what}: {apart(own, value)}"
                of = step
                if moved and (maker := _reordered(accused, step, place)) is not None:
                    of, kind, words = maker, "weight", "has the rows of its weight in another order"
                elif moved:
                    words = f"reads its {what} in another order"
                elif region.weight and own.dim() == 2:
                    kind, words = weight_words(own.double(), value.double())
                likely = whole or kind != "operand" or what in ("bias", "mask")
                rank = 2 if is_made or not likely else 0 if whole else 1
                yield Change(rank, kind, words, of, with_operand(step, place, value))
            if own.is_floating_point() and (what in ("bias", "mask") or own.dim() <= 1):
                for number in (0.0, 1.0):
                    edits = with_operand(step, place, torch.full_like(own, number))
                    yield Change(2, "operator", f"has no {what} here", step, edits)


def _reordered(accused: Accused, step: Step, place: int) -> Step | None:
    """The product that makes an operand, if B has the rows of its weight in another order."""
    judge = accused.judge
    for maker in judge.a.writers[step.number][place]:
        for piece in judge.counterparts.by_weight.get(maker, ()):
            if bool((np.diff(piece.rows_b[np.argsort(piece.rows_a)]) < 0).any()):
                return judge.a.steps[maker]
    return None


def _operands_b(accused: Accused, own: torch.Tensor, is_mask: bool) -> Iterator[tuple[Step, str, Region, bool, bool]]:
    """The operands of B's calls of the size of one of A; whether others of these calls make them, or no call does."""
    part = {step.number for step in accused.steps_b if not moves(step)}
    made = {region.name for step in accused.steps_b for region in step.outputs if region is not None}
    for other in accused.steps_b:
        for (name, region), writers in zip(other.inputs, accused.judge.b.writers[other.number], strict=True):
            wide = is_mask and "mask" in name and _fits(region.shape, own.shape)
            if region.name is not None and (wide or math.prod(region.shape) == own.numel()):
                is_made = region.name in made or (bool(writers) and writers <= part)
                yield other, name, region, is_made, writers == {LEAF}


def _fits(narrow: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a mask may be one for a shape, with a row for all queries or one for all heads."""
    pairs = zip(reversed(narrow), reversed(shape), strict=False)
    return len(narrow) <= len(shape) and all(one in (1, size) for one, size in pairs)


def tables(accused: Accused) -> Iterator[Change]:
    """B's constants and positions for those that A's calls read, by what makes them; all at once."""
    judge, edits, names = accused.judge, dict[int, Edit](), dict[str, None]()
    tables = {
        (step.operator, math.prod(region.shape)): region
        for step in accused.steps_b
        if step.number not in judge.b.active
        for region in step.outputs[:1]
        if region is not None and region.name is not None
    }
    first: Step | None = None
    sizes = {size: region for (_, size), region in tables.items()}
    for step in accused.steps:
        given = [*accused.given(step)]
        for place, writers in enumerate(judge.a.writers[step.number]):
            makers = writers - {LEAF}
            if len(makers) != 1 or makers & judge.a.active or place not in step.reads:
                continue
            (maker,) = makers
            name = judge.a.steps[maker].operator
            own, size = given[place], given[place].numel()
            region = tables.get((name, size)) or sizes.get(size)
            halves = own.chunk(2, -1) if region is None and own.dim() else ()
            if len(halves) == 2 and torch.equal(*halves):  # as cosines for both halves of a head
                region = tables.get((name, size // 2)) or sizes.get(size // 2)
            if region is None or step.number not in judge.a.active:
                continue
            value = in_double(judge.b.program.value(region))
            value = (
                value.reshape(own.shape)
                if value.numel() == size
                else torch.cat([value.reshape(halves[0].shape)] * 2, -1)
            )
            if not torch.equal(value, given[place]):
                edits[step.number] = replaced(edits.get(step.number), place, value)
                origin = _origin(accused, maker)
                names[name_of(origin)] = None
                first = origin if first is None else first
    if first is not None:
        words = f"has other constants or positions, of {' and '.join(names)}"
        yield Change(2, "operand", words, first, edits)


def _origin(accused: Accused, maker: int) -> Step:
    """The first call that leads to a constant of A and makes what no call of B's constants does."""
    judge, sizes = accused.judge, set[int]()

    def made(flow: Flow, numbers: Iterable[int]) -> Iterator[tuple[Step, torch.Tensor]]:
        for step, region in ((flow.steps[each], region) for each in numbers for region in flow.steps[each].outputs[:1]):
            size = 1 if region is None or region.name is None else math.prod(region.shape)
            if size > 1 and region is not None and (flow is judge.a or size in sizes):
                yield step, in_double(flow.program.value(region)).double().flatten().sort()[0]

    mine = [*made(judge.a, sorted(judge.a.before([maker])))]
    sizes |= {len(value) for _, value in mine}
    theirs = [*made(judge.b, (step.number for step in judge.b.steps if step.number not in judge.b.active))]
    for step, value in mine:
        same = (other for _, other in theirs if other.shape == value.shape)
        if not any(torch.allclose(value, other, 1e-5, 1e-7, equal_nan=True) for other in same):
            return step
    return judge.a.steps[maker]


def states(accused: Accused) -> Iterator[Change]:
    """B's states for those that A's calls go on from, as the moments of an optimizer, and its counts of steps, too."""
    judge, given, counts, zero, left = accused.judge, dict[int, Edit](), dict[int, Edit](), True, [*accused.steps_b]
    first: Step | None = None
    for step in accused.steps:
        other = next((each for each in left if each.operator == step.operator), None)
        if other is None or updates(step) != updates(other):
            continue
        left.remove(other)
        counts |= with_arguments([step], {name: theirs for name, (_, theirs) in differing(step, other).items()})
        for place in step.written & step.reads if not updates(step) else ():
            own, region = accused.given(step)[place], dict(other.inputs).get(step.inputs[place][0])
            if judge.a.writers[step.number][place] & (accused.part | {LEAF}) or region is None or region.name is None:
                continue
            value = in_double(judge.b.program.value(region))
            if value.shape == own.shape and not torch.equal(value, own):
                given[step.number] = replaced(given.get(step.number), place, value)
                counts[step.number] = replaced(counts[step.number], place, value)
                first, zero = first or step, zero and not bool(value.any())
    if first is not None:
        what = f"has {'states of zero' if zero else 'other states'} where A goes on from those of an earlier step"
        yield Change(1, "operand", what, first, given)
        yield Change(1, "operand", f"{what}, and counts other steps", first, counts)


def draws(accused: Accused) -> Iterator[Change]:
    """B's random numbers, as of another seed; all at once."""
    judge = accused.judge
    mine, theirs = ([step for step in steps if step.is_random] for steps in (accused.steps, accused.steps_b))
    edits: dict[int, Edit] = {}
    for one, other in zip(mine, theirs, strict=False):
        made, region = judge.joints.made_by(other), one.outputs[0]
        if made is not None and region is not None and math.prod(made.region.shape) == math.prod(region.shape):
            edits[one.number] = constant(judge.joints.values(made))
    if mine and theirs:
        yield Change(0, "operand", f"draws other random numbers, by {name_of(mine[0])}", mine[0], edits)


def reads(accused: Accused) -> Iterator[Change]:
    """B's call reads what another call makes, or what A's goes on computing with."""
    judge = accused.judge
    joined = {number: joint for number, joint in accused.sweep.joined.items() if joint.whole}
    makers = {joint.tensor.region.name: number for number, joint in joined.items()}
    by_writer = {maker: number for number, joint in joined.items() for maker in joint.makers}
    for step in accused.steps:
        for other in accused.steps_b:
            if other.operator != step.operator:
                continue
            for place, (mine, (_, region)) in enumerate(zip(accused.given(step), other.inputs, strict=False)):
                written = judge.b.writers[other.number][place]
                maker = makers.get(region.name, by_writer.get(min(written)) if len(written) == 1 else None)
                writers = judge.a.writers[step.number][place]
                fits = mine.is_floating_point() and math.prod(region.shape) == mine.numel() and place in step.reads
                if maker is None or maker in writers or not fits:
                    continue
                value = in_double(judge.b.program.value(region)).reshape(mine.shape)
                between = _between(accused, maker, writers)
                edits = with_operand(step, place, value)
                if between:
                    names = left_out_words(between, accused.given(between[-1]))
                    yield Change(0, "operator", names, between[0], edits)
                    continue
                writer = next(iter(writers - {LEAF}), None)
                instead = "" if writer is None else f" where A reads that of {place_of(judge.a.steps[writer])}"
                words = f"reads the result of {place_of(judge.a.steps[maker])}{instead}"
                yield Change(1, "operand", words, step, edits)


def parts(accused: Accused) -> Iterator[Change]:
    """B's call reads other elements of what both have, as another token or half; one operand or all of them."""
    judge = accused.judge
    for step in accused.steps:
        found: dict[int, tuple[torch.Tensor, Place]] = {}
        for other in accused.steps_b:
            found = {} if other.operator == step.operator or not found else found
            for place, own in enumerate(accused.given(step)):
                joint = judge.counterparts.joint_of(accused.sweep, step.number, place)
                writers = judge.a.writers[step.number][place]
                whole = accused.sweep.joined.get(next(iter(writers), LEAF))
                if place not in step.reads or not own.is_floating_point() or whole is None or len(writers) != 1:
                    continue
                same = other.operator == step.operator
                for at, (_, region) in enumerate(other.inputs):
                    if (same and at != place) or region.name is None or math.prod(region.shape) != own.numel():
                        continue
                    if not judge.b.writers[other.number][at] & whole.makers or joint is None:
                        continue
                    value = in_double(judge.b.program.value(region)).reshape(own.shape)
                    if not torch.equal(value, own):
                        found[place] = value, place_of(judge.a.steps[next(iter(writers))])
            if not found:
                continue
            for chosen in ([found] if len(found) > 1 else []) + [{place: each} for place, each in found.items()]:
                edit: Edit | None = None
                moved = all(_same_numbers(value, accused.given(step)[place]) for place, (value, _) in chosen.items())
                what = "the result of" if moved else "another part of the result of"
                words = f"reads {what} {next(iter(chosen.values()))[1]}{' in another order' if moved else ''}"
                for place, (value, _) in chosen.items():
                    edit = replaced(edit, place, value)
                if edit is not None:
                    yield Change(2 if moved else 0, "operand", words, step, {step.number: edit})


def _between(accused: Accused, first: int, last: frozenset[int]) -> list[Step]:
    """The calls of A that lead from a call to others, the shortest way if they are many; none if it does not."""
    flow, left = accused.judge.a, [each for each in sorted(last) if each > first]
    after: dict[int, int | None] = dict.fromkeys(left)
    nearest: int | None = None
    while left:
        number = left.pop(0)
        writers = frozenset[int]().union(*flow.writers[number])
        nearest = number if first in writers and nearest is None else nearest
        new = [each for each in sorted(writers) if each > first and each not in after]
        after |= dict.fromkeys(new, number)
        left += new
    steps = [flow.steps[number] for number in sorted(after.keys() & flow.active)]
    if nearest is None or len({step.operator for step in steps}) <= LONGEST:
        return steps if nearest is not None else []
    way: list[Step] = []
    while nearest is not None:
        way.append(flow.steps[nearest])
        nearest = after[nearest]
    return way if len({step.operator for step in way}) <= LONGEST else []


def exchanged(accused: Accused) -> Iterator[Change]:
    """Two operands of one call change places."""
    for step in accused.steps:
        given = accused.given(step)
        real = [place for place in sorted(step.reads) if given[place].is_floating_point()]
        for one, two in itertools.combinations(real, 2) if step.operator not in ("add", "mul") else ():
            if given[one].shape == given[two].shape and not torch.equal(given[one], given[two]):
                names = [operand_words(step, *step.inputs[place]) for place in (one, two)]
                what = f"the {names[0]} and the {names[1]}" if names[0] != names[1] else "the operands"
                edits: Edits = {step.number: swapped(one, two)}
                yield Change(1, "operand", f"exchanges {what} of {name_of(step)}", step, edits)


def exchanged_results(accused: Accused) -> Iterator[Change]:
    """The results of two calls change places in all that the region does with them."""
    flow = accused.judge.a
    read: dict[int, list[tuple[Step, int]]] = defaultdict(list)
    for step in accused.steps:
        for place, writers in enumerate(flow.writers[step.number]):
            if len(writers) == 1 and writers <= flow.active - accused.part:
                read[min(writers)].append((step, place))
    for first, second in itertools.combinations(read, 2):
        given = [[accused.given(step)[place] for step, place in read[number]] for number in (first, second)]
        pairs = [*zip(*given, strict=False)]
        if len({each.shape for values in given for each in values}) == 1:
            turned = [given[1][0]] * len(given[0]), [given[0][0]] * len(given[1])
        elif len(given[0]) == len(given[1]) and all(one.shape == two.shape for one, two in pairs):
            turned = [two for _, two in pairs], [one for one, _ in pairs]
        elif len(given[0]) == len(given[1]) and all(
            one.dim() > 1 and one.mT.shape == two.shape for one, two in pairs
        ):  # scores of q and k
            turned = [two.mT for _, two in pairs], [one.mT for one, _ in pairs]
        else:
            continue
        both: dict[int, Edit] = {}
        for number, values in zip((first, second), turned, strict=True):
            for (step, place), value in zip(read[number], values, strict=True):
                both[step.number] = replaced(both.get(step.number), place, value)
        places = [place_of(flow.steps[number]) for number in (first, second)]
        yield Change(1, "operand", f"exchanges the results of {places[0]} and {places[1]}", read[first][0][0], both)


def _same_numbers(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether tensors have the same numbers, in whatever order."""
    return one.numel() == two.numel() and torch.equal(one.flatten().sort()[0], two.flatten().sort()[0])


def _is_in(value: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(torch.equal(value, each) for each in others)
