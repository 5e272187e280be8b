"""Which forward calls read a weight again on a stand-in for a GPU, and whether hooks find what they find on the CPU.

`python device_weights.py` prints for each hook, as JSON, the calls that read the weight, and what differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import fake_cuda
import torch
import toy_device
from device_hooks import Made, differences, of_run, plain
from torch import nn

from opintercept import hooks, intercept

HOOKS: dict[str, Callable[[], Made]] = {
    "Stats": lambda: (hooks.Stats(("lhs", "rhs", "output")), lambda hook: hook.rows()),
    "RunRecorder": of_run("stats"),
}


@torch.no_grad()
def program(device: str, make: Callable[[], Made]) -> tuple[Any, list[int]]:
    """What a hook finds in seven calls, before some of which the weight changes, and the calls that read it."""
    torch.manual_seed(0)
    layer, x = nn.Linear(1024, 600, bias=False).to(device), torch.randn(4, 1024).to(device)
    square = torch.randn(800, 800).to(device)
    hook, found = make()
    blocks = []
    with intercept(hook, engine="compiled"):
        for call in range(7):
            if call == 3:
                layer.weight.data.mul_(2)  # leaves the version of the parameter alone
            if call == 5:
                layer.weight[3, 5] = math.nan
            fake_cuda.driver().fake_blocks_that_read()
            layer(x)
            blocks.append(fake_cuda.driver().fake_blocks_that_read())
        for _ in range(3):
            square @ square  # one launch reads it twice
    return plain(found(hook)), [call for call, count in enumerate(blocks) if count > 8]  # x and the output have few


if __name__ == "__main__":
    toy_device.take_for_cuda()
    toy_device.use_driver()
    result = {}
    for name, make in HOOKS.items():
        there, read = program("toy", make)
        here, _ = program("cpu", make)
        result[name] = read, differences(there, here)
    print(json.dumps(result))
