"""The exceptions and the warning of opintercept.

Invariant: wrong arguments raise TypeError or ValueError; these are for what only shows while a program runs.
Must not import torch.
"""

from __future__ import annotations

import sys
from types import FrameType


class OpInterceptError(RuntimeError):
    """The program cannot be intercepted as asked: blocks are left out of order, torch lacks an API, a limit is hit."""


class HookError(OpInterceptError):
    """A hook broke its contract, for example by returning an output of another shape."""


class NonFiniteError(OpInterceptError, ArithmeticError):
    """`hooks.NonFinite` found the call that made a value that is not finite."""


class OpInterceptWarning(UserWarning):
    """Something that the user should know about while the program goes on: a hook was switched off, for example."""


def needs(what: str, package: str, install: str | None = None) -> ImportError:
    """Return the error that says which package `what` needs.

    Args:
        what: What needs it.
        package: The package.
        install: What pip is to install; by default the package.
    """
    return ImportError(f"{what} needs {package}; pip install {install or package}")


def caller_level() -> int:
    """Return the `stacklevel` with which the calling function's warning points to the code that uses the package."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "opintercept":
        frame, level = frame.f_back, level + 1
    return level


for _public in (OpInterceptError, HookError, NonFiniteError, OpInterceptWarning):
    _public.__module__ = "opintercept"
