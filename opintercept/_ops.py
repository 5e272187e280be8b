"""The op table: the only place that knows operators, their operands, GEMM shapes and FLOPs.

Invariant: one row an operator packet, so that `.out`, `.dtype` and in-place forms cannot slip by.
Imports only `_call` and torch.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch

from opintercept._call import Gemm, describe, dtype_name, is_strided, is_tensor

Family = Literal["gemm", "low precision", "sparse", "attention", "fused", "other"]

# How an operator reaches the kernels:
#   leaf       as itself, so both dispatch engines watch it
#   composite  taken apart above autograd; whole only at function level, or below inference_mode
#   seen       as itself, but its inner matmuls pass the dispatcher too: the kernel engine watches
#              those, a dispatch mode cannot and gets one opaque call
Kind = Literal["leaf", "composite", "seen"]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
GemmRule = Callable[["Op", Args, Kwargs], Gemm | None]
FlopsRule = Callable[["Op", Args, Kwargs], int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One row of the table.

    Attributes:
        name: The packet, `"aten::addmm"`, or a function's public name.
        family: The family it belongs to.
        kind: How it reaches the kernels, see `Kind`.
        opaque: Whether it hides matmuls that cannot be seen one by one.
        roles: Role and keyword of each positional argument, `{"lhs": (1, "mat1")}`.
    """

    name: str
    family: Family = "other"
    kind: Kind = "leaf"
    opaque: bool = False
    roles: dict[str, tuple[int, str]] = field(default_factory=dict)
    gemm_rule: GemmRule | None = None
    flops_rule: FlopsRule | None = None

    def operand(self, role: str, args: Args, kwargs: Kwargs) -> Any:
        """The tensor in `role` ("lhs", "rhs", "bias"), or None."""
        value = self.argument(role, args, kwargs)
        if isinstance(value, (list, tuple)) and value:  # einsum's operands, a foreach list
            value = value[0]
        return value if is_tensor(value) else None

    def argument(self, role: str, args: Args, kwargs: Kwargs) -> Any:
        """What was passed in `role`, by position or by keyword; None for nothing."""
        where = self.roles.get(role)
        if where is None:
            return None
        position, keyword = where
        if self._takes_a_list(args):
            args = (args[0], *args[1])
        if position < len(args):
            return args[position]
        if keyword == "input":  # torch's C functions take either spelling
            return kwargs.get("input", kwargs.get("self"))
        return kwargs.get(keyword)

    def replaced(self, role: str, value: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """The inputs with `value` in `role`, passed the way the tensor there was.

        Raises:
            ValueError: There is no tensor in that role, or a list of them.
        """
        old = self.argument(role, args, kwargs)
        if not is_tensor(old):
            raise ValueError(
                f"an operand that is replaced must be one tensor, got {describe(old)} as the {role} of {self.name}; "
                "return call.args, call.kwargs with the change made"
            )
        position, keyword = self.roles[role]
        if self._takes_a_list(args):
            equation, operands = args
            inner = [*operands[: position - 1], value, *operands[position:]]
            return (equation, type(operands)(inner)), kwargs
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, keyword if keyword in kwargs else "self": value}

    def _takes_a_list(self, args: Args) -> bool:
        """Whether einsum's operands come in a list instead of one by one."""
        return self.gemm_rule is _einsum and len(args) == 2 and isinstance(args[1], (list, tuple))

    def summed(self, role: str) -> int | None:
        """The dimension of a matrix in `role`, lhs or rhs, that the product sums over; None where it is not fixed."""
        if self.gemm_rule is _matmul:
            return -1 if role == "lhs" else -2
        return -1 if self.gemm_rule in (_linear, _inner) else None

    def gemm(self, args: Args, kwargs: Kwargs) -> Gemm | None:
        """The matrix product's shape, or None where there is no single one."""
        rule = self.gemm_rule
        if rule is None:
            return None
        lhs, rhs = self.operand("lhs", args, kwargs), self.operand("rhs", args, kwargs)
        if lhs is None or rhs is None or lhs.is_nested or rhs.is_nested:
            return None
        try:
            return rule(self, args, kwargs)
        except Exception:  # operands that do not go together: a pre hook may ask before the operator refuses them
            return None

    def flops(self, args: Args, kwargs: Kwargs) -> int | None:
        """Floating-point operations, 2 a multiply-add, or None where no formula is known."""
        if self.flops_rule is not None:
            lhs = self.operand("lhs", args, kwargs)
            if lhs is not None and lhs.is_nested:
                return None
            try:
                return self.flops_rule(self, args, kwargs)
            except Exception:  # likewise
                return None
        shape = self.gemm(args, kwargs)
        return None if shape is None else 2 * shape.batch * shape.m * shape.n * shape.k

    def arguments(self, func: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        """Every argument by the name of its parameter, defaults included; of `out=` forms without the outputs.

        A parameter whose name torch does not tell, of some functions, is called by its position, `"args[2]"`.
        """
        parameters = _parameters(func, self.name.rpartition(".")[2])
        found: dict[str, Any] = {}
        for position, parameter in enumerate(parameters):
            if position < len(args):
                found[parameter.name] = args[position]
            elif parameter.name in kwargs:
                found[parameter.name] = kwargs[parameter.name]
            elif parameter.default is not inspect.Parameter.empty:
                found[parameter.name] = parameter.default
        found |= {f"args[{i}]": args[i] for i in range(len(parameters), len(args))}
        return found | {name: value for name, value in kwargs.items() if name not in found and name != "out"}

    def written(self, func: Any, args: Args, kwargs: Kwargs) -> list[Any]:
        """The caller's tensors that this call writes its result to: `out=` and in-place forms."""
        schema = getattr(func, "_schema", None)
        if schema is None:
            short = self.name.rpartition(".")[2]
            out = kwargs.get("out")
            if out is None and short.endswith("_") and not short.endswith("__"):
                out = args[0] if args else kwargs.get("input", kwargs.get("self"))
            return list(out) if isinstance(out, (list, tuple)) else [] if out is None else [out]
        return [
            args[position] if position < len(args) else kwargs[argument.name]
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and (position < len(args) or argument.name in kwargs)
        ]


class _Parameter(NamedTuple):
    name: str
    default: Any = inspect.Parameter.empty


@lru_cache(maxsize=4096)
def _parameters(func: Any, short: str) -> tuple[_Parameter, ...]:
    """The parameters of an overload or a function but for what it only writes to; none where torch does not tell."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        try:
            parameters = inspect.signature(func).parameters.values()
            several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            return tuple(_Parameter(p.name, p.default) for p in parameters if p.kind not in several)
        except (TypeError, ValueError):  # a function in C, which mostly has the parameters of the operator of its name
            schema = getattr(getattr(getattr(torch.ops.aten, short, None), "default", None), "_schema", None)
    return tuple(
        _Parameter(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty)
        for a in (() if schema is None else schema.arguments)
        if not a.is_out
    )


def _transposed(tensor: torch.Tensor, swapped: bool = False) -> bool:
    if tensor.dim() < 2 or not is_strided(tensor):
        return False
    # Not by `tensor.mT`: at function level that would be a node of autograd's.
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
    """The shape of both together; the first call of `torch.broadcast_shapes` imports sympy, which takes half a second.

    Raises:
        ValueError: They do not go together.
    """
    shorter, longer = sorted((one, other), key=len)
    lead = len(longer) - len(shorter)
    if any(a != b and a != 1 and b != 1 for a, b in zip(longer[lead:], shorter, strict=True)):
        raise ValueError(f"shapes must be the same or 1 in each dimension, got {one} and {other}")
    return (*longer[:lead], *(b if a == 1 else a for a, b in zip(longer[lead:], shorter, strict=True)))


def _matmul(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*b, m, k] @ [*b, k, n]`, 1-d operands and broadcast batches as `torch.matmul` takes them."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    m = lhs[-2] if len(lhs) > 1 else 1
    n = rhs[-1] if len(rhs) > 1 else 1
    batch = math.prod(broadcast(lhs[:-2], rhs[:-2]))
    return _shape(op, args, kwargs, batch, m, n, lhs[-1])


def _linear(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[*b, k] @ [n, k]`, the weight transposed."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    n = rhs[0] if len(rhs) > 1 else 1
    return _shape(op, args, kwargs, 1, math.prod(lhs[:-1]), n, lhs[-1], linear=True)


def _inner(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """Sums over the last dimension of both."""
    lhs, rhs = _pair(op, args, kwargs)
    if not lhs or not rhs:
        return None
    return _shape(op, args, kwargs, 1, math.prod(lhs[:-1]), math.prod(rhs[:-1]), lhs[-1], linear=True)


def _vecdot(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """A batch of dot products along `dim`."""
    lhs, rhs = _pair(op, args, kwargs)
    full = broadcast(lhs, rhs)
    k = full[kwargs.get("dim", -1)]
    return _shape(op, args, kwargs, math.prod(full) // k if k else 0, 1, 1, k)


def _tensordot(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """Contracts `dims` of the one with `dims` of the other."""
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
    """Two operands of a written equation; None for more, where the order of contraction decides."""
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
            # Ellipsis dimensions align from the right, so they are numbered from there.
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


def _grouped(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """Groups along one of the dimensions: the ragged one is already in the operands' shapes."""
    lhs, rhs = _pair(op, args, kwargs)
    if len(lhs) == 2 and len(rhs) == 3:
        return 2 * lhs[0] * lhs[1] * rhs[2]
    if len(lhs) == 3:
        return 2 * lhs[1] * lhs[2] * rhs[-1] * (lhs[0] if len(rhs) == 3 else 1)
    return 2 * lhs[0] * lhs[1] * rhs[1]


def _foreach(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    lhs, rhs = op.argument("lhs", args, kwargs), op.argument("rhs", args, kwargs)
    return int(sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in zip(lhs, rhs, strict=False)))


def _attention(products: int) -> FlopsRule:
    """`products` of `[s_q, d] @ [d, s_k]`; the forward pass has 2, the backward pass 5.

    As in `torch.utils.flop_counter`: masks and causality do not lower the count.
    """

    def flops(op: Op, args: Args, kwargs: Kwargs) -> int | None:
        # q: [*b, s_q, d], k: [*b, s_k, d], v: [*b, s_k, d_v]; the backward pass has the gradient first.
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


def _lstm_layer(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    """One direction of one LSTM layer: four gates of input and hidden weights for each step."""
    step, w_ih, w_hh = args[0], args[1], args[2]
    return int(2 * math.prod(step.shape[:-1]) * (math.prod(w_ih.shape) + math.prod(w_hh.shape)))


def _lstm_layer_backward(op: Op, args: Args, kwargs: Kwargs) -> int | None:
    forward = _lstm_layer(op, args, kwargs)
    return None if forward is None else 2 * forward


_TABLE: dict[str, Op] = {}


def _add(
    names: str,
    arguments: str = "",
    *,
    family: Family = "gemm",
    kind: Kind = "leaf",
    opaque: bool = False,
    gemm: GemmRule | None = None,
    flops: FlopsRule | None = None,
) -> None:
    # `arguments` is the head of the signature: "bias:input lhs:mat1 rhs:mat2", `_` for no role.
    roles = {}
    for position, word in enumerate(arguments.split()):
        role, _, keyword = word.partition(":")
        if role != "_":
            roles[role] = (position, keyword)
    for name in names.split():
        name = name if "::" in name else f"aten::{name}"
        _TABLE[name] = Op(name, family, kind, opaque, roles, gemm, flops)


_add("mm", "lhs:input rhs:mat2", gemm=_matmul)
_add("bmm", "lhs:input rhs:mat2", gemm=_matmul)
_add("addmm addmm_ _addmm_activation", "bias:input lhs:mat1 rhs:mat2", gemm=_matmul)
_add("baddbmm baddbmm_ addbmm addbmm_", "bias:input lhs:batch1 rhs:batch2", gemm=_matmul)
_add("mv", "lhs:input rhs:vec", gemm=_matmul)
_add("addmv addmv_", "bias:input lhs:mat rhs:vec", gemm=_matmul)
_add("dot", "lhs:input rhs:tensor", gemm=_matmul)
_add("vdot", "lhs:input rhs:other", gemm=_matmul)
_add("_foreach_mm _native::_foreach_mm_native_0 _native::_foreach_mm_native_1", "lhs:self rhs:mat2", flops=_foreach)
_add("_native::bmm_triton_0", "lhs:self rhs:mat2", gemm=_matmul)
_add("inductor::_mm_plus_mm", "lhs:a rhs:b", kind="seen", opaque=True)
_add("symm_mem::_async_input_mm", "lhs:a rhs:b", gemm=_matmul)
# Registered from Python once torch.distributed._symmetric_memory or torch.onnx are imported.
_add(
    "symm_mem::fused_all_gather_matmul symm_mem::fused_all_gather_scaled_matmul"
    " symm_mem::fused_matmul_reduce_scatter symm_mem::fused_scaled_matmul_reduce_scatter onnx::Attention",
    kind="seen",
    opaque=True,
)

_add("matmul linalg_matmul", "lhs:input rhs:other", kind="composite", gemm=_matmul)
_add("linear", "lhs:input rhs:weight bias:bias", kind="composite", gemm=_linear)
_add("einsum", "_ lhs:operands rhs:operands", kind="composite", gemm=_einsum)
_add("tensordot", "lhs:a rhs:b", kind="composite", gemm=_tensordot)
_add("inner", "lhs:input rhs:other", kind="composite", gemm=_inner)
_add("linalg_vecdot", "lhs:x rhs:y", kind="composite", gemm=_vecdot)
_add("chain_matmul linalg_multi_dot", "lhs:tensors", kind="composite")
_add("matrix_power linalg_matrix_power", "lhs:input", kind="composite")
_add("bilinear", "lhs:input1 _ rhs:weight bias:bias", kind="composite", opaque=True)
_add("_trilinear", "lhs:i1 rhs:i2", kind="seen", opaque=True)
_add("cdist", "lhs:x1 rhs:x2", kind="composite", opaque=True)
_add("_euclidean_dist", "lhs:x1 rhs:x2", kind="seen", opaque=True)
_add("matrix_exp", "lhs:input", kind="composite", opaque=True)
_add("linalg_matrix_exp", "lhs:input", kind="seen", opaque=True)
_add("pinverse", "lhs:input", kind="composite", opaque=True)
_add("linalg_pinv", "lhs:input", kind="seen", opaque=True)
_add("cov corrcoef", "lhs:input", kind="composite", opaque=True)
_add("linear_backward", "lhs:self _ rhs:weight", kind="seen", opaque=True)
_add("matmul_backward", "_ lhs:self rhs:other", kind="seen", opaque=True)

_add("_int_mm", "lhs:input rhs:mat2", family="low precision", gemm=_matmul)
_add("_scaled_mm", "lhs:input rhs:mat2 _ _ bias:bias", family="low precision", gemm=_matmul)
_add("_scaled_mm_v2", "lhs:input rhs:mat2", family="low precision", gemm=_matmul)
_add("_scaled_addmm _scaled_addmm_", "bias:input lhs:mat1 rhs:mat2", family="low precision", gemm=_matmul)
_add(
    "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2",
    "lhs:input rhs:mat2",
    family="low precision",
    flops=_grouped,
)
_add("_weight_int8pack_mm", "lhs:input rhs:mat2", family="low precision", gemm=_linear)
_add(
    "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros",
    "lhs:input rhs:mat2",
    family="low precision",
)
_add("_mixed_dtypes_linear", "lhs:input rhs:weight", family="low precision")
_add("_dyn_quant_matmul_4bit", "lhs:inp rhs:packed_weights", family="low precision")
_add(
    "fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_fp16_weight"
    " fbgemm_linear_fp16_weight_fp32_activation _wrapped_quantized_linear_prepacked",
    "lhs:input",
    family="low precision",
    kind="composite",
)
_add(
    "quantized::linear quantized::linear_dynamic quantized::linear_dynamic_fp16"
    " quantized::linear_dynamic_fp16_unpacked_weight quantized::linear_leaky_relu quantized::linear_relu"
    " quantized::linear_relu_dynamic quantized::linear_relu_dynamic_fp16 quantized::linear_tanh"
    " quantized::linear_with_input_q_dq_qweight_dq_output_fp32"
    " quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32 _quantized::linear"
    " _quantized::linear_dynamic _quantized::wrapped_fbgemm_linear_fp16_weight"
    " _quantized::wrapped_quantized_linear _quantized::_wrapped_quantized_linear_prepacked",
    "lhs:X",
    family="low precision",
)
_add("quantized::matmul", "lhs:qa rhs:qb", family="low precision", gemm=_matmul)
_add(
    "sparse::qlinear sparse::qlinear_dynamic sparse::qlinear_relu sparse::qlinear_relu_dynamic",
    "lhs:X",
    family="low precision",
)
_add(
    "quantized::quantized_gru_cell_dynamic quantized::quantized_lstm_cell_dynamic"
    " quantized::quantized_rnn_relu_cell_dynamic quantized::quantized_rnn_tanh_cell_dynamic",
    "lhs:input",
    family="low precision",
    opaque=True,
)
_add("onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16", "lhs:x", family="low precision")
_add("onednn::qlinear_pointwise", "lhs:qx", family="low precision")

_add("hspmm", "lhs:mat1 rhs:mat2", family="sparse", gemm=_matmul)
_add("_sparse_mm", "lhs:sparse rhs:dense", family="sparse", kind="composite", gemm=_matmul)
_add("smm", "lhs:input rhs:mat2", family="sparse", kind="composite", gemm=_matmul)
_add("_sparse_addmm sspaddmm", "bias:input lhs:mat1 rhs:mat2", family="sparse", gemm=_matmul)
_add("sparse_sampled_addmm", "bias:input lhs:mat1 rhs:mat2", family="sparse", gemm=_matmul)
_add("_sparse_sparse_matmul _sparse_mm_reduce_impl", "lhs:input rhs:other", family="sparse", gemm=_matmul)
_add("_sparse_mm_reduce_impl_backward", "lhs:self rhs:grad_out", family="sparse", opaque=True)
_add("_cslt_sparse_mm", "lhs:compressed_A rhs:dense_B bias:bias", family="sparse")
_add("_sparse_semi_structured_linear", "lhs:input rhs:weight", family="sparse")
_add("_sparse_semi_structured_mm", "lhs:mat1 _ rhs:mat2", family="sparse")
_add("_sparse_semi_structured_addmm", "bias:input lhs:mat1 _ rhs:mat2", family="sparse")

_add(
    "scaled_dot_product_attention _scaled_dot_product_attention_math",
    "lhs:query rhs:key value:value",
    family="attention",
    kind="composite",
    opaque=True,
    flops=_attention(2),
)
_add(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps",
    "lhs:query rhs:key value:value",
    family="attention",
    opaque=True,
    flops=_attention(2),
)
_add(
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward",
    "lhs:query rhs:key value:value",
    family="attention",
    opaque=True,
)
_add(
    "_flash_attention_forward_no_dropout_inplace _cudnn_attention_forward_no_dropout_inplace",
    "_ lhs:query rhs:key value:value",
    family="attention",
    opaque=True,
)
_add("_triton_scaled_dot_attention", "lhs:q rhs:k value:v", family="attention", opaque=True, flops=_attention(2))
_add(
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
    " _scaled_dot_product_fused_attention_overrideable_backward",
    "_ lhs:query rhs:key value:value",
    family="attention",
    opaque=True,
    flops=_attention(5),
)
_add(
    "_flash_attention_backward _efficient_attention_backward _cudnn_attention_backward",
    "_ lhs:query rhs:key value:value",
    family="attention",
    opaque=True,
)

_add(
    "_native_multi_head_attention _triton_multi_head_attention",
    "lhs:query rhs:key",
    family="fused",
    kind="seen",
    opaque=True,
)
_add("_transformer_encoder_layer_fwd", "lhs:src", family="fused", kind="seen", opaque=True)
_add("mkldnn_rnn_layer", "lhs:input rhs:weight0", family="fused", opaque=True, flops=_lstm_layer)
_add("mkldnn_rnn_layer_backward", "lhs:input rhs:weight1", family="fused", opaque=True, flops=_lstm_layer_backward)
_add("_cudnn_rnn miopen_rnn _lstm_mps", "lhs:input", family="fused", opaque=True)
_add("_cudnn_rnn_backward miopen_rnn_backward", "lhs:input", family="fused", opaque=True)
_add("lstm_mps_backward", "_ _ _ _ _ lhs:input", family="fused", opaque=True)
_add("quantized_lstm quantized_gru", "lhs:input", family="fused", opaque=True)
_add(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell quantized_lstm_cell"
    " quantized_gru_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell",
    "lhs:input",
    family="fused",
    kind="composite",
    opaque=True,
)
_add("prepacked::linear_clamp_run", "lhs:X", family="fused")
_add("mkldnn_linear", "lhs:self rhs:weight bias:bias", family="fused", gemm=_linear)
_add("mkldnn_linear_backward", "lhs:self _ rhs:weight", family="fused", opaque=True)
_add("mkldnn_linear_backward_input", "_ lhs:grad_output rhs:weight", family="fused")
_add("mkldnn_linear_backward_weights", "lhs:grad_output rhs:input", family="fused")
# The packed weight of these has no shape of its own.
_add("mkl::_mkl_linear", "lhs:X _ rhs:ORI_W bias:B", family="fused", gemm=_linear)
_add("mkldnn::_linear_pointwise", "lhs:X rhs:W bias:B", family="fused", gemm=_linear)

# Operators that take Python functions: a dispatch mode gets them whole, the kernel engine what they run.
HIGHER_ORDER = frozenset(
    name
    for names in (
        "associative_scan cond flex_attention flex_attention_backward hints_wrapper",
        "invoke_subgraph map_impl scan while_loop wrap",
    )
    for name in names.split()
)
for _name in HIGHER_ORDER:
    _TABLE[f"higher_order::{_name}"] = Op(f"higher_order::{_name}", "fused", "seen", opaque=True)

MATMUL: dict[str, Op] = _TABLE
"""Packet name to row, the whole family."""

NOT_MATMUL: dict[str, str] = {
    name if "::" in name else f"aten::{name}": reason
    for reason, names in {
        "an outer product: nothing is summed": "addr addr_ outer ger kron",
        "pointwise half of a cell, its matmuls run before it": (
            "_thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell"
            " _thnn_fused_lstm_cell_backward _thnn_fused_lstm_cell_backward_impl"
            " _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward"
        ),
        "pairwise differences, no product": "_cdist_forward _cdist_backward",
        "interpolation": (
            "_upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward upsample_bilinear2d"
            " upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_trilinear3d"
            " upsample_trilinear3d_backward"
        ),
        "packs or unpacks a weight": (
            "_quantized::_wrapped_linear_prepack _quantized::linear_prepack _quantized::linear_prepack_fp16"
            " _quantized::linear_prepack_fp16_legacy _quantized::linear_prepack_legacy"
            " _quantized::wrapped_fbgemm_pack_gemm_matrix_fp16 _wrapped_linear_prepack"
            " fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 mkl::_mkl_reorder_linear_weight"
            " mkldnn::_reorder_linear_weight mkldnn::_reorder_mkldnn_rnn_layer_weight"
            " onednn::linear_prepack_fp16 onednn::qlinear_prepack prepacked::linear_clamp_prepack"
            " prepacked::unpack_prepacked_sizes_linear quantized::int4mm_packed_weight_cpu"
            " quantized::linear_prepack quantized::linear_prepack_fp16 quantized::linear_prepack_fp16_legacy"
            " quantized::linear_prepack_legacy quantized::linear_unpack quantized::linear_unpack_fp16"
            " sparse::qlinear_prepack sparse::qlinear_unpack _cudnn_rnn_flatten_weight"
            " _use_cudnn_rnn_flatten_weight fbgemm_pack_quantized_matrix _convert_weight_to_int4pack"
            " _convert_weight_to_int4pack_for_cpu _dyn_quant_pack_4bit_weight"
        ),
        "chooses an algorithm, the caller keeps no product": "_cslt_sparse_mm_search _fused_sdp_choice",
        "a backward formula built of other operators": "matrix_exp_backward",
        "a weighted sum inside matrix_exp, elementwise": "_compute_linear_combination",
        "a function of one argument, unrelated": "mvlgamma mvlgamma_",
    }.items()
    for name in names.split()
}
"""Operators whose names look like a matmul's and that are none, with the reason."""


def overloads(packet_name: str) -> list[torch._ops.OpOverload]:
    """Every overload of a packet; none where this torch build lacks the operator."""
    namespace, _, name = packet_name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, overload) for overload in packet.overloads()]


