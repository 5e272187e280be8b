"""Where a call comes from: module, source line, and the forward call behind a backward one."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from compiler import needs_compiler
from test_models import MODELS, _inputs
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from opintercept import CallRecord, OpCall, OpInterceptError, hooks, intercept, runs
from opintercept.testing.plugin import OpCalls

ENGINES = [pytest.param({}, id="kernel"), pytest.param({"engine": "mode"}, id="mode")]


def record(program: Callable[[], Any], **options: Any) -> list[CallRecord]:
    recorder = hooks.Recorder()
    with intercept(recorder, **options):
        program()
    return recorder.records


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        return self.down(hidden) + x @ x.T @ x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) @ self.scale  # type: ignore[no-any-return]


class Generator(Pair):
    pass


class Discriminator(Pair):
    pass


FORWARD = [f"blocks.{i}{name}" for i in range(2) for name in (".up", ".down", "", "")] + ["head"]


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param({"level": "function"}, id="function")])
def test_module_is_the_innermost_one_by_its_qualified_name(engine: dict[str, Any]) -> None:
    model = Model()
    records = record(lambda: model(torch.randn(5, 4)), **engine)
    assert [r.module for r in records] == FORWARD


def test_module_outside_of_all_is_the_empty_name(op_calls: OpCalls) -> None:
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert op_calls.modules == [""]


def test_both_engines_see_the_same_modules_operators_and_shapes_in_the_same_order(op_calls: OpCalls) -> None:
    for engine in ("kernel", "mode"):
        with op_calls.block(engine=engine) as calls:
            Model()(torch.randn(5, 4)).sum().backward()
        calls.match_snapshot("step")


def test_source_is_the_line_of_the_program_and_not_of_torch() -> None:
    model = Model()
    records = record(lambda: model(torch.randn(5, 4)))
    assert re.fullmatch(r"test_origin\.py:\d+ in forward", records[0].source or "")
    assert records[2].source == records[3].source != records[0].source
    lambda_line = record(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)))[0].source
    assert re.fullmatch(r"test_origin\.py:\d+ in <lambda>", lambda_line or "")


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param({"level": "function"}, id="function")])
def test_a_hook_of_the_user_is_not_where_the_call_comes_from(engine: dict[str, Any]) -> None:
    class Keeper(nn.Module):  # a hook may be a module, and may ask from one
        def forward(self, call: OpCall) -> None:
            found.append((call.module, call.source))

    found: list[tuple[str | None, str | None]] = []
    block = Block().requires_grad_(False)  # else the call notes where it comes from before the hook asks
    with intercept(lambda call: found.append((call.module, call.source)), **engine) as interceptor:
        interceptor.register(Keeper())
        block(torch.ones(4, 4))
    assert found[0::2] == found[1::2]
    expected = record(lambda: block(torch.ones(4, 4)), **engine)[0]
    assert found[0] == (expected.module, expected.source)
    assert "in forward" in str(expected.source)


CELLS = {
    "<stdin>": "<cell>",
    "<ipython-input-3-a1b2c3>": "<cell 3>",
    "/tmp/ipython-input-12-3456789.py": "<cell 12>",
    "/tmp/ipython-input-3456789.py": "<cell>",
    "/tmp/ipykernel_7/512345.py": "<cell>",
    "/home/me/ipykernel_tools/train.py": "train.py",
}


def source_in(file: str) -> str | None:
    code = compile("\n\ntorch.mm(torch.ones(2, 2), torch.ones(2, 2))", file, "exec")
    (call,) = record(lambda: exec(code, {"torch": torch}))
    return call.source


@pytest.mark.parametrize(("file", "shown"), CELLS.items())
def test_source_of_a_cell_has_its_number_where_the_name_of_its_code_has(file: str, shown: str) -> None:
    assert source_in(file) == f"{shown}:3 in <module>"


def test_source_of_a_cell_has_the_number_that_ipython_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = types.SimpleNamespace(_filename_map={"/tmp/ipykernel_7/512345.py": 4})
    shells = [types.SimpleNamespace(compile=compiler), None, types.SimpleNamespace()]
    shown = []
    for shell in shells:
        ipython = types.SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
        shown.append((source_in("/tmp/ipykernel_7/512345.py"), source_in("/tmp/ipykernel_7/6.py")))
    assert shown == [
        ("<cell 4>:3 in <module>", "<cell>:3 in <module>"),
        ("<cell>:3 in <module>", "<cell>:3 in <module>"),
        ("<cell>:3 in <module>", "<cell>:3 in <module>"),
    ]


SHELL = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for cell in (
        "import torch; from opintercept import hooks, intercept; recorder = hooks.Recorder()",
        "def f(x):\\n    return x @ x",
        "with intercept(recorder):\\n    f(torch.ones(2, 2))",
    ):
        shell.run_cell(cell, store_history=True).raise_error()
    (call,) = shell.user_ns["recorder"].records
    assert call.source == "<cell 2>:2 in f", call.source
"""


