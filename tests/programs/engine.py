"""A stand-in for vLLM on a CPU, with its processes, its operators and the shape of its calls, and a trainer for it.

A client starts an engine core, which starts workers that share the heads and the hidden units. Weights are behind
handles, keys and values in a paged cache, prompts and answers in calls of their own. Run with a folder, it answers one
prompt, and each process notes there how many calls of each operator it has made.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PROMPT, ANSWERS = [5, 17, 33, 7, 99, 120, 4, 8], 3
WIDTH, HEADS, KV, SIZE, HIDDEN, WORDS = 64, 4, 2, 16, 96, 128
PAGE, PAGES = 4, 4096  # tokens of a page, and pages of a cache
COUNTS: Counter[str] = Counter()

_handles: list[Tensor] = []  # weights, by their handles
_layers: dict[str, Attention] = {}
_libraries: list[torch.library.Library] = []
_CACHES = "Tensor key_cache, Tensor value_cache"
_SCHEMAS = {
    "_C::onednn_mm": ("(Tensor(a!) c, Tensor a, Tensor? bias, Tensor handler_tensor) -> ()", "CPU"),
    "_C::rms_norm": ("(Tensor(a!) out, Tensor input, Tensor? weight, float epsilon) -> ()", "CPU"),
    "_C::silu_and_mul": ("(Tensor(a!) out, Tensor input) -> ()", "CPU"),
    "_C::rotary_embedding": (
        "(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, Tensor cos_sin_cache, bool is_neox) "
        "-> ()",
        "CPU",
    ),
    "_C::cpu_attn_reshape_and_cache": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, str isa) -> ()",
        "CompositeImplicitAutograd",
    ),
    "_C::cpu_attention_with_kv_cache": (
        f"(Tensor query, {_CACHES}, Tensor(a!) output, Tensor query_start_loc, Tensor seq_lens, float scale, "
        "bool causal, Tensor block_table) -> ()",
        "CompositeImplicitAutograd",
    ),
    "vllm::unified_kv_cache_update": ("(Tensor key, Tensor value, str layer_name) -> Tensor", "CPU"),
    "vllm::unified_attention_with_output": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()",
        "CPU",
    ),
}
"""The operators as vLLM 0.32 defines them, but for settings that do not matter here, and the keys of their kernels."""


def onednn_mm(c: Tensor, a: Tensor, bias: Tensor | None, handler_tensor: Tensor) -> None:
    """Multiply by the weight of a handle."""
    c.copy_(a @ _handles[int(handler_tensor)])


def rms_norm(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Normalise."""
    out.copy_(F.rms_norm(input, input.shape[-1:], weight, epsilon))


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """Gate one half by the other."""
    gate, up = input.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """Rotate queries and keys, in place."""
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for each in (query, key):
        if each is not None:
            one, two = each.unflatten(-1, (-1, head_size)).chunk(2, -1)
            each.copy_(torch.cat([one * cos - two * sin, two * cos + one * sin], -1).flatten(1))


