"""Pairs of programs in further idioms: states of matrices and complex numbers, sorted experts, rings, solvers, losses.

What a pair must say was written before `why` had seen it. `both` and `port` make pairs as in `styled_pairs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from blind_pairs import ANY, INPUT, RESULT, UPDATE, Model, Planted, Rms, angles, halves, joined, projections, rms
from blind_pairs import heads as split
from fresh_pairs import add_ports, drawn, made
from outcomes import Pair, add
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

PAIRS: list[Pair] = []
port = partial(add_ports, PAIRS)


def both(name: str, program: Callable[..., Any], mistakes: dict[str, Planted], *, trains: bool = False) -> None:
    """Pairs of a program that is told whether it is the second one, and its mistake; `""` is none."""
    for mistake, what in mistakes.items():
        own = f"{name}: {mistake or 'rewritten'}"
        add(PAIRS, own, *what, made=True, trains=trains)(partial(program, mistake=mistake))
        PAIRS[-1] = replace(PAIRS[-1], ops="all")


TEXT = drawn(2, 8, 16)
ATTENTION = r"softmax|scores|attention|attended|^o$"


# Slopes: a bias for each key, which softmax takes for one of distances.


class Bloom(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm(x)).view(2, 8, 4, 3, 4).permute(3, 0, 2, 1, 4)
        slopes = torch.tensor([2.0 ** (-2 * n) for n in range(1, 5)])
        alibi = slopes[:, None, None] * torch.arange(8)
        scores = torch.baddbmm(alibi.repeat(2, 1, 1), q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=0.5)
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), torch.finfo(torch.float32).min)
        attended = torch.bmm(F.softmax(scores, dim=-1), v.flatten(0, 1)).view(2, 4, 8, 4)
        return x + self.o(joined(attended))


def bloom(w: Any, x: Tensor, mistake: str) -> Any:
    y = F.layer_norm(x, (16,), w["norm.weight"], w["norm.bias"])
    q, k, v = F.linear(y, w["qkv.weight"], w["qkv.bias"]).unflatten(-1, (4, 3, 4)).transpose(1, 2).unbind(3)
    first = 0 if mistake == "slopes start at one" else 1
    slopes = torch.tensor([0.25 ** (n + first) for n in range(4)])
    distances = torch.arange(8)[:, None] - torch.arange(8)
    mask = torch.where(distances < 0, -torch.inf, -slopes[:, None, None] * distances)
    mask = mask * 0.5 if mistake == "biases are scaled, too" else mask
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return x + F.linear(joined(y), w["o.weight"], w["o.bias"])


SLOPES = rf"slopes|alibi|baddbmm|{ATTENTION}"
port("bloom", Bloom, bloom, (TEXT,), {
    "": (),
    "slopes start at one": (SLOPES, INPUT, r"slope|alibi|mul|beta|\b4|exponent|pow|mask|tensor"),
    "biases are scaled, too": (SLOPES, ANY, r"0\.5|beta|mul|scal"),
})  # fmt: skip


# Latents that read a series: torch's module, whose mask says what is hidden, against a function.

HIDDEN = torch.arange(9) >= torch.tensor([6, 9, 4])[:, None]


class Perceiver(Model):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(5, 16))
        self.read = nn.MultiheadAttention(16, 4, kdim=6, vdim=6, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, series: Tensor) -> Any:
        latents = self.latents.expand(3, -1, -1)
        found, _ = self.read(self.norm(latents), series, series, key_padding_mask=HIDDEN, need_weights=False)
        return self.head((latents + found).mean(1))


def perceived(w: Any, series: Tensor, mistake: str) -> Any:
    x = w["latents"].repeat(3, 1, 1)
    y = x if mistake == "latents are not normalised" else F.layer_norm(x, (16,), w["norm.weight"], w["norm.bias"])
    bias = w["read.in_proj_bias"].chunk(3)
    q = split(F.linear(y, w["read.q_proj_weight"], bias[0]), 4)
    k, v = (split(F.linear(series, w[f"read.{n}_proj_weight"], b), 4) for n, b in zip("kv", bias[1:], strict=True))
    seen = HIDDEN if mistake == "what is hidden is seen" else ~HIDDEN
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])
    x = x + F.linear(joined(y), w["read.out_proj.weight"], w["read.out_proj.bias"])
    return F.linear(x.sum(1) / 5, w["head.weight"], w["head.bias"])


port("perceiver", Perceiver, perceived, (drawn(3, 9, 6),), {
    "": (),
    "what is hidden is seen": ("read|attention|HIDDEN", ANY, "mask"),
    "latents are not normalised": ("^norm$|read|norm", ANY, "norm|left out|weight"),
})  # fmt: skip


# The delta rule: state by state, or all corrections by a triangular system.


class Delta(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("q", 16, 16), ("k", 16, 16), ("v", 16, 16), ("beta", 16, 4), ("o", 16, 16))
        self.norm = Rms(4)

    def forward(self, x: Tensor) -> Any:
        q, k, v = split(self.q(x), 4), split(self.k(x), 4), split(self.v(x), 4)
        k, beta = F.normalize(k, dim=-1), torch.sigmoid(self.beta(x)).mT
        state, out = torch.zeros(2, 4, 4, 4), []
        for t in range(x.size(1)):
            old = torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
            change = beta[:, :, t, None] * (v[:, :, t] - old)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], change)
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
        return x + self.o(joined(self.norm(torch.stack(out, 2))))


def corrected(w: Any, x: Tensor, mistake: str) -> Any:
    q, k, v = (split(x @ w[f"{name}.weight"].T, 4) for name in "qkv")
    if mistake != "keys are not normalised":
        k = k * k.square().sum(-1, keepdim=True).rsqrt()
    beta = (x @ w["beta.weight"].T).sigmoid().mT[..., None]
    change = beta * v
    if mistake != "nothing is taken back":
        system = (beta * (k @ k.mT)).tril(-1) + torch.eye(8)
        change = torch.linalg.solve_triangular(system, change, upper=False, unitriangular=True)
    y = (q @ k.mT).tril(-1 if mistake == "a step late" else 0) @ change
    return x + joined(rms(y, w["norm.weight"])) @ w["o.weight"].T


STATE = r"state|old|change|beta|einsum|norm|q\[|k\["
port("delta", Delta, corrected, (TEXT,), {
    "": (),
    "keys are not normalised": (rf"normalize|^k$|{STATE}", ANY, "norm|div|left out"),
    "nothing is taken back": (STATE, ANY, "sub|left out|einsum|bmm|mul"),
    "a step late": (STATE, ANY, ""),
})  # fmt: skip


# States that decay: a scan, or a masked product whose logarithms are summed.


class Scan(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("x", 16, 16), ("b", 16, 6), ("c", 16, 6), ("z", 16, 16), ("out", 16, 16))
        self.dt, self.log, self.skip = nn.Linear(16, 4), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))

    def forward(self, u: Tensor) -> Any:
        dt = F.softplus(self.dt(u))
        decay = torch.exp(dt * -torch.exp(self.log))
        x, b, c = self.x(u).unflatten(-1, (4, 4)), self.b(u), self.c(u)
        h, out = torch.zeros(2, 4, 4, 6), []
        for t in range(u.size(1)):
            h = h * decay[:, t, :, None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, None, None]
            out.append((h @ c[:, t, None, :, None])[..., 0])
        y = torch.stack(out, 1) + self.skip[:, None] * x
        return self.out(y.flatten(2) * F.silu(self.z(u)))


def dual(w: Any, u: Tensor, mistake: str) -> Any:
    dt = u @ w["dt.weight"].T + w["dt.bias"]
    dt = torch.log1p(dt.exp())
    logs = (-w["log"].exp() * dt).mT
    sums = (logs.cumsum(-1)[..., None] - logs.cumsum(-1)[..., None, :]).tril()
    if mistake == "the new one decays, too":
        sums = sums + logs[..., None, :]
    decay = sums.exp().tril()
    x, b, c, z = (u @ w[f"{name}.weight"].T for name in "xbcz")
    x = x.unflatten(-1, (4, 4))
    y = torch.einsum("btn,bsn,bhts,bsh,bshp->bthp", c, b, decay, dt, x)
    if mistake != "nothing is skipped":
        y = y + x * w["skip"][:, None]
    gate = torch.sigmoid(z) if mistake == "gated by a sigmoid" else z * torch.sigmoid(z)
    return (y.flatten(2) * gate) @ w["out.weight"].T


port("scan", Scan, dual, (TEXT,), {
    "": (),
    "the new one decays, too": (r"decay|h @|h \*|dt|mul", ANY, ""),
    "nothing is skipped": ("skip", ANY, "add|mul|left out"),
    "gated by a sigmoid": ("silu|^out$", ANY, "silu|sigmoid|mul"),
})  # fmt: skip


# Complex states: a kernel whose transform is multiplied, or a recurrence of real and imaginary parts.


def complex_states(b: bool, mistake: str) -> Any:
    u, c, head = drawn(2, 3, 12), torch.view_as_complex(drawn(3, 4, 2, seed=2)), drawn(3, 5, seed=3)
    poles = torch.complex(-0.1 - drawn(3, 4, seed=4).abs(), math.pi * torch.arange(4).expand(3, 4).float())

    def kernel() -> Any:
        steps = 0.1 * poles
        powers = torch.exp(steps[..., None] * torch.arange(12))
        k = 2 * torch.einsum("hn,hnl->hl", c * (torch.exp(steps) - 1) / poles, powers).real
        y = torch.fft.irfft(torch.fft.rfft(u, n=24) * torch.fft.rfft(k, n=24), n=24)[..., :12]
        return F.gelu(y).mT @ head

    def recurrence() -> Any:
        a = torch.exp(0.1 * (poles.conj() if mistake == "conjugate poles" else poles))
        d = c * (torch.exp(0.1 * poles) - 1) / poles
        real, imaginary, out = torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), []
        for t in range(12):
            now = u[..., t, None]
            real, imaginary = real * a.real - imaginary * a.imag + now, real * a.imag + imaginary * a.real
            out.append((real * d.real - imaginary * d.imag).sum(-1))
        y = torch.stack(out, -1) * (1 if mistake == "one half of the poles" else 2)
        return F.gelu(y).mT @ head

    return recurrence if b else kernel


both("complex states", complex_states, {
    "": (),
    "conjugate poles": (r"k = 2|fft|powers|einsum|steps|conj|gelu", ANY, "conj|imag|neg|"),
    "one half of the poles": (r"k = 2|fft|gelu", ANY, r"2|0\.5|mul|left out"),
})  # fmt: skip


# A block of a diffusion transformer, whose norms are shifted, scaled and gated by a condition.


class Modulated(Model):
    def __init__(self) -> None:
        super().__init__()
        self.ada, self.qkv, self.o = nn.Linear(8, 96), nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm1, self.norm2 = (nn.LayerNorm(16, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, c: Tensor) -> Any:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        x = x + gate1 * self.o(joined(F.scaled_dot_product_attention(q, k, v)))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.fc2(F.gelu(self.fc1(y), approximate="tanh"))


def modulated(w: Any, x: Tensor, c: Tensor, mistake: str) -> Any:
    parts = F.linear(c * torch.sigmoid(c), w["ada.weight"], w["ada.bias"]).view(2, 6, 1, 16)
    if mistake == "scale before shift":
        parts = parts[:, [1, 0, 2, 4, 3, 5]]
    one = 0 if mistake == "one is not added" else 1
    y = torch.addcmul(parts[:, 0], F.layer_norm(x, (16,), eps=1e-6), one + parts[:, 1])
    w_q, w_k, w_v = w["qkv.weight"].view(3, 4, 4, 16)
    b_q, b_k, b_v = w["qkv.bias"].view(3, 4, 1, 4)
    q, k, v = (torch.einsum("btd,hed->bhte", y, m) + n for m, n in ((w_q, b_q), (w_k, b_k), (w_v, b_v)))
    shares = torch.softmax(torch.einsum("bhqe,bhke->bhqk", q, k) / 2, -1)
    y = torch.einsum("bhqk,bhke,dhe->bqd", shares, v, w["o.weight"].view(16, 4, 4)) + w["o.bias"]
    x = torch.addcmul(x, parts[:, 2], y)
    y = torch.addcmul(parts[:, 3], F.layer_norm(x, (16,), eps=1e-6), 1 + parts[:, 4])
    y = F.linear(
        F.gelu(F.linear(y, w["fc1.weight"], w["fc1.bias"]), approximate="tanh"), w["fc2.weight"], w["fc2.bias"]
    )
    return torch.addcmul(x, parts[:, 2 if mistake == "the gate of attention twice" else 5], y)


MODULATED = r"norm1|scale1|shift1|^qkv$|chunk|^ada$|scale2"
port("modulated", Modulated, modulated, (TEXT, drawn(2, 8, seed=5)), {
    "": (),
    "scale before shift": (MODULATED, ANY, "order|exchang|scale|shift|chunk|split|row|chang"),
    "one is not added": (MODULATED, ANY, r"\b1|add|left out"),
    "the gate of attention twice": (r"gate2|^fc2$|chunk", ANY, "gate|chunk|split|chang|slice|row"),
})  # fmt: skip


# Steps of Heun's method with a scaled denoiser: by slopes, or from one clean signal to the next.


def solved(b: bool, mistake: str) -> Any:
    model: Any = made(lambda: nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6)))
    x, sigmas = drawn(3, 6) * 5, (5.0, 2.0, 0.5, 0.0)

    def clean(z: Tensor, s: float, right: bool = True) -> Any:
        total = (s**2 + 0.25) ** 0.5
        time = torch.full((3, 1), math.log(s) / 4 if right or mistake != "time without the quarter" else math.log(s))
        own = z if not right and mistake == "the input is not scaled" else z / total
        return 0.25 / total**2 * z + s * 0.5 / total * model(torch.cat((own, time), -1))

    def slopes() -> Any:
        z = x
        for s, after in pairwise(sigmas):
            d = (z - clean(z, s)) / s
            guess = z + (after - s) * d
            if after > 0:
                other = (guess - clean(guess, after)) / after
                z = z + (after - s) * (0.5 * d + 0.5 * other)
            else:
                z = guess
        return z

    def signals() -> Any:
        z = x
        for s, after in pairwise(sigmas):
            one = clean(z, s, right=False)
            guess = torch.lerp(one, z, after / s)
            if after > 0:
                two = clean(guess, after, right=False)
                half = 1.0 if mistake == "the second slope alone" else 0.5
                z = z + (after - s) * ((1 - half) * (z - one) / s + half * (guess - two) / after)
            else:
                z = guess
        return z

    return signals if b else slopes


SOLVED = r"clean|own|time|total|model|\b0$|guess|z \+"
both("solver", solved, {
    "": (),
    "time without the quarter": (SOLVED, f"{ANY} input", ""),
    "the input is not scaled": (SOLVED, ANY, "div|left out|scal|own"),
    "the second slope alone": (SOLVED, ANY, r"0\.5|mul|add|\b1|left out"),
})  # fmt: skip


# A codebook, whose gradients pass straight through.


def coded(b: bool, mistake: str) -> Any:
    encoder, book = made(lambda: nn.Linear(6, 4)), made(lambda: nn.Embedding(10, 4))
    decoder, x = made(lambda: nn.Linear(4, 6)), drawn(7, 6)

    def one() -> Any:
        z = encoder(x)
        nearest = torch.cdist(z, book.weight).argmin(-1)
        q = book(nearest)
        loss = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        loss = loss + F.mse_loss(decoder(z + (q - z).detach()), x)
        loss.backward()
        return loss

    def other() -> Any:
        z = F.linear(x, encoder.weight, encoder.bias)
        away = z.pow(2).sum(1, keepdim=True) - 2 * z @ book.weight.T + book.weight.pow(2).sum(1)
        q = F.one_hot(away.argmin(1), 10).float() @ book.weight
        factors = (0.25, 1.0) if mistake == "terms change places" else (1.0, 0.25)
        book_term, commitment = (q - z.detach()).pow(2).mean(), (q.detach() - z).pow(2).mean()
        through = q if mistake == "not straight through" else q.detach() + z - z.detach()
        y = F.linear(through, decoder.weight, decoder.bias)
        loss = (y - x).pow(2).mean() + factors[0] * book_term + factors[1] * commitment
        loss.backward()
        return loss

    return other if b else one


CODES = "loss|backward|mse|detach|embedding|nearest|^0$|encoder|decoder|book"
both("codebook", coded, {
    "": (),
    "terms change places": (CODES, RESULT, ""),
    "not straight through": (CODES, RESULT, ""),
}, trains=True)  # fmt: skip


# Losses of detectors: focal and of boxes.


def detected(b: bool, mistake: str) -> Any:
    model, x = made(lambda: nn.Linear(6, 7)), drawn(9, 6)
    truth = (torch.arange(27).view(9, 3) % 4 == 0).float()
    corners = drawn(9, 2, seed=4)
    boxes = torch.cat((corners, corners + drawn(9, 2, seed=5).abs() + 0.5), -1)

    def found() -> tuple[Tensor, Tensor]:
        logits, corner, size = model(x).split((3, 2, 2), -1)
        return logits, torch.cat((corner, corner + F.softplus(size)), -1)

    def one() -> Any:
        logits, mine = found()
        p, each = torch.sigmoid(logits), F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        p_t = p * truth + (1 - p) * (1 - truth)
        alpha = 0.25 * truth + 0.75 * (1 - truth)
        focal = (alpha * each * (1 - p_t) ** 2).sum() / truth.sum()
        low, high = torch.maximum(mine[:, :2], boxes[:, :2]), torch.minimum(mine[:, 2:], boxes[:, 2:])
        shared = (high - low).clamp(min=0).prod(-1)
        union = (mine[:, 2:] - mine[:, :2]).prod(-1) + (boxes[:, 2:] - boxes[:, :2]).prod(-1) - shared
        hull = torch.maximum(mine[:, 2:], boxes[:, 2:]) - torch.minimum(mine[:, :2], boxes[:, :2])
        hull = hull.prod(-1)
        overlap = shared / union - (hull - union) / hull
        loss = focal + (1 - overlap).mean()
        loss.backward()
        return loss

    def other() -> Any:
        logits, mine = found()
        signed = torch.where(truth > 0, logits, -logits)
        power = 1 if mistake == "another power" else 2
        weights = torch.where(truth > 0, 0.25, 1.0 if mistake == "negatives have no weight" else 0.75)
        focal = (-weights * torch.sigmoid(-signed).pow(power) * F.logsigmoid(signed)).sum() / truth.count_nonzero()
        left, top, right, bottom = mine.unbind(-1)
        l2, t2, r2, b2 = boxes.unbind(-1)
        wide = (torch.min(right, r2) - torch.max(left, l2)).relu()
        shared = wide * (torch.min(bottom, b2) - torch.max(top, t2)).relu()
        union = (right - left) * (bottom - top) + (r2 - l2) * (b2 - t2) - shared
        hull = (torch.max(right, r2) - torch.min(left, l2)) * (torch.max(bottom, b2) - torch.min(top, t2))
        extra = (hull - union) / (union if mistake == "divided by the union" else hull)
        loss = focal + 1 - (shared / union).mean() + extra.mean()
        loss.backward()
        return loss

    return other if b else one


FOCAL = r"focal|alpha|p_t|each|loss"
both("detector", detected, {
    "": (),
    "another power": (FOCAL, RESULT, r"\b[12]\b|pow|left out|mul"),
    "negatives have no weight": (FOCAL, RESULT, r"0\.75|\b1|mul|alpha"),
    "divided by the union": (r"hull|overlap|union|loss", RESULT, "div|hull|union|chang|operand"),
}, trains=True)  # fmt: skip


# Adapters that differ from request to request.

ADAPTER = torch.tensor([2, 0, 1, 2])


class Adapted(Model):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(12, 10), nn.Linear(10, 5)
        self.down, self.up = nn.Parameter(torch.zeros(3, 2, 12)), nn.Parameter(torch.zeros(3, 10, 2))

    def forward(self, x: Tensor) -> Any:
        rows = [
            F.linear(row, self.base.weight + 2.0 * self.up[n] @ self.down[n]) for n, row in zip(ADAPTER, x, strict=True)
        ]
        return self.head(F.gelu(torch.stack(rows) + self.base.bias))


def adapted(w: Any, x: Tensor, mistake: str) -> Any:
    own = ADAPTER.flip(0) if mistake == "requests are turned round" else ADAPTER
    factor = 4 / 2**0.5 if mistake == "by the root of the rank" else 4 / 2
    down, up = w["down"].index_select(0, own), w["up"].index_select(0, own)
    y = torch.baddbmm(F.linear(x, w["base.weight"], w["base.bias"]), x @ down.mT, up.mT, alpha=factor)
    return F.linear(F.gelu(y), w["head.weight"], w["head.bias"])


LOW = r"rows|^base$|up\[|linear|stack|gelu"
port("adapters", Adapted, adapted, (drawn(4, 3, 12),), {
    "": (),
    "requests are turned round": (LOW, f"{ANY} weight", ""),
    "by the root of the rank": (LOW, f"{ANY} weight", r"2\.8|1\.41|\b2|mul|weight|scal|factor"),
})  # fmt: skip


# Gradients of each sample, which are clipped: one by one, or mapped.


def private(b: bool, mistake: str) -> Any:
    model: Any = made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    x, y = drawn(5, 6), torch.tensor([0, 2, 1, 1, 0])

    def one() -> Any:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for row, label in zip(x, y, strict=True):
            grads = torch.autograd.grad(F.cross_entropy(model(row[None]), label[None]), list(model.parameters()))
            norm = torch.sqrt(sum((g.pow(2).sum() for g in grads), torch.zeros(())))
            factor = (0.7 / (norm + 1e-6)).clamp(max=1.0)
            for old, g in zip(total, grads, strict=True):
                old.add_(g * factor)
        return [t / 5 for t in total]

    def mapped() -> Any:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(w: Any, row: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, w, (row[None],)), label[None])

        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        if mistake == "clipped after the mean":
            means = [g.mean(0) for g in grads.values()]
            norm = torch.stack([g.norm() for g in means]).norm()
            return [g * torch.clamp(0.7 / (norm + 1e-6), max=1.0) for g in means]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = torch.clamp(0.7 / (norms + 1e-6), max=1.0)
        return [torch.einsum("n,n...->...", factors, g) / 5 for g in grads.values()]

    return mapped if b else one


both("private", private, {
    "": (),
    "clipped after the mean": (r"factor|norm|total|old|t / 5", RESULT, ""),
}, trains=True)  # fmt: skip


# Operators with gradients of their own.


class OwnNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mistake: str) -> Any:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        ctx.mistake = mistake
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight, scale), grad = ctx.saved_tensors, grads[0]
        inner = grad * weight
        out = inner * scale
        if ctx.mistake != "the scale is constant":
            out = out - x * scale.pow(3) * (inner * x).mean(-1, keepdim=True)
        return out, (grad * x * scale).flatten(0, -2).sum(0), None


class OwnGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, mistake: str) -> Any:
        ctx.save_for_backward(gate, up)
        ctx.mistake = mistake
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate, up), grad = ctx.saved_tensors, grads[0]
        s = torch.sigmoid(gate)
        slope = s if ctx.mistake == "the slope is a sigmoid" else s * (1 + gate * (1 - s))
        return grad * up * slope, grad * gate * s, None


own_norm: Any = OwnNorm.apply
own_gate: Any = OwnGate.apply


def by_hand(b: bool, mistake: str) -> Any:
    norm, gate, up, down = made(lambda: Rms(16)), *(made(lambda: nn.Linear(16, 16)) for _ in range(3))
    up.weight.data, down.weight.data = drawn(16, 16, seed=3) / 4, drawn(16, 16, seed=4) / 4
    x, first = drawn(5, 16), made(lambda: nn.Linear(16, 16))

    def program() -> Any:
        y = first(x)
        y = own_norm(y, norm.weight, mistake) if b else norm(y)
        y = own_gate(gate(y), up(y), mistake) if b else F.silu(gate(y)) * up(y)
        loss = down(y).square().mean()
        loss.backward()
        return loss

    return program


both("own gradients", by_hand, {
    "": (),
    "the scale is constant": (r"norm|^1$|rms|first|gate\(y\)|rsqrt|backward", RESULT, ""),
    "the slope is a sigmoid": (r"silu|gate|norm", RESULT, "silu|sigmoid|gradient"),
}, trains=True)  # fmt: skip


# Optimizers: matrices that are made orthogonal, and signs.


def orthogonal(b: bool, mistake: str) -> Any:
    model: Any = made(lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 4, bias=False)))
    x, goal, (a, c, d) = drawn(3, 5, 6), drawn(3, 5, 4, seed=2), (3.4445, -4.775, 2.0315)

    def wide(g: Tensor) -> Any:
        z = g.T if g.size(0) > g.size(1) else g
        z = z / (z.norm() + 1e-7)
        for _ in range(3):
            square = z @ z.T
            z = a * z + (c * square + d * square @ square) @ z
        return z.T if g.size(0) > g.size(1) else z

    def plain(g: Tensor) -> Any:
        z = g / g.square().sum().add(1e-14).sqrt()
        for _ in range(2 if mistake == "an iteration less" else 3):
            square = z.T @ z
            z = torch.addmm(z, z, torch.addmm(square, square, square, beta=c, alpha=d), beta=a)
        return z

    def program() -> Any:
        moments = [torch.zeros_like(p) for p in model.parameters()]
        for n in range(3):
            loss = F.mse_loss(model(x[n]), goal[n])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g, m in zip(model.parameters(), grads, moments, strict=True):
                    m.lerp_(g, 0.05) if b else m.mul_(0.95).add_(g, alpha=0.05)
                    ahead = m if b and mistake == "not ahead" else torch.lerp(g, m, 0.95) if b else g * 0.05 + m * 0.95
                    size = max(1, p.size(0) / p.size(1)) ** (0 if b and mistake == "not by the shape" else 0.5)
                    p.add_((plain if b else wide)(ahead), alpha=-0.1 * size)
        return [p.detach().clone() for p in model.parameters()]

    return program


both("orthogonal", orthogonal, {
    "": (),
    "an iteration less": (rf"z\b|square|{UPDATE}", RESULT, ""),
    "not ahead": (rf"ahead|g \*|z\b|{UPDATE}", RESULT, "lerp|mul|add|left out|0.95|0.05"),
    "not by the shape": (rf"p\.add_|{UPDATE}", RESULT, r"alpha|0\.1"),
}, trains=True)  # fmt: skip


# Experts whose tokens are sorted, with what balances them.


class Experts(Model):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(16, 4, bias=False), nn.Linear(16, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        chances = self.router(x).softmax(-1)
        shares, chosen = chances.topk(2)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            share = (shares * (chosen == n)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        used = F.one_hot(chosen, 4).sum(1).float().mean(0)
        balance = 4 * (used * chances.mean(0)).sum()
        return self.head(x + out), balance


def in_order(w: Any, x: Tensor, mistake: str) -> Any:
    chances = (x @ w["router.weight"].T).softmax(-1)
    shares, chosen = chances.topk(2)
    places = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    mine, done = x[places // 2].split(counts.tolist()), []
    for n, rows in enumerate(mine):
        y = F.gelu(F.linear(rows, w[f"experts.{n}.0.weight"], w[f"experts.{n}.0.bias"]))
        done.append(F.linear(y, w[f"experts.{n}.2.weight"], w[f"experts.{n}.2.bias"]))
    if mistake == "not brought back":
        y = torch.cat(done)
    else:
        y = torch.empty(2 * len(x), 16).index_copy_(0, places, torch.cat(done))
    shares = shares.flip(1) if mistake == "shares change places" else shares
    y = (y.view(-1, 2, 16) * shares[..., None]).sum(1)
    count = torch.bincount(chosen[:, 0], minlength=4) if mistake == "the first choice counts" else counts
    balance = 4 * (count / len(x) @ chances.mean(0))
    return F.linear(x + y, w["head.weight"], w["head.bias"]), balance


ROUTED = r"experts|out|share|expert\(x\)|^head$"
port("experts", Experts, in_order, (drawn(11, 16),), {
    "": (),
    "not brought back": (ROUTED, ANY, ""),
    "shares change places": (ROUTED, ANY, ""),
    "the first choice counts": (r"used|balance", ANY, ""),
})  # fmt: skip


# A window of keys in a ring.


class Windowed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = Rms(16), Rms(16)
        projections(self, ("q", 16, 16), ("k", 16, 8), ("v", 16, 8), ("o", 16, 16), ("head", 16, 7))

    def forward(self, x: Tensor) -> Any:
        y, turns = self.norm(x), angles(8, 4)
        q, k, v = halves(split(self.q(y), 4), turns), halves(split(self.k(y), 4), turns), split(self.v(y), 4)
        seen = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.head(self.last(x + self.o(joined(attended))))


def in_a_ring(w: Any, x: Tensor, mistake: str) -> Any:
    size = 4 if mistake == "a slot more" else 3
    keys, values, out = torch.zeros(2, 2, size, 4), torch.zeros(2, 2, size, 4), []
    for t in range(8):
        y = rms(x[:, t], w["norm.weight"])
        q, k, v = (F.linear(y, w[f"{name}.weight"]).unflatten(-1, (-1, 4)) for name in "qkv")
        turns = angles(8, 4)[t % size if mistake == "positions wrap" else t]
        keys[:, :, t % size] = halves(k, turns)
        slot = t % size - 1 if mistake == "values are a slot early" and t == 5 else t % size
        values[:, :, slot] = v
        own = halves(q, turns).unflatten(1, (2, 2))
        scores = (own @ keys.mT) / 2.0
        scores[..., t + 1 :] = -torch.inf
        y = (scores.softmax(-1) @ values).flatten(1)
        out.append(rms(x[:, t] + y @ w["o.weight"].T, w["last.weight"]) @ w["head.weight"].T)
    return torch.stack(out, 1)


TURNED = rf"turns|halves|cos|sin|angles|arange|{ATTENTION}"
port("ring", Windowed, in_a_ring, (TEXT,), {
    "": (),
    "a slot more": (rf"seen|{ATTENTION}", ANY, "mask|diagonal"),
    "positions wrap": (TURNED, ANY, "rot|position|cos|sin|arange|angle"),
    "values are a slot early": (rf"^v$|{ATTENTION}", ANY, ""),
})  # fmt: skip


# Sequences of unlike lengths, read in both directions.

LENGTHS = torch.tensor([7, 4, 5])


class Directions(Model):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        mean = y.sum(1) / LENGTHS[:, None]
        return self.head(mean)


def directions(w: Any, x: Tensor, mistake: str) -> Any:
    total = torch.zeros(3, 16)
    for way, suffix in ((0, ""), (1, "_reverse")):
        h = torch.zeros(3, 8)
        for t in range(6, -1, -1) if way else range(7):
            live = (t < LENGTHS)[:, None]
            a = F.linear(x[:, t], w[f"rnn.weight_ih_l0{suffix}"], w[f"rnn.bias_ih_l0{suffix}"]).chunk(3, -1)
            c = F.linear(h, w[f"rnn.weight_hh_l0{suffix}"], w[f"rnn.bias_hh_l0{suffix}"]).chunk(3, -1)
            r, z = torch.sigmoid(a[0] + c[0]), torch.sigmoid(a[1] + c[1])
            new = torch.lerp(torch.tanh(a[2] + r * c[2]), h, z)
            h = new if way and mistake == "the way back begins in the padding" else torch.where(live, new, h)
            total[:, 8 * way : 8 * way + 8] += h * live
    total = total / (7 if mistake == "the mean of all steps" else LENGTHS[:, None])
    return F.linear(total, w["head.weight"], w["head.bias"])


port("both ways", Directions, directions, (drawn(3, 7, 6),), {
    "": (),
    "the way back begins in the padding": ("rnn|gru|pack", f"{ANY} result unknown", ""),
    "the mean of all steps": (r"mean|LENGTHS|^head$", ANY, "div|mean|7|LENGTHS"),
})  # fmt: skip


# Tokens that are likely enough: by a sorted sum, or by a limit.


def likely(b: bool, mistake: str) -> Any:
    model, x = made(lambda: nn.Linear(6, 12)), drawn(4, 6) * 2

    def scattered() -> Any:
        logits = model(x) / 0.8
        values, places = logits.sort(descending=True)
        gone = values.softmax(-1).cumsum(-1) > 0.8
        gone[:, 1:] = gone[:, :-1].clone()
        gone[:, 0] = False
        return logits.masked_fill(gone.scatter(1, places, gone), -torch.inf).softmax(-1)

    def limited() -> Any:
        warmth = 1 / 0.8 if mistake == "divided by the inverse" else 0.8
        p = (model(x) / warmth).softmax(-1)
        values = p.sort(descending=True).values
        before = values.cumsum(-1)
        kept = before <= 0.8 if mistake == "the one that crosses is dropped" else before - values <= 0.8
        kept[:, 0] = True
        least = values.masked_fill(~kept, 2.0).amin(-1, keepdim=True)
        p = torch.where(p >= least, p, 0.0)
        return p if mistake == "the rest is not shared" else p / p.sum(-1, keepdim=True)

    return limited if b else scattered


LIKELY = "gone|softmax|logits|scatter|cumsum"
both("likely", likely, {
    "": (),
    "divided by the inverse": (rf"0\.8|{LIKELY}", ANY, r"1\.25|0\.8|div|mul"),
    "the one that crosses is dropped": (LIKELY, ANY, ""),
    "the rest is not shared": (LIKELY, ANY, "softmax|div|left out|"),
})  # fmt: skip


# Beams, whose caches are put in order.


def beams(b: bool, mistake: str) -> Any:
    model: Any = made(Windowed)
    embed, first = drawn(7, 16, seed=6), torch.tensor([[1, 4], [1, 5]])

    def choose(scores: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found, places = (scores[:, None] + logits.log_softmax(-1)).flatten().topk(2)
        return found, places // 7, places % 7

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, enable_gqa=True)

    def project(tokens: Tensor, start: int) -> Any:
        x = embed[tokens]
        y, turns = model.norm(x), angles(8, 4)[start : start + tokens.size(1)]
        return x, halves(split(model.q(y), 4), turns), halves(split(model.k(y), 4), turns), split(model.v(y), 4)

    def again() -> Any:
        tokens, scores = first, torch.zeros(2)
        for _ in range(4):
            x, q, k, v = project(tokens, 0)
            logits = model.head(model.last(x + model.o(joined(attend(q, k, v)))))[:, -1]
            scores, beam, token = choose(scores, logits)
            tokens = torch.cat((tokens[beam], token[:, None]), 1)
        return scores

    def cached() -> Any:
        x, q, keys, values = project(first, 0)
        scores = torch.zeros(2)
        for n in range(4):
            y = x[:, -1:] + model.o(joined(attend(q[:, :, -1:], keys, values)))
            scores, beam, token = choose(scores, model.head(model.last(y))[:, -1])
            if not (mistake == "caches stay" and n > 0):
                keys, values = keys.index_select(0, beam), values.index_select(0, beam)
            x, q, k, v = project(token[:, None], n + 2)
            keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        return scores

    return cached if b else again


both("beams", beams, {"": (), "caches stay": (rf"{ATTENTION}|attend|beam|tokens", ANY + " input unknown", "")})


# Points and their neighbours, molecules and their distances.


class Edges(Model):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.head = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(0.2)), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        near = torch.cdist(x, x).topk(4, largest=False).indices
        others = x[torch.arange(2)[:, None, None], near]
        own = x[:, :, None].expand_as(others)
        y = self.mlp(torch.cat((own, others - own), -1)).amax(2)
        return self.head(y).amax(1)


def by_points(w: Any, x: Tensor, mistake: str) -> Any:
    """What depends on one point is computed once for each."""
    away = (x[:, :, None] - x[:, None]).square().sum(-1)
    first = 1 if mistake == "not with itself" else 0
    near = away.argsort(-1)[..., first : 4 + first]
    one, two = w["mlp.0.weight"].split(3, 1)
    mine = x @ (one if mistake == "not relative" else one - two).T + w["mlp.0.bias"]
    others = torch.gather((x @ two.T)[:, None].expand(-1, 9, -1, -1), 2, near[..., None].expand(-1, -1, -1, 12))
    y = F.leaky_relu(mine[:, :, None] + others, 0.2)
    y = y.mean(2) if mistake == "the mean of neighbours" else y.max(2).values
    return F.linear(y, w["head.weight"], w["head.bias"]).max(1).values


NEAR = r"mlp|others|own|near|topk|amax"
port("points", Edges, by_points, (drawn(2, 9, 3),), {
    "": (),
    "not with itself": (NEAR, ANY, ""),
    "not relative": (NEAR, f"{ANY} weight", "sub|left out|weight|"),
    "the mean of neighbours": ("amax", ANY, "mean"),
})  # fmt: skip


# Attention as a difference, with waves for longer texts.


def waves(smooth: bool = True) -> Tensor:
    """Frequencies for texts four times as long, as Llama 3 makes them: one after another."""
    found = []
    for n in range(4):
        frequency = 100 ** (-n / 4)
        length = 2 * math.pi / frequency
        part = (16 / length - 1) / 3
        if length < 16 / 4:
            found.append(frequency)
        elif length > 16:
            found.append(frequency / 4)
        else:
            found.append((1 - part) * frequency / 4 + part * frequency)
    return torch.tensor(found)


class Difference(Model):
    def __init__(self) -> None:
        super().__init__()
        projections(self, ("q", 16, 32), ("k", 16, 32), ("v", 16, 16), ("o", 16, 16))
        self.one, self.two, self.norm = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8)), Rms(8)

    def forward(self, x: Tensor) -> Any:
        turns = torch.outer(torch.arange(8).float(), waves())
        q, k, v = halves(split(self.q(x), 8), turns), halves(split(self.k(x), 8), turns), split(self.v(x), 8)
        mask = torch.full((8, 8), -torch.inf).triu(1)
        shares = (q @ k.mT * 8**-0.5 + mask).softmax(-1).unflatten(1, (2, 2))
        weight = torch.exp((self.one * self.two).sum()) - 0.5
        attended = (shares[:, :, 0] - weight * shares[:, :, 1]) @ v
        return x + self.o(joined(self.norm(attended) * (1 - 0.3)))


def difference(w: Any, x: Tensor, mistake: str) -> Any:
    frequencies = 100 ** (-torch.arange(4) / 4)
    part = ((16 * frequencies / (2 * math.pi) - 1) / 3).clamp(0, 1)
    part = part.round() if mistake == "waves are not blended" else part
    turns = torch.outer(torch.arange(8).float(), torch.lerp(frequencies / 4, frequencies, part))
    q, k = (halves(split(x @ w[f"{name}.weight"].T, 8), turns) for name in "qk")
    v = split(x @ w["v.weight"].T, 8).repeat_interleave(2, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    weight = (w["one"] @ w["two"]).exp() - (0.3 if mistake == "another weight" else 0.5)
    y = y[:, :2] - weight * y[:, 2:] if mistake == "heads in halves" else y[:, ::2] - weight * y[:, 1::2]
    y = F.rms_norm(y, (8,), w["norm.weight"], 1e-6)
    y = y if mistake == "not scaled by the rest" else 0.7 * y
    return x + joined(y) @ w["o.weight"].T


port("difference", Difference, difference, (TEXT,), {
    "": (),
    "waves are not blended": (rf"waves|turns|halves|cos|sin|angles|{ATTENTION}", f"{ANY} input", ""),
    "another weight": (r"weight =|0\.5|shares|attended", ANY, r"0\.3|sub"),
    "heads in halves": (r"shares|attended|softmax|^norm$", ANY, ""),
    "not scaled by the rest": (r"0\.3|^o$|norm", ANY, r"0\.7|mul|left out|\b1"),
})  # fmt: skip


# ConvNeXt: norms of channels, and of responses.


class ConvNext(Model):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8, eps=1e-6)
        self.up, self.down, self.head = nn.Linear(8, 24), nn.Linear(24, 8), nn.Linear(8, 4)
        self.gamma, self.beta = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Any:
        y = F.gelu(self.up(self.norm(self.wide(x).permute(0, 2, 3, 1))))
        size = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        size = size / (size.mean(dim=-1, keepdim=True) + 1e-6)
        y = self.gamma * (y * size) + self.beta + y
        x = x + self.down(y).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


def convnext(w: Any, x: Tensor, mistake: str) -> Any:
    y = F.conv2d(x, w["wide.weight"], w["wide.bias"], padding="same", groups=8)
    if mistake == "the norm is of the image":
        y = F.group_norm(y, 1, w["norm.weight"], w["norm.bias"], 1e-6)
    else:
        y = y - y.mean(1, keepdim=True)
        y = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
        y = y * w["norm.weight"][:, None, None] + w["norm.bias"][:, None, None]
    y = F.gelu(F.conv2d(y, w["up.weight"][..., None, None], w["up.bias"]))
    size = y.square().sum((2, 3)).sqrt()
    size = size / (size.mean(0 if mistake == "the mean of the batch" else 1, keepdim=True) + 1e-6)
    factor = w["gamma"] * size if mistake == "nothing is added" else w["gamma"] * size + 1
    y = y * factor[..., None, None] + w["beta"][:, None, None]
    x = x + F.conv2d(y, w["down.weight"][..., None, None], w["down.bias"])
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), w["head.weight"], w["head.bias"])


port("convnext", ConvNext, convnext, (drawn(2, 8, 5, 5),), {
    "": (),
    "the norm is of the image": ("^norm$|norm|^up$", ANY, "norm|dim|group|shape"),
    "the mean of the batch": ("size|gamma", ANY, "dim|mean"),
    "nothing is added": (r"gamma|\+ y|^down$", ANY, "add|left out"),
})  # fmt: skip


# Losses of pairs, of odds and with weights of classes.


def sigmoids(b: bool, mistake: str) -> Any:
    image, text, x, y = made(lambda: nn.Linear(6, 8)), made(lambda: nn.Linear(5, 8)), drawn(6, 6), drawn(6, 5, seed=2)
    scale, bias = (nn.Parameter(torch.tensor(v)) for v in (1.0, -2.0))

    def one() -> Any:
        logits = F.normalize(image(x), dim=-1) @ F.normalize(text(y), dim=-1).T * scale.exp() + bias
        signs = 2 * torch.eye(6) - 1
        loss = -F.logsigmoid(signs * logits).sum(-1).mean()
        loss.backward()
        return loss

    def other() -> Any:
        p, q = (z / z.norm(dim=-1, keepdim=True) for z in (image(x), text(y)))
        loss = torch.zeros(())
        for turn in range(6):
            each = (p * q.roll(turn, 0)).sum(-1) * scale.exp()
            each = each - bias if mistake == "the bias is subtracted" else each + bias
            loss = loss + F.softplus(-each if turn == 0 else each).sum()
        loss = loss / (36 if mistake == "the mean of all pairs" else 6)
        loss.backward()
        return loss

    return other if b else one


PAIRED = r"loss|logits|sigmoid|backward|mean"
both("sigmoids", sigmoids, {
    "": (),
    "the bias is subtracted": (PAIRED, RESULT, "sub|add|bias|alpha|neg"),
    "the mean of all pairs": (PAIRED, RESULT, "mean|div|mul|dim|6"),
}, trains=True)  # fmt: skip


def odds(b: bool, mistake: str) -> Any:
    model = made(lambda: nn.Linear(6, 9))
    x, tokens = drawn(4, 7, 6), torch.randint(0, 9, (4, 7), generator=torch.Generator().manual_seed(1))
    seen = torch.arange(7) < torch.tensor([6, 3, 5, 7])[:, None]

    def one() -> Any:
        logs = model(x).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
        mean = (logs * seen).sum(-1) / seen.sum(-1)
        chosen, rejected = mean.chunk(2)
        ratio = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        loss = -chosen.mean() - 0.2 * F.logsigmoid(ratio).mean()
        loss.backward()
        return loss

    def other() -> Any:
        flat, labels = model(x).flatten(0, 1), tokens.masked_fill(~seen, -100).flatten()
        each = F.cross_entropy(flat, labels, reduction="none").view(4, 7).sum(1)
        each = each if mistake == "not by length" else each / seen.sum(1)
        good, bad = each[:2], each[2:]
        ratio = bad - good if mistake == "not of odds" else torch.expm1(bad).log() - torch.expm1(good).log()
        loss = good.sum() / 2 + 0.2 * F.softplus(-ratio).mean()
        loss.backward()
        return loss

    return other if b else one


ODDS = r"mean|ratio|loss|seen|chosen|backward|log1p"
both("odds", odds, {
    "": (),
    "not by length": (ODDS, RESULT, "div|left out|sum"),
    "not of odds": (ODDS, RESULT, "log1p|sub|left out|log"),
}, trains=True)  # fmt: skip


def classes(b: bool, mistake: str) -> Any:
    model, x, y = made(lambda: nn.Linear(6, 4)), drawn(7, 6), torch.tensor([0, 3, 1, 1, 2, 0, 3])
    weights = torch.tensor([1.0, 0.5, 2.0, 0.2])

    def program() -> Any:
        if b:
            logs = F.log_softmax(model(x), -1)
            each = -(F.one_hot(y, 4) * logs).sum(-1) * weights[y]
            loss = each.mean() if mistake == "the mean of all" else each.sum() / weights[y].sum()
        else:
            loss = F.cross_entropy(model(x), y, weights)
        loss.backward()
        return loss

    return program


both("classes", classes, {
    "": (),
    "the mean of all": ("cross_entropy|nll|loss|backward", RESULT, "mean|div|mul|weight|sum|reduction|gradient"),
}, trains=True)  # fmt: skip


# Pixels between pixels.


class Warped(Model):
    def __init__(self) -> None:
        super().__init__()
        self.place, self.conv = nn.Linear(12, 6), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        turn = torch.tanh(self.place(x.mean(-1).flatten(1)[:, :12])).view(2, 2, 3)
        grid = F.affine_grid(turn, [2, 3, 6, 6], align_corners=False)
        return self.conv(F.grid_sample(x, grid, align_corners=False))


def warped(w: Any, x: Tensor, mistake: str) -> Any:
    turn = F.linear(x.mean(-1).flatten(1)[:, :12], w["place.weight"], w["place.bias"]).tanh().view(2, 2, 3)
    centres = (torch.arange(6) * 2 + 1) / 6 - 1
    across, down = torch.meshgrid(centres, centres, indexing="xy")
    grid = torch.stack((across, down, torch.ones(6, 6)), -1) @ turn[:, None].mT
    if mistake == "across and down change places":
        grid = grid.flip(-1)
    places = (grid + 1) * 2.5 if mistake == "corners are aligned" else ((grid + 1) * 6 - 1) / 2
    low, total = places.floor(), torch.zeros(2, 3, 6, 6)
    part = places - low
    for dx in (0, 1):
        for dy in (0, 1):
            i, j = (low[..., 0] + dx).long(), (low[..., 1] + dy).long()
            inside = (i >= 0) & (i < 6) & (j >= 0) & (j < 6)
            share = (part[..., 0] if dx else 1 - part[..., 0]) * (part[..., 1] if dy else 1 - part[..., 1])
            picked = x[torch.arange(2)[:, None, None], :, j.clamp(0, 5), i.clamp(0, 5)].permute(0, 3, 1, 2)
            total = total + picked * (share * inside)[:, None]
    return F.conv2d(total, w["conv.weight"], w["conv.bias"])


port("warped", Warped, warped, (drawn(2, 3, 6, 6),), {
    "": (),
    "across and down change places": ("grid|^conv$", ANY, ""),
    "corners are aligned": ("grid|^conv$", ANY, "align_corners"),
})  # fmt: skip


# Weights that are divided by norms of theirs.


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one = parametrizations.weight_norm(nn.Linear(6, 8))
        self.two = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.silu(self.two(F.silu(self.one(x)))))


def normed(w: Any, x: Tensor, mistake: str) -> Any:
    g, v = w["one.parametrizations.weight.original0"], w["one.parametrizations.weight.original1"]
    size = v.norm() if mistake == "one norm for all rows" else v.square().sum(1, keepdim=True).sqrt()
    y = F.silu(F.linear(x, v, None) * (g / size).T + w["one.bias"])
    weight, (u, v) = w["two.parametrizations.weight.original"], (w[f"two.parametrizations.weight.0._{n}"] for n in "uv")
    if mistake == "a step more":
        v = F.normalize(weight.T @ u, dim=0)
        u = F.normalize(weight @ v, dim=0)
    y = F.silu(y @ (weight.T / (u @ weight @ v)) + w["two.bias"])
    return F.linear(y, w["head.weight"], w["head.bias"])


port("normed", Normed, normed, (drawn(5, 6),), {
    "": (),
    "one norm for all rows": (r"one|norm", f"{ANY} weight", "norm|dim|weight|"),
    "a step more": (r"two|norm|vdot|mv", f"{ANY} weight", ""),
})  # fmt: skip


# Scales that move from activations into weights.


class Smoothed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(16), *(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def smoothed(w: Any, x: Tensor, mistake: str) -> Any:
    s = torch.linspace(0.5, 4, 16)
    y = F.layer_norm(x, (16,), w["norm.weight"] / s, w["norm.bias"] / (1 if mistake == "the bias as it was" else s))
    gate = F.linear(y, w["gate.weight"] * s, w["gate.bias"])
    up = F.linear(y, w["up.weight"] * (s * s if mistake == "one is smoothed twice" else s), w["up.bias"])
    inner = F.silu(gate) * (up / s)
    return x + F.linear(inner, w["down.weight"] * (1 if mistake == "not taken back" else s), w["down.bias"])


port("smoothed", Smoothed, smoothed, (TEXT,), {
    "": (),
    "the bias as it was": (r"^norm$|^gate$|^up$", f"{ANY} weight", "bias|element"),
    "one is smoothed twice": (r"^up$", f"{ANY} weight", "weight|element|column|scal"),
    "not taken back": (r"^down$|silu|^up$", f"{ANY} weight", ""),
})  # fmt: skip
