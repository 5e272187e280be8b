"""Of two runs that hold products only, `why` names what differs by itself, and accuses nobody of what is gone again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import parallel_llama
import pytest
import torch
import transformers
from parallel_llama import llama
from processes import run_beside
from torch import Tensor, nn
from torch.nn.functional import linear

from opintercept import OpInterceptError, hooks, intercept, runs
from opintercept.runs.why.answer import Answer
from opintercept.runs.why.products.products import judged_products

TOKENS = torch.arange(20).view(2, 10) * 7 % 50
Program = Callable[[], Any]


def record(path: Path, program: Program, *hook: Any, tensors: Any = "full") -> runs.Run:
    with torch.no_grad(), intercept([*hook, runs.RunRecorder(path, tensors)]):
        program()
    return runs.open_run(path)


def told(folder: Path, one: Program, other: Program) -> Answer:
    return judged_products(record(folder / "a", one), record(folder / "b", other))


def named(answer: Answer) -> list[tuple[str | None, str]]:
    return [(cause.place.module, cause.what) for cause in answer.causes]


def check_clean(answer: Answer, *verdicts: str) -> None:
    """Every product is joined and compared, and nobody is accused."""
    assert not named(answer)
    assert answer.verdict in (verdicts or ("equal", "rounding"))
    assert answer.sentence.endswith(". What follows it was not compared.")
    assert answer.upto.startswith("the last product")
    assert answer.joined == answer.calls
    assert not any("not compared: " in note for note in answer.notes)


class Fused(nn.Module):
    """Several linear layers as one, whose rows may be permuted, and its parts by number."""

    def __init__(self, layers: list[Any], *, permuted: bool) -> None:
        super().__init__()
        weight = torch.cat([layer.weight for layer in layers])
        order = torch.randperm(len(weight)) if permuted else torch.arange(len(weight))
        self.sizes = [len(layer.weight) for layer in layers]
        self.back = order.argsort()
        self.last: tuple[Tensor, ...] = ()
        self.weight = nn.Parameter(weight[order])

    def part(self, number: int, x: Tensor) -> Tensor:
        if not number:
            self.last = linear(x, self.weight)[..., self.back].split(self.sizes, -1)
        return self.last[number]


class Part(nn.Module):
    def __init__(self, whole: Fused, number: int) -> None:
        super().__init__()
        self.forward = partial(whole.part, number)


def fused(model: Any) -> Any:
    """A twin with q, k and v in one layer with permuted rows, and gate and up in one."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for owner, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
            whole = Fused([getattr(owner, name) for name in names], permuted=len(names) == 3)
            for number, name in enumerate(names):
                setattr(owner, name, Part(whole, number))
    return twin


def replaced(model: Any, make: Callable[[Any], nn.Module]) -> Any:
    """A twin in whose layers each projection is another module."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in [*owner.named_children()]:
                if isinstance(child, nn.Linear | Adapted):
                    setattr(owner, name, make(child))
    return twin


class Quantised(nn.Module):
    """A weight in int8, multiplied by its scales after the product."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.scale = layer.weight.abs().amax(1) / 127
        self.weight = (layer.weight / self.scale[:, None]).round().to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x @ self.weight.to(x.dtype).mT * self.scale
        return scaled


class Adapted(nn.Module):
    """A linear layer and a low-rank product that is added to it."""

    def __init__(self, layer: Any, size: float) -> None:
        super().__init__()
        self.base = layer
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=0.1)
        nn.init.normal_(self.up.weight, std=size)

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = self.base(x) + self.up(self.down(x)) * 2.0
        return both

    def merged(self) -> nn.Module:
        layer: nn.Module = copy.deepcopy(self.base)
        layer.weight.data += 2.0 * self.up.weight @ self.down.weight  # type: ignore[operator]
        return layer


def permuted(model: Any) -> Any:
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        order = torch.randperm(48)
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data[order]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, order].contiguous()
    return twin


def halved(model: Any) -> Any:
    """A twin that has half of the scale of attention in the weights of q, and half of that of v's in those of o."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        own = layer.self_attn
        for part, factor in ((own.q_proj, 0.5), (own.v_proj, 0.3), (own.o_proj, 1 / 0.3)):
            part.weight.data *= factor
        own.scaling *= 2
    return twin


def folded(model: Any) -> Any:
    """A twin that has the weights of norms in the layers after them."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for norm, names in (
            (layer.input_layernorm, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (layer.post_attention_layernorm, ("mlp.gate_proj", "mlp.up_proj")),
        ):
            for name in names:
                layer.get_submodule(name).weight.data *= norm.weight.data
            norm.weight.data.fill_(1)
    return twin


