"""What each engine is built on, and that it leaves torch's machinery as it was."""

from __future__ import annotations

import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import sampled
import torch
import torch.nn.functional as F
from compiler import ALL_ENGINES as ENGINES
from compiler import BELOW_FUNCTIONS as BELOW
from nets import record
from processes import run_python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only

from opintercept import OpCall, OpInterceptWarning, hooks, intercept
from opintercept._engines import choose, function_mode, kernels, overloads, scope
from opintercept._ops import table

A = torch.randn(4, 4)


def ops_of(program: Callable[[], Any], **options: Any) -> list[str]:
    return [call.op for call in record(program, **options)]


def ancestors(event: Any) -> list[Any]:
    return [] if event.cpu_parent is None else [event.cpu_parent, *ancestors(event.cpu_parent)]


def test_kernel_engine_touches_only_the_operators_it_watches() -> None:
    add, mm, bmm = (torch._C._dispatch_dump_table(f"aten::{name}") for name in ("add.Tensor", "mm", "bmm"))
    with intercept(ops="mm"):
        assert torch._C._dispatch_dump_table("aten::add.Tensor") == add
        assert torch._C._dispatch_dump_table("aten::bmm") == bmm
        assert torch._C._dispatch_dump_table("aten::mm") != mm


def test_kernel_engine_restores_every_operator_of_the_family() -> None:
    names = list(intercept().watcher.keys or ())
    before = {name: torch._C._dispatch_dump_table(name) for name in names}
    with intercept():
        assert {name: torch._C._dispatch_dump_table(name) for name in names} != before
    assert {name: torch._C._dispatch_dump_table(name) for name in names} == before


def test_kernel_engine_watches_single_overloads() -> None:
    calls = record(lambda: [torch.mm(A, A), torch.mm(A, A, out=torch.empty(4, 4))], ops=torch.ops.aten.mm.out)
    assert [call.func for call in calls] == ["aten.mm.out"]


@pytest.mark.parametrize("name", ["add", "aten::add", "aten::add.Tensor", "opintercept_tests::twice"])
def test_kernel_engine_watches_any_operator_by_name(name: str) -> None:
    seen = ops_of(lambda: [torch.add(A, A), torch.ops.opintercept_tests.twice(A)], ops=[name])
    assert seen == [name.partition(".")[0] if "::" in name else f"aten::{name}"]


def test_kernel_engine_passes_numbers_on_as_numbers() -> None:
    # A number does not promote a tensor of integers to float64, a tensor would.
    programs: list[Callable[[torch.Tensor], torch.Tensor]]
    programs = [lambda x: x + 1.5, lambda x: 2 * x, lambda x: x.float().mul_(3), lambda x: x.add(1, alpha=2)]
    x = torch.arange(3)
    expected = [program(x) for program in programs]
    results: list[torch.Tensor] = []
    names = ops_of(lambda: results.extend(program(x) for program in programs), ops=["add", "mul", "mul_"])
    assert [result.dtype for result in results] == [result.dtype for result in expected]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert names == ["aten::add", "aten::mul", "aten::mul_", "aten::add"]


# Torch makes a tensor of a number in each of these, which an operator gets that is no arithmetic one.
NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "copy_": lambda: torch.arange(8)[None, :, None] * 1.0,
    "copysign": lambda: torch.copysign(torch.arange(3), -0.0),
    "remainder": lambda: torch.take_along_dim(torch.arange(6).view(2, 3), torch.tensor([[-1], [0]]), 1),
    "fmod_": lambda: torch.logdet(torch.eye(3, dtype=torch.complex64)),
    "aten::pow.Tensor_Tensor_out": lambda: torch.pow(2.5, torch.arange(3)),
    "mul": lambda: torch.arange(3, dtype=torch.uint8) * True,
    "div": lambda: torch.arange(3) / 2j,
}


@pytest.mark.parametrize("op", NUMBERS)
@pytest.mark.parametrize("engine", BELOW)
def test_an_operator_gets_a_number_as_the_program_gave_it(engine: dict[str, Any], op: str) -> None:
    calls: list[OpCall] = []
    expected = NUMBERS[op]()
    with intercept(calls.append, ops=op, **engine):
        result = NUMBERS[op]()
    assert calls or engine == {"engine": "mode"}  # which does not see what an operator calls
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)


