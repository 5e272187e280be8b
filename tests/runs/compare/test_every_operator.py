"""Runs of all operators: `diff` names the operator that makes a difference, whatever it is, and what inherits it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from opintercept import hooks, intercept, runs


class Net(torch.nn.Module):
    """Attention by hand, a norm and an MLP, each with a setting that two runs may differ in."""

    def __init__(self, eps: float, form: str, dtype: torch.dtype | None, mask: float, p: float, bias: float) -> None:
        super().__init__()
        self.dtype, self.mask, self.form = dtype, mask, form
        self.norm = torch.nn.LayerNorm(8, eps=eps)
        self.qkv, self.up, self.down = torch.nn.Linear(8, 24), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.drop = torch.nn.Dropout(p)
        with torch.no_grad():
            self.up.bias.add_(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), self.mask)
        x = x + F.softmax(scores, -1, dtype=self.dtype).to(x.dtype) @ v
        made: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(x), approximate=self.form))) * 1.0
        return made


SAME = (1e-5, "none", None, -1e4, 0.0, 0.0)
CHANGES = {
    "epsilon": (0, 1e-3, "aten::native_layer_norm", "norm", "changed argument"),
    "gelu": (1, "tanh", "aten::gelu", "Net", "changed argument"),
    "softmax": (2, torch.float64, "aten::_softmax", "Net", "changed operand"),
    "mask": (3, -1.0, "aten::masked_fill", "Net", "changed argument"),
    "bias": (5, 0.5, "aten::addmm", "up", "changed operand"),
}


def record(path: Path, settings: tuple[Any, ...]) -> runs.Run:
    torch.manual_seed(0)
    model = Net(*settings)
    x = torch.randn(5, 8)
    torch.manual_seed(1)
    with torch.no_grad(), intercept(runs.RunRecorder(path), ops="all"):
        model(x)
    return runs.open_run(path)


@pytest.mark.parametrize("change", CHANGES)
def test_the_operator_that_was_changed_is_the_first_that_differs(tmp_path: Path, change: str) -> None:
    place, value, op, module, kind = CHANGES[change]
    changed = (*SAME[:place], value, *SAME[place + 1 :])
    found = runs.diff(record(tmp_path / "a", SAME), record(tmp_path / "b", changed))
    assert found.first is not None
    assert (found.first.a.record.op, found.first.a.record.module, found.first.kind) == (op, module, kind)
    assert "test_every_operator.py" in (found.first.a.record.source or "")
    assert set(found.kinds) <= {"equal", kind, "inherited"}, found.kinds
    assert found.kinds["inherited"] > 2


def test_an_operator_of_another_library_is_no_view_because_it_is_called_like_one(tmp_path: Path) -> None:
    found = {}
    for factor in (2.0, 3.0):
        with torch.library._scoped_library("likeviews", "FRAGMENT") as library:
            library.define("values(Tensor x) -> Tensor")
            library.impl("values", lambda x, factor=factor: x * factor, "CPU")
            path = tmp_path / str(factor)
            with intercept([stats := hooks.Stats(), runs.RunRecorder(path)], ops="likeviews::values"):
                torch.ops.likeviews.values(torch.ones(3))
            (row,) = stats.rows()
            assert row.max == factor
            found[factor] = runs.open_run(path)
    difference = runs.diff(found[2.0], found[3.0])
    assert dict(difference.kinds) == {"added": 1}


@pytest.mark.parametrize(
    ("before", "filled", "value", "kind"),
    [(7.0, 3, 0.0, None), (7.0, 2, 0.0, "changed operand"), (0.0, 3, 1.0, "changed operand")],
)
def test_memory_that_a_call_fills_is_no_changed_operand(
    tmp_path: Path, before: float, filled: int, value: float, kind: str | None
) -> None:
    def record(path: Path, before: float, value: float) -> runs.Run:
        memory, values = torch.full((3,), before), torch.full((filled,), value)
        with intercept(runs.RunRecorder(path), ops="all"):
            memory[torch.arange(filled)] = values
        return runs.open_run(path)

    first = runs.diff(record(tmp_path / "a", 0.0, 0.0), record(tmp_path / "b", before, value)).first
    assert (first and first.kind) == kind


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda memory: torch.bernoulli(memory, 0.5), None),  # as dropout under vmap calls it
        (lambda memory: torch.ops.aten.bernoulli.Tensor(memory, torch.full((3,), 0.5)), None),
        (torch.ones_like, None),
        (lambda memory: memory.new_full((2,), 3.0), None),
        (torch.ops.aten.uniform.default, None),
        (lambda memory: torch.ops.aten.copy.default(memory, torch.ones(3)), None),
        (lambda memory: torch.bernoulli(memory), "changed operand"),
        (torch.sign, "changed operand"),
    ],
    ids=["bernoulli.p", "bernoulli.Tensor", "ones_like", "new_full", "uniform", "copy", "bernoulli", "sign"],
)
def test_memory_of_which_a_call_takes_the_shape_is_no_changed_operand(
    tmp_path: Path, call: Callable[[torch.Tensor], torch.Tensor], kind: str | None
) -> None:
    def record(path: Path, before: float) -> runs.Run:
        memory = torch.full((3,), before)
        torch.manual_seed(0)
        with intercept(runs.RunRecorder(path), ops="all"):
            call(memory)
        return runs.open_run(path)

    first = runs.diff(record(tmp_path / "a", 1.0), record(tmp_path / "b", 0.5)).first
    assert (first and first.kind) == kind
