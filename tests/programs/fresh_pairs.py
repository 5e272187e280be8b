"""Pairs of programs after public reports of results that differ: each is one model as two people write it.

`port` makes a module and a function of its weights; in `twice`, both programs are one function. What they plant, if
anything, is called a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from outcomes import Pair, add, planted
from pair_models import Weights, seeded
from torch import Tensor, nn
from torch.nn import functional as F

PAIRS: list[Pair] = []
Planted = tuple[str, ...]  # the place, the kinds, the words; empty for a rewriting
pair = partial(add, PAIRS)
attention: Any = F.scaled_dot_product_attention


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(make: Callable[[], nn.Module]) -> Any:
    """A model whose weights and buffers are all drawn, in evaluation."""
    model = seeded(make)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.data = drawn(*buffer.shape).mul(0.3).abs() + (0.5 if "var" in name else 0.0)
    return model.train(False)


def add_ports(
    pairs: list[Pair],
    name: str,
    make: Callable[[], nn.Module],
    function: Callable[..., object],
    inputs: tuple[Any, ...],
    mistakes: dict[str, Planted],
) -> None:
    """Pairs of a module and of a function of its weights, the inputs and a mistake; `""` is none."""

    def programs(mistake: str) -> Any:
        model = made(make)
        weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
        return lambda: model(*inputs), lambda: function(weights, *inputs, mistake)

    for mistake, what in mistakes.items():
        own = f"{name}: {mistake or 'ported'}"
        pairs.append(Pair(own, partial(programs, mistake), planted(*what) if what else None))


port = partial(add_ports, PAIRS)


def twice(
    name: str, make: Callable[[str], nn.Module], inputs: tuple[Tensor, ...], mistakes: dict[str, Planted]
) -> None:
    """Pairs of a module with itself, which is made for a mistake."""

    def programs(mistake: str) -> Any:
        a, b = made(lambda: make("")), made(lambda: make(mistake))
        b.load_state_dict(a.state_dict(), strict=False)
        return lambda: a(*inputs), lambda: b(*inputs)

    for mistake, what in mistakes.items():
        PAIRS.append(Pair(f"{name}: {mistake}", partial(programs, mistake), planted(*what) if what else None))


# Convolutions.


class ConvNet(nn.Module):
    """A small residual network."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.down, self.head = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Linear(64, 5)
        self.mistake = mistake
        if mistake == "dilation":
            self.conv2.dilation, self.conv2.padding = (2, 2), (2, 2)
        if mistake == "epsilon of batch norm":
            self.norm2.eps = 1e-3

    def train(self, mode: bool = True) -> ConvNet:
        super().train(mode)
        if self.mistake == "batch norm in training":
            self.norm1.train()
        return self

    def forward(self, x: Tensor) -> Any:
        x = x * 2.0 if self.mistake == "pixels are not normalised" else (x - 0.45) / 0.225
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(x + self.norm2(self.conv2(x)))
        x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=self.mistake != "padding is not counted")
        x = F.leaky_relu(self.down(x), 0.1 if self.mistake == "slope" else 0.01)
        out: Tensor = self.head(x.flatten(1))
        return out


def convolved(x: Tensor, w: Tensor, b: Tensor | None, stride: int, mode: str = "constant") -> Any:
    """A convolution as a product of patches."""
    size = x.size(-1) // stride
    columns = F.unfold(F.pad(x, (1, 1, 1, 1), mode), 3, stride=stride)
    out = torch.einsum("ok,nkp->nop", w.flatten(1), columns)
    return (out if b is None else out + b[:, None]).unflatten(-1, (size, size))


def convnet(w: Weights, x: Tensor, mistake: str) -> Any:
    folded = []
    for conv, norm in (("conv1", "norm1"), ("conv2", "norm2")):
        scale = w[f"{norm}.weight"] / (w[f"{norm}.running_var"] + 1e-5).sqrt()
        bias = w.get(f"{conv}.bias", torch.zeros(8)) - w[f"{norm}.running_mean"]
        folded.append((w[f"{conv}.weight"] * scale[:, None, None, None], bias * scale + w[f"{norm}.bias"]))
    x = x.flip(1) if mistake == "channels in another order" else x
    x = convolved((x - 0.45) / 0.225, *folded[0], 1).clamp_min(0)
    y = convolved(x, *folded[1], 1, "reflect" if mistake == "padding by reflection" else "constant")
    x = y if mistake == "no shortcut" else x + y
    x = x if mistake == "no activation after the shortcut" else x.clamp_min(0)
    x = (F.max_pool2d if mistake == "another pooling" else F.avg_pool2d)(x, 3, 2, 1)
    x = convolved(x, w["down.weight"], w["down.bias"], 2)
    x = torch.where(x > 0, x, x * 0.01)
    x = x.permute(0, 2, 3, 1) if mistake == "flattened with channels last" else x
    return x.flatten(1) @ w["head.weight"].mT + w["head.bias"]


IMAGES = drawn(4, 3, 8, 8)
port(
    "convnet",
    ConvNet,
    convnet,
    (IMAGES,),
    {
        "": (),
        "channels in another order": (r"^conv1$|0\.45|^ConvNet$", "operator operand", "flip|order|chang"),
        "padding by reflection": ("^conv2$", "argument operator operand", "reflect|pad"),
        "no shortcut": (r"x \+ |norm2|avg_pool", "operator", "add|left out"),
        "no activation after the shortcut": ("relu|avg_pool", "operator", "relu|left out|clamp"),
        "another pooling": ("pool", "operator", "max"),
        "flattened with channels last": ("^head$|flatten", "operand operator", "permute|order|chang|layout"),
    },
)
twice(
    "convnet",
    ConvNet,
    (IMAGES,),
    {
        "dilation": ("^conv2$", "argument", "dilation"),
        "epsilon of batch norm": ("^norm2$", "argument", r"eps|0\.001"),
        "batch norm in training": ("^norm1$", "argument operator", "train"),
        "pixels are not normalised": (r"0\.45|2\.0|^conv1$", "operator", r"sub|div|mul|0\.45|\b2"),
        "padding is not counted": ("pool", "argument", "count_include_pad"),
        "slope": ("leaky_relu", "argument", r"0\.1\b"),
    },
)


@pair("convnet: channels last", made=True)
def _(b: bool) -> Any:
    model = made(ConvNet)
    layout = torch.channels_last if b else torch.contiguous_format
    model, x = model.to(memory_format=layout), IMAGES.to(memory_format=layout)
    return lambda: model(x)


@pair("convnet: depthwise, by shifted products", made=True)
def _(b: bool) -> Any:
    w, x = drawn(6, 1, 3), drawn(2, 6, 12)
    if not b:
        return lambda: F.conv1d(x, w, padding=1, groups=6).relu()
    parts: Any = lambda: (w[:, 0, k, None] * F.pad(x, (1, 1))[..., k : k + 12] for k in range(3))  # noqa: E731
    return lambda: F.relu(sum(parts(), torch.zeros_like(x)))


@pair(
    "convnet: transposed, output padding on the other side",
    "conv_transpose|pad|@ head",
    "operator argument operand",
    "",
    made=True,
)
def _(b: bool) -> Any:
    w, x, head = drawn(4, 3, 3, 3), drawn(2, 4, 5, 5), drawn(3, 2)

    def program() -> Tensor:
        y = F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
        y = F.pad(y, (1, -1, 1, -1)) if b else y
        return (y.permute(0, 2, 3, 1) @ head).tanh()

    return program


# A vision transformer.


