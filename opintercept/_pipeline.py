"""Hooks, their order, and the loop that runs them around an operator.

Invariant: no context manager, closure or formatting on the way of a call that goes well,
and the tuples of hooks are replaced, never mutated, so that hooks may come and go while they run.
Pure Python: must not import torch.
"""

from __future__ import annotations

import itertools
import opcode
import operator
import os
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from time import perf_counter
from types import CodeType, TracebackType
from typing import Any, Literal, Protocol, TypeAlias

from opintercept._call import NOWHERE, OpCall, OpSpec, Origin, Phase, Place, describe, is_tensor, look, shape_of
from opintercept._errors import HookError, OpInterceptWarning

OnError = Literal["raise", "warn"]
Level = Literal["function", "dispatch"]


class PreHook(Protocol):
    """Runs before the operator; may return `(args, kwargs)` to run it with instead."""

    def pre(self, call: OpCall, /) -> tuple[Sequence[Any], Mapping[str, Any]] | None: ...


class PostHook(Protocol):
    """Runs after the operator; may return an output to take the place of `call.output`."""

    def post(self, call: OpCall, /) -> Any: ...


class ErrorHook(Protocol):
    """Runs when the operator raised; the exception goes on to the program in any case."""

    def error(self, call: OpCall, exception: BaseException, /) -> None: ...


class BackwardHook(Protocol):
    """Runs when autograd has the gradients of a call at function level; may return others for its inputs.

    `call` has shapes and no values by then. `grad_inputs` has an entry for each tensor among the call's
    arguments, None for one that needs no gradient, `grad_outputs` one for each output. A tensor that is passed
    twice has its whole gradient where it comes first, and None where it comes again.
    """

    def backward(
        self, call: OpCall, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...], /
    ) -> tuple[Any, ...] | None: ...


Hook: TypeAlias = PreHook | PostHook | ErrorHook | BackwardHook | Callable[[OpCall], Any]
"""An object with any of `pre`, `post`, `error`, `backward`, `enter` and `exit`, or a callable, which is a `post`."""

_RUNS = ("pre", "post", "error", "backward")
_PHASES = (*_RUNS, "enter", "exit")


