"""What watching could change besides results: copies of gradients, memory, lifetimes, garbage, synchronisation."""

from __future__ import annotations

import gc
import io
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import no_waits
from programs import EMPTY, ENGINES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from opintercept import OpCall, OpInterceptWarning, hooks, intercept

pytestmark = pytest.mark.slow

Watch = Callable[[], AbstractContextManager[Any]]

# Observing hooks that keep no tensor.
LOOKING: dict[str, Callable[[], Any]] = {
    "nothing": lambda: lambda call: None,
    "recorder": hooks.Recorder,
    "profile": hooks.Profile,
    "when": lambda: hooks.when(hooks.Recorder(), op="mm", min_numel=4, every_calls=2),
}
looking = pytest.mark.parametrize("hook", LOOKING.values(), ids=list(LOOKING))
below_autograd = pytest.mark.parametrize("engine", ["kernel", "mode"])
every_engine = pytest.mark.parametrize("engine", ENGINES)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def without(engine: str) -> AbstractContextManager[Any]:
    """What to compare an engine with: nothing, or an empty mode of the kind that it is built on."""
    return EMPTY.get(engine, nullcontext)()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep the garbage collector away from what torch imports on first use, too."""
    train(MODEL)
    checkpoint(MODEL, torch.ones(8, 16, 64), use_reentrant=False)
    gc.collect()
    gc.freeze()


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch off garbage collection, which would free memory at any moment."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Net(nn.Module):
    """Linear layers, attention made of plain products, a weight used twice and a value used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = x + self.down(F.gelu(self.up(x)))
        x = x + torch.softmax(x @ self.twice(x).mT, -1) @ x
        return self.twice(x)


