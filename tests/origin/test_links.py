"""The forward call behind a backward one, and the operand whose gradient it computes."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import sampled
import torch
from compiler import BELOW, needs_compiler
from devices import on_a_device
from nets import record
from threads import run_threads
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from opintercept import CallRecord, OpCall, hooks, intercept
from opintercept._engines.compiled import load
from opintercept._origin import links
from opintercept._origin.links import Link, Links, grad_of
from opintercept.testing.plugin import OpCalls


@pytest.mark.parametrize("engine", BELOW)
def test_grad_of_tells_the_two_products_of_a_backward_pass(engine: dict[str, Any]) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    records = record(lambda: (a @ b).sum().backward(), **engine)
    shapes = {"lhs": (3, 4), "rhs": (4, 5)}
    assert {r.grad_of for r in records[1:]} == {"lhs", "rhs"}
    for call in records[1:]:
        assert call.forward == 0
        output = call.output
        assert output is not None
        assert not isinstance(output, tuple)
        assert output.shape in (shapes[call.grad_of or ""], shapes[call.grad_of or ""][::-1])


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("columns", [(), ("lhs",), ("rhs",), ("lhs", "rhs")], ids=["rows", "lhs", "rhs", "both"])
@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "mv", "linear", "einsum"])
def test_gradient_is_that_of_the_operand_in_its_shape(
    op: str, columns: tuple[str, ...], engine: dict[str, Any]
) -> None:
    def operand(role: str, *shape: int) -> Tensor:
        tensor = torch.randn(shape, dtype=torch.float64)
        return (tensor.mT.contiguous().mT if role in columns else tensor).requires_grad_()

    batch = (2,) if op in ("bmm", "einsum") else ()
    # Square too, where a wrong transpose would not show in the shape.
    for m, k, n in ((3, 4, 5), (4, 4, 4)):
        lhs = operand("lhs", *batch, m, k)
        rhs = operand("rhs", *batch, k, n) if op != "mv" else torch.randn(k, dtype=torch.float64).requires_grad_()
        forward: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}

        def look(call: OpCall, forward: Any = forward, seen: Any = seen) -> None:
            if call.phase == "forward":
                assert call.gradient is None
                forward.update(lhs=call.lhs, rhs=call.rhs)
            else:
                assert call.gradient is not None
                seen[call.grad_of or ""] = call.gradient.clone()

        with intercept(look, **engine):
            if op == "linear":
                output = nn.functional.linear(lhs, rhs.mT)
            elif op == "addmm":
                output = torch.addmm(torch.ones(n, dtype=torch.float64), lhs, rhs)
            elif op == "einsum":
                output = torch.einsum("bij,bjk->bik", lhs, rhs)
            else:
                output = getattr(torch, op)(lhs, rhs)
            output.pow(2).sum().backward()
        assert set(seen) == {"lhs", "rhs"} - ({"lhs"} if op == "mv" else set())  # an outer product is no matmul
        for role, gradient in seen.items():
            assert gradient.shape == forward[role].shape
            assert torch.equal(gradient, {"lhs": lhs, "rhs": rhs}[role].grad)  # type: ignore[arg-type]


def test_gradient_is_none_where_it_cannot_be_told() -> None:
    a = torch.randn(3, 3, requires_grad=True)
    seen = []
    with intercept(lambda call: seen.append((call.grad_of, call.gradient))):
        (a @ a).sum().backward()  # both products have `a` as an operand
    assert seen == [(None, None)] * 3


class Copied:
    """Puts copies in the place of the operands."""

    def pre(self, call: OpCall) -> Any:
        assert call.lhs is not None
        assert call.rhs is not None
        return call.replace(lhs=call.lhs.clone(), rhs=call.rhs.clone())


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("nested", [False, True], ids=["one interceptor", "two"])
def test_backward_calls_are_linked_beside_a_hook_that_replaces_operands(engine: dict[str, Any], nested: bool) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    recorder = hooks.Recorder()
    outer: list[Any] = [Copied()]
    inner: list[Any] = []
    (inner if nested else outer).append(recorder)
    with intercept(outer, **engine), intercept(inner, **engine):
        (a @ b).sum().backward()
    assert {(r.phase, r.module, r.forward, r.grad_of) for r in recorder.records} == {
        ("forward", "", None, None),
        ("backward", "", 0, "lhs"),
        ("backward", "", 0, "rhs"),
    }


def test_a_shared_weight_links_each_gradient_to_its_own_call() -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    records = record(lambda: torch.mm(torch.mm(x, w).tanh(), w).sum().backward())
    assert [r.phase for r in records] == ["forward"] * 2 + ["backward"] * 3
    assert {(r.forward, r.grad_of) for r in records[:2]} == {(None, None)}
    assert {(r.forward, r.grad_of) for r in records[2:]} == {(1, "lhs"), (1, "rhs"), (0, "rhs")}


def test_retain_graph_and_autograd_grad_link_again(op_calls: OpCalls) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    loss = torch.mm(torch.ones(3, 4), w).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, w)
    assert [(call.phase, call.forward) for call in op_calls] == [("forward", None), ("backward", 0), ("backward", 0)]


def test_a_second_derivative_links_to_the_call_of_the_first() -> None:
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def program() -> None:
        (grad,) = torch.autograd.grad(torch.mm(x, w).pow(3).sum(), x, create_graph=True)
        grad.sum().backward()

    records = record(program)
    assert [r.phase for r in records] == ["forward"] + ["backward"] * (len(records) - 1)
    first = next(r for r in records if r.phase == "backward")
    assert first.forward == 0
    assert {r.forward for r in records[1:]} == {0, first.index}
    assert {r.module for r in records} == {""}


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


multiply: Callable[..., Any] = Multiply.apply


def test_a_custom_function_links_both_of_its_backward_matmuls() -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    records = record(lambda: multiply(a, b).sum().backward())
    assert [(r.phase, r.forward, r.grad_of) for r in records] == [
        ("forward", None, None),
        ("backward", 0, "lhs"),
        ("backward", 0, "rhs"),
    ]


@pytest.mark.parametrize("engine", BELOW)
def test_a_product_without_gradient_in_a_custom_function_takes_no_link(engine: dict[str, Any]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            x @ x.T
            return x @ w

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
            return None, ctx.saved_tensors[0].T @ gradient

    twice: Callable[..., Any] = Twice.apply
    w = torch.randn(4, 5, requires_grad=True)
    records = record(lambda: twice(torch.randn(3, 4), w).sum().backward(), **engine)
    assert [(r.module, r.forward, r.grad_of) for r in records] == [("", None, None), ("", None, None), ("", 1, "rhs")]


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.amp.custom_fwd`."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Float8Like(torch.autograd.Function):
    """As float8 training does it: products of operands that were cast, which autograd does not know."""

    @staticmethod
    @decorated
    def forward(ctx: Any, x: Tensor, w: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.parts = parts
        rows = cast(x, 2.0).split(len(x) // parts)
        return torch.cat([torch.mm(row, cast(w, 2.0)) for row in rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        grad = cast(grad, 2.0)
        return grad @ cast(w, 2.0).T, cast(x, 2.0).T @ grad, None


class Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x.detach() * scale).to(torch.bfloat16).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


float8_like: Callable[..., Any] = Float8Like.apply
cast: Callable[..., Any] = Cast.apply


class Float8Linear(nn.Linear):
    parts = 1

    def forward(self, x: Tensor) -> Any:
        return float8_like(x, self.weight.T, self.parts)


@pytest.mark.parametrize("grad", ["weights", "weights and input"])
@pytest.mark.parametrize("engine", BELOW)
def test_a_custom_function_that_casts_its_operands_links_its_backward_products(
    engine: dict[str, Any], grad: str
) -> None:
    model = nn.Sequential(Float8Linear(4, 4), nn.ReLU(), nn.Sequential(Float8Linear(4, 4)))
    x = torch.randn(6, 4, requires_grad=grad != "weights")
    records = record(lambda: model(x).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward) for r in records] == [
        ("forward", "0", None),
        ("forward", "2.0", None),
        *[("backward", "2.0", 1)] * 2,
        *[("backward", "0", 0)] * 2,
    ]
    assert {r.grad_of for r in records} == {None}  # the operands are gone, and others may be in their memory
    (line,) = {r.source for r in records}
    assert re.fullmatch(r"test_links\.py:\d+ in (<listcomp>|forward)", line or "")


@pytest.mark.parametrize("engine", BELOW)
def test_several_products_of_a_custom_function_share_its_place_and_no_forward_call(engine: dict[str, Any]) -> None:
    last = Float8Linear(4, 4)
    model = nn.Sequential(Float8Linear(4, 4), last)
    last.parts = 3
    records = record(lambda: model(torch.randn(6, 4)).sum().backward(), **engine)
    backward = [(r.phase, r.module, r.forward) for r in records[4:]]
    assert backward == [("backward", "1", None)] * 2 + [("backward", "0", 0)] * 2
    assert {r.source for r in records} == {records[0].source}


class TwoLayers(torch.autograd.Function):
    """Products of two modules, in lines of their own, under one node."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: nn.Module, two: nn.Module) -> Any:
        ctx.save_for_backward(x)
        first = one(x.detach())
        return first + two(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ ctx.saved_tensors[0].T @ ctx.saved_tensors[0], None, None


two_layers: Callable[..., Any] = TwoLayers.apply


@pytest.mark.parametrize("engine", BELOW)
def test_what_the_products_of_one_node_do_not_have_in_common_is_not_guessed(engine: dict[str, Any]) -> None:
    model = nn.ModuleList([nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)])
    x = torch.randn(4, 4, requires_grad=True)
    records = record(lambda: two_layers(x, *model).sum().backward(), **engine)
    assert [r.module for r in records[:2]] == ["Linear", "Linear#2"]
    for call in records[2:]:
        assert (call.phase, call.module, call.source, call.forward) == ("backward", None, None, None)


