"""docs/troubleshooting.md: a program produces each message that the page shows."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native import fresh_look
from threads import run_threads

from opintercept import OpCall, OpInterceptError, hooks, intercept, runs
from opintercept._engines import compiled
from opintercept._engines.base import Watcher
from opintercept.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MESSAGES = dict(re.findall(r"^## (.*)\n\n```text\n(.*)\n```$", PAGE.read_text("utf-8"), re.MULTILINE))
SQUARE = torch.eye(2)


class Undeclared:
    """Reads the module of backward calls without saying so."""

    reads = ()

    def post(self, call: OpCall) -> None:
        if call.phase == "backward":
            assert call.module is None


def return_a_value() -> None:
    with intercept(lambda call: str(call)):
        SQUARE @ SQUARE


def read_a_call_later() -> None:
    calls: list[OpCall] = []
    with intercept(calls.append):
        SQUARE @ SQUARE
    print(calls[0].module)


def multiply_in_another_thread() -> None:
    with intercept(hooks.Recorder()):
        run_threads(lambda: torch.mm(SQUARE, SQUARE))


def convolve() -> None:
    with intercept(hooks.Recorder()):
        torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))


def call_an_undeclared_operator() -> None:
    @torch.library.custom_op("mylib::int8_matmul", mutates_args=())
    def int8_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x + w

    with intercept(hooks.Recorder()):
        int8_matmul(SQUARE, SQUARE)


def filter_by_an_unknown_module() -> None:
    with intercept(hooks.when(hooks.Recorder(), module="encoder.*")):
        torch.nn.Sequential(torch.nn.Linear(2, 2))(SQUARE)


def read_what_is_not_declared() -> None:
    with intercept(Undeclared()):
        (SQUARE @ torch.eye(2, requires_grad=True)).sum().backward()


def record_twice() -> None:
    for _ in range(2):
        with intercept(runs.RunRecorder("run")):
            SQUARE @ SQUARE


def patch_statistics() -> None:
    with intercept(runs.RunRecorder("run")):
        SQUARE @ SQUARE
    runs.Patch("run")


def compare_other_products() -> None:
    with intercept(runs.RunRecorder("a")):
        SQUARE @ SQUARE
    with intercept(runs.RunRecorder("b")):
        torch.nn.Linear(3, 1)(torch.ones(1, 3))
    runs.diff(runs.open_run("a"), runs.open_run("b"))


def filter_a_run_by_an_unknown_module() -> None:
    with intercept(runs.RunRecorder("run")):
        torch.nn.Sequential(torch.nn.Linear(2, 2))(SQUARE)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        main(["show", "run", "--module", "layers"])
    raise OpInterceptError(printed.getvalue().removeprefix("opintercept show: ").rstrip())


def save_without_safetensors() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        patch.setitem(sys.modules, "safetensors.torch", None)
        hooks.NonFinite(save="found")


def watch_all_threads_with_a_mode() -> None:
    intercept((), engine="mode", threads="all")


def build_without_a_compiler() -> None:
    with fresh_look() as patch:
        patch.setattr(compiled, "loaded", None)
        patch.setenv("CXX", "/nowhere/c++")
        patch.setenv("TORCH_EXTENSIONS_DIR", str(Path("extensions").absolute()))
        intercept((), engine="compiled")


PROGRAMS: dict[str, Callable[[], None]] = {
    "A hook that returns something": return_a_value,
    "A call that is kept": read_a_call_later,
    "A block that saw nothing": multiply_in_another_thread,
    "Totals without convolutions": convolve,
    "An operator of another library": call_an_undeclared_operator,
    "A filter that matches no module": filter_by_an_unknown_module,
    "A backward call without a module": read_what_is_not_declared,
    "A folder that holds a run": record_twice,
    "A run without values": patch_statistics,
    "Two runs without a call in common": compare_other_products,
    "A filter that matches nothing in a run": filter_a_run_by_an_unknown_module,
    "A package that is not installed": save_without_safetensors,
    "Engines that do not fit": watch_all_threads_with_a_mode,
    "No compiler": build_without_a_compiler,
}


def test_every_message_of_the_page_has_a_program() -> None:
    assert list(MESSAGES) == list(PROGRAMS) == re.findall("^## (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)


@pytest.mark.parametrize("title", PROGRAMS)
@pytest.mark.filterwarnings("error::opintercept.OpInterceptWarning")
def test_a_program_produces_the_message(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Watcher, "told_of_convolutions", False)
    kind, _, text = MESSAGES[title].partition(": ")
    pattern = ".*".join(map(re.escape, text.split("...")))
    noted = r"(\nopintercept: .*)?"  # which hook it was
    with pytest.raises(Exception, match=f"(?s)^{pattern}{noted}$") as caught:
        PROGRAMS[title]()
    assert type(caught.value).__name__ == kind
