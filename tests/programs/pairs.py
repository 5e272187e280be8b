"""Pairs of programs with one planted cause or none, and what a comparison of their runs must say.

A verdict is `"module: cause"`, of the first run's modules. A pair has several where the runs do not hold enough to tell
one from another. Where it has none, nothing may be named.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pair_models as m
import torch
import transformers
from outcomes import Pair, Program, planted
from pair_models import Form, Plant, Weights
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import hooks

Edit = Callable[[Tensor], Tensor]


PAIRS: list[Pair] = []

# What causes are called, by the names of pairs or else by the last word of a verdict: their kinds, and words for them.
_CAUSES: dict[str, tuple[str, str]] = {
    "wrong kernel": ("result", ""),
    "a bias$": ("weight", "bias"),
    "epsilon": ("argument", r"0\.001|1e-0?3"),
    "weight of a norm|patches|rows of up": ("weight", "weight|row|element|column"),
    "two change places": ("weight operand", "weight|row|change|exchange"),
    "base": ("argument operand", r"9,?000"),
    "GELU by tanh|gemma, erf": ("argument operator", "tanh|approximate|gelu"),
    "GELU": ("operator", "(?i)gelu"),
    "ReLU": ("operator", r"(?i)\brelu"),
    "residual times|: residual": ("argument operator", r"1\.01"),
    "cache in bfloat16": ("dtype", "bfloat16"),
    "down in bfloat16": ("dtype", "bfloat16"),
    "token|pixel|another source|another input|another batch": ("input operand", "token|input|element|row|ind"),
    "positions (shifted|of decoding)|, positions": ("argument operand operator input", r"\b1\b|position|shift"),
    "distances shifted": ("argument operand operator", r"1|2[01]|shift|distance"),
    "rounded positions": ("dtype operator", "bfloat16|round"),
    "scale": ("argument operator operand", r"scale|1\.05|1\.3|0\.9|mul|div"),
    "mask|window": ("argument operand operator input", "mask|causal|window|key"),
    "neighbours": ("operand operator argument", ""),
    "tiled|change places|heads": ("operator operand argument", "head|roll|repeat|cat|order|change|exchange"),
    "dropout": ("operator argument", "dropout|bernoulli|0\\.2"),
    "stale": ("operand operator argument input", ""),
    "see each other|is seen": ("operand operator argument input", "mask"),
    "shares": ("operator", "div|sum|left out"),
    "another factor": ("argument operator weight", r"0\.5|1\b|weight"),
    "element in int8|row in int8|an element|a row": ("weight", "weight|row|element|column"),
    "keys that differ": ("argument operator operand", r"1\.01|0\.01|mul"),
    "gradient": ("operator result unknown", "silu|backward|gradient"),
    "smoothed": ("argument operator", r"0\.01|smooth"),
    "another rate": ("argument", r"0\.11"),
    "gemma, (embedding|no cap|one plus|residual|qk norm)": ("operator argument", "left out|mul|add|tanh|does not"),
    "gemma, centre": ("operator", "mean|layer_norm|norm"),
    "gemma, q and k": ("operand operator", "change|exchange|swap"),
    "gate and up": ("operand operator", "change|exchange|swap"),
    "gemma, cap": ("argument", r"\b3\b|3\.0"),
}  # fmt: skip
_WORDS: dict[str, tuple[str, str]] = {
    "weight": ("weight", "weight|row|element|column"),
    "bias": ("weight", "bias|element"),
    "dtype": ("dtype", "bfloat16"),
}


# What comes before the first product, the last one, and the routers, outside of their layers.
_BEFORE = dict.fromkeys(("0.attn.q", "0.q", "encoder.q"), r"|embed|^patches|^[A-Z]\w*$") | {
    "head": r"|^layers\.1|^norm|^[A-Z]\w*$",
    "last": "|^base$|^[ab]$|^LowRank",
    "routers.1": r"|^layers\.0|^Experts",
}


def whole(name: str) -> str:
    """`"1.mlp"` is short for `"layers.1.mlp"`."""
    return f"layers.{name}" if name[0].isdigit() else name


def place_of(module: str, cause: str) -> str:
    """Where it is: a weight in its module; what comes before a product in its part of the layer, or in a norm."""
    if cause in ("weight", "bias"):
        return f"^{re.escape(module)}$"
    before = _BEFORE.get(module.removeprefix("layers."), "") if cause == "input" else ""
    if part := re.match(r"(layers\.\d+)\.(attn|mlp|norm\d)\b", module):
        return rf"^{re.escape(part[1])}(\.({part[2]}|norm\d)\b.*)?${before}"
    layer = re.match(r"layers\.\d+", module)
    return rf"^{re.escape(layer[0] if layer else module)}\b{before}"


def add(name: str, programs: Callable[[], tuple[Program, Program]], *verdicts: str, at: str = "", **how: Any) -> None:
    """A verdict is `"module: cause"`, of the first program's modules; `at` is a pattern for other places."""
    found = None
    if verdicts:
        split = [whole(verdict).split(": ") for verdict in verdicts]
        named = [cause for pattern, cause in _CAUSES.items() if re.search(pattern, name)]
        kinds, words = (named or [_WORDS[split[0][1].split()[-1]]])[0]
        found = planted("|".join(dict.fromkeys([place_of(*each) for each in split] + [at] * bool(at))), kinds, words)
    PAIRS.append(Pair(name, programs, found, **how))


