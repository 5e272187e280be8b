"""The lock of what the blocks of all threads share.

Invariant: `shared` is read anew each time, as a forked child has another.
"""

from __future__ import annotations

import threading

from opintercept._core.fork import in_child

shared = threading.RLock()  # reentrant: a signal handler may enter a block while its thread enters one
"""Held while anything changes that blocks of all threads share: what they watch, kernels, patches, known libraries.

There is one for all, and no order to keep: where a thread holds it, the garbage collector may close a generator that is
suspended in a block, which takes whatever leaving takes.
"""


@in_child
def _renew() -> None:
    global shared
    shared = threading.RLock()
