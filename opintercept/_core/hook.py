"""What a hook may have, what it may declare, and `Handle`, one registration of a hook.

Must not import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, get_args

from opintercept._core.call import OpCall

OnError = Literal["raise", "warn"]
Level = Literal["function", "dispatch"]
Read = Literal["module", "source", "forward", "gradients", "autocast", "record"]


class PreHook(Protocol):
    """Runs before the operator. May return `(args, kwargs)`, which the operator then gets instead."""

    def pre(self, call: OpCall, /) -> tuple[Sequence[Any], Mapping[str, Any]] | None: ...


class PostHook(Protocol):
    """Runs after the operator. May return an output, which replaces `call.output`."""

    def post(self, call: OpCall, /) -> Any: ...


class ErrorHook(Protocol):
    """Runs after the operator raised. The program gets the exception in any case."""

    def error(self, call: OpCall, exception: BaseException, /) -> None: ...


class BackwardHook(Protocol):
    """Runs when autograd has computed the gradients of a call at function level. May return others for its inputs.

    The tensors of `call` have shapes but no values by then. `grad_inputs` has one entry for each tensor among the
    arguments, None for a tensor that needs no gradient. `grad_outputs` has one entry for each output. If the program
    passes a tensor twice, its whole gradient is in the first entry and None in the second.
    """

    def backward(
        self, call: OpCall, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...], /
    ) -> tuple[Any, ...] | None: ...


class HookDeclaration(Protocol):
    """What a hook may declare. Everything here is optional, and a hook that declares nothing gets right answers.

    A hook sets `reads` and `levels` on its class, on itself or, if it is a function, on the function. A hook that needs
    no more of a call than its record and statistics of its tensors may be an `InKernel`, too: then compiled kernels do
    its work.

    Attributes:
        reads: What the hook reads of its calls; everything, if it does not say. The words are

            - `"module"`: `call.module` and `call.aliases`
            - `"source"`: `call.source`
            - `"forward"`: `call.forward` and `call.grad_of`
            - `"gradients"`: `call.gradient` and `call.grad_output`
            - `"autocast"`: `call.autocast`
            - `"record"`: `call.record()` and `call.note()`

            The rest of a call, such as its operands and shapes, needs no word. In the backward pass the stack no
            longer shows where a forward call came from. So if any hook of an interceptor reads any of these except
            `"autocast"`, each forward call that autograd records notes it. That takes about 25 us with kernels in
            Python and 4 us with compiled kernels; `reads = ()` saves it. If no hook declares what a hook then reads in
            a backward call, it gets None, and one `OpInterceptWarning` per interceptor says what to declare. Forward
            calls are noted from then on.

            A hook that declares `"module"`, `"source"` or `"record"` has calls under `no_grad` and `inference_mode`
            named too, whether or not it reads their names. This keeps the names of several models the same, whichever
            calls a hook looks at. For other hooks such calls note nothing.
        levels: The levels at which the hook works. Both, if it does not say; only `"function"` if it has a `backward`
            method.

    Example:
        >>> import torch
        >>> from opintercept import intercept
        >>> class LargestByModule:
        ...     reads = ("module",)
        ...     levels = ("dispatch",)
        ...     def __init__(self):
        ...         self.largest = {}
        ...     def post(self, call):
        ...         value = call.output.abs().max().item()
        ...         self.largest[call.module] = max(value, self.largest.get(call.module, 0.0))
        >>> hook = LargestByModule()
        >>> with intercept(hook):
        ...     _ = torch.eye(2) @ torch.full((2, 2), 3.0)
        >>> hook.largest
        {'': 3.0}
    """

    reads: Collection[Read]
    levels: Collection[Level]

    def wants_gradients(self, call: OpCall, /) -> bool:
        """Whether a hook with a `backward` method wants the gradients of this call; every call's, if it does not say.

        The pipeline asks at function level, before the operator runs. Each call whose gradients are wanted adds two
        nodes to autograd's graph.
        """
        ...


Hook: TypeAlias = PreHook | PostHook | ErrorHook | BackwardHook | Callable[[OpCall], Any]
"""An object with any of `pre`, `post`, `error`, `backward`, `enter` and `exit`, or a callable that runs as `post`.

