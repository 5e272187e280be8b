"""Engines built on torch modes: how our mode gets onto torch's stack of modes and off it again.

Invariant: a thread has at most one mode of ours on each stack, and leaving keeps all other modes in their order.
(Torch itself pops whatever is on top when blocks are left out of order.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from opintercept._core import locks
from opintercept._core.errors import OpInterceptError
from opintercept._core.pipeline import run
from opintercept._core.record import Phase
from opintercept._engines import scope as _scope
from opintercept._engines.base import AllBut, Block, Engine, Watcher
from opintercept._engines.scope import KEY, Scope, Watch, take
from opintercept._origin.links import graph_task
from opintercept._origin.stack import backward_phase


class Everything:
    """The filter that lets every key through."""

    def __contains__(self, key: object) -> bool:
        return True


def run_hooked(
    scope: Scope, watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], invoke: Any = None
) -> Any:
    """Run a watched call: in the hidden scope while hooks run, and in the inner one while `func` runs.

    Args:
        scope: That of the thread.
        watch: What it has for the call.
        func: For `OpCall.func`.
        args: The arguments of the call.
        kwargs: Likewise.
        invoke: Runs the call; `func` if left out.
    """
    phase: Phase = "forward" if graph_task() == -1 else backward_phase()
    if take is not None:
        take(watch.hidden)
        take(scope)
    try:
        _scope.stash(KEY, watch.hidden)  # inside the try: a signal handler may raise right after it
        return run(watch.pipelines, watch.row, func, phase, _step_inside, (watch, invoke or func), args, kwargs)
    finally:
        _scope.stash(KEY, scope)


def _step_inside(head: tuple[Watch, Any], /, *args: Any, **kwargs: Any) -> Any:
    watch, func = head
    if take is not None:
        take(watch.inner)
        take(watch.hidden)
    try:
        _scope.stash(KEY, watch.inner)
        return func(*args, **kwargs)
    finally:
        _scope.stash(KEY, watch.hidden)


class Mode(Protocol):
    """What the engine needs of its torch mode.

    Attributes:
        keys: What any of its blocks watches; a first, fast filter.
        blocks: The blocks that it shows calls.
        entered_by: The thread that has it on its stack.
        leaving: Whether the engine is taking it off the stack.
        left_with: The stack without it, as soon as the engine begins to take it off.
        missed: Whether it was not on the stack at that time.
    """

    keys: Any
    blocks: set[Block]
    entered_by: int | None
    leaving: bool
    left_with: list[Any] | None
    missed: bool

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: Any, value: Any, trace: Any) -> None: ...
    def out_from_under(self, above: Any) -> None:
        """Hand what `__exit__` would have restored over to the mode above, which was entered after this one."""

    def restore(self) -> None:
        """Repair the state that torch keeps beside the stack, now that the mode is gone."""


class ModeEngine(Engine):
    """An engine whose blocks share one torch mode in each thread.

    Args:
        mode_type: Torch mode with the attributes of `Mode`.
        depth, at, pop, push: Torch's calls on the stack.
    """

    def __init__(
        self,
        mode_type: Callable[[], Mode],
        depth: Callable[[], int],
        at: Callable[[int], Any],
        pop: Callable[[], Any],
        push: Callable[[Any], None],
    ) -> None:
        self.mode_type = mode_type
        self._modes: set[Mode] = set()  # those with blocks, of all threads
        self._depth, self._at, self._pop, self._push = depth, at, pop, push

    def enter(self, block: Block) -> None:
        """Enter a block in this thread."""
        while block.mode is None:
            ours = (m for m in reversed(self._stack()) if type(m) is self.mode_type and not m.leaving)
            mode = block.mode = next(ours, None) or self.mode_type()
            mode.blocks.add(block)  # keeps it on the stack
            if mode.leaving:  # a signal handler has taken it off meanwhile
                block.mode = None
        with locks.shared:
            self._modes.add(block.mode)
            self._set_keys(block.mode)
        if not any(mode is block.mode for mode in self._stack()):
            block.mode.__enter__()
            block.mode.entered_by = threading.get_ident()
        _scope.enter(block)

    def leave(self, block: Block) -> None:
        """Leave a block. Can be repeated.

        Raises:
            OpInterceptError: A torch mode that was entered later is still on the stack, or ours is not on it.
        """
        _scope.leave(block)
        mode = block.mode
        if mode is None:
            return  # an interrupt stopped `enter` before it had one
        mode.blocks.discard(block)
        with locks.shared:
            self._set_keys(mode)
            if not mode.blocks:
                self._modes.discard(mode)
        if not mode.blocks:
            self._take_out(mode)

    def extend(self, user: object, watcher: Watcher, come: frozenset[str]) -> None:
        """As of every engine."""
        for mode in tuple(self._modes):
            self._set_keys(mode)

    def _set_keys(self, mode: Mode) -> None:
        distinct = {id(shown): shown for shown in [block.watcher.shown for block in tuple(mode.blocks)]}
        if any(keys is None or (isinstance(keys, AllBut) and len(distinct) > 1) for keys in distinct.values()):
            mode.keys = Everything()
        elif len(distinct) == 1:
            (mode.keys,) = distinct.values()
        else:
            mode.keys = frozenset().union(*filter(None, distinct.values()))

    def _stack(self) -> list[Any]:
        while True:
            try:
                return [self._at(i) for i in range(self._depth())]
            except RuntimeError:  # a signal handler has taken a mode off meanwhile
                continue

    def _take_out(self, mode: Mode) -> None:
        if mode.left_with is not None:  # an interrupt has stopped this method halfway
            self._make_stack(mode.left_with)
            mode.restore()
            return
        mode.leaving = True
        stack = self._stack()
        below = [m for m in stack if m is not mode]
        if len(below) == len(stack):
            if mode.left_with is None:  # otherwise a signal handler has taken it off
                self._miss(mode, stack)
            return
        mode.left_with = below
        if stack[-1] is mode:
            mode.__exit__(None, None, None)
            return
        self._make_stack(below)
        above = stack[next(i for i, m in enumerate(stack) if m is mode) + 1 :]
        mode.out_from_under(above[0])
        names = [type(m).__name__ for m in above]
        raise OpInterceptError(
            f"blocks must be left in the reverse of the order in which they were entered, but modes that were entered "
            f"later are still active: {names}; leave those first (this block has been left, they stay)"
        )

    def _miss(self, mode: Mode, stack: list[Any]) -> None:
        mode.leaving = False
        if mode.entered_by in (None, threading.get_ident()):
            mode.restore()
        if mode.entered_by is None or mode.missed:
            return  # an interrupt stopped its `enter`, or this was raised before
        mode.missed = True
        raise OpInterceptError(
            "the mode of this interceptor must be on torch's stack of modes when its block is left, but the stack is "
            f"{[type(m).__name__ for m in stack]}; another mode was left out of order and popped it, or the block was "
            "left in another thread"
        )

    def _make_stack(self, wanted: list[Any]) -> None:
        """Pop and push modes until the stack is as wanted. Can be repeated."""
        while len(stack := self._stack()) > len(wanted) or any(a is not b for a, b in zip(stack, wanted, strict=False)):
            self._pop()
        for mode in wanted[len(stack) :]:
            self._push(mode)
