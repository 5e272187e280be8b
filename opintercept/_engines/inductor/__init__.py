"""The kernels that Inductor generates: blocks see each launch that a wrapper makes, at dispatch level.

A wrapper has its kernels among its globals, and they are replaced there while a block is open, see `patches`.
Invariant: nothing is compiled or read anew for a block, no kernel runs otherwise than without it, and a wrapper that
runs outside of blocks is as Inductor has made it.
"""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import CodeType, ModuleType
from typing import Any

import torch

from opintercept._core import locks
from opintercept._core.fork import in_child
from opintercept._engines import scope as _scope
from opintercept._engines.base import Watcher
from opintercept._engines.dynamo import keep_out
from opintercept._engines.inductor.provenance import graph_that_loads, tell
from opintercept._engines.inductor.written import offer
from opintercept._engines.modes import run_hooked
from opintercept._engines.patches import Place, Replaced, Replacements, Wrapped
from opintercept._engines.scope import UNKNOWN, Scope, state
from opintercept._ops.generated import GeneratedKernel
from opintercept._origin.wrappers import multiplies, wrapper_at

MODULE = "torch._inductor.codecache"
"""The module that loads generated wrappers. It is not imported for a block."""

COMPILER = "torch._inductor.compile_fx"
"""The module that compiles graphs. Neither is it."""

LEVEL = "dispatch"

# Private, as in `patched_functions`. Where a torch lacks them, autograd may record what hooks compute from operands.
_below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
_below_autocast: Any = getattr(torch._C, "_DisableAutocast", nullcontext)

# Kernels go by these names among a wrapper's globals, or are objects of these classes: kernels of the program have
# names of its own.
_NAMES = re.compile(r"(?:cpp|triton|cuda|cutlass|cutedsl|pallas|halide|multi_kernel)_")
_CLASSES = {"CachingAutotuner", "DebugAutotuner", "MultiKernelCall", "SizeHintMultiKernelCall"}
# Wrappers are modules of this package, also those of which Inductor's cache has no more note.
_PREFIX = "torch._inductor.runtime.compile_tasks."


