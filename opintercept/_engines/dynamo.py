"""Torch's compilers and tracers: keeping Dynamo out of our frames, and detecting that a program is being traced.

Invariant: neither costs an unwatched operator anything or imports torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Private. Where it is missing, `torch._disable_dynamo` does the same. It takes 0.5 us for each call, and imports
# torch._dynamo (one second) at the first one.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
CAN_MARK = all(hasattr(_eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"))


def keep_out(function: F) -> F:
    """Mark a function so that Dynamo compiles neither it nor what it calls, and breaks a graph that calls it."""
    if not CAN_MARK:
        skipped: F = torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined, assignment]
        return skipped
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    # As torch.compiler.disable does. Without it, Dynamo would inline the function into its caller's graph.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it intercepts what runs")
    return function


def keep_out_of_frame(function: F) -> F:
    """Mark a function so that Dynamo does not compile its frame. It may inline it, and compile what it calls."""
    if CAN_MARK:
        skip, default = _eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.DEFAULT
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, default))
    return function


# Private: the modes of make_fx, torch.export and functionalisation. Where they are missing, nothing counts as traced.
_depth: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_infra_mode: Any = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_keys: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_TRACERS = [getattr(_keys, name) for name in ("PROXY", "FUNCTIONAL") if hasattr(_keys, name)]


def tracing() -> bool:
    """Whether a tracer is active below, so that what a hook computes would end up in the program's graph."""
    return _depth() > 0 and any(_infra_mode(key) is not None for key in _TRACERS)
