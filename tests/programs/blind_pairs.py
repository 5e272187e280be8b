"""Pairs of programs that were written without a look at how `why` works: a trainer's or a paper's, and a port of it.

`port` makes a module and a function of its weights, which is told its mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from fresh_pairs import add_ports, drawn, made
from outcomes import Pair, Recorded, add
from torch import Tensor, nn
from torch.nn import functional as F

PAIRS: list[Pair] = []
Planted = tuple[str, str, str] | tuple[()]  # the place, the kinds, the words
pair = partial(add, PAIRS)
port = partial(add_ports, PAIRS)
ANY = "argument operand operator"
INPUT, RESULT = f"{ANY} input", f"{ANY} result"
D, H, E, T = 32, 4, 8, 10  # width, heads, their size, tokens
TOKENS = torch.randint(0, 40, (2, T), generator=torch.Generator().manual_seed(3))


def both(
    name: str,
    program: Callable[..., Any],
    mistakes: dict[str, Planted],
    *,
    trains: bool = False,
    ops: Recorded = "all",
) -> None:
    """Pairs of a program that is told whether it is the second one, and its mistake; `""` is none."""
    for mistake, what in mistakes.items():
        own = f"{name}: {mistake or 'rewritten'}"
        add(PAIRS, own, *what, made=True, trains=trains)(partial(program, mistake=mistake))
        PAIRS[-1] = replace(PAIRS[-1], ops=ops)


def heads(x: Tensor, size: int = E) -> Any:
    return x.unflatten(-1, (-1, size)).transpose(-3, -2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def rms(x: Tensor, w: Tensor, eps: float = 1e-6) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def angles(tokens: int, size: int, base: float = 1e4, scale: float = 1.0) -> Tensor:
    frequencies = base ** (-torch.arange(0, size, 2).float() / size)
    return torch.outer(torch.arange(tokens).float() / scale, frequencies)


def halves(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions whose pairs are i and i + size / 2."""
    cos, sin = turns.cos(), turns.sin()
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def neighbours(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions whose pairs are 2 i and 2 i + 1."""
    cos, sin = turns.cos(), turns.sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def causal(tokens: int = T) -> Tensor:
    return torch.full((tokens, tokens), -torch.inf).triu(1)


class Model(nn.Module):
    def __getattr__(self, name: str) -> Any:  # for the types of what `projections` sets
        return super().__getattr__(name)


class Rms(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        return rms(x, self.weight)


def projections(module: nn.Module, *named: tuple[str, int, int], bias: bool = False) -> None:
    for name, before, after in named:
        setattr(module, name, nn.Linear(before, after, bias=bias))


# GPT-J: attention and MLP read one norm; neighbours of a part of each head turn.


class ParallelBlock(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        projections(self, ("q_proj", D, D), ("k_proj", D, D), ("v_proj", D, D), ("out_proj", D, D))
        self.fc_in, self.fc_out = nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        q, k, v = heads(self.q_proj(y)), heads(self.k_proj(y)), heads(self.v_proj(y))
        turns = angles(T, 4)
        q = torch.cat((neighbours(q[..., :4], turns), q[..., 4:]), -1)
        k = torch.cat((neighbours(k[..., :4], turns), k[..., 4:]), -1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(E) + causal()
        attended = self.out_proj(joined(scores.softmax(-1) @ v))
        return attended + self.fc_out(F.gelu(self.fc_in(y), approximate="tanh")) + x


class Gptj(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, D)
        self.blocks = nn.ModuleList([ParallelBlock(), ParallelBlock()])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 40)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gptj(w: Any, tokens: Tensor, mistake: str) -> Any:
    """An engine that decodes token by token with a cache, and projects with one product."""
    caches: list[list[Tensor]] = [[], []]
    steps = []
    turns = angles(T + 1, 8 if mistake == "the whole head turns" else 4)
    turn = halves if mistake == "halves turn" else neighbours
    for t in range(T):
        x = w["embed.weight"][tokens[:, t]]
        for n, cache in enumerate(caches):
            at = f"blocks.{n}."
            y = F.layer_norm(x, (D,), w[at + "norm.weight"], w[at + "norm.bias"])
            fused = torch.cat([w[f"{at}{name}_proj.weight"] for name in "qkv"])
            q, k, v = (each.unflatten(-1, (H, E)) for each in (y @ fused.T).chunk(3, -1))
            here = t + 1 if mistake == "positions start at one for queries" else t
            size = 2 * turns.size(1)
            q = torch.cat((turn(q[..., :size], turns[here]), q[..., size:]), -1)
            k = torch.cat((turn(k[..., :size], turns[t]), k[..., size:]), -1)
            cache.append(torch.stack((k, v)))
            keys, values = torch.stack(cache, 2)
            scores = torch.einsum("bhe,bthe->bht", q, keys) * E**-0.5
            out = torch.einsum("bht,bthe->bhe", scores.softmax(-1), values).flatten(1)
            out = out @ w[at + "out_proj.weight"].T
            if mistake == "residual in sequence" and n == 1:
                y = F.layer_norm(x + out, (D,), w[at + "norm.weight"], w[at + "norm.bias"])
            inner = F.gelu(F.linear(y, w[at + "fc_in.weight"], w[at + "fc_in.bias"]), approximate="tanh")
            x = x + out + F.linear(inner, w[at + "fc_out.weight"], w[at + "fc_out.bias"])
        steps.append(F.layer_norm(x, (D,), w["norm.weight"], w["norm.bias"]))
    return F.linear(torch.stack(steps, 1), w["head.weight"], w["head.bias"])


ROTARY = r"neighbours|cos|sin|turns|q\[|k\[|q @ k|blocks"
port(
    "gpt-j",
    Gptj,
    gptj,
    (TOKENS,),
    {
        "": (),
        "the whole head turns": (ROTARY, ANY, "rot|slice|position|turn|cos|sin|size"),
        "halves turn": (ROTARY, ANY, "rot|slice|neighbour|half|halves|order|pair"),
        "positions start at one for queries": (ROTARY, ANY, "position|shift|one|1"),
        "residual in sequence": (r"blocks\.1", ANY, "add|norm|residual|sequen|fc_in|reads"),
    },
)


# Gemma 2: norms of 1 + weight on both sides, soft caps, a window in each other layer, a scaled embedding.


class GemmaNorm(Rms):
    def forward(self, x: Tensor) -> Any:
        return rms(x, 1 + self.weight)


class GemmaLayer(Model):
    def __init__(self, windowed: bool) -> None:
        super().__init__()
        self.windowed = windowed
        self.before, self.after, self.pre_mlp, self.post_mlp = (GemmaNorm() for _ in range(4))
        projections(self, ("q_proj", D, D), ("k_proj", D, 16), ("v_proj", D, 16), ("o_proj", D, D))
        projections(self, ("gate_proj", D, 48), ("up_proj", D, 48), ("down_proj", 48, D))

    def forward(self, x: Any) -> Any:
        y = self.before(x)
        q, k, v = heads(self.q_proj(y)), heads(self.k_proj(y)), heads(self.v_proj(y))
        q, k = halves(q, angles(T, E)), halves(k, angles(T, E))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) * 16**-0.5
        scores = torch.tanh(scores / 5.0) * 5.0
        mask = causal()
        if self.windowed:
            mask = mask + torch.full((T, T), -torch.inf).tril(-4)
        attended = (scores + mask).softmax(-1) @ v
        x = x + self.after(self.o_proj(joined(attended)))
        y = self.pre_mlp(x)
        y = self.down_proj(F.gelu(self.gate_proj(y), approximate="tanh") * self.up_proj(y))
        return x + self.post_mlp(y)


class Gemma(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, D)
        self.layers = nn.ModuleList([GemmaLayer(True), GemmaLayer(False)])
        self.norm = GemmaNorm()

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens) * D**0.5
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.embed.weight.T
        return torch.tanh(logits / 30.0) * 30.0


def gemma(w: Any, tokens: Tensor, mistake: str) -> Any:
    """An engine of flat tokens, with fused products and heads in groups."""

    def norm(x: Tensor, name: str) -> Tensor:
        weight = w[name + ".weight"]
        return F.rms_norm(x, (D,), weight if mistake == "a norm without one" and "1.pre" in name else weight + 1, 1e-6)

    x = F.embedding(tokens, w["embed.weight"])
    x = x if mistake == "embedding not scaled" else x * math.sqrt(D)
    for n in range(2):
        at = f"layers.{n}."
        fused = torch.cat([w[f"{at}{name}_proj.weight"] for name in "qkv"])
        q, k, v = (norm(x, at + "before") @ fused.T).split((D, 16, 16), -1)
        q, k = halves(heads(q), angles(T, E)), halves(heads(k), angles(T, E))
        q = q.unflatten(1, (2, 2)) * (E**-0.5 if mistake == "scaled by the size of a head" else 0.25)
        scores = torch.einsum("bgrqe,bgke->bgrqk", q, k)
        scores = scores if mistake == "no cap of scores" and n == 1 else 5.0 * torch.tanh(scores / 5.0)
        gap = torch.arange(T)[:, None] - torch.arange(T)
        seen = gap >= 0
        if n == (1 if mistake == "window in the other layers" else 0):
            seen = seen & (gap < (5 if mistake == "window of one more" else 4))
        shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out = torch.einsum("bgrqk,bgke->bqgre", shares, heads(v)).flatten(-3)
        x = x + norm(out @ w[at + "o_proj.weight"].T, at + "after")
        both = norm(x, at + "pre_mlp") @ torch.cat([w[at + "gate_proj.weight"], w[at + "up_proj.weight"]]).T
        gate, up = both.chunk(2, -1)
        if mistake == "gate and up exchanged" and n == 1:
            gate, up = up, gate
        inner = F.gelu(gate, approximate="none" if mistake == "gelu of erf" else "tanh") * up
        y = inner @ w[at + "down_proj.weight"].T
        x = x + (y if mistake == "no norm after the MLP" and n == 0 else norm(y, at + "post_mlp"))
    logits = norm(x, "norm") @ w["embed.weight"].T
    return torch.tanh(logits / (50.0 if mistake == "another last cap" else 30.0)) * 30.0


port(
    "gemma",
    Gemma,
    gemma,
    (TOKENS,),
    {
        "": (),
        "a norm without one": (r"layers\.1\.(pre_mlp|gate|up)", ANY + " weight", r"1|add|left out"),
        "embedding not scaled": (
            r"D\*\*0\.5|^embed$|layers\.0\.before|layers\.0\.q_proj",
            ANY,
            r"mul|scal|5\.65|left out",
        ),
        "scaled by the size of a head": (r"16\*\*-0\.5|scores|layers\.0", ANY, r"scal|0\.35|0\.25|1\.41|mul"),
        "no cap of scores": (r"tanh|scores|layers\.1", ANY, "tanh|left out|div|mul"),
        "window in the other layers": (r"mask|scores|layers\.0$", ANY, "mask"),
        "window of one more": (r"mask|scores|layers\.0$", ANY, "mask|window"),
        "gate and up exchanged": (r"layers\.1|gelu|gate_proj|up_proj", ANY, "exchang|order|swap|gelu|gate|up_proj"),
        "gelu of erf": ("gelu", "argument operator", "approximate|none|erf|tanh"),
        "no norm after the MLP": (r"layers\.0(\.post_mlp)?$|post_mlp", ANY, "norm|left out|mul|rsqrt"),
        "another last cap": (r"tanh\(logits", ANY, "50"),
    },
)


# DeepSeek: keys and values from a latent vector, which an engine absorbs into the queries.


class Mla(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("q_proj", D, H * 12), ("kv_a", D, 16 + 4), ("kv_b", 16, H * 16), ("o_proj", D, D))
        self.kv_norm, self.head = Rms(16), nn.Linear(D, 20)

    def forward(self, x: Tensor) -> Any:
        q = heads(self.q_proj(x), 12)
        latent, k_rope = self.kv_a(x).split((16, 4), -1)
        k, v = heads(self.kv_b(self.kv_norm(latent)), 16).split((8, 8), -1)
        q_rope = neighbours(q[..., 8:], angles(T, 4))
        k_rope = neighbours(k_rope[:, None], angles(T, 4)).expand(-1, H, -1, -1)
        q, k = torch.cat((q[..., :8], q_rope), -1), torch.cat((k, k_rope), -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.o_proj(joined(attended)))


def mla(w: Any, x: Tensor, mistake: str) -> Any:
    q = heads(x @ w["q_proj.weight"].T, 12)
    latent, k_rope = (x @ w["kv_a.weight"].T).split((16, 4), -1)
    latent = latent if mistake == "latent not normalised" else rms(latent, w["kv_norm.weight"])
    up, values = w["kv_b.weight"].unflatten(0, (H, 16)).split((8, 8), 1)
    absorbed = torch.einsum("bhte,hel->bhtl", q[..., :8], up)
    q_rope = neighbours(q[..., 8:], angles(T, 4))
    k_rope = k_rope if mistake == "the shared key does not turn" else neighbours(k_rope, angles(T, 4))
    scores = absorbed @ latent[:, None].mT + q_rope @ k_rope[:, None].mT
    scores = scores * ((8 if mistake == "scaled by the part without positions" else 12) ** -0.5) + causal()
    out = torch.einsum("bhtl,hel->bthe", scores.softmax(-1) @ latent[:, None], values).flatten(-2)
    return F.linear(x + out @ w["o_proj.weight"].T, w["head.weight"], w["head.bias"])


SCORES = "scaled_dot|attention|o_proj"
port(
    "mla",
    Mla,
    mla,
    (drawn(2, T, D),),
    {
        "": (),
        "latent not normalised": ("kv_norm|kv_b", ANY, "norm|left out|rsqrt|mul"),
        "the shared key does not turn": (rf"k_rope|neighbours|cos|{SCORES}", ANY, "rot|left out|turn|mul|cat|sub|add"),
        "scaled by the part without positions": (SCORES, ANY, r"scale|0\.353|0\.288|1\.22"),
    },
)


# Qwen 3: norms of each head before positions; the engine keeps pages of keys.


class Qwen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm, self.k_norm = Rms(), Rms(E), Rms(E)
        projections(self, ("q_proj", D, D), ("k_proj", D, 16), ("v_proj", D, 16), ("o_proj", D, D), ("head", D, 20))

    def forward(self, x: Tensor, base: float = 1e4) -> Any:
        y = self.norm(x)
        q, k = self.q_norm(heads(self.q_proj(y))), self.k_norm(heads(self.k_proj(y)))
        q, k, v = halves(q, angles(T, E, base)), halves(k, angles(T, E, base)), heads(self.v_proj(y))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=causal())
        return self.head(x + self.o_proj(joined(attended)))


def qwen(w: Any, x: Tensor, mistake: str) -> Any:
    y = F.rms_norm(x, (D,), w["norm.weight"], 1e-6)
    q, k, v = (heads(y @ w[f"{name}_proj.weight"].T) for name in "qkv")
    scale = 4.0 if mistake == "linear scaling of positions" else 1.0
    turns = angles(T, E, 1e6 if mistake == "another base" else 1e4, scale)
    if mistake == "norm of heads after positions":
        q, k = rms(halves(q, turns), w["q_norm.weight"]), rms(halves(k, turns), w["k_norm.weight"])
    else:
        q, k = halves(rms(q, w["q_norm.weight"]), turns), halves(rms(k, w["k_norm.weight"]), turns)
    pages = torch.zeros(6, 4, 2, 2, E)  # page, slot, sequence's keys or values, head
    out = []
    for n in range(2):
        table = [4, 0, 2] if n else [5, 3, 1]
        for t in range(T):
            pages[table[t // 4], t % 4, 0], pages[table[t // 4], t % 4, 1] = k[n, :, t], v[n, :, t]
        table = [4, 2, 0] if n and mistake == "two pages exchanged" else table
        keys, values = pages[table].flatten(0, 1)[:T].permute(1, 2, 0, 3)
        tiled = mistake == "heads of keys tiled"
        keys, values = (z.repeat(2, 1, 1) if tiled else z.repeat_interleave(2, 0) for z in (keys, values))
        scores = q[n] @ keys.mT * E**-0.5 + causal()
        out.append((scores.softmax(-1) @ values).transpose(0, 1).flatten(1))
    return (x + torch.stack(out) @ w["o_proj.weight"].T) @ w["head.weight"].T


TURNED = rf"o_proj|halves|angles|cos|sin|turns|\*\*|arange|outer|{SCORES}"
port(
    "qwen",
    Qwen,
    qwen,
    (drawn(2, T, D, seed=5),),
    {
        "": (),
        "linear scaling of positions": (TURNED, INPUT, r"div|scal|4|position|angle|arange"),
        "another base": (TURNED, INPUT, r"1000000|1e\+?0?6|1e6|base|pow"),
        "norm of heads after positions": (rf"q_norm|k_norm|{TURNED}", ANY, "norm|order|before|after|mul"),
        "two pages exchanged": (rf"{SCORES}|[kv]_proj|v @|o_proj", ANY, "order|row|token|place|permut|index|exchang"),
        "heads of keys tiled": (rf"repeat_interleave|{SCORES}|o_proj", ANY, "repeat|order|head|tile"),
    },
)


# A state space: a scan, or one product for all steps.


class Mamba(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("in_proj", 16, 2 * 24), ("x_proj", 24, 3 + 2 * 4), ("out_proj", 24, 16))
        self.conv, self.dt_proj = nn.Conv1d(24, 24, 4, groups=24, padding=3), nn.Linear(3, 24)
        self.a_log, self.skip = nn.Parameter(torch.zeros(24, 4)), nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Any:
        x, z = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv(x.mT)[..., :T].mT)
        dt, b, c = self.x_proj(x).split((3, 4, 4), -1)
        dt = F.softplus(self.dt_proj(dt))
        decay, added = torch.exp(dt[..., None] * -self.a_log.exp()), dt[..., None] * b[:, :, None] * x[..., None]
        state, out = torch.zeros(2, 24, 4), []
        for t in range(T):
            state = decay[:, t] * state + added[:, t]
            out.append((state * c[:, t, None]).sum(-1))
        y = torch.stack(out, 1) + self.skip * x
        return self.out_proj(y * F.silu(z))


def mamba(w: Any, x: Tensor, mistake: str) -> Any:
    x, z = (x @ w["in_proj.weight"].T).chunk(2, -1)
    x, z = (z, x) if mistake == "gate and input exchanged" else (x, z)
    padded = F.pad(x.mT, (3, 0))
    x = F.silu(sum((padded[..., k : k + T] * w["conv.weight"][:, :, k] for k in range(4)), w["conv.bias"][:, None]).mT)
    dt, b, c = (x @ w["x_proj.weight"].T).split((3, 4, 4), -1)
    dt = F.linear(dt, w["dt_proj.weight"], w["dt_proj.bias"])
    dt = dt.relu() if mistake == "steps by relu" else F.softplus(dt)
    logs = (dt[..., None] * -w["a_log"].exp()).cumsum(1)
    gaps = logs[:, :, None] - logs[:, None]
    weights = gaps.masked_fill(torch.ones(T, T).triu(1).bool()[:, :, None, None], -torch.inf).exp()
    scaled = x if mistake == "input not times the step" else dt * x
    y = torch.einsum("btn,btsdn,bsn,bsd->btd", c, weights, b, scaled)
    y = y if mistake == "no skip" else y + w["skip"] * x
    return (y * F.silu(z)) @ w["out_proj.weight"].T


port(
    "mamba",
    Mamba,
    mamba,
    (drawn(2, T, 16),),
    {
        "": (),
        "gate and input exchanged": (
            "in_proj|x_proj|^conv$|chunk",
            ANY + " weight",
            "exchang|order|chunk|swap|half|halves",
        ),
        "steps by relu": ("softplus|out_proj", "operator", "relu"),
        "input not times the step": (r"added|state|dt\[|out_proj", ANY, "mul|left out"),
        "no skip": (r"skip|out_proj|silu\(z\)", ANY, "add|left out|mul"),
    },
)


# Images.


class Mbconv(nn.Module):
    """EfficientNet: expansion, a depthwise convolution, attention over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8, eps=1e-3)
        self.expand, self.norm0 = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16, eps=1e-3)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.norm1 = nn.BatchNorm2d(16, eps=1e-3)
        self.reduce, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project, self.norm2 = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8, eps=1e-3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = F.silu(self.stem_norm(self.stem(F.pad(x, (0, 1, 0, 1)))))  # as "same" of TensorFlow
        y = F.silu(self.norm0(self.expand(x)))
        y = F.silu(self.norm1(self.depthwise(y)))
        squeezed = F.adaptive_avg_pool2d(y, 1)
        y = y * torch.sigmoid(self.excite(F.silu(self.reduce(squeezed))))
        x = x + self.norm2(self.project(y))
        return self.head(x.mean((2, 3)))