class _WrapperModule:
    """A generated module with kernels.

    Args:
        module: The module.
    """

    def __init__(self, module: ModuleType) -> None:
        self._file = str(module.__file__)
        self._globals = vars(module)
        self._launches: dict[int, GeneratedKernel] | None = None
        # All its kernels, and those that may multiply.
        self.kernels = [
            self._patch(name, value) for name, value in tuple(vars(module).items()) if _is_kernel(name, value)
        ]
        self.products = [patch for patch in self.kernels if multiplies(patch.attribute)]

    def launches(self) -> dict[int, GeneratedKernel]:
        """Its launches, by line."""
        if self._launches is None:
            source = wrapper_at(self._file)
            offer(source)
            self._launches = source.launches
        return self._launches

    def _patch(self, name: str, kernel: Any) -> Replaced:
        replacement: Any = _Launcher(self, name, kernel) if hasattr(kernel, "run") else self.seen(name, kernel)
        return Replaced(name, self._globals, name, kernel, replacement)

    def seen(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a kernel with the hooks of the blocks that watch it, or notes it for them."""
        in_python = self._seen_in_python(name, launch)
        return in_python if launcher is None else launcher(in_python, launch, self._globals, self._launch_at)

    def _launch_at(self, code: CodeType, instruction: int) -> GeneratedKernel | None:
        lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line is not None)
        return self.launches().get(next(lines, 0))

    def _seen_in_python(self, name: str, launch: Callable[..., Any]) -> Callable[..., Any]:
        namespace, current, frame_of = self._globals, _scope.current, sys._getframe
        launches = self.launches

        def launched(*args: Any, **options: Any) -> Any:
            scope = current()
            if scope.hidden or not (scope.blocks or scope.everywhere.blocks):
                if scope.owner is None:
                    state.unseen += 1
                return launch(*args, **options)
            caller = frame_of(1)
            kernel = launches().get(caller.f_lineno) if caller.f_globals is namespace else None
            del caller
            if kernel is None:
                _tell(name, scope)
                return launch(*args, **options)
            watch = scope.tables[LEVEL].get(kernel, UNKNOWN)
            if watch is UNKNOWN:
                watch = scope.watch(LEVEL, kernel)
            if watch is None:
                return launch(*args, **options)
            invoke = functools.partial(launch, **options) if options else launch  # a stream is no argument of a kernel
            with _below_autograd(), _below_autocast():
                return run_hooked(scope, watch, kernel, args, {}, invoke)

        return keep_out(launched)


class _Launcher:
    """Stands for a kernel with a method `run`, of Triton, in a wrapper's globals."""

    __slots__ = ("__weakref__", "_kernel", "run")

    def __init__(self, wrapper: _WrapperModule, name: str, kernel: Any) -> None:
        self._kernel = kernel

        def run(*args: Any, **options: Any) -> Any:
            return kernel.run(*args, **options)  # a kernel may replace its own `run`

        self.run = wrapper.seen(name, run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _tell(name: str, scope: Scope) -> None:
    """Count a launch that a wrapper makes and that its text does not tell."""
    for watcher in scope.active():
        if watcher in scope.inside or watcher.pipeline.level != LEVEL:
            continue
        if not watcher.only_products or multiplies(name):
            watcher.pipeline.count_unseen(f"inductor::{name}")


def _is_wrapper(namespace: dict[str, Any]) -> bool:
    """Whether a generated module is a graph's wrapper.

    Others have one kernel: the wrapper gets it from there, or Inductor times it, some with a `call` for that.
    """
    return namespace.get("__file__") is not None and "call" in namespace and "benchmark_all_configs" not in namespace


def _is_kernel(name: str, value: Any) -> bool:
    if any(kind.__name__ in _CLASSES for kind in type(value).__mro__):
        return True
    return _NAMES.match(name) is not None and (callable(value) or hasattr(value, "run"))


launcher: Callable[..., Callable[..., Any]] | None = None
"""Makes what notes launches, see `_engines/compiled/launches.cpp`; None until compiled kernels are loaded."""

_wrappers: weakref.WeakKeyDictionary[ModuleType, _WrapperModule] = weakref.WeakKeyDictionary()
_seen: tuple[int, list[weakref.ref[ModuleType]]] = (0, [])  # how many modules there were, and those in Inductor's cache
_made_with: Any = None  # the `launcher` with which those of `_wrappers` were made
_users: dict[object, Watcher] = {}


def _cache() -> Any:
    # Private. Where a torch lacks it, the kernels of its wrappers are not seen.
    return getattr(sys.modules.get(MODULE), "PyCodeCache", None)


def _look() -> None:
    """Take in the wrappers that have been loaded since the last look."""
    global _seen, _made_with
    if _made_with is not launcher and not PATCHES.in_place:
        _wrappers.clear()
        _seen, _made_with = (0, []), launcher
    cached = [module for module in getattr(_cache(), "modules", ()) if isinstance(module, ModuleType)]
    count, known = _seen
    if count == len(sys.modules) and cached == [reference() for reference in known]:
        return
    others = [module for name, module in tuple(sys.modules.items()) if name.startswith(_PREFIX)]
    for module in (*cached, *others):
        if isinstance(module, ModuleType) and module not in _wrappers and _is_wrapper(vars(module)):
            _wrappers[module] = _WrapperModule(module)
    _seen = len(sys.modules), list(map(weakref.ref, cached))


def _find() -> Iterable[Replaced]:
    _look()
    everything = not all(watcher.only_products for watcher in _users.values())
    for wrapper in tuple(_wrappers.values()):
        yield from wrapper.kernels if everything else wrapper.products


PATCHES = Replacements(_find)
"""The kernels in the globals of wrappers."""


def _places() -> Iterator[Place]:
    cache = _cache()
    if isinstance(vars(cache).get("load_by_key_path") if cache is not None else None, classmethod):
        yield f"{MODULE}.PyCodeCache.load_by_key_path", cache, "load_by_key_path", _loading
    # The second is private, and compiles backward passes. Where a torch lacks it, blocks see what Inductor times there.
    compiler = sys.modules.get(COMPILER)
    for name in ("compile_fx", "fx_codegen_and_compile"):
        if callable(getattr(compiler, name, None)):
            yield f"{COMPILER}.{name}", compiler, name, _compiling


LOADING = Replacements(Wrapped(_places))
"""What compiles a graph and loads its wrapper, so that those which come while a block is open are seen, too."""


def _compiling(original: Any) -> Any:
    @functools.wraps(original)
    def compiling(*args: Any, **kwargs: Any) -> Any:
        with _scope.hidden():  # it tries kernels on tensors of its own
            return original(*args, **kwargs)

    return keep_out(compiling)


def _loading(original: Any) -> Any:
    load = original.__func__

    @functools.wraps(load)
    def load_by_key_path(cls: type, *args: Any, **kwargs: Any) -> Any:
        module = load(cls, *args, **kwargs)
        graph = graph_that_loads()
        if graph is not None and getattr(module, "__file__", None):
            tell(graph, wrapper_at(str(module.__file__)))
        come()
        return module

    return classmethod(keep_out(load_by_key_path))


def enter(user: object, watcher: Watcher) -> None:
    """Show `watcher` the launches of generated kernels, until `user` leaves."""
    if watcher.pipeline.level != LEVEL:
        return
    with locks.shared:
        _users[user] = watcher
    LOADING.enter(user)
    PATCHES.enter(user)


def leave(user: object) -> None:
    """End an `enter`, as far as it came. Can be repeated."""
    with locks.shared:
        _users.pop(user, None)
    try:
        LOADING.leave(user)
    finally:
        PATCHES.leave(user)


def come() -> None:
    """Show the blocks that are open the wrappers that have come."""
    with locks.shared:
        for user in tuple(_users):
            LOADING.enter(user)
            PATCHES.enter(user)


@in_child
def _forget_parent() -> None:
    _users.clear()
