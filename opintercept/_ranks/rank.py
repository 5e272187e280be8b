"""The rank of this process, and how many its program has."""

from __future__ import annotations

import os

import torch


def rank_and_world_size() -> tuple[int, int]:
    """Those of the process group; before there is one, those that torchrun sets; `(0, 1)` without either."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (0, 1)
