"""The cost of the unused pytest plugin: runs of one empty test, with and without it, in turns."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._timing import Row, rows

_OPTIONS = {"without the plugin": ("-p", "no:opintercept"), "with the plugin": ()}


def run(smoke: bool) -> list[Row]:
    """Time both, after one run each that fills Python's caches."""
    times: dict[str, list[float]] = {name: [] for name in _OPTIONS}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): ...\n")
        for turn in range(1 if smoke else 41):
            for name in list(_OPTIONS)[:: 1 if turn % 2 else -1]:
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_OPTIONS[name]]
                started = time.perf_counter()
                subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
                if turn or smoke:
                    times[name].append(time.perf_counter() - started)
    bounds = {} if smoke else {"with the plugin": ("without the plugin", 1.05)}
    return rows("plugin", "a pytest run of one empty test", times, bounds)
