"""Joins the calls of two runs by the weights that they have in common.

Invariant: two calls are joined only if rows of their weights are, or if they stand between two joined pairs.
Reads no tensor.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from opintercept._core.record import CallRecord
from opintercept._core.text import counted
from opintercept.runs.align.common_weights import Joining, Match, Side, Term
from opintercept.runs.store.codec import StoredCall


@dataclass(slots=True)
class JoinedCalls:
    """The pairs of calls.

    Attributes:
        of_a: For each call of A that is joined, the calls of B, each with the number of a match; None for neighbours.
        of_b: The calls of B that are joined.
        terms: The calls of A that the other run does not compute by themselves, and why.
        shards: For a call of B, those of A's processes that make parts of its output.
        reasons: Why other calls are not joined, by side and number.
    """

    of_a: dict[int, list[tuple[int, int | None]]] = field(default_factory=lambda: defaultdict(list))
    of_b: set[int] = field(default_factory=set)
    terms: dict[int, str] = field(default_factory=dict)
    shards: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, a: int, b: int, match: int | None) -> None:
        """Join two calls."""
        self.of_a[a].append((b, match))
        self.of_b.add(b)


def linked(joining: Joining) -> JoinedCalls:
    """Join the calls of two runs: by their weights, then those between them."""
    links = JoinedCalls()
    for number, match in enumerate(joining.matches):
        one, other = joining.a.weights[match.a].calls, joining.b.weights[match.b].calls
        for rank_a, rank_b in _rank_pairs(joining, one, other):
            for a, b in _in_order(joining, one[rank_a], other[rank_b], links):
                links.add(a, b, number)
        if (term := joining.terms.get(number)) is not None:
            _add_terms(joining, links, match, term)
    _add_neighbours(joining, links)
    for name, side, done in (("a", joining.a, links.of_a), ("b", joining.b, links.of_b)):
        for number in range(len(side.calls)):
            if number not in done:
                reason = side.reasons.get(number, "no weight of the other run has rows like those of its right operand")
                links.reasons.setdefault((name, number), reason)
    return links


def _add_terms(joining: Joining, links: JoinedCalls, match: Match, term: Term) -> None:
    """Join the calls of a low-rank product with those of the weight that has it already."""
    side = joining.sides[term.side]
    numbers = [n for each in (term.first, term.second) for calls in side.weights[each].calls.values() for n in calls]
    if term.side == "b":
        links.of_b.update(numbers)
        return
    counterparts = joining.b.weights[match.b].calls
    for number in numbers:
        found = counterparts.get(side.calls[number].rank) or next(iter(counterparts.values()))
        links.terms[number] = "it is a low-rank product, which is compared as a part of its sum"
        links.of_a[number].append((found[0], None))


def _rank_pairs(joining: Joining, one: Iterable[int], other: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Each rank with itself; if only one side has it, or a run has one process, with all of the other side."""
    a, b = set(one), set(other)
    alone = len(joining.a.run.ranks) == 1 or len(joining.b.run.ranks) == 1
    for rank_a in sorted(a):
        for rank_b in sorted(b):
            if alone or rank_a == rank_b or rank_a not in b or rank_b not in a:
                yield rank_a, rank_b


def _in_order(joining: Joining, in_a: list[int], in_b: list[int], links: JoinedCalls) -> Iterator[tuple[int, int]]:
    """Pair the calls of two weights in order. If one weight has more calls, pair those with as many input rows."""
    if len(in_a) == len(in_b):
        yield from zip(in_a, in_b, strict=True)
        return
    sizes_a, sizes_b = (
        [gemm.m if (gemm := side.calls[number].record.gemm) is not None else 0 for number in numbers]
        for side, numbers in ((joining.a, in_a), (joining.b, in_b))
    )
    blocks = SequenceMatcher(None, sizes_a, sizes_b, autojunk=False).get_matching_blocks()
    pairs = {in_a[i + turn]: in_b[j + turn] for i, j, size in blocks for turn in range(size)}
    yield from pairs.items()
    for name, numbers, done, count in (("a", in_a, set(pairs), len(in_b)), ("b", in_b, {*pairs.values()}, len(in_a))):
        for number in numbers:
            if number not in done:
                reason = f"the other run uses its weight in {counted(count, 'call')}, this one in {len(numbers)}"
                links.reasons[name, number] = reason


def _add_neighbours(joining: Joining, links: JoinedCalls) -> None:
    """Join calls without a weight, as those of attention, that stand between the same two pairs in both runs."""
    of_a = {a: [b for b, _ in found] for a, found in links.of_a.items()}
    gaps = []
    for rank_a, rank_b in _rank_pairs(joining, joining.a.run.ranks, joining.b.run.ranks):
        in_a = [number for number, call in enumerate(joining.a.calls) if call.rank == rank_a]
        in_b = [number for number, call in enumerate(joining.b.calls) if call.rank == rank_b]
        if not in_a or not in_b:
            continue
        start_a, start_b, first_b, last_b = in_a[0], in_b[0], in_b[0], in_b[-1] + 1
        for a in in_a:
            found = [b for b in of_a.get(a, ()) if first_b <= b < last_b and b >= start_b - 1]
            if found:
                gaps.append((range(start_a, a), range(start_b, min(found))))
                start_a, start_b = a + 1, max(start_b, max(found) + 1)
        gaps.append((range(start_a, in_a[-1] + 1), range(start_b, last_b)))
    gaps = [gap for gap in gaps if len(gap[0]) and len(gap[1])]
    for gap in gaps:
        _pair_between(joining, links, *gap)
    _add_shards(joining, links, gaps)
    for gap in gaps:
        _add_inside(joining, links, *gap)
        for name, side, numbers, done in (
            ("a", joining.a, gap[0], {*links.of_a}),
            ("b", joining.b, gap[1], links.of_b),
        ):
            for number in numbers:
                if number not in done and _may_be_neighbour(side, number):
                    links.reasons[name, number] = "the other run has no matmul of its shape between the same two"


