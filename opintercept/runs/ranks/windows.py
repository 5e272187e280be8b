"""`WindowReader`: reads the calls of all processes of a run a few steps at a time, with numbers that they share.

Invariant: a window holds whole steps, of at most `MOST` calls together unless one step has more. No more files are open
than `Run` opens, however many processes there are. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.compare.pairing import metas
from opintercept.runs.program.names import module_name, operator_name
from opintercept.runs.store.columns import Array, Arrays, CallSignature, Columns, StoredCallSite
from opintercept.runs.store.run import Run
from opintercept.runs.sums import KindNumbers

ROLES = ("lhs", "rhs", "bias", "value")
_PLACES = ("call", "output", *ROLES)
_COLUMNS = [f"{role}_{name}" for role in ROLES for name in ("hash", "min", "max")]
_COLUMNS += ["index", "site", "look", "bias_inf", *(f"output_{name}" for name in ("nan", "inf", "min", "max", "rms"))]
MOST = 1 << 19
"""How many calls are compared together."""
BLOCK = 40  # bits of a time that are its step


class ProcessCalls(NamedTuple):
    """The calls of one process in a window, in order."""

    places: Arrays  # see `WindowReader`: of the `"call"`, of its `"output"`, and of operands by role; -1 for none
    time: Array  # block and step, which never decrease
    place: Array  # of each call in its step
    columns: Arrays  # what was recorded of values


Window = list[ProcessCalls]
"""The calls of some steps, with a part for each process, in the order of `WindowReader.ranks`."""


class RankPlace(NamedTuple):
    """A module, a line, an operator and a phase, as a call that was first seen there has them; and a tensor of it."""

    call_site: StoredCallSite
    record: CallRecord
    operand: str | None = None  # the role of the tensor; None for calls

    @property
    def backward(self) -> bool:
        """Whether it is in a backward pass."""
        return self.call_site.phase == "backward"

    @property
    def scaled(self) -> bool:
        """Whether infinities mean little: gradients in float16 overflow until their scale is found."""
        return self.backward and any(each is not None and each.dtype == "float16" for each in self.record.outputs[:1])

    @property
    def weight(self) -> bool:
        """Whether it is that of a weight, as far as a record tells: it does not say which tensors are parameters.

        The right operand of one product is, or that of a convolution, but not that of a batch of products or of an
        attention; and so is a bias, unless it is a matrix that is added.
        """
        record = self.record
        if self.backward or "attention" in record.op:
            return False
        if self.operand == "bias":
            return record.bias is not None and len(record.bias.shape) == 1
        single = record.gemm is None or record.gemm.batch == 1
        return self.operand == "rhs" and (single or "conv" in record.op or "grouped" in record.op)


class PlaceNumbers:
    """Numbers the places of all processes from 0, by what tells them apart."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], int] = {}
        self.places: list[RankPlace] = []

    def __call__(self, place: RankPlace, *parts: object) -> int:
        number = self._known.setdefault(parts, len(self._known))
        if number == len(self.places):
            self.places.append(place)
        return number


