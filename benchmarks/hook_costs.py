"""The cost of each ready-made hook on products large enough that reading values matters."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks._timing import Make, Row, compare
from benchmarks.operators import compiled, no_op
from opintercept import OpCall, hooks, intercept


def _sum(call: OpCall) -> None:
    """Do the least that reads every value."""
    torch.sum(call.output)


_sum.reads = ()  # type: ignore[attr-defined]


class _Writer:
    def log(self, values: dict[str, Any], step: int) -> None:
        """Discard the values."""


CONFIGURATIONS: dict[str, Make] = {
    "plain": nullcontext,
    "no-op hook": lambda: intercept(no_op),
    "one sum over the output": lambda: intercept(_sum),
    "Recorder": lambda: intercept(hooks.Recorder()),
    "Profile": lambda: intercept(hooks.Profile()),
    "NonFinite": lambda: intercept(hooks.NonFinite()),
    "Stats": lambda: intercept(hooks.Stats()),
    "Stats of all operands": lambda: intercept(hooks.Stats(("lhs", "rhs", "output"))),
    "Stats with histogram": lambda: intercept(hooks.Stats(histogram=True)),
    "Scalars": lambda: intercept(hooks.Scalars(_Writer())),
    "Capture": lambda: intercept(hooks.Capture()),
    "Print": lambda: intercept(hooks.Print(io.StringIO())),
    "Reference": lambda: intercept(hooks.Reference()),
    "Checksum": lambda: intercept(hooks.Checksum()),
    "Checksum of one call in 100": lambda: intercept(hooks.Checksum(every_calls=100)),
    "BitFlip": lambda: intercept(hooks.BitFlip()),
    "FakeQuantize": lambda: intercept(hooks.FakeQuantize()),
}


def run(smoke: bool) -> list[Row]:
    """Time a product of 512x512 under every hook, and one of 4096x4096 under `Stats` and `Checksum` in two dtypes."""
    size = 64 if smoke else 512
    a, b = torch.randn(size, size), torch.randn(size, size)
    found = compare(
        "hook_costs",
        f"mm {size}x{size} float32",
        lambda: torch.mm(a, b),
        CONFIGURATIONS,
        rounds=1 if smoke else 15,
        check=False,  # some change the product
    )
    size = 128 if smoke else 4096
    names = ("plain", "one sum over the output", "NonFinite", "Stats", "Checksum")
    in_c = compiled({"Checksum": lambda: intercept(hooks.Checksum(), engine="compiled")})
    for dtype in (torch.float32, torch.bfloat16):
        x, y = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        found += compare(
            "hook_costs",
            f"mm {size}x{size} {str(dtype).removeprefix('torch.')}",
            lambda x=x, y=y: torch.mm(x, y),  # type: ignore[misc]
            {name: CONFIGURATIONS[name] for name in names} | in_c,
            rounds=1 if smoke else 5,
            bounds={"Stats": ("plain", 1.05)}
            | dict.fromkeys(("Checksum", *in_c), ("plain", 1.03 if dtype == torch.float32 else 1.08)),
        )
    return found
