"""The rows of convolutions, and the matrix products that they stand for.

A convolution is one product for each group: the input's patches, a row for each position, with the weight. A
transposed convolution is the gradient of a plain one, so there the input's positions are the rows, and the kernel
belongs to the columns. Must not import the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from opintercept._core.gemm import Gemm
from opintercept._core.tensors import dtype_name, is_strided
from opintercept._ops.op import Args, GemmRule, Kind, Kwargs, Op, passed


class _Sizes(NamedTuple):
    """The sizes of a convolution."""

    groups: int  # how many parts the channels have that do not mix
    rows: int  # positions of all samples: those of the output, or those of the input of a transposed convolution
    inner: int  # channels of the input, by group
    outer: int  # channels of the output, by group
    kernel: int  # elements of the kernel
    transposed: bool

    @property
    def sum(self) -> int:
        """How many products are added up."""
        return self.inner if self.transposed else self.inner * self.kernel

    @property
    def columns(self) -> int:
        """How wide the product is."""
        return self.outer * self.kernel if self.transposed else self.outer

    @property
    def flops(self) -> int:
        """FLOPs of the convolution, and of either gradient."""
        return 2 * self.groups * self.rows * self.sum * self.columns


@dataclass(frozen=True, slots=True, eq=False)
class _Signature:
    """Where operators with the same parameters have the settings of a convolution, which are not tensors."""

    settings: Mapping[str, tuple[int, str]]  # the position and the keyword of each
    transposed: bool | None = False  # None if an argument says so
    depthwise: bool = False  # whether each channel of the input is a group

    def forward(self, op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
        """The product of a convolution."""
        sizes = self._sizes(op, args, kwargs)
        if sizes is None:
            return None
        weight = op.operand("rhs", args, kwargs)
        summed = (0,) if sizes.transposed else tuple(range(1, weight.dim()))
        return _gemm(op, args, kwargs, sizes, (sizes.rows, sizes.columns, sizes.sum), _is_transposed(weight, summed))

    def backward(self, op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
        """The product of the gradient that a backward operator computes; None if it computes both."""
        sizes, (wants_input, wants_weight) = self._sizes(op, args, kwargs), self._mask(args, kwargs)
        if sizes is None or wants_input == wants_weight:
            return None
        if wants_weight:  # which is laid out by channels of the output, or of the input if transposed
            m, n = (sizes.sum, sizes.columns) if sizes.transposed else (sizes.columns, sizes.sum)
            return _gemm(op, args, kwargs, sizes, (m, n, sizes.rows))
        return _gemm(op, args, kwargs, sizes, (sizes.rows, sizes.sum, sizes.columns))

    def backward_flops(self, op: Op, args: Args, kwargs: Kwargs) -> int | None:
        """FLOPs of the gradients that a backward operator computes. That of the bias is a sum, which does not count."""
        sizes = self._sizes(op, args, kwargs)
        return None if sizes is None else sum(self._mask(args, kwargs)) * sizes.flops

    def sharing(self, op: Op, role: str, args: Args, kwargs: Kwargs) -> tuple[int, ...]:
        """The dimensions of an operand that share a scale: all but the samples, or all but the channels of the output.

        Patches overlap, so a scale for each row would not factor out of the product.
        """
        spatial = op.operand("rhs", args, kwargs).dim() - 2
        if role == "rhs" and self._is_transposed(args, kwargs):
            return (-spatial - 2, *range(-spatial, 0))
        return tuple(range(-spatial - 1, 0))

    def _is_transposed(self, args: Args, kwargs: Kwargs) -> bool:
        return bool(self._setting("transposed", args, kwargs)) if self.transposed is None else self.transposed

    def _setting(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        where = self.settings.get(name)
        return None if where is None else passed(where, args, kwargs)

    def _mask(self, args: Args, kwargs: Kwargs) -> tuple[bool, bool]:
        """Whether the gradients of the input and of the weight are wanted. `out=` forms without a mask compute both."""
        mask = self._setting("output_mask", args, kwargs)
        return (True, True) if mask is None else (bool(mask[0]), bool(mask[1]))

    def _sizes(self, op: Op, args: Args, kwargs: Kwargs) -> _Sizes | None:
        """The sizes, which follow from those of input and weight. A packed weight may have its dimensions reordered."""
        data, weight = op.operand("lhs", args, kwargs).shape, op.operand("rhs", args, kwargs).shape
        spatial = len(weight) - 2
        if spatial < 1 or len(data) not in (spatial + 1, spatial + 2):
            return None
        samples = data[0] if len(data) == spatial + 2 else 1  # a function also takes a single sample
        channels, positions, kernel = data[-spatial - 1], data[-spatial:], weight[-spatial:]
        groups = channels if self.depthwise else self._setting("groups", args, kwargs) or 1
        transposed = self._is_transposed(args, kwargs)
        if not transposed:
            positions = tuple(self._windows(positions, kernel, args, kwargs))
        inputs = {weight[1] * groups, weight[0]} if transposed else {weight[1] * groups}
        if channels not in inputs or channels % groups:
            return None  # the operator will refuse them
        outer = weight[0] * weight[1] // (channels or 1)
        rows = samples * math.prod(positions)
        return _Sizes(int(groups), int(rows), int(channels // groups), int(outer), math.prod(kernel), transposed)

    def _windows(self, data: tuple[int, ...], kernel: tuple[int, ...], args: Args, kwargs: Kwargs) -> Iterator[int]:
        """How often the kernel fits into each dimension."""
        padding = self._setting("padding", args, kwargs)
        if padding == "same":
            yield from data
            return
        settings = [None if padding == "valid" else padding]
        settings += [self._setting(name, args, kwargs) for name in ("stride", "dilation")]
        pads, strides, dilations = (_each(value, i and 1, len(data)) for i, value in enumerate(settings))
        for size, width, pad, stride, dilation in zip(data, kernel, pads, strides, dilations, strict=True):
            yield (size + 2 * pad - dilation * (width - 1) - 1) // stride + 1


def _each(value: Any, default: int, dims: int) -> tuple[int, ...]:
    """A setting for each dimension, which may be given as one number for all."""
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (default if value is None else value,)
    return numbers * dims if len(numbers) == 1 else numbers


def _gemm(
    op: Op, args: Args, kwargs: Kwargs, sizes: _Sizes, product: tuple[int, int, int], transposed: bool = False
) -> Gemm:
    lhs, rhs = op.operand("lhs", args, kwargs), op.operand("rhs", args, kwargs)
    # The patches are not laid out in memory, so nothing is known of their transpose.
    return Gemm(sizes.groups, *product, (dtype_name(lhs.dtype), dtype_name(rhs.dtype)), (False, transposed))


def _is_transposed(weight: Any, summed: tuple[int, ...]) -> bool:
    """Whether neighbours of the weight in memory are summed over, as with the weight of a linear."""
    if not is_strided(weight):
        return False
    adjacent = [dim for dim, size in enumerate(weight.shape) if size > 1 and weight.stride(dim) == 1]
    return bool(adjacent) and all(dim in summed for dim in adjacent)


def _time_first(op: Op, args: Args, kwargs: Kwargs) -> Gemm | None:
    """`[time, batch, c_in]` and `[kernel, c_in, c_out]`, with a padding that is one number."""
    weight = op.operand("rhs", args, kwargs)
    time, samples, inner = op.operand("lhs", args, kwargs).shape
    kernel, expected, outer = weight.shape
    if inner != expected:
        return None
    windows = time + 2 * (passed((3, "pad"), args, kwargs) or 0) - kernel + 1
    sizes = _Sizes(1, int(samples * windows), int(inner), int(outer), int(kernel), False)
    return _gemm(op, args, kwargs, sizes, (sizes.rows, sizes.columns, sizes.sum), _is_transposed(weight, (0, 1)))


ROWS: list[Op] = []
"""The rows. The name of one that serves a single overload has that overload's."""
OUTERMOST = ("aten::convolution", "aten::convolution_backward", "mkldnn::_convolution_pointwise")
"""The operators with which a convolution begins at dispatch level. Those of a device run inside."""


