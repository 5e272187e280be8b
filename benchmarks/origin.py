"""What it costs to know where a call comes from, on a 4-layer Llama: `python -m benchmarks.origin`.

Invariant: as in `overhead`, configurations take turns in one process, and medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import transformers

from benchmarks.overhead import no_op
from opintercept import Interceptor, OpCall, hooks, intercept


def asks(call: OpCall) -> None:
    """A hook that asks where its call comes from."""
    _ = call.module


def without_links() -> Interceptor:
    """An interceptor that notes nothing of the forward calls, to see what noting costs."""
    interceptor = intercept(no_op)
    interceptor._pipeline.links = None
    return interceptor


CONFIGURATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no-op hook, no links": without_links,
    "no-op hook": lambda: intercept(no_op),
    "hook that reads module": lambda: intercept(asks),
    "Recorder": lambda: intercept(hooks.Recorder()),
    "Profile": lambda: intercept(hooks.Profile()),
}


def main() -> None:
    """Print a table for inference and one for a training step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(0, 100, (1, 8))

    def inference() -> None:
        with torch.no_grad():
            model(tokens)

    def training() -> None:
        model(tokens, labels=tokens).loss.backward()

    for program in (inference, training):
        recorder = hooks.Recorder()
        with intercept(recorder):
            program()
        calls = len(recorder.records)
        times: dict[str, list[float]] = {name: [] for name in CONFIGURATIONS}
        for _ in range(rounds):
            for name, make in CONFIGURATIONS.items():
                with make():
                    program()
                    program()
                    for _ in range(3):
                        started = time.perf_counter()
                        program()
                        times[name].append(time.perf_counter() - started)
        plain = statistics.median(times["plain"])
        print(f"{program.__name__}: {calls} matmuls, {plain * 1e3:.2f} ms")
        for name, values in times.items():
            median = statistics.median(values)
            print(f"  {name:24}{median / plain:6.2f} x{(median - plain) / calls * 1e6:8.1f} us a call")


if __name__ == "__main__":
    main()
