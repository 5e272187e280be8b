"""A run as a folder: `run.json`, `calls.jsonl`, `tensors/*.safetensors`; here are its format and its reader.

Invariant: a folder is untrusted. Nothing in it is executed, no path is taken from it, and what it says of sizes is
checked before memory is asked for; what cannot be used is skipped with a warning.
Must not import torch: a run without tensors is read without it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import warnings
from collections.abc import Callable, ItemsView, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._record import CallRecord, Gemm, Phase
from opintercept._tensors import TensorMeta

if TYPE_CHECKING:
    import torch

SCHEMA = 1
INFO, CALLS, TENSORS = "run.json", "calls.jsonl", "tensors"
STARTED = "%Y-%m-%dT%H:%M:%S%z"
# No line that is written comes near; more is no run of ours.
MAX_LINE = 1 << 22
MAX_INFO = 1 << 20
MAX_TEXT = 4096
MAX_DIMS = 64
# Tensors and other arguments of one call, and how deep lists in those are nested.
MAX_ROLES = 2048
MAX_ARGUMENTS = 256
MAX_PARAMETER = 100
MAX_LIST = 1 << 16
MAX_DEPTH = 4
# Of one tensor that is read back; names say where a tensor is: its file's number and its name in there.
MAX_TENSOR = 1 << 32
_NAME = re.compile(r"([0-9]{1,8})/([0-9a-f]{16}-[0-9]{1,8}(?:\.sample)?)", re.ASCII)
_RANK = re.compile(r"rank([0-9]{1,6})", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{16}", re.ASCII)
_ROLES = frozenset(("lhs", "rhs", "bias", "output"))
# A role, an output's place, or the name of a parameter: `attn_mask`, `weights[0]`.
_ROLE = re.compile(r"output\.[1-9][0-9]?|[A-Za-z_][A-Za-z0-9_]{0,99}(?:\[[0-9]{1,6}\]){0,4}", re.ASCII)

Kept = Literal["none", "stats", "sample", "full"]


@dataclass(frozen=True, slots=True)
class Values:
    """What is kept of a tensor's values; range, mean and rms are of the finite ones, moduli if complex.

    Attributes:
        hash: 16 hex digits, the same for the same values in the same order, whatever the strides and the device;
            tensors of other values have another with a probability of about 1 - 2**-32. None where the values
            have no plain bytes, as those of sparse tensors.
        count: How many.
        nan: How many of them are NaN.
        inf: How many are infinite.
        min: The smallest, None where no value is finite; so are the others.
        max: The largest.
        mean: Their mean.
        rms: Root of the mean square.
    """

    hash: str | None
    count: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None

    @property
    def finite(self) -> bool:
        """Whether all are."""
        return not (self.nan or self.inf)

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A call as a run has it.

    Attributes:
        record: Its summary.
        rank: Of the process that made it, 0 where there was one.
        values: What its operands and outputs were, by role: `"lhs"`, `"rhs"`, `"bias"`, `"value"` of an attention,
            `"output"`, and of several outputs `"output.1"` and on; other tensors by the name of their parameter:
            `"attn_mask"`, `"weights[0]"`.
        tensors: For `Run.tensor`, by the same roles: where the values are, all or a sample.
        arguments: What is no tensor, by the name of its parameter, defaults included: `"alpha"`, `"is_causal"`. NaN
            and infinities, complex numbers, dtypes, devices and layouts are strings. None in runs of 0.1, which did
            not record them.
        given: For `tensors="full"`: `{"args": [...], "kwargs": {...}}` as plain data, see `hooks._repro`.
        error: What the call raised, `"RuntimeError: ..."`; None for one that returned.
    """

    record: CallRecord
    rank: int
    values: Mapping[str, Values]
    tensors: Mapping[str, str]
    arguments: Mapping[str, Any] | None
    given: Mapping[str, Any] | None
    error: str | None

    @property
    def place(self) -> tuple[int, int, int]:
        """Step, index and rank, which put the calls of several processes in one order."""
        return self.record.step, self.record.index, self.rank


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
                call = _call(line, rank) if whole else None
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
                call = _call(file.readline(MAX_LINE), rank)
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
        match = _NAME.fullmatch(name)
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
    return math.prod(map(_integer, _items(part.get_shape()))) * (int(bits[0]) if bits else 8) // 8


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
    plain = _plain(read) if len(read) <= MAX_INFO else None
    if not isinstance(plain, dict):
        raise OpInterceptError(f"{INFO} must be a JSON object of at most {MAX_INFO} bytes, got another in {folder}")
    if plain.get("schema") != SCHEMA:
        raise OpInterceptError(
            f"a run must have schema {SCHEMA}, got {_shown(plain.get('schema'))} in {folder}; read it with the "
            "version of opintercept that wrote it"
        )
    try:
        return RunInfo(
            argv=tuple(_text(value) for value in _items(plain["argv"], MAX_LINE)),
            started=_text(plain["started"]),
            finished=_is(plain["finished"], bool),
            tensors=_choice(plain["tensors"], get_args(Kept)),
            rank=_count(plain["rank"]),
            world_size=_count(plain["world_size"]),
            versions={_text(key): _text(value) for key, value in _is(plain["versions"], dict).items()},
            devices=tuple(_text(value) for value in _items(plain["devices"], MAX_LINE)),
            flags={_text(key): _text(value) for key, value in _is(plain["flags"], dict).items()},
        )
    except (KeyError, TypeError, ValueError) as wrong:
        raise OpInterceptError(
            f"{INFO} must have the fields of RunInfo, got a wrong one in {folder}: {wrong}"
        ) from None