def mbconv(w: Any, x: Tensor, mistake: str) -> Any:
    def conv(x: Tensor, name: str, norm: str, **options: Any) -> Tensor:
        """A convolution into which its norm is folded."""
        eps = 1e-1 if mistake == "epsilon of a norm" and norm == "norm1" else 1e-3
        scale = w[norm + ".weight"] * torch.rsqrt(w[norm + ".running_var"] + eps)
        bias = w[norm + ".bias"] - w[norm + ".running_mean"] * scale
        return F.conv2d(x, w[name + ".weight"] * scale[:, None, None, None], bias, **options)

    if mistake == "padding on both sides":
        x = F.silu(conv(x, "stem", "stem_norm", stride=2, padding=1))
    else:
        x = F.silu(conv(F.pad(x, (0, 1, 0, 1)), "stem", "stem_norm", stride=2))
    y = F.silu(conv(F.silu(conv(x, "expand", "norm0")), "depthwise", "norm1", padding=1, groups=16))
    squeezed = y.amax((2, 3)) if mistake == "squeezed by maximum" else y.mean((2, 3))
    squeezed = F.silu(F.linear(squeezed, w["reduce.weight"].flatten(1), w["reduce.bias"]))
    squeezed = F.linear(squeezed, w["excite.weight"].flatten(1), w["excite.bias"])
    x = x + conv(y * squeezed.sigmoid()[..., None, None], "project", "norm2")
    return F.linear(x.mean((2, 3)), w["head.weight"], w["head.bias"])


