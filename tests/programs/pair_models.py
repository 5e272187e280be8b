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
    neighbours: bool = False  # rotary positions turn neighbours where rows are for halves
    stale: bool = False  # the last key in the cache is that of the token before
    raw_shares: bool = False  # of experts: they do not add up to one
    low: torch.dtype | None = None  # the last product of a layer is in it; with a cache, the cache is

    def at(self, layer: int) -> Plant:
        return self if self.layer in (None, layer) else NOTHING


NOTHING = Plant()


@dataclass(frozen=True)
class Form:
    """How an engine is written."""

    fused: bool = True
    permuted: bool = False
    split: bool = False
    eager: bool = False
    flat: bool = False  # tokens of all sequences in one dimension, without padding
    pairs: bool = False  # rotary positions turn neighbours, for which rows of q and k change places
    moved: bool = False  # the heads have another order, and so have the columns of the product after them
    grouped: bool = False  # torch's function repeats key heads
    int8: bool = False
    whole: bool = False  # weights are whole numbers in floating point, which are scaled after the product
    dtype: torch.dtype = torch.float32

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        if self.int8 or self.whole:
            return Int8(weight, bias, self.whole)
        return Linear(weight.to(self.dtype), None if bias is None else bias.to(self.dtype), 2 if self.split else 1)

    def several(self, weights: Weights, *names: str) -> nn.Module:
        """One module for these linear layers, which returns a list."""
        return Packed(weights, [*names], self)

    def one(self, weights: Weights, name: str) -> nn.Module:
        return self.linear(weights[f"{name}.weight"], weights.get(f"{name}.bias"))


PLAIN, EAGER = Form(), Form(eager=True)


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


def attend(
    q: Tensor, k: Tensor, v: Tensor, plant: Plant, mask: Tensor | None, causal: bool, form: Form | None = None
) -> Tensor:
    """Attention `[..., h, t, d]`, by torch's function or by two products; fewer key heads are repeated."""
    form = form or PLAIN
    if (repeats := q.size(-3) // k.size(-3)) > 1 and not form.grouped:
        k, v = (torch.cat([x] * repeats, -3) if plant.tiled else x.repeat_interleave(repeats, -3) for x in (k, v))
    q, k, v = (x.roll(1, -3) if name in plant.rolled else x for name, x in zip("qkv", (q, k, v), strict=True))
    causal = causal and plant.causal
    if plant.window is not None or (form.eager and causal):
        t, s = q.size(-2), k.size(-2)
        far = torch.ones(t, s, dtype=torch.bool).tril(s - t).triu(s - t + 1 - (plant.window or s))
        mask = torch.zeros(t, s, dtype=q.dtype).masked_fill(~far, -math.inf) + (0 if mask is None else mask)
        causal = False
    if form.eager:
        scores = q @ k.transpose(-1, -2) * (plant.scale * q.size(-1) ** -0.5)
        scores = scores if mask is None else scores + mask
        return F.dropout(scores.softmax(-1), plant.dropout) @ v
    scale = None if plant.scale == 1 else plant.scale * q.size(-1) ** -0.5
    how: Any = {"scale": scale, "enable_gqa": form.grouped}
    return F.scaled_dot_product_attention(q, k, v, mask, plant.dropout, causal, **how)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt())


def visible(lengths: Tensor | list[int], dtype: torch.dtype = torch.float32, *, causal: bool) -> Tensor:
    """An additive mask for sequences of these lengths that are packed into one."""
    of = torch.arange(len(lengths)).repeat_interleave(torch.as_tensor(lengths))
    seen = of[:, None] == of
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~(seen.tril() if causal else seen), -math.inf)


