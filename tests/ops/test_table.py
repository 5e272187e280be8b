"""The operator table: whether it is complete, and whether operands, GEMM shapes and FLOPs are right."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from opintercept import OpCall, intercept
from opintercept._core.hook import Level
from opintercept._ops import table
from opintercept._ops.select import of_families, select, split
from opintercept._ops.shapes import broadcast

TABLED_VERSION = torch.__version__.startswith("2.13.")
_NOT_IN_IT = (  # in torch 2.11 or 2.15 only
    "_native::_foreach_mm_native_1 _native::bmm_triton_0 aten::_cudnn_attention_forward_no_dropout_inplace"
    " aten::_scaled_addmm aten::_scaled_addmm_ prepacked::conv2d_clamp_prepack prepacked::conv2d_clamp_run"
    " prepacked::conv2d_transpose_clamp_prepack prepacked::conv2d_transpose_clamp_run prepacked::linear_clamp_prepack"
    " prepacked::linear_clamp_run prepacked::unpack_prepacked_sizes_conv2d prepacked::unpack_prepacked_sizes_linear"
)
NOT_IN_IT = set(_NOT_IN_IT.split())

# Broad on purpose: NEITHER has the names that they match although they are neither.
LOOKS_LIKE_A_MATMUL = re.compile(
    r"mm(?![aeiy]|on)|mat_?mul|linear|gem[mv]|dot(?!t)|[Aa]ttention|einsum|mv(?!n)|rnn|lstm|gru|_cell(?!_params)"
    r"|tensordot|(^|_)inner(?!_tensor)|matrix_power|cdist|euclid|pinv|matrix_exp|outer|kron|(^|_)ger|addr|cov$"
    r"|corrcoef|sdp|transformer|multi_?head|flash|contract|spm[mv]"
)

LOOKS_LIKE_A_CONVOLUTION = re.compile(r"[Cc]onv(?!er[st])")

NEITHER = {
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
        "packs, unpacks or reorders the weight of a convolution": (
            "mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight mkldnn::_reorder_convolution_weight"
            " mkldnn::_reorder_convolution_transpose_weight mkldnn_prepacked::conv2d_prepack onednn::qconv_prepack"
            " prepacked::conv2d_clamp_prepack prepacked::conv2d_transpose_clamp_prepack"
            " prepacked::unpack_prepacked_sizes_conv2d quantized::conv_prepack quantized::conv_unpack"
            " quantized::conv1d_prepack quantized::conv1d_unpack quantized::conv2d_prepack quantized::conv2d_unpack"
            " quantized::conv2d_unpack_sizes quantized::conv3d_prepack quantized::conv3d_unpack"
            " quantized::conv_transpose1d_prepack quantized::conv_transpose1d_unpack"
            " quantized::conv_transpose2d_prepack quantized::conv_transpose2d_unpack"
            " quantized::conv_transpose3d_prepack quantized::conv_transpose3d_unpack _quantized::conv2d_prepack"
            " _quantized::conv3d_prepack _quantized::conv_transpose1d_prepack _quantized::conv_transpose2d_prepack"
            " _quantized::conv_transpose3d_prepack"
        ),
        "reads a setting of a packed weight": " ".join(
            f"quantized::{kind}_{setting}"
            for kind in ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d")
            for setting in ("dilation", "groups", "output_padding", "padding", "stride", "transpose")
        ),
    }.items()
    for name in names.split()
}

# Packets whose default overload is composite although another overload does the work.
WORKS_IN_A_SIBLING = {"aten::linalg_pinv": "atol_rtol_tensor", "aten::sspaddmm": "out"}

# Arguments that functions in Python name differently from the schema and pass on in another way.
SPELLED_DIFFERENTLY = {
    ("aten::einsum", "lhs"),  # torch.einsum(equation, *operands)
    ("aten::einsum", "rhs"),
    ("aten::chain_matmul", "lhs"),  # torch.chain_matmul(*matrices)
    ("aten::tensordot", "lhs"),  # torch.tensordot(a, b)
    ("aten::tensordot", "rhs"),
}

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@pytest.fixture(scope="module")
def registry() -> list[str]:
    """The overloads after a fresh `import torch`. Other tests and other modules of torch register more."""
    code = "import torch; print(*torch._C._dispatch_get_all_op_names(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def unlisted(overload_names: Iterable[str]) -> set[str]:
    """The packets that look like a matmul or a convolution and are in no list."""
    packets = {name.partition(".")[0] for name in overload_names}
    names = {packet: packet.partition("::")[2] for packet in packets}
    alike = {p for p, n in names.items() if LOOKS_LIKE_A_MATMUL.search(n) or LOOKS_LIKE_A_CONVOLUTION.search(n)}
    return alike - table.ROWS.keys() - NEITHER.keys()


def is_composite(overload: torch._ops.OpOverload) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"))


def calls_of(function: Callable[[], Any], level: Level = "dispatch") -> list[tuple[str, Any, int | None]]:
    """Operator, GEMM as (batch, m, n, k) and FLOPs of each call that `function` makes."""
    seen: list[tuple[str, Any, int | None]] = []

    def look(call: OpCall) -> None:
        seen.append((call.op, call.gemm and call.gemm[:4], call.flops))

    with intercept(look, level=level):
        function()
    return seen


def counted(function: Callable[[], Any]) -> int:
    """FLOPs as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


