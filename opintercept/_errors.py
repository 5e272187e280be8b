"""The exceptions and warnings that opintercept raises on its own account.

Invariant: misuse is a TypeError or ValueError; these are for what only shows at run time.
Must not import torch.
"""

from __future__ import annotations

import sys
from types import FrameType


class OpInterceptError(RuntimeError):
    """Interception cannot go on as asked: blocks left out of order, a torch without the API needed."""


class HookError(OpInterceptError):
    """A hook broke its contract: it returned inputs or an output that cannot take the place of the real ones."""


class NonFiniteError(OpInterceptError, ArithmeticError):
    """`hooks.NonFinite` has found where a value that is not finite was made."""


class OpInterceptWarning(UserWarning):
    """Something that the reader should know and the program survives: a hook was switched off, for one."""


def caller_level() -> int:
    """The `stacklevel` with which a warning of the function that calls this points out of the package."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "opintercept":
        frame, level = frame.f_back, level + 1
    return level


for _public in (OpInterceptError, HookError, NonFiniteError, OpInterceptWarning):
    _public.__module__ = "opintercept"
