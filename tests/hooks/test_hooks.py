"""What holds for every ready-made hook, whatever tensors it meets and whenever it is interrupted."""

from __future__ import annotations

import copy
import csv
import gc
import io
import logging
import logging.handlers
import pickle
import re
import sys
import textwrap
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import interrupt, needs_timer
from processes import run_python
from torch import Tensor, nn

import opintercept
from opintercept import OpCall, hooks, intercept, runs
from opintercept._kit.copyable import Copyable
from opintercept.runs.ranks.difference import RankFinding
from opintercept.testing.plugin import OpCalls


class Constants(nn.Module):
    """Modules whose products have their own values and shapes: those of `m3` are `[2, 4]`."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 9):
            layer = nn.Linear(3, number + 1, bias=False)
            nn.init.constant_(layer.weight, number)
            self.add_module(f"m{number}", layer)

    def forward(self) -> Tensor:
        x = torch.ones(2, 3)
        return torch.stack([layer(x).mean() for layer in self.children()]).sum()


def number_of(module: str | None) -> int:
    assert module is not None
    return int(module.removeprefix("m"))


def check_stats(stats: hooks.Stats) -> None:
    for row in stats.rows():
        number = number_of(row.module)
        size = {"lhs": 6, "rhs": 3 * (number + 1), "output": 2 * (number + 1)}[row.operand]
        value = {"lhs": 1.0, "rhs": float(number), "output": 3.0 * number}[row.operand]
        assert (row.min, row.max, row.count) == (value, value, row.calls * size)
        if number == 5:  # once is enough, since this reads all rows
            assert sum(stats.histogram(row.module, row.operand).values()) == row.count
    assert stats.channels("m5").tolist() == [1.0] * 3


def check_profile(profile: hooks.Profile) -> None:
    for row in profile.rows():
        number = number_of(row.module)
        assert row.shape == f"[2, 3] @ [3, {number + 1}]"
        assert row.flops == row.calls * 2 * 2 * 3 * (number + 1)
        assert row.bytes == row.calls * 4 * (6 + 3 * (number + 1) + 2 * (number + 1))


def check_records(records: list[Any]) -> None:
    assert len({record.index for record in records}) == len(records)
    for record in records:
        assert record.output.shape == (2, number_of(record.module) + 1)


def check_logged(log: hooks.Log) -> None:
    (handler,) = log.logger.handlers
    assert isinstance(handler, logging.handlers.BufferingHandler)
    for line in handler.buffer:
        expected = 3.0 * number_of(line.__dict__["call"].module)
        assert (line.__dict__["values"]["min"], line.__dict__["values"]["max"]) == (expected, expected)
    handler.buffer.clear()


def check_printed(printed: hooks.Print) -> None:
    assert isinstance(printed.file, io.StringIO)
    for line in printed.file.getvalue().splitlines():
        module, _, values = line.partition(" in ")[2].partition(" | ")
        value = f"{3 * number_of(module):.3g}"
        assert values == f"min {value} max {value} mean {value} std 0"
    printed.file.seek(0)
    printed.file.truncate()


def logger_with(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("of a test")
    logger.addHandler(handler)
    return logger


class Run:
    """A writer for `Scalars` that checks what it gets."""

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            module, *_, operand, _, _ = name.split("/")
            assert value == {"lhs": 1.0, "output": 3.0 * number_of(module)}[operand]


def check_captured(capture: hooks.Capture) -> None:
    assert capture.nbytes == sum(entry.nbytes for entry in capture.entries) <= 4000
    assert capture.entries
    for entry in capture.entries:
        number = number_of(entry.module)
        columns, value = {"lhs": (3, 1.0), "output": (number + 1, 3.0 * number)}[entry.role]
        assert torch.equal(entry.tensor, torch.full((2, columns), value))  # from its file, if it has one


def check_flips(faults: hooks.BitFlip) -> None:
    for flip in faults.log:
        row, column = flip.position
        assert row < 2
        assert column < {"lhs": 3, "output": number_of(flip.module) + 1}[flip.role]


ROLES: Any = ("lhs", "output")
BUDGET: dict[str, Any] = {"max_bytes": 4000, "when_full": "drop"}

# How to make a hook, which may write to a folder, and how to check what it has seen of `Constants`.
INTERRUPTED: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Any]]] = {
    "Stats": (lambda _: hooks.Stats(("lhs", "rhs", "output"), histogram=True, channels="lhs"), check_stats),
    "Profile": (lambda _: hooks.Profile(), check_profile),
    "Recorder": (lambda _: hooks.Recorder(), lambda recorder: check_records(recorder.records)),
    "when": (
        lambda _: hooks.when(hooks.Recorder(), module="m[2-7]", every_calls=3),
        lambda filtered: check_records(filtered.hook.records),
    ),
    "Log": (lambda _: hooks.Log(logger_with(logging.handlers.BufferingHandler(10**6)), values="stats"), check_logged),
    "Print": (lambda _: hooks.Print(io.StringIO()), check_printed),
    "Scalars": (lambda _: hooks.Scalars(Run(), of=ROLES, values=["mean", "absmax"]), lambda scalars: None),
    "Capture": (lambda _: hooks.Capture(ROLES, **BUDGET), check_captured),
    "Capture to disk": (lambda folder: hooks.Capture(ROLES, to="disk", folder=folder, **BUDGET), check_captured),
    "BitFlip": (lambda _: hooks.BitFlip(3, of=ROLES, bits=range(-14, -9)), check_flips),
    "Noise": (lambda _: hooks.Noise(0.1, of=ROLES), lambda noise: None),
    "FakeQuantize": (lambda _: hooks.FakeQuantize(of=ROLES), lambda quantize: None),
}


# Python closes a file late if it was opened right before an interrupt.
LATE = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@needs_timer
@pytest.mark.parametrize("name", [pytest.param(name, marks=[LATE] * ("disk" in name)) for name in INTERRUPTED])
@pytest.mark.slow
def test_an_interrupt_in_a_hook_mixes_up_no_modules(name: str, tmp_path: Path) -> None:
    model = Constants()
    make, check = INTERRUPTED[name]
    hook = make(tmp_path)

    def program() -> None:
        with torch.no_grad():
            for _ in range(3):
                model()

    assert interrupt(hook, program, lambda: check(hook)) > 0


@needs_timer
@pytest.mark.parametrize("level", ["function", "dispatch"])
@pytest.mark.slow
def test_an_interrupt_in_gradients_mixes_up_no_modules(level: str) -> None:
    model = Constants()
    gradients = hooks.Gradients()

    def check() -> None:
        seen: dict[Any, set[str]] = defaultdict(set)
        for entry in gradients.entries:
            number = number_of(entry.module)
            shape = {"rhs": (number + 1, 3), "output": (2, number + 1)}[entry.operand]
            if level == "dispatch" and entry.operand == "rhs":
                shape = shape[::-1]
            assert tuple(entry.value.shape) == shape
            # The mean is over 2 * (number + 1) outputs, and each weight meets two rows of ones.
            exact = (1 if entry.operand == "output" else 2) / (2 * (number + 1))
            torch.testing.assert_close(entry.value, torch.full_like(entry.value, exact))
            assert entry.operand not in seen[entry.forward]
            seen[entry.forward].add(entry.operand)
        gradients.clear()

    assert interrupt(gradients, lambda: model().backward(), check, level=level) > 0


class Attentions(nn.Module):
    """Attention modules with their own weights: those of `m3` are 1 / 4 each."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 5):
            self.add_module(f"m{number}", Attention())

    def forward(self) -> None:
        for number, part in enumerate(self.children(), start=1):
            part(torch.ones(1, 2, number + 1, 4))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


