"""Pairs of small programs of serving and training: caches, positions, masks, states, whole numbers, losses, optimizers.

A line that may be named where B does otherwise ends in an arrow.
"""

from __future__ import annotations

import copy
import io
import math
from functools import partial
from typing import Any

import numpy
import torch
from outcomes import Pair, add
from torch import Tensor, nn
from torch.nn import functional as F

PAIRS: list[Pair] = []
pair = partial(add, PAIRS)
trained = partial(pair, trains=True)
sdpa = F.scaled_dot_product_attention


def stored(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """A checkpoint: numbers that no recorded call makes. Names that end in norm are around one."""
    rng, kind = numpy.random.default_rng(7), str(torch.get_default_dtype()).removeprefix("torch.")
    found = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * (1 if name.startswith("x") else shape[-1] ** -0.5)
        found[name] = torch.from_numpy((1 + 0.7 * values if name.endswith("norm") else values).astype(kind))
    return found


class Gqa(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = heads, kv, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv * self.dim, bias=False)
        self.v_proj = nn.Linear(width, kv * self.dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv, self.dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv, self.dim)).transpose(1, 2)
        k = k.repeat_interleave(self.heads // self.kv, 1)  # <-
        v = v.repeat_interleave(self.heads // self.kv, 1)  # <-
        return self.o_proj(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pair(
    "gqa: heads tiled",
    "<-|cat|repeat|scaled_dot",
    "operator operand argument",
    "cat|repeat|order|head|tile|index|permut|row",
)
def _(b: bool) -> Any:
    net, x = Gqa(), torch.randn(2, 7, 32)
    if not b:
        return net(x)
    wq, wk, wv, wo = (weight.t() for weight in net.parameters())
    q = (x @ wq).reshape(2, 7, 4, 8).permute(0, 2, 1, 3)
    k = (x @ wk).reshape(2, 7, 2, 8).permute(0, 2, 1, 3)
    v = (x @ wv).reshape(2, 7, 2, 8).permute(0, 2, 1, 3)
    k = torch.cat([k, k], 1)  # <-
    v = torch.cat([v, v], 1)  # <-
    scores = q @ k.mT * 8**-0.5
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -1e9)
    return (scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(2, 7, 32) @ wo


def half_rope(x: Tensor, positions: Tensor, theta: float = 100.0) -> Tensor:
    """Rotate the first half of a head's numbers against the second."""
    dim = x.shape[-1]
    angles = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    first, second = x.chunk(2, -1)  # <-
    return x * cos + torch.cat([-second, first], -1) * sin  # <-


class StaticCache:
    def __init__(self, heads: int, size: int, dim: int) -> None:
        self.k, self.v, self.used = torch.zeros(heads, size, dim), torch.zeros(heads, size, dim), 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.used + k.shape[1]
        self.k[:, self.used : end], self.v[:, self.used : end] = k, v
        self.used = end
        return self.k[:, :end], self.v[:, :end]


def whole_forward(w: dict[str, Tensor]) -> Tensor:
    """All positions at once, two heads of 16."""
    at = torch.arange(len(w["x"]))
    q, k, v = (F.linear(w["x"], w[name]).view(-1, 2, 16).transpose(0, 1) for name in "qkv")
    mixed = sdpa(half_rope(q, at)[None], half_rope(k, at)[None], v[None], is_causal=True)[0]  # <-
    return F.linear(mixed.transpose(0, 1).flatten(1), w["o"])


def cached_forward(w: dict[str, Tensor], prompt: int, late: int = 0) -> Tensor:
    """The prompt, then token by token with a static cache."""
    cache, outs = StaticCache(2, 16, 16), []
    for x in (w["x"][:prompt], *w["x"][prompt:].split(1)):
        q, k, v = ((x @ w[name].T).reshape(len(x), 2, 16).transpose(0, 1) for name in "qkv")
        at = torch.arange(len(x)) + cache.used + (late if cache.used else 0)  # <-
        keys, values = cache.update(half_rope(k, at), v)
        scores = torch.einsum("hqd,hkd->hqk", half_rope(q, at), keys) / 4
        seen = torch.arange(cache.used)[None] <= torch.arange(cache.used - len(x), cache.used)[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1), values).reshape(len(x), 32) @ w["o"].T)
    return torch.cat(outs)


@pair("static cache: prompt and steps for the whole")
def _(b: bool) -> Any:
    w = stored(q=(32, 32), k=(32, 32), v=(32, 32), o=(32, 32), x=(9, 32))
    return cached_forward(w, 5) if b else whole_forward(w)


@pair(
    "static cache: positions of steps one late, for the whole",
    "positions|late|half_rope",
    "operator operand argument input",
    r"\b1\b|\+|add|position|arange|angle|cos|sin",
)
def _(b: bool) -> Any:
    w = stored(q=(32, 32), k=(32, 32), v=(32, 32), o=(32, 32), x=(9, 32))
    return cached_forward(w, 4, late=1) if b else whole_forward(w)


def window_mask(length: int, window: int) -> Tensor:
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    return (ahead >= 0) & (ahead < window)  # <-


@pair("sliding window: a ring of keys for a mask")
def _(b: bool) -> Any:
    w = stored(qkv=(48, 16), x=(12, 16))
    if not b:
        q, k, v = F.linear(w["x"], w["qkv"])[None, None].chunk(3, -1)
        return sdpa(q, k, v, attn_mask=window_mask(12, 4))[0, 0]
    ring_k, ring_v, out = torch.zeros(4, 16), torch.zeros(4, 16), torch.empty(12, 16)
    for t, token in enumerate(w["x"]):
        q, k, v = (w["qkv"] @ token).view(3, 16)
        ring_k[t % 4], ring_v[t % 4] = k, v
        full = min(t + 1, 4)
        out[t] = ring_v[:full].T @ (ring_k[:full] @ q / 4).softmax(0)
    return out


@pair(
    "sliding window: one more key",
    "<-|window|attn_mask|scaled_dot",
    "operator operand argument input",
    r"<=|\ble\b|\blt\b|mask|window|\b4\b|\b5\b|\b3\b|tril|triu",
)
def _(b: bool) -> Any:
    net = nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)})
    x = torch.randn(2, 12, 16)
    q, k, v = net["qkv"](x).chunk(3, -1)
    if not b:
        return net["out"](sdpa(q, k, v, attn_mask=window_mask(12, 4)))
    everything = torch.ones(12, 12)
    allowed = everything.tril() - everything.tril(-5)  # <-
    scores = q @ k.transpose(1, 2) / 4 + (1 - allowed) * -1e9  # <-
    return net["out"](scores.softmax(-1) @ v)


