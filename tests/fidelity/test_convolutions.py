"""Convolutions do the same with and without interception, bit for bit, forward and backward.

`test_op_db.py` has torch's operator database; these are the layouts, dtypes and kernels that it leaves out.
"""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sampled
import torch
from compiler import ALL_ENGINES
from programs import EMPTY
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import OpCall, hooks, intercept

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

KINDS: dict[str, Callable[..., nn.Module]] = {
    "plain": lambda **more: nn.Conv2d(4, 6, 3, **more),
    "pointwise": lambda **more: nn.Conv2d(4, 6, 1, **more),
    "strided": lambda **more: nn.Conv2d(4, 6, 3, stride=2, padding=1, **more),
    "dilated": lambda **more: nn.Conv2d(4, 6, 3, dilation=2, **more),
    "grouped": lambda **more: nn.Conv2d(4, 6, 3, groups=2, **more),
    "depthwise": lambda **more: nn.Conv2d(4, 8, 3, groups=4, **more),
    "same": lambda **more: nn.Conv2d(4, 6, (2, 3), padding="same", **more),
    "reflected": lambda **more: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect", **more),
    "transposed": lambda **more: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, **more),
    "transposed, grouped": lambda **more: nn.ConvTranspose2d(4, 6, 3, groups=2, dilation=2, **more),
}
# Each dtype has kernels of its own, and so has each layout.
FORMS = (
    (torch.float32, torch.contiguous_format),
    (torch.float32, torch.channels_last),
    (torch.float64, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
    (torch.float16, torch.contiguous_format),
)


@pytest.fixture(params=[True, False], ids=["mkldnn", "no mkldnn"])
def mkldnn(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Kernels of oneDNN, or torch's own."""
    torch._C._set_mkldnn_enabled(request.param)
    yield request.param
    torch._C._set_mkldnn_enabled(True)


def bits(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    plain = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = plain.contiguous().reshape(-1)
    return plain.dtype, plain.shape, tensor.layout is torch.strided and tensor.stride(), bytes(flat.view(torch.uint8))


def trained(make: Callable[..., nn.Module], dtype: torch.dtype, layout: Any, bias: bool = True) -> list[Any]:
    """Output and gradients of a layer, gradients of a gradient, and the gradient of its input alone."""
    torch.manual_seed(3)
    layer: Any = make(bias=bias)
    layer.to(dtype=dtype, memory_format=layout)
    data = torch.randn(2, 4, 9, 8).to(dtype=dtype, memory_format=layout).requires_grad_()
    output = layer(data)
    parameters = [data, *layer.parameters()]
    gradients = torch.autograd.grad(output.float().square().sum(), parameters, create_graph=True)
    twice = torch.autograd.grad(gradients[0].float().square().sum(), parameters[:2])
    layer.requires_grad_(False)
    frozen = torch.autograd.grad(layer(data).sum(), data)
    return [bits(tensor) for tensor in (output, *gradients, *twice, *frozen)]


@functools.cache
def unwatched(kind: str, dtype: torch.dtype, layout: Any, bias: bool, mode: bool, mkldnn: bool) -> list[Any]:
    """What training gives without interception; `mkldnn` says which kernels it uses."""
    # Under any dispatch mode autograd sums gradients in another order.
    with EMPTY["mode"]() if mode else warnings.catch_warnings():
        return trained(KINDS[kind], dtype, layout, bias)


class Watched:
    """Reads and keeps what hooks may."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre(self, call: OpCall) -> None:
        self.seen.append(f"{call.op} {call.phase}")
        assert call.flops

    def post(self, call: OpCall) -> None:
        assert call.output is not None


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("options", ALL_ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_trained_as_without_interception(kind: str, options: dict[str, Any], mkldnn: bool) -> None:
    # With `--sampled` each pair of a kind, an engine and a setting of mkldnn is there, but not all three, and every
    # second form.
    number = list(KINDS).index(kind) + [param.values[0] for param in ALL_ENGINES].index(options)
    if sampled.on and number % 2 == mkldnn:
        pytest.skip("sampled")
    for dtype, layout in FORMS[number // 2 % 2 :: 2] if sampled.on else FORMS:
        bias = dtype in (torch.float32, torch.bfloat16)
        expected = unwatched(kind, dtype, layout, bias, options.get("engine") == "mode", mkldnn)
        watched = Watched()
        with intercept((watched, hooks.Recorder()), ops=("matmul", "convolution"), **options):
            found = trained(KINDS[kind], dtype, layout, bias)
        assert found == expected, (dtype, layout)
        calls = Counter(watched.seen)
        if options.get("level") == "function":
            assert calls.total() == 2
            continue
        # Torch computes the gradient of a gradient by convolutions of its own, several if there are groups.
        assert calls.pop("aten::convolution backward") >= 2
        assert calls == {"aten::convolution forward": 2, "aten::convolution_backward backward": 3}


def volume() -> list[Any]:
    layer = nn.Conv3d(3, 4, 2)
    data = torch.randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d).requires_grad_()
    output = layer(data)
    output.sum().backward()
    return [output, data.grad, *(p.grad for p in layer.parameters())]


def packed() -> list[Any]:
    from torch.utils import mkldnn as of_mkldnn

    model = of_mkldnn.to_mkldnn(nn.Conv2d(3, 4, 3).eval())
    return [model(torch.randn(2, 3, 6, 6).to_mkldnn())]


def pointwise() -> list[Any]:
    data, weight, other = torch.randn(2, 4, 6, 6), torch.randn(6, 4, 3, 3), torch.randn(2, 6, 4, 4)
    ops, common = torch.ops.mkldnn, ([0, 0], [1, 1], [1, 1], 1)
    reordered = ops._reorder_convolution_weight(weight, *common, [2, 4, 6, 6])
    alone = ops._convolution_pointwise(data, reordered, None, *common, "relu", [], "")
    added = ops._convolution_pointwise(data, other, reordered, None, *common, "add", None, None, [], None)
    ops._convolution_pointwise_(other, data, reordered, None, *common, "add", None, None, [], None)
    turned = ops._reorder_convolution_transpose_weight(
        torch.randn(4, 6, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, [2, 4, 6, 6]
    )
    back = ops._convolution_transpose_pointwise(data, turned, None, [0, 0], *common, "none", [], "")
    return [alone, added, other, back]


def quantised() -> list[Any]:
    kinds = torch.ao.nn.quantized
    data = torch.quantize_per_tensor(torch.randn(1, 3, 6, 6), 0.1, 0, torch.quint8)
    layers: Any = kinds.Conv2d(3, 4, 3), kinds.ConvTranspose2d(3, 4, 3), kinds.Conv2d(3, 3, 3, groups=3)
    dynamic: Any = kinds.dynamic.Conv2d(3, 4, 3)
    for layer in (*layers, dynamic):
        weight = torch.quantize_per_tensor(torch.randn(layer.weight().shape), 0.1, 0, torch.qint8)
        layer.set_weight_bias(weight, None)
    return [*(layer(data).dequantize() for layer in layers), dynamic(torch.randn(1, 3, 6, 6))]


def quantised_pointwise() -> list[Any]:
    ops = torch.ops.onednn
    weight, scales = torch.randint(-9, 9, (4, 3, 3, 3), dtype=torch.int8), torch.rand(4)
    packed = ops.qconv_prepack(weight, scales, 0.1, 0, [1, 1], [0, 0], [1, 1], 1, [1, 3, 6, 6])
    data = torch.randint(0, 9, (1, 3, 6, 6), dtype=torch.uint8)
    common: Any = ([1, 1], [0, 0], [1, 1], 1, 1.0, 0, torch.float32, "none", [], "")
    return [ops.qconv2d_pointwise(data, 0.1, 0, packed, scales, torch.zeros(4).int(), None, *common)]


def mapped() -> list[Any]:
    weights, data = torch.randn(5, 4, 3, 3), torch.randn(5, 2, 3, 6)
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: F.conv1d(x, w).square().sum()))
    return [per_sample(weights, data), torch.func.vmap(F.conv1d)(data, weights)]


def inferred() -> list[Any]:
    with torch.inference_mode():
        return [nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 6, 6)), nn.ConvTranspose1d(3, 4, 3)(torch.randn(3, 6))]


def cast() -> list[Any]:
    layer, data = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(data)
    output.float().sum().backward()
    return [output, *(p.grad for p in layer.parameters())]


def scripted() -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = torch.randn(2, 3, 6, 6)
        traced = torch.jit.trace(nn.Conv2d(3, 4, 3), data, check_trace=False)
    output = traced(data)
    output.sum().backward()
    return [output, *(p.grad for p in traced.parameters())]


# Each program, with the calls that kernels see.
PROGRAMS: dict[str, tuple[Callable[[], list[Any]], list[str]]] = {
    "volume": (volume, ["aten::convolution", "aten::convolution_backward"]),
    "mkldnn layout": (packed, ["aten::mkldnn_convolution"]),
    "pointwise": (
        pointwise,
        [f"mkldnn::_convolution_{kind}" for kind in ("pointwise", "pointwise", "pointwise_", "transpose_pointwise")],
    ),
    "quantised": (
        quantised,
        [f"quantized::{kind}" for kind in ("conv2d", "conv_transpose2d", "conv2d", "conv2d_dynamic")],
    ),
    "quantised pointwise": (quantised_pointwise, ["onednn::qconv2d_pointwise"]),
    "vmap": (mapped, ["aten::convolution", "aten::convolution_backward", "aten::convolution"]),
    "inference mode": (inferred, ["aten::convolution"] * 2),
    "autocast": (cast, ["aten::convolution", "aten::convolution_backward"]),
    "traced": (scripted, ["aten::convolution", "aten::_convolution", "aten::convolution_backward"]),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("options", ALL_ENGINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_does_the_same(name: str, options: dict[str, Any]) -> None:
    program, calls = PROGRAMS[name]
    torch.manual_seed(5)
    expected = [bits(tensor) for tensor in program()]
    torch.manual_seed(5)
    recorder = hooks.Recorder()
    with intercept(recorder, ops=("matmul", "convolution"), **options):
        found = [bits(tensor) for tensor in program()]
    assert found == expected
    if options in ({}, {"engine": "compiled"}):
        assert [record.op for record in recorder.records] == calls