def selected(ops: Any, level: Level) -> frozenset[Any]:
    """What `ops` selects, as the engines ask for it."""
    chosen = split(ops)
    return of_families(chosen.families, level) | select(chosen.entries, level)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape).to(dtype)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow
def test_every_operator_that_looks_like_a_matmul_or_a_convolution_is_listed(registry: list[str]) -> None:
    assert unlisted(registry) == set()


@pytest.mark.slow
def test_the_check_of_the_registry_finds_unlisted_operators(registry: list[str]) -> None:
    fakes = ["aten::_fused_mm_bias", "vendor::linear_fp4.out", "vendor::FlashAttention", "vendor::gemv_int8"]
    fakes += ["aten::conv4d", "vendor::Conv2dBias.out", "vendor::fp8_deconvolution"]
    assert unlisted([*registry, *fakes]) == {name.partition(".")[0] for name in fakes}
    assert len(registry) > 1000


def test_the_check_of_the_registry_ignores_names_that_only_sound_alike() -> None:
    alike = "_convert_weight digamma swapdims histogramdd _dimV dott"
    assert unlisted(["prims::conversion", *(f"aten::{name}" for name in alike.split())]) == set()


def test_the_lists_are_disjoint() -> None:
    assert table.ROWS.keys().isdisjoint(NEITHER)


@pytest.mark.skipif(not TABLED_VERSION, reason="the lists are those of torch 2.13")
@pytest.mark.slow
def test_everything_listed_exists(registry: list[str]) -> None:
    packets = {name.partition(".")[0] for name in registry}
    missing = {*table.OWN, *NEITHER} - packets - set(registry)
    # Python modules of torch register these when they are imported.
    registered_later = ("symm_mem::fused_", "onnx::", "higher_order::")
    assert {name for name in missing if not name.startswith(registered_later)} == NOT_IN_IT


def test_a_row_is_composite_if_its_default_overload_is() -> None:
    wrong = []
    for name, row in table.ROWS.items():
        for overload in table.overloads(name):
            expected = row.kind == "composite" or name in WORKS_IN_A_SIBLING
            if overload._overloadname == "default" and is_composite(overload) is not expected:
                wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize(("name", "sibling"), WORKS_IN_A_SIBLING.items(), ids=WORKS_IN_A_SIBLING)
def test_a_row_that_is_not_composite_has_an_overload_to_watch(name: str, sibling: str) -> None:
    assert table.ROWS[name].kind != "composite"
    by_name = {overload._overloadname: overload for overload in table.overloads(name)}
    assert is_composite(by_name["default"])
    assert not is_composite(by_name[sibling])


@pytest.mark.skipif(not TABLED_VERSION, reason="argument names are those of torch 2.13")
def test_roles_name_the_arguments_of_the_schema() -> None:
    wrong = []
    for name, row in table.ROWS.items():
        for overload in table.overloads(name):
            names = [argument.name for argument in overload._schema.arguments]
            for role, (position, keyword) in row.roles.items():
                if overload._overloadname != "default" or (name, role) in SPELLED_DIFFERENTLY:
                    continue
                actual = names[position] if position < len(names) else None
                if actual not in ({"input", "self"} if keyword == "input" else {keyword}):
                    wrong.append(f"{name} {role}: {keyword!r} at {position}, torch has {actual!r}")
    assert wrong == []


LEAVES: dict[str, tuple[Callable[[], Any], tuple[int, int, int, int]]] = {
    "mm": (lambda: torch.mm(r(2, 3), r(3, 4)), (1, 2, 4, 3)),
    "mm without rows": (lambda: torch.mm(r(0, 3), r(3, 4)), (1, 0, 4, 3)),
    "mm.out": (lambda: torch.mm(r(2, 3), r(3, 4), out=torch.empty(2, 4)), (1, 2, 4, 3)),
    "addmm": (lambda: torch.addmm(r(4), r(2, 3), r(3, 4)), (1, 2, 4, 3)),
    "addmm_": (lambda: r(2, 4).addmm_(r(2, 3), r(3, 4)), (1, 2, 4, 3)),
    "_addmm_activation": (lambda: torch._addmm_activation(r(4), r(2, 3), r(3, 4)), (1, 2, 4, 3)),
    "bmm": (lambda: torch.bmm(r(5, 2, 3), r(5, 3, 4)), (5, 2, 4, 3)),
    "baddbmm": (lambda: torch.baddbmm(r(5, 2, 4), r(5, 2, 3), r(5, 3, 4)), (5, 2, 4, 3)),
    "baddbmm_": (lambda: r(5, 2, 4).baddbmm_(r(5, 2, 3), r(5, 3, 4)), (5, 2, 4, 3)),
    "addbmm": (lambda: torch.addbmm(r(2, 4), r(5, 2, 3), r(5, 3, 4)), (5, 2, 4, 3)),
    "mv": (lambda: torch.mv(r(2, 3), r(3)), (1, 2, 1, 3)),
    "addmv": (lambda: torch.addmv(r(2), r(2, 3), r(3)), (1, 2, 1, 3)),
    "dot": (lambda: torch.dot(r(3), r(3)), (1, 1, 1, 3)),
    "vdot": (lambda: torch.vdot(r(3), r(3)), (1, 1, 1, 3)),
    "_int_mm": (lambda: torch._int_mm(r(32, 16, dtype=torch.int8), r(16, 8, dtype=torch.int8)), (1, 32, 8, 16)),
}


