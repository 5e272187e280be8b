"""`opintercept align`: joins the matmuls of two runs by the rows of their weights, and compares them.

Must not import torch.
"""

from __future__ import annotations

import argparse

from opintercept.cli.confined import add_limits, opened
from opintercept.cli.options import add_result
from opintercept.cli.terminal.output import print_result
from opintercept.cli.terminal.progress import progress
from opintercept.runs.align.align import align


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against, recorded with --tensors full")
    parser.add_argument("b", help="folder of the other run, recorded likewise")
    add_limits(parser)
    add_result(parser, "no call differs by more than rounding, and the last ones are joined")


def command(arguments: argparse.Namespace) -> int:
    """Join and compare forward calls."""
    with progress():
        found = align(opened(arguments.a), opened(arguments.b))
    return print_result(found, arguments.json, arguments.limit)
