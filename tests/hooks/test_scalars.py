"""`Scalars`: what it writes, when, and to which writer; TensorBoard's files are read back."""

from __future__ import annotations

import importlib
import math
import posixpath
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy_stats import call
from threads import run_threads
from torch import Tensor, nn

from opintercept import OpInterceptError, OpInterceptWarning, hooks, intercept
from opintercept.hooks import StatsRow


class Run:
    """The part of a W&B run that `Scalars` uses."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.logged.append((step, data))


class Mlflow:
    """The module `mlflow`, with its rule for names."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        for name in metrics:
            assert re.fullmatch(r"[/\w.\- :]*", name), name
            assert posixpath.normpath(name) == name
            assert not name.startswith(("/", ".."))
        self.logged.append((step, metrics))


class Writer:
    """Anything with `add_scalar`."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.logged.append((tag, scalar_value, global_step))


def product(value: float, size: int = 2) -> Tensor:
    return torch.full((size, 1), value) @ torch.ones(1, size)


@pytest.fixture
def tensorboard(tmp_path: Path) -> Iterator[Any]:
    """A `SummaryWriter` that writes to `folder`."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    yield writer
    writer.close()
    with intercept():  # the writer's thread kept the kernels of the block before installed
        pass


def files_read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_files_hold_every_step(tensorboard: Any, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    kept: list[tuple[Tensor, Tensor]] = []
    scalars = hooks.Scalars(tensorboard, ("lhs", "output"), ("mean", "std", "rms", "min", "max", "absmax", "count"))
    with intercept(scalars) as interceptor:
        for _ in range(3):
            x = torch.randn(5, 4)
            output = net(x)
            output.sum().backward()
            kept.append((x, output.detach()))
            interceptor.step()
    tensorboard.close()
    found = files_read(tmp_path)
    assert len(found) == 8 * 7
    for operand, number in (("0/addmm/lhs/forward", 0), ("2/addmm/output/forward", 1)):
        for step, tensors in enumerate(kept):
            values = tensors[number].double().numpy()
            expected = {
                "mean": values.mean(),
                "std": values.std(),
                "rms": np.sqrt(np.square(values).mean()),
                "min": values.min(),
                "max": values.max(),
                "absmax": np.abs(values).max(),
                "count": values.size,
            }
            for name, value in expected.items():
                written_in, written = found[f"{operand}/{name}"][step]
                assert written_in == step
                assert written == pytest.approx(value, rel=1e-5)  # TensorBoard keeps float32
    assert [step for step, _ in found["0/mm/output/backward/mean"]] == [0, 1, 2]
    assert found["2/mm/output/backward/count"] == [(step, 2 * 3 + 5 * 3) for step in range(3)]


def test_tensorboard_takes_values_that_are_not_finite(tensorboard: Any, tmp_path: Path) -> None:
    with intercept(hooks.Scalars(tensorboard, values=("mean", "max", "nan", "inf"))):
        product(math.nan)
    tensorboard.close()
    found = files_read(tmp_path)
    assert found["-/mm/output/forward/nan"] == [(0, 4.0)]
    assert found["-/mm/output/forward/inf"] == [(0, 0.0)]
    assert math.isnan(found["-/mm/output/forward/mean"][0][1])
    assert math.isnan(found["-/mm/output/forward/max"][0][1])


def test_a_closed_tensorboard_writer_raises_and_makes_no_new_file(tensorboard: Any, tmp_path: Path) -> None:
    scalars = hooks.Scalars(tensorboard)
    with pytest.raises(OpInterceptError, match=r"the writer .* of Scalars is closed; close it after the block"):
        with intercept(scalars):
            product(3.0)
            tensorboard.close()
            before = sorted(tmp_path.iterdir())
    assert sorted(tmp_path.iterdir()) == before
    assert files_read(tmp_path) == {}
    # What was seen is still there: a writer that is opened again gets it.
    tensorboard._get_file_writer()
    with intercept(scalars):
        product(5.0)
    tensorboard.close()
    assert files_read(tmp_path)["-/mm/output/forward/mean"] == [(0, 4.0)]


def test_a_writer_closed_inside_the_block_raises_when_the_step_ends(tensorboard: Any) -> None:
    scalars = hooks.Scalars(tensorboard)
    with pytest.warns(OpInterceptWarning, match="the writer .* of Scalars is closed"):
        with intercept(scalars, on_error="warn") as interceptor:
            product(1.0)
            tensorboard.close()
            interceptor.step()
            assert product(2.0).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("writer", [Run, Mlflow])
def test_a_step_is_written_when_it_ends_and_the_last_when_the_block_ends(writer: type[Run | Mlflow]) -> None:
    run = writer()
    with intercept(hooks.Scalars(run, values=["mean", "calls"])) as interceptor:
        product(1.0)
        product(3.0)
        assert run.logged == []
        interceptor.step()
        assert run.logged == [(0, {"-/mm/output/forward/mean": 2.0, "-/mm/output/forward/calls": 2})]
        product(5.0)
    assert run.logged[1:] == [(1, {"-/mm/output/forward/mean": 5.0, "-/mm/output/forward/calls": 1})]


def test_add_scalar_gets_one_value_at_a_time_and_is_preferred_to_log() -> None:
    class Both(Writer):
        def log(self, data: dict[str, float], step: int | None = None) -> None:
            pytest.fail("logged")

    writer = Both()
    with intercept(hooks.Scalars(writer, values=("min", "max"))):
        product(2.0)
    assert writer.logged == [("-/mm/output/forward/min", 2.0, 0), ("-/mm/output/forward/max", 2.0, 0)]


@pytest.mark.parametrize(
    ("every", "written"),
    [
        (1, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)]),
        (2, [(1, 2), (3, 2), (5, 2), (6, 1)]),
        (3, [(2, 3), (5, 3), (6, 1)]),
        (7, [(6, 7)]),
        (100, [(6, 7)]),
    ],
)
def test_every_writes_several_steps_together(every: int, written: list[tuple[int, int]]) -> None:
    run = Run()
    with intercept(hooks.Scalars(run, values=["calls"], every_steps=every)) as interceptor:
        for _ in range(7):
            product(1.0)
            interceptor.step()
    assert [(step, values["-/mm/output/forward/calls"]) for step, values in run.logged] == written


