"""torchao: its own operators for quantised products. Most of its products are operators of torch.

The schemas are those of torchao 0.18.0: `torchao/ops.py`, `torchao/kernel/`, `torchao/prototype/`.
"""

from __future__ import annotations

import math
from typing import Any

from opintercept._ops.packs._formulas import Gemm, Sizes, grouped, linear
from opintercept._ops.register import offer_ops


def _packed_in_tiles(input: Sizes, weight: Sizes, packed: int) -> Gemm:
    """A weight of `[n / tile, k / tile, tile, tile / packed]`, or a plain one of `[n, k / packed]`."""
    return linear(input, weight[0] * weight[3] * packed if len(weight) == 4 else weight[0])


def _attention(query: Sizes, key: Sizes, value: Sizes, **_: Any) -> int:
    *batch, s_q, d = query
    return 2 * math.prod(batch) * s_q * key[-2] * (d + value[-1])


offer_ops(
    "torchao::da8w4_linear_cpu",
    "lhs:input rhs:weight bias:bias scale:input_scales scale:weight_scales",
    layout="nk",
    gemm=lambda input, weight, **_: _packed_in_tiles(input, weight, 2),
)
offer_ops(
    "torchao::float8_linear_cpu",
    "lhs:input rhs:weight bias:bias scale:input_scales scale:weight_scales",
    layout="nk",
    gemm=lambda input, weight, **_: _packed_in_tiles(input, weight, 1),
)
offer_ops(
    "torchao::rowwise_scaled_linear_sparse_cutlass_f8f8",
    "lhs:input rhs:weight bias:bias scale:input_scale scale:weight_scale",
    layout="nk",
    gemm=lambda input, weight, **_: linear(input, weight[0]),  # of the weight's k values, 2 in 4 are there
)
offer_ops("torchao::mx_fp8_bf16", "lhs:a rhs:b scale:a_scale scale:b_scale")
offer_ops("torchao::int_matmul", "lhs:a rhs:b")
offer_ops("torchao::int_scaled_matmul", "lhs:a rhs:b scale:scales1")
offer_ops("torchao::scaled_int8_mm", "lhs:A rhs:B scale:A_scale scale:B_scale")
offer_ops("torchao::swizzle_mm", "lhs:mat1 rhs:mat2")
offer_ops("torchao::swizzle_scaled_mm", "lhs:mat1 rhs:mat2 bias:bias scale:scale_a scale:scale_b")
offer_ops("torchao::blockwise_scaled_mm", "lhs:a rhs:b scale:a_s scale:b_s")
offer_ops(
    "torchao::emulated_blockwise_scaled_grouped_mm",
    "lhs:a rhs:b scale:a_s scale:b_s",
    flops=lambda a, b, **_: grouped(a, b),
)
offer_ops("ao::blockwise_fp8_gemm", "lhs:a rhs:b scale:a_s scale:b_s", layout="nk")
offer_ops("torchao::qscaled_dot_product", "lhs:query rhs:key value:value", flops=_attention, family="attention")
