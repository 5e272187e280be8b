"""What the running thread intercepts: the blocks that it has entered, and those entered for all threads.

Invariant: a Scope is never mutated (its tables only remember what they worked out), so autograd's device
threads may share it. It lives in torch's own thread-local state, which autograd carries into them.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import torch

from opintercept import _origin
from opintercept._errors import OpInterceptError
from opintercept._ops import Op, row_of
from opintercept._pipeline import Pipeline

Engine = Literal["function", "mode", "kernel"]

# Private; `require` turns a torch without them into one clear error before any state has changed.
_has = getattr(torch._C, "_is_key_in_tls", None)
_get: Callable[[str], Any] = getattr(torch._C, "_get_obj_in_tls", None)  # type: ignore[assignment]
stash: Callable[[str, Any], None] = getattr(torch._C, "_stash_obj_in_tls", None)  # type: ignore[assignment]
KEY = "opintercept"


def require(engine: str, instead: str, needed: dict[str, Any]) -> None:
    """Refuse to run on a torch that lacks the private API that an engine is built on.

    Raises:
        OpInterceptError: Naming what is missing, the torch version and the engine to use instead.
    """
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        raise OpInterceptError(
            f"the {engine} engine needs {', '.join(missing)}, which torch {torch.__version__} does not have; {instead}"
        )


def require_scope(engine: str, instead: str) -> None:
    """Refuse a torch without the thread-local stash, which every engine needs."""
    require(
        engine,
        instead,
        {
            "torch._C._is_key_in_tls": _has,
            "torch._C._get_obj_in_tls": _get,
            "torch._C._stash_obj_in_tls": stash,
        },
    )


class Watcher:
    """What an interceptor shows to the engines.

    Attributes:
        pipeline: Its hooks.
        engine: The engine that feeds it.
        keys: What it watches, overloads by name, functions as they are; None for everything.
        everywhere: Whether it watches all threads.
    """

    __slots__ = ("engine", "everywhere", "keys", "pipeline")

    def __init__(
        self, pipeline: Pipeline, engine: Engine, keys: frozenset[Any] | None, everywhere: bool = False
    ) -> None:
        self.pipeline = pipeline
        self.engine = engine
        self.keys = keys
        self.everywhere = everywhere

    def watches(self, key: Any) -> bool:
        """Whether it wants to see `key`."""
        return self.keys is None or key in self.keys


class Block:
    """One `with` block of a watcher: entered, or paused.

    Attributes:
        order: Grows with each block of the process.
        mode: The torch mode that feeds the block, where its engine is one.
        task: The autograd graph task that it was entered in, -1 for none.
    """

    __slots__ = ("mode", "order", "pauses", "task", "watcher")

    _orders = itertools.count()

    def __init__(self, watcher: Watcher, *, pauses: bool = False, mode: Any = None) -> None:
        self.order = next(Block._orders)
        self.watcher = watcher
        self.pauses = pauses
        self.mode = mode
        self.task: int = _origin.graph_task()


class Everywhere:
    """The blocks that watch all threads. Replaced, never mutated, and also replaced in a forked child,
    so that every thread that finds another one than it knew works its scope out anew."""

    __slots__ = ("blocks", "pid")

    def __init__(self, blocks: tuple[Block, ...] = ()) -> None:
        self.blocks = blocks
        self.pid = os.getpid()


class _State:
    __slots__ = ("everywhere", "idle", "told")

    everywhere: Everywhere
    idle: Scope  # of a thread that has entered nothing
    told: Callable[[bool], None] | None  # whether any block watches all threads; compiled kernels ask without the GIL

    def watch_everywhere(self, blocks: tuple[Block, ...]) -> None:
        """Replace the blocks that watch all threads."""
        self.everywhere = Everywhere(blocks)
        self.idle = Scope()
        if self.told is not None:
            self.told(bool(blocks))


state = _State()
state.told = None


class Watch:
    """Who sees one operator in one scope, and the scopes to be in meanwhile."""

    __slots__ = ("hidden", "inner", "pipelines", "row")

    def __init__(self, row: Op, pipelines: tuple[Pipeline, ...], hidden: Scope, inner: Scope) -> None:
        self.row = row
        self.pipelines = pipelines
        self.hidden = hidden
        self.inner = inner


UNKNOWN: Any = object()  # what a scope's table answers for what it has not worked out yet


class Scope:
    """The blocks of a thread, innermost last.

    Attributes:
        blocks: Every block entered and not left.
        live: How many of the first blocks count for nothing: a parent process entered them.
        hidden: In a hook: nothing is seen, whatever is entered.
        inside: Watchers whose operator is running, and which do not see its inner steps.
        floor: How many of the first blocks may not be left here: a hook runs inside of them.
        owner: The thread that entered the blocks; autograd's device threads have the scope of who called backward.
    """

    __slots__ = (
        "_hidden",
        "blocks",
        "everywhere",
        "floor",
        "functions",
        "hidden",
        "inside",
        "kernels",
        "live",
        "overloads",
        "owner",
    )

    def __init__(
        self,
        blocks: tuple[Block, ...] = (),
        live: int = 0,
        *,
        hidden: bool = False,
        inside: frozenset[Watcher] = frozenset(),
        floor: int = 0,
        owner: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.live = live
        self.hidden = hidden
        self.inside = inside
        self.floor = floor
        self.everywhere = state.everywhere
        self.kernels: dict[Any, Watch | None] = {}
        self.overloads: dict[Any, Watch | None] = {}
        self.functions: dict[Any, Watch | None] = {}
        self._hidden: Scope | None = None
        self.owner = owner

    def with_blocks(self, blocks: tuple[Block, ...]) -> Scope:
        """This scope with other blocks."""
        live = min(self.live, len(blocks))
        owner = self.owner or threading.get_ident()
        return Scope(blocks, live, hidden=self.hidden, inside=self.inside, floor=self.floor, owner=owner)

    def refreshed(self) -> Scope:
        """This scope as it is now that the blocks for all threads are others, or this is another process."""
        forked = self.everywhere.pid != state.everywhere.pid
        live = len(self.blocks) if forked else self.live
        return Scope(self.blocks, live, hidden=self.hidden, inside=self.inside, floor=self.floor, owner=self.owner)

    def while_hooks_run(self) -> Scope:
        """The scope for hooks: their own operators are seen by nobody."""
        if self._hidden is None:
            self._hidden = Scope(self.blocks, self.live, hidden=True, floor=len(self.blocks), owner=self.owner)
        return self._hidden

    def active(self) -> list[Watcher]:
        """The watchers that see calls here, each once, in the order in which they were entered."""
        if self.hidden:
            return []
        blocks = self.blocks[self.live :]
        if self.everywhere.blocks:
            merged = {id(block): block for block in (*blocks, *self.everywhere.blocks)}
            blocks = tuple(sorted(merged.values(), key=lambda block: block.order))
        paused = {block.watcher for block in blocks if block.pauses}
        return list(dict.fromkeys(b.watcher for b in blocks if b.watcher not in paused))

    def watch(self, engine: Engine, key: Any) -> Watch | None:
        """Who sees `key`, or None; remembered in the engine's table."""
        table = {"kernel": self.kernels, "mode": self.overloads, "function": self.functions}[engine]
        watch = table[key] = self._watch(engine, key)
        return watch

    def _watch(self, engine: Engine, key: Any) -> Watch | None:
        if getattr(key, "__name__", "") in ("__get__", "__set__", "__delete__"):
            return None  # reading an attribute of a tensor, which function modes see too, is no operator
        active = self.active()
        found = [w for w in active if w.engine == engine and w not in self.inside and w.watches(key)]
        if not found:
            return None
        hidden = self.while_hooks_run()
        if engine == "kernel" and len(active) == len(found) and key.startswith("aten::"):
            inner = hidden  # saves two switches; no Python runs in there that could enter a block
        else:
            # Those who see this operator do not see its inner steps, the others do.
            inside = self.inside | set(found)
            inner = Scope(self.blocks, self.live, inside=inside, floor=len(self.blocks), owner=self.owner)
        return Watch(row_of(key), tuple(w.pipeline for w in found), hidden, inner)

    def position(self, watcher: Watcher, pauses: bool) -> int | None:
        """Where the innermost such block is that may be left here, or None."""
        for position in range(len(self.blocks) - 1, self.floor - 1, -1):
            block = self.blocks[position]
            if block.watcher is watcher and block.pauses is pauses:
                return position
        return None


