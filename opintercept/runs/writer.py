"""Writes a run's folder from a thread of its own, with a bounded queue: the program waits rather than lose a call.

Invariant: a line is written after the tensors that it names, and whole, so that what is there when the program is
killed can be read. What cannot be written stops the recording, never the program.
Must not import torch, and its thread runs no operator that is watched: the kernel engine counts on that.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from opintercept._call import Note, TensorMeta
from opintercept._errors import OpInterceptError
from opintercept.runs.store import CALLS, INFO, TENSORS, RunInfo, Values

_INTERVAL = 1.0  # seconds after which what there is is written
_CALLS, _BYTES = 512, 1 << 25  # that are handed over at once
_QUEUED = 4
_FRAGMENTS, _NAMES = 4096, 1 << 16


class Reading(Protocol):
    """Values that may have to be waited for."""

    def read(self) -> Values: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor to be written: contiguous, on the CPU once `ready` has come, and what tells it from others."""

    tensor: Any
    ready: Any
    content: Reading | None
    sample: bool


@dataclass(slots=True)
class Entry:
    """A call to be written.

    Attributes:
        note: Its record.
        values: By role.
        kept: Tensors, or the names of such as have been written already.
        roles: Which of `kept` is what.
        arguments: As `_repro.plain_arguments` makes them, with places in `kept` for tensors.
        error: What it raised.
    """

    note: Note
    values: dict[str, Reading]
    kept: list[Kept | str]
    roles: dict[str, int]
    arguments: dict[str, Any] | None
    error: str | None

    @property
    def nbytes(self) -> int:
        """What its tensors take."""
        return sum(k.tensor.numel() * k.tensor.element_size() for k in self.kept if isinstance(k, Kept))


class Writer(threading.Thread):
    """The thread. Everything but `put`, `close` and the attributes is its own business.

    Args:
        folder: Is made, with what leads there.
        info: For `run.json`, which says that it is not finished until `close`.
        max_bytes: What all files may take; None for as much as there is.

    Attributes:
        calls: How many are on the disk.
        nbytes: What the files take.
        failure: Why the recording has stopped, or None.
        names: Of the tensors that are on the disk, by content.

    Raises:
        OSError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path, info: RunInfo, max_bytes: int | None) -> None:
        super().__init__(name=f"opintercept writes {folder}", daemon=True)
        self.calls = 0
        self.nbytes = 0
        self.failure: str | None = None
        self.names: dict[Any, str] = {}
        self._folder = folder
        self._info = info
        self._max_bytes = max_bytes
        self._files = 0
        self._tensors = 0
        self._fragments: dict[int, tuple[Any, str]] = {}
        self._lock = threading.RLock()  # a signal's handler may run operators while it is held
        self._batch: list[Entry] = []
        self._size = 0
        self._queue: queue.Queue[list[Entry] | None] = queue.Queue(_QUEUED)
        folder.mkdir(parents=True, exist_ok=True)
        _write_info(folder, info)
        self._file = open(folder / CALLS, "ab", buffering=0)  # noqa: SIM115 - closed by the thread

    def put(self, entry: Entry) -> None:
        """Take a call; waits where the disk is slower than the program."""
        with self._lock:
            self._batch.append(entry)
            self._size += entry.nbytes
            if len(self._batch) >= _CALLS or self._size >= _BYTES:
                self._hand_over(self._taken())

    def close(self) -> None:
        """Write what is left and end the thread."""
        with self._lock:
            self._hand_over(self._taken())
        self._hand_over(None)
        self.join()

    def _taken(self) -> list[Entry]:
        with self._lock:
            batch, self._batch, self._size = self._batch, [], 0
        return batch

    def _hand_over(self, batch: list[Entry] | None) -> None:
        while self.is_alive():
            with contextlib.suppress(queue.Full):
                return self._queue.put(batch, timeout=1.0)

    def run(self) -> None:
        """Write until `close`."""
        with self._file:
            while True:
                try:
                    batch = self._queue.get(timeout=_INTERVAL)
                except queue.Empty:
                    batch = self._taken()
                if batch is None:
                    break
                if batch and self.failure is None:
                    try:
                        self._write(batch)
                    except Exception as exception:  # a full disk, or a device that has failed
                        self.failure = f"{type(exception).__name__}: {exception}"
            if self.failure is None:
                try:
                    _write_info(self._folder, self._info, finished=True)
                except OSError as exception:
                    self.failure = f"{type(exception).__name__}: {exception}"

    def _write(self, batch: list[Entry]) -> None:
        tensors: dict[str, Any] = {}
        new: dict[Any, str] = {}
        lines: list[bytes] = []
        total, full = self.nbytes, 0
        for entry in batch:
            own: dict[str, Any] = {}
            names = [kept if isinstance(kept, str) else self._named(kept, own, new) for kept in entry.kept]
            line = self._line(entry, names).encode()
            total += len(line) + sum(t.numel() * t.element_size() for t in own.values())
            if self._max_bytes is not None and total > self._max_bytes:
                full = total
                break
            tensors |= own
            lines.append(line)
        if tensors:
            self._save(tensors)
        self._append(b"".join(lines))
        if len(self.names) + len(new) > _NAMES:
            self.names.clear()
        self.names |= new
        self.calls += len(lines)
        if full:
            self.failure = f"max_bytes={self._max_bytes}, got {full} bytes with the next call; raise it, or keep less"

    def _named(self, kept: Kept, own: dict[str, Any], new: dict[Any, str]) -> str:
        """The tensor's name, that of one with the same content if there is one; else it goes into `own`."""
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
            save_file({name.partition("/")[2]: tensor for name, tensor in tensors.items()}, part)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        self._files += 1
        self.nbytes += path.stat().st_size

    def _append(self, text: bytes) -> None:
        start, view = self._file.seek(0, os.SEEK_END), memoryview(text)
        try:
            while view:
                view = view[self._file.write(view) :]
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise
        self.nbytes += len(text)

    def _line(self, entry: Entry, names: list[str]) -> str:
        note = entry.note
        place = note.place
        head = (
            f'{{"index":{note.index},"step":{note.step},"phase":"{note.phase}","module":{json.dumps(place.module)},'
            f'"source":{json.dumps(place.source)},"forward":{json.dumps(note.kin[0])},"grad_of":{json.dumps(note.kin[1])},'
            f'"autocast":{json.dumps(None if note.autocast is None else str(note.autocast).removeprefix("torch."))},'
            f'"elapsed":{json.dumps(note.elapsed)},{self._fragment(note)}'
        )
        parts = [head]
        if entry.values:
            values = ",".join(f'"{role}":{_text(value.read())}' for role, value in entry.values.items())
            parts.append(f',"values":{{{values}}}')
        if entry.roles:
            parts.append(f',"tensors":{json.dumps({role: names[place] for role, place in entry.roles.items()})}')
        if entry.arguments is not None:
            parts.append(f',"arguments":{json.dumps(_with_names(entry.arguments, names))}')
        if entry.error is not None:
            parts.append(f',"error":{json.dumps(entry.error)}')
        parts.append("}\n")
        return "".join(parts)

    def _fragment(self, note: Note) -> str:
        """The part of a line that calls which look alike share."""
        known = self._fragments.get(id(note.summary))
        if known is None:
            summary = note.summary._asdict()
            for role in ("lhs", "rhs", "bias", "output"):
                summary[role] = _meta(summary[role])
            summary["gemm"] = None if note.summary.gemm is None else note.summary.gemm._asdict()
            if len(self._fragments) >= _FRAGMENTS:
                self._fragments.clear()
            # Kept alive, so that no other gets its address.
            known = self._fragments[id(note.summary)] = (note.summary, json.dumps(summary)[1:-1])
        return known[1]


