"""The flight recorder: what its file holds while the program runs, and after it was killed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import ENGINES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_runs import call, queued
from native import reading
from processes import Program
from recorded import calls_of

from opintercept import NonFiniteError, OpInterceptError, OpInterceptWarning, hooks, intercept, runs
from opintercept.cli import main
from opintercept.runs import open_run
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.flight import FLIGHT, FLIGHT_CALLS, FLIGHT_TENSORS, FLIGHT_TEXTS, TEXT, Flight, snapshot
from opintercept.runs.store.records import CALL, TENSOR, Encoder

X = torch.tensor([[1.0, 2.0], [0.0, -4.5]])


@pytest.fixture(autouse=True)
def values_in_cpp(request: pytest.FixtureRequest) -> Iterator[None]:
    """With compiled kernels, both engines read values with the same code."""
    natively = "compiled" in request.node.name
    with reading(True) if natively else reading(False):
        yield


ENDLESS = """
import sys, torch
from opintercept import intercept, runs
x = torch.ones(2, 2)
with intercept(runs.RunRecorder(sys.argv[1], sys.argv[2], flight=16), engine=sys.argv[3]):
    for number in range(1_000_000):
        x @ x
        if number == 100:
            print("ready", flush=True)
"""


def end_by(number: signal.Signals, folder: Path, tensors: str = "none", engine: str = "kernel") -> None:
    """Record a program until a signal ends it."""
    with Program(["-c", ENDLESS, folder, tensors, engine]) as program:
        program.says("ready\n")
        program.kill(number)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tensors", ["none", "stats"])
def test_the_last_calls_of_a_killed_program_are_read(engine: str, tensors: str, tmp_path: Path) -> None:
    end_by(signal.SIGKILL, tmp_path / "run", tensors, engine)
    run = open_run(tmp_path / "run")
    assert not run.info.finished
    found = [call.record.index for call in run.calls()]
    assert found[0] > 50
    assert found == list(range(found[0], found[0] + len(found)))
    assert len(found) in (15, 16)  # the last one may have been half written
    if tensors == "stats":
        assert {call.values["output"].max for call in run.calls()} == {2.0}
    position, call = next(run.located(0))
    assert run.at(0, position) == call


def test_the_calls_of_a_program_that_runs_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=4)):
        for _ in range(9):
            X @ X
        assert main(["show", str(tmp_path / "run")]) == 0
        assert [call.record.index for call in calls_of(tmp_path / "run")] == [5, 6, 7, 8]
    assert "not finished: still running, or killed" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_signal_that_ends_the_program_leaves_the_calls(tmp_path: Path) -> None:
    end_by(signal.SIGTERM, tmp_path / "run")
    assert len(calls_of(tmp_path / "run")) in (15, 16)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nan_leaves_the_calls_and_its_operands(engine: Any, tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", flight=3)
    with (
        pytest.raises(NonFiniteError, match="made by aten::mm"),
        intercept([recorder, hooks.NonFinite()], engine=engine),
    ):
        for scale in (1.0, 1.0, 1.0, 1.0, math.inf, 1.0):
            torch.mm(torch.tensor([[scale, -scale]]), torch.ones(2, 1))
    found = calls_of(tmp_path / "run")
    assert [call.record.index for call in found] == [2, 3, 4]
    assert found[-1].values["output"].nan == 1
    assert open_run(tmp_path / "run").info.finished
    assert not any((tmp_path / "run" / name).exists() for name in FLIGHT)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tensors", ["none", "stats"])
def test_the_file_holds_what_a_whole_run_holds(engine: Any, tensors: Any, tmp_path: Path) -> None:
    odd = torch.tensor([[math.inf, 1e-30], [-0.0, math.nan]])
    empty = torch.zeros(2, 0)
    layer = torch.nn.Linear(2, 2)

    def program(recorder: Any) -> list[StoredCall]:
        torch.manual_seed(0)
        with intercept(recorder, engine=engine):
            for _ in range(3):
                for x in (X, odd, X * 1e300, X.double() * 1e300, X.to(torch.bfloat16), empty):
                    x @ x.mT
                layer(X).sum().backward()
                torch.nn.functional.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None])
                with torch.autocast("cpu", torch.bfloat16):
                    layer(X).sum().backward()
            return calls_of(recorder.path) if recorder.flight else []

    flight = program(runs.RunRecorder(tmp_path / "flight", tensors, flight=1000))
    program(runs.RunRecorder(tmp_path / "whole", tensors))
    whole = calls_of(tmp_path / "whole")
    assert len(flight) == len(whole)
    for one, other in zip(flight, whole, strict=True):
        assert one.record.elapsed is not None
        records = (dataclasses.replace(each.record, started=0, elapsed=0.0) for each in (one, other))
        assert next(records) == next(records)
        assert one.arguments == other.arguments
        assert repr(one.values) == repr(other.values)


def test_the_files_do_not_grow(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=8)):
        for rows in range(500):
            torch.ones(rows % 9 + 1, 2) @ X
            torch.einsum("ab,bc->ac", X, X)
            with contextlib.suppress(RuntimeError):
                torch.ones(2, 3) @ X
        sizes = {path.name: path.stat().st_size for path in (tmp_path / "run").iterdir() if path.name in FLIGHT}
        assert sizes == {FLIGHT_CALLS: 8 * CALL.itemsize, FLIGHT_TENSORS: 80 * TENSOR.itemsize, FLIGHT_TEXTS: 8 * TEXT}
        found = calls_of(tmp_path / "run")
    assert [call.error is not None for call in found] == [index % 3 == 2 for index in range(1492, 1500)]


def test_a_folder_that_was_there_stays_empty(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path, flight=2)):
        X @ X
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_folder_with_a_killed_run_is_refused_and_can_be_overwritten(tmp_path: Path) -> None:
    end_by(signal.SIGKILL, tmp_path / "run")
    with pytest.raises(ValueError, match="already holds a run"):
        runs.RunRecorder(tmp_path / "run", flight=2)
    with (
        pytest.raises(ZeroDivisionError, match="division"),
        intercept(runs.RunRecorder(tmp_path / "run", flight=2, overwrite=True)),
    ):
        X @ X
        _ = 1 / 0
    assert len(calls_of(tmp_path / "run")) == 1


def test_another_recorder_is_refused_while_one_flies(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=2)):
        with pytest.raises(ValueError, match="already holds a run"):
            runs.RunRecorder(tmp_path / "run", flight=2)
        with pytest.raises(OpInterceptError, match="is recording to"):
            with intercept(runs.RunRecorder(tmp_path / "run", flight=2, overwrite=True)):
                pass


@pytest.mark.parametrize("engine", ENGINES)
def test_a_forked_child_writes_nothing(engine: Any, tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=9), engine=engine):
        for _ in range(3):
            X @ X
        child = os.fork()
        if not child:
            for _ in range(3):
                X @ X
            os._exit(0)
        os.waitpid(child, 0)
        X @ X
        assert [call.record.index for call in calls_of(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_call_without_room_is_left_out_and_counted(tmp_path: Path) -> None:
    flight = Flight(4, Encoder())
    flight.open(tmp_path)
    for index, weights in enumerate((0, 20, 2)):
        plain = call("lstm", "x", "w", "y", index=index, more={f"weights[{number}]": "w" for number in range(weights)})
        made = queued(plain, {})
        flight.put(made.note, "{}", {role: each.read() for role, each in made.values.items()}, None)
    found = flight.close(tmp_path)
    assert (found.calls["index"].tolist(), found.left_out) == ([0, 2], 1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FLIGHT), place=st.integers(0, 10**5), what=st.binary(max_size=80), cut=st.booleans())
def test_a_file_that_anyone_may_have_written_is_no_danger(
    name: str, place: int, what: bytes, cut: bool, tmp_path: Path
) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=4, overwrite=True)):
        for scale in (1.0, 2.0, 3.0):
            X @ (X * scale)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ X
        right = calls_of(tmp_path / "run")
        assert len(right) == 4
        whole = bytearray((tmp_path / "run" / name).read_bytes())
        place %= len(whole)
        whole[place : place + len(what)] = what
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "run", folder)
        (folder / name).write_bytes(bytes(whole[:place] if cut else whole))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OpInterceptWarning)
        assert [call for call in right if call in (found := calls_of(folder))] == found
    assert snapshot(folder).left_out == 4 - len(found) or name == FLIGHT_CALLS


def test_no_tensor_of_another_lap_is_taken_for_a_calls_own(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", flight=1)):
        X @ X
        old = (tmp_path / "run" / FLIGHT_TENSORS).read_bytes()
        X @ (X * 2)
        assert len(calls_of(tmp_path / "run")) == 1
        (tmp_path / "run" / FLIGHT_TENSORS).write_bytes(old)
        with pytest.warns(OpInterceptWarning, match="skipped 1 unreadable call"):
            assert calls_of(tmp_path / "run") == []


def test_more_slots_than_a_reader_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"flight must be at most 262144, got 262145; without it, every call is kept"):
        runs.RunRecorder(tmp_path / "run", flight=2**18 + 1)


def test_a_block_can_be_entered_again(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", flight=4)
    block = intercept(recorder)
    for _ in range(2):
        with block:
            X @ X
            assert len(calls_of(tmp_path / "run")) == 1
        assert not (tmp_path / "run").exists()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="division"), block:
            X @ X
            _ = 1 / 0
    assert recorder.calls == 2
    assert len(calls_of(tmp_path / "run")) == 2


def test_a_full_recording_ends_later_blocks_without_an_error_of_its_own(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", flight=64, max_bytes=1)
    with pytest.warns(OpInterceptWarning, match="max_bytes"), pytest.raises(KeyError, match="first"):
        with intercept(recorder):
            X @ X
            raise KeyError("first")
    with (
        warnings.catch_warnings(record=True, action="always") as caught,
        pytest.raises(KeyError, match="second"),
        intercept(recorder),
    ):
        X @ X
        raise KeyError("second")
    assert not caught
    assert recorder.calls == 0