# Where the function level finds the functions of a row, and what it calls them in public.
_PLACES: tuple[tuple[str, Any, str], ...] = (
    ("torch.nn.functional", torch.nn.functional, ""),
    ("torch", torch, ""),
    ("torch.Tensor", torch.Tensor, ""),
    ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.sparse", torch.sparse, "_sparse_"),
    ("torch.sparse", torch.sparse, "sparse_"),
)

# lhs and rhs the other way round than the method's arguments.
_REFLECTED = {"__rmatmul__": "matmul"}
_SPELLINGS = {"__matmul__": "matmul"}


@cache
def functions() -> dict[Callable[..., Any], Op]:
    """The functions that Python calls for each row, with a row that carries the public name."""
    found: dict[Callable[..., Any], Op] = {}

    def put(function: Any, name: str, row: Op, roles: dict[str, tuple[int, str]] | None = None) -> None:
        if callable(function) and not isinstance(function, (type, ModuleType)):
            found.setdefault(
                function,
                Op(
                    name,
                    row.family,
                    row.kind,
                    row.opaque,
                    row.roles if roles is None else roles,
                    row.gemm_rule,
                    row.flops_rule,
                ),
            )

    for row in _TABLE.values():
        namespace, _, short = row.name.partition("::")
        if namespace != "aten":
            continue
        for place, owner, prefix in _PLACES:
            if short.startswith(prefix):
                public = short.removeprefix(prefix)
                put(getattr(owner, public, None), f"{place}.{public}", row)
    matmul = _TABLE["aten::matmul"]
    for method in _SPELLINGS:
        put(getattr(torch.Tensor, method), f"torch.Tensor.{method}", matmul)
    for method in _REFLECTED:
        put(
            getattr(torch.Tensor, method),
            f"torch.Tensor.{method}",
            matmul,
            {"lhs": (1, "other"), "rhs": (0, "self")},
        )
    attention = Op("", "attention", "composite", True, {"lhs": (0, "query"), "rhs": (1, "key")})
    put(
        torch.nn.functional.multi_head_attention_forward,
        "torch.nn.functional.multi_head_attention_forward",
        attention,
    )
    return found


