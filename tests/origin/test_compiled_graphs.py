"""Modules, lines and links of calls in code that torch.compile made."""

from __future__ import annotations

import functools
import gc
import itertools
import textwrap
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import sampled
import torch
import torch._inductor.config
from compiler import needs_compiler
from models import MODELS, inputs_of
from native import run_python
from nets import IN_PAIR, Discriminator, Generator, record
from torch import Tensor, nn

from opintercept import hooks, intercept
from opintercept._origin.graph_places import GraphPlaces

pytestmark = pytest.mark.slow


def helper(x: Tensor, y: Tensor) -> Tensor:
    return x @ y.mT


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = layer(y)
        return helper(y, x)


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Without threads, which outlive the test, without optimisation, and without graphs that another run has left."""
    quick = {"compile_threads": 1, "fx_graph_cache": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with torch._inductor.config.patch(quick):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


class Scaled(nn.Module):
    """Multiplies itself, not by a module that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) @ self.weight


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "strict": lambda model, x: torch.export.export(model, (x,), strict=True).run_decompositions().module(),
    "fx": lambda model, _: torch.fx.symbolic_trace(model),
    "unflattened": lambda model, x: torch.export.unflatten(torch.export.export(model, (x,))),
}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("engine", ["kernel", "mode"])
@pytest.mark.parametrize("make", EXPORTS.values(), ids=EXPORTS)
def test_calls_in_a_graph_of_the_program_have_the_names_of_the_layers(
    make: Callable[[nn.Module, Tensor], Any], engine: str
) -> None:
    model, x = nn.Sequential(Scaled(), nn.Sequential(Scaled())), torch.ones(2, 4)
    made = make(model, x)
    expected = places(lambda: model(x).sum().backward(), engine=engine)
    names = Counter((phase, module) for phase, module, _ in expected.elements())
    assert set(names) == {(phase, each) for phase in ("forward", "backward") for each in NESTED}

    def found(program: Callable[[], Any], prefix: str) -> Counter[tuple[str, str | None]]:
        seen = Counter((r.phase, r.module) for r in record(program, engine=engine) if r.module != "Linear")
        return Counter({(phase, str(module).removeprefix(prefix)): count for (phase, module), count in seen.items()})

    assert found(lambda: made(x).sum().backward(), "") == names
    assert found(lambda: nn.Sequential(nn.Identity(), made)(x).sum().backward(), "1.") == names


NESTED = ("0", "0.inner", "1.0", "1.0.inner")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]


def places(program: Callable[[], Any], **options: Any) -> Counter[tuple[str, str | None, str | None]]:
    return Counter((r.phase, r.module, r.source) for r in record(program, **options))


# Other versions note other things in the code that they make: torch 2.15 tells fewer modules, 2.11 the outermost one.
as_in_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="says what torch 2.13 tells")


@as_in_2_13
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_in_compiled_code_have_the_modules_and_lines_of_eager_code(backend: str) -> None:
    model, x = Encoder(), torch.randn(2, 4, 16)

    def train(model: Any) -> None:
        model(x).sum().backward()

    eager = places(lambda: train(model))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    assert [places(lambda: train(compiled)) for _ in range(2)] == [eager] * 2
    model.eval()  # where one operator runs a whole layer
    with torch.no_grad():
        inference = places(lambda: model(x))
        assert places(lambda: compiled(x)) == inference
    assert inference.total() > 10


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_line_of_torch_stands_for_none_of_the_program(backend: str) -> None:
    """`torch.set_default_device` calls each function from a mode, whose line graphs have then."""
    model, x = Scaled(), torch.randn(2, 4)
    with torch.device("cpu"):
        compiled = torch.compile(model, backend=backend)
        compiled(x).sum().backward()
        found = places(lambda: compiled(x).sum().backward())
    line = Scaled.forward.__code__.co_firstlineno + 1
    sources = {source for _, _, source in found}
    assert sources <= {None, f"test_compiled_graphs.py:{line} in forward"}
    assert {source for phase, _, source in found if phase == "forward"} == sources - {None}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_of_another_model_begin_with_its_class(backend: str) -> None:
    torch._dynamo.reset()
    one, two = Generator(), Discriminator()
    eager = places(lambda: (one(torch.ones(2, 4)) + two(torch.ones(2, 4))).sum().backward())
    first, second = torch.compile(one, backend=backend), torch.compile(two, backend=backend)
    assert places(lambda: (first(torch.ones(2, 4)) + second(torch.ones(2, 4))).sum().backward()) == eager


def test_a_model_that_is_compiled_in_place_keeps_its_names() -> None:
    torch._dynamo.reset()
    model = Generator()
    eager = places(lambda: model(torch.ones(2, 4)))
    model.compile(backend="aot_eager")
    assert places(lambda: model(torch.ones(2, 4))) == eager


