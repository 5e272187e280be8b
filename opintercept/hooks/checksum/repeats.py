"""`Twins`: compares the products that a checkpoint repeats with their forward calls, by hashes.

Invariant: nothing waits for a device, since hashes are compared where they are. Must not import the hook.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.tensors import is_strided
from opintercept._kit.copyable import Copyable
from opintercept._values.hash import bits_of, hash_of
from opintercept._values.read import first_output, in_memory

MOST_CALLS = 64
"""How many forward calls of one module, operator and shape are kept; those outside of checkpoints make room."""


class Twins(Copyable):
    """Hashes of forward calls, for the calls that repeat them."""

    def __init__(self) -> None:
        self._seen: dict[Any, deque[tuple[int, torch.Tensor]]] = {}

    def compare(self, call: OpCall) -> torch.Tensor | None:
        """Keep the hashes of a forward call, or compare those of a repeated one with what was kept.

        For a repeated call this returns, on the device of the output, the index of the forward call with the same
        operands if none of those has the same output, and otherwise -1; None for other calls.
        """
        if call.phase == "backward":
            return None
        lhs, rhs, output = call.lhs, call.rhs, first_output(call.output)
        tensors = [tensor for tensor in (lhs, rhs, call.bias, output) if isinstance(tensor, torch.Tensor)]
        if len(tensors) < 3 or not all(is_strided(tensor) and in_memory(tensor) for tensor in tensors):
            return None
        key = call.module, call.op, *(tensor.shape for tensor in tensors)
        hashes = [hash_of(*bits_of(tensor)) for tensor in tensors]
        operands = hashes[0]
        for each in hashes[1:-1]:
            operands = operands * 0x9E3779B97F4A7C1 + each
        both = torch.stack([operands, hashes[-1]])
        known = self._seen.setdefault(key, deque(maxlen=MOST_CALLS))
        if call.phase == "forward":
            known.append((call.index, both))
            return None
        if not known:
            return None
        earlier = torch.stack([each for _, each in known])
        indices = torch.tensor([-1, *(index for index, _ in known)], device=both.device)
        same = earlier[:, 0] == both[0]
        alike = (same & (earlier[:, 1] == both[1])).any()
        last = torch.where(same & ~alike, torch.arange(1, len(known) + 1, device=both.device), 0).amax()
        return indices[last]

    def clear(self) -> None:
        """Forget all calls."""
        self._seen.clear()
