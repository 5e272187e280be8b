"""A stand-in for CUDA under which the CPU is the device, see `tests/programs/fake_cuda.cpp`."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import native
import pytest
import torch
from fake_cuda import CODE, behave, driver

from opintercept._native import build, library, nvrtc
from opintercept._values import content, on_device
from opintercept.hooks import stats


def fresh() -> Any:
    """A copy of the library in C++ that has no driver yet."""
    native.library()  # first: when it is loaded, its copies lose their drivers
    folder = tempfile.mkdtemp()
    copy = Path(folder, "copy.so")
    try:
        shutil.copy(build.built_library(), copy)
        module = build.load_library(copy)
    finally:
        shutil.rmtree(folder)
    module.set_up_values(torch.Tensor, torch.nn.Parameter)
    return module


def loaded() -> Any:
    """Such a copy that has the stand-in for its driver."""
    module = fresh()
    module.set_up_device(driver()._name, "cpu")
    module.load_on_device(0, CODE)
    module.load_on_device(0, CODE, True)
    return module


reader = functools.cache(loaded)
"""One that tests share."""


@contextmanager
def on_fake_devices(module: Any = None) -> Iterator[pytest.MonkeyPatch]:
    """Let hooks read the CPU's tensors as those of a device whose kernel is loaded when the first one is read."""
    with pytest.MonkeyPatch.context() as patch, native.reading(False):
        patch.setattr(library, "known", library.Library(module or fresh()))
        for where in (content, stats):
            patch.setattr(where, "ON_HOST", ())
        patch.setattr(on_device, "DEVICE", "cpu")
        patch.setattr(on_device, "DRIVER", driver()._name)
        patch.setattr(on_device, "architecture_of", lambda _: "sm_90")
        patch.setattr(nvrtc, "code_for", lambda *_: CODE)
        for name, empty in (("ready", {}), ("reasons", {}), ("unread", Counter()), ("_is_set_up", False)):
            patch.setattr(on_device, name, empty)
        yield patch
    behave()
    for name in ("cuLaunchKernel", "cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData", "cuDevicePrimaryCtxRetain"):
        driver().fake_fail(name.encode(), 0)