state.watch_everywhere(())


def _what_takes() -> Callable[[Any], Any] | None:
    if None in (_has, _get, stash):
        return None
    held = state.idle
    before = sys.getrefcount(held)
    stash(KEY, held)
    if sys.getrefcount(held) > before:
        return None
    function = ctypes.pythonapi.Py_IncRef
    function.argtypes, function.restype = [ctypes.py_object], None
    function(held)
    return function


# What a scope must be handed to before each time that it is stashed, or None: torch 2.11 lets go of a reference
# that it never took. Apart from `stash`, since what restores a scope must be one call that no signal can split.
take: Callable[[Any], Any] | None = _what_takes()


_holders: set[str] = set()  # native threads that have had a scope


def put(scope: Scope) -> None:
    """Make `scope` that of the running thread."""
    _holders.add(str(threading.get_native_id()))
    if len(_holders) > 1000:
        _holders.intersection_update(native_threads())
    if take is not None:
        take(scope)
    stash(KEY, scope)


def native_threads() -> frozenset[str]:
    """The operating system's threads of the process; only Linux tells."""
    try:
        return frozenset(os.listdir("/proc/self/task"))
    except OSError:
        return frozenset()


def _let_threads_end() -> None:
    # A thread gives its scope back, which takes the GIL, after Python has joined it. One that asks for the GIL of
    # an interpreter that is going down aborts the process.
    alive = {str(thread.native_id) for thread in threading.enumerate()}
    end = time.monotonic() + 0.1  # threads of torch's own stay
    while (_holders - alive) & native_threads() and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(_let_threads_end)


def current() -> Scope:
    """The scope of the running thread."""
    scope: Scope = _get(KEY) if _has is not None and _has(KEY) else state.idle
    if scope.everywhere is not state.everywhere:
        scope = scope.refreshed()
        put(scope)
    return scope


def owner() -> int | None:
    """The thread on whose behalf this one runs; None if it has no scope."""
    return _get(KEY).owner if _has(KEY) else None  # type: ignore[misc]


def _forget_parent() -> None:
    state.watch_everywhere(())
    _holders.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forget_parent)
