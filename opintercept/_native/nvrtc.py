"""Compiles kernels in `device/` for a kind of GPU, with the NVRTC that torch brings along, and keeps the code on disk.

Invariant: the code on disk is whole, and stands for the source, the options and NVRTC's version in its name. Nothing
here asks a device, so that code can be made on a machine that has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from opintercept._native.build import cache_folder

SOURCE = Path(__file__).with_name("device") / "kernel.h"
CHECKS = SOURCE.with_name("checksum.h")  # which includes the other one
# Without the last one, a product and a sum would become one operation with other bits than on the host.
OPTIONS = ["--std=c++20", "--device-as-default-execution-space", "--fmad=false"]
_NAMES = "libnvrtc.so.{}", "libnvrtc.so"


def code_for(architecture: str, cuda: str, checks: bool = False) -> bytes:
    """The kernel that reads values, or those for checks, for an architecture such as `"sm_90"`.

    Args:
        architecture: What the kernel runs on.
        cuda: The version of CUDA that torch was built for, `"13.0"` say.
        checks: Whether to compile `CHECKS`.

    Raises:
        RuntimeError: There is no NVRTC, or it cannot compile the kernel.
    """
    library = _library(cuda.partition(".")[0])
    sources, version = [CHECKS, SOURCE] if checks else [SOURCE], _version(library)
    texts = [each.read_bytes() for each in sources]
    known = hashlib.sha256(b"\0".join([*texts, *map(str.encode, (*OPTIONS, version))])).hexdigest()[:16]
    try:
        path = cache_folder() / f"{sources[0].stem}-{architecture}-{known}.cubin"
    except RuntimeError:  # a user without a home compiles in each process
        return _compiled(library, sources, architecture)
    code = _kept(path)
    if code is None:
        code = _compiled(library, sources, architecture)
        with contextlib.suppress(OSError):
            _keep(path, code)
    return code


def _kept(path: Path) -> bytes | None:
    """The code in a file, if it is whole: its checksum comes first."""
    try:
        checksum, code = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if hashlib.sha256(code).hexdigest().encode() == checksum else None


def _keep(path: Path, code: bytes) -> None:
    """Write the code in one step, so that no process finds a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            file.write(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _candidates(major: str) -> Iterator[str]:
    """Paths of NVRTC, the likeliest first: where torch's wheels and the packages that they need have it."""
    folders = [Path(each, "nvidia") for each in sys.path if each]
    for name in (each.format(major) for each in _NAMES):
        for folder in folders:
            yield from map(str, sorted(folder.glob(f"*/lib/{name}")))
        yield name  # wherever the loader finds it
        yield str(Path(sys.prefix, "lib", name))  # conda


def _library(major: str) -> ctypes.CDLL:
    failed = f"there is no {_NAMES[0].format(major)}"
    for path in _candidates(major):
        try:
            if os.path.isabs(path):  # compiling fails without these, which NVRTC looks for by name
                for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError as error:
            failed = str(error)
    raise RuntimeError(failed)


def _version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


def _compiled(library: ctypes.CDLL, sources: list[Path], architecture: str) -> bytes:
    """The code of the first source, which includes the others."""
    options = [each.encode() for each in (*OPTIONS, f"--gpu-architecture={architecture}")]
    program = ctypes.c_void_p()
    (source, *headers), (name, *names) = (
        [each.read_bytes() for each in sources],
        [each.name.encode() for each in sources],
    )
    many = ctypes.c_char_p * len(headers)
    result = library.nvrtcCreateProgram(ctypes.byref(program), source, name, len(headers), many(*headers), many(*names))
    _check(library, result, "nvrtcCreateProgram")
    try:
        result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text_of(library, program, "ProgramLog") if result else b""
        errors = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
        _check(library, result, "".join(errors[:1]) or "nvrtcCompileProgram")
        return _text_of(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text_of(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(library, getattr(library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _check(library: ctypes.CDLL, result: int, what: str) -> None:
    if result:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        reason = library.nvrtcGetErrorString(result) or b"?"
        raise RuntimeError(f"{what}: {reason.decode()}")
