"""`opintercept run`: runs an unmodified program and watches its calls.

Invariant: the program's output, exceptions, input and exit status are those of a plain run; we write to stderr.
Must not import torch: the program may first set what torch reads at its import.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Callable
from typing import get_args

from opintercept._core.after_import import AfterImport
from opintercept._core.errors import OpInterceptError
from opintercept.cli.options import add_filters, count, size
from opintercept.cli.run.family import Family, make_room
from opintercept.cli.run.hooks import HOOKS
from opintercept.cli.run.program import prepare
from opintercept.cli.run.watch import ProgramWatch
from opintercept.runs.store.run import TensorMode


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.allow_abbrev = False  # argparse would call an option of the program ambiguous, such as `--e`
    parser.usage = "%(prog)s [options] script.py [argument ...]\n       %(prog)s [options] -m module [argument ...]"
    parser.add_argument("-m", dest="module_name", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("--out", metavar="FOLDER", help="record the run in FOLDER, which must not hold a run yet")
    parser.add_argument(
        "--tensors",
        choices=get_args(TensorMode),
        help="what to record of tensors: nothing, statistics and a hash, some values, or all values (default stats)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the run in FOLDER")
    parser.add_argument(
        "--flight", metavar="N", type=count, help="record only the last N calls, and only if the program fails"
    )
    parser.add_argument(
        "--why",
        action="store_true",
        help="record what `opintercept why` needs: all operators and values, of the forward pass of the first step "
        "or of all that --steps names",
    )
    parser.add_argument(
        "--every-steps", metavar="N", type=count, help="record only every Nth step, starting with the first of --steps"
    )
    parser.add_argument(
        "--max-bytes", metavar="SIZE", type=size, help="stop recording before FOLDER exceeds SIZE, such as 500k or 2G"
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the program with exit status 1 at the call that makes the first NaN"
    )
    parser.add_argument(
        "--hooks",
        metavar="NAMES",
        action="extend",
        type=_hooks,
        help="what to show at the end, such as profile,checksum (default profile,nonfinite): "
        + ", ".join(name.lower() for name in HOOKS),
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="say which share of the time in kernels lies inside calls that are seen, with --ops all unless given, "
        "and list the rest by name; looks at --steps, or at the first 20,000 calls, of one process",
    )
    parser.add_argument("--limit", metavar="N", type=count, default=20, help="rows of each table (default 20)")
    parser.add_argument("-q", "--quiet", action="store_true", help="show neither progress nor tables")
    parser.add_argument(
        "--ops",
        help="all, or families and operators separated by commas: matmul,conv_tbc (default matmul,convolution, and "
        "with compiled kernels all operators for the search for NaN)",
    )
    parser.add_argument(
        "--level",
        choices=("dispatch", "function"),
        default="dispatch",
        help="watch the operators that run, or the functions that the program calls (default dispatch)",
    )
    parser.add_argument(
        "--engine",
        choices=("auto", "kernel", "compiled", "mode"),
        default="auto",
        help="how to watch operators (default auto)",
    )
    parser.add_argument(
        "--threads", choices=("all", "current"), help="threads to watch (default all, if the engine can)"
    )
    parser.add_argument(
        "--no-children", dest="children", action="store_false", help="do not watch processes that the program starts"
    )
    add_filters(parser, "watch", "module", "phase", "steps")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _hooks(text: str) -> list[str]:
    """Parse names of ready-made hooks, in whatever case, such as `fakequantize` or `fake_quantize`."""
    known = {name.lower(): name for name in HOOKS}
    unknown = [name for name in text.split(",") if name.replace("_", "").lower() not in known]
    if unknown:
        need = "; a hook that needs arguments, such as noise, is for Python"
        raise argparse.ArgumentTypeError(f"must be some of {','.join(known)}, got {unknown[0]!r}{need}")
    return [known[name.replace("_", "").lower()] for name in text.split(",")]


def _check_alone(arguments: argparse.Namespace) -> None:
    """Refuse what would run beside an audit, or leave calls out of it."""
    for name in ("out", "hooks", "stop", "module", "phase", "quiet"):
        if getattr(arguments, name):
            raise OpInterceptError(f"--audit looks at all calls and runs no other hook; leave out --{name}")


def command(arguments: argparse.Namespace) -> Callable[[], int]:
    """Return a function that runs the program."""
    if not arguments.program:
        raise OpInterceptError("no program given; use `opintercept run script.py` or `opintercept run -m module`")
    for name in ("tensors", "why", "overwrite", "flight", "every_steps", "max_bytes"):
        if getattr(arguments, name) and arguments.out is None:
            raise OpInterceptError(f"--{name.replace('_', '-')} needs --out FOLDER, the folder to record to")
    if arguments.audit:
        _check_alone(arguments)
        arguments.hooks, arguments.ops, arguments.children = ["Audit"], arguments.ops or "all", False
    if arguments.why:
        one_pass = {"phase": arguments.phase or "forward", "steps": range(1)} if arguments.steps is None else {}
        for option, value in {"ops": "all", "tensors": "full", **one_pass}.items():
            setattr(arguments, option, getattr(arguments, option) or value)
    name, *rest = arguments.program
    if arguments.out is not None:
        arguments.out = os.path.abspath(arguments.out)  # the program may change its directory
        make_room(arguments)
    program = prepare(name, rest, module=arguments.module_name)
    Family.leave()
    watch = ProgramWatch(arguments, Family.begin(arguments) if arguments.children else None)

    def begin(_: str) -> None:
        imports.end()
        watch.begin()

    imports = AfterImport("torch".__eq__, begin)

    def run() -> int:
        # Registered before the program's own functions, so it runs after them, and after the program's threads.
        atexit.register(watch.end)
        if "torch" in sys.modules:
            watch.begin()
        else:
            imports.begin()
        try:
            program()
        except BaseException as error:
            watch.error = error
            raise
        finally:
            watch.clear_progress()
        return 0

    return run
