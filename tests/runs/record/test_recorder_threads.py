"""`RunRecorder` in nested blocks, threads, coroutines, signal handlers and forked processes."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import calls_of, forks, run_forked, run_script, tensor_of
from threads import run_threads
from torch import Tensor

from opintercept import intercept, runs
from opintercept.runs import open_run
from opintercept.runs.record import writer

pytestmark = pytest.mark.usefixtures("no_writer_left")


# Blocks, threads, processes


def test_a_recorder_continues_its_run(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    block = intercept(recorder)
    for number in range(3):
        with block:
            torch.full((2, 2), number + 1.0) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    found = list(run.calls())
    assert [call.record.index for call in found] == [0, 1, 2]
    for number, call in enumerate(found):
        assert tensor_of(run, call)[0, 0] == number + 1


def test_one_recorder_in_two_interceptors_at_once(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder, ops="mm"):
        with intercept(recorder, ops="bmm"):
            torch.eye(2) @ torch.eye(2)
            torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        torch.eye(2) @ torch.eye(2)
    assert [call.record.op for call in calls_of(tmp_path / "run")] == ["aten::mm", "aten::bmm", "aten::mm"]


def test_nested_interceptors_each_write_their_run(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "a", "full")):
        with intercept(runs.RunRecorder(tmp_path / "b", "full")):
            torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / "a")) == len(calls_of(tmp_path / "b")) == 1


def test_no_thread_that_a_block_waits_for_imports_torch() -> None:
    code = """
import builtins, tempfile, threading
plain, found = builtins.__import__, set()
def watched(name, *rest, **more):
    if threading.current_thread() is not threading.main_thread():
        found.add(name.partition(".")[0])
    return plain(name, *rest, **more)
builtins.__import__ = watched
for number, options in enumerate((("none",), ("stats",), ("sample",), ("full",), ("stats", 9))):
    with tempfile.TemporaryDirectory() as folder:
        recorder = runs.RunRecorder(f"{folder}/run", options[0], flight=(*options, None)[1])
        for fails in (True, False):
            try:
                with intercept(recorder, ops="all"):
                    torch.nn.Linear(2, 2)(torch.randn(3, 2)).sum().backward()
                    {}["fails"] if fails else None
            except KeyError:
                pass
builtins.__import__ = plain
print(found & {"torch", "opintercept"}, "numpy" in found)
"""
    assert run_script(code).stdout == "set() True\n"


def test_a_recording_leaves_no_thread_that_a_program_cannot_join(tmp_path: Path) -> None:
    before = threading.enumerate()
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert threading.enumerate() == before


def test_threads_of_one_block_lose_no_call(tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run", "full"), threads="all")

    def work(number: int) -> None:
        for i in range(200):
            torch.full((2, 2), number * 1000.0 + i) @ torch.eye(2)

    with block:
        run_threads(*(partial(work, number) for number in range(4)))
    run = open_run(tmp_path / "run")
    found = list(run.calls())
    assert sorted(call.record.index for call in found) == list(range(800))
    firsts = sorted(call.values["lhs"].max or 0.0 for call in found)
    assert firsts == sorted(number * 1000.0 + i for number in range(4) for i in range(200))
    for call in found[::50]:
        assert tensor_of(run, call)[0, 0] == call.values["lhs"].max


def test_threads_with_blocks_of_their_own(tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run"))
    barrier = threading.Barrier(3)

    def work() -> None:
        with block:
            barrier.wait()
            for _ in range(100):
                torch.eye(2) @ torch.eye(2)

    run_threads(work, work, work)
    assert len(calls_of(tmp_path / "run")) == 300
    with intercept(()):
        pass  # the threads have ended, so the kernels can be removed


def test_decorated_generators_and_coroutines(tmp_path: Path) -> None:
    @intercept(runs.RunRecorder(tmp_path / "generator"))
    def generate() -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.eye(2) @ torch.eye(2)

    for _ in generate():
        torch.eye(3) @ torch.eye(3)  # not in its body

    @intercept(runs.RunRecorder(tmp_path / "async"))
    async def work() -> None:
        torch.eye(2) @ torch.eye(2)
        await asyncio.sleep(0)
        torch.eye(2) @ torch.eye(2)

    async def main() -> None:
        await asyncio.gather(work(), work())

    asyncio.run(main())
    for name, count in (("generator", 3), ("async", 4)):
        found = calls_of(tmp_path / name)
        assert [call.values["lhs"].count for call in found] == [4] * count


def test_a_signals_handler_may_run_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_CALLS", 4)
    handled = []

    def handler(number: int, frame: Any) -> None:
        handled.append(torch.eye(2) @ torch.eye(2))

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with intercept(runs.RunRecorder(tmp_path / "run", "none")):
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            end, made = time.monotonic() + 1.0, 0
            while time.monotonic() < end:
                torch.eye(2) @ torch.eye(2)
                made += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert len(handled) > 50
    assert made <= len(calls_of(tmp_path / "run")) <= made + len(handled)  # without those made while a hook was running


@forks
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
@pytest.mark.slow
def test_a_forked_childs_calls_are_not_written(end: str, tmp_path: Path) -> None:
    if end == "sys.exit(0)":  # runs exit handlers, which the child has inherited
        program = f"""
