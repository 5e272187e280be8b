"""Whether the process is quiet: whether no thread can be running an operator, so that kernels may be removed.

Invariant: in doubt the answer is no.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

# A thread that never runs an operator has this attribute, set to True.
RUNS_NO_OPERATOR = "runs_no_operator"
# Threads of other projects that run none, by the module of their class or of a function on their stack: tqdm's monitor
# outlives every progress bar, and execnet's reader of messages lives as long as a worker of pytest-xdist.
_CLASSES_IN = ("tqdm._monitor",)
_FUNCTIONS_IN = "execnet.gateway_base"


def is_quiet(kernel: CodeType | None, threads_before: frozenset[str]) -> bool:
    """Whether no other thread can be running an operator, and this one runs none of our kernels.

    Args:
        kernel: The code of our kernels; None before the first was made.
        threads_before: The process's native threads at a time when no task of `torch.jit.fork` had our scope.
    """
    _let_threads_start()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    here = threading.get_ident()
    frame: FrameType | None = None
    try:
        for ident, frame in sys._current_frames().items():  # noqa: B007 - walked below
            harmless = ident == here or _runs_no_operator(threads.get(ident))
            while frame is not None:
                if frame.f_code is kernel:
                    return False
                if not harmless and frame.f_globals.get("__name__") != _FUNCTIONS_IN:
                    return False
                frame = frame.f_back
    finally:
        del frame  # our own is among them, and a frame that holds itself is garbage
    return not has_forked_tasks(threads_before)


def _runs_no_operator(thread: threading.Thread | None) -> bool:
    return getattr(thread, RUNS_NO_OPERATOR, False) or type(thread).__module__ in _CLASSES_IN


def _thread_states() -> int:
    """How many threads Python knows of, including those that have yet to run their first line."""
    states, state = 0, _first_state(_interpreter())
    while state:
        states, state = states + 1, _next_state(state)
    return states


def _python_api(name: str, argument: Any) -> Any:
    function = getattr(ctypes.pythonapi, name)
    function.argtypes, function.restype = argument, ctypes.c_void_p
    return function


# Part of Python's stable interface for debuggers.
_interpreter = _python_api("PyInterpreterState_Get", [])
_first_state = _python_api("PyInterpreterState_ThreadHead", [ctypes.c_void_p])
_next_state = _python_api("PyThreadState_Next", [ctypes.c_void_p])
_without_frames = 0  # of threads that Python did not start, such as autograd's for a device


def _let_threads_start() -> None:
    """Wait for threads that were started and have no frame yet to reach their first line.

    A thread of C++ that was once in Python has no frame either, and never gets one: it is waited for once.
    """
    global _without_frames
    end = time.monotonic() + 0.25
    while (missing := _thread_states() - len(sys._current_frames())) > _without_frames:
        if time.monotonic() > end:
            _without_frames = missing
            return
        time.sleep(0.001)


def native_threads() -> frozenset[str]:
    """The operating system's threads of the process; empty where the system does not list them, as on macOS."""
    try:
        return frozenset(os.listdir("/proc/self/task"))
    except OSError:
        return frozenset()


def has_forked_tasks(threads_before: frozenset[str]) -> bool:
    """Whether torch's pool for `torch.jit.fork` exists. Its threads run operators without Python frames.

    Where the system does not list threads the answer is no.
    """
    threads = native_threads()
    if threads - threads_before:
        time.sleep(0.005)  # a thread of the pool gives itself its name as its first act
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().strip() == "PTThreadPool":
                    return True
        except OSError:  # that thread has just ended
            continue
    return False
