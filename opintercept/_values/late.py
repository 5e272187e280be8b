"""`Late`: numbers that a device is still computing. `Lots` brings those of many calls to the host in one copy, and
`GraphResults` those that a CUDA graph computes each time that it is replayed.

Invariant: nothing here waits for a device before `Late.read`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

LOT = 256
"""How many results are copied together."""

Numbers = Sequence[float] | Sequence[int]
Place = tuple[torch.device, Any]


def place_of(tensor: torch.Tensor) -> Place:
    """A tensor's device and the current stream there. What one stream has made, another cannot read without a wait.

    While a graph is captured, it is the place where its constants are.
    """
    if (graph := graph_of(tensor)) is not None:
        return graph.place
    return tensor.device, torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class Lots:
    """Gathers results by device and stream, and copies `size` of them at a time."""

    def __init__(self, size: int | None = LOT) -> None:
        self._size = size
        self.is_used = False  # whether anything was ever put
        self._open: dict[Place, list[Late]] = {}

    def put(self, parts: Sequence[torch.Tensor]) -> Late:
        """Take tensors on one device, whose values are wanted as int64 if they are that, and as float64 otherwise."""
        self.is_used = True
        if (graph := graph_of(parts[0])) is not None:
            return graph.put(parts)
        key = place_of(parts[0])
        late = Late(self, key, parts)
        gathered = self._open.setdefault(key, [])
        gathered.append(late)
        if self._size is not None and len(gathered) >= self._size:
            self.send()
        return late

    def send(self) -> None:
        """Begin to copy what there is. What another thread puts meanwhile may be copied alone.

        While a CUDA graph is captured this does nothing: the copy would become part of the graph, or end the capture.
        """
        keys = list(self._open)
        if any(stream is not None for _, stream in keys) and torch.cuda.is_current_stream_capturing():
            return
        for key in keys:
            if gathered := self._open.pop(key, None):
                try:
                    _send(gathered, key)
                except RuntimeError:  # the device has no memory left now
                    self._open.setdefault(key, []).extend(gathered)


class Late:
    """The numbers in some tensors."""

    __slots__ = ("_key", "_lots", "parts", "sent")

    def __init__(self, lots: Lots | None, key: Place, parts: Sequence[torch.Tensor]) -> None:
        self._lots, self._key = lots, key
        self.parts = parts  # until the copy has begun
        # Since then; set at once, as another thread may do so too. The lot is None in a graph, before any replay.
        self.sent: tuple[Lot | None, _Places] | None = None

    @property
    def is_sent(self) -> bool:
        """Whether the copy has begun, so that `read` runs no operator on the device."""
        return self.sent is not None

    @property
    def at_hand(self) -> bool:
        """Whether `read` does not wait."""
        return self.sent is not None and self.sent[0] is not None and self.sent[0].at_hand

    def read(self) -> list[Numbers]:
        """The numbers of each tensor; waits for the device."""
        if self.sent is None and self._lots is not None:
            self._lots.send()
        if self.sent is None:
            _send([self], self._key)
        assert self.sent is not None
        lot, places = self.sent
        assert lot is not None
        return [lot.numbers()[not whole][start:stop] for whole, start, stop in places]

    def of(self, lot: Lot) -> Late:
        """The same numbers of another replay of the graph that computes these."""
        late = Late(None, self._key, ())
        assert self.sent is not None
        late.sent = lot, self.sent[1]
        return late


class Lot:
    """Results that are copied together: begins to copy them.

    Args:
        words: All of them, `int64[n]`.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self._numbers: tuple[Numbers, Numbers] | None = None
        self._ready: torch.cuda.Event | None = None
        self._words = words
        if words.is_cuda:
            with torch.cuda.device(words.device):
                copy = torch.empty_like(words, device="cpu", pin_memory=True)
                self._words = copy.copy_(words, non_blocking=True)
                self._ready = torch.cuda.Event()
                self._ready.record()

    @property
    def at_hand(self) -> bool:
        return self._numbers is not None or self._ready is None or self._ready.query()

    def numbers(self) -> tuple[Numbers, Numbers]:
        """All numbers, as int64 and as float64."""
        if self._numbers is None:
            if self._ready is not None:
                self._ready.synchronize()
            words = self._words.cpu()
            data = ctypes.string_at(words.data_ptr(), words.nbytes)  # no operator, which another thread might watch
            self._numbers = array("q", data), array("d", data)
        return self._numbers


