"""Builds the C++ library with the machine's compiler, once for each torch and Python, and says where it lies.

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
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from opintercept._core.errors import OpInterceptError
from opintercept._native import layout

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = tuple(_PACKAGE / each for each in ("_engines/compiled", "_native", "_native/device", "_native/vectors"))
SOURCES = [source for folder in _FOLDERS for source in sorted(folder.glob("*.cpp"))]
HEADERS = [header for folder in _FOLDERS for header in sorted(folder.glob("*.h"))]
PACKAGED = _PACKAGE / "_native/libraries"  # those of a wheel, see hatch_build.py
_MODULE = "opintercept_compiled"
# Torch's headers need C++20 since 2.12. Those of 2.11 compile under it, too.
COMPILE = ["-O2", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={_MODULE}"]
# The sets of vector instructions for which the sources in `_native/vectors` are compiled, by torch's names.
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
SETS: dict[str, list[str]] = {"DEFAULT": []}
if platform.machine() in ("x86_64", "AMD64", "i686"):
    SETS |= {"AVX2": _AVX2, "AVX512": _AVX512}  # in ascending order, see `vectors/sets.h`
    COMPILE.append("-DOPINTERCEPT_AVX")
LINK = ["-shared", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
if sys.platform == "darwin":
    LINK.append("-Wl,-undefined,dynamic_lookup")  # Python's own symbols
INSTEAD = 'use engine="kernel", which does the same in Python'
UNFINISHED = ".building"
_NO_ROOM = ("No space left on device", "Disk quota exceeded")  # as compilers and linkers say it


def built_library() -> Path:
    """The library for this environment in the cache, built if it does not exist.

    Raises:
        OpInterceptError: It cannot be built here.
    """
    with _explained():
        library = cached_library()
        if not is_whole(library):
            _build(library)
        return library


def build_portable(folder: Path) -> Path:
    """Build what a wheel needs for this torch and Python: a library for all processors of this kind.

    Raises:
        OpInterceptError: It cannot be built here.
    """
    with _explained():
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"{library_name()}.so"
        _make(library)
        return library


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn what goes wrong in a build into one line that names the remedy."""
    try:
        yield
    except OpInterceptError:
        raise
    except OSError as exception:
        raise OpInterceptError(
            f"compiled kernels need a writable folder with free space: {exception}; set TORCH_EXTENSIONS_DIR to one, "
            f"or {INSTEAD}"
        ) from exception
    except Exception as exception:
        reason = str(exception).partition("\n")[0] or type(exception).__name__
        raise OpInterceptError(
            f"compiled kernels need a C++ compiler and the headers of Python and torch: {reason}; set CXX to a "
            f"compiler, or {INSTEAD}"
        ) from exception


def packaged_library() -> Path:
    """Where a wheel has the library for this environment, if it has one."""
    return PACKAGED / f"{library_name()}.so"


def cached_library() -> Path:
    """Where the library for this environment is kept once it has been built.

    Raises:
        RuntimeError: There is no home folder.
    """
    return cache_folder() / f"{library_name()}.so"


def cache_folder() -> Path:
    """Our own folder in the place where torch keeps the extensions that it builds."""
    if root := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(root).absolute() / "opintercept"
    if sys.platform == "darwin":
        root = "~/Library/Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "torch_extensions" / "opintercept"


