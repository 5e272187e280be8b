"""The benchmarks: `python -m benchmarks [suite ...] [--smoke] [--cpu] [--json] [--pages] [--all]`."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures
from benchmarks._timing import Clock, Row, table
from opintercept._engines import compiled

SUITES = (
    *("operators", "models", "every", "recording", "reading", "values", "hook_costs", "scale", "startup", "plugin"),
    *("gpu", "overflow"),
)


def about(versions: dict[str, Any]) -> str:
    """Say when and where figures were measured."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else []
    processor = f"{len(names)} cores of {names[0]}" if names else platform.machine()
    threads = "one thread" if versions["threads"] == 1 else f"{versions['threads']} threads"
    return (
        f"Measured on {datetime.date.today()} with torch {versions['torch']} and Python {versions['python']}, "
        f"on {processor}, with {threads}, in processor time."
    )


def main() -> None:
    """Run the suites, and print their tables and the bounds that were exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what interception costs.")
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"any of {', '.join(SUITES)} (default all)")
    parser.add_argument("--smoke", action="store_true", help="run everything once and briefly, without bounds, for CI")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of tables")
    parser.add_argument(
        "--cpu", action="store_true", help="measure the processor's time, on a busy machine; not for gpu"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    pages = f"write the figures of the pages: {', '.join(figures.SUITES)} with --cpu"
    parser.add_argument("--pages", action="store_true", help=pages)
    parser.add_argument("--all", action="store_true", help="gpu alone: all that only a GPU shows, as Markdown")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join(SUITES)}")
    torch.set_num_threads(options.threads)
    if options.all:
        if options.suites != ["gpu"] or not (options.smoke or torch.cuda.is_available()):
            parser.error("--all needs the suite gpu alone, and a GPU unless there is --smoke")
        importlib.import_module("benchmarks.gpu_day").report(options.smoke)
        return
    if options.pages:
        if options.suites or options.smoke or options.json:
            parser.error("--pages takes no suites, and neither --smoke nor --json")
        options.suites, options.cpu = figures.SUITES, True
    if options.cpu:
        Clock.now = time.process_time
    # A row that names no engine is for kernels in Python, also where the compiled engine has been built.
    compiled.is_there = lambda: False
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": options.threads,
    }
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in versions.items()), flush=True)
    found: list[Row] = []
    for name in SUITES:
        if not options.suites or name in options.suites:
            rows = importlib.import_module(f"benchmarks.{name}").run(options.smoke)
            if options.smoke:  # too few turns to judge a bound
                rows = [row for row in rows if row.bound is None]
            found += rows
            if not options.json:
                print(f"\n{table(rows)}", flush=True)
    if options.json:
        json.dump({"versions": versions, "rows": [asdict(row) for row in found]}, sys.stdout, indent=1)
        return
    if options.pages:
        figures.write(found, about(versions))
    over = [row for row in found if row.bound is not None and row.ratio > row.bound]
    print(f"\n{len(over)} of {sum(row.bound is not None for row in found)} bounds exceeded")
    for row in over:
        print(f"  {row.program}: {row.configuration} {row.ratio:.2f}, at most {row.bound:g}")


if __name__ == "__main__":
    main()
