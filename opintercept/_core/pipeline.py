"""The hooks of one interceptor, and the loop that runs them around an operator.

Invariants: a call that succeeds meets no context manager, closure or formatting, and tuples of hooks are replaced,
never mutated, so that hooks may come and go while they run. Must not import torch.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from threading import get_native_id
from time import perf_counter, time_ns
from typing import Any

from opintercept._core.call import NoOrigin, OpCall, OriginReader, Spec
from opintercept._core.call_site import CallSite
from opintercept._core.errors import HookError, OpInterceptWarning
from opintercept._core.exits import never_began, raised_here
from opintercept._core.fork import in_child
from opintercept._core.hook import Handle, Hook, Level, OnError
from opintercept._core.in_kernel import OVERWRITTEN, CallRanges, Found, Overwritten
from opintercept._core.noted import Failure, NotedCalls, Ring
from opintercept._core.record import CallRecord, PendingRecord, Phase, signature_of
from opintercept._core.replace import check_alike, check_replacement, checked_inputs, written_back
from opintercept._core.tensors import copy_into

_ENTER, _EXIT, _FIRST = attrgetter("enter"), attrgetter("exit"), itemgetter(0)


def _read(count: itertools.count[int]) -> int:
    return int(repr(count)[len("count(") : -1])  # the only way


class Pipeline:
    """The ordered hooks of one interceptor, with its counters.

    Args:
        hooks: Hooks that `check_hook` has accepted.
        level: Decides how a replaced output reaches the program.
        on_error: `"raise"` lets the exception of a hook through; `"warn"` switches the hook off with one warning.
        origin: Tells where calls come from. Injected, since it needs torch.
        tap: `_engines.gradients.Tap`, which gets at the gradients of one call; None at dispatch level. Injected too.
        signature_of: `record.signature_of` or a function with the same results.
        ring: Where kernels note calls, if the engine has some that do.
        graphs: Whether what reads values may become part of a CUDA graph.

    Attributes:
        steps: The number of the step that runs, from 0; the interceptor's `step` advances it.
        queue: The calls that kernels have noted, if the engine has kernels that do.
        noted: The same; None while the hooks have to see each call.
        opaque: How many calls of each opaque operator have run, by name.
        unseen: The names there of what is no call: code that bypasses the dispatcher, in the order in which it ran.
        skip: Counts a call of an operator that is not looked at.
        sees_writes: Whether its block watches every operator, and so sees what writes to tensors.
        end_step: The handles of hooks with an `end_step`.
    """

    def __init__(
        self,
        hooks: Iterable[Hook],
        level: Level = "dispatch",
        on_error: OnError = "raise",
        origin: OriginReader | None = None,
        tap: Callable[[Pipeline, OpCall, Sequence[Handle]], Any] | None = None,
        signature_of: Callable[..., Any] = signature_of,
        ring: Ring | None = None,
        graphs: bool = False,
    ) -> None:
        self.queue = None if ring is None else NotedCalls(ring)
        self.noted: NotedCalls | None = None
        self._tap = tap
        self.signature_of = signature_of
        self.level = level
        self.graphs = graphs
        self._replays: dict[int | None, int] = {}  # the last one of each call that a graph has captured
        self.on_error = on_error
        self.origin: OriginReader = origin or NoOrigin()
        self.links = self.origin.links
        self.steps = 0
        self._count = itertools.count()
        # Atomic, also between threads.
        self.next_index: Callable[[], int] = self._count.__next__ if ring is None else ring.next_index
        self.opaque: Counter[str] = Counter()
        self.unseen: dict[str, None] = {}
        self._counting = threading.RLock()  # held for nothing else, so that it can be taken under any other
        self._skipped = itertools.count()
        self.skip: Callable[[], int] = self._skipped.__next__
        self.sees_writes = False
        self._lock = threading.RLock()
        self._entered_by: set[object] = set()
        self._inside: deque[Handle] = deque()  # handles of hooks that have entered and not exited
        self._handles: tuple[Handle, ...] = ()
        self.pre: tuple[Handle, ...] = ()
        self.post: tuple[Handle, ...] = ()
        self.error: tuple[Handle, ...] = ()
        self.backward: tuple[Handle, ...] = ()
        self.end_step: tuple[Handle, ...] = ()
        self.replayed: tuple[Handle, ...] = ()
        if ring is not None:
            ring.attach(weakref.ref(self))
            self._set(())
        for hook in hooks:
            self.register(hook)
        _remember(self)

    @property
    def calls(self) -> int:
        """How many calls there have been."""
        return _read(self._count) if self.queue is None else self.queue.ring.calls()

    @property
    def skipped(self) -> int:
        """How many convolutions have been skipped."""
        return _read(self._skipped)

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks in order."""
        return tuple(handle.hook for handle in self._handles)

    def next_step(self, number: int | None = None) -> None:
        """Count a step of the program, or set the number of the next one, and tell the hooks that a step has ended."""
        self.steps = self.steps + 1 if number is None else number
        if self.queue is not None:
            self.queue.ring.set_step(self.steps)
        for handle in self.end_step:
            if handle not in self._inside:
                continue
            try:
                handle.end_step()
            except Exception as exception:
                if not self._survives(handle, f"the end_step of hook {handle.hook!r}", exception):
                    raise

    def flush(self, only_if_free: bool = False, settle: bool = False) -> None:
        """Notify the hooks of the calls that kernels have noted.

        Args:
            only_if_free: Whether to leave it to another thread that is doing so.
            settle: Whether to wait for devices to say which values are not finite.
        """
        if self.queue is None:
            return
        for failed in self.queue.flush(self._notify, only_if_free, settle):
            self._outlives(failed)

    def _outlives(self, failed: Failure) -> None:
        handle, note, failure = failed
        try:
            if note is None:
                where = f"hook {handle.hook!r}, once devices had read the values of calls"
                survives = self._survives(handle, where, failure)
            else:
                survives = self.survives(handle, "post", note.record(), failure)
            if not survives:
                raise failure
        finally:
            del failure, failed  # its traceback keeps this frame

    def flush_quietly(self) -> None:
        """The same where an exception would be lost. The next `flush` raises it."""
        if self.queue is not None:
            self.queue.flush_quietly(self._notify, self.on_error == "warn")

    def _notify(self, note: Any, values: dict[str, Found], learned: tuple[Any, ...]) -> list[Failure]:
        failed: list[Failure] = []
        if isinstance(note, list):
            return self._notify_later(note)
        if not isinstance(note, PendingRecord):
            for summary, calls in note.opaque():
                self.count_opaque(summary.op, calls)
            for number, (reference, _) in enumerate(learned):
                if (handle := reference()) is not None and not handle.removed:
                    handle.hook.keep(note, number)
            return failed
        if note.summary.opaque:
            self.count_opaque(note.summary.op)
        for reference, known in learned:
            handle = reference()
            if handle is None or handle.removed:
                continue
            try:
                handle.hook.noted(note, values, known)
            except Exception as exception:
                failed.append((handle, note, exception))
                if self.on_error == "raise":
                    break
                handle.removed = True  # now: others may be notified of more calls before it is taken out
                exception.__traceback__ = None  # keeps the program's frames, and this one, which keeps it
        return failed

    def _notify_later(self, calls: list[Any]) -> list[Failure]:
        failed: list[Failure] = []
        names = tuple(self.unseen)
        by_hook: dict[Handle, list[Any]] = {}
        for note, seen, learned in calls:
            told = seen._replace(unseen=names[: seen.unseen]) if isinstance(seen, CallRanges) else seen
            for reference, known in learned:
                if (handle := reference()) is not None and not handle.removed:
                    by_hook.setdefault(handle, []).append((note, told, known))
        for handle, found in by_hook.items():
            hook: Any = handle.hook
            try:
                hook.arrived(found)
            except Exception as exception:
                failed.append((handle, None, exception))
        return failed

    def begin_backward(self, task: int) -> None:
        """Let hooks that are told later of values look at what a backward pass began with."""
        hooks: list[Any] = [] if self.queue is None else [handle.hook for handle in self.queue.later]
        for hook in hooks:
            hook.begin_backward(task)

    def register(self, hook: Hook) -> Handle:
        """Append a hook. If the interceptor is active, the hook's `enter` runs at once."""
        handle = Handle(self, hook)
        try:
            with self._lock:
                if self._entered_by:
                    self._enter_hooks((handle,))
                self._set((*self._handles, handle))
        except BaseException:
            self._take_out(handle)
            raise
        return handle

    def remove(self, handle: Handle) -> None:
        """Remove a hook by its handle. A second time does nothing."""
        failure = self._take_out(handle)
        if failure is not None:
            raise failure

    def _take_out(self, handle: Handle) -> BaseException | None:
        if not handle.removed:
            self.flush(settle=True)
        with self._lock:
            handle.removed = True
            self._set(tuple(h for h in self._handles if h is not handle))
            failure = None
            while handle in self._inside:
                place = self._inside.index(handle)
                self._inside.rotate(-place)
                failure = self._exit_next() or failure
                self._inside.rotate(place)
            return failure

    def _set(self, handles: tuple[Handle, ...]) -> None:
        self._handles = handles
        self.pre = tuple(h for h in handles if h.pre)
        self.post = tuple(h for h in handles if h.post)
        self.error = tuple(h for h in handles if h.error)
        self.end_step = tuple(h for h in handles if h.end_step)
        self.replayed = tuple(h for h in handles if h.replayed)
        self.backward = () if self._tap is None else tuple(h for h in handles if h.backward)
        if self.links is not None:
            self.links.wanted |= any(h.tracks for h in handles)
            self.links.names_all |= any(h.names_all for h in handles)
        if self.queue is not None:
            self.noted = self.queue if self.queue.plan(handles, self.links, self.flush) else None

    def enter(self, user: object) -> None:
        """Run the hooks' `enter` if this is the first block. `exit` undoes it, also if an `enter` has failed."""
        with self._lock:
            first = not self._entered_by
            self._entered_by.add(user)
            if first:
                self._enter_hooks(self._handles)

    def _enter_hooks(self, handles: Sequence[Handle]) -> None:
        # C code runs each `enter` and notes the handle, so that no interrupt can come between the two.
        entered = zip(handles, map(operator.call, map(_ENTER, handles)), strict=True)
        before = len(self._inside)
        try:
            self._inside.extend(map(_FIRST, entered))
        except BaseException as exception:
            for failing in handles[len(self._inside) - before :][:1]:
                exception.add_note(f"opintercept: raised by the enter of hook {failing.hook!r}")
            raise

    def exit(self, user: object, failed: BaseException | None) -> None:
        """Run the hooks' `exit` if this is the last block. All run, even if one raises. May be called again.

        Args:
            user: The same object as in `enter`.
            failed: The exception of the program that leaves the block, which no other may replace; or None.
        """
        failures: list[BaseException] = []
        try:
            if self._entered_by <= {user}:
                self.flush(settle=True)
        except Exception as exception:
            failures.append(exception)
        with self._lock:
            self._entered_by.discard(user)
            if self._entered_by:
                return
            while self._inside:
                failure = self._exit_next()
                if failure is not None:
                    failures.append(failure)
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure  # an interrupt or SystemExit
        if failed is not None:
            for failure in failures:
                _warn_beside(failed, f"a hook failed on exit: {failure!r}")
        elif self.on_error == "warn":
            for failure in failures:
                warnings.warn(f"a hook failed on exit: {failure!r}", OpInterceptWarning, stacklevel=3)
        elif failures:
            raise failures[0]

    def _exit_next(self) -> BaseException | None:
        """Run the `exit` of the hook that entered first, and return what it raised."""
        handle = None
        try:
            handle = self._inside[0]
            next(map(operator.call, map(_EXIT, iter(self._inside.popleft, None))))  # in C, as in `_enter_hooks`
        except BaseException as exception:
            if isinstance(exception, IndexError) and not self._inside and raised_here(exception):
                return None  # a signal handler has left the last block since, and run them all
            if handle is None or (self._inside and self._inside[0] is handle):
                raise  # an interrupt before the call
            if never_began(handle.exit, exception):
                self._inside.appendleft(handle)
            elif isinstance(exception, Exception):
                exception.add_note(f"opintercept: raised by the exit of hook {handle.hook!r}")
            return exception
        return None

    def tap(self, call: OpCall) -> Any:
        """Return a `Tap` for the gradients of this call, or None if no hook wants them."""
        handles = [h for h in self.backward if not h.removed and (h.wants is None or h.wants(call))]
        return self._tap(self, call, handles) if handles and self._tap is not None else None

    def begin_call(
        self,
        spec: Spec,
        func: Any,
        phase: Phase,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
        place: CallSite | None,
        overwritten: Overwritten,
        noted: bool,
    ) -> OpCall:
        """Show the hooks a call that runs in a kernel which could not note it, or not all that they want to know.

        A call that writes to its arguments is shown before it runs, others once they have run.

        Args:
            spec: As for `run`, as are func, phase, args and kwargs.
            index: The number of the call.
            place: Where it comes from, or None.
            overwritten: What has been read of the arguments that it writes to.
            noted: Whether it is noted, so that only hooks that look for what is not finite are told.

        Returns:
            The call, for `end_call`.
        """
        call = None
        begun = False
        try:
            self.flush()
            call = OpCall(self, spec, func, phase, args, kwargs, index)
            call.call_site = place
            if overwritten:
                call.once(OVERWRITTEN, partial(_same, overwritten))
            _before(self, call, self._told(self.pre, noted))
            if spec.opaque and not noted:
                self.count_opaque(spec.name)
            begun = True
            return call
        finally:
            if call is not None and not begun:
                call.owner = None
            del call, args, kwargs, overwritten  # as in `run`

    def end_call(
        self,
        call: OpCall,
        spec: Spec,
        output: Any,
        exception: BaseException | None,
        started: int,
        elapsed: float,
        timed: Any,
        noted: bool,
        judged: bool,
    ) -> tuple[Any, ...] | None:
        """Show the hooks the end of a call that `begin_call` has shown.

        Args:
            call: The call.
            spec: As for `run`.
            output: What the operator returned.
            exception: What it raised instead, or None.
            started: When the operator started, in nanoseconds since 1970: a while ago if other threads ran.
            elapsed: The operator's time.
            timed: As `OpCall.timed`.
            noted: As for `begin_call`.
            judged: Whether a device reads the call's tensors for these, so that they can be told later instead.

        Returns:
            What holds for all calls that look like this one: their summary, their autocast dtype, and what
            `NotedCalls.learn` returns; None if kernels cannot note them.
        """
        call.began = perf_counter() - (time_ns() - started) / 1e9
        try:
            if exception is not None:
                _report((self,), [call], exception)
                return None
            call.output, call.elapsed, call.timed = output, elapsed, timed
            if output is None:
                call.output = spec.result(call.func, call.args, call.kwargs)
            learned = None if self.queue is None or noted else self.queue.learn(call)
            shared = None if learned is None else (call.summary, self.origin.autocast(call), *learned)
            told = self._told(self.post, noted)
            if judged and learned is not None and learned[2] is not None and self.queue is not None:
                told = [handle for handle in told if handle not in self.queue.later]
            _after(self, call, spec, call.args, call.kwargs, told)
            return shared
        finally:
            call.owner = None
            del call, output, exception  # as in `run`

    def _told(self, handles: tuple[Handle, ...], noted: bool) -> Iterable[Handle]:
        """Which hooks see a call in Python."""
        return [h for h in handles if h in self.queue.finite] if noted and self.queue is not None else handles

    def deliver(self, row: tuple[tuple[Any, ...], dict[str, Found], tuple[Any, ...]]) -> None:
        """Notify the hooks of a call for which the ring had no room."""
        self.flush()
        for failed in self._notify(PendingRecord(*row[0]), row[1], row[2]):
            self._outlives(failed)

    def replay(self, calls: Sequence[CapturedCall], results: Any) -> None:
        """Count the calls that a CUDA graph has captured and now repeats, and tell the hooks that want to know.

        Args:
            calls: What was noted of each, and what hooks keep for its replays.
            results: What the readers in the graph have found this time; None if it has none.
        """
        self.flush()
        for captured, kept in calls:
            index = self._replays[captured.index] = self.next_index()
            if captured.summary.opaque:
                self.count_opaque(captured.summary.op)
            if not self.replayed:
                continue
            note = captured._replace(
                index=index,
                step=self.steps,
                forward=self._replays.get(captured.forward, captured.forward),
                started=time_ns(),
                thread=get_native_id(),
                elapsed=None,
                replayed=captured.index,
            )
            for handle in self.replayed:
                if handle.removed:
                    continue
                values = [] if results is None else [read(results) for hook, read in kept if hook() is handle.hook]
                try:
                    handle.replayed(note, values)
                except Exception as exception:
                    if not self.survives(handle, "replayed", note.record(), exception):
                        raise

    # Kernels in C++ call these, too.

    def number_of(self, place: CallSite) -> bytes:
        """The number by which a record names a call site."""
        return b"" if self.queue is None else self.queue.number_of(place)

    def lasting_call_site(self, module: Any, root: Any, code: Any, instruction: int) -> tuple[CallSite, Any] | None:
        """The place of a call with this stack, and what else decides it; None if it is a new one."""
        return self.origin.lasting(module, root, code, instruction)

    def link(self, row: Any, *seen: Any) -> None:
        """Remember a forward call that autograd records, see `_origin.links.Links.add`."""
        if self.links is not None:
            self.links.add(row.name, *seen)

    def link_in_function(self, row: Any, *seen: Any) -> None:
        """The same of a call that a custom Function makes in its forward."""
        if self.links is not None:
            self.links.add(row.name, *seen, in_function=True)

    def forward_of(self, operands: tuple[int, ...], lhs: int) -> tuple[CallSite, int | None, str | None] | None:
        """The place of the running backward call, its forward call and of which operand it computes the gradient."""
        return self.origin.forward_of(operands, lhs)

    def count_opaque(self, name: str, calls: int = 1) -> None:
        """Count calls of an opaque operator."""
        with self._counting:
            self.opaque[name] += calls

    def count_unseen(self, name: str) -> None:
        """Count code that has run in a block and that nobody sees, in `opaque` too."""
        self.count_opaque(name)
        self.unseen[name] = None
        if self.queue is not None:
            self.queue.ring.set_unseen(len(self.unseen))

    def survives(self, handle: Handle, phase: str, call: OpCall | CallRecord, exception: Exception) -> bool:
        """Handle an exception of a hook: add a note that says where, or switch the hook off and return True."""
        try:
            shown = str(call)
        except Exception:  # an unusual tensor must not hide what the hook raised
            shown = call.op
        where = f"{phase} hook {handle.hook!r} on call {call.index} ({call.phase}): {shown}"
        return self._survives(handle, where, exception)

    def _survives(self, handle: Handle, where: str, exception: Exception) -> bool:
        if self.on_error == "raise":
            exception.add_note(f"opintercept: raised by {where}")
            if isinstance(exception, TypeError):
                # Python takes a TypeError in `a @ b` to mean that `a` cannot multiply `b`, and discards its message.
                raise HookError(f"a hook raised TypeError: {exception}; in {where}") from exception
            return False
        handle.removed = True  # now: it is not to be told of calls that kernels have noted, either
        failure = self._take_out(handle)
        if failure is not None:
            where += f"; its exit raised {failure!r}"
        warnings.warn(
            f"switched off a hook that raised {type(exception).__name__}: {exception}; {where}",
            OpInterceptWarning,
            stacklevel=3,
        )
        return True


