"""A run as a folder: `run.json`, `calls.jsonl`, `tensors/*.safetensors`; here are its format and its reader.

Invariant: a folder is untrusted. Nothing in it is executed, no path is taken from it, and what it says of sizes is
checked before memory is asked for; what cannot be used is skipped with a warning.
Must not import torch: a run without tensors is read without it.
"""

from __future__ import annotations

import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept.runs._untrusted import WRONG, field_checks, integer, items, parsed, reader
from opintercept.runs.codec import MAX_LINE, TENSOR_NAME, StoredCall, decode

if TYPE_CHECKING:
    import torch

SCHEMA = 1
INFO, CALLS, TENSORS = "run.json", "calls.jsonl", "tensors"
STARTED = "%Y-%m-%dT%H:%M:%S%z"
MAX_INFO = 1 << 20
MAX_TENSOR = 1 << 32  # bytes of one tensor that is read back
_RANK = re.compile(r"rank([0-9]{1,6})", re.ASCII)

Kept = Literal["none", "stats", "sample", "full"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a run says of itself, `run.json`; texts are as the program's machine gave them.

    Attributes:
        argv: The program's command line.
        started: Local time, ISO 8601.
        finished: Whether the block was left and all was written.
        tensors: What was kept of tensors.
        rank: Of this process.
        world_size: Number of processes.
        versions: Of `"opintercept"`, `"torch"`, `"python"`, and of CUDA where there is one.
        devices: Names of the accelerators.
        flags: Settings that decide how products are computed.
    """

    argv: tuple[str, ...]
    started: str
    finished: bool
    tensors: Kept
    rank: int
    world_size: int
    versions: Mapping[str, str]
    devices: tuple[str, ...]
    flags: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"schema": SCHEMA} | {name: getattr(self, name) for name in self.__slots__}


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run's folder, or one that holds a folder `rank0`, `rank1`, ... for each process.

    Ranks that an older run has left, one of another number of processes, are left out with a warning.

    Raises:
        OpInterceptError: There is no run, or it cannot be used.
    """
    folder = Path(path)
    parts = {0: folder}
    if not os.path.lexists(folder / INFO):
        parts = {rank: entry for rank, entry in rank_folders(folder) if os.path.lexists(entry / INFO)}
        if not parts:
            raise OpInterceptError(
                f"a run must be a folder with {INFO}, or with rank0/{INFO} and so on, got {str(folder)!r}; "
                "record one with `opintercept run` or runs.RunRecorder"
            )
    infos = {rank: read_info(part) for rank, part in parts.items()}
    if len(parts) == 1 and 0 in parts:
        infos_by_rank = {info.rank: info for info in infos.values()}
        return Run(folder, {info.rank: parts[0] for info in infos.values()}, infos_by_rank)
    infos = _of_one_run(folder, infos)
    return Run(folder, {rank: parts[rank] for rank in infos}, infos)


def _of_one_run(folder: Path, infos: dict[int, RunInfo]) -> dict[int, RunInfo]:
    """Those of the newest run: a rank that never began to record has not replaced what was there."""
    sizes = {info.world_size for info in infos.values()}
    if len(sizes) == 1:
        return infos
    size = max(infos.values(), key=_began).world_size
    older = [str(rank) for rank, info in infos.items() if info.world_size != size]
    others = " or ".join(map(str, sorted(sizes - {size})[:16]))
    warnings.warn(
        f"ranks {', '.join(older[:16])} in {folder} are of an older run, of {others} processes instead of {size}, and "
        "were left out; remove them",
        OpInterceptWarning,
        stacklevel=3,
    )
    return {rank: info for rank, info in infos.items() if info.world_size == size}


def _began(info: RunInfo) -> float:
    try:
        return datetime.strptime(info.started, STARTED).timestamp()
    except (ValueError, OverflowError):  # written by somebody else
        return -math.inf


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of processes; a link to one may lead anywhere."""
    try:
        found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _RANK.fullmatch(entry.name))]
        return sorted((rank, entry) for rank, entry in found if entry.is_dir() and not entry.is_symlink())
    except (OSError, ValueError):  # of a NUL in the path
        return []


class Run:
    """A recorded run. Its calls are read from the disk whenever they are asked for, one at a time.

    Attributes:
        path: The folder.
        infos: What the run of each process says of itself, by rank.

    Example:
        >>> import tempfile, torch
        >>> from opintercept import intercept, runs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run")):
        ...         _ = torch.ones(2, 3) @ torch.ones(3, 4)
        ...     run = runs.open_run(f"{folder}/run")
        ...     [(str(call.record), call.values["output"].max) for call in run.calls()]
        [('aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4]', 3.0)]
    """

    def __init__(self, path: Path, parts: Mapping[int, Path], infos: Mapping[int, RunInfo]) -> None:
        self.path = path
        self.infos = dict(infos)
        self._parts = dict(parts)

    @property
    def info(self) -> RunInfo:
        """That of the first process."""
        return next(iter(self.infos.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The processes."""
        return tuple(self.infos)

    @property
    def alone(self) -> bool:
        """Whether the folder is that of one process, and not one that holds `rank0`, `rank1`, ..."""
        return self.path in self._parts.values()

    def calls(self, rank: int | None = None) -> Iterator[StoredCall]:
        """The calls in the order in which they ended, process by process; those of one for `rank`.

        A line that is torn or is no call is skipped; one warning for each process says how many.
        """
        for number in self.ranks if rank is None else (rank,):
            for _, call in self.located(number):
                yield call

    def located(self, rank: int) -> Iterator[tuple[int, StoredCall]]:
        """The calls of one process, each with its place for `at`."""
        path = self._parts[rank] / CALLS
        skipped = 0
        try:
            file = _open(path)
        except FileNotFoundError:
            return
        with file:
            position = 0
            while line := file.readline(MAX_LINE):
                size = len(line)
                whole = line.endswith(b"\n")
                while not line.endswith(b"\n") and (line := file.readline(MAX_LINE)):
                    size += len(line)  # too long: read to its end, and drop it
                call = decode(line, rank) if whole else None
                if call is None:
                    skipped += 1
                else:
                    yield position, call
                position += size
        if skipped:
            warnings.warn(
                f"{path} has {skipped} lines that are no calls, which were skipped; one that is torn at the end is "
                "what is left where a program was killed",
                OpInterceptWarning,
                stacklevel=3,
            )

    def at(self, rank: int, position: int) -> StoredCall:
        """The call at a place that `located` gave.

        Raises:
            OpInterceptError: The file has changed since.
        """
        with self.reader(rank) as at:
            return at(position)

    @contextmanager
    def reader(self, rank: int) -> Iterator[Callable[[int], StoredCall]]:
        """`at` for many calls of one process, whose file stays open."""
        path = self._parts[rank] / CALLS
        try:
            file = _open(path)
        except FileNotFoundError as missing:
            raise OpInterceptError(f"a run must not change while it is read, got no {path}") from missing
        with file:

            def at(position: int) -> StoredCall:
                file.seek(position)
                call = decode(file.readline(MAX_LINE), rank)
                if call is None:
                    raise OpInterceptError(f"a run must not change while it is read, got another {path}")
                return call

            yield at

    def tensor(self, call: StoredCall, role: str, limit: int = MAX_TENSOR) -> torch.Tensor | None:
        """The values that were kept, on the CPU and contiguous; a sample of them in one dimension.

        Args:
            call: One of this run's.
            role: As in `call.tensors`; None is returned for one that is not there.
            limit: Bytes that a tensor may have.

        Raises:
            OpInterceptError: The file is missing or not what the call says, or the tensor is larger than `limit`.
            ImportError: safetensors is not installed.
        """
        return self.load(call.rank, call.tensors[role], limit) if role in call.tensors else None

    def load(self, rank: int, name: str, limit: int = MAX_TENSOR) -> torch.Tensor:
        """The same by the tensor's name, for those in `given`."""
        match = TENSOR_NAME.fullmatch(name)
        if match is None or rank not in self._parts:
            raise OpInterceptError(f"a tensor must have a name such as '0/0123456789abcdef-0', got {name!r}")
        path = self._parts[rank] / TENSORS / f"{int(match[1]):08d}.safetensors"
        safe_open = _safe_open()
        _refuse_special(path)
        try:
            with safe_open(path, "pt") as file:
                size = _size_of(file.get_slice(match[2]))
                if size <= limit:
                    tensor: torch.Tensor = file.get_tensor(match[2])
                    return tensor
        except Exception as broken:  # a SafetensorError, an OSError, a KeyError of an unknown dtype
            raise OpInterceptError(f"a tensor must be in its file, got {name!r} of {path}: {broken}") from broken
        raise OpInterceptError(f"a tensor must have at most {limit} bytes, got {size} for {name!r} of {path}")


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError as missing:
        raise ImportError("a run's tensors need safetensors, got none; pip install 'opintercept[cli]'") from missing
    return safe_open


def _size_of(part: Any) -> int:
    """Bytes of a tensor that safetensors has found to be within its file."""
    bits = re.search("[0-9]+", part.get_dtype())  # "F32", "F8_E4M3"
    return math.prod(map(integer, items(part.get_shape()))) * (int(bits[0]) if bits else 8) // 8


def _refuse_special(path: Path) -> None:
    """No link leads out of the folder, and no pipe keeps a reader waiting."""
    for part in (path.parent, path):
        try:
            mode = os.lstat(part).st_mode
        except OSError as missing:
            raise OpInterceptError(f"a run's file must be there, got none at {str(path)!r}") from missing
        if not (stat.S_ISREG(mode) if part == path else stat.S_ISDIR(mode)):
            raise OpInterceptError(f"a run must be made of plain files and folders, got {str(part)!r}; remove it")


def _open(path: Path) -> BufferedReader:
    """Open a plain file.

    Raises:
        FileNotFoundError: There is none.
        OpInterceptError: It is a link, a pipe or the like, or cannot be read.
    """
    # Not waiting for somebody who writes to a pipe, and not through a link; Windows has neither flag.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as failed:  # a ValueError of a NUL in the path
        raise OpInterceptError(f"a run's file must be a plain file, got {str(path)!r}: {failed}") from failed
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OpInterceptError(f"a run's file must be a plain file, got {str(path)!r}; remove it")
    return os.fdopen(descriptor, "rb")


def read_info(folder: Path) -> RunInfo:
    """What the run of one process says of itself.

    Raises:
        FileNotFoundError: There is none.
        OpInterceptError: It cannot be used.
    """
    with _open(folder / INFO) as file:
        read = file.read(MAX_INFO + 1)
    members = _parsed(read) if len(read) <= MAX_INFO else None
    if not isinstance(members, dict):
        raise OpInterceptError(f"{INFO} must be a JSON object of at most {MAX_INFO} bytes, got another in {folder}")
    if members.get("schema") != SCHEMA:
        raise OpInterceptError(
            f"a run must have schema {SCHEMA}, got {_shown(members.get('schema'))} in {folder}; read it with the "
            "version of opintercept that wrote it"
        )
    try:
        return _read_members(members)
    except WRONG as wrong:
        raise OpInterceptError(
            f"{INFO} must have the fields of RunInfo, got a wrong one in {folder}: {wrong}"
        ) from None


_read_members: Callable[[dict[str, Any]], RunInfo] = reader(field_checks(RunInfo), RunInfo)


def _parsed(read: bytes) -> Any:
    try:
        return parsed(read.decode())
    except UnicodeDecodeError:
        return None


def _shown(value: Any) -> str:
    """Few characters of a value that may be nested deeper than Python writes."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