@pytest.mark.parametrize("case", LEAVES)
def test_gemm_and_flops_of_a_leaf(case: str) -> None:
    function, shape = LEAVES[case]
    packet = case.split()[0].split(".")[0]
    flops = 2 * math.prod(shape)
    assert calls_of(function) == [(f"aten::{packet}", shape, flops)]
    if getattr(torch.ops.aten, packet) in flop_registry:
        assert counted(function) == flops


COMPOSITES: dict[str, tuple[Callable[[], Any], str, tuple[int, int, int, int]]] = {
    "matmul 1d 1d": (lambda: torch.matmul(r(3), r(3)), "torch.matmul", (1, 1, 1, 3)),
    "matmul 2d 1d": (lambda: torch.matmul(r(2, 3), r(3)), "torch.matmul", (1, 2, 1, 3)),
    "matmul 1d 2d": (lambda: torch.matmul(r(3), r(3, 4)), "torch.matmul", (1, 1, 4, 3)),
    "matmul 2d 2d": (lambda: torch.matmul(r(2, 3), r(3, 4)), "torch.matmul", (1, 2, 4, 3)),
    "matmul 3d 1d": (lambda: torch.matmul(r(5, 2, 3), r(3)), "torch.matmul", (5, 2, 1, 3)),
    "matmul 1d 3d": (lambda: torch.matmul(r(3), r(5, 3, 4)), "torch.matmul", (5, 1, 4, 3)),
    "matmul 3d 2d": (lambda: torch.matmul(r(5, 2, 3), r(3, 4)), "torch.matmul", (5, 2, 4, 3)),
    "matmul 2d 3d": (lambda: torch.matmul(r(2, 3), r(5, 3, 4)), "torch.matmul", (5, 2, 4, 3)),
    "matmul broadcast": (lambda: torch.matmul(r(5, 1, 2, 3), r(6, 3, 4)), "torch.matmul", (30, 2, 4, 3)),
    "linalg.matmul": (lambda: torch.linalg.matmul(r(2, 3), r(3, 4)), "torch.linalg.matmul", (1, 2, 4, 3)),
    "operator": (lambda: r(2, 3) @ r(3, 4), "torch.Tensor.matmul", (1, 2, 4, 3)),
    "linear 1d": (lambda: F.linear(r(3), r(4, 3)), "torch.nn.functional.linear", (1, 1, 4, 3)),
    "linear 2d": (lambda: F.linear(r(2, 3), r(4, 3), r(4)), "torch.nn.functional.linear", (1, 2, 4, 3)),
    "linear 3d": (lambda: F.linear(r(5, 2, 3), r(4, 3)), "torch.nn.functional.linear", (1, 10, 4, 3)),
    "linear vector": (lambda: F.linear(r(2, 3), r(3)), "torch.nn.functional.linear", (1, 2, 1, 3)),
    "einsum list": (lambda: torch.einsum("ij,jk->ik", [r(2, 3), r(3, 4)]), "torch.einsum", (1, 2, 4, 3)),
    "tensordot default": (lambda: torch.tensordot(r(2, 3, 5), r(3, 5, 4)), "torch.tensordot", (1, 2, 4, 15)),
    "inner": (lambda: torch.inner(r(2, 3), r(4, 3)), "torch.inner", (1, 2, 4, 3)),
    "inner 3d": (lambda: torch.inner(r(5, 2, 3), r(6, 4, 3)), "torch.inner", (1, 10, 24, 3)),
    "vecdot": (lambda: torch.linalg.vecdot(r(5, 3), r(5, 3)), "torch.linalg.vecdot", (5, 1, 1, 3)),
    "vecdot broadcast": (lambda: torch.linalg.vecdot(r(5, 1, 3), r(2, 3)), "torch.linalg.vecdot", (10, 1, 1, 3)),
    "vecdot dim": (lambda: torch.linalg.vecdot(r(3, 5), r(3, 5), dim=0), "torch.linalg.vecdot", (5, 1, 1, 3)),
    "sparse.mm": (lambda: torch.sparse.mm(r(2, 3).to_sparse(), r(3, 4)), "torch.sparse.mm", (1, 2, 4, 3)),
    "sparse.addmm": (
        lambda: torch.sparse.addmm(r(2, 4), r(2, 3).to_sparse(), r(3, 4)),
        "torch.sparse.addmm",
        (1, 2, 4, 3),
    ),
}

