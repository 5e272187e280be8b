"""The packs of libraries without operators, on functions with their published signatures in place of their kernels."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from opintercept import hooks, intercept
from opintercept._ops import packs

FLOAT32 = torch.float32


def tensor(sizes: Any) -> Any:
    """Tensors for sizes; other values as they are. A list of sizes stands for a list or a pair of tensors."""
    if isinstance(sizes, list):
        return [tensor(each) for each in sizes]
    return torch.ones(sizes) if isinstance(sizes, tuple) else sizes


def pair(values: tuple[int, ...], scales: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(values), torch.ones(scales)


# Each with the signature of its library's function, by the place of the function.
SIGNATURES = {
    "transformer_engine.pytorch.cpp_extensions.gemm:general_gemm": (
        "A, B, workspace, out_dtype=None, quantization_params=None, gelu=False, gelu_in=None, accumulate=False,"
        " layout='TN', out=None, bias=None, use_split_accumulator=False, grad=False, ub=None, ub_type=None,"
        " extra_output=None, bulk_overlap=False"
    ),
    "transformer_engine.pytorch.cpp_extensions.gemm:general_grouped_gemm": (
        "A, B, out, out_dtype, workspaces, layout='TN', m_splits=None, gelu=False, grad=False, accumulate=False,"
        " bias=None, use_bias=False, use_split_accumulator=False, D_dtype=None, single_output=False"
    ),
    **{
        f"deep_gemm:{kind}_gemm_{letters}": "a, b, d, c=None, recipe=None, compiled_dims='nk'"
        for kind in ("fp8", "bf16", "fp8_fp4")
        for letters in ("nt", "nn", "tn", "tt")
    },
    "deep_gemm:gemm_fp8_fp8_bf16_nt": "lhs, rhs, out",
    "deep_gemm:m_grouped_fp8_gemm_nt_contiguous": "a, b, d, m_indices, recipe=None, compiled_dims='nk'",
    "deep_gemm:m_grouped_fp8_gemm_nt_masked": "a, b, d, masked_m, expected_m, recipe=None, compiled_dims='nk'",
    "deep_gemm:k_grouped_bf16_gemm_tn_contiguous": "a, b, d, ks, ks_tensor, c=None, compiled_dims='mn'",
    "flashinfer.gemm:mm_bf16": "a, b, bias=None, pdl=False, out=None, out_dtype=None, backend='cudnn'",
    "flashinfer.gemm:bmm_fp8": "A, B, A_scale, B_scale, dtype, out=None, backend='cublas'",
    "flashinfer.gemm:mm_fp8": "a, b, alpha=None, out_dtype=None, out=None, backend='trtllm_low_latency'",
    "flashinfer.gemm:mm_fp4": (
        "a, b, a_descale, b_descale, alpha=None, out_dtype=None, out=None, block_size=16, use_8x4_sf_layout=False,"
        " backend='auto', use_nvfp4=True, enable_pdl=True"
    ),
    "flashinfer.gemm:gemm_fp8_nt_groupwise": (
        "a, b, a_scale, b_scale, scale_major_mode=None, mma_sm=1, scale_granularity_mnk=(1, 128, 128), out=None,"
        " out_dtype=None, backend='cutlass'"
    ),
    "flashinfer.gemm:group_gemm_nvfp4_nt_groupwise": (
        "a, b, a_scale, b_scale, m_indptr, alpha=None, tile_m=128, tile_n=128, tile_k=128, swap_ab=True, out=None,"
        " out_dtype=None"
    ),
    "flashinfer.gemm:SegmentGEMMWrapper.run": (
        "self, x, weights, batch_size, weight_column_major, out=None, seg_lens=None, seg_indptr=None,"
        " weight_indices=None"
    ),
    "flashinfer.grouped_mm:grouped_mm_bf16": (
        "a, b, m_indptr, out=None, out_dtype=None, *, backend='cudnn', tactic=-1"
    ),
    "flashinfer.prefill:single_prefill_with_kv_cache": (
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None,"
        " causal=False, kv_layout='NHD', pos_encoding_mode='NONE', return_lse=False"
    ),
    "flashinfer.decode:single_decode_with_kv_cache": "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE'",
    "flashinfer.decode:BatchDecodeWithPagedKVCacheWrapper.run": (
        "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,"
        " return_lse=False, enable_pdl=None, window_left=None"
    ),
    "flashinfer.fused_moe:cutlass_fused_moe": (
        "input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,"
        " quant_scales, fc1_expert_biases=None, fc2_expert_biases=None"
    ),
    "nvmath.linalg.advanced:matmul": "a, b, /, c=None, *, alpha=None, beta=None, epilog=None, stream=None",
    "nvmath.linalg.advanced:Matmul.execute": "self, *, algorithm=None, release_workspace=False, stream=None",
}
RESULT = torch.zeros(1)


def module(name: str) -> types.ModuleType:
    """A module of that name in sys.modules, with those above it."""
    for end in [place for place, letter in enumerate(name) if letter == "."] + [len(name)]:
        sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
    return sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
    """The modules of the libraries, with a function for each signature."""
    before = sys.modules.copy()
    for place, signature in SIGNATURES.items():
        name, _, path = place.partition(":")
        *classes, function = path.split(".")
        owner: Any = module(name)
        for each in classes:
            if not hasattr(owner, each):
                setattr(owner, each, type(each, (), {}))
            owner = getattr(owner, each)
        made: dict[str, Any] = {"RESULT": RESULT}
        exec(f"def {function}({signature}): return RESULT", made)
        setattr(owner, function, made[function])
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def call(place: str, *args: Any, **kwargs: Any) -> Any:
    """What a hook records of one call of a function."""
    name, _, path = place.partition(":")
    owner: Any = sys.modules[name]
    *classes, function = path.split(".")
    for each in classes:
        owner = getattr(owner, each)()
    recorder, tensors = hooks.Recorder(), []
    with intercept([recorder, lambda call: tensors.append((call.scales, call.bias, call.output))]):
        getattr(owner, function)(*args, **kwargs)
    (record,) = recorder.records
    assert record.op == place
    return record, *tensors[0]


def gemm(record: Any) -> Any:
    return None if record.gemm is None else tuple(record.gemm[:4])


TE = "transformer_engine.pytorch.cpp_extensions.gemm"


@pytest.mark.parametrize(
    ("layout", "weight", "x", "expected"),
    [
        ("TN", (4, 3), (2, 5, 3), (1, 10, 4, 3)),  # forward: y = x @ weight.T
        ("NN", (4, 3), (2, 5, 4), (1, 10, 3, 4)),  # the gradient of x: grad @ weight
        ("NT", (2, 5, 3), (2, 5, 4), (1, 4, 3, 10)),  # the gradient of the weight: grad.T @ x
    ],
)
def test_transformer_engine_has_the_shape_of_each_layout(layout: str, weight: Any, x: Any, expected: Any) -> None:
    record, _, bias, _ = call(f"{TE}:general_gemm", tensor(weight), tensor(x), None, layout=layout, bias=torch.ones(4))
    assert gemm(record) == expected
    assert (record.lhs.shape, record.rhs.shape, record.opaque) == (x, weight, False)
    assert bias.shape == (4,)


def test_transformer_engine_adds_up_groups() -> None:
    weights, inputs = [(4, 3), (4, 3)], [(2, 3), (5, 3)]
    record, *_ = call(f"{TE}:general_grouped_gemm", tensor(weights), tensor(inputs), [], None, [])
    assert (gemm(record), record.flops) == (None, 2 * (2 + 5) * 4 * 3)


@pytest.mark.parametrize(
    ("letters", "a", "b"),
    [("nt", (2, 3), (4, 3)), ("nn", (2, 3), (3, 4)), ("tn", (3, 2), (3, 4)), ("tt", (3, 2), (4, 3))],
)
def test_deep_gemm_has_operands_scales_and_output(letters: str, a: Any, b: Any) -> None:
    d = torch.zeros(2, 4)
    record, scales, _, _ = call(f"deep_gemm:fp8_gemm_{letters}", pair(a, (2, 1)), pair(b, (1, 1)), d)
    assert (gemm(record), record.lhs.shape, record.rhs.shape) == ((1, 2, 4, 3), a, b)
    assert [scale.shape for scale in scales] == [(2, 1), (1, 1)]
    record, scales, _, _ = call(f"deep_gemm:bf16_gemm_{letters}", tensor(a), tensor(b), d)
    assert (gemm(record), scales) == ((1, 2, 4, 3), ())


def test_deep_gemm_does_not_guess_how_float4_is_packed() -> None:
    d = torch.zeros(2, 4)
    record, *_ = call("deep_gemm:fp8_fp4_gemm_nt", pair((2, 8), (2, 1)), pair((4, 4), (4, 1)), d)
    assert gemm(record) == (1, 2, 4, 8)
    record, *_ = call("deep_gemm:fp8_fp4_gemm_nt", pair((2, 8), (2, 1)), pair((4, 8), (4, 1)), d)
    assert (gemm(record), record.flops) == (None, None)


def test_deep_gemm_in_groups() -> None:
    a, b = pair((6, 8), (6, 1)), pair((3, 4, 8), (3, 1, 1))
    record, *_ = call("deep_gemm:m_grouped_fp8_gemm_nt_contiguous", a, b, torch.zeros(6, 4), torch.zeros(6))
    assert (gemm(record), record.flops) == (None, 2 * 6 * 8 * 4)
    a = pair((3, 6, 8), (3, 6, 1))
    record, *_ = call("deep_gemm:m_grouped_fp8_gemm_nt_masked", a, b, torch.zeros(3, 6, 4), torch.zeros(3), 2)
    assert record.flops is None  # the device knows how many rows count
    ks, d = [5, 7], torch.zeros(2, 3, 4)
    record, *_ = call(
        "deep_gemm:k_grouped_bf16_gemm_tn_contiguous", tensor((36,)), tensor((48,)), d, ks, torch.tensor(ks)
    )
    assert record.flops == 2 * 12 * 3 * 4


def test_deep_gemm_of_version_1() -> None:
    record, scales, *_ = call(
        "deep_gemm:gemm_fp8_fp8_bf16_nt", pair((2, 3), (2, 1)), pair((4, 3), (1, 1)), tensor((2, 4))
    )
    assert (gemm(record), len(scales)) == ((1, 2, 4, 3), 2)


@pytest.mark.parametrize(
    ("place", "args", "expected", "scales"),
    [
        ("gemm:mm_bf16", [(2, 3), (3, 4)], (1, 2, 4, 3), 0),
        ("gemm:bmm_fp8", [(5, 2, 3), (5, 3, 4), (1,), (1,), FLOAT32], (5, 2, 4, 3), 2),
        ("gemm:mm_fp8", [(2, 256), (2, 4, 128)], (1, 2, 4, 256), 0),
        ("gemm:mm_fp8", [(2, 256), (256, 4), (1,)], (1, 2, 4, 256), 1),
        ("gemm:mm_fp4", [(2, 8), (8, 4), (2, 1), (1, 4)], (1, 2, 4, 16), 2),
        ("gemm:gemm_fp8_nt_groupwise", [(2, 3), (4, 3), (2, 1), (1, 1)], (1, 2, 4, 3), 2),
    ],
)
def test_flashinfer_has_operands_and_scales(place: str, args: list[Any], expected: Any, scales: int) -> None:
    record, found, *_ = call(f"flashinfer.{place}", *map(tensor, args))
    assert (gemm(record), len(found)) == (expected, scales)
    assert (record.lhs.shape, record.rhs.shape) == tuple(args[:2])


@pytest.mark.parametrize(
    ("place", "args", "kwargs", "flops", "opaque"),
    [
        ("gemm:group_gemm_nvfp4_nt_groupwise", [(6, 4), (3, 5, 4), (6, 1), (3, 5, 1), (4,)], {}, 2 * 6 * 8 * 5, False),
        ("gemm:SegmentGEMMWrapper.run", [(6, 4), (3, 5, 4), 3, True], {}, 2 * 6 * 4 * 5, False),
        ("gemm:SegmentGEMMWrapper.run", [(6, 4), (3, 4, 5), 3, False], {}, 2 * 6 * 4 * 5, False),
        ("grouped_mm:grouped_mm_bf16", [(6, 4), (3, 5, 4), (4,)], {}, 2 * 6 * 4 * 5, False),
        ("prefill:single_prefill_with_kv_cache", [(5, 2, 8), (7, 1, 8), (7, 1, 8)], {}, 4 * 5 * 7 * 2 * 8, True),
        (
            "prefill:single_prefill_with_kv_cache",
            [(5, 2, 8), (1, 7, 8), (1, 7, 8)],
            {"kv_layout": "HND"},
            4 * 5 * 7 * 2 * 8,
            True,
        ),
        ("decode:single_decode_with_kv_cache", [(2, 8), (7, 1, 8), (7, 1, 8)], {}, 4 * 7 * 2 * 8, True),
        ("decode:BatchDecodeWithPagedKVCacheWrapper.run", [(3, 2, 8), (9, 2, 16, 1, 8)], {}, None, True),
        (
            "fused_moe:cutlass_fused_moe",
            [(6, 8), (6, 2), (6, 2), (4, 10, 8), (4, 8, 5), FLOAT32, []],
            {},
            2 * 6 * 2 * (10 * 8 + 8 * 5),
            True,
        ),
        ("fused_moe:cutlass_fused_moe", [(6, 8), (6, 2), (6, 2), (4, 10, 4), (4, 8, 2), FLOAT32, []], {}, None, True),
    ],
)
def test_flashinfer_has_flops(place: str, args: list[Any], kwargs: Any, flops: int | None, opaque: bool) -> None:
    record, *_ = call(f"flashinfer.{place}", *[tensor(arg) if arg else arg for arg in args], **kwargs)
    assert (gemm(record), record.flops, record.opaque) == (None, flops, opaque)
    assert record.lhs.shape == args[0]


def test_nvmath_has_operands() -> None:
    record, _, bias, _ = call("nvmath.linalg.advanced:matmul", tensor((2, 3)), tensor((3, 4)), tensor((2, 4)), beta=1.0)
    assert (gemm(record), bias.shape) == ((1, 2, 4, 3), (2, 4))


def test_nvmath_keeps_the_operands_of_an_object_to_itself() -> None:
    record, *_ = call("nvmath.linalg.advanced:Matmul.execute")
    assert (record.opaque, record.lhs, record.flops) == (True, None, None)


def test_every_function_of_a_pack_is_known_by_its_top_level_module() -> None:
    assert {place.partition(":")[0].partition(".")[0] for place in SIGNATURES} == set(packs.MODULES)
