"""`opintercept diff`: finds where two recorded runs first differ. Must not import torch."""

from __future__ import annotations

import argparse

from opintercept._core.errors import OpInterceptError
from opintercept._reports.filters import NameFilter
from opintercept.cli.confined import add_limits, opened
from opintercept.cli.options import add_filters, add_process, add_result, tolerance
from opintercept.cli.terminal.output import print_result
from opintercept.cli.terminal.progress import progress
from opintercept.runs.compare.diff import compare_runs
from opintercept.runs.compare.operands import Comparer
from opintercept.runs.program.names import module_name, operator_name


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against")
    parser.add_argument("b", help="folder of the other run")
    parser.add_argument(
        "--rtol",
        type=tolerance,
        default=0.0,
        metavar="X",
        help="treat tensors as equal if no value differs by more than X times the largest magnitude in A; judged by "
        "statistics if values were not recorded (default 0: bit for bit)",
    )
    parser.add_argument("--atol", type=tolerance, default=0.0, metavar="X", help="or by more than X (default 0)")
    add_filters(parser, "report", "op", "module", "phase")
    parser.add_argument("--no-tensors", action="store_true", help="compare only hashes and statistics")
    add_result(parser, "the runs are equal")
    add_process(parser, "compare")
    add_limits(parser)


def command(arguments: argparse.Namespace) -> int:
    """Compare two runs."""
    filters = arguments.module, arguments.op, arguments.phase
    names = NameFilter(*filters, module_name, operator_name)
    select = None if filters == (None, None, None) else names
    with progress():
        a, b = (opened(path).matching(arguments.process) for path in (arguments.a, arguments.b))
        comparer = Comparer(a, b, arguments.rtol, arguments.atol, not arguments.no_tensors)
        worst = arguments.limit if arguments.json else 1  # text does not show them
        try:
            found = compare_runs(a, b, comparer, arguments.limit, worst, select)
        except OpInterceptError:
            names.check("the runs")
            raise
    names.check("the runs")
    return print_result(found, arguments.json, arguments.limit)