class ViT(nn.Module):
    """One block over patches, with a class token, positions that are interpolated, and scaled branches."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32))
        self.places = nn.Parameter(torch.zeros(1, 9, 32))
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(32, eps=1e-6) for _ in range(3))
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.fc1, self.fc2, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(32)), nn.Parameter(torch.ones(32))
        self.mistake = mistake

    def positions(self, size: int) -> Any:
        mode = "bilinear" if self.mistake == "positions by another interpolation" else "bicubic"
        grid = self.places.mT.unflatten(-1, (3, 3))
        corners = self.mistake == "positions with aligned corners"
        return F.interpolate(grid, size=(size, size), mode=mode, align_corners=corners).flatten(2).mT

    def forward(self, x: Tensor) -> Any:
        mistake = self.mistake
        y = self.patch(x)
        x = y.flatten(2).mT + self.positions(y.size(-1))
        cls = self.cls.expand(len(x), -1, -1)
        x = torch.cat((cls, x), 1)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.scale1 * self.proj(attention(*qkv).transpose(1, 2).flatten(2))
        inner = self.fc1(self.norm2(x))
        inner = inner * torch.sigmoid(1.702 * inner) if mistake == "quick GELU" else F.gelu(inner)
        x = x + self.scale2 * self.fc2(inner)
        x = self.norm(x)
        x = x.mean(1) if mistake == "the mean of all tokens" else x[:, 0]
        out: Tensor = self.head(x)
        return out


def vit(w: Weights, x: Tensor, mistake: str) -> Any:
    norm: Any = lambda x, name, eps=1e-6: F.layer_norm(x, (32,), w[f"{name}.weight"], w[f"{name}.bias"], eps)  # noqa: E731
    linear: Any = lambda x, name: torch.einsum("bti,oi->bto", x, w[f"{name}.weight"]) + w[f"{name}.bias"]  # noqa: E731
    patches = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    x = patches @ w["patch.weight"].flatten(1).mT + w["patch.bias"]
    grid = w["places"].mT.unflatten(-1, (3, 3))
    x = x + F.interpolate(grid, size=(4, 4), mode="bicubic").flatten(2).mT
    cls = w["cls"].expand(len(x), -1, -1)
    x = torch.cat((cls, x), 1)
    order = (1, 0, 2) if mistake == "k before q" else (0, 1, 2)
    parts = linear(norm(x, "norm1", 1e-5 if mistake == "epsilon" else 1e-6), "qkv").chunk(3, -1)
    q, k, v = (parts[place].unflatten(-1, (4, 8)).transpose(1, 2) for place in order)
    p = torch.softmax(q @ k.mT * (8**-0.25 if mistake == "root of the scale" else 8**-0.5), -1)
    y = linear((p @ v).transpose(1, 2).flatten(2), "proj")
    x = x + (y if mistake == "no layer scale" else w["scale1"] * y)
    y = linear(0.5 * (h := linear(norm(x, "norm2"), "fc1")) * (1 + torch.erf(h / math.sqrt(2))), "fc2")
    x = (x if mistake != "the residual is of the norm" else norm(x, "norm2")) + w["scale2"] * y
    x = norm(x, "norm")
    return linear(x[:, -1:] if mistake == "the last token" else x[:, :1], "head")[:, 0]


PHOTOS = drawn(2, 3, 16, 16)
port(
    "vit",
    ViT,
    vit,
    (PHOTOS,),
    {
        "": (),
        "k before q": ("attention|qkv", "operand operator", "chang|exchang|swap|order"),
        "epsilon": ("^norm1$", "argument", r"1e-0?5"),
        "root of the scale": ("attention", "argument operator", r"scale|0\.59|0\.35"),
        "no layer scale": ("scale1|^proj$", "operator", "mul|left out"),
        "the residual is of the norm": ("scale2|^norm2$", "operand operator", ""),
        "the last token": (r"x\[:, 0\]|^head$|^norm$", "argument operand", r"-1|last|16|row|select"),
    },
)
twice(
    "vit",
    ViT,
    (PHOTOS,),
    {
        "positions by another interpolation": ("interpolate|positions", "operator", "bilinear"),
        "positions with aligned corners": ("interpolate|positions", "argument", "align_corners"),
        "quick GELU": ("gelu|fc1|fc2", "operator", r"gelu|sigmoid|1\.702"),
        "the mean of all tokens": (r"x\[:, 0\]|^head$|^norm$", "operator", "mean|select"),
    },
)


# Recurrent networks.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.rnn(x)
        out: Tensor = self.head(y)
        return out


def gru(w: Weights, x: Tensor, mistake: str) -> Any:
    h, out = torch.zeros(x.size(1), 16), []
    for step in x:
        gates = step @ w["rnn.weight_ih_l0"].mT + w["rnn.bias_ih_l0"]
        if mistake == "reset before the product":
            r, z = (
                torch.sigmoid(gates[:, at] + h @ w["rnn.weight_hh_l0"][at].mT + w["rnn.bias_hh_l0"][at])
                for at in (slice(0, 16), slice(16, 32))
            )
            n = torch.tanh(gates[:, 32:] + (r * h) @ w["rnn.weight_hh_l0"][32:].mT + w["rnn.bias_hh_l0"][32:])
        else:
            state = h @ w["rnn.weight_hh_l0"].mT
            state = state if mistake == "one bias" else state + w["rnn.bias_hh_l0"]
            r, z = (torch.sigmoid(a + b) for a, b in zip(gates.chunk(3, -1)[:2], state.chunk(3, -1)[:2], strict=True))
            r, z = (z, r) if mistake == "gates in another order" else (r, z)
            n = torch.tanh(gates[:, 32:] + r * state[:, 32:])
        h = z * n + (1 - z) * h if mistake == "the gate is turned" else (1 - z) * n + z * h
        out.append(h)
    return torch.stack(out) @ w["head.weight"].mT + w["head.bias"]


SERIES = drawn(7, 2, 6)
RNN = "^rnn$|rnn"
port(
    "gru",
    Recurrent,
    gru,
    (SERIES,),
    {
        "": (),
        "reset before the product": (RNN, "operator operand result unknown", ""),
        "one bias": (RNN, "operator operand weight result unknown", "bias"),
        "gates in another order": (RNN, "operator operand weight result unknown", ""),
        "the gate is turned": (RNN, "operator operand result unknown", ""),
    },
)


class Both(nn.Module):
    """Both directions of an LSTM, of which the last states count."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, bidirectional=True, batch_first=True), nn.Linear(16, 3)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Any:
        y, (h, _) = self.rnn(x)
        if self.mistake == "directions change places":
            out: Tensor = self.head(torch.cat((h[1], h[0]), -1))
        elif self.mistake == "the last step":
            out = self.head(y[:, -1])
        else:
            out = self.head(torch.cat((h[0], h[1]), -1))
        return out


BOTH = r"h\[0\]|^head$"
twice(
    "lstm",
    Both,
    (drawn(3, 7, 6),),
    {
        "directions change places": (BOTH, "operand operator", "chang|exchang|order"),
        "the last step": (BOTH, "operand operator", ""),
    },
)


class Cells(nn.Module):
    """A GRU step by step, whose state may not be carried from one piece of the series to the next."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.cell, self.head, self.mistake = nn.GRUCell(6, 16), nn.Linear(16, 3), mistake

    def forward(self, x: Tensor) -> Any:
        h = torch.zeros(x.size(1), 16)
        for number, step in enumerate(x):
            if number == 4 and self.mistake == "the state is lost between pieces":
                h = torch.zeros_like(h)
            h = self.cell(step, h)
        out: Tensor = self.head(h)
        return out


twice(
    "cells",
    Cells,
    (SERIES,),
    {"the state is lost between pieces": ("^cell$|^Cells$", "operand operator input argument", "")},
)


# Mixtures of experts.


class Mixture(nn.Module):
    """Routed experts, of which each token has two, and one that all share."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.router = nn.Linear(16, 6, bias=False)
        self.bias = nn.Parameter(torch.zeros(6))
        self.up, self.down = nn.Parameter(torch.zeros(6, 16, 24)), nn.Parameter(torch.zeros(6, 24, 16))
        self.shared, self.norm, self.mistake = nn.Linear(16, 16), nn.LayerNorm(16), mistake

    def forward(self, x: Tensor) -> Any:
        mistake = self.mistake
        y = self.norm(x)
        logits = self.router(y)
        scores = logits.softmax(-1) if mistake == "softmax for sigmoid" else logits.sigmoid()
        chosen = (scores if mistake == "no bias in the choice" else scores + self.bias).topk(2).indices
        shares = scores.gather(1, chosen)
        shares = shares if mistake == "shares are not normalised" else shares / shares.sum(-1, keepdim=True)
        shares = shares * (1.0 if mistake == "no factor" else 2.5)
        out = torch.zeros_like(x)
        for number in range(6):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            inner = F.silu(y[token] @ self.up[number])
            out.index_add_(0, token, inner @ self.down[number] * shares[token, slot, None])
        out = out if mistake == "no shared expert" else out + self.shared(y)
        return x + out