class Handle:
    """One registration of a hook. `remove()` ends it, as with `torch.utils.hooks.RemovableHandle`.

    Removing twice is fine, and as a context manager the handle removes on the way out. A hook that was
    registered twice has two handles, and each removes its own.
    """

    __slots__ = (
        *("_pipeline", "asks_origin", "backward", "enter", "error", "exit", "hook", "post", "pre", "removed", "wants"),
    )

    def __init__(self, pipeline: Pipeline, hook: Hook) -> None:
        self._pipeline = weakref.ref(pipeline)  # no cycle: hooks, and what they hold, go with the last block
        self.hook = hook
        self.removed = False
        found = {name: _method(hook, name) for name in _PHASES}
        if not any(found[name] for name in _RUNS) and callable(hook):
            found["post"] = hook
        self.pre, self.post, self.error, self.backward, self.enter, self.exit = (found[name] for name in _PHASES)
        self.enter, self.exit = self.enter or bool, self.exit or bool  # which does nothing, and is no Python
        # Whether a call is to have gradients, which takes two nodes in its graph: a filter knows.
        self.wants: Callable[[OpCall], bool] | None = getattr(hook, "wants_gradients", None)
        self.asks_origin = asks_origin(hook)

    def remove(self) -> None:
        """Take the hook out; it is not called again, not even later in the call that is running."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _method(hook: Hook, name: str) -> Any:
    method = getattr(hook, name, None)
    return method if callable(method) else None


def asks_origin(hook: Any) -> bool:
    """Whether a hook's code mentions what comes from the Python stack, or its `asks_origin` says so.

    The backward pass has no such stack, so the forward calls must note it in advance, which costs, and is done
    only if somebody asks. A hook that asks in ways that its code does not show is heard from its first question on.
    """
    if getattr(hook, "asks_origin", False):
        return True
    methods = [hook, *(_method(hook, name) for name in _RUNS)]
    codes = [getattr(getattr(method, "__func__", method), "__code__", None) for method in methods]
    while codes:
        code = codes.pop()
        if code is not None:
            if _FROM_THE_STACK.intersection(code.co_names):
                return True
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False


_FROM_THE_STACK = frozenset(
    ("aliases", "forward", "grad_of", "grad_output", "gradient", "module", "note", "record", "source")
)


def is_hook(value: Any) -> bool:
    """Whether `value` can be registered as it is."""
    return callable(value) or any(_method(value, name) for name in _PHASES)


def check_hook(hook: Any, level: Level) -> None:
    """Refuse what is no hook, or none at this level.

    Raises:
        TypeError: It has nothing to call, or is a class instead of an instance.
        ValueError: It wants what this level does not have: gradients, or another `only_level` than this.
    """
    if isinstance(hook, type):
        raise TypeError(f"a hook must be an instance, got the class {hook.__name__}; pass {hook.__name__}(...)")
    if level == "dispatch" and _method(hook, "backward") and not getattr(hook, "reads_backward_calls", False):
        raise ValueError(
            f"a hook with a backward method cannot run at {level} level, got {hook!r}; autograd's own calls "
            "are seen at dispatch level by pre and post, with call.phase == 'backward'; or use level='function'"
        )
    only = getattr(hook, "only_level", None)
    if only is not None and only != level:
        raise ValueError(f'the hook can work at level="{only}" only, got {hook!r} for level="{level}"')
    if not is_hook(hook):
        raise TypeError(
            f"a hook must be callable or have one of {', '.join(_PHASES)}, got {hook!r}; write def hook(call): ..."
        )


_ENTER, _EXIT, _FIRST = attrgetter("enter"), attrgetter("exit"), itemgetter(0)


def _raised_here(exception: BaseException) -> bool:
    return exception.__traceback__ is not None and exception.__traceback__.tb_next is None


def _never_began(function: Any, exception: BaseException) -> bool:
    """Whether an interrupt came up at the first instruction of a function in Python, before it did anything."""
    code = getattr(function, "__code__", None)
    trace = exception.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    # Below it may be the frame of a signal's handler.
    return trace is not None and trace.tb_lasti <= 2 * trace.tb_frame.f_code.co_code[::2].index(_RESUME)


_RESUME = opcode.opmap["RESUME"]


class NoOrigin:
    """Knows nothing of any call."""

    links = None

    def autocast(self, lhs: Any) -> None:
        return None

    def place(self, call: OpCall) -> Place:
        return NOWHERE

    def forward(self, call: OpCall) -> tuple[None, None, bool]:
        return None, None, False


class Pipeline:
    """The ordered hooks of one interceptor, with its counters.

    Args:
        hooks: Checked already, see `check_hook`.
        level: Decides how a replaced output reaches the program.
        on_error: `"raise"`, or `"warn"`: switch a failing hook off with one warning.
        origin: Answers where calls come from; injected, since it needs torch.
        tap: Makes what gets at the gradients of one call, see `_engines.gradients.Tap`; likewise. None at
            dispatch level.
        look: `_call.look`, or what does the same.
    """

    __slots__ = (
        "__weakref__",
        "_count",
        "_entered_by",
        "_handles",
        "_inside",
        "_lock",
        "_tap",
        "backward",
        "error",
        "level",
        "links",
        "look",
        "next_index",
        "on_error",
        "opaque",
        "origin",
        "post",
        "pre",
        "steps",
    )

    def __init__(
        self,
        hooks: Iterable[Hook],
        level: Level = "dispatch",
        on_error: OnError = "raise",
        origin: Origin | None = None,
        tap: Callable[[Pipeline, OpCall, Sequence[Handle]], Any] | None = None,
        look: Callable[..., Any] = look,
    ) -> None:
        self._tap = tap
        self.look = look
        self.level = level
        self.on_error = on_error
        self.origin: Origin = origin or NoOrigin()
        self.links = self.origin.links
        self.steps = 0
        self._count = itertools.count()
        self.next_index: Callable[[], int] = self._count.__next__  # atomic, also between threads
        self.opaque: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._entered_by: set[object] = set()
        self._inside: deque[Handle] = deque()  # whose hooks have entered and not exited
        self._handles: tuple[Handle, ...] = ()
        self.pre: tuple[Handle, ...] = ()
        self.post: tuple[Handle, ...] = ()
        self.error: tuple[Handle, ...] = ()
        self.backward: tuple[Handle, ...] = ()
        for hook in hooks:
            self.register(hook)
        _remember(self)

    @property
    def calls(self) -> int:
        """How many calls there have been."""
        return int(repr(self._count)[len("count(") : -1])  # a count tells in no other way

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hooks, in their order."""
        return tuple(handle.hook for handle in self._handles)

    def register(self, hook: Hook) -> Handle:
        """Append a hook; while the interceptor is active its `enter` runs at once."""
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
        """Remove by identity; does nothing the second time."""
        failure = self._take_out(handle)
        if failure is not None:
            raise failure

    def _take_out(self, handle: Handle) -> BaseException | None:
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
        self.backward = () if self._tap is None else tuple(h for h in handles if h.backward)
        if self.links is not None and any(h.asks_origin for h in handles):
            self.links.wanted = True

    def enter(self, user: object) -> None:
        """Run the hooks' `enter` if this is the first block in; `exit` undoes it, also if one of them fails."""
        with self._lock:
            first = not self._entered_by
            self._entered_by.add(user)
            if first:
                self._enter_hooks(self._handles)

    def _enter_hooks(self, handles: Sequence[Handle]) -> None:
        # Each hook that has entered is put down in the same call of C, with no instruction of Python in between
        # at which an interrupt could come up.
        entered = zip(handles, map(operator.call, map(_ENTER, handles)), strict=True)
        before = len(self._inside)
        try:
            self._inside.extend(map(_FIRST, entered))
        except BaseException as exception:
            for failing in handles[len(self._inside) - before :][:1]:
                exception.add_note(f"opintercept: raised by the enter of hook {failing.hook!r}")
            raise

    def exit(self, user: object, failed: BaseException | None) -> None:
        """Run the hooks' `exit` if this is the last block out; every one of them, whatever one raises.

        Can be repeated, after an interrupt.

        Args:
            user: What entered.
            failed: The program's exception that is on its way, and must not be replaced.
        """
        failures: list[BaseException] = []
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
                raise failure  # an interrupt, or an exit of the program
        if failed is not None:
            for failure in failures:
                _warn_beside(failed, f"a hook failed on exit: {failure!r}")
        elif self.on_error == "warn":
            for failure in failures:
                warnings.warn(f"a hook failed on exit: {failure!r}", OpInterceptWarning, stacklevel=3)
        elif failures:
            raise failures[0]

    def _exit_next(self) -> BaseException | None:
        """Run the `exit` of the hook that entered first; what it raises."""
        handle = None
        try:
            handle = self._inside[0]
            next(map(operator.call, map(_EXIT, iter(self._inside.popleft, None))))  # in one call, as above
        except BaseException as exception:
            if isinstance(exception, IndexError) and not self._inside and _raised_here(exception):
                return None  # a signal's handler has left a block meanwhile, and run them all
            if handle is None or (self._inside and self._inside[0] is handle):
                raise  # an interrupt before the call
            if _never_began(handle.exit, exception):
                self._inside.appendleft(handle)
            elif isinstance(exception, Exception):
                exception.add_note(f"opintercept: raised by the exit of hook {handle.hook!r}")
            return exception
        return None

    def tap(self, call: OpCall) -> Any:
        """What gets at the gradients of this call; None if no hook wants them."""
        handles = [h for h in self.backward if not h.removed and (h.wants is None or h.wants(call))]
        return self._tap(self, call, handles) if handles and self._tap is not None else None

    def count_opaque(self, name: str) -> None:
        """Count an operator that was seen but not into."""
        with self._lock:
            self.opaque[name] += 1

    def survives(self, handle: Handle, phase: str, call: OpCall, exception: Exception) -> bool:
        """Deal with a hook that raised: say where in a note, or switch it off and go on."""
        try:
            shown = str(call)
        except Exception:  # an exotic tensor must not hide what the hook raised
            shown = call.op
        where = f"{phase} hook {handle.hook!r} on call {call.index} ({call.phase}): {shown}"
        if self.on_error == "raise":
            exception.add_note(f"opintercept: raised by {where}")
            if isinstance(exception, TypeError):
                # `a @ b` takes one to mean that it cannot multiply these, and nobody would read what it says.
                raise HookError(f"a hook must not raise TypeError, got {exception}; from {where}") from exception
            return False
        failure = self._take_out(handle)
        if failure is not None:
            where += f"; its exit raised {failure!r}"
        warnings.warn(
            f"switched off a hook that raised {type(exception).__name__}: {exception}; {where}",
            OpInterceptWarning,
            stacklevel=3,
        )
        return True