def uneven(seed: int = 0) -> Any:
    """A Llama whose norms have weights other than 1."""
    model = llama(seed)
    generator = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data += 0.3 * torch.randn(norm.weight.shape, generator=generator)
    return model


TWINS: dict[str, Callable[[Any], Any]] = {
    "fused": fused,
    "bfloat16": lambda model: copy.deepcopy(model).to(torch.bfloat16),
    "float16": lambda model: copy.deepcopy(model).to(torch.float16),
    "float64": lambda model: copy.deepcopy(model).to(torch.float64),
    "permuted neurons": permuted,
    "int8": lambda model: replaced(model, Quantised),
    "compiled": lambda model: torch.compile(copy.deepcopy(model), backend="aot_eager"),
    "scales moved": halved,
    "norms folded": folded,
}
COARSE = "bfloat16", "float16", "int8", "float64"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "compiled")) for n in TWINS])
def test_what_is_written_otherwise_accuses_nobody(name: str, tmp_path: Path) -> None:
    model = uneven()
    twin = TWINS[name](model)
    found = told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    check_clean(found, *(["coarser"] if name in COARSE else []))
    assert bool(found.rewritten) == (name in ("scales moved", "norms folded"))


@pytest.mark.parametrize("name", TWINS)
def test_another_activation_is_found_beside_what_is_written_otherwise(name: str, tmp_path: Path) -> None:
    model = uneven()
    twin = TWINS[name](model)
    twin.model.layers[1].mlp.act_fn = nn.GELU()
    found = told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert [module for module, _ in named(found)] == ["model.layers.1.mlp.down_proj"]
    (cause,) = found.causes
    assert [place.module for place in cause.after] == [f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up")]


@pytest.mark.parametrize("swapped", [False, True], ids=["apart in B", "apart in A"])
@pytest.mark.parametrize("size", [0.01, 1.0], ids=["small", "large"])
def test_low_rank_terms_that_are_merged_accuse_nobody(size: float, swapped: bool, tmp_path: Path) -> None:
    apart = replaced(llama(), partial(Adapted, size=size))
    merged = replaced(apart, Adapted.merged)
    one, other = (apart, merged) if swapped else (merged, apart)
    check_clean(told(tmp_path, lambda: one(TOKENS), lambda: other(TOKENS)))


def gpt2(attention: str) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes)
    model: Any = transformers.GPT2LMHeadModel(config).train(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.set_attn_implementation(attention)
    return model


def without_bias_of_v(model: Any) -> Any:
    """A twin that has what the biases of v add, which attention keeps, in the biases after it."""
    twin = copy.deepcopy(model)
    for block in twin.transformer.h:
        bias = block.attn.c_attn.bias.data
        block.attn.c_proj.bias.data += bias[64:] @ block.attn.c_proj.weight.data
        bias[64:] = 0
    return twin


def transposed(model: Any) -> Any:
    twin = copy.deepcopy(model)
    for block in twin.transformer.h:
        for owner, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            old = getattr(owner, name)
            new = nn.Linear(*old.weight.shape)
            new.weight.data, new.bias.data = old.weight.data.t().contiguous(), old.bias.data.clone()
            setattr(owner, name, new)
    return twin


@pytest.mark.parametrize(("one", "other"), [("eager", "sdpa"), ("sdpa", "eager"), ("eager", "eager")])
@pytest.mark.parametrize("make", [copy.deepcopy, transposed, without_bias_of_v])
def test_forms_of_a_gpt_accuse_nobody(make: Callable[[Any], Any], one: str, other: str, tmp_path: Path) -> None:
    model, twin = gpt2(one), make(gpt2(other))
    check_clean(told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS)))


def test_a_changed_bias_is_named(tmp_path: Path) -> None:
    model = gpt2("sdpa")
    twin = copy.deepcopy(model)
    twin.transformer.h[1].mlp.c_fc.bias.data[3] += 0.01
    found = told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert named(found) == [("transformer.h.1.mlp.c_fc", "has another bias: element 3 of 128 differs, by up to 0.01")]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("name", ["fused", "bfloat16", "norms folded"])
