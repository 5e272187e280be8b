"""What hooks find on a stand-in for a GPU, beside what they find on the CPU.

`python device_hooks.py [--late] [--launch] NAME...` prints as JSON where they differ. The device comes first in each
case. With `--late` the device passes for CUDA, and copies arrive late. With `--launch` kernels in C++ note the calls,
and values are read in one launch.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import toy_device
from torch import Tensor, nn

from opintercept import hooks, intercept, runs

Made = tuple[Any, Callable[[Any], Any]]  # a hook, and what it has found
ENGINE: Any = "compiled" if "--launch" in sys.argv else "kernel"


class Net(nn.Module):
    """A linear layer, eager attention and a product of transposed matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(24, 24), Attention()
        self.weight = nn.Parameter(torch.randn(24, 24).to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first(x).relu().view(2, 40, 24))
        product: Tensor = attended.to(torch.bfloat16) @ self.weight.mT
        return product.float()


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.softmax(x @ x.mT / 4, -1) @ x


def program(device: str, hook: Any, step: Callable[[Tensor], Tensor] = lambda x: x, **options: Any) -> list[Tensor]:
    """Train for three steps; return the weights."""
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with intercept(hook, engine=ENGINE, **options) as interceptor:
        for _ in range(3):
            loss = net(step(torch.randn(80, 24).to(device))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            interceptor.step()
    return [weight.detach() for weight in net.parameters()]


def broken(x: Tensor) -> Tensor:
    """Values that make others NaN."""
    x[3, 5], x[4, 4] = math.inf, math.nan
    return x


def plain(value: Any) -> Any:
    """Anything as lists, numbers and text, without the device."""
    if isinstance(value, Tensor):
        return [str(value.dtype), str(tuple(value.shape)), value.detach().double().reshape(-1).tolist()]
    if dataclasses.is_dataclass(value):
        names = {each.name for each in dataclasses.fields(value)} - {"started", "elapsed", "thread"}
        return [plain(getattr(value, name)) for name in sorted(names)]
    if isinstance(value, dict):
        return [[str(key), plain(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (int, float)) else str(value).replace("@toy:0", "").replace("toy:0", "cpu")


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two plain values differ, but for the rounding of sums in float32."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        found = [differences(a, b, f"{place}.{n}") for n, (a, b) in enumerate(zip(one, other, strict=True))]
        return [line for lines in found for line in lines]
    if isinstance(one, float) and isinstance(other, float):
        alike = math.isclose(one, other, rel_tol=2e-5, abs_tol=1e-6) or (one != one and other != other)
    else:
        alike = one == other
    return [] if alike else [f"{place}: {one!r:.200} on the device, {other!r:.200} on the CPU"]


def of_run(tensors: Any, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        folder = tempfile.TemporaryDirectory()
        hook = runs.RunRecorder(f"{folder.name}/run", tensors, **options)

        def found(_: Any) -> Any:
            run = runs.open_run(hook.path)
            calls = sorted(run.calls(), key=lambda call: call.record.index)
            kept = [[run.tensor(call, role) for role in call.tensors] for call in calls] if tensors == "full" else []
            found = [plain(call.record) for call in calls], [call.values for call in calls], kept
            folder.cleanup()
            return found

        return hook, found

    return make


class Corrupt:
    """Changes one element of one output."""

    def post(self, call: Any) -> Tensor | None:
        if call.index != 2:
            return None
        output: Tensor = call.output.clone()
        output[0, 1, 2] += 50
        return output


def checked() -> Made:
    checksum = hooks.Checksum(action="record")

    def found(_: Any) -> Any:  # a device does not find out whether an operator repeats what it did
        findings = [dataclasses.replace(finding, repeats=None) for finding in checksum.findings]
        return findings, checksum.checked, checksum.skipped

    return [Corrupt(), checksum], found


HOOKS: dict[str, Callable[[], Made]] = {
    "Recorder": lambda: (hooks.Recorder(), lambda hook: hook.records),
    "Stats": lambda: (
        hooks.Stats(("lhs", "rhs", "bias", "output"), for_dtype=torch.float16, histogram=True),
        lambda hook: [hook.rows(), hook.histogram("first")],
    ),
    "Stats, channels": lambda: (
        hooks.when(hooks.Stats(channels="lhs"), module="first", phase="forward"),
        lambda filtered: filtered.hook.channels("first"),
    ),
    "NonFinite": lambda: (hooks.NonFinite(action="record"), lambda hook: [hook.findings, hook.passed_on]),
    "NonFinite, later": lambda: (
        hooks.NonFinite(action="record", inf=True, check_every=7),
        lambda hook: [hook.findings, hook.passed_on],
    ),
    "Print": lambda: (hooks.Print(file=io.StringIO()), lambda hook: hook.file.getvalue()),
    "Capture": lambda: (hooks.Capture(of=("lhs", "output")), lambda hook: [entry.tensor for entry in hook.entries]),
    "AttentionWeights": lambda: (
        hooks.AttentionWeights(rows=(0, 5, -1)),
        lambda hook: [[c.module, c.heads, c.rows, c.dropout, c.values] for c in hook.calls],
    ),
    "Gradients": lambda: (hooks.Gradients(), lambda hook: [[e.operand, e.module, e.value] for e in hook.entries]),
    "Reference": lambda: (hooks.Reference(), lambda hook: [hook.rows(), hook.skipped]),
    "FakeQuantize": lambda: (hooks.FakeQuantize(torch.int8, of=("lhs", "rhs")), lambda hook: []),
    "BitFlip": lambda: (hooks.BitFlip(1, seed=3), lambda hook: hook.log),
    "Checksum": checked,
    "RunRecorder, stats": of_run("stats"),
    "RunRecorder, sample": of_run("sample"),
    "RunRecorder, full": of_run("full"),
}


def compare(name: str, step: Callable[[Tensor], Tensor], **options: Any) -> list[str]:
    """How a hook's results, and the program's, differ between the device and the CPU."""
    both = []
    for device in ("toy", "cpu"):
        hook, found = HOOKS[name]()
        weights = program(device, hook, step, **options)
        both.append([plain(found(hook)), plain(weights)])  # in this order, as to read the weights waits
    assert both[0][0] or name == "FakeQuantize", "the hook has found nothing"
    return differences(both[0], both[1])


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    if "--launch" in sys.argv:
        toy_device.use_driver()
    if "--late" in sys.argv:
        toy_device.take_for_cuda()
    results = {}
    for name in sys.argv[1:]:
        if not name.startswith("--"):
            results[name] = compare(name, lambda x: x)
            if name not in ("AttentionWeights", "Reference", "Checksum", "BitFlip", "FakeQuantize"):
                results[f"{name}, broken"] = compare(name, broken)
    print(json.dumps({name: lines[:9] for name, lines in results.items()}))
