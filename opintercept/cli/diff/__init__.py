"""`opintercept diff`: finds where two recorded runs, or the ranks of one, first differ; prints text or JSON.

Must not import torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept.cli.diff.alignment import aligned_text
from opintercept.cli.diff.ranks import ranks_text
from opintercept.cli.diff.text import difference_text
from opintercept.cli.filters import NameFilter
from opintercept.cli.options import add_module_and_phase, add_op, count, tolerance
from opintercept.cli.terminal.output import finite_json, listed, plain_warnings, safe_stdout
from opintercept.cli.terminal.progress import progress
from opintercept.runs import open_run
from opintercept.runs.align.align import align
from opintercept.runs.align.alignment import Alignment
from opintercept.runs.compare.diff import compare_runs
from opintercept.runs.compare.difference import Difference
from opintercept.runs.compare.pairing import module_name, operator_name
from opintercept.runs.compare.values import Comparer
from opintercept.runs.ranks.diff import diff_ranks
from opintercept.runs.ranks.difference import RankDifference
from opintercept.runs.store.run import Run


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", help="folder of the run to measure against, or with --ranks of the only one")
    parser.add_argument("b", nargs="?", help="folder of the other run")
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="compare the ranks of one run: weights that should be equal, calls, and the size of outputs",
    )
    parser.add_argument(
        "--align",
        choices=("weights",),
        help="join calls by the rows of their weights and not by names, if the modules have other names in B; needs "
        "runs with --tensors full",
    )
    parser.add_argument(
        "--rtol",
        type=tolerance,
        default=0.0,
        metavar="X",
        help="treat tensors as equal if no value differs by more than X times the largest magnitude in A; judged by "
        "statistics if values were not recorded (default 0: bit for bit)",
    )
    parser.add_argument("--atol", type=tolerance, default=0.0, metavar="X", help="or by more than X (default 0)")
    add_op(parser, "report")
    add_module_and_phase(parser, "report")
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="rows of each table (default 20)")
    parser.add_argument("--no-tensors", action="store_true", help="compare only hashes and statistics")
    parser.add_argument("--json", action="store_true", help="print JSON, with null for numbers that are not finite")
    status = "exit status: 0 if the runs, or ranks, are equal, 1 if they differ, 2 if they cannot be\n  compared"
    parser.epilog = "\n\n".join(filter(None, (status, parser.epilog)))


def command(arguments: argparse.Namespace) -> int:
    """Compare two runs, or the ranks of one, and print the result."""
    if arguments.ranks:
        return _command_of_ranks(arguments)
    if arguments.b is None:
        raise OpInterceptError("diff needs the folders of two runs; to compare the ranks of one, pass --ranks")
    if arguments.align:
        return _command_of_aligned(arguments)
    with plain_warnings("diff"), progress():
        a, b = open_run(arguments.a), open_run(arguments.b)
        names = NameFilter(arguments.module, arguments.op, module_name, operator_name)
        phase = arguments.phase
        chosen = phase is not None or arguments.op is not None or arguments.module is not None

        def select(record: CallRecord) -> bool:
            return names(record) and phase in (None, record.phase)

        comparer = Comparer(a, b, arguments.rtol, arguments.atol, not arguments.no_tensors)
        worst = arguments.limit if arguments.json else 1  # text does not show them
        try:
            found = compare_runs(a, b, comparer, arguments.limit, worst, select if chosen else None)
        except OpInterceptError:
            names.check("the runs")
            raise
        names.check("the runs")
    _print(arguments, {"a": a, "b": b}, found, lambda: difference_text(found, a, b, arguments.limit))
    return 0 if found.equal else 1


def _command_of_aligned(arguments: argparse.Namespace) -> int:
    _refuse(arguments, "--align weights joins all forward calls, and", "--no-tensors", "--phase")
    with plain_warnings("diff"), progress():
        a, b = open_run(arguments.a), open_run(arguments.b)
        found = align(a, b)
    _print(arguments, {"a": a, "b": b}, found, lambda: aligned_text(found, a, b, arguments.limit))
    return 0 if found.first is None and not found.apart else 1


def _refuse(arguments: argparse.Namespace, what: str, *more: str) -> None:
    """Refuse options that a comparison does not take."""
    names = ("--rtol", "--atol", "--op", "--module", *more)
    given = [name for name in names if getattr(arguments, name.strip("-").replace("-", "_"))]
    if given:
        raise OpInterceptError(f"{what} does not take {listed(given)}")


def _command_of_ranks(arguments: argparse.Namespace) -> int:
    if arguments.b is not None:
        raise OpInterceptError("--ranks compares the ranks of one run, and does not take a second run")
    _refuse(arguments, "--ranks compares the ranks of one run bit for bit, and", "--phase", "--no-tensors", "--align")
    with plain_warnings("diff"), progress():
        run = open_run(arguments.a)
        found = diff_ranks(run, limit=arguments.limit)
    _print(arguments, {"run": run}, found, lambda: ranks_text(found, run))
    return 0 if found.equal else 1


def _print(
    arguments: argparse.Namespace,
    compared: dict[str, Run],
    found: Difference | RankDifference | Alignment,
    text: Callable[[], list[str]],
) -> None:
    with safe_stdout():
        if arguments.json:
            plain = {name: _about(run) for name, run in compared.items()} | found.as_dict()
            print(json.dumps(finite_json(plain), indent=1, allow_nan=False))
        else:
            print("\n".join(text()))


def _about(run: Run) -> dict[str, Any]:
    return {"path": str(run.path), "ranks": list(run.ranks), "info": run.info.as_dict()}
