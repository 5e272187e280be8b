"""Writes a call as a script and a safetensors file, so that it can be run again with torch and safetensors alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from operator import mul
from os import PathLike
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.tensors import flat, is_strided

_SCRIPT = '''"""{title}"""

import json
from pathlib import Path

import torch
from safetensors import safe_open

file = safe_open(Path(__file__).with_suffix(".safetensors"), "pt")
given = json.loads(file.metadata()["arguments"])


def value(plain):
    match plain:
        case {{"tensor": name, "shape": shape, "stride": stride}}:
            stored = file.get_tensor(name)
            return torch.empty_strided(shape, stride, dtype=stored.dtype).copy_(stored)
        case {{"torch": name}}:
            return getattr(torch, name)
        case {{"device": name}}:
            return torch.device("cpu")
        case {{"list": items}}:
            return [value(item) for item in items]
    return plain


args = [value(plain) for plain in given["args"]]
kwargs = {{name: value(plain) for name, plain in given["kwargs"].items()}}
output = {func}(*args, **kwargs)
for tensor in output if isinstance(output, (tuple, list)) else [output]:
    print(tensor.dtype, list(tensor.shape), "NaN", int(tensor.isnan().sum()), "Inf", int(tensor.isinf().sum()))
'''


def plain_arguments(
    call: OpCall,
    before: Mapping[str, torch.Tensor],
    keep: Callable[[torch.Tensor], Any],
    place: Callable[[torch.Tensor], Any] | None = None,
    tokens: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """The arguments of a running call as JSON can hold them: `{"args": [...], "kwargs": {...}}`.

    A tensor becomes `{"tensor": what keep returned, "shape": [...], "stride": [...]}`, a dtype, layout or memory
    format `{"torch": name}`, a device `{"device": name}` and a list `{"list": [...]}`. All else raises a
    TypeError. `before` has earlier copies of the operands that the operator has overwritten, by their name in
    `OpCall.tensors`. `keep` gets strided tensors, which may have conjugate or negative bits. With `place`, each tensor
    has `"memory"` too, which it returns, and the outputs are there as `"outputs": [...]`, without a `"tensor"`. A
    generated kernel has `"stands_for"` then, see `Fragment.as_plain`. `tokens` are what stands for paged caches, see
    `OpCall.tokens`.
    """
    tensors = call.tensors
    old = {id(tensors[name]): tensor for name, tensor in before.items() if name in tensors}
    parts = tokens or {}

    def plain(value: Any) -> Any:
        value = parts.get(id(value), value)
        if isinstance(value, torch.Tensor):
            given, value = value, old.get(id(value), value)
            if value.layout is not torch.strided or value.is_quantized or value.is_nested:
                raise TypeError(f"a repro can hold strided tensors only, got one of layout {value.layout}")
            # If elements share memory, as in an expanded tensor, the script could not copy into such strides.
            extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            dense = value.numel() <= extent
            stride = value.stride() if dense else _contiguous(value.shape)
            found = {"tensor": keep(value), "shape": list(value.shape), "stride": list(stride)}
            return found if place is None else found | {"memory": place(given)}
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, (list, tuple)):
            return {"list": [plain(item) for item in value]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"a repro can hold tensors, numbers, dtypes and strings, got a {type(value).__name__}")

    found: dict[str, Any] = {
        "args": [plain(value) for value in call.args],
        "kwargs": {name: plain(value) for name, value in call.kwargs.items()},
    }
    if place is not None:
        outputs = [parts.get(id(each), each) for each in flat(call.output)]
        strided = [each if isinstance(each, torch.Tensor) and is_strided(each) else None for each in outputs]
        found["outputs"] = [
            None if each is None else {"shape": list(each.shape), "memory": place(each)} for each in strided
        ]
        if (stands_for := getattr(call.func, "stands_for", None)) is not None:  # of a generated kernel
            places = {part.node: [part.module, part.source] for part in call.parts}
            found["stands_for"] = stands_for | {"places": places}
    return found


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1]


def save_repro(call: OpCall, folder: str | PathLike[str], before: Mapping[str, torch.Tensor]) -> str:
    """Write `call-<index>.safetensors` and `call-<index>.py`, and return the path of the script."""
    tensors: dict[str, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> str:
        name = f"tensor{len(tensors)}"
        tensors[name] = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().clone()
        return name

    arguments = plain_arguments(call, before, keep)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"call-{call.index}.py")
    func = f"torch.ops.{call.func}" if hasattr(call.func, "_schema") else call.op
    write_repro(path, f"Runs {call.op} again, call {call.index} ({call.phase}).", func, arguments, tensors)
    return path


def try_to_save(
    call: OpCall, folder: str | PathLike[str], before: Mapping[str, torch.Tensor]
) -> tuple[str | None, str | None]:
    """Do that, and return the path; or else return None and the reason, since a full disk must not lose a finding."""
    try:
        return save_repro(call, folder, before), None
    except Exception as failure:
        return None, f"{type(failure).__name__}: {failure}"


def write_repro(
    path: str, title: str, func: str, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write the script to `path`, and next to it the contiguous tensors that `arguments` name.

    `title` and `func` become code, so neither may come from an untrusted source.
    """
    from safetensors.torch import save_file

    stored = f"{path.removesuffix('.py')}.safetensors"
    try:
        save_file(dict(tensors), f"{stored}.partial", metadata={"arguments": json.dumps(arguments)})
        os.replace(f"{stored}.partial", stored)
        with open(path, "w", encoding="utf-8") as file:
            file.write(_SCRIPT.format(title=title, func=func))
    except BaseException:  # a full disk, for example
        for name in (f"{stored}.partial", stored, path):
            with suppress(OSError):
                os.unlink(name)
        raise
