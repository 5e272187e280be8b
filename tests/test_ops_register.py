"""Operators of other libraries, declared with `register_op`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

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


@pytest.fixture(params=["kernel", "mode", "compiled"])
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
        seen.append((call.rhs, call.coded("rhs"), call.scales))

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
    with pytest.raises(ValueError, match="must have its namespace, as in 'mylib::scaled_mm', got 'mm'"):
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
