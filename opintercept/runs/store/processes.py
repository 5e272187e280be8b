"""The processes of a run: which belong to it, by which numbers its calls name them, and how a reader calls them.

Must not import torch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

SUMMARY = "summary.json"
"""What `opintercept run` has to say of a child, in its folder."""
RunInfo = Any  # a `RunInfo`, whose file imports this one


def of_one_program(infos: Mapping[str, RunInfo]) -> list[str]:
    """The names of those that belong together: with a process that began a program, or else with the newest child."""
    programs = {_member(info, "program") for info in infos.values() if not is_child(info)}
    if not programs:
        programs = {_member(max(infos.values(), key=_born), "program")}
    return [name for name, info in infos.items() if _member(info, "program") in programs]


def numbered(infos: Mapping[str, RunInfo]) -> dict[int, str]:
    """The names by number: a process that is a rank has its rank, and the others follow in the order of their birth.

    Ranks of several groups count as others.
    """
    found = {info.rank: name for name, info in infos.items() if info.world_size > 1 and name == f"rank{info.rank}"}
    if len({infos[name].world_size for name in found.values()}) > 1:
        found = {}
    free = itertools.count(max(found, default=-1) + 1)
    others = sorted((name for name in infos if name not in found.values()), key=lambda name: _born(infos[name]))
    return dict(sorted(found.items())) | dict(zip(free, others, strict=False))


def titles(numbers: Mapping[int, str], infos: Mapping[str, RunInfo]) -> dict[int, str]:
    """What readers call the processes: the name that the program gives it, or its folder where several have that."""
    given = {number: _member(infos[name], "name") or name for number, name in numbers.items()}
    given |= {number: name for number, name in numbers.items() if name == f"rank{number}"}
    times = Counter(given.values())
    return {number: title if times[title] == 1 else numbers[number] or "main" for number, title in given.items()}


def pairs(
    a: Mapping[int, RunInfo], b: Mapping[int, RunInfo], titles: tuple[Mapping[int, str], Mapping[int, str]]
) -> list[tuple[int | None, int | None]]:
    """Pair the processes of two runs by rank, by name and the order of birth, or else by that order alone.

    None stands for one that the other run does not have.
    """
    keys_a, keys_b = (_keys(infos, names) for infos, names in zip((a, b), titles, strict=True))
    found: dict[int, int] = {number: keys_b[key] for key, number in keys_a.items() if key in keys_b}
    rest_a = [number for number in keys_a.values() if number not in found]
    rest_b = [number for number in keys_b.values() if number not in found.values()]
    in_order = itertools.zip_longest(rest_a, rest_b)
    return sorted([*found.items(), *in_order], key=lambda pair: (pair[0] is None, pair[0] or 0))


def _keys(infos: Mapping[int, RunInfo], titles: Mapping[int, str]) -> dict[tuple[str, int], int]:
    """The processes by their names, which tell ranks apart, and a number where several have one name."""
    times: Counter[str] = Counter()
    found = {}
    for number in sorted(infos, key=lambda number: (_born(infos[number]), number)):
        title = titles.get(number, f"rank{number}" if len(infos) > 1 else "main")
        name = title if title == f"rank{number}" else _member(infos[number], "name") or title
        found[name, times[name]] = number
        times[name] += 1
    return found


def is_child(info: RunInfo) -> bool:
    """Whether a process of a watched program has started it."""
    return _member(info, "parent") is not None


def _born(info: RunInfo) -> int:
    born = _member(info, "born") or ""
    return int(born) if born.isdecimal() and len(born) < 32 else 0


def _member(info: RunInfo, name: str) -> str | None:
    return None if info.member is None else info.member.get(name)
