"""Random programs, of which kernels in C++ must report what kernels in Python report: every record, row and line.

A seed decides all that a program does. `python tests/programs/noted_programs.py --count 5000` tries seeds by hand;
`--seed 17 --actions 4` runs the first four actions of one, to find the shortest program that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import gc
import hashlib
import multiprocessing.connection
import os
import random
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import gpu_attentions
import torch
from nets import product
from random_programs import CONTEXTS, IN_PLACE, SIGNATURES, Leaf, function_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from opintercept import OpCall, hooks, intercept, runs
from opintercept._core.in_kernel import Work
from opintercept._core.record import PendingRecord
from opintercept._engines import compiled

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64, torch.int64, torch.int8)
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "conj", "neg")
ALIKE = ("dot", "vdot")  # with arguments alike
ELEMENTWISE: tuple[Callable[..., Tensor], ...] = (torch.add, torch.sub, torch.mul)
OPS: tuple[Any, ...] = (
    "matmul",
    "matmul",
    ("all", "-view"),  # kernels in Python do not see `detach`
    ("all", "-view"),
    ("matmul", "elementwise", "reduction", "copy", "random"),
    ("matmul", "convolution"),
    ("aten::add", "aten::sub", "aten::mul"),
)
# Ways to keep what autograd saves: as it is, as a copy, to be copied when it is used, and in another dtype.
PACKING: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda x: x, lambda x: x),
    (torch.clone, lambda x: x),
    (lambda x: x, torch.clone),
    (lambda x: (x.dtype, x.double()), lambda packed: packed[1].to(packed[0])),
)
FAILURES = (RuntimeError, IndexError, ValueError, TypeError)


class Net(nn.Module):
    """Linear layers, products between activations, and other modules inside."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=depth % 2 == 0)
        self.inner = Net(width, depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(self.first(x).tanh())
        return x + product(x, x.mT) @ x


class Failing(hooks.Recorder):
    """Raises at one call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def __repr__(self) -> str:
        return f"Failing({self.at})"

    def work(self) -> Work:
        return Work()

    def post(self, call: OpCall) -> None:
        self._fail(call.index)
        super().post(call)

    def noted(self, note: PendingRecord, values: Any, learned: Any) -> None:
        self._fail(note.index)
        super().noted(note, values, learned)

    def _fail(self, index: int) -> None:
        if index == self.at:
            raise ValueError(f"call {index}")


class World:
    """One run of the program of a seed, which takes at most so many actions and records its runs in a folder."""

    def __init__(self, seed: int, engine: Any, folder: Path, most: int) -> None:
        self.draw = random.Random(seed)
        self.seed, self.engine, self.folder, self.left = seed, engine, folder, most
        self.digest = hashlib.sha256()
        self.report: list[Any] = []
        self.models: list[nn.Module] = []
        self.blocks: list[tuple[Any, list[Any]]] = []  # those that are open: interceptors and their hooks
        self.threads = {threading.get_native_id(): 0}
        self.over = threading.Event()  # threads stay until the end, since the system uses their numbers again
        self.concurrent = False
        self.trace: list[str] = []

    def run(self) -> tuple[Any, ...]:
        """Run the program, and return what its hooks have reported and what it has computed."""
        torch.manual_seed(self.seed)
        self.models = [Net(self.draw.choice((2, 4)), depth) for depth in range(2)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                while self.left > 0:
                    self.block(0)
                if self.draw.random() < 0.05:
                    self.crowd()
            finally:
                self.over.set()
        # A call that runs is shown by its arguments, and a record by what they look like.
        told = sorted(str(each.message).partition("): ")[0] for each in caught if "switched off" in str(each.message))
        return self.report, self.digest.hexdigest(), told

    def act(self, depth: int) -> None:
        """Do something, chosen at random."""
        if self.left <= 0:
            return
        self.left -= 1
        weights = ACTIONS if depth < 3 else {name: weight for name, weight in ACTIONS.items() if name not in NESTING}
        name = self.draw.choices(list(weights), list(weights.values()))[0]
        self.trace.append(f"{'  ' * depth}{name}")
        getattr(self, name)(depth + 1)

    def acts(self, depth: int) -> None:
        for _ in range(self.draw.randint(1, 4)):
            self.act(depth)

    # What a program computes.

    def see(self, *results: Any) -> None:
        """Make the values part of the program's result."""
        if not self.concurrent:
            for result in results:
                if isinstance(result, Tensor):
                    values = result.detach().resolve_conj().resolve_neg().contiguous()
                    self.digest.update(repr((values.dtype, values.shape)).encode())
                    self.digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())

    def leaf(self, word: str, sizes: dict[str, int], dtype: torch.dtype) -> Tensor:
        shape = tuple(1 if letter == "1" else sizes[letter] for letter in word.replace(".", ""))
        inexact = dtype.is_floating_point or dtype.is_complex
        fits = {"conj": dtype.is_complex, "neg": inexact}
        layout = self.draw.choice([name for name in LAYOUTS if fits.get(name, True)])
        grad = self.draw.choice(("nothing", "itself", "base")) if inexact else "nothing"
        tensor = Leaf(shape, dtype, layout, grad, self.draw.randrange(9)).make()[0]
        if inexact and tensor.numel() and self.draw.random() < 0.05:
            tensor = tensor.detach().clone()
            tensor.view(-1)[0] = self.draw.choice((float("nan"), float("inf"), 3e38 if dtype != torch.float16 else 6e4))
        return tensor

    def multiply(self, depth: int) -> None:
        op = self.draw.choice((*SIGNATURES, *IN_PLACE))
        dtype = self.draw.choice(DTYPES)
        if op == "attention" and not dtype.is_floating_point:
            op = "bmm"
        words = self.draw.choice(SIGNATURES.get(op) or (IN_PLACE.get(op, ""),)).split()[:-1]
        sizes = {letter: self.draw.choice((2, 3, 1, 4, 0, 8, 20)) for letter in "abcdefghijklmnopqrstuvwxyz"}
        operands = [self.leaf(word, sizes, dtype) for word in words]
        if self.draw.random() < 0.1:
            operands[-1] = self.leaf("mk", {"m": 5, "k": 7}, dtype)  # does not fit
        options: dict[str, Any] = {}
        if op.startswith(("add", "baddbmm")) and self.draw.random() < 0.5:
            options = {"beta": self.draw.choice((0, 2, 0.5)), "alpha": self.draw.choice((0, 2, 0.5))}
        if op in ("mm", "bmm", "addmm", "matmul", "mv") and self.draw.random() < 0.2:
            options["out"] = torch.empty(0, dtype=dtype)
        function = function_of(self.draw.choice(ALIKE) if op in ALIKE else op)
        context = self.draw.choice(list(CONTEXTS))
        backward = self.draw.choice(("none", "none", "once", "graph"))
        if any(operand.is_conj() or operand.is_neg() for operand in operands):
            backward = "none"  # whose gradient a call computes is found by chance: torch multiplies a copy of a view
        for _ in range(self.draw.choice((1, 2, 3, 6))):
            if op in ALIKE:
                function = function_of(self.draw.choice(ALIKE))
            with CONTEXTS[context](), suppress(*FAILURES):
                result = function(*operands, **options)
                self.see(result)
                if backward != "none" and isinstance(result, Tensor) and result.requires_grad:
                    grads = [each for each in operands if each.requires_grad]
                    found = torch.autograd.grad(
                        (result * result).sum().abs(), grads, create_graph=backward == "graph", allow_unused=True
                    )
                    self.see(*found)
                    if backward == "graph":
                        total = sum(each.abs().sum() for each in found if each is not None)
                        if isinstance(total, Tensor) and total.requires_grad:
                            self.see(*torch.autograd.grad(total, grads, allow_unused=True))

    def elementwise(self, depth: int) -> None:
        x, y = (torch.full((self.draw.choice((2, 20)), 8), float(value)) for value in range(2))
        for _ in range(4):
            self.see(self.draw.choice(ELEMENTWISE)(*((x, y) if x.shape == y.shape else (x, x))))

    def attention(self, depth: int) -> None:
        kind, dtype = self.draw.choice(list(gpu_attentions.KERNELS)), self.draw.choice((torch.float32, torch.bfloat16))
        sizes = {letter: self.draw.choice((1, 2, 3, 8)) for letter in "bhqkd"}
        q, k, v = (self.leaf(word, sizes, dtype) for word in ("bhqd", "bhkd", "bhkd"))
        bias = self.leaf("bhqk", sizes, dtype).detach() if self.draw.random() < 0.3 else None
        causal, context = self.draw.random() < 0.3, self.draw.choice(list(CONTEXTS))
        for _ in range(self.draw.choice((1, 2, 3, 6))):
            with CONTEXTS[context](), suppress(*FAILURES):
                result = gpu_attentions.attention(kind, q, k, v, bias, causal)
                self.see(result)
                if result.requires_grad:
                    grads = [each for each in (q, k, v) if each.requires_grad]
                    self.see(*torch.autograd.grad(result.square().sum(), grads))

    def model(self, depth: int) -> None:
        model = self.draw.choice(self.models)
        width = next(model.parameters()).size(-1)
        x = torch.randn(self.draw.choice((2, 3)), width, requires_grad=self.draw.random() < 0.5)
        how = self.draw.choice(("plain", "plain", "reentrant", "again", "compute"))
        for _ in range(self.draw.choice((1, 2, 3))):
            with CONTEXTS[self.draw.choice(list(CONTEXTS))]():
                if how in ("reentrant", "again") and torch.is_grad_enabled():
                    y = checkpoint(model, x, use_reentrant=how == "reentrant")
                else:
                    y = model(x)
                self.see(y)
                if how != "compute" and y.requires_grad:
                    grads = (
                        torch.autograd.grad(y.float().sum(), x, create_graph=True)
                        if x.requires_grad and how == "plain"
                        else ()
                    )
                    total = y.float().sum() + sum((each * each).sum() for each in grads)
                    with suppress(*FAILURES):  # gradients of gradients may be of no use
                        total.backward()
                self.see(*(each.grad for each in model.parameters()))

    def hooked(self, depth: int) -> None:
        """Run a model with hooks on tensors, on modules and on what autograd saves, some of which multiply."""
        model = self.draw.choice(self.models)
        x = torch.randn(3, next(model.parameters()).size(-1), requires_grad=self.draw.random() < 0.5)

        def multiply(*given: Any) -> None:
            grads = [each for each in given if isinstance(each, Tensor)]
            self.see(*(each.detach() @ each.detach().mT for each in grads))

        handles = []
        for module in self.draw.sample([*model.modules()], 1):
            handles += [
                module.register_forward_hook(lambda _, given, output: multiply(*given)),
                module.register_full_backward_hook(lambda _, own, grads: multiply(*own, *grads)),
                self.draw.choice([*model.parameters()]).register_hook(lambda grad: grad * 2),
            ][: self.draw.randint(0, 3)]
        for _ in range(self.draw.choice((1, 2, 3))):
            with suppress(*FAILURES):
                with torch.autograd.graph.saved_tensors_hooks(*self.draw.choice(PACKING)):
                    y = model(x)
                    z = y @ y.mT if self.draw.random() < 0.5 else y
                z.register_hook(lambda grad: grad @ grad.mT @ grad if grad.dim() == 2 else None)
                z.sum().backward(create_graph=self.draw.random() < 0.2)
            self.see(*(each.grad for each in model.parameters()))
        for handle in handles:
            handle.remove()

    def vmap(self, depth: int) -> None:
        x, y = torch.randn(3, 4, 4), torch.randn(4, 4)
        for _ in range(2):
            self.see(torch.func.vmap(torch.mm, (0, None))(x, y))
            self.see(torch.func.grad(lambda z: (z @ y).sum())(y))
            self.see(torch.func.jacrev(lambda z: z @ y)(y))

    def new_model(self, depth: int) -> None:
        if len(self.models) > 2:
            del self.models[self.draw.randrange(len(self.models))]
            gc.collect(0)
        self.models.append(Net(2, 0) if self.draw.random() < 0.5 else nn.Linear(2, 2))
        self.model(depth)

    def short_lived(self, depth: int) -> None:
        for width in range(1, self.draw.choice((3, 9))):
            self.see(nn.Linear(width, 2)(torch.ones(2, width)))

    def rename(self, depth: int) -> None:
        model = self.draw.choice(self.models)
        if isinstance(model, Net):
            model.second = model.first
            if self.draw.random() < 0.5 and isinstance(model.inner, Net):
                model.first, model.inner.first = model.inner.first, model.first
        self.model(depth)

    def many_shapes(self, depth: int) -> None:
        if self.draw.random() < 0.2:
            for size in range(self.draw.choice((300, 4200))):
                torch.mm(torch.ones(1, size), torch.ones(size, 1))

    def many_rows(self, depth: int) -> None:
        x = torch.ones(2, 2)
        for _ in range(self.draw.choice((20, 1500, 5000))):
            torch.mm(x, x)

    def many_places(self, depth: int) -> None:
        if self.draw.random() < 0.2:
            model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(self.draw.choice((50, 2100)))))
            with torch.no_grad():
                model(torch.ones(1, 1))
                model(torch.ones(1, 1))

    # How a program runs.

    def raises(self, depth: int) -> None:
        with suppress(ZeroDivisionError):
            self.acts(depth)
            raise ZeroDivisionError

    def generator(self, depth: int) -> None:
        def products() -> Generator[None]:
            for _ in range(2):
                self.multiply(depth)
                yield

        if self.blocks and self.draw.random() < 0.5:
            products = self.blocks[-1][0](products)
        for _ in products():
            self.act(depth)

    def task(self, depth: int) -> None:
        async def work() -> None:
            self.multiply(depth)
            await asyncio.sleep(0)
            with self.watched(depth):
                self.multiply(depth)
                await asyncio.sleep(0)
                self.elementwise(depth)

        async def both() -> None:
            await asyncio.gather(work(), work())

        asyncio.run(both())

    def thread(self, depth: int) -> None:
        self._threads([lambda: self.acts(depth)])

    def several_threads(self, depth: int) -> None:
        if any(isinstance(hook, Failing) for _, watching in self.blocks for hook in watching):
            return  # which call is the first to fail would depend on the threads
        self.concurrent = True
        kinds = [self.draw.choice(("mm", "addmm", "model")) for _ in range(3)]
        model = self.models[0]
        model_input = torch.ones(2, next(model.parameters()).size(-1))
        times = self.draw.choice((5, 400))

        def work(kind: str) -> None:
            x = torch.ones(3, 3)
            for _ in range(times):
                if kind == "mm":
                    torch.mm(x, x)
                elif kind == "addmm":
                    torch.addmm(x, x, x)
                else:
                    torch.autograd.grad(model(model_input).sum(), [*model.parameters()])

        self._threads([lambda kind=kind: work(kind) for kind in kinds])  # type: ignore[misc]

    def _threads(self, works: list[Callable[[], None]]) -> None:
        """Run functions in threads of their own and wait for them."""
        failures: list[BaseException] = []
        first = len(self.threads)

        def run(number: int, work: Callable[[], None], done: threading.Event) -> None:
            self.threads[threading.get_native_id()] = number
            try:
                work()
            except BaseException as failure:
                failures.append(failure)
            done.set()
            self.over.wait(100)

        waiting = [threading.Event() for _ in works]
        for number, (work, done) in enumerate(zip(works, waiting, strict=True)):
            threading.Thread(target=run, args=(first + number, work, done), daemon=True).start()
        for done in waiting:
            done.wait()
        for failure in failures:
            raise failure

    def crowd(self) -> None:
        """Make and drop modules in several threads, whose names depend on which of them are there."""
        self.trace.append("crowd")
        self.concurrent = True
        recorder, other = hooks.Recorder(), hooks.Stats()

        def work() -> None:
            for _ in range(300):
                nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()

        with intercept([recorder, other], engine=self.engine, threads="all"):
            self._threads([work] * 4)
        names = {record.index: record.module for record in recorder.records}
        self.report.append([record | {"module": None} for record in records_of(self, recorder.records)])
        self.report.append({str(name).partition("#")[0] for name in names.values()})
        links = [(record.module, names[record.forward]) for record in recorder.records if record.forward is not None]
        self.report.append([(own, linked) for own, linked in links if own != linked])
        self.report.append(sum(row.calls for row in other.rows()))

    def fork(self, depth: int) -> None:
        reader, writer = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            try:
                self.threads[threading.get_native_id()] = -1
                self.report = [report_of(self, *block) for block in self.blocks]
                self.acts(depth)
                self.block(depth)
                writer.send((self.report, self.digest.hexdigest()))
            except BaseException:
                writer.send(traceback.format_exc())
            finally:
                os._exit(0)
        self.left -= 3  # as many as the child may take
        self.report.append(("child", reader.recv() if multiprocessing.connection.wait([reader], 60) else "hangs"))
        os.waitpid(child, 0)

    # Blocks and hooks.

    def hooks(self) -> list[Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / str(len(os.listdir(self.folder)))
        choices: list[Callable[[], Any]] = [
            hooks.Recorder,
            hooks.Recorder,
            hooks.Profile,
            lambda: hooks.NonFinite(action="record", inf=self.draw.random() < 0.5),
            lambda: hooks.Stats(self.draw.choice(("output", ("lhs", "rhs", "bias", "output"), "lhs"))),
            lambda: hooks.Stats(("rhs", "output"), for_dtype=self.draw.choice((torch.float16, torch.bfloat16))),
            lambda: hooks.Checksum(action="record"),
            lambda: Failing(self.draw.randrange(20)),
        ]
        found = [self.draw.choice(choices)() for _ in range(self.draw.randint(1, 3))]
        if self.draw.random() < 0.5:
            path.mkdir()
            flight = self.draw.choice((None, 6, 3000))
            found.append(runs.RunRecorder(path, self.draw.choice(("none", "stats")), flight=flight))
        self.draw.shuffle(found)
        return found

    @contextmanager
    def watched(self, depth: int) -> Iterator[None]:
        watching = self.hooks()
        threads: Any = self.draw.choice(("current", "current", "all"))
        block = intercept(watching, ops=self.draw.choice(OPS), engine=self.engine, threads=threads, on_error="warn")
        self.trace.append(f"{'  ' * depth}block {[type(hook).__name__ for hook in watching]} {threads}")
        with block:
            self.blocks.append((block, watching))
            yield
            self.blocks.remove((block, watching))
            flights = report_of_flights(self, block, watching)
        self.report.append((report_of(self, block, watching), flights))

    def block(self, depth: int) -> None:
        with self.watched(depth):
            self.acts(depth)
            self.acts(depth)

    def pause(self, depth: int) -> None:
        if self.blocks:
            with self.draw.choice(self.blocks)[0].paused():
                self.acts(depth)

    def step(self, depth: int) -> None:
        for block, _ in self.blocks:
            block.step()

    def look(self, depth: int) -> None:
        for block, watching in self.blocks:
            self.report.append(report_of(self, block, watching))

    def register(self, depth: int) -> None:
        if not self.blocks:
            return
        block, watching = self.draw.choice(self.blocks)
        hook = self.draw.choice((hooks.Recorder, hooks.Profile, hooks.Stats))()
        watching.append(hook)
        handle = block.register(hook)
        self.acts(depth)
        if self.draw.random() < 0.7:
            handle.remove()


ACTIONS = {
    "multiply": 30,
    "attention": 6,
    "model": 12,
    "hooked": 6,
    "elementwise": 4,
    "vmap": 1,
    "new_model": 3,
    "short_lived": 2,
    "rename": 2,
    "many_shapes": 1,
    "many_rows": 1,
    "many_places": 1,
    "raises": 2,
    "generator": 2,
    "task": 2,
    "thread": 2,
    "several_threads": 1,
    "fork": 1,
    "block": 4,
    "pause": 2,
    "step": 2,
    "look": 3,
    "register": 4,
}
NESTING = ("raises", "generator", "task", "thread", "fork", "block", "pause", "register")


def report_of(world: World, block: Any, watching: list[Any]) -> Any:
    """What the hooks of a block have reported, without times."""
    found: list[Any] = [block.watcher.pipeline.calls, block.opaque]
    for hook in watching:
        if isinstance(hook, hooks.Recorder):
            found.append(records_of(world, hook.records))
        elif isinstance(hook, hooks.Profile):
            found.append(sorted(repr(dataclasses.replace(row, seconds=0.0)) for row in hook.rows()))
        elif isinstance(hook, hooks.Stats):
            found.append((sorted(map(repr, map(rounded, hook.rows()))), hook.skipped))
        elif isinstance(hook, hooks.NonFinite):
            records = records_of(world, [each.record for each in hook.findings])
            found.append(
                (records, sorted((each.kind, str(each.output), each.bad) for each in hook.findings), hook.passed_on)
            )
        elif isinstance(hook, hooks.Checksum):
            found.append((hook.checked, hook.rows, sorted(hook.skipped.items()), [str(each) for each in hook.findings]))
        elif hook.flight is None and block not in [open_block for open_block, _ in world.blocks]:
            found.append(lines_of(world, hook))
    return found


def report_of_flights(world: World, block: Any, watching: list[Any]) -> list[Any]:
    """The lines of the flight recorders, which are gone once a block has ended well."""
    flying = [hook for hook in watching if isinstance(hook, runs.RunRecorder) and hook.flight is not None]
    # Which lines are the last ones depends on the threads.
    whole = [hook for hook in flying if not world.concurrent or hook.flight > block.watcher.pipeline.calls]
    return [lines_of(world, hook) for hook in whole]


def lines_of(world: World, recorder: Any) -> list[Any]:
    calls = list(runs.open_run(recorder.path).calls()) if recorder.calls or recorder.flight else []
    records = records_of(world, [call.record for call in calls])
    rest = [repr(dataclasses.replace(call, record=calls[0].record)) for call in calls]
    rest = [each.replace(repr(calls[0].record), "") for each in rest]
    return [records, sorted(rest) if world.concurrent else rest]


def records_of(world: World, records: list[Any]) -> list[Any]:
    """Records with numbers that do not depend on which thread came first."""
    if not world.concurrent:
        return [timeless(world, record) for record in records]
    numbers: dict[int, tuple[int, int]] = {}
    counts: collections.Counter[int] = collections.Counter()
    for record in sorted(records, key=lambda record: record.index):
        thread = world.threads[record.thread]
        numbers[record.index] = thread, counts[thread]
        counts[thread] += 1
    renumbered = [
        dataclasses.replace(
            record, index=numbers[record.index], forward=numbers.get(record.forward, record.forward and "?")
        )
        for record in records
    ]
    return [timeless(world, each) for each in sorted(renumbered, key=lambda record: record.index)]


def timeless(world: World, record: Any) -> dict[str, Any]:
    fields = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    ran = {name: fields[name] is not None for name in ("started", "elapsed")}
    return fields | ran | {"thread": world.threads[record.thread]}


def rounded(row: Any) -> Any:
    """A row of statistics without the last digits: they tell in which order values were added up."""
    digits = {name: float(f"{getattr(row, name) + row.rms:.9g}") for name in ("mean", "std", "rms")}
    return dataclasses.replace(row, **digits)


def outcome(seed: int, engine: str, most: int = 20) -> tuple[Any, list[str]]:
    """What a program reports under an engine, or how it fails; and what it did."""
    gc.collect(0)
    with tempfile.TemporaryDirectory() as folder, gpu_attentions.on_the_host():
        # Both engines record to a folder of the same name, which errors tell.
        world = World(seed, engine, Path(folder) / "runs", most)
        try:
            return world.run(), world.trace
        except Exception:
            return traceback.format_exc().replace(folder, ""), world.trace


def difference(seed: int, most: int = 20) -> str | None:
    """Where the two kinds of kernels report different things of a program; None if they do not."""
    one, trace = outcome(seed, "kernel", most)
    other, _ = outcome(seed, "compiled", most)
    parted = list(islice(_parted(one, other), 10))
    return "\n".join([f"seed {seed}", *trace, *parted]) if parted else None


def _parted(one: Any, other: Any, path: str = "") -> Iterator[str]:
    if repr(one) == repr(other):
        return
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{path}: {len(one)} against {len(other)}"
        for number, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _parted(left, right, f"{path}[{number}]")
    elif isinstance(one, dict) and isinstance(other, dict):
        parted = [name for name in one if repr(one[name]) != repr(other[name])]
        yield f"{path} {one['op']}: " + "; ".join(f"{name} {one[name]} against {other[name]}" for name in parted)
    else:
        yield f"{path}\n  kernel:   {str(one)[-900:]}\n  compiled: {str(other)[-900:]}"


def main() -> None:
    """Try seeds until one differs or the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--actions", type=int, default=20, help="how many actions a program takes at most")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from native import reading

    extension = compiled.load()  # with it, both kinds of kernels know which thread has made a node
    extension.remember(1, 0)  # what was read of all tensors, and none of their values is looked at again
    began, differ = time.monotonic(), []
    tried = 0
    with reading(True):
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            if time.monotonic() - began > arguments.seconds:
                break
            tried += 1
            if found := difference(seed, arguments.actions):
                differ.append(seed)
                print(found, flush=True)
    print(f"{extension.remember(1, 0)} readings recalled")
    print(f"{tried} programs in {time.monotonic() - began:.0f} s, {len(differ)} differ: {differ}")


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
    main()
