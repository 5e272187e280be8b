"""Reads attention as heads of tokens, fused or in two products, and finds which of its operands or arguments differs.

Invariant: an operand is named only if the outputs differ by more than rounding. Needs numpy. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import short_name
from opintercept._values import rounding
from opintercept._values.attention import Attention, attention_from
from opintercept.runs.align.tokens import distances, row_error, same_tokens
from opintercept.runs.align.weights import factors_of, shape_of, tensor_of, weight_of
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

_MOST = 1 << 25  # elements of the weights that are in memory at once
_SEEN = 1e-30  # the least weight of a key that is not masked
_MATTERS = 1e-12  # that of one whose mask matters
_PARAMETERS = {"lhs": "query", "rhs": "key"}
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """An attention of `h` heads, `t` queries and `s` keys, all batches one after the other, in float64."""

    q: torch.Tensor  # [h, t, d]
    k: torch.Tensor  # [h, s, d]
    v: torch.Tensor  # [h, s, e]
    weights: torch.Tensor  # [h, t, s], what a softmax makes of the scores
    out: torch.Tensor  # [h, t, e]
    scale: float | None  # None if the program multiplies by it outside
    arguments: dict[str, Any]
    rounding: float | None  # how far the output is from that of its operands, in units of their rounding

    def dropout(self, queries: torch.Tensor) -> float | None:
        """The probability of dropout; None if weights that a program has computed show that there is one."""
        if "dropout_p" in self.arguments:
            return float(self.arguments["dropout_p"])
        sums = self.weights[:, queries].sum(-1)
        return None if bool(((sums - 1).abs() > 0.05).logical_and(sums > 0).any()) else 0.0


@dataclass(frozen=True, slots=True)
class AttentionErrors:
    """How two attentions differ."""

    error: float  # the largest relative error of a row of the outputs
    largest: float  # the largest modulus of a difference
    changed: tuple[str, ...] = ()
    arguments: tuple[tuple[str, Any, Any], ...] = ()
    operand: float | None = None  # the largest relative error of a row of the operands that differ


def fused(run: Run, call: StoredCall) -> Heads:
    """The heads of an attention operator; OpInterceptError if its operands are not known."""
    bound: dict[str, Any] = dict(call.arguments or {})
    bound |= {_PARAMETERS.get(role, role): tensor_of(run, call, role) for role in call.tensors if not is_output(role)}
    if "query" not in bound or "key" not in bound:
        raise OpInterceptError("the values of its lhs were not recorded; record with tensors='full'")
    found = attention_from(short_name(call.record.op), bound)
    if isinstance(found, str):
        raise OpInterceptError(f"its operands are not known: {found}")
    heads, queries = found.query.shape[-3:-1]
    group = heads // found.key.size(-3)
    q, k, v = (each.double().reshape(-1, *each.shape[-3:]) for each in (found.query, found.key, found.value))
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    if len(q) * q.size(2) * len(k) * k.size(2) * heads > _MOST:
        raise OpInterceptError("its weights need too much memory")
    scores = found.scores(range(heads), range(queries), torch.float64).reshape(-1, heads, queries, k.size(2))
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = tensor_of(run, call, "output")
    out = out.transpose(-3, -2) if found.heads_last else out
    own = None if found.dropout else _rounding(found, scores, weights, q, k, v, out, call)
    given = {"dropout_p": found.dropout, "is_causal": bound.get("is_causal"), "masked": found.mask is not None}
    out = out.double().reshape(*q.shape[:3], -1)
    return Heads(_folded(q), _folded(k), _folded(v), _diagonal(weights), _folded(out), float(found.scale), given, own)


def _rounding(
    found: Attention,
    scores: torch.Tensor,
    weights: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    call: StoredCall,
) -> float:
    """How far the output is from that of the operands."""
    sizes = abs(found.scale) * (q.abs() @ k.abs().mT)
    device = call.record.lhs.device.partition(":")[0] if call.record.lhs is not None else "cpu"
    exact = weights @ v
    bound = rounding.of_attention(scores, sizes, weights, v, q.size(-1), found.query.dtype, out.dtype, device)
    return worst(out.double().reshape(exact.shape), exact, bound)


def worst(out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error in units of its bound; what is not finite in the exact output says nothing."""
    error = (out - exact).abs()
    found = (error / bound).nan_to_num(torch.inf).where((error != 0) & exact.isfinite() & bound.isfinite(), 0)
    return float(found.max()) if found.numel() else 0.0


