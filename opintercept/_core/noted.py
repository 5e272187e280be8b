"""`NotedCalls`: the calls that compiled kernels have noted, of which the hooks of a pipeline have not been notified.

Invariant: hooks are notified of calls in the order in which they ended, and see in Python every call that is new to
them: what they learn of it holds for all calls that look alike. Must not import torch or the pipeline.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from opintercept._core.call import OpCall
from opintercept._core.call_site import CallSite
from opintercept._core.hook import Handle
from opintercept._core.in_kernel import (
    ROLES,
    CallRanges,
    Checker,
    Chunk,
    Found,
    InKernel,
    Plan,
    RecordWriter,
    Sink,
    Work,
)
from opintercept._core.record import NOTED_WHOLE, PendingRecord


class Ring(Protocol):
    """The ring in C++, see `_engines/compiled/ring.cpp`."""

    def next_index(self) -> int: ...
    def calls(self) -> int: ...
    def set_step(self, step: int, /) -> None: ...
    def set_unseen(self, count: int, /) -> None: ...
    def attach(self, rows: Any, /) -> None: ...
    def suspend(self) -> None: ...
    def plan(self, plan: Plan, /) -> bool: ...
    def sink(self) -> Sink: ...
    def checker(self) -> Checker: ...
    def take(self, waits: bool, /) -> tuple[tuple[Any, ...], dict[str, Found], tuple[Any, ...]] | None: ...
    def take_all(self, waits: bool, /) -> Chunk | None: ...
    def has_odd(self, any_left: bool, /) -> bool: ...
    def take_odd(self, waits: bool, /) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None] | None: ...
    def empty(self) -> bool: ...
    def forget_parent(self) -> None: ...


class NotedCalls:
    """The calls that kernels have noted for one pipeline, in the order in which they ended.

    Args:
        ring: Where kernels put them.
    """

    __slots__ = ("_checks", "_failures", "_hooks", "_keeps", "_lock", "_notifier", "_writer", "finite", "later", "ring")

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.finite: tuple[Handle, ...] = ()  # of hooks that look at calls in Python whose values are not finite
        self.later: tuple[Handle, ...] = ()  # those of them that are told once devices have read the values
        # Weak, since rows keep what was learned for a handle, and the collector of garbage does not see the ring's.
        self._hooks: tuple[tuple[weakref.ref[Handle], InKernel], ...] = ()
        self._keeps = False  # whether all of these take their calls together
        self._checks: tuple[tuple[weakref.ref[Handle], None], ...] = ()  # of the hook that checks products
        self._writer: tuple[InKernel, RecordWriter] | None = None
        self._lock: Any = threading.RLock()  # for `_is_owned`, which `Condition` uses too
        self._notifier: int | None = None  # the thread that notifies hooks
        self._failures: list[Failure] = []  # of hooks that were notified where nobody could be told

    def plan(self, handles: Sequence[Handle], links: Any, flush: Callable[[], None]) -> bool:
        """Let kernels do the work of these hooks, and return whether they can.

        Args:
            handles: The hooks.
            links: `Origin.links`.
            flush: Notifies the hooks before of the calls that are theirs.
        """
        self.ring.suspend()
        flush()
        self._hooks, self.finite, self.later, self._checks, self._writer = (), (), (), (), None
        written: tuple[str, ...] = ()
        hooks: list[Any] = [handle.hook for handle in handles]
        works: list[Work | None] = [hook.work() if _is_in_kernel(hook) else None for hook in hooks]
        together = _together(works)
        if links is None or together is None or (together.rows and not NOTED_WHOLE):
            return False
        every = [(handle, hook, work) for handle, hook, work in zip(handles, hooks, works, strict=True) if work]
        self._hooks = tuple((weakref.ref(handle), hook) for handle, hook, work in every if work.rows)
        self.finite = tuple(handle for handle, _, work in every if work.finite)
        self.later = self.finite if together.later else ()
        self._checks = tuple((weakref.ref(handle), None) for handle, _, work in every if work.checker is not None)
        self._keeps = together.rows and together.keeps
        sink = checker = None
        for hook, work in zip(hooks, works, strict=True):
            if work is not None and work.writes is not None:
                self._writer, written = (hook, work.writes), work.reads
                sink = work.writes.serve(self.ring.sink)
            if work is not None and work.checker is not None:
                checker = work.checker.use(self.ring.checker)
        plan = Plan(together, links.names_all or links.wanted, links.wanted, sink, written, checker)
        while not self.ring.plan(plan):
            flush()  # another thread has added one
        return True

    def flush(self, notify: Notify, only_if_free: bool = False, settle: bool = False) -> Iterator[Failure]:
        """Notify hooks of all noted calls, and wait for a thread that is doing so. Yields the failures of hooks.

        It waits for a second at most: that thread may wait for a lock of a hook, which the caller may hold.

        Args:
            notify: Notifies the hooks of one call.
            only_if_free: Whether to leave it to that thread, and to leave calls whose values a device still reads.
            settle: Whether to wait for devices to say which values are not finite.
        """
        me, ring = threading.get_ident(), self.ring
        while self._failures or not ring.empty() or ring.has_odd(settle) or self._notifier not in (None, me):
            if only_if_free and self._notifier not in (None, me):
                return
            failed = self._failed(notify, not only_if_free, settle)
            if failed is None or (only_if_free and not failed):  # devices still read the values of the others
                return
            yield from failed

    def flush_quietly(self, notify: Notify, goes_on: bool) -> None:
        """The same where an exception would be lost. The next `flush` yields the failures.

        Args:
            notify: Notifies the hooks of one call.
            goes_on: Whether to go on after a failure.
        """
        while not (self.ring.empty() and not self.ring.has_odd(True)) and (goes_on or not self._failures):
            before, self._failures = self._failures, []
            failed = self._failed(notify, settle=True)
            self._failures = before + (failed or [])
            if failed is None:
                return

    def _failed(self, notify: Notify, waits: bool = True, settle: bool = False) -> list[Failure] | None:
        """Notify hooks of calls until some fail with one; return these, or None if another thread is notifying."""
        me = threading.get_ident()
        if self._notifier == me:  # a signal handler, or a hook that asks for its calls while it is told of one
            return self._next_failures(notify, waits, settle)
        try:
            # An interrupt may have kept this thread from setting the notifier, or from releasing the lock.
            if not (self._lock._is_owned() or self._lock.acquire(timeout=1)):
                return None
            self._notifier = me
            return self._next_failures(notify, waits, settle)
        finally:
            if self._lock._is_owned():
                self._notifier = None
                self._lock.release()

    def _next_failures(self, notify: Notify, waits: bool, settle: bool) -> list[Failure]:
        failed, self._failures = self._failures, []
        if self._keeps and not failed and (chunk := self.ring.take_all(waits)) is not None:
            failed = notify(chunk, {}, self._hooks)
        take = self.ring.take
        while not failed and (row := take(waits)) is not None:
            failed = notify(PendingRecord(*row[0]), row[1], row[2])
        odd: list[tuple[PendingRecord, Any, tuple[Any, ...]]] = []
        while not failed and (found := self.ring.take_odd(settle)) is not None:
            note, seen, learned = found
            if learned is None:  # a product
                odd.append((PendingRecord(*note), seen, self._checks))
            else:
                odd.append((PendingRecord(*note), CallRanges(*seen), learned))
        return notify(odd, {}, ()) if odd else failed

    def learn(self, call: OpCall) -> tuple[tuple[Any, ...], bytes | None, tuple[Any, ...] | None] | None:
        """What hooks learn of calls like this one; None if kernels cannot note them.

        Returns:
            What those learn that are told of each, the number in records, and what those learn that are told later, or
            None if one of them has to see such calls.
        """
        learned = tuple((reference, hook.learn(call)) for reference, hook in self._hooks)
        number = None if self._writer is None else self._writer[0].learn(call)
        if any(known is None for _, known in learned) or (self._writer is not None and number is None):
            return None
        hooks: list[tuple[Handle, Any]] = [(handle, handle.hook) for handle in self.later]
        later = tuple((weakref.ref(handle), hook.learn(call)) for handle, hook in hooks)
        return learned, number, None if any(known is None for _, known in later) else later

    def number_of(self, place: CallSite) -> bytes:
        """The number by which a record names a call site."""
        return b"" if self._writer is None else self._writer[1].number_of(place)

    def forget_parent(self) -> None:
        """In a forked child, drop what other threads of the parent have noted since: none will release its locks."""
        self._lock = threading.RLock()
        self._notifier = None
        self.ring.forget_parent()


Failure = tuple[Handle, PendingRecord | None, Exception]
"""A hook that failed, the call of which it was notified, or None for several, and what it raised."""

Notify = Callable[[Any, dict[str, Found], tuple[Any, ...]], list[Failure]]
"""Notifies hooks of a call: takes what was noted and read of it, and pairs of a reference to a handle and of what its
hook has learned. Of a `Chunk` of calls, nothing has been read. A list has calls that are not finite, with both."""


def _is_in_kernel(hook: Any) -> bool:
    return "work" in vars(type(hook)) and vars(hook).keys().isdisjoint(("post", "error"))


def _together(works: Iterable[Work | None]) -> Work | None:
    """What to do for several hooks; None if one of them has to see each call, or two of them want different things."""
    found = Work(rows=False, later=True, infs_later=True, keeps=True)
    for work in works:
        if work is None or (None not in (found.target, work.target) and found.target != work.target):
            return None
        if None not in (found.writes, work.writes) or None not in (found.checker, work.checker):
            return None
        found = Work(
            found.rows or work.rows,
            tuple(role for role in ROLES if role in found.reads or role in work.reads),
            found.hashed or work.hashed,
            found.target or work.target,
            found.finite or work.finite,
            found.waits and work.waits,
            found.later and (work.later or not work.finite),
            found.infs_later and (work.infs_later or not work.finite),
            found.settings or work.settings,
            found.times or work.times,
            found.writes or work.writes,
            found.checker or work.checker,
            found.keeps and (work.keeps or not work.rows),
        )
    return found


_forgets: list[Callable[[], Any]] = []


def on_forget(function: Callable[[], Any]) -> None:
    """Call a function in each `forget`, from now on."""
    _forgets.append(function)


def forget() -> None:
    """Let kernels forget what calls look like and where they come from: rows of the table or names have changed."""
    for function in _forgets:
        function()