class WindowReader:
    """Reads a run of several processes.

    Places have numbers that processes share. A place is a module, a line, an operator, a phase, and a tensor with its
    shape. So a last batch of another size is another place for activations, and the same place for weights.

    Attributes:
        size: How many calls there are.
        steps: The first and the last step; None without calls.
        last: For each process the last time that it has a call at; -1 without calls.
        operands, outputs, calls: Their places.
        weight: For each place of an operand whether it is that of a weight.
    """

    def __init__(self, run: Run, most: int = MOST) -> None:
        self._most = most
        self.ranks = run.ranks
        self.operands, self.outputs, self.calls = PlaceNumbers(), PlaceNumbers(), PlaceNumbers()
        self.weight: list[bool] = []
        self._run = run
        self._kinds = [KindNumbers(self.columns(rank)) for rank in self.ranks]
        self._places: list[list[list[int]]] = [[] for _ in self.ranks]  # of each kind, in the order of `_PLACES`
        # Of each process the times, each once; and the number of the first call at each, and how many calls there are.
        self._times, self._starts = zip(*(_times_of(self.columns(rank)) for rank in self.ranks), strict=True)
        self.size = sum(int(starts[-1]) for starts in self._starts)
        self.last = np.array([times[-1] if len(times) else -1 for times in self._times], np.int64)
        every = np.concatenate(self._times) & ((1 << BLOCK) - 1)
        self.steps = (int(every.min()), int(every.max())) if len(every) else None

    def columns(self, rank: int) -> Columns:
        """Return the calls of a process."""
        return self._run.columns(rank)

    def __iter__(self) -> Iterator[Window]:
        times, inverse = np.unique(np.concatenate(self._times), return_inverse=True)
        sizes = np.bincount(inverse, np.concatenate([np.diff(starts) for starts in self._starts]), len(times))
        first = 0
        while first < len(times):
            total = np.cumsum(sizes[first : first + self._most])
            end = first + max(1, int(np.searchsorted(total, self._most, "right")))
            yield [self._part(process, times[first], times[end - 1]) for process in range(len(self.ranks))]
            first = end

    def _part(self, process: int, first_time: int, last_time: int) -> ProcessCalls:
        low = np.searchsorted(self._times[process], first_time, "left")
        high = np.searchsorted(self._times[process], last_time, "right")
        first, end = int(self._starts[process][low]), int(self._starts[process][high])
        numbers = np.arange(first, end)
        which = np.searchsorted(self._starts[process], numbers, "right") - 1
        time, place = self._times[process][which], numbers - self._starts[process][which]
        columns = self.columns(self.ranks[process])
        read = columns.read(_COLUMNS, first, end)
        kinds, new = self._kinds[process].of(read)
        self._places[process] += [self._add(columns.call_site(site), columns.signature(look)) for site, look in new]
        places = np.array(self._places[process], np.int32).reshape(-1, len(_PLACES))[kinds]
        return ProcessCalls(dict(zip(_PLACES, places.T, strict=True)), time, place, read)

    def _add(self, call_site: StoredCallSite, signature: CallSignature) -> list[int]:
        """Number the places of a new kind."""
        record, found = signature.record, metas(signature.template)
        place = module_name(call_site.module), call_site.source, call_site.phase, operator_name(record.op)

        def number(places: PlaceNumbers, role: str) -> int:
            meta = found.get(role)
            return places(RankPlace(call_site, record, role), *place, role, meta and (meta.shape, meta.dtype))

        numbers = [self.calls(RankPlace(call_site, record), *place), number(self.outputs, "output")]
        numbers += [number(self.operands, role) if role in found else -1 for role in ROLES]
        self.weight.extend(each.weight for each in self.operands.places[len(self.weight) :])
        return numbers


def _times_of(columns: Columns) -> tuple[Array, Array]:
    """The times of a process, each once, and the number of the first call at each, with that of all calls at the end.

    A block that is entered again begins with step 0 and with call 0. Threads may end a call after the next step began;
    it counts for that one.
    """
    times: list[Array] = []
    starts: list[Array] = []
    block, top, before, first_index = 0, 0, 0, None
    for start, chunk in columns.chunks(("index", "step")):
        step, index = np.clip(chunk["step"], 0, (1 << BLOCK) - 1), chunk["index"]
        if first_index is None:
            first_index = int(index[0])
        again = np.flatnonzero((np.diff(step, prepend=before) < 0) & (index <= first_index))
        before = int(step[-1])
        time = np.empty_like(step)
        for low, high in zip([0, *again.tolist()], [*again.tolist(), len(step)], strict=True):
            if low == high:
                continue
            if low in again:
                block, top = min(block + 1, 1 << 22), 0
            top_here = np.maximum.accumulate(np.maximum(step[low:high], top))
            time[low:high] = top_here + (block << BLOCK)
            top = int(top_here[-1])
        new = np.flatnonzero(np.diff(time, prepend=times[-1][-1] if times else -1))
        if len(new):
            times.append(time[new])
            starts.append(new + start)
    joined = np.concatenate(times) if times else np.empty(0, np.int64)
    return joined, np.concatenate([*starts, [len(columns)]]).astype(np.int64)
