"""Copies of tensors that outlive their call, and which of them safetensors can store."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

from opintercept._core.errors import needs
from opintercept._core.tensors import is_strided


def copied(tensor: torch.Tensor, to: str) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy a detached tensor to the `"same"` device or the `"cpu"`.

    Returns the copy and the CUDA event to wait for before reading it, None if it is ready. A copy from CUDA to the host
    is queued on the operator's stream: after the operator, and before anything that overwrites the tensor later.
    """
    # A copy made outside inference mode may be used with autograd.
    with torch.inference_mode(False) if tensor.is_inference() else nullcontext():
        if to == "same" or tensor.device.type == "cpu":
            return tensor.clone(), None
        if not tensor.is_cuda or not is_strided(tensor):
            return tensor.to("cpu"), None
        with torch.cuda.device(tensor.device):
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            return copy, ready


def on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors on one device to the host in one copy, which waits for the device."""
    whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()
    parts = zip(whole.split([tensor.nbytes for tensor in tensors]), tensors, strict=True)
    return [part.clone().view(tensor.dtype).view(tensor.shape) for part, tensor in parts]  # a clone is aligned


def safetensors_for(what: str) -> Any:
    """Import `safetensors.torch`, and numpy with it: without numpy it imports but cannot store anything."""
    for name in ("numpy", "safetensors.torch"):
        try:
            module = import_module(name)
        except ImportError as missing:
            raise needs(what, name.partition(".")[0], "'opintercept[cli]'") from missing
    return module


@cache
def can_store(dtype: torch.dtype) -> bool:
    """Whether safetensors can store tensors of this dtype. It writes some dtypes that it cannot read."""
    module = safetensors_for("storing tensors")
    try:
        return bool(module.load(module.save({"": torch.empty(0, dtype=dtype)}))[""].dtype == dtype)
    except ImportError:
        raise
    except Exception:  # a KeyError, a SafetensorError, or torch's own error for the dtype
        return False
