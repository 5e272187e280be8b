"""The operator table.

Invariant: one row per operator packet, so that no overload (`.out`, `.dtype`) is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from types import ModuleType
from typing import Any

import torch

from opintercept._core.noted import forget
from opintercept._core.record import forget_summaries
from opintercept._ops import convolutions, patched_functions, shapes
from opintercept._ops.generated import GeneratedKernel
from opintercept._ops.op import Family, FlopsRule, GemmRule, Kind, Op, parameters_of


class OpTable(dict[str, Op]):
    """Rows by the name of a packet or, for a single overload, by its whole name, `"aten::mm.default"`.

    Attributes:
        version: Counts the changes since torch's own rows were declared.
    """

    version = 0

    def __init__(self) -> None:
        super().__init__()
        self._offered: dict[str, Op] = {}  # what packs declare, also while a row of the program is in its place
        self._patched: tuple[int, tuple[str, ...]] = (-1, ())  # with the version at which they were looked for

    def declare(self, key: str, row: Op) -> None:
        """Put a row in. The rows of torch's operators come in here, and those of `register_op`."""
        self[key] = row
        self.changed()

    def offer(self, key: str, row: Op) -> None:
        """Put a row of a pack in. It gives way to a row that the program has declared, or declares later."""
        self._offered[key] = row
        if key not in self:
            self.declare(key, row)

    def offered(self) -> list[tuple[str, Op]]:
        """What packs have offered."""
        return list(self._offered.items())

    def refuse(self, key: str) -> None:
        """Take back what a pack has offered: its library has come, and does not fit."""
        self.withdraw(key, self._offered.pop(key))

    def gives_way(self, key: str) -> bool:
        """Whether the program may declare this row: there is none, or only that of a pack."""
        return self.get(key) is self._offered.get(key)

    def withdraw(self, key: str, row: Op) -> None:
        """Take a row out, if it is still there. The row of a pack in whose place it was comes back."""
        if self.get(key) is row:
            if key in self._offered:
                self[key] = self._offered[key]
            else:
                del self[key]
            self.changed()

    @property
    def patched(self) -> tuple[str, ...]:
        """The names of the functions that are no operators of the dispatcher."""
        if self._patched[0] != self.version:
            self._patched = self.version, tuple(filter(patched_functions.is_patched, tuple(self)))
        return self._patched[1]

    def changed(self) -> None:
        """Note that the rows have changed, or that the dispatcher has more operators."""
        self.version += 1
        row_of.cache_clear()
        forget_summaries()
        forget()


ROWS = OpTable()
"""The rows of every operator that multiplies."""


@lru_cache(maxsize=4096)
def row_of(key: Any) -> Op:
    """Return the row of an overload, of its name, of a function or of a generated kernel.

    What is not a matmul has a row without operands.
    """
    if isinstance(key, GeneratedKernel):
        return key.row
    name = key if isinstance(key, str) else getattr(key, "_name", None)
    if name is None and key not in functions() and patched_functions.NAMES.get(key) in ROWS:
        name = patched_functions.NAMES[key]
    if patched_functions.is_patched(name):
        target = patched_functions.locate(name)
        return (
            fitted(ROWS[name], None if target is None else patched_functions.function_of(target.value))
            if name in ROWS
            else Op(name)
        )
    if name is None:
        return functions().get(key) or Op(torch.overrides.resolve_name(key) or getattr(key, "__qualname__", repr(key)))
    packet = f"higher_order::{name}" if name in HIGHER_ORDER else name.partition(".")[0]
    row = ROWS.get(exact(name)) or ROWS.get(packet)
    if row is None:
        return Op(packet)
    if row.declared is None:
        return row
    return fitted(row, next(iter(overloads(exact(name)) or overloads(name)), None))


def rows_for(name: str) -> list[Op]:
    """Return what is declared for an overload, by its name: a row of its own, that of its packet, or both."""
    return [ROWS[key] for key in (exact(name), name.partition(".")[0]) if key in ROWS]


def exact(name: str) -> str:
    """Return the whole name of an overload, `"aten::mm.default"`, which torch shortens to `"aten::mm"`."""
    return name if "." in name else f"{name}.default"


