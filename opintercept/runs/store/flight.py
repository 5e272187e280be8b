"""`Flight`: keeps the records of the last calls of a run in mapped files of fixed size, which outlive a kill.

They are those of `records.py`, used in a circle. Invariant: the record of a call that is being written does not check,
and those of its tensors are bound to its lap, so that a reader takes no mixture for a call. Must not import torch.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from opintercept._core.in_kernel import Sink
from opintercept._core.record import PendingRecord
from opintercept._native.layout import LATE, LEFT_OUT, SLOTS
from opintercept._values.stats import Values
from opintercept.runs.store.files import read_plain
from opintercept.runs.store.records import (
    CALL,
    MORE,
    ROWS_OF_CALL,
    SHARED_TEXTS,
    TENSOR,
    Array,
    Encoder,
    checks_of,
    seal,
)
from opintercept.runs.store.texts import members_of

FLIGHT_CALLS, FLIGHT_TENSORS, FLIGHT_TEXTS = "flight-calls.bin", "flight-tensors.bin", "flight-texts.jsonl"
FLIGHT = (FLIGHT_CALLS, FLIGHT_TENSORS, FLIGHT_TEXTS)
TEXT = 1 << 10
"""How many bytes of text a call has room for. One with a longer text is left out, and counted when the run is read."""
MOST_SLOTS = 1 << 18
_MOST = MOST_SLOTS * ROWS_OF_CALL * TENSOR.itemsize


class Flight:
    """Writes the records of the last `slots` calls over older ones. Kernels write to the same files."""

    def __init__(self, slots: int, encoder: Encoder) -> None:
        self.sink: Sink | None = None  # once kernels need it
        self._slots, self._encoder = slots, encoder
        encoder.circle = True
        self._maps: tuple[Any, ...] = ()  # of calls, tensors and texts
        self._files: tuple[Any, ...] = ()  # of signatures and call sites
        self._numbers = itertools.count()  # atomic, between threads and in signal handlers
        self._texts = itertools.count()
        self._pid = os.getpid()

    def use(self, sink: Sink) -> None:
        """Let kernels write, too, if the files are open."""
        self.sink = sink
        if self._maps:
            sink.open(self._maps[0], self._maps[1], self._slots, next(self._numbers))

    def open(self, folder: Path) -> None:
        """Make the files, whose place on the disk is taken now, so that a full disk is noticed here."""
        self._pid, self._numbers, self._texts = os.getpid(), itertools.count(), itertools.count()
        sizes = (CALL.itemsize, ROWS_OF_CALL * TENSOR.itemsize, TEXT)
        self._maps = tuple(_mapped(folder / name, self._slots * size) for name, size in zip(FLIGHT, sizes, strict=True))
        self._files = tuple(open(folder / name, "ab", buffering=0) for name in SHARED_TEXTS)  # noqa: SIM115
        self.write_texts()
        if self.sink is not None:
            self.use(self.sink)

    def write_texts(self) -> None:
        """Write the signatures and call sites that are new, before a record names them."""
        for file, texts in zip(self._files, (self._encoder.signatures, self._encoder.sites), strict=False):
            if new := texts.take():
                with contextlib.suppress(ValueError):  # another thread has ended the block and closed the file
                    file.write(new)

    def put(self, note: PendingRecord, arguments: str, values: Mapping[str, Values], error: str | None) -> None:
        """Write a call over the oldest one. Outside of a block and in a forked child, do nothing."""
        maps = self._maps
        if not maps or self._pid != os.getpid():
            return
        rows: list[bytes] = []

        def row(packed: bytes) -> int:
            rows.append(packed)
            return len(rows)

        def text(line: bytes) -> int:
            if len(line) > TEXT:
                return -1
            start = next(self._texts) % self._slots * TEXT
            with contextlib.suppress(ValueError):  # see below
                maps[2][start : start + len(line)] = line
            return start + 1

        short = None if error is None else error[: TEXT // 4]
        call = self._encoder.record(note, arguments, values, {}, None, short, row, text)
        self.write_texts()
        if self.sink is not None:
            self.sink.put(call, b"".join(rows))
            return
        number = next(self._numbers)
        slot, lap = number % self._slots, number // self._slots + 1
        record = np.frombuffer(bytearray(call), CALL)
        record["lap"] = lap
        whole = seal(record).tobytes()
        tensors = seal(np.frombuffer(bytearray(b"".join(rows)), TENSOR), lap).tobytes()
        start, first = slot * CALL.itemsize, slot * ROWS_OF_CALL * TENSOR.itemsize
        with contextlib.suppress(ValueError):  # another thread has ended the block and closed the maps
            maps[0][start : start + 8] = bytes(8)  # of no record, until the last line
            maps[1][first : first + len(tensors)] = tensors
            maps[0][start + 8 : start + len(whole)] = whole[8:]
            maps[0][start : start + 8] = whole[:8]

    def close(self, folder: Path) -> Snapshot:
        """End the writing and return what the files have, which stay. May be called again."""
        if not self._maps:
            return NOTHING
        if self.sink is not None:
            self.sink.close()
        maps, files = self._maps, self._files
        self._maps = self._files = ()
        for each in (*maps, *files):
            each.close()
        return snapshot(folder)

    def forget_parent(self) -> None:
        """In a forked child, leave the files to the parent."""
        self._maps = self._files = ()


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Make a file of zeros, and map it."""
    with open(path, "w+b") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        made = mmap.mmap(file.fileno(), size)
    for start in range(0, size, 1 << 20):  # touch each page now, and not in a call
        made[start : start + (1 << 20)] = bytes(min(1 << 20, size - start))
    return made


