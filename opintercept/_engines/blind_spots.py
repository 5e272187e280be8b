"""Compiled code that bypasses the dispatcher, where no engine sees it: it is counted in `opaque`, with one warning.

Invariant: torch's entry points to such code are wrapped only while a block is entered. None of them is an operator.
"""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any

import torch

from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out
from opintercept._errors import OpInterceptWarning
from opintercept._fork import in_child

_MESSAGES = {
    "inductor::aoti_package": "an AOTInductor package ran in a block, and calls kernels without the dispatcher: none "
    "of its matmuls are seen; run the exported program, program.module(), to see them",
    "inductor::cpp_wrapper": "code compiled with cpp_wrapper ran in a block, and calls kernels without the dispatcher: "
    "none of its matmuls are seen; compile with cpp_wrapper=False to see them",
    "cuda::graph_replay": "a CUDA graph was replayed in a block, and a replay runs no operators: its matmuls were seen "
    "when it was captured, if that was in a block",
}

# Where Python enters such code, by path below torch._C. Private; what a torch lacks is skipped.
_ENTRIES = {
    "_aoti.AOTIModelPackageLoader.boxed_run": "inductor::aoti_package",
    "_aoti.AOTIModelPackageLoader.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCpu.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCuda.run": "inductor::aoti_package",
    # The first function that the Python side of such code calls with its inputs.
    "_aoti.unsafe_alloc_void_ptrs_from_tensors": "inductor::cpp_wrapper",
    "_CUDAGraph.replay": "cuda::graph_replay",
}

_lock = threading.RLock()  # reentrant: a signal handler may enter a block while its thread enters one
_users: set[object] = set()
_wrappers: dict[tuple[Any, str], tuple[Any, Any]] = {}  # each with what it wraps, by its place
_in_place: list[tuple[Any, str, Any]] = []
_warned: set[str] = set()


def enter(user: object) -> None:
    """Wrap the entry points until `user` leaves."""
    with _lock:
        _users.add(user)
        if not _in_place:
            _wrap()


def leave(user: object) -> None:
    """End an `enter`. Can be repeated."""
    with _lock:
        _users.discard(user)
        if not _users:
            # A single C call, so that neither an interrupt nor a signal handler comes in between.
            deque(chain(starmap(setattr, _in_place), map(operator.call, (_in_place.clear,))), maxlen=0)


def _wrap() -> None:
    originals, wrappers = [], []
    for owner, attribute, name in _owners():
        original = owner.__dict__.get(attribute)
        if original is not None:
            known, wrapper = _wrappers.get((owner, attribute), (None, None))
            if known is not original:
                wrapper = _telling(original, name)
                _wrappers[owner, attribute] = original, wrapper
            originals.append((owner, attribute, original))
            wrappers.append((owner, attribute, wrapper))
    _in_place.extend(map(operator.itemgetter(0), zip(originals, starmap(setattr, wrappers), strict=True)))  # as above


@functools.cache
def _owners() -> list[tuple[Any, str, str]]:
    """The entry points: the class or module, the attribute, and the name under which it is counted."""
    found = []
    for path, name in _ENTRIES.items():
        *owners, attribute = path.split(".")
        owner: Any = torch._C
        for part in owners:
            owner = getattr(owner, part, None)
        if hasattr(owner, "__dict__"):
            found.append((owner, attribute, name))
    return found


def _telling(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        _tell(name)
        return original(*args, **kwargs)

    return keep_out(run)


def _tell(name: str) -> None:
    watchers = _scope.current().active()
    for watcher in watchers:
        watcher.pipeline.count_opaque(name)
    if watchers and name not in _warned:
        _warned.add(name)
        warnings.warn(_MESSAGES[name], OpInterceptWarning, stacklevel=3)


@in_child
def _forget_parent() -> None:
    # A forked child ignores its parent's blocks.
    global _lock
    _lock = threading.RLock()
    for user in tuple(_users):
        leave(user)
