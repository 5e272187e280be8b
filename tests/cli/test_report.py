"""`opintercept report`: the page it writes, and its errors."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from made_runs import add_damaged

from opintercept import intercept, runs
from opintercept.cli import main

torch = pytest.importorskip("torch")


def data_of(page: str) -> Any:
    """What the page shows, as plain data."""
    (block,) = re.findall(r'<script type="application/json" id="data">"(.*?)"</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(block)))


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
    one = page.read_text("utf-8")
    assert data_of(one)["divergence"] is None
    assert main(["report", str(run), str(run), "--out", str(page)]) == 0
    assert data_of(page.read_text("utf-8"))["divergence"]["equal"] is True
    assert one.startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_report_is_written_to_the_working_directory(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "report.html").exists()


def test_report_explains_what_it_cannot_use(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err.startswith("opintercept report: a run must be a folder with run.json")
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"opintercept report: cannot write the page to '{tmp_path}', which is not a plain file\n"
    )
    assert not (tmp_path / "page.html").exists()


def test_a_damaged_file_gives_a_one_line_warning(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_damaged(run)
    assert main(["report", str(run), str(run), "-o", str(tmp_path / "page.html")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"opintercept report: warning: skipped 1 damaged call in {run}; a disk")


def test_report_without_tensors_does_not_import_torch(run: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom opintercept.cli import main\n"
        "assert main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    )
    arguments = ["report", str(run), str(run), "-o", str(tmp_path / "page.html")]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
