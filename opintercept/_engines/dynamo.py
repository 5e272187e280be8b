"""Torch's compilers and tracers: keeping Dynamo out of our frames, and telling when a program is being traced.

Invariant: neither costs anything on the way of an unwatched operator, nor imports torch._dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# Private. Where it is missing, `torch._disable_dynamo` does the same for 0.5 us a call and an import of
# torch._dynamo (a second) at the first one.
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
CAN_MARK = all(hasattr(_eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction"))


def keep_out(function: F) -> F:
    """Return `function` so that Dynamo neither compiles it nor what it calls, and breaks a graph that calls it."""
    if not CAN_MARK:
        skipped: F = torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined, assignment]
        return skipped
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    # As torch.compiler.disable does; without it Dynamo would trace the function into that of a caller.
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="it intercepts what runs")
    return function


# Private: the modes of make_fx, torch.export and functionalisation. Without them nothing counts as traced.
_depth: Any = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_infra_mode: Any = getattr(torch._C, "_get_dispatch_mode", lambda key: None)
_keys: Any = getattr(torch._C, "_TorchDispatchModeKey", None)
_TRACERS = [getattr(_keys, name) for name in ("PROXY", "FUNCTIONAL") if hasattr(_keys, name)]


def tracing() -> bool:
    """Whether a tracer listens below: what a hook computes would end up in the program's graph."""
    return _depth() > 0 and any(_infra_mode(key) is not None for key in _TRACERS)
