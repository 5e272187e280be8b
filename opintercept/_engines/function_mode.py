"""The engine of function level: a TorchFunctionMode, which sees calls as the program wrote them, above autograd.

Invariant: an unwatched function leaves in the first line.
Torch disables the mode inside the functions that it shows, so nothing is seen within them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from opintercept._core.errors import OpInterceptWarning
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block
from opintercept._engines.dynamo import keep_out, tracing
from opintercept._engines.modes import ModeEngine, run_hooked
from opintercept._engines.scope import UNKNOWN
from opintercept._ops.select import of_families, select

SOURCE = "function mode"

# The thread's stack of function modes. Private; `FunctionModeEngine.needs` lists each for the error if one is missing.
_depth: Any = getattr(torch._C, "_len_torch_function_stack", None)
_at: Any = getattr(torch._C, "_get_function_stack_at", None)
_pop: Any = getattr(torch._C, "_pop_torch_function_stack", None)
_push: Any = getattr(torch._C, "_push_on_torch_function_stack", None)


class FunctionModeEngine(ModeEngine):
    """The only engine at function level."""

    name = "function"
    source = SOURCE
    instead = 'use level="dispatch"'
    needs = _scope.NEEDS | {
        "torch._C._len_torch_function_stack": _depth,
        "torch._C._get_function_stack_at": _at,
        "torch._C._pop_torch_function_stack": _pop,
        "torch._C._push_on_torch_function_stack": _push,
    }

    def of_families(self, families: tuple[str, ...], among: frozenset[str] | None = None) -> frozenset[Any]:
        """Functions of torch, and overloads that Python calls by themselves."""
        return of_families(families, "function", among)

    def skipped(self) -> frozenset[Any]:
        """As `of_families`."""
        return of_families(("convolution",), "function")

    def named(self, entries: list[Any]) -> frozenset[Any]:
        """As `of_families`."""
        return select(entries, "function")


class FunctionMode(TorchFunctionMode):
    """Hands watched functions to the pipelines. The engine enters and leaves it."""

    keys: Any = frozenset()
    entered_by: int | None = None
    leaving = False
    missed = False
    left_with: list[Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.blocks: set[Block] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo traces this handler into the graph. It must find the plain call alone: for each read of the mode's
        # state it would add a guard.
        if is_compiling() or func not in self.keys:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._watched(func, args, kwargs or {})

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        scope = _scope.current()
        watch = scope.tables[SOURCE].get(func, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(SOURCE, func)
        if watch is None or tracing():
            return func(*args, **kwargs)
        if watch.tally is not None:
            watch.tally()
            return func(*args, **kwargs)
        if func is torch.nn.functional.multi_head_attention_forward:
            _warn_of_fast_path(args, kwargs)
        return run_hooked(scope, watch, func, args, kwargs)

    def out_from_under(self, above: Any) -> None:
        """Nothing to hand over: torch keeps no state beside this stack."""

    def restore(self) -> None:
        """Nothing to repair, for the same reason."""


# Around a graph break, Dynamo would compile this and the hooks. It must be able to trace the handler itself.
FunctionMode._watched = keep_out(FunctionMode._watched)  # type: ignore[method-assign]


_warned = False


def _warn_of_fast_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Warn once that torch would have fused this call: under any function mode `has_torch_function` is true."""
    global _warned
    if _warned or kwargs.get("training", True) or not torch.backends.mha.get_fastpath_enabled():
        return
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return
    _warned = True
    warnings.warn(
        "function level turns off the fused path of nn.MultiheadAttention and nn.TransformerEncoder, so results differ "
        'in the last bits, and by more in padded rows; level="dispatch" leaves it on (pytorch #106302)',
        OpInterceptWarning,
        stacklevel=2,
    )


ENGINE = FunctionModeEngine(FunctionMode, _depth, _at, _pop, _push)
