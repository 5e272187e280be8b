"""Times several configurations of one program against each other.

Invariant: the configurations take turns in one process and are compared round by round, so a machine that changes its
speed changes both sides. Rows hold medians, and the results are checked to be equal after timing.
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


UNITS = {"a microsecond": 1e-6, "a millisecond": 1e-3, "a second": 1.0, "a megabyte": 0.0}
"""What is no configuration but one of a unit, so that a ratio to it is a figure; by its seconds, 0 for no time."""


class Clock:
    """What `compare` measures.

    Attributes:
        now: Returns seconds: time that passes, or that of the processor, which tells more while other programs run.
    """

    now: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration of one program.

    Attributes:
        suite: The name of the benchmark's file.
        program: What ran.
        configuration: What it ran under.
        seconds: Median time of one run.
        ratio: Median ratio to the first configuration over the rounds.
        spread: Half the distance between the quartiles of the ratio, relative to the ratio.
        bound: The largest ratio that is allowed; None without a promise.
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
    """Time `body`, which returns a tensor, under each configuration, and return a row for each and for each bound.

    Args:
        configurations: Context managers by name. The others are compared with the first one.
        rounds: How many turns each configuration gets; if several, after one to warm up.
        number: Runs of the body in a turn.
        bounds: For a configuration: another one, and the largest ratio to that.
        check: Whether all results must be equal bit for bit.
    """
    times: dict[str, list[float]] = {name: [] for name in configurations}
    warm = rounds > 1
    for turn in range(rounds + warm):
        for name, make in configurations.items():
            with make():
                for _ in range(warm + number // 3):  # entering a block leaves caches cold
                    body()
                started = Clock.now()
                for _ in range(number):
                    body()
                if turn or not warm:
                    times[name].append((Clock.now() - started) / number)
    expected: Any = None
    for name, make in configurations.items() if check else ():
        with make():
            result = body()
        expected = result if expected is None else expected
        assert torch.equal(result, expected), f"{program}: the result differs under {name}"
    return rows(suite, program, times, bounds)


def rows(
    suite: str,
    program: str,
    times: Mapping[str, list[float]],
    bounds: Mapping[str, tuple[str, float]] | None = None,
) -> list[Row]:
    """Return the rows of measured times; the others are compared with the first one, which may be one of `UNITS`."""
    base = next(iter(times))
    compared: list[tuple[str, str, str, float | None]] = [
        (name, name, base, None) for name in times if name not in UNITS
    ]
    compared += [(f"{name} / {other}", name, other, bound) for name, (other, bound) in (bounds or {}).items()]
    found = []
    for shown, name, other, bound in compared:
        ratio, spread = _ratio(times[name], times[other])
        seconds = ratio * UNITS[other] if other in UNITS else statistics.median(times[name])
        found.append(Row(suite, program, shown, seconds, ratio, spread, bound))
    return found


def _ratio(times: list[float], others: list[float]) -> tuple[float, float]:
    """Return the median ratio and its spread: round by round if both ran equally often, else to the other's median."""
    if times is others or len(times) != len(others):
        others = [statistics.median(others)] * len(times)
    ratios = [mine / theirs for mine, theirs in zip(times, others, strict=True)]
    if len(ratios) < 4:
        return statistics.median(ratios), 0.0
    low, median, high = statistics.quantiles(ratios, n=4)
    return median, (high - low) / 2 / median


def table(found: Iterable[Row]) -> str:
    """Write the rows as text, grouped by program."""
    lines: list[str] = []
    title = ""
    for row in found:
        if f"{row.suite}: {row.program}" != title:
            title = f"{row.suite}: {row.program}"
            lines += ["", title]
        lines.append(str(row))
    return "\n".join(lines).lstrip()
