"""`OperandHashes`: 64-bit hashes of operands, each weight's once a step.

Invariant: nothing waits for a device before `read`. Within a step, what torch has written to is hashed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from opintercept._core.tensors import is_strided
from opintercept._native import values as native
from opintercept._ranks.expectations import CONSTANT, key_of, mixed
from opintercept._values import hash as _hash
from opintercept._values.hash import WORDS
from opintercept._values.read import in_memory, parameter_of, storage_ref

REMEMBERED = 4096
"""How many weights have their hashes remembered."""
FROZEN = 16
"""After how many steps a weight without a gradient is hashed again although torch has not written to it."""
_LONGEST = 8  # operators between a parameter and what is made from it

Hash = tuple[int | torch.Tensor, bool, int]
"""The hash, which a device may still be computing; whether it comes with the flag for constants; dtype and size."""


class OperandHashes:
    """Hashes operands, and remembers those of weights.

    A weight is hashed again in each step, since `weight.data.add_()` and fused optimizers write to it unknown to
    torch, and since the memory of a device may be faulty.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[weakref.ref[torch.UntypedStorage], int, int, Hash]] = {}
        self._streams: dict[Any, torch.cuda.Stream] = {}
        self._step = 0
        self._met: set[int] = set()  # parameters, by their identity
        self._modules: dict[int, str | None] = {}  # where each was read, or a copy of it, such as autocast's

    def next_step(self) -> None:
        """Begin a step."""
        self._step += 1
        self._met, self._modules = set(), {}
        self._streams.clear()

    def meet(self, tensor: torch.Tensor, module: str | None) -> None:
        """Take note of the parameter behind an operand of a module."""
        weight = parameter_of(tensor)
        self._met.add(id(weight))
        self._modules[id(_made_from(tensor) if weight is None else weight)] = module

    def has_met(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter, or a view of it, was an operand in this step."""
        return id(parameter) in self._met

    def module_of(self, parameter: torch.Tensor) -> str | None:
        """The module that has read a parameter, or what was made from it, in this step."""
        return self._modules.get(id(parameter))

    def of(self, tensor: torch.Tensor, constants: bool) -> Hash | None:
        """Hash a tensor, and with `constants` find out if its elements are all equal; None without own values."""
        whole, weight = tensor, parameter_of(tensor)
        if weight is None:
            return self._hashed(tensor, constants)
        if weight.numel() == tensor.numel() and weight.dtype == tensor.dtype and not tensor.is_conj():
            whole = weight  # every view of all of it has the same hash
        key = id(weight), whole.storage_offset(), whole.shape, whole.stride(), whole.dtype, whole.is_conj(), constants
        version = weight._version
        found = self._kept.get(key)
        if found is not None and found[0]() is weight.untyped_storage() and found[1] == version:
            age = self._step - found[2]
            if age == 0 or (age < FROZEN and not weight.requires_grad):
                return found[3]
        hashed = self._hashed(whole, constants)
        if hashed is not None:
            if len(self._kept) >= REMEMBERED:
                self._kept.clear()
            self._kept[key] = storage_ref(weight), version, self._step, hashed
        return hashed

    def _hashed(self, tensor: torch.Tensor, constants: bool) -> Hash | None:
        if not is_strided(tensor) or tensor.is_quantized or not tensor.numel() or not in_memory(tensor):
            return None
        look = _look(tensor.dtype, tensor.numel())
        read = native.read(tensor, None, False, False, True)
        if read is not None and (number := read[3]) is not None:
            (_, finite, *_), below, high, *_ = read
            return number << 1 | (not finite or -below == high), constants, look
        dense, swapped = _hash.bits_of(tensor)
        hashed = _hash.hash_of(dense, swapped)
        if constants:
            bits = dense.view(WORDS[dense.element_size()]).reshape(tensor.numel(), -1)  # complex numbers have two
            hashed = torch.stack([hashed, (bits == bits[0]).all().to(torch.int64)])
        if hashed.is_cuda:
            stream = torch.cuda.current_stream(hashed.device)
            self._streams[hashed.device, stream.cuda_stream] = stream
        return hashed, constants, look

    def read(self, hashes: Sequence[Hash]) -> list[tuple[int, int]]:
        """The value and flags of each hash; waits for the devices."""
        for (device, _), stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        waiting: dict[torch.device, list[torch.Tensor]] = {}
        for value, _, _ in hashes:
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append(value.reshape(-1))
        ready = {device: iter(torch.cat(values).tolist()) for device, values in waiting.items()}
        found = []
        for value, constants, look in hashes:
            if isinstance(value, torch.Tensor):
                numbers = ready[value.device]
                number, constant = next(numbers), constants and next(numbers)
            else:
                number, constant = value >> 1, value & 1
            found.append((mixed(number % 2**64, look), CONSTANT if constants and constant else 0))
        return found


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or made from one parameter only, such as autocast's copies."""
    return _made_from(tensor) is not None


def _made_from(tensor: torch.Tensor) -> torch.nn.Parameter | None:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, torch.nn.Parameter):
        return base
    node: Any = base.grad_fn
    for _ in range(_LONGEST):
        if node is None or isinstance(parameter := getattr(node, "variable", None), torch.nn.Parameter):
            return None if node is None else parameter
        node = node.next_functions[0][0] if len(node.next_functions) == 1 else None
    return None


@lru_cache(1024)
def _look(dtype: torch.dtype, numel: int) -> int:
    return key_of(str(dtype), numel)
