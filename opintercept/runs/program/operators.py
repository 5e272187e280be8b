"""`NAMES`: the operators of ATen that may be called with arguments of anyone, and what is checked of those before.

Invariant: an operator is here only if its own kernels, behind its entry in `CHECKS`, neither leave their memory nor go
on for ever, whatever they are given: `tests/programs/hostile_calls.py` tries all of them. Must not import from rooms
that read runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Given = Mapping[str, Any]
Check = Callable[[Given], None]
_MOST_COLUMNS = 1 << 26  # elements that a kernel may unfold, or of a matrix of scores that it may make

_ELEMENTWISE = """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max clamp_min complex conj_physical copysign cos
    cosh deg2rad digamma div eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac ge
    gt heaviside hypot i0 isfinite isinf isnan isneginf isposinf ldexp le lerp lgamma log log10 log1p log2 logaddexp
    logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt maximum minimum mul nan_to_num
    ne neg nextafter polar positive pow rad2deg reciprocal remainder round rsqrt rsub sgn sigmoid sigmoid_backward
    sign signbit sin sinc sinh special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr
    special_ndtri special_xlog1py sqrt square sub tan tanh tanh_backward true_divide trunc where xlogy
    _conj_physical
"""
_ACTIVATIONS = """
    celu elu elu_backward gelu gelu_backward glu glu_backward hardshrink hardshrink_backward hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward leaky_relu leaky_relu_backward
    log_sigmoid_backward log_sigmoid_forward mish mish_backward prelu relu relu6 rrelu_with_noise_backward selu silu
    silu_backward softplus softplus_backward softshrink softshrink_backward threshold threshold_backward
    _prelu_kernel _prelu_kernel_backward native_dropout_backward _log_softmax _log_softmax_backward_data
    _safe_softmax _softmax _softmax_backward_data
"""
_REDUCTIONS = """
    all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum kthvalue
    linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmean nanmedian nansum norm prod std
    std_mean sum var var_mean linalg__powsum
"""
_NORMS = """
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_no_training
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward _fused_rms_norm
    _fused_rms_norm_backward _weight_norm_interface _weight_norm_interface_backward
"""
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits huber_loss
    huber_loss_backward mse_loss mse_loss_backward nll_loss_backward nll_loss_forward nll_loss2d_backward
    nll_loss2d_forward smooth_l1_loss smooth_l1_loss_backward _ctc_loss
"""
_POOLS = """
    adaptive_max_pool2d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool2d
    max_unpool3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler_2d grid_sampler_3d affine_grid_generator im2col
    col2im pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d constant_pad_nd
"""
_PRODUCTS = """
    mm bmm addmm _addmm_activation baddbmm addbmm mv addmv dot vdot addr _int_mm _scaled_mm _foreach_mm _grouped_mm
    _weight_int8pack_mm mkldnn_rnn_layer _trilinear _cdist_forward _euclidean_dist convolution convolution_backward
    _convolution linalg_matrix_exp
"""
_ATTENTION = """
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
"""
_MOVES = """
    cat clone copy diag_embed embedding embedding_dense_backward fill flip full full_like gather index index_add
    index_copy index_fill index_put index_reduce index_select isin masked_fill masked_scatter masked_select nonzero
    new_full new_ones new_zeros ones ones_like zeros zeros_like put repeat repeat_interleave roll rot90 scatter
    scatter_add scatter_reduce select_scatter slice_scatter diagonal_scatter select_backward slice_backward sort
    stack take topk tril triu zero _to_copy _unique2 unique_consecutive unique_dim bincount histc bucketize arange
    eye linspace scalar_tensor contiguous trace unsafe_split
"""
_TRANSFORMS = """
    _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    linalg_cholesky_ex linalg_cross linalg_inv_ex linalg_qr linalg_solve_triangular
    fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
"""
_OTHERS = "special_zeta polygamma igamma igammac frexp"
_FOREACH = """
    abs add addcdiv addcmul clamp_max clamp_min copy div exp lerp log maximum minimum mul neg norm pow reciprocal
    rsqrt sign sqrt sub zero
"""
NAMES = frozenset(
    [f"_foreach_{name}" for name in _FOREACH.split()]
    + " ".join((_ELEMENTWISE, _ACTIVATIONS, _REDUCTIONS, _NORMS, _LOSSES, _POOLS, _PRODUCTS, _ATTENTION)).split()
    + " ".join((_MOVES, _TRANSFORMS, _OTHERS)).split()
)
_WITH_OUT = frozenset(("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot"))
_BY_VALUES = """
    nonzero masked_select _unique2 unique_consecutive unique_dim bincount repeat_interleave _grouped_mm
    native_layer_norm fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
"""
_UNSIZED = frozenset(_BY_VALUES.split())


