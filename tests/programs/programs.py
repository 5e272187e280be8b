"""Small programs that cover the matmul family, and how to run one and compare two runs bit by bit.

Each program is a function of tensors or a module, with its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def two_matmuls(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(torch.tanh(torch.matmul(a, b)), b)


def addmm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmm(a, b, c, beta=0.5, alpha=2.0)


def addmv(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addmv(a, b, c)


def addbmm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addbmm(a, b, c)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


def baddbmm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.baddbmm(a, b, c)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b)


def vdot(a: Tensor, b: Tensor) -> Tensor:
    return torch.vdot(a, b)


def inner(a: Tensor, b: Tensor) -> Tensor:
    return torch.inner(a, b)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def linear_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def bilinear(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    return F.bilinear(x, y, w)


def einsum_pair(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bij,bkj->bik", [a, b])


def einsum_three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("ij,jk,kl->il", [a, b, c])


def tensordot(a: Tensor, b: Tensor) -> Any:
    return torch.tensordot(a, b, dims=[[1, 2], [0, 1]])


def multi_dot(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.linalg.multi_dot([a, b, c])


def matrix_power(a: Tensor) -> Tensor:
    return torch.matrix_power(a, 5)


def matrix_exp(a: Tensor) -> Tensor:
    return torch.matrix_exp(a)


def pinv(a: Tensor) -> Any:
    return torch.linalg.pinv(a)


def cdist(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b)


def conjugated(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.conj(), b.mH)


def negated(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a.conj().imag, b.imag)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attention_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def mm_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.size(0), b.size(1), dtype=a.dtype)
    torch.mm(a, b, out=out)
    return out * 2


def addmm_out(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    out = torch.empty_like(a)
    torch.addmm(a, b, c, out=out)
    return out * 2


def bmm_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(a.size(0), a.size(1), b.size(2), dtype=a.dtype)
    torch.bmm(a, b, out=out)
    return out


def matmul_out(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty(0)
    torch.matmul(a, b, out=out)
    return out


def addmm_in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    x = a.clone()
    x.addmm_(b, c)
    return x.addmm_(c, b, beta=0.5)


def baddbmm_in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a.clone().baddbmm_(b, c)


def addbmm_in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a.clone().addbmm_(b, c)


def addmv_in_place(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a.clone().addmv_(b, c)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch._int_mm(a, b)


def sparse_mm(a: Tensor, b: Tensor) -> Any:
    return torch.sparse.mm(a.to_sparse(), b)


def sparse_csr_mm(a: Tensor, b: Tensor) -> Tensor:
    return a.to_sparse_csr() @ b


def sparse_matmul(a: Tensor, b: Tensor) -> Tensor:
    return a.to_sparse() @ b


def sparse_sparse(a: Tensor, b: Tensor) -> Any:
    return torch.sparse.mm(a.to_sparse(), b.to_sparse()).to_dense()


def sparse_addmm(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.sparse.addmm(a, b.to_sparse(), c)


def sparse_bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.to_sparse(), b)


def hspmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.hspmm(a.to_sparse(), b).to_dense()


def scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones(())
    fp8 = torch.float8_e4m3fn
    return torch._scaled_mm(a.to(fp8), b.to(fp8).t().contiguous().t(), one, one, out_dtype=torch.float32)


def grouped_mm(a: Tensor, b: Tensor) -> Tensor:
    return F.grouped_mm(a, b, offs=torch.tensor([2, 4], dtype=torch.int32))


def foreach_mm(a: Tensor, b: Tensor) -> Tensor:
    first, second = torch._foreach_mm([a, b], [b, a])
    return first.sum() + second.sum()


def mkldnn_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.to_mkldnn(), w.to_mkldnn(), b.to_mkldnn()).to_dense()


def int8pack(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return torch._weight_int8pack_mm(x, w, scales)


class Lstm(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(6, 5, num_layers=2)

    def forward(self, x: Tensor) -> Any:
        return self.rnn(x)[0]


class LstmCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 5)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0]


@dataclass(frozen=True)
class Program:
    """A program, made anew for each run.

    Attributes:
        scriptable: Whether `torch.jit.script` accepts it.
        differentiable: Whether its inputs may require a gradient.
        context: What it runs in.
    """

    name: str
    make: Callable[[], Callable[..., Tensor]]
    inputs: Callable[[], list[Tensor]]
    scriptable: bool = True
    differentiable: bool = True
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def _function(
    function: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    name: str = "",
    dtype: Any = torch.float32,
    **options: Any,
) -> Program:
    def inputs() -> list[Tensor]:
        if not dtype.is_floating_point and not dtype.is_complex:
            return [torch.randint(-4, 5, shape).to(dtype) for shape in shapes]
        return [
            torch.randn(shape).to(dtype) if not dtype.is_complex else torch.randn(shape, dtype=dtype)
            for shape in shapes
        ]

    options.setdefault("differentiable", dtype.is_floating_point or dtype.is_complex)
    return Program(name or function.__name__, lambda: function, inputs, **options)


def _module(name: str, make: Callable[[], nn.Module], *shape: int, train: bool = True, **options: Any) -> Program:
    return Program(name, lambda: make().train(train), lambda: [torch.randn(shape)], **options)


def _backend(backend: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.nn.attention.sdpa_kernel(backend)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)


_NO_OUT: dict[str, Any] = {"differentiable": False}  # out= does not support automatic differentiation
_Backend = torch.nn.attention.SDPBackend
_HEADS = ((2, 2, 5, 4),) * 3

PROGRAMS: list[Program] = [
    _function(mm, (3, 4), (4, 5)),
    _function(mm, (0, 4), (4, 5), name="mm_no_rows"),
    _function(mm, (3, 0), (0, 5), name="mm_no_inner"),
    _function(matmul, (4,), (4,), name="matmul_1d_1d"),
    _function(matmul, (3, 4), (4,), name="matmul_2d_1d"),
    _function(matmul, (4,), (4, 5), name="matmul_1d_2d"),
    _function(matmul, (3, 4), (4, 5), name="matmul_2d_2d"),
    _function(matmul, (2, 3, 4), (4,), name="matmul_3d_1d"),
    _function(matmul, (2, 3, 4), (4, 5), name="matmul_3d_2d"),
    _function(matmul, (3, 4), (2, 4, 5), name="matmul_2d_3d"),
    _function(matmul, (2, 3, 4), (2, 4, 5), name="matmul_3d_3d"),
    _function(matmul, (2, 2, 3, 4), (2, 2, 4, 5), name="matmul_4d_4d"),
    _function(matmul, (2, 1, 3, 4), (3, 4, 5), name="matmul_broadcast"),
    _function(two_matmuls, (2, 4, 4), (4, 4)),
    _function(addmm, (3, 5), (3, 4), (4, 5)),
    _function(addmv, (3,), (3, 4), (4,)),
    _function(addbmm, (3, 5), (2, 3, 4), (2, 4, 5)),
    _function(bmm, (2, 3, 4), (2, 4, 5)),
    _function(baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    _function(dot, (4,), (4,)),
    _function(vdot, (4,), (4,)),
    _function(inner, (3, 4), (2, 4)),
    _function(linear, (3, 4), (5, 4)),
    _function(linear, (2, 3, 4), (5, 4), name="linear_3d"),
    _function(linear_bias, (3, 4), (5, 4), (5,)),
    _function(linear_bias, (2, 3, 4), (5, 4), (5,), name="linear_bias_3d"),
    _function(bilinear, (3, 4), (3, 5), (6, 4, 5)),
    _function(einsum_pair, (2, 3, 4), (2, 5, 4)),
    _function(einsum_three, (2, 3), (3, 4), (4, 5)),
    _function(tensordot, (2, 3, 4), (3, 4, 5)),
    _function(multi_dot, (2, 3), (3, 4), (4, 5)),
    _function(matrix_power, (3, 3)),
    _function(matrix_exp, (3, 3)),
    _function(pinv, (3, 4)),
    _function(pinv, (3, 4), name="pinv_complex", dtype=torch.complex64),
    _function(cdist, (30, 4), (30, 4)),
    _function(attention, *_HEADS),
    _function(attention, *_HEADS, name="attention_flash", context=_backend(_Backend.FLASH_ATTENTION)),
    _function(attention, *_HEADS, name="attention_math", context=_backend(_Backend.MATH)),
    _function(attention_masked, *_HEADS, (5, 5)),
    _function(attention_dropout, *_HEADS),
    _function(mm_out, (3, 4), (4, 5), **_NO_OUT),
    _function(addmm_out, (3, 5), (3, 4), (4, 5), **_NO_OUT),
    _function(bmm_out, (2, 3, 4), (2, 4, 5), **_NO_OUT),
    _function(matmul_out, (2, 3, 4), (2, 4, 5), **_NO_OUT),
    _function(addmm_in_place, (4, 4), (4, 4), (4, 4)),
    _function(baddbmm_in_place, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    _function(addbmm_in_place, (3, 5), (2, 3, 4), (2, 4, 5)),
    _function(addmv_in_place, (3,), (3, 4), (4,)),
    _function(mm, (3, 4), (4, 5), name="mm_float64", dtype=torch.float64),
    _function(mm, (3, 4), (4, 5), name="mm_bfloat16", dtype=torch.bfloat16),
    _function(mm, (3, 4), (4, 5), name="mm_float16", dtype=torch.float16),
    _function(mm, (3, 4), (4, 5), name="mm_complex64", dtype=torch.complex64),
    _function(mm, (3, 4), (4, 5), name="mm_int64", dtype=torch.int64),
    _function(mm, (3, 4), (4, 5), name="mm_int8", dtype=torch.int8),
    _function(linear_bias, (3, 4), (5, 4), (5,), name="linear_bfloat16", dtype=torch.bfloat16),
    _function(conjugated, (3, 4), (5, 4), dtype=torch.complex64),
    _function(negated, (3, 4), (4, 5), dtype=torch.complex64),
    _function(vdot, (4,), (4,), name="vdot_complex", dtype=torch.complex64),
    _function(int_mm, (32, 16), (16, 8), dtype=torch.int8),
    _function(scaled_mm, (16, 16), (16, 16), scriptable=False, differentiable=False),
    _function(grouped_mm, (4, 16), (2, 16, 8), dtype=torch.bfloat16, scriptable=False),
    *([_function(foreach_mm, (4, 4), (4, 4), scriptable=False)] if hasattr(torch, "_foreach_mm") else []),
    _function(mkldnn_linear, (3, 4), (5, 4), (5,), differentiable=False),
    _function(sparse_mm, (3, 4), (4, 5), scriptable=False),
    _function(sparse_csr_mm, (3, 4), (4, 5), scriptable=False),
    _function(sparse_matmul, (3, 4), (4, 5), scriptable=False),
    _function(sparse_sparse, (3, 4), (4, 5), scriptable=False, differentiable=False),
    _function(sparse_addmm, (3, 5), (3, 4), (4, 5), scriptable=False),
    _function(sparse_bmm, (2, 3, 4), (2, 4, 5), scriptable=False),
    _function(hspmm, (3, 4), (4, 5), scriptable=False, differentiable=False),
    Program(
        "int8pack",
        lambda: int8pack,
        lambda: [
            torch.randn(4, 16).bfloat16(),
            torch.randint(-9, 9, (8, 16), dtype=torch.int8),
            torch.rand(8).bfloat16(),
        ],
        scriptable=False,
        differentiable=False,
    ),
    _module("mha_train", SelfAttention, 2, 3, 8),
    _module("mha_eval", SelfAttention, 2, 3, 8, train=False),
    _module("encoder_layer_train", _encoder_layer, 2, 3, 8),
    _module("encoder_layer_eval", _encoder_layer, 2, 3, 8, train=False),
    _module("lstm", lambda: Lstm(nn.LSTM), 4, 2, 6, scriptable=False),
    _module("gru", lambda: Lstm(nn.GRU), 4, 2, 6, scriptable=False),
    _module("rnn", lambda: Lstm(nn.RNN), 4, 2, 6, scriptable=False),
    _module("lstm_cell", LstmCell, 2, 6),
]


@dataclass
class Outcome:
    """What interception must not change in a run."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    versions: list[int]
    random_state: Tensor
    exception: tuple[type[BaseException], str] | None


