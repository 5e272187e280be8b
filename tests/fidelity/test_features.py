"""The features of torch one by one: what each engine sees of them, and that interception changes nothing.

Each line of the tables in docs/paths.md is a `Feature` here, or is tested in the file that `ELSEWHERE` names.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_python
from programs import ENGINES
from seen import Seen, assert_alike, gradients, run
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from opintercept import intercept

PAGE = Path(__file__).parents[2] / "docs" / "paths.md"
ELSEWHERE = {
    "`F.conv2d`, `nn.ConvTranspose1d`": "test_convolutions.py",
    "`torch.compile`: `eager`, `aot_eager`": "test_compile.py",
    "`torch.compile`: Inductor": "test_compile.py",
    "`make_fx`, `torch.export`: while tracing; what they made": "test_compile.py",
    "AOTInductor packages, `cpp_wrapper`": "test_compile.py",
    "[CUDA graph replay](#cuda-graphs)": "test_compile.py",
    "DDP, FSDP, DTensor": "test_distributed.py",
    "a DataLoader's workers": "test_distributed.py",
}


def square(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4))).requires_grad_()


def two_products(x: Tensor) -> Tensor:
    return (x @ x).relu() @ x


def composites() -> Sequence[Tensor]:
    x = torch.randn(3, 4)
    return F.linear(x, x, x[:, 0]), torch.einsum("ij,kj->ik", x, x), x @ x.t()


def composites_in_inference_mode() -> Sequence[Tensor]:
    with torch.inference_mode():
        return [out.clone() for out in composites()]


def first_and_second_derivative() -> Sequence[Tensor]:
    x = square()
    (first,) = torch.autograd.grad((x @ x).sum(), x, create_graph=True)
    return gradients(first, x)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.mm(x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.mm(grad, x.t()) + torch.mm(x.t(), grad)


square_by_function: Callable[..., Any] = Squared.apply


def autograd_function() -> Sequence[Tensor]:
    x = square()
    return gradients(square_by_function(x), x)


def checkpointed(function: Callable[[Tensor], Tensor], **options: Any) -> Sequence[Tensor]:
    x = square()
    return gradients(checkpoint(function, x, **options), x)


def selective() -> Sequence[Tensor]:
    def products(x: Tensor) -> Tensor:
        return torch.bmm((x @ x).relu()[None], x[None])[0].sin()

    keep_mm = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpointed(products, use_reentrant=False, context_fn=keep_mm)


def fused() -> Sequence[Tensor]:
    x = torch.randn(30, 4)
    return F.bilinear(x, x, torch.randn(2, 4, 4)), torch.cdist(x, x)


def attention() -> Sequence[Tensor]:
    x = torch.randn(1, 2, 5, 4)
    return [F.scaled_dot_product_attention(x, x, x)]


# A name for each import of this file: pytest's and that of other tests. To define an operator again destroys the first.
@torch.library.custom_op(f"opintercept_tests::squared_{__name__.replace('.', '_')}", mutates_args=())
def squared(x: Tensor) -> Tensor:
    return torch.mm(x, x)


@functools.cache
def script() -> Any:
    function = torch.jit.script(two_products)
    for _ in range(2):  # TorchScript optimises a function after its first runs
        function(torch.ones(4, 4).requires_grad_()).sum().backward()
    return function


def scripted() -> Sequence[Tensor]:
    x = square()
    return gradients(script()(x), x)


TRACED = torch.jit.trace(two_products, torch.ones(4, 4))


def traced() -> Sequence[Tensor]:
    x = square()
    return gradients(TRACED(x), x)


def branches() -> Sequence[Tensor]:
    x = torch.randn(4, 4)
    taken = torch.cond(x.sum() < 1000, lambda x: x @ x, lambda x: x + 1, (x,))
    _, looped = while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, x @ x), (torch.tensor(0), x))
    q = torch.randn(1, 2, 16, 8)
    return taken, looped, flex_attention(q, q, q)


def vmapped() -> Sequence[Tensor]:
    x = torch.randn(3, 4, 4)
    return [torch.func.vmap(torch.mm)(x, x)]


def per_sample_gradients() -> Sequence[Tensor]:
    layer = nn.Linear(4, 2)
    parameters: dict[str, Tensor] = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 4))
    return list(per_sample.values())


def vector_jacobian() -> Sequence[Tensor]:
    out, pull = torch.func.vjp(lambda x: x @ x, torch.randn(4, 4))[:2]
    return [out, *pull(out)]


def jacobian_vector() -> Sequence[Tensor]:
    x = torch.randn(4, 4)
    return list(torch.func.jvp(lambda x: x @ x, (x,), (x.cos(),)))


def dual_numbers() -> Sequence[Tensor]:
    x = torch.randn(4, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        out = forward_ad.unpack_dual(dual @ dual)
        return out.primal.clone(), out.tangent.clone()


def nested() -> Sequence[Tensor]:
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])
    return [*F.linear(x, torch.randn(5, 4)).unbind(), *torch.matmul(x, x.transpose(1, 2)).unbind()]


def jagged() -> Sequence[Tensor]:
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    weight = square(8, 8)
    out = F.linear(x, weight)
    heads = x.unflatten(-1, [2, 4]).transpose(1, 2)
    attended = F.scaled_dot_product_attention(heads, heads, heads)
    return [*gradients(out.values(), weight), attended.values().clone()]


def sparse() -> Sequence[Tensor]:
    coo, csr, dense = torch.randn(4, 4).to_sparse(), torch.randn(4, 4).to_sparse_csr(), square()
    return gradients(torch.sparse.mm(coo, dense) + csr @ dense, dense)


class Int8Weight(Tensor):
    """A quantised weight like those of torchao: plain tensors inside, unpacked in dispatch or in functions."""

    by_function = False

    @staticmethod
    def __new__(cls, q: Tensor, scale: Tensor) -> Int8Weight:
        made: Int8Weight = Tensor._make_wrapper_subclass(cls, q.shape, dtype=scale.dtype)
        return made

    def __init__(self, q: Tensor, scale: Tensor) -> None:
        self.q, self.scale = q, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["q", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Int8Weight:
        return cls(inner["q"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if cls.by_function and func is F.linear:
            x, weight, bias = args
            return torch.mm(x, weight.q.t().to(x.dtype)) * weight.scale.t() + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return return_and_correct_aliasing(func, args, kwargs, cls(func(args[0].q), func(args[0].scale)))
        plain = [arg.q.to(arg.dtype) * arg.scale if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **kwargs)


class Int8WeightByFunction(Int8Weight):
    by_function = True


def quantised(kind: type[Int8Weight]) -> Sequence[Tensor]:
    layer = nn.Linear(4, 3)
    scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
    q = (layer.weight.detach() / scale).round().to(torch.int8)
    layer.weight = nn.Parameter(kind(q, scale), requires_grad=False)
    x = square(2, 4)
    return gradients(layer(x), x)


def without_values() -> Sequence[Tensor]:
    meta = torch.randn(2, 3, device="meta")
    with FakeTensorMode() as fake:
        faked = fake.from_tensor(torch.randn(4, 4))
        shapes = [(faked @ faked).shape]
    shapes.append((meta @ meta.t()).shape)
    return [torch.tensor(shape) for shape in shapes]


@dataclass(frozen=True)
class Feature:
    """A program that uses a feature of torch, and the calls that each engine sees of it.

    Attributes:
        line: The feature in the table.
        run: The program, which makes its own inputs. What it returns must not change by a bit.
        kernel, mode, function: Operators in order, with ' in backward and " in the recomputation of a checkpoint.
    """

    line: str
    run: Callable[[], Sequence[Tensor]]
    kernel: str
    mode: str
    function: str
    name: str = ""


COMPOSITES = "`F.linear`, `einsum`, `@`"
BACKWARD = "backward, also of backward"
CHECKPOINT = "checkpoint: both forms, selective"
SCRIPT = "`jit.script`, `jit.trace`, `jit.fork`"
FUNCTORCH = "`vmap`, `grad`, `vjp`, `jvp`, forward AD"
NESTED = "nested and jagged tensors"
WRAPPERS = "wrapper subclasses, such as quantised weights"

FEATURES = [
    Feature(COMPOSITES, composites, "addmm bmm mm", "addmm bmm mm", "linear einsum matmul"),
    Feature(COMPOSITES, composites_in_inference_mode, "addmm bmm mm", "linear einsum matmul", "linear einsum matmul"),
    Feature(BACKWARD, first_and_second_derivative, "mm mm' mm' mm' mm'", "mm mm' mm' mm' mm'", "matmul"),
    Feature(BACKWARD, autograd_function, "mm mm' mm'", "mm mm' mm'", "mm"),
    Feature(
        CHECKPOINT,
        functools.partial(checkpointed, two_products, use_reentrant=True),
        "mm mm mm\" mm\" mm' mm' mm' mm'",
        "mm mm mm\" mm\" mm' mm' mm' mm'",
        "matmul matmul",
        name="reentrant",
    ),
    Feature(
        CHECKPOINT,
        functools.partial(checkpointed, two_products, use_reentrant=False),
        "mm mm mm\" mm' mm' mm' mm'",  # stops once it has what backward needs
        "mm mm mm\" mm' mm' mm' mm'",
        "matmul matmul",
        name="not_reentrant",
    ),
    Feature(CHECKPOINT, selective, "mm bmm bmm\" bmm' bmm' mm' mm'", "mm bmm bmm\" bmm' bmm' mm' mm'", "matmul bmm"),
    Feature(
        "inside C++ operators (fused attention layers, `bilinear`, `cdist`)",
        fused,
        "bmm bmm bmm bmm mm",
        "_trilinear _euclidean_dist",
        "bilinear cdist",
    ),
    Feature(
        "`scaled_dot_product_attention`, `nn.LSTM`",
        attention,
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_attention",
    ),
    Feature(
        "inside custom operators, unless they are declared",
        lambda: [squared(torch.randn(4, 4))],
        "mm",
        "",
        "",
        name="custom_op",
    ),
    Feature(SCRIPT, scripted, "mm mm mm' mm' mm' mm'", "mm mm mm' mm' mm' mm'", ""),
    Feature(SCRIPT, traced, "mm mm mm' mm' mm' mm'", "mm mm mm' mm' mm' mm'", ""),
    Feature(
        "`torch.cond`, `while_loop`, `flex_attention`",
        branches,
        "mm mm mm bmm bmm",
        "cond while_loop flex_attention",
        "",
    ),
    Feature(FUNCTORCH, vmapped, "bmm", "bmm", "mm"),
    Feature(FUNCTORCH, per_sample_gradients, "mm bmm'", "mm bmm'", "linear"),
    Feature(FUNCTORCH, vector_jacobian, "mm mm' mm'", "mm mm' mm'", "matmul"),
    Feature(FUNCTORCH, jacobian_vector, "mm mm mm", "mm mm mm", "matmul"),
    Feature(FUNCTORCH, dual_numbers, "mm mm mm", "mm mm mm", "matmul"),
    Feature(NESTED, nested, "mm bmm", "linear matmul", "linear matmul"),
    Feature(NESTED, jagged, "mm bmm bmm mm'", "linear matmul matmul matmul'", "linear scaled_dot_product_attention"),
    Feature("sparse tensors: COO, CSR", sparse, "_sparse_addmm mm mm' mm'", "_sparse_addmm mm mm' mm'", "mm matmul"),
    Feature(WRAPPERS, functools.partial(quantised, Int8Weight), "addmm mm'", "addmm mm'", "linear", name="by_dispatch"),
    Feature(
        WRAPPERS, functools.partial(quantised, Int8WeightByFunction), "mm mm'", "mm mm'", "linear", name="by_function"
    ),
    Feature("fake and meta tensors", without_values, "", "", "matmul matmul"),
]


def by_name(feature: Feature) -> str:
    return feature.name or feature.run.__name__


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature", FEATURES, ids=by_name)
def test_each_engine_sees_of_a_feature_what_it_should_and_changes_nothing(feature: Feature, engine: str) -> None:
    plain = run(feature.run)
    seen = Seen()
    with intercept(seen, **ENGINES[engine]):
        intercepted = run(feature.run)
    assert_alike(plain, intercepted)
    assert " ".join(seen) == getattr(feature, engine)


FORKS = """
    import torch
    from opintercept import intercept
    def product(x):
        return torch.mm(x, x)
    def both(x):
        future = torch.jit.fork(product, x)
        return torch.mm(x, x + 1) + torch.jit.wait(future)
    both, x = torch.jit.script(both), torch.randn(4, 4)
    plain = [both(x) for _ in range(3)][-1]
    for engine in {"engine": "kernel"}, {"engine": "mode"}, {"level": "function"}:
        seen = []
        with intercept(lambda call: seen.append(call.op), **engine):
            assert torch.equal(both(x), plain)
        print(*seen)