def mixture(w: Weights, x: Tensor, mistake: str) -> Any:
    """All experts for all tokens."""
    y = F.layer_norm(x, (16,), w["norm.weight"], w["norm.bias"])
    scores = torch.sigmoid(torch.einsum("ti,ei->te", y, w["router.weight"]))
    biased = scores + w["bias"]
    chosen = biased.topk(1 if mistake == "one expert" else 2).indices
    kept = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    shares = (biased if mistake == "shares have the bias" else scores) * kept
    shares = shares / shares.sum(-1, keepdim=True)
    if mistake == "softmax of the chosen":
        shares = torch.logit(scores).masked_fill(kept == 0, -math.inf).softmax(-1)
    if mistake == "tokens above the capacity are dropped":
        shares = shares * (kept.cumsum(0) <= 8)
    made = torch.einsum("ti,eij->etj", y, w["up"])
    made = torch.einsum("etj,ejo->eto", made * made.sigmoid(), w["down"])
    out = torch.einsum("eto,te->to", made, 2.5 * shares)
    return x + out + y @ w["shared.weight"].mT + w["shared.bias"]


ROUTED = "scores|shares|chosen|^router$"
port(
    "mixture",
    Mixture,
    mixture,
    (drawn(20, 16),),
    {
        "": (),
        "one expert": (ROUTED, "argument operand operator", r"\b[12]\b|topk|k="),
        "shares have the bias": (ROUTED, "operand operator", "add|bias"),
        "softmax of the chosen": (ROUTED, "operator", "softmax"),
        "tokens above the capacity are dropped": (ROUTED, "operator operand", ""),
    },
)
twice(
    "mixture",
    Mixture,
    (drawn(20, 16),),
    {
        "softmax for sigmoid": (ROUTED, "operator", "softmax"),
        "no bias in the choice": (ROUTED, "operator operand", "add|bias|left out"),
        "shares are not normalised": (ROUTED, "operator", "div|sum|left out"),
        "no factor": (ROUTED, "argument operator", r"\b1\b|1\.0"),
        "no shared expert": (r"shared|x \+ out", "operator", "add|left out"),
    },
)


# Encoders with a decoder, as T5 writes them: biases for distances, no scale, one embedding.


def buckets(size: int, of: int, *, both: bool) -> Tensor:
    """The bucket of each distance of a query and a key, in 16 buckets."""
    far = torch.arange(of) - torch.arange(size)[:, None]
    found, count = torch.zeros_like(far), 16
    if both:
        count //= 2
        found, far = found + (far > 0) * count, far.abs()
    else:
        far = (-far).clamp_min(0)
    near = count // 2
    large = near + (torch.log(far.clamp_min(1) / near) / math.log(32 / near) * (count - near)).long()
    return found + torch.where(far < near, far, large.clamp_max(count - 1))


class T5(nn.Module):
    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.embed, self.bias, self.own_bias = nn.Embedding(30, 32), nn.Embedding(16, 4), nn.Embedding(16, 4)
        self.enc, self.dec, self.cross = (nn.ModuleList(nn.Linear(32, 32, False) for _ in range(4)) for _ in range(3))
        self.norms = nn.ParameterList(torch.ones(32) for _ in range(4))
        self.mistake = mistake

    def attend(self, layer: Any, x: Tensor, source: Tensor, bias: Tensor | float) -> Any:
        q, k, v = (
            each(y).unflatten(-1, (4, 8)).transpose(1, 2) for each, y in zip(layer, (x, source, source), strict=False)
        )
        scores = q @ k.mT
        scores = scores * 8**-0.5 if self.mistake == "scores have a scale" else scores
        out: Tensor = layer[3](((scores + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def norm(self, x: Tensor, number: int) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norms[number]

    def forward(self, source: Tensor, target: Tensor) -> Any:
        mistake = self.mistake
        x, y = self.embed(source), self.embed(target)
        n, t = source.size(1), target.size(1)
        bias = self.bias(buckets(n, n, both=mistake != "distances in one direction")).permute(2, 0, 1)
        padded = (source == 0)[:, None, None] * (0.0 if mistake == "padding is seen" else -1e9)
        x = x + self.attend(self.enc, self.norm(x, 0), self.norm(x, 0), bias + padded)
        x = self.norm(x, 1)
        own = self.own_bias(buckets(t, t, both=False)).permute(2, 0, 1)
        own = own + torch.full((t, t), -1e9).triu(1)
        y = y + self.attend(self.dec, self.norm(y, 2), self.norm(y, 2), own)
        y = y + self.attend(self.cross, y, x, padded)
        y = self.norm(y, 3)
        y = y if mistake == "no factor before the tied head" else y * 32**-0.5
        return F.linear(y, self.embed.weight)


def t5(w: Weights, source: Tensor, target: Tensor, mistake: str) -> Any:
    """With fused attention, and the cross-attention's keys and values first."""

    def attend(name: str, x: Tensor, other: Tensor, mask: Tensor, causal: bool = False) -> Any:
        k, v = F.linear(other, torch.cat((w[f"{name}.1.weight"], w[f"{name}.2.weight"]))).chunk(2, -1)
        parts = (F.linear(x, w[f"{name}.0.weight"]), k, v)
        y = attention(*(part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts), attn_mask=mask, scale=1.0)
        return F.linear(y.transpose(1, 2).flatten(2), w[f"{name}.3.weight"])

    rms: Any = lambda x, number: F.rms_norm(x, (32,), w[f"norms.{number}"], 1e-6)  # noqa: E731
    n, t = source.size(1), target.size(1)
    seen = torch.zeros(len(source), 1, 1, n).masked_fill((source == 0)[:, None, None], -math.inf)
    bias = w["bias.weight"][buckets(n, n, both=True)].permute(2, 0, 1)
    x = w["embed.weight"][source]
    x = x + attend("enc", rms(x, 0), rms(x, 0), bias + seen)
    x = x if mistake == "no norm after the encoder" else rms(x, 1)
    own = w["bias.weight" if mistake == "the encoder's biases" else "own_bias.weight"]
    mask = own[buckets(t, t, both=False)].permute(2, 0, 1) + torch.full((t, t), -math.inf).triu(1)
    y = w["embed.weight"][target.roll(1, 1) if mistake == "the target is shifted" else target]
    y = y + attend("dec", rms(y, 2), rms(y, 2), mask[None].expand(len(y), -1, -1, -1))
    y = y + attend(
        "cross", rms(y, 3) if mistake == "a norm before cross-attention" else y, x, seen.expand(-1, 4, t, -1)
    )
    return (32**-0.5 * rms(y, 3)) @ w["embed.weight"].mT


SENTENCES = (
    torch.tensor([[5, 9, 3, 12, 7, 2, 0, 0], [4, 8, 15, 16, 23, 11, 19, 1]]),
    torch.tensor([[1, 6, 2, 8, 3], [1, 7, 9, 2, 4]]),
)
port(
    "t5",
    T5,
    t5,
    SENTENCES,
    {
        "": (),
        "no norm after the encoder": ("norm|^cross", "operator", "norm|left out|mul|rsqrt"),
        "the encoder's biases": ("own|^dec|softmax", "operand weight input", ""),
        "the target is shifted": ("embed", "input operand operator", ""),
        "a norm before cross-attention": ("^cross|norm|attend", "operator", "norm|mul|rsqrt|pow"),
    },
)
twice(
    "t5",
    T5,
    SENTENCES,
    {
        "scores have a scale": ("scores|softmax", "operator", r"mul|0\.35"),
        "distances in one direction": ("buckets|far|near|found|large|bias", "operator operand argument input", ""),
        "padding is seen": ("padded|softmax", "argument operand", r"1e\+?0?9|mask|\b0\b|0\.0"),
        "no factor before the tied head": ("32|embed.weight", "operator", "mul|left out"),
    },
)


# Diffusion.


class Denoiser(nn.Module):
    """A UNet of one level, to which the time is added."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 8))
        self.inp, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.low, self.high = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.mistake = mistake
        if mistake == "epsilon of group norm":
            self.norm2.eps = 1e-3
        if mistake == "groups":
            self.norm2.num_groups = 2

    def times(self, t: Tensor) -> Any:
        shift = 1 if self.mistake == "frequencies are shifted" else 0
        rates = torch.exp(-math.log(10000) * torch.arange(8) / (8 - shift))
        angles = t[:, None] * rates
        parts = (angles.sin(), angles.cos()) if self.mistake == "sine before cosine" else (angles.cos(), angles.sin())
        return torch.cat(parts, -1)

    def forward(self, x: Tensor, t: Tensor) -> Any:
        mistake = self.mistake
        skip = self.inp(x)
        h = self.low(F.silu(self.norm1(skip)))
        time = self.time(self.times(t))[:, :, None, None]
        h = h * (1 + time) if mistake == "the time scales" else h + time
        h = F.interpolate(h, scale_factor=2, mode="bilinear" if mistake == "bilinear" else "nearest")
        h = torch.cat((skip, h) if mistake == "the shortcut comes first" else (h, skip), 1)
        h = self.high(h)
        out: Tensor = self.out(F.silu(self.norm2(h)))
        return out


def denoiser(w: Weights, x: Tensor, t: Tensor, mistake: str) -> Any:
    """In channels-last order, with products for convolutions of the pieces."""
    conv: Any = lambda x, name, **how: F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1, **how)  # noqa: E731

    def norm(x: Tensor, name: str) -> Any:
        y = x.unflatten(1, (4, 2)).flatten(2)
        y = (y - y.mean(-1, keepdim=True)) * torch.rsqrt(
            y.var(-1, keepdim=True, correction=1 if mistake == "variance" else 0) + 1e-5
        )
        return y.reshape(x.shape) * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]

    angles = torch.outer(t, 10000 ** -(torch.arange(8) / 8))
    time = F.linear(torch.cat((angles.cos(), angles.sin()), -1), w["time.0.weight"], w["time.0.bias"])
    time = F.linear(
        time if mistake == "no activation of the time" else time * time.sigmoid(), w["time.2.weight"], w["time.2.bias"]
    )
    skip = conv(x, "inp")
    h = norm(skip, "norm1")
    h = conv(h * h.sigmoid(), "low", stride=2) + time[..., None, None]
    h = h.repeat_interleave(2, 2).repeat_interleave(2, 3)
    one, two = w["high.weight"].split(8, 1)
    h = F.conv2d(h, one, w["high.bias"], padding=1) + F.conv2d(skip, two, padding=1)
    h = norm(h, "norm2")
    out = conv(h * h.sigmoid(), "out")
    return x - out if mistake == "the noise is subtracted" else out


NOISY = drawn(2, 3, 8, 8), torch.tensor([10.0, 500.0])
port(
    "denoiser",
    Denoiser,
    denoiser,
    NOISY,
    {
        "": (),
        "variance": ("^norm[12]$", "argument operator", "correction|var"),
        "no activation of the time": ("^time", "operator", "silu|left out|sigmoid"),
        "the noise is subtracted": ("^out$", "operator", "sub|add"),
    },
)
twice(
    "denoiser",
    Denoiser,
    NOISY,
    {
        "epsilon of group norm": ("^norm2$", "argument", r"eps|0\.001"),
        "groups": ("^norm2$", "argument", r"group|\b2\b"),
        "frequencies are shifted": ("rates|angles", "argument", r"\b7\b"),
        "sine before cosine": ("parts|angles", "operand operator", "chang|exchang|order|swap"),
        "the time scales": ("time", "operator", "mul|add"),
        "bilinear": ("interpolate", "operator", "bilinear"),
        "the shortcut comes first": (r"skip|^high$", "operand operator", "chang|exchang|order|swap"),
    },
)


# Attention in other forms.


def split(x: Tensor, count: int = 4) -> Any:
    return x.unflatten(-1, (count, -1)).transpose(-3, -2)


class Block(nn.Module):
    """Grouped causal attention with slopes for distances, a soft cap, and normalised queries and keys."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = nn.Linear(32, 16), nn.Linear(32, 16)
        self.norm_q, self.norm_k, self.mistake = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8)), mistake

    def slopes(self) -> Any:
        base = 4.0 if self.mistake == "slopes" else 8.0
        return 2 ** (-base / 4 * torch.arange(1, 5))

    def forward(self, x: Tensor) -> Any:
        mistake, t = self.mistake, x.size(1)
        q, k, v = split(self.q(x)), split(self.k(x), 2), split(self.v(x), 2)
        q = F.rms_norm(q, (8,), self.norm_q, 1e-6)
        k = F.rms_norm(k, (8,), self.norm_q if mistake == "one weight for both norms" else self.norm_k, 1e-6)
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        scores = q @ k.mT * 10
        scores = 0.5 * torch.tanh(scores / 0.5)
        far = torch.arange(t) - torch.arange(t)[:, None]
        scores = scores + self.slopes()[:, None, None] * far
        window = 6 if mistake == "a window that is one too long" else 5
        hidden = (far > 0) | (far <= -window)
        scores = scores.masked_fill(hidden, -math.inf)
        out: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def block(w: Weights, x: Tensor, mistake: str) -> Any:
    """With an online softmax over tiles of keys, and without repeating them."""
    linear: Any = lambda x, name: x @ w[f"{name}.weight"].mT + w[f"{name}.bias"]  # noqa: E731
    norm: Any = lambda x, name: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name]  # noqa: E731
    q, k, v = split(linear(x, "q")), split(linear(x, "k"), 2), split(linear(x, "v"), 2)
    q, k = (q, k) if mistake == "no norm of queries and keys" else (norm(q, "norm_q"), norm(k, "norm_k"))
    groups = (0, 1, 0, 1) if mistake == "heads are tiled" else (0, 0, 1, 1)
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
    most, total, found = torch.full((*q.shape[:3], 1), -math.inf), torch.zeros(*q.shape[:3], 1), torch.zeros_like(q)
    rows = torch.arange(x.size(1))[:, None]
    for first in range(0, x.size(1), 4):
        keys, values = (y[:, list(groups), first : first + 4] for y in (k, v))
        far = torch.arange(first, first + keys.size(2)) - rows
        scores = torch.einsum("bhqd,bhkd->bhqk", q * 10, keys)
        scores = scores if mistake == "no cap" else torch.tanh(scores * 2) / 2
        scores = (scores + slopes * far).masked_fill((far > 0) | (far <= -5), -1e30)
        new = torch.maximum(most, scores.amax(-1, keepdim=True))
        kept, p = (most - new).exp(), (scores - new).exp()
        total = total * (1 if mistake == "sums are not rescaled" else kept) + p.sum(-1, keepdim=True)
        found, most = found * kept + p @ values, new
    return linear((found / total).transpose(1, 2).flatten(2), "o")


