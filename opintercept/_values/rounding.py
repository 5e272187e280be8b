"""How far rounding may move the elements of a product or an attention from what its operands make in float64.

The sums are those of `hooks.Checksum`. Invariant: no bound depends on the output that it judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

SIGMA = 6.0
"""How many standard deviations the roundings of a sum may take."""
_TRIALS = 4
_ROW = 16  # the least elements whose root mean square is taken for a standard deviation


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


def of_adding(terms: float, sigma: float = SIGMA) -> float:
    """How far a sum may be off, in standard deviations of a sum of as many numbers that are off by the unit roundoff.

    Partial sums of n independent numbers grow like square roots, so the roundings of all of them have a root mean
    square of `sqrt(n / 6)` times that.
    """
    return sigma * (1 + math.sqrt(terms / 6))


def noise(
    function: Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor],
    exact: torch.Tensor,
    least: float = 0.0,
) -> torch.Tensor:
    """The standard deviation of each element when each operand is off by its unit roundoff.

    Args:
        function: Computes the output from operands that its argument has changed.
        exact: The output for operands as they are, in float64.
        least: The least roundoff, for kernels that round their operands first.
    """
    generator = torch.Generator().manual_seed(0)

    def off(operand: torch.Tensor) -> torch.Tensor:
        value = widened(operand)
        if not operand.is_floating_point():
            return value
        signs = torch.randint(0, 2, operand.shape, generator=generator).double() * 2 - 1
        return value * (1 + max(unit(operand.dtype), least) * signs)

    square = torch.zeros(exact.shape, dtype=torch.float64)
    for _ in range(_TRIALS):
        square += (function(off) - exact).abs().square().nan_to_num(0.0, 0.0) / _TRIALS
    # A few trials may come out small by chance, so the neighbours count too.
    rows = square if square.dim() and square.shape[-1] >= _ROW else square.reshape(1, -1)
    together = rows.mean(-1, keepdim=True).expand_as(rows).reshape(square.shape)
    return torch.maximum(square, together).sqrt()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64 of numbers that round; of others, in their own dtype."""
    return tensor.to(torch.float64, copy=True) if tensor.is_floating_point() else tensor.clone()


def operand_roundings(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two operands are apart, in unit roundoffs of the coarser dtype beside the largest element of a row.

    Infinite if their shapes differ, if one of them is finite where the other is not, or if integers differ.
    """
    if a.shape != b.shape:
        return math.inf
    if not a.numel():  # as the first keys of a cache
        return 0.0
    if not (a.is_floating_point() and b.is_floating_point()):
        return 0.0 if torch.equal(a, b) else math.inf
    x, y = (each.double().reshape(-1, each.shape[-1] if each.dim() else 1) for each in (a, b))
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((same | (x.isfinite() & y.isfinite())).all()):
        return math.inf
    gap = (y - x).abs().where(~same, 0).amax(-1)
    size = torch.maximum(x, -x).where(x.isfinite(), 0).amax(-1)
    coarser = max(unit(a.dtype), unit(b.dtype))
    return float((gap / (size * coarser).clamp_min(torch.finfo(torch.float64).tiny)).amax())