_Places = list[tuple[bool, int, int]]  # whether numbers are whole, and from where to where


def _send(gathered: Sequence[Late], place: Place) -> None:
    """Begin to copy results to the host."""
    # Another thread may put more into the list, or send some of it.
    given = [(late, parts) for late in [*gathered] if (parts := late.parts)]
    if not given:
        return
    with torch.cuda.stream(place[1]) if place[1] is not None else nullcontext():
        words, places = _joined([parts for _, parts in given])
        lot = Lot(words)
    for (late, _), found in zip(given, places, strict=True):
        late.sent = lot, found
        late.parts = ()


ROOM = 1 << 17
"""How many numbers a graph may compute: those of some 10,000 tensors."""
SPARE = 1 << 10
"""More of them than hooks take at once."""
SCRATCH = 1 << 17
"""Bytes for one tensor, see `device/kernel.h:Scratch`."""
_STREAMS = 4  # that a graph captures


class GraphResults:
    """The results of readers that are part of a CUDA graph, which writes them to a table when it is replayed.

    Neither the table nor the scratch is in the graph's own memory, of which the owner of the graph keeps account. They
    must live as long.
    """

    __slots__ = ("_lates", "_scratch", "_size", "_streams", "_table", "place")

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._table = torch.empty(ROOM, dtype=torch.int64, device=device)
            self._scratch = torch.zeros(_STREAMS, SCRATCH, dtype=torch.uint8, device=device)
        self.place = place_of(self._table)
        self._lates: list[Late] = []
        self._streams: list[Place] = []
        self._size = 0

    def put(self, parts: Sequence[torch.Tensor]) -> Late:
        """Take tensors as `Lots.put` does. The numbers are those of no replay: see `Late.of`."""
        self._size += sum(part.numel() for part in parts)
        self._lates.append(late := Late(None, self.place, parts))
        return late

    @property
    def is_full(self) -> bool:
        """Whether another tensor may have no room. Those of which hooks have begun to read parts still have."""
        return self._size > ROOM - SPARE

    def scratch(self) -> torch.Tensor | None:
        """Zeros for launches on the current stream, which leave them zero, `uint8[SCRATCH]`; None for many streams."""
        key = self.place[0], torch.cuda.current_stream(self.place[0])
        if key not in self._streams:
            self._streams.append(key)
        number = self._streams.index(key)
        return self._scratch[number] if number < _STREAMS else None

    def end(self) -> None:
        """Let the graph write its table, as the last of what it captures.

        Raises:
            torch.OutOfMemoryError: The device has no memory, or the last call had more than the table has room for.
        """
        if self._size > len(self._table):
            raise torch.OutOfMemoryError
        if self._lates:
            words, places = _joined([late.parts for late in self._lates])
            self._table[: self._size].copy_(words)
            for late, found in zip(self._lates, places, strict=True):
                late.sent = None, found
                late.parts = ()  # the graph uses their memory for others

    def results(self) -> Lot:
        """Begin to copy what the last replay has found."""
        return Lot(self._table[: self._size])


captures: list[GraphResults | None] = []
"""The graphs that are being captured; None for one that takes no readers."""


def graph_of(tensor: torch.Tensor) -> GraphResults | None:
    """The graph that captures the call of a tensor, if readers may become part of it."""
    if len(captures) != 1 or (graph := captures[0]) is None or not tensor.is_cuda:
        return None  # nobody tells which graph it is if there are several
    return graph if tensor.device == graph.place[0] and torch.cuda.is_current_stream_capturing() else None


def _joined(gathered: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, list[_Places]]:
    """All tensors in one, `int64[n]`, those of one dtype beside each other, as CUDA joins them in few launches."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensors in gathered:
        for part in tensors:
            by_dtype.setdefault(part.dtype, []).append(part.reshape(-1))
    starts, joined, size = {}, [], 0
    for dtype, parts in by_dtype.items():
        values = torch.cat(parts)
        starts[dtype] = size
        size += values.numel()
        joined.append(values if dtype is torch.int64 else values.to(torch.float64).view(torch.int64))
    places: list[_Places] = []
    for tensors in gathered:
        places.append([])
        for part in tensors:
            start = starts[part.dtype]
            starts[part.dtype] = stop = start + part.numel()
            places[-1].append((part.dtype is torch.int64, start, stop))
    return joined[0] if len(joined) == 1 else torch.cat(joined), places