# Each with the sizes of its operands, and the product.
EINSUMS: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int, int, int]]] = {
    "arrow": ("ij,jk->ik", (2, 3), (3, 4), (1, 2, 4, 3)),
    "spaces": (" i j , j k -> i k ", (2, 3), (3, 4), (1, 2, 4, 3)),
    "no arrow": ("ij,jk", (2, 3), (3, 4), (1, 2, 4, 3)),
    "batch": ("bij,bkj->bik", (5, 2, 3), (5, 4, 3), (5, 2, 4, 3)),
    "two batches": ("abij,bakj->iabk", (5, 6, 2, 3), (6, 5, 4, 3), (30, 2, 4, 3)),
    "ellipsis": ("...ij,...jk->...ik", (5, 6, 2, 3), (6, 3, 4), (6, 10, 4, 3)),
    "ellipsis no arrow": ("...ij,...jk", (5, 2, 3), (5, 3, 4), (5, 2, 4, 3)),
    "one ellipsis": ("...j,kj->...k", (5, 2, 3), (4, 3), (1, 10, 4, 3)),
    "outer": ("i,j->ij", (2,), (4,), (1, 2, 4, 1)),
}
TENSORDOTS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, int, int, int]]] = {
    "number": (2, (2, 3, 5), (3, 5, 4), (1, 2, 4, 15)),
    "none": (0, (2,), (4,), (1, 2, 4, 1)),
    "lists": (([0, 2], [2, 0]), (3, 2, 5), (5, 4, 3), (1, 2, 4, 15)),
    "negative": (([-1], [-1]), (2, 3), (4, 3), (1, 2, 4, 3)),
    "tensor of pairs": (torch.tensor([[1], [1]]), (2, 3), (4, 3), (1, 2, 4, 3)),
    "tensor of one": (torch.tensor([2]), (2, 3, 5), (3, 5, 4), (1, 2, 4, 15)),
}
for case, (equation, lhs, rhs, product) in EINSUMS.items():
    COMPOSITES[f"einsum {case}"] = partial(torch.einsum, equation, r(*lhs), r(*rhs)), "torch.einsum", product
for case, (dims, lhs, rhs, product) in TENSORDOTS.items():
    COMPOSITES[f"tensordot {case}"] = partial(torch.tensordot, r(*lhs), r(*rhs), dims), "torch.tensordot", product

# The cases above whose operators torch's counter knows.
COUNTED_PARTS = {"mm", "addmm", "bmm", "baddbmm"}


@pytest.mark.parametrize("case", COMPOSITES)
def test_gemm_and_flops_of_a_function(case: str) -> None:
    function, name, shape = COMPOSITES[case]
    flops = 2 * math.prod(shape)
    assert calls_of(function, "function") == [(name, shape, flops)]
    parts = calls_of(function)
    if parts and {op.removeprefix("aten::") for op, _, _ in parts} <= COUNTED_PARTS:
        assert counted(function) == sum(part or 0 for _, _, part in parts) == flops


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: torch.einsum("ij,jk,kl->il", r(2, 3), r(3, 4), r(4, 5)), "torch.einsum"),
        (lambda: torch.einsum("ii->i", r(3, 3)), "torch.einsum"),
        (lambda: torch.linalg.multi_dot([r(2, 3), r(3, 4), r(4, 5)]), "torch.linalg.multi_dot"),
        (lambda: torch.linalg.matrix_power(r(3, 3), 3), "torch.linalg.matrix_power"),
        (lambda: F.bilinear(r(2, 3), r(2, 4), r(5, 3, 4)), "torch.nn.functional.bilinear"),
    ],
    ids=["einsum of three", "einsum of one", "multi_dot", "matrix_power", "bilinear"],
)
def test_a_call_that_is_not_a_single_product_has_no_gemm(function: Callable[[], Any], name: str) -> None:
    assert calls_of(function, "function") == [(name, None, None)]


@pytest.mark.parametrize(
    "args",
    [(), (meta(2, 3),), (meta(2, 3), 1), (meta(), meta(3, 4)), (meta(3, 2, 3), meta(4, 3, 4))],
    ids=["nothing", "one", "number", "no dimensions", "batches apart"],
)
def test_operands_that_the_operator_will_refuse_have_no_gemm(args: tuple[Any, ...]) -> None:
    assert table.row_of("aten::mm").gemm(args, {}) is None
    assert table.row_of("aten::mm").flops(args, {}) is None