def fitted(row: Op, func: Any) -> Op:
    """Return a registered row for one overload or function, with the arguments found in its schema or signature."""
    declared = row.declared
    if declared is None or func is None:
        return row
    parameters = parameters_of(func)
    names = [parameter.name for parameter in parameters]

    def found(given: str | int) -> list[tuple[int, str]]:
        if isinstance(given, int):
            return [(given, names[given] if given < len(names) else "")]
        if given in names:
            return [(names.index(given), given)]
        return [(sys.maxsize, given)] if row.kind == "patched" else []  # it may take any keyword

    roles = {role: places[0] for role, given in declared.roles.items() if (places := found(given))}
    if "out" not in roles and (schema := getattr(func, "_schema", None)) is not None and not schema.returns:
        written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        places = [(i, names[i]) for i in written]
        # Its values before the call are nobody's. In a role of its own, the operator adds to it.
        if len(places) == 1 and places[0] not in roles.values():
            roles["out"] = places[0]
    if declared.gemm is not None:
        gemm: GemmRule | None = shapes.gemm_formula(row.name, parameters, declared.layout, declared.gemm)
    elif {"lhs", "rhs"} <= roles.keys() and declared.layout is not None and not declared.flops:
        gemm = shapes.of_layout(declared.layout)
    else:
        gemm = None
    return replace(
        row,
        roles=roles,
        gemm_rule=gemm,
        flops_rule=declared.flops and shapes.flops_formula(row.name, parameters, declared.flops),
        scales=tuple(place for given in declared.scales for place in found(given)),
        declared=None,
        func=func,
    )


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
    # `arguments` are the first parameters as role:name, "bias:input lhs:mat1 rhs:mat2", with `_` for those of no role.
    roles = {}
    for position, word in enumerate(arguments.split()):
        role, _, keyword = word.partition(":")
        if role != "_":
            roles[role] = (position, keyword)
    for name in names.split():
        name = name if "::" in name else f"aten::{name}"
        ROWS.declare(name, Op(name, family, kind, opaque, roles, gemm, flops))


_low_precision, _sparse, _fused = (partial(_add, family=name) for name in ("low precision", "sparse", "fused"))
_attention = partial(_add, family="attention", opaque=True)