TEXT = drawn(2, 12, 32)
port(
    "block",
    Block,
    block,
    (TEXT,),
    {
        "": (),
        "no norm of queries and keys": ("rms_norm|scores", "operator", "norm|left out"),
        "heads are tiled": (
            "repeat_interleave|scores|softmax",
            "operand operator argument",
            "head|order|repeat|chang|ind",
        ),
        "no cap": ("scores", "operator", "tanh|left out"),
        "sums are not rescaled": ("softmax", "operator argument operand unknown", ""),
    },
)
twice(
    "block",
    Block,
    (TEXT,),
    {
        "slopes": ("slopes|base", "argument", r"\b4|-1\b|0\.5|base"),
        "one weight for both norms": ("rms_norm", "operand weight", "norm_q|weight|operand"),
        "a window that is one too long": ("hidden|softmax", "argument", r"-?6\b"),
    },
)


# Training.


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    return [(drawn(12, 8, seed=n), torch.arange(12) * (n + 1) % 5) for n in range(count)]


def train(
    make: Callable[[Any], Any],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    zero: bool = True,
    between: Callable[[Any], object] = lambda model: None,
) -> Callable[[], object]:
    """Three steps of a small model."""
    model = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)))
    optimizer = make(model)

    def program() -> None:
        for x, y in batches():
            if zero:
                optimizer.zero_grad()
            loss(model(x), y).backward()
            between(model)
            optimizer.step()

    return program


def sgd(model: Any, lr: float = 0.1, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, **how)


def adamw(model: Any, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.01, "weight_decay": 0.1, "foreach": False} | how)


