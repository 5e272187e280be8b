"""Functions that are no operators of the dispatcher: they are replaced while a block is open."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from compiler import ENGINES, needs_compiler, needs_ninja, with_pybind
from nets import record
from threads import run_threads
from torch._subclasses.fake_tensor import FakeTensorMode

from opintercept import OpInterceptError, OpInterceptWarning, hooks, intercept, register_op
from opintercept._engines import patched_functions

LIBRARY = '''
import torch

class Product(torch.autograd.Function):
    """As libraries call a binding: autograd sees nothing of it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return mul(x, weight.T)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return mul(grad, weight), mul(grad.T, x)

class Layer:
    def __init__(self, weight):
        self.weight = weight

    def run(self, x):
        return x @ self.weight

    @staticmethod
    def static(x, w):
        return x @ w

    @classmethod
    def of_class(cls, x, w):
        return x @ w

def mul(a, b, scale=1.0):
    """The product of two matrices."""
    return torch.mm(a, b) * scale

def into(out, a, b):
    torch.mm(a, b, out=out)

async def late(a, b):
    return torch.mm(a, b)

def broken(a, b):
    raise RuntimeError("no kernel")

def anything(*args, **kwargs):
    return args[0] @ kwargs["b"]

VALUE = 3
'''
USER = """
from seamlib import mul, mul as times

def call(a, b):
    return mul(a, b)
"""
A, B = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A library whose functions are declared, and a module that has imported one of them by name."""
    (tmp_path / "seamlib.py").write_text(LIBRARY)
    (tmp_path / "seamuser.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(patched_functions, "_told", set())
    library = importlib.import_module("seamlib")
    importlib.import_module("seamuser")
    before = {name: dict(vars(sys.modules[name])) for name in ("seamlib", "seamuser")}
    with register_op("seamlib:mul", lhs="a", rhs="b"), register_op("seamlib:into", lhs="a", rhs="b", out="out"):
        yield library
    for name, names in before.items():
        if name in sys.modules:
            assert {key: value for key, value in vars(sys.modules[name]).items() if key in names} == names
    for name in ("seamlib", "seamuser", "seamlate"):
        sys.modules.pop(name, None)


@pytest.fixture
def user(library: Any) -> ModuleType:
    return sys.modules["seamuser"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Any:
    return request.param


recorded: Any = record


def ops_of(run: Any, **options: Any) -> list[str]:
    return [call.op for call in recorded(run, **options)]


def test_a_function_is_one_call_with_roles_shape_and_line(library: Any, engine: Any) -> None:
    (call,) = recorded(lambda: library.mul(A, B, scale=2.0), engine=engine)
    assert str(call) == "seamlib:mul float32[2, 3] @ float32[3, 4] -> float32[2, 4]"
    assert (call.gemm[:4], call.flops, call.phase, call.opaque) == ((1, 2, 4, 3), 48, "forward", False)
    assert call.source.startswith("test_patched_functions.py:")


def test_a_function_is_seen_at_function_level_too(library: Any) -> None:
    assert ops_of(lambda: [library.mul(A, B), A @ B], level="function") == ["seamlib:mul", "torch.Tensor.matmul"]


def test_both_levels_see_a_function_in_one_call(library: Any) -> None:
    below = hooks.Recorder()
    with intercept(below):
        above = recorded(lambda: library.mul(A, B), level="function")
    assert [call.op for call in (*above, *below.records)] == ["seamlib:mul"] * 2


def test_a_name_imported_elsewhere_is_replaced_and_restored(library: Any, user: Any) -> None:
    original = library.mul
    assert ops_of(lambda: [user.call(A, B), user.times(A, B)]) == ["seamlib:mul"] * 2
    assert library.mul is user.mul is user.times is original


def test_a_name_imported_while_a_block_is_open_is_restored(library: Any, tmp_path: Path) -> None:
    (tmp_path / "seamlate.py").write_text("from seamlib import mul\n")
    with intercept() as watching:
        late = importlib.import_module("seamlate")
        with watching:
            pass
    assert late.mul is library.mul
    assert late.mul(A, B).equal(A @ B)


def test_a_function_that_moves_into_a_module_between_blocks_is_found(library: Any, user: Any) -> None:
    held = [library.mul]
    for _ in range(2):
        with intercept():
            pass
    user.moved = held.pop()
    assert ops_of(lambda: user.moved(A, B)) == ["seamlib:mul"]


def test_what_replaces_a_function_stays_in_no_module_that_has_copied_it(library: Any, user: Any) -> None:
    original = library.mul
    for _ in range(2):
        with intercept():
            held = [library.mul]
    assert held[0] is not original
    with intercept():
        user.moved = held.pop()
    assert user.moved is original


@pytest.mark.parametrize("level", ["function", "dispatch"])
def test_a_function_that_computes_after_it_has_returned_is_left_alone(library: Any, level: Any) -> None:
    with register_op("seamlate:late", lhs="a", rhs="b"):  # its module is not there yet
        sys.modules["seamlate"] = ModuleType("seamlate")
        sys.modules["seamlate"].late = library.late  # type: ignore[attr-defined]
        try:
            with warnings.catch_warnings(action="ignore", category=OpInterceptWarning):
                calls = recorded(lambda: asyncio.run(sys.modules["seamlate"].late(A, B)), level=level)
        finally:
            del sys.modules["seamlate"]
    assert len(calls) == 1


def test_methods_are_seen_and_restored(library: Any) -> None:
    before = dict(vars(library.Layer))
    registrations = [
        register_op("seamlib:Layer.run", lhs="x", rhs=0),
        register_op("seamlib:Layer.static", lhs="x", rhs="w"),
        register_op("seamlib:Layer.of_class", lhs="x", rhs="w"),
    ]
    layer = library.Layer(B)
    calls = recorded(lambda: [layer.run(A), library.Layer.static(A, B), layer.of_class(A, B)])
    assert [call.op.partition(":")[2] for call in calls] == ["Layer.run", "Layer.static", "Layer.of_class"]
    assert [call.lhs.shape for call in calls] == [(2, 3)] * 3
    for registration in registrations:
        registration.remove()
    assert dict(vars(library.Layer)) == before


def test_what_is_written_is_the_output_of_a_function_that_returns_nothing(library: Any, engine: Any) -> None:
    out, seen = torch.zeros(2, 4), []
    with intercept(lambda call: seen.append(call.output), engine=engine):
        assert library.into(out, A, B) is None
    assert seen == [out]
    assert out.equal(A @ B)


def test_other_blocks_see_the_products_inside(library: Any) -> None:
    outer = hooks.Recorder()
    with intercept(outer):
        inner = recorded(lambda: library.mul(A, B), ops="mm")
    assert [call.op for call in (*outer.records, *inner)] == ["seamlib:mul", "aten::mm"]


def test_ops_selects_a_function_by_its_name(library: Any) -> None:
    assert ops_of(lambda: [library.mul(A, B), A @ B], ops="seamlib:mul") == ["seamlib:mul"]
    both = ops_of(lambda: [library.mul(A, B), library.into(torch.zeros(2, 4), A, B)], ops=["mm", "seamlib:mul"])
    assert both == ["seamlib:mul", "aten::mm"]
    assert not recorded(lambda: A @ B, ops="seamlib:mul", level="function")


def test_ops_refuses_a_function_that_nobody_has_declared() -> None:
    with pytest.raises(ValueError, match=r"ops must name functions that register_op has declared, got 'a\.b:c'"):
        intercept(ops=["mm", "a.b:c"])


def test_a_filter_takes_the_short_name(library: Any) -> None:
    seen: list[str] = []
    with intercept(hooks.when(lambda call: seen.append(call.op), op="mul")):
        library.mul(A, B)
        A @ B
    assert seen == ["seamlib:mul"]


def test_backward_calls_in_a_custom_function_name_their_forward_call(library: Any, engine: Any) -> None:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    calls = recorded(lambda: library.Product.apply(x, weight).sum().backward(), engine=engine)
    assert [(c.op, c.phase, c.forward) for c in calls] == [
        ("seamlib:mul", "forward", None),
        ("seamlib:mul", "backward", 0),
        ("seamlib:mul", "backward", 0),
    ]


def test_backward_products_of_a_function_that_autograd_records_name_its_call(library: Any, engine: Any) -> None:
    x, other = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)

    def run() -> None:
        hidden = library.mul(x, B) + torch.mm(other, B)
        hidden.sum().backward()

    calls = recorded(run, engine=engine)
    assert sorted((c.op, c.phase, c.forward) for c in calls[2:]) == [
        ("aten::mm", "backward", 0),
        ("aten::mm", "backward", 1),
    ]


def test_results_gradients_and_graph_are_those_without_a_block(library: Any, engine: Any) -> None:
    def run() -> list[Any]:
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        y = library.mul(x, B)
        y.sum().backward()
        return [y.detach(), x.grad, type(y.grad_fn).__name__, y._version, x._version]

    plain = run()
    with intercept([hooks.Stats(of=("lhs", "rhs", "output")), hooks.Capture("output")], engine=engine):
        watched = run()
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(plain, watched, strict=True)
    )


def test_a_replaced_output_keeps_the_functions_own_gradient(library: Any, engine: Any) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with intercept(lambda call: call.output * 10 if call.phase == "forward" else None, engine=engine):
        y = library.mul(x, B)
        y.sum().backward()
    assert y.equal(10 * (torch.ones(2, 3) @ B))
    assert x.grad is not None
    assert x.grad.equal(torch.ones(2, 4) @ B.T)


def test_a_replaced_operand_reaches_the_function(library: Any, engine: Any) -> None:
    with intercept(SimpleNamespace(pre=lambda call: call.replace(lhs=call.lhs * 2)), engine=engine):
        y = library.mul(A, B)
    assert y.equal(2 * (A @ B))


def test_an_exception_of_the_function_reaches_hooks_and_program(library: Any) -> None:
    seen: list[str] = []
    failures = SimpleNamespace(error=lambda call, exception: seen.append(f"{call.op}: {exception}"))
    original = library.broken
    with register_op("seamlib:broken", lhs="a", rhs="b"):
        with pytest.raises(RuntimeError, match="no kernel"), intercept(failures):
            library.broken(A, B)
        assert seen == ["seamlib:broken: no kernel"]
        assert library.broken is original


def test_two_threads_leave_the_function_as_it_was(library: Any) -> None:
    original = library.mul
    entered, leave = threading.Barrier(3), [threading.Event(), threading.Event()]
    counts = [0, 0]

    def work(place: int) -> None:
        def run() -> None:
            entered.wait(10)
            library.mul(A, B)
            leave[place].wait(10)

        counts[place] = len(recorded(run))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    entered.wait(10)
    leave[0].set()
    threads[0].join(10)
    assert library.mul is not original
    library.mul(A, B)  # this thread has entered nothing
    leave[1].set()
    threads[1].join(10)
    assert counts == [1, 1]
    assert library.mul is original
    with intercept():
        pass  # removes the kernels that the last thread had to leave behind


def test_a_block_for_all_threads_sees_a_function_in_another_one(library: Any) -> None:
    def run() -> None:
        run_threads(lambda: library.mul(A, B))

    assert len(recorded(run, threads="all")) == 1
    with pytest.warns(OpInterceptWarning, match="other threads ran watched operators [12] times"):
        assert not recorded(run)
    with intercept():
        pass  # as above


def test_a_patch_of_other_code_that_ends_inside_is_no_matter(library: Any) -> None:
    def run() -> None:
        with mock.patch.object(library, "mul", wraps=library.mul):
            library.mul(A, B)

    assert ops_of(run) == ["seamlib:mul"]


def test_a_patch_of_other_code_that_outlives_the_block_stays_and_is_told(library: Any) -> None:
    original = library.mul
    patch = mock.patch.object(library, "mul", return_value="other")
    with (
        pytest.warns(OpInterceptWarning, match="other code has replaced seamlib:mul while a block was open"),
        intercept(),
    ):
        patch.start()
    assert library.mul(A, B) == "other"
    patch.stop()  # puts back what it found, which is ours
    assert library.mul(A, B).equal(A @ B)
    assert len(recorded(lambda: library.mul(A, B))) == 1
    assert library.mul is original


def test_a_module_that_is_loaded_again_in_a_block_keeps_its_new_function(library: Any) -> None:
    with warnings.catch_warnings(action="error"), intercept(recorder := hooks.Recorder()):
        before = library.mul
        importlib.reload(library)
        assert library.mul is not before
        library.mul(A, B)
    assert [record.op for record in recorder.records] == ["seamlib:mul"]
    assert "seamlib" in library.mul.__code__.co_filename
    fresh = library.mul
    assert len(recorded(lambda: library.mul(A, B))) == 1
    assert library.mul is fresh
    sys.modules["seamuser"] = importlib.reload(sys.modules["seamuser"])
    library.mul = sys.modules["seamuser"].mul
    del sys.modules["seamlib"], sys.modules["seamuser"]  # whose first functions the fixture would miss


def test_a_module_that_is_unloaded_in_a_block_is_restored(library: Any) -> None:
    original = library.mul
    with intercept():
        del sys.modules["seamlib"]
        assert library.mul is not original
    assert library.mul is original
    assert not recorded(lambda: library.mul(A, B))[1:]


ENTERS = "from opintercept import intercept\nwith intercept():\n    pass\n\n"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("first", ["", ENTERS], ids=["plain", "enters a block while it is imported"])
def test_a_library_may_be_imported_after_it_was_declared(first: str, tmp_path: Path) -> None:
    (tmp_path / "seamlate.py").write_text(f"{first}def mul(a, b):\n    return a @ b\n")
    with register_op("seamlate:mul", lhs="a", rhs="b"):
        assert not recorded(lambda: None)
        late = importlib.import_module("seamlate")
        (call,) = recorded(lambda: late.mul(A, B))
    assert (call.op, call.flops) == ("seamlate:mul", 48)


def test_a_library_without_the_function_is_told_when_it_comes(library: Any, tmp_path: Path) -> None:
    (tmp_path / "seamlate.py").write_text("")
    with register_op("seamlate:mull", lhs="a", rhs="b"):
        with intercept():
            pass  # the library is not there yet
        importlib.import_module("seamlate")
        with pytest.warns(OpInterceptWarning, match="the module seamlate must have what is declared"), intercept():
            pass


def test_what_is_no_function_when_the_library_comes_is_left_alone(library: Any, tmp_path: Path) -> None:
    (tmp_path / "seamlate.py").write_text("mul = None\nkind = int\n")
    with register_op("seamlate:mul", lhs="a", rhs="b"), register_op("seamlate:kind", lhs=0, rhs=1):
        with intercept():
            pass  # the library is not there yet
        late = importlib.import_module("seamlate")
        with (
            pytest.warns(
                OpInterceptWarning,
                match="only functions that compute before they return can be declared, got seamlate:",
            ),
            intercept(),
        ):
            assert (late.mul, late.kind, library.__spec__.parent) == (None, int, "")


def test_a_function_that_other_code_moves_in_a_block_is_restored_where_it_is(library: Any, user: Any) -> None:
    original = library.mul
    for _ in range(3):
        with intercept():
            pass
    with (
        pytest.warns(OpInterceptWarning, match="other code has replaced seamlib:mul"),
        intercept(),
    ):
        user.kept, library.mul = library.mul, print  # as many references as before
    assert user.kept is original
    library.mul = original


def test_a_name_that_takes_the_place_of_another_is_found(library: Any, user: Any) -> None:
    for _ in range(3):
        with intercept():
            pass
    library.taken = user.times
    del user.times
    assert len(recorded(lambda: library.taken(A, B))) == 1
    user.times = library.taken


def test_a_function_in_c_as_a_method_is_called_without_the_object(library: Any) -> None:
    library.Layer.mm = torch.mm
    with register_op("seamlib:Layer.mm", lhs=0, rhs=1):
        (call,) = recorded(lambda: library.Layer(B).mm(A, B))
    assert call.gemm[:4] == (1, 2, 4, 3)
    assert library.Layer.mm is torch.mm


def test_hooks_do_not_run_for_fake_tensors_and_proxies(library: Any) -> None:
    seen: list[str] = []
    with intercept(lambda call: seen.append(call.op)):
        with FakeTensorMode() as mode:
            library.mul(mode.from_tensor(A), mode.from_tensor(B))
        traced = torch.fx.symbolic_trace(lambda a, b: library.mul(a, b))
        torch.vmap(lambda a: library.mul(a, B))(A[None])
    assert seen == ["aten::mm"]  # which vmap runs with plain tensors
    assert traced(A, B).equal(A @ B)


def test_a_call_that_a_hook_stopped_has_no_backward_calls(library: Any) -> None:
    class Once:
        reads = ("record",)
        done = False

        def pre(self, call: Any) -> None:
            if not self.done:
                self.done = True
                raise RuntimeError("once")

    recorder, x = hooks.Recorder(), torch.ones(2, 3, requires_grad=True)
    with intercept([recorder, Once()]):
        with pytest.raises(RuntimeError, match="once"):
            library.mul(x, B)
        y, z = torch.mm(x, B), torch.mm(x * 2, B)
        with torch.no_grad():
            library.mul(A, B)
        (y.sum() + z.sum()).backward()
    assert {call.forward for call in recorder.records if call.phase == "backward"} == {1, 2}


def test_hooks_run_below_autocast_and_the_function_in_it(library: Any) -> None:
    seen: list[torch.dtype] = []
    with torch.autocast("cpu"), intercept(lambda call: seen.append((A @ B).dtype)):
        y = library.mul(A, B)
    assert (seen, y.dtype) == ([torch.float32], torch.bfloat16)


def test_a_block_that_watches_no_function_replaces_none(library: Any) -> None:
    original = library.mul
    with intercept(ops="bmm"):
        assert library.mul is original
        with intercept(ops="seamlib:mul"):
            assert library.mul is not original


def test_a_variable_that_had_the_function_for_a_while_is_no_matter(library: Any, user: Any) -> None:
    with intercept():
        user.times = print
    assert user.times is print
    user.times = library.mul


def test_a_forked_child_has_the_function_itself(library: Any) -> None:
    original = library.mul
    with intercept():
        child = os.fork()
        if child == 0:
            os._exit(0 if library.mul is original else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert library.mul is not original


def test_a_replaced_function_can_be_pickled_and_says_what_it_is(library: Any) -> None:
    with intercept():
        assert pickle.loads(pickle.dumps(library.mul)) is library.mul
        assert (library.mul.__name__, library.mul.__doc__) == ("mul", "The product of two matrices.")


def test_hooks_do_not_run_for_tensors_without_values(library: Any) -> None:
    assert not recorded(lambda: library.mul(A.to("meta"), B.to("meta")))


def test_hooks_do_not_see_the_functions_that_they_call(library: Any) -> None:
    seen: list[str] = []

    def hook(call: Any) -> None:
        seen.append(call.op)
        library.mul(A, B)

    with intercept(hook):
        library.mul(A, B)
    assert seen == ["seamlib:mul"]


def test_compiled_code_sees_through_a_function_without_a_graph_break(library: Any) -> None:
    compiled = torch.compile(lambda a, b: library.mul(a, b).relu(), backend="aot_eager", fullgraph=True)
    y: list[torch.Tensor] = []
    assert ops_of(lambda: y.append(compiled(A, B))) == ["aten::mm"]
    assert y[0].equal(library.mul(A, B).relu())


def test_a_function_object_is_found_by_its_name(library: Any) -> None:
    with register_op(library.anything, lhs=0, rhs="b") as registration:
        assert registration.name == "seamlib:anything"
        (call,) = recorded(lambda: library.anything(A, b=B))
    assert call.gemm[:4] == (1, 2, 4, 3)


ONLY = "^only functions that compute before they return can be declared, got {}, which is "
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no such function": ("seamlib:mull", "b", "the module seamlib must have what is declared, but it has no mull"),
    "no place": (lambda a, b: a @ b, "b", "a function must be found under its name in its module, got <function"),
    "a class": ("seamlib:Layer", "b", ONLY.format("seamlib:Layer")),
    "a number": ("seamlib:VALUE", "b", ONLY.format("seamlib:VALUE")),
    "a coroutine": ("seamlib:late", "b", ONLY.format("seamlib:late")),
    "a method of a type": ("builtins:str.join", 1, ONLY.format("builtins:str.join")),
    "a method of a tensor": ("torch._C:TensorBase.matmul", 1, ONLY.format("torch._C:TensorBase.matmul")),
    "a second name": (
        "seamuser:times",
        "b",
        "a function can be declared once, got seamuser:times, which is seamlib:mul",
    ),
    "no such role": ("seamlib:broken", "w", "rhs must be an argument of seamlib:broken, which has a, b; got 'w'"),
}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_function_of_a_module_cannot_be_declared(what: str) -> None:
    declared, rhs, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        register_op(declared, lhs=0, rhs=rhs)


def test_removing_a_registration_ends_the_watching(library: Any) -> None:
    with register_op("seamlib:anything", lhs=0, rhs="b"):
        pass
    assert ops_of(lambda: library.anything(A, b=B)) == ["aten::mm"]


def test_a_layout_that_varies_needs_a_formula(library: Any) -> None:
    def gemm(a: Any, b: Any, **_: Any) -> Any:
        return 1, a[0], b[0], a[1]

    with register_op("seamlib:anything", lhs=0, rhs="b", layout=None, gemm=gemm):
        (call,) = recorded(lambda: library.anything(A, b=B))
    assert call.gemm[:4] == (1, 2, 3, 3)


def test_every_part_of_a_block_that_raises_leaves_the_function_as_it_was(library: Any) -> None:
    original = library.mul
    hook = mock.Mock(spec=["enter", "post"], enter=mock.Mock(side_effect=OSError("full")))
    with pytest.raises(OSError, match="full"), intercept(hook):
        pass
    assert library.mul is original
    block = intercept()
    with pytest.raises(OpInterceptError, match="must be left in the thread"):
        block.__exit__(None, None, None)
    assert library.mul is original


@needs_compiler
@needs_ninja
@pytest.mark.slow
def test_a_function_of_pybind_has_the_parameters_of_its_docstring() -> None:
    module = with_pybind()
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    original = module.mul
    sys.modules["with_pybind"] = module
    with pytest.raises(ValueError, match="must be an argument of with_pybind:mul, which has x, w, scale; got 'b'"):
        register_op("with_pybind:mul", lhs="x", rhs="b")
    with register_op("with_pybind:mul", lhs="x", rhs="w", layout="nk"):
        calls = recorded(lambda: [module.mul(x, w), module.mul(x=x, w=w, scale=2.0)])
    assert [(call.op, call.gemm[:4]) for call in calls] == [("with_pybind:mul", (1, 2, 4, 3))] * 2
    assert module.mul is original
    del sys.modules["with_pybind"]
