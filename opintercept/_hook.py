"""What a hook may be, and one registration of it.

Must not import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, get_args

from opintercept._call import OpCall

OnError = Literal["raise", "warn"]
Level = Literal["function", "dispatch"]
Read = Literal["module", "source", "forward", "gradients", "autocast", "record"]


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


class HookDeclaration(Protocol):
    """What a hook may say of itself. Each of these may be left out; a function can have the first two as attributes.

    Attributes:
        reads: What the hook reads of its calls; if left out, it may read everything. `"module"` stands for
            `call.module` and `call.aliases`, `"source"` for `call.source`, `"forward"` for `call.forward` and
            `call.grad_of`, `"gradients"` for `call.gradient` and `call.grad_output`, `"autocast"` for
            `call.autocast`, and `"record"` for all that `call.record()` and `call.note()` hold. What is not in this
            list, such as shapes and values, is free to read.

            In a forward call all of it can be read at any time. A backward call finds the rest, all but autocast,
            in what its forward call has noted, so at dispatch level each forward call that autograd records notes it
            if one hook of the interceptor reads any: 25 us with kernels in Python, 4 us with compiled ones.
            `reads = ()` saves that. If no hook declares what a hook then reads in a backward call, it gets None, and
            one `OpInterceptWarning` says what to declare.

            A hook that declares `"module"`, `"source"` or `"record"` has calls under `no_grad` named as they come,
            too, so that several models get their names in the order in which they run. Others pay nothing there.
        levels: The levels at which the hook works; if left out, both, with a `backward` method only `"function"`.

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
        """Whether a hook with `backward` wants the gradients of a call; if left out, it wants those of every call.

        Asked at function level before the operator runs. Each call whose gradients are wanted gets two nodes in
        autograd's graph.
        """
        ...


Hook: TypeAlias = PreHook | PostHook | ErrorHook | BackwardHook | Callable[[OpCall], Any]
"""An object with any of `pre`, `post`, `error`, `backward`, `enter` and `exit`, or a callable, which is a `post`."""
_RUNS = ("pre", "post", "error", "backward")
_PHASES = (*_RUNS, "enter", "exit")
_NAMED: frozenset[Read] = frozenset(("module", "source", "record"))
_TRACKED: frozenset[Read] = _NAMED | {"forward", "gradients"}


class Registry(Protocol):
    """What a handle was registered with; `_pipeline.Pipeline` is the implementation."""

    def remove(self, handle: Handle, /) -> None: ...


class Handle:
    """One registration of a hook. `remove()` ends it, as with `torch.utils.hooks.RemovableHandle`.

    Removing twice is fine, and as a context manager the handle removes on the way out. A hook that was
    registered twice has two handles, and each removes its own.
    """

    __slots__ = (
        "_pipeline",
        "backward",
        "enter",
        "error",
        "exit",
        "hook",
        "names_all",
        "post",
        "pre",
        "removed",
        "tracks",
        "wants",
    )

    def __init__(self, pipeline: Registry, hook: Hook) -> None:
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
        reads = reads_of((hook,))
        self.tracks = reads is None or not _TRACKED.isdisjoint(reads)  # forward calls note where they come from
        self.names_all = reads is not None and not _NAMED.isdisjoint(reads)  # calls without gradients, too

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


def reads_of(hooks: Iterable[Any], also: Iterable[Read] = ()) -> frozenset[Read] | None:
    """What a hook reads that is made of others.

    Args:
        hooks: The others, declared or not.
        also: What the hook reads beside them.

    Returns:
        What to declare; None to declare nothing, since one of `hooks` may read anything.
    """
    declared = [getattr(hook, "reads", None) for hook in hooks]
    together: frozenset[Read] = frozenset(also).union(*(reads for reads in declared if reads is not None))
    if None not in declared:
        return together
    return None if _NAMED.isdisjoint(together) else frozenset(get_args(Read))


def is_hook(value: Any) -> bool:
    """Whether `value` can be registered as it is."""
    return callable(value) or any(_method(value, name) for name in _PHASES)


def check_hook(hook: Any, level: Level) -> None:
    """Refuse what is not a hook, or not one for this level.

    Raises:
        TypeError: It has nothing to call, is a class instead of an instance, or declares a single word.
        ValueError: It does not work at this level, or declares an unknown word.
    """
    if isinstance(hook, type):
        raise TypeError(f"a hook must be an instance, got the class {hook.__name__}; pass {hook.__name__}(...)")
    if not is_hook(hook):
        raise TypeError(
            f"a hook must be callable or have one of {', '.join(_PHASES)}, got {hook!r}; write def hook(call): ..."
        )
    _check_words(hook, "reads", get_args(Read))
    levels = _check_words(hook, "levels", get_args(Level))
    if levels is None and level == "dispatch" and _method(hook, "backward"):
        raise ValueError(
            f"a hook with a backward method works at function level, got {hook!r} for level='dispatch'; use "
            "level='function'. At dispatch level pre and post see the calls of autograd, with call.phase 'backward'; "
            "a hook for both levels declares levels = ('function', 'dispatch')"
        )
    if levels is not None and level not in levels:
        raise ValueError(f"{hook!r} works at level={' or '.join(map(repr, levels))} only, got level={level!r}")


def _check_words(hook: Any, name: str, known: tuple[str, ...]) -> Collection[str] | None:
    words = getattr(hook, name, None)
    if words is None:
        return None
    if isinstance(words, str) or not isinstance(words, Collection):
        word = words if words in known else known[0]
        raise TypeError(f"{name} of a hook must be a collection, got {words!r} on {hook!r}; write {name} = ({word!r},)")
    for word in words:
        if word not in known:
            choices = ", ".join(map(repr, known))
            raise ValueError(f"{name} of a hook must be some of {choices}, got {word!r} on {hook!r}; correct the word")
    return words
