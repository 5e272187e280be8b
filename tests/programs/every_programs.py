"""Programs that use what torch has beside products. What each yields must stay as it is, whoever watches."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

Program = Callable[[], Iterable[Any]]
F: Any = torch.nn.functional  # whose types are narrower than what it takes


def grad_of(leaf: Tensor) -> Any:
    return leaf.grad


def numbers() -> Iterator[Any]:
    whole, real, truth = torch.arange(-4, 4), torch.randn(8), torch.tensor([True, False])
    yield from (whole + 1, whole * 1.0, whole**2, 2 ** whole.abs(), whole[None, :, None] * 1.0, whole / 2, 7 - whole)
    yield from (real + True, real * 2, real**2, real**0.5, real // 0.3, 1 / real, real % 2, whole + 2**40, real * 1j)
    yield from (truth + 1, truth * 2.5, truth & True, whole.to(torch.uint8) + 3, whole.bool() | False, real.half() * 3)
    yield from (torch.where(real > 0, 1.0, 0), real.clamp(0, 1), torch.add(real, 1, alpha=2), real.bfloat16() + 1e30)
    yield from (real == 0, whole > 1.5, torch.tensor(2**63, dtype=torch.uint64) == 1, real.lerp(real.cos(), 0.3))


def copies() -> Iterator[Any]:
    real = torch.zeros(3, 4)
    for source in (torch.arange(4), torch.ones(3, 1), torch.tensor(2.5), torch.randn(3, 4, dtype=torch.complex64).real):
        yield real.copy_(source).clone()
    real[0], real[1, 2], real[:, 3] = 1, torch.tensor(7.0), torch.arange(3)
    real[real > 2] = -1
    yield from (real, real.to(torch.float64), real.to("cpu", torch.int8, copy=True), real.to("cpu"), real.contiguous())
    yield from (real.t().contiguous(), real.t().clone(memory_format=torch.preserve_format), real.type(torch.int32))
    yield real.clone().fill_(torch.tensor(3)).zero_().add_(1)


def without_dimensions() -> Iterator[Any]:
    x = torch.tensor(3.0, requires_grad=True)
    y = (x * torch.arange(3) + torch.tensor(1)).sum() / torch.tensor(2, dtype=torch.int64)
    y.backward()
    yield from (x.grad, y, y.item(), float(x), bool(y > 1), torch.tensor(5).tolist(), x.detach().numpy(), x.sqrt())
    yield from (torch.tensor([1, 2]) * torch.tensor(1.5, dtype=torch.float64), torch.tensor(2) ** torch.tensor(-1.0))


def complex_numbers() -> Iterator[Any]:
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
    y = x.conj() * 2j + x.mH.real + torch.view_as_real(x).sum(-1) + x.conj().imag
    y.abs().sum().backward()
    yield from (y, x.grad, torch.fft.ifft(torch.fft.fft(x)), x.conj().resolve_conj(), x.conj(), x.conj().imag)
    z = x.detach().conj().clone()
    yield from (z.conj_physical_(), z.mul_(1j), torch.polar(z.abs(), z.angle()), z.conj().imag.neg())


def quantised() -> Iterator[Any]:
    x = torch.randn(4, 8)
    q = torch.quantize_per_tensor(x, 0.1, 3, torch.qint8)
    per_channel = torch.quantize_per_channel(x, torch.full((4,), 0.1), torch.zeros(4), 0, torch.qint8)
    yield from (q.int_repr(), q.dequantize(), (q.relu().view(8, 4)).int_repr(), per_channel.dequantize(), q.q_scale())
    yield from (q.clone().int_repr(), torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7))


def sparse() -> Iterator[Any]:
    coo = torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.arange(3.0), (2, 3), requires_grad=True)
    torch.sparse.sum(coo * 2).backward()
    plain = coo.detach()
    yield from (grad_of(coo).to_dense(), plain.coalesce().values(), (plain + plain).to_dense(), plain.is_coalesced())
    csr = torch.eye(3).to_sparse_csr()
    yield from (csr.to_dense(), (csr * 2).values(), csr.crow_indices(), torch.eye(4).to_sparse_bsr((2, 2)).to_dense())
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    torch.optim.SparseAdam(embedding.parameters()).step()
    yield from (embedding.weight, grad_of(embedding.weight).to_dense())


def data_dependent() -> Iterator[Any]:
    x = torch.randint(0, 4, (12,))
    yield from (
        x.nonzero(),
        *torch.unique(x, return_counts=True),
        x[x > 1],
        torch.masked_select(x, x < 2),
        x.bincount(),
    )
    yield from (torch.repeat_interleave(x, x), *torch.where(x == 1), x.equal(x.clone()), torch.tensor_split(x, 5)[1])
    yield from (*x.sort(), *x.topk(3), *x.float().median(0), *x.unique_consecutive(return_inverse=True), x.argmax())


def random_numbers() -> Iterator[Any]:
    yield from (torch.randn(3), torch.rand(3), torch.randint(5, (3,)), torch.randperm(7), torch.zeros(3).normal_())
    yield from (
        torch.bernoulli(torch.full((5,), 0.5)),
        torch.multinomial(torch.ones(4), 2),
        torch.normal(0.0, 1.0, (3,)),
    )
    generator = torch.Generator().manual_seed(3)
    yield from (torch.rand(3, generator=generator), torch.zeros(3).uniform_(generator=generator), generator.get_state())
    yield from (
        F.dropout(torch.ones(9)),
        torch.zeros(3).exponential_(),
        torch.rand_like(torch.ones(2)),
        torch.poisson(torch.ones(3)),
    )
    with torch.random.fork_rng():
        yield torch.randn(2)
    yield from (F.rrelu(torch.randn(5), training=True), F.gumbel_softmax(torch.ones(4)), torch.empty(3).cauchy_())


class Sub(Tensor):
    """A subclass that adds nothing."""


class Logged(Tensor):
    """A subclass that asks for the dispatcher."""

    seen: list[str]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        Logged.seen.append(str(func))
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def made_inside() -> Iterator[Any]:
    x = torch.randn(3, 3)
    parameter, frozen, buffer = nn.Parameter(x), nn.Parameter(x[0], requires_grad=False), nn.Buffer(x * 2)
    yield from (parameter, frozen, buffer, x.as_subclass(Sub) + 1, x.detach().as_subclass(Sub), parameter.detach())
    yield from (Tensor._make_subclass(Sub, x, False), nn.Parameter(x.as_subclass(Sub)), nn.Parameter(parameter.data))
    yield from (nn.Parameter(x.detach()), nn.Parameter(x.alias() if hasattr(x, "alias") else x), torch.Tensor(x))
    yield from (torch.as_tensor(x), torch.tensor(x.tolist()), torch.from_numpy(x.numpy()), torch.asarray(x.numpy()))
    yield from (*nn.Linear(3, 2).parameters(), torch.utils.dlpack.from_dlpack(x))
    lazy = nn.LazyLinear(2)
    yield from (lazy(x), *lazy.parameters(), *nn.LazyBatchNorm1d()(x))
    Logged.seen = []
    logged = x.as_subclass(Logged)
    yield from ((logged + 1) * logged, logged.mul(2).sum(), nn.Parameter(logged.detach()), list(Logged.seen))
    swapped = nn.Linear(3, 3)
    torch.utils.swap_tensors(swapped.weight, nn.Parameter(x.clone()))
    yield swapped(x)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(8), nn.Linear(8, 4)
    )


def saved_and_loaded() -> Iterator[Any]:
    model, x = net(), torch.randn(5, 6)
    model(x).sum().backward()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        yield from (made(x), *made.parameters(), *made.buffers())
    for assign in (False, True):
        fresh = net()
        fresh.load_state_dict(states, assign=assign)
        yield from (fresh.eval()(x), *fresh.parameters())
    with torch.device("meta"):
        empty = net()
    empty.to_empty(device="cpu").load_state_dict(states)
    yield empty.eval()(x)
    moved = model.to(torch.float64)
    yield from (moved(x.double()), *moved.bfloat16().parameters(), *moved.float().to("cpu").parameters())
    moved.weight = nn.Parameter(torch.zeros(1))
    for parameter in moved.parameters():
        parameter.data = parameter.data.clone() + 1  # as code does that offloads weights
    yield from moved.parameters()
    yield from (moved.requires_grad_(False)(x), *nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).parameters())


def views_in_place() -> Iterator[Any]:
    leaf = torch.randn(4, 4, requires_grad=True)
    x = leaf * 1
    x.view(-1)[3:7] = 5
    x[0].mul_(2)
    x.t()[1].add_(leaf[2])
    x.diagonal().zero_()
    x.unsqueeze_(0).squeeze_(0).t_().transpose_(0, 1)
    second = x[2:]
    second.copy_(x[:2])
    x.sum().backward()
    yield from (x, leaf.grad, second)
    y = torch.arange(6.0)
    yield from (y.as_strided((2, 2), (1, 2)), y.unfold(0, 3, 1), y.view(2, 3).expand(4, 2, 3), y.view(torch.int32))
    yield from (
        y.resize_(2, 2),
        y.as_strided_((2,), (1,)),
        y.set_(torch.ones(3).untyped_storage()),
        y.swapaxes(0, 0),
        y.detach_(),
    )
    yield from (
        torch.arange(8).view(2, 2, 2).movedim(0, 2).flatten(),
        y.index_put_((torch.tensor([0]),), torch.tensor(9.0)),
    )
    with torch.no_grad():
        leaf.add_(1).view(-1)[0] = 3
    yield from (leaf, leaf.view_as(leaf), leaf.narrow(0, 1, 2).unbind()[0])


def modes_of_autograd() -> Iterator[Any]:
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        yield from (x * 2, x.view(3, 1), x.detach())
    with torch.inference_mode():
        y = torch.ones(3) + x
        yield from (y.add_(1).clone(), y.view(1, 3), x * 2)
        with torch.inference_mode(False):
            yield x.exp()
    yield from (y.clone(), x.relu())
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 1):
        out = x.sin().exp() * x
    out.sum().backward(retain_graph=True)
    with torch.autograd.graph.save_on_cpu():
        (x.cos() * x).sum().backward()
    x.register_hook(lambda grad: grad * 2)
    x.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", leaf.grad.mul(0.5)))
    out.sum().backward()
    yield from (x.grad, packed, torch.autograd.functional.hessian(lambda x: (x**3).sum(), x.detach()))
    yield from torch.autograd.grad((x**2).sum(), x, create_graph=True)
    yield from torch.autograd.grad(x * 2, x, torch.eye(3), is_grads_batched=True)
    for reentrant in (True, False):
        checkpoint(lambda x: F.dropout(x.sigmoid()).tanh(), x, use_reentrant=reentrant).sum().backward()
        yield grad_of(x).clone()


class Doubled(torch.autograd.Function):
    """Writes to its argument, and has an output without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        x.mul_(2)
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(x)
        return x, sign

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0  # type: ignore[no-any-return]


