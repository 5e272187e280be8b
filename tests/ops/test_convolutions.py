"""Convolutions: their operands, implicit products and FLOPs, what hooks make of them, and each call seen once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from compiler import BELOW_FUNCTIONS, COMPILED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from opintercept import OpCall, OpInterceptWarning, hooks, intercept, runs
from opintercept._engines.base import Watcher
from opintercept._ops import table
from opintercept._ops.convolutions import ROWS
from opintercept._ops.select import FAMILIES, why_never
from opintercept.runs.replay import replay

pytestmark = pytest.mark.slow

BOTH = ("matmul", "convolution")
FUNCTION: dict[str, Any] = {"level": "function"}

quick = settings(max_examples=60, deadline=None, database=None, derandomize=True)


def void(_: object) -> None:
    """Return nothing."""


def r(*shape: int) -> Tensor:
    return torch.rand(shape)


def calls_of(function: Callable[[], Any], ops: Any = BOTH, **options: Any) -> list[tuple[str, Any, int | None]]:
    """Operator, GEMM as (batch, m, n, k) and FLOPs of each call that `function` makes."""
    seen: list[tuple[str, Any, int | None]] = []
    with intercept(lambda call: seen.append((call.op, call.gemm and call.gemm[:4], call.flops)), ops=ops, **options):
        function()
    return seen


def counted(function: Callable[[], Any]) -> dict[str, int]:
    """FLOPs by operator as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op).replace(".", "::"): flops for op, flops in counter.get_flop_counts()["Global"].items()}


def test_settings_and_operands_are_where_every_overload_has_them() -> None:
    wrong = []
    for row in ROWS:
        rule = row.gemm_rule
        settings = {} if rule is None else getattr(getattr(rule.shape, "__self__", None), "settings", {})
        for overload in table.overloads(row.name):
            if table.row_of(overload).roles != row.roles:
                continue  # it has a row of its own
            names = [a.name for a in overload._schema.arguments if not a.kwarg_only]
            for position, keyword in (*row.roles.values(), *settings.values()):
                allowed = {"input", "self"} if keyword == "input" else {keyword}
                if keyword == "output_mask" and keyword not in names:
                    continue  # it writes to all gradients
                if position >= len(names) or names[position] not in allowed:
                    wrong.append(f"{overload}: {keyword} at {position}")
    assert wrong == []


def test_an_overload_with_other_arguments_has_a_row_of_its_own() -> None:
    tensors = [torch.empty(1, device="meta") for _ in range(4)]
    for name, place in (("default", 0), ("binary", 0)):
        row = table.row_of(getattr(torch.ops.mkldnn._convolution_pointwise, name))
        assert row.name == "mkldnn::_convolution_pointwise"
        assert row.operand("lhs", tuple(tensors), {}) is tensors[place]
        assert row.operand("rhs", tuple(tensors), {}) is tensors[1 if name == "default" else 2]


