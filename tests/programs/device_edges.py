"""What is particular about a GPU, tried on a stand-in: `python device_edges.py CASE...` prints as JSON what happens.

A case is tried in a child of this process. `CASE+late` does so with late copies, and `CASE+driver` in launches.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import io
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fake_cuda
import torch
import toy_device
from torch import Tensor, nn

from opintercept import hooks, intercept, runs
from opintercept._native.layout import SLOTS
from opintercept._values import precision
from opintercept.hooks.checksum import arithmetic
from opintercept.runs.store.flight import snapshot


def network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(6, 8)


def all_operators() -> Any:
    """Whether a block that watches all operators launches none, and what is printed of copies, by engine."""
    net, x = network()
    net = net.to("toy")

    def program() -> None:
        net(x.to("toy")).sum().backward()
        torch.zeros(6, 8, device="toy").copy_(x).to("toy:1").cpu().sum().item()

    found, copies = {}, {}
    program()
    for engine in ("kernel", "compiled", "mode"):
        toy_device.counts()
        program()
        plain = toy_device.counts()
        with intercept(lambda call: None, ops="all", engine=engine):
            program()
        found[engine] = plain == toy_device.counts()
        with intercept(hooks.Print(text := io.StringIO()), ops="all", engine=engine):
            program()
        lines = [line.split(" | ")[0].split(" ", 2)[2] for line in text.getvalue().splitlines()]
        copies[engine] = [line for line in lines if "copy" in line]
    return found, copies


def flight() -> Any:
    """The values of the last calls before an exception, of the device and of the CPU."""
    found = []
    for device in ("toy", "cpu"):
        net, x = network()
        net, x = net.to(device), x.to(device)
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.suppress(RuntimeError), intercept(runs.RunRecorder(f"{folder}/run", flight=3)):
                for _ in range(3):
                    net(x)
                    toy_device.counts()
                net[0](x.T)
            calls = list(runs.open_run(f"{folder}/run").calls())
            found.append(
                [(c.record.index, c.error, {r: (v.hash, v.count) for r, v in c.values.items()}) for c in calls]
            )
    return found


def hung() -> Any:
    """The calls in the files of a flight recorder, with the numbers of their values, while the device is busy."""
    x = torch.eye(5).to("toy")
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        intercept(runs.RunRecorder(f"{folder}/run", flight=4), engine="compiled"),
    ):
        for calls in (4, 1, 6, 1):
            for _ in range(calls):
                torch.mm(x, x)
            last = snapshot(Path(folder, "run"))  # as another process reads them
            found.append([(int(call["index"]), sum(bool(call[slot]) for slot in SLOTS)) for call in last.calls])
            fake_cuda.behave(late=True)  # what is late comes now
    return found


def freed() -> Any:
    """What hooks read of tensors that are gone, or hold other values, when the results are read."""
    stats, nonfinite = hooks.Stats(("lhs", "output")), hooks.NonFinite(check_every=99, action="record")
    x = torch.eye(5).to("toy")
    with intercept([stats, nonfinite]):
        for number in range(40):
            x.fill_(float(number))
            torch.mm(x, x)
        x.fill_(torch.nan)
    return [(row.calls, row.count, row.min, row.max, row.mean) for row in stats.rows()], len(nonfinite.findings)


def passed() -> Any:
    """Whom hooks blame for NaN that a device makes and the host receives before the device's checks are read."""
    found = {}
    for engine in ("kernel", "compiled"):
        nonfinite = hooks.NonFinite(check_every=99, action="record")
        with intercept(nonfinite, ops="all", engine=engine):
            x = torch.full((3, 3), -1.0).to("toy").log()
            x.cpu().exp()
        found[engine] = [(finding.record.op, finding.kind) for finding in nonfinite.findings]
    return found


class Short:
    """Leaves the device with so much memory for the hooks between two of these, or gives it back if it is negative."""

    reads = ()

    def __init__(self, memory: int, *, before: bool = False, after: bool = True) -> None:
        self.memory, self.before, self.after = memory, before, after

    def pre(self, call: Any) -> None:
        if self.before:
            torch.ops.toy.limit(self.memory)

    def post(self, call: Any) -> None:
        if self.after:
            torch.ops.toy.limit(self.memory)


