"""Compiled code that bypasses the dispatcher, where no engine sees it: it is counted in `opaque`, with one warning.

Invariant: torch's entry points to such code are wrapped only while a block is entered. None of them is an operator.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opintercept._core.errors import OpInterceptWarning, caller_level
from opintercept._engines import scope as _scope
from opintercept._engines.base import Watcher
from opintercept._engines.dynamo import keep_out
from opintercept._engines.patches import Place

_MESSAGES = {
    "inductor::aoti_package": "an AOTInductor package ran in a block, and calls kernels without the dispatcher: none "
    "of its calls are seen; run the exported program, program.module(), to see them",
    "inductor::cpp_wrapper": "code compiled with cpp_wrapper ran in a block, and calls kernels without the dispatcher: "
    "none of its calls are seen; compile with cpp_wrapper=False to see them",
    "cuda::graph_replay": "a CUDA graph was replayed in a block that had not seen it captured, and a replay runs no "
    "operators: none of its matmuls are seen; capture it in a block of the same interceptor to see them",
}

# Where Python enters such code, by path below torch._C. Private; what a torch lacks is skipped.
_ENTRIES = {
    "_aoti.AOTIModelPackageLoader.boxed_run": "inductor::aoti_package",
    "_aoti.AOTIModelPackageLoader.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCpu.run": "inductor::aoti_package",
    "_aoti.AOTIModelContainerRunnerCuda.run": "inductor::aoti_package",
    # The first function that the Python side of such code calls with its inputs.
    "_aoti.unsafe_alloc_void_ptrs_from_tensors": "inductor::cpp_wrapper",
}

_warned: set[str] = set()


@functools.cache
def entries() -> list[Place]:
    """The entry points: the name under which each is counted, the class or module, the attribute, and a wrapper."""
    found: list[Place] = []
    for path, name in _ENTRIES.items():
        *owners, attribute = path.split(".")
        owner: Any = torch._C
        for part in owners:
            owner = getattr(owner, part, None)
        if hasattr(owner, "__dict__"):
            found.append((name, owner, attribute, functools.partial(_telling, name)))
    return found


def _telling(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        tell(name, _scope.current().active())
        return original(*args, **kwargs)

    return keep_out(run)


def tell(name: str, watchers: Iterable[Watcher]) -> None:
    """Count what watchers do not see, and warn once."""
    for watcher in (watchers := tuple(watchers)):
        watcher.pipeline.count_unseen(name)
    if watchers and name not in _warned:
        _warned.add(name)
        warnings.warn(_MESSAGES[name], OpInterceptWarning, stacklevel=caller_level())