def run(
    pipelines: tuple[Pipeline, ...],
    spec: OpSpec,
    func: Any,
    phase: Phase,
    invoke: Callable[..., Any],
    head: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `invoke(head, *args, **kwargs)` with the hooks of all `pipelines` around it.

    Each pipeline gets a call of its own, so that each counts for itself; a replacement by one is what the
    next one sees.
    """
    if len(pipelines) > 1:
        try:
            return _run_several(pipelines, spec, func, phase, invoke, head, args, kwargs)
        finally:
            del args, kwargs  # as below
    # What follows is _run_several for one, without its lists, which cost half a microsecond.
    (pipeline,) = pipelines
    given_args, given_kwargs = args, kwargs
    call = OpCall(pipeline, spec, func, phase, args, kwargs)
    try:
        links = pipeline.links
        if links is not None and links.wanted:
            links.note(call)
        if pipeline.pre:
            args, kwargs = _before(pipeline, call)
        if spec.opaque:
            pipeline.count_opaque(spec.name)
        tap = pipeline.tap(call) if pipeline.backward else None
        if tap is not None:
            args, kwargs = tap.inputs(args, kwargs)
        started = perf_counter()
        try:
            output = invoke(head, *args, **kwargs) if kwargs else invoke(head, *args)
        except BaseException as exception:
            _report(pipelines, [call], exception)
            raise
        call.elapsed = perf_counter() - started
        if args is not given_args or kwargs is not given_kwargs:
            output = _written_back(spec.written(func, given_args, given_kwargs), output)
        call.output = output
        if pipeline.post:
            output = _after(pipeline, call, given_args, given_kwargs)
        return output if tap is None else tap.output(output)
    finally:
        call._pipeline = None
        # The frame lives on in the traceback of an exception, which the program may keep.
        del call, args, kwargs, given_args, given_kwargs


def _run_several(
    pipelines: tuple[Pipeline, ...],
    spec: OpSpec,
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
            call = OpCall(pipeline, spec, func, phase, given_args, given_kwargs)
            calls.append(call)
            if pipeline.links is not None and pipeline.links.wanted:
                pipeline.links.note(call)
            _hand_over(pipeline, call, args, kwargs)
            args, kwargs = _before(pipeline, call)
            if spec.opaque:
                pipeline.count_opaque(spec.name)
        for pipeline, call in zip(pipelines, calls, strict=True):
            _hand_over(pipeline, call, args, kwargs)
        taps = [p.tap(c) if p.backward else None for p, c in zip(pipelines, calls, strict=True)]
        for tap in filter(None, taps):
            args, kwargs = tap.inputs(args, kwargs)
        started = perf_counter()
        try:
            output = invoke(head, *args, **kwargs)
        except BaseException as exception:
            _report(pipelines, calls, exception)
            raise
        elapsed = perf_counter() - started
        if args is not given_args or kwargs is not given_kwargs:
            output = _written_back(spec.written(func, given_args, given_kwargs), output)
        for pipeline, call in zip(pipelines, calls, strict=True):
            call.output = output
            call.elapsed = elapsed
            output = _after(pipeline, call, given_args, given_kwargs)
        for tap in filter(None, reversed(taps)):
            output = tap.output(output)
        return output
    finally:
        for call in calls:
            call._pipeline = None
        calls.clear()
        call = None  # type: ignore[assignment]
        del args, kwargs, given_args, given_kwargs  # as in `run`


def _before(pipeline: Pipeline, call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the pre hooks and return the inputs to go on with."""
    for handle in pipeline.pre:
        if handle.removed:
            continue
        try:
            inputs = handle.pre(call)
            if inputs is not None:
                args, kwargs = _checked_inputs(inputs)
                if pipeline.level == "dispatch":
                    _check_alike(call, args, kwargs)
                _hand_over(pipeline, call, args, kwargs)
        except Exception as exception:
            if not pipeline.survives(handle, "pre", call, exception):
                raise
    return call.args, call.kwargs


def _hand_over(pipeline: Pipeline, call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the call the inputs that a hook has put in place of its own."""
    if args is call.args and kwargs is call.kwargs:
        return
    if call.phase == "backward" and pipeline.links is not None and pipeline.links.wanted:
        call._relation()  # found by where the operands that autograd has saved lie in memory
    call.args, call.kwargs = args, kwargs


def _after(pipeline: Pipeline, call: OpCall, given_args: tuple[Any, ...], given_kwargs: dict[str, Any]) -> Any:
    """Run the post hooks and return the output to go on with."""
    for handle in pipeline.post:
        if handle.removed:
            continue
        try:
            replacement = handle.post(call)
            if replacement is not None and replacement is not call.output:
                check_replacement(call.output, replacement)
                if getattr(call.func, "is_view", False):
                    raise HookError(f"the output of {call.op} cannot be replaced, it is a view of an input")
                if pipeline.level == "dispatch" or call._spec.written(call.func, given_args, given_kwargs):
                    # Below autograd, and for out= and in-place forms, the caller keeps the tensor that it
                    # has; the new values go into it, and its strides and aliases stay.
                    copy_into(call.output, replacement)
                else:
                    call.output = replacement
        except Exception as exception:
            if not pipeline.survives(handle, "post", call, exception):
                raise
    return call.output


def _report(pipelines: tuple[Pipeline, ...], calls: list[OpCall], exception: BaseException) -> None:
    # The program's exception must get through, so a failing error hook can only be reported.
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
    """Warn without taking the place of the program's exception, also where warnings are errors."""
    try:
        warnings.warn(text, OpInterceptWarning, stacklevel=4)
    except OpInterceptWarning:
        if exception is not None:
            exception.add_note(f"opintercept: {text}")


def _checked_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (
        not isinstance(inputs, tuple)
        or len(inputs) != 2
        or not isinstance(inputs[0], (tuple, list))
        or not isinstance(inputs[1], Mapping)
    ):
        raise HookError(
            f"a pre hook must return None or (args, kwargs), got {describe(inputs)}; "
            "return call.args, call.kwargs with the change made"
        )
    return tuple(inputs[0]), dict(inputs[1])


def _check_alike(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Below autograd the program goes on with the shapes and dtypes that it knows."""
    pairs = [*zip(call.args, args, strict=False), *((call.kwargs[k], kwargs[k]) for k in call.kwargs if k in kwargs)]
    for old, new in pairs:
        if new is not old and is_tensor(old) and is_tensor(new):
            _check_like("a replaced input at dispatch level", old, new)


def _written_back(targets: list[Any], output: Any) -> Any:
    """Bring the result to the tensors that the caller will read, after a hook put others in their place."""
    if not targets:
        return output
    results = output if isinstance(output, (tuple, list)) else (output,)
    for target, result in zip(targets, results, strict=False):
        if is_tensor(result):
            if tuple(target.shape) != tuple(result.shape):
                target.resize_(result.shape)
            copy_into(target, result)
    return targets[0] if not isinstance(output, (tuple, list)) else type(output)(targets)


def check_gradients(gradients: tuple[Any, ...], replacement: Any) -> None:
    """Refuse what cannot take the place of a call's gradients; where there was none, none may come.

    Raises:
        HookError: Another number of them, or another shape, dtype, device or layout.
    """
    if not isinstance(replacement, (tuple, list)) or len(replacement) != len(gradients):
        raise HookError(
            f"a backward hook must return None or a tuple of {len(gradients)} gradients, one for each input tensor, "
            f"got {describe(replacement)}"
        )
    for old, new in zip(gradients, replacement, strict=True):
        if is_tensor(old) and is_tensor(new):
            _check_like("a replaced gradient", old, new)
        elif (old is None) is not (new is None) or new is not old:
            raise HookError(
                f"a backward hook must return a gradient where there was one and None elsewhere, "
                f"got {describe(new)} for {describe(old)}"
            )


def check_replacement(output: Any, replacement: Any) -> None:
    """Refuse what cannot take the place of `output`.

    Raises:
        HookError: Another structure, shape, dtype, device or layout.
    """
    if isinstance(output, (tuple, list)):
        if type(replacement) is not type(output) or len(replacement) != len(output):
            raise HookError(
                f"a replaced output must be a {type(output).__name__} of {len(output)} parts like the operator's, "
                f"got {describe(replacement)}"
            )
        for part, new in zip(output, replacement, strict=True):
            check_replacement(part, new)
        return
    if not is_tensor(output):
        if replacement is not output and replacement != output:
            raise HookError(
                f"a replaced output must keep what is no tensor, {describe(output)}, got {describe(replacement)}"
            )
        return
    if not is_tensor(replacement):
        raise HookError(
            f"a post hook must return None or an output like {describe(output)}, got {describe(replacement)}; "
            "end it with return None if it only looks"
        )
    _check_like("a replaced output", output, replacement)


def _check_like(what: str, old: Any, new: Any) -> None:
    for name, read in _LIKE.items():
        if read(old) != read(new):
            raise HookError(f"{what} must have the {name} of the operator's, {describe(old)}, got {describe(new)}")


# In a dispatch mode, a nested tensor has no `shape`.
_LIKE: dict[str, Callable[[Any], Any]] = {
    "shape": shape_of,
    "dtype": attrgetter("dtype"),
    "device": attrgetter("device"),
    "layout": attrgetter("layout"),
}


def copy_into(target: Any, source: Any) -> None:
    """Give `target` the values of `source`, which may be a view of it."""
    if isinstance(target, (tuple, list)):
        for part, new in zip(target, source, strict=True):
            if is_tensor(part):
                copy_into(part, new)
    elif target is not source:
        # A view of `target` (its transpose, say) must be read whole before any of it is overwritten.
        target.copy_(source.clone() if share_memory(target, source) else source)


def share_memory(one: Any, other: Any) -> bool:
    # By address: autograd does not accumulate into a tensor whose storage Python has asked for (use_count).
    try:
        first, first_end = _extent(one)
        second, second_end = _extent(other)
        return first < second_end and second < first_end
    except (NotImplementedError, RuntimeError):  # a layout without one array
        return True


def _extent(tensor: Any) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    start = int(tensor.data_ptr())
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * int(tensor.element_size())


# For forked children. A WeakSet would run Python whenever a pipeline goes, and there swallow an interrupt.
_pipelines: list[weakref.ref[Pipeline]] = []
_look_through_at = 64


def _remember(pipeline: Pipeline) -> None:
    global _look_through_at
    if len(_pipelines) >= _look_through_at:
        _pipelines[:] = [reference for reference in _pipelines if reference() is not None]
        _look_through_at = 2 * len(_pipelines) + 64
    _pipelines.append(weakref.ref(pipeline))


def _forget_parent() -> None:
    # In a forked child no block of the parent is active, and its threads' locks are nobody's.
    for reference in _pipelines:
        pipeline = reference()
        if pipeline is not None:
            pipeline._lock = threading.RLock()
            pipeline._entered_by.clear()
            pipeline._inside.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forget_parent)
