"""What is to be measured on a GPU runs to its end in a rehearsal without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sampled


@pytest.mark.slow
def test_the_list_for_a_gpu_is_rehearsed_without_one() -> None:
    if sampled.on:
        pytest.skip("takes half a minute; run without --sampled")
    command = [sys.executable, "-m", "benchmarks", "gpu", "--all", "--smoke"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, *parts = done.stdout.split("\n## ")
    assert len(parts) == 8
    assert all(part.count("\n| ") > 1 and "failed" not in part for part in parts), done.stdout