@lru_cache(maxsize=4096)
def row_of(key: Any) -> Op:
    """The row of an overload, its name, or a function; one without operands for what is no matmul."""
    name = key if isinstance(key, str) else getattr(key, "_name", None)
    if name is not None:
        packet = f"higher_order::{name}" if name in HIGHER_ORDER else name.partition(".")[0]
        return _TABLE.get(packet) or Op(packet)
    return functions().get(key) or Op(torch.overrides.resolve_name(key) or getattr(key, "__qualname__", repr(key)))


Selection = frozenset[Any] | None
"""What to watch: overloads at dispatch level, functions at function level; None for everything."""


def select(ops: Any, level: Literal["function", "dispatch"]) -> Selection:
    """Work out what `ops=` stands for.

    Raises:
        TypeError: An entry of another type than the level takes.
        ValueError: An unknown name, or nothing at all.
    """
    if isinstance(ops, str) and ops == "all":
        return None
    one = _overloads_of if level == "dispatch" else _functions_of
    if isinstance(ops, str) and ops == "matmul":
        family = frozenset(overload for name in _TABLE for overload in overloads(name))
        return family if level == "dispatch" else family | frozenset(functions())
    entries = ops if isinstance(ops, Iterable) and not isinstance(ops, (str, torch._ops.OpOverloadPacket)) else [ops]
    found = frozenset(key for entry in entries for key in one(entry))
    if not found:
        raise ValueError(f"ops must name at least one operator, got {ops!r}; leave it out for the whole family")
    return found


