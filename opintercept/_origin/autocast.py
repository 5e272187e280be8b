"""The dtype in which autocast runs a call."""

from __future__ import annotations

from typing import Any

import torch

from opintercept._call import OpCall


def autocast_below(call: OpCall) -> torch.dtype | None:
    """The dtype that autocast has cast the operands to, or None; for calls below autocast.

    Autocast's kernel turns its switch off for what it calls. So where the switch is on, autocast has no kernel
    for the operator, and where it is off inside of an `autocast` block, the operands tell whether they were cast:
    bfloat16 operands under `autocast(enabled=False)`, alone, look the same.
    """
    # The nesting depth has no getter; raising and lowering it has no other effect.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if depth == 0 or (lhs := call.operand("lhs")) is None:
        return None
    try:
        dtype = torch.get_autocast_dtype(lhs.device.type)
        on = torch.is_autocast_enabled(lhs.device.type)
        return dtype if not on and lhs.dtype == dtype else None
    except Exception:  # a device without autocast, or a subclass whose attributes raise
        return None


def autocast_above(lhs: Any) -> torch.dtype | None:
    """The dtype that autocast will cast to, or None; for calls above autocast, where its switch can be read."""
    device = "cpu" if lhs is None else lhs.device.type
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None
