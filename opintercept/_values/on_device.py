"""Chooses what reads the values of tensors on CUDA devices: torch's operators, or one launch of a kernel in Triton.

Invariant: Triton is imported only if the environment asks for it. A kernel that fails is not launched again in this
process, and the caller uses torch's operators.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

SWITCH = "OPINTERCEPT_TRITON"
"""An environment variable; with `1` the kernel reads. It is looked at once, when values on a device are first read."""
DEVICES = ("cuda",)
"""The types of devices that the kernel runs on."""

known: tuple[Any, str] | None = None
"""The module of the kernel and `""`, or None and why there is none; None before anybody has looked."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # a subclass may stand for other tensors


def find() -> tuple[Any, str]:
    """What is `known`, for the rest of the process or until the kernel fails."""
    global known
    if known is None:
        known = None, ""
        if os.environ.get(SWITCH) == "1":
            try:
                from opintercept._values import triton_reader

                known = triton_reader, ""
            except Exception as error:  # Triton is not installed, or does not fit
                _reject(error)
    return known


def read(tensor: torch.Tensor, limits: tuple[float, float] | None, hashed: bool) -> torch.Tensor | None:
    """Read a tensor as `triton_reader.read` does; None if torch's operators have to."""
    reader, _ = find()
    if reader is None or tensor.device.type not in DEVICES or type(tensor) not in _PLAIN:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
        return None
    try:
        return reader.read(tensor, limits, hashed)  # type: ignore[no-any-return]
    except Exception as error:
        _reject(error)
        return None


def told() -> str:
    """What reads, for `info`."""
    reader, reason = find()
    if reader is not None:
        return f"read in one launch, by Triton {reader.VERSION}"
    return f"read with torch's operators, since {reason}" if reason else "read with torch's operators"


def _reject(error: Exception) -> None:
    global known
    known = None, f"{SWITCH}=1 is set, but {type(error).__name__}: {error}"
    logging.getLogger("opintercept").warning("opintercept: values on devices are %s", told())
