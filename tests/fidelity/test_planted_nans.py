"""NaNs planted where programs get theirs: `NonFinite` names the call that makes or first receives the NaN."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compiler import COMPILED
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import OpCall, hooks, intercept

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf
PLANTED = 2  # the step
Next = Callable[[], None]
Program = Callable[[Next], None]


class Oracle:
    """Notes by index which calls had a NaN among their arguments, and reads these without the help of `NonFinite`."""

    def __init__(self) -> None:
        self.tainted: dict[int, bool] = {}

    def pre(self, call: OpCall) -> None:
        kwargs = {name: value for name, value in call.kwargs.items() if name != "out"}
        self.tainted[call.index] = any(bool(values(value).isnan().any()) for value in flat((call.args, kwargs)))


def values(value: Any) -> Tensor:
    if isinstance(value, float):
        return torch.tensor(value)
    return value.detach() if value.is_floating_point() else torch.zeros(0)


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (Tensor, float)):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from flat(part)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))


class Net(nn.Module):
    """Two named layers with something between them."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = middle or nn.ReLU()
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x)))


def train(
    next_step: Next, net: nn.Module, plant: Callable[[int, Tensor], Any] = lambda step, x: None, batches: Any = None
) -> None:
    """Train for four steps; `plant` may change the net or the batch before each."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, x in enumerate(torch.ones(4, 3, 4) if batches is None else batches):
        plant(step, x)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        next_step()


def at(step: int, tensor: Tensor) -> None:
    if step == PLANTED:
        tensor.detach().numpy().flat[1] = NAN  # not with torch, whose operators `ops="all"` would show


def planted(make: Callable[[], nn.Module], where: Callable[[Any, Tensor], Tensor]) -> Program:
    """A training with a NaN in a tensor of the net or in the batch."""

    def program(next_step: Next) -> None:
        net = make()
        train(next_step, net, lambda step, x: at(step, where(net, x)))

    return program


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.value = torch.ones(1, 1, 3, 8)
        self.mask = torch.zeros(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = F.pad(x, (0, 4))[None, None] * self.scale
        return F.scaled_dot_product_attention(query, query, self.value, attn_mask=self.mask)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.state = (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x[None], self.state)[0]


def a_gradient(next_step: Next) -> None:
    net = Net()
    for step in range(4):
        gradient = torch.ones(3, 2)
        at(step, gradient)
        net(torch.ones(3, 4)).backward(gradient)
        next_step()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.net = Net()

    def forward(self, x: Tensor) -> Any:
        return self.net(self.embedding(torch.tensor([0, 1, 2])))


class Divides(torch.autograd.Function):
    """Divides zero by zero in its forward or its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward_too = backward
        return zero_by_zero(x) if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        [gradient] = gradients
        return zero_by_zero(gradient) if ctx.backward_too else gradient, None, None


def zero_by_zero(x: Tensor) -> Tensor:
    zero = x - x
    return zero / zero


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.forward_too = self.backward_too = False

    def forward(self, x: Tensor) -> Tensor:
        return Divides.apply(x, self.forward_too, self.backward_too)  # type: ignore[no-any-return, no-untyped-call]


def divides(which: str) -> Program:
    def program(next_step: Next) -> None:
        custom = Custom()
        train(next_step, Net(custom), lambda step, x: setattr(custom, which, step == PLANTED))

    return program


def an_optimizer_step(next_step: Next) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = NAN if step == PLANTED else 0.1
        optimizer.step()
        next_step()


