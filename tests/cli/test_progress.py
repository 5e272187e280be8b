"""`opintercept.cli.terminal.progress`: a bar on a terminal, which is gone before anything is printed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
import torch
from made_runs import add_damaged

from opintercept import intercept, runs
from opintercept.cli import main
from opintercept.runs.store.progress import watched


def record(folder: Path, calls: int = 3) -> None:
    with intercept(runs.RunRecorder(folder)):
        for _ in range(calls):
            torch.ones(2, 3) @ torch.ones(3, 4)


def on_a_terminal(*arguments: str, after: float = 0.0) -> tuple[int, str, str]:
    """The status of a command whose stderr is a terminal, what it prints, and what it writes to the terminal."""
    code = (
        "import sys; from opintercept.cli import main; from opintercept.cli.terminal import progress; "
        f"progress.AFTER = {after}; progress.EVERY = 0.0; sys.exit(main({list(arguments)!r}))"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    written: list[bytes] = []

    def read() -> None:
        try:
            while piece := os.read(ours, 1 << 16):
                written.append(piece)
        except OSError:  # the terminal is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"NO_COLOR": "1"},
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(theirs)
        reader.join(10)
        os.close(ours)
    return done.returncode, done.stdout, b"".join(written).decode()


def left_over(written: str) -> str:
    """What stays on a terminal of one line."""
    line = ""
    for piece in re.split("(\r\x1b\\[K|\n)", written):
        line = "" if piece in ("\r\x1b[K", "\n") else line + piece
    return line.strip()


@pytest.mark.parametrize("command", ["show", "diff", "report", "export"])
def test_a_bar_shows_what_is_read_and_goes(tmp_path: Path, command: str) -> None:
    record(tmp_path / "a")
    more = {"show": [], "diff": [str(tmp_path / "a")], "report": [], "export": []}[command]
    if command in ("report", "export"):
        more = ["-o", str(tmp_path / "out")]
    status, printed, written = on_a_terminal(command, str(tmp_path / "a"), *more)
    assert (status, printed != "") == (0, True)
    assert re.search(r"reading \S*a +100%", written), written
    assert left_over(written) == ""
    plain = on_a_terminal(command, str(tmp_path / "a"), *more, after=60.0)
    assert plain == (0, printed, "")


def test_a_warning_has_a_line_of_its_own(tmp_path: Path) -> None:
    record(tmp_path / "a")
    for _ in range(2):
        add_damaged(tmp_path / "a")
    status, _, written = on_a_terminal("show", str(tmp_path / "a"))
    assert status == 0
    (line,) = [line for line in written.split("\n") if "warning" in line]
    assert re.fullmatch(r"opintercept show: warning: skipped 2 damaged calls.*", line.rstrip("\r").rpartition("\r")[2])


def test_nothing_is_shown_where_stderr_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a")
    assert main(["show", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_reports_how_far_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opintercept.runs.store.columns.CHUNK", 2)
    record(tmp_path / "a")
    seen: list[tuple[str, int, int]] = []
    with watched(lambda what, done, total: seen.append((Path(what).name, done, total))):
        assert len(list(runs.open_run(tmp_path / "a").calls())) == 3
    assert seen == [("a", 0, 3), ("a", 2, 3), ("a", 3, 3)]
    list(runs.open_run(tmp_path / "a").calls())
    assert len(seen) == 3