If it has an `end_step`, the interceptor's `step()` calls that inside a block, in the thread that calls `step()`. If it
has a `replayed`, that is called with a `PendingRecord` and a list for each call that a CUDA graph repeats in a block,
if the block saw the graph capture it; the list has what the hook's own readers in the graph found.
"""
_RUNS = ("pre", "post", "error", "backward")
_PHASES = (*_RUNS, "enter", "exit")
_NAMED: frozenset[Read] = frozenset(("module", "source", "record"))
_TRACKED: frozenset[Read] = _NAMED | {"forward", "gradients"}


class Registry(Protocol):
    """What a handle takes its hook out of. `Pipeline` implements it."""

    def remove(self, handle: Handle, /) -> None: ...


class Handle:
    """One registration of a hook. `remove()` ends it, as with `torch.utils.hooks.RemovableHandle`.

    Removing twice does no harm. As a context manager, the handle removes the hook on exit. A hook that is registered
    twice has two handles, and each removes its own registration.

    Attributes:
        hook: The hook.
        removed: Whether `remove` has run.
        tracks: Whether forward calls must note where they come from for the hook to read it in backward calls.
        names_all: Whether calls that autograd does not record must be named as well.
        wants: The hook's `wants_gradients`, or None.
    """

    def __init__(self, pipeline: Registry, hook: Hook) -> None:
        self._pipeline = weakref.ref(pipeline)  # no cycle, so that hooks and what they hold are freed at once
        self.hook = hook
        self.removed = False
        found = {name: _method(hook, name) for name in _PHASES}
        if not any(found[name] for name in _RUNS) and callable(hook):
            found["post"] = hook
        self.pre, self.post, self.error, self.backward, self.enter, self.exit = (found[name] for name in _PHASES)
        # `bool()` does nothing, and no signal can interrupt it.
        self.enter, self.exit = self.enter or bool, self.exit or bool
        self.end_step = _method(hook, "end_step")
        self.replayed = _method(hook, "replayed")
        self.wants: Callable[[OpCall], bool] | None = getattr(hook, "wants_gradients", None)
        reads = reads_of((hook,))
        self.tracks = reads is None or not _TRACKED.isdisjoint(reads)
        self.names_all = reads is not None and not _NAMED.isdisjoint(reads)

    def remove(self) -> None:
        """Take the hook out. It is not called again, not even later in the call that is running."""
        pipeline = self._pipeline()
        if pipeline is not None:
            pipeline.remove(self)

    def __enter__(self) -> Handle:
        return self

    def __repr__(self) -> str:
        return f"<Handle of {self.hook!r}{', removed' * self.removed}>"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _method(hook: Hook, name: str) -> Any:
    method = getattr(hook, name, None)
    return method if callable(method) else None


def reads_of(hooks: Iterable[Any], also: Iterable[Read] = ()) -> frozenset[Read] | None:
    """Return what a hook that wraps others should declare as `reads`.

    Args:
        hooks: The others. A predicate counts as one.
        also: What the wrapping hook itself reads.

    Returns:
        The words; None if it should declare nothing, because one of `hooks` may read everything.

    Raises:
        TypeError, ValueError: As `check_hook` about `reads`.
    """
    declared = [_words(hook, "reads", get_args(Read)) for hook in hooks]
    together: frozenset[Read] = frozenset(also).union(*(reads for reads in declared if reads is not None))
    if None not in declared:
        return together
    return None if _NAMED.isdisjoint(together) else frozenset(get_args(Read))


def is_hook(value: Any) -> bool:
    """Whether `value` can be registered as a hook."""
    return callable(value) or any(_method(value, name) for name in _PHASES)


def check_hook(hook: Any, level: Level) -> None:
    """Check that `hook` is a hook, that it works at `level`, and that its declaration is valid.

    Raises:
        TypeError: `hook` has nothing to call or is a class, or `reads` or `levels` is not a collection.
        ValueError: `hook` does not work at `level`, or `reads` or `levels` has an unknown word.
    """
    if isinstance(hook, type):
        raise TypeError(f"a hook must be an instance, got the class {hook.__name__}; pass {hook.__name__}(...)")
    if not is_hook(hook):
        raise TypeError(
            f"a hook must be callable or have one of {', '.join(_PHASES)}, got {hook!r}; write def hook(call): ..."
        )
    _words(hook, "reads", get_args(Read))
    levels = _words(hook, "levels", get_args(Level))
    if levels is None and level == "dispatch" and _method(hook, "backward"):
        raise ValueError(
            f"a hook with a backward method works at function level only, got {hook!r} for level='dispatch'; use "
            "level='function'. At dispatch level, pre and post see the calls that autograd makes, with "
            "call.phase == 'backward'"
        )
    if levels is not None and level not in levels:
        raise ValueError(f"{hook!r} works at level={' or '.join(map(repr, levels))} only, got level={level!r}")


def _words(hook: Any, name: str, known: tuple[str, ...]) -> Collection[Any] | None:
    words = getattr(hook, name, None)
    if words is None:
        return None
    if isinstance(words, str) or not isinstance(words, Collection):
        word = words if words in known else known[0]
        raise TypeError(f"{name} of a hook must be a collection, got {words!r} on {hook!r}; write {name} = ({word!r},)")
    for word in words:
        if word not in known:
            choices = ", ".join(map(repr, known))
            raise ValueError(f"{name} of a hook must be some of {choices}, got {word!r} on {hook!r}")
    return words
