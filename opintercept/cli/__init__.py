"""The command line: each command is a file of its own, imported only when it runs.

Invariant: `--help` and a wrong option answer at once, so only a running command imports torch. A command that lacks
a package names the extra that installs it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.text import printable
from opintercept.cli.terminal.output import plain_warnings, safe_stdout
from opintercept.cli.terminal.style import styled

COMMANDS = {
    "demo": "train a small Transformer and show its matmuls",
    "run": "run a program, show what its matmuls cost and where they go wrong, and record them",
    "show": "show what a recorded run consists of",
    "diff": "find where two recorded runs first differ",
    "why": "say what one recorded program does otherwise than another, and what that costs the loss",
    "ranks": "find where the ranks of a recorded run first diverge",
    "report": "write one HTML page about one or two runs",
    "export": "write a run as a trace for Perfetto",
    "replay": "run one recorded call again on its own",
    "completion": "print a script by which a shell completes commands and options",
    "build": "build the compiled engine for this torch and Python, once",
    "info": "say which engine is used here, and why",
}
EXAMPLES = {
    "demo": ["demo"],
    "run": [
        "run train.py --epochs 1",
        "run --out runs/a --every-steps 10 -m package.train",
        "run --stop train.py",
        "run --audit train.py",
    ],
    "show": ["show runs/a", "show runs/a --module 'encoder.*' --by step", "show runs/a --calls --sort time --limit 5"],
    "diff": ["diff runs/a runs/b", "diff runs/eager runs/compiled --rtol 1e-5"],
    "why": ["why runs/a runs/b", "why runs/trainer runs/engine -o why.html"],
    "ranks": ["ranks runs/a"],
    "report": ["report runs/a -o a.html", "report runs/a runs/b"],
    "export": ["export runs/a -o trace.json.gz", "export runs/a --steps 10:12 --profile profile.json"],
    "replay": ["replay runs/a 17", "replay runs/a 17 --dtype float64"],
    "completion": ["completion bash > ~/.local/share/bash-completion/completions/opintercept"],
    "build": ["build"],
    "info": ["info"],
}
_RENAMED = {"align": "why", "explain": "why"}
_EXTRA = ("duckdb", "numpy", "safetensors")  # what the extra cli installs, and files of commands import
UNUSABLE = 2  # the exit status for input that cannot be used, the same as argparse's


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if (child := sys.modules.get("opintercept._child")) is not None:
        child.waiting.end()  # a watched program runs a command: `run` watches what it is given, and others are ours
    if not argv:
        argv = ["--help"]  # like pip, with status 0
    name, *rest = argv
    if name in _RENAMED:
        return _unusable(name, f"is now `opintercept {_RENAMED[name]}`")
    if name not in COMMANDS:
        all_commands().parse_args(argv)  # exits: prints help, the version or an error
        raise AssertionError(f"argparse accepted the unknown command {name!r}")
    try:
        status = _run(name, rest)
    except (OpInterceptError, ImportError) as error:
        if isinstance(error, ImportError) and error.name in _EXTRA:
            error = needs(name, str(error.name), "'opintercept[cli]'")
        elif isinstance(error, ImportError) and "opintercept[" not in str(error):
            raise
        return _unusable(name, error)
    except Exception as error:
        from opintercept.cli.confined import is_child, reason

        if not is_child():
            raise
        return _unusable(name, reason(error))  # what others have written may be the cause
    return int(status() if callable(status) else status)


def _unusable(name: str, error: Exception | str) -> int:
    text = "\n".join(map(printable, str(error).split("\n")))  # it may quote a file from an untrusted source
    print(f"{styled(f'opintercept {name}:', 'wrong', sys.stderr)} {text}", file=sys.stderr)
    return UNUSABLE


def _run(name: str, rest: Sequence[str]) -> int | Callable[[], int]:
    # It defines `configure`, which adds its options to a parser, and `command`, which returns an exit status. That of
    # `run` returns a function that runs the user's program, whose errors are not ours to report.
    chosen: Any = importlib.import_module(f"opintercept.cli.{name}")
    parser = _Parser(
        prog=f"opintercept {name}",
        description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.",
        epilog="\n  ".join(["examples:", *(f"opintercept {each}" for each in EXAMPLES[name])]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chosen.configure(parser)
    arguments = parser.parse_args(rest)
    if "untrusted" in arguments:
        from opintercept.cli.confined import confined

        if (done := confined(name, rest, arguments)) is not None:
            return done
    status: int | Callable[[], int] = 0
    with plain_warnings(name), nullcontext() if name == "run" else safe_stdout():  # stdout is the program's
        status = chosen.command(arguments)
    return status


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the option or choice closest to a misspelt one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.suggest_on_error = False  # Python 3.15 suggests choices itself, and no options

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"unrecognized arguments: (-[^\s=]*)|invalid choice: '([^']*)'", message)
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        known = [option for action in shown for option in action.option_strings]
        if wrong is not None and wrong[2] is not None:
            known = [str(choice) for action in self._actions for choice in action.choices or ()]
        plain = {name.lstrip("-"): name for name in known}  # dashes would make short options look alike
        given = (wrong[1] or wrong[2]).lstrip("-") if wrong else ""
        close = difflib.get_close_matches(given, plain, n=1)
        super().error(f"{message}; did you mean {plain[close[0]]!r}?" if close else message)


def all_commands(
    configure: Callable[[str, argparse.ArgumentParser], None] = lambda name, parser: None,
) -> argparse.ArgumentParser:
    """Return a parser that knows the commands by name, and those of their options that `configure` adds."""
    from opintercept._core.version import __version__

    parser = _Parser(prog="opintercept", description="See every matmul that a PyTorch program runs.")
    parser.add_argument("--version", action="version", version=f"opintercept {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        configure(name, commands.add_parser(name, help=text))
    return parser
