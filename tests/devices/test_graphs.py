"""Hooks find in each replay of a CUDA graph what they find on the CPU in a step that runs."""

from __future__ import annotations

import pytest
from compiler import needs_compiler
from devices import on_a_device

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.mark.parametrize("case", ["infer", "train"])
def test_hooks_find_in_replays_what_they_find_in_steps_that_run(case: str) -> None:
    found = on_a_device("device_graphs.py", case)
    assert len(found) == 6  # three engines, matmuls and all operators
    for replays, steps in found.values():
        assert replays == steps
        assert all(replays[part] for part in ("records", "stats", "findings", "calls", "replayed"))


def test_a_graph_without_readers_and_one_that_a_block_has_left() -> None:
    found = on_a_device("device_graphs.py", "edges")
    indices, rows, added, opaque = found["without values"]
    assert indices == [None, None, None, 0, 1, 2, 0, 1, 2]
    assert (rows, added, opaque) == ([], 0, {})
    assert found["unseen"] == [{"cuda::graph_replay": 1}, 9]
    assert found["told"] == [
        "Stats leaves out calls that a CUDA graph captures",
        "a CUDA graph was replayed in a block that had not seen it captured",
    ]
    assert found["after the block"] == [1, 1]
    assert found["broken"] == [2, 6]  # the hook that fails is switched off, and the other goes on
    assert found["left"] == [1, 1, 0]
    left_out = "Stats leaves out calls that a CUDA graph captures, since "
    no_memory = "the device has no memory for what hooks read in a CUDA graph: its calls have no values"
    assert found["no room"]["end"] == [0, 4, [no_memory]]
    assert found["no room"]["call"] == [0, 4, [left_out + "it has no room for more values", no_memory]]
    assert found["no room"]["memory"] == [
        0,
        4,
        [
            no_memory,
            left_out + "they have no values before the graph is replayed",
        ],
    ]
    assert found["no room"]["table"] == [1, 4, [left_out + "it has no room for more values"]]
