"""Products as tensor cores and cuBLAS may compute them, on the CPU, and a stand-in for the settings that allow it.

`Computed` replaces the outputs of products; `settings` lets hooks take the CPU for a device that has tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from opintercept import OpCall
from opintercept._values import precision

Multiply = Callable[[Tensor, Tensor], Tensor]


def cut(values: Tensor, way: str) -> Tensor:
    """Values of float32 in 11 bits, rounded to the `"nearest"`, towards `"zero"`, or `"away"` from it."""
    scaled, exponent = torch.frexp(values.double())
    scaled = scaled * 2**11
    rounded = {
        "nearest": scaled.round,
        "zero": scaled.trunc,
        "away": lambda: scaled.abs().ceil() * scaled.sign(),
    }[way]()
    return torch.ldexp(rounded / 2**11, exponent)


def in_float32(values: Tensor) -> Tensor:
    """The float32 next to each value in the direction of zero."""
    near = values.float()
    return torch.where(near.abs() > values.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


def added(a: Tensor, b: Tensor) -> Tensor:
    """A product of tensor cores, which add 16 terms at a time exactly and cut off what float32 does not hold."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for first in range(0, a.shape[-1], 16):
        terms = a[..., first : first + 16].double() @ b[..., first : first + 16, :].double()
        total = in_float32(total.double() + terms)
    return total


def tf32(way: str) -> Multiply:
    """Products of float32 in TF32."""
    return lambda a, b: added(cut(a, way), cut(b, way))


def split(parts: int, *, low: bool = True) -> Multiply:
    """Products in so many parts of k, each rounded to the dtype, and then added up in that dtype or in float32."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        width = -(-a.shape[-1] // parts)
        pairs = zip(a.split(width, -1), b.split(width, -2), strict=True)
        total, *others = (added(*pair).to(a.dtype) for pair in pairs)
        total = total if low else total.float()
        for other in others:
            total = total + other
        return total

    return multiply


ARITHMETIC: dict[str, tuple[torch.dtype, dict[str, Any], Multiply]] = {
    **{way: (torch.float32, {"fp32_precision": "tf32"}, tf32(way)) for way in ("nearest", "zero", "away")},
    **{
        f"{str(dtype).removeprefix('torch.')} in {parts} parts{'' if low else ', added in float32'}": (
            *(dtype, {}),
            split(parts, low=low),
        )
        for dtype in (torch.float16, torch.bfloat16)
        for parts, low in ((2, True), (7, True), (32, True), (7, False))
    },
}
"""Each with the dtype that it is for, and the settings that allow it where they do not by default."""


class Computed:
    """Replaces the output of each `mm`, `bmm`, `addmm` and `baddbmm` by what `multiply` makes of its operands."""

    reads = ()

    def __init__(self, multiply: Multiply) -> None:
        self._multiply = multiply

    def post(self, call: OpCall) -> Tensor:
        assert call.lhs is not None
        assert call.rhs is not None
        product = self._multiply(call.lhs.detach().cpu(), call.rhs.detach().cpu())
        alpha, beta = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
        if alpha != 1 or call.bias is not None:
            product = alpha * product.float()
        if call.bias is not None:
            product = product + beta * call.bias.detach().cpu().float()
        output: Tensor = call.output
        return product.to(output.dtype).to(output.device)


@contextmanager
def settings(*devices: str, **flags: Any) -> Iterator[None]:
    """Let these devices have tensor cores, and set `torch.backends.cuda.matmul`; restores both."""
    matmul: Any = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in flags}
    known = precision.TENSOR_CORES[:]
    try:
        precision.TENSOR_CORES += devices
        for name, value in flags.items():
            setattr(matmul, name, value)
        yield
    finally:
        precision.TENSOR_CORES[:] = known
        for name, value in before.items():
            setattr(matmul, name, value)
