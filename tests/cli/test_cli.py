"""The command line: the demo, bad options, and `--help` without torch."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from made_runs import add_damaged, call, write
from processes import run_python

import opintercept
from opintercept.cli import COMMANDS, EXAMPLES, main
from opintercept.cli.options import size


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_demo_shows_the_matmuls_of_a_training_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert re.fullmatch(r"A decoder of [\d,]+ parameters learns textwrap\.py \([\d,]+ characters\)\.", lines[0])
    assert "The first matmuls, forward, and the first three backward:\n0 forward aten::mm " in out
    shown = [line.split(" ", 2)[1] for line in lines if re.match(r"\d+ (forward|backward) aten::", line)]
    assert shown == ["forward"] * 6 + ["backward"] * 3
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+)$", out, re.MULTILINE)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    opaque = next(line for line in lines if line.startswith("opaque (matmuls inside are not shown): "))
    assert "aten::_scaled_dot_product_flash_attention_for_cpu x6" in opaque
    start = next(i for i, line in enumerate(lines) if line.startswith("module "))
    assert all(re.search(r" \d+\.\d% ", line) for line in lines[start + 1 : start + 13])
    assert lines[start + 13] == "..."
    assert re.fullmatch(r"These matmuls are \d+\.\d% of the \d+\.\d s of training\.", lines[start + 14])
    assert lines[-1] == "Next, a program of your own: opintercept run train.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], r"invalid choice: 'fly'"),
        (["shwo"], r"invalid choice: 'shwo' .*; did you mean 'show'\?"),
        (["--versoin"], r"the following arguments are required: command|unrecognized arguments: --versoin"),
        (["demo", "--stpes", "2"], r"^usage: opintercept demo .*\n.*--stpes 2; did you mean '--steps'\?"),
        (["run", "--otu", "x", "y.py"], r"^usage: opintercept run \[options\] (.|\n)*--otu; did you mean '--out'\?"),
        (["run", "--tensors", "ful", "y.py"], r"invalid choice: 'ful' .*; did you mean 'full'\?"),
        (["show", "run", "--nan"], r"unrecognized arguments: --nan\n$"),
        (["run", "--max-bytes", "2T", "y.py"], r"must be a number of bytes such as 500k, 64M or 2G, got '2T'"),
        (["demo", "--step-count", "2"], r"unrecognized arguments: --step-count 2"),
        (["demo", "--steps"], r"--steps: expected one argument"),
        (["demo", "--steps", "0"], r"--steps: must be .*at least 1, got '?0"),
        (["demo", "--steps", "-2"], r"--steps: must be .*at least 1, got '?-2"),
        (["demo", "--steps", "two"], r"--steps: must be .*, got 'two'"),
    ],
    ids=str,
)
def test_bad_options_exit_with_2_and_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"]], ids=lambda words: " ".join(words) or "none")
def test_help_exits_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(arguments)
    assert "demo" in capsys.readouterr().out


def test_version_is_printed_without_importing_torch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"opintercept {opintercept.__version__}\n"
    assert not imports_torch("from opintercept.cli import main; main(['--version'])")


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("500k", 500_000), ("64M", 64_000_000), ("2G", 2 * 10**9), ("2GB", 2 * 10**9)]
)
def test_size_parses_bytes(text: str, expected: int) -> None:
    assert size(text) == expected


# Run the command line as if these packages were not installed.
WITHOUT = """
import sys
from importlib.machinery import PathFinder
find, missing = PathFinder.find_spec, sys.argv.pop().split(",")
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in missing else find(name, *more)
from opintercept.cli import main
sys.exit(main())
"""


def without(packages: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-c", WITHOUT, *arguments, packages)


@pytest.mark.slow
def test_demo_does_not_mention_missing_numpy() -> None:
    done = without("numpy,safetensors", "demo", "--steps", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("A decoder of ")


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["numpy", "safetensors"])
def test_recording_values_needs_the_packages_that_store_them(missing: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.eye(2) @ torch.eye(2)\nprint('ran')\n")
    # torch imports numpy itself, so that only a new Python can be without it.
    start = python if missing == "numpy" else run_python
    for kept in ("full", "sample"):
        run = ["run", "--tensors", kept, "--out", str(tmp_path / kept), str(tmp_path / "script.py")]
        done = start("-c", WITHOUT, *run, missing)
        assert (done.returncode, done.stdout) == (2, "")
        what = "RunRecorder" if missing == "numpy" else "keeping tensors"
        expected = f"opintercept run: {what} needs {missing}; pip install 'opintercept[cli]'\n"
        assert done.stderr.endswith(expected)
        assert not (tmp_path / kept).exists()


@pytest.mark.parametrize("name", ["show", "diff", "why", "ranks", "report", "export"])
@pytest.mark.parametrize("option", ["--help", "run"])
def test_commands_that_read_runs_say_what_they_need(name: str, option: str, tmp_path: Path) -> None:
    write(tmp_path / "run", [call("a", "x", "w", "y")])
    run = str(tmp_path / "run")
    arguments = [option] if option == "--help" else [run, run] if name in ("diff", "why") else [run]
    done = without("numpy", name, *arguments)
    if done.returncode or option == "run":
        assert (done.returncode, done.stdout) == (2, "")
        needed = r"(torch, )?numpy( and safetensors)?; pip install 'opintercept\[cli\]'\n"
        assert re.fullmatch(rf"opintercept {name}: [a-z ]+ needs {needed}", done.stderr), done.stderr


def test_cli_extra_lists_what_the_commands_import() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sorted(project["optional-dependencies"]["cli"]) == ["duckdb", "numpy", "safetensors", "shtab"]


def imports_torch(code: str) -> bool:
    done = python("-c", f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)")
    return {"True": True, "False": False}[done.stdout.splitlines()[-1]]


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--steps", "0"]], ids=["help", "bad option"])
def test_help_and_bad_options_do_not_import_torch(arguments: list[str]) -> None:
    assert not imports_torch(f"from opintercept.cli import main; main({arguments})")


READING = {
    "show": ["show", "a"],
    "calls": ["show", "a", "--calls"],
    "sorted calls": ["show", "a", "--calls", "--sort", "time"],
    "diff": ["diff", "a", "b"],
    "report": ["report", "a", "a", "-o", "page.html"],
}


@pytest.fixture(params=READING)
def reading(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that reads one run, or two that are equal, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write(tmp_path / name, [call("a", "x", "w", "y")])
    return READING[request.param]


def test_commands_that_read_no_tensors_do_not_import_torch(reading: list[str]) -> None:
    assert not imports_torch(f"from opintercept.cli import main; assert main({reading}) == 0")


def test_a_damaged_file_gives_a_one_line_warning(reading: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runs = [name for name in "ab" if name in reading]
    for name in runs:
        add_damaged(Path(name))
    assert main(reading) == 0
    out, err = capsys.readouterr()
    assert out
    assert err.splitlines() == [
        f"opintercept {reading[0]}: warning: skipped 1 damaged call in {name}; a disk or another program has changed "
        "the files, or the machine went down while they were written"
        for name in runs
    ]


@pytest.mark.slow
def test_imports_torch_detects_an_import() -> None:
    assert imports_torch("from opintercept.cli.demo import _decoder; _decoder(8, 4); sys.exit(2)")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_are_shown_and_accepted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert shown == [f"  opintercept {example}" for example in EXAMPLES[name]]
    for example in EXAMPLES[name]:
        command, *arguments = shlex.split(example.partition(" > ")[0])
        assert command == name
        parser = argparse.ArgumentParser()
        importlib.import_module(f"opintercept.cli.{name}").configure(parser)
        parser.parse_args(arguments)  # exits if they are wrong


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
@pytest.mark.parametrize(
    ("typed", "completed"), [(["dif"], "diff"), (["diff", "--rt"], "--rtol"), (["show", "--phase", "f"], "forward")]
)
def test_bash_completes_commands_options_and_choices(
    typed: list[str], completed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    words = " ".join(["opintercept", *typed])
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({words}) COMP_CWORD={len(typed)}\n_shtab_opintercept\n"
    done = subprocess.run(
        ["bash", "-c", f"{script}printf '%s\\n' \"${{COMPREPLY[@]}}\""], capture_output=True, text=True, check=True
    )
    assert completed in done.stdout.splitlines()