def test_steps_without_a_call_write_nothing() -> None:
    run = Run()
    with intercept(hooks.Scalars(run, values=["mean"], every_steps=2)) as interceptor:
        for step in range(10):
            if step in (3, 8, 9):
                product(float(step))
            interceptor.step()
    assert [(step, *values.values()) for step, values in run.logged] == [(3, 3.0), (9, 8.5)]
    with intercept(hooks.Scalars(run)):
        pass
    assert len(run.logged) == 2


def test_an_operand_of_the_next_step_is_not_written_with_the_last_one() -> None:
    run = Run()
    with intercept(hooks.Scalars(run, ("lhs", "output"), ["mean"])) as interceptor:
        for value in (1.0, 2.0):
            product(value)
            interceptor.step()
    assert [values["-/mm/lhs/forward/mean"] for _, values in run.logged] == [1.0, 2.0]


def test_calls_before_an_exception_are_written() -> None:
    run = Run()
    with pytest.raises(ZeroDivisionError, match="division"):
        with intercept(hooks.Scalars(run, values=["mean"])):
            product(4.0)
            1 / 0  # noqa: B018
    assert run.logged == [(0, {"-/mm/output/forward/mean": 4.0})]


def test_a_second_block_starts_again() -> None:
    run = Run()
    scalars = hooks.Scalars(run, values=["mean"], every_steps=5)
    interceptor = intercept(scalars)
    for value in (1.0, 2.0):
        with interceptor:
            product(value)
            interceptor.step()
    assert [(step, *values.values()) for step, values in run.logged] == [(0, 1.0), (1, 2.0)]


def test_values_that_are_not_finite_are_written_as_they_are() -> None:
    run = Run()
    with intercept(hooks.Scalars(run, values=["mean", "nan", "inf", "zeros"])):
        torch.tensor([[math.nan], [math.inf]]) @ torch.ones(1, 1)
    ((_, values),) = run.logged
    assert {name.split("/")[-1]: value for name, value in values.items()} == {
        "mean": pytest.approx(math.nan, nan_ok=True),
        "nan": 1,
        "inf": 1,
        "zeros": 0.0,
    }


