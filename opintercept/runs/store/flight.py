"""`Flight`: keeps the last calls of a run in a mapped file of fixed size, which can be read after a kill.

Invariant: a slot that is being written has the number 0, so that a reader never takes a part of a line for a call.
Must not import torch.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
from io import BufferedReader
from pathlib import Path

from opintercept._core.call_site import CallSite
from opintercept._core.in_kernel import Sink
from opintercept.runs.store.codec import place_members

FLIGHT = "flight.ring"
HEAD = struct.Struct("<32sQQ")  # magic, how many slots, bytes of a slot
SLOT = struct.Struct("<QQ")  # the number of its line, from 1, and the length of the line
_MAGIC = b"opintercept flight recorder 1\n"
_MOST_SLOTS = 1 << 24
LINE, LINE_WITH_VALUES = 2048, 4096
"""How many bytes of a call there is room for. A longer line is left out, and counted when the file is read."""


class Flight:
    """Writes lines over the oldest ones. Kernels write to the same file by way of `sink`.

    Args:
        slots: How many lines to keep.
        size: The most bytes of a line.

    Attributes:
        sink: Writes in C++, once kernels need it.
    """

    def __init__(self, slots: int, size: int) -> None:
        self.sink: Sink | None = None
        self._slots, self._size = slots, size
        self._map: mmap.mmap | None = None
        self._numbers = itertools.count(1)  # atomic, between threads and in signal handlers
        self._pid = os.getpid()

    def serve(self, sink: Sink) -> Sink:
        """Let kernels write, too; `sink` is taken if there is none yet."""
        if self.sink is None:
            self.sink = sink
            self._open_sink()
        return self.sink

    def _open_sink(self) -> None:
        if self.sink is not None and self._map is not None:
            self.sink.open(self._map, HEAD.size, self._slots, self._size, next(self._numbers) - 1)

    def open(self, folder: Path) -> None:
        """Make the file, whose place on the disk is taken now, so that a full disk is noticed here.

        Raises:
            OSError: It cannot be made.
        """
        self._pid, self._numbers = os.getpid(), itertools.count(1)
        whole = HEAD.size + self._slots * self._size
        with open(folder / FLIGHT, "w+b") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, whole)
            else:
                file.truncate(whole)
            file.write(HEAD.pack(_MAGIC, self._slots, self._size))
            file.flush()
            self._map = mmap.mmap(file.fileno(), whole)
        for start in range(HEAD.size, whole, 1 << 20):  # touch each page now, and not in a call
            self._map[start : start + (1 << 20)] = bytes(min(1 << 20, whole - start))
        self._open_sink()

    def put(self, line: bytes) -> None:
        """Write a line over the oldest one. Outside of a block and in a forked child, do nothing."""
        if self._map is None or self._pid != os.getpid():
            return
        if self.sink is not None:
            self.sink.put(line)
            return
        number = next(self._numbers)
        start = HEAD.size + (number - 1) % self._slots * self._size
        length = len(line) if len(line) <= self._size - SLOT.size else 0
        # A kill cannot undo what was written to a map, in the order of these lines.
        self._map[start : start + 8] = bytes(8)
        self._map[start + 8 : start + SLOT.size + length] = struct.pack("<Q", length) + line[:length]
        self._map[start : start + 8] = struct.pack("<Q", number)

    def text_of(self, place: CallSite) -> bytes:
        """Return the part of a line that names a call site."""
        return place_members(place)

    def close(self, folder: Path) -> list[bytes]:
        """End the writing and return the lines of the file, which stays. May be called again."""
        if self._map is None:
            return []
        if self.sink is not None:
            self.sink.close()
        self._map.close()
        self._map = None
        with open(folder / FLIGHT, "rb") as file:
            found = []
            for place in places(file)[0]:
                file.seek(place)
                found.append(file.readline(self._size))
        return found

    def forget_parent(self) -> None:
        """In a forked child, leave the file to the parent."""
        if self.sink is not None:
            self.sink.forget_parent()
            self.sink = None
        self._map = None


def places(file: BufferedReader) -> tuple[list[int], int]:
    """Return where the lines of a file begin, in the order in which they were written, and how many are left out.

    Anyone may have written the file: what it says of its size is checked.
    """
    file.seek(0)
    head = file.read(HEAD.size)
    whole = os.fstat(file.fileno()).st_size
    if len(head) < HEAD.size:
        return [], 0
    magic, slots, size = HEAD.unpack(head)
    if magic.rstrip(b"\0") != _MAGIC or not SLOT.size < size <= whole or not 0 < slots <= _MOST_SLOTS:
        return [], 0
    numbered: list[tuple[int, int]] = []
    left_out = 0
    for start in range(HEAD.size, min(HEAD.size + slots * size, whole - size + 1), size):
        file.seek(start)
        number, length = SLOT.unpack(file.read(SLOT.size))
        if number and 0 < length <= size - SLOT.size:
            numbered.append((number, start + SLOT.size))
        elif number:
            left_out += 1
    return [place for _, place in sorted(numbered)], left_out
