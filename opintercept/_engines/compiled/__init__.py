"""What `engine="compiled"` has in C++, built by torch with the machine's compiler when first asked for.

Each source is named after the Python file of which it does the same: `kernels.cpp` has the kernel of
`kernels._make_kernel`, `origin.cpp` has `_origin.walk`, `call.cpp` has `_call.look`.
Invariant: nothing is built, nor torch's machinery for it imported, before somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from opintercept import _call, _origin, _pipeline
from opintercept._engines import kernels, scope
from opintercept._engines.dynamo import keep_out
from opintercept._errors import OpInterceptError

_SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
_LONGEST_BUILD = 600.0  # seconds


class Extension:
    """The extension of this process.

    Attributes:
        running: See `kernels.Compiled`.
        walk: As `_origin.walk`.
        look: As `_call.look`.
    """

    def __init__(self, extension: Any) -> None:
        self._extension = extension
        self._prepared: dict[str, Any] = {}  # by overload, made once; None for those that are left to Python
        # What C++ calls has no frame of ours above it that keeps Dynamo out.
        called = (scope.Scope.watch, _pipeline.run, scope.current, _origin.backward_phase)
        functions = [keep_out(function) for function in called]
        extension.setup(scope.state, scope.CARRIED, scope.Scope, scope.Watch, *functions)
        scope.state.told = extension.watch_all_threads
        scope.state.tell()
        scope.state.unseen_by_compiled = extension.unseen
        self.running: Callable[[], int] = extension.running
        extension.set_up_look(_call.look, torch.Tensor, torch.nn.Parameter)
        self.look: Callable[..., Any] = extension.look
        has_walk = extension.set_up_walk(*_origin.WALKED_CODE, torch.nn.Module, _origin.NOT_SOURCE)
        self.walk: Callable[[], _origin.Walked] = extension.walk if has_walk else _origin.walk

    def installation(self, name: str, overload: torch._ops.OpOverload) -> Callable[[], Any] | None:
        """See `kernels.Compiled`."""
        schema = overload._schema
        names = (schema.name, schema.overload_name)
        if name not in self._prepared:
            redispatch = _from_raw(kernels.redispatcher(name, overload))
            self._prepared[name] = self._extension.prepare(*names, name, overload, redispatch)
        prepared = self._prepared[name]
        return None if prepared is None else functools.partial(self._extension.install, *names, prepared)


def _from_raw(redispatch: Callable[..., Any]) -> Callable[..., Any]:
    keyset = torch._C.DispatchKeySet.from_raw_repr

    def from_raw(raw: int, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return redispatch(keyset(raw), *args, **kwargs)
        finally:
            del args, kwargs  # as in `_pipeline.run`

    return keep_out(from_raw)


@functools.cache
def load() -> Extension:
    """The compiled kernels of this process; the first process on a machine takes a minute to build them.

    Waits, as torch does, for another process that builds them.

    Raises:
        OpInterceptError: They cannot be built here, or a process that was killed while it built them left its lock.
    """
    # The cache is shared by all versions of torch, and by those of Python whose number begins alike; their binary
    # interfaces differ, and `origin.cpp` reads what Python may change in any version.
    name = "opintercept_" + re.sub(r"\W", "_", f"{torch.__version__}_{platform.python_version()}")
    options = [] if sys.platform == "win32" else ["-O2"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about compilers that torch does not know
            from torch.utils import cpp_extension  # wants setuptools, and takes half a second

            _refuse_old_lock(Path(cpp_extension._get_build_directory(name, verbose=False)) / "lock")
            extension = cpp_extension.load(name, [str(source) for source in _SOURCES], extra_cflags=options)
        return Extension(extension)
    except OpInterceptError:
        raise
    except Exception as exception:
        lines = str(exception).splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0] if lines else type(exception).__name__)
        raise OpInterceptError(
            "compiled kernels need a C++ compiler, ninja, setuptools and the headers of Python and of torch, "
            f'got: {reason.strip()}; use engine="kernel", which does the same in Python'
        ) from exception


def _refuse_old_lock(lock: Path) -> None:
    """torch waits for a lock to go, for ever; the path is private to torch, and without it load would wait too."""
    with contextlib.suppress(OSError):
        age = time.time() - lock.stat().st_mtime
        if age > _LONGEST_BUILD:
            raise OpInterceptError(
                f"compiled kernels must not be locked by a build that has ended, got {str(lock)!r} of {age:.0f} s ago; "
                "remove it"
            )
