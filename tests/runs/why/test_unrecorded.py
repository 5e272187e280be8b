"""Of a run of products, `why` says what its operands show, and nothing of the operators that were not recorded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.why.answer import Answer

X = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
        self.first, self.second, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.table(torch.arange(12)) + x)
        hidden = hidden + self.second(self.first(hidden).relu())
        made: Tensor = self.head(hidden)
        return made


def told(folder: Path, one: Callable[[], Any], other: Callable[[], Any], ops: str = "matmul") -> Answer:
    """The answer about a run of all operators and one of products."""
    for name, which, program in (("a", "all", one), ("b", ops, other)):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, tensors="full"), ops=which):
            program()
    return runs.why(runs.open_run(folder / "a"), runs.open_run(folder / "b"))


def test_a_bias_within_the_last_product_is_one_that_a_adds_behind_it(tmp_path: Path) -> None:
    head = nn.Linear(16, 8)
    found = told(tmp_path, lambda: X @ head.weight.mT + head.bias, lambda: head(X))
    assert (found.verdict, found.causes) == ("rounding", ())


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def changed(model: Model, change: Callable[[Model], object]) -> Model:
    twin = copy.deepcopy(model)
    change(twin)
    return twin


def by_hand(model: Model) -> Tensor:
    """The same, with biases behind the products."""
    hidden = F.layer_norm(model.table.weight + X, (16,), model.norm.weight, model.norm.bias)
    inner = (hidden @ model.first.weight.mT + model.first.bias).clamp(min=0)
    hidden = hidden + inner @ model.second.weight.mT + model.second.bias
    return hidden @ model.head.weight.mT + model.head.bias


def test_what_b_adds_behind_its_products_accuses_nobody(model: Model, tmp_path: Path) -> None:
    found = told(tmp_path, lambda: model(X), lambda: by_hand(model))
    assert (found.verdict, found.causes, found.operators) == ("rounding", (), "products")
    assert (found.joined, found.calls) == (3, 3)
    assert re.search(
        r"up to and with the last product, head \(.*\). What follows it was not compared.$", found.sentence
    )
    assert "the bias of the last product" in "".join(found.notes)


def test_a_bias_that_is_left_out_is_named(model: Model, tmp_path: Path) -> None:
    twin = changed(model, lambda twin: twin.first.bias.data.zero_())
    found = told(tmp_path, lambda: model(X), lambda: by_hand(twin))
    assert [(each.what, each.place.module, each.exact) for each in found.causes] == [
        ("has no bias here", "first", True)
    ]


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_vector_that_only_an_operand_shows_is_solved_for(name: str, model: Model, tmp_path: Path) -> None:
    twin = changed(model, lambda twin: getattr(twin.norm, name).data[3].add_(0.125))
    found = told(tmp_path, lambda: model(X), lambda: twin(X))
    assert [(each.kind, each.what, each.place.module) for each in found.causes] == [
        ("weight", f"has another {name}: 1 of 16 numbers differ, by up to 0.12", "norm")
    ]


def test_weights_that_are_rounded_throughout_round_those_that_were_not_recorded(model: Model, tmp_path: Path) -> None:
    twin = copy.deepcopy(model).bfloat16().float()
    found = told(tmp_path, lambda: model(X), lambda: twin(X))
    assert (found.verdict, found.causes) == ("coarser", ())
    assert [each.what for each in found.coarser] == ["has its weights in bfloat16: 3 of 4 weights"]


def test_what_nothing_reproduces_is_unknown_where_nothing_vindicates_it(model: Model, tmp_path: Path) -> None:
    twin = changed(model, lambda twin: nn.init.normal_(twin.table.weight))
    (cause,) = told(tmp_path, lambda: model(X), lambda: twin(X)).causes
    assert (cause.kind, cause.what, cause.place.module, cause.only_a, cause.only_b) == ("unknown", "", "table", (), ())
    assert cause.until is not None
    assert cause.until.module == "norm"


def test_rows_of_another_token_are_named(model: Model, tmp_path: Path) -> None:
    def last(shift: int) -> Tensor:
        hidden = model.norm(X)
        return model.head(hidden[shift : shift + 4])  # type: ignore[no-any-return]

    (cause,) = told(tmp_path, lambda: last(0), lambda: last(5)).causes
    assert (cause.kind, cause.place.module) == ("operand", "Linear")
    assert cause.what.startswith("reads another part of the result of LayerNorm")


def test_an_operator_that_reproduces_the_operand_is_named(model: Model, tmp_path: Path) -> None:
    def program(activation: Callable[[Tensor], Tensor]) -> Tensor:
        return model.head(model.second(activation(model.first(model.norm(X)))))  # type: ignore[no-any-return]

    (cause,) = told(tmp_path, lambda: program(torch.relu), lambda: program(F.silu)).causes
    assert (cause.kind, cause.what) == ("operator", "computes silu where A computes relu")


def test_a_number_before_the_last_product_may_be_one_behind_it(model: Model, tmp_path: Path) -> None:
    def program(before: float, behind: float) -> Callable[[], Tensor]:
        return lambda: model.second(model.first(X).relu()) * before @ model.head.weight.mT * behind

    found = told(tmp_path / "clean", program(0.3, 1.0), program(1.0, 0.3))
    assert (found.verdict, found.causes, found.behind) == ("not compared", (), ("mul",))
    assert any("a number by which only A multiplies" in note for note in found.notes)
    found = told(tmp_path / "wrong", program(0.3, 1.0), program(0.4, 1.0))
    assert [cause.what for cause in found.causes] == ["uses 0.4 where A uses 0.3"]


@pytest.mark.parametrize("ops", ["all", "matmul"])
@pytest.mark.parametrize("first", ["plain", "coded"])
def test_weights_of_whole_numbers_are_compared_as_products(first: str, ops: str, model: Model, tmp_path: Path) -> None:
    def codes(layer: nn.Linear, x: Tensor) -> Tensor:
        scale = layer.weight.abs().amax(1) / 127
        return x @ (layer.weight / scale[:, None]).round().mT * scale + layer.bias

    def coded() -> Tensor:
        return codes(model.head, codes(model.second, codes(model.first, X).relu()))

    def plain() -> Tensor:
        return model.head(model.second(model.first(X).relu()))  # type: ignore[no-any-return]

    found = told(tmp_path, *((plain, coded) if first == "plain" else (coded, plain)), ops=ops)
    assert (found.verdict, found.causes) == ("coarser", ())
    only = {
        ("coded", "all"): "only products were compared, since A multiplies whole numbers",
        ("plain", "all"): "",
    }.get((first, ops), "only products were recorded of B, so others of A were not compared")
    assert only in "".join(found.notes)


def test_passes_of_other_batches_are_compared_forward(tmp_path: Path) -> None:
    layer, y = nn.Linear(16, 4), torch.arange(12) % 4

    def train(parts: int) -> None:
        layer.zero_grad()
        with torch.enable_grad():
            for own, labels in zip(X.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(layer(own), labels) / parts).backward()

    found = told(tmp_path, lambda: train(1), lambda: train(3))
    assert (found.causes, found.equal) == ((), True)


def test_what_only_a_computes_behind_the_last_product_is_not_called_equal(model: Model, tmp_path: Path) -> None:
    labels = torch.arange(12) % 8
    found = told(tmp_path, lambda: F.cross_entropy(model(X), labels), lambda: F.cross_entropy(model(X) / 2, labels))
    assert (found.verdict, found.causes, found.equal) == ("not compared", (), False)
    assert re.fullmatch(
        r"I do not know: nothing differs by more than rounding, up to and with the last product, head \(.*\). "
        r"What follows it, log_softmax and nll_loss_forward, was not compared.",
        found.sentence,
    )
