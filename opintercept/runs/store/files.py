"""`replaced`: writes a file so that it appears whole or not at all. Must not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from opintercept._core.errors import OpInterceptError


@contextmanager
def replaced(path: str | os.PathLike[str], what: str) -> Iterator[str]:
    """Yield a name to write to; the file replaces `path` when the block ends, unless the block fails.

    Args:
        path: A plain file, if it exists.
        what: What is written, for errors.

    Raises:
        OpInterceptError: The file cannot be written.
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
