"""Greenlets: what a hook hides stays with its greenlet while it has switched away. Their blocks are in their contexts.

Invariant: torch's thread-local scope is the running greenlet's. A program without greenlets pays nothing.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from opintercept._engines import scope as _scope
from opintercept._engines.base import Block

_Trace = Callable[[str, tuple[Any, Any]], Any]


class _Thread(threading.local):
    """The state of a thread while it is in a block."""

    trace: _Trace | None = None  # our trace function, while greenlet has it
    before: _Trace | None = None  # the trace function that was set before, which ours calls
    inside: weakref.WeakKeyDictionary[Any, _scope.Scope]  # of greenlets that switched away in a hook or an operator

    def __init__(self) -> None:
        self.blocks: set[Block] = set()  # those of all its greenlets


_thread = _Thread()


def follow(block: Block) -> None:
    """Follow the switches of this thread's greenlets, if the program has any, until the block is left."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None:
        return
    _thread.blocks.add(block)
    if _thread.trace is None and hasattr(greenlet, "settrace"):
        _thread.inside = weakref.WeakKeyDictionary()
        _thread.trace = _switched
        _thread.before = greenlet.settrace(_switched)


def unfollow(block: Block) -> None:
    """End a `follow`. Can be repeated."""
    greenlet = sys.modules.get("greenlet")
    if greenlet is None or _thread.trace is None:
        return
    _thread.blocks.discard(block)
    # A tracer that was set after ours keeps it and calls it.
    if not _thread.blocks and greenlet.gettrace() is _thread.trace:
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
