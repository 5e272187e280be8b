"""`compact`: rewrites the calls of a run from lines to columns.

Invariant: whenever the process ends, the lines or the columns are complete: the columns are written under another name
and renamed in one step, and only then the lines are deleted. Must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from pathlib import Path

from opintercept._core.errors import OpInterceptError
from opintercept.runs.record.claim import Claim, has_ended
from opintercept.runs.record.writer import PART, remove_columns
from opintercept.runs.store.flight import FLIGHT
from opintercept.runs.store.parquet import StoreWriter, is_installed
from opintercept.runs.store.run import CALLS, COLUMNS, COMPACTED, INFO, Run, open_run, read_members

LEAST = 1 << 24  # bytes of lines from which `open_compacted` does it
IDLE = 3600.0  # seconds without a new line after which it takes a process of another machine to have ended


def compact(path: str | os.PathLike[str]) -> None:
    """Put the calls of a run into columns: Parquet files in `columns/` of each process's folder, and no lines.

    They take a tenth of the room, and are read a hundred times as fast. Does nothing for processes whose calls are in
    columns already, and for a flight recorder's run.

    Args:
        path: As for `open_run`.

    Raises:
        OpInterceptError: There is no run, or a recorder still writes to it.
        OSError: The folder cannot be written.
        ImportError: DuckDB or numpy is not installed.

    Example:
        >>> import os, tempfile, torch
        >>> from opintercept import intercept, runs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run")):
        ...         _ = torch.ones(2, 3) @ torch.ones(3, 4)
        ...     runs.compact(f"{folder}/run")
        ...     print(sorted(os.listdir(f"{folder}/run/columns")))
        ...     print([call.record.op for call in runs.open_run(f"{folder}/run").calls()])
        ['calls-00000000.parquet', 'looks-00000000.parquet', 'sites-00000000.parquet', 'store.json']
        ['aten::mm']
    """
    run = open_run(path)
    for rank in run.ranks:
        if _has_lines(run.folder(rank), 0):
            _compact(run, rank)


def open_compacted(path: str | os.PathLike[str], least: int | None = None) -> Run:
    """Open a run, after compacting the processes that have many lines, where that is possible.

    While the process that recorded them runs, its recorder may go on in a further block, for which it needs the lines.

    Args:
        path: As for `open_run`.
        least: How many bytes of lines are many; `LEAST` if None.
    """
    least = LEAST if least is None else least
    run = open_run(path)
    folders = {rank: run.folder(rank) for rank in run.ranks}
    large = [rank for rank, folder in folders.items() if _has_lines(folder, least) and _has_ended(folder)]
    if not large or not is_installed():
        return run
    for rank in large:
        # A recorder still writes, the folder belongs to somebody else, or the disk is full: the lines are there.
        with contextlib.suppress(OpInterceptError, OSError):
            _compact(run, rank)
    return open_run(path)


def _has_ended(folder: Path) -> bool:
    try:
        ended = has_ended(read_members(folder).get("process"))
        return time.time() - os.lstat(folder / CALLS).st_mtime > IDLE if ended is None else ended
    except (OSError, OpInterceptError):
        return False


def _has_lines(folder: Path, least: int) -> bool:
    try:
        found = os.lstat(folder / CALLS)
    except OSError:
        return False
    flight = os.path.lexists(folder / FLIGHT)
    return stat.S_ISREG(found.st_mode) and found.st_size >= least and not flight


def _compact(run: Run, rank: int) -> None:
    folder = run.folder(rank)
    claim = Claim(folder)
    part = folder / PART
    try:
        for old in (part, folder / COLUMNS):
            remove_columns(old)
        part.mkdir()
        lines = os.stat(folder / CALLS)
        writer = StoreWriter(part, rank)
        skipped = run.written_to(rank, writer.add_line)
        writer.close(skipped=skipped)
        found = os.stat(folder / CALLS)
        if (found.st_ino, found.st_size) != (lines.st_ino, lines.st_size):
            raise OpInterceptError(f"{folder / CALLS} has changed; a run must not change while it is read")
        _sync(part)
        part.rename(folder / COLUMNS)
        _sync(folder)
        _mark(folder, lines.st_mtime_ns)
        (folder / CALLS).unlink()
    finally:
        with contextlib.suppress(OSError):
            remove_columns(part)
        claim.release()


def _mark(folder: Path, written: int) -> None:
    """Say in `run.json` that the calls are in columns, so that older versions refuse to read the run.

    The file keeps the time of the last call, by which a reader tells older runs from newer ones.
    """
    path = folder / INFO
    part = folder / f"{INFO}.part"
    plain = read_members(folder) | {"schema": COMPACTED}
    with open(part, "w", encoding="utf-8") as file:
        file.write(f"{json.dumps(plain, indent=1)}\n")
        file.flush()
        os.fsync(file.fileno())
    os.utime(part, ns=(written, written))
    part.replace(path)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