class Batches(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        x = torch.ones(4)
        if index // 3 == PLANTED:
            x[1] = x[2].log() / x[3].log()  # in the worker, which runs no hooks
        return x


def a_workers_batch(next_step: Next) -> None:
    train(next_step, Net(), batches=torch.utils.data.DataLoader(Batches(), 3, num_workers=1))


class Named(NamedTuple):
    """What the first finding says."""

    op: str
    kind: str
    through: tuple[str, ...]
    module: str | None
    phase: str = "forward"
    step: int = PLANTED
    line: str = "in forward"


def received(op: str, function: str, role: str, module: str, argument: str = "") -> dict[str, Named]:
    """What names a NaN that comes into a call, by the role of an operand and at function level perhaps as an argument.

    It is the same for all engines and with all operators watched.
    """
    below = Named(op, "came in", (role,), module)
    above = Named(function, "came in", (argument or role,), module)
    return {"matmul": below, "all": below, "function": above, "all functions": above}


def linear(role: str, module: str) -> dict[str, Named]:
    return received("aten::addmm", "torch.nn.functional.linear", role, module)


def attention(role: str) -> dict[str, Named]:
    function = "torch.nn.functional.scaled_dot_product_attention"
    return received("aten::_scaled_dot_product_flash_attention_for_cpu", function, role, "Attention")


BACKWARD = Named("aten::mm", "came in", ("lhs",), "last", "backward")  # which function level does not see
LATER = Named("aten::addmm", "came in", ("bias", "rhs"), "first", step=PLANTED + 1)
# Each program, and what names its NaN in each way of watching.
CASES: dict[str, tuple[Program, dict[str, Named]]] = {
    "an_input": (planted(Net, lambda net, x: x), linear("lhs", "first")),
    "a_weight": (planted(Net, lambda net, x: net.last.weight), linear("rhs", "last")),
    "a_bias": (planted(Net, lambda net, x: net.last.bias), linear("bias", "last")),
    "a_value": (planted(Attention, lambda net, x: net.value), attention("value")),
    "a_mask": (planted(Attention, lambda net, x: net.mask), attention("attn_mask")),
    "an_lstm_state": (
        planted(Recurrent, lambda net, x: net.state[1]),
        received("aten::mkldnn_rnn_layer", "torch.lstm", "cx_", "lstm", argument="args[1][1]"),
    ),
    "a_gradient": (a_gradient, {"matmul": BACKWARD, "all": BACKWARD}),
    "a_statistic": (
        planted(lambda: Net(nn.BatchNorm1d(4).eval()), lambda net, x: net.middle.running_mean),
        linear("lhs", "last")
        | {
            "all": Named("aten::native_batch_norm", "came in", ("running_mean",), "middle"),
            "all functions": Named("torch.nn.functional.batch_norm", "came in", ("running_mean",), "middle"),
        },
    ),
    "an_embedding": (
        planted(Words, lambda net, x: net.embedding.weight),
        linear("lhs", "net.first")
        | {
            "all": Named("aten::embedding", "came in", ("weight",), "embedding"),
            "all functions": Named("torch.nn.functional.embedding", "came in", ("weight",), "embedding"),
        },
    ),
    "a_custom_forward": (
        divides("forward_too"),
        linear("lhs", "last")
        | {
            "all": Named("aten::div", "made", (), "middle", line="in zero_by_zero"),
            "all functions": Named("torch.Tensor.div", "made", (), "middle", line="in zero_by_zero"),
        },
    ),
    "a_custom_backward": (
        divides("backward_too"),
        {
            "matmul": BACKWARD._replace(module="first"),
            "all": Named("aten::div", "made", (), "middle", "backward"),
        },
    ),
    "an_optimizer_step": (
        an_optimizer_step,
        {
            "matmul": LATER,
            "function": LATER._replace(op="torch.nn.functional.linear", through=("rhs", "bias")),
            "all": Named("aten::add_", "came in", ("alpha",), "", line="in an_optimizer_step"),
        },
    ),
    "a_workers_batch": (a_workers_batch, linear("lhs", "first")),
}
WAYS = [
    pytest.param("matmul", {}, id="kernel"),
    pytest.param("matmul", {"engine": "mode"}, id="mode"),
    pytest.param("matmul", *COMPILED.values, id="compiled", marks=COMPILED.marks),
    pytest.param("function", {"level": "function"}, id="function"),
    pytest.param("all", {"ops": "all"}, id="all"),
    pytest.param("all functions", {"ops": "all", "level": "function"}, id="all functions"),
]


@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize(("way", "options"), WAYS)
@pytest.mark.parametrize("case", CASES)
def test_the_call_that_makes_or_receives_a_planted_nan_is_named(
    case: str, way: str, options: dict[str, Any], every: int
) -> None:
    program, names = CASES[case]
    before = set(threading.enumerate())
    oracle, nonfinite = Oracle(), hooks.NonFinite(action="record", check_every=every)
    with intercept([oracle, nonfinite], **options) as interceptor:
        program(interceptor.step)
    for thread in set(threading.enumerate()) - before:  # of a DataLoader that has ended
        thread.join(10)
    with intercept(lambda call: None, **options):
        pass  # a block beside which no other thread runs removes the kernels
    for finding in nonfinite.findings:
        assert finding.kind == "came in" or not oracle.tainted[finding.record.index], str(finding)
        assert finding.record.step >= PLANTED
    if way not in names:  # function level does not see the backward pass
        return
    record, first = nonfinite.findings[0].record, nonfinite.findings[0]
    named = names[way]
    found = Named(record.op, first.kind, first.bad, record.module, record.phase, record.step, named.line)
    assert found == named, str(first)
    if record.phase == "forward":
        assert record.source is not None
        assert record.source.endswith(named.line), str(first)
    assert f"step {named.step}, call {record.index} ({named.phase})" in str(first)
    for name in named.through:
        assert name in str(first).partition("\n")[0]