def library_name() -> str:
    """A name that stands for everything a library depends on, so that any process can use a file with this name.

    Environments with the same torch share a library. So do the builds of one commit for the CPU and for any CUDA, whose
    headers are the same, and the releases of a Python such as 3.13: the frames that `stack.cpp` reads stay as they are
    from the first one on. It does not matter which compiler made it.
    """
    import sysconfig  # here and below: most programs only look for the library, and these take milliseconds

    version = torch.__version__.partition("+")[0]
    known = hashlib.sha256()
    for source in (*SOURCES, *HEADERS):
        known.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    for part in (
        layout.header(),
        *COMPILE,
        *LINK,
        *(flag for name in SETS for flag in _flags_of(name)),
        version,
        torch.version.git_version,
        torch.version.hip,
        torch.compiled_with_cxx11_abi(),
        *(sys.version_info[:2] if sys.version_info.releaselevel == "final" else sys.version_info),
        sysconfig.get_config_var("SOABI"),
        platform.machine(),
    ):
        known.update(f"{part}\0".encode(errors="surrogateescape"))
    readable = re.sub(r"[^\w.+]", "_", f"torch{version}-{sys.implementation.cache_tag}")
    return f"{readable}-{known.hexdigest()[:16]}"


def _flags_of(instructions: str) -> list[str]:
    """What the sources in `_native/vectors` need beside `COMPILE`: the flags with which ATen compiles its own."""
    return ["-O3", f"-DCPU_CAPABILITY={instructions}", f"-DCPU_CAPABILITY_{instructions}", *SETS[instructions]]


def _compiler() -> list[str]:
    """The command of the compiler, found as torch finds it."""
    import shlex

    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


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
    library.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(library) as alone:
        if is_whole(library):  # another process built it while we waited
            return
        if alone:
            for left in library.parent.glob(f"{library.name}.*{UNFINISHED}"):  # from processes that were killed
                shutil.rmtree(left, ignore_errors=True)
        _make(library)


def _make(library: Path) -> None:
    """Build in a temporary folder and move the library in one step, so that no process finds a part of it."""
    # Compilers that were killed may still write for a moment.
    with tempfile.TemporaryDirectory(
        UNFINISHED, f"{library.name}.", library.parent, ignore_cleanup_errors=True
    ) as temporary:
        built = Path(temporary, library.name)
        _compile(built)
        if f"{library_name()}.so" != library.name:  # it changes with the sources
            raise RuntimeError("the sources changed while they were compiled")
        checksum_file(built).write_text(_sum_of(built))
        # The checksum first: a library beside the checksum of another is built again.
        os.replace(checksum_file(built), checksum_file(library))
        os.replace(built, library)


def _compile(library: Path) -> None:
    """Compile a library, with the objects beside it."""
    import sysconfig

    compiler, torchs = _compiler(), Path(torch.__file__).parent
    python = sysconfig.get_path("include", "posix_prefix")  # other schemes may name a folder without the headers
    includes = [torchs / "include", torchs / "include/torch/csrc/api/include", python]
    flags = [*COMPILE, *(word for path in includes for word in ("-isystem", str(path)))]
    (library.parent / "layout.h").write_text(layout.header())
    flags.append(f"-I{library.parent}")
    compiling = []
    objects = []
    for source, more, made in _objects():
        objects.append(made)
        compiling.append([*compiler, *flags, *more, "-c", str(source), "-o", made])
    _run(compiling, library.parent)
    linking = [*compiler, *objects, f"-L{torchs / 'lib'}", *LINK, "-o", library.name]
    _run([linking], library.parent)


def _objects() -> Iterator[tuple[Path, list[str], str]]:
    """Each object in the order in which they are linked: its source, the flags that only it needs, and its name.

    Those that any processor can run come first, see `vectors/sets.h`.
    """
    vectorized = [source for source in SOURCES if source.parent.name == "vectors"]
    for source in SOURCES:
        if source not in vectorized:
            yield source, [], f"{source.stem}.o"
    for instructions in SETS:
        for source in vectorized:
            yield source, _flags_of(instructions), f"{source.stem}-{instructions}.o"


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
    """Load a library.

    Raises:
        OpInterceptError: It cannot be loaded, because it needs a newer C library, for example.
    """
    spec = importlib.util.spec_from_file_location(_MODULE, library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as exception:
        raise OpInterceptError(
            f"the compiled kernels cannot be loaded: {exception}; remove {str(library)!r} and run `opintercept build`"
        ) from exception
    return module
