"""Finds the rows of weights that two runs have in common.

Invariant: names of modules are not read. Needs numpy. Imports torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from opintercept._core.errors import OpInterceptError
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import Array
from opintercept.runs.store.run import Run
from opintercept.runs.why.flow import is_product
from opintercept.runs.why.joining.rows import (
    Factors,
    factors_of,
    fingerprints,
    shape_of,
    sketches,
    tensor_of,
    weight_of,
)
from opintercept.runs.why.joining.tokens import alike, distances, nearest

_SAMPLED = 16  # rows of a weight that find out which weights resemble it
_ALIKE = 0.8  # the least cosine of sketches of two rows that may be the same
_SAME = 0.9  # the least cosine of two rows that are the same
_LIKELY = 0.5  # the largest error of what a packed weight gives
_NEAR = 8  # calls between a product and those of low rank that are added to it
_REST = 0.1  # what may remain of a difference once a low-rank product is added
_TOKENS = 4  # that tell one column of what is multiplied from the others
_SAME_COLUMN = 0.05  # the largest squared distance of two such columns that are the same, relative to their norms
_SHORTEST = 16  # elements that tell a row whatever their order, or some rows: fewer are the same by chance
_MOST = 1 << 25  # pairs of rows whose distances are computed, which take a gigabyte with what is made of them


@dataclass(slots=True)
class Weight:
    """A weight, and the calls that multiply by it."""

    shape: tuple[int, int, int]  # groups, rows and elements of a row
    calls: dict[int, list[int]]  # their numbers, by rank
    left: Array  # whether each row has no counterpart yet
    sure: bool  # whether it may be a parameter: the operands of attention have groups, too


@dataclass(frozen=True, slots=True)
class Match:
    """Rows of a weight of A that are rows of a weight of B."""

    a: int
    b: int
    rows_a: Array
    rows_b: Array  # the row of B for each of A
    by: By  # equal "rows", equal "parts" of rows, equal rows with "permuted" elements, or "values" that are close
    part_a: tuple[int, int]  # the elements of A's rows that these are, `(0, k)` for whole rows
    part_b: tuple[int, int]
    order: Array | None = None  # for each of A's elements, that of B; None if the order is the same

    def as_in_b(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows with A's elements as B has them, whose blocks are rounded together."""
        return rows if self.order is None else rows[:, np.argsort(self.order)]


SideName = Literal["a", "b"]
By = Literal["rows", "parts", "permuted", "values", "neighbours"]


@dataclass(frozen=True, slots=True)
class Term:
    """A low-rank term that one side adds to what it computes with a weight: `factor * (x @ first.mT) @ second.mT`."""

    side: SideName
    first: int  # the weight `[r, k]`
    second: int  # the weight `[n, r]`
    factor: float


