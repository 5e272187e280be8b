"""`FakeQuantize`, `Noise` and `BitFlip`: what they change, what they leave alone, and what autograd sees."""

from __future__ import annotations

import copy
import math
import pickle
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiler import BELOW, LEVELS
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_calls import call_of
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import HookError, OpCall, OpInterceptError, OpInterceptWarning, hooks, intercept

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def inputs_of(hook: Any, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The arguments that the hook's `pre` returns for the operator."""
    inputs = hook.pre(call_of(func, *args, **kwargs))
    return (*inputs[0], *inputs[1].values())


def lhs_of(hook: Any, lhs: Tensor) -> Tensor:
    """The lhs of a product as the hook edits it."""
    edited: Tensor = inputs_of(hook, torch.ops.aten.mm.default, lhs, torch.ones(1, 1))[0]
    return edited


SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Contiguous, transposed, strided or expanded, of many magnitudes, with a range that may exclude zero."""
    m, n = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(2 * m, 2 * n, generator=generator) * 10.0 ** draw(st.integers(-4, 4)) + draw(st.floats(-3, 3))
    tensor = tensor.clamp(-60000, 60000).to(draw(DTYPES))
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"]))
    if layout == "transposed":
        return tensor[:n, :m].T
    if layout == "strided":
        return tensor[::2, ::2]
    if layout == "expanded":
        return tensor[:1, :n].expand(m, n)
    return tensor[:m, :n].contiguous()


@settings(max_examples=150, deadline=None)
@given(x=matrices())
def test_symmetric_int8_agrees_with_torchs_per_tensor_quantisation(x: Tensor) -> None:
    scale = x.float().abs().max() / 127
    expected = torch.fake_quantize_per_tensor_affine(x, scale, torch.tensor(0), -127, 127)
    assert torch.equal(lhs_of(hooks.FakeQuantize(), x), expected)


def affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point as in `torch.ao.quantization.MinMaxObserver`, apart from its smallest scale."""
    low, high = x.float().min().clamp(max=0), x.float().max().clamp(min=0)
    scale = (high - low) / 255
    return scale, (-128 - torch.round(low / scale).nan_to_num(0)).clamp(-128, 127).int()


@settings(max_examples=150, deadline=None)
@example(torch.tensor([[-127.5, 127.5]]))  # both ends are ties, and one of them rounds out of the range
@given(x=matrices())
def test_affine_int8_agrees_with_torchs_per_tensor_quantisation(x: Tensor) -> None:
    scale, zero = affine(x)
    if scale == 0:
        return
    expected = torch.fake_quantize_per_tensor_affine(x, scale, zero, -128, 127)
    assert torch.equal(lhs_of(hooks.FakeQuantize(symmetric=False), x), expected)


@settings(max_examples=100, deadline=None)
@given(x=matrices(), symmetric=st.booleans())
def test_int8_per_channel_agrees_with_torch_for_rows_of_lhs_and_columns_of_rhs(x: Tensor, symmetric: bool) -> None:
    def expected(x: Tensor, axis: int) -> Tensor:
        if symmetric:
            scales, zeros = x.float().abs().amax(1 - axis) / 127, torch.zeros(x.shape[axis], dtype=torch.int32)
        else:
            pairs = [affine(channel) for channel in x.unbind(axis)]
            scales, zeros = torch.stack([scale for scale, _ in pairs]), torch.stack([zero for _, zero in pairs])
        scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
        low = -127 if symmetric else -128
        return torch.fake_quantize_per_channel_affine(x, scales, zeros, axis, low, 127)

    hook = hooks.FakeQuantize("int8", per="channel", symmetric=symmetric)
    lhs, rhs = inputs_of(hook, torch.ops.aten.mm.default, x, x)
    assert torch.equal(lhs, expected(x, 0))
    assert torch.equal(rhs, expected(x, 1))


@settings(max_examples=100, deadline=None)
@given(x=matrices(), dtype=st.sampled_from(FLOAT8))
def test_float8_is_a_round_trip_through_the_dtype_with_a_scale(x: Tensor, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    scale = (x.float().abs().max() / largest).clamp_min(torch.finfo(torch.float32).tiny)
    steps = (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)
    assert torch.equal(lhs_of(hooks.FakeQuantize(dtype), x), (steps.float() * scale).to(x.dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_rounds_to_the_nearest_value_of_the_dtype(dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()]
    x = torch.randn(64, 64, dtype=torch.float64) * torch.logspace(-6, 0, 64, dtype=torch.float64)
    scale = x.abs().max() / torch.finfo(dtype).max
    rounded = lhs_of(hooks.FakeQuantize(dtype), x)
    distance = (x[..., None] / scale - values).abs().amin(-1) * scale
    # In float64, scaling and scaling back costs a few ulps of the largest value.
    torch.testing.assert_close((rounded - x).abs(), distance, rtol=0, atol=1e-15 * x.abs().max().item())
    assert (rounded != x).any()


@pytest.mark.parametrize("dtype", ["int8", *FLOAT8], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_are_exact_and_the_largest_value_nearly_so(dtype: Any, symmetric: bool) -> None:
    if not symmetric and dtype != "int8":
        return
    hook = hooks.FakeQuantize(dtype, symmetric=symmetric)
    assert torch.equal(lhs_of(hook, torch.zeros(2, 2)), torch.zeros(2, 2))
    for largest in (65504.0, 3e38, 1e-30):
        x = torch.tensor([[0.0, largest]])
        torch.testing.assert_close(lhs_of(hook, x), x, rtol=1e-6, atol=0)
    assert lhs_of(hook, torch.tensor([[65504.0, 0.0]]).half()).tolist() == [[65504.0, 0.0]]
    # Values below the smallest normal float32 times the steps are rounded to few values, and none becomes NaN.
    assert lhs_of(hook, torch.tensor([[1e-44, 0.0, -1e-40]])).isfinite().all()


@pytest.mark.parametrize(
    "hook", [hooks.FakeQuantize(), hooks.FakeQuantize("float8_e5m2"), hooks.FakeQuantize(symmetric=False)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_becomes_nan(hook: Any, bad: float) -> None:
    assert lhs_of(hook, torch.tensor([[1.0, bad], [2.0, 3.0]])).isnan().all()
    per_row = hooks.FakeQuantize(hook.dtype, per="channel", symmetric=hook.symmetric)
    assert lhs_of(per_row, torch.tensor([[1.0, bad], [2.0, 3.0]])).isnan().tolist() == [[True] * 2, [False] * 2]


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize(
    ("run", "rounded"),
    [
        (lambda a, b: a @ b, lambda q, a, b: q(a, -1) @ q(b, -2)),
        (lambda a, b: torch.mv(a, b[:, 0]), lambda q, a, b: torch.mv(q(a, -1), q(b[:, 0], -1))),
        (lambda a, b: torch.bmm(a[None], b[None]), lambda q, a, b: torch.bmm(q(a[None], -1), q(b[None], -2))),
        (lambda a, b: F.linear(a, b.T), lambda q, a, b: F.linear(q(a, -1), q(b.T, -1))),
    ],
    ids=["mm", "mv", "bmm", "linear"],
)
def test_the_product_is_that_of_the_rounded_operands(
    run: Callable[..., Tensor], rounded: Callable[..., Tensor], feed: dict[str, Any], per: Any
) -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)

    def quantize(x: Tensor, dim: int) -> Tensor:
        amax = x.abs().amax(dim, keepdim=True) if per == "channel" else x.abs().max()
        scale = amax / 127
        return (x * (1 / scale)).round() * scale

    with intercept(hooks.FakeQuantize(per=per), **feed):
        product = run(a, b)
    assert torch.equal(product, rounded(quantize, a, b))
    assert not torch.equal(product, run(a, b))


def rounded(x: Tensor) -> Tensor:
    scale = x.detach().abs().max() / 127
    return (x.detach() * (1 / scale)).round() * scale


def trained(hook: Any, feed: dict[str, Any], a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both operands of a product whose own gradient is `weight`."""
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    with intercept(hook, **feed):
        (torch.mm(a, b) * weight).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    return a.grad, b.grad


A, B, G = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3).double()
INT4 = torch.int4  # type: ignore[attr-defined]
EDITS: dict[str, Callable[[Any], Any]] = {
    "FakeQuantize": lambda of: hooks.FakeQuantize(of=of),
    "Noise": lambda of: hooks.Noise(0.1, of=of),
    "BitFlip": lambda of: hooks.BitFlip(3, of=of, bits=range(-14, -9)),
}


@pytest.mark.parametrize("feed", BELOW)
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_at_dispatch_level_autograd_has_the_original_operands(edit: Any, feed: dict[str, Any]) -> None:
    for of in ("lhs", "rhs", "output"):
        assert not torch.equal(lhs_of(edit("lhs"), A), A)
        gradients = trained(hooks.when(edit(of), phase="forward"), feed, A, B, G)
        plain = trained(print, {"ops": "bmm"}, A, B, G)
        assert all(torch.equal(one, other) for one, other in zip(gradients, plain, strict=True))


@pytest.mark.parametrize("feed", BELOW)
def test_at_dispatch_level_backward_matmuls_are_edited_too(feed: dict[str, Any]) -> None:
    grad_a, grad_b = trained(hooks.FakeQuantize(), feed, A, B, G)
    assert torch.equal(grad_a, rounded(G) @ rounded(B.T))
    assert torch.equal(grad_b, rounded(A.T) @ rounded(G))


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_at_function_level_autograd_has_the_edited_operands(edit: Any) -> None:
    edited = lhs_of(edit("lhs"), A)
    grad_a, grad_b = trained(edit("lhs"), {"level": "function"}, A, B, G)
    assert torch.equal(grad_a, G @ B.T)  # the gradient passes through the edit unchanged
    assert torch.equal(grad_b, edited.T @ G)
    gradients = trained(edit("output"), {"level": "function"}, A, B, G)
    assert all(torch.equal(one, other) for one, other in zip(gradients, (G @ B.T, A.T @ G), strict=True))


def test_relative_noise_scales_the_gradient_at_function_level_only() -> None:
    z = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    hook = hooks.Noise(0.5, relative=True, seed=9)
    grad_a, _ = trained(hook, {"level": "function"}, A, B, G)
    # Not bit for bit, since autograd multiplies the parts of x + x * std * z one by one.
    torch.testing.assert_close(grad_a, (G * (1 + 0.5 * z)) @ B.T, rtol=1e-12, atol=1e-12)
    hook = hooks.Noise(0.5, relative=True, seed=9)
    grad_a, _ = trained(hooks.when(hook, phase="forward"), {}, A, B, G)
    assert torch.equal(grad_a, G @ B.T)


@pytest.mark.parametrize("feed", LEVELS)
def test_a_users_own_edits_are_differentiated_at_function_level_only(feed: dict[str, Any]) -> None:
    class Pre:
        def pre(self, call: OpCall) -> Any:
            assert call.lhs is not None
            return call.replace(lhs=call.lhs * 3)

    class Post:
        def post(self, call: OpCall) -> Any:
            return call.output * 3

    factor = 3 if "level" in feed else 1
    for hook in (Pre(), Post()):
        grad_a, grad_b = trained(hooks.when(hook, phase="forward"), feed, A, B, G)
        torch.testing.assert_close(grad_a, factor * (G @ B.T), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_b, factor * (A.T @ G), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_noise_is_drawn_from_its_own_generator(feed: dict[str, Any], dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 7).to(dtype), torch.randn(7, 8).to(dtype)
    generator = torch.Generator().manual_seed(11)
    before = torch.get_rng_state()
    for relative in (False, True):
        with intercept(hooks.Noise(0.25, relative=relative, seed=11), **feed):
            first, second = torch.mm(a, b), torch.mm(a, b)
        generator.manual_seed(11)
        for product in (first, second):
            z = torch.randn(6, 8, dtype=dtype, generator=generator)
            plain = torch.mm(a, b)
            assert torch.equal(product, torch.addcmul(plain, plain, z, value=0.25) if relative else plain + 0.25 * z)
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_has_the_deviation_asked_for() -> None:
    x = torch.full((400, 400), 3.0)
    added = lhs_of(hooks.Noise(0.5, of="lhs"), x) - x
    scaled = lhs_of(hooks.Noise(0.5, of="lhs", relative=True), x) / x
    # 1 % is far more than five standard errors of the deviation of 160,000 draws.
    assert added.std().item() == pytest.approx(0.5, rel=0.01)
    assert scaled.std().item() == pytest.approx(0.5, rel=0.01)
    assert added.mean().item() == pytest.approx(0, abs=0.01)


WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLIPPABLE = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, *FLOAT8),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.uint16),
]


def words(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(WORDS[tensor.element_size()]).flatten().tolist()


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    dtype=st.sampled_from(FLIPPABLE),
    flips=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**64 - 1),
    bits=st.none() | st.integers(-8, 7) | st.lists(st.integers(-8, 7), min_size=1, max_size=4),
    transpose=st.booleans(),
)
def test_exactly_the_bits_in_the_log_are_flipped(
    shape: list[int], dtype: torch.dtype, flips: int, seed: int, bits: Any, transpose: bool
) -> None:
    x = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
    if transpose:
        x = x.movedim(0, -1)
    faults = hooks.BitFlip(flips, of="lhs", bits=bits, seed=seed)
    before = words(x)
    edited = lhs_of(faults, x)
    assert words(x) == before
    assert (edited.shape, edited.dtype) == (x.shape, x.dtype)
    masks = [0] * x.numel()
    width = 8 * dtype.itemsize
    for flip in faults.log:
        element = 0
        for place, size in zip(flip.position, x.shape, strict=True):
            assert 0 <= place < size
            element = element * size + place
        assert not masks[element] >> flip.bit & 1  # no bit is flipped twice
        masks[element] |= 1 << flip.bit
    changed = [(one ^ other) % (1 << width) for one, other in zip(before, words(edited), strict=True)]
    assert changed == masks
    allowed = range(width) if bits is None else [bits] if isinstance(bits, int) else bits
    assert {flip.bit for flip in faults.log} <= {bit % width for bit in allowed}
    assert len(faults.log) == min(flips, x.numel() * len({bit % width for bit in allowed}))


def test_the_log_says_where_each_bit_was_flipped_and_the_values_before_and_after() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    faults = hooks.BitFlip(of=("lhs", "output"), bits=-1)
    plain = model(x)
    with intercept(hooks.when(faults, module="1")) as interceptor:
        interceptor.step()
        output = model(x)
    assert [(f.index, f.step, f.op, f.module, f.phase, f.role, f.bit) for f in faults.log] == [
        (1, 1, "aten::addmm", "1", "forward", "lhs", 31),
        (1, 1, "aten::addmm", "1", "forward", "output", 31),
    ]
    flip = faults.log[1]
    assert flip.before == -flip.after
    assert output[flip.position].item() == flip.after
    assert (output != plain).any()


def test_the_log_names_the_module_of_a_backward_call() -> None:
    model, faults = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), hooks.BitFlip()
    with intercept(hooks.when(faults, phase="backward")):
        model(torch.randn(5, 3)).sum().backward()
    assert sorted(flip.module or "?" for flip in faults.log) == ["0", "1", "1"]


def test_a_seed_reproduces_its_faults_and_no_global_generator_is_drawn_from() -> None:
    states = random.getstate(), torch.get_rng_state()
    logs = []
    for seed in (1, 1, 2):
        faults = hooks.BitFlip(4, seed=seed)
        with intercept(faults):
            for _ in range(2):
                torch.ones(8, 8) @ torch.eye(8)
        logs.append([(flip.index, flip.position, flip.bit) for flip in faults.log])
    assert logs[0] == logs[1] != logs[2]
    assert [p for _, *p in logs[0][:4]] != [p for _, *p in logs[0][4:]]
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize("edit", [*EDITS.values(), lambda of: hooks.BitFlip(of=of)], ids=[*EDITS, "any bit"])
@pytest.mark.parametrize("of", ["bias", "output", ("lhs", "rhs", "bias", "output")], ids=str)
def test_in_place_and_out_forms_give_the_edited_result(edit: Any, of: Any, feed: dict[str, Any]) -> None:
    a, b, c = torch.randn(4, 5), torch.randn(5, 3), torch.randn(4, 3)
    expected = None
    for run in (
        lambda c: torch.addmm(c, a, b),
        lambda c: c.addmm_(a, b),
        lambda c: torch.addmm(c, a, b, out=torch.empty(4, 3)),
        lambda c: torch.addmm(c, a, b, out=c),
    ):
        given = c.clone()
        with intercept(edit(of), **feed):
            result = run(given)
        expected = result if expected is None else expected
        assert torch.equal(result, expected) or result.isnan().any()
        assert torch.equal(result.isnan(), expected.isnan())
    assert not torch.equal(expected, torch.addmm(c, a, b))  # type: ignore[arg-type]


@pytest.mark.parametrize("feed", BELOW)
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_of_several_outputs_the_first_is_edited(edit: Any, feed: dict[str, Any]) -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with intercept(edit("output"), **feed):
        edited = F.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(edited, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_empty_tensors_and_missing_operands_stay_as_they_are(edit: Any, feed: dict[str, Any]) -> None:
    hook = edit(("lhs", "rhs", "bias", "output"))
    with intercept(hook, **feed):
        assert torch.mm(torch.ones(0, 3), torch.ones(3, 2)).shape == (0, 2)
        assert torch.mm(torch.ones(2, 0), torch.ones(0, 2)).shape == (2, 2)
    with intercept(hook, ops="all"):
        torch.relu(torch.ones(2)).sum()


@pytest.mark.parametrize("feed", LEVELS)
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_edits_work_under_inference_mode_and_autocast(edit: Any, feed: dict[str, Any]) -> None:
    with torch.inference_mode(), intercept(edit(("lhs", "output")), **feed):
        product = torch.mm(torch.randn(3, 4), torch.randn(4, 2))
    assert product.is_inference()
    with torch.autocast("cpu", torch.bfloat16), intercept(edit(("lhs", "output")), **feed):
        assert torch.mm(torch.randn(3, 4), torch.randn(4, 2)).dtype == torch.bfloat16


REFUSED = {
    "complex": torch.ones(2, 2, dtype=torch.complex64),
    "integer": torch.ones(2, 2, dtype=torch.int64),
    "boolean": torch.ones(2, 2, dtype=torch.bool),
    "float8": torch.ones(2, 2).to(torch.float8_e4m3fn),
    "sparse": torch.eye(2).to_sparse(),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the dtypes are deprecated
    REFUSED["quantized"] = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("edit", "refused"),
    [
        ("FakeQuantize", ["complex", "integer", "boolean", "float8", "sparse", "quantized"]),
        ("Noise", ["integer", "boolean", "float8", "sparse", "quantized"]),
        ("BitFlip", ["complex", "boolean", "sparse", "quantized"]),
    ],
    ids=list(EDITS),
)
def test_what_cannot_be_edited_is_refused(edit: str, refused: list[str]) -> None:
    hook: Any = hooks.BitFlip(of="lhs") if edit == "BitFlip" else EDITS[edit]("lhs")
    for name, tensor in REFUSED.items():
        if name not in refused:
            assert lhs_of(hook, tensor).dtype == tensor.dtype
            continue
        message = rf"{edit} can only edit dense .* tensors, got .* as the lhs of aten::mm; .*when"
        with pytest.raises(OpInterceptError, match=message):
            lhs_of(hook, tensor)
    assert getattr(hook, "log", [None] * 2)[2:] == []


def test_per_channel_leaves_operands_without_channels_and_counts_them() -> None:
    q, layer = torch.randn(1, 2, 5, 4), nn.Linear(4, 4)
    hook, exact = hooks.FakeQuantize(per="channel"), layer(F.scaled_dot_product_attention(q, q, q))
    for calls in (1, 2):
        with pytest.warns(OpInterceptWarning, match=rf"without channels as they are: {2 * calls} of aten::_scaled"):
            with intercept(hook), torch.no_grad():
                attention = F.scaled_dot_product_attention(q, q, q)
                assert not torch.equal(layer(attention), exact)
        assert torch.equal(attention, F.scaled_dot_product_attention(q, q, q))
    assert list(hook.skipped.values()) == [4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with intercept(hook):  # which meets no such operand
            torch.einsum("ij,jk->ik", A, B)


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="_foreach_mm came with torch 2.13")
def test_a_list_of_operands_is_refused() -> None:
    message = r"a tensor can be replaced, got \[float32\[2, 2\]\] as the lhs of aten::_foreach_mm"
    with pytest.raises(ValueError, match=message), intercept(hooks.Noise(0.1, of="lhs")):
        torch._foreach_mm([torch.ones(2, 2)], [torch.ones(2, 2)])


def test_bits_that_the_elements_do_not_have_are_refused() -> None:
    faults = hooks.BitFlip(of="lhs", bits=range(14, 17))
    message = r"the lhs of aten::mm, bfloat16.*, has 16 bits .* got bits=\(14, 15, 16\)"
    with pytest.raises(OpInterceptError, match=message):
        lhs_of(faults, torch.ones(2, 2).bfloat16())
    assert faults.log == []
    lhs_of(faults, torch.ones(2, 2))
    assert faults.log[0].bit in range(14, 17)


@pytest.mark.parametrize("hook", [hooks.Noise(0.1, of="lhs"), hooks.BitFlip(of="lhs")], ids=["Noise", "BitFlip"])
def test_random_edits_are_refused_in_a_cuda_graph(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tensor: Any = SimpleNamespace(is_cuda=True, dtype=torch.float32, layout=torch.strided, is_nested=False)
    tensor.is_quantized = False
    with pytest.raises(OpInterceptError, match="draws anew for each call, but a CUDA graph"):
        hook.edited(tensor, "lhs", None)


@pytest.mark.parametrize(
    ("hook", "options", "error", "message"),
    [
        ("FakeQuantize", {"dtype": INT4}, ValueError, "dtype must be one of 'int8', 'float8_e4m3fn', 'floa"),
        ("FakeQuantize", {"dtype": "int9"}, ValueError, "dtype must be one of .* got 'int9'"),
        ("FakeQuantize", {"of": "query"}, ValueError, "of must be one or more of 'lhs', .*'output', got 'query'"),
        ("FakeQuantize", {"of": "grad_lhs"}, ValueError, "of must be one or more of 'lhs', 'rhs', 'bias', 'output',"),
        ("FakeQuantize", {"of": ()}, ValueError, "of must be one or more of"),
        ("FakeQuantize", {"of": None}, TypeError, "of must be one or more of"),
        ("FakeQuantize", {"per": "row"}, ValueError, "per must be one of 'tensor', 'channel', got 'row'"),
        (
            "FakeQuantize",
            {"of": ("lhs", "output"), "per": "channel"},
            ValueError,
            r"per=\"channel\" works for \"lhs\" and \"rhs\" only, got of=\('lhs', 'output'\)",
        ),
        ("FakeQuantize", {"dtype": "float8_e5m2", "symmetric": False}, ValueError, "symmetric must be True for float8"),
        ("FakeQuantize", {"symmetric": 1}, TypeError, "symmetric must be True or False, got 1"),
        ("Noise", {"std": 0}, ValueError, "std must be a positive number, got 0"),
        ("Noise", {"std": -0.1}, ValueError, "std must be a positive number, got -0.1"),
        ("Noise", {"std": math.nan}, ValueError, "std must be a positive number, got nan"),
        ("Noise", {"std": math.inf}, ValueError, "std must be a positive number, got inf"),
        ("Noise", {"std": "1"}, ValueError, "std must be a positive number, got '1'"),
        ("Noise", {"std": 1, "relative": "yes"}, TypeError, "relative must be True or False, got 'yes'"),
        ("Noise", {"std": 1, "seed": None}, ValueError, r"seed must be a whole number .* got None"),
        ("Noise", {"std": 1, "of": ("x",)}, ValueError, "of must be one or more of"),
        ("BitFlip", {"flips": 0}, ValueError, "flips must be a whole number of at least 1, got 0"),
        ("BitFlip", {"flips": 1.5}, ValueError, "flips must be a whole number"),
        ("BitFlip", {"bits": 64}, ValueError, "bits must be from -64 to 63, got 64"),
        ("BitFlip", {"bits": ()}, TypeError, r"bits must be one or more whole numbers, .* got \(\)"),
        ("BitFlip", {"bits": "sign"}, TypeError, "bits must be one or more whole numbers"),
        ("BitFlip", {"seed": -(2**63) - 1}, ValueError, "seed must be a whole number from"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(hook: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(hooks, hook)(**options)


def test_quantising_one_part_of_a_model_shows_what_it_costs() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 8))
    x = torch.randn(10, 16)
    errors = {}
    for per in ("tensor", "channel"):
        before, after = hooks.Capture("lhs"), hooks.Capture("lhs")
        with intercept([before, hooks.when(hooks.FakeQuantize("float8_e4m3fn", per=per), module="0*"), after]):
            output = model(x)
        assert torch.equal(before["0.0"][0].tensor, x)
        assert not torch.equal(after["0.0"][0].tensor, x)
        assert torch.equal(before["1"][0].tensor, after["1"][0].tensor)
        errors[per] = (output - model(x)).norm() / model(x).norm()
    assert 0 < errors["channel"] < 0.1
    assert 0 < errors["tensor"] < 0.1


def test_the_error_of_an_impossible_edit_passes_through_the_operator_and_names_hook_and_call() -> None:
    with pytest.raises(OpInterceptError, match="FakeQuantize can only edit dense") as raised:
        with intercept(hooks.FakeQuantize()):
            torch.ones(2, 2, dtype=torch.complex64) @ torch.ones(2, 2, dtype=torch.complex64)
    assert not isinstance(raised.value, HookError)
    assert "aten::mm(complex64[2, 2], complex64[2, 2])" in raised.value.__notes__[0]


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_edits_on_cuda(edit: Any) -> None:
    a, b = A.cuda(), B.cuda()
    results = []
    for _ in range(2):
        with intercept(edit(("lhs", "output"))):
            results.append(torch.mm(a, b))
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.mm(a, b))


@cuda
def test_faults_on_cuda_are_those_on_the_cpu() -> None:
    logs = []
    for device in ("cpu", "cuda"):
        faults = hooks.BitFlip(5, of="lhs")
        with intercept(faults):
            torch.mm(A.to(device), B.to(device))
        logs.append([(flip.position, flip.bit, flip.before, flip.after) for flip in faults.log])
    assert logs[0] == logs[1]


@cuda
def test_quantisation_can_be_captured_in_a_cuda_graph() -> None:
    a, b = A.float().cuda(), B.float().cuda()
    with intercept(hooks.FakeQuantize()):
        expected = torch.mm(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            product = torch.mm(a, b)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(product, expected)


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_tensors_without_values_pass_unedited(edit: Any) -> None:
    x, w = torch.randn(3, 3), torch.randn(3, 3)

    def program() -> list[Tensor]:
        meta = torch.ones(2, 2, device="meta") @ torch.ones(2, 2, device="meta")
        assert meta.is_meta
        mapped = torch.func.vmap(lambda row: row @ w)(x)
        return [mapped, torch.func.grad(lambda x: (x @ w).sum())(x)]

    bare = program()
    with intercept(edit(("lhs", "output")), level="function"):
        watched = program()
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
@pytest.mark.parametrize("way", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_makes_the_same_edits(edit: Any, way: Any) -> None:
    x, hook = torch.randn(3, 3), edit(("lhs", "output"))
    with intercept(hook):
        x @ x
    other = way(hook)
    with intercept(hook):
        expected = x @ x
    with intercept(other):
        assert torch.equal(x @ x, expected)
