"""Keeps Dynamo out of our frames: around graph breaks it would compile whatever Python runs, hooks included.

Invariant: marking costs nothing per call and imports no torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Private. Where it is missing, `torch._disable_dynamo` does the same for 0.5 us a call and an import of
# torch._dynamo (a second) at the first one.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
CAN_MARK = all(hasattr(_eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"))


def keep_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` so that Dynamo compiles neither it nor what it calls."""
    if not CAN_MARK:
        skipped: Callable[..., Any] = torch._disable_dynamo(function, recursive=True)
        return skipped
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function
