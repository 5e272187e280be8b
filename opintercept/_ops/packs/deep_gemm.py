"""DeepGEMM: products of float8, float4 and bfloat16, each operand in float8 or float4 in a pair with its scales.

The functions are those of DeepGEMM 1.0 to 2.8, `deep_gemm/__init__.py` and `docs/API_REFERENCE.md`. All of them write
to `d`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from opintercept._ops.op import Layout
from opintercept._ops.packs._formulas import Gemm, rows, unknown
from opintercept._ops.register import offer_ops

# The layout of rhs by the last letter of `nt`, `nn`, `tn`, `tt`; the first says whether lhs is transposed.
_LAYOUTS: dict[str, Layout] = {"n": "kn", "t": "nk"}
_SCALES = {"bf16": "", **dict.fromkeys(("fp8", "fp8_fp4", "fp4"), " scale:a scale:b")}


def _sizes(operand: Any) -> Any:
    """The sizes of an operand that may come with its scales."""
    return operand[0] if isinstance(operand[0], tuple) else operand


def _gemm(letters: str, mixed: bool) -> Callable[..., Gemm]:
    def gemm(a: Any, b: Any, d: Any, *_: Any, **__: Any) -> Gemm:
        a, b = _sizes(a), _sizes(b)
        (m, k), (n, other) = (a[::-1] if letters[0] == "t" else a), (b if letters[1] == "t" else b[::-1])
        if mixed and k == other:
            raise NotImplementedError  # both in float8, or both in float4 with two values in a byte
        return 1, m, n, max(k, other)

    return gemm


def _in_groups(a: Any, b: Any, d: Any, *_: Any, **__: Any) -> int:
    return rows(_sizes(a), d[-1])


def _along_k(a: Any, b: Any, d: Any, ks: Any, *_: Any, **__: Any) -> int:
    return int(2 * sum(ks) * math.prod(d[-2:]))


for _kind in ("bf16", "fp8", "fp8_fp4"):
    for _letters in ("nt", "nn", "tn", "tt"):
        offer_ops(
            f"deep_gemm:{_kind}_gemm_{_letters}",
            "lhs:a rhs:b bias:c out:d" + _SCALES[_kind],
            layout=_LAYOUTS[_letters[1]] if _letters[0] == "n" else None,
            gemm=_gemm(_letters, mixed=_kind == "fp8_fp4"),
        )
offer_ops("deep_gemm:fp4_gemm_nt", "lhs:a rhs:b bias:c out:d" + _SCALES["fp4"], layout="nk", flops=unknown)
# Version 1.
offer_ops(
    "deep_gemm:gemm_fp8_fp8_bf16_nt",
    "lhs:lhs rhs:rhs out:out scale:lhs scale:rhs",
    layout="nk",
    gemm=lambda lhs, rhs, out: _gemm("nt", mixed=False)(lhs, rhs, out),
)
for _kind, _scales in _SCALES.items():
    for _name, _flops in (
        (f"m_grouped_{_kind}_gemm_nt_contiguous", _in_groups if "fp4" not in _kind else unknown),
        (f"m_grouped_{_kind}_gemm_nn_contiguous", _in_groups if "fp4" not in _kind else unknown),
        (f"m_grouped_{_kind}_gemm_nt_masked", unknown),
        (f"k_grouped_{_kind}_gemm_nt_contiguous", _along_k),
        (f"k_grouped_{_kind}_gemm_tn_contiguous", _along_k),
    ):
        offer_ops(f"deep_gemm:{_name}", "lhs:a rhs:b out:d" + _scales, layout=None, flops=_flops)
