"""Audits programs on a GPU, or on the CPU where there is none: `python audit_programs.py`.

Prints each audit and what is wrong with it: shares must add up, all kernels of a training step be seen, and those that
no block can see be named. A program that the machine cannot run is told with its traceback, and the others go on.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from opintercept import hooks, intercept

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What computes nothing and may be unseen: memory that is made, and detached tensors with kernels in Python.
NOTHING = {"aten::empty", "aten::empty_strided", "aten::detach", "aten::to", "aten::dropout"}


Case = tuple[str, hooks.Audit, Callable[[set[str]], bool]]
"""What is audited, the audit, and whether the names of what was not seen are right."""


def audited(program: Callable[[], object], ops: str = "all", warm: int = 2) -> hooks.Audit:
    """What an audit says of a program that has run before."""
    for _ in range(warm):
        program()
    audit = hooks.Audit()
    with intercept(audit, ops=ops):
        program()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    return audit


def _has_several(names: set[str]) -> bool:
    return len(names) > 1


def training() -> Iterator[Case]:
    """A training step, whose kernels are all seen."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 10, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()

    yield "training", audited(step), NOTHING.issuperset
    yield "training, products only", audited(step, "matmul"), _has_several


def copying() -> Iterator[Case]:
    """Copies to the device and back, and a wait for a value."""
    x = torch.ones(1000, 1000)

    def program() -> float:
        return x.to(DEVICE).sum().item()

    yield "copies", audited(program), NOTHING.issuperset


def compiled() -> Iterator[Case]:
    """A compiled graph: its kernels are seen, or named if the block watches products only."""

    def work(x: Tensor) -> Tensor:
        return (x @ x).relu().exp().sum(0)

    function = torch.compile(work)
    x = torch.rand(500, 500, device=DEVICE)
    yield "compiled", audited(lambda: function(x)), NOTHING.issuperset

    def named(names: set[str]) -> bool:
        return any(name.startswith(("triton_", "inductor::cpp_")) for name in names)

    yield "compiled, products only", audited(lambda: function(x), "matmul"), named


def foreign() -> Iterator[Case]:
    """A kernel that the program compiles and launches by itself, which no operator holds."""
    source = """
    extern "C" __global__ void foreign_scale(float* out, const float* in, int count) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i < count) out[i] = 2 * in[i];
    }"""
    kernel = torch.cuda._compile_kernel(source, "foreign_scale")
    x = torch.rand(100_000, device=DEVICE)
    out = torch.empty_like(x)

    def program() -> Tensor:
        kernel((400, 1, 1), (256, 1, 1), (out, x, x.numel()))
        return out.add(1)

    yield "foreign kernel", audited(program), lambda names: names - NOTHING == {"foreign_scale"}


def graphs() -> Iterator[Case]:
    """CUDA graphs: captured in the block, and before it."""
    x = torch.rand(300, 300, device=DEVICE)

    def work() -> Tensor:
        return (x @ x).relu()

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    before = torch.cuda.CUDAGraph()
    with torch.cuda.graph(before):
        work()
    audit = hooks.Audit()
    with intercept(audit, ops="all"):
        before.replay()
        torch.cuda.synchronize()
    yield "graph of before", audit, _has_several
    audit = hooks.Audit()
    graph = torch.cuda.CUDAGraph()
    with intercept(audit, ops="all"):
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        torch.cuda.synchronize()
    yield "graph of the block", audit, NOTHING.issuperset


def main() -> int:
    """Audit all programs, and return how many are wrong."""
    on_gpu = [foreign, graphs] if DEVICE == "cuda" else []
    bad, began = 0, time.time()
    torch._inductor.config.compile_threads = 1
    for programs in (training, copying, compiled, *on_gpu):
        try:
            for name, audit, fits in programs():
                rows = audit.rows()
                inside = (audit.share or 0) * audit.seconds
                adds_up = abs(inside + sum(row.seconds for row in rows) - audit.seconds) <= 1e-9 * audit.seconds
                fine = adds_up and audit.seconds > 0 and fits({row.name for row in rows})
                bad += not fine
                print(f"{'fine' if fine else 'WRONG'}: {name}, {time.time() - began:.0f} s\n{audit}\n", flush=True)
        except Exception:
            bad += 1
            print(f"FAILED: {programs.__name__}\n{traceback.format_exc()}", flush=True)
    print(f"{bad} wrong, torch {torch.__version__} on {DEVICE}")
    return bad


if __name__ == "__main__":
    sys.exit(main())
