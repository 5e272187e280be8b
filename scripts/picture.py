"""Draws docs/picture.svg: what `opintercept diff` prints about the two runs of docs/guides/compare-two-runs.md.

Run `python scripts/picture.py` after a change of that output; tests/project/test_docs.py compares the two. Needs
`[docs]`.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "picture.svg"
PAGE = ROOT / "docs" / "guides" / "compare-two-runs.md"
COMMAND = "opintercept diff runs/a runs/b"
_REMOTE_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_FIRST = re.compile(r"^(first divergence:|changed operand)")


def output(folder: Path) -> str:
    """What the command prints, after the commands of the page that come before it have run in `folder`."""
    page = PAGE.read_text("utf-8")
    program, commands = re.findall(r"^```(?:python\n(?=# train\.py\n)|sh\n)(.*?)^```$", page, re.MULTILINE | re.DOTALL)[
        :2
    ]
    (folder / "train.py").write_text(program, "utf-8")
    wide = os.environ | {"COLUMNS": "120"}
    for command in commands.splitlines():
        arguments = [sys.executable, "-m", *command.split()]
        done = subprocess.run(arguments, cwd=folder, env=wide, capture_output=True, text=True, check=False)
        if command == COMMAND:
            return done.stdout
        done.check_returncode()
    raise AssertionError(f"the page does not run {COMMAND!r}")


def draw(text: str) -> str:
    """Draw a terminal with the command and its output."""
    from rich.console import Console
    from rich.text import Text

    lines = [f"$ {COMMAND}", *text.splitlines()]
    console = Console(record=True, width=max(map(len, lines)) + 2, file=io.StringIO(), legacy_windows=False)
    for line in lines:
        style = "bold green" if line.startswith("$ ") else "bold yellow" if _FIRST.match(line.strip()) else ""
        console.print(Text(line, style=style), soft_wrap=True)
    drawn = console.export_svg(title="opintercept", unique_id="picture")
    return _REMOTE_FONTS.sub("", drawn).replace("Fira Code", "ui-monospace, Menlo, Consolas")


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(draw(output(Path(folder))), "utf-8")


if __name__ == "__main__":
    main()
