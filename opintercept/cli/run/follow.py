"""`follow`: begins to watch a Python that a watched program has started, once it has imported torch.

Invariant: the process goes on as without it, whatever goes wrong here.
"""

from __future__ import annotations

import atexit
import os
import sys

from opintercept._core.version import __version__
from opintercept.cli.run.family import Family
from opintercept.cli.run.watch import ProgramWatch
from opintercept.cli.terminal.progress import write


def follow(*, forked: bool) -> None:
    """Watch this process with the options of the program; `forked` says whether it has forked since Python began."""
    family = Family.here()
    if family is None:
        return
    if family.version != __version__:
        text = f"process {os.getpid()} has opintercept {__version__} instead of {family.version}, and is not watched"
        write(sys.stderr, f"opintercept run: {text}\n")
        return
    watch = ProgramWatch(family.arguments(), family, child=True, forked=forked)
    atexit.register(watch.end)
    watch.begin()
