"""Makes one wheel that holds the compiled engine for several versions of Python and torch.

    python scripts/wheel.py --out dist .venv-a/bin/python .venv-b/bin/python

Each Python needs torch, and a compiler must be there. pip gets the options that this script does not know.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Build the libraries with each Python, and then the wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--out", default="dist", metavar="FOLDER", help="where to put the wheel (default dist)")
    options, for_pip = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        for python in options.pythons:
            _run([python, "-m", "opintercept", "build", "--into", folder], PYTHONPATH=str(ROOT))
        made = Path(folder, "made")
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(made), *for_pip, str(ROOT)]
        _run(command, OPINTERCEPT_BUILD=folder)
        (wheel,) = made.iterdir()
        Path(options.out).mkdir(parents=True, exist_ok=True)
        print(shutil.move(wheel, Path(options.out, wheel.name)))


def _run(command: list[str], **environment: str) -> None:
    status = subprocess.run(command, env=os.environ | environment, check=False).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")


if __name__ == "__main__":
    main()