def padding(lengths: list[int], size: int) -> Tensor:
    """An additive mask for sequences of these lengths, each in a row of its own."""
    seen = torch.arange(size) < torch.tensor(lengths)[:, None, None, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


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
        self.groups, self.form = groups, EAGER if eager else PLAIN

    def forward(
        self, x: Tensor, plant: Plant, *, source: Tensor | None = None, places: Tensor | None = None, **how: Any
    ) -> Tensor:
        source = x if source is None else source
        q, k, v = heads(self.q(x), HEADS), heads(self.k(source), self.groups), heads(self.v(source), self.groups)
        if places is not None:
            q, k = rotary(q, places, plant), rotary(k, places, plant)
        out: Tensor = self.o(merged(attend(q, k, v, plant, how.get("mask"), how.get("causal", False), self.form)))
        return out


class MLP(nn.Module):
    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False) if gated else None
        self.up, self.down = nn.Linear(WIDTH, INNER, not gated), nn.Linear(INNER, WIDTH, not gated)

    def forward(self, x: Tensor, plant: Plant) -> Tensor:
        if self.gate is None:
            inner = (plant.activation or F.gelu)(self.up(x))
        else:
            inner = (plant.activation or F.silu)(self.gate(x)) * self.up(x)
        inner = F.dropout(inner, plant.hidden_dropout) if plant.hidden_dropout else inner
        if plant.low is not None:
            return F.linear(inner.to(plant.low), self.down.weight.to(plant.low)).to(x.dtype)
        out: Tensor = self.down(inner)
        return out if plant.residual == 1 else out * plant.residual


class LlamaLayer(nn.Module):
    def __init__(self, eager: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mlp = RMSNorm(), RMSNorm(), MLP(gated=True)
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
    """The engines' layer for several of the trainers': rows in one weight or in one each, and back in their order."""

    def __init__(self, weights: Weights, names: list[str], form: Form) -> None:
        super().__init__()
        rows = torch.cat([weights[f"{name}.weight"] for name in names])
        self.sizes = [len(weights[f"{name}.weight"]) for name in names]
        order = torch.randperm(len(rows), generator=torch.manual_seed(1)) if form.permuted else torch.arange(len(rows))
        self.back = order.argsort() if form.permuted else None
        bias = torch.cat([weights[f"{name}.bias"] for name in names]) if f"{names[0]}.bias" in weights else None
        parts = order.split([len(rows)] if form.fused else self.sizes)
        self.parts = nn.ModuleList(form.linear(rows[part], None if bias is None else bias[part]) for part in parts)

    def forward(self, x: Tensor) -> Any:
        out = [part(x) for part in self.parts]
        if len(out) > 1:
            return out
        return (out[0] if self.back is None else out[0][..., self.back]).split(self.sizes, -1)


class Linear(nn.Module):
    """A linear layer of given weights, as one product, or as one for each half of the rows if `split`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int = 1) -> None:
        super().__init__()
        self.w = nn.ParameterList(part.clone() for part in weight.chunk(parts))
        self.b = [None] * parts if bias is None else [part.clone() for part in bias.chunk(parts)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, w, b) for w, b in zip(self.w, self.b, strict=True)], -1)


class Int8(nn.Module):
    """Whole numbers with a scale for each row, and for each token unless the input is `floating`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, floating: bool) -> None:
        super().__init__()
        self.floating = floating
        self.scale = weight.abs().amax(1) / 127
        self.weight, self.bias = (weight / self.scale[:, None]).round().to(torch.int8), bias

    def forward(self, x: Tensor) -> Tensor:
        if self.floating:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale + (0 if self.bias is None else self.bias)
        scale = x.abs().amax(-1, keepdim=True) / 127
        whole = torch._int_mm((x / scale).round().to(torch.int8).flatten(0, -2), self.weight.t())
        out: Tensor = (whole.float() * self.scale).unflatten(0, x.shape[:-1]) * scale
        return out if self.bias is None else out + self.bias


def paired(weight: Tensor, count: int) -> Tensor:
    """Rows of q or k for rotary positions that turn neighbours."""
    out: Tensor = weight.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    return out


