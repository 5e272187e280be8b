"""Language models of billions of weights on a CUDA device: the time, kernels and synchronisations that we add.

Without such a device there are no rows. `measured` with a model of thousands of weights runs anywhere, to test this.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._timing import Make, Row, compare
from benchmarks.operators import EmptyDispatchMode, blocks, no_op
from opintercept import hooks, intercept
from opintercept.runs import RunRecorder

_NAMES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
]
SIZES = {
    "2 layers": (100, 64, 128, 2, 4, 2),
    "1.1 billion weights": (32_000, 2048, 5632, 22, 32, 4),
    "8 billion weights": (128_256, 4096, 14336, 32, 32, 8),
}
"""Llamas, the first one for a rehearsal, by the numbers of their configurations."""


@contextlib.contextmanager
def _recorded(tensors: Any, **options: Any) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        flight = options.pop("flight", None)
        with intercept(RunRecorder(f"{folder}/run", tensors, flight=flight), **options):
            yield


class NaNMode(TorchDispatchMode):
    """Looks for NaN as people do, without a hook: it waits for each output."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_floating_point() and found.isnan().any():
            raise RuntimeError(f"NaN in {func}")
        return found


def _debug_mode() -> Any:
    from torch.utils._debug_mode import DebugMode

    return DebugMode()


OURS: dict[str, Make] = {
    "plain": contextlib.nullcontext,
    **blocks(
        {
            "no-op hook": lambda: no_op,
            "Recorder": hooks.Recorder,
            "Profile": hooks.Profile,
            "Stats": hooks.Stats,
            "NonFinite": hooks.NonFinite,
            "Checksum": lambda: hooks.Checksum(action="record"),
        }
    ),
    'RunRecorder("none")': lambda: _recorded("none"),
    'RunRecorder("stats")': lambda: _recorded("stats"),
    "flight recorder, values": lambda: _recorded("stats", flight=1000),
    **blocks({'Recorder, ops="all"': hooks.Recorder, 'NonFinite, ops="all"': hooks.NonFinite}, ops="all"),
    'RunRecorder("stats"), ops="all"': lambda: _recorded("stats", ops="all"),
}
OTHERS: dict[str, Make] = {
    "empty TorchDispatchMode": EmptyDispatchMode,
    "a mode that looks for NaN": NaNMode,
    "DebugMode": _debug_mode,
}
BOUNDS: dict[str, tuple[float, float, float]] = {
    "Recorder": (1.05, 1.05, 1.05),
    "Profile": (1.05, 1.05, 1.05),
    'RunRecorder("none")': (1.05, 1.05, 1.05),
    "Stats": (1.12, 1.10, 1.15),
    "NonFinite": (1.12, 1.10, 1.15),
    'RunRecorder("stats")': (1.15, 1.15, 1.20),
    "flight recorder, values": (1.15, 1.15, 1.20),
    'Recorder, ops="all"': (1.25, 1.25, 1.25),
    'NonFinite, ops="all"': (1.45, 1.45, 1.45),
    'RunRecorder("stats"), ops="all"': (1.60, 1.60, 1.60),
    "Checksum": (2.0, 2.0, 2.0),
}
"""How many times as long a token, a prompt and a training step may take."""
# Hooks that read no values must not launch kernels.
_BOUNDED = ("no-op hook", "Recorder", "Profile", 'RunRecorder("none")', 'Recorder, ops="all"')


def run(smoke: bool) -> list[Row]:
    """Decoding, a prompt of 512 tokens and a training step, in bfloat16."""
    if not torch.cuda.is_available():
        return []
    return measured(torch.device("cuda"), [*SIZES][0 if smoke else 1], rounds=1 if smoke else 15)


def llama(device: torch.device, size: str) -> tuple[Any, torch.Tensor, Callable[[], Any]]:
    """A model of one of `SIZES`, a prompt, and a step that decodes one token after it."""
    torch.manual_seed(0)
    numbers: dict[str, Any] = dict(zip(_NAMES, SIZES[size], strict=True))
    config = transformers.LlamaConfig(**numbers)
    with torch.device(device):  # 8 billion weights in float32 would take minutes on the CPU
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    prompt = torch.randint(0, config.vocab_size, (1, min(512, config.vocab_size)), device=device)
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values

    def decode() -> Any:
        with torch.no_grad():
            logits = model(prompt[:, :1], past_key_values=cache, use_cache=True).logits
            cache.crop(-1)
            return logits

    return model, prompt, decode


def measured(device: torch.device, size: str, *, rounds: int) -> list[Row]:
    """Return the rows of one device and one of `SIZES`."""
    model, prompt, decode = llama(device, size)
    name = f"Llama, {size}"

    def prefill() -> Any:
        with torch.no_grad():
            return model(prompt, use_cache=False).logits

    def train() -> Any:
        model.zero_grad(set_to_none=True)
        loss = model(prompt, labels=prompt, use_cache=False).loss
        loss.backward()
        return loss

    found = []
    programs = (f"{name}, one token", decode), (f"{name}, a prompt", prefill), (f"{name}, training", train)
    for number, (program, body) in enumerate(programs):
        found += _timed(program, body, device, rounds, number)
        if device.type == "cuda":
            found += _counted(program, body, device)
    return found


def wait(device: torch.device) -> None:
    """Wait for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def counts(body: Callable[[], Any], make: Make, device: torch.device) -> tuple[int, int]:
    """Return how many kernels a run launches, and how often it waits for the device before the block ends."""
    if device.type != "cuda":
        return 0, 0
    return _kernels(body, make, device), _synchronisations(body, make, device)


def _timed(program: str, body: Callable[[], Any], device: torch.device, rounds: int, number: int) -> list[Row]:
    def finished() -> None:
        body()
        wait(device)

    number_of_runs = 6 if rounds > 2 else 1  # the first ones are shown to hooks in Python
    found = compare("gpu", program, finished, OURS | OTHERS, rounds=rounds, number=number_of_runs, check=False)
    return [replace(row, bound=BOUNDS[name][number]) if (name := row.configuration) in BOUNDS else row for row in found]


def _counted(program: str, body: Callable[[], Any], device: torch.device) -> list[Row]:
    """Return kernels relative to the plain run, and 1 + the added synchronisations."""
    found = []
    plain_kernels, plain_waits = counts(body, OURS["plain"], device)
    for name, make in OURS.items():
        if name == "plain":
            continue
        kernels, waits = counts(body, make, device)
        # Hooks read statistics with kernels; a hook that only looks at shapes adds none.
        bound = 1.0 if name in _BOUNDED else None
        ratio = kernels / plain_kernels
        found.append(Row("gpu", program, f"{name}: kernels / plain", 0.0, ratio, 0.0, bound))
        found.append(Row("gpu", program, f"{name}: 1 + synchronisations", 0.0, 1.0 + waits - plain_waits, 0.0, 1.0))
    return found


def _kernels(body: Callable[[], Any], make: Make, device: torch.device) -> int:
    """Count the kernels that a run launches."""
    with make():
        body()
        wait(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            body()
            wait(device)
    return sum(str(event.device_type).endswith("CUDA") for event in profiler.events() or ())


def _synchronisations(body: Callable[[], Any], make: Make, device: torch.device) -> int:
    """Count how often a run waits for the device, apart from the end of the block."""
    with make():
        body()
        wait(device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                body()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
