"""The cost of one operator under each engine, as ratios in one process: `python -m benchmarks.overhead`.

Invariant: configurations are timed in turn, round after round, so that a change of the machine's speed
meets all of them, and medians are compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from opintercept import intercept


class EmptyDispatchMode(TorchDispatchMode):
    """The usual way to write one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EmptyFunctionMode(TorchFunctionMode):
    """The usual way to write one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def no_op(call: Any) -> None:
    """A hook that does nothing."""


Make = Callable[[], AbstractContextManager[Any]]

CONFIGURATIONS: dict[str, Make] = {
    "bare": nullcontext,
    "empty TorchFunctionMode": EmptyFunctionMode,
    "empty TorchDispatchMode": EmptyDispatchMode,
    "kernel engine, no hook": intercept,
    "kernel engine, 1 hook": lambda: intercept(no_op),
    "kernel engine, 4 hooks": lambda: intercept([no_op] * 4),
    "mode engine, no hook": lambda: intercept(engine="mode"),
    "mode engine, 1 hook": lambda: intercept(no_op, engine="mode"),
    "function level, no hook": lambda: intercept(level="function"),
    "function level, 1 hook": lambda: intercept(no_op, level="function"),
    "after the last exit": nullcontext,
}


def _time(body: Callable[[], Any], number: int) -> float:
    started = time.perf_counter()
    for _ in range(number):
        body()
    return (time.perf_counter() - started) / number


def measure(rounds: int, number: int) -> dict[str, dict[str, float]]:
    """Time `torch.add` and `torch.mm` of 8x8 under every configuration.

    Returns:
        Seconds a call, the median over the rounds, by configuration and operator.
    """
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    bodies: dict[str, Callable[[], torch.Tensor]] = {"add": lambda: torch.add(a, b), "mm": lambda: torch.mm(a, b)}
    expected = {name: body() for name, body in bodies.items()}
    times: dict[str, dict[str, list[float]]] = {c: {op: [] for op in bodies} for c in CONFIGURATIONS}
    for round_number in range(rounds + 1):
        for configuration, make in CONFIGURATIONS.items():
            with make():
                for op, body in bodies.items():
                    seconds = _time(body, number)
                    if round_number:  # the first round warms up
                        times[configuration][op].append(seconds)
    for name, body in bodies.items():
        with intercept(no_op):
            assert torch.equal(body(), expected[name])
    return {c: {op: statistics.median(values) for op, values in row.items()} for c, row in times.items()}


def main() -> None:
    """Print the table and the ratios that the project promises."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a second or two, for continuous integration")
    smoke = parser.parse_args().smoke
    torch.set_num_threads(1)
    table = measure(*(3, 300) if smoke else (25, 2000))
    bare = table["bare"]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"{'':28}{'add 8x8, us':>14}{'x':>6}{'mm 8x8, us':>14}{'x':>6}")
    for configuration, row in table.items():
        cells = "".join(f"{row[op] * 1e6:14.2f}{row[op] / bare[op]:6.2f}" for op in row)
        print(f"{configuration:28}{cells}")

    def ratio(text: str, one: str, other: str, op: str, bound: float) -> None:
        print(f"{text:70}{table[one][op] / table[other][op]:6.2f}  (at most {bound})")

    print()
    ratio("add under the kernel engine / bare", "kernel engine, 1 hook", "bare", "add", 1.03)
    ratio(
        "mm with a no-op hook, kernel engine / empty TorchDispatchMode",
        "kernel engine, 1 hook",
        "empty TorchDispatchMode",
        "mm",
        1.2,
    )
    ratio(
        "unmatched add, mode engine / empty TorchDispatchMode",
        "mode engine, 1 hook",
        "empty TorchDispatchMode",
        "add",
        1.0,
    )
    ratio(
        "unmatched add, function level / empty TorchFunctionMode",
        "function level, 1 hook",
        "empty TorchFunctionMode",
        "add",
        1.15,
    )
    ratio("add after the last exit / bare", "after the last exit", "bare", "add", 1.0)
    ratio("mm after the last exit / bare", "after the last exit", "bare", "mm", 1.0)


if __name__ == "__main__":
    main()
