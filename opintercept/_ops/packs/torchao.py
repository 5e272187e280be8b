"""torchao: its own operators for quantised products. Most of its products are operators of torch.

The schemas are those of torchao 0.18.0: `torchao/ops.py`, `torchao/kernel/`, `torchao/prototype/`.
"""

from __future__ import annotations

import math
from typing import Any

from opintercept._ops.packs._formulas import Gemm, Sizes, grouped, linear
from opintercept._ops.register import offer_op


def _packed_in_tiles(input: Sizes, weight: Sizes, packed: int) -> Gemm:
    """A weight of `[n / tile, k / tile, tile, tile / packed]`, or a plain one of `[n, k / packed]`."""
    return linear(input, weight[0] * weight[3] * packed if len(weight) == 4 else weight[0])


def _attention(query: Sizes, key: Sizes, value: Sizes, **_: Any) -> int:
    *batch, s_q, d = query
    return 2 * math.prod(batch) * s_q * key[-2] * (d + value[-1])


offer_op(
    "torchao::da8w4_linear_cpu",
    lhs="input",
    rhs="weight",
    bias="bias",
    scales=("input_scales", "weight_scales"),
    layout="nk",
    gemm=lambda input, weight, **_: _packed_in_tiles(input, weight, 2),
)
offer_op(
    "torchao::float8_linear_cpu",
    lhs="input",
    rhs="weight",
    bias="bias",
    scales=("input_scales", "weight_scales"),
    layout="nk",
    gemm=lambda input, weight, **_: _packed_in_tiles(input, weight, 1),
)
offer_op(
    "torchao::rowwise_scaled_linear_sparse_cutlass_f8f8",
    lhs="input",
    rhs="weight",
    bias="bias",
    scales=("input_scale", "weight_scale"),
    layout="nk",
    gemm=lambda input, weight, **_: linear(input, weight[0]),  # of the weight's k values, 2 in 4 are there
)
offer_op("torchao::mx_fp8_bf16", lhs="a", rhs="b", scales=("a_scale", "b_scale"))
offer_op("torchao::int_matmul", lhs="a", rhs="b")
offer_op("torchao::int_scaled_matmul", lhs="a", rhs="b", scales="scales1")
offer_op("torchao::scaled_int8_mm", lhs="A", rhs="B", scales=("A_scale", "B_scale"))
offer_op("torchao::swizzle_mm", lhs="mat1", rhs="mat2")
offer_op("torchao::swizzle_scaled_mm", lhs="mat1", rhs="mat2", bias="bias", scales=("scale_a", "scale_b"))
offer_op("torchao::blockwise_scaled_mm", lhs="a", rhs="b", scales=("a_s", "b_s"))
offer_op(
    "torchao::emulated_blockwise_scaled_grouped_mm",
    lhs="a",
    rhs="b",
    scales=("a_s", "b_s"),
    flops=lambda a, b, **_: grouped(a, b),
)
offer_op("ao::blockwise_fp8_gemm", lhs="a", rhs="b", scales=("a_s", "b_s"), layout="nk")
offer_op(
    "torchao::qscaled_dot_product",
    lhs="query",
    rhs="key",
    value="value",
    flops=_attention,
    family="attention",
    opaque=True,
)
