"""Trains on two ranks with and without interception; test_distributed.py starts it with torchrun.

Each rank trains twice from the same seed, and writes to `FOLDER/RANK.json` where the two differ and what was seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import programs
import torch
import torch.distributed as dist
from nets import Block, Model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from opintercept import hooks, intercept

STEPS = 3
ENGINES: dict[str, dict[str, Any]] = programs.ENGINES | {"all threads": {"threads": "all"}}


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model)


def compressing_hook(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return parallel


def multiplying_hook(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """PowerSGD multiplies matrices to compress a gradient, first in the backward pass and then in gloo's threads."""
    parallel = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1, random_seed=5)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return parallel


def fully_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def fully_sharded_1(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {f"blocks.{i}.{part}": style for i in (0, 1) for part, style in _STYLES.items()}
    return parallelize_module(model, mesh, plan)


_STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def distributed_tensors(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make every parameter a DTensor, sharded in its first dimension, in modules that do not know about it."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model


PROGRAMS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "unwrapped": lambda model, mesh: model,
    "DDP": data_parallel,
    "DDP, compressing hook": compressing_hook,
    "DDP, multiplying hook": multiplying_hook,
    "FSDP2": fully_sharded,
    "FSDP1": fully_sharded_1,
    "tensor parallel": tensor_parallel,
    "DTensor": distributed_tensors,
}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(program: str, mesh: DeviceMesh, watch: Callable[[], AbstractContextManager[Any]]) -> dict[str, Tensor]:
    """Train from a fixed seed. Only the last step runs under `watch`: by then all of torch's hooks do their work."""
    torch.manual_seed(3)
    model = PROGRAMS[program](Model(8, 4), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(4 if program in ("tensor parallel", "DTensor") else 4 + dist.get_rank())
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        x = torch.randn(6, 8)
        if program == "DTensor":
            x = distribute_tensor(x, mesh, [Replicate()])
        optimizer.zero_grad()
        with watch() if step == STEPS - 1 else nullcontext():
            output = model(x)
            loss = output.pow(2).sum()
            loss.backward()
        found[f"output {step}"] = _local(output).detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient {step} {name}"] = _local(parameter.grad).clone()
        optimizer.step()
    found |= {f"parameter {name}": _local(p).detach() for name, p in model.named_parameters()}
    found["random state"] = torch.get_rng_state()
    return found


def compare(program: str, engine: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Train without and with interception, and say what differs and what was seen."""
    recorder = hooks.Recorder()
    interceptor = intercept(recorder, **ENGINES[engine])
    watched = set(intercept().watcher.keys or ())
    profiler = programs.profiled()

    def watch() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(profiler)
        stack.enter_context(interceptor)
        return stack

    plain = train(program, mesh, nullcontext)
    found = train(program, mesh, watch)
    same = plain.keys() == found.keys()
    return {
        "compared": len(plain),
        "different": [name for name in plain if not same or not torch.equal(plain[name], found[name])],
        "profiled": programs.outermost(profiler.events(), watched),
        "calls": [(r.op, r.phase, r.module, r.forward) for r in recorder.records],
    }


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = torch._C._dispatch_dump_table("aten::mm")
    results = {program: {engine: compare(program, engine, mesh) for engine in ENGINES} for program in PROGRAMS}
    results["restored"] = torch._C._dispatch_dump_table("aten::mm") == before  # type: ignore[assignment]
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
