"""`AttentionWeights`: the weights of every form of attention, against torch's math path and eager models."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_calls import call_of
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from opintercept import OpInterceptWarning, hooks, intercept
from opintercept._core.call import OpCall
from opintercept._ops.table import row_of
from opintercept._values import attention as _attention

pytestmark = pytest.mark.slow

EPS = 2.0**-24  # the unit roundoff of float32, which the weights are computed in


def calls_of(
    program: Callable[[], Any], of: Any = "probabilities", level: Any = "dispatch"
) -> list[hooks.AttentionCall]:
    """What is kept of a program in which no attention is skipped."""
    weights = hooks.AttentionWeights(of)
    with intercept(weights, level=level):
        program()
    assert weights.skipped == {}
    return weights.calls


def exact_scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """The scores in float64, `[b, h, s_q, s_k]`, with the key's heads repeated."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return query.double() @ key.double().mT * scale


def math_path(query: torch.Tensor, key: torch.Tensor, **options: Any) -> torch.Tensor:
    """The probabilities that torch's math path uses, in float64: its output for an identity as the value."""
    eye = torch.eye(key.shape[-2], dtype=torch.float64).expand(*key.shape[:-1], key.shape[-2])
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query.double(), key.double(), eye, attn_mask=mask, **options)


def tolerances(query: torch.Tensor, key: torch.Tensor, scale: float, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper bounds of the rounding error of a score and, relatively, of a probability.

    A sum of d products in any order is off by at most (d + 2) * eps * sum(abs(products)), scaling included (Higham
    2002, 3.1); adding a mask adds eps times the result. The softmax turns an error of its exponents into a relative
    error of numerator and denominator. Subtracting the maximum (eps times the exponent, twice), exp, the sum over
    the keys and the division add their own errors.
    """
    size = exact_scores(query.abs(), key.abs(), abs(scale))
    if mask is not None and mask.dtype != torch.bool:
        size = size + mask.double().abs().where(mask.isfinite(), 0)
    score = (query.shape[-1] + 4) * EPS * size
    probability = 2 * score.amax(-1, keepdim=True) + (4 * size.amax(-1, keepdim=True) + key.shape[-2] + 8) * EPS
    return score, probability


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_weights_are_those_of_the_math_path(data: Any) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**16), "seed"))
    batch, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    s_q, s_k, d = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(1, 17))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    scale = draw(st.sampled_from([None, 0.25, 3.0]))
    kind = draw(st.sampled_from(["none", "bool", "float", "causal", "broadcast"]))
    level: Any = draw(st.sampled_from(["dispatch", "function"]))
    query = torch.randn(batch, heads * group, s_q, d).to(dtype)
    key = torch.randn(batch, heads, s_k, d).to(dtype)
    mask = {
        "bool": torch.rand(batch, heads * group, s_q, s_k) < 0.7,
        "float": torch.randn(s_q, s_k).masked_fill(torch.rand(s_q, s_k) < 0.2, -math.inf).to(dtype),
        "broadcast": torch.rand(batch, 1, 1, s_k) < 0.7,
    }.get(kind)
    options = {"attn_mask": mask, "is_causal": kind == "causal", "scale": scale, "enable_gqa": group > 1}
    factor = 1 / math.sqrt(d) if scale is None else scale
    score_error, probability_error = tolerances(query, key, factor, mask)
    expected = math_path(query, key, **options)
    hidden = expected == 0
    kept = {}
    for of in ("probabilities", "scores", "entropy"):
        [call] = calls_of(lambda: F.scaled_dot_product_attention(query, key, key, **options), of, level)
        kept[of] = call.values
        assert kept[of].dtype == torch.float32
    # Below exp(-87) a float32 underflows.
    wrong = (kept["probabilities"].double() - expected).abs() > probability_error * expected + 1e-38
    assert not wrong.any()
    scores = exact_scores(query, key, factor)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask.double()
    visible = kept["scores"].isfinite()
    assert (visible | hidden).all()
    assert ((kept["scores"].double() - scores).abs() <= score_error)[visible].all()
    assert (kept["scores"][~visible] == -math.inf).all()
    entropy = torch.special.entr(expected).sum(-1)
    # d(p log p) = (1 + log p) dp, and p * abs(log p) is at most 1 / e.
    assert ((kept["entropy"].double() - entropy).abs() <= probability_error.squeeze(-1) * (entropy + 1) + 1e-6).all()


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4), (2, 2, 3, 5, 4)], ids=len)
def test_operands_may_have_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    query = torch.randn(shape, dtype=torch.float64)
    [call] = calls_of(lambda: F.scaled_dot_product_attention(query, query, query), level="function")
    assert call.values.shape == ((1,) if len(shape) == 2 else ()) + (*shape[:-1], 5)
    # All in float64, so both are exact to a few units in its last place.
    torch.testing.assert_close(call.values.reshape(*shape[:-1], 5), math_path(query, query), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        ((2, 1, 3, 4), (2, 3, 5, 4), None),
        ((2, 3, 3, 4), (1, 1, 5, 4), None),
        ((1, 3, 3, 4), (2, 3, 5, 4), None),
        ((2, 3, 3, 4), (2, 3, 5, 4), (5,)),
    ],
    ids=["head of the query", "batch and head of the key", "batch of the query", "row of a mask"],
)
def test_operands_are_broadcast(query: Any, key: Any, mask: Any) -> None:
    q, k = torch.randn(query, dtype=torch.float64), torch.randn(key, dtype=torch.float64)
    m = None if mask is None else torch.randn(mask, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        [call] = calls_of(lambda: F.scaled_dot_product_attention(q, k, k, m), level="function")
    scores = q @ k.mT / 2
    expected = (scores if m is None else scores + m).softmax(-1)
    torch.testing.assert_close(call.values, expected, rtol=1e-13, atol=1e-15)


def test_a_query_that_sees_no_key_has_zeros() -> None:
    query, mask = torch.randn(1, 1, 3, 4), torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    assert (F.scaled_dot_product_attention(query, query, query, mask)[0, 0, 1] == 0).all()
    for of in ("probabilities", "entropy"):
        [call] = calls_of(lambda: F.scaled_dot_product_attention(query, query, query, mask), of)
        assert (call.values[0, 0, 1] == 0).all()


# Shapes of [b, h, s, d]; the operators that want [b, s, h, d] get their transposes.
QUERY, KEY = (2, 4, 3, 8), (2, 2, 5, 8)

FORMS = [
    ("_scaled_dot_product_flash_attention", "is_causal", 2),
    ("_scaled_dot_product_flash_attention_for_cpu", "is_causal", 0),
    ("_scaled_dot_product_efficient_attention", "is_causal", 0),
    ("_scaled_dot_product_cudnn_attention", "is_causal", 0),
    ("_scaled_dot_product_fused_attention_overrideable", "is_causal", 0),
    ("_scaled_dot_product_attention_math", "is_causal", 0),
    ("_scaled_dot_product_attention_math_for_mps", "is_causal", 0),
    ("_cudnn_attention_forward", "is_causal", 0),
    ("_flash_attention_forward", "is_causal", 2),
    ("_flash_attention_forward_no_dropout_inplace", "is_causal", 2),
    ("_efficient_attention_forward", "custom_mask_type", 0),
    ("_efficient_attention_forward", "custom_mask_type", 2),
    ("_triton_scaled_dot_attention", "", None),
    ("scaled_dot_product_attention", "is_causal", 0),
]


def whole_call_of(func: Any, **given: Any) -> OpCall:
    """A call of an operator that does not run here; arguments left out get their default, None or 0."""
    args, kwargs = [], {}
    for argument in func._schema.arguments:
        default = argument.default_value if argument.has_default_value() else None
        value = given.get(argument.name, 0 if str(argument.type) in ("int", "float", "bool") else default)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return call_of(func, *args, **kwargs)


@pytest.mark.parametrize(("name", "flag", "offset"), FORMS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_weights_of_every_attention_operator(name: str, flag: str, offset: int | None, masked: bool) -> None:
    if not hasattr(torch.ops.aten, name):
        pytest.skip("newer than this torch")
    func = getattr(torch.ops.aten, name).default
    query, key, mask = torch.randn(QUERY).double(), torch.randn(KEY).double(), torch.randn(2, 4, 3, 5).double()
    names = {argument.name for argument in func._schema.arguments}
    place = next((word for word in ("attn_mask", "attn_bias", "bias") if word in names), None)
    if masked and place is None:
        pytest.skip("takes no mask")
    given: dict[str, Any] = {"scale": 0.7, "dropout_p": 0.1}
    last = name.startswith(("_flash", "_efficient"))
    operands = {"query": query, "key": key, "value": key}
    for word, tensor in operands.items():
        given[word if word in names else word[0]] = tensor.transpose(1, 2) if last else tensor
    if masked:
        given[place] = mask  # type: ignore[index]
    elif flag:
        given[flag] = True if flag == "is_causal" else 2 if offset else 1
    scores = exact_scores(query, key, 0.7 if "scale" in names else 8**-0.5)
    if masked:
        scores = scores + mask
    elif offset is not None:
        scores = scores.masked_fill(torch.ones(3, 5).tril(offset) == 0, -math.inf)
    weights = hooks.AttentionWeights()
    weights.post(whole_call_of(func, **given))
    [call] = weights.calls
    torch.testing.assert_close(call.values, scores.softmax(-1), rtol=1e-13, atol=1e-15)
    assert call.dropout == (0.0 if name.endswith("inplace") is False and "dropout_p" not in names else 0.1)
    assert weights.skipped == {}


def test_the_table_of_forms_is_complete() -> None:
    assert {name for name, _, _ in FORMS} == _attention.FORWARD
    for name in _attention.FORWARD | _attention.BACKWARD:
        assert row_of(f"aten::{name}").family == "attention"


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("_flash_attention_forward", {"cum_seq_q": torch.tensor([0, 3])}, "cum_seq_q is given"),
        ("_flash_attention_forward", {"window_size_left": 2}, "window_size_left is given"),
        ("_efficient_attention_forward", {"cu_seqlens_q": torch.tensor([0, 3])}, "cu_seqlens_q is given"),
        ("_efficient_attention_forward", {"window_size": 3}, "window_size is given"),
        ("_native_multi_head_attention", {}, "its queries and keys are not known"),
        ("_scaled_dot_product_flash_attention.quantized", {"q_descale": torch.ones(2, 3)}, "q_descale is given"),
    ],
    ids=["varlen", "window", "varlen efficient", "window efficient", "fused", "quantised"],
)
def test_attention_whose_operands_are_not_known_is_counted(name: str, given: dict[str, Any], reason: str) -> None:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    weights, query = hooks.AttentionWeights(), torch.randn(2, 3, 4, 8)
    for _ in range(2):
        weights.post(whole_call_of(func, query=query, key=query, value=query, **given))
    assert weights.calls == []
    assert weights.skipped == {f"aten::{packet}: {reason}": 2}


def test_other_calls_and_backward_calls_are_left_alone() -> None:
    x = torch.randn(1, 2, 3, 4, requires_grad=True)

    def program() -> None:
        F.scaled_dot_product_attention(x, x, x).sum().backward()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    assert len(calls_of(program)) == 1


@pytest.mark.parametrize("level", ["dispatch", "function"])
@pytest.mark.parametrize(
    ("chosen", "places"),
    [
        (None, [0, 1, 2, 3]),
        (2, [2]),
        (-1, [3]),
        ([3, 0], [3, 0]),
        (range(1, 3), [1, 2]),
        (slice(1, None), [1, 2, 3]),
        (slice(None, None, -2), [3, 1]),
        (slice(2, 99), [2, 3]),
        ([], []),
        (slice(0), []),
    ],
    ids=str,
)
def test_chosen_heads_and_rows_are_those_of_all(level: Any, chosen: Any, places: list[int]) -> None:
    # float64, since products of some rows may round differently from products of all rows.
    query, key = torch.randn(2, 4, 4, 8, dtype=torch.float64), torch.randn(2, 2, 6, 8, dtype=torch.float64)
    mask = torch.rand(1, 4, 4, 6) < 0.8
    every, heads, rows = (
        hooks.AttentionWeights(**given) for given in ({}, {"heads": chosen}, {"rows": chosen, "of": "scores"})
    )
    with intercept([every, heads, rows], level=level):
        F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=True)
    torch.testing.assert_close(heads.calls[0].values, every.calls[0].values[:, places], rtol=1e-13, atol=0)
    assert list(heads.calls[0].heads) == places
    assert list(heads.calls[0].rows) == [0, 1, 2, 3]
    probabilities = every.calls[0].values[:, :, places]
    torch.testing.assert_close(rows.calls[0].values.softmax(-1), probabilities, rtol=1e-13, atol=0)
    assert list(rows.calls[0].rows) == places


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"heads": [0, 2]}, "heads (0, 2) are out of range: there are 2"),
        ({"rows": -4}, "rows (-4,) are out of range: there are 3"),
    ],
    ids=["heads", "rows"],
)
def test_heads_and_rows_that_do_not_exist_are_counted_and_the_program_goes_on(given: Any, reason: str) -> None:
    x, weights = torch.randn(1, 2, 3, 4), hooks.AttentionWeights(**given)
    with pytest.warns(OpInterceptWarning, match=f"skipped 1 attention calls: .*: {re.escape(reason)}"):
        with intercept(weights):
            F.scaled_dot_product_attention(x, x, x)
    assert weights.calls == []
    assert weights.skipped == {f"aten::_scaled_dot_product_flash_attention_for_cpu: {reason}": 1}


@pytest.mark.parametrize("of", ["probabilities", "scores", "entropy"])
@pytest.mark.parametrize("size", [1, 7, 30, 100])
def test_weights_computed_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch, of: Any, size: int) -> None:
    sizes = []
    scores = _attention.Attention.scores

    def spied(*args: Any) -> torch.Tensor:
        piece = scores(*args)
        sizes.append(piece.numel())
        return piece

    monkeypatch.setattr(_attention.Attention, "scores", spied)
    query, key = torch.randn(2, 4, 5, 8, dtype=torch.float64), torch.randn(2, 2, 3, 8, dtype=torch.float64)
    whole, pieces = hooks.AttentionWeights(of, rows=slice(1, None)), hooks.AttentionWeights(of, rows=slice(1, None))

    def program() -> None:
        F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    with intercept(whole):
        program()
    assert sizes == [2 * 4 * 4 * 3]
    sizes.clear()
    monkeypatch.setattr(_attention, "PIECE", size)
    with intercept(pieces):
        program()
    assert sum(sizes) == 2 * 4 * 4 * 3
    assert max(sizes) <= max(size, 2 * 3)  # at least a row of every batch
    torch.testing.assert_close(pieces.calls[0].values, whole.calls[0].values, rtol=1e-13, atol=1e-15)


class Twice(torch.nn.Module):
    """Two attentions, the second one called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.MultiheadAttention(8, 2), torch.nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.one, self.two, self.two):
            x, _ = layer(x, x, x, need_weights=False)
        return x


