"""`GroupSums` agrees with groups that are added up row by row, however the rows come."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opintercept.runs.sums import STATISTICS, GroupSums, slot_figures

Row = tuple[int, int, float, float]

numbers = st.one_of(st.integers(-50, 50).map(float), st.just(math.nan))
keys = st.tuples(st.integers(-3, 3), st.one_of(st.integers(0, 4), st.integers(0, 2**62)))
rows = st.lists(
    st.tuples(keys, numbers, st.integers(0, 9).map(float)).map(lambda row: (*row[0], *row[1:])), max_size=40
)


def added_up(chunks: list[list[Row]]) -> GroupSums:
    sums = GroupSums()
    for chunk in chunks:
        first, second, some, all_ = (np.array([row[place] for row in chunk]) for place in range(4))
        figures = {"x_min": some, "x_max": some, "index_first": all_, "total": all_}
        sums.add([first.astype(np.int64), second.astype(np.int64)], figures)
    return sums


def one_by_one(chunks: list[list[Row]]) -> dict[tuple[int, int], dict[str, float]]:
    groups = defaultdict[tuple[int, int], list[Row]](list)
    for chunk in chunks:
        for row in chunk:
            groups[row[:2]].append(row)
    made = {}
    for key, members in sorted(groups.items()):
        known = [row[2] for row in members if row[2] == row[2]] or [math.nan]
        total = sum(row[3] for row in members)
        made[key] = {"x_min": min(known), "x_max": max(known), "index_first": members[0][3], "total": total}
    return made


def plain(sums: GroupSums) -> dict[tuple[int, ...], Any]:
    keys = list(zip(*(column.tolist() for column in sums.keys), strict=True))
    columns = {name: column.tolist() for name, column in sums.figures.items()}
    return {key: {name: column[place] for name, column in columns.items()} for place, key in enumerate(keys)}


@given(chunks=st.lists(rows, max_size=4))
def test_groups_of_chunks_are_those_of_single_rows(chunks: list[list[Row]]) -> None:
    found, expected = plain(added_up(chunks)), one_by_one(chunks)
    assert list(found) == list(expected)
    assert repr(found) == repr(expected)  # as NaN does not equal itself


@given(chunk=rows)
def test_groups_with_other_keys_are_joined(chunk: list[Row]) -> None:
    sums = added_up([chunk])
    if len(sums):
        sums.regroup(sums.keys[0] // 2, sums.keys[1] * 0)
    expected = one_by_one([[(row[0] // 2, 0, row[2], row[3]) for row in sorted(chunk, key=lambda row: row[:2])]])
    assert repr(plain(sums)) == repr(expected)


def test_a_figure_that_some_calls_lack_is_zero_or_unknown() -> None:
    sums = GroupSums()
    sums.add([np.array([1])], {"calls": np.array([1.0])})
    sums.add([np.array([1, 2])], {"calls": np.ones(2), "x_min": np.array([3.0, 4.0]), "nan": np.array([5, 6])})
    sums.add([np.array([0])], {"calls": np.array([1.0])})
    found = {name: column.tolist() for name, column in sums.figures.items()}
    assert found["calls"] == [1.0, 2.0, 1.0]
    assert found["nan"] == [0.0, 5.0, 6.0]
    assert math.isnan(found["x_min"][0])
    assert found["x_min"][1:] == [3.0, 4.0]


def test_statistics_of_groups_are_those_of_all_their_values() -> None:
    draw = np.random.default_rng(0)
    tensors = [draw.normal(100, 1, size) for size in (1, 5, 8, 100)]
    figures: list[tuple[float, ...]] = [
        (0, 0, each.min(), each.max(), each.mean(), math.sqrt((each**2).mean())) for each in tensors
    ]
    figures += [(3, 0, *[math.nan] * 4)]  # a tensor of three NaN
    names = ("nan", "inf", "min", "max", "mean", "rms")
    chunk = {f"output_{name}": np.array(column) for name, column in zip(names, zip(*figures, strict=True), strict=True)}
    counts = np.array([each.size for each in tensors] + [3])
    sums = GroupSums()
    sums.add([np.array([7, 7, 7, 7, 7])], slot_figures(chunk, "output", counts))
    values = np.concatenate(tensors)
    rms = math.sqrt((values**2).mean())
    expected = (117, 3, 0, values.min(), values.max(), values.mean(), rms)
    found = sums.statistics("output")
    assert [found[name].item() for name in STATISTICS] == pytest.approx(expected)
