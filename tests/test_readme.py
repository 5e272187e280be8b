"""README: continuous integration runs its commands, and its layout is complete. conftest.py runs its Python blocks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from compiler import needs_compiler
from native import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BUILD = "opintercept build\nopintercept info\n"


def test_ci_runs_every_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    shown = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    (reading,) = re.findall(r"< <\((sed .*)\)", (ROOT / ".ci" / "run").read_text())
    run = subprocess.run(["bash", "-c", reading], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert run.splitlines() == shown
    assert sum("pytest" in command for command in shown) == 1


def test_every_block_of_the_readme_is_checked() -> None:
    readme = (ROOT / "README.md").read_text()
    languages = re.findall(r"^```(\w+)$", readme, re.MULTILINE)
    assert set(languages) == {"console", "python", "sh", "text"}
    assert len(languages) * 2 == len(re.findall(r"^```", readme, re.MULTILINE))


def test_the_layout_names_every_file_and_folder_of_the_package() -> None:
    (drawing,) = re.findall(r"^opintercept/\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    named = {word for line in drawing.splitlines() for word in re.findall(r"\S+", line.partition("   ")[0].strip())}
    found = {path.name for path in (ROOT / "opintercept").glob("[_a-z]*.py")} - {"__init__.py", "__main__.py"}
    found |= {f"{path.parent.name}/" for path in (ROOT / "opintercept").glob("*/__init__.py")}
    assert named == found


def test_the_commands_on_runs_do_what_the_readme_says(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = re.findall(r"^```python\n(# train\.py\n.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    statuses = {"diff": 1, "replay": 1}  # the example shows a difference
    found = re.findall(r"^```sh\n(.*?)^```$(?:\n```text\n(.*?)^```$)?", readme, re.MULTILINE | re.DOTALL)
    shown = [(commands, expected) for commands, expected in found if commands != BUILD]
    assert sum(len(commands.splitlines()) for commands, _ in shown) == 7
    for commands, expected in shown:
        for command in commands.splitlines():
            program, *arguments = shlex.split(command)
            assert program == "opintercept"
            done = subprocess.run(
                [sys.executable, "-m", "opintercept", *arguments],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == statuses.get(arguments[0], 0), f"{command}\n{done.stderr}"
        assert expected in done.stdout


@needs_compiler
def test_the_compiled_engine_is_built_and_shown_as_the_readme_says() -> None:
    (expected,) = re.findall(rf"^```sh\n{BUILD}```\n```text\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    run_python("from opintercept.cli import main; main(['build'])")
    printed = run_python("from opintercept.cli import main; main(['info'])")

    def parts(lines: list[str]) -> list[str]:
        # Paths, versions and processors differ.
        return [re.sub(r"/.*/|\w*[0-9]\S*|with \w+", "", line) for line in lines]

    assert parts(printed) == parts(expected.splitlines())
