"""TransformerEngine: its products, which go to cuBLAS through a binding of its own.

The signatures are those of TransformerEngine 1.13 to 2.x, `transformer_engine/pytorch/cpp_extensions/gemm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from opintercept._ops.packs._formulas import Gemm, Sizes
from opintercept._ops.register import offer_ops

_GEMM = "transformer_engine.pytorch.cpp_extensions.gemm"


def _gemm(A: Sizes, B: Sizes, layout: str = "TN", **_: Any) -> Gemm:
    """The library counts in columns: its A is the weight, and `"TN"` means `B @ A.T` of matrices that lie in rows."""
    n, k = (math.prod(A[:-1]), A[-1]) if layout[0] == "T" else (A[-1], math.prod(A[:-1]))
    m = B[-1] if layout[1] == "T" else math.prod(B[:-1])
    return 1, m, n, k


def _grouped(A: Sequence[Sizes], B: Sequence[Sizes], layout: str = "TN", **_: Any) -> int:
    return sum(2 * math.prod(_gemm(a, b, layout)) for a, b in zip(A, B, strict=True))


offer_ops(f"{_GEMM}:general_gemm", "lhs:B rhs:A bias:bias out:out", layout=None, gemm=_gemm)
offer_ops(f"{_GEMM}:general_grouped_gemm", "lhs:B rhs:A out:out", layout=None, flops=_grouped)
