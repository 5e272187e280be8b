"""The thread that writes runs: order, bounds, and what is left after the disk fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import Known
from recorded import FILES, TABLES, calls_of, files_in, tensor_of
from threads import run_threads

from opintercept import CallRecord, OpInterceptError, runs
from opintercept._core.call_site import NOWHERE
from opintercept._core.record import PendingRecord, Summary
from opintercept._core.tensors import TensorMeta
from opintercept._engines import quiet
from opintercept._values.stats import Values
from opintercept.runs.record import writer
from opintercept.runs.record.writer import QueuedCall, QueuedTensor, Writer, leftovers, remove_leftovers, remove_run
from opintercept.runs.store.records import CALL, Encoder
from opintercept.runs.store.run import RunInfo

INFO = RunInfo((), "2026-01-01T00:00:00+0000", False, "full", 0, 1, {}, (), {})
META = TensorMeta((2, 2), "float32", "cpu", (2, 1), False)
TENSORS: dict[str, Any] = {"lhs": META, "rhs": META, "bias": None, "output": META}
SUMMARY = Summary(op="aten::mm", func="aten.mm.default", **TENSORS, gemm=None, flops=16, bytes=48, opaque=False)


def known(hashed: str | None, **numbers: float | None) -> Known:
    return Known(Values(hashed, 4, 0, 0, **({"min": 0.0, "max": 1.0, "mean": 0.5, "rms": 0.5} | numbers)))


def entry(index: int, *tensors: torch.Tensor, hashed: str | None = None) -> QueuedCall:
    kept: list[Any] = [QueuedTensor(tensor, None, known(hashed) if hashed else None, False) for tensor in tensors]
    roles = dict(zip(("lhs", "rhs", "output"), range(len(kept)), strict=False))
    note = PendingRecord(SUMMARY, index, 0, "forward", NOWHERE, None, None, None, 0, 0, 1e-6)
    return QueuedCall(note, {}, kept, roles, "{}", None, None)


def begun(folder: Path, *more: Any) -> Writer:
    thread = Writer(folder, INFO, None, *(more or (Encoder(),)))
    thread.start()
    return thread


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Writer]:
    thread = begun(tmp_path / "run")
    yield thread
    thread.close()
    assert not thread.is_alive()


def test_the_kernel_engine_knows_that_the_thread_runs_no_operator(started: Writer) -> None:
    assert getattr(started, quiet.RUNS_NO_OPERATOR)
    assert started.daemon


def test_a_record_holds_the_call(started: Writer, tmp_path: Path) -> None:
    nasty = 'a"b\\\n\u2028\ud800\x00\x7f'
    plain = entry(3)
    plain.values = {
        "lhs": known(None, min=None, max=-0.0, mean=5e-324, rms=1.7976931348623157e308),
        "output.1": known("0" * 16),
    }
    plain.arguments = '{"alpha":1.5,"list":[1,null]}'
    plain.given = {"args": [1, 2.5, None, True, {"list": [1]}], "kwargs": {nasty: nasty}}
    plain.error = nasty
    started.put(plain)
    started.close()
    (call,) = calls_of(tmp_path / "run")
    assert call.record == plain.note.record()
    assert type(call.record) is CallRecord
    assert {role: value.read() for role, value in plain.values.items()} == call.values
    assert call.arguments == {"alpha": 1.5, "list": [1, None]}
    assert call.given == plain.given
    assert call.error == nasty.replace("\ud800", "?")


def test_figures_that_are_not_finite_are_unknown(started: Writer, tmp_path: Path) -> None:
    odd = entry(0)
    odd.values = {"lhs": known(None, min=-math.inf, max=math.inf, mean=math.nan)}
    started.put(odd)
    started.close()
    (call,) = calls_of(tmp_path / "run")
    assert (call.values["lhs"].min, call.values["lhs"].max, call.values["lhs"].mean) == (None, None, None)


def test_calls_are_written_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "INTERVAL", 0.0005)  # intervals end while batches are handed over
    monkeypatch.setattr(writer, "BATCH_CALLS", 7)
    thread = begun(tmp_path / "run")
    for index in range(3000):
        thread.put(entry(index))
    thread.close()
    assert [call.record.index for call in calls_of(tmp_path / "run")] == list(range(3000))
    assert thread.calls == 3000


def test_calls_are_on_disk_after_an_interval(started: Writer, tmp_path: Path) -> None:
    started.put(entry(0, torch.ones(2)))
    end = time.monotonic() + 3 * writer.INTERVAL
    while not calls_of(tmp_path / "run") and time.monotonic() < end:
        time.sleep(0.05)
    run = runs.open_run(tmp_path / "run")
    (call,) = run.calls()
    assert torch.equal(tensor_of(run, call), torch.ones(2))
    assert not run.info.finished


def test_a_full_batch_is_written_at_once(started: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "INTERVAL", 60.0)
    time.sleep(1.1)  # the thread may still wait for the old interval
    for calls, tensors in ((1, [torch.empty(writer.BATCH_BYTES // 4)]), (writer.BATCH_CALLS, [])):
        before = started.calls
        for index in range(calls):
            started.put(entry(index, *tensors))
        end = time.monotonic() + 20
        while started.calls < before + calls and time.monotonic() < end:
            time.sleep(0.02)
        assert started.calls == before + calls


def test_a_slow_disk_bounds_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_BYTES", 4000)
    gate = threading.Event()
    monkeypatch.setattr(Writer, "_save", lambda self, tensors: gate.wait(10))
    thread = begun(tmp_path / "run")
    done: list[int] = []

    def put_entries() -> None:
        for i in range(50):
            done.append(i)
            thread.put(entry(i, torch.ones(250)))

    program = threading.Thread(target=put_entries)
    program.start()
    time.sleep(0.5)
    assert program.is_alive()
    assert len(done) <= 2 * 4 * writer.QUEUED_BATCHES + 1  # those being written, those waiting, the next
    gate.set()
    program.join(20)
    assert not program.is_alive()
    thread.close()
    assert thread.calls == 50


def test_a_dead_thread_keeps_no_other_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BATCH_CALLS", 1)
    monkeypatch.setattr(threading, "excepthook", lambda *args: None)

    def die(self: Any, batch: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(Writer, "_write", die)
    thread = begun(tmp_path / "run")
    for index in range(20):
        thread.put(entry(index))
    thread.close()
    assert not thread.is_alive()


def test_a_call_that_cannot_be_written_stops_the_recording(tmp_path: Path) -> None:
    thread = begun(tmp_path / "run")
    bad = entry(0)
    bad.given = {"args": [object()], "kwargs": {}}
    thread.put(bad)
    thread.close()
    assert thread.failure is not None
    assert "not JSON serializable" in thread.failure
    assert not runs.open_run(tmp_path / "run").info.finished


@pytest.mark.parametrize("room", [0, 1, 100, 500, 700, 800, 900])
def test_a_full_disk_keeps_whole_records(room: int, tmp_path: Path) -> None:
    left = room

    class Disk:
        """Writes a few bytes at a time until it is full."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            nonlocal left
            size = min(len(data), 97, left)
            if not size:
                raise OSError(28, "No space left on device")
            left -= size
            return int(self.file.write(data[:size]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    thread = Writer(tmp_path / "run", INFO, None, Encoder())
    thread._opened = [Disk(file) for file in thread._opened]  # type: ignore[misc]
    thread.start()
    for index in range(5):
        thread.put(entry(index))
    thread.close()
    assert thread.failure == "OSError: [Errno 28] No space left on device"
    assert (tmp_path / "run/calls.bin").stat().st_size == thread.calls * CALL.itemsize
    assert [call.record.index for call in calls_of(tmp_path / "run")] == list(range(thread.calls))
    assert (thread.calls > 0) == (room >= 700)


def test_the_number_of_remembered_names_is_bounded(
    started: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_NAMES", 10)
    for index in range(100):
        started.put(entry(index, torch.full((2,), float(index)), hashed=f"{index:016x}"))
        if index % 7 == 0:
            time.sleep(0.001)
    started.close()
    assert len(started.names) <= 100
    run = runs.open_run(tmp_path / "run")
    for call in run.calls():
        assert tensor_of(run, call)[0] == call.record.index


def test_a_line_that_would_be_too_long_leaves_out_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MAX_LINE", 5000)
    thread = begun(tmp_path / "run")
    long = entry(0)
    long.given = {"args": [0] * 5000, "kwargs": {}}
    thread.put(long)
    thread.close()
    (call,) = calls_of(tmp_path / "run")
    assert call.given is None


def test_only_a_run_is_removed(tmp_path: Path) -> None:
    for part in ("", "rank0", "rank1", "rankle"):
        thread = begun(tmp_path / "run" / part)
        thread.put(entry(0, torch.ones(2)))
        thread.close()
    (tmp_path / "run/rank1/mine").write_text("")
    remove_run(tmp_path / "run")
    assert files_in(tmp_path / "run") == ["rank1/mine", *(f"rankle/{name}" for name in FILES)]
    with pytest.raises(OpInterceptError, match=r"cannot overwrite .*: it holds other files than those of a run"):
        remove_run(tmp_path / "run")


def begin(folder: Path) -> None:
    for file in Writer(folder, INFO, None, Encoder())._opened:
        file.close()


def test_several_processes_remove_leftovers_at_once(tmp_path: Path) -> None:
    def remove(own: Path) -> None:
        remove_leftovers(tmp_path, 4)
        assert leftovers(tmp_path, 4) == []
        own.mkdir()
        begin(own)

    for _ in range(20):
        for part in ("", "rank4", "rank11"):
            (tmp_path / part / "tensors").mkdir(parents=True, exist_ok=True)
            begin(tmp_path / part)
            for number in range(9):
                (tmp_path / part / f"tensors/{number:08d}.safetensors").write_text("")
        run_threads(*(partial(remove, tmp_path / f"rank{rank}") for rank in range(4)))
        assert files_in(tmp_path) == [f"rank{rank}/{name}" for rank in range(4) for name in TABLES]
        remove_run(tmp_path)
        assert list(tmp_path.iterdir()) == []
