"""Pairs of programs with one planted cause or none, and what a comparison of their runs must say.

A verdict is `"module: cause"`, of the first run's modules. A pair has several where the runs do not hold enough to tell
one from another. Where it has none, nothing may be named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pair_models as m
import torch
from pair_models import Form, Plant, Weights
from torch import Tensor
from torch.nn import functional as F

Program = Callable[[], object]
NONE: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two programs.

    Attributes:
        name: The architecture, the form and the cause.
        programs: Returns both programs, with models of their own.
        verdicts: Those that are right; none if nothing may be named.
        by: The function that compares the runs.
        ops: What is recorded.
        trains: Whether the programs run with gradients.
    """

    name: str
    programs: Callable[[], tuple[Program, Program]]
    verdicts: tuple[str, ...]
    by: Literal["align", "diff"] = "align"
    ops: Any = "matmul"
    trains: bool = False


Edit = Callable[[Tensor], Tensor]
TOKENS = torch.arange(20).view(2, 10) * 7 % m.VOCABULARY


def edited(weights: Weights, edits: dict[str, Edit]) -> Weights:
    """A copy of the weights in which some are changed; an edit may change its argument or return another."""
    return weights | {name: edit(weights[name].clone()) for name, edit in edits.items()}


def element(value: Callable[[Tensor], Any]) -> Edit:
    def edit(w: Tensor) -> Tensor:
        w[3, 5] = value(w[3, 5])
        return w

    return edit


def row(value: Callable[[Tensor], Tensor]) -> Edit:
    def edit(w: Tensor) -> Tensor:
        w[4] = value(w[4])
        return w

    return edit


def garbage(w: Tensor) -> Tensor:
    return torch.randn(w.shape, generator=torch.Generator().manual_seed(9)) * w.std()


def exchanged(w: Tensor) -> Tensor:
    return w[torch.tensor([1, 0, *range(2, len(w))])]


def llama(
    form: Form = m.PLAIN,
    plant: Plant = m.NOTHING,
    edits: dict[str, Edit] | None = None,
    eager: bool = False,
    tokens: Tensor = TOKENS,
    run: Callable[[Any, Tensor], object] = lambda engine, tokens: engine(tokens),
) -> Callable[[], tuple[Program, Program]]:
    """`Llama` against `LlamaEngine`."""

    def programs() -> tuple[Program, Program]:
        trainer = m.seeded(lambda: m.Llama(eager=eager))
        engine = m.LlamaEngine(edited(trainer.state_dict(), edits or {}), form, plant)
        return lambda: trainer(TOKENS), lambda: run(engine, tokens)

    return programs


L = "layers.1."
PERMUTED = Form(permuted=True)
LLAMA = [
    Pair("llama: fused, nothing", llama(), NONE),
    Pair("llama: fused and permuted, nothing", llama(PERMUTED), NONE),
    Pair("llama: split in halves, nothing", llama(Form(split=True, fused=False)), NONE),
    Pair("llama: rotary neighbours, nothing", llama(Form(pairs=True)), NONE),
    Pair("llama: flat tokens, nothing", llama(Form(flat=True)), NONE),
    Pair("llama: eager against fused attention, nothing", llama(eager=True), NONE),
    Pair("llama: bfloat16, nothing", llama(Form(dtype=torch.bfloat16)), NONE),
    Pair("llama: cached decode, nothing", llama(run=lambda e, t: m.decoded(e, t, 6)), NONE),
    Pair("llama: two calls for a batch, nothing", llama(run=lambda e, t: [e(each[None]) for each in t]), NONE),
    Pair("llama: int8 by whole numbers, nothing", llama(Form(int8=True)), NONE),
    Pair(
        "llama: permuted, one element of down is 0.5 larger",
        llama(PERMUTED, edits={f"{L}mlp.down.weight": element(lambda w: w + 0.5)}),
        (f"{L}mlp.down: weight",),
    ),
    Pair(
        "llama: permuted, one element of q is 100",
        llama(PERMUTED, edits={f"{L}attn.q.weight": element(lambda w: 100)}),
        (f"{L}attn.q: weight",),
    ),
    Pair(
        "llama: permuted, a row of up times 1.001",
        llama(PERMUTED, edits={f"{L}mlp.up.weight": row(lambda w: w * 1.001)}),
        (f"{L}mlp.up: weight",),
    ),
    Pair(
        "llama: permuted, all of v is garbage",
        llama(PERMUTED, edits={f"{L}attn.v.weight": garbage}),
        (f"{L}attn.v: weight",),
    ),
    Pair("llama: scale of attention", llama(plant=Plant(1, scale=1.05)), (f"{L}attn: scale",)),
    Pair("llama: base of rotary positions", llama(plant=Plant(1, theta=9000.0)), (f"{L}attn: q k",)),
    Pair("llama: key heads are tiled", llama(plant=Plant(1, tiled=True)), (f"{L}attn: k v",)),
    Pair("llama: no causal mask", llama(plant=Plant(1, causal=False)), (f"{L}attn: mask",)),
    Pair("llama: a window of four keys", llama(plant=Plant(1, window=4)), (f"{L}attn: mask",)),
    Pair("llama: GELU for SiLU", llama(plant=Plant(1, activation=F.gelu)), (f"{L}mlp.down: input",)),
    Pair("llama: epsilon of a norm", llama(plant=Plant(1, eps=1e-3)), (f"{L}attn.q: input",)),
    Pair(
        "llama: cached decode, positions shifted by one",
        llama(plant=Plant(1, shift=1), run=lambda e, t: m.decoded(e, t, 6)),
        (f"{L}attn: q k", f"{L}attn: q", f"{L}attn: k", f"{L}attn.o: input"),
    ),
    Pair(
        "llama: cached decode, a stale key",
        llama(plant=Plant(1, stale=True), run=lambda e, t: m.decoded(e, t, 6)),
        (f"{L}attn: k", f"{L}attn.o: input"),
    ),
]
PAIRS: list[Pair] = [*LLAMA]

# What is said instead where that is known to be wrong.
WRONG: dict[str, str] = {
    "llama: flat tokens, nothing": "layers.0.attn: added",
    "llama: cached decode, nothing": "not compared: 15 products",
    "llama: two calls for a batch, nothing": "not compared: 15 products",
    "llama: int8 by whole numbers, nothing": "layers.0.attn: added",
    "llama: permuted, one element of q is 100": "layers.1.attn: added",
    "llama: permuted, all of v is garbage": "layers.1.attn: added",
    "llama: scale of attention": "layers.1.attn: added",
    "llama: base of rotary positions": "layers.1.attn: added",
    "llama: key heads are tiled": "layers.1.attn: added",
    "llama: no causal mask": "layers.1.attn: added",
    "llama: a window of four keys": "layers.1.attn: added",
    "llama: cached decode, positions shifted by one": "not compared: 15 products",
    "llama: cached decode, a stale key": "not compared: 15 products",
}
