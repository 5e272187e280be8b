"""Programs whose calls on a stand-in for a GPU must come from where those on the CPU come from.

`python device_programs.py ENGINE...` prints as JSON, for each engine and program, how the two differ. With `--fewer`
each program runs with one of the engines. Each runs in a process of its own, on the device first: what one has left
behind hides what goes wrong in the next.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from nets import product
from torch import Tensor, distributed, nn
from torch.autograd import grad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from toy_device import in_a_child
from transformers import LlamaConfig, LlamaForCausalLM

from opintercept import hooks, intercept

Program = Callable[[str], list[Tensor]]
STEPS = 2


class Llama:
    """Trains a small Llama.

    Args:
        loss: Computes the gradients.
        checkpoints: Whether to repeat forward passes by reentrant backward calls; None for no checkpoints.
        frozen: Whether all but one of the weights need no gradient, as beside an adapter.
    """

    def __init__(
        self, loss: Callable[[Any, Tensor], Any], checkpoints: bool | None = None, frozen: bool = False
    ) -> None:
        self.loss, self.checkpoints, self.frozen = loss, checkpoints, frozen

    def __call__(self, device: str) -> list[Tensor]:
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
        config._attn_implementation = "eager"
        model: Any = LlamaForCausalLM(config)
        model.to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.frozen or "embed" in name)
        for layer in model.model.layers if self.checkpoints is not None else ():
            forward = layer.forward
            layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                lambda x: forward(x, *args[1:], **kwargs), args[0], use_reentrant=self.checkpoints
            )
        for seed in range(STEPS):
            tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed)).to(device)
            self.loss(lambda tokens=tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss, model)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def once(loss: Any, model: Any) -> None:
    loss().backward()


def again(loss: Any, model: Any) -> None:
    value = loss()
    value.backward(retain_graph=True)
    loss().backward()
    value.backward()


def penalty(loss: Any, model: Any) -> None:
    value = loss()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    (value + sum(each.pow(2).sum() for each in grad(value, weights, create_graph=True))).backward()


def scaled(loss: Any, model: Any) -> None:
    scaler = torch.amp.GradScaler(model.device.type, init_scale=8.0)
    scaler.scale(loss()).backward()
    scaler.step(torch.optim.SGD(model.parameters(), 0.1))
    scaler.update()


def twice(loss: Any, model: Any) -> None:
    """Differentiates twice and, with the graph of both, a third time."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    first = grad(loss(), weights, create_graph=True)
    second = grad(torch.stack([each.sin().sum() for each in first]).sum(), weights, create_graph=True)
    torch.stack([each.sin().sum() for each in second]).sum().backward()


class Layer(nn.Module):
    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.multiply = multiply

    def forward(self, x: Tensor) -> Any:
        return self.multiply(x, self.weight).tanh()


