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
from opintercept.runs.align.tokens import distances, row_error, row_errors, same_tokens, usual_error
from opintercept.runs.align.weights import factors_of, shape_of, tensor_of, weight_of
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

_MOST = 1 << 25  # elements of the weights that are in memory at once
_SEEN = 1e-30  # the least weight of a key that is not masked
_MATTERS = 1e-12  # that of one whose mask matters
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
    scale: float | None  # None if the program multiplies by it outside
    arguments: dict[str, Any]
    rounding: float | None  # how far the output is from that of its operands, in units of their rounding

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
        if "dropout_p" in self.arguments:
            return float(self.arguments["dropout_p"])
        sums = self.weights.sum(-1)
        return None if bool(((sums - 1).abs() > 0.05).logical_and(sums > 0).any()) else 0.0


@dataclass(frozen=True, slots=True)
class AttentionErrors:
    """How two attentions differ."""

    error: float  # the largest relative error of a row of the outputs
    usual: float  # their root mean square
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
    own = None
    if not found.dropout:
        exact, sizes = weights @ v, abs(found.scale) * (q.abs() @ k.abs().mT)
        device = call.record.lhs.device.partition(":")[0] if call.record.lhs is not None else "cpu"
        limits = rounding.of_attention(scores, sizes, weights, v, q.size(-1), found.query.dtype, out.dtype, device)
        own = worst(out.double().reshape(exact.shape), exact, limits)
    given = {"dropout_p": found.dropout, "is_causal": bound.get("is_causal"), "masked": found.mask is not None}
    out = out.double().reshape(*q.shape[:3], -1)
    return Heads(_folded(q), _folded(k), _folded(v), _diagonal(weights), _folded(out), float(found.scale), given, own)


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
    of_queries = [each.k.size(1) == each.q.size(1) for each in (one, other)]  # in self-attention without a cache
    every_key = rows is None and one.v.shape == other.v.shape
    if rows is not None:
        one, other = one.only(queries=rows[0]), other.only(queries=rows[1])
    turns = [_permutation(one.q, other.q, limit, scaled=True), _permutation(one.out, other.out, limit)]
    if every_key:
        turns += [_permutation(one.v, other.v, limit), _permutation(one.k, other.k, limit, scaled=True)]
    other = other.only(heads=next((each for each in turns if each is not None), _ALL))
    error, largest = row_error(one.out, other.out), float((other.out - one.out).abs().max()) if one.out.numel() else 0.0
    found = AttentionErrors(error, usual_error(row_errors(one.out, other.out)), largest)
    if error <= limit:
        return found
    keys = torch.arange(one.k.size(1)), torch.arange(other.k.size(1))
    if not every_key:
        keys = (rows or keys) if all(of_queries) else _keys(one, other)
    errors = _operands(one.only(keys=keys[0]), other.only(keys=keys[1]), limit)
    changed = tuple(errors)
    arguments = [*_arguments(one, other, keys, limit, eps, changed)]
    names = *changed, *(name for name, *_ in arguments)
    return replace(found, changed=names, arguments=tuple(arguments), operand=max(errors.values(), default=None))


def _keys(one: Heads, other: Heads) -> Rows:
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


def _permutation(x: torch.Tensor, y: torch.Tensor, limit: float, *, scaled: bool = False) -> torch.Tensor | None:
    """For each head of `x`, the one of `y` that is equal, but for a factor if it is `scaled`; None if there is none."""

    def error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return row_error(mine, theirs / _factor(mine, theirs) if scaled else theirs)

    if error(x, y) <= limit:
        return torch.arange(len(x))
    errors = torch.tensor([[error(mine, theirs) for theirs in y] for mine in x])
    best, turn = errors.min(1)
    return turn if bool((best <= limit).all()) else None


