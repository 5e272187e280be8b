"""A run on disk, and its reader: a folder with `run.json`, the tables of its calls and `tensors/*.safetensors`.

Invariant: anyone may have written the folder. Nothing in it is executed, no path is taken from it, and sizes that it
gives are checked before memory is asked for. A call that cannot be read is skipped with a warning.
Must not import torch or numpy: a run's description is read without them.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from opintercept._core.errors import OpInterceptError, OpInterceptWarning, needs
from opintercept._core.record import Plain
from opintercept._core.tables import Frames, Page, Part
from opintercept._core.text import counted, listed, printable
from opintercept.runs.store import processes
from opintercept.runs.store.codec import TENSOR_NAME, StoredCall
from opintercept.runs.store.files import open_plain, written_by_others
from opintercept.runs.store.untrusted import WRONG, checked, count, field_checks, integer, items, parsed

if TYPE_CHECKING:
    import torch

    from opintercept.runs.store.columns import Columns

SCHEMA = 3  # 0.1 wrote 1 and 2
INFO, CALLS, TENSORS = "run.json", "calls.bin", "tensors"
_MOST_OPEN = 128  # processes whose tables stay open, with two files each
_MOST_FILES = 32  # of tensors that stay open
_APART = 60.0  # seconds between the last call of a run and the first of the next one, on clocks that may differ
_LONGEST = 200  # characters of a path, a command or the devices that are shown
_COMMAND = 120  # characters of the command in the head of a result
STARTED = "%Y-%m-%dT%H:%M:%S%z"
MAX_INFO = 1 << 20  # bytes of `run.json`
MAX_TENSOR = 1 << 32  # bytes of one tensor that is read back
_RANK = re.compile(r"rank([0-9]{1,6})", re.ASCII)

_Read = TypeVar("_Read")
TensorMode = Literal["none", "stats", "sample", "full"]


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
        member: Which process it is of a program that `opintercept run` has watched: a number of the `"program"`, the
            `"name"`, the `"pid"`, when it was `"born"` in nanoseconds since 1970, and the number of its `"parent"`,
            which the first process lacks.
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
    member: Mapping[str, str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {"schema": SCHEMA} | {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class RunHead(Plain):
    """What a result says of a run that it is about.

    Attributes:
        path: The folder.
        ranks: The ranks of the processes.
        info: The description of the first process.
        alone: Whether the folder is that of one process, and does not hold `rank0`, `rank1`, ...
        titles: What the processes are called, by number, if they are no ranks.
    """

    path: str
    ranks: tuple[int, ...]
    info: RunInfo
    alone: bool
    titles: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{printable(self.path)}  {printable(' '.join(self.info.argv), _COMMAND)}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the folder, the ranks and the description as plain data."""
        titles = {"processes": {str(rank): title for rank, title in self.titles.items()}} if self.titles else {}
        return {"path": self.path, "ranks": list(self.ranks), **titles, "info": self.info.as_dict()}


def open_run(path: str | os.PathLike[str], *, trusted: bool | None = None) -> Run:
    """Open a run's folder, or one that holds a folder `rank0`, `rank1`, ... for each process.

    The processes of a program that `opintercept run` has watched are one run; `folder/name` opens one of them.

    Ranks left over from an older run are skipped with a warning: those of another number of processes, of another
    launch or attempt of torchrun, and those whose last call was written a minute before the newest rank began.

    Args:
        path: The folder.
        trusted: Whether recorded calls may run again in this process. By default they may if all files are this user's.

    Raises:
        OpInterceptError: There is no run, or it cannot be read.
    """
    run = _named(Path(path)) or _opened(Path(path))
    run.trusted = not written_by_others(run.path) if trusted is None else trusted
    return run


def _opened(folder: Path) -> Run:
    children = child_folders(folder)
    parts = {0: folder}
    alone = os.path.lexists(folder / INFO)
    if not alone:
        ranks = [(rank, entry) for rank, entry in rank_folders(folder) if entry not in children]
        parts = {rank: entry for rank, entry in ranks if os.path.lexists(entry / INFO)}
        if not parts and not children:
            raise OpInterceptError(
                f"a run must be a folder with {INFO}, or with rank0/{INFO} and so on, got {str(folder)!r}; "
                "record one with `opintercept run` or runs.RunRecorder"
            )
    infos = {rank: read_info(part) for rank, part in parts.items()}
    if not alone and len(parts) > 1:
        infos = _of_one_run(folder, parts, infos)
    if children:
        return _of_processes(folder, [*(parts[rank] for rank in infos), *children])
    if len(parts) == 1 and 0 in parts:
        rank = infos[0].rank
        return Run(folder, {rank: parts[0]}, {rank: infos[0]})
    return Run(folder, {rank: parts[rank] for rank in infos}, infos)


