"""Reads the weights of a run as rows, one for each output channel, and fingerprints the rows.

Invariant: equal rows have equal fingerprints, whatever the module, the layout and the dtype they are stored in, as long
as their values round to the same bfloat16. Needs numpy. Imports torch to read tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opintercept._core.errors import OpInterceptError
from opintercept._values import hash as _hash
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import Array
from opintercept.runs.store.run import Run

SKETCH = 128  # numbers in a sketch: unrelated rows have a cosine of 0 +- 0.09
_PIECE = 1 << 22  # elements that are widened to 64 bits at once
_LEVELS = 16  # those of a code of 4 bits
_BLOCKS = (8, 16, 32, 64, 128, 256)  # elements that share a scale
_FEW = 0.6  # the number of values of a block with few levels, in proportion to its size
_COLUMNS = 64  # elements of a row that tell its step


@dataclass(frozen=True, slots=True)
class Factors:
    """The tensors of a call, arranged as `x @ w.mT + bias = out`, one product for each of `g` groups."""

    x: torch.Tensor  # [g, m, k]
    w: torch.Tensor  # [g, n, k]
    out: torch.Tensor  # [g, m, n]
    bias: torch.Tensor | None  # [g or 1, m or 1, n]
    packed: bool = False  # the call has quantised `x` and `w` itself

    def only(self, group: int | None) -> Factors:
        """The product of one group; of all if it is None."""
        if group is None:
            return self
        own = slice(group, group + 1)
        bias = self.bias if self.bias is None or len(self.bias) == 1 else self.bias[own]
        return Factors(self.x[own], self.w[own], self.out[own], bias, self.packed)

    def columns(self, bias: bool) -> torch.Tensor:
        """The output as `float64[m, g * n]`, a column for each row of the weight, with or without the bias."""
        out = self.out.double()
        if self.bias is not None and not bias:
            out = out - self.bias.double()
        return out.permute(1, 0, 2).reshape(out.size(1), -1)

    def biases(self) -> torch.Tensor:
        """The bias as `float64[m or 1, g * n]`; there must be one."""
        assert self.bias is not None
        bias = self.bias.double().expand(len(self.w), -1, self.w.size(1))
        return bias.permute(1, 0, 2).reshape(bias.size(1), -1)


def shape_of(call: StoredCall) -> tuple[int, int, int]:
    """The shape `[g, n, k]` of the right operand, whose values are not read; raises OpInterceptError as `weight_of`."""
    batch, _, n, k = _gemm(call)
    _name(call, "rhs")
    shape = call.record.rhs.shape if call.record.rhs is not None else ()
    if math.prod(shape) != batch * n * k or len(shape) > 3:
        raise OpInterceptError(f"its right operand has the shape {list(shape)}")
    return batch, n, k


def weight_of(run: Run, call: StoredCall) -> torch.Tensor:
    """The right operand, `[g, n, k]`; OpInterceptError if it was not recorded, or of no product of two matrices."""
    batch, n, k = shape_of(call)
    rhs = tensor_of(run, call, "rhs")
    if rhs.numel() != batch * n * k:
        raise OpInterceptError(f"its right operand was recorded with the shape {list(rhs.shape)}")
    as_rows = "linear" in call.record.op or (rhs.shape[-2:] != (k, n) and rhs.shape[-2:] == (n, k))
    return rhs.reshape(batch, n, k) if as_rows else rhs.reshape(batch, k, n).mT


def factors_of(run: Run, call: StoredCall) -> Factors:
    """All tensors of a call; OpInterceptError if one was not recorded, or it is no product of two matrices."""
    batch, m, n, k = _gemm(call)
    x, out = tensor_of(run, call, "lhs"), tensor_of(run, call, "output")
    if x.numel() != batch * m * k or out.numel() != batch * m * n:
        raise OpInterceptError(f"its operands have the shapes {list(x.shape)} and {list(out.shape)}")
    arguments = call.arguments or {}
    if any(arguments.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise OpInterceptError("its alpha or beta is not 1")
    bias = tensor_of(run, call, "bias") if call.record.bias is not None else None
    if bias is not None:
        bias = bias.reshape(1, *bias.shape) if bias.dim() == 2 else bias.reshape((1,) * (3 - bias.dim()) + bias.shape)
    return Factors(x.reshape(batch, m, k), weight_of(run, call), out.reshape(batch, m, n), bias)


def _gemm(call: StoredCall) -> tuple[int, int, int, int]:
    gemm = call.record.gemm
    if gemm is None or "conv" in call.record.op:
        raise OpInterceptError("it is not a product of two matrices")
    return gemm[:4]


def _name(call: StoredCall, role: str) -> str:
    name = call.tensors.get(role)
    if name is None or name.endswith(".sample"):
        raise OpInterceptError(f"the values of its {role} were not recorded; record with tensors='full'")
    return name


def tensor_of(run: Run, call: StoredCall, role: str) -> torch.Tensor:
    """The values of an operand or output; OpInterceptError if they were not recorded, or are complex."""
    found = run.load(call.rank, _name(call, role))
    if found.is_complex():
        raise OpInterceptError(f"its {role} is complex")
    return found


def fingerprints(rows: torch.Tensor, *, ordered: bool = True) -> Array:
    """A number for each row of `[n, k]`, `uint64[n]`: a multilinear hash of the bfloat16 bits, see `_values/hash.py`.

    Unless it is `ordered`, the order of the elements does not count.
    """
    found = []
    for piece in rows.split(max(1, _PIECE // max(1, rows.size(1)))):
        bits = (piece.to(torch.bfloat16) + 0.0).view(torch.int16).to(torch.int64) & 0xFFFF  # -0.0 becomes 0.0
        if ordered:
            found.append(sum(_parts(bits), torch.zeros(len(piece), dtype=torch.int64)))
        else:
            found.append(_hash.weights(bits.device, 1 << 16, False)[bits].sum(1))
    return torch.cat(found).numpy().view(np.uint64)


def _parts(bits: torch.Tensor) -> Any:
    """The hashes of pieces of rows: a table has `_hash.BLOCK` weights."""
    for number, part in enumerate(bits.split(_hash.BLOCK, 1)):
        weights = _hash.weights(bits.device, part.size(1), False)
        yield torch.mv(part, weights) * (2 * number + 1)


def sketches(rows: torch.Tensor) -> torch.Tensor:
    """Random projections of normalised rows, `float32[n, SKETCH]`, whose products are about the cosines of the rows.

    W. Johnson and J. Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space", 1984.
    """
    generator = torch.Generator().manual_seed(rows.size(1))
    by = torch.randn(rows.size(1), SKETCH, generator=generator)
    return torch.nn.functional.normalize(rows.float() @ by, dim=1)


def step_of(rows: torch.Tensor) -> torch.Tensor:
    """The distance of neighbouring values of quantised rows, `float64[n]` of `[n, k]`; 0 for rows of more than 8 bits.

    It is the greatest common divisor of the differences of a row's elements, by Euclid's algorithm.
    """
    least = (rows.amax(1) - rows.amin(1)) / 258
    zero = least / 4  # a remainder that is rounding
    found = torch.zeros(len(rows), dtype=torch.float64)
    apart = rows - rows[:, :1]
    # All but a few elements of a row may be on one level, where these few are far larger than they.
    farthest = apart.abs().topk(min(_COLUMNS // 2, rows.size(1)), 1).indices
    some = torch.cat((apart.gather(1, farthest), apart[:, 1 : _COLUMNS // 2]), 1)
    for place in range(some.size(1)):
        column = some[:, place].abs()
        high, low = torch.maximum(found, column), torch.minimum(found, column)
        while bool((low > zero).any()):
            rest = (high - (high / low).round() * low).abs()
            high, low = torch.where(low > zero, low, high), torch.where(low > zero, rest, 0.0)
        known = some[:, : place + 1]  # they say it better than remainders, which add up roundings
        steps = (known / high.where(high > 0, 1)[:, None]).round()
        found = (known * steps).sum(1) / steps.square().sum(1).clamp_min(1)
    steps = (apart / found.where(found > 0, 1)[:, None]).round()
    even = ((apart - steps * found[:, None]).abs() < 0.02 * found[:, None]).all(1)
    return found.where(even & (found > least), 0.0)


def grid_of(rows: torch.Tensor) -> torch.Tensor:
    """How far levels are apart at each element of `[n, k]`, whose rows or blocks of them are quantised; 0 elsewhere.

    Where a row has few levels, such as those of 4-bit floating point, they may be many steps apart.
    """
    found = torch.zeros(rows.shape, dtype=torch.float64)
    for size in (size for size in (rows.size(1), *_BLOCKS) if not rows.size(1) % size):
        steps = step_of(rows.reshape(-1, size)).reshape(-1, rows.size(1) // size)
        steps = steps.where((steps > 0).all(1, keepdim=True), 0)
        found = found.maximum(steps.repeat_interleave(size, 1))  # blocks may seem to have a finer one in common
    gaps, share = _gaps((rows / found.where(found > 0, 1)).round(), rows.size(1))
    return found * gaps.where(share * rows.size(1) <= _LEVELS, 1).clamp_min(1)


def gaps_of(rows: torch.Tensor) -> torch.Tensor:
    """How far each element of `[n, k]` is from the next level, `float64[n, k]`; 0 where rows do not have few levels.

    Codes as NF4 give a block of a row few values at uneven distances. The widest gap counts of blocks with few values.
    """
    found = torch.zeros(rows.shape, dtype=torch.float64)
    for size in (size for size in _BLOCKS if not rows.size(1) % size):
        gaps, share = _gaps(rows, size)
        found = torch.where(share < _FEW, gaps, 0.0).maximum(found)
    return found


def _gaps(rows: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distance to the next value of a block at each element, and the number of values in proportion, `[n, 1]`."""
    order = rows.reshape(len(rows), -1, size).sort(-1)
    steps = order.values.diff(dim=-1)
    share = ((steps != 0).sum(-1) + 1).double().amax(1, keepdim=True) / size
    nothing = torch.zeros_like(order.values[..., :1])  # a row of one number has no steps
    below, above = torch.cat((nothing, steps), -1), torch.cat((steps, nothing), -1)
    below, above = _filled(below), _filled(above.flip(-1)).flip(-1)
    gaps = below.maximum(above) * (2.0 - ((below > 0) & (above > 0)).double())  # a level that no element has
    return torch.zeros_like(gaps).scatter(-1, order.indices, gaps).reshape(rows.shape), share


def _filled(steps: torch.Tensor) -> torch.Tensor:
    """Each element, or where it is 0 the last one before that is not."""
    places = torch.arange(steps.size(-1)).expand_as(steps).where(steps != 0, 0).cummax(-1).values
    return steps.gather(-1, places)