@pytest.mark.parametrize(
    ("op", "args", "flops"),
    [
        ("_scaled_mm", (meta(16, 32), meta(32, 48), meta(1), meta(1)), 2 * 16 * 32 * 48),
        ("_grouped_mm", (meta(8, 16), meta(2, 16, 4)), 2 * 8 * 16 * 4),
        ("_grouped_mm", (meta(2, 8, 16), meta(16, 12)), 2 * 8 * 16 * 12),
        ("_grouped_mm", (meta(3, 8, 16), meta(3, 16, 4)), 3 * 2 * 8 * 16 * 4),
        ("_grouped_mm", (meta(8, 16), meta(16, 4)), 2 * 8 * 16 * 4),
        ("_foreach_mm", ([meta(2, 3), meta(5, 6)], [meta(3, 4), meta(6, 7)]), 2 * 2 * 3 * 4 + 2 * 5 * 6 * 7),
    ],
    ids=["scaled", "ragged rows", "ragged columns", "batch", "ragged inner", "lists"],
)
def test_flops_follow_from_sizes(op: str, args: tuple[Any, ...], flops: int) -> None:
    assert table.row_of(f"aten::{op}").flops(args, {}) == flops
    if op == "_scaled_mm":
        assert flop_registry[torch.ops.aten._scaled_mm](*args) == flops


def test_grouped_mm_that_runs_is_one_call() -> None:
    lhs, rhs = r(8, 16, dtype=torch.bfloat16), r(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    assert calls_of(lambda: torch._grouped_mm(lhs, rhs, offs=ends)) == [("aten::_grouped_mm", None, 2 * 8 * 16 * 8)]


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_flops_of_attention_are_those_of_torchs_counter(backend: str) -> None:
    name = f"_scaled_dot_product_{backend}_attention"
    query, key, value = meta(2, 3, 5, 8), meta(2, 3, 7, 8), meta(2, 3, 7, 4)
    gradient = meta(2, 3, 5, 4)
    forward = flop_registry[getattr(torch.ops.aten, name)](query, key, value)
    backward = flop_registry[getattr(torch.ops.aten, f"{name}_backward")](gradient, query, key, value)
    assert table.row_of(f"aten::{name}").flops((query, key, value), {}) == forward == 2 * 6 * 5 * 7 * (8 + 4)
    assert table.row_of(f"aten::{name}_backward").flops((gradient, query, key, value), {}) == backward


def test_flops_of_attention_on_the_cpu() -> None:
    query, key, value = (r(2, 3, 5, 8).requires_grad_() for _ in range(3))
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        forward = counted(attend)
    backward = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward](query, query, key, value)
    assert calls_of(lambda: attend().sum().backward()) == [(name, None, forward), (f"{name}_backward", None, backward)]
    assert calls_of(attend, "function") == [("torch.nn.functional.scaled_dot_product_attention", None, forward)]


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)], ids=["2d", "3d", "4d"])
def test_flops_of_attention_of_any_rank(shape: tuple[int, ...]) -> None:
    query = r(*shape)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        forward = counted(lambda: F.scaled_dot_product_attention(query, query, query))
        calls = calls_of(lambda: F.scaled_dot_product_attention(query, query, query), "function")
    assert calls == [("torch.nn.functional.scaled_dot_product_attention", None, forward)]


def test_flops_of_grouped_query_attention_count_the_heads_of_the_query() -> None:
    args = (meta(2, 6, 5, 8), meta(2, 3, 7, 8), meta(2, 3, 7, 8))
    flops = table.row_of("aten::scaled_dot_product_attention").flops(args, {"enable_gqa": True})
    assert flops == 2 * 2 * 6 * 5 * 7 * (8 + 8)


def test_flops_of_a_fused_lstm_are_those_of_its_matmuls() -> None:
    lstm, x = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True), r(5, 3, 4)
    calls = calls_of(lambda: lstm(x))
    assert {op for op, _, _ in calls} == {"aten::mkldnn_rnn_layer"}
    assert all(shape is None for _, shape, _ in calls)
    torch._C._set_mkldnn_enabled(False)  # once torch.testing is imported, it cannot be assigned, and flags() warns
    try:
        assert sum(flops or 0 for _, _, flops in calls) == counted(lambda: lstm(x))
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_flops_of_a_fused_lstms_backward_are_twice_the_forward() -> None:
    lstm, x = torch.nn.LSTM(4, 6), r(5, 3, 4)
    forward, backward = calls_of(lambda: lstm(x)[0].sum().backward())
    assert forward[0] == "aten::mkldnn_rnn_layer"
    assert backward == ("aten::mkldnn_rnn_layer_backward", None, 2 * (forward[2] or 0))


