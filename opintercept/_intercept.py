"""`intercept` and the `Interceptor` it makes: context manager and decorator over one pipeline.

Invariant: everything that can be refused is refused before any state has changed, and every way out of a
block restores what its way in changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from typing import Any, Literal, ParamSpec, TypeVar, cast, get_args

import torch

from opintercept import _entry, _record
from opintercept._checks import check_choice
from opintercept._engines import compiled, dispatch_mode, function_mode, greenlets, kernels, unseen
from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out
from opintercept._engines.gradients import Tap
from opintercept._engines.scope import Block, Watcher
from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._hook import Handle, Hook, Level, OnError, check_hook, is_hook
from opintercept._ops.select import Selection, parts, select
from opintercept._ops.table import HIGHER_ORDER, row_of
from opintercept._origin import stack
from opintercept._origin.links import graph_task
from opintercept._origin.origin import Origin
from opintercept._pipeline import Pipeline

P = ParamSpec("P")
R = TypeVar("R")

EngineChoice = Literal["auto", "kernel", "mode", "compiled"]
Threads = Literal["current", "all"]


@keep_out  # as are entering and leaving: a compiled function may hold a block
def intercept(
    hooks: Hook | Iterable[Hook] = (),
    *,
    ops: Any = "matmul",
    level: Level = "dispatch",
    engine: EngineChoice = "auto",
    threads: Threads = "current",
    on_error: OnError = "raise",
) -> Interceptor:
    """Show every matmul that a program runs to `hooks`, as a context manager or a decorator.

    Args:
        hooks: One hook or an iterable of them. A plain callable `hook(call)` runs after each operator.
        ops: `"matmul"`, the whole family; `"all"`, every operator; or one or more names (`"bmm"`,
            `"aten::mm.out"`), `OpOverloadPacket`s or `OpOverload`s; at function level also functions of
            torch (`torch.bmm`).
        level: `"dispatch"`: what runs, below autograd and autocast, forward and backward. `"function"`: what
            the program calls, above autograd.
        engine: At dispatch level: `"kernel"` for a finite set of ops, `"mode"` for any; `"auto"` takes
            the kernel engine where it can. `"compiled"` is the kernel engine with its kernels in C++, which a
            compiler builds in a minute when first asked for, and which torch's cache of extensions keeps.
        threads: `"current"`: the threads that enter, and autograd's on their behalf. `"all"`: the process
            (kernel engine only, compiled or not).
        on_error: `"raise"`, or `"warn"`: a hook that raises is switched off with one warning.

    Returns:
        An interceptor that does nothing until it is entered.

    Raises:
        TypeError: A hook or an op of a kind that cannot be used.
        ValueError: An unknown name, or a combination that does not exist.
        OpInterceptError: This torch lacks what the engine is built on, or compiled kernels cannot be built.

    Example:
        >>> import torch
        >>> with intercept(lambda call: print(call.record())):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4]
    """
    return Interceptor(hooks, ops=ops, level=level, engine=engine, threads=threads, on_error=on_error)


class Interceptor:
    """What `intercept` returns. Reusable, nests, and may be entered in several threads at once."""

    def __init__(
        self,
        hooks: Hook | Iterable[Hook],
        *,
        ops: Any,
        level: Level,
        engine: EngineChoice,
        threads: Threads,
        on_error: OnError,
    ) -> None:
        check_choice("level", level, get_args(Level))
        check_choice("engine", engine, get_args(EngineChoice))
        check_choice("threads", threads, get_args(Threads))
        check_choice("on_error", on_error, get_args(OnError))
        if isinstance(ops, Iterable) and not isinstance(ops, (str, torch._ops.OpOverloadPacket)):
            ops = list(ops)
        self._options = (ops, level, engine, threads, on_error)
        chosen = _engine(ops, level, engine, threads)
        hooks = _hooks(hooks, level)
        {"kernel": kernels, "mode": dispatch_mode, "function": function_mode}[chosen].available()
        self._compiled = made = compiled.load() if engine == "compiled" else None
        if isinstance(ops, str) and ops == "matmul":
            self._overloads, keys = _family(chosen)
        else:
            self._overloads, keys = _chosen(select(ops, level), chosen)
        below = level == "dispatch"
        walk, look = (stack.walk, _record.look) if made is None else (made.walk, made.look)
        origin = Origin(below, _scope.owner, walk)
        self._pipeline = Pipeline(hooks, level, on_error, origin, None if below else Tap, look)
        self._watcher = Watcher(self._pipeline, chosen, keys, threads == "all")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also one in another process, is a new interceptor that has not been entered, with copies of the hooks.
        ops, *options = self._options
        return _rebuilt, (list(self._pipeline.hooks), _by_name(ops), *options)

    def register(self, hook: Hook) -> Handle:
        """Append a hook; it takes part from the next call on.

        Raises:
            TypeError, ValueError: As `intercept` does for its hooks.
        """
        check_hook(hook, self._pipeline.level)
        return self._pipeline.register(hook)

    def step(self) -> None:
        """Count a step of the program, a batch say; `call.step` has the number, from 0."""
        self._pipeline.steps += 1

    def paused(self) -> Pause:
        """A context manager in which this interceptor sees nothing of the thread that enters it."""
        return Pause(self._watcher)

    @property
    def opaque(self) -> dict[str, int]:
        """What was seen but not into: operators that hide matmuls, by name, and how often they ran."""
        return dict(self._pipeline.opaque)

    @keep_out
    def __enter__(self) -> Interceptor:
        _entry.enter(self, _Stay(self))
        return self

    __exit__ = _entry.Exit(lambda self: _innermost(self._watcher, pauses=False).entry)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Intercept a function, method, generator, async function or async generator while its body runs.

        Raises:
            TypeError: Not a function, such as a class, or the interceptor was used without its brackets.
        """
        if isinstance(function, type) or not callable(function):
            raise TypeError(
                f"an interceptor decorates functions, got {function!r}; write @intercept(...) with brackets over a "
                "function, or use it in a with block"
            )
        wrapper: Any
        if inspect.isasyncgenfunction(function):
            wrapper = self._wrap_async_generator(function)
        elif inspect.iscoroutinefunction(function):
            wrapper = self._wrap_coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapper = self._wrap_generator(function)
        else:

            def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                with self:
                    return function(*args, **kwargs)

        return cast(Callable[P, R], functools.wraps(function)(wrapper))

    def _wrap_generator(self, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with _Life(self):
                return (yield from self._drive(function(*args, **kwargs)))

        return wrapper

    def _wrap_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _Life(self):
                return await self._awaited(function(*args, **kwargs))

        return wrapper

    def _wrap_async_generator(self, function: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with _Life(self):
                inner = function(*args, **kwargs)
                step = inner.asend(None)
                while True:
                    try:
                        item = await self._awaited(step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = inner.asend((yield item))
                    except GeneratorExit:
                        await self._awaited(inner.aclose())
                        raise
                    except BaseException as exception:
                        step = inner.athrow(exception)

        return wrapper

    @types.coroutine
    def _awaited(self, awaitable: Any) -> Generator[Any, Any, Any]:
        return (yield from self._drive(awaitable))

    def _drive(self, body: Any) -> Generator[Any, Any, Any]:
        """Run a generator-like body, active only between its suspensions."""
        active = _Active(self)
        resume: Callable[..., Any] = body.send
        value: Any = None
        while True:
            with active:
                try:
                    yielded = resume(value)
                except StopIteration as stop:
                    return stop.value
            try:
                value = yield yielded
                resume = body.send
            except GeneratorExit:
                with active:
                    body.close()
                raise
            except BaseException as exception:
                resume, value = body.throw, exception


def _rebuilt(hooks: Any, ops: Any, level: Any, engine: Any, threads: Any, on_error: Any) -> Interceptor:
    return Interceptor(hooks, ops=ops, level=level, engine=engine, threads=threads, on_error=on_error)


def _by_name(ops: Any) -> Any:
    """What `ops=` was, with operators by their names, since torch's objects for them cannot be copied."""
    if isinstance(ops, torch._ops.OpOverload):
        return ops._name
    if isinstance(ops, torch._ops.OpOverloadPacket):
        return str(ops).replace(".", "::", 1)
    return ops if isinstance(ops, str) or not isinstance(ops, Iterable) else [_by_name(op) for op in ops]


# Python calls these from a with statement, as it does `__enter__`.
_entry.Exit.__get__ = keep_out(_entry.Exit.__get__)  # type: ignore[method-assign]
_entry.leave = keep_out(_entry.leave)
_entry.Exit.by_hand = keep_out(_entry.Exit.by_hand)  # type: ignore[method-assign]
_entry.Leaver.dropped = keep_out(_entry.Leaver.dropped)  # type: ignore[method-assign]


class _Stay:
    """One block of an interceptor, from its enter to its exit."""

    __slots__ = ("_block", "_interceptor", "_unseen")

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._block: Block | None = None
        self._unseen = _scope.unseen_calls()

    def begin(self) -> None:
        interceptor = self._interceptor
        self._block = block = Block(interceptor._watcher, self)
        interceptor._pipeline.enter(block)
        unseen.enter(block)
        _enter_block(interceptor, block)

    def check(self) -> None:
        _check_leaving(self._block)

    def end(self, failed: BaseException | None) -> None:
        block = self._block
        if block is None:
            return
        try:
            _leave_block(block)
        finally:
            try:
                unseen.leave(block)
            finally:
                self._interceptor._pipeline.exit(block, failed)
        self._block = None  # also a cycle that would be garbage
        elsewhere = _scope.unseen_calls() - self._unseen
        if elsewhere and failed is None and not block.watcher.everywhere:
            self._tell_of_other_threads(elsewhere)

    def _tell_of_other_threads(self, calls: int) -> None:
        pipeline = self._interceptor._pipeline
        if pipeline.hooks and not pipeline.calls:
            warnings.warn(
                f"a block saw no call, and other threads ran watched operators {calls} times meanwhile; "
                'use intercept(..., threads="all") to see them',
                OpInterceptWarning,
                stacklevel=4,
            )


class _Active:
    """Makes an interceptor active between two suspensions of a body, whose hooks have entered before."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    @keep_out
    def __enter__(self) -> None:
        _entry.enter(self, _Resumed(self._interceptor))

    __exit__ = _entry.Exit(lambda self: _innermost(self._interceptor._watcher, pauses=False).entry)


class _Resumed:
    """The time between two suspensions."""

    __slots__ = ("_block", "_interceptor")

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor
        self._block: Block | None = None

    def begin(self) -> None:
        self._block = block = Block(self._interceptor._watcher, self)
        _enter_block(self._interceptor, block)

    def check(self) -> None:
        pass  # the body is suspended, wherever that is

    def end(self, failed: BaseException | None) -> None:
        if self._block is not None:
            _leave_block(self._block)
            self._block = None


class _Life:
    """Keeps hooks entered and kernels installed while a generator or coroutine is suspended."""

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def __enter__(self) -> None:
        _entry.enter(self, self)

    __exit__ = _entry.Exit(lambda self: self)

    def begin(self) -> None:
        interceptor = self._interceptor
        if interceptor._watcher.engine == "kernel":
            kernels.hold(self, interceptor._overloads, interceptor._compiled)
        interceptor._pipeline.enter(self)
        unseen.enter(self)

    def check(self) -> None:
        pass  # a body may end anywhere

    def end(self, failed: BaseException | None) -> None:
        try:
            kernels.release(self)
        finally:
            try:
                unseen.leave(self)
            finally:
                self._interceptor._pipeline.exit(self, None if isinstance(failed, GeneratorExit) else failed)


class Pause:
    """The context manager of `Interceptor.paused`."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    @keep_out
    def __enter__(self) -> None:
        _entry.enter(self, _Paused(self._watcher))

    __exit__ = _entry.Exit(lambda self: _innermost(self._watcher, pauses=True).entry)


class _Paused:
    """One pause of an interceptor."""

    __slots__ = ("_block", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._block: Block | None = None

    def begin(self) -> None:
        self._block = Block(self._watcher, self, pauses=True)
        _scope.enter(self._block)

    def check(self) -> None:
        _check_leaving(self._block)

    def end(self, failed: BaseException | None) -> None:
        if self._block is not None:
            _leave_block(self._block)
            if self._watcher.pipeline.links is not None:
                self._watcher.pipeline.links.begin()
            self._block = None


def _innermost(watcher: Watcher, *, pauses: bool) -> Block:
    block = _scope.current().innermost(watcher, pauses)
    if block is None:
        raise OpInterceptError(
            "a block must be left in the thread that entered it, and not from inside a hook, got a block that this "
            "thread has not entered or has left; use one with statement for both"
        )
    return block


def _check_leaving(block: Block | None) -> None:
    if block is not None and not block.left and block.graph_task != graph_task():
        raise OpInterceptError(
            "a block must be left in the backward pass that it was entered in, or outside of all if it was entered "
            "outside, got another one; autograd would bring the block back after this node"
        )


def _enter_block(interceptor: Interceptor, block: Block) -> None:
    if interceptor._pipeline.links is not None:
        interceptor._pipeline.links.begin()
    greenlets.follow()
    engine = block.watcher.engine
    if engine == "kernel":
        kernels.enter(block, interceptor._overloads, interceptor._compiled)
    elif engine == "mode":
        dispatch_mode.ENGINE.enter(block)
    else:
        function_mode.ENGINE.enter(block)


def _leave_block(block: Block) -> None:
    """Take a block out of the engine that feeds it. Can be repeated."""
    first, later = not block.left, _later(block)
    engine = block.watcher.engine
    if block.pauses:
        _scope.leave(block)
    elif engine == "kernel":
        kernels.leave(block)
    elif engine == "mode":
        dispatch_mode.ENGINE.leave(block)
    else:
        function_mode.ENGINE.leave(block)
    if not _scope.current().blocks:
        greenlets.unfollow()
    if first and later:
        raise OpInterceptError(
            f"blocks must be left in the reverse of the order they were entered in, got one with {later} entered "
            "later and still active; this block was left, they stay"
        )


def _later(block: Block) -> int:
    """How many blocks the same thread, or task, has entered later and not left."""
    blocks = _scope.current().blocks
    if blocks and blocks[-1] is block:
        return 0
    return sum(b.order > block.order and b.in_task is block.in_task for b in blocks) if block in blocks else 0


def open_blocks() -> tuple[Block, ...]:
    """The blocks that see what this thread runs, its own and those of other threads for all."""
    return tuple(dict.fromkeys((*_scope.current().blocks, *_scope.state.everywhere.blocks)))


def force_out(blocks: Iterable[Block]) -> list[str]:
    """Leave blocks that were entered and never left, and name them by their hooks; the last one comes first."""
    named = []
    for block in sorted(blocks, key=lambda block: block.order, reverse=True):
        hooks = [getattr(hook, "__name__", type(hook).__name__) for hook in block.watcher.pipeline.hooks]
        named.append(f"intercept({', '.join(hooks)}){'.paused()' if block.pauses else ''}")
        with contextlib.suppress(OpInterceptError):  # a torch mode entered later was forgotten too; ours is out
            _entry.finish(block.entry, OpInterceptError("left by force"))  # so that hooks which fail to exit warn
    return named


def _engine(ops: Any, level: Level, engine: EngineChoice, threads: Threads) -> _scope.Engine:
    everything = isinstance(ops, str) and ops == "all"
    if level == "function":
        if engine != "auto":
            raise ValueError(f'engine must be left at "auto" at function level, which has one engine, got {engine!r}')
        chosen: _scope.Engine = "function"
    elif everything:
        if engine in ("kernel", "compiled"):
            raise ValueError(
                f'the {engine} engine needs a finite set of ops, got ops="all"; name the ops, or use engine="mode"'
            )
        chosen = "mode"
    else:
        chosen = "mode" if engine == "mode" else "kernel"
    if threads == "all" and chosen != "kernel":
        raise ValueError(
            f'threads="all" needs the kernel engine, torch\'s modes are bound to a thread, got {level} level with the '
            f'{chosen} engine; use level="dispatch" with a finite set of ops, or enter the interceptor in each thread'
        )
    return chosen


def _hooks(hooks: Any, level: Level) -> list[Hook]:
    if not isinstance(hooks, (str, type)) and not is_hook(hooks) and isinstance(hooks, Iterable):
        found = list(hooks)
    else:
        found = [hooks]
    for hook in found:
        check_hook(hook, level)
    return found


@functools.cache
def _family(engine: _scope.Engine) -> tuple[dict[str, Any], frozenset[Any] | None]:
    """The overloads of the whole family that the engine watches, by name, and its keys."""
    if engine == "function":
        return {}, select("matmul", "function")
    overloads = {o._name: o for o in select("matmul", "dispatch") or () if kernels.registered(o)}
    if engine == "mode":
        # A dispatch mode gets composites whole under inference_mode, and fused operators always.
        return overloads, frozenset(overloads) | HIGHER_ORDER
    leaves = {
        name: overload
        for name, overload in sorted(overloads.items())
        if row_of(name).kind == "leaf" and not kernels.composite(overload) and kernels.runnable(overload)
    }
    return leaves, frozenset(leaves)


def _chosen(selection: Selection, engine: _scope.Engine) -> tuple[dict[str, Any], frozenset[Any] | None]:
    """The same for operators that were asked for by name.

    Raises:
        ValueError: One that cannot be watched.
    """
    if selection is None or engine == "function":
        return {}, selection
    chosen = {}
    overloads = [overload for overload in selection if kernels.registered(overload)]
    for overload in sorted(overloads, key=lambda overload: str(overload._name)):
        name = overload._name
        if kernels.composite(overload):
            siblings = [other for other in overloads if other._schema.name == overload._schema.name]
            if row_of(name).kind == "composite" or all(map(kernels.composite, siblings)):
                raise ValueError(
                    f"{name} is taken apart before dispatch level can see it; watch {parts(row_of(name))} instead, "
                    "or use level='function'"
                )
        elif engine == "kernel" and kernels.selects_backend(overload):
            raise ValueError(
                f"{name} has a kernel already in the place where the kernel engine would see it, as operators that "
                "choose a device do; use engine='mode'"
            )
        else:
            chosen[name] = overload
    if not chosen:
        raise ValueError("ops must name operators of the dispatcher, got none that it has; see torch.ops")
    return chosen, frozenset(chosen)