def test_source_of_a_cell_in_a_real_shell() -> None:
    pytest.importorskip("IPython")
    program = [sys.executable, "-c", textwrap.dedent(SHELL)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_forward_called_directly_counts_as_the_module() -> None:
    model = Model()
    records = record(lambda: model.forward(torch.randn(5, 4)))
    assert [r.module for r in records] == FORWARD
    outer = nn.Sequential(model)
    outer.forward = lambda x: model.blocks[1].forward(x)  # type: ignore[method-assign, assignment]
    records = record(lambda: outer(torch.randn(5, 4)))
    assert [r.module for r in records] == [f"0.blocks.1{name}" for name in (".up", ".down", "", "")]


def test_a_shared_module_has_its_first_name_and_the_others_as_aliases() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    model.forward = lambda x: model["b"](x)  # type: ignore[method-assign, assignment]
    seen: list[Any] = []
    with intercept(lambda call: seen.append((call.module, call.aliases))):
        model(torch.randn(2, 4))
    assert seen == [("a", ("a", "b.0"))]


def test_a_module_that_is_registered_nowhere_is_named_by_its_class() -> None:
    hidden = [nn.Linear(4, 4)]

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return hidden[0](x)

    model = nn.Sequential(Outer())
    (call,) = record(lambda: model(torch.randn(2, 4)))
    assert call.module == "0.<Linear>"


def test_a_module_added_later_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    record(lambda: model(torch.randn(2, 4)))
    model.append(nn.Linear(4, 4))
    assert [r.module for r in record(lambda: model(torch.randn(2, 4)))] == ["0", "1"]


def test_wrappers_do_not_show_in_names() -> None:
    model = Model()
    torch._dynamo.reset()
    compiled = torch.compile(model.blocks[0], backend="eager")
    outer = nn.Sequential(nn.DataParallel(model), nn.Sequential(compiled))
    names = {name for _, name in _pairs(outer)}
    assert {"0", "0.blocks.1.down", "1.0.up"} <= names
    assert not any("_orig_mod" in name or "module" in name for name in names)


class MyParallel(nn.DataParallel):
    pass


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "parallel": nn.DataParallel,
    "a subclass of it": MyParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "parallel and compiled": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
    "compiled and parallel": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_has_the_names_of_the_model(wrap: Callable[[nn.Module], Any]) -> None:
    model = Model()
    torch._dynamo.reset()
    wrapped = wrap(model)
    # Compiled code has no frames of the inner modules; eager shows what the names would be.
    with torch.compiler.set_stance("force_eager"):
        records = record(lambda: wrapped(torch.randn(5, 4)))
    assert [r.module for r in records] == FORWARD


def test_a_module_of_ones_own_named_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"module": nn.Linear(2, 2)})})
    assert {name for _, name in _pairs(nn.DataParallel(model))} == {"", "module", "module.module"}


def _pairs(root: nn.Module) -> list[tuple[int, str]]:
    from opintercept._origin.names import _collect

    return [(key, name) for key, entry in _collect(root).items() for name in entry.names]


def test_a_script_module_is_one_place() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert [r.module for r in record(lambda: scripted(torch.randn(2, 4)))] == ["Sequential", "Sequential"]


IN_PAIR = ["main.0", "main.1"]


def names_of(*programs: Callable[[Tensor], Any], **options: Any) -> list[list[str | None]]:
    """The modules that one interceptor tells for each program."""
    recorder = hooks.Recorder()
    found = []
    with intercept(recorder, **options):
        for program in programs:
            program(torch.ones(2, 4))
            found.append([r.module for r in recorder.records])
            recorder.records.clear()
    return found


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param({"level": "function"}, id="function")])
def test_the_outermost_module_has_the_name_of_its_class(engine: dict[str, Any]) -> None:
    assert names_of(Generator(), nn.Linear(4, 4), **engine) == [[*IN_PAIR, "Generator"], ["Linear"]]


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param({"level": "function"}, id="function")])
def test_names_in_another_model_begin_with_its_class(engine: dict[str, Any]) -> None:
    one, other = Generator(), Discriminator()
    first = [*IN_PAIR, "Generator"]
    second = ["Discriminator.main.0", "Discriminator.main.1", "Discriminator"]
    assert names_of(one, other, one, lambda x: other(one(x)), **engine) == [first, second, first, first + second]


def test_models_of_one_class_are_numbered_in_their_order() -> None:
    one, two, three, other, another = Generator(), Generator(), Generator(), Discriminator(), Discriminator()
    firsts = [found[0] for found in names_of(one, two, other, three, another, one, two)]
    assert firsts == [
        *("main.0", "Generator#2.main.0", "Discriminator.main.0", "Generator#3.main.0", "Discriminator#2.main.0"),
        *("main.0", "Generator#2.main.0"),
    ]
    assert names_of(one, two)[1][2] == "Generator#2"


