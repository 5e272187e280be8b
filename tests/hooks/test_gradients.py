"""`Gradients` and `backward` hooks: the gradients of single calls, at both levels."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from compiler import BELOW
from torch import Tensor, nn

from opintercept import HookError, OpCall, OpInterceptWarning, hooks, intercept


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


class Seen:
    """A `backward` hook that keeps its arguments."""

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self.inputs: list[tuple[Any, ...]] = []
        self.outputs: list[tuple[Any, ...]] = []

    def backward(self, call: OpCall, grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> None:
        self.calls.append(call)
        self.inputs.append(grad_inputs)
        self.outputs.append(grad_outputs)


def test_a_backward_hook_gets_the_gradients_of_its_call_only() -> None:
    x, w, seen = leaf(2, 3), leaf(3, 3), Seen()
    with intercept(seen, level="function"):
        first = x @ w
        second = first @ w
        (second.sum() + x.sum()).backward()
    ones = torch.ones(2, 3)
    later, earlier = seen.inputs
    assert torch.equal(later[0], ones @ w.detach().T)
    assert torch.equal(later[1], first.detach().T @ ones)
    assert torch.equal(earlier[0], later[0] @ w.detach().T)  # without what x.sum() adds to x.grad
    assert torch.equal(earlier[0] + 1, x.grad)  # type: ignore[arg-type]
    assert [call.index for call in seen.calls] == [1, 0]
    assert torch.equal(seen.outputs[0][0], ones)


@pytest.mark.parametrize(
    "program",
    [
        lambda a, b, c: torch.mm(a, b),
        lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0),
        lambda a, b, c: nn.functional.linear(a, b, c),
        lambda a, b, c: torch.einsum("ij,jk->ik", a, b),
        lambda a, b, c: torch.matmul(a.expand(2, 3, 3), b),
        lambda a, b, c: torch.nn.functional.scaled_dot_product_attention(a[None], b[None], c[None]),
        lambda a, b, c: a @ a,
        lambda a, b, c: torch.addmm(input=c, mat1=a, mat2=b),
    ],
    ids=["mm", "addmm", "linear", "einsum", "broadcast", "attention", "same", "keywords"],
)
def test_a_backward_hook_changes_no_gradient(program: Any) -> None:
    operands = [leaf(3, 3) for _ in range(3)]
    bare = torch.autograd.grad(program(*operands).square().sum(), operands, allow_unused=True)
    with intercept([Seen(), hooks.Gradients()], level="function"):
        watched = torch.autograd.grad(program(*operands).square().sum(), operands, allow_unused=True)
    pairs: list[tuple[Any, Any]] = list(zip(bare, watched, strict=True))
    for one, other in pairs:
        assert (one is None and other is None) or torch.equal(one, other)


def test_an_entry_is_none_for_what_needs_no_gradient() -> None:
    seen = Seen()
    with intercept(seen, level="function"):
        nn.functional.linear(torch.ones(2, 3), leaf(4, 3), leaf(4)).sum().backward()
        torch.einsum("ij,jk->ik", [torch.ones(2, 2), leaf(2, 2)]).sum().backward()
    assert [[None if g is None else tuple(g.shape) for g in grads] for grads in seen.inputs] == [
        [None, (4, 3), (4,)],
        [None, (2, 2)],
    ]


def test_a_tensor_passed_twice_stays_one_tensor() -> None:
    seen, x = Seen(), leaf(2, 2)
    with intercept(seen, level="function"):
        (x @ x).sum().backward()
    ((first, second),) = seen.inputs
    assert torch.equal(first, x.grad)  # type: ignore[arg-type]
    assert second is None

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    y = leaf(1, 3, 4)
    (bare,) = torch.autograd.grad(attention(y, y, y)[0].sum(), y)
    with intercept(seen, level="function"):
        (watched,) = torch.autograd.grad(attention(y, y, y)[0].sum(), y)  # checks whether query is key
    assert torch.equal(bare, watched)


def test_gradients_may_be_replaced_as_with_a_module_hook() -> None:
    class Halve:
        def backward(self, call: OpCall, grad_inputs: tuple[Any, ...], grad_outputs: Any) -> tuple[Any, ...]:
            return tuple(None if grad is None else grad / 2 for grad in grad_inputs)

    x, w = leaf(2, 3), leaf(3, 4)
    (whole,) = torch.autograd.grad((x @ w).sum(), w)
    with intercept(Halve(), level="function"):
        (half,) = torch.autograd.grad((x @ w).sum(), w)
    assert torch.equal(half, whole / 2)

    def halve(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(gradient / 2 for gradient in inputs)

    module = nn.Linear(3, 4)
    handle = module.register_full_backward_hook(halve)
    (by_module,) = torch.autograd.grad(module(x).sum(), x)
    handle.remove()
    with intercept(hooks.Gradients(lambda call, g: {"lhs": g["lhs"] / 2}), level="function"):
        (by_hook,) = torch.autograd.grad(module(x).sum(), x)
    assert torch.equal(by_hook, by_module)


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        ([1, 2, 3], "a tuple of 2 gradients"),
        ((torch.ones(1), torch.ones(1)), "must have the shape of"),
        ((None, torch.ones(3, 4)), "must return a gradient where there was one and None elsewhere, got None"),
        (("x", torch.ones(3, 4)), "must return a gradient where there was one and None elsewhere, got 'x'"),
    ],
)
def test_a_replacement_that_does_not_fit_is_refused(replacement: Any, message: str) -> None:
    class Bad:
        def backward(self, call: OpCall, grad_inputs: Any, grad_outputs: Any) -> Any:
            return replacement

    with pytest.raises(HookError, match=message) as caught:
        with intercept(Bad(), level="function"):
            (leaf(2, 3) @ leaf(3, 4)).sum().backward()
    assert any("raised by backward hook" in note for note in caught.value.__notes__)


def test_only_operands_can_be_replaced() -> None:
    with pytest.raises(HookError, match="only the gradients of lhs, rhs can be replaced here, got output"):
        with intercept(hooks.Gradients(lambda call, g: {"output": g["output"]}), level="function"):
            (leaf(2, 3) @ leaf(3, 4)).sum().backward()
    with pytest.raises(HookError, match="gradients can be replaced at function level only"):
        with intercept(hooks.Gradients(lambda call, g: g)):
            (leaf(2, 3) @ leaf(3, 4)).sum().backward()


def test_a_failing_backward_hook_is_switched_off_on_warn() -> None:
    class Fails:
        def backward(self, call: OpCall, grad_inputs: Any, grad_outputs: Any) -> None:
            raise KeyError("mine")

    x = leaf(2, 2)
    with pytest.warns(OpInterceptWarning, match="switched off a hook that raised KeyError") as caught:
        with intercept(Fails(), level="function", on_error="warn"):
            (x @ x @ x).sum().backward()
    assert len(caught) == 1
    assert x.grad is not None


def test_the_call_of_a_backward_hook_has_shapes_and_no_values() -> None:
    seen = Seen()
    model = nn.Sequential(nn.Linear(3, 4))
    with intercept(seen, level="function"):
        output = model(torch.ones(2, 3))
        alive = weakref.ref(output)
        output.sum().backward()
    call = seen.calls[0]
    assert (call.module, call.forward, call.op) == ("0", None, "torch.nn.functional.linear")
    assert call.source is not None
    assert str(call.gemm) == "[2, 3] @ [3, 4]"
    assert call.lhs is not None
    assert call.lhs.is_meta
    assert call.output is None
    del output
    gc.collect()
    assert alive() is None


def test_a_graph_without_a_backward_pass_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        with intercept(Seen(), level="function"):
            output = leaf(2, 2) @ leaf(2, 2)
        alive = weakref.ref(output)
        del output
        assert alive() is None
    finally:
        gc.enable()


def test_a_removed_hook_is_not_called_by_older_graphs() -> None:
    seen = Seen()
    with intercept(level="function") as interceptor:
        handle = interceptor.register(seen)
        output = leaf(2, 2) @ leaf(2, 2)
        handle.remove()
        output.sum().backward()
    assert seen.calls == []


def test_operators_of_a_backward_hook_are_not_seen() -> None:
    class Multiplies:
        def backward(self, call: OpCall, grad_inputs: Any, grad_outputs: Any) -> None:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    recorder = hooks.Recorder()
    with intercept([Multiplies(), recorder], level="function"):
        (leaf(2, 2) @ leaf(2, 2)).sum().backward()
    assert len(recorder.records) == 1


def test_a_backward_hook_is_refused_at_dispatch_level() -> None:
    with pytest.raises(ValueError, match=r"a hook with a backward method works at function level"):
        intercept(Seen())


def test_in_place_forms_and_calls_without_gradients_are_left_alone() -> None:
    seen = Seen()
    x = leaf(2, 2)
    with intercept(seen, level="function"):
        (x * 1).addmm_(x, x).sum().backward()
        with torch.no_grad():
            x @ x
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert seen.calls == []
    assert x.grad is not None


def test_only_the_calls_that_when_chooses_get_nodes() -> None:
    seen = Seen()
    a, b = leaf(2, 2), leaf(2, 2)
    with intercept(hooks.when(seen, op="mm"), level="function"):
        bare = torch.matmul(a, b)
        tapped = torch.mm(a, b)
        (bare + tapped).sum().backward()
    assert [call.op for call in seen.calls] == ["torch.mm"]
    assert type(bare.grad_fn).__name__ == "MmBackward0"
    assert type(tapped.grad_fn).__name__ == "BackwardHookFunctionBackward"


def test_two_interceptors_each_get_the_gradients() -> None:
    one, other = Seen(), Seen()
    with intercept(one, level="function"), intercept(other, level="function"):
        (leaf(2, 2) @ leaf(2, 2)).sum().backward()
    assert len(one.inputs) == len(other.inputs) == 1
    assert torch.equal(one.inputs[0][0], other.inputs[0][0])


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("transpose", [(), (0,), (1,), (0, 1)])
def test_dispatch_level_reads_the_same_gradients_from_the_backward_pass(
    engine: dict[str, Any], transpose: tuple[int, ...]
) -> None:
    def program() -> Tensor:
        torch.manual_seed(3)
        a, b = leaf(4, 4), leaf(4, 4)
        product = torch.mm(a.T if 0 in transpose else a, b.T if 1 in transpose else b)
        return (product * torch.arange(16.0).reshape(4, 4)).sum()

    above, below = hooks.Gradients(), hooks.Gradients()
    with intercept(above, level="function"):
        program().backward()
    with intercept(below, **engine):
        program().backward()
    expected = {entry.operand: entry.value for entry in above.entries}
    found = {entry.operand: entry.value for entry in below.entries}
    assert expected.keys() == found.keys() == {"lhs", "rhs", "output"}
    for operand, value in expected.items():
        assert torch.equal(found[operand], value), operand
    assert len(below.entries) == 3
    assert {entry.forward for entry in below.entries} == {0}


def test_dispatch_level_applies_alpha_as_autograd_does() -> None:
    a, b, c = leaf(2, 3), leaf(3, 4), leaf(4)
    gradients = hooks.Gradients()
    with intercept(gradients):
        torch.addmm(c, a, b, alpha=3.0).sum().backward()
    found = {entry.operand: entry.value for entry in gradients.entries}
    assert torch.equal(found["lhs"], a.grad)  # type: ignore[arg-type]
    assert torch.equal(found["rhs"], b.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["function", "dispatch"])
def test_entries_are_looked_up_by_module(level: Any) -> None:
    gradients = hooks.Gradients()
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), last)
    with intercept(gradients, level=level):
        model(torch.ones(2, 3)).sum().backward()
    weight = next(entry for entry in gradients["2"] if entry.operand == "rhs").value
    expected = last.weight.grad
    assert expected is not None
    assert torch.equal(weight if level == "function" else weight.T, expected)
    assert {entry.module for entry in gradients["*"]} == {"0", "2"}
    assert gradients["encoder.*"] == []
    gradients.clear()
    assert gradients["*"] == []


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="function must be callable as function\\(call, gradients\\), got 3"):
        hooks.Gradients(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["function", "dispatch"])
@pytest.mark.slow
def test_attention_rollout_works_without_module_hooks(level: Any) -> None:
    """Collect attention and its gradient by module name on a ViT, and compare with doing it by hand."""
    torch.manual_seed(0)
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        **eager,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config)
    pixels = torch.randn(1, 3, 16, 16)

    # By hand: the model returns its attention weights, and autograd is asked to retain their gradients.
    output = model(pixels, output_attentions=True)
    for attention in output.attentions:
        attention.retain_grad()
    output.logits[0, 1].backward()
    expected = [(a.detach(), a.grad) for a in output.attentions]

    attentions: dict[str | None, list[Tensor]] = defaultdict(list)
    gradients: dict[str | None, list[Tensor]] = defaultdict(list)

    class Rollout:
        def post(self, call: OpCall) -> None:
            if call.phase == "forward" and call.lhs is not None:
                attentions[call.module].append(call.lhs.detach().clone())

    def keep(call: OpCall, grads: dict[str, Tensor]) -> None:
        if "lhs" in grads:
            gradients[call.module].append(grads["lhs"])

    def of_values(call: OpCall) -> bool:  # not the product of queries and keys, which has the same module
        return call.phase == "backward" or (call.lhs is not None and bool((call.lhs >= 0).all()))

    ops = ("matmul", "bmm")
    chosen: dict[str, Any] = {"module": "*.attention*", "op": ops}
    with intercept(
        [hooks.when(Rollout(), predicate=of_values, **chosen), hooks.when(hooks.Gradients(keep), **chosen)], level=level
    ):
        model(pixels).logits[0, 1].backward()

    assert len(attentions) == 2
    for (name, (attention,)), (value, grad) in zip(sorted(attentions.items(), key=str), expected, strict=True):
        assert torch.equal(attention.reshape(value.shape), value)
        # In backward each module has two products; the one with the values comes first.
        assert torch.equal(gradients[name][0].reshape(grad.shape), grad)


@pytest.mark.parametrize("level", ["function", "dispatch"])
def test_a_kept_gradient_does_not_change_when_autograd_accumulates(level: Any) -> None:
    layer, gradients = torch.nn.Linear(2, 3, bias=False), hooks.Gradients()
    with intercept(gradients, level=level):
        for factor in (1.0, 10.0):
            (layer(torch.ones(1, 2)) * factor).sum().backward()
    kept = [entry.value.unique().tolist() for entry in gradients.entries if entry.operand == "rhs"]
    assert kept == [[1.0], [10.0]]


def test_the_alpha_of_another_interceptor_is_not_applied() -> None:
    gradients = hooks.Gradients()
    for alpha in (2, 1):
        a, b, c = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2)
        with intercept(gradients):
            torch.addmm(c, a, b, alpha=alpha).sum().backward()
    kept = [entry.value.unique().tolist() for entry in gradients.entries if entry.operand == "rhs"]
    assert kept == [[4.0], [2.0]]


def test_gradients_are_a_table_without_their_values() -> None:
    x, w, gradients = leaf(2, 3), leaf(3, 4), hooks.Gradients()
    with intercept(gradients, level="function"):
        (x @ w).mul(3).sum().backward()
    frame = gradients.to_pandas()
    assert list(frame) == ["module", "op", "forward", "operand", "shape", "norm", "absmax"]
    assert [*frame["operand"]] == ["lhs", "rhs", "output"]
    assert [*frame["shape"]] == [[2, 3], [3, 4], [2, 4]]
    assert frame["norm"][1] == pytest.approx(w.grad.norm().item())  # type: ignore[union-attr] # float64 for float32
    assert frame["absmax"][2] == 3
    assert str(gradients).splitlines()[3].split()[-3:] == ["4]", "8.49", "3"]


@pytest.mark.parametrize("alpha", [1, 2])
def test_gradients_that_there_is_no_memory_to_copy_are_left_out(alpha: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, gradients = leaf(2, 3), leaf(3, 4), hooks.Gradients()
    text = "^Gradients leaves out gradients for which the device has no memory left; choose calls with"
    refused = Mock(side_effect=torch.OutOfMemoryError)
    with pytest.warns(OpInterceptWarning, match=text) as told, intercept(gradients):
        outputs = [torch.addmm(torch.zeros(4), x, w, alpha=alpha).sum() for _ in range(2)]
        monkeypatch.setattr(Tensor, "clone" if alpha == 1 else "__mul__", refused)
        outputs[0].backward()
        monkeypatch.undo()
        outputs[1].backward()
    assert len(told) == 1
    assert {(entry.forward, entry.operand) for entry in gradients.entries} >= {(1, "lhs"), (1, "rhs")}
    assert all(entry.forward == 1 for entry in gradients.entries)
    assert refused.called
