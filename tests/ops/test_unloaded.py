"""Libraries that are unloaded, and loaded again, while blocks watch their operators or between two blocks."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from compiler import ENGINES

from opintercept import CallRecord, OpInterceptWarning, hooks, intercept, register_op

Engine = Literal["kernel", "mode", "compiled"]
A, B = torch.randn(2, 3), torch.randn(3, 4)


class Foreign:
    """A library with one operator, which a program loads and unloads."""

    def __init__(self, short: str, how: str) -> None:
        self.name = f"unloaded_tests::{short}"
        self.row = (self.name, (2, 3), (3, 4), 48)  # of `operands`, for A and B
        self.short = short
        self._how = how
        self._library: torch.library.Library | None = None  # the only reference to it

    def load(self, schema: str, function: Callable[..., Any]) -> None:
        self._library = torch.library.Library("unloaded_tests", "FRAGMENT")
        self._library.define(f"{self.short}{schema}")
        self._library.impl(self.short, function, "CPU")

    def load_first(self) -> None:
        self.load("(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b)

    def load_other(self) -> None:
        """With fewer tensors in front, and an argument more."""
        self.load("(Tensor b, float factor, Tensor a) -> Tensor", lambda b, factor, a: (a @ b) * factor)

    def unload(self) -> None:
        if self._how == "destroy" and self._library is not None:
            self._library._destroy()
        self._library = None
        gc.collect()

    def __call__(self, *args: Any) -> Any:
        return getattr(torch.ops.unloaded_tests, self.short)(*args)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["destroy", "delete"])
def unknown(request: pytest.FixtureRequest) -> Iterator[Foreign]:
    """An operator of its own for each test, since a warning is told once."""
    if request.param == "delete" and not hasattr(torch.library, "_clear_torch_ops_cache"):
        pytest.skip("this torch keeps the operators of a deleted library, and crashes when a program calls them")
    foreign = Foreign(f"gemm{abs(hash(request.node.name))}", request.param)
    yield foreign
    foreign.unload()


@pytest.fixture
def foreign(unknown: Foreign) -> Iterator[Foreign]:
    """One that is loaded, and registered while the test runs."""
    with register_op(unknown.name, lhs="a", rhs="b"):
        unknown.load_first()
        yield unknown


def operands(records: list[CallRecord]) -> list[Any]:
    return [(r.op, r.lhs and tuple(r.lhs.shape), r.rhs and tuple(r.rhs.shape), r.flops) for r in records]


def test_a_library_that_goes_in_a_block_leaves_the_program_as_it_was(engine: Engine, foreign: Foreign) -> None:
    with intercept(recorder := hooks.Recorder(), engine=engine):
        foreign(A, B)
        foreign.unload()
        with pytest.raises(AttributeError, match=f"'unloaded_tests' object has no attribute '{foreign.short}'"):
            foreign(A, B)
        product = A @ B
    assert torch.equal(product, A @ B)
    assert [record.op for record in recorder.records] == [foreign.name, "aten::mm"]


def test_another_schema_in_an_open_block_is_seen(engine: Engine, foreign: Foreign) -> None:
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        foreign(A, B)
        foreign.unload()
        foreign.load_other()
        products = [foreign(B, 2.0, A), foreign(B, 2.0, A)]
    assert all(torch.equal(product, (A @ B) * 2) for product in products)
    with interceptor:
        foreign(B, 2.0, A)
    assert operands(recorder.records) == [foreign.row] * 4


def test_another_schema_that_nobody_notices_is_told_once(engine: Engine, foreign: Foreign) -> None:
    """It comes by torch's C++ methods, below those of `torch.library` that blocks follow."""
    define, impl, destroy = (getattr(torch.library.Library, name) for name in ("define", "impl", "_destroy"))
    with intercept(recorder := hooks.Recorder(), engine=engine), pytest.MonkeyPatch.context() as patch:
        foreign(A, B)
        for name, method in (("define", define), ("impl", impl), ("_destroy", destroy)):
            patch.setattr(torch.library.Library, name, method)
        foreign.unload()
        foreign.load_other()
        with pytest.warns(
            OpInterceptWarning, match=f"{foreign.name} was unloaded in a block and loaded again with another schema"
        ) as told:
            products = [foreign(B, 2.0, A), foreign(B, 2.0, A)]
        assert len(told) == 1
    assert all(torch.equal(product, (A @ B) * 2) for product in products)
    assert operands([record for record in recorder.records if record.op != "aten::mm"]) == [foreign.row]


