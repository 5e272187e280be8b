"""Runs programs that have the stand-in for a GPU, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parents[1] / "programs"


def on_a_device(program: str, *arguments: str) -> Any:
    """What a program in `tests/programs` prints as JSON."""
    command = [sys.executable, "-X", "faulthandler", str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