def test_a_scaled_row_is_named(name: str, seed: int, tmp_path: Path) -> None:
    model = uneven(seed)
    twin = TWINS[name](model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    module, layer = layers[seed * 7 % len(layers)]
    row = seed * 5 % len(layer.weight)
    layer.weight.data[row] *= 1.02
    found = told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert [(at, what.partition(" of ")[0]) for at, what in named(found)] == [
        (module, f"has another weight: row {row}")
    ]


@pytest.mark.parametrize("value", [0.5, 100.0])
def test_a_row_that_matches_nothing_is_named(value: float, tmp_path: Path) -> None:
    one, two, twin = nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False), nn.Linear(16, 32, bias=False)
    order = torch.randperm(32)
    twin.weight.data = one.weight.data[order].clone()
    twin.weight.data[order.tolist().index(5), 3] += value
    x = torch.randn(6, 16)
    found = told(tmp_path, lambda: two(torch.relu(one(x))), lambda: two(torch.relu(twin(x)[:, order.argsort()])))
    (cause,) = found.causes
    assert (cause.kind, cause.what.partition(" of ")[0]) == ("weight", "has another weight: row 5")


def test_each_of_several_causes_is_found(tmp_path: Path) -> None:
    model = llama()
    twin = fused(model)
    model.model.layers[0].self_attn.q_proj.weight.data[3] += 0.1
    model.model.layers[1].mlp.up_proj.weight.data[4] += 0.1
    nn.init.normal_(model.lm_head.weight)
    fault = hooks.when(hooks.BitFlip(bits=20), module="model.layers.1.mlp.down_proj")
    a = record(tmp_path / "a", lambda: model(TOKENS), fault)
    found = judged_products(a, record(tmp_path / "b", lambda: twin(TOKENS)))
    assert [(cause.place.module, cause.kind) for cause in found.causes] == [
        ("model.layers.0.self_attn.q_proj", "weight"),
        ("model.layers.1.mlp.up_proj", "weight"),
        ("model.layers.1.mlp.down_proj", "result"),
        ("lm_head", "weight"),
    ]


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_wrong_result_is_named_on_its_side(side: str, tmp_path: Path) -> None:
    model = llama()
    fault = hooks.when(hooks.BitFlip(bits=27), module="model.layers.1.mlp.up_proj")
    a, b = (record(tmp_path / name, lambda: model(TOKENS), *[fault] * (name == side)) for name in "ab")
    (cause,) = judged_products(a, b).causes
    assert (cause.kind, cause.place.module) == ("result", "model.layers.1.mlp.up_proj")
    assert cause.what.startswith("is right: its result in A is" if side == "a" else "has a result that is")


def test_the_format_of_few_products_is_a_cause(tmp_path: Path) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    low = twin.model.layers[1].mlp.down_proj.to(torch.bfloat16)
    low.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    low.register_forward_hook(lambda _, args, out: out.float())
    found = told(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert named(found) == [("model.layers.1.mlp.down_proj", "computes in bfloat16 where A uses float32")]


def test_a_missing_bias_is_found_after_it_or_told(tmp_path: Path) -> None:
    one, two = nn.Linear(16, 16), nn.Linear(16, 8)
    bare = [nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)]
    for layer, other in zip(bare, (one, two), strict=True):
        layer.weight = other.weight
    x = torch.randn(6, 16)
    found = told(tmp_path / "first", lambda: two(one(x).relu()), lambda: two(bare[0](x).relu()))
    assert [(cause.kind, cause.place.index, cause.after[0].index) for cause in found.causes] == [("operand", 1, 0)]
    found = told(tmp_path / "last", lambda: two(one(x).relu()), lambda: bare[1](one(x).relu()))
    assert (named(found), found.verdict) == ([], "not compared")
    assert "the bias of the last product, which only one run adds" in "".join(found.notes)


def test_products_after_the_last_common_one_are_told(tmp_path: Path) -> None:
    one, two = nn.Linear(16, 16), nn.Linear(16, 8)
    x = torch.randn(6, 16)
    found = told(tmp_path, lambda: one(x), lambda: two(one(x)))
    assert (found.verdict, named(found)) == ("not compared", [])
    assert any(note.startswith("not compared: 1 product of B, the first in Linear#2") for note in found.notes)


