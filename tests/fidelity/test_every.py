"""What `ops="all"` sees of what a program calls by another name: the lines of the last table in docs/seen.md."""

from __future__ import annotations

import itertools
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiler import BELOW_FUNCTIONS
from torch import nn

from opintercept import intercept

PAGE = Path(__file__).parents[2] / "docs" / "seen.md"
LIBRARY = torch.library.Library("every", "FRAGMENT")


@torch.library.custom_op("every::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def register() -> Any:
    """Define an operator, and return it."""
    name = f"new{next(NUMBERS)}"
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, torch.sin, "CPU")
    return getattr(torch.ops.every, name)


NUMBERS = itertools.count()
known = register()
x, p, many = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True), torch.randn(30, 8)
layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).eval()
lstm = nn.LSTM(8, 8)
NAMES = {"F": F, "torch": torch, "x": x, "p": p, "many": many, "layer": layer, "lstm": lstm, "squared": squared}
NAMES |= {"register": register, "known": known, "labels": torch.zeros(8, dtype=torch.long)}

# What kernels see, and what a mode sees; before the colon, what it takes. A `*` stands for more.
CALLS: dict[str, tuple[str, str]] = {
    "torch.zeros(2)": ("zero_", "zeros"),
    "torch.ones(2)": ("fill_", "ones"),
    "torch.full((2,), 3)": ("fill_", "full"),
    "torch.randn(2)": ("normal_", "randn"),
    "torch.rand(2)": ("uniform_", "rand"),
    "torch.randint(0, 3, (2,))": ("random_", "randint"),
    "x.to(dtype=torch.float64)": ("copy_", "_to_copy"),
    "x.half()": ("copy_", "_to_copy"),
    "torch.hann_window(4)": ("arange mul_ cos_ mul_ add_ slice", "hann_window"),
    "torch.fft.fftfreq(4)": ("arange slice arange mul_", "fft_fftfreq"),
    "torch.arange(3)": ("arange", "arange"),
    "torch.linspace(0, 1, 3)": ("linspace", "linspace"),
    "torch.eye(3)": ("eye", "eye"),
    "torch.randperm(3)": ("randperm", "randperm"),
    "torch.zeros_like(x)": ("zeros_like", "zeros_like"),
    "torch.randn_like(x)": ("randn_like", "randn_like"),
    "x.new_zeros(3)": ("new_zeros", "new_zeros"),
    "torch.empty(2)": ("", "empty"),
    "torch.tril_indices(3, 3)": ("", "tril_indices"),
    "torch.tensor([1.0])": ("", "lift_fresh"),
    "torch.as_tensor([1.0])": ("", "lift_fresh"),
    "p.detach()": ("compiled: detach", "detach"),
    "torch.ops.aten.alias(x)": ("compiled: alias", "alias"),
    "(p * 1).detach_()": ("mul", "mul"),
    "p.data": ("", "detach"),
    "torch.addr(x, x[0], x[0], out=torch.empty(8, 8))": ("select select view", "select select empty addr"),
    "F.linear(x, x)": ("t mm", "inference: linear"),
    "torch.matmul(x, x)": ("mm", "inference: matmul"),
    "torch.einsum('ij,jk', x, x)": ("*bmm*", "inference: einsum"),
    "F.dropout(x)": ("empty_like bernoulli_ div_ mul", "inference: dropout"),
    "F.rms_norm(x, (8,))": ("pow mean add_ rsqrt mul", "inference: rms_norm"),
    "F.cross_entropy(x, labels)": ("*_log_softmax nll_loss_forward", "inference: cross_entropy_loss"),
    "layer(x[None])  # fused layers": ("*native_layer_norm*", "inference: *_transformer_encoder_layer_fwd"),
    "F.bilinear(x, x, x[None].expand(2, 8, 8))": ("*bmm*", "*_trilinear*"),
    "torch.cdist(many, many)": ("* mm *", "*_euclidean_dist*"),
    "torch.matrix_exp(x)": ("*bmm*", "linalg_matrix_exp"),
    "torch.linalg.pinv(x)": ("*_linalg_svd*mm*", "linalg_pinv"),
    "torch.addbmm(x, x[None], x[None])": ("*addbmm", "*addbmm"),
    "lstm(x)  # LSTM": ("*mkldnn_rnn_layer*", "*mkldnn_rnn_layer*"),
    "squared(x)  # a custom operator": ("every::squared", "every::squared"),
    "repr(x)": ("*_local_scalar_dense*", ""),
    "print(x, end='')": ("*_local_scalar_dense*", ""),
    "register()(x)  # registered inside the block": ("every::new*", "every::new*"),
    "known(x)": ("every::new0", "every::new0"),
    "torch.ops.profiler._record_function_enter_new('x', None)  # profiler::": ("", "profiler::*"),
}


@pytest.mark.parametrize("engine", BELOW_FUNCTIONS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_arrives_by_the_names_that_the_page_gives(call: str, engine: dict[str, Any]) -> None:
    condition, _, expected = CALLS[call][engine.get("engine") == "mode"].rpartition(": ")
    if condition == "compiled" and not engine:
        expected = ""
    seen: list[str] = []
    with torch.inference_mode(condition == "inference"):
        with intercept(lambda made: seen.append(made.op.removeprefix("aten::")), ops="all", **engine):
            eval(call, NAMES)
    assert fnmatchcase(" ".join(seen), expected), seen


def test_each_word_of_the_table_is_called() -> None:
    (table,) = re.findall(r"^\| what the program calls .*?\n\|---.*?\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE)
    called = " ".join(CALLS)
    for line in table.splitlines():
        first = line.split(" | ")[0]
        for word in re.findall(r"`\.?([\w.:]+)[^`]*`", first):
            assert re.search(rf"\b{re.escape(word)}", called), word