def test_underflow_and_overflow_are_written_with_a_target() -> None:
    run = Run()
    with intercept(hooks.Scalars(run, values=["underflow", "overflow"], for_dtype=torch.float16)):
        torch.tensor([[1e9], [1e-9], [1.0], [0.0]]) @ torch.ones(1, 1)
    assert run.logged == [(0, {"-/mm/output/forward/underflow": 0.25, "-/mm/output/forward/overflow": 0.25})]


def test_an_unknown_module_has_a_name_that_every_writer_accepts() -> None:
    run = Mlflow()
    scalars = hooks.Scalars(run, values=["mean"])
    for module in (None, "", "encoder.layers.0"):
        scalars.post(call(torch.ones(2), module=module, op="mkldnn::_linear_pointwise", step=0))
    scalars.exit()
    assert list(run.logged[0][1]) == [
        f"{module}/mkldnn::_linear_pointwise/output/forward/mean" for module in ("unknown", "-", "encoder.layers.0")
    ]


def test_names_at_function_level_contain_the_function() -> None:
    run = Mlflow()
    with intercept(hooks.Scalars(run, values=["count"]), level="function"):
        nn.Sequential(nn.Linear(2, 3))(torch.ones(4, 2))
    assert run.logged == [(0, {"0/torch.nn.functional.linear/output/forward/count": 12})]


def test_threads_write_each_step_once() -> None:
    run = Run()
    scalars = hooks.Scalars(run, ("lhs", "output"), values=["calls"])
    meet = threading.Barrier(8)

    def work() -> None:
        for step in range(20):
            meet.wait()
            scalars.pre(call(lhs=torch.ones(2), step=step))
            scalars.post(call(torch.ones(2), step=step))
            if meet.wait() == 0:
                scalars.end_step()

    run_threads(*[work] * 8)
    scalars.exit()
    assert [step for step, _ in run.logged] == list(range(20))
    assert sum(values.get("m/mm/output/forward/calls", 0) for _, values in run.logged) == 160
    assert sum(values.get("m/mm/lhs/forward/calls", 0) for _, values in run.logged) == 160


def test_an_error_of_the_writer_is_raised_and_names_the_call() -> None:
    class Broken(Run):
        def log(self, data: dict[str, float], step: int | None = None) -> None:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left") as caught:
        with intercept(hooks.Scalars(Broken())) as interceptor:
            product(1.0)
            interceptor.step()
            product(1.0)
    assert any("opintercept: raised by the end_step of hook" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        *(
            ({"writer": writer}, TypeError, "a writer must have add_scalar, log or log_metrics, got")
            for writer in (None, 3, "runs/a", object(), {"log": print}, SimpleNamespace(log=3))
        ),
        *(
            ({"every_steps": every}, ValueError, "every_steps must be a whole number of at least 1, got")
            for every in (0, -1, 1.5, "2", None)
        ),
        *(
            (
                {"values": values},
                ValueError,
                "values must be one or more of calls, count, nan, inf, min, max, mean, std, rms",
            )
            for values in ((), "mean", ["mean", "median"], ["module"], [3])
        ),
        ({"values": ["mean", "underflow"]}, ValueError, "underflow and overflow need for_dtype, got"),
        ({"values": ["mean", "overflow"]}, ValueError, "underflow and overflow need for_dtype, got"),
        ({"of": "weight"}, ValueError, "of must be one or more of 'lhs', 'rhs', 'bias', 'output', got 'weight'"),
        ({"for_dtype": torch.int8}, TypeError, "for_dtype must be a floating-point"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hooks.Scalars(**{"writer": Run(), **given})


def test_every_number_of_a_row_can_be_asked_for() -> None:
    run = Run()
    names = [name for name in StatsRow.__slots__ if name not in ("module", "op", "operand", "phase")]
    with intercept(hooks.Scalars(run, values=names, for_dtype=torch.float16)):
        product(2.0)
    ((_, values),) = run.logged
    assert [name.split("/")[-1] for name in values] == names
