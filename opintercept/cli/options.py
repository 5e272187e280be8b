"""The types of options, and options that several commands share.

Must not import torch.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from typing import Any, get_args

from opintercept._core.record import Phase


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def size(text: str) -> int:
    """Parse a number of bytes: `500000`, `500k`, `64M` or `2G`, in powers of 1000."""
    match = re.fullmatch(r"([0-9]{1,15})([kMG]?)B?", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"must be a number of bytes such as 500k, 64M or 2G, got {text!r}")
    return int(match[1]) * {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3}[match[2]]


def steps(text: str) -> range:
    """Parse a step or a range of steps: `2`, `2:5`, `2:` or `:5`."""
    first, colon, end = text.partition(":")
    if not all(part.isdecimal() or (colon and not part) for part in (first, end if colon else "0")):
        raise argparse.ArgumentTypeError(f"must be a step or a range of steps such as 0:100, got {text!r}")
    start = int(first or 0)
    return range(start, int(end) if end else sys.maxsize if colon else start + 1)


def tolerance(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


_FILTERS: dict[str, dict[str, Any]] = {
    "op": {"action": "append", "help": "only this operator, such as mm or aten::mm; may be repeated"},
    "module": {"metavar": "GLOB", "help": "only calls in these modules, such as 'encoder.*'"},
    "phase": {"choices": get_args(Phase), "help": "only calls of this phase"},
    "steps": {"metavar": "A:B", "type": steps, "help": "only step A, or steps A to B - 1, counted from 0"},
}


def add_filters(parser: argparse.ArgumentParser, verb: str, *names: str) -> None:
    """Add the filters of these names; `verb` says what the command does with the calls: `"show"`."""
    for name in names:
        form = _FILTERS[name]
        parser.add_argument(f"--{name}", **form | {"help": f"{verb} {form['help']}"})


def add_process(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the choice of processes; `verb` says what the command does with them."""
    text = f"{verb} only processes whose name matches, such as 'EngineCore*' or main, of a program that has several"
    parser.add_argument("--process", metavar="GLOB", help=text)


def add_result(parser: argparse.ArgumentParser, equal: str) -> None:
    """Add what a comparison takes for its output; `equal` says when it exits with 0."""
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="rows of each table (default 20)")
    parser.add_argument("--json", action="store_true", help="print JSON, with null for numbers that are not finite")
    status = f"exit status: 0 if {equal}, 1 if not, 2 if there is nothing to compare"
    parser.epilog = "\n\n".join(filter(None, (status, parser.epilog)))
