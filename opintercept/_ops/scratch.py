"""Tensors that are not read: uninitialised ones, views, what is still being sent, and what serves a backward kernel.

Must not import torch.
"""

from __future__ import annotations

from opintercept._core.text import short_name

_UNWRITTEN = (
    "empty empty_like empty_strided empty_permuted empty_quantized _empty_affine_quantized"
    " _empty_per_channel_affine_quantized new_empty new_empty_strided resize resize_ resize_as_ _resize_output"
    " _resize_output_ set set_"
)
UNWRITTEN = frozenset(_UNWRITTEN.split())
"""The operators and functions that return uninitialised memory."""

_VIEWS = (
    "_conj _fw_primal _indices _make_dual _neg_view _nested_view_from_buffer _reshape_alias _sparse_broadcast_to"
    " _test_autograd_multiple_dispatch_view _unsafe_view _values alias as_strided ccol_indices col_indices crow_indices"
    " detach diagonal expand indices permute row_indices select slice slice_inverse split split_with_sizes squeeze t"
    " transpose unbind unfold unsqueeze values view view_as_complex view_as_real"
)
VIEWS = frozenset(_VIEWS.split())
"""Torch's operators that return memory which they were given."""
UNREAD = VIEWS | UNWRITTEN
"""All of these: a run has no values of their calls."""

COMMUNICATION = ("c10d::", "_c10d_functional")
"""How the names of operators begin that send and receive, and return before they have."""

_OVERWRITES = (
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_ _foreach_copy_"
    " _foreach_zero_"
)
OVERWRITES = frozenset(_OVERWRITES.split())
"""Those that write to `self` without reading it."""

_LIKE = (
    "full_like ones_like rand_like randint_like randn_like zeros_like new_full new_ones new_zeros cauchy copy"
    " exponential fill geometric log_normal normal_functional random uniform zero"
)
LIKE = frozenset(_LIKE.split())
"""Those that take no more of `self` than how it looks. `bernoulli` is another, if it is given `p`."""

_FILLS = "index_copy index_copy_ index_fill_ index_put index_put_ masked_scatter_ scatter scatter_"
FILLS = frozenset(_FILLS.split())
"""Those that write to places in `self`, which may be memory that nobody has written if these are all of it."""

MOVES = frozenset(("clone", "contiguous", "copy_", "full_like", "new_full", "_foreach_copy_", "_to_copy"))
"""Those that compute nothing: they copy values, or write one that they are given."""

UPDATES = frozenset(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "instance_norm"))
"""Those that write to the running statistics, which their schemas do not say."""
UPDATED = ("running_mean", "running_var")
"""The parameters of these."""

_SCRATCH = "workspace reserve reserveSpace reservedSpace weight_buf dropout_state"
_RANDOM = "philox_seed philox_offset rng_state unused"
SCRATCH = frozenset(f"{_SCRATCH} {_RANDOM}".split())
"""The parameters of kernels for memory of their own, whose padding nobody writes, and for random numbers."""

FOR_PROGRAM = {
    "aten::_ctc_loss": 1,
    "aten::_cudnn_ctc_loss": 1,
    "aten::mkldnn_rnn_layer": 3,
    "aten::_cudnn_rnn": 3,
    "aten::miopen_rnn": 3,
    "aten::_lstm_mps": 3,
    "aten::_embedding_bag": 1,
    "aten::_embedding_bag_forward_only": 1,
    "aten::_batch_norm_with_update": 3,
    "aten::cudnn_batch_norm": 3,
    "aten::_cudnn_attention_forward": 1,
    "aten::_efficient_attention_forward": 1,
    "aten::_flash_attention_forward": 1,
    "aten::_scaled_dot_product_cudnn_attention": 1,
    "aten::_scaled_dot_product_efficient_attention": 1,
    "aten::_scaled_dot_product_flash_attention": 1,
}
"""How many outputs are for the program, by operator. The others serve its backward kernel, some with padding."""


PADDED = frozenset(
    ("logsumexp", f"{op.removesuffix('_forward')}_backward") for op in FOR_PROGRAM if op.count("attention")
)
"""The parameters of their backward kernels that have such padding, with the operators."""

_MASKS_LATER = "Angle Copysign Cumprod Dist LinalgVectorNorm Norm Pow Prod Renorm Sgn Sinc Std StdMean"
MASKS_LATER = frozenset(f"{name}Backward" for name in _MASKS_LATER.split())
"""The nodes of autograd that divide by zero, or take its logarithm, and then overwrite the NaN by a mask."""


def torchs_name(op: str) -> str:
    """Return by which name the sets above have an operator: `"t"` for `"aten::t"`, and `""` for other libraries'."""
    return short_name(op) if op.startswith(("aten::", "torch.")) else ""


def results_of(op: str, family: str) -> int | None:
    """How many tensors among several outputs are for the program; None for all.

    What serves the backward pass may rightly hold -inf, and memory that is never read.
    """
    return FOR_PROGRAM.get(op, 1 if family == "attention" and not op.endswith("_backward") else None)
