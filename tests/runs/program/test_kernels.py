"""Recorded kernels are held against the operators that they stand for, whoever wrote the run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from planted import compiled_in, replaced
from torch import Tensor

from opintercept import OpInterceptError, intercept, runs
from opintercept.cli import main
from opintercept.runs.program import kernels
from opintercept.runs.program.again import NotRunError
from opintercept.runs.replay import replay

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

X = torch.linspace(-2, 2, 96).reshape(3, 32)
MASKED = "inductor::cpp_fused_mul_softmax_tril_1"


def program(x: Tensor) -> Tensor:
    y = torch.nn.functional.gelu(x @ x.T)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    return (y @ y).masked_fill(~mask, -torch.inf).softmax(-1) * 0.5


def recorded(folder: Path, plant: Callable[[str], str] = str) -> runs.Run:
    with compiled_in(plant):
        function: Any = torch.compile(program)
        with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
            function(X)
    return runs.open_run(folder)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return recorded(tmp_path_factory.mktemp("healthy") / "run")


def of_kernels(run: runs.Run) -> list[runs.StoredCall]:
    return [call for call in run.calls() if kernels.is_kernel(call)]


def test_a_kernel_is_held_against_its_operators(healthy: runs.Run) -> None:
    found = [replay(healthy, call.record.index) for call in of_kernels(healthy)]
    assert len(found) == 2
    assert all(each.equal and each.outputs for each in found)
    assert "held against aten::gelu, run in float64" in str(found[0])
    assert "times what rounding explains" in str(found[0])


def test_a_wrong_kernel_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded(tmp_path / "run", replaced(r"tmp(\d) <= tmp(\d)", r"tmp\1 < tmp\2"))
    first, second = (replay(run, call.record.index) for call in of_kernels(run))
    assert first.equal
    assert not second.equal
    assert "so the kernel is wrong" in str(second)
    assert main(["replay", str(tmp_path / "run"), str(second.call.record.index)]) == 1
    assert "so the kernel is wrong" in capsys.readouterr().out


def test_a_kernel_of_before_the_block_is_not_guessed(tmp_path: Path) -> None:
    with compiled_in(str):
        function: Any = torch.compile(program)
        function(X)
        with intercept(runs.RunRecorder(tmp_path / "run", tensors="full"), ops="all"):
            function(X)
    run = runs.open_run(tmp_path / "run")
    with pytest.raises(OpInterceptError, match="kernels that are compiled while a block is open"):
        replay(run, of_kernels(run)[0].record.index)


def test_other_settings_are_refused(healthy: runs.Run) -> None:
    with pytest.raises(ValueError, match="run in float64 on the CPU"):
        replay(healthy, of_kernels(healthy)[0].record.index, dtype=torch.bfloat16)


def damaged(run: runs.Run, change: Callable[[dict[str, Any]], Any]) -> runs.StoredCall:
    call = of_kernels(run)[1]
    given: Any = copy.deepcopy(call.given)
    change(given["stands_for"])
    return replace(call, given=given)


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.pop("written"),
        lambda plain: plain.update(nodes=[["x"]]),
        lambda plain: plain["made"].update({"-1": ["x", [1], [1]]}),
        lambda plain: plain["made"].update({"1": ["x", [1.5], [1]]}),
        lambda plain: plain.update(given={"99": ["x", [3], [1]]}),
        lambda plain: plain.update(nodes=[["x", "aten.exp.default", [], {}, None]] * 10_001),
    ],
    ids=["outputs", "node", "place", "shape", "operand", "nodes"],
)
def test_a_damaged_run_is_refused(healthy: runs.Run, change: Callable[[dict[str, Any]], Any]) -> None:
    with pytest.raises(NotRunError, match="damaged"):
        kernels.held(healthy, damaged(healthy, change))


def test_operators_that_are_not_on_the_list_do_not_run(healthy: runs.Run) -> None:
    def change(plain: dict[str, Any]) -> None:
        for each in plain["nodes"]:
            each[1] = "aten.from_file.default"

    judged, left_out = kernels.held(healthy, damaged(healthy, change))
    assert judged == []
    assert "aten.from_file.default is not on the list" in next(iter(left_out.values()))


def test_what_operators_make_is_limited(healthy: runs.Run) -> None:
    def change(plain: dict[str, Any]) -> None:
        name = next(iter(plain["made"].values()))[0]
        huge = [[name, "aten.full.default", [{"list": [1 << 20, 1 << 20]}, 1.0], {}, {"torch": "float32"}]]
        plain["nodes"] = huge

    judged, left_out = kernels.held(healthy, damaged(healthy, change))
    assert not any(each.excess <= 1 for _, each in judged)
    assert any("more than the limit" in reason or "far more than" in reason for reason in left_out.values())
