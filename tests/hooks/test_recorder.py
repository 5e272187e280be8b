"""`Recorder`: one record per call, in order, and no tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from opintercept import CallRecord, OpCall, hooks, intercept
from opintercept._core.pipeline import Pipeline
from opintercept._ops.table import row_of


def test_records_are_in_the_order_in_which_calls_ended() -> None:
    recorder = hooks.Recorder()
    assert recorder.records == []
    with intercept(recorder):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
        torch.mv(torch.ones(2, 3), torch.ones(3))
        torch.bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4))
    assert all(type(record) is CallRecord for record in recorder.records)
    assert [(record.index, record.op) for record in recorder.records] == [
        (0, "aten::mm"),
        (1, "aten::mv"),
        (2, "aten::bmm"),
    ]


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


def test_no_tensor_is_kept() -> None:
    recorder = hooks.Recorder()
    lhs, rhs = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    with intercept(recorder):
        product = lhs @ rhs
    gone = [weakref.ref(tensor) for tensor in (lhs, rhs, product)]
    del lhs, rhs, product
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert len(recorder.records) == 1


@pytest.mark.parametrize(
    ("output", "shape", "dtype"),
    [
        (torch.tensor([float("nan"), float("inf")]), (2,), "float32"),
        (torch.empty(0, 3), (0, 3), "float32"),
        (torch.tensor([[1, 2]]), (1, 2), "int64"),
        (torch.tensor([1j]), (1,), "complex64"),
        (torch.ones(2).to(torch.float8_e4m3fn), (2,), "float8_e4m3fn"),
        (torch.eye(2).to_sparse(), (2, 2), "float32"),
        (torch.ones(2, device="meta"), (2,), "float32"),
    ],
    ids=["nonfinite", "empty", "integer", "complex", "float8", "sparse", "meta"],
)
def test_any_output_is_summarised(output: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    recorder, func = hooks.Recorder(), torch.ops.aten.mm.default
    call = OpCall(Pipeline(()), row_of(func), func, "forward", (torch.ones(2, 3), torch.ones(3, 4)), {})
    call.output = output
    recorder.post(call)
    [record] = recorder.records
    meta: Any = record.output
    assert (meta.shape, meta.dtype) == (shape, dtype)


def test_no_output_and_several_outputs() -> None:
    recorder, func = hooks.Recorder(), torch.ops.aten.mm.default
    for output in (None, (), (torch.ones(2), None, torch.ones(3)), [torch.ones(4)]):
        call = OpCall(Pipeline(()), row_of(func), func, "forward", (torch.ones(2, 3), torch.ones(3, 4)), {})
        call.output = output
        recorder.post(call)
    nothing, empty, two, one = (record.output for record in recorder.records)
    assert nothing is None
    assert empty is None
    assert isinstance(two, tuple)
    assert [meta and meta.shape for meta in two] == [(2,), None, (3,)]
    assert not isinstance(one, tuple)
    assert one is not None
    assert one.shape == (4,)


def test_two_recorders_in_one_block_agree_and_share_nothing() -> None:
    first, second = hooks.Recorder(), hooks.Recorder()
    with intercept([first, second]):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    assert first.records == second.records
    assert first.records is not second.records
