"""Compares models that torch.compile has compiled with the same ones under hooks: `python compiled_models.py llama -v`.

Results must be the same, bit for bit, and each launch of a generated kernel must be seen. On the CPU, launches are
counted by a profiler of Python, which sees the calls of C functions that wrappers make, without a block; on a GPU
(`--device cuda`), by torch's profiler, which sees the kernels of the device, also those of a graph that is replayed.
Prints each model with what differs, and says at the end how much was compared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import torch
from models import MODELS, MORE_MODELS, inputs_of
from torch import Tensor, nn

from opintercept import intercept, runs
from opintercept.hooks import NonFinite, Profile, Recorder, Stats

Run = Callable[[], list[Tensor]]
WRAPPERS = "torch._inductor.runtime.compile_tasks."  # the package of wrappers


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.of_one, self.of_two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Any:
        return (x + self.of_two(self.two(self.of_one(self.one(x)).relu()))).relu()


class ResNet(nn.Module):
    """Residual blocks with batch norms, whose statistics training updates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(Residual(8), Residual(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(nn.functional.max_pool2d(self.blocks(self.stem(x)), 2).mean((2, 3)))


class UNet(nn.Module):
    """Down with strides, up by interpolation, a jump between, group norms and a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.Conv2d(11, 8, 3, padding=1), nn.Conv2d(8, 3, 1)
        self.norm, self.time = nn.GroupNorm(2, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        step = torch.linspace(0, 1, 8, device=x.device).sin().expand(x.shape[0], 8)
        low = nn.functional.silu(self.norm(self.down(x)) + self.time(step)[:, :, None, None])
        high = nn.functional.interpolate(self.low(low), scale_factor=2.0, mode="nearest")
        return self.out(nn.functional.silu(self.up(torch.cat((x, high), 1))))


class Recurrent(nn.Module):
    """A gated cell, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.before, self.head = nn.Linear(6, 24), nn.Linear(12, 24, bias=False), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        state = x.new_zeros(x.shape[0], 12)
        for step in x.unbind(1):
            gate, fresh = (self.inside(step) + self.before(state)).chunk(2, -1)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * fresh.tanh()
        return self.head(state).log_softmax(-1)


class Own(NamedTuple):
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


OWN = {
    "own_resnet": Own(ResNet, (2, 3, 8, 8)),
    "own_unet": Own(UNet, (2, 3, 8, 8)),
    "own_rnn": Own(Recurrent, (3, 5, 6)),
}
NAMES = (
    *(
        "gpt2",
        "llama",
        "bert",
        "t5",
        "vit",
        "mixtral",
        "gemma2",
        "gpt_neox",
        "albert",
        "deberta_v2",
        "convnext",
        "swin",
    ),
    *OWN,
)
TUNED = ("llama", "own_rnn")  # with products from templates in C++, too


def step_of(name: str, trains: bool, options: dict[str, Any], device: str = "cpu") -> Run:
    """What runs one step of a compiled model, and returns its results, and in training its gradients and buffers."""
    torch.manual_seed(0)
    if name in OWN:
        model = OWN[name].make()
        inputs: dict[str, Tensor] = {"x": torch.randn(OWN[name].shape)}
    else:
        model = {**MODELS, **MORE_MODELS}[name]()
        inputs = inputs_of(model)
    if not trains:
        inputs.pop("labels", None)
        if name == "t5":
            inputs["decoder_input_ids"] = inputs["input_ids"]
    model.to(device).train(trains)
    inputs = {key: value.to(device) for key, value in inputs.items()}
    compiled: Any = torch.compile(model, **options)
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def infer() -> list[Tensor]:
        with torch.no_grad():
            return [each.clone() for each in _tensors(compiled(**inputs))]

    def train() -> list[Tensor]:
        model.load_state_dict(state)
        model.zero_grad()
        torch.manual_seed(1)
        out = _tensors(compiled(**inputs))
        loss = out[0] if out[0].dim() == 0 else out[0].pow(2).mean()
        loss.backward()
        grads = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        return [*(each.detach().clone() for each in out), *grads, *(each.clone() for each in model.buffers())]

    return train if trains else infer


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for part in values for each in _tensors(part)]


def launched(run: Run, device: str) -> Counter[str]:
    """How often each generated kernel is launched in one run."""
    return launched_on_gpu(run) if device == "cuda" else called_in_wrappers(run)


def launched_on_gpu(run: Run) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    names = (event.name for event in profiler.events() or () if str(event.device_type).endswith("CUDA"))
    return Counter(name for name in names if name.startswith("triton_"))


def called_in_wrappers(run: Run) -> Counter[str]:
    counts: Counter[str] = Counter()
    defined: dict[str, dict[int, str]] = {}

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not str(frame.f_globals.get("__name__")).startswith(WRAPPERS):
            return
        file = frame.f_code.co_filename
        if file not in defined:
            names = re.findall(r"^(\w+) = async_compile\.", Path(file).read_text(), re.MULTILINE)
            defined[file] = {id(frame.f_globals.get(name)): name for name in names}
        if id(called) in defined[file]:
            counts[defined[file][id(called)]] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts


class Compared(NamedTuple):
    """What came of one model.

    Attributes:
        launches: How many launches there were.
        seen: How many of them were seen.
        placed: How many of those had a module and a line.
        wrong: What differs, in words.
    """

    launches: int
    seen: int
    placed: int
    wrong: list[str]


def compare(run: Run, folder: str, device: str = "cpu", *, captured: bool = False) -> Compared:
    """Compare a compiled step with itself under hooks, with kernels in C++, if they are built, and in Python.

    Args:
        run: The step.
        folder: Where runs are recorded.
        device: On which device it runs.
        captured: Whether CUDA graphs are captured. Blocks see those that are captured inside, so they are made anew.
    """
    warm = 3 if captured else 1  # a graph is captured in the second run
    for _ in range(warm):
        run()
    plain, wrong = run(), []
    if not all(map(_same, plain, run())):
        return Compared(0, 0, 0, ["no two runs have the same results"])
    counts = launched(run, device)
    placed = found = 0
    for engine in ("auto", "kernel"):
        recorder = Recorder()
        hooks: Any = [recorder, Stats(), NonFinite(action="record"), Profile()]
        hooks.append(runs.RunRecorder(f"{folder}/{engine}", tensors="stats"))
        if captured:
            torch._dynamo.reset()
        stance = nullcontext() if captured else torch.compiler.set_stance("fail_on_recompile")
        with stance, intercept(hooks, ops="all", engine=engine, graphs=captured):
            for _ in range(warm if captured else 0):
                run()
            before = len(recorder.records)
            for _ in range(2):  # the second time, what is noted has been seen before
                seen = run()
                if len(seen) != len(plain) or not all(map(_same, plain, seen)):
                    wrong.append(f"{engine}: results differ")
            records = [each for each in recorder.records[before:] if each.ops is not None]
        names = (each.op.removeprefix("inductor::") for each in records)
        of_names = Counter(name for name in names if device == "cpu" or name.startswith("triton_"))
        if of_names != Counter({name: 2 * count for name, count in counts.items()}):
            wrong.append(f"{engine}: launched {counts}, saw {of_names}")
        if not all(map(_same, plain, run())):
            wrong.append(f"{engine}: results differ after the block")
        found = of_names.total()
        placed = sum(each.module is not None and each.source is not None for each in records)
    return Compared(2 * counts.total(), found, placed, wrong)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def settings(name: str, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """How a model is compiled."""
    yield "default", {}
    yield "dynamic", {"dynamic": True}
    if device == "cuda":
        yield "reduce-overhead", {"mode": "reduce-overhead"}
    if name in TUNED:
        backends = "TRITON" if device == "cuda" else "CPP,ATEN"
        yield "max-autotune", {"options": {"max_autotune": True, "max_autotune_gemm_backends": backends}}


def main(names: Sequence[str], only: str | None, device: str) -> int:
    """Compare these models, and return how many differ."""
    total, bad = Counter[str](), 0
    warnings.filterwarnings("ignore")
    torch._inductor.config.compile_threads = 1
    if device == "cuda":  # gradients of embeddings are added up in any order otherwise
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    for name in names:
        for how, options in settings(name, device):
            for trains in (False, True):
                if only not in (None, how):
                    continue
                torch._dynamo.reset()
                began, what = time.time(), f"{name}, {how}, {'training' if trains else 'inference'}"
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        step = step_of(name, trains, options, device)
                        found = compare(step, folder, device, captured=how == "reduce-overhead")
                    except Exception as error:
                        found = Compared(0, 0, 0, [f"{type(error).__name__}: {str(error)[:300]}"])
                total.update(programs=1, launches=found.launches, seen=found.seen, placed=found.placed)
                bad += bool(found.wrong)
                seconds = time.time() - began
                print(f"{what}: {found.seen} of {found.launches} launches, {found.placed} placed, {seconds:.0f} s")
                for line in found.wrong:
                    print(f"  WRONG: {line}", flush=True)
    print(f"{dict(total)}, {bad} wrong")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--how", choices=("default", "dynamic", "reduce-overhead", "max-autotune"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    sys.exit(min(main(options.names, options.how, options.device), 100))