@pair(
    "sliding window: positions of the ring's slots",
    "positions|half_rope|t % 4",
    "operator operand argument input",
    "%|remainder|position|slot|arange|value|angle",
)
def _(b: bool) -> Any:
    w = stored(q=(16, 16), k=(16, 16), v=(16, 16), x=(10, 16))
    keys, values, out = [], [], []
    for t in range(10):
        at = torch.tensor([t % 4 if b else t])  # <-
        token = w["x"][t : t + 1]
        keys.append(half_rope(token @ w["k"].T, at))
        values.append(token @ w["v"].T)
        del keys[:-4], values[:-4]
        q = half_rope(token @ w["q"].T, at)
        out.append(F.softmax(q @ torch.cat(keys).T / 4, -1) @ torch.cat(values))
    return torch.cat(out)


def paged(w: dict[str, Tensor], table: list[int], extra: int = 0) -> Tensor:
    """Attention of the last token over pages of four tokens."""
    pool = torch.zeros(6, 4, 2, 16)
    kv = (w["x"] @ w["kv"].T).view(-1, 2, 16)
    for t in range(len(kv)):
        pool[table[t // 4], t % 4] = kv[t]
    count = len(kv) + extra
    rows = pool[torch.tensor(table)].flatten(0, 1)[:count]  # <-
    q = w["x"][-1] @ w["q"].T
    return (rows[:, 0] @ q / 4).softmax(0) @ rows[:, 1]  # <-


def contiguous(w: dict[str, Tensor]) -> Tensor:
    k, v = F.linear(w["x"], w["kv"]).chunk(2, -1)
    return sdpa(F.linear(w["x"][-1:], w["q"])[None], k[None], v[None])[0, 0]  # <-


@pair(
    "paged cache: an empty slot counts",
    "<-|count",
    "operator operand argument",
    r"\b1\b|\b12\b|\b11\b|slice|count|more|shape|rows|size",
)
def _(b: bool) -> Any:
    w = stored(q=(16, 16), kv=(32, 16), x=(11, 16))
    return paged(w, [4, 1, 3], 1) if b else contiguous(w)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers, and a scale for each head."""
    scale = x.abs().amax((1, 2), keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


@pair(
    "int8 cache: the keys' scale for values",
    "<-|values",
    "operand argument operator",
    "scale|mul|operand|k_scale|rounded|div",
)
def _(b: bool) -> Any:
    proj, out, x = nn.Linear(32, 96), nn.Linear(32, 32), torch.randn(7, 32)
    q, k, v = proj(x).view(7, 3, 4, 8).permute(1, 2, 0, 3)
    (k8, k_scale), (v8, v_scale) = rounded(k), rounded(v * 3)
    keys = k8 * k_scale
    values = v8 * (k_scale if b else v_scale)  # <-
    return out(sdpa(q[None], keys[None], values[None], is_causal=True)[0].transpose(0, 1).flatten(1))


@pair(
    "chunked prefill: causal from the top left",
    "<-|scaled_dot|sdpa",
    "operator operand argument input",
    "causal|mask|tril|triu",
)
def _(b: bool) -> Any:
    net = nn.Linear(16, 48)
    x = torch.randn(1, 10, 16)
    past_k, past_v, outs = torch.empty(1, 0, 16), torch.empty(1, 0, 16), []
    for chunk in x.split(5, 1):
        q, k, v = net(chunk).chunk(3, -1)
        past_k, past_v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
        if b:
            outs.append(sdpa(q, past_k, past_v, is_causal=True))  # <-
        else:
            seen = torch.ones(q.shape[1], past_k.shape[1]).tril(past_k.shape[1] - q.shape[1]).bool()  # <-
            outs.append(sdpa(q, past_k, past_v, attn_mask=seen))  # <-
    return torch.cat(outs, 1)


@pair(
    "packed sequences: positions go on",
    "<-|wpe|Embedding#2|embedding",
    "operator operand argument input",
    "position|arange|index|indices|input|wpe|value|cat|weight",
)
def _(b: bool) -> Any:
    wte, wpe, qkv = nn.Embedding(20, 16), nn.Embedding(16, 16), nn.Linear(16, 48)
    ids = torch.tensor([3, 5, 7, 1, 2, 9, 4])
    starts = torch.tensor([0, 0, 0, 3, 3, 3, 3])
    positions = torch.arange(7) if b else torch.arange(7) - starts  # <-
    q, k, v = qkv(wte(ids) + wpe(positions)).chunk(3, -1)  # <-
    allowed = (starts[:, None] == starts) & torch.ones(7, 7).tril().bool()
    return sdpa(q[None], k[None], v[None], attn_mask=allowed)


def inverse_frequencies(dim: int, theta: float) -> Tensor:
    return theta ** (-torch.arange(0, dim, 2) / dim)


@pair(
    "linear rope scaling: multiplied",
    r"positions|\* 4\.0",
    "operator operand argument",
    r"mul|div|\b4\b|0.25|\b16\b|reciprocal|position|angle",
)
def _(b: bool) -> Any:
    x = torch.randn(8, 16)
    wq, wk = torch.randn(16, 16) / 4, torch.randn(16, 16) / 4
    if not b:
        positions = torch.arange(8) / 4.0  # <-
        return half_rope(x @ wq, positions) @ half_rope(x @ wk, positions).T
    angles = torch.arange(8)[:, None] * inverse_frequencies(16, 100.0) * 4.0  # <-
    cos, sin = angles.cos(), angles.sin()
    (q1, q2), (k1, k2) = (x @ wq).chunk(2, 1), (x @ wk).chunk(2, 1)
    q = torch.cat([q1 * cos - q2 * sin, q1 * sin + q2 * cos], 1)
    k = torch.cat([k1 * cos - k2 * sin, k1 * sin + k2 * cos], 1)
    return q @ k.T


@pair(
    "partial rope: frequencies of the whole head",
    "<-|inverse_frequencies|theta",
    "operator operand argument input",
    r"\b16\b|\b8\b|div|dim|arange|pow|freq|slice|shape|narrow",
)
def _(b: bool) -> Any:
    proj, x = nn.Linear(32, 32), torch.randn(6, 32)
    q = proj(x).view(6, 2, 16).transpose(0, 1)
    turned, kept = q[..., :8], q[..., 8:]
    freq = inverse_frequencies(16, 100.0)[:4] if b else inverse_frequencies(8, 100.0)  # <-
    angles = torch.arange(6)[:, None] * freq  # <-
    one, two = turned.chunk(2, -1)
    y = torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin(), kept], -1)
    return y @ q.mT


def latent(w: dict[str, Tensor], scale: float) -> Tensor:
    """Multi-head latent attention, as it is trained."""
    c = F.linear(w["x"], w["down"])
    k_nope = F.linear(c, w["up_k"]).unflatten(-1, (2, 8)).transpose(0, 1)
    v = F.linear(c, w["up_v"]).unflatten(-1, (2, 8)).transpose(0, 1)
    q_nope, q_rope = F.linear(w["x"], w["q"]).unflatten(-1, (2, 12)).transpose(0, 1).split([8, 4], -1)
    at = torch.arange(len(c))
    k_rope = half_rope(F.linear(w["x"], w["k_rope"]), at).expand(2, -1, -1)
    q = torch.cat([q_nope, half_rope(q_rope, at)], -1)
    return sdpa(q, torch.cat([k_nope, k_rope], -1), v, is_causal=True, scale=scale)  # <-


def absorbed(w: dict[str, Tensor], scale: float) -> Tensor:
    """The same over the latents alone, as it is served."""
    c, count = w["x"] @ w["down"].T, len(w["x"])
    q = (w["x"] @ w["q"].T).view(count, 2, 12)
    into = torch.einsum("thd,hdc->htc", q[..., :8], w["up_k"].view(2, 8, -1))
    turned = half_rope(q[..., 8:].transpose(0, 1), torch.arange(count))
    keys = half_rope(w["x"] @ w["k_rope"].T, torch.arange(count))
    scores = (into @ c.T + turned @ keys.T) * scale  # <-
    scores = scores + torch.full((count, count), -torch.inf).triu(1)
    return torch.einsum("hts,sc,hdc->htd", scores.softmax(-1), c, w["up_v"].view(2, 8, -1))


MLA = {"down": (12, 32), "up_k": (16, 12), "up_v": (16, 12), "q": (24, 32), "k_rope": (4, 32), "x": (7, 32)}


@pair("mla: absorbed")
def _(b: bool) -> Any:
    return absorbed(stored(**MLA), 12**-0.5) if b else latent(stored(**MLA), 12**-0.5)


@pair("flash: softmax in blocks")
def _(b: bool) -> Any:
    w = stored(xq=(2, 12, 8), xk=(2, 12, 8), xv=(2, 12, 8))
    q, k, v = w["xq"], w["xk"], w["xv"]
    if not b:
        return torch.bmm(torch.baddbmm(torch.zeros(2, 12, 12), q, k.mT, alpha=8**-0.5).softmax(-1), v)
    top, total, out = torch.full((2, 12, 1), -torch.inf), torch.zeros(2, 12, 1), torch.zeros(2, 12, 8)
    for start in range(0, 12, 5):
        scores = q @ k[:, start : start + 5].mT / math.sqrt(8)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        part, old = (scores - new).exp(), (top - new).exp()
        total = total * old + part.sum(-1, keepdim=True)
        out, top = out * old + part @ v[:, start : start + 5], new
    return out / total


class Glu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # <-


class Experts(nn.Module):
    """A mixture of experts, a loop over experts."""

    def __init__(self, width: int = 16, count: int = 4, top: int = 2, renormalise: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Glu(width, 24) for _ in range(count))
        self.top, self.renormalise = top, renormalise

    def forward(self, x: Tensor) -> Any:
        share, chosen = self.gate(x).softmax(-1).topk(self.top, -1)  # <-
        if self.renormalise:
            share = share / share.sum(-1, keepdim=True)  # <-
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * share[token, place, None])
        return out


@pair("experts: sorted by expert")
def _(b: bool) -> Any:
    net, x = Experts(top=2, renormalise=False), torch.randn(9, 16)
    if not b:
        return net(x)
    share, chosen = torch.topk(F.softmax(F.linear(x, net.gate.weight), 1), 2)
    order = chosen.flatten().argsort(stable=True)
    rows = x[order // 2]
    ends = torch.bincount(chosen.flatten(), minlength=4).tolist()
    parts = [expert(part) for expert, part in zip(net.experts, rows.split(ends), strict=True) if len(part)]
    back = torch.empty(18, 16)
    back[order] = torch.cat(parts)
    return (back.view(9, 2, 16) * share[..., None]).sum(1)


def packed_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers in a byte, the even one low, with scales and zero points of groups of columns."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    numbers = (parts / scale + zero).round().clamp(0, 15).flatten(1).to(torch.uint8)
    return numbers[:, ::2] | (numbers[:, 1::2] << 4), scale[..., 0], zero[..., 0]


def unpacked(packed: Tensor) -> Tensor:
    low, high = packed & 15, packed >> 4  # <-
    return torch.stack([low, high], -1).flatten(1)  # <-


def whole_int4(packed: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    numbers = unpacked(packed).to(scale.dtype)
    scales = scale.repeat_interleave(group, 1)  # <-
    zeros = zero.repeat_interleave(group, 1)  # <-
    return (numbers - zeros) * scales  # <-


@pair("int4 weights: a table, and sums of groups")
def _(b: bool) -> Any:
    w = stored(up=(24, 32), x=(3, 32))
    packed, scale, zero = packed_int4(w["up"], 8)
    if not b:
        return F.linear(w["x"], whole_int4(packed, scale, zero, 8)).relu()
    table = torch.tensor([[n % 16, n // 16] for n in range(256)], dtype=scale.dtype)
    numbers = table[packed.int()].view(24, 4, 8)
    x = w["x"].view(3, 4, 8)
    products = torch.einsum("tgi,ogi->tog", x, numbers) - x.sum(-1)[:, None] * zero
    return (products * scale).sum(-1).clamp_min(0)


@pair(
    "int4 weights: nibbles swapped",
    r"packed (&|>>)|unpacked|stack\(\[low|::mm$",
    "operator operand argument",
    r"order|swap|stack|operand|cat|shift|\b15\b|\b4\b|bitwise|permut|flip",
)
def _(b: bool) -> Any:
    w = stored(up=(24, 32), x=(3, 32))
    packed, scale, zero = packed_int4(w["up"], 8)
    if not b:
        return F.linear(w["x"], whole_int4(packed, scale, zero, 8)).relu()
    numbers = torch.empty(24, 32)
    numbers[:, 0::2] = (packed >> 4).to(numbers.dtype)  # <-
    numbers[:, 1::2] = (packed & 0x0F).to(numbers.dtype)  # <-
    groups = (numbers.view(24, 4, 8) - zero[..., None]) * scale[..., None]
    return (w["x"] @ groups.view(24, 32).T).relu()


@pair(
    "int4 weights: scales tiled over the columns",
    "scales|tile|scale.repeat_interleave",
    "operator operand argument",
    "repeat|tile|interleave|order|permut|index|cat|expand|scale|operand|view",
)
def _(b: bool) -> Any:
    w = stored(up=(24, 32), x=(3, 32))
    w["up"][:, :8] *= 3
    packed, scale, zero = packed_int4(w["up"], 8)
    if not b:
        return w["x"] @ whole_int4(packed, scale, zero, 8).T
    centred = unpacked(packed).view(24, 4, 8) - zero[:, :, None]
    scales = torch.tile(scale, (1, 8))  # <-
    return torch.einsum("ti,oi->to", w["x"], centred.reshape(24, 32) * scales)  # <-


@pair(
    "lora: merged transposed",
    "<-|delta|merge|whole",
    "operator operand argument weight",
    r"\.T|transpos|order|swap|permut|weight|operand|addmm|matmul|\bmm\b",
)
def _(b: bool) -> Any:
    w = stored(base=(16, 16), low=(4, 16), high=(16, 4), x=(5, 16))
    if not b:
        return torch.tanh(w["x"] @ w["base"].T + 2 * (w["x"] @ w["low"].T) @ w["high"].T)  # <-
    delta = torch.einsum("ri,or->io", w["low"], w["high"])  # <-
    whole = w["base"].add(delta, alpha=2.0)  # <-
    return F.linear(w["x"], whole).tanh()


@pair(
    "fused qkv: by heads, taken by thirds",
    "<-|chunk|view|qkv|scaled_dot",
    "operator operand argument",
    r"chunk|split|view|permut|order|unflatten|slice|shape|\b3\b|transpose|select|reshape|weight|index",
)
def _(b: bool) -> Any:
    qkv, dense, x = nn.Linear(24, 72), nn.Linear(24, 24), torch.randn(2, 5, 24)
    if b:
        q, k, v = (part.view(2, 5, 3, 8).transpose(1, 2) for part in qkv(x).chunk(3, -1))  # <-
    else:
        q, k, v = qkv(x).view(2, 5, 3, 24).transpose(1, 2).chunk(3, -1)  # <-
    return dense(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pair("fused qkv: by heads, with rows reordered")
def _(b: bool) -> Any:
    qkv, dense, x = nn.Linear(24, 72), nn.Linear(24, 24), torch.randn(2, 5, 24)
    if not b:
        q, k, v = qkv(x).view(2, 5, 3, 24).transpose(1, 2).chunk(3, -1)
        return dense(sdpa(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    rows = torch.arange(72).view(3, 3, 8).transpose(0, 1).flatten()
    q, k, v = F.linear(x, qkv.weight[rows], qkv.bias[rows]).view(2, 5, 3, 3, 8).permute(2, 0, 3, 1, 4).unbind()
    scores = torch.einsum("bhid,bhjd->bhij", q, k).div_(8**0.5)
    scores += torch.triu(torch.full((5, 5), -torch.inf), 1)
    return dense(torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).reshape(2, 5, 24))


class Stored(nn.Module):
    """Attention of one head that is loaded."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        return self.out(sdpa(self.q(x), self.k(x), self.v(x), is_causal=True))


@pair(
    "loading: out not transposed",
    r"<-|(^|\.)out$",
    "weight operand argument operator",
    r"weight|transpos|permut|\bT\b|\bt\b|left out|operand",
)
def _(b: bool) -> Any:
    w = stored(q=(16, 16), k=(16, 16), v=(16, 16), out=(16, 16), x=(2, 6, 16))
    if not b:  # the original multiplies from the right
        q, k, v = (w["x"] @ w[name] for name in "qkv")
        scores = (q @ k.mT / 4).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ v @ w["out"]  # <-
    net = Stored(16)
    state = {f"{name}.weight": w[name].T for name in "qkv"}
    net.load_state_dict({**state, "out.weight": w["out"]})  # <-
    return net(w["x"])


@pair(
    "shards: of rows in the wrong order",
    "<-|down|cat",
    "weight operand argument operator input",
    "order|cat|weight|swap|operand|permut|shard|value",
)
def _(b: bool) -> Any:
    w = stored(up=(32, 16), down=(16, 32), x=(5, 16))
    shards = dict(zip(["2", "8", "9", "10"], w["down"].chunk(4, 1), strict=True))
    down = torch.cat([shards[name] for name in (sorted(shards) if b else shards)], 1)  # <-
    return F.linear(F.gelu(F.linear(w["x"], w["up"])), down)


def scan(x: Tensor, step: Tensor, decay: Tensor, into: Tensor, out: Tensor, skip: Tensor) -> Tensor:
    """A selective state space, token by token."""
    state, ys = torch.zeros(x.shape[-1], into.shape[-1]), []
    for t in range(len(x)):
        state = state * torch.exp(step[t][:, None] * decay) + (step[t] * x[t])[:, None] * into[t]
        ys.append(state @ out[t] + skip * x[t])  # <-
    return torch.stack(ys)


def mamba_parts(w: dict[str, Tensor]) -> tuple[Tensor, ...]:
    x = F.silu(F.conv1d(w["x"].T[None], w["conv"], padding=3, groups=8)[0, :, :-3].T)
    step = F.softplus(x @ w["dt"].T + w["dt_bias"])  # <-
    into, out = (x @ w["bc"].T).chunk(2, -1)
    return x, step, -w["log_norm"].exp(), into, out, w["d_norm"]


MAMBA = {
    "x": (9, 8), "conv": (8, 1, 4), "dt": (8, 8), "dt_bias": (8,), "bc": (8, 8), "log_norm": (8, 4), "d_norm": (8,)
}  # fmt: skip


@pair("state space: a sum over pairs of tokens")
def _(b: bool) -> Any:
    x, step, decay, into, out, skip = mamba_parts(stored(**MAMBA))
    if not b:
        return scan(x, step, decay, into, out, skip)
    total = torch.cumsum(step[..., None] * decay, 0)
    kept = torch.exp(
        (total[:, None] - total[None]).masked_fill(torch.ones(9, 9).triu(1).bool()[..., None, None], -torch.inf)
    )
    return torch.einsum("tn,tscn,sc,sn->tc", out, kept, step * x, into) + x * skip


@pair("state space: no skip", "<-|skip", "operator operand argument", "add|skip|left out|mul|d_norm|operand")
def _(b: bool) -> Any:
    x, step, decay, into, out, skip = mamba_parts(stored(**MAMBA))
    if not b:
        return scan(x, step, decay, into, out, skip)
    state, y = x.new_zeros(8, 4), torch.empty_like(x)
    for t, (now, dt) in enumerate(zip(x, step, strict=True)):
        state.mul_(torch.exp(torch.outer(dt, torch.ones(4)) * decay))
        state.add_(torch.outer(dt * now, into[t]))
        y[t] = torch.mv(state, out[t])  # <-
    return y


@pair(
    "state space: the convolution's window is turned round",
    "<-|conv",
    "operator operand argument weight",
    "flip|order|conv|weight|operand|swap|index|permut|select|mul",
)
def _(b: bool) -> Any:
    w = stored(x=(9, 8), conv=(8, 1, 4), out=(8, 8))
    if not b:
        y = F.conv1d(w["x"].T[None], w["conv"], padding=3, groups=8)[0, :, :9].T  # <-
        return F.silu(y) @ w["out"].T
    window, ys = torch.zeros(4, 8), []
    for x in w["x"]:
        window = torch.cat([x[None], window[:-1]])  # <-
        ys.append((window * w["conv"][:, 0].T).sum(0))  # <-
    return F.linear(F.silu(torch.stack(ys)), w["out"])


def linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: float) -> Tensor:
    state, ys = torch.zeros(k.shape[-1], v.shape[-1]), []
    for t in range(len(q)):
        state = decay * state + torch.outer(k[t], v[t])  # <-
        ys.append(q[t] @ state)
    return torch.stack(ys)


def chunked_linear_attention(q: Tensor, k: Tensor, v: Tensor, decay: float, size: int, late: int = 0) -> Tensor:
    """The retention form: squares within a chunk, a state between chunks."""
    state, ys = torch.zeros(k.shape[-1], v.shape[-1]), []
    away = torch.arange(size)[:, None] - torch.arange(size)
    inner = torch.where(away >= 0, decay ** away.clamp(min=0), 0.0)
    since = decay ** (torch.arange(1, size + 1) - late)[:, None]  # <-
    left = decay ** torch.arange(size - 1, -1, -1)[:, None]
    for a, b, c in zip(q.split(size), k.split(size), v.split(size), strict=True):
        ys.append((a @ b.T * inner) @ c + (a * since) @ state)  # <-
        state = decay**size * state + (b * left).T @ c
    return torch.cat(ys)


@pair("linear attention: chunks")
def _(b: bool) -> Any:
    proj, out, x = nn.Linear(16, 48), nn.Linear(16, 16), torch.randn(12, 16)
    q, k, v = proj(x).chunk(3, -1)
    return out(chunked_linear_attention(q, k, v, 0.8, 4) if b else linear_attention(q, k, v, 0.8))


@pair(
    "linear attention: the state decays one step less",
    "<-|since|pow|decay|@ state",
    "operator operand argument input",
    r"\b1\b|sub|add|0\.8|0\.64|0\.512|0\.4096|pow|arange|since|value|operand",
)
def _(b: bool) -> Any:
    proj, out, x = nn.Linear(16, 48), nn.Linear(16, 16), torch.randn(12, 16)
    q, k, v = proj(x).chunk(3, -1)
    return out(chunked_linear_attention(q, k, v, 0.8, 4, 1) if b else linear_attention(q, k, v, 0.8))


@pair("rwkv: sums held below their greatest")
def _(b: bool) -> Any:
    w = stored(decay=(8,), first=(8,), xk=(9, 8), xv=(9, 8), xr=(9, 8))
    decay, k, v = w["decay"].exp(), w["xk"], w["xv"]
    ys = []
    if not b:
        above, below = torch.zeros(8), torch.zeros(8)
        for t in range(9):
            now = torch.exp(w["first"] + k[t])
            ys.append((above + now * v[t]) / (below + now))
            above = above * torch.exp(-decay) + k[t].exp() * v[t]
            below = below * torch.exp(-decay) + k[t].exp()
        return torch.sigmoid(w["xr"]) * torch.stack(ys)
    above, below, top = torch.zeros(8), torch.zeros(8), torch.full((8,), -1e38)
    for key, value, gate in zip(k, v, w["xr"], strict=True):
        most = torch.maximum(top, w["first"] + key)
        old, now = torch.exp(top - most), torch.exp(w["first"] + key - most)
        ys.append(gate.sigmoid() * (old * above + now * value) / (old * below + now))
        most = torch.maximum(top - decay, key)
        old, now = torch.exp(top - decay - most), torch.exp(key - most)
        above, below, top = old * above + now * value, old * below + now, most
    return torch.stack(ys)


EDGES = ((0, 1), (1, 2), (2, 0), (3, 1), (4, 3), (1, 4), (5, 0), (2, 5), (0, 4))


class Gcn(nn.Module):
    """Graph convolutions by lists of edges, with loops."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Any:
        loops = torch.arange(len(x)).repeat(2, 1)
        source, target = torch.cat([edges, loops], 1)  # <-
        degree = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))  # <-
        share = (degree[source] * degree[target]) ** -0.5  # <-
        for layer in (self.one, self.two):
            sent = layer(x)[source] * share[:, None]
            x = torch.zeros(len(x), sent.shape[1]).index_add_(0, target, sent)
            x = x.relu() if layer is self.one else x
        return x


@pair("graph: a product with the adjacency")
def _(b: bool) -> Any:
    net, x, edges = Gcn(), torch.randn(6, 8), torch.tensor(EDGES).T
    if not b:
        return net(x, edges)
    adjacent = torch.eye(6)
    adjacent[edges[1], edges[0]] = 1
    root = adjacent.sum(1).rsqrt().diag()
    whole = root @ adjacent @ root
    return whole @ (whole @ x @ net.one.weight.T).relu() @ net.two.weight.T


@pair(
    "graph: degrees without loops",
    "<-|degree|share",
    "operator operand argument input",
    r"degree|\b1\b|add|sum|eye|loop|operand|order|value|shape",
)
def _(b: bool) -> Any:
    net, x, edges = Gcn(), torch.randn(6, 8), torch.tensor(EDGES).T
    if not b:
        return net(x, edges)
    adjacent = torch.zeros(6, 6).index_put_((edges[1], edges[0]), torch.ones(len(EDGES)))
    degree = adjacent.sum(1)  # <-
    adjacent = adjacent + torch.eye(6)  # <-
    whole = adjacent / (degree[:, None] * degree[None]).sqrt()  # <-
    return whole @ F.relu(whole @ F.linear(x, net.one.weight)) @ net.two.weight.T


def bucket(away: Tensor, both: bool, count: int = 8, far: int = 16) -> Tensor:
    """Which bias of T5 is for a distance, key minus query."""
    start = torch.zeros_like(away)
    if both:
        count //= 2
        start = (away > 0) * count
        away = away.abs()
    else:
        away = -away.clamp(max=0)
    exact = count // 2
    large = exact + (torch.log(away.clamp(min=1) / exact) / math.log(far / exact) * (count - exact)).long()
    return start + torch.where(away < exact, away, large.clamp(max=count - 1))  # <-


class BucketAttention(nn.Module):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.qkv = nn.Linear(16, 48, bias=False)
        self.relative = nn.Embedding(8, 2)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).view(-1, 3, 2, 8).permute(1, 2, 0, 3)
        away = torch.arange(len(x))[None] - torch.arange(len(x))[:, None]
        bias = self.relative(bucket(away, self.both)).permute(2, 0, 1)  # <-
        scores = q @ k.mT + bias + torch.full((len(x), len(x)), -1e9).triu(1)  # <-
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


@pair(
    "relative bias: of an encoder in a decoder",
    "<-|bucket|relative|away|exact|large|count",
    "operator operand argument input",
    r"bucket|abs|index|operand|input|value|\b2\b|\b4\b|clamp|left out|neg|relative|where",
)
def _(b: bool) -> Any:
    return BucketAttention(both=b)(torch.randn(12, 16))


@pair(
    "pooling: padding counts in the mean",
    "<-|mean|sum|div",
    "operator operand argument",
    r"mean|sum|div|mask|left out|mul|\b4\b|count",
)
def _(b: bool) -> Any:
    embed, layer = (
        nn.Embedding(10, 16, padding_idx=0),
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    )
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0]])
    y = layer(embed(ids), src_key_padding_mask=torch.where(ids == 0, -torch.inf, 0.0))
    real = (ids != 0).to(y.dtype)[..., None]
    pooled = y.mean(1) if b else (y * real).sum(1) / real.sum(1)  # <-
    return F.normalize(pooled, dim=-1)


@pair(
    "rope: positions in bfloat16",
    "positions",
    "dtype operator operand argument input",
    r"bfloat16|float32|dtype|\bto\b|round|position|value|cast",
)
def _(b: bool) -> Any:
    w = stored(q=(16, 16), k=(16, 16), x=(6, 16))
    positions = torch.arange(509, 515).to(torch.get_default_dtype())
    if b:
        positions = positions.bfloat16().to(torch.get_default_dtype())  # <-
    return half_rope(w["x"] @ w["q"], positions) @ half_rope(w["x"] @ w["k"], positions).T


@pair(
    "experts: no gradient for shares",
    "<-|share|detach",
    "operator operand argument",
    "detach|left out|grad|mul|share|softmax",
    trains=True,
)
def _(b: bool) -> Any:
    gate, experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(5, 8, requires_grad=True)
    share = gate(x).softmax(-1)  # <-
    share = share.detach() if b else share  # <-
    y = sum(share[:, i, None] * expert(x) for i, expert in enumerate(experts))  # <-
    torch.as_tensor(y).square().mean().backward()
    return x.grad


@pair("experts: gradients of a loop by einsum", trains=True)
def _(b: bool) -> Any:
    gate = nn.Linear(8, 3)
    experts: Any = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(5, 8, requires_grad=True)
    share = gate(x).softmax(-1)
    if b:
        weight = torch.stack([expert.weight for expert in experts])
        bias = torch.stack([expert.bias for expert in experts])
        y = torch.einsum("te,eoi,ti->to", share, weight, x) + share @ bias
    else:
        y = torch.stack([expert(x) for expert in experts], 1).mul(share[..., None]).sum(1)
    y.square().mean().backward()
    return [x.grad, gate.weight.grad, *(expert.weight.grad for expert in experts)]


def stretched(freq: Tensor, factor: float, low: float, high: float, old: int) -> Tensor:
    """The scaling of frequencies of Llama 3, at once."""
    length = 2 * math.pi / freq
    smooth = ((old / length - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * freq / factor + smooth * freq


@pair("llama 3 rope scaling: frequency by frequency")
def _(b: bool) -> Any:
    proj, x, at = nn.Linear(16, 16), torch.randn(7, 16), torch.arange(7)
    freq = inverse_frequencies(16, 500.0)
    if b:
        found = []
        for f in freq.unbind():
            length = 2 * math.pi / f
            if length < 64 / 4.0:
                found.append(f)
            elif length > 64 / 1.0:
                found.append(f / 8.0)
            else:
                smooth = (64 / length - 1.0) / 3.0
                found.append(f * smooth + f / 8.0 * (1 - smooth))
        freq = torch.stack(found)
    else:
        freq = stretched(freq, 8.0, 1.0, 4.0, 64)
    angles = torch.outer(at.to(x.dtype), freq)
    one, two = proj(x).chunk(2, -1)
    y = torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)
    return y @ y.T


@pair(
    "llama 3 rope scaling: long waves not stretched",
    "<-|freq|stretched|smooth",
    "operator operand argument input",
    r"\b8\b|div|left out|freq|clamp|smooth|where|operand|value|stack|mul",
)
def _(b: bool) -> Any:
    proj, x, at = nn.Linear(16, 16), torch.randn(40, 16), torch.arange(40)
    freq = inverse_frequencies(16, 500.0)
    if b:
        length = 2 * math.pi / freq
        smooth = (64 / length - 1.0) / 3.0
        mixed = freq * smooth + freq / 8.0 * (1 - smooth)  # <-
        freq = torch.where((length > 16) & (length < 64), mixed, freq)  # <-
    else:
        freq = stretched(freq, 8.0, 1.0, 4.0, 64)  # <-
    angles = torch.outer(at.to(x.dtype), freq)  # <-
    one, two = proj(x).chunk(2, -1)
    y = torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)
    return y @ y.T


@pair("sinks: a column for a part of the sum")
def _(b: bool) -> Any:
    qkv, sink, x = nn.Linear(16, 48), torch.randn(2), torch.randn(7, 16)
    q, k, v = qkv(x).view(7, 3, 2, 8).permute(1, 2, 0, 3)
    scores = q @ k.mT / 8**0.5 + torch.full((7, 7), -torch.inf).triu(1)
    if not b:
        column = sink.view(2, 1, 1).expand(2, 7, 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    part = torch.logsumexp(scores, -1, keepdim=True)
    return (scores - part).exp() @ v * torch.sigmoid(part - sink[:, None, None])


@pair("state space: the convolution by a window")
def _(b: bool) -> Any:
    w = stored(x=(9, 8), conv=(8, 1, 4), out=(8, 8))
    if not b:
        y = F.conv1d(w["x"].T[None], w["conv"], padding=3, groups=8)[0, :, :9].T
        return F.silu(y) @ w["out"].T
    window, ys = torch.zeros(8, 4), []
    for x in w["x"]:
        window = window.roll(-1, 1)
        window[:, -1] = x
        ys.append(F.silu((window * w["conv"].squeeze(1)).sum(-1)))
    return F.linear(torch.stack(ys), w["out"])


@pair("int4 weights: zero points within a bias")
def _(b: bool) -> Any:
    w = stored(up=(24, 32), down=(16, 24), x=(5, 32))
    packed, scale, zero = packed_int4(w["up"], 32)
    if not b:
        return whole_int4(packed, scale, zero, 32).matmul(w["x"].T).T.relu() @ w["down"].T
    numbers = torch.empty(24, 32, dtype=torch.int32)
    numbers[:, ::2], numbers[:, 1::2] = packed.remainder(16), packed.div(16, rounding_mode="floor")
    y = w["x"] @ (numbers * scale).T - w["x"].sum(1, True) * (zero * scale).T
    return F.linear(F.relu(y), w["down"])


@pair("token shift: one state between tokens")
def _(b: bool) -> Any:
    w = stored(mix=(16,), key=(32, 16), value=(16, 32), x=(8, 16))
    if not b:
        before = F.pad(w["x"], (0, 0, 1, -1))
        k = F.linear(w["x"] + (before - w["x"]) * w["mix"], w["key"])
        return F.linear(F.relu(k).square(), w["value"])
    last, ys = torch.zeros(16), []
    for x in w["x"]:
        k = torch.mv(w["key"], x * (1 - w["mix"]) + last * w["mix"])
        ys.append(torch.mv(w["value"], k.clamp(min=0) ** 2))
        last = x
    return torch.stack(ys)


def rnd(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Normal numbers that no recorded call makes."""
    numbers = numpy.random.RandomState(seed).standard_normal(shape) * scale
    kind = numpy.float64 if torch.get_default_dtype() == torch.float64 else numpy.float32
    return torch.from_numpy(numbers.astype(kind))


def tokens(seed: int, count: int, *shape: int) -> Tensor:
    return torch.from_numpy(numpy.random.RandomState(seed).randint(0, count, shape))


class Net(nn.Module):
    """A block with a norm and a head."""

    def __init__(self, size: int = 16, classes: int = 7) -> None:
        super().__init__()
        self.inp = nn.Linear(size, 2 * size)
        self.norm = nn.LayerNorm(2 * size)
        self.mid = nn.Linear(2 * size, 2 * size)
        self.head = nn.Linear(2 * size, classes)

    def forward(self, x: Tensor) -> Any:
        x = self.inp(x)
        x = x + F.silu(self.mid(self.norm(x)))
        return self.head(x)


def state(net: nn.Module) -> list[Tensor]:
    return [p.detach() for p in net.parameters()]


@trained(
    "clip: of each tensor alone",
    r"clip|linalg|factor|optimizer\.step|sgd",
    "operator argument operand",
    "clip|norm|mul|clamp|factor|left out",
)
def _(b: bool) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, foreach=False)
    x, y = rnd(1, 12, 16), rnd(2, 12, 7, scale=2)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        if b:
            for p in net.parameters():
                nn.utils.clip_grad_norm_([p], 0.5, foreach=False)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=False)
        optimizer.step()
    return state(net)