@dataclass(slots=True)
class Side:
    """The forward calls of a run, rank by rank, in the order in which they ended, and their weights."""

    run: Run
    calls: list[StoredCall] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)  # in the order in which they were first used
    weight: list[int] = field(default_factory=list)  # for each call, the number of its weight; -1 if it has none
    reasons: dict[int, str] = field(default_factory=dict)  # why a call has no weight
    attentions: dict[int, int | None] = field(default_factory=dict)  # the call of the scores; None if it is fused
    parameters: dict[int, bool] = field(default_factory=dict)  # whether a call's right operand is one, if that is known
    memories: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # and where: its rank, memory and offset
    gradients: dict[tuple[int, int], StoredCall] = field(default_factory=dict)  # what reads that of a call's output
    stand_ins: dict[int, tuple[Side, int]] = field(default_factory=dict)  # weights of the other run for packed ones

    @classmethod
    def of(cls, run: Run) -> Side:
        """Read the calls of a run."""
        side = cls(run)
        for rank in run.ranks:
            for call in run.calls(rank):
                if call.record.grad_of is not None and call.record.forward is not None and call.record.lhs is not None:
                    side.gradients.setdefault((rank, call.record.forward), call)
                if call.record.phase == "forward" and call.error is None and _is_product(call):
                    side.calls.append(call)
        side.weight = [-1] * len(side.calls)
        for number, call in enumerate(side.calls):
            for given in (call.given or {}).get("args", ()):
                match given:
                    case {"tensor": name, "memory": [memory, offset, _, bool(own)]} if name == call.tensors.get("rhs"):
                        side.parameters[number] = own
                        side.memories[number] = call.rank, memory, offset
            if "attention" in call.record.op:
                side.attentions[number] = None
            elif side._weighs(number):
                side.attentions[number] = number - 1
        inside = {*side.attentions, *side.attentions.values()}
        known: dict[Any, int] = {}
        for number, call in enumerate(side.calls):
            try:
                if number in inside:
                    raise OpInterceptError("it is a part of an attention")
                side._add(call, number, known)
            except OpInterceptError as reason:
                side.reasons[number] = str(reason)
        return side

    def _weighs(self, number: int) -> bool:
        """Whether a call multiplies by the softmax of the product before it: its rows add up to about 1."""
        if not number or self.calls[number - 1].rank != self.calls[number].rank:
            return False
        scores, last = (self.calls[each].record.gemm for each in (number - 1, number))
        found = self.calls[number].values.get("lhs")
        if scores is None or last is None or found is None or found.min is None or found.mean is None:
            return False
        if (scores.batch, scores.m, scores.n) != (last.batch, last.m, last.k) or found.min < 0:
            return False
        return found.max is not None and found.max <= 2 and abs(found.mean * last.k - 1) < 0.25

    def _add(self, call: StoredCall, number: int, known: dict[Any, int]) -> None:
        """Find the weight of a call by its content, or by its memory if training has changed it since."""
        record, rhs = call.record, call.values.get("rhs")
        sizes = record.gemm and record.gemm[:4:2]  # a weight that is transposed has other rows
        names: list[Any] = [rhs and (rhs.hash, record.rhs and record.rhs.dtype, sizes)]
        if self.parameters.get(number):
            names.append((*self.memories[number], sizes))
        weight = next((known[name] for name in names if name is not None and name in known), None)
        if weight is None:
            g, n, k = shape_of(call)
            weight = len(self.weights)
            sure = g == 1 or (record.rhs is not None and record.rhs.requires_grad)
            self.weights.append(Weight((g, n, k), {}, np.ones(g * n, bool), sure))
        for name in names:
            if name is not None:
                known.setdefault(name, weight)
        self.weights[weight].calls.setdefault(call.rank, []).append(number)
        self.weight[number] = weight

    def first(self, weight: int) -> int:
        """The first call that reads a weight."""
        return min(numbers[0] for numbers in self.weights[weight].calls.values())

    def rows_of(self, number: int, group: int | None = None) -> int:
        """How many rows the left operand of a call has, or one group of it."""
        lhs = self.calls[number].record.lhs
        found = math.prod(lhs.shape[:-1]) if lhs is not None else 0
        return found if group is None else found // self.weights[self.weight[number]].shape[0]

    def factors(self, number: int) -> Factors:
        """The tensors of a call."""
        call, weight = self.calls[number], self.weight[number]
        if weight not in self.stand_ins:
            return factors_of(self.run, call)
        side, theirs = self.stand_ins[weight]
        x, out = tensor_of(self.run, call, "lhs"), tensor_of(self.run, call, "output")
        like = side.factors(side.first(theirs))
        return Factors(x.reshape(1, -1, x.size(-1)), like.w, out.reshape(1, -1, out.size(-1)), like.bias, packed=True)

    def rows(self, weight: int) -> torch.Tensor:
        """The rows of a weight, `[g * n, k]`, as its first call read them."""
        if weight in self.stand_ins:
            side, theirs = self.stand_ins[weight]
            return side.rows(theirs)
        found = weight_of(self.run, self.calls[self.first(weight)])
        return found.reshape(-1, found.size(-1))