def marked(number: complex) -> torch.Tensor:
    """A tensor that torch has made of a number."""
    factor = torch.zeros((), dtype=torch.complex128, requires_grad=True)
    return (factor * number).grad_fn._saved_other  # type: ignore[no-any-return, union-attr]


def sample(kind: str, tensor: torch.Tensor) -> Any:
    """A value for a parameter."""
    plain = {"number": 2, "int": 1, "SymInt": 1, "float": 0.5, "bool": False, "str": "mean", "Tensor": tensor.clone()}
    plain |= {"List[Tensor]": [tensor.clone(), tensor.clone()], "Optional[Tensor]": tensor.clone()}
    return None if kind.startswith("Optional") and kind not in plain else plain.get(kind, [1])


def with_numbers(overload: torch._ops.OpOverload, number: complex, tensor: torch.Tensor) -> list[Any]:
    """Arguments of an overload, with a number for one of its tensors, for each of them in turn."""
    found = []
    parameters = overload._schema.arguments
    for place, chosen in enumerate(parameters):
        kind = str(chosen.type)
        if "Tensor" not in kind or chosen.is_out or (chosen.alias_info and chosen.alias_info.is_write):
            continue
        args, kwargs = list[Any](), dict[str, Any]()
        for index, parameter in enumerate(parameters):
            if index == place:
                value: Any = [marked(number), tensor.clone()] if "List" in kind else marked(number)
            elif parameter.has_default_value():
                if parameter.kwarg_only or index > place:
                    continue
                value = parameter.default_value
            elif parameter.is_out:
                value = torch.empty(0, dtype=tensor.dtype)
            else:
                value = sample(str(parameter.type), tensor)
            if parameter.kwarg_only:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        found.append((args, kwargs))
    return found


def outcomes(overload: torch._ops.OpOverload, number: complex) -> list[str]:
    """What an overload makes of each, as text that has every bit."""
    found = []
    for tensor in (torch.full((2, 2), 1.5), torch.ones(3, dtype=torch.float16), torch.tensor([1, 0])):
        for args, kwargs in with_numbers(overload, number, tensor):
            torch.manual_seed(0)
            try:
                output = overload(*args, **kwargs)
            except Exception:
                found.append("raises")
            else:
                found.append(repr(tree_map_only(torch.Tensor, exact, output)))
    return found


def exact(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor)
    return tensor.dtype, tensor.shape, tensor.resolve_conj().resolve_neg().tolist()


# These read or leave memory that nobody has written, or write out of bounds.
UNSAFE = r"^_|empty|new_|resize|^set|sparse|quantize|mkldnn|cudnn|miopen|mps|nested|rand|as_strided"
# Torch reduces a tensor that it has made of a number to a random value.
UNSAFE += r"|^(sum|mean|prod|amax|amin|aminmax|all|any|linalg__powsum|linalg_vector_norm|norm|nansum|logsumexp)$"


def takes_numbers(packet: Any) -> list[torch._ops.OpOverload]:
    """The overloads of a packet that kernels can watch, that have tensors, and that are not ours."""
    found = [getattr(packet, name) for name in packet.overloads()]
    return [
        overload
        for overload in found
        if any("Tensor" in str(a.type) for a in overload._schema.arguments)
        and torch._C._dispatch_has_kernel(overload.name())
        and not overloads.is_composite(overload)
        and overloads.is_runnable(overload)
        and not kernels.KERNELS.selects_backend(overload.name())
        and overload._schema.name not in table.OWN
    ]