def test_a_nested_operand_has_no_gemm_and_no_flops() -> None:
    nested = torch.nested.nested_tensor([r(2, 3), r(4, 3)])
    row = table.row_of(torch.nn.functional.linear)
    assert row.gemm((nested, r(4, 3)), {}) is None
    assert row.flops((nested, r(4, 3)), {}) is None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda a, b: torch.mm(input=a, mat2=b), "torch.mm"),
        (lambda a, b: torch.mm(a, mat2=b), "torch.mm"),
        (lambda a, b: a.mm(mat2=b), "torch.Tensor.mm"),
        (lambda a, b: torch.matmul(input=a, other=b), "torch.matmul"),
        (lambda a, b: torch.addmm(input=b[0], mat1=a, mat2=b), "torch.addmm"),
        (lambda a, b: torch.tensordot(a=a, b=b, dims=1), "torch.tensordot"),
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), "torch.einsum"),
        (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), "torch.einsum"),
        (lambda a, b: torch.sparse.mm(a, b), "torch.sparse.mm"),
        (lambda a, b: b.__rmatmul__(a), "torch.Tensor.__rmatmul__"),
    ],
    ids=["mm", "mat2", "method", "matmul", "addmm", "tensordot", "einsum", "einsum list", "sparse", "reflected"],
)
def test_operands_by_role_at_function_level(function: Callable[..., Any], expected: str) -> None:
    lhs, rhs = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(3, 4)
    if expected == "torch.sparse.mm":
        lhs = lhs.to_sparse()
    seen: list[tuple[str, Any, Any, Any]] = []

    def look(call: OpCall) -> None:
        seen.append((call.op, call.lhs, call.rhs, call.gemm and call.gemm[:4]))

    with intercept(look, level="function"):
        function(lhs, rhs)
    [(name, seen_lhs, seen_rhs, shape)] = seen
    assert (name, shape) == (expected, (1, 2, 4, 3))
    assert seen_lhs is lhs
    assert seen_rhs is rhs


@pytest.mark.parametrize(
    ("function", "roles"),
    [
        (lambda x, w, b: F.linear(x, weight=w, bias=b), ("x", "w", "b")),
        (lambda x, w, b: F.linear(input=x, weight=w), ("x", "w", None)),
        (lambda x, w, b: torch.addmm(b, mat1=x, mat2=w.t()), ("x", "t", "b")),
        (lambda x, w, b: torch.dot(b, tensor=b), ("b", "b", None)),
        (lambda x, w, b: torch.vdot(b, other=b), ("b", "b", None)),
        (lambda x, w, b: torch.bmm(x[None], mat2=w.t()[None]), ("t", "t", None)),
        (lambda x, w, b: F.bilinear(x, x, w.view(4, 3, 1).expand(4, 3, 3), b), ("x", "t", "b")),
        (lambda x, w, b: F.scaled_dot_product_attention(query=x, key=x, value=x), ("x", "x", None)),
    ],
    ids=["linear", "no bias", "addmm", "dot", "vdot", "bmm", "bilinear", "attention"],
)
def test_bias_and_keywords_at_function_level(function: Callable[..., Any], roles: tuple[str | None, ...]) -> None:
    tensors = {"x": r(2, 3), "w": r(4, 3), "b": r(4)}
    names = {id(tensor): name for name, tensor in tensors.items()}
    seen: list[tuple[str | None, ...]] = []

    def look(call: OpCall) -> None:
        operands = (call.lhs, call.rhs, call.bias)
        seen.append(tuple(None if tensor is None else names.get(id(tensor), "t") for tensor in operands))

    with intercept(look, level="function"):
        function(**tensors)
    assert seen == [roles]


def test_roles_of_bilinear_are_its_first_input_its_weight_and_its_bias() -> None:
    first, second, weight, bias = meta(2, 3), meta(2, 4), meta(5, 3, 4), meta(5)
    row = table.row_of(F.bilinear)
    found = [row.operand(role, (first, second, weight, bias), {}) for role in ("lhs", "rhs", "bias")]
    assert [id(tensor) for tensor in found] == [id(first), id(weight), id(bias)]


@pytest.mark.parametrize(
    ("lhs", "rhs", "expected"),
    [
        (meta(2, 3), meta(3, 4), (False, False)),
        (meta(3, 2).t(), meta(3, 4), (True, False)),
        (meta(2, 3), meta(4, 3).t(), (False, True)),
        (meta(3, 2).t(), meta(4, 3).t(), (True, True)),
        (meta(4, 6)[::2, ::2], meta(3, 4), (False, False)),
        (torch.ones(2, 3).to_sparse(), meta(4, 3).t(), (False, True)),
        (meta(2, 3, dtype=torch.complex64), meta(4, 3, dtype=torch.complex64).mH, (False, True)),
    ],
    ids=["plain", "lhs", "rhs", "both", "strided", "sparse", "adjoint"],
)
def test_transposes_of_a_product(lhs: torch.Tensor, rhs: torch.Tensor, expected: tuple[bool, bool]) -> None:
    gemm = table.row_of("aten::mm").gemm((lhs, rhs), {})
    assert gemm is not None
    assert gemm.transposes == expected
    assert gemm.dtypes == tuple(str(operand.dtype).removeprefix("torch.") for operand in (lhs, rhs))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [(meta(4, 3), True), (meta(3, 4).t(), False), (meta(4, 6)[:, ::2], False)],
    ids=["plain", "transposed", "strided"],
)
def test_transposes_of_a_linear_are_those_of_the_product_inside(weight: torch.Tensor, expected: bool) -> None:
    gemm = table.row_of(F.linear).gemm((meta(2, 3), weight), {})
    inner = table.row_of("aten::mm").gemm((meta(2, 3), weight.t()), {})
    assert gemm is not None
    assert inner is not None
    assert gemm.transposes == inner.transposes == (False, expected)


