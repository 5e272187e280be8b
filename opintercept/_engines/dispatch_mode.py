"""The dispatch-mode engine: a TorchDispatchMode, every operator below autograd as one stream.

Invariant: an unwatched operator leaves in the first lines.
ATen takes other branches while any dispatch mode is on (`isTensorSubclassLike`), so this is not the default.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from opintercept._engines import overloads
from opintercept._engines import scope as _scope
from opintercept._engines.base import Keys
from opintercept._engines.dynamo import CAN_MARK, keep_out, tracing
from opintercept._engines.modes import ModeEngine, run_hooked
from opintercept._engines.scope import UNKNOWN, Block
from opintercept._fork import in_child
from opintercept._ops.table import HIGHER_ORDER

FEED = "dispatch mode"

# The thread's stack of dispatch modes; private, and `DispatchModeEngine.needs` names what is missing.
_depth: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_at: Any = getattr(torch._C, "_get_dispatch_stack_at", None)
_pop: Any = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_push: Any = getattr(torch._C, "_push_on_torch_dispatch_stack", None)


class DispatchModeEngine(ModeEngine):
    """The mode engine."""

    name = "mode"
    feed = FEED
    instead = 'use engine="kernel" or level="function"'
    needs = _scope.NEEDS | {
        "torch._C._len_torch_dispatch_stack": _depth,
        "torch._C._get_dispatch_stack_at": _at,
        "torch._C._pop_torch_dispatch_stack": _pop,
        "torch._C._push_on_torch_dispatch_stack": _push,
        "torch._C._dispatch_has_kernel_for_dispatch_key": overloads.has_kernel,
        "torch._C._dispatch_find_schema_or_throw": overloads.find_schema,
    }

    def keys(self, ops: Any) -> Keys:
        """Any overload. Of the family, composites too: under inference_mode a dispatch mode gets them whole."""
        if isinstance(ops, str) and ops == "all":
            return None
        return _family() if isinstance(ops, str) and ops == "matmul" else overloads.named(ops)


@functools.cache
def _family() -> frozenset[str]:
    return frozenset(overloads.family()) | HIGHER_ORDER


_flags_lock = threading.RLock()  # a signal's handler may enter a block while its thread enters one
_active: set[DispatchMode] = set()  # in all threads


class DispatchMode(TorchDispatchMode):
    """Hands watched operators to the pipeline; entered and left by its engine."""

    # torch.cond, while_loop and flex_attention raise under a mode that does not say so (#158077).
    supports_higher_order_operators = True

    keys: Any = frozenset()
    entered_by: int | None = None
    leaving = False
    missed = False
    left_with: list[Any] | None = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks: set[Block] = set()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code would be skipped otherwise, also after the mode has gone (#190286)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the handler to keep Dynamo out of it, at 0.5 us an operator and with an import
        # of torch._dynamo at the first one. It is marked below the class instead.
        return not CAN_MARK

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types:
            deferred = _deferred(types)
            if deferred is not None:
                return NotImplemented if deferred else func(*args, **(kwargs or {}))
        name = func._name
        if name not in self.keys:
            return func(*args, **kwargs) if kwargs else func(*args)
        scope = _scope.current()
        watch = scope.tables[FEED].get(name, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(FEED, name)
        if watch is None or _unreal(args) or tracing():
            return func(*args, **(kwargs or {}))
        return run_hooked(scope, watch, func, args, kwargs or {})

    def __enter__(self) -> DispatchMode:
        with _flags_lock:
            _active.add(self)
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        with _flags_lock:
            super().__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
            self.restore()

    def restore(self) -> None:
        """Put torch's flags right now that this mode is gone.

        They are the process's, each mode saves and restores them, and threads do not leave in the reverse of the
        order they came in: what is restored may be another thread's truth. Or an interrupt has stopped torch halfway.
        """
        with _flags_lock:
            _active.discard(self)
            if _active:
                _python_dispatch._is_in_torch_dispatch_mode = True
                _python_dispatch._is_in_non_infra_torch_dispatch_mode = True
            elif _depth() == 0:
                _python_dispatch._is_in_torch_dispatch_mode = False
                _python_dispatch._is_in_non_infra_torch_dispatch_mode = False

    def out_from_under(self, above: Any) -> None:
        """Hand what `__exit__` would have restored to the mode above, which was entered after this one."""
        for flags in (
            "old_dispatch_mode_flags",
            "old_non_infra_dispatch_mode_flags",
            "old_without_ignore_compile_internals_dispatch_mode_flags",
        ):
            getattr(above, flags)[-1] = getattr(self, flags).pop()
        with _flags_lock:
            _active.discard(self)


if CAN_MARK:
    keep_out(DispatchMode.__torch_dispatch__)


def _deferred(types: Any) -> bool | None:
    """True to let a wrapper subclass take the call apart first, False to pass it on unseen, None to look.

    A wrapper (DTensor, a quantised weight) runs plain operators inside, and those are the ones that compute.
    Fake tensors must not be refused: DTensor's sharding propagation breaks (torch-facts 2.3).
    """
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and any(issubclass(kind, fake.FakeTensor) for kind in types):
        return False
    return True if any(hasattr(kind, "__tensor_flatten__") for kind in types) else None


def _unreal(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.is_meta
    return False


@in_child
def _forget_parent() -> None:
    # Only the forking thread lives on in the child, with the modes on its own stack.
    global _active, _flags_lock
    _flags_lock = threading.RLock()
    _active = {mode for i in range(_depth()) if type(mode := _at(i)) is DispatchMode}


# The argument is a mode key, which only torch's own infra modes have.
ENGINE = DispatchModeEngine(DispatchMode, _depth, _at, lambda: _pop(None), _push)
