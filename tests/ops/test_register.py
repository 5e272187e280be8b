"""Operators of other libraries, declared with `register_op`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from compiler import ENGINES, needs_compiler
from processes import run_python

from opintercept import OpCall, OpInterceptWarning, hooks, intercept, register_op

LIBRARY = torch.library.Library("foreign_tests", "DEF")


def define(schema: str, function: Callable[..., Any]) -> str:
    """Define an operator with a kernel for the CPU, and return its name."""
    name = LIBRARY.define(schema)
    LIBRARY.impl(name, function, "CPU")
    return f"foreign_tests::{name}"


def void(_: object) -> None:
    """Return nothing."""


MM = define("mm(Tensor a, Tensor b, *, Tensor? bias=None) -> Tensor", lambda a, b, *, bias=None: a @ b)
LINEAR = define("linear(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w.T)
VOID = define("void(Tensor(a!) y, Tensor x, Tensor w) -> ()", lambda y, x, w: void(y.copy_(x @ w.T)))
SIZES = define("sizes(Tensor x, Tensor packed, int n, int k) -> Tensor", lambda x, packed, n, k: x @ packed.view(k, n))
INT8 = define(
    "int8(Tensor x, Tensor codes, Tensor scale) -> Tensor", lambda x, codes, scale: x @ (codes.float() * scale).T
)


def operator(name: str) -> Any:
    namespace, _, short = name.partition("::")
    return getattr(getattr(torch.ops, namespace), short)


Engine = Literal["kernel", "mode", "compiled"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


def calls(engine: Engine, run: Callable[[], Any]) -> list[Any]:
    recorder = hooks.Recorder()
    with intercept(recorder, engine=engine):
        run()
    return recorder.records


def test_a_registered_operator_has_roles_shape_and_flops(engine: Engine) -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    with register_op(MM, lhs="a", rhs="b", bias="bias"):
        (call,) = calls(engine, lambda: operator(MM)(a, b, bias=torch.ones(4)))
    assert call.op == MM
    assert str(call) == f"{MM} float32[2, 3] @ float32[3, 4] + float32[4] -> float32[2, 4]"
    assert call.gemm[:4] == (1, 2, 4, 3)
    assert call.flops == 48
    assert not call.opaque
    if engine != "mode":  # a dispatch mode does not see inside of an operator
        (plain,) = calls(engine, lambda: operator(MM)(a, b))
        assert plain.op == "aten::mm"


def test_an_operator_that_returns_nothing_has_what_it_writes_as_output(engine: Engine) -> None:
    y, x, w = torch.zeros(2, 4), torch.randn(2, 3), torch.randn(4, 3)
    outputs = []
    with register_op(VOID, lhs="x", rhs="w", layout="nk"), intercept(lambda c: outputs.append(c.output), engine=engine):
        assert operator(VOID)(y, x, w) is None
    assert outputs[0] is y or torch.equal(outputs[0], x @ w.T)
    assert torch.equal(y, x @ w.T)
    with register_op(VOID, lhs=1, rhs=2, out=0, layout="nk"), intercept(hooks.Noise(1.0), engine=engine):
        assert operator(VOID)(y, x, w) is None
    assert not torch.equal(y, x @ w.T)


def test_a_formula_gets_sizes_and_integers(engine: Engine) -> None:
    given: dict[str, Any] = {}

    def gemm(**arguments: Any) -> tuple[int, int, int, int]:
        given.update(arguments)
        return 1, arguments["x"][0], arguments["n"], arguments["k"]

    x, packed = torch.randn(2, 3), torch.randn(12)
    with register_op(SIZES, lhs="x", rhs="packed", gemm=gemm):
        (call,) = calls(engine, lambda: operator(SIZES)(x, packed, 4, 3))
    assert given == {"x": torch.Size((2, 3)), "packed": torch.Size((12,)), "n": 4, "k": 3}
    assert call.gemm[:4] == (1, 2, 4, 3)
    assert call.flops == 48


def test_hooks_get_the_values_of_a_dequantized_operand(engine: Engine) -> None:
    x, codes, scale = torch.randn(2, 3), torch.randint(-127, 127, (4, 3), dtype=torch.int8), torch.tensor(0.01)
    seen: list[Any] = []

    def look(call: OpCall) -> None:
        seen.append((call.rhs, call.is_quantized("rhs"), call.scales))

    roles: Any = {"lhs": "x", "rhs": "codes", "scales": "scale", "layout": "nk"}
    with register_op(INT8, **roles, dequantize=lambda codes, scale, **_: codes.float() * scale):
        with intercept(look, engine=engine):
            operator(INT8)(x, codes, scale)
    with register_op(INT8, **roles), intercept(look, engine=engine):
        operator(INT8)(x, codes, scale)
    assert torch.equal(seen[0][0], codes.float() * scale)
    assert torch.equal(seen[1][0], codes)
    assert [coded for _, coded, _ in seen] == [False, True]
    assert all(torch.equal(scales[0], scale) for _, _, scales in seen)


@pytest.mark.parametrize("target", [LINEAR, f"{LINEAR}.default", operator(LINEAR), operator(LINEAR).default])
def test_a_target_may_be_a_name_a_packet_or_an_overload(target: Any) -> None:
    with register_op(target, lhs="x", rhs="w", layout="nk"):
        (call,) = calls("kernel", lambda: operator(LINEAR)(torch.ones(2, 3), torch.ones(4, 3)))
    assert (call.op, call.gemm[:4]) == (LINEAR, (1, 2, 4, 3))


def test_a_library_may_load_after_the_registration() -> None:
    with register_op("foreign_tests::late", lhs="a", rhs="b"):
        interceptor = intercept(recorder := hooks.Recorder())
        define("late(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b)
        with interceptor:
            torch.ops.foreign_tests.late(torch.ones(2, 3), torch.ones(3, 4))
    assert [record.op for record in recorder.records] == ["foreign_tests::late"]


def test_a_registration_may_be_made_after_the_interceptor() -> None:
    interceptor = intercept(recorder := hooks.Recorder())
    with register_op(MM, lhs="a", rhs="b"), interceptor:
        operator(MM)(torch.ones(2, 3), torch.ones(3, 4))
    assert [record.op for record in recorder.records] == [MM]


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"rhs must be an argument of foreign_tests::mm, which has a, b, bias; got 'c'"
    ):
        register_op(MM, lhs="a", rhs="c")
    with pytest.raises(ValueError, match=r"lhs must be an argument .* got 7"):
        register_op(MM, lhs=7)


def test_an_operator_is_declared_once() -> None:
    with register_op(MM, lhs="a", rhs="b"):
        with pytest.raises(ValueError, match=r"declared once, got foreign_tests::mm again; call remove\(\)"):
            register_op(MM, lhs="a", rhs="b")
    with pytest.raises(ValueError, match="torch's own table has it"):
        register_op("aten::mm", lhs="self", rhs="mat2")


def test_a_name_without_a_namespace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have its namespace, as in 'mylib::scaled_mm', and .*, got 'mm'"):
        register_op("mm")
    with pytest.raises(TypeError, match="register_op takes a name"):
        register_op(3)


@pytest.mark.parametrize("result", [None, (1, 2, 3), (1, 2, 4, -3), (1, 2, 4, "3"), 0 / 1])
def test_a_formula_that_returns_nonsense_warns_once(result: Any) -> None:
    with register_op(MM, lhs="a", rhs="b", gemm=lambda **_: result):
        with pytest.warns(OpInterceptWarning, match=r"the gemm formula of foreign_tests::mm must return") as told:
            records = calls("kernel", lambda: [operator(MM)(torch.ones(2, i), torch.ones(i, 4)) for i in (2, 3)])
    assert len(told) == 1
    assert [record.gemm for record in records] == [None, None]


def test_an_operator_that_nobody_has_declared_is_told_once(engine: Engine) -> None:
    name = define(f"unknown_gemm_{engine}(Tensor x, Tensor w) -> Tensor", lambda x, w: torch.from_numpy(x.numpy()))
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with pytest.warns(OpInterceptWarning, match=f"{name} looks like a matmul of another library") as told:
        with intercept(recorder := hooks.Recorder(), engine=engine) as interceptor:
            operator(name)(x, w)
            operator(name)(x, w)
    assert interceptor.opaque == {name: 2}
    assert recorder.records == []
    line = str(told.pop().message).partition("opintercept.")[2]
    assert line == f'register_op("{name}", lhs="x", rhs="w", layout="nk")'
    with eval(line, {"register_op": register_op}):
        (call,) = calls(engine, lambda: operator(name)(x, w))
    assert call.gemm[:4] == (1, 2, 4, 3)
    assert len(told) == 0


def test_an_operator_whose_products_are_seen_is_not_told() -> None:
    name = define("python_gemm(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w)
    with intercept(recorder := hooks.Recorder()) as interceptor:
        operator(name)(torch.ones(2, 3), torch.ones(3, 4))
    assert interceptor.opaque == {}
    assert [record.op for record in recorder.records] == ["aten::mm"]


def test_an_operator_without_two_matrices_that_fit_is_not_told(engine: Engine) -> None:
    name = define(f"attn_mask_{engine}(Tensor x, Tensor y) -> Tensor", lambda x, y: x.clone())
    with intercept(hooks.Recorder(), engine=engine) as interceptor:
        operator(name)(torch.ones(2, 3), torch.ones(5))
        operator(name)(torch.ones(2, 3), torch.ones(5, 7))
    assert interceptor.opaque == {}


@needs_compiler
@pytest.mark.slow
def test_a_native_kernel_of_another_library_is_told(tmp_path: Path) -> None:
    source = """
    #include <ATen/ops/zeros.h>  // and not all of ATen, which takes seconds
    #include <torch/library.h>
    at::Tensor gemm(const at::Tensor& a, const at::Tensor& b) {  // without the dispatcher
      auto c = at::zeros({a.size(0), b.size(1)});
      auto x = a.accessor<float, 2>(), y = b.accessor<float, 2>(), z = c.accessor<float, 2>();
      for (int64_t i = 0; i < c.size(0); i++)
        for (int64_t j = 0; j < c.size(1); j++)
          for (int64_t k = 0; k < a.size(1); k++) z[i][j] += x[i][k] * y[k][j];
      return c;
    }
    TORCH_LIBRARY(native_tests, m) { m.def("scaled_gemm(Tensor a, Tensor b) -> Tensor"); }
    TORCH_LIBRARY_IMPL(native_tests, CPU, m) { m.impl("scaled_gemm", gemm); }
    """
    code = f"""
        import torch, warnings
        from torch.utils.cpp_extension import load_inline
        from opintercept import hooks, intercept, register_op
        interceptor = intercept(hooks.Recorder())
        with interceptor: pass
        options = dict(is_python_module=False, extra_cflags=["-O0"], no_implicit_headers=True)
        load_inline("native_tests", {source!r}, build_directory={str(tmp_path)!r}, **options)
        a, b = torch.randn(2, 3), torch.randn(3, 4)
        with warnings.catch_warnings(record=True) as told, interceptor:
            warnings.simplefilter("always")
            for _ in range(3):
                torch.ops.native_tests.scaled_gemm(a, b)
        (warning,) = told
        print(interceptor.opaque)
        line = str(warning.message).partition("opintercept.")[2]
        print(line)
        eval(line)
        hook = hooks.Recorder()
        for engine in ("kernel", "compiled", "mode"):
            with intercept(hook, engine=engine):
                assert torch.allclose(torch.ops.native_tests.scaled_gemm(a, b), a @ b)
        print([record.op for record in hook.records if record.op != "aten::mm"], hook.records[0].gemm)
        """
    done = run_python("-W", "ignore", "-c", textwrap.dedent(code), timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "{'native_tests::scaled_gemm': 3}",
        'register_op("native_tests::scaled_gemm", lhs="a", rhs="b", layout="kn")',
        "['native_tests::scaled_gemm', 'native_tests::scaled_gemm', 'native_tests::scaled_gemm'] [2, 3] @ [3, 4]",
    ]


QUANTISED: dict[str, Any] = {"lhs": "x", "rhs": "codes", "scales": "scale", "layout": "nk"}


def test_stats_say_which_values_are_codes() -> None:
    x, codes, scale = torch.ones(2, 3), torch.full((4, 3), 100, dtype=torch.int8), torch.tensor(0.5)
    largest: dict[str, float] = {}
    for dequantize in (None, lambda codes, scale, **_: codes * scale):
        stats = hooks.Stats(of=("lhs", "rhs"))
        with register_op(INT8, **QUANTISED, dequantize=dequantize), intercept(stats):
            operator(INT8)(x, codes, scale)
        largest |= {row.operand: row.max for row in stats.rows()}
    assert largest == {"lhs": 1.0, "rhs codes": 100.0, "rhs": 50.0}


def test_a_quantised_operand_cannot_be_replaced_by_values() -> None:
    x, codes, scale = torch.ones(2, 3), torch.ones((4, 3), dtype=torch.int8), torch.tensor(0.5)
    with register_op(INT8, **QUANTISED, dequantize=lambda codes, scale, **_: codes * scale):
        with intercept(hooks.FakeQuantize(of="rhs")), pytest.raises(ValueError, match=r"the rhs of .* holds codes"):
            operator(INT8)(x, codes, scale)


def test_backward_products_of_a_registered_operator_link_to_it() -> None:
    @torch.library.custom_op("foreign_tests::with_gradient", mutates_args=())
    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.T

    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = context.saved_tensors
        return gradient @ w, gradient.T @ x

    multiply.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    x, w = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with register_op(multiply, lhs="x", rhs="w", layout="nk"), intercept(recorder := hooks.Recorder()):
        multiply(x, w).sum().backward()
    records = recorder.records
    assert [record.op for record in records] == ["foreign_tests::with_gradient", "aten::mm", "aten::mm"]
    assert [(record.forward, record.grad_of) for record in records[1:]] == [(0, "lhs"), (0, "rhs")]


@pytest.mark.slow
def test_the_registry_is_not_read_while_no_library_comes() -> None:
    code = """
        import sys, time, torch
        from opintercept import intercept
        from opintercept._ops.table import ROWS
        intercept()
        before = ROWS.version
        import wave
        with intercept():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert "wave" in sys.modules and ROWS.version == before
        library = torch.library.Library("late_tests", "DEF")
        library.define("f(Tensor x) -> Tensor")
        intercept()
        assert ROWS.version > before
        """
    done = run_python("-c", textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
