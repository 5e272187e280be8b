"""A block: into the engine that feeds it, and out of it again, in any order and from any place.

Invariant: a block that is left is out, whatever is raised to say that its place or order was wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from opintercept import _entry
from opintercept._engines import greenlets
from opintercept._engines import scope as _scope
from opintercept._engines.scope import Block, Watcher
from opintercept._errors import OpInterceptError
from opintercept._origin.links import graph_task


def enter_block(block: Block) -> None:
    """Enter a block in this thread, or in the task that it runs."""
    if block.pauses:
        _scope.enter(block)
        return
    if block.watcher.pipeline.links is not None:
        block.watcher.pipeline.links.begin()
    greenlets.follow()
    block.watcher.engine.enter(block)


def leave_block(block: Block) -> None:
    """Take a block out of the engine that feeds it. Can be repeated.

    Raises:
        OpInterceptError: Blocks that were entered later are still active.
    """
    first, later = not block.left, _later(block)
    if block.pauses:
        _scope.leave(block)
    else:
        block.watcher.engine.leave(block)
    if not _scope.current().blocks:
        greenlets.unfollow()
    if first and later:
        raise OpInterceptError(
            f"blocks must be left in the reverse of the order they were entered in, got one with {later} entered "
            "later and still active; this block was left, they stay"
        )


def _later(block: Block) -> int:
    """How many blocks the same thread, or task, has entered later and not left."""
    blocks = _scope.current().blocks
    if blocks and blocks[-1] is block:
        return 0
    return sum(b.order > block.order and b.in_task is block.in_task for b in blocks) if block in blocks else 0


def check_leaving(block: Block | None) -> None:
    """Refuse to leave a block in another backward pass than the one that it was entered in; it stays entered.

    Raises:
        OpInterceptError: It was entered in another one, or outside of all.
    """
    if block is not None and not block.left and block.graph_task != graph_task():
        raise OpInterceptError(
            "a block must be left in the backward pass that it was entered in, or outside of all if it was entered "
            "outside, got another one; autograd would bring the block back after this node"
        )


def innermost(watcher: Watcher, *, pauses: bool) -> Block:
    """The innermost block of a watcher that may be left here.

    Raises:
        OpInterceptError: There is none.
    """
    block = _scope.current().innermost(watcher, pauses)
    if block is None:
        raise OpInterceptError(
            "a block must be left in the thread that entered it, and not from inside a hook, got a block that this "
            "thread has not entered or has left; use one with statement for both"
        )
    return block


class Part:
    """An entry of a block whose hooks neither enter nor exit: a pause, or a stretch between two suspensions."""

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


def open_blocks() -> tuple[Block, ...]:
    """The blocks that see what this thread runs, its own and those of other threads for all."""
    return tuple(dict.fromkeys((*_scope.current().blocks, *_scope.state.everywhere.blocks)))


def force_out(blocks: Iterable[Block]) -> list[str]:
    """Leave blocks that were entered and never left, and name them by their hooks; the last one comes first."""
    named = []
    for block in sorted(blocks, key=lambda block: block.order, reverse=True):
        hooks = [getattr(hook, "__name__", type(hook).__name__) for hook in block.watcher.pipeline.hooks]
        named.append(f"intercept({', '.join(hooks)}){'.paused()' if block.pauses else ''}")
        with contextlib.suppress(OpInterceptError):  # a torch mode entered later was forgotten too; ours is out
            _entry.finish(block.entry, OpInterceptError("left by force"))  # so that hooks which fail to exit warn
    return named
