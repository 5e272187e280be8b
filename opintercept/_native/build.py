"""Builds the C++ library with the machine's compiler, once for each environment, finds it again, and loads it.

Invariant: no process finds a part of a library. `torch.utils.cpp_extension` is not used: its import takes a second,
and a build of it that is killed leaves a lock that it waits for without end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from opintercept._errors import OpInterceptError

_PACKAGE = Path(__file__).parents[1]
SOURCES = [*sorted((_PACKAGE / "_engines/compiled").glob("*.cpp")), *sorted((_PACKAGE / "_native").glob("*.cpp"))]
_MODULE = "opintercept_compiled"
# Torch's headers need C++20 since 2.12. Those of 2.11 compile under it, too.
COMPILE = ["-O2", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={_MODULE}"]
# What a source needs beside `COMPILE`, by its name.
EXTRA = {"values.cpp": ["-O3"]}
# The vector instructions that `values.cpp` may use, by torch's name for the best that the processor has.
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
VECTORS = {"AVX2": _AVX2, "AVX512": [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]}
LINK = ["-shared", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
if sys.platform == "darwin":
    LINK.append("-Wl,-undefined,dynamic_lookup")  # Python's own symbols
_PYTHON = sysconfig.get_path("include", "posix_prefix")  # other schemes may name a folder without the headers
INSTEAD = 'use engine="kernel", which does the same in Python'
UNFINISHED = ".building"
_NO_ROOM = ("No space left on device", "Disk quota exceeded")  # as compilers and linkers say it


def built_library() -> Path:
    """The library for this environment, built if it does not exist."""
    library = _cache() / f"{library_name()}.so"
    if not is_whole(library):
        _build(library)
    return library


def find_library() -> Any | None:
    """Load the library that an earlier build has left for this environment; None if there is none.

    Raises:
        OpInterceptError: It cannot be loaded.
    """
    try:
        library = _cache() / f"{library_name()}.so"
        found = is_whole(library)
    except (OSError, RuntimeError):  # a cache that this process may not read, or no home
        return None
    return load_library(library) if found else None


def _cache() -> Path:
    """Our own folder in the place where torch keeps the extensions that it builds."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root).absolute() / "opintercept"
    if sys.platform == "darwin":
        root = "~/Library/Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "torch_extensions" / "opintercept"


def library_name() -> str:
    """A name that stands for everything the library depends on, so that any process can use a file with this name.

    It includes Python's full version, since `stack.cpp` reads internals that Python may change in any version.
    """
    known = hashlib.sha256()
    for source in SOURCES:
        known.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    for part in (
        *COMPILE,
        *LINK,
        *(flag for source in SOURCES for flag in _extra(source)),
        *_compiler(),
        *_marks(_compiler()),
        torch.__version__,
        torch.version.git_version,
        torch.compiled_with_cxx11_abi(),
        torch.__file__,
        sys.version,
        sysconfig.get_config_var("SOABI"),
        _PYTHON,
        platform.machine(),
    ):
        known.update(f"{part}\0".encode(errors="surrogateescape"))
    readable = re.sub(r"[^\w.+]", "_", f"torch{torch.__version__}-{sys.implementation.cache_tag}")
    return f"{readable}-{known.hexdigest()[:16]}"


def _extra(source: Path) -> list[str]:
    """The flags of one source. Those for vector instructions make libraries of processors differ in their names."""
    flags = EXTRA.get(source.name)
    return [] if flags is None else [*flags, *VECTORS.get(torch.backends.cpu.get_cpu_capability(), [])]