port(
    "efficientnet",
    Mbconv,
    mbconv,
    (drawn(2, 3, 12, 12),),
    {
        "": (),
        "epsilon of a norm": ("^norm1$|^depthwise$|^head$", ANY + " weight", r"eps|0\.1|weight|scale"),
        "padding on both sides": (r"^stem$|F\.pad|^head$", ANY, "pad"),
        "squeezed by maximum": ("adaptive_avg|^reduce$|pool|^head$", ANY, "amax|max"),
    },
)


class Swin(nn.Module):
    """Attention in shifted windows of 2 x 2 of an image of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm, self.head = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 4),
        )
        self.table = nn.Parameter(torch.zeros(9, 2))

    def forward(self, x: Tensor, index: Tensor, mask: Tensor) -> Any:
        y = torch.roll(self.norm(x), (-1, -1), (1, 2))
        y = y.view(2, 2, 2, 2, 2, 16).transpose(2, 3).reshape(8, 4, 16)
        q, k, v = self.qkv(y).view(8, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scores = q * 8**-0.5 @ k.mT + self.table[index].permute(2, 0, 1)
        scores = (scores.view(2, 4, 2, 4, 4) + mask[:, None]).view(8, 2, 4, 4)
        y = self.proj(joined(scores.softmax(-1) @ v))
        y = y.view(2, 2, 2, 2, 2, 16).transpose(2, 3).reshape(2, 4, 4, 16)
        return self.head(x + torch.roll(y, (1, 1), (1, 2)))


def swin_extras() -> tuple[Tensor, Tensor]:
    at = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    gap = at[:, None] - at + 1
    regions = torch.tensor([0, 0, 1, 2])
    regions = (regions[:, None] * 3 + regions).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    return gap[..., 0] * 3 + gap[..., 1], (regions[:, None] != regions[:, :, None]) * -100.0


def swin(w: Any, x: Tensor, index: Tensor, mask: Tensor, mistake: str) -> Any:
    """Each token gathers the four tokens of its window, in place of windows that move."""
    y = F.layer_norm(x, (16,), w["norm.weight"], w["norm.bias"]).flatten(1, 2)
    shift = -1 if mistake == "shifted the other way" else 1
    where = torch.arange(16).view(4, 4).roll((-shift, -shift), (0, 1)).view(2, 2, 2, 2).transpose(1, 2).reshape(-1)
    qkv = F.linear(y[:, where], w["qkv.weight"], w["qkv.bias"]).view(2, 4, 4, 3, 2, 8)
    q, k, v = qkv.permute(3, 0, 1, 4, 2, 5)
    bias = w["table"][index.T if mistake == "biases transposed" else index].permute(2, 0, 1)
    bias = bias if mistake == "no mask" else bias + mask[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(2, 4, 2, 4, 4))
    out = F.linear(out.transpose(2, 3).reshape(2, 16, 16), w["proj.weight"], w["proj.bias"])
    placed = torch.empty_like(out)
    placed[:, where] = out
    return F.linear(x + placed.view(2, 4, 4, 16), w["head.weight"], w["head.bias"])


BIASES = r"table|mask|scores|q \* 8"
port(
    "swin",
    Swin,
    swin,
    (drawn(2, 4, 4, 16), *swin_extras()),
    {
        "": (),
        "shifted the other way": (r"roll|^qkv$|y\.view|scores|mask", ANY, "roll|shift|order|place|index"),
        "biases transposed": (BIASES, INPUT, "transpos|order|exchang|index|bias|mask"),
        "no mask": (BIASES, ANY, "mask|left out|add"),
    },
)


# Encoders.


class Bert(Model):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.types = nn.Embedding(40, D), nn.Embedding(T + 3, D), nn.Embedding(2, D)
        self.norm0, self.norm1, self.norm2 = (nn.LayerNorm(D, eps=1e-12) for _ in range(3))
        projections(self, ("query", D, D), ("key", D, D), ("value", D, D), ("dense", D, D), bias=True)
        projections(self, ("inner", D, 64), ("outer", 64, D), ("pooler", D, D), ("classifier", D, 3), bias=True)

    def forward(self, tokens: Tensor, types: Tensor, keep: Tensor) -> Any:
        x = self.words(tokens) * 0.3 + self.types(types) * 0.3 + self.places(torch.arange(T)) * 0.3
        x = self.norm0(x)
        mask = (1.0 - keep[:, None, None].float()) * torch.finfo(torch.float32).min
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        shares = F.softmax(q @ k.mT / math.sqrt(E) + mask, -1)
        x = self.norm1(self.dense(joined(shares @ v)) + x)
        x = self.norm2(self.outer(F.gelu(self.inner(x))) + x)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def bert(w: Any, tokens: Tensor, types: Tensor, keep: Tensor, mistake: str) -> Any:
    """An engine without padding: the tokens of each sequence alone."""

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x: Tensor, n: int) -> Tensor:
        return F.layer_norm(x, (D,), w[f"norm{n}.weight"], w[f"norm{n}.bias"], 1e-12)

    out = []
    for n in range(2):
        length = T if mistake == "padding is seen" else int(keep[n].sum())
        offset = 2 if mistake == "positions start at two" else 0
        x = w["words.weight"][tokens[n, :length]] + w["places.weight"][offset : offset + length]
        x = x + w["types.weight"][types[n, :length] * (0 if mistake == "all tokens of the first type" else 1)]
        x = norm(x * 0.3, 0)
        q, k, v = (heads(linear(x, name)) for name in ("query", "key", "value"))
        x = x + linear(joined(F.scaled_dot_product_attention(q, k, v)), "dense")
        x = norm(x, 1)
        inner = F.gelu(linear(x, "inner"))
        x = norm(x + linear(inner, "outer"), 2)
        out.append(x.mean(0) if mistake == "pooled by the mean" else x[0])
    pooled = torch.tanh(linear(torch.stack(out), "pooler"))
    return linear(pooled, "classifier")


KEPT = torch.arange(T) < torch.tensor([[T], [7]])
port(
    "bert classifier",
    Bert,
    bert,
    (TOKENS, (torch.arange(T) > 4).long().expand(2, T), KEPT),
    {
        "": (),
        "padding is seen": (r"mask|softmax|shares|keep", ANY, "mask|left out|add|pad"),
        "positions start at two": ("places|words|norm0|query", INPUT, "position|2|index|row|offset|places"),
        "all tokens of the first type": ("types|words|norm0|query", INPUT, "0|index|types|row|mul"),
        "pooled by the mean": (r"x\[:, 0\]|pooler", ANY, "mean"),
    },
)


class ClipText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(40, D), nn.Parameter(torch.zeros(T, D))
        self.norm1, self.norm2, self.last_norm = nn.LayerNorm(D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = nn.MultiheadAttention(D, H, batch_first=True)
        self.fc1, self.fc2, self.projection = nn.Linear(D, 64), nn.Linear(64, D), nn.Linear(D, 12, bias=False)
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, images: Tensor) -> Any:
        x = self.embed(tokens) + self.places
        y = self.norm1(x)
        x = x + self.attn(y, y, y, attn_mask=causal(), need_weights=False)[0]
        y = self.fc1(self.norm2(x))
        x = self.last_norm(x + self.fc2(y * torch.sigmoid(1.702 * y)))
        pooled = x[torch.arange(2), tokens.argmax(-1)]
        text = self.projection(pooled)
        text = text / text.norm(dim=-1, keepdim=True)
        return (self.logit_scale.exp() + 2.0) * text @ images.T


def clip_text(w: Any, tokens: Tensor, images: Tensor, mistake: str) -> Any:
    x = w["embed.weight"][tokens] + w["places"]
    y = F.layer_norm(x, (D,), w["norm1.weight"], w["norm1.bias"])
    q, k, v = (heads(each) for each in F.linear(y, w["attn.in_proj_weight"], w["attn.in_proj_bias"]).chunk(3, -1))
    out = joined(F.scaled_dot_product_attention(q, k, v, is_causal=mistake != "attention is not causal"))
    x = x + F.linear(out, w["attn.out_proj.weight"], w["attn.out_proj.bias"])
    y = F.linear(F.layer_norm(x, (D,), w["norm2.weight"], w["norm2.bias"]), w["fc1.weight"], w["fc1.bias"])
    y = F.gelu(y) if mistake == "exact gelu" else y * (1.702 * y).sigmoid()
    x = F.layer_norm(x + F.linear(y, w["fc2.weight"], w["fc2.bias"]), (D,), w["last_norm.weight"], w["last_norm.bias"])
    pooled = x[:, -1] if mistake == "the last token is pooled" else x[torch.arange(2), (tokens == 39).int().argmax(-1)]
    text = F.normalize(pooled @ w["projection.weight"].T, dim=0 if mistake == "normalised over the batch" else -1)
    scale = w["logit_scale"] if mistake == "scale is not exponentiated" else w["logit_scale"].exp()
    return (text @ images.T) * (scale + 2.0)


PROMPTS = TOKENS.clamp_max(38).index_put((torch.arange(2), torch.tensor([6, 4])), torch.tensor(39))
port(
    "clip",
    ClipText,
    clip_text,
    (PROMPTS, drawn(5, 12)),
    {
        "": (),
        "attention is not causal": (r"attn|scaled_dot", ANY, "causal|mask"),
        "exact gelu": (r"1\.702|sigmoid", ANY, "gelu"),
        "the last token is pooled": (r"argmax|projection", ANY, "row|index|token|place|slice|select|-1|9"),
        "normalised over the batch": ("norm", ANY, "dim|norm"),
        "scale is not exponentiated": (r"logit_scale|images", ANY, "exp"),
    },
)


# Sound.


def log_mel(b: bool, mistake: str) -> Any:
    """Whisper's features and its stem."""
    wave, filters, w1, w2 = (
        drawn(2, 160) * torch.tensor([[1.0], [0.1]]),
        drawn(6, 17, seed=2).abs(),
        drawn(8, 6, 3, seed=3),
        drawn(8, 8, 3, seed=4),
    )
    window = torch.hann_window(32)

    def trained() -> Any:
        spectrum = torch.stft(wave, 32, 16, window=window, return_complex=True)[..., :-1].abs() ** 2
        mel = (filters @ spectrum).clamp(min=1e-10).log10()
        mel = torch.maximum(mel, mel.amax((1, 2), keepdim=True) - 1.0)
        mel = (mel + 4.0) / 4.0
        x = F.gelu(F.conv1d(mel, w1, padding=1))
        return F.gelu(F.conv1d(x, w2, stride=2, padding=1))

    def ported() -> Any:
        frames = F.pad(wave[:, None], (16, 16), "reflect")[:, 0].unfold(1, 32, 16)[:, :-1]
        hann = torch.hann_window(32, periodic=mistake != "a symmetric window")
        spectrum = torch.fft.rfft(frames * hann).mT
        power = spectrum.real**2 + spectrum.imag**2
        power = power.sqrt() if mistake == "magnitudes" else power
        mel = (filters @ power).clamp_min(1e-10)
        mel = mel.log() if mistake == "natural logarithm" else mel.log10()
        most = mel.max() if mistake == "the floor is of the batch" else mel.amax((1, 2), keepdim=True)
        mel = mel.maximum(most - 1.0)
        mel = mel * 0.25 + 1.0
        x = F.gelu(F.conv1d(F.pad(mel, (1, 1)), w1))
        return F.gelu(F.conv1d(F.pad(x, (1, 1)), w2, stride=2))

    return ported if b else trained


