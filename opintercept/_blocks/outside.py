"""What engines do not see by themselves: what runs outside the dispatcher, and what comes while a block is open.

Invariant: entering and leaving cost microseconds while no library of that kind is loaded.
"""

from __future__ import annotations

from opintercept._engines import arrivals, blind_spots, graphs, inductor, launches, patched_functions
from opintercept._engines.base import Watcher
from opintercept._engines.patches import Replacements, Wrapped

PATCHES = Replacements(Wrapped(lambda: blind_spots.entries() + graphs.methods() + arrivals.entries()), fixed=True)
"""Functions that are wrapped while a block is open."""


def enter(user: object, watcher: Watcher) -> None:
    """Follow what `watcher` can see of it, until `user` leaves. First of all, let it watch what there is.

    Raises:
        ValueError: An operator that it watches by name is not loaded any more.
    """
    PATCHES.enter(user)
    arrivals.enter(user, watcher)
    if watcher.patched:
        patched_functions.PATCHES.enter(user)
    launches.enter(user)
    inductor.enter(user, watcher)


def leave(user: object) -> None:
    """End an `enter`, as far as it came. Can be repeated."""
    try:
        arrivals.leave(user)
        launches.leave(user)
    finally:
        try:
            patched_functions.PATCHES.leave(user)
        finally:
            try:
                inductor.leave(user)
            finally:
                PATCHES.leave(user)
