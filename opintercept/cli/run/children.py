"""Whether a program has had child processes in which torch may have run: forks of it, or others that took their time.

Invariant: nothing of the program is wrapped, and a process too short to import torch does not count.
Must not import torch.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource

# Importing torch takes a processor longer; a version control system, a compiler's question for its version or the
# resource tracker of multiprocessing do not take as long.
_SECONDS = 0.5

_forks = 0
_before = 0.0


def begin() -> None:
    """Count from here on. The process may have had children before, as the shell that became this process."""
    global _before
    _before = _reaped()
    os.register_at_fork(after_in_parent=_count)


def had_some() -> bool:
    """Whether there were any since `begin`. What a forked child runs needs no time of its own to import torch."""
    return _forks > 0 or _reaped() - _before + _not_reaped() >= _SECONDS


def _count() -> None:
    global _forks
    _forks += 1


def _reaped() -> float:
    """Processor time of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _not_reaped() -> float:
    """Processor time of those that run, or that nobody has waited for; 0 where the system does not list them."""
    ticks = 0
    for path in glob.glob("/proc/self/task/*/children"):
        with contextlib.suppress(OSError), open(path) as file:
            ticks += sum(map(_ticks, file.read().split()))
    return ticks / os.sysconf("SC_CLK_TCK")


def _ticks(process: str) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
        # After the name, which may hold anything, the 12th to 15th field are its own time and that of its children.
        return sum(map(int, file.read().rpartition(")")[2].split()[11:15]))
    return 0
