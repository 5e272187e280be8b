"""What a hook adds to a call on a GPU, counted on a stand-in: `python tests/programs/device_costs.py` prints a table.

It is that of docs/cost.md: what hooks read of calls that kernels note in C++ is read in one launch. With `--json` it
prints the rows as data, those without such launches first, and what `tests/devices/test_costs.py` allows.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import toy_device
from torch import nn

from opintercept import hooks, intercept, runs

CALLS = 32
Hook = Callable[[str], Any]  # makes one that may write to a folder


class Row(NamedTuple):
    """What a hook adds to a call, on average, and at the end of a block of `CALLS` steps.

    A step has one forward call and one or two backward calls. Waits include copies that wait, and `.item()`.
    """

    hook: str
    forward: float  # launches
    backward: float
    waits: float
    items: float
    copies: float  # that do not wait
    bytes: float  # copied to the host
    waits_at_end: int


class Bound(NamedTuple):
    """The most launches and waits that a hook may add."""

    forward: float
    backward: float
    waits: float = 0
    waits_at_end: int = 0


def record(folder: str, tensors: Any, **options: Any) -> Any:
    return runs.RunRecorder(folder, tensors, **options)


def ignore(call: Any) -> None: ...


def run(tensors: Any, **options: Any) -> Hook:
    return partial(record, tensors=tensors, **options)


# A linear layer has four tensors in forward, and three in backward, of which the weight is not read again. A run copies
# what it has once a second, in a few launches, which are many beside those of the calls on a slow machine.
HOOKS: dict[str, tuple[Hook, Bound]] = {
    "no-op": (lambda _: ignore, Bound(0, 0)),
    "Recorder()": (lambda _: hooks.Recorder(), Bound(0, 0)),
    "Profile()": (lambda _: hooks.Profile(), Bound(0, 0)),
    "Stats()": (lambda _: hooks.Stats(), Bound(8, 8)),
    'Stats(("lhs", "rhs", "output"))': (lambda _: hooks.Stats(("lhs", "rhs", "output")), Bound(24, 24)),
    "NonFinite()": (lambda _: hooks.NonFinite(), Bound(2, 2, 1)),
    "NonFinite(check_every=1000)": (lambda _: hooks.NonFinite(check_every=1000), Bound(8, 6, 0, 1)),
    "Print()": (lambda _: hooks.Print(file=io.StringIO()), Bound(0, 0, 1)),
    'Capture(("lhs", "output"))': (lambda _: hooks.Capture(of=("lhs", "output")), Bound(0, 0)),
    "AttentionWeights()": (lambda _: hooks.AttentionWeights(), Bound(4, 0, 1 / 3)),
    "Reference()": (lambda _: hooks.Reference(), Bound(55, 55, 1)),
    "FakeQuantize(torch.int8)": (lambda _: hooks.FakeQuantize(torch.int8), Bound(20, 20)),
    "Checksum()": (lambda _: hooks.Checksum(), Bound(14, 18, 0, 1)),
    "Checksum(), new weights": (lambda _: hooks.Checksum(), Bound(20, 18, 0, 1)),
    "Checksum(), batches": (lambda _: hooks.Checksum(), Bound(20, 20, 0, 1)),
    "Checksum(), bfloat16": (lambda _: hooks.Checksum(), Bound(17, 20, 0, 1)),
    "Checksum(), bfloat16, new weights": (lambda _: hooks.Checksum(), Bound(25, 22, 0, 1)),
    "Checksum(), bfloat16, batches": (lambda _: hooks.Checksum(), Bound(24, 24, 0, 1)),
    'RunRecorder(path, "none")': (run("none"), Bound(0, 0)),
    'RunRecorder(path, "stats")': (run("stats"), Bound(36, 24)),
    'RunRecorder(path, "sample")': (run("sample"), Bound(42, 33)),
    'RunRecorder(path, "full")': (run("full"), Bound(36, 24)),
    'RunRecorder(path, "none", flight=64)': (run("none", flight=64), Bound(0, 0)),
    'RunRecorder(path, "stats", flight=64)': (run("stats", flight=64), Bound(36, 24)),
    "Stats(), fused attention": (lambda _: hooks.Stats(), Bound(8, 8)),
    "Stats(), convolution": (lambda _: hooks.Stats(), Bound(8, 8)),
    'RunRecorder(path, "stats"), fused attention': (run("stats"), Bound(45, 80)),
    'RunRecorder(path, "stats"), convolution': (run("stats"), Bound(36, 45)),
    'RunRecorder(path, "stats"), large': (run("stats"), Bound(44, 30)),
}


# The first calls, and the end of the block, wait for what has been launched.
NOTED, SHOWN, CHECKED = Bound(1.2, 1.5, 0.1, 1), Bound(8, 6, 0.1, 1), Bound(4.2, 4.2, 0.1, 1)


def bound_of_launches(name: str) -> Bound | None:
    """What a hook may add where one launch reads; None for hooks that do not read in launches.

    One for each call that is noted, and at most four for each product that is checked. The first calls, which hooks see
    in Python, take one for each tensor, as do all of which a run keeps tensors.
    """
    if name.startswith("Checksum"):
        return CHECKED
    if name.startswith(("Stats", "NonFinite()", 'RunRecorder(path, "stats"')):
        return NOTED
    return SHOWN if name.startswith(('RunRecorder(path, "sample"', 'RunRecorder(path, "full"')) else None


class New(nn.Linear):
    """A linear layer whose weight and bias are new in each call."""

    def forward(self, x: torch.Tensor) -> Any:
        weight, bias = (nn.Parameter(each.detach().to(x.dtype, copy=True)) for each in (self.weight, self.bias))
        return nn.functional.linear(x, weight, bias)


class Batches(nn.Module):
    """A product of two batches."""

    def forward(self, x: torch.Tensor) -> Any:
        return x @ x.mT


class Attention(nn.Module):
    """Attention of which the first product gives the scores."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.softmax(x @ x.mT, -1) @ x