both(
    "whisper",
    log_mel,
    {
        "": (),
        "the floor is of the batch": (r"maximum|amax|\+ 4\.0|conv1d\(mel", ANY, "max|clamp|batch|amax"),
        "a symmetric window": ("stft|window|filters", INPUT, "window|hann|periodic|mul"),
        "magnitudes": (r"\*\* 2|filters", INPUT, "sqrt|pow|2"),
        "natural logarithm": (r"log10|conv1d", INPUT, r"\blog\b"),
    },
)


# Graphs, sets, and recommendations.


def graph(b: bool, mistake: str) -> Any:
    """A graph convolution: by a sum over edges, or by a matrix of neighbours."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 1, 3], [1, 2, 3, 4, 5, 6, 0, 4, 0]])
    x, w1, w2, bias = drawn(7, 6), drawn(6, 8, seed=2), drawn(8, 3, seed=3), drawn(8, seed=4)

    def over_edges(x: Tensor) -> Any:
        loops = torch.arange(7).expand(2, 7)
        source, target = torch.cat((edges, loops), 1)
        degree = torch.zeros(7).index_add(0, target, torch.ones(16))
        norm = degree[source].rsqrt() * degree[target].rsqrt()
        return torch.zeros_like(x).index_add(0, target, norm[:, None] * x[source])

    def neighbours_of() -> Any:
        matrix = torch.zeros(7, 7)
        matrix[edges[1], edges[0]] = 1.0
        matrix = matrix.T if mistake == "edges reversed" else matrix
        matrix = matrix if mistake == "no loops" else matrix + torch.eye(7)
        degree = matrix.sum(1)
        if mistake == "mean of neighbours":
            matrix = matrix / degree[:, None]
        else:
            matrix = degree.rsqrt()[:, None] * matrix * degree.rsqrt()
        return matrix @ F.relu(matrix @ (x @ w1) + bias) @ w2

    return neighbours_of if b else lambda: over_edges(F.relu(over_edges(x @ w1) + bias)) @ w2


EDGES = r"index_add|norm|degree|source|target|over_edges|loops"
both(
    "gcn",
    graph,
    {
        "": (),
        "edges reversed": (EDGES, INPUT, "order|exchang|transpos|index"),
        "no loops": (EDGES, INPUT, "cat|eye|left out|add|loops"),
        "mean of neighbours": (EDGES, INPUT, "div|rsqrt|mean"),
    },
)


class Recommender(nn.Module):
    """DLRM: bags of embeddings, and their products with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.bag0, self.bag1 = nn.EmbeddingBag(20, 8, mode="sum"), nn.EmbeddingBag(20, 8, mode="sum")
        self.bottom, self.top = nn.Linear(4, 8), nn.Linear(8 + 3, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Any:
        features = torch.stack((self.bottom(dense).relu(), self.bag0(ids[0]), self.bag1(ids[1])), 1)
        products = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat((features[:, 0], products[:, rows, columns]), 1)).sigmoid()


