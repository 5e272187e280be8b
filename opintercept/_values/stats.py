"""The statistics of values: `Values` is what a run keeps of a tensor, and `Sums` adds up many.

Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Values:
    """What a run keeps of a tensor's values. Range, mean and rms are those of the finite values, moduli if complex.

    Attributes:
        hash: 16 hex digits, equal for equal values in the same order, whatever the strides and the device. Other
            values have another hash with a probability of about 1 - 2**-32. None if the values have no plain bytes,
            as those of sparse tensors.
        count: How many values there are.
        nan: How many of them are NaN.
        inf: How many are infinite.
        min: The smallest value. None if no value is finite, as are the next three.
        max: The largest value.
        mean: The mean.
        rms: The root mean square.
    """

    hash: str | None
    count: int
    nan: int
    inf: int
    min: float | None
    max: float | None
    mean: float | None
    rms: float | None

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nan or self.inf)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


class Sums:
    """Adds up values, of one tensor or of many. Everything but the counts is about the finite values.

    `underflow` counts those that a target dtype would round to zero, and `overflow` those beyond its largest number.
    `spread` is the sum of squared distances from the mean: a sum of squares would lose it next to a large mean. Without
    a value, `low` is infinite and `high` minus infinity.
    """

    __slots__ = ("count", "finite", "high", "low", "nan", "nonzero", "overflow", "spread", "total", "underflow")

    def __init__(self) -> None:
        self.count = self.finite = self.nan = self.nonzero = self.underflow = self.overflow = 0.0
        self.total = self.spread = 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, sums: Sequence[float], below: float, high: float) -> None:
        """Add values of which `_native.values.read` has found the sums, and of which `-below` is the smallest."""
        # Written out, this takes half the time of a loop, which is half the time that a small tensor takes.
        count, finite, nan, nonzero, underflow, overflow, total, spread = sums
        self.spread += spread
        if finite and self.finite:  # Chan, Golub and LeVeque (1979)
            apart = self.total / self.finite - total / finite
            self.spread += apart * apart * (self.finite * finite / (self.finite + finite))
        self.count += count
        self.finite += finite
        self.nan += nan
        self.nonzero += nonzero
        self.underflow += underflow
        self.overflow += overflow
        self.total += total
        if -below < self.low:
            self.low = -below
        if high > self.high:
            self.high = high

    def merge(self, other: Sums) -> None:
        """Add the values of another."""
        counts = other.count, other.finite, other.nan, other.nonzero, other.underflow, other.overflow
        self.add((*counts, other.total, other.spread), -other.low, other.high)

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return int(self.count - self.finite)

    @property
    def min(self) -> float:
        """The smallest value; NaN if none is finite, as are the next four."""
        return self.low + 0.0 if self.finite else math.nan  # turns -0.0 into 0.0

    @property
    def max(self) -> float:
        """The largest value."""
        return self.high + 0.0 if self.finite else math.nan

    @property
    def mean(self) -> float:
        """The mean."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """The population standard deviation."""
        return math.sqrt(self.spread / self.finite) if self.finite else math.nan

    @property
    def rms(self) -> float:
        """The root mean square."""
        return math.sqrt(self.spread / self.finite + self.mean * self.mean) if self.finite else math.nan

    def __str__(self) -> str:
        text = f"min {self.min:.3g} max {self.max:.3g} mean {self.mean:.3g} std {self.std:.3g}"
        return f"{text} NONFINITE {self.nonfinite}" if self.nonfinite else text
