"""The rules by which GEMM shapes and FLOPs follow from the arguments of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from opintercept._ops.op import Args, FlopsRule, GemmRule, Kwargs, Op
from opintercept._record import Gemm
from opintercept._tensors import dtype_name, is_strided, is_tensor


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
        (dtype_name(lhs.dtype), dtype_name(rhs.dtype)),
        (_transposed(lhs), _transposed(rhs, linear and rhs.dim() == 2)),
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


matmul = GemmRule(_matmul, summed=(-1, -2))
linear = GemmRule(_linear, summed=(-1, -1))
inner = GemmRule(_inner, summed=(-1, -1))
vecdot = GemmRule(_vecdot)
tensordot = GemmRule(_tensordot)
einsum = GemmRule(_einsum, in_list=True)
