"""`Claim`: lets one recorder at a time write to a run's folder, by a file there that names its process.

Invariant: on any file system, only one of several processes and threads can create that file. If a process has died
with its claim, the next one on the same machine takes over. Must not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

from opintercept._core.errors import OpInterceptError
from opintercept.runs.store.run import CALLS, INFO, child_folders, rank_folders

LOCK = "recording.lock"
_MOST = 4096  # bytes of the file
_PATIENCE = 5.0  # seconds to wait while another process looks at a claim
# The claims of this process by token. A file with the token of another one, which is gone, was left by an interrupt.
_held: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()


class Claim:
    """The right to write to an existing folder, until `release`; refused if another recorder writes there, or may.

    With `takes_over` it ends the claim of a process on another machine, which may have died.
    """

    def __init__(self, folder: Path, *, takes_over: bool = False) -> None:
        self._path = folder / LOCK
        self._process = os.getpid()
        self._token = uuid.uuid4().hex
        plain = this_process() | {"token": self._token}
        _held[self._token] = self
        try:
            with _one_at_a_time(folder):
                end_others(folder, takes_over=takes_over)
                # Put in place whole: a reader would take an empty file for the claim of a dead process.
                part = self._path.with_name(f"{LOCK}.{self._token}")
                part.write_text(json.dumps(plain), encoding="ascii")
                try:
                    _link(part, self._path)
                except FileExistsError:
                    raise _refusal(folder, _read(self._path)) from None
                finally:
                    part.unlink(missing_ok=True)
        except BaseException:
            self.release()
            raise

    def holds(self) -> bool:
        """Whether no other recorder has ended the claim."""
        return _read(self._path).get("token") == self._token

    def release(self) -> None:
        """Let others write. May be called again; does nothing in a forked child."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                if self.holds():
                    self._path.unlink()
            _held.pop(self._token, None)


def check_free(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds a run, unless it may be replaced, or anything else.

    Raises:
        ValueError: It does.
    """
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


def this_process() -> dict[str, object]:
    """This process as plain data."""
    return _machine() | {"pid": os.getpid(), "began": _began(os.getpid())}


def end_others(folder: Path, *, takes_over: bool) -> None:
    """Remove the claim of a process that has ended, and with `takes_over` that of one on another machine."""
    path = folder / LOCK
    if os.path.lexists(path):
        other = _read(path)
        if not (_is_over(other) if _machine().items() <= other.items() else takes_over):
            raise _refusal(folder, other)
        path.unlink(missing_ok=True)


def _refusal(folder: Path, other: dict[str, object]) -> OpInterceptError:
    remedy = "name another folder"
    if not _machine().items() <= other.items():
        remedy += ", or pass overwrite=True if that process has ended"
    who = f"process {other.get('pid')!r:.20} on {other.get('host')!r:.80}"
    return OpInterceptError(f"{who} is recording to {str(folder)!r}; {remedy}")


def _machine() -> dict[str, object]:
    """Where a process number means one process: each container numbers its own, whatever its host name."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": platform.node(), "space": space}


def _read(path: Path) -> dict[str, object]:
    """The content of a claim; empty if there is no claim, or another program's file."""
    try:
        with open(path, "rb") as file:
            plain = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _is_over(other: dict[str, object]) -> bool:
    """Return whether the process, which is on this machine, has ended, or was interrupted while making the claim."""
    pid = other.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return True
    if pid == os.getpid():
        return other.get("token") not in _held
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's process
        pass
    except OverflowError:
        return True
    return other.get("began") != _began(pid)  # otherwise another process has got its number


def _began(pid: int) -> str | None:
    """When a process began, in units of the system; None if the system does not say it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


def _link(part: Path, path: Path) -> None:
    """Give a file its name, unless another has it."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(path, "x", encoding="ascii") as file:
            file.write(part.read_text("ascii"))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine away from a claim while it is replaced, if the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # After that the file alone decides. A signal handler may run this while its own thread holds the lock.
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked in the meantime has the descriptor, too
        os.close(descriptor)
