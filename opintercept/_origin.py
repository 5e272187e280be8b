"""Where a call comes from: the pass it belongs to and the state it ran under.

Invariant: what cannot be told is None, never a guess; nothing here keeps a tensor or a graph alive.
The one file outside `_engines/` that reads torch's private state: autograd's and autocast's.
"""

from __future__ import annotations

from typing import Any

import torch

# -1 outside of `backward`. Private; without it (not seen from torch 2.11 to 2.15) importing fails here,
# at once and by name.
graph_task = torch._C._current_graph_task_id


def autocast(lhs: Any) -> torch.dtype | None:
    """The dtype that autocast runs the current call in, or None.

    Below autocast's own kernel its switch reads as off, like inside `autocast(enabled=False)`. What tells
    the two apart is that autocast's kernel has cast the operand.
    """
    # The nesting depth has no getter; raising and lowering it has no other effect.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    if depth == 0:
        return None
    device = torch.device("cpu").type if lhs is None else lhs.device.type
    try:
        dtype = torch.get_autocast_dtype(device)
        on = torch.is_autocast_enabled(device)
    except RuntimeError:  # a device without autocast
        return None
    return dtype if on or (lhs is not None and lhs.dtype == dtype) else None
