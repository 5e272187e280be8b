"""Runs the user's program in this process as `python` would run it.

Invariant: the program sees its own argv, `__main__` and path, and its exceptions are printed as in a plain run.
Must not import torch: the program may first set what torch reads at its import.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

from opintercept._core.errors import OpInterceptError

_TORCH_OPS = os.path.join("torch", "_ops.py")
_OURS = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3)) + os.sep  # the folder of the package


def prepare(name: str, arguments: Sequence[str], *, module: bool) -> Callable[[], None]:
    """Set up `__main__` for the program, and return a function that runs it there.

    The program is a script, a folder or an archive with a `__main__.py`, or a module, as for `python -m`.
    """
    source, folder = None, os.getcwd()
    if not module:
        path = os.path.join(os.getcwd(), name)
        if pkgutil.get_importer(name) is None:
            folder = os.path.dirname(os.path.realpath(path))
            try:
                with io.open_code(path) as file:
                    source = file.read()
            except OSError as error:
                raise OpInterceptError(f"cannot read the script {name!r}: {error}") from error
        else:
            folder = path
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    sys.argv[:] = ["-m" if module else name, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = folder
    elif not module and source is None:
        sys.path.insert(0, folder)
    if source is None:
        # Private, but the interpreter itself calls it for these, so its tracebacks show it too.
        as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
        return lambda: _as_plainly(as_main, name if module else "__main__", module)
    main.__file__ = path
    main.__dict__["__cached__"] = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return lambda: _as_plainly(_execute, source, main)


def _execute(source: bytes, main: ModuleType) -> None:
    exec(compile(source, str(main.__file__), "exec", dont_inherit=True), main.__dict__)


def _as_plainly(run: Callable[..., object], *arguments: object) -> None:
    """Run the program, and keep our own frames out of the traceback that the interpreter prints."""
    try:
        run(*arguments)
    except SystemExit:
        raise
    except BaseException as raised:
        theirs, error = sys.excepthook, raised

        def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
            sys.excepthook = theirs
            if value is error:
                clean(error)
                trace = sys.last_traceback = error.__traceback__
            theirs(kind, value, trace)

        sys.excepthook = show
        raise


def clean(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an exception and of its causes.

    An exception of a hook or of opintercept itself keeps the frames below the program, which say where it comes from.
    """
    left, seen = [error], set()
    while left:
        error = left.pop()
        if id(error) in seen:
            continue
        seen.add(id(error))
        notes = getattr(error, "__notes__", ())
        from_hook = isinstance(error, OpInterceptError) or any(str(n).startswith("opintercept: ") for n in notes)
        error.__traceback__ = _without_ours(error.__traceback__, inner=not from_hook)
        left += [e for e in (error.__cause__, error.__context__) if e is not None]
        if isinstance(error, BaseExceptionGroup):
            left += error.exceptions


def _without_ours(trace: TracebackType | None, *, inner: bool) -> TracebackType | None:
    """Return a traceback without the frames above the program and, if `inner`, without our frames below it."""
    entries: list[TracebackType] = []
    ours = False
    while trace is not None:
        code = trace.tb_frame.f_code
        # The mode engine calls on through torch's own Python.
        ours = code.co_filename.startswith(_OURS) or (ours and code.co_filename.endswith(_TORCH_OPS))
        if code in (_as_plainly.__code__, _execute.__code__):
            entries.clear()
        elif not (ours and inner):
            entries.append(trace)
        trace = trace.tb_next
    following = None
    for entry in reversed(entries):
        entry.tb_next = following
        following = entry
    return following
