"""What `NonFinite` finds on a stand-in for a GPU without waiting for it, beside what it finds when it waits, and beside
what it finds on the CPU.

`python device_nonfinite.py [--late] [--fewer] NAME...` prints as JSON where they differ, by case. With `--late` the
device writes rows when somebody waits for it, or when its program does. With `--fewer` each of the hook's options comes
with one family of operators, and each case with `--late` or without.
"""

from __future__ import annotations

import faulthandler
import json
import math
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import fake_cuda
import torch
import toy_device
from device_hooks import differences, plain
from torch import Tensor, nn

from opintercept import NonFiniteError, hooks, intercept
from opintercept._engines.scope import unwatched

NAN, INF = math.nan, math.inf


def on(device: str, value: Any, *dtype: torch.dtype) -> Any:
    """A copy of a tensor, made by the same operator on each device, or a module there."""
    if isinstance(value, nn.Module):
        with unwatched():
            return value.to(device)
    return value.to(device, *dtype, copy=True)


class Block(nn.Module):
    """Eager attention and a layer between norms."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return self.layer(torch.softmax(x @ x.mT, -1) @ x).relu() + x


class Undefined(nn.Module):
    """Makes NaN in the backward pass only: 0 / 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).sqrt() * 0


def train(device: str, spoil: Callable[[nn.Module, Tensor], Tensor], *layers: nn.Module, **options: Any) -> None:
    """Three steps, the second of which is spoilt."""
    torch.manual_seed(0)
    net = on(device, nn.Sequential(Block(), *layers, Block(), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, foreach=True)
    for step in range(3):
        x = on(device, torch.randn(4, 8))
        with torch.no_grad():
            x = spoil(net, x) if step == 1 else x
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()


def weight_overflows(net: nn.Module, x: Tensor) -> Tensor:
    next(iter(net.children())).layer.weight.fill_(3e38)  # type: ignore[union-attr, operator]
    return x


class Half(nn.Linear):
    """A layer that computes in float16."""

    def forward(self, x: Tensor) -> Any:
        return nn.functional.linear(x.half(), self.weight.half(), self.bias.half()).float()


def scaled(device: str) -> None:
    """A loss that is scaled up, whose gradients overflow and are discarded, and one that is not finite itself."""
    torch.manual_seed(0)
    net = on(device, nn.Sequential(Half(8, 16), nn.ReLU(), Half(16, 1)))
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    for step in range(14):
        loss = net(on(device, torch.randn(4, 8)) * 4).square().mean()
        loss = loss * NAN if step == 12 else loss
        scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        _ = [each.grad @ each.grad.mT for each in net.parameters() if each.grad is not None and each.grad.dim() > 1]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


lasting: list[Any] = []
"""Scalers, which live until all is judged."""


def unscaled(device: str) -> None:
    """Beside a scaled loss, one that is not."""
    lasting[:] = [scaler := torch.amp.GradScaler("cpu", init_scale=2.0**4)]
    net = on(device, nn.Sequential(nn.Linear(8, 8), Undefined()))
    for _ in range(3):
        scaler.scale(net(on(device, torch.ones(2, 8))).square().mean()).backward()
        net(on(device, torch.ones(2, 8))).square().mean().backward()


def in_place(device: str) -> None:
    x = on(device, torch.arange(12.0).reshape(3, 4))
    for _ in range(2):
        y = x.clone()
        y.sub_(x).div_(y)  # 0 / 0
        y.mul_(2).add_(x)
        z = x.clone()
        z.mul_(INF).sub_(z)
        w = x.T.contiguous()
        torch.mm(w, x, out=w.new_empty(4, 4)).exp_().exp_().exp_()
        x.clone().addmm_(y[:, :3], x)
        x.clone()[1].copy_(y[0]).zero_()
        x.clone().index_put_((on(device, torch.tensor([0, 2])),), y[:2])
        scores = x.masked_fill(x > 100, -INF)
        torch.softmax(scores.masked_fill_(x >= 0, -INF), -1)


def lists(device: str) -> None:
    parts = [on(device, torch.full((3,), float(n))) for n in range(25)]
    for _ in range(2):
        torch.cat(parts).log()
        torch.stack([*parts, parts[3] / 0])
        zeros = torch._foreach_mul(parts, 0.0)
        torch._foreach_div_(zeros, zeros)
        torch._foreach_add(parts, 1.0)
        torch._foreach_add_(parts, zeros[:1] * len(parts))
        parts = [on(device, torch.full((3,), float(n))) for n in range(25)]


def outputs(device: str) -> None:
    x = on(device, torch.arange(12.0).reshape(3, 4))
    for _ in range(2):
        x.max(1)
        (x / x).max(0)
        torch.var_mean(x[:, :1], 1)  # of one value
        torch.aminmax(x.log(), dim=0)
        x.split(2, 1)[1].sub(1).sqrt().unbind(0)
        (x * NAN).sort(0)
        torch.topk(x - INF, 2)
        nn.functional.layer_norm(x * 1e30, (4,), x[0] * 1e38)


def numbers(device: str) -> None:
    x = on(device, torch.ones(3, 3))
    for _ in range(2):
        x * NAN
        x.add(INF)
        x.clone().fill_(NAN)
        x.clamp(-INF, INF) @ x
        torch.full((2, 2), INF, device=device) - x[0, 0]
        torch.where(x > 2, x, x - INF).softmax(-1)
        x.pow(-INF).pow(0.5)
        torch.addmm(x * NAN, x, x, beta=0)


def alike(device: str) -> None:
    """Calls that look alike, the first of which got one tensor twice."""
    x, y = on(device, torch.ones(3, 3)), on(device, torch.full((3, 3), NAN))
    for first, second in ((x, x), (x, x), (x, y), (y, x)):
        torch.addmm(first, first, second)
        torch.addcmul(first, second, second)
        torch.add(first, second, out=torch.empty_like(first))
        torch.lerp(second, first, 0.5)
        first.clone().add_(second)


def kinds(device: str) -> None:
    """Dtypes, layouts and sizes, some of which a kernel cannot read."""
    x = torch.arange(-4.0, 8.0).reshape(3, 4)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        (on(device, x, dtype).log() @ on(device, x.T, dtype)).exp()
    (on(device, x, torch.float16) * 60000).neg()
    on(device, x, torch.int64).div(0)
    on(device, torch.complex(x, x / 0)) * 2
    on(device, x[:0]).sum(0).log()
    on(device, x[:, :1]).expand(3, 5).sqrt().t().contiguous()
    on(device, x).sum().log().expand(3, 3).contiguous()
    (on(device, x) - INF).to("cpu", copy=True).exp() - INF
    on(device, x)[::2, ::3].log().to(torch.float8_e5m2).float()
    on(device, x).sqrt().to(torch.int32)


def host(device: str) -> None:
    """What the host computes with what came from the device."""
    x = on(device, torch.full((3, 3), -1.0))
    x.log().to("cpu", copy=True).exp() @ torch.ones(3, 3)
    (x.to("cpu", copy=True) - 1).log() @ torch.ones(3, 3)


def streams(device: str) -> None:
    """Calls of several threads, each of which has its own device thread in backward."""

    def work(number: int) -> None:
        x = on(device, torch.full((4, 4), float(number))).requires_grad_()
        with intercept(hooks.Recorder(), ops="all", engine="compiled"):
            (x @ x).sub(number * number * 4).sqrt().log().sum().backward()

    for number in range(4):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()


CASES: dict[str, Callable[[str], None]] = {
    "clean": lambda device: train(device, lambda net, x: x),
    "nan": lambda device: train(device, lambda net, x: x * NAN),
    "inf": lambda device: train(device, lambda net, x: x / 0),
    "weight": lambda device: train(device, weight_overflows),
    "backward": lambda device: train(device, lambda net, x: x, Undefined()),
    **{
        case.__name__: case
        for case in (scaled, unscaled, in_place, lists, outputs, numbers, alike, kinds, host, streams)
    },
}


def found(device: str, case: str, ops: str, **options: Any) -> Any:
    """What the hook has found."""
    other = hooks.Stats(("lhs", "rhs", "output")) if options.pop("beside", False) else hooks.Recorder()
    hook = hooks.NonFinite(action="record", **options)
    with intercept([other, hook], ops=ops, engine="compiled", threads="all"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CASES[case](device)
    return plain([hook.findings, hook.passed_on, hook.discarded, hook.skipped]), [str(each) for each in hook.findings]


def unnumbered(case: Any) -> Any:
    """The same for calls with other numbers: the scale of a scaler takes another call on a device."""
    (_, *counts), texts = case
    return counts, [re.sub(r"call \d+", "", text.replace("@toy:0", "")) for text in texts]


OPTIONS: list[dict[str, Any]] = [{}, {"inf": True}, {"inf": True, "beside": True}]
WATCHED = [
    (ops, options)
    for o, ops in enumerate(("matmul", "all"))
    for n, options in enumerate(OPTIONS)
    if (o + n) % 2 == 0 or "--fewer" not in sys.argv
]


def compare(case: str) -> list[str]:
    lines = []
    for ops, options in WATCHED:
        late = found("toy", case, ops, **options)
        at_once = found("toy", case, ops, check_every=1, **options)
        on_cpu = found("cpu", case, ops, **options)
        lines += differences(plain(late), plain(at_once), f"{ops}, {options}, beside waiting")
        lines += differences(plain(unnumbered(late)), plain(unnumbered(on_cpu)), f"{ops}, {options}, beside the CPU")
    return lines


def arrive() -> None:
    """Let the device write all rows that are late."""
    fake_cuda.behave(late=True)


def spoilt(x: Tensor, number: int = 3, calls: int = 9, then: Callable[[int], object] = lambda _: None) -> None:
    """Some products, one of which is NaN. Warms up, so that kernels note the calls."""
    for call in range(-2, calls):
        torch.mm(x, x * NAN if call == number else x)
        then(call)


def number_of(text: str) -> int:
    found = re.search(r"call (\d+) ", text)
    return int(found[1]) if found is not None else -1


def raising() -> Any:
    """After which call an error is raised, which call it names, and when the rows come."""
    results = []
    for comes_at, options in ((5, {}), (99, {}), (5, {"check_every": 1}), (5, {"action": "breakpoint"})):
        x, last = torch.ones(4, 4).to("toy"), [-9]

        def then(call: int, comes_at: int = comes_at, last: list[int] = last) -> None:
            last[0] = call
            if call == comes_at:
                arrive()

        with mock.patch("builtins.breakpoint", side_effect=RuntimeError("call 5 stopped")):
            try:
                with intercept(hooks.NonFinite(**options), engine="compiled"):
                    spoilt(x, then=then)
            except Exception as error:
                results.append((type(error).__name__, number_of(str(error)), last[0]))
    return results


def waiting() -> Any:
    """How often calls that kernels note wait for the device."""
    counts = []
    for check_every in (None, 1):
        x = torch.ones(4, 4).to("toy")
        with intercept(hooks.NonFinite(check_every=check_every), ops="all", engine="compiled"):
            for step in range(6):
                if step == 3:
                    toy_device.counts()
                y = torch.mm(x, x).add_(1).relu().log()
                torch._foreach_mul_([y, x], 1.0)
                torch.cat([y, x]).max(0)
            counts.append(toy_device.counts().waits)
    return counts


def failing() -> Any:
    """What the program gets whose exception leaves the block before the rows have come."""
    x, search = torch.ones(4, 4).to("toy"), hooks.NonFinite()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with intercept(search, engine="compiled"):
                spoilt(x)
                torch.mm(x, x[:2])
        except Exception as error:
            found = type(error).__name__, [number_of(str(each.message)) for each in caught]
    return found, [each.record.index for each in search.findings]


def reading() -> Any:
    """Findings that are read in the block, and an error that comes with the next check."""
    x, search = torch.ones(4, 4).to("toy"), hooks.NonFinite()
    with intercept(search, engine="compiled"):
        spoilt(x)
        found = [each.record.index for each in search.findings]
        try:
            search.check()
        except NonFiniteError as error:
            found.append(number_of(str(error)))
    return found


def removed() -> Any:
    """A hook that is taken out, and one that is switched off, before the rows have come."""
    x, found = torch.ones(4, 4).to("toy"), []
    search = hooks.NonFinite(action="record")
    with intercept(engine="compiled") as watching:
        handle = watching.register(search)
        spoilt(x)
        handle.remove()
        found.append([each.record.index for each in search.findings])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with intercept(hooks.NonFinite(), engine="compiled", on_error="warn"):
            spoilt(x, then=lambda _: arrive())
    return [*found, ["switched off" in str(each.message) for each in caught], number_of(str(caught[0].message))]


def nested() -> Any:
    """Two hooks of one block, and those of two blocks, one of which waits."""
    found: list[list[Any]] = []
    for inner in ({}, {"check_every": 1}, {"inf": True}):
        x = torch.ones(4, 4).to("toy")
        one, two, three = (hooks.NonFinite(action="record", **options) for options in ({}, inner, inner))
        with intercept([one, two], engine="compiled"), intercept(three, ops="all", engine="compiled"):
            spoilt(x)
        found.append([[(each.record.op, each.record.index) for each in hook.findings] for hook in (one, two, three)])
        found[-1].append([hook.passed_on for hook in (one, two, three)])
    return found


def forked() -> Any:
    """What a child has of calls before the fork, and what it finds itself on the host."""
    x, search = torch.ones(4, 4).to("toy"), hooks.NonFinite(action="record")

    def child() -> list[str]:
        with intercept(search, engine="compiled"):
            torch.mm(torch.full((2, 2), INF), torch.zeros(2, 2))
        return [str(each.record.index) for each in search.findings] + [str(search.passed_on)]

    with intercept(search, engine="compiled"):
        spoilt(x)
        found = toy_device.in_a_child(child)
    return found, [each.record.index for each in search.findings]


def short() -> Any:
    """Findings where there is no room for rows, or launches fail, of calls that write and of others."""
    found = []
    for function in ("cuMemHostAlloc", "cuLaunchKernel"):
        x, search = torch.ones(4, 4).to("toy"), hooks.NonFinite(action="record", inf=True)
        with intercept(search, ops="all", engine="compiled"):
            for step in range(4):
                y = torch.mm(x, x)
                if step == 3:
                    fake_cuda.driver().fake_fail(function.encode(), 1 << 40)
                y.sub_(4.0 if step == 3 else 1.0)
                y.div_(y.clone())
                torch.mm(y, x)
        fake_cuda.driver().fake_fail(function.encode(), 0)
        found.append(([(each.record.op, each.kind, each.record.index) for each in search.findings], search.passed_on))
    return found


def kept() -> Any:
    """Whether tensors of calls that are not judged yet have been freed."""
    with intercept(hooks.NonFinite(), ops="all", engine="compiled"):
        for _ in range(3):
            x = torch.ones(64, 64).to("toy")
            alive = weakref.ref(x.untyped_storage()), weakref.ref(torch.mm(x, x).untyped_storage())
            del x
        return [each() is None for each in alive]


BEHAVIOURS: tuple[Callable[[], Any], ...]
BEHAVIOURS = raising, waiting, failing, reading, removed, nested, forked, short, kept


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    toy_device.use_driver()
    if "--late" in sys.argv:
        toy_device.take_for_cuda()
    by_name = {each.__name__: each for each in BEHAVIOURS}
    fewer = "--fewer" in sys.argv
    every = list(CASES)[fewer and "--late" in sys.argv :: 1 + fewer]
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or every
    print(json.dumps({name: by_name[name]() if name in by_name else compare(name)[:9] for name in names}))