def execute(
    program: Program,
    run_in: Callable[[], AbstractContextManager[Any]],
    *,
    gradients: bool,
    wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] = lambda function: function,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
    function: Callable[..., Tensor] | None = None,
) -> Outcome:
    """Run `program` from a fixed seed in the context `run_in`, under the watcher `watch`.

    `function` takes the place of the program's own; it is for compiled code, which is compiled once.
    """
    torch.manual_seed(17)
    function = program.make() if function is None else function
    if isinstance(function, nn.Module):
        function.zero_grad()
    torch.manual_seed(18)
    inputs = program.inputs()
    leaves = inputs + list(function.parameters() if isinstance(function, nn.Module) else ())
    if gradients and program.differentiable:
        inputs = [x.requires_grad_() if x.is_floating_point() or x.is_complex() else x for x in inputs]
    wrapped = wrap(function)
    outputs: list[Tensor] = []
    exception = None
    with watch():
        try:
            with program.context(), run_in():
                outputs = [wrapped(*inputs)]
            if gradients and outputs[0].requires_grad:
                out = outputs[0]
                out.backward(torch.ones_like(out))
        except Exception as error:
            exception = type(error), str(error)
    return Outcome(
        [output.detach() for output in outputs],
        [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves],
        [leaf._version for leaf in leaves if not leaf.is_inference()],
        torch.get_rng_state(),
        exception,
    )


