"""What causes and layers cost the loss: shares add up, and an experiment with one of them gives the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opintercept import intercept, runs

TOKENS = torch.arange(24).view(2, 12) * 7 % 32


class Block(nn.Module):
    """A block of a small decoder, each of whose settings a test may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.act: nn.Module = nn.GELU()
        self.scale, self.causal, self.factor = 0.5, True, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
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

    def loss(self) -> float:
        logits = self(TOKENS)[:, :-1].flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a loss of bfloat16 is all rounding
        return F.cross_entropy(logits, TOKENS[:, 1:].flatten()).item()


@torch.no_grad()
def recorded(folder: Path, model: Decoder) -> runs.Run:
    with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
        model.loss()
    return runs.open_run(folder)


def why(folder: Path, *changes: Callable[[Decoder], Any]) -> runs.Answer:
    """Ask for the difference of a decoder and one that was changed."""
    a, b = Decoder(), Decoder()
    with torch.no_grad():
        for change in changes:
            change(b)
    return runs.why(recorded(folder / "a", a), recorded(folder / "b", b))


CHANGES: dict[str, tuple[Callable[[Decoder], Any], str, str]] = {
    "scale": (lambda m: setattr(m.blocks[1], "scale", 0.55), "blocks.1", "uses scale=0.55 where A uses 0.5"),
    "mask": (lambda m: setattr(m.blocks[2], "causal", False), "blocks.2", "uses is_causal=False where A uses True"),
    "eps": (lambda m: setattr(m.blocks[1].norm, "eps", 0.01), "blocks.1.norm", "uses eps=0.01 where A uses 1e-05"),
    "another function": (lambda m: setattr(m.blocks[0], "act", nn.SiLU()), "blocks.0.act", "computes silu"),
    "its form": (lambda m: setattr(m.blocks[2], "act", nn.GELU("tanh")), "blocks.2.act", "uses approximate=tanh"),
    "a number": (lambda m: setattr(m.blocks[0], "factor", 0.99), "blocks.0", "0.99 where A uses 1"),
    "an element": (lambda m: m.blocks[1].up.weight[3, 5].add_(0.1), "blocks.1.up", "has another weight: row 3"),
    "a bias": (lambda m: m.blocks[0].out.bias[3].add_(0.1), "blocks.0.out", "has another bias: 1 of 16 numbers"),
    "a gain": (lambda m: m.blocks[1].norm2.weight.mul_(1.01), "blocks.1.norm2", "has another weight"),
    "a row of a table": (lambda m: m.embed.weight[7].mul_(1.05), "embed", "has another weight: row 7"),
    "a buffer": (lambda m: m.positions.mul_(1.02), "Decoder", ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_single_change_is_the_only_cause_and_has_the_whole_difference(name: str, tmp_path: Path) -> None:
    change, module, what = CHANGES[name]
    found = why(tmp_path, change)
    (cause,) = found.causes
    assert (cause.place.module or "") == module
    assert what in cause.what
    assert cause.share == pytest.approx(1, abs=0.01)  # the recorded losses are of float32
    assert found.loss is not None
    assert abs(found.loss.b - found.loss.a) > 1e-5


@pytest.mark.parametrize(
    "names",
    [("eps", "its form"), ("a row of a table", "mask"), ("another function", "an element"), ("scale", "a gain")],
)
def test_causes_in_a_row_cost_what_each_changes_with_those_before(names: tuple[str, str], tmp_path: Path) -> None:
    changes = [CHANGES[name][0] for name in names]
    found = why(tmp_path, *changes)
    model = Decoder().double()
    losses = [model.loss()]
    with torch.no_grad():
        for change in changes:
            change(model)
            losses.append(model.loss())
    measured = [after - before for before, after in itertools.pairwise(losses)]
    assert [cause.cost for cause in found.causes] == pytest.approx(measured, abs=1e-5)  # B's values are of float32


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """Round the weights of all products, each row on a grid of its own."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            step = module.weight.data.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
            module.weight.data = (module.weight.data / step).round() * step
    return model


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_cost_what_rounding_them_alone_changes(bits: int, tmp_path: Path) -> None:
    found = why(tmp_path, lambda model: rounded(model, bits))
    assert found.verdict == "coarser"
    plain = Decoder().loss()
    layers = {layer.module: layer.cost for layer in found.layers}
    alone = {}
    for name, module in Decoder().named_modules():
        if isinstance(module, nn.Linear):
            model = Decoder()
            rounded(model.get_submodule(name), bits)
            alone[name] = model.loss() - plain
    assert {*alone} <= {*layers}
    # What the other layers' rounding changes in between is of second order.
    order = [sorted(alone, key=lambda name: costs[name]) for costs in (layers, alone)]
    places = [[each.index(name) for name in alone] for each in order]
    assert torch.tensor(places).double().corrcoef()[0, 1] > 0.9  # Spearman's


def test_layers_of_bfloat16_add_up_to_the_difference_of_the_losses(tmp_path: Path) -> None:
    found = why(tmp_path, lambda model: model.bfloat16())
    assert found.loss is not None
    assert found.verdict == "rounding"
    assert sum(layer.cost for layer in found.layers) == pytest.approx(found.loss.b - found.loss.a, rel=0.01)
    assert "layers by what their rounding costs" in str(found)


def test_layers_are_not_told_of_programs_of_one_precision(tmp_path: Path) -> None:
    assert why(tmp_path, copy.copy).layers == ()
