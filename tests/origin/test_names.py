"""What the modules of a program are called, of one model and of several."""

from __future__ import annotations

import textwrap
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import BELOW, LEVELS, needs_compiler
from native import library, run_python
from nets import FORWARD, IN_PAIR, Discriminator, Generator, Model, Pair, record
from threads import run_threads
from torch import Tensor, nn

from opintercept import OpCall, hooks, intercept, runs


def test_a_shared_module_has_its_first_name_and_the_others_as_aliases() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    model.forward = lambda x: model["b"](x)
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

        def forward(self, x: Tensor) -> Any:
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
    compiled: Any = torch.compile(model.blocks[0], backend="eager")
    outer = nn.Sequential(nn.DataParallel(model), nn.Sequential(compiled))
    names = {name for _, name in _pairs(outer)}
    assert {"0", "0.blocks.1.down", "1.0.up"} <= names
    assert not any("_orig_mod" in name or "module" in name for name in names)


class MyParallel(nn.DataParallel[nn.Module]):
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


class Tower(nn.Module):
    """Two lists of blocks, which share the names of their parts, and a method that calls a part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))])

    def begin(self, x: Tensor) -> Tensor:
        """Run the first part."""
        begun: Tensor = self.stem(x)
        return begun

    def forward(self, x: Tensor) -> Tensor:
        """Run all parts."""
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        for head in self.heads:
            x = head(x)
        return x @ x.t()


IN_TOWER = ["stem.0", "stem.2", "Tower", "layers.1", "Tower", "heads.1.0", "Tower"]
SCRIPTS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "scripted": (torch.jit.script, IN_TOWER),
    "traced": (lambda model: torch.jit.trace(model, torch.ones(2, 4)), IN_TOWER),
    "frozen": (lambda model: torch.jit.freeze(torch.jit.script(model)), ["Tower"] * len(IN_TOWER)),
    "in a module": (lambda model: nn.Sequential(torch.jit.script(model)), []),
}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("script", "names"), SCRIPTS.values(), ids=SCRIPTS)
def test_layers_in_torchscript_have_names_with_compiled_kernels(script: Callable[[Any], Any], names: list[str]) -> None:
    model = script(Tower().eval())
    names = names or ["0" if name == "Tower" else f"0.{name}" for name in IN_TOWER]

    def program() -> None:
        for _ in range(3):  # TorchScript optimises a module after its first runs
            model(torch.ones(2, 4))

    assert [r.module for r in record(program, engine="compiled")] == names * 3


@pytest.mark.slow
@needs_compiler
def test_backward_calls_of_a_traced_module_have_the_names_of_its_layers() -> None:
    traced = torch.jit.trace(Tower(), torch.ones(2, 4))
    records = record(lambda: traced(torch.ones(2, 4)).sum().backward(), engine="compiled")
    assert {r.module for r in records if r.phase == "backward"} == set(IN_TOWER)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("engines", [("kernel", "compiled"), ("mode", "kernel"), ("compiled", "mode", "kernel")])
def test_names_in_a_traced_module_depend_on_no_engine_and_on_none_that_ran_before(engines: tuple[str, ...]) -> None:
    library()
    program = f"""
        import torch
        from opintercept import hooks, intercept

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
        for module in torch.jit.trace(model, torch.ones(2, 3)), torch.jit.script(model):
            for engine in {engines}:
                recorder = hooks.Recorder()
                with intercept(recorder, engine=engine):
                    module(torch.ones(2, 3))
                print(engine, [record.module for record in recorder.records])
    """
    expected = [f"{engine} ['0', '2']" for engine in engines]
    assert run_python(textwrap.dedent(program)) == expected * 2


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


@pytest.mark.parametrize("engine", LEVELS)
def test_the_outermost_module_has_the_name_of_its_class(engine: dict[str, Any]) -> None:
    assert names_of(Generator(), nn.Linear(4, 4), **engine) == [[*IN_PAIR, "Generator"], ["Linear"]]


@pytest.mark.parametrize("engine", LEVELS)
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
    part: Any = model.blocks[1]
    block = ["blocks.1.up", "blocks.1.down", "blocks.1", "blocks.1"]
    assert names_of(other, model, part, model.head, part.up.forward)[2:] == [
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

        def forward(self, x: Tensor) -> Any:
            return self.student(x) - self.hidden[0](x)

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
    wrapped: list[Any] = [
        nn.DataParallel(Generator()),
        nn.DataParallel(Discriminator()),
        torch.jit.script(Pair()),
        scaled,
    ]
    with torch.compiler.set_stance("force_eager"):
        compiled: Any = torch.compile(nn.DataParallel(Discriminator()), backend="eager")
        found = names_of(*wrapped, compiled, parametrized)
    assert [names[-1] for names in found] == [
        *("Generator", "Discriminator", "Pair", "Linear", "Discriminator#2", "Discriminator#3")
    ]
    assert found[4] == ["Discriminator#2.main.0", "Discriminator#2.main.1", "Discriminator#2"]


def test_replicas_of_data_parallel_have_the_names_of_the_first_of_their_class() -> None:
    def replicas(x: Tensor) -> None:
        for replica in (model._replicate_for_data_parallel() for _ in range(3)):  # type: ignore[no-untyped-call]
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
        run_threads(*(lambda m=m: [m(torch.ones(2, 4)) for _ in range(50)] for m in models))
    labels = ["", *(f"Generator#{n}." for n in range(2, 9))]
    expected = {f"{label}{name}": 50 for label in labels for name in IN_PAIR}
    expected |= {label.rstrip(".") or "Generator": 50 for label in labels}
    assert Counter(r.module for r in recorder.records) == expected


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

        def training_step(self, x: Tensor) -> Any:
            return self.D(self.G(x)).mean() - self.D(x).mean()

    gan = Gan()
    for _ in range(2):
        gan.training_step(torch.randn(3, 4)).backward()


TWO_MODELS: dict[str, tuple[Callable[[], None], str, str]] = {
    "gan": (train_gan, "Generator", "Discriminator"),
    "actor and critic": (train_actor_and_critic, "Critic", "Actor"),
    "teacher and student": (distil, "Generator", "Generator#2"),
    "lightning": (train_lightning_like, "Generator", "Discriminator"),
}


@pytest.mark.parametrize("engine", BELOW)
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