def _is_product(call: StoredCall) -> bool:
    """Whether a call is a product or an attention, whose operands have numbers."""
    operands = (each for each in (call.record.lhs, call.record.rhs) if each is not None)
    return is_product(call) and not any(0 in each.shape for each in operands)


class _FingerprintTable:
    """Where each fingerprint occurs among the rows that are left."""

    def __init__(self, side: Side, fingerprint: Callable[[torch.Tensor], Array]) -> None:
        parts: dict[int, list[tuple[Array, Array, Array]]] = defaultdict(list)
        for number, weight in enumerate(side.weights):
            if weight.left.any():
                rows = np.flatnonzero(weight.left)
                found = fingerprint(side.rows(number))[rows]
                parts[weight.shape[2]].append((found, np.full(len(rows), number), rows))
        self._by_k = {}
        for k, each in parts.items():
            found, weights, rows = (np.concatenate(column) for column in zip(*each, strict=True))
            order = np.argsort(found, kind="stable")
            self._by_k[k] = found[order], weights[order], rows[order]
        self.lengths = list(self._by_k)  # of rows

    def find(self, found: Array, k: int, like: int) -> dict[int, tuple[Array, Array]]:
        """Find these rows: for each weight that has some, which ones and where.

        Rows that occur once decide which weights come into question. Where there are none, as of a weight of zeros, it
        is the weight with the most of the rows, and of those the one whose number is nearest to `like`.
        """
        if k not in self._by_k:
            return {}
        table, weights, rows = self._by_k[k]
        first, last = np.searchsorted(table, found), np.searchsorted(table, found, "right")
        single = np.flatnonzero(last - first == 1)
        pairs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for place, weight, row in zip(
            single.tolist(), weights[first[single]].tolist(), rows[first[single]].tolist(), strict=True
        ):
            pairs[weight].append((place, row))
        several = np.flatnonzero(last - first > 1)
        if len(several):
            values, groups = np.unique(found[several], return_inverse=True)
            chosen = set(pairs)
            if not chosen:
                some = np.concatenate([np.unique(weights[first[i] : last[i]]) for i in several.tolist()])
                candidates, counts = np.unique(some, return_counts=True)
                chosen = {int(candidates[np.lexsort((abs(candidates - like), -counts))[0]])}
            for value in range(len(values)):
                places = several[groups == value].tolist()
                start, stop = int(first[places[0]]), int(last[places[0]])
                found_at = [at for at in range(start, stop) if int(weights[at]) in chosen]
                for turn, place in enumerate(places if found_at else ()):
                    at = found_at[turn % len(found_at)]  # the order decides among equal rows
                    pairs[int(weights[at])].append((place, int(rows[at])))
        return {weight: (np.array(each)[:, 0], np.array(each)[:, 1]) for weight, each in pairs.items()}


