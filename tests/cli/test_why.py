"""`opintercept why` and `run --why`: what they print, and their exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from processes import run_python
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.cli import main
from opintercept.runs.report import answered

PROGRAM = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LeakyReLU(float(sys.argv[1])), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    torch.nn.functional.cross_entropy(model(torch.ones(3, 8)), torch.arange(3)).backward()
    optimizer.step()
"""


def record(folder: Path, slope: float = 0.1, ops: str = "all") -> str:
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    with intercept(runs.RunRecorder(folder, tensors="full"), ops=ops):
        F.cross_entropy(F.leaky_relu(torch.ones(3, 8) @ weight, slope), torch.arange(3)).backward()
    return str(folder)


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two runs that differ in the slope of an activation."""
    return [record(tmp_path / "a", 0.1), record(tmp_path / "b", 0.2)]


def test_the_first_line_is_the_answer(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *two]) == 1
    first = capsys.readouterr().out.partition("\n")[0]
    assert first.startswith("B uses negative_slope=0.2 where A uses 0.1, in leaky_relu (test_why.py:")
    assert first.endswith("): 100 % of the difference of the loss.")
    assert main(["why", two[0], two[0]]) == 0
    assert capsys.readouterr().out.startswith("Nothing differs")


def test_the_command_prints_what_the_result_does(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = runs.why(*map(runs.open_run, two))
    assert main(["why", *two]) == 1
    assert capsys.readouterr().out == f"{found}\n"
    assert main(["why", *two, "--json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert (plain["sentence"], plain["equal"], plain["verdict"]) == (found.sentence, False, "difference")
    assert plain["causes"][0]["what"] == "uses negative_slope=0.2 where A uses 0.1"


def test_the_answer_is_also_a_page(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["why", *two, "-o", str(page)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{page}: ")
    assert page.read_text("utf-8") == answered.page(runs.why(*map(runs.open_run, two)))
    assert main(["why", *two, "-o", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("B uses negative_slope=0.2")  # before the page fails
    assert f"cannot write the page to '{tmp_path}', which is not a plain file" in printed.err


def test_it_runs_in_a_process_of_its_own(two: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["why", *two]) == 1
    here = capfd.readouterr().out
    assert main(["why", *two, "--untrusted"]) == 1
    assert capfd.readouterr().out == here


def test_what_is_recorded_of_both_is_compared(
    tmp_path: Path, two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    products = record(tmp_path / "products", ops="matmul")
    for runs_of, lacking in (
        ((products, two[0]), "A, so others of B were not compared"),
        ((two[0], products), "B"),
        ((products, products), "A and B"),
    ):
        assert main(["why", *runs_of]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("Nothing differs, up to and with the ")
        assert ". What follows it was not compared.\n" in printed
        assert re.search(r"B has the results of (\d) of \1 products of A", printed)
        assert f"only products were recorded of {lacking}; `opintercept run --why` records all operators" in printed


def test_programs_that_have_nothing_in_common_are_not_compared(
    tmp_path: Path, two: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with intercept(runs.RunRecorder(tmp_path / "other", tensors="full"), ops="all"):
        torch.linspace(3, 5, 35).view(5, 7).sin() @ torch.linspace(-9, 8, 14).view(7, 2)
    assert main(["why", two[0], str(tmp_path / "other")]) == 2
    assert "must have results of" in capsys.readouterr().err


def test_a_run_without_values_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all"):
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert main(["why", str(tmp_path / "run"), str(tmp_path / "run")]) == 2
    assert "must have calls with all of their values; record it with `opintercept run --why`" in (
        capsys.readouterr().err
    )


def test_run_records_what_why_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.py").write_text(PROGRAM)
    for name, slope in (("a", "0.1"), ("b", "0.2")):
        options = ("-q", "--why", "--out", tmp_path / name)
        run_python("-m", "opintercept", "run", *options, tmp_path / "step.py", slope, check=True)
    calls = list(runs.open_run(tmp_path / "a").calls())
    assert {(call.record.phase, call.record.step) for call in calls} == {("forward", 0)}
    assert main(["why", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("B uses negative_slope=0.2 where A uses 0.1, in module 1 (step.py:")
    assert "add_" not in printed  # the optimizer steps in the forward phase, with gradients that were not recorded
    assert main(["run", "--why", "step.py"]) == 2
    assert "--why needs --out FOLDER, the folder to record to" in capsys.readouterr().err


def test_run_records_training_where_steps_are_named(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(PROGRAM)
    options = ("-q", "--why", "--steps", "0:2", "--out", tmp_path / "run")
    run_python("-m", "opintercept", "run", *options, tmp_path / "step.py", "0.1", check=True)
    found = {(call.record.phase, call.record.step) for call in runs.open_run(tmp_path / "run").calls()}
    assert {("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)} <= found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["align", "a", "b"], "opintercept align: is now `opintercept why`\n"),
        (["explain", "a", "b", "--by", "module"], "opintercept explain: is now `opintercept why`\n"),
    ],
)
def test_old_names_say_the_new_one(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 2
    assert capsys.readouterr().err.endswith(message)


@pytest.mark.parametrize(("old", "new"), [("align", "why"), ("explain", "why"), ("Alignment", "Answer")])
def test_old_names_in_python_say_the_new_one(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{old}'; it is called {new} now"):
        getattr(runs, old)