def recommender(w: Any, dense: Tensor, ids: Tensor, mistake: str) -> Any:
    bags = [w[f"bag{n}.weight"][ids[n]].sum(1) for n in range(2)]
    bags[1] = bags[1] / 3 if mistake == "mean of a bag" else bags[1]
    x = F.relu(F.linear(dense, w["bottom.weight"], w["bottom.bias"]))
    pairs = [(x * bags[0]).sum(-1), (x * bags[1]).sum(-1), (bags[0] * bags[1]).sum(-1)]
    pairs = [pairs[1], pairs[0], pairs[2]] if mistake == "products in another order" else pairs
    return torch.sigmoid(F.linear(torch.cat((x, torch.stack(pairs, 1)), 1), w["top.weight"], w["top.bias"]))


port(
    "dlrm",
    Recommender,
    recommender,
    (drawn(5, 4), torch.randint(0, 20, (2, 5, 3), generator=torch.Generator().manual_seed(1))),
    {
        "": (),
        "mean of a bag": ("bag1|bmm|top", ANY, r"mean|div|3"),
        "products in another order": (r"top|rows|products|bmm", ANY, "order|exchang|column|index"),
    },
)


# Losses and their gradients.


def policy(b: bool, mistake: str) -> Any:
    """PPO's losses."""
    states, actions, old, rewards = drawn(8, 6), torch.arange(8) % 3, drawn(8, seed=2) - 1.0, drawn(8, seed=3)
    body, actor, critic = drawn(6, 8, seed=4), drawn(8, 3, seed=5) * 0.3, drawn(8, 1, seed=6)
    weights = [each.requires_grad_() for each in (body, actor, critic)]

    def program() -> Any:
        hidden = torch.tanh(states @ body)
        values = (hidden @ critic).squeeze(-1)
        logs = (hidden @ actor).log_softmax(-1)
        chosen = logs.gather(1, actions[:, None]).squeeze(1)
        raw = rewards - values.detach()
        if b and mistake == "advantages not normalised":
            advantages = raw
        elif b:
            advantages = (raw - raw.mean()) / (raw.var(unbiased=mistake != "biased deviation").sqrt() + 1e-8)
        else:
            advantages = (raw - raw.mean()) / (raw.std() + 1e-8)
        ratio = (chosen - old).exp()
        clipped = ratio.clamp(0.8, 1.2) * advantages
        if b:
            gain = clipped.minimum(ratio * advantages)
            gain = clipped if mistake == "only the clipped" else gain
            loss = 0.5 * F.mse_loss(values, rewards) - gain.mean() + 0.01 * (logs * logs.exp()).sum(-1).mean()
        else:
            actor_loss = -torch.min(ratio * advantages, clipped).mean()
            value_loss = 0.5 * (values - rewards).pow(2).mean()
            entropy = -(logs.exp() * logs).sum(-1).mean()
            loss = actor_loss + value_loss - 0.01 * entropy
        return torch.autograd.grad(loss, weights)

    return program


