"""`Member`: one process of a program, and the folder that it makes at its first call.

Invariant: no two processes have one folder, and a child that makes no call has none.
Imports torch in functions only, which run after the program has imported it.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opintercept.cli.run.family import Family

_LONGEST = 40  # characters of a name


class Member:
    """What is known of one process. Make one at its begin: after a fork, or when it imports torch.

    Attributes:
        child: Whether another process of the program began before.
    """

    def __init__(self, family: Family | None, *, child: bool) -> None:
        self.child = child
        self._family = family
        self._born = time.time_ns()
        self._pid, self._parent = os.getpid(), os.getppid()
        self._lock = threading.RLock()
        self._looked = False
        self._folder: Path | None = None

    def about(self) -> dict[str, str] | None:
        """What `run.json` says of the process; None if children are not followed."""
        if self._family is None:
            return None
        about = {"program": self._family.program, "pid": str(self._pid), "born": str(self._born)}
        return about | ({"name": _name(), "parent": str(self._parent)} if self.child else {"name": "main"})

    def folder(self) -> Path | None:
        """The folder of a child, made now; None if it has none: it loads data, or the folder of the run is gone."""
        with self._lock:
            if not self._looked:
                self._looked = True
                from torch.utils.data import get_worker_info

                if self._family is not None and get_worker_info() is None:  # no worker of a DataLoader
                    self._folder = self._made(Path(self._family.folder))
            return self._folder

    def _made(self, base: Path) -> Path | None:
        for name in self._names():
            try:
                if self._family is not None and self._family.options["out"] is not None:
                    base.mkdir(parents=True, exist_ok=True)
                os.mkdir(base / name)
            except FileExistsError:  # of another process that had this number, or this rank
                continue
            except OSError:
                return None
            return base / name
        return None

    def _names(self) -> Iterator[str]:
        from opintercept._ranks.rank import rank_and_world_size

        rank, world_size = rank_and_world_size()
        if world_size > 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun starts all ranks anew if one fails
            yield f"rank{rank}" if attempt == "0" else f"rank{rank}-attempt{attempt}"
        name = f"{_name()}-{self._pid}"
        yield name
        yield from (f"{name}.{number}" for number in itertools.count(2))


def _name() -> str:
    """What the program calls the process: the name of its `Process`, or the name of its script or module."""
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if multiprocessing is None else multiprocessing.current_process().name
    if name == "MainProcess":
        path = Path(sys.argv[0] if sys.argv else "")
        name = path.parent.name if path.name == "__main__.py" else path.stem.removeprefix("-c")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", str(name)).strip("-.")[:_LONGEST] or "python"