def memory() -> Any:
    """What hooks say where the device has no memory left for them, and whether the program's results are the same."""
    net, x = network()
    net, x = net.to("toy"), x.to("toy")
    expected = net(x).cpu()
    with tempfile.TemporaryDirectory() as folder:
        stats, nonfinite = hooks.Stats(), hooks.NonFinite()
        checksum, recorder = hooks.Checksum(action="record"), runs.RunRecorder(f"{folder}/run")
        with intercept([Short(0), stats, nonfinite, checksum, recorder, Short(-1)]):
            result = net(x).cpu()
        calls = [{role: v.count for role, v in call.values.items()} for call in runs.open_run(recorder.path).calls()]
    return torch.equal(result, expected), stats.skipped, nonfinite.skipped, checksum.skipped, calls


def short() -> Any:
    """What hooks warn of where the device has little memory left for them, by hook; or what the program got instead."""
    net, x = network()
    net, x = net.to("toy"), x.to("toy")
    scores = x.expand(2, 6, 8).contiguous()

    def program() -> list[Tensor]:
        net.zero_grad()
        inputs = x.clone().requires_grad_()
        net(inputs).square().sum().backward()
        product = torch.addmm(x.T @ x, x.T, inputs.detach(), alpha=2).addmm_(x.T, x)
        attended = torch.softmax(scores @ scores.mT, -1) @ scores
        heads = scores.unsqueeze(0)
        fused = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        results = [*(weight.grad for weight in net.parameters()), inputs.grad, product, attended, fused]
        return [each.cpu() for each in results if each is not None]

    expected = program()
    allocating: dict[str, Callable[[str], Any]] = {
        "Capture, same": lambda _: hooks.Capture(("lhs", "rhs", "bias", "output"), to="same"),
        "Capture, gradients": lambda _: hooks.Capture(("grad_lhs", "grad_rhs"), to="same"),
        "Stats, all": lambda _: hooks.Stats(("lhs", "rhs", "output"), histogram=True),
        "Checksum, estimate": lambda _: hooks.Checksum(action="record", estimate=True),
        "Checksum, recompute": lambda _: hooks.Checksum(action="record", recompute=True),
        "NonFinite, save": lambda folder: hooks.NonFinite(action="record", save=folder),
    }
    found: dict[str, set[str]] = {}
    for pages in (0, 2, 6):
        for name, make in (HOOKS | allocating).items():
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                hooked = [Short(4096 * pages, before=True), make(f"{folder}/run"), Short(-1, before=True)]
                try:
                    with intercept(hooked, ops="all" if pages else "matmul", engine="kernel" if pages else "compiled"):
                        results = program() + program()
                    texts = [str(each.message) for each in told]
                    if len(texts) > 1 or not all(map(torch.equal, results, expected * 2)):
                        texts = ["other results", *texts]
                except Exception as error:
                    torch.ops.toy.limit(-1)
                    texts = [repr(error)]
            found.setdefault(name, set()).update(texts)
    return {name: sorted(texts) for name, texts in found.items() if texts}


def overwritten() -> Any:
    """For each size of memory, whether a run has an operand that is overwritten, and all arguments."""
    found = []
    for pages in range(12):
        x = torch.ones(8, 8, device="toy")
        with tempfile.TemporaryDirectory() as folder:
            recorder = runs.RunRecorder(f"{folder}/run", "full")
            with intercept([Short(4096 * pages, before=True, after=False), recorder, Short(-1, before=True)]):
                x.addmm_(x.clone(), x.clone())
            (call,) = runs.open_run(recorder.path).calls()
        found.append(["bias" in call.values, call.given is not None])
    return found


class Corrupt:
    """Changes an element of the second call's output, and makes one of a later call NaN."""

    def post(self, call: Any) -> Tensor | None:
        if call.index not in (1, 7):
            return None
        output: Tensor = call.output.clone()
        output[2, 3] += 50 if call.index == 1 else math.nan
        return output


