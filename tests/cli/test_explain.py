"""`opintercept explain` and `run --explain`: what they print, and their exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run_python
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.cli import main
from opintercept.runs.report import explained

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


@pytest.fixture
def two(tmp_path: Path) -> list[str]:
    """Two runs that differ in the slope of an activation."""
    weight = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
    for name, slope in (("a", 0.1), ("b", 0.2)):
        with intercept(runs.RunRecorder(tmp_path / name, tensors="full"), ops="all"):
            F.cross_entropy(F.leaky_relu(torch.ones(3, 8) @ weight, slope), torch.arange(3)).backward()
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_the_command_prints_the_result(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *two]) == 1
    printed = capsys.readouterr().out
    assert "another argument: negative_slope=0.2 for 0.1" in printed
    assert "100.0 % of it" in printed
    assert main(["explain", two[0], two[0]]) == 0
    assert capsys.readouterr().out.endswith("no call, weight or input differs\n")


def test_the_command_writes_json(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *two, "--json", "--by", "op", "--confirm", "1"]) == 1
    found = json.loads(capsys.readouterr().out)
    first = found["rows"][0]
    assert (first["op"], found["by"]) == ("aten::leaky_relu", "op")
    assert first["confirmed"] == pytest.approx(first["cost"], rel=0.1)  # the way to it is nearly straight
    assert found["explained"] + found["remainder"] == pytest.approx(found["difference"])


def test_the_result_is_also_a_page(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["explain", *two, "-o", str(page)]) == 1
    assert capsys.readouterr().out.endswith(f"%\n\n{page}: {page.stat().st_size / 1e6:.1f} MB\n")
    assert page.read_text("utf-8") == explained.page(runs.explain(*map(runs.open_run, two)))
    assert main(["explain", *two, "--json", "--out", str(page)]) == 1
    assert json.loads(capsys.readouterr().out)["rows"]
    assert main(["explain", *two, "-o", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "not explained" in printed.out  # before the page fails
    assert f"cannot write the page to '{tmp_path}', which is not a plain file" in printed.err


def test_tokens_are_whole_numbers(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *two, "--tokens", "1,x"])
    assert "must be whole numbers separated by commas, got '1,x'" in capsys.readouterr().err
    product = next(call.record.index for call in runs.open_run(two[0]).calls() if call.record.op == "aten::mm")
    assert main(["explain", *two, "--tokens", "1,2", "--loss", str(product)]) == 0  # nothing differs before


def test_run_records_what_explain_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step.py").write_text(PROGRAM)
    for name, slope in (("a", "0.1"), ("b", "0.2")):
        options = ("-q", "--explain", "--out", tmp_path / name)
        run_python("-m", "opintercept", "run", *options, tmp_path / "step.py", slope, check=True)
    calls = list(runs.open_run(tmp_path / "a").calls())
    assert {(call.record.phase, call.record.step) for call in calls} == {("forward", 0)}
    assert main(["explain", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "negative_slope=0.2 for 0.1" in capsys.readouterr().out
    assert main(["run", "--explain", "step.py"]) == 2
    assert "--explain needs --out FOLDER, the folder to record to" in capsys.readouterr().err
