"""Runs programs that have the stand-in for a GPU, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import run_python

PROGRAMS = Path(__file__).parents[1] / "programs"


def on_a_device(program: str, *arguments: str) -> Any:
    """What a program in `tests/programs` prints as JSON."""
    done = run_python(PROGRAMS / program, *arguments, timeout=1800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
