"""Reads attention as heads of tokens, fused or in two products, and finds which of its operands or arguments differs.

Invariant: an operand is named only if the outputs differ by more than rounding. Needs numpy. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import short_name
from opintercept._values import rounding
from opintercept._values.attention import attention_from
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run
from opintercept.runs.why.joining.rows import factors_of, shape_of, tensor_of, weight_of
from opintercept.runs.why.joining.tokens import distances, row_error, row_errors, same_tokens, usual_error

_MOST = 1 << 25  # elements of the weights that are in memory at once
_SEEN = 1e-30  # the least weight of a key that is not masked
_MATTERS = 1e-12  # that of one whose mask matters
_REST = 0.1  # of what the operands move the scores by: what is left of it is rounding
_PARAMETERS = {"lhs": "query", "rhs": "key"}
_ALL = slice(None)
Rows = tuple[torch.Tensor, torch.Tensor]
Places = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention of `h` heads, `t` queries and `s` keys, all batches one after the other, in float64."""

    q: torch.Tensor  # [h, t, d]
    k: torch.Tensor  # [h, s, d]
    v: torch.Tensor  # [h, s, e]
    weights: torch.Tensor  # [h, t, s], what a softmax makes of the scores
    out: torch.Tensor  # [h, t, e]
    given: dict[str, Any]  # the arguments of a fused one
    rounding: float = 0.0  # how far the output is from that of its operands, in units of their rounding

    @classmethod
    def of(cls, run: Run, scores: StoredCall | None, call: StoredCall, count: int, sharing: int = 1) -> Heads:
        """Read an attention, fused if there is no call of the scores; OpInterceptError if it cannot be read.

        So many heads are `sharing` their keys, with all of their queries in one product.
        """
        given, own = dict[str, Any](), 0.0
        if scores is None:
            parts, given, own = _fused(run, call)
        else:
            groups, _, width = shape_of(scores)
            two = factors_of(run, call)
            heads = count if count and not groups * sharing % count else groups * sharing
            q, k = tensor_of(run, scores, "lhs").reshape(groups, -1, width), weight_of(run, scores)
            k, v = (each.repeat_interleave(sharing, 0) for each in (k, two.w.mT))
            q = q.unflatten(1, (sharing, -1)).flatten(0, 1)
            x, out = _apart(two.x, two.out, q @ k.mT, sharing) if sharing > 1 else (two.x, two.out)
            parts = [each.double().unflatten(0, (-1, heads)) for each in (q, k, v, x, out)]
        q, k, v, weights, out = parts
        b, h, t, s = weights.shape
        if weights.numel() * b > _MOST:
            raise OpInterceptError("its weights need too much memory")
        diagonal = weights.new_zeros(h, b, t, b, s)  # no query sees the keys of another batch
        diagonal[:, torch.arange(b), :, torch.arange(b)] = weights
        q, k, v, out = (each.transpose(0, 1).flatten(1, 2) for each in (q, k, v, out))
        return cls(q, k, v, diagonal.reshape(h, b * t, b * s), out, given, own)

    def only(self, heads: Places = _ALL, queries: Places = _ALL, keys: Places = _ALL) -> Heads:
        """Some heads, queries and keys, in this order."""
        return replace(
            self,
            q=self.q[heads][:, queries],
            k=self.k[heads][:, keys],
            v=self.v[heads][:, keys],
            weights=self.weights[heads][:, queries][:, :, keys],
            out=self.out[heads][:, queries],
        )

    @property
    def dropout(self) -> float | None:
        """The probability of dropout; None if weights that a program has computed show that there is one."""
        sums = self.weights.sum(-1)
        seen = bool(((sums - 1).abs() > 0.05).logical_and(sums > 0).any())
        found: float | None = self.given.get("dropout_p", None if seen else 0.0)
        return found


