"""What the running thread, or its task, intercepts: the blocks that it has entered, and those for all threads.

Invariant: a Scope is never mutated (its tables only remember what they worked out), so autograd's device
threads may share it. It lives in torch's own thread-local state, which autograd carries into them. The blocks of a
task live in its context, and a scope that was made for another task is made anew.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from opintercept._engines.base import Engine, Keys
from opintercept._engines.quiet import native_threads
from opintercept._entry import Entry
from opintercept._fork import in_child
from opintercept._ops.op import Op
from opintercept._ops.table import row_of
from opintercept._origin.links import graph_task
from opintercept._pipeline import Pipeline

# Torch's own thread-local state, which autograd carries into its threads. Private; every engine needs it.
has: Any = getattr(torch._C, "_is_key_in_tls", None)
get: Callable[[str], Any] = getattr(torch._C, "_get_obj_in_tls", None)  # type: ignore[assignment]
stash: Callable[[str, Any], None] = getattr(torch._C, "_stash_obj_in_tls", None)  # type: ignore[assignment]
KEY = "opintercept"
NEEDS: dict[str, Any] = {
    "torch._C._is_key_in_tls": has,
    "torch._C._get_obj_in_tls": get,
    "torch._C._stash_obj_in_tls": stash,
}


class Watcher:
    """What an interceptor shows to the engines.

    Attributes:
        pipeline: Its hooks.
        engine: The engine that feeds it.
        keys: What it watches, overloads by name, functions as they are; None for everything.
        everywhere: Whether it watches all threads.
    """

    __slots__ = ("engine", "everywhere", "keys", "pipeline")

    def __init__(self, pipeline: Pipeline, engine: Engine, keys: Keys, everywhere: bool = False) -> None:
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
        entry: What ends the block.
        mode: The torch mode that feeds the block, where its engine is one.
        graph_task: The autograd graph task that it was entered in, -1 for none.
        pid: The process that entered it. In a forked child, the parent's blocks count for nothing.
        in_task: Whether it was entered in a task of an event loop, and so belongs to the task.
        left: Whether it is over, wherever a scope still has it.
    """

    __slots__ = ("entry", "graph_task", "in_task", "left", "mode", "order", "pauses", "pid", "watcher")

    _orders = itertools.count()

    def __init__(self, watcher: Watcher, entry: Entry, *, pauses: bool = False) -> None:
        self.order = next(Block._orders)
        self.watcher = watcher
        self.entry = entry
        self.pauses = pauses
        self.mode: Any = None
        self.graph_task: int = graph_task()
        self.pid = state.everywhere.pid
        self.in_task = _in_task()
        self.left = False


def _in_task() -> bool:
    """Whether an event loop runs in this thread: asyncio's, which anyio uses too, or trio's."""
    running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # may be half imported
    if running_loop is not None and running_loop() is not None:
        return True
    trio = sys.modules.get("trio.lowlevel")
    return trio is not None and bool(trio.in_trio_run())


class Carried:
    """The blocks of a task. Its context carries them, and hands them on to the tasks and threads that it starts."""

    __slots__ = ("blocks", "scope")

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self.scope: Scope | None = None  # that of the task when it ran last


CARRIED: ContextVar[Carried | None] = ContextVar("opintercept", default=None)
carried: Callable[[], Carried | None] = CARRIED.get


class Everywhere:
    """The blocks that watch all threads. Replaced, never mutated, and also replaced in a forked child,
    so that every thread that finds another one than it knew works its scope out anew."""

    __slots__ = ("blocks", "pid")

    def __init__(self, blocks: tuple[Block, ...] = ()) -> None:
        self.blocks = blocks
        self.pid = os.getpid()


class _State:
    __slots__ = ("everywhere", "idle", "in_tasks", "told", "unseen", "unseen_by_compiled")

    everywhere: Everywhere
    idle: Scope  # of a thread that has entered nothing
    in_tasks: set[Block]
    # Whether a thread that has entered nothing may see calls; compiled kernels ask without the GIL.
    told: Callable[[bool], None] | None
    # Calls of watched operators in threads that have entered nothing: at kernels in Python, and at compiled ones.
    unseen: int
    unseen_by_compiled: Callable[[], int]

    def watch_everywhere(self, blocks: tuple[Block, ...]) -> None:
        """Replace the blocks that watch all threads."""
        self.everywhere = Everywhere(blocks)
        self.idle = Scope()
        self.tell()

    def tell(self) -> None:
        """Say to compiled kernels what has changed."""
        if self.told is not None:
            self.told(bool(self.everywhere.blocks or self.in_tasks))


