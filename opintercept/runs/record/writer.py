"""`Writer`: a thread that writes the folder of a run. If its bounded queue is full, the program waits.

Invariant: a record is written whole, and after all that it names, so that the run of a killed program can be read. A
failure to write stops the recording, never the program.
Must not import torch. The thread runs no operator, which the kernel engine relies on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._core.in_kernel import Sink
from opintercept._core.record import PendingRecord
from opintercept._native.layout import LEFT_OUT, SLOTS
from opintercept._values.stats import Values
from opintercept.runs.record.claim import LOCK, Claim, check_unclaimed
from opintercept.runs.store import records
from opintercept.runs.store.flight import FLIGHT, Snapshot
from opintercept.runs.store.processes import SUMMARY
from opintercept.runs.store.records import (
    CALL,
    CALL_TEXTS,
    CALLS,
    MORE,
    SHARED_TEXTS,
    TENSOR,
    TEXTS,
    Array,
    Encoder,
    seal,
)
from opintercept.runs.store.run import INFO, TENSORS, RunInfo, child_folders, rank_folders, read_info
from opintercept.runs.store.texts import MAX_LINE, sealed

INTERVAL = 1.0  # seconds between two writes, unless a batch is full before
_SOON = 0.02  # seconds until the first one; a process that is killed early, such as a worker of a pool, loses little
_PAUSE = 0.001  # seconds between two looks at a queue that is full
BATCH_CALLS = 512  # calls that make a full batch
BATCH_BYTES = 1 << 25  # bytes of tensors that make a full batch
QUEUED_BATCHES = 4  # full batches that may wait to be written
MAX_NAMES = 1 << 16  # names of written tensors, and records of their values, that are remembered
_FILES = (*SHARED_TEXTS, CALL_TEXTS, records.TENSORS, CALLS)  # in the order in which they are written
_STORED = re.compile(r"[0-9]{8,}\.(safetensors|part)", re.ASCII)


class Reading(Protocol):
    """Statistics and hash that a device may still be computing; `read` waits for them."""

    def read(self) -> Values: ...


@dataclass(frozen=True, slots=True)
class QueuedTensor:
    """A tensor to be written."""

    tensor: Any  # contiguous, and on the CPU after `ready`
    ready: Any  # the event after which its values are there; None if they are there already
    content: Reading | None  # its hash, by which it is written only once
    sample: bool  # whether it is a sample of the values


@dataclass(slots=True)
class QueuedCall:
    """A call to be written."""

    note: PendingRecord
    values: dict[str, Reading]  # by role
    kept: list[QueuedTensor | str]  # tensors, or the names of tensors that have been written already
    roles: dict[str, int]  # the place in `kept` of the tensor in each role
    arguments: str  # as JSON: every argument that is not a tensor, by the name of its parameter
    given: dict[str, Any] | None  # as `_kit.repro.plain_arguments` makes them, with places in `kept` for tensors
    error: str | None

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(k.tensor.numel() * k.tensor.element_size() for k in self.kept if isinstance(k, QueuedTensor))


class Writer(threading.Thread):
    """The thread that writes a run. Other threads call `put` and `close` and read the attributes.

    It continues the run of `after`, which is closed, and releases the claim to the folder at the end. `run.json` has
    `finished` false until `close`.
    """

    runs_no_operator = True  # as `_engines/quiet.py` asks: kernels may be removed while it runs

    def __init__(
        self,
        folder: Path,
        info: RunInfo,
        max_bytes: int | None,
        encoder: Encoder,
        after: Writer | None = None,
        claim: Claim | None = None,
    ) -> None:
        super().__init__(name=f"opintercept writes {folder}", daemon=True)
        self.calls: int = after.calls if after else 0  # on disk
        self.nbytes: int = after.nbytes if after else 0  # of all files
        self.failure: str | None = after.failure if after else None  # why the recording has stopped
        self.names: dict[Any, str] = after.names if after else {}  # of tensors on disk, by `key_of` their content
        self._folder = folder
        self._info = self._written = info
        self._info_size: int = after._info_size if after else 0
        self._max_bytes = max_bytes
        self._files: int = after._files if after else 0
        self._tensors: int = after._tensors if after else 0
        self.sink: Sink | None = None  # where kernels put calls, which this thread fetches
        self._encoder = encoder
        # The numbers of values that are on disk: an operand that is the output of an earlier call is stored once.
        self._rows: dict[bytes, int] = after._rows if after else {}
        self._row_count: int = after._row_count if after else 0
        self._text_size: int = after._text_size if after else 0
        self._batch = _Batch()
        # Reentrant: a signal handler may run operators while this thread holds it. The code takes this lock and not
        # `_changed`: an interrupt between `Condition.__enter__` and its block would leave the lock held.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiting: list[QueuedCall | Snapshot] = []
        self._calls = self._size = 0  # that wait, and the bytes of their tensors
        self._closing = self._done = False
        self._claim = claim
        self._began = time.monotonic()
        self._left = (0, 0, 0)  # device, inode and size of the file of calls when this last looked
        folder.mkdir(parents=True, exist_ok=True)
        self._write_info(finished=False)
        # Closed by the thread.
        self._opened = [open(folder / name, "ab", buffering=0) for name in _FILES]  # noqa: SIM115

    def put(self, entry: QueuedCall | Snapshot) -> None:
        """Take a call to be written, or several; waits if the queue is full."""
        while not self._takes(entry):
            time.sleep(_PAUSE)  # not `Condition.wait`, which an interrupt may leave without the lock

    def _takes(self, entry: QueuedCall | Snapshot) -> bool:
        with self._mutex:
            if self._is_full(QUEUED_BATCHES) and self.is_alive():
                return False
            self._fetch()
            self._waiting.append(entry)
            self._calls += len(entry.calls) if isinstance(entry, Snapshot) else 1
            self._size += 0 if isinstance(entry, Snapshot) else entry.nbytes
            if self._is_full(1):
                self._changed.notify_all()
            return True

    def _fetch(self) -> None:
        """Queue the calls of kernels. Those whose values a device still reads come later."""
        taken = None if self.sink is None else self.sink.take(self._closing)
        if taken is not None:
            calls, tensors, more = (
                np.frombuffer(bytearray(part), kind) for part, kind in zip(taken, (CALL, TENSOR, MORE), strict=True)
            )
            self._waiting.append(Snapshot(calls, tensors, b"", 0, more))
            self._calls += len(calls)

    def describe(self, info: RunInfo) -> None:
        """Take a new description, which is written with the next calls."""
        self._info = info

    def close(self) -> None:
        """Write what is left and end the thread; call it again if an exception interrupts it."""
        with self._mutex:
            self._closing = True
            self._changed.notify_all()
            # Not `join`, which in Python 3.11 takes the thread for dead once it has been interrupted.
            while not self._done and self.is_alive():
                self._changed.wait(INTERVAL)
        self.join()

    def _is_full(self, times: int) -> bool:
        return self._calls >= times * BATCH_CALLS or self._size >= times * BATCH_BYTES

    def _next(self) -> list[QueuedCall | Snapshot]:
        """The waiting calls, after an interval or when they make a full batch; empty when all are written."""
        with self._mutex:
            while True:
                interval = min(INTERVAL, max(_SOON, (time.monotonic() - self._began) / 10))
                self._changed.wait_for(lambda: self._closing or self._is_full(1), interval)
                self._fetch()
                if self._waiting or self._closing:
                    batch, self._waiting, self._calls, self._size = self._waiting, [], 0, 0
                    self._changed.notify_all()
                    return batch

    def run(self) -> None:
        """Write until `close`."""
        try:
            while batch := self._next():
                self._try(self._check)
                self._try(self._write, batch)
                del batch
            self._try(self._check)
            self._try(self._write_info)
        finally:
            for file in self._opened:
                file.close()
            if self._claim is not None:
                self._claim.release()
            with self._mutex:
                self._done = True
                self._changed.notify_all()

    def _try(self, write: Callable[..., None], *what: Any) -> None:
        if self.failure is None:
            try:
                write(*what)
            except Exception as exception:  # a full disk, or a device that has failed
                known = isinstance(exception, OpInterceptError)
                self.failure = str(exception) if known else f"{type(exception).__name__}: {exception}"

    def is_there(self) -> bool:
        """Whether the file of calls is as this writer left it."""
        try:
            found = os.stat(self._folder / CALLS)
        except OSError:
            return False
        return (found.st_dev, found.st_ino, found.st_size) == self._left

    def _check(self) -> None:
        """Stop if files that were written are gone, or if another recorder has taken over the folder."""
        mine = os.fstat(self._opened[-1].fileno())
        self._left = mine.st_dev, mine.st_ino, mine.st_size
        there = self.is_there() and all(os.fstat(file.fileno()).st_nlink for file in self._opened)
        if not there or not (self._claim is None or self._claim.holds()):
            raise OpInterceptError(
                "the folder was deleted or taken over by another recorder; the calls written so far are lost"
            )
        try:
            names = set(os.listdir(self._folder / TENSORS)) if self._files else set()
        except OSError:
            names = set()
        lost = [number for number in range(self._files) if f"{number:08d}.safetensors" not in names]
        if lost:
            raise OpInterceptError(
                f"{len(lost)} of {self._files} files in {TENSORS}/ were deleted; their tensors are lost"
            )

    def _write_info(self, finished: bool = True) -> None:
        self._written = self._info
        write_info(self._folder, self._info, finished=finished)
        before, self._info_size = self._info_size, (self._folder / INFO).stat().st_size
        self.nbytes += self._info_size - before

    def _write(self, batch: list[QueuedCall | Snapshot]) -> None:
        if self._written is not self._info:
            self._write_info(finished=False)
        made = self._batch = _Batch()
        full = 0
        for entry in batch:
            for part in _parts(entry) if self._max_bytes is not None else (entry,):
                before = made.lengths()
                own = self._add_many(part) if isinstance(part, Snapshot) else self._add(part)
                made.shared.append((self._encoder.signatures.take(), self._encoder.sites.take()))
                made.size += sum(map(_stored_bytes, own.values()))
                if self._max_bytes is not None and self.nbytes + made.bytes() > self._max_bytes:
                    full = self.nbytes + made.bytes()
                    made.cut(before)
                    break
                made.tensors |= own
            if full:
                break
        if made.tensors:
            self._save(made.tensors)
        data = [b"".join(lines) for lines in zip(*made.shared, strict=True)] or [b"", b""]
        data.append(b"".join(made.texts))
        for rows, kind in ((made.rows, TENSOR), (made.calls, CALL)):
            data.append(seal(np.frombuffer(bytearray(b"".join(rows)), kind)).tobytes())
        for file, each, size in zip(self._opened, data, (1, 1, 1, TENSOR.itemsize, CALL.itemsize), strict=True):
            self._append(file, each, size)
        if len(self.names) + len(made.names) > MAX_NAMES:
            self.names.clear()
        self.names |= made.names
        if full:
            self.failure = (
                f"the next call would make {full} bytes, more than max_bytes={self._max_bytes}; raise max_bytes, or "
                "keep less of each tensor"
            )

    def _add(self, entry: QueuedCall) -> dict[str, Any]:
        """Add a call to the batch, and return the tensors that are stored for it."""
        own: dict[str, Any] = {}
        names = [kept if isinstance(kept, str) else self._named(kept, own, self._batch.names) for kept in entry.kept]
        record = self._encoder.record(
            entry.note,
            entry.arguments,
            {role: values.read() for role, values in entry.values.items()} if entry.values else {},
            {role: names[place] for role, place in entry.roles.items()} if entry.roles else {},
            None if entry.given is None else _with_names(entry.given, names),
            entry.error,
            self._row,
            self._text,
        )
        self._batch.calls.append(record)
        return own

    def _add_many(self, entry: Snapshot) -> dict[str, Any]:
        """Add the calls of kernels or of a flight recorder to the batch."""
        calls, tensors, more = entry.calls, entry.tensors, entry.more
        used, places = np.unique(np.concatenate([*(calls[s] for s in SLOTS), more["row"]]), return_inverse=True)
        kept = tensors[used[used > 0] - 1]
        kept["check"] = 0
        data, size = kept.tobytes(), TENSOR.itemsize
        rows = [self._row(data[start : start + size]) for start in range(0, len(data), size)]
        numbers = np.array([*[0] * (len(used) - len(kept)), *rows], np.uint32)[places]
        for slot, column in zip(SLOTS, numbers[: len(SLOTS) * len(calls)].reshape(len(SLOTS), -1), strict=True):
            calls[slot] = column
        for call in np.flatnonzero(calls["text"]).tolist():
            start = int(calls["text"][call]) - 1
            calls["text"][call] = self._text(entry.texts[start : entry.texts.index(b"\n", start) + 1])
        without_slot = zip(more["call"].tolist(), numbers[len(SLOTS) * len(calls) :].tolist(), strict=True)
        for call, pairs in groupby(without_slot, itemgetter(0)):
            self._add_more(calls[call : call + 1], [row for _, row in pairs])
        calls["lap"] = 0
        self._batch.calls.append(calls.tobytes())
        return {}

    def _add_more(self, call: Array, rows: list[int]) -> None:
        """Write the text of a call of a kernel, with the rows of the tensors that its record has no slot for."""
        roles = self._encoder.without_slot.get(int(call["signature"][0]), ())
        more = {role: row for role, row in zip(roles, rows, strict=False) if row}
        place = self._text(sealed({"index": int(call["index"][0]), "more": more})) if len(roles) == len(rows) else -1
        call["text"], call["has"] = (place, 1 << TEXTS.index("more")) if place > 0 else (0, LEFT_OUT)

    def _row(self, packed: bytes) -> int:
        """The number of a tensor's values, which are added to the batch unless they are known."""
        number = self._rows.get(packed)
        if number is None:
            if len(self._rows) >= MAX_NAMES:
                self._rows.clear()
            self._row_count += 1
            number = self._rows[packed] = self._row_count
            self._batch.rows.append(packed)
        return number

    def _text(self, line: bytes) -> int:
        """The place of a call's text, which is added to the batch; -1 if no reader would take it."""
        if len(line) > MAX_LINE:
            return -1
        place = self._text_size + 1
        self._text_size += len(line)
        self._batch.texts.append(line)
        return place

    def _named(self, kept: QueuedTensor, own: dict[str, Any], new: dict[Any, str]) -> str:
        """The name of a written tensor with this content, or a new name, under which the tensor goes into `own`."""
        digits = None if kept.content is None else kept.content.read().hash
        key = None if digits is None else key_of(digits, str(kept.tensor.dtype), tuple(kept.tensor.shape), kept.sample)
        name = None if key is None else new.get(key) or self.names.get(key)
        if name is None:
            name = f"{self._files}/{digits or '0' * 16}-{self._tensors}{'.sample' if kept.sample else ''}"
            self._tensors += 1
            if key is not None:
                new[key] = name
            if kept.ready is not None:
                kept.ready.synchronize()
            own[name] = kept.tensor
        return name

    def _save(self, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        folder = self._folder / TENSORS
        folder.mkdir(exist_ok=True)
        path = folder / f"{self._files:08d}.safetensors"
        part = path.with_suffix(".part")
        try:
            named = {name.partition("/")[2]: tensor for name, tensor in tensors.items()}
            shapes = {name: json.dumps([*each.shape]) for name, each in named.items() if _is_repeated(each)}
            save_file(
                {n: each.flatten()[0].clone() if n in shapes else each for n, each in named.items()}, part, shapes
            )
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._files += 1
        self.nbytes += path.stat().st_size

    def _append(self, file: Any, data: bytes, size: int) -> None:
        """Write records of a size; if the disk gets full, only the whole ones."""
        start, view, written = file.seek(0, os.SEEK_END), memoryview(data), 0
        try:
            while written < len(data):
                written += file.write(view[written:])
        finally:
            whole = written // size * size
            if whole < written:
                with contextlib.suppress(OSError):
                    file.truncate(start + whole)
            self.nbytes += whole
            if file is self._opened[-1]:
                self.calls += whole // size


class _Batch:
    """What is written together: the lines that calls share, texts, records and stored tensors."""

    def __init__(self) -> None:
        self.shared: list[tuple[bytes, bytes]] = []
        self.texts: list[bytes] = []
        self.rows: list[bytes] = []
        self.calls: list[bytes] = []
        self.tensors: dict[str, Any] = {}
        self.names: dict[Any, str] = {}
        self.size = 0  # of the stored tensors

    def lengths(self) -> list[int]:
        """How much there is now, for `cut`."""
        return [len(self.shared), len(self.texts), len(self.rows), len(self.calls)]

    def cut(self, lengths: list[int]) -> None:
        """Drop what has come since."""
        for kept, length in zip((self.shared, self.texts, self.rows, self.calls), lengths, strict=True):
            del kept[length:]  # type: ignore[attr-defined]

    def bytes(self) -> int:
        """The bytes of all that."""
        pairs = sum(len(line) for pair in self.shared for line in pair)
        return self.size + pairs + sum(sum(map(len, each)) for each in (self.texts, self.rows, self.calls))


def _parts(entry: QueuedCall | Snapshot) -> Iterator[QueuedCall | Snapshot]:
    """The calls of an entry one by one."""
    if isinstance(entry, Snapshot):
        for number in range(len(entry.calls)):
            more = entry.more[entry.more["call"] == number]
            more["call"] = 0
            yield entry._replace(calls=entry.calls[number : number + 1], more=more)
    else:
        yield entry


def write_info(folder: Path, info: RunInfo, *, finished: bool) -> None:
    """Write the description of a run, in one step."""
    plain = info.as_dict() | {"finished": finished, "tables": records.described()}
    part = folder / f"{INFO}.part"
    part.write_text(f"{json.dumps(plain, indent=1)}\n", encoding="utf-8")
    part.replace(folder / INFO)


def key_of(digits: str, dtype: str, shape: tuple[int, ...], sample: bool) -> Any:
    """Return the key by which equal tensors are written only once."""
    return digits, dtype, shape, sample


def _with_names(plain: Any, names: list[str]) -> Any:
    match plain:
        case {"tensor": int(place), "stride": _}:  # and not the arguments by name, of which one may be called `tensor`
            return plain | {"tensor": names[place]}
        case list():
            return [_with_names(item, names) for item in plain]
        case dict():
            return {key: _with_names(value, names) for key, value in plain.items()}
    return plain


def _is_repeated(tensor: Any) -> bool:
    """Whether one number in memory stands for all of a tensor."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _stored_bytes(tensor: Any) -> int:
    """The most bytes that a tensor takes in its file: the values and their entry in the head."""
    count = 1 if _is_repeated(tensor) else tensor.numel()
    return int(count * tensor.element_size() + 200 + 40 * tensor.dim())


def remove_run(folder: Path, claimed: bool = False, *, alone: bool = False) -> None:
    """Delete the files of a run, and nothing else, or with `alone` those of the process that has the folder itself.

    `claimed` says that the caller has a claim to the folder.
    """
    inside = () if alone else dict.fromkeys((*(entry for _, entry in rank_folders(folder)), *child_folders(folder)))
    parts = [part for part in (*inside, folder) if _is_run(part)]
    if not parts:
        raise _no_run(folder)
    for part in parts:
        _remove(part, folder, claimed and part == folder)


def leftovers(folder: Path, world_size: int) -> list[Path]:
    """Return the folders of an older run that readers would take for processes of a new one.

    These are a run of one process, which readers prefer, and ranks from `world_size` on. No process of the new run
    writes them, so each may refuse or remove them at any time.
    """
    further = [entry for rank, entry in rank_folders(folder) if rank >= world_size]
    return [part for part in (*further, folder) if os.path.lexists(part / INFO)]


def remove_leftovers(folder: Path, world_size: int) -> None:
    """Delete `leftovers`, unless one is not a run or is written to; several processes may do so at once."""
    for part in leftovers(folder, world_size):
        if _is_run(part):
            _remove(part, folder)
        elif os.path.lexists(part / INFO):  # otherwise another process was faster
            raise _no_run(part)


def _remove(part: Path, folder: Path, claimed: bool = False) -> None:
    if not claimed:
        check_unclaimed(part)
    stored = part / TENSORS
    names: list[str] = []
    if not stored.is_symlink():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(stored)
    found = [stored / name for name in names if _STORED.fullmatch(name)]
    lock = () if claimed else (LOCK,)
    names = [*_FILES, *FLIGHT, SUMMARY, *lock, f"{INFO}.part", INFO]  # a folder with INFO is a run: it goes last
    for path in (*found, *(part / name for name in names)):
        path.unlink(missing_ok=True)
    for empty in (stored, part):
        if empty != folder:
            with contextlib.suppress(OSError):
                empty.rmdir()


def _no_run(folder: Path) -> OpInterceptError:
    return OpInterceptError(f"cannot overwrite {str(folder)!r}: it holds other files than those of a run; remove them")


def _is_run(folder: Path) -> bool:
    """Whether the folder has the file that a writer begins with; other programs write a `run.json`, too."""
    try:
        read_info(folder)
    except (OSError, OpInterceptError):
        return False
    return True
