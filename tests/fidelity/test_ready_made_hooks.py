"""All observing hooks at once leave a training run as it is, bit for bit."""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import COMPILED
from native import reading
from torch import Tensor, nn

from opintercept import OpCall, hooks, intercept, runs

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
        hooks.NonFinite(check_every=7, action="record"),
        hooks.Capture(of=("lhs", "rhs", "output")),
        hooks.Gradients(),
        hooks.AttentionWeights(),
        hooks.Reference(),
        hooks.Scalars(Run()),
        hooks.Checksum(estimate=True),
        hooks.Replicas(),
        hooks.Experts(),
        hooks.Audit(),
        hooks.when(lambda call: None, every_calls=2),
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


ENGINES = [{"engine": "kernel"}, COMPILED, {"engine": "mode"}]


@pytest.fixture
def converts_by_swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.filterwarnings("ignore:AttentionWeights skipped")
@pytest.mark.usefixtures("one_of_two_ranks", "converts_by_swapping")
@pytest.mark.parametrize("in_cpp", [False, True])
@pytest.mark.parametrize("options", [*ENGINES, {"level": "function"}])
def test_tensors_that_a_hook_has_seen_can_be_swapped(options: dict[str, Any], in_cpp: bool, tmp_path: Path) -> None:
    with reading(in_cpp):
        for hook in [*observers(), hooks.Checksum(recompute=True), *recorders(tmp_path)]:
            model, x = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 4)), torch.randn(100, 300)
            with intercept(hook, **options):
                for _ in range(3):
                    model(x).sum().backward()
                model.bfloat16()  # swaps parameters and gradients
                for parameter in model.parameters():
                    torch.utils.swap_tensors(parameter, nn.Parameter(torch.randn_like(parameter)))
                model(x.bfloat16()).sum().backward()


def recorders(folder: Path) -> list[Any]:
    """`RunRecorder`s that keep different things of tensors."""
    return [
        runs.RunRecorder(folder / "summary"),
        runs.RunRecorder(folder / "sample", tensors="sample"),
        runs.RunRecorder(folder / "full", tensors="full"),
        runs.RunRecorder(folder / "flight", tensors="full", flight=20),
    ]


@pytest.mark.usefixtures("one_of_two_ranks")
@pytest.mark.parametrize("options", ENGINES)
def test_hooks_need_no_random_operator_of_torch(options: dict[str, Any]) -> None:
    widths = [101 + 10 * ENGINES.index(options) + place if options in ENGINES else 301 + place for place in range(3)]
    a, b, x = torch.randn(*widths[:2]), torch.randn(*widths[1:]), torch.randn(3, widths[0])
    checksum = hooks.Checksum()
    before = random.getstate(), torch.get_rng_state()
    with reading(True):
        for chosen in ([checksum], observers()):
            with intercept(chosen, **options):
                # Vmap refuses random operators.
                torch.autograd.functional.jacobian(lambda x: torch.tanh(x @ a) @ b, x, vectorize=True)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (checksum.checked, checksum.skipped) == (4, {})


def test_the_same_comparison_notices_a_hook_that_edits() -> None:
    def nudge(call: OpCall) -> Tensor | None:
        if call.index == 7:
            return torch.nextafter(call.output, call.output + 1)
        return None

    bare = train()
    with intercept(nudge):
        edited = train()
    assert not all(torch.equal(one, other) for one, other in zip(bare, edited, strict=True))