def cpu_attn_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, isa: str
) -> None:
    """Put keys and values into the caches `[pages, heads, tokens of a page, size]`."""
    for cache, given in ((key_cache, key), (value_cache, value)):
        cache.transpose(1, 2)[slot_mapping // PAGE, slot_mapping % PAGE] = given


def cpu_attention_with_kv_cache(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    block_table: Tensor,
) -> None:
    """Attend to the keys of each sequence."""
    for row, length in enumerate(seq_lens.tolist()):
        start, end = query_start_loc[row : row + 2].tolist()
        places = torch.arange(length)
        found = block_table[row, places // PAGE], slice(None), places % PAGE
        key, value = (cache[found].transpose(0, 1) for cache in (key_cache, value_cache))
        mask = places <= torch.arange(length - (end - start), length)[:, None]
        q = query[start:end].transpose(0, 1)[None]
        made = F.scaled_dot_product_attention(q, key[None], value[None], mask, scale=scale, enable_gqa=True)
        output[start:end] = made[0].transpose(0, 1)


def unified_kv_cache_update(key: Tensor, value: Tensor, layer_name: str) -> Tensor:
    """Let a layer put keys and values into its cache."""
    layer = _layers[layer_name]
    torch.ops._C.cpu_attn_reshape_and_cache(key, value, *layer.caches(), layer.batch.slots, "vec")
    return key.new_empty(0)


def unified_attention_with_output(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer_name: str) -> None:
    """Let a layer attend to what its cache has."""
    layer = _layers[layer_name]
    batch = layer.batch
    torch.ops._C.cpu_attention_with_kv_cache(
        query, *layer.caches(), output, batch.starts, batch.lengths, layer.scale, True, batch.table
    )


def define() -> None:
    """Define the operators, as a library does that is imported."""
    for name, (schema, key) in _SCHEMAS.items():
        space, _, short = name.partition("::")
        library = torch.library.Library(space, "FRAGMENT")
        library.define(short + schema)
        library.impl(short, _counted(name, globals()[short]), key)
        _libraries.append(library)


def _counted(name: str, function: Any) -> Any:
    def run(*args: Any) -> Any:
        COUNTS[name] += 1
        return function(*args)

    return run


class Settings(NamedTuple):
    """What may be planted: the base of positions, the epsilon of norms, the scale, and changes of two weights."""

    theta: float = 10000.0
    eps: float = 1e-6
    scale: float = 1 / math.sqrt(SIZE)
    lora: float = 0.0
    weight: float = 1.0


PLANTS = {
    "theta": Settings(theta=12000.0),
    "eps": Settings(eps=1e-2),
    "scale": Settings(scale=0.2),
    "lora": Settings(lora=0.3),
    "weight": Settings(weight=1.3),
}


def weights(settings: Settings) -> dict[str, Tensor]:
    """The weights, `[out, in]`, which trainer and engine have in common."""
    drawn = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=drawn) / math.sqrt(sizes[-1])

    found = {"embed": draw(WORDS, WIDTH), "head": draw(WORDS, WIDTH), "norm": 1 + draw(WIDTH)}
    for layer in range(2):
        shapes = {"q": (HEADS * SIZE, WIDTH), "k": (KV * SIZE, WIDTH), "v": (KV * SIZE, WIDTH)}
        shapes |= {"o": (WIDTH, HEADS * SIZE), "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
        found |= {f"{layer}.{name}": draw(*sizes) for name, sizes in shapes.items()}
        found |= {f"{layer}.norm{n}": 1 + draw(WIDTH) for n in (1, 2)}
    found["1.down"] = found["1.down"] + settings.lora * draw(WIDTH, 4) @ draw(4, HIDDEN)
    found["1.o"][3:9] *= settings.weight
    return found


def angles(positions: Tensor, theta: float) -> Tensor:
    """The angles of positions, `[..., SIZE / 2]`."""
    return positions[..., None] * theta ** (-torch.arange(0, SIZE, 2) / SIZE)


class Trained(nn.Module):
    """The model as a trainer has it: a pass over whole sequences, in operators of torch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.weights = nn.ParameterDict({k.replace(".", "_"): v for k, v in weights(settings).items()})

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of each token."""
        w, (theta, eps, scale, *_) = self.weights, self.settings
        found = angles(torch.arange(tokens.shape[1]), theta)
        cos, sin = torch.cat([found, found], -1).cos(), torch.cat([found, found], -1).sin()

        def rotated(x: Tensor) -> Tensor:
            one, two = x.chunk(2, -1)
            return x * cos + torch.cat([-two, one], -1) * sin

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

        x = F.embedding(tokens, w["embed"])
        for layer in "01":
            h = normed(x, w[f"{layer}_norm1"])
            q, k, v = (F.linear(h, w[f"{layer}_{n}"]).unflatten(-1, (-1, SIZE)).transpose(1, 2) for n in "qkv")
            q, k = rotated(q), rotated(k)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), w[f"{layer}_o"])
            h = normed(x, w[f"{layer}_norm2"])
            gated = F.silu(F.linear(h, w[f"{layer}_gate"])) * F.linear(h, w[f"{layer}_up"])
            x = x + F.linear(gated, w[f"{layer}_down"])
        return F.linear(normed(x, w["norm"]), w["head"])


class Batch(NamedTuple):
    """Where the tokens of a call lie in the caches."""

    slots: Tensor
    starts: Tensor
    lengths: Tensor
    table: Tensor


class Product(nn.Module):
    """A linear layer whose weight is behind a handle."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.handle, self.size = torch.tensor(len(_handles)), len(weight)
        _handles.append(weight.mT.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        made = x.new_empty(len(x), self.size)
        torch.ops._C.onednn_mm(made, x, None, self.handle)
        return made


class Norm(nn.Module):
    """A norm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        made = torch.empty_like(x)
        torch.ops._C.rms_norm(made, x, self.weight, self.eps)
        return made


