"""Writes a call as products `out = alpha * lhs @ rhs + beta * bias`, whose outputs a checksum can be compared with.

Invariant: no value is read, which would wait for the device, except the ends of groups on the CPU. Operands stay as
they are, so that a view of a weight is known for one; callers turn gradients off. Must not import other hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from opintercept._core.call import OpCall
from opintercept._core.tensors import is_strided
from opintercept._core.text import short_name
from opintercept._ops.shapes import broadcast
from opintercept._ops.table import ROWS, exact, row_of
from opintercept._values.read import first_output

Number = int | float | complex


class NoProduct(Exception):
    """A call cannot be checked; the message says why."""


class Product(NamedTuple):
    """One product, `out = alpha * (rows * lhs) @ (rhs * columns) + beta * bias`."""

    lhs: torch.Tensor  # [m, k] or [b, m, k]
    rhs: torch.Tensor  # [k, n] or [b, k, n]
    out: Callable[[Any], torch.Tensor]  # finds [m, n] or [b, m, n] in the output of the call
    bias: torch.Tensor | None = None  # broadcasts to the shape of `out`
    alpha: Number = 1
    beta: Number = 1
    rows: torch.Tensor | None = None  # broadcasts to [m, 1]
    columns: torch.Tensor | None = None  # broadcasts to [1, n]
    partial: int = 1  # how many partial sums the operator rounds to the output's dtype
    apart: bool = False  # whether it may round alpha, beta and both terms to that dtype before it adds them
    coarse: torch.dtype | None = None  # to which it may round its operands first, as after dequantising
    fast: bool = False  # whether a device may add up float8 products in few bits
    turned: bool = False  # whether lhs and rhs are swapped, because the output has a single column
    owned: bool = False  # whether the bias is a copy of one row, `[1, n]`

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What the product reads."""
        found = (self.lhs, self.rhs, self.bias, self.rows, self.columns)
        return tuple(tensor for tensor in found if tensor is not None)


def products_of(call: OpCall, copies: Mapping[str, torch.Tensor] | None = None) -> list[Product]:
    """The products that a running call computes, several for grouped and foreach operators.

    `copies` are tensors to use instead of the call's own, by role.
    """
    rule = _rule(call.func)
    if isinstance(rule, str):
        raise NoProduct(rule)
    return rule(_WithCopies(call, copies) if copies else call)  # type: ignore[arg-type]


class _WithCopies:
    """A call with copies in the place of operands that it overwrites."""

    def __init__(self, call: OpCall, copies: Mapping[str, torch.Tensor]) -> None:
        self._call = call
        self._copies = copies

    def __getattr__(self, name: str) -> Any:
        return self._copies[name] if name in self._copies else getattr(self._call, name)


@lru_cache(maxsize=4096)
def _found(func: Any, version: int) -> Callable[[OpCall], list[Product]] | str:
    row = row_of(func)
    if row.family == "convolution":
        return "it is a convolution"
    if row.declared is not None or row.func is not None:
        keys = {row.name, *(exact(name) for name in (getattr(func, "_name", None),) if name)}
        if all(ROWS.gives_way(key) for key in keys if key in ROWS):
            return "its library does not say how it rounds"
        return _declared if row.gemm_rule is not None else "its shape is not known"
    name = short_name(row.name)
    rule = _RULES.get(name.rstrip("_") if not name.startswith("__") else name)
    return rule or ("it multiplies inside" if row.opaque else "it is not one product")


def _rule(func: Any) -> Callable[[OpCall], list[Product]] | str:
    """What finds the products of an operator, or why there are none."""
    return _found(func, ROWS.version)


def reason_of(func: Any) -> str:
    """Why no call of an operator can be checked; empty if some may be."""
    rule = _rule(func)
    return rule if isinstance(rule, str) else ""


_POSITIONS = {
    "aten::mm": (0, 1, -1, -1, -1),
    "aten::bmm": (0, 1, -1, -1, -1),
    "aten::addmm": (1, 2, 0, 3, 4),
    "aten::baddbmm": (1, 2, 0, 3, 4),
}


def positions_of(func: torch._ops.OpOverload) -> tuple[int, ...] | None:
    """The places of lhs, rhs, bias, beta and alpha among the arguments, -1 for none; all -1 if no call can be checked.

    None if kernels cannot check the calls.
    """
    if reason_of(func):
        return (-1,) * 5
    return _POSITIONS.get(func._schema.name) if func._overloadname == "default" else None