def _compiler() -> list[str]:
    """The command of the compiler, found as torch finds it."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _marks(command: list[str]) -> Iterator[str]:
    """Tell versions of a compiler apart without running it."""
    for word in command:
        path = shutil.which(word)
        if path is not None:
            status = os.stat(path)
            yield f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"


def checksum_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _sum_of(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def is_whole(library: Path) -> bool:
    """Whether the library is complete to its last byte. Loading a part of one would crash the process."""
    try:
        return _sum_of(library) == checksum_file(library).read_text()
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _only_builder(library: Path) -> Iterator[bool]:
    """Let one process build at a time, with a lock that the system releases however its holder ends.

    Yields:
        Whether the lock is held. Some network file systems have no locks; then several processes may build at once,
        and the last one's library stays.
    """
    import fcntl

    with open(library.with_name(f"{library.name}.lock"), "a+") as lock:
        held = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            logging.getLogger("opintercept").warning(
                "opintercept: waiting for process %s, which builds the compiled kernels in %s",
                lock.read().strip() or "?",
                library.parent,
            )
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            held = False
        try:
            if held:
                lock.truncate(0)
                lock.write(f"{os.getpid()}\n")
                lock.flush()
            yield held
        finally:
            if held:
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not release it if a child was forked meanwhile


def _build(library: Path) -> None:
    """Build the library in a temporary folder and move it in one step, so that no process finds a part of it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(library) as alone:
        if is_whole(library):  # another process built it while we waited
            return
        if alone:
            for left in library.parent.glob(f"{library.name}.*{UNFINISHED}"):  # from processes that were killed
                shutil.rmtree(left, ignore_errors=True)
        # Compilers that were killed may still write for a moment.
        with tempfile.TemporaryDirectory(
            UNFINISHED, f"{library.name}.", library.parent, ignore_cleanup_errors=True
        ) as folder:
            built = Path(folder, library.name)
            _compile(built)
            if f"{library_name()}.so" != library.name:
                raise RuntimeError("the sources changed while they were compiled")
            checksum_file(built).write_text(_sum_of(built))
            # The checksum first: a library beside the checksum of another is built again.
            os.replace(checksum_file(built), checksum_file(library))
            os.replace(built, library)


def _compile(library: Path) -> None:
    compiler, folder = _compiler(), library.parent
    torchs = Path(torch.__file__).parent
    includes = [torchs / "include", torchs / "include/torch/csrc/api/include", _PYTHON]
    flags = [*COMPILE, *(word for path in includes for word in ("-isystem", str(path)))]
    objects = [f"{source.stem}.o" for source in SOURCES]
    commands = zip(SOURCES, objects, strict=True)
    _run([[*compiler, *flags, *_extra(source), "-c", str(source), "-o", made] for source, made in commands], folder)
    _run([[*compiler, *objects, f"-L{torchs / 'lib'}", *LINK, "-o", library.name]], folder)


def _run(commands: list[list[str]], folder: Path) -> None:
    """Run commands in parallel, at most `MAX_JOBS` at a time, as torch's own builds do."""
    most = os.environ.get("MAX_JOBS", "")
    jobs = max(1, int(most)) if most.isdigit() else len(commands)
    # Compilers write much to TMPDIR; here it is removed with the folder. `_fail` relies on the C locale.
    environment = os.environ | {"TMPDIR": str(folder), "LC_ALL": "C"}
    for first in range(0, len(commands), jobs):
        with contextlib.ExitStack() as stack:
            running = []
            for command in commands[first : first + jobs]:
                running.append(stack.enter_context(_start(command, folder, environment)))
                stack.callback(_stop, running[-1])
            for process in running:
                output = process.communicate()[0].decode(errors="replace")
                if process.returncode:
                    _fail(output.strip() or f"{process.args!r} ended with {process.returncode}", folder)


def _start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it can be stopped with the processes that it starts
        )
    except OSError as exception:  # no such compiler
        raise RuntimeError(str(exception)) from exception


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _fail(output: str, folder: Path) -> NoReturn:
    """Raise an error that says in one line why a compiler or linker failed.

    Raises:
        OSError: There is no room in the folder.
        RuntimeError: Anything else.
    """
    # A linker that runs out of space may crash with a bus error instead of a message.
    if any(text in output for text in _NO_ROOM) or shutil.disk_usage(folder).free < 1 << 20:
        raise OSError(errno.ENOSPC, _NO_ROOM[0], str(folder.parent))
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raise RuntimeError(next((line for line in lines if "error:" in line), lines[-1]))


def load_library(library: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as exception:
        raise OpInterceptError(
            f"the compiled kernels cannot be loaded: {exception}; remove {str(library)!r} to build them again, or "
            f"{INSTEAD}"
        ) from exception
    return module
