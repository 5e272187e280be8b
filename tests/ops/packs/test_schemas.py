"""The published schemas of libraries that need a GPU, with stubs for the CPU in place of their kernels."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from compiler import ENGINES

from opintercept import hooks, intercept
from opintercept._ops import packs

pytestmark = pytest.mark.slow

LIBRARIES: dict[str, torch.library.Library] = {}  # they live as long as the process, as a loaded library does


class Expected(NamedTuple):
    """What a call of an operator has: the names of lhs, rhs and bias, `_` for none, and the sizes of what it writes."""

    roles: str
    output: Any
    gemm: tuple[int, int, int, int] | None
    flops: int | None
    scales: int
    opaque: bool


def product(
    roles: str, m: int, n: int, k: int, *, batch: int | None = None, output: Any = None, scales: int = 0
) -> Expected:
    """Expect one product."""
    sizes = (m, n) if batch is None else (batch, m, n)
    gemm = (batch or 1, m, n, k)
    return Expected(roles, output or sizes, gemm, 2 * math.prod(gemm), scales, opaque=False)


def total(roles: str, output: Any, flops: int | None, *, scales: int = 0, opaque: bool = False) -> Expected:
    """Expect a number of FLOPs, None if they are unknown, and no single product."""
    return Expected(roles, output, None, flops, scales, opaque)


class Case(NamedTuple):
    """One call of an operator.

    Attributes:
        schema: As its library defines it.
        args: Its arguments: a tuple of sizes for a tensor, a list of those for a list of tensors, other values as
            they are. A tensor's dtype does not matter here, so they are of float32.
        expected: What the call has.
    """

    schema: str
    args: tuple[Any, ...]
    expected: Expected

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    @property
    def writes(self) -> bool:
        """Whether it returns nothing, but writes to an argument."""
        return self.schema.endswith("-> ()")

    def given(self) -> dict[str, Any]:
        """New arguments by name."""
        parameters = operator(self).default._schema.arguments
        return {parameter.name: tensor(value) for parameter, value in zip(parameters, self.args, strict=False)}


def tensor(value: Any) -> Any:
    """The argument that a case describes."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return [torch.ones(sizes) for sizes in value]
    if isinstance(value, tuple):
        return torch.ones(value)
    return value


def result(sizes: Any) -> Any:
    """What a stub computes: numbers that are nowhere else."""
    if isinstance(sizes, list):
        return [result(each) for each in sizes]
    return torch.arange(math.prod(sizes), dtype=torch.float32).reshape(sizes)


def operator(case: Case) -> Any:
    """The operator of a case, defined with a stub unless it is there."""
    namespace, _, short = case.name.partition("::")
    library = LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    packet = getattr(torch.ops, namespace)
    if not hasattr(packet, short):
        library.define(case.schema.partition("::")[2])
        returns = case.schema.rpartition("->")[2].strip()

        def stub(*args: Any) -> Any:
            output = result(case.expected.output)
            if case.writes:
                written(dict(zip(case.given(), args, strict=False))).copy_(output)
                return None
            if returns.startswith("Tensor"):
                return output
            _, *others = (part for part in returns.strip("()").split(",") if part)
            return (output, *(torch.zeros(1) for _ in others))

        library.impl(short, stub, "CPU")
    return getattr(packet, short)


def written(arguments: dict[str, Any]) -> Any:
    """What an operator writes to, among its arguments."""
    return next(arguments[name] for name in ("out", "output", "out_tensors", "d", "c") if name in arguments)


BF16 = torch.bfloat16

# The ends of several.
SGL_FLASH = (
    "Tensor! q,Tensor k,Tensor v,Tensor? k_new,Tensor? v_new,Tensor? q_v,Tensor!? out,Tensor? cu_seqlens_q,"
    "Tensor? cu_seqlens_k,Tensor? cu_seqlens_k_new,Tensor? seqused_q,Tensor? seqused_k,int? max_seqlen_q,"
    "int? max_seqlen_k,Tensor? page_table,Tensor? kv_batch_idx,Tensor? leftpad_k,Tensor? rotary_cos,Tensor? rotary_sin,"
    "Tensor? seqlens_rotary,Tensor? q_descale,Tensor? k_descale,Tensor? v_descale,float softmax_scale,bool is_causal,"
    "int window_size_left,int window_size_right,float softcap,bool is_rotary_interleaved,Tensor? scheduler_metadata,"
    "int num_splits,bool? pack_gqa,int sm_margin"
)
ROWWISE = "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? bias=None, bool use_fast_accum=True"
GROUPED = "(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor M_sizes) -> Tensor"
FLASH = (
    "Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, "
    "SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax"
)
VARLEN = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False"
)