"""


@pytest.mark.slow
def test_each_engine_sees_of_forked_tasks_what_it_should_and_changes_nothing(tmp_path: Path) -> None:
    # In a process of its own: torch's thread pool for them stays, and would keep our kernels installed.
    file = tmp_path / "program.py"  # torch.jit.script reads its source
    file.write_text(textwrap.dedent(FORKS))
    done = run_python("-W", "ignore", file)
    assert (done.returncode, done.stdout) == (0, "aten::mm aten::mm\naten::mm aten::mm\n\n"), done.stderr


def test_every_feature_has_a_line_in_the_table_and_every_line_a_test() -> None:
    table = "".join(re.findall(r"^\| feature .*?\n\|---.*?\n((?:\|.*\n)+)", PAGE.read_text(), re.MULTILINE))
    rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]
    assert sorted(row[0] for row in rows) == sorted({feature.line for feature in FEATURES} | set(ELSEWHERE))
    for line, *cells in rows:
        if line in ELSEWHERE:
            assert Path(__file__).with_name(ELSEWHERE[line]).is_file()
            continue
        for engine, cell in zip(ENGINES, cells, strict=True):
            seen = [getattr(feature, engine) for feature in FEATURES if feature.line == line]
            assert (cell == "no") == (not any(seen)), (line, engine)
