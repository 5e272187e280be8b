"""Reports how far a reader of runs has come.

Invariant: costs next to nothing if nobody watches. Must not import torch or numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str, int, int], None]  # gets what is read, how much of it has been read, and how much it is

_watcher: ContextVar[Watcher | None] = ContextVar("opintercept_progress", default=None)


def report(what: str, done: int, total: int) -> None:
    """Say how far the reader of a file or folder has come, in any unit."""
    if (watcher := _watcher.get()) is not None:
        watcher(what, done, total)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for what is read in the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