@pytest.mark.parametrize("engine", BELOW)
def test_a_function_that_records_nothing_leaves_no_link(engine: dict[str, Any]) -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        with torch.no_grad():
            float8_like(torch.randn(6, 4), w, 1)
        float8_like(torch.randn(6, 4), w.detach(), 1)
        float8_like(torch.randn(6, 4), w, 1).sum().backward()

    assert [r.forward for r in record(program, **engine)] == [None, None, None, 2, 2]


def test_a_thread_with_the_identity_of_one_that_has_ended_has_links_of_its_own() -> None:
    def train() -> None:
        layer(torch.ones(2, 4)).sum().backward()

    layer, recorder = nn.Linear(4, 4), hooks.Recorder()
    with intercept(recorder, threads="all"):
        for _ in range(20):
            run_threads(train)
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert [r.forward for r in backward] == [r.index - 1 for r in backward]


def test_a_call_without_gradients_leaves_no_link_to_mistake() -> None:
    w = torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        y = torch.mm(w, w)
        with torch.no_grad():
            torch.mm(w, w)
        y.sum().backward()

    assert [r.forward for r in record(program)][2:] == [0, 0]


@pytest.mark.parametrize("engine", BELOW)
def test_the_products_inside_of_a_wrapper_are_linked_by_its_nodes(engine: dict[str, Any]) -> None:
    # As a DTensor's: autograd knows the wrapper, and what needs no gradient inside is what is seen.
    weight, x = Inside(torch.randn(4, 4)).requires_grad_(), Inside(torch.randn(3, 4))
    records = record(lambda: ((x @ weight).relu() @ weight).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward, r.grad_of) for r in records] == [
        ("forward", "", None, None),
        ("forward", "", None, None),
        ("backward", "", 1, "rhs"),
        ("backward", "", 1, "lhs"),
        ("backward", "", 0, "rhs"),
    ]


