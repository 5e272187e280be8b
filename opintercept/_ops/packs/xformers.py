"""xFormers: attention, and products with operands of which 2 values in 4 are there.

The schemas are those of `xformers/csrc` and `xformers/ops/fmha/flash.py` of 0.0.2x to 0.0.3x, which differ in the
arguments that have no role here.
"""

from __future__ import annotations

from opintercept._ops.packs._formulas import attention
from opintercept._ops.register import offer_op

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqstart_q", "seqstart_k")
_UNKNOWN = ("block_tables", "seqused_k", "seqlen_k", "leftpad_k")

for _name in (
    "xformers_flash::flash_fwd",
    "xformers_flash3::flash_fwd",
    "xformers::efficient_attention_forward_cutlass",
    "xformers::efficient_attention_forward_ck",
):
    offer_op(
        _name,
        lhs="query",
        rhs="key",
        value="value",
        flops=attention("query", "key", "value", ragged=_OFFSETS, never=_UNKNOWN),
        family="attention",
        opaque=True,
    )
for _name in (
    "xformers_flash::flash_bwd",
    "xformers_flash3::flash_bwd",
    "xformers::efficient_attention_backward_cutlass",
    "xformers::efficient_attention_backward_ck",
):
    offer_op(
        _name,
        lhs="query",
        rhs="key",
        value="value",
        flops=attention("query", "key", "value", products=5, ragged=_OFFSETS, never=_UNKNOWN),
        opaque=True,
    )
offer_op("xformers::_sparse24_gemm", lhs="a", rhs="b", gemm=lambda a, b, **_: (1, a[0], b[1], b[0]))