def _add(
    names: str,
    arguments: str,
    *,
    kind: Kind = "leaf",
    transposed: bool | None = False,
    depthwise: bool = False,
    backward: bool = False,
) -> None:
    # As `table._add`; a word without a role is a setting.
    operands, settings = {}, {}
    for position, word in enumerate(arguments.split()):
        role, colon, keyword = word.partition(":")
        if colon:
            operands[role] = (position, keyword)
        elif role != "_":
            settings[role] = (position, role)
    signature = _Signature(settings, transposed, depthwise)
    rule = GemmRule(signature.backward) if backward else GemmRule(signature.forward, sharing=signature.sharing)
    flops = signature.backward_flops if backward else None
    packed = "rhs" not in operands
    for name in names.split():
        ROWS.append(Op(_full(name), "convolution", kind, False, operands, None if packed else rule, flops))


def _full(name: str) -> str:
    return name if "::" in name else f"aten::{name}"


_BIASED = "lhs:input rhs:weight bias:bias"
_add(
    "convolution convolution_overrideable _convolution",
    f"{_BIASED} stride padding dilation transposed _ groups",
    transposed=None,
)
_add("conv1d conv2d conv3d _convolution_mode", f"{_BIASED} stride padding dilation groups", kind="composite")
_add(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    f"{_BIASED} stride padding _ groups dilation",
    kind="composite",
    transposed=True,
)
_add(
    "mkldnn_convolution miopen_convolution miopen_depthwise_convolution _mps_convolution",
    f"{_BIASED} padding stride dilation groups",
)
_add("miopen_convolution_transpose", f"{_BIASED} padding _ stride dilation groups", transposed=True)
_add("cudnn_convolution", "lhs:input rhs:weight padding stride dilation groups")
_add(
    "cudnn_convolution_transpose _mps_convolution_transpose",
    "lhs:input rhs:weight padding _ stride dilation groups",
    transposed=True,
)
_add("cudnn_convolution_relu miopen_convolution_relu", f"{_BIASED} stride padding dilation groups")
_add(
    "cudnn_convolution_add_relu miopen_convolution_add_relu",
    "lhs:input rhs:weight _ _ bias:bias stride padding dilation groups",
)
_add("_nnpack_spatial_convolution", f"{_BIASED} padding stride")
_SIZED = "lhs:input rhs:weight _ bias:bias stride padding"
_add("thnn_conv2d slow_conv3d", _SIZED, kind="composite")
_add("_slow_conv2d_forward slow_conv3d_forward", _SIZED)
_add("slow_conv_dilated2d slow_conv_dilated3d", f"{_SIZED} dilation")
_add("slow_conv_transpose2d slow_conv_transpose3d", f"{_SIZED} _ dilation", transposed=True)
_add("_conv_depthwise2d conv_depthwise3d", f"{_SIZED} dilation", depthwise=True)
_add(
    "convolution_backward",
    "_ lhs:input rhs:weight _ stride padding dilation transposed _ groups output_mask",
    transposed=None,
    backward=True,
)
_add(
    "convolution_backward_overrideable",
    "_ lhs:input rhs:weight stride padding dilation transposed _ groups output_mask",
    transposed=None,
    backward=True,
)
_add("_slow_conv2d_backward", "_ lhs:input rhs:weight _ stride padding output_mask", backward=True)
_add("mps_convolution_backward", "lhs:input _ rhs:weight padding stride dilation groups output_mask", backward=True)
_add(
    "mps_convolution_transpose_backward",
    "lhs:input _ rhs:weight padding _ stride dilation groups output_mask",
    transposed=True,
    backward=True,
)
_POINTWISE = "rhs:W bias:B padding stride dilation groups"
_add("mkldnn::_convolution_pointwise", f"lhs:X {_POINTWISE}")
_add("mkldnn::_convolution_pointwise.binary", f"lhs:X _ {_POINTWISE}")
_add("mkldnn::_convolution_pointwise_", f"_ lhs:X {_POINTWISE}")
_add("mkldnn::_convolution_transpose_pointwise", "lhs:X rhs:W bias:B padding _ stride dilation groups", transposed=True)
_QUANTISED = "lhs:qx _ _ rhs:qw _ _"
_add(
    "onednn::qconv_pointwise onednn::qconv1d_pointwise onednn::qconv2d_pointwise onednn::qconv3d_pointwise",
    f"{_QUANTISED} bias:bias stride padding dilation groups",
)
_add(
    "onednn::qconv2d_pointwise.binary onednn::qconv2d_pointwise.binary_tensor",
    f"{_QUANTISED} _ bias:bias stride padding dilation groups",
)
# Their weights are packed, and have no sizes.
_add("mkldnn_prepacked::conv2d_run prepacked::conv2d_clamp_run prepacked::conv2d_transpose_clamp_run", "lhs:X")
_add(
    "quantized::conv1d quantized::conv1d_relu quantized::conv1d_dynamic quantized::conv2d quantized::conv2d_add"
    " quantized::conv2d_add_relu quantized::conv2d_dynamic quantized::conv2d_relu quantized::conv3d"
    " quantized::conv3d_dynamic quantized::conv3d_relu quantized::conv_transpose1d"
    " quantized::conv_transpose1d_dynamic quantized::conv_transpose2d quantized::conv_transpose2d_dynamic"
    " quantized::conv_transpose3d quantized::conv_transpose3d_dynamic _quantized::conv2d _quantized::conv2d_relu"
    " _quantized::conv3d _quantized::conv3d_relu _quantized::conv_transpose1d _quantized::conv_transpose2d",
    "lhs:qx",
)
ROWS += [
    Op(
        "aten::conv_tbc",
        "convolution",
        roles={"lhs": (0, "input"), "rhs": (1, "weight"), "bias": (2, "bias")},
        gemm_rule=GemmRule(_time_first, sharing=lambda op, role, args, kwargs: (-3, -1) if role == "lhs" else (-3, -2)),
    ),
    # Each of these is several convolutions or products.
    Op("aten::conv_tbc_backward", "convolution", "composite", True, {"lhs": (1, "input"), "rhs": (2, "weight")}),
    Op(
        "aten::_convolution_double_backward",
        "convolution",
        "composite",
        True,
        {"lhs": (5, "input"), "rhs": (4, "weight")},
    ),
]
