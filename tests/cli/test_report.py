"""`opintercept report`: the page it writes, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from opintercept import intercept, runs
from opintercept.cli import main
from opintercept.runs.report import page as report

torch = pytest.importorskip("torch")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with intercept(runs.RunRecorder(tmp_path / "run", tensors="stats")):
        torch.ones(2, 3) @ torch.ones(3, 4)
    return tmp_path / "run"


def test_report_writes_a_page_of_one_run_or_two(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{page}: {page.stat().st_size / 1e6:.1f} MB\n"
    assert err == ""
    opened = runs.open_run(run)
    assert page.read_text("utf-8") == report.page(opened)
    assert main(["report", str(run), str(run), "--out", str(page)]) == 0
    assert page.read_text("utf-8") == report.page(opened, opened)
    assert page.read_text("utf-8").startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_report_is_written_to_the_working_directory(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "report.html").exists()


def test_report_explains_what_it_cannot_use(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err.startswith("opintercept report: a run must be a folder with run.json")
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    expected = f"opintercept report: cannot write the page to '{tmp_path}', which is not a plain file\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "page.html").exists()
