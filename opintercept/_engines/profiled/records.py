"""Reads what torch's profiler has recorded: which part of it lies inside marks, and what the rest is.

Invariant: parts add up to the whole, in nanoseconds. What compiles, and what hooks run beside a mark, is no part of it.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from opintercept._engines import overloads

SEEN, CALLED = "opintercept saw ", "opintercept called "
"""What the names of marks begin with: around calls that are seen, and around functions in C that Python calls."""
COLLECTING = "opintercept waited for the collector of garbage"
"""The name of the mark around that, which may come in any operator that makes an object of Python."""

_COMPILING = "(dynamo_timed)"  # ends the names of what torch.compile does before it runs anything
_TO_PYTHON = ("PythonDispatchMode", "PythonSubclass")  # torch's records of what it hands to these
_LAUNCH = re.compile(r"(?:cuda|cu|hip)[A-Z]\w+")  # functions of a device's library that run on the host


class Unseen(NamedTuple):
    """What ran outside of marks.

    Attributes:
        name: Of an operator, a function or a kernel.
        kind: `"operator"` or `"function"` on the host, `"kernel"` or `"copy"` on a device.
        within: The operator or function that launched it; empty on the host, or where none did.
    """

    name: str
    kind: str
    within: str


@dataclass(slots=True)
class Ran:
    """What ran on the host or on devices, in nanoseconds.

    Attributes:
        seen: The time inside marks.
        replayed: The time in CUDA graphs that a block saw captured.
        rest: How often each of the others ran, and how long.
    """

    seen: int = 0
    replayed: int = 0
    rest: dict[Unseen, tuple[int, int]] = field(default_factory=dict)

    def add(self, key: Unseen, launches: int, nanoseconds: int) -> None:
        """Add what ran outside of marks."""
        before = self.rest.get(key, (0, 0))
        self.rest[key] = before[0] + launches, before[1] + nanoseconds

    def join(self, other: Ran) -> None:
        """Add another stretch."""
        self.seen += other.seen
        self.replayed += other.replayed
        for key, (launches, nanoseconds) in other.rest.items():
            self.add(key, launches, nanoseconds)

    @property
    def total(self) -> int:
        """All of it."""
        return self.seen + self.replayed + sum(nanoseconds for _, nanoseconds in self.rest.values())


class _Record(NamedTuple):
    start: int
    end: int
    name: str
    correlation: int
    overload: str


_MARK, _FUNCTION, _OPERATOR, _COMPILER, _OTHER = range(5)


class _Host:
    """What ran on the host: events as trees, one for each thread, with parents before their children."""

    def __init__(self, threads: Iterable[list[_Record]], watches: Container[str]) -> None:
        self._watches = watches
        self.events: list[_Record] = []
        self.kinds: list[int] = []
        self.above: list[int] = []  # the operator, function or mark around each, or -1
        self._parents: list[int] = []
        self.by_correlation: dict[int, int] = {}
        self._starts: dict[int, tuple[list[int], int]] = {}
        for events in threads:
            self._add(events)
        self.parts: set[int] = set()  # operators with operators inside
        self.passed_on: set[int] = set()  # operators that a mode or a subclass of tensors has got
        self.around_seen: set[int] = set()  # operators with marks somewhere inside
        self.holders: set[int] = set()  # operators that are calls: what hooks run beside a mark lies in them, too
        for place, kind in enumerate(self.kinds):
            above = self.above[place]
            if self.events[place].name in _TO_PYTHON:
                self.passed_on.add(above)
            if above >= 0 and kind in (_MARK, _OPERATOR):
                self.parts.add(above)
                if kind == _MARK and self.events[above].name == self.events[place].name.removeprefix(SEEN):
                    self.holders.add(above)
            while kind == _MARK and above >= 0 and above not in self.around_seen:
                self.around_seen.add(above)
                above = self.above[above]
        self.states: list[str] = []
        for place, kind in enumerate(self.kinds):
            parent = self._parents[place]
            around = self.states[parent] if parent >= 0 else "open"
            if kind == _COMPILER or around == "left out":
                state = "left out"
            elif kind == _MARK or around == "seen":
                state = "seen"
            elif around == "held":
                state = "held" if kind == _OTHER else "left out"
            else:
                state = "held" if place in self.holders else "open"
            self.states.append(state)

    def _add(self, events: list[_Record]) -> None:
        events.sort(key=lambda event: (event.start, -event.end))
        first, around = len(self.events), list[int]()
        for event in events:
            while around and self.events[around[-1]].end < event.end:
                around.pop()
            place, parent = len(self.events), around[-1] if around else -1
            above = parent
            while above >= 0 and self.kinds[above] == _OTHER:
                above = self._parents[above]
            self.events.append(event)
            self.kinds.append(_kind(event.name))
            self._parents.append(parent)
            self.above.append(above)
            self.by_correlation.setdefault(event.correlation, place)
            around.append(place)
        self._starts[first] = [event.start for event in events], first

    def innermost(self, event: _Record) -> int:
        """The place of the event around a launch, by time alone; -1 if there is none."""
        for starts, first in self._starts.values():
            place = first + bisect_right(starts, event.start) - 1
            while place >= first and self.events[place].end < event.end:
                place = self._parents[place]
            if place >= first:
                return place
        return -1

    def within(self, place: int) -> str:
        """The operator or function around an event, or the event itself."""
        while place >= 0 and self.kinds[place] not in (_OPERATOR, _FUNCTION):
            place = self._parents[place]
        return self.events[place].name.removeprefix(CALLED) if place >= 0 else ""

    def _is_counted_by_parts(self, place: int) -> bool:
        """Whether an operator has left the work to others, which have events of their own."""
        event = self.events[place]
        if place in self.passed_on or (place in self.parts and _is_composite(event)):
            return True
        # By vmap, for one: had a kernel got it as it was called, it had been seen.
        return place in self.around_seen and _overload_of(event) in self._watches

    def ran(self) -> tuple[Ran, int]:
        """What operators and functions took by themselves, and for how long torch.compile compiled."""
        own = [event.end - event.start for event in self.events]
        for place, kind in enumerate(self.kinds):
            if kind != _OTHER and self.above[place] >= 0:
                own[self.above[place]] -= self.events[place].end - self.events[place].start
        ran, compiling = Ran(), 0
        for place, (event, kind, state) in enumerate(zip(self.events, self.kinds, self.states, strict=True)):
            parent = self._parents[place]
            around = self.states[parent] if parent >= 0 else "open"
            if kind == _MARK and state == "seen" and around != "seen":
                ran.seen += event.end - event.start
            elif kind == _COMPILER and around != "left out" and event.name != COLLECTING:
                compiling += event.end - event.start
            elif kind == _FUNCTION and state == "open":
                ran.add(Unseen(event.name.removeprefix(CALLED), "function", ""), 1, own[place])
            elif kind == _OPERATOR and state == "open" and not self._is_counted_by_parts(place):
                ran.add(Unseen(event.name, "operator", ""), 1, own[place])
        return ran, compiling


def _kind(name: str) -> int:
    if name.startswith(SEEN):
        return _MARK
    if name.startswith(CALLED):
        return _FUNCTION
    if name.endswith(_COMPILING) or name == COLLECTING:
        return _COMPILER
    return _OPERATOR if name in _names() else _OTHER


@functools.cache
def _names() -> dict[str, list[str]]:
    """The overloads of each operator that the dispatcher knows."""
    found = defaultdict(list)
    for name in torch._C._dispatch_get_all_op_names():  # private; the profiler names operators as the dispatcher does
        found[name.partition(".")[0]].append(name)
    return found


def _overload_of(event: _Record) -> str:
    return f"{event.name}.{event.overload}" if event.overload else event.name


def _is_composite(event: _Record) -> bool:
    """Whether an operator of torch runs others, which are counted in its place."""
    name = _overload_of(event)
    return name.startswith(("aten::", "prims::")) and name in _names()[event.name] and overloads.is_made_of_others(name)


def watched() -> frozenset[str]:
    """The operators that a block sees where their kernels run, while it is open."""
    # Blocks have their kernels there. Those of torch are of factories, whose parts are counted.
    return frozenset(overloads.registered("BackendSelect"))


def read(events: Iterable[Any], replays: bool, watches: Container[str] = ()) -> tuple[Ran, Ran, int]:
    """What ran on the host and on devices, and for how long torch.compile compiled. `watches` is as `watched()`."""
    _names.cache_clear()  # libraries may have come since
    threads: dict[int, list[_Record]] = defaultdict(list)
    launches: dict[int, _Record] = {}
    on_devices: list[tuple[_Record, int]] = []
    for each in events:
        start, name = each.start_ns(), each.name()
        event = _Record(start, start + each.duration_ns(), name, each.correlation_id(), each.overload_name())
        if each.device_type() != DeviceType.CPU:
            if not each.is_user_annotation():
                on_devices.append((event, each.linked_correlation_id()))
        elif _LAUNCH.fullmatch(event.name):
            launches[event.correlation] = event
        elif event.end >= event.start:
            threads[each.device_resource_id()].append(event)
    host = _Host(threads.values(), watches)
    ran, compiling = host.ran()
    return ran, _on_devices(host, on_devices, launches, replays), compiling


def _on_devices(host: _Host, events: Iterable[tuple[_Record, int]], launches: dict[int, _Record], replays: bool) -> Ran:
    ran = Ran()
    for event, linked in events:
        launch = launches.get(event.correlation)
        place = host.by_correlation.get(linked, -1) if linked else -1
        if place < 0 and launch is not None:
            place = host.innermost(launch)
        state, taken = host.states[place] if place >= 0 else "open", event.end - event.start
        if state == "seen":
            ran.seen += taken
        elif replays and launch is not None and "GraphLaunch" in launch.name:
            ran.replayed += taken
        elif state == "open":
            kind = "copy" if event.name.startswith(("Memcpy", "Memset")) else "kernel"
            ran.add(Unseen(event.name, kind, host.within(place)), 1, taken)
    return ran
