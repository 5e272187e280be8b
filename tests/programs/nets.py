"""Small models with named modules, and a way to record the calls of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opintercept import CallRecord, hooks, intercept

ENGINES = [pytest.param({}, id="kernel"), pytest.param({"engine": "mode"}, id="mode")]


def record(program: Callable[[], Any], **options: Any) -> list[CallRecord]:
    recorder = hooks.Recorder()
    with intercept(recorder, **options):
        program()
    return recorder.records


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).relu()
        return self.down(hidden) + x @ x.T @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Any:
        return self.main(x) @ self.scale


class Generator(Pair):
    pass


class Discriminator(Pair):
    pass


# The modules of the products that `Model` and the layers of `Pair` run, in order.
FORWARD = [f"blocks.{i}{name}" for i in range(2) for name in (".up", ".down", "", "")] + ["head"]
IN_PAIR = ["main.0", "main.1"]
