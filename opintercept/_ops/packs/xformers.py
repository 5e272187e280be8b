"""xFormers: attention, and products with operands of which 2 values in 4 are there.

The schemas are those of `xformers/csrc` and `xformers/ops/fmha/flash.py` of 0.0.2x to 0.0.3x, which differ in the
arguments that have no role here.
"""

from __future__ import annotations

from functools import partial

from opintercept._ops.packs._formulas import attention
from opintercept._ops.register import offer_ops

_flops = partial(
    attention,
    "query",
    "key",
    "value",
    ragged=("cu_seqlens_q", "cu_seqlens_k", "seqstart_q", "seqstart_k"),
    never=("block_tables", "seqused_k", "seqlen_k", "leftpad_k"),
)
offer_ops(
    "xformers_flash::flash_fwd xformers_flash3::flash_fwd"
    " xformers::efficient_attention_forward_cutlass xformers::efficient_attention_forward_ck",
    "lhs:query rhs:key value:value",
    flops=_flops(),
    family="attention",
)
offer_ops(
    "xformers_flash::flash_bwd xformers_flash3::flash_bwd"
    " xformers::efficient_attention_backward_cutlass xformers::efficient_attention_backward_ck",
    "lhs:query rhs:key value:value",
    flops=_flops(products=5),
    opaque=True,
)
offer_ops("xformers::_sparse24_gemm", "lhs:a rhs:b", gemm=lambda a, b, **_: (1, a[0], b[1], b[0]))
