"""Pairs of small programs of which comparisons have said something wrong.

A program is a function of whether it is the second of the pair. It makes its model while it is recorded, as scripts do,
unless it is `made` before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy
import torch
from outcomes import Pair, add
from torch import Tensor, nn
from torch.nn import functional as F

PAIRS: list[Pair] = []
pair = partial(add, PAIRS)
attention: Any = F.scaled_dot_product_attention


def linears(size: int, count: int, *, bias: bool = True) -> list[Any]:
    return [nn.Linear(size, size, bias) for _ in range(count)]


def heads(x: Tensor) -> Any:
    return x.unflatten(-1, (2, -1)).transpose(-3, -2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def hidden(size: int, low: float) -> Tensor:
    return torch.zeros(size, size).masked_fill(torch.ones(size, size).triu(1).bool(), low)


def fixed(*shape: int) -> Tensor:
    """Numbers that no recorded call makes."""
    return torch.from_numpy(numpy.sin(37 * numpy.linspace(-1, 1, math.prod(shape), dtype=numpy.float32)).reshape(shape))


@pair("bias: left out", "^Linear#2$|two", "operator operand weight argument", "bias")
def _(b: bool) -> None:
    one, two, three = linears(16, 3)
    x = torch.randn(6, 16)
    two.bias = None if b else two.bias
    three(two(one(x).relu()).relu())


@pair("bias: of the last layer left out", "^Linear#2$|head", "operator operand weight argument", "bias")
def _(b: bool) -> None:
    one, head = linears(16, 2)
    head.bias = None if b else head.bias
    head(one(torch.randn(6, 16)).relu())


@pair("cap: of logits left out", "tanh|sum", "operator", "tanh|left out|div|mul")
def _(b: bool) -> Any:
    one, head = linears(16, 2)
    y = head(one(torch.randn(6, 16)).relu())
    y = y if b else torch.tanh(y / 0.3).mul(0.3)
    return y.sum().item()


@pair("temperature: left out behind the last product", "logits|log_softmax", "operator argument", r"0\.6|div|left out")
def _(b: bool) -> Any:
    weight, x = torch.randn(10, 8), torch.randn(3, 8)
    logits = x @ weight.t()
    return -(logits if b else logits / 0.6).log_softmax(-1)[:, 0].mean().item()


def masked_loss(logits: Tensor, count: bool = True) -> Tensor:
    y, mask = torch.arange(6) % 5, torch.arange(6) < 4
    picked = logits.log_softmax(-1).gather(-1, y[:, None])[:, 0]
    return -(picked * mask).sum() / mask.sum() if count else -(picked * mask).mean()


@pair("temperature: in training", "/ 0.9|log_softmax", "operator argument", r"0\.9|div", trains=True)
def _(b: bool) -> None:
    logits = nn.Linear(8, 5)(torch.randn(6, 8))
    masked_loss(logits / 0.9 if b else logits).backward()


@pair("loss: mean of all tokens", "picked", "operator argument", "mean|sum|div|count|4|6", trains=True)
def _(b: bool) -> None:
    masked_loss(nn.Linear(8, 5)(torch.randn(6, 8)), not b).backward()


@pair("clip: left out", r"clip_grad_norm_|optimizer\.step", "operator argument", "clip|mul|left out|norm", trains=True)
def _(b: bool) -> None:
    net, x = nn.Linear(8, 5), torch.randn(6, 8)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    for scale in (1.0, 3.0, 0.1):
        (net(x) * scale).square().mean().backward()
        if not b:
            nn.utils.clip_grad_norm_(net.parameters(), 0.01)
        optimizer.step()


@pair("cross-attention: no mask", "attention", "argument operand", "mask", trains=True)
def _(b: bool) -> None:
    q, k, v, head = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), nn.Linear(8, 1)
    mask = (torch.arange(6) < 4).expand(1, 1, 4, 6)
    head(attention(q, k, v, attn_mask=None if b else mask)).square().mean().backward()


def sliced(x: Tensor, qkv: nn.Module, *, eager: bool) -> Any:
    q, k, v = qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    if eager:
        return (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
    return attention(q, k, v)


@pair("slope: behind attention in single operators", "leaky_relu", "argument", r"0\.02")
def _(b: bool) -> Any:
    qkv, out = nn.Linear(32, 96), nn.Linear(32, 32)
    y = out(merged(sliced(torch.randn(2, 10, 32), qkv, eager=b)))
    return F.leaky_relu(y, 0.02 if b else 0.01).square().mean().item()


@pair("attention: in single operators")
def _(b: bool) -> Any:
    qkv, out = nn.Linear(32, 96), nn.Linear(32, 32)
    return out(merged(sliced(torch.randn(2, 10, 32), qkv, eager=b))).square().mean().item()


@pair("mask: left out of eager attention", "mask|softmax", "operator operand argument", "mask|add|left out")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(2, 6, 16)
    mask = hidden(6, -1e9)
    s = heads(q(x)) @ heads(k(x)).mT / 8**0.5
    s = s if b else s + mask
    o(merged(s.softmax(-1) @ heads(v(x))))


@pair("mask: -1e9 for -inf")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(2, 6, 16)
    mask = hidden(6, -1e9 if b else -math.inf)
    o(merged((heads(q(x)) @ heads(k(x)).mT / 8**0.5 + mask).softmax(-1) @ heads(v(x))))


@pair(
    "mask: -1e9 for -inf, where a row sees nothing",
    "softmax|mask|s = ",
    "argument operand operator input",
    "nan|inf|1e\\+?0?9|mask",
)
def _(b: bool) -> Any:
    q, k, v = linears(16, 3)
    x = torch.randn(2, 6, 16)
    seen = torch.arange(6) > 2
    mask = torch.zeros(6, 6).masked_fill(~(seen & torch.ones(6, 6).tril().bool()), -1e9 if b else -math.inf)
    s = heads(q(x)) @ heads(k(x)).mT / 8**0.5 + mask
    return merged(s.softmax(-1) @ heads(v(x))).sum().item()


def windowed(b: bool, window: int) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(8, 16)
    distance = torch.arange(8)[:, None] - torch.arange(8)
    mask = torch.zeros(8, 8).masked_fill((distance < 0) | (distance >= window), -1e9)
    s = (heads(q(x)) * 0.25) @ heads(k(x)).mT if b else heads(q(x)) @ heads(k(x)).mT * 0.25
    o(merged((s + mask).softmax(-1) @ heads(v(x))))


@pair("mask: a window, and the scale moved", "mask|softmax", "argument operand input operator", "mask|3|window|differ")
def _(b: bool) -> None:
    windowed(b, 3 if b else 9)


@pair("mask: the scale moved")
def _(b: bool) -> None:
    windowed(b, 9)


@pair("scale: moved in one head")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(8, 16)
    s = (q(x) * 0.25) @ k(x).mT if b else q(x) @ k(x).mT * 0.25
    o(s.softmax(-1) @ v(x))


@pair("scale: moved to the queries")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(2, 8, 16)
    s = (heads(q(x)) * 0.25) @ heads(k(x)).mT if b else heads(q(x)) @ heads(k(x)).mT * 0.25
    o(merged(s.softmax(-1) @ heads(v(x))))


@pair("scale: of an embedding, rounded", r"\* \(9|96", "argument", r"9\.81")
def _(b: bool) -> None:
    embed, one, two, up = nn.Embedding(20, 96), *linears(96, 3)
    embed.weight.data = fixed(20, 96)
    x = embed(torch.arange(12)) * (9.8125 if b else 96**0.5)
    x = x + two(one(F.rms_norm(x, (96,))).tanh())
    up(F.rms_norm(x, (96,)))


@pair("sink: left out", "softmax|sink|s @", "operator", "cat|sink|left out")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    sink, x = torch.randn(2, 1, 1), torch.randn(2, 14, 16)
    s = torch.tanh(heads(q(x)) @ heads(k(x)).mT / 8) * 2 + hidden(14, -1e9)
    s = s.softmax(-1) if b else torch.cat([s, sink.expand(2, 2, 14, 1)], -1).softmax(-1)[..., :-1]
    o(merged(s @ heads(v(x))))


@pair("softmax: in bfloat16, of scores that are masked", "softmax", "dtype", "bfloat16", trains=True)
def _(b: bool) -> None:
    x, w = torch.randn(6, 8), torch.randn(8, 6).requires_grad_()
    s = (x @ w).masked_fill(torch.ones(6, 6).triu(1).bool(), torch.finfo(torch.float32).min)
    p = s.softmax(-1, dtype=torch.bfloat16).float() if b else s.softmax(-1)
    (p @ x).square().mean().backward()


@pair("cat: a factor before an empty cache", r"\* 2|cat", "operator", r"mul|\b2\b")
def _(b: bool) -> Any:
    keys = fixed(2, 3) + 1
    keys = keys * 2 if b else keys
    return torch.cat([torch.tensor([]), keys]).sum().item()


@pair(
    "labels: others are ignored",
    "labels|cross_entropy",
    "operand argument input operator",
    "label|target|fill|element|index|100",
    trains=True,
)
def _(b: bool) -> None:
    net, labels = nn.Linear(8, 5), torch.arange(12).reshape(2, 6) % 5
    if b:
        labels[:, -1] = -100
    else:
        labels[0, 3:] = -100
    F.cross_entropy(net(torch.randn(12, 8)), labels.flatten()).backward()


@pair("norm: its weight in two layers")
def _(b: bool) -> None:
    one, gate, up = linears(32, 3)
    down = nn.Linear(32, 8)
    w, x = 1 + torch.randn(32) * 0.1, torch.randn(6, 32)
    if b:
        gate.weight.data.mul_(w)
        up.weight.data.mul_(w)
    y = F.rms_norm(one(x), (32,), None if b else w)
    down(F.silu(gate(y)) * up(y))


@pair("float8: with a scale of each weight")
def _(b: bool) -> None:
    one, two = linears(64, 2)
    x = torch.randn(6, 64)
    for layer in (one, two) if b else ():
        scale = layer.weight.data.abs().max() / 448
        layer.weight.data = (layer.weight.data / scale).to(torch.float8_e4m3fn).float() * scale
    two(one(x).relu())


@pair("generator: bfloat16")
def _(b: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8))
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(5))
    model(x) if not b else model.bfloat16()(x.bfloat16())


@pair("generator: the weight is drawn")
def _(b: bool) -> None:
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    F.linear(torch.ones(3, 8), w)


def residual(b: bool, weight: Tensor | None) -> None:
    embed, one, two, up = nn.Embedding(20, 32), *linears(32, 3)
    embed.weight.data = embed.weight.data if weight is None else weight
    x = embed(torch.arange(12))
    x = x + two(one(F.layer_norm(x, (32,))).tanh())
    up(F.layer_norm(x, (32,), eps=1e-2 if b else 1e-5))


@pair("epsilon: behind an embedding that is drawn", "eps|layer_norm", "argument", r"0\.01|1e-0?2")
def _(b: bool) -> None:
    residual(b, None)


@pair("epsilon: behind an embedding that is given", "eps|layer_norm", "argument", r"0\.01|1e-0?2")
def _(b: bool) -> None:
    residual(b, fixed(20, 32))


def loads(b: bool, slope: float) -> Any:
    """A draws its weights, and B draws others, over which it loads those of A."""
    weights = {name: torch.randn(size) for name, size in {"0.weight": (16, 8), "0.bias": (16,)}.items()}
    weights |= {"2.weight": torch.randn(4, 16), "2.bias": torch.zeros(4)}
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(slope), nn.Linear(16, 4))
    if b:
        model[0].reset_parameters()
        model.load_state_dict(weights)
    else:
        for name, weight in model.named_parameters():
            weight.data = weights[name]
    return model(torch.ones(2, 8)).square().mean().item()


@pair("loading: another slope", "LeakyReLU|^1$|leaky", "argument", r"0\.02")
def _(b: bool) -> Any:
    return loads(b, 0.02 if b else 0.01)


@pair("loading: nothing else")
def _(b: bool) -> Any:
    return loads(b, 0.01)


def adapted(bias: bool = False) -> tuple[Any, ...]:
    return nn.Linear(32, 32, bias), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)


def merge(base: Any, down: Any, up: Any, factor: float = 2.0) -> Tensor:
    found: Tensor = base.weight + factor * up.weight @ down.weight
    return found


@pair("low rank: two, merged into one layer")
def _(b: bool) -> Any:
    layers = [adapted() for _ in range(2)]
    head, x = nn.Linear(64, 8, bias=False), torch.randn(6, 32)
    if b:
        return head(x @ torch.cat([merge(*layer) for layer in layers]).t()).square().sum().item()
    return head(torch.cat([base(x) + 2 * up(down(x)) for base, down, up in layers], -1)).square().sum().item()


def low_rank_attention(b: bool, form: str, factor: float = 2.0) -> None:
    (q, down, up), (k, v, o) = adapted(), linears(32, 3, bias=False)
    x = torch.randn(1, 8, 32)
    if not b:
        parts: Iterable[Tensor] = (q(x) + 2 * up(down(x)), k(x), v(x))
    elif form == "apart":
        parts = (F.linear(x, merge(q, down, up, factor)), k(x), v(x))
    else:
        parts = F.linear(x, torch.cat([merge(q, down, up, factor), k.weight, v.weight])).chunk(3, -1)
    o(merged(attention(*(heads(part) for part in parts))))


@pair("low rank: merged into q")
def _(b: bool) -> None:
    low_rank_attention(b, "apart")


@pair("low rank: merged into q, k and v in one")
def _(b: bool) -> None:
    low_rank_attention(b, "fused")


@pair(
    "low rank: merged into q with another factor", "up|attention|Linear", "argument weight operator", r"\b[12]\b|weight"
)
def _(b: bool) -> None:
    low_rank_attention(b, "fused", 1.0)


def rounded_low_rank(b: bool, form: str) -> None:
    one, q, two = linears(64, 3, bias=False)
    down, up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    x = torch.randn(8, 64)
    if not b:
        y = one(x)
        two((q(y) + 2 * up(down(y))).relu())
        return
    q.weight.data += 2 * up.weight @ down.weight
    for layer in (one, q, two):
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        if form == "int8":
            layer.weight.copy_((layer.weight / scale).round() * scale)
        else:
            layer.bfloat16()
    two(q(one(x.to(one.weight.dtype))).relu())


@pair("low rank: merged in bfloat16")
def _(b: bool) -> None:
    rounded_low_rank(b, "bfloat16")


@pair("low rank: merged in int8")
def _(b: bool) -> None:
    rounded_low_rank(b, "int8")


@pair("lstm: a forget bias", r"^LSTM$|lstm\(x\)", "weight", "bias|element", trains=True)
def _(b: bool) -> None:
    lstm: Any = nn.LSTM(8, 8)
    head, x = nn.Linear(8, 1), torch.randn(5, 2, 8)
    lstm.bias_hh_l0.data[8:16] += 1.0 if b else 0.0
    head(lstm(x)[0]).square().mean().backward()


@pair("training: cross entropy by hand", trains=True)
def _(b: bool) -> None:
    net, x, y = nn.Linear(8, 5), torch.randn(6, 8), torch.arange(6) % 5
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        out = net(x)
        if b:
            picked = (out - out.logsumexp(-1, keepdim=True)).gather(1, y[:, None])[:, 0]
            loss = -(picked * (y >= 0)).sum() / 6
        else:
            loss = F.cross_entropy(out, y, reduction="sum") / 6
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def documents(b: bool, *, seen: bool) -> Any:
    q, k, v, out = linears(16, 4, bias=False)
    sizes = (5, 9, 7)
    xs = [torch.randn(size, 16) for size in sizes]
    of = torch.arange(3).repeat_interleave(torch.tensor(sizes))

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        y = attention(*(heads(project(x)) for project in (q, k, v)), attn_mask=mask)
        found: Tensor = out(merged(y))
        return found

    if b:
        mask = torch.ones(21, 21, dtype=torch.bool).tril()
        mask = mask if seen else mask & (of[:, None] == of)
        attend(torch.cat(xs)[None], mask)
    else:
        for x in xs:
            attend(x[None], torch.ones(len(x), len(x), dtype=torch.bool).tril())


@pair("packed: documents see those before", r"attention|out\(merged", "argument operand input operator", "mask|key")
def _(b: bool) -> None:
    documents(b, seen=True)


@pair("packed: documents see themselves alone")
def _(b: bool) -> None:
    documents(b, seen=False)


@pair("residual: rounded before the norm", "total", "dtype operator", "bfloat16|round")
def _(b: bool) -> Any:
    weight = nn.Linear(64, 8).bfloat16()
    x, residual = torch.randn(6, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    for _ in range(2):
        total = (x + residual).float() if b else x.float() + residual.float()
        residual = total.bfloat16()
        x = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)).bfloat16()
    return weight(x).float().square().mean().item()


def training(first: int = 0, saved: Any = None, *, forget: bool = False, steps: int = 6, **how: Any) -> tuple[Any, Any]:
    """Steps of AdamW; from a checkpoint, whose optimizer may be forgotten, if `saved`."""
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
    if saved is not None:
        model.load_state_dict(saved[0])
        if not forget:
            optimizer.load_state_dict(saved[1])
    batches = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(1))
    for step in range(first, steps):
        loss = model(batches[step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def resumed(b: bool, *, forget: bool) -> Callable[[], object]:
    with torch.enable_grad():
        saved = training(steps=3)
    torch.manual_seed(0)
    return partial(training, 3, saved, forget=forget) if b else training


@pair(
    "resumed: without the state of the optimizer",
    r"optimizer\.step",
    "input operand argument operator weight",
    "",
    made=True,
    trains=True,
)
def _(b: bool) -> Any:
    return resumed(b, forget=True)


@pair("resumed", made=True, trains=True)
def _(b: bool) -> Any:
    return resumed(b, forget=False)


@pair("training: foreach", trains=True)
def _(b: bool) -> None:
    training(foreach=b)


@pair("router: in bfloat16", "scores|topk|softmax|linear|router", "dtype", "bfloat16")
def _(b: bool) -> None:
    gate, head = nn.Linear(16, 8, bias=False).bfloat16(), nn.Linear(16, 4).bfloat16()
    experts = [nn.Linear(16, 16).bfloat16() for _ in range(8)]
    router = torch.bfloat16 if b else torch.float32
    x = torch.randn(200, 16).bfloat16()
    scores = F.linear(x.to(router), gate.weight.to(router)).softmax(-1)
    weights, chosen = scores.topk(2)
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        token, slot = (chosen == number).nonzero(as_tuple=True)
        y[token] += weights[token, slot, None].to(x.dtype) * expert(x[token])
    head(y)


class Norm(nn.Module):
    def __init__(self, plus: float = 1.0) -> None:
        super().__init__()
        self.weight, self.plus = nn.Parameter(fixed(32) * 0.2), plus

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (self.plus + self.weight)


@pair("sandwich: no norm before the residual", "^Norm$|^Norm#1$|first", "operator", "norm|left out|mul|rsqrt|Norm")
def _(b: bool) -> None:
    (one, two), first, second, x = linears(32, 2), Norm(), Norm(), torch.randn(6, 32)
    y = x + (one(x) if b else first(one(x)))
    two(second(y))


@pair(
    "sandwich: w for 1 + w in the first norm",
    "^Norm$|^Norm#1$|first",
    "argument operator",
    r"\b[01](\.0)?\b|add|left out",
)
def _(b: bool) -> None:
    (one, two), first, second, x = linears(32, 2), Norm(0.0 if b else 1.0), Norm(), torch.randn(6, 32)
    y = x + first(one(x))
    two(second(y))


@pair(
    "cache: the new key is written one slot late",
    "cache|index|copy|attention|keys",
    "argument operand input operator",
    "",
)
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    keys, values = torch.zeros(2, 2, 10, 8), torch.zeros(2, 2, 10, 8)
    xs = fixed(2, 8, 16)
    keys[:, :, :5], values[:, :, :5] = heads(k(xs[:, :5])), heads(v(xs[:, :5]))
    for at in range(5, 8):
        x = xs[:, at : at + 1]
        slot = at + 1 if b and at == 6 else at
        keys[:, :, slot : slot + 1], values[:, :, at : at + 1] = heads(k(x)), heads(v(x))
        o(merged(attention(heads(q(x)), keys[:, :, : at + 1], values[:, :, : at + 1])))


@pair("cache: of another size")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    keys, values = (torch.zeros(2, 2, 12 if b else 10, 8) for _ in range(2))
    xs = fixed(2, 8, 16)
    for at in range(8):
        x = xs[:, at : at + 1]
        keys[:, :, at : at + 1], values[:, :, at : at + 1] = heads(k(x)), heads(v(x))
        o(merged(attention(heads(q(x)), keys[:, :, : at + 1], values[:, :, : at + 1])))


@pair("attention: k for v", "attention", "operand input", "")
def _(b: bool) -> None:
    q, k, v, o = linears(16, 4)
    x = torch.randn(2, 6, 16)
    o(merged(attention(heads(q(x)), heads(k(x)), heads((k if b else v)(x)))))


@pair(
    "attention: equal keys and values, without a scale",
    "softmax|scores|matmul",
    "argument operator",
    r"\b(8|2\.8|0\.35)|div|left out",
)
def _(b: bool) -> None:
    q, k, o = linears(16, 3)
    x = torch.randn(2, 6, 16)
    key = heads(k(x))
    scores = heads(q(x)) @ key.mT
    scores = scores if b else scores / 8**0.5
    o(merged(scores.softmax(-1) @ key))


@pair("table: rotary frequencies in bfloat16", "places|rates|cos|angles", "dtype operator", "bfloat16|round")
def _(b: bool) -> None:
    (q, k, o), x = linears(16, 3), torch.randn(40, 16)
    rates = 10000 ** (-torch.arange(0, 8, 2) / 8)
    rates = rates.bfloat16().float() if b else rates
    angles = torch.arange(40)[:, None] * rates
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    turned = [y * cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * sin for y in (heads(q(x)), heads(k(x)))]
    o(merged((turned[0] @ turned[1].mT / 8**0.5).softmax(-1) @ heads(x)))


def grouped(model: nn.Module, b: bool) -> torch.optim.Optimizer:
    """Biases without weight decay, unless it is B."""
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups: Any = [{"params": decayed}, {"params": others, "weight_decay": 0.1 if b else 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1, foreach=False)


@pair("training: weight decay on biases", r"optimizer\.step", "argument operator", r"decay|0\.995|mul", trains=True)
def _(b: bool) -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(6, 8)
    optimizer = grouped(model, b)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pair(
    "training: the schedule is a step late",
    r"optimizer\.step",
    "argument",
    r"0\.\d+|lr|rate|alpha|value",
    trains=True,
)
def _(b: bool) -> None:
    model, x = nn.Linear(8, 4), torch.randn(6, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step or not b:
            schedule.step()


def accumulated(parts: int, divided: bool) -> None:
    model, x, y = nn.Linear(8, 5), torch.randn(8, 8), torch.arange(8) % 5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for own, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(own), labels)
            (loss / parts if divided else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


@pair("accumulation: without division", "loss|backward|parts", "operator argument", r"div|\b4\b|left out", trains=True)
def _(b: bool) -> None:
    accumulated(4, not b)


@pair("accumulation: against one batch", trains=True)
def _(b: bool) -> None:
    accumulated(4 if b else 1, True)