both(
    "ppo",
    policy,
    {
        "": (),
        "advantages not normalised": ("raw|advantages", ANY, "left out|div|sub|mean|std"),
        "only the clipped": (r"torch\.min|clipped|ratio \*", ANY, "min|left out"),
    },
    trains=True,
)


def contrast(b: bool, mistake: str) -> Any:
    """A contrastive loss, which the port computes by hand."""
    images, texts, w = drawn(6, 8), drawn(6, 5, seed=2), [drawn(8, 4, seed=3), drawn(5, 4, seed=4)]
    for each in w:
        each.requires_grad_()

    def program() -> Any:
        x, y = F.normalize(images @ w[0], dim=-1), F.normalize(texts @ w[1], dim=-1)
        if not b:
            logits = x @ y.T / 0.1
            labels = torch.arange(6)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        else:
            logits = (y @ x.T).T * (20.0 if mistake == "another temperature" else 10.0)
            own = logits.diagonal()
            rows, columns = logits.logsumexp(1) - own, logits.logsumexp(0) - own
            loss = rows.mean() if mistake == "one direction" else 0.5 * (rows + columns).mean()
        loss.backward()
        grads = [each.grad for each in w]
        for each in w:
            each.grad = None
        return loss, grads

    return program


both(
    "contrastive",
    contrast,
    {
        "": (),
        "another temperature": (r"x @ y|0\.1|logits", ANY, r"20|0\.05|mul|div|2"),
        "one direction": ("cross_entropy|loss|/ 2", ANY, "left out|add|mean|transpos|one"),
    },
    trains=True,
)


def classified(b: bool, mistake: str) -> Any:
    """Cross entropy with weights of classes, smoothing, and labels that do not count."""
    x, w, labels = drawn(12, 6), drawn(6, 5, seed=2).requires_grad_(), torch.arange(12) % 5
    labels[3] = labels[7] = -100
    shares = torch.tensor([1.0, 0.5, 2.0, 1.5, 3.0])

    def program() -> Any:
        if not b:
            loss = F.cross_entropy(x @ w, labels, weight=shares, label_smoothing=0.1)
            return torch.autograd.grad(loss, w)
        logs, kept = (x @ w).log_softmax(-1), labels != -100
        logs, own = logs[kept], labels[kept]
        smooth = 0.2 if mistake == "more smoothing" else 0.1
        target = F.one_hot(own, 5) * (1 - smooth) + smooth / 5
        losses = -(target * shares * logs).sum(-1)
        count = torch.tensor(12.0) if mistake == "divided by all" else shares[own].sum()
        return torch.autograd.grad(losses.sum() / count, w)

    return program


LOSS = "cross_entropy|nll_loss|loss"
both(
    "cross entropy",
    classified,
    {
        "": (),
        "more smoothing": (LOSS, ANY, r"0\.2\b|0\.8\b|smooth"),
        "divided by all": (LOSS, ANY, "12|div|mean|sum|count|reduc"),
    },
    trains=True,
)


# Steps of training.