def test_the_same_schema_in_an_open_block_is_seen(engine: Engine, foreign: Foreign) -> None:
    with intercept(recorder := hooks.Recorder(), engine=engine):
        foreign(A, B)
        foreign.unload()
        foreign.load("(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b + 1)
        product = foreign(A, B)
    assert torch.equal(product, A @ B + 1)
    assert operands(recorder.records) == [foreign.row] * 2


def test_an_interceptor_may_be_entered_without_the_library(engine: Engine, foreign: Foreign) -> None:
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        foreign(A, B)
    foreign.unload()
    with interceptor:
        A @ B
    assert [record.op for record in recorder.records] == [foreign.name, "aten::mm"]
    foreign.load_other()
    with interceptor:
        product = foreign(B, 2.0, A)
    assert torch.equal(product, (A @ B) * 2)
    assert operands(recorder.records[2:]) == [foreign.row]


def test_another_schema_between_two_blocks_is_seen(engine: Engine, foreign: Foreign) -> None:
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        foreign(A, B)
    foreign.unload()
    foreign.load_other()
    with interceptor:
        foreign(B, 2.0, A)
    with intercept(recorder, engine=engine):
        foreign(B, 2.0, A)
    assert operands(recorder.records) == [foreign.row] * 3


def test_an_operator_that_ops_names_may_go_and_come_back(engine: Engine, foreign: Foreign) -> None:
    interceptor = intercept(recorder := hooks.Recorder(), ops=foreign.name, engine=engine)
    with interceptor:
        foreign(A, B)
    foreign.unload()
    with pytest.raises(ValueError, match=f"got unknown op '{foreign.name}'"):
        interceptor.__enter__()
    foreign.load_other()
    with interceptor:
        foreign(B, 2.0, A)
    assert operands(recorder.records) == [foreign.row] * 2


def test_a_role_that_another_schema_lacks_is_told_once(engine: Engine, foreign: Foreign) -> None:
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        foreign(A, B)
    foreign.unload()
    foreign.load("(Tensor x, Tensor b) -> Tensor", lambda x, b: x @ b)
    message = f"lhs must be an argument of {foreign.name}, which has x, b; got 'a'; declare it anew"
    with pytest.warns(OpInterceptWarning, match=message) as told, interceptor:
        foreign(A, B)
    with interceptor:
        foreign(A, B)
    assert len(told) == 1
    assert operands(recorder.records)[1:] == [(foreign.name, None, (3, 4), None)] * 2


def test_a_role_that_a_later_library_lacks_is_told_once(engine: Engine, unknown: Foreign) -> None:
    with register_op(unknown.name, lhs="a", rhs="c"):
        interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
        unknown.load_first()
        with pytest.warns(OpInterceptWarning, match=r"rhs must be an argument of .* which has a, b; got 'c'") as told:
            for _ in range(2):
                with interceptor:
                    unknown(A, B)
    assert len(told) == 1
    assert [record.rhs for record in recorder.records] == [None, None]


def test_a_custom_op_may_be_defined_again(engine: Engine) -> None:
    def define(factor: float) -> Any:
        @torch.library.custom_op(f"unloaded_tests::again_{engine}", mutates_args=())
        def again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (a @ b) * factor

        return again

    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with register_op(first := define(1.0), lhs="a", rhs="b"):
        with interceptor:
            first(A, B)
        for factor in (2.0, 3.0):
            again = define(factor)  # as a notebook does that runs a cell again
            with interceptor:
                product = again(A, B)
            assert torch.equal(product, (A @ B) * factor)
    assert operands(recorder.records) == [(f"unloaded_tests::again_{engine}", (2, 3), (3, 4), 48)] * 3


def test_an_undeclared_operator_may_go_and_come_back(engine: Engine, unknown: Foreign) -> None:
    interceptor = intercept(hooks.Recorder(), engine=engine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            unknown.load("(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.from_numpy(a.numpy() @ b.numpy()))
            with interceptor:
                unknown(A, B)
            unknown.unload()
            with interceptor:
                A @ B
    assert len(told) == 1
    assert f'register_op("{unknown.name}", lhs="a", rhs="b", layout="kn")' in str(told[0].message)
    assert interceptor.opaque == {unknown.name: 2}


def test_an_interceptor_refuses_an_overload_that_is_gone(foreign: Foreign) -> None:
    overload = getattr(torch.ops.unloaded_tests, foreign.short).default
    foreign.unload()
    for again in (False, True):
        if again:  # the dispatcher has one of this name
            foreign.load_other()
        with pytest.raises(ValueError, match="ops must name operators of the dispatcher, got none that it has"):
            intercept(hooks.Recorder(), ops=overload)
