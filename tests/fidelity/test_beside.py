"""opintercept beside the tools and hooks of torch: each works as it does alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import EMPTY, ENGINES
from seen import Seen, assert_alike, gradients, run
from torch import Tensor, nn
from torch.package.package_exporter import PackageExporter
from torch.package.package_importer import PackageImporter
from torch.profiler import ProfilerActivity, profile
from torch.utils._debug_mode import DebugMode
from torch.utils.flop_counter import FlopCounterMode

from opintercept import hooks, intercept


def training() -> Sequence[Tensor]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    out = model(x) + torch.einsum("ij,kj->ik", x, x)[:, :2] + torch.bmm(x[None], x.t()[None])[0, :, :2]
    return gradients(out, *model.parameters())


def events(profiler: profile) -> Any:
    return [event.name for event in sorted(profiler.events(), key=lambda e: (e.time_range.start, -e.time_range.end))]


TOOLS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flop counter": (lambda: FlopCounterMode(display=False), FlopCounterMode.get_flop_counts),
    "debug mode": (lambda: DebugMode(record_torchfunction=True), DebugMode.debug_string),
    "profiler": (lambda: profile(activities=[ProfilerActivity.CPU]), events),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", ["outside", "inside"])
@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.slow
def test_a_tool_of_torch_and_our_hook_see_what_they_see_alone(tool: str, place: str, engine: str) -> None:
    make, result = TOOLS[tool]

    def run_in(*contexts: AbstractContextManager[Any]) -> list[Tensor]:
        with ExitStack() as stack:
            for context in contexts if place == "inside" else reversed(contexts):
                stack.enter_context(context)
            return run(training)

    alone, together = Seen(), Seen()
    run_in(intercept(alone, **ENGINES[engine]))
    beside, expected = make(), make()
    outcome = run_in(intercept(together, **ENGINES[engine]), beside)
    # What our mode changes for the tool, an empty mode of torch changes too.
    assert_alike(run_in(EMPTY[engine](), expected) if engine in EMPTY else run_in(expected), outcome)
    assert result(beside) == result(expected)
    assert together == alone != []


def _tell(told: list[Any], name: str, *values: Any) -> None:
    told.append((name, *(float(value.detach().sum()) for value in values if isinstance(value, Tensor))))


def _tell_gradients(told: list[Any], name: str, module: nn.Module, *gradients: tuple[Any, ...]) -> None:
    _tell(told, name, *chain.from_iterable(gradients))


def tensor_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    return [p.register_hook(lambda grad: _tell(told, "tensor", grad)) for p in model.parameters()]


def post_accumulate_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    hook = lambda p: _tell(told, "accumulated", p.grad)  # noqa: E731
    return [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]


def multi_grad_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    parameters = list(model.parameters())
    every = torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: _tell(told, "all", *grads))
    first = torch.autograd.graph.register_multi_grad_hook(parameters, lambda grad: _tell(told, "any", grad), mode="any")
    return [every, first]


def node_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    def on_output(module: nn.Module, args: Any, out: Tensor) -> None:
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda grads: _tell(told, "before node", *grads))
        out.grad_fn.register_hook(lambda inputs, outputs: _tell(told, "after node", *inputs, *outputs))

    return [part.register_forward_hook(on_output) for part in model.modules()]


def module_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    handles: list[Any] = []
    for part in model.modules():
        name = type(part).__name__
        handles += [
            part.register_forward_pre_hook(lambda m, args, n=name: _tell(told, f"before {n}", *args)),
            part.register_forward_hook(lambda m, args, out, n=name: _tell(told, f"after {n}", out)),
            part.register_forward_hook(lambda m, args, out: out * 1.5),
            part.register_full_backward_pre_hook(partial(_tell_gradients, told, f"before back {name}")),
            part.register_full_backward_hook(partial(_tell_gradients, told, f"after back {name}")),
        ]
    return handles


def global_module_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    every = torch.nn.modules.module
    return [
        every.register_module_forward_pre_hook(lambda m, args: _tell(told, "before", *args)),
        every.register_module_forward_hook(lambda m, args, out: _tell(told, "after", out), always_call=True),
        every.register_module_full_backward_pre_hook(lambda m, grads: _tell(told, "before back", *grads)),
        every.register_module_full_backward_hook(lambda m, gi, go: _tell(told, "after back", *gi, *go)),
    ]


class _Entered:
    """Makes a handle of a context, for hooks that are contexts."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        context.__enter__()
        self.remove = lambda: context.__exit__(None, None, None)


def saved_tensors_hooks(model: nn.Module, told: list[Any]) -> list[Any]:
    def pack(saved: Tensor) -> Tensor:
        _tell(told, "packed", saved)
        return saved.detach().double()

    def unpack(packed: Tensor) -> Tensor:
        _tell(told, "unpacked", packed)
        return packed.float()

    return [_Entered(torch.autograd.graph.saved_tensors_hooks(pack, unpack))]


def save_on_cpu(model: nn.Module, told: list[Any]) -> list[Any]:
    return [_Entered(torch.autograd.graph.save_on_cpu())]


HOOKS = [
    *(tensor_hooks, post_accumulate_hooks, multi_grad_hooks, node_hooks, module_hooks, global_module_hooks),
    *(saved_tensors_hooks, save_on_cpu),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("install", HOOKS, ids=lambda install: install.__name__)
def test_hooks_of_torch_and_ours_do_not_affect_each_other(
    install: Callable[[nn.Module, list[Any]], list[Any]], engine: str
) -> None:
    def train(hooked: bool, watched: bool) -> tuple[list[Tensor], list[Any], list[str]]:
        told: list[Any] = []
        calls = hooks.Recorder()

        def program() -> Sequence[Tensor]:
            model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 2)))
            x = torch.randn(3, 4, requires_grad=True)
            with intercept(calls, **ENGINES[engine]) if watched else nullcontext(), ExitStack() as stack:
                for handle in install(model, told) if hooked else ():
                    stack.callback(handle.remove)
                return gradients(model(x), x, *model.parameters())

        return run(program), told, [f"{r.op} {r.phase} {r.module} {r.forward}" for r in calls.records]

    plain, told_plain, _ = train(hooked=True, watched=False)
    both, told, seen = train(hooked=True, watched=True)
    assert_alike(plain, both)
    assert told == told_plain
    assert told or install is save_on_cpu
    assert seen == train(hooked=False, watched=True)[2]
    assert [line.split()[2] for line in seen[:2]] == ["0", "2.0"]


NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_packaged_module_keeps_its_names(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "net.pt"
    with PackageExporter(path) as exporter:
        exporter.extern("torch.**")
        exporter.save_source_string("net", NET)
    model = PackageImporter(path).import_module("net").Net()
    calls, x = hooks.Recorder(), torch.randn(3, 4)
    with intercept(calls, **ENGINES[engine]):
        out = model(x)
    assert torch.equal(out, model(x))
    assert [(record.module, record.source) for record in calls.records] == [("layer", "net.py:8 in forward")]
