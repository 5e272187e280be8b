"""The device `toy`: a stand-in for a GPU, for which autograd has a thread of its own. Importing this module adds it.

It is built once and cached. A process has it for good, and torch takes it for its accelerator: use it in a process of
its own. Run what is to be compared on the device before the CPU, which may hide what is wrong there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import fake_cuda
import torch

from opintercept._native import build

_SOURCE = Path(__file__).with_name("toy_device.cpp")


class Counts(NamedTuple):
    """What has happened on the device. A copy to the host waits unless it is `late`; `bytes` are of both."""

    launches: int
    to_device: int
    to_host: int
    late: int
    items: int
    waits: int
    bytes: int


def counts() -> Counts:
    """What has happened since this was last called."""
    return Counts(*torch.ops.toy.counts())


def take_for_cuda() -> None:
    """From now on, let `is_cuda` and `torch.cuda` answer for the device, and copies arrive when somebody waits."""
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == "toy")  # type: ignore[assignment]
    for name, value in vars(_Cuda).items():
        if not name.startswith("__"):
            setattr(torch.cuda, name, value)
    vars(torch._C)["_CUDAGraph"] = Graph
    torch.ops.toy.late(True)
    fake_cuda.behave(late=True)


def use_driver() -> None:
    """Let hooks read values on the device in one launch, as on CUDA."""
    toy = ctypes.CDLL(str(build_device()))
    fake_cuda.driver().fake_device(toy.toy_change, toy.toy_captures, toy.toy_launch, toy.toy_wait)
    fake_cuda.use("toy")


def synchronize(_device: Any = None) -> None:
    """Wait for all streams."""
    torch.ops.toy.wait_for(-1, torch.ops.toy.copies(), True)


def _current(_device: Any = None) -> int:
    return torch.ops.toy.stream()  # type: ignore[no-any-return]


@contextlib.contextmanager
def on_stream(stream: int) -> Iterator[None]:
    """Run operators on another stream. Both devices have the same ones."""
    before = torch.ops.toy.use(stream)
    try:
        yield
    finally:
        torch.ops.toy.use(before)


class Graph:
    """Stands for `torch.cuda.CUDAGraph`. Operators that it captures run when it is replayed."""

    captured: int | None = None  # the stream that one of them captures
    number = -1

    def capture_begin(self) -> None:
        if self.number >= 0:
            raise RuntimeError("the graph has been captured")
        Graph.captured = _current()
        torch.ops.toy.begin_capture()

    def capture_end(self) -> None:
        self.number = torch.ops.toy.end_capture()
        Graph.captured = None

    def replay(self) -> None:
        def compute() -> None:  # where no block sees it
            with torch.no_grad():
                torch.ops.toy.replay(self.number)

        with ThreadPoolExecutor(1) as device:
            device.submit(compute).result()


@contextlib.contextmanager
def capturing(graph: Graph | None = None) -> Iterator[None]:
    """Let a graph capture the current stream, so that what would end the capture fails in this thread."""
    graph = graph or Graph()
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


class _Event:
    def __init__(self, **_options: Any) -> None:
        self._stream = self._copies = 0

    def record(self, _stream: Any = None) -> None:
        self._stream, self._copies = _current(), torch.ops.toy.copies()
        self._at = time.perf_counter()

    def elapsed_time(self, last: _Event) -> float:
        return (last._at - self._at) * 1e3

    def query(self) -> bool:
        assert Graph.captured is None, "operation not permitted when stream is capturing"
        return False  # until somebody waits

    def synchronize(self) -> None:
        is_writer = hasattr(threading.current_thread(), "runs_no_operator")  # whose waits keep nobody
        torch.ops.toy.wait_for(self._stream, self._copies, not is_writer)


class _Stream(int):
    def query(self) -> bool:
        return False  # it has always something to do


class _Cuda:
    """What the package uses of `torch.cuda`."""

    Event = _Event
    device = staticmethod(lambda device: contextlib.nullcontext())
    current_stream = staticmethod(lambda device=None: _Stream(_current()))
    stream = staticmethod(on_stream)
    is_current_stream_capturing = staticmethod(lambda: Graph.captured == _current())
    synchronize = staticmethod(synchronize)


def leave() -> None:
    """End the process at once: autograd's thread may still let go of objects, which would abort while Python ends."""
    sys.stdout.flush()
    os._exit(0)


def told_by_a_child(find: Callable[[], Any]) -> Any:
    """What a function returns in a child of this process, in which autograd has not run yet."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = find()
        except BaseException:
            found = [traceback.format_exc()]
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else ["it crashed"]


def in_a_child(find: Callable[[], list[str]]) -> list[str]:
    """The first lines that a function returns in such a child."""
    found: list[str] = told_by_a_child(lambda: [line[:500] for line in find()[:20]])
    return found


def build_device() -> Path:
    """Return the library with the device, built if it does not exist."""
    with mock.patch.multiple(build, SOURCES=[_SOURCE], HEADERS=[], COMPILE=[*build.COMPILE, "-O0"]):
        return build.built_library()


torch.ops.load_library(build_device())
torch.utils.rename_privateuse1_backend("toy")  # type: ignore[attr-defined]
_module = types.ModuleType("torch.toy")
vars(_module).update(
    is_available=lambda: True,
    device_count=lambda: 2,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16],
)
torch._register_device_module("toy", _module)
torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined]
