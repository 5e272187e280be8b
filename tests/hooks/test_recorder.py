"""`Recorder`: one record per call, in order, and no tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from made_calls import product_of

from opintercept import CallRecord, hooks, intercept


def test_records_are_in_the_order_in_which_calls_ended() -> None:
    recorder = hooks.Recorder()
    assert recorder.records == []
    with intercept(recorder):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        torch.mv(torch.ones(2, 3), torch.ones(3))
        torch.bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4))
    assert all(type(record) is CallRecord for record in recorder.records)
    ops = [(record.index, record.op) for record in recorder.records]
    assert ops == [(0, "aten::mm"), (1, "aten::mv"), (2, "aten::bmm")]


def test_records_can_be_cleared_and_outlive_the_block() -> None:
    recorder = hooks.Recorder()
    for _ in range(2):
        with intercept(recorder):
            torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        assert len(recorder.records) == 1
        recorder.records.clear()
    torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert recorder.records == []


def test_a_call_that_raised_leaves_no_record() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert [record.index for record in recorder.records] == [1]


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (torch.tensor([float("nan"), float("inf")]), "float32[2]"),
        (torch.empty(0, 3), "float32[0, 3]"),
        (torch.tensor([[1, 2]]), "int64[1, 2]"),
        (torch.tensor([1j]), "complex64[1]"),
        (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn[2]"),
        (torch.eye(2).to_sparse(), "float32[2, 2]"),
        (torch.ones(2, device="meta"), "float32[2]@meta"),
        ([torch.ones(4)], "float32[4]"),
        ((torch.ones(2), None, torch.ones(3)), ["float32[2]", "None", "float32[3]"]),
        ((), "None"),
        (None, "None"),
    ],
    ids=["nonfinite", "empty", "integer", "complex", "float8", "sparse", "meta", "list", "several", "nothing", "none"],
)
def test_any_output_is_summarised(output: Any, shown: Any) -> None:
    recorder = hooks.Recorder()
    recorder.post(product_of(output))
    summary: Any = recorder.records[0].output
    assert (list(map(str, summary)) if isinstance(summary, tuple) else str(summary)) == shown


def test_two_recorders_in_one_block_agree_and_share_nothing() -> None:
    first, second = hooks.Recorder(), hooks.Recorder()
    with intercept([first, second]):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert first.records == second.records
    assert first.records is not second.records
