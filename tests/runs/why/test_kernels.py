"""Eager against compiled: kernels that rounding explains are no difference, and a wrong one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from planted import compiled_in, replaced
from torch import Tensor, nn

from opintercept import intercept, runs
from opintercept._ops.generated import GeneratedKernel

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

X = torch.linspace(-2, 2, 512).reshape(16, 32)


class Net(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(32, eps)

    def forward(self, x: Tensor) -> Any:
        x = self.one(x)
        x = self.norm(x)
        x = nn.functional.gelu(x)
        x = self.two(x)
        return x.softmax(-1)


def recorded(
    folder: Path,
    dtype: torch.dtype,
    plant: Callable[[str], str] | None,
    *,
    eps: float = 1e-5,
    trained: bool = False,
) -> runs.Run:
    """A pass of the model, compiled with what is planted; eager with None."""
    torch.manual_seed(0)
    net = Net(eps).to(dtype)
    with compiled_in(plant or str), torch.set_grad_enabled(trained):
        if plant is not None:
            net.compile()
        with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
            made = net(X.to(dtype))
            if trained:
                nn.functional.cross_entropy(made.float(), torch.arange(16) % 8).backward()
    return runs.open_run(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_and_compiled_differ_by_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    eager, compiled = recorded(tmp_path / "a", dtype, None), recorded(tmp_path / "b", dtype, str)
    found = runs.why(eager, compiled)
    assert found.equal
    assert found.kernels == ()
    assert "2 of 2 generated kernels of B were held against their operators" in found.notes
    assert runs.diff(eager, compiled).equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("pattern", "by", "op"),
    [
        (r"1e-05", "1e-01", "native_layer_norm"),
        (r"\(0\.5\)", "(0.7)", "gelu"),
        (r"(tmp\d+)\.exp\(\)", r"(\1 + \1).exp()", "_softmax"),
    ],
    ids=["epsilon", "half", "exponent"],
)
def test_a_wrong_kernel_is_named(tmp_path: Path, dtype: torch.dtype, pattern: str, by: str, op: str) -> None:
    eager = recorded(tmp_path / "a", dtype, None)
    compiled = recorded(tmp_path / "b", dtype, replaced(pattern, by))
    found = runs.why(eager, compiled)
    assert found.verdict == "difference"
    (kernel,) = found.kernels
    assert f"aten::{op}" in kernel.ops
    assert kernel.run == "B"
    assert kernel.excess > 1
    assert "test_kernels.py" in (kernel.place.source or "")
    assert found.sentence.startswith(f"Kernel {kernel.place.op.partition('::')[2]} of B is wrong")
    difference = runs.diff(eager, compiled)
    assert not difference.equal
    assert found.sentence in str(difference)


@pytest.mark.parametrize("known", [True, False], ids=["known", "from a cache"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
def test_compiled_and_eager_agree_whichever_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool, dtype: torch.dtype, known: bool
) -> None:
    if not known:
        monkeypatch.setattr(GeneratedKernel, "stands_for", None)
    eager = recorded(tmp_path / "a", dtype, None, trained=trained)
    compiled = recorded(tmp_path / "b", dtype, str, trained=trained)
    assert runs.why(eager, compiled).equal
    found = runs.why(compiled, eager)
    assert not found.causes
    assert not found.kernels
    assert found.equal or (not known and found.verdict == "not compared")
    assert runs.diff(eager, compiled).fused[1] > 0
    assert runs.diff(eager, compiled).unmatched_calls == (0, 0)


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("other", [None, str], ids=["eager", "compiled"])
def test_a_change_of_a_compiled_program_has_the_words_of_its_operators(
    tmp_path: Path, other: Callable[[str], str] | None, trained: bool
) -> None:
    a = recorded(tmp_path / "a", torch.float32, str, trained=trained)
    b = recorded(tmp_path / "b", torch.float32, other, eps=0.5, trained=trained)
    found = runs.why(a, b)
    assert [cause.what for cause in found.causes] == ["uses 0.5 where A uses 1e-05"]
    assert found.causes[0].place.module == "norm"
    assert found.causes[0].exact
    assert not runs.diff(a, b).equal


def test_nobody_is_accused_where_nobody_knows_what_a_kernel_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GeneratedKernel, "stands_for", None)
    a = recorded(tmp_path / "a", torch.float32, str, trained=True)
    b = recorded(tmp_path / "b", torch.float32, None, eps=0.5, trained=True)
    found = runs.why(a, b)
    assert found.verdict == "not compared"
    assert found.causes == ()
    assert found.unknown[0].op.startswith("inductor::cpp_fused_")
    assert "layer_norm" in found.unknown[0].op
    assert "which cannot be computed again" in found.sentence
    assert any("A can be the run that is not compiled" in note for note in found.notes)
    assert runs.why(b, a).first is not None  # and the other way it is told


def test_a_run_of_a_kernel_is_held_on_both_sides(tmp_path: Path) -> None:
    wrong = recorded(tmp_path / "a", torch.float32, replaced(r"1e-05", "1e-01"))
    right = recorded(tmp_path / "b", torch.float32, str)
    found = runs.why(wrong, right)
    assert [each.run for each in found.kernels] == ["A"]
