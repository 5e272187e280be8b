"""`opintercept replay`: runs a recorded call again, in another dtype, on another device or with other flags."""

from __future__ import annotations

import argparse
from typing import Any

from opintercept.cli.confined import add_limits, opened
from opintercept.cli.terminal.output import print_result


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", help="folder of a run recorded with --tensors full")
    parser.add_argument("index", type=int, help="number of the call; `opintercept show RUN --calls` lists them")
    parser.add_argument("--rank", type=int, help="process that made the call (default: the first)")
    parser.add_argument("--dtype", help="convert floating-point operands to this dtype, such as bfloat16")
    parser.add_argument("--device", default="cpu", help="device to run the call on (default cpu)")
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting of torch, named as in run.json: --flag mkldnn=False; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_limits(parser)
    parser.add_argument("--script", metavar="FILE.py", help="write a script that runs the call, instead of running it")


def command(arguments: argparse.Namespace) -> int:
    """Run the call again; return 0 if it gives the same bits and 1 if not."""
    import torch

    from opintercept._core.errors import OpInterceptError
    from opintercept.runs.replay import replay, write_script

    run = opened(arguments.run)
    if arguments.script:
        print(f"python {write_script(run, arguments.index, arguments.script, rank=arguments.rank)}")
        return 0
    dtype: Any = None if arguments.dtype is None else getattr(torch, arguments.dtype, None)
    if arguments.dtype is not None and not isinstance(dtype, torch.dtype):
        raise OpInterceptError(f"--dtype must be a dtype of torch such as bfloat16, got {arguments.dtype!r}")
    flags = dict(flag.partition("=")[::2] for flag in arguments.flag)
    try:
        found = replay(run, arguments.index, rank=arguments.rank, dtype=dtype, device=arguments.device, flags=flags)
    except (ValueError, RuntimeError) as error:
        raise OpInterceptError(str(error)) from error  # a wrong flag, or a device that this machine lacks
    return print_result(found, arguments.json)
