"""`opintercept why`: says what one recorded program does otherwise than another. Must not import torch."""

from __future__ import annotations

import argparse
import os

from opintercept._core.text import amount
from opintercept.cli.confined import add_limits, opened
from opintercept.cli.options import add_process, add_result
from opintercept.cli.terminal.output import print_result
from opintercept.cli.terminal.progress import progress
from opintercept.runs.why.why import why


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against, recorded with `opintercept run --why`")
    parser.add_argument("b", help="folder of the other run, recorded likewise")
    parser.add_argument("-o", "--out", metavar="FILE", help="also write an HTML page about the answer")
    add_result(parser, "nothing differs by more than rounding, up to the results of the programs")
    add_process(parser, "compare")
    add_limits(parser)


def command(arguments: argparse.Namespace) -> int:
    """Say what differs."""
    a, b = (opened(path).matching(arguments.process) for path in (arguments.a, arguments.b))
    with progress():
        found = why(a, b)
    status = print_result(found, arguments.json, arguments.limit)
    if arguments.out is not None:
        from opintercept.runs.report import answered

        answered.write(arguments.out, found)
        if not arguments.json:
            print(f"\n{arguments.out}: {amount(os.path.getsize(arguments.out), 'B')}")
    return status