def assert_same(one: Outcome, other: Outcome) -> None:
    """Compare two runs bit by bit."""
    assert one.exception == other.exception
    assert one.versions == other.versions
    assert torch.equal(one.random_state, other.random_state)
    for a, b in _pairs(one.outputs, other.outputs):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.layout != torch.strided or a.stride() == b.stride()
    assert [g is None for g in one.gradients] == [g is None for g in other.gradients]
    for a, b in _pairs(one.gradients, other.gradients):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert a.layout != torch.strided or a.stride() == b.stride()


def _pairs(one: list[Any], other: list[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(one, other, strict=True):
        if a is not None:
            yield a, b


def outermost(events: Any, watched: set[str]) -> list[str]:
    """The watched operators in a profile, in order, except those inside another watched one."""
    found = []
    for event in events:
        if event.name not in watched:
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name not in watched:
            parent = parent.cpu_parent
        if parent is None:
            found.append(event)
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def outermost_of_one_thread(profiler: Any, watched: set[str]) -> list[str]:
    """The same for a profile of one thread, without `profiler.events()`, which takes longer than a small program."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() in watched]
    found, end = [], 0
    for event in sorted(events, key=lambda event: (event.start_ns(), -event.duration_ns())):
        if event.start_ns() >= end:
            found.append(event.name())
            end = event.start_ns() + event.duration_ns()
    return found


ENGINES: dict[str, dict[str, Any]] = {
    "kernel": {},
    "mode": {"engine": "mode"},
    "function": {"level": "function"},
}


class _EmptyDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _EmptyFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


EMPTY: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mode": _EmptyDispatchMode,
    "function": _EmptyFunctionMode,
}
