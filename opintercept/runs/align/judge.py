"""Compares joined calls of two runs: weights, inputs, outputs.

Invariant: the comparison is in float64, so that a difference comes from the runs. Needs numpy. Imports torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from opintercept._core.errors import OpInterceptError
from opintercept.runs.align.alignment import CAUSES, Aligned
from opintercept.runs.align.common_calls import JoinedCalls, shared_dim
from opintercept.runs.align.common_weights import Joining, SideName
from opintercept.runs.align.weights import Factors, factors_of, tensor_of
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import Array

_KEPT = 4  # calls whose tensors stay in memory, since several calls of the other run may belong to one
_NAMED = 16  # changed rows that are named
_ROUNDING = 16.0  # times the rounding of a product or a dtype that is more than rounding
_JUMP = 10.0  # times the error of all products before that does not come from them
_OUTLIER = 8.0  # times the median error of rows that is more than rounding or quantising
_SCALED = 0.25  # the median error of factors from which they are no error
_TOKENS = 1 << 22  # pairs of tokens that are compared to find which belong together
_MATMULS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"))
_TINY = torch.finfo(torch.float64).tiny


def compared(joining: Joining, links: JoinedCalls) -> list[Aligned]:
    """Compare what is joined, in the order of A."""
    return list(_Comparing(joining, links).pairs())


@dataclass(frozen=True, slots=True)
class _RowErrors:
    """How the rows of a match differ."""

    scale: Array  # for each row, the factor of A's row that is nearest to B's
    rest: Array  # what remains of the difference, relative to A's row
    scaled: bool  # most factors are far from 1, since B's program multiplies by the rest of the weight later

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor) -> _RowErrors:
        """Compare rows, `float64[n, k]` each."""
        square = (a * a).sum(1).clamp_min(_TINY)
        scale = (a * b).sum(1) / square
        scale[(a == b).all(1)] = 1.0
        rest = (b - scale[:, None] * a).norm(dim=1) / square.sqrt()
        return cls(scale.numpy(), rest.numpy(), bool((scale - 1).abs().median() > _SCALED))

    @property
    def errors(self) -> tuple[Array, Array]:
        """The errors of the factor and of the rest."""
        return abs(self.scale - 1), self.rest


@dataclass(slots=True)
class _OutputSum:
    """The outputs of calls of A that add up to that of a call of B, `[m, n]`, and how much of each row is there."""

    total: torch.Tensor
    filled: torch.Tensor


class _Comparing:
    def __init__(self, joining: Joining, links: JoinedCalls) -> None:
        self._joining, self._links = joining, links
        self._a, self._b = joining.a, joining.b
        self._rows = [_RowErrors.of(*joining.both(number)) for number in range(len(joining.matches))]
        self._usual = self._usual_errors()
        self._sums: dict[int, _OutputSum] = {}
        self._roundings: dict[int, float | None] = {}  # of calls of B, which several calls of A may share

        @lru_cache(_KEPT)
        def read(name: SideName, number: int) -> Factors:
            side = joining.sides[name]
            return factors_of(side.run, side.calls[number])

        self._factors = read

    def _dtypes(self, match: int) -> tuple[str, str]:
        each = self._joining.matches[match]
        return self._a.dtype(each.a), self._b.dtype(each.b)

    def _usual_errors(self) -> dict[tuple[str, str], tuple[float, float]]:
        """The median errors of rows by the dtypes of the weights."""
        found: dict[tuple[str, str], list[tuple[Array, Array]]] = defaultdict(list)
        for match, rows in enumerate(self._rows):
            if not rows.scaled:
                found[self._dtypes(match)].append(rows.errors)
        return {
            dtypes: (_median(scale for scale, _ in each), _median(rest for _, rest in each))
            for dtypes, each in found.items()
        }

    def pairs(self) -> Iterable[Aligned]:
        """Compare what is joined, in the order of A."""
        worst, caused = 0.0, False
        for number in range(len(self._a.calls)):
            if number not in self._links.of_a:
                continue
            pair = self._pair(number)
            pair = _judged(pair, worst, caused)
            worst = max(worst, pair.output or 0.0, pair.lhs or 0.0)
            caused = caused or pair.kind in CAUSES
            yield pair

    def _pair(self, number: int) -> Aligned:
        links = self._links.of_a[number]
        call, others = self._a.calls[number], tuple(self._b.calls[b] for b in dict.fromkeys(b for b, _ in links))
        matched = [(b, match) for b, match in links if match is not None]
        pair = Aligned(call, others, "neighbours", 0, 0, "not compared")
        if not matched:
            term = self._links.terms.get(number)
            return self._neighbours(pair, links[0][0]) if term is None else replace(pair, by="sum", reason=term)
        matches = [self._joining.matches[match] for _, match in matched]
        most = max(matched, key=lambda link: len(self._joining.matches[link[1]].rows_a))
        by = self._joining.by(most[1])
        rows = len(np.unique(np.concatenate([match.rows_a for match in matches])))
        weight, changed_rows = self._weight_error(match for _, match in matched)
        roundings = [self._rounding_b(b) for b, _ in matched]
        pair = replace(
            pair,
            by=by,
            rows=rows,
            of=len(self._a.weights[self._a.weight[number]].left),
            weight=weight,
            changed_rows=tuple(changed_rows[:_NAMED]),
            changed=("rhs",) if changed_rows else (),
            rounding_a=self._rounding("a", number),
            rounding_b=max((each for each in roundings if each is not None), default=None),
        )
        try:
            return self._compare(pair, number, matched)
        except OpInterceptError as reason:
            return replace(pair, reason=str(reason))

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
            errors = [_relative(x.reshape(-1), y.reshape(-1)) for y in others if y.numel() == x.numel()]
            return replace(pair, output=max(errors)) if errors else replace(pair, reason="the outputs differ in size")
        ys = [others[0]] if dim is None else list(_made_up(others, dim))
        if ys[0].numel() != x.numel():
            return replace(pair, reason=f"the outputs have {x.numel()} and {ys[0].numel()} values")
        y = min((each.reshape(-1) for each in ys), key=lambda each: _relative(x.reshape(-1), each))
        return replace(pair, output=_relative(x.reshape(-1), y), max_absolute=_largest(y - x.reshape(-1)))

    def _weight_error(self, matches: Iterable[int]) -> tuple[float | None, list[int]]:
        """The largest relative error of a row, and the rows that differ by more than other weights do."""
        largest: float | None = None
        changed: set[int] = set()
        for number in matches:
            match, rows = self._joining.matches[number], self._rows[number]
            if rows.scaled:
                continue
            scale, rest = rows.errors
            largest = max(largest or 0.0, float(np.maximum(scale, rest).max()))
            dtypes = self._dtypes(number)
            usual_scale, usual_rest = self._usual[dtypes]
            # An element that is rounded differs by up to half of the rounding; what is added to a weight is rounded.
            rounded = len({*dtypes}) > 1 or number in self._joining.terms
            least = max(map(_eps, dtypes)) * 0.51 if rounded else 0.0
            worse = (scale > max(_OUTLIER * usual_scale, least)) | (rest > max(_OUTLIER * usual_rest, 2 * least))
            changed.update(match.rows_a[worse].tolist())
        return largest, sorted(changed)

    def _compare(self, pair: Aligned, number: int, matched: list[tuple[int, int]]) -> Aligned:
        """Compare inputs, biases and outputs."""
        a = self._factors("a", number)
        found = [(match, b, self._factors("b", b)) for b, match in matched]
        if any(each.x.is_floating_point() != a.x.is_floating_point() for _, _, each in found):
            raise OpInterceptError("one of the runs multiplies whole numbers, which its program scales afterwards")
        partial = any(self._joining.matches[match].by == "parts" for match, _, _ in found)
        have = {each.bias is not None for each in (a, *(each for _, _, each in found))}
        biased = not partial and have == {True}
        if biased and self._bias_differs(a, found):
            pair = replace(pair, changed=(*pair.changed, "bias"))
        tokens = self._tokens(a, found[0])
        pair = replace(pair, lhs=self._lhs_error(a, found, tokens))
        mine = a.columns(biased) + self._terms("a", number, matched[0][1])
        expected = torch.zeros_like(mine)
        filled = torch.zeros(mine.size(1), dtype=torch.int64)
        again: list[tuple[torch.Tensor, torch.Tensor]] = []
        for match_number, b, factors in found:
            match = self._joining.matches[match_number]
            theirs = factors.columns(biased) + self._terms("b", b, match_number)
            if match.part_b != (0, factors.w.size(2)):
                return self._add_part(pair, b, match_number, mine, theirs)
            if self._rows[match_number].scaled:
                theirs[:, match.rows_b] /= torch.from_numpy(self._rows[match_number].scale)
            columns = torch.from_numpy(match.rows_a)
            if bool((filled[columns] == a.w.size(2)).all()):  # another process has computed the same
                again.append((columns, theirs[:, match.rows_b]))
                continue
            if tokens is None:
                expected[:, columns] += theirs[:, match.rows_b]
            else:
                expected[tokens[0][:, None], columns] += theirs[tokens[1]][:, match.rows_b]
            filled[columns] += match.part_a[1] - match.part_a[0]
        pair = _with_output(pair, mine, expected, filled == a.w.size(2), tokens)
        errors = [_relative(mine[:, columns], each) for columns, each in again if len(each) == len(mine)]
        return replace(pair, output=max(pair.output, *errors)) if errors and pair.output is not None else pair

    def _add_part(self, pair: Aligned, b: int, match: int, mine: torch.Tensor, theirs: torch.Tensor) -> Aligned:
        """Add the output of a call to those that add up to B's, and compare the sum when it is whole."""
        each = self._joining.matches[match]
        sum_ = self._sums.get(b)
        if sum_ is None:
            sum_ = self._sums[b] = _OutputSum(torch.zeros_like(theirs), torch.zeros(theirs.size(1), dtype=torch.int64))
        if len(mine) != len(theirs):
            return replace(pair, reason="its output is a part of a sum with another number of rows")
        columns = torch.from_numpy(each.rows_b)
        sum_.total[:, columns] += mine[:, each.rows_a]
        sum_.filled[columns] += each.part_b[1] - each.part_b[0]
        k = self._b.weights[each.b].shape[2]
        if not bool((sum_.filled[columns] == k).all()):
            return replace(pair, reason="its output is a part of a sum, which is compared with the last of the parts")
        return _with_output(pair, sum_.total, theirs, sum_.filled == k, None)

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
            least = max(_eps_of(a.bias), _eps_of(factors.bias))
            if len(x) == len(y) and bool(((y - x).abs() > least * x.abs()).any()):
                return True
        return False

    def _tokens(self, a: Factors, first: tuple[int, int, Factors]) -> tuple[Array, Array] | None:
        """Find which rows of the inputs are of the same token; None if all are, in their order.

        Raises:
            OpInterceptError: They have different numbers of rows, and it is not known which belong together.
        """
        match_number, _, b = first
        if a.x.size(1) == b.x.size(1):
            return None
        if len(a.x) != 1 or len(b.x) != 1 or a.x.size(1) * b.x.size(1) > _TOKENS:
            raise OpInterceptError(f"the outputs have {a.out.size(1)} and {b.out.size(1)} rows")
        return _same_tokens(*self._inputs(a, match_number, b))

    def _inputs(self, a: Factors, match_number: int, b: Factors) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements of the inputs that a match is about."""
        match = self._joining.matches[match_number]
        return _elements(a, match.part_a, None), _elements(b, match.part_b, match.order)

    def _lhs_error(
        self, a: Factors, found: list[tuple[int, int, Factors]], tokens: tuple[Array, Array] | None
    ) -> float | None:
        difference = norm = 0.0
        for match_number, _, b in found:
            x, y = self._inputs(a, match_number, b)
            if tokens is not None:
                x, y = x[tokens[0]], y[tokens[1]]
            if x.shape != y.shape:
                return None
            difference += float((y - x).square().sum())
            norm += float(x.square().sum())
        return _ratio(difference**0.5, norm**0.5)

    def _rounding_b(self, number: int) -> float | None:
        if number not in self._roundings:
            self._roundings[number] = self._rounding("b", number)
        return self._roundings[number]

    def _rounding(self, name: SideName, number: int) -> float | None:
        """`_rounding` of a call; None if it is no plain product of two matrices."""
        op = self._joining.sides[name].calls[number].record.op
        if op.rpartition("::")[2].partition(".")[0] not in _MATMULS:
            return None
        try:
            return _rounding(self._factors(name, number))
        except OpInterceptError:
            return None


def _made_up(parts: list[torch.Tensor], dim: int) -> Iterator[torch.Tensor]:
    """Yield the tensors that shards may form: a first dimension of batches and heads may be cut by heads."""
    yield torch.cat(parts, dim)
    if dim == 0:
        size = len(parts[0])
        for batch in (each for each in range(2, size + 1) if not size % each):
            yield torch.cat([part.reshape(batch, -1, *part.shape[1:]) for part in parts], 1)


def _with_output(
    pair: Aligned, mine: torch.Tensor, expected: torch.Tensor, whole: torch.Tensor, tokens: tuple[Array, Array] | None
) -> Aligned:
    if not bool(whole.any()):
        return replace(pair, reason="its output is a sum of parts, of which some are missing")
    x, y = mine[:, whole], expected[:, whole]
    if tokens is not None:
        x, y = x[tokens[0]], y[tokens[0]]
    return replace(pair, output=_relative(x, y), max_absolute=_largest(y - x))


def _judged(pair: Aligned, worst: float, caused: bool) -> Aligned:
    """The pair with its kind."""
    unit = max(_eps_of_call(call) for call in (pair.a, *pair.b))
    limit = max(_JUMP * worst, _ROUNDING * unit)
    jumped = pair.lhs is not None and not caused and not pair.lhs <= limit
    if jumped:
        pair = replace(pair, changed=("lhs", *pair.changed))
    if pair.changed:
        return replace(pair, kind="changed operand")
    apart = pair.by == "neighbours" and not caused and pair.output is not None and not pair.output <= limit
    if apart or max(pair.rounding_a or 0.0, pair.rounding_b or 0.0) > _ROUNDING:
        return replace(pair, kind="added")
    if pair.output is None:
        return pair
    return replace(pair, kind="equal" if not pair.output else "inherited" if caused else "close")


def _rounding(f: Factors) -> float | None:
    """Measure how far an output is from the float64 product of its operands, in units of its allowed rounding.

    A sum of k products in any order has an error of at most about `eps * norm(x) * norm(w)`, see N. Higham, "Accuracy
    and Stability of Numerical Algorithms", 2002, section 3.1; and the output is rounded to its dtype.
    """
    x, w, out = f.x.double(), f.w.double(), f.out.double()
    product = x @ w.mT
    bound = x.norm(dim=2)[:, :, None] * w.norm(dim=2)[:, None, :]
    if f.bias is not None:
        product += f.bias.double()
        bound = bound + f.bias.double().abs()
    wide = {torch.float64} == {f.x.dtype, f.w.dtype}
    unit = torch.finfo(torch.float64 if wide else torch.float32).eps * bound
    if f.out.is_floating_point():
        rounding = torch.finfo(f.out.dtype)
        unit += rounding.eps * product.abs().clamp_min(rounding.smallest_normal)  # below, the spacing is constant
    error = (out - product).abs()
    found = error / unit.clamp_min(_TINY)
    found[~product.isfinite() | ~unit.isfinite()] = 0.0  # what should be infinite says nothing
    return float(found.max()) if found.numel() else None


def _elements(factors: Factors, part: tuple[int, int], order: Array | None) -> torch.Tensor:
    """Return the input's elements that a match is about, `float64[g * m, k]`."""
    x = factors.x.reshape(-1, factors.x.size(2))[:, slice(*part)].double()
    return x if order is None else x[:, order]


