"""Operators and functions that come while blocks are open: libraries that load, `torch.library`, `register_op`.

Invariant: what brings them is wrapped only while a block is open, and a call that follows pays nothing. Operators get
their kernels in the thread that brings them, before it can call them: nobody runs an operator that has just come.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Iterable
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

import torch

from opintercept._core import locks
from opintercept._core.after_import import AfterImport
from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._core.fork import in_child
from opintercept._engines import foreign, inductor, launches, patched_functions
from opintercept._engines.base import Watcher
from opintercept._engines.dynamo import keep_out
from opintercept._engines.kernels import KERNELS
from opintercept._engines.patches import Place
from opintercept._engines.scope import state
from opintercept._ops import packs, register
from opintercept._ops.patched_functions import is_patched
from opintercept._ops.select import split
from opintercept._ops.table import ROWS, exact, overloads

_users: dict[object, Watcher] = {}  # blocks and coroutines


def enter(user: object, watcher: Watcher) -> None:
    """Let `watcher` watch what there is, and what comes until `user` leaves.

    Raises:
        ValueError: An operator that it watches by name is not loaded any more.
    """
    with locks.shared:
        _users[user] = watcher
        _IMPORTS.begin()
        if gone := KERNELS.forget_unloaded():
            _follow(gone, gone)
        watcher.renew()


def leave(user: object) -> None:
    """End an `enter`. Can be repeated."""
    with locks.shared:
        _users.pop(user, None)
        if not _users:
            _IMPORTS.end()


def come(names: Iterable[str] = (), gone: Iterable[str] = (), functions: bool = False) -> None:
    """Show what has come to the blocks that are open.

    Args:
        names: Overloads that were defined, got kernels or were declared.
        gone: Those among them that blocks cannot watch as before.
        functions: Whether functions that are declared may have come.
    """
    if not _users:
        return
    with locks.shared:
        gone = KERNELS.forget_unloaded().union(gone)
        _follow(gone.union(names), gone, functions)


def _follow(names: frozenset[str], gone: frozenset[str], functions: bool = False) -> None:
    foreign.arrive(names, gone)
    loaded = frozenset(overload._name for name in names for overload in overloads(exact(name)))
    changed = [watcher for watcher in dict.fromkeys(_users.values()) if watcher.follow(loaded, gone)]
    for user, watcher in tuple(_users.items()):
        if watcher in changed:
            watcher.engine.extend(user, watcher, loaded)
        if functions and watcher.patched:
            patched_functions.PATCHES.enter(user)
    if changed or gone:
        with locks.shared:
            state.watch_everywhere(state.everywhere.blocks)  # threads ask anew which blocks see an operator


def entries() -> list[Place]:
    """What brings operators: the name, the class, the attribute, and a wrapper."""
    library = torch.library.Library
    return [
        ("torch.library.Library.define", library, "define", functools.partial(_then, _defined)),
        ("torch.library.Library.impl", library, "impl", _implement),
        ("torch.library.Library._destroy", library, "_destroy", functools.partial(_then, lambda library: come())),
        # `torch.ops.load_library` uses it.
        ("ctypes.CDLL", ctypes.CDLL, "__init__", functools.partial(_then, lambda *args, **kwargs: _loaded())),
        ("importlib.machinery", ExtensionFileLoader, "exec_module", functools.partial(_then, _executed)),
    ]


def _then(notice: Callable[..., None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        notice(*args, **kwargs)
        return result

    return keep_out(run)


def _defined(library: torch.library.Library, schema: str, *args: Any, **kwargs: Any) -> None:
    come([f"{library.ns}::{schema.partition('(')[0].strip()}"])


# Keys at which nothing is computed. A custom operator has a kernel at each of them.
_ABOVE = ("AD", "Auto", "Meta")


def _implement(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def impl(self: torch.library.Library, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        name = str(getattr(op_name, "_name", op_name))  # torch refuses what is no overload
        name = name if "::" in name else f"{self.ns}::{name}"
        key = dispatch_key or self.dispatch_key
        chooses_device = key == "BackendSelect"
        if chooses_device:
            if name in KERNELS.installed and any(map(functools.partial(_asks_for, name), tuple(_users.values()))):
                warnings.warn(
                    f"blocks do not see {name} from now on: a kernel of other code takes the place of theirs, the "
                    "dispatch key BackendSelect; use engine='mode'",
                    OpInterceptWarning,
                    stacklevel=caller_level(),
                )
            KERNELS.withdraw(name)  # torch would warn that its place was taken
        try:
            return original(self, op_name, fn, dispatch_key, **options)
        finally:
            if not key.startswith(_ABOVE):
                come([name], gone=[name] if chooses_device else ())

    return keep_out(impl)


def _asks_for(name: str, watcher: Watcher) -> bool:
    """Whether a block names an operator. Of one that it has by its family, the engine tells."""
    entries = split(watcher.ops).entries
    named = [entry if isinstance(entry, str) else str(entry).replace(".", "::", 1) for entry in entries]
    return name.partition(".")[0] in [each.partition(".")[0] for each in named]


def _executed(loader: Any, module: ModuleType) -> None:
    if foreign.may_register(module.__name__):
        _loaded()


def _loaded() -> None:
    if _users and (names := foreign.loaded()):
        come(names)


def _declared(key: str) -> None:
    if is_patched(key):
        come(functions=True)
    else:
        come([overload._name for overload in overloads(key)])


register.on_declared = _declared


def _waits_for(module: str) -> bool:
    packs.load((), (module,))  # says which functions to wait for
    return module in (launches.MODULE, inductor.MODULE, inductor.COMPILER) or any(
        name.partition(":")[0] == module for name in ROWS.patched
    )


def _imported(name: str) -> None:
    if _users:
        register.recheck_offered(name)
        with locks.shared:
            for user in _users:
                launches.enter(user)
        inductor.come()
        come(functions=True)


_IMPORTS = AfterImport(_waits_for, _imported)
"""Waits for modules with functions that are declared, and for those of Triton and Inductor."""


@in_child
def _forget_parent() -> None:
    for user in tuple(_users):
        leave(user)
