"""`opintercept build`: builds the compiled engine once and prints where it is kept."""

from __future__ import annotations

import argparse
import time
from pathlib import Path


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
