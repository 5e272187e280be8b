"""What generated kernels stand for is read from Inductor's graph as it loads a wrapper, and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from planted import compiled_in
from torch import Tensor

from opintercept import OpCall, hooks, intercept
from opintercept._engines.inductor import provenance
from opintercept._ops.fragment import Fragment, HeldNode
from opintercept._ops.generated import GeneratedKernel
from opintercept._origin.wrappers import WrapperSource

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]

X = torch.linspace(-2, 2, 128).reshape(4, 32)


def normalised(x: Tensor) -> Tensor:
    y = torch.nn.functional.layer_norm(x @ torch.ones(32, 32), (32,))
    return (y * 2).mean(0, keepdim=True) @ torch.ones(32, 32)


def fragments(function: Any, *args: Tensor) -> list[Fragment | None]:
    """Those of the kernels that a call launches in a block."""
    found: list[Fragment | None] = []

    def see(call: OpCall) -> None:
        if isinstance(call.func, GeneratedKernel):
            found.append(call.func.fragment)

    with intercept(see, ops="all"):
        function(*args)
    return found


def test_buffers_hold_nodes_also_sums_of_which_averages_are_made() -> None:
    with compiled_in(str):
        found = fragments(torch.compile(normalised), X)
    fragment = found[-1]
    assert fragment is not None
    assert fragment.left_out == {}
    names = {held.name for held in fragment.made.values()}
    sums = [name for name in names if fragment.nodes[name].op in ("aten::sum", "aten::mul")]
    assert sums
    ops = {fragment.nodes[name].op for name in names}
    assert {"getitem", "aten::mean"} & ops or "aten::div" in ops
    assert fragment.given
    assert all(isinstance(held, HeldNode) for held in fragment.given.values())
    for held in fragment.made.values():
        assert fragment.needed(held.name, {each.name for each in fragment.given.values()})


def test_memory_that_a_kernel_only_seems_to_write_holds_no_node() -> None:
    # The logarithm of the sum is computed in its memory, as far as Inductor's plan goes, and stays in a register.
    classes = torch.arange(4)

    def loss(x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ torch.ones(32, 32), classes)

    reference = hooks.Reference()
    with compiled_in(str), torch.no_grad():
        compiled: Any = torch.compile(loss)
        with intercept(reference, ops="all"):
            compiled(X)
    assert reference.wrong == []
    assert any("_log_softmax" in row.op for row in reference.rows())


def test_a_graph_of_before_the_block_stands_for_nothing() -> None:
    reference = hooks.Reference()
    with compiled_in(str):
        compiled = torch.compile(normalised)
        compiled(X)
        assert set(fragments(compiled, X)) == {None}
        with torch.compiler.set_stance("fail_on_recompile"), intercept(reference, ops="all"):
            compiled(X)
    assert any("compiled while a block is open" in reason for reason in reference.skipped)
    assert reference.wrong == []


def test_a_graph_from_the_cache_stands_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def function(x: Tensor) -> Tensor:
        return (x @ x.T).sin() + 0.25

    with compiled_in(str), torch._inductor.config.patch(fx_graph_cache=True):
        expected = torch.compile(function)(X)
        torch._dynamo.reset()
        again: Any = torch.compile(function)
        assert set(fragments(again, X)) == {None}
        assert torch.equal(again(X), expected)


def test_whatever_is_met_in_inductor_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Any) -> Any:
        raise NotImplementedError("another layout")

    monkeypatch.setattr(provenance, "_nodes", fail)
    with compiled_in(str):
        assert set(fragments(torch.compile(normalised), X)) == {None}


def test_a_block_does_not_change_what_inductor_writes() -> None:
    texts: list[list[str]] = []
    for watched in (False, True):
        written: list[str] = []
        with compiled_in(lambda text, written=written: written.append(text.partition("\n")[2]) or text):  # type: ignore[misc]
            compiled: Any = torch.compile(normalised)
            if watched:
                fragments(compiled, X)
            else:
                compiled(X)
        texts.append(written)
    assert texts[0] == texts[1]
    assert texts[0]


def test_a_wrapper_without_a_graph_is_left_alone() -> None:
    source = WrapperSource("def call(args):\n    pass\n", "key")
    provenance.tell(object(), source)
    assert source.launches == {}
    assert provenance.graph_that_loads() is None