def moved(name: str, weight: Tensor) -> Tensor:
    """The weights of attention whose key heads, with the heads that see them, are rolled by one."""
    size = WIDTH // HEADS
    by = {"q": HEADS // GROUPS * size, "k": size, "v": size}.get(name[-8], 0) if ".attn." in name else 0
    return weight.roll(HEADS // GROUPS * size, 1) if name.endswith("attn.o.weight") else weight.roll(by, 0)


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
        if form.moved:
            weights = weights | {name: moved(name, weight) for name, weight in weights.items()}
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
        q, k = (rotary(x, places, plant, pairs=form.pairs or plant.neighbours) for x in (q, k))
        if cache is not None and len(cache) > number:
            old_k, old_v = cache[number]
            if plant.stale:
                old_k = torch.cat((old_k[..., :-1, :], old_k[..., -2:-1, :]), -2)
            k, v = torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)
        if cache is not None:
            k, v = (x.to(plant.low or x.dtype).to(x.dtype) for x in (k, v))
            cache[number : number + 1] = [(k, v)]
        causal = mask is None and q.size(-2) == k.size(-2)
        x = x + block.dense(merged(attend(q, k, v, plant, mask, causal, form)))
        gate, up = block.gate_up(rms(x, block.norms[1], plant.eps))
        inner = F.dropout((plant.activation or F.silu)(gate) * up, plant.hidden_dropout)
        if plant.low is not None and cache is None:
            return x + F.linear(inner.to(plant.low), block.out.w[0].to(plant.low)).to(x.dtype)
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


class PlainLayer(nn.Module):
    """LayerNorm before or after attention and a plain MLP, with biases."""

    def __init__(self, *, after: bool, eager: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.after = Attention(bias=True, eager=eager), MLP(gated=False), after

    def forward(self, x: Tensor, plant: Plant, mask: Tensor | None, causal: bool) -> Tensor:
        how: Any = {"mask": mask, "causal": causal}
        self.norm1.eps = self.norm2.eps = plant.eps
        if self.after:
            x = self.norm1(x + self.attn(x, plant, **how))
            out: Tensor = self.norm2(x + self.mlp(x, plant))
            return out
        x = x + self.attn(self.norm1(x), plant, **how)
        out = x + self.mlp(self.norm2(x), plant)
        return out


class Plain(nn.Module):
    """GPT, BERT and a ViT: plain layers, with another first and last layer.

    `kind` is `"gpt"`: learned positions, causal, the embedding is the head; `"bert"`: normed embeddings, a mask of
    padding, norms after each part, a pooler; or `"vit"`: patches by a convolution, a class token.
    """

    def __init__(self, kind: str, plant: Plant = NOTHING, *, eager: bool = False) -> None:
        super().__init__()
        self.kind, self.plant = kind, plant
        if kind == "vit":
            self.patches, self.token_embed = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(1, 1, WIDTH))
        else:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place_embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(PlainLayer(after=kind == "bert", eager=eager) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH, NOTHING.eps), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: list[int] | None = None) -> Tensor:
        if self.kind == "vit":
            x = torch.cat((self.token_embed.expand(len(x), -1, -1), self.patches(x).flatten(2).mT), 1)
        else:
            x = self.embed(x)
        mask = None if lengths is None else padding(lengths, x.size(1))
        x = x + self.place_embed(torch.arange(x.size(1)) + self.plant.shift)
        x = self.norm(x) if self.kind == "bert" else x
        for number, layer in enumerate(self.layers):
            x = layer(x, self.plant.at(number), mask, self.kind == "gpt")
        x = x if self.kind == "bert" else self.norm(x)
        out: Tensor = F.linear(x, self.embed.weight) if self.kind == "gpt" else self.head(x[:, 0])
        return out.tanh() if self.kind == "bert" else out