def custom_function(device: str) -> list[Tensor]:
    net = nn.Sequential(Layer(product), Layer(product), Layer(torch.mm)).to(device)
    x = torch.randn(4, 4, device=device, requires_grad=True)
    for _ in range(STEPS):
        (gradient,) = grad(net(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        checkpoint(net, x, use_reentrant=False).sum().backward()
    return [x.grad] if x.grad is not None else []


class OnHost(distributed.ProcessGroup):
    """Gloo for both devices: copies tensors to the host and back."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def _run(self, collective: Callable[..., Any], tensors: list[Tensor], *arguments: Any) -> Any:
        host = [tensor.cpu() for tensor in tensors]
        work = collective(host, *arguments)
        work.wait()
        for tensor, result in zip(tensors, host, strict=True):
            tensor.copy_(result)
        return work

    def getBackendName(self) -> str:
        return "onhost"

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._run(self.gloo.allreduce, tensors, options or distributed.AllreduceOptions())

    def broadcast(self, tensors: Any, options: Any) -> Any:  # type: ignore[override]
        return self._run(self.gloo.broadcast, tensors, options)

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> Any:
        given = [tensor.cpu() for tensor in tensors]
        return self._run(lambda host: self.gloo.allgather([host], given), outputs[0])


def data_parallel(device: str) -> list[Tensor]:
    if not distributed.is_initialized():
        distributed.Backend.register_backend("onhost", OnHost, devices=["toy", "cpu"])
        distributed.init_process_group("onhost", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    net = nn.Sequential(*(Layer(torch.mm) for _ in range(3))).to(device)
    model = DistributedDataParallel(net)
    for _ in range(STEPS):
        model(torch.ones(4, 4, device=device)).pow(2).sum().backward()
    return [weight.grad for weight in net.parameters() if weight.grad is not None]


def two_threads(device: str) -> list[Tensor]:
    """Trains models of the same layers in two threads, and calls backward in a third one."""
    nets = {n: nn.Sequential(*(Layer(torch.mm) for _ in range(n))).to(device) for n in (2, 4)}
    losses: list[Tensor] = []

    def train(net: Any) -> None:
        x = torch.ones(4, 4, device=device, requires_grad=True)
        for _ in range(STEPS):
            (gradient,) = grad(checkpoint(net, x, use_reentrant=False).pow(2).sum(), x, create_graph=True)
            gradient.pow(2).sum().backward()
        losses.append(net(x).pow(2).sum())

    def finish() -> None:
        torch.stack(losses).sum().backward()

    programs: list[Callable[[], None]] = [functools.partial(train, net) for net in nets.values()]
    for each in (*programs, finish):
        thread = threading.Thread(target=each)
        thread.start()
        thread.join()
    return [weight.grad for net in nets.values() for weight in net.parameters() if weight.grad is not None]


PROGRAMS: dict[str, Program] = {
    "llama": Llama(once),
    "llama with checkpoints": Llama(once, checkpoints=False),
    "llama with reentrant checkpoints": Llama(once, checkpoints=True),
    "llama with frozen weights and checkpoints": Llama(once, checkpoints=False, frozen=True),
    "several backward passes": Llama(again),
    "several backward passes with checkpoints": Llama(again, checkpoints=False),
    "gradient penalty": Llama(penalty),
    "gradient penalty of frozen weights": Llama(penalty, frozen=True),
    "gradient penalty with checkpoints": Llama(penalty, checkpoints=False),
    "third derivative": Llama(twice),
    "gradient scaler": Llama(scaled),
    "custom function": custom_function,
    "data parallel": data_parallel,
}
THREADS: dict[str, Program] = {"two threads": two_threads}


def run(name: str, device: str, engine: str) -> tuple[list[str], list[str], list[Tensor]]:
    """Return where a program's calls come from, the gradients that were kept, and its own gradients.

    Autograd runs nodes in an order of its own where several threads have made them. So calls are told apart by their
    forward calls and not by their number, and sorted.
    """
    torch.manual_seed(0)
    recorder, gradients = hooks.Recorder(), hooks.Gradients()
    options: Any = {"engine": engine, "threads": "all" if name in THREADS else "current"}
    with intercept(recorder, **options), intercept(gradients, **options):
        result = (PROGRAMS | THREADS)[name](device)
    calls = recorder.records

    # A node of a custom Function does not tell which operands it saves. Where a gradient has the memory of one that was
    # freed, `grad_of` is unknown, which is up to the allocator.
    tells = name != "custom function"

    def origin(index: int | None) -> Any:
        if index is None:
            return None
        r = calls[index]
        behind = index if r.phase == "forward" else origin(r.forward)
        return r.phase, r.op, r.gemm, r.module, r.source, r.grad_of if tells else None, behind

    entries = gradients.entries if tells else []
    kept = [str((g.module, g.op, origin(g.forward), g.operand, g.value.tolist())) for g in entries]
    return sorted(str(origin(r.index)) for r in calls), sorted(kept), result


def differences(name: str, engine: str) -> list[str]:
    """Say how a program on the device differs from the same program on the CPU, and from one that nothing watches."""
    on_device, on_cpu = (run(name, device, engine) for device in ("toy", "cpu"))
    torch.manual_seed(0)
    unwatched = (PROGRAMS | THREADS)[name]("toy")
    found = []
    for mine, its in zip(on_device[:2], on_cpu[:2], strict=True):
        found += [f"only on the device: {text}" for text in (Counter(mine) - Counter(its)).elements()]
        found += [f"only on the CPU: {text}" for text in (Counter(its) - Counter(mine)).elements()]
    if not any("backward" in call for call in on_device[0]):
        found.append("no backward call")
    alike = len(unwatched) == len(on_device[2]) and all(map(torch.equal, unwatched, on_device[2]))
    return found if alike else [*found, "other gradients than without interception"]


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)  # no threads of torch's before the forks
    results: dict[str, dict[str, list[str]]] = {}
    engines = [name for name in sys.argv[1:] if name != "--fewer"]
    for number, chosen in enumerate(engines):
        names = [*PROGRAMS, *(THREADS if chosen != "mode" else ())]  # a mode watches one thread
        if "--fewer" in sys.argv:
            names = names[number :: len(engines)]
        results[chosen] = {name: in_a_child(functools.partial(differences, name, chosen)) for name in names}
    print(json.dumps(results))