@torch.library.custom_op("opintercept_tests::split_off", mutates_args=())
def split_off(x: Tensor, y: Sequence[Tensor], at: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
    return x[:at].clone(), [each * 2 for each in y], x[at:] + 1


split_off.register_autograd(lambda ctx, first, others, rest: (torch.cat((first, rest)), others))


@torch.library.custom_op("opintercept_tests::bump", mutates_args=("x",))
def bump(x: Tensor, by: float) -> None:
    x.add_(by)


def own_operators() -> Iterator[Any]:
    x = torch.randn(4, requires_grad=True)
    doubled, sign = Doubled.apply(x * 1)  # type: ignore[no-untyped-call]
    (doubled.sum() + sign.sum()).backward()
    yield from (x.grad, doubled, sign)
    first, others, rest = split_off(x, [x * 3, x.exp()])
    (first.sum() + sum(other.sum() for other in others) + rest.prod()).backward()
    y = torch.zeros(2)
    bump(y, 2)
    yield from (x.grad, first, *others, rest, y, y._version)


@torch.jit.script
def scripted(x: Tensor, n: int) -> Tensor:
    for i in range(n):
        x = x * 2 + i if bool(x.sum() > 0) else x.sigmoid()
    return x


def script() -> Iterator[Any]:
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):  # TorchScript optimises a function after its first runs
        out = scripted(x, 3)
    out.sum().backward()
    yield from (out, x.grad, torch.jit.trace(lambda x: x.softmax(0), x)(x))


