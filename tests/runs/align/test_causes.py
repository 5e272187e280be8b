"""The edits of A's program that make it compute what B does are named, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.align.alignment import Aligned

pytestmark = pytest.mark.usefixtures("one_thread")
Between = Callable[[Tensor, Tensor], Tensor]


def record(folder: Path, program: Callable[[], object], ops: Any) -> runs.Run:
    with torch.no_grad(), intercept(runs.RunRecorder(folder, tensors="full"), ops=ops):
        program()
    return runs.open_run(folder)


def aligned(folder: Path, one: Between, other: Between) -> runs.Alignment:
    """Two programs that differ in what lies between three products."""
    torch.manual_seed(0)
    first, second, last = (nn.Linear(16, 16) for _ in range(3))
    x = torch.randn(24, 16)
    return runs.align(
        record(folder / "a", lambda: last(one(first(x), second(x))), "all"),
        record(folder / "b", lambda: last(other(first(x), second(x))), "matmul"),
    )


def compared(folder: Path, one: Between, other: Between) -> Aligned:
    """The first divergence of them."""
    found = aligned(folder, one, other).first
    assert found is not None
    return found


def named(folder: Path, one: Between, other: Between) -> tuple[str, ...]:
    """The edits that are named."""
    causes = compared(folder, one, other).causes
    return tuple(each.replace(" (test_causes.py:", "(").partition("(")[0] for each in causes)


def attend(y: Tensor, z: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(y[None, None], z[None, None], z[None, None], **how)[0, 0]


ROW = torch.arange(16) / 2
CASES: dict[str, tuple[Between, Between, str]] = {
    "another function": (lambda y, z: F.silu(y) * z, lambda y, z: F.gelu(y) * z, "gelu takes the place of silu"),
    "a flag of a function": (
        lambda y, z: F.gelu(y, approximate="tanh") + z,
        lambda y, z: F.gelu(y) + z,
        "gelu takes the place of gelu",
    ),
    "outputs change places": (
        lambda y, z: F.silu(y) * z,
        lambda y, z: F.silu(z) * y,
        "the outputs of Linear and Linear#2 change places",
    ),
    "operands change places": (
        lambda y, z: (y.sin() - z.cos()).exp(),
        lambda y, z: (z.cos() - y.sin()).exp(),
        "the operands of sub",
    ),
    "an epsilon": (lambda y, z: F.layer_norm(y + z, (16,)), lambda y, z: F.layer_norm(y + z, (16,), eps=0.1), "eps of"),
    "RMSNorm": (
        lambda y, z: F.layer_norm(y + z, (16,)),
        lambda y, z: F.rms_norm(y + z, (16,), eps=1e-5),
        "RMSNorm takes the place of native_layer_norm",
    ),
    "a weight of a norm": (
        lambda y, z: F.layer_norm(y + z, (16,), ROW),
        lambda y, z: F.layer_norm(y + z, (16,), ROW.where(ROW != 5, 7.0)),
        "weight of native_layer_norm",
    ),
    "a table": (lambda y, z: y * ROW.cos() + z, lambda y, z: y * (ROW / 3).cos() + z, "other of mul"),
    "a constant": (lambda y, z: y * 0.5 + z.sin(), lambda y, z: y * 0.7 + z.sin(), "other of mul"),
    "a factor": (lambda y, z: y + z.sin(), lambda y, z: y + 1.5 * z.sin(), "the output of sin"),
    "left out": (lambda y, z: y + z.tanh(), lambda y, z: y + z, "tanh"),
    "several left out": (lambda y, z: y + (z.square() + 1).log(), lambda y, z: y + z, "pow, add, log"),
    "causal": (lambda y, z: attend(y, z, is_causal=True), attend, "is_causal of _scaled_dot_product"),
    "a scale": (attend, lambda y, z: attend(y, z, scale=0.3), "scale of _scaled_dot_product"),
    "positions": (
        lambda y, z: y * (torch.arange(24)[:, None] * torch.full((), 0.1)).cos() + z,
        lambda y, z: y * (torch.arange(2, 26)[:, None] * torch.full((), 0.1)).cos() + z,
        "2 is added to the output of arange",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edit_that_does_what_the_other_program_does_is_named(name: str, tmp_path: Path) -> None:
    one, other, words = CASES[name]
    assert any(each.startswith(words) for each in named(tmp_path, one, other)), named(tmp_path / "again", one, other)


def test_no_edit_is_named_where_none_does_the_same(tmp_path: Path) -> None:
    first = compared(tmp_path, lambda y, z: F.silu(y) * z, lambda y, z: F.silu(y.roll(1, 0)) * z.sin())
    assert (first.causes, first.complete) == ((), True)
    assert first.tried > 10


def test_the_verdict_says_how_many_edits_were_tried(tmp_path: Path) -> None:
    found = aligned(tmp_path, lambda y, z: F.silu(y) * z, lambda y, z: F.silu(y.roll(1, 0)) * z.sin())
    assert found.first is not None
    assert f"none of {found.first.tried} edits that were tried makes A compute what B does" in str(found)
    stopped = replace(found, first=replace(found.first, complete=False))
    assert f"the search for edits stopped at its limit, after {found.first.tried} edits" in str(stopped)


def test_an_edit_is_of_all_that_a_line_computes(tmp_path: Path) -> None:
    def turned(x: Tensor, base: float) -> Tensor:
        return x * base ** torch.full((), -0.5)

    def both(base: float) -> Between:
        return lambda y, z: turned(y, base).sin() * turned(z, base)

    assert any(each.startswith("self of pow") for each in named(tmp_path, both(100.0), both(90.0)))
