"""`intercept` and the `Interceptor` that it returns: a context manager and decorator around one pipeline of hooks.

Invariant: whatever can be refused is refused before any state changes, and every way out of a block restores what
the way in changed.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal, Never, ParamSpec, TypeVar, cast, get_args

import torch

from opintercept._blocks import outside
from opintercept._blocks.blocks import Entered, check_leaving, enter_block, innermost, leave_block
from opintercept._blocks.coroutines import suspending
from opintercept._core import exits
from opintercept._core.checks import check_choice, check_count
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.hook import Handle, Hook, Level, OnError, check_hook, is_hook
from opintercept._core.pipeline import Pipeline
from opintercept._core.text import counted
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block, Watcher
from opintercept._engines.choose import EngineChoice, choose
from opintercept._engines.dynamo import keep_out
from opintercept._engines.gradients import Tap
from opintercept._origin.origin import Origin

P = ParamSpec("P")
R = TypeVar("R")

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
    graphs: bool = False,
) -> Interceptor:
    """Show every matmul that a program runs to `hooks`, as a context manager or a decorator.

    Args:
        hooks: One hook or an iterable of them. A plain callable `hook(call)` runs after each operator.
        ops: `"all"` for every operator, or one or more of: families (`"matmul"`, `"convolution"`, `"norm"`,
            `"activation"`, `"softmax"`, `"elementwise"`, `"reduction"`, `"view"`, `"copy"`, `"embedding"`, `"random"`,
            `"optimizer"`), names (`"bmm"`, `"aten::mm.out"`), `OpOverloadPacket`s, `OpOverload`s, and at function
            level functions of torch (`torch.bmm`). A family with a minus is left out: `("all", "-view")`.
        level: `"dispatch"` shows what runs, below autograd and autocast, forward and backward. `"function"` shows
            what the program calls, above autograd.
        engine: At dispatch level, `"kernel"` is a kernel for each operator, and `"compiled"` the same in C++: a
            compiler builds it within a minute when it is first used, and torch's cache of extensions keeps it.
            `"auto"` builds nothing. It takes `"compiled"` where that has been built and `"kernel"` elsewhere, see
            `opintercept.info`. `"mode"` is a `TorchDispatchMode`: factories have their
            own names in it, and under `inference_mode` composites are whole.
        threads: `"current"` watches the threads that enter, and autograd's threads that work for them. `"all"`
            watches the whole process, with the kernel engine only, compiled or not.
        on_error: `"raise"`, or `"warn"` to switch a hook that raises off with one warning.
        graphs: Whether what reads values for hooks may become part of a CUDA graph that a block sees captured, so that
            each replay in a block has its values. It stays in the graph after the block. Without, replays are seen
            without values.

    Returns:
        An interceptor that does nothing until it is entered.

    Raises:
        TypeError: A hook or an operator is of a type that cannot be used.
        ValueError: A name is unknown, or a combination does not exist.
        OpInterceptError: This torch lacks what the engine needs, or compiled kernels cannot be built.

    Example:
        >>> import torch
        >>> with intercept(lambda call: print(call.record())):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4]
    """
    return Interceptor(hooks, ops=ops, level=level, engine=engine, threads=threads, on_error=on_error, graphs=graphs)


class Interceptor:
    """What `intercept` returns. It can be reused, nested, and entered in several threads at once.

    Attributes:
        watcher: The part of it that engines know. Blocks carry it, and it tells which interceptor a block belongs to.
    """

    def __init__(
        self,
        hooks: Hook | Iterable[Hook],
        *,
        ops: Any,
        level: Level,
        engine: EngineChoice,
        threads: Threads,
        on_error: OnError,
        graphs: bool,
    ) -> None:
        check_choice("level", level, get_args(Level))
        check_choice("threads", threads, get_args(Threads))
        check_choice("on_error", on_error, get_args(OnError))
        if not isinstance(ops, (str, torch._ops.OpOverloadPacket)) and isinstance(ops, Iterable):
            ops = list(ops)
        self._options: dict[str, Any] = {"level": level, "engine": engine, "threads": threads, "on_error": on_error}
        self._options["graphs"] = graphs
        chosen = choose(level, engine, threads)
        hooks = _hooks(hooks, level)
        chosen.require()
        below = level == "dispatch"
        origin = Origin(below, _scope.owner, chosen.walk)
        tap, ring = None if below else Tap, chosen.ring()
        pipeline = Pipeline(hooks, level, on_error, origin, tap, chosen.signature_of, ring, graphs)
        self.watcher = Watcher(pipeline, chosen, ops, threads == "all")

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, also one in another process, is a new interceptor with copies of the hooks, and has not been entered.
        again = functools.partial(Interceptor, ops=_by_name(self.watcher.ops), **self._options)
        return again, (list(self.watcher.pipeline.hooks),)

    def register(self, hook: Hook) -> Handle:
        """Append a hook. It takes part from the next call on.

        Raises:
            TypeError, ValueError: As from `intercept`.
        """
        check_hook(hook, self.watcher.pipeline.level)
        return self.watcher.pipeline.register(hook)

    def step(self, number: int | None = None) -> None:
        """End a step of the program, such as a batch. `call.step` has the number of the step that runs, from 0.

        Args:
            number: The number of the step that begins, for a training that resumes; by default the next one.

        Raises:
            ValueError: `number` is not a whole number of at least 0.
        """
        if number is not None:
            check_count("number", number, 0)
        pipeline = self.watcher.pipeline
        with self.paused() if pipeline.end_step else nullcontext():  # what hooks run here is not seen either
            pipeline.next_step(number)

    def __repr__(self) -> str:
        return f"Interceptor({list(self.watcher.pipeline.hooks)!r})"

    def paused(self) -> Pause:
        """A context manager inside which this interceptor sees nothing of the thread that entered it."""
        return Pause(self.watcher, pauses=True)

    @property
    def opaque(self) -> dict[str, int]:
        """How often operators ran that hide matmuls, by name: they were seen, but not what they did inside."""
        self.watcher.pipeline.flush()
        return dict(self.watcher.pipeline.opaque)

    @keep_out
    def __enter__(self) -> Interceptor:
        exits.enter(self, _Stay(self.watcher))
        return self

    __exit__ = exits.Exit(lambda self: innermost(self.watcher, pauses=False).entry)

    def __call__(self, function: Callable[P, R] | None = None, *more: Never, **keywords: Never) -> Callable[P, R]:
        """Intercept a function, method, generator, async function or async generator while its body runs.

        Raises:
            TypeError: It is not a function but, say, a class; or `@intercept` was written without brackets.
        """
        # Without brackets, the function below `@intercept` is taken for a hook, and its callers' arguments come here.
        if isinstance(function, type) or not callable(function) or more or keywords:
            raise TypeError(
                f"an interceptor decorates functions, got {function!r}; write @intercept(...), with brackets, above a "
                "function, or use it in a with block"
            )
        wrapper: Any = suspending(self.watcher, function)
        if wrapper is None:

            def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
                with self:
                    return function(*args, **kwargs)

        return cast(Callable[P, R], functools.wraps(function)(wrapper))


def _by_name(ops: Any) -> Any:
    """`ops` with names in place of torch's objects for operators, which cannot be copied."""
    if isinstance(ops, torch._ops.OpOverload):
        return ops._name
    if isinstance(ops, torch._ops.OpOverloadPacket):
        return str(ops).replace(".", "::", 1)
    return ops if isinstance(ops, str) or not isinstance(ops, Iterable) else [_by_name(op) for op in ops]