def test_lookup_by_module_or_glob() -> None:
    weights = hooks.AttentionWeights()
    with intercept(weights) as interceptor:
        Twice()(torch.randn(3, 8))
        interceptor.step()
        Twice()(torch.randn(4, 8))
    assert [call.module for call in weights.calls] == ["one", "two", "two"] * 2
    assert weights["one"] == [weights.calls[0], weights.calls[3]]
    assert weights["t*"] == [weights.calls[i] for i in (1, 2, 4, 5)]
    assert [call.step for call in weights["two"]] == [0, 0, 1, 1]
    assert [call.index for call in weights["one"]] == [weights.calls[0].index, weights.calls[3].index]
    assert [call.values.shape[-1] for call in weights["one"]] == [3, 4]
    with pytest.raises(KeyError, match=r"named 'three'; kept: 'one', 'two'; skipped: none"):
        weights["three"]
    weights.calls.clear()
    with pytest.raises(KeyError, match="kept: none"):
        weights["one"]


def test_recomputed_attention_has_its_phase() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(1, 2, 3, 4, requires_grad=True)
    one, again = calls_of(
        lambda: checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False).sum().backward()
    )
    assert (one.phase, again.phase) == ("forward", "recompute")
    assert torch.equal(one.values, again.values)


def test_dropout_is_reported_and_not_applied() -> None:
    x, weights = torch.randn(1, 2, 3, 4), hooks.AttentionWeights()
    state = torch.get_rng_state()
    with intercept(weights, level="function"):
        dropped = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.set_rng_state(state)
    assert torch.equal(dropped, F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    [call] = weights.calls
    assert call.dropout == 0.5
    torch.testing.assert_close(call.values.sum(-1), torch.ones(1, 2, 3))  # to a few units in the last place of float32


def test_values_kept_in_inference_mode_can_be_changed_later() -> None:
    x = torch.randn(1, 2, 3, 4)
    with torch.inference_mode():
        [call] = calls_of(lambda: F.scaled_dot_product_attention(x, x, x))
    assert not call.values.is_inference()
    call.values.add_(torch.eye(3))


def test_values_have_no_graph_and_are_not_rounded_by_autocast() -> None:
    # At function level, gradients and autocast are on while a hook runs.
    x, weights = torch.randn(1, 2, 3, 64, requires_grad=True), hooks.AttentionWeights()
    with torch.autocast("cpu", torch.bfloat16), intercept(weights, level="function"):
        F.scaled_dot_product_attention(x, x, x)
        inside = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    assert inside == (torch.bfloat16, True, True)
    [call] = weights.calls
    assert not call.values.requires_grad
    # The tolerance of float32; bfloat16 products would be off by 1e-3.
    torch.testing.assert_close(call.values.double(), math_path(x, x).detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("lower_right", [False, True])
def test_causal_bias_at_function_level(lower_right: bool) -> None:
    from torch.nn.attention import bias

    query, key = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    mask = (bias.causal_lower_right if lower_right else bias.causal_upper_left)(3, 5)
    [call] = calls_of(lambda: F.scaled_dot_product_attention(query, key, key, attn_mask=mask), level="function")
    hidden = torch.ones(3, 5).tril(2 if lower_right else 0) == 0
    expected = exact_scores(query, key, 8**-0.5).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(call.values, expected, rtol=1e-13, atol=1e-15)


def test_operands_without_values_are_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = "torch.nn.functional.scaled_dot_product_attention"
    weights = hooks.AttentionWeights()
    with pytest.warns(OpInterceptWarning, match="skipped 4 attention calls"), intercept(weights, level="function"):
        meta = torch.empty(1, 2, 3, 4, device="meta")
        F.scaled_dot_product_attention(meta, meta, meta)
        with FakeTensorMode():
            fake = torch.empty(1, 2, 3, 4)
            F.scaled_dot_product_attention(fake, fake, fake)
        with sdpa_kernel(SDPBackend.MATH):  # torch 2.15 warns about the other backends
            torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(torch.randn(5, 2, 3, 4))
        nested = torch.nested.nested_tensor([torch.randn(2, 3, 4)], layout=torch.jagged)
        swapped = nested.transpose(1, 2)
        F.scaled_dot_product_attention(swapped, swapped, swapped)
    assert weights.calls == []
    reasons = [reason.removeprefix(f"{op}: ") for reason in weights.skipped]
    assert reasons[1] == "its operands are fake and have no values"
    assert reasons[2].startswith("vmap: ")
    assert reasons[3] == "its operands are nested"
    assert list(weights.skipped.values()) == [1, 1, 1, 1]


# With the usual initial parameters every key would get about the same weight.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.4,
}
TEXT: dict[str, Any] = {"vocab_size": 50, **SMALL}

MODELS: dict[str, tuple[Any, Any, str]] = {
    "gpt2": (
        transformers.GPT2Model,
        transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.4),
        "h.*.attn",
    ),
    "llama": (transformers.LlamaModel, transformers.LlamaConfig(**TEXT, num_key_value_heads=2), "layers.*.self_attn"),
    "bert": (transformers.BertModel, transformers.BertConfig(**TEXT), "*.self"),
    "vit": (transformers.ViTModel, transformers.ViTConfig(**SMALL, image_size=16, patch_size=4), "*.attention*"),
}


