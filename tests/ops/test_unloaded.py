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
Unload = Callable[[torch.library.Library], None]
A, B = torch.randn(2, 3), torch.randn(3, 4)


def load(name: str, schema: str, function: Callable[..., Any]) -> list[torch.library.Library]:
    """Load a library with one operator. The list holds the only reference to it."""
    library = torch.library.Library("unloaded_tests", "FRAGMENT")
    library.define(f"{name}{schema}")
    library.impl(name, function, "CPU")
    return [library]


def unload(library: list[torch.library.Library], how: str) -> None:
    if how == "destroy":
        library[0]._destroy()
    library.clear()
    gc.collect()


def load_first(name: str) -> list[torch.library.Library]:
    return load(name, "(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b)


def load_other(name: str) -> list[torch.library.Library]:
    """With fewer tensors in front, and an argument more."""
    return load(name, "(Tensor b, float factor, Tensor a) -> Tensor", lambda b, factor, a: (a @ b) * factor)


def run(name: str, *args: Any) -> Any:
    return getattr(torch.ops.unloaded_tests, name)(*args)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["destroy", "delete"])
def how(request: pytest.FixtureRequest) -> Any:
    if request.param == "delete" and not hasattr(torch.library, "_clear_torch_ops_cache"):
        pytest.skip("this torch keeps the operators of a deleted library, and crashes when a program calls them")
    return request.param


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """An operator of its own for each test, since a warning is told once; registered while the test runs."""
    name = f"f{abs(hash(request.node.name))}"
    with register_op(f"unloaded_tests::{name}", lhs="a", rhs="b"):
        yield name


def operands(records: list[CallRecord]) -> list[Any]:
    return [(r.op, r.lhs and tuple(r.lhs.shape), r.rhs and tuple(r.rhs.shape), r.flops) for r in records]