def test_another_interceptor_names_anew() -> None:
    one, two = Generator(), Generator()
    for order in ((one, two), (two, one)):
        assert [found[0] for found in names_of(*order)] == ["main.0", "Generator#2.main.0"]
    inner = hooks.Recorder()

    def nested(x: Tensor) -> None:
        with intercept(inner):
            two(x)

    assert [found[0] for found in names_of(one, nested)] == ["main.0", "Generator#2.main.0"]
    assert inner.records[0].module == "main.0"


def test_labels_last_for_all_blocks_of_an_interceptor() -> None:
    one, two = Generator(), Generator()
    recorder = hooks.Recorder()
    interceptor = intercept(recorder)
    for model in (one, two, two, one):
        with interceptor:
            model(torch.ones(2, 4))
    firsts = ["main.0", "Generator#2.main.0", "Generator#2.main.0", "main.0"]
    assert [r.module for r in recorder.records[::3]] == firsts


def test_a_label_is_free_again_when_its_model_has_died() -> None:
    def build(x: Tensor) -> None:
        made.append(weakref.ref(model := Generator()))
        model(x)

    made: list[weakref.ref[nn.Module]] = []
    fresh = [lambda x: nn.Linear(4, 4)(x)] * 3
    kept = Discriminator()
    found = names_of(*fresh, build, kept, build, *fresh)
    assert [names[0] for names in found] == [
        *(["Linear"] * 3),
        *("main.0", "Discriminator.main.0", "main.0"),
        *(["Linear"] * 3),
    ]
    assert [ref() for ref in made] == [None, None]


def test_a_label_that_has_become_free_in_between_is_taken_first() -> None:
    models: list[Any] = [Generator() for _ in range(3)]

    def die(x: Tensor) -> None:
        models[1] = Generator()
        models[1](x)

    calls = [lambda x, i=i: models[i](x) for i in range(3)]
    assert [names[0] for names in names_of(*calls, die, lambda x: Generator()(x))] == [
        *("main.0", "Generator#2.main.0", "Generator#3.main.0", "Generator#2.main.0", "Generator#4.main.0")
    ]


def test_a_part_of_a_model_that_is_called_directly_has_its_name_in_the_model() -> None:
    model, other = Model(), Generator()
    block = ["blocks.1.up", "blocks.1.down", "blocks.1", "blocks.1"]
    assert names_of(other, model, model.blocks[1], model.head, model.blocks[1].up.forward)[2:] == [
        [f"Model.{name}" for name in block],
        ["Model.head"],
        ["Model.blocks.1.up"],
    ]
    assert names_of(model, model.blocks[1]) == [FORWARD, block]


def test_a_model_takes_the_names_from_a_part_that_was_called_before_it() -> None:
    # As `generate` of an encoder-decoder does.
    model = Model()
    found = names_of(model.blocks[0], model, model.blocks[0])
    assert found == [["up", "down", "Block", "Block"], FORWARD, FORWARD[:4]]


def test_a_single_layer_or_a_loss_leaves_the_plain_names_to_the_model() -> None:
    outside, softmax, model = (set(found) for found in names_of(torch.clone, nn.Softmax(-1), Generator(), ops="all"))
    assert (outside, softmax - outside, model - outside) == ({""}, {"Softmax"}, {*IN_PAIR, "Generator"})
    assert names_of(nn.Linear(4, 4), Generator()) == [["Linear"], [*IN_PAIR, "Generator"]]


def test_a_part_named_like_another_model_is_not_mistaken_for_it() -> None:
    first = nn.Sequential()
    first.add_module("Discriminator", Discriminator())
    found = names_of(first, Discriminator())
    assert found[0] == ["Discriminator.main.0", "Discriminator.main.1", "Discriminator"]
    assert found[1] == ["Discriminator#2.main.0", "Discriminator#2.main.1", "Discriminator#2"]


def test_modules_that_are_registered_nowhere_have_the_names_in_their_own_model() -> None:
    class Distiller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.hidden = Generator(), [Discriminator()]

        def forward(self, x: Tensor) -> Tensor:
            return self.student(x) - self.hidden[0](x)  # type: ignore[no-any-return]

    inside = ["student.main.0", "student.main.1", "student"]
    inside += ["<Discriminator>.main.0", "<Discriminator>.main.1", "<Discriminator>"]
    assert names_of(Distiller(), Distiller())[0] == inside
    one, two = Distiller(), Distiller()
    assert names_of(one, two) == [inside, [f"Distiller#2.{name}" for name in inside]]