class Inside(Tensor):
    """A wrapper of one tensor."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Inside:
        made: Inside = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.wrapped = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["wrapped"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(cls, lambda x: x.wrapped, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize(
    "unlinked",
    [torch.ones_like, torch.detach, torch.isnan, torch.argmax, lambda y: y > 0, lambda y: y.new_zeros(3)],
    ids=["ones_like", "detach", "isnan", "argmax", "gt", "new_zeros"],
)
def test_an_operator_without_a_gradient_takes_no_link_of_the_call_before(
    engine: dict[str, Any], unlinked: Callable[[Tensor], Tensor]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            unlinked(y)
            return y * 2

    net = Net()
    with intercept(recorder := hooks.Recorder(), ops="all", **engine):
        for _ in range(2):
            net(torch.randn(2, 4, requires_grad=True)).sum().backward()
    products = [r for r in recorder.records if r.op == "aten::mm"]
    forward = [r.index for r in recorder.records if r.op == "aten::addmm"]
    assert [(r.module, r.forward, r.grad_of) for r in products] == [
        ("first", index, role) for index in forward for role in ("lhs", "rhs")
    ]


@pytest.mark.parametrize("engine", BELOW)
def test_a_loss_is_linked_though_its_node_has_another_name(engine: dict[str, Any]) -> None:
    def program() -> None:
        loss = nn.CrossEntropyLoss()(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]))
        loss.detach()
        loss.backward()

    with intercept(recorder := hooks.Recorder(), ops="all", **engine):
        program()
    (forward,) = (r.index for r in recorder.records if r.op == "aten::nll_loss_forward")
    found = [(r.module, r.forward) for r in recorder.records if r.op == "aten::nll_loss_backward"]
    assert found == [("CrossEntropyLoss", forward)]


@pytest.mark.parametrize("engine", BELOW)
def test_what_overwrites_a_tensor_that_it_saves_is_linked(engine: dict[str, Any]) -> None:
    with intercept(recorder := hooks.Recorder(), ops="all", **engine):
        (torch.randn(3, requires_grad=True) * 2).clamp_min_(0).sin_().sum().backward()
    records = recorder.records
    forward = {r.op.removeprefix("aten::"): r.index for r in records if r.phase == "forward"}
    linked = {r.op.removeprefix("aten::"): r.forward for r in records if r.phase == "backward"}
    assert (linked["cos"], linked["where"]) == (forward["sin_"], forward["clamp_min_"])


@pytest.mark.parametrize("engine", BELOW)
def test_two_products_inside_of_one_operator_are_not_told_apart(engine: dict[str, Any]) -> None:
    weight = TwoTensor(torch.randn(4, 4), torch.randn(4, 4)).requires_grad_()
    x = torch.randn(3, 4)
    records = record(lambda: (TwoTensor(x, x + 1) @ weight).sum().backward(), **engine)
    assert [(r.phase, r.module, r.forward) for r in records[2:]] == [("backward", "", None)] * 2


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("unseen", ["before the block", "in a pause"])
def test_a_product_without_gradient_takes_no_link_of_one_that_was_not_seen(engine: dict[str, Any], unseen: str) -> None:
    a, b, w = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    pair = Inside(a), Inside(b)
    recorder = hooks.Recorder()
    interceptor = intercept(recorder, **engine)
    loss = a @ w
    with interceptor:
        if unseen == "in a pause":
            pair[0] @ pair[1]
            with interceptor.paused():
                loss = a @ w
        pair[0] @ pair[1]  # no node of autograd's has come in between
        a @ b
        loss.backward(torch.ones(3, 4))
    backward = recorder.records[-1]
    assert (backward.phase, backward.module, backward.forward) == ("backward", None, None)


def test_gradient_accumulation_links_each_pass_to_its_own(op_calls: OpCalls) -> None:
    layer = nn.Linear(4, 4)
    for _ in range(3):
        layer(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert [call.forward for call in op_calls.filter(phase="backward")] == [0, 0, 3, 3, 6, 6]


def test_threads_that_train_at_once_do_not_mix_their_links() -> None:
    recorder = hooks.Recorder()
    widths = {2: nn.Linear(2, 2), 3: nn.Linear(3, 3), 5: nn.Linear(5, 5)}

    def train(width: int) -> None:
        for _ in range(20):
            widths[width](torch.randn(4, width, requires_grad=True)).sum().backward()

    with intercept(recorder, threads="all"):
        run_threads(*(functools.partial(train, width) for width in widths))
    by_index = {r.index: r for r in recorder.records}
    backward = [r for r in recorder.records if r.phase == "backward"]
    assert len(backward) == 3 * 20 * 2
    for call in backward:
        assert call.forward is not None
        behind = by_index[call.forward].lhs
        assert behind is not None
        assert call.lhs is not None
        assert behind.shape[1] in call.lhs.shape


def in_a_new_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function where autograd's numbers begin at 0."""
    results: list[Any] = []
    run_threads(lambda: results.append(function(*args)))
    return results[0]