def _named(path: Path) -> Run | None:
    """One process of a program, if there is no such folder and the last part of the path is what it is called."""
    if os.path.lexists(path) or not child_folders(path.parent):
        return None
    run = _opened(path.parent)
    found = [rank for rank in run.ranks if run.title(rank) == path.name]
    return run.only(found) if found else None


def _of_processes(folder: Path, parts: list[Path]) -> Run:
    """The run of a program whose children were watched. A process that only started the others is left out."""
    places = {"" if part == folder else part.name: part for part in parts}
    infos = {name: read_info(part) for name, part in places.items()}
    kept = processes.of_one_program(infos)
    files = (folder / name for name in (CALLS, "flight-calls.bin"))
    if len(kept) > 1 and not any(file.is_file() and file.stat().st_size for file in files):
        kept = [name for name in kept if name]
    infos = {name: infos[name] for name in kept}
    numbers = processes.numbered(infos)
    titles = processes.titles(numbers, infos) if any(info.world_size == 1 for info in infos.values()) else {}
    of_numbers = {number: infos[name] for number, name in numbers.items()}
    return Run(folder, {number: places[name] for number, name in numbers.items()}, of_numbers, titles)


def _pairs(named: Mapping[str, str], between: str) -> str:
    pairs = list(named.items())[:64]
    return ", ".join(f"{printable(name, 60)}{between}{printable(str(value), 60)}" for name, value in pairs)


