"""Torch's two stacks of modes, and how ours gets onto one and out of it again.

Invariant: one mode of ours a thread and stack, and after any way out the stack holds the others as before.
Torch itself pops whatever is on top when blocks are left out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opintercept import _origin
from opintercept._call import Phase
from opintercept._engines import scope as _scope
from opintercept._engines.scope import KEY, Block, Engine, Scope, Watch, Watcher, take
from opintercept._errors import OpInterceptError
from opintercept._pipeline import run


class Everything:
    """The filter that lets every key through."""

    def __contains__(self, key: object) -> bool:
        return True


def run_hooked(scope: Scope, watch: Watch, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a watched call of a mode: hidden while hooks run, and in the inner scope while `func` does."""
    phase: Phase = "forward" if _origin.graph_task() == -1 else _origin.backward_phase()
    if take is not None:
        take(watch.hidden)
        take(scope)
    try:
        _scope.stash(KEY, watch.hidden)  # in here: a signal's exception may come up right after it
        return run(watch.pipelines, watch.row, func, phase, _step_inside, (watch, func), args, kwargs)
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


class ModeEngine:
    """An engine whose blocks share one torch mode a thread.

    Args:
        engine: Its name.
        mode_type: Torch mode with an attribute `keys`, the first filter, and `out_from_under(above)`.
        depth, at, pop, push: Torch's calls on the stack.
    """

    def __init__(
        self,
        engine: Engine,
        mode_type: type[Any],
        depth: Callable[[], int],
        at: Callable[[int], Any],
        pop: Callable[[], Any],
        push: Callable[[Any], None],
    ) -> None:
        self.engine = engine
        self.mode_type = mode_type
        self._depth, self._at, self._pop, self._push = depth, at, pop, push

    def enter(self, watcher: Watcher) -> None:
        """Enter a block of `watcher` in this thread."""
        scope = _scope.current()
        stack = [self._at(i) for i in range(self._depth())]
        mode: Any = next((m for m in reversed(stack) if type(m) is self.mode_type), None)
        fresh = mode is None
        if fresh:
            mode = self.mode_type()
        entered = scope.with_blocks((*scope.blocks, Block(watcher, mode=mode)))
        mode.keys = self._keys(entered, mode)
        if fresh:
            mode.__enter__()
        _scope.put(entered)

    def leave(self, scope: Scope, position: int) -> None:
        """Leave the block at `position`.

        Raises:
            OpInterceptError: A torch mode that was entered later is still on the stack, or ours is not.
        """
        mode = scope.blocks[position].mode
        left = scope.with_blocks(scope.blocks[:position] + scope.blocks[position + 1 :])
        _scope.put(left)
        mode.keys = self._keys(left, mode)
        if not any(block.mode is mode for block in left.blocks):
            self._take_out(mode)

    def _keys(self, scope: Scope, mode: Any) -> Any:
        watchers = [block.watcher for block in scope.blocks if block.mode is mode]
        if any(watcher.keys is None for watcher in watchers):
            return Everything()
        return frozenset().union(*(watcher.keys or () for watcher in watchers))

    def _take_out(self, mode: Any) -> None:
        stack = [self._at(i) for i in range(self._depth())]
        if stack and stack[-1] is mode:
            mode.__exit__(None, None, None)
            return
        if not any(m is mode for m in stack):
            raise OpInterceptError(
                "the mode of this interceptor must be on torch's stack of modes when its block is left, got a "
                f"stack of {[type(m).__name__ for m in stack]}; another mode was left out of order and popped it"
            )
        above = []
        while (popped := self._pop()) is not mode:
            above.append(popped)
        for other in reversed(above):
            self._push(other)
        mode.out_from_under(above[-1])
        names = [type(m).__name__ for m in reversed(above)]
        raise OpInterceptError(
            f"blocks must be left in the reverse of the order they were entered in, got modes entered later that are "
            f"still active: {names}; leave those first (this interceptor was taken out, they stay)"
        )
