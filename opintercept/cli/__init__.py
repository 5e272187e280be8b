"""The command line: a file for each command, which is imported when it is the one that runs.

Invariant: `--help` and a wrong option answer at once, so torch is imported only inside of commands; what needs the
extra says which command installs it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from opintercept._errors import OpInterceptError
from opintercept._text import printable

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
    if not argv:
        argv = ["--help"]  # as pip answers, with 0: to ask for nothing is no mistake
    name, *rest = argv
    if name not in COMMANDS:
        _all_commands().parse_args(argv)  # which ends it: help, the version or an error
        raise AssertionError(f"a command must be one of {', '.join(COMMANDS)}, got {name!r}")
    chosen: Any = importlib.import_module(f"opintercept.cli.{name}")
    command = _Parser(prog=f"opintercept {name}", description=_sentence(COMMANDS[name]))
    chosen.configure(command)
    arguments = command.parse_args(rest)
    try:
        with warnings.catch_warnings():
            # torch says so where it is imported without numpy, which no command needs for that.
            warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
            status = chosen.command(arguments)
    except (OpInterceptError, ImportError) as unusable:
        if isinstance(unusable, ImportError) and "opintercept[" not in str(unusable):
            raise
        print(f"opintercept {name}: {_shown(unusable)}", file=sys.stderr)
        return UNUSABLE
    return int(status() if callable(status) else status)


class _Parser(argparse.ArgumentParser):
    """Says which option or choice comes close to a wrong one."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments: (-[^\s=]*)|invalid choice: '([^']*)'", message)
        known = [option for action in self._actions for option in action.option_strings]
        if wrong is not None and wrong[2] is not None:
            known = [str(choice) for action in self._actions for choice in action.choices or ()]
        close = difflib.get_close_matches((wrong[1] or wrong[2]) if wrong else "", known, n=1)
        super().error(f"{message}; did you mean {close[0]!r}?" if close else message)


def _all_commands() -> argparse.ArgumentParser:
    """What knows the commands by name only."""
    from opintercept import __version__

    parser = _Parser(prog="opintercept", description="See every matmul that a PyTorch program runs.")
    parser.add_argument("--version", action="version", version=f"opintercept {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def _shown(error: Exception) -> str:
    """What an error says, safe on a terminal: it may quote a file that somebody else has written."""
    return "\n".join(map(printable, str(error).split("\n")))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def count(text: str) -> int:
    """An option's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """An option's number of bytes: `500000`, `500k`, `64M` or `2G`, in powers of 1000."""
    match = re.fullmatch(r"([0-9]{1,15})([kMG]?)B?", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 500k, 64M or 2G, got {text!r}")
    return int(match[1]) * {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}[match[2]]


def steps(text: str) -> range:
    """An option's range of steps: `2`, `2:5`, `2:` or `:5`."""
    first, colon, end = text.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, end if colon else "0")):
        raise argparse.ArgumentTypeError(f"must be a step, or a range of steps as in 0:100, got {text!r}")
    start = int(first or 0)
    return range(start, int(end) if end else sys.maxsize if colon else start + 1)
