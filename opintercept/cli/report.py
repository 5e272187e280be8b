"""`opintercept report`: writes one or two runs as an HTML page that needs no network."""

from __future__ import annotations

import argparse
import os

from opintercept.cli.confined import add_limits, opened
from opintercept.cli.options import add_process


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="folder of a second run to compare with")
    parser.add_argument("-o", "--out", default="report.html", help="file to write (default report.html)")
    add_process(parser, "show")
    add_limits(parser)


def command(arguments: argparse.Namespace) -> int:
    """Write the page and print its size."""
    from opintercept.cli.terminal.progress import progress
    from opintercept.runs.report import page

    with progress():
        run = opened(arguments.run).matching(arguments.process)
        other = None if arguments.other is None else opened(arguments.other).matching(arguments.process)
        page.write(arguments.out, run, other)
    print(f"{arguments.out}: {os.path.getsize(arguments.out) / 1e6:.1f} MB")
    return 0