class PlainEngine(nn.Module):
    """`Plain` with other names and layers."""

    def __init__(self, kind: str, weights: Weights, form: Form, plant: Plant = NOTHING) -> None:
        super().__init__()
        self.kind, self.w, self.form, self.plant = kind, weights, form, plant
        self.blocks = nn.ModuleList()
        for number in range(2):
            own = f"layers.{number}."
            block: Any = nn.Module()
            block.qkv = form.several(weights, *(f"{own}attn.{name}" for name in "qkv"))
            names = {"dense": "attn.o", "fc1": "mlp.up", "fc2": "mlp.down"}
            for name, of in names.items():
                setattr(block, name, form.one(weights, own + of))
            self.blocks.append(block)
        if kind == "gpt":
            self.last = form.linear(weights["embed.weight"])
        else:
            self.last = form.one(weights, "head")
        if kind == "vit":
            self.patches = form.linear(weights["patches.weight"].flatten(1), weights["patches.bias"])

    def norm(self, x: Tensor, name: str, eps: float = NOTHING.eps) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def forward(self, x: Tensor, lengths: list[int] | None = None) -> Tensor:
        count = 17 if self.kind == "vit" else x.size(1)
        places = self.w["place_embed.weight"][torch.arange(count) + self.plant.shift]
        if self.kind == "vit":
            x = self.patches(F.unfold(x, 4, stride=4).mT)
            x = torch.cat((self.w["token_embed"].expand(len(x), -1, -1), x), 1)
        else:
            x = self.w["embed.weight"][x]
        x, mask = x + places, None if lengths is None else padding(lengths, count)
        first = torch.arange(len(x)) * count
        if self.form.flat:
            lengths = lengths or [count] * len(x)
            x = torch.cat([each[:length] for each, length in zip(x, lengths, strict=True)])
            first = torch.tensor([0, *lengths[:-1]]).cumsum(0)
            mask = visible(lengths, causal=self.kind == "gpt")
        x = self.norm(x, "norm") if self.kind == "bert" else x
        for number in range(2):
            x = self.block(x, number, mask)
        x = x if self.kind == "bert" else self.norm(x, "norm")
        x = x if self.kind == "gpt" else x.flatten(0, -2)[first]
        out: Tensor = self.last(x)
        return out.tanh() if self.kind == "bert" else out

    def block(self, x: Tensor, number: int, mask: Tensor | None) -> Tensor:
        plant, own, after = self.plant.at(number), f"layers.{number}.", self.kind == "bert"
        block: Any = self.blocks[number]
        q, k, v = (heads(each, HEADS) for each in block.qkv(x if after else self.norm(x, f"{own}norm1", plant.eps)))
        causal = self.kind == "gpt" and mask is None
        x = x + block.dense(merged(attend(q, k, v, plant, mask, causal, self.form)))
        x = self.norm(x, f"{own}norm1", plant.eps) if after else x
        inner = block.fc1(x if after else self.norm(x, f"{own}norm2", plant.eps))
        inner = F.dropout((plant.activation or F.gelu)(inner), plant.hidden_dropout)
        out: Tensor = x + block.fc2(inner) * plant.residual
        return self.norm(out, f"{own}norm2", plant.eps) if after else out


class Seq2Seq(nn.Module):
    """An encoder and a decoder that attends to it, with learned biases for distances."""

    def __init__(self, plant: Plant = NOTHING) -> None:
        super().__init__()
        self.embed, self.distances = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(HEADS, 40))
        self.encoder, self.decoder, self.cross = Attention(), Attention(), Attention()
        self.encoder_mlp, self.decoder_mlp, self.head = MLP(gated=False), MLP(gated=False), nn.Linear(WIDTH, VOCABULARY)
        self.plant = plant

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        x = x + self.encoder(x, NOTHING, mask=by_distance(self.distances, x.size(1)))
        x = x + self.encoder_mlp(x, self.plant.at(0))
        y = y + self.decoder(
            y, NOTHING, mask=by_distance(self.distances, y.size(1)) + visible([y.size(1)], causal=True)
        )
        y = y + self.cross(y, self.plant.at(1), source=x)
        out: Tensor = self.head(y + self.decoder_mlp(y, self.plant.at(1)))
        return out


def by_distance(table: Tensor, size: int, shift: int = 0) -> Tensor:
    """`[1, heads, size, size]`: what the distance between two tokens adds."""
    places = torch.arange(size)
    return table[None, :, places[:, None] - places + 20 + shift]


