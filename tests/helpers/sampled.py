"""What `pytest --sampled` leaves out of sweeps over many cases. Without it nothing is left out.

A hash of its name picks a case, so that each run has the same ones. Test modules ask while they are imported, and
`conftest.py` asks about the tests that do not.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest

on = False
FEW = 8  # A test that has fewer cases than these has all of them.


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


def covering(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The tests that run of those that are parametrized more than once and ask nothing of this module.

    Of two parameters each value is there, and of three or more each pair of values.
    """
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    return {item for each in cases.values() for item in (_covering(each) if on else each)}


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    function: Any = getattr(items[0], "function", None)
    if len(items) < FEW or not hasattr(items[0], "callspec") or "sampled" in function.__code__.co_names:
        return items
    values = {item: _values(item) for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))}
    varied = [axis for axis in values[items[0]] if len({each[axis] for each in values.values()}) > 1]
    if len(varied) < 2:
        return items
    strength = 1 if len(varied) == 2 else 2
    shown = {
        item: {tuple((axis, each[axis]) for axis in axes) for axes in itertools.combinations(varied, strength)}
        for item, each in values.items()
    }
    missing, found = set[Any]().union(*shown.values()), []
    while missing:
        best = max(shown, key=lambda item: len(shown[item] & missing))
        missing -= shown.pop(best)
        found.append(best)
    return found


def _values(item: Any) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The values of a case by the names of the parameters that come together, each by its identity."""
    params = item.callspec.params
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [tuple(names.replace(" ", "").split(",")) if isinstance(names, str) else tuple(names) for names in marks]
    axes += [(name,) for name in params if not any(name in axis for axis in axes)]  # of fixtures
    return {axis: tuple(id(params[name]) for name in axis) for axis in axes}