def test_written_tensors_by_schema_and_by_keyword() -> None:
    a, b, out = r(2, 2), r(2, 2), r(2, 2)
    mm, addmm_ = torch.ops.aten.mm, torch.ops.aten.addmm_
    assert table.row_of("aten::mm").written(mm.default, (a, b), {}) == []
    [written] = table.row_of("aten::mm.out").written(mm.out, (a, b), {"out": out})
    assert written is out
    [written] = table.row_of("aten::addmm_").written(addmm_.default, (out, a, b), {})
    assert written is out
    [written] = table.row_of(torch.mm).written(torch.mm, (a, b), {"out": out})
    assert written is out
    [written] = table.row_of(torch.Tensor.addmm_).written(torch.Tensor.addmm_, (out, a, b), {})
    assert written is out
    assert table.row_of(torch.Tensor.__rmatmul__).written(torch.Tensor.__rmatmul__, (a, b), {}) == []


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        ("mm.out", {"aten::mm.out"}),
        ("aten::mm.default", {"aten::mm"}),
        (torch.ops.aten.mm.out, {"aten::mm.out"}),
        (torch.ops.aten.mv, {"aten::mv", "aten::mv.out"}),
        (["mv", torch.ops.aten.mm.out], {"aten::mv", "aten::mv.out", "aten::mm.out"}),
        (iter(["mv.out"]), {"aten::mv.out"}),
    ],
    ids=["overload name", "default", "overload", "packet", "mixed", "iterator"],
)
def test_select_at_dispatch_level(ops: Any, names: set[str]) -> None:
    assert {overload.name() for overload in selected(ops, "dispatch")} == names


@pytest.mark.parametrize(
    ("ops", "functions"),
    [
        ("torch.mm", {torch.mm}),
        ("torch.nn.functional.linear", {F.linear}),
        ("vdot", {torch.vdot, torch.Tensor.vdot}),
        ("aten::vdot", {torch.vdot, torch.Tensor.vdot}),
        ("relu6", {F.relu6}),
        (torch.bmm, {torch.bmm}),
        ([torch.bmm, "torch.mm"], {torch.bmm, torch.mm}),
    ],
    ids=["public name", "module path", "short name", "operator name", "no matmul", "function", "mixed"],
)
def test_select_at_function_level(ops: Any, functions: set[Any]) -> None:
    assert selected(ops, "function") == frozenset(functions)


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_select_the_whole_family(level: Any) -> None:
    family = selected("matmul", level)
    assert {torch.ops.aten.mm.default, torch.ops.aten.bmm.out, torch.ops.aten.addmm_.default} <= family
    functions = {torch.matmul, F.linear, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.einsum}
    assert functions & family == (functions if level == "function" else set())


