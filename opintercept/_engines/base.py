"""What an engine is, and what it serves: an interceptor as a `Watcher`, and its blocks.

A new engine is one file with a subclass of `Engine`; `choose.ENGINES` makes it known to `intercept`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import os
import sys
from collections.abc import Callable, Container, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from opintercept._core import locks, record
from opintercept._core.errors import OpInterceptError
from opintercept._core.exits import Entry
from opintercept._core.noted import Ring
from opintercept._core.pipeline import Pipeline
from opintercept._engines import foreign, overloads
from opintercept._native import library
from opintercept._ops.generated import GeneratedKernel
from opintercept._ops.patched_functions import is_patched
from opintercept._ops.select import ALL, PRODUCTS, holds_watched, patched_of, split
from opintercept._ops.table import ROWS
from opintercept._origin import stack
from opintercept._origin.links import graph_task

Keys: TypeAlias = Mapping[str, Any] | frozenset[Any] | None
"""What a block watches: overloads by name, or functions; None for everything."""


class Engine(Protocol):
    """Shows blocks the calls that they watch.

    Attributes:
        name: What `intercept(engine=...)` calls it.
        source: The stream of calls that it shows. A block sees the calls of every engine with the same source, so
            kernels in Python and in C++ serve each other's blocks.
        instead: What to use where it cannot run, for messages.
        needs: The private API of torch that it is built on, by path; None for what this torch lacks.
        every_thread: Whether a block may watch all threads.
    """

    name: str
    source: str
    instead: str
    needs: Mapping[str, Any]
    every_thread: bool = False

    def require(self) -> None:
        """Refuse a torch or Python on which the engine cannot run, before any state has changed.

        Raises:
            OpInterceptError: Names what is missing, the torch version and what to use instead.
        """
        if lacking := library.lacks_gil():
            raise OpInterceptError(lacking)
        missing = [path for path, value in self.needs.items() if value is None]
        if missing:
            raise OpInterceptError(
                f"the {self.name} engine needs {', '.join(missing)}, which torch {torch.__version__} does not have; "
                f"{self.instead}"
            )

    def keys(self, ops: Any) -> Keys:
        """Work out what to watch for the argument `ops` of `intercept`.

        Raises:
            TypeError: An entry that cannot name an operator.
            ValueError: An unknown operator, or one that the engine cannot watch.
        """
        chosen = split(ops)
        entries = [entry for entry in chosen.entries if not is_patched(entry)]  # those are not for engines
        version = self.version((*chosen.families, *chosen.without))
        families: Any = _of_families(self, chosen.families, chosen.without, version)  # type: ignore[arg-type]
        if not entries or chosen.everything:
            return families  # type: ignore[no-any-return]
        return self.named(entries) | families  # type: ignore[no-any-return]

    def version(self, families: tuple[str, ...]) -> Any:
        """A value that changes when families may have come to hold other operators."""
        return ROWS.version

    def everything(self, among: frozenset[str] | None = None) -> Keys:
        """What `ops="all"` watches, or what of these overloads; None for whatever comes."""
        return None

    def of_families(self, families: tuple[str, ...], among: frozenset[str] | None = None) -> Any:
        """What to watch of whole families, or what of these overloads. The first is asked once for each version."""
        return frozenset()

    def late(self, ops: Any, among: frozenset[str]) -> Any:
        """What `keys` returns now and may not have returned before these overloads came."""
        chosen = split(ops)
        found = _choose_families(self, chosen.families, chosen.without, among)
        for entry in () if chosen.everything else chosen.entries:
            with contextlib.suppress(ValueError):  # it has gone
                found = found if is_patched(entry) else found | self.named([entry])
        return found

    def named(self, entries: list[Any]) -> Any:
        """What to watch for other entries of `ops`. Raises as `keys` does."""
        return frozenset()

    def unknown(self) -> Any:
        """Operators that nobody has declared, to be told of if they turn out to multiply; a dict, or a set.

        Only blocks that watch the family of matmuls ask.
        """
        return frozenset()

    def skipped(self) -> Any:
        """Convolutions, which a block that watches the family of matmuls alone counts without looking at them."""
        return frozenset()

    def awaited(self) -> Any:
        """Operators before which hooks learn what they are told later, see `Work.later`; a dict, or a set."""
        return frozenset()

    def is_leaf(self, key: Any) -> bool:
        """Whether no Python, and nothing that another block could watch, runs inside of an operator."""
        return False

    def enter(self, block: Block) -> None:
        """Show the block the calls of this thread, or of all threads."""

    def leave(self, block: Block) -> None:
        """Undo `enter`, as far as it came. Can be repeated.

        Raises:
            OpInterceptError: The block was left out of order. It is left all the same.
        """

    def hold(self, user: object, watcher: Watcher) -> None:
        """Keep what entering takes time for until `user` releases it: a coroutine enters a block at each resumption."""
        return

    def release(self, user: object) -> None:
        """Undo `hold`. Can be repeated."""
        return

    def extend(self, user: object, watcher: Watcher, come: frozenset[str]) -> None:
        """Show a user that has entered or holds the engine what its watcher has come to watch of these overloads."""
        return

    @property
    def walk(self) -> Callable[[], stack.Walked]:
        """What reads the Python stack for a call."""
        return stack.walk

    def ring(self) -> Ring | None:
        """A ring in which its kernels can note the calls of one interceptor; None if they cannot."""
        return None

    @property
    def signature_of(self) -> Callable[..., Any]:
        """What tells calls apart that do not look alike, see `record.signature_of`."""
        return record.signature_of


@functools.lru_cache(maxsize=32)
def _of_families(engine: Engine, families: tuple[str, ...], without: tuple[str, ...], version: Any) -> Any:
    # All blocks get the same object: kernels know by its identity what is installed.
    return _choose_families(engine, families, without, None)


def _choose_families(
    engine: Engine, families: tuple[str, ...], without: tuple[str, ...], among: frozenset[str] | None
) -> Any:
    keys = engine.everything(among) if ALL in families else engine.of_families(families, among)
    if not without:
        return keys
    left_out = engine.of_families(without, among)
    if keys is None:
        return AllBut(left_out)
    if isinstance(keys, Mapping):
        return {name: keys[name] for name in keys if name not in left_out}
    return frozenset(keys) - frozenset(left_out)


class AllBut(Container[Any]):
    """Every key but some.

    Args:
        left_out: Those.
    """

    def __init__(self, left_out: Any) -> None:
        self._left_out = left_out

    def __contains__(self, key: object) -> bool:
        return key not in self._left_out

    def __or__(self, late: AllBut) -> AllBut:
        """This, less what is left out of operators that came later."""
        left_out = _more(self._left_out, late._left_out)  # noqa: SLF001
        return self if left_out is self._left_out else AllBut(left_out)


def _more(keys: Any, late: Any) -> Any:
    """`keys` with what `late` has besides; the same object if that is nothing."""
    if isinstance(keys, AllBut):
        return keys | late
    return keys if keys is None or all(key in keys for key in late) else keys | late


class Watcher:
    """The part of an interceptor that engines know.

    Attributes:
        pipeline: Runs its hooks.
        engine: Shows it calls.
        ops: The argument of `intercept`.
        keys: What it watches: overloads by name, or functions; None for everything.
        patched: The functions that it watches beside what its engine shows, by name.
        unknown: Operators of other libraries that look like matmuls and that nobody has declared.
        skipped: Convolutions, if it watches matmuls only. They are counted, and not looked at, until a block of the
            process has told of them, since skipping a call takes some microseconds.
        awaited: Operators before which its hooks learn what they are told later.
        shown: What its engine must show: `keys`, `unknown`, `skipped` and `awaited`.
        only_products: Whether it watches families of products and nothing else.
        everywhere: Whether it watches all threads.
        told_of_convolutions: Whether a block of this process has told of convolutions.
    """

    __slots__ = (
        "_chosen_at",
        "_families",
        "_tells",
        "awaited",
        "engine",
        "everywhere",
        "keys",
        "only_products",
        "ops",
        "patched",
        "pipeline",
        "shown",
        "skipped",
        "unknown",
    )

    told_of_convolutions: ClassVar[bool] = False

    def __init__(self, pipeline: Pipeline, engine: Engine, ops: Any, everywhere: bool = False) -> None:
        self.pipeline = pipeline
        self.engine = engine
        self.ops = ops
        self.awaited: Any = engine.awaited()
        self.everywhere = everywhere
        self._tells: Pipeline | None = None
        foreign.look()
        self._choose()

    def _choose(self) -> None:
        chosen = split(self.ops)
        self._families = (*chosen.families, *chosen.without)
        self._chosen_at = self.engine.version(self._families)
        self.only_products = not chosen.entries and set(chosen.families) <= set(PRODUCTS)
        keys: Any = self.engine.keys(self.ops)
        self.pipeline.sees_writes = chosen.everything and {*chosen.without} <= {"view"}
        self.patched = patched_of(chosen)
        self.unknown: Any = self.engine.unknown() if "matmul" in chosen.families else frozenset()
        self.skipped: Any = frozenset()
        if chosen == (("matmul",), [], ()) and not Watcher.told_of_convolutions:
            self.skipped = self.engine.skipped()
        self._show(keys)

    def _show(self, keys: Any) -> None:
        self.keys: Keys = keys
        self.shown: Keys = keys
        if keys is not None:
            self.shown = _join(keys, self.skipped, self.unknown, self.awaited)
        if self.unknown and keys is not None and self._tells is None:
            self._tells = Pipeline((foreign.Tell(self.pipeline),), signature_of=self.engine.signature_of)

    def renew(self) -> None:
        """Watch what has come since: a library may register its operators after the interceptor was made."""
        with locks.shared:
            foreign.look()
            come = self._chosen_at != self.engine.version(self._families)
            if come or (self.skipped and Watcher.told_of_convolutions):
                self._choose()

    def follow(self, come: frozenset[str], gone: frozenset[str]) -> bool:
        """Watch what has come while it is entered. `renew` would do so too, but looks at all operators.

        Args:
            come: Overloads that have come, have got kernels or have been declared.
            gone: Overloads whose library was unloaded.

        Returns:
            Whether what a scope knows of its operators no longer holds.
        """
        chosen, before = split(self.ops), (self.keys, self.unknown, self.patched)
        again = any(map(self.watched_by, come))
        keys = _more(overloads.without(self.keys, gone), self.engine.late(self.ops, come))
        with contextlib.suppress(ValueError):  # a function that `ops` names is no longer declared
            self.patched = patched_of(chosen)
        if "matmul" in chosen.families:
            self.unknown = self.engine.unknown()
        if keys is before[0] and (self.unknown, self.patched) == before[1:]:
            return again
        self._show(keys)
        return True

    def watched_by(self, key: Any) -> Pipeline | None:
        """The pipeline for calls of `key`; None if nothing sees them."""
        if self.watches(key):
            return self.pipeline
        return self._tells if key in self.unknown else None

    def watches(self, key: Any) -> bool:
        """Whether it watches `key`. A generated kernel is watched for any of the operators that it stands for."""
        if isinstance(key, GeneratedKernel):
            return holds_watched(key, split(self.ops), self.keys)
        return self.keys is None or key in self.keys or key in self.patched


_joined: dict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = {}


def _join(*parts: Any) -> Any:
    """The union of dicts or sets, the same object for the same ones: kernels know by its identity what is installed."""
    parts = tuple(filter(None, parts)) or parts[:1]
    if len(parts) == 1:
        return parts[0]
    place = tuple(map(id, parts))
    known = _joined.get(place)
    if known is None:
        if len(_joined) >= 32:
            _joined.clear()
        known = _joined[place] = parts, functools.reduce(operator.or_, parts)
    return known[1]


class Block:
    """One `with` block of a watcher: entered, or paused.

    Attributes:
        order: Numbers the blocks of the process in the order in which they are made.
        entry: Ends the block.
        mode: The torch mode that shows the block its calls, if its engine uses one.
        graph_task: The autograd graph task in which it was entered, -1 for none.
        pid: The process that entered it. A forked child ignores its parent's blocks.
        in_task: Whether a task of an event loop, or a greenlet, entered it. Then it belongs to that one alone.
        left: Whether it is over, even if a scope still lists it.
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
        self.pid = os.getpid()
        self.in_task = _in_task()
        self.left = False


def _in_task() -> bool:
    """Whether a context of its own runs in this thread: that of a greenlet or of asyncio, which anyio uses, or trio."""
    greenlet: Any = sys.modules.get("greenlet")
    # A thread's own greenlet has no parent. Its blocks are the thread's, and see all greenlets.
    if getattr(greenlet, "GREENLET_USE_CONTEXT_VARS", False) and greenlet.getcurrent().parent is not None:
        return True
    running_loop = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)  # may be half imported
    if running_loop is not None and running_loop() is not None:
        return True
    trio = sys.modules.get("trio.lowlevel")
    return trio is not None and bool(trio.in_trio_run())
