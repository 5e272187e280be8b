"""What only a GPU can show, as Markdown: `python -m benchmarks gpu --all`, in eight minutes.

Invariant: what fails says so in its row, and the rest goes on; what takes times runs alone. With `--smoke` all of it is
rehearsed on the CPU, small.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import SIZES, counts, llama, measured, wait
from opintercept import hooks, info, intercept
from opintercept._native import values as native
from opintercept._values import content, on_device

ROOT = Path(__file__).parents[1]
PROGRAMS, HELPERS = ROOT / "tests" / "programs", ROOT / "tests" / "helpers"
SECONDS = 130
"""How long a part may begin new rows."""
TESTS = tuple(
    f"tests/{name}.py::{test}"
    for name, test in (
        ("hooks/test_profile", "test_time_on_cuda_is_the_devices_and_no_call_waits"),
        ("hooks/test_attention", "test_weights_of_each_cuda_kernel"),
        ("hooks/test_checksum", "test_no_call_waits_for_a_device"),
        ("hooks/test_reference", "test_references_of_cuda"),
        ("fidelity/test_compile", "test_a_cuda_graph_is_seen_at_its_capture_and_at_each_replay"),
        ("fidelity/test_distributed", "test_threads_all_sees_data_parallel"),
    )
)
"""Those that need a GPU."""
# How models run: the dtype, and a backend of attention or a mode of the compiler.
WAYS: dict[str, tuple[torch.dtype, SDPBackend | str | None]] = {
    "eager": (torch.float32, None),
    "SDPA, math": (torch.float32, SDPBackend.MATH),
    "SDPA, memory-efficient": (torch.float32, SDPBackend.EFFICIENT_ATTENTION),
    "SDPA, flash": (torch.bfloat16, SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": (torch.bfloat16, SDPBackend.CUDNN_ATTENTION),
    "compiled": (torch.float32, "default"),
    "compiled, CUDA graphs": (torch.float32, "reduce-overhead"),
}
Lines = Iterator[tuple[str, str]]


def tests(device: torch.device, small: bool) -> Lines:
    """The tests of the suite that need a device."""
    command = [sys.executable, "-m", "pytest", "-q", *(["--collect-only"] if small else []), *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=2 * SECONDS)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    yield "pytest", lines[-1].strip("= ")
    for line in lines:
        if line.startswith("FAILED"):
            yield tuple(line.split(" - ", 1)) if " - " in line else (line, "")  # type: ignore[misc]


def fidelity(device: torch.device, small: bool) -> Lines:
    """Whether results and gradients of 20 models stay the same to the last bit."""
    models = importlib.import_module("models")
    for way in WAYS:
        found: dict[str, list[str]] = {"equal": [], "differ": [], "not reproducible": [], "not run": []}
        for name, make in [*(models.MODELS | models.MORE_MODELS).items()][: 2 if small else None]:
            try:
                plain, again, watched = (_results(models, make, way, device, small, hook) for hook in (0, 0, 1))
            except Exception:  # the backend or the model does not support this
                found["not run"].append(name)
                continue
            alike = [len(plain) == len(other) and all(map(torch.equal, plain, other)) for other in (again, watched)]
            found["not reproducible" if not alike[0] else "equal" if alike[1] else "differ"].append(name)
        yield way, "; ".join(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in found.items() if names)


def _results(models: Any, make: Any, way: str, device: torch.device, small: bool, watched: int) -> list[torch.Tensor]:
    """The loss, and the gradients of a model that is not compiled."""
    dtype, how = WAYS[way]
    torch.manual_seed(3)
    model = make().to(device, dtype)
    inputs = {name: each.to(device) for name, each in models.inputs_of(model).items()}
    inputs = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
    with intercept((hooks.Recorder(), hooks.Stats()) if watched else ()):
        if isinstance(how, str):
            torch.compiler.reset()
            run: Any = torch.compile(model, backend="eager") if small else torch.compile(model, mode=how)
            with torch.no_grad():
                return [run(**inputs).loss.clone() for _ in range(3)]
        with sdpa_kernel(how) if how is not None else contextlib.nullcontext():
            loss = model(**inputs).loss
            loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


_ORIGINS = """
import collections, json, sys, types
sys.modules["toy_device"] = types.SimpleNamespace(in_a_child=None)  # which stands in for a GPU
import device_programs
name, device = sys.argv[1:]
there, here = (collections.Counter(device_programs.run(name, each, "auto")[0]) for each in (device, "cpu"))
print(json.dumps([sum((there - here).values()), sum(there.values())]))
"""


def origins(device: torch.device, small: bool) -> Lines:
    """How many calls come from elsewhere than on the CPU, each program in a process of its own."""
    names = re.findall(r'"(.+)": Llama\(', (PROGRAMS / "device_programs.py").read_text())
    path = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, PROGRAMS, HELPERS)))}
    for name in names[1 : 2 if small else None]:
        command = [sys.executable, "-c", _ORIGINS, name, str(device)]
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=False)
        if done.returncode:
            yield name, f"failed: {done.stderr.strip().splitlines()[-1]}"
        else:
            wrong, calls = json.loads(done.stdout)
            yield name, f"{wrong} of {calls} calls differ"


@contextlib.contextmanager
def _watched(make: Callable[[str], Any], ops: str) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, intercept(make(f"{folder}/run"), ops=ops):
        yield


def launches(device: torch.device, small: bool) -> Lines:
    """What hooks add to a step of docs/cost.md by the profiler, and by the stand-in for a GPU."""
    sys.modules["toy_device"] = types.ModuleType("toy_device")  # which is not needed here
    costs = importlib.import_module("device_costs")
    table = (ROOT / "docs" / "cost.md").read_text().partition("## On a GPU")[2]
    plain: dict[Any, tuple[int, int]] = {}
    for name, forward, backward, waits in re.findall(r"^\| `(.+?)` \|" + r" ([\d.]+) \|" * 3, table, re.MULTILINE):
        program = costs.program_of(name)
        place = {"device": device, "dtype": program.dtype}
        model, x = program.make().to(**place), torch.ones(program.shape, **place, requires_grad=True)

        def step(model: Any = model, x: torch.Tensor = x) -> None:
            model(x).sum().backward()

        if program not in plain:
            plain[program] = counts(step, contextlib.nullcontext, device)
        kernels, synchronisations = counts(step, functools.partial(_watched, costs.HOOKS[name][0], program.ops), device)
        added = kernels - plain[program][0], synchronisations - plain[program][1]
        there = float(forward) + program.backward * float(backward), (1 + program.backward) * float(waits)
        yield name, "{} kernels, {} synchronisations; {:g} launches, {:g} waits".format(*added, *there)


def costs(device: torch.device, small: bool) -> Lines:
    """Time, kernels and synchronisations of a Llama under hooks, relative to none, and the time of replays."""
    yield from _replays(device, [*SIZES][0 if small else 1])
    for size in [*SIZES][:1] if small else [*SIZES][1:]:
        for row in measured(device, size, rounds=2 if small else 7):
            took = f"{row.seconds * 1e3:.2f} ms, " if row.seconds else ""
            bound = f", at most {row.bound:g}" if row.bound is not None else ""
            yield f"{row.program}: {row.configuration}", f"{took}{row.ratio:.2f}{bound}"


def _replays(device: torch.device, size: str) -> Lines:
    """Time of a decoding step in a CUDA graph, which replays what `Stats` reads too, and the calls that hooks see."""
    _, _, decode = llama(device, size)
    recorder, stats = hooks.Recorder(), hooks.Stats()
    for name, watched in (("no block", ()), ("Recorder", recorder), ("Stats, graphs=True", stats)):
        decode()
        with intercept(watched, graphs=watched is stats):
            step: Callable[[], Any] = decode  # as there are no graphs on the CPU
            if device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    decode()
                step = graph.replay
            seconds = _seconds(step, device)
        yield f"Llama, {size}, a graph of one token: {name}", f"{seconds * 1e6:.1f} us"
    seen = len(recorder.records), sum(row.calls for row in stats.rows())
    yield "calls in these graphs", f"{seen[0]} by Recorder, {seen[1]} by Stats"


READERS = "torch's operators", "one launch"


@contextlib.contextmanager
def _reading(small: bool) -> Iterator[Callable[[str], None]]:
    """Yields what chooses the reader of values on the device, one of `READERS`."""
    before = native.read, vars(content)["ON_HOST"], on_device.DEVICE

    def choose(asked: str) -> None:
        on_device.DEVICE = "cuda" if asked == READERS[1] else "none"

    try:
        if small:  # the CPU is the device
            native.read, vars(content)["ON_HOST"] = native.unread, ()
        yield choose
    finally:
        native.read, vars(content)["ON_HOST"], on_device.DEVICE = before


def readers(device: torch.device, small: bool) -> Lines:
    """What it takes to read hash and statistics, beside a copy of the tensor, which reads and writes each byte once."""
    with _reading(small) as choose:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            for count in (4096,) if small else (4096, 1 << 20, 1 << 27):
                values = torch.randn(count // 1024, 1024, device=device).to(dtype)
                for asked in ("copy", *READERS):
                    choose(asked)
                    read = functools.partial(content.content_of, values)
                    seconds = _seconds(values.clone if asked == "copy" else read, device)
                    speed = values.nbytes / seconds / 1e9
                    yield f"{dtype}[{count}], {asked}", f"{seconds * 1e6:.1f} us, {speed:.1f} GB/s"


# On both sides of each number of values and each side of a matrix at which another way of hashing begins.
_HASHED: tuple[tuple[int, ...], ...] = (
    *((64, 1024), (128, 129), (256, 1024), (512, 1024), (1000, 1000), (1024, 1024), (4096, 256), (4097, 1024)),
    *((1 << 14, 1 << 10), (1 << 20,), (1 << 21,), (1 << 22,), (3, 333333), (5, 1 << 16), (7, 300, 400)),
)
_HASHED_DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool),
)


def hashes(device: torch.device, small: bool) -> Lines:
    """Whether hashes and counts of the device are those of the CPU, for each way of reading."""
    shapes = _HASHED[: 5 if small else None]

    def read(shape: tuple[int, ...], dtype: torch.dtype, place: torch.device) -> Any:
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul_(50).to(dtype)
        orders = (tensor, tensor.mT.contiguous().mT) if tensor.dim() == 2 else (tensor,)
        return [_hash_and_counts(each.to(place)) for each in orders]

    here = {(shape, dtype): read(shape, dtype, torch.device("cpu")) for shape in shapes for dtype in _HASHED_DTYPES}
    with _reading(small) as choose:
        for asked in READERS:
            choose(asked)
            for shape in shapes:
                odd = [str(dtype) for dtype in _HASHED_DTYPES if read(shape, dtype, device) != here[shape, dtype]]
                yield f"{shape}, {asked}", f"differs: {', '.join(odd)}" if odd else "equal"


def _hash_and_counts(tensor: torch.Tensor) -> Any:
    read = content.content_of(tensor)
    if read is None:
        return None
    found = read.read()
    return found.hash, found.count, found.nan, found.inf, found.min, found.max


def _seconds(body: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    took = 0.0
    for _ in range(2):  # the first time warms up
        wait(device)
        began = time.perf_counter()
        for _ in range(times):
            body()
        wait(device)
        took = time.perf_counter() - began
    return took / times


def checksum(device: torch.device, small: bool) -> Lines:
    """False alarms of `Checksum` in random products, by the library and by how float32 may be rounded."""
    figures = importlib.import_module("checksum_figures")
    for library in ("cublas", "cublaslt")[: 1 if small else None]:
        torch.backends.cuda.preferred_blas_library(library)
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                with intercept(hook := hooks.Checksum(action="record")):
                    for make in figures.KINDS.values():
                        for m, n, k in figures.sizes(64 if small else 2048, 2 if small else 25):
                            a, b = make(m, k).to(device, dtype), make(k, n).to(device, dtype)
                            _ = a @ b, a @ b.T.contiguous().T
                explained = sum(bool(each.flags) for each in hook.findings)
                alarms = f"{len(hook.findings) - explained} alarms in {hook.checked} products"
                alarms += f", and {explained} overflows that a setting allows" * bool(explained)
                yield f"{library}, {dtype}, {precision!r}", alarms
    torch.backends.cuda.preferred_blas_library("default")
    torch.set_float32_matmul_precision("highest")


def streams(device: torch.device, small: bool) -> Lines:
    """Whether what `Stats` reads on other streams, and on a second GPU, equals what it reads on the default stream."""

    def read(where: torch.device, stream: Any) -> list[Any]:
        found = hooks.Stats(("lhs", "output"))
        with torch.cuda.stream(stream), intercept(found):
            for seed in range(20):
                x = torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)).to(where)
                x @ x
        return found.rows()

    expected = read(device, None)
    on_cuda = device.type == "cuda"
    for number in range(3):
        stream = torch.cuda.Stream(device) if on_cuda else None
        yield f"stream {number}", "equal" if read(device, stream) == expected else "differs"
    for number in range(1, torch.cuda.device_count() if on_cuda else 1):
        yield f"GPU {number}", "equal" if read(torch.device("cuda", number), None) == expected else "differs"


BESIDE = (tests, hashes, fidelity, origins, launches, checksum, streams)
"""Each in a process of its own."""
ALONE = (readers, costs)
"""Those that take times, when the others have ended."""


def part(name: str, small: bool) -> None:
    """Print a part, each row as soon as it is known.

    Args:
        name: The name of its function.
        small: Whether to rehearse: on the CPU, with the smallest sizes.
    """
    sys.path += [str(PROGRAMS), str(HELPERS)]
    rows: Callable[[torch.device, bool], Lines] = globals()[name]
    print(f"\n## {(rows.__doc__ or '').rstrip('.')}\n\n| what | found |\n|---|---|", flush=True)
    until = time.monotonic() + SECONDS
    try:
        for what, found in rows(torch.device("cpu" if small else "cuda"), small):
            print(f"| {what} | {found} |", flush=True)
            if time.monotonic() > until:
                print("| others, if any | left out: no time |")
                break
    except Exception as error:
        text = str(error).partition("\n")[0].replace("|", "/")
        print(f"| {name} | failed: {type(error).__name__}: {text} |")


def report(small: bool) -> None:
    """Print all parts.

    Args:
        small: As in `part`.
    """
    name = "a rehearsal without a GPU" if small else torch.cuda.get_device_name()
    print(
        f"# {name}, {datetime.date.today()}\n\n```text\n{info()}\nCUDA           {torch.version.cuda}\n```", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rows in BESIDE:
            file = Path(folder, rows.__name__)
            with file.open("w") as output:
                running.append((_started(rows, small, output), rows, file))
            if small:
                running[-1][0].wait()  # for what a CPU has, there are too many
        for process, rows, file in running:
            try:
                failed = process.wait(3 * SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                failed = process.wait()
            print(file.read_text(), end="", flush=True)
            if failed:
                print(f"| {rows.__name__} | ended with {failed} |")
    for rows in ALONE:
        if failed := _started(rows, small, None).wait():
            print(f"| {rows.__name__} | ended with {failed} |")


def _started(rows: Callable[[torch.device, bool], Lines], small: bool, output: Any) -> subprocess.Popen[bytes]:
    code = f"from benchmarks import gpu_day; gpu_day.part({rows.__name__!r}, {small})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
