"""What the pytest plugin costs those who do not use it: `python -m benchmarks.plugin`.

Invariant: runs with and without it come in pairs, in turns, and the pairs' ratios are compared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(folder: str, *options: str) -> float:
    """The time of a pytest run over one empty test."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): ...\n")
        options = {"with": (), "without": ("-p", "no:opintercept")}
        for name in options:
            seconds(folder, *options[name])  # writes what Python caches
        times: dict[str, list[float]] = {name: [] for name in options}
        for pair in range(pairs):
            for name in list(options)[:: 1 if pair % 2 else -1]:
                times[name].append(seconds(folder, *options[name]))
    ratios = sorted(one / other for one, other in zip(times["with"], times["without"], strict=True))
    for name, values in times.items():
        print(f"{name:8}{statistics.median(values):8.3f} s")
    low, high = ratios[pairs // 4], ratios[-1 - pairs // 4]
    print(f"ratio   {statistics.median(ratios):8.3f}    (half of the pairs in {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
