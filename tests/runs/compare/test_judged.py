"""Runs with all operators and values: what `diff` says of them is what `why` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import chain, ranked
from recorded import run_of
from torch import nn
from torch.nn import functional as F

from opintercept import OpInterceptError, runs
from opintercept.cli import main
from opintercept.runs.compare import judged
from opintercept.runs.report import page

X = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))
Program = Callable[[], object]


class Nudge:
    """Changes the first element of the product of a module."""

    reads = ("module",)

    def __init__(self, module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module, self.change = module, change

    def post(self, call: Any) -> Any:
        if call.module != self.module or "mm" not in call.op:
            return None
        output = call.output.clone()
        output.view(-1)[0] = self.change(output.view(-1)[0])
        return output


def up(value: torch.Tensor) -> torch.Tensor:
    """The next number."""
    return torch.nextafter(value, torch.full_like(value, torch.inf))


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 32))


def inference(net: nn.Module, x: torch.Tensor = X) -> Program:
    def program() -> None:
        with torch.no_grad():
            net(x)

    return program


def record(path: Path, program: Program, *edits: Any, tensors: Any = "full", ops: Any = "all") -> runs.Run:
    return run_of(path, program, tensors, *edits, ops=ops)


def pair(tmp_path: Path, a: Program, b: Program, *edits: Any, **how: Any) -> tuple[runs.Run, runs.Run]:
    return record(tmp_path / "a", a, **how), record(tmp_path / "b", b, *edits, **how)


def both(tmp_path: Path, *edits: Any, net: nn.Module | None = None, **how: Any) -> tuple[runs.Run, runs.Run]:
    return pair(tmp_path, inference(model()), inference(net or model()), *edits, **how)


def judged_of(a: runs.Run, b: runs.Run, **options: Any) -> Any:
    """The difference, of which the judge says what `why` says."""
    found, answer = runs.diff(a, b, **options), runs.why(a, b)
    assert isinstance(found.judged, runs.Answer)
    assert (found.judged.verdict, found.judged.sentence) == (answer.verdict, answer.sentence)
    assert found.equal is answer.equal
    assert sum(found.kinds.values()) == found.pairs
    assert str(found).startswith(answer.sentence)
    return found


def test_a_kernel_that_is_wrong_is_the_first_divergence(tmp_path: Path) -> None:
    found = judged_of(*both(tmp_path, Nudge("0", up), Nudge("2", lambda value: value + 0.01)))
    first = found.first
    assert (first.kind, first.a.record.module, first.a.record.op) == ("added", "2", "aten::addmm")
    assert "\n  added: the operands differ by rounding, and the output by more\n" in str(found)
    assert first.a.record.index == found.judged.causes[0].place.index
    assert found.kinds == {"equal": 3, "added": 1, "inherited": 2, "rounding": 2}
    assert {row.module for row in found.modules if "rounding" in row.kinds} == {"0", "1"}


def test_what_only_rounds_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = judged_of(*both(tmp_path, Nudge("2", up)))
    assert (found.equal, found.first, found.kinds) == (True, None, {"equal": 5, "rounding": 3})
    assert [row.module for row in found.modules] == ["2", "3", "4"]
    assert main(["diff", *(str(tmp_path / name) for name in "ab")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Nothing differs by more than rounding")
    assert "\nwhat differs is rounding\n" in said
    assert "divergence" not in said
    # Bit for bit, they are not equal.
    assert main(["diff", "--no-tensors", *(str(tmp_path / name) for name in "ab")]) == 1
    assert "rounding explains it is unknown, as values were not read:\n  opintercept why" in capsys.readouterr().out


def test_operators_that_make_the_same_are_no_difference(tmp_path: Path) -> None:
    net = model()
    weight, bias = net[0].weight.detach(), net[0].bias.detach()  # type: ignore[operator]
    found = judged_of(*pair(tmp_path, lambda: F.linear(X, weight, bias).exp(), lambda: (X @ weight.t() + bias).exp()))
    assert (found.equal, found.first) == (True, None)
    assert any(found.unmatched_calls)


@pytest.mark.parametrize("before", [(), (Nudge("0", up),)], ids=["first", "behind rounding"])
def test_a_weight_that_differs_is_the_first_divergence(tmp_path: Path, before: tuple[Any, ...]) -> None:
    net = model()
    with torch.no_grad():
        net[4].weight[1, 2] += 0.5  # type: ignore[operator, index]
    found = judged_of(*both(tmp_path, *before, net=net))
    assert (found.first.kind, found.first.changed, found.first.a.record.module) == ("changed operand", ("rhs",), "4")
    assert found.kinds.get("rounding", 0) == (4 if before else 0)


def test_a_bias_that_is_missing_at_the_end_is_a_difference(tmp_path: Path) -> None:
    weight, bias = torch.randn(4, 48), torch.randn(4)
    a, b = pair(tmp_path, lambda: F.linear(X, weight, bias), lambda: F.linear(X, weight))
    found = judged_of(a, b)
    assert (found.equal, found.first.kind, found.first.b.record.op) == (False, "added", "aten::mm")
    assert "the outputs cannot be compared one by one" in str(found)


def test_another_argument_is_the_first_divergence(tmp_path: Path) -> None:
    net = model()
    net[3].eps = 0.1  # type: ignore[assignment]
    found = judged_of(*both(tmp_path, net=net))
    assert (found.first.kind, found.first.arguments) == ("changed argument", (("eps", 1e-05, 0.1),))
    assert "\n  changed argument: eps is 1e-05 in A and 0.1 in B\n" in str(found)
    assert str(found).endswith(f"\n  opintercept why {tmp_path}/a {tmp_path}/b")


def test_another_dtype_throughout_is_no_difference(tmp_path: Path) -> None:
    found = judged_of(*pair(tmp_path, inference(model()), inference(model().bfloat16(), X.bfloat16())))
    assert (found.equal, found.kinds.keys()) == (True, {"equal", "rounding"})


def test_only_selected_calls_are_first(tmp_path: Path) -> None:
    a, b = both(tmp_path, Nudge("2", lambda value: value + 0.01))
    found: Any = runs.diff(a, b, select=lambda record: record.module == "4")
    assert (found.equal, found.first.kind, {*found.kinds}) == (False, "inherited", {"equal", "inherited"})
    found = runs.diff(a, b, select=lambda record: record.module == "0")
    assert (found.equal, found.first, {*found.kinds}) == (True, None, {"equal"})


def test_runs_without_a_pair_are_judged(tmp_path: Path) -> None:
    a, b = pair(tmp_path, lambda: X.cos() * 2, lambda: X.sin().add(1))
    found = judged_of(a, b)
    assert (found.pairs, found.first) == (0, None)


def test_runs_that_are_equal_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged, "why", None)
    found = runs.diff(*both(tmp_path))
    assert (found.equal, found.judged) == (True, "")
    assert "\nno call differs: all are equal bit for bit\n" in str(found)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"tensors": "stats"}, "no values were recorded"),
        ({"tensors": "sample"}, "not all values were recorded"),
    ],
    ids=["stats", "sample"],
)
def test_what_was_not_recorded_is_said(tmp_path: Path, how: dict[str, Any], why: str) -> None:
    found: Any = runs.diff(*both(tmp_path, Nudge("2", lambda value: value + 0.01), **how))
    assert (found.first.kind, found.first.a.record.module, found.judged) == ("added", "2", why)
    advice = "record both with `opintercept run --ops all --tensors full`, then:\n  opintercept why "
    assert f"\nwhether rounding explains it is unknown, as {why}; {advice}" in str(found)


def test_what_is_too_large_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = both(tmp_path, Nudge("2", up))
    for limit in ("_MOST_CALLS", "_MOST_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(judged, limit, 1)
            found = runs.diff(a, b)
        assert found.judged == "there are too many calls or values to judge them here"
        assert "too many calls or values to judge them here:\n  opintercept why " in str(found)


def test_what_cannot_be_judged_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: runs.Run) -> runs.Answer:
        raise OpInterceptError("the run was cut off")

    monkeypatch.setattr(judged, "why", refuse)
    found: Any = runs.diff(*both(tmp_path, Nudge("2", up)))
    assert (found.judged, found.first.kind) == ("they cannot be judged: the run was cut off", "added")


def test_several_processes_are_not_judged(tmp_path: Path) -> None:
    for name in "ab":
        ranked(tmp_path / name, chain("a"), chain("a", of="a" if name == "b" else ""))
        for rank in range(2):
            info = tmp_path / name / f"rank{rank}" / "run.json"
            info.write_text(info.read_text().replace('"stats"', '"full"'))
    found = runs.diff(*(runs.open_run(tmp_path / name) for name in "ab"))
    assert found.judged == "runs of several processes are not judged"


def test_a_weight_that_differs_after_equal_gradients_is_the_optimizers(tmp_path: Path) -> None:
    def program(rate: float) -> Program:
        def run() -> None:
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            for _ in range(2):
                net(X).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    a, b = (record(tmp_path / f"{rate}", program(rate), tensors="stats", ops="matmul") for rate in (0.01, 0.02))
    found: Any = runs.diff(a, b)
    assert (found.optimizer, found.first.a.record.step, found.first.changed) == (True, 0, ("rhs", "bias"))
    text = "  the optimizer: it was equal in an earlier call, and the gradients recorded since then are equal\n"
    assert text in str(found)
    # Another gradient, or another weight from the start, is not the optimizer.
    nudge = Nudge("4", lambda value: value + 1)
    c = record(tmp_path / "c", program(0.02), nudge, tensors="stats", ops="matmul")
    assert not runs.diff(a, c).optimizer
    assert not runs.diff(*both(tmp_path / "d", net=model(1), tensors="stats")).optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_an_empty_operand_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    def program(other: bool) -> Program:
        def run() -> None:
            keys, empty = torch.arange(6).view(2, 3).to(dtype), torch.tensor([], dtype=dtype)
            grown = torch.cat([empty, keys * 2 if other else keys])  # as a cache that begins without keys
            torch.nn.functional.linear(torch.empty(0, 3), torch.ones(2, 3), torch.ones(2) + other)
            grown.double().sum()

        return run

    a, b = (record(tmp_path / name, program(name == "b"), ops=["all", "-view"]) for name in "ab")
    found: Any = runs.diff(a, b, tensors=False)
    assert found.first.a.record.op == "aten::cat"
    assert not runs.diff(a, b).equal
    page.write(tmp_path / "page.html", a, b)
