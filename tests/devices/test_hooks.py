"""Hooks find on a stand-in for a GPU what they find on the CPU, and touch no memory of the device."""

from __future__ import annotations

import pytest
import sampled
from compiler import needs_compiler
from devices import on_a_device

HOOKS = ["Recorder", "Stats", "Stats, channels", "NonFinite", "NonFinite, later", "Print", "Capture"]
HOOKS += ["AttentionWeights", "Gradients", "Reference", "FakeQuantize", "BitFlip", "Checksum"]
HOOKS += [f"RunRecorder, {tensors}" for tensors in ("stats", "sample", "full")]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("how", [[], ["--late"], ["--launch"], ["--launch", "--late"]], ids=" ".join)
def test_hooks_find_what_they_find_on_the_cpu(how: list[str]) -> None:
    # With `--sampled` each hook is there with two settings that have nothing in common.
    chosen = [hook for number, hook in enumerate(HOOKS) if not sampled.on or (number + len(how)) % 2 == 0]
    found = on_a_device("device_hooks.py", *how, *chosen)
    assert set(found) >= set(chosen)
    assert {case: lines for case, lines in found.items() if lines} == {}