def train(model: nn.Module, device: str = "cpu") -> None:
    """A step of training."""
    model.zero_grad()
    model(torch.ones(8, 16, 64, device=device)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()


def operators(run: Callable[[], None], watch: AbstractContextManager[Any]) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, watch:
        run()
    return sorted(event.name() for event in profiler.profiler.kineto_results.events())


@looking
@below_autograd
def test_backward_runs_no_extra_operator(engine: str, hook: Callable[[], Any]) -> None:
    # autograd copies a gradient to which it has not the only reference: aten::new_empty_strided, aten::copy_.
    model, x = Net(), torch.randn(8, 16, 64)

    def backward(watch: AbstractContextManager[Any]) -> list[str]:
        model.zero_grad()
        loss = model(x).sum()
        return operators(loss.backward, watch)

    assert backward(intercept(hook(), **ENGINES[engine])) == backward(without(engine))


@looking
@below_autograd
def test_grad_is_the_tensor_that_the_product_returned(engine: str, hook: Callable[[], Any]) -> None:
    produced: set[int] = set()
    layer = nn.Linear(64, 64)
    with intercept([hook(), lambda call: produced.add(call.output.data_ptr())], **ENGINES[engine]):
        layer(torch.randn(8, 64)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.data_ptr() in produced


@pytest.mark.parametrize(
    "hook", [*LOOKING.values(), lambda: lambda call: call.output.neg()], ids=[*LOOKING, "replacement"]
)
def test_gradients_accumulate_in_place(hook: Callable[[], Any]) -> None:
    layer, x = nn.Linear(64, 64), torch.randn(64, 64, requires_grad=True)
    with intercept(hook()):
        for _ in range(3):
            layer(x).sum().backward()
            addresses = [layer.weight.grad.data_ptr(), x.grad.data_ptr()]  # type: ignore[union-attr]
        twice = torch.randn(64, 64, requires_grad=True)
        (twice @ twice).sum().backward()
    layer(x).sum().backward()
    assert [layer.weight.grad.data_ptr(), x.grad.data_ptr()] == addresses  # type: ignore[union-attr]
    assert layer.weight.grad._version == 3  # type: ignore[union-attr]
    assert twice.grad is not None
    assert twice.grad._version == 1  # the second gradient was added to the first


def allocations(run: Callable[[], Any], watch: AbstractContextManager[Any]) -> list[int]:
    """The bytes of each allocation, and as negative numbers of each release, in order."""
    with uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, watch:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak(changes: list[int]) -> int:
    return max(itertools.accumulate(changes))


MODEL = Net()
RUNS: dict[str, Callable[[], Any]] = {
    "training": lambda: train(MODEL),
    "checkpoint": lambda: checkpoint(MODEL, torch.ones(8, 16, 64), use_reentrant=False).sum().backward(),
    "no_grad": torch.no_grad()(lambda: MODEL(torch.ones(8, 16, 64))),
    "inference_mode": torch.inference_mode()(lambda: MODEL(torch.ones(8, 16, 64))),
    "autocast": torch.autocast("cpu", torch.bfloat16)(lambda: MODEL(torch.ones(8, 16, 64)).sum().backward()),
    "conjugates": lambda: torch.mm(torch.ones(64, 64, dtype=torch.complex64).conj(), torch.eye(64) * 1j),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=list(RUNS))
@every_engine
def test_memory_is_allocated_and_freed_as_without_interception(engine: str, run: Callable[[], Any]) -> None:
    for _ in range(2):  # the profiler does not show the release of what was allocated before it
        plain = allocations(run, without(engine))
    for hook in LOOKING.values():
        watched = allocations(run, intercept(hook(), **ENGINES[engine]))
        assert peak(watched) <= 1.01 * peak(plain)
        assert watched == plain


def test_the_peak_shows_a_hook_that_keeps_outputs() -> None:
    kept: list[Any] = []
    plain = allocations(RUNS["training"], nullcontext())
    assert peak(allocations(RUNS["training"], intercept(lambda call: kept.append(call.output)))) > 1.01 * peak(plain)


@needs_gpu
@looking
@every_engine
def test_peak_memory_of_a_gpu_is_as_without_interception(engine: str, hook: Callable[[], Any]) -> None:
    model = Net().cuda()

    def peak_of(watch: AbstractContextManager[Any]) -> int:
        train(model, "cuda")
        torch.cuda.synchronize()
        with uncollected(), watch:
            torch.cuda.reset_peak_memory_stats()
            train(model, "cuda")
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()

    plain = peak_of(without(engine))
    assert peak_of(intercept(hook(), **ENGINES[engine])) <= 1.01 * plain


Track = Callable[[Tensor, str], Tensor]
Say = Callable[[str], None]


def forward_only(track: Track, say: Say) -> None:
    x, w = track(torch.randn(4, 4), "x"), track(torch.randn(4, 4), "w")
    y = track(torch.mm(track(x * 2, "temporary"), w), "y")
    say("multiplied")
    del x
    y = track(y.T @ w, "next y")
    say("multiplied again")
    out = track(torch.empty(4, 4), "out")
    torch.mm(y, w, out=out)
    out.addmm_(track(y + 1, "another temporary"), w)
    del y, w
    say("all but out are gone")


def with_gradients(track: Track, say: Say) -> None:
    w = track(torch.randn(4, 4, requires_grad=True), "w")
    h = track(torch.mm(track(torch.randn(4, 4), "input, saved"), w), "not saved")
    h = track(h.tanh(), "saved")
    out = track(F.linear(h, w), "out")
    del h
    say("forward")
    loss = track(out.sum(), "loss")
    del out
    loss.backward()
    say("backward")
    track(w.grad, "gradient")  # type: ignore[arg-type]
    w.grad = None
    say("gradient dropped")
    del loss
    say("loss dropped")


def with_a_graph_dropped(track: Track, say: Say) -> None:
    w = torch.randn(4, 4, requires_grad=True)
    out = torch.mm(track(torch.randn(4, 4), "saved"), w) @ w
    say("forward")
    del out
    say("dropped")


def with_an_exception(track: Track, say: Say) -> None:
    w = track(torch.randn(3, 4), "w")
    try:
        torch.mm(track(torch.randn(3, 4), "temporary"), w)
    except RuntimeError as error:
        say("caught")
        kept: Any = error
    del w
    say("exception kept")
    del kept
    say("exception dropped")


def with_an_exception_and_keywords(track: Track, say: Say) -> None:
    try:
        torch.addmm(track(torch.randn(9), "bias"), torch.randn(3, 4), torch.randn(4, 4), beta=2)
    except RuntimeError:
        say("caught")
    say("handled")


def with_an_exception_in_an_addition(track: Track, say: Say) -> None:
    try:
        torch.add(track(torch.randn(3), "temporary"), torch.randn(4))
    except RuntimeError:
        say("caught")
    say("handled")


def with_an_exception_in_backward(track: Track, say: Say) -> None:
    w = track(torch.randn(4, 4, requires_grad=True), "w")
    out = track(torch.mm(w, w), "out")

    def fails(grad: Tensor) -> None:
        track(grad, "grad")
        raise LookupError

    w.register_hook(fails)
    with suppress(LookupError):
        out.sum().backward()
    say("handled")


LIVES = [
    forward_only,
    with_gradients,
    with_a_graph_dropped,
    with_an_exception,
    with_an_exception_and_keywords,
    with_an_exception_in_an_addition,
    with_an_exception_in_backward,
]


def deaths(program: Callable[[Track, Say], None], watch: AbstractContextManager[Any]) -> list[str]:
    """What the program logs, and when each tensor dies."""
    log: list[str] = []

    def track(tensor: Tensor, name: str) -> Tensor:
        weakref.finalize(tensor, log.append, f"{name} dies")
        return tensor

    with uncollected(), watch:
        program(track, log.append)
        log.append("left")
    return log


class Reads:
    """Reads everything of a call in every phase, and keeps nothing."""

    def pre(self, call: OpCall) -> None:
        str(call), call.lhs, call.rhs, call.bias, call.gemm, call.flops, call.bytes, call.source, call.module

    def post(self, call: OpCall) -> None:
        call.record().as_dict(), call.output.sum(), call.forward, call.grad_of

    def error(self, call: OpCall, exception: BaseException) -> None:
        str(call), str(exception), call.lhs


@pytest.mark.parametrize("program", LIVES)
@every_engine
def test_tensors_die_when_they_die_without_interception(engine: str, program: Callable[[Track, Say], None]) -> None:
    options: dict[str, Any] = {"ops": "add"} if program is with_an_exception_in_an_addition else {}
    plain = deaths(program, without(engine))
    assert any("dies" in line for line in plain)
    makers: list[Callable[[], Any]] = [*LOOKING.values(), Reads, lambda: hooks.Print(io.StringIO())]
    for make in makers:
        assert deaths(program, intercept(make(), **options, **ENGINES[engine])) == plain
    with intercept(hooks.Recorder(), **options, **ENGINES[engine]):
        assert deaths(program, intercept(Reads(), **options, **ENGINES[engine])) == plain


class Replaces:
    """Replaces operands and output by copies."""

    def pre(self, call: OpCall) -> Any:
        return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in call.args), call.kwargs

    def post(self, call: OpCall) -> Any:
        return call.output.clone()


class Fails:
    """Raises in one phase."""

    def __init__(self, phase: str) -> None:
        setattr(self, phase, _fail)


def _fail(*args: Any) -> None:
    raise LookupError


def multiply() -> None:
    first = nn.Linear(4, 4)
    model, x = nn.Sequential(first, nn.Linear(4, 4)), torch.randn(2, 4)
    with suppress(LookupError):
        model(x).sum().backward()
    with suppress(LookupError), torch.no_grad():
        torch.einsum("ij,jk", x, model(x).T)
    with suppress(RuntimeError, LookupError):
        torch.mm(x, x)
    with suppress(LookupError):
        out = torch.mm(first.weight, first.weight)
        out.register_hook(_fail)
        out.sum().backward()


GARBAGE: dict[str, Callable[[], Any]] = {
    **LOOKING,
    "reads": Reads,
    "print": lambda: hooks.Print(io.StringIO()),
    "replaces": Replaces,
    "fails before": lambda: Fails("pre"),
    "fails after": lambda: Fails("post"),
    "fails on failure": lambda: Fails("error"),
    "several": lambda: [Reads(), Replaces(), hooks.Recorder()],
}


@pytest.mark.parametrize("hook", GARBAGE.values(), ids=list(GARBAGE))
@every_engine
def test_calls_leave_no_garbage(engine: str, hook: Callable[[], Any]) -> None:
    def run(on_error: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpInterceptWarning)
            interceptor = intercept(hook(), on_error=on_error, **ENGINES[engine])
            with interceptor, intercept(hooks.Recorder()):
                multiply()
                with interceptor.paused():
                    multiply()
            with interceptor:
                multiply()

    run("raise")  # makes what torch and Python make once
    with uncollected():
        run("raise")
        run("warn")
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            garbage = [repr(thing)[:200] for thing in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert garbage == []


@needs_gpu
@looking
@every_engine
def test_watching_does_not_wait_for_a_gpu(engine: str, hook: Callable[[], Any]) -> None:
    model = Net().cuda()
    train(model, "cuda")
    interceptor = intercept(hook(), **ENGINES[engine])
    with no_waits(), interceptor:
        train(model, "cuda")
