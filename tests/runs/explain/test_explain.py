"""The difference of two losses is made of the calls, weights and inputs that were changed, and of nothing else."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opintercept import OpInterceptError, intercept, runs
from opintercept.runs.explain.explanation import BY, Explanation

TOKENS = torch.arange(24).view(2, 12) * 7 % 32


class Block(nn.Module):
    """A block of a small decoder, each of whose settings a test may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.0)
        self.act: nn.Module = nn.GELU()
        self.scale, self.causal, self.factor = 0.5, True, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(self.act(self.up(self.norm2(x)))) * self.factor  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks: Any = nn.Sequential(Block(), Block(), Block())
        for parameter in self.parameters():
            parameter.data.mul_(2.0)
        self.positions: torch.Tensor
        self.register_buffer("positions", torch.randn(12, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.positions))  # type: ignore[no-any-return]

    def loss(self, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
        return F.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def record(folder: Path, program: Callable[..., Any], *args: Any) -> runs.Run:
    torch.manual_seed(1)
    with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"), torch.no_grad():
        program(*args)
    return runs.open_run(folder)


def train(model: Decoder) -> None:
    with torch.enable_grad():
        model.loss().backward()


def explained(folder: Path, change: Callable[[Decoder], Any], **options: Any) -> Explanation:
    """Explain a decoder that was changed, beside the same one unchanged."""
    a, b = Decoder(), Decoder()
    with torch.no_grad():
        changed = change(b)
    b = changed if isinstance(changed, Decoder) else b
    return runs.explain(record(folder / "a", train, a), record(folder / "b", b.loss), **options)


CHANGES: dict[str, tuple[Callable[[Decoder], Any], str, str, str]] = {
    "scale": (lambda m: setattr(m.blocks[1], "scale", 0.55), "blocks.1", "attention", "scale=0.55 for 0.5"),
    "mask": (lambda m: setattr(m.blocks[2], "causal", False), "blocks.2", "attention", "is_causal=False for True"),
    "eps": (lambda m: setattr(m.blocks[1].norm, "eps", 0.01), "blocks.1.norm", "layer_norm", "eps=0.01 for 1e-05"),
    "another function": (
        lambda m: setattr(m.blocks[0], "act", nn.SiLU()),
        "blocks.0.act",
        "gelu",
        "another operator: silu",
    ),
    "its form": (
        lambda m: setattr(m.blocks[2], "act", nn.GELU(approximate="tanh")),
        "blocks.2.act",
        "gelu",
        "approximate=tanh for none",
    ),
    "a number": (lambda m: setattr(m.blocks[0], "factor", 0.99), "blocks.0", "mul", "other=0.99 for 1.0"),
    "an element": (
        lambda m: m.blocks[1].up.weight[3, 5].add_(0.1),
        "blocks.1.up",
        "addmm",
        "another weight: mat1, 1 of 512 values",
    ),
    "a bias": (
        lambda m: m.blocks[0].out.bias[3].add_(0.1),
        "blocks.0.out",
        "addmm",
        "another weight: self, 1 of 16 values",
    ),
    "a gain": (
        lambda m: m.blocks[1].norm2.weight.mul_(1.01),
        "blocks.1.norm2",
        "layer_norm",
        "another weight: weight",
    ),
    "a row of a table": (lambda m: m.embed.weight[7].mul_(1.05), "embed", "embedding", "another weight: weight, 16 of"),
    "a buffer": (lambda m: m.positions.mul_(1.02), "Decoder", "add", "another input: other"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_single_change_is_the_first_row_and_explains_all(name: str, tmp_path: Path) -> None:
    change, module, op, cause = CHANGES[name]
    found = explained(tmp_path, change)
    row = found.rows()[0]
    assert row.module in (module, "")
    assert op in (row.op or "")
    assert cause.replace("mat1", "mat2") in row.cause
    assert abs(found.difference) > 1e-5
    assert 0.95 < row.share < 1.05
    assert 0.95 < found.explained / found.difference < 1.05
    assert math.isclose(found.explained + found.remainder, found.difference)
    assert all(abs(each.cost) < 1e-5 for each in found.rows()[1:])


def test_equal_runs_have_no_rows(tmp_path: Path) -> None:
    found = explained(tmp_path, lambda model: None)
    assert (found.rows(), found.difference, found.equal) == ((), 0.0, True)
    assert str(found).endswith("no call, weight or input differs")


def test_a_dropout_left_on_is_named_by_its_operators(tmp_path: Path) -> None:
    def leave_on(model: Decoder) -> None:
        model.blocks[1].drop.p = 0.2

    row = explained(tmp_path, leave_on).rows()[0]
    assert (row.module, row.cause) == ("blocks.1", "other is computed otherwise before: bernoulli, div, mul in B")


def test_other_tokens_are_no_rounding(tmp_path: Path) -> None:
    other = TOKENS.clone()
    other[0, 3] = 31
    a = record(tmp_path / "a", lambda: Decoder().loss())
    found = runs.explain(a, record(tmp_path / "b", lambda: Decoder().loss(other)))
    causes = {row.op: row.cause for row in found.rows()[:2]}
    assert causes == {"aten::embedding": "another indices", "aten::nll_loss_forward": "another target"}


def quantized(model: Decoder) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    ("change", "cause"),
    [(lambda model: model.bfloat16(), "bfloat16"), (quantized, "linear_dynamic"), (lambda model: model.double(), "")],
    ids=["bfloat16", "int8", "float64"],
)
def test_low_precision_is_explained_though_costs_cancel(change: Any, cause: str, tmp_path: Path) -> None:
    found = explained(tmp_path, change)
    assert 0.95 < found.explained / found.difference < 1.05
    assert cause in found.rows()[0].cause
    assert len(found.rows()) > 10


@pytest.mark.parametrize("by", BY)
def test_rows_of_each_kind_have_the_same_sum(by: Any, tmp_path: Path) -> None:
    found = explained(tmp_path, lambda model: model.bfloat16(), by=by)
    assert math.isclose(sum(row.cost for row in found.rows()), found.explained, abs_tol=1e-12)
    assert sum(row.calls for row in found.rows()) == len(found.all)
    assert [abs(row.cost) for row in found.rows()] == sorted((abs(row.cost) for row in found.rows()), reverse=True)
    assert "not explained" in str(found)


def test_confirming_measures_what_a_row_changes(tmp_path: Path) -> None:
    found = explained(tmp_path, lambda model: model.bfloat16(), confirm=3)
    first, *others = found.rows()
    # In bfloat16 the additions are small, so that the second order says nearly all.
    assert all(math.isclose(row.confirmed or 0.0, row.cost, rel_tol=0.1) for row in (first, *others[:2]))
    assert [row.confirmed for row in others[2:]] == [None] * (len(others) - 2)


def test_a_change_in_a_repeated_tensor_counts_once(tmp_path: Path) -> None:
    start = torch.ones(1, 4, requires_grad=True)

    def program(value: float) -> None:
        with torch.enable_grad():
            token = nn.Parameter(torch.full((1, 4), value))
            torch.cat([token.expand(3, 4), start]).exp().sum().backward()

    one, other = (record(tmp_path / str(value), program, value) for value in (1.0, 1.01))
    found = runs.explain(one, other)
    assert math.isclose(found.explained, found.difference, rel_tol=1e-4)


def test_writes_in_place_and_views_are_followed(tmp_path: Path) -> None:
    def program(factor: float) -> None:
        with torch.enable_grad():
            w = nn.Parameter(torch.linspace(0.1, 1, 8))
            x = (w * 2).view(2, 4)
            cache = torch.zeros(4, 4)
            cache[1:3] = x
            cache[0].copy_(x[1]).mul_(factor)
            cache.t()[1:].sin().square().sum().backward()

    one, other = (record(tmp_path / str(factor), program, factor) for factor in (0.9, 0.91))
    found = runs.explain(one, other)
    row = found.rows()[0]
    assert (row.op, row.cause) == ("aten::mul_", "another argument: other=0.91 for 0.9")
    assert math.isclose(row.cost, found.difference, rel_tol=1e-3)


def test_the_path_says_where_the_error_comes_in_and_dies(tmp_path: Path) -> None:
    w = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

    def program(slope: float) -> None:
        with torch.enable_grad():
            made = F.leaky_relu(w.sin(), slope)
            (made.sign() * w + made.clamp_min(0.5)).sum().backward()

    one, other = (record(tmp_path / str(slope), program, slope) for slope in (0.1, 0.2))
    path = runs.explain(one, other).path
    a, b = (F.leaky_relu(w.detach().sin(), slope).double() for slope in (0.1, 0.2))
    far = float((b - a).norm() / a.norm())
    assert [(each.op, each.relative) for each in path[:2]] == [("aten::sin", 0.0), ("aten::leaky_relu", far)]
    assert {each.relative for each in path[2:]} == {0.0}  # signs and large values are the same
    assert path[1].roundings == far / 2**-24
    low = record(tmp_path / "low", lambda: w.detach().bfloat16().sin().float().exp())
    rounded = runs.explain(record(tmp_path / "high", lambda: w.detach().sin().exp()), low).path
    for each in rounded:  # the second one is in float32, of what was rounded to bfloat16
        assert (each.dtype, each.roundings) == ("bfloat16", each.relative * 2**8)
        assert 0.1 < each.roundings < 1


def test_the_path_leaves_out_what_is_infinite_in_both(tmp_path: Path) -> None:
    x = torch.arange(4.0)

    def program(factor: float) -> torch.Tensor:
        return (x * factor).masked_fill(x > 2, -math.inf)

    path = runs.explain(*(record(tmp_path / str(factor), program, factor) for factor in (1.0, 1.5))).path
    assert [each.relative for each in path if each.op == "aten::masked_fill"] == [0.5]
    from_zero = runs.explain(record(tmp_path / "zero", program, 0.0), runs.open_run(tmp_path / "1.0")).path
    assert [each.relative for each in from_zero if each.op == "aten::mul"] == [math.inf]


def test_without_a_loss_the_distance_of_the_outputs_is_explained(tmp_path: Path) -> None:
    a, b = Decoder(), Decoder()
    b.blocks[1].scale = 0.51
    one, other = (record(tmp_path / name, m, TOKENS) for name, m in (("a", a), ("b", b)))
    found = runs.explain(one, other)
    assert found.loss.startswith("norm of the difference of outputs, addmm in module 'head'")
    with torch.no_grad():
        distance = float((b(TOKENS).double() - a(TOKENS).double()).norm())
    assert found.losses[0] == 0.0
    assert math.isclose(found.losses[1], distance, rel_tol=1e-6)
    assert found.rows()[0].cause == "another argument: scale=0.51 for 0.5"
    assert 0.95 < found.rows()[0].share < 1.05


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_is_printed_is_the_loss(sign: int, tmp_path: Path) -> None:
    x = sign * torch.arange(4.0)

    def program(factor: float) -> str:
        (x * 2).sum()  # differs in neither
        return str((x * factor).sin().sum())

    found = runs.explain(*(record(tmp_path / str(factor), program, factor) for factor in (1.0, 1.5)))
    assert found.loss.startswith("loss, sum in no module")
    assert math.isclose(found.losses[1], float((x * 1.5).sin().sum()), rel_tol=1e-6)
    assert found.rows()[0].op == "aten::mul"
    assert 0.99 < found.rows()[0].share < 1.01


@pytest.mark.parametrize("loss", ["forward", "backward", "none"])
def test_what_is_printed_is_no_loss(loss: str, tmp_path: Path) -> None:
    def program(factor: float) -> None:
        large, small = torch.ones(40, 60) * factor, torch.ones(3) / factor
        with torch.enable_grad():
            x = torch.full((2, 3), factor, requires_grad=loss == "backward").sin()
            x = x if loss == "none" else x.sum()
            if loss == "backward":
                x.backward()
        str(x.detach()), [str(each) for each in (torch.arange(5), small > 1, small, large)]

    found = runs.explain(*(record(tmp_path / str(factor), program, factor) for factor in (1.0, 1.1)))
    what = "loss, sum" if loss != "none" else "norm of the difference of outputs, sin"
    assert found.loss.startswith(f"{what} in no module")


def test_log_probabilities_of_tokens_are_explained(tmp_path: Path) -> None:
    a, b = Decoder(), Decoder()
    b.blocks[0].factor = 0.98
    one, other = (record(tmp_path / name, m, TOKENS[:1]) for name, m in (("a", a), ("b", b)))
    found = runs.explain(one, other, tokens=[3, 1, 4])
    with torch.no_grad():
        chosen = [m(TOKENS[:1])[0, -3:].double().log_softmax(-1)[range(3), [3, 1, 4]].sum().item() for m in (a, b)]
    assert all(math.isclose(*each, rel_tol=1e-6) for each in zip(found.losses, chosen, strict=True))
    assert 0.95 < found.rows()[0].share < 1.05
    with pytest.raises(OpInterceptError, match=r"tokens must be whole numbers from 0 to 31, .*, got 32"):
        runs.explain(one, other, tokens=[32])


def test_another_call_may_be_the_loss(tmp_path: Path) -> None:
    found = explained(tmp_path, lambda model: setattr(model.blocks[0], "factor", 0.9))
    index = next(row.index for row in found.rows() if row.module == "head")
    again = explained(tmp_path / "again", lambda model: setattr(model.blocks[0], "factor", 0.9), loss=index)
    assert again.loss.startswith("norm of the difference of outputs, addmm in module 'head'")
    with pytest.raises(OpInterceptError, match="loss must be the index of a forward call of A that computes, got 9999"):
        explained(tmp_path / "wrong", lambda model: None, loss=9999)


def test_runs_without_values_are_refused(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run"), ops="all"):
        Decoder().loss()
    run = runs.open_run(tmp_path / "run")
    with pytest.raises(
        OpInterceptError, match="must have forward calls with all of their values; record it with `opint"
    ):
        runs.explain(run, run)


def test_the_result_is_plain_data(tmp_path: Path) -> None:
    found = explained(tmp_path, lambda model: setattr(model.blocks[0], "factor", 0.9))
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["rows"][0].keys() >= {"share", "cost", "op", "module", "source", "cause"}
    assert plain["difference"] == found.difference
    assert plain["explained"] == found.explained
    assert len(found.to_pandas()) == len(found.rows())


def test_an_operator_that_cannot_be_computed_is_told(tmp_path: Path) -> None:
    def program(factor: float) -> None:
        with torch.enable_grad():
            w = nn.Parameter(torch.ones(4, 4))
            torch.linalg.householder_product(w * factor, torch.ones(4)).sum().backward()

    runs_of = [record(tmp_path / str(factor), program, factor) for factor in (1.0, 1.1)]
    found = runs.explain(*runs_of)
    assert math.isclose(found.explained + found.remainder, found.difference)


def test_two_copies_of_a_model_are_alike(tmp_path: Path) -> None:
    model = Decoder()
    one, other = (record(tmp_path / n, m.loss) for n, m in (("a", model), ("b", copy.deepcopy(model))))
    assert runs.explain(one, other).equal
