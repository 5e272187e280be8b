"""`Training`: the block, the steps and the run folder of one training, for the callbacks of trainers.

Invariant: however a training ends, its block is left, and hooks see the exception if there is one.
Must not import a trainer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from opintercept._blocks.intercept import Interceptor, intercept
from opintercept._core.hook import Hook, is_hook

_NUMBERED = re.compile(r"training-(\d+)")


class Training:
    """Enters a block for each training of a trainer, and counts its steps.

    Args:
        hooks: Hooks for all trainings.
        scalars: Makes a hook from the writer of each training, such as `hooks.Scalars`.
        run: The folder in which each training gets a folder for its run.
        recorder: Makes a hook from that folder.
        evaluation: Whether to watch evaluation within the training.
        options: As for `intercept`.

    Attributes:
        interceptor: That of the training that runs, or None.
    """

    def __init__(
        self,
        hooks: Hook | Iterable[Hook],
        scalars: Callable[[Any], Hook] | None,
        run: str | os.PathLike[str] | None,
        recorder: Callable[[Path], Hook],
        evaluation: bool,
        options: dict[str, Any],
    ) -> None:
        alone = is_hook(hooks) or isinstance(hooks, (str, type)) or not isinstance(hooks, Iterable)
        self._hooks: list[Any] = [hooks] if alone else list(hooks)  # type: ignore[arg-type]
        intercept(self._hooks, **options)  # refuses now what the training would refuse
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
        self.interceptor: Interceptor | None = None

    def begin(self, step: int, writer: Any, agree: Callable[[str], str]) -> None:
        """Enter the block of a training; one that still runs has been given up, and ends first.

        Args:
            step: The number of its first step.
            writer: Writes to the trainer's logger.
            agree: Returns what the first rank passes to it.

        Raises:
            ImportError, OSError, TypeError, ValueError: As from `scalars` and `recorder`.
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
        """Leave the block, if it is entered.

        Args:
            exception: What ended the training, if anything did.
        """
        self.interceptor = None
        leave = partial(self._stack.__exit__, *_triple(exception))
        try:
            self.resume()
        finally:
            leave()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, exception: BaseException | None, trace: Any) -> None:
        self.end(exception)

    def __reduce__(self) -> tuple[Any, ...]:
        # A trainer that starts processes sends them its callbacks. A copy is in no training.
        return Training, (self._hooks, self._scalars, self._run, self._recorder, self._evaluation, self._options)


def _triple(exception: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if exception is None else (type(exception), exception, exception.__traceback__)


def _unused(folder: Path) -> str:
    """A name for a further training."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = [int(found[1]) for name in names if (found := _NUMBERED.fullmatch(name))]
    return f"training-{max(numbers, default=-1) + 1}"
