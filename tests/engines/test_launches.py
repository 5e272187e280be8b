"""Launches of generated kernels, and the calls that wrappers make, are noted in C++ as Python reports them.

The graphs are compiled once for all tests, since a compiler takes seconds for each.
"""

from __future__ import annotations

import dataclasses
import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from torch import Tensor, nn

from opintercept import CallRecord, NonFiniteError, OpCall, hooks, intercept, runs
from opintercept._engines import compiled, inductor
from opintercept._engines.kernels import CONSTRUCTORS
from opintercept._origin import compiled_graphs

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.usefixtures("values_in_cpp"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # of Dynamo
]


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.up(x).exp().add(1).log()


class Halves(nn.Module):
    """Two parts whose graphs look alike and so have one wrapper, with a break in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Part(), Part()

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)


class Layers(nn.Module):
    """Layers that are compiled each by itself, and share a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Part(), Part(), Part()])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
    return torch.mm(x.sin() + 1, x.T).cos() * scale


X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(scope="module", autouse=True)
def compilers() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def programs(compilers: None) -> dict[str, Callable[[], Any]]:
    """Compiled programs that infer and train, each run once."""
    torch.manual_seed(0)
    halves, layers, function = Halves(), Layers(), torch.compile(scaled)
    for layer in layers.layers:
        layer.compile()
    whole: Any = torch.compile(halves)

    def step(model: Any) -> None:
        model.zero_grad()
        model(X).sum().backward()
        with torch.no_grad():
            model(X)

    def twice() -> None:
        function(X)
        function(X * 2)

    found = {"halves": lambda: step(whole), "layers": lambda: step(layers), "function": twice}
    for program in found.values():
        program()
    return found


PROGRAMS = ["halves", "layers", "function"]


def alike(records: list[CallRecord]) -> list[CallRecord]:
    """What is the same in both engines: without times, and without what only kernels in C++ see."""
    kept = [record for record in records if record.op not in CONSTRUCTORS]
    numbers: dict[int | None, int] = {record.index: place for place, record in enumerate(kept)}
    return [
        dataclasses.replace(
            record, started=0, elapsed=0.0, index=numbers[record.index], forward=numbers.get(record.forward)
        )
        for record in kept
    ]


def repeated(program: Callable[[], Any], engine: Any, *watching: Any) -> None:
    with intercept(watching, ops="all", engine=engine):
        for _ in range(3):
            program()


@pytest.mark.parametrize("name", PROGRAMS)
def test_recorders_have_equal_records(programs: Any, name: str) -> None:
    found = {}
    for engine in ("kernel", "compiled"):
        repeated(programs[name], engine, recorder := hooks.Recorder())
        found[engine] = alike(recorder.records)
    assert found["compiled"] == found["kernel"]
    generated = [record for record in found["compiled"] if record.ops is not None]
    assert {record.phase for record in generated} == ({"forward"} if name == "function" else {"forward", "backward"})
    assert all(record.source for record in generated if record.phase == "forward")


def test_parts_that_share_a_wrapper_keep_their_names(programs: Any) -> None:
    for name, parts in (("halves", ["one", "two"]), ("layers", ["layers.0", "layers.1", "layers.2"])):
        repeated(programs[name], "compiled", recorder := hooks.Recorder())
        generated = [record.module for record in recorder.records if record.ops and record.phase == "forward"]
        assert [name for name in dict.fromkeys(generated) if name] == parts


@pytest.mark.parametrize("name", PROGRAMS)
def test_stats_profiles_and_findings_are_equal(programs: Any, name: str) -> None:
    found = {}
    for engine in ("kernel", "compiled"):
        stats, profile, check = hooks.Stats(), hooks.Profile(), hooks.NonFinite(action="record")
        repeated(programs[name], engine, stats, profile, check)
        rows = [dataclasses.replace(row, seconds=0.0) for row in profile.rows()]
        rows.sort(key=operator.attrgetter("op", "phase", "calls", "bytes"))
        found[engine] = (
            [row for row in stats.rows() if row.op not in CONSTRUCTORS],
            [row for row in rows if row.op not in CONSTRUCTORS],
            check.findings,
        )
    for ours, theirs in zip(found["compiled"], found["kernel"], strict=True):
        assert ours == theirs