def _shown(value: Any) -> str:
    """Few characters of a value that may be nested deeper than Python writes."""
    return f"{value!r:.40}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _plain(text: bytes) -> Any:
    """The JSON value, or None for what is none, or is nested deeper than Python reads."""
    try:
        return json.loads(text.decode())  # of bytes it would take UTF-16 as well
    except (ValueError, RecursionError):  # of a number with too many digits as well
        return None


def _call(line: bytes, rank: int) -> StoredCall | None:
    # What calls that look alike share stands together in a line, from "op" to "opaque", and is read once.
    start = line.find(b',"op":')
    middle = line.find(b',"opaque":', start)
    if start > 0 and middle > 0:
        end = line.find(b"e", middle + 10) + 1  # of true or false
        fragment = line[start + 1 : end]
        shared = _fragments.get(fragment)
        if shared is None and (shared := _shared(_plain(b"{%b}" % fragment))) is not None:
            if len(_fragments) >= _FRAGMENTS:
                _fragments.clear()
            if len(fragment) <= MAX_TEXT:
                _fragments[fragment] = shared
        if shared is not None and (call := _stored(_plain(line[:start] + line[end:]), shared, rank)) is not None:
            return call
    plain = _plain(line)
    shared = _shared(plain)
    return None if shared is None else _stored(plain, shared, rank)


_PHASES = get_args(Phase)
_WRONG = (KeyError, TypeError, ValueError, OverflowError, RecursionError)
_FRAGMENTS = 1024
_fragments: dict[bytes, dict[str, Any]] = {}


def _shared(plain: Any) -> dict[str, Any] | None:
    """The fields of a record that follow from how arguments and output look; None for what is no call."""
    try:
        output = plain["output"]
        return {
            "op": _text(plain["op"]),
            "func": _text(plain["func"]),
            "lhs": _meta(plain["lhs"]),
            "rhs": _meta(plain["rhs"]),
            "bias": _meta(plain["bias"]),
            "output": tuple(map(_meta, _items(output, MAX_LINE))) if isinstance(output, list) else _meta(output),
            "gemm": _gemm(plain["gemm"]),
            "flops": _count_or_none(plain["flops"]),
            "bytes": _count_or_none(plain["bytes"]),
            "opaque": _is(plain["opaque"], bool),
        }
    except _WRONG:
        return None