def is_run(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is that of a run, which may yet be one that cannot be read."""
    folder = Path(path)
    ranks = (entry for _, entry in rank_folders(folder))
    return any(os.path.lexists(part / INFO) for part in (folder, *ranks)) or bool(child_folders(folder))


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
            stacklevel=4,
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


def child_folders(folder: Path) -> list[Path]:
    """The folders of processes that a watched program has started, without links."""
    try:
        found = [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.is_symlink()]
    except (OSError, ValueError):
        return []
    children = []
    for entry in found:
        with suppress(OSError, OpInterceptError):  # none, or one of another version
            if processes.is_child(read_info(entry)):
                children.append(entry)
    return children


class Run(Frames, Page):
    """A recorded run. Its calls are read from disk piece by piece, each time that they are asked for.

    As a data frame, it has a row for each call, with the statistics of its tensors: `run.to_pandas()`.

    Attributes:
        path: The folder.
        infos: The descriptions of the processes, by rank.
        titles: What the processes are called, by number, if they are no ranks. The number of such a process stands
            wherever a rank would.
        trusted: Whether recorded calls may run again in this process.

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

    def __init__(
        self, path: Path, parts: Mapping[int, Path], infos: Mapping[int, RunInfo], titles: Mapping[int, str] = {}
    ) -> None:
        self.path = path
        self.infos = dict(infos)
        self.titles = dict(titles)
        self.trusted = True
        self._parts = dict(parts)
        self._columns_of: dict[int, Columns] = {}
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
        """Whether the run is that of one process, and the folder does not hold `rank0`, `rank1`, ..."""
        return len(self._parts) == 1 and (self.path in self._parts.values() or self.info.world_size == 1)

    def title(self, rank: int) -> str:
        """What a process is called: `rank 1`, or a name if the processes are no ranks."""
        return self.titles.get(rank, f"rank {rank}")

    def place(self, call: StoredCall) -> tuple[int, ...]:
        """What puts calls of several processes in one order: step and index for ranks, and otherwise the time."""
        return (call.record.started or 0, *call.place) if self.titles else call.place

    def matching(self, pattern: str | None) -> Run:
        """The run of the processes whose title or folder matches a glob; of all processes for None.

        Raises:
            OpInterceptError: None matches.
        """
        if pattern is None:
            return self
        names = {rank: {self.title(rank), f"rank{rank}", self._parts[rank].name} for rank in self.ranks}
        found = [rank for rank in self.ranks if fnmatch.filter(names[rank], pattern)]
        if not found:
            shown = listed([printable(self.title(rank), _LONGEST) for rank in self.ranks])
            raise OpInterceptError(f"--process must match some of {shown}, got {printable(pattern, _LONGEST)!r}")
        return self.only(found)

    def only(self, ranks: Collection[int]) -> Run:
        """The run of these processes alone."""
        kept = {rank: info for rank, info in self.infos.items() if rank in ranks}
        titles = {rank: title for rank, title in self.titles.items() if rank in ranks}
        made = Run(self.path, {rank: self._parts[rank] for rank in kept}, kept, titles)
        made.trusted = self.trusted
        return made

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {counted(len(self.infos), 'rank')})"

    def parts(self) -> Iterator[Part]:
        """What `print` shows: how the run was made, without reading its calls."""
        info, ranks = self.info, len(self.infos)
        unfinished = [rank for rank, each in self.infos.items() if not each.finished]
        names = [printable(title, _LONGEST) for title in self.titles.values()]
        lost = [self.titles.get(rank, str(rank)) for rank in unfinished]
        which = f" ({'' if names else 'ranks '}{printable(listed(lost), _LONGEST)})" if ranks > 1 else ""
        state = f"not finished{which}: still running, or killed" if unfinished else "finished"
        world = f"; {ranks} of {info.world_size} ranks" if max(info.world_size, ranks) > 1 else ""
        world = f"; {counted(ranks, 'process')}: {listed(names, 8)}" if names and ranks > 1 else "" if names else world
        yield f"run       {printable(str(self.path), _LONGEST)}: {state}{world}"
        yield f"started   {printable(info.started, _LONGEST)}"
        yield f"command   {printable(' '.join(info.argv), _LONGEST)}"
        yield f"versions  {_pairs(info.versions, ' ')}"
        yield f"devices   {printable(', '.join(info.devices), _LONGEST) or 'the CPU'}"
        yield f"flags     {_pairs(info.flags, '=')}"
        yield f"tensors   {info.tensors}"

    def head(self) -> RunHead:
        """What results say of the run."""
        return RunHead(str(self.path), self.ranks, self.info, self.alone, self.titles)

    def check_trusted(self) -> None:
        """Refuse to run calls again that another user has written."""
        if not self.trusted:
            raise OpInterceptError(
                "another user wrote the run: use the command line, which computes in a process of its own, or "
                "open_run(path, trusted=True)"
            )

    def calls(self, rank: int | None = None) -> Iterator[StoredCall]:
        """The calls in the order in which they ended, process by process; with `rank`, those of one process.

        Records that are not calls are skipped, and one warning for each process counts them.
        """
        for number in self.ranks if rank is None else (rank,):
            yield from self.columns(number).calls()

    def located(self, rank: int) -> Iterator[tuple[int, StoredCall]]:
        """The calls of one process, each with its number for `at`."""
        return enumerate(self.columns(rank).calls())

    def at(self, rank: int, number: int) -> StoredCall:
        """A call by its rank and number."""
        import numpy as np

        return next(self.columns(rank).calls_at(np.array([number])))

    def columns(self, rank: int) -> Columns:
        """Return the calls of one process as columns.

        Raises:
            OpInterceptError: They cannot be read.
            ImportError: numpy is not installed.
        """
        known = self._columns_of.get(rank)
        if known is None:
            try:
                from opintercept.runs.store.columns import Columns, dtypes_of
            except ImportError as missing:
                raise needs("reading runs", "numpy", "'opintercept[cli]'") from missing
            part = self._parts[rank]
            known = self._columns_of[rank] = Columns(
                part, rank, dtypes_of(read_members(part).get("tables"), part / INFO)
            )
            _warn_of(known, part)
            if len(self._columns_of) > _MOST_OPEN:
                self._columns_of.pop(next(iter(self._columns_of)))  # its files stay open while somebody reads them
        return known

    def _columns(self) -> Mapping[str, Any]:
        self.columns(self.ranks[0])  # first, as it says what is missing without numpy
        from opintercept.runs.store.export import frame_of

        return frame_of(self)

    def close(self) -> None:
        """Close tables and tensors on disk. They are opened again when they are asked for."""
        for columns in self._columns_of.values():
            columns.close()
        self._columns_of.clear()
        self.close_tensors()

    def close_tensors(self) -> None:
        """Close the files of tensors, whose memory then counts no more."""
        self._tensor_files.clear()

    def folder(self, rank: int) -> Path:
        """The folder of one process."""
        return self._parts[rank]

    def tensor(self, call: StoredCall, role: str, limit: int = MAX_TENSOR) -> torch.Tensor | None:
        """The recorded values, on the CPU; a sample has one dimension.

        They are contiguous, unless all of many are equal: then they share the memory of one.

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

        def values(file: Any, key: str, path: Path) -> torch.Tensor:
            part, shape = file.get_slice(key), _repeated(file, key)
            size = _size_of(part) * (1 if shape is None else math.prod(shape))
            if size > limit:
                raise OpInterceptError(f"tensor {name!r} in {path} has {size} bytes, more than the limit of {limit}")
            made: torch.Tensor = file.get_tensor(key)
            return made if shape is None else made.expand(shape)

        return self._of_tensor(rank, name, values)

    def kept(self, rank: int, name: str) -> tuple[int, str]:
        """How many elements a stored tensor has, and its dtype as safetensors writes it, without reading them."""

        def described(file: Any, key: str, path: Path) -> tuple[int, str]:
            part, shape = file.get_slice(key), _repeated(file, key)
            return math.prod(_shape_of(part) if shape is None else shape), str(part.get_dtype())

        return self._of_tensor(rank, name, described)

    def _of_tensor(self, rank: int, name: str, read: Callable[[Any, str, Path], _Read]) -> _Read:
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            raise OpInterceptError(f"a tensor must have a name such as '0/0123456789abcdef-0', got {name!r}")
        if rank not in self._parts:
            raise OpInterceptError(f"rank must be one of {', '.join(map(str, self.ranks))}, got {rank}")
        path = self._parts[rank] / TENSORS / f"{int(match[1]):08d}.safetensors"
        _refuse_special(path)
        try:
            return read(self._tensor_file(path), match[2], path)
        except (ImportError, OpInterceptError):
            raise
        except Exception as broken:  # a SafetensorError, an OSError, a KeyError for an unknown dtype
            raise OpInterceptError(f"cannot read tensor {name!r} from {path}: {broken}") from broken

    def _tensor_file(self, path: Path) -> Any:
        """A file of tensors, which stays open: reading the head of one with thousands takes milliseconds."""
        found = os.stat(path)
        key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        if path not in self._tensor_files or self._tensor_files[path][0] != key:
            self._tensor_files.pop(path, None)
            try:
                from safetensors import safe_open
            except ImportError as missing:
                raise needs("reading tensors of a run", "safetensors", "'opintercept[cli]'") from missing
            self._tensor_files[path] = key, safe_open(path, "pt")
            if len(self._tensor_files) > _MOST_FILES:
                del self._tensor_files[next(iter(self._tensor_files))]
        return self._tensor_files[path][1]


def _warn_of(columns: Columns, folder: Path) -> None:
    damaged = (
        f"{counted(columns.damaged, 'damaged call')} in {folder}; a disk or another program has changed the files, or "
        "the machine went down while they were written"
    )
    left_out = (
        f"{counted(columns.left_out, 'unreadable call')} in the flight recorder of {folder}; one that names very many "
        "arguments has no room there, and a program that still runs writes over others"
    )
    for number, what in ((columns.damaged, damaged), (columns.left_out, left_out)):
        if number:
            warnings.warn(f"skipped {what}", OpInterceptWarning, stacklevel=4)


def _size_of(part: Any) -> int:
    """The bytes of a tensor, whose file is large enough for it, as safetensors checks."""
    bits = re.search("[0-9]+", part.get_dtype())  # "F32", "F8_E4M3"
    return math.prod(_shape_of(part)) * (int(bits[0]) if bits else 8) // 8


def _shape_of(part: Any) -> list[int]:
    return [integer(size) for size in items(part.get_shape())]


def _repeated(file: Any, key: str) -> list[int] | None:
    """The shape of a tensor of which one number is stored, since all are equal; None for any other."""
    shape = (file.metadata() or {}).get(key)
    if shape is None:
        return None
    sizes = [count(size) for size in items(parsed(shape.encode()))]
    if math.prod(sizes) > MAX_TENSOR or file.get_slice(key).get_shape():
        raise OpInterceptError("a tensor of equal numbers must be a number and its shape")
    return sizes


def _refuse_special(path: Path) -> None:
    """Refuse a link, which may lead out of the folder, and a pipe, which keeps its reader waiting."""
    for part in (path.parent, path):
        try:
            mode = os.lstat(part).st_mode
        except OSError as missing:
            raise OpInterceptError(f"{str(path)!r} is missing") from missing
        if not (stat.S_ISREG(mode) if part == path else stat.S_ISDIR(mode)):
            raise OpInterceptError(f"{str(part)!r} must be a plain {'file' if part == path else 'folder'}; remove it")


def read_members(folder: Path) -> dict[str, Any]:
    """Read what `run.json` says of one process, unchecked."""
    path = folder / INFO
    with open_plain(path) as file:
        read = file.read(MAX_INFO + 1)
    members = parsed(read) if len(read) <= MAX_INFO else None
    if not isinstance(members, dict):
        raise OpInterceptError(f"{path} must hold a JSON object of at most {MAX_INFO:,} bytes")
    return members


def read_info(folder: Path) -> RunInfo:
    """Read the description of one process."""
    path, members = folder / INFO, read_members(folder)
    if members.get("schema") != SCHEMA:
        versions = members.get("versions")
        wrote = versions.get("opintercept") if isinstance(versions, dict) else None
        reader = f"opintercept {wrote:.40}, which" if isinstance(wrote, str) else "the version of opintercept that"
        raise OpInterceptError(
            f"{path} must have schema {SCHEMA}, got {_shown(members.get('schema'))}; read it with {reader} wrote it"
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


def _shown(value: Any) -> str:
    """The beginning of a value; `repr` fails for one that is nested too deep."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
