"""sgl-kernel, the kernels of SGLang.

The schemas are those of `sgl-kernel/csrc/common_extension.cc` at commit 0063ef1, `csrc/cpu/torch_extension_cpu.cpp`
and `csrc/flash_extension.cc`.
"""

from __future__ import annotations

import math

from opintercept._ops.packs._formulas import experts, flash_attention, linear, rows
from opintercept._ops.register import offer_ops

offer_ops(
    "sgl_kernel::int8_scaled_mm sgl_kernel::fp8_scaled_mm",
    "lhs:mat_a rhs:mat_b bias:bias scale:scales_a scale:scales_b",
)
offer_ops("sgl_kernel::fp8_blockwise_scaled_mm", "lhs:mat_a rhs:mat_b scale:scales_a scale:scales_b")
offer_ops(
    "sgl_kernel::cutlass_scaled_fp4_mm",
    "lhs:a rhs:b out:out scale:block_scale_a scale:block_scale_b scale:alpha",
    layout="nk",
    gemm=lambda a, b, **_: linear(a, b[0], 2 * a[-1]),  # two values in a byte
)
offer_ops("sgl_kernel::dsv3_fused_a_gemm", "lhs:mat_a rhs:mat_b out:output")
offer_ops("sgl_kernel::dsv3_router_gemm", "lhs:mat_a rhs:mat_b out:output", layout="nk")
offer_ops(
    "sgl_kernel::gptq_marlin_gemm",
    "lhs:a rhs:b_q_weight scale:b_scales scale:global_scale_or_none",
    gemm=lambda size_m, size_n, size_k, **_: (1, size_m, size_n, size_k),
)
offer_ops(
    "sgl_kernel::gptq_gemm",
    "lhs:a rhs:b_q_weight scale:b_gptq_scales",
    gemm=lambda a, b_q_weight, **_: linear(a, b_q_weight[1]),
)
offer_ops(
    "sgl_kernel::moe_wna16_marlin_gemm",
    "lhs:a rhs:b_q_weight scale:b_scales",
    flops=lambda size_m, size_n, size_k, top_k, **_: 2 * size_m * top_k * size_n * size_k,
)
offer_ops(
    "sgl_kernel::fp8_blockwise_scaled_grouped_mm sgl_kernel::es_fp8_blockwise_scaled_grouped_mm",
    "lhs:a rhs:b out:output scale:scales_a scale:scales_b",
    flops=lambda a, output, **_: rows(a, output[-1]),
)
offer_ops(
    "sgl_kernel::es_sm100_mxfp8_blockscaled_grouped_mm",
    "lhs:a rhs:b out:d scale:sfa scale:sfb",
    flops=lambda a, d, **_: rows(a, d[-1]),
)
offer_ops(
    "sgl_kernel::cutlass_fp4_group_mm",
    "lhs:a rhs:b out:output scale:a_blockscale scale:b_blockscale scale:alphas",
    flops=lambda a, output, **_: rows(a, output[-1], packed=2),
)
offer_ops(
    "sgl_kernel::cutlass_w4a8_moe_mm",
    "lhs:a rhs:b out:d scale:a_scales scale:b_scales",
    flops=lambda a, d, **_: rows(a, d[-1]),
)

# On the CPU, weights may be packed in tiles that keep their sizes, `[n, k]`.
offer_ops(
    "sgl_kernel::weight_packed_linear",
    "lhs:mat1 rhs:mat2 bias:bias",
    layout="nk",
    gemm=lambda mat1, mat2, **_: linear(mat1, mat2[0]),
)
offer_ops(
    "sgl_kernel::int8_scaled_mm_cpu sgl_kernel::fp8_scaled_mm_cpu sgl_kernel::int8_scaled_mm_with_quant",
    "lhs:mat1 rhs:mat2 bias:bias scale:scales1 scale:scales2",
    layout="nk",
    gemm=lambda mat1, mat2, **_: linear(mat1, mat2[0]),
)
offer_ops(
    "sgl_kernel::bmm_cpu",
    "lhs:mat1 rhs:mat2 out:out scale:scale",
    layout="nk",
    gemm=lambda out, mat1, **_: (math.prod(out[:-2]), out[-2], out[-1], mat1[-1]),
)
offer_ops(
    "sgl_kernel::fused_experts_cpu",
    "lhs:hidden_states rhs:w1 scale:w1_scale scale:w2_scale",
    flops=lambda hidden_states, w1, w2, topk_ids, **_: experts(hidden_states[0], w1, w2, topk_ids[1]),
    opaque=True,
)

# Attention. Where the keys are in a cache, only the device knows how many there are.
offer_ops("sgl_kernel::fwd", "lhs:q rhs:k value:v", flops=flash_attention(), family="attention")
offer_ops("sgl_kernel::cutlass_mla_decode", "lhs:q_nope rhs:kv_c_and_k_pe_cache out:out", family="attention")
