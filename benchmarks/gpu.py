"""A language model of a billion weights on a CUDA device: the time, kernels and synchronisations that we add.

Without such a device there are no rows. `measured` with `tiny=True` runs anywhere, to test this file itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks._timing import Make, Row, compare
from benchmarks.models import OURS

_BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
_TINY = _BILLION | {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
# Hooks that read no values must not launch kernels.
_BOUNDED = ("no-op hook", "Recorder")


def run(smoke: bool) -> list[Row]:
    """Decoding, a prompt of 512 tokens and a training step, in bfloat16."""
    return measured(torch.device("cuda"), tiny=smoke, rounds=2 if smoke else 15) if torch.cuda.is_available() else []


def measured(device: torch.device, *, tiny: bool, rounds: int) -> list[Row]:
    """Return the rows of one device; with `tiny`, those of a model of thousands of weights instead of a billion."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = _TINY if tiny else _BILLION
    config = transformers.LlamaConfig(**sizes)
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(device, torch.bfloat16)
    prompt = torch.randint(0, config.vocab_size, (1, 16 if tiny else 512), device=device)
    with torch.no_grad():
        cache = model(prompt, use_cache=True).past_key_values
    name = "Llama of 2 layers" if tiny else "Llama, 1.1 billion weights"

    def decode() -> Any:
        with torch.no_grad():
            logits = model(prompt[:, :1], past_key_values=cache, use_cache=True).logits
            cache.crop(-1)
            return logits

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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(program: str, body: Callable[[], Any], device: torch.device, rounds: int) -> list[Row]:
    def finished() -> None:
        body()
        _wait(device)

    return compare("gpu", program, finished, OURS, rounds=rounds, check=False)


def _counted(program: str, body: Callable[[], Any], device: torch.device) -> list[Row]:
    """Return kernels relative to the plain run, and 1 + the added synchronisations."""
    found = []
    plain_kernels, plain_waits = _kernels(body, OURS["plain"], device), _synchronisations(body, OURS["plain"], device)
    for name, make in OURS.items():
        if name == "plain":
            continue
        kernels, waits = _kernels(body, make, device), _synchronisations(body, make, device)
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
        _wait(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            body()
            _wait(device)
    return sum(str(event.device_type).endswith("CUDA") for event in profiler.events() or ())


def _synchronisations(body: Callable[[], Any], make: Make, device: torch.device) -> int:
    """Count how often a run waits for the device, apart from the end of the block."""
    with make():
        body()
        _wait(device)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                body()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)
