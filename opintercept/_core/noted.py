"""`Rows`: the calls that compiled kernels have noted, of which the hooks of a pipeline have not been told yet.

Invariant: hooks are told of calls in the order in which they ended, and in Python of every call that is new to them:
what they learn of it holds for all calls that look alike. Must not import torch.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from opintercept._core.errors import OpInterceptError
from opintercept._core.place import Place
from opintercept._core.record import Note

if TYPE_CHECKING:
    from opintercept._core.call import OpCall
    from opintercept._core.hook import Handle
    from opintercept._core.pipeline import Pipeline

Found = tuple[tuple[int, int, int, int, int, int, float, float], float, float, int | None, None, None]
"""What a kernel reads of a tensor, as `_native.values.read` returns it."""

ROLES = ("lhs", "rhs", "bias", "value", "output", "output.1")


class Work(NamedTuple):
    """What a kernel does for a hook with each call, in place of calling it.

    Attributes:
        rows: Whether `noted` is to be called.
        reads: The roles of the tensors whose values are read, some of `ROLES`.
        hashed: Whether to hash them, too.
        target: Counts values that become zero or are too large in another dtype, see `_native.values.Read`.
        finite: Whether to call the hook's `post` if an output is not finite, and otherwise not.
        settings: Whether `learn` depends on torch's settings for the precision of products.
        flight: Where to write a line of each call. Then `learn` returns what a line says of calls that look alike.
        checker: Makes the `Checker` that checks each product. The hook's `post` is called if one is suspect.
    """

    rows: bool = True
    reads: tuple[str, ...] = ()
    hashed: bool = False
    target: tuple[float, float] | None = None
    finite: bool = False
    settings: bool = False
    flight: FlightRecorder | None = None
    checker: Checks | None = None


class InKernel(Protocol):
    """A hook that kernels can work for. It has the methods of other hooks as well, for the calls that they cannot note.

    It does not hold for subclasses, which may change what the methods do.
    """

    def work(self) -> Work | None:
        """What to do for this hook; None if it has to see each call."""

    def learn(self, call: OpCall) -> Any:
        """What holds for all calls that look like this one, for `noted`; None if the hook has to see such calls."""

    def noted(self, note: Note, values: Mapping[str, Found], learned: Any) -> None:
        """Take a call that has been noted.

        Args:
            note: What its record is made of.
            values: What was read, by role.
            learned: What `learn` returned.
        """


class Sink(Protocol):
    """The flight recorder in C++, see `_engines/compiled/flight.cpp`."""

    def open(self, buffer: Any, first: int, slots: int, size: int, lines: int, /) -> None: ...
    def put(self, line: bytes, /) -> None: ...
    def close(self) -> None: ...
    def forget_parent(self) -> None: ...


class FlightRecorder(Protocol):
    """Writes lines to a file. `runs.flight.Flight` implements it."""

    def serve(self, sink: Sink) -> Sink: ...
    def text_of(self, place: Place) -> bytes:
        """What a line says of a place."""


class Checker(Protocol):
    """The checker in C++, see `_engines/compiled/checker.cpp`."""

    def set_up(self, limit: float, exact: bool, every: int, signs_of: Any, form_of: Any, /) -> None: ...
    def taken(self) -> tuple[Any, Any, bool] | None: ...
    def forget(self, rhs: Any, wide: bool, /) -> None: ...
    def counts(self) -> tuple[int, int, list[tuple[Any, int]]]: ...
    def clear(self) -> None: ...


class Checks(Protocol):
    """Has products checked. `hooks.Checksum` implements it."""

    def use(self, make: Callable[[], Checker]) -> Checker:
        """Return the checker of this hook, made and set up if there is none."""


class Ring(Protocol):
    """The ring in C++, see `_engines/compiled/ring.cpp`."""

    def next_index(self) -> int: ...
    def calls(self) -> int: ...
    def set_step(self, step: int, /) -> None: ...
    def attach(self, rows: Any, /) -> None: ...
    def suspend(self) -> None: ...
    def plan(self, *what: Any) -> bool: ...
    def flight(self) -> Sink: ...
    def checker(self) -> Checker: ...
    def take(self) -> tuple[tuple[Any, ...], dict[str, Found], tuple[Any, ...]] | None: ...
    def empty(self) -> bool: ...
    def forget_parent(self) -> None: ...


class Rows:
    """The rows of one pipeline. Kernels call the methods from `here` on.

    Args:
        ring: Where kernels put them.
        pipeline: Owns the rows.
    """

    __slots__ = ("__weakref__", "_failures", "_flight", "_hooks", "_lock", "_pipeline", "_teller", "ring")

    def __init__(self, ring: Ring, pipeline: Pipeline) -> None:
        self.ring = ring
        self._pipeline = weakref.ref(pipeline)
        # Weak, since rows keep what was learned for a handle, and the collector of garbage does not see the ring's.
        self._hooks: tuple[tuple[weakref.ref[Handle], InKernel], ...] = ()
        self._flight: tuple[InKernel, FlightRecorder] | None = None
        self._lock: Any = threading.RLock()  # for `_is_owned`, which `Condition` uses too
        self._teller: int | None = None  # the thread that tells hooks of rows
        self._failures: list[_Failed] = []  # of hooks that were told where nobody could be told
        ring.attach(weakref.ref(self))
        _all.append(weakref.ref(self, _all.remove))

    def plan(self, handles: Sequence[Handle]) -> bool:
        """Let kernels do the work of these hooks, and return whether they can. Those before get their rows."""
        pipeline = self._pipeline()
        self.ring.suspend()
        self.settle()
        self._hooks, self._flight = (), None
        written: tuple[str, ...] = ()
        hooks: list[Any] = [handle.hook for handle in handles]
        works: list[Work | None] = [hook.work() if _is_in_kernel(hook) else None for hook in hooks]
        links = None if pipeline is None else pipeline.links
        together = _together(works)
        if not works or links is None or together is None:
            return False
        every = zip(handles, hooks, works, strict=True)
        self._hooks = tuple(
            (weakref.ref(handle), hook) for handle, hook, work in every if work is not None and work.rows
        )
        sink = checker = None
        for hook, work in zip(hooks, works, strict=True):
            if work is not None and work.flight is not None:
                self._flight, written = (hook, work.flight), work.reads
                sink = work.flight.serve(self.ring.flight())
            if work is not None and work.checker is not None:
                checker = work.checker.use(self.ring.checker)
        while not self.ring.plan(
            together.rows,
            together.finite,
            links.names_all or links.wanted,
            links.wanted,
            together.settings,
            together.reads,
            together.hashed,
            together.target,
            sink,
            written,
            checker,
        ):
            self.settle()  # another thread has added one
        return True

    def settle(self, only_if_free: bool = False) -> None:
        """Tell the hooks of the calls that have been noted, and wait for a thread that is doing so.

        It waits for a second at most: that thread may wait for a lock of a hook, which the caller may hold.

        Args:
            only_if_free: Whether to leave it to that thread.
        """
        me = threading.get_ident()
        while self._failures or not self.ring.empty() or self._teller not in (None, me):
            if (only_if_free and self._teller not in (None, me)) or (found := self._failed()) is None:
                return
            for handle, note, failure in found:
                try:
                    if not self._owner().survives(handle, "post", note.record(), failure):
                        raise failure
                finally:
                    del failure  # its traceback keeps this frame

    def settle_quietly(self) -> None:
        """The same where an exception would be lost. The next `settle` raises it."""
        pipeline = self._pipeline()
        goes_on = pipeline is not None and pipeline.on_error == "warn"
        while pipeline is not None and not self.ring.empty() and (goes_on or not self._failures):
            before, self._failures = self._failures, []
            found = self._failed()
            self._failures = before + (found or [])
            if found is None:
                return

    def _failed(self) -> list[_Failed] | None:
        """Tell hooks of calls until some fail with one; return these, or None if another thread is telling them."""
        me = threading.get_ident()
        if self._teller == me:  # a signal handler, or a hook that asks for its rows while it is told of one
            return self._next_failures()
        try:
            # An interrupt may have kept this thread from setting the teller, or from releasing the lock.
            if not (self._lock._is_owned() or self._lock.acquire(timeout=1)):
                return None
            self._teller = me
            return self._next_failures()
        finally:
            if self._lock._is_owned():
                self._teller = None
                self._lock.release()

    def _next_failures(self) -> list[_Failed]:
        failed, self._failures = self._failures, []
        return failed or self._tell_until_one_fails()

    def _tell_until_one_fails(self) -> list[_Failed]:
        pipeline = self._owner()
        failed: list[_Failed] = []
        take = self.ring.take
        while not failed and (row := take()) is not None:
            note = Note._make((*row[0], None))
            if note.summary.opaque:
                pipeline.count_opaque(note.summary.op)
            for reference, known in row[2]:
                handle = reference()
                if handle is None or handle.removed:
                    continue
                try:
                    handle.hook.noted(note, row[1], known)
                except Exception as exception:
                    failed.append((handle, note, exception))
                    if pipeline.on_error == "raise":
                        break
                    handle.removed = True  # now: others may be told of more calls before it is taken out
                    exception.__traceback__ = None  # keeps the program's frames, and this one, which keeps it
        return failed

    def learn(self, call: OpCall) -> tuple[Any, ...] | None:
        """What holds for all calls that look like this one; None if kernels cannot note them."""
        owner = call.owner
        learned = tuple((reference, hook.learn(call)) for reference, hook in self._hooks)
        text = None if self._flight is None else self._flight[0].learn(call)
        if owner is None or any(known is None for _, known in learned) or (self._flight is not None and text is None):
            return None
        return call.summary, owner.origin.autocast(call), learned, text

    def text_of(self, place: Place) -> bytes:
        """What a line of the flight recorder says of a place."""
        return b"" if self._flight is None else self._flight[1].text_of(place)

    def here(self, module: Any, root: Any, code: Any, instruction: int) -> Place | None:
        """The place of a call with this stack, if it is the same for all such calls."""
        return self._owner().origin.lasting(module, root, code, instruction)

    def note(self, row: Any, index: int, operands: tuple[int, ...], wanted: tuple[int, ...], place: Any) -> None:
        """Remember a forward call that autograd records, see `_origin.links.Links`."""
        links = self._owner().links
        if links is not None:
            links.add(row.name, index, operands, wanted, place)

    def behind(self, operands: tuple[int, ...], lhs: int) -> tuple[Place, int | None, str | None] | None:
        """The place of the running backward call, its forward call and of which operand it computes the gradient.

        None if only a look at the stack can tell.
        """
        return self._owner().origin.behind(operands, lhs)

    def late(self, *call: Any) -> tuple[Any, ...] | None:
        """See `Pipeline.late`."""
        return self._owner().late(*call)

    def forget_parent(self) -> None:
        """In a forked child, drop what other threads of the parent have noted since: none will release its locks."""
        self._lock = threading.RLock()
        self._teller = None
        self.ring.forget_parent()

    def _owner(self) -> Pipeline:
        pipeline = self._pipeline()
        if pipeline is None:
            raise OpInterceptError("a call must belong to an interceptor, but its interceptor is gone")
        return pipeline


_Failed = tuple["Handle", Note, Exception]  # a hook that failed, the call of which it was told, and why


def _is_in_kernel(hook: Any) -> bool:
    return "work" in vars(type(hook)) and vars(hook).keys().isdisjoint(("post", "error"))


def _together(works: Iterable[Work | None]) -> Work | None:
    """What to do for several hooks; None if one of them has to see each call, or two of them want different things."""
    found = Work(rows=False)
    for work in works:
        if work is None or (None not in (found.target, work.target) and found.target != work.target):
            return None
        if None not in (found.flight, work.flight) or None not in (found.checker, work.checker):
            return None
        found = Work(
            found.rows or work.rows,
            tuple(role for role in ROLES if role in found.reads or role in work.reads),
            found.hashed or work.hashed,
            found.target or work.target,
            found.finite or work.finite,
            found.settings or work.settings,
            found.flight or work.flight,
            found.checker or work.checker,
        )
    return found


_all: list[weakref.ref[Rows]] = []
_forgets: list[Callable[[], Any]] = []


def on_forget(function: Callable[[], Any]) -> None:
    """Call a function in each `forget`, from now on."""
    _forgets.append(function)


def forget() -> None:
    """Let kernels forget what calls look like and where they come from: rows of the table or names have changed."""
    for function in _forgets:
        function()


def settle() -> None:
    """Tell all hooks of this process of the calls that kernels have noted. Call it without a lock."""
    for reference in tuple(_all):
        rows = reference()
        if rows is not None:
            rows.settle()


def _settle_quietly() -> None:
    for reference in tuple(_all):
        rows = reference()
        if rows is not None:
            rows.settle_quietly()


os.register_at_fork(before=_settle_quietly)  # the child's copies of the hooks have what the parent's have
