"""`splitmix64`, which makes 64 bits that look random of a number. Its twin in C++ is `_native/splitmix.h`.

Must not import torch.
"""

from __future__ import annotations

from typing import Any, TypeVar

WORD = 2**64 - 1
"""The bits of a number of 64."""

_Numbers = TypeVar("_Numbers", bound=Any)


def signed(number: int) -> int:
    """The same 64 bits as an int64."""
    number &= WORD
    return number - 2**64 if number >> 63 else number


_STEP, _FIRST, _SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def splitmix64(numbers: _Numbers) -> _Numbers:
    """64 bits that look random, for each number: S. Vigna, https://prng.di.unimi.it/splitmix64.c.

    Takes an int, whose bits are returned as one that is not negative; or an int64 tensor or array.
    """
    wrap = WORD if isinstance(numbers, int) else -1  # the arithmetic of int64 is mod 2**64
    z = numbers * _STEP & wrap
    # A shift of an int64 fills up with the sign, hence the masks.
    z = (z ^ (z >> 30 & 2**34 - 1)) * _FIRST & wrap
    z = (z ^ (z >> 27 & 2**37 - 1)) * _SECOND & wrap
    return z ^ (z >> 31 & 2**33 - 1)  # type: ignore[no-any-return]
