"""`Training`, which the callbacks of all trainers share, without a trainer, and integrations without their package."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python

from opintercept import OpInterceptWarning, hooks
from opintercept._blocks.blocks import open_blocks
from opintercept.integrations._training import Training
from opintercept.runs.record.recorder import RunRecorder


def training(*hooks_: Any, **given: Any) -> Training:
    known: dict[str, Any] = {"scalars": None, "run": None, "recorder": RunRecorder, "evaluation": False, "options": {}}
    return Training(hooks_, **known | given)


def begin(one: Training, step: int = 0, writer: Any = None) -> None:
    one.begin(step, writer, lambda name: name)


def multiply() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2)


def test_calls_are_seen_from_the_beginning_to_the_end_with_their_steps() -> None:
    recorder = hooks.Recorder()
    one = training(recorder)
    multiply()
    begin(one, 7)
    multiply()
    one.step(8)
    multiply()
    one.end()
    one.end()
    multiply()
    one.step(9)
    assert [record.step for record in recorder.records] == [7, 8]
    assert not open_blocks()


def test_a_pause_ends_with_the_training() -> None:
    recorder = hooks.Recorder()
    one = training(recorder)
    begin(one)
    one.pause()
    multiply()
    one.end()
    assert not open_blocks()
    assert recorder.records == []
    one.pause()  # as in a sanity check before the training
    begin(one)
    multiply()
    one.end()
    assert len(recorder.records) == 1


def test_one_hook_alone_and_a_generator_of_hooks_are_taken() -> None:
    for given in (hook := hooks.Recorder()), (each for each in [hook]):
        one = Training(given, None, None, RunRecorder, False, {})
        for _ in range(2):
            begin(one)
            multiply()
            one.end()
    assert len(hook.records) == 4


def test_hooks_are_made_from_the_writer_and_the_folder(tmp_path: Path) -> None:
    made: list[Any] = []

    def maker(what: Any) -> Any:
        made.append(what)
        return lambda call: None

    one = training(scalars=maker, run=tmp_path, recorder=maker)
    begin(one, writer="the writer")
    one.end()
    assert made == ["the writer", tmp_path / "training-0"]


def test_a_folder_has_the_number_after_the_highest_and_the_name_of_the_first_rank(tmp_path: Path) -> None:
    for name in "training-2", "training-10", "training-x", "other":
        (tmp_path / name).mkdir()
    names: list[str] = []

    def agree(name: str) -> str:
        names.append(name)
        return "training-20"

    one = training(run=tmp_path)
    one.begin(0, None, agree)
    one.end()
    assert names == ["training-11"]
    assert (tmp_path / "training-20" / "run.json").exists()


def test_a_hook_that_fails_on_exit_does_not_replace_what_ended_the_training() -> None:
    class Fails:
        def post(self, call: Any) -> None: ...

        def exit(self) -> None:
            raise OSError("no space left")

    one = training(Fails())
    begin(one)
    with pytest.warns(OpInterceptWarning, match="a hook failed on exit: OSError"):
        one.end(ZeroDivisionError())
    begin(one)
    with pytest.raises(OSError, match="no space left"):
        one.end()
    assert not open_blocks()


def test_a_copy_is_in_no_training() -> None:
    one = training(hooks.Recorder())
    begin(one)
    other = copy.deepcopy(one)
    assert other.interceptor is None
    other.end()
    assert one.interceptor is not None
    multiply()
    one.end()
    begin(other)
    other.end()


@pytest.mark.parametrize("name", ["scalars", "recorder"])
def test_what_makes_a_hook_must_be_a_function(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a function that makes a hook, such as a class, got 3"):
        training(**{name: 3})


def test_wrong_hooks_and_options_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="hook"):
        training(3)
    with pytest.raises(ValueError, match="unknown op 'nothing'"):
        training(options={"ops": "nothing"})
    with pytest.raises(TypeError, match="hook"):
        Training("NonFinite", None, None, RunRecorder, False, {})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("lightning", "lightning", "lightning"),
        ("prometheus", "prometheus_client", "prometheus-client"),
        ("transformers", "transformers", "transformers accelerate"),
    ],
)
def test_an_integration_says_what_to_install(name: str, package: str, install: str) -> None:
    module = f"opintercept.integrations.{name}"
    done = run_python("-c", f"import sys; sys.modules[{package!r}] = None; import {module}")
    assert done.stderr.splitlines()[-1] == f"ImportError: {module} needs {package}; pip install {install}"
