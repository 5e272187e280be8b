"""`InterceptCallback` and `LightningLog`: hooks, steps, curves and runs for the `Trainer` of Lightning.

Invariant: nothing of the training changes, and its block is left however `fit` ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from opintercept._blocks.intercept import Interceptor
from opintercept._core.errors import needs
from opintercept._core.hook import Hook
from opintercept._core.tables import Held
from opintercept.integrations._training import Training
from opintercept.runs.record.recorder import RunRecorder

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise needs("opintercept.integrations.lightning", "lightning") from missing


class LightningLog(Held):
    """Writes figures to the loggers of a trainer. `hooks.Scalars` takes it as a writer.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def log(self, values: dict[str, float], step: int) -> None:
        """Write the values for this step, counted from 0 as `trainer.global_step` is."""
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step)


class InterceptCallback(Held, Callback):
    """Watches `trainer.fit` with hooks.

    The block begins with the first step, after the sanity check, and ends with the training or with the exception that
    ends it. A step is one of the optimizer, and has the number `trainer.global_step` from before it, also if the
    training resumes from a checkpoint.

    Args:
        hooks: One hook or several, for all trainings.
        scalars: A function that makes a hook from a writer to the trainer's loggers: `hooks.Scalars`, or
            `partial(hooks.Scalars, values=["std"], every_steps=10)`.
        run: A folder. The run of each training is recorded there, as `training-0`, `training-1` and so on; all ranks
            of a training share one.
        recorder: A function that makes a hook from that folder, such as
            `partial(runs.RunRecorder, tensors="none", flight=1000)`.
        evaluation: Whether to watch validation during the training, too. Other validations, tests and predictions are
            not watched; put `with intercept(...)` around them.
        **options: As for `intercept`: `ops`, `engine`, `on_error` and so on.

    Raises:
        TypeError, ValueError: As from `intercept`; or `scalars` or `recorder` is no function.

    Example:
        trainer = Trainer(max_epochs=3, callbacks=[InterceptCallback(hooks.NonFinite())])
        trainer.fit(model, data)
    """

    def __init__(
        self,
        hooks: Hook | Iterable[Hook] = (),
        *,
        scalars: Callable[[LightningLog], Hook] | None = None,
        run: str | os.PathLike[str] | None = None,
        recorder: Callable[[Path], Hook] = RunRecorder,
        evaluation: bool = False,
        **options: Any,
    ) -> None:
        self._training = Training(hooks, scalars, run, recorder, evaluation, options)
        self._steps = 0

    @property
    def interceptor(self) -> Interceptor | None:
        """That of the training that runs, or None."""
        return self._training.interceptor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter the block."""
        self._steps = trainer.global_step
        self._training.begin(self._steps, LightningLog(trainer), trainer.strategy.broadcast)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count a step, if the optimizer has made one for this batch."""
        if trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._training.step(self._steps)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop watching."""
        self._training.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on."""
        self._training.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the block."""
        self._training.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the block, and let hooks know of the exception."""
        self._training.end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the block, if the trainer has stopped without an end."""
        self._training.end()
