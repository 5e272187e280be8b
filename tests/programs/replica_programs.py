"""Programs that a rank runs under `Replicas`; tests/hooks/test_replicas.py starts the ranks.

`python replica_programs.py FOLDER RANK SIZE PROGRAM...` writes what each program returns to `FOLDER/RANK.json`.
"""

from __future__ import annotations

import copy
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opintercept import OpCall, OpInterceptError, hooks, intercept

STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.down(self.up(x).relu())) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        from torch.utils.checkpoint import checkpoint

        x = self.blocks[0](x)
        return self.head(checkpoint(self.blocks[1], x, use_reentrant=False))


def flip(weight: Tensor, bit: int = 0) -> None:
    """Flip one bit of one element."""
    weight.detach().view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << bit)


def train(
    watch: Any,
    *,
    wrapped: bool = True,
    same_data: bool = False,
    autocast: bool = False,
    before: Callable[[int, Net], Any] = lambda step, model: None,
) -> list[Tensor]:
    """Train a model on data of this rank's own, and return its losses and parameters."""
    torch.manual_seed(3)
    model = Net()
    parallel = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(4 if same_data else 4 + dist.get_rank())
    losses = []
    with watch:
        for step in range(STEPS):
            before(step, model)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = parallel(torch.randn(6, 8)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            watch.step()
    return [*losses, *(p.detach() for p in model.parameters())]


def said(replicas: hooks.Replicas) -> dict[str, Any]:
    return {
        "findings": [dataclasses.astuple(finding) for finding in replicas.findings],
        "text": str(replicas),
        "compared": replicas.compared,
        "expected": replicas.expected,
    }


def watched(options: dict[str, Any] | None = None, hook: Any = None, **program: Any) -> dict[str, Any]:
    """Train under a hook that records, and return what it says."""
    replicas = hooks.Replicas(**{"action": "record", **(options or {})})
    train(intercept([*([hook] if hook else []), replicas]), **program)
    return said(replicas)


def at(rank: int, when: int, change: Callable[[Net], Any]) -> Callable[[int, Net], None]:
    """Change the model of one rank before one step."""

    def before(step: int, model: Net) -> None:
        if (dist.get_rank(), step) == (rank, when):
            change(model)

    return before


def flipped(rank: int = 1, step: int = 3, bit: int = 0) -> Callable[[int, Net], None]:
    return at(rank, step, lambda model: flip(model.get_submodule("blocks.1.down").get_parameter("weight"), bit))


def healthy() -> Any:
    """Train without and with the hook in several ways, and say whether results and calls are the same."""
    found = {}
    for name, program, options in (
        ("ddp", {}, {}),
        ("autocast", {"autocast": True}, {}),
        ("function", {}, {"level": "function"}),
        ("mode", {}, {"engine": "mode"}),
        ("everything", {}, {"engine": "mode", "ops": "all"}),
        ("threads", {}, {"threads": "all"}),
    ):
        alone, recorder = hooks.Recorder(), hooks.Recorder()
        bare = train(intercept(alone, **options), **program)  # type: ignore[arg-type]
        replicas = hooks.Replicas()
        seen = train(intercept([replicas, hooks.Checksum(action="record"), recorder], **options), **program)  # type: ignore[arg-type]
        equal = all(torch.equal(one, other) for one, other in zip(bare, seen, strict=True))
        same = [str(record) for record in alone.records] == [str(record) for record in recorder.records]
        found[name] = {**said(replicas), "equal": equal, "same": same}
    return found


class Nudge:
    """Moves the output of a module on one rank, from one step on."""

    reads = ("module",)

    def __init__(self, rank: int, step: int) -> None:
        self.here, self.step = dist.get_rank() == rank, step

    def post(self, call: OpCall) -> Tensor | None:
        if not self.here or call.step < self.step or call.phase != "forward" or call.module != "blocks.0.up":
            return None
        output: Tensor = call.output.clone()
        output[0, 0] = 3.0
        return output


class Normed(nn.Module):
    """A model with parameters that no product reads, and with statistics of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.batch = nn.Embedding(16, 8), nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.batch(self.norm(self.table(x))))


def unread() -> Any:
    """Parameters that no product reads diverge on one rank; another model with the same names runs on one rank only."""
    found = {}
    for name in ("healthy", "norm", "table", "buffer", "autocast", "other model", "filtered"):
        torch.manual_seed(3)
        model, other = Normed(), [Normed()]
        parallel = DistributedDataParallel(model)
        scale = torch.tensor([1.0, 2.0])
        model.register_buffer("scale", scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        torch.manual_seed(4 + dist.get_rank())
        replicas = hooks.Replicas(modules="head" if name == "filtered" else None, of="weights", action="record")
        if name == "buffer":
            replicas = hooks.Replicas(action="record")
        with intercept(replicas, engine="mode" if name == "table" else "auto") as watch:
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                    parallel(torch.randint(16, (6,))).float().square().mean().backward()
                optimizer.step()
                scale.add_(1)
                if step == 3 and dist.get_rank() == 1:
                    flips = {"norm": model.norm.weight, "table": model.table.weight, "filtered": model.norm.weight}
                    flips |= {"autocast": model.norm.bias}
                    if name in flips:
                        flip(flips[name])
                    if name == "buffer":
                        scale.add_(1)
                if name == "other model" and step == 2 and dist.get_rank() == 1:
                    with intercept(hooks.Recorder()):  # which gives it plain names
                        other[0](torch.randint(16, (6,)))
                watch.step()
        found[name] = said(replicas)
    return found


def uneven() -> Any:
    """Rank 1 skips a step's calls, and makes calls of its own."""
    x = torch.randn(5, 5)

    def before(step: int, model: Net) -> None:
        if dist.get_rank() == 1:
            for _ in range(step):
                x @ x.T
            model.head(torch.randn(2, 8))
        flipped()(step, model)

    return watched(before=before)


def raised() -> Any:
    replicas = hooks.Replicas()
    try:
        train(intercept(replicas), before=flipped())
    except OpInterceptError as error:
        return {**said(replicas), "error": str(error)}
    return None


def warned() -> Any:
    def before(step: int, model: Net) -> None:
        if dist.get_rank() == 1 and step >= 3:
            for parameter in model.head.parameters():
                parameter.data.add_(1e-3 * step)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = watched({"action": "warn"}, before=before)
    return {**found, "warnings": [str(each.message) for each in caught]}


def named() -> Any:
    """Modules that are named must be equal from the first step on, activations included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return {
            "weights": watched({"modules": ["head", "*.up"], "of": "weights"}, before=flipped(step=0)),
            "others": watched({"modules": "*.down", "of": "weights"}, before=flipped(step=0)),
            "activations": watched({"modules": "head"}),
            "nothing": watched({"modules": "blocks"}),
            "warnings": [str(each.message) for each in caught],
        }


def constants() -> Any:
    """Shards that are zero on both ranks at first, and inputs that are ones."""
    torch.manual_seed(dist.get_rank())
    lora = [torch.randn(8, 2), torch.zeros(2, 8)]
    shard = nn.Parameter(torch.zeros(8, 8))
    replicas = hooks.Replicas(action="record")
    with intercept(replicas) as watch:
        for step in range(STEPS):
            torch.ones(3, 8) @ shard
            torch.randn(3, 8) @ lora[0] @ lora[1]
            if step:
                torch.randn(3, 8) @ torch.ones(8, 8)
            shard.data.add_(torch.randn(8, 8))
            lora[1] += torch.randn(2, 8)
            watch.step()
    return said(replicas)


def frozen() -> Any:
    """Weights without a gradient that torch has written to are hashed again."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).requires_grad_(False)
    replicas = hooks.Replicas(action="record")
    with intercept(replicas) as watch:
        for step in range(STEPS):
            if step == 3 and dist.get_rank() == 1:
                layer.weight[0, 0] = torch.nextafter(layer.weight[0, 0], torch.tensor(9.0))
            layer(torch.randn(2, 8))
            watch.step()
    return said(replicas)


def out_of_step() -> Any:
    """Rank 1 leaves a block with an exception, which the program catches."""
    replicas = hooks.Replicas()
    x = torch.ones(3, 3)
    try:
        for number in range(2):
            try:
                with intercept(replicas):
                    x @ x
                    if dist.get_rank() == 1 and not number:
                        raise KeyError("a broken batch")
            except KeyError:
                pass
    except OpInterceptError as error:
        return str(error)
    return None


def copied() -> Any:
    """Rank 1 goes on with a copy of its hook, which has learned nothing."""
    replicas = hooks.Replicas(action="record")
    train(intercept(replicas))
    if dist.get_rank() == 1:
        replicas = copy.deepcopy(replicas)
    train(intercept(replicas), before=flipped())
    return said(replicas)


def forked() -> Any:
    """A forked child compares nothing."""
    replicas = hooks.Replicas()
    layer = nn.Linear(3, 3)
    with intercept(replicas):
        child = os.fork()
        if not child:
            signal.alarm(30)  # ends it
            with intercept(replicas) as watch:
                layer(torch.ones(2, 3))
                watch.step()
            os._exit(0 if "belongs to the parent" in str(replicas) else 3)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def late() -> Any:
    """A program that leaves the process group before the block."""
    replicas = hooks.Replicas(action="record", group=dist.new_group([0]))
    with intercept(replicas):
        torch.ones(3, 3) @ torch.ones(3, 3)
    alone = str(replicas)
    replicas = hooks.Replicas()
    with intercept(replicas) as watch:
        torch.ones(3, 3) @ torch.ones(3, 3)
        watch.step()
        dist.barrier()
        dist.destroy_process_group()
    return alone, str(replicas)


def grid() -> Any:
    """Four ranks, of which two hold each half of the model, and two see each half of the data."""
    rank = dist.get_rank()
    part, replica = rank % 2, rank // 2
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(10 + part)
    up, down = nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False)
    model = nn.ModuleDict({"up": up, "down": down})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(20 + replica)
    everywhere = hooks.Replicas(action="record")
    of_data = hooks.Replicas(action="record", group=data[part], of="weights")
    with intercept([everywhere, of_data]) as watch:
        for step in range(STEPS):
            if (rank, step) == (3, 4):
                flip(down.weight)
            x = torch.randn(5, 8)
            optimizer.zero_grad()
            y = down(up(x).relu())
            total = y.detach().clone()
            dist.all_reduce(total, group=halves[replica])
            y.backward(total / 8)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=data[part])
            optimizer.step()
            watch.step()
    return {"everywhere": said(everywhere), "of data": said(of_data)}


def failing() -> Any:
    """Rank 1 raises in the third step."""

    def fail(model: Net) -> None:
        raise KeyError("a broken batch")

    train(intercept(hooks.Replicas(action="record")), before=at(1, 2, fail))


PROGRAMS: dict[str, Callable[[], Any]] = {
    "healthy": healthy,
    "flipped": lambda: watched(before=flipped()),
    "flipped under autocast": lambda: watched(autocast=True, before=flipped(bit=20)),  # bfloat16 drops bits below 16
    "every other step": lambda: watched({"every_steps": 2}, before=flipped()),
    "not synchronised": lambda: watched(wrapped=False),
    "activation": lambda: watched(hook=Nudge(1, 4), wrapped=False, same_data=True),
    "uneven": uneven,
    "unread": unread,
    "raised": raised,
    "warned": warned,
    "named": named,
    "constants": constants,
    "frozen": frozen,
    "copied": copied,
    "forked": forked,
    "grid": grid,
    "failing": failing,
    "out of step": out_of_step,
    "late": late,
}


def main(folder: str, rank: int, size: int, names: list[str]) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    found = {name: PROGRAMS[name]() for name in names}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
