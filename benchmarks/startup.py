"""The cost of importing the library and of entering the first block, in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

from benchmarks._timing import Row

_PROGRAMS = {
    # What runs first, what is timed, and its bound in seconds.
    "import opintercept": ("", "import opintercept", 0.005),
    "import of the pytest plugin": ("import pytest", "import opintercept.testing.plugin", None),
    "import of intercept, torch being there": ("import torch", "from opintercept import intercept", None),
    "first block": ("from opintercept import intercept", "intercept().__enter__()", None),
    "second block": ("from opintercept import intercept\nwith intercept(): pass", "intercept().__enter__()", None),
}


def run(smoke: bool) -> list[Row]:
    """Time each program in fresh interpreters. The ratio of a row with a bound is to that bound."""
    found = []
    for name, (before, timed, bound) in _PROGRAMS.items():
        code = f"import time\n{before}\nstarted = time.perf_counter()\n{timed}\nprint(time.perf_counter() - started)"
        times = sorted(
            float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
            for _ in range(1 if smoke else 15)
        )
        median = times[len(times) // 2]
        spread = (times[-1] - times[0]) / 2 / median
        ratio = 1.0 if bound is None else median / bound
        shown = name if bound is None else f"{name} / {bound * 1e3:g} ms"
        found.append(
            Row("startup", "a fresh interpreter", shown, median, ratio, spread, None if bound is None else 1.0)
        )
    return found
