"""Rows of weights are found whatever their layout, and calls are joined by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from opintercept import intercept, runs
from opintercept.runs.why.joining import weights
from opintercept.runs.why.joining.calls import JoinedCalls, linked
from opintercept.runs.why.joining.rows import fingerprints
from opintercept.runs.why.joining.weights import Joining, Side


def joined(folder: Path, one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Joining, JoinedCalls]:
    sides = []
    for name, program in (("a", one), ("b", other)):
        with torch.no_grad(), intercept(runs.RunRecorder(folder / name, "full")):
            program()
        sides.append(Side.of(runs.open_run(folder / name)))
    joining = Joining(*sides)
    return joining, linked(joining)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31))
def test_fingerprints_are_those_of_rows_and_not_of_layouts(n: int, k: int, seed: int) -> None:
    rows = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    found = fingerprints(rows)
    for same in (rows.float(), rows.double(), rows.mT.contiguous().mT, rows.repeat(1, 2)[:, :k]):
        assert np.array_equal(fingerprints(same), found)
    order = torch.randperm(k)
    assert np.array_equal(fingerprints(rows[:, order], ordered=False), fingerprints(rows, ordered=False))
    changed = rows.clone()
    changed[0, k // 2] += 1
    assert fingerprints(changed)[0] != found[0]
    assert np.array_equal(fingerprints(changed)[1:], found[1:])


def test_tied_weights_are_joined_call_by_call(tmp_path: Path) -> None:
    shared, apart = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    apart.weight.data = shared.weight.data.clone()
    x = torch.randn(3, 16)
    _, links = joined(tmp_path, lambda: shared(shared(x)), lambda: apart(shared(x)))
    assert {a: [b for b, _ in found] for a, found in links.of_a.items()} == {0: [0], 1: [1]}


def test_equal_rows_are_joined_in_their_order(tmp_path: Path) -> None:
    whole, x = torch.randn(8, 16), torch.randn(3, 16)
    whole[2] = whole[5]
    whole[6:] = 0.0
    joining, links = joined(tmp_path, lambda: x @ whole.mT, lambda: (x @ whole[:4].mT, x @ whole[4:].mT))
    found = [dict(zip(each.rows_a.tolist(), each.rows_b.tolist(), strict=True)) for each in joining.matches]
    assert found == [{row: row for row in range(4)}, {row + 4: row for row in range(4)}]
    assert links.of_b == {0, 1}


@pytest.mark.parametrize("seed", range(3))
def test_rows_too_short_to_tell_are_joined_in_their_order(seed: int, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(n, k, generator=generator) for n, k in ((128, 32), (64, 2), (64, 2))]
    scales = [each.abs().amax(1, keepdim=True) / 127 for each in weights]
    others = [(each / scale).round() * scale for each, scale in zip(weights, scales, strict=True)]

    def program(weights: list[torch.Tensor]) -> Callable[[], Any]:
        return lambda: [torch.ones(3, each.shape[1]) @ each.mT for each in weights]

    joining, _ = joined(tmp_path, program(weights), program(others))
    for number, weight in enumerate(weights):
        own = [each for each in joining.matches if each.a == number]
        rows_a, rows_b = (np.concatenate([getattr(each, name) for each in own]) for name in ("rows_a", "rows_b"))
        assert {each.b for each in own} == {number}
        assert np.array_equal(rows_a, rows_b)
        assert sorted(rows_a.tolist()) == [*range(len(weight))]


def permuted(w: torch.Tensor) -> torch.Tensor:
    return w[:, torch.randperm(32, generator=torch.Generator().manual_seed(1))].contiguous()


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w.flip(0),
    "permuted": permuted,
    "values": lambda w: w + 0.01 * torch.randn_like(w),
    "neighbours": torch.randn_like,
}


@pytest.mark.parametrize("by", FORMS)
def test_how_weights_were_joined_is_known(by: str, tmp_path: Path) -> None:
    w, last, x = torch.randn(8, 32), torch.randn(4, 8), torch.randn(3, 32)
    other = FORMS[by](w)
    joining, links = joined(tmp_path, lambda: x @ w.mT @ last.mT, lambda: x @ other.mT @ last.mT)
    assert {joining.matches[match].by for _, match in links.of_a[0] if match is not None} == {by}


@pytest.mark.parametrize(("changed", "known"), [(lambda rows: torch.randn_like(rows[:30]), 50), (FORMS["values"], 79)])
def test_far_too_many_rows_are_not_compared_in_pairs(
    changed: Callable[[torch.Tensor], torch.Tensor], known: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = torch.randn(80, 16, generator=torch.Generator().manual_seed(7))
    other, x = rows.clone(), torch.randn(2, 16)
    other[: len(changed(rows))] = changed(rows)
    other[0] = -rows[0]
    pairs = list[int]()

    def noting(own: Callable[..., Any], *given: torch.Tensor) -> Any:
        pairs.append(len(given[0]) ** 2)
        return own(*given)

    for name in ("distances", "_mutual"):
        monkeypatch.setattr(weights, name, functools.partial(noting, getattr(weights, name)))
    monkeypatch.setattr(weights, "_MOST", 100)
    joining, _ = joined(tmp_path, lambda: x @ rows.mT, lambda: x @ other.mT)
    assert max(pairs, default=0) <= 100
    found = [row for each in joining.matches for row in each.rows_a.tolist()]
    assert [*range(80 - known, 80)] == sorted({*found} - {0})[-known:]


def test_a_parameter_that_changes_in_place_stays_the_same_weight(tmp_path: Path) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(3, 16)

    def trained() -> None:
        for _ in range(3):
            layer(x)
            layer.weight.add_(torch.randn(16, 16))

    joining, links = joined(tmp_path, trained, trained)
    assert [side.weight for side in (joining.a, joining.b)] == [[0, 0, 0]] * 2
    assert {a: [b for b, _ in found] for a, found in links.of_a.items()} == {0: [0], 1: [1], 2: [2]}
