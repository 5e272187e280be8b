"""`opintercept replay RUN INDEX`: a recorded call once more, alone, elsewhere or otherwise."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", help="folder of a run that was recorded with --tensors full")
    parser.add_argument("index", type=int, help="number of the call; `opintercept show RUN --calls` lists them")
    parser.add_argument("--rank", type=int, help="process that made it (default: the first)")
    parser.add_argument("--dtype", help="floating-point operands in this dtype, bfloat16 say")
    parser.add_argument("--device", default="cpu", help="where to run it (default cpu)")
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of torch, by its name in run.json: --flag mkldnn=False; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--script", metavar="FILE.py", help="write a script that runs the call, instead of running it")


def command(arguments: argparse.Namespace) -> int:
    """Run the call again; 0 if it gives the same bits, 1 if not, 2 if it cannot be run."""
    import torch

    from opintercept._errors import OpInterceptError
    from opintercept.runs import open_run
    from opintercept.runs.replay import replay, write_script

    run = open_run(arguments.run)
    if arguments.script:
        print(f"python {write_script(run, arguments.index, arguments.script, rank=arguments.rank)}")
        return 0
    dtype: Any = None if arguments.dtype is None else getattr(torch, arguments.dtype, None)
    if arguments.dtype is not None and not isinstance(dtype, torch.dtype):
        raise OpInterceptError(f"--dtype must name a dtype of torch, got {arguments.dtype!r}")
    flags = dict(flag.partition("=")[::2] for flag in arguments.flag)
    try:
        found = replay(run, arguments.index, rank=arguments.rank, dtype=dtype, device=arguments.device, flags=flags)
    except (ValueError, RuntimeError) as wrong:
        raise OpInterceptError(str(wrong)) from wrong  # a flag, or a device that is not there
    if arguments.json:
        plain = {
            "index": found.call.record.index,
            "rank": found.call.rank,
            "func": found.func,
            "equal": found.equal,
            "elapsed": found.elapsed,
            "outputs": [
                {key: value if value == value and value not in (float("inf"),) else str(value) for key, value in row}
                for row in (asdict(output).items() for output in found.outputs)
            ],
        }
        print(json.dumps(plain, indent=1, allow_nan=False))
    else:
        print(found)
    return 0 if found.equal else 1