class Updates(torch.optim.Optimizer):
    """SGD with momentum, by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.speeds: dict[Any, Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    self.speeds[weight] = (
                        self.speeds[weight] * 0.9 + weight.grad if weight in self.speeds else weight.grad.clone()
                    )
                    weight -= 0.1 * self.speeds[weight]


def chunked(out: Tensor, y: Tensor) -> Tensor:
    parts = [F.cross_entropy(a, b, reduction="sum") for a, b in zip(out.split(5), y.split(5), strict=True)]
    return torch.stack(parts).sum() / len(y)


def by_hand(out: Tensor, y: Tensor) -> Tensor:
    return (out.exp().sum(-1).log() - out[torch.arange(len(y)), y]).mean()


def smoothed(out: Tensor, y: Tensor, factor: float = 0.1) -> Tensor:
    logs = out.log_softmax(-1)
    return (1 - factor) * F.nll_loss(logs, y) - factor * logs.mean(-1).mean()


def accumulated(b: bool, *, weighted: bool) -> Callable[[], object]:
    """A batch in parts of unlike sizes, whose losses are means."""
    model = made(lambda: nn.Linear(8, 5))

    def program() -> None:
        optimizer = sgd(model)
        for x, y in batches():
            parts = zip(x.split(9), y.split(9), strict=True) if b else [(x, y)]
            for own, labels in parts:
                loss = F.cross_entropy(model(own), labels)
                share = (len(own) / len(x) if weighted else 0.5) if b else 1.0
                (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


STEP, LOSS = r"optimizer\.step", "loss|cross_entropy|logs"
# The programs of both runs, and what is planted in the second.
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any], Planted]] = {
    "foreach": ({"make": adamw}, {"make": partial(adamw, foreach=True)}, ()),
    "momentum by hand": ({"make": partial(sgd, momentum=0.9)}, {"make": Updates}, ()),
    "the loss in chunks": ({"make": sgd}, {"make": sgd, "loss": chunked}, ()),
    "the loss by hand": ({"make": sgd}, {"make": sgd, "loss": by_hand}, ()),
    "smoothing by hand": (
        {"make": sgd, "loss": partial(F.cross_entropy, label_smoothing=0.1)},
        {"make": sgd, "loss": smoothed},
        (),
    ),
    "smoothing": ({"make": sgd}, {"make": sgd, "loss": smoothed}, (LOSS, "operator argument", "smooth|0\\.1|mean|log")),
    "labels are ignored": (
        {"make": sgd},
        {"make": sgd, "loss": partial(F.cross_entropy, ignore_index=0)},
        (LOSS, "argument", "ignore_index"),
    ),
    "the sum for the mean": (
        {"make": sgd},
        {"make": sgd, "loss": partial(F.cross_entropy, reduction="sum")},
        (LOSS, "argument", "reduction|sum"),
    ),
    "logits in bfloat16": (
        {"make": sgd},
        {"make": sgd, "loss": lambda out, y: F.cross_entropy(out.bfloat16().float(), y)},
        (LOSS + "|^2$", "dtype", "bfloat16"),
    ),
    "gradients are not reset": (
        {"make": sgd},
        {"make": sgd, "zero": False},
        ("backward|zero_grad|step|loss", "operator operand", "grad|add|zero"),
    ),
    "momentum": (
        {"make": sgd},
        {"make": partial(sgd, momentum=0.9)},
        (STEP, "operator argument", r"momentum|0\.9|mul"),
    ),
    "nesterov": (
        {"make": partial(sgd, momentum=0.9)},
        {"make": partial(sgd, momentum=0.9, nesterov=True)},
        (STEP, "operator", "nesterov|add"),
    ),
    "another rate": ({"make": sgd}, {"make": partial(sgd, lr=0.05)}, (STEP, "argument", r"0\.05|alpha|lr")),
    "Adam for AdamW": (
        {"make": adamw},
        {"make": lambda model: torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.1, foreach=False)},
        (STEP, "operator", "decay|add|mul"),
    ),
    "beta": ({"make": adamw}, {"make": partial(adamw, betas=(0.9, 0.95))}, (STEP, "argument", r"0\.95|0\.05|beta")),
    "epsilon": ({"make": adamw}, {"make": partial(adamw, eps=1e-3)}, (STEP, "argument", r"0\.001|1e-0?3|eps")),
    "gradients are clipped by value": (
        {"make": sgd, "between": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)},
        {"make": sgd, "between": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1)},
        ("clip", "operator", "clip|clamp|norm"),
    ),
    "a layer is frozen": (
        {"make": sgd},
        {"make": lambda model: torch.optim.SGD(model[2].parameters(), 0.1)},
        (STEP, "operator operand", "left out|update|alpha"),
    ),
}
for name, (one, other, what) in TRAININGS.items():
    expected = planted(*what) if what else None
    both: Any = partial(lambda one, other: (train(**one), train(**other)), one, other)
    PAIRS.append(Pair(f"steps: {name}", both, expected, trains=True))
pair("steps: parts by their sizes", made=True, trains=True)(partial(accumulated, weighted=True))
pair(
    "steps: parts of unlike sizes count alike",
    r"loss|backward|share|optimizer\.step",
    "operator argument",
    r"0\.5|div|mul|mean",
    made=True,
    trains=True,
)(partial(accumulated, weighted=False))


@pair(
    "steps: an embedding that is no longer tied",
    r"optimizer\.step|backward",
    "operand operator weight input",
    "",
    made=True,
    trains=True,
)
def _(b: bool) -> Any:
    model = made(lambda: nn.Embedding(12, 8))
    head = model.weight.detach().clone().requires_grad_() if b else model.weight
    tokens = torch.arange(6)

    def program() -> None:
        optimizer = torch.optim.SGD(dict.fromkeys((model.weight, head)), 0.5)
        for _ in range(2):
            F.cross_entropy(model(tokens) @ head.mT, (tokens + 1) % 12).backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


# Models of transformers.


def hf(
    name: str,
    kind: str,
    a: dict[str, Any],
    b: dict[str, Any],
    what: Planted = (),
    run: Callable[[Any, Tensor, bool], object] = lambda model, tokens, b: model(tokens),
) -> None:
    """Two small models of one kind with the same weights and other settings."""

    def programs() -> Any:
        import transformers

        sizes: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {
            "intermediate_size": 48,
            "attn_implementation": "eager",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        config = getattr(transformers, f"{kind}Config")
        make = getattr(transformers, kind + {"Bert": "Model", "GPT2": "LMHeadModel"}.get(kind, "ForCausalLM"))
        models = [made(partial(make, config(**sizes | how))) for how in (a, b)]
        models[1].load_state_dict(models[0].state_dict(), strict=False)
        for one, two in zip(models[0].named_buffers(), models[1].named_buffers(), strict=True):
            fresh = dict(make(config(**sizes | a)).named_buffers()), dict(make(config(**sizes | b)).named_buffers())
            one[1].data, two[1].data = fresh[0][one[0]], fresh[1][two[0]]
        tokens = torch.arange(1, 21).view(2, 10)
        return tuple(partial(run, model, tokens, number == 1) for number, model in enumerate(models))

    PAIRS.append(Pair(f"transformers: {name}", programs, planted(*what) if what else None))


def cached(model: Any, tokens: Tensor, b: bool) -> None:
    """B reads the last tokens one by one."""
    past, first = None, 0
    for last in (*range(6, 11),) if b else (10,):
        past = model(tokens[:, first:last], past_key_values=past, use_cache=b).past_key_values
        first = last


def padded(model: Any, tokens: Tensor, b: bool, *, right: bool = True) -> None:
    """B has padding on the left."""
    tokens = F.pad(tokens, (3, 0)) if b else tokens
    mask = (tokens != 0).long()
    how = {"position_ids": (mask.cumsum(-1) - 1).clamp_min(0)} if right else {}
    model(tokens, attention_mask=mask, **how)


SDPA = {"attn_implementation": "sdpa"}
LLAMA: dict[str, Any] = {"num_key_value_heads": 2}
hf("Llama, sdpa", "Llama", LLAMA, LLAMA | SDPA)
hf("Llama, cached", "Llama", LLAMA, LLAMA, run=cached)
hf("Llama, left padding", "Llama", LLAMA, LLAMA, run=padded)
hf("GPT-2, cached, sdpa", "GPT2", {}, SDPA, run=cached)
hf(
    "Gemma 2, without a cap",
    "Gemma2",
    {"head_dim": 8},
    {"head_dim": 8, "attn_logit_softcapping": None},
    ("self_attn", "operator", "tanh|cap|left out"),
)
hf(
    "Llama, base of positions",
    "Llama",
    LLAMA,
    LLAMA | {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ("rotary", "input weight argument operand", ""),
)
hf(
    "Llama, epsilon, sdpa",
    "Llama",
    LLAMA,
    LLAMA | SDPA | {"rms_norm_eps": 1e-3},
    ("norm", "argument", r"0\.001|1e-0?3|eps"),
)
hf(
    "GPT-2, scores by layer",
    "GPT2",
    {},
    {"scale_attn_by_inverse_layer_idx": True},
    ("attn", "operator argument", r"div|0\.5|\b2\b|scal|0\.17"),
)
hf(
    "GPT-2, left padding without positions",
    "GPT2",
    {},
    {},
    ("wpe|position|^transformer$", "operand operator input argument", ""),
    partial(padded, right=False),
)
hf(
    "Mistral, a window",
    "Mistral",
    LLAMA | {"sliding_window": 20},
    LLAMA | {"sliding_window": 4},
    ("mask|self_attn", "argument operand operator", ""),
)
hf(
    "BERT, another activation",
    "Bert",
    {},
    {"hidden_act": "gelu_new"},
    ("intermediate", "operator argument", "gelu|tanh"),
)
hf(
    "BERT, the padding is seen",
    "Bert",
    {},
    {},
    ("attention", "operand operator argument input", "mask"),
    lambda model, tokens, b: model(tokens, attention_mask=torch.ones_like(tokens) if b else (tokens % 5 != 0).long()),
)


# The same in other words.


def same(name: str, *programs: Callable[..., object], inputs: tuple[Any, ...], trains: bool = False) -> None:
    """Two functions of the same numbers."""
    a, b = (partial(program, *inputs) for program in programs)
    PAIRS.append(Pair(f"same: {name}", lambda: (a, b), trains=trains))


X, W, V = drawn(6, 5, 32), drawn(32, 32, seed=2) / 5, drawn(32, 32, seed=3) / 5
ANGLES = torch.outer(torch.arange(5.0), 100 ** (-torch.arange(0, 8, 2) / 8))


def turned(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = (x @ w).unflatten(-1, (4, 8))
    even, odd = y[..., ::2], y[..., 1::2]
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(2).tanh() @ v


def turned_by_complex_numbers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = torch.view_as_complex((x @ w).unflatten(-1, (4, 4, 2)).contiguous())
    y = y * torch.polar(torch.ones_like(ANGLES), ANGLES)[:, None]
    return torch.view_as_real(y).flatten(2).tanh() @ v


def recurrence(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A gated sum of outer products, token by token."""
    q, k, gate = (x @ w).relu(), x @ v, (x @ (w + v)).sigmoid().mean(-1)
    state, out = torch.zeros(6, 32, 32), []
    for step in range(5):
        state = state * gate[:, step, None, None] + k[:, step, :, None] * x[:, step, None]
        out.append((q[:, step, None] @ state)[:, 0])
    return torch.stack(out, 1) @ v


