"""`Training`: the block, the steps and the run folder of one training, for the callbacks of trainers.

Invariant: however a training ends, its block is left, and hooks see the exception if there is one.
Must not import a trainer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

from opintercept._blocks.intercept import Interceptor, intercept
from opintercept._core.hook import Hook

_NUMBERED = re.compile(r"training-(\d+)")


class Training:
    """Enters a block for each training of a trainer, and counts its steps. `InterceptCallback` has the arguments."""

    def __init__(
        self,
        hooks: Hook | Iterable[Hook],
        scalars: Callable[[Any], Hook] | None,
        run: str | os.PathLike[str] | None,
        recorder: Callable[[Path], Hook],
        evaluation: bool,
        options: dict[str, Any],
    ) -> None:
        # Refuses now what the training would refuse.
        self._hooks = list(intercept(hooks, **options).watcher.pipeline.hooks)
        for name, value in (("scalars", scalars), ("recorder", recorder)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function that makes a hook, such as a class, got {value!r}")
        self._scalars = scalars
        self._run = None if run is None else Path(run)
        self._recorder = recorder
        self._evaluation = evaluation
        self._options = options
        self._stack = ExitStack()
        self._pauses = ExitStack()
        self.interceptor: Interceptor | None = None  # that of the training that runs

    def begin(self, step: int, writer: Any, agree: Callable[[str], str]) -> None:
        """Enter the block of a training, whose first step has this number.

        `agree` returns what the first rank gives it. A training that still runs has been given up, and ends first.
        """
        self.end()
        hooks = list(self._hooks)
        if self._scalars is not None:
            hooks.append(self._scalars(writer))
        if self._run is not None:
            hooks.append(self._recorder(self._run / agree(_unused(self._run))))
        interceptor = intercept(hooks, **self._options)
        interceptor.step(step)
        self.interceptor = self._stack.enter_context(interceptor)

    def step(self, number: int) -> None:
        """End a step; the next one has this number."""
        if self.interceptor is not None:
            self.interceptor.step(number)

    def paused(self) -> AbstractContextManager[None]:
        """A context manager for an evaluation, inside which nothing is watched unless evaluation is to be."""
        return nullcontext() if self.interceptor is None or self._evaluation else self.interceptor.paused()

    def pause(self) -> None:
        """Begin an evaluation."""
        self._pauses.enter_context(self.paused())

    def resume(self) -> None:
        """End the evaluation."""
        self._pauses.close()

    def end(self, exception: BaseException | None = None) -> None:
        """Leave the block, if it is entered. `exception` is what ended the training, if anything did."""
        self.interceptor = None
        trace = None if exception is None else exception.__traceback__
        try:
            self.resume()
        finally:
            self._stack.__exit__(None if exception is None else type(exception), exception, trace)

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exception: BaseException | None, trace: Any) -> None:
        self.end(exception)

    def __reduce__(self) -> tuple[Any, ...]:
        # A trainer that starts processes sends them its callbacks. A copy is in no training.
        return Training, (self._hooks, self._scalars, self._run, self._recorder, self._evaluation, self._options)


def _unused(folder: Path) -> str:
    """A name for a further training."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = [int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name))]
    return f"training-{max(numbers, default=-1) + 1}"