def test_wrappers_are_no_part_of_a_models_label() -> None:
    torch._dynamo.reset()
    parametrized = Discriminator()
    torch.nn.utils.parametrizations.weight_norm(parametrized.main[0])
    scaled = nn.Linear(4, 4)
    torch.nn.utils.parametrizations.weight_norm(scaled)
    assert type(scaled).__name__ == "ParametrizedLinear"
    wrapped = [nn.DataParallel(Generator()), nn.DataParallel(Discriminator()), torch.jit.script(Pair()), scaled]
    with torch.compiler.set_stance("force_eager"):
        compiled = torch.compile(nn.DataParallel(Discriminator()), backend="eager")
        found = names_of(*wrapped, compiled, parametrized)
    assert [names[-1] for names in found] == [
        *("Generator", "Discriminator", "Pair", "Linear", "Discriminator#2", "Discriminator#3")
    ]
    assert found[4] == ["Discriminator#2.main.0", "Discriminator#2.main.1", "Discriminator#2"]


def test_replicas_of_data_parallel_have_the_names_of_the_first_of_their_class() -> None:
    def replicas(x: Tensor) -> None:
        for replica in (model._replicate_for_data_parallel() for _ in range(3)):  # type: ignore[operator]
            replica.main, replica.scale = model.main, model.scale.detach()
            replica(x)

    for model in (Generator(), Discriminator()):
        label = "" if isinstance(model, Generator) else "Discriminator."
        names = [f"{label}main.0", f"{label}main.1", type(model).__name__]
        assert names_of(Generator(), replicas)[1] == names * 3


def test_a_forward_in_a_thread_of_its_own_is_named_as_any_other() -> None:
    models = [Generator() for _ in range(8)]
    recorder = hooks.Recorder()
    with intercept(recorder, threads="all"):
        threads = [threading.Thread(target=lambda m=m: [m(torch.ones(2, 4)) for _ in range(50)]) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    labels = ["", *(f"Generator#{n}." for n in range(2, 9))]
    expected = {f"{label}{name}": 50 for label in labels for name in IN_PAIR}
    expected |= {label.rstrip(".") or "Generator": 50 for label in labels}
    assert Counter(r.module for r in recorder.records) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_and_recompute_have_the_names_of_the_forward_call(engine: dict[str, Any]) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)  # type: ignore[no-any-return]

    one, two = Checkpointed(), Checkpointed()
    x = torch.ones(5, 4, requires_grad=True)

    def program() -> None:
        (one(x) + two(x)).sum().backward()

    by_phase: dict[str, list[str | None]] = {"forward": [], "recompute": [], "backward": []}
    for call in record(program, **engine):
        by_phase[call.phase].append(call.module)
    second = [f"Checkpointed#2.{name}" for name in FORWARD]
    assert by_phase["forward"] == [*FORWARD, *second]
    assert set(by_phase["backward"]) == {*FORWARD, *second}
    assert set(by_phase["recompute"]) <= {*FORWARD, *second} - {"head", "Checkpointed#2.head"}
    assert len(by_phase["recompute"]) >= 12


def train_gan() -> None:
    generator, discriminator = Generator(), Discriminator()
    generator.main.append(nn.Linear(4, 4))
    for _ in range(2):
        fake = generator(torch.randn(3, 4))
        (discriminator(fake.detach()).mean() - discriminator(torch.randn(3, 4)).mean()).backward()
        discriminator(fake).mean().backward()


def train_actor_and_critic() -> None:
    class Actor(Pair):
        pass

    class Critic(Pair):
        pass

    actor, critic = Actor(), Critic()
    for _ in range(2):
        state = torch.randn(3, 4)
        with torch.no_grad():
            advantage = critic(state)
        (actor(state).softmax(-1) * advantage).sum().backward()
        critic(state).pow(2).sum().backward()


def distil() -> None:
    teacher, student = Generator(), Generator()
    for _ in range(2):
        x = torch.randn(3, 4)
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).pow(2).sum().backward()


def train_lightning_like() -> None:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.G, self.D = Generator(), Discriminator()

        def training_step(self, x: Tensor) -> Tensor:
            return self.D(self.G(x)).mean() - self.D(x).mean()  # type: ignore[no-any-return]

    gan = Gan()
    for _ in range(2):
        gan.training_step(torch.randn(3, 4)).backward()


