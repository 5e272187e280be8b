"""`Profiler`: torch's profiler beside a block, with marks around what the block sees.

Functions in C that Python calls are no operators: Python's own profile function marks those that may hold kernels.
Invariant: neither profiler is on outside of `start` and `stop`, and a profile function of the program stays.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

import torch
from torch.profiler import record_function

from opintercept._core.errors import OpInterceptError
from opintercept._engines.dynamo import keep_out
from opintercept._engines.profiled.records import CALLED, COLLECTING, SEEN, Ran, read, watched

_INDUCTORS = ".kernel"  # ends the names of modules that Inductor generates, whose function has that name, too
# Modules of which no function in C holds kernels that torch does not record, and ours.
_PLAIN = sys.stdlib_module_names | {"torch", "opintercept", "opintercept_compiled"}

# Private. It marks without an operator of its own; where a torch lacks it, `record_function` does the same.
_mark: Callable[[str], Any] = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", record_function)


class Profiler:
    """A stretch of the program under the profilers.

    Args:
        everywhere: Whether to look at all threads.
    """

    def __init__(self, everywhere: bool) -> None:
        self._everywhere = everywhere
        self._torchs: Any = None
        self._functions: _Functions | None = None
        self._watches: frozenset[str] | None = None
        self._collecting: Any = None
        self.thread = 0

    def start(self) -> bool:
        """Begin. Returns whether functions in C are looked at: the program may have a profile function of its own.

        Raises:
            OpInterceptError: Torch's profiler is in use; it has one at a time.
        """
        if torch._C._autograd._profiler_enabled():  # private; there is no public question
            raise OpInterceptError("torch's profiler must be free for an audit; end the one that runs")
        # Private, and the only way to all threads, and to the overloads of operators.
        config = torch._C._profiler._ExperimentalConfig(
            profile_all_threads=self._everywhere, capture_overload_names=True
        )
        self._torchs = torch.profiler.profile(acc_events=True, experimental_config=config)
        self.thread = threading.get_ident()
        self._torchs.start()
        gc.callbacks.append(self._collect)
        if sys.getprofile() is None:
            self._functions = _Functions()
            self._functions.start(self._everywhere)
        return self._functions is not None

    def mark(self, op: str) -> Any:
        """A mark around a call that is seen, to be entered before it runs and left afterwards."""
        if self._watches is None:
            self._watches = watched()
        return _mark(f"{SEEN}{op}")

    def _collect(self, phase: str, info: Any) -> None:
        """Mark what the collector of garbage takes: some milliseconds, in whichever operator it comes."""
        if phase == "start":
            self._collecting = _mark(COLLECTING)
            self._collecting.__enter__()
        elif self._collecting is not None:
            self._collecting.__exit__(None, None, None)
            self._collecting = None

    def stop(self, replays: bool) -> tuple[Ran, Ran, int]:
        """End, in the thread that has begun.

        Args:
            replays: Whether blocks saw calls of CUDA graphs that were replayed.

        Returns:
            What ran on the host, what on devices, and for how many nanoseconds torch.compile compiled.
        """
        if self._functions is not None:
            self._functions.stop()
        gc.callbacks.remove(self._collect)
        self._torchs.stop()
        # Not `events()`, which makes an object of Python for each, and leaves out what links kernels to launches.
        return read(self._torchs.profiler.kineto_results.events(), replays, self._watches or ())


class _Functions:
    """Marks each function in C that Python calls and that may hold kernels which torch does not record."""

    def __init__(self) -> None:
        self._on = True
        self._here = threading.local()
        self._known: dict[str, bool] = {}
        self._called = keep_out(self._note)  # one object, by which `stop` knows it

    def start(self, everywhere: bool) -> None:
        if everywhere:
            getattr(threading, "setprofile_all_threads", threading.setprofile)(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        self._on = False
        if threading.getprofile() is self._called:
            getattr(threading, "setprofile_all_threads", threading.setprofile)(None)
        if sys.getprofile() is self._called:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call":
            module = getattr(function, "__module__", None)
            module = getattr(module, "__name__", module)  # psutil puts the module itself there
            if not isinstance(module, str) or not self._on:
                return
            if module not in self._known:
                self._known[module] = _may_hold_kernels(module)
            if self._known[module]:
                mark = _mark(f"{CALLED}{_name_of(function, module, frame)}")
                mark.__enter__()
                self._marks().append((function, mark))
        elif event in ("c_return", "c_exception"):
            marks = self._marks()
            if marks and marks[-1][0] is function:
                marks.pop()[1].__exit__(None, None, None)
        elif not self._on and sys.getprofile() is self._called:
            sys.setprofile(None)  # of a thread that goes on after `stop`

    def _marks(self) -> list[tuple[Any, Any]]:
        try:
            return self._here.marks  # type: ignore[no-any-return]
        except AttributeError:
            self._here.marks = []
            return self._here.marks  # type: ignore[no-any-return]


def _may_hold_kernels(name: str) -> bool:
    """Whether a module is Inductor's, was built with torch's libraries, or is not among those that are imported."""
    if name.partition(".")[0] in _PLAIN:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or name.endswith(_INDUCTORS):
        return name not in sys.modules or file is not None
    try:
        return re.search(rb"lib(?:torch|c10)[\w.]*\.(?:so|dylib)", Path(file).read_bytes()) is not None
    except OSError:
        return True


def _name_of(function: BuiltinFunctionType, module: str, frame: FrameType) -> str:
    """The function's name; for a kernel of Inductor, all of which have one name, that among the caller's globals."""
    if module.endswith(_INDUCTORS):
        for name, value in tuple(frame.f_globals.items()):
            if value is function:
                return f"inductor::{name}"
    return f"{module}.{function.__name__}"
