"""`opintercept build`: builds the compiled engine once and prints where it is kept, and tells when that is worth it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

_SAVED = 25e-6
"""Seconds that a call costs less with compiled kernels, at least: `Stats` and `Profile` on small matmuls, AMD EPYC."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--into",
        metavar="FOLDER",
        type=Path,
        help="build into FOLDER what a wheel needs: a library for all processors of this kind",
    )


def command(arguments: argparse.Namespace) -> int:
    """Build the library, unless it is there."""
    import platform

    import torch

    from opintercept._native import build, library

    environment = f"torch {torch.__version__} and Python {platform.python_version()}"
    started = time.perf_counter()
    if arguments.into is not None:
        made = build.build_portable(arguments.into)
        took = time.perf_counter() - started
        print(f"built for {environment} in {took:.0f} s: {made}")
        return 0
    there = library.existing()
    if there.module is not None:
        print(f"already built for {environment}: {there.path}")
    else:
        print(f"building the compiled engine for {environment}, which takes about a minute", flush=True)
        library.need()
        took = time.perf_counter() - started
        print(f"built in {took:.0f} s: {library.find().path}")
    print('engine="auto" takes it, and hooks read values in C++; `opintercept info` says so at any time')
    return 0


def worth_it(calls: int, seconds: float) -> Iterator[str]:
    """Yield a line if compiled kernels would have saved more than a tenth of the time in which calls were watched."""
    import os

    from opintercept._core.text import duration
    from opintercept._native import library

    saved = calls * _SAVED
    if saved > seconds / 10 and library.find().module is None and os.environ.get(library.SWITCH) != "0":
        yield (
            f"compiled kernels would have saved at least {duration(saved)} of {duration(seconds)}; to build them, in "
            "about a minute: opintercept build"
        )
