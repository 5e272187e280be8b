"""Joins the calls of two runs by the weights that they have in common.

Invariant: two calls are joined only if rows of their weights are, or if they stand between two joined pairs.
Reads tensors only where one run computes in pieces what the other computes at once. Needs numpy. Imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from opintercept._core.record import CallRecord
from opintercept._core.text import counted
from opintercept.runs.store.columns import Array
from opintercept.runs.why.joining.rows import tensor_of
from opintercept.runs.why.joining.tokens import MOST, alike, distances, same_tokens
from opintercept.runs.why.joining.weights import Joining, Match, Side, SideName, Term

_MOSTLY = 0.9  # of the rows of a product are alike in both runs if they are of the same tokens
_EQUAL = 1e-4  # of the squared distance of unrelated rows, below which rows are the same
_COMPARED = 8  # products of which the rows are compared to find the tokens


@dataclass(slots=True)
class JoinedCalls:
    """The pairs of calls.

    Attributes:
        of_a: For each call of A that is joined, the calls of B, each with the number of a match; None for neighbours.
        of_b: The calls of B that are joined.
        terms: The calls of A that the other run does not compute by themselves, and why.
        reasons: Why other calls are not joined, by side and number.
        rows: For calls of which one computes other tokens, too: the rows of both that are of the same token.
    """

    of_a: dict[int, list[tuple[int, int | None]]] = field(default_factory=lambda: defaultdict(list))
    of_b: set[int] = field(default_factory=set)
    terms: dict[int, str] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    rows: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)

    def add(self, a: int, b: int, match: int | None) -> None:
        """Join two calls."""
        self.of_a[a].append((b, match))
        self.of_b.add(b)


def linked(joining: Joining) -> JoinedCalls:
    """Join the calls of two runs: by their weights, then those between them."""
    links = JoinedCalls()
    pieces: dict[Any, list[tuple[list[int], list[int], int]]] = defaultdict(list)
    for number, match in enumerate(joining.matches):
        one, other = joining.a.weights[match.a].calls, joining.b.weights[match.b].calls
        for rank_a, rank_b in _rank_pairs(joining, one, other):
            in_a, in_b = one[rank_a], other[rank_b]
            groups = joining.group("a", match), joining.group("b", match)
            sizes = (
                tuple(joining.a.rows_of(each, groups[0]) for each in in_a),
                tuple(joining.b.rows_of(each, groups[1]) for each in in_b),
            )
            if sizes[0] == sizes[1]:
                for a, b in zip(in_a, in_b, strict=True):
                    links.add(a, b, number)
            else:
                pieces[sizes].append((in_a, in_b, number))
        if (term := joining.terms.get(number)) is not None:
            _add_terms(joining, links, match, term)
    for sizes, several in pieces.items():
        _add_pieces(joining, links, sizes, several)
    for found in links.of_a.values():
        found.sort(key=lambda link: link[0])
    _add_neighbours(joining, links)
    for name, side, done in (("a", joining.a, links.of_a), ("b", joining.b, links.of_b)):
        for number in range(len(side.calls)):
            if number not in done:
                reason = side.reasons.get(number, "no weight of the other run has rows like those of its right operand")
                links.reasons.setdefault((name, number), reason)
    return links


def _add_pieces(
    joining: Joining,
    links: JoinedCalls,
    sizes: tuple[tuple[int, ...], ...],
    found: list[tuple[list[int], list[int], int]],
) -> None:
    """Join calls by the rows of their left operands.

    These are of the same tokens in most products of these sizes, and not in those of experts.
    """
    tokens = None
    if math.prod(map(sum, sizes)) <= MOST:
        step = -(-len(found) // _COMPARED)
        tokens = same_tokens([distances(*_inputs(joining, *each)) for each in found[::step]])
    calls = [np.repeat(np.arange(len(each)), each) for each in sizes]
    first = [np.concatenate([[0], np.cumsum(each)]) for each in sizes]
    for in_a, in_b, number in found:
        done: set[tuple[str, int]] = set()
        if tokens is not None:
            own = _own_tokens(joining, tokens, in_a, in_b, number)
            owners = [of[rows] for of, rows in zip(calls, own, strict=True)]
            for i, j in sorted({*zip(*(each.tolist() for each in owners), strict=True)}):
                both = (owners[0] == i) & (owners[1] == j)
                links.add(in_a[i], in_b[j], number)
                links.rows[in_a[i], in_b[j]] = own[0][both] - first[0][i], own[1][both] - first[1][j]
                done |= {("a", in_a[i]), ("b", in_b[j])}
        for name, numbers, count in (("a", in_a, len(in_b)), ("b", in_b, len(in_a))):
            for each in numbers:
                if (name, each) not in done:
                    reason = f"the other run uses its weight in {counted(count, 'call')}, this one in {len(numbers)}"
                    links.reasons[name, each] = f"{reason}; no row of its left operand is one of theirs"


def _own_tokens(
    joining: Joining, usual: tuple[Array, Array], in_a: list[int], in_b: list[int], number: int
) -> tuple[Array, Array]:
    """The rows of the same tokens in one product: the usual ones, or others if more of these are alike, or the same."""
    x, y = _inputs(joining, in_a, in_b, number)
    count, far = (each(x[usual[0]], y[usual[1]]) for each in (alike, _far))
    most = count >= _MOSTLY * min(len(x), len(y))
    if most and far < _EQUAL:
        return usual
    own = same_tokens([distances(x, y)])
    more, less = (each(x[own[0]], y[own[1]]) for each in (alike, _far))
    return own if (less < _EQUAL if most else more > count) else usual


def _far(x: torch.Tensor, y: torch.Tensor) -> float:
    """The squared distance of rows, relative to that of unrelated ones."""
    return float((x - y).square().sum() / (x.square().sum() + y.square().sum()).clamp_min(1e-300))


def _inputs(joining: Joining, in_a: list[int], in_b: list[int], number: int) -> list[torch.Tensor]:
    """The rows of the left operands that a match is about, all calls of a side one after the other."""
    match, found = joining.matches[number], []
    sides: tuple[tuple[SideName, list[int], tuple[int, int]], ...]
    sides = ("a", in_a, match.part_a), ("b", in_b, match.part_b)
    for name, calls, part in sides:
        side, group = joining.sides[name], joining.group(name, match)
        rows = [_lhs(side, each, group)[:, slice(*part)] for each in calls]
        found.append(torch.cat(rows))
    return found if match.order is None else [found[0], found[1][:, match.order]]


def _lhs(side: Side, number: int, group: int | None) -> torch.Tensor:
    x = tensor_of(side.run, side.calls[number], "lhs").double()
    rows = x.reshape(-1, x.size(-1))
    return rows if group is None else rows.chunk(side.weights[side.weight[number]].shape[0])[group]


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


def _add_neighbours(joining: Joining, links: JoinedCalls) -> None:
    """Join calls without a weight, as those of attention, that stand between the same two pairs in both runs."""
    gaps = []
    ranks = [*_rank_pairs(joining, joining.a.run.ranks, joining.b.run.ranks)]
    of_rank = [
        {rank: [n for n, call in enumerate(side.calls) if call.rank == rank] for rank in side.run.ranks}
        for side in (joining.a, joining.b)
    ]
    for (rank_a, rank_b), of_a in itertools.product(ranks, _passes(joining, links)):
        in_a, in_b = of_rank[0][rank_a], of_rank[1][rank_b]
        if not in_a or not in_b:
            continue
        start_a, start_b, first_b, last_b = in_a[0], in_b[0], in_b[0], in_b[-1] + 1
        for a in sorted(of_a):
            found = [b for b in of_a[a] if first_b <= b < last_b and b >= start_b - 1]
            if found and joining.a.calls[a].rank == rank_a:
                gaps.append((range(start_a, a), range(start_b, min(found))))
                start_a, start_b = a + 1, max(start_b, max(found) + 1)
        if start_a not in links.of_a:
            gaps.append((range(start_a, in_a[-1] + 1), range(start_b, last_b)))
    gaps = [gap for gap in gaps if len(gap[0]) and len(gap[1])]
    for gap in gaps:
        _pair_attentions(joining, links, *gap)
        _pair_between(joining, links, *gap)


def _passes(joining: Joining, links: JoinedCalls) -> list[dict[int, list[int]]]:
    """The joined calls, by how often each side has computed a part of the other's call before."""
    passes: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    seen: Counter[Any] = Counter()
    for a in sorted(links.of_a):
        for b, match in links.of_a[a]:
            one, other = ("a", a, match, joining.b.calls[b].rank), ("b", b, match, joining.a.calls[a].rank)
            passes[seen[one], seen[other]][a].append(b)
            seen.update([one, other] if match is not None else [])
    return [*passes.values()] or [{}]


