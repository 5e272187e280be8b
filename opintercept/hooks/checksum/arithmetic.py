"""The arithmetic of `Checksum`: random checksums of a product, and what rounding may do to one row of it.

A product C = A B is checked in two stages. The screen compares sums over columns, C E with A (B E), and only picks rows
to look at. `examine` then computes such a row exactly, and decides. Invariant: nothing here waits for a device, and no
limit depends on the output that it judges. Must not import the hook.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from opintercept._core.tensors import is_strided
from opintercept._native import values as native
from opintercept._values.hash import check_unwrapped
from opintercept.hooks.checksum.memory import ColumnSums
from opintercept.hooks.checksum.memory import Memory as Memory
from opintercept.hooks.checksum.products import Product

PIECE = 1 << 18
"""How many elements are converted at a time: 1 MiB of float32, which stays in the cache."""
GROUP = 16
"""The least columns that share a checksum where the output has few digits; fewer columns have less rounding."""
MOST_GROUPS = 48

_LOW = (torch.float16, torch.bfloat16)
_IN_CPP = (torch.float32, torch.float64)


class Units(NamedTuple):
    """Unit roundoffs: the largest relative error of rounding a number once."""

    sums: float  # of the sums inside the product
    output: float  # of the output's dtype
    operands: float  # of the precision to which the operator may round its operands first; 0 if it does not
    partial: float  # of the dtype in which a device may add up parts of the sums; 0 if it does not


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def units_of(product: Product, output: torch.dtype) -> Units:
    """The unit roundoffs of a product on its device, under the current settings of `torch.backends`."""
    dtype, device = product.lhs.dtype, product.lhs.device.type
    settings: tuple[Any, ...] = ()
    if dtype is torch.float32 or dtype is torch.complex64:
        backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        settings = (backend.matmul.fp32_precision,)
    elif device == "cuda" and dtype in _LOW:
        matmul = torch.backends.cuda.matmul
        settings = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    return _units(dtype, output, device, settings, product.coarse, product.fast)


@cache
def _units(
    dtype: torch.dtype,
    output: torch.dtype,
    device: str,
    settings: tuple[Any, ...],
    coarse: torch.dtype | None,
    fast: bool,
) -> Units:
    sums = unit(torch.float64) if dtype in (torch.float64, torch.complex128) else unit(torch.float32)
    own, out = unit(dtype), unit(output)
    operands = partial = 0.0
    if device == "cuda" and own > unit(torch.float32):
        # Tensor cores cut sums off instead of rounding them (Fasi, Higham, Mikaitis and Pranesh, 2021, doi
        # 10.7717/peerj-cs.330), and those of Hopper add float8 products in 14 bits unless told otherwise.
        sums = 2.0**-13 if fast or dtype.itemsize == 1 else 4 * sums
        partial = out if dtype in _LOW and settings[_LOW.index(dtype)] else 0.0
    if dtype in (torch.float32, torch.complex64):
        operands = {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(settings[0], 0.0)
    if coarse is not None:
        operands = max(operands, unit(coarse))
    if out > own and dtype.itemsize > 1:  # autocast has rounded the operands to the output's dtype
        operands = max(operands, out)
    if dtype.is_complex:  # Brent, Percival and Zimmermann, Math. Comp. 76 (2007)
        sums *= math.sqrt(5)
    return Units(sums, out, operands, partial)


def groups_of(product: Product, fine: bool) -> int:
    """How many checksums a row has: one, or several where the output's own rounding would hide much in one."""
    n, k = product.rhs.shape[-1], product.rhs.shape[-2]
    if not fine and product.lhs.dtype not in _LOW and product.lhs.dtype.itemsize > 1:
        return 1
    return max(1, min(n // GROUP, MOST_GROUPS, k // 8))


@cache
def _signs(n: int) -> torch.Tensor:
    drawn = bytearray(random.Random(n).randbytes(n))  # by Python, since vmap has no torch.randint
    return check_unwrapped((torch.frombuffer(drawn, dtype=torch.uint8) & 1).float() * 2 - 1)


@cache
def signs_in(n: int, dtype: torch.dtype) -> torch.Tensor:
    """The random signs of n columns, `[n]`, on the CPU."""
    return check_unwrapped(_signs(n).to(dtype))


def signs_for(n: int, wide: bool) -> torch.Tensor:
    """`signs_in` for kernels."""
    return signs_in(n, torch.float64 if wide else torch.float32)


@cache
def signs(n: int, groups: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random signs, `[n, groups]`; each column of a product belongs to one group, and is 0 in the others.

    They depend on nothing but `n`, so that the checksums of a weight can be remembered and ranks agree.
    """
    width = -(-n // groups)
    matrix = torch.zeros(n, groups, dtype=torch.float32, device="cpu")
    places = torch.arange(n, device="cpu")
    matrix[places, places // width] = _signs(n)
    return check_unwrapped(matrix.to(device, dtype))


def project(
    x: torch.Tensor, w: torch.Tensor, norms: bool = False, less: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `x @ w - less` in the dtype of `w`, and the norms of the rows of `x`, without a converted copy of it all.

    `x` is `[m, k]` or `[b, m, k]`, of any dtype and layout, and `w` `[k, g]` or `[b, k, g]`. The norms have a last
    dimension of 1; they are None for sparse tensors, and if nobody asks for them.
    """
    wide = w.dtype
    if x.is_cpu and wide in _IN_CPP:
        found = torch.empty(*x.shape[:-1], w.shape[-1], dtype=wide, device=x.device)
        length = torch.empty(*x.shape[:-1], 1, dtype=wide, device=x.device) if norms else None
        if native.project(x, w, found, length):
            return (found if less is None else found - less), length
    if less is not None and not (x.dim() == 2 and x.numel() <= PIECE and is_strided(x)):
        product, lengths = project(x, w, norms)
        return product - less, lengths
    if not is_strided(x):
        return x.to(wide) @ w, None
    same = x.dtype == wide
    if x.numel() <= PIECE or (same and not norms):
        values = x if same else x.to(wide)
        if less is not None:
            product = torch.addmm(less, values, w, beta=-1)
        else:
            product = torch.mm(values, w) if values.dim() == 2 else torch.matmul(values, w)
        return product, _norm(values, -1) if norms else None
    if x.dim() == 3:
        step = max(1, PIECE // (x.shape[1] * x.shape[2]))
        parts = [first if step == 1 else slice(first, first + step) for first in range(0, x.shape[0], step)]
        join = torch.stack if step == 1 else torch.cat
        pieces = [project(x[p], w[p] if w.dim() == 3 else w, norms) for p in parts]
        found_norms = [norm for _, norm in pieces if norm is not None]
        return join([one for one, _ in pieces]), join(found_norms) if found_norms else None
    if x.stride(0) == 1 and x.stride(1) > 1 and not same:
        return _project_columns(x, w, norms)
    rows, columns = x.shape
    step = max(1, PIECE // columns)
    product = torch.empty(rows, w.size(1), dtype=wide, device=x.device)
    lengths = torch.empty(rows, 1, dtype=wide.to_real(), device=x.device) if norms else None
    room = None if same else torch.empty(step, columns, dtype=wide, device=x.device)
    for first in range(0, rows, step):
        values = x[first : first + step]
        if room is not None:
            values = room[: values.shape[0]].copy_(values)
        torch.mm(values, w, out=product[first : first + step])
        if lengths is not None:
            lengths[first : first + step] = _norm(values, -1)
    return product, lengths


def sign_sums(x: torch.Tensor, matrix: torch.Tensor, less: torch.Tensor | None = None) -> torch.Tensor:
    """Compute `x @ matrix` for a matrix of `signs`, less what `less` holds."""
    n, groups = matrix.shape
    if x.is_cpu and matrix.dtype in _IN_CPP:
        found = torch.empty(*x.shape[:-1], groups, dtype=matrix.dtype, device=x.device)
        if native.sign_sums(x, signs_in(n, matrix.dtype), found):
            return found if less is None else found - less
    return project(x, matrix, less=less)[0]


def _project_columns(x: torch.Tensor, w: torch.Tensor, norms: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`project` of a transposed matrix, read in the order of its memory."""
    rows, columns = x.shape
    step = max(1, PIECE // rows)
    product = torch.zeros(rows, w.size(1), dtype=w.dtype, device=x.device)
    squares = torch.zeros(rows, dtype=w.dtype.to_real(), device=x.device)
    room = torch.empty(step, rows, dtype=w.dtype, device=x.device)
    for first in range(0, columns, step):
        values = x[:, first : first + step].mT
        values = room[: values.shape[0]].copy_(values)
        product.addmm_(values.mT, w[first : first + step])
        if norms:
            squares += torch.linalg.vector_norm(values, dim=0).square()
    return product, squares.sqrt().unsqueeze(1) if norms else None


Taken = tuple[torch.Tensor, torch.Tensor, bool]


class Expected(NamedTuple):
    """What the checksums of a product should be, from its operands alone."""

    product: Product  # with the operands as they were
    signs: torch.Tensor  # [n, g]
    inner: torch.Tensor  # B E, [*b, k, g]
    middle: torch.Tensor  # A (B E), [*b, m, g]
    sums: torch.Tensor  # what C E should be, [*b, m, g]
    size: torch.Tensor  # about the norm of the elements in each group, [*b, m, g], which scales rounding errors
    remembered: bool  # whether `inner` was remembered


def fine_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the few numbers that are left of a product."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide_dtype(product: Product, exact: bool) -> torch.dtype:
    """The dtype of the checksums; `exact` if float32 is not enough for a float32 product, whose errors are as small."""
    dtype = product.lhs.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.float64 if dtype.itemsize == 1 else torch.int64
    wide = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    return torch.promote_types(wide, torch.float64) if exact else wide


def expect(
    product: Product, wide: torch.dtype, groups: int, memory: Memory | None, taken: Taken | None = None
) -> Expected:
    """Compute what the checksums of the output should be, in the dtype `wide` and so many groups of columns.

    `memory` is where to look for the checksums of a weight, and to keep them. `taken` is B E, A (B E) and whether the
    first is remembered, if a kernel has computed them before.
    """
    lhs, rhs, device = product.lhs, product.rhs, product.lhs.device
    matrix = signs(rhs.shape[-1], groups, wide, device)
    integer = not (wide.is_floating_point or wide.is_complex)
    kept = memory.look_up(rhs, matrix) if memory is not None and taken is None and product.columns is None else None
    if taken is not None:
        inner = taken[0]
    elif kept is None:
        if product.columns is None:
            inner = sign_sums(rhs, matrix)
        else:
            inner, _ = project(rhs, matrix * product.columns.to(wide).reshape(-1, 1))
    else:
        inner, scale = kept
    middle, norms = project(lhs, inner, norms=not integer)
    remembered = kept is not None
    if taken is not None:
        middle, remembered = taken[1], taken[2]
    if integer:
        sums = middle * product.alpha
        if product.bias is not None:
            sums = sums + product.beta * _bias_sums(product.bias, matrix)
        return Expected(product, matrix, inner, middle, sums, sums, remembered)
    sums = middle
    if product.rows is not None:
        sums = sums * product.rows
        norms = norms if norms is None else norms * product.rows.abs()
    if norms is not None and kept is None:
        # How much of |A_i| |B| is left of A_i B: all if the terms have one sign, 1 / sqrt(k) if they have any. The
        # checksums of a few rows may be less by chance, and those of later rows more.
        scale = _norm(inner, -2)
        left = torch.linalg.vector_norm(sums) / torch.linalg.vector_norm(norms * scale)
        left = left.nan_to_num(0.0, 0.0)  # one row that is not finite must not make all rows suspect
        scale = scale * left.clamp_min(1 / math.sqrt(rhs.shape[-2] * sums.numel()))
        if memory is not None and product.columns is None:
            memory.keep(rhs, matrix, (inner, scale))
    if product.alpha != 1:
        sums = sums * product.alpha
        norms = norms if norms is None else norms * abs(product.alpha)
    bias = None if product.bias is None else _bias_of_product(product.bias, matrix, memory)
    if bias is not None:
        sums = torch.add(sums, bias[0], alpha=product.beta)
    size = sums.abs() if wide.is_complex else sums
    smooth = _norm(size, -2) / math.sqrt(size.shape[-2]) if norms is None else norms * scale
    if bias is not None:
        smooth = torch.add(smooth, bias[1], alpha=abs(product.beta))
    return Expected(product, matrix, inner, middle, sums, torch.hypot(size, smooth), remembered)


def _norm(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The norm over a dimension, which stays."""
    found: torch.Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    return found


def _bias_of_product(bias: torch.Tensor, matrix: torch.Tensor, memory: Memory | None) -> ColumnSums:
    """The checksums of a bias, `[*b, m, g]`, and about the norm of its elements in each group."""
    kept = None if memory is None else memory.look_up(bias, matrix)
    if kept is not None:
        return kept
    added = _bias_sums(bias, matrix)
    if added.shape[-2] > 1:
        size = added.abs()
        size = torch.hypot(size, _norm(size, -2) / math.sqrt(size.shape[-2]))
    else:
        squares = bias.to(matrix.dtype).abs().square().to(matrix.dtype)
        size = _bias_sums(squares, matrix.abs().to(matrix.dtype)).abs().sqrt()
    if memory is not None:
        memory.keep(bias, matrix, (added, size))
    return added, size


def _bias_sums(bias: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The checksums of a bias that broadcasts to `[*b, m, n]`."""
    if not is_strided(bias):
        return bias.to(matrix.dtype) @ matrix
    if not bias.dim() or bias.shape[-1] != matrix.shape[0]:
        bias = bias.expand(*bias.shape[:-1], matrix.shape[0])
    return sign_sums(bias if bias.dim() > 1 else bias.unsqueeze(0), matrix)


class Screen(NamedTuple):
    """How far the checksums of an output are from what they should be."""

    residual: torch.Tensor  # C E - A (B E), [*b, m, g]
    relative: torch.Tensor  # its size beside that of the elements, [*b, m, g]
    deviation: float  # the standard deviation of `relative`

    def rows(self) -> torch.Tensor:
        """The residuals in standard deviations, for each row, `[*b * m]`: the worst group, or all together."""
        groups = self.relative.shape[-1]
        worst = self.relative.amax(-1) / self.deviation
        if groups > 1:
            together = _norm(self.relative, -1).squeeze(-1) / self.deviation - math.sqrt(groups)
            worst = torch.maximum(worst, together)
        return worst.reshape(-1)

    def groups(self) -> torch.Tensor | None:
        """The same for each group, all rows together, `[*b * g]`; None if there is one."""
        if self.relative.shape[-1] == 1:
            return None
        whole = _norm(self.relative, -2).squeeze(-2) / self.deviation - math.sqrt(self.relative.shape[-2])
        return whole.reshape(-1)

    def worst(self) -> torch.Tensor:
        """The largest of all, NaN or infinite if the checksums are."""
        groups = self.groups()
        if groups is None:
            return self.relative.amax() / self.deviation
        return torch.maximum(self.rows().amax(), groups.amax())


def screen(expected: Expected, output: torch.Tensor, units: Units) -> Screen:
    """Compare the checksums of an output `[*b, m, n]` with what they should be.

    The standard deviations are those of a model: errors of rounding are independent, with a mean of zero, and each
    partial sum grows like the whole (Higham and Mary, SIAM J. Sci. Comput. 42(5), 2020, for random data). They only
    decide which rows `examine` looks at, so the model need not hold.
    """
    wide = expected.signs.dtype
    residual = sign_sums(output, expected.signs, less=expected.sums)
    if not (wide.is_floating_point or wide.is_complex):
        residual = residual.to(output.dtype)
    if not _rounds(expected.product.lhs.dtype):
        nothing = torch.zeros((), dtype=fine_dtype(output.device), device=output.device)
        return Screen(residual, torch.where(residual == 0, nothing, math.inf), 1.0)
    k, n = expected.product.rhs.shape[-2:]
    own, groups = unit(wide), expected.signs.shape[1]
    variance = (units.sums**2 * (k + 1) + own**2 * (k + n / groups)) / 6
    rounded = expected.product.partial + expected.product.apart
    variance += 0.2 * (units.output**2 * rounded + 4 * units.partial**2 + 2 * units.operands**2)
    deviation = math.sqrt(variance)
    least = torch.finfo(wide).tiny / deviation * (k + 2)
    return Screen(residual, residual.abs() / expected.size.clamp_min(least), deviation)


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class Examined(NamedTuple):
    """Elements of an output beside their exact values, all `[r, c]` in float64."""

    got: torch.Tensor
    exact: torch.Tensor
    error: torch.Tensor  # how far they are from it; 0 where the exact value is not finite, or may overflow on the way
    bound: torch.Tensor  # how far rounding may move them
    deviation: torch.Tensor  # the part of the bound that does not depend on sigma, and one standard deviation

    def verdict(self, sigma: float) -> torch.Tensor:
        """`[2]`: the largest of the three figures below relative to its limit, and the flat index of the worst element.

        A single element may be off by `bound`. The errors of a row, and those of a column, each in terms of its
        `deviation`, have a norm of at most about the root of their number, and `sigma` more.
        """
        right = self.error == 0
        ratio = (self.error / self.bound).nan_to_num(math.inf).where(~right, 0)
        relative = (self.error / self.deviation).nan_to_num(math.inf).where(~right, 0).square()
        worst = ratio.amax()
        for dim in (0, 1):
            count = relative.shape[dim]
            norm = relative.sum(dim).sqrt().amax() / (math.sqrt(count) + sigma)
            worst = torch.maximum(worst, norm)
        place = ratio.reshape(-1).argmax()
        return torch.stack([worst, place.to(worst.dtype)])


def examine(
    product: Product,
    output: torch.Tensor,
    units: Units,
    sigma: float,
    batch: torch.Tensor | None,
    rows: torch.Tensor,
    columns: slice = slice(None),
) -> Examined:
    """Compute rows of a product in float64, and how far rounding may move their elements.

    A sum of k products has an error of at most lambda sqrt(k) u (|A| |B|) with a probability of at least 1 - 2 k
    exp(-lambda**2 / 2), whatever the order of the sums, if the errors of rounding are independent (Higham and Mary,
    SIAM J. Sci. Comput. 41(5), 2019, theorem 3.1). Those of equal numbers are not: each rounds the same way, and a sum
    that grows evenly may collect k / 2 u (|A| |B|) (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 4.2).
    The bound is the sum of the two, with `sigma` for lambda, and one ulp of the output. u is `units.sums`.

    `output` is what `product.out` returns, `batch` the index of the matrix, `[1]`, or None if there is one product, and
    `rows` the indices of the rows, `[r]`.
    """
    lhs, rhs, found = _dense(product.lhs), _dense(product.rhs), _dense(output)
    if batch is not None:
        lhs, rhs, found = (t.index_select(0, batch).squeeze(0) for t in (lhs, rhs, found))
    left, found = lhs.index_select(0, rows), found.index_select(0, rows)[:, columns]
    rhs = rhs[:, columns]
    if not _rounds(left.dtype):
        return _examined_integers(product, left, rhs, found, batch, rows, columns)
    fine = fine_dtype(left.device)
    fine = fine.to_complex() if left.is_complex() else fine
    left, got = left.to(fine), found.to(fine)
    shape = left.shape[0], rhs.shape[1]
    value = torch.zeros(shape, dtype=fine, device=left.device)
    size, square = (torch.zeros(shape, dtype=fine.to_real(), device=left.device) for _ in range(2))
    magnitudes = left.abs()
    step = max(1, 8 * PIECE // max(1, rhs.shape[1]))
    wants_squares = bool(units.operands or units.partial)
    for first in range(0, rhs.shape[0], step):
        part, here = rhs[first : first + step].to(fine), slice(first, first + step)
        value += left[:, here] @ part
        part = part.abs()
        size += magnitudes[:, here] @ part
        if wants_squares:
            square += magnitudes[:, here].square() @ part.square()
    factor: Any = product.alpha
    for scale, dim in ((product.rows, 0), (product.columns, 1)):
        if scale is not None:
            scale = scale.to(fine)
            scale = (
                scale.expand(lhs.shape[0], 1)[rows] if dim == 0 else scale.expand(1, product.rhs.shape[-1])[:, columns]
            )
            factor = factor * scale
    weight, whole = abs(factor), size
    value, size, square = value * factor, size * weight, square * (weight * weight)
    apart = value.abs() * (product.apart * (1 if product.alpha == 1 else 2))
    if product.bias is not None:
        bias = _bias_of(product, batch, rows, columns).to(fine)
        whole, bias = torch.maximum(whole, bias.abs().expand_as(whole)), bias * product.beta
        value, size = value + bias, size + bias.abs()
        if product.apart and product.beta != 1:
            apart = apart + 2 * bias.abs()
    k, dtype = product.lhs.shape[-1], output.dtype.to_real()
    info, modulus = torch.finfo(dtype), value.abs()
    inside = torch.finfo(torch.promote_types(dtype, torch.float32))
    between = info if product.apart or product.partial > 1 else inside  # what the operator has between its steps
    grain = info.tiny * info.eps if between.dtype == "float16" else inside.tiny  # to which it rounds alpha and beta
    floor: Any = (k + 2) * inside.tiny * max(1.0, abs(product.alpha)) + (0.0 if dtype == torch.float16 else info.tiny)
    if product.alpha != 1 or product.beta != 1:
        floor = floor + 2 * grain * whole
    converts = dtype == torch.float16 and lhs.dtype != dtype and lhs.dtype.itemsize > 1  # as autocast does
    largest = torch.maximum(whole, size).clamp_min(max(abs(product.alpha), abs(product.beta)))
    if converts or abs(product.alpha) > 1:  # by which a device may multiply the operands
        most = torch.maximum(magnitudes.amax(), rhs.abs().amax().to(size.dtype))
        largest = torch.maximum(largest, most * max(abs(product.alpha), inside.max / info.max * converts))
    if converts or (product.partial > 1 and product.alpha != 1):  # small operands lose digits
        floor = floor + info.tiny * info.eps * (magnitudes.sum(1, keepdim=True) + rhs.abs().sum(0, dtype=size.dtype))
    ulp = _power(size if product.partial > 1 else modulus, info) * info.eps * product.partial
    own = units.sums + unit(fine)
    variance = (own**2 * (k + 2)) * size.square()
    if wants_squares:
        variance += 2 * units.operands**2 * square + 4 * units.partial**2 * (square + modulus.square())
    deviation = ulp / math.sqrt(2) + own * (k + 2) / 2 * size + units.output * apart + floor
    bound = ulp / 2 + deviation + sigma * variance.sqrt()
    error = (got - value).abs()
    # An overflow on the way is no error, even if a tiny alpha makes the exact value finite again, nor is what becomes
    # of values that are not finite to begin with.
    free = ~((modulus + bound < info.max) & (largest < between.max))
    error = error.where(~free, 0)
    return Examined(got, value, error, bound, deviation + variance.sqrt())


def _bias_of(product: Product, batch: torch.Tensor | None, rows: torch.Tensor, columns: slice) -> torch.Tensor:
    """The rows of the bias that belong to rows of the output."""
    assert product.bias is not None
    bias = _dense(product.bias).expand(*product.rhs.shape[:-2], product.lhs.shape[-2], product.rhs.shape[-1])
    bias = bias if batch is None else bias.index_select(0, batch).squeeze(0)
    return bias.index_select(0, rows)[:, columns]


def _examined_integers(
    product: Product,
    left: torch.Tensor,
    rhs: torch.Tensor,
    got: torch.Tensor,
    batch: torch.Tensor | None,
    rows: torch.Tensor,
    columns: slice,
) -> Examined:
    """Integers do not round. They wrap, in the output's dtype and in int64 alike."""
    exact = torch.zeros(left.shape[0], rhs.shape[1], dtype=torch.int64, device=left.device)
    for term in range(0, left.shape[1], 256):  # CUDA has no product of integers
        part = left[:, term : term + 256, None].long() * rhs[None, term : term + 256].long()
        exact += part.sum(1)
    exact = exact * product.alpha
    if product.bias is not None:
        exact = exact + product.beta * _bias_of(product, batch, rows, columns).long()
    exact = exact.to(got.dtype)
    error = (got.double() - exact.double()).abs().where(got != exact, 0)
    nothing = torch.zeros_like(error)
    return Examined(got.double(), exact.double(), error, nothing, nothing)


def _power(values: torch.Tensor, info: torch.finfo) -> torch.Tensor:
    """The power of two at or below each value, at least the smallest normal number."""
    return torch.exp2(values.clamp(info.smallest_normal, info.max).log2().floor())


def same(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal, NaN included."""
    return (one == other) | ((one != one) & (other != other))


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN included. Waits for the device."""
    return one.shape == other.shape and bool(same(one, other).all())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if is_strided(tensor) else tensor.to_dense()


def row_places(product: Product, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
    """Group flat indices of rows, on the CPU, by matrix of the batch: yield `(batch, rows)` as `examine` takes them."""
    if product.lhs.dim() == 2:
        yield None, flat
        return
    batches, rows = flat // product.lhs.shape[1], flat % product.lhs.shape[1]
    for batch in batches.unique():
        yield batch.reshape(1), rows[batches == batch]
