"""The changes with which A makes what B does are named in plain words, and none is where no single one will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import intercept, runs
from opintercept.runs.why.answer import Answer, Cause

Program = Callable[[], Tensor]
_RANDOM = torch.Generator().manual_seed(0)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_RANDOM)


X, W, V, OUT = _drawn(6, 8), _drawn(8, 8) / 3, _drawn(8, 8) / 3, _drawn(8, 4)
BIAS, SCALE = _drawn(8), _drawn(8)
OTHER_BIAS = BIAS + torch.eye(8)[3]
IMAGE, KERNEL, HEAD = _drawn(2, 4, 6, 6), _drawn(4, 4, 3, 3) / 4, _drawn(4, 4, 1, 1)
MASK = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -1e9)


def told(folder: Path, one: Program, other: Program, *, trains: bool = False) -> Answer:
    opened = []
    for name, program in zip("ab", (one, other), strict=True):
        with torch.set_grad_enabled(trains), intercept([runs.RunRecorder(folder / name, tensors="full")], ops="all"):
            program()
        opened.append(runs.open_run(folder / name))
    return runs.why(*opened)


def only(answer: Answer) -> Cause:
    (cause,) = answer.causes
    return cause


def between(function: Callable[[Tensor], Tensor]) -> Program:
    """A program that computes a function between two products."""
    return lambda: function(X @ W) @ OUT


def image(function: Callable[[Tensor], Tensor]) -> Program:
    """A program that computes a function of an image before a convolution."""
    return lambda: F.conv2d(function(IMAGE), HEAD)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = q @ k.T / 3
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def attended(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Program:
    return lambda: function(X @ W, X @ V, X @ (W + V)) @ OUT


def divergence(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return p.exp() * (p - q)


def cosines(positions: Tensor) -> Tensor:
    return torch.outer(positions, 100.0 ** -(torch.arange(4) / 4)).cos()


def dropped(seed: int) -> Program:
    def drop(x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return F.dropout(x, 0.5)

    return between(drop)


CHANGES = {
    "eps": (
        between(lambda x: F.layer_norm(x, (8,), SCALE, BIAS, 1e-5)),
        between(lambda x: F.layer_norm(x, (8,), SCALE, BIAS, 1e-1)),
        ("argument", "uses eps=0.1 where A uses 1e-05"),
    ),
    "another seed": (dropped(1), dropped(2), ("operand", "draws other random numbers, by bernoulli")),
    "a flag with which statistics have another size": (
        image(lambda x: F.batch_norm(x, BIAS[:4].clone(), SCALE[:4].square() + 1, training=False)),
        image(lambda x: F.batch_norm(x, BIAS[:4].clone(), SCALE[:4].square() + 1, training=True)),
        ("argument", "uses training=True where A uses False"),
    ),
    "groups": (
        image(lambda x: F.group_norm(x, 4)),
        image(lambda x: F.group_norm(x, 2)),
        ("argument", "uses group=2 where A uses 4"),
    ),
    "two lists at once": (
        image(lambda x: F.conv2d(x, KERNEL, padding=1)),
        image(lambda x: F.conv2d(x, KERNEL, padding=2, dilation=2)),
        ("argument", "uses padding=[2, 2] where A uses [1, 1] and dilation=[2, 2] where A uses [1, 1]"),
    ),
    "a number": (
        between(lambda x: x * 0.5),
        between(lambda x: x * 0.7),
        ("argument", "uses 0.7 where A uses 0.5"),
    ),
    "a number, in another style": (
        between(lambda x: F.rms_norm(x * 1.5, (8,), eps=0.5)),
        between(lambda x: (lambda y: y * (y.square().mean(-1, keepdim=True) + 0.5).rsqrt())(x * 2.5)),
        ("argument", "uses 2.5 where A uses 1.5"),
    ),
    "a function": (between(F.silu), between(F.relu), ("operator", "computes relu where A computes silu")),
    "another pooling": (
        image(lambda x: F.avg_pool2d(x, 2)),
        image(lambda x: F.max_pool2d(x, 2)),
        ("operator", "computes max_pool2d_with_indices where A computes avg_pool2d"),
    ),
    "an operator less": (between(lambda x: x.tanh()), between(lambda x: x), ("operator", "leaves out tanh")),
    "an operator more": (
        between(lambda x: x.tanh()),
        between(lambda x: x.tanh().sin()),
        ("operator", "computes sin besides"),
    ),
    "no mask": (
        attended(lambda q, k, v: attention(q, k, v, MASK)),
        attended(attention),
        ("operator", "leaves out the mask, in add"),
    ),
    "q for k": (
        attended(lambda q, k, v: attention(q.sin(), k, v)),
        attended(lambda q, k, v: attention(k.sin(), q, v)),
        ("operand", "exchanges the results of mm (test_causes.py:{q}) and mm (test_causes.py:{q})"),
    ),
    "k for v": (
        attended(lambda q, k, v: attention(q, k, v) + v),
        attended(lambda q, k, v: attention(q, k, k) + v),
        ("operand", "reads the result of mm (test_causes.py:{q}) where A reads that of mm (test_causes.py:{q})"),
    ),
    "two in each other's place, of which one is read twice": (
        attended(lambda q, k, v: divergence(q, k)),
        attended(lambda q, k, v: divergence(k, q)),
        ("operand", "exchanges the results of _log_softmax (test_causes.py:{p}) and _log_softmax (test_causes.py:{p})"),
    ),
    "constants, where they begin to differ": (
        between(lambda x: x * torch.cat([cosines(torch.arange(6) / 4)] * 2, -1)),
        between(lambda x: torch.cat([each * cosines(torch.arange(6) * 4.0) for each in x.chunk(2, -1)], -1)),
        ("operand", "has other constants or positions, of div"),
    ),
    "another row": (
        between(lambda x: x[0:1]),
        between(lambda x: x[2:3]),
        ("operand", "reads another part of the result of mm (test_causes.py:{x})"),
    ),
    "another bias": (
        between(lambda x: F.layer_norm(x, (8,), SCALE, BIAS)),
        between(lambda x: F.layer_norm(x, (8,), SCALE, OTHER_BIAS)),
        ("weight", "has another bias: 1 of 8 numbers differ, by up to 1"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_causes_names_the_change(name: str, tmp_path: Path) -> None:
    one, other, (kind, what) = CHANGES[name]
    cause = only(told(tmp_path, one, other))
    first = {"x": between, "q": attended, "p": divergence}
    lines = {name: each.__code__.co_firstlineno + 1 + (name == "x") for name, each in first.items()}
    assert (cause.kind, cause.what) == (kind, what.format(**lines))


def test_causes_names_nothing_where_no_single_change_explains_it(tmp_path: Path) -> None:
    def otherwise(x: Tensor) -> Tensor:
        a, b = x[:, :4].sin(), x[:, 4:].cos().cumsum(0)
        return torch.cat([b * a.flip(0), a.exp() + b.roll(1, 0)], 1)

    cause = only(
        told(tmp_path, between(lambda x: F.silu(x.cumsum(1).flip(1)).square() + x.roll(2, 1)), between(otherwise))
    )
    assert not cause.exact
    assert cause.kind == "operator"


def test_causes_narrows_to_the_operators_that_differ(tmp_path: Path) -> None:
    """Both styles of norm and of the activation behind it do the same; what stands before them does not."""

    def one(x: Tensor) -> Tensor:
        return F.silu(F.rms_norm(x.cumsum(0), (8,), eps=1e-6))

    def other(x: Tensor) -> Tensor:
        y = x.flip(0)
        y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return y * torch.sigmoid(y)

    cause = only(told(tmp_path, between(one), between(other)))
    assert (cause.kind, cause.what) == ("operator", "seems to compute flip where A computes cumsum")


def _trained(weights: tuple[Tensor, ...], step: Callable[[Sequence[Tensor]], None]) -> Program:
    def program() -> Tensor:
        own = [nn.Parameter(weight.clone()) for weight in weights]
        for _ in range(2):
            loss = ((X @ own[0]).tanh() @ own[1]).square().mean()
            for weight in own:
                weight.grad = None
            loss.backward()
            step(own)
        return loss

    return program


def test_causes_of_a_step_that_is_left_out(tmp_path: Path) -> None:
    def updated(weights: Sequence[Tensor]) -> None:
        for weight in weights:
            assert weight.grad is not None
            with torch.no_grad():
                weight.add_(weight.grad, alpha=-0.1)

    def frozen(weights: Sequence[Tensor]) -> None:
        updated(weights[1:])

    answer = told(tmp_path, _trained((W, OUT), updated), _trained((W, OUT), frozen), trains=True)
    assert (answer.causes[0].kind, answer.causes[0].what) == ("operator", "does not update the weight, by add")


def test_causes_drops_a_change_that_moves_what_both_have(tmp_path: Path) -> None:
    """Another number of elements, compared with a mask that both have, is no reason to change the mask."""
    labels = torch.arange(6)

    def mean(of_all: bool) -> Program:
        def program() -> Tensor:
            kept = (labels < 4).float()
            losses = (X @ W).square().mean(1) * kept
            return losses.sum() / (torch.ones(6).sum() if of_all else kept.sum())

        return program

    answer = told(tmp_path, mean(False), mean(True))
    assert not any("where A uses 4" in what for cause in answer.causes for what in (cause.what, *cause.others))


def test_rows_of_a_weight_in_another_order_are_told_of_the_weight(tmp_path: Path) -> None:
    order = torch.tensor([0, 1, 4, 3, 2, 5, 6, 7])

    def gated(up: Tensor) -> Tensor:
        return (F.silu(X @ W) * (X @ up)) @ OUT

    cause = only(told(tmp_path, lambda: gated(V), lambda: gated(V[:, order])))
    assert (cause.kind, cause.what) == ("weight", "has the rows of its weight in another order")