TWO_MODELS: dict[str, tuple[Callable[[], None], str, str]] = {
    "gan": (train_gan, "Generator", "Discriminator"),
    "actor and critic": (train_actor_and_critic, "Critic", "Actor"),
    "teacher and student": (distil, "Generator", "Generator#2"),
    "lightning": (train_lightning_like, "Generator", "Discriminator"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("train", "first", "second"), TWO_MODELS.values(), ids=TWO_MODELS)
def test_every_row_of_profile_and_stats_belongs_to_one_model(
    train: Callable[[], None], first: str, second: str, engine: dict[str, Any]
) -> None:
    current: list[nn.Module] = []
    owners: dict[str | None, set[int]] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if isinstance(module, Pair):
            current.append(module)

    def look(call: OpCall) -> None:
        if call.phase == "forward":
            owners.setdefault(call.module, set()).add(id(current[-1]))

    profile, stats = hooks.Profile(), hooks.Stats()
    handle = nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        with intercept([profile, stats, look], **engine):
            train()
    finally:
        handle.remove()
    expected = {*IN_PAIR, first, *(f"{second}.{name}" for name in IN_PAIR), second}
    assert set(owners) - {"main.2"} == expected
    assert {len(models) for models in owners.values()} == {1}
    for rows in (profile.rows(), stats.rows()):
        assert {row.module for row in rows} - {"main.2"} == expected


@pytest.mark.parametrize(("train", "first", "second"), TWO_MODELS.values(), ids=TWO_MODELS)
def test_runs_of_two_models_are_paired_by_name(
    train: Callable[[], None], first: str, second: str, tmp_path: Path
) -> None:
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)  # so that all values differ, and none tells which calls belong together
        with intercept(runs.RunRecorder(tmp_path / name)):
            train()
    found = runs.diff(runs.open_run(tmp_path / "a"), runs.open_run(tmp_path / "b"))
    assert found.calls[0] == found.calls[1] == found.pairs > 0
    assert found.pairings == {"ordinal": found.pairs}
    assert {row.module for row in found.modules} >= {*IN_PAIR, first, f"{second}.main.1", second}
    assert [row.other for row in found.modules] == [row.module for row in found.modules]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_models_give_the_names_of_module_hooks_and_every_backward_call_its_forward(
    engine: dict[str, Any], name: str
) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().train()
    inputs = _inputs(model)
    names = {module: qualified or type(model).__name__ for qualified, module in model.named_modules()}
    stack, expected = [""], []

    def leave(*_: Any) -> None:
        stack.pop()

    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: stack.append(names[module]))
        module.register_forward_hook(leave, always_call=True)

    def by_hooks(call: OpCall) -> None:
        if call.phase == "forward":
            expected.append(stack[-1])

    recorder = hooks.Recorder()
    with intercept([recorder, by_hooks], **engine):
        model(**inputs).loss.backward()
    forward = [r for r in recorder.records if r.phase == "forward"]
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert [r.module for r in forward] == expected
    assert backward
    for call in backward:
        assert call.forward is not None
        behind = recorder.records[call.forward]
        assert (behind.phase, behind.module, behind.source) == ("forward", call.module, call.source)
        assert call.grad_of is not None or call.opaque


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_of_tells_the_two_products_of_a_backward_pass(engine: dict[str, Any]) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    records = record(lambda: (a @ b).sum().backward(), **engine)
    shapes = {"lhs": (3, 4), "rhs": (4, 5)}
    assert {r.grad_of for r in records[1:]} == {"lhs", "rhs"}
    for call in records[1:]:
        assert call.forward == 0
        output = call.output
        assert output is not None
        assert not isinstance(output, tuple)
        assert output.shape in (shapes[call.grad_of or ""], shapes[call.grad_of or ""][::-1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("columns", [(), ("lhs",), ("rhs",), ("lhs", "rhs")], ids=["rows", "lhs", "rhs", "both"])
@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "mv", "linear", "einsum"])
def test_gradient_is_that_of_the_operand_in_its_shape(
    op: str, columns: tuple[str, ...], engine: dict[str, Any]
) -> None:
    def operand(role: str, *shape: int) -> Tensor:
        tensor = torch.randn(shape, dtype=torch.float64)
        return (tensor.mT.contiguous().mT if role in columns else tensor).requires_grad_()

    batch = (2,) if op in ("bmm", "einsum") else ()
    # Square too, where a wrong transpose would not show in the shape.
    for m, k, n in ((3, 4, 5), (4, 4, 4)):
        lhs = operand("lhs", *batch, m, k)
        rhs = operand("rhs", *batch, k, n) if op != "mv" else torch.randn(k, dtype=torch.float64).requires_grad_()
        forward: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}

        def look(call: OpCall, forward: Any = forward, seen: Any = seen) -> None:
            if call.phase == "forward":
                assert call.gradient is None
                forward.update(lhs=call.lhs, rhs=call.rhs)
            else:
                assert call.gradient is not None
                seen[call.grad_of or ""] = call.gradient.clone()

        with intercept(look, **engine):
            if op == "linear":
                output = nn.functional.linear(lhs, rhs.mT)
            elif op == "addmm":
                output = torch.addmm(torch.ones(n, dtype=torch.float64), lhs, rhs)
            elif op == "einsum":
                output = torch.einsum("bij,bjk->bik", lhs, rhs)
            else:
                output = getattr(torch, op)(lhs, rhs)
            output.pow(2).sum().backward()
        assert set(seen) == {"lhs", "rhs"} - ({"lhs"} if op == "mv" else set())  # an outer product is no matmul
        for role, gradient in seen.items():
            assert gradient.shape == forward[role].shape
            assert torch.equal(gradient, {"lhs": lhs, "rhs": rhs}[role].grad)  # type: ignore[arg-type]


