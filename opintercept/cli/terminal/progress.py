"""A line that says how far a command has come.

Invariant: it is gone before anything else is printed, and a terminal that is gone stops nobody. Must not import torch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TextIO

from opintercept._core.text import printable
from opintercept.runs.store.progress import watched

AFTER = 1.0  # seconds without a line
EVERY = 0.25  # seconds between two changes of it
_NAME = 40  # characters of what is read
_CLEAR = "\r\x1b[K"


class StatusLine:
    """A line of a terminal that is written over; the first one after some seconds, and none unless it is visible."""

    def __init__(self, file: TextIO, after: float, visible: bool = True) -> None:
        self._file, self._drawn = file, False
        self._due = time.monotonic() + after if visible and file.isatty() else math.inf

    def show(self, text: Callable[[], str]) -> None:
        """Show a text, unless the last one is new."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY
            self._drawn = True
            write(self._file, f"{_CLEAR}{text()}")

    def clear(self) -> None:
        """Remove the line, so that another can be printed. It comes back with the next change."""
        if self._drawn:
            self._drawn = False
            write(self._file, _CLEAR)


_shown: ContextVar[StatusLine | None] = ContextVar("opintercept_line", default=None)


@contextmanager
def progress() -> Iterator[None]:
    """Show how far the runs that the block reads have been read, if stderr is a terminal."""
    line = StatusLine(sys.stderr, AFTER)
    token = _shown.set(line)
    try:
        with watched(lambda what, done, all_: line.show(lambda: _text(what, done / max(all_, 1)))):
            yield
    finally:
        _shown.reset(token)
        line.clear()


def _text(what: str, part: float) -> str:
    return f"reading {printable(what, _NAME)} {min(part, 1.0):4.0%}"


def hide() -> None:
    """Clear the line of `progress`."""
    if (line := _shown.get()) is not None:
        line.clear()


def write(file: TextIO, text: str) -> None:
    """Write at once, if that is possible."""
    with suppress(OSError, ValueError):  # closed, or the terminal is gone
        file.write(text)
        file.flush()
