"""What is on disk when a recording ends: by a limit, a full disk, a signal or the end of the program."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import calls_of, forks, run_forked, run_script, tensor_of
from threads import run_threads

from opintercept import OpInterceptWarning, intercept, runs
from opintercept.runs import open_run
from opintercept.runs.record import writer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_writer_left")]


def test_max_bytes_stops_the_recording_with_one_warning(tmp_path: Path) -> None:
    with pytest.warns(OpInterceptWarning, match="^stopped recording to .*max_bytes=100000") as caught:
        with intercept(runs.RunRecorder(tmp_path / "run", "full", max_bytes=100_000)):
            for _ in range(100):
                torch.randn(32, 32) @ torch.randn(32, 32)
    assert len(caught) == 1
    assert 50_000 < sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 100_000
    run = open_run(tmp_path / "run")
    assert not run.info.finished
    for call in run.calls():
        assert run.tensor(call, "output") is not None


@forks
def test_a_full_disk_stops_the_recording_and_not_the_program(tmp_path: Path) -> None:
    def child() -> None:
        # A file that grows beyond this limit fails like one on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with intercept(runs.RunRecorder(tmp_path / "run", "none")):
                for i in range(3000):
                    torch.eye(2) @ torch.eye(2)
                    if i % 512 == 511:
                        time.sleep(0.02)
        (tmp_path / "told").write_text("\n".join(str(warning.message) for warning in caught))

    assert run_forked(child) == 0
    found = calls_of(tmp_path / "run")  # whole lines, no warning
    assert [call.record.index for call in found] == list(range(len(found)))
    assert 100 < len(found) < 3000
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert f"after {len(found):,} calls: OSError: [Errno 27] File too large" in told


@pytest.mark.parametrize("fails", ["_save", "_append"])
def test_a_disk_that_fails_gives_one_warning(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    with intercept(recorder):
        torch.eye(2) @ torch.eye(2)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Writer, fails, full)
    with pytest.warns(OpInterceptWarning, match=r"^stopped recording .* after 1 call: OSError: \[Errno 28\]") as caught:
        for _ in range(3):
            with intercept(recorder):
                torch.eye(3) @ torch.eye(3)
    assert len(caught) == 1
    monkeypatch.undo()
    assert len(calls_of(tmp_path / "run")) == 1
    assert not open_run(tmp_path / "run").info.finished


@forks
def test_a_killed_program_leaves_all_but_the_last_interval(tmp_path: Path) -> None:
    def child() -> None:
        with intercept(runs.RunRecorder(tmp_path / "run", "full")):
            for wait in (1.7, 0.0):
                for i in range(100):
                    torch.full((2, 2), float(i)) @ torch.eye(2)
                time.sleep(wait)
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(child) == -signal.SIGKILL
    run = open_run(tmp_path / "run")
    assert not run.info.finished
    found = list(run.calls())
    assert len(found) >= 100
    for call in found:
        assert tensor_of(run, call)[0, 0] == float(call.record.index % 100)


@forks
def test_a_program_killed_at_any_time_can_be_read(tmp_path: Path) -> None:
    for name in range(8):

        def child(path: Path = tmp_path / str(name)) -> None:
            writer.INTERVAL = 0.001
            with intercept(runs.RunRecorder(path, "full")):
                while True:
                    torch.randn(8, 8) @ torch.eye(8)

        pid = os.fork()
        if not pid:
            child()
        calls, end = tmp_path / str(name) / "calls.bin", time.monotonic() + 60
        while not (calls.exists() and calls.stat().st_size) and time.monotonic() < end:
            time.sleep(0.01)  # its start may take longer on a machine with other work
        time.sleep(0.03 * name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        run = open_run(tmp_path / str(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpInterceptWarning)  # a torn line
            found = list(run.calls())
        assert found
        for call in found:
            for role in call.tensors:
                assert run.tensor(call, role) is not None


def interrupt_itself() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "sys.exit": (lambda: sys.exit(3), 3),
    "an exception": (lambda: [].pop(), 1),
    "an interrupt": (interrupt_itself, 130),
}


@forks
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_inside_the_block(end: str, tmp_path: Path) -> None:
    program, status = ENDS[end]

    def child() -> None:
        with intercept(runs.RunRecorder(tmp_path / "run")):
            torch.eye(2) @ torch.eye(2)
            program()

    assert run_forked(child) == status
    assert open_run(tmp_path / "run").info.finished
    assert len(calls_of(tmp_path / "run")) == 1


def test_a_block_that_is_never_left_is_written_at_the_end(tmp_path: Path) -> None:
    code = f"""
import atexit
block = intercept(runs.RunRecorder({str(tmp_path / "run")!r}))
def last():
    torch.eye(3) @ torch.eye(3)
atexit.register(last)
block.__enter__()
torch.eye(2) @ torch.eye(2)
atexit.register(last)
"""
    done = run_script(code)
    assert done.stderr == ""
    assert open_run(tmp_path / "run").info.finished
    assert [call.values["lhs"].count for call in calls_of(tmp_path / "run")] == [4, 9, 9]


@pytest.mark.parametrize("raises", [False, True], ids=["ends", "raises"])
def test_a_flight_of_a_block_that_is_never_left_is_written_if_the_program_fails(raises: bool, tmp_path: Path) -> None:
    code = f"""
block = intercept(runs.RunRecorder({str(tmp_path / "run")!r}, flight=9))
block.__enter__()
torch.eye(2) @ torch.eye(2)
{"1 / 0" * raises}
"""
    assert run_script(code, check=False).returncode == raises
    assert (
        [call.record.op for call in calls_of(tmp_path / "run")] == ["aten::mm"]
        if raises
        else not any(tmp_path.iterdir())
    )


def test_an_interrupt_while_the_rest_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writer.Writer._write

    def slow(self: Any, batch: Any) -> None:
        time.sleep(0.3)
        write(self, batch)

    monkeypatch.setattr(writer.Writer, "_write", slow)
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    recorder = runs.RunRecorder(tmp_path / "run")
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            with intercept(recorder):
                torch.eye(2) @ torch.eye(2)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    recorder._stop()  # as at the end of the program
    assert open_run(tmp_path / "run").info.finished
    assert len(calls_of(tmp_path / "run")) == 1


def test_a_slow_disk_makes_the_program_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_CALLS", 8)
    write, most = writer.Writer._write, []

    def slow(self: Any, batch: Any) -> None:
        time.sleep(0.05)
        most.append(len(self._waiting))
        write(self, batch)

    monkeypatch.setattr(writer.Writer, "_write", slow)
    started = time.monotonic()
    with intercept(runs.RunRecorder(tmp_path / "run"), threads="all"):
        run_threads(*[lambda: [torch.eye(2) @ torch.eye(2) for _ in range(150)]] * 3)
    assert time.monotonic() - started > 0.5
    assert max(most) <= 8 * writer.QUEUED_BATCHES
    assert len(calls_of(tmp_path / "run")) == 450