def against(
    trainer: Callable[[], nn.Module],
    other: Callable[[Weights], Callable[..., object]],
    *inputs: Any,
    edits: dict[str, Edit] | None = None,
    given: tuple[Any, ...] = (),
) -> Callable[[], tuple[Program, Program]]:
    """A trainer's model, and what is made of its edited weights; `given` stands for other inputs of that."""

    def programs() -> tuple[Program, Program]:
        a = m.seeded(trainer)
        weights = {name: weight.detach().clone() for name, weight in a.state_dict().items()}
        for name, edit in (edits or {}).items():
            weights[whole(name)] = edit(weights[whole(name)])
        b = other(weights)
        return lambda: a(*inputs), lambda: b(*(given or inputs))

    return programs


def swapped(programs: Callable[[], tuple[Program, Program]]) -> Callable[[], tuple[Program, Program]]:
    return lambda: programs()[::-1]


def times(factor: float) -> Edit:
    return lambda w: w * factor


def plus(value: float) -> Edit:
    return lambda w: w + value


def element(edit: Edit) -> Edit:
    return lambda w: w.index_put((torch.tensor(3), torch.tensor(5)), edit(w[3, 5]))


def row(edit: Edit) -> Edit:
    return lambda w: torch.cat((w[:4], edit(w[4:5]), w[5:]))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def garbage(w: Tensor) -> Tensor:
    return drawn(9, *w.shape) * w.abs().max()


def exchanged(w: Tensor) -> Tensor:
    return w[torch.tensor([1, 0, *range(2, len(w))])]


# A Llama against an engine. Layer 1 is where causes are.

TOKENS = torch.arange(20).view(2, 10) * 7 % m.VOCABULARY
OTHER_TOKENS = TOKENS.clone()
OTHER_TOKENS[1, 4] += 1
PERMUTED, BFLOAT16, INT8, EAGER = Form(permuted=True), Form(dtype=torch.bfloat16), Form(int8=True), m.EAGER


def llama(
    form: Form = m.PLAIN,
    plant: Plant = m.NOTHING,
    run: Callable[..., object] | None = None,
    *,
    eager: bool = False,
    inputs: tuple[Any, ...] = (TOKENS,),
    **how: Any,
) -> Any:
    def engine(weights: Weights) -> Callable[..., object]:
        made = m.LlamaEngine(weights, form, plant)
        return made if run is None else lambda *inputs: run(made, *inputs)

    return against(lambda: m.Llama(eager=eager), engine, *inputs, **how)


def decoded(engine: m.LlamaEngine, tokens: Tensor) -> object:
    return m.decoded(engine, tokens, 6)


def one_by_one(engine: m.LlamaEngine, tokens: Tensor) -> object:
    return [engine(each[None]) for each in tokens]


def packed(engine: m.LlamaEngine, tokens: Tensor, *, seen: bool = False) -> object:
    """The first sequence and six tokens of the second in one, which may see the first by mistake."""
    mask = m.visible([16] if seen else [10, 6], causal=True)
    return engine(tokens.flatten()[None, :16], mask, torch.arange(16) % 10)


def loaded(model: nn.Module, weights: Weights) -> nn.Module:
    model.load_state_dict(weights)
    return model


def dynamic_int8(weights: Weights, plant: Plant = m.NOTHING) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch wants programs to move to torchao
        warnings.simplefilter("ignore", UserWarning)
        found: nn.Module = torch.ao.quantization.quantize_dynamic(loaded(m.Llama(plant), weights), {nn.Linear})
    return found


add("llama: fused", llama())
add("llama: fused and permuted", llama(PERMUTED))
add("llama: split in halves", llama(Form(split=True, fused=False)))
add("llama: rotary neighbours", llama(Form(pairs=True)))
add("llama: heads in another order", llama(Form(moved=True)))
add("llama: grouped heads", llama(Form(grouped=True)))
add("llama: flat tokens", llama(Form(flat=True)))
add("llama: eager against fused attention", llama(eager=True))
add("llama: both eager", llama(EAGER, eager=True))
add("llama: bfloat16", llama(BFLOAT16))
add("llama: int8 with scales", llama(INT8))


def quantised(levels: int, size: int) -> Edit:
    """Weights on a grid, with a scale for each block of a row; for each row if `size` is 0."""

    def edit(w: Tensor) -> Tensor:
        blocks = w.unflatten(1, (-1, size or w.size(1)))
        scale = blocks.abs().amax(-1, keepdim=True) / levels
        made: Tensor = ((blocks / scale).round() * scale).flatten(1)
        return made

    return edit


MLPS = [f"{layer}.mlp.{name}.weight" for layer in (0, 1) for name in ("gate", "up", "down")]
for name, edit in {"8 bits": quantised(127, 0), "4 bits in blocks of 16": quantised(7, 16)}.items():
    edits = dict.fromkeys(MLPS, edit)
    add(f"llama: {name}", llama(edits=edits))
    edits = edits | {"1.mlp.up.weight": lambda w, edit=edit: row(times(1.3))(edit(w))}
    add(f"llama: {name}, a row times 1.3", llama(edits=edits), "1.mlp.up: weight")
