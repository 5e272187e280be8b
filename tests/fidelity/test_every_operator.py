"""`ops="all"` on kernels: programs of all sorts do the same with and without it, and nothing stays behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import sampled
import torch
from compiler import COMPILED
from every_programs import PROGRAMS, outcome
from programs import outermost, profiled
from test_features import BACKWARD, COMPOSITES, FEATURES, SCRIPT, by_name
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from opintercept import OpCall, hooks, intercept

pytestmark = pytest.mark.slow

ENGINES = [pytest.param({"engine": "kernel"}, id="kernel"), COMPILED]


class Seen(list[str]):
    """A hook that has to see each call."""

    def post(self, call: OpCall) -> None:
        self.append(call.op)


# What has to see each call, what compiled kernels note, and nothing.
HOOKS: dict[str, Callable[[], list[Any]]] = {
    "seen": lambda: [Seen()],
    "noted": lambda: [hooks.Recorder(), hooks.Stats(), hooks.NonFinite(action="record")],
    "none": list,
}


# Elsewhere the profiler shows an operator inside of the one that it stands for, under vmap or in a subclass.
WHOLE = (COMPOSITES, BACKWARD, SCRIPT, "`scaled_dot_product_attention`, `nn.LSTM`", "sparse tensors: COO, CSR")


def state_of_torch() -> tuple[Any, ...]:
    """What says whether something of ours is still installed."""
    names = ("aten::add.Tensor", "aten::mm", "aten::view", "aten::copy_", "aten::_fused_adam_", "aten::detach")
    tables = tuple(torch._C._dispatch_dump_table(name) for name in names)
    return tables, _get_current_dispatch_mode_stack(), torch.overrides._get_current_function_mode_stack()


@pytest.fixture(autouse=True)
def nothing_stays(one_thread: None) -> Any:
    before = state_of_torch()
    yield
    for _ in range(20):  # kernels stay while a thread may run one
        if state_of_torch() == before:
            break
        time.sleep(0.1)
        with intercept(ops="mm"):
            pass
    assert state_of_torch() == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", HOOKS)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same(name: str, engine: dict[str, Any], made: str) -> None:
    if not sampled.picks(f"{name} {made} {'compiled' in engine.values()}", of=8):
        pytest.skip("sampled")
    plain = outcome(PROGRAMS[name])
    with intercept(HOOKS[made](), ops="all", **engine):
        intercepted = outcome(PROGRAMS[name])
    assert intercepted == plain


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("made", ["seen", "noted"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature", FEATURES, ids=by_name)
def test_a_feature_is_seen_whole_and_does_the_same(feature: Any, engine: dict[str, Any], made: str) -> None:
    if not sampled.picks(f"{by_name(feature)} {made} {'compiled' in engine.values()}", of=8):
        pytest.skip("sampled")
    first, *others = HOOKS[made]()
    interceptor = intercept([first, *others], ops="all", **engine)
    plain = outcome(feature.run)
    with profiled() as profiler, interceptor:
        intercepted = outcome(feature.run)
    assert intercepted == plain
    if feature.line in WHOLE and not others:  # hooks run operators too
        assert first == outermost(profiler.events(), frozenset(interceptor.watcher.keys or ()))


@pytest.mark.parametrize("engine", ENGINES)
def test_entering_a_hundred_times_leaves_nothing(engine: dict[str, Any]) -> None:
    x = torch.randn(4, requires_grad=True)
    seen = Seen()
    interceptor = intercept(seen, ops="all", **engine)
    before = state_of_torch()
    for _ in range(100):
        with interceptor:
            torch.autograd.grad((x * 2).sum(), x)
        assert state_of_torch() == before
    torch.autograd.grad((x * 2).sum(), x)
    assert len(seen) % 100 == 0
    assert seen[: len(seen) // 100] * 100 == seen


@pytest.mark.parametrize("threads", ["current", "all"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", [("all", "matmul"), ("matmul", "all"), ("all", "all"), ("all", ("all", "-view"))])
def test_nested_blocks_see_what_is_theirs(order: tuple[Any, Any], engine: dict[str, Any], threads: Any) -> None:
    x = torch.randn(4, 4)

    def run() -> None:
        (torch.mm(x, x) + 1).t().relu()

    alone = {}
    for ops in order:
        alone[ops] = Seen()
        with intercept(alone[ops], ops=ops, **engine):
            run()
    found = [Seen(), Seen()]
    with ExitStack() as stack:
        for hook, ops in zip(found, order, strict=True):
            stack.enter_context(intercept(hook, ops=ops, threads=threads, **engine))
        run()
    assert found == [alone[ops] for ops in order]
    assert "aten::mm" in found[0]
