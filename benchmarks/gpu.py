"""Language models of billions of weights on a CUDA device: the time, kernels and synchronisations that we add.

Without such a device there are no rows. `measured` with a model of thousands of weights runs anywhere, to test this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks._timing import Make, Row, compare
from benchmarks.models import OURS

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
# Hooks that read no values must not launch kernels.
_BOUNDED = ("no-op hook", "Recorder")


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
    for program, body in ((f"{name}, one token", decode), (f"{name}, a prompt", prefill), (f"{name}, training", train)):
        found += _timed(program, body, device, rounds)
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


def _timed(program: str, body: Callable[[], Any], device: torch.device, rounds: int) -> list[Row]:
    def finished() -> None:
        body()
        wait(device)

    return compare("gpu", program, finished, OURS, rounds=rounds, check=False)


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
