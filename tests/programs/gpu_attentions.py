"""The attentions that torch has on GPUs, on the host: kernels for operators that have none there.

Their results are of the kinds that a GPU returns: some undefined, some whole numbers, some small tensors of these.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from opintercept._ops.table import ROWS


def _scores(q: Tensor, k: Tensor, scale: float | None, causal: bool, bias: Tensor | None = None) -> Tensor:
    scores = q @ k.mT * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    return scores


def _forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, **options)
    return torch.softmax(scores, -1) @ v, scores.float().logsumexp(-1)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weights = (_scores(q, k, **options).float() - lse[..., None]).exp().to(q.dtype)
    scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    scale = 1 / math.sqrt(q.size(-1)) if options["scale"] is None else options["scale"]
    return scores @ k * scale, scores.mT @ q * scale, weights.mT @ grad, scores


def _state() -> Tensor:
    return torch.tensor([7, 9])


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, mask: bool = False, *,
    scale: Any = None
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, scale=scale, causal=causal)
    return out, lse, None, None, q.size(-2), k.size(-2), _state(), torch.tensor(0), None


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: Any = None
) -> Any:  # fmt: skip
    return _backward(grad, q, k, v, out, lse, scale=scale, causal=causal)[:3]


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: Any = None
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, scale=scale, causal=causal, bias=bias)
    return out, lse if with_lse else lse.new_empty(0), torch.tensor(7), torch.tensor(9)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    dropout: float, wanted: list[bool], causal: bool = False, *, scale: Any = None
) -> Any:  # fmt: skip
    grads = _backward(grad, q, k, v, out, lse, scale=scale, causal=causal, bias=bias)
    return tuple(each if want else None for each, want in zip(grads, wanted, strict=True))


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, with_lse: bool, dropout: float = 0.0, causal: bool = False,
    mask: bool = False, *, scale: Any = None
) -> Any:  # fmt: skip
    out, lse = _forward(q, k, v, scale=scale, causal=causal, bias=bias)
    return out, lse, None, None, q.size(-2), k.size(-2), torch.tensor(7), torch.tensor(9), None


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor, bias: Any,
    cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float, causal: bool, *, scale: Any = None
) -> Any:  # fmt: skip
    return _backward(grad, q, k, v, out, lse, scale=scale, causal=causal, bias=bias)[:3]


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash": (flash, flash_backward),
    "efficient": (efficient, efficient_backward),
    "cudnn": (cudnn, cudnn_backward),
}


@contextlib.contextmanager
def on_the_host() -> Iterator[None]:
    """Let the operators run on the host."""
    library = torch.library.Library("aten", "IMPL")
    try:
        for kind, kernels in KERNELS.items():
            for end, kernel in zip(("", "_backward"), kernels, strict=True):
                library.impl(f"_scaled_dot_product_{kind}_attention{end}", kernel, "CPU")
        ROWS.changed()  # which operators have kernels is remembered
        yield
    finally:
        library._destroy()
        ROWS.changed()


def attention(kind: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False) -> Any:
    """The result of an attention, by the operator of a GPU."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    more = () if kind == "flash" else (bias, needs_grad)
    return operator(q, k, v, *more, 0.0, causal)[0]
