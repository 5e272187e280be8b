"""Which blocks see what the running thread or task does: those that it has entered, and those for all threads.

Invariant: a Scope never changes (its tables only cache), so autograd's device threads may share it. It lives in
torch's thread-local state, which autograd carries into those threads. A task's context carries the task's blocks,
and a scope made for another task is rebuilt.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from opintercept._core.fork import in_child
from opintercept._core.pipeline import Pipeline
from opintercept._engines.base import Block, Watcher
from opintercept._engines.quiet import native_threads
from opintercept._ops.op import Op
from opintercept._ops.table import row_of

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


class Carried:
    """The blocks of a task. Its context carries them into the tasks and threads that it starts."""

    __slots__ = ("blocks", "scope")

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks
        self.scope: Scope | None = None  # that of the task when it ran last


CARRIED: ContextVar[Carried | None] = ContextVar("opintercept", default=None)
carried: Callable[[], Carried | None] = CARRIED.get


class Everywhere:
    """The blocks that watch all threads.

    It is replaced instead of changed, also in a forked child. A thread that finds a new one rebuilds its scope.
    """

    __slots__ = ("blocks", "pid")

    def __init__(self, blocks: tuple[Block, ...] = ()) -> None:
        self.blocks = blocks
        self.pid = os.getpid()


class _State:
    __slots__ = ("everywhere", "idle", "in_tasks", "told", "unseen", "unseen_by_compiled")

    everywhere: Everywhere
    idle: Scope  # the scope of a thread that has entered nothing
    in_tasks: set[Block]
    # Tells compiled kernels, which ask without the GIL, whether a thread that has entered nothing may be watched, and
    # whether a task has entered something.
    told: Callable[[bool, bool], None] | None
    # How many calls of watched operators threads made that have entered nothing: at Python and at compiled kernels.
    unseen: int
    unseen_by_compiled: Callable[[], int]

    def watch_everywhere(self, blocks: tuple[Block, ...]) -> None:
        """Replace the blocks that watch all threads."""
        self.everywhere = Everywhere(blocks)
        self.idle = Scope()
        self.tell()

    def tell(self) -> None:
        """Tell compiled kernels what has changed."""
        if self.told is not None:
            self.told(bool(self.everywhere.blocks or self.in_tasks), bool(self.in_tasks))


state = _State()
state.told = None
state.in_tasks = set()
state.unseen = 0
state.unseen_by_compiled = int  # returns 0 until compiled kernels are loaded


class Watch:
    """Which pipelines see an operator in one scope, and the scopes for its hooks and its inner steps.

    Attributes:
        tally: What to call before an operator that no pipeline sees, such as what counts it; None if pipelines see it.
    """

    __slots__ = ("hidden", "inner", "pipelines", "row", "tally")

    def __init__(
        self,
        row: Op,
        pipelines: tuple[Pipeline, ...],
        hidden: Scope,
        inner: Scope,
        tally: Callable[[], Any] | None = None,
    ) -> None:
        self.row = row
        self.tally = tally
        self.pipelines = pipelines
        self.hidden = hidden
        self.inner = inner


def _tally(pipelines: tuple[Pipeline, ...]) -> Callable[[], Any]:
    def tally() -> None:
        for pipeline in pipelines:
            pipeline.skip()

    return pipelines[0].skip if len(pipelines) == 1 else tally


def _settling(pipelines: tuple[Pipeline, ...]) -> Callable[[], Any]:
    def settle() -> None:
        with unwatched():
            for pipeline in pipelines:
                pipeline.flush(settle=True)

    return settle


UNKNOWN: Any = object()  # for a key that is not in a scope's table yet


class Scope:
    """The blocks that see what a thread is running, in the order in which they were entered.

    Attributes:
        blocks: Those that the thread has entered, and those of the running task.
        carried: The running task's blocks, as its context has them.
        hidden: Whether a hook is running. Then no block sees anything, whatever the hook enters.
        inside: Watchers whose operator is running, and which do not see its inner steps.
        floor: A block with a lower order may not be left here, since a hook is running inside it.
        owner: The thread that entered the blocks. Autograd's device threads share the scope of the thread that
            called backward.
        tables: A cache of which pipelines see an operator, by source and by key. The sources of
            patched functions are the levels.
        notes: What compiled kernels remember of that.
    """

    __slots__ = (
        "_hidden",
        "blocks",
        "carried",
        "everywhere",
        "floor",
        "hidden",
        "inside",
        "notes",
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
        self.notes: Any = None
        self._hidden: Scope | None = None
        self.owner = owner

    def with_blocks(self, blocks: tuple[Block, ...], carried: Carried | None) -> Scope:
        """This scope with other blocks."""
        owner = self.owner or threading.get_ident()
        return Scope(blocks, carried, hidden=self.hidden, inside=self.inside, floor=self.floor, owner=owner)

    def refreshed(self) -> Scope:
        """This scope for the running task, without the blocks that were left."""
        now = carried()
        if now is None and self.owner not in (None, threading.get_ident()):
            now = self.carried  # autograd lent this scope to a thread that runs no tasks
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
            for watcher in known.active():  # autograd has recorded calls of other tasks meanwhile
                if watcher.pipeline.links is not None:
                    watcher.pipeline.links.begin()
        return known

    def serves(self, blocks: tuple[Block, ...]) -> bool:
        """Whether this is the running thread's scope with these blocks."""
        here = self.owner == threading.get_ident()
        return here and self.everywhere is state.everywhere and self.blocks == blocks

    def while_hooks_run(self) -> Scope:
        """The scope for hooks: no block sees the operators that they run."""
        if self._hidden is None:
            self._hidden = Scope(self.blocks, self.carried, hidden=True, floor=self._above(), owner=self.owner)
        return self._hidden

    def outside(self) -> Scope:
        """The scope of the thread outside of the hooks and operators that are running in this one."""
        return Scope(self.blocks, self.carried, owner=self.owner)

    def _above(self) -> int:
        return self.blocks[-1].order + 1 if self.blocks else 0

    def active(self) -> list[Watcher]:
        """The watchers that see calls in this scope, each once, in the order in which they were entered."""
        if self.hidden:
            return []
        blocks = self.blocks
        if self.everywhere.blocks:
            merged = {id(block): block for block in (*blocks, *self.everywhere.blocks)}
            blocks = tuple(sorted(merged.values(), key=lambda block: block.order))
        blocks = tuple(block for block in blocks if block.pid == self.everywhere.pid)
        paused = {block.watcher for block in blocks if block.pauses}
        return list(dict.fromkeys(b.watcher for b in blocks if b.watcher not in paused))

    def watch(self, source: str, key: Any) -> Watch | None:
        """Find the watchers that see `key` among a source's calls, and cache the answer; None if there are none."""
        watch = self.tables[source][key] = self._watch(source, key)
        return watch

    def _watch(self, source: str, key: Any) -> Watch | None:
        if getattr(key, "__name__", "") in ("__get__", "__set__", "__delete__"):
            return None  # function modes also see reads of a tensor's attributes, which are not operators
        active = self.active()
        shown = [w for w in active if source in (w.engine.source, w.pipeline.level) and w not in self.inside]
        pipelines = tuple(p for w in shown if (p := w.watched_by(key)) is not None)
        if not pipelines:
            passing = tuple(w.pipeline for w in shown if key in w.skipped)
            awaiting = tuple(w.pipeline for w in shown if key in w.awaited)
            if not passing and not awaiting:
                return None
            hidden = self.while_hooks_run()
            return Watch(row_of(key), (), hidden, hidden, _tally(passing) if passing else _settling(awaiting))
        found = [w for w in shown if w.watches(key)]
        hidden = self.while_hooks_run()
        alone = len(active) == len(found)
        if alone and active[0].engine.is_leaf(key):
            inner = hidden  # saves two switches: no Python runs inside that could enter a block
        else:
            # Watchers that see this operator do not see its inner steps, unless it is an outer one. The others do.
            inside = self.inside if row_of(key).kind == "outer" else self.inside | set(found)
            inner = Scope(self.blocks, self.carried, inside=inside, floor=self._above(), owner=self.owner)
        return Watch(row_of(key), pipelines, hidden, inner)

    def innermost(self, watcher: Watcher, pauses: bool) -> Block | None:
        """The innermost block of a watcher, or its innermost pause, that may be left here; or None."""
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


