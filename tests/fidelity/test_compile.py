"""The compilers of torch: interception changes no graph, compiles none twice, and warns about code that it cannot see.

Covers the lines of the tables in docs/paths.md that test_features.py leaves out.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from programs import ENGINES
from seen import Seen, assert_alike, gradients
from torch import Tensor, nn
from torch._dynamo.utils import counters

from opintercept import OpCall, OpInterceptWarning, intercept
from opintercept._engines import blind_spots
from opintercept.hooks import Recorder, Stats

pytestmark = [
    pytest.mark.slow,
    # From torch, which pickles its tree specifications.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

BELOW_AUTOGRAD = pytest.mark.parametrize("engine", ["kernel", "mode"])


# Without its thread pool, which would keep our kernels installed, and with what makes a package quickest to build.
QUICK = {
    "compile_threads": 1,
    "aot_inductor.precompile_headers": False,
    "aot_inductor.compile_wrapper_opt_level": "O0",
}


@pytest.fixture(autouse=True)
def compilers() -> Iterator[None]:
    """Reset the compilers, and set up Inductor as `QUICK` says."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(QUICK):
        yield
    torch._dynamo.reset()


@pytest.fixture
def cxx() -> None:
    """Skip where there is no C++ compiler for Inductor."""
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except torch._inductor.exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler")


def counting(name: str, ran: list[str]) -> Callable[..., Any]:
    """A backend that notes in `ran` each run of one of its graphs."""
    compile_graph = torch._dynamo.lookup_backend(name)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled = compile_graph(graph, inputs)

        def run(*args: Any) -> Any:
            ran.append(name)
            return compiled(*args)

        return run

    return backend


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, compiled: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    return gradients(compiled(x), *model.parameters())


STEP = "addmm addmm mm' mm' mm'"
COMPILED = {
    # torch leaves a function mode on while a compiled graph runs, but not in the backward pass.
    "eager": {"kernel": STEP, "mode": STEP, "function": "linear linear"},
    "aot_eager": {"kernel": STEP, "mode": STEP, "function": "addmm addmm"},
    "inductor": {"kernel": STEP, "mode": STEP, "function": "addmm addmm"},
}


@pytest.mark.usefixtures("cxx")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("first", ["inside", "outside"])
@pytest.mark.parametrize("backend", COMPILED)
def test_compiled_training_is_seen_and_compiled_once(backend: str, first: str, engine: str) -> None:
    x = torch.randn(3, 4)
    model = network()
    plain = train(model, torch.compile(model, backend=backend, fullgraph=True), x)
    torch._dynamo.reset()
    counters.clear()

    model, ran, seen = network(), [], Seen()  # type: ignore[var-annotated]
    compiled = torch.compile(model, backend=counting(backend, ran), fullgraph=True)
    runs = [True, False, True, True, False] if first == "inside" else [False, True, True, False]
    for watched in runs:
        # Dynamo guards on function modes: it makes a graph with the mode and one without.
        known = engine != "function" and len(ran) > 0
        with (
            torch._dynamo.config.patch(error_on_recompile=known),
            intercept(seen, **ENGINES[engine]) if watched else nullcontext(),
        ):
            assert_alike(train(model, compiled, x), plain)
    assert " ".join(seen) == " ".join([COMPILED[backend][engine]] * sum(runs))
    assert len(ran) == len(runs)  # code that ran under a mode can stay eager forever (#190286)
    assert counters["stats"]["unique_graphs"] == (2 if engine == "function" else 1)
    assert not counters["graph_break"]


@BELOW_AUTOGRAD
def test_changing_shapes_compile_the_same_graphs(engine: str) -> None:
    def graphs(watched: bool) -> list[str]:
        torch._dynamo.reset()
        found: list[str] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            found.append(graph.code)
            return graph.forward

        weight = torch.randn(4, 4)
        compiled = torch.compile(lambda x: torch.mm(x, weight).relu(), backend=backend)
        with intercept(Seen(), **ENGINES[engine]) if watched else nullcontext():
            for rows in (3, 5, 7, 1):
                x = torch.randn(rows, 4)
                assert torch.equal(compiled(x), torch.mm(x, weight).relu())
        return found

    assert graphs(watched=True) == graphs(watched=False)


@BELOW_AUTOGRAD
def test_compiled_autograd_runs_the_same_graphs(engine: str) -> None:
    def step(watched: bool) -> tuple[list[Tensor], dict[str, int], Seen]:
        torch._dynamo.reset()
        counters.clear()
        model, seen = network(), Seen()
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled = torch.compile(lambda x: model(x).sum().backward(), backend="aot_eager")
            with intercept(seen, **ENGINES[engine]) if watched else nullcontext():
                compiled(torch.ones(3, 4))
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return found, dict(counters["compiled_autograd"]), seen

    plain, watched = step(watched=False), step(watched=True)
    assert_alike(plain[0], watched[0])
    assert plain[1] == watched[1] != {}
    assert " ".join(watched[2]) == STEP


