"""What it takes to read a tensor's values: one pass in C++, and the operators of torch that hooks use without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks._timing import Row, rows
from opintercept import intercept
from opintercept._native import values
from opintercept._values import hash as _hash


def _five_passes(tensor: torch.Tensor) -> None:
    """Compute what `Stats` reports, as directly as torch allows."""
    low, high = torch.aminmax(tensor)
    _ = float(low), float(high)
    float(torch.linalg.vector_norm(tensor))
    float(tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float32 else None))
    int(torch.count_nonzero(tensor))


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch, five passes": _five_passes,
    "one pass": lambda tensor: values.read(tensor),
    "sum() alone": lambda tensor: float(tensor.sum()),
    "torch, range": lambda tensor: torch.stack(torch.aminmax(tensor)).tolist(),
    "range": lambda tensor: values.extent(tensor),
    "torch, hash": lambda tensor: int(_hash.hash_of(*_hash.bits_of(tensor))),
    "one pass with hash": lambda tensor: values.read(tensor, None, False, False, True),
}


def run(smoke: bool) -> list[Row]:
    """Read tensors of four sizes and two dtypes in all ways, which take turns."""
    with intercept((), engine="compiled"):
        pass  # builds the library if necessary
    found: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in (64, 1536, 61_440) if smoke else (64, 1536, 61_440, 1 << 24):
            tensor = torch.randn(count).to(dtype)
            times: dict[str, list[float]] = {name: [] for name in WAYS}
            number = 1 if smoke or count > 1 << 20 else 20
            for _ in range(2 if smoke else 25):
                for name, way in WAYS.items():
                    way(tensor)
                    started = time.perf_counter()
                    for _ in range(number):
                        way(tensor)
                    times[name].append((time.perf_counter() - started) / number)
            bounds = {"one pass": ("torch, five passes", 1 / 9)} if count == 61_440 else None
            found += rows("values", f"{count:,} values of {str(dtype).removeprefix('torch.')}", times, bounds)
    return found
