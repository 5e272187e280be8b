"""Timing configurations of one program against each other.

Invariant: configurations take turns, round after round, in one process, and are compared round by round, so that a
machine that changes its speed changes both sides; medians are told, and results are checked to be equal after timing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Make = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration of one program.

    Attributes:
        suite: The benchmark's file.
        program: What ran.
        configuration: Under what.
        seconds: Median time of one run.
        ratio: To the first configuration, the median over the rounds.
        spread: Half the distance of the quartiles of the ratio, as a share of it.
        bound: What the ratio may be at most; None where nothing is promised.
    """

    suite: str
    program: str
    configuration: str
    seconds: float
    ratio: float
    spread: float
    bound: float | None = None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f"  at most {self.bound:<5g}{'' if self.ratio <= self.bound else ' OVER'}"
        return (
            f"  {self.configuration:38}{self.seconds * 1e6:12.2f} us{self.ratio:8.2f} x  +-{self.spread:5.1%}{bound}"
        ).rstrip()


def compare(
    suite: str,
    program: str,
    body: Callable[[], Any],
    configurations: Mapping[str, Make],
    *,
    rounds: int,
    number: int = 1,
    bounds: Mapping[str, tuple[str, float]] | None = None,
    check: bool = True,
) -> list[Row]:
    """Time `body` under each configuration.

    Args:
        suite: For the rows.
        program: For the rows.
        body: What to run; returns a tensor.
        configurations: Context managers by name; the first is what the others are compared with.
        rounds: How often each configuration has its turn, after one to warm up.
        number: Runs of the body in a turn.
        bounds: By configuration: another one, and what the ratio to that may be at most.
        check: Whether the result must be the same bit for bit under all.

    Returns:
        A row for each configuration; one with a bound has the ratio that is bounded in a row of its own.
    """
    times: dict[str, list[float]] = {name: [] for name in configurations}
    for turn in range(rounds + 1):
        for name, make in configurations.items():
            with make():
                for _ in range(1 + number // 3):  # what comes and goes with a block leaves caches cold
                    body()
                started = time.perf_counter()
                for _ in range(number):
                    body()
                if turn:
                    times[name].append((time.perf_counter() - started) / number)
    expected: Any = None
    for name, make in configurations.items() if check else ():
        with make():
            result = body()
        expected = result if expected is None else expected
        assert torch.equal(result, expected), f"{program} has another result under {name}"
    return rows(suite, program, times, bounds)


def rows(
    suite: str,
    program: str,
    times: Mapping[str, list[float]],
    bounds: Mapping[str, tuple[str, float]] | None = None,
) -> list[Row]:
    """Rows of measured times, the first of which is what the others are compared with."""
    base = next(iter(times))
    compared: list[tuple[str, str, str, float | None]] = [(name, name, base, None) for name in times]
    compared += [(f"{name} / {other}", name, other, bound) for name, (other, bound) in (bounds or {}).items()]
    found = []
    for shown, name, other, bound in compared:
        ratio, spread = _ratio(times[name], times[other])
        found.append(Row(suite, program, shown, statistics.median(times[name]), ratio, spread, bound))
    return found


def _ratio(times: list[float], others: list[float]) -> tuple[float, float]:
    """The median ratio and its spread; of each round where both had as many, else of any to the other's median."""
    if times is others or len(times) != len(others):
        others = [statistics.median(others)] * len(times)
    ratios = [mine / theirs for mine, theirs in zip(times, others, strict=True)]
    if len(ratios) < 4:
        return statistics.median(ratios), 0.0
    low, median, high = statistics.quantiles(ratios, n=4)
    return median, (high - low) / 2 / median


def table(found: Iterable[Row]) -> str:
    """The rows as text, by program."""
    lines: list[str] = []
    title = ""
    for row in found:
        if f"{row.suite}: {row.program}" != title:
            title = f"{row.suite}: {row.program}"
            lines += ["", title]
        lines.append(str(row))
    return "\n".join(lines).lstrip()
