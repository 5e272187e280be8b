"""Kernels of Triton: those that are declared are calls, and the others are counted by name."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import record

from opintercept import hooks, intercept, register_op

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def mm_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    r = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + r[:, None] * K + r[None, :], mask=(r[:, None] < M) & (r[None, :] < K), other=0.0)
    b = tl.load(b_ptr + r[:, None] * N + r[None, :], mask=(r[:, None] < K) & (r[None, :] < N), other=0.0)
    tl.store(c_ptr + r[:, None] * N + r[None, :], tl.dot(a, b), mask=(r[:, None] < M) & (r[None, :] < N))


def mm(a, b):
    c = a.new_zeros(a.shape[0], b.shape[1])
    mm_kernel[(1,)](a, b, c, *a.shape[:1], b.shape[1], a.shape[1], BLOCK=16)
    return c
"""


class Metadata:
    """What Triton gives its hooks: a dict that is made when it is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self) -> dict[str, Any]:
        return {"name": self.name, "function": None, "stream": 0}


class Chain:
    """Triton's list of hooks."""

    def __init__(self) -> None:
        self.calls: list[Callable[[Any], None]] = []

    def add(self, function: Callable[[Any], None]) -> None:
        if function not in self.calls:
            self.calls.append(function)

    def remove(self, function: Callable[[Any], None]) -> None:
        if function in self.calls:
            self.calls.remove(function)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where Triton keeps its hooks, if it is installed, or what looks the same."""
    if importlib.util.find_spec("triton") is not None:
        runtime = importlib.import_module("triton.knobs").runtime
        monkeypatch.setattr(runtime, "launch_enter_hook", None)
        return runtime
    knobs: Any = types.ModuleType("triton.knobs")
    knobs.runtime = types.SimpleNamespace(launch_enter_hook=None)
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    return knobs.runtime


@pytest.fixture
def chain(runtime: Any) -> Chain:
    chain = runtime.launch_enter_hook = Chain()
    return chain


def launch(chain: Chain, *names: str) -> None:
    for name in names:
        for function in chain.calls:
            function(Metadata(name))


def test_launches_are_counted_by_name_while_a_block_is_open(chain: Chain) -> None:
    with intercept() as one:
        launch(chain, "grouped_mm", "grouped_mm", "moe")
        with intercept(level="function") as other:
            launch(chain, "moe")
        assert len(chain.calls) == 1
    assert one.opaque == {"triton::grouped_mm": 2, "triton::moe": 2}
    assert other.opaque == {"triton::moe": 1}
    assert not chain.calls


def test_pointwise_kernels_of_inductor_are_not_counted(chain: Chain) -> None:
    with intercept() as watching:
        launch(chain, "triton_poi_fused_add_0", "triton_red_fused_sum_1", "triton_per_fused_2", "triton_tem_fused_mm_3")
    assert watching.opaque == {"triton::triton_tem_fused_mm_3": 1}


def test_launches_of_hooks_and_of_declared_operators_are_not_counted(chain: Chain) -> None:
    with intercept(lambda call: launch(chain, "of_a_hook")) as watching:
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert watching.opaque == {}

    @torch.library.custom_op("launches_tests::mm", mutates_args=())
    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        launch(chain, "inside")
        return a @ b

    with register_op(mm, lhs="a", rhs="b"), intercept(lambda call: None) as watching:
        mm(torch.ones(2, 3), torch.ones(3, 4))
    assert watching.opaque == {}


def test_a_triton_with_room_for_one_hook_is_left_alone(runtime: Any) -> None:
    with intercept():
        assert runtime.launch_enter_hook is None


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with a kernel, which Triton interprets, since there may be no device."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "launches_kernels.py").write_text(KERNEL)
    yield importlib.import_module("launches_kernels")
    del sys.modules["launches_kernels"]


def gemm(M: int, N: int, K: int, **_: Any) -> tuple[int, int, int, int]:
    return 1, M, N, K


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_a_launch_of_a_declared_kernel_is_a_call(kernels: Any, level: Any) -> None:
    a, b, seen = torch.randn(5, 7), torch.randn(7, 6), []
    before = dict(vars(kernels.mm_kernel))
    recorder = hooks.Recorder()
    with (
        register_op(kernels.mm_kernel, lhs="a_ptr", rhs="b_ptr", out="c_ptr", gemm=gemm),
        intercept([recorder, lambda call: seen.append(call.output)], level=level) as watching,
    ):
        c = kernels.mm(a, b)
    (call,) = recorder.records
    assert str(call) == "launches_kernels:mm_kernel float32[5, 7] @ float32[7, 6] -> float32[5, 6]"
    assert call.gemm is not None
    assert (call.gemm[:4], call.flops, watching.opaque) == ((1, 5, 6, 7), 420, {})
    assert seen[0] is c
    assert torch.allclose(c, a @ b, atol=1e-2)  # Triton's dot rounds operands to tf32
    assert dict(vars(kernels.mm_kernel)) == before


def test_a_hook_may_replace_what_a_kernel_reads_and_writes(kernels: Any) -> None:
    hook = types.SimpleNamespace(pre=lambda call: call.replace(lhs=call.lhs * 2), post=lambda call: call.output + 1)
    a, b = torch.eye(5), torch.ones(5, 6)
    with register_op("launches_kernels:mm_kernel", lhs=0, rhs=1, out=2, gemm=gemm), intercept(hook):
        c = kernels.mm(a, b)
    assert c.equal(torch.full((5, 6), 3.0))


def test_what_other_code_has_put_on_a_kernel_stays(kernels: Any) -> None:
    launched: list[Any] = []
    own, kernel = kernels.mm_kernel.run, kernels.mm_kernel

    def run(*args: Any, **kwargs: Any) -> Any:
        launched.append(args)
        return own(*args, **kwargs)

    kernel.run = run
    with register_op(kernel, lhs="a_ptr", rhs="b_ptr", out="c_ptr", gemm=gemm):
        calls = record(lambda: kernels.mm(torch.eye(5), torch.ones(5, 6)))
    assert (len(launched), len(calls)) == (1, 1)
    assert kernel.run is run


def test_a_kernel_runs_as_before_after_its_registration(kernels: Any) -> None:
    with register_op(kernels.mm_kernel, lhs="a_ptr", rhs="b_ptr", out="c_ptr", gemm=gemm):
        pass
    with intercept(lambda call: pytest.fail("nobody has declared it")):
        assert kernels.mm(torch.eye(5), torch.ones(5, 6)).equal(torch.ones(5, 6))
