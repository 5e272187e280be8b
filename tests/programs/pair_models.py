"""Small models in two forms: as a trainer writes them, and as an engine does, which fuses, permutes, packs and caches.

Invariant: the forms compute the same but for rounding, unless a `Plant` or edited weights say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, GROUPS, INNER, VOCABULARY = 32, 4, 2, 48, 50
Weights = dict[str, Tensor]
Cache = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Plant:
    """What a program does otherwise in one layer, or in all; the defaults plant nothing."""

    layer: int | None = None
    scale: float = 1.0  # of attention, times the usual one
    causal: bool = True
    window: int | None = None  # how many keys a query sees
    activation: Callable[[Tensor], Tensor] | None = None
    theta: float = 1e4  # the base of rotary positions
    shift: int = 0  # of positions
    rounded: bool = False  # positions are in bfloat16
    eps: float = 1e-6
    tiled: bool = False  # key and value heads are repeated as 0 1 0 1
    rolled: str = ""  # of "q", "k" and "v" those whose heads are rolled by one
    dropout: float = 0.0  # of attention
    hidden_dropout: float = 0.0  # before the last product of a layer
    residual: float = 1.0  # times the last product of a layer
    unmasked: bool = False  # padding is seen
    stale: bool = False  # the cache keeps the last key and value of the step before
    low: torch.dtype | None = None  # the last product of a layer is in it
    tie: int = 0  # experts take this expert's weights in the place of the last one's

    def at(self, layer: int) -> Plant:
        return self if self.layer in (None, layer) else NOTHING


NOTHING = Plant()


def heads(x: Tensor, count: int) -> Tensor:
    """`[..., t, count * d]` as `[..., count, t, d]`."""
    out: Tensor = x.unflatten(-1, (count, -1)).transpose(-3, -2)
    return out


def merged(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def rotary(x: Tensor, positions: Tensor, plant: Plant, *, pairs: bool = False) -> Tensor:
    """Rotate the halves of each head, or neighbours if `pairs`."""
    size = x.size(-1)
    places = positions + plant.shift
    angles = (places.bfloat16().float() if plant.rounded else places.float())[:, None] * plant.theta ** (
        -torch.arange(0, size, 2).float() / size
    )
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if pairs:
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, plant: Plant, mask: Tensor | None, causal: bool, eager: bool) -> Tensor:
    """Attention `[..., h, t, d]`, by torch's function or by two products; fewer key heads are repeated."""
    if (repeats := q.size(-3) // k.size(-3)) > 1:
        k, v = (torch.cat([x] * repeats, -3) if plant.tiled else x.repeat_interleave(repeats, -3) for x in (k, v))
    q, k, v = (x.roll(1, -3) if name in plant.rolled else x for name, x in zip("qkv", (q, k, v), strict=True))
    causal = causal and plant.causal
    if plant.window is not None or (eager and causal):
        t, s = q.size(-2), k.size(-2)
        far = torch.ones(t, s, dtype=torch.bool).tril(s - t).triu(s - t + 1 - (plant.window or s))
        mask = torch.zeros(t, s, dtype=q.dtype).masked_fill(~far, -math.inf) + (0 if mask is None else mask)
        causal = False
    if eager:
        scores = q @ k.transpose(-1, -2) * (plant.scale * q.size(-1) ** -0.5)
        scores = scores if mask is None else scores + mask
        return F.dropout(scores.softmax(-1), plant.dropout) @ v
    scale = None if plant.scale == 1 else plant.scale * q.size(-1) ** -0.5
    return F.scaled_dot_product_attention(q, k, v, mask, plant.dropout, causal, scale=scale)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def visible(lengths: Tensor | list[int], dtype: torch.dtype = torch.float32, *, causal: bool) -> Tensor:
    """An additive mask for sequences of these lengths that are packed into one."""
    of = torch.arange(len(lengths)).repeat_interleave(torch.as_tensor(lengths))
    seen = of[:, None] == of
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~(seen.tril() if causal else seen), -math.inf)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model whose weights are all drawn, those of norms and biases included, and large enough to matter."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        for name, weight in model.named_parameters():
            spread = 0.1 if weight.dim() < 2 else 1.5 / math.sqrt(weight[0].numel())
            weight.data = torch.randn_like(weight) * (1.0 if "embed" in name else spread)
            weight.data += 1.0 if "norm" in name and name.endswith("weight") else 0.0
    return model


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, eps: float) -> Tensor:
        return rms(x, self.weight, eps)