def _same_tokens(x: torch.Tensor, y: torch.Tensor) -> tuple[Array, Array]:
    """The rows of the longer tensor that are nearest to those of the shorter one, in the same order."""
    if len(x) > len(y):
        of_y, of_x = _same_tokens(y, x)
        return of_x, of_y
    costs = torch.cdist(x, y).numpy()
    width = costs.shape[1]
    chosen = np.empty(costs.shape, np.int64)
    best = np.zeros(width + 1)  # the least cost of the rows so far within the first columns
    for row, cost in enumerate(costs):
        here = np.r_[np.inf, best[:-1] + cost]
        new = np.minimum.accumulate(here)
        improved = np.where(here == new, np.arange(width + 1), 0)
        chosen[row] = np.maximum.accumulate(improved)[1:]
        best = new
    places = np.empty(len(costs), np.int64)
    end = width
    for row in range(len(costs) - 1, -1, -1):
        end = int(chosen[row][end - 1]) - 1
        places[row] = end
    return np.arange(len(costs)), places


def _eps(dtype: str) -> float:
    found = getattr(torch, dtype, None)
    return torch.finfo(found).eps if isinstance(found, torch.dtype) and found.is_floating_point else 0.0


def _eps_of(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else _eps(str(tensor.dtype).removeprefix("torch."))


def _eps_of_call(call: StoredCall) -> float:
    """The rounding of the coarsest operand of a call."""
    return max((_eps(meta.dtype) for meta in (call.record.lhs, call.record.rhs) if meta is not None), default=0.0)


def _median(arrays: Iterable[Array]) -> float:
    return float(np.median(np.concatenate(list(arrays))))


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    if torch.equal(x, y):
        return 0.0
    return _ratio(float((y - x).norm()), float(x.norm()))


def _ratio(difference: float, norm: float) -> float:
    if not difference:
        return 0.0
    return difference / norm if norm else float("inf")


def _largest(difference: torch.Tensor) -> float | None:
    return float(difference.abs().max()) if difference.numel() else None