def _overloads_of(entry: Any) -> list[Any]:
    if isinstance(entry, torch._ops.OpOverload):
        return [entry]
    if isinstance(entry, torch._ops.OpOverloadPacket):
        return [getattr(entry, name) for name in entry.overloads()]
    if not isinstance(entry, str):
        raise TypeError(
            f"ops at dispatch level must be names, OpOverloadPackets or OpOverloads, got {entry!r}; "
            "pass torch.ops.aten.mm or 'mm', or use level='function'"
        )
    packet, _, overload = (entry if "::" in entry else f"aten::{entry}").partition(".")
    found = [o for o in overloads(packet) if not overload or o._overloadname == overload]
    if not found:
        raise _unknown(entry, [name.removeprefix("aten::") for name in _TABLE])
    return found


def _functions_of(entry: Any) -> list[Any]:
    if isinstance(entry, str):
        short = entry.removeprefix("aten::")
        found = [
            function
            for function, row in functions().items()
            if row.name == entry or row.name.rpartition(".")[2].strip("_") == short.strip("_")
        ]
        if not found:
            places = [getattr(owner, short, None) for _, owner, _ in _PLACES]
            found = [place for place in places if callable(place) and torch.overrides.resolve_name(place)]
        if not found:
            raise _unknown(entry, [row.name.rpartition(".")[2] for row in functions().values()])
        return found
    if entry in functions() or (callable(entry) and torch.overrides.resolve_name(entry)):
        return [entry]
    raise TypeError(f"ops at function level must be names or functions of torch, got {entry!r}")


