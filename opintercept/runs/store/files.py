"""Reads files that anyone may have made, says whose they are, and writes a file whole or not at all.

Must not import torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from opintercept._core.errors import OpInterceptError


@contextmanager
def replaced(path: str | os.PathLike[str], what: str) -> Iterator[str]:
    """Yield a name to write to; the file replaces `path` when the block ends, unless the block fails.

    Errors say what is written: `"the page"`.
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OpInterceptError(f"cannot write {what} to {os.fspath(path)!r}, which is not a plain file")
    partial = f"{target}.partial"
    try:
        yield partial
        os.replace(partial, target)
    except OSError as failed:
        raise OpInterceptError(f"cannot write {what} to {os.fspath(path)!r}: {failed}") from failed
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def open_plain(path: Path) -> BufferedReader:
    """Open a plain file; FileNotFoundError if there is none, OpInterceptError for a link, a pipe and the like."""
    try:
        # Does not follow a link, and does not wait for a process to write to a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as failed:  # a ValueError for a NUL in the path
        raise OpInterceptError(f"cannot open {str(path)!r} as a plain file: {failed}") from failed
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OpInterceptError(f"{str(path)!r} must be a plain file; remove it")
    return os.fdopen(descriptor, "rb")


def written_by_others(folder: Path, depth: int = 2) -> bool:
    """Whether a folder, or something as deep in it as runs have files, is another user's or cannot be looked at."""
    try:
        return os.stat(folder).st_uid != os.getuid() or any(
            each.stat(follow_symlinks=False).st_uid != os.getuid()
            or (depth and each.is_dir(follow_symlinks=False) and written_by_others(Path(each.path), depth - 1))
            for each in os.scandir(folder)
        )
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no run; a ValueError for a NUL in the path
        return False
    except OSError:
        return True


def read_plain(path: Path, most: int) -> bytes:
    """Read a plain file of at most so many bytes."""
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OpInterceptError(
                f"{str(path)!r} must have at most {most:,} bytes, got {size:,}; no recorder writes more"
            )
        return file.read(size)
