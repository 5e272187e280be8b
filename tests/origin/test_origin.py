"""Where a call comes from: module, source line, and the forward call behind a backward one."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import Any

import pytest
import torch
from compiler import BELOW
from models import MODELS, inputs_of
from nets import FORWARD, Model, record
from processes import run_python
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from opintercept import OpCall, OpInterceptError, hooks, intercept
from opintercept.testing.plugin import OpCalls


def test_both_engines_see_the_same_modules_operators_and_shapes_in_the_same_order(op_calls: OpCalls) -> None:
    for engine in ("kernel", "mode"):
        with op_calls.block(engine=engine) as calls:
            Model()(torch.randn(5, 4)).sum().backward()
        calls.match_snapshot("step")


@pytest.mark.parametrize("engine", BELOW)
def test_backward_and_recompute_have_the_names_of_the_forward_call(engine: dict[str, Any]) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    one, two = Checkpointed(), Checkpointed()
    x = torch.ones(5, 4, requires_grad=True)

    def program() -> None:
        (one(x) + two(x)).sum().backward()

    by_phase: dict[str, list[str | None]] = {"forward": [], "recompute": [], "backward": []}
    for call in record(program, **engine):
        by_phase[call.phase].append(call.module)
    second = [f"Checkpointed#2.{name}" for name in FORWARD]
    assert by_phase["forward"] == [*FORWARD, *second]
    assert set(by_phase["backward"]) == {*FORWARD, *second}
    assert set(by_phase["recompute"]) <= {*FORWARD, *second} - {"head", "Checkpointed#2.head"}
    assert len(by_phase["recompute"]) >= 12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine", BELOW)
def test_models_give_the_names_of_module_hooks_and_every_backward_call_its_forward(
    engine: dict[str, Any], name: str
) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().train()
    inputs = inputs_of(model)
    names = {module: qualified or type(model).__name__ for qualified, module in model.named_modules()}
    stack, expected = [""], []

    def leave(*_: Any) -> None:
        stack.pop()

    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: stack.append(names[module]))
        module.register_forward_hook(leave, always_call=True)

    def by_hooks(call: OpCall) -> None:
        if call.phase == "forward":
            expected.append(stack[-1])

    recorder = hooks.Recorder()
    with intercept([recorder, by_hooks], **engine):
        model(**inputs).loss.backward()
    forward = [r for r in recorder.records if r.phase == "forward"]
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert [r.module for r in forward] == expected
    assert backward
    for call in backward:
        assert call.forward is not None
        behind = recorder.records[call.forward]
        assert (behind.phase, behind.module, behind.source) == ("forward", call.module, call.source)
        assert call.grad_of is not None or call.opaque


def test_a_hook_that_asks_in_backward_alone_is_answered() -> None:
    seen: list[str | None] = []
    model = Model()

    def hook(call: OpCall) -> None:
        if call.phase == "backward":
            seen.append(call.module)

    with intercept(hook):
        model(torch.randn(5, 4, requires_grad=True)).sum().backward()
    assert set(seen) == set(FORWARD)


def test_what_comes_from_the_stack_cannot_be_asked_for_later() -> None:
    calls: list[OpCall] = []
    with intercept(calls.append), torch.no_grad():  # else the call has noted where it comes from
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    for name in ("module", "source", "forward"):
        with pytest.raises(
            OpInterceptError, match=rf"{name} can only be read while the operator runs, and this call is over"
        ):
            getattr(calls[0], name)


MEMORY = """
    import resource, torch
    from opintercept import intercept
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = set()
    with intercept(lambda call: names.add(call.module)):
        for step in range(10_000):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 500:
                before = resident()
    assert names == {"0", "2"}
    print((resident() - before) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc")
@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_training_steps() -> None:
    done = run_python("-c", textwrap.dedent(MEMORY), timeout=600)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 5.0


@pytest.mark.parametrize(
    ("filters", "modules"),
    [
        ({"module": "blocks.1", "op": "mm", "phase": "forward"}, ["blocks.1", "blocks.1"]),
        ({"module": "*.up", "phase": "forward"}, ["blocks.0.up", "blocks.1.up"]),
        ({"module": re.compile(r"head|.*\.down"), "phase": "forward"}, ["blocks.0.down", "blocks.1.down", "head"]),
        ({"module": str.isalpha, "predicate": lambda call: call.output.shape == (5, 3)}, ["head"]),
    ],
    ids=["name", "glob", "pattern", "function and predicate"],
)
def test_a_filter_picks_calls_by_their_module(filters: dict[str, Any], modules: list[str]) -> None:
    model, recorder = Model(), hooks.Recorder()
    with intercept(hooks.when(recorder, **filters)):
        model(torch.randn(5, 4)).sum().backward()
    assert [call.module for call in recorder.records] == modules