# Takes a reference to a scope before each `stash` of it; None where torch does so itself. Torch 2.11 drops a
# reference that it never took. Separate from `stash`, since restoring a scope must be one call that no signal splits.
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


@contextmanager
def hidden() -> Iterator[None]:
    """No block sees the operators that this thread runs meanwhile."""
    before = current()
    if before.hidden:
        yield
        return
    put(before.while_hooks_run())
    try:
        yield
    finally:
        put(before)


def unwatched() -> AbstractContextManager[None]:
    """For a hook that computes where a program asks for its results: no block sees the operators that it runs.

    In a block that watches all operators, the hook would be shown its own, which multiply nothing. So blocks that watch
    products alone stay as they are, and see those of a signal handler that comes in between.
    """
    return nullcontext() if all(watcher.only_products for watcher in current().active()) else hidden()


def unseen_calls() -> int:
    """How many calls of watched operators threads have made that have entered nothing."""
    return state.unseen + state.unseen_by_compiled()


def let_threads_end() -> None:
    """Wait until threads that Python has joined have released their scopes; called before the interpreter shuts down.

    They take the GIL for that, which later aborts the process.
    """
    alive = {str(thread.native_id) for thread in threading.enumerate()}
    end = time.monotonic() + 0.1  # torch's own threads stay
    while (_holders - alive) & native_threads() and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(let_threads_end)


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
    current()  # puts the new scope where autograd finds it for its threads


def leave(block: Block) -> None:
    """Take a block out of the scope, and out of the scopes of other threads and tasks. Can be repeated."""
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
    if block.in_task or not here:  # tasks and threads that were started inside the block have it too
        state.watch_everywhere(state.everywhere.blocks)


def owner() -> int | None:
    """The thread for which this one works; None if it has no scope."""
    return get(KEY).owner if has(KEY) else None


@in_child
def _forget_parent() -> None:
    state.in_tasks = set()
    state.watch_everywhere(())
    _holders.clear()
