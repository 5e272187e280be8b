"""The arithmetic of `Checksum`: random checksums of a product, and what rounding may do to one row of it.

A product C = A B is checked in two stages. The screen compares sums over columns, C E with A (B E), and only picks rows
to look at. `examine` then computes such a row exactly, and decides. Invariant: nothing here waits for a device, and no
limit depends on the output that it judges. Must not import the hook.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from opintercept._core.tensors import is_strided
from opintercept._native import values as native
from opintercept._native.layout import GROUP, MOST_GROUPS
from opintercept._values.hash import check_unwrapped
from opintercept._values.precision import TENSOR_CORES, product_precision, reduced_sums
from opintercept._values.read import parameter_of
from opintercept.hooks.checksum.memory import BiasCopy, BiasSums, NewWeight, WeightSums
from opintercept.hooks.checksum.memory import Memory as Memory
from opintercept.hooks.checksum.products import Product

PIECE = 1 << 18
"""How many elements are converted at a time: 1 MiB of float32, which stays in the cache."""
DEVICE_PIECE = 1 << 24
"""The same on a device, where each operator costs more than its memory does."""
PARTS = 32
"""Into how many parts a row's sums are taken apart where a device may round parts of them."""
MANY = 32
"""From so many rows on, the mean of one checksum over them tells how large elements are."""

_LOW = (torch.float16, torch.bfloat16)
_IN_CPP = (torch.float32, torch.float64)


class Units(NamedTuple):
    """Unit roundoffs: the largest relative error of rounding a number once."""

    sums: float  # of the sums inside the product
    output: float  # of the output's dtype
    operands: float  # of the precision to which the operator may round its operands first; 0 if it does not
    partial: float  # of the dtype in which a device may add up parts of the sums; 0 if it does not
    cuts: bool = False  # whether a device may round float32 operands to 11 bits, all in one direction
    flags: tuple[str, ...] = ()  # the settings that let sums overflow in the output's dtype


