"""Small models with named modules, and a way to record the calls of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from opintercept import CallRecord, hooks, intercept


def record(program: Callable[[], Any], **options: Any) -> list[CallRecord]:
    recorder = hooks.Recorder()
    with intercept(recorder, **options):
        program()
    return recorder.records


class Product(torch.autograd.Function):
    """A product with a forward and a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grads[0] @ y.mT, x.mT @ grads[0]


product: Callable[..., Tensor] = Product.apply


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        hidden = self.up(x).relu()
        return (self.down(hidden) + x @ x.transpose(0, 1) @ x).tanh()


class Model(nn.Module):
    def __init__(self, width: int = 4, outputs: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.head = nn.Linear(width, outputs)

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
