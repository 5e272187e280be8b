"""vLLM: its CUDA and CPU kernels, and the operators that it defines in Python.

The schemas are those of `csrc/libtorch_stable/torch_bindings.cpp` at commit 0135b6c, `csrc/torch_bindings.cpp` at
00256d5, and of `csrc/moe/torch_bindings.cpp`, `csrc/cpu/torch_bindings.cpp` and Python files of 0.11 and later.
"""

from __future__ import annotations

import math

from opintercept._ops.packs._formulas import experts, flash_attention, linear, rows
from opintercept._ops.register import offer_ops

# Most of these return nothing, and write `out`.
offer_ops(
    "_C::cutlass_scaled_mm _C::cutlass_scaled_mm_azp", "lhs:a rhs:b bias:bias out:out scale:a_scales scale:b_scales"
)
offer_ops(
    "_C::cutlass_scaled_fp4_mm",
    "lhs:a rhs:b out:out scale:block_scale_a scale:block_scale_b scale:alpha",
    layout="nk",
    gemm=lambda a, b, **_: linear(a, b[0], 2 * a[-1]),  # two values in a byte
)
offer_ops("_C::dsv3_fused_a_gemm", "lhs:mat_a rhs:mat_b out:output")
offer_ops("_C::fp32_router_gemm _moe_C::dsv3_router_gemm", "lhs:mat_a rhs:mat_b out:output", layout="nk")

# The weights of these are packed along k, and shuffled.
offer_ops(
    "_C::cutlass_w4a8_mm _C::machete_mm",
    "lhs:A rhs:B scale:group_scales scale:channel_scales scale:token_scales",
    gemm=lambda A, B, **_: linear(A, B[1]),
)
offer_ops(
    "_C::marlin_gemm _C::gptq_marlin_gemm",
    "lhs:a rhs:b_q_weight bias:b_bias_or_none scale:b_scales scale:a_scales scale:global_scale",
    gemm=lambda size_m, size_n, size_k, **_: (1, size_m, size_n, size_k),
)
offer_ops(
    "_C::gptq_gemm",
    "lhs:a rhs:b_q_weight scale:b_gptq_scales",
    gemm=lambda a, b_q_weight, **_: linear(a, b_q_weight[1]),
)
offer_ops(
    "_C::awq_gemm",
    "lhs:_in_feats rhs:_kernel scale:_scaling_factors",
    gemm=lambda _in_feats, _kernel, **_: linear(_in_feats, 8 * _kernel[1]),  # packed along n instead
)
offer_ops("_C::allspark_w8a16_gemm", "lhs:a rhs:b_qweight scale:b_scales", gemm=lambda a, n, **_: linear(a, n))
offer_ops(
    "_C::ggml_mul_mat_a8 _C::ggml_mul_mat_vec_a8", "lhs:X rhs:W", layout="nk", gemm=lambda X, row, **_: linear(X, row)
)

# In groups, of which the device knows the sizes.
offer_ops(
    "_C::cutlass_moe_mm",
    "lhs:a_tensors rhs:b_tensors out:out_tensors scale:a_scales scale:b_scales",
    flops=lambda a_tensors, out_tensors, **_: rows(a_tensors, out_tensors[-1]),
)
offer_ops(
    "_C::cutlass_w4a8_moe_mm",
    "lhs:a_tensors rhs:b_tensors out:out_tensors scale:a_scales scale:b_scales scale:b_group_scales",
    flops=lambda a_tensors, out_tensors, **_: rows(a_tensors, out_tensors[-1]),
)
offer_ops(
    "_C::cutlass_fp4_group_mm _C::cutlass_mxfp4_group_mm",
    "lhs:a rhs:b out:out scale:a_blockscale scale:b_blockscales scale:alphas",
    flops=lambda a, out, **_: rows(a, out[-1], packed=2),
)
offer_ops(
    "_C::cutlass_mxfp8_grouped_mm",
    "lhs:a rhs:b out:out scale:sfa scale:sfb",
    flops=lambda a, out, **_: rows(a, out[-1]),
)
offer_ops(
    "_C::ggml_moe_a8 _C::ggml_moe_a8_vec",
    "lhs:X rhs:W",
    flops=lambda X, row, top_k, tokens, **_: 2 * tokens * top_k * row * X[-1],
)
offer_ops(
    "_moe_C::moe_wna16_marlin_gemm",
    "lhs:a rhs:b_q_weight bias:b_bias_or_none scale:b_scales scale:a_scales scale:global_scale",
    flops=lambda size_m, size_n, size_k, top_k, **_: 2 * size_m * top_k * size_n * size_k,
)
offer_ops(
    "_moe_C::marlin_gemm_moe",
    "lhs:a rhs:b_q_weights scale:b_scales",
    flops=lambda size_m, size_n, size_k, topk, **_: 2 * size_m * topk * size_n * size_k,
)
offer_ops(
    "_moe_C::moe_wna16_gemm",
    "lhs:input rhs:b_qweight out:output scale:b_scales",
    flops=lambda input, output, **_: 2 * math.prod(output) * input[-1],  # output is [tokens, top_k, n]
)

