"""`opintercept.cli.terminal.style`: colours on a terminal, and nowhere else."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path

import pytest
from made_runs import add_damaged, call, chain, ranked, values, write
from processes import run_python

from opintercept.cli import main
from opintercept.cli.terminal.style import styled

COLOUR = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def coloured(text: str) -> list[tuple[str, str]]:
    """The colours in a text, each with the words that have it."""
    return [(code, " ".join(words.split())) for code, words in COLOUR.findall(text)]


def printed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What a command prints to a terminal."""
    stdout = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stdout", stdout)
    main(arguments)
    return stdout.getvalue()


@pytest.mark.parametrize(
    ("variables", "terminal", "shown"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_follow_the_terminal_and_the_variables(
    variables: dict[str, str], terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    text = styled("no call differs", "right", Terminal() if terminal else io.StringIO())
    assert text == ("\x1b[32mno call differs\x1b[0m" if shown else "no call differs")


def test_a_closed_file_shows_no_colours() -> None:
    file = io.StringIO()
    file.close()
    assert styled("x", "wrong", file) == "x"


def test_diff_sets_off_the_first_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", chain("a", "b"))
    write(tmp_path / "b", chain("a", "b", of="b"))
    text = printed(monkeypatch, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    found = coloured(text)
    assert found[0] == ("1;31", "first divergence: call 1 of A and 1 of B, step 0, forward: mm in b")
    assert [code for code, _ in found[1:]] == ["1", "1"]
    assert [words.split()[0] for _, words in found[1:]] == ["A", "modules"]
    # But for colours, the terminal shows what a file gets.
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(monkeypatch, "diff", str(tmp_path / "a"), str(tmp_path / "b")) == COLOUR.sub(r"\2", text)
    monkeypatch.delenv("NO_COLOR")
    assert coloured(printed(monkeypatch, "diff", str(tmp_path / "a"), str(tmp_path / "a"))) == [
        ("32", "no call differs: all are equal bit for bit")
    ]


def test_ranks_that_diverge_are_set_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked(tmp_path / "run", chain("a"), chain("a"), chain("a", of="a"))
    found = coloured(printed(monkeypatch, "ranks", str(tmp_path / "run")))
    assert found[0][0] == "1;31"
    assert found[0][1].startswith("first: rank 2 diverged")
    ranked(tmp_path / "equal", chain("a"), chain("a"))
    assert coloured(printed(monkeypatch, "ranks", str(tmp_path / "equal"))) == [
        ("32", "nothing diverged in what recorded calls read")
    ]


def test_show_sets_off_what_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", [call("a", "x", "w", values("y") | {"nan": 3})])
    found = coloured(printed(monkeypatch, "show", str(tmp_path / "run")))
    assert [code for code, _ in found] == ["1;31", "1"]
    assert found[0][1].startswith("nonfinite first in call 0")


def test_json_has_no_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(write(tmp_path / "run", chain("a")).path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["show", run, "--json"], ["show", run, "--csv"], ["diff", run, run, "--json"]):
        assert "\x1b" not in printed(monkeypatch, *arguments)


def test_warnings_and_errors_are_set_off_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", chain("a"))
    add_damaged(run.path)
    stderr = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["show", str(run.path)]) == 0
    assert main(["show", str(tmp_path / "none")]) == 2
    assert coloured(stderr.getvalue()) == [("33", "warning:"), ("1;31", "opintercept show:")]


@pytest.mark.slow
def test_run_sets_off_its_findings(tmp_path: Path) -> None:
    program = "import torch\nx = torch.full((2, 2), torch.inf)\n_ = (x - x) @ x\n"
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"FORCE_COLOR": "1"}
    done = run_python("-m", "opintercept", "run", "program.py", cwd=tmp_path, env=environment, check=True)
    codes = [code for code, _ in coloured(done.stderr)]
    assert "1;31" in codes
    assert "1" in codes
