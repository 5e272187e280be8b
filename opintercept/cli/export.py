"""`opintercept export`: writes a run in the format of another program."""

from __future__ import annotations

import argparse
import os

from opintercept.cli.options import steps


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format", choices=["perfetto"], default="perfetto", help="Chrome's JSON, for Perfetto (default %(default)s)"
    )
    parser.add_argument("--step", metavar="A:B", type=steps, help="write only step A, or steps A to B - 1")
    parser.add_argument("--profile", metavar="TRACE", help="add the run to this trace of torch.profiler")
    parser.add_argument(
        "-o",
        "--out",
        default="trace.json.gz",
        help="file to write; .gz compresses it (default %(default)s)",
    )


def command(arguments: argparse.Namespace) -> int:
    """Write the trace and print its size."""
    from opintercept._core.text import counted
    from opintercept.cli.terminal.output import plain_warnings
    from opintercept.cli.terminal.progress import progress
    from opintercept.runs import trace
    from opintercept.runs.record.compaction import open_compacted

    with plain_warnings("export"), progress():
        calls = trace.write(
            arguments.out, open_compacted(arguments.run), steps=arguments.step, profile=arguments.profile
        )
    size = os.path.getsize(arguments.out) / 1e6
    print(f"{arguments.out}: {counted(calls, 'call')}, {size:.1f} MB; open it in ui.perfetto.dev")
    return 0
