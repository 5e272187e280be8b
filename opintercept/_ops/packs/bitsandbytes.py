"""bitsandbytes: products with weights of 4 bits and of int8.

The schemas are those of bitsandbytes 0.50.2, `bitsandbytes/_ops.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from opintercept._ops.packs._formulas import linear
from opintercept._ops.register import offer_ops


def _values_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """The weight, `[n, k]`, as bitsandbytes itself dequantises it."""
    if absmax_8bit is not None:  # the scales are quantised in turn, in blocks of 256
        ops = torch.ops.bitsandbytes
        absmax = ops.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32) + absmax_offset
    values: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return values


def _values_of_gemv(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: list[int],
    absmax: torch.Tensor,
    code: torch.Tensor,
    blocksize: int,
    **_: Any,
) -> torch.Tensor:
    """The weight, `[n, k]`. Unlike `_values_4bit`, this reads the name of the code nowhere, but has its 16 values."""
    packed = B.contiguous().view(torch.uint8).reshape(-1)
    n, k = shapeB
    high, low = packed >> 4, packed & 15
    if absmax.dim() == 2:  # the layout for AVX-512: 32 rows of the weight lie side by side
        codes = torch.cat([low.view(-1, 32), high.view(-1, 32)], -1).view(n // 32, k // 2, 32, 2)
        codes, absmax = codes.transpose(1, 2), absmax.T
    else:
        codes = torch.stack([high, low], -1)
    blocks = code.float()[codes.reshape(-1).int()].view(-1, blocksize)
    return (blocks * absmax.reshape(-1, 1).float()).view(n, k).to(A.dtype)


def _values_int8(codes: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return codes * (largest / 127).view(*codes.shape[:-1], 1)


offer_ops(
    "bitsandbytes::gemm_4bit",
    "lhs:A rhs:B bias:bias scale:absmax scale:absmax_8bit",
    layout="nk",
    gemm=lambda A, shapeB, **_: linear(A, shapeB[0]),
    dequantize=_values_4bit,
)
offer_ops(
    "bitsandbytes::gemv_4bit",
    "lhs:A rhs:B scale:absmax",
    layout="nk",
    gemm=lambda A, shapeB, **_: linear(A, shapeB[0]),
    dequantize=_values_of_gemv,
)
offer_ops("bitsandbytes::int8_linear_matmul", "lhs:A rhs:B", layout="nk")
offer_ops(
    "bitsandbytes::int8_scaled_mm",
    "lhs:A rhs:B bias:bias scale:row_stats scale:col_stats",
    layout="nk",
    dequantize={
        "lhs": lambda A, row_stats, **_: _values_int8(A, row_stats),
        "rhs": lambda B, col_stats, **_: _values_int8(B, col_stats),
    },
)
# The columns with outliers are multiplied apart, in A's own dtype. They are zero in CA, so that A has the values.
offer_ops(
    "bitsandbytes::int8_mixed_scaled_mm",
    "lhs:CA rhs:CB bias:bias scale:SCA scale:SCB",
    layout="nk",
    dequantize={"lhs": lambda A, **_: A, "rhs": lambda CB, SCB, **_: _values_int8(CB, SCB)},
)
