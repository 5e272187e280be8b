"""`opintercept export`: writes a run in the format of another program."""

from __future__ import annotations

import argparse
import os

from opintercept._core.errors import OpInterceptError
from opintercept.cli.options import add_filters


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--format",
        choices=["perfetto", "parquet"],
        default="perfetto",
        help="Chrome's JSON, for Perfetto, or a folder of Parquet files (default %(default)s)",
    )
    add_filters(parser, "write", "steps")
    parser.add_argument("--profile", metavar="TRACE", help="add the run to this trace of torch.profiler")
    out = "file to write, trace.json.gz by default; .gz compresses it; for Parquet a new folder"
    parser.add_argument("-o", "--out", help=out)


def command(arguments: argparse.Namespace) -> int:
    """Write the trace and print its size."""
    from opintercept._core.text import counted
    from opintercept.cli.terminal.progress import progress
    from opintercept.runs import open_run, trace

    out = arguments.out or "trace.json.gz"
    with progress():
        run = open_run(arguments.run)
        if arguments.format == "parquet":
            if arguments.steps is not None or arguments.profile or not arguments.out:
                raise OpInterceptError("Parquet files have all steps, and need --out FOLDER and no --profile")
            from opintercept.runs.store.export import write_parquet

            print(f"{out}: {counted(write_parquet(run, out), 'call')}")
            return 0
        calls = trace.write(out, run, steps=arguments.steps, profile=arguments.profile)
    size = os.path.getsize(out) / 1e6
    print(f"{out}: {counted(calls, 'call')}, {size:.1f} MB; open it in ui.perfetto.dev")
    return 0
