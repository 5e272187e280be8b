"""Call records made by hand."""

from __future__ import annotations

from typing import Any

import torch

from opintercept import CallRecord, TensorMeta
from opintercept.testing.plugin import OpCalls


def meta(*shape: int, dtype: str = "float32", device: str = "cpu") -> TensorMeta:
    return TensorMeta(shape, dtype, device, None, False)


def record(op: str = "mm", phase: Any = "forward", dtype: str = "float32", index: int = 0, **fields: Any) -> CallRecord:
    square = meta(2, 2, dtype=dtype)
    fields = {"lhs": square, "rhs": square, "output": square, "module": "", "flops": 16, **fields}
    for name in ("source", "forward", "grad_of", "bias", "gemm", "bytes", "autocast", "started", "thread", "elapsed"):
        fields.setdefault(name, None)
    return CallRecord(index=index, step=0, op=f"aten::{op}", func=op, phase=phase, opaque=False, **fields)


def three_calls() -> OpCalls:
    return OpCalls([record(), record("bmm", index=1), record(phase="backward", dtype="bfloat16", index=2)])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.head = torch.nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x).bfloat16())
