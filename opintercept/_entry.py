"""With blocks that leave nothing behind, wherever an interrupt, or any other exception, stops them.

Invariant: whatever an entry has changed is undone once, by the exit, by the failed enter, or, where Python ran
neither to its end, when the with statement lets go of its exit. Pure Python: must not import torch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import MethodType, TracebackType
from typing import Any, Protocol

from opintercept._errors import OpInterceptError


class Entry(Protocol):
    """One way into a block, and what undoes it."""

    def begin(self) -> None:
        """Enter."""

    def check(self) -> None:
        """Raise an OpInterceptError where the block must not be left; it stays entered then."""

    def end(self, failed: BaseException | None) -> None:
        """Undo what `begin` has changed, as far as it came.

        It may be called again, also while it runs: what is undone already stays as it is. A step that raises
        does not keep the others from running.

        Args:
            failed: The exception that is on its way out of the block.
        """


class _Offer(threading.local):
    leaver: Leaver | None = None  # of the with statement whose enter comes next


_offer = _Offer()


class Exit:
    """The `__exit__` of a context manager whose `__enter__` calls `enter`.

    Python checks for signals at the first instruction of each function, so an `__exit__` in Python may be
    interrupted before any of its code has run. A with statement looks `__exit__` up before it enters, and holds what
    it found until it is over. So each look-up returns an object of its own, and the entry ends at the latest when that
    object goes.

    Args:
        innermost: Finds the entry that an exit of this manager ends which no with statement has looked up.
    """

    def __init__(self, innermost: Callable[[Any], Entry]) -> None:
        self._innermost = innermost

    def __get__(self, manager: Any, owner: type | None = None) -> Any:
        if manager is None:
            return self.by_hand  # contextlib.ExitStack calls `type(manager).__exit__(manager, ...)`
        leaver = Leaver(manager, self.by_hand)
        exit = MethodType(leave, leaver)
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
    """Ends the entry of one with statement."""

    __slots__ = ("alive", "by_hand", "entry", "manager")

    def __init__(self, manager: Any, by_hand: Callable[..., None]) -> None:
        self.manager = manager
        self.by_hand = by_hand
        self.entry: Entry | None = None
        self.alive: weakref.ref[Any] | None = None

    def dropped(self, _: object) -> None:
        """The with statement is over, and the exit has not run to its end."""
        if _offer.leaver is self:
            _offer.leaver = None
        if self.entry is not None:
            finish(self.entry, KeyboardInterrupt())
        self.over()

    def over(self) -> None:
        """The entry has ended: another call of the exit is one by hand. Breaks the cycle through the callback."""
        self.entry = self.alive = None


def enter(manager: Any, entry: Entry) -> None:
    """Begin an entry of `manager`, which the exit that was looked up last in this thread will end.

    Args:
        manager: The context manager.
        entry: Has changed nothing yet.
    """
    leaver = _offer.leaver
    _room(_DEPTH)
    try:
        if leaver is not None and leaver.manager is manager:
            leaver.entry = entry
            _offer.leaver = None
        entry.begin()
    except BaseException as exception:
        finish(entry, exception)
        raise


def finish(entry: Entry, failed: BaseException | None) -> None:
    """End an entry, also where an interrupt comes up meanwhile."""
    try:
        entry.end(failed)
    except BaseException:
        entry.end(failed)  # what is left of it
        raise


def leave(
    leaver: Leaver, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
) -> None:
    """End the entry of a with statement."""
    entry = leaver.entry
    if entry is None:
        leaver.by_hand(leaver.manager, kind, value, trace)
        return
    try:
        entry.check()
    except OpInterceptError:
        leaver.over()
        raise
    try:
        entry.end(value)
    except BaseException:
        entry.end(value)  # as in `finish`, a call of which is saved
        leaver.over()
        raise
    leaver.over()


_DEPTH = 16  # frames; more than any `begin` or `end` of ours goes down


def _room(depth: int) -> None:
    """Raise a RecursionError now, while nothing has changed, rather than halfway in or out."""
    if depth:
        _room(depth - 1)
