"""Greenlets: while a hook of one has switched away, the others of its thread are seen.

Invariant: torch's thread-local scope is that of the running greenlet; a program without greenlets pays nothing.
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
    """What is kept of a thread while it is in a block.

    Attributes:
        trace: Ours, as greenlet has it; None while it is not there.
        before: The one that it calls on.
        inside: The scopes of greenlets that have switched away from inside of a hook or an operator.
    """

    trace: _Trace | None = None
    before: _Trace | None = None
    inside: weakref.WeakKeyDictionary[Any, _scope.Scope]


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
    # Another tracer that came after ours calls it on, and keeps it.
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