_add("mm bmm", "lhs:input rhs:mat2", gemm=shapes.matmul)
_add("addmm addmm_ _addmm_activation", "bias:input lhs:mat1 rhs:mat2", gemm=shapes.matmul)
_add("baddbmm baddbmm_ addbmm addbmm_", "bias:input lhs:batch1 rhs:batch2", gemm=shapes.matmul)
_add("mv", "lhs:input rhs:vec", gemm=shapes.matmul)
_add("addmv addmv_", "bias:input lhs:mat rhs:vec", gemm=shapes.matmul)
_add("dot", "lhs:input rhs:tensor", gemm=shapes.matmul)
_add("vdot", "lhs:input rhs:other", gemm=shapes.matmul)
_add(
    "_foreach_mm _native::_foreach_mm_native_0 _native::_foreach_mm_native_1", "lhs:self rhs:mat2", flops=shapes.foreach
)
_add("_native::bmm_triton_0", "lhs:self rhs:mat2", gemm=shapes.matmul)
_add("inductor::_mm_plus_mm", "lhs:a rhs:b", kind="seen", opaque=True)
_add("symm_mem::_async_input_mm", "lhs:a rhs:b", gemm=shapes.matmul)
# Importing torch.distributed._symmetric_memory or torch.onnx registers these.
_add(
    "symm_mem::fused_all_gather_matmul symm_mem::fused_all_gather_scaled_matmul"
    " symm_mem::fused_matmul_reduce_scatter symm_mem::fused_scaled_matmul_reduce_scatter onnx::Attention",
    kind="seen",
    opaque=True,
)
_add("matmul linalg_matmul", "lhs:input rhs:other", kind="composite", gemm=shapes.matmul)
_add("linear", "lhs:input rhs:weight bias:bias", kind="composite", gemm=shapes.linear)
_add("einsum", "_ lhs:operands rhs:operands", kind="composite", gemm=shapes.einsum)
_add("tensordot", "lhs:a rhs:b", kind="composite", gemm=shapes.tensordot)
_add("inner", "lhs:input rhs:other", kind="composite", gemm=shapes.inner)
_add("linalg_vecdot", "lhs:x rhs:y", kind="composite", gemm=shapes.vecdot)
_add("chain_matmul linalg_multi_dot", "lhs:tensors", kind="composite")
_add("matrix_power linalg_matrix_power", "lhs:input", kind="composite")
_add("bilinear", "lhs:input1 _ rhs:weight bias:bias", kind="composite", opaque=True)
_add("_trilinear", "lhs:i1 rhs:i2", kind="seen", opaque=True)
_add("cdist", "lhs:x1 rhs:x2", kind="composite", opaque=True)
_add("_euclidean_dist", "lhs:x1 rhs:x2", kind="seen", opaque=True)
_add("matrix_exp pinverse cov corrcoef", "lhs:input", kind="composite", opaque=True)
_add("linalg_matrix_exp linalg_pinv", "lhs:input", kind="seen", opaque=True)
_add("linear_backward", "lhs:self _ rhs:weight", kind="seen", opaque=True)
_add("matmul_backward", "_ lhs:self rhs:other", kind="seen", opaque=True)
_low_precision("_int_mm _scaled_mm_v2", "lhs:input rhs:mat2", gemm=shapes.matmul)
_low_precision("_scaled_mm", "lhs:input rhs:mat2 _ _ bias:bias", gemm=shapes.matmul)
_low_precision("_scaled_addmm _scaled_addmm_", "bias:input lhs:mat1 rhs:mat2", gemm=shapes.matmul)
_low_precision("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", "lhs:input rhs:mat2", flops=shapes.grouped)
_low_precision("_weight_int8pack_mm", "lhs:input rhs:mat2", gemm=shapes.linear)
_low_precision(
    "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros", "lhs:input rhs:mat2"
)
_low_precision("_mixed_dtypes_linear", "lhs:input rhs:weight")
_low_precision("_dyn_quant_matmul_4bit", "lhs:inp rhs:packed_weights")
_low_precision(
    "fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_fp16_weight"
    " fbgemm_linear_fp16_weight_fp32_activation _wrapped_quantized_linear_prepacked",
    "lhs:input",
    kind="composite",
)
_low_precision(
    "quantized::linear quantized::linear_dynamic quantized::linear_dynamic_fp16"
    " quantized::linear_dynamic_fp16_unpacked_weight quantized::linear_leaky_relu quantized::linear_relu"
    " quantized::linear_relu_dynamic quantized::linear_relu_dynamic_fp16 quantized::linear_tanh"
    " quantized::linear_with_input_q_dq_qweight_dq_output_fp32"
    " quantized::linear_with_input_q_dq_qweight_dq_relu_output_fp32 _quantized::linear"
    " _quantized::linear_dynamic _quantized::wrapped_fbgemm_linear_fp16_weight"
    " _quantized::wrapped_quantized_linear _quantized::_wrapped_quantized_linear_prepacked",
    "lhs:X",
)
_low_precision("quantized::matmul", "lhs:qa rhs:qb", gemm=shapes.matmul)
_low_precision("sparse::qlinear sparse::qlinear_dynamic sparse::qlinear_relu sparse::qlinear_relu_dynamic", "lhs:X")
_low_precision(
    "quantized::quantized_gru_cell_dynamic quantized::quantized_lstm_cell_dynamic"
    " quantized::quantized_rnn_relu_cell_dynamic quantized::quantized_rnn_tanh_cell_dynamic",
    "lhs:input",
    opaque=True,
)
_low_precision("onednn::linear_dynamic_fp16 onednn::linear_relu_dynamic_fp16", "lhs:x")
_low_precision("onednn::qlinear_pointwise", "lhs:qx")
_sparse("hspmm", "lhs:mat1 rhs:mat2", gemm=shapes.matmul)
_sparse("_sparse_mm", "lhs:sparse rhs:dense", kind="composite", gemm=shapes.matmul)
_sparse("smm", "lhs:input rhs:mat2", kind="composite", gemm=shapes.matmul)
_sparse("_sparse_addmm sspaddmm sparse_sampled_addmm", "bias:input lhs:mat1 rhs:mat2", gemm=shapes.matmul)
_sparse("_sparse_sparse_matmul _sparse_mm_reduce_impl", "lhs:input rhs:other", gemm=shapes.matmul)
_sparse("_sparse_mm_reduce_impl_backward", "lhs:self rhs:grad_out", opaque=True)
_sparse("_cslt_sparse_mm", "lhs:compressed_A rhs:dense_B bias:bias")
_sparse("_sparse_semi_structured_linear", "lhs:input rhs:weight")
_sparse("_sparse_semi_structured_mm", "lhs:mat1 _ rhs:mat2")
_sparse("_sparse_semi_structured_addmm", "bias:input lhs:mat1 _ rhs:mat2")
_attention(
    "scaled_dot_product_attention _scaled_dot_product_attention_math",
    "lhs:query rhs:key value:value",
    kind="composite",
    flops=shapes.attention(2),
)
_attention(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps",
    "lhs:query rhs:key value:value",
    flops=shapes.attention(2),
)
_attention(
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward", "lhs:query rhs:key value:value"
)
_attention(
    "_flash_attention_forward_no_dropout_inplace _cudnn_attention_forward_no_dropout_inplace",
    "_ lhs:query rhs:key value:value",
)
_attention("_triton_scaled_dot_attention", "lhs:q rhs:k value:v", flops=shapes.attention(2))
_attention(
    "_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
    " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
    " _scaled_dot_product_fused_attention_overrideable_backward",
    "_ lhs:query rhs:key value:value",
    flops=shapes.attention(5),
)
_attention(
    "_flash_attention_backward _efficient_attention_backward _cudnn_attention_backward",
    "_ lhs:query rhs:key value:value",
)
_fused("_native_multi_head_attention _triton_multi_head_attention", "lhs:query rhs:key", kind="seen", opaque=True)
_fused("_transformer_encoder_layer_fwd", "lhs:src", kind="seen", opaque=True)
_fused("mkldnn_rnn_layer", "lhs:input rhs:weight0", opaque=True, flops=shapes.lstm_layer)
_fused("mkldnn_rnn_layer_backward", "lhs:input rhs:weight1", opaque=True, flops=shapes.lstm_layer_backward)
_fused(
    "_cudnn_rnn miopen_rnn _lstm_mps _cudnn_rnn_backward miopen_rnn_backward quantized_lstm quantized_gru",
    "lhs:input",
    opaque=True,
)
_fused("lstm_mps_backward", "_ _ _ _ _ lhs:input", opaque=True)
_fused(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell quantized_lstm_cell"
    " quantized_gru_cell quantized_rnn_relu_cell quantized_rnn_tanh_cell",
    "lhs:input",
    kind="composite",
    opaque=True,
)
_fused("prepacked::linear_clamp_run", "lhs:X")
_fused("mkldnn_linear", "lhs:self rhs:weight bias:bias", gemm=shapes.linear)
_fused("mkldnn_linear_backward", "lhs:self _ rhs:weight", opaque=True)
_fused("mkldnn_linear_backward_input", "_ lhs:grad_output rhs:weight")
_fused("mkldnn_linear_backward_weights", "lhs:grad_output rhs:input")
# A packed weight has no shape of its own, so the first of these takes the original weight.
_fused("mkl::_mkl_linear", "lhs:X _ rhs:ORI_W bias:B", gemm=shapes.linear)
_fused("mkldnn::_linear_pointwise", "lhs:X rhs:W bias:B", gemm=shapes.linear)
# Operators that take Python functions. A dispatch mode gets them whole, the kernel engine the operators that they run.
HIGHER_ORDER = frozenset(
    name
    for names in (
        "associative_scan cond flex_attention flex_attention_backward hints_wrapper",
        "invoke_subgraph map_impl scan while_loop wrap",
    )
    for name in names.split()
)
for _name in HIGHER_ORDER:
    ROWS[f"higher_order::{_name}"] = Op(f"higher_order::{_name}", "fused", "seen", opaque=True)
