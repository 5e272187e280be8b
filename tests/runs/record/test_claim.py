"""Which folder a recorder may write to: only one recorder at a time, and it overwrites no run unless asked."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import TABLES, calls_of, files_in, forks, record, run_forked
from threads import run_threads

from opintercept import OpInterceptError, OpInterceptWarning, intercept, runs
from opintercept.runs import open_run
from opintercept.runs.record import writer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_writer_left")]


# One recorder at a time


def starts_at_once(make: Callable[[], Any], number: int, answers: Path, *, threads: bool) -> list[str]:
    """The results of several simultaneous starts. The recorder that runs stays active until all others are refused."""

    def attempt() -> None:
        answer = answers / str(threading.get_native_id())
        try:
            recorder = make()
            while time.time() < begin:
                pass
            recorder.enter()
        except (ValueError, OpInterceptError) as refused:
            answer.write_text(str(refused))
            return
        while len(list(answers.iterdir())) < number - 1 and time.time() < begin + 20:
            time.sleep(0.01)
        recorder.exit()
        answer.write_text("ran")

    answers.mkdir()
    begin = time.time() + 0.05
    run_threads(*[attempt if threads else partial(run_forked, attempt)] * number)
    return [answer.read_text() for answer in answers.iterdir()]


REFUSED = (
    r".*process.* is recording to .*; name another folder"
    r"|.* already holds a run; name another folder, or pass overwrite=True"
)


@forks
@pytest.mark.parametrize("before", ["nothing", "a run", "a run of a process that was killed"])
@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_of_simultaneous_starts_one_runs_and_the_others_are_refused(threads: bool, before: str, tmp_path: Path) -> None:
    for turn in range(10):
        path = tmp_path / str(turn)

        def is_killed(path: Path = path) -> None:
            runs.RunRecorder(path).enter()
            os.kill(os.getpid(), signal.SIGKILL)

        if before == "a run":
            record(path)
        elif before != "nothing":
            assert run_forked(is_killed) == -signal.SIGKILL
            assert (path / "recording.lock").exists()

        def make(path: Path = path) -> runs.RunRecorder:
            return runs.RunRecorder(path, overwrite=before != "nothing")

        told = starts_at_once(make, 3, tmp_path / f"answers{turn}", threads=threads)
        assert sorted(text == "ran" for text in told) == [False, False, True]
        for text in told:
            assert text == "ran" or re.fullmatch(REFUSED, text)
        assert open_run(path).info.finished
        assert sorted(entry.name for entry in path.iterdir()) == TABLES


def test_a_folder_that_is_written_to_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.eye(2) @ torch.eye(2)
        with pytest.raises(OpInterceptError, match=REFUSED):
            runs.RunRecorder(tmp_path / "run", overwrite=True).enter()
        with monkeypatch.context() as ranks:  # readers would take it for an older run of one process
            ranks.setenv("RANK", "1")
            ranks.setenv("WORLD_SIZE", "2")
            with pytest.raises(OpInterceptError, match=REFUSED):
                runs.RunRecorder(tmp_path / "run", overwrite=True).enter()
        torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / "run")) == 2
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        pass
    assert calls_of(tmp_path / "run") == []


@forks
def test_a_forked_child_does_not_keep_the_folder(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        record(tmp_path / "run", overwrite=True)
        assert len(calls_of(tmp_path / "run")) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recording.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        runs.RunRecorder(tmp_path / "run").enter()
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_recorder_whose_claim_is_gone_warns_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    with pytest.warns(OpInterceptWarning, match=r"after 0 calls: the folder was deleted or taken over by"):
        with intercept(recorder):
            writer.remove_run(tmp_path / "run", claimed=True)
            (tmp_path / "run/recording.lock").unlink()
            (tmp_path / "run/recording.lock").write_text("another's")
            (tmp_path / "run/run.json").write_text("another's")
            torch.eye(2) @ torch.eye(2)
    with intercept(recorder):  # it does not start again
        torch.eye(2) @ torch.eye(2)
    assert files_in(tmp_path / "run") == ["recording.lock", "run.json"]
    assert (tmp_path / "run/run.json").read_text() == "another's"


@pytest.mark.parametrize("what", ["tensors", ".", "calls.bin"])
def test_files_deleted_during_the_run_stop_the_recording_with_a_warning(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.warns(OpInterceptWarning, match=r"after 1 call: .* (was|were) deleted"):
        with intercept(runs.RunRecorder(path, "full")):
            torch.eye(2) @ torch.eye(2)
            while not (path / "calls.bin").stat().st_size:
                time.sleep(0.05)
            (path if what == "." else path / what).rename(tmp_path / "gone")
            torch.eye(3) @ torch.eye(3)
    if what != ".":
        assert not open_run(path).info.finished
    assert not (path / "recording.lock").exists()


def test_a_recorder_does_not_continue_the_run_of_another(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder):
        torch.eye(2) @ torch.eye(2)
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        pass
    with pytest.raises(OpInterceptError, match="no longer holds the run that this recorder began; make"):
        with intercept(recorder):
            pytest.fail("entered")


# Folders


@pytest.mark.parametrize("name", ["run", "a b", "ü\n%s{}", "deep/er/run", "-rf", "rank0"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    record(tmp_path / name)
    assert len(calls_of(tmp_path / name)) == 1


def test_a_run_is_overwritten_only_if_asked(tmp_path: Path) -> None:
    record(tmp_path / "run", "full")
    with pytest.raises(ValueError, match=r"run' already holds a run; name another folder, or pass"):
        runs.RunRecorder(tmp_path / "run")
    later = runs.RunRecorder(tmp_path / "other")
    record(tmp_path / "other")
    with pytest.raises(ValueError, match="already holds a run"):
        with intercept(later):
            pytest.fail("entered")
    (tmp_path / "run/notes.txt").write_text("mine")
    (tmp_path / "run/tensors/mine.safetensors").write_text("mine")
    again = runs.RunRecorder(tmp_path / "run", "none", overwrite=True)
    assert len(calls_of(tmp_path / "run")) == 1  # until it is entered
    for _ in range(2):
        with intercept(again):
            torch.eye(3) @ torch.eye(3)
    assert [call.values for call in calls_of(tmp_path / "run")] == [{}, {}]
    assert files_in(tmp_path / "run") == sorted([*TABLES, "tensors/mine.safetensors", "notes.txt"])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_not_a_run_is_left_alone(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/calls.csv").write_text("mine")
    with pytest.raises(ValueError, match="path must be a new folder, an empty one or a run, got"):
        runs.RunRecorder(tmp_path / "run", overwrite=overwrite)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["calls.csv"]


def test_the_run_json_of_another_program_is_left_alone(tmp_path: Path) -> None:
    for name in ("run.json", "tensors/00000000.safetensors", "calls.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"schema": 1}')
    with pytest.raises(OpInterceptError, match=r"cannot overwrite .*: it holds other files"):
        with intercept(runs.RunRecorder(tmp_path, overwrite=True)):
            pytest.fail("entered")
    assert len(files_in(tmp_path)) == 3


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    record(tmp_path / "run", "full")
    (tmp_path / "run/tensors").rename(tmp_path / "elsewhere")
    (tmp_path / "run/tensors").symlink_to(tmp_path / "elsewhere")
    record(tmp_path / "run", overwrite=True)
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["00000000.safetensors"]


def test_a_folder_that_cannot_be_made_is_an_error_on_entry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = runs.RunRecorder(tmp_path / "file/run")
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        with intercept(recorder):
            pytest.fail("entered")
