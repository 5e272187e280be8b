"""Shows blocks the calls of patched functions, which no engine sees: functions are replaced while a block is open.

Invariant: an unwatched call runs the function with its own arguments, and without hooks.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.compiler import is_compiling

from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.hook import Level
from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out, keep_out_of_frame, tracing
from opintercept._engines.modes import run_hooked
from opintercept._engines.patches import MISSING, Replaced, Replacements
from opintercept._engines.scope import UNKNOWN, Scope, Watch, state
from opintercept._ops import patched_functions
from opintercept._ops.table import ROWS, row_of

# Private. At dispatch level hooks run below autograd and autocast, and the function itself as the program has called
# it. Where a torch lacks them, autograd records what hooks compute from the operands of a patched function.
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)
_as_before: Any = getattr(torch._C, "_ForceDispatchKeyGuard", None)
_included: Any = getattr(torch._C, "_dispatch_tls_local_include_set", None)
_excluded: Any = getattr(torch._C, "_dispatch_tls_local_exclude_set", None)
_below_autocast: Any = getattr(torch._C, "_DisableAutocast", None)
_HAS_GUARDS = None not in (_below_autograd, _below_autocast, _as_before, _included, _excluded)
# Private. Where it is missing, hooks also run for tensors that have shapes only.
_keys_of: Any = getattr(torch._C, "_dispatch_keys", None)

_wrappers: dict[tuple[str, int], tuple[Any, Any]] = {}  # what was at the place of a name, and what we put there
_ours: dict[int, tuple[str, Any, Any]] = {}  # the same with the name, by the identity of what we put there
_patches: dict[tuple[int, str], Replaced] = {}
_last: dict[str, tuple[Any, list[Replaced]]] = {}  # what `_in_modules` has found, and what tells whether it still holds
_told: set[str] = set()


def _find() -> Iterable[Replaced]:
    found: list[Replaced] = []
    values: dict[int, tuple[str, Any, Any]] = {}  # by identity, what is put where
    nested = False
    for name in ROWS.patched:
        target = patched_functions.locate(name)
        if target is None or not patched_functions.can_replace(target):
            continue
        original, wrapper = _wrapped(name, target.value)
        if patched_functions.is_kernel(target.value):
            run = vars(target.value).get("run", MISSING)
            found.append(_patch(name, vars(target.value), "run", MISSING if run is wrapper else run, wrapper))
        elif isinstance(target.owner, type):
            found.append(_patch(name, target.owner, target.attribute, original, wrapper))
        else:
            values.setdefault(id(original), (name, original, wrapper))
            values.setdefault(id(wrapper), (name, original, wrapper))
            nested = nested or target.value is wrapper
    return [*found, *_in_modules(values, "nested" if nested else "entering")]


def _patch(name: str, owner: Any, attribute: str, original: Any, replacement: Any) -> Replaced:
    """The patch of a place, the same as last time if it is the same."""
    patch = _patches.get((id(owner), attribute))
    if patch is None or patch.owner is not owner or patch.replacement is not replacement:
        patch = _patches[id(owner), attribute] = Replaced(name, owner, attribute, original, replacement)
    return patch


def _copies() -> Iterable[Replaced]:
    return _in_modules(_ours, "leaving")


def _in_modules(values: dict[int, tuple[str, Any, Any]], when: str) -> list[Replaced]:
    """The places in modules where one of these values is, by identity.

    Looking through a process's 100,000 names takes 10 ms. It is left out if each module has as many names, each value
    has as many references as when this was asked at the same point of a block, and what was found is still there. A
    reference that moves from a list into a module is noticed by the first, unless it takes the place of another value.
    """
    spaces = [patched_functions.attributes(module) for module in tuple(sys.modules.values())] if values else []
    sizes = tuple(map(len, spaces))
    counts = {place: (sys.getrefcount(one), sys.getrefcount(other)) for place, (_, one, other) in values.items()}
    before, places = _last.get(when, (None, []))
    if before == (sizes, counts) and all(patch.is_known() for patch in places):
        return places
    found: list[Replaced] = []
    for namespace in spaces:
        if not values.keys().isdisjoint(map(id, namespace.values())):  # in C
            for attribute, value in tuple(namespace.items()):
                if id(value) in values:
                    name, original, wrapper = values[id(value)]
                    found.append(_patch(name, namespace, attribute, original, wrapper))
    _last[when] = (sizes, counts), found
    return found


def _wrapped(name: str, value: Any) -> tuple[Any, Any]:
    """What is at a place without us, and what we put there. The same value gets the same wrapper, for Dynamo's guards.

    Args:
        name: The name of the function.
        value: What is there now, which may be ours already.
    """
    if id(value) in _ours:
        return _ours[id(value)][1:]
    known = _wrappers.get((name, id(value)))
    if known is not None:
        return known
    function = patched_functions.function_of(value)
    patched_functions.NAMES[function] = name
    row_of.cache_clear()  # it may have looked before the module was imported
    wrapper: Any
    if patched_functions.is_kernel(value):
        wrapper = _kernel(name, function, value)
    elif isinstance(value, (staticmethod, classmethod)):
        wrapper = type(value)(_function(name, function, value.__func__))
    else:
        wrapper = _function(name, function, value)
        if "." in name.partition(":")[2] and not hasattr(type(value), "__get__"):
            wrapper = staticmethod(wrapper)  # a function in C as a method is called without the object
    _ours[id(wrapper)] = name, value, wrapper
    _wrappers[name, id(value)] = value, wrapper
    return value, wrapper


def _function(name: str, function: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def patched(*args: Any, **kwargs: Any) -> Any:
        # Dynamo traces this into the graph, and must find the plain call alone, as in `function_mode`.
        if is_compiling():
            return original(*args, **kwargs)
        return _call(name, function, original, args, kwargs)

    keep_out_of_frame(patched)
    return functools.wraps(original)(patched)


def _kernel(name: str, function: Any, kernel: Any) -> Callable[..., Any]:
    launch = kernel.run

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

    try:
        if not above:
            return run_hooked(scope, watch, function, args, kwargs, run)
        with _below_autograd(), _below_autocast():
            return run_hooked(scope, watch, function, args, kwargs, run)
    finally:
        for pipeline in watch.pipelines:
            if pipeline.links is not None:
                pipeline.links.abandon()  # a hook may have raised before the function ran


# Tensors with these keys have shapes only, or stand for others, as in `kernels`.
_UNREAL = ("Meta", "Functionalize", "FuncTorchBatched", "FuncTorchGradWrapper")


def _is_real(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    for value in _values((*args, *kwargs.values())):
        if isinstance(value, (torch.fx.Proxy, fake)):
            return False
        if isinstance(value, torch.Tensor) and _keys_of is not None:
            keys = _keys_of(value)
            if any(keys.has(getattr(torch._C.DispatchKey, name)) for name in _UNREAL):
                return False
    return True


def _values(arguments: Iterable[Any], depth: int = 3) -> Iterator[Any]:
    """The arguments, and what lists among them hold."""
    for value in arguments:
        yield value
        if depth and isinstance(value, (list, tuple)):
            yield from _values(value, depth - 1)


def _displaced(patch: Replaced) -> None:
    target = patched_functions.locate(patch.name)
    if target is None or not (patch.owner is target.owner or patch.owner is patched_functions.attributes(target.owner)):
        return  # another variable, which happened to have the function
    if patch.name not in _told:
        _told.add(patch.name)
        warnings.warn(
            f"other code has replaced {patch.name} while a block was open: it stays as it is, {patch.now()!r}, and the "
            "block has not seen its calls unless they reached the function; undo such patches before the block ends",
            OpInterceptWarning,
            stacklevel=caller_level(),
        )


PATCHES = Replacements(_find, _copies, _displaced)
"""The functions that are declared, which are replaced while a block is open."""
