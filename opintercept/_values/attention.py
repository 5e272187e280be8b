"""Reads the operands of torch's attention operators, and computes the weights that those do not return.

Invariant: nothing here writes to an operand or draws a random number, and the scores are never in memory as a
whole: callers compute them in the pieces that `Attention.pieces` yields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept._core.tensors import is_strided
from opintercept._core.text import short_name
from opintercept._ops.shapes import broadcast

PIECE = 1 << 23
"""How many scores are computed at a time: 32 MiB of float32."""

# These take and return [b, s, h, d], the others [*b, h, s, d].
_HEADS_LAST = (
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
)

# Here `is_causal` aligns the last query with the last key; elsewhere it aligns the first with the first.
_LOWER_RIGHT = (
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)

_FUSED = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)

FORWARD = frozenset(
    (
        *_HEADS_LAST,
        *_FUSED,
        "_cudnn_attention_forward",
        "_scaled_dot_product_attention_math",
        "_scaled_dot_product_attention_math_for_mps",
        "_triton_scaled_dot_attention",
        "scaled_dot_product_attention",
    )
)

BACKWARD = frozenset(f"{name}_backward" for name in _FUSED)

# An operator that gets one of these computes something else than `Attention.weights`.
_UNKNOWN = (
    "alibi_slopes",
    "block_table",
    "cu_seqlens_k",
    "cu_seqlens_q",
    "cum_seq_k",
    "cum_seq_q",
    "k_descale",
    "q_descale",
    "seqlen_k",
    "seqused_k",
    "v_descale",
    "window_size",
    "window_size_left",
    "window_size_right",
)


class Attention(NamedTuple):
    """The operands of one attention call."""

    query: torch.Tensor  # [*b, h, s_q, d]
    key: torch.Tensor  # [*b, h_kv, s_k, d]; h is a multiple of h_kv, and neighbouring heads share a key
    value: torch.Tensor  # [*b, h_kv, s_k, d_v]
    mask: torch.Tensor | None  # [*b, h, s_q, s_k]: whether a key takes part, or what is added to the score
    causal: int | None  # query i sees the keys up to i + causal; None: all of them
    scale: float  # multiplies the products of queries and keys
    dropout: float  # its probability
    heads_last: bool  # whether the operator's own operands and output are [b, s, h, d]
    grad: torch.Tensor | None  # in backward, the gradient of the output
    out: torch.Tensor | None  # in backward, the output

    def pieces(self, heads: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Cut the scores of these heads and rows into pieces of about `PIECE`; yield a slice of each."""
        row = max(1, math.prod(self.query.shape[:-3]) * self.key.shape[-2])
        some_heads = max(1, PIECE // (row * max(1, len(rows))))
        some_rows = max(1, len(rows) if row * len(rows) <= PIECE else PIECE // row)
        for head in range(0, len(heads), some_heads):
            for first in range(0, len(rows), some_rows):
                yield slice(head, head + some_heads), slice(first, first + some_rows)

    def scores(self, heads: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """`scale * query @ key.T + mask` for these heads and rows, -inf where a key is masked."""
        query = take(take(self.query, -3, heads), -2, rows).to(dtype)
        key = take(self.key, -3, self.shared(self.key, heads)).to(dtype)
        scores = (query * self.scale) @ key.mT
        if self.mask is not None:
            mask = take(take(self.mask, -3, heads), -2, rows)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.causal is not None:
            row = _there(rows, scores.device).unsqueeze(-1)
            hidden = torch.arange(scores.shape[-1], device=scores.device) > row + self.causal
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def weights(self, heads: Sequence[int], rows: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The softmax of the scores. A query that sees no key gets zeros, as in torch."""
        weights: torch.Tensor = torch.ops.aten._safe_softmax(self.scores(heads, rows, dtype), -1)
        return weights

    def detached(self) -> Attention:
        """The operands detached from the program's graph: at function level a hook runs above autograd."""
        return Attention._make(v.detach() if isinstance(v, torch.Tensor) else v for v in self)

    def shared(self, tensor: torch.Tensor, heads: Sequence[int]) -> Sequence[int]:
        """The heads of `tensor`, the key or the value, that these heads of the query use."""
        group = self.query.shape[-3] // tensor.shape[-3]
        return heads if group == 1 else [head // group for head in heads]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Turn autocast off, so that products are computed in the dtypes of their operands."""
    # Leaving the outermost autocast context empties the cache, so do not enter one where autocast is off.
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def product_of(call: OpCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The left operand and the output of a batched product `[*b, m, k] @ [*b, k, n]`; None for any other call."""
    lhs, rhs, output = call.operand("lhs"), call.operand("rhs"), call.output
    if lhs is None or rhs is None or not isinstance(output, torch.Tensor):
        return None
    try:
        if lhs.is_nested or rhs.is_nested or lhs.dim() < 3 or rhs.dim() < 3 or lhs.shape[-1] != rhs.shape[-2]:
            return None
        return (lhs, output) if output.shape[-2:] == (lhs.shape[-2], rhs.shape[-1]) else None
    except Exception:  # raised by a tensor subclass or a symbolic size
        return None


def take(tensor: torch.Tensor, dim: int, index: Sequence[int]) -> torch.Tensor:
    """Select entries of a dimension, as a view if they are neighbours."""
    if isinstance(index, range) and index.step == 1:
        return tensor.narrow(dim, index.start, len(index))
    return tensor.index_select(dim, _there(index, tensor.device))


def _there(index: Sequence[int], device: torch.device) -> torch.Tensor:
    """Whole numbers on a device, without waiting for it."""
    return torch.tensor(index, dtype=torch.long, device="cpu").to(device, non_blocking=True)


def attention_of(call: OpCall) -> Attention | str | None:
    """The operands of an attention call, forward or backward.

    A string that says why, if they are not known; None if the call is no attention.
    """
    name = short_name(call.op)
    if name not in FORWARD and name not in BACKWARD:
        if "attention" not in name.lower():
            return None
        if name == "multi_head_attention_forward":
            return 'its products are hidden at function level; level="dispatch" sees them'
        return "its queries and keys are not known"
    return attention_from(name, arguments(call))


def attention_from(name: str, bound: dict[str, Any]) -> Attention | str:
    """`attention_of` by the operator's name and its arguments, by their names in the schema."""
    unknown = [word for word in _UNKNOWN if bound.get(word) is not None]
    if unknown:
        return f"{unknown[0]} is given"
    query, key, value = ((bound[word] if word in bound else bound[word[0]]) for word in ("query", "key", "value"))
    if not all(is_strided(tensor) for tensor in (query, key, value)):
        return "its operands are nested"
    if name in _HEADS_LAST:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    query, key, value = (tensor.unsqueeze(0) if tensor.dim() == 2 else tensor for tensor in (query, key, value))
    mask = next((bound[word] for word in ("attn_mask", "attn_bias", "bias") if bound.get(word) is not None), None)
    causal, mask = _causal(name, bound, mask, key.shape[-2] - query.shape[-2])
    # Unless heads are grouped, query and key broadcast as in a product.
    lead = broadcast(query.shape[:-3], key.shape[:-3])
    query = query.expand(*lead, max(query.shape[-3], key.shape[-3]), *query.shape[-2:])
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    scale = bound.get("scale")
    return Attention(
        query,
        key,
        value,
        mask,
        causal,
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        bound.get("dropout_p") or 0.0,
        name in _HEADS_LAST,
        bound.get("grad_out", bound.get("grad_out_")),
        bound.get("out") if name in BACKWARD else None,
    )


def _causal(name: str, bound: dict[str, Any], mask: Any, lower_right: int) -> tuple[int | None, Any]:
    """Return `Attention.causal` and the mask to apply besides."""
    if hasattr(mask, "variant") and hasattr(mask, "seq_len_kv"):  # torch.nn.attention.bias.CausalBias has no values
        return (0 if int(mask.variant) == 1 else lower_right), None
    kind = bound.get("custom_mask_type")
    if kind is not None:  # _efficient_attention_forward: 1 aligns at the top left, 2 at the bottom right
        return (None, 0, lower_right)[kind], mask
    if not bound.get("is_causal"):
        return None, mask
    return (lower_right if name in _LOWER_RIGHT else 0), mask


def arguments(call: OpCall) -> dict[str, Any]:
    """The call's arguments, defaults included, by their names in the operator's schema."""
    schema = getattr(call.func, "_schema", None) or torch.ops.aten.scaled_dot_product_attention.default._schema
    bound = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in schema.arguments), call.args, strict=False))
    return bound | call.kwargs