# On the CPU. The weight is behind a handle.
offer_ops("_C::onednn_mm", "lhs:a bias:bias out:c", gemm=lambda a, c, **_: linear(a, c[-1]))
offer_ops("_C::onednn_scaled_mm", "lhs:a bias:bias out:c scale:a_scales", gemm=lambda a, c, **_: linear(a, c[-1]))

# Operators that vLLM defines in Python, around Triton, DeepGEMM and FlashInfer.
offer_ops("vllm::w8a8_block_fp8_matmul_deepgemm", "lhs:A rhs:B scale:As scale:Bs", layout="nk")
offer_ops("vllm::w8a8_triton_block_scaled_mm_func", "lhs:qx rhs:weight scale:x_scale scale:weight_scale", layout="nk")
offer_ops(
    "vllm::flashinfer_mm_fp4",
    "lhs:A rhs:B scale:A_scale scale:B_scale scale:g_scale",
    gemm=lambda A, B, **_: linear(A, B[1], 2 * A[-1]),
)
offer_ops("vllm::bmm_fp8", "lhs:A rhs:B scale:A_scale scale:B_scale")
offer_ops(
    "vllm::inplace_fused_experts vllm::outplace_fused_experts",
    "lhs:hidden_states rhs:w1 scale:w1_scale scale:w2_scale",
    flops=lambda hidden_states, w1, w2, topk_ids, **_: experts(hidden_states[0], w1, w2, topk_ids[1]),
    opaque=True,
)

# Attention. Where the keys are in a cache, only the device knows how many there are.
offer_ops(
    "_C::paged_attention_v1 _C::paged_attention_v2",
    "lhs:query rhs:key_cache value:value_cache out:out"
    " cache:key_cache cache:value_cache table:block_tables lengths:seq_lens",
    family="attention",
    within=3,
)
offer_ops("_C::sm100_cutlass_mla_decode", "lhs:q_nope rhs:kv_c_and_k_pe_cache out:out", family="attention")
offer_ops(
    "_vllm_fa2_C::varlen_fwd",
    "lhs:q rhs:k value:v cache:k cache:v table:block_table lengths:seqused_k",
    flops=flash_attention(),
    family="attention",
)
offer_ops(
    "_vllm_fa3_C::fwd",
    "lhs:q rhs:k value:v cache:k cache:v table:page_table lengths:seqused_k",
    flops=flash_attention(),
    family="attention",
)
offer_ops(
    "_vllm_fa2_C::fwd_kvcache",
    "lhs:q rhs:kcache value:vcache cache:kcache cache:vcache table:block_table lengths:seqlens_k",
    family="attention",
)
offer_ops(
    "_C::cpu_attention_with_kv_cache",
    "lhs:query rhs:key_cache value:value_cache out:output"
    " cache:key_cache cache:value_cache table:block_table lengths:seq_lens",
    family="attention",
    kind="bare",
    within=2,
)
offer_ops(
    "_C::mla_decode_kvcache",
    "lhs:query rhs:kv_cache out:out cache:kv_cache table:block_tables lengths:seq_lens",
    family="attention",
)
# It finds keys of earlier tokens by itself, in a kernel of whatever library.
offer_ops(
    "vllm::unified_attention_with_output",
    "lhs:query rhs:key value:value out:output",
    family="attention",
    kind="outer",
)
offer_ops("vllm::unified_kv_cache_update", family="other", kind="outer")

# What puts keys and values into a cache.
offer_ops(
    "_C_cache_ops::reshape_and_cache", "cache:key_cache cache:value_cache slots:slot_mapping", family="other", within=3
)
offer_ops(
    "_C_cache_ops::reshape_and_cache_flash", "cache:key_cache cache:value_cache slots:slot_mapping", family="other"
)
offer_ops(
    "_C_cache_ops::concat_and_cache_mla _C::concat_and_cache_mla_cpu",
    "cache:kv_cache slots:slot_mapping",
    family="other",
)
offer_ops(
    "_C::cpu_attn_reshape_and_cache",
    "cache:key_cache cache:value_cache slots:slot_mapping",
    family="other",
    kind="bare",
    within=2,
)

# What writes to `out` and does not read it.
offer_ops("_C::rms_norm _C::silu_and_mul _C::gelu_and_mul _C::gelu_tanh_and_mul", "out:out", family="other")
