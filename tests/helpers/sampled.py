"""What `pytest --sampled` leaves out of sweeps over many cases. Without it nothing is left out.

A hash of its name picks a case, so that each run has the same ones. Test modules ask while they are imported.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Mapping

on = False


def picks(name: str, of: int) -> bool:
    """Whether a case runs: about one in `of` of them does."""
    return not on or zlib.crc32(name.encode()) % of == 0


def picks_of_each(groups: Mapping[str, Hashable], of: int) -> set[str]:
    """The cases that run, given the group of each: about one in `of` of a group does, and one at least."""
    if not on:
        return set(groups)
    names = defaultdict(list)
    for name in sorted(groups, key=lambda name: zlib.crc32(name.encode())):
        names[groups[name]].append(name)
    return {name for each in names.values() for name in each[: max(1, round(len(each) / of))]}


def fewer(count: int, most: int) -> int:
    """How many of `count` random or similar cases run."""
    return min(count, most) if on else count