def test_a_library_that_goes_in_a_block_leaves_the_program_as_it_was(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    with intercept(recorder := hooks.Recorder(), engine=engine):
        run(name, A, B)
        unload(library, how)
        with pytest.raises(AttributeError, match=f"'unloaded_tests' object has no attribute '{name}'"):
            run(name, A, B)
        product = A @ B
    assert torch.equal(product, A @ B)
    assert [record.op for record in recorder.records] == [f"unloaded_tests::{name}", "aten::mm"]


def test_another_schema_in_an_open_block_is_told_once(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        run(name, A, B)
        unload(library, how)
        library = load_other(name)
        with pytest.warns(
            OpInterceptWarning, match=f"{name} was unloaded in a block and loaded again with another schema"
        ) as told:
            products = [run(name, B, 2.0, A), run(name, B, 2.0, A)]
        assert len(told) == 1
    assert all(torch.equal(product, (A @ B) * 2) for product in products)
    mine = [record for record in recorder.records if record.op != "aten::mm"]
    assert operands(mine) == [(f"unloaded_tests::{name}", (2, 3), (3, 4), 48)]
    with interceptor:
        run(name, B, 2.0, A)
    assert operands(recorder.records[-1:]) == operands(mine)
    unload(library, how)


def test_the_same_schema_in_an_open_block_is_seen(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    with intercept(recorder := hooks.Recorder(), engine=engine):
        run(name, A, B)
        unload(library, how)
        library = load(name, "(Tensor a, Tensor b) -> Tensor", lambda a, b: a @ b + 1)
        product = run(name, A, B)
    assert torch.equal(product, A @ B + 1)
    assert operands(recorder.records) == [(f"unloaded_tests::{name}", (2, 3), (3, 4), 48)] * 2
    unload(library, how)


def test_an_interceptor_may_be_entered_without_the_library(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        run(name, A, B)
    unload(library, how)
    with interceptor:
        A @ B
    assert [record.op for record in recorder.records] == [f"unloaded_tests::{name}", "aten::mm"]
    library = load_other(name)
    with interceptor:
        product = run(name, B, 2.0, A)
    assert torch.equal(product, (A @ B) * 2)
    assert operands(recorder.records[2:]) == [(f"unloaded_tests::{name}", (2, 3), (3, 4), 48)]
    unload(library, how)


def test_another_schema_between_two_blocks_is_seen(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        run(name, A, B)
    unload(library, how)
    library = load_other(name)
    with interceptor:
        run(name, B, 2.0, A)
    with intercept(recorder, engine=engine):
        run(name, B, 2.0, A)
    assert operands(recorder.records) == [(f"unloaded_tests::{name}", (2, 3), (3, 4), 48)] * 3
    unload(library, how)


def test_an_operator_that_ops_names_may_go_and_come_back(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    interceptor = intercept(recorder := hooks.Recorder(), ops=f"unloaded_tests::{name}", engine=engine)
    with interceptor:
        run(name, A, B)
    unload(library, how)
    with pytest.raises(ValueError, match=f"got unknown op 'unloaded_tests::{name}'"):
        interceptor.__enter__()
    library = load_other(name)
    with interceptor:
        run(name, B, 2.0, A)
    assert operands(recorder.records) == [(f"unloaded_tests::{name}", (2, 3), (3, 4), 48)] * 2
    unload(library, how)


def test_a_role_that_another_schema_lacks_is_told_once(engine: Engine, how: str, name: str) -> None:
    library = load_first(name)
    interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
    with interceptor:
        run(name, A, B)
    unload(library, how)
    library = load(name, "(Tensor x, Tensor b) -> Tensor", lambda x, b: x @ b)
    message = f"lhs must be an argument of unloaded_tests::{name}, which has x, b; got 'a'; declare it anew"
    with pytest.warns(OpInterceptWarning, match=message) as told, interceptor:
        run(name, A, B)
    with interceptor:
        run(name, A, B)
    assert len(told) == 1
    assert operands(recorder.records)[1:] == [(f"unloaded_tests::{name}", None, (3, 4), None)] * 2
    unload(library, how)


def test_a_role_that_a_later_library_lacks_is_told_once(engine: Engine) -> None:
    with register_op(f"unloaded_tests::late_{engine}", lhs="a", rhs="c"):
        interceptor = intercept(recorder := hooks.Recorder(), engine=engine)
        library = load_first(f"late_{engine}")
        with pytest.warns(OpInterceptWarning, match=r"rhs must be an argument of .* which has a, b; got 'c'") as told:
            for _ in range(2):
                with interceptor:
                    run(f"late_{engine}", A, B)
    assert len(told) == 1
    assert [record.rhs for record in recorder.records] == [None, None]
    unload(library, "destroy")


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


def test_an_undeclared_operator_may_go_and_come_back(engine: Engine, how: str) -> None:
    name = f"gemm_{engine}_{how}"
    interceptor = intercept(hooks.Recorder(), engine=engine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            library = load(name, "(Tensor a, Tensor b) -> Tensor", lambda a, b: torch.from_numpy(a.numpy() @ b.numpy()))
            with interceptor:
                run(name, A, B)
            unload(library, how)
            with interceptor:
                A @ B
    assert len(told) == 1
    assert f'register_op("unloaded_tests::{name}", lhs="a", rhs="b", layout="kn")' in str(told[0].message)
    assert interceptor.opaque == {f"unloaded_tests::{name}": 2}


def test_an_interceptor_refuses_an_overload_that_is_gone(how: str, name: str) -> None:
    library = load_first(name)
    overload = getattr(torch.ops.unloaded_tests, name).default
    unload(library, how)
    with pytest.raises(ValueError, match="ops must name operators of the dispatcher, got none that it has"):
        intercept(hooks.Recorder(), ops=overload)
    library = load_other(name)  # the dispatcher has one of this name again
    with pytest.raises(ValueError, match="ops must name operators of the dispatcher, got none that it has"):
        intercept(hooks.Recorder(), ops=overload)
    unload(library, how)
