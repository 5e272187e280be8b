"""For tests of torch's features: a hook that keeps short names, and a comparison of runs bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opintercept import OpCall

_MARKS = {"forward": "", "backward": "'", "recompute": '"'}


class Seen(list[str]):
    """A hook that keeps the names of operators without namespace, with ' in backward and " in recomputation."""

    def post(self, call: OpCall) -> None:
        self.append(call.op.rpartition("::")[2].rpartition(".")[2] + _MARKS[call.phase])


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Run the backward pass, and return the loss and the gradients of the leaves."""
    loss.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def run(program: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Run a program from a fixed seed, and return its result and the random state after it."""
    torch.manual_seed(5)
    return [*program(), torch.get_rng_state()]


def assert_alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Compare values bit by bit, and strides."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()
