"""What is special about kernels in C++: how they are taken out, and that a hook gets what it gets in Python.

`pytest --compiled` runs all other tests of the kernel engine with them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from compiler import needs_compiler
from hypothesis import HealthCheck, given, settings
from nets import record
from threads import run_threads
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from opintercept import OpCall, OpInterceptWarning, hooks, intercept
from opintercept._blocks.intercept import Interceptor
from opintercept._core import record as _record
from opintercept._engines import compiled, kernels
from opintercept._origin import stack

pytestmark = [pytest.mark.slow, needs_compiler]
A, B = torch.randn(4, 4), torch.randn(4, 4)
X = torch.randn(2, 3, 4)


def watch(*hooks: Any, **options: Any) -> Interceptor:
    return intercept(hooks, engine="compiled", **options)


def test_every_operator_of_the_family_is_restored() -> None:
    names = list(watch().watcher.keys or ())
    before = {name: torch._C._dispatch_dump(name) for name in names}
    for _ in range(2):
        with watch():
            inside = {name: torch._C._dispatch_dump(name) for name in names}
        assert {name: torch._C._dispatch_dump(name) for name in names} == before
    python = [name for name in names if "BackendSelect: opintercept" not in inside[name]]
    # Those with a dtype among their arguments, which C++ leaves to Python.
    assert all("BackendSelect: registered at" in inside[name] for name in python)
    assert "aten::mm" not in python
    assert len(python) < len(names) / 3


@pytest.mark.parametrize("first", ["kernel", "compiled"])
def test_kernels_of_either_kind_serve_blocks_of_both(first: str) -> None:
    outer = hooks.Recorder()
    (second,) = {"kernel", "compiled"} - {first}
    with intercept(outer, engine=first):  # type: ignore[arg-type]
        inner = record(lambda: torch.mm(A, B), engine=second)
    assert [call.op for call in outer.records + inner] == ["aten::mm"] * 2
    assert not kernels.KERNELS.installed


def test_idle_kernels_in_python_make_way_for_compiled_ones(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--compiled"):
        pytest.skip("no kernel is one in Python then")
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    found = []
    with intercept():
        thread.start()
        found.append(torch._C._dispatch_dump("aten::mm"))
    with watch():  # that thread might be running one
        found.append(torch._C._dispatch_dump("aten::mm"))
    leave.set()
    thread.join()
    with watch():
        found.append(torch._C._dispatch_dump("aten::mm"))
    assert not kernels.KERNELS.installed
    assert ["BackendSelect: opintercept" in table for table in found] == [False, False, True]


def test_a_block_that_is_left_under_a_kernel_leaves_the_kernels_in_place() -> None:
    @torch.library.custom_op("opintercept_tests::leaves", mutates_args=())
    def leaves(x: torch.Tensor) -> torch.Tensor:
        pause.__exit__(None, None, None)
        block.__exit__(None, None, None)
        return x.clone()

    block = watch(ops=["mm", "opintercept_tests::leaves"])
    block.__enter__()
    pause = block.paused()
    pause.__enter__()
    torch.ops.opintercept_tests.leaves(A)
    assert "aten::mm" in kernels.KERNELS.installed
    with watch(ops="mm"):
        pass
    assert not kernels.KERNELS.installed


# Calls whose arguments and outputs are of every kind that the dispatcher has.
CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "mm": ("mm", lambda: torch.mm(A, B)),
    "out": ("mm", lambda: torch.mm(A, B, out=torch.empty(4, 4))),
    "default numbers": ("addmm", lambda: torch.addmm(A, A, B, beta=1, alpha=1)),
    "equal to the defaults": ("addmm", lambda: torch.addmm(A, A, B, beta=1.0, alpha=True)),
    "other numbers": ("addmm", lambda: torch.addmm(A, A, B, beta=2, alpha=0.5)),
    "one number": ("addmm", lambda: torch.addmm(A, A, B, alpha=3)),
    "in place": ("addmm_", lambda: torch.ones(4, 4).addmm_(A, B)),
    "parameter": ("mm", lambda: torch.mm(torch.nn.Parameter(A), B)),
    "number that is a tensor": ("add", lambda: A + 1),
    "complex number": ("mul", lambda: A * 2j),
    "list of tensors": ("cat", lambda: torch.cat([A, B], 1)),
    "list of tensors out": ("unbind", lambda: torch.unbind(A)),
    "list of tensors in and out": ("_foreach_add", lambda: torch._foreach_add([A, B], [B, A], alpha=2)),
    "no output": ("_foreach_add_", lambda: torch._foreach_add_([A.clone()], [B])),
    "several outputs": ("topk", lambda: torch.topk(A, 2)),
    "integers": ("sum.dim_IntList", lambda: A.sum((0, 1), keepdim=True)),
    "dtype": ("sum.dim_IntList", lambda: A.sum(0, dtype=torch.float64)),
    "memory format": ("clone", lambda: X[None].clone(memory_format=torch.channels_last)),
    "missing numbers": ("clamp", lambda: torch.clamp(A, max=0.5)),
    "missing tensors": ("index", lambda: X[:, [0, 1]]),
    "text": ("div", lambda: torch.div(A, B, rounding_mode="floor")),
    "missing bias": ("convolution", lambda: F.conv1d(X, torch.ones(1, 3, 2))),
    "symbols": ("view", lambda: A.view(2, -1)),
}


def shape_of(value: Any) -> Any:
    """A value as a hook sees it: types all the way down, and tensors by what tells them apart."""
    if isinstance(value, torch.Tensor):
        known = next((name for name, tensor in (("A", A), ("B", B), ("X", X)) if value is tensor), None)
        return type(value), known, value.dtype, value.stride(), value.requires_grad, value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(item) for item in value]
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    return type(value), value


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_gets_the_arguments_and_outputs_that_it_gets_in_python(name: str) -> None:
    op, program = CALLS[name]
    seen: dict[str, list[Any]] = {"kernel": [], "compiled": []}
    for engine, found in seen.items():

        def keep(call: OpCall, found: list[Any] = found) -> None:
            found.append((call.args, call.kwargs, call.output))

        with intercept(keep, ops=op, engine=engine):  # type: ignore[arg-type]
            result = program()
        found[:] = [shape_of(item) for item in found]
        found.append(shape_of(result))
    assert len(seen["kernel"]) == 2
    assert seen["compiled"] == seen["kernel"]


class _ChangesList:
    """Changes the lists of a call where they are, which no engine is told of."""

    def pre(self, call: OpCall) -> None:
        for value in call.args:
            if isinstance(value, list):
                value.reverse()

    def post(self, call: OpCall) -> None:
        if isinstance(call.output, list):
            call.output.reverse()


class _Replaces:
    def pre(self, call: OpCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert call.lhs is not None
        assert call.rhs is not None
        swapped = {id(call.lhs): call.rhs, id(call.rhs): call.lhs}
        return tuple(swapped.get(id(a), a) for a in call.args), {k: v for k, v in call.kwargs.items() if k != "alpha"}


@pytest.mark.parametrize(
    ("name", "hook"),
    [(name, _ChangesList) for name in CALLS]
    + [(name, _Replaces) for name in CALLS if CALLS[name][0] in ("mm", "addmm")],
)
def test_what_a_hook_changes_has_the_same_effect_as_in_python(name: str, hook: Callable[[], Any]) -> None:
    op, program = CALLS[name]
    results = {}
    for engine in "kernel", "compiled":
        with intercept(hook(), ops=op, engine=engine):
            results[engine] = shape_of(program())
    assert results["compiled"] == results["kernel"]


def test_an_exception_of_the_operator_is_the_same_with_and_without_hooks() -> None:
    errors: list[BaseException] = []
    hook = types.SimpleNamespace(error=lambda call, exception: errors.append(exception))
    with watch(hook), pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as watched:
        torch.mm(A, torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as bare:
        torch.mm(A, torch.ones(3, 4))
    assert str(watched.value) == str(bare.value)
    assert type(watched.value) is type(bare.value)
    assert [watched.value] == errors


class _OwnError(Exception):
    pass


def test_an_exception_raised_in_python_passes_through_as_it_is() -> None:
    raised = _OwnError("from inside")

    @torch.library.custom_op("opintercept_tests::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise raised

    with watch(lambda call: None, ops="opintercept_tests::raises"), pytest.raises(_OwnError, match="inside") as caught:
        torch.ops.opintercept_tests.raises(A)
    assert caught.value is raised
    failing = watch(lambda call: 1 / 0)
    with failing, pytest.raises(ZeroDivisionError, match="division by zero") as divided:
        torch.mm(A, B)
    assert "opintercept: raised by post hook" in divided.value.__notes__[0]
    with failing, failing.paused():
        assert torch.equal(torch.mm(A, B), A @ B)  # the scope is that of before


def test_what_a_traceback_keeps_of_a_call_does_not_run_it_again() -> None:
    with watch(lambda call: None), pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as caught:
        torch.mm(A, torch.ones(3, 4))
    frame = next(entry.frame for entry in caught.traceback if entry.name == "run").f_locals
    with pytest.raises(RuntimeError, match="the operator has returned"):
        frame["invoke"](frame["head"], A, B)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_call_keeps_no_tensor_when_it_is_over(fails: bool) -> None:
    def fail(call: OpCall) -> None:
        if fails:
            raise _OwnError

    lhs, out = torch.randn(4, 4), torch.empty(4, 4)
    gone = weakref.ref(lhs), weakref.ref(out)
    with watch(fail):
        with contextlib.suppress(_OwnError):
            torch.mm(lhs, B, out=out)
        del lhs, out
        assert [ref() for ref in gone] == [None, None]


def test_threads_that_entered_nothing_are_seen_only_by_blocks_for_all() -> None:
    mine, everyones = hooks.Recorder(), hooks.Recorder()
    message = r"other threads ran watched operators 2 times.* threads=\"all\""
    with pytest.warns(OpInterceptWarning, match=message), watch(mine):
        run_threads(lambda: torch.mm(A, B))
        with watch(everyones, threads="all"):
            run_threads(lambda: torch.mm(A, B))
        run_threads(lambda: torch.mm(A, B))
    assert (len(mine.records), len(everyones.records)) == (0, 1)


def test_a_child_process_has_blocks_of_its_own() -> None:
    with watch():
        child = os.fork()
        if not child:
            seen = hooks.Recorder()
            torch.mm(A, B)
            with watch(seen):
                torch.mm(A, B)
            os._exit(0 if len(seen.records) == 1 and not kernels.KERNELS.installed else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_autograd_and_inference_mode_are_seen_as_by_kernels_in_python() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

    def run() -> None:
        torch.utils.checkpoint.checkpoint(model, A, use_reentrant=False).sum().backward()
        with torch.inference_mode():
            model(A)

    in_python, in_cpp = (
        [(r.op, r.phase, r.module, r.forward, r.grad_of) for r in record(run, engine=engine)]
        for engine in ("kernel", "compiled")
    )
    assert in_cpp == in_python
    assert {phase for _, phase, *_ in in_cpp} == {"forward", "recompute", "backward"}


def test_dynamo_compiles_nothing_that_kernels_call() -> None:
    torch._dynamo.reset()
    block = watch(lambda call: None)

    def function(x: torch.Tensor) -> torch.Tensor:
        with block:
            y = torch.mm(x, x)
        return y.sin()

    counters.clear()
    for _ in range(2):
        torch.compile(function, backend="eager")(A)
    # The function and what comes after each break of its graph.
    assert counters["frames"]["total"] <= 6


def test_compiled_graphs_run_under_compiled_kernels_without_a_recompilation() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(lambda x: torch.mm(x, x).relu(), backend=counter)
    calls = record(lambda: [step(A), step(A)], engine="compiled")
    step(A)
    assert (counter.frame_count, [call.op for call in calls]) == (1, ["aten::mm"] * 2)


class _Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)


class _Closure(nn.Module):
    """Its `self` lies in a cell, and it calls its part in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = _Leaf()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[Callable[[], torch.Tensor]] = [
            lambda: self.leaf(x),
            lambda: self.leaf.forward(x),
            lambda: torch.mm(x, x),
        ]
        each = [part() for part in parts] + list(map(self.leaf, [x]))
        return torch.stack([*each, *(self.leaf(y) for y in (x, x))]).sum(0)