class Seq2SeqEngine(nn.Module):
    """`Seq2Seq` with fused projections; a decoder's shift is of its distances, a window is of cross-attention."""

    def __init__(self, weights: Weights, form: Form, plant: Plant = NOTHING) -> None:
        super().__init__()
        self.w, self.form, self.plant = weights, form, plant
        names = ("encoder", "decoder", "cross")
        self.own: Any = nn.ModuleList(form.several(weights, *(f"{at}.{name}" for name in "qkv")) for at in names[:2])
        self.outs: Any = nn.ModuleList(form.one(weights, f"{at}.o") for at in names)
        self.ups: Any = nn.ModuleList(form.one(weights, f"{at}_mlp.up") for at in names[:2])
        self.downs: Any = nn.ModuleList(form.one(weights, f"{at}_mlp.down") for at in names[:2])
        self.query, self.key_value = form.one(weights, "cross.q"), form.several(weights, "cross.k", "cross.v")
        self.logits = form.one(weights, "head")

    def layer(self, x: Tensor, number: int, causal: bool) -> Tensor:
        mask = by_distance(self.w["distances"], x.size(1), self.plant.shift * number)
        mask = mask + visible([x.size(1)], causal=True) if causal else mask
        q, k, v = (heads(each, HEADS) for each in self.own[number](x))
        out: Tensor = x + self.outs[number](merged(attend(q, k, v, NOTHING, mask, False, self.form)))
        return out

    def mlp(self, x: Tensor, number: int) -> Tensor:
        out: Tensor = x + self.downs[number]((self.plant.at(number).activation or F.gelu)(self.ups[number](x)))
        return out

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.mlp(self.layer(self.w["embed.weight"][source], 0, False), 0)
        y = self.layer(self.w["embed.weight"][target], 1, True)
        q, (k, v) = heads(self.query(y), HEADS), (heads(each, HEADS) for each in self.key_value(x))
        y = y + self.outs[2](merged(attend(q, k, v, self.plant.at(1), None, False, self.form)))
        out: Tensor = self.logits(self.mlp(y, 1))
        return out


def one_plus(x: Tensor, weight: Tensor) -> Tensor:
    return rms(x, 1 + weight, NOTHING.eps)


def capped(q: Tensor, k: Tensor, v: Tensor, cap: float | None) -> Tensor:
    """Causal attention whose scores have a soft cap."""
    scores = q @ k.mT * q.size(-1) ** -0.5
    scores = scores if cap is None else cap * (scores / cap).tanh()
    out: Tensor = (scores + visible([q.size(-2)], q.dtype, causal=True)).softmax(-1) @ v
    return out


class GemmaLayer(nn.Module):
    """Norms of 1 + weight, of q and k too, and a gated MLP with GELU by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm1, self.norm2 = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.q_norm, self.k_norm = (nn.Parameter(torch.zeros(WIDTH // HEADS)) for _ in range(2))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        y = one_plus(x, self.norm1)
        q, k, v = (heads(each(y), HEADS) for each in (self.q, self.k, self.v))
        q, k = rotary(one_plus(q, self.q_norm), places, NOTHING), rotary(one_plus(k, self.k_norm), places, NOTHING)
        x = x + self.o(merged(capped(q, k, v, 2.0)))
        y = one_plus(x, self.norm2)
        out: Tensor = x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))
        return out


class Gemma(nn.Module):
    """A scaled embedding, and layers that normalise q and k."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(GemmaLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.embed(tokens) * WIDTH**0.5, torch.arange(tokens.size(-1))
        for layer in self.layers:
            x = layer(x, places)
        out: Tensor = self.head(one_plus(x, self.norm))
        return out