def test_gradient_is_none_where_it_cannot_be_told() -> None:
    a = torch.randn(3, 3, requires_grad=True)
    seen = []
    with intercept(lambda call: seen.append((call.grad_of, call.gradient))):
        (a @ a).sum().backward()  # both products have `a` as an operand
    assert seen == [(None, None)] * 3


class Copied:
    """Puts copies in the place of the operands."""

    def pre(self, call: OpCall) -> Any:
        assert call.lhs is not None
        assert call.rhs is not None
        return call.replace(lhs=call.lhs.clone(), rhs=call.rhs.clone())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nested", [False, True], ids=["one interceptor", "two"])
def test_backward_calls_are_linked_beside_a_hook_that_replaces_operands(engine: dict[str, Any], nested: bool) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    recorder = hooks.Recorder()
    outer, inner = ([Copied()], [recorder]) if nested else ([Copied(), recorder], [])
    with intercept(outer, **engine), intercept(inner, **engine):
        (a @ b).sum().backward()
    assert {(r.phase, r.module, r.forward, r.grad_of) for r in recorder.records} == {
        ("forward", "", None, None),
        ("backward", "", 0, "lhs"),
        ("backward", "", 0, "rhs"),
    }


def test_a_shared_weight_links_each_gradient_to_its_own_call() -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    records = record(lambda: torch.mm(torch.mm(x, w).tanh(), w).sum().backward())
    assert [(r.phase, r.forward, r.grad_of) for r in records] == [
        ("forward", None, None),
        ("forward", None, None),
        ("backward", 1, "lhs"),
        ("backward", 1, "rhs"),
        ("backward", 0, "rhs"),
    ] or {(r.forward, r.grad_of) for r in records[2:]} == {(1, "lhs"), (1, "rhs"), (0, "rhs")}


def test_retain_graph_and_autograd_grad_link_again(op_calls: OpCalls) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    loss = torch.mm(torch.ones(3, 4), w).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, w)
    assert [(call.phase, call.forward) for call in op_calls] == [("forward", None), ("backward", 0), ("backward", 0)]


def test_a_second_derivative_links_to_the_call_of_the_first() -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def program() -> None:
        (grad,) = torch.autograd.grad(torch.mm(x, w).pow(3).sum(), x, create_graph=True)
        grad.sum().backward()

    records = record(program)
    assert [r.phase for r in records] == ["forward"] + ["backward"] * (len(records) - 1)
    first = next(r for r in records if r.phase == "backward")
    assert first.forward == 0
    assert {r.forward for r in records[1:]} == {0, first.index}
    assert {r.module for r in records} == {""}


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


