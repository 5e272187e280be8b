"""The mode engine: a TorchDispatchMode, which sees every operator below autograd.

Invariant: an unwatched operator leaves in the first lines.
It is not the default, since ATen takes other branches while a dispatch mode is active (`isTensorSubclassLike`).
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from opintercept._core.fork import in_child
from opintercept._engines import foreign, overloads
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block
from opintercept._engines.dynamo import CAN_MARK, keep_out, tracing
from opintercept._engines.modes import ModeEngine, run_hooked
from opintercept._engines.scope import UNKNOWN
from opintercept._ops.table import HIGHER_ORDER

SOURCE = "dispatch mode"

# The thread's stack of dispatch modes. Private; `DispatchModeEngine.needs` lists each for the error if one is missing.
_depth: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_at: Any = getattr(torch._C, "_get_dispatch_stack_at", None)
_pop: Any = getattr(torch._C, "_pop_torch_dispatch_stack", None)
_push: Any = getattr(torch._C, "_push_on_torch_dispatch_stack", None)


class DispatchModeEngine(ModeEngine):
    """The mode engine."""

    name = "mode"
    source = SOURCE
    instead = 'use engine="kernel" or level="function"'
    needs = _scope.NEEDS | {
        "torch._C._len_torch_dispatch_stack": _depth,
        "torch._C._get_dispatch_stack_at": _at,
        "torch._C._pop_torch_dispatch_stack": _pop,
        "torch._C._push_on_torch_dispatch_stack": _push,
        "torch._C._dispatch_has_kernel_for_dispatch_key": overloads.has_kernel,
        "torch._C._dispatch_find_schema_or_throw": overloads.find_schema,
    }

    def of_families(self, families: tuple[str, ...], among: frozenset[str] | None = None) -> frozenset[str]:
        """All overloads, composites too: under inference_mode a dispatch mode gets them whole."""
        found = frozenset(overloads.of_families(families, lambda: overloads.everything((), among), among))
        return found | (HIGHER_ORDER if "matmul" in families else frozenset())

    def unknown(self) -> frozenset[str]:
        """Any overload that looks like a matmul."""
        return frozenset(foreign.unknown())

    def skipped(self) -> frozenset[str]:
        """As `of_families`."""
        return frozenset(overloads.skipped())

    def named(self, entries: list[Any]) -> frozenset[str]:
        """Any overload."""
        return frozenset(overloads.named(entries))


_flags_lock = threading.RLock()  # reentrant: a signal handler may enter a block while its thread enters one
_active: set[DispatchMode] = set()  # of all threads


class DispatchMode(TorchDispatchMode):
    """Hands watched operators to the pipelines. The engine enters and leaves it."""

    # torch.cond, while_loop and flex_attention raise under a mode that does not say so (pytorch #158077).
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
        """Say yes: otherwise torch skips compiled code, even after the mode has gone (pytorch #190286)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To keep Dynamo out of the handler, torch would wrap it, which takes 0.5 us for each operator and imports
        # torch._dynamo at the first one. The code below the class marks it instead.
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
        watch = scope.tables[SOURCE].get(name, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(SOURCE, name)
        if watch is None or _unreal(args) or tracing() or _changed(watch.row.func, func):
            return func(*args, **(kwargs or {}))
        if watch.tally is not None:
            watch.tally()
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
        """Correct torch's flags now that this mode is gone.

        The flags belong to the process, and each mode saves and restores them. Since threads do not leave in the
        reverse of the order in which they entered, a mode may restore what was true for another thread. An interrupt
        may also stop torch halfway.
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
    """True to let a wrapper subclass take the call apart first, False to pass it on unseen, None to look at it.

    A wrapper (DTensor, a quantised weight) runs plain operators inside, and those compute.
    Fake tensors must be passed on: if they are refused, DTensor's sharding propagation breaks.
    """
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and any(issubclass(kind, fake.FakeTensor) for kind in types):
        return False
    return True if any(hasattr(kind, "__tensor_flatten__") for kind in types) else None


def _changed(watched: Any, called: Any) -> bool:
    return watched is not None and watched is not called and foreign.has_changed(watched, called)


def _unreal(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, torch.Tensor):
            return value.is_meta
    return False


@in_child
def _forget_parent() -> None:
    # Only the forking thread exists in the child, with the modes on its own stack.
    global _active, _flags_lock
    _flags_lock = threading.RLock()
    _active = {mode for i in range(_depth()) if type(mode := _at(i)) is DispatchMode}


# `_pop` takes a mode key, which only torch's own infra modes have.
ENGINE = DispatchModeEngine(DispatchMode, _depth, _at, lambda: _pop(None), _push)
