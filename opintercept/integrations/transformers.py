"""`InterceptCallback` and `TransformersLog`: hooks, steps, curves and runs for the `Trainer` of transformers.

Invariant: nothing of the training changes, and its block is left even if `Trainer` does not call the callback again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from opintercept._blocks.intercept import Interceptor
from opintercept._core.errors import needs
from opintercept._core.hook import Hook
from opintercept._core.tables import Held
from opintercept.integrations._training import Training
from opintercept.runs.record.recorder import RunRecorder

try:
    from transformers import (
        PrinterCallback,
        ProgressCallback,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as missing:
    raise needs("opintercept.integrations.transformers", "transformers", "transformers accelerate") from missing

_PRINTERS = (PrinterCallback, ProgressCallback)


class TransformersLog(Held):
    """Writes figures to whatever a trainer reports to. `hooks.Scalars` takes it as a writer.

    That is each callback with an `on_log`, as for `trainer.log`, except those that print. The history of the trainer,
    which goes into each checkpoint, does not grow either: a model of 100 layers has a thousand figures in each step.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        """Write the values for the trainer's own step, `state.global_step`, which it counts from 1."""
        trainer = self._trainer
        handler = copy(trainer.callback_handler)
        handler.callbacks = [each for each in handler.callbacks if not isinstance(each, _PRINTERS)]
        wanted = trainer.control.should_log
        handler.on_log(trainer.args, trainer.state, trainer.control, dict(values))
        trainer.control.should_log = wanted  # the trainer's own log is still to come


class InterceptCallback(Held, TrainerCallback):
    """Watches each training of a `Trainer` with hooks.

    The block begins with the first step and ends with the training. A step is one of the optimizer, and has the number
    `state.global_step` from before it, also if the training resumes from a checkpoint.

    `Trainer` tells its callbacks nothing of an exception. So the callback replaces the methods `train` and `evaluate`
    of this one trainer by ones that call them and leave the block, or the pause, whatever happens. It also moves itself
    to the front of the trainer's callbacks when a training begins, so that loggers are still open when the block ends.

    Args:
        trainer: The trainer that you add the callback to.
        hooks: One hook or several, for all trainings.
        scalars: A function that makes a hook from a writer to the trainer's logger: `hooks.Scalars`, or
            `partial(hooks.Scalars, values=["std"], every_steps=10)`.
        run: A folder. The run of each training is recorded there, as `training-0`, `training-1` and so on; all ranks
            of a training share one.
        recorder: A function that makes a hook from that folder, such as
            `partial(runs.RunRecorder, tensors="none", flight=1000)`.
        evaluation: Whether to watch evaluations during the training, too. Evaluations and predictions at other times
            are not watched; put `with intercept(...)` around them.
        **options: As for `intercept`: `ops`, `engine`, `on_error` and so on.

    Raises:
        TypeError, ValueError: As from `intercept`; or `scalars` or `recorder` is no function.

    Attributes:
        interceptor: That of the training that runs, or None.

    Example:
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(InterceptCallback(trainer, hooks.NonFinite()))
        trainer.train()
    """

    def __init__(
        self,
        trainer: Trainer,
        hooks: Hook | Iterable[Hook] = (),
        *,
        scalars: Callable[[TransformersLog], Hook] | None = None,
        run: str | os.PathLike[str] | None = None,
        recorder: Callable[[Path], Hook] = RunRecorder,
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"the first argument must be the Trainer, got {trainer!r}; add the callback with "
                "trainer.add_callback(InterceptCallback(trainer, ...))"
            )
        self._training = Training(hooks, scalars, run, recorder, evaluation, options)
        self._trainer = trainer
        trainer.train = update_wrapper(partial(self._train, trainer.train), trainer.train)  # type: ignore[method-assign]
        trainer.evaluate = update_wrapper(partial(self._evaluate, trainer.evaluate), trainer.evaluate)  # type: ignore[method-assign]

    @property
    def interceptor(self) -> Interceptor | None:
        """That of the training that runs, or None."""
        return self._training.interceptor

    def _train(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        callbacks = self._trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)
        with self._training:
            return train(*args, **kwargs)

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._training.paused():
            return evaluate(*args, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Enter the block."""
        self._training.begin(state.global_step, TransformersLog(self._trainer), _of_first_rank)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count a step of the optimizer."""
        self._training.step(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the block."""
        self._training.end()


def _of_first_rank(name: str) -> str:
    from accelerate.utils import broadcast_object_list

    names = [name]
    broadcast_object_list(names)
    return names[0]
