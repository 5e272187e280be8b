"""Copies of tensors that outlive the call, what safetensors can hold of them, and copies of hooks."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any

import torch

from opintercept._tensors import is_strided


def copied(tensor: torch.Tensor, to: str) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy, and the event after which it is there, or None if it is there already.

    From CUDA it is queued on the stream that the operator is on, behind it and before whatever comes to write there.

    Args:
        tensor: Detached.
        to: `"same"` device, or `"cpu"`.
    """
    # Made outside of inference mode, the copy may be used with autograd.
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


def safetensors_for(what: str) -> Any:
    """`safetensors.torch`, which imports without numpy, and can then store nothing.

    Raises:
        ImportError: It or numpy is not installed; `what` needs them.
    """
    for name in ("numpy", "safetensors.torch"):
        try:
            module = import_module(name)
        except ImportError as missing:
            package = name.partition(".")[0]
            raise ImportError(f"{what} needs {package}, got none; pip install 'opintercept[cli]'") from missing
    return module


@cache
def can_store(dtype: torch.dtype) -> bool:
    """Whether safetensors brings the dtype back; some it writes and cannot read.

    Raises:
        ImportError: As `safetensors_for`.
    """
    module = safetensors_for("storing tensors")
    try:
        return bool(module.load(module.save({"": torch.empty(0, dtype=dtype)}))[""].dtype == dtype)
    except ImportError:
        raise
    except Exception:  # a KeyError, a SafetensorError, or what torch raises for the dtype
        return False


class Copyable:
    """A hook that can be copied and pickled: each copy has containers and a lock of its own."""

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_lock"}
        return {name: copy(value) if isinstance(value, _CONTAINERS) else value for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()


_CONTAINERS = (dict, list, set, deque)
