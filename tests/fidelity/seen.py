"""What the tests of torch's features share: a hook that keeps short names, and runs compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opintercept import OpCall

_MARKS = {"forward": "", "backward": "'", "recompute": '"'}


class Seen(list[str]):
    """A hook that keeps the operators' names without where they are from, with ' in backward, " in recomputation."""

    def post(self, call: OpCall) -> None:
        self.append(call.op.rpartition("::")[2].rpartition(".")[2] + _MARKS[call.phase])


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The loss and its gradient in every leaf that has one."""
    loss.sum().backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def run(program: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """What the program returns from a fixed seed, and the random state that it leaves."""
    torch.manual_seed(5)
    return [*program(), torch.get_rng_state()]


def assert_alike(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    """Compare bit by bit, and strides."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()
