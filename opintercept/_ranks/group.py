"""`Ranks`: the processes of a `torch.distributed` group, and the numbers that they exchange.

Invariant: every rank of the group must make the same calls of `summed` and `gathered` in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from opintercept._core.fork import in_child

_inherited: Any = None  # the process group of the parent, which a forked child cannot use


class Ranks(NamedTuple):
    """A group of at least two ranks."""

    group: Any  # what torch.distributed calls it; None for all ranks
    rank: int  # this process, by its place in `members`
    members: tuple[int, ...]  # the global ranks

    def summed(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all ranks of each number, mod 2**64."""
        mine = self._tensor(numbers)
        dist.all_reduce(mine, group=self.group)
        return mine.tolist()

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank, which must have equally many."""
        mine = self._tensor(numbers)
        parts = [mine.clone() for _ in self.members]
        dist.all_gather(parts, mine, group=self.group)
        return [part.tolist() for part in parts]

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        signed = [number - 2**64 if number >= 2**63 else number for number in numbers]
        return torch.tensor(signed, dtype=torch.int64, device=_device(self.group))

    def is_there(self) -> bool:
        """Whether the group can still be used."""
        return ranks_of(self.group) == self


def ranks_of(group: Any) -> Ranks | str:
    """The ranks of a process group, all of them if None; or why there is nothing to compare."""
    if not dist.is_available() or not dist.is_initialized():
        return "torch.distributed is not initialised"
    if dist.group.WORLD is _inherited:
        return "torch.distributed belongs to the parent of this forked process"
    rank = dist.get_rank(group)
    if rank < 0:
        return "this rank is not in the group"
    members = tuple(dist.get_process_group_ranks(group))
    return Ranks(group, rank, members) if len(members) > 1 else "the group has one rank only"


def _device(group: Any) -> torch.device:
    """A device whose tensors the group's backend can exchange; the CPU if it can."""
    kinds = [part.partition(":")[0] for part in str(dist.get_backend_config(group)).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


@in_child
def _forget_parent() -> None:
    global _inherited
    _inherited = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
