"""`opintercept.integrations.lightning`, with a real `Trainer`."""

from __future__ import annotations

import csv
import importlib.util
import logging
import pickle
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings

from opintercept import hooks, runs
from opintercept._blocks.blocks import open_blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("no_writer_left"),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def callback(*hooks_: Any, **options: Any) -> Any:
    from opintercept.integrations.lightning import InterceptCallback

    return InterceptCallback(hooks_, **options)


def test_a_watched_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    _, plain = trainings.lightning_fit(tmp_path / "plain")
    observer = callback(hooks.NonFinite(), hooks.Profile(), scalars=hooks.Scalars, run=tmp_path / "runs")
    _, model = trainings.lightning_fit(tmp_path / "watched", observer)
    assert len(plain.losses) == 6
    assert model.losses == plain.losses
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


def test_steps_are_those_of_the_optimizer_and_validation_is_not_watched(tmp_path: Path) -> None:
    recorder = hooks.Recorder()
    trainings.lightning_fit(tmp_path, callback(recorder), epochs=2)
    # Two batches a step, each with two calls forward and three backward.
    assert Counter(record.step for record in recorder.records) == dict.fromkeys(range(6), 10)


def test_validation_during_the_training_is_watched_if_asked_for(tmp_path: Path) -> None:
    recorder = hooks.Recorder()
    trainings.lightning_fit(tmp_path, callback(recorder, evaluation=True))
    # Six batches with two calls each, after the three steps; the sanity check comes before the training.
    assert Counter(record.step for record in recorder.records) == dict.fromkeys(range(3), 10) | {3: 12}


def test_a_resumed_training_goes_on_with_its_steps_in_a_folder_of_its_own(tmp_path: Path) -> None:
    observer = callback(run=tmp_path / "runs")
    trainer, _ = trainings.lightning_fit(tmp_path / "first", observer)
    checkpoint = trainer.checkpoint_callback.best_model_path
    trainings.lightning_fit(tmp_path / "second", observer, epochs=2, checkpoint=checkpoint)
    first, second = (list(runs.open_run(tmp_path / "runs" / f"training-{place}").calls()) for place in (0, 1))
    assert Counter(call.record.step for call in first) == dict.fromkeys((0, 1, 2), 10)
    assert Counter(call.record.step for call in second) == dict.fromkeys((3, 4, 5), 10)


def test_an_exception_leaves_the_block_and_reaches_the_flight_recorder(tmp_path: Path) -> None:
    # The sanity check takes two calls.
    recorder = partial(runs.RunRecorder, tensors="none", flight=5)
    observer = callback(run=tmp_path / "runs", recorder=recorder)
    with pytest.raises(ZeroDivisionError, match="the model fails"):
        trainings.lightning_fit(tmp_path, observer, fails=6)
    assert observer.interceptor is None
    assert not open_blocks()
    calls = list(runs.open_run(tmp_path / "runs" / "training-0").calls())
    assert [(call.record.step, call.record.phase) for call in calls] == [(1, "forward")] * 2 + [(1, "backward")] * 3


def test_an_exception_in_a_validation_leaves_the_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="the model fails"):
        trainings.lightning_fit(tmp_path, callback(hooks.Recorder()), fails=10)
    assert not open_blocks()


def test_an_interrupt_leaves_the_block(tmp_path: Path) -> None:
    def interrupt(call: Any) -> None:
        if call.step == 1:
            raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="1"):
        trainings.lightning_fit(tmp_path, callback(interrupt))
    assert not open_blocks()


def test_figures_reach_the_loggers_of_the_trainer(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    loggers = [CSVLogger(tmp_path, name) for name in ("one", "two")]
    observer = callback(scalars=partial(hooks.Scalars, values=["calls"], every_steps=2))
    trainings.lightning_fit(tmp_path, observer, logger=loggers)
    for logger in loggers:
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        assert [(row["step"], row["first/addmm/output/forward/calls"]) for row in rows] == [("1", "4"), ("2", "2")]


def test_ranks_share_the_folder_of_a_training(tmp_path: Path) -> None:
    trainings.on_two_ranks("lightning", tmp_path)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["training-0"]
    run = runs.open_run(tmp_path / "runs" / "training-0")
    assert sorted(run.infos) == [0, 1]


def test_a_copy_for_another_process_is_in_no_training() -> None:
    copy = pickle.loads(pickle.dumps(callback(hooks.NonFinite(), scalars=hooks.Scalars, run="runs")))
    assert copy.interceptor is None