@needs_timer
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.slow
def test_an_interrupt_in_attention_weights_mixes_up_no_modules(eager: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    weights = hooks.AttentionWeights()
    model = Attentions()

    def program() -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH if eager else SDPBackend.FLASH_ATTENTION):
            model()

    def check() -> None:
        for call in weights.calls:
            size = number_of(call.module) + 1
            assert torch.equal(call.values, torch.full((1, 2, size, size), 1 / size))
        weights.calls.clear()

    assert interrupt(weights, program, check) > 0


HANDLER = """
    import random, signal, torch
    from opintercept import hooks, intercept

    a = torch.ones(4, 4)
    draw = random.Random(0)
    cases = [  # hook, how it is read, and the calls that it has seen
        (hooks.Stats(("lhs", "output")), lambda hook: hook.rows(), lambda hook: hook.rows()[0].calls),
        (hooks.Stats(), lambda hook: hook.step(), lambda hook: sum(row.calls for row in hook.rows())),
        (hooks.Profile(), lambda hook: hook.rows(), lambda hook: hook.rows()[0].calls),
        (hooks.Recorder(), lambda hook: hook.records, lambda hook: len(hook.records)),
    ]

    def handler(number, frame):
        global handled
        a @ a
        if handled % 2:
            read(hook)
        handled += 1

    signal.signal(signal.SIGALRM, handler)
    for hook, read, calls in cases:
        print(type(hook).__name__, end=" ", flush=True)
        handled = 0
        with intercept(hook):
            for count in range(200):
                a @ a
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 5e-4))
                while handled == count:
                    read(hook)
        print(calls(hook), flush=True)
"""


