"""What B looks up in a table instead of what A does is named: other rows, or another table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from opintercept import intercept, runs

_RANDOM = torch.Generator().manual_seed(0)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
TABLE, OTHER, PLACES = (torch.randn(20, 16, generator=_RANDOM) for _ in range(3))
UP, OUT = (torch.randn(16, 16, generator=_RANDOM) / 4 for _ in range(2))


def why(folder: Path, *programs: Callable[[], Tensor]) -> runs.Answer:
    opened = []
    for name, program in zip("ab", programs, strict=True):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, tensors="full"), ops="all"):
            program()
        opened.append(runs.open_run(folder / name))
    return runs.why(*opened)


def model(tokens: Tensor, places: Tensor, table: Tensor = TABLE) -> Tensor:
    x = F.embedding(tokens, table) + F.embedding(places, PLACES)
    x = F.layer_norm(x + F.linear(x, UP).tanh(), (16,))
    return F.linear(F.linear(x, UP).relu(), OUT)


def both(table: Tensor, bias: Tensor) -> Tensor:
    """A model with two tables of the same size, of which the second may be taken for the first."""
    x = F.linear(F.embedding(TOKENS, table), UP).tanh()
    return F.linear(x + F.embedding(TOKENS, bias).flip(-1), OUT)


def left_padded(counts: bool) -> Tensor:
    """Three tokens before the others, whose places are counted from the first of all or from the first token."""
    tokens, start = F.pad(TOKENS, (3, 0), value=19), 0 if counts else -3
    return model(tokens, (torch.arange(11) + start).clamp_min(0))[:, 3:]


def count() -> Tensor:
    return torch.arange(1, 9) - 1


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (lambda: model(TOKENS.roll(1, -1), count()), "looks up rows shifted by 1 place"),
        (lambda: model(TOKENS, count() + 1), "looks up rows shifted by 1"),
        (lambda: model(TOKENS + (TOKENS == 9), count()), "looks up other rows: row 0 of 2 differs, by up to 1"),
        (lambda: left_padded(True), "looks up rows shifted by 3"),
        (lambda: torch.cat([model(each[None] + (each == 9), count()) for each in TOKENS]), "looks up other rows"),
    ],
    ids=["tokens", "places", "a token", "left padding", "a token, one by one"],
)
def test_rows_that_are_looked_up_are_held_against_those_of_a(
    other: Callable[[], Tensor], what: str, tmp_path: Path
) -> None:
    found = why(tmp_path, lambda: model(TOKENS, count()), other)
    (cause,) = found.causes
    assert cause.what.startswith(what)
    assert cause.place.op == "aten::embedding"


def test_another_table_is_named_by_who_looks_up_in_it(tmp_path: Path) -> None:
    found = why(tmp_path, lambda: both(TABLE, OTHER), lambda: both(TABLE, TABLE))
    (cause,) = found.causes
    assert (cause.kind, cause.what.startswith("looks up in the table of embedding")) == ("weight", True)


@pytest.mark.parametrize(
    "other",
    [
        lambda: TABLE[TOKENS].flatten(),
        lambda: left_padded(False),
        lambda: torch.cat([model(each[None], count()) for each in TOKENS]),
    ],
    ids=["index", "left padding", "one by one"],
)
def test_lookups_in_other_words_accuse_nobody(other: Callable[[], Tensor], tmp_path: Path) -> None:
    one = (lambda: F.embedding(TOKENS, TABLE)) if other().dim() == 1 else lambda: model(TOKENS, count())
    assert why(tmp_path, one, other).causes == ()
