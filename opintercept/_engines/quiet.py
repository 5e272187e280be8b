"""Whether the process is quiet: whether no thread can be running an operator, so that kernels may be removed.

Invariant: in doubt the answer is no.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
import time
from _thread import _count as running_threads
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, compress
from types import CodeType, FrameType
from typing import Any

from opintercept._core.fork import in_child

# A thread that never runs an operator has this attribute, set to True.
RUNS_NO_OPERATOR = "runs_no_operator"
# Threads of other projects that run none, by the module of their class or of a function on their stack: tqdm's monitor
# outlives every progress bar, and execnet's reader of messages lives as long as a worker of pytest-xdist. A thread of
# `uninterrupted` has nothing else on its stack once its work is done.
_CLASSES_IN = ("tqdm._monitor",)
_FUNCTIONS_IN = ("execnet.gateway_base", "opintercept._core.exits")


def run_if_quiet(kernel: CodeType | None, threads_before: frozenset[str], steps: Iterable[Callable[[], Any]]) -> bool:
    """Run `steps` if no other thread can be running an operator, and this one runs none of our kernels.

    No thread comes in between the last look at the threads and the last step. A thread that has yet to begin does not
    matter: it finds all steps done.

    Args:
        kernel: The code of our kernels; None before the first was made.
        threads_before: The process's native threads at a time when no task of `torch.jit.fork` had our scope.
        steps: Callables of C that keep the GIL.

    Returns:
        Whether the steps have run.
    """
    if sys.is_finalizing():  # the kernels go with the process, and what Python has built in may be gone already
        return False
    done: list[bool] = []
    every: list[Callable[[], Any]] = [*steps, partial(done.append, True)]
    calls: Iterator[Any] = map(operator.call, every)
    for _ in range(_TRIES):
        harmless = _harmless_threads(kernel)
        if harmless is None or has_forked_tasks(threads_before):
            return False
        # All of this in C, so that no other thread runs meanwhile.
        looks = map(operator.call, (sys._current_frames,))
        _without_gc(chain.from_iterable(compress((calls,), map(harmless.__eq__, map(frozenset, looks)))))
        if done:
            return True
    return False


_TRIES = 8  # how often a thread may begin or end while we look


def _harmless_threads(kernel: CodeType | None) -> frozenset[int] | None:
    """The threads that have Python frames; None if one of all threads may be running an operator."""
    global _in_c_before
    end = time.monotonic() + 0.25
    while True:
        known = {thread.ident: thread for thread in threading.enumerate()}
        frames: dict[int, FrameType] = {}
        frame: FrameType | None = None
        try:
            _without_gc(map(frames.update, map(operator.call, (sys._current_frames,))))
            for ident, frame in frames.items():  # noqa: B007 - walked below
                harmless = ident == threading.get_ident() or _runs_no_operator(known.get(ident))
                while frame is not None:
                    if frame.f_code is kernel:
                        return None
                    if not harmless and frame.f_globals.get("__name__") not in _FUNCTIONS_IN:
                        return None
                    frame = frame.f_back
            threads = frozenset(frames)
        finally:
            del frame
            frames.clear()  # our own is among them, and a frame that holds itself is garbage
        in_c = _in_c(known, threads)
        if in_c <= 0:
            _in_c_before = 0
            return threads
        if in_c <= _in_c_before or time.monotonic() > end:
            _in_c_before = in_c
            return None
        time.sleep(0.001)


_in_c_before = 0  # threads that were waited for and went on
_lost = 0  # threads of a parent process, which Python goes on counting in a forked child


def _in_c(known: dict[int | None, threading.Thread], with_frames: frozenset[int]) -> int:
    """How many threads run a function of C and so have no frame; also one that is ending."""
    return running_threads() - _lost - _started(known) - len(with_frames - known.keys())


def _started(known: dict[int | None, threading.Thread]) -> int:
    others = (type(threading.main_thread()), threading._DummyThread)  # which the `_thread` module did not start
    return sum(ident is not None and not isinstance(thread, others) for ident, thread in known.items())


@in_child
def _forget_parent() -> None:
    global _in_c_before, _lost
    _in_c_before = 0
    _lost = running_threads() - _started({thread.ident: thread for thread in threading.enumerate()})


def _runs_no_operator(thread: threading.Thread | None) -> bool:
    return getattr(thread, RUNS_NO_OPERATOR, False) or type(thread).__module__ in _CLASSES_IN


def _without_gc(calls: Iterator[Any]) -> None:
    """Make calls to functions of C, one right after the other, without the garbage collector.

    Up to Python 3.11 it runs wherever an object is made. In `sys._current_frames` it may wait for a lock that this
    thread holds (python #106883), and it lets other threads run.
    """
    if sys.version_info >= (3, 12) or not gc.isenabled():
        deque(calls, maxlen=0)
        return
    try:
        deque(chain(map(operator.call, (gc.disable,)), calls, map(operator.call, (gc.enable,))), maxlen=0)
    finally:
        gc.enable()


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
