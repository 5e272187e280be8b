"""The rules by which GEMM shapes and FLOPs follow from the arguments of a call."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from opintercept._core.errors import OpInterceptWarning
from opintercept._core.gemm import Gemm
from opintercept._core.tensors import dtype_name, is_strided, is_tensor
from opintercept._ops.op import Args, FlopsRule, GemmRule, Kwargs, Layout, Op, Parameter, bound

_Checked = TypeVar("_Checked")
SUMMED: dict[Layout, tuple[int, int]] = {"kn": (-1, -2), "nk": (-1, -1)}


def _transposed(tensor: torch.Tensor, swapped: bool = False) -> bool:
    if tensor.dim() < 2 or not is_strided(tensor):
        return False
    # Without `tensor.mT`, which would add a node to autograd's graph at function level.
    row, column = reversed(tensor.stride()[-2:]) if swapped else tensor.stride()[-2:]
    return column != 1 and row == 1


def _shape(op: Op, args: Args, kwargs: Kwargs, batch: int, m: int, n: int, k: int, *, linear: bool = False) -> Gemm:
    lhs, rhs = op.operand("lhs", args, kwargs), op.operand("rhs", args, kwargs)
    return Gemm(
        int(batch),
        int(m),
        int(n),
        int(k),
        tuple("" if t is None else dtype_name(t.dtype) for t in (lhs, rhs)),  # type: ignore[arg-type]
        (lhs is not None and _transposed(lhs), rhs is not None and _transposed(rhs, linear and rhs.dim() == 2)),
    )


def _pair(op: Op, args: Args, kwargs: Kwargs) -> tuple[torch.Size, torch.Size]:
    return op.operand("lhs", args, kwargs).shape, op.operand("rhs", args, kwargs).shape


def broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which two shapes broadcast.

    `torch.broadcast_shapes` imports sympy on its first call, which takes half a second.

    Raises:
        ValueError: The shapes do not broadcast.
    """
    shorter, longer = sorted((one, other), key=len)
    lead = len(longer) - len(shorter)
    if any(a != b and a != 1 and b != 1 for a, b in zip(longer[lead:], shorter, strict=True)):
        raise ValueError(f"shapes must be equal or 1 in each dimension, got {one} and {other}")
    return (*longer[:lead], *(b if a == 1 else a for a, b in zip(longer[lead:], shorter, strict=True)))


def _matmul(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*b, m, k] @ [*b, k, n]`, with 1-d operands and batches that broadcast, as in `torch.matmul`."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    m = lhs[-2] if len(lhs) > 1 else 1
    n = rhs[-1] if len(rhs) > 1 else 1
    batch = math.prod(broadcast(lhs[:-2], rhs[:-2]))
    return _shape(op, args, kwargs, batch, m, n, lhs[-1])


def _linear(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*b, k] @ [n, k].T`."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    n = rhs[0] if len(rhs) > 1 else 1
    return _shape(op, args, kwargs, 1, math.prod(lhs[:-1]), n, lhs[-1], linear=True)


def _inner(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*a, k]` and `[*b, k]`, summed over k."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    return _shape(op, args, kwargs, 1, math.prod(lhs[:-1]), math.prod(rhs[:-1]), lhs[-1], linear=True)


def _vecdot(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*b, k]` and `[*b, k]`, with k at `dim`: a batch of dot products."""
    lhs, rhs = _pair(op, args, kwargs)
    full = broadcast(lhs, rhs)
    k = full[kwargs.get("dim", -1)]
    return _shape(op, args, kwargs, math.prod(full) // k if k else 0, 1, 1, k)


def _tensordot(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """Sums over `dims` of both operands."""
    lhs, rhs = _pair(op, args, kwargs)
    dims: Any = args[2] if len(args) > 2 else kwargs.get("dims", kwargs.get("dims_self", 2))
    if isinstance(dims, torch.Tensor):
        dims = dims.tolist() if dims.numel() > 1 else int(dims.item())
    if isinstance(dims, int):
        k = math.prod(lhs[len(lhs) - dims :])
    else:
        pairs: Any = dims[0] if dims and isinstance(dims[0], (list, tuple)) else dims
        k = math.prod(int(lhs[dim]) for dim in pairs)
    if not k:
        return None
    return _shape(op, args, kwargs, 1, math.prod(lhs) // k, math.prod(rhs) // k, k)


def _einsum(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """Two operands and an equation as text. With more operands, the order of contraction decides: None."""
    equation = args[0] if args else None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    labels = []
    for term, operand in zip(inputs.split(","), operands, strict=True):
        before, dots, after = term.partition("...")
        names = list(before)
        if dots:
            # Dimensions of an ellipsis align at the right, so they are numbered from there.
            names += [f".{i}" for i in range(operand.dim() - len(before) - len(after), 0, -1)]
        names += list(after)
        for name, size in zip(names, operand.shape, strict=False):
            sizes[name] = max(sizes.get(name, 1), size)
        labels.append(set(names))
    lhs, rhs = labels
    dotted = {name for name in sizes if name.startswith(".")}
    if arrow:
        kept = set(output.replace("...", "")) | (dotted if "..." in output else set())
    else:
        kept = {name for name in sizes if inputs.count(name) == 1} | dotted

    def product(names: set[str]) -> int:
        return math.prod(sizes[name] for name in names)

    return _shape(
        op,
        args,
        kwargs,
        product(lhs & rhs & kept),
        product((lhs - rhs) & kept),
        product((rhs - lhs) & kept),
        product((lhs & rhs) - kept),
    )


def grouped(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """FLOPs of all groups. The ragged dimension is already in the operands' shapes."""
    lhs, rhs = _pair(op, args, kwargs)
    if len(lhs) == 2 and len(rhs) == 3:
        return 2 * lhs[0] * lhs[1] * rhs[2]
    if len(lhs) == 3:
        return 2 * lhs[1] * lhs[2] * rhs[-1] * (lhs[0] if len(rhs) == 3 else 1)
    return 2 * lhs[0] * lhs[1] * rhs[1]


