"""`opintercept export`: writes a run in the format of another program."""

from __future__ import annotations

import argparse
import os

from opintercept.cli.options import add_filters, rename


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format", choices=["perfetto"], default="perfetto", help="Chrome's JSON, for Perfetto (default %(default)s)"
    )
    add_filters(parser, "write", "steps")
    rename(parser, "--step", "--steps")
    parser.add_argument("--profile", metavar="TRACE", help="add the run to this trace of torch.profiler")
    out = "file to write; .gz compresses it (default %(default)s)"
    parser.add_argument("-o", "--out", default="trace.json.gz", help=out)


def command(arguments: argparse.Namespace) -> int:
    """Write the trace and print its size."""
    from opintercept._core.text import counted
    from opintercept.cli.terminal.progress import progress
    from opintercept.runs import trace
    from opintercept.runs.record.compaction import open_compacted

    with progress():
        run = open_compacted(arguments.run)
        calls = trace.write(arguments.out, run, steps=arguments.steps, profile=arguments.profile)
    size = os.path.getsize(arguments.out) / 1e6
    print(f"{arguments.out}: {counted(calls, 'call')}, {size:.1f} MB; open it in ui.perfetto.dev")
    return 0