# Each is (function, GEMM); the positions are those of the output, and those of the input if it is transposed.
CASES: dict[str, tuple[Callable[[], Any], tuple[int, int, int, int]]] = {
    "conv1d": (lambda: F.conv1d(r(2, 3, 9), r(4, 3, 5)), (1, 2 * 5, 4, 15)),
    "conv2d": (lambda: F.conv2d(r(2, 3, 9, 8), r(4, 3, 5, 2)), (1, 2 * 5 * 7, 4, 30)),
    "conv3d": (lambda: F.conv3d(r(2, 3, 5, 4, 3), r(4, 3, 2, 2, 2)), (1, 2 * 4 * 3 * 2, 4, 24)),
    "bias": (lambda: F.conv2d(r(2, 3, 9, 8), r(4, 3, 5, 2), r(4)), (1, 2 * 5 * 7, 4, 30)),
    "stride": (lambda: F.conv2d(r(2, 3, 9, 8), r(4, 3, 3, 2), stride=(2, 3)), (1, 2 * 4 * 3, 4, 18)),
    "padding": (lambda: F.conv2d(r(2, 3, 9, 8), r(4, 3, 3, 2), padding=(2, 1)), (1, 2 * 11 * 9, 4, 18)),
    "dilation": (lambda: F.conv2d(r(2, 3, 9, 8), r(4, 3, 3, 2), dilation=2), (1, 2 * 5 * 6, 4, 18)),
    "groups": (lambda: F.conv2d(r(2, 6, 9, 8), r(4, 3, 3, 2), groups=2), (2, 2 * 7 * 7, 2, 18)),
    "depthwise": (lambda: F.conv2d(r(2, 3, 9, 8), r(6, 1, 3, 2), groups=3), (3, 2 * 7 * 7, 2, 6)),
    "same": (lambda: F.conv1d(r(2, 3, 9), r(4, 3, 5), padding="same"), (1, 2 * 9, 4, 15)),
    "valid": (lambda: F.conv1d(r(2, 3, 9), r(4, 3, 5), padding="valid", stride=2), (1, 2 * 3, 4, 15)),
    "unbatched": (lambda: F.conv2d(r(3, 9, 8), r(4, 3, 5, 2)), (1, 5 * 7, 4, 30)),
    "no samples": (lambda: F.conv2d(r(0, 3, 9, 8), r(4, 3, 5, 2)), (1, 0, 4, 30)),
    "one by one": (lambda: F.conv2d(r(2, 3, 4, 4), r(5, 3, 1, 1)), (1, 32, 5, 3)),
    "channels last": (
        lambda: F.conv2d(r(2, 3, 9, 8).to(memory_format=torch.channels_last), r(4, 3, 5, 2)),
        (1, 2 * 5 * 7, 4, 30),
    ),
    "transposed": (lambda: F.conv_transpose1d(r(2, 3, 9), r(3, 4, 5)), (1, 2 * 9, 20, 3)),
    "transposed 2d": (
        lambda: F.conv_transpose2d(r(2, 6, 5, 4), r(6, 4, 3, 2), stride=2, padding=1, output_padding=1, groups=2),
        (2, 2 * 5 * 4, 24, 3),
    ),
    "transposed 3d": (
        lambda: F.conv_transpose3d(r(2, 3, 3, 3, 2), r(3, 4, 2, 2, 2), dilation=2),
        (1, 2 * 3 * 3 * 2, 32, 3),
    ),
}


@pytest.mark.parametrize("options", [*BELOW_FUNCTIONS, pytest.param(FUNCTION, id="function")])
@pytest.mark.parametrize("case", CASES)
def test_gemm_and_flops_of_a_convolution(case: str, options: dict[str, Any]) -> None:
    function, shape = CASES[case]
    flops = 2 * math.prod(shape)
    ((op, gemm, found),) = calls_of(function, **options)
    assert (gemm, found) == (shape, flops)
    assert op.startswith("torch.nn.functional.conv") if options == FUNCTION else op == "aten::convolution"
    assert counted(function) == {"aten::convolution": flops}