def foreach(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """FLOPs of all products of two lists of matrices."""
    lhs, rhs = op.argument("lhs", args, kwargs), op.argument("rhs", args, kwargs)
    return int(sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in zip(lhs, rhs, strict=False)))


def attention(products: int) -> FlopsRule:
    """Return the rule for FLOPs of an attention, which has 2 products of this size forward and 5 backward.

    As in `torch.utils.flop_counter`, masks and causality do not lower the count.
    """

    def flops(op: Op, args: Args, kwargs: Kwargs) -> int | None:
        # query: [*b, s_q, d], key: [*b, s_k, d], value: [*b, s_k, d_v]
        query, key, value = (op.argument(role, args, kwargs) for role in ("lhs", "rhs", "value"))
        if not all(is_tensor(t) and t.dim() >= 2 for t in (query, key, value)):
            return None
        *batch, s_q, d = query.shape
        s_k, d_v = value.shape[-2:]
        pair = s_q * s_k * math.prod(batch)
        if products == 2:
            return int(2 * pair * (d + d_v))
        return int(2 * pair * (3 * d + 2 * d_v))

    return flops


def lstm_layer(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """FLOPs of one direction of one LSTM layer: the weights of all four gates, once for each step."""
    step, w_ih, w_hh = args[0], args[1], args[2]
    return int(2 * math.prod(step.shape[:-1]) * (math.prod(w_ih.shape) + math.prod(w_hh.shape)))


def lstm_layer_backward(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """FLOPs of the backward pass of `lstm_layer`, twice those of the forward pass."""
    forward = lstm_layer(op, args, kwargs)
    return None if forward is None else 2 * forward


matmul = GemmRule(_matmul, contraction=(-1, -2))
linear = GemmRule(_linear, contraction=(-1, -1))
inner = GemmRule(_inner, contraction=(-1, -1))
vecdot = GemmRule(_vecdot)
tensordot = GemmRule(_tensordot)
einsum = GemmRule(_einsum, in_list=True)
_RULES: dict[Layout, GemmRule] = {"kn": matmul, "nk": linear}


def of_layout(layout: Layout) -> GemmRule:
    """Return the rule for an operator of another library that multiplies lhs and rhs as they are.

    Unlike torch's operators, it may have packed an operand, whose sizes are not those of the product. Then the sizes
    do not fit one another, and there is no shape.
    """
    rule = _RULES[layout]

    def shape(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
        lhs, rhs = _pair(op, args, kwargs)
        fits = lhs and rhs and lhs[-1] == rhs[SUMMED[layout][1] if len(rhs) > 1 else -1]
        return rule.shape(op, args, kwargs) if fits else None

    return GemmRule(shape, contraction=rule.contraction)


def gemm_formula(
    name: str, parameters: tuple[Parameter, ...], layout: Layout | None, formula: Callable[..., Any]
) -> GemmRule:
    """Return the rule that `register_op(gemm=...)` declares."""
    compute = _told_once(name, "gemm", "(batch, m, n, k), four whole numbers", parameters, formula, _four)

    def shape(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
        sizes = compute(args, kwargs)
        return None if sizes is None else _shape(op, args, kwargs, *sizes, linear=layout == "nk")

    return GemmRule(shape, contraction=None if layout is None else SUMMED[layout])


def flops_formula(name: str, parameters: tuple[Parameter, ...], formula: Callable[..., Any]) -> FlopsRule:
    """Return the rule that `register_op(flops=...)` declares."""
    compute = _told_once(name, "flops", "a whole number", parameters, formula, _whole)
    return lambda op, args, kwargs: compute(args, kwargs)


def _told_once(
    name: str,
    what: str,
    wanted: str,
    parameters: tuple[Parameter, ...],
    formula: Callable[..., Any],
    check: Callable[[Any], _Checked],
) -> Callable[[Args, Kwargs], _Checked | None]:
    """Return what calls a user's formula with sizes in place of tensors. The first failure is told in a warning."""
    told = False

    def compute(args: Args, kwargs: Kwargs) -> _Checked | None:
        nonlocal told
        got = "an exception"
        try:
            if parameters:
                value = formula(**{key: _sizes(each) for key, each in bound(parameters, args, kwargs).items()})
            else:
                value = formula(*map(_sizes, args), **{key: _sizes(each) for key, each in kwargs.items()})
            got = repr(value)
            return check(value)
        except NotImplementedError:  # the formula says that the arguments do not tell
            return None
        except Exception as error:
            if told:
                return None
            told = True
            warnings.warn(
                f"the {what} formula of {name} must return {wanted}, got {got} ({type(error).__name__}: {error}); its "
                f"{what} is unknown until register_op gets another formula",
                OpInterceptWarning,
                stacklevel=2,
            )
            return None

    return compute


def _sizes(value: Any) -> Any:
    if is_tensor(value):
        return value.shape
    return type(value)(map(_sizes, value)) if type(value) in (list, tuple) else value


def _whole(value: Any) -> int:
    number = operator.index(value)
    if isinstance(value, bool) or number < 0:
        raise ValueError("not a count")
    return number


def _four(value: Any) -> tuple[int, int, int, int]:
    batch, m, n, k = map(_whole, value)
    return batch, m, n, k