WIDENED: dict[str, Edit] = {
    f"{layer}.mlp.{name}.weight": lambda w: w.bfloat16().float() for layer in (0, 1) for name in ("gate", "up")
}
add("llama: weights of bfloat16 widened again", llama(edits=WIDENED))
add(
    "llama: one of these times 1.01",
    llama(edits=WIDENED | {"1.mlp.up.weight": lambda w: (w * 1.01).bfloat16().float()}),
    "1.mlp.up: weight",
)
ROUNDED: dict[str, Edit] = dict.fromkeys(m.Llama().state_dict(), lambda w: w.bfloat16().float())
add("llama: all weights of bfloat16 widened again", llama(edits=ROUNDED))
add("llama: cached decode", llama(run=decoded))
add("llama: a batch in two calls", llama(run=one_by_one))
add("llama: packed sequences", llama(run=packed))
add("llama: torch's dynamic int8", against(m.Llama, dynamic_int8, TOKENS))


def sharp() -> nn.Module:
    """A Llama whose attentions enlarge what is rounded."""
    model = m.Llama()
    return loaded(model, {name: w * w.dim() for name, w in model.state_dict().items()})


add("llama: sharp attentions in torch's dynamic int8", against(sharp, dynamic_int8, TOKENS))
relu = partial(dynamic_int8, plant=Plant(1, activation=F.relu))
add("llama: ReLU in torch's dynamic int8", against(m.Llama, relu, TOKENS), "1.mlp.down: input")
for factor in (1.001, 1.5):
    edits = {"1.mlp.up.weight": row(times(factor))}
    add(f"llama: a row of up times {factor}", llama(PERMUTED, edits=edits), "1.mlp.up: weight")
for value in (0.5, 100.0):
    edits = {"1.attn.q.weight": element(plus(value))}
    add(f"llama: an element of q plus {value}", llama(PERMUTED, edits=edits), "1.attn.q: weight")
least = element(times(1.001))
add("llama: an element of o times 1.001", llama(PERMUTED, edits={"1.attn.o.weight": least}), "1.attn.o: weight")
one = element(plus(0.5))
for name, edit in {"down": garbage, "gate": times(1.001)}.items():
    add(f"llama: all of {name}", llama(PERMUTED, edits={f"1.mlp.{name}.weight": edit}), f"1.mlp.{name}: weight")
add("llama: v is garbage", llama(PERMUTED, edits={"1.attn.v.weight": garbage}), "1.attn.v: weight")
add(
    "llama: rows of up change places",
    llama(edits={"1.mlp.up.weight": exchanged}),
    "1.mlp.up: weight",
    "1.mlp.down: input",
)
add("llama: o is transposed", llama(PERMUTED, edits={"1.attn.o.weight": lambda w: w.mT}), "1.attn.o: weight")
add("llama: a weight of a norm", llama(edits={"1.norm1.weight": times(1.01)}), "1.attn.q: input")
add("llama: scale of attention", llama(plant=Plant(1, scale=1.05)), "1.attn: scale")
add("llama: scale in bfloat16", llama(BFLOAT16, Plant(1, scale=1.3)), "1.attn: scale")
add("llama: scale, both eager", llama(EAGER, Plant(1, scale=1.05), eager=True), "1.attn: input", "1.attn: scale")
add("llama: base of rotary positions", llama(plant=Plant(1, theta=9000.0)), "1.attn: q k")
add("llama: base, permuted rows", llama(PERMUTED, Plant(1, theta=9000.0)), "1.attn: q k")
add("llama: base, heads in another order", llama(Form(moved=True), Plant(1, theta=9000.0)), "1.attn: q k")
add("llama: base, grouped heads", llama(Form(grouped=True), Plant(1, theta=9000.0)), "1.attn: q k")
add("llama: neighbours for halves", llama(plant=Plant(1, neighbours=True)), "1.attn: q k")
add(
    "llama: rounded positions",
    llama(plant=Plant(rounded=True), inputs=(TOKENS, None, 1000), given=(TOKENS, None, torch.arange(1000, 1010))),
    "0.attn: q k",
    "1.attn: q k",
)
add("llama: key heads are tiled", llama(plant=Plant(1, tiled=True)), "1.attn: k v", "1.attn: heads")
add("llama: query heads change places", llama(plant=Plant(1, rolled="q")), "1.attn: q", "1.attn: heads")
add("llama: value heads change places", llama(PERMUTED, Plant(1, rolled="v")), "1.attn: v", "1.attn: heads")
add("llama: no causal mask", llama(plant=Plant(1, causal=False)), "1.attn: mask")
add("llama: a window of four keys", llama(plant=Plant(1, window=4)), "1.attn: mask")
add(
    "llama: packed sequences see each other",
    llama(run=lambda e, tokens: packed(e, tokens, seen=True)),
    "0.attn: mask",
    "1.attn: mask",
)
low = Plant(1, low=torch.bfloat16)
add(
    "llama: down in bfloat16",
    llama(plant=low),
    *(f"1.mlp.down: {word}" for word in ("dtype", "weight", "input weight", "input")),
)
add("llama: GELU for SiLU", llama(plant=Plant(1, activation=F.gelu)), "1.mlp.down: input")
add("llama: GELU in bfloat16", llama(BFLOAT16, Plant(1, activation=F.gelu)), "1.mlp.down: input")
add("llama: GELU in int8", llama(INT8, Plant(1, activation=F.gelu)), "1.mlp.down: input")
add("llama: no causal mask in bfloat16", llama(BFLOAT16, Plant(1, causal=False)), "1.attn: mask")
add("llama: an element in bfloat16", llama(BFLOAT16, edits={"1.mlp.down.weight": one}), "1.mlp.down: weight")
add("llama: an element in int8", llama(INT8, edits={"1.mlp.up.weight": one}), "1.mlp.up: weight")
twofold = row(times(2))  # whose scale is no operand of a product
add("llama: a row in int8", llama(INT8, edits={"1.mlp.up.weight": twofold}), "1.mlp.up: weight", "1.mlp.down: input")
add("llama: epsilon of a norm", llama(plant=Plant(1, eps=1e-3)), "1.attn.q: input")
add("llama: residual times 1.01", llama(plant=Plant(0, residual=1.01)), "0.mlp.down: input")
add("llama: dropout of attention", llama(plant=Plant(1, dropout=0.2)), "1.attn: dropout", "1.attn.o: input")
add("llama: dropout before down", llama(plant=Plant(1, hidden_dropout=0.2)), "1.mlp.down: input")
add("llama: another token", llama(PERMUTED, given=(OTHER_TOKENS,)), "0.attn.q: input")
add("llama: another token, two calls", llama(run=one_by_one, given=(OTHER_TOKENS,)), "0.attn.q: input")
add(
    "llama: decoded positions shifted",
    llama(plant=Plant(1, shift=1), run=decoded),
    *(f"1.attn: {role}" for role in ("q k", "q", "k")),
    "1.attn.o: input",
)
add("llama: decoded, GELU for SiLU", llama(plant=Plant(1, activation=F.gelu), run=decoded), "1.mlp.down: input")
add("llama: decoded, an element", llama(run=decoded, edits={"1.mlp.up.weight": one}), "1.mlp.up: weight")
add("llama: two calls, scale", llama(plant=Plant(1, scale=1.05), run=one_by_one), "1.attn: scale")
add("llama: a stale key", llama(plant=Plant(1, stale=True), run=decoded), "1.attn: k", "1.attn.o: input")
add("llama: a cache in bfloat16", llama(plant=low, run=decoded), "1.attn: k v", "1.attn.o: input")
add(
    "llama: a wrong kernel",
    llama(PERMUTED),
    "1.mlp.down: added",
    fault=lambda: hooks.when(hooks.BitFlip(bits=20), op="mm", module="blocks.1.out"),
)


