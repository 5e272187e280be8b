"""`opintercept explain`: says what the difference of two runs' losses is made of. Must not import torch."""

from __future__ import annotations

import argparse
import os

from opintercept.cli.confined import add_limits, opened
from opintercept.cli.options import add_result, count
from opintercept.cli.terminal.output import print_result
from opintercept.cli.terminal.progress import progress
from opintercept.runs.explain.explain import explain
from opintercept.runs.explain.explanation import BY


def _tokens(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"must be whole numbers separated by commas, got {text!r}")
    return [int(part) for part in text.split(",")]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against, recorded with `opintercept run --explain`")
    parser.add_argument("b", help="folder of the other run, recorded likewise")
    parser.add_argument("--by", choices=BY, default="call", help="what a row is (default call)")
    parser.add_argument(
        "--loss", metavar="INDEX", type=int, help="call of A whose output is explained (default the root of backward)"
    )
    parser.add_argument(
        "--tokens", metavar="IDS", type=_tokens, help="explain the log-probabilities of these tokens, such as 17,4,99"
    )
    parser.add_argument(
        "--confirm", metavar="N", type=count, default=0, help="run A's program again with each of the N largest rows"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help="also write an HTML page: bars of the rows, and the path of the error",
    )
    add_result(parser, "nothing differs")
    add_limits(parser)


def command(arguments: argparse.Namespace) -> int:
    """Explain the difference of the losses."""
    a, b = opened(arguments.a), opened(arguments.b)
    with progress():
        found = explain(a, b, loss=arguments.loss, tokens=arguments.tokens, by=arguments.by, confirm=arguments.confirm)
    status = print_result(found, arguments.json, arguments.limit)
    if arguments.out is not None:
        from opintercept.runs.report import explained

        explained.write(arguments.out, found)
        if not arguments.json:
            print(f"\n{arguments.out}: {os.path.getsize(arguments.out) / 1e6:.1f} MB")
    return status