def pack() -> Any:
    """Hide what nodes save, as offloading does."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0])


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_a_graph_of_another_thread_is_not_taken_for_one_of_this_thread(packed: bool) -> None:
    net = nn.ModuleDict({"its": nn.Linear(4, 4), "own": nn.Linear(4, 4)})
    net.forward = lambda name, x: net[name](x).sum()
    recorder = hooks.Recorder()

    def forward(name: str) -> Any:
        with pack() if packed else contextlib.nullcontext():
            return net(name, torch.randn(3, 4))

    def both(its: Any) -> None:
        own = forward("own")
        its.backward()
        own.backward()

    with intercept(recorder, threads="all"):
        in_a_new_thread(both, in_a_new_thread(forward, "its"))
    assert [(r.phase, r.module, r.forward) for r in recorder.records] == [
        ("forward", "its", None),
        ("forward", "own", None),
        ("backward", "its", 0),
        ("backward", "own", 1),
    ]


def made_by_two_threads(**options: Any) -> list[CallRecord]:
    """The records of two products, each in a thread of its own, and of their gradients, computed in a third one."""
    recorder = hooks.Recorder()

    def forward() -> Any:
        w = torch.randn(4, 4, requires_grad=True)
        with pack():
            return torch.mm(torch.randn(3, 4), w * w).sum()  # no weight tells

    def backward(*losses: Any) -> None:
        for loss in losses:
            loss.backward()

    with intercept(recorder, threads="all", **options):
        in_a_new_thread(backward, *(in_a_new_thread(forward) for _ in range(2)))
    return recorder.records


def test_a_node_that_several_threads_may_have_made_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "threads", None)  # another test may have loaded the library, which knows
    backward = made_by_two_threads()[2:]
    assert {(r.phase, r.module, r.source, r.forward) for r in backward} == {("backward", None, None, None)}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("engine", ["kernel", "compiled"])
def test_the_library_knows_which_thread_has_made_a_node(engine: str) -> None:
    load()
    records = made_by_two_threads(engine=engine)
    forward, backward = records[:2], records[2:]
    assert [r.forward for r in backward] == [r.index for r in forward]
    assert {r.source for r in backward} == {r.source for r in forward} != {None}


def test_checkpoints_do_not_make_links_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "SOFT", 16)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(8)))

    def train() -> None:
        for _ in range(4):
            x: Any = torch.randn(2, 4, requires_grad=True)
            for layer in net:
                x = checkpoint(layer, x, use_reentrant=False)
            x.sum().backward()

    backward = [r for r in record(train) if r.phase == "backward"]
    assert len(backward) == 4 * 8 * 2
    assert None not in {r.forward for r in backward}


@pytest.mark.parametrize("needed", ["lhs", "rhs"])
def test_an_operand_that_autograd_has_not_saved_tells_nothing(needed: str) -> None:
    freed, kept = 16, 32
    operands = (freed, kept) if needed == "lhs" else (kept, freed)
    link = Link(0, "aten::mm", 0, operands, True, True, (("lhs", "rhs").index(needed),))
    gradient = freed  # which has its memory
    assert grad_of([gradient, kept], gradient, link)[0] == needed


def test_an_operand_that_has_been_packed_tells_nothing() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            lhs, rhs = x * 1, w * 1
            output = torch.mm(lhs, rhs)
        memory = lhs.detach()  # in which the gradient will be, as if it were free
        output.register_hook(memory.copy_)
        output.sum().backward()

    assert [r.grad_of for r in record(program)] == [None, None, None]


class InMemory(torch.autograd.Function):
    """Makes a tensor in memory that stays when the tensor is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: bytearray) -> Tensor:
        return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