class Trace(TorchDispatchMode):
    """Lists what it is shown."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class TraceFunctions(TorchFunctionMode):
    """Lists what it is shown."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(torch.overrides.resolve_name(func) or "")
        return func(*args, **(kwargs or {}))


def step(x: Tensor, weight: Tensor) -> Tensor:
    return (F.layer_norm(x @ weight, (4,)).softmax(-1) * 2 + torch.arange(4)).sum()  # type: ignore[no-any-return]


def other_modes() -> Iterator[Any]:
    seen: list[str] = []
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with Trace(seen):
        step(x, weight).backward()
    with TraceFunctions(seen):
        out = step(x, weight)
    yield from (out, weight.grad, seen)
    with FakeTensorMode() as fake:
        yield step(fake.from_tensor(x), torch.empty(4, 4)).shape
    yield (x.to("meta") @ weight.to("meta")).softmax(0).shape


def traced_graphs() -> Iterator[Any]:
    x, weight = torch.randn(3, 4), torch.randn(4, 4)
    graph = make_fx(step)(x, weight)
    faked = make_fx(torch.func.grad(step, 1), tracing_mode="fake")(x, weight)
    symbolic = torch.fx.symbolic_trace(net())
    yield from (graph.code, graph(x, weight), faked.code, faked(x, weight), symbolic(torch.randn(2, 6)))
    model = net().eval()
    exported = torch.export.export(model, (torch.randn(2, 6),))
    again = exported.run_decompositions()
    yield from (
        str(exported.graph),
        str(again.graph),
        exported.module()(torch.randn(2, 6)),
        again.module()(torch.randn(2, 6)),
    )