def _stored(plain: Any, shared: dict[str, Any], rank: int) -> StoredCall | None:
    try:
        values = {_role(role): _values(entry) for role, entry in _entries(plain.get("values", {}), MAX_ROLES)}
        tensors = {_role(role): _name(name) for role, name in _entries(plain.get("tensors", {}), MAX_ROLES)}
        arguments, given = plain.get("arguments"), plain.get("given")
        if given is None and arguments is not None and arguments.keys() == {"args", "kwargs"}:
            arguments, given = None, arguments  # of 0.1
        if arguments is not None:
            arguments = {_parameter(name): _argument(value) for name, value in _entries(arguments, MAX_ARGUMENTS)}
        if given is not None:
            _items(_is(given, dict)["args"], MAX_LINE)
            _is(given["kwargs"], dict)
        record = CallRecord(
            index=_count(plain["index"]),
            step=_count(plain["step"]),
            phase=_choice(plain["phase"], _PHASES),
            module=_text_or_none(plain["module"]),
            source=_text_or_none(plain["source"]),
            forward=_count_or_none(plain["forward"]),
            grad_of=_choice(plain["grad_of"], ("lhs", "rhs", None)),
            autocast=_text_or_none(plain["autocast"]),
            elapsed=_number_or_none(plain["elapsed"]),
            **shared,
        )
        return StoredCall(record, rank, values, tensors, arguments, given, _text_or_none(plain.get("error")))
    except (AttributeError, *_WRONG):
        return None


def _meta(plain: Any) -> TensorMeta | None:
    if plain is None:
        return None
    stride = plain["stride"]
    return TensorMeta(
        shape=tuple(_integer(size) for size in _items(plain["shape"])),
        dtype=_text(plain["dtype"]),
        device=_text(plain["device"]),
        stride=None if stride is None else tuple(_integer(size) for size in _items(stride)),
        requires_grad=_is(plain["requires_grad"], bool),
    )


def _gemm(plain: Any) -> Gemm | None:
    if plain is None:
        return None
    dtypes = tuple(_text(dtype) for dtype in _items(plain["dtypes"]))
    transposes = tuple(_is(flag, bool) for flag in _items(plain["transposes"]))
    if len(dtypes) != 2 or len(transposes) != 2:
        raise ValueError("two operands")
    batch, m, n, k = (_count(plain[name]) for name in ("batch", "m", "n", "k"))
    return Gemm(batch, m, n, k, dtypes, transposes)


def _values(plain: Any) -> Values:
    hash_ = plain["hash"]
    if hash_ is not None and not (type(hash_) is str and _HASH.fullmatch(hash_)):
        raise ValueError("hash")
    return Values(
        hash_,
        _count(plain["count"]),
        _count(plain["nan"]),
        _count(plain["inf"]),
        _number_or_none(plain["min"]),
        _number_or_none(plain["max"]),
        _number_or_none(plain["mean"]),
        _number_or_none(plain["rms"]),
    )


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {kind.__name__}")
    return value


def _items(value: Any, most: int = MAX_DIMS) -> list[Any]:
    if len(_is(value, list)) > most:
        raise ValueError(f"at most {most}")
    return value  # type: ignore[no-any-return]


def _entries(value: Any, most: int) -> ItemsView[str, Any]:
    if len(_is(value, dict)) > most:
        raise ValueError(f"at most {most}")
    return value.items()  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a text")
    text = value if len(value) <= MAX_TEXT else f"{value[:MAX_TEXT]}..."
    # Half a surrogate pair can be in JSON, and nowhere else.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of 64 bits")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a count of 64 bits")
    return value


def _count_or_none(value: Any) -> int | None:
    return None if value is None else _count(value)


def _number_or_none(value: Any) -> float | None:
    if value is None or type(value) is float:
        return value
    if type(value) is not int:
        raise TypeError("a number")
    return float(value)  # an OverflowError of a long one is an ArithmeticError


def _choice(value: Any, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ValueError(f"one of {allowed}")
    return value


def is_output(role: str) -> bool:
    """Whether a role is an output's: a parameter may be called `output_mask`."""
    return role == "output" or role.startswith("output.")


def _role(value: str) -> str:
    if value not in _ROLES and not _ROLE.fullmatch(value):
        raise ValueError("a role")
    return value


def _parameter(name: str) -> str:
    if len(name) > MAX_PARAMETER:
        raise ValueError("a parameter's name")
    return _text(name)


def _argument(value: Any, depth: int = 0) -> Any:
    """An argument that is no tensor: a number, a text, None or a list of those."""
    if value is None or type(value) is bool:
        return value
    if type(value) is str:
        return _text(value)
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise ValueError("a whole number of 64 bits")
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if depth == MAX_DEPTH:
        raise ValueError(f"lists nested at most {MAX_DEPTH} deep")
    return [_argument(item, depth + 1) for item in _items(value, MAX_LIST)]


def _name(value: Any) -> str:
    if not _NAME.fullmatch(_is(value, str)):
        raise ValueError("a tensor's name")
    return value  # type: ignore[no-any-return]