def key_of(digits: str, dtype: str, shape: tuple[int, ...], sample: bool) -> Any:
    """What tensors that are written once share."""
    return digits, dtype, shape, sample


def _with_names(plain: Any, names: list[str]) -> Any:
    if isinstance(plain, list):
        return [_with_names(item, names) for item in plain]
    if isinstance(plain, dict):
        return {key: names[value] if key == "tensor" else _with_names(value, names) for key, value in plain.items()}
    return plain


def _meta(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_meta(item) for item in value]
    if isinstance(value, TensorMeta):
        return {name: getattr(value, name) for name in TensorMeta.__slots__}
    return None


def _text(values: Values) -> str:
    quoted = "null" if values.hash is None else f'"{values.hash}"'
    numbers = ",".join(
        f'"{name}":{"null" if number is None else repr(number)}'
        for name, number in (("min", values.min), ("max", values.max), ("mean", values.mean), ("rms", values.rms))
    )
    return f'{{"hash":{quoted},"count":{values.count},"nan":{values.nan},"inf":{values.inf},{numbers}}}'


def _write_info(folder: Path, info: RunInfo, *, finished: bool = False) -> None:
    plain = info.as_dict() | {"finished": finished}
    part = folder / f"{INFO}.part"
    part.write_text(f"{json.dumps(plain, indent=1)}\n", encoding="utf-8")
    part.replace(folder / INFO)


def remove_run(folder: Path) -> None:
    """Delete what a run consists of, and nothing else.

    Raises:
        OpInterceptError: The folder holds something that is no run.
    """
    ranks = [entry for entry in folder.glob("rank[0-9]*") if entry.is_dir() and not entry.is_symlink()]
    if not (folder / INFO).exists() and not any((rank / INFO).exists() for rank in ranks):
        raise OpInterceptError(f"what is overwritten must be a run, got other files in {str(folder)!r}; remove them")
    for part in (*ranks, folder):
        for pattern in (INFO, CALLS, f"{INFO}.part", f"{TENSORS}/*.safetensors", f"{TENSORS}/*.part"):
            for path in part.glob(pattern):
                path.unlink()
        for empty in (part / TENSORS, part):
            if empty != folder:
                with contextlib.suppress(OSError):
                    empty.rmdir()
