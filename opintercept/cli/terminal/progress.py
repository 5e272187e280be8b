"""A progress bar for commands that take longer than a second.

Invariant: it is gone before anything else is printed. Must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from opintercept._core.text import printable
from opintercept.runs.store.progress import watched

if TYPE_CHECKING:
    from tqdm import tqdm

AFTER = 1.0  # seconds without a bar
EVERY = 0.1  # seconds between two changes of it
_FORM = "{desc} {percentage:3.0f}% |{bar}| {elapsed}"
_NAME = 40  # characters of what is read

_shown: ContextVar[tqdm[None] | None] = ContextVar("opintercept_bar", default=None)


@contextmanager
def progress() -> Iterator[None]:
    """Show how far the runs that the block reads have been read, if stderr is a terminal and tqdm is installed."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield
        return
    often: dict[str, Any] = {"delay": AFTER, "mininterval": EVERY, "miniters": 0}
    with tqdm(total=1, file=sys.stderr, leave=False, dynamic_ncols=True, bar_format=_FORM, **often) as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.total = max(total, 1)
            bar.set_description_str(f"reading {printable(what, _NAME)}", refresh=False)
            bar.update(min(done, bar.total) - bar.n)

        token = _shown.set(bar)
        try:
            with watched(show):
                yield
        finally:
            _shown.reset(token)


def hide() -> None:
    """Clear the bar, so that a line can be printed. It comes back with the next change."""
    if (bar := _shown.get()) is not None:
        bar.clear()