@pytest.mark.parametrize("tensors", ["none", "stats"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_have_equal_calls(programs: Any, name: str, tensors: Any, tmp_path: Path) -> None:
    def calls(engine: str) -> list[Any]:
        repeated(programs[name], engine, runs.RunRecorder(tmp_path / engine, tensors=tensors))
        stored = [call for call in runs.open_run(tmp_path / engine).calls() if call.record.op not in CONSTRUCTORS]
        records = alike([call.record for call in stored])
        return [dataclasses.replace(call, record=record) for call, record in zip(stored, records, strict=True)]

    assert calls("compiled") == calls("kernel")


@pytest.mark.parametrize("name", PROGRAMS)
def test_launches_that_are_known_never_become_python(programs: Any, name: str, shown: Counter[str]) -> None:
    with intercept([hooks.Recorder(), hooks.Stats(), hooks.NonFinite()], ops="all", engine="compiled"):
        programs[name]()
        programs[name]()
        shown.clear()
        programs[name]()
        left = {op: count for op, count in shown.items() if op.startswith("inductor::") or op == "aten::mm"}
    assert left == {}


def test_a_launch_that_makes_a_nan_raises_there(programs: Any) -> None:
    function = torch.compile(lambda x: (x.sqrt() + 1).sum(-1))
    function(X.abs())
    with intercept(hooks.NonFinite(), ops="all", engine="compiled"):
        function(X.abs())
        function(X.abs())
        with pytest.raises(NonFiniteError, match="inductor::cpp_fused_add_sqrt_sum_0"):
            function(X - 5)


def test_what_a_kernel_raises_reaches_hooks_and_program(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    function = torch.compile(lambda x: x.tan() + 7)
    function(X)
    wrapper = max(engine_wrappers(), key=lambda module: Path(module.__file__).stat().st_mtime_ns)
    ((name, kernel),) = [item for item in vars(wrapper).items() if item[0].startswith("cpp_fused_add_tan")]
    fails = [False]

    def run(*args: Any) -> Any:
        if fails[0]:
            raise KeyError("no such kernel")
        return kernel(*args)

    monkeypatch.setattr(wrapper, name, run)
    from opintercept._engines import inductor

    monkeypatch.setattr(inductor, "_wrappers", weakref.WeakKeyDictionary())
    monkeypatch.setattr(inductor, "_seen", (0, []))
    recorder = hooks.Recorder()
    errors: list[BaseException] = []

    class Hook:
        def error(self, call: OpCall, exception: BaseException) -> None:
            errors.append(exception)

    with intercept([recorder, Hook()], ops="all", engine="compiled"):
        function(X)
        function(X)
        fails[0] = True
        with pytest.raises(KeyError, match="no such kernel") as raised:
            function(X)
    assert errors == [raised.value]
    with intercept(recorder := hooks.Recorder(), ops="all", engine="compiled"):
        fails[0] = False
        function(X)
        function(X)
        fails[0] = True
        with pytest.raises(KeyError, match="no such kernel"):
            function(X)
        fails[0] = False
        function(X)
    assert len([record for record in recorder.records if record.ops]) == 3


def engine_wrappers() -> list[Any]:
    import sys

    return [module for name, module in sys.modules.items() if name.startswith("torch._inductor.runtime.compile_tasks.")]


class Life:
    pass


def held_by_a_launcher() -> weakref.ref[Life]:
    held: list[Any] = [Life()]

    def in_python(*args: Any) -> Any:
        return held[0], args

    assert inductor.launcher is not None
    held.append(inductor.launcher(in_python, len, {}, in_python))
    assert held[1]([1, 2]) == (held[0], ([1, 2],))  # no block is open
    return weakref.ref(held[0])


def test_a_launcher_keeps_no_wrapper_alive(programs: Any) -> None:
    compiled.load()
    gone = held_by_a_launcher()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "file",
    [
        "/tmp/torchinductor/ab/c" + "a2b7" * 12 + ".py",
        "c" + "a" * 51 + ".py",
        "/x/c" + "a" * 40 + ".py",
        "/x/c" + "a" * 39 + ".py",
        "/x/b" + "a" * 51 + ".py",
        "/x/C" + "a" * 51 + ".py",
        "/x/c" + "a" * 50 + "8.py",
        "/x/c" + "a" * 50 + "1/c.py",
        "\\x\\c" + "a" * 51 + ".py",
        "/x/cé" + "a" * 51 + ".py",
        "/x/c" + "a" * 51 + ".pyc",
        "",
    ],
)
def test_both_walks_know_a_wrapper_by_its_file(programs: Any, file: str) -> None:
    """A function in such a file calls an operator; that it has no line there tells that C++ took it for a wrapper."""
    code = compile("def f(x): return x.mm(x)", file, "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    function = namespace["f"]
    is_wrapper = compiled_graphs.is_wrapper(function.__code__)
    x = torch.ones(2, 2)
    found = []
    for engine in ("kernel", "compiled"):
        with intercept(recorder := hooks.Recorder(), engine=engine):
            for _ in range(3):
                function(x)
        found.append([record.source for record in recorder.records])
    assert found[0] == found[1]
    assert (found[0][0] is None) is is_wrapper