def by_products(run: Run, scores: StoredCall, last: StoredCall, heads: int) -> Heads:
    """The heads of an attention of two batched products."""
    groups, _, width = shape_of(scores)
    q, k = tensor_of(run, scores, "lhs").reshape(groups, -1, width), weight_of(run, scores)
    two = factors_of(run, last)
    heads = heads if heads and not groups % heads else groups
    q, k, weights, out = (each.double() for each in (q, k, two.x, two.out))
    parts = [each.reshape(-1, heads, *each.shape[1:]) for each in (q, k, two.w.double().mT, weights, out)]
    q, k, v, weights, out = parts
    if weights.numel() * len(weights) > _MOST:
        raise OpInterceptError("its weights need too much memory")
    return Heads(_folded(q), _folded(k), _folded(v), _diagonal(weights), _folded(out), None, {}, None)


def _folded(x: torch.Tensor) -> torch.Tensor:
    """`[b, h, t, d]` as `[h, b * t, d]`."""
    return x.transpose(0, 1).flatten(1, 2)


def _diagonal(weights: torch.Tensor) -> torch.Tensor:
    """`[b, h, t, s]` as `[h, b * t, b * s]`: no query sees the keys of another batch."""
    b, h, t, s = weights.shape
    found = weights.new_zeros(h, b, t, b, s)
    places = torch.arange(b)
    found[:, places, :, places] = weights
    return found.reshape(h, b * t, b * s)


def differing(one: Heads, other: Heads, rows: Rows | None, limit: float, eps: float) -> AttentionErrors:
    """Compare two attentions in the queries that they have in common, `rows`; None if these are all.

    `limit` is the relative error of a row that is more than rounding, `eps` that of the coarser dtype.
    """
    t = torch.arange(one.q.size(1))
    ta, tb = (t, t) if rows is None else rows
    qa, qb, out, got = one.q[:, ta], other.q[:, tb], one.out[:, ta], other.out[:, tb]
    turns = [_permutation(qa, qb, limit, scaled=True), _permutation(out, got, limit)]
    same_keys = rows is None and one.v.shape == other.v.shape
    if same_keys:
        turns += [_permutation(one.v, other.v, limit), _permutation(one.k, other.k, limit, scaled=True)]
    turn = next((each for each in turns if each is not None), torch.arange(len(qa)))
    found = AttentionErrors(row_error(out, got[turn]), float((got[turn] - out).abs().max()) if out.numel() else 0.0)
    if found.error <= limit:
        return found
    seen_a, seen_b = one.weights[:, ta] > _SEEN, other.weights[turn][:, tb] > _SEEN
    ka, kb = _keys(one, other, turn, (ta, tb), seen_a, seen_b, same_keys)
    errors = _operands(one, other, turn, (qa, qb), (ka, kb), limit)
    changed = tuple(errors)
    arguments = [*_arguments(one, other, turn, (ta, tb), (ka, kb), limit, eps, changed)]
    names = *changed, *(name for name, *_ in arguments)
    return AttentionErrors(found.error, found.largest, names, tuple(arguments), max(errors.values(), default=None))


def _keys(
    one: Heads, other: Heads, turn: torch.Tensor, rows: Rows, seen_a: torch.Tensor, seen_b: torch.Tensor, same: bool
) -> Rows:
    """The keys that are of the same token: all in order, those of the queries, or those with the nearest values."""
    if same:
        every = torch.arange(one.k.size(1))
        return every, every
    if one.k.size(1) == one.q.size(1) and other.k.size(1) == other.q.size(1):
        return rows
    used_a, used_b = (torch.where(seen.any(0).any(0))[0] for seen in (seen_a, seen_b))
    costs = [
        distances(x[:, used_a].transpose(0, 1).flatten(1), y[turn][:, used_b].transpose(0, 1).flatten(1))
        for x, y in ((one.k, other.k), (one.v, other.v))
    ]
    views_a, views_b = (seen[:, :, used].any(0).mT.double() for seen, used in ((seen_a, used_a), (seen_b, used_b)))
    costs.append(distances(views_a, views_b))  # keys of the same values may belong to other sequences
    ia, ib = same_tokens(costs)
    return used_a[torch.from_numpy(ia)], used_b[torch.from_numpy(ib)]


def _permutation(x: torch.Tensor, y: torch.Tensor, limit: float, *, scaled: bool = False) -> torch.Tensor | None:
    """For each head of `x`, the one of `y` that is equal, but for a factor if it is `scaled`; None if there is none."""

    def error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return row_error(mine, theirs / _factor(mine, theirs) if scaled else theirs)

    if error(x, y) <= limit:
        return torch.arange(len(x))
    errors = torch.tensor([[error(mine, theirs) for theirs in y] for mine in x])
    best, turn = errors.min(1)
    return turn if bool((best <= limit).all()) else None