def is_unsized(name: str, given: Given) -> bool:
    """Whether a call makes as much as the values of its operands say: no more than these have or its check allows."""
    if name == "index":
        indices = [each for each in given["indices"] if each is not None]
        return len(indices) == 1 and indices[0].dtype == torch.bool
    return name in _UNSIZED


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"{what} must fit the other arguments")


def _within(index: torch.Tensor, size: int, ignored: int | None = None) -> None:
    """Refuse indices that are outside of `0 <= index < size`."""
    _need(index.dtype in (torch.int64, torch.int32), "the dtype of the indices")
    if ignored is not None:
        index = index[index != ignored]
    if index.numel():
        low, high = (int(each) for each in index.aminmax())
        _need(low >= 0 and high < size, "each index")


def _same(*tensors: torch.Tensor | None) -> None:
    """Refuse tensors of several dtypes or devices."""
    found = {(each.dtype, each.device) for each in tensors if each is not None}
    _need(len(found) == 1, "the dtype of each tensor")


def _numbers(given: Any, least: int, most: int, *counts: int) -> None:
    """Refuse what is no list of so many whole numbers, none of them less or more than these."""
    items = given if isinstance(given, list) else [given]
    _need(len(items) in counts and all(type(each) is int and least <= each <= most for each in items), "each size")


def _embedding_dense_backward(given: Given) -> None:
    gradient, indices, count = given["grad_output"], given["indices"], given["num_weights"]
    _need(type(count) is int and gradient.shape[:-1] == indices.shape and gradient.dim() > 0, "the shape of indices")
    _within(indices, count)


def _weight_norm(given: Given) -> None:
    backward = "grad_w" in given
    v, g = (given["saved_v"], given["saved_g"]) if backward else (given["v"], given["g"])
    dim = given["dim"]
    _same(v, g, *((given["grad_w"], given["saved_norms"]) if backward else ()))
    _need(v.dim() > 1 and dim in (0, v.dim() - 1), "dim")
    shape = [size if at == dim else 1 for at, size in enumerate(v.shape)]
    _need(list(g.shape) == shape and v.numel() > 0, "the shape of g")
    if backward:
        _need(given["grad_w"].shape == v.shape and given["saved_norms"].shape == g.shape, "the shape of the gradient")


def _pooled_backward(spatial: int) -> Check:
    """For the gradients of a pooling over this many dimensions."""

    def check(given: Given) -> None:
        gradient, x = given["grad_output"], given["self"]
        _same(gradient, x)
        _need(gradient.dim() == x.dim() and x.dim() in (spatial + 1, spatial + 2), "the shape of the gradient")
        _need(gradient.shape[:-spatial] == x.shape[:-spatial] and x.numel() > 0, "the shape of the gradient")
        if "indices" in given:
            _need(given["indices"].shape == gradient.shape, "the shape of indices")
            _within(given["indices"], math.prod(x.shape[-spatial:]))

    return check


def _nll(given: Given) -> None:
    x, target, weight = given["self"], given["target"], given["weight"]
    _need(x.dim() in (1, 2, 4), "the shape of self")
    classes = x.shape[0 if x.dim() == 1 else 1]
    _same(x, weight, given.get("grad_output"), given.get("total_weight"))
    _need(weight is None or weight.shape == (classes,), "the shape of weight")
    _need(
        target.shape == (x.shape[:1] if x.dim() > 1 else ()) + x.shape[2:] or (x.dim() == 1 and target.shape == (1,)),
        "the shape of target",
    )
    _need(given["reduction"] in (0, 1, 2), "reduction")
    gradient = given.get("grad_output")
    if gradient is not None:
        shapes = (target.shape,) if given["reduction"] == 0 else ((), (1,))
        _need(tuple(gradient.shape) in shapes and given["total_weight"].numel() == 1, "the shape of the gradient")
    _within(target, classes, given["ignore_index"])