class Attention(nn.Module):
    """The trainers' attention: q, k and v apart."""

    def __init__(self, groups: int = HEADS, *, bias: bool = False, eager: bool = False) -> None:
        super().__init__()
        size = WIDTH // HEADS * groups
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.k, self.v = nn.Linear(WIDTH, size, bias), nn.Linear(WIDTH, size, bias)
        self.groups, self.eager = groups, eager

    def forward(
        self, x: Tensor, plant: Plant, *, source: Tensor | None = None, places: Tensor | None = None, **how: Any
    ) -> Tensor:
        source = x if source is None else source
        q, k, v = heads(self.q(x), HEADS), heads(self.k(source), self.groups), heads(self.v(source), self.groups)
        if places is not None:
            q, k = rotary(q, places, plant), rotary(k, places, plant)
        out: Tensor = self.o(merged(attend(q, k, v, plant, how.get("mask"), how.get("causal", False), self.eager)))
        return out


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, plant: Plant) -> Tensor:
        inner = F.dropout((plant.activation or F.silu)(self.gate(x)) * self.up(x), plant.hidden_dropout)
        if plant.low is not None:
            return F.linear(inner.to(plant.low), self.down.weight.to(plant.low)).to(x.dtype) * plant.residual
        out: Tensor = self.down(inner)
        return out if plant.residual == 1 else out * plant.residual


class LlamaLayer(nn.Module):
    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = RMSNorm(), RMSNorm(), GatedMLP()
        self.attn = Attention(GROUPS, eager=eager)

    def forward(self, x: Tensor, plant: Plant, places: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm1(x, plant.eps), plant, places=places, mask=mask, causal=mask is None)
        out: Tensor = x + self.mlp(self.norm2(x, plant.eps), plant)
        return out


class Llama(nn.Module):
    """Rotary positions, grouped heads, RMSNorm, a gated MLP."""

    def __init__(self, plant: Plant = NOTHING, *, eager: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), RMSNorm()
        self.layers = nn.ModuleList(LlamaLayer(eager) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.plant = plant

    def forward(self, tokens: Tensor, mask: Tensor | None = None, start: int = 0) -> Tensor:
        x, places = self.embed(tokens), start + torch.arange(tokens.size(-1))
        for number, layer in enumerate(self.layers):
            x = layer(x, self.plant.at(number), places, mask)
        out: Tensor = self.head(self.norm(x, NOTHING.eps))
        return out


def of_transformers(weights: Mapping[str, Tensor]) -> Weights:
    """The weights of transformers' Llama by the names of `Llama`."""
    names = {
        "model.": "", "self_attn.": "attn.", "_proj": "", "input_layernorm": "norm1", "lm_head": "head",
        "post_attention_layernorm": "norm2", "embed_tokens": "embed",
    }  # fmt: skip
    found = {}
    for name, weight in weights.items():
        for old, new in names.items():
            name = name.replace(old, new)
        found[name] = weight
    return found


class Packed(nn.Module):
    """The engines' layer for several of the trainers': rows in one weight, permuted, and put back afterwards."""

    def __init__(self, weights: Weights, names: list[str], form: Form) -> None:
        super().__init__()
        rows = torch.cat([weights[f"{name}.weight"] for name in names])
        self.sizes = [len(weights[f"{name}.weight"]) for name in names]
        order = torch.randperm(len(rows), generator=torch.manual_seed(1)) if form.permuted else torch.arange(len(rows))
        self.back = order.argsort() if form.permuted else None
        bias = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        self.project = form.linear(rows[order], torch.cat(bias)[order] if bias else None)

    def forward(self, x: Tensor) -> Any:
        out = self.project(x)
        return (out if self.back is None else out[..., self.back]).split(self.sizes, -1)


class Linear(nn.Module):
    """A linear layer of given weights, as one product, or as one for each half of the rows if `split`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList(part.clone() for part in weight.chunk(parts))
        self.b = [None] * parts if bias is None else [part.clone() for part in bias.chunk(parts)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.w, self.b, strict=True)], -1)


class Int8(nn.Module):
    """Whole numbers with a scale for each token and each row, multiplied as whole numbers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.scale = weight.abs().amax(1) / 127
        self.weight, self.bias = (weight / self.scale[:, None]).round().to(torch.int8), bias

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        whole = torch._int_mm((x / scale).round().to(torch.int8).flatten(0, -2), self.weight.t())
        out: Tensor = (whole.float() * self.scale).unflatten(0, x.shape[:-1]) * scale
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class Form:
    """How an engine is written."""

    fused: bool = True
    permuted: bool = False
    split: bool = False
    eager: bool = False
    flat: bool = False  # tokens of all sequences in one dimension
    pairs: bool = False  # rotary positions turn neighbours, for which rows of q and k change places
    int8: bool = False
    dtype: torch.dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        if self.int8:
            return Int8(weight, bias)
        return Linear(weight.to(self.dtype), None if bias is None else bias.to(self.dtype), 2 if self.split else 1)

    def several(self, weights: Weights, *names: str) -> nn.Module:
        """One module for these linear layers, which returns a list."""
        if self.fused:
            return Packed(weights, [*names], self)
        return Apart(nn.ModuleList(Packed(weights, [name], self) for name in names))

    def one(self, weights: Weights, name: str) -> nn.Module:
        return self.linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


PLAIN = Form()


class Apart(nn.Module):
    def __init__(self, parts: nn.ModuleList) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x)[0] for part in self.parts]


