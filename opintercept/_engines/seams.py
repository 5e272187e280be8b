"""Shows blocks the calls of seams, which no engine sees: functions are replaced while a block is open.

Invariant: an unwatched call runs the function with its own arguments, and without hooks.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out, keep_out_of_frame, tracing
from opintercept._engines.modes import run_hooked
from opintercept._engines.patches import MISSING, Patch, Patches
from opintercept._engines.scope import UNKNOWN, Scope, Watch, state
from opintercept._errors import OpInterceptWarning, caller_level
from opintercept._hook import Level
from opintercept._ops import seams
from opintercept._ops.table import ROWS, row_of

# Private. At dispatch level hooks run below autograd, and the function itself as the program has called it. Where a
# torch lacks them, autograd records what hooks compute from the operands of a seam.
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
_as_before: Any = getattr(torch._C, "_ForceDispatchKeyGuard", None)
_included: Any = getattr(torch._C, "_dispatch_tls_local_include_set", None)
_excluded: Any = getattr(torch._C, "_dispatch_tls_local_exclude_set", None)
_HAS_GUARDS = None not in (_below_autograd, _as_before, _included, _excluded)
# Private. Where it is missing, hooks also run for tensors that have shapes only.
_keys_of: Any = getattr(torch._C, "_dispatch_keys", None)

_wrappers: dict[tuple[str, int], tuple[Any, Any]] = {}  # what was at the place of a name, and what we put there
_ours: dict[int, tuple[str, Any, Any]] = {}  # the same with the name, by the identity of what we put there
_patches: dict[tuple[int, str], Patch] = {}
_counts: dict[str, dict[int, tuple[int, int]]] = {}
_told: set[str] = set()


def _find() -> Iterable[Patch]:
    found: list[Patch] = []
    values: dict[int, tuple[str, Any, Any]] = {}  # by identity, what is put where
    nested = False
    for name in ROWS.seams:
        seam = seams.locate(name)
        if seam is None:
            continue
        original, wrapper = _wrapped(name, seam.value)
        if seams.is_kernel(seam.value):
            found.append(_patch(name, vars(seam.value), "run", MISSING, wrapper))
        elif isinstance(seam.owner, type):
            found.append(_patch(name, seam.owner, seam.attribute, original, wrapper))
        else:
            values[id(original)] = values[id(wrapper)] = (name, original, wrapper)
            nested = nested or seam.value is wrapper
    return [*found, *_in_modules(values, "nested" if nested else "entering")]


def _patch(name: str, owner: Any, attribute: str, original: Any, replacement: Any) -> Patch:
    """The patch of a place, the same as last time if it is the same."""
    patch = _patches.get((id(owner), attribute))
    if patch is None or patch.owner is not owner or patch.replacement is not replacement:
        patch = _patches[id(owner), attribute] = Patch(name, owner, attribute, original, replacement)
    return patch


def _copies() -> Iterable[Patch]:
    return _in_modules(_ours, "leaving")


def _in_modules(values: dict[int, tuple[str, Any, Any]], when: str) -> list[Patch]:
    """The places in modules where one of these values is, by identity.

    Looking through a process's 100,000 names takes 10 ms. It is left out if nothing has taken or dropped a reference
    to one of the values since this was asked at the same point of a block.
    """
    counts = {place: (sys.getrefcount(one), sys.getrefcount(other)) for place, (_, one, other) in values.items()}
    if _counts.get(when) == counts:
        wrappers = {id(wrapper) for _, _, wrapper in values.values()}
        return [patch for patch in _patches.values() if id(patch.replacement) in wrappers and patch.is_known()]
    found: list[Patch] = []
    for module in tuple(sys.modules.values()) if values else ():
        namespace = seams.attributes(module)
        if not values.keys().isdisjoint(map(id, namespace.values())):  # in C
            for attribute, value in tuple(namespace.items()):
                if id(value) in values:
                    name, original, wrapper = values[id(value)]
                    found.append(_patch(name, namespace, attribute, original, wrapper))
    _counts[when] = counts
    return found


def _wrapped(name: str, value: Any) -> tuple[Any, Any]:
    """What is at a place without us, and what we put there. The same value gets the same wrapper, for Dynamo's guards.

    Args:
        name: The seam's name.
        value: What is there now, which may be ours already.
    """
    if id(value) in _ours:
        return _ours[id(value)][1:]
    known = _wrappers.get((name, id(value)))
    if known is not None:
        return known
    function = seams.function_of(value)
    seams.NAMES[function] = name
    row_of.cache_clear()  # it may have looked before the module was imported
    wrapper: Any
    if seams.is_kernel(value):
        wrapper = _kernel(name, function, value)
    elif isinstance(value, (staticmethod, classmethod)):
        wrapper = type(value)(_function(name, function, value.__func__))
    else:
        wrapper = _function(name, function, value)
    _ours[id(wrapper)] = name, value, wrapper
    _wrappers[name, id(value)] = value, wrapper
    return value, wrapper


def _function(name: str, function: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def seam(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces this into the graph, and must find the plain call alone, as in `function_mode`.
        if is_compiling():
            return original(*args, **kwargs)
        return _call(name, function, original, args, kwargs)

    keep_out_of_frame(seam)
    return functools.wraps(original)(seam)


def _kernel(name: str, function: Any, kernel: Any) -> Callable[..., Any]:
    launch = type(kernel).run.__get__(kernel)

    def run(*args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup:  # compiles only
            return launch(*args, grid=grid, warmup=warmup, **kwargs)
        returned = None

        def launched(*args: Any, **kwargs: Any) -> None:
            nonlocal returned
            returned = launch(*args, grid=grid, warmup=warmup, **kwargs)

        _call(name, function, launched, args, kwargs)
        return returned  # the compiled kernel, which is no output

    return run


_LEVELS: tuple[Level, ...] = ("function", "dispatch")


@keep_out
def _call(name: str, function: Any, invoke: Callable[..., Any], args: Any, kwargs: Any, level: int = 0) -> Any:
    """Run a call with the hooks of the interceptors at a level and at those below."""
    scope = _scope.current()
    for place in range(level, len(_LEVELS)):
        watch = scope.tables[_LEVELS[place]].get(name, UNKNOWN)
        if watch is UNKNOWN:
            watch = scope.watch(_LEVELS[place], name)
        if watch is not None and _is_real(args, kwargs) and not tracing():
            if _LEVELS[place] == "dispatch":
                return _run_below(scope, watch, function, invoke, args, kwargs)
            inner = partial(_again, name, function, invoke, place + 1)
            return run_hooked(scope, watch, function, args, kwargs, inner)
    if scope.owner is None:
        state.unseen += 1
    return invoke(*args, **kwargs)


def _again(name: str, function: Any, invoke: Callable[..., Any], level: int, /, *args: Any, **kwargs: Any) -> Any:
    return _call(name, function, invoke, args, kwargs, level)


def _run_below(scope: Scope, watch: Watch, function: Any, invoke: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call at dispatch level: hooks below autograd, as everywhere at this level, and the function above it."""
    above = (_included(), _excluded()) if _HAS_GUARDS else ()

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            if not above:
                return invoke(*args, **kwargs)
            with _as_before(*above):
                return invoke(*args, **kwargs)
        finally:
            for pipeline in watch.pipelines:
                if pipeline.links is not None:
                    pipeline.links.close()

    if not above:
        return run_hooked(scope, watch, function, args, kwargs, run)
    with _below_autograd():
        return run_hooked(scope, watch, function, args, kwargs, run)


# Tensors with these keys have shapes only, or stand for others, as in `kernels`.
_UNREAL = ("Meta", "Functionalize", "FuncTorchBatched", "FuncTorchGradWrapper")


def _is_real(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if _keys_of is None:
        return True
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    keys = [_keys_of(tensor) for tensor in tensors]
    return not any(each.has(getattr(torch._C.DispatchKey, name)) for each in keys for name in _UNREAL)


def _displaced(patch: Patch) -> None:
    if patch.name not in _told:
        _told.add(patch.name)
        warnings.warn(
            f"other code has replaced {patch.name} while a block was open: it stays as it is, {patch.now()!r}, and the "
            "block has not seen its calls unless they reached the function; undo such patches before the block ends",
            OpInterceptWarning,
            stacklevel=caller_level(),
        )


PATCHES = Patches(_find, _copies, _displaced)
"""The functions that are declared, which are replaced while a block is open."""
