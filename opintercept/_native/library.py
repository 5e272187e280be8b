"""The library of this process: looked for once, loaded, and shared by the engine and the hooks.

Invariant: `find` builds nothing and raises nothing. It looks for the library once in a process, since every interceptor
asks; after that only `need`, which may build the library, changes its answer.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._core.fork import in_child
from opintercept._native import build
from opintercept._origin import stack

SWITCH = "OPINTERCEPT_COMPILED"
"""An environment variable; `0` keeps `find` from looking."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a process knows of its library.

    Attributes:
        module: The library; None if there is none that works.
        path: Where it lies.
        reason: Why there is none, in one line.
        broken: Whether there is one that does not work.
    """

    module: Any | None
    path: Path | None = None
    reason: str = ""
    broken: bool = False


known: Library | None = None
lock = threading.RLock()
"""Held while the library is looked for, built or set up. A signal handler may ask for it meanwhile."""


@in_child
def _renew_lock() -> None:
    global lock
    lock = threading.RLock()


def find() -> Library:
    """Return the library that an earlier build or a wheel has left for this environment."""
    global known
    found = known
    if found is None:
        with lock:
            found = known
            if found is None:
                found = _look()
                known = found
    return found


def need() -> Any:
    """Return the module of the library, which is built if there is none.

    Raises:
        OpInterceptError: It cannot be built or loaded here.
    """
    global known
    with lock:
        found = known
        if found is None or found.module is None:
            found = existing()
            if found.module is None:
                known = known or found  # `find` in other threads does not wait for the build
                path = build.built_library()
                found = Library(build.load_library(path), path)
            known = found
        return found.module


def script() -> str:
    """What TorchScript runs on this thread, see `stack.script`. Any engine may ask, so that all tell the same names."""
    module = find().module
    if module is not None:
        stack.script = module.script
    return "" if module is None else str(module.script())


stack.script = script


def reject(reason: str) -> None:
    """Do without the library from now on, since it does not work here."""
    global known
    known = _told(Library(None, reason=reason, broken=True))


def lacks_gil() -> str:
    """Why blocks cannot be entered in this process and the library would change it, in one line; "" if they can be."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return ""
    return "opintercept needs the GIL, and this free-threaded Python runs without it; start it with PYTHON_GIL=1"


def existing() -> Library:
    """Load the first library that works, that of a wheel or that of the cache."""
    reason, broken = "", False
    for place in (build.packaged_library, build.cached_library):
        try:
            path = place()
            if build.is_whole(path):
                return Library(build.load_library(path), path)
            if path.exists():
                reason, broken = f"{str(path)!r} is damaged; run `opintercept build`", True
        except OpInterceptError as error:
            reason, broken = str(error), True
        except Exception as error:  # a folder that this process may not read, no home, or no way to call a compiler
            reason = reason or f"no library can be looked for: {error}"
    return Library(None, reason=reason or _missing(), broken=broken)


def _look() -> Library:
    if os.environ.get(SWITCH) == "0":
        return _told(Library(None, reason=f"{SWITCH}=0 is set"))
    lacking = lacks_gil()  # to load the library would bring the GIL back
    return _told(Library(None, reason=lacking) if lacking else existing())


def _missing() -> str:
    folder = build.cache_folder()
    environment = f"torch {torch.__version__} and Python {platform.python_version()}"
    if any(folder.glob("*.so")):
        return (
            f"no library in {folder} was built for {environment}, this kind of processor and version of opintercept; "
            "`opintercept build` builds it"
        )
    return f"no library has been built for {environment}; `opintercept build` builds it"


def _told(found: Library) -> Library:
    """Log why there is no library. Only one that is there and does not work is worth a warning."""
    if found.module is None:
        logging.getLogger("opintercept").log(
            logging.WARNING if found.broken else logging.INFO,
            "opintercept: kernels run in Python and hooks use torch's operators, since %s",
            found.reason,
        )
    return found
