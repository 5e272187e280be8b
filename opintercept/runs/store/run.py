"""A run on disk, and its reader: a folder with `run.json`, the calls and `tensors/*.safetensors`.

The calls are lines in `calls.jsonl` as a recorder writes them; `compact` makes columns of them in `columns/`.

Invariant: anyone may have written the folder. Nothing in it is executed, no path is taken from it, and sizes that it
gives are checked before memory is asked for. A call that cannot be read is skipped with a warning.
Must not import torch: a run without tensors is read without it.
"""

from __future__ import annotations

import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from opintercept._core.errors import OpInterceptError, OpInterceptWarning
from opintercept._core.tables import Frames, Page, Part
from opintercept._core.text import counted, listed, printable
from opintercept.runs.store.codec import MAX_LINE, TENSOR_NAME, StoredCall, decode
from opintercept.runs.store.flight import FLIGHT, places
from opintercept.runs.store.progress import report
from opintercept.runs.store.untrusted import WRONG, checked, field_checks, integer, items, parsed

if TYPE_CHECKING:
    import torch

    from opintercept.runs.store.columns import Columns
    from opintercept.runs.store.parquet import StoreColumns

SCHEMA = 1  # of a run as it is recorded
COMPACTED = 2  # of one whose calls are in columns, which versions before 0.2 do not read
INFO, CALLS, TENSORS, COLUMNS = "run.json", "calls.jsonl", "tensors", "columns"
_MOST_OPEN = 4  # processes whose columns stay open, some megabytes each
_MOST_FILES = 32  # of tensors that stay open
_APART = 60.0  # seconds between the last call of a run and the first of the next one, on clocks that may differ
_LONGEST = 200  # characters of a path, a command or the devices that are shown
_COMMAND = 120  # characters of the command in the head of a result
STARTED = "%Y-%m-%dT%H:%M:%S%z"
MAX_INFO = 1 << 20  # bytes of `run.json`
MAX_TENSOR = 1 << 32  # bytes of one tensor that is read back
_RANK = re.compile(r"rank([0-9]{1,6})", re.ASCII)

