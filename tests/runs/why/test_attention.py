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
from opintercept.runs.why.answer import Cause
from opintercept.runs.why.products.products import judged_products

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
    return lambda q, k, v: dropout((q @ k.mT * scale + mask).softmax(-1), drop) @ v


def added(scale: float = 8**-0.5) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((TOKENS, TOKENS), -math.inf).triu(1).expand(8, -1, -1)
        scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=scale)
        mixed: Tensor = torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (2, 4))
        return mixed

    return attend


def grouped(rows: str) -> Attend:
    """Two heads in one product each, whose keys they share; `rows` is how the last product lays out its results."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v, q = k[:, ::2], v[:, ::2], q.unflatten(1, (2, 2))
        mask = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
        shares = (torch.einsum("bgrqe,bgke->bgrqk", q, k) * 8**-0.5 + mask).softmax(-1)
        mixed = torch.einsum(f"bgrqk,bgke->{rows}", shares, v)
        return torch.einsum(f"{rows}->bgrqe", mixed).flatten(1, 2)

    return attend


def flat(scale: float = 8**-0.5) -> Attend:
    """All sequences of the batch one after the other, of which none sees another."""

    def attend(*operands: Tensor) -> Tensor:
        q, k, v = (each.transpose(0, 1).flatten(1, 2) for each in operands)
        mask = torch.full((2, TOKENS, 2, TOKENS), -math.inf)
        mask[0, :, 0] = mask[1, :, 1] = torch.full((TOKENS, TOKENS), -math.inf).triu(1)
        scores = q @ k.mT * scale + mask.flatten(2).flatten(0, 1)
        mixed: Tensor = (scores.softmax(-1) @ v).unflatten(1, (2, -1)).transpose(0, 1)
        return mixed

    return attend


def told(folder: Path, one: Callable[[], Any], other: Callable[[], Any]) -> list[Cause]:
    for name, program in (("a", one), ("b", other)):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, "full")):
            program()
    found = judged_products(runs.open_run(folder / "a"), runs.open_run(folder / "b"))
    assert found.joined == found.calls
    return list(found.causes)


WINDOW = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().triu(-3)
BIAS = torch.full((TOKENS, TOKENS), -math.inf).triu(1) + 0.1 * torch.arange(TOKENS)
FORMS = {"fused": fused(), "eager": eager()}
BEFORE: Attend = lambda q, k, v: eager(1.0)(q * 8**-0.5, k, v)  # noqa: E731
OTHER_FORMS = {
    "heads in another order": Program(fused(), torch.tensor([2, 0, 3, 1])),
    "scaled before": Program(BEFORE),
    "added to the mask": Program(added()),
    "grouped by head": Program(grouped("bgrqe")),
    "grouped by token": Program(grouped("bqgre")),
    "flat": Program(flat()),
}


@pytest.mark.parametrize("other", [*FORMS, *OTHER_FORMS])
@pytest.mark.parametrize("one", FORMS)
def test_nothing_is_named_where_only_the_form_differs(one: str, other: str, tmp_path: Path) -> None:
    a, b = Program(FORMS[one]), OTHER_FORMS.get(other) or Program(FORMS[other])
    assert told(tmp_path, lambda: a(X), lambda: b(X)) == []


def biased(slope: float = 4.0, offset: float = 0.0, dtype: torch.dtype | None = None) -> Attend:
    """Adds positions to scores, which an offset of the keys makes large."""

    def attend(*operands: Tensor) -> Tensor:
        q, k, v = (each.to(dtype or each.dtype) for each in operands)
        scores = q @ (k + offset).mT * 8**-0.5 + slope * BIAS.to(q.dtype)
        return scores.softmax(-1) @ v

    return attend


def test_positions_added_to_scores_that_bfloat16_rounds_accuse_no_mask(tmp_path: Path) -> None:
    a, b = Program(biased(offset=40.0)), Program(biased(offset=40.0, dtype=torch.bfloat16)).bfloat16()
    x = X.bfloat16()
    assert told(tmp_path, lambda: a(x.float()), lambda: b(x)) == []


@pytest.mark.filterwarnings("ignore")  # torch.ao says that it moves
@pytest.mark.parametrize("slope", [4.0, 4.5])
def test_positions_added_to_scores_of_int8_are_compared(slope: float, tmp_path: Path) -> None:
    a: Any = Program(biased())
    b: Any = torch.ao.quantization.quantize_dynamic(Program(biased(slope)), {nn.Linear})
    found = told(tmp_path, lambda: a(8 * X), lambda: b(8 * X))
    assert ["mask" in cause.what for cause in found] == [True] * (slope != 4.0)


@pytest.mark.parametrize(
    ("attend", "what"),
    [
        (fused(scale=0.351), "uses scale=0.351 where A uses 0.353553"),
        (eager(scale=0.351), "uses scale=0.351 where A uses 0.353553"),
        (added(0.351), "uses scale=0.351 where A uses 0.353553"),
        (flat(0.351), "uses scale=0.351 where A uses 0.353553"),
        (fused(is_causal=False), "uses is_causal=False where A uses True"),
        (fused(is_causal=False, attn_mask=WINDOW), "uses another mask"),
        (eager(hidden=torch.zeros(TOKENS, TOKENS)), "uses another mask"),
        (eager(hidden=BIAS), "adds something else to scores"),
        (eager(drop=0.5), "uses dropout_p=another probability where A uses 0"),
        (lambda q, k, v: fused()(q, k[:, [0, 2, 1, 3]], v[:, [0, 2, 1, 3]]), "has heads in another order"),
        (lambda q, k, v: BEFORE(q, k[:, [0, 2, 1, 3]], v[:, [0, 2, 1, 3]]), "has heads in another order"),
    ],
    ids=[
        *(
            "scale",
            "scale outside",
            "scale beside the mask",
            "scale of flat tokens",
            "causal",
            "window",
            "mask outside",
            "bias outside",
        ),
        *("dropout", "heads", "heads, scaled before"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_a_changed_argument_is_named(swapped: bool, attend: Attend, what: str, tmp_path: Path) -> None:
    a, b = Program(fused()), Program(attend)
    a, b = (b, a) if swapped else (a, b)
    (cause,) = told(tmp_path, lambda: a(X), lambda: b(X))
    assert cause.kind == ("operand" if "heads" in what else "argument")
    assert cause.what.split("=")[0].startswith(what.split("=")[0])
    assert swapped or cause.what.startswith(what)


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_another_base_of_positions_changes_q_and_k(one: str, other: str, tmp_path: Path) -> None:
    a, b = Program(FORMS[one]), Program(FORMS[other], base=90.0)
    (cause,) = told(tmp_path, lambda: a(X), lambda: b(X))
    assert (cause.kind, [place.module for place in cause.after]) == ("operand", ["q", "k", "v"])
    assert cause.what.startswith("has other q and k, made after q")


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_a_scale_that_q_and_its_weight_share_accuses_nobody(one: str, other: str, tmp_path: Path) -> None:
    a, b = Program(FORMS[one]), Program({"fused": fused(scale=0.25), "eager": eager(0.25)}[other])
    b.q.weight.data *= 8**-0.5 / 0.25
    assert told(tmp_path / "made up", lambda: a(X), lambda: b(X)) == []
    b.q.weight.data *= 1.1
    found = told(tmp_path / "not made up", lambda: a(X), lambda: b(X))
    assert [cause.place.module for cause in found if cause.kind == "weight"] == ["q"]


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
    assert told(tmp_path / "right", lambda: a(X), lambda: decoded(b, X, 7)) == []
    assert told(tmp_path / "turned", lambda: decoded(b, X, 7), lambda: decoded(b, X, 5)) == []
    (cause,) = told(tmp_path / "stale", lambda: a(X), lambda: decoded(b, X, 7, stale=True))
    assert cause.what.startswith("has another k, made after q")


def test_sequences_of_a_batch_are_joined_with_single_and_padded_ones(tmp_path: Path) -> None:
    a = Program(fused())
    assert told(tmp_path / "single", lambda: a(X), lambda: [a(each[None]) for each in X]) == []
    assert told(tmp_path / "padded", lambda: a(X), lambda: a(pad(X, (0, 0, 0, 3)))) == []


def test_an_attention_is_wrong_only_beside_its_own_operands(tmp_path: Path) -> None:
    a, b = Program(fused()), Program(lambda q, k, v: fused()(q, k, v) * 1.001)
    (cause,) = told(tmp_path, lambda: a(X), lambda: b(X))
    assert (cause.kind, cause.place.module, cause.what.partition(" (")[0]) == (
        "operand",
        "o",
        "has another input, 1.001 times A's, made after Program",
    )
