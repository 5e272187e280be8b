"""FlashAttention 2 and 3.

The schemas are those of `flash_attn/flash_attn_interface.py` of 2.8, and of `hopper/flash_api_stable.cpp` at commit
01d6dd1.
"""

from __future__ import annotations

from opintercept._ops.packs._formulas import flash_attention
from opintercept._ops.register import offer_ops

offer_ops(
    "flash_attn::_flash_attn_forward flash_attn::_flash_attn_varlen_forward flash_attn_3::fwd",
    "lhs:q rhs:k value:v",
    flops=flash_attention(),
    family="attention",
)
offer_ops(
    "flash_attn::_flash_attn_backward flash_attn::_flash_attn_varlen_backward flash_attn_3::bwd",
    "lhs:q rhs:k value:v",
    flops=flash_attention(products=5),
    opaque=True,
)
