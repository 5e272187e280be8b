"""The report: its figures and its size, and in a real browser what it shows, and that no text of a run is executed."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, choose, data_of, said_in, texts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from made_calls import meta, record
from made_runs import peak_memory, plain, rewrite, stats, write_files

from opintercept import OpInterceptError, intercept, runs
from opintercept._core.gemm import Gemm
from opintercept._core.record import CallRecord
from opintercept.cli import main
from opintercept.runs import open_run
from opintercept.runs.report import page as report
from opintercept.runs.report import panels
from opintercept.runs.store import columns

pytestmark = pytest.mark.slow

LHS, RHS, OUT = (meta(*shape) for shape in ((2, 3), (3, 4), (2, 4)))
CALL = record(
    module="layer",
    source="train.py:1 in forward",
    lhs=LHS,
    rhs=RHS,
    output=OUT,
    gemm=Gemm(1, 2, 4, 3, ("float32", "float32"), (False, False)),
    flops=48,
    bytes=104,
    started=1_700_000_000_000_000_000,
    thread=1,
    elapsed=1e-6,
)


def values(count: int = 8, nan: int = 0, inf: int = 0, **moments: float | None) -> dict[str, Any]:
    known = {"min": -1.0, "max": 2.0, "mean": 0.5, "rms": 1.0} | moments
    return stats(count=count, nan=nan, inf=inf, **known)


def folder(path: Path, *calls: tuple[CallRecord, dict[str, Any]], **info: Any) -> Path:
    """A run's folder with these calls, each with the values of its operands and output."""
    lines = (each.as_dict() | {"values": kept} for each, kept in calls)
    return write_files(path, lines, **{"flags": {}} | info)


def summary(path: Path, *calls: tuple[CallRecord, dict[str, Any]], **info: Any) -> dict[str, Any]:
    """What a page shows of a run of these calls."""
    return panels.panels_of(open_run(folder(path / "run", *calls, **info)))[0]


def test_values_of_calls_in_one_cell_are_combined(tmp_path: Path) -> None:
    calls = [
        (CALL, {"output": values(8, min=-1.0, max=1.0, mean=0.5, rms=2.0)}),
        (CALL, {"output": values(10, nan=1, inf=1, min=-3.0, max=0.5, mean=-0.25, rms=1.0)}),
        (CALL, {"output": values(4, nan=4, min=None, max=None, mean=None, rms=None)}),
    ]
    heat = summary(tmp_path, *calls)["heat"]
    assert heat["modules"] == ["layer"]
    assert heat["roles"] == ["output"]
    # Of the root mean square, (8*4 + 8*1) / 16 = 2.5.
    moments = {"count": [22], "nan": [5], "inf": [1], "min": [-3.0], "max": [1.0], "mean": [0.125], "rms": [1.581]}
    work = {"row": [0], "column": [0], "calls": [3], "flops": [144], "seconds": [3e-6]}
    assert heat["phases"] == {"forward": work | {"output": moments}}


