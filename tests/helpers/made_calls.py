"""Calls and their records made by hand. `made_runs.py` writes the records as runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from opintercept import CallRecord, OpCall, TensorMeta
from opintercept._core.pipeline import Pipeline
from opintercept._ops.table import row_of
from opintercept.testing.plugin import OpCalls

UNKNOWN: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(CallRecord))


def meta(*shape: int, dtype: str = "float32", device: str = "cpu") -> TensorMeta:
    return TensorMeta(shape, dtype, device, None, False)


def record(op: str = "mm", phase: Any = "forward", dtype: str = "float32", **fields: Any) -> CallRecord:
    """A record of a product of two small matrices. Fields that have no value here are None."""
    square = meta(2, 2, dtype=dtype)
    name = op if "::" in op else f"aten::{op}"
    known = {"index": 0, "step": 0, "op": name, "func": f"{name.replace('::', '.')}.default", "phase": phase}
    known |= {"module": "", "lhs": square, "rhs": square, "output": square, "flops": 16, "opaque": False}
    return CallRecord(**UNKNOWN | known | fields)


def call_of(func: Any, *args: Any, **kwargs: Any) -> OpCall:
    """A call that no engine has made, which has only these arguments."""
    return OpCall(Pipeline(()), row_of(func), func, "forward", args, kwargs)


def product_of(output: Any) -> OpCall:
    """The call of a product that has returned this output."""
    call = call_of(torch.ops.aten.mm.default, torch.ones(2, 3), torch.ones(3, 4))
    call.output = output
    return call


def three_calls() -> OpCalls:
    return OpCalls([record(), record("bmm", index=1), record(phase="backward", dtype="bfloat16", index=2)])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.head = torch.nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x).bfloat16())