@pytest.mark.parametrize(
    ("ops", "level", "error", "message"),
    [
        ("bmn", "dispatch", ValueError, r"names of operators, got unknown op 'bmn'; did you mean 'bmm'"),
        ("conv", "dispatch", ValueError, r"got unknown op 'conv'; did you mean 'convolution'$"),
        ("aten::mm.nothing", "dispatch", ValueError, r"got unknown op 'aten::mm\.nothing'"),
        ("qqqq", "dispatch", ValueError, r"got unknown op 'qqqq'; see torch\.ops for all names$"),
        ([], "dispatch", ValueError, r"ops must name at least one operator, got \[\]; leave it out"),
        (
            3,
            "dispatch",
            TypeError,
            r"must be names, OpOverloadPackets or OpOverloads, got 3; pass torch\.ops\.aten\.mm",
        ),
        (torch.mm, "dispatch", TypeError, r"at dispatch level .* use level='function'$"),
        (["mm", None], "dispatch", TypeError, r"got None"),
        ("linaer", "function", ValueError, r"got unknown op 'linaer'; did you mean 'linear'"),
        ([], "function", ValueError, r"ops must name at least one operator, got \[\]"),
        (3, "function", TypeError, r"ops at function level must be names or functions of torch, got 3$"),
    ],
)
def test_select_refuses(ops: Any, level: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        selected(ops, level)


def test_the_row_of_another_operator_has_only_its_name() -> None:
    for key, name in ((torch.ops.aten.relu.default, "aten::relu"), (torch.relu, "torch.relu")):
        row = table.row_of(key)
        assert (row.name, row.family, row.opaque, row.roles) == (name, "other", False, {})
        assert row.gemm((r(2, 2),), {}) is None
        assert row.operand("lhs", (r(2, 2),), {}) is None


@st.composite
def two_operand_equations(draw: st.DrawFn) -> tuple[str, list[str], str, dict[str, int]]:
    """An einsum equation, its two terms and its output, with a size for each label."""
    labels = "abcde"
    sizes = {label: draw(st.integers(1, 3)) for label in labels}
    terms = ["".join(draw(st.lists(st.sampled_from(labels), min_size=1, max_size=4, unique=True))) for _ in range(2)]
    used = sorted(set("".join(terms)))
    output = "".join(draw(st.permutations(used)))[: draw(st.integers(0, len(used)))]
    if draw(st.booleans()):
        return f"{','.join(terms)}->{output}", terms, output, sizes
    implicit = "".join(label for label in used if "".join(terms).count(label) == 1)
    return ",".join(terms), terms, implicit, sizes


@quick
@given(two_operand_equations())
def test_gemm_of_an_einsum_matches_an_enumeration_of_its_products(
    drawn: tuple[str, list[str], str, dict[str, int]],
) -> None:
    equation, terms, output, sizes = drawn
    lhs, rhs = (torch.ones([sizes[label] for label in term]) for term in terms)
    gemm = table.row_of(torch.einsum).gemm((equation, lhs, rhs), {})
    assert gemm is not None
    # Labels that only one operand has can be summed before the product, so they are not part of it.
    alone = (set(terms[0]) ^ set(terms[1])) - set(output)
    labels = [label for label in sizes if label in set("".join(terms)) - alone]
    products, entries = set(), set()
    for values in itertools.product(*(range(sizes[label]) for label in labels)):
        place = dict(zip(labels, values, strict=True))
        products.add(values)
        entries.add(tuple(place[label] for label in output))
    assert gemm.batch * gemm.m * gemm.n == len(entries) == torch.einsum(equation, lhs, rhs).numel()
    assert gemm.batch * gemm.m * gemm.n * gemm.k == len(products)
    assert gemm.batch == math.prod(sizes[label] for label in set(terms[0]) & set(terms[1]) & set(output))
    assert gemm.m == math.prod(sizes[label] for label in set(output) - set(terms[1]))


@st.composite
def matmul_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes that `torch.matmul` takes, including vectors, batches that broadcast and empty dimensions."""
    m, n, k = (draw(st.integers(0, 3)) for _ in range(3))
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    sides: list[tuple[int, ...]] = []
    for matrix, vector in (((m, k), (k,)), ((k, n), (k,))):
        if draw(st.integers(0, 3)) == 0:
            sides.append(vector)
            continue
        kept = batch[draw(st.integers(0, len(batch))) :]
        sides.append((*(1 if draw(st.booleans()) else size for size in kept), *matrix))
    return sides[0], sides[1]


@quick
@given(matmul_shapes())
def test_gemm_of_a_matmul_matches_its_output(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    lhs, rhs = (torch.ones(shape) for shape in shapes)
    gemm = table.row_of(torch.matmul).gemm((lhs, rhs), {})
    assert gemm is not None
    product = torch.matmul(lhs, rhs)
    assert gemm.batch * gemm.m * gemm.n == product.numel()
    assert gemm.k == lhs.shape[-1]
    if product.numel():
        assert product.flatten()[0] == gemm.k  # the operands are all ones, so each entry is the number of its products
    assert gemm.m == (lhs.shape[-2] if lhs.dim() > 1 else 1)
    assert table.row_of(torch.matmul).flops((lhs, rhs), {}) == 2 * product.numel() * lhs.shape[-1]


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
def test_flops_of_a_packed_weight_follow_from_the_output() -> None:
    seen: list[tuple[str, int | None]] = []
    layers = [torch.ao.nn.quantized.dynamic.Linear(4, n) for n in (3, 5)]
    with intercept(lambda call: seen.append((call.op, call.flops))):
        for layer in layers:
            layer(torch.ones(2, 6, 4))
    assert seen == [("quantized::linear_dynamic", 2 * 12 * 4 * n) for n in (3, 5)]


@given(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=4), st.lists(st.booleans(), max_size=4), st.integers(0, 4))
def test_shapes_are_broadcast_as_torch_does(shape: list[int], ones: list[bool], dims: int) -> None:
    other = [1 if one else size for size, one in zip(shape, [*ones, *[False] * 4], strict=False)][len(shape) - dims :]
    assert broadcast(shape, other) == broadcast(other, shape) == torch.broadcast_shapes(shape, other)
    assert broadcast(torch.Size(shape), ()) == tuple(shape)


def test_shapes_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes must be equal or 1 in each dimension, got \(2, 3\) and \(2,\)"):
        broadcast((2, 3), (2,))