def optimised(b: bool, mistake: str) -> Any:
    """AdamW with clipped gradients, accumulated over two batches; or the same by hand on two ranks."""
    model = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
    x, y = drawn(3, 2, 4, 6), drawn(3, 2, 4, 2, seed=2) * 3

    def library() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.1, foreach=False)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))
        for n in range(3):
            for part in range(2):
                loss = F.mse_loss(model(x[n, part]), y[n, part])
                (loss / 2 if mistake == "the loss is halved" else loss).backward()
            for w in model.parameters() if mistake != "the loss is halved" else ():
                w.grad = None if w.grad is None else w.grad * 0.5
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def by_hand() -> None:
        weights = list(model.parameters())
        first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
        for n in range(3):
            ranks = [torch.autograd.grad(F.mse_loss(model(x[n, r]), y[n, r]), weights) for r in range(2)]
            grads = [(g + h) * (1.0 if mistake == "gradients are summed" else 0.5) for g, h in zip(*ranks, strict=True)]
            norm = torch.cat([g.flatten() for g in grads]).norm()
            scale = torch.tensor(1.0) if mistake == "not clipped" else (1.0 / (norm + 1e-6)).clamp_max(1.0)
            rate = 0.1 / (2 + n if mistake == "schedule is a step ahead" else 1 + n)
            with torch.no_grad():
                for w, g, m, v in zip(weights, grads, first, second, strict=True):
                    g = g * scale
                    if mistake == "decay in the gradient":
                        g = g + 0.1 * w
                    else:
                        w.mul_(1 - rate * 0.1)
                    m.mul_(0.9).add_(g, alpha=0.1)
                    v.mul_(0.999).addcmul_(g, g, value=0.001)
                    corrected = m if mistake == "no correction of bias" else m / (1 - 0.9 ** (n + 1))
                    w.sub_(rate * corrected / ((v / (1 - 0.999 ** (n + 1))).sqrt() + 1e-8))

    return lambda: ((by_hand if b else library)(), [w.detach() for w in model.parameters()])


UPDATE = r"adam|optimizer\.step|_multi_|_single|addcdiv|mul_|lerp|sub_|optim"
both(
    "adamw",
    optimised,
    {
        "": (),
        "the loss is halved": (),
        "not clipped": (r"clip_grad|optimizer\.step|adam|mul_", RESULT, "clip|left out|mul|scale|clamp"),
        "schedule is a step ahead": (UPDATE, RESULT, r"0\.05|lr|rate|addcdiv|mul|0\.5|value"),
        "decay in the gradient": (UPDATE, RESULT, r"mul|decay|add|0\.99"),
        "no correction of bias": (UPDATE, RESULT, r"div|0\.1|addcdiv|value|bias|left out"),
    },
    trains=True,
)


@pair("batch norm: momentum as in TensorFlow", r"norm|^1$", ANY, r"momentum|0\.9", made=True, trains=True)
def _(b: bool) -> Any:
    model = made(lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)))
    model[1].momentum = 0.9 if b else 0.1
    batches = drawn(3, 8, 5)

    def program() -> Any:
        model.train()
        for x in batches[:2]:
            model(x)
        return model.eval()(batches[2])

    return program


def gru(b: bool, mistake: str) -> Any:
    model, x = made(lambda: nn.GRU(6, 8, batch_first=True)), drawn(2, 5, 6)
    wi, wh, bi, bh = (p.detach() for p in model.parameters())
    head = drawn(8, 3)

    def by_hand() -> Any:
        h, out = torch.zeros(2, 8), []
        for t in range(5):
            r, z, n = F.linear(x[:, t], wi, bi).chunk(3, -1)
            hr, hz, hn = F.linear(h, wh, bh).chunk(3, -1)
            r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
            n = torch.tanh(n + (F.linear(r * h, wh[16:], bh[16:]) if mistake else r * hn))
            h = (1 - z) * n + z * h
            out.append(h)
        return torch.stack(out, 1) @ head

    return by_hand if b else lambda: model(x)[0] @ head


both("unrolled gru", gru, {"": (), "reset before the product": ("GRU", ANY, "mul|reset|order|product|mm|linear")})


