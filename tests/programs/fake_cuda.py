"""A stand-in for CUDA's driver, in C++: see fake_cuda.cpp. It is built once and cached."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from unittest import mock

from opintercept._native import build, nvrtc
from opintercept._values import on_device

CODE = b"code"
"""What the stand-in takes for compiled code."""


@functools.cache
def driver() -> ctypes.CDLL:
    """The stand-in, and what tests ask of it."""
    sources = [Path(__file__).with_suffix(".cpp")]
    with mock.patch.multiple(
        build, SOURCES=sources, HEADERS=[nvrtc.SOURCE, nvrtc.CHECKS], COMPILE=[*build.COMPILE, "-O1"]
    ):
        loaded = ctypes.CDLL(str(build.built_library()))
    loaded.fake_count.restype = ctypes.c_int64
    return loaded


def behave(*, late: bool = False, capturing: bool = False, lost: bool = False) -> None:
    """Set whether marks are written late, a graph is captured, or the device has failed."""
    driver().fake_behave(late, capturing, lost)


def use(device: str) -> None:
    """Let hooks read what is on a type of device as on CUDA, in this process."""
    vars(on_device).update(DEVICE=device, DRIVER=driver()._name, architecture_of=lambda _: "sm_90")
    vars(nvrtc).update(code_for=lambda *_: CODE)
