"""The device `toy`: a stand-in for a GPU, for which autograd has a thread of its own. Importing this module adds it.

It is built once and cached. A process has it for good, and torch takes it for its accelerator: use it in a process of
its own. Run what is to be compared on the device before the CPU, which may hide what is wrong there.
"""

from __future__ import annotations

import types
from pathlib import Path
from unittest import mock

import torch

from opintercept._native import build

_SOURCE = Path(__file__).with_name("toy_device.cpp")


def build_device() -> Path:
    """Return the library with the device, built if it does not exist."""
    with mock.patch.multiple(build, SOURCES=[_SOURCE], HEADERS=[], COMPILE=[*build.COMPILE, "-O0"]):
        return build.built_library()


torch.ops.load_library(build_device())
torch.utils.rename_privateuse1_backend("toy")  # type: ignore[attr-defined]
_module = types.ModuleType("torch.toy")
vars(_module).update(
    is_available=lambda: True,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
)
torch._register_device_module("toy", _module)
torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined]