@needs_timer
@pytest.mark.slow
def test_a_signal_handler_may_call_and_read_the_hook_while_it_is_read() -> None:
    done = run_python("-c", textwrap.dedent(HANDLER), timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Stats 400\nStats 400\nProfile 400\nRecorder 400\n"


class Odd(Tensor):
    """A tensor whose dtype raises."""

    @property
    def dtype(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no dtype")


def fake() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3) @ torch.ones(3, 4)


def products(x: Tensor) -> Any:
    layer, batch = torch.ones(4, 3, device=x.device), torch.ones(2, 3, 3, device=x.device)
    y = nn.functional.linear(x, layer, torch.ones(4, device=x.device))
    z = torch.baddbmm(torch.ones(2, 3, 3, device=x.device), batch, batch, alpha=2)
    return y @ layer, torch.einsum("ij,kj->ik", x, layer), z.softmax(-1) @ batch, x.mT @ x


def attention(device: str) -> Any:
    x = torch.ones(1, 2, 3, 4, device=device)
    return nn.functional.scaled_dot_product_attention(x, x, x)


def packed(layout: torch.layout) -> Any:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout, requires_grad=True)
    output = nn.functional.linear(nested, torch.ones(5, 3, requires_grad=True))
    torch.cat([part.flatten() for part in output.unbind()]).sum().backward()
    return [part.detach() for part in output.unbind()]


def quantised() -> Any:
    x = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    return x @ x.T


UNUSUAL: dict[str, Callable[[], Any]] = {
    "meta": lambda: products(torch.ones(2, 3, device="meta")),
    "meta attention": lambda: attention("meta"),
    "meta backward": lambda: products(torch.ones(2, 3, device="meta", requires_grad=True))[0].sum().backward(),
    "fake": fake,
    "vmap": lambda: torch.func.vmap(products)(torch.ones(5, 2, 3)),
    "vmapped attention": lambda: torch.func.vmap(lambda x: nn.functional.scaled_dot_product_attention(x, x, x))(
        torch.ones(5, 2, 3, 4)
    ),
    "grad": lambda: torch.func.grad(lambda x: products(x)[0].sum())(torch.ones(2, 3)),
    "vmapped grad": lambda: torch.func.vmap(torch.func.grad(lambda x: products(x)[0].sum()))(torch.ones(5, 2, 3)),
    "jacrev": lambda: torch.func.jacrev(lambda x: products(x)[0])(torch.ones(2, 3)),
    "jvp": lambda: torch.func.jvp(products, (torch.ones(2, 3),), (torch.ones(2, 3),)),
    "functionalize": lambda: torch.func.functionalize(products)(torch.ones(2, 3)),
    "empty nested": lambda: torch.nested.nested_tensor([]) @ torch.nested.nested_tensor([]),
    "empty nested linear": lambda: nn.functional.linear(torch.nested.nested_tensor([]), torch.ones(2, 3)),
    "nested": lambda: packed(torch.strided),
    "jagged": lambda: packed(torch.jagged),
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 4)),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr() @ torch.ones(3, 4),
    "sparse both": lambda: torch.eye(3).to_sparse() @ torch.eye(3).to_sparse(),
    "quantised": quantised,
    "int8": lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
    "no rows": lambda: products(torch.ones(0, 3)),
    "nothing to add up": lambda: torch.ones(2, 0) @ torch.ones(0, 4),
    "empty batch": lambda: torch.ones(0, 2, 3) @ torch.ones(0, 3, 2),
    "conjugate": lambda: (
        torch.ones(2, 2, dtype=torch.complex64).mH @ torch.ones(2, 2, dtype=torch.complex64)._neg_view()
    ),
    "no dtype": lambda: torch.ones(2, 3).as_subclass(Odd) @ torch.ones(3, 4),
    "wrong shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "wrong dtypes": lambda: torch.ones(2, 3) @ torch.ones(3, 2).double(),
}


