"""Pairs of programs in styles that differ: streams, scans, loops, maps over models, dynamic programs, optimizers.

What a pair must say was written before `why` had seen it. `both` and `port` make pairs as in `blind_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from blind_pairs import (
    ANY,
    INPUT,
    RESULT,
    UPDATE,
    Model,
    Planted,
    Rms,
    angles,
    causal,
    halves,
    joined,
    projections,
    rms,
)
from blind_pairs import heads as split
from fresh_pairs import add_ports, drawn, made
from outcomes import Pair, add
from torch import Tensor, nn
from torch.nn import functional as F

PAIRS: list[Pair] = []
port = partial(add_ports, PAIRS)


def both(name: str, program: Callable[..., Any], mistakes: dict[str, Planted], *, trains: bool = False) -> None:
    """Pairs of a program that is told whether it is the second one, and its mistake; `""` is none."""
    for mistake, what in mistakes.items():
        own = f"{name}: {mistake or 'rewritten'}"
        add(PAIRS, own, *what, made=True, trains=trains)(partial(program, mistake=mistake))
        PAIRS[-1] = replace(PAIRS[-1], ops="all")


# A stream: causal convolutions with gaps, or buffers of what was.


class WaveNet(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8, 1)
        self.gaps = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**n) for n in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x, out = self.first(x), torch.zeros(())
        for n, (gap, skip) in enumerate(zip(self.gaps, self.skips, strict=True)):
            a, b = gap(F.pad(x, (2**n, 0))).chunk(2, 1)
            y = skip(torch.tanh(a) * torch.sigmoid(b))
            x, out = x + y, out + y
        return self.last(F.relu(out))


def wavenet(w: Any, x: Tensor, mistake: str) -> Any:
    buffers = [torch.zeros(2**n, 2, 8) for n in range(3)]
    outs = []
    for t in range(x.size(-1)):
        now = x[..., t] @ w["first.weight"][..., 0].T + w["first.bias"]
        skips = []
        for n, buffer in enumerate(buffers):
            slot = t % 2**n
            before = buffer[(slot + 1) % 2**n if mistake == "the next slot is read" and n == 1 else slot].clone()
            buffer[slot] = now
            filters = w[f"gaps.{n}.weight"]
            y = before @ filters[..., 0].T + now @ filters[..., 1].T + w[f"gaps.{n}.bias"]
            y = torch.tanh(y[:, :8]) * torch.sigmoid(y[:, 8:])
            y = y @ w[f"skips.{n}.weight"][..., 0].T + w[f"skips.{n}.bias"]
            now = now + y
            skips.append(y)
        outs.append(torch.stack(skips).sum(0).relu() @ w["last.weight"][..., 0].T + w["last.bias"])
    return torch.stack(outs, -1)


port(
    "wavenet",
    WaveNet,
    wavenet,
    (drawn(2, 2, 12),),
    {"": (), "the next slot is read": (r"gaps\.1|pad|gap\(", ANY, "")},
)


# A decoder whose prompt is read in pieces into a cache of fixed size.

TOKENS = torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(8))


class Decoder(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp_norm, self.last = nn.Embedding(40, 32), Rms(), Rms(), Rms()
        projections(self, ("q", 32, 32), ("k", 32, 16), ("v", 32, 16), ("o", 32, 32))
        projections(self, ("gate", 32, 48), ("up", 32, 48), ("down", 48, 32), ("head", 32, 40))

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        y = self.norm(x)
        turns = angles(tokens.size(1), 8)
        q, k, v = halves(split(self.q(y)), turns), halves(split(self.k(y)), turns), split(self.v(y))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(joined(attended))
        y = self.mlp_norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.last(x))


def in_pieces(w: Any, tokens: Tensor, mistake: str) -> Any:
    keys, values = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 8)
    turns, out, start = angles(16, 8), [], 0
    for piece in tokens.split((4, 3, 3), 1):
        at = torch.arange(start, start + piece.size(1))
        places = at - start if mistake == "positions restart" else at
        x = w["embed.weight"][piece]
        y = rms(x, w["norm.weight"])
        keys.index_copy_(2, at, halves(split(y @ w["k.weight"].T), turns[places]))
        values.index_copy_(2, at, split(y @ w["v.weight"].T))
        q = halves(split(y @ w["q.weight"].T), turns[places]).unflatten(1, (2, 2))
        seen = torch.arange(16) <= at[:, None] + (1 if mistake == "one slot too many is seen" else 0)
        scores = torch.einsum("bgrqe,bgke->bgrqk", q, keys) / math.sqrt(8)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        shares = torch.exp(scores - scores.logsumexp(-1, keepdim=True))
        attended = torch.einsum("bgrqk,bgke->bqgre", shares, values).flatten(2)
        x = x + attended @ w["o.weight"].T
        y = rms(x, w["mlp_norm.weight"], 1e-3 if mistake == "another epsilon" else 1e-6)
        x = x + (F.silu(y @ w["gate.weight"].T) * (y @ w["up.weight"].T)) @ w["down.weight"].T
        out.append((x if mistake == "no last norm" else rms(x, w["last.weight"])) @ w["head.weight"].T)
        start += piece.size(1)
    return torch.cat(out, 1)


ATTENTION = r"scaled_dot|attention|attended|^o$"
port(
    "pieces",
    Decoder,
    in_pieces,
    (TOKENS,),
    {
        "": (),
        "positions restart": (
            rf"turns|halves|cos|sin|angles|arange|{ATTENTION}",
            ANY,
            "rot|position|arange|cos|sin|angle",
        ),
        "one slot too many is seen": (ATTENTION, ANY, "mask|causal"),
        "another epsilon": (r"mlp_norm|rsqrt", ANY, r"0\.001|1e-0?3"),
        "no last norm": (r"^last$|^head$|rsqrt", ANY, "left out|norm|mul|rsqrt"),
    },
)


# Turns as products with matrices, heads in a loop.


def by_matrices(w: Any, tokens: Tensor, mistake: str) -> Any:
    first = 1 if mistake == "keys start at one" else 0
    base = 5e5 if mistake == "another base" else 1e4

    def matrices(start: int) -> Tensor:
        a = torch.outer(torch.arange(start, start + 10).float(), base ** (-torch.arange(4) / 4))
        return torch.cat(
            (
                torch.cat((torch.diag_embed(a.cos()), torch.diag_embed(-a.sin())), -1),
                torch.cat((torch.diag_embed(a.sin()), torch.diag_embed(a.cos())), -1),
            ),
            -2,
        )

    x = F.embedding(tokens, w["embed.weight"])
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w["norm.weight"]
    rows = []
    for head in range(4):
        own = head % 2 if mistake == "heads in turn" else head // 2
        q = y @ w["q.weight"][8 * head : 8 * head + 8].T
        k, v = (y @ w[name][8 * own : 8 * own + 8].T for name in ("k.weight", "v.weight"))
        q, k = (torch.einsum("tij,btj->bti", matrices(n), z) for n, z in ((0, q), (first, k)))
        q = q * 8**-0.5 if mistake == "scaled twice" else q
        scores = torch.baddbmm(causal().expand(2, -1, -1), q, k.mT, alpha=8**-0.5)
        rows.append(scores.softmax(1 if mistake == "softmax of queries" else -1) @ v)
    x = x + sum((row @ w["o.weight"][:, 8 * n : 8 * n + 8].T for n, row in enumerate(rows)), torch.zeros(()))
    y = rms(x, w["mlp_norm.weight"])
    gate, up = (y @ torch.cat((w["gate.weight"], w["up.weight"])).T).chunk(2, -1)
    inner = gate * torch.sigmoid(1.702 * gate) if mistake == "another sigmoid" else gate / (1 + torch.exp(-gate))
    return rms(x + (inner * up) @ w["down.weight"].T, w["last.weight"]) @ w["head.weight"].T


port(
    "matrices",
    Decoder,
    by_matrices,
    (TOKENS,),
    {
        "": (),
        "keys start at one": (
            rf"turns|halves|cos|sin|angles|arange|{ATTENTION}|^[qk]$",
            ANY,
            "rot|position|shift|one|1",
        ),
        "another base": (rf"turns|halves|cos|sin|angles|arange|\*\*|{ATTENTION}", ANY, r"base|pow|500000|5e\+?05"),
        "heads in turn": (rf"{ATTENTION}|^[kv]$", ANY, "head|order|repeat|tile|group"),
        "scaled twice": (rf"{ATTENTION}", ANY, r"scale|0\.125|0\.353|mul"),
        "softmax of queries": (rf"{ATTENTION}", ANY, "softmax|dim"),
        "another sigmoid": ("silu|gate|down", ANY, r"1\.702|silu|sigmoid"),
    },
)


# Losses of language models: chunks, shifts, padding, a penalty of the normaliser.


def language(b: bool, mistake: str) -> Any:
    model = made(lambda: nn.Sequential(nn.Embedding(30, 12), nn.LayerNorm(12), nn.Linear(12, 30)))
    tokens = torch.randint(1, 30, (3, 8), generator=torch.Generator().manual_seed(2))
    tokens[0, 5:] = tokens[2, 6:] = 0  # padding
    labels = tokens.masked_fill(tokens == 0, -100)

    def trainer() -> Any:
        logits = model(tokens)
        mine, theirs = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(mine, theirs, ignore_index=-100)
        z = mine.logsumexp(-1).square()[theirs != -100].mean()
        loss = loss + 0.01 * z
        loss.backward()
        return loss

    def chunked() -> Any:
        hidden = model[1](model[0](tokens))
        shift = 0 if mistake == "labels are not shifted" else 1
        hidden, goals = hidden[:, : 8 - shift].flatten(0, 1), tokens[:, shift:].flatten()
        kept = goals != 0
        count = kept.numel() if mistake == "padding counts" else kept.sum()
        total = torch.zeros(())
        for x, y, seen in zip(hidden.split(5), goals.split(5), kept.split(5), strict=True):
            logits = x @ model[2].weight.T + model[2].bias
            norm = logits.logsumexp(-1)
            each = norm - logits.gather(1, y[:, None])[:, 0]
            if mistake != "no penalty":
                each = each + 0.01 * norm**2
            total = total + (each * seen).sum()
        loss = total / count
        loss.backward()
        return loss

    return chunked if b else trainer


LOSS = r"cross_entropy|nll|loss|log_softmax|model\(tokens\)|logsumexp|labels|\[:, "
both(
    "language",
    language,
    {
        "": (),
        "labels are not shifted": (LOSS, ANY, "label|shift|target|row|token|index|slice"),
        "padding counts": (LOSS, ANY, r"div|mean|mul|ignore|count|0\.7"),
        "no penalty": (LOSS, ANY, "logsumexp|square|pow|left out|add|mul|gradient"),
    },
    trains=True,
)


# Groups of parameters, whose norms do not decay and whose head learns faster.


def groups(b: bool, mistake: str) -> Any:
    model: Any = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)))
    x, y = drawn(4, 5, 6), torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(4))

    def library() -> None:
        rest = [p for n, p in model.named_parameters() if p.dim() == 1]
        parts: list[dict[str, Any]] = [
            {"params": [model[0].weight]},
            {"params": [model[3].weight], "lr": 0.2},
            {"params": rest, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(parts, lr=0.05, weight_decay=0.3, betas=(0.8, 0.95))
        for n in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(x[n]), y[n]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    def by_hand() -> None:
        names, weights = zip(*model.named_parameters(), strict=True)
        beta = 0.999 if mistake == "another beta" else 0.95
        moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
        for n in range(1, 5):
            grads = torch.autograd.grad(-F.log_softmax(model(x[n - 1]), -1)[range(5), y[n - 1]].mean(), weights)
            norms = torch.stack([g.square().sum() for g in grads])
            total = norms.sqrt() if mistake == "clipped one by one" else norms.sum().sqrt().expand(len(norms))
            factors = torch.clamp(0.5 / (total + 1e-6), max=1.0)
            with torch.no_grad():
                for name, w, g, factor, (m, v) in zip(names, weights, grads, factors, moments, strict=True):
                    rate = 0.2 if name == "3.weight" and mistake != "one rate" else 0.05
                    decays = w.dim() > 1 or (mistake == "norms decay" and name.startswith("1."))
                    g = g * factor
                    m += (g - m) * (1 - 0.8)
                    v += (g * g - v) * (1 - beta)
                    root = (v / (1 - beta**n)).sqrt() + 1e-8
                    change = m / (1 - 0.8**n) / root + (0.3 * w if decays else 0)
                    w -= rate * change

    return lambda: ((by_hand if b else library)(), [w.detach().clone() for w in model.parameters()])


both(
    "groups",
    groups,
    {
        "": (),
        "norms decay": (UPDATE, RESULT, r"decay|mul|0\.3|0\.985|0\.015|add"),
        "one rate": (UPDATE, RESULT, r"lr|rate|alpha|0\.05|0\.2|0\.25|update"),
        "clipped one by one": (rf"clip_grad|{UPDATE}", RESULT, "clip|mul|scale|clamp|norm|div|gradient"),
        "another beta": (UPDATE, RESULT, r"0\.999|0\.001|beta|weight|value"),
    },
    trains=True,
)


# Models that are mapped over, and experts that are.


@add(PAIRS, "ensemble: mapped over models", made=True)
def _(b: bool) -> Any:
    models = [made(lambda: nn.Sequential(nn.Linear(5, 7), nn.SiLU(), nn.Linear(7, 3))) for _ in range(3)]
    for n, model in enumerate(models):
        model[0].weight.data = drawn(7, 5, seed=n + 3)
    x = drawn(4, 5)

    def mapped() -> Any:
        weights, buffers = torch.func.stack_module_state(models)
        call = lambda w, rest: torch.func.functional_call(models[0], (w, rest), (x,))  # noqa: E731
        return torch.vmap(call)(weights, buffers).log_softmax(-1).mean(0)

    return mapped if b else lambda: torch.stack([F.log_softmax(model(x), -1) for model in models]).mean(0)


# Attention by features, as a sum over what was.


class Linear(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("qkv", 16, 48), ("out", 16, 16), bias=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (split(y, 4) for y in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scores = (q @ k.mT).tril()
        attended = scores @ v / scores.sum(-1, keepdim=True)
        return x + self.out(joined(attended))


def scanned(w: Any, x: Tensor, mistake: str) -> Any:
    y = F.layer_norm(x, (16,), w["norm.weight"], w["norm.bias"])
    q, k, v = (y @ w["qkv.weight"].T + w["qkv.bias"]).unflatten(-1, (3, 4, 4)).unbind(2)
    q, k = (torch.where(z > 0, z + 1, z.exp()) for z in (q, k))
    k = torch.where(k > 1, k - 1, k) if mistake == "no one is added to keys" else k
    state, total, out = torch.zeros(2, 4, 4, 4), torch.zeros(2, 4, 4), []
    for t in range(x.size(1)):
        state, total = state + k[:, t, :, :, None] * v[:, t, :, None], total + k[:, t]
        got = (q[:, t, :, None] @ state)[:, :, 0]
        out.append(got if mistake == "not normalised" else got / (q[:, t] * total).sum(-1, keepdim=True))
    return x + torch.stack(out, 1).flatten(2) @ w["out.weight"].T + w["out.bias"]


port(
    "features",
    Linear,
    scanned,
    (drawn(2, 6, 16),),
    {
        "": (),
        "not normalised": (r"attended|scores|^out$", ANY, "div|left out|sum"),
        "no one is added to keys": (r"elu|scores|qkv", ANY, "1|add|elu|relu|left out"),
    },
)


# Dynamic programs: alignments and transports.


def aligned(b: bool, mistake: str) -> Any:
    model, x = made(lambda: nn.Linear(6, 5)), drawn(9, 2, 6)
    goals = torch.tensor([[1, 3, 3], [2, 1, 4]])

    def by_hand() -> Any:
        logs = F.log_softmax(model(x), -1)
        labels = torch.zeros(2, 7, dtype=torch.long)
        labels[:, 1::2] = goals
        skips = torch.zeros(2, 7, dtype=torch.bool)
        skips[:, 3::2] = True if mistake == "equal labels are joined" else goals[:, 1:] != goals[:, :-1]
        alpha = torch.full((2, 7), -1e30)
        alpha[:, :2] = logs[0].gather(1, labels[:, :2])
        for t in range(1, 9):
            one, two = F.pad(alpha, (1, -1), value=-1e30), F.pad(alpha, (2, -2), value=-1e30)
            before = torch.stack((alpha, one, two.masked_fill(~skips, -1e30))).logsumexp(0)
            alpha = before + logs[t].gather(1, labels)
        return -alpha[:, -2:].logsumexp(-1).mean()

    def library() -> Any:
        logs = F.log_softmax(model(x), -1)
        return F.ctc_loss(logs, goals, torch.tensor([9, 9]), torch.tensor([3, 3]), reduction="none").mean()

    return by_hand if b else library


both("alignment", aligned, {"": (), "equal labels are joined": ("ctc|mean|loss", ANY, "")})


def transported(b: bool, mistake: str) -> Any:
    x, y = drawn(6, 3), drawn(5, 3, seed=2)

    def scaling() -> Any:
        k = torch.exp(-torch.cdist(x, y).square() / 0.8)
        u, v = torch.ones(6), torch.ones(5)
        for _ in range(4):
            u = (1 / 6) / (k @ v)
            v = (1 / 5) / (k.T @ u)
        return (u[:, None] * k * v) @ y

    def logs() -> Any:
        cost = (x[:, None] - y).square().sum(-1)
        f, g = torch.zeros(6, 1), torch.zeros(1, 5)
        for _ in range(3 if mistake else 4):
            f = -math.log(6) - (g - cost / 0.8).logsumexp(1, keepdim=True)
            g = -math.log(5) - (f - cost / 0.8).logsumexp(0, keepdim=True)
        return torch.exp(f + g - cost / 0.8) @ y

    return logs if b else scaling


both("transport", transported, {"": (), "a round less": (r"@|k\b|u\b|v\b", ANY, "")})


# Rays, samples and spectra.


class Field(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, points: Tensor, gaps: Tensor) -> Any:
        waves = points[..., None] * 2.0 ** torch.arange(2) * math.pi
        x = torch.cat((waves.sin(), waves.cos()), -1).flatten(-2)
        out = self.two(F.relu(self.one(x)))
        colours, density = torch.sigmoid(out[..., :3]), F.relu(out[..., 3])
        alpha = 1 - torch.exp(-density * gaps)
        passed = torch.cumprod(torch.cat((torch.ones(4, 1), 1 - alpha + 1e-10), -1), -1)[:, :-1]
        return ((alpha * passed)[..., None] * colours).sum(-2)


def rendered(w: Any, points: Tensor, gaps: Tensor, mistake: str) -> Any:
    pi = 1.0 if mistake == "waves without pi" else math.pi
    waves = torch.einsum("rsd,f->rsdf", points, torch.tensor([pi, 2 * pi]))
    x = torch.stack((waves.sin(), waves.cos()), -2).flatten(-3)
    y = torch.addmm(w["one.bias"], x.flatten(0, 1), w["one.weight"].T).clamp_min(0)
    out = torch.addmm(w["two.bias"], y, w["two.weight"].T).view(4, 5, 4)
    thick = out[..., 3].clamp_min(0) * gaps
    before = thick.cumsum(-1) if mistake == "each dims itself" else thick.cumsum(-1) - thick
    shares = torch.exp(-before) * -torch.expm1(-thick)
    return torch.einsum("rs,rsc->rc", shares, 1 / (1 + torch.exp(-out[..., :3])))


port(
    "rays",
    Field,
    rendered,
    (drawn(4, 5, 3), drawn(4, 5, seed=2).abs()),
    {
        "": (),
        "waves without pi": (r"waves|points|sin|cos|^one$", ANY, r"3\.14|pi|mul|left out"),
        "each dims itself": (r"passed|alpha|cumprod|exp\(|colours", ANY, "cumprod|cumsum|slice|shift|cat|mul|sub"),
    },
)


def sampled(b: bool, mistake: str) -> Any:
    """Steps of a sampler: from the signal that is predicted, or in one formula."""
    model: Any = made(lambda: nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6)))
    x = drawn(3, 6)
    kept = torch.linspace(0.9, 0.1, 6)

    def noise(z: Tensor, t: int) -> Any:
        return model(torch.cat((z, torch.full((3, 1), t / 6)), -1))

    def one() -> Any:
        z = x
        for t in (5, 3, 1):
            e = noise(z, t)
            clean = (z - (1 - kept[t]).sqrt() * e) / kept[t].sqrt()
            z = kept[t - 1].sqrt() * clean + (1 - kept[t - 1]).sqrt() * e
        return z

    def other() -> Any:
        z = x
        for t in (5, 3, 1):
            a, c = kept[t], kept[t] if mistake == "the later noise" and t == 3 else kept[t - 1]
            ratio = (kept[t - 1] / a).sqrt()
            z = ratio * z + ((1 - c).sqrt() - ratio * (1 - a).sqrt()) * noise(z, t)
        return z

    return other if b else one


both("sampler", sampled, {"": (), "the later noise": (r"kept\[t|clean|noise", ANY, "")})


class Spectral(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        y = x + torch.fft.fft2(x).real
        return y + self.two(F.gelu(self.one(self.norm(y))))


def transformed(w: Any, x: Tensor, mistake: str) -> Any:
    def table(n: int) -> tuple[Tensor, Tensor]:
        turns = -2 * math.pi * torch.outer(torch.arange(n), torch.arange(n)) / n
        return turns.cos(), turns.sin()

    (c, s), (e, f) = table(x.size(1)), table(8)
    spectrum = c @ x @ e if mistake == "sines are left out" else c @ x @ e - s @ x @ f
    y = x + spectrum
    z = F.layer_norm(y, (8,), w["norm.weight"], w["norm.bias"]) @ w["one.weight"].T + w["one.bias"]
    z = 0.5 * z * (1 + torch.tanh(0.797885 * (z + 0.044715 * z**3))) if mistake == "another gelu" else F.gelu(z)
    return y + z @ w["two.weight"].T + w["two.bias"]


port(
    "spectra",
    Spectral,
    transformed,
    (drawn(2, 6, 8),),
    {
        "": (),
        "sines are left out": (r"fft|\.real|norm|\+ ", ANY, ""),
        "another gelu": ("gelu", ANY, "tanh|approximate"),
    },
)


# Weights that are codes, and weights that have a norm.


def coded(b: bool, mistake: str) -> Any:
    """Four bits in groups with zero points: widened before the product, or products of groups that are scaled."""
    w, x, head = drawn(12, 32), drawn(5, 32, seed=2), drawn(12, 4, seed=3)
    parts = w.view(12, 4, 8)
    least, most = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = (most - least) / 15
    zero = (-least / scale).round()
    codes = (parts / scale + zero).round().clamp(0, 15).to(torch.uint8)

    def widened() -> Any:
        weight = ((codes.float() - zero) * scale).flatten(1)
        return F.relu(F.linear(x, weight)) @ head

    def in_groups() -> Any:
        own = zero + 1 if mistake == "zero points less one" else zero
        products = torch.einsum("bgi,ogi->bog", x.view(5, 4, 8), codes.float())
        sums = x.view(5, 4, 8).sum(-1)
        y = ((products - sums[:, None] * own[..., 0]) * scale[..., 0]).sum(-1)
        return y.clamp_min(0) @ head

    return in_groups if b else widened


both(
    "codes",
    coded,
    {"": (), "zero points less one": (r"codes|weight|F\.linear|zero", f"{ANY} weight", r"zero|1|weight|add|sub")},
)


class Directed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(12, 10), nn.Linear(12, 2, bias=False), nn.Linear(2, 10, bias=False)
        self.size, self.head = nn.Parameter(torch.ones(10)), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Any:
        whole = self.base.weight + 2.0 * (self.up.weight @ self.down.weight)
        scale = (self.size / whole.norm(dim=1)).unsqueeze(0)
        y = F.linear(x, self.base.weight)
        added = self.up(self.down(x)) * 2.0
        return self.head(torch.tanh(scale * (y + added) + self.base.bias))


def merged(w: Any, x: Tensor, mistake: str) -> Any:
    factor = 1.0 if mistake == "another factor" else 2.0
    whole = w["base.weight"] + factor * w["up.weight"] @ w["down.weight"]
    if mistake == "norm of columns":
        whole = whole / whole.norm(dim=0, keepdim=True) * w["size"][:, None]
    else:
        whole = F.normalize(whole, dim=1) * w["size"][:, None]
    return F.linear(torch.tanh(F.linear(x, whole, w["base.bias"])), w["head.weight"], w["head.bias"])


port(
    "directions",
    Directed,
    merged,
    (drawn(6, 12),),
    {
        "": (),
        "another factor": (r"2\.0|^(base|up|down)$|scale", f"{ANY} weight", r"2|mul|factor|scal|weight"),
        "norm of columns": (r"norm|scale|^base$|size", f"{ANY} weight", "norm|dim|weight"),
    },
)


# Layers of images: weights that are standardised, pixels that are shuffled.


class Enlarger(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.two, self.last = nn.Conv2d(8, 16, 1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        w = self.one.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        x = F.silu(self.norm(F.conv2d(x, w, self.one.bias, padding=1)))
        return self.last(F.pixel_shuffle(self.two(x), 2))


def enlarged(w: Any, x: Tensor, mistake: str) -> Any:
    flat = w["one.weight"].flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    count = 27 if mistake == "biased variance" else 26
    flat = centred * torch.rsqrt(centred.square().sum(1, keepdim=True) / count + 1e-5)
    y = flat @ F.unfold(x, 3, padding=1) + w["one.bias"][:, None]
    y = y.unflatten(1, (2, 4))
    dims = (2, 3)
    y = (y - y.mean(dims, keepdim=True)) / (y.var(dims, keepdim=True, correction=0) + 1e-5).sqrt()
    y = y.flatten(1, 2) * w["norm.weight"][:, None] + w["norm.bias"][:, None]
    y = y * y.sigmoid()
    y = torch.einsum("oi,nip->nop", w["two.weight"].flatten(1), y) + w["two.bias"][:, None]
    if mistake == "channels vary last":
        y = y.view(2, 2, 2, 4, 6, 6).permute(0, 3, 4, 1, 5, 2)
    else:
        y = y.view(2, 4, 2, 2, 6, 6).permute(0, 1, 4, 2, 5, 3)
    return F.conv2d(y.reshape(2, 4, 12, 12), w["last.weight"], w["last.bias"], padding=1)


port(
    "enlarger",
    Enlarger,
    enlarged,
    (drawn(2, 3, 6, 6),),
    {
        "": (),
        "biased variance": (r"var\(|^one$|conv2d\(x, w", f"{ANY} weight", r"correction|27|26|1\.0\d|0\.9\d|var|biased"),
        "channels vary last": ("pixel_shuffle|^last$", ANY, "order|permut|shuffle|layout|view|chang"),
    },
)


# An encoder of torch's against one by hand, whose padding comes first.

SEEN = torch.arange(7) >= torch.tensor([0, 3, 2])[:, None]


class Sentence(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x, src_key_padding_mask=~SEEN)
        mean = (x * SEEN[..., None]).sum(1) / SEEN.sum(1, keepdim=True)
        return F.normalize(self.head(mean), dim=-1)


def sentence(w: Any, x: Tensor, mistake: str) -> Any:
    w = {key.removeprefix("layer."): value for key, value in w.items()}
    y = F.layer_norm(x, (16,), w["norm1.weight"], w["norm1.bias"])
    qkv = F.linear(y, w["self_attn.in_proj_weight"], w["self_attn.in_proj_bias"])
    q, k, v = qkv.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    seen = SEEN.flip(1) if mistake == "padding comes last" else SEEN
    scores = torch.where(seen[:, None, None], q @ k.mT / 2.0, -1e9)
    x = x + F.linear(joined(scores.softmax(-1) @ v), w["self_attn.out_proj.weight"], w["self_attn.out_proj.bias"])
    y = F.layer_norm(x, (16,), w["norm2.weight"], w["norm2.bias"])
    y = F.gelu(F.linear(y, w["linear1.weight"], w["linear1.bias"]))
    x = x + F.linear(y, w["linear2.weight"], w["linear2.bias"])
    mean = x.mean(1) if mistake == "padding is pooled" else torch.stack([x[n, SEEN[n]].mean(0) for n in range(3)])
    y = F.linear(mean, w["head.weight"], w["head.bias"])
    return y if mistake == "not normalised" else y * torch.rsqrt(y.square().sum(-1, keepdim=True))


port(
    "sentence",
    Sentence,
    sentence,
    (drawn(3, 7, 16),),
    {
        "": (),
        "padding comes last": (r"self_attn|layer|attention|softmax|SEEN", ANY, "mask"),
        "padding is pooled": (r"mean|^head$|SEEN", ANY, "mean|mul|sum|left out|div"),
        "not normalised": ("normalize", ANY, "div|norm|left out"),
    },
)


# Tokens that are chosen: with a cache, or all again.


def generated(b: bool, mistake: str) -> Any:
    model: Any = made(Decoder)
    prompt = TOKENS[:, :4]

    def again() -> Any:
        tokens = prompt
        for _ in range(4):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), 1)
        return model(tokens)

    def cached() -> Any:
        w, logits, tokens = dict(model.named_parameters()), [], prompt
        keys, values = torch.zeros(2, 2, 0, 8), torch.zeros(2, 2, 0, 8)
        for n in range(5):
            start = keys.size(2) - (1 if n and mistake == "the position stays" else 0)
            x = F.embedding(tokens, w["embed.weight"])
            y = F.rms_norm(x, (32,), w["norm.weight"], 1e-6)
            turns = angles(12, 8)[start : start + tokens.size(1)]
            keys = torch.cat((keys, halves(split(F.linear(y, w["k.weight"])), turns)), 2)
            values = torch.cat((values, split(F.linear(y, w["v.weight"]))), 2)
            q = halves(split(F.linear(y, w["q.weight"])), turns)
            k, v = (z.repeat_interleave(2, 1) for z in (keys, values))
            x = x + F.linear(joined(F.scaled_dot_product_attention(q, k, v, is_causal=n == 0)), w["o.weight"])
            y = F.rms_norm(x, (32,), w["mlp_norm.weight"], 1e-6)
            x = x + F.linear(F.silu(F.linear(y, w["gate.weight"])) * F.linear(y, w["up.weight"]), w["down.weight"])
            logits.append(F.linear(F.rms_norm(x, (32,), w["last.weight"], 1e-6), w["head.weight"]))
            tokens = logits[-1][:, -1:].argmax(-1)
        return torch.cat(logits, 1)

    return cached if b else again


both(
    "generation",
    generated,
    {
        "": (),
        "the position stays": (
            rf"turns|halves|cos|sin|angles|arange|{ATTENTION}",
            INPUT,
            "rot|position|row|slice|arange|cos|sin",
        ),
    },
)
