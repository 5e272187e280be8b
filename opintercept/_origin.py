"""Where a call comes from: the pass it belongs to and the state it ran under.

Invariant: what cannot be told is None; nothing here keeps a tensor or a graph alive.
The one file outside `_engines/` that reads torch's private state: autograd's and autocast's.
"""

from __future__ import annotations

from typing import Any

import torch

# -1 outside of `backward`. Private; without it (not seen from torch 2.11 to 2.15) importing fails here,
# at once and by name.
graph_task = torch._C._current_graph_task_id


def autocast_below(lhs: Any) -> torch.dtype | None:
    """The dtype that autocast has cast the operands to, or None; for calls below autocast.

    Autocast's kernel turns its switch off for what it calls. So where the switch is on, autocast has no kernel
    for the operator, and where it is off inside of an `autocast` block, the operands tell whether they were cast:
    bfloat16 operands under `autocast(enabled=False)`, alone, look the same.
    """
    # The nesting depth has no getter; raising and lowering it has no other effect.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if depth == 0 or lhs is None:
        return None
    try:
        dtype = torch.get_autocast_dtype(lhs.device.type)
        on = torch.is_autocast_enabled(lhs.device.type)
    except RuntimeError:  # a device without autocast
        return None
    return dtype if not on and lhs.dtype == dtype else None


def autocast_above(lhs: Any) -> torch.dtype | None:
    """The dtype that autocast will cast to, or None; for calls above autocast, where its switch can be read."""
    device = "cpu" if lhs is None else lhs.device.type
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None
