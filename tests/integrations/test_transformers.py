"""`opintercept.integrations.transformers`, with a real `Trainer`."""

from __future__ import annotations

import importlib
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings

from opintercept import NonFiniteError, hooks, intercept, runs
from opintercept._blocks.blocks import open_blocks

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_writer_left")]


def watched(trainer: Any, *hooks_: Any, **options: Any) -> Any:
    from opintercept.integrations.transformers import InterceptCallback

    callback = InterceptCallback(trainer, hooks_, **options)
    trainer.add_callback(callback)
    return callback


class Log:
    """What a trainer reports to."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            def __init__(self) -> None:
                self.logged: list[tuple[int, dict[str, float]]] = []
                self.ended = False

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                assert not self.ended
                self.logged.append((state.global_step, dict(logs)))

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                self.ended = True

        return Callback()


def test_a_watched_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    plain = trainings.transformers_trainer(tmp_path / "plain")
    plain.train()
    trainer = trainings.transformers_trainer(tmp_path / "watched")
    watched(trainer, hooks.NonFinite(), hooks.Profile(), scalars=hooks.Scalars, run=tmp_path / "runs")
    trainer.train()
    losses = trainings.transformers_losses(plain)
    assert len(losses) == 6
    assert trainings.transformers_losses(trainer) == losses
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, trainer.model.state_dict()[name])


def test_steps_are_those_of_the_optimizer_and_evaluation_is_not_watched(tmp_path: Path) -> None:
    trainer, recorder = trainings.transformers_trainer(tmp_path), hooks.Recorder()
    watched(trainer, recorder)
    trainer.train()
    # Two batches a step, each with two calls forward and three backward.
    assert Counter(record.step for record in recorder.records) == dict.fromkeys(range(6), 10)
    assert trainer.evaluate()["eval_loss"] > 0
    assert len(recorder.records) == 60


def test_evaluation_during_the_training_is_watched_if_asked_for(tmp_path: Path) -> None:
    trainer, recorder = trainings.transformers_trainer(tmp_path), hooks.Recorder()
    watched(trainer, recorder, evaluation=True)
    trainer.train()
    # Three batches of eight rows.
    assert Counter(record.step for record in recorder.records) == dict.fromkeys((0, 1, 2, 4, 5), 10) | {3: 16, 6: 6}


def test_evaluations_of_several_sets_are_not_watched(tmp_path: Path) -> None:
    trainer, recorder = trainings.transformers_trainer(tmp_path), hooks.Recorder()
    trainer.eval_dataset = {"one": trainings.Rows(), "two": trainings.Rows()}
    watched(trainer, recorder)
    trainer.train()
    assert len(recorder.records) == 60
    assert {"eval_one_loss", "eval_two_loss"} <= {key for entry in trainer.state.log_history for key in entry}


def test_a_resumed_training_goes_on_with_its_steps_in_a_folder_of_its_own(tmp_path: Path) -> None:
    whole = trainings.transformers_trainer(tmp_path / "whole")
    watched(whole, run=tmp_path / "runs")
    whole.train()
    resumed = trainings.transformers_trainer(tmp_path / "resumed")
    watched(resumed, run=tmp_path / "runs")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    first, second = (list(runs.open_run(tmp_path / "runs" / f"training-{place}").calls()) for place in (0, 1))
    assert Counter(call.record.step for call in second) == {3: 10, 4: 10, 5: 10}
    assert [call.values for call in second] == [call.values for call in first if call.record.step >= 3]


def test_a_trainer_may_train_twice(tmp_path: Path) -> None:
    trainer, recorder = trainings.transformers_trainer(tmp_path, save_strategy="no"), hooks.Recorder()
    watched(trainer, recorder, run=tmp_path / "runs")
    trainer.train()
    trainer.train()
    assert Counter(record.step for record in recorder.records) == dict.fromkeys(range(6), 20)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["training-0", "training-1"]


def test_an_exception_leaves_the_block_and_reaches_the_flight_recorder(tmp_path: Path) -> None:
    trainer = trainings.transformers_trainer(tmp_path, fails=4)
    recorder = partial(runs.RunRecorder, tensors="none", flight=5)
    callback = watched(trainer, run=tmp_path / "runs", recorder=recorder)
    with pytest.raises(ZeroDivisionError, match="the model fails"):
        trainer.train()
    assert callback.interceptor is None
    assert not open_blocks()
    calls = list(runs.open_run(tmp_path / "runs" / "training-0").calls())
    assert [(call.record.step, call.record.phase) for call in calls] == [(1, "forward")] * 2 + [(1, "backward")] * 3
    trainer.train()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["training-0"]  # the second ended well


def test_an_exception_in_an_evaluation_leaves_the_block(tmp_path: Path) -> None:
    trainer = trainings.transformers_trainer(tmp_path, fails=8)
    watched(trainer, hooks.Recorder())
    with pytest.raises(ZeroDivisionError, match="the model fails"):
        trainer.train()
    assert not open_blocks()


def test_a_nan_ends_the_training_with_its_step(tmp_path: Path) -> None:
    trainer = trainings.transformers_trainer(tmp_path)
    with torch.no_grad():
        trainer.model.last.weight.fill_(3e38)
    watched(trainer, hooks.NonFinite(inf=True))
    with pytest.raises(NonFiniteError, match="made by aten::addmm in module 'last'"):
        trainer.train()
    assert not open_blocks()


def test_a_training_that_begins_again_with_smaller_batches_leaves_the_first_block(tmp_path: Path) -> None:
    trainer, recorder = trainings.transformers_trainer(tmp_path, auto_find_batch_size=True), hooks.Recorder()
    watched(trainer, recorder)
    steps: list[int] = []
    plain = trainer.training_step

    def step(*args: Any, **kwargs: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 3:
            raise RuntimeError("CUDA out of memory.")
        return plain(*args, **kwargs)

    trainer.training_step = step
    trainer.train()
    assert not open_blocks()
    assert len(recorder.records) == 10 + 60


def test_figures_reach_what_the_trainer_reports_to_and_not_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, log = trainings.transformers_trainer(tmp_path), Log()
    trainer.add_callback(log)
    watched(trainer, scalars=partial(hooks.Scalars, values=["calls"], every_steps=4))
    trainer.train()
    name = "first/addmm/output/forward/calls"
    assert [(step, values[name]) for step, values in log.logged if name in values] == [(4, 8), (6, 4)]
    assert [step for step, values in log.logged if "loss" in values] == [1, 2, 3, 4, 5, 6]
    printed = capsys.readouterr().out
    assert "'loss'" in printed
    assert name not in printed
    assert not any(name in entry for entry in trainer.state.log_history)


def test_figures_of_any_callback_leave_the_logs_of_the_trainer_as_they_are(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from opintercept.integrations.transformers import TransformersLog

    class Writes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            TransformersLog(trainer).log({"figure": 1.0})

    trainer, log = trainings.transformers_trainer(tmp_path), Log()
    for callback in (Writes(), log):
        trainer.add_callback(callback)
    trainer.train()
    assert [step for step, values in log.logged if "figure" in values] == [1, 2, 3, 4, 5, 6]
    assert len(trainings.transformers_losses(trainer)) == 6


def test_tensorboard_gets_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    accumulator: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    trainer = trainings.transformers_trainer(tmp_path / "out", report_to=["tensorboard"])
    watched(trainer, scalars=partial(hooks.Scalars, values=["calls"]))
    trainer.train()
    (file,) = (tmp_path / "logs").rglob("events*")
    events = accumulator.EventAccumulator(str(file.parent))
    events.Reload()
    found = events.Scalars("train/last/addmm/output/forward/calls")
    assert [(event.step, event.value) for event in found] == [(step, 2) for step in range(1, 7)]
    with intercept():  # the writer's thread kept the kernels of the block before installed
        pass


def test_ranks_share_the_folder_of_a_training(tmp_path: Path) -> None:
    trainings.on_two_ranks("transformers", tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["training-0"]
    run = runs.open_run(tmp_path / "runs" / "training-0")
    assert sorted(run.infos) == [0, 1]
    assert {call.record.step for call in run.calls()} == set(range(6))


def test_the_callback_alone_is_refused() -> None:
    from opintercept.integrations.transformers import InterceptCallback

    with pytest.raises(
        TypeError, match=r"the first argument must be the Trainer, got NonFinite\(0 findings.*add_callback"
    ):
        InterceptCallback(hooks.NonFinite())  # type: ignore[arg-type]


def test_wrong_hooks_and_options_are_refused_before_the_training(tmp_path: Path) -> None:
    trainer = trainings.transformers_trainer(tmp_path)
    with pytest.raises(ValueError, match="unknown op 'nothing'"):
        watched(trainer, ops="nothing")
    with pytest.raises(TypeError, match="scalars must be a function that makes a hook, such as a class, got True"):
        watched(trainer, scalars=True)
