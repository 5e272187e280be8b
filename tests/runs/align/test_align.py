"""Runs of programs whose modules have other names are joined by the rows of their weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import parallel_llama
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_llama import llama
from processes import run_beside
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from opintercept import OpInterceptError, hooks, intercept, runs
from opintercept.runs.align.alignment import Aligned, Alignment
from opintercept.runs.align.weights import fingerprints

TOKENS = torch.arange(20).view(2, 10) * 7 % 50


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

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        parts: tuple[Tensor, ...] = linear(x, self.weight)[..., self.back].split(self.sizes, -1)
        return parts


class Part(nn.Module):
    """A part of the layers that are fused; the first of them computes them all."""

    def __init__(self, whole: Fused, number: int) -> None:
        super().__init__()
        self.whole, self.number = [whole], number

    def forward(self, x: Tensor) -> Tensor:
        if not self.number:
            self.whole[0].last = self.whole[0](x)
        return self.whole[0].last[self.number]


def fused(model: Any) -> Any:
    """A twin with q, k and v in one layer with permuted rows, and gate and up in one."""
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        for owner, names, whole in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv"),
            (layer.mlp, ("gate_proj", "up_proj"), "gate_up"),
        ):
            setattr(owner, whole, Fused([getattr(owner, name) for name in names], permuted=whole == "qkv"))
            for number, name in enumerate(names):
                setattr(owner, name, Part(getattr(owner, whole), number))
    return twin


def replaced(model: Any, make: Callable[[Any], nn.Module]) -> Any:
    """A twin in whose layers each projection is another module."""
    twin = copy.deepcopy(model)
    for layer in [*twin.model.layers]:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in [*owner.named_children()]:
                if isinstance(child, nn.Linear):
                    setattr(owner, name, make(child))
    return twin


def record(path: Path, program: Callable[[], Any], tensors: Any = "full") -> runs.Run:
    with torch.no_grad(), intercept(runs.RunRecorder(path, tensors)):
        program()
    return runs.open_run(path)


def aligned(folder: Path, one: Callable[[], Any], other: Callable[[], Any]) -> Alignment:
    return runs.align(record(folder / "a", one), record(folder / "b", other))


def modules(pair: Aligned) -> tuple[str | None, list[str | None]]:
    return pair.a.record.module, [call.record.module for call in pair.b]


def check_whole(found: Alignment) -> None:
    """Every call of both runs is joined, and nothing differs by more than rounding."""
    assert not found.apart
    assert len(found.pairs) == found.calls[0]
    assert found.joined_b == found.calls[1]
    assert found.first is None
    assert all(pair.rows == pair.of for pair in found.pairs)


def test_fused_and_permuted_projections_are_joined_with_their_parts(tmp_path: Path) -> None:
    model = llama(layers=4)
    twin = fused(model)
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    check_whole(found)
    weighted = [pair for pair in found.pairs if pair.of]
    assert len(weighted) == 29
    assert {pair.by for pair in weighted} == {"rows"}
    names = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(("gate_proj", "up_proj"), "gate_up")
    for pair in weighted:
        name, others = modules(pair)
        assert name is not None
        owner, _, last = name.rpartition(".")
        assert others == [f"{owner}.{names[last]}" if last in names else name]
    assert max(pair.output or 0 for pair in found.pairs) < 1e-6


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_a_scaled_row_is_named_first(seed: int, tmp_path: Path) -> None:
    model = llama(seed)
    twin = fused(model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    name, layer = layers[seed * 7 % len(layers)]
    row = seed * 5 % len(layer.weight)
    layer.weight.data[row] *= 1.01
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.kind, found.first.changed) == (name, "changed operand", ("rhs",))
    assert found.first.changed_rows == (row,)
    assert len(found.pairs) == found.calls[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_a_scaled_row_is_named_in_a_copy_in_bfloat16(seed: int, tmp_path: Path) -> None:
    model = llama(seed)
    twin = fused(model).to(torch.bfloat16)
    name, layer = [*((n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear))][seed * 2 + 1]
    layer.weight.data[seed] *= 1.01
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.changed) == (name, ("rhs",))
    assert found.first.changed_rows == (seed,)


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
        layer = copy.deepcopy(self.base)
        layer.weight.data += 2.0 * self.up.weight @ self.down.weight
        return layer  # type: ignore[no-any-return]


def permute_neurons(model: Any) -> Any:
    twin = copy.deepcopy(model)
    for layer in twin.model.layers:
        order = torch.randperm(48)
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data[order]
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, order].contiguous()
    return twin


TWINS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bfloat16": (lambda model: copy.deepcopy(model).to(torch.bfloat16), "rows"),
    "float16": (lambda model: copy.deepcopy(model).to(torch.float16), "values"),
    "float64": (lambda model: copy.deepcopy(model).to(torch.float64), "rows"),
    "permuted neurons": (permute_neurons, "permuted"),
    "int8": (lambda model: replaced(model, Quantised), "values"),
    "compiled": (lambda model: torch.compile(copy.deepcopy(model), backend="aot_eager"), "rows"),
}


def test_outputs_below_the_normal_numbers_are_as_exact_as_their_dtype(tmp_path: Path) -> None:
    layer = nn.Linear(32, 32, bias=False, dtype=torch.float16)
    x = torch.randn(8, 32).mul(1e-5).half()
    found = aligned(tmp_path, lambda: layer(x), lambda: layer(x))
    assert layer(x).abs().max() < torch.finfo(torch.float16).smallest_normal
    check_whole(found)


@pytest.mark.parametrize("name", [*list(TWINS)[:-1], pytest.param("compiled", marks=pytest.mark.slow)])
def test_copies_of_a_model_are_joined(name: str, tmp_path: Path) -> None:
    make, by = TWINS[name]
    model = llama()
    twin = make(model)
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    check_whole(found)
    assert by in {pair.by for pair in found.pairs}
    if name != "compiled":
        assert all([pair.a.record.module] == [call.record.module for call in pair.b] for pair in found.pairs)
    limit = {"bfloat16": 0.05, "float16": 5e-3, "int8": 0.05}.get(name, 2e-6)
    assert max(pair.output or 0 for pair in found.pairs) < limit
    assert all(pair.output is not None for pair in found.pairs)


@pytest.mark.parametrize("size", [0.01, 1.0], ids=["small", "large"])
@pytest.mark.parametrize("swapped", [False, True], ids=["apart in B", "apart in A"])
def test_lora_apart_is_joined_with_lora_merged(swapped: bool, size: float, tmp_path: Path) -> None:
    model = llama()
    apart = replaced(model, partial(Adapted, size=size))
    merged = copy.deepcopy(apart)
    for layer in merged.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, child in [*owner.named_children()]:
                if isinstance(child, Adapted):
                    setattr(owner, name, child.merged())
    one, other = (apart, merged) if swapped else (merged, apart)
    found = aligned(tmp_path, lambda: one(TOKENS), lambda: other(TOKENS))
    check_whole(found)
    sums = [pair for pair in found.pairs if pair.by == "sum" and pair.of]
    assert len(sums) == 14
    assert all(pair.output is not None and pair.output < 1e-5 for pair in sums)  # float32 rounds in each layer


def gpt2(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model: Any = transformers.GPT2LMHeadModel(config).train(False)
    model.set_attn_implementation(attention)
    return model


def test_transposed_weights_are_joined(tmp_path: Path) -> None:
    model = gpt2("eager")
    twin = copy.deepcopy(model)
    for block in twin.transformer.h:
        for owner, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            old = getattr(owner, name)
            new = nn.Linear(*old.weight.shape)
            new.weight.data, new.bias.data = old.weight.data.t().contiguous(), old.bias.data.clone()
            setattr(owner, name, new)
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    check_whole(found)
    assert {pair.kind for pair in found.pairs} <= {"equal", "close"}


@pytest.mark.parametrize("swapped", [False, True], ids=["fused in B", "fused in A"])
def test_attention_by_two_products_is_joined_with_a_fused_one(swapped: bool, tmp_path: Path) -> None:
    one, other = gpt2("eager"), gpt2("sdpa")
    if swapped:
        one, other = other, one
    found = aligned(tmp_path, lambda: one(TOKENS), lambda: other(TOKENS))
    check_whole(found)
    attentions = [pair for pair in found.pairs if not pair.of and pair.output is not None]
    assert len(attentions) == 2
    assert all(pair.by == "neighbours" and pair.output < 1e-6 for pair in attentions)  # type: ignore[operator]


def test_an_encoder_is_joined_with_one_by_hand_that_adds_biases_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=32, **sizes)
    bert: Any = transformers.BertModel(config, add_pooling_layer=False).train(False)

    def by_hand(tokens: Tensor) -> None:
        x = bert.embeddings(tokens)
        for layer in bert.encoder.layer:
            own = layer.attention.self
            q, k, v = (
                (x @ each.weight.mT + each.bias).view(2, 10, 4, 8).mT for each in (own.query, own.key, own.value)
            )
            q, k, v = (each.movedim(-1, 1).movedim(2, 3) for each in (q.mT, k.mT, v.mT))
            mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(20, 32)
            out = layer.attention.output
            x = out.LayerNorm((mixed @ out.dense.weight.mT + out.dense.bias).view(2, 10, 32) + x)
            inner = gelu(linear(x, layer.intermediate.dense.weight, layer.intermediate.dense.bias))
            x = layer.output.LayerNorm(inner @ layer.output.dense.weight.mT + layer.output.dense.bias + x)

    found = aligned(tmp_path, lambda: bert(TOKENS), lambda: by_hand(TOKENS))
    assert len([pair for pair in found.pairs if pair.of]) == 12
    assert all(pair.rows == pair.of and pair.b[0].record.bias is None for pair in found.pairs if pair.of == 32)


def test_a_changed_bias_is_named_first(tmp_path: Path) -> None:
    model = gpt2("sdpa")
    twin = copy.deepcopy(model)
    twin.transformer.h[1].mlp.c_fc.bias.data[3] += 0.01
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.changed) == ("transformer.h.1.mlp.c_fc", ("bias",))
    assert {pair.kind for pair in found.pairs[found.pairs.index(found.first) + 1 :]} <= {"inherited", "equal"}


def test_a_change_between_two_products_is_named_at_the_next_one(tmp_path: Path) -> None:
    model = llama()
    twin = copy.deepcopy(model).to(torch.float64)  # so that all products before differ a little
    twin.model.layers[1].input_layernorm.weight.data *= 1.1
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.changed) == ("model.layers.1.self_attn.q_proj", ("lhs",))
    assert found.first.lhs == pytest.approx(0.1, rel=1e-3)  # float32 rounds


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_wrong_product_is_named_on_its_side(side: str, tmp_path: Path) -> None:
    model = llama()

    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        faults = [hooks.when(hooks.BitFlip(bits=27), module="model.layers.1.mlp.up_proj")] * (folder.name == side)
        with torch.no_grad(), intercept([*faults, runs.RunRecorder(folder, "full")]):
            model(TOKENS)
    found = runs.align(*map(runs.open_run, folders))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.kind) == ("model.layers.1.mlp.up_proj", "added")
    roundings = {"a": found.first.rounding_a, "b": found.first.rounding_b}
    other = roundings.pop("b" if side == "a" else "a")
    assert other is not None
    assert other < 2 < 16 < (roundings[side] or 0)


def test_another_weight_in_the_same_place_is_a_changed_operand(tmp_path: Path) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    nn.init.normal_(twin.lm_head.weight)
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert not found.apart
    assert found.first is not None
    assert (found.first.a.record.module, found.first.by) == ("lm_head", "neighbours")
    assert (found.first.kind, found.first.changed) == ("changed operand", ("rhs",))


def test_tied_weights_are_joined_call_by_call(tmp_path: Path) -> None:
    shared, apart = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    apart.weight.data = shared.weight.data.clone()
    x = torch.randn(3, 16)
    found = aligned(tmp_path, lambda: shared(shared(x)), lambda: apart(shared(x)))
    assert [pair.kind for pair in found.pairs] == ["equal", "equal"]
    assert [pair.b[0].record.index for pair in found.pairs] == [0, 1]


def test_equal_rows_are_joined_in_their_order(tmp_path: Path) -> None:
    whole = torch.randn(8, 16)
    whole[2] = whole[5]
    whole[6:] = 0.0
    x = torch.randn(3, 16)
    found = aligned(tmp_path, lambda: x @ whole.mT, lambda: (x @ whole[:4].mT, x @ whole[4:].mT))
    (pair,) = found.pairs
    assert (pair.rows, pair.of, pair.output) == (8, 8, 0.0)
    assert found.joined_b == 2


@pytest.mark.parametrize("sharded", ["a", "b"])
def test_layers_that_processes_share_are_joined_with_whole_ones(
    sharded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up, down = torch.randn(32, 16), torch.randn(16, 32)
    x = torch.randn(5, 16)
    whole = record(tmp_path / "whole", lambda: torch.relu(x @ up.mT) @ down.mT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        mine = slice(16 * rank, 16 * rank + 16)
        record(tmp_path / "shards", lambda mine=mine: torch.relu(x @ up[mine].mT) @ down[:, mine].mT)  # type: ignore[misc]
    shards = runs.open_run(tmp_path / "shards")
    found = runs.align(shards, whole) if sharded == "a" else runs.align(whole, shards)
    check_whole_of_shards(found, 4 if sharded == "a" else 2)


def check_whole_of_shards(found: Alignment, calls: int) -> None:
    assert not found.apart
    assert len(found.pairs) == calls
    assert [pair.by for pair in found.pairs].count("parts") == calls // 2
    compared = [pair for pair in found.pairs if pair.output is not None]
    assert all(pair.output < 1e-6 for pair in compared)  # type: ignore[operator]
    # Of partial sums in A, the last one has the comparison.
    assert len(compared) == (3 if calls == 4 else 2)
    assert found.first is None


@pytest.mark.slow
def test_a_tensor_parallel_model_is_joined_with_a_whole_one(tmp_path: Path) -> None:
    ranks = run_beside(*[[parallel_llama.__file__, tmp_path, *rank] for rank in ((0, 1), (0, 2), (1, 2))])
    assert [rank.returncode for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    whole, parts = runs.open_run(tmp_path / "whole"), runs.open_run(tmp_path / "parts")
    for one, other, compared in ((whole, parts, 17), (parts, whole, 28)):
        found = runs.align(one, other)
        check_whole(found)
        outputs = [pair.output for pair in found.pairs if pair.output is not None]
        assert len(outputs) == compared  # of parts in A, the last one has the comparison
        assert max(outputs) < 1e-6


def test_a_changed_shard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(16, 64), torch.randn(5, 64)
    whole = record(tmp_path / "whole", lambda: x @ weight.mT)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        mine = slice(32 * rank, 32 * rank + 32)
        shard = weight[:, mine].clone()
        if rank:
            shard[4] *= 1.01
        record(tmp_path / "shards", lambda mine=mine, shard=shard: x[:, mine] @ shard.mT)  # type: ignore[misc]
    found = runs.align(whole, runs.open_run(tmp_path / "shards"))
    assert found.first is not None
    assert (found.first.kind, found.first.changed, found.first.changed_rows) == ("changed operand", ("rhs",), (4,))


def test_packed_tokens_are_joined_with_padded_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    first, second = torch.randn(5, 16), torch.randn(3, 16)
    padded = torch.zeros(2, 5, 16)
    padded[0, :3], padded[1] = second, first
    found = aligned(tmp_path, lambda: layers(padded), lambda: layers(torch.cat([second, first])))
    check_whole(found)
    assert all(pair.output is not None and pair.output < 1e-6 for pair in found.pairs)


def test_steps_of_decoding_are_joined_in_their_order(tmp_path: Path) -> None:
    model = llama()
    twin = fused(model)

    def decode(model: Any) -> None:
        past = None
        for tokens in (TOKENS[:1], TOKENS[:1, :1], TOKENS[:1, 1:2]):
            past = model(tokens, past_key_values=past, use_cache=True).past_key_values

    found = aligned(tmp_path, lambda: decode(model), lambda: decode(twin))
    check_whole(found)
    assert all(pair.output is not None for pair in found.pairs)


def test_weights_that_training_changes_stay_the_same_weight(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 4))
    twin = copy.deepcopy(model)
    x = torch.randn(6, 16)

    def train(model: nn.Module, rate: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with torch.enable_grad():
            for _ in range(3):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    found = aligned(tmp_path, lambda: train(model, 0.1), lambda: train(twin, 0.11))
    assert len(found.pairs) == found.calls[0] == 6
    outputs = [pair.output for pair in found.pairs]
    assert outputs[:2] == [0.0, 0.0]
    assert all(error is not None and error > 1e-3 for error in outputs[2:])


def test_a_weight_that_one_run_uses_more_often_says_so(tmp_path: Path) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(3, 16)
    found = aligned(tmp_path, lambda: layer(x), lambda: (layer(x), layer(x[:2])))
    assert [each.reason for each in found.apart] == [
        "the other run uses its weight in 1 call, this one in 2; no row of its left operand is one of theirs"
    ]
    assert found.pairs[0].kind == "equal"


@pytest.mark.parametrize("tensors", ["none", "stats", "sample"])
def test_runs_without_values_are_refused(tensors: str, tmp_path: Path) -> None:
    one = record(tmp_path / "a", lambda: torch.ones(3, 4) @ torch.ones(4, 5))
    other = record(tmp_path / "b", lambda: torch.ones(3, 4) @ torch.ones(4, 5), tensors)
    with pytest.raises(
        OpInterceptError, match=r"no call of .* can be joined with one of .*: .* record with tensors='full'"
    ):
        runs.align(one, other)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**31))
def test_fingerprints_are_those_of_rows_and_not_of_layouts(n: int, k: int, seed: int) -> None:
    rows = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    found = fingerprints(rows)
    for same in (rows.float(), rows.double(), rows.mT.contiguous().mT, rows.repeat(1, 2)[:, :k]):
        assert np.array_equal(fingerprints(same), found)
    order = torch.randperm(k)
    assert np.array_equal(fingerprints(rows[:, order], ordered=False), fingerprints(rows, ordered=False))
    changed = rows.clone()
    changed[0, k // 2] += 1
    assert fingerprints(changed)[0] != found[0]
    assert np.array_equal(fingerprints(changed)[1:], found[1:])


def nearly_alike(layer: nn.Linear, change: Callable[[Tensor], None]) -> nn.Linear:
    twin = copy.deepcopy(layer)
    change(twin.weight.data)
    return twin


@pytest.mark.parametrize("value", [0.5, 100.0])
def test_a_row_that_matches_nothing_is_named_with_the_nearest(value: float, tmp_path: Path) -> None:
    one, two = nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)
    order = torch.randperm(32)
    twin = nn.Linear(16, 32, bias=False)
    twin.weight.data = one.weight.data[order].clone()
    twin.weight.data[order.tolist().index(5), 3] += value
    x = torch.randn(6, 16)
    found = aligned(tmp_path, lambda: two(torch.relu(one(x))), lambda: two(torch.relu(twin(x)[:, order.argsort()])))
    assert not found.apart
    assert found.first is found.pairs[0]
    assert (found.first.kind, found.first.changed, found.first.changed_rows) == ("changed operand", ("rhs",), (5,))
    ((row, distance),) = found.first.nearest
    assert row == order.tolist().index(5)
    assert distance == pytest.approx(value / float(one.weight[5].detach().norm()), rel=1e-3)  # bfloat16 finds the rows
    assert f"nearest in B: row {row} (by {distance:.2g})" in str(found)


def test_a_weight_of_other_rows_in_a_fused_one_is_named(tmp_path: Path) -> None:
    model = llama()
    twin = fused(model)
    name = "model.layers.1.self_attn.v_proj"
    nn.init.normal_(model.get_submodule(name).weight, std=0.02)
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert not found.apart
    assert found.first is not None
    assert (found.first.a.record.module, found.first.changed) == (name, ("rhs",))


def test_what_lies_between_is_named_if_the_run_has_all_operators(tmp_path: Path) -> None:
    one, two = nn.Linear(16, 16), nn.Linear(16, 8)
    x = torch.randn(6, 16)
    with torch.no_grad(), intercept(runs.RunRecorder(tmp_path / "a", "full"), ops="all"):
        two(gelu(one(x)) * 2)
    other = record(tmp_path / "b", lambda: two(gelu(one(x), approximate="tanh") * 2))
    found = runs.align(runs.open_run(tmp_path / "a"), other)
    assert found.first is not None
    assert found.calls == (2, 2)
    assert (found.first.changed, found.first.after, found.first.between[:2]) == (("lhs",), "Linear", ("gelu", "mul"))
    assert "between Linear and this call\n    what A computes there: gelu, mul" in str(found)


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
    found = aligned(tmp_path, *(programs[::-1] if swapped else programs))
    check_whole(found)
    assert all(pair.output is not None and 0 < pair.output < 0.05 for pair in found.pairs)


@pytest.mark.filterwarnings("ignore")  # torch.ao says that it moves
@pytest.mark.parametrize("changed", [False, True], ids=["", "changed"])
def test_dynamic_int8_is_joined_by_what_it_computes(changed: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))
    packed = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    x = torch.randn(20, 32)
    between: Any = nn.Sigmoid() if changed else nn.ReLU()
    found = aligned(tmp_path, lambda: model(x), lambda: packed[4](between(packed[2](packed[1](packed[0](x))))))
    assert not found.apart
    if changed:
        assert found.first is not None
        assert (found.first.a.record.module, found.first.changed) == ("4", ("lhs",))
    else:
        check_whole(found)


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
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x) * self.factors)
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
    found = aligned(tmp_path, lambda: model(x), lambda: packed(x))
    named = found.first and (found.first.a.record.module, found.first.changed)
    assert named == (("down", ("lhs",)) if off != 1 else None)


@pytest.mark.parametrize("changed", [False, True], ids=["", "changed"])
def test_levels_at_uneven_distances_are_rounding(changed: bool, tmp_path: Path) -> None:
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
    found = aligned(tmp_path, lambda: layers(x), lambda: twin(x))
    assert [pair.changed_rows for pair in found.pairs if "rhs" in pair.changed] == [(7,)] * changed


def test_one_product_in_another_dtype_is_named(tmp_path: Path) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    low = twin.model.layers[1].mlp.down_proj.to(torch.bfloat16)
    low.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    low.register_forward_hook(lambda _, args, out: out.float())
    found = aligned(tmp_path, lambda: model(TOKENS), lambda: twin(TOKENS))
    assert found.first is not None
    assert (found.first.a.record.module, found.first.kind) == ("model.layers.1.mlp.down_proj", "changed argument")
    assert found.first.arguments == (("dtype", "float32", "bfloat16"),)


def test_a_factor_that_moves_from_the_input_to_the_weight_is_no_change(tmp_path: Path) -> None:
    one, two = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
    gain = 1 + 0.1 * torch.randn(16)
    folded = nearly_alike(two, lambda weight: weight.mul_(gain))  # type: ignore[arg-type]
    x = torch.randn(6, 16)
    found = aligned(tmp_path, lambda: two(one(x) * gain), lambda: folded(one(x)))
    check_whole(found)


def test_a_call_that_is_not_wrong_has_no_number_in_the_message(tmp_path: Path) -> None:
    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    with torch.no_grad(), intercept([hooks.BitFlip(bits=30), runs.RunRecorder(tmp_path / "a", "full")]):
        linear(x, weight)
    found = runs.align(runs.open_run(tmp_path / "a"), record(tmp_path / "b", lambda: linear(x, weight)))
    lines = [line for line in str(found).splitlines() if "added:" in line]
    assert len(lines) == 1
    assert lines[0].startswith("  added: the call in A is wrong by ")


def test_runs_without_a_weight_in_common_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OpInterceptError, match=r"no rows in common; record .*, or compare .* with `opintercept diff"):
        aligned(tmp_path, lambda: torch.randn(3, 4) @ torch.randn(4, 5), lambda: torch.randn(3, 6) @ torch.randn(6, 5))
