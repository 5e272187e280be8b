"""`opintercept report`: a run, or two, as one page that opens offline."""

from __future__ import annotations

import argparse
import os


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("other", metavar="OTHER", nargs="?", help="a second run, to see where they part")
    parser.add_argument("-o", "--out", default="report.html", help="the page's file (default report.html)")


def command(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from opintercept.cli._reading import plain_warnings
    from opintercept.runs import open_run, report

    with plain_warnings("report"):
        run = open_run(arguments.run)
        other = None if arguments.other is None else open_run(arguments.other)
        report.write(arguments.out, run, other)
    print(f"{arguments.out}: {os.path.getsize(arguments.out) / 1e6:.1f} MB")
    return 0
