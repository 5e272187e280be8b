"""FlashAttention 2 and 3.

The schemas are those of `flash_attn/flash_attn_interface.py` of 2.8, and of `hopper/flash_api_stable.cpp` at commit
01d6dd1.
"""

from __future__ import annotations

from opintercept._ops.register import offer_op
from opintercept.packs._formulas import attention

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
# A cache of keys in pages, lengths on the device, keys to append, and the part of a query that multiplies values.
_UNKNOWN = ("block_table", "page_table", "seqused_q", "seqused_k", "k_new", "q_v", "kv_batch_idx", "leftpad_k")

for _name in ("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::fwd"):
    offer_op(
        _name,
        lhs="q",
        rhs="k",
        value="v",
        flops=attention("q", "k", "v", ragged=_OFFSETS, never=_UNKNOWN),
        family="attention",
        opaque=True,
    )
for _name in ("flash_attn::_flash_attn_backward", "flash_attn::_flash_attn_varlen_backward", "flash_attn_3::bwd"):
    offer_op(
        _name,
        lhs="q",
        rhs="k",
        value="v",
        flops=attention("q", "k", "v", products=5, ragged=_OFFSETS, never=_UNKNOWN),
        opaque=True,
    )