def _fused(run: Run, call: StoredCall) -> tuple[list[torch.Tensor], dict[str, Any], float]:
    bound: dict[str, Any] = dict(call.arguments or {})
    bound |= {_PARAMETERS.get(role, role): tensor_of(run, call, role) for role in call.tensors if not is_output(role)}
    if "query" not in bound or "key" not in bound:
        raise OpInterceptError("the values of its lhs were not recorded; record with tensors='full'")
    found = attention_from(short_name(call.record.op), bound)
    if isinstance(found, str):
        raise OpInterceptError(f"its operands are not known: {found}")
    heads, queries = found.query.shape[-3:-1]
    q, k, v = (each.double().reshape(-1, *each.shape[-3:]) for each in (found.query, found.key, found.value))
    k, v = (each.repeat_interleave(heads // each.size(1), 1) for each in (k, v))
    if len(q) * q.size(2) * len(k) * k.size(2) * heads > _MOST:
        raise OpInterceptError("its weights need too much memory")
    scores = found.scores(range(heads), range(queries), torch.float64).reshape(-1, heads, queries, k.size(2))
    weights = scores.softmax(-1).nan_to_num(0.0)
    exact, own = weights @ v, 0.0
    out = tensor_of(run, call, "output")
    dtype, out = out.dtype, (out.transpose(-3, -2) if found.heads_last else out).double().reshape(exact.shape)
    if not found.dropout:
        sizes = abs(found.scale) * (q.abs() @ k.abs().mT)
        device = call.record.lhs.device.partition(":")[0] if call.record.lhs is not None else "cpu"
        limits = rounding.of_attention(scores, sizes, weights, v, q.size(-1), found.query.dtype, dtype, device)
        own = worst(out, exact, limits)
    given = {"scale": float(found.scale), "dropout_p": found.dropout, "is_causal": bound.get("is_causal")}
    return [q, k, v, weights, out], given | {"masked": found.mask is not None}, own


def _apart(x: torch.Tensor, out: torch.Tensor, scores: torch.Tensor, sharing: int) -> list[torch.Tensor]:
    """Weights and outputs of each head, of which a product has one after the other, or those of each token together."""
    by_head = [each.unflatten(1, (sharing, -1)).flatten(0, 1) for each in (x, out)]
    by_token = [each.unflatten(1, (-1, sharing)).transpose(1, 2).flatten(0, 1) for each in (x, out)]
    return max(by_head, by_token, key=lambda each: float((each[0] * scores).sum()))  # weights follow their scores


def worst(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error in units of its bound; what is not finite in the exact output says nothing."""
    error = (out - exact).abs()
    found = (error / bound).nan_to_num(torch.inf).where((error != 0) & exact.isfinite() & bound.isfinite(), 0)
    return float(found.max()) if found.numel() else 0.0


@dataclass(frozen=True, slots=True)
class HeadErrors:
    """How two attentions differ."""

    error: float  # the largest relative error of a row of the outputs
    usual: float  # their root mean square
    operands: tuple[str, ...] = ()  # of "q", "k" and "v", or "heads" if only their order is another
    arguments: tuple[str, ...] = ()  # what B does: "uses scale=0.4 where A uses 0.35"

    @property
    def names(self) -> tuple[str, ...]:
        """All of these."""
        return *self.operands, *self.arguments


def differing(one: Heads, other: Heads, rows: Rows | None, limit: float, eps: float) -> HeadErrors:
    """Compare two attentions in the queries that they have in common, `rows`; None if these are all.

    `limit` is the relative error of a row that is more than rounding, `eps` that of the coarser dtype.

    Where one of them multiplies by the scale outside, q and k may differ by a factor.
    """
    of_queries = [each.k.size(1) == each.q.size(1) for each in (one, other)]  # in self-attention without a cache
    every_key = rows is None and one.v.shape == other.v.shape
    if rows is not None:
        one, other = one.only(queries=rows[0]), other.only(queries=rows[1])
    names = "q", "out", *(("v", "k") if every_key else ())
    turns = (_permutation(getattr(one, name), getattr(other, name), limit, name) for name in names)
    other = other.only(heads=next((each for each in turns if each is not None), _ALL))
    found = HeadErrors(row_error(one.out, other.out), usual_error(row_errors(one.out, other.out)))
    if found.error <= limit:
        return found
    keys = torch.arange(one.k.size(1)), torch.arange(other.k.size(1))
    if not every_key:
        keys = (rows or keys) if all(of_queries) else _same_keys(one, other)
    free = one.given.get("scale") != other.given.get("scale") or not one.given
    operands = _operands(one.only(keys=keys[0]), other.only(keys=keys[1]), limit, free=free)
    return replace(found, operands=operands, arguments=(*_arguments(one, other, keys, eps, operands),))


def _same_keys(one: Heads, other: Heads) -> Rows:
    """The keys that are of the same token: those with the nearest values that the same queries see."""
    seen = one.weights > _SEEN, other.weights > _SEEN
    used = [torch.where(each.any(0).any(0))[0] for each in seen]
    views = [each[:, :, own].any(0).mT.double() for each, own in zip(seen, used, strict=True)]
    costs = [distances(*views)]  # keys of the same values may belong to other sequences
    for both in ((one.k, other.k), (one.v, other.v)):
        x, y = (each[:, own].transpose(0, 1).flatten(1) for each, own in zip(both, used, strict=True))
        costs.append(distances(x, y))
    ia, ib = same_tokens(costs)
    return used[0][torch.from_numpy(ia)], used[1][torch.from_numpy(ib)]


def _error(x: torch.Tensor, y: torch.Tensor, name: str) -> float:
    """The error of an operand; up to a factor for q and k, which a program may multiply by the scale."""
    return row_error(x, y / _factor(x, y) if name in ("q", "k") else y)


def _permutation(x: torch.Tensor, y: torch.Tensor, limit: float, name: str) -> torch.Tensor | None:
    """For each head of `x`, the one of `y` that is equal; None if there is none."""
    if _error(x, y, name) <= limit:
        return torch.arange(len(x))
    best, turn = torch.tensor([[_error(mine, theirs, name) for theirs in y] for mine in x]).min(1)
    return turn if bool((best <= limit).all()) else None


def _operands(one: Heads, other: Heads, limit: float, *, free: bool) -> tuple[str, ...]:
    """Which of q, k and v differ, up to a factor of q and k if that is `free`; `"heads"` if only their order does.

    Neither q nor k differs if the scores do not, as where a program rotates other elements of a head.
    """
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in "qkv"}
    found = [name for name in "qkv" if _error(*pairs[name], name if free else "") > limit]
    if {"q", "k"} <= {*found} and _error(one.q @ one.k.mT, other.q @ other.k.mT, "q" if free else "") <= limit:
        found = found[2:]
    moved = [_permutation(*pairs[name], limit, name) for name in found]
    return ("heads",) if found and all(each is not None for each in moved) else tuple(found)


def _arguments(one: Heads, other: Heads, keys: Rows, eps: float, operands: tuple[str, ...]) -> Iterator[str]:
    """What B does with operands: what logarithms of the weights are beside the products of queries and keys."""
    if one.dropout != other.dropout:
        chances = ["another probability" if each is None else f"{each:g}" for each in (other.dropout, one.dropout)]
        yield f"uses dropout_p={chances[0]} where A uses {chances[1]}"
        return
    if operands == ("heads",):
        return
    own, theirs = (each.weights > _SEEN for each in (one, other))
    a, b = one.only(keys=keys[0]), other.only(keys=keys[1])
    seen = a.weights > _SEEN, b.weights > _SEEN
    rest = own.sum(-1) - seen[0].sum(-1) + theirs.sum(-1) - seen[1].sum(-1)
    apart = (seen[0] != seen[1]) & (torch.maximum(a.weights, b.weights) > _MATTERS)
    apart &= torch.minimum(_unmasked(a), _unmasked(b)) > _MATTERS  # others are too small to be seen
    hidden = bool(((apart.any(-1) | (rest > 0)) & own.any(-1) & theirs.any(-1)).any())
    if not {"q", "k"} & {*operands} and a.weights.numel():
        scales, added = _scales(a, b, seen[0] & seen[1], eps)
        if scales is not None:
            yield f"uses scale={scales[1]:.6g} where A uses {scales[0]:.6g}"
        if added and not hidden:
            yield "adds something else to scores, or caps them: another mask or bias"
    if hidden:
        causal = [each.given.get("is_causal") for each in (one, other)]
        given = any(each.given.get("masked", True) for each in (one, other))
        flag = not given and causal[0] != causal[1]
        yield f"uses is_causal={causal[1]} where A uses {causal[0]}" if flag else "uses another mask"


def _scales(a: Heads, b: Heads, seen: torch.Tensor, eps: float) -> tuple[tuple[float, float] | None, bool]:
    """The scales of both, if they are what differs; and whether anything else is added to the scores."""
    raw = a.q @ a.k.mT, b.q @ b.k.mT
    mine, products = (_centred(each, seen) for each in raw)
    products = products / _factor(mine, products)  # B may have multiplied q or k by the scale
    logs = _centred(a.weights.log(), seen)
    scale = a.given.get("scale") or _factor(mine, logs)
    largest = max(float(each.where(seen, 0).abs().max()) for each in raw)  # is what a program rounds
    least = 10 * eps * (2 + abs(scale) * largest + float((logs - scale * mine).abs().max()))
    gap, moved = _centred((b.weights / a.weights).log(), seen), products - mine
    both = torch.stack((moved.flatten(), products.flatten()), 1)  # what a program adds to the products cancels here
    fitted = torch.linalg.lstsq(both, gap.reshape(-1, 1), rcond=1e-5, driver="gelsd").solution[0]
    moved = moved * (scale if a.given.get("scale") else fitted)
    gap, least = gap - moved, max(least, _REST * float(moved.abs().max()))
    if float(gap.abs().max()) <= least:
        return None, False
    more = _factor(products, gap, 0.0)
    if float((gap - more * products).abs().max()) > least:
        return None, True
    return (None if a.given and scale == b.given.get("scale") else (scale, scale + more)), False  # then q or k differs


def _factor(x: torch.Tensor, y: torch.Tensor, none: float = 1.0) -> float:
    """The number that `y` is of `x`."""
    square = float((x * x).sum())
    return (float((x * y).sum()) / square if square else 0.0) or none


def _unmasked(heads: Heads) -> torch.Tensor:
    """The weights that keys would have beside those that are seen, if no mask hid them, `[h, t, s]`."""
    seen, products = heads.weights > _SEEN, heads.q @ heads.k.mT
    scale = heads.given.get("scale") or _factor(_centred(products, seen), _centred(heads.weights.log(), seen))
    scores = products * scale
    return (scores - scores.where(seen, -torch.inf).logsumexp(-1, keepdim=True)).exp()


def _centred(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Each row less the mean of its elements that are seen; 0 elsewhere."""
    x = x.where(seen, 0)
    return (x - x.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).where(seen, 0)
