"""`described`: the content of `run.json`: the program, its machine, and the settings that affect matmuls.

Invariant: nothing here initialises CUDA. A program that forks later would fail, and each rank would take memory on the
first device before it has chosen its own.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from opintercept.runs.store.run import STARTED, RunInfo, TensorMode
from opintercept.runs.store.untrusted import MAX_TEXT


def described(tensors: TensorMode, rank: int, world_size: int, member: Mapping[str, str] | None = None) -> RunInfo:
    """The description of a run that begins now."""
    return RunInfo(
        argv=tuple(text[:MAX_TEXT] for text in sys.argv),
        started=time.strftime(STARTED),
        finished=False,
        tensors=tensors,
        rank=rank,
        world_size=world_size,
        versions=_versions(),
        devices=_devices(),
        flags=_flags(),
        launch=_launch(),
        member=member,
    )


def at_first_call(info: RunInfo) -> RunInfo:
    """The description with the settings that the program has made since: a block may begin as torch is imported."""
    return replace(info, flags=_flags())


def with_devices(info: RunInfo) -> RunInfo:
    """The description with the devices, once the program has initialised them."""
    return replace(info, devices=_devices()) if not info.devices and torch.cuda.is_initialized() else info


def _launch() -> dict[str, str] | None:
    """What torchrun says of this process; its attempts are counted on each node, and `none` is no name of a run."""
    names = {"id": "TORCHELASTIC_RUN_ID", "node": "GROUP_RANK", "attempt": "TORCHELASTIC_RESTART_COUNT"}
    found = {name: os.environ[key][:MAX_TEXT] for name, key in names.items() if os.environ.get(key, "none") != "none"}
    return found if "TORCHELASTIC_RUN_ID" in os.environ else None


def _versions() -> dict[str, str]:
    from opintercept._core.version import __version__

    found = {"opintercept": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def _devices() -> tuple[str, ...]:
    if not torch.cuda.is_initialized():
        return ()
    return tuple(torch.cuda.get_device_name(i)[:MAX_TEXT] for i in range(torch.cuda.device_count()))


_ATTRIBUTES = (
    *("mkldnn.allow_tf32", "cuda.matmul.allow_tf32", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cudnn.allow_tf32", "cudnn.benchmark"),
    "cudnn.deterministic",
)
# Settings that decide how products are computed: how to read them, and to set those that a replay may change.
FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any] | None]] = {
    "default_dtype": (torch.get_default_dtype, None),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
    "cuda.preferred_blas_library": (torch.backends.cuda.preferred_blas_library, None),
    "sdp.flash": (torch.backends.cuda.flash_sdp_enabled, None),
    "sdp.mem_efficient": (torch.backends.cuda.mem_efficient_sdp_enabled, None),
    "sdp.math": (torch.backends.cuda.math_sdp_enabled, None),
}
for _path in _ATTRIBUTES:
    _owner, _, _name = _path.rpartition(".")
    _found = attrgetter(_owner)(torch.backends)
    FLAGS[_path] = partial(getattr, _found, _name), partial(setattr, _found, _name)


def _flags() -> dict[str, str]:
    """The values of those `FLAGS` that this torch has."""
    found = {}
    for name, (ask, _) in FLAGS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is renaming some of them
            try:
                found[name] = str(ask())
            except (AttributeError, RuntimeError):  # not in this torch, or set to a value without an old name
                continue
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"):
        if name in os.environ:
            found[name] = os.environ[name][:MAX_TEXT]
    return found
