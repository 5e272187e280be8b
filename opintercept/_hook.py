"""What a hook may be, and one registration of it.

Must not import torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, TracebackType
from typing import Any, Literal, Protocol, TypeAlias

from opintercept._call import OpCall

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


class Registry(Protocol):
    """What a handle was registered with; `_pipeline.Pipeline` is the implementation."""

    def remove(self, handle: Handle, /) -> None: ...


class Handle:
    """One registration of a hook. `remove()` ends it, as with `torch.utils.hooks.RemovableHandle`.

    Removing twice is fine, and as a context manager the handle removes on the way out. A hook that was
    registered twice has two handles, and each removes its own.
    """

    __slots__ = (
        *("_pipeline", "asks_origin", "backward", "enter", "error", "exit", "hook", "post", "pre", "removed", "wants"),
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