@trained(
    "ema: decay and its rest swapped",
    "shadow|lerp|mul_|add_|average",
    "argument operator operand",
    r"0\.9|0\.1|alpha|mul|decay|lerp|weight|add",
)
def _(b: bool) -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    shadow = [p.detach().clone() for p in net.parameters()]
    decay = 0.1 if b else 0.9
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, foreach=False)
    for step in range(2):
        optimizer.zero_grad()
        net(rnd(step, 10, 8)).square().mean().backward()
        optimizer.step()
        for average, p in zip(shadow, net.parameters(), strict=True):
            average.mul_(decay).add_(p.detach(), alpha=1 - decay)
    return shadow


def smooth_targets(y: Tensor, classes: int, smoothing: float, *, others: bool = False) -> Tensor:
    low = smoothing / (classes - 1) if others else smoothing / classes
    high = 1 - smoothing if others else 1 - smoothing + low
    return torch.full((len(y), classes), low).scatter(1, y[:, None], high).to(torch.get_default_dtype())


@trained("label smoothing: soft targets")
def _(b: bool) -> Any:
    net, x, y = Net(), rnd(1, 9, 16), tokens(2, 7, 9)
    logits = net(x)
    if b:
        target = smooth_targets(y, 7, 0.2)
        loss = -(target * F.log_softmax(logits, dim=-1)).sum() / len(y)
    else:
        loss = F.cross_entropy(logits, y, label_smoothing=0.2)
    loss.backward()
    return [loss, [p.grad for p in net.parameters()]]


