"""Small programs that cover the matmul family, and how to run one and compare two runs bit by bit.

Each program is an expression, a function of tensors or a module, with its inputs.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Container
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


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


def scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones(())
    fp8 = torch.float8_e4m3fn
    return torch._scaled_mm(a.to(fp8), b.to(fp8).t().contiguous().t(), one, one, out_dtype=torch.float32)


def foreach_mm(a: Tensor, b: Tensor) -> Tensor:
    first, second = torch._foreach_mm([a, b], [b, a])
    return first.sum() + second.sum()


class First(nn.Module):
    """The first output of a module."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x)[0]


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
    return Program(function.__name__, lambda: function, inputs, **options)


def _expression(name: str, text: str, *shapes: tuple[int, ...], **options: Any) -> Program:
    """A program that computes an expression of its inputs, which are `a` to `d`."""
    source = f"def {name}({', '.join('abcd'[: len(shapes)])}):\n    return {text}\n"
    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # for torch.jit.script
    scope = {"torch": torch, "F": F, "__name__": __name__}
    exec(compile(source, file, "exec"), scope)
    return _function(scope[name], *shapes, **options)  # type: ignore[arg-type]


def _module(name: str, make: Callable[[], nn.Module], *shape: int, train: bool = True, **options: Any) -> Program:
    return Program(name, lambda: make().train(train), lambda: [torch.randn(shape)], **options)


def _backend(name: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name))


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)


_NO_OUT: dict[str, Any] = {"differentiable": False}  # out= does not support automatic differentiation
_CAUSAL = "F.scaled_dot_product_attention(a, b, c, is_causal=True)"
_HEADS = ((2, 2, 5, 4),) * 3