def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Callable[[int], Any]) -> runs.Run:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        record(tmp_path / "shards", partial(program, rank))
    return runs.open_run(tmp_path / "shards")


@pytest.mark.parametrize("changed", [False, True], ids=["", "changed"])
@pytest.mark.parametrize("sharded", ["a", "b"])
def test_layers_that_processes_share_are_compared(
    sharded: str, changed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down, x = torch.randn(32, 16), torch.randn(16, 32), torch.randn(5, 16)
    whole = record(tmp_path / "whole", lambda: torch.relu(x @ up.mT) @ down.mT)

    def part(rank: int) -> None:
        mine = slice(16 * rank, 16 * rank + 16)
        shard = down[:, mine].clone()
        shard[4] *= 1.01 if changed and rank else 1
        torch.relu(x @ up[mine].mT) @ shard.mT

    parts = shards(tmp_path, monkeypatch, part)
    found = judged_products(*((parts, whole) if sharded == "a" else (whole, parts)))
    assert (found.joined, found.calls) == (4, 4) if sharded == "a" else (2, 2)
    assert [what.partition(" of ")[0] for _, what in named(found)] == ["has another weight: row 4"] * changed


@pytest.mark.slow
def test_a_tensor_parallel_model_is_joined_with_a_whole_one(tmp_path: Path) -> None:
    ranks = run_beside(*[[parallel_llama.__file__, tmp_path, *rank] for rank in ((0, 1), (0, 2), (1, 2))])
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    whole, parts = runs.open_run(tmp_path / "whole"), runs.open_run(tmp_path / "parts")
    for found in (judged_products(whole, parts), judged_products(parts, whole)):
        assert (named(found), found.equal) == ([], True)
        assert any("self_attn" in note for note in found.notes)  # whose heads are those of one process each


def test_packed_tokens_are_joined_with_padded_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    first, second = torch.randn(5, 16), torch.randn(3, 16)
    padded = torch.zeros(2, 5, 16)
    padded[0, :3], padded[1] = second, first
    check_clean(told(tmp_path, lambda: layers(padded), lambda: layers(torch.cat([second, first]))))


def test_of_tokens_that_resemble_each_other_the_nearest_are_joined(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 16) + torch.randn(2, 16) / 10, torch.randn(2, 16)
    check_clean(told(tmp_path, lambda: x @ w.mT, lambda: [x[:1] @ w[:1].mT, x[1:] @ w[1:].mT]))


def test_steps_of_decoding_are_joined_in_their_order(tmp_path: Path) -> None:
    model = llama()
    twin = fused(model)

    def decode(model: Any) -> None:
        past = None
        for tokens in (TOKENS[:1], TOKENS[:1, :1], TOKENS[:1, 1:2]):
            past = model(tokens, past_key_values=past, use_cache=True).past_key_values

    check_clean(told(tmp_path, lambda: decode(model), lambda: decode(twin)))


def test_weights_that_training_changes_are_named_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    twin, other, x = copy.deepcopy(model), copy.deepcopy(model), torch.randn(6, 16)

    def train(model: nn.Module, rate: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with torch.enable_grad():
            for _ in range(3):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    found = told(tmp_path / "same", lambda: train(model, 0.1), lambda: train(copy.deepcopy(twin), 0.1))
    assert (named(found), found.verdict) == ([], "equal")
    found = told(tmp_path / "other", lambda: train(twin, 0.1), lambda: train(other, 0.11))
    (cause,) = found.causes
    assert (cause.place.module, cause.kind) == ("0", "weight")
    assert cause.what.startswith("has updated its weight otherwise")


@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (1.1, 1.0), (1.0, 2.0**16), (1.1, 2.0**16)])
def test_gradients_tell_whether_the_loss_is_another(temperature: float, scale: float, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    x, y = torch.randn(6, 16), torch.arange(6) % 4

    def train(temperature: float, scale: float = 1.0) -> None:
        with torch.enable_grad():
            (nn.functional.cross_entropy(model(x) / temperature, y) * scale).backward()

    found = told(tmp_path, lambda: train(1.0), lambda: train(temperature, scale))
    assert found.verdict == ("equal" if temperature == 1 else "difference")
    assert [what.partition(",")[0] for _, what in named(found)] == ["gets another gradient of its output"] * (
        temperature != 1
    )


@pytest.mark.parametrize("undone", [True, False])
def test_halved_gradients_accuse_nobody_if_the_next_step_has_the_same_weights(undone: bool, tmp_path: Path) -> None:
    x = torch.randn(6, 16)

    def train(half: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4))
        for _ in range(2):
            with torch.enable_grad():
                loss = model(x).square().mean()
                gradients = torch.autograd.grad(loss / 2 if half else loss, [*model.parameters()])
            for weight, gradient in zip(model.parameters(), gradients, strict=True):
                weight.sub_(0.1 * gradient * (2 if half and undone else 1))

    found = told(tmp_path, lambda: train(False), lambda: train(True))
    assert [what.partition(",")[0] for _, what in named(found)] == ["gets another gradient of its output"] * (
        not undone
    )