for _row in convolutions.ROWS:
    ROWS.declare(_row.name, replace(_row, name=_row.name.partition(".")[0]))


def overloads(packet_name: str) -> list[torch._ops.OpOverload]:
    """Return every overload of a packet, or the one that is named; none if this process lacks it."""
    namespace, _, name = packet_name.partition("::")
    if not name:
        return []
    name, _, overload_name = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    return [getattr(packet, each) for each in packet.overloads() if overload_name in ("", each)]


# Where the functions of a row are: the public prefix, the module or class, and the prefix of the operator's name.
PLACES: tuple[tuple[str, Any, str], ...] = (
    ("torch.nn.functional", torch.nn.functional, ""),
    ("torch", torch, ""),
    ("torch.Tensor", torch.Tensor, ""),
    ("torch.linalg", torch.linalg, "linalg_"),
    ("torch.sparse", torch.sparse, "_sparse_"),
    ("torch.sparse", torch.sparse, "sparse_"),
)
# Methods with lhs and rhs in the reverse order of their arguments.
_REFLECTED = {"__rmatmul__": "matmul"}
_SPELLINGS = {"__matmul__": "matmul"}


@cache
def functions() -> dict[Callable[..., Any], Op]:
    """Return the functions that a program calls for each row, each with a copy of the row under its public name."""
    found: dict[Callable[..., Any], Op] = {}

    def put(function: Any, name: str, row: Op, roles: dict[str, tuple[int, str]] | None = None) -> None:
        if callable(function) and not isinstance(function, (type, ModuleType)):
            found.setdefault(function, replace(row, name=name, roles=row.roles if roles is None else roles))

    for row in ROWS.values():
        namespace, _, short = row.name.partition("::")
        if namespace != "aten":
            continue
        for place, owner, prefix in PLACES:
            if short.startswith(prefix):
                public = short.removeprefix(prefix)
                put(getattr(owner, public, None), f"{place}.{public}", row)
    matmul = ROWS["aten::matmul"]
    for method in _SPELLINGS:
        put(getattr(torch.Tensor, method), f"torch.Tensor.{method}", matmul)
    for method in _REFLECTED:
        put(getattr(torch.Tensor, method), f"torch.Tensor.{method}", matmul, {"lhs": (1, "other"), "rhs": (0, "self")})
    attention = Op("", "attention", "composite", True, {"lhs": (0, "query"), "rhs": (1, "key")})
    put(torch.nn.functional.multi_head_attention_forward, "torch.nn.functional.multi_head_attention_forward", attention)
    return found


OWN = frozenset(ROWS)
"""The operators that come with torch."""
