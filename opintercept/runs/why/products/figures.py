"""Compares joined products of two runs: `Figures` say how far weights, inputs and outputs are apart.

Invariant: the comparison is in float64, so that a difference comes from the runs. Nothing is judged here. Needs numpy.
Imports torch.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import listed
from opintercept._values import rounding
from opintercept.runs.program.names import operator_name
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import Array
from opintercept.runs.store.run import Run
from opintercept.runs.why.joining.calls import JoinedCalls
from opintercept.runs.why.joining.rows import Factors, tensor_of
from opintercept.runs.why.joining.tokens import MANY, row_error, row_errors, usual_error
from opintercept.runs.why.joining.weights import Joining, SideName
from opintercept.runs.why.noise import unscaled
from opintercept.runs.why.products.attention import HeadErrors, Heads, Rows, differing, worst
from opintercept.runs.why.products.rows import RowErrors, dtype_of, eps_of, is_coded

_KEPT = 4  # calls whose tensors stay in memory, since several calls of the other run may belong to one
_ALONE = 3.0  # how far above most columns one is whose error is its own
_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_int_mm", "linear_dynamic"))
_NEAR = 16  # calls between an attention and products of the same tokens
_SHOWN = 4  # rows that are named
_TURNED = 0.01  # relative error of the operands of products that have them in each other's place
_UPDATED = 2.0**-14  # of an update that its own rounding may be
_TINY = torch.finfo(torch.float64).tiny


@dataclass(slots=True)
class Figures:
    """How far a call of A is from those of B, relative to the norms of rows.

    Attributes:
        input: The worst row or column of the input, and the same without columns that are off by chance.
        output: The worst row of the output; None if it is compared as a part of that of another call, or there is a
            `reason` why it is not.
        usual: The root mean squares of the rows of the input, and of the output.
        where: Which rows or columns of the input differ, if these are few.
        effect: What the difference of the input makes of the output.
        weight: The largest error of a row of the weight.
        rows: The rows of the weight that differ by more than rounding, and by how much.
        bias: The elements of the bias that do.
        columns: Squares, for each row of the weight: what is left of the differences of operands in the output, the
            most that one of them makes, and the output itself.
        coarser: That one run has the weight in fewer bits, or computes in another dtype, after "B".
        roundings: How far each run's output is from that of its own operands, in units of rounding.
        heads: What differs in an attention.
    """

    input: tuple[float, float] = (0.0, 0.0)
    output: float | None = None
    usual: tuple[float, float] = (0.0, 0.0)
    where: str = ""
    effect: float = 0.0
    weight: float = 0.0
    rows: dict[int, float] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    columns: torch.Tensor | None = None
    coarser: str = ""
    roundings: tuple[float, float] = (0.0, 0.0)
    heads: HeadErrors | None = None
    reason: str | None = None

    def put_output(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare outputs."""
        errors = row_errors(mine, theirs)
        self.output = max(self.output or 0.0, float(errors.max()) if errors.numel() else 0.0)
        self.usual = self.usual[0], max(self.usual[1], usual_error(errors))

    def drop_made_up(self, limit: float) -> bool:
        """Leave out rows for which another operand makes up, to rounding; whether one does for all that are left."""
        if self.columns is None:
            return False
        left, made, size = self.columns
        usual = torch.maximum(size, size.mean()) * limit**2
        gone = {*torch.where((4 * left < made) & (left <= usual))[0].tolist()}
        self.rows, self.bias = ({i: each[i] for i in each if i not in gone} for each in (self.rows, self.bias))
        rest = [i for i in range(len(left)) if i not in self.rows and i not in self.bias]
        return bool(4 * left[rest].sum() < made[rest].sum()) and bool(left[rest].sum() <= usual[rest].sum())


