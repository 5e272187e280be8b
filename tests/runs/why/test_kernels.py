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

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

X = torch.linspace(-2, 2, 512).reshape(16, 32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Any:
        return self.two(nn.functional.gelu(self.norm(self.one(x)))).softmax(-1)


def recorded(folder: Path, dtype: torch.dtype, plant: Callable[[str], str] | None) -> runs.Run:
    """A pass of the model, compiled with what is planted; eager with None."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    with compiled_in(plant or str), torch.no_grad():
        if plant is not None:
            net.compile()
        with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
            net(X.to(dtype))
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


def test_a_run_of_a_kernel_is_held_on_both_sides(tmp_path: Path) -> None:
    wrong = recorded(tmp_path / "a", torch.float32, replaced(r"1e-05", "1e-01"))
    right = recorded(tmp_path / "b", torch.float32, str)
    found = runs.why(wrong, right)
    assert [each.run for each in found.kernels] == ["A"]