# What each call has, and its arguments.
SCHEMAS: dict[str, tuple[Expected, tuple[Any, ...]]] = {
    # csrc/libtorch_stable/torch_bindings.cpp at 0135b6c, csrc/torch_bindings.cpp at 00256d5
    "_C::cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()": (
        product("a b bias", 2, 4, 3, scales=2),
        ((2, 4), (2, 3), (3, 4), (2, 1), (1, 4), (4,)),
    ),
    "_C::cutlass_scaled_mm_azp(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor azp_adj, "
    "Tensor? azp, Tensor? bias) -> ()": (
        product("a b _", 2, 4, 3, scales=2),
        ((2, 4), (2, 3), (3, 4), (2, 1), (1, 4), (4,), None, None),
    ),
    "_C::cutlass_scaled_fp4_mm(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, Tensor block_scale_b, "
    "Tensor alpha) -> ()": (product("a b _", 2, 4, 16, scales=3), ((2, 4), (2, 8), (4, 8), (2, 1), (4, 1), (1,))),
    "_C::dsv3_fused_a_gemm(Tensor! output, Tensor mat_a, Tensor mat_b) -> ()": (
        product("mat_a mat_b _", 2, 4, 3),
        ((2, 4), (2, 3), (3, 4)),
    ),
    **{
        f"{name}(Tensor! output, Tensor mat_a, Tensor mat_b) -> ()": (
            product("mat_a mat_b _", 2, 4, 3),
            ((2, 4), (2, 3), (4, 3)),
        )
        for name in ("_C::fp32_router_gemm", "_moe_C::dsv3_router_gemm", "sgl_kernel::dsv3_router_gemm")
    },
    "_C::cutlass_w4a8_mm(Tensor A, Tensor B, Tensor group_scales, int group_size, Tensor channel_scales, "
    "Tensor token_scales, ScalarType? out_type, str? maybe_schedule) -> Tensor": (
        product("A B _", 2, 4, 16, scales=3),
        ((2, 16), (2, 4), (1, 4), 16, (4, 1), (2, 1), None, None),
    ),
    "_C::machete_mm(Tensor A, Tensor B, int b_type, ScalarType? out_type, Tensor? group_scales, "
    "Tensor? group_zeros, int? group_size, Tensor? channel_scales, Tensor? token_scales, str? schedule) -> Tensor": (
        product("A B _", 2, 4, 16, scales=1),
        ((2, 16), (2, 4), 1, None, (1, 4), None, 16, None, None, None),
    ),
    "_C::marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none,Tensor b_scales, "
    "Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, "
    "Tensor? perm_or_none, Tensor workspace, int b_type_id, SymInt size_m, SymInt size_n, SymInt size_k, "
    "bool is_k_full, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor": (
        product("a b_q_weight b_bias_or_none", 2, 64, 64, scales=1),
        ((2, 64), None, (4, 128), (64,), (1, 64), None, None, None, None, None, (8,), 1, 2, 64, 64, *[True] * 4),
    ),
    "_C::gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, Tensor b_g_idx, "
    "bool use_exllama, bool use_v2_format, int bit) -> Tensor": (
        product("a b_q_weight _", 2, 4, 16, scales=1),
        ((2, 16), (2, 4), (1, 1), (1, 4), (16,), True, False, 4),
    ),
    "_C::awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, SymInt split_k_iters) "
    "-> Tensor": (product("_in_feats _kernel _", 2, 24, 16, scales=1), ((2, 16), (16, 3), (1, 24), (1, 3), 8)),
    "_C::allspark_w8a16_gemm(Tensor a, Tensor b_qweight, Tensor b_scales, Tensor? b_qzeros, SymInt n, "
    "SymInt group_size, SymInt sm_count, SymInt sm_version, SymInt CUBLAS_M_THRESHOLD, bool has_zp, "
    "bool n32k16_reorder) -> Tensor": (
        product("a b_qweight _", 2, 4, 16, scales=1),
        ((2, 16), (16, 32), (1, 32), None, 4, -1, 1, 80, 1, False, True),
    ),
    "_C::ggml_mul_mat_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor": (
        product("X W _", 2, 4, 32),
        ((4, 18), (2, 32), 2, 4),
    ),
    "_C::ggml_mul_mat_vec_a8(Tensor W, Tensor X, int type, SymInt row) -> Tensor": (
        product("X W _", 1, 4, 32),
        ((4, 18), (1, 32), 2, 4),
    ),
    "_C::cutlass_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, Tensor b_scales, "
    "Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor c_strides, "
    "bool per_act_token, bool per_out_ch) -> ()": (
        total("a_tensors b_tensors _", (7, 4), 2 * 7 * 4 * 3, scales=2),
        ((7, 4), (7, 3), (5, 4, 3), (7, 1), (5, 4), (5,), (5, 3), (5,), (5,), (5,), True, True),
    ),
    "_C::cutlass_fp4_group_mm(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, "
    "Tensor alphas, Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 16, scales=3),
        ((7, 4), (7, 8), (5, 4, 8), (7, 1), (5, 4), (5,), (5, 3), (5,), (5,)),
    ),
    "_C::cutlass_mxfp4_group_mm(Tensor! out, Tensor a, Tensor b, Tensor a_blockscale, Tensor b_blockscales, "
    "Tensor problem_sizes, Tensor expert_offsets, Tensor sf_offsets) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 16, scales=2),
        ((7, 4), (7, 8), (5, 4, 8), (7, 1), (5, 4), (5, 3), (5,), (5,)),
    ),
    "_C::cutlass_mxfp8_grouped_mm( Tensor a, Tensor b, Tensor sfa, Tensor sfb, Tensor! out, Tensor problem_sizes, "
    "Tensor expert_offsets, Tensor blockscale_offsets) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 3, scales=2),
        ((7, 3), (5, 4, 3), (7, 1), (5, 4), (7, 4), (5, 3), (5,), (5,)),
    ),
    "_C::cutlass_w4a8_moe_mm(Tensor! out_tensors, Tensor a_tensors, Tensor b_tensors, Tensor a_scales, "
    "Tensor b_scales, Tensor b_group_scales, int b_group_size, Tensor expert_offsets, Tensor problem_sizes, "
    "Tensor a_strides, Tensor b_strides, Tensor c_strides, Tensor group_scale_strides, str? maybe_schedule) -> ()": (
        total("a_tensors b_tensors _", (7, 4), 2 * 7 * 4 * 16, scales=3),
        ((7, 4), (7, 16), (5, 4, 2), (7, 1), (5, 4), (5, 4), 16, (5,), (5, 3), (5,), (5,), (5,), (5,), None),
    ),
    "_C::ggml_moe_a8(Tensor X, Tensor W, Tensor sorted_token_ids, Tensor expert_ids, "
    "Tensor num_tokens_post_padded, int type, SymInt row, SymInt top_k, SymInt tokens) -> Tensor": (
        total("X W _", (21, 4), 2 * 7 * 3 * 4 * 32),
        ((7, 32), (5, 4, 18), (64,), (4,), (1,), 2, 4, 3, 7),
    ),
    "_moe_C::moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none,Tensor! b_q_weight, Tensor? b_bias_or_none,"
    "Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none,Tensor? g_idx_or_none, "
    "Tensor? perm_or_none, Tensor! workspace,Tensor sorted_token_ids,Tensor! expert_ids, "
    "Tensor! num_tokens_past_padded,Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, "
    "int b_type_id,int size_m, int size_n, int size_k,bool is_full_k, bool use_atomic_add,bool use_fp32_reduce, "
    "bool is_zp_float,int thread_k, int thread_n, int blocks_per_sm) -> Tensor": (
        total("a b_q_weight _", (21, 64), 2 * 7 * 3 * 64 * 64, scales=1),
        (
            *((7, 64), None, (5, 4, 128), None, (5, 1, 64), None, None, None, None, None, (8,), (64,), (4,), (1,)),
            *((7, 3), 16, 3, False, 1, 7, 64, 64, True, False, True, False, -1, -1, -1),
        ),
    ),
    "_moe_C::moe_wna16_gemm(Tensor input, Tensor! output, Tensor b_qweight, Tensor b_scales, Tensor? b_qzeros, "
    "Tensor? topk_weights, Tensor sorted_token_ids, Tensor expert_ids, Tensor num_tokens_post_pad, int top_k, "
    "int BLOCK_SIZE_M, int BLOCK_SIZE_N, int BLOCK_SIZE_K, int bit) -> Tensor": (
        total("input b_qweight _", (7, 3, 4), 2 * 7 * 3 * 4 * 16, scales=1),
        ((7, 16), (7, 3, 4), (5, 4, 8), (5, 4, 1), None, None, (64,), (4,), (1,), 3, 16, 16, 16, 4),
    ),
    "_C::onednn_mm(Tensor! c, Tensor a, Tensor? bias, int handler) -> ()": (
        product("a _ bias", 2, 4, 3),
        ((2, 4), (2, 3), (4,), 1),
    ),
    "_C::onednn_scaled_mm(Tensor! c, Tensor a, Tensor a_scales, Tensor? azp, Tensor? azp_adj, Tensor? bias, "
    "int handler) -> ()": (product("a _ bias", 2, 4, 3, scales=1), ((2, 4), (2, 3), (1,), None, None, (4,), 1)),
    "vllm::w8a8_block_fp8_matmul_deepgemm(Tensor A, Tensor B, Tensor As, Tensor Bs, SymInt[] block_size, "
    "ScalarType output_dtype) -> Tensor": (
        product("A B _", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (2, 1), (1, 1), [128, 128], BF16),
    ),
    "vllm::w8a8_triton_block_scaled_mm_func(Tensor qx, Tensor weight, Tensor x_scale, Tensor weight_scale, "
    "SymInt[] block_size, ScalarType output_dtype) -> Tensor": (
        product("qx weight _", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (2, 1), (1, 1), [128, 128], BF16),
    ),
    "vllm::flashinfer_mm_fp4(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, Tensor g_scale, "
    "ScalarType dtype, bool use_8x4_sf_layout, str backend) -> Tensor": (
        product("A B _", 2, 4, 16, scales=3),
        ((2, 8), (8, 4), (2, 1), (1, 4), (1,), BF16, False, "cutlass"),
    ),
    "vllm::bmm_fp8(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, ScalarType dtype, str backend) -> Tensor": (
        product("A B _", 2, 4, 3, batch=5, scales=2),
        ((5, 2, 3), (5, 3, 4), (1,), (1,), BF16, "cublas"),
    ),
    "vllm::outplace_fused_experts(Tensor hidden_states, Tensor w1, Tensor w2, Tensor topk_weights, "
    'Tensor topk_ids, str activation="silu", bool apply_router_weight_on_input=False, bool use_fp8_w8a8=False, '
    "bool use_int8_w8a8=False, bool use_int8_w8a16=False, bool use_int4_w4a16=False, str? ocp_mx_scheme=None, "
    "bool per_channel_quant=False, SymInt global_num_experts=-1, Tensor? expert_map=None, Tensor? w1_scale=None, "
    "Tensor? w2_scale=None, Tensor? w1_zp=None, Tensor? w2_zp=None, Tensor? a1_scale=None, Tensor? a2_scale=None, "
    "SymInt[]? block_shape=None, Tensor? w1_bias=None, Tensor? w2_bias=None) -> Tensor": (
        total("hidden_states w1 _", (7, 3), 2 * 7 * 2 * (8 * 3 + 3 * 4), opaque=True),
        ((7, 3), (5, 8, 3), (5, 3, 4), (7, 2), (7, 2)),
    ),
    "_C::paged_attention_v1(    Tensor! out, Tensor query, Tensor key_cache,    Tensor value_cache, "
    "int num_kv_heads, float scale,    Tensor block_tables, Tensor seq_lens, int block_size,    int max_seq_len, "
    "Tensor? alibi_slopes,    str kv_cache_dtype, Tensor k_scale, Tensor v_scale,    int tp_rank, "
    "int blocksparse_local_blocks,    int blocksparse_vert_stride, int blocksparse_block_size,    "
    "int blocksparse_head_sliding_step) -> ()": (
        total("query key_cache _", (2, 4, 8), None, opaque=True),
        (
            *((2, 4, 8), (2, 4, 8), (9, 4, 2, 16, 4), (9, 4, 8, 16), 4, 1.0, (2, 3), (2,), 16, 40, None, "auto"),
            *((1,), (1,), 0, 0, 0, 0, 0),
        ),
    ),
    "_vllm_fa2_C::varlen_fwd(Tensor! q, Tensor k, Tensor v, Tensor!? out, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, "
    "int max_seqlen_q, int max_seqlen_k, float p_dropout, float softmax_scale, bool zero_tensors, bool is_causal, "
    "int window_size_left, int window_size_right, float softcap, bool return_softmax, int num_splits) -> Tensor[]": (
        total("q k _", [(6, 4, 8), (4, 6)], 2 * 4 * 6 * 7 * (8 + 8), opaque=True),
        (
            *((6, 4, 8), (7, 2, 8), (7, 2, 8), (6, 4, 8), (2,), (2,), None, None, None, None, 6, 7, 0.0, 1.0),
            *(False, True, -1, -1, 0.0, False, 0),
        ),
    ),
    # sgl-kernel/csrc/common_extension.cc at 0063ef1, and csrc/cpu/torch_extension_cpu.cpp
    **{
        f"sgl_kernel::{kind}_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
        "ScalarType out_dtype, Tensor? bias) -> Tensor": (
            product("mat_a mat_b bias", 2, 4, 3, scales=2),
            ((2, 3), (3, 4), (2, 1), (1, 4), BF16, (4,)),
        )
        for kind in ("int8", "fp8")
    },
    "sgl_kernel::fp8_blockwise_scaled_mm(Tensor mat_a, Tensor mat_b, Tensor scales_a, Tensor scales_b, "
    "ScalarType out_dtype) -> Tensor": (
        product("mat_a mat_b _", 2, 4, 3, scales=2),
        ((2, 3), (3, 4), (2, 1), (1, 4), BF16),
    ),
    "sgl_kernel::cutlass_scaled_fp4_mm(Tensor! out, Tensor a, Tensor b, Tensor block_scale_a, "
    "Tensor block_scale_b, Tensor alpha) -> ()": (
        product("a b _", 2, 4, 16, scales=3),
        ((2, 4), (2, 8), (4, 8), (2, 1), (4, 1), (1,)),
    ),
    "sgl_kernel::gptq_marlin_gemm(Tensor! a, Tensor? c_or_none,Tensor! b_q_weight, Tensor! b_scales, "
    "Tensor? global_scale_or_none,Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none,"
    "Tensor! workspace, int b_q_type_id, int size_m, int size_n, int size_k,bool is_k_full, bool use_atomic_add, "
    "bool use_fp32_reduce, bool is_zp_float) -> Tensor": (
        product("a b_q_weight _", 2, 64, 64, scales=1),
        ((2, 64), None, (4, 128), (1, 64), None, None, None, None, (8,), 1, 2, 64, 64, True, False, True, False),
    ),
    "sgl_kernel::gptq_gemm(Tensor a, Tensor b_q_weight, Tensor b_gptq_qzeros, Tensor b_gptq_scales, "
    "Tensor b_g_idx, bool use_shuffle, int bit) -> Tensor": (
        product("a b_q_weight _", 2, 4, 16, scales=1),
        ((2, 16), (2, 4), (1, 1), (1, 4), (16,), True, 4),
    ),
    "sgl_kernel::fp8_blockwise_scaled_grouped_mm(Tensor output, Tensor a_ptrs, Tensor b_ptrs, Tensor out_ptrs, "
    "Tensor a_scales_ptrs, Tensor b_scales_ptrs, Tensor a, Tensor b, Tensor scales_a, Tensor scales_b, "
    "Tensor stride_a, Tensor stride_b, Tensor stride_c, Tensor layout_sfa, Tensor layout_sfb, "
    "Tensor problem_sizes, Tensor expert_offsets, Tensor workspace) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 3, scales=2),
        (
            *((7, 4), (5,), (5,), (5,), (5,), (5,), (7, 3), (5, 3, 4), (7, 1), (5, 1, 1), (5,), (5,), (5,), (5, 5)),
            *((5, 5), (5, 3), (5,), (8,)),
        ),
    ),
    "sgl_kernel::cutlass_fp4_group_mm(Tensor! output, Tensor a, Tensor b,Tensor a_blockscale, "
    "Tensor b_blockscale, Tensor alphas,Tensor ab_strides, Tensor c_strides, Tensor problem_sizes, "
    "Tensor expert_offsets, Tensor sf_offsets) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 16, scales=3),
        ((7, 4), (7, 8), (5, 4, 8), (7, 1), (5, 4), (5,), (5,), (5,), (5, 3), (5,), (5,)),
    ),
    "sgl_kernel::cutlass_w4a8_moe_mm(Tensor! d, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
    "Tensor expert_offsets, Tensor problem_sizes, Tensor a_strides, Tensor b_strides, Tensor d_strides, "
    "Tensor s_strides, int chunk_size, int topk) -> ()": (
        total("a b _", (7, 4), 2 * 7 * 4 * 16, scales=2),
        ((7, 4), (7, 16), (5, 4, 8), (1,), (5, 1), (5,), (5, 3), (5,), (5,), (5,), (5,), 128, 2),
    ),
    "sgl_kernel::moe_wna16_marlin_gemm(Tensor! a, Tensor? c_or_none,Tensor! b_q_weight, Tensor! b_scales, "
    "Tensor? b_zeros_or_none,Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor! workspace,"
    "Tensor sorted_token_ids,Tensor! expert_ids, Tensor! num_tokens_past_padded,Tensor! topk_weights, "
    "int moe_block_size, int top_k, bool mul_topk_weights, bool is_ep, int b_q_type_id,int size_m, int size_n, "
    "int size_k,bool is_k_full, bool use_atomic_add,bool use_fp32_reduce, bool is_zp_float) -> Tensor": (
        total("a b_q_weight _", (21, 64), 2 * 7 * 3 * 64 * 64, scales=1),
        (
            *((7, 64), None, (5, 4, 128), (5, 1, 64), None, None, None, (8,), (64,), (4,), (1,), (7, 3), 16, 3),
            *(False, False, 1, 7, 64, 64, True, False, True, False),
        ),
    ),
    "sgl_kernel::weight_packed_linear(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni) -> Tensor": (
        product("mat1 mat2 bias", 2, 4, 3),
        ((2, 3), (4, 3), (4,), True),
    ),
    "sgl_kernel::int8_scaled_mm_cpu(Tensor mat1, Tensor mat2, Tensor scales1, Tensor scales2, Tensor? bias, "
    "ScalarType out_dtype, bool is_vnni) -> Tensor": (
        product("mat1 mat2 _", 2, 4, 3, scales=2),
        ((2, 3), (4, 7), (2,), (4,), None, BF16, True),
    ),
    "sgl_kernel::bmm_cpu(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()": (
        product("mat1 mat2 _", 2, 4, 3, batch=5),
        ((5, 2, 4), (5, 2, 3), (5, 4, 3), True, None),
    ),
    "sgl_kernel::cutlass_mla_decode(Tensor! out, Tensor q_nope, Tensor q_pe, Tensor kv_c_and_k_pe_cache, "
    "Tensor seq_lens, Tensor page_table, Tensor! workspace, float sm_scale, int num_kv_splits) -> ()": (
        total("q_nope kv_c_and_k_pe_cache _", (2, 4, 8), None, opaque=True),
        ((2, 4, 8), (2, 4, 8), (2, 4, 2), (9, 16, 10), (2,), (2, 3), (8,), 1.0, 1),
    ),
    # sgl-kernel/csrc/flash_extension.cc at 150ab2c
    f"sgl_kernel::fwd({SGL_FLASH}) -> Tensor[]": (
        total("q k _", [(2, 6, 4, 8), (2, 4, 6)], 2 * 2 * 4 * 6 * 7 * (8 + 8), opaque=True),
        ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), *[None] * 20, 1.0, False, -1, -1, 0.0, False, None, 0, None, 0),
    ),
    # fbgemm_gpu/experimental/gen_ai/src/quantize, and csrc/gemm/gemm_ops.cpp of MSLK
    f"fbgemm::f8f8bf16_rowwise{ROWWISE}) -> Tensor": (
        product("XQ WQ bias", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (2,), (4,), (4,)),
    ),
    f"mslk::f8f8bf16_rowwise{ROWWISE}) -> Tensor": (
        product("XQ WQ _", 10, 4, 3, output=(5, 2, 4), scales=2),
        ((5, 2, 3), (4, 3), (10,), (4,)),
    ),
    "fbgemm::f8f8bf16_rowwise_out(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor(a!) output, "
    "Tensor? bias=None, bool use_fast_accum=True) -> ()": (
        product("XQ WQ _", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (2,), (4,), (2, 4)),
    ),
    f"fbgemm::f8f8bf16_rowwise_batched{ROWWISE}, Tensor(a!)? output=None) -> Tensor": (
        product("XQ WQ _", 2, 4, 3, batch=5, scales=2),
        ((5, 2, 3), (5, 4, 3), (5, 2), (5, 4)),
    ),
    "fbgemm::f8f8bf16_blockwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, int block_m=128, "
    "int block_n=128, int block_k=128) -> Tensor": (
        product("XQ WQ _", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (1, 1), (1, 1)),
    ),
    "fbgemm::f8f8bf16_tensorwise(Tensor XQ, Tensor WQ, float scale, bool use_fast_accum=True) -> Tensor": (
        product("XQ WQ _", 2, 4, 3),
        ((2, 3), (4, 3), 1.0),
    ),
    "fbgemm::f8f8bf16_cublas(Tensor A, Tensor B, Tensor? Ainvs=None, Tensor? Binvs=None, "
    "bool use_fast_accum=True, Tensor(a!)? output=None) -> Tensor": (
        product("A B _", 2, 4, 3, scales=2),
        ((2, 3), (4, 3), (1,), (1,)),
    ),
    "fbgemm::i8i8bf16(Tensor XQ, Tensor WQ, float scale, int split_k=1) -> Tensor": (
        product("XQ WQ _", 2, 4, 3),
        ((2, 3), (4, 3), 1.0),
    ),
    "fbgemm::f4f4bf16(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? global_scale=None, "
    "bool use_mx=True) -> Tensor": (product("XQ WQ _", 2, 4, 16, scales=2), ((2, 8), (4, 8), (2,), (4,))),
    "fbgemm::f8i4bf16_rowwise(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor w_zp) -> Tensor": (
        product("XQ WQ _", 2, 4, 16, scales=2),
        ((2, 16), (4, 8), (2,), (1, 4), (1, 4)),
    ),
    "fbgemm::bf16i4bf16_shuffled_batched(Tensor X, Tensor WQ, Tensor w_scale, Tensor w_zp) -> Tensor": (
        product("X WQ _", 2, 4, 16, batch=5, scales=1),
        ((5, 2, 16), (5, 4, 8), (5, 1, 4), (5, 1, 4)),
    ),
    "fbgemm::bf16_fast_gemv(Tensor X, Tensor W) -> Tensor": (product("X W _", 1, 4, 3), ((1, 3), (4, 3))),
    "fbgemm::f8f8bf16_rowwise_grouped(Tensor[] XQ, Tensor[] WQ, Tensor[] x_scale, Tensor[] w_scale) -> Tensor[]": (
        total("XQ WQ _", [(2, 4), (5, 4)], 2 * 7 * 4 * 3, scales=4),
        ([(2, 3), (5, 3)], [(4, 3), (4, 3)], [(2,), (5,)], [(4,), (4,)]),
    ),
    "fbgemm::bf16bf16bf16_grouped_cat(Tensor[] X, Tensor[] W) -> Tensor": (
        total("X W _", (7, 4), 2 * 7 * 4 * 3),
        ([(2, 3), (5, 3)], [(4, 3), (4, 3)]),
    ),
    f"fbgemm::f8f8bf16_rowwise_grouped_stacked{GROUPED}": (
        total("XQ WQ _", (7, 4), 2 * 7 * 4 * 3, scales=2),
        ((7, 3), (5, 4, 3), (7,), (5, 4), (5,)),
    ),
    "mslk::bf16bf16bf16_grouped_wgrad(Tensor X, Tensor W, Tensor M_sizes, Tensor(a!)? output=None, "
    "bool output_accum=False, int? num_sms=None) -> Tensor": (
        total("X W _", (5, 4, 3), 2 * 7 * 4 * 3),
        ((7, 4), (7, 3), (5,)),
    ),
    "fbgemm::f4f4bf16_grouped_stacked(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor M_sizes, "
    "Tensor? global_scale=None, Tensor? starting_row_after_padding=None, bool use_mx=True) -> Tensor": (
        total("XQ WQ _", (7, 4), 2 * 7 * 4 * 16, scales=2),
        ((7, 8), (5, 4, 8), (7,), (5, 4), (5,)),
    ),
    "mslk::mx8mx8bf16_grouped_mm(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor offsets, "
    "Tensor(a!)? output=None, int? actual_num_tokens=None) -> Tensor": (
        total("XQ WQ _", (7, 4), 2 * 7 * 4 * 3, scales=2),
        ((7, 3), (5, 3, 4), (7,), (5, 4), (5,)),
    ),
    "fbgemm::bf16i4bf16_shuffled_grouped(Tensor X, Tensor WQ, Tensor w_scale_group, Tensor w_zero_group, "
    "Tensor M_sizes) -> Tensor": (
        total("X WQ _", (7, 4), 2 * 7 * 4 * 16, scales=1),
        ((7, 16), (5, 4, 8), (5, 1, 4), (5, 1, 4), (5,)),
    ),
    # flash_attn and xformers
    f"flash_attn::_flash_attn_forward({FLASH}) -> (Tensor, Tensor, Tensor, Tensor)": (
        total("q k _", (2, 6, 4, 8), 2 * 2 * 4 * 6 * 7 * (8 + 8), opaque=True),
        ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), 0.0, 1.0, False, -1, -1, 0.0, None, False),
    ),
    f"flash_attn::_flash_attn_varlen_forward({VARLEN}) -> (Tensor, Tensor, Tensor, Tensor)": (
        total("q k _", (12, 4, 8), None, opaque=True),
        ((12, 4, 8), (14, 2, 8), (14, 2, 8), (3,), (3,), 6, 7, 0.0, 1.0, False),
    ),
    "flash_attn::_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv, float dropout_p, float softmax_scale, bool causal, "
    "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, "
    "Tensor? rng_state=None) -> Tensor": (
        total("q k _", (2, 4, 128), 2 * 2 * 4 * 6 * 7 * (3 * 8 + 2 * 8), opaque=True),
        (
            *((2, 6, 4, 8), (2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (2, 6, 4, 8), (2, 4, 6)),
            *((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), 0.0, 1.0, False, -1, -1, 0.0, None, False),
        ),
    ),
    "flash_attn_3::fwd(Tensor q,Tensor k,Tensor v,Tensor(k_new!)? k_new = None,Tensor(v_new!)? v_new = None,"
    "Tensor? q_v = None,Tensor(out!)? out = None,Tensor? cu_seqlens_q = None,Tensor? cu_seqlens_k = None,"
    "Tensor? cu_seqlens_k_new = None,Tensor? seqused_q = None,Tensor? seqused_k = None,int? max_seqlen_q = None,"
    "int? max_seqlen_k = None,Tensor? page_table = None,Tensor? kv_batch_idx = None,Tensor? leftpad_k = None,"
    "Tensor? rotary_cos = None,Tensor? rotary_sin = None,Tensor? seqlens_rotary = None,Tensor? q_descale = None,"
    "Tensor? k_descale = None,Tensor? v_descale = None,float? softmax_scale = None,bool is_causal = False,"
    "int window_size_left = -1,int window_size_right = -1,int attention_chunk = 0,float softcap = 0.0,"
    "bool is_rotary_interleaved = False,Tensor? scheduler_metadata = None,int num_splits = 0,"
    "bool? pack_gqa = None,int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)": (
        total("q k _", (2, 6, 4, 16), 2 * 2 * 4 * 6 * 7 * (8 + 16), opaque=True),
        ((2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 16)),
    ),
    "xformers_flash::flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, int max_seqlen_q, int max_seqlen_k, float p, float softmax_scale, "
    "bool is_causal, int window_left, int window_right, bool return_softmax, Tensor? block_tables) "
    "-> (Tensor, Tensor, Tensor)": (
        total("query key _", (2, 6, 4, 8), 2 * 2 * 4 * 6 * 7 * (8 + 8), opaque=True),
        ((2, 6, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8), None, None, None, 6, 7, 0.0, 1.0, False, -1, -1, False, None),
    ),
    "xformers::_sparse24_gemm(Tensor a, Tensor b, Tensor meta_reordered) -> Tensor": (
        product("a b _", 2, 4, 16),
        ((2, 8), (16, 4), (2, 1)),
    ),
}
CASES = [Case(schema, args, expected) for schema, (expected, args) in SCHEMAS.items()]


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    for case in CASES:
        operator(case)
    packs.load({case.name.partition("::")[0] for case in CASES})