# Transformers' Llama against the engine.


def transformers_llama(attention: str) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": m.VOCABULARY, "hidden_size": m.WIDTH, "intermediate_size": m.INNER, "num_hidden_layers": 2,
        "num_attention_heads": m.HEADS, "num_key_value_heads": m.GROUPS, "attn_implementation": attention,
    }  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model.train(False)


def hf(attention: str = "sdpa", form: Form = PERMUTED, plant: Plant = m.NOTHING, **how: Any) -> Any:
    return against(
        lambda: transformers_llama(attention),
        lambda weights: m.LlamaEngine(m.of_transformers(weights), form, plant),
        TOKENS,
        **how,
    )


H = "model.layers.1."
add("transformers: eager", hf("eager"))
add("transformers: sdpa", hf())
add("transformers: bfloat16", hf(form=BFLOAT16))
add("transformers: an element of v", hf(edits={f"{H}self_attn.v_proj.weight": one}), f"{H}self_attn.v_proj: weight")
add("transformers: base of positions", hf(plant=Plant(1, theta=9000.0)), f"{H}self_attn: q k", at="rotary")
add("transformers: the head times 1.001", hf(edits={"lm_head.weight": times(1.001)}), "lm_head: weight")


# A GPT, a BERT and a ViT against an engine.

IMAGES = drawn(5, 2, 3, 16, 16)
OTHER_IMAGES = IMAGES.index_put((torch.tensor(1), torch.tensor(0), torch.tensor(5), torch.tensor(6)), torch.tensor(0.0))


def plain(kind: str, form: Form = PERMUTED, plant: Plant = m.NOTHING, *more: Any, **how: Any) -> Any:
    x = IMAGES if kind == "vit" else TOKENS
    eager = how.pop("eager", False)
    return against(lambda: m.Plain(kind, eager=eager), lambda w: m.PlainEngine(kind, w, form, plant), x, *more, **how)


