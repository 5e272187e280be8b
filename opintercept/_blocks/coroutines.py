"""What the decorator does with generators, coroutines and async generators: it watches their bodies while they run.

Invariant: hooks enter and exit once for a body, and kernels stay installed while it is suspended, but nothing is
watched then.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import nullcontext
from typing import Any

from opintercept._blocks import outside
from opintercept._blocks.blocks import Entered
from opintercept._core import exits
from opintercept._engines.base import Watcher


def suspending(watcher: Watcher, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap a function whose body can be suspended; None for one whose body cannot."""
    if inspect.isasyncgenfunction(function):
        return _async_generator(watcher, function)
    if inspect.iscoroutinefunction(function):
        return _coroutine(watcher, function)
    return _generator(watcher, function) if inspect.isgeneratorfunction(function) else None


def _generator(watcher: Watcher, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with _Body(watcher):
            return (yield from _drive(watcher, function(*args, **kwargs)))

    return wrapper


def _coroutine(watcher: Watcher, function: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _Body(watcher):
            return await _awaited(watcher, function(*args, **kwargs))

    return wrapper


def _async_generator(watcher: Watcher, function: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with _Body(watcher):
            inner = function(*args, **kwargs)
            step = inner.asend(None)
            while True:
                try:
                    item = await _awaited(watcher, step)
                except StopAsyncIteration:
                    return
                try:
                    step = inner.asend((yield item))
                except GeneratorExit:
                    await _awaited(watcher, inner.aclose())
                    raise
                except BaseException as exception:
                    step = inner.athrow(exception)

    return wrapper


@types.coroutine
def _awaited(watcher: Watcher, awaitable: Any) -> Generator[Any, Any, Any]:
    return (yield from _drive(watcher, awaitable))


def _drive(watcher: Watcher, body: Any) -> Generator[Any, Any, Any]:
    """Run a generator-like body, active only between its suspensions."""
    active = Entered(watcher, pauses=False)  # its hooks have entered before
    resume: Callable[..., Any] = body.send
    value: Any = None
    while True:
        with active if not sys.is_finalizing() else nullcontext():  # then its hooks have exited
            try:
                yielded = resume(value)
            except StopIteration as stop:
                return stop.value
        try:
            value = yield yielded
            resume = body.send
        except GeneratorExit:
            with active if not sys.is_finalizing() else nullcontext():
                body.close()
            raise
        except BaseException as exception:
            resume, value = body.throw, exception


class _Body:
    """Keeps hooks entered and kernels installed while a generator or coroutine is suspended."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        exits.enter(self, self)

    __exit__ = exits.Exit(lambda self: self)

    def begin(self) -> None:
        outside.enter(self, self._watcher)
        self._watcher.engine.hold(self, self._watcher)
        self._watcher.pipeline.enter(self)

    def check(self) -> None:
        pass  # a body may end anywhere

    def end(self, failed: BaseException | None) -> None:
        try:
            self._watcher.engine.release(self)
        finally:
            try:
                outside.leave(self)
            finally:
                self._watcher.pipeline.exit(self, None if isinstance(failed, GeneratorExit) else failed)