@BELOW_AUTOGRAD
def test_a_block_does_not_slow_down_compiled_code_after_it(engine: str) -> None:
    x = torch.randn(4, 4)

    def make() -> Callable[[], Any]:
        # Two functions, since Dynamo keeps one cache for each code object.
        scope: dict[str, Any] = {"torch": torch}
        exec("def function(x): return torch.mm(x, x).sin()", scope)
        compiled: Callable[..., Any] = torch.compile(scope["function"], backend="aot_eager", fullgraph=True)
        return lambda: compiled(x)

    never, once = make(), make()
    never()
    for _ in range(3):
        with intercept(Seen(), **ENGINES[engine]):
            once()
    best = {never: float("inf"), once: float("inf")}
    for _ in range(40):  # in turns, since the machine may be busy
        for function in best:
            started = time.perf_counter()
            for _ in range(20):
                function()
            best[function] = min(best[function], time.perf_counter() - started)
    # Twice the noise of the best of 40; a second guarded entry, or eager code under a mode, costs more.
    assert best[once] < 1.3 * best[never]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", ["block", "block made inside", "decorator", "pause"])
def test_a_block_in_a_compiled_function_works_and_is_not_compiled_itself(form: str, engine: str) -> None:
    x, seen = torch.randn(4, 4), Seen()
    interceptor = intercept(seen, **ENGINES[engine])

    def block(x: Tensor) -> Tensor:
        with interceptor:
            y = torch.mm(x, x)
        return y.sin()

    def made_inside(x: Tensor) -> Tensor:
        with intercept(seen, **ENGINES[engine]):
            y = torch.mm(x, x)
        return y.sin()

    @interceptor
    def decorated(x: Tensor) -> Tensor:
        return torch.mm(x, x).sin()

    def pause(x: Tensor) -> Tensor:
        with interceptor.paused():
            y = torch.mm(x, x)
        return y.sin() + torch.mm(x, x)

    function = {"block": block, "block made inside": made_inside, "decorator": decorated, "pause": pause}[form]
    plain = function(x)
    seen.clear()
    compiled = torch.compile(function, backend="eager")
    with interceptor if form == "pause" else nullcontext():
        for _ in range(3):
            assert torch.equal(compiled(x), plain)
    # The function and what comes after each break, not the dozens of frames inside `with`.
    assert counters["frames"]["total"] <= 6
    if engine != "function":
        assert seen == ["mm"] * 3


@BELOW_AUTOGRAD
def test_a_hook_may_run_compiled_code(engine: str) -> None:
    x, largest = torch.randn(4, 4), []
    compiled = torch.compile(lambda t: (t @ t).abs().max(), backend="aot_eager", fullgraph=True)
    with intercept(lambda call: largest.append(compiled(call.output)), **ENGINES[engine]):
        out = torch.mm(x, x)
        torch.mm(x, x)
    assert largest == [(out @ out).abs().max()] * 2
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_export_makes_the_same_program_whose_matmuls_are_seen(strict: bool, engine: str) -> None:
    model, x, seen = network(), torch.randn(3, 4), Seen()
    plain = torch.export.export(model, (x,), strict=strict)
    with intercept(seen, **ENGINES[engine]):
        program = torch.export.export(model, (x,), strict=strict)
    assert seen == []
    assert program.graph_module.code == plain.graph_module.code
    with intercept(seen, **ENGINES[engine]):
        out = program.module()(x)
    assert torch.equal(out, model(x))
    assert seen == (["linear"] * 2 if engine == "function" else ["addmm"] * 2)


