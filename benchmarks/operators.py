"""One operator of two 8x8 matrices, where the cost of the machinery is all there is to see."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._timing import Make, Row, compare
from opintercept import OpInterceptError, intercept


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


def compiled(configurations: dict[str, Make]) -> dict[str, Make]:
    """Configurations of compiled kernels, by name; none where they cannot be built."""
    try:
        intercept(engine="compiled")
    except OpInterceptError:
        return {}
    return {f"compiled kernels, {name}": make for name, make in configurations.items()}


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


def run(smoke: bool) -> list[Row]:
    """`add`, which nobody watches, and `mm`, which the interceptors do."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    rounds, number = (3, 300) if smoke else (250, 1000)  # short turns, within which the machine keeps its speed
    in_c = compiled(
        {"no hook": lambda: intercept(engine="compiled"), "1 hook": lambda: intercept(no_op, engine="compiled")}
    )
    add = compare(
        "operators",
        "add 8x8, unwatched",
        lambda: torch.add(a, b),
        CONFIGURATIONS | in_c,
        rounds=rounds,
        number=number,
        bounds={
            "kernel engine, 1 hook": ("bare", 1.02),
            "mode engine, 1 hook": ("empty TorchDispatchMode", 0.9),
            "function level, 1 hook": ("empty TorchFunctionMode", 1.15),
            "after the last exit": ("bare", 1.01),
        },
    )
    mm = compare(
        "operators",
        "mm 8x8, watched",
        lambda: torch.mm(a, b),
        CONFIGURATIONS | in_c,
        rounds=rounds,
        number=number,
        bounds={
            "kernel engine, 1 hook": ("empty TorchDispatchMode", 1.1),
            "after the last exit": ("bare", 1.01),
        }
        | {name: ("empty TorchDispatchMode", 1.1) for name in in_c if "1 hook" in name},
    )
    return add + mm