def findings(program: Callable[[], None]) -> Any:
    """What hooks find in a program."""
    stats, checksum, capture = hooks.Stats(("lhs", "output")), hooks.Checksum(action="record"), hooks.Capture("output")
    nonfinite = hooks.NonFinite(check_every=4, action="record")
    with tempfile.TemporaryDirectory() as folder:
        recorder = runs.RunRecorder(f"{folder}/run", "full")
        with intercept([Corrupt(), stats, checksum, nonfinite, capture, recorder]):
            program()
        calls = [
            {role: (v.hash, v.count) for role, v in c.values.items()} for c in runs.open_run(recorder.path).calls()
        ]
    return [
        [(row.phase, row.calls, row.count, row.nan, row.min, row.max) for row in stats.rows()],
        [checksum.checked, checksum.skipped, [finding.position for finding in checksum.findings]],
        [(finding.record.index, finding.record.phase) for finding in nonfinite.findings],
        str([entry.tensor.tolist() for entry in capture.entries]),
        calls,
    ]


def take_turns(*places: tuple[str, int]) -> None:
    """Make calls that take turns on devices and streams."""
    net, x = network()
    nets = {device: (copy.deepcopy(net).to(device), x.to(device)) for device, _ in places}
    toy_device.synchronize()
    with torch.no_grad():
        for device, stream in places * 3:
            with toy_device.on_stream(stream):
                net, x = nets[device]
                net(x)


def two_halves(device: str) -> None:
    """Make the calls of two nets on two streams, and those of their gradients, which autograd runs there, too."""
    net, x = network()
    halves, x = [copy.deepcopy(net).to(device) for _ in range(2)], x.to(device)
    for _ in range(20):  # so that results are sent to the host during a backward pass, too
        toy_device.synchronize()
        outputs = []
        for stream, half in enumerate(halves, 1):
            with toy_device.on_stream(stream):
                outputs.append(half(x))
        toy_device.synchronize()
        torch.stack(outputs).square().sum().backward()


def places() -> Any:
    """What hooks find on two streams, in backward too, and on two devices, each with what they find on the CPU."""
    programs: list[tuple[Callable[..., None], Any, Any]] = [
        (take_turns, [("toy", 1), ("toy", 2)], [("cpu", 0), ("cpu", 0)]),
        (two_halves, ["toy"], ["cpu"]),
        (take_turns, [("toy:0", 0), ("toy:1", 0)], [("cpu", 0), ("cpu:0", 0)]),
    ]
    return [[findings(partial(program, *given)) for given in both] for program, *both in programs]


class Hit:
    """Changes the last element of each output."""

    def post(self, call: Any) -> Tensor:
        output: Tensor = call.output.clone()
        output.view(-1)[-1] += 500
        return output


def wrong(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)) -> Any:
    """Which products are wrong, and where, on the device and on the CPU, and what rounding may make of them."""
    found = []
    for device in ("toy", "cpu"):
        torch.manual_seed(0)
        checksum = hooks.Checksum(action="record")
        with torch.no_grad(), intercept([Hit(), checksum]):
            for dtype in dtypes:
                sizes = (40, 384), (384, 1024), (1024,), (3, 40, 24), (3, 24, 48)
                a, b, bias, x, y = (torch.randn(size).to(device, dtype) for size in sizes)
                weight, own = nn.Parameter(b), nn.Parameter(bias)
                for _ in range(3):
                    torch.addmm(own, a, weight)
                torch.addmm(bias, a[:2], b, alpha=0.5, beta=-3)
                torch.mm(a, b)
                torch.bmm(x, y)
                torch.bmm(y.mT.contiguous().mT.mT, x.mT)
                torch.baddbmm(y[:, :1], x, y)
        found.append(
            [(each.record.index, each.position, f"{each.exact:.5g} {each.bound:.4g}") for each in checksum.findings]
        )
    return found


def cores() -> Any:
    """The same if both have tensor cores, which may use TF32 and few bits, and the device computes in pieces."""
    arithmetic.DEVICE_PIECE = 100_000
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    precision.TENSOR_CORES += ["toy", "cpu"]
    return wrong((torch.float32, torch.bfloat16, torch.float16, torch.complex64))