class GemmaEngine(nn.Module):
    """`Gemma` with fused projections; `mistake` is made in layer 1, or in the embedding."""

    def __init__(self, weights: Weights, form: Form, mistake: str = "") -> None:
        super().__init__()
        self.w = {name: weight.to(form.dtype) for name, weight in weights.items()}
        self.mistake = mistake
        names = [f"layers.{number}." for number in range(2)]
        self.qkv: Any = nn.ModuleList(form.several(weights, *(f"{own}{each}" for each in "qkv")) for own in names)
        self.gate_up: Any = nn.ModuleList(form.several(weights, f"{own}gate", f"{own}up") for own in names)
        self.outs: Any = nn.ModuleList(form.one(weights, f"{own}o") for own in names)
        self.downs: Any = nn.ModuleList(form.one(weights, f"{own}down") for own in names)
        self.logits = form.one(weights, "head")

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.w["embed.weight"][tokens] * (1.0 if self.mistake == "embedding" else WIDTH**0.5)
        for number in range(2):
            x = self.block(x, number, self.mistake if number else "")
        out: Tensor = self.logits(one_plus(x, self.w["norm"]))
        return out

    def block(self, x: Tensor, number: int, mistake: str) -> Tensor:
        w = {name: self.w[f"layers.{number}.{name}"] for name in ("norm1", "norm2", "q_norm", "k_norm")}
        places = torch.arange(x.size(-2)) + (mistake == "position")
        first = F.layer_norm(x, (WIDTH,), 1 + w["norm1"], eps=1e-6) if mistake == "centre" else one_plus(x, w["norm1"])
        q, k, v = (heads(each, HEADS) for each in self.qkv[number](first))
        if mistake != "qk norm":
            q, k = one_plus(q, w["q_norm"]), one_plus(k, w["k_norm"])
        q, k = (rotary(each, places, NOTHING) for each in ((k, q) if mistake == "q and k" else (q, k)))
        cap = {"no cap": None, "cap": 3.0}.get(mistake, 2.0)
        x = x + self.outs[number](merged(capped(q, k, v, cap)))
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w["norm2"]
        y = y if mistake == "one plus" else one_plus(x, w["norm2"])
        gate, up = self.gate_up[number](y)
        gate, up = (up, gate) if mistake == "gate and up" else (gate, up)
        inner = F.gelu(gate, approximate="none" if mistake == "erf" else "tanh") * up
        out: Tensor = self.downs[number](inner)
        return out if mistake == "residual" else x + out


EXPERTS = 4


class Experts(nn.Module):
    """Two layers of experts, of which each token has two; as trainers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.routers = nn.ModuleList(nn.Linear(WIDTH, EXPERTS, bias=False) for _ in range(2))
        self.layers: Any = nn.ModuleList(nn.ModuleList(MLP(gated=True) for _ in range(EXPERTS)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for router, layer in zip(self.routers, self.layers, strict=True):
            shares, chosen = chosen_experts(router(rms(x, torch.ones(WIDTH), NOTHING.eps)), normed=True)
            new = torch.zeros_like(x)
            for number, expert in enumerate(layer):
                token, place = (chosen == number).nonzero(as_tuple=True)
                new[token] += shares[token, place, None] * expert(x[token], NOTHING)
            x = x + new
        out: Tensor = self.head(x)
        return out


def chosen_experts(scores: Tensor, *, normed: bool) -> tuple[Tensor, Tensor]:
    shares, chosen = scores.softmax(-1).topk(2)
    return (shares / shares.sum(-1, keepdim=True) if normed else shares), chosen


class ExpertsEngine(nn.Module):
    """`Experts` with tokens sorted by expert, and gate and up in one."""

    def __init__(self, weights: Weights, form: Form, plant: Plant = NOTHING) -> None:
        super().__init__()
        self.plant = plant
        self.first, self.last = form.one(weights, "inp"), form.one(weights, "head")
        self.choose = nn.ModuleList(form.one(weights, f"routers.{number}") for number in range(2))
        at = [[f"layers.{number}.{expert}" for expert in range(EXPERTS)] for number in range(2)]
        self.gate_up: Any = nn.ModuleList(
            nn.ModuleList(form.several(weights, f"{each}.gate", f"{each}.up") for each in of) for of in at
        )
        self.down: Any = nn.ModuleList(nn.ModuleList(form.one(weights, f"{each}.down") for each in of) for of in at)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in range(2):
            plant = self.plant.at(number)
            scores = self.choose[number](rms(x, torch.ones(WIDTH), plant.eps))
            shares, chosen = chosen_experts(scores, normed=not plant.raw_shares)
            order = chosen.flatten().argsort(stable=True)
            of = order // 2
            counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
            parts = []
            for expert, own in enumerate(x[of].split(counts)):
                gate, up = self.gate_up[number][expert](own)
                parts.append(self.down[number][expert]((plant.activation or F.silu)(gate) * up))
            x = x.index_add(0, of, torch.cat(parts) * shares.flatten()[order, None])
        out: Tensor = self.last(x)
        return out