def _operands(
    one: Heads, other: Heads, turn: torch.Tensor, queries: Rows, keys: Rows, limit: float
) -> dict[str, float]:
    """The errors of q, k and v as far as they differ; of `"heads"` if only their order does.

    Neither q nor k differs if the scores do not, as where a program rotates other elements of a head.
    """
    ka, kb = keys
    pairs = {"q": queries, "k": (one.k[:, ka], other.k[:, kb]), "v": (one.v[:, ka], other.v[:, kb])}
    errors = {name: row_error(x, _scaled(y[turn], x, name)) for name, (x, y) in pairs.items()}
    if min(errors["q"], errors["k"]) > limit:
        scores, others = pairs["q"][0] @ pairs["k"][0].mT, pairs["q"][1][turn] @ pairs["k"][1][turn].mT
        if row_error(scores, _scaled(others, scores, "q")) <= limit:
            errors = {"v": errors["v"]}
    errors = {name: error for name, error in errors.items() if error > limit}
    moved = errors and all(_permutation(*pairs[name], limit, scaled=name != "v") is not None for name in errors)
    return {"heads": max(errors.values())} if moved else errors


def _scaled(y: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """`y` divided by the factor that it is of `x`: a program may multiply q or k by the scale."""
    return y if name == "v" else y / _factor(x, y)


def _factor(x: torch.Tensor, y: torch.Tensor, limit: float = 0.0) -> float:
    """The number that `y` is of `x`; 1 if it is so within the limit."""
    square = float((x * x).sum())
    found = (float((x * y).sum()) / square if square else 0.0) or 1.0
    return 1.0 if abs(found - 1) <= limit else found


def _arguments(
    one: Heads,
    other: Heads,
    turn: torch.Tensor,
    rows: Rows,
    keys: Rows,
    limit: float,
    eps: float,
    changed: tuple[str, ...],
) -> Iterator[tuple[str, Any, Any]]:
    """The arguments that differ: what logarithms of the weights are beside the products of queries and keys."""
    dropped = [each.dropout(queries) for each, queries in zip((one, other), rows, strict=True)]
    if dropped[0] != dropped[1]:
        yield "dropout_p", dropped[0], dropped[1]
        return
    if changed == ("heads",):
        return
    (ta, tb), (ka, kb) = rows, keys
    a, b = one.weights[:, ta], other.weights[turn][:, tb]
    own, theirs = a > _SEEN, b > _SEEN
    rest = own.sum(-1) - own[:, :, ka].sum(-1) + theirs.sum(-1) - theirs[:, :, kb].sum(-1)
    apart = (own[:, :, ka] != theirs[:, :, kb]) & (torch.maximum(a[:, :, ka], b[:, :, kb]) > _MATTERS)
    unmasked = torch.minimum(_unmasked(one, ta, ka), _unmasked(other, tb, kb)[turn])
    apart &= unmasked > _MATTERS  # others are too small to be seen
    hidden = apart.any(-1) | (rest > 0)
    masked = bool((hidden & own.any(-1) & theirs.any(-1)).any())
    if not {"q", "k"} & {*changed} and ka.numel():
        a, b, seen = a[:, :, ka], b[:, :, kb], own[:, :, ka] & theirs[:, :, kb]
        mine = _centred(one.q[:, ta] @ one.k[:, ka].mT, seen)
        other_products = _centred(other.q[turn][:, tb] @ other.k[turn][:, kb].mT, seen)
        before = _factor(mine, other_products, limit)
        other_products = other_products / before
        scale = one.scale or (other.scale or 0.0) * before or _factor(mine, _centred(a.log(), seen))
        logs = _centred((b / a).log(), seen) - scale * (other_products - mine)
        least = 10 * eps * (2 + float((scale * mine).abs().max()))
        products = mine if other.scale and not one.scale else other_products
        more = float((logs * products).sum()) / float(products.square().sum().clamp_min(1e-300))
        if float(logs.abs().max()) > least and float((logs - more * products).abs().max()) <= least:
            values = (scale - more, scale) if products is mine else (scale, scale + more)
            yield "scale", values[0], values[1]
        else:
            masked = masked or float(logs.abs().max()) > least
    if masked:
        causal = [each.arguments.get("is_causal") for each in (one, other)]
        given = any(each.arguments.get("masked", True) for each in (one, other))
        yield ("attn_mask", None, None) if given or causal[0] == causal[1] else ("is_causal", causal[0], causal[1])


def _unmasked(heads: Heads, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The weights that keys would have beside those that are seen, if no mask hid them, `[h, t, s]`."""
    weights, products = heads.weights[:, queries][:, :, keys], heads.q[:, queries] @ heads.k[:, keys].mT
    seen = weights > _SEEN
    scores = products * (heads.scale or _factor(_centred(products, seen), _centred(weights.log(), seen)))
    return (scores - scores.where(seen, -torch.inf).logsumexp(-1, keepdim=True)).exp()


def _centred(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Each row less the mean of its elements that are seen; 0 elsewhere."""
    x = x.where(seen, 0)
    return (x - x.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).where(seen, 0)
