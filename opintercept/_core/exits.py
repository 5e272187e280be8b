"""With blocks that leave nothing behind, wherever an interrupt or another exception stops them.

Invariant: what an entry has changed is undone once: by the exit, by the enter that failed, if Python completed neither
when the with statement releases its exit, or when the program ends. Must not import torch.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import opcode
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from opintercept._core.errors import OpInterceptError
from opintercept._core.fork import in_child


class Entry(Protocol):
    """One entry of a block: what it changes, and how that is undone."""

    def begin(self) -> None:
        """Enter."""

    def check(self) -> None:
        """Raise an OpInterceptError if the block must not be left now. It then stays entered."""

    def end(self, failed: BaseException | None) -> None:
        """Undo what `begin` has changed so far.

        It may be called again, even while it runs, and then undoes what is left. If one step raises, the others still
        run.

        Args:
            failed: The exception that leaves the block, or None.
        """


class _Offer(threading.local):
    leaver: Leaver | None = None  # of the with statement that enters next


_offer = _Offer()
_ended = False  # whether `leave_all` has run
_open: dict[int, Entry] = {}  # entries that have begun and not ended, in this order, by identity


class Exit:
    """The `__exit__` of a context manager whose `__enter__` calls `enter`.

    Python checks for signals at the first instruction of each function, so an interrupt can stop an `__exit__` in
    Python before any of its code has run. But a with statement looks `__exit__` up before it enters, and holds the
    result until the block is over. So each look-up returns an object of its own, and the entry ends when that object
    is freed, if it has not ended before.

    Args:
        innermost: Returns the manager's innermost entry, for an exit that no with statement has looked up.
    """

    def __init__(self, innermost: Callable[[Any], Entry]) -> None:
        self._innermost = innermost

    def __get__(self, manager: Any, owner: type | None = None) -> Any:
        if manager is None:
            return self.by_hand  # contextlib.ExitStack calls `type(manager).__exit__(manager, ...)`
        leaver = Leaver(manager, self.by_hand)
        exit = functools.partial(leave, leaver)  # of a method Python 3.14 would take the parts and free it first
        leaver.alive = weakref.ref(exit, leaver.dropped)
        _offer.leaver = leaver
        return exit

    def by_hand(
        self, manager: Any, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the innermost entry."""
        if _offer.leaver is not None and _offer.leaver.manager is manager:
            _offer.leaver = None
        entry = self._innermost(manager)
        entry.check()
        finish(entry, value)


class Leaver:
    """Ends the entry of one with statement.

    Attributes:
        manager: The context manager.
        by_hand: Ends the manager's innermost entry instead, once this one is over.
        entry: The entry, once the with statement has entered.
        alive: A reference to the exit that the with statement holds.
    """

    __slots__ = ("alive", "by_hand", "entry", "manager")

    def __init__(self, manager: Any, by_hand: Callable[..., None]) -> None:
        self.manager = manager
        self.by_hand = by_hand
        self.entry: Entry | None = None
        self.alive: weakref.ref[Any] | None = None

    def dropped(self, _: object) -> None:
        """End the entry now: the with statement has released an exit that did not complete."""
        if _offer.leaver is self:
            _offer.leaver = None
        if self.entry is not None:
            finish(self.entry, KeyboardInterrupt())
        self.entry = self.alive = None  # as `over`, which a full stack may have no room to call

    def over(self) -> None:
        """Note that the entry has ended. Also breaks the reference cycle through the callback."""
        self.entry = self.alive = None


def enter(manager: Any, entry: Entry) -> None:
    """Begin an entry of `manager`. The exit that this thread looked up last will end it.

    Args:
        manager: The context manager.
        entry: An entry that has changed nothing yet.
    """
    leaver = _offer.leaver
    _room(_DEPTH)
    try:
        if leaver is not None and leaver.manager is manager:
            leaver.entry = entry
            _offer.leaver = None
        _open[id(entry)] = entry
        entry.begin()
    except BaseException as exception:
        finish(entry, exception)
        raise


def finish(entry: Entry, failed: BaseException | None) -> None:
    """End an entry completely, even if an interrupt comes while it ends."""
    try:
        entry.end(failed)
    except BaseException:
        entry.end(failed)  # undoes what is left
        raise
    finally:
        _open.pop(id(entry), None)


