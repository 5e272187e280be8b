"""`opintercept ranks`: finds where the ranks of one run first diverge. Must not import torch."""

from __future__ import annotations

import argparse

from opintercept.cli.options import add_process, add_result
from opintercept.cli.terminal.output import print_result
from opintercept.cli.terminal.progress import progress
from opintercept.runs.ranks.diff import diff_ranks
from opintercept.runs.store.run import open_run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="folder of a run of several ranks")
    add_process(parser, "compare")
    add_result(parser, "nothing diverged")


def command(arguments: argparse.Namespace) -> int:
    """Compare weights that should be equal, calls, and the size of outputs."""
    with progress():
        found = diff_ranks(open_run(arguments.run).matching(arguments.process), limit=arguments.limit)
    return print_result(found, arguments.json, arguments.limit)
