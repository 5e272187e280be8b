"""What `pytest --sampled` leaves out of sweeps over many cases. Without it nothing is left out.

A hash of its name picks a case, so that each run has the same ones. Test modules ask while they are imported.
"""

from __future__ import annotations

import zlib

on = False


def picks(name: str, of: int) -> bool:
    """Whether a case runs: about one in `of` of them does."""
    return not on or zlib.crc32(name.encode()) % of == 0


def fewer(count: int, most: int) -> int:
    """How many of `count` random or similar cases run."""
    return min(count, most) if on else count
