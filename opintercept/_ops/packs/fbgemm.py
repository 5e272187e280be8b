"""FBGEMM's operators for generative models, and MSLK, to which they have moved. A weight is `[n, k]`.

The schemas are those of `fbgemm_gpu/experimental/gen_ai/src/quantize` of FBGEMM 1.3 and later, and of
`csrc/gemm/gemm_ops.cpp` of MSLK.
"""

from __future__ import annotations

from typing import Any

from opintercept._ops.packs._formulas import batched, grouped, lists, rows
from opintercept._ops.register import offer_ops


def _offer(names: str, arguments: str, **declared: Any) -> None:
    for library in ("fbgemm", "mslk"):
        offer_ops(" ".join(f"{library}::{name}" for name in names.split()), arguments, layout="nk", **declared)


_QUANTISED = "lhs:XQ rhs:WQ scale:x_scale scale:w_scale"

_offer("bf16_fast_gemv", "lhs:X rhs:W", gemm=lambda X, W, **_: batched(X, W))
_offer("bf16fp8bf16_fast_gemv", "lhs:X rhs:W scale:w_scale", gemm=lambda X, W, **_: batched(X, W))
_offer("fp8fp8bf16_fast_gemv", "lhs:X rhs:W scale:x_scale scale:w_scale", gemm=lambda X, W, **_: batched(X, W))
_offer("bf16x9_gemm", "lhs:A rhs:B")
_offer("i8i8bf16 f8f8bf16_tensorwise", "lhs:XQ rhs:WQ")
_offer("i8i8bf16_dynamic f8f8bf16 f8f8bf16_lite", "lhs:XQ rhs:WQ scale:scale")
_offer("f8f8bf16_cublas", "lhs:A rhs:B scale:Ainvs scale:Binvs")
_offer(
    "f8f8bf16_rowwise f8f8f16_rowwise f8f8bf16_rowwise_preshuffle f8f8f16_rowwise_preshuffle f8f8bf16_rowwise_batched",
    f"{_QUANTISED} bias:bias",
    gemm=lambda XQ, WQ, **_: batched(XQ, WQ),
)
_offer("f8f8bf16_rowwise_out", f"{_QUANTISED} bias:bias out:output", gemm=lambda XQ, WQ, **_: batched(XQ, WQ))
# The weights of the last four are of 4 or 6 bits.
_offer(
    "f8f8bf16_blockwise f8f8bf16_groupwise mx8mx4bf16 mx8mx6bf16 f8i4bf16_rowwise f8i4bf16_shuffled",
    _QUANTISED,
    gemm=lambda XQ, WQ, **_: batched(XQ, WQ),
)
_offer("f4f4bf16", _QUANTISED, gemm=lambda XQ, WQ, **_: batched(XQ, WQ, packed=2))  # two values in a byte
_offer(
    "bf16i4bf16_rowwise bf16i4bf16_shuffled", "lhs:X rhs:W scale:w_scale_group", gemm=lambda X, W, **_: batched(X, W)
)
_offer(
    "bf16i4bf16_rowwise_batched bf16i4bf16_shuffled_batched",
    "lhs:X rhs:WQ scale:w_scale",
    gemm=lambda X, WQ, **_: batched(X, WQ),
)

# In groups: lists of matrices, or one matrix each with the rows of all groups, of which the device knows the sizes.
_offer("bf16bf16bf16_grouped bf16bf16bf16_grouped_cat", "lhs:X rhs:W", flops=lambda X, W, **_: lists(X, W))
_offer("f8f8bf16_rowwise_grouped f8f8bf16_rowwise_grouped_cat", _QUANTISED, flops=lambda XQ, WQ, **_: lists(XQ, WQ))
_offer("f4f4bf16_grouped", _QUANTISED, flops=lambda XQ, WQ, **_: lists(XQ, WQ, packed=2))
_offer(
    "bf16bf16bf16_grouped_dynamic bf16bf16bf16_grouped_stacked bf16bf16bf16_grouped_grad",
    "lhs:X rhs:W",
    flops=lambda X, W, **_: grouped(X, W),
)
_offer("bf16bf16bf16_grouped_wgrad", "lhs:X rhs:W", flops=lambda X, W, **_: rows(X, W[-1]))
_offer(
    "f8f8bf16_rowwise_grouped_stacked f8f8bf16_rowwise_grouped_dynamic f8f8bf16_rowwise_grouped_stacked_preshuffle"
    " f8f8bf16_rowwise_grouped_dynamic_preshuffle f8f8bf16_groupwise_grouped f8f8bf16_groupwise_grouped_preshuffle"
    " f8f8bf16_rowwise_grouped_mm f8f8bf16_rowwise_grouped_mm_preshuffle mx8mx8bf16_grouped_mm",
    _QUANTISED,
    flops=lambda XQ, WQ, **_: grouped(XQ, WQ),
)
_offer(
    "f4f4bf16_grouped_stacked f4f4bf16_grouped_mm f4f4bf16_ultra_grouped_mm",
    _QUANTISED,
    flops=lambda XQ, WQ, **_: grouped(XQ, WQ, packed=2, rhs_packed=2),
)
_offer(
    "mx8mx4bf16_grouped_mm f8i4bf16_shuffled_grouped",
    _QUANTISED,
    flops=lambda XQ, WQ, **_: grouped(XQ, WQ, rhs_packed=2),
)
_offer(
    "bf16i4bf16_shuffled_grouped",
    "lhs:X rhs:WQ scale:w_scale_group",
    flops=lambda X, WQ, **_: grouped(X, WQ, rhs_packed=2),
)