OBSERVERS: dict[str, Callable[[], Any]] = {
    "Stats": lambda: hooks.Stats(("lhs", "rhs", "bias", "output"), histogram=True, for_dtype=torch.float16),
    "Profile": hooks.Profile,
    "AttentionWeights": hooks.AttentionWeights,
    "entropies": lambda: hooks.AttentionWeights("entropy", heads=0, rows=-1),
    "Log": lambda: hooks.Log(logger_with(logging.NullHandler())),
    "Log stats": lambda: hooks.Log(logger_with(logging.NullHandler()), values="stats"),
    "Log sample": lambda: hooks.Log(logger_with(logging.NullHandler()), values="sample"),
    "Print": lambda: hooks.Print(io.StringIO()),
    "Scalars": lambda: hooks.Scalars(Quiet(), of=("lhs", "rhs", "bias", "output")),
    "Gradients": hooks.Gradients,
    "Recorder": hooks.Recorder,
    "Checksum": lambda: hooks.Checksum(estimate=True),
    "Replicas": hooks.Replicas,
    "when": lambda: hooks.when(hooks.Recorder(), dtype=torch.float32, min_numel=2, every_calls=2, module="*"),
}


class Quiet:
    def log(self, values: dict[str, float], step: int) -> None:
        pass


def outcome(program: Callable[[], Any]) -> str:
    """The result of a program, or its error, as text."""

    def words(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(words, value))}]"
        if isinstance(value, Odd):
            value = value.as_subclass(Tensor)
        return repr(value)

    torch.manual_seed(0)
    try:
        return words(program())
    except Exception as exception:
        return f"{type(exception).__name__}: {str(exception)[:200]}"  # some go on to list all kernels, ours included


@pytest.mark.filterwarnings("ignore")  # torch warns about prototypes, AttentionWeights about tensors without values
@pytest.mark.parametrize("level", ["function", "dispatch"])
@pytest.mark.parametrize("program", UNUSUAL)
@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.slow
def test_a_program_with_unusual_tensors_is_unchanged_under_every_hook(program: str, level: Any) -> None:
    bare = outcome(UNUSUAL[program])
    for name, make in OBSERVERS.items():
        hook = make()

        def watched(hook: Any = hook) -> Any:
            with intercept(hook, level=level):
                return UNUSUAL[program]()

        assert (name, outcome(watched)) == (name, bare)
        for read in ("rows", "records", "entries", "calls"):  # reading the hook raises no error either
            value = getattr(hook, read, None)
            repr(value() if callable(value) else value)


READ_BY = {
    "module": "module",
    "aliases": "module",
    "source": "source",
    "forward": "forward",
    "grad_of": "forward",
    "gradient": "gradients",
    "grad_output": "gradients",
    "autocast": "autocast",
    "record": "record",
    "note": "record",
}

