"""What every test is checked for, whether it asks or not."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from recorded import no_writer

from opintercept._engines import choose, compiled

pytest.register_assert_rewrite("interrupts", "numpy_stats")
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--compiled`: what is tested of the kernel engine is tested of its kernels in C++."""
    parser.addoption("--compiled", action="store_true", help="test the kernel engine with its kernels in C++")


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Let programs that tests start be interrupted, also where a shell runs the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def chosen_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install compiled kernels wherever the kernel engine would install its own."""
    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("--compiled"):
            patch.setitem(choose.ENGINES, "kernel", compiled.ENGINE)
        yield


def dispatcher_state() -> dict[str, object]:
    """Everything of torch's that a block changes and must bring back."""
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "mm": torch._C._dispatch_dump_table("aten::mm"),
        "addmm": torch._C._dispatch_dump_table("aten::addmm"),
        "in a dispatch mode": torch.utils._python_dispatch._is_in_torch_dispatch_mode,
    }


@pytest.fixture(autouse=True)
def clean_torch() -> Iterator[None]:
    """Fail the test that leaves a mode on torch's stacks or a kernel in the dispatcher."""
    before = dispatcher_state()
    torch.manual_seed(0)
    yield
    assert dispatcher_state() == before


@pytest.fixture
def no_writer_left() -> Iterator[None]:
    """Fail the test that leaves a thread of `RunRecorder`."""
    yield
    assert no_writer()
