"""Clean-up in forked children, where no block of the parent is active and no thread will release its locks.

Must not import torch.
"""

from __future__ import annotations

import os
import threading  # noqa: F401 - what it does in a forked child comes first, so that the functions may start threads
from collections.abc import Callable

_functions: list[Callable[[], None]] = []


def in_child(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that cleans up a module's state, to run it in every forked child.

    All of them run before what was registered with `os` after this file was imported, such as what enters a block.
    """
    _functions.append(forget)
    return forget


def _forget_parent() -> None:
    for forget in _functions:
        forget()


os.register_at_fork(after_in_child=_forget_parent)