@pytest.mark.usefixtures("cxx")
@BELOW_AUTOGRAD
def test_products_that_inductor_turns_into_loops_are_seen(engine: str) -> None:
    def products(x: Tensor) -> tuple[Tensor, Tensor]:
        # Inductor turns outer and inner products into loops, and mv and bmm with single rows too.
        return torch.mm(x, x), torch.mm(x[:, :1], x[:1]) + torch.dot(x[0], x[1])

    x, seen = torch.randn(4, 4), Seen()
    compiled = torch.compile(products)
    compiled(x)
    with intercept(seen, **ENGINES[engine]):
        out = compiled(x)
    torch.testing.assert_close(out, products(x))
    assert seen == ["cpp_fused_add_dot_mm_select_slice_0", "mm"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A product of two matrices, compiled ahead of time and loaded."""
    x = torch.randn(8, 8)

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x)

    path = str(tmp_path_factory.mktemp("aoti") / "product.pt2")
    with torch._inductor.config.patch(QUICK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec.", FutureWarning)
        torch._inductor.aoti_compile_and_package(torch.export.export(Product(), (x,)), package_path=path)
    return torch._inductor.aoti_load_package(path)


@pytest.fixture
def no_warnings_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which warnings were given."""
    monkeypatch.setattr(blind_spots, "_warned", set())


def assert_warns_once(run: Callable[[], Tensor], expected: Tensor, engine: str, name: str, message: str) -> None:
    """Run it outside, in blocks and in a hook: only a run in a block warns, and only once."""
    seen = Seen()
    interceptor = intercept(seen, **ENGINES[engine])

    def hook(call: OpCall) -> None:
        run()

    with warnings.catch_warnings(action="error"):
        torch.testing.assert_close(run(), expected)
    with interceptor, pytest.warns(OpInterceptWarning, match=message):
        torch.testing.assert_close(run(), expected)
    with interceptor, warnings.catch_warnings(action="error"):
        run()
        with interceptor.paused():
            run()
        with intercept(hook, ops="mv"):
            torch.mv(torch.ones(2, 2), torch.ones(2))
    run()
    assert seen == ["mv"]
    assert interceptor.opaque == {name: 2}


@pytest.mark.usefixtures("cxx", "no_warnings_given")
@pytest.mark.parametrize("engine", ENGINES)
def test_an_aotinductor_package_in_a_block_warns(request: pytest.FixtureRequest, engine: str) -> None:
    package, x = request.getfixturevalue("package"), torch.randn(8, 8)
    message = "^an AOTInductor package ran in a block, .* none of its calls are seen"
    assert_warns_once(lambda: package(x), torch.mm(x, x), engine, "inductor::aoti_package", message)


@pytest.mark.usefixtures("cxx", "no_warnings_given")
@pytest.mark.parametrize("engine", ENGINES)
def test_cpp_wrapper_in_a_block_warns(engine: str) -> None:
    x = torch.randn(8, 8)
    compiled = torch.compile(lambda x: torch.mm(x, x), options={"cpp_wrapper": True})
    if engine == "function":  # Dynamo makes another graph for it
        with intercept(**ENGINES[engine]), warnings.catch_warnings(action="ignore"):
            compiled(x)
        blind_spots._warned.clear()
    message = "^code compiled with cpp_wrapper ran in a block, .* none of its calls are seen"
    assert_warns_once(lambda: compiled(x), torch.mm(x, x), engine, "inductor::cpp_wrapper", message)


@pytest.mark.usefixtures("no_warnings_given")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_cuda_graph_is_seen_at_its_capture_and_at_each_replay(engine: str) -> None:
    x = torch.randn(8, 8, device="cuda")
    torch.mm(x, x)  # makes the handle of cuBLAS, which must not happen in a capture
    graph, recorder, stats = torch.cuda.CUDAGraph(), Recorder(), Stats("output")
    with intercept([recorder, stats], graphs=True, **ENGINES[engine]):
        with torch.cuda.graph(graph):
            out = torch.mm(x, x)
        graph.replay()
        assert torch.equal(out, torch.mm(x, x))
    assert [record.replayed for record in recorder.records] == [None, 0, None]
    assert [row.calls for row in stats.rows()] == [2]

    def replay() -> Tensor:
        out.zero_()
        graph.replay()
        return out

    message = "^a CUDA graph was replayed in a block that had not seen it captured"
    assert_warns_once(replay, torch.mm(x, x), engine, "cuda::graph_replay", message)


@pytest.mark.usefixtures("no_warnings_given")
def test_a_replay_warns_whichever_class_the_graph_has(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:  # stands for torch._C._CUDAGraph, which builds for the CPU lack
        def replay(self) -> Tensor:
            return torch.ones(())

    class Graph(Base):
        def replay(self) -> Tensor:
            return super().replay()

    monkeypatch.setattr(torch._C, "_CUDAGraph", Base)
    message = "^a CUDA graph was replayed in a block that had not seen it captured"
    assert_warns_once(Graph().replay, torch.ones(()), "kernel", "cuda::graph_replay", message)


def entries() -> dict[str, Any]:
    """The entry points of torch that a block wraps, as they are now."""
    found = {}
    for path in blind_spots._ENTRIES:
        *owners, attribute = path.split(".")
        owner: Any = torch._C
        for part in owners:
            owner = getattr(owner, part, None)
        found[path] = getattr(owner, "__dict__", {}).get(attribute)
    return found


def test_this_torch_has_the_entry_points_and_a_block_restores_them() -> None:
    before = entries()
    assert {path.partition(".")[0] for path, entry in before.items() if entry} >= {"_aoti"}
    with intercept():
        with intercept(level="function"):
            pass
        inside = entries()
    assert all(inside[path] is not entry for path, entry in before.items() if entry is not None)
    assert entries() == before


def test_a_forked_child_restores_the_entry_points_that_its_parent_wrapped() -> None:
    before = entries()
    with intercept():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                restored = entries() == before
                with intercept():
                    status = 0 if restored and entries() != before else 2
            finally:
                os._exit(status if entries() == before else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