class Joining:
    """The matches of the weights of two runs."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.sides: dict[SideName, Side] = {"a": a, "b": b}
        self.matches: list[Match] = []
        self.terms: dict[int, Term] = {}  # by the number of the match
        self._add_equal("rows", fingerprints)
        if self._is_left():
            self._add_parts()
            self._add_equal("permuted", lambda rows: fingerprints(rows, ordered=False))
            self._add_sums()
            self._add_close()
        for packed, other in ((a, b), (b, a)):
            self._add_packed(packed, other)
        if self._is_left():
            self._add_rest()
            self._add_in_place()

    def group(self, name: SideName, match: Match) -> int | None:
        """The only group of a side's weight that a match is about; None if these are all, or several."""
        number, rows = (match.a, match.rows_a) if name == "a" else (match.b, match.rows_b)
        groups, size, _ = self.sides[name].weights[number].shape
        found = np.unique(rows // size)
        return int(found[0]) if groups > 1 and len(found) == 1 else None

    def both(
        self, number: int, w_a: torch.Tensor | None = None, w_b: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a match in both runs, `float64[rows, k]` each, in A's order, with what is added to them.

        The weights are `w_a` and `w_b`, `[g, n, k]`, or those of the first calls.
        """
        match, term = self.matches[number], self.terms.get(number)
        found = []
        of_sides = (match.a, match.rows_a, match.part_a, w_a), (match.b, match.rows_b, match.part_b, w_b)
        for (name, side), (weight, rows, part, w) in zip(self.sides.items(), of_sides, strict=True):
            whole = side.rows(weight) if w is None else w.reshape(-1, w.size(-1))
            each = whole[rows, slice(*part)].double()
            if term is not None and term.side == name:
                low = side.rows(term.second).double() @ side.rows(term.first).double()
                each = each + term.factor * low[rows]
            found.append(each)
        one, other = found
        return one, other if match.order is None else other[:, match.order]

    def _is_left(self) -> bool:
        return all(any(weight.left.any() for weight in side.weights) for side in (self.a, self.b))

    def _add(self, match: Match) -> None:
        self.matches.append(match)
        self.a.weights[match.a].left[match.rows_a] = False
        self.b.weights[match.b].left[match.rows_b] = False

    def _add_equal(self, by: By, fingerprint: Callable[[torch.Tensor], Array]) -> None:
        table = _FingerprintTable(self.b, fingerprint)
        found = []
        for a, weight in enumerate(self.a.weights):
            k = weight.shape[2]
            left = np.flatnonzero(weight.left)
            if k not in table.lengths or not len(left) or (by == "permuted" and k < _SHORTEST):
                continue
            rows = self.a.rows(a)
            for b, (places, rows_b) in table.find(fingerprint(rows)[left], k, a).items():
                few = not weight.sure or len(places) * k < _SHORTEST
                if few and len(places) <= _SAME * len(left):
                    continue
                match = Match(a, b, left[places], rows_b, by, (0, k), (0, k))
                if by == "permuted":
                    order = _order(rows[left[places]], self.b.rows(b)[rows_b])
                    if order is None:
                        continue
                    match = replace(match, order=order)
                found.append(match)
        for match in found:  # only now: weights with equal rows share their counterparts
            self._add(match)

    def _add_parts(self) -> None:
        """Find weights whose rows are cut, as those of a layer that several processes share."""
        for whole, parts, swapped in ((self.a, self.b, False), (self.b, self.a, True)):
            table = _FingerprintTable(parts, fingerprints)
            found: list[Match] = []
            for number, weight in enumerate(whole.weights):
                k = weight.shape[2]
                left = np.flatnonzero(weight.left)
                lengths = [length for length in table.lengths if length < k and not k % length]
                if not lengths or not len(left):
                    continue
                rows = whole.rows(number)[left]
                for length in lengths:
                    for start in range(0, k, length):
                        piece = rows[:, start : start + length]
                        cut = (start, start + length)
                        for other, (places, others) in table.find(fingerprints(piece), length, number).items():
                            if len(places) * length < _SHORTEST:
                                continue
                            found.append(_part(number, left[places], cut, other, others, swapped))
                            close = _close_rest(piece, places, parts.rows(other), others)
                            if close is not None:
                                found.append(_part(number, left[close[0]], cut, other, close[1], swapped))
            for match in found:
                self._add(match)

    def _add_sums(self) -> None:
        """Find weights that are those of the other run but for a low-rank product, however large that is."""
        for (name, side), other in zip(self.sides.items(), (self.b, self.a), strict=True):
            sampled: dict[int, torch.Tensor] = {}
            for number, weight in enumerate(side.weights):
                pairs = _low_rank(side, number) if weight.left.all() else []
                if not pairs:
                    continue
                _, n, k = weight.shape
                own, rows = side.rows(number), np.arange(n)
                some = rows[:: max(1, n // _SAMPLED)]
                for candidate, each in enumerate(other.weights):
                    if each.shape != weight.shape or not each.left.all():
                        continue
                    if candidate not in sampled:
                        sampled[candidate] = other.rows(candidate)[some]
                    if _product(side, pairs, sampled[candidate].double() - own[some].double(), some) is None:
                        continue
                    product = _product(side, pairs, other.rows(candidate).double() - own.double(), rows)
                    if product is not None:
                        self.terms[len(self.matches)] = Term(name, *product)
                        a, b = (number, candidate) if name == "a" else (candidate, number)
                        self._add(Match(a, b, rows, rows, "values", (0, k), (0, k)))
                        break

    def _factors(self, side: str) -> set[int]:
        """Return the weights of low-rank terms, which have no counterpart."""
        return {each for term in self.terms.values() if term.side == side for each in (term.first, term.second)}

    def _add_close(self) -> None:
        """Find rows that rounding, quantising or training has changed."""
        sketched = {}
        for b, weight in enumerate(self.b.weights):
            if weight.left.any() and weight.sure and b not in self._factors("b"):
                sketched[b] = sketches(self.b.rows(b)[torch.from_numpy(weight.left)])
        known: dict[int, set[int]] = defaultdict(set)
        for match in self.matches:
            known[match.a].add(match.b)
        found = []
        for a, weight in enumerate(self.a.weights):
            left = np.flatnonzero(weight.left)
            k = weight.shape[2]
            others = [b for b in sketched if self.b.weights[b].shape[2] == k]
            if not len(left) or not others or not weight.sure or a in self._factors("a"):
                continue
            mine = sketches(self.a.rows(a)[torch.from_numpy(left)])
            candidates = known[a].intersection(others) or self._resembling(mine, {b: sketched[b] for b in others})
            for b in sorted(candidates):
                if (close := self._close(a, b, left, mine, sketched[b])) is not None:
                    found.append(close)
        taken: dict[int, set[int]] = defaultdict(set)
        for match in sorted(found, key=lambda each: -len(each.rows_a)):
            free = np.array([row not in taken[match.b] for row in match.rows_b.tolist()], bool)
            mine_left = self.a.weights[match.a].left[match.rows_a] & free
            if mine_left.any():
                self._add(replace(match, rows_a=match.rows_a[mine_left], rows_b=match.rows_b[mine_left]))
                taken[match.b].update(match.rows_b[mine_left].tolist())

    def _resembling(self, mine: torch.Tensor, others: dict[int, torch.Tensor]) -> set[int]:
        """Find the weights of B whose rows are most similar to some of these."""
        some = mine[torch.linspace(0, len(mine) - 1, min(_SAMPLED, len(mine))).long()]
        best = torch.stack([(some @ sketch.T).amax(1) for sketch in others.values()])
        value, which = best.max(0)
        names = list(others)
        return {names[i] for i, cosine in zip(which.tolist(), value.tolist(), strict=True) if cosine > _ALIKE}

    def _close(self, a: int, b: int, left: Array, mine: torch.Tensor, theirs: torch.Tensor) -> Match | None:
        """The rows that are alike: those of the same numbers, or if these are more, the most similar ones."""
        rows, own, k = np.flatnonzero(self.b.weights[b].left), self.a.rows(a), self.a.weights[a].shape[2]

        def alike_in(rows_a: Array, rows_b: Array) -> Match:
            one, other = own[rows_a].double(), self.b.rows(b)[rows_b].double()
            same = torch.cosine_similarity(one, other, dim=1).numpy() > _SAME
            return Match(a, b, rows_a[same], rows_b[same], "values", (0, k), (0, k))

        both = np.intersect1d(left, rows)
        most = alike_in(both, both)
        if len(most.rows_a) < len(left) and len(mine) * len(theirs) <= 4 * _MOST:
            best, mutual = _mutual(mine @ theirs.T)
            found = alike_in(left[mutual.numpy()], rows[best[mutual].numpy()])
            most = max(most, found, key=lambda match: len(match.rows_a))
        return most if len(most.rows_a) else None

    def _add_rest(self) -> None:
        """Pair the rows that weights with most of their rows in common do not have in common, with the nearest."""
        for match in sorted(self.matches, key=lambda each: -len(each.rows_a)):
            weight = self.a.weights[match.a]
            whole = match.part_a == (0, weight.shape[2]) == match.part_b
            if whole and weight.left.any() and 2 * weight.left.sum() < len(weight.left):
                self._add_nearest(match)

    def _add_in_place(self) -> None:
        """Pair a weight without a counterpart with the only one of its size that stands in its place."""
        for a, weight in enumerate(self.a.weights):
            left, k = int(weight.left.sum()), weight.shape[2]
            if not left or not weight.sure or a in self._factors("a"):
                continue
            known = [(self.a.first(each.a), self.b.first(each.b)) for each in self.matches]
            before = max((pair for pair in known if pair[0] < self.a.first(a)), default=(0, 0))[1]
            after = min((pair for pair in known if pair[0] > self.a.first(a)), default=(0, len(self.b.calls)))[1]
            found = []
            for b, other in enumerate(self.b.weights):
                rest = int(other.left.sum())
                whole = [len(each.left) for each in (weight, other) if each.left.all()]
                fits = rest == left if len(whole) == 2 else whole == [min(left, rest)]
                if fits and other.shape[2] == k and other.sure and before <= self.b.first(b) <= after:
                    found += [b] if b not in self._factors("b") else []
            if len(found) == 1:
                nothing, order = np.empty(0, np.int64), self._reordered(a, found[0])
                self._add_nearest(Match(a, found[0], nothing, nothing, "neighbours", (0, k), (0, k), order))

    def _reordered(self, a: int, b: int) -> Array | None:
        """For each element of A's rows, that of B's, if what is multiplied by them has its columns in another order."""
        sides = (self.a, a), (self.b, b)
        x, y = (tensor_of(side.run, side.calls[side.first(weight)], "lhs").double() for side, weight in sides)
        columns = [each.reshape(-1, each.size(-1)).mT for each in (x, y)]
        if columns[0].shape != columns[1].shape or columns[0].size(1) < _TOKENS or alike(*columns) == len(columns[0]):
            return None
        if len(columns[0]) ** 2 > _MOST:
            return None
        cost = distances(*columns)
        own, others = nearest(cost)
        return others if len(own) == len(cost) and bool((cost[own, others] < _SAME_COLUMN).all()) else None

    def _add_nearest(self, like: Match) -> None:
        left_a, left_b = (
            np.flatnonzero(side.weights[each].left) for side, each in ((self.a, like.a), (self.b, like.b))
        )
        if not 0 < len(left_a) * len(left_b) <= _MOST:
            return
        one, other = self.a.rows(like.a)[left_a].double(), self.b.rows(like.b)[left_b].double()
        ia, ib = nearest(distances(one, other if like.order is None else other[:, like.order]))
        if not len(ia):
            return
        by: By = "neighbours" if like.by == "neighbours" else "values"
        self._add(replace(like, rows_a=left_a[ia], rows_b=left_b[ib], by=by))

    def _add_packed(self, side: Side, other: Side) -> None:
        """Join products whose weight was not recorded, as quantised ones, with the weight that gives their outputs."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for number, call in enumerate(side.calls):
            if call.record.op.startswith("quantized::linear") and call.record.rhs is None:
                groups[call.rank, call.record.module].append(number)
        for (rank, _), numbers in groups.items():
            x, out = (tensor_of(side.run, side.calls[numbers[0]], role) for role in ("lhs", "output"))
            x, out = (each.reshape(-1, each.size(-1)).double() for each in (x, out))
            errors = {}
            for candidate, weight in enumerate(other.weights):
                if weight.left.all() and weight.shape == (1, out.size(1), x.size(1)):
                    like = other.factors(other.first(candidate))
                    exact = x @ like.w[0].double().mT + (0.0 if like.bias is None else like.bias[0].double())
                    errors[candidate] = float((exact - out).norm() / out.norm().clamp_min(1e-300))
            best = min(errors, key=errors.__getitem__, default=None)
            if best is None or errors[best] > _LIKELY:
                continue
            own = len(side.weights)
            side.weights.append(
                replace(other.weights[best], calls={rank: numbers}, left=other.weights[best].left.copy())
            )
            side.stand_ins[own] = other, best
            for number in numbers:
                side.weight[number] = own
            rows, k = np.arange(out.size(1)), x.size(1)
            a, b = (own, best) if side is self.a else (best, own)
            self._add(Match(a, b, rows, rows, "values", (0, k), (0, k)))


def _low_rank(side: Side, weight: int) -> list[tuple[int, int]]:
    """The pairs of weights near the first call of another whose product has its shape and a lower rank."""
    _, n, k = side.weights[weight].shape
    place, rank = side.first(weight), side.calls[side.first(weight)].rank
    near = {
        side.weight[call]
        for call in range(max(0, place - _NEAR), min(len(side.calls), place + _NEAR + 1))
        if side.weight[call] >= 0 and side.calls[call].rank == rank
    }
    free = sorted(each for each in near if side.weights[each].left.all())
    found = []
    for first in free:
        g, r, first_k = side.weights[first].shape
        if (g, first_k) == (1, k) and r < min(n, k):
            found += [(first, second) for second in free if side.weights[second].shape == (1, n, r)]
    return found


def _product(
    side: Side, pairs: list[tuple[int, int]], missing: torch.Tensor, rows: Array
) -> tuple[int, int, float] | None:
    """Find the pair of weights whose scaled product is the difference of two others in these rows."""
    for first, second in pairs:
        low = side.rows(second)[rows].double() @ side.rows(first).double()
        square = float(low.square().sum())
        factor = float((low * missing).sum()) / square if square else 0.0
        short, own = float(f"{factor:.2g}"), float((missing - factor * low).norm())
        if float((missing - short * low).norm()) < 1.01 * own:  # as factors are, which quantised rows blur
            factor = short
        if factor and own < _REST * float(missing.norm()):
            return first, second, factor
    return None


def _part(whole: int, rows: Array, cut: tuple[int, int], part: int, others: Array, swapped: bool) -> Match:
    own = (0, cut[1] - cut[0])
    if swapped:
        return Match(part, whole, others, rows, "parts", own, cut)
    return Match(whole, part, rows, others, "parts", cut, own)


def _close_rest(
    rows: torch.Tensor, known: Array, others: torch.Tensor, known_others: Array
) -> tuple[Array, Array] | None:
    """Pair the rows that two weights do not have in common by their distance."""
    left = np.setdiff1d(np.arange(len(rows)), known)
    left_others = np.setdiff1d(np.arange(len(others)), known_others)
    if not 0 < len(left) * len(left_others) <= _MOST:
        return None
    one, other = rows[left].double(), others[left_others].double()
    ia, ib = nearest(distances(one, other))
    same = torch.cosine_similarity(one[ia], other[ib], dim=1).numpy() > _SAME
    return (left[ia[same]], left_others[ib[same]]) if same.any() else None


def _mutual(cosines: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each row the most similar column, and whether that is mutual."""
    best, back = cosines.argmax(1), cosines.argmax(0)
    return best, back[best] == torch.arange(len(cosines))


def _order(a: torch.Tensor, b: torch.Tensor) -> Array | None:
    """For each element of A's rows, that of B's rows; None if the rows do not differ by one permutation."""
    one, other = fingerprints(a.mT.contiguous()), fingerprints(b.mT.contiguous())
    order_a, order_b = np.argsort(one, kind="stable"), np.argsort(other, kind="stable")
    if not np.array_equal(one[order_a], other[order_b]):
        return None
    order = np.empty(len(one), np.int64)
    order[order_a] = order_b
    return order
