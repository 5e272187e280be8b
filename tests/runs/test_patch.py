"""Outputs of one run that replace those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import run_of

from opintercept import HookError, OpInterceptError, OpInterceptWarning, intercept, runs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


X = torch.linspace(-1, 1, 24).view(3, 8)


def record(folder: Path, program: Any, tensors: Any = "full") -> Path:
    return run_of(folder / "run", program, tensors).path


def broken(net: Net, layer: int) -> Net:
    """Round the weights of one layer."""
    weight: Any = net.layers[layer].weight
    with torch.no_grad():
        weight.copy_(weight.bfloat16())
    return net


def test_a_patch_finds_where_an_error_is_added(tmp_path: Path) -> None:
    net = Net()
    right = net(X)
    run = record(tmp_path, lambda: net(X))
    broken(net, 2)
    wrong = net(X)
    assert not torch.equal(wrong, right)
    for layer, gone in [(0, False), (1, False), (2, True), (3, True)]:
        patch = runs.Patch(run, module=f"layers.{layer}")
        with intercept(patch):
            out = net(X)
        assert torch.equal(out, right) is gone, layer
        assert torch.equal(out, wrong) is not gone, layer
        assert (patch.patched, patch.missing) == (1, 0)


def test_calls_are_told_apart_by_their_number_in_the_module(tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    run = record(tmp_path, lambda: [layer(X * i) for i in range(4)])
    with torch.no_grad():
        expected = [layer(X * i) for i in range(4)]
        layer.weight.zero_()
        with intercept(runs.Patch(run, predicate=lambda call: call.index != 1)):
            found = [layer(X * i) for i in range(4)]
    assert [torch.equal(a, b) for a, b in zip(found, expected, strict=True)] == [True, False, True, True]


def test_steps_and_phases_choose_calls(tmp_path: Path) -> None:
    net = Net()

    def train(interceptor: Any = None) -> list[torch.Tensor]:
        gradients = []
        for _ in range(2):
            net.zero_grad()
            net(X).sum().backward()
            weight: Any = net.layers[0].weight
            gradients.append(weight.grad.clone())
            if interceptor is not None:
                interceptor.step()
        return gradients

    with intercept(runs.RunRecorder(tmp_path / "run", "full")) as interceptor:
        right = train(interceptor)
    broken(net, 3)
    patch = runs.Patch(tmp_path / "run", phase="backward", steps=1)
    with intercept(patch) as interceptor:
        found = train(interceptor)
    assert torch.equal(found[1], right[1])
    assert not torch.equal(found[0], right[0])
    assert patch.patched == 7  # the weight's gradient of each layer, and the input's of each but the first


def test_all_of_several_outputs_are_replaced(tmp_path: Path) -> None:
    def attend(scale: float) -> torch.Tensor:
        torch.manual_seed(0)
        q = torch.randn(1, 2, 4, 8) * scale
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    run = record(tmp_path, lambda: attend(1.0))
    with intercept(runs.Patch(run)):
        found = attend(3.0)
    assert torch.equal(found, attend(1.0))
    assert not torch.equal(found, attend(3.0))


def test_another_dtype_is_converted(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.full((2, 2), 1 / 3) @ torch.eye(2))
    with intercept(runs.Patch(run)):
        found = torch.zeros(2, 2, dtype=torch.bfloat16) @ torch.zeros(2, 2, dtype=torch.bfloat16)
    assert torch.equal(found, torch.full((2, 2), 1 / 3).bfloat16())


def test_another_shape_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    with intercept(runs.Patch(run)):
        with pytest.raises(
            OpInterceptError, match=r"shape of the output that it replaces, got float32\[2, 4\] of call 0 for"
        ):
            torch.ones(5, 3) @ torch.ones(3, 4)


def test_calls_without_a_counterpart_keep_their_output_and_warn_once(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    patch = runs.Patch(run)
    with (
        intercept(patch),
        pytest.warns(OpInterceptWarning, match=r"has no output for aten::mm in '' \(forward\), which keeps") as got,
    ):
        found = [torch.full((2, 2), 2.0) @ torch.ones(2, 2) for _ in range(3)]
    assert len(got) == 1
    assert [float(x[0, 0]) for x in found] == [2.0, 4.0, 4.0]
    assert (patch.patched, patch.missing) == (1, 2)


def test_a_run_without_outputs_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.ones(2, 2) @ torch.ones(2, 2), tensors="stats")
    with pytest.raises(
        OpInterceptError, match=r"was recorded with tensors='stats', without whole outputs; record it with"
    ):
        runs.Patch(runs.open_run(run))
    with pytest.raises(OpInterceptError, match=r"a run must be a folder with run.json"):
        runs.Patch(tmp_path)
    with pytest.raises(ValueError, match=r"phase must be one of .*, got 'sideways'"):
        runs.Patch(record(tmp_path / "b", Net().double), phase="sideways")


def test_lost_tensors_are_a_hook_error_that_names_the_file(tmp_path: Path) -> None:
    run = record(tmp_path, lambda: torch.ones(2, 2) @ torch.ones(2, 2))
    for file in (run / "tensors").iterdir():
        file.unlink()
    with intercept(runs.Patch(run)):
        with pytest.raises((OpInterceptError, HookError), match=r"00000000.safetensors' is missing"):
            torch.ones(2, 2) @ torch.ones(2, 2)


def test_the_former_name_names_the_new_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Graft'; it is called Patch now$"):
        _ = runs.Graft
