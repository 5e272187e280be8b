"""What `opintercept.pth` runs at the start of each Python that a watched program starts: it waits for torch.

Invariant: a child that never imports torch imports nothing but this file and `AfterImport`, which takes a millisecond.
Must import nothing that a starting Python has not imported anyway.
"""

from __future__ import annotations

import os

from opintercept._core.after_import import AfterImport

_process = os.getpid()


def _begin(_: str) -> None:
    waiting.end()
    from opintercept.cli.run.follow import follow

    follow(forked=os.getpid() != _process)


waiting = AfterImport("torch".__eq__, _begin)
waiting.begin()
