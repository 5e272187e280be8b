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


def an_input(next_step: Next) -> None:
    train(next_step, Net(), lambda step, x: at(step, x))


def a_weight(next_step: Next) -> None:
    net = Net()
    train(next_step, net, lambda step, x: at(step, net.last.weight))


def a_bias(next_step: Next) -> None:
    net = Net()
    train(next_step, net, lambda step, x: at(step, net.last.bias))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.value = torch.ones(1, 1, 3, 8)
        self.mask = torch.zeros(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = F.pad(x, (0, 4))[None, None] * self.scale
        return F.scaled_dot_product_attention(query, query, self.value, attn_mask=self.mask)


def a_value(next_step: Next) -> None:
    net = Attention()
    train(next_step, net, lambda step, x: at(step, net.value))


def a_mask(next_step: Next) -> None:
    net = Attention()
    train(next_step, net, lambda step, x: at(step, net.mask))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)
        self.state = (torch.zeros(1, 3, 4), torch.zeros(1, 3, 4))

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x[None], self.state)[0]


def an_lstm_state(next_step: Next) -> None:
    net = Recurrent()
    train(next_step, net, lambda step, x: at(step, net.state[1]))


def a_gradient(next_step: Next) -> None:
    net = Net()
    for step in range(4):
        gradient = torch.ones(3, 2)
        at(step, gradient)
        net(torch.ones(3, 4)).backward(gradient)
        next_step()


def a_statistic(next_step: Next) -> None:
    norm = nn.BatchNorm1d(4).eval()
    assert norm.running_mean is not None
    mean = norm.running_mean
    train(next_step, Net(norm), lambda step, x: at(step, mean))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.net = Net()

    def forward(self, x: Tensor) -> Any:
        return self.net(self.embedding(torch.tensor([0, 1, 2])))


def an_embedding(next_step: Next) -> None:
    net = Words()
    train(next_step, net, lambda step, x: at(step, net.embedding.weight))


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


def a_custom_forward(next_step: Next) -> None:
    custom = Custom()

    def plant(step: int, x: Tensor) -> None:
        custom.forward_too = step == PLANTED

    train(next_step, Net(custom), plant)


def a_custom_backward(next_step: Next) -> None:
    custom = Custom()

    def plant(step: int, x: Tensor) -> None:
        custom.backward_too = step == PLANTED

    train(next_step, Net(custom), plant)


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


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
SDPA = "torch.nn.functional.scaled_dot_product_attention"
LINEAR = "torch.nn.functional.linear"


def linear(role: str, module: str, step: int = PLANTED) -> dict[str, Named]:
    """What names a NaN that comes into a layer, which is the same for all engines and with all operators watched."""
    below = Named("aten::addmm", "came in", (role,), module, step=step)
    return {"matmul": below, "function": below._replace(op=LINEAR), "all": below}


CASES: dict[Callable[[Next], None], dict[str, Named]] = {
    an_input: linear("lhs", "first"),
    a_weight: linear("rhs", "last"),
    a_bias: linear("bias", "last"),
    a_value: {
        "matmul": Named(FLASH, "came in", ("value",), "Attention"),
        "function": Named(SDPA, "came in", ("value",), "Attention"),
        "all": Named(FLASH, "came in", ("value",), "Attention"),
    },
    a_mask: {
        "matmul": Named(FLASH, "came in", ("attn_mask",), "Attention"),
        "function": Named(SDPA, "came in", ("attn_mask",), "Attention"),
        "all": Named(FLASH, "came in", ("attn_mask",), "Attention"),
    },
    an_lstm_state: {
        "matmul": Named("aten::mkldnn_rnn_layer", "came in", ("cx_",), "lstm"),
        "function": Named("torch.lstm", "came in", ("args[1][1]",), "lstm"),
        "all": Named("aten::mkldnn_rnn_layer", "came in", ("cx_",), "lstm"),
    },
    a_gradient: {
        "matmul": Named("aten::mm", "came in", ("lhs",), "last", "backward"),
        "all": Named("aten::mm", "came in", ("lhs",), "last", "backward"),
    },
    a_statistic: {
        "matmul": Named("aten::addmm", "came in", ("lhs",), "last"),
        "function": Named(LINEAR, "came in", ("lhs",), "last"),
        "all": Named("aten::native_batch_norm", "came in", ("running_mean",), "middle"),
    },
    an_embedding: {
        "matmul": Named("aten::addmm", "came in", ("lhs",), "net.first"),
        "function": Named(LINEAR, "came in", ("lhs",), "net.first"),
        "all": Named("aten::embedding", "came in", ("weight",), "embedding"),
    },
    a_custom_forward: {
        "matmul": Named("aten::addmm", "came in", ("lhs",), "last"),
        "function": Named(LINEAR, "came in", ("lhs",), "last"),
        "all": Named("aten::div", "made", (), "middle", line="in zero_by_zero"),
    },
    a_custom_backward: {
        "matmul": Named("aten::mm", "came in", ("lhs",), "first", "backward"),
        "all": Named("aten::div", "made", (), "middle", "backward"),
    },
    an_optimizer_step: {
        "matmul": Named("aten::addmm", "came in", ("bias", "rhs"), "first", step=PLANTED + 1),
        "function": Named(LINEAR, "came in", ("rhs", "bias"), "first", step=PLANTED + 1),
        "all": Named("aten::add_", "came in", ("alpha",), "", line="in an_optimizer_step"),
    },
    a_workers_batch: linear("lhs", "first"),
}
FUNCTIONS = {
    a_value: Named(SDPA, "came in", ("value",), "Attention"),
    a_mask: Named(SDPA, "came in", ("attn_mask",), "Attention"),
    an_lstm_state: Named("torch.lstm", "came in", ("args[1][1]",), "lstm"),
    a_statistic: Named("torch.nn.functional.batch_norm", "came in", ("running_mean",), "middle"),
    an_embedding: Named("torch.nn.functional.embedding", "came in", ("weight",), "embedding"),
    a_custom_forward: Named("torch.Tensor.div", "made", (), "middle", line="in zero_by_zero"),
}
for known, named in FUNCTIONS.items():
    CASES[known]["all functions"] = named
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
@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_the_call_that_makes_or_receives_a_planted_nan_is_named(
    program: Callable[[Next], None], way: str, options: dict[str, Any], every: int
) -> None:
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
    if way not in CASES[program]:  # function level does not see the backward pass
        return
    record, first = nonfinite.findings[0].record, nonfinite.findings[0]
    named = CASES[program][way]
    found = Named(record.op, first.kind, first.bad, record.module, record.phase, record.step, named.line)
    assert found == named, str(first)
    if record.phase == "forward":
        assert record.source is not None
        assert record.source.endswith(named.line), str(first)
    assert f"step {named.step}, call {record.index} ({named.phase})" in str(first)
    for name in named.through:
        assert name in str(first).partition("\n")[0]
