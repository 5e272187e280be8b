"""`Experts`: the tokens of each expert, in whichever way a program multiplies them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from opintercept import hooks, intercept, register_op

IDS = torch.arange(24).remainder(7).view(2, 12)


def mixtral(way: str) -> tuple[nn.Module, list[list[int]]]:
    """A model of two layers, and the tokens that its routers choose for each expert."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "vocab_size": 7, "num_hidden_layers": 2}
    config = transformers.MixtralConfig(num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, **sizes)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(way)
    chosen: list[list[int]] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda module, args, out: chosen.append(out[-1].flatten().bincount(minlength=5).tolist())
        )
    return model, chosen


@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_tokens_are_those_that_the_router_chooses(way: str) -> None:
    model, chosen = mixtral(way)
    experts = hooks.Experts()
    with intercept(experts):
        model(IDS).logits.sum().backward()
    names = [f"model.layers.{n}.mlp.experts" for n in (0, 1)]
    assert [(row.module, row.tokens) for row in experts.rows()] == [*zip(names, chosen, strict=True)]
    assert experts.rows()[0].imbalance == max(chosen[0]) * 5 / (2 * IDS.numel())
    assert f"{names[0]}  {' '.join(map(str, chosen[0]))}  " in str(experts)


def test_experts_in_a_list_of_modules_are_counted_by_name() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(4))

        def forward(self, x: Tensor) -> None:
            for expert, tokens in (2, 3), (0, 1), (2, 1):
                self.experts[expert](x[:tokens])

    experts = hooks.Experts()
    with intercept(experts):
        Mixture()(torch.ones(3, 4))
    assert [(row.module, row.tokens) for row in experts.rows()] == [("experts", [1, 0, 4])]


def test_a_fused_kernel_tells_its_experts_by_number() -> None:
    @torch.library.custom_op("experts_test::fused", mutates_args=())
    def fused(x: Tensor, w: Tensor, topk_ids: Tensor) -> Tensor:
        return x.clone()

    experts, name = hooks.Experts(), "experts_test::fused"
    with register_op(name, lhs="x", rhs="w", layout=None, flops=lambda **_: 0), intercept(experts):
        fused(torch.ones(2, 4), torch.ones(3, 4, 4), torch.tensor([[0, 2], [2, 1]]))
        torch.ones(2, 4) @ torch.ones(4, 4)
    assert [row.tokens for row in experts.rows()] == [[1, 1, 2]]
