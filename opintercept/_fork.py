"""What happens in a forked child, where no block of the parent is active and its threads' locks belong to nobody.

Must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that puts a module's state right in each forked child."""
    os.register_at_fork(after_in_child=forget)
    return forget
