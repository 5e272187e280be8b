"""How far rounding may move the elements of a product or an attention from what its operands make in float64.

The sums are those of `hooks.Checksum`. Invariant: no bound depends on the output that it judges.
"""

from __future__ import annotations

import math

import torch

SIGMA = 6.0
"""How many standard deviations the roundings of a sum may take."""


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype; 0 for whole numbers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def of_sums(operands: torch.dtype, k: int, device: str = "cpu", sigma: float = SIGMA) -> float:
    """How far a sum of `k` products may be off, relative to the sum of their moduli.

    Kernels add up in float32, or in float64 if that is the operands' dtype. Independent roundings move the sum by
    `sigma * sqrt(k)` units at most, those of equal numbers by `k / 2` (Higham and Mary, SIAM J. Sci. Comput. 41(5),
    2019; Higham, Accuracy and Stability of Numerical Algorithms, 2002, 4.2).
    """
    if not operands.is_floating_point:
        return 0.0
    cuts = 4.0 if device == "cuda" and operands.itemsize <= 2 else 1.0  # tensor cores cut sums off
    sums = unit(torch.float64 if operands == torch.float64 else torch.float32) * cuts
    return (sums + unit(torch.float64)) * ((k + 2) / 2 + sigma * math.sqrt(k + 2))


def ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring numbers of a dtype at each value; zeros for whole numbers."""
    if not dtype.is_floating_point:
        return torch.zeros_like(values)
    info = torch.finfo(dtype)
    return torch.exp2(values.abs().clamp(info.smallest_normal, info.max).log2().floor()) * info.eps


def of_product(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    exact: torch.Tensor,
    operands: torch.dtype,
    output: torch.dtype,
    bias: torch.Tensor | None = None,
    device: str = "cpu",
    sigma: float = SIGMA,
) -> torch.Tensor:
    """How far each element of a product may be from the exact one.

    Args:
        lhs: The left operand, `float64[..., m, k]`.
        rhs: The right operand, `float64[..., k, n]`.
        exact: `lhs @ rhs + bias` in float64, `[..., m, n]`.
        operands: The dtype of the operands of the call.
        output: That of its output.
        bias: What is added, broadcast to `[..., m, n]`.
        device: The type of the device, `"cuda"` for one whose units cut sums off.
        sigma: How many standard deviations the roundings of a sum may take.

    Example:
        >>> x, w = torch.randn(4, 64), torch.randn(64, 8)
        >>> exact = x.double() @ w.double()
        >>> bound = of_product(x.double(), w.double(), exact, torch.float32, torch.float32)
        >>> bool(((x @ w - exact).abs() <= bound).all())
        True
    """
    size = lhs.abs() @ rhs.abs()
    bound = ulp(exact, output)
    if bias is not None:  # some kernels round the product before they add the bias
        size = size + bias.abs()
        bound = bound + unit(output) * (exact - bias).abs()
    return bound + of_sums(operands, lhs.size(-1), device, sigma) * size


def of_attention(
    scores: torch.Tensor,
    sizes: torch.Tensor,
    weights: torch.Tensor,
    value: torch.Tensor,
    width: int,
    operands: torch.dtype,
    output: torch.dtype,
    device: str = "cpu",
    sigma: float = SIGMA,
) -> torch.Tensor:
    """How far each element of `weights @ value` may be from the exact one, where weights are a softmax of scores.

    Args:
        scores: `scale * query @ key.T + mask` in float64, `[..., m, s]`, minus infinity where a key is masked.
        sizes: `scale * |query| @ |key|.T`, likewise.
        weights: The softmax of the scores.
        value: `float64[..., s, d]`.
        width: How many products make up a score.
        operands: The dtype of query, key and value. Kernels may round scores and weights to it.
        output: That of the output.
        device: As in `of_product`.
        sigma: As in `of_product`.
    """
    own = unit(operands) + unit(torch.float32) * (operands != torch.float64)
    held = scores.where(weights > 0, 0).abs()
    off = of_sums(operands, width, device, sigma) * sizes + own * (held + held.amax(-1, keepdim=True) + 4)
    off = off.where(weights > 0, 0) * weights
    moduli = value.abs()
    mixed = weights @ moduli
    bound = ulp(weights @ value, output) + off @ moduli + off.sum(-1, keepdim=True) * mixed
    return bound + (of_sums(operands, value.size(-2), device, sigma) + 2 * own) * mixed