in_memory: Callable[..., Any] = InMemory.apply


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("needed", [False, True], ids=["needs none", "needs a gradient"])
@pytest.mark.parametrize("product", [torch.mm, multiply], ids=["operator", "custom function"])
def test_an_operand_that_has_been_packed_and_freed_tells_nothing(
    product: Callable[..., Any], needed: bool, engine: dict[str, Any]
) -> None:
    memory = bytearray(64)
    x, w = torch.randn(4, 4, requires_grad=needed), torch.randn(4, 4, requires_grad=True)

    def program() -> None:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            output = product(in_memory(x, memory), w)
        output.register_hook(lambda grad: grad @ in_memory(grad, memory))  # of another tensor, at the same address
        output.sum().backward()

    records = record(program, **engine)
    assert [r.phase for r in records[:2]] == ["forward", "backward"]
    assert {r.grad_of for r in records} == {None}


@pytest.mark.parametrize("engine", BELOW)
@pytest.mark.parametrize("cast", [False, True], ids=["plain", "autocast"])
def test_a_checkpoint_leaves_the_memory_of_weights_in_place(engine: dict[str, Any], cast: bool) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False))
    x = torch.randn(3, 4)

    def program() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            output: Any = checkpoint(net, x, use_reentrant=False)
        output.float().sum().backward()

    found = [(r.forward, r.grad_of) for r in record(program, **engine) if r.phase == "backward"]
    assert found == ([(1, None), (0, None)] if cast else [(1, "lhs"), (0, "rhs")])


@functools.cache
def differences() -> dict[str, dict[str, list[str]]]:
    """How programs on a stand-in for a GPU differ from the same programs on the CPU, by engine."""
    found: dict[str, dict[str, list[str]]] = on_a_device("device_programs.py", *DEVICE, *["--fewer"] * sampled.on)
    return found


DEVICE = ("kernel", "mode", "compiled")


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="torch 2.11 does not tell what nodes save"
)
@pytest.mark.parametrize("engine", DEVICE)
def test_calls_on_a_device_come_from_where_they_come_from_on_the_cpu(
    request: pytest.FixtureRequest, engine: str
) -> None:
    if request.config.getoption("--compiled"):
        pytest.skip("is the same without --compiled")
    found = differences()[engine]
    assert len(found) >= (4 if sampled.on else 13)
    assert {program: lines for program, lines in found.items() if lines} == {}


def test_a_backward_call_that_is_no_product_computes_no_operands_gradient() -> None:
    # It may find an operand that was freed where its own tensor is now.
    link = Link(0, "aten::mm", 0, (100, 200), True, True, (0, 1))
    assert grad_of((300, 200), 300, link) == ("lhs", False)
    assert grad_of((300, 200), 0, link) == (None, False)
