"""The dtype in which autocast runs a call, read below or above autocast."""

from __future__ import annotations

import operator
from typing import Any

import torch

from opintercept._core.call import OpCall

# The nesting depth has no getter. Raising and lowering it has no other effect, if no interrupt comes in between: what C
# calls for `map` is not interrupted. At a depth that stays, autocast would never drop the weights that it has cast.
_NESTING = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


def autocast_below(call: OpCall) -> torch.dtype | None:
    """Return the dtype to which autocast has cast the operands, or None; for calls below autocast.

    Autocast's kernels switch it off for the operators that they call. So if it is on, autocast has no kernel for this
    operator. If it is off in an `autocast` block, the operands show whether they were cast. Only bfloat16 operands
    under `autocast(enabled=False)` look the same.
    """
    depth, _ = map(operator.call, _NESTING)
    if depth == 1 or (lhs := call.operand("lhs")) is None:
        return None
    try:
        dtype = torch.get_autocast_dtype(lhs.device.type)
        on = torch.is_autocast_enabled(lhs.device.type)
        return dtype if not on and lhs.dtype == dtype else None
    except Exception:  # a device without autocast, or a subclass whose attributes raise
        return None


def autocast_above(lhs: Any) -> torch.dtype | None:
    """Return the dtype to which autocast will cast, or None; for calls above autocast, with or without an lhs."""
    device = "cpu" if lhs is None else lhs.device.type
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None
