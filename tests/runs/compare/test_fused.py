"""Kernels of one run and the operators of another, joined by their names."""

from __future__ import annotations

from typing import Any

import pytest
from made_calls import record

from opintercept import CallRecord
from opintercept.runs.compare.fused import fused


def operator(op: str, module: str | None = "block.norm", **fields: Any) -> CallRecord:
    return record(op, module=module, **fields)


def kernel(*ops: str, module: str | None = "block", **fields: Any) -> CallRecord:
    return record("inductor::cpp_fused_0", ops=tuple(f"aten::{op}" for op in ops), module=module, **fields)


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (operator("relu"), kernel("relu", "add"), True),
        (operator("add_"), kernel("add"), True),
        (operator("relu"), kernel("gelu"), False),
        (operator("relu", "head"), kernel("relu"), False),
        (operator("relu", "blocks"), kernel("relu"), False),
        (operator("relu", "block"), kernel("relu", module="block.act"), True),
        (operator("relu", ""), kernel("relu"), True),
        (operator("relu"), kernel("relu", module=None), True),
        (operator("relu"), kernel("relu", module="Model"), True),
        (operator("relu"), kernel("relu", module="Model.block"), True),
        (operator("relu"), kernel("relu", module="Model.head"), False),
        (operator("relu", phase="backward"), kernel("relu"), False),
        (operator("relu"), operator("relu"), False),
        (kernel("relu"), kernel("relu"), False),
        (operator("t"), kernel("relu"), True),
        (operator("t"), operator("relu"), False),
        (operator("t", phase="backward"), kernel("relu"), False),
    ],
)
def test_an_operator_is_in_a_kernel_of_its_module(own: CallRecord, other: CallRecord, expected: bool) -> None:
    assert fused([own], [other]) == [expected]
    if "::t" not in own.op:  # a kernel stands for no view
        assert fused([other], [own]) == [expected]


def test_nothing_is_fused_with_nothing() -> None:
    assert fused([kernel("relu"), operator("t")], []) == [False, False]
    assert fused([], [kernel("relu")]) == []