def test_the_gradient_of_each_product_is_compared(tmp_path: Path) -> None:
    one, two, x = nn.Linear(16, 24), nn.Linear(24, 4), torch.randn(6, 16)

    def train(penalty: float) -> None:
        with torch.enable_grad():
            inner = one(x)
            (two(inner.tanh()).square().sum() + penalty * inner.square().sum()).backward()

    (cause,) = told(tmp_path, lambda: train(0.1), lambda: train(0.2)).causes
    assert cause.what.startswith("gets another gradient of its output")


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_products_may_have_their_operands_in_each_others_place(swapped: bool, tmp_path: Path) -> None:
    layer, x, y = nn.Linear(16, 24), torch.randn(6, 16), torch.randn(6, 24)
    programs = [lambda: layer(x) @ y.mT, lambda: (y @ layer(x).mT).mT]
    assert named(told(tmp_path, *(programs[::-1] if swapped else programs))) == []


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
def test_whole_numbers_with_scales_stand_for_what_they_are_multiplied_by(swapped: bool, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Tanh(), nn.Linear(48, 16, bias=False))
    x = torch.randn(20, 32)

    def whole(x: Tensor) -> None:
        for layer in layers:
            if not isinstance(layer, nn.Linear):
                x = layer(x)
                continue
            scales, scale = layer.weight.abs().amax(1) / 127, x.abs().amax(1, keepdim=True) / 127
            weight = (layer.weight / scales[:, None]).round().to(torch.int8)
            x = torch._int_mm((x / scale).round().to(torch.int8), weight.t()) * scales * scale

    programs = [lambda: layers(x), lambda: whole(x)]
    check_clean(told(tmp_path, *(programs[::-1] if swapped else programs)), "coarser")


class Gated(nn.Module):
    """A wide MLP, of which one neuron may be off."""

    def __init__(self, width: int, off: float = 1.0) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(64, 64, bias=False), nn.Linear(64, width, bias=False)
        self.up, self.down = nn.Linear(64, width, bias=False), nn.Linear(width, 64, bias=False)
        self.factors = torch.ones(width)
        self.factors[17] = off

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x) * self.factors)
        return out


