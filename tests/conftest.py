"""Options of the test suite, and checks that apply to every test."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import longest
import pytest
import sampled
import torch
from made_runs import write
from native import read_values, reading
from recorded import no_writer

from opintercept import OpCall, runs
from opintercept._engines import choose, compiled
from opintercept._engines.base import Watcher
from opintercept._native import values
from opintercept._native.library import SWITCH

if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are busy with the other workers
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # for programs that tests start
    os.environ.pop("PYTEST_ADDOPTS", None)  # may have started the workers; pytest in a test is to start none
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anybody imports Triton, whose own functions it changes
# Take the processor's word for its vector instructions: Inductor compiles a program for each set of them, and loads it
# in a Python with torch, in each process and for each cache that it begins.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
pytest.register_assert_rewrite("interrupts", "made_tensors", "numpy_stats")
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., runs.Difference]:
    """Compare two runs with these calls."""

    def compare(a: list[dict[str, Any]], b: list[dict[str, Any]], **options: Any) -> runs.Difference:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return runs.diff(write(folder / "a", a), write(folder / "b", b), **options)

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the test suite."""
    parser.addoption(
        "--compiled", action="store_true", help="test the kernel engine with the kernels of the compiled engine"
    )
    parser.addoption("--whole", action="store_true", help="run the slow tests too")
    parser.addoption(
        "--sampled", action="store_true", help="run a fixed part of each large sweep, as continuous integration does"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave out the slow tests, unless the command line has `--whole` or chooses files, markers or names."""
    sampled.on = config.option.sampled
    chosen = config.args != config.getini("testpaths") or config.option.markexpr or config.option.keyword
    if not (config.option.whole or chosen):
        config.option.markexpr = "not slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that are slow as a whole without importing them, which takes seconds too."""
    if config.option.markexpr != "not slow" or collection_path.suffix != ".py":
        return None
    slow = re.search(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", collection_path.read_text(), re.MULTILINE)
    return slow is not None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--sampled` does, and run the longest files first if there are several processes.

    `--dist loadfile` keeps each file in one of them.
    """
    chosen = sampled.covering(items)
    if left_out := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=longest.place)


@pytest.fixture(autouse=True, scope="session")
def plain_process() -> None:
    """Do not depend on how the process was started, nor on which test is the first."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for programs that tests start
    os.environ.pop("COLUMNS", None)  # the terminal's width, which pytest-xdist tells its workers
    os.environ.pop("FORCE_COLOR", None)  # which a CI may ask for
    Watcher.told_of_convolutions = True  # a process tells of them once


@pytest.fixture(autouse=True, scope="session")
def chosen_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--compiled`, put the compiled engine in the place of the kernel engine, and read values in C++.

    Without it, `engine="auto"` takes kernels in Python and hooks read values with torch's operators, even if the
    library has been built. A test that wants them to look for it uses `native.fresh_look`.
    """
    with pytest.MonkeyPatch.context() as patch:
        natively = request.config.getoption("--compiled")
        if natively:
            patch.setitem(choose.ENGINES, "kernel", compiled.ENGINE)
            patch.delenv(SWITCH, raising=False)  # for programs that tests start
        patch.setattr(compiled, "is_there", lambda: False)
        read_values(natively, patch)
        patch.setattr(values, "adopt", lambda library: None)  # what the engine does when a test first builds it
        yield


def dispatcher_state() -> dict[str, object]:
    """What a block changes in torch, and must restore."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "mm": torch._C._dispatch_dump_table("aten::mm"),
        "addmm": torch._C._dispatch_dump_table("aten::addmm"),
        "in a dispatch mode": torch.utils._python_dispatch._is_in_torch_dispatch_mode,
    }


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Fail a test that leaves a mode on torch's stacks or a kernel in the dispatcher."""
    before = dispatcher_state()
    # torch.manual_seed would format the Python stack for each kind of device: a millisecond for each test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    yield
    assert dispatcher_state() == before


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> None:
    """Let `gc.collect` look only at what the tests of a file make, and not for a second at all that others import."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def values_in_cpp() -> Iterator[None]:
    """Let hooks read values in C++ with every engine, so that sums are equal to the last bit."""
    with reading(True):
        yield


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls that hooks have seen in Python, by operator."""
    seen: Counter[str] = Counter()
    made = OpCall.__init__

    def counted(call: OpCall, owner: Any, spec: Any, *rest: Any) -> None:
        seen[spec.name] += 1
        made(call, owner, spec, *rest)

    monkeypatch.setattr(OpCall, "__init__", counted)
    return seen


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread for small tensors, for which a second one would only keep a core busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_writer_left() -> Iterator[None]:
    """Fail a test that leaves a thread of `RunRecorder` running."""
    yield
    assert no_writer()


@pytest.fixture
def one_of_two_ranks() -> Iterator[None]:
    """Make this process one of two ranks, whose other rank is the same in everything."""
    import torch.distributed as dist

    if not dist.is_available():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()
