"""Tensors whose values mean nothing: memory that nobody has written, and what a kernel keeps for its backward kernel.

Must not import torch.
"""

from __future__ import annotations

_UNWRITTEN = (
    "empty empty_like empty_strided empty_permuted empty_quantized _empty_affine_quantized"
    " _empty_per_channel_affine_quantized new_empty new_empty_strided resize resize_ resize_as_ _resize_output"
    " _resize_output_ set set_"
)
UNWRITTEN = frozenset(_UNWRITTEN.split())
"""The operators and functions that return uninitialised memory."""

_OVERWRITES = (
    "bernoulli_ cauchy_ copy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_ _foreach_copy_"
    " _foreach_zero_"
)
OVERWRITES = frozenset(_OVERWRITES.split())
"""Those that write to `self` without reading it."""

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
}
"""How many outputs are for the program, by operator. The others serve its backward kernel."""
