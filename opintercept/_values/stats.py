"""`Values`: the statistics that a run keeps of a tensor. Must not import torch."""

from __future__ import annotations

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
