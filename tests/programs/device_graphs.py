"""What hooks see of CUDA graphs, on a stand-in for a GPU: `python device_graphs.py CASE` prints it as JSON."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import toy_device
from torch import Tensor, nn

from opintercept import hooks, intercept, runs
from opintercept._values import late

Step = Callable[[], Tensor]


def program(device: str, *, trains: bool) -> tuple[Tensor, Step]:
    """A static input, and a step that computes with it."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False), nn.ReLU(), nn.Linear(8, 4, dtype=torch.float32)
    ).to(device)
    x, one = torch.zeros(6, 8).to(device), torch.ones(()).to(device)

    def infer() -> Tensor:
        with torch.no_grad():
            return torch.softmax(net(x).add_(1), -1)

    def train() -> Tensor:
        net.zero_grad()
        loss: Tensor = net(x).square().mean()
        loss.backward(one)
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        return loss

    return x, train if trains else infer


def batches() -> list[Tensor]:
    torch.manual_seed(1)
    found = [torch.randn(6, 8) for _ in range(4)]
    found[2][1, 3] = torch.nan
    return found


class Results:
    """What each of the hooks that see replays has found."""

    def __init__(self, folder: str) -> None:
        self.recorder = hooks.Recorder()
        self.stats = hooks.Stats(("lhs", "rhs", "output"), for_dtype=torch.float16)
        self.nonfinite = hooks.NonFinite(action="record")
        self.run = runs.RunRecorder(f"{folder}/run")

    def found(self) -> Any:
        kinds: dict[int | None, str] = {
            record.index: f"{record.op} {record.module}" for record in self.recorder.records
        }
        records = [r for r in self.recorder.records if r.replayed is not None or "toy" not in str(r)]
        calls = [call for call in runs.open_run(self.run.path).calls() if not call.record.op.startswith("toy::")]
        return {
            "records": [(r.op, r.module, r.phase, kinds.get(r.forward), r.grad_of, r.step) for r in records],
            "stats": [
                (r.module, r.op, r.operand, r.phase, r.calls, r.nan, r.min, r.max, f"{r.rms:.9g}", r.underflow)
                for r in self.stats.rows()
            ],
            "findings": [(f.record.op, f.record.module, f.record.step, f.kind) for f in self.nonfinite.findings],
            "calls": [
                (c.record.op, c.record.phase, c.record.step, {role: v.hash for role, v in c.values.items()})
                for c in calls
            ],
            "replayed": [c.record.replayed for c in calls] == [r.replayed for r in records[-len(calls) :]],
        }


def findings(device: str, *, trains: bool, **options: Any) -> Any:
    """What hooks find in steps that a graph repeats, or on the CPU in steps that run."""
    (x, step), inputs = program(device, trains=trains), batches()
    with tempfile.TemporaryDirectory() as folder:
        results = Results(folder)
        with intercept([*vars(results).values()], **options) as watch:
            graph, losses = toy_device.Graph(), []
            if device == "toy":
                with toy_device.capturing(graph):
                    output = step()
            for batch in inputs:
                with watch.paused():
                    x.copy_(batch)
                if device == "toy":
                    graph.replay()
                else:
                    output = step()
                with watch.paused():
                    losses.append(output.detach().cpu().flatten().tolist())
                watch.step()
        return {"losses": str(losses), "opaque": watch.opaque, **results.found()}


def replays(trains: bool) -> Any:
    """What is found on the device by each engine, and on the CPU."""
    found = {}
    for engine in ("kernel", "compiled", "mode"):
        for ops in ("matmul", "all"):
            made = [findings(d, trains=trains, engine=engine, ops=ops, graphs=d == "toy") for d in ("toy", "cpu")]
            found[f"{engine}, {ops}"] = made
    return found


class Broken:
    """A hook that fails at the second call of each replay."""

    def __init__(self) -> None:
        self.calls = 0

    def post(self, call: Any) -> None: ...

    def replayed(self, note: Any, values: list[Any]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("no more")


def edges() -> Any:
    """How replays are seen without values, after the block, of other blocks, by hooks that fail, and after an error."""
    _, step = program("toy", trains=False)
    found: dict[str, Any] = {}

    def graph(step: Step = step) -> tuple[toy_device.Graph, int]:
        made = toy_device.Graph()
        toy_device.counts()
        with toy_device.capturing(made):
            step()
        return made, toy_device.counts().launches

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plain, launches = graph()
        recorder, stats = hooks.Recorder(), hooks.Stats()
        with intercept([recorder, stats], ops=("matmul", "softmax")) as watch:
            made, added = graph()
            made.replay()
            made.replay()
        found["without values"] = [r.replayed for r in recorder.records], stats.rows(), added - launches, watch.opaque
        made.replay()  # after the block
        with watch:
            plain.replay()
        found["unseen"] = watch.opaque, len(recorder.records)
        found["told"] = [str(each.message).partition(",")[0] for each in told]

    with intercept(stats := hooks.Stats(), graphs=True) as watch:
        with watch.paused():
            graph()
        kept, _ = graph()
        kept.replay()
    rows = stats.rows()[0].calls
    del watch
    gc.collect()
    kept.replay()  # the graph still writes what its readers find
    found["after the block"] = rows, stats.rows()[0].calls

    broken, log = Broken(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(log):
        warnings.simplefilter("ignore")
        with intercept([broken, recorder := hooks.Recorder()], on_error="warn"):
            made, _ = graph()
            made.replay()
            made.replay()
    found["broken"] = broken.calls, len(recorder.records)

    def fails() -> Tensor:
        step()
        raise KeyError

    with intercept(hooks.Stats(), graphs=True) as watch:
        with contextlib.suppress(KeyError):
            graph(fails)
        with contextlib.suppress(RuntimeError):
            kept.capture_begin()  # once more, which torch refuses
        hooked = len(watch.watcher.pipeline.hooks)
        unfinished = toy_device.Graph()
        unfinished.capture_begin()
    unfinished.capture_end()
    found["no room"] = {}
    whole, spare = late.ROOM, late.SPARE

    def filling() -> Tensor:
        made = step()
        torch.ops.toy.limit(0)
        return made

    for case, room, memory, captured in (
        ("memory", whole, whole, step),
        ("table", late.SPARE + 1, -1, step),
        ("end", whole, -1, filling),
        ("call", 1, -1, step),
    ):
        late.ROOM, late.SPARE = room, min(spare, room - 1)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with intercept([stats := hooks.Stats(), recorder := hooks.Recorder()], graphs=True):
                torch.ops.toy.limit(memory)  # in bytes; the table takes eight times as many
                made, _ = graph(captured)
                torch.ops.toy.limit(-1)
                made.replay()
        late.ROOM, late.SPARE = whole, spare
        texts = [str(each.message).partition(";")[0] for each in told]
        found["no room"][case] = sum(row.calls for row in stats.rows()), len(recorder.records), texts
    found["left"] = hooked, len(watch.watcher.pipeline.hooks), len(late.captures)
    return found


CASES: dict[str, Callable[[], Any]] = {
    "infer": lambda: replays(False),
    "train": lambda: replays(True),
    "edges": edges,
}

if __name__ == "__main__":
    faulthandler.enable()
    toy_device.take_for_cuda()
    print(json.dumps(CASES[sys.argv[1]]()))
