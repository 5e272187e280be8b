"""Hooks find on a stand-in for a GPU what they find on the CPU, and touch no memory of the device."""

from __future__ import annotations

import pytest
from compiler import needs_compiler
from devices import on_a_device

HOOKS = ["Recorder", "Stats", "Stats, channels", "NonFinite", "NonFinite, later", "Print", "Capture"]
HOOKS += ["AttentionWeights", "Gradients", "Reference", "FakeQuantize", "BitFlip", "Checksum"]
HOOKS += [f"RunRecorder, {tensors}" for tensors in ("stats", "sample", "full")]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("late", [False, True], ids=["", "late copies"])
def test_hooks_find_what_they_find_on_the_cpu(late: bool) -> None:
    found = on_a_device("device_hooks.py", *["--late"] * late, *HOOKS)
    assert set(found) >= set(HOOKS)
    assert {case: lines for case, lines in found.items() if lines} == {}
