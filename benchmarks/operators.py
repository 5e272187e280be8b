"""One operator on two 8x8 matrices, and an empty block, which show nothing but the cost of interception."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._timing import Make, Row, compare, rows
from opintercept import OpCall, OpInterceptError, intercept


class EmptyDispatchMode(TorchDispatchMode):
    """The usual way to write a mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EmptyFunctionMode(TorchFunctionMode):
    """The usual way to write a mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def no_op(call: Any) -> None:
    """Do nothing."""


no_op.reads = ()  # type: ignore[attr-defined]  # without it, training would note where each call comes from


def read_module(call: OpCall) -> None:
    """Read where the call comes from."""
    _ = call.module


read_module.reads = ("module",)  # type: ignore[attr-defined]


def blocks(hooks: Mapping[str, Callable[[], Any]], **options: Any) -> dict[str, Make]:
    """Return a block for each hook, which is made anew for each time that it is entered."""

    def block(hook: Callable[[], Any]) -> Make:
        return lambda: intercept(hook(), **options)

    return {name: block(hook) for name, hook in hooks.items()}


def compiled(configurations: dict[str, Make]) -> dict[str, Make]:
    """Return these configurations under the name of compiled kernels; none if those cannot be built."""
    try:
        intercept(engine="compiled")
    except OpInterceptError:
        return {}
    return {f"compiled kernels, {name}": make for name, make in configurations.items()}


CONFIGURATIONS: dict[str, Make] = {
    "plain": nullcontext,
    "empty TorchFunctionMode": EmptyFunctionMode,
    "empty TorchDispatchMode": EmptyDispatchMode,
    "kernels in Python, no hook": intercept,
    "kernels in Python, no-op hook": lambda: intercept(no_op),
    "kernels in Python, 4 no-op hooks": lambda: intercept([no_op] * 4),
    "mode engine, no hook": lambda: intercept(engine="mode"),
    "mode engine, no-op hook": lambda: intercept(no_op, engine="mode"),
    "function level, no hook": lambda: intercept(level="function"),
    "function level, no-op hook": lambda: intercept(no_op, level="function"),
    "after the last exit": nullcontext,
}


def enter(make: Make, number: int) -> float:
    """Enter and leave `number` blocks, and return the seconds for one."""
    started = time.perf_counter()
    for _ in range(number):
        with make():
            pass
    return (time.perf_counter() - started) / number


def _same(block: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return block


def entries(smoke: bool) -> list[Row]:
    """Time an empty block alone, which installs and removes kernels, one inside another block, and a pause."""
    blocks: list[tuple[str, int, dict[str, Any]]] = [
        ("kernels in Python", 10, {}),
        ("mode engine", 200, {"engine": "mode"}),
        ("function level", 200, {"level": "function"}),
        *(("compiled kernels", 10, {"engine": "compiled"}) for _ in compiled({"": nullcontext})),
    ]
    timed: dict[str, tuple[Make, Make, int]] = {}  # the block, the block around it, and runs in a turn
    for name, number, options in blocks:
        interceptor, outer = intercept(no_op, **options), intercept(no_op, **options)
        timed[name] = (partial(_same, interceptor), nullcontext, number)
        timed[f"{name}, in another block"] = (partial(_same, interceptor), partial(_same, outer), 200)
        timed[f"{name}, a pause"] = (interceptor.paused, partial(_same, interceptor), 200)
    times: dict[str, list[float]] = {"a microsecond": [1e-6]} | {name: [] for name in timed}
    for turn in range(3 if smoke else 101):
        for name, (make, around, number) in timed.items():
            with around():
                enter(make, 1 + number // 10)
                seconds = enter(make, number)
            if turn:
                times[name].append(seconds)
    return rows("operators", "an empty block, microseconds", times)


def run(smoke: bool) -> list[Row]:
    """Time `add`, which is not watched, `mm`, which is, and empty blocks."""
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    rounds, number = (3, 300) if smoke else (250, 1000)  # the machine keeps its speed within a short turn
    in_c = compiled(
        {"no hook": lambda: intercept(engine="compiled"), "no-op hook": lambda: intercept(no_op, engine="compiled")}
    )
    add = compare(
        "operators",
        "add 8x8, unwatched",
        lambda: torch.add(a, b),
        CONFIGURATIONS | in_c,
        rounds=rounds,
        number=number,
        bounds={
            "kernels in Python, no-op hook": ("plain", 1.02),
            "mode engine, no-op hook": ("empty TorchDispatchMode", 0.9),
            "function level, no-op hook": ("empty TorchFunctionMode", 1.15),
            "after the last exit": ("plain", 1.01),
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
            "kernels in Python, no-op hook": ("empty TorchDispatchMode", 1.1),
            "after the last exit": ("plain", 1.01),
        }
        | {name: ("empty TorchDispatchMode", 1.1) for name in in_c if "no-op" in name},
    )
    return add + mm + entries(smoke)