class Comparing:
    """Compares the joined calls, whose tensors it reads as they are needed."""

    def __init__(self, joining: Joining, links: JoinedCalls) -> None:
        self._joining, self._links = joining, links
        self._a, self._b = joining.a, joining.b
        self._rows: dict[tuple[int, str | None, str | None], RowErrors] = {}
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._factors = lru_cache(_KEPT)(lambda name, number: joining.sides[name].factors(number))
        self._rounded = lru_cache(None)(self._own_roundings)  # several calls of A may belong to one of B

    def product(self, number: int) -> Figures:
        """Compare a call that is joined by its weight."""
        links = [(b, match) for b, match in self._links.of_a[number] if match is not None]
        found = Figures(roundings=self._roundings(number, [b for b, _ in links]))
        try:
            self._compare(found, number, links)
        except OpInterceptError as reason:
            found.reason = str(reason)
        return found

    def neighbours(self, number: int, limit: float) -> Figures:
        """Compare a call without a weight; `limit` is what may be rounding in an attention."""
        others = [b for b, _ in self._links.of_a[number]]
        found = Figures()
        if number in self._links.terms or number in self._a.attentions.values():
            return found
        with suppress(OpInterceptError, KeyError):  # the heads of one process each
            if number in self._a.attentions:
                self._attention(found, number, others, limit)
                return found
        found = Figures(roundings=self._roundings(number, others))
        try:
            self._in_order(found, number, others)
        except OpInterceptError as reason:
            found.reason = str(reason)
        return found

    def gradients(self, number: int) -> float | None:
        """How far the gradients of outputs are apart; None if they were not recorded, or are of unlike shapes."""
        (b, _), *others = self._links.of_a[number]
        sides = (self._a, number), (self._b, b)
        found = [side.gradients.get((side.calls[at].rank, side.calls[at].record.index)) for side, at in sides]
        if others or None in found:
            return None
        with suppress(OpInterceptError):
            x, y = (
                _gradient(side.run, side.calls[at], call)
                for (side, at), call in zip(sides, found, strict=True)
                if call is not None
            )
            if (rows := self._links.rows.get((number, b))) is not None:
                x, y = (each[torch.from_numpy(of)] for each, of in zip((x, y), rows, strict=True))
            alike = (unscaled(x, each).reshape(1, -1) for each in (y, y.mT) if each.shape == x.shape)  # as of `_turned`
            return min((row_error(x.reshape(1, -1), each) for each in alike), default=None)
        return None

    def _attention(self, found: Figures, number: int, others: list[int], limit: float) -> None:
        for b in others:
            sides = ("a", self._a, number), ("b", self._b, b)
            calls = [side.calls[each] for _, side, each in sides]
            scores = [side.attentions[each] for _, side, each in sides]
            first = [None if of is None else side.calls[of] for (_, side, _), of in zip(sides, scores, strict=True)]
            sizes = [_sizes_of(own or call, call) for own, call in zip(first, calls, strict=True)]
            sharing = [_sharing(*sizes), _sharing(*sizes[::-1])]
            count = min(_heads_of(call) * times for call, times in zip(calls, sharing, strict=True))
            eps = max(eps_of(dtype_of(call, "lhs")) for call in calls)
            one = Heads.of(self._a.run, first[0], calls[0], count, sharing[0])
            other = Heads.of(self._b.run, first[1], calls[1], count, sharing[1])
            if one.q.shape[::2] != other.q.shape[::2] or one.v.size(2) != other.v.size(2):
                raise OpInterceptError("the attentions have heads of other sizes")
            each = differing(one, other, self._queries(number, b, one, other), limit, eps)
            if found.heads is None or (bool(each.names), each.error) > (bool(found.heads.names), found.heads.error):
                found.heads = each
            found.output = max(found.output or 0.0, each.error)
            found.usual = 0.0, max(found.usual[1], each.usual)
            own = self._roundings(number, [b]), self._roundings(scores[0], [scores[1]]), (one.rounding, other.rounding)
            found.roundings = max(each[0] for each in (found.roundings, *own)), max(each[1] for each in own)

    def _queries(self, a: int, b: int, one: Heads, other: Heads) -> Rows | None:
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
        if sizes[0] != sizes[1]:
            raise OpInterceptError(f"the attentions have {sizes[0]} and {sizes[1]} queries")
        return None

    def _in_order(self, found: Figures, number: int, others: list[int]) -> None:
        """Compare what there is in the order of elements."""
        calls, runs = (self._a.calls[number], self._b.calls[others[0]]), (self._a.run, self._b.run)
        x, y = (tensor_of(run, call, "output").double() for run, call in zip(runs, calls, strict=True))
        if x.numel() != y.numel():
            raise OpInterceptError(f"the outputs have {x.numel()} and {y.numel()} values")
        found.put_output(x.reshape(1, -1), y.reshape(1, -1))
        for role in calls[0].tensors:
            if is_output(role):
                continue
            x, y = (tensor_of(run, call, role).double() for run, call in zip(runs, calls, strict=True))
            if x.shape != y.shape:
                continue
            x, y = (each.reshape(-1, each.shape[-1] if each.dim() else 1) for each in (x, y))
            if calls[0].record.gemm is None and (role in ("rhs", "bias") or "weight" in role):  # of a recurrent layer
                errors = row_errors(x, y)
                changed = torch.where(errors > 2 * eps_of(dtype_of(calls[0], "lhs")))[0].tolist()
                found.rows |= {row: float(errors[row]) for row in changed}
            elif (error := row_error(x, y)) > found.input[0]:
                found.input, found.effect, found.where = (error, error), found.output or 0.0, _where(x, y)

    def _compare(self, found: Figures, number: int, links: list[tuple[int, int]]) -> None:
        """Compare weights, inputs, biases and outputs, as columns for each row of A's weight."""
        a = self._factors("a", number)
        others = [self._factors("b", b) for b, _ in links]
        cut = any(self._joining.matches[match].by == "parts" for _, match in links)
        biased = not cut and all(each.bias is not None for each in (a, *others))
        if len(others) == 1 and self._turned(found, a, others[0]):
            return
        mine = a.columns(biased) + self._term("a", number, links[0][1])
        expected, filled = torch.zeros_like(mine), torch.zeros(mine.shape, dtype=torch.int64)
        made, inputs = mine.new_zeros(3, mine.size(1)), list[torch.Tensor]()
        for (b, match_number), factors in zip(links, others, strict=True):
            match = self._joining.matches[match_number]
            weight = self._row_errors(match_number, number, b)
            self._put_weight(found, weight, match.rows_a)
            group_a, group_b = self._joining.group("a", match), self._joining.group("b", match)
            own, factors = a.only(group_a), factors.only(group_b)
            rows_b = match.rows_b - (group_b or 0) * factors.w.size(1)
            theirs = factors.columns(biased) + self._term("b", b, match_number)
            ra, rb = self._tokens(number, b, len(mine), len(theirs))
            x, y = _elements(own, match.part_a, None), _elements(factors, match.part_b, match.order)
            if by_row := len(x) == len(mine) and len(y) == len(theirs):
                x, y = x[ra], y[rb]
                turn = _transposed(x, y)
                y, rb = y[turn], rb[turn]
            if x.shape != y.shape:
                raise OpInterceptError(f"the inputs have the shapes {list(x.shape)} and {list(y.shape)}")
            if match.part_b != (0, factors.w.size(2)):
                self._add_part(found, b, match_number, mine, theirs)
                continue
            theirs = theirs[rb][:, rows_b]
            if weight.scale is not None:
                theirs = theirs / weight.scale
            if a.x.is_floating_point() != factors.x.is_floating_point():  # the program scales whole numbers afterwards
                factor = (x * y).sum(1, keepdim=True) / (x * x).sum(1, keepdim=True).clamp_min(_TINY)
                y, theirs = (each / factor.where(factor != 0, 1) for each in (y, theirs))
            errors = _input_errors(x, y)
            found.where = _where(x, y) if errors > found.input else found.where
            found.input = max(found.input[0], errors[0]), max(found.input[1], errors[1])
            inputs.append(row_errors(x, y))
            if biased and len(one := own.biases()) == len(other := factors.biases()):
                one, other = one[:, match.rows_a - (group_a or 0) * own.w.size(1)], other[:, rows_b]
                eps = max(eps_of(each.bias.dtype) for each in (own, factors) if each.bias is not None)
                off, least = (other - one).abs(), eps * one.abs().clamp_min(float(one.square().mean().sqrt()))
                least = least + _UPDATED * float(self._updates(number, "bias", a.bias).max()) * one.abs().max()
                for place in torch.where((off > least).any(0))[0].tolist():
                    found.bias[int(match.rows_a[place])] = float(off[:, place].max())
                made[2, match.rows_a] = off.square().mean(0) * len(x)
            if by_row and group_a is None and (found.rows or found.bias or bool((x != y).any())):
                one, other = self._joining.both(match_number, a.w, self._factors("b", b).w)
                other = other if weight.scale is None else other / weight.scale[:, None]
                made[0, match.rows_a] += ((y - x) @ one.mT).square().sum(0)
                made[1, match.rows_a] += (y @ (other - one).mT).square().sum(0)
            places = ra[:, None], torch.from_numpy(match.rows_a)
            if bool((filled[places] == a.w.size(2)).all()):  # another process has computed the same
                found.put_output(mine[places], theirs)
                continue
            expected[places] += theirs
            filled[places] += match.part_a[1] - match.part_a[0]
        kinds = [dtype_of(call, "lhs") for call in (self._a.calls[number], self._b.calls[links[0][0]])]
        if found.coarser and kinds[0] != kinds[1]:
            mine_in, theirs_in = (str(kind).removeprefix("torch.") for kind in kinds)
            found.coarser = f"computes in {theirs_in} where A uses {mine_in}"
        if not inputs:  # a part of B's sum
            return
        whole = filled == a.w.size(2)
        if not bool(whole.any()):
            raise OpInterceptError("its output is a sum of parts, of which some are missing")
        mine, expected = mine.where(whole, 0), expected.where(whole, 0)
        found.put_output(mine, expected)
        found.usual = usual_error(torch.cat(inputs)), found.usual[1]
        found.columns = torch.stack([(expected - mine).square().sum(0), made.amax(0), mine.square().sum(0)])
        found.effect = float((made[0].sum() / found.columns[2].sum().clamp_min(_TINY)).sqrt())

    def _turned(self, found: Figures, a: Factors, b: Factors) -> bool:
        """Compare `x @ y.mT` with `y @ x.mT`; whether it is that."""
        x, y, rows_x, rows_y = (each.reshape(-1, each.size(-1)).double() for each in (a.x, b.x, a.w, b.w))
        if len(a.w) > 1 or len(b.w) > 1 or x.shape != rows_y.shape or y.shape != rows_x.shape:
            return False
        turned = max(row_error(x, rows_y), row_error(rows_x, y))
        if turned > _TURNED or (x.shape == y.shape and row_error(x, y) <= turned):
            return False
        found.input = turned, turned
        found.put_output(a.out.reshape(len(x), -1).double(), b.out.reshape(len(y), -1).double().mT)
        return True

    def _put_weight(self, found: Figures, weight: RowErrors, rows: Array) -> None:
        found.weight = max(found.weight, float(weight.error.max()))
        found.rows |= {int(rows[i]): float(weight.error[i]) for i in torch.where(weight.changed)[0].tolist()}
        found.coarser = weight.coarser or found.coarser

    def _row_errors(self, match: int, a: int, b: int) -> RowErrors:
        """How the rows of a match differ in two calls: training may have changed the weights since the first ones."""
        calls = self._a.calls[a], self._b.calls[b]
        hashes = [found.hash if (found := call.values.get("rhs")) is not None else None for call in calls]
        key = match, hashes[0], hashes[1]
        if key not in self._rows:
            whole_a, whole_b = self._factors("a", a).w, self._factors("b", b).w
            one, other = map(self._joining.matches[match].as_in_b, self._joining.both(match, whole_a, whole_b))
            low = one.abs().amax(1, keepdim=True) if match in self._joining.terms else 0.0
            dtypes = dtype_of(calls[0], "rhs"), dtype_of(calls[1], "rhs")
            errors = RowErrors.of(one, other, dtypes, low, is_coded(whole_a) != is_coded(whole_b))
            rounded = _UPDATED * self._updates(a, "w", whole_a)
            rounded = rounded[torch.from_numpy(self._joining.matches[match].rows_a)] if len(rounded) > 1 else rounded
            self._rows[key] = replace(errors, changed=errors.changed & (errors.error > rounded))
        return self._rows[key]

    def _updates(self, number: int, name: str, now: torch.Tensor | None) -> torch.Tensor:
        """How far training has moved each row of A's weight since its first call, or its bias."""
        weight, call = self._a.weight[number], self._a.calls[number]
        first = getattr(self._factors("a", self._a.weights[weight].calls[call.rank][0]), name)
        if now is None or first is None or first.shape != now.shape:
            return torch.zeros(1)
        return row_errors(*(each.double().reshape(-1, each.size(-1)) for each in (now, first)))

    def _tokens(self, a: int, b: int, rows_a: int, rows_b: int) -> Rows:
        """The rows of two calls that are of the same token."""
        if (a, b) in self._links.rows:
            one, other = self._links.rows[a, b]
            return torch.from_numpy(one), torch.from_numpy(other)
        if rows_a != rows_b:
            raise OpInterceptError(f"the outputs have {rows_a} and {rows_b} rows")
        return torch.arange(rows_a), torch.arange(rows_b)

    def _add_part(self, found: Figures, b: int, match: int, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Add the output of a call to those that add up to B's, and compare the sum when it is whole."""
        if len(mine) != len(theirs):
            raise OpInterceptError("its output is a part of a sum with another number of rows")
        each, k = self._joining.matches[match], self._b.weights[self._joining.matches[match].b].shape[2]
        zeros = torch.zeros_like(theirs), torch.zeros(theirs.shape, dtype=torch.int64)
        total, filled = self._sums.setdefault(b, zeros)
        total[:, each.rows_b] += mine[:, each.rows_a]
        filled[:, each.rows_b] += each.part_b[1] - each.part_b[0]
        if bool((filled[:, each.rows_b] == k).all()):
            found.put_output(total.where(filled == k, 0), theirs.where(filled == k, 0))

    def _term(self, name: SideName, number: int, match: int) -> torch.Tensor | float:
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

    def _roundings(self, a: int | None, others: list[int] | list[int | None]) -> tuple[float, float]:
        return self._rounded("a", a), max(self._rounded("b", b) for b in others)

    def _own_roundings(self, name: SideName, number: int | None) -> float:
        """How far an output is from the float64 product of its operands, in units of rounding; 0 if it is none."""
        call = None if number is None else self._joining.sides[name].calls[number]
        if call is None or operator_name(call.record.op).partition(".")[0] not in _PRODUCTS:
            return 0.0
        with suppress(OpInterceptError):
            return _roundings(self._factors(name, number), call)
        return 0.0


def _roundings(f: Factors, call: StoredCall) -> float:
    x, w, bias = f.x.double(), f.w.double(), None if f.bias is None else f.bias.double()
    exact = x @ w.mT if bias is None else x @ w.mT + bias
    device = call.record.lhs.device.partition(":")[0] if call.record.lhs is not None else "cpu"
    bound = rounding.of_product(x, w.mT, exact, f.x.dtype, f.out.dtype, bias, device)
    if f.packed:  # 7 bits of the input and 8 of the weight, whose errors are spread evenly
        step_x, step_w = (x.amax() - x.amin()) / 127, 2 * w.abs().amax() / 255
        spread = step_w.square() * x.square().sum(2)[:, :, None] + step_x.square() * w.square().sum(2)[:, None]
        bound = bound + rounding.SIGMA * (spread / 12).sqrt() + step_x * w.abs().amax()
    return worst(f.out.double(), exact, bound)


def _elements(factors: Factors, part: tuple[int, int], order: Array | None) -> torch.Tensor:
    """The input's elements that a match is about, `float64[g * m, k]`."""
    x = factors.x.reshape(-1, factors.x.size(2))[:, slice(*part)].double()
    return x if order is None else x[:, order]


def _gradient(run: Run, forward: StoredCall, call: StoredCall) -> torch.Tensor:
    """The gradient of a product's output, `float64[m, n]`, as a product of the backward pass reads it."""
    lhs, x = tensor_of(run, call, "lhs"), tensor_of(run, forward, "lhs")
    if call.record.grad_of == "rhs":
        turned = lhs.mT.reshape(-1, lhs.size(-2))
        is_input = turned.shape == (x.numel() // x.size(-1), x.size(-1)) and torch.equal(
            turned, x.reshape(turned.shape)
        )
        lhs = tensor_of(run, call, "rhs") if is_input else turned
    return lhs.reshape(-1, lhs.size(-1)).double()


def _heads_of(call: StoredCall) -> int:
    """How many heads an attention has; all batches of two products."""
    gemm, lhs = call.record.gemm, call.record.lhs
    if gemm is not None:
        return gemm.batch
    return lhs.shape[-3] if lhs is not None and len(lhs.shape) > 2 else 1


def _transposed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The order in which rows of B are those of A, as `[t, b]` and `[b, t]` may be; their own if none is."""
    own = torch.arange(len(y))
    if x.shape != y.shape or row_error(x, y) <= _TURNED:
        return own
    orders = (own.reshape(size, -1).T.reshape(-1) for size in range(2, len(own)) if len(own) % size == 0)
    return next((each for each in orders if row_error(x, y[each]) <= _TURNED), own)


def _sizes_of(first: StoredCall, last: StoredCall) -> tuple[int, int, int]:
    """How many heads of all batches an attention has, and queries and keys of each."""
    shape = (1, 1) if first.record.lhs is None else first.record.lhs.shape
    keys = (1, 1) if last.record.rhs is None else last.record.rhs.shape
    return math.prod(shape[:-2]), shape[-2], keys[-2] if last.record.gemm is None else last.record.gemm.k


def _sharing(own: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    """How many of another program's heads are one, with all of their queries, as heads that share their keys may be."""
    times = other[0] // max(own[0], 1)
    return times if times > 1 and own == (other[0] / times, other[1] * times, other[2]) else 1


def _input_errors(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """The largest relative error of a row, or of a column of many rows: that of one neuron is small in a row.

    The second number leaves out columns that are off by chance, as one of many is: the sum of `m` squares of noise, the
    largest of `n` such sums, is about `m + 2 sqrt(m log n) + 2 log n` (Laurent and Massart, 2000).
    """
    error, (m, n) = row_error(x, y), x.shape
    if m < MANY or not n:
        return error, error
    columns, log = row_errors(x.mT, y.mT), math.log(n)
    highest, chance = float(columns.max()), math.sqrt(1 + 2 * math.sqrt(log / m) + 2 * log / m)
    most = max(error, highest)
    return most, most if highest > _ALONE * chance * float(columns.median()) else error


def _where(x: torch.Tensor, y: torch.Tensor) -> str:
    """Which rows or columns differ, if they are few, or by which factor: `" in rows 3, 17"`."""
    factor = float((x * y).sum() / (x * x).sum().clamp_min(_TINY))
    if factor and abs(factor - 1) > 10 * row_error(x * factor, y):
        return f", {factor:.4g} times A's"
    for noun, errors in (("row", row_errors(x, y)), ("column", row_errors(x.mT, y.mT))):
        off = torch.where(errors > 0.01 * errors.max())[0].tolist()
        if 0 < 2 * len(off) < len(errors):
            return f" in {noun}{'s' * (len(off) > 1)} {listed(off, _SHOWN)}"
    return ""
