"""Writes the run of a long training on many ranks: `python -m benchmarks.synthetic FOLDER --calls 1000000 --ranks 4`.

One step of a real training is recorded, and its records are repeated with other values: recording 10^8 calls would
take hours. Two runs written with the same options but `--parts-at` are equal up to that step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from opintercept import intercept, runs
from opintercept._native.layout import FIGURES, SLOTS
from opintercept.runs.store.records import CALL, CALLS, SHARED_TEXTS, TENSOR, TENSORS, Array, seal
from opintercept.runs.store.run import INFO

_PARTED = 0x5555_5555_5555_5555  # changes a hash
_STEP_NS = 1_000_000_000


def _record(folder: Path, layers: int) -> tuple[Array, Array]:
    """Record one step of four batches, and return its calls and its tensors."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with intercept(runs.RunRecorder(folder, tensors="stats")):
        for _ in range(4):
            model(torch.randn(2, 4, 16)).sum().backward()
    calls, tensors = np.fromfile(folder / CALLS, CALL), np.fromfile(folder / TENSORS, TENSOR)
    assert not calls["has"].any(), "the texts of calls are not repeated"
    return calls, tensors


def _step(calls: Array, tensors: Array, weights: Array, step: int, rank: int, parts_at: int | None) -> tuple[Any, Any]:
    """The records of a step: those of one step with other hashes and figures."""
    calls, tensors = calls.copy(), tensors.copy()
    count = len(calls)
    calls["index"] += step * count
    calls["forward"][calls["forward"] >= 0] += step * count
    calls["step"] = step
    calls["started"] += step * _STEP_NS
    noise = np.random.default_rng((step, rank))
    calls["elapsed"] *= noise.uniform(0.9, 1.5, count)
    for slot in SLOTS:
        calls[slot] += np.where(calls[slot] > 0, step * len(tensors), 0).astype(np.uint32)
    seed = np.uint64(np.random.SeedSequence((step, rank)).generate_state(1, np.uint64)[0])
    tensors["hash"] ^= np.where(weights, np.uint64(step), seed)  # the ranks share the weights
    factor = np.where(weights, 1.0, 1 + noise.standard_normal(len(tensors)) / 8)
    if parts_at is not None and step >= parts_at:
        tensors["hash"] ^= np.uint64(_PARTED)
        factor *= 1 + 1e-5 * (step - parts_at + 1)
    for name in FIGURES:
        tensors[name] *= factor
    return seal(calls), seal(tensors)


def _write(folder: Path, rank: int, ranks: int, steps: int, parts_at: int | None, one: Path, of: Any) -> None:
    folder.mkdir(parents=True)
    for name in SHARED_TEXTS:
        shutil.copy(one / name, folder)
    calls, tensors = of
    weights = np.zeros(len(tensors) + 1, bool)
    weights[np.concatenate([calls["rhs"], calls["bias"]])] = True
    with open(folder / CALLS, "wb") as to_calls, open(folder / TENSORS, "wb") as to_tensors:
        for step in range(steps):
            made = _step(calls, tensors, weights[1:], step, rank, parts_at)
            to_tensors.write(made[1].tobytes())
            to_calls.write(made[0].tobytes())
    plain = json.loads((one / INFO).read_text()) | {"rank": rank, "world_size": ranks}
    (folder / INFO).write_text(json.dumps(plain))


def main() -> None:
    """Write the run that the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--calls", type=int, default=1_000_000, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="how many processes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=180, help="of the model (default: %(default)s)")
    parser.add_argument("--parts-at", type=int, metavar="STEP", help="all values differ from this step on")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        one = Path(temporary) / "step"
        of = _record(one, arguments.layers)
        steps = max(1, round(arguments.calls / arguments.ranks / len(of[0])))
        for rank in range(arguments.ranks):
            folder = arguments.folder if arguments.ranks == 1 else arguments.folder / f"rank{rank}"
            _write(folder, rank, arguments.ranks, steps, arguments.parts_at, one, of)
    calls = steps * len(of[0]) * arguments.ranks
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*.bin"))
    seconds = time.perf_counter() - began
    print(f"{calls:,} calls in {steps} steps, {size / 1e9:.2f} GB, {size / calls:.1f} bytes a call, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