CapturedCall = tuple[PendingRecord, list[tuple[weakref.ref[Any], Callable[[Any], Any]]]]
"""A call that a CUDA graph has captured, and the hooks that read it, each with what makes values of its results."""

_KEPT = "kept for replays"


def keep(call: OpCall, hook: Any, read: Callable[[Any], Any]) -> None:
    """Keep of a call that a CUDA graph captures what makes values of the results of each replay, for `replayed`."""
    kept_of(call).append((weakref.ref(hook), read))


def kept_of(call: OpCall) -> list[tuple[weakref.ref[Any], Callable[[Any], Any]]]:
    """What hooks keep of a call."""
    return call.once(_KEPT, lambda _: [])


def run(
    pipelines: tuple[Pipeline, ...],
    spec: Spec,
    func: Any,
    phase: Phase,
    invoke: Callable[..., Any],
    head: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `invoke(head, *args, **kwargs)` with the hooks of all `pipelines` around it.

    Each pipeline gets an `OpCall` of its own, since each numbers its calls. What the hooks of one pipeline replace,
    those of the next one see.

    Args:
        pipelines: At least one, in the order in which they run.
        spec: The operator's row of the table.
        func: What torch called, for `OpCall.func`.
        phase: The pass of the call.
        invoke: Runs the operator.
        head: The first argument of `invoke`, before those of the operator.
        args: The operator's positional arguments.
        kwargs: The operator's keyword arguments.
    """
    if len(pipelines) > 1:
        try:
            return _run_several(pipelines, spec, func, phase, invoke, head, args, kwargs)
        finally:
            del args, kwargs  # as below
    # The same as _run_several for one pipeline, without its lists, which cost half a microsecond.
    (pipeline,) = pipelines
    given_args, given_kwargs = args, kwargs
    if pipeline.noted is not None:
        pipeline.flush()  # hooks see the calls in order
    call = OpCall(pipeline, spec, func, phase, args, kwargs)
    try:
        links = pipeline.links
        if links is not None and links.wanted:
            links.note(call)
        if pipeline.pre:
            args, kwargs = _before(pipeline, call, pipeline.pre)
        if spec.opaque:
            pipeline.count_opaque(spec.name)
        tap = pipeline.tap(call) if pipeline.backward else None
        if tap is not None:
            args, kwargs = tap.inputs(args, kwargs)
        call.began = started = perf_counter()
        try:
            output = invoke(head, *args, **kwargs) if kwargs else invoke(head, *args)
        except BaseException as exception:
            _report(pipelines, [call], exception)
            raise
        call.elapsed = perf_counter() - started
        if args is not given_args or kwargs is not given_kwargs:
            output = _in_place_of(spec, func, given_args, given_kwargs, args, kwargs, output)
        if output is None:
            call.output = spec.result(func, given_args, given_kwargs)
            if pipeline.post:
                _after(pipeline, call, spec, given_args, given_kwargs, pipeline.post)
            return None
        call.output = output
        if pipeline.post:
            output = _after(pipeline, call, spec, given_args, given_kwargs, pipeline.post)
        return output if tap is None else tap.output(output)
    finally:
        call.owner = None
        # An exception's traceback keeps this frame, and the program may keep the exception.
        del call, args, kwargs, given_args, given_kwargs


def _run_several(
    pipelines: tuple[Pipeline, ...],
    spec: Spec,
    func: Any,
    phase: Phase,
    invoke: Callable[..., Any],
    head: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    given_args, given_kwargs = args, kwargs
    calls: list[OpCall] = []
    try:
        for pipeline in pipelines:
            if pipeline.noted is not None:
                pipeline.flush()
            call = OpCall(pipeline, spec, func, phase, given_args, given_kwargs)
            calls.append(call)
            if pipeline.links is not None and pipeline.links.wanted:
                pipeline.links.note(call)
            _hand_over(pipeline, call, args, kwargs)
            args, kwargs = _before(pipeline, call, pipeline.pre)
            if spec.opaque:
                pipeline.count_opaque(spec.name)
        for pipeline, call in zip(pipelines, calls, strict=True):
            _hand_over(pipeline, call, args, kwargs)
        taps = [p.tap(c) if p.backward else None for p, c in zip(pipelines, calls, strict=True)]
        for tap in filter(None, taps):
            args, kwargs = tap.inputs(args, kwargs)
        started = perf_counter()
        for call in calls:
            call.began = started
        try:
            output = invoke(head, *args, **kwargs)
        except BaseException as exception:
            _report(pipelines, calls, exception)
            raise
        elapsed = perf_counter() - started
        if args is not given_args or kwargs is not given_kwargs:
            output = _in_place_of(spec, func, given_args, given_kwargs, args, kwargs, output)
        result = spec.result(func, given_args, given_kwargs) if output is None else output
        for pipeline, call in zip(pipelines, calls, strict=True):
            call.output = result
            call.elapsed = elapsed
            result = _after(pipeline, call, spec, given_args, given_kwargs, pipeline.post)
        if output is None:
            return None
        for tap in filter(None, reversed(taps)):
            result = tap.output(result)
        return result
    finally:
        for call in calls:
            call.owner = None
        calls.clear()
        call = None  # type: ignore[assignment]
        del args, kwargs, given_args, given_kwargs  # as in `run`


def _in_place_of(
    spec: Spec,
    func: Any,
    given_args: tuple[Any, ...],
    given_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """Copy what the operator wrote into the tensors that the program gave it, and return the output for the program."""
    if output is not None:
        return written_back(spec.returned(func, given_args, given_kwargs), output)
    written_back(spec.written(func, given_args, given_kwargs), spec.result(func, args, kwargs))
    return None


def _same(value: Overwritten, _: OpCall) -> Overwritten:
    return value


def _before(pipeline: Pipeline, call: OpCall, handles: Iterable[Handle]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run pre hooks and return the inputs for the operator."""
    for handle in handles:
        if handle.removed:
            continue
        try:
            inputs = handle.pre(call)
            if inputs is not None:
                args, kwargs = checked_inputs(inputs)
                if pipeline.level == "dispatch":
                    check_alike(call, args, kwargs)
                _hand_over(pipeline, call, args, kwargs)
        except Exception as exception:
            if not pipeline.survives(handle, "pre", call, exception):
                raise
    return call.args, call.kwargs


def _hand_over(pipeline: Pipeline, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the call the inputs with which a hook has replaced its own."""
    if args is call.args and kwargs is call.kwargs:
        return
    if call.phase == "backward" and pipeline.links is not None and pipeline.links.wanted:
        _ = call.forward  # now: it is found by the addresses of the original operands
    call.args, call.kwargs = args, kwargs


def _after(
    pipeline: Pipeline,
    call: OpCall,
    spec: Spec,
    given_args: tuple[Any, ...],
    given_kwargs: dict[str, Any],
    handles: Iterable[Handle],
) -> Any:
    """Run post hooks and return the output for the program."""
    for handle in handles:
        if handle.removed:
            continue
        try:
            replacement = handle.post(call)
            if replacement is not None and replacement is not call.output:
                check_replacement(call.output, replacement)
                if getattr(call.func, "is_view", False):
                    raise HookError(f"the output of {call.op} is a view of an input and cannot be replaced")
                if pipeline.level == "dispatch" or spec.written(call.func, given_args, given_kwargs):
                    # Below autograd, and with out= and in-place forms, the caller already has the output tensor.
                    # The new values are copied into it, so that its strides and aliases stay.
                    copy_into(call.output, replacement)
                else:
                    call.output = replacement
        except Exception as exception:
            if not pipeline.survives(handle, "post", call, exception):
                raise
    return call.output


def _report(pipelines: tuple[Pipeline, ...], calls: list[OpCall], exception: BaseException) -> None:
    # The program must get its own exception, so an error hook that fails only causes a warning.
    for pipeline, call in zip(pipelines, calls, strict=True):
        for handle in pipeline.error:
            if handle.removed:
                continue
            try:
                handle.error(call, exception)
            except Exception as failure:
                pipeline._take_out(handle)
                text = f"switched off an error hook that raised {failure!r}; hook {handle.hook!r} on call {call.index}"
                _warn_beside(exception, text)


def _warn_beside(exception: BaseException | None, text: str) -> None:
    """Warn without replacing the program's exception, even if warnings are errors."""
    try:
        warnings.warn(text, OpInterceptWarning, stacklevel=4)
    except OpInterceptWarning:
        if exception is not None:
            exception.add_note(f"opintercept: {text}")


# For forked children. A WeakSet would run Python code when a pipeline is freed, where an interrupt would be lost.
_pipelines: list[weakref.ref[Pipeline]] = []
_look_through_at = 64


def _remember(pipeline: Pipeline) -> None:
    global _look_through_at
    if len(_pipelines) >= _look_through_at:
        _pipelines[:] = [reference for reference in _pipelines if reference() is not None]
        _look_through_at = 2 * len(_pipelines) + 64
    _pipelines.append(weakref.ref(pipeline))


@in_child
def _forget_parent() -> None:
    # In a forked child no block of the parent is active, and no thread will release the parent's locks.
    for pipeline in _living():
        pipeline._lock = threading.RLock()
        pipeline._counting = threading.RLock()
        pipeline._entered_by.clear()
        pipeline._inside.clear()
        if pipeline.queue is not None:
            pipeline.queue.forget_parent()


def flush() -> None:
    """Notify all hooks of this process of the calls that compiled kernels have noted.

    A hook that is an `InKernel` calls it where a program reads its results inside a block. Call it without a lock.
    """
    for pipeline in _living():
        pipeline.flush()


def settle(hook: Hook) -> None:
    """Tell a hook what it is told later, see `Work.later`. Waits for devices."""
    for pipeline in _living():
        if any(each is hook for each in pipeline.hooks):
            pipeline.flush(settle=True)


def _flush_quietly() -> None:
    for pipeline in _living():
        pipeline.flush_quietly()


def _living() -> Iterator[Pipeline]:
    for reference in tuple(_pipelines):
        pipeline = reference()
        if pipeline is not None:
            yield pipeline


os.register_at_fork(before=_flush_quietly)  # the child's copies of the hooks have what the parent's have
