"""Launches of Triton kernels that nobody has declared: they are counted in `opaque`, by the kernel's name.

Invariant: Triton has our hook only while a block is open, and is not imported for it.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from opintercept._core import locks
from opintercept._core.fork import in_child
from opintercept._engines import scope as _scope

# Kernels of Inductor that multiply nothing: pointwise operators, reductions, scans and what it fuses of those.
_PLAIN = r"triton_(poi|red|per|spl|for|mix)_"

MODULE = "triton.knobs"
"""The module that has Triton's hooks."""

_users: set[object] = set()


def enter(user: object) -> None:
    """Count launches until `user` leaves."""
    with locks.shared:
        _users.add(user)
        hooks = _hooks()
        if hooks is not None:
            hooks.add(_launched)  # only once, however often it is added


def leave(user: object) -> None:
    """End an `enter`. Can be repeated."""
    with locks.shared:
        _users.discard(user)
        hooks = _hooks()
        if not _users and hooks is not None:
            hooks.remove(_launched)


def _hooks() -> Any:
    """Triton's hooks that run before each launch; None before Triton 3.5, which had room for one."""
    runtime = getattr(sys.modules.get(MODULE), "runtime", None)
    hooks = getattr(runtime, "launch_enter_hook", None)
    return hooks if hasattr(hooks, "add") and hasattr(hooks, "remove") else None


def _launched(metadata: Any) -> None:
    scope = _scope.current()
    watchers = [watcher for watcher in scope.active() if watcher not in scope.inside]
    if not watchers:
        return  # a hook, or an operator that is seen, has launched it
    name = str(metadata.get()["name"])
    if not re.match(_PLAIN, name):
        for watcher in watchers:
            watcher.pipeline.count_unseen(f"triton::{name}")


@in_child
def _forget_parent() -> None:
    for user in tuple(_users):
        leave(user)
