"""What runs outside the dispatcher, where engines see nothing: it is followed while a block is open.

Invariant: entering and leaving cost microseconds while no library of that kind is loaded.
"""

from __future__ import annotations

from opintercept._engines import blind_spots, graphs, launches, patched_functions
from opintercept._engines.base import Watcher
from opintercept._engines.patches import Replacements, Wrapped

PATCHES = Replacements(Wrapped(lambda: blind_spots.entries() + graphs.methods()), fixed=True)
"""Functions that are wrapped while a block is open."""


def enter(user: object, watcher: Watcher) -> None:
    """Follow what `watcher` can see of it, until `user` leaves."""
    PATCHES.enter(user)
    if watcher.patched:
        patched_functions.PATCHES.enter(user)
    launches.enter(user)


def leave(user: object) -> None:
    """End an `enter`, as far as it came. Can be repeated."""
    try:
        launches.leave(user)
    finally:
        try:
            patched_functions.PATCHES.leave(user)
        finally:
            PATCHES.leave(user)