def test_nothing_is_said_at_the_end_of_a_program_with_compiled_code() -> None:
    program = """
        import torch
        from opintercept import intercept

        model = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager")
        with intercept(lambda call: [call.module, call.source] and None):
            model(torch.ones(2, 4))
    """
    said = run_python(textwrap.dedent(program))
    assert not any(
        "Exception ignored" in line for line in said
    )  # torch 2.15 frees compiled code only while its modules are there


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    """Its forward is in a decorator, as in models of transformers, and Dynamo has the model as `L['args'][0]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {"a b": nn.Sequential(nn.Linear(4, 16), Encoder()), "in": nn.Sequential(nn.Linear(4, 4))}
        )
        self.own = [self.layers["in"]]

    @decorated
    def forward(self, x: Tensor) -> Any:
        return self.own[0](self.layers["a b"](x)).tanh()


class Held:
    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def in_place(model: Any, **options: Any) -> Any:
    model.compile(**options)
    return model


def by_method(model: Any, **options: Any) -> Any:
    model.forward = torch.compile(model.forward, **options)
    return model


def layers(model: Any, **options: Any) -> Any:
    for each in model.modules():
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)):
            for part in each.children():
                part.compile(**options)
            break
    return model


def breaking(model: Any, **options: Any) -> Any:
    last = [each for each in model.modules() if isinstance(each, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    return torch.compile(model, **options)


def function(model: Any, **options: Any) -> Any:
    run = torch.compile(lambda held, *args, **kwargs: held["model"](*args, **kwargs), **options)
    return functools.partial(run, {"model": model})


def keyword(model: Any, **options: Any) -> Any:
    run = torch.compile(lambda *args, **kwargs: kwargs["its"](*args, **kwargs["given"]), **options)
    return lambda *args, **kwargs: run(*args, its=model, given=kwargs)


def partial(model: Any, **options: Any) -> Any:
    return torch.compile(functools.partial(lambda its, *args, **kwargs: its(*args, **kwargs), model), **options)


# Ways to compile a model, with which Dynamo has it in different places.
WAYS: dict[str, Callable[..., Any]] = {
    "whole": torch.compile,
    "dynamic": functools.partial(torch.compile, dynamic=True),
    "in place": in_place,
    "by its method": by_method,
    "layers": layers,
    "graph breaks": breaking,
    "function": function,
    "keyword": keyword,
    "partial": partial,
    "closure": lambda model, **options: torch.compile(lambda *args, **kwargs: model(*args, **kwargs), **options),
    "method": lambda model, **options: torch.compile(Held(model).run, **options),
}


# With `--sampled` each way and each backend is there.
WAYS_AND_BACKENDS = [
    (way, backend)
    for n, way in enumerate(WAYS)
    for backend in ("eager", "aot_eager")
    if not sampled.on or (n % 2 == 1) == (backend == "eager")
]


@as_in_2_13
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "backend"), WAYS_AND_BACKENDS)
def test_a_model_has_the_names_of_eager_code_however_it_is_compiled(way: str, backend: str) -> None:
    torch._dynamo.reset()
    model, x = Decorated(), torch.randn(2, 4, 4)
    eager = places(lambda: model(x).sum().backward())
    assert eager.total() > 20
    compiled = WAYS[way](model, backend=backend)
    compiled(x)  # what is compiled before the block has names too
    assert [places(lambda: compiled(x).sum().backward()) for _ in range(2)] == [eager] * 2


# Experts multiply in a loop once they are compiled, inside an operator of transformers.
CASES = list(itertools.product([name for name in MODELS if name != "mixtral"], WAYS, (True, False)))
# With `--sampled` each way is in the test above, and here are two cases in training and two without.
CHOSEN = sampled.picks_of_each({str(case): case[2] for case in CASES}, len(CASES) // 4)


@as_in_2_13
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way", "train"), [case for case in CASES if str(case) in CHOSEN])
def test_compiled_models_of_transformers_have_the_names_of_eager_code(name: str, way: str, train: bool) -> None:
    torch._dynamo.reset()
    model = MODELS[name]().train(train)
    vars(model)["forward"] = types.MethodType(decorated(type(model).forward), model)
    inputs = inputs_of(model)

    def run(model: Any) -> None:
        with torch.set_grad_enabled(train):
            loss = model(**inputs).loss
            if train:
                loss.backward()

    eager = places(lambda: run(model))
    assert eager.total() > 10
    compiled = WAYS[way](model, backend="eager")
    assert places(lambda: run(compiled)) == eager


@as_in_2_13
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_share_compiled_code_keep_their_own_names(backend: str) -> None:
    # Dynamo compiles one graph for all of them.
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(3)))
    x = torch.randn(2, 4, 16, requires_grad=True)

    def train() -> None:
        model(x).sum().backward()

    eager = places(train)
    torch._dynamo.reset()
    for layer in model:
        layer.compile(backend=backend)
    assert places(train) == eager


@as_in_2_13
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_names_the_modules_that_it_calls(backend: str) -> None:
    torch._dynamo.reset()
    one, two = Generator(), Discriminator()

    def step(one: nn.Module, two: nn.Module, x: Tensor) -> Tensor:
        return helper(two(one(x)), x)

    compiled = torch.compile(step, backend=backend)
    first, second = torch.ones(2, 4), torch.ones(2, 4)
    eager = places(lambda: step(one, two, first).sum().backward())
    assert places(lambda: compiled(one, two, second).sum().backward()) == eager


@needs_compiler
def test_a_graph_module_of_the_program_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: Any = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lines = lines

        def forward(self, x: Tensor) -> Any:
            return lines["first"](x).relu() @ lines["second"].weight

    traced = torch.fx.symbolic_trace(Both())
    model, x = nn.Sequential(traced, traced, torch.fx.symbolic_trace(nn.Linear(4, 4))), torch.ones(2, 4)
    asked = Mock(wraps=GraphPlaces.in_program)
    monkeypatch.setattr(GraphPlaces, "in_program", lambda self, code: asked(self, code))
    named, counts = [], []
    for engine in ("kernel", "compiled"):
        with torch.no_grad(), intercept(recorder := hooks.Recorder(), ops="all", engine=engine):
            for _ in range(3):
                model(x)
                counts.append(asked.call_count)
        named.append([(each.op, each.module) for each in recorder.records])
    assert named[0] == named[1]
    assert [name for op, name in named[1][:4] if op != "aten::t"] == ["0.lines.first", "0", "0"]
    assert counts[3] == counts[5] > 0


current = nn.Module()  # of the test below


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("held", ["argument", "closure", "global", "attribute", "two closures"])
def test_a_compiled_function_that_gets_another_module_names_it(held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    asked = 0
    ask = GraphPlaces.find

    def counted(*args: Any) -> Any:
        nonlocal asked
        asked += 1
        return ask(*args)

    monkeypatch.setattr(GraphPlaces, "find", counted)
    closed = other = model[0]
    around = Held(model[0])
    bodies = {
        "argument": lambda its: its(x).relu(),
        "closure": lambda _: closed(x).relu(),
        "global": lambda _: current(x).relu(),
        "attribute": lambda _: around.model(x).relu(),
        "two closures": lambda _: closed(other(x)).relu(),
    }
    compiled = torch.compile(bodies[held])
    recorder = hooks.Recorder()
    named, times_asked = [], []
    with torch.no_grad(), intercept(recorder, ops="all", engine="compiled"):
        model(x)  # so that parts have their names
        for number in (0, 0, 0, 1, 1, 0, 0):
            closed = other = around.model = model[number]
            monkeypatch.setitem(globals(), "current", model[number])
            asked, before = 0, len(recorder.records)
            compiled(model[number])
            named.append({record.module for record in recorder.records[before:]} - {""})  # of the function itself
            times_asked.append(asked)
    assert named == [{"0"}, {"0"}, {"0"}, {"1"}, {"1"}, {"0"}, {"0"}]
    assert times_asked[0] > 0
    if held != "attribute":  # which only Python can look up
        assert (times_asked[2], times_asked[6]) == (0, 0)


@needs_compiler
@pytest.mark.usefixtures("quick_compiler")
def test_products_that_a_compiled_graph_does_not_keep_apart_are_not_guessed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Any:
            return self.b(self.a(x).tanh())

    model, x = Tied(), torch.randn(2, 4)
    eager = places(lambda: model(x).sum().backward())
    torch._dynamo.reset()
    compiled = places(lambda: torch.compile(model)(x).sum().backward())
    assert {place for place in compiled if place[0] == "forward"} == {p for p in eager if p[0] == "forward"}
    assert {place[1] for place in compiled - eager} <= {None}


def test_graph_modules_of_the_program_keep_the_names_of_their_modules() -> None:
    traced = torch.fx.symbolic_trace(Generator())
    records = record(lambda: traced(torch.ones(2, 4)).sum().backward())
    assert [r.module for r in records if r.phase == "forward"] == [*IN_PAIR, "Generator"]
    assert not any("eval_with_key" in str(r.source) or str(r.source).startswith("1:") for r in records)


def test_watching_compiled_code_keeps_no_graph_and_no_module_alive() -> None:
    def train() -> list[weakref.ref[Any]]:
        model = Encoder()
        compiled = torch.compile(model, backend="aot_eager")
        places(lambda: compiled(torch.randn(2, 4, 16)).sum().backward())
        return [weakref.ref(module) for module in model.modules()]

    torch._dynamo.reset()
    modules = train()
    torch._dynamo.reset()
    gc.collect()
    assert [module() for module in modules] == [None] * len(modules)
