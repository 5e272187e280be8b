"""A small Llama whose layers several processes share; tests/runs/why/test_products.py starts the ranks.

`python parallel_llama.py FOLDER RANK SIZE` records one forward pass; `SIZE` 1 is a whole model.
"""

from __future__ import annotations

import faulthandler
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from opintercept import intercept, runs


def llama(seed: int = 0, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).train(False)


def main(folder: str, rank: int, size: int) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    torch.set_num_threads(1)
    model = llama()
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        mesh = init_device_mesh("cpu", (size,))
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        for layer in model.model.layers:
            plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
            plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
            parallelize_module(layer, mesh, plan)
    with torch.no_grad(), intercept(runs.RunRecorder(f"{folder}/{'parts' if size > 1 else 'whole'}", "full")):
        model(torch.arange(20).view(2, 10))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