class Watched(hooks.Checksum):
    """Counts the calls that Python checks."""

    in_python = 0

    def pre(self, call: Any) -> None:
        self.in_python += 1
        super().pre(call)

    work = hooks.Checksum.work  # which does not hold for subclasses


def unshown() -> Any:
    """Which products are found wrong of those that a device checks without Python, and how many Python has seen."""
    wrong_calls = {3, 11, 12, 17}
    calls = 0

    def mm(a: Tensor, b: Tensor) -> Tensor:
        nonlocal calls
        product = torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)
        if calls in wrong_calls:
            product.view(-1)[5 + calls : 6 + calls].add_(100)
        calls += 1
        return product

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("mm", mm, "PrivateUse1", allow_override=True)
    checksum = Watched(action="record")
    inputs = [torch.randn(6, 384).to("toy") for _ in range(20)]
    weight = nn.Parameter(torch.randn(384, 100).to("toy"))
    with torch.no_grad(), intercept([checksum, hooks.Recorder()], engine="compiled"):
        for x in inputs:
            torch.mm(x, weight)
        checksum.check()
        early = len(checksum.findings)
        checksum.check()
    findings = [(each.record.index, each.position, each.record.source is not None) for each in checksum.findings]
    return findings, early, checksum.in_python, checksum.checked, checksum.rows


HOOKS: dict[str, Callable[[str], Any]] = {
    "Recorder": lambda _: hooks.Recorder(),
    "Profile": lambda _: hooks.Profile(),
    "Stats": lambda _: hooks.Stats(),
    "NonFinite": lambda _: hooks.NonFinite(action="record"),
    "NonFinite, later": lambda _: hooks.NonFinite(check_every=2, action="record"),
    "Checksum": lambda _: hooks.Checksum(action="record"),
    "Capture": lambda _: hooks.Capture(of=("lhs", "output")),
    "AttentionWeights": lambda _: hooks.AttentionWeights(),
    "Gradients": lambda _: hooks.Gradients(),
    "Reference": lambda _: hooks.Reference(),
    "Print": lambda _: hooks.Print(io.StringIO()),
    "Log": lambda _: hooks.Log(),
    "Experts": lambda _: hooks.Experts(),
    "Replicas": lambda _: hooks.Replicas(),
    **{f"RunRecorder, {tensors}": partial(runs.RunRecorder, tensors=tensors) for tensors in ("none", "stats", "full")},
    "RunRecorder, flight": partial(runs.RunRecorder, flight=4),
}


def captured() -> Any:
    """What each hook adds to a graph that is captured after some calls and before others, and what it warns of."""
    net, x = network()
    net, x = net.to("toy"), x.to("toy")
    scores = x.expand(2, 6, 8).contiguous()

    def program() -> None:
        net(x).add_(1)
        torch.softmax(scores @ scores.mT, -1) @ scores

    def graph() -> toy_device.Counts:
        toy_device.counts()
        with toy_device.capturing():
            program()
        return toy_device.counts()

    plain, found = graph(), {}
    for name, make in HOOKS.items():
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with intercept(make(f"{folder}/run"), ops="all", engine="kernel") as watch, torch.no_grad():
                program()
                watch.step()
                with mock.patch("time.monotonic", return_value=math.inf):  # what is put off is due
                    added = graph()
                program()
        found[name] = [a - b for a, b in zip(added, plain, strict=True)], [str(each.message) for each in told]
    return found


CASES: dict[str, Callable[[], Any]] = {
    "all": all_operators,
    "flight": flight,
    "hung": hung,
    "freed": freed,
    "passed": passed,
    "memory": memory,
    "short": short,
    "overwritten": overwritten,
    "places": places,
    "wrong": wrong,
    "cores": cores,
    "unshown": unshown,
    "captured": captured,
}


def tried(case: str) -> Any:
    """What happens in a case, given with its settings."""
    name, *how = case.split("+")
    if "late" in how:
        toy_device.take_for_cuda()
    if "driver" in how:
        toy_device.use_driver()
    return CASES[name]()


if __name__ == "__main__":
    faulthandler.enable()
    print(json.dumps({case: toy_device.told_by_a_child(partial(tried, case)) for case in sys.argv[1:]}))