class Fused(nn.Module):
    """Attention in one operator, which `scaled_dot_product_attention` does not choose for the stand-in."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.device.type != "toy":
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)[0]


class Convolution(nn.Conv2d):
    """A convolution, on the stand-in by the operator that the CPU has for it."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.device.type != "toy":
            return super().forward(x)
        return torch.ops.aten.thnn_conv2d(x, self.weight, self.kernel_size, self.bias)


class Program(NamedTuple):
    """What the calls are made by, its input's shape and dtype, the backward calls of a step, the operators to watch."""

    make: Callable[[], nn.Module] = lambda: nn.Linear(64, 64)
    shape: tuple[int, ...] = (32, 64)
    backward: int = 2
    ops: str = "matmul"
    dtype: torch.dtype = torch.float32


PROGRAMS = {
    "AttentionWeights": Program(Attention, (4, 32, 64)),
    "fused attention": Program(Fused, (2, 4, 32, 16), 1),
    "convolution": Program(lambda: Convolution(4, 8, 3), (2, 4, 16, 16), 1, "convolution"),
    "large": Program(lambda: nn.Linear(256, 256), (128, 256)),
    "new weights": Program(lambda: New(64, 64)),
    "batches": Program(Batches, (4, 32, 64)),
}
"""By a part of the names in `HOOKS`; the others have a linear layer."""


def program_of(name: str) -> Program:
    found = next((program for part, program in PROGRAMS.items() if part in name), Program())
    return found._replace(dtype=torch.bfloat16) if "bfloat16" in name else found


def added(make: Hook | None, folder: str, program: Program, engine: Any) -> tuple[toy_device.Counts, ...]:
    """What happens in `CALLS` forward calls, as many backward passes, and at the end of the block."""
    torch.manual_seed(0)  # by chance, `Checksum` may have to look at products
    model, x = program.make().to("toy", program.dtype), torch.randn(program.shape).to("toy", program.dtype)
    with intercept(make(folder), ops=program.ops, engine=engine) if make is not None else nullcontext():
        model(x.clone().requires_grad_()).sum().backward()
        toy_device.counts()
        outputs = [model(x.detach().requires_grad_()) for _ in range(CALLS)]
        forward = toy_device.counts()
        for output in outputs:
            output.backward(torch.ones_like(output))
        backward = toy_device.counts()
    return forward, backward, toy_device.counts()


def measure(name: str, engine: str = "kernel") -> Row:
    program = program_of(name)
    plain, calls = added(None, "", program, engine), (1 + program.backward) * CALLS
    with tempfile.TemporaryDirectory() as folder:
        found = added(HOOKS[name][0], f"{folder}/run", program, engine)
    forward, backward, end = (
        toy_device.Counts(*(a - b for a, b in zip(one, other, strict=True)))
        for one, other in zip(found, plain, strict=True)
    )
    block = toy_device.Counts(*(a + b for a, b in zip(forward, backward, strict=True)))
    return Row(
        name,
        forward.launches / CALLS,
        backward.launches / program.backward / CALLS,
        block.waits / calls,
        block.items / calls,
        (block.late + end.late) / calls,
        (block.bytes + end.bytes) / calls,
        end.waits,
    )


if __name__ == "__main__":
    toy_device.take_for_cuda()
    rows = {name: measure(name) for name in HOOKS}
    toy_device.use_driver()
    launched = {name: measure(name, "compiled") for name in HOOKS if bound_of_launches(name)}
    if "--json" in sys.argv:
        bounds = [(row, HOOKS[name][1]) for name, row in rows.items()]
        print(json.dumps(bounds + [(row, bound_of_launches(name)) for name, row in launched.items()]))
    else:
        print("| | launches, forward | backward | waits | `.item()` | late copies | bytes | waits at the end |")
        print("|---|---|---|---|---|---|---|---|")
        for row in (rows | launched).values():
            print(f"| `{row.hook}` | " + " | ".join(f"{number:.1f}".removesuffix(".0") for number in row[1:]) + " |")