PROGRAMS: list[Program] = [
    _expression("mm", "torch.mm(a, b)", (3, 4), (4, 5)),
    _expression("mm_no_rows", "torch.mm(a, b)", (0, 4), (4, 5)),
    _expression("mm_no_inner", "torch.mm(a, b)", (3, 0), (0, 5)),
    _expression("matmul_1d_1d", "a @ b", (4,), (4,)),
    _expression("matmul_2d_1d", "a @ b", (3, 4), (4,)),
    _expression("matmul_1d_2d", "a @ b", (4,), (4, 5)),
    _expression("matmul_2d_2d", "a @ b", (3, 4), (4, 5)),
    _expression("matmul_3d_1d", "a @ b", (2, 3, 4), (4,)),
    _expression("matmul_3d_2d", "a @ b", (2, 3, 4), (4, 5)),
    _expression("matmul_2d_3d", "a @ b", (3, 4), (2, 4, 5)),
    _expression("matmul_3d_3d", "a @ b", (2, 3, 4), (2, 4, 5)),
    _expression("matmul_4d_4d", "a @ b", (2, 2, 3, 4), (2, 2, 4, 5)),
    _expression("matmul_broadcast", "a @ b", (2, 1, 3, 4), (3, 4, 5)),
    _expression("two_matmuls", "torch.matmul(torch.tanh(torch.matmul(a, b)), b)", (2, 4, 4), (4, 4)),
    _expression("addmm", "torch.addmm(a, b, c, beta=0.5, alpha=2.0)", (3, 5), (3, 4), (4, 5)),
    _expression("addmv", "torch.addmv(a, b, c)", (3,), (3, 4), (4,)),
    _expression("addbmm", "torch.addbmm(a, b, c)", (3, 5), (2, 3, 4), (2, 4, 5)),
    _expression("bmm", "torch.bmm(a, b)", (2, 3, 4), (2, 4, 5)),
    _expression("baddbmm", "torch.baddbmm(a, b, c)", (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    _expression("dot", "torch.dot(a, b)", (4,), (4,)),
    _expression("vdot", "torch.vdot(a, b)", (4,), (4,)),
    _expression("inner", "torch.inner(a, b)", (3, 4), (2, 4)),
    _expression("linear", "F.linear(a, b)", (3, 4), (5, 4)),
    _expression("linear_3d", "F.linear(a, b)", (2, 3, 4), (5, 4)),
    _expression("linear_bias", "F.linear(a, b, c)", (3, 4), (5, 4), (5,)),
    _expression("linear_bias_3d", "F.linear(a, b, c)", (2, 3, 4), (5, 4), (5,)),
    _expression("bilinear", "F.bilinear(a, b, c)", (3, 4), (3, 5), (6, 4, 5)),
    _expression("einsum_pair", 'torch.einsum("bij,bkj->bik", [a, b])', (2, 3, 4), (2, 5, 4)),
    _expression("einsum_three", 'torch.einsum("ij,jk,kl->il", [a, b, c])', (2, 3), (3, 4), (4, 5)),
    _expression("tensordot", "torch.tensordot(a, b, dims=[[1, 2], [0, 1]])", (2, 3, 4), (3, 4, 5)),
    _expression("multi_dot", "torch.linalg.multi_dot([a, b, c])", (2, 3), (3, 4), (4, 5)),
    _expression("matrix_power", "torch.matrix_power(a, 5)", (3, 3)),
    _expression("matrix_exp", "torch.matrix_exp(a)", (3, 3)),
    _expression("pinv", "torch.linalg.pinv(a)", (3, 4)),
    _expression("pinv_complex", "torch.linalg.pinv(a)", (3, 4), dtype=torch.complex64),
    _expression("cdist", "torch.cdist(a, b)", (30, 4), (30, 4)),
    _expression("attention", _CAUSAL, *_HEADS),
    _expression("attention_flash", _CAUSAL, *_HEADS, context=_backend("FLASH_ATTENTION")),
    _expression("attention_math", _CAUSAL, *_HEADS, context=_backend("MATH")),
    _expression("attention_masked", "F.scaled_dot_product_attention(a, b, c, attn_mask=d)", *_HEADS, (5, 5)),
    _expression("attention_dropout", "F.scaled_dot_product_attention(a, b, c, dropout_p=0.5)", *_HEADS),
    _function(mm_out, (3, 4), (4, 5), **_NO_OUT),
    _function(addmm_out, (3, 5), (3, 4), (4, 5), **_NO_OUT),
    _function(bmm_out, (2, 3, 4), (2, 4, 5), **_NO_OUT),
    _function(matmul_out, (2, 3, 4), (2, 4, 5), **_NO_OUT),
    _function(addmm_in_place, (4, 4), (4, 4), (4, 4)),
    _expression("baddbmm_in_place", "a.clone().baddbmm_(b, c)", (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    _expression("addbmm_in_place", "a.clone().addbmm_(b, c)", (3, 5), (2, 3, 4), (2, 4, 5)),
    _expression("addmv_in_place", "a.clone().addmv_(b, c)", (3,), (3, 4), (4,)),
    _expression("mm_float64", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.float64),
    _expression("mm_bfloat16", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.bfloat16),
    _expression("mm_float16", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.float16),
    _expression("mm_complex64", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.complex64),
    _expression("mm_int64", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.int64),
    _expression("mm_int8", "torch.mm(a, b)", (3, 4), (4, 5), dtype=torch.int8),
    _expression("linear_bfloat16", "F.linear(a, b, c)", (3, 4), (5, 4), (5,), dtype=torch.bfloat16),
    _expression("conjugated", "torch.mm(a.conj(), b.mH)", (3, 4), (5, 4), dtype=torch.complex64),
    _expression("negated", "torch.mm(a.conj().imag, b.imag)", (3, 4), (4, 5), dtype=torch.complex64),
    _expression("vdot_complex", "torch.vdot(a, b)", (4,), (4,), dtype=torch.complex64),
    _expression("int_mm", "torch._int_mm(a, b)", (32, 16), (16, 8), dtype=torch.int8),
    _function(scaled_mm, (16, 16), (16, 16), scriptable=False, differentiable=False),
    _expression(
        "grouped_mm",
        "F.grouped_mm(a, b, offs=torch.tensor([2, 4], dtype=torch.int32))",
        (4, 16),
        (2, 16, 8),
        dtype=torch.bfloat16,
        scriptable=False,
    ),
    *([_function(foreach_mm, (4, 4), (4, 4), scriptable=False)] if hasattr(torch, "_foreach_mm") else []),
    _expression(
        "mkldnn_linear",
        "F.linear(a.to_mkldnn(), b.to_mkldnn(), c.to_mkldnn()).to_dense()",
        (3, 4),
        (5, 4),
        (5,),
        differentiable=False,
    ),
    _expression("sparse_mm", "torch.sparse.mm(a.to_sparse(), b)", (3, 4), (4, 5), scriptable=False),
    _expression("sparse_csr_mm", "a.to_sparse_csr() @ b", (3, 4), (4, 5), scriptable=False),
    _expression("sparse_matmul", "a.to_sparse() @ b", (3, 4), (4, 5), scriptable=False),
    _expression(
        "sparse_sparse",
        "torch.sparse.mm(a.to_sparse(), b.to_sparse()).to_dense()",
        (3, 4),
        (4, 5),
        scriptable=False,
        differentiable=False,
    ),
    _expression("sparse_addmm", "torch.sparse.addmm(a, b.to_sparse(), c)", (3, 5), (3, 4), (4, 5), scriptable=False),
    _expression("sparse_bmm", "torch.bmm(a.to_sparse(), b)", (2, 3, 4), (2, 4, 5), scriptable=False),
    _expression(
        "hspmm", "torch.hspmm(a.to_sparse(), b).to_dense()", (3, 4), (4, 5), scriptable=False, differentiable=False
    ),
    replace(
        _expression(
            "int8pack", "torch._weight_int8pack_mm(a, b, c)", *[()] * 3, scriptable=False, differentiable=False
        ),
        inputs=lambda: [
            torch.randn(4, 16).bfloat16(),
            torch.randint(-9, 9, (8, 16), dtype=torch.int8),
            torch.rand(8).bfloat16(),
        ],
    ),
    _module("mha_train", SelfAttention, 2, 3, 8),
    _module("mha_eval", SelfAttention, 2, 3, 8, train=False),
    _module("encoder_layer_train", _encoder_layer, 2, 3, 8),
    _module("encoder_layer_eval", _encoder_layer, 2, 3, 8, train=False),
    _module("lstm", lambda: First(nn.LSTM(6, 5, num_layers=2)), 4, 2, 6, scriptable=False),
    _module("gru", lambda: First(nn.GRU(6, 5, num_layers=2)), 4, 2, 6, scriptable=False),
    _module("rnn", lambda: First(nn.RNN(6, 5, num_layers=2)), 4, 2, 6, scriptable=False),
    _module("lstm_cell", lambda: First(nn.LSTMCell(6, 5)), 2, 6),
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
    assert [g is None for g in one.gradients] == [g is None for g in other.gradients]
    for a, b in zip([*one.outputs, *one.gradients], [*other.outputs, *other.gradients], strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert a.layout != torch.strided or a.stride() == b.stride()


def profiled() -> profile:
    """A profiler that tells overloads apart."""
    config = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def outermost(events: Any, watched: Container[str]) -> list[str]:
    """The watched operators in a profile of `profiled`, in order, except those inside another watched one."""

    def sees(event: Any) -> bool:
        return f"{event.name}.{event.overload_name}".rstrip(".") in watched

    found = []
    for event in filter(sees, events):
        start, parent = event.time_range.start, event.cpu_parent
        if event.name == "aten::clone" and parent is not None and parent.name.endswith("_"):
            # Autograd has copied what an in-place operator overwrites, before it calls the operator's kernel.
            start, parent = parent.time_range.start - 0.001, parent.cpu_parent
        while parent is not None and not sees(parent):
            parent = parent.cpu_parent
        if parent is None:
            found.append((start, event.name))
    return [name for _, name in sorted(found, key=lambda each: each[0])]


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