def compare_numbers(number: complex, engine: Any) -> None:
    """Check that operators make the same of a number in a block."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    safe = sorted(n for name in names if not re.search(UNSAFE, n := name.removeprefix("aten::")))
    chosen = [
        o
        for n in safe
        if sampled.picks(n, 8) and hasattr(torch.ops.aten, n)
        for o in takes_numbers(getattr(torch.ops.aten, n))
    ]
    expected = {overload: outcomes(overload, number) for overload in chosen}
    calls: list[str] = []
    with intercept(lambda call: calls.append(call.op), ops=chosen, engine=engine):
        results = {overload: outcomes(overload, number) for overload in chosen}
    again = {overload: outcomes(overload, number) for overload in chosen}
    differ = [overload for overload in chosen if expected[overload] == again[overload] != results[overload]]
    assert differ == []
    worked = sum(set(each) != {"raises"} for each in expected.values())
    assert worked > len(chosen) / 6
    assert len(calls) > worked


@pytest.mark.slow
@pytest.mark.parametrize("number", [0.1, 2j], ids=str)
def test_every_operator_makes_the_same_of_a_number_for_a_tensor(number: complex) -> None:
    # In a process of its own: not every operator checks all that it is given here.
    program = f"""
import runpy, sys
sys.path[:] = {sys.path!r}
import sampled
sampled.on = {sampled.on}
runpy.run_path({__file__!r})["compare_numbers"]({number!r}, {choose.ENGINES["kernel"].name!r})
"""
    done = run_python("-W", "ignore", "-c", program)
    assert done.returncode == 0, done.stderr[-5000:]


@torch.library.custom_op("opintercept_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x) * 2


def test_kernel_engine_sees_what_vmap_grad_and_jvp_run() -> None:
    recorder = hooks.Recorder()
    interceptor = intercept(recorder)
    watched = {name.partition(".")[0] for name in interceptor.watcher.keys or ()}
    batch = torch.randn(3, 4, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ A).tanh().sum()

    # functorch calls an operator again for each of its levels; the innermost ones compute.
    with profile(activities=[ProfilerActivity.CPU]) as profiler, interceptor:
        torch.func.vmap(torch.mm)(batch, batch)
        torch.func.grad(loss)(A)
        torch.func.vmap(torch.func.grad(loss))(batch)
        torch.func.jvp(loss, (A,), (A,))
        torch.func.hessian(loss)(A[0])
    events = [event for event in profiler.events() if event.name in watched]
    above = {ancestor for event in events for ancestor in ancestors(event)}
    innermost = sorted((event for event in events if event not in above), key=lambda event: event.time_range.start)
    assert [call.op for call in recorder.records] == [event.name for event in innermost]
    assert len(innermost) > 10


@pytest.mark.parametrize("engine", BELOW)
def test_tensors_without_values_pass_unseen(engine: dict[str, Any]) -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, **engine):
        meta = torch.randn(2, 3, device="meta") @ torch.randn(3, 4, device="meta")
        with FakeTensorMode() as fake:
            faked = fake.from_tensor(A) @ fake.from_tensor(A)
    assert (meta.shape, faked.shape) == ((2, 4), (4, 4))
    assert recorder.records == []


@pytest.mark.parametrize("engine", BELOW)
def test_a_wrapper_subclass_gives_a_call_for_each_product_that_runs(engine: dict[str, Any]) -> None:
    pair: Any = TwoTensor(A, A + 1)
    out: list[Any] = []
    assert ops_of(lambda: out.append(pair @ pair), **engine) == ["aten::mm"] * 2
    assert torch.equal(out[0].b, (A + 1) @ (A + 1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", ["inside", "outside"])
def test_compile_makes_the_same_graph_once(engine: dict[str, Any], first: str) -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append([node.op.partition("_")[0] for node in graph.graph.nodes])
        return graph.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x @ A).sin() + 1

    expected = model(A)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    if first == "outside":
        compiled(A)
    with intercept(lambda call: None, **engine):
        assert torch.equal(compiled(A), expected)
        assert torch.equal(compiled(A), expected)
    assert torch.equal(compiled(A), expected)
    # A function mode is part of what Dynamo guards on: one graph with it, one without, alike.
    assert len(graphs) == (2 if "level" in engine else 1)
    assert all(graph == graphs[0] for graph in graphs)


def multiply(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, A)


multiply_uncompiled: Callable[[torch.Tensor], torch.Tensor] = torch.compiler.disable(multiply, recursive=False)


def after_a_graph_break(x: torch.Tensor) -> Any:
    y = x.sin()
    torch._dynamo.graph_break()
    return torch.linalg.matrix_exp(y).to_sparse().to_dense()


def in_a_frame_that_is_not_compiled(x: torch.Tensor) -> torch.Tensor:
    return multiply_uncompiled(x.sin())


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("model", [after_a_graph_break, in_a_frame_that_is_not_compiled])
def test_dynamo_leaves_hooks_alone(model: Any, engine: dict[str, Any]) -> None:
    frames: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        frames.append(" ".join(node.name for node in graph.graph.nodes))
        return graph.forward

    def hook(call: OpCall) -> None:
        call.output.cos()

    def compile_and_run() -> None:
        torch._dynamo.reset()
        compiled: Callable[..., Any] = torch.compile(model, backend=backend)
        compiled(A)

    compile_and_run()
    plain = list(frames)
    frames.clear()
    with intercept(hook, **engine):
        compile_and_run()
    assert frames == plain


@pytest.mark.parametrize("engine", ENGINES)
def test_a_traced_graph_has_none_of_the_operators_of_hooks(engine: dict[str, Any]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, A).relu()

    def hook(call: OpCall) -> None:
        call.output.abs().mul(2)

    plain = torch.fx.experimental.proxy_tensor.make_fx(model)(A).code
    with intercept(hook, **engine):
        assert torch.fx.experimental.proxy_tensor.make_fx(model)(A).code == plain


def test_mode_engine_takes_higher_order_operators() -> None:
    yes = torch.tensor(True)
    with intercept(engine="mode") as interceptor:
        out = torch.cond(yes, lambda x: x @ x, lambda x: x + 1, (A,))
    assert torch.equal(out, A @ A)
    assert interceptor.opaque == {"higher_order::cond": 1}


def test_mode_engine_sees_every_operator_on_request() -> None:
    assert ops_of(lambda: torch.zeros(2).relu(), ops="all", engine="mode") == ["aten::zeros", "aten::relu"]


def test_mode_engine_calls_a_fused_operator_opaque() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), intercept(engine="mode") as interceptor:
        layer(torch.randn(2, 3, 8))
    assert interceptor.opaque == {"aten::_transformer_encoder_layer_fwd": 1}


def test_function_level_sees_every_function_but_no_attribute_on_request() -> None:
    assert ops_of(lambda: torch.relu(A).shape, level="function", ops="all") == ["torch.relu"]


@pytest.mark.parametrize("op", [torch.mm, "mm", "torch.mm"], ids=["function", "short", "public"])
def test_function_level_takes_functions_and_names(op: Any) -> None:
    assert ops_of(lambda: [torch.mm(A, A), torch.matmul(A, A)], level="function", ops=[op]) == ["torch.mm"]


def test_function_level_replacement_is_differentiated() -> None:
    x = A.clone().requires_grad_()
    with intercept(lambda call: call.output * 3, level="function", ops="mm"):
        (gradient,) = torch.autograd.grad(torch.mm(x, A).sum(), x)
    (expected,) = torch.autograd.grad((torch.mm(x, A) * 3).sum(), x)
    assert torch.equal(gradient, expected)


def test_dispatch_level_replacement_is_a_straight_through_edit() -> None:
    def triple_forward(call: OpCall) -> torch.Tensor | None:
        return call.output * 3 if call.phase == "forward" else None

    x = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad(torch.mm(x, A).sum(), x)
    for engine in ("kernel", "mode"):
        with intercept(triple_forward, engine=engine, ops="mm"):
            out = torch.mm(x, A)
            (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, torch.mm(A, A) * 3)
        assert torch.equal(gradient, expected)


def added(form: str) -> torch.Tensor:
    """The sum of A and its square, as the caller finds it."""
    if form == "plain":
        return torch.addmm(A, A, A)
    result = torch.empty(4, 4) if form == "out" else A.clone()
    if form == "out":
        torch.addmm(A, A, A, out=result)
    else:
        result.addmm_(A, A)
    return result


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["plain", "out", "in place"])
def test_a_replacement_reaches_the_tensor_that_the_caller_reads(engine: dict[str, Any], form: str) -> None:
    expected = added("plain").t()
    with intercept(lambda call: call.output.t(), **engine):  # a view of what it goes into
        result = added(form)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["plain", "out", "in place"])
def test_replaced_inputs_are_multiplied_and_the_caller_reads_the_result(engine: dict[str, Any], form: str) -> None:
    class Doubles:
        def pre(self, call: OpCall) -> tuple[Any, Any]:
            out = {"out": torch.empty(4, 4)} if "out" in call.kwargs else {}
            return tuple(arg * 2 for arg in call.args), {**call.kwargs, **out}

    with intercept(Doubles(), **engine):
        result = added(form)
    assert torch.equal(result, torch.addmm(A * 2, A * 2, A * 2))


def test_function_level_warns_once_that_the_fused_path_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_mode, "_warned", False)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with intercept(level="function"), torch.no_grad():
        with warnings.catch_warnings(action="error"):
            attention.train()(x, x, x)
        with pytest.warns(OpInterceptWarning, match="function level turns off the fused path of nn.MultiheadAttention"):
            attention.eval()(x, x, x)
        with warnings.catch_warnings(action="error"):
            attention(x, x, x)


def test_idle_kernels_pass_calls_on() -> None:
    with intercept(lambda call: None):
        assert "aten::bmm" in kernels.KERNELS.installed
        assert record(lambda: torch.bmm(A[None], A[None]), ops="mm") == []


@pytest.mark.parametrize("engine", BELOW)
def test_backward_calls_are_told_from_forward_ones(engine: dict[str, Any]) -> None:
    phases: list[str] = []
    x = A.clone().requires_grad_()
    with intercept(lambda call: phases.append(call.phase), **engine):
        calls = record(lambda: torch.mm(x, x).sum().backward(), **engine)
    assert phases == [call.phase for call in calls] == ["forward", "backward", "backward"]


@pytest.mark.parametrize("what", ["the product", "a view of it"])
def test_a_gradient_is_still_stolen_and_not_copied(what: str) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(8, 64)

    def operators(watch: bool) -> list[str]:
        weight.grad = None
        loss = (x @ weight if what == "the product" else F.linear(x, weight)).sum()
        block = intercept(hooks.Recorder()) if watch else nullcontext()
        with profile(activities=[ProfilerActivity.CPU]) as profiler, block:
            loss.backward()
        return sorted(event.name for event in profiler.events())

    assert operators(watch=True) == operators(watch=False)


@pytest.mark.slow
def test_an_interceptor_may_be_made_while_another_thread_installs_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    installation = kernels.Kernels.installation
    installing, made = threading.Event(), []

    def slow(self: kernels.Kernels, *args: Any) -> Callable[[], Any]:
        install = installation(self, *args)

        def installed() -> Any:
            done = install()
            installing.set()
            time.sleep(0.2)  # the dispatcher has the kernel, and nothing else says that it is ours
            return done

        return installed

    def make() -> None:
        assert installing.wait(30)
        made.append(intercept(ops="installs::now"))

    monkeypatch.setitem(choose.ENGINES, "kernel", kernels.KernelEngine("kernel"))  # with --compiled, too
    monkeypatch.setattr(kernels.Kernels, "installation", slow)
    with torch.library._scoped_library("installs", "FRAGMENT") as library:  # kernels of others may still be in
        library.define("now(Tensor x) -> Tensor")
        library.impl("now", torch.sin, "CPU")
        maker = threading.Thread(target=make)
        maker.start()
        with intercept(ops="installs::now", engine="kernel"):
            maker.join()
        assert len(made) == 1
        with intercept(ops="installs::now"):  # no other thread is there now, and the kernels go
            pass


def test_the_scope_of_a_thread_is_kept_alive_and_let_go() -> None:
    held = scope.Scope()
    before = sys.getrefcount(held)
    for _ in range(2):
        scope.put(held)
        assert sys.getrefcount(held) == before + 1
    scope.put(scope.state.idle)
    assert sys.getrefcount(held) == before
