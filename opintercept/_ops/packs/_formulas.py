"""Shapes and FLOPs that several libraries' operators have in common, from the sizes of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Sizes = Sequence[int]
Gemm = tuple[int, int, int, int]


def linear(lhs: Sizes, n: int, k: int | None = None) -> Gemm:
    """`[*b, k] @ [k, n]`. `k` is the last size of lhs, unless that is packed."""
    return 1, math.prod(lhs[:-1]), n, lhs[-1] if k is None else k


def batched(lhs: Sizes, rhs: Sizes, packed: int = 1) -> Gemm:
    """`[*b, m, k] @ [*b, n, k].T`, with `packed` values in an element of lhs. One product without a batch in rhs."""
    if len(rhs) < 3:
        return linear(lhs, rhs[0], lhs[-1] * packed)
    return math.prod(rhs[:-2]), lhs[-2], rhs[-2], lhs[-1] * packed


def rows(lhs: Sizes, n: int, packed: int = 1) -> int:
    """FLOPs of a grouped product: each row of lhs, `[..., k]`, is multiplied with one group's `[k, n]`.

    Which group, the device knows, and the sum does not depend on it.
    """
    return 2 * math.prod(lhs) * packed * n


def grouped(lhs: Sizes, rhs: Sizes, packed: int = 1, rhs_packed: int = 1) -> int:
    """FLOPs of a product in groups, of which rhs has one matrix each, `[k, n]` or `[n, k]`: whichever has lhs's k.

    lhs is `[m, k]`, whose rows are in groups; `[g, m, k]`; or, with a matrix as rhs, `[m, k]` grouped along k. Elements
    hold `packed` and `rhs_packed` values along k.
    """
    k = lhs[-1] * packed
    n = rhs[-1] if rhs[-2] * rhs_packed == k and rhs[-1] * rhs_packed != k else rhs[-2]
    if len(lhs) == 3 and len(rhs) == 2:
        lhs = lhs[1:]
    return rows(lhs, n, packed)


def lists(lhs: Sequence[Sizes], rhs: Sequence[Sizes], packed: int = 1) -> int:
    """FLOPs of the products of two lists of matrices, `[m, k]` and `[n, k]`."""
    return sum(rows(x, w[0], packed) for x, w in zip(lhs, rhs, strict=True))


def experts(tokens: int, up: Sizes, down: Sizes, chosen: int) -> int:
    """FLOPs of a layer of experts, `[e, n, k]` and `[e, k, n / 2]`: each token goes through both of `chosen` ones."""
    return 2 * tokens * chosen * (math.prod(up[1:]) + math.prod(down[1:]))


def unknown(*_: Any, **__: Any) -> int:
    """What arguments do not tell: the device knows how many rows or keys there are, or how a value is packed."""
    raise NotImplementedError


def attention(
    query: str, key: str, value: str, products: int = 2, ragged: Sequence[str] = (), never: Sequence[str] = ()
) -> Callable[..., int]:
    """Return the formula for the FLOPs of an attention, 2 products forward and 5 backward, on `[b, s, h, d]`.

    As for torch's own, masks and causality do not lower the count. The arguments are names of parameters. Those in
    `ragged` have the offsets of sequences that lie one after the other, as `[s, h, d]`: only the device knows how long
    each is, so that the count is unknown unless there is only one. With those in `never` it is unknown too: lengths on
    the device, pages, other operands.
    """

    def flops(**arguments: Any) -> int:
        offsets = [arguments[name] for name in ragged if arguments.get(name) is not None]
        if any(arguments.get(name) is not None for name in never) or any(sizes != (2,) for sizes in offsets):
            raise NotImplementedError
        *batch, s_q, heads, d = arguments[query]
        *_, s_k, _, _ = arguments[key]
        d_v = arguments[value][-1]
        pairs = math.prod(batch) * heads * s_q * s_k
        return int(2 * pairs * (d + d_v if products == 2 else 3 * d + 2 * d_v))

    return flops


def flash_attention(products: int = 2) -> Callable[..., int]:
    """Return the formula for FlashAttention and for what has its parameters, as `attention` does."""
    # A cache of keys in pages, lengths on the device, keys to append, and the part of a query that multiplies values.
    unknown = ("block_table", "page_table", "seqused_q", "seqused_k", "k_new", "q_v", "kv_batch_idx", "leftpad_k")
    return attention("q", "k", "v", products, ragged=("cu_seqlens_q", "cu_seqlens_k"), never=unknown)