# A with statement calls these, as it calls `__enter__`, so Dynamo must be kept out of them too.
exits.Exit.__get__ = keep_out(exits.Exit.__get__)  # type: ignore[method-assign]
exits.leave = keep_out(exits.leave)
exits.Exit.by_hand = keep_out(exits.Exit.by_hand)  # type: ignore[method-assign]
exits.Leaver.dropped = keep_out(exits.Leaver.dropped)  # type: ignore[method-assign]


class _Stay:
    """An entry of an interceptor's block, with its hooks."""

    __slots__ = ("_block", "_skipped", "_unseen", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._block: Block | None = None
        self._unseen = _scope.unseen_calls()
        self._skipped = watcher.pipeline.skipped

    def begin(self) -> None:
        self._block = block = Block(self._watcher, self)
        self._watcher.pipeline.enter(block)
        outside.enter(block, self._watcher)
        enter_block(block)

    def check(self) -> None:
        check_leaving(self._block)

    def end(self, failed: BaseException | None) -> None:
        block = self._block
        if block is None:
            return
        try:
            leave_block(block)
        finally:
            try:
                outside.leave(block)
            finally:
                self._watcher.pipeline.exit(block, failed)
        self._block = None  # breaks a reference cycle, too
        if failed is None:
            _tell_of_convolutions(self._watcher.pipeline, self._skipped)
        elsewhere = _scope.unseen_calls() - self._unseen
        pipeline = self._watcher.pipeline
        if elsewhere and failed is None and not block.watcher.everywhere and pipeline.hooks and not pipeline.calls:
            warnings.warn(
                f"a block saw no call, but other threads ran watched operators {elsewhere} times meanwhile; "
                'use intercept(..., threads="all") to see them',
                OpInterceptWarning,
                stacklevel=3,
            )


def _tell_of_convolutions(pipeline: Pipeline, before: int) -> None:
    """Tell once that a block has not looked at convolutions, so that totals of its hooks leave them out."""
    skipped = pipeline.skipped - before
    if skipped and pipeline.hooks and not Watcher.told_of_convolutions:
        Watcher.told_of_convolutions = True
        warnings.warn(
            f"{counted(skipped, 'convolution')} ran in a block that looks at matrix products only; "
            'ops=("matmul", "convolution") shows them too',
            OpInterceptWarning,
            stacklevel=caller_level(),
        )


class Pause(Entered):
    """The context manager of `Interceptor.paused`."""

    def __repr__(self) -> str:
        return f"<Pause of {list(self._watcher.pipeline.hooks)!r}>"


def _hooks(hooks: Any, level: Level) -> list[Hook]:
    several = not isinstance(hooks, (str, type)) and not is_hook(hooks) and isinstance(hooks, Iterable)
    found = list(hooks) if several else [hooks]
    for hook in found:
        check_hook(hook, level)
    return found
