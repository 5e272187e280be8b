"""Writes the run of a long training on many ranks: `python -m benchmarks.synthetic FOLDER --calls 1000000 --ranks 4`.

One step of a real training is recorded, and its calls are repeated with other values, straight into columns: recording
10^8 calls would take hours. Two runs written with the same options but `--parts-at` are equal up to that step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from opintercept import intercept, runs
from opintercept.runs.store.builder import Builder, rounded
from opintercept.runs.store.columns import FIGURES, FLAGS, NUMBERS, SLOTS, Arrays, Columns
from opintercept.runs.store.parquet import StoreWriter
from opintercept.runs.store.run import COLUMNS, COMPACTED, INFO

_PARTED = 0x5555_5555_5555_5555  # changes a hash
_STEP_NS = 1_000_000_000


def _recorded(folder: Path, layers: int) -> runs.Run:
    """One step of four batches."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    with intercept(runs.RunRecorder(folder, tensors="stats")):
        for _ in range(4):
            model(torch.randn(2, 4, 16)).sum().backward()
    return runs.open_run(folder)


def _step(of: Arrays, step: int, rank: int, parts_at: int | None) -> Arrays:
    """The calls of a step: those of `of` with other hashes and figures."""
    calls = len(of["index"])
    made = {name: column.copy() for name, column in of.items()}
    made["index"] += step * calls
    made["forward"][of["forward"] >= 0] += step * calls
    made["step"][:] = step
    made["started"] += step * _STEP_NS
    seed = np.uint64(np.random.SeedSequence((step, rank)).generate_state(1, np.uint64)[0])
    noise = np.random.default_rng((step, rank))
    for slot in SLOTS:
        hashes = made[f"{slot}_hash"]
        known = hashes != 0
        weights = slot in ("rhs", "bias")  # the ranks share them
        hashes[known] ^= np.uint64(step) if weights else seed
        factor = 1.0 if weights else 1 + noise.standard_normal(calls) / 8
        if parts_at is not None and step >= parts_at:
            hashes[known] ^= np.uint64(_PARTED)
            factor = factor * (1 + 1e-5 * (step - parts_at + 1))
        for name in FIGURES:
            changed = made[f"{slot}_{name}"] * factor
            # The least and the greatest element are of the tensor's dtype.
            made[f"{slot}_{name}"] = changed.astype(np.float32) if name in ("min", "max") else rounded(changed)
    made["elapsed"] = np.rint(of["elapsed"] * 1e9 * noise.uniform(0.9, 1.5, calls)) / 1e9
    return made


def _write(
    folder: Path, rank: int, ranks: int, steps: int, parts_at: int | None, template: Columns, info: Path
) -> None:
    (folder / COLUMNS).mkdir(parents=True)
    builder = Builder(rank)
    writer = StoreWriter(folder / COLUMNS, rank, builder)
    of = template.read((*NUMBERS, *FLAGS), 0, len(template))
    signatures = [template.signature_text(number) for number in range(template.signatures)]
    call_sites = [template.call_site(number) for number in range(template.call_sites)]
    texts = list(template.texts(np.flatnonzero(np.any([of[flag] for flag in FLAGS], axis=0))))
    for step in range(steps):
        builder.texts += [text._replace(call=text.call + step * len(template)) for text in texts]
        builder.size += sum(len(part) for text in texts for part in text[1:] if part is not None)
        writer.add_columns(_step(of, step, rank, parts_at), *(() if step else (signatures, call_sites)))
    writer.close(skipped=0)
    plain = json.loads(info.read_text()) | {"schema": COMPACTED, "rank": rank, "world_size": ranks}
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
    with tempfile.TemporaryDirectory() as one:
        run = _recorded(Path(one) / "step", arguments.layers)
        template = run.columns(0)
        steps = max(1, round(arguments.calls / arguments.ranks / len(template)))
        for rank in range(arguments.ranks):
            folder = arguments.folder if arguments.ranks == 1 else arguments.folder / f"rank{rank}"
            _write(folder, rank, arguments.ranks, steps, arguments.parts_at, template, Path(one) / "step" / INFO)
    calls = steps * len(template) * arguments.ranks
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*.parquet"))
    seconds = time.perf_counter() - began
    print(f"{calls:,} calls in {steps} steps, {size / 1e9:.2f} GB, {size / calls:.1f} bytes a call, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
