"""`follow`: begins to watch a Python that a watched program has started, once it has imported torch.

Invariant: the process goes on as without it, whatever goes wrong here.
"""

from __future__ import annotations

import atexit

from opintercept.cli.run.family import Family
from opintercept.cli.run.watch import ProgramWatch


def follow() -> None:
    """Watch this process with the options of the program."""
    family = Family.here()
    if family is None:
        return
    watch = ProgramWatch(family.arguments(), family, child=True)
    atexit.register(watch.end)
    watch.begin()