def _unknown(name: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"ops must be names of operators, got unknown op {name!r}; {_hint(name, known)}")


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.removeprefix("aten::"), sorted(set(known)), n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}" if close else "see torch.ops for the names there are"


_PARTS = {
    "attention": "'_scaled_dot_product_flash_attention' and its like, or 'bmm' for the math path",
    "fused": "'mm' and 'addmm', or 'mkldnn_rnn_layer' and '_cudnn_rnn' for a fused LSTM",
    "sparse": "'_sparse_addmm' and 'addmm'",
    "low precision": "its namespace's operators",
    "other": "what ops='all' shows of it",
}


def parts(row: Op) -> str:
    """What to watch at dispatch level instead of a composite."""
    return _PARTS.get(row.family, "'mm', 'addmm', 'bmm', 'mv' and 'dot'")


def why_never(name: str, level: Literal["function", "dispatch"], keys: Selection, family: bool) -> str | None:
    """Say why no watched call has this name, and what to write instead; None if one may.

    Args:
        name: In full or without its namespace, as in `hooks.when`.
        level: That of the calls.
        keys: What the engine watches: overloads by name, or functions; None for everything.
        family: Whether that is the whole family. Then the operators that only other builds of torch run count too,
            so that one test serves all devices.
    """
    names = None if keys is None else {row_of(key).name for key in keys}
    known = {_short(full) for full in (_TABLE if names is None else names)}
    if names is not None:
        if family and level == "dispatch":
            names.update(row.name for row in _TABLE.values() if row.kind == "leaf")
            # Without "linear", which would be torch's, and not `quantized::linear`.
            apart = {_short(row.name) for row in _TABLE.values() if row.kind == "composite"}
            known = {_short(full) for full in names} - {short for short in apart if f"aten::{short}" not in names}
        if name in names or name in known:
            return None
    packet, not_watched = _packet(name), None if names is None else "which is not watched; name it in ops="
    if level == "function":
        if _is_function(name) or _exists(name):
            return not_watched
        return f"an unknown name; {_hint(name, (_short(row.name) for row in functions().values()))}"
    if any(name == row.name for row in functions().values()):
        return "which is a function; use level='function'"
    if overloads(packet.partition(".")[0]) and "." in packet:
        return f"but calls are named without the overload, {name.partition('.')[0]!r}"
    row = row_of(name if name in HIGHER_ORDER else packet)
    if names is not None and row.kind == "composite":
        all_of_them = ", leave op out for the whole family" if packet == "aten::matmul" else ""
        return (
            f"which is taken apart before dispatch level can see it; name {parts(row)} instead{all_of_them}, or use "
            "level='function'"
        )
    if names is not None and row.kind == "seen":
        return "of which the kernel engine sees the products that it runs, one by one; use engine='mode' for the whole"
    if not _exists(name):
        return f"an unknown name; {_hint(name, known)}"
    return not_watched


def _is_function(name: str) -> bool:
    place: Any = torch
    for part in name.split(".")[1:] if name.startswith("torch.") else ():
        place = getattr(place, part, None)
    try:
        return bool(_functions_of(name if place is torch else place))
    except (TypeError, ValueError):
        return False


def _short(name: str) -> str:
    return name.rpartition("::")[2].rpartition(".")[2]


def _packet(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


def _exists(name: str) -> bool:
    if name in HIGHER_ORDER or overloads(_packet(name)):
        return True
    # Without its namespace the name may be that of an operator of the program's own.
    spaces = [space for space, value in vars(torch.ops).items() if isinstance(value, torch._ops._OpNamespace)]
    return "::" not in name and any(overloads(f"{space}::{name}") for space in spaces)
