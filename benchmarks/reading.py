"""What it takes to read a run of a million calls: `show`, `diff` and `report`, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._timing import Row, rows

_COMMANDS = {
    "show": ("show", "a"),
    "diff with an equal run": ("diff", "a", "b"),
    "diff with a differing run": ("diff", "a", "c"),
    "report": ("report", "a", "-o", "a.html"),
}
# Runs a command, and prints its processor time and its peak memory: what a parent is told counts the parent's, too.
_PROGRAM = """
import re, resource, sys, time
from pathlib import Path
from opintercept.cli import main

assert main(sys.argv[1:]) in (0, 1)
status = Path("/proc/self/status")  # there is none on macOS
peak = re.search(r"VmHWM:\\s+(\\d+)", status.read_text()) if status.exists() else None
bytes_ = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else 1024 * int(peak[1])
print(time.process_time(), bytes_, file=sys.stderr)
"""
_PARTS_AT = 3  # the step from which the differing run differs


def run(smoke: bool) -> list[Row]:
    """Write runs of a long training, and take the processor time and the memory of commands that read them."""
    calls = 10_000 if smoke else 1_000_000
    title = f"a run of {calls:,} calls"
    times: dict[str, list[float]] = {"a second": [1.0]}
    peaks: dict[str, list[float]] = {"a megabyte": [1.0]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, more in (("a", []), ("c", ["--parts-at", str(_PARTS_AT)])):
            small = ["--layers", "6"] if smoke else []
            command = ["-m", "benchmarks.synthetic", str(folder / name), "--calls", str(calls), *more, *small]
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / "a", folder / "b", copy_function=os.link)
        for _ in range(1 if smoke else 3):
            for name, words in _COMMANDS.items():
                arguments = [str(folder / word) if len(word) == 1 else word for word in words]
                seconds, peak = _taken(arguments, folder)
                times.setdefault(name, []).append(seconds)
                peaks.setdefault(name, []).append(peak)
    return rows("reading", f"{title}, seconds", times) + rows("reading", f"{title}, megabytes", peaks)


def _taken(arguments: list[str], folder: Path) -> tuple[float, float]:
    """The processor time of a command in seconds, and its peak memory in megabytes."""
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    seconds, peak = map(float, done.stderr.split()[-2:])
    return seconds, peak / 1e6
