"""`count_steps`: ends a step of the blocks after each step of the optimizer that steps first.

Imports torch in functions only, which run after the program has imported it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any


def count_steps(blocks: Callable[[], Iterable[Any]]) -> None:
    """Do so for those that are open by then, once in a process and its forks; further optimizers do not count."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    first: Any = None

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal first
        if torch.compiler.is_compiling():
            return
        if first is None or first() is None:
            first = weakref.ref(optimizer)
        if first() is optimizer:
            for block in blocks():
                block.step()

    register_optimizer_step_post_hook(stepped)
