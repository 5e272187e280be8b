"""Makes one wheel that holds the compiled engine for several versions of Python and torch.

    python scripts/wheel.py --out dist
    python scripts/wheel.py --out dist .venv-a/bin/python .venv-b/bin/python

The first makes it for each Python on PATH with the two newest torches, which pip installs into an environment that is
removed again. Pythons that are named need torch. A compiler must be there. `pip wheel` gets the options that this
script does not know, and pip's variables say where torch comes from.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Build the libraries with each Python, and then the wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON", help="an interpreter that has torch (default all)")
    parser.add_argument("--out", default="dist", metavar="FOLDER", help="where to put the wheel (default dist)")
    options, for_pip = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for python in options.pythons or _environments():
            _run([python, "-m", "opintercept", "build", "--into", folder], PYTHONPATH=str(ROOT))
        made = Path(folder, "made")
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), *for_pip, str(ROOT)]
        _run(command, OPINTERCEPT_BUILD=folder)
        (wheel,) = made.iterdir()
        Path(options.out).mkdir(parents=True, exist_ok=True)
        print(shutil.move(wheel, Path(options.out, wheel.name)))


def _environments() -> Iterator[str]:
    """Interpreters with torch, one after the other: of each Python on PATH, with the two newest torches for it."""
    for name in (f"python3.{minor}" for minor in range(11, 100)):
        python = shutil.which(name)
        if python is None or subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
            continue  # a shim of pyenv may have no Python behind it
        with tempfile.TemporaryDirectory() as folder:
            _run([python, "-m", "venv", folder])
            pip = [f"{folder}/bin/python", "-m", "pip"]
            found = subprocess.check_output([*pip, "index", "versions", "torch"], text=True)
            series = re.findall(r"\b(\d+\.\d+)\.\d", found.partition("Available versions:")[2])
            left = 2
            for newest in dict.fromkeys(series):
                install = [*pip, "install", "-q", f"torch=={newest}.*"]
                if left and not subprocess.run(install, check=False).returncode:  # pip's constraints may rule it out
                    yield f"{folder}/bin/python"
                    left -= 1


def _run(command: list[str], **environment: str) -> None:
    status = subprocess.run(command, env=os.environ | environment, check=False).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")


if __name__ == "__main__":
    main()
