"""The operators of recorded kernels: as calls in their place they make what the kernels were recorded to make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from planted import compiled_in
from torch import Tensor
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.program import kernels
from opintercept.runs.program.again import NotRunError
from opintercept.runs.program.evaluate import attempted
from opintercept.runs.program.program import Program, ProgramMemory, in_double
from opintercept.runs.program.unfused import Unfused

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

X = torch.linspace(-2, 2, 128).reshape(4, 32)
W = torch.linspace(-1, 1, 1024).sin().reshape(32, 32)
ROWS, CLASSES = torch.tensor([3, 1, 0, 2]), torch.tensor([1, 2, 3, 4])


def heads(x: Tensor) -> Tensor:
    q, k, v = (x @ W @ torch.cat([W, W.T, W + 1], 1)).view(2, 2, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
    return (q * 2 + k).transpose(1, 2).reshape(4, 32) @ W + v.reshape(4, 32).sin()


def in_place(x: Tensor) -> Tensor:
    y = (x @ W).relu()
    return (y + 1).mul_(y @ W).add_(x)


def expanded(x: Tensor) -> Tensor:
    return ((x @ W).amax(1, keepdim=True).expand(4, 32) * x).exp() @ W


def masked(x: Tensor) -> Tensor:
    y = x @ x.T
    return y.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ x


def pieces(x: Tensor) -> Tensor:
    one, two = (x @ W).chunk(2, 1)
    return torch.cat([F.silu(one) * two, F.pad(x[:, ::2], (1, 3)).exp()], 1)


def looked_up(x: Tensor) -> Tensor:
    return F.cross_entropy(F.embedding(ROWS, W) @ W + x, CLASSES)


def normalised(x: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x @ W, (32,))) * F.rms_norm(x, (32,), W[0])


PROGRAMS = (heads, in_place, expanded, masked, pieces, looked_up, normalised)


def recorded(folder: Path, program: Callable[[Tensor], Tensor], dtype: torch.dtype, *, trained: bool) -> runs.Run:
    global W
    kept, x = W, X.detach().to(dtype).clone().requires_grad_(trained)
    W = W.to(dtype)
    try:
        with compiled_in(str), torch.set_grad_enabled(trained):
            function: Any = torch.compile(program)
            with intercept(runs.RunRecorder(folder, tensors="full"), ops="all"):
                made = function(x)
                if trained:
                    made.float().square().sum().backward()
    finally:
        W = kept
    return runs.open_run(folder)


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
def test_a_program_of_operators_makes_what_was_recorded(
    tmp_path: Path, program: Callable[[Tensor], Tensor], dtype: torch.dtype, trained: bool
) -> None:
    run = recorded(tmp_path / "run", program, dtype, trained=trained)
    read = Program(run, 0)
    memory, compared = ProgramMemory(read.sizes), 0
    fused = {call.record.index for call in run.calls() if kernels.is_kernel(call)}
    for step in read.steps:
        # What a step reads is what those before have left in memory.
        given = [
            memory.read(region).to(read.value(region).dtype) if memory.has(region.memory) else read.value(region)
            for _, region in step.inputs
        ]
        made = attempted(step, given) if step.called is not None else None
        for place, region in enumerate(step.outputs):
            if region is None:
                continue
            kept = in_double(read.value(region))
            memory.write(region, kept.double())
            value = None if made is None else made[place]
            if value is None or not kept.is_floating_point():
                continue
            value = value.reshape(region.shape)
            # A few roundings, of numbers that are as large as the largest one.
            bound = 64 * torch.finfo(dtype).eps * float(kept[kept.isfinite()].abs().max().clamp_min(1.0))
            far = torch.where(value == kept, 0.0, (value - kept).abs())  # both may be infinite
            assert float(far.max()) <= bound, step.stored.record
            compared += step.stored.record.index in fused
    assert compared > 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    return recorded(tmp_path_factory.mktemp("unfused") / "run", normalised, torch.float32, trained=False)


@pytest.fixture
def kernel(run: runs.Run) -> runs.StoredCall:
    return next(call for call in run.calls() if kernels.is_kernel(call))


def test_calls_say_where_their_operators_are(run: runs.Run, kernel: runs.StoredCall) -> None:
    found = Unfused(run).calls(kernel)
    assert {call.record.op for call in found} >= {"aten::var_mean", "aten::rsqrt", "aten::erf", "aten::add"}
    assert {call.record.source for call in found} == {
        f"test_unfused.py:{normalised.__code__.co_firstlineno + 1} in normalised"
    }
    assert {call.record.index for call in found} == {kernel.record.index}
    assert all(call.record.ops is None for call in found)


def test_other_calls_are_left_as_they_are(run: runs.Run, kernel: runs.StoredCall) -> None:
    read = Unfused(run)
    product = next(call for call in run.calls() if not kernels.is_kernel(call))
    assert read.calls(product) == [product]
    failed = replace(kernel, error="RuntimeError")
    assert read.calls(failed) == [failed]


def test_what_was_not_recorded_is_computed_of_what_was(run: runs.Run, kernel: runs.StoredCall) -> None:
    read = Unfused(run)
    names = [name for call in read.calls(kernel) for name in call.tensors.values()]
    own = [name for name in names if read.kept(name) is not None]
    assert own
    assert len(own) < len(names)
    for name in own:
        value = read.value(name)
        assert value is not None
        assert read.kept(name) == (value.numel(), "F32")
    for name in (*(set(names) - {*own}), "unfused/0.0.0", "unfused/", ""):
        assert read.value(name) is None
        assert read.kept(name) is None


def test_operators_that_fail_are_no_crash(run: runs.Run, kernel: runs.StoredCall, monkeypatch: Any) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no such index")

    read = Unfused(run)
    names = [name for call in read.calls(kernel) for name in call.tensors.values()]
    monkeypatch.setattr("opintercept.runs.program.again.run", fail)
    with pytest.raises(NotRunError, match="operators of a kernel fail on its operands: no such index"):
        read.value(next(name for name in names if read.kept(name) is not None))


def damage(kernel: runs.StoredCall, change: Callable[[dict[str, Any]], None]) -> runs.StoredCall:
    given = copy.deepcopy(dict(kernel.given or {}))
    change(given)
    return replace(kernel, given=given)


def operand(given: dict[str, Any]) -> Any:
    return given["args"][int(next(iter(given["stands_for"]["given"])))]


def of_node(given: dict[str, Any], op: str) -> list[Any]:
    """The first node with an operator; without one, whose value an output has."""
    made = {name for name, *_ in given["stands_for"]["made"].values()}
    nodes: list[list[Any]] = given["stands_for"]["nodes"]
    return next(node for node in nodes if (node[1].startswith(op) if op else node[0] in made))


DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no nodes": lambda given: given["stands_for"].update(nodes=[]),
    "an operator that may not run": lambda given: of_node(given, "aten.erf").__setitem__(1, "aten.from_file.default"),
    "no operator": lambda given: of_node(given, "aten.erf").__setitem__(1, "os.system"),
    "a size that is not that of the output": lambda given: of_node(given, "").__setitem__(
        slice(1, 3), ["aten.sum.default", of_node(given, "aten.erf")[2]]
    ),
    "an operand of nothing": lambda given: of_node(given, "aten.erf").__setitem__(2, [{"node": "nobody"}]),
    "a huge tensor": lambda given: of_node(given, "aten.erf").__setitem__(
        slice(1, 3), ["aten.full.default", [{"list": [1 << 39]}, 0]]
    ),
    "memory that is not recorded": lambda given: operand(given)["memory"].__setitem__(0, 1 << 39),
    "negative strides": lambda given: operand(given)["memory"].__setitem__(2, [-1, -32]),
    "no memory": lambda given: operand(given).pop("memory"),
    "a tensor that is not there": lambda given: operand(given).update(tensor="7/0123456789abcdef-9"),
    "other shapes": lambda given: operand(given).update(shape=[2, 2]),
    "places of nothing": lambda given: given["stands_for"].update(places={"erf": 7}),
    "no outputs": lambda given: given.update(outputs=[]),
    "another number of outputs": lambda given: given["stands_for"].update(written=[0]),
}


@pytest.mark.parametrize("change", DAMAGES.values(), ids=[*DAMAGES])
def test_a_damaged_kernel_stays_one_call(
    run: runs.Run, kernel: runs.StoredCall, change: Callable[[dict[str, Any]], None]
) -> None:
    damaged = damage(kernel, change)
    assert Unfused(run).calls(damaged) == [damaged]