def transforms() -> Iterator[Any]:
    x, weight = torch.randn(5, 3, 4), torch.randn(4, 4)
    per_sample = torch.func.vmap(torch.func.grad(step, 1), in_dims=(0, None))(x, weight)
    yield from (
        per_sample,
        torch.func.hessian(lambda x: step(x, weight))(x[0]),
        torch.func.vmap(lambda x: x.sort()[0])(x),
    )
    yield from torch.func.jvp(lambda x: step(x, weight), (x[0],), (x[1],))
    yield from torch.func.vmap(lambda x: F.dropout(x) + torch.randn(4), randomness="different")(x)
    yield torch.func.functionalize(lambda x: x.view(-1).add_(1).view(3, 4).mul_(2))(x[0].clone())
    models = [nn.Linear(4, 2) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    yield torch.func.vmap(lambda p: torch.func.functional_call(base, p, (x[0],)))(parameters)


class Numbered(Dataset[Tensor]):
    """Rows of random numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(3) * index + torch.from_numpy(np.ones(3, np.float32))


def loaded_by_workers() -> Iterator[Any]:
    yield from DataLoader(Numbered(), batch_size=2, num_workers=2)
    yield from DataLoader(Numbered(), batch_size=4, shuffle=True)


def in_threads() -> Iterator[Any]:
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.linspace(0, number, 6, requires_grad=True)
        (x.softmax(0) * 2 + x.view(2, 3).sum(0).repeat(2)).pow(2).sum().backward()
        found[number] = x.grad

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from (found[number] for number in sorted(found))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad_fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, foreach=True),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "lion_like": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


def trained(name: str) -> Iterator[Any]:
    model, x = net(), torch.randn(5, 6)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), torch.tensor([0, 1, 2, 3, -100]), label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss  # type: ignore[no-any-return]

    for _ in range(3):
        yield optimizer.step(closure)  # type: ignore[arg-type]
        schedule.step()
        averaged.update_parameters(model)
    yield from (*model.parameters(), *model.buffers(), *averaged.parameters())
    for state in optimizer.state.values():
        yield from state.values()
    fresh = OPTIMIZERS[name](model.parameters())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def scaled() -> Iterator[Any]:
    model, x = net(), torch.randn(5, 6)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**100), torch.optim.SGD(model.parameters(), 0.1)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield from (loss, scaler.get_scale(), *model.parameters())


def layers() -> Iterator[Any]:
    torch.manual_seed(2)
    image, series = torch.randn(2, 4, 8, 8, requires_grad=True), torch.randn(2, 4, 9, requires_grad=True)
    pooled, places = F.max_pool2d(image, 2, return_indices=True)
    window = torch.hann_window(8)
    outputs = [
        F.max_unpool2d(pooled, places, 2),
        F.interpolate(image, scale_factor=2, mode="bilinear"),
        F.grid_sample(image, torch.rand(2, 3, 3, 2) * 2 - 1, align_corners=False),
        F.pad(image, (1, 2, 1, 0), mode="reflect"),
        nn.BatchNorm2d(4)(image),
        nn.GroupNorm(2, 4)(image),
        nn.InstanceNorm2d(4)(image),
        nn.RMSNorm(8)(image),
        F.adaptive_avg_pool2d(image, 3),
        F.conv1d(series, torch.randn(2, 4, 3)),
        F.ctc_loss(series.permute(2, 0, 1).log_softmax(-1), torch.ones(2, 3, dtype=torch.long), (9, 9), (3, 3)),
        F.embedding_bag(torch.tensor([[1, 2], [0, 1]]), image[0, 0], mode="max"),
        F.multi_head_attention_forward(
            *[series] * 3, 9, 3, torch.randn(27, 9), None, None, None, False, 0.0, torch.randn(9, 9), None
        )[0],
        F.pixel_shuffle(image, 2),
        F.glu(image),
        F.cosine_similarity(series, series.flip(0)),
        F.kl_div(series.log_softmax(-1), series.softmax(-1), reduction="batchmean"),
        F.binary_cross_entropy_with_logits(series, series.detach().sigmoid()),
        F.huber_loss(series, series * 2),
        torch.cumsum(series, -1).cummax(-1)[0],
        torch.einsum("bcl,bdl->bcd", series, series),
        torch.linalg.svdvals(series),
        torch.istft(torch.stft(series.flatten(), 8, window=window, return_complex=True), 8, window=window),
        torch.stack([series, series]).roll(1, -1).tril().index_select(1, torch.tensor([1])),
        torch.scatter_add(series, 2, torch.zeros(2, 4, 9, dtype=torch.long), series),
        series.masked_fill(series > 0, float("-inf")).softmax(-1).nan_to_num(),
    ]  # fmt: skip
    for output in outputs:
        output.float().square().mean().backward(retain_graph=True)
    yield from (*outputs, image.grad, series.grad)


PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        *(numbers, copies, without_dimensions, complex_numbers, quantised, sparse, data_dependent, random_numbers),
        *(made_inside, saved_and_loaded, views_in_place, modes_of_autograd, own_operators, script, other_modes),
        *(traced_graphs, transforms, loaded_by_workers, in_threads, scaled, layers),
    )
} | {name: functools.partial(trained, name) for name in OPTIMIZERS}


def facts(value: Any) -> Any:
    """What of a value interception must not change, in a form that can be compared."""
    if not isinstance(value, Tensor):
        return [facts(each) for each in value] if isinstance(value, list) else str(value)
    version = None if value.is_inference() else value._version
    node = type(value.grad_fn).__name__
    about = type(value), value.dtype, value.shape, value.layout, value.requires_grad, value.is_leaf, version, node
    plain = value.detach().as_subclass(Tensor)
    if value.layout is not torch.strided or value.is_meta:
        return about
    form = value.stride(), value.storage_offset(), value.is_conj(), value.is_neg(), value._is_view()
    return about, form, plain.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def outcome(program: Program) -> list[Any]:
    """Run a program from a fixed seed, and return the facts of what it makes and the random state after it.

    The facts are looked at while the program runs, since it may write to a tensor that it has made.
    """
    torch.manual_seed(7)
    found = [facts(value) for value in program()]
    return [*found, facts(torch.get_rng_state())]