def unit(dtype: torch.dtype) -> float:
    """The unit roundoff of a dtype; 0 for integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def units_of(product: Product, output: torch.dtype) -> Units:
    """The unit roundoffs of a product on its device, under the current settings of `torch.backends`."""
    dtype, device = product.lhs.dtype, product.lhs.device
    precision = product_precision(device) if dtype is torch.float32 or dtype is torch.complex64 else "highest"
    flags, on_cores = reduced_sums(_computed(dtype, output), device), device.type in TENSOR_CORES
    return _units(dtype, output, on_cores, precision, flags, product.coarse, product.fast)


def _computed(operands: torch.dtype, output: torch.dtype) -> torch.dtype:
    """The dtype of the operands when they are multiplied: that of the output if autocast has rounded them to it."""
    return output if unit(output) > unit(operands) and operands.itemsize > 1 else operands


@cache
def _units(
    dtype: torch.dtype,
    output: torch.dtype,
    on_cores: bool,
    precision: str,
    flags: tuple[str, ...],
    coarse: torch.dtype | None,
    fast: bool,
) -> Units:
    sums = unit(torch.float64) if dtype in (torch.float64, torch.complex128) else unit(torch.float32)
    own, out = unit(_computed(dtype, output)), unit(output)
    cuts = on_cores and precision == "tf32"
    if cuts or (on_cores and own > unit(torch.float32)):
        # Tensor cores cut sums off instead of rounding them (Fasi, Higham, Mikaitis and Pranesh, 2021, doi
        # 10.7717/peerj-cs.330), and those of Hopper add float8 products in 14 bits unless told otherwise.
        sums = 2.0**-13 if fast or dtype.itemsize == 1 else 4 * sums
    if any("accumulation" in flag for flag in flags):
        sums = max(sums, own)
    operands = {"tf32": 2.0**-11, "bf16": 2.0**-8}.get(precision, 0.0)
    if coarse is not None:
        operands = max(operands, unit(coarse))
    if own > unit(dtype):
        operands = max(operands, own)
    if dtype.is_complex:  # Brent, Percival and Zimmermann, Math. Comp. 76 (2007)
        sums *= math.sqrt(5)
    return Units(sums, out, operands, out if flags else 0.0, cuts, flags if output is torch.float16 else ())


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


@cache
def _number(value: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # A copy from the host waits, so that another stream may read it too.
    return check_unwrapped(torch.full((), value, dtype=dtype, device="cpu").to(device))


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
    same, piece = x.dtype == wide, PIECE if x.is_cpu else DEVICE_PIECE
    if less is not None and not (x.dim() == 2 and x.numel() <= piece and is_strided(x)):
        product, lengths = project(x, w, norms)
        return product - less, lengths
    if not is_strided(x):
        return x.to(wide) @ w, None
    if x.numel() <= piece or (same and not norms):
        values = x if same else x.to(wide)
        if less is not None:
            product = torch.addmm(less, values, w, beta=-1)
        else:
            product = torch.mm(values, w) if values.dim() == 2 else torch.matmul(values, w)
        return product, _norm(values, -1) if norms else None
    if x.dim() == 3:
        step = max(1, piece // (x.shape[1] * x.shape[2]))
        parts = [first if step == 1 else slice(first, first + step) for first in range(0, x.shape[0], step)]
        join = torch.stack if step == 1 else torch.cat
        pieces = [project(x[p], w[p] if w.dim() == 3 else w, norms) for p in parts]
        found_norms = [norm for _, norm in pieces if norm is not None]
        return join([one for one, _ in pieces]), join(found_norms) if found_norms else None
    if x.stride(0) == 1 and x.stride(1) > 1 and not same:
        return _project_columns(x, w, norms)
    rows, columns = x.shape
    step = max(1, piece // columns)
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
    if less is not None and x.dim() == 3 and not x.is_cpu and x.is_contiguous():  # in one operator
        return project(x.flatten(0, 1), matrix, less=less.flatten(0, 1))[0].view_as(less)
    return project(x, matrix, less=less)[0]


def _project_columns(x: torch.Tensor, w: torch.Tensor, norms: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`project` of a transposed matrix, read in the order of its memory."""
    rows, columns = x.shape
    step = max(1, (PIECE if x.is_cpu else DEVICE_PIECE) // rows)
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
    kept = _recall(memory, rhs, matrix) if memory is not None and taken is None and product.columns is None else None
    if taken is not None:
        inner = taken[0]
    elif kept is None:
        if product.columns is None:
            inner = sign_sums(rhs, matrix)
        else:
            inner, _ = project(rhs, matrix * product.columns.to(wide).reshape(-1, 1))
    else:
        inner, scale = kept
    few = wide.is_floating_point and is_strided(lhs) and lhs.numel() <= DEVICE_PIECE and product.rows is None
    if few and not lhs.is_cpu:
        return _expect_on_device(product, matrix, inner, kept, memory)
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
    k, least = rhs.shape[-2], _least(rhs, matrix)
    lengths, share = norms, 1.0
    if norms is not None and kept is None:
        scale = _norm(inner, -2)
        lengths = torch.addcmul(least, norms, scale)
        scale, share, whole = *_left(sums, lengths, k), scale
        if memory is not None and product.columns is None and parameter_of(rhs) is not None:
            memory.keep(rhs, matrix, WeightSums(inner, torch.addcmul(least, whole, scale, value=share)))
    if product.alpha != 1:
        sums = sums * product.alpha
        share *= abs(product.alpha)
    bias = None if product.bias is None else _bias_of_product(product.bias, matrix, least, memory)
    if bias is not None:
        sums = torch.add(sums, bias.sums, alpha=product.beta)
        least = bias.norms if abs(product.beta) == 1 else bias.norms * abs(product.beta) + least
    size = sums.abs() if wide.is_complex else sums
    if lengths is None:
        smooth = _norm(size, -2) / math.sqrt(size.shape[-2]) + least
    else:
        smooth = torch.addcmul(least, lengths, scale, value=share)
    return Expected(product, matrix, inner, middle, sums, torch.hypot(size, smooth), remembered)


def _least(rhs: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """The size of errors that are those of numbers too small for the dtype."""
    wide = matrix.dtype
    return _number(torch.finfo(wide).tiny / unit(wide) * (rhs.shape[-2] + 2), wide.to_real(), matrix.device)


def _expect_on_device(
    product: Product, matrix: torch.Tensor, inner: torch.Tensor, kept: WeightSums | None, memory: Memory | None
) -> Expected:
    """`expect` in few launches."""
    lhs, rhs, wide, least = product.lhs, product.rhs, matrix.dtype, _least(product.rhs, matrix)
    bias, beta, size = least, product.beta if product.bias is not None else 0, least
    if product.bias is not None:
        product, bias, size = _with_own_bias(product, matrix, memory)
    values = lhs if lhs.dtype == wide else lhs.to(wide)
    both = torch.empty(2, *lhs.shape[:-1], inner.shape[-1], dtype=wide, device=lhs.device)
    multiply = torch.addmm if lhs.dim() == 2 else torch.baddbmm
    sums = multiply(bias, values, inner, beta=beta, alpha=product.alpha, out=both[0])
    norms, one = _norm(values, -1), _number(1.0, wide, lhs.device)
    if kept is not None:
        smooth = torch.addcmul(size, norms, kept.factor)
    else:  # what is left of |A_i| |B|: see `_left`
        many = sums.dim() == 2 and sums.shape[1] == 1 and len(sums) >= MANY
        scale = one if many else _norm(inner, -2)
        lengths = torch.addcmul(least, norms.expand_as(sums), scale, out=both[1])
        part, whole = torch.linalg.vector_norm(both.flatten(1), 1, 1)
        floor = 1.0 if many else 1 / math.sqrt(rhs.shape[-2] * sums.numel())
        left = part / whole if many else torch.addcdiv(one, part, whole, value=1 / floor)
        smooth = torch.addcmul(size, lengths, left, value=floor)
        if memory is not None and product.columns is None:
            memory.keep(rhs, matrix, WeightSums(inner, left) if many else NewWeight(inner, scale, left, floor))
    return Expected(product, matrix, inner, sums, sums, torch.hypot(sums, smooth), kept is not None)


def _recall(memory: Memory, rhs: torch.Tensor, matrix: torch.Tensor) -> WeightSums | None:
    """The checksums of a weight, if they are remembered; the second product with it multiplies their factors."""
    kept = memory.look_up(rhs, matrix)
    if isinstance(kept, NewWeight):
        kept = WeightSums(kept.inner, torch.addcmul(_least(rhs, matrix), kept.scale, kept.left, value=kept.floor))
        memory.keep(rhs, matrix, kept)
    return kept if isinstance(kept, WeightSums) else None


def _with_own_bias(
    product: Product, matrix: torch.Tensor, memory: Memory | None
) -> tuple[Product, torch.Tensor, torch.Tensor]:
    """The product with a copy of its bias if that has one row, which nobody overwrites; its checksums, and norms."""
    bias, least, (n, groups) = product.bias, _least(product.rhs, matrix), matrix.shape
    assert bias is not None
    if bias.numel() != n or bias.shape[-1] != n or not is_strided(bias):
        return product, _bias_sums(bias, matrix), least
    kept = None if memory is None else memory.look_up(bias, matrix)
    if not isinstance(kept, BiasCopy):
        row = bias.reshape(1, n).to(matrix.dtype, copy=True)
        parts = row.view(groups, -1).mT if n % groups == 0 else row.mT * matrix
        kept = BiasCopy(row, torch.mm(row, matrix), _norm(parts, -2), is_new=True)
    elif kept.is_new:  # 0 may be all that is left of a later product
        kept = kept._replace(norms=kept.norms + least, is_new=False)
    if memory is not None:
        memory.keep(bias, matrix, kept)
    size = kept.norms if abs(product.beta) == 1 else kept.norms * abs(product.beta) + least
    return product._replace(bias=kept.row, owned=True), kept.sums, size


def _left(sums: torch.Tensor, whole: torch.Tensor, k: int) -> tuple[torch.Tensor, float]:
    """How much of |A_i| |B| is left of A_i B, as two factors: all if the terms have one sign, 1 / sqrt(k) if any.

    The checksums of a few rows may be less by chance, and those of later rows more.
    """
    least = 1 / math.sqrt(k * sums.numel())
    order = 2 if sums.is_cpu else 1  # the squares of what has `least` added may be zero
    part, norm = (torch.linalg.vector_norm(each, order) for each in (sums, whole))
    if sums.is_cpu:  # one row that is not finite must not make all rows suspect
        return (part / norm).nan_to_num(0.0, 0.0).clamp_min(least), 1.0
    # A device looks at one row anyway, which would be that one. So one operator will do, with a sum for a maximum.
    return torch.addcdiv(_number(1.0, norm.dtype, norm.device), part, norm, value=1 / least), least


def _norm(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The norm over a dimension, which stays."""
    found: torch.Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    return found


def _bias_of_product(bias: torch.Tensor, matrix: torch.Tensor, least: torch.Tensor, memory: Memory | None) -> BiasSums:
    """The checksums of a bias, and about the norms of its elements."""
    kept = None if memory is None else memory.look_up(bias, matrix)
    if isinstance(kept, BiasSums):
        return kept
    added = _bias_sums(bias, matrix)
    if added.shape[-2] > 1:
        size = added.abs()
        size = torch.hypot(size, _norm(size, -2) / math.sqrt(size.shape[-2]))
    else:
        row = _dense(bias if bias.dim() > 1 else bias.reshape(1, -1))
        size = _norm(row.unsqueeze(-1) * matrix, -2).squeeze(-2)
    found = BiasSums(added, size + least)
    if memory is not None:
        memory.keep(bias, matrix, found)
    return found


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
    relative: torch.Tensor  # it beside the size of the elements, [*b, m, g]
    deviation: float  # the standard deviation of `relative`
    room: torch.Tensor | None = None  # on a device: `relative`, and a column that is not written yet

    def rows(self) -> torch.Tensor:
        """The residuals of each row, `[*b * m]`, with this `deviation`: the worst group, or all together."""
        worst: torch.Tensor = torch.linalg.vector_norm(self.relative, math.inf, -1)
        if self.relative.shape[-1] > 1:
            together = torch.linalg.vector_norm(self.relative, dim=-1)
            worst = torch.maximum(worst, together - math.sqrt(self.relative.shape[-1]) * self.deviation)
        return worst.reshape(-1)

    def rows_at(self, limit: float) -> torch.Tensor:
        """`rows` for a device, in fewer operators, with the same ones above the limit."""
        if self.room is None:
            return self.rows()
        groups = self.relative.shape[-1]
        by = 1 + math.sqrt(groups) * self.deviation / limit  # divided by, all together have the limit of one
        torch.std(self.relative, -1, correction=groups - by**2, keepdim=True, out=self.room[..., groups:])
        worst: torch.Tensor = torch.linalg.vector_norm(self.room, math.inf, -1)
        return worst.reshape(-1)

    def groups(self) -> torch.Tensor | None:
        """The same for each group, all rows together, `[*b * g]`; None if there is one."""
        if self.relative.shape[-1] == 1:
            return None
        whole = _norm(self.relative, -2).squeeze(-2) - math.sqrt(self.relative.shape[-2]) * self.deviation
        return whole.reshape(-1)

    def worst(self) -> torch.Tensor:
        """The largest of all in standard deviations, NaN or infinite if the checksums are."""
        groups = self.groups()
        if groups is None:
            worst: torch.Tensor = torch.linalg.vector_norm(self.relative, math.inf)
        else:
            worst = torch.maximum(self.rows().amax(), groups.amax())
        return worst / self.deviation


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
    groups = expected.signs.shape[1]
    deviation = deviation_of(expected.product, units, wide, groups)
    if output.is_cpu or groups == 1 or not residual.is_floating_point():
        return Screen(residual, residual / expected.size, deviation)
    room = residual.new_empty(*residual.shape[:-1], groups + 1)
    relative = torch.div(residual, expected.size, out=room[..., :groups])
    return Screen(residual, relative, deviation, room)


def deviation_of(product: Product, units: Units, wide: torch.dtype, groups: int) -> float:
    """The standard deviation of the checksums of a right product, in groups of columns and in the dtype `wide`."""
    k, n = product.rhs.shape[-2:]
    own = unit(wide)
    variance = (units.sums**2 * (k + 1) + own**2 * (k + n / groups)) / 6
    rounded = product.partial + product.apart
    return math.sqrt(variance + 0.2 * (units.output**2 * rounded + 4 * units.partial**2 + 2 * units.operands**2))


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class Examined(NamedTuple):
    """Elements of an output beside their exact values, all `[r, c]` in float64."""

    got: torch.Tensor
    exact: torch.Tensor
    error: torch.Tensor  # how far they are from it; 0 where the exact value is not finite, or may overflow on the way
    bound: torch.Tensor  # how far rounding may move them
    deviation: torch.Tensor  # the part of the bound that does not depend on sigma, and one standard deviation
    overflows: torch.Tensor | None = None  # where a sum of some terms may overflow
    flags: tuple[str, ...] = ()  # those of `Units`

    def flags_at(self, row: int, column: int) -> tuple[str, ...]:
        """The settings that let an element overflow on the way; none if it has not, or would in any dtype."""
        lost = self.overflows is not None and not self.got[row, column].isfinite() and self.overflows[row, column]
        return self.flags if lost else ()

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


class Terms(NamedTuple):
    """What `judge` needs of some rows of a product, which is all that is left of its operands; `[r, c]` each."""

    got: torch.Tensor  # as the operator has computed them
    value: torch.Tensor  # A B, exactly or in float64
    alpha: Any
    beta: Any
    apart: bool
    partial: int
    converts: bool  # whether the operator converts its operands to the output's dtype, as autocast does
    k: int
    units: Units
    factor: Any  # alpha, times scales of rows and columns
    bias: torch.Tensor | None
    size: torch.Tensor | None = None  # |A| |B|; None for integers
    square: torch.Tensor | None = None  # |A|**2 |B|**2, if the operator may round its operands
    cut: torch.Tensor | None = None  # how far A B moves if both operands are cut to 11 bits in one direction
    parts: torch.Tensor | None = None  # the moduli of parts of A B and of the sums after each, if they may be rounded
    most: torch.Tensor | None = None  # the largest magnitude of an operand, [], if alpha may multiply that
    lost: torch.Tensor | None = None  # |A| 1 + 1 |B|, if small operands may lose digits

    def cpu(self) -> Terms:
        """The same on the CPU."""
        moved: dict[str, Any] = {
            name: each.cpu() for name, each in self._asdict().items() if isinstance(each, torch.Tensor)
        }
        return self._replace(**moved)


def examine(
    product: Product,
    output: torch.Tensor,
    units: Units,
    sigma: float,
    batch: torch.Tensor | None,
    rows: torch.Tensor,
    columns: slice = slice(None),
) -> Examined:
    """Compute rows of a product in float64, and how far rounding may move their elements; see `terms_of`, `judge`."""
    return judge(terms_of(product, output, units, batch, rows, columns), sigma)


def terms_of(
    product: Product,
    output: torch.Tensor,
    units: Units,
    batch: torch.Tensor | None,
    rows: torch.Tensor,
    columns: slice = slice(None),
) -> Terms:
    """Compute rows of a product in float64.

    `output` is what `product.out` returns, `batch` the index of the matrix, `[1]`, or None if there is one product, and
    `rows` the indices of the rows, `[r]`, of which a device has one, counted through the whole batch.
    """
    rhs = _dense(product.rhs) if batch is None else _dense(product.rhs).index_select(0, batch).squeeze(0)
    left, rhs = _rows_of(product.lhs, batch, rows), rhs[:, columns]
    got, bias = _rows_of(output, batch, rows)[:, columns], product.bias
    if bias is not None and not product.owned:
        whole = _dense(bias).expand(*product.rhs.shape[:-2], product.lhs.shape[-2], product.rhs.shape[-1])
        bias = _rows_of(whole, batch, rows)[:, columns]
    alpha, converts_operands = product.alpha, converts(product, output.dtype)
    terms = partial(
        Terms,
        got=got,
        bias=bias,
        alpha=alpha,
        beta=product.beta,
        apart=product.apart,
        partial=product.partial,
        converts=converts_operands,
        k=left.shape[1],
        units=units,
    )
    if not _rounds(left.dtype):
        return terms(value=_integer_sums(left, rhs), factor=alpha)
    fine = fine_dtype(left.device)
    fine = fine.to_complex() if left.is_complex() else fine
    if left.is_cpu or left.dtype.itemsize == 1:  # other operators convert it, but for float8
        left = left.to(fine)
    sums = _sums_of(left, rhs, fine, units)
    factor: Any = alpha
    for scale, dim in ((product.rows, 0), (product.columns, 1)):
        if scale is not None:
            scale = scale.to(fine)
            scale = (
                scale.expand(product.lhs.shape[0], 1)[rows]
                if dim == 0
                else scale.expand(1, product.rhs.shape[-1])[:, columns]
            )
            factor = factor * scale
    most = lost = None
    if converts_operands or abs(alpha) > 1:  # by which a device may multiply the operands
        most = torch.maximum(left.abs().amax(), rhs.abs().amax().to(fine.to_real()))
    if loses(product, converts_operands):
        lost = left.abs().sum(1, keepdim=True, dtype=fine.to_real()) + rhs.abs().sum(0, dtype=fine.to_real())
    return terms(**sums, factor=factor, most=most, lost=lost)


def converts(product: Product, output: torch.dtype) -> bool:
    """Whether the operator converts its operands to float16, the dtype of its output, as autocast does."""
    dtype, own = output.to_real(), product.lhs.dtype
    return dtype == torch.float16 and own != dtype and own.itemsize > 1


def loses(product: Product, converts_operands: bool) -> bool:
    """Whether small operands may lose digits."""
    return converts_operands or (product.partial > 1 and product.alpha != 1)


def _rows_of(matrix: torch.Tensor, batch: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
    dense = _dense(matrix)
    if batch is None:
        return dense.index_select(0, rows)
    if dense.is_cpu:
        return dense[batch, rows]
    (count, height, width), (by_matrix, by_row, by_column) = dense.shape, dense.stride()
    if (between := by_matrix - height * by_row) < 0:
        return dense[batch, rows % height]
    shape, strides = (count, count * height, width), (between, by_row, by_column)
    return dense.as_strided(shape, strides, dense.storage_offset())[batch, rows]


def _sums_of(left: torch.Tensor, rhs: torch.Tensor, fine: torch.dtype, units: Units) -> dict[str, Any]:
    """What `Terms` has of the sums A B for rows of A, in the dtype `fine`."""
    found: dict[str, torch.Tensor] = {}
    blocks: list[torch.Tensor] = []
    k, wants_squares = rhs.shape[0], units.operands > 0
    width = -(-k // PARTS) if units.partial else k
    step = max(1, (8 * PIECE if rhs.is_cpu else DEVICE_PIECE) // (4 if units.cuts else 1) // max(1, rhs.shape[1]))
    if step < k:
        step = step // width * width or step
    for first in range(0, k, step):
        part, here = rhs[first : first + step], left[:, first : first + step]
        sums = {}
        if units.cuts:
            sums["cut"] = _cut_sums(here, part, fine)
        if part.is_cpu or part.dtype.itemsize == 1:
            part = part.to(fine)
        if part.is_cpu:
            if units.partial:
                blocks += [(a @ b)[None] for a, b in zip(here.split(width, 1), part.split(width), strict=True)]
            sums |= {"value": here @ part, "size": here.abs() @ part.abs()}
            if wants_squares:
                sums["square"] = here.abs().square() @ part.abs().square()
        else:  # one row: in few launches, and the sums of products without a copy of B
            terms = torch.addcmul(_number(0.0, fine, part.device).view(1, 1), here.mT, part)
            if units.partial:
                whole = len(terms) // width * width
                blocks += [terms[:whole].view(-1, 1, width, terms.shape[1]).sum(2)]
                blocks += [terms[None, whole:].sum(1, keepdim=True)] if whole < len(terms) else []
            else:
                sums["value"] = terms.sum(0, keepdim=True)
            sums["size"] = torch.linalg.vector_norm(terms, 1, 0, keepdim=True)
            if wants_squares:
                sums["square"] = _norm(terms, 0).square()
        found = {name: found[name] + each if found else each for name, each in sums.items()}
    if units.cuts:
        found["cut"] = torch.linalg.vector_norm(found["cut"] - found["value"], math.inf, 0)
    if units.partial:
        each = torch.cat(blocks)
        after = each.cumsum(0)
        found["value"] = found.get("value", after[-1])
        found["parts"] = torch.linalg.vector_norm(torch.cat([each, after]), 1, 0)
    return found


def _cut_sums(here: torch.Tensor, part: torch.Tensor, fine: torch.dtype) -> torch.Tensor:
    """A B with both operands in 11 bits, `[3, r, c]`: rounded to the nearest, towards zero, and away from it."""
    left, right = _cut(here), _cut(part)
    if part.is_cpu:
        return left.to(fine) @ right.to(fine)
    return torch.addcmul(_number(0.0, fine, part.device).view(1, 1, 1), left.mT, right).sum(1, keepdim=True)


def _cut(values: torch.Tensor) -> torch.Tensor:
    """Values of float32 in 11 bits, `[3, *]`, as `_cut_sums` rounds them."""
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    bits = real.to(torch.float32).view(torch.int32)
    cut = (bits + _added_bits(bits.device).view(3, *[1] * bits.dim())).bitwise_and_(-0x2000).view(torch.float32)
    return torch.view_as_complex(cut.contiguous()) if values.is_complex() else cut


@cache
def _added_bits(device: torch.device) -> torch.Tensor:
    """What to add to the bits of a value before the last 13 are dropped, `[3]`."""
    return check_unwrapped(torch.tensor([0x1000, 0, 0x1FFF], dtype=torch.int32, device="cpu").to(device))


def _integer_sums(left: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    exact = torch.zeros(left.shape[0], rhs.shape[1], dtype=torch.int64, device=left.device)
    for term in range(0, left.shape[1], 256):  # CUDA has no product of integers
        exact += (left[:, term : term + 256, None].long() * rhs[None, term : term + 256].long()).sum(1)
    return exact


def judge(terms: Terms, sigma: float) -> Examined:
    """Compute how far rounding may move elements.

    A sum of k products has an error of at most lambda sqrt(k) u (|A| |B|) with a probability of at least 1 - 2 k
    exp(-lambda**2 / 2), whatever the order of the sums, if the errors of rounding are independent (Higham and Mary,
    SIAM J. Sci. Comput. 41(5), 2019, theorem 3.1). Those of equal numbers are not: each rounds the same way, and a sum
    that grows evenly may collect k / 2 u (|A| |B|) (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 4.2).
    The bound is the sum of the two, with `sigma` for lambda, and one ulp of the output. u is `units.sums`.

    TF32 rounds operands to 11 bits, whose errors are not independent either if values repeat: what the three ways of
    rounding make of this very row is added. Where a device may round parts of the sums to the output's dtype, it
    rounds each, and the sum after each. Nobody says how many there are: the bound is that of `PARTS`.
    """
    if terms.size is None:
        return _judge_integers(terms)
    alpha, beta, units, k = terms.alpha, terms.beta, terms.units, terms.k
    dtype, fine = terms.got.dtype.to_real(), terms.value.dtype
    weight, whole, square = abs(terms.factor), terms.size, terms.square
    value, size = terms.value * terms.factor, terms.size * weight
    apart = value.abs() * (terms.apart * (1 if alpha == 1 else 2))
    parts = None if terms.parts is None else terms.parts * weight
    if terms.bias is not None:
        bias = terms.bias.to(fine)
        whole, bias = torch.maximum(whole, bias.abs().expand_as(whole)), bias * beta
        value, size = value + bias, size + bias.abs()
        parts = None if parts is None else parts + PARTS * bias.abs()
        if terms.apart and beta != 1:
            apart = apart + 2 * bias.abs()
    info, modulus = torch.finfo(dtype), value.abs()
    inside = torch.finfo(torch.promote_types(dtype, torch.float32))
    between = info if terms.apart or terms.partial > 1 else inside  # what the operator has between its steps
    grain = info.tiny * info.eps if between.dtype == "float16" else inside.tiny  # to which it rounds alpha and beta
    floor: Any = (k + 2) * inside.tiny * max(1.0, abs(alpha)) + (0.0 if dtype == torch.float16 else info.tiny)
    if alpha != 1 or beta != 1:
        floor = floor + 2 * grain * whole
    largest = torch.maximum(whole, size).clamp_min(max(abs(alpha), abs(beta)))
    if terms.most is not None:
        scale = max(abs(alpha), inside.max / info.max * terms.converts)
        largest = torch.maximum(largest, terms.most * scale)
    if terms.lost is not None:
        floor = floor + info.tiny * info.eps * terms.lost
    ulp = _power(size if terms.partial > 1 else modulus, info) * info.eps * terms.partial
    own = units.sums + unit(fine)
    variance = (own**2 * (k + 2)) * size.square()
    if square is not None:
        square = square * (weight * weight)
        variance += 2 * units.operands**2 * square
    deviation = ulp / math.sqrt(2) + own * (k + 2) / 2 * size + units.output * apart + floor
    if terms.cut is not None:
        deviation += terms.cut * weight
    if parts is not None:
        deviation += units.partial * parts + PARTS * info.tiny * info.eps
    bound = ulp / 2 + deviation + sigma * variance.sqrt()
    got = terms.got.to(fine)
    error = (got - value).abs()
    # An overflow on the way is no error, even if a tiny alpha makes the exact value finite again, nor is what becomes
    # of values that are not finite to begin with.
    free = ~((modulus + bound < info.max) & (largest < between.max))
    error = error.where(~free, 0)
    overflows = (size + modulus) / 2 * (1 + units.output) >= info.max if units.flags else None  # terms of one sign
    return Examined(got, value, error, bound, deviation + variance.sqrt(), overflows, units.flags)


def _judge_integers(terms: Terms) -> Examined:
    """Integers do not round. They wrap, in the output's dtype and in int64 alike."""
    exact, got = terms.value * terms.alpha, terms.got
    if terms.bias is not None:
        exact = exact + terms.beta * terms.bias.long()
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
