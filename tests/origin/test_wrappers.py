"""What the source of a generated wrapper says: launches, roles of arguments, operators. No compiler runs."""

from __future__ import annotations

from textwrap import dedent

import pytest

from opintercept._origin.wrappers import WrapperSource, multiplies, ops_in

CPP = """
cpp_fused_add_log_0 = async_compile.cpp_pybinding(['float*', 'const float*', 'float*', 'const int64_t'], r'''
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{
}
''')
"""
TRITON = """
triton_red_fused_sum_1 = async_compile.triton('triton_red_fused_sum_1', '''
import triton
import triton.language as tl

@triton_heuristics.reduction(
    size_hints={'x': 64, 'r0_': 16},
    filename=__file__,
    triton_meta={'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}},
    inductor_meta={'kernel_name': 'triton_red_fused_sum_1', 'mutated_arg_names': []}
)
@triton.jit
def triton_red_fused_sum_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

shift_0 = async_compile.triton('shift', '''
import triton
import triton.language as tl

@triton_heuristics.user_autotune(
    triton_meta={'signature': {'out': '*fp32', 'source': '*fp32', 'n': 'i32'}},
    inductor_meta={'kernel_name': 'shift_0', 'mutated_arg_names': ['out']},
    custom_kernel=True,
)
@triton.jit
def shift(out, source, n, BLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""


def parts(source: str, body: str) -> list[tuple[str, list[tuple[str, str]]]]:
    indented = "".join(f"        {line}\n" for line in dedent(body).strip().splitlines())
    text = f"{source}\nclass Runner:\n    def call(self, args):\n{indented}"
    found = WrapperSource(text, "key").launches.values()
    return [(kernel._schema.name, [(a.name, a.part) for a in kernel._schema.arguments]) for kernel in found]


def test_arguments_are_what_their_names_say_of_memory_with_values() -> None:
    body = """
        arg0_1, arg1_1, s0 = args
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = buf0; del buf0  # reuse
        buf2 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        cpp_fused_add_log_0(buf1, arg0_1, buf2, s0)
    """
    roles = [("in_out_ptr0", "in_out"), ("in_ptr0", "in"), ("out_ptr0", "out"), ("ks0", "number")]
    assert parts(CPP, body) == [("inductor::cpp_fused_add_log_0", roles)]


@pytest.mark.parametrize(
    ("before", "arguments", "expected"),
    [
        # What nobody has written is no input, whatever the name says.
        ("buf1 = empty_strided_cpu((4,), (1,), torch.float32)", "buf1, arg0_1, buf2", ["out", "in", "out"]),
        # Nor by another name.
        (
            "buf3 = empty_strided_cpu((4,), (1,), torch.float32)\nbuf1 = buf3; del buf3  # reuse",
            "buf1, arg0_1, buf2",
            ["out", "in", "out"],
        ),
        # A buffer with values, of which a kernel may write some elements only.
        ("buf1 = arg1_1; del arg1_1  # reuse", "buf1, arg0_1, arg2_1", ["in_out", "in", "in_out"]),
        # The memory of a buffer that has gone.
        ("buf1 = arg1_1; del arg1_1  # reuse", "arg0_1, arg2_1, buf1", ["in_out", "in", "out"]),
        # A part of a new buffer, which is read whole by the kernel that fills it.
        (
            "buf3 = empty_strided_cpu((8,), (1,), torch.float32)\n"
            "buf1 = reinterpret_tensor(buf3, (4,), (1,), 0)  # alias",
            "arg0_1, buf3, buf1",
            ["in_out", "out", "out"],
        ),
        # Both parts are filled before it is read.
        (
            "buf3 = empty_strided_cpu((8,), (1,), torch.float32)\n"
            "buf1 = reinterpret_tensor(buf3, (4,), (1,), 0)  # alias\n"
            "buf4 = reinterpret_tensor(buf3, (4,), (1,), 4)  # alias\n"
            "cpp_fused_add_log_0(arg0_1, arg1_1, buf1, s0)\n"
            "cpp_fused_add_log_0(arg0_1, arg1_1, buf4, s0)",
            "arg0_1, buf3, buf2",
            ["in_out", "in", "out"],
        ),
    ],
)
def test_roles_follow_the_memory(before: str, arguments: str, expected: list[str]) -> None:
    body = f"""arg0_1, arg1_1, arg2_1, s0 = args
