"""Runs with values: `diff` decides by computing what a call adds, what it inherits, and what rounding explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import minilm
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.compare.computed import NotComputed, computed
from opintercept.runs.compare.difference import Computed
from opintercept.runs.report import page

X = torch.randn(8, 48, generator=torch.Generator().manual_seed(0))


class Nudge:
    """Changes the first element of the output of some calls."""

    reads = ("module",)

    def __init__(self, module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.module, self.change = module, change

    def post(self, call: Any) -> Any:
        if call.module != self.module:
            return None
        output = call.output.clone()
        output.view(-1)[0] = self.change(output.view(-1)[0])
        return output


def up(value: torch.Tensor) -> torch.Tensor:
    """The next number."""
    return torch.nextafter(value, torch.full_like(value, torch.inf))


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 4))


def record(
    path: Path, program: Callable[[], Any], *edits: Any, tensors: Any = "full", ops: Any = "matmul", **how: Any
) -> runs.Run:
    with intercept([*edits, runs.RunRecorder(path, tensors)], ops=ops, **how):
        program()
    return runs.open_run(path)


def inference(net: nn.Module, x: torch.Tensor = X) -> Callable[[], Any]:
    def program() -> None:
        with torch.no_grad():
            net(x)

    return program


def first_of(tmp_path: Path, *edits: Any, net: nn.Module | None = None, **how: Any) -> Any:
    a = record(tmp_path / "a", inference(model()), **how)
    return runs.diff(a, record(tmp_path / "b", inference(net or model()), *edits, **how))


def test_a_kernel_that_is_wrong_adds_what_it_does(tmp_path: Path) -> None:
    found = first_of(tmp_path, Nudge("2", lambda value: value + 0.01))
    first = found.first
    assert (first.kind, first.a.record.module, first.changed) == ("added", "2", ())
    assert first.computed.added_a < 1 < 1e3 < first.computed.added_b
    assert first.computed.inherited == 0
    assert first.computed.difference == pytest.approx(0.01, rel=1e-5)
    text = str(found)
    assert "  added: the output of B is not what the operands give\n" in text
    assert "  computed in float64: 0 of the difference of 0.01 comes from what both get; A is off by 0.0" in text


def test_a_kernel_within_its_rounding_is_not_accused(tmp_path: Path) -> None:
    found = first_of(tmp_path, Nudge("2", up))
    assert (found.first.kind, found.kinds) == ("rounding", {"equal": 1, "rounding": 1, "inherited": 1})
    assert not found.equal
    assert max(found.first.computed.added_a, found.first.computed.added_b) < 1
    assert "  rounding: the outputs differ by no more than rounding\n" in str(found)


def test_the_first_call_that_rounding_does_not_explain_comes_first(tmp_path: Path) -> None:
    found = first_of(tmp_path, Nudge("0", up), Nudge("4", lambda value: value + 0.01))
    assert [row.module for row in found.modules] == ["0", "2", "4"]
    assert (found.first.a.record.module, found.first.kind) == ("4", "added")
    assert found.kinds == {"rounding": 1, "inherited": 1, "added": 1}


@pytest.mark.parametrize(
    ("change", "kind"), [(up, "rounding"), (lambda w: w + 0.5, "changed operand")], ids=["an ulp", "more"]
)
def test_an_operand_is_compared_at_its_rounding(tmp_path: Path, change: Any, kind: str) -> None:
    net = model()
    with torch.no_grad():
        weight: Any = net[2].weight
        weight[5, 7] = change(weight[5, 7])
    first = first_of(tmp_path, net=net).first
    assert (first.kind, first.changed, first.a.record.module) == (kind, ("rhs",), "2")
    assert first.computed.operands["lhs"] == 0
    assert (first.computed.operands["rhs"] > 8) is (kind == "changed operand")
    if kind == "changed operand":
        assert first.computed.inherited == pytest.approx(first.computed.difference, rel=1e-4)


def test_a_weight_that_differs_behind_rounding_is_a_changed_operand(tmp_path: Path) -> None:
    net = model()
    with torch.no_grad():
        net[4].weight[1, 2] += 0.5  # type: ignore[operator, index]
    torch.manual_seed(0)
    runs_ = [
        record(tmp_path / name, lambda: each(X).sum().backward(), *edits)  # noqa: B023
        for name, each, edits in (("a", model(), ()), ("b", net, (Nudge("0", up),)))
    ]
    first: Any = runs.diff(*runs_).first
    assert (first.kind, first.changed, first.a.record.module) == ("changed operand", ("rhs",), "4")


def test_another_dtype_is_a_changed_operand_though_it_only_rounds(tmp_path: Path) -> None:
    found = runs.diff(
        record(tmp_path / "a", inference(model())),
        record(tmp_path / "b", inference(model().bfloat16(), X.bfloat16())),
    )
    first: Any = found.first
    assert (first.kind, first.changed) == ("changed operand", ("lhs", "rhs", "bias"))
    assert max(first.computed.operands.values()) <= 1
    text = "lhs and rhs and bias, float32 in A and bfloat16 in B, differ, and no earlier difference explains it\n"
    assert f"  changed operand: {text}" in str(found)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (3, 16)).transpose(0, 1)[None] for each in self.qkv(x).chunk(3, -1))
        made: torch.Tensor = self.out(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
        return made


def test_operands_within_a_tolerance_are_not_called_equal(tmp_path: Path) -> None:
    def step(dtype: torch.dtype) -> None:
        (Attention().to(dtype)(X.to(dtype)) ** 2).sum().backward()

    found = {}
    for tensors in ("full", "stats"):
        a, b = (
            record(tmp_path / f"{tensors}{name}", lambda: step(dtype), tensors=tensors)  # noqa: B023
            for name, dtype in (("a", torch.float32), ("b", torch.bfloat16))
        )
        found[tensors] = runs.diff(a, b, rtol=6e-3)
    assert found["full"].kinds.keys() <= {"equal", "inherited", "unclear", "rounding"}
    first: Any = found["full"].first
    assert (first.kind, {role.equal for role in first.operands}) == ("inherited", {True})
    assert first.computed.inherited > first.computed.difference / 2
    assert "  inherited: its operands differ by less than the tolerance, " in str(found["full"])
    assert "added" not in found["stats"].kinds
    said = str(found["stats"])
    assert "; no values were recorded, so it may " in said or "no earlier difference above the tolerance" in said


def test_without_all_values_the_sentence_says_so(tmp_path: Path) -> None:
    for tensors, why in (("stats", "no values"), ("sample", "not all values")):
        found = first_of(tmp_path / tensors, Nudge("2", lambda value: value + 0.01), tensors=tensors)
        assert (found.first.kind, found.first.computed) == ("added", f"{why} were recorded")
        text = "  added: the operands are equal but the output differs; "
        assert f"{text}{why} were recorded, so rounding may explain it\n" in str(found)
    a, b = (runs.open_run(tmp_path / "stats" / name) for name in "ab")
    assert runs.diff(a, b, tensors=False).as_dict()["first"]["computed"] == "values were not read"


class Block(nn.Module):
    """A block with operators of most families."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((32, 96), (32, 32), (32, 64), (64, 32))
        )
        self.norm, self.rms, self.group = nn.LayerNorm(32), nn.RMSNorm(32), nn.GroupNorm(4, 32)
        self.conv, self.batch, self.embed = nn.Conv1d(32, 32, 3, padding=1), nn.BatchNorm1d(32), nn.Embedding(50, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        weights = (q @ k.mT / 3).masked_fill(torch.ones(21, 21, dtype=torch.bool).triu(1), -1e4).float().softmax(-1)
        x = x + self.out((weights.to(x.dtype) @ v).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.rms(x))) * F.silu(self.up(x)))
        made: torch.Tensor = x + self.group(self.batch(self.conv(x.mT))).mT
        return made