state = _State()
state.told = None
state.in_tasks = set()
state.unseen = 0
state.unseen_by_compiled = int  # none until there are some


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
    """The blocks that see what a thread runs now, in the order in which they were entered.

    Attributes:
        blocks: Those that the thread has entered, and those of the running task.
        carried: The task's, as its context has them.
        hidden: In a hook: nothing is seen, whatever is entered.
        inside: Watchers whose operator is running, and which do not see its inner steps.
        floor: Blocks whose order is below may not be left here: a hook runs inside of them.
        owner: The thread that entered the blocks; autograd's device threads have the scope of who called backward.
        tables: Who sees each operator, by feed and by key, as far as that was worked out.
    """

    __slots__ = (
        "_hidden",
        "blocks",
        "carried",
        "everywhere",
        "floor",
        "hidden",
        "inside",
        "owner",
        "tables",
    )

    def __init__(
        self,
        blocks: tuple[Block, ...] = (),
        carried: Carried | None = None,
        *,
        hidden: bool = False,
        inside: frozenset[Watcher] = frozenset(),
        floor: int = 0,
        owner: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.carried = carried
        self.hidden = hidden
        self.inside = inside
        self.floor = floor
        self.everywhere = state.everywhere
        self.tables: defaultdict[str, dict[Any, Watch | None]] = defaultdict(dict)
        self._hidden: Scope | None = None
        self.owner = owner

    def with_blocks(self, blocks: tuple[Block, ...], carried: Carried | None) -> Scope:
        """This scope with other blocks."""
        owner = self.owner or threading.get_ident()
        return Scope(blocks, carried, hidden=self.hidden, inside=self.inside, floor=self.floor, owner=owner)

    def refreshed(self) -> Scope:
        """This scope for the task that runs now, and the blocks that are still there."""
        now = carried()
        if now is None and self.owner not in (None, threading.get_ident()):
            now = self.carried  # autograd lent it to a thread that runs no tasks
            if self.everywhere is state.everywhere:
                return self
        mine = (block for block in self.blocks if not block.in_task)
        blocks = (*mine, *(() if now is None else now.blocks))
        fresh = tuple(sorted((block for block in blocks if not block.left), key=lambda block: block.order))
        plain = not self.hidden and not self.inside
        known = now.scope if now is not None and plain else None
        if known is None or not known.serves(fresh):
            known = self.with_blocks(fresh, now)
            if now is not None and plain:
                now.scope = known
        if now is not self.carried:
            for watcher in known.active():  # autograd has recorded what other tasks did meanwhile
                if watcher.pipeline.links is not None:
                    watcher.pipeline.links.begin()
        return known

    def serves(self, blocks: tuple[Block, ...]) -> bool:
        """Whether this is the scope of the running thread with these blocks."""
        here = self.owner == threading.get_ident()
        return here and self.everywhere is state.everywhere and self.blocks == blocks

    def while_hooks_run(self) -> Scope:
        """The scope for hooks: their own operators are seen by nobody."""
        if self._hidden is None:
            self._hidden = Scope(self.blocks, self.carried, hidden=True, floor=self._above(), owner=self.owner)
        return self._hidden

    def outside(self) -> Scope:
        """The scope of the thread around the hooks and operators that run in this one."""
        return Scope(self.blocks, self.carried, owner=self.owner)

    def _above(self) -> int:
        return self.blocks[-1].order + 1 if self.blocks else 0

    def active(self) -> list[Watcher]:
        """The watchers that see calls here, each once, in the order in which they were entered."""
        if self.hidden:
            return []
        blocks = self.blocks
        if self.everywhere.blocks:
            merged = {id(block): block for block in (*blocks, *self.everywhere.blocks)}
            blocks = tuple(sorted(merged.values(), key=lambda block: block.order))
        blocks = tuple(block for block in blocks if block.pid == self.everywhere.pid)
        paused = {block.watcher for block in blocks if block.pauses}
        return list(dict.fromkeys(b.watcher for b in blocks if b.watcher not in paused))

    def watch(self, feed: str, key: Any) -> Watch | None:
        """Who sees `key` in the calls of a feed, or None; remembered in the feed's table."""
        watch = self.tables[feed][key] = self._watch(feed, key)
        return watch

    def _watch(self, feed: str, key: Any) -> Watch | None:
        if getattr(key, "__name__", "") in ("__get__", "__set__", "__delete__"):
            return None  # reading an attribute of a tensor, which function modes see too, is no operator
        active = self.active()
        found = [w for w in active if w.engine.feed == feed and w not in self.inside and w.watches(key)]
        if not found:
            return None
        hidden = self.while_hooks_run()
        alone = len(active) == len(found)
        if alone and found[0].engine.is_leaf(key):
            inner = hidden  # saves two switches; no Python runs in there that could enter a block
        else:
            # Those who see this operator do not see its inner steps, the others do.
            inside = self.inside | set(found)
            inner = Scope(self.blocks, self.carried, inside=inside, floor=self._above(), owner=self.owner)
        return Watch(row_of(key), tuple(w.pipeline for w in found), hidden, inner)

    def innermost(self, watcher: Watcher, pauses: bool) -> Block | None:
        """The innermost such block that may be left here, or None."""
        for block in reversed(self.blocks):
            if block.order >= self.floor and block.watcher is watcher and block.pauses is pauses:
                return block
        return None


state.watch_everywhere(())


def _what_takes() -> Callable[[Any], Any] | None:
    if None in (has, get, stash):
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


def unseen_calls() -> int:
    """How many calls of watched operators there have been in threads that have entered nothing."""
    return state.unseen + state.unseen_by_compiled()


def _let_threads_end() -> None:
    # A thread gives its scope back, which takes the GIL, after Python has joined it. One that asks for the GIL of
    # an interpreter that is going down aborts the process.
    alive = {str(thread.native_id) for thread in threading.enumerate()}
    end = time.monotonic() + 0.1  # threads of torch's own stay
    while (_holders - alive) & native_threads() and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(_let_threads_end)


def current() -> Scope:
    """The scope of the running thread, and of the task that it runs."""
    scope: Scope = get(KEY) if has is not None and has(KEY) else state.idle
    if scope.everywhere is not state.everywhere or scope.carried is not carried():
        fresh = scope.refreshed()
        if fresh is not scope:
            put(fresh)
        return fresh
    return scope


def enter(block: Block) -> None:
    """Add a block to the scope of the running thread, or of the running task."""
    scope = current()
    if not block.in_task:
        put(scope.with_blocks((*scope.blocks, block), scope.carried))
        return
    state.in_tasks.add(block)
    state.tell()
    before = carried()
    CARRIED.set(Carried((*(() if before is None else before.blocks), block)))
    current()  # for autograd, which lends the scope to its threads


def leave(block: Block) -> None:
    """Take a block out of the scope; out of those of other threads and tasks too, if they have it. Can be repeated."""
    block.left = True
    scope = current()
    here = block in scope.blocks
    if block.in_task:
        state.in_tasks.discard(block)
        state.tell()
        mine = carried()
        if mine is not None and block in mine.blocks:
            CARRIED.set(Carried(tuple(b for b in mine.blocks if b is not block)) if len(mine.blocks) > 1 else None)
    if here:
        put(scope.with_blocks(tuple([b for b in scope.blocks if b is not block]), carried()))
    if block.in_task or not here:  # what was started inside of the block, in other tasks and threads, has it too
        state.watch_everywhere(state.everywhere.blocks)


def owner() -> int | None:
    """The thread on whose behalf this one runs; None if it has no scope."""
    return get(KEY).owner if has(KEY) else None


@in_child
def _forget_parent() -> None:
    state.in_tasks = set()
    state.watch_everywhere(())
    _holders.clear()
