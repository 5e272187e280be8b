"""All observing hooks at once leave a training run as it is, bit for bit."""

from __future__ import annotations

import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opintercept import OpCall, hooks, intercept

pytestmark = pytest.mark.slow


class Small(nn.Module):
    """A Transformer with dropout, fused attention, a shared weight and a convolution in front."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


class Run:
    """A run for `Scalars` that keeps nothing."""

    def log(self, values: dict[str, float], step: int) -> None:
        assert values


def observers() -> list[Any]:
    """One of each observing hook."""
    quiet = logging.getLogger("opintercept.tests.quiet")
    quiet.propagate = False
    return [
        hooks.Print(io.StringIO()),
        hooks.Log(quiet, values="sample"),
        hooks.Recorder(),
        hooks.Profile(),
        hooks.Stats(("lhs", "rhs", "bias", "output"), for_dtype=torch.float8_e4m3fn, histogram=True),
        hooks.NonFinite(inf=True),
        hooks.NonFinite(every=7, action="record"),
        hooks.Capture(of=("lhs", "rhs", "output")),
        hooks.Gradients(),
        hooks.AttentionWeights(),
        hooks.Reference(),
        hooks.Scalars(Run()),
        hooks.Checksum(estimate=True),
        hooks.Replicas(),
        hooks.when(lambda call: None, every=2),
    ]


def train(*options: dict[str, Any]) -> list[Tensor]:
    """Train for three steps, and return the losses, the last gradients, the parameters and the random state."""
    torch.manual_seed(5)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 50, (2, 7))
        with torch.autocast("cpu", enabled=step == 1):
            loss = nn.functional.cross_entropy(model(tokens).transpose(1, 2).float(), tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:AttentionWeights skipped")  # function level does not see inside it
@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("options", [{}, {"engine": "mode"}, {"level": "function"}], ids=["kernel", "mode", "function"])
def test_all_observing_hooks_together_change_nothing(options: dict[str, Any]) -> None:
    bare = train()
    chosen = observers()
    with intercept(chosen, **options):
        watched = train()
    assert len(bare) == len(watched)
    for place, (one, other) in enumerate(zip(bare, watched, strict=True)):
        assert torch.equal(one, other), place
    recorder = next(hook for hook in chosen if isinstance(hook, hooks.Recorder))
    assert len(recorder.records) > 20


def test_the_same_comparison_notices_a_hook_that_edits() -> None:
    def nudge(call: OpCall) -> Tensor | None:
        if call.index == 7:
            return torch.nextafter(call.output, call.output + 1)
        return None

    bare = train()
    with intercept(nudge):
        edited = train()
    assert not all(torch.equal(one, other) for one, other in zip(bare, edited, strict=True))
