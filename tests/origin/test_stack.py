"""What the Python stack tells of a call: its module, the line of the program, and a recomputation."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compiler import BELOW, LEVELS
from nets import FORWARD, Block, Model, record
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opintercept import OpCall, intercept
from opintercept._origin import stack
from opintercept.testing.plugin import OpCalls


@pytest.mark.parametrize("engine", LEVELS)
def test_module_is_the_innermost_one_by_its_qualified_name(engine: dict[str, Any]) -> None:
    model = Model()
    records = record(lambda: model(torch.randn(5, 4)), **engine)
    assert [r.module for r in records] == FORWARD


def test_module_outside_of_all_is_the_empty_name(op_calls: OpCalls) -> None:
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert op_calls.modules == [""]


def test_source_is_the_line_of_the_program_and_not_of_torch() -> None:
    model = Model()
    records = record(lambda: model(torch.randn(5, 4)))
    assert re.fullmatch(r"nets\.py:\d+ in forward", records[0].source or "")
    assert records[2].source == records[3].source != records[0].source
    lambda_line = record(lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)))[0].source
    assert re.fullmatch(r"test_stack\.py:\d+ in <lambda>", lambda_line or "")


@pytest.mark.parametrize("engine", LEVELS)
def test_a_hook_of_the_user_is_not_where_the_call_comes_from(engine: dict[str, Any]) -> None:
    class Keeper(nn.Module):  # a hook may be a module, and may ask from one
        def forward(self, call: OpCall) -> None:
            found.append((call.module, call.source))

    found: list[tuple[str | None, str | None]] = []
    block = Block().requires_grad_(False)  # else the call notes where it comes from before the hook asks
    with intercept(lambda call: found.append((call.module, call.source)), **engine) as interceptor:
        interceptor.register(Keeper())
        block(torch.ones(4, 4))
    assert found[0::2] == found[1::2]
    expected = record(lambda: block(torch.ones(4, 4)), **engine)[0]
    assert found[0] == (expected.module, expected.source)
    assert "in forward" in str(expected.source)


def test_forward_called_directly_counts_as_the_module() -> None:
    model = Model()
    records = record(lambda: model.forward(torch.randn(5, 4)))
    assert [r.module for r in records] == FORWARD
    outer = nn.Sequential(model)
    outer.forward = lambda x: model.blocks[1].forward(x)  # type: ignore[method-assign]
    records = record(lambda: outer(torch.randn(5, 4)))
    assert [r.module for r in records] == [f"0.blocks.1{name}" for name in (".up", ".down", "", "")]


def test_a_script_module_is_one_place_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "script", str)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert [r.module for r in record(lambda: scripted(torch.randn(2, 4)))] == ["Sequential", "Sequential"]


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("engine", BELOW)
def test_a_checkpoint_recomputes_in_a_pass_of_its_own(engine: dict[str, Any], reentrant: bool) -> None:
    model = Model()
    model.forward = lambda x: model.head(  # type: ignore[method-assign]
        checkpoint(model.blocks[1], model.blocks[0](x), use_reentrant=reentrant)
    )
    x = torch.randn(5, 4, requires_grad=True)
    records = record(lambda: model(x).sum().backward(), **engine)
    by_phase = {p: [r.module for r in records if r.phase == p] for p in ("forward", "recompute", "backward")}
    assert by_phase["forward"] == FORWARD
    again = [f"blocks.1{name}" for name in (".up", ".down", "", "")]
    assert by_phase["recompute"] == again[: len(by_phase["recompute"])]
    assert len(by_phase["recompute"]) >= 3  # the form that is not reentrant stops when it has what it needs
    assert set(by_phase["backward"]) == set(FORWARD)


class Again(torch.autograd.Function):
    """What a module computes, and once more in the backward pass: a checkpoint as many libraries write it."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.run(x)
        torch.autograd.backward(again, grads)
        return None, x.grad @ torch.eye(4)  # in no module


again: Any = Again.apply


@pytest.mark.parametrize("engine", BELOW)
def test_a_module_in_the_backward_of_a_custom_function_recomputes(engine: dict[str, Any]) -> None:
    model = Model()
    model.forward = lambda x: model.head(again(model.blocks[1], model.blocks[0](x)))  # type: ignore[method-assign]
    trainer = nn.Module()  # the backward pass itself is in a module, too
    trainer.model = model
    trainer.forward = lambda x: model(x).sum().backward()
    for _ in range(2):
        records = record(lambda: trainer(torch.randn(5, 4, requires_grad=True)), **engine)
        repeated = {r.index: r.module for r in records if r.phase == "recompute"}
        assert list(repeated.values()) == [f"model.blocks.1{name}" for name in (".up", ".down", "", "")]
        gradients = [r for r in records if r.forward in repeated]
        assert [(r.phase, r.module) for r in gradients] == [("backward", repeated[r.forward or 0]) for r in gradients]
        assert {r.module for r in gradients} == set(repeated.values())
        assert {r.phase for r in records if r.rhs is not None and r.rhs.shape == (4, 4)} == {"backward"}


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_what_records_no_gradient(engine: dict[str, Any], reentrant: bool) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x @ x @ x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.mT @ x
        cube: Tensor = Cube.apply(x * scale)  # type: ignore[no-untyped-call]
        return cube * scale

    x = torch.ones(3, 3, requires_grad=True)
    for _ in range(2):
        records = record(lambda: checkpoint(forward, x, use_reentrant=reentrant).sum().backward(), **engine)
        assert [each.phase for each in records] == ["forward"] * 3 + ["recompute"] * 3
        assert [each.forward for each in records] == [None] * 6
