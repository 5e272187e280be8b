"""Entering and leaving a block, and finding the blocks that are open.

Invariant: a block that was left in the wrong order is out all the same, whatever error says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from opintercept._blocks import greenlets
from opintercept._core import exits
from opintercept._core.errors import OpInterceptError
from opintercept._engines import scope as _scope
from opintercept._engines.base import Block, Watcher
from opintercept._engines.dynamo import keep_out
from opintercept._origin.links import graph_task


def enter_block(block: Block) -> None:
    """Enter a block in this thread, or in the task that it runs."""
    if block.pauses:
        _scope.enter(block)
        return
    if block.watcher.pipeline.links is not None:
        block.watcher.pipeline.links.begin()
    greenlets.follow(block)
    block.watcher.engine.enter(block)


def leave_block(block: Block) -> None:
    """Take a block out of the engine that feeds it, and refuse to leave others inside of it. Can be repeated."""
    first, later = not block.left, _later(block)
    try:
        if block.pauses:
            _scope.leave(block)
        else:
            block.watcher.engine.leave(block)
    finally:
        greenlets.unfollow(block)
    if first and later:
        raise OpInterceptError(
            f"blocks must be left in the reverse of the order in which they were entered, but {later} entered later "
            "than this one are still active; this block has been left, they stay"
        )


def _later(block: Block) -> int:
    """How many blocks the same thread or task entered later and has not left; 0 in a child of its process."""
    if block.pid != _scope.state.everywhere.pid:
        return 0  # in a forked child `opintercept run` enters blocks inside those of the parent, which see nothing
    blocks = _scope.current().blocks
    if blocks and blocks[-1] is block:
        return 0
    return sum(b.order > block.order and b.in_task is block.in_task for b in blocks) if block in blocks else 0


def check_leaving(block: Block | None) -> None:
    """Refuse to leave a block in another backward pass than the one in which it was entered. It stays entered."""
    if block is not None and not block.left and block.graph_task != graph_task():
        raise OpInterceptError(
            "a block must be left in the same backward pass in which it was entered, or outside of any if it was "
            "entered outside; otherwise autograd brings the block back after this node"
        )


def innermost(watcher: Watcher, *, pauses: bool) -> Block:
    """The innermost block of a watcher that may be left here. There must be one."""
    block = _scope.current().innermost(watcher, pauses)
    if block is None:
        raise OpInterceptError(
            "a block must be left in the thread that entered it, and not inside a hook, but this thread has not "
            "entered the block or has left it already; enter and leave it with one with statement"
        )
    return block


class Part:
    """An entry of a block whose hooks neither enter nor exit: a pause, or the time between two suspensions."""

    __slots__ = ("_block", "_pauses", "_watcher")

    def __init__(self, watcher: Watcher, *, pauses: bool) -> None:
        self._watcher = watcher
        self._pauses = pauses
        self._block: Block | None = None

    def begin(self) -> None:
        self._block = block = Block(self._watcher, self, pauses=self._pauses)
        enter_block(block)

    def check(self) -> None:
        if self._pauses:  # a body may be suspended anywhere
            check_leaving(self._block)

    def end(self, failed: BaseException | None) -> None:
        if self._block is not None:
            leave_block(self._block)
            if self._pauses and self._watcher.pipeline.links is not None:
                self._watcher.pipeline.links.begin()
            self._block = None


class Entered:
    """The context manager for a `Part`."""

    def __init__(self, watcher: Watcher, *, pauses: bool) -> None:
        self._watcher = watcher
        self._pauses = pauses

    @keep_out
    def __enter__(self) -> None:
        exits.enter(self, Part(self._watcher, pauses=self._pauses))

    __exit__ = exits.Exit(lambda self: innermost(self._watcher, pauses=self._pauses).entry)


of_programs: set[Watcher] = set()
"""Those of `opintercept run`, whose blocks begin wherever a program imports torch, and stay open until it ends."""


def open_blocks() -> tuple[Block, ...]:
    """The blocks that see what this thread runs: its own, and those that watch all threads."""
    return tuple(dict.fromkeys((*_scope.current().blocks, *_scope.state.everywhere.blocks)))


def force_out(blocks: Iterable[Block]) -> list[str]:
    """Leave blocks that were never left, the last one first, and return a name for each, made of its hooks."""
    named = []
    for block in sorted(blocks, key=lambda block: block.order, reverse=True):
        hooks = [getattr(hook, "__name__", type(hook).__name__) for hook in block.watcher.pipeline.hooks]
        named.append(f"intercept({', '.join(hooks)}){'.paused()' if block.pauses else ''}")
        # If a torch mode that was entered later was forgotten too, this raises, but ours is out.
        with contextlib.suppress(OpInterceptError):
            exits.finish(block.entry, OpInterceptError("left by force"))  # so that hooks which fail to exit warn
    return named
