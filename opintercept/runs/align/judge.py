"""Compares joined calls of two runs: weights, inputs, outputs, each beside what rounding may do to it.

Invariant: the comparison is in float64, so that a difference comes from the runs. A call is wrong only beside its own
operands. Needs numpy. Imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._core.tensors import TensorMeta
from opintercept._values import rounding
from opintercept.runs.align import attention
from opintercept.runs.align.alignment import CAUSES, Aligned
from opintercept.runs.align.causes import causes
from opintercept.runs.align.common_calls import JoinedCalls, shared_dim
from opintercept.runs.align.common_weights import Joining, Side, SideName
from opintercept.runs.align.replay import LIMIT, ProgramReplay, Target, region_of
from opintercept.runs.align.tokens import MANY, row_error, row_errors, usual_error
from opintercept.runs.align.weights import Factors, gaps_of, grid_of, tensor_of
from opintercept.runs.compare.pairing import operator_name
from opintercept.runs.explain.budget import Spill
from opintercept.runs.explain.program import Program, Step
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import Array

_KEPT = 4  # calls whose tensors stay in memory, since several calls of the other run may belong to one
_SCALE = 0.01  # the error of the scale of a block, which may be quantised itself
_UNLIKE = 0.5  # the error of rows of which nobody knows which of the other run they are
_NAMED = 16  # changed rows that are named
_ROUNDINGS = 10.0  # how many roundings of their dtype the operators between two products may take
_GROWTH = 2.0  # and how many times they may enlarge the usual error: by 1.5 in most clean pairs
_WORST_GROWTH = 3.0  # and that of the worst row: by 2.7 there
_ALONE = 3.0  # and how far above most columns one is whose error is its own
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_int_mm", "linear_dynamic"))
_FROM_BEFORE = ("lhs", "q", "k", "v")  # what a pair before may explain
_NEAR = 16  # calls between an attention and products of the same tokens
_ROLES = {"q": "lhs", "k": "rhs", "v": "value"}
_TINY = torch.finfo(torch.float64).tiny
Dtypes = tuple[torch.dtype, torch.dtype]


def compared(joining: Joining, links: JoinedCalls) -> tuple[list[Aligned], list[str]]:
    """Compare what is joined, in the order of A; by a replay of its program if the run has it.

    Returns:
        The pairs, and the operators of the program that may not run again.
    """
    with Spill() as spill:
        comparing = _Comparing(joining, links)
        comparing.replay(spill)
        return list(comparing.pairs()), comparing.refused


@dataclass(frozen=True, slots=True)
class _RowErrors:
    """How the rows of a match differ."""

    dtype: torch.dtype  # the coarser one that has all values
    scale: torch.Tensor | None  # of each row of B, where one run's weight is whole numbers, scaled afterwards
    error: torch.Tensor  # of each row, relative to A's
    changed: torch.Tensor  # whether it is more than rounding
    step: torch.Tensor  # the step of quantised rows, in units of A's rows; 0 if they are not

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, dtypes: Dtypes, low: torch.Tensor | float, coded: bool) -> _RowErrors:
        """Compare rows, `float64[n, k]` each, of which `low` is the part that was added to one side.

        They are compared up to a factor if one side's are `coded`: whole numbers, which the program scales afterwards.

        An element may be off by a rounding in its dtype, or by half a step of a quantised row; and the errors of a row
        must not all go the same way: their sum is within `SIGMA` standard deviations of independent errors.
        """
        dtypes = _held_in(a, dtypes[0]), _held_in(b, dtypes[1])
        square = (a * a).sum(1).clamp_min(_TINY)
        scale = (a * b).sum(1) / square if coded else None
        if scale is not None:
            b = b / scale.where(scale != 0, 1)[:, None]
        difference, size = b - a, a.abs()
        usual = (square / a.size(1)).sqrt()[:, None]
        fine, coarse = sorted(_eps(dtype) for dtype in dtypes)
        allowed = 2 * (coarse if fine == coarse else fine) * torch.maximum(size + low, usual)
        if fine != coarse or isinstance(low, torch.Tensor):
            allowed = allowed + coarse * 0.505 * size + _smallest(dtypes)
        step = torch.zeros(len(a), dtype=torch.float64)
        wrong = (difference.abs() > allowed).any(1) & ((difference != 0).double().mean(1) > 0.5)
        if wrong.any():  # quantising moves most elements, and puts one side's on a grid
            one, other = (grid_of(each[wrong]) for each in (a, b))
            grid = torch.maximum(one, other).where(((one == 0) | (other == 0)).all(1, keepdim=True), 0.0)
            step[wrong] = grid.amax(1)
            allowed[wrong] += (0.51 if scale is None else 0.75) * grid  # the factor is estimated
            if scale is None and bool((left := wrong & (step == 0)).any()):
                one, other = (gaps_of(each[left]) for each in (a, b))
                gaps = torch.maximum(one, other).where((one == 0) | (other == 0), 0.0)
                step[left] = gaps.amax(1)
                allowed[left] += torch.where(gaps > 0, 0.51 * gaps + _SCALE * size[left], 0.0)
        together = (difference * a).sum(1).abs()
        drawn = rounding.SIGMA / math.sqrt(3) * (allowed * a).square().sum(1).sqrt()
        changed = (difference.abs() > allowed).any(1) | ((together > drawn) & (step == 0))
        return cls(max(dtypes, key=_eps), scale, difference.norm(dim=1) / square.sqrt(), changed, step)


def _held_in(rows: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The coarsest dtype that has all values, as of a router whose weight a bfloat16 model widens; else their own."""
    for each in (torch.bfloat16, torch.float16):
        if 0 < _eps(dtype) < torch.finfo(each).eps and bool((rows.to(each).double() == rows).all()):
            return each
    return dtype