def small(name: str, attention: str) -> Any:
    """A small Hugging Face model; its parameters do not depend on the attention implementation."""
    kind, config, _ = MODELS[name]
    torch.manual_seed(5)
    return kind._from_config(copy.deepcopy(config), attn_implementation=attention).eval()  # which its config stores


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("level", ["dispatch", "function"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_model_are_those_of_its_eager_attention(name: str, level: Any, padded: bool) -> None:
    fused, eager = small(name, "sdpa"), small(name, "eager")
    if name == "vit":
        if padded:
            pytest.skip("images have no padding")
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16)}
    else:
        inputs = {"input_ids": torch.randint(1, 50, (2, 12))}
        if padded:
            inputs["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
            inputs["attention_mask"][1, 7:] = 0
    weights = hooks.AttentionWeights()
    with torch.no_grad(), intercept(weights, level=level):
        fused(**inputs)
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True).attentions
    calls = weights[MODELS[name][2]]
    assert len(calls) == len(weights.calls) == len(expected) == 2
    for call, attention in zip(calls, expected, strict=True):
        # The inputs of the second layer were rounded in another order: up to 2e-6 was seen. Padding rows count too.
        torch.testing.assert_close(call.values, attention, rtol=0, atol=1e-5)
        assert call.values.std() > 0.1  # far from equal weights


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"of": "logits"}, ValueError, "of must be one of 'probabilities', 'scores', 'entropy', got 'logits'"),
        ({"heads": "all"}, TypeError, "heads must be a whole number, several of them or a slice, got 'all'"),
        ({"rows": 1.0}, TypeError, "rows must be a whole number, several of them or a slice, got 1.0"),
        ({"rows": [True]}, TypeError, r"rows must be a whole number, several of them or a slice, got \[True\]"),
    ],
    ids=["of", "heads", "rows", "bool"],
)
def test_misuse_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        hooks.AttentionWeights(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_each_cuda_kernel(backend: str, causal: bool) -> None:
    query, key = (torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weights = hooks.AttentionWeights()
    level: Any = "function" if backend == "MATH" else "dispatch"
    with sdpa_kernel(getattr(SDPBackend, backend)), intercept(weights, level=level):
        F.scaled_dot_product_attention(query, key, key, is_causal=causal)
    [call] = weights.calls
    _, relative = tolerances(query.cpu(), key.cpu(), 32**-0.5, None)
    expected = math_path(query.cpu(), key.cpu(), is_causal=causal)
    assert call.values.device.type == "cpu"
    assert ((call.values.double() - expected).abs() <= relative * expected + 1e-38).all()


@pytest.mark.parametrize("level", ["dispatch", "function"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_weights_of_an_eager_model_are_those_that_it_returns(name: str, level: Any) -> None:
    model, ids = small(name, "eager"), torch.randint(20, (2, 6))
    weights = hooks.AttentionWeights()
    with intercept(weights, level=level), torch.no_grad():
        returned = model(ids, output_attentions=True).attentions
    assert [call.dropout for call in weights.calls] == [0.0, 0.0]
    assert ["attn" in str(call.module) or "attention.self" in str(call.module) for call in weights.calls] == [True] * 2
    for call, expected in zip(weights.calls, returned, strict=True):
        assert torch.equal(call.values.reshape(expected.shape), expected)  # the operand itself
    assert weights.skipped == {}
    if name == "bert" or level == "function":  # llama copies the weights, so their heads are not known
        assert weights.calls[0].values.shape == (2, 4, 6, 6)


@pytest.mark.parametrize("of", ["probabilities", "entropy"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_eager_model_has_the_weights_of_a_fused_one(name: str, of: Any) -> None:
    ids = torch.randint(20, (1, 6))
    kept = []
    for attention in ("eager", "sdpa"):
        model = small(name, attention)
        with torch.no_grad():
            kept.append([call.values for call in calls_of(partial(model, ids), of)])
    # Both compute in float32, in another order, from inputs that differ as much as the outputs of the layer before.
    for eager, fused in zip(*kept, strict=True):
        torch.testing.assert_close(eager.reshape(fused.shape), fused, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_the_math_path_shows_its_own_weights(dtype: torch.dtype, causal: bool) -> None:
    query, key = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 5, 8).to(dtype)
    program = lambda: F.scaled_dot_product_attention(query, key, key, is_causal=causal)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        [kept] = (call.values for call in calls_of(program))
        [expected] = (call.values for call in calls_of(program, level="function"))
    assert kept.shape == (2, 3, 5, 5)
    # The math path computes in float32 or more, then rounds its weights once.
    torch.testing.assert_close(kept, expected, rtol=float(torch.finfo(dtype).eps) + 1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["train", "eval", "fast path"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_weights_of_multihead_attention_are_kept(mode: str, need_weights: bool) -> None:
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).double(), torch.randn(3, 5, 8).double()
    attention.train(mode == "train")
    with torch.set_grad_enabled(mode != "fast path"):
        [kept] = (call.values for call in calls_of(lambda: attention(x, x, x, need_weights=need_weights)))
    [expected] = (call.values for call in calls_of(lambda: attention.train()(x, x, x, need_weights=False)))
    torch.testing.assert_close(kept.reshape(3, 2, 5, 5), expected, rtol=1e-13, atol=0)  # all in float64
    with torch.no_grad():
        returned = attention(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(kept.reshape(3, 2, 5, 5), returned, rtol=1e-13, atol=0)


def test_eager_weights_are_kept_with_their_dropout() -> None:
    model, ids = small("bert", "eager").train(), torch.randint(20, (2, 6))
    weights = hooks.AttentionWeights()
    with intercept(weights):
        returned = model(ids, output_attentions=True).attentions
    for call, expected in zip(weights.calls, returned, strict=True):
        assert math.isnan(call.dropout)
        assert torch.equal(call.values, expected)


def test_eager_heads_and_rows_are_chosen_like_fused_ones() -> None:
    model, ids = small("bert", "eager"), torch.randint(20, (2, 6))
    every, some = hooks.AttentionWeights(), hooks.AttentionWeights(heads=[3, 0], rows=-1)
    none = hooks.AttentionWeights(heads=4)
    with pytest.warns(
        OpInterceptWarning,
        match=r"skipped 2 attention calls: aten::bmm: heads \(4,\) are out of range: there are 4 \(2 times\)",
    ):
        with intercept([every, some, none]):
            model(ids)
    for whole, part in zip(every.calls, some.calls, strict=True):
        assert torch.equal(part.values, whole.values[:, [3, 0]][:, :, [-1]])
        assert (part.heads, part.rows) == ((3, 0), (5,))


def test_recomputed_eager_attention_has_its_phase() -> None:
    model = small("bert", "eager").train()
    model.activation_checkpointing_enable()
    calls = calls_of(lambda: model(torch.randint(20, (2, 6))).last_hidden_state.sum().backward())
    assert [call.phase for call in calls] == ["forward"] * 2 + ["recompute"] * 2
    for first, again in zip(calls[:2], reversed(calls[2:]), strict=True):
        assert torch.equal(first.values, again.values)


class Experts(torch.nn.Module):
    """Products with the shapes of attention that are not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Parameter(torch.randn(3, 4, 6)), torch.nn.Parameter(torch.randn(3, 6, 4))
        self.gate = torch.nn.Linear(4, 6)
        self.convolution = torch.nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        x = (x @ self.up).relu() @ self.down
        x = (x @ self.up).sigmoid() @ self.down
        x = (x @ self.up) @ self.down
        x = (x @ self.up).tanh() @ self.down
        x = torch.nn.functional.normalize((x @ self.up).abs(), dim=-1) @ self.down
        x = self.gate(x).softmax(-1) @ self.down  # mixture weights that no product of this module made
        return self.convolution(self.convolution(x[:, None].expand(3, 4, 5, 4)).softmax(-1))


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_products_that_are_not_attention_are_not_kept(level: Any) -> None:
    assert calls_of(lambda: Experts()(torch.randn(3, 5, 4)).sum().backward(), level=level) == []


def test_a_block_that_skips_attention_warns_once() -> None:
    attention, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 5, 8)
    weights = hooks.AttentionWeights()
    reason = r"multi_head_attention_forward: its products are hidden at function level; level=\"dispatch\" sees them"
    with pytest.warns(OpInterceptWarning, match=f"skipped 2 attention calls: .*{reason} \\(2 times\\)") as caught:
        with intercept(weights, level="function"):
            attention(x, x, x)
            attention(x, x, x)
    assert caught[0].filename == __file__
    with intercept(weights):
        attention(x, x, x)
    assert len(weights.calls) == 1


def test_the_scores_of_eager_attention_are_not_known() -> None:
    x = torch.randn(1, 2, 3, 4)
    weights = hooks.AttentionWeights("scores")
    with pytest.warns(OpInterceptWarning, match="aten::bmm: the scores of eager attention are not known"):
        with intercept(weights), sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(x, x, x)


class LinearAttention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() @ (x.mT @ x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LinearAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.attn(x)
        return result


def test_a_block_that_keeps_nothing_from_modules_named_attention_warns() -> None:
    weights, x = hooks.AttentionWeights(), torch.randn(2, 5, 3)
    for _ in range(2):  # each block warns
        with pytest.warns(OpInterceptWarning, match="kept nothing, although modules .* 'attn', made 2 products"):
            with intercept(weights):
                Model()(x)
    with intercept(weights):
        Model()(x)
        F.scaled_dot_product_attention(x, x, x)
    assert len(weights.calls) == 1