class Snapshot(NamedTuple):
    """The calls of a flight recorder's files, in the order in which they were written."""

    calls: Array  # tensors have their numbers in `tensors`, from 1
    tensors: Array
    texts: bytes  # the file of their texts
    left_out: int  # calls that had no room, or were being written
    more: Array = np.zeros(0, MORE)  # tensors without a slot, of calls of kernels


NOTHING = Snapshot(np.zeros(0, CALL), np.zeros(0, TENSOR), b"", 0)


def snapshot(folder: Path, dtypes: tuple[Any, Any] = (CALL, TENSOR)) -> Snapshot:
    """Read the files of a flight recorder, which a program may be writing to; `NOTHING` if there are none."""
    try:
        data = [read_plain(folder / name, _MOST) for name in FLIGHT]
    except FileNotFoundError:
        return Snapshot(np.zeros(0, dtypes[0]), np.zeros(0, dtypes[1]), b"", 0)
    calls, tensors = (
        np.frombuffer(bytearray(read[: len(read) // kind.itemsize * kind.itemsize]), kind)
        for read, kind in zip(data, dtypes, strict=False)
    )
    written = (calls["lap"] > 0) & (calls["check"] != 0)  # the check is 0 while a call is being written
    places = np.flatnonzero(written & (calls["check"] == checks_of(calls)))
    places = places[np.argsort(calls["lap"][places], kind="stable")]
    laps = np.resize(np.repeat(calls["lap"], ROWS_OF_CALL), len(tensors))
    whole = np.append(tensors["check"] == checks_of(tensors, laps), True)
    found, kept = calls[places], (calls["has"][places] & LEFT_OUT) == 0
    late = (found["has"] & LATE) != 0
    found["has"] &= ~np.uint8(LATE)
    for slot in SLOTS:
        number = found[slot].astype(np.int64)
        row = np.where(number > 0, number + places * ROWS_OF_CALL, 0)
        fits = (number <= ROWS_OF_CALL) & (row <= len(tensors))
        row[~fits] = 0
        row[late & ~whole[row - 1]] = 0  # a device has not read it
        kept &= fits & whole[row - 1]
        found[slot] = row
    for call in np.flatnonzero(kept & (found["text"] > 0)).tolist():
        start = int(found["text"][call]) - 1
        members = members_of(data[2][start : data[2].find(b"\n", start) + 1]) if start < len(data[2]) else None
        kept[call] = members is not None and members["index"] == found["index"][call]
    return Snapshot(found[kept], tensors, data[2], int(written.sum()) - int(kept.sum()))
