"""README: continuous integration runs its commands. The longest tests come first there.

conftest.py runs its Python blocks, and test_docs.py its others.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import longest

ROOT = Path(__file__).parents[2]


def test_ci_runs_every_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    shown = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    (reading,) = re.findall(r"< <\((sed .*)\)", (ROOT / ".ci" / "run").read_text())
    run = subprocess.run(["bash", "-c", reading], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert run.splitlines() == shown
    assert sum("&& pytest" in command for command in shown) == 1


def test_every_block_of_the_readme_is_checked() -> None:
    readme = (ROOT / "README.md").read_text()
    languages = re.findall(r"^```(\w+)$", readme, re.MULTILINE)
    assert set(languages) == {"console", "python", "sh", "text"}
    assert len(languages) * 2 == len(re.findall(r"^```", readme, re.MULTILINE))


def test_the_longest_files_are_there() -> None:
    assert [name for name in longest.FILES if not (ROOT / "tests" / name).is_file()] == []
    assert len(set(longest.FILES)) == len(longest.FILES)