def train(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    net, tokens = Block().to(dtype), torch.randint(0, 50, (4, 21))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = net(tokens).float() @ torch.eye(32, 50)
        F.cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "float16", "autocast"],
)
def test_no_call_of_a_training_is_beyond_its_rounding(tmp_path: Path, dtype: torch.dtype, autocast: bool) -> None:
    run = record(tmp_path / "run", lambda: train(dtype, autocast), ops="all")
    judged = 0
    for call in run.calls():
        try:
            found = computed(run, call, run, call)
        except NotComputed:
            continue
        assert (found.added_a, found.difference, found.inherited) == (found.added_b, 0, 0)
        assert found.added_a < 1, (call.record, found)
        judged += 1
    assert judged > 300


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_call_of_a_pretrained_model_is_beyond_its_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    net, tokenizer = minilm.load()  # its activations are as large as 24
    tokens = tokenizer(["A cat sings.", "The river waits in the rain, and nobody counts."] * 8, padding=True)
    given = {name: torch.tensor(numbers) for name, numbers in tokens.items()}
    run = record(tmp_path / "run", lambda: net.to(dtype)(**given), ops=["norm", "activation", "matmul"])
    added = [computed(run, call, run, call).added_a for call in run.calls()]
    assert len(added) > 50
    assert max(added) < 1


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.addmm(torch.ones(4), X, torch.ones(48, 4), alpha=-2.0, beta=-1.0),
        lambda: X.to(torch.bfloat16).sum(0),
        lambda: X.argmax(1),
        lambda: torch.ones(2, 2, dtype=torch.int64) @ torch.ones(2, 2, dtype=torch.int64),
        lambda: (X * 1e30).half(),
        lambda: torch.tensor([65504.0, 65510.0, 65530.0, -1e9]).half(),
    ],
    ids=["negative alpha", "narrow sum", "choice", "integers", "overflow", "limits"],
)
def test_no_operator_is_beyond_its_rounding(tmp_path: Path, program: Callable[[], Any]) -> None:
    run = record(tmp_path / "run", program, ops="all")
    call = list(run.calls())[-1]
    assert computed(run, call, run, call).added_a <= 1