class T5(Model):
    """Attention without a scale, with biases of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relative = Rms(), nn.Embedding(8, H)
        projections(self, ("q", D, D), ("k", D, D), ("v", D, D), ("o", D, D), ("head", D, 20))

    def forward(self, x: Tensor, buckets: Tensor) -> Any:
        y = self.norm(x)
        scores = heads(self.q(y)) * 0.4 @ heads(self.k(y)).mT + self.relative(buckets).permute(2, 0, 1)
        shares = F.softmax(scores.float(), -1)
        return self.head((x + self.o(joined(shares @ heads(self.v(y))))) * D**-0.5)


def t5(w: Any, x: Tensor, buckets: Tensor, mistake: str) -> Any:
    y = F.rms_norm(x, (D,), w["norm.weight"], 1e-6)
    q, k, v = (heads(y @ w[f"{name}.weight"].T) for name in "qkv")
    scale = E**-0.5 if mistake == "scaled" else 0.4
    bias = w["relative.weight"][buckets.T if mistake == "distances of keys to queries" else buckets].permute(2, 0, 1)
    if mistake == "softmax in bfloat16":
        shares = (q @ k.mT * scale + bias).bfloat16().softmax(-1).float()
        out = shares @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
    x = x + joined(out) @ w["o.weight"].T
    return (x if mistake == "the last state is not scaled" else x * D**-0.5) @ w["head.weight"].T


_GAP = torch.arange(T) - torch.arange(T)[:, None]
port(
    "t5 block",
    T5,
    t5,
    (drawn(2, T, D, seed=6), _GAP.abs().clamp_max(3) + 4 * (_GAP > 0)),
    {
        "": (),
        "distances of keys to queries": (
            r"relative|scores|softmax|bmm",
            INPUT,
            "transpos|index|order|exchang|relative|bias|mask",
        ),
        "softmax in bfloat16": (r"softmax|scores|bmm", "dtype operator argument", "bfloat16"),
        "the last state is not scaled": (r"D\*\*-0\.5|head", ANY, r"0\.17|mul|left out|scal"),
    },
)


# Losses of a policy, of a student, of an encoder and of two players.


def grpo(b: bool, mistake: str) -> Any:
    """Advantages in groups, a clipped ratio and a penalty of the divergence."""
    new, old, ref = (drawn(6, 5, seed=seed) * 0.3 - 1 for seed in (1, 2, 3))
    new.requires_grad_()
    rewards, seen = drawn(2, 3, seed=4), torch.arange(5) < torch.tensor([5, 3, 4, 5, 2, 5])[:, None]
    centred = rewards - rewards.mean(1, keepdim=True)

    def trainer() -> Any:
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(6, 1)
        ratio = torch.exp(new - old)
        gained = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
        each = 0.04 * (torch.exp(ref - new) - (ref - new) - 1) - gained
        loss = ((each * seen).sum(-1) / seen.sum(-1)).mean()
        return loss, torch.autograd.grad(loss, new)

    def port() -> Any:
        deviation = (centred.square().sum(1, keepdim=True) / 2).sqrt()
        advantages = (centred / (deviation + 1e-4)).reshape(6, 1)
        ratio, most = (new - old).exp(), 1.28 if mistake == "clipped higher" else 1.2
        gained = torch.where(advantages > 0, ratio.clamp_max(most), ratio.clamp_min(0.8)) * advantages
        each = (0.04 * (torch.expm1(ref - new) - (ref - new)) - gained)[seen]
        shares = (seen / seen.sum(-1, keepdim=True) / 6)[seen]
        loss = each.mean() if mistake == "mean of all tokens" else (each * shares).sum()
        return loss, torch.autograd.grad(loss, new)

    return port if b else trainer


both(
    "grpo",
    grpo,
    {
        "": (),
        "clipped higher": ("clamp|gained", ANY, r"1\.28|clamp"),
        "mean of all tokens": ("seen|mean|sum|loss", ANY, "div|mean|sum|left out"),
    },
    trains=True,
)


def dpo(b: bool, mistake: str) -> Any:
    """Preferences; the port computes what is chosen and what is rejected in one batch."""
    policy, before = (made(lambda: nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))) for _ in range(2))
    before.requires_grad_(False)[1].weight.mul_(0.7)
    tokens = torch.randint(0, 20, (2, 3, 9), generator=torch.Generator().manual_seed(5))
    at, prompt, length = torch.arange(1, 9), torch.tensor([3, 2, 4]), torch.tensor([[9, 7, 8], [6, 9, 9]])
    seen = at < length[..., None]
    answer = seen & (at >= prompt[:, None])

    def trainer() -> Any:
        def logs(model: Any, n: int) -> Any:
            each = torch.gather(model(tokens[n])[:, :-1].log_softmax(-1), 2, tokens[n, :, 1:, None])[..., 0]
            return (each * answer[n]).sum(-1)

        gained = (logs(policy, 0) - logs(policy, 1)) - (logs(before, 0) - logs(before, 1))
        return torch.autograd.grad(-F.logsigmoid(0.1 * gained).mean(), [*policy.parameters()])

    def port() -> Any:
        def logs(model: Any) -> Any:
            kept = seen if mistake == "prompts count" else answer
            labels = tokens[..., 1:].where(kept, -100).flatten()
            losses = F.cross_entropy(model(tokens.flatten(0, 1))[:, :-1].flatten(0, 1), labels, reduction="none")
            return -losses.view(2, 3, 8).sum(-1)

        chosen, rejected = 0.1 * (logs(policy) - logs(before))
        return torch.autograd.grad(F.softplus(rejected - chosen).mean(), [*policy.parameters()])

    return port if b else trainer


both("dpo", dpo, {"": (), "prompts count": ("model", ANY, "gradient|loss")}, trains=True, ops="products")


def distilled(b: bool, mistake: str) -> Any:
    w, x, teacher = drawn(6, 5).requires_grad_(), drawn(8, 6, seed=2), drawn(8, 5, seed=3) * 2

    def trainer() -> Any:
        soft = F.kl_div(F.log_softmax(x @ w / 3, -1), F.softmax(teacher / 3, -1), reduction="batchmean") * 9
        return torch.autograd.grad(soft, w)

    def port() -> Any:
        mine, theirs = (x @ w / 3).log_softmax(-1), (teacher / 3).log_softmax(-1)
        soft = (theirs.exp() * (theirs - mine)).sum(-1).mean()
        return torch.autograd.grad(soft if mistake else soft * 9, w)

    return port if b else trainer


both("distilled", distilled, {"": (), "no square": ("x @ w", ANY, "gradient|loss")}, trains=True, ops="products")


def vae(b: bool, mistake: str) -> Any:
    encoder, decoder = made(lambda: nn.Linear(6, 6)), made(lambda: nn.Linear(3, 6))
    x, noise = drawn(4, 6), drawn(4, 3, seed=2)

    def program() -> Any:
        mean, log = encoder(x).chunk(2, -1)
        out = decoder(mean + torch.exp(0.5 * log) * noise)
        if not b:
            loss = F.mse_loss(out, x, reduction="sum") / 4 - 0.5 * (1 + log - mean.square() - log.exp()).sum() / 4
        else:
            apart = 0.5 * (mean.square() + log.exp() - 1 - log)
            apart = apart.mean(-1) if mistake else apart.sum(-1)
            loss = ((out - x).square().sum(-1) + apart).mean()
        return torch.autograd.grad(loss, [*encoder.parameters(), *decoder.parameters()])

    return program


both("vae", vae, {"mean of the dimensions": ("encoder", ANY, "gradient|loss")}, trains=True, ops="products")


def gan(b: bool, mistake: str) -> Any:
    maker = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)))
    critic = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
    seed, real, ones = drawn(8, 4), drawn(8, 6, seed=2) + 0.5, torch.ones(8, 1)

    def loss(x: Tensor, target: Tensor) -> Any:
        scores = critic(x)
        if not b:
            return F.binary_cross_entropy_with_logits(scores, target)
        return F.softplus(-scores if bool(target[0]) else scores).mean()

    def program() -> Any:
        fake = maker(seed)
        found = torch.autograd.grad(loss(real, ones) + loss(fake.detach(), 0 * ones), [*critic.parameters()])
        with torch.no_grad():
            for weight, gradient in zip(critic.parameters(), found, strict=True):
                weight -= 0.1 * gradient
        last = -loss(fake, 0 * ones) if b and mistake else loss(fake, ones)
        return torch.autograd.grad(last, [*maker.parameters()])

    return program


both("gan", gan, {"": (), "minimax": ("binary_cross|sub", ANY, "neg|softplus|sub")}, trains=True)


def averaged(b: bool, mistake: str) -> Any:
    """Momentum under a schedule; the port scales its loss, and takes that out of the gradients."""
    model, x, y = (
        made(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))),
        drawn(3, 4, 5),
        drawn(3, 4, 2),
    )

    def program() -> Any:
        weights = [*model.parameters()]
        buffers, averages = [torch.zeros_like(w) for w in weights], [w.detach().clone() for w in weights]
        for n in range(3):
            rate = 0.2 * (n if b and mistake else n + 1) / 3
            loss = F.mse_loss(model(x[n]), y[n])
            gradients = torch.autograd.grad(loss * 1024 if b else loss, weights)
            with torch.no_grad():
                for w, gradient, buffer, average in zip(weights, gradients, buffers, averages, strict=True):
                    buffer.mul_(0.9).add_(gradient / 1024 if b else gradient)
                    w.add_(buffer, alpha=-rate)
                    average.lerp_(w, 0.1) if b else average.mul_(0.9).add_(w, alpha=0.1)
        return averages

    return program


both("averaged", averaged, {"": ()}, trains=True, ops="mixed")
both("averaged", averaged, {"the rate starts at zero": (r"w\.add_", ANY, "alpha|update")}, trains=True)


# A mixture of each token with the one before it, and weights in groups of four bits.


class Mixed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(12))
        projections(self, ("key", 12, 24), ("value", 24, 12), ("head", 12, 4))

    def forward(self, x: Tensor) -> Any:
        last = F.pad(x, (0, 0, 1, -1))
        keys = self.key(x * self.share + last * (1 - self.share))
        return self.head(x + self.value(keys.relu().square()))


def mixed(w: Any, x: Tensor, mistake: str) -> Any:
    last, out = torch.zeros(2, 12), []
    for now in x.unbind(1):
        keys = (now.lerp(last, w["share"]) if mistake else last.lerp(now, w["share"])) @ w["key.weight"].T
        out.append((now + keys.relu().square() @ w["value.weight"].T) @ w["head.weight"].T)
        last = now
    return torch.stack(out, 1)


port("rwkv", Mixed, mixed, (drawn(2, 7, 12),), {"": (), "shares exchanged": (r"share|^key$|pad", ANY, "lerp|exchang")})


def grouped(w: Any, x: Tensor, mistake: str) -> Any:
    order = torch.randperm(32, generator=torch.Generator().manual_seed(9))
    groups = w["0.weight"][:, order].view(24, 4, 8)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (most - least) / 15
    codes = ((groups - least) / step).round()
    inner = F.gelu(F.linear(x[:, order], (codes * step + least).view(24, 32), w["0.bias"]))
    return F.linear(inner, w["2.weight"], w["2.bias"])


port("gptq", lambda: nn.Sequential(nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 5)), grouped, (drawn(6, 32),), {"": ()})