def recurrence_at_once(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    q, k, gate = (x @ w).relu(), x @ v, (x @ (w + v)).sigmoid().mean(-1)
    logs = gate.log().cumsum(-1)
    decay = (logs[:, :, None] - logs[:, None]).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).exp()
    return ((q @ k.mT) * decay) @ x @ v


def folded_norm(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A layer norm whose weight and bias are part of the layer behind it."""
    scale, shift = v[0] + 1, v[1]
    return F.linear(F.layer_norm(x, (32,)), w * scale, w @ shift).tanh() @ v


def normed(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (32,), v[0] + 1, v[1]), w).tanh() @ v


def gated(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (F.silu(x @ w) * (x @ v)) @ w.mT


def gated_in_one(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    up, gate = (x @ torch.cat((v, w), 1)).chunk(2, -1)
    return F.linear(up * gate / (1 + (-gate).exp()), w)


def looked_up(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.embedding(x[..., 0].abs().mul(7).long(), w) @ v


def one_hot(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.one_hot(x[..., 0].abs().mul(7).long(), 32).float() @ w @ v


def in_halves(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.cat([gated(part, w, v) for part in x.split(3)])


def inner_parts(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """In two parts of the inner width, as on two devices, whose results are added."""
    parts = zip(w.chunk(2, 1), v.chunk(2, 1), strict=True)
    return torch.stack([(F.silu(x @ a) * (x @ b)) @ a.mT for a, b in parts]).sum(0)


def in_place(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    gate, out = torch.empty(6, 5, 32), torch.empty(6, 5, 32)
    torch.matmul(x, w, out=gate)
    F.silu(gate, inplace=True).mul_(x @ v)
    return torch.matmul(gate, w.mT, out=out)


def unstable(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    p = (x @ w).exp()
    return (p / p.sum(-1, keepdim=True)).log() @ v


def stable(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return (x @ w).log_softmax(-1) @ v


def mapped(x: Tensor, w: Tensor, v: Tensor) -> Any:
    return torch.func.vmap(lambda one: gated(one, w, v))(x)


SAME = (X, W, V)
same("rotary positions by complex numbers", turned, turned_by_complex_numbers, inputs=SAME)
same("a recurrence at once", recurrence, recurrence_at_once, inputs=SAME)
same("a layer norm folded into a layer", normed, folded_norm, inputs=SAME)
same("gate and up in one", gated, gated_in_one, inputs=SAME)
same("an embedding by a product", looked_up, one_hot, inputs=SAME)
same("a batch in halves", gated, in_halves, inputs=SAME)
same("a layer in two parts", gated, inner_parts, inputs=SAME)
same("in place", gated, in_place, inputs=SAME)
same("softmax without its maximum", stable, unstable, inputs=SAME)
same("mapped over the batch", gated, mapped, inputs=SAME)


def narrow(name: str, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """A model, and the same in another dtype."""

    def programs() -> Any:
        a, b = made(make), made(make).to(dtype)
        return lambda: a(*inputs), lambda: b(*(x.to(dtype) for x in inputs))

    PAIRS.append(Pair(f"narrow: {name}", programs))


narrow("convnet in bfloat16", ConvNet, (IMAGES,), torch.bfloat16)
narrow("vit in float16", ViT, (PHOTOS,), torch.float16)
narrow("gru in bfloat16", Recurrent, (SERIES,), torch.bfloat16)
narrow("denoiser in float64", Denoiser, NOISY, torch.float64)


@pair("narrow: denoiser under autocast", made=True)
def _(b: bool) -> Any:
    model = made(Denoiser)

    def program() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=b):
            model(*NOISY)

    return program


@pair("t5: sentences alone, without padding", made=True)
def _(b: bool) -> Any:
    model, (source, target) = made(T5), SENTENCES

    def program() -> None:
        if not b:
            model(source, target)
            return
        for own, other in zip(source, target, strict=True):
            model(own[own != 0][None], other[None])

    return program


@pair("modules: the fast path of an encoder", made=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.TransformerEncoderLayer(32, 4, 48, batch_first=True))
    return lambda: (torch.no_grad if b else torch.enable_grad)()(model)(TEXT)


@pair("modules: attention by hand", made=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.MultiheadAttention(32, 4, batch_first=True))

    def by_hand() -> Tensor:
        q, k, v = (split(y) for y in F.linear(TEXT, model.in_proj_weight, model.in_proj_bias).chunk(3, -1))
        y = ((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return F.linear(y, model.out_proj.weight, model.out_proj.bias)

    return by_hand if b else lambda: model(TEXT, TEXT, TEXT, need_weights=False)


@pair("modules: an LSTM by cells", made=True)
def _(b: bool) -> Any:
    model, head = made(lambda: nn.LSTM(6, 16)), drawn(16, 3)
    cell = nn.LSTMCell(6, 16)
    cell.load_state_dict({name.removesuffix("_l0"): weight for name, weight in model.state_dict().items()})

    def by_cells() -> Tensor:
        state, out = None, []
        for x in SERIES:
            state = cell(x, state)
            out.append(state[0])
        return torch.stack(out) @ head

    return by_cells if b else lambda: model(SERIES)[0] @ head


@pair("modules: batch norm by hand, in training", made=True, trains=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5))).train()
    (x, y), *_ = batches()

    def program() -> None:
        h = model[0](x)
        if b:
            var, mean = torch.var_mean(h, 0, correction=0)
            h = (h - mean) / (var + 1e-5).sqrt() * model[1].weight + model[1].bias
        else:
            h = model[1](h)
        F.cross_entropy(model[2](h), y).backward()

    return program


@pair("steps: activations are computed again", made=True, trains=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)))
    (x, y), *_ = batches()

    def program() -> None:
        inner = model[:2]
        out = model[2](torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False) if b else inner(x))
        F.cross_entropy(out, y).backward()
        sgd(model).step()

    return program


@pair("steps: gradients are zeros and not None", made=True, trains=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.Linear(8, 5))
    optimizer = sgd(model, momentum=0.9)

    def program() -> None:
        for x, y in batches():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not b)

    return program


# What engines rewrite, and what reports say that ports get wrong.

ANY = "argument operand operator"
EDGES = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3, 3, 0], [1, 2, 3, 4, 0, 0, 0, 2, 0, 3]])
NODES = drawn(5, 6)


class Projections(nn.Module):
    """Linear layers by name; `forward` is a function of their weights, as its port is."""

    def __init__(self, function: Callable[..., object], **sizes: tuple[int, int]) -> None:
        super().__init__()
        self.function = function
        for name, (k, n) in sizes.items():
            self.add_module(name, nn.Linear(k, n, bias=name == "out"))

    def forward(self, *inputs: Tensor) -> object:
        return self.function(self, *inputs)


def forms(
    name: str,
    one: Callable[..., object],
    other: Callable[..., object],
    inputs: tuple[Any, ...],
    mistakes: dict[str, Planted],
    **sizes: tuple[int, int],
) -> None:
    """Pairs of a function of layers and of one of their weights."""
    port(name, lambda: Projections(one, **sizes), other, inputs, mistakes)


QKV = dict.fromkeys(("q", "k", "v", "out"), (32, 32))


def merged(y: Tensor) -> Any:
    return y.transpose(-3, -2).flatten(-2)


def attended(m: Any, x: Tensor) -> Any:
    return m.out(merged(attention(split(m.q(x)), split(m.k(x)), split(m.v(x)), is_causal=True)))


def by_blocks(w: Weights, x: Tensor, mistake: str) -> Any:
    """Attention key by key block, with sums that are rescaled by the largest score so far."""
    q, k, v = (split(x @ w[f"{name}.weight"].mT) for name in "qkv")
    hidden = torch.ones(12, 12).triu(1).bool()
    most, total, out = torch.full((2, 4, 12, 1), -1e30), torch.zeros(2, 4, 12, 1), torch.zeros(2, 4, 12, 8)
    for at in range(0, 12, 4):
        scores = (q @ k[:, :, at : at + 4].mT / 8**0.5).masked_fill(hidden[:, at : at + 4], -1e30)
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        p, less = (scores - larger).exp(), (most - larger).exp()
        total = p.sum(-1, keepdim=True) + (total if mistake else total * less)
        out, most = out * less + p @ v[:, :, at : at + 4], larger
    return F.linear(merged(out / total), w["out.weight"], w["out.bias"])


BLOCKS = {"": (), "sums are not rescaled": ("attention", ANY, "mul|exp|rescal|sum|div")}
forms("online softmax", attended, by_blocks, (TEXT * 2,), BLOCKS, **QKV)


def in_shards(w: Weights, x: Tensor, mistake: str) -> Any:
    """Heads and rows of the last layer on two devices, whose results are added."""
    total, bias = torch.zeros(2, 12, 32), w["out.bias"]
    for rank in range(2):
        q, k, v = (split(F.linear(x, w[f"{name}.weight"].chunk(2)[rank]), 2) for name in "qkv")
        total = total + F.linear(
            merged(attention(q, k, v, is_causal=True)),
            w["out.weight"].chunk(2, 1)[rank],
            bias if mistake or rank == 0 else None,
        )
    return total


SHARDS = {"": (), "each adds the bias": ("^out$", f"{ANY} weight", "bias|beta=2")}
forms("shards", attended, in_shards, (TEXT,), SHARDS, **QKV)


def latent(m: Any, x: Tensor) -> Any:
    narrow = m.down(x)
    return m.out(merged(attention(split(m.q(x)), split(m.k(narrow)), split(m.v(narrow)), is_causal=True)))


def absorbed(w: Weights, x: Tensor, mistake: str) -> Any:
    """Queries are multiplied by the weight of the keys, so that the narrow tensor is all that a cache holds."""
    narrow, (k, v) = x @ w["down.weight"].mT, (w[f"{name}.weight"].unflatten(0, (4, 8)) for name in "kv")
    q = torch.einsum("bhtd,hdl->bhtl", split(x @ w["q.weight"].mT), k)
    scores = torch.einsum("bhtl,bsl->bhts", q, narrow) * (12 if mistake else 8) ** -0.5
    p = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf).softmax(-1)
    y = torch.einsum("bhts,bsl,hdl->bthd", p, narrow, v).flatten(2)
    return F.linear(y, w["out.weight"], w["out.bias"])


LATENT = {"": (), "scaled by the narrow size": ("attention", ANY, "scale|multipl|0.28|mul|div")}
forms("absorbed", latent, absorbed, (TEXT,), LATENT, **QKV | {"down": (32, 12), "k": (12, 32), "v": (12, 32)})


def decays() -> Tensor:
    apart = torch.arange(12.0)[:, None] - torch.arange(12.0)
    return torch.where(apart >= 0, torch.tensor([0.9, 0.8, 0.7, 0.6])[:, None, None] ** apart, 0.0)


def retained(m: Any, x: Tensor) -> Any:
    return m.out(merged((split(m.q(x)) @ split(m.k(x)).mT * decays()) @ split(m.v(x))))


def recurrent(w: Weights, x: Tensor, mistake: str) -> Any:
    q, k, v = (split(x @ w[f"{name}.weight"].mT) for name in "qkv")
    state, out = torch.zeros(2, 4, 8, 8), []
    decay = torch.tensor([0.9, 0.8, 0.7, 0.6])[:, None, None]
    for t in range(12):
        new = k[:, :, t, :, None] * v[:, :, t, None]
        state = (state + new) * decay if mistake else state * decay + new
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    return F.linear(merged(torch.stack(out, 2)), w["out.weight"], w["out.bias"])


forms("retention", retained, recurrent, (TEXT,), {"": (), "the new key decays": ("mul|matmul|pow", ANY, "")}, **QKV)


def stretched(m: Any, x: Tensor, factor: float = 0.1 * math.log(16) + 1) -> Any:
    """Rotary positions for sequences that are longer than in training, whose cosines have a factor."""
    turns = torch.outer(torch.arange(12.0), 100 ** (-torch.arange(0, 8, 2) / 8) / 4)
    cos, sin = turns.cos() * factor, turns.sin() * factor
    q, k = (
        torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        for a, b in (split(layer(x)).chunk(2, -1) for layer in (m.q, m.k))
    )
    return m.out(merged(attention(q, k, split(m.v(x)), is_causal=True)))


def scaled_later(w: Weights, x: Tensor, mistake: str) -> Any:
    turns = torch.polar(torch.ones(12, 4), torch.outer(torch.arange(12.0), 100 ** (-torch.arange(0, 8, 2) / 8) / 4))
    q, k = (split(x @ w[f"{name}.weight"].mT).unflatten(-1, (2, 4)).transpose(-1, -2).contiguous() for name in "qk")
    q, k = (torch.view_as_real(torch.view_as_complex(each) * turns).flatten(-2) for each in (q, k))
    scale = (1 if mistake else (0.1 * math.log(16) + 1) ** 2) / 8**0.5
    y = attention(q, k, split(x @ w["v.weight"].mT), is_causal=True, scale=scale)
    return F.linear(merged(y), w["out.weight"], w["out.bias"])


YARN = {"": (), "the factor is one": ("mul|attention|stretched", ANY, "scale|1.27|1.63|multipl|mul")}
forms("yarn", stretched, scaled_later, (TEXT,), YARN, **QKV)


def places(swapped: bool) -> Tensor:
    rows, columns = torch.arange(12.0) // 4, torch.arange(12.0) % 4
    rows, columns = (columns, rows) if swapped else (rows, columns)
    return torch.cat([torch.outer(each, torch.tensor([1.0, 0.1])) for each in (rows, columns)], -1)


def turned_in_two(q: Tensor, turns: Tensor) -> Tensor:
    a, b = q.chunk(2, -1)
    return torch.cat((a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()), -1)


def seen(m: Any, x: Tensor) -> Any:
    turns = places(False)
    q, k = (turned_in_two(split(layer(x)), turns) for layer in (m.q, m.k))
    return m.out(merged(attention(q, k, split(m.v(x)))))


def seen_in_one(w: Weights, x: Tensor, mistake: str) -> Any:
    q, k, v = F.linear(x, torch.cat([w[f"{name}.weight"] for name in "qkv"])).unflatten(-1, (3, 4, 8)).unbind(2)
    turns = places(bool(mistake))[:, None]
    q, k = (turned_in_two(each, turns).transpose(1, 2) for each in (q, k))
    y = (q @ k.mT * 8**-0.5).softmax(-1) @ v.transpose(1, 2)
    return F.linear(merged(y), w["out.weight"], w["out.bias"])


PLACES = {"": (), "rows and columns change places": ("cos|sin|outer|mul|turned_in_two|places", f"{ANY} input", "")}
forms("vision", seen, seen_in_one, (TEXT,), PLACES, **QKV)


def dense(m: Any, x: Tensor) -> Any:
    h = m.w(x)
    scores = F.leaky_relu(m.near(h) + m.far(h).mT, 0.2)  # of each target and source
    linked = torch.zeros(5, 5).index_put((EDGES[1], EDGES[0]), torch.ones(10))
    return m.out(F.elu(scores.masked_fill(linked == 0, -math.inf).softmax(-1) @ h))


def sparse(w: Weights, x: Tensor, mistake: str) -> Any:
    h, (source, target) = x @ w["w.weight"].mT, EDGES
    scores = F.leaky_relu((h @ w["near.weight"].mT)[target] + (h @ w["far.weight"].mT)[source], 0.2)[:, 0]
    by = source if mistake else target
    most = torch.full((5,), -math.inf).scatter_reduce(0, by, scores, "amax")
    p = (scores - most[by]).exp()
    p = p / torch.zeros(5).index_add(0, by, p)[by]
    y = F.elu(torch.zeros(5, 8).index_add(0, target, p[:, None] * h[source]))
    return F.linear(y, w["out.weight"], w["out.bias"])


GAT = {"": (), "shares of the sources": ("softmax", ANY, "dim|softmax|normal|index|div")}
forms("gat", dense, sparse, (NODES,), GAT, w=(6, 8), near=(8, 1), far=(8, 1), out=(8, 3))


def cosines(m: Any, x: Tensor) -> Any:
    return m.out(F.linear(F.normalize(m.w(x)), F.normalize(m.v.weight)) * 16)


def cosines_by_hand(w: Weights, x: Tensor, mistake: str) -> Any:
    h, v = x @ w["w.weight"].mT, w["v.weight"]
    h, v = h / h.norm(dim=-1, keepdim=True), v / v.norm(dim=0 if mistake else 1, keepdim=True)
    return F.linear(16 * h @ v.mT, w["out.weight"], w["out.bias"])


COSINES = {"": (), "columns are normalised": ("norm|normalize|div", f"{ANY} weight", "dim")}
forms("cosines", cosines, cosines_by_hand, (NODES,), COSINES, w=(6, 8), v=(8, 4), out=(4, 3))


def filtered(m: Any, x: Tensor) -> Any:
    """A long causal convolution by Fourier transforms."""
    y, kernel = m.w(x), 0.8 ** torch.arange(12.0)[:, None] * torch.linspace(0.5, 1, 8)
    y = torch.fft.irfft(torch.fft.rfft(y, 24, dim=1) * torch.fft.rfft(kernel, 24, dim=0), 24, dim=1)[:, :12]
    return m.out(y * F.silu(m.v(x)))


def filtered_in_turn(w: Weights, x: Tensor, mistake: str) -> Any:
    y, state, out = x @ w["w.weight"].mT, torch.zeros(2, 8), []
    for t in range(12):
        state = 0.8 * state + y[:, t]
        out.append(state * torch.linspace(0.5, 1, 8))
    return F.linear(torch.stack(out, 1) * F.silu(x @ w["v.weight"].mT), w["out.weight"], w["out.bias"])


forms("long filter", filtered, filtered_in_turn, (TEXT,), {"": ()}, w=(32, 8), v=(32, 8), out=(8, 3))


def dispatched(m: Any, x: Tensor) -> Any:
    """Experts by products with one-hot tensors, as on devices that want fixed shapes."""
    shares, chosen = m.router(x).softmax(-1).topk(2)
    places = F.one_hot(chosen, 4).to(x.dtype)
    weights = m.w.weight.unflatten(0, (4, 8))
    h = F.gelu(torch.einsum("tke,td,ehd->tkeh", places, x, weights))
    return m.out(torch.einsum("tkeh,tke,tk->th", h, places, shares))


def gathered(w: Weights, x: Tensor, mistake: str) -> Any:
    shares, chosen = (x @ w["router.weight"].mT).softmax(-1).topk(2)
    out = torch.zeros(24, 8)
    for expert, weight in enumerate(w["w.weight"].chunk(4)):
        token, turn = torch.where(chosen == expert)
        out.index_add_(0, token, F.gelu(x[token] @ weight.mT) * shares[token, turn, None])
    return F.linear(out, w["out.weight"], w["out.bias"])


forms("dispatch", dispatched, gathered, (TEXT.flatten(0, 1),), {"": ()}, router=(32, 4), w=(32, 32), out=(8, 3))


def lens(m: Any, x: Tensor) -> Any:
    """What the head makes of the states of each layer."""
    states = [x]
    for layer in (m.w, m.v):
        states.append(states[-1] + layer(states[-1]).relu())
    return torch.stack([m.out(F.rms_norm(each, (8,))) for each in states])


def lens_at_once(w: Weights, x: Tensor, mistake: str) -> Any:
    y = x + (x @ w["w.weight"].mT).clamp_min(0)
    states = torch.stack((x, y, y + (y @ w["v.weight"].mT).clamp_min(0)))
    scale = (states[-1:] if mistake else states).square().mean(-1, keepdim=True).add(1.1920929e-07).rsqrt()
    return F.linear(states * scale, w["out.weight"], w["out.bias"])


LENS = {"": (), "the last state's scale": ("norm", ANY, "")}
forms("lens", lens, lens_at_once, (drawn(6, 8) * 3,), LENS, w=(8, 8), v=(8, 8), out=(8, 5))


def guided(m: Any, x: Tensor, condition: Tensor) -> Any:
    both = m.out(F.silu(m.w(torch.cat((x, x))) + m.v(torch.cat((torch.zeros_like(condition), condition)))))
    free, own = both.chunk(2)
    return free + 5 * (own - free)


def guided_twice(w: Weights, x: Tensor, condition: Tensor, mistake: str) -> Any:
    free, own = (
        F.linear(F.silu(x @ w["w.weight"].mT + each @ w["v.weight"].mT), w["out.weight"], w["out.bias"])
        for each in (torch.zeros_like(condition), condition)
    )
    return (5 * own - 5 * free) + (own if mistake else free)


GUIDED = {"": (), "added to the conditional": (r"free \+|chunk|add", ANY, "")}
forms("guided", guided, guided_twice, (drawn(4, 6), drawn(4, 3)), GUIDED, w=(6, 8), v=(3, 8), out=(8, 6))


def advantages(b: bool, mistake: str) -> Any:
    """An actor-critic's loss, whose advantages are added up backwards, or by one product."""
    critic, actor = made(lambda: nn.Linear(6, 1)), made(lambda: nn.Linear(6, 3))
    x, rewards, ends = drawn(13, 6), drawn(12, seed=5), torch.tensor([0.0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0])
    taken = torch.arange(12) % 3

    def program() -> None:
        values = critic(x)[:, 0]
        with torch.no_grad():
            live = 1 - ends
            if not b:
                last, found = torch.zeros(()), []
                for t in reversed(range(12)):
                    last = rewards[t] + 0.9 * live[t] * values[t + 1] - values[t] + 0.9 * 0.8 * live[t] * last
                    found.append(last)
                gain = torch.stack(found[::-1])
            else:
                live = torch.cat((live[1:], torch.ones(1))) if mistake == "ends are a step early" else live
                after = values[1:]
                if mistake == "the last value stands twice":
                    after = torch.cat((values[1:-1], values[-2:-1]))
                delta = rewards + 0.9 * live * after - values[:-1]
                weights = torch.eye(12)
                for t in reversed(range(11)):
                    weights[t] += 0.9 * 0.8 * live[t] * weights[t + 1]
                gain = weights @ delta
        policy = actor(x[:12]).log_softmax(-1)[torch.arange(12), taken]
        loss = F.mse_loss(values[:12], gain + values[:12].detach()) - (policy * gain).mean()
        loss.backward()

    return program


def softly(b: bool, mistake: str) -> Any:
    """A loss whose targets are similarities."""
    one, two = made(lambda: nn.Linear(6, 8)), made(lambda: nn.Linear(5, 8))
    x, y = drawn(7, 6), drawn(7, 5, seed=2)

    def program() -> None:
        p, q = one(x), two(y)
        logits, alike = p @ q.mT / 0.5, (p @ p.mT + q @ q.mT) / 2
        targets = (alike * 0.5 if b and mistake else alike / 0.5).softmax(-1).detach()
        if b:
            loss = -(targets * (logits - logits.logsumexp(-1, keepdim=True))).sum(-1).mean()
        else:
            loss = F.cross_entropy(logits, targets)
        loss.backward()

    return program


for own, program, planted_there in (
    ("advantages", advantages, {
        "": (),
        "ends are a step early": ("live|mul|sub", f"{ANY} input", ""),
        "the last value stands twice": (r"values|mul|delta|rewards", f"{ANY} input", ""),
    }),
    ("soft targets", softly, {"": (), "multiplied by the temperature": ("alike|div|softmax", ANY, "mul|div|0.5|2")}),
):  # fmt: skip
    for mistake, what in planted_there.items():
        pair(f"{own}: {mistake or 'rewritten'}", *what, made=True, trains=True)(partial(program, mistake=mistake))
