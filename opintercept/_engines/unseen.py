"""Compiled code that goes past the dispatcher, where no engine can see it: a warning, and a count in `opaque`.

Invariant: torch's ways into such code are wrapped while a block is entered, and only then; none of them is an operator.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from opintercept._engines import scope as _scope
from opintercept._engines.dynamo import keep_out
from opintercept._errors import OpInterceptWarning

_MESSAGES = {
    "inductor::aoti_package": "an AOTInductor package ran in a block, and calls kernels without the dispatcher: none "
    "of its matmuls are seen; run the exported program, program.module(), to see them",
    "inductor::cpp_wrapper": "code compiled with cpp_wrapper ran in a block, and calls kernels without the dispatcher: "
    "none of its matmuls are seen; compile with cpp_wrapper=False to see them",
    "cuda::graph_replay": "a CUDA graph was replayed in a block, and a replay runs no operators: its matmuls were seen "
    "when it was captured, if that was in a block",
}

# Private, by path below torch._C: where each is entered from Python. What a torch lacks is not told.
_ENTRIES = {
    "_aoti.AOTIModelPackageLoader.boxed_run": "inductor::aoti_package",
    "_aoti.AOTIModelPackageLoader.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCpu.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCuda.run": "inductor::aoti_package",
    # The first thing that the Python side of such code calls, with its inputs.
    "_aoti.unsafe_alloc_void_ptrs_from_tensors": "inductor::cpp_wrapper",
    "_CUDAGraph.replay": "cuda::graph_replay",
}

_lock = threading.Lock()
_users = 0
_wrappers: dict[str, tuple[Any, Callable[..., Any]]] = {}  # with what they wrap, by path
_in_place: list[tuple[Any, str, Any]] = []
_warned: set[str] = set()


def enter() -> None:
    """Begin to tell; until `leave`."""
    global _users
    with _lock:
        if not _users:
            _wrap()
        _users += 1


def leave() -> None:
    """End an `enter`."""
    global _users
    with _lock:
        _users -= 1
        if not _users:
            _unwrap()


def _wrap() -> None:
    for path, name in _ENTRIES.items():
        *owners, attribute = path.split(".")
        owner: Any = torch._C
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, "__dict__", {}).get(attribute)
        if original is not None:
            known, wrapper = _wrappers.get(path, (None, None))
            if known is not original:
                wrapper = _telling(original, name)
                _wrappers[path] = original, wrapper
            setattr(owner, attribute, wrapper)
            _in_place.append((owner, attribute, original))


def _unwrap() -> None:
    while _in_place:
        setattr(*_in_place.pop())


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


def _forget_parent() -> None:
    # The parent's blocks do not count in a forked child.
    global _lock, _users
    _lock = threading.Lock()
    _users = 0
    _unwrap()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forget_parent)