TensorMode = Literal["none", "stats", "sample", "full"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The description of a run, or of one process of it: `run.json`.

    Attributes:
        argv: The program's command line.
        started: Local time, ISO 8601.
        finished: Whether the block was left and everything was written.
        tensors: What was kept of tensors.
        rank: The rank of this process.
        world_size: The number of processes.
        versions: Versions of `"opintercept"`, `"torch"`, `"python"`, and of CUDA if there is one.
        devices: Names of the accelerators.
        flags: Settings that decide how products are computed.
        launch: What torchrun says of the process: its run's `"id"`, its `"node"`, and there the `"attempt"` to run it.
    """

    argv: tuple[str, ...]
    started: str
    finished: bool
    tensors: TensorMode
    rank: int
    world_size: int
    versions: Mapping[str, str]
    devices: tuple[str, ...]
    flags: Mapping[str, str]
    launch: Mapping[str, str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {"schema": SCHEMA} | {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class RunHead:
    """What a result says of a run that it is about.

    Attributes:
        path: The folder.
        ranks: The ranks of the processes.
        info: The description of the first process.
        alone: Whether the folder is that of one process, and does not hold `rank0`, `rank1`, ...
    """

    path: str
    ranks: tuple[int, ...]
    info: RunInfo
    alone: bool

    def __str__(self) -> str:
        return f"{printable(self.path)}  {printable(' '.join(self.info.argv), _COMMAND)}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the folder, the ranks and the description as plain data."""
        return {"path": self.path, "ranks": list(self.ranks), "info": self.info.as_dict()}


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run's folder, or one that holds a folder `rank0`, `rank1`, ... for each process.

    Ranks left over from an older run are skipped with a warning: those of another number of processes, of another
    launch or attempt of torchrun, and those whose last call was written a minute before the newest rank began.

    Raises:
        OpInterceptError: There is no run, or it cannot be read.
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
    infos = _of_one_run(folder, parts, infos)
    return Run(folder, {rank: parts[rank] for rank in infos}, infos)


def _pairs(named: Mapping[str, str], between: str) -> str:
    pairs = list(named.items())[:64]
    return ", ".join(f"{printable(name, 60)}{between}{printable(str(value), 60)}" for name, value in pairs)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a run, which may yet be one that cannot be read."""
    folder = Path(path)
    return any(os.path.lexists(part / INFO) for part in (folder, *(entry for _, entry in rank_folders(folder))))


def _of_one_run(folder: Path, parts: Mapping[int, Path], infos: dict[int, RunInfo]) -> dict[int, RunInfo]:
    """The descriptions of the newest run: a rank that never began to record has not replaced an older one."""
    newest = max(infos.values(), key=_began)
    of_nodes: dict[str | None, RunInfo] = {}
    for info in sorted(infos.values(), key=_began):
        of_nodes[_launch(info, "node")] = info
    older: dict[int, str] = {}
    for rank, info in infos.items():
        if info.world_size != newest.world_size:
            older[rank] = f"of {info.world_size} processes instead of {newest.world_size}"
        elif _differ(info, newest, "id") or _differ(info, of_nodes[_launch(info, "node")], "attempt"):
            older[rank] = "of another launch"
        elif max(_began(info), _written(parts[rank])) + _APART < _began(newest):
            older[rank] = "that had ended before the other ranks began"
    for reason in sorted(set(older.values()))[:16]:
        names = [f"rank{rank}" for rank in older if older[rank] == reason]
        warnings.warn(
            f"skipped {', '.join(names[:16])}{', ...' if len(names) > 16 else ''} in {folder}, left over from an older "
            f"run {reason}; remove that run",
            OpInterceptWarning,
            stacklevel=3,
        )
    return {rank: info for rank, info in infos.items() if rank not in older}


def _launch(info: RunInfo, name: str) -> str | None:
    return None if info.launch is None else info.launch.get(name)


def _differ(info: RunInfo, other: RunInfo, name: str) -> bool:
    """Return whether both name a launch and these differ."""
    return None not in (_launch(info, name), _launch(other, name)) and _launch(info, name) != _launch(other, name)


def _written(part: Path) -> float:
    """Return when a process last wrote to its folder, as far as is known; copying makes that later."""
    times = []
    for name in (INFO, CALLS):
        with suppress(OSError):
            times.append(os.lstat(part / name).st_mtime)
    return max(times, default=math.inf)


def _began(info: RunInfo) -> float:
    try:
        return datetime.strptime(info.started, STARTED).timestamp()
    except (ValueError, OverflowError):  # another program wrote it
        return -math.inf


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """The folders of processes, without links, which may lead anywhere."""
    try:
        found = [(int(match[1]), entry) for entry in folder.iterdir() if (match := _RANK.fullmatch(entry.name))]
        return sorted((rank, entry) for rank, entry in found if entry.is_dir() and not entry.is_symlink())
    except (OSError, ValueError):  # a ValueError for a NUL in the path
        return []


class Run(Frames, Page):
    """A recorded run. Its calls are read from disk one at a time, each time that they are asked for.

    As a data frame, it has a row for each call, with the statistics of its tensors: `run.to_pandas()`.

    Attributes:
        path: The folder.
        infos: The descriptions of the processes, by rank.

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
        self._in_columns: dict[int, bool] = {}
        self._stores: dict[int, StoreColumns] = {}
        self._tensor_files: dict[Path, tuple[tuple[int, ...], Any]] = {}

    @property
    def info(self) -> RunInfo:
        """The description of the first process."""
        return next(iter(self.infos.values()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the processes."""
        return tuple(self.infos)

    @property
    def alone(self) -> bool:
        """Whether the folder is that of one process, and does not hold `rank0`, `rank1`, ..."""
        return self.path in self._parts.values()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {counted(len(self.infos), 'rank')})"

    def parts(self) -> Iterator[Part]:
        """What `print` shows: how the run was made, without reading its calls."""
        info, ranks = self.info, len(self.infos)
        unfinished = [rank for rank, each in self.infos.items() if not each.finished]
        which = f" (ranks {listed(unfinished)})" if ranks > 1 else ""
        state = f"not finished{which}: still running, or killed" if unfinished else "finished"
        world = f"; {ranks} of {info.world_size} ranks" if max(info.world_size, ranks) > 1 else ""
        yield f"run       {printable(str(self.path), _LONGEST)}: {state}{world}"
        yield f"started   {printable(info.started, _LONGEST)}"
        yield f"command   {printable(' '.join(info.argv), _LONGEST)}"
        yield f"versions  {_pairs(info.versions, ' ')}"
        yield f"devices   {printable(', '.join(info.devices), _LONGEST) or 'the CPU'}"
        yield f"flags     {_pairs(info.flags, '=')}"
        yield f"tensors   {info.tensors}"

    def head(self) -> RunHead:
        """What results say of the run."""
        return RunHead(str(self.path), self.ranks, self.info, self.alone)

    def calls(self, rank: int | None = None) -> Iterator[StoredCall]:
        """The calls in the order in which they ended, process by process; with `rank`, those of one process.

        Lines that are not calls are skipped, and one warning for each process counts them.
        """
        for number in self.ranks if rank is None else (rank,):
            for _, call in self.located(number):
                yield call

    def located(self, rank: int) -> Iterator[tuple[int, StoredCall]]:
        """The calls of one process, each with its position for `at`."""
        if (store := self._store(rank)) is not None:
            yield from enumerate(store.calls())
            return
        yield from self._read(rank, partial(decode, rank=rank))

    def columns(self, rank: int) -> Columns:
        """Return the calls of one process as columns, made from its lines each time if they are not on disk.

        Raises:
            ImportError: numpy is not installed; or the run is compacted, and DuckDB is not installed.
        """
        if (store := self._store(rank)) is not None:
            return store
        try:
            from opintercept.runs.store.parquet import columns_of
        except ImportError as missing:
            raise ImportError("reading runs in bulk needs numpy; pip install 'opintercept[cli]'") from missing
        return columns_of(rank, partial(self._read, rank))

    def _columns(self) -> Mapping[str, Any]:
        processes = [self.columns(rank) for rank in self.ranks]
        from opintercept.runs.store.data_frame import frame_of

        return frame_of(processes)

    def in_columns(self, rank: int) -> bool:
        """Whether the calls of one process are in columns on disk."""
        return self._store(rank) is not None

    def close(self) -> None:
        """Close columns and tensors on disk. They are opened again when they are asked for."""
        self._stores.clear()
        self._tensor_files.clear()

    def folder(self, rank: int) -> Path:
        """The folder of one process."""
        return self._parts[rank]

    def _store(self, rank: int) -> StoreColumns | None:
        """The columns on disk; None if there are none, or lines that they may lack. Decided once."""
        part = self._parts[rank]
        if rank not in self._in_columns:
            self._in_columns[rank] = is_compacted(part)
        if not self._in_columns[rank]:
            return None
        if rank not in self._stores:
            from opintercept.runs.store.parquet import StoreColumns

            self._stores[rank] = store = StoreColumns(part / COLUMNS, rank)
            if store.skipped:
                _warn_of_lines(store.skipped, part / CALLS)
            if len(self._stores) > _MOST_OPEN:
                del self._stores[next(iter(self._stores))]
        return self._stores[rank]

    def _read(self, rank: int, take: Callable[[bytes], T | None]) -> Iterator[tuple[int, T]]:
        """Apply a function to the lines of a process; it returns None for a line that is not a call."""
        skipped = 0
        for position, line in self._lines(rank):
            taken = take(line)
            if taken is None:
                skipped += 1
            else:
                yield position, taken
        if skipped:
            _warn_of_lines(skipped, self._parts[rank] / CALLS)
        yield from self._in_flight(rank, take)

    def _lines(self, rank: int) -> Iterator[tuple[int, bytes]]:
        """The lines of a process, each with its position; empty for one that is torn or too long."""
        path = self._parts[rank] / CALLS
        try:
            file = _open(path)
        except FileNotFoundError as missing:
            if is_compacted(self._parts[rank]):
                raise OpInterceptError(f"{path} was compacted by another process; open the run again") from missing
            return
        with file:
            position, shown, end = 0, str(path), os.fstat(file.fileno()).st_size
            while line := file.readline(MAX_LINE):
                size = len(line)
                last = line
                while not last.endswith(b"\n") and (last := file.readline(MAX_LINE)):
                    size += len(last)  # a line that is too long is read to its end, and dropped
                yield position, line if line.endswith(b"\n") else b""
                position += size
                report(shown, position, end)

    def written_to(self, rank: int, take: Callable[[bytes], object]) -> int:
        """Pass the lines of a process to a function, and return how many it rejects."""
        return sum(take(line) is None for _, line in self._lines(rank))

    def _in_flight(self, rank: int, take: Callable[[bytes], T | None]) -> Iterator[tuple[int, T]]:
        """The calls in a flight recorder's file, whose process was killed or still runs. Positions are negative."""
        path = self._parts[rank] / FLIGHT
        try:
            file = _open(path)
        except FileNotFoundError:
            return
        with file:
            found, left_out = places(file)
            for place in found:
                file.seek(place)
                taken = take(file.readline(MAX_LINE))
                if taken is None:  # the program that runs has begun to write over it
                    left_out += 1
                else:
                    yield -place, taken
        if left_out:
            warnings.warn(
                f"skipped {counted(left_out, 'unreadable call')} in {path}; one that names very many arguments has no "
                "room there, and a program that still runs writes over others",
                OpInterceptWarning,
                stacklevel=4,
            )

    def at(self, rank: int, position: int) -> StoredCall:
        """The call at a position that `located` gave.

        Raises:
            OpInterceptError: The file has changed since.
        """
        with self.reader(rank) as at:
            return at(position)

    @contextmanager
    def reader(self, rank: int) -> Iterator[Callable[[int], StoredCall]]:
        """`at` for many calls of one process: its files stay open."""
        if (store := self._store(rank)) is not None:
            import numpy as np

            yield lambda position: next(store.calls_at(np.array([position])))
            return
        with ExitStack() as stack:
            files: dict[str, BufferedReader] = {}

            def at(position: int) -> StoredCall:
                name = FLIGHT if position < 0 else CALLS
                path = self._parts[rank] / name
                if name not in files:
                    try:
                        files[name] = stack.enter_context(_open(path))
                    except FileNotFoundError as missing:
                        raise OpInterceptError(f"{path} is gone; a run must not change while it is read") from missing
                files[name].seek(abs(position))
                call = decode(files[name].readline(MAX_LINE), rank)
                if call is None:
                    raise OpInterceptError(
                        f"{path} has no call at byte {abs(position)}; a run must not change while it is read"
                    )
                return call

            yield at

    def tensor(self, call: StoredCall, role: str, limit: int = MAX_TENSOR) -> torch.Tensor | None:
        """The recorded values, on the CPU and contiguous; a sample has one dimension.

        Args:
            call: A call of this run.
            role: A role in `call.tensors`; for any other the result is None.
            limit: The most bytes that the tensor may have.

        Raises:
            OpInterceptError: The file is missing or does not hold the tensor, or the tensor is larger than `limit`.
            ImportError: safetensors is not installed.
        """
        return self.load(call.rank, call.tensors[role], limit) if role in call.tensors else None

    def load(self, rank: int, name: str, limit: int = MAX_TENSOR) -> torch.Tensor:
        """The same by the tensor's name, for tensors in `StoredCall.given`."""
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise OpInterceptError(f"a tensor must have a name such as '0/0123456789abcdef-0', got {name!r}")
        if rank not in self._parts:
            raise OpInterceptError(f"rank must be one of {', '.join(map(str, self.ranks))}, got {rank}")
        path = self._parts[rank] / TENSORS / f"{int(match[1]):08d}.safetensors"
        _refuse_special(path)
        try:
            file = self._tensor_file(path)
            size = _size_of(file.get_slice(match[2]))
            if size <= limit:
                tensor: torch.Tensor = file.get_tensor(match[2])
                return tensor
        except ImportError:
            raise
        except Exception as broken:  # a SafetensorError, an OSError, a KeyError for an unknown dtype
            raise OpInterceptError(f"cannot read tensor {name!r} from {path}: {broken}") from broken
        raise OpInterceptError(f"tensor {name!r} in {path} has {size} bytes, more than the limit of {limit}")

    def _tensor_file(self, path: Path) -> Any:
        """A file of tensors, which stays open: reading the head of one with thousands takes milliseconds."""
        found = os.stat(path)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if path not in self._tensor_files or self._tensor_files[path][0] != key:
            self._tensor_files.pop(path, None)
            self._tensor_files[path] = key, _safe_open()(path, "pt")
            if len(self._tensor_files) > _MOST_FILES:
                del self._tensor_files[next(iter(self._tensor_files))]
        return self._tensor_files[path][1]


def is_compacted(folder: Path) -> bool:
    """Whether the calls of a process are in columns. Lines that are there as well may be newer, and count alone."""
    return os.path.lexists(folder / COLUMNS) and not os.path.lexists(folder / CALLS)


def _warn_of_lines(skipped: int, path: Path) -> None:
    warnings.warn(
        f"skipped {counted(skipped, 'unreadable line')} in {path}; a program that is killed can leave its last line "
        "torn",
        OpInterceptWarning,
        stacklevel=5,
    )


def _safe_open() -> Any:
    try:
        from safetensors import safe_open
    except ImportError as missing:
        raise ImportError("reading tensors of a run needs safetensors; pip install 'opintercept[cli]'") from missing
    return safe_open


def _size_of(part: Any) -> int:
    """The bytes of a tensor, whose file is large enough for it, as safetensors checks."""
    bits = re.search("[0-9]+", part.get_dtype())  # "F32", "F8_E4M3"
    return math.prod(map(integer, items(part.get_shape()))) * (int(bits[0]) if bits else 8) // 8


def _refuse_special(path: Path) -> None:
    """Refuse a link, which may lead out of the folder, and a pipe, which keeps its reader waiting."""
    for part in (path.parent, path):
        try:
            mode = os.lstat(part).st_mode
        except OSError as missing:
            raise OpInterceptError(f"{str(path)!r} is missing") from missing
        if not (stat.S_ISREG(mode) if part == path else stat.S_ISDIR(mode)):
            raise OpInterceptError(f"{str(part)!r} must be a plain {'file' if part == path else 'folder'}; remove it")


def _open(path: Path) -> BufferedReader:
    """Open a plain file.

    Raises:
        FileNotFoundError: There is none.
        OpInterceptError: It is a link, a pipe or the like, or cannot be read.
    """
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


def read_members(folder: Path) -> dict[str, Any]:
    """Read what `run.json` says of one process, unchecked.

    Raises:
        FileNotFoundError: There is none.
        OpInterceptError: It cannot be read.
    """
    path = folder / INFO
    with _open(path) as file:
        read = file.read(MAX_INFO + 1)
    members = _parsed(read) if len(read) <= MAX_INFO else None
    if not isinstance(members, dict):
        raise OpInterceptError(f"{path} must hold a JSON object of at most {MAX_INFO:,} bytes")
    return members


def read_info(folder: Path) -> RunInfo:
    """Read the description of one process.

    Raises:
        FileNotFoundError: There is none.
        OpInterceptError: It cannot be read.
    """
    path, members = folder / INFO, read_members(folder)
    if members.get("schema") not in (SCHEMA, COMPACTED):
        versions = members.get("versions")
        wrote = versions.get("opintercept") if isinstance(versions, dict) else None
        reader = f"opintercept {wrote:.40}, which" if isinstance(wrote, str) else "the version of opintercept that"
        raise OpInterceptError(
            f"{path} must have schema {SCHEMA} or {COMPACTED}, got {_shown(members.get('schema'))}; read it with "
            f"{reader} wrote it"
        )
    values = {}
    for name, checks in _INFO_CHECKS.items():
        try:
            values[name] = checked(members.get(name), checks)
        except WRONG:
            shown = _shown(members[name]) if name in members else "none"
            raise OpInterceptError(f"{path} must have a valid {name!r}, got {shown}") from None
    return RunInfo(**values)


_INFO_CHECKS = field_checks(RunInfo)


def _parsed(read: bytes) -> Any:
    try:
        return parsed(read.decode())
    except UnicodeDecodeError:
        return None


def _shown(value: Any) -> str:
    """The beginning of a value; `repr` fails for one that is nested too deep."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