DECLARED: dict[str, Callable[[], Any]] = {
    "AttentionWeights": hooks.AttentionWeights,
    "BitFlip": hooks.BitFlip,
    "Capture": hooks.Capture,
    "Capture of gradients": lambda: hooks.Capture("grad_rhs"),
    "Checksum": lambda: hooks.Checksum(estimate=True, action="record"),
    "Experts": hooks.Experts,
    "FakeQuantize": hooks.FakeQuantize,
    "Gradients": hooks.Gradients,
    "Log": lambda: hooks.Log(logger_with(logging.NullHandler())),
    "NonFinite": lambda: hooks.NonFinite(action="record", allow="other"),
    "NonFinite that checks later": lambda: hooks.NonFinite(action="record", allow="other", check_every=4),
    "Noise": lambda: hooks.Noise(0.1),
    "Print": lambda: hooks.Print(io.StringIO()),
    "Profile": hooks.Profile,
    "Audit": hooks.Audit,
    "Recorder": hooks.Recorder,
    "Reference": hooks.Reference,
    "Replicas": hooks.Replicas,
    "Scalars": lambda: hooks.Scalars(Quiet()),
    "Stats": hooks.Stats,
    "when": lambda: hooks.when(hooks.Stats(), op=("mm", "linear"), every_calls=2),
    "when with a module": lambda: hooks.when(hooks.Recorder(), module="*"),
}


def watch_reads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The words for everything that hooks read of their calls from now on."""
    found: set[str] = set()

    def watched(read: Callable[[OpCall], Any], word: str) -> Callable[[OpCall], Any]:
        def reading(call: OpCall) -> Any:
            found.add(word)
            return read(call)

        return reading

    for name, word in READ_BY.items():
        member = vars(OpCall)[name]
        is_property = isinstance(member, property)
        read = watched(member.fget if is_property else member, word)
        monkeypatch.setattr(OpCall, name, property(read) if is_property else read)
    return found


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("name", DECLARED)
def test_a_hook_reads_what_it_declares_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch_reads(monkeypatch)
    hook = DECLARED[name]()
    for level in getattr(hook, "levels", ("function", "dispatch")):
        with intercept(hook, level=level):
            x, w = torch.ones(1, 2, 3, 4), torch.ones(4, 3, requires_grad=True)
            nn.functional.scaled_dot_product_attention(x, x, x)
            (torch.ones(2, 4) @ w).sum().backward()
            torch.full((2, 2), float("inf")) @ torch.zeros(2, 2)
            x = torch.randn(600, 600)
            torch.addmm(x, x, x, out=x)  # wrong, since it reads what it has written
    assert found == set(hook.reads)


def test_every_ready_made_hook_is_held_to_its_declaration() -> None:
    made = {type(make()).__name__ for name, make in DECLARED.items() if not name.startswith("when")}
    methods = ("pre", "post", "error", "backward")
    public = {name for name in hooks.__all__ if any(hasattr(getattr(hooks, name), method) for method in methods)}
    assert made == public


class Named(nn.Module):
    """A module that contains a linear layer of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._modules[name] = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Any:
        (layer,) = self.children()
        return layer(x)


@pytest.mark.parametrize("make", [hooks.Profile, hooks.Stats, lambda: hooks.Print(io.StringIO())])
def test_a_long_module_name_with_control_characters_makes_a_short_printable_table(make: Callable[[], Any]) -> None:
    hook = make()
    with intercept(hook):
        Named("\x1b[2J" + "a" * 1_000_000 + "\n\u202e")(torch.ones(2, 3)).sum().backward()
    printed = getattr(hook, "file", None)
    text = printed.getvalue() if printed is not None else str(hook)
    lines = text.splitlines()
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert "\\x1b[2Jaaa" in text