@trained(
    "label smoothing: shared by the other classes alone",
    "smooth|target|loss =|low|high",
    "operator argument operand input",
    r"0\.\d+|smooth|target|scatter|full|mul|sum|\b[67]\b",
)
def _(b: bool) -> Any:
    net, x, y = Net(), rnd(1, 9, 16), tokens(2, 7, 9)
    logits = net(x)
    target = smooth_targets(y, 7, 0.2, others=b)
    loss = torch.sum(-target * logits.log_softmax(1), dim=1).mean()
    loss.backward()
    return [loss, [p.grad for p in net.parameters()]]


def two_nets() -> tuple[nn.Module, nn.Module]:
    student, teacher = nn.Linear(12, 6), nn.Linear(12, 6)
    return student, teacher.requires_grad_(False)


@trained("distillation: kl_div, or cross-entropy less entropy")
def _(b: bool) -> Any:
    student, teacher = two_nets()
    x, t = rnd(1, 10, 12), 2.5
    if b:
        soft = torch.softmax(teacher(x) / t, 1)
        guess = torch.log_softmax(student(x) / t, 1)
        cross = -torch.einsum("bc,bc->", soft, guess)
        entropy = torch.special.entr(soft).sum()
        loss = (cross - entropy) * t * t / 10
    else:
        loss = F.kl_div(F.log_softmax(student(x) / t, -1), F.softmax(teacher(x) / t, -1), reduction="batchmean") * t**2
    loss.backward()
    return [loss, [p.grad for p in student.parameters()]]


