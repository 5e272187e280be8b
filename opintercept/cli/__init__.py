"""The command line: a file for each command, which is imported when it is the one that runs.

Invariant: `--help` and a wrong option answer at once, so torch is imported only inside of commands; what needs the
extra says which command installs it.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from opintercept._errors import OpInterceptError

# Each is a file with `configure(parser)`, which adds the options, and `command(arguments)`, which runs and returns the
# exit status, or returns what runs: that is somebody's program, whose errors are its own.
COMMANDS = {
    "demo": "train a small Transformer and show its matmuls",
    "run": "run a program, show what its matmuls cost and where they go wrong, and record them",
    "show": "show what a recorded run consists of",
    "diff": "find where two recorded runs first part",
    "report": "write one HTML page about a run, or about two",
    "replay": "run one recorded call again, alone",
}
UNUSABLE = 2  # the exit status where what was given cannot be used, argparse's own


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="opintercept", description="See every matmul that a PyTorch program runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    chosen: Any = None
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if argv[:1] == [name]:
            chosen = importlib.import_module(f"opintercept.cli.{name}")
            chosen.configure(command)
    arguments = parser.parse_args(argv)
    try:
        status = chosen.command(arguments)
    except (OpInterceptError, ImportError) as unusable:
        if isinstance(unusable, ImportError) and "opintercept[" not in str(unusable):
            raise
        print(f"opintercept {argv[0]}: {unusable}", file=sys.stderr)
        return UNUSABLE
    return int(status() if callable(status) else status)


def count(text: str) -> int:
    """An option's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def steps(text: str) -> range:
    """An option's range of steps: `2`, `2:5`, `2:` or `:5`."""
    first, colon, end = text.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, end if colon else "0")):
        raise argparse.ArgumentTypeError(f"must be a step, or a range of steps as in 0:100, got {text!r}")
    start = int(first or 0)
    return range(start, int(end) if end else sys.maxsize if colon else start + 1)
