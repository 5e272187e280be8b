"""`Claim`: lets one recorder at a time write to a run's folder, by a file there that it locks.

Invariant: the system ends the lock with the process, so that no dead recorder keeps others away. A forked child has no
part in it. Must not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import weakref
from pathlib import Path

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import printable
from opintercept.runs.store.run import CALLS, INFO, child_folders, rank_folders

LOCK = "recording.lock"


class Claim:
    """The right to write to an existing folder, until `release`; refused if another recorder writes there."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._process = os.getpid()
        self._descriptor = -1
        try:
            while not self.holds():  # at first, and where a recorder that ended has removed the file meanwhile
                self._close()
                self._descriptor = _locked(folder, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {self._process} on {platform.node()!r}".encode(), 0)
        except BaseException:
            self._close()
            raise
        _held.add(self)

    def holds(self) -> bool:
        """Whether the folder still has the locked file."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
        return False

    def release(self) -> None:
        """Let others write. May be called again; does nothing in a forked child."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                if self.holds():
                    self._path.unlink()
            self._close()

    def _close(self) -> None:
        """Close the file, which ends the lock except in a forked child."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = _close  # of a recorder that nobody has ended


_held: weakref.WeakSet[Claim] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for claim in list(_held):
        claim._close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _locked(folder: Path, flags: int, how: int) -> int:
    """Open and lock the file of a folder; refused if another recorder has locked it."""
    # Anyone may have put a link or a pipe there.
    descriptor = os.open(folder / LOCK, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        who = printable(os.pread(descriptor, 200, 0).decode(errors="replace")) or "another process"
        os.close(descriptor)
        raise OpInterceptError(f"{who} is recording to {str(folder)!r}; name another folder") from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def check_unclaimed(folder: Path) -> None:
    """Refuse a folder that a recorder writes to. Several processes may ask at once."""
    with contextlib.suppress(OSError):  # there is no such file
        os.close(_locked(folder, os.O_RDONLY, fcntl.LOCK_SH))


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Raise ValueError for a folder that holds a run, unless it may be replaced, or anything else."""
    names = names_in(folder)
    if not overwrite and not {INFO, CALLS}.isdisjoint(names):
        raise taken(folder)
    processes = {entry.name for _, entry in rank_folders(folder)} | {entry.name for entry in child_folders(folder)}
    if names and INFO not in names and not (overwrite and processes.issuperset(names)):
        if processes:
            raise taken(folder)
        raise ValueError(f"path must be a new folder, an empty one or a run, got {str(folder)!r}")


def taken(folder: Path) -> ValueError:
    """The error for a folder that holds a run."""
    return ValueError(f"{str(folder)!r} already holds a run; name another folder, or pass overwrite=True")


def names_in(folder: Path) -> list[str]:
    """The names in the folder, without the files of a recorder that is about to begin, and what hides it from git."""
    ours = LOCK, f"{INFO}.part", ".gitignore"
    try:
        return [entry.name for entry in folder.iterdir() if not entry.name.startswith(ours)]
    except (FileNotFoundError, NotADirectoryError):
        return []