recorder = runs.RunRecorder({str(tmp_path / "run")!r}, "full")
with intercept(recorder):
    torch.full((2, 2), 1.0) @ torch.eye(2)
    pid = os.fork()
    if not pid:
        torch.full((2, 2), 9.0) @ torch.eye(2)
        with intercept(recorder):
            torch.full((2, 2), 9.0) @ torch.eye(2)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    torch.full((2, 2), 2.0) @ torch.eye(2)
"""
        run_script(program)
    else:
        recorder = runs.RunRecorder(tmp_path / "run", "full")

        def child() -> None:
            assert recorder._writer is not None
            waiting = list(recorder._writer._waiting)
            torch.full((2, 2), 9.0) @ torch.eye(2)
            with intercept(recorder):
                torch.full((2, 2), 9.0) @ torch.eye(2)
            assert recorder._writer._waiting == waiting  # no thread takes them

        with intercept(recorder):
            torch.full((2, 2), 1.0) @ torch.eye(2)
            assert run_forked(child) == 0
            torch.full((2, 2), 2.0) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    assert [call.values["lhs"].max for call in run.calls()] == [1.0, 2.0]


@forks
def test_a_child_may_have_a_recorder_of_its_own(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")

    def child() -> None:
        with intercept(recorder):
            torch.ones(2, 2) @ torch.eye(2)

    assert run_forked(child) == 0
    assert len(calls_of(tmp_path / "run")) == 1


# Interrupts


@pytest.mark.parametrize("tensors", ["stats", "full"])
@pytest.mark.slow
def test_an_interrupt_inside_the_recorder_mixes_no_calls(tensors: Any, tmp_path: Path) -> None:
    interrupts = pytest.importorskip("interrupts")

    def program() -> None:
        for size in range(2, 6):
            lhs = torch.full((size, size), float(size))
            torch.addmm(torch.full((size,), 100.0 * size), lhs, torch.eye(size), alpha=size)
            lhs.addmm_(torch.eye(size), torch.eye(size), beta=size)

    recorder = runs.RunRecorder(tmp_path / "run", tensors)
    assert interrupts.interrupt(recorder, program, lambda: None) > 0
    assert not len(recorder._before)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    for call in run.calls():
        assert call.record.rhs is not None
        size = call.record.rhs.shape[0]
        in_place = call.record.func == "aten.addmm_.default"
        assert call.arguments == ({"beta": size, "alpha": 1} if in_place else {"beta": 1, "alpha": size})
        found = {role: values.max for role, values in call.values.items()}
        if in_place:
            assert found == {"lhs": 1.0, "rhs": 1.0, "bias": size, "output": size**2 + 1.0}
        else:
            assert found == {"lhs": size, "rhs": 1.0, "bias": 100.0 * size, "output": 100.0 * size + size**2}
        for role in call.tensors:
            assert tensor_of(run, call, role).max() == found[role]
