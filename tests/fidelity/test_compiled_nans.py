"""NaN and Inf planted into generated kernels: the kernel that makes them is named, with its operator and its line.

All are planted into one graph, which is compiled once. A product stands between any two stages, so that each has
kernels of its own, forward and backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sampled
import torch
from torch import Tensor

from opintercept import intercept
from opintercept.hooks import NonFinite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

ROWS, COLUMNS = 4, 8
ZERO = torch.zeros(())
EYE = torch.eye(COLUMNS)


def log(z: Tensor) -> Tensor:
    return torch.log(z)


def sqrt(z: Tensor) -> Tensor:
    return z.sqrt() + 1


def divide(z: Tensor) -> Tensor:
    return (z - 1) / (z - 1).abs()


def exp(z: Tensor) -> Tensor:
    return torch.exp(z) * 2


def rsqrt(z: Tensor) -> Tensor:
    return torch.rsqrt(z)


def softmax(z: Tensor) -> Tensor:
    return z.masked_fill(z < 0, -torch.inf).softmax(-1)


def power(z: Tensor) -> Tensor:
    return z.pow(1.3) + 1


def arcsine(z: Tensor) -> Tensor:
    return torch.asin(z * 0.1)


def mean(z: Tensor) -> Tensor:
    return z - z.mean(-1, keepdim=True)


def normalise(z: Tensor) -> Tensor:
    return torch.div(z, z.norm(dim=-1, keepdim=True))


def variance(z: Tensor) -> Tensor:
    return z * torch.rsqrt(z.var(-1, keepdim=True))


def logarithm_of_sum(z: Tensor) -> Tensor:
    return z - torch.log(z.sum(-1, keepdim=True))


def guarded(z: Tensor) -> Tensor:
    return torch.where(z > 0, z.sqrt(), z)


def reciprocal(z: Tensor) -> Tensor:
    return torch.reciprocal(z)


def arctangent(z: Tensor) -> Tensor:
    return torch.atan2(z, z - 1)


POINTWISE = [log, sqrt, divide, exp, rsqrt, power, arcsine, guarded, reciprocal, arctangent]
REDUCING = [softmax, mean, normalise, variance, logarithm_of_sum]
# With `--sampled` a third of each kind is there: two kernels are compiled for each, forward and backward.
CHOSEN = sampled.picks_of_each({stage.__name__: stage in REDUCING for stage in POINTWISE + REDUCING}, 3)
STAGES: list[Callable[[Tensor], Tensor]] = [stage for stage in POINTWISE + REDUCING if stage.__name__ in CHOSEN]
# What each stage gets elsewhere, and the values of one row that make it fail, forward or backward.
HEALTHY = torch.linspace(1.5, 2.5, COLUMNS).repeat(ROWS, 1)
ONES = torch.ones(COLUMNS)
FORWARD: list[tuple[Callable[[Tensor], Tensor], Tensor, str]] = [
    (log, -ONES, "log"),
    (sqrt, -ONES, "sqrt"),
    (divide, ONES, "div"),
    (exp, 200 * ONES, "exp"),
    (rsqrt, -ONES, "rsqrt"),
    (softmax, -ONES, "_softmax"),
    (power, -ONES, "pow"),
    (arcsine, 20 * ONES, "asin"),
    (mean, 3e38 * ONES, "mean"),
    (normalise, 0 * ONES, "div"),
    (variance, ONES, "rsqrt"),
    (logarithm_of_sum, -ONES, "log"),
    (reciprocal, 0 * ONES, "reciprocal"),
]
BACKWARD: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
    (sqrt, 0 * ONES),
    (arcsine, 10 * ONES),
    (guarded, 0 * ONES),
    (reciprocal, 1e-25 * ONES),
    (rsqrt, 1e-30 * ONES),
    (log, 1e-39 * ONES),
    (logarithm_of_sum, 1e-40 * ONES),
]
FORWARD = [case for case in FORWARD if case[0] in STAGES]
BACKWARD = [case for case in BACKWARD if case[0] in STAGES]


def staged(inputs: list[Tensor], zero: Tensor, eye: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    before = inputs[0]
    for stage, given in zip(STAGES, inputs, strict=True):
        before = stage(torch.mm(given + before * zero, eye))
        found.append(before)
    return found


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except torch._inductor.exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        function = torch.compile(staged)
        run(function, None, None)
        yield function
    torch._dynamo.reset()


def run(function: Any, planted: Callable[[Tensor], Tensor] | None, row: Tensor | None) -> None:
    inputs = []
    for stage in STAGES:
        given = HEALTHY.clone()
        if stage is planted and row is not None:
            given[1] = row
        inputs.append(given.requires_grad_())
    outputs = function(inputs, ZERO, EYE)
    torch.stack([output.sum() for output in outputs]).sum().backward()


def found(function: Any, planted: Callable[[Tensor], Tensor], row: Tensor) -> Any:
    check = NonFinite(action="record", inf=True)
    with intercept(check, ops="all"):
        run(function, planted, row)
    return check.findings[0]


def lines_of(record: Any) -> set[int]:
    return {int(line) for part in (record.source or "").split("; ") for line in re.findall(r"\d+(?=[, ])", part)}


def test_healthy_values_are_no_finding(compiled: Any) -> None:
    check = NonFinite(inf=True)
    with intercept(check, ops="all"):
        run(compiled, None, None)
    assert not check.findings


@pytest.mark.parametrize(("stage", "row", "op"), FORWARD, ids=[stage.__name__ for stage, _, _ in FORWARD])
def test_forward(compiled: Any, stage: Any, row: Tensor, op: str) -> None:
    finding = found(compiled, stage, row)
    assert (finding.kind, finding.record.phase) == ("made", "forward")
    assert f"aten::{op}" in finding.record.ops
    assert stage.__code__.co_firstlineno + 1 in lines_of(finding.record)


@pytest.mark.parametrize(("stage", "row"), BACKWARD, ids=[stage.__name__ for stage, _ in BACKWARD])
def test_backward(compiled: Any, stage: Any, row: Tensor) -> None:
    finding = found(compiled, stage, row)
    assert (finding.kind, finding.record.phase) == ("made", "backward")
    assert stage.__code__.co_firstlineno + 1 in lines_of(finding.record)
    others = {other.__code__.co_firstlineno + 1 for other in STAGES if other is not stage}
    assert lines_of(finding.record).isdisjoint(others)