def _operands(one: Heads, other: Heads, limit: float) -> dict[str, float]:
    """The errors of q, k and v as far as they differ; of `"heads"` if only their order does.

    Neither q nor k differs if the scores do not, as where a program rotates other elements of a head.
    """
    pairs = {"q": (one.q, other.q), "k": (one.k, other.k), "v": (one.v, other.v)}
    errors = {name: row_error(x, _scaled(y, x, name)) for name, (x, y) in pairs.items()}
    if min(errors["q"], errors["k"]) > limit:
        scores, others = one.q @ one.k.mT, other.q @ other.k.mT
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


def _share(x: torch.Tensor, y: torch.Tensor, of: torch.Tensor) -> float:
    """How much of `x` is in `of`, beside some of `y`, by least squares; 0 if the two cannot be told apart."""
    xx, xy, yy = float((x * x).sum()), float((x * y).sum()), float((y * y).sum())
    independent = xx * yy - xy * xy
    found = float((x * of).sum()) * yy - float((y * of).sum()) * xy
    return found / independent if independent > 1e-6 * xx * yy else 0.0


def _arguments(
    one: Heads, other: Heads, keys: Rows, limit: float, eps: float, changed: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    """The arguments that differ: what logarithms of the weights are beside the products of queries and keys."""
    if one.dropout != other.dropout:
        yield "dropout_p", one.dropout, other.dropout
        return
    if changed == ("heads",):
        return
    own, theirs = (each.weights > _SEEN for each in (one, other))
    one, other = one.only(keys=keys[0]), other.only(keys=keys[1])
    a, b = one.weights, other.weights
    rest = own.sum(-1) - (a > _SEEN).sum(-1) + theirs.sum(-1) - (b > _SEEN).sum(-1)
    apart = ((a > _SEEN) != (b > _SEEN)) & (torch.maximum(a, b) > _MATTERS)
    apart &= torch.minimum(_unmasked(one), _unmasked(other)) > _MATTERS  # others are too small to be seen
    masked = bool(((apart.any(-1) | (rest > 0)) & own.any(-1) & theirs.any(-1)).any())
    if not {"q", "k"} & {*changed} and a.numel():
        seen = (a > _SEEN) & (b > _SEEN)
        raw = one.q @ one.k.mT, other.q @ other.k.mT
        mine, other_products = (_centred(each, seen) for each in raw)
        before = _factor(mine, other_products, limit)
        other_products = other_products / before
        known = one.scale or (other.scale or 0.0) * before
        gap, logits = other_products - mine, _centred(a.log(), seen)
        scale = known or _factor(mine, logits)
        products = mine if other.scale and not one.scale else other_products
        logs = _centred((b / a).log(), seen) - scale * gap
        if not known:  # what a program adds to the products moves the estimate; in `b / a` it cancels
            logs = logs - _share(gap, products, logs) * gap
        largest = max(float(each.where(seen, 0).abs().max()) for each in raw)  # is what a program rounds
        least = 10 * eps * (2 + abs(scale) * largest + float((logits - scale * mine).abs().max()))
        more = float((logs * products).sum()) / float(products.square().sum().clamp_min(1e-300))
        if float(logs.abs().max()) > least and float((logs - more * products).abs().max()) <= least:
            yield ("scale", scale - more, scale) if products is mine else ("scale", scale, scale + more)
        else:
            masked = masked or float(logs.abs().max()) > least
    if masked:
        causal = [each.arguments.get("is_causal") for each in (one, other)]
        given = any(each.arguments.get("masked", True) for each in (one, other))
        yield ("attn_mask", None, None) if given or causal[0] == causal[1] else ("is_causal", causal[0], causal[1])


def _unmasked(heads: Heads) -> torch.Tensor:
    """The weights that keys would have beside those that are seen, if no mask hid them, `[h, t, s]`."""
    seen, products = heads.weights > _SEEN, heads.q @ heads.k.mT
    scores = products * (heads.scale or _factor(_centred(products, seen), _centred(heads.weights.log(), seen)))
    return (scores - scores.where(seen, -torch.inf).logsumexp(-1, keepdim=True)).exp()


def _centred(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Each row less the mean of its elements that are seen; 0 elsewhere."""
    x = x.where(seen, 0)
    return (x - x.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).where(seen, 0)