def test_a_custom_function_links_both_of_its_backward_matmuls() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    records = record(lambda: Multiply.apply(a, b).sum().backward())
    assert [(r.phase, r.forward, r.grad_of) for r in records] == [
        ("forward", None, None),
        ("backward", 0, "lhs"),
        ("backward", 0, "rhs"),
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_product_without_gradient_in_a_custom_function_takes_no_link(engine: dict[str, Any]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            x @ x.T
            return x @ w

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            return None, ctx.saved_tensors[0].T @ gradient

    w = torch.randn(4, 5, requires_grad=True)
    records = record(lambda: Twice.apply(torch.randn(3, 4), w).sum().backward(), **engine)
    assert [(r.module, r.forward, r.grad_of) for r in records] == [("", None, None), ("", None, None), ("", 1, "rhs")]


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.amp.custom_fwd`."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Float8Like(torch.autograd.Function):
    """As float8 training does it: products of operands that were cast, which autograd does not know."""

    @staticmethod
    @decorated
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.parts = parts
        rows = Cast.apply(x, 2.0).split(len(x) // parts)
        return torch.cat([torch.mm(row, Cast.apply(w, 2.0)) for row in rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad = Cast.apply(grad, 2.0)
        return grad @ Cast.apply(w, 2.0).T, Cast.apply(x, 2.0).T @ grad, None


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x.detach() * scale).to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Float8Linear(nn.Linear):
    parts = 1

    def forward(self, x: Tensor) -> Tensor:
        return Float8Like.apply(x, self.weight.T, self.parts)  # type: ignore[no-any-return]


@pytest.mark.parametrize("grad", ["weights", "weights and input"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_custom_function_that_casts_its_operands_links_its_backward_products(
    engine: dict[str, Any], grad: str
) -> None:
    model = nn.Sequential(Float8Linear(4, 4), nn.ReLU(), nn.Sequential(Float8Linear(4, 4)))
    x = torch.randn(6, 4, requires_grad=grad != "weights")
    records = record(lambda: model(x).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward) for r in records] == [
        ("forward", "0", None),
        ("forward", "2.0", None),
        ("backward", "2.0", 1),
        ("backward", "2.0", 1),
        ("backward", "0", 0),
        ("backward", "0", 0),
    ]
    assert {r.grad_of for r in records} == {None}  # the operands are gone, and others may be in their memory
    (line,) = {r.source for r in records}
    assert re.fullmatch(r"test_origin\.py:\d+ in <listcomp>|test_origin\.py:\d+ in forward", line or "")


@pytest.mark.parametrize("engine", ENGINES)
def test_several_products_of_a_custom_function_share_its_place_and_no_forward_call(engine: dict[str, Any]) -> None:
    model = nn.Sequential(Float8Linear(4, 4), Float8Linear(4, 4))
    model[1].parts = 3
    records = record(lambda: model(torch.randn(6, 4)).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward) for r in records[4:]] == [
        ("backward", "1", None),
        ("backward", "1", None),
        ("backward", "0", 0),
        ("backward", "0", 0),
    ]
    assert {r.source for r in records} == {records[0].source}


class TwoLayers(torch.autograd.Function):
    """Products of two modules, in lines of their own, under one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        first = one(x.detach())
        return first + two(x.detach())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad @ ctx.saved_tensors[0].T @ ctx.saved_tensors[0], None, None


@pytest.mark.parametrize("engine", ENGINES)
def test_what_the_products_of_one_node_do_not_have_in_common_is_not_guessed(engine: dict[str, Any]) -> None:
    model = nn.ModuleList([nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)])
    x = torch.randn(4, 4, requires_grad=True)
    records = record(lambda: TwoLayers.apply(x, *model).sum().backward(), **engine)
    assert [r.module for r in records[:2]] == ["Linear", "Linear#2"]
    for call in records[2:]:
        assert (call.phase, call.module, call.source, call.forward) == ("backward", None, None, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_function_that_records_nothing_leaves_no_link(engine: dict[str, Any]) -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        with torch.no_grad():
            Float8Like.apply(torch.randn(6, 4), w, 1)
        Float8Like.apply(torch.randn(6, 4), w.detach(), 1)
        Float8Like.apply(torch.randn(6, 4), w, 1).sum().backward()

    assert [r.forward for r in record(program, **engine)] == [None, None, None, 2, 2]


def test_a_thread_with_the_identity_of_one_that_has_ended_has_links_of_its_own() -> None:
    def train() -> None:
        layer(torch.ones(2, 4)).sum().backward()

    layer, recorder = nn.Linear(4, 4), hooks.Recorder()
    with intercept(recorder, threads="all"):
        for _ in range(20):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert [r.forward for r in backward] == [r.index - 1 for r in backward]


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
def quick_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Without threads, which outlive the test, without optimisation, and without what another run has left on disk."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"compile_threads": 1, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_of_another_model_begin_with_its_class(backend: str) -> None:
    torch._dynamo.reset()
    one, two = Generator(), Discriminator()
    eager = places(lambda: (one(torch.ones(2, 4)) + two(torch.ones(2, 4))).sum().backward())
    first, second = torch.compile(one, backend=backend), torch.compile(two, backend=backend)
    assert places(lambda: (first(torch.ones(2, 4)) + second(torch.ones(2, 4))).sum().backward()) == eager


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
@pytest.mark.usefixtures("quick_compiler")
def test_products_that_a_compiled_graph_does_not_keep_apart_are_not_guessed() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())  # type: ignore[no-any-return]

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


def test_a_call_without_gradients_leaves_no_link_to_mistake() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        y = torch.mm(w, w)
        with torch.no_grad():
            torch.mm(w, w)
        y.sum().backward()

    assert [r.forward for r in record(program)][2:] == [0, 0]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_products_inside_of_a_wrapper_are_linked_by_its_nodes(engine: dict[str, Any]) -> None:
    # As a DTensor's: autograd knows the wrapper, and what needs no gradient inside is what is seen.
    weight, x = Inside(torch.randn(4, 4)).requires_grad_(), Inside(torch.randn(3, 4))
    records = record(lambda: ((x @ weight).relu() @ weight).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward, r.grad_of) for r in records] == [
        ("forward", "", None, None),
        ("forward", "", None, None),
        ("backward", "", 1, "rhs"),
        ("backward", "", 1, "lhs"),
        ("backward", "", 0, "rhs"),
    ]


class Inside(Tensor):
    """A wrapper of one tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Inside:
        made: Inside = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("engine", ENGINES)
def test_two_products_inside_of_one_operator_are_not_told_apart(engine: dict[str, Any]) -> None:
    weight = TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_()
    x = torch.randn(3, 4)
    records = record(lambda: (TwoTensor(x, x + 1) @ weight).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward) for r in records[2:]] == [("backward", "", None)] * 2


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("unseen", ["before the block", "in a pause"])
def test_a_product_without_gradient_takes_no_link_of_one_that_was_not_seen(engine: dict[str, Any], unseen: str) -> None:
    a, b, w = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    pair = Inside(a), Inside(b)
    recorder = hooks.Recorder()
    interceptor = intercept(recorder, **engine)
    loss = a @ w
    with interceptor:
        if unseen == "in a pause":
            pair[0] @ pair[1]
            with interceptor.paused():
                loss = a @ w
        pair[0] @ pair[1]  # no node of autograd's has come in between
        a @ b
        loss.backward(torch.ones(3, 4))
    backward = recorder.records[-1]
    assert (backward.phase, backward.module, backward.forward) == ("backward", None, None)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_recomputes_in_a_pass_of_its_own(engine: dict[str, Any], reentrant: bool) -> None:
    model = Model()
    model.forward = lambda x: model.head(  # type: ignore[method-assign, assignment]
        checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=reentrant)
    )
    x = torch.randn(5, 4, requires_grad=True)
    records = record(lambda: model(x).sum().backward(), **engine)
    by_phase = {p: [r.module for r in records if r.phase == p] for p in ("forward", "recompute", "backward")}
    assert by_phase["forward"] == FORWARD
    again = [f"blocks.1{name}" for name in (".up", ".down", "", "")]
    assert by_phase["recompute"] == again[: len(by_phase["recompute"])]
    assert len(by_phase["recompute"]) >= 3  # the form that is not reentrant stops when it has what it needs
    assert set(by_phase["backward"]) == set(FORWARD)


def test_gradient_accumulation_links_each_pass_to_its_own(op_calls: OpCalls) -> None:
    layer = nn.Linear(4, 4)
    for _ in range(3):
        layer(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert [call.forward for call in op_calls.filter(phase="backward")] == [0, 0, 3, 3, 6, 6]


def test_threads_that_train_at_once_do_not_mix_their_links() -> None:
    recorder = hooks.Recorder()
    widths = {2: nn.Linear(2, 2), 3: nn.Linear(3, 3), 5: nn.Linear(5, 5)}

    def train(width: int) -> None:
        for _ in range(20):
            widths[width](torch.randn(4, width, requires_grad=True)).sum().backward()

    with intercept(recorder, threads="all"):
        threads = [threading.Thread(target=train, args=(width,)) for width in widths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    by_index = {r.index: r for r in recorder.records}
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert len(backward) == 3 * 20 * 2
    for call in backward:
        assert call.forward is not None
        behind = by_index[call.forward].lhs
        assert behind is not None
        assert call.lhs is not None
        assert behind.shape[1] in call.lhs.shape


def test_a_hook_that_asks_in_backward_alone_is_answered() -> None:
    seen: list[str | None] = []
    model = Model()

    def hook(call: OpCall) -> None:
        if call.phase == "backward":
            seen.append(call.module)

    with intercept(hook):
        model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert set(seen) == set(FORWARD)


def test_what_comes_from_the_stack_cannot_be_asked_for_later() -> None:
    calls: list[OpCall] = []
    with intercept(calls.append):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    for name in ("module", "source", "forward"):
        with pytest.raises(OpInterceptError, match=r"\w+ can only be read while the operator runs, got a call that"):
            getattr(calls[0], name)


MEMORY = """
    import resource, torch
    from opintercept import intercept
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = set()
    with intercept(lambda call: names.add(call.module)):
        for step in range(10_000):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 500:
                before = resident()
    assert names == {"0", "2"}
    print((resident() - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
def test_memory_stays_flat_over_ten_thousand_training_steps() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(MEMORY)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5.0


# What users do by hand today, as they would write it.


def test_story_hook_a_matmul_inside_a_layer_without_touching_it() -> None:
    model, scores = Model(), []
    with intercept(hooks.when(lambda call: scores.append(call.output.shape), module="blocks.1", op="mm")):
        model(torch.randn(5, 4))
    assert scores == [(5, 5), (5, 4)]


def test_story_a_different_hook_for_each_layer() -> None:
    model = Model()
    means: dict[str, float] = {}
    maxima: dict[str, float] = {}

    def mean(call: OpCall) -> None:
        means[call.module or ""] = call.output.mean().item()

    def maximum(call: OpCall) -> None:
        maxima[call.module or ""] = call.output.max().item()

    with intercept([hooks.when(mean, module="*.up"), hooks.when(maximum, module=re.compile(r"head|.*\.down"))]):
        model(torch.randn(5, 4))
    assert set(means) == {"blocks.0.up", "blocks.1.up"}
    assert set(maxima) == {"blocks.0.down", "blocks.1.down", "head"}


def test_story_only_when_a_condition_holds() -> None:
    model, seen = Model(), []
    large = hooks.when(
        lambda call: seen.append(call.module), module=str.isalpha, predicate=lambda call: bool(call.lhs.norm() > 0)
    )
    with intercept(large):
        model(torch.randn(5, 4))
    assert seen == ["head"]


def test_story_log_the_mean_of_the_second_linear_layer_only() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    means = []
    with intercept(hooks.when(lambda call: means.append(call.output.mean()), module="2", phase="forward")):
        out = model(torch.randn(3, 4))
        out.sum().backward()
    assert [mean.item() for mean in means] == [out.mean().item()]
