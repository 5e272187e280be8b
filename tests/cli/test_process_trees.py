"""That random trees of processes are recorded, whatever way they start and end: see `process_trees`."""

from __future__ import annotations

import sys
from pathlib import Path

import process_trees
import pytest
import sampled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which processes are left"),
]


@pytest.mark.parametrize("seed", range(sampled.fewer(50, 4)))
def test_trees_of_processes_are_recorded(seed: int, tmp_path: Path) -> None:
    process_trees.check(seed, tmp_path)


@pytest.mark.parametrize(
    ("have", "whole", "message"),
    [
        (2, True, "counts 3 calls, and 2 are recorded"),
        (4, True, "counts 3 calls, and 4 are recorded"),
        (3, False, "has not finished"),
        (3, True, None),
    ],
)
def test_the_judge_of_trees_notices_what_is_wrong(have: int, whole: bool, message: str | None) -> None:
    node = {"number": 0, "end": "exits", "children": []}
    shape = "[2, 1] @ [1, 2]"
    given = {0: 3}, {shape: have}, {shape} if whole else set()
    if message is None:
        process_trees.judge(1, node, *given)
        return
    with pytest.raises(AssertionError, match=message):
        process_trees.judge(1, node, *given)


def test_the_judge_of_trees_wants_a_killed_process_to_look_unfinished() -> None:
    node = {"number": 0, "end": "is killed", "children": []}
    process_trees.judge(1, node, {0: 3}, {"[2, 1] @ [1, 2]": 2}, set())
    with pytest.raises(AssertionError, match="looks whole, and lacks calls"):
        process_trees.judge(1, node, {0: 3}, {"[2, 1] @ [1, 2]": 2}, {"[2, 1] @ [1, 2]"})
