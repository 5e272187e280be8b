"""Greenlets: blocks see the other greenlets of a thread while a hook in one of them has switched away.

Invariant: torch's thread-local scope is the running greenlet's. A program without greenlets pays nothing.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from opintercept._engines import scope as _scope

_Trace = Callable[[str, tuple[Any, Any]], Any]


class _Thread(threading.local):
    """The state of a thread while it is in a block."""

    trace: _Trace | None = None  # our trace function, while greenlet has it
    before: _Trace | None = None  # the trace function that was set before, which ours calls
    inside: weakref.WeakKeyDictionary[Any, _scope.Scope]  # of greenlets that switched away in a hook or an operator


_thread = _Thread()


def follow() -> None:
    """Follow the switches of this thread's greenlets, if the program has any."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and _thread.trace is None and hasattr(greenlet, "settrace"):
        _thread.inside = weakref.WeakKeyDictionary()
        _thread.trace = _switched
        _thread.before = greenlet.settrace(_switched)


def unfollow() -> None:
    """End a `follow`. Can be repeated."""
    greenlet = sys.modules.get("greenlet")
    # A tracer that was set after ours keeps it and calls it.
    if greenlet is not None and _thread.trace is not None and greenlet.gettrace() is _thread.trace:
        greenlet.settrace(_thread.before)
        _thread.trace = _thread.before = None


def _switched(event: str, greenlets: tuple[Any, Any]) -> None:
    origin, target = greenlets
    left = _scope.current()
    if left.hidden or left.inside:
        _thread.inside[origin] = left
    entered = _thread.inside.pop(target, None)
    if entered is None and (left.hidden or left.inside):
        entered = left.outside()
    if entered is not None:
        _scope.put(entered)
    if _thread.before is not None:
        _thread.before(event, greenlets)
