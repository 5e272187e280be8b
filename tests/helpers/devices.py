"""Runs programs that have the stand-in for a GPU, each in a process of its own, and lets nothing wait for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).parents[1] / "programs"


@contextmanager
def no_waits() -> Iterator[None]:
    """Let what waits for a CUDA device raise."""
    with warnings.catch_warnings():  # the setting itself warns that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_a_device(program: str, *arguments: str) -> Any:
    """What a program in `tests/programs` prints as JSON."""
    command = [sys.executable, "-X", "faulthandler", str(PROGRAMS / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