def _layer_norm_backward(given: Given) -> None:
    x, gradient, shape = given["input"], given["grad_out"], given["normalized_shape"]
    mean, deviation = given["mean"], given["rstd"]
    _need(0 < len(shape) <= x.dim() and list(x.shape[-len(shape) :]) == shape, "normalized_shape")
    _need(gradient.shape == x.shape and x.numel() > 0, "the shape of the gradient")
    _need(mean.numel() == deviation.numel() == x.numel() // math.prod(shape), "the shape of mean and rstd")
    others = [given[name] for name in ("weight", "bias") if given[name] is not None]
    _need(all(list(each.shape) == shape for each in others), "the shape of weight and bias")
    _same(x, gradient)
    _same(mean, deviation, *others)
    _need(mean.dtype in (x.dtype, torch.float32) and len(given["output_mask"]) == 3, "the dtype of mean")


def _softmax_backward(given: Given) -> None:
    gradient, output = given["grad_output"], given["output"]
    _same(gradient, output)
    _need(gradient.shape == output.shape, "the shape of the gradient")


def _channels(given: Given) -> None:
    """For a norm by channels: each other tensor has one number for each."""
    x = given.get("input", given.get("self"))
    _need(x.dim() > 1 and x.numel() > 0, "the shape of the input")
    names = ["weight", "bias", "running_mean", "running_var"]
    names += ["save_mean", "save_invstd"] if given.get("train") else []  # they are empty if it does not train
    others = [given[name] for name in names if given.get(name) is not None]
    _need(all(each.shape == x.shape[1:2] and each.is_floating_point() for each in others), "the shape of a weight")
    _same(x, given.get("grad_out"))
    _same(*others, *(() if others else (x,)))
    _need(not others or others[0].dtype in (x.dtype, torch.float32), "the dtype of a weight")
    _need(given.get("grad_out") is None or given["grad_out"].shape == x.shape, "the shape of the gradient")
    if "grad_out" in given:
        saved = ("save_mean", "save_invstd") if given["train"] else ("running_mean", "running_var")
        _need(all(given[name] is not None for name in saved), "what is saved")
    elif given.get("training", given.get("train", False)) is False:
        _need(given.get("running_mean") is not None and given.get("running_var") is not None, "the running mean")


def _ctc_loss(given: Given) -> None:
    scores, targets = given["log_probs"], given["targets"]
    lengths = [given[name] for name in ("input_lengths", "target_lengths")]
    for each in (each.tolist() if isinstance(each, torch.Tensor) else each for each in lengths):
        _numbers(each, 0, max(scores.shape[0], targets.numel()), scores.shape[1])
    _within(targets, scores.shape[2])
    _need(type(given["blank"]) is int and 0 <= given["blank"] < scores.shape[2], "blank")


def _resized(given: Given) -> None:
    """For what makes images larger: kernels turn a factor that is nearly 0 into an index."""
    factors = [each for name, each in given.items() if name.startswith("scale")]
    for factor in (each for given in factors for each in (given if isinstance(given, list) else [given])):
        _need(factor is None or 2**-10 <= factor <= 2**10, "each factor")


def _transform(given: Given) -> None:
    x, dims = given["self"], given["dim"]
    _numbers(dims, 0, x.dim() - 1, *range(1, x.dim() + 1))
    _need(len(set(dims)) == len(dims), "dim")
    _need(given["normalization"] in (0, 1, 2) and x.numel() > 0, "normalization")
    if "last_dim_size" in given:
        size = given["last_dim_size"]
        _need(type(size) is int and size // 2 + 1 == x.shape[dims[-1]] and size > 0, "last_dim_size")


def _attention(given: Given) -> None:
    query, key = given["query"], given["key"]
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    _need(scores <= max(_MOST_COLUMNS, 16 * (query.numel() + key.numel())), "the number of scores")


def _flash_attention(given: Given) -> None:
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    _attention(given)
    _same(q, k, v)
    _need(q.dim() == k.dim() == 4 and k.shape == v.shape and k.numel() > 0 and q.numel() > 0, "the shape of value")
    _need(q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0, "the shape of key")
    if mask is not None:
        sizes = (*q.shape[:3], k.shape[2])[-mask.dim() :]
        _need(mask.dim() in (2, 4) and mask.dtype in (q.dtype, torch.float32), "attn_mask")
        _need(all(n in (1, size) for n, size in zip(mask.shape, sizes, strict=True)), "the shape of attn_mask")


def _flash_attention_backward(given: Given) -> None:
    q, out, grad, sums = given["query"], given["out"], given["grad_out"], given["logsumexp"]
    _flash_attention(given)
    _same(q, out, grad, given.get("attn_mask"))
    _need(out.shape == grad.shape == q.shape, "the shape of the gradient")
    _need(sums.shape in (q.shape[:3], (q.shape[0], q.shape[2], q.shape[1])), "the shape of logsumexp")
    _need(sums.dtype == (q.dtype if q.dtype == torch.float64 else torch.float32), "the dtype of logsumexp")


def _unfolded(given: Given) -> None:
    """For a convolution: the size of what its kernels unfold its input to."""
    weight, x = given["weight"], given.get("input", given.get("self"))
    count = weight.dim() - 2
    _need(1 <= count <= 3 and weight.numel() > 0 and x.dim() > count, "the shape of weight")
    names = ("stride", "padding", "dilation", "output_padding")
    settings = {name: given[name] for name in names if isinstance(given.get(name), (list, int))}
    for each in settings.values():
        _numbers(each, 0, 1 << 16, 1, count)

    def at(name: str, place: int, default: int) -> int:
        found = settings.get(name, default)
        return int(found[place % len(found)] if isinstance(found, list) else found)

    places = 1
    for place, (size, kernel) in enumerate(zip(x.shape[-count:], weight.shape[2:], strict=True)):
        around = size + 2 * at("padding", place, kernel) - at("dilation", place, 1) * (kernel - 1)
        is_transposed = given.get("transposed", "output_padding" in given)
        places *= size if is_transposed else max(around // max(at("stride", place, 1), 1), 0)
    unfolded = math.prod(weight.shape[1:]) * places * (len(x) if x.dim() > count + 1 else 1)
    _need(unfolded <= max(_MOST_COLUMNS, 64 * x.numel()), "the size of the kernel")


def _grouped_mm(given: Given) -> None:
    x, y, ends = given["self"], given["mat2"], given["offs"]
    _same(x, y)
    _need(x.dim() in (2, 3) and y.dim() in (2, 3) and x.shape[-1] == y.shape[-2], "the shape of mat2")
    if x.dim() == y.dim() == 3:
        _need(ends is None and len(x) == len(y), "offs")
        groups = len(x)
    else:
        groups = len(x) if x.dim() == 3 else len(y) if y.dim() == 3 else len(ends)
        limit = x.shape[1] if x.dim() == y.dim() else len(x) if x.dim() == 2 else y.shape[1]
        _need(ends.shape == (groups,) and ends.dtype == torch.int32 and bool((ends.diff() >= 0).all()), "offs")
        _within(ends, limit + 1)
    _need(given["bias"] is None and given["out_dtype"] in (None, x.dtype), "bias")
    _need(groups * x.shape[-2] * y.shape[-1] <= _MOST_COLUMNS, "the shape of mat2")


def _rnn_layer(given: Given) -> None:
    x, hidden = given["input"], given["hidden_size"]
    weights = [given[f"weight{place}"] for place in range(4)]
    _same(x, given["hx_"], given["cx_"], *weights)
    _need(given["mode"] == 2 and given["batch_sizes"] == [] and x.dim() == 3 and x.numel() > 0, "mode")
    _need(type(hidden) is int and 0 < hidden <= 1 << 20, "hidden_size")
    shapes: list[tuple[int, ...]] = [(4 * hidden, x.shape[2]), (4 * hidden, hidden)]
    shapes += [(4 * hidden,), (4 * hidden,)] if given["has_biases"] else shapes
    _need([tuple(each.shape) for each in weights] == shapes, "the shape of a weight")
    batch = x.shape[1]  # the batch is second here, whatever `batch_first` says
    _need(all(given[name].shape == (batch, hidden) for name in ("hx_", "cx_")), "the shape of hx_ and cx_")


def _repeats(given: Given) -> None:
    repeats = given.get("repeats")
    if isinstance(repeats, torch.Tensor):
        _need(repeats.dtype in (torch.int64, torch.int32) and bool((repeats >= 0).all()), "repeats")
        _need(int(repeats.clamp(max=_MOST_COLUMNS).sum()) <= _MOST_COLUMNS, "repeats")
        given = given | {"repeats": 1}  # type: ignore[operator]
    if "self" in given:
        _need(type(given["repeats"]) is int and given["self"].numel() * given["repeats"] <= _MOST_COLUMNS, "repeats")


def _selected(given: Given) -> None:
    shape = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)
    _need(math.prod(shape) <= _MOST_COLUMNS, "the shape of mask")


def _copied(given: Given) -> None:
    to, source = given["self"], given["src"]
    _need([each.shape for each in to] == [each.shape for each in source] != [], "the shape of src")


def _quotient(given: Given) -> None:
    """Refuse the one quotient of integers that they cannot hold: cut to a whole number, it ends the process."""
    x, y = (torch.as_tensor(given[name]) for name in ("self", "other"))
    dtype = torch.result_type(given["self"], given["other"])
    if given.get("rounding_mode") == "trunc" and not (dtype.is_floating_point or dtype.is_complex):
        _need(not bool((y == -1).any() and (x == torch.iinfo(dtype).min).any()), "other")


def _counted(given: Given) -> None:
    x = given["self"]
    _within(x, _MOST_COLUMNS)
    _numbers(given["minlength"], 0, _MOST_COLUMNS, 1)


CHECKS: Mapping[str, Check] = {
    "_foreach_copy": _copied,
    "embedding_dense_backward": _embedding_dense_backward,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm,
    "_adaptive_avg_pool2d_backward": _pooled_backward(2),
    "_adaptive_avg_pool3d_backward": _pooled_backward(3),
    "max_pool2d_with_indices_backward": _pooled_backward(2),
    "max_pool3d_with_indices_backward": _pooled_backward(3),
    **dict.fromkeys(("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"), _nll),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit"), _channels),
    "_native_batch_norm_legit_no_training": _channels,
    "native_layer_norm_backward": _layer_norm_backward,
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _transform),
    "_scaled_dot_product_attention_math": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    **dict.fromkeys(("convolution", "convolution_backward", "_convolution"), _unfolded),
    "_ctc_loss": _ctc_loss,
    **dict.fromkeys((name for name in _POOLS.split() if "upsample" in name), _resized),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _softmax_backward),
    "_grouped_mm": _grouped_mm,
    "mkldnn_rnn_layer": _rnn_layer,
    "repeat_interleave": _repeats,
    "masked_select": _selected,
    "bincount": _counted,
    "div": _quotient,
}