engines = pytest.mark.parametrize("engine", ENGINES)


def cases(chosen: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


@engines
@cases(CASES)
def test_a_call_has_roles_shape_flops_and_output(case: Case, engine: Any) -> None:
    given = case.given()
    seen: list[Any] = []

    def look(call: Any) -> None:
        seen.append((call.op, call.lhs, call.rhs, call.bias, call.gemm, call.flops, call.scales, call.opaque))
        seen.append(call.output)

    with intercept([look, recorder := hooks.Recorder()], engine=engine):
        returned = operator(case)(*given.values())
    op, *operands, gemm, flops, scales, opaque = seen[0]
    assert op == case.name
    assert len(recorder.records) == 1
    for role, operand in zip(case.expected.roles.split(), operands, strict=True):
        expected = given.get(role)
        expected = expected[0] if isinstance(expected, list) else expected
        assert operand is expected or (expected is not None and torch.equal(operand, expected)), role
    assert (gemm and gemm[:4]) == case.expected.gemm
    assert flops == case.expected.flops
    assert len(scales) == case.expected.scales
    assert opaque is case.expected.opaque
    output = seen[1][0] if isinstance(seen[1], tuple) else seen[1]
    expected = result(case.expected.output)
    assert all(map(torch.equal, output, expected)) if isinstance(expected, list) else torch.equal(output, expected)
    assert recorder.records[0].output is not None
    assert (returned is None) is case.writes


@engines
@cases([case for case in CASES if case.writes])
def test_a_hook_can_change_what_an_operator_writes(case: Case, engine: Any) -> None:
    given = case.given()
    output = written(given)
    others = [value for value in given.values() if isinstance(value, torch.Tensor) and value is not output]

    class Negate:
        def post(self, call: Any) -> Any:
            return -call.output

    with intercept(Negate(), engine=engine):
        assert operator(case)(*given.values()) is None
    assert torch.equal(output, -result(case.expected.output))
    assert all(torch.equal(value, torch.ones_like(value)) for value in others)


class Double:
    """Replaces the left operand, and keeps what each call writes."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def pre(self, call: Any) -> Any:
        self.written.append(call.written)
        return call.replace(lhs=call.operand("lhs") * 2)


@cases([case for case in CASES if not case.writes and not isinstance(case.args[0], list)])
def test_a_hook_that_replaces_an_operand_changes_no_tensor_of_the_program(case: Case) -> None:
    args = case.given().values()
    with intercept(Double()):
        operator(case)(*args)
    for value, given in zip(args, case.args, strict=True):
        assert not isinstance(value, torch.Tensor) or torch.equal(value, torch.ones(given))


def test_an_output_that_the_program_leaves_out_is_not_written() -> None:
    q, k, v = torch.ones(2, 6, 4, 8), torch.ones(2, 7, 2, 8), torch.ones(2, 7, 2, 16)
    with intercept(double := Double()):
        output, *_ = torch.ops.flash_attn_3.fwd(q, k, v, is_causal=True)
    assert double.written == [[]]
    assert torch.equal(output, result((2, 6, 4, 16)))