def _sides(call: OpCall) -> tuple[torch.Tensor, torch.Tensor]:
    lhs, rhs = call.lhs, call.rhs
    if lhs is None or rhs is None or not lhs.dim() or not rhs.dim():
        raise NoProduct("it has no two operands")
    if lhs.is_nested or rhs.is_nested:
        raise NoProduct("its operands are nested")
    if not lhs.numel() or not rhs.numel():
        raise NoProduct("it is empty")
    if lhs.is_quantized or rhs.is_quantized:
        raise NoProduct("its operands are quantised")
    return lhs, rhs


def _same(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output
    return tensor


def _product(lhs: torch.Tensor, rhs: torch.Tensor) -> Product:
    """The product that `torch.matmul` computes."""
    if lhs.dim() == rhs.dim() and (lhs.dim() == 2 or (lhs.dim() == 3 and lhs.shape[0] == rhs.shape[0])):
        return Product(lhs, rhs, _same, partial=_partial_sums(lhs, rhs))
    left = lhs if lhs.dim() > 1 else lhs.unsqueeze(0)
    right = rhs if rhs.dim() > 1 else rhs.unsqueeze(1)
    if right.dim() == 2:
        left = left.reshape(-1, left.shape[-1])
    else:
        batch = broadcast(left.shape[:-2], right.shape[:-2])
        left, right = (t.expand(*batch, *t.shape[-2:]).reshape(-1, *t.shape[-2:]) for t in (left, right))
    shape = (*left.shape[:-1], right.shape[-1])
    return Product(left, right, lambda output: output.reshape(shape))


def _partial_sums(lhs: torch.Tensor, rhs: torch.Tensor) -> int:
    """How many sums are rounded to the output's dtype: all if an operand is sparse, as those are added up in it."""
    sparse = lhs.layout is not torch.strided or rhs.layout is not torch.strided
    return lhs.shape[-1] + 1 if sparse and lhs.dtype.itemsize == 2 else 1


def _turned(product: Product) -> Product:
    """The product with its sides swapped if it has a single column: a check of each row would be the product again."""
    lhs, rhs = product.lhs, product.rhs
    if lhs.dim() > 2 or rhs.shape[1] != 1 or lhs.shape[0] == 1 or not is_strided(lhs):
        return product
    bias, rows, columns = (None if t is None else _matrix(t).mT for t in (product.bias, product.rows, product.columns))
    find = product.out
    return product._replace(
        lhs=rhs.mT,
        rhs=lhs.mT,
        out=lambda output: find(output).mT,
        bias=bias,
        rows=columns,
        columns=rows,
        turned=True,
    )


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() > 1 else tensor.unsqueeze(0) if tensor.dim() else tensor.view(1, 1)


def _matmul(call: OpCall) -> list[Product]:
    if any(isinstance(value, str) for value in (*call.args, *call.kwargs.values())):
        raise NoProduct("it may take the largest term instead of the sum")  # torch.sparse.mm(reduce=)
    return [_turned(_product(*_sides(call)))]


def _vdot(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    return [_product(lhs.conj().resolve_conj(), rhs)]


def _linear(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    if call.options.get("attr", "none") not in ("none", ""):
        raise NoProduct("an activation follows the product")
    product = _product(lhs, rhs.mT if rhs.dim() > 1 else rhs)
    bias = call.bias
    if bias is not None:
        product = product._replace(bias=bias, apart=True)  # matmul and add, for some shapes and layouts
    return [_turned(product)]


def _addmm(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    alpha, beta, bias = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1), call.bias
    product = _product(lhs, rhs)._replace(alpha=alpha)
    if rhs.dim() == 1:  # on the CPU, addmv in few bits computes with alpha, beta and sums in as few
        product = product._replace(apart=True)
    if bias is None or beta == 0:  # torch does not read the bias then
        return [_turned(product)]
    if rhs.dim() == 1 and bias.dim() == 1:
        bias = bias.unsqueeze(1)
    return [_turned(product._replace(bias=bias, beta=beta))]


def _addbmm(call: OpCall) -> list[Product]:
    """A sum of products over the batch is one product, of lhs side by side and rhs one below the other."""
    lhs, rhs = _sides(call)
    product = Product(
        lhs.transpose(0, 1).reshape(lhs.shape[1], -1),
        rhs.reshape(-1, rhs.shape[2]),
        _same,
        alpha=call.kwargs.get("alpha", 1),
        beta=call.kwargs.get("beta", 1),
        partial=max(1, lhs.shape[0]),
    )
    bias = call.bias
    return [product if bias is None or product.beta == 0 else product._replace(bias=bias)]


def _inner(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    left, right = lhs.reshape(-1, lhs.shape[-1]), rhs.reshape(-1, rhs.shape[-1])
    shape = left.shape[0], right.shape[0]
    return [_turned(Product(left, right.mT, lambda output: output.reshape(shape)))]


def _vecdot(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    dim = call.kwargs.get("dim", -1)
    lhs, rhs = (t.movedim(dim, -1) for t in torch.broadcast_tensors(lhs, rhs))
    k = lhs.shape[-1]
    left, right = lhs.conj().resolve_conj().reshape(-1, 1, k), rhs.reshape(-1, k, 1)
    return [Product(left, right, lambda output: output.reshape(-1, 1, 1))]


def _tensordot(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    dims: Any = call.args[2] if len(call.args) > 2 else call.kwargs.get("dims", 2)
    if isinstance(dims, torch.Tensor):
        raise NoProduct("its dimensions are in a tensor")
    if isinstance(dims, int):
        pairs = list(range(lhs.dim() - dims, lhs.dim())), list(range(dims))
    else:
        one, other = dims
        pairs = [dim % lhs.dim() for dim in one], [dim % rhs.dim() for dim in other]
    kept = [d for d in range(lhs.dim()) if d not in pairs[0]], [d for d in range(rhs.dim()) if d not in pairs[1]]
    k = math.prod(lhs.shape[dim] for dim in pairs[0])
    left = lhs.permute(*kept[0], *pairs[0]).reshape(-1, k)
    right = rhs.permute(*pairs[1], *kept[1]).reshape(k, -1)
    shape = left.shape[0], right.shape[1]
    return [_turned(Product(left, right, lambda output: output.reshape(shape)))]


def _einsum(call: OpCall) -> list[Product]:
    equation = call.args[0] if call.args else None
    lhs, rhs = _sides(call)
    count = len(call.args[1]) if isinstance(call.args[-1], (list, tuple)) else len(call.args) - 1
    if not isinstance(equation, str) or count != 2 or "." in equation:
        raise NoProduct("it is not one product")
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    if not arrow:
        output = "".join(sorted(letter for letter in {*left, *right} if inputs.count(letter) == 1))
    both = [letter for letter in left if letter in right]
    batch, summed = [x for x in both if x in output], [x for x in both if x not in output]
    m, n = [x for x in left if x not in both], [x for x in right if x not in both]
    if len({*left}) < len(left) or len({*right}) < len(right) or not {*m, *n} <= {*output}:
        raise NoProduct("it is not one product")
    sizes = dict(zip(left, lhs.shape, strict=True))
    if any(sizes.get(x, size) != size for x, size in zip(right, rhs.shape, strict=True)):
        raise NoProduct("its operands are broadcast")
    sizes |= zip(right, rhs.shape, strict=True)
    shape = tuple(math.prod(sizes[x] for x in part) for part in (batch, m, summed, n))
    order = [*batch, *m, *n]

    def find(result: torch.Tensor) -> torch.Tensor:
        return result.permute([output.index(x) for x in order]).reshape(shape[0], shape[1], shape[3])

    return [
        Product(
            lhs.permute([left.index(x) for x in (*batch, *m, *summed)]).reshape(shape[:3]),
            rhs.permute([right.index(x) for x in (*batch, *summed, *n)]).reshape(shape[0], *shape[2:]),
            find,
        )
    ]


def _scaled(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    bound = row_of(call.func).arguments(call.func, call.args, call.kwargs)
    if bound.get("scale_result") is not None:
        raise NoProduct("devices apply scale_result in different ways")
    blocks = any(recipe > 1 for recipe in (*bound.get("recipe_a", ()), *bound.get("recipe_b", ())))
    scale_a, scale_b = (
        scale[0] if isinstance(scale, (list, tuple)) else scale for scale in (bound["scale_a"], bound["scale_b"])
    )
    shapes = (lhs.shape[0], 1), (1, rhs.shape[1])
    for scale, shape in zip((scale_a, scale_b), shapes, strict=True):
        blocks |= scale.dtype != torch.float32 or (scale.numel() != 1 and scale.shape != shape)
    if blocks or bound.get("contraction_dim"):
        raise NoProduct("it has a scale for each block")
    return [
        Product(
            lhs,
            rhs,
            _same,
            bias=call.bias,
            rows=scale_a.reshape(-1, 1),
            columns=scale_b.reshape(1, -1),
            alpha=bound.get("alpha", 1),
            beta=bound.get("beta", 1),
            fast=bool(bound.get("use_fast_accum", False)),
        )
    ]


def _grouped(call: OpCall) -> list[Product]:
    lhs, rhs = _sides(call)
    bound = row_of(call.func).arguments(call.func, call.args, call.kwargs)
    offs = bound.get("offs")
    if bound.get("bias") is not None:
        raise NoProduct("it has a bias for each group")
    if offs is None:
        return [Product(lhs, rhs, _same)]
    if offs.device.type != "cpu":
        raise NoProduct("the ends of its groups are on the device")
    groups = [slice(first, end) for first, end in pairwise((0, *offs.tolist()))]
    if lhs.dim() == 2 and rhs.dim() == 3:
        return [Product(lhs[g], rhs[i], _part(g)) for i, g in enumerate(groups)]
    if lhs.dim() == 3:
        return [Product(lhs[i], rhs[:, g], _part((slice(None), g))) for i, g in enumerate(groups)]
    return [Product(lhs[:, g], rhs[g], _part(i)) for i, g in enumerate(groups)]


def _foreach(call: OpCall) -> list[Product]:
    row = row_of(call.func)
    lists = (row.argument(role, call.args, call.kwargs) for role in ("lhs", "rhs"))
    pairs: list[Sequence[torch.Tensor]] = list(zip(*lists, strict=True))
    return [Product(a, b, _part(i)) for i, (a, b) in enumerate(pairs)]


def _part(index: Any) -> Callable[[Any], torch.Tensor]:
    def find(output: Any) -> torch.Tensor:
        tensor: torch.Tensor = output[index]
        return tensor

    return find


def _declared(call: OpCall) -> list[Product]:
    """An operator that the program has declared: lhs times rhs, plus the bias, if no other argument has a say."""
    row = row_of(call.func)
    lhs, rhs = _sides(call)
    if any(call.is_quantized(role) for role in ("lhs", "rhs")):
        raise NoProduct("nobody has said how to compute its operands: dequantize= is missing")
    scales = {keyword for _, keyword in row.scales} if row.dequantize else set()
    named = {keyword for _, keyword in row.roles.values()} | scales
    for name, value in row.arguments(call.func, call.args, call.kwargs).items():
        silent = value is None or isinstance(value, (bool, int, torch.dtype, torch.device)) or value in ("", "none")
        if name not in named and not silent:
            raise NoProduct(f"nobody has said what its argument {name} does")
    gemm = call.gemm
    if gemm is None:
        raise NoProduct("its shape is not known")
    if row.contraction_dim("rhs") == -1 and rhs.dim() > 1:
        rhs = rhs.mT
    try:
        product = _product(lhs, rhs)
    except (ValueError, RuntimeError):
        raise NoProduct("its operands do not fit one another") from None
    if product.lhs.shape[-1] != gemm.k or product.rhs.shape[-1] != gemm.n:
        raise NoProduct("its operands do not have the shape that gemm= tells")
    bias = call.bias
    if bias is not None:
        product = product._replace(bias=bias)
    shape = (*product.lhs.shape[:-1], product.rhs.shape[-1])
    coarse = lhs.dtype if row.dequantize else None
    return [_turned(product._replace(out=lambda output: first_output(output).reshape(shape), coarse=coarse))]


_RULES: dict[str, Callable[[OpCall], list[Product]]] = {
    name: rule
    for names, rule in {
        "mm bmm matmul linalg_matmul __matmul__ __rmatmul__ mv dot _int_mm _async_input_mm": _matmul,
        "hspmm smm _sparse_mm _sparse_sparse_matmul": _matmul,
        "addmm baddbmm addmv _sparse_addmm sspaddmm": _addmm,
        "linear mkldnn_linear _mkl_linear _linear_pointwise": _linear,
        "_scaled_mm _scaled_mm_v2 _scaled_addmm": _scaled,
        "_grouped_mm": _grouped,
        "_foreach_mm _foreach_mm_native_0 _foreach_mm_native_1": _foreach,
        "addbmm": _addbmm,
        "vdot": _vdot,
        "inner": _inner,
        "linalg_vecdot vecdot": _vecdot,
        "tensordot": _tensordot,
        "einsum": _einsum,
    }.items()
    for name in names.split()
}
