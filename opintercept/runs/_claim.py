"""Who writes to a run's folder: one recorder at a time, by a file in it that names the process.

Invariant: a claim is made by creating that file, which one of any number of processes and threads can do, on any file
system. Where a process has died with its claim, the next one on the same machine takes its place.
Must not import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opintercept._errors import OpInterceptError

LOCK = "recording.lock"
_MOST = 4096  # bytes of the file
_PATIENCE = 5.0  # seconds for which another process may look at a claim
_fcntl: Any = None if os.name == "nt" else importlib.import_module("fcntl")
_held: set[str] = set()  # tokens of this process; a claim of this process that is not in here was broken off


class Claim:
    """The right to write to a folder, until `release`.

    Args:
        folder: Is there.
        takes_over: Whether the claim of a process on another machine, of which nothing can be known, is ended.

    Raises:
        OpInterceptError: Another recorder writes there, or may do so.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path, *, takes_over: bool = False) -> None:
        self._path = folder / LOCK
        self._process = os.getpid()
        self._token = uuid.uuid4().hex
        plain = _machine() | {"pid": self._process, "began": _began(self._process), "token": self._token}
        _held.add(self._token)
        try:
            with _one_at_a_time(folder):
                end_others(folder, takes_over=takes_over)
                # Whole at once: a reader would take an empty one for that of a process that has died.
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
        """Whether nobody has ended the claim."""
        return _read(self._path).get("token") == self._token

    def release(self) -> None:
        """Let others write; may be called again, and by a child does nothing."""
        if self._process == os.getpid():
            with contextlib.suppress(OSError):
                if self.holds():
                    self._path.unlink()
            _held.discard(self._token)


def end_others(folder: Path, *, takes_over: bool) -> None:
    """Remove the claim of a process that has ended, or with `takes_over` of one that nothing can be known of.

    Raises:
        OpInterceptError: The process goes on, or may do so.
    """
    path = folder / LOCK
    if os.path.lexists(path):
        other = _read(path)
        if not (_is_over(other) if _machine().items() <= other.items() else takes_over):
            raise _refusal(folder, other)
        path.unlink(missing_ok=True)


def _refusal(folder: Path, other: dict[str, object]) -> OpInterceptError:
    remedy = "name another folder"
    if not _machine().items() <= other.items():
        remedy += ", or pass overwrite=True if that has ended"
    who = f"process {other.get('pid')!r:.20} on {other.get('host')!r:.80}"
    return OpInterceptError(
        f"path must be written by one recorder at a time, got {str(folder)!r}, to which {who} writes; {remedy}"
    )


def _machine() -> dict[str, object]:
    """Where a process's number says which one it is: containers of one name number theirs on their own."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return {"host": platform.node(), "space": space}


def _read(path: Path) -> dict[str, object]:
    """What a claim says; empty if there is none, or another program's file."""
    try:
        with open(path, "rb") as file:
            plain = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


def _is_over(other: dict[str, object]) -> bool:
    """Whether the process of this machine that made the claim has ended, or has broken off."""
    pid = other.get("pid")
    if not isinstance(pid, int) or pid <= 0:
        return True
    if pid == os.getpid():
        return other.get("token") not in _held
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's process
        pass
    return other.get("began") != _began(pid)  # else another process has got its number


def _began(pid: int) -> str | None:
    """When a process began, in a form of the system's; None where that is not told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


def _link(part: Path, path: Path) -> None:
    """Give a file its name unless that is taken."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(path, "x", encoding="ascii") as file:
            file.write(part.read_text("ascii"))


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep others of this machine from looking at a claim while it is ended and made anew, where the system can."""
    if _fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _PATIENCE  # then the file itself has to do: a signal's handler may be here again
        while time.monotonic() < end:
            try:
                _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.005)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        with contextlib.suppress(OSError):
            _fcntl.flock(descriptor, _fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor, too
        os.close(descriptor)