def paired(weight: Tensor, count: int) -> Tensor:
    """Rows of q or k for rotary positions that turn neighbours."""
    out: Tensor = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    return out


class LlamaEngine(nn.Module):
    """`Llama` with other names and layers, and a cache."""

    def __init__(self, weights: Weights, form: Form, plant: Plant = NOTHING) -> None:
        super().__init__()
        if form.pairs:
            counts = {"q": HEADS, "k": GROUPS}
            weights = weights | {
                name: paired(weight, counts[name[-8]])
                for name, weight in weights.items()
                if name.endswith((".q.weight", ".k.weight"))
            }
        self.form, self.plant, self.blocks = form, plant, nn.ModuleList()
        self.table, self.last = weights["embed.weight"].to(form.dtype), weights["norm.weight"].to(form.dtype)
        for number in range(2):
            own = f"layers.{number}."
            block: Any = nn.Module()
            block.qkv = form.several(weights, *(f"{own}attn.{name}" for name in "qkv"))
            block.gate_up = form.several(weights, f"{own}mlp.gate", f"{own}mlp.up")
            block.dense, block.out = form.one(weights, f"{own}attn.o"), form.one(weights, f"{own}mlp.down")
            block.norms = [weights[f"{own}norm{n}.weight"].to(form.dtype) for n in (1, 2)]
            self.blocks.append(block)
        self.logits = form.linear(weights["head.weight"])

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, places: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        if self.form.flat and mask is None:
            mask = visible([tokens.size(-1)] * len(tokens), self.form.dtype, causal=True)
        places = torch.arange(tokens.size(-1)) if places is None else places
        if self.form.flat:
            places, tokens = places.expand(tokens.shape).flatten(), tokens.flatten()
        x = self.table[tokens]
        for number, block in enumerate(self.blocks):
            x = self.block(x, block, number, mask, places, cache)
        out: Tensor = self.logits(rms(x, self.last, NOTHING.eps))
        return out

    def block(
        self, x: Tensor, block: Any, number: int, mask: Tensor | None, places: Tensor, cache: Cache | None
    ) -> Tensor:
        plant, form = self.plant.at(number), self.form
        q, k, v = block.qkv(rms(x, block.norms[0], plant.eps))
        q, k, v = heads(q, HEADS), heads(k, GROUPS), heads(v, GROUPS)
        q, k = rotary(q, places, plant, pairs=form.pairs), rotary(k, places, plant, pairs=form.pairs)
        if cache is not None and len(cache) > number:
            old_k, old_v = cache[number]
            if plant.stale:
                old_k = torch.cat((old_k[..., :-1, :], old_k[..., -2:-1, :]), -2)
            k, v = torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)
        if cache is not None:
            cache[number : number + 1] = [(k, v)]
        causal = mask is None and q.size(-2) == k.size(-2)
        x = x + block.dense(merged(attend(q, k, v, plant, mask, causal, form.eager)))
        gate, up = block.gate_up(rms(x, block.norms[1], plant.eps))
        inner = F.dropout((plant.activation or F.silu)(gate) * up, plant.hidden_dropout)
        out: Tensor = x + block.out(inner) * plant.residual
        return out


def decoded(engine: LlamaEngine, tokens: Tensor, prefill: int) -> list[Tensor]:
    """The prompt in one call and the other tokens one by one; a plant's shift is of the latter."""
    cache: Cache = []
    plant, engine.plant = engine.plant, replace(engine.plant, shift=0)
    out = [engine(tokens[:, :prefill], cache=cache)]
    engine.plant = plant
    return out + [
        engine(tokens[:, at : at + 1], places=torch.tensor([at]), cache=cache) for at in range(prefill, tokens.size(1))
    ]
