"""A data set for tests of DataLoader, in a file that spawned workers can import."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from opintercept import OpCall, intercept


class Products(Dataset[dict[str, Any]]):
    """Multiplies matrices for each item, in the process that loads it."""

    def __init__(self) -> None:
        self.seen = 0

    def hook(self, call: OpCall) -> None:
        if call.args[0].shape == (2, 4):
            self.seen += 1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> dict[str, Any]:
        x = torch.arange(8.0).reshape(2, 4) + number
        product = x @ x.T
        own: list[str] = []
        with intercept(lambda call: own.append(call.op)):
            x.T @ x
        expected = (x[:, None] * x).sum(-1)
        return {
            "product": product,
            "expected": expected,
            "seen here": self.seen,
            "seen by a block of its own": len(own),
        }