def _pair_attentions(joining: Joining, links: JoinedCalls, in_a: range, in_b: range) -> None:
    """Join the attentions between two pairs in their order, whether they are fused or two products."""
    of_a = [n for n in in_a if n in joining.a.attentions]
    of_b = [n for n in in_b if n in joining.b.attentions]
    if len(of_a) != len(of_b):
        return
    for a, b in zip(of_a, of_b, strict=True):
        scores_a, scores_b = joining.a.attentions[a], joining.b.attentions[b]
        sizes = {_output_signature(side.calls[n].record) for side, n in ((joining.a, a), (joining.b, b))}
        if len(joining.a.run.ranks) != len(joining.b.run.ranks) and len(sizes) > 1:
            continue  # they have the heads of one process each
        if scores_a is not None:
            links.add(scores_a, b if scores_b is None else scores_b, None)
            if scores_b is None:
                links.terms[scores_a] = "the other run computes it inside its fused attention"
        elif scores_b is not None:
            links.of_b.add(scores_b)
        links.add(a, b, None)


def _pair_between(joining: Joining, links: JoinedCalls, in_a: range, in_b: range) -> None:
    """Join the other calls between two pairs by their signatures, in their order."""
    for signature in (_gemm_signature, _output_signature):
        done_b = {b for a in in_a for b, _ in links.of_a.get(a, ())}
        done_a = {a for a in in_a if any(b in in_b for b, _ in links.of_a.get(a, ()))}  # another rank may have it, too
        left: list[dict[Any, list[int]]] = []
        for name, side, numbers, done in (("a", joining.a, in_a, done_a), ("b", joining.b, in_b, done_b)):
            left.append(defaultdict(list))
            for number in numbers:
                free = bool(joining.matches) or side.calls[number].record.gemm is None  # as of a recurrent layer
                if free and number not in done and _may_be_neighbour(side, number, (name, number) in links.reasons):
                    left[-1][signature(side.calls[number].record)].append(number)
        for own, of_a in left[0].items():
            of_b = left[1].get(own, [])
            if len(of_a) == len(of_b):  # where one more stands there, it is not known which belong to each other
                for a, b in zip(of_a, of_b, strict=True):
                    links.add(a, b, None)


def _may_be_neighbour(side: Side, number: int, alone: bool = False) -> bool:
    """Return whether the right operand may be no parameter, which is unknown where no operand requires a gradient.

    Nor need it be one if the call is `alone`: the calls of the other run that multiply by it have other tokens.
    """
    weight, rhs = side.weight[number], side.calls[number].record.rhs
    return alone or weight < 0 or side.weights[weight].shape[0] > 1 or rhs is None or not rhs.requires_grad


def _gemm_signature(record: CallRecord) -> Any:
    gemm = record.gemm
    if gemm is None:
        return record.op, record.lhs and record.lhs.shape, record.rhs and record.rhs.shape
    return gemm.batch, gemm.k, *sorted((gemm.m, gemm.n))


def _output_signature(record: CallRecord) -> Any:
    """How many elements the output has: a fused attention has as many as its last product."""
    output = next(iter(record.outputs), None)
    return None if output is None else math.prod(output.shape)
