"""Clean-up in forked children, where no block of the parent is active and no thread will release its locks.

Must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that cleans up a module's state, to run it in every forked child."""
    os.register_at_fork(after_in_child=forget)
    return forget