def leave(
    leaver: Leaver, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
) -> None:
    """End the entry of a with statement."""
    entry = leaver.entry
    if entry is None:
        leaver.by_hand(leaver.manager, kind, value, trace)
        return
    if _ended and id(entry) not in _open:  # the end of the program has ended it
        leaver.over()
        return
    try:
        entry.check()
    except OpInterceptError:
        leaver.over()
        raise
    try:
        entry.end(value)
    except BaseException:
        entry.end(value)  # as in `finish`, without the cost of calling it
        _open.pop(id(entry), None)
        leaver.over()
        raise
    _open.pop(id(entry), None)
    leaver.over()


@atexit.register
def leave_all() -> None:
    """End the entries that nobody has ended, when the program ends.

    Python closes generators and coroutines that are suspended in a block only while it frees modules. It is too late
    then: threads no longer start, and even `open` is gone.
    """
    global _ended
    _ended = True
    # At a prompt, it is an error that was told long ago.
    failed: BaseException | None = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    failures: list[Exception] = []
    try:
        if failed is not None:
            raise failed  # so that hooks see it as the current exception
    except BaseException:
        _end_all(failed, failures)
    else:
        _end_all(None, failures)
    if failures:
        raise failures[0]  # Python prints it


def _end_all(failed: BaseException | None, failures: list[Exception]) -> None:
    for entry in reversed([*_open.values()]):
        try:
            # Another thread may have entered a block, and have a torch mode that this one cannot reach.
            with contextlib.suppress(OpInterceptError):
                finish(entry, failed)
        except Exception as failure:
            failures.append(failure)


in_child(_open.clear)  # those of the parent


_DEPTH = 16  # frames; no `begin` or `end` of the package needs more


def _room(depth: int) -> None:
    """Raise a RecursionError now, before anything has changed, rather than halfway through."""
    if depth:
        _room(depth - 1)


def raised_here(exception: BaseException) -> bool:
    """Whether the function that has caught an exception raised it itself."""
    return exception.__traceback__ is not None and exception.__traceback__.tb_next is None


def uninterrupted(work: Callable[[], None]) -> None:
    """Run a function whole or not at all, and raise what it raises, or the interrupt that came meanwhile.

    An interrupt, or an exception from another thread, reaches the thread that waits here. The function runs in another
    one, which none reaches, and whoever takes the ticket first decides whether it runs. It must not import what the
    thread that waits may be importing: `opintercept run` enters its block inside the import of torch.
    """
    if sys.is_finalizing():  # up to Python 3.11 a thread may be started now, and never runs
        work()
        return
    ticket, ended, failures = [work], list[bool](), list[BaseException]()
    lock = _thread.allocate_lock()

    def run() -> None:
        try:
            ticket.pop()()
        except BaseException as exception:
            failures.append(exception)
        finally:
            _forget_this_thread()
            ended.append(True)
            lock.release()

    try:
        lock.acquire()
        try:
            _thread.start_new_thread(run, ())  # not `Thread.start`, in which an interrupt breaks a lock
        except RuntimeError:  # there can be no more threads, as when the interpreter shuts down
            run()
        lock.acquire()
    except BaseException:
        try:
            ticket.pop()
        except IndexError:
            while not ended:
                time.sleep(0.001)
        raise
    try:
        for failure in failures:
            raise failure
    finally:
        failures.clear()  # the failure holds this frame


def _forget_this_thread() -> None:
    """Take back the object that `threading.current_thread` made for a thread of `uninterrupted`.

    Up to Python 3.12 it would stay in `threading.enumerate` for good, and no program can join it.
    """
    known, me = getattr(threading, "_active", {}), _thread.get_ident()
    if isinstance(known.get(me), threading._DummyThread):
        known.pop(me)


def never_began(function: Any, exception: BaseException) -> bool:
    """Whether an interrupt stopped a Python function at its first instruction, before it did anything."""
    code = getattr(function, "__code__", None)
    trace = exception.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    # The frame of a signal handler may follow it.
    return trace is not None and trace.tb_lasti <= 2 * trace.tb_frame.f_code.co_code[::2].index(_RESUME)


_RESUME = opcode.opmap["RESUME"]