LENGTHS, FLAT = [10, 6], Form(permuted=True, flat=True)
tanh = Plant(1, activation=lambda x: F.gelu(x, approximate="tanh"))
add("gpt: fused and permuted", plain("gpt"))
add("gpt: int8 with scales", plain("gpt", INT8))
add("gpt: GELU by tanh", plain("gpt", plant=tanh), "1.mlp.down: input")
add("gpt: positions shifted", plain("gpt", plant=Plant(shift=1)), "0.attn.q: input")
add("gpt: scale", plain("gpt", plant=Plant(1, scale=0.9)), "1.attn: scale")
add(
    "gpt: scale, eager",
    plain("gpt", plant=Plant(1, scale=0.9), eager=True),
    "1.attn: input",
    "1.attn: scale",
    "1.attn.o: input",
)
add("gpt: a bias", plain("gpt", edits={"1.attn.v.bias": plus(0.01)}), "1.attn.v: bias")
add(
    "gpt: an element of a bias",
    plain("gpt", edits={"1.mlp.up.bias": lambda b: b.index_fill(0, torch.tensor(7), 1.0)}),
    "1.mlp.up: bias",
)
add("bert: padding", plain("bert", PERMUTED, m.NOTHING, LENGTHS))
add("bert: padding against packed", plain("bert", FLAT, m.NOTHING, LENGTHS))
add("bert: padding, eager", plain("bert", PERMUTED, m.NOTHING, LENGTHS, eager=True))
add(
    "bert: padding is seen",
    plain("bert", PERMUTED, m.NOTHING, LENGTHS, given=(TOKENS,)),
    "0.attn: mask",
    "1.attn: mask",
)
add("bert: packed, epsilon", plain("bert", FLAT, Plant(1, eps=1e-3), LENGTHS), "1.mlp.up: input")
add(
    "bert: packed, an element",
    plain("bert", FLAT, m.NOTHING, LENGTHS, edits={"1.mlp.up.weight": one}),
    "1.mlp.up: weight",
)
add("bert: a row of the pooler", plain("bert", edits={"head.weight": row(times(1.01))}), "head: weight")
add("vit: patches by one product", plain("vit"))
add("vit: ReLU for GELU", plain("vit", plant=Plant(0, activation=F.relu)), "0.mlp.down: input")
add("vit: a row of the patches", plain("vit", edits={"patches.weight": row(times(1.1))}), "0.attn.q: input")
add("vit: another pixel", plain("vit", given=(OTHER_IMAGES,)), "0.attn.q: input")
add("vit: rows of down are garbage", plain("vit", edits={"1.mlp.down.weight": row(garbage)}), "1.mlp.down: weight")


# An encoder with a decoder, and experts, against an engine.

TARGET = TOKENS.flip(1)[:, :7]
FEATURES = drawn(6, 24, 8)


def seq2seq(plant: Plant = m.NOTHING, **how: Any) -> Any:
    return against(m.Seq2Seq, lambda w: m.Seq2SeqEngine(w, PERMUTED, plant), TOKENS, TARGET, **how)


def experts(plant: Plant = m.NOTHING, **how: Any) -> Any:
    return against(m.Experts, lambda w: m.ExpertsEngine(w, m.PLAIN, plant), FEATURES, **how)


def experts_exchanged(weights: Weights) -> Callable[..., object]:
    one, two = (f"layers.1.{expert}.down.weight" for expert in (0, 1))
    return m.ExpertsEngine(weights | {one: weights[two], two: weights[one]}, m.PLAIN)


add("seq2seq: fused", seq2seq())
add("seq2seq: biases of distances shifted", seq2seq(Plant(shift=1)), "decoder: mask", at="by_distance|distances")
add("seq2seq: a window of cross-attention", seq2seq(Plant(1, window=3)), "cross: mask")
add("seq2seq: ReLU in the encoder", seq2seq(Plant(0, activation=F.relu)), "encoder_mlp: function")
add("seq2seq: all of the cross key", seq2seq(edits={"cross.k.weight": times(1.01)}), "cross.k: weight")
add("seq2seq: another source", seq2seq(given=(OTHER_TOKENS, TARGET)), "encoder.q: input")
add("experts: tokens in order of experts", experts())
add("experts: shares are no sum of one", experts(Plant(0, raw_shares=True)), "routers.1: input")
add("experts: a row of one", experts(edits={"1.2.down.weight": row(times(1.01))}), "1.2.down: weight")
add("experts: an element of the router", experts(edits={"routers.1.weight": element(plus(0.01))}), "routers.1: weight")
add(
    "experts: two change places", against(m.Experts, experts_exchanged, FEATURES), "1.0.down: weight", "1.0.down: input"
)


def dense(
    weights: Weights, activation: Callable[[Tensor], Tensor] = F.silu, *, stacked: bool = True
) -> Callable[..., object]:
    """All experts for all tokens, whose weights are stacked, or in one for the gates and one for `up`."""

    def run(x: Tensor) -> Tensor:
        x = F.linear(x, weights["inp.weight"], weights["inp.bias"])
        for number in range(2):
            own = [f"layers.{number}.{expert}." for expert in range(m.EXPERTS)]
            gate, up, down = (torch.stack([weights[f"{e}{n}.weight"] for e in own]) for n in ("gate", "up", "down"))
            normed = m.rms(x, torch.ones(m.WIDTH), m.NOTHING.eps)
            shares, chosen = m.chosen_experts(F.linear(normed, weights[f"routers.{number}.weight"]), normed=True)
            if stacked:
                every = x.expand(m.EXPERTS, *x.shape)
                gated, raised = every @ gate.mT, every @ up.mT
            else:
                gated, raised = (torch.einsum("td,efd->etf", x, w) for w in (gate, up))
            made = (activation(gated) * raised) @ down.mT
            x = x + torch.einsum("etd,te->td", made, torch.zeros(len(x), m.EXPERTS).scatter(1, chosen, shares))
        return F.linear(x, weights["head.weight"], weights["head.bias"])

    return run


