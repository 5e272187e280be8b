"""Which arithmetic a device may use for products and convolutions, under the settings of `torch.backends` now.

Invariant: what a setting allows counts as done, since torch does not tell what a library chose. Must not import hooks.
"""

from __future__ import annotations

from typing import Any

import torch

TENSOR_CORES = ["cuda"]
"""The types of devices with units that cut sums off, to which the settings of `torch.backends.cuda` apply."""

_REDUCED = {
    torch.float16: ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"),
    torch.bfloat16: ("allow_bf16_reduced_precision_reduction",),
}


def _backend(device: torch.device, others: Any) -> Any:
    return others if device.type in TENSOR_CORES else torch.backends.mkldnn


def _named(precision: str) -> str:
    return "highest" if precision in ("ieee", "none") else precision


def product_precision(device: torch.device) -> str:
    """How torch may round the float32 operands of products: `"tf32"`, `"bf16"`, or `"highest"` for not at all."""
    return _named(_backend(device, torch.backends.cuda).matmul.fp32_precision)


def convolution_precision(device: torch.device) -> str:
    """The same of convolutions."""
    return _named(_backend(device, torch.backends.cudnn).conv.fp32_precision)


def reduced_sums(dtype: torch.dtype, device: torch.device) -> tuple[str, ...]:
    """The settings in `torch.backends.cuda.matmul` that let a product with operands of a dtype add up in that dtype.

    With the first, cuBLAS may add up parts of k so, each of which it has added up in float32; with the second all.
    """
    if device.type not in TENSOR_CORES:
        return ()
    flags = torch.backends.cuda.matmul
    return tuple(name for name in _REDUCED.get(dtype, ()) if getattr(flags, name, False))
