"""Runs a command in a process of its own, with limits of time and memory, if it computes what another user has written.

Whatever the process comes to, a crash or a hang, is one line of error here. Must not import torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from opintercept._core.errors import OpInterceptError
from opintercept._core.text import listed
from opintercept.cli.options import count, size
from opintercept.runs.store.files import written_by_others
from opintercept.runs.store.run import Run, open_run

_LIMITS = "OPINTERCEPT_CONFINED"  # seconds and bytes, in the environment of a process that has these limits
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from opintercept.cli import main; sys.exit(main())"
)
_LEAST = 1000**3  # bytes, below which importing torch fails in more than one way
_PATIENCE = 5  # seconds for the process to end by itself after Ctrl-C


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that compute what runs have recorded."""
    parser.add_argument(
        "--untrusted",
        action="store_true",
        help="compute in a process of its own with limits of time and memory, as for runs of other users",
    )
    parser.add_argument("--max-seconds", metavar="N", type=count, default=600, help="its limit of time (default 600)")
    parser.add_argument(
        "--max-memory", metavar="SIZE", type=_memory, default=16 * 1000**3, help="its limit of memory (default 16G)"
    )


def _memory(text: str) -> int:
    if size(text) < _LEAST:
        raise argparse.ArgumentTypeError(f"must be at least 1G, since torch takes a part of it, got {text!r}")
    return size(text)


def reason(error: Exception) -> str:
    """What an error of such a process says, or that it has had too little memory."""
    no_room = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
    return "it needs more memory than --max-memory allows" if no_room else str(error)


def opened(path: str) -> Run:
    """Open a run for a command that has these options, which is in a process of its own where it has to be."""
    return open_run(path, trusted=True)


def is_child() -> bool:
    """Whether this is a process that has such limits."""
    return _LIMITS in os.environ


def confined(name: str, rest: Sequence[str], arguments: argparse.Namespace) -> int | None:
    """Run a command in a process with limits, and return its exit status; None if it may run here.

    The process runs the whole command again, so that nothing of what it reads has to be passed on.

    Raises:
        OpInterceptError: The process was ended, or took too long.
    """
    if is_child():
        _take_limits(*map(int, os.environ[_LIMITS].split()))
        return None
    given = (getattr(arguments, each, None) for each in ("a", "b", "run", "other"))
    paths = [path for path in given if path is not None]
    if not arguments.untrusted:
        paths = [path for path in paths if written_by_others(Path(path))]
    if not paths:
        return None
    limits = f"{arguments.max_seconds} {arguments.max_memory}"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), name, *rest], env=os.environ | {_LIMITS: limits}
    )
    try:
        status = child.wait(arguments.max_seconds)
        if status >= 0:
            return status
        end = f"was ended by {signal.Signals(-status).name}"
    except subprocess.TimeoutExpired:
        end = f"took longer than {arguments.max_seconds} seconds; --max-seconds allows it more"
    except KeyboardInterrupt:  # the process has got it, too
        with suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE)
        raise
    finally:
        child.kill()
        child.wait()
    raise OpInterceptError(f"the process that computes what others have written, {listed(paths)}, {end}")


def _take_limits(seconds: int, memory: int) -> None:
    import resource

    for what, most in (
        (resource.RLIMIT_DATA, memory),  # not the address space, of which torch reserves far more than it uses
        (resource.RLIMIT_CPU, seconds * (os.cpu_count() or 1)),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