for stacked in (True, False):
    form = "stacked" if stacked else "in one product"
    all_of, gelu = partial(dense, stacked=stacked), partial(dense, activation=F.gelu, stacked=stacked)
    add(f"experts: {form}", against(m.Experts, all_of, FEATURES))
    add(f"experts: {form}, GELU for SiLU", against(m.Experts, gelu, FEATURES), "0.0.down: input", "1.0.down: input")
    edits = {"1.2.down.weight": row(times(1.01))}
    add(f"experts: {form}, a row", against(m.Experts, all_of, FEATURES, edits=edits), "1.2.down: weight")


# Low-rank terms, merged into the weight.


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.base, self.last = (nn.Linear(m.WIDTH, m.WIDTH, bias=False) for _ in range(3))
        self.a, self.b = nn.Linear(m.WIDTH, 4, bias=False), nn.Linear(4, m.WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        out: Tensor = self.last((self.base(x) + 0.5 * self.b(self.a(x))).relu())
        return out


def merged(factor: float) -> Any:
    def engine(weights: Weights) -> Callable[..., object]:
        added = factor * weights["b.weight"] @ weights["a.weight"]
        sizes = weights | {"base.weight": weights["base.weight"] + added}
        first, base, last = (m.PLAIN.one(sizes, name) for name in ("first", "base", "last"))
        return lambda x: last(base(first(x).relu()).relu())

    return against(LowRank, engine, drawn(7, 6, m.WIDTH))


add("low rank: merged", merged(0.5))
# The products alone do not tell with which factor the first program adds the low-rank term: it does so before `last`.
add("low rank: merged with another factor", merged(1.0), "last: input")


# Recorded with all operators, so that what lies between products can be computed.
for name, plant, words in (
    ("nothing", m.NOTHING, ()),
    ("base of positions", Plant(1, theta=9000.0), ("1.attn: q k", "1.attn: self")),
    ("epsilon", Plant(1, eps=1e-3), ("1.attn.q: input", "1.norm1: other")),
    ("GELU for SiLU", Plant(1, activation=F.gelu), ("1.mlp.down: input", "1.mlp: function")),
    ("residual", Plant(0, residual=1.01), ("0.mlp.down: input",)),
):
    add(f"all operators: {name}", llama(PERMUTED, plant), *words, ops="all")


# An engine of which nothing but matmuls is known, against the replay of a trainer with all operators.


def replayed(name: str, programs: Any, *verdicts: str, at: str = "") -> None:
    add(f"replay: {name}", programs, *verdicts, at=at, ops="mixed")


def gemma(mistake: str = "", form: Form = PERMUTED) -> Any:
    return against(m.Gemma, lambda weights: m.GemmaEngine(weights, form, mistake), TOKENS)


for name, programs in {
    "llama, fused and permuted": llama(PERMUTED),
    "llama, heads in another order": llama(Form(moved=True)),
    "llama, both eager, bfloat16": llama(Form(eager=True, dtype=torch.bfloat16), eager=True),
    "llama, bfloat16": llama(BFLOAT16),
    "llama, int8": llama(INT8),
    "llama, int8 in the first program": swapped(llama(INT8)),
    "llama, whole numbers in floating point": llama(Form(whole=True)),
    "llama, cached decode": llama(run=decoded),
    "llama, cached decode in bfloat16": llama(BFLOAT16, run=decoded),
    "llama, packed": llama(run=packed),
    "llama, a batch in two calls": llama(run=one_by_one),
    "gpt": plain("gpt"),
    "bert, padding against packed": plain("bert", FLAT, m.NOTHING, LENGTHS),
    "vit": plain("vit"),
    "transformers": hf(),
    "gemma": gemma(),
    "gemma in bfloat16": gemma(form=BFLOAT16),
    "gemma in int8": gemma(form=INT8),
    "experts": experts(),
    "low rank": merged(0.5),
}.items():
    replayed(name, programs)
GELU, OFF = Plant(1, activation=F.gelu), Plant(1, theta=9000.0)
DOWN, ATTENTION = "1.mlp.down: input", "1.attn: q k"
replayed("base of positions", llama(PERMUTED, OFF), ATTENTION)
replayed("base of positions, decoded", llama(plant=OFF, run=decoded), ATTENTION, "1.attn.o: input")
replayed("base of positions, both eager", llama(EAGER, OFF, eager=True), ATTENTION)
replayed("epsilon", llama(PERMUTED, Plant(1, eps=1e-3)), "1.attn.q: input")
replayed("GELU for SiLU", llama(PERMUTED, GELU), DOWN)
replayed("GELU for SiLU in bfloat16", llama(BFLOAT16, GELU), DOWN)
replayed("GELU for SiLU in int8", llama(INT8, GELU), DOWN)
replayed("all weights widened", llama(edits=ROUNDED))
replayed("all weights widened, GELU", llama(plant=GELU, edits=ROUNDED), DOWN)
replayed("GELU for SiLU, decoded", llama(plant=GELU, run=decoded), DOWN)
replayed("ReLU for SiLU", llama(plant=Plant(1, activation=F.relu)), DOWN)
replayed("residual", llama(plant=Plant(0, residual=1.01)), "0.mlp.down: input")
replayed("scale", llama(PERMUTED, Plant(1, scale=1.05)), "1.attn: scale")
replayed("no causal mask", llama(plant=Plant(1, causal=False)), "1.attn: mask")
replayed("no causal mask, eager", llama(plant=Plant(1, causal=False), eager=True), "1.attn: mask")
replayed("a window", llama(plant=Plant(1, window=4)), "1.attn: mask")
replayed("query heads", llama(plant=Plant(1, rolled="q")), "1.attn: q", "1.attn: heads")
replayed("weight of a norm", llama(edits={"1.norm1.weight": times(1.01)}), "1.attn.q: input")
replayed("positions of decoding", llama(plant=Plant(1, shift=1), run=decoded), "1.attn.o: input", ATTENTION)
replayed("a stale key", llama(plant=Plant(1, stale=True), run=decoded), "1.attn.o: input", "1.attn: k")
replayed("two calls, GELU", llama(plant=GELU, run=one_by_one), DOWN)
replayed("another token", llama(PERMUTED, given=(OTHER_TOKENS,)), "0.attn.q: input")
replayed("garbage", llama(PERMUTED, edits={"1.mlp.gate.weight": garbage}), "1.mlp.gate: weight")
replayed("gpt, GELU by tanh", plain("gpt", plant=tanh), DOWN)
replayed("gpt, epsilon", plain("gpt", plant=Plant(1, eps=1e-3)), "1.attn.q: input")
replayed("gpt, positions", plain("gpt", plant=Plant(shift=1)), "0.attn.q: input")
replayed("vit, ReLU for GELU", plain("vit", plant=Plant(0, activation=F.relu)), "0.mlp.down: input")
replayed("bert, packed, epsilon", plain("bert", FLAT, Plant(1, eps=1e-3), LENGTHS), "1.mlp.up: input")
replayed("experts, shares", experts(Plant(0, raw_shares=True)), "routers.1: input")
replayed("low rank, another factor", merged(1.0), "last: input")
for mistake, place in (
    ("embedding", "0.q: input"),
    ("centre", "1.q: input"),
    ("qk norm", "1.o: input"),
    ("q and k", "1.o: input"),
    ("no cap", "1.o: input"),
    ("cap", "1.o: input"),
    ("position", ""),
    ("one plus", "1.gate: input"),
    ("erf", "1.down: input"),
    ("gate and up", "1.down: input"),
    ("residual", "head: input"),
):
    seen = [place] if place != "1.o: input" else [place, "1: q", "1: k", "1: q k", "1: input", "1: scale", "1: mask"]
    replayed(f"gemma, {mistake}", gemma(mistake), *(each for each in seen if each))
replayed("gemma, gate and up in bfloat16", gemma("gate and up", BFLOAT16), "1.down: input")
replayed(
    "gemma, no cap in bfloat16", gemma("no cap", BFLOAT16), "1.o: input", "1: q k", "1: input", "1: scale", "1: mask"
)


# One program twice, of which the second does something otherwise; `diff` compares them.


def twice(make: Callable[[Plant], nn.Module], plant: Plant = m.NOTHING, *inputs: Any, **how: Any) -> Any:
    return against(lambda: make(m.NOTHING), lambda w: loaded(make(plant), w), *(inputs or (TOKENS,)), **how)


def gpt(plant: Plant) -> nn.Module:
    return m.Plain("gpt", plant)


def lstm(plant: Plant) -> nn.Module:
    return nn.LSTM(m.WIDTH, m.WIDTH, 2)


STEPS = drawn(8, 5, 2, m.WIDTH)
OTHER_STEPS = STEPS.clone()
OTHER_STEPS[2, 1, 3] += 0.01
for ops, every in {"products": False, "all": True}.items():
    how: dict[str, Any] = {"ops": ops}
    add(f"{ops}: llama twice", twice(m.Llama), **how)
    add(f"{ops}: lstm twice", twice(lstm, m.NOTHING, STEPS), **how)
    add(f"{ops}: scale", twice(m.Llama, Plant(1, scale=1.05)), "1.attn: scale", **how)
    add(f"{ops}: no causal mask", twice(m.Llama, Plant(1, causal=False)), "1.attn: mask", **how)
    add(f"{ops}: an element", twice(m.Llama, edits={"1.mlp.down.weight": one}), "1.mlp.down: weight", **how)
    said = "1.mlp: function" if every else "1.mlp.down: input"
    add(f"{ops}: GELU for SiLU", twice(m.Llama, Plant(1, activation=F.gelu)), said, **how)
    said = "1.mlp: approximate" if every else "1.mlp.down: input"
    add(f"{ops}: GELU by tanh", twice(gpt, tanh), said, **how)
    said = "1.norm1: eps" if every else "1.attn.q: input"
    add(f"{ops}: epsilon of LayerNorm", twice(gpt, Plant(1, eps=1e-3)), said, **how)
    said = "1.attn: self" if every else "1.attn: q k"
    add(f"{ops}: base of positions", twice(m.Llama, Plant(1, theta=9000.0)), said, **how)
    said = "1.mlp: dropout" if every else "1.mlp.down: input"
    add(f"{ops}: dropout", twice(m.Llama, Plant(1, hidden_dropout=0.2)), said, **how)
    add(f"{ops}: dtype", twice(m.Llama, Plant(1, low=torch.bfloat16)), "1.mlp.down: dtype", **how)
    add(f"{ops}: all in bfloat16", against(m.Llama, lambda w: loaded(m.Llama(), w).bfloat16(), TOKENS), **how)
    said = "embed: indices" if every else "0.attn.q: input"
    add(f"{ops}: another token", twice(m.Llama, given=(OTHER_TOKENS,)), said, **how)
    said = "1.norm2: self" if every else "1.mlp.gate: input"
    add(f"{ops}: weight of a norm", twice(m.Llama, edits={"1.norm2.weight": times(1.01)}), said, **how)
    add(f"{ops}: lstm, an element", twice(lstm, m.NOTHING, STEPS, edits={"weight_hh_l1": one}), "LSTM: weight", **how)
    add(f"{ops}: lstm, another input", twice(lstm, m.NOTHING, STEPS, given=(OTHER_STEPS,)), "LSTM: input", **how)
add(
    "products: a wrong kernel",
    twice(m.Llama),
    "1.mlp.down: added",
    fault=lambda: hooks.when(hooks.BitFlip(bits=20), op="mm", module="layers.1.mlp.down"),
)


# Training, in two steps.


class Straight(torch.autograd.Function):
    """SiLU whose gradient is wrong."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def trained(
    make: Callable[[Plant], nn.Module] = m.Llama,
    plant: Plant = m.NOTHING,
    inputs: tuple[Tensor, ...] = (TOKENS, TOKENS),
    *,
    smoothing: float = 0.0,
    lr: float = 0.1,
) -> Any:
    def program(plant: Plant, inputs: tuple[Tensor, ...], smoothing: float, lr: float) -> Program:
        model = m.seeded(lambda: make(plant))
        optimizer = torch.optim.SGD(model.parameters(), lr)

        def steps() -> None:
            for x in inputs:
                out = model(x)
                out = out[0].flatten(0, 1) if isinstance(out, tuple) else out.flatten(0, 1)
                F.cross_entropy(out, torch.arange(len(out)), label_smoothing=smoothing).backward()
                optimizer.step()
                optimizer.zero_grad()

        return steps

    return lambda: (program(m.NOTHING, (inputs[0],) * 2, 0.0, 0.1), program(plant, inputs, smoothing, lr))


UPDATED = tuple(f"0.attn.q: {cause}" for cause in ("weight", "input weight", "optimizer"))
how = {"trains": True}
add("trained: llama twice", trained(), **how)
add("trained: llama twice, all operators", trained(), ops="all", **how)
add("trained: lstm twice, all operators", trained(lstm, inputs=(STEPS, STEPS)), ops="all", **how)
add("trained: another batch", trained(inputs=(TOKENS, OTHER_TOKENS)), "0.attn.q: input", **how)
add("trained: smoothed labels", trained(smoothing=0.01), "head: gradient", at="cross_entropy", **how)
add("trained: another rate", trained(lr=0.11), *UPDATED, at="optimizer", **how)
add("trained: a wrong gradient", trained(plant=Plant(1, activation=Straight.apply)), "1.mlp.gate: gradient", **how)


class Scan(nn.Module):
    """A state that is read by a row which the program computes, as in state space models."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.row, self.out = nn.Linear(32, 64), nn.Linear(64, 16), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inp(x).tanh()
        row = self.row(y)
        state = (y[:, :, None] * row[:, None]).cumsum(0)
        read = [torch.bmm(one[None], other[None, :, None])[0, :, 0] for one, other in zip(state, row, strict=True)]
        out: Tensor = self.out(torch.stack(read))
        return out


def narrow(model: Callable[[], nn.Module], dtype: torch.dtype, *sizes: int) -> Any:
    x = drawn(4, *sizes)
    return against(model, lambda w: lambda x: loaded(model(), w).to(dtype)(x.to(dtype)), x)


class Small(nn.Module):
    """Numbers that are too small for float16 to hold them well."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.inp(x).sin() * 3e-6)
        return out


add("scan: bfloat16", narrow(Scan, torch.bfloat16, 12, 32))
rows = {"row.weight": row(times(1.1))}
add("scan: a row", against(Scan, lambda w: loaded(Scan(), w), drawn(4, 12, 32), edits=rows), "row: weight")
add("small: float16, replayed", narrow(Small, torch.float16, 12, 32), ops="mixed")


class Index(nn.Module):
    """Scores of tokens by keys that all heads share, as sparse attentions choose their tokens by."""

    def __init__(self, turn: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(32, 96), nn.Linear(32, 16), nn.Linear(24, 24)
        self.turn = turn

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x).view(24, 6, 16).transpose(0, 1), self.k(x)
        k = torch.cat((k[:16], k[16:] * (1 + self.turn)))
        scores = torch.bmm(q, k.mT.expand(6, 16, 24))
        found: Tensor = self.out(scores.relu().sum(0))
        return found


def index(turn: float) -> Callable[[], tuple[Program, Program]]:
    def programs() -> tuple[Program, Program]:
        a, x = m.seeded(Index), drawn(3, 24, 32)
        b = Index(turn)
        b.load_state_dict(a.state_dict())
        return lambda: a(x), lambda: b(x)

    return programs


add("index: keys that differ by rounding", index(3e-7))
add("index: keys that differ by more", index(1e-2), "Index: weight")
add("index: keys that differ by rounding, replayed", index(3e-7), ops="mixed")
add("index: keys that differ by more, replayed", index(1e-2), "Index: weight", "out: input", ops="mixed")