def _decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class _Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = _Closure()

    @_decorated
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)  # type: ignore[no-any-return]


class _Deletes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = _Decorated()
        del self
        return part(x) + part.forward(x)  # type: ignore[no-any-return]


def _under(first: object, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the name `forward` for any object, that calls another one."""

    def forward(self: object, x: torch.Tensor) -> Any:
        return function(x)

    return functools.partial(forward, first)


def _borrowed(decorate: Callable[..., Any], *hooks: Callable[..., Any]) -> nn.Module:
    """A module with the forward of another one."""
    module = nn.Module()
    module.forward = decorate(_Leaf().forward)
    for hook in hooks:
        module.register_forward_hook(hook)
    return module


class _Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _named_only(**arguments: Any) -> torch.Tensor:
    def forward(*, self: object, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    return forward(**arguments)


def _named_forward() -> Callable[..., torch.Tensor]:
    def forward(self: object, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    return forward


def _unpickled_forward() -> Callable[..., torch.Tensor]:
    """As cloudpickle makes one: the name of its code is another string than the one in the source."""
    forward = _named_forward()
    forward.__code__ = forward.__code__.replace(co_name="".join(["for", "ward"]))
    return forward


WALKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no module": lambda x: torch.mm(x, x),
    "a leaf": _Leaf(),
    "forward called directly": _Leaf().forward,
    "a closure": _Closure(),
    "a closure called directly": _Closure().forward,
    "a decorator": _Decorated(),
    "a decorator called directly": _Decorated().forward,
    "a module that is no longer a local": _Deletes(),
    "another's method": _borrowed(lambda forward: forward),
    "another's method under a decorator": _borrowed(_decorated),
    "another's method under a decorator and a hook": _borrowed(_decorated, lambda *_: None),
    "another's method under a hook": _borrowed(lambda forward: forward, lambda *_: None),
    "a function of that name": functools.partial(_named_forward(), "no module"),
    "a function of that name for a module": functools.partial(_named_forward(), _Leaf()),
    "a function of that name for a cell": functools.partial(_named_forward(), types.CellType(_Leaf())),
    "a function of that name with names only": lambda x: _named_only(self=_Leaf(), x=x),
    "a function of that name from a pickle": functools.partial(_unpickled_forward(), _Leaf()),
    "a function of that name from a pickle, under modules": nn.Sequential(_Calls(_unpickled_forward())),
    "a function of that name for what says it is a module": functools.partial(_named_forward(), Mock(spec=_Leaf())),
    "linear layers": nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))),
    "data parallel": nn.DataParallel(nn.Linear(4, 4)),
    "compiled by Dynamo": torch.compile(_Closure(), backend="eager"),
    "a checkpoint": lambda x: torch.utils.checkpoint.checkpoint(_Leaf(), x, use_reentrant=False),
    "a generator": lambda x: sum(torch.mm(y, y) for y in (x, x)),
}


@pytest.mark.parametrize("engine", ["kernel", "compiled"])
@pytest.mark.parametrize("name", WALKS)
def test_the_walk_in_cpp_finds_what_the_walk_in_python_finds(name: str, engine: str) -> None:
    class Asks(nn.Module):
        def forward(self) -> None:
            found.append((compiled.load().walk(), stack.walk()))

    found: list[tuple[stack.Walked, stack.Walked]] = []
    asks = Asks()

    def hook(call: OpCall) -> None:
        asks()
        found.append((compiled.load().walk(), stack.walk()))

    with intercept(hook, engine=engine), torch.enable_grad():  # type: ignore[arg-type]
        for x in (A, A.clone().requires_grad_()):
            result = WALKS[name](x)
            if result.requires_grad:
                result.sum().backward()
    assert len(found) >= 4
    for cpp, python in found:
        assert cpp[0] is python[0]
        assert cpp[1] is python[1]
        assert cpp[2:] == python[2:]


class _Odd:
    """Raises when asked for its class, and otherwise says that it is a module if it raises only every so many times."""

    def __init__(self, kind: type[Exception], message: str, every: int = 1) -> None:
        self.kind, self.message, self.every, self.asked = kind, message, every, 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        self.asked += 1
        if self.asked % self.every == 0:
            raise self.kind(self.message)
        return nn.Module


def test_the_walk_outside_of_a_call_finds_nothing() -> None:
    assert compiled.load().walk() == (None, None, None, -1) == stack.walk()


def test_the_walk_keeps_nothing() -> None:
    def hook(call: OpCall) -> None:
        for _ in range(100):
            with contextlib.suppress(_OwnError):
                found.append(walk())
        found.clear()

    walk, found = compiled.load().walk, list[Any]()
    # The last one is asked as the outermost module when the innermost one has been taken.
    objects: list[Any] = [_Leaf(), object(), _Odd(_OwnError, "always"), _Odd(_OwnError, "the second time", every=2)]
    leaf, *others = objects
    programs = [leaf, leaf.forward, *(_under(first, function) for first in others for function in (leaf, leaf.forward))]
    before = [sys.getrefcount(each) for each in objects]
    with watch(hook):
        for program in programs:
            program(A)
    assert [sys.getrefcount(each) for each in objects] == before


def test_the_walk_passes_the_first_exception_of_an_odd_class_on() -> None:
    fails, other = _Odd(_OwnError, "asked for its class"), _Odd(AttributeError, "asked another")
    inside = functools.partial(_named_forward(), fails)
    programs: list[Callable[..., Any]] = [
        inside,
        nn.Sequential(_Calls(lambda module, x: inside(x))),
        _under(other, inside),
        _under(other, _under(fails, _Leaf())),
    ]
    for walk in (compiled.load().walk, stack.walk):
        for program in programs:
            with watch(lambda call, walk=walk: walk() and None), pytest.raises(_OwnError, match="asked for its class"):
                program(A)


def test_the_walk_asks_no_class_between_the_innermost_and_the_outermost_module() -> None:
    class Between(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def forward(odd: object) -> torch.Tensor:
                return leaf(x)  # type: ignore[no-any-return]

            return forward(_Odd(_OwnError, "asked for its class"))

    leaf, between = _Leaf(), Between()
    found = []
    with watch(lambda call: found.extend([compiled.load().walk()[:2], stack.walk()[:2]])):
        between(A)
    assert found == [(leaf, between)] * 2


def test_the_walk_passes_over_a_frame_that_is_being_made() -> None:
    def forward(module: object) -> Callable[[], object]:
        return lambda: module  # the garbage collector runs while the cell for it is made

    def collects(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            torch.mm(A, B)

    found: list[tuple[stack.Walked, stack.Walked]] = []
    leaf, before = _Leaf(), gc.get_threshold()
    gc.callbacks.append(collects)
    try:
        with watch(lambda call: found.append((compiled.load().walk(), stack.walk()))):
            gc.set_threshold(1)
            for _ in range(10):
                forward(leaf)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collects)
    assert found
    assert [cpp for cpp, _ in found] == [python for _, python in found]


def test_the_walk_holds_a_module_that_goes_when_asked_for_its_class() -> None:
    class Goes:
        asked = 0

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            self.asked += 1
            if self.asked == 2:  # when the walk has told it and takes it
                drop[0]()
            return nn.Module

    def forward(goes: Any) -> None:
        def drop_it() -> None:
            nonlocal goes
            goes = None

        drop.append(drop_it)
        torch.mm(A, B)

    def hook(walk: Callable[[], Any]) -> None:
        module, root, *_ = walk()
        found.append((module is gone(), module is not None, root))

    for walk in (compiled.load().walk, stack.walk):
        drop: list[Callable[[], None]] = []
        found: list[Any] = []
        goes = Goes()
        gone = weakref.ref(goes)
        with watch(lambda call, walk=walk: hook(walk)):
            hand_over = [goes]
            del goes
            forward(hand_over.pop())
        assert found == [(True, True, None)]


_numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=2))


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 8, 9]), max_size=3))
    tensor = torch.zeros(shape, dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool])))
    change = draw(
        st.sampled_from(["none", "transposed", "expanded", "parameter", "meta", "subclass", "sparse", "inference"])
    )
    if change == "transposed":
        return tensor.movedim(0, -1) if shape else tensor
    if change == "expanded":
        return tensor.expand(3, *shape)
    if change == "parameter":
        return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    if change == "subclass":
        return tensor.as_subclass(torch.nn.Buffer if hasattr(torch.nn, "Buffer") else nn.UninitializedParameter)
    if change == "inference":
        with torch.inference_mode():
            return tensor.clone()
    return tensor.to("meta") if change == "meta" else tensor.to_sparse() if change == "sparse" else tensor


_values = st.one_of(_numbers, _tensors(), st.lists(st.one_of(_tensors(), st.integers(-2, 2)), max_size=2))
_calls = st.tuples(
    st.sampled_from([torch.ops.aten.mm.default, torch.ops.aten.bmm.default]),
    st.lists(_values, max_size=3).map(tuple),
    st.dictionaries(st.sampled_from(["alpha", "beta", "\ud800"]), _values, max_size=2),
    st.one_of(_tensors(), st.lists(_tensors(), max_size=2), st.tuples(_tensors(), _tensors()), st.none()),
)


def _key(look: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    try:
        key = look(*call)
        hash(key)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return key


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_calls, st.lists(_calls, max_size=3))
def test_the_look_in_cpp_finds_alike_what_the_look_in_python_finds_alike(
    call: tuple[Any, ...], others: list[tuple[Any, ...]]
) -> None:
    cpp, python = compiled.load().signature_of, _record.signature_of
    func, args, kwargs, output = call
    # The same again, in other objects, and with one value of another call: what random calls hardly ever have.
    others = [*others, (func, tuple(args), dict(kwargs), output)]
    others += [(func, args, kwargs, other[3]) for other in others] + [
        (func, other[1], kwargs, output) for other in others
    ]
    for other in others:
        keys = [(_key(look, call), _key(look, other)) for look in (cpp, python)]
        assert [one is None for one, _ in keys] == [keys[0][0] is None] * 2
        assert [two is None for _, two in keys] == [keys[0][1] is None] * 2
        if None not in keys[0]:
            assert keys[0][0] != keys[0][1] or keys[1][0] == keys[1][1]
            if repr(call) == repr(other):  # Python takes 1, 1.0 and True for the same
                assert (keys[0][0] == keys[0][1]) == (keys[1][0] == keys[1][1])


def test_the_look_in_cpp_leaves_lists_without_end_to_python() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep):
        for look in (compiled.load().signature_of, _record.signature_of):
            with pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
                look(torch.mm, (value,), {}, A)


def test_the_look_in_cpp_leaves_few_numbers_to_python() -> None:
    for look in (compiled.load().signature_of, _record.signature_of):
        assert look(torch.tensordot, (torch.ones(64, dtype=torch.int64),), {}, A)
        for number in (torch.ones(63, dtype=torch.int64), torch.tensor(1j), torch.ones((), dtype=torch.bool)):
            with pytest.raises(TypeError, match="numbers"):
                look(torch.tensordot, (number,), {}, A)


def test_the_look_in_cpp_tells_calls_apart_by_whatever_a_record_has() -> None:
    base = torch.ones(8, 8)
    changed = [
        base.double(),
        base[:4],
        base.T,
        base.clone().requires_grad_(),
        base.to("meta"),
        base[:, ::2],
        torch.ones(64, dtype=torch.int32),
        torch.ones(64, dtype=torch.int64),
    ]
    values: list[Any] = [base, *changed, None, True, False, 0, 1, 2, 0.0, 2.0, [1, 2], [1], (base,), [[1], 2], 1 << 70]
    look = compiled.load().signature_of
    keys = [look(func, (value,), {}, base) for value in values for func in (torch.mm, torch.bmm)]
    keys += [look(torch.mm, (), {"alpha": value}, base) for value in values]
    keys += [look(torch.mm, (base,), {}, value) for value in values[1:]]
    keys += [look(torch.mm, (), named, base) for named in ({"a": None, "b": None}, {"ankb": None}, {"ab": None})]
    assert len(set(map(repr, keys))) == len(keys)
    assert sum(not isinstance(key, bytes) for key in keys) == 4  # the large number is left to Python
