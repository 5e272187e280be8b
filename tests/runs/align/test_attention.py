"""What differs between two attentions is named, whether they are one operator or two products."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad, scaled_dot_product_attention

from opintercept import intercept, runs
from opintercept.runs.align.alignment import Aligned

TOKENS = 12
X = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(3))
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotated(x: Tensor, base: float, start: int = 0) -> Tensor:
    angles = torch.arange(start, start + x.size(-2))[:, None] * base ** (-torch.arange(4) / 4)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


class Program(nn.Module):
    """Four query heads, two heads of keys and values, and what a test changes."""

    def __init__(self, attend: Attend, order: Tensor | None = None, base: float = 100.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.q, self.o = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.k, self.v = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        self.attend, self.base = attend, base
        self.order = torch.arange(4) if order is None else order

    def heads(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return rotated(q, self.base, start), rotated(k, self.base, start), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = self.attend(*(each[:, self.order] for each in (q, k, v)))[:, self.order.argsort()]
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


def fused(**arguments: Any) -> Attend:
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, **{"is_causal": True} | arguments)


def eager(scale: float = 8**-0.5, hidden: Tensor | None = None, drop: float = 0.0) -> Attend:
    mask = torch.full((TOKENS, TOKENS), -math.inf).triu(1) if hidden is None else hidden

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dropout((q @ k.mT * scale + mask).softmax(-1), drop) @ v

    return attend


def added(scale: float = 8**-0.5) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((TOKENS, TOKENS), -math.inf).triu(1).expand(8, -1, -1)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
        mixed: Tensor = torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (2, 4))
        return mixed

    return attend


def first(folder: Path, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Aligned | None, str]:
    for name, program in (("a", one), ("b", other)):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, "full")):
            program()
    found = runs.align(runs.open_run(folder / "a"), runs.open_run(folder / "b"))
    assert not found.apart
    return found.first, str(found)


WINDOW = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-3)
BIAS = torch.full((TOKENS, TOKENS), -math.inf).triu(1) + 0.1 * torch.arange(TOKENS)
FORMS = {"fused": fused(), "eager": eager()}


@pytest.mark.parametrize("other", [*FORMS, "heads in another order", "scaled before", "added to the mask"])
@pytest.mark.parametrize("one", FORMS)
def test_nothing_is_named_where_only_the_form_differs(one: str, other: str, tmp_path: Path) -> None:
    twins = {
        "heads in another order": Program(fused(), torch.tensor([2, 0, 3, 1])),
        "scaled before": Program(lambda q, k, v: eager(1.0)(q * 8**-0.5, k, v)),
        "added to the mask": Program(added()),
    }
    a, b = Program(FORMS[one]), twins.get(other) or Program(FORMS[other])
    found, text = first(tmp_path, lambda: a(X), lambda: b(X))
    assert found is None
    assert "no difference above rounding in any joined call" in text


def biased(slope: float = 4.0, offset: float = 0.0, dtype: torch.dtype | None = None) -> Attend:
    """Adds positions to scores, which an offset of the keys makes large."""

    def attend(*operands: Tensor) -> Tensor:
        q, k, v = (each.to(dtype or each.dtype) for each in operands)
        scores = q @ (k + offset).mT * 8**-0.5 + slope * BIAS.to(q.dtype)
        return scores.softmax(-1) @ v

    return attend


def in_int8(attend: Attend) -> nn.Module:
    model: nn.Module = torch.ao.quantization.quantize_dynamic(Program(attend), {nn.Linear})
    return model


def test_positions_added_to_scores_that_bfloat16_rounds_accuse_no_mask(tmp_path: Path) -> None:
    a, b = Program(biased(offset=40.0)), Program(biased(offset=40.0, dtype=torch.bfloat16)).bfloat16()
    x = X.bfloat16()
    found, text = first(tmp_path, lambda: a(x.float()), lambda: b(x))
    assert found is None, text


@pytest.mark.filterwarnings("ignore")  # torch.ao says that it moves
@pytest.mark.parametrize("slope", [4.0, 4.5])
def test_positions_added_to_scores_of_int8_are_compared(slope: float, tmp_path: Path) -> None:
    a, b = Program(biased()), in_int8(biased(slope))
    found, text = first(tmp_path, lambda: a(8 * X), lambda: b(8 * X))
    assert (found and found.changed) == (None if slope == 4.0 else ("attn_mask",)), text


@pytest.mark.parametrize(
    ("attend", "changed", "line"),
    [
        (fused(scale=0.351), "scale", "scale: 0.353553 in A, 0.351 in B"),
        (eager(scale=0.351), "scale", "scale: 0.353553 in A, 0.351 in B"),
        (added(0.351), "scale", "scale: 0.353553 in A, 0.351 in B"),
        (fused(is_causal=False), "is_causal", "is_causal: True in A, False in B"),
        (fused(is_causal=False, attn_mask=WINDOW), "attn_mask", "attn_mask differs"),
        (eager(hidden=torch.zeros(TOKENS, TOKENS)), "attn_mask", "attn_mask differs"),
        (eager(hidden=BIAS), "attn_mask", "attn_mask differs"),
        (eager(drop=0.5), "dropout_p", "dropout_p"),
        (lambda q, k, v: fused()(q, k[:, [0, 2, 1, 3]], v[:, [0, 2, 1, 3]]), "heads", "heads do not belong"),
        (
            lambda q, k, v: eager(1.0)(q * 8**-0.5, k[:, [0, 2, 1, 3]], v[:, [0, 2, 1, 3]]),
            "heads",
            "heads do not belong",
        ),
    ],
    ids=[
        *("scale", "scale outside", "scale beside the mask", "causal", "window", "mask outside", "bias outside"),
        *("dropout", "heads", "heads, scaled before"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_a_changed_argument_is_named(swapped: bool, attend: Attend, changed: str, line: str, tmp_path: Path) -> None:
    a, b = Program(fused()), Program(attend)
    a, b = (b, a) if swapped else (a, b)
    found, text = first(tmp_path, lambda: a(X), lambda: b(X))
    assert found is not None
    assert (found.kind, found.changed) == ("changed argument", (changed,))
    assert swapped or f"changed argument: {line}" in text


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_another_base_of_positions_changes_q_and_k(one: str, other: str, tmp_path: Path) -> None:
    a, b = Program(FORMS[one]), Program(FORMS[other], base=90.0)
    found, text = first(tmp_path, lambda: a(X), lambda: b(X))
    assert found is not None
    assert (found.kind, found.changed) == ("changed operand", ("q", "k"))
    assert "changed operand: q and k differ (v does not)" in text
    assert "the cause lies between q and this call" in text


def decoded(program: Program, x: Tensor, prefill: int, stale: bool = False) -> None:
    """Compute the first tokens at once and the others one by one."""
    past: list[Tensor] = []
    for at, end in [(0, prefill), *((i, i + 1) for i in range(prefill, x.size(1)))]:
        q, k, v = program.heads(x[:, at:end], at)
        if past:
            old = torch.cat([past[0][..., :-1, :], past[0][..., :1, :]], 2) if stale else past[0]
            k, v = torch.cat([old, k], 2), torch.cat([past[1], v], 2)
        past = [k, v]
        mixed = scaled_dot_product_attention(q, k, v, is_causal=not at, enable_gqa=True)
        program.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("one", FORMS)
def test_decoding_with_a_cache_is_joined_with_one_pass(one: str, tmp_path: Path) -> None:
    a, b = Program(FORMS[one]), Program(fused())
    assert first(tmp_path / "right", lambda: a(X), lambda: decoded(b, X, 7))[0] is None
    assert first(tmp_path / "turned", lambda: decoded(b, X, 7), lambda: decoded(b, X, 5))[0] is None
    found, _ = first(tmp_path / "stale", lambda: a(X), lambda: decoded(b, X, 7, stale=True))
    assert found is not None
    assert found.changed == ("k",)


def test_sequences_of_a_batch_are_joined_with_single_and_padded_ones(tmp_path: Path) -> None:
    a = Program(fused())
    assert first(tmp_path / "single", lambda: a(X), lambda: [a(each[None]) for each in X])[0] is None
    assert first(tmp_path / "padded", lambda: a(X), lambda: a(pad(X, (0, 0, 0, 3))))[0] is None


def test_an_attention_is_wrong_only_beside_its_own_operands(tmp_path: Path) -> None:
    a, b = Program(fused()), Program(lambda q, k, v: fused()(q, k, v) * 1.001)
    found, text = first(tmp_path, lambda: a(X), lambda: b(X))
    assert found is not None
    assert (found.kind, found.changed, found.a.record.module) == ("changed operand", ("lhs",), "o")
    assert "times what rounding allows" not in text