@dataclass(slots=True)
class _OutputSum:
    """The outputs of calls of A that add up to that of a call of B, `[m, n]`, and how much of each row is there."""

    total: torch.Tensor
    filled: torch.Tensor


class _Comparing:
    def __init__(self, joining: Joining, links: JoinedCalls) -> None:
        self._joining, self._links = joining, links
        self._a, self._b = joining.a, joining.b
        self._rows: dict[tuple[int, str | None, str | None], _RowErrors] = {}
        self._sums: dict[int, _OutputSum] = {}
        self._roundings: dict[tuple[SideName, int], float | None] = {}  # of calls that several pairs may share
        self._known: dict[int, Aligned] = {}  # pairs of products that the replay has compared
        self._means: dict[int, tuple[float, float]] = {}  # the usual errors of a product's input and output
        self._inputs: dict[int, float] = {}  # the error of a product's input, without columns that are off by chance
        self._replay: ProgramReplay | None = None
        self.refused: list[str] = []

        @lru_cache(_KEPT)
        def read(name: SideName, number: int) -> Factors:
            return joining.sides[name].factors(number)

        @lru_cache(_KEPT)
        def read_heads(name: SideName, number: int, count: int) -> attention.Heads:
            side = joining.sides[name]
            scores, call = side.attentions[number], side.calls[number]
            if scores is None:
                return attention.fused(side.run, call)
            return attention.by_products(side.run, side.calls[scores], call, count)

        self._factors, self._heads = read, read_heads

    def replay(self, spill: Spill) -> None:
        """Compare the products that have weights by a replay of A's program, if the run has its operators."""
        program = _program(self._a)
        if program is None:
            return
        self.refused = program.refused()
        products = {number: links for number, links in self._links.of_a.items() if any(m is not None for _, m in links)}
        dtypes = Counter(self._dtypes(number, "output") for number in products)
        usual = dtypes.most_common(1)[0][0] if dtypes else ()
        self._replay = ProgramReplay(program, spill, max((torch.float32, *usual), key=rounding.unit))
        try:
            for number in sorted(products):
                self._known[number] = self._pair(number, 0.0)
            self._replay.accuse()
        except RuntimeError as error:
            if "allocate memory" not in str(error):
                raise
            self._replay, self._known = None, {}  # then without a replay

    def pairs(self) -> Iterable[Aligned]:
        """Compare what is joined, in the order of A."""
        noise, mean, coarse, caused, blamed = 0.0, 0.0, 0.0, False, set[int]()
        scores = {*self._a.attentions.values()}
        dtypes = {number: self._dtypes(number, "lhs") for number in self._links.of_a}
        usual = max(map(_eps, Counter(dtypes.values()).most_common(1)[0][0])) if dtypes else 0.0
        for number in sorted(self._links.of_a):
            eps = max(map(_eps, dtypes[number]))
            allowed = coarse + _ROUNDINGS / 2 * max(eps, usual)  # others may have rounded its operands
            pair = self._known.get(number) or self._pair(number, _WORST_GROWTH * noise + allowed)
            own_error = 0.0 if pair.changed else pair.weight or 0.0  # what its input comes from may be rounded so, too
            limit = _WORST_GROWTH * max(noise, own_error) + allowed
            least = _WORST_GROWTH * noise + _ROUNDINGS / 2 * usual
            if len({*dtypes[number]}) == 2 and eps > usual and (pair.output or 0.0) > least:
                one, other = (str(dtype).removeprefix("torch.") for dtype in dtypes[number])
                pair = replace(pair, changed=("dtype",), arguments=(("dtype", one, other),))
            target, own = self._accuser(number, caused)
            own = own and id(target) not in blamed
            error = min(pair.weight or 0.0, math.inf if pair.output is None else pair.output)
            if not self._is_weight(number) and (caused or own is False or error <= limit):
                kept = tuple(name for name in pair.changed if name != "rhs")
                pair = replace(pair, changed=kept, changed_rows=(), nearest=())
            means = self._means.get(number, (0.0, 0.0))
            far = means[0] > math.hypot(_GROWTH * max(mean, own_error), allowed)  # independent errors add up so
            off = far or not self._inputs.get(number, pair.lhs or 0.0) <= limit  # NaN is off
            pair = _judged(pair, limit, caused, own, off=off, product=self._target(number) is not None)
            if pair.kind in CAUSES and target is not None:
                blamed.add(id(target))
            if pair.kind in CAUSES and target is not None and not {"rhs", "bias", "dtype"} & {*pair.changed}:
                pair = self._between(pair, target)
            elif pair.kind in CAUSES and {"lhs", "q", "k", "v", "heads"} & {*pair.changed}:
                pair = self._placed(pair, number)
            known = number not in scores and (pair.by != "neighbours" or pair.rounding_a is not None)
            if known and not caused and pair.kind not in CAUSES:
                noise, coarse = max(noise, pair.output or 0.0, pair.lhs or 0.0), max(coarse, pair.weight or 0.0)
                mean = max(mean, *means)
            caused = caused or pair.kind in CAUSES
            yield pair

    def _dtypes(self, number: int, role: str) -> Dtypes:
        """The dtypes of an operand or output in A, and in the first call of B."""
        return _dtype_of(self._a.calls[number], role), _dtype_of(self._b.calls[self._links.of_a[number][0][0]], role)

    def _accuser(self, number: int, caused: bool) -> tuple[Target | None, bool | None]:
        """The product whose operand accuses this call, and whether the call may be a cause; None if nobody knows."""
        target, step = self._target(number), self._step(number)
        if target is not None:
            return (target, target.independent) if target.ratio > LIMIT else (None, False)
        if self._replay is None or step is None or number in self._known:
            return None, None
        target = next((each for each in self._replay.targets.values() if step.number in each.suspects), None)
        if target is not None:  # what was recorded tells its operands apart until something differs
            return target, target.independent and not caused
        return None, False if step.number in self._replay.acquitted else None

    def _step(self, number: int) -> Step | None:
        """The call of A's program, if there is one that can be computed."""
        return None if self._replay is None else self._replay.step_of(self._a.calls[number].record.index)

    def _target(self, number: int) -> Target | None:
        """What the replay has compared of a product."""
        step = self._step(number)
        return None if self._replay is None or step is None else self._replay.targets.get(step.number)

    def _between(self, pair: Aligned, target: Target) -> Aligned:
        """The pair with the products before it, and what A computes between them and this one."""
        assert self._replay is not None
        steps = self._replay.program.steps
        suspects, step = target.suspects, self._replay.step_of(pair.a.record.index)
        if step is not None and step.number in suspects and "attention" in step.stored.record.op:
            names = _ROLES if "heads" in pair.changed else pair.changed
            regions = [region_of(step, _ROLES[name]) for name in names if name in _ROLES]
            before = self._replay.part(step, [region for region in regions if region is not None])
            suspects = suspects & (before or {step.number})
        calls = [steps[each].stored.record for each in sorted(suspects)]
        roots = [steps[each].stored.record for each in self._replay.roots(suspects, None if suspects else target)]
        words, tried, complete = causes(self._replay, replace(target, suspects=suspects))
        return replace(
            pair,
            after=", ".join(dict.fromkeys(map(_place, roots))) or None,
            between=(*dict.fromkeys(operator_name(call.op) for call in calls),),
            lines=(*dict.fromkeys(call.source for call in calls if call.source),),
            causes=words,
            tried=tried,
            complete=complete,
        )

    def _placed(self, pair: Aligned, number: int) -> Aligned:
        """The pair with the name of the matmul before, the first with the same input, and what lies between."""
        before = number - 1 if self._a.attentions.get(number) is None else number - 2
        if before < 0 or self._a.calls[before].rank != pair.a.rank:
            return pair
        while before and _same_input(self._a.calls[before - 1], self._a.calls[before]):
            before -= 1
        call = self._a.calls[before]
        operators = self._a.operators[pair.a.rank]
        between = [operator_name(op) for index, op in operators if call.record.index < index < pair.a.record.index]
        return replace(pair, after=_place(call.record), between=(*dict.fromkeys(between),))

    def _pair(self, number: int, limit: float) -> Aligned:
        links = self._links.of_a[number]
        call, others = self._a.calls[number], tuple(self._b.calls[b] for b in dict.fromkeys(b for b, _ in links))
        matched = [(b, match) for b, match in links if match is not None]
        pair = Aligned(call, others, "neighbours", 0, 0, "not compared")
        if not matched:
            term = self._links.terms.get(number)
            if term is not None:
                return replace(pair, by="sum", reason=term)
            if number in self._a.attentions or number in self._a.attentions.values():
                return self._attention(pair, number, limit)
            return self._operands(self._neighbours(pair, links[0][0]), number, links[0][0], limit)
        matches = [self._joining.matches[match] for _, match in matched]
        most = max(matched, key=lambda link: len(self._joining.matches[link[1]].rows_a))
        pair = replace(
            pair,
            by=self._joining.by(most[1]),
            rows=len(np.unique(np.concatenate([match.rows_a for match in matches]))),
            of=len(self._a.weights[self._a.weight[number]].left),
            rounding_a=self._rounding("a", number),
            rounding_b=max((each for b, _ in matched if (each := self._rounding("b", b)) is not None), default=None),
        )
        pair = self._weight_error(pair, number, matched)
        try:
            return self._compare(pair, number, matched)
        except OpInterceptError as reason:
            return replace(pair, reason=str(reason))

    def _is_weight(self, number: int) -> bool:
        """Whether the right operand of a call may be a parameter; what a program computes is also joined by rows."""
        weight = self._a.weight[number]
        if weight < 0 or not self._a.weights[weight].sure:
            return False
        calls = (self._a, number), *((self._b, b) for b, _ in self._links.of_a[number])
        known = [side.parameters.get(each) for side, each in calls if True in side.parameters.values()]
        return None in known or True in known or not known

    def _attention(self, pair: Aligned, number: int, limit: float) -> Aligned:
        """Compare an attention; the product of its queries and keys only tells whether these differ."""
        turn = 0 if number in self._a.attentions else 1
        number += turn
        found, roundings = [], []
        try:
            for b in [b + turn for b, _ in self._links.of_a[number - turn]]:
                count = min(_heads_of(self._a.calls[number]), _heads_of(self._b.calls[b]))
                one, other = self._heads("a", number, count), self._heads("b", b, count)
                if one.q.shape[::2] != other.q.shape[::2] or one.v.size(2) != other.v.size(2):
                    raise OpInterceptError("the attentions have heads of other sizes")
                eps = max(_eps(_dtype_of(call, "lhs")) for call in (self._a.calls[number], self._b.calls[b]))
                found.append(attention.differing(one, other, self._queries(number, b, one, other), limit, eps))
                roundings.append([self._rounding("a", number - turn) if one.rounding is None else one.rounding])
                roundings[-1].append(self._rounding("b", b - turn) if other.rounding is None else other.rounding)
        except (OpInterceptError, KeyError):
            return self._neighbours(pair, self._links.of_a[number - turn][0][0])
        worst = max(found, key=lambda each: (len(each.changed) > 0, each.error))
        changed = {name: None for each in found for name in each.changed}
        rounding_a, rounding_b = (
            max((each for each in side if each is not None), default=None) for side in zip(*roundings, strict=True)
        )
        pair = replace(pair, rounding_a=rounding_a, rounding_b=rounding_b)
        if turn:
            names = tuple(name for name in changed if name in ("q", "k", "heads"))
            return replace(self._neighbours(pair, self._links.of_a[number - 1][0][0]), changed=names)
        self._means[number] = 0.0, max(each.usual for each in found)
        return replace(
            pair,
            changed=tuple(changed),
            arguments=worst.arguments,
            lhs=worst.operand,
            output=max(each.error for each in found),
            max_absolute=max(each.largest for each in found),
        )

    def _queries(self, a: int, b: int, one: attention.Heads, other: attention.Heads) -> attention.Rows | None:
        """The queries of the same tokens, as the rows of products near by say; None if these are all in their order."""
        sizes = one.q.size(1), other.q.size(1)
        near = sorted(
            (abs(a - i) + abs(b - j), i, j)
            for i in range(a - _NEAR, a + _NEAR)
            for j in range(b - _NEAR, b + _NEAR)
            if (i, j) in self._links.rows and (self._a.rows_of(i), self._b.rows_of(j)) == sizes
        )
        if near:
            rows_a, rows_b = self._links.rows[near[0][1:]]
            return torch.from_numpy(rows_a), torch.from_numpy(rows_b)
        if sizes[0] == sizes[1]:
            return None
        raise OpInterceptError(f"the attentions have {sizes[0]} and {sizes[1]} queries")

    def _operands(self, pair: Aligned, number: int, b: int, limit: float) -> Aligned:
        """The pair with the operands of two products without a weight that differ."""
        try:
            one, other = self._factors("a", number), self._factors("b", b)
        except OpInterceptError:
            return pair
        pair = replace(pair, rounding_a=self._rounding("a", number), rounding_b=self._rounding("b", b))
        if one.x.shape != other.x.shape or one.w.shape != other.w.shape or len(pair.b) > 1:
            return pair
        errors = row_errors(one.w.double(), other.w.double()).reshape(-1)
        rows = torch.where(errors > limit)[0].tolist()[:_NAMED]
        return replace(
            pair,
            lhs=row_error(one.x.double(), other.x.double()),
            weight=float(errors.max()),
            changed=("rhs",) if rows else (),
            changed_rows=tuple(rows),
        )

    def _neighbours(self, pair: Aligned, number: int) -> Aligned:
        """Compare outputs in the order of their elements; those of several processes make up one."""
        parts, whole = list(pair.b), pair.a
        side, side_of_parts = self._a, self._b
        if number in self._links.shards:
            parts, whole = [self._a.calls[each] for each in self._links.shards[number]], pair.b[0]
            side, side_of_parts = self._b, self._a
            if parts[-1] is not pair.a:
                return replace(pair, reason="its output is a part of one, which is compared with the last of the parts")
        try:
            calls = [(side.run, whole), *((side_of_parts.run, part) for part in parts)]
            x, *others = (tensor_of(run, call, "output").double() for run, call in calls)
        except OpInterceptError as reason:
            return replace(pair, reason=str(reason))
        dim = shared_dim(whole, parts) if len(parts) > 1 else None
        if dim is None and len(others) > 1:  # each process has computed it
            errors = [_error(x.reshape(-1), y.reshape(-1)) for y in others if y.numel() == x.numel()]
            return replace(pair, output=max(errors)) if errors else replace(pair, reason="the outputs differ in size")
        ys = [others[0]] if dim is None else list(_made_up(others, dim))
        if ys[0].numel() != x.numel():
            return replace(pair, reason=f"the outputs have {x.numel()} and {ys[0].numel()} values")
        y = min((each.reshape(-1) for each in ys), key=lambda each: _error(x.reshape(-1), each))
        return replace(pair, output=_error(x.reshape(-1), y), max_absolute=_largest(y - x.reshape(-1)))

    def _weight_error(self, pair: Aligned, number: int, matched: list[tuple[int, int]]) -> Aligned:
        """The pair with the largest error of a row of the weight, and the rows that differ by more than rounding."""
        largest: float | None = None
        changed: dict[int, tuple[int, float]] = {}
        for b, each in matched:
            match, rows = self._joining.matches[each], self._row_errors(each, number, b)
            largest = max(largest or 0.0, float(rows.error.max()))
            for place in torch.where(rows.changed)[0].tolist():
                changed[int(match.rows_a[place])] = int(match.rows_b[place]), float(rows.error[place])
        named = sorted(changed)[:_NAMED]
        return replace(
            pair,
            weight=largest,
            changed=("rhs",) if changed else (),
            changed_rows=tuple(named),
            nearest=tuple(changed[row] for row in named),
        )

    def _row_errors(self, number: int, a: int, b: int) -> _RowErrors:
        """How the rows of a match differ in two calls: training may have changed the weights since the first ones."""
        calls = self._a.calls[a], self._b.calls[b]
        hashes = [found.hash if (found := call.values.get("rhs")) is not None else None for call in calls]
        key = number, hashes[0], hashes[1]
        if key not in self._rows:
            dtypes = _dtype_of(calls[0], "rhs"), _dtype_of(calls[1], "rhs")
            whole_a, whole_b = self._factors("a", a).w, self._factors("b", b).w
            one, other = self._joining.both(number, whole_a, whole_b)
            term = self._joining.terms.get(number)
            low = one.abs().amax(1, keepdim=True) if term is not None else 0.0
            self._rows[key] = _RowErrors.of(one, other, dtypes, low, _coded(whole_a) != _coded(whole_b))
        return self._rows[key]

    def _compare(self, pair: Aligned, number: int, matched: list[tuple[int, int]]) -> Aligned:
        """Compare inputs, biases and outputs."""
        a = self._factors("a", number)
        found = [(match, b, self._factors("b", b)) for b, match in matched]
        cut = any(self._joining.matches[match].by == "parts" for match, _, _ in found)
        have = {each.bias is not None for each in (a, *(each for _, _, each in found))}
        biased = not cut and have == {True}
        if biased and self._bias_differs(a, found):
            pair = replace(pair, changed=(*pair.changed, "bias"))
        mine = a.columns(biased) + self._terms("a", number, matched[0][1])
        expected = torch.zeros_like(mine)
        filled = torch.zeros(mine.shape, dtype=torch.int64)
        low = torch.zeros_like(mine)  # of `expected`, what A computes in other products
        scales = torch.zeros_like(mine[:, :1]), torch.zeros_like(mine[:1])  # how far those that are estimated are off
        step = self._step(number)
        copies = None if self._replay is None or step is None else self._replay.operand(step)
        errors: list[float] = []
        lhs, own, inputs = 0.0, 0.0, list[torch.Tensor]()
        for match_number, b, factors in found:
            match = self._joining.matches[match_number]
            weight = self._row_errors(match_number, number, b)
            group_a, group_b = self._joining.group("a", match), self._joining.group("b", match)
            factors, rows_b = factors.only(group_b), match.rows_b - (group_b or 0) * factors.w.size(1)
            theirs = factors.columns(biased) + self._terms("b", b, match_number)
            ra, rb = self._tokens(number, b, len(mine), len(theirs))
            x, y = _elements(a.only(group_a), match.part_a, None), _elements(factors, match.part_b, match.order)
            by_row = len(x) == len(mine) and len(y) == len(theirs)
            if by_row:
                x, y = x[ra], y[rb]
            if x.shape != y.shape:
                raise OpInterceptError(f"the inputs have the shapes {list(x.shape)} and {list(y.shape)}")
            if match.part_b != (0, factors.w.size(2)):
                return self._add_part(replace(pair, lhs=row_error(x, y)), b, match_number, mine, theirs)
            theirs = theirs[rb][:, rows_b]
            if weight.scale is not None:
                theirs = theirs / weight.scale
                scales[1][0, match.rows_a] = weight.error / math.sqrt(a.w.size(2))
            take = partial(_taken, rows=ra + (group_a or 0) * len(mine), k=a.w.size(2), part=slice(*match.part_a))
            if not by_row:
                copies = None  # the match is about several groups, which have rows of their own
            factor = None
            if a.x.is_floating_point() != factors.x.is_floating_point():  # the program scales whole numbers afterwards
                like = x if copies is None else take(copies[0])
                factor = (like * y).sum(1, keepdim=True) / (like * like).sum(1, keepdim=True).clamp_min(_TINY)
                factor = factor.where(factor != 0, 1)
                y, theirs = y / factor, theirs / factor
                scales[0][ra, 0] = row_errors(like, y) / math.sqrt(a.w.size(2))
            if self._replay is not None and step is not None and copies is not None:
                rounded = bool(weight.error.any()) and weight.dtype.is_floating_point
                dtype = max(factors.x.dtype, weight.dtype, key=_eps) if rounded else factors.x.dtype
                self._replay.compare(step, copies, take, y, dtype, factor)
            lhs, own = map(max, (lhs, own), _input_errors(x, y))
            inputs.append(row_errors(x, y))
            places = ra[:, None], torch.from_numpy(match.rows_a)
            if bool((filled[places] == a.w.size(2)).all()):  # another process has computed the same
                errors.append(row_error(mine[places], theirs))
                continue
            expected[places] += theirs
            filled[places] += match.part_a[1] - match.part_a[0]
            term = self._joining.terms.get(match_number)
            if term is not None and term.side == "a":
                first, second = (self._a.rows(each).double() for each in (term.first, term.second))
                low[places] += term.factor * (y @ first.mT @ second.mT)[:, match.rows_a]
        whole = filled == a.w.size(2)
        target = self._target(number)
        unsure = sum(far > _UNLIKE for _, far in pair.nearest) > 1 or (target and target.coded and target.ratio > LIMIT)
        if self._replay is not None and step is not None and unsure:
            self._replay.distrust(step)
        elif self._replay is not None and step is not None and self._is_weight(number):
            bias = a.biases() if a.bias is not None and not biased else 0.0
            output, known, columns = (_as_output(each, a) for each in (expected - low + bias, whole, scales[1]))
            self._replay.put(step, output, known, (scales[0], columns))
        pair = _with_output(replace(pair, lhs=lhs), mine, expected, whole)
        outputs = row_errors(mine.where(whole, 0), expected.where(whole, 0))
        self._means[number] = usual_error(torch.cat(inputs)), usual_error(outputs)
        self._inputs[number] = own
        return replace(pair, output=max(pair.output, *errors)) if errors and pair.output is not None else pair

    def _tokens(self, a: int, b: int, rows_a: int, rows_b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of two calls that are of the same token."""
        if (a, b) in self._links.rows:
            one, other = self._links.rows[a, b]
            return torch.from_numpy(one), torch.from_numpy(other)
        if rows_a != rows_b:
            raise OpInterceptError(f"the outputs have {rows_a} and {rows_b} rows")
        return torch.arange(rows_a), torch.arange(rows_b)

    def _add_part(self, pair: Aligned, b: int, match: int, mine: torch.Tensor, theirs: torch.Tensor) -> Aligned:
        """Add the output of a call to those that add up to B's, and compare the sum when it is whole."""
        each = self._joining.matches[match]
        sum_ = self._sums.get(b)
        if sum_ is None:
            sum_ = self._sums[b] = _OutputSum(torch.zeros_like(theirs), torch.zeros(theirs.shape, dtype=torch.int64))
        if len(mine) != len(theirs):
            return replace(pair, reason="its output is a part of a sum with another number of rows")
        columns = torch.from_numpy(each.rows_b)
        sum_.total[:, columns] += mine[:, each.rows_a]
        sum_.filled[:, columns] += each.part_b[1] - each.part_b[0]
        k = self._b.weights[each.b].shape[2]
        if not bool((sum_.filled[:, columns] == k).all()):
            return replace(pair, reason="its output is a part of a sum, which is compared with the last of the parts")
        return _with_output(pair, sum_.total, theirs, sum_.filled == k)

    def _terms(self, name: SideName, number: int, match: int) -> torch.Tensor | float:
        """Compute what low-rank terms add to the output of a call."""
        term = self._joining.terms.get(match)
        if term is None or term.side != name:
            return 0.0
        side = self._joining.sides[name]
        base = side.weights[side.weight[number]].calls[side.calls[number].rank]
        last = side.weights[term.second].calls[side.calls[number].rank]
        if len(base) != len(last):
            raise OpInterceptError("the low-rank product is not computed in each call")
        return term.factor * self._factors(name, last[base.index(number)]).columns(True)

    def _bias_differs(self, a: Factors, found: list[tuple[int, int, Factors]]) -> bool:
        for match_number, _, factors in found:
            match = self._joining.matches[match_number]
            x, y = a.biases()[:, match.rows_a], factors.biases()[:, match.rows_b]
            if len(x) == len(y):
                eps = max(_eps(each.bias.dtype) for each in (a, factors) if each.bias is not None)
                if bool(((y - x).abs() > eps * torch.maximum(x.abs(), x.square().mean().sqrt())).any()):
                    return True
        return False

    def _rounding(self, name: SideName, number: int) -> float | None:
        """How far a call is from the float64 product of its operands; None if it is no product of two matrices."""
        if (name, number) not in self._roundings:
            call = self._joining.sides[name].calls[number]
            found = None
            if operator_name(call.record.op).partition(".")[0] in _PRODUCTS:
                with suppress(OpInterceptError):
                    found = _rounding(self._factors(name, number), call)
            self._roundings[name, number] = found
        return self._roundings[name, number]


def _taken(operand: torch.Tensor, rows: torch.Tensor, k: int, part: slice) -> torch.Tensor:
    """Some rows of an operand of width `k`, and some elements of them."""
    return operand.reshape(-1, k)[:, part][rows]


def _as_output(columns: torch.Tensor, like: Factors) -> torch.Tensor:
    """Columns for each row of a weight, `[m, g * n]`, in the order of its output, `[g, m, n]`."""
    return columns.reshape(len(columns), len(like.w), -1).transpose(0, 1)


def _program(side: Side) -> Program | None:
    """The program of a run of one process that has all operators and values."""
    with suppress(OpInterceptError):
        if len(side.run.ranks) == 1 and side.operators[side.run.ranks[0]]:
            return Program(side.run, side.run.ranks[0])
    return None


def _made_up(parts: list[torch.Tensor], dim: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that shards may form: a first dimension of batches and heads may be cut by heads."""
    yield torch.cat(parts, dim)
    if dim == 0:
        size = len(parts[0])
        for batch in (each for each in range(2, size + 1) if not size % each):
            yield torch.cat([part.reshape(batch, -1, *part.shape[1:]) for part in parts], 1)


def _with_output(pair: Aligned, mine: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor) -> Aligned:
    if not bool(whole.any()):
        return replace(pair, reason="its output is a sum of parts, of which some are missing")
    x, y = mine.where(whole, 0), expected.where(whole, 0)
    return replace(pair, output=row_error(x, y), max_absolute=_largest(y - x))


def _judged(pair: Aligned, limit: float, caused: bool, own: bool | None, *, off: bool, product: bool) -> Aligned:
    """The pair with its kind; `own` is whether the replay says that it is a cause, None if there is none.

    Without a replay, it is one if its input is `off`: the worst row is beyond the limit, or the usual row far away.
    """
    if own is not True and own is not None and not product:
        pair = replace(pair, changed=(), arguments=())
    differs = off and not {"q", "k", "v", "heads"} & {*pair.changed}
    if own if own is not None and product else differs and own is not False:
        pair = replace(pair, changed=("lhs", *pair.changed))
    if {"lhs", "rhs"} <= {*pair.changed} and pair.output is not None and pair.output <= limit:
        pair = replace(pair, changed=())  # one makes up for the other, as where a factor moves from one to the other
    wrong = max(pair.rounding_a or 0.0, pair.rounding_b or 0.0) > 1
    if wrong and not {"rhs", "bias"} & {*pair.changed}:
        return replace(pair, kind="added", changed=(), arguments=())
    if caused and not own:
        pair = replace(pair, changed=tuple(name for name in pair.changed if name not in _FROM_BEFORE))
    if pair.changed:
        operands = any(name in ("rhs", "bias", *_FROM_BEFORE) for name in pair.changed)
        return replace(pair, kind="changed operand" if operands else "changed argument")
    if pair.output is None:
        return pair
    return replace(pair, kind="equal" if not pair.output else "inherited" if caused else "close")


def _rounding(f: Factors, call: StoredCall) -> float | None:
    """How far an output is from the float64 product of its operands, in units of what rounding may do."""
    x, w, bias = f.x.double(), f.w.double(), None if f.bias is None else f.bias.double()
    exact = x @ w.mT if bias is None else x @ w.mT + bias
    device = call.record.lhs.device.partition(":")[0] if call.record.lhs is not None else "cpu"
    bound = rounding.of_product(x, w.mT, exact, f.x.dtype, f.out.dtype, bias, device)
    if f.packed:  # 7 bits of the input and 8 of the weight, whose errors are spread evenly
        step_x, step_w = (x.amax() - x.amin()) / 127, 2 * w.abs().amax() / 255
        spread = step_w.square() * x.square().sum(2)[:, :, None] + step_x.square() * w.square().sum(2)[:, None]
        bound = bound + rounding.SIGMA * (spread / 12).sqrt() + step_x * w.abs().amax()
    return attention.worst(f.out.double(), exact, bound) if exact.numel() else None


def _place(record: CallRecord) -> str:
    """`"layers.0.q"`; `"mm (model.py:15)"` outside of modules."""
    line = f" ({record.source.partition(' ')[0]})" if record.source else ""
    return record.module or operator_name(record.op) + line


def _heads_of(call: StoredCall) -> int:
    """How many heads an attention has; all batches of two products."""
    gemm, lhs = call.record.gemm, call.record.lhs
    if gemm is not None:
        return gemm.batch
    return lhs.shape[-3] if lhs is not None and len(lhs.shape) > 2 else 1


def _same_input(one: StoredCall, other: StoredCall) -> bool:
    x, y = (call.values.get("lhs") for call in (one, other))
    return one.rank == other.rank and x is not None and y is not None and x.hash is not None and x.hash == y.hash


def _elements(factors: Factors, part: tuple[int, int], order: Array | None) -> torch.Tensor:
    """Return the input's elements that a match is about, `float64[g * m, k]`."""
    x = factors.x.reshape(-1, factors.x.size(2))[:, slice(*part)].double()
    return x if order is None else x[:, order]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 2.0**-7 if dtype.itemsize == 1 else 0.0


def _dtype_of(call: StoredCall, role: str) -> torch.dtype:
    """The dtype of an operand or output of a call; float32 if it is not known."""
    meta = getattr(call.record, role)
    found = getattr(torch, meta.dtype, None) if isinstance(meta, TensorMeta) else None
    return found if isinstance(found, torch.dtype) else torch.float32


def _coded(w: torch.Tensor) -> bool:
    """Whether a weight is whole numbers but for a few rows."""
    rows = w.reshape(-1, w.size(-1))
    return float((rows == rows.round()).all(1).double().mean()) > 0.5 if w.is_floating_point() else True


def _smallest(dtypes: Dtypes) -> float:
    """The largest error of a number that is too small for one of these dtypes."""
    found = [torch.finfo(dtype) for dtype in dtypes if dtype.is_floating_point]
    return max((each.tiny * each.eps for each in found), default=0.0)


def _input_errors(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The largest relative error of a row, or of a column of many rows: that of one neuron is small in a row.

    The second number leaves out columns that are off by chance, as one of many is: the sum of `m` squares of noise, the
    largest of `n` such sums, is about `m + 2 sqrt(m log n) + 2 log n` (Laurent and Massart, 2000).
    """
    error, (m, n) = row_error(x, y), x.shape
    if m < MANY or not n:
        return error, error
    columns, log = row_errors(x.mT, y.mT), math.log(n)
    worst, chance = float(columns.max()), math.sqrt(1 + 2 * math.sqrt(log / m) + 2 * log / m)
    most = max(error, worst)
    return most, most if worst > _ALONE * chance * float(columns.median()) else error


def _error(x: torch.Tensor, y: torch.Tensor) -> float:
    return 0.0 if torch.equal(x, y) else row_error(x, y)


def _largest(difference: torch.Tensor) -> float | None:
    return float(difference.abs().max()) if difference.numel() else None
