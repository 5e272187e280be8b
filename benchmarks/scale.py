"""Whether a call costs the same in a long run, in a deep model and beside other threads."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._timing import Row, rows
from benchmarks.operators import no_op, read_module
from opintercept import hooks, intercept

HOOKS: dict[str, Callable[[], Any]] = {"no-op hook": lambda: no_op, "Recorder": hooks.Recorder, "Stats": hooks.Stats}


def run(smoke: bool) -> list[Row]:
    """Time 10^3 to 10^6 calls, 1 to 64 layers and 1 to 8 threads; a row holds the time of one call."""
    return _calls(smoke) + _layers(smoke) + _threads(smoke)


def _calls(smoke: bool) -> list[Row]:
    found = []
    a = torch.randn(8, 8)
    size = 25 if smoke else 200
    for name, make in HOOKS.items():
        counts = [100, 1000] if smoke else [1_000, 10_000, 100_000, 1_000_000]
        if name == "Recorder":
            counts.pop()  # it keeps a record of each call
        times: dict[str, list[float]] = {}
        speed: list[float] = []  # of the machine, measured by an operator that is not watched
        # One block from start to end, so that later calls meet everything that earlier ones left behind.
        with intercept(make()):
            done = 0
            for count in counts:
                slices = []
                while done < count:
                    speed.append(_time(torch.add, a, size))
                    slices.append(_time(torch.mm, a, size) / speed[-1])
                    done += size
                times[f"up to {count:,} calls"] = slices
        usual = statistics.median(speed)
        times = {name: [slice_ * usual for slice_ in slices] for name, slices in times.items()}
        first, last = next(iter(times)), list(times)[-1]
        found += rows("scale", f"mm 8x8 under {name}", times, {last: (first, 1.1)})
    return found


def _time(op: Callable[..., Any], a: torch.Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        op(a, a)
    return (time.perf_counter() - started) / calls


def _layers(smoke: bool) -> list[Row]:
    depths = (1, 4) if smoke else (1, 4, 16, 64)
    x = torch.randn(4, 32)
    models = {depth: torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(depth))) for depth in depths}
    times: dict[str, list[float]] = {f"{depth} layers": [] for depth in depths}
    with torch.no_grad():
        for _ in range(5 if smoke else 60):
            for depth, model in models.items():
                calls = 64 // depth
                with intercept(read_module):
                    model(x)
                    started = time.perf_counter()
                    for _ in range(calls):
                        model(x)
                    times[f"{depth} layers"].append((time.perf_counter() - started) / calls / depth)
    deep = f"{depths[-1]} layers"
    return rows("scale", "a linear layer whose hook reads module", times, {deep: (f"{depths[0]} layers", 1.1)})


def _threads(smoke: bool) -> list[Row]:
    a = torch.randn(8, 8)
    calls = 200 if smoke else 4000
    times: dict[str, list[float]] = {}
    for count in (1, 2) if smoke else (1, 2, 4, 8):
        turns = []
        for _ in range(3 if smoke else 7):

            def work() -> None:
                with intercept(no_op):
                    for _ in range(calls):
                        torch.mm(a, a)

            threads = [threading.Thread(target=work) for _ in range(count)]
            started = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            turns.append((time.perf_counter() - started) / calls / count)
        times[f"{count} threads"] = [statistics.median(turns)] * 4
    return rows("scale", "mm 8x8, each thread in a block of its own, by call of any", times)