# Operators that programs rarely call by themselves.
DIRECTLY: dict[str, Callable[[], Any]] = {
    "_convolution": lambda: torch._convolution(
        r(2, 3, 9, 8), r(4, 3, 5, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, True, True
    ),
    "convolution": lambda: torch.convolution(
        r(2, 3, 9, 8), r(4, 3, 5, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "mkldnn_convolution": lambda: torch.mkldnn_convolution(
        r(2, 3, 9, 8), r(4, 3, 5, 2), None, padding=[0, 0], stride=[1, 1], dilation=[1, 1], groups=1
    ),
    "_slow_conv2d_forward": lambda: torch.ops.aten.thnn_conv2d(r(2, 3, 9, 8), r(4, 3, 5, 2), [5, 2]),
    "slow_conv_dilated2d": lambda: torch.ops.aten.slow_conv_dilated2d(r(2, 3, 9, 8), r(4, 3, 5, 2), [5, 2]),
    "slow_conv3d_forward": lambda: torch.ops.aten.slow_conv3d(r(2, 3, 9, 8, 1), r(4, 3, 5, 2, 1), [5, 2, 1]),
    "slow_conv_transpose2d": lambda: torch.ops.aten.slow_conv_transpose2d(r(2, 3, 5, 7), r(3, 4, 5, 2), [5, 2]),
}


@pytest.mark.parametrize("options", BELOW_FUNCTIONS)
@pytest.mark.parametrize("name", DIRECTLY)
def test_convolutions_that_are_called_directly(name: str, options: dict[str, Any]) -> None:
    product = (1, 2 * 5 * 7, 40, 3) if "transpose" in name else (1, 2 * 5 * 7, 4, 30)
    assert calls_of(DIRECTLY[name], **options) == [(f"aten::{name}", product, 2 * math.prod(product))]


@pytest.mark.parametrize("options", BELOW_FUNCTIONS)
def test_a_convolution_with_time_first(options: dict[str, Any]) -> None:
    ((op, gemm, _),) = calls_of(lambda: torch.conv_tbc(r(9, 2, 3), r(5, 3, 4), r(4), 1), **options)
    assert (op, gemm) == ("aten::conv_tbc", (1, 2 * 7, 4, 15))


@pytest.mark.parametrize(("engine", "name"), [("kernel", "convolution"), ("mode", "conv1d")])
def test_under_inference_mode_a_convolution_is_one_call(engine: str, name: str) -> None:
    def run() -> None:
        with torch.inference_mode():
            F.conv1d(r(3, 9), r(4, 3, 5), padding="same")

    assert calls_of(run, engine=engine) == [(f"aten::{name}", (1, 9, 4, 15), 2 * 9 * 4 * 15)]


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ones to convolve, without padding, so that an element of the output is the number of its products."""
    spatial, groups, transposed = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(spatial)]

    kernel, stride, dilation = each(1, 3), each(1, 3), each(1, 2)
    sizes = [d * (k - 1) + extra for d, k, extra in zip(dilation, kernel, each(1, 3), strict=True)]
    samples = [draw(st.integers(0, 2))] if draw(st.booleans()) else []
    weight = (groups * inner, outer) if transposed else (groups * outer, inner)
    options = {"stride": stride, "dilation": dilation, "groups": groups}
    return torch.ones(*samples, groups * inner, *sizes), torch.ones(*weight, *kernel), options | {"t": transposed}


@quick
@given(convolutions())
def test_the_product_is_as_large_as_the_sum_of_a_convolution_of_ones(drawn: tuple[Tensor, Tensor, Any]) -> None:
    data, weight, options = drawn
    transposed, spatial = options.pop("t"), weight.dim() - 2
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{spatial}d")
    output = function(data, weight, **options)
    gemm = table.row_of(function).gemm((data, weight), options)
    assert gemm is not None
    assert math.prod(gemm[:4]) == output.sum()
    if not transposed:
        assert gemm.batch * gemm.m * gemm.n == output.numel()
        assert (output == gemm.k).all()

    row = table.row_of("aten::convolution_backward")
    data = data if data.dim() == weight.dim() else data[None]
    none = [0] * spatial
    args = output, data, weight, None, options["stride"], none, options["dilation"], transposed, none, options["groups"]
    for mask, products in (((1, 0, 1), 1), ((0, 1, 0), 1), ((1, 1, 1), 2), ((0, 0, 1), 0)):
        mask_of_bools = tuple(map(bool, mask))
        assert row.flops((*args, mask_of_bools), {}) == 2 * products * output.sum()
        product = row.gemm((*args, mask_of_bools), {})
        assert (product is None) == (products != 1)
        if product is not None:
            assert math.prod(product[:4]) == output.sum()


@pytest.mark.parametrize(
    ("function", "weight", "leaf", "expected"),
    [
        (F.conv2d, (4, 6, 3, 2), "weight", (1, 4, 36, 2 * 3 * 3)),
        (F.conv2d, (4, 6, 3, 2), "data", (1, 2 * 3 * 3, 36, 4)),
        (F.conv_transpose2d, (6, 4, 3, 2), "weight", (1, 6, 24, 2 * 5 * 4)),
        (F.conv_transpose2d, (6, 4, 3, 2), "data", (1, 2 * 5 * 4, 6, 24)),
    ],
    ids=["weight", "data", "weight, transposed", "data, transposed"],
)
def test_the_product_of_one_gradient(
    function: Callable[..., Tensor], weight: tuple[int, ...], leaf: str, expected: tuple[int, ...]
) -> None:
    tensors = {"data": r(2, 6, 5, 4), "weight": r(*weight)}
    tensors[leaf].requires_grad_()
    output = function(tensors["data"], tensors["weight"])
    found = [("aten::convolution_backward", expected, 2 * math.prod(expected))]
    assert calls_of(lambda: output.sum().backward()) == found


def test_a_backward_call_counts_both_gradients_and_has_no_product() -> None:
    data, weight = r(2, 6, 5, 4).requires_grad_(), r(4, 3, 3, 2).requires_grad_()
    output = F.conv2d(data, weight, groups=2)
    forward = table.row_of(F.conv2d).flops((data, weight), {"groups": 2})
    assert calls_of(lambda: output.sum().backward()) == [("aten::convolution_backward", None, 2 * (forward or 0))]


def test_operands_that_the_operator_will_refuse_have_no_product() -> None:
    row = table.row_of(F.conv2d)
    for data, weight in ((r(2, 3, 4, 4), r(4, 2, 3, 3)), (r(4, 4), r(4, 4, 3, 3)), (r(2, 3, 4, 4), r(4, 3))):
        assert row.gemm((data, weight), {}) is None
        assert row.flops((data, weight), {}) is None
    assert row.gemm((r(2, 3, 4, 4), r(4, 3, 3, 3)), {"stride": (1, 1, 1)}) is None
    assert row.gemm((r(2, 3, 4, 4), None), {}) is None


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: F.conv2d(r(2, 3, 4, 4), r(4, 3, 3, 3)), True),
        (lambda: F.conv2d(r(2, 3, 4, 4), r(4, 3, 3, 3).to(memory_format=torch.channels_last)), True),
        (lambda: F.conv2d(r(2, 3, 4, 4), r(3, 3, 3, 4).permute(3, 0, 1, 2)), False),
        (lambda: F.conv_transpose2d(r(2, 3, 4, 4), r(3, 4, 3, 3)), False),
        (lambda: F.conv_transpose2d(r(2, 3, 4, 4), r(4, 3, 3, 3).permute(3, 0, 1, 2)[:3]), True),
        (lambda: torch.conv_tbc(r(9, 2, 3), r(5, 3, 4), r(4)), False),
    ],
    ids=["plain", "channels last", "channels first", "transposed", "transposed, channels last", "time first"],
)
def test_transposes_of_a_weight(function: Callable[[], Any], expected: bool) -> None:
    found: list[Any] = []
    with intercept(lambda call: found.append(call.gemm.transposes if call.gemm else None), ops="convolution"):
        function()
    assert found == [(False, expected)]


class Block(nn.Module):
    """Two convolutions and a shortcut, as in a residual network."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.second, self.short = nn.Conv2d(outer, outer, 3, 1, 1), nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.short(x))


class UNet(nn.Module):
    """Down, up again, and what was there before beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.down, self.low = Block(3, 8, 1), nn.Conv2d(8, 16, 2, 2), Block(16, 16, 1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        output: Tensor = self.out(torch.cat([self.up(self.low(self.down(top))), top], 1))
        return output


def resnet() -> nn.Module:
    stem = nn.Conv2d(3, 8, 7, 2, 3)
    blocks = Block(8, 16, 2), Block(16, 16, 1)
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def of_transformers(name: str) -> nn.Module:
    size: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2}
    if name == "ResNet":
        config: Any = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        return transformers.ResNetModel(config)
    if name == "Mamba":
        return transformers.MambaModel(transformers.MambaConfig(vocab_size=20, state_size=4, **size))
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_attention_heads=2, intermediate_size=32, **size)
    return transformers.ViTModel(config)


IMAGE = (2, 3, 16, 16)
NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "residual network": (resnet, lambda: torch.randn(2, 3, 32, 32)),
    "U-Net": (UNet, lambda: torch.randn(IMAGE)),
    "ResNet": (partial(of_transformers, "ResNet"), lambda: torch.randn(2, 3, 32, 32)),
    "ViT": (partial(of_transformers, "ViT"), lambda: torch.randn(IMAGE)),
    "Mamba": (partial(of_transformers, "Mamba"), lambda: torch.randint(0, 20, (2, 6))),
}


@pytest.mark.parametrize("engine", ["kernel", "mode"])
@pytest.mark.parametrize("name", NETS)
def test_flops_of_a_network_are_those_of_torchs_counter(name: str, engine: str) -> None:
    make, inputs = NETS[name]
    torch.manual_seed(0)
    net, data = make().train(), inputs()
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}

    def add(call: OpCall) -> None:
        assert call.flops is not None, call.op
        found[call.phase][call.op] += call.flops

    def forward() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            output = net(data)
        return output if isinstance(output, Tensor) else output.last_hidden_state

    def backward() -> None:
        forward().square().sum().backward()

    with intercept(add, ops=BOTH, engine=engine):  # type: ignore[arg-type]
        backward()
    ahead, all_of_it = counted(forward), counted(backward)
    both = {op: flops for op, flops in (found["forward"] + found["backward"]).items() if flops}
    assert found["forward"] == ahead
    if name == "Mamba":  # of a grouped convolution's weight, torch 2.13 counts each gradient once for each group
        assert all_of_it.pop("aten::convolution_backward") >= both["aten::convolution_backward"]
        assert both.pop("aten::convolution_backward") == 2 * ahead["aten::convolution"]
    assert both == all_of_it


@pytest.mark.parametrize("options", BELOW_FUNCTIONS)
def test_calls_have_the_module_of_the_layer_forward_and_backward(options: dict[str, Any]) -> None:
    net, recorder = UNet(), hooks.Recorder()
    with intercept(recorder, ops=BOTH, **options):
        net(torch.randn(IMAGE)).sum().backward()
    layers = ["top.first", "top.second", "top.short", "down", "low.first", "low.second", "low.short", "up", "out"]
    modules: dict[str, list[Any]] = {"forward": [], "backward": []}
    for record in recorder.records:
        modules[record.phase].append(record.module)
    assert modules["forward"] == layers
    assert sorted(modules["backward"]) == sorted(layers)
    for record in recorder.records:
        if record.phase == "backward":
            assert record.forward is not None
            assert recorder.records[record.forward].module == record.module


@pytest.mark.parametrize("options", BELOW_FUNCTIONS)
def test_operands_of_a_convolution_by_role(options: dict[str, Any]) -> None:
    layer, data = nn.Conv2d(3, 4, 3), r(2, 3, 5, 5).requires_grad_()
    seen: list[tuple[Any, ...]] = []

    def look(call: OpCall) -> None:
        names = {layer.weight.data_ptr(): "weight", data.data_ptr(): "data"}
        names |= {} if layer.bias is None else {layer.bias.data_ptr(): "bias"}
        operands = (call.lhs, call.rhs, call.bias)
        seen.append((call.op, *(None if t is None else names.get(t.data_ptr()) for t in operands), [*call.tensors]))

    with intercept(look, ops="convolution", **options):
        layer(data).sum().backward()
    assert seen == [
        ("aten::convolution", "data", "weight", "bias", ["lhs", "rhs", "bias"]),
        ("aten::convolution_backward", "data", "weight", None, ["grad_output", "lhs", "rhs"]),
    ]


def test_products_inside_a_convolution_are_seen_by_those_who_do_not_watch_it() -> None:
    outer: list[str] = []
    with intercept(lambda call: outer.append(call.op), ops=BOTH):
        inner = calls_of(lambda: torch.conv_tbc(r(9, 2, 3), r(5, 3, 4), r(4)), ops="matmul")
    assert outer == ["aten::conv_tbc"]
    assert [op for op, _, _ in inner] == ["aten::addmm_"] * 5
    assert sum(flops or 0 for _, _, flops in inner) == 2 * 10 * 4 * 15


class TimeFirst(nn.Module):
    """Its gradients are sums of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(r(5, 3, 4)), nn.Parameter(r(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.conv_tbc(x, self.weight, self.bias)


def test_products_of_a_gradient_belong_to_the_convolution() -> None:
    net, recorder = nn.Sequential(TimeFirst()), hooks.Recorder()
    with intercept(recorder, ops=BOTH):
        net(r(9, 2, 3).requires_grad_()).sum().backward()
    backward = [record for record in recorder.records if record.phase == "backward"]
    assert {record.op for record in backward} == {"aten::addmm_"}
    assert {record.module for record in recorder.records} == {"0"}
    assert {record.grad_of for record in backward} == {None}
    assert {record.forward for record in backward} == {0}


def test_a_gradient_of_a_gradient_is_not_taken_for_that_of_an_operand() -> None:
    recorder, layer, data = hooks.Recorder(), nn.Conv2d(3, 4, 3), r(2, 3, 5, 5).requires_grad_()
    with intercept(recorder, ops=BOTH):
        (gradient,) = torch.autograd.grad(layer(data).square().sum(), data, create_graph=True)
        gradient.square().sum().backward()
    assert len(recorder.records) > 3
    assert {record.grad_of for record in recorder.records} == {None}


def test_the_default_family_has_no_convolutions() -> None:
    assert calls_of(lambda: nn.Linear(27, 2)(F.conv2d(r(2, 3, 5, 5), r(3, 3, 3, 3)).flatten(1)), ops="matmul") == [
        ("aten::addmm", (1, 2, 2, 27), 2 * 2 * 2 * 27)
    ]


@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_families_and_operators_are_combined(level: Any) -> None:
    def run() -> None:
        torch.relu(torch.mm(F.conv1d(r(3, 9), r(4, 3, 5)), r(5, 2)))

    def names(ops: Any) -> list[str]:
        return [op.rpartition("::")[2].rpartition(".")[2] for op, _, _ in calls_of(run, ops=ops, level=level)]

    convolution = "convolution" if level == "dispatch" else "conv1d"
    assert names("convolution") == names(["convolution"]) == [convolution]
    assert names(("matmul", "convolution")) == [convolution, "mm"]
    assert names(["convolution", "relu"]) == [convolution, "relu"]
    assert names(iter(["relu", "matmul"])) == ["mm", "relu"]


def test_an_operator_that_has_the_name_of_a_family_is_meant_with_its_namespace() -> None:
    data = r(2, 3, 5, 5).requires_grad_()

    def run() -> None:
        F.conv2d(data, r(3, 3, 3, 3)).sum().backward()

    assert [op for op, _, _ in calls_of(run, ops="convolution")] == ["aten::convolution", "aten::convolution_backward"]
    assert [op for op, _, _ in calls_of(run, ops="aten::convolution")] == ["aten::convolution"]


def test_an_unknown_name_in_a_list_is_named() -> None:
    with pytest.raises(ValueError, match="unknown op 'convolutions'; did you mean 'convolution'"):
        intercept(ops=("matmul", "convolutions"))
    with pytest.raises(ValueError, match="watch 'convolution' and 'convolution_backward' instead, or use level='func"):
        intercept(ops=("matmul", "conv2d"))


def test_names_that_cannot_match_are_explained_by_family() -> None:
    keys = intercept().watcher.keys
    both = intercept(ops=BOTH).watcher.keys
    assert why_never("convolution", "dispatch", keys, ("matmul",)) == "it is not watched; name it in ops="
    assert why_never("cudnn_convolution", "dispatch", keys, ("matmul",)) == "it is not watched; name it in ops="
    for name in ("convolution", "aten::convolution_backward", "cudnn_convolution", "mm"):
        assert why_never(name, "dispatch", both, FAMILIES) is None
    assert "name 'convolution' and" in str(why_never("conv2d", "dispatch", both, FAMILIES))


@pytest.mark.parametrize("case", [name for name in CASES if name != "no samples"])
def test_scales_of_the_channels_factor_out(case: str) -> None:
    def look(call: OpCall) -> None:
        data, weight, _, *options = (t.double() if isinstance(t, Tensor) else t for t in call.args)
        scales = []
        for role, tensor in (("lhs", data), ("rhs", weight)):
            shared = table.row_of(call.func).sharing(role, call.args, call.kwargs)
            assert shared is not None
            scales.append(torch.rand_like(tensor.amax(shared, keepdim=True)) + 0.5)
        of_data, of_weight = scales
        plain = call.func(data, weight, None, *options)
        outer = plain.shape[1]
        of_outputs = of_weight.flatten().repeat(outer // of_weight.numel()).view(outer, *(1,) * (plain.dim() - 2))
        scaled = call.func(data * of_data, weight * of_weight, None, *options)
        assert of_data.numel() == len(data)
        torch.testing.assert_close(scaled, plain * of_data * of_outputs)

    with intercept(look, ops="convolution"):
        CASES[case][0]()


@pytest.mark.parametrize("options", [{}, FUNCTION], ids=["dispatch", "function"])
def test_quantisation_by_channel_has_a_scale_for_each_sample_and_each_channel_of_the_output(
    options: dict[str, Any],
) -> None:
    data, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    data[1] *= 1000
    weight[2] *= 1000

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax((1, 2, 3), keepdim=True) / 127
        return (x / scale).round() * scale

    with intercept(hooks.FakeQuantize(per="channel"), ops="convolution", **options):
        found = F.conv2d(data, weight)
    torch.testing.assert_close(found, F.conv2d(rounded(data), rounded(weight)))


def test_quantisation_by_channel_leaves_a_backward_pass_as_it_is() -> None:
    quantize = hooks.FakeQuantize(per="channel")
    with pytest.warns(OpInterceptWarning, match=r"as they are: 2 of aten::convolution_backward"):
        with intercept(quantize, ops="convolution"):
            F.conv2d(torch.randn(2, 3, 6, 6).requires_grad_(), torch.randn(4, 3, 3, 3)).sum().backward()
    assert quantize.skipped == {"aten::convolution_backward": 2}


@pytest.mark.parametrize("options", [{}, {"engine": "mode"}], ids=["kernel", "mode"])
def test_a_convolution_has_a_reference(options: dict[str, Any]) -> None:
    net, reference = UNet(), hooks.Reference()
    with intercept(reference, ops="convolution", **options):
        net(torch.randn(IMAGE)).sum().backward()
    assert reference.skipped == {}
    assert len(reference.rows()) == 18
    assert all(100 < row.snr < math.inf for row in reference.rows())
    low = hooks.Reference()
    with intercept(low, ops="convolution", **options):
        net.bfloat16()(torch.randn(IMAGE).bfloat16())
    assert all(30 < row.snr < 70 and row.dtype == "bfloat16" for row in low.rows())
    assert len(low.rows()) == 9


def test_a_reference_at_function_level_and_of_out() -> None:
    reference = hooks.Reference()
    with intercept(reference, ops="convolution", level="function"):
        F.conv1d(r(2, 3, 9), r(4, 3, 5), padding="same")
    with intercept(reference, ops="convolution"):
        torch.ops.aten.convolution.out(
            r(1, 3, 9), r(4, 3, 5), None, [1], [0], [1], False, [0], 1, out=torch.empty(1, 4, 5)
        )
    assert reference.skipped == {}
    assert [row.op for row in reference.rows()] == ["torch.nn.functional.conv1d", "aten::convolution"]


def test_float32_is_no_reference_if_torch_rounds_the_operands_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv1d(3, 4, 5).bfloat16()
    for precision, rows in (("bf16", 0), ("ieee", 1)):
        reference = hooks.Reference(torch.float32)
        before = torch.backends.mkldnn.conv.fp32_precision  # type: ignore[attr-defined]
        try:
            torch.backends.mkldnn.conv.fp32_precision = precision  # type: ignore[attr-defined]
            with intercept((reference, profile := hooks.Profile()), ops="convolution"):
                layer(r(2, 3, 9).bfloat16())
        finally:
            torch.backends.mkldnn.conv.fp32_precision = before  # type: ignore[attr-defined]
        assert len(reference.rows()) == rows
        assert [row.precision for row in profile.rows()] == ["highest" if rows else "bf16"]


def test_a_profile_shows_the_product_and_counts_all_flops() -> None:
    layer, profile = nn.Conv2d(6, 4, 3, groups=2), hooks.Profile()
    with intercept(profile, ops="convolution"):
        layer(torch.randn(2, 6, 5, 5)).sum().backward()
    forward, backward = profile.rows()
    assert (forward.op, forward.shape, forward.flops) == (
        "aten::convolution",
        "2x[18, 27] @ [27, 2]",
        2 * 2 * 18 * 27 * 2,
    )
    assert (backward.shape, backward.flops) == ("2x[2, 18] @ [18, 27]", forward.flops)
    assert backward.module == forward.module != ""


def test_the_number_of_summed_products_is_unknown_where_the_product_does_not_tell() -> None:
    recorder = hooks.Recorder()
    data = r(1, 3, 5).requires_grad_()
    with intercept(recorder, ops=BOTH):
        F.conv1d(data, r(4, 3, 3)).sum().backward()
        F.conv1d(data, r(4, 3, 1)).sum().backward()  # the gradient has the size of the product
        F.conv_transpose1d(r(1, 3, 5), r(3, 4, 2), stride=2)  # the kernels do not overlap
        F.conv_transpose1d(r(1, 3, 5), r(3, 4, 3), stride=2)
        torch.addbmm(r(2, 4), r(5, 2, 3), r(5, 3, 4))
    assert [record.terms for record in recorder.records] == [9, None, 3, None, 3, None, None]


def test_outputs_that_are_left_out_keep_the_places_of_the_others() -> None:
    layer, recorder, stats = nn.Conv1d(3, 4, 3), hooks.Recorder(), hooks.Stats()
    with intercept((recorder, stats), ops="convolution"):
        layer(r(2, 3, 9)).sum().backward()
    output = recorder.records[-1].output
    assert isinstance(output, tuple)
    assert [meta and meta.shape for meta in output] == [None, (4, 3, 3), (4,)]
    assert "-> float32[4, 3, 3], float32[4]" in str(recorder.records[-1])
    (row,) = [row for row in stats.rows() if row.phase == "backward"]
    assert row.count == 36


def test_an_edited_output_keeps_its_place() -> None:
    layer = nn.Conv1d(3, 4, 3)
    with intercept(hooks.when(hooks.Noise(10.0), phase="backward"), ops="convolution"):
        layer(r(2, 3, 9)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    assert layer.weight.grad.std() > 5
    assert (layer.bias.grad == 2 * 7).all()


def test_runs_of_convolutions_are_recorded_compared_and_replayed(tmp_path: Any) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        net = UNet()
        with intercept(runs.RunRecorder(tmp_path / name, tensors="full"), ops=BOTH):
            net(torch.randn(IMAGE)).sum().backward()
    first, second = (runs.open_run(tmp_path / name) for name in ("a", "b"))
    assert runs.diff(first, second).kinds == {"equal": 18}
    for index in (0, 7, 9, 17):
        assert replay(first, index).equal


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that convolutions were told of, which a process does once."""
    monkeypatch.setattr(Watcher, "told_of_convolutions", False)


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("options", [{}, {"engine": "mode"}, COMPILED])
def test_the_first_block_for_matmuls_tells_how_many_convolutions_it_passed_over(options: dict[str, Any]) -> None:
    net, profile = UNet(), hooks.Profile()
    watching = intercept(profile, **options)

    def step() -> None:
        with watching:
            net(torch.randn(IMAGE)).sum().backward()

    with pytest.warns(OpInterceptWarning, match="18 convolutions ran in a block that looks at matrix products only"):
        step()
    assert not profile.rows()
    step()  # without a second warning, which would be an error
    assert watching.watcher.pipeline.skipped == 18
    assert watching.opaque == {}


@pytest.mark.usefixtures("untold")
def test_function_level_passes_over_convolutions_too() -> None:
    net = UNet()
    with pytest.warns(OpInterceptWarning, match="9 convolutions ran in a block"), intercept(void, level="function"):
        net(torch.randn(IMAGE))


@pytest.mark.usefixtures("untold")
def test_both_of_two_blocks_count_what_they_pass_over() -> None:
    with pytest.warns(OpInterceptWarning, match="1 convolution ran"):
        with intercept(void) as outer, intercept(void) as inner:
            F.conv1d(r(1, 3, 5), r(4, 3, 3))
    assert outer.watcher.pipeline.skipped == inner.watcher.pipeline.skipped == 1


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("ops", [BOTH, "convolution", "mm", ["matmul", "relu"], "all"])
def test_a_block_that_names_what_it_wants_passes_over_nothing(ops: Any) -> None:
    with intercept(void, ops=ops, engine="mode") as watching:
        F.conv1d(r(1, 3, 5), r(4, 3, 3))
    assert watching.watcher.pipeline.skipped == 0


@pytest.mark.usefixtures("untold")
def test_convolutions_of_hooks_are_not_counted() -> None:
    with intercept(lambda call: void(F.conv1d(r(1, 3, 5), r(4, 3, 3)))) as watching:
        r(2, 3) @ r(3, 4)
    assert watching.watcher.pipeline.skipped == 0


@pytest.mark.usefixtures("untold")
def test_a_block_beside_one_that_watches_convolutions_does_not_count_them() -> None:
    recorder = hooks.Recorder()
    with intercept(void) as watching, intercept(recorder, ops="convolution"):
        F.conv1d(r(1, 3, 5), r(4, 3, 3))
    assert watching.watcher.pipeline.skipped == 0
    assert len(recorder.records) == 1