@trained(
    "distillation: KL the other way",
    "kl|log_p|log_q|divergence|sum",
    "operand operator argument",
    "exp|operand|kl|swap|target|input|sub|order|softmax|mul",
)
def _(b: bool) -> Any:
    student, teacher = two_nets()
    x = rnd(1, 10, 12, scale=2)
    log_q, log_p = student(x).log_softmax(-1), teacher(x).log_softmax(-1)
    one, other = (log_q, log_p) if b else (log_p, log_q)
    divergence = (one.exp() * (one - other)).sum(-1).mean()
    divergence.backward()
    return [divergence, [p.grad for p in student.parameters()]]


@trained(
    "byol: gradient flows into the target",
    r"target|detach|online|backward|optimizer\.step",
    "operator operand argument",
    "detach|left out|add|grad|target|stop|backward",
)
def _(b: bool) -> Any:
    encoder, predictor = nn.Linear(10, 8), nn.Linear(8, 8)
    one, two = rnd(1, 9, 10), rnd(2, 9, 10)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], lr=0.5, foreach=False)
    for _ in range(2):
        online = F.normalize(predictor(encoder(one)), dim=1)
        target = F.normalize(encoder(two), dim=1)
        target = target if b else target.detach()
        loss = (2 - 2 * (online * target).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [state(encoder), state(predictor)]


def run_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        F.cross_entropy(net(rnd(step, 9, 16)), tokens(step, 7, 9)).backward()
        optimizer.step()


def fresh(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 2e-2, eps=1e-4, foreach=False)


@trained("resume: from a file in memory")
def _(b: bool) -> Any:
    net = Net()
    optimizer = fresh(net)
    run_steps(net, optimizer, range(2))
    if b:
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file)
        net = copy.deepcopy(net)
        net.load_state_dict(loaded["net"])
        optimizer = fresh(net)
        optimizer.load_state_dict(loaded["optimizer"])
    run_steps(net, optimizer, range(2, 4))
    return state(net)


@trained(
    "resume: moments lost",
    r"optimizer\.step|adam|fresh|lerp|addcmul|run_steps",
    "operand operator argument input",
    "lerp|exp_avg|moment|zeros|state|operand|step|0\\.\\d+|mul|left out|addcmul|zero|lost",
)
def _(b: bool) -> Any:
    net = Net()
    optimizer = fresh(net)
    run_steps(net, optimizer, range(2))
    if b:
        optimizer = fresh(net)
    run_steps(net, optimizer, range(2, 4))
    return state(net)
