"""Trainings that each rank records; tests/runs/ranks/test_diff.py starts the ranks.

`python recorded_ranks.py FOLDER RANK SIZE` records each training to a run in FOLDER.
"""

from __future__ import annotations

import faulthandler
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from replica_programs import Net, flip
from torch.nn.parallel import DistributedDataParallel

from opintercept import intercept, runs

STEPS = 12
FLIPPED = 7  # the step in which rank 2 begins with a weight of which one bit is another

TRAININGS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "autocast": {"autocast": True},
    "accumulated": {"batches": 3},
    "uneven": {"last": True},
    "flipped": {"flipped": True},
}


def train(path: str, *, autocast: bool = False, batches: int = 1, last: bool = False, flipped: bool = False) -> None:
    """Record a training with dropout on data of this rank's own.

    With `last`, the last batch has another size on each rank, and with `flipped`, a weight of rank 2 changes.
    """
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = Net()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(4 + rank)
    with intercept(runs.RunRecorder(path)) as watch:
        for step in range(STEPS):
            if flipped and (rank, step) == (2, FLIPPED):
                flip(model.get_parameter("blocks.1.down.weight"))
            size = 6 - rank if last and step == STEPS - 1 else 6
            for batch in range(batches):
                with nullcontext() if batch == batches - 1 else parallel.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = parallel(torch.randn(size, 8)).float().square().mean()
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()


def main(folder: str, rank: int, size: int) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    for name, options in TRAININGS.items():
        train(f"{folder}/{name}", **options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