def test_cells_of_a_run_that_can_be_replayed_name_a_call(tmp_path: Path) -> None:
    calls: list[Any] = [(replace(CALL, index=index, step=index // 4), {}) for index in range(8)]
    heat = summary(tmp_path, *calls, tensors="full")["heat"]
    assert [heat["phases"]["forward"][name] for name in ("column", "rank", "index")] == [[0, 1], [0, 0], [0, 4]]


def test_the_first_output_that_is_not_finite_is_named_with_its_cause(tmp_path: Path) -> None:
    broken = replace(CALL, index=7, step=3, module="head", phase="backward")
    calls = [
        (CALL, {"lhs": values(nan=1), "output": values()}),
        (broken, {"lhs": values(), "rhs": values(inf=2), "output": values(nan=3, inf=1)}),
        (replace(broken, index=8), {"output": values(nan=8)}),
    ]
    totals = summary(tmp_path, *calls)["totals"]
    assert totals["nonfinite"] == 2
    assert totals["steps"] == [0, 3]
    found = totals["first"]
    assert (found["index"], found["module"], found["phase"], found["step"]) == (7, "head", "backward", 3)
    assert (found["nan"], found["inf"], found["count"], found["from"]) == (3, 1, 8, ["rhs"])


def test_the_first_nan_of_several_ranks_is_that_of_the_first_step(tmp_path: Path) -> None:
    """As in the map, whose columns are steps."""
    (tmp_path / "run").mkdir()
    for rank in range(2):
        kept = [{"output": values(nan=int(index >= (48, 32)[rank]))} for index in range(64)]
        made = (replace(CALL, index=index, step=index // 16, module=f"m{rank}") for index in range(64))
        calls = zip(made, kept, strict=True)
        folder(tmp_path / "run" / f"rank{rank}", *calls, rank=rank, world_size=2)
    shown, _ = panels.panels_of(open_run(tmp_path / "run"))
    found = shown["totals"]["first"]
    assert (found["rank"], found["step"], found["index"], found["module"]) == (1, 2, 32, "m1")
    cells = shown["heat"]["phases"]["forward"]
    broken = zip(cells["column"], cells["row"], cells["output"]["nan"], strict=True)
    column, row = min((column, row) for column, row, nan in broken if nan)
    assert (shown["heat"]["modules"][row], shown["heat"]["steps"][column]) == ("m1", 2)
    assert found["row"] == row


@settings(max_examples=50, deadline=None)
@given(
    places=st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.integers(0, 40), st.integers(0, 2**62)), st.booleans()), max_size=120
    )
)
def test_the_map_is_bounded_and_loses_no_call(places: list[tuple[int, int, bool]]) -> None:
    calls: list[Any] = [
        (replace(CALL, module=str(module), step=step, phase="forward" if forward else "backward"), {})
        for module, step, forward in places
    ]
    with pytest.MonkeyPatch.context() as bounds, tempfile.TemporaryDirectory() as made:
        bounds.setattr(panels, "MODULES", 6)
        bounds.setattr(panels, "COLUMNS", 7)
        shown = panels.panels_of(open_run(folder(Path(made) / "run", *calls)), 20)[0]["heat"]
    names = ("row", "column", "calls")
    cells = [cell for of in shown["phases"].values() for cell in zip(*(of[name] for name in names), strict=True)]
    assert sum(cell[2] for cell in cells) + shown["left_out"] == len(places)
    assert len(shown["modules"]) <= 6
    assert len(shown["steps"]) <= 7
    assert len(cells) <= 20 or len(shown["steps"]) == 1
    assert {cell[1] for cell in cells} == set(range(len(shown["steps"])))
    assert shown["modules"] == list(dict.fromkeys(str(module) for module, _, _ in places))[:6]
    steps = {step for module, step, _ in places if str(module) in shown["modules"]}
    assert {step // shown["width"] * shown["width"] for step in steps} == set(shown["steps"])


def test_matmuls_are_grouped_by_numbered_modules_and_the_rest_is_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "MATMULS_ADDED_UP", 3)
    monkeypatch.setattr(panels, "MATMULS", 2)
    calls: list[Any] = [(replace(CALL, module=f"encoder.{i}.conv1.2d", elapsed=1.0), {}) for i in range(5)]
    calls += [(replace(CALL, op=f"aten::{op}", elapsed=elapsed), {}) for op, elapsed in (("a", 0.5), ("b", 2.0))]
    calls += [
        (replace(CALL, op="aten::c", elapsed=elapsed, flops=None), {}) for elapsed in (math.nan, -1.0, None, 0.25)
    ]
    gemms = summary(tmp_path, *calls)["gemms"]
    assert gemms["rows"] == [
        ["mm", "forward", "encoder.*.conv1.2d", "[2, 3] @ [3, 4]", "float32", "cpu", 5, 240, 520, 5.0],
        ["b", "forward", "layer", "[2, 3] @ [3, 4]", "float32", "cpu", 1, 48, 104, 2.0],
    ]
    assert gemms["rest"] == [5, None, 520, 0.75]


def test_a_row_names_its_module_and_a_star_stands_for_numbers_that_differ(tmp_path: Path) -> None:
    """A module of a `Sequential` is named by a number alone."""
    named = {
        "1": ["1"], "0.0": ["0.0"], "layers.*.2": ["layers.0.2", "layers.1.2"], "*.*.a": ["2.0.a", "3.0.a", "3.1.a"],
        "a*b": ["a*b"], "(outermost)": [""],
    }  # fmt: skip
    long = [f"{number}.{'x' * panels.NAME}.{'y' * panels.NAME}" for number in (7, 8)]
    modules = [*itertools.chain(*named.values()), *long, None]
    rows = summary(tmp_path, *((replace(CALL, module=module), {}) for module in modules))["gemms"]["rows"]
    found = {row[2]: row[6] for row in rows}
    unnamed = {panels.shown_text(f"*{long[0][1:]}"): 2, "(unknown module)": 1}
    assert found == {name: len(each) for name, each in named.items()} | unnamed


def test_a_long_run_makes_no_larger_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "MATMULS_ADDED_UP", 2_000)
    draw = random.Random(0)

    def made(i: int) -> tuple[CallRecord, dict[str, Any]]:
        place = {"module": f"{'deep.' * 60}{i % 300}", "step": i // 300 * 100, "op": f"aten::{i % 2_400}"}
        kept = {role: values() | {name: draw.random() for name in columns.FIGURES} for role in panels.ROLES}
        return replace(CALL, **place, elapsed=draw.random()), kept  # type: ignore[arg-type]

    run = open_run(folder(tmp_path / "run", *map(made, range(11_000))))
    assert len(report.page(run)) < 2e6
    assert len(report.page(run, run)) < 2e6


def hostile(path: Path, calls: int, scale: float) -> Path:
    """A run of texts of 60 kB, 1.4 MB as objects, each with its own module and operator and very long names."""
    made = []
    for index in range(calls):
        name = f"{index}{chr(0x1F600) * 4000}"
        record = replace(CALL, index=index, module=name, op=name, source=name, gemm=None)
        kept = {"values": {"output": values(rms=scale + index)}, "tensors": {"output": f"0/{index:016x}-0"}}
        made.append(record.as_dict() | kept | {"given": {"args": [[]] * 20_000, "kwargs": {}}})
    return write_files(path, made, tensors="full")


def test_no_text_is_kept_however_large(tmp_path: Path) -> None:
    run, other = open_run(hostile(tmp_path / "a", 10, 1.0)), open_run(hostile(tmp_path / "b", 10, 11.0))
    # All texts of one run would take 14 MB; a comparison keeps 20 calls of each run.
    assert peak_memory(lambda: panels.panels_of(run)[0]) < 8 << 20
    assert peak_memory(lambda: report.divergence(run, other, panels.HeatMap())) < 12 << 20


def test_numbers_that_json_lacks_are_left_out(tmp_path: Path) -> None:
    broken = values(count=2**62, nan=2**32 - 1, min=math.nan, max=-math.inf, mean=1e308, rms=1e308)
    big = values(count=2**62, min=-1e308, max=1e308, mean=-1e308, rms=1e308)
    calls = [(replace(CALL, elapsed=math.inf), {"output": broken}), (CALL, {"output": big, "lhs": broken})]
    data = data_of(report.page(open_run(folder(tmp_path / "run", *calls))))
    found = data["runs"][0]["heat"]["phases"]["forward"]["output"]
    assert [value for (value,) in found.values()] == [2**63, 2**32 - 1, 0, -1e308, 1e308, None, None]


def test_a_page_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = open_run(folder(tmp_path / "run", (CALL, {})))
    page = tmp_path / "page.html"
    page.write_text("before")

    def fails(*paths: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(OpInterceptError, match=r"cannot write the page to .*page\.html'.*no space"):
            report.write(page, run)
    assert page.read_text() == "before"
    with pytest.raises(OpInterceptError, match=r"cannot write the page to .*: .*No such file"):
        report.write(tmp_path / "missing" / "page.html", run)
    with pytest.raises(OpInterceptError, match=r"cannot write the page to '/dev/null', which is not a plain file"):
        report.write("/dev/null", run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    link = tmp_path / "link.html"
    link.symlink_to(page)
    report.write(link, run)
    assert link.is_symlink()
    assert page.read_text("utf-8") == report.page(run)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Records three layers forward and backward for some steps; `change` gives the second layer other weights."""
    pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")

    def record(name: str, tensors: Any, steps: int = 1, change: float = 0.0) -> Path:
        generator = torch.Generator().manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
        with torch.no_grad():
            for weights in model.parameters():
                weights.normal_(generator=generator)
            model[1].weight[0, 0] += change
        with intercept(runs.RunRecorder(tmp_path / name, tensors=tensors)) as interceptor:
            for _ in range(steps):
                model(torch.randn(64, 32, generator=generator)).sum().backward()
                interceptor.step()
        return tmp_path / name

    return record


def test_histograms_show_the_recorded_values(recorded: Callable[..., Path]) -> None:
    run = open_run(recorded("run", "full", steps=3))
    shown = panels.panels_of(run)[0]["histograms"]
    assert (shown["unread"], shown["left_out"], shown["sampled"]) == (0, 0, False)
    assert len(shown["shown"]) == 6  # three modules, forward and backward
    for each in shown["shown"]:
        assert [one["steps"] for one in each["drawn"]] == [[0, 0], [1, 1], [2, 2]]
    outputs = [call for call in run.calls() if call.record.module == "1" and call.record.phase == "forward"]
    tensors: list[Any] = [run.tensor(call, "output") for call in outputs]
    (drawn,) = (each for each in shown["shown"] if (each["module"], each["phase"]) == (1, "forward"))
    low, high = drawn["edges"]
    assert low == min(float(tensor.min()) for tensor in tensors)
    assert high == max(float(tensor.max()) for tensor in tensors)
    for one, tensor in zip(drawn["drawn"], tensors, strict=True):
        bins = len(one["counts"])
        assert bins == math.isqrt(tensor.numel()) == 45
        # The last edge belongs to the last bin.
        places = ((tensor.double() - low) / (high - low) * bins).long().clamp(max=bins - 1)
        assert one["counts"] == places.flatten().bincount(minlength=bins).tolist()
        assert (one["count"], one["nonfinite"]) == (2048, 0)


def test_samples_of_several_calls_make_a_histogram(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(recorded("run", "sample", steps=20))
    shown = panels.panels_of(run)[0]["histograms"]
    assert shown["sampled"]
    for each in shown["shown"]:
        if each["phase"] == "backward" and each["module"]:  # two calls in a step; the first module has one
            assert [one["steps"] for one in each["drawn"]] == [[step, step + 3] for step in range(0, 20, 4)]
            continue
        assert [one["steps"] for one in each["drawn"]] == [[0, 7], [8, 15], [16, 19]]
        assert [sum(one["counts"]) for one in each["drawn"]] == [8 * 64, 8 * 64, 4 * 64]
    monkeypatch.setattr(panels, "HISTOGRAMS", 2)
    monkeypatch.setattr(panels, "TENSORS", 64 * 4 * 10)
    shown = panels.panels_of(run)[0]["histograms"]
    assert shown["left_out"] == 4
    assert sum(one["calls"] for each in shown["shown"] for one in each["drawn"]) == 10
    assert shown["unread"] == 2 * 20 - 10


@pytest.mark.parametrize(("size", "calls"), [(1, 1), (1, 3), (8, 2)])
def test_histograms_are_spread_over_the_steps(size: int, calls: int) -> None:
    groups = panels.spread(np.repeat(np.arange(1000), calls), size)
    assert len(groups) in (panels.SPOTS - 1, panels.SPOTS, panels.SPOTS + 1)
    assert (groups[0].start, groups[-1].stop) == (0, 1000 * calls)
    gaps = {later.start - earlier.start for earlier, later in itertools.pairwise(groups[:-1])}
    assert len(gaps) == 1
    assert all(group.stop - group.start == size for group in groups)


def drift_between(path: Path, made: Callable[[int], Any]) -> dict[str, Any]:
    """What the page shows of the errors between two runs, of which `made` returns the calls: those of A for 0."""
    a, b = (open_run(folder(path / name, *made(side))) for side, name in enumerate("ab"))
    found: dict[str, Any] = data_of(report.page(a, b))["divergence"]["drift"]
    return found


def drifting(noise: float, fault: float, at: int) -> list[tuple[CallRecord, dict[str, Any]]]:
    """Four layers for 40 steps, each output off by `noise`, and by `fault` in `layers.2` from a step on."""
    calls = []
    for index in range(160):
        step, layer = divmod(index, 4)
        off = fault if step >= at and layer == 2 else noise * (1 + layer)
        kept = {"output": values(rms=1.0 + off) | {"hash": f"{hash((index, off)) & (1 << 64) - 1:016x}"}}
        calls.append((replace(CALL, index=index, step=step, module=f"layers.{layer}"), kept))
    return calls


@pytest.mark.parametrize(("noise", "fault", "above"), [(0.0, 1e-4, 17), (1e-3, 0.5, 17), (1e-3, 2e-3, None)])
def test_the_first_step_above_the_noise_is_found(
    tmp_path: Path, noise: float, fault: float, above: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels, "COLUMNS", 10)  # so that a column has several steps
    a, b = (open_run(folder(tmp_path / name, *calls)) for name, calls in
            (("a", drifting(0.0, 0.0, 0)), ("b", drifting(noise, fault, 17))))  # fmt: skip
    data = data_of(report.page(a, b))
    drift = data["divergence"]["drift"]
    # The largest value of the outputs is 2.
    assert drift["noise"] == {"steps": 4, "usual": pytest.approx(noise * 2 / 2), "times": 10.0}
    if above is None:
        assert drift["above"] is None
        return
    found = drift["above"]
    assert (data["runs"][0]["heat"]["steps"][found["column"]], found["row"], found["phase"]) == (16, 2, "forward")
    assert found["error"] == pytest.approx(fault / 2, rel=1e-3)
    assert found["noise"] == pytest.approx(noise * 3 / 2, rel=1e-3)
    cells = drift["phases"]["forward"]
    heat = data["runs"][0]["heat"]
    assert heat["width"] == 4
    largest = max(zip(cells["error"], cells["row"], cells["column"], cells["calls"], strict=True))
    assert largest[1] == 2
    assert heat["steps"][largest[2]] >= 16
    assert largest[3] == 4 - (17 % 4 if heat["steps"][largest[2]] == 16 else 0)


@pytest.mark.parametrize(
    ("dtype", "error", "operands", "above"),
    [
        ("float32", 2e-6, values(), False),
        ("float32", 1e-4, values(), True),
        ("bfloat16", 1e-2, values(), False),
        ("float64", 2e-6, values(), True),
        ("float32", 1e-4, values(rms=1e2), False),  # the product of these is as large as 2 only if terms cancel
    ],
)
def test_an_error_within_rounding_is_not_above_the_noise(
    tmp_path: Path, dtype: str, error: float, operands: dict[str, Any], above: bool
) -> None:
    def made(side: int) -> Iterator[Any]:
        for index in range(8):
            tensors: Any = {name: replace(getattr(CALL, name), dtype=dtype) for name in ("lhs", "rhs", "output")}
            record = replace(CALL, index=index, step=index // 4, module=f"layers.{index % 4}", **tensors)
            off = 2 * error * side * (index == 6)  # the largest value is 2
            yield record, {"lhs": operands, "rhs": operands, "output": values(rms=1.0 + off)}

    found = drift_between(tmp_path, made)["above"]
    assert (found is not None and found["row"] == 2) is above
    assert above or found is None


@pytest.mark.parametrize(("error", "above"), [(4e-3, None), (4e-2, 3)])
def test_a_module_that_begins_equal_has_the_noise_of_the_others(
    tmp_path: Path, error: float, above: int | None
) -> None:
    """It inherits theirs in the next step, when weights have been updated."""

    def made(side: int) -> Iterator[Any]:
        for index in range(8):
            step, layer = divmod(index, 4)
            off = 2 * side * (1e-3 if layer == 1 else error * (layer == 3 and step == 1))
            record = replace(CALL, index=index, step=step, module=f"layers.{layer}")
            yield record, {"output": values(rms=1.0 + off)}

    drift = drift_between(tmp_path, made)
    assert drift["noise"]["usual"] == 1e-3
    assert (drift["above"] and drift["above"]["row"]) == above


def test_runs_of_one_step_have_no_noise(tmp_path: Path) -> None:
    drift = drift_between(tmp_path, lambda side: [(CALL, {"output": values(rms=1 + side)})])
    assert (drift["noise"], drift["above"]) == (None, None)
    assert drift["phases"]["forward"]["error"] == [0.5]


def test_an_infinite_error_does_not_hide_the_others(tmp_path: Path) -> None:
    def made(side: int) -> Iterator[Any]:
        for index in range(8):
            kept = values(nan=side if index == 5 else 0, rms=1.0 + side * 0.2)
            yield replace(CALL, index=index, step=index // 4), {"output": kept}

    cells = drift_between(tmp_path, made)["phases"]["forward"]
    assert [cells[name] for name in ("column", "error", "calls", "inf")] == [[0, 1], [0.1, 0.1], [4, 4], [0, 1]]


@pytest.mark.parametrize(
    ("values", "edges", "counts"),
    [
        ([], [0.0, 0.0], [0]),
        ([math.nan, math.inf], [0.0, 0.0], [0]),
        ([2.0, 2.0, math.nan], [2.0, 2.0], [2]),
        ([-1.7e308, 1.7e308], [-1.7e308, 1.7e308], [2]),
        ([3 + 4j, 0j], [0.0, 5.0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        ([True, False], [0.0, 1.0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_histograms_of_odd_values(values: list[Any], edges: list[float], counts: list[int]) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(values, dtype=torch.complex64 if 0j in values and 3 + 4j in values else None)
    if tensor.is_floating_point():
        tensor = torch.tensor(values, dtype=torch.float64)
    found, (histogram,) = panels.histograms_of([[tensor]])
    assert found == edges
    assert histogram["counts"] == counts
    assert histogram["nonfinite"] == len(values) - sum(counts)


def test_two_runs_give_the_error_of_each_module_that_differs(recorded: Callable[..., Path]) -> None:
    a, b = open_run(recorded("a", "full", steps=2)), open_run(recorded("b", "full", steps=2, change=0.5))
    divergence = data_of(report.page(a, b))["divergence"]
    assert divergence["first"] == {"row": 1, "phase": "forward"}
    lines = [part[0] for part in divergence["parts"] if isinstance(part, list)]
    assert lines == [part for part in runs.diff(a, b).parts() if isinstance(part, str)]
    assert ["first divergence: call 1 of A and 1 of B, step 0, forward: addmm in 1", "wrong"] in divergence["parts"]
    assert {row: kind for row, phase, kind in divergence["modules"] if phase == "forward"} == {
        1: "changed operand",
        2: "inherited",
    }
    same = data_of(report.page(a, a))["divergence"]
    assert (same["first"], same["modules"]) == (None, [])
    assert ["no call differs: all are equal bit for bit", "right"] in same["parts"]


# In a browser.


def open_page(browser: Browser, path: Path, *shown: Path, width: int = 1280) -> None:
    """Write a page of one run or two to a folder, and open it."""
    report.write(path / "page.html", *map(open_run, shown))
    browser.open(path / "page.html", width)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page of a run of six modules and five steps, the last of which has NaN and Inf."""
    calls: list[Any] = []
    for step in range(5):
        for layer in range(6):
            forward = replace(CALL, index=len(calls), step=step, module=f"layers.{layer}", elapsed=1e-6 * (layer + 1))
            kept = values(rms=2.0**layer, nan=int(step == 4 and layer > 2), inf=int(step == 4 and layer == 2))
            calls.append((forward, {"lhs": values(), "rhs": values(), "output": kept}))
            backward = replace(forward, phase="backward", op="aten::bmm", flops=96, elapsed=5e-5)
            calls.append((backward, {"output": values()}))
    path = tmp_path / "page.html"
    report.write(path, open_run(folder(tmp_path / "run", *calls)))
    return path


def names_of(browser: Browser, plot: str) -> Any:
    """The names of the rows of a map."""
    return texts_of(browser, f"#{plot}-plot .names .name")


def matmuls_in(browser: Browser) -> Any:
    """The cells of the table of matmuls."""
    rows = "[...document.querySelectorAll('#gemms-table tbody tr')]"
    return browser.evaluate(f"{rows}.map(row => [...row.cells].map(cell => cell.textContent))")


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_and_follows_the_colour_scheme(browser: Browser, page: Path, width: int) -> None:
    grounds = []
    for dark in (False, True):
        browser.open(page, width, dark)
        assert browser.complaints == []
        assert [address for address in browser.requests if not address.startswith("data:")] == [page.as_uri()]
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        wide = browser.evaluate(
            "[...document.querySelectorAll('.plot svg, canvas')].map(each => each.getBoundingClientRect().right)"
        )
        assert len(wide) == 3
        assert max(wide) <= width
        grounds.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        # Labels of the plots have the colour of the text.
        ink = browser.evaluate("getComputedStyle(document.querySelector('#heat-plot .name')).color")
        assert ink == browser.evaluate("getComputedStyle(document.body).color")
    light, dark_ground = (sum(map(int, re.findall(r"\d+", ground))) for ground in grounds)
    assert light > 3 * 200
    assert dark_ground < 3 * 50


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_key_looks_like_what_it_explains(
    browser: Browser, recorded: Callable[..., Path], tmp_path: Path, dark: bool
) -> None:
    a, b = recorded("a", "full", steps=3), recorded("b", "full", steps=3, change=0.5)
    report.write(tmp_path / "page.html", open_run(a), open_run(b))
    browser.open(tmp_path / "page.html", dark=dark)
    # Signs have the colour that the marks of maps are painted in.
    ink = """[...document.querySelectorAll('#divergence .sign')].map(each => getComputedStyle(each).color)"""
    browser.evaluate("document.body.style.outlineColor = plots.color('mark')")
    mark = browser.evaluate("getComputedStyle(document.body).outlineColor")
    assert browser.evaluate("document.querySelectorAll('#divergence-key .sign').length") == 1
    assert set(browser.evaluate(ink)) == {mark}
    # A sample in a key looks like the shape of the same class above it.
    look = "['fill', 'fillOpacity', 'stroke', 'strokeDasharray', 'strokeWidth'].map(each => getComputedStyle(of)[each])"
    compared = browser.evaluate(
        f"""['roofline', 'outputs'].flatMap(panel => {{
            const look = of => {look};
            const plot = panel === 'outputs' ? 'outputs-plot' : panel;
            return [...document.querySelectorAll(`#${{panel}}-key svg > *`)].map(sample => [
                sample.getAttribute('class'), look(sample),
                look(document.querySelector(`#${{plot}} [class="${{sample.getAttribute('class')}}"]`))]);
        }})"""
    )
    used = ["point forward", "point backward", "roof", "band", "line mean", "line rms"]
    assert [name for name, *_ in compared] == used
    assert all(sample == drawn for _, sample, drawn in compared)
    assert len({str(sample) for _, sample, _ in compared}) == len(used)


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("apart", [1, 1234567])
def test_no_label_of_a_plot_is_cut_or_covered(browser: Browser, tmp_path: Path, width: int, apart: int) -> None:
    """Neither another label nor the fill of a plot is over a label, whether steps have short numbers or long ones."""
    pytest.importorskip("safetensors")
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    with intercept(runs.RunRecorder(tmp_path / "run", tensors="full")) as interceptor:
        for size in (1, 8, 64, 512):  # the fastest of which is at 100 GFLOP/s, or the slowest below 1
            for _ in range(4):
                torch.mm(*(torch.randn(2, size, size, generator=generator)))
                interceptor.step()
    calls = plain(open_run(tmp_path / "run"))
    for number, call in enumerate(calls):
        call |= {"step": number * apart, "elapsed": call["flops"] / 10 ** (8 + number / 5)}
    rewrite(tmp_path / "run", calls)
    open_page(browser, tmp_path, tmp_path / "run", width=width)
    boxes = """[...document.querySelectorAll('.plot')].map(plot => [
        [...plot.querySelectorAll('text, .steps span')].map(each => [each.textContent, each.getBoundingClientRect()]),
        [...plot.querySelectorAll('.band, .bin')].map(each => ['fill', each.getBoundingClientRect()]),
        [[plot.id, plot.getBoundingClientRect()]],
    ].map(found => found.map(([text, {left, right, top, bottom}]) => [text, left, top, right, bottom])))"""
    drawn = [found for found in browser.evaluate(boxes) if found[0]]
    assert [plot for *_, ((plot, *_),) in drawn] == ["heat-plot", "roofline", "outputs-plot", "histogram-plot"]
    for labels, fills, ((_, *room),) in drawn:
        assert len(labels) > 3
        assert labels == [each for each in labels if inside(each[1:], room)]
        pairs = [*itertools.combinations(labels, 2), *itertools.product(labels, fills)]
        assert [each for each in pairs if touch(each[0][1:], each[1][1:])] == []
    assert len(drawn[2][1]) == len(calls)


def touch(one: list[float], other: list[float]) -> bool:
    """Whether two boxes, each (left, top, right, bottom), have more than a border in common."""
    sides = zip(one[:2], one[2:], other[:2], other[2:], strict=True)
    return all(min(right, end) - max(left, start) > 0.01 for left, right, start, end in sides)


def inside(one: list[float], room: list[float]) -> bool:
    """Whether a box is inside another one."""
    return one[0] >= room[0] and one[1] >= room[1] and one[2] <= room[2] and one[3] <= room[3]


def test_cells_that_are_not_finite_have_a_mark(browser: Browser, page: Path) -> None:
    browser.open(page)
    key = "document.getElementById('heat-key').textContent"
    assert browser.evaluate(key).startswith("✖ has NaN: 3 cells▲ has Inf, no NaN: 1 cell")
    shown = "document.getElementById('first').textContent"
    assert "Call 52 in step 4, forward: mm in layers.2" in browser.evaluate(shown)
    for statistic in ("absmax", "mean", "min", "max", "nonfinite"):
        choose(browser, "heat-statistic", statistic)
        assert "has NaN: 3 cells" in browser.evaluate(key)
    for field, value in (("heat-role", "lhs"), ("heat-phase", "backward"), ("heat-statistic", "seconds")):
        choose(browser, field, value)
        assert "has NaN" not in browser.evaluate(key)
    choose(browser, "heat-filter", "LAYERS.3", "input")
    assert names_of(browser, "heat") == ["layers.3"]


def press(browser: Browser, plot: str, *keys: str) -> None:
    browser.evaluate(f"document.querySelector('#{plot}-plot canvas').focus()")
    for key in keys:
        browser.evaluate(
            f"document.querySelector('#{plot}-plot canvas').dispatchEvent("
            f"new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
        )


def test_a_cell_is_chosen_by_keys_and_kept_in_the_address(browser: Browser, page: Path) -> None:
    browser.open(page)
    press(browser, "heat", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight")
    shown = said_in(browser, "heat-chosen")
    assert shown.startswith(
        "layers.1, forward, step 3\n1 call; 2 µs of host time; 48 FLOP; outputs: smallest -1, largest 2"
    )
    run = page.parent / "run"
    commands = texts_of(browser, "#heat-chosen code")
    assert commands == [
        f"opintercept show {run} --module layers.1 --phase forward --steps 3 --calls",
        f"opintercept show {run} --module layers.1 --phase forward --by step",
    ]
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    assert browser.evaluate("document.activeElement.tagName") == "CANVAS"
    assert browser.evaluate("document.querySelector('#outputs-module').selectedOptions[0].text") == "layers.1, forward"
    choose(browser, "heat-colors", "past")
    address = browser.evaluate("location.hash")
    assert address == "#phase=forward&colors=past&step=3&module=layers.1&panel=heat"
    # The same in another browser, and after a change of the address.
    browser.evaluate("location.hash = ''")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    assert said_in(browser, "heat-chosen") == ""
    browser.evaluate(f"location.hash = '{address}'")
    browser.evaluate("new Promise(done => setTimeout(done, 50))")
    assert said_in(browser, "heat-chosen") == shown
    assert browser.evaluate("document.getElementById('heat-colors').value") == "past"
    assert "as before" in said_in(browser, "heat-key")


def test_modules_fold_and_a_group_has_the_calls_below(browser: Browser, tmp_path: Path) -> None:
    calls = []
    for index in range(480):
        module = f"model.layers.{index // 4 % 60}.{'qkvo'[index % 4]}"
        nan = int(index == 281)
        calls.append((replace(CALL, index=index, step=index // 240, module=module), {"output": values(nan=nan)}))
    open_page(browser, tmp_path, folder(tmp_path / "run", *calls, tensors="full"))
    # Of 241 modules, only the way to the first NaN is open.
    names = names_of(browser, "heat")
    assert names == ["model.layers", *map(str, range(11)), *"qkvo", *map(str, range(11, 60))]
    press(browser, "heat", "Home", "-")
    assert names_of(browser, "heat") == ["model.layers"]
    assert said_in(browser, "heat-chosen").startswith("model.layers.*, forward, step 0\n240 calls; ")
    commands = texts_of(browser, "#heat-chosen code")
    assert commands[0].endswith("/run --module 'model.layers.*' --phase forward --steps 0 --calls")
    assert commands[2] == f"opintercept replay {tmp_path / 'run'} 0"
    button = "document.querySelector('#heat-plot button')"
    assert browser.evaluate(f"{button}.getAttribute('aria-expanded')") == "false"
    browser.evaluate(f"{button}.focus(), {button}.click()")
    assert len(names_of(browser, "heat")) == 1 + 60 + 4
    assert browser.evaluate("document.activeElement.getAttribute('aria-expanded')") == "true"
    browser.evaluate("document.getElementById('heat-open').click()")
    assert len(names_of(browser, "heat")) == 1 + 60 * 5
    browser.evaluate("document.getElementById('heat-fold').click()")
    assert names_of(browser, "heat") == ["model.layers"]


def test_a_drift_stands_out_against_the_past(browser: Browser, page: Path) -> None:
    browser.open(page)
    past = browser.evaluate("modules.againstPast([1, 2, null, 2, 8, 0], true)")
    assert past == [0, 1, None, 1, 2, None]  # the medians are those of 1; of 1 and 2; and of 1, 2 and 2
    assert browser.evaluate("modules.againstPast([0, 0, 1, -2, -2], false)") == [0, 0, 8, -8, -8]


def test_matmuls_are_sorted_and_filtered(browser: Browser, page: Path) -> None:
    browser.open(page)
    rows = matmuls_in(browser)
    assert [row[:2] for row in rows] == [["bmm", "backward"], ["mm", "forward"]]
    assert rows[1][2:5] == ["layers.*", "[2, 3] @ [3, 4]", "float32"]
    assert rows[1][5:] == ["30", "1.44 k", "105 µs", "6.5 %", "13.7 M", "0.4615"]
    sort = "document.querySelectorAll('#gemms-table th button')[{}].click()"
    head = "[...document.querySelectorAll('#gemms-table th')].map(each => each.getAttribute('aria-sort'))"
    for column, order in ((0, "ascending"), (0, "descending"), (9, "descending"), (9, "ascending")):
        browser.evaluate(sort.format(column))
        assert browser.evaluate(head)[column] == order
        names = [row[0] for row in matmuls_in(browser)]
        assert names == (["mm", "bmm"] if order == "descending" else ["bmm", "mm"])
    points = "document.querySelectorAll('#roofline .point').length"
    assert browser.evaluate(points) == 2
    choose(browser, "gemms-op", "mm")
    assert [row[0] for row in matmuls_in(browser)] == ["mm"]
    assert browser.evaluate(points) == 1
    choose(browser, "gemms-shape", "[9", "input")
    assert matmuls_in(browser) == []


def test_operators_without_a_formula_show_the_bytes_that_they_move(browser: Browser, tmp_path: Path) -> None:
    added = replace(CALL, op="aten::add", lhs=None, rhs=None, gemm=None, flops=None, bytes=520, elapsed=1e-6)
    open_page(browser, tmp_path, folder(tmp_path / "run", (added, {})), width=1280)
    ((op, _, _, shape, dtype, *figures),) = matmuls_in(browser)
    assert (op, shape, dtype) == ("add", "[2, 4]", "float32")
    assert figures == ["1", "520 B", "1 µs", "100.0 %", "520 MB/s", "?"]


def test_a_map_with_more_rows_than_fit_says_so(browser: Browser, tmp_path: Path) -> None:
    """As scroll bars may be hidden; the last row that shows is cut in half, too."""
    for rows, said in ((30, False), (31, True)):
        calls: list[Any] = [(replace(CALL, module=f"m{i}", step=step), {}) for step in (0, 1) for i in range(rows)]
        open_page(browser, tmp_path, folder(tmp_path / f"{rows}", *calls), width=400)
        assert names_of(browser, "heat")[-1] == f"m{rows - 1}"
        assert (f"{rows} rows: scroll to see the last ones" in said_in(browser, "heat-key")) is said
        box = "document.querySelector('#heat-plot .rows')"
        assert browser.evaluate(f"{box}.clientHeight") == (610 if said else rows * 20)
        browser.evaluate(f"{box}.scrollTop = 1e9")
        bottom = f"{box}.lastChild.lastChild.getBoundingClientRect().bottom"
        assert browser.evaluate(f"{bottom} - {box}.getBoundingClientRect().bottom") == 0
    browser.evaluate(f"{box}.scrollTop = 0")
    browser._ask("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(f"{box}.clientHeight") == 31 * 20
    browser._ask("Emulation.setEmulatedMedia", media="")


def test_a_map_opens_where_values_first_stop_being_finite(browser: Browser, tmp_path: Path) -> None:
    calls = [(replace(CALL, module=f"m{i}"), {"output": values(nan=int(i == 40))}) for i in range(45)]
    open_page(browser, tmp_path, folder(tmp_path / "run", *calls), width=400)
    box = "document.querySelector('#heat-plot .rows')"
    shown = [
        browser.evaluate(f"{box}.scrollTop / 20"),
        browser.evaluate(f"({box}.scrollTop + {box}.clientHeight) / 20"),
    ]
    assert shown[0] < 40 < shown[1] - 1
    choose(browser, "heat-phase", "forward")
    browser.evaluate(f"{box}.scrollTop = 20")
    choose(browser, "heat-statistic", "mean")
    assert browser.evaluate(f"{box}.scrollTop") == 20


def test_runs_of_every_size_are_drawn(browser: Browser, tmp_path: Path) -> None:
    many = [(replace(CALL, module=f"layers.{i}", op=f"aten::{i}"), {"output": values(nan=i)}) for i in range(450)]
    bounds: dict[str, list[Any]] = {
        "empty": [],
        "bare": [(replace(CALL, module=None, lhs=None, gemm=None, flops=None, bytes=None, elapsed=None), {})],
        "work": [(replace(CALL, step=step), {}) for step in range(3)],
        "long": [(replace(CALL, step=step), {"output": values(rms=0.0)}) for step in range(1000)],
        "many": many,
    }
    told = {
        "empty": "The run has no calls.",
        "bare": "No values were recorded",
        "work": "No values were recorded",
        "long": "To fit, each column combines 8 steps.",
        "many": "The map shows the first 400 modules and leaves out 50 calls of others.",
    }
    for name, calls in bounds.items():
        open_page(browser, tmp_path, folder(tmp_path / name, *calls), width=400)
        assert told[name] in browser.evaluate("document.body.innerText")
        assert browser.evaluate("document.documentElement.scrollWidth") == 400
        assert browser.evaluate("document.getElementById('heat-plot').childElementCount > 0") == bool(calls)


def test_two_runs_are_compared_and_either_can_be_shown(
    browser: Browser, recorded: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = recorded("a", "sample", steps=2), recorded("b", "sample", steps=3, change=0.5)
    open_page(browser, tmp_path, a, b, width=400)
    told = said_in(browser, "divergence")
    assert "first divergence: call 1 of A and 1 of B, step 0, forward: addmm in 1\n" in told
    assert "changed operand: rhs differs, and no earlier difference explains it\n" in told
    assert names_of(browser, "divergence") == ["0", "1", "2"]
    assert texts_of(browser, "#divergence-plot .leaf") == ["0", "1■", "2"]
    assert "modules that differ" in texts_of(browser, "#divergence-text th")
    press(browser, "divergence", "ArrowDown", "ArrowDown", "ArrowRight")
    chosen = said_in(browser, "divergence-chosen")
    assert chosen.startswith("2, forward, step 1\n")
    for name in (a, b):
        assert f"opintercept show {name} --module 2 --phase forward --steps 1 --calls" in chosen
    choose(browser, "divergence-phase", "backward")
    assert browser.evaluate("document.querySelectorAll('#histogram-plot .bin').length") >= 10
    steps = "document.querySelectorAll('#heat-plot .steps div span').length"
    assert browser.evaluate(steps) == 2
    choose(browser, "run", "1")
    assert browser.evaluate(steps) == 3
    assert browser.evaluate("document.documentElement.scrollWidth") == 400
    # Runs with nothing in common still make a page.
    others: dict[str, list[Any]] = {
        "rank 0 has no calls in B: ": [],
        "the runs have no calls in common: ": [(replace(CALL, phase="recompute", module="else"), {})],
    }
    for number, (text, calls) in enumerate(others.items()):
        open_page(browser, tmp_path, a, folder(tmp_path / f"other{number}", *calls), width=400)
        assert text in said_in(browser, "divergence")
        assert browser.evaluate("document.getElementById('divergence-plot').offsetHeight") == 0
        assert browser.complaints == []


def broken_runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs. The first is finite; the second has NaN and Inf from step 2 on, which both operands bring in."""
    a, b = [], []
    for index in range(40):
        record = replace(CALL, index=index, step=index // 8, module=f"layers.{index % 8}")
        a.append((record, {"lhs": values(), "rhs": values(), "output": values(rms=1.0 + index)}))
        nan = {"nan": 3} if index >= 20 else {}
        inf = {"inf": 2} if index >= 20 else {}
        kept = {"lhs": values(**nan), "rhs": values(**inf), "output": values(rms=1.0 + index, **nan)}
        b.append((record, kept))
    return folder(tmp_path / "a", *a), folder(tmp_path / "b", *b)


@pytest.mark.parametrize("width", [400, 1280])
def test_both_runs_and_their_alarms_come_first(browser: Browser, tmp_path: Path, width: int) -> None:
    a, b = broken_runs(tmp_path)
    alarms = "[...document.querySelectorAll('.alarm')].map(each => each.innerText)"
    ends = "document.querySelector('{}').getBoundingClientRect().bottom"
    for one, other, figures in ((a, b, "A0B20"), (b, a, "A20B0"), (b, b, "A20B20")):
        open_page(browser, tmp_path, one, other, width=width)
        shown = texts_of(browser, "#figures .figure")
        assert shown[0] == "A40B40calls"
        assert shown[5] == f"{figures}outputs with NaN or Inf"
        assert texts_of(browser, "#figures .bad") == ["20"] * figures.count("20")
        told = browser.evaluate(alarms)
        assert [text[:3] for text in told] == [f"{run}: " for run in "AB" if f"{run}20" in figures]
        assert "Call 20 in step 2, forward: mm in layers.4, train.py:1 in forward, has 3 NaN" in told[0]
        assert "Its lhs and rhs already had some." in told[0]
        # They are on the first screen, above the divergence.
        assert browser.evaluate(ends.format(".alarm:last-child")) < 900
        assert browser.evaluate(ends.format(".alarm:last-child")) < browser.evaluate(ends.format("#divergence h2"))
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        # The run that is chosen below does not change them.
        choose(browser, "run", "1")
        assert texts_of(browser, "#figures .figure") == shown
        assert browser.complaints == []


HOSTILE = [
    "<script>document.title='ran'</script>",
    "</script><script>document.title='ran'</script>",
    "<img src=x onerror=\"document.title='ran'\">",
    "<a href=\"javascript:document.title='ran'\">a</a><b>b</b>",
    "\"'><svg onload=document.title='ran'>`${document.title='ran'}`",
    "--><!--<script>&lt;b&gt;&amp;%{x}$$x$$",
    "@@script@@",
    "__proto__",
    "\x00\x07\x1b[31m\r\n\u2028",
    "\u202e\u2066evil\u05d0\u0639",
    "\ud800",
    "huge " * 800,
]


@pytest.mark.parametrize("policy", [True, False], ids=["policy", "no policy"])
def test_texts_of_a_run_are_only_ever_shown(browser: Browser, tmp_path: Path, policy: bool) -> None:
    calls = []
    for i, text in enumerate(HOSTILE):
        meta = replace(LHS, dtype=text, device=text)
        gemm = Gemm(1, 2, 4, 3, (text, text), (False, False))
        for step in (0, 1):
            record = replace(
                CALL, index=i, step=step, module=text, op=text, func=text, source=text, lhs=meta, gemm=gemm
            )
            calls.append((record, {"output": values(nan=1)}))
        calls.append((replace(record, lhs=LHS), {}))
    texts = {text: text for text in HOSTILE}
    info = {"argv": HOSTILE, "started": HOSTILE[0], "versions": texts, "devices": HOSTILE, "flags": texts}
    run = open_run(folder(tmp_path / HOSTILE[2].replace("/", ""), *calls, **info))
    texts = {f"{text} ": f"{text} " for text in HOSTILE}
    changed = [(record, kept | {"output": values(rms=i + 2.0, nan=1)}) for i, (record, kept) in enumerate(calls)]
    other = open_run(folder(tmp_path / "other", *changed, **info | {"versions": texts, "flags": texts}))
    path = tmp_path / "page.html"
    report.write(path, run, other)
    if not policy:  # the page must not rely on the policy
        text, found = re.subn("<meta http-equiv[^>]*>", "", path.read_text("utf-8"))
        assert found == 1
        path.write_text(text, "utf-8")
    browser.open(path)
    assert browser.complaints == []
    # The pointer over each row of both maps, and over each point of the roofline.
    hover = (
        "(async () => {{ const texts = []; const plot = document.querySelector('{}');"
        "const box = plot.getBoundingClientRect();"
        "for (let i = 0; i < {}; i++) {{ plot.dispatchEvent(new PointerEvent('pointermove', {{bubbles: true,"
        "clientX: box.left + 5, clientY: box.top + 20 * i + 5}}));"
        "texts.push(document.getElementById('tip').textContent); }} return texts; }})()"
    )
    browser.evaluate("['heat', 'divergence'].forEach(each => document.getElementById(each + '-open').click())")
    names = [row[2] for row in matmuls_in(browser)]
    labels = names_of(browser, "heat")
    over = {
        plot: browser.evaluate(hover.format(f"#{plot}-plot canvas", len(labels))) for plot in ("heat", "divergence")
    }
    for text in HOSTILE:
        shown = panels.shown_text(text.encode("utf-8", "replace").decode())  # half a surrogate pair cannot be encoded
        assert shown in names
        for plot, word in (("heat", "1 call"), ("divergence", "1 call of 1 differs")):
            assert any(each.startswith(f"{shown}step 0, forward, {word}") for each in over[plot]), (plot, text)
    points = "[...document.querySelectorAll('#roofline .point')].map(each => each.dataset.tip)"
    assert any("<img" in text for text in browser.evaluate(points))
    press(browser, "heat", "ArrowRight")
    for row in range(len(labels)):
        press(browser, "heat", "ArrowDown" if row else "ArrowUp")
        for command in texts_of(browser, "#heat-chosen code"):
            words = shlex.split(command)
            assert words[:2] == ["opintercept", "show"]
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= {"--module", "--phase", "--steps", "--calls", "--by"}
            assert 7 <= len(words) <= 10
    browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.evaluate("document.title") == "opintercept report"
    assert browser.evaluate("document.querySelectorAll('script').length") == len(report.SCRIPTS.split()) + 1
    assert browser.evaluate("document.querySelectorAll('img, svg a, main a, iframe, b b, p svg').length") == 0
    everything = browser.evaluate("document.body.innerText")
    assert not re.search("[\x00\x07\x1b\u202e\u2066\u2028]", everything)
    assert browser.evaluate("document.documentElement.scrollWidth") == 1280
    assert [address for address in browser.requests if not address.startswith("data:")] == [path.as_uri()]