def _pair_between(joining: Joining, links: JoinedCalls, in_a: range, in_b: range) -> None:
    for signature in (_gemm_signature, _output_signature):
        # Another rank may have this call of A, too.
        done = {number for number in in_a if any(b in in_b for b, _ in links.of_a.get(number, ()))}
        left_a = [number for number in in_a if number not in done and _may_be_neighbour(joining.a, number)]
        done = {b for number in in_a for b, _ in links.of_a.get(number, ())}
        left_b = [number for number in in_b if number not in done and _may_be_neighbour(joining.b, number)]
        of_a = {number: signature(joining.a.calls[number].record) for number in left_a}
        of_b = {number: signature(joining.b.calls[number].record) for number in left_b}
        # Where one product more of this signature stands there, it is not known which of them belongs to which.
        counts_a, counts_b = Counter(of_a.values()), Counter(of_b.values())
        of_a = {number: each for number, each in of_a.items() if counts_a[each] == counts_b[each]}
        of_b = {number: each for number, each in of_b.items() if counts_a[each] == counts_b[each]}
        chosen_a, chosen_b = [*of_a], [*of_b]
        matcher = SequenceMatcher(None, [*of_a.values()], [*of_b.values()], autojunk=False)
        for i, j, size in matcher.get_matching_blocks():
            for turn in range(size):
                links.add(chosen_a[i + turn], chosen_b[j + turn], None)


def _add_shards(joining: Joining, links: JoinedCalls, gaps: list[tuple[range, range]]) -> None:
    """Join a call with those of several processes that make parts of its output, as of the heads of an attention."""
    ranks_a, ranks_b = len(joining.a.run.ranks), len(joining.b.run.ranks)
    if (ranks_a == 1) == (ranks_b == 1):
        return
    of: dict[int, list[int]] = defaultdict(list)  # by call of the run with one process
    for in_a, in_b in gaps:
        left_a = [number for number in in_a if number not in links.of_a]
        left_b = [number for number in in_b if number not in links.of_b]
        whole, parts = (left_a, left_b) if ranks_a == 1 else (left_b, left_a)
        sides = (joining.a, joining.b) if ranks_a == 1 else (joining.b, joining.a)
        taken: set[int] = set()
        for number in whole:
            for part in parts:
                dim = shared_dim(sides[0].calls[number], [sides[1].calls[part]] * max(ranks_a, ranks_b))
                if part not in taken and dim is not None:
                    of[number].append(part)
                    taken.add(part)
                    break
    for number, parts in of.items():
        if len(parts) == max(ranks_a, ranks_b):
            for part in parts:
                links.add(*((number, part) if ranks_a == 1 else (part, number)), None)
            if ranks_a > 1:
                links.shards[number] = parts


def shared_dim(whole: StoredCall, parts: Sequence[StoredCall]) -> int | None:
    """Return the dimension in which the outputs of some calls are concatenated to that of another."""
    one, *others = (_first_output(call.record) for call in (whole, *parts))
    if one is None or any(each is None or len(each) != len(one) or each != others[0] for each in others):
        return None
    differ = [dim for dim, size in enumerate(others[0] or ()) if size != one[dim]]
    if whole.record.op != parts[0].record.op or len(differ) != 1:
        return None
    return differ[0] if one[differ[0]] == len(parts) * (others[0] or ())[differ[0]] else None


def _may_be_neighbour(side: Side, number: int) -> bool:
    """Return whether the right operand may be no parameter, which is unknown where no operand requires a gradient."""
    weight, rhs = side.weight[number], side.calls[number].record.rhs
    return weight < 0 or side.weights[weight].shape[0] > 1 or rhs is None or not rhs.requires_grad


def _add_inside(joining: Joining, links: JoinedCalls, in_a: range, in_b: range) -> None:
    """Join the first product of an attention with a fused attention of the other run, which has that product inside."""
    for a in in_a:
        found = [b for b, match in links.of_a.get(a, ()) if match is None and b in in_b and a not in links.terms]
        if not found:
            continue
        b = found[0]
        fused_a, fused_b = (
            "attention" in side.calls[number].record.op for side, number in ((joining.a, a), (joining.b, b))
        )
        if fused_b and not fused_a and a - 1 in in_a and a - 1 not in links.of_a:
            links.terms[a - 1] = "the other run computes it inside its fused attention"
            links.add(a - 1, b, None)
        if fused_a and not fused_b and b - 1 in in_b:
            links.of_b.add(b - 1)


def _gemm_signature(record: CallRecord) -> Any:
    gemm = record.gemm
    if gemm is None:
        return record.op, record.lhs and record.lhs.shape, record.rhs and record.rhs.shape
    return gemm.batch, gemm.k, *sorted((gemm.m, gemm.n))


def _output_signature(record: CallRecord) -> Any:
    """How many elements the output has: a fused attention has as many as its last product."""
    shape = _first_output(record)
    return None if shape is None else math.prod(shape)


def _first_output(record: CallRecord) -> tuple[int, ...] | None:
    output = record.output[0] if isinstance(record.output, tuple) and record.output else record.output
    return None if output is None or isinstance(output, tuple) else output.shape