class Attention(nn.Module):
    """An attention with a cache of its own, for its share of the heads."""

    def __init__(self, name: str, scale: float, workers: int) -> None:
        super().__init__()
        self.name, self.scale, self.heads, self.kv = name, scale, HEADS // workers, KV // workers
        self.cache = torch.zeros(PAGES, self.kv, 2 * PAGE, SIZE)
        self.batch: Any = None
        _layers[name] = self

    def caches(self) -> tuple[Tensor, ...]:
        """Keys and values, which share their pages."""
        return self.cache.chunk(2, dim=2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to all tokens so far."""
        q, k, v = (x.view(len(x), -1, SIZE) for x in (q, k, v))
        made = torch.empty_like(q)
        torch.ops.vllm.unified_kv_cache_update(k, v, self.name)
        torch.ops.vllm.unified_attention_with_output(q, k, v, made, self.name)
        return made.flatten(1)


class Layer(nn.Module):
    """A layer."""

    def __init__(self, w: dict[str, Tensor], layer: int, settings: Settings, rank: int, workers: int) -> None:
        super().__init__()

        def own(name: str, dim: int = 0) -> Tensor:
            return w[f"{layer}.{name}"].chunk(workers, dim)[rank]

        self.qkv_proj = Product(torch.cat([own("q"), own("k"), own("v")]))
        self.o_proj, self.down_proj = Product(own("o", 1)), Product(own("down", 1))
        self.gate_up_proj = Product(torch.cat([own("gate"), own("up")]))
        self.attn = Attention(f"layers.{layer}.attn", settings.scale, workers)
        self.norm1, self.norm2 = (Norm(w[f"{layer}.norm{n}"], settings.eps) for n in (1, 2))
        self.workers = workers

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
        """Compute the layer."""
        q, k, v = self.qkv_proj(self.norm1(x)).split(
            [n * SIZE for n in (self.attn.heads, self.attn.kv, self.attn.kv)], 1
        )
        torch.ops._C.rotary_embedding(positions, q, k, SIZE, cos_sin, True)
        x = x + self._summed(self.o_proj(self.attn(q, k, v)))
        both = self.gate_up_proj(self.norm2(x))
        gated = both.new_empty(len(x), both.shape[1] // 2)
        torch.ops._C.silu_and_mul(gated, both)
        return x + self._summed(self.down_proj(gated))

    def _summed(self, x: Tensor) -> Tensor:
        if self.workers > 1:
            torch.distributed.all_reduce(x)
        return x


class Served(nn.Module):
    """The model as an engine has it, or the share of it that one worker has."""

    def __init__(self, settings: Settings, rank: int = 0, workers: int = 1, *, compiled: bool = False) -> None:
        super().__init__()
        w = weights(settings)
        self.embed, self.head = nn.Embedding.from_pretrained(w["embed"]), Product(w["head"])
        self.layers: Any = nn.ModuleList(Layer(w, n, settings, rank, workers) for n in range(2))
        self.norm = Norm(w["norm"], settings.eps)
        found = angles(torch.arange(256), settings.theta)
        self.cos_sin = torch.cat([found.cos(), found.sin()], -1)
        self.scores = torch.compile(scores) if compiled else scores

    @torch.inference_mode()
    def forward(self, tokens: list[int], start: int) -> int:
        """The next token after some of one sequence, of which the pages are in reverse."""
        positions = torch.arange(start, start + len(tokens))
        table = torch.arange(7, -1, -1)[None]
        slots = table[0, positions // PAGE] * PAGE + positions % PAGE
        ends = torch.tensor([0, len(tokens)]), torch.tensor([start + len(tokens)])
        for layer in self.layers:
            layer.attn.batch = Batch(slots, *ends, table)
        x = self.embed(torch.tensor(tokens))
        for layer in self.layers:
            x = layer(x, positions, self.cos_sin)
        logits = self.head(self.norm(x)[-1:])
        return int(self.scores(logits).argmax())

    def answer(self) -> list[int]:
        """The answer to the prompt."""
        given, start, found = PROMPT, 0, list[int]()
        for _ in range(ANSWERS):
            found.append(self(given, start))
            start, given = start + len(given), found[-1:]
        return found


def scores(logits: Tensor) -> Tensor:
    """What the sampler makes of logits."""
    return (logits.float() / 0.7).softmax(-1) + 1e-9


def _noted(folder: str) -> None:
    Path(folder, f"{os.getpid()}.json").write_text(json.dumps(COUNTS))


def worker(pipe: Connection, folder: str, rank: int, workers: int, compiled: bool) -> None:
    """Compute what the core asks for, with the other workers, until it asks for nothing."""
    define()
    address = f"file://{folder}/workers"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=workers)
    model = Served(Settings(), rank, workers, compiled=compiled)
    while (given := pipe.recv()) is not None:
        pipe.send(model(*given))
    torch.distributed.destroy_process_group()
    _noted(folder)


def core(pipe: Connection, folder: str, workers: int, compiled: bool) -> None:
    """Answer what the client asks, until it sends a signal."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(workers)]
    started = [
        spawn.Process(target=worker, name=f"Worker-{rank}", args=(theirs, folder, rank, workers, compiled))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for each in started:
        each.start()

    def stop(*_: Any) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    try:
        while True:
            given, start, found = pipe.recv(), 0, list[int]()
            for _ in range(ANSWERS):
                for own, _ in pipes:
                    own.send((given, start))
                found.append([own.recv() for own, _ in pipes].pop())
                start, given = start + len(given), found[-1:]
            kept = torch.zeros(WORDS)
            kept[found] = 1  # a call of its own
            pipe.send(found)
    finally:
        for own, _ in pipes:
            own.send(None)
        for each in started:
            each.join()
        _noted(folder)


def main() -> None:
    """Ask the engine, and stop it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    engine = spawn.Process(target=core, name="EngineCore", args=(theirs, given.folder, given.workers, given.compiled))
    engine.start()
    mine.send(PROMPT)
    print(mine.recv())
    engine.terminate()
    engine.join()
    sys.exit(engine.exitcode)


if __name__ == "__main__":
    main()