@pytest.mark.parametrize("make", [hooks.Profile, hooks.Stats])
def test_csv_escapes_module_names_that_are_formulas_or_half_surrogates(make: Callable[[], Any], tmp_path: Path) -> None:
    hook = make()
    with intercept(hook):
        for name in ('=HYPERLINK("http://x")', "a\udc80"):
            Named(name)(torch.ones(2, 3))
    hook.to_csv(tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as file:
        assert [row["module"] for row in csv.DictReader(file)] == ['\'=HYPERLINK("http://x")', "a\\udc80"]


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda hook: pickle.loads(pickle.dumps(hook)),
}


def seen_by(hook: Any) -> str:
    """The contents of a hook, as text."""
    if isinstance(hook, hooks.Capture):
        return repr([(entry, entry.tensor, hook.nbytes) for entry in hook.entries])
    if isinstance(hook, hooks.NonFinite):
        return str(hook)
    for name in ("rows", "records", "entries", "calls"):
        if hasattr(hook, name):
            value = getattr(hook, name)
            return repr(value() if callable(value) else value)
    return seen_by(hook.hook) if hasattr(hook, "hook") else ""


COPIED: dict[str, Callable[[], Any]] = OBSERVERS | {
    "Capture": lambda: hooks.Capture(sample=2),
    "Log": lambda: hooks.Log("opintercept.tests", values="sample"),
    "NonFinite": lambda: hooks.NonFinite(action="record", allow="x.*", check_every=2),
    "Reference": hooks.Reference,
    "some Replicas": lambda: hooks.Replicas(["head", re.compile("a.*")], of="weights", every_steps=3, action="warn"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", sorted(COPIED.keys() - {"Scalars", "Log stats", "Log sample"}))
def test_a_hook_can_be_copied_and_pickled_and_its_copy_goes_on(name: str, way: str) -> None:
    hook = COPIED[name]()
    x = torch.ones(1, 2, 3, 4)

    def program(dimensions: int) -> None:
        w = torch.ones(3, 4, requires_grad=True)
        (torch.ones(2, 3) @ w).sum().backward()
        nn.functional.scaled_dot_product_attention(x, x, x)
        torch.full((1,) * dimensions, torch.inf) @ torch.zeros((1,) * dimensions)

    with intercept(hook):
        program(2)
    before = seen_by(hook)
    twin = COPIES[way](hook)
    assert type(twin) is type(hook)
    assert seen_by(twin) == before
    with intercept(twin):
        program(3)
    if before:
        assert seen_by(twin) != before
    if way != "copy" or isinstance(hook, Copyable):
        assert seen_by(hook) == before


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("name", DECLARED)
def test_a_hook_keeps_no_tensor_of_the_program(name: str) -> None:
    hook = DECLARED[name]()
    for level in getattr(hook, "levels", ("function", "dispatch")):
        with intercept(hook, level=level):
            lhs, rhs = torch.full((2, 3), 3e38, requires_grad=True), torch.ones(3, 4, requires_grad=True)
            product = lhs @ rhs
        gone = [weakref.ref(tensor) for tensor in (lhs, rhs, product)]
        del lhs, rhs, product
        gc.collect()
        assert [ref() for ref in gone] == [None] * 3


@pytest.mark.parametrize("missing", ["numpy", "safetensors"])
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda folder: hooks.Capture(to="disk", folder=folder / "new"), "to='disk'"),
        (lambda folder: hooks.NonFinite(save=folder / "new"), "save="),
        (lambda folder: hooks.Checksum(save=folder / "new"), "save="),
    ],
    ids=["Capture", "NonFinite", "Checksum"],
)
def test_only_files_need_safetensors_and_numpy(
    make: Callable[[Path], Any], what: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch" if missing == "safetensors" else missing, None)
    with pytest.raises(ImportError, match=rf"{what} needs {missing}; pip install 'opintercept\[cli\]'"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with intercept([hooks.Capture(), hooks.NonFinite(), hooks.Checksum()]):
        torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("name", DECLARED)
def test_a_hook_is_shown_without_an_address(name: str) -> None:
    hook = DECLARED[name]()
    handle = (interceptor := intercept(hook)).register(hooks.Recorder())
    shown = [hook, handle, interceptor, interceptor.paused()]
    assert [repr(each) for each in shown if " at 0x" in repr(each)] == []
    assert repr(hook) in repr(interceptor)


def test_what_a_hook_holds_is_shown() -> None:
    recorder, weights, x = hooks.Recorder(), hooks.AttentionWeights("entropy"), torch.ones(1, 2, 3, 4)
    assert (repr(recorder), repr(weights)) == ("Recorder(0 records)", "AttentionWeights('entropy', 0 calls)")
    with intercept([recorder, weights]):
        nn.functional.scaled_dot_product_attention(x, x, x)
    assert (repr(recorder), repr(weights)) == ("Recorder(1 record)", "AttentionWeights('entropy', 1 call)")
    gradients = hooks.Gradients()
    with intercept(gradients):
        (torch.ones(2, 3) @ torch.ones(3, 4, requires_grad=True)).sum().backward()
    assert repr(gradients) == "Gradients(2 gradients)"


NEVER_MADE = ("HookDeclaration", "InKernel", "CallFinding")


@pytest.mark.parametrize("module", [opintercept, hooks, runs], ids=lambda module: str(module.__name__))
def test_no_public_class_is_shown_by_its_address(module: Any) -> None:
    kinds: dict[str, Any] = {name: getattr(module, name) for name in module.__all__ if name not in NEVER_MADE}
    shows: Any = object.__repr__
    assert [name for name, kind in kinds.items() if isinstance(kind, type) and kind.__repr__ is shows] == []


@pytest.mark.parametrize(
    ("make", "new"),
    [
        (hooks.NonFinite, "check_every"),
        (hooks.Checksum, "every_calls"),
        (lambda **given: hooks.when(hooks.Recorder(), **given), "every_calls"),
        (OpCalls([]).filter, "every_calls"),
        (lambda **given: hooks.Scalars(Quiet(), **given), "every_steps"),
        (hooks.Replicas, "every_steps"),
    ],
    ids=["NonFinite", "Checksum", "when", "filter", "Scalars", "Replicas"],
)
def test_the_old_name_of_an_argument_gives_the_new_one(make: Callable[..., Any], new: str) -> None:
    make(**{new: 2})
    with pytest.raises(TypeError, match=f"^every= is now {new}=$"):
        make(every=2)


def test_findings_of_all_checks_say_which_call_is_wrong_and_how() -> None:
    ranks = ((0, 2), (1,))
    diverged = hooks.Divergence(ranks, 3, 7, "0", "aten::mm", "forward", "rhs", True, "train.py:1", 0)
    of_run = RankFinding("weight", ranks, 3, 1, 7, "0", "aten::mm", "forward", "train.py:1", "rhs", (), None, 1)
    with intercept([search := hooks.NonFinite(action="record"), recorder := hooks.Recorder()]):
        nn.Sequential(nn.Linear(2, 2))(torch.full((1, 2), torch.nan))
    (record,) = recorder.records
    product = hooks.WrongProduct(record, (0, 0), (0,), 1, 1.0, 2.0, 1.0, 0.5)
    found: list[hooks.CallFinding] = [diverged, of_run, *search.findings, product]
    calls = [(each.module, each.phase, each.step, each.index, type(each.source), bool(str(each))) for each in found]
    assert calls == [("0", "forward", 3, 7, str, True)] * 2 + [("0", "forward", 0, 0, str, True)] * 2
    assert {each.op for each in found[:2]} == {"aten::mm"}
    assert all(isinstance(each, hooks.CallFinding) for each in found)
    with pytest.raises(AttributeError, match="'WrongProduct' object has no attribute 'modul'"):
        _ = product.modul


@pytest.mark.parametrize("way", COPIES)
def test_what_a_hook_writes_to_cannot_be_copied(way: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"Scalars cannot be copied or pickled, since it writes to an open .*; make"):
        COPIES[way](hooks.Scalars(Quiet()))
    with pytest.raises(TypeError, match=r'a Capture with to="disk" owns the files in .* and cannot be copied'):
        COPIES[way](hooks.Capture(to="disk", folder=tmp_path))