@pytest.mark.filterwarnings("ignore")  # torch.ao says that it moves
@pytest.mark.parametrize("off", [1.0, 2.0], ids=["", "one is off"])
@pytest.mark.parametrize("width", [512, 4096])
def test_of_many_neurons_one_that_is_far_off_by_chance_is_not_named(width: int, off: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, twin = Gated(width), Gated(width, off)
    twin.load_state_dict(model.state_dict())
    packed = torch.ao.quantization.quantize_dynamic(twin, {nn.Linear})
    x = torch.randn(8, 64)
    found = told(tmp_path, lambda: model(x), lambda: packed(x))
    assert [module for module, _ in named(found)] == ["down"] * (off != 1)


@pytest.mark.parametrize("changed", [False, True], ids=["", "changed"])
def test_levels_at_uneven_distances_are_quantised(changed: bool, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    twin: Any = copy.deepcopy(layers)
    levels = torch.linspace(-1, 1, 16).double() ** 3
    for layer in (twin[0], twin[2]):
        blocks = layer.weight.detach().double().unflatten(1, (-1, 64))  # with a scale of its own each
        scale = blocks.abs().amax(-1, keepdim=True) * 1.003
        nearest = levels[(blocks / scale).unsqueeze(-1).sub(levels).abs().argmin(-1)]
        layer.weight.data = (nearest * scale).flatten(1).bfloat16().float()
    twin[2].weight.data[7, 5] += 0.2 * changed
    x = torch.randn(20, 128)
    found = told(tmp_path, lambda: layers(x), lambda: twin(x))
    assert [what.partition(" of ")[0] for _, what in named(found)] == ["has another weight: row 7"] * changed
    assert [each.what for each in found.coarser] == ["has its weights in few levels: 2 of 2 products"]


@pytest.mark.parametrize("change", ["input", "weight", ""])
def test_a_recurrent_layer_is_compared_as_a_whole(change: str, tmp_path: Path) -> None:
    layer, x = nn.LSTM(16, 16), torch.randn(5, 2, 16)
    twin: Any = copy.deepcopy(layer)
    y = x.clone()
    twin.weight_ih_l0.data[3, 5] += 0.1 * (change == "weight")
    y[2, 1, 3] += 0.1 * (change == "input")
    found = told(tmp_path, lambda: layer(x), lambda: twin(y))
    wanted = {"input": "has another input", "weight": "has another weight: row 3 of"}
    assert [what.startswith(wanted[change]) for _, what in named(found)] == [True] * bool(change)


def test_a_weight_that_one_run_uses_more_often_says_so(tmp_path: Path) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(3, 16)
    found = told(tmp_path, lambda: layer(x), lambda: (layer(x), layer(x[:2])))
    assert any("the other run uses its weight in 1 call, this one in 2" in note for note in found.notes)


@pytest.mark.parametrize("tensors", ["none", "stats", "sample"])
def test_runs_without_values_are_refused(tensors: str, tmp_path: Path) -> None:
    a = record(tmp_path / "a", lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    b = record(tmp_path / "b", lambda: torch.ones(3, 4) @ torch.ones(4, 5), tensors=tensors)
    with pytest.raises(OpInterceptError, match=r"no call of .* can be joined .*: .* record with tensors='full'"):
        judged_products(a, b)


def test_a_weight_that_is_read_in_both_directions_has_rows_of_both(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, down, up = nn.Linear(12, 10), nn.Linear(12, 2, bias=False), nn.Linear(2, 10, bias=False)
    x, last = torch.randn(6, 12), nn.Linear(10, 3)

    def scaled() -> Any:
        whole = base.weight + 2 * (up.weight @ down.weight)
        return last(torch.tanh((linear(x, base.weight) + up(down(x)) * 2) / whole.norm(dim=1) + base.bias))

    def merged() -> Any:
        one, two, three = (each.weight.detach().clone() for each in (base, up, down))
        whole = one + 2 * two @ three
        return last(torch.tanh(linear(x, whole / whole.norm(dim=1, keepdim=True), base.bias)))

    found = told(tmp_path, scaled, merged)
    assert not found.causes, found


def test_runs_without_a_weight_in_common_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OpInterceptError, match=r"no rows in common; record .*, or compare .* with `opintercept diff"):
        told(tmp_path, lambda: torch.randn(3, 4) @ torch.randn(4, 5), lambda: torch.randn(3, 6) @ torch.randn(6, 5))


@pytest.mark.parametrize("changed", [False, True], ids=["", "changed"])
def test_weights_of_eight_bits_in_floating_point_are_quantised(changed: bool, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    twin: Any = copy.deepcopy(layers)
    for layer in (twin[0], twin[2]):
        scale = layer.weight.data.abs().max() / 448
        layer.weight.data = (layer.weight.data / scale).to(torch.float8_e4m3fn).float() * scale
    twin[2].weight.data[7] *= 1 + 0.1 * changed
    x = torch.randn(20, 64)
    found = told(tmp_path, lambda: layers(x), lambda: twin(x))
    assert [what.partition(" of ")[0] for _, what in named(found)] == ["has another weight: row 7"] * changed
    assert [each.what for each in found.coarser] == ["has its weights in float8: 2 of 2 products"]


def test_low_rank_terms_that_are_merged_in_bfloat16_accuse_nobody(tmp_path: Path) -> None:
    first, base, last = (nn.Linear(64, 64, bias=False) for _ in range(3))
    apart = Adapted(base, 0.3)
    merged = nn.Sequential(copy.deepcopy(first), apart.merged(), nn.ReLU(), copy.deepcopy(last)).bfloat16()
    x = torch.randn(8, 64)
    check_clean(told(tmp_path, lambda: last(apart(first(x)).relu()), lambda: merged(x.bfloat16())), "coarser")