def test_a_wrong_kernel_is_accused_whatever_the_sign_of_its_factors(tmp_path: Path) -> None:
    def program() -> None:
        torch.addmm(torch.ones(4), X, torch.ones(48, 4), alpha=-2.0, beta=-1.0)

    a, b = (
        record(tmp_path / name, program, *edits) for name, edits in (("a", ()), ("b", (Nudge("", lambda v: v + 1),)))
    )
    first: Any = runs.diff(a, b).first
    assert (first.kind, first.computed.added_a < 1 < first.computed.added_b) == ("added", True)


def test_integers_do_not_round(tmp_path: Path) -> None:
    ones = torch.ones(2, 2, dtype=torch.int64)
    a = record(tmp_path / "a", lambda: ones @ ones)
    b = record(tmp_path / "b", lambda: ones @ ones, Nudge("", lambda value: value + 1))
    first: Any = runs.diff(a, b).first
    assert (first.kind, first.computed.added_b) == ("added", float("inf"))


def test_random_and_complex_numbers_are_not_computed(tmp_path: Path) -> None:
    def program() -> None:
        torch.manual_seed(0)
        F.dropout(X, 0.5)
        torch.view_as_complex(X.view(8, 24, 2)) * 3

    run = record(tmp_path / "run", program, ops="all")
    reasons = set()
    for call in run.calls():
        try:
            computed(run, call, run, call)
        except NotComputed as why:
            reasons.add(str(why).partition(",")[0])
    refused = {"it draws random numbers", "it cannot be computed again", "its values were not recorded"}
    assert {"its numbers are complex"} < reasons <= refused | {"its numbers are complex"}


@pytest.mark.parametrize("func", ["aten.from_file.default", "aten.set_.source_Tensor", "torch.load", "os.system"])
def test_only_operators_on_the_list_are_called(tmp_path: Path, func: str) -> None:
    run = record(tmp_path / "run", lambda: X * 2, ops="all")
    call = next(run.calls())
    assert isinstance(computed(run, call, run, call), Computed)
    for op in (func, func.replace("aten.", "aten::").rpartition(".")[0]):
        lie = replace(call, record=replace(call.record, func=func, op=op))
        with pytest.raises(NotComputed, match=r"it cannot be computed again, as .* is not on the list of operators"):
            computed(run, lie, run, lie)


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_an_operator_that_rounds_otherwise_is_not_accused_at_any_level(tmp_path: Path, level: Any) -> None:
    a = record(tmp_path / "a", lambda: F.gelu(X), ops="all", level=level)
    b = record(tmp_path / "b", lambda: F.gelu(X), Nudge("", up), ops="all", level=level)
    first: Any = runs.diff(a, b).first
    assert ("gelu" in first.a.record.op, first.kind) == (True, "rounding")


def test_a_weight_that_differs_after_equal_gradients_is_the_optimizers(tmp_path: Path) -> None:
    def program(rate: float) -> Callable[[], Any]:
        def run() -> None:
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=rate)
            for _ in range(2):
                net(X).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        return run

    for tensors in ("stats", "full"):
        a, b = (record(tmp_path / f"{tensors}{rate}", program(rate), tensors=tensors) for rate in (0.01, 0.02))
        found = runs.diff(a, b)
        assert found.first is not None
        assert (found.optimizer, found.first.a.record.step, found.first.changed) == (True, 0, ("rhs", "bias"))
        text = "  the optimizer: it was equal in an earlier call, and the gradients recorded since then are equal\n"
        assert text in str(found)
    # Another gradient, or another weight from the start, is not the optimizer.
    assert not runs.diff(a, record(tmp_path / "c", program(0.02), Nudge("4", lambda value: value + 1))).optimizer
    assert not first_of(tmp_path / "d", net=model(1)).optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_an_empty_operand_is_compared(tmp_path: Path, dtype: torch.dtype) -> None:
    def program(other: bool) -> Callable[[], Any]:
        def run() -> None:
            keys, empty = torch.arange(6).view(2, 3).to(dtype), torch.tensor([], dtype=dtype)
            grown = torch.cat([empty, keys * 2 if other else keys])  # as a cache that begins without keys
            torch.nn.functional.linear(torch.empty(0, 3), torch.ones(2, 3), torch.ones(2) + other)
            grown.double().sum()

        return run

    a, b = (record(tmp_path / name, program(name == "b"), ops=["all", "-view"]) for name in "ab")
    found: Any = runs.diff(a, b)
    assert found.first.a.record.op == "aten::cat"
    page.write(tmp_path / "page.html", a, b)
    for call in b.calls():
        try:
            assert computed(b, call, b, call).added_a <= 1
        except NotComputed:
            continue


def test_attention_without_keys_is_compared(tmp_path: Path) -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    run = record(tmp_path / "run", lambda: torch.bmm(q[0], k[0].mT).softmax(-1) @ k[0], ops="all")
    assert [computed(run, call, run, call).added_a for call in run.calls() if call.record.op == "aten::bmm"] == [0, 0]
