"""FlashInfer: products of low precision, attention and experts, which are no operators of the dispatcher on purpose.

The signatures are those of FlashInfer 0.2 to 0.7: `flashinfer/gemm`, `grouped_mm`, `prefill.py`, `decode.py`, `mla` and
`fused_moe`. Functions that a version lacks are ignored.
"""

from __future__ import annotations

from typing import Any

from opintercept._ops.packs._formulas import Sizes, batched, experts, rows
from opintercept._ops.register import offer_op


def _unknown(**_: Any) -> int:
    raise NotImplementedError  # the device knows how many rows or keys there are


def _in_groups(packed: int = 1) -> Any:
    return lambda a, b, **_: rows(a, b[1], packed)


for _name in ("mm_bf16", "tgv_gemm_sm100"):
    offer_op(f"flashinfer.gemm:{_name}", lhs="a", rhs="b", bias="bias", out="out")
for _name in ("bmm_bf16", "bmm_fp8", "bmm_mxfp8"):
    offer_op(f"flashinfer.gemm:{_name}", lhs="A", rhs="B", out="out", scales=("A_scale", "B_scale"))
# Its weight is `[k, n]`, or prepared as `[k / 128, n, 128]`.
offer_op(
    "flashinfer.gemm:mm_fp8", lhs="a", rhs="b", out="out", scales="alpha", gemm=lambda a, b, **_: (1, a[0], b[1], a[1])
)
offer_op("flashinfer.gemm:mm_mxfp8", lhs="a", rhs="b", out="out", scales=("a_descale", "b_descale"))
offer_op(
    "flashinfer.gemm:mm_fp4",
    lhs="a",
    rhs="b",
    out="out",
    scales=("a_descale", "b_descale", "alpha"),
    gemm=lambda a, b, **_: (1, a[0], b[1], 2 * a[1]),
)
for _name in ("gemm_fp8_nt_groupwise", "gemm_fp8_nt_blockscaled"):
    offer_op(
        f"flashinfer.gemm:{_name}",
        lhs="a",
        rhs="b",
        out="out",
        scales=("a_scale", "b_scale"),
        layout="nk",
        gemm=lambda a, b, **_: batched(a, b),
    )
offer_op(
    "flashinfer.gemm:fp8_blockscale_gemm_sm90",
    lhs="input",
    rhs="weight",
    out="out",
    scales=("input_scale", "weight_scale"),
    layout="nk",
)
for _name, _flops in (
    ("gemm:group_gemm_fp8_nt_groupwise", _in_groups()),
    ("gemm:group_gemm_fp8_nt_groupwise_contiguous", _in_groups()),
    ("gemm:group_deepgemm_fp8_nt_groupwise", _in_groups()),
    ("gemm:group_gemm_mxfp8_mxfp4_nt_groupwise", _in_groups()),
    ("gemm:group_gemm_nvfp4_nt_groupwise", _in_groups(packed=2)),
    ("gemm:batch_deepgemm_fp8_nt_groupwise", _unknown),
    ("grouped_mm:grouped_mm_bf16", _in_groups()),
    ("grouped_mm:grouped_mm_fp8", _in_groups()),
    ("grouped_mm:grouped_mm_mxfp8", _in_groups()),
    ("grouped_mm:grouped_mm_fp4", _in_groups(packed=2)),
):
    offer_op(
        f"flashinfer.{_name}",
        lhs="a",
        rhs="b",
        out="out",
        scales=("a_scale", "b_scale", "a_descale", "b_descale", "alpha"),
        layout="nk",
        flops=_flops,
    )
offer_op(
    "flashinfer.gemm:SegmentGEMMWrapper.run",
    lhs="x",
    rhs="weights",
    out="out",
    layout=None,
    flops=lambda x, weights, weight_column_major, **_: rows(x, weights[1 if weight_column_major else 2]),
)


def _prefill(q: Sizes, k: Sizes, v: Sizes, kv_layout: str = "NHD", **_: Any) -> int:
    """`[s, h, d]` of one sequence, or `[h, s, d]` of keys and values."""
    return 2 * q[0] * q[1] * k[0 if kv_layout == "NHD" else 1] * (q[-1] + v[-1])


for _name, _flops in (
    ("prefill:single_prefill_with_kv_cache", _prefill),
    ("decode:single_decode_with_kv_cache", lambda q, **others: _prefill((1, *q), **others)),
    ("prefill:BatchPrefillWithRaggedKVCacheWrapper.run", _unknown),
):
    offer_op(f"flashinfer.{_name}", lhs="q", rhs="k", value="v", flops=_flops, family="attention", opaque=True)
for _name, _query, _cache in (
    ("prefill:BatchPrefillWithPagedKVCacheWrapper.run", "q", "paged_kv_cache"),
    ("decode:BatchDecodeWithPagedKVCacheWrapper.run", "q", "paged_kv_cache"),
    ("mla:BatchMLAPagedAttentionWrapper.run", "q_nope", "ckv_cache"),
    ("prefill:trtllm_batch_context_with_kv_cache", "query", "kv_cache"),
    ("decode:trtllm_batch_decode_with_kv_cache", "query", "kv_cache"),
    ("decode:xqa_batch_decode_with_kv_cache", "query", "kv_cache"),
    ("mla:trtllm_batch_decode_with_kv_cache_mla", "query", "kv_cache"),
    ("mla:xqa_batch_decode_with_kv_cache_mla", "query", "kv_cache"),
):
    offer_op(f"flashinfer.{_name}", lhs=_query, rhs=_cache, out="out", flops=_unknown, family="attention", opaque=True)


def _experts(
    input: Sizes, token_selected_experts: Sizes, fc1_expert_weights: Sizes, fc2_expert_weights: Sizes, **_: Any
) -> int:
    if fc1_expert_weights[-1] != input[-1]:
        raise NotImplementedError  # one of them is packed
    return experts(input[0], fc1_expert_weights, fc2_expert_weights, token_selected_experts[1])


offer_op(
    "flashinfer.fused_moe:cutlass_fused_moe",
    lhs="input",
    rhs="fc1_expert_weights",
    scales="quant_scales",
    layout="nk",
    flops=_experts,
    opaque=True,
)
for _name in (
    "trtllm_bf16_moe",
    "trtllm_bf16_routed_moe",
    "trtllm_fp8_per_tensor_scale_moe",
    "trtllm_fp8_per_channel_scale_moe",
    "trtllm_fp8_block_scale_moe",
    "trtllm_fp4_block_scale_moe",
):
    offer_op(f"flashinfer.fused_moe:{_name}", lhs="hidden_states", rhs="gemm1_weights", flops=_unknown, opaque=True)