_COMPOSITES = """
    batch_norm bilinear chain_matmul einsum group_norm inner instance_norm layer_norm linear log_softmax logsigmoid
    matmul matrix_exp multi_dot relu6 rms_norm softmax to adaptive_avg_pool1d
"""
FUNCTIONS: Mapping[str, Check | None] = (
    dict.fromkeys(_COMPOSITES.split())
    | dict.fromkeys((f"conv{form}{n}d" for form in ("", "_transpose") for n in (1, 2, 3)), _unfolded)
    | {"div": _quotient, "scaled_dot_product_attention": _attention}
)
"""Functions of torch that call several operators, with the checks of their arguments."""


def listed(overload: Any) -> str | None:
    """The name in `NAMES` under which an overload may be called; None if it may not.

    Those in place are on the list with the others, since a call writes to copies; of those that return nothing, the
    others are called. Those for a dtype of the output are for GPUs alone, and those that make no tensor are
    TorchScript's.
    """
    schema = overload._schema
    space, _, name = schema.name.partition("::")
    base = name.removesuffix("_")
    if space != "aten" or base not in NAMES or "dtype" in schema.overload_name:
        return None
    writes_out = any(each.is_out for each in schema.arguments)
    makes = bool(schema.returns) and str(schema.returns[0].type) in ("Tensor", "List[Tensor]")
    return base if makes and (base in _WITH_OUT or not writes_out) else None
