"""A progress bar for commands that take longer than a second.

Invariant: it is gone before anything else is printed. Must not import torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from opintercept._core.text import printable
from opintercept.runs.store.progress import watched

if TYPE_CHECKING:
    from tqdm import tqdm

AFTER = 1.0  # seconds without a bar
EVERY = 0.1  # seconds between two changes of it
_NAME = 40  # characters of what is read

_shown: ContextVar[Bar | None] = ContextVar("opintercept_bar", default=None)


@contextmanager
def progress() -> Iterator[None]:
    """Show how far the runs that the block reads have been read, if stderr is a terminal and tqdm is installed."""
    if not sys.stderr.isatty():
        yield
        return
    bar = Bar()
    token = _shown.set(bar)
    try:
        with watched(bar):
            yield
    finally:
        _shown.reset(token)
        bar.close()


def hide() -> None:
    """Clear the bar, so that a line can be printed. It comes back with the next change."""
    if (bar := _shown.get()) is not None:
        bar.hide()


class Bar:
    """Draws what `runs.store.progress` reports."""

    def __init__(self) -> None:
        self._next = time.monotonic() + AFTER
        self._bar: tqdm[None] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` has been read."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        if self._bar is None:
            try:
                from tqdm import tqdm
            except ImportError:
                self._next = float("inf")
                return
            form = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"
            self._bar = tqdm(file=sys.stderr, leave=False, dynamic_ncols=True, bar_format=form)
        self._bar.total, self._bar.n = max(total, 1), min(done, max(total, 1))
        self._bar.set_description_str(f"reading {printable(what, _NAME)}", refresh=False)
        self._bar.refresh()

    def hide(self) -> None:
        """Clear the line."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """Clear the line for good."""
        if self._bar is not None:
            self._bar.close()