buf2 = empty_strided_cpu((4,), (1,), torch.float32)
{before}
cpp_fused_add_log_0({arguments}, s0)"""
    _, roles = parts(CPP, body)[-1]
    assert [part for _, part in roles[:-1]] == expected


def test_kernels_of_triton_are_read_from_their_metadata() -> None:
    body = """
        arg0_1, arg1_1 = args
        buf0 = empty_strided_cuda((64,), (1,), torch.float32)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.sum]
        stream0 = get_raw_stream(0)
        triton_red_fused_sum_1.run(arg0_1, buf0, 64, stream=stream0)
        shift_0.run(arg1_1, buf0, 64, stream=stream0)
    """
    assert parts(TRITON, body) == [
        ("inductor::triton_red_fused_sum_1", [("in_ptr0", "in"), ("out_ptr0", "out"), ("xnumel", "number")]),
        ("inductor::shift_0", [("out", "in_out"), ("source", "in"), ("n", "number")]),
    ]


@pytest.mark.parametrize(
    ("name", "ops"),
    [
        ("cpp_fused_add_log_relu_0", "add log relu"),
        ("cpp_fused__softmax_backward_data_sum_0", "_softmax_backward_data sum"),
        ("cpp_fused_div_log_relu_sum_threshold_backward_1", "div log relu sum threshold_backward"),
        ("triton_per_fused__to_copy_native_layer_norm_2", "_to_copy native_layer_norm"),
        ("cpp_fused_add_relu_0", "add relu"),  # and not the one operator of `quantized`
        ("cpp_fused_0", ""),
        ("cpp_fused_no_such_operator_0", ""),
        ("triton_poi_unfused", ""),
    ],
)
def test_the_name_of_a_kernel_lists_its_operators(name: str, ops: str) -> None:
    assert ops_in(name) == tuple(f"aten::{op}" for op in ops.split())


def test_a_kernel_that_adds_a_bias_does_not_multiply() -> None:
    source = "".join(
        f"""
cpp_fused_{name} = async_compile.cpp_pybinding(['const float*', 'const float*', 'float*'], r'''
extern "C"
void kernel(const float* {one}, const float* {other}, float* {out})
{{
}}
''')
"""
        for name, one, other, out in (("addmm_0", "X", "W", "Y"), ("addmm_relu_1", "in_ptr0", "in_ptr1", "out_ptr0"))
    )
    body = """
        arg0_1, arg1_1, arg2_1 = args
        buf0 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        cpp_fused_addmm_0(arg0_1, arg1_1, buf0)
        buf1 = empty_strided_cpu((4, 8), (8, 1), torch.float32)
        cpp_fused_addmm_relu_1(buf0, arg2_1, buf1)
    """
    indented = "".join(f"        {line}\n" for line in dedent(body).strip().splitlines())
    template, added = WrapperSource(
        f"{source}\nclass Runner:\n    def call(self, args):\n{indented}", "key"
    ).launches.values()
    assert (template.multiplies, template.row.roles) == (True, {"lhs": (0, "X"), "rhs": (1, "W")})
    assert not added.multiplies
    assert multiplies("cpp_fused_addmm_relu_1")
    assert not multiplies("cpp_fused_add_log_0")


def test_a_text_that_is_no_wrapper_has_no_launches() -> None:
    for text in ("", "def (", "x = 1", "triton_poi_fused_log_0.run(buf0)"):
        assert WrapperSource(text, "key").launches == {}


def test_a_kernel_that_a_product_was_lowered_to_multiplies() -> None:
    source = """
cpp_fused_bmm_log_0 = async_compile.cpp_pybinding(['const float*', 'const float*', 'float*'], r'''
extern "C"
void kernel(const float* in_ptr0, const float* in_ptr1, float* out_ptr0)
{
}
''')

def call(args):
    arg0_1, arg1_1 = args
    buf0 = empty_strided_cpu((2, 1, 8), (8, 8, 1), torch.float32)
    cpp_fused_bmm_log_0(arg0_1, arg1_1, buf0)
"""
    (kernel,) = WrapperSource(source, "key").launches.values()
    assert kernel.multiplies
    assert {role: name for role, (_, name) in kernel.row.roles.items()} == {"lhs": "in_ptr0", "rhs": "in_ptr1"}
