"""FlashInfer: products of low precision, attention and experts, which are no operators of the dispatcher on purpose.

The signatures are those of FlashInfer 0.2 to 0.7: `flashinfer/gemm`, `grouped_mm`, `prefill.py`, `decode.py`, `mla` and
`fused_moe`. Functions that a version lacks are ignored.
"""

from __future__ import annotations

from typing import Any

from opintercept._ops.packs._formulas import Sizes, batched, experts, rows, unknown
from opintercept._ops.register import offer_ops


def _in_groups(packed: int = 1) -> Any:
    return lambda a, b, **_: rows(a, b[1], packed)


offer_ops("flashinfer.gemm:mm_bf16 flashinfer.gemm:tgv_gemm_sm100", "lhs:a rhs:b bias:bias out:out")
offer_ops(
    "flashinfer.gemm:bmm_bf16 flashinfer.gemm:bmm_fp8 flashinfer.gemm:bmm_mxfp8",
    "lhs:A rhs:B out:out scale:A_scale scale:B_scale",
)
# Its weight is `[k, n]`, or prepared as `[k / 128, n, 128]`.
offer_ops("flashinfer.gemm:mm_fp8", "lhs:a rhs:b out:out scale:alpha", gemm=lambda a, b, **_: (1, a[0], b[1], a[1]))
offer_ops("flashinfer.gemm:mm_mxfp8", "lhs:a rhs:b out:out scale:a_descale scale:b_descale")
offer_ops(
    "flashinfer.gemm:mm_fp4",
    "lhs:a rhs:b out:out scale:a_descale scale:b_descale scale:alpha",
    gemm=lambda a, b, **_: (1, a[0], b[1], 2 * a[1]),
)
offer_ops(
    "flashinfer.gemm:gemm_fp8_nt_groupwise flashinfer.gemm:gemm_fp8_nt_blockscaled",
    "lhs:a rhs:b out:out scale:a_scale scale:b_scale",
    layout="nk",
    gemm=lambda a, b, **_: batched(a, b),
)
offer_ops(
    "flashinfer.gemm:fp8_blockscale_gemm_sm90",
    "lhs:input rhs:weight out:out scale:input_scale scale:weight_scale",
    layout="nk",
)
for _names, _flops in (
    (
        "flashinfer.gemm:group_gemm_fp8_nt_groupwise flashinfer.gemm:group_gemm_fp8_nt_groupwise_contiguous"
        " flashinfer.gemm:group_deepgemm_fp8_nt_groupwise flashinfer.gemm:group_gemm_mxfp8_mxfp4_nt_groupwise"
        " flashinfer.grouped_mm:grouped_mm_bf16 flashinfer.grouped_mm:grouped_mm_fp8"
        " flashinfer.grouped_mm:grouped_mm_mxfp8",
        _in_groups(),
    ),
    ("flashinfer.gemm:group_gemm_nvfp4_nt_groupwise flashinfer.grouped_mm:grouped_mm_fp4", _in_groups(packed=2)),
    ("flashinfer.gemm:batch_deepgemm_fp8_nt_groupwise", unknown),
):
    offer_ops(
        _names,
        "lhs:a rhs:b out:out scale:a_scale scale:b_scale scale:a_descale scale:b_descale scale:alpha",
        layout="nk",
        flops=_flops,
    )
offer_ops(
    "flashinfer.gemm:SegmentGEMMWrapper.run",
    "lhs:x rhs:weights out:out",
    layout=None,
    flops=lambda x, weights, weight_column_major, **_: rows(x, weights[1 if weight_column_major else 2]),
)


def _prefill(q: Sizes, k: Sizes, v: Sizes, kv_layout: str = "NHD", **_: Any) -> int:
    """`[s, h, d]` of one sequence, or `[h, s, d]` of keys and values."""
    return 2 * q[0] * q[1] * k[0 if kv_layout == "NHD" else 1] * (q[-1] + v[-1])


for _name, _flops in (
    ("prefill:single_prefill_with_kv_cache", _prefill),
    ("decode:single_decode_with_kv_cache", lambda q, **others: _prefill((1, *q), **others)),
    ("prefill:BatchPrefillWithRaggedKVCacheWrapper.run", unknown),
):
    offer_ops(f"flashinfer.{_name}", "lhs:q rhs:k value:v", flops=_flops, family="attention")
for _names, _operands in (
    (
        "flashinfer.prefill:BatchPrefillWithPagedKVCacheWrapper.run"
        " flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run",
        "lhs:q rhs:paged_kv_cache",
    ),
    ("flashinfer.mla:BatchMLAPagedAttentionWrapper.run", "lhs:q_nope rhs:ckv_cache"),
    (
        "flashinfer.prefill:trtllm_batch_context_with_kv_cache flashinfer.decode:trtllm_batch_decode_with_kv_cache"
        " flashinfer.decode:xqa_batch_decode_with_kv_cache flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla"
        " flashinfer.mla:xqa_batch_decode_with_kv_cache_mla",
        "lhs:query rhs:kv_cache",
    ),
):
    offer_ops(_names, f"{_operands} out:out", flops=unknown, family="attention")


def _experts(
    input: Sizes, token_selected_experts: Sizes, fc1_expert_weights: Sizes, fc2_expert_weights: Sizes, **_: Any
) -> int:
    if fc1_expert_weights[-1] != input[-1]:
        raise NotImplementedError  # one of them is packed
    return experts(input[0], fc1_expert_weights, fc2_expert_weights, token_selected_experts[1])


offer_ops(
    "flashinfer.fused_moe:cutlass_fused_moe",
    "lhs:input rhs:fc1_expert_weights scale:quant_scales",
    layout="nk",
    flops=_experts,
    opaque=True,
)
offer_ops(
    "flashinfer.fused_moe:trtllm_bf16_moe flashinfer.fused_moe:trtllm_bf16_routed_moe"
    " flashinfer.fused_moe:trtllm_fp8_per_tensor_scale_moe flashinfer.fused_moe:trtllm_fp8_per_channel_scale_moe"
    " flashinfer.fused_moe:trtllm_fp8_block_scale_moe flashinfer.fused_moe:trtllm_fp4_block_scale_moe",
    "lhs:hidden_states rhs:gemm1_weights",
    flops=unknown,
    opaque=True,
)
