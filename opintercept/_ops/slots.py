"""`slots_of`: which places of a call's record its tensors take.

Kernels fill them in C++, see `NotedCall::operands` in `noted.cpp`, and readers of runs find them again by the names.
Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

OPERANDS = ("lhs", "rhs", "bias", "value", "attn_mask", "grad_out", "logsumexp")
"""The places of what an operator reads, in the order in which they are taken."""
OUTPUTS = ("output", "output.1", "output.2")
"""Those of its outputs."""

OUTPUT_ARGUMENT = "output_"
"""How a run names an argument that is called `output`, as that of a softmax's backward."""


def slots_of(names: Iterable[str]) -> dict[str, str]:
    """The place of each tensor by its name; those that find none are left out.

    A tensor that has the name of a place takes it, others take the next free one: `self` and `other` of an addition are
    at `lhs` and `rhs`.

    Example:
        >>> slots_of(["input", "weight", "bias", "output"])
        {'input': 'lhs', 'weight': 'rhs', 'bias': 'bias', 'output': 'output'}
    """
    return _slots_of(tuple(names))


@lru_cache(4096)
def _slots_of(names: tuple[str, ...]) -> dict[str, str]:
    free = iter([place for place in OPERANDS if place not in names])
    found = {}
    for name in names:
        if name in OPERANDS or name in OUTPUTS:
            found[name] = name
        elif name.partition(".")[0] != "output" and (place := next(free, None)) is not None:
            found[name] = place
    return found
