"""How the kernels in C++ are built, and what is said where they cannot be."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import needs_compiler

from opintercept import OpInterceptError, intercept
from opintercept._engines import compiled, kernels
from opintercept._intercept import Interceptor
from opintercept._native import build

pytestmark = pytest.mark.slow


def watch() -> Interceptor:
    return intercept((), engine="compiled")


def test_the_sources_are_shipped_beside_the_module() -> None:
    package = importlib.resources.files("opintercept")
    folders = [package.joinpath(name) for name in ("_engines/compiled", "_native")]
    sources = [file.name for folder in folders for file in folder.iterdir() if file.name.endswith(".cpp")]
    assert sorted(sources) == ["kernels.cpp", "record.cpp", "stack.cpp", "values.cpp"]
    assert sorted(path.name for path in build.SOURCES) == sorted(sources)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Build as on a machine that never has."""
    monkeypatch.setattr(compiled, "load", compiled.load.__wrapped__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return monkeypatch


def refused(reason: str) -> str:
    return rf'a C\+\+ compiler and the headers .*: .*{reason}.*; use engine="kernel"'


@needs_compiler
def test_without_a_compiler_the_error_names_the_engine_in_python(no_cache: pytest.MonkeyPatch) -> None:
    no_cache.setenv("CXX", "no-such-compiler")
    with pytest.raises(OpInterceptError, match=refused("No such file or directory: 'no-such-compiler'")):
        watch()
    assert not kernels.KERNELS.installed


@needs_compiler
def test_a_source_that_does_not_compile_is_one_error(no_cache: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text('#error "these are not the headers"\n')
    no_cache.setattr(build, "SOURCES", [source])
    with pytest.raises(OpInterceptError, match=refused("these are not the headers")):
        watch()


# Writes `made` in place of objects and libraries, as soon as there is no file `held` beside it.
FAKE_COMPILER = """\
#!/bin/sh
here=$(dirname "$0")
echo "start $$" >> "$here/log"
for output; do :; done  # the last argument
echo half > "$output"
while [ -e "$here/held" ]; do sleep 0.05; done
sleep 0.1
echo made > "$output"
echo end >> "$here/log"
"""

BUILD = """
import sys
from pathlib import Path
from opintercept._native import build
build.SOURCES = [Path(name) for name in sys.argv[1:]]
print(build.built_library().read_text(), end="", flush=True)
"""


class Builds:
    """Builds of two sources with a compiler that can be held."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.cache = folder / "a cache" / "opintercept"
        self.sources = [folder / "one.cpp", folder / "two.cpp"]
        for source in self.sources:
            source.touch()
        self.compiler = folder / "c++"
        self.compiler.write_text(FAKE_COMPILER)
        self.compiler.chmod(0o755)
        self.held = folder / "held"
        patch.setattr(build, "SOURCES", self.sources)
        patch.setattr(compiled, "load", compiled.load.__wrapped__)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(self.cache.parent))
        patch.setenv("CXX", str(self.compiler))
        patch.delenv("MAX_JOBS", raising=False)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, *map(str, self.sources)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # so that ours can be interrupted alone
        )

    def wait_for(self, count: int) -> None:
        """Wait until the compiler has been started that often."""
        end = time.monotonic() + 60
        while not self.log.exists() or self.log.read_text().count("start") < count:
            assert time.monotonic() < end
            time.sleep(0.01)

    def compilers(self) -> list[int]:
        """The processes of all compilers that were started."""
        return [int(line.split()[1]) for line in self.log.read_text().splitlines() if line.startswith("start")]

    def left(self) -> list[str]:
        """What lies in the cache, by the end of the name; the lock stays and is empty of meaning."""
        return sorted(path.name.partition(".so")[2].rpartition(".")[2] for path in self.cache.iterdir())


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builds:
    pytest.importorskip("fcntl")
    return Builds(tmp_path, monkeypatch)


BUILT = ["", "lock", "sha256"]


def test_a_build_that_was_killed_is_repeated(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as killed:
        builds.wait_for(2)
        killed.kill()
    assert "building" in builds.left()
    builds.held.unlink()
    started = time.monotonic()
    assert build.built_library().read_text() == "made\n"
    assert time.monotonic() - started < 20
    assert builds.left() == BUILT


def test_builds_that_are_killed_at_random_moments_leave_no_part_of_a_library(builds: Builds) -> None:
    library = builds.cache / f"{build.library_name()}.so"
    for _ in range(3):
        with builds.start() as killed:
            seen = len(builds.compilers()) if builds.log.exists() else 0
            builds.wait_for(seen + 1)
            time.sleep(random.uniform(0, 0.25))
            killed.kill()
        if build.is_whole(library):
            assert library.read_text() == "made\n"
            library.unlink()
    assert build.built_library().read_text() == "made\n"
    assert builds.left() == BUILT


def test_a_build_that_is_interrupted_stops_its_compilers(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as interrupted:
        builds.wait_for(2)
        interrupted.send_signal(signal.SIGINT)
        _, error = interrupted.communicate(timeout=20)
    assert error.rstrip().endswith("KeyboardInterrupt")
    for compiler in builds.compilers():
        end = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.killpg(compiler, 0)
                time.sleep(0.01)
            pytest.fail("a compiler runs on")
    assert builds.left() == ["lock"]


def test_a_second_process_waits_for_a_build_and_says_so(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as first:
        builds.wait_for(2)
        with builds.start() as second:
            assert second.stderr is not None
            waiting = second.stderr.readline()
            builds.held.unlink()
            outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert waiting == (
        f"opintercept: waiting for process {first.pid}, which builds the compiled kernels in {builds.cache}\n"
    )
    assert outputs == [("made\n", ""), ("made\n", "")]
    assert len(builds.compilers()) == 3  # two sources and the library, once
    assert builds.left() == BUILT


def test_where_files_have_no_locks_builds_do_without(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    other = builds.cache / f"{build.library_name()}.so.other{build.UNFINISHED}"
    other.mkdir(parents=True)
    assert build.built_library().read_text() == "made\n"
    assert other.exists()  # it may be that of a process that builds right now


def test_a_truncated_library_is_built_again(builds: Builds) -> None:
    library = build.built_library()
    whole = library.read_bytes()
    for damaged in (b"", whole[:-1], b"x" * len(whole)):
        library.write_bytes(damaged)
        assert build.built_library().read_bytes() == whole
    for damaged in (b"", b"\xff"):
        build.checksum_file(library).write_bytes(damaged)
        assert build.built_library().read_bytes() == whole
    assert len(builds.compilers()) == 6 * 3
    build.built_library()
    assert len(builds.compilers()) == 6 * 3


def test_sources_that_change_meanwhile_do_not_get_the_name_of_others(builds: Builds) -> None:
    builds.compiler.write_text(f"{FAKE_COMPILER}echo // more >> '{builds.sources[0]}'\n")
    with pytest.raises(OpInterceptError, match=refused("the sources changed while they were compiled")):
        watch()
    assert builds.left() == ["lock"]


def test_a_library_is_built_without_torchs_machinery(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.cpp_extension", None)  # it warns of a device that is not there
    assert build.built_library().read_text() == "made\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.__version__", "2.13.1+cpu"),
        ("torch.version.git_version", "0123456789"),
        ("torch.__file__", "/of/another/environment/torch/__init__.py"),
        ("torch.compiled_with_cxx11_abi", lambda: None),
        ("sys.version", "3.11.8 (main)"),
        ("sysconfig.get_config_var", lambda name: "cpython-311d"),
        ("opintercept._native.build.COMPILE", ["-O3"]),
        ("opintercept._native.build.LINK", ["-g"]),
    ],
)
def test_each_environment_has_a_build_of_its_own(
    name: str, value: Any, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.library_name()
    assert build.library_name() == before
    monkeypatch.setattr(name, value)
    assert build.library_name() != before


def test_processors_with_other_vector_instructions_have_builds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        names.add(build.library_name())
    assert len(names) == 3


def test_each_source_and_each_compiler_has_a_build_of_its_own(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.library_name()]
    builds.sources[0].write_text("// changed\n")
    names.append(build.library_name())
    builds.compiler.write_text(f"{FAKE_COMPILER}# a newer version\n")
    names.append(build.library_name())
    for command in (f"env {builds.compiler}", "another-compiler"):
        monkeypatch.setenv("CXX", command)
        names.append(build.library_name())
    assert len(set(names)) == 5


def test_a_compiler_with_arguments_is_run_with_them(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env NAME=value '{builds.compiler}'")
    assert build.built_library().read_text() == "made\n"


@pytest.mark.parametrize(("jobs", "together"), [("1", False), ("2", True), ("", True)])
def test_max_jobs_is_how_many_compilers_run_at_once(
    jobs: str, together: bool, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_JOBS", jobs)
    builds.held.touch()
    with builds.start() as process:
        builds.wait_for(2 if together else 1)
        builds.held.unlink()
        assert process.communicate(timeout=60) == ("made\n", "")
    first, second, *_ = (line.split()[0] for line in builds.log.read_text().splitlines())
    assert (first, second) == ("start", "start" if together else "end")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_is_named_in_one_line(builds: Builds) -> None:
    builds.compiler.write_text('#!/bin/sh\necho "$0" "$@"\ncat "$0" > /dev/full\n')
    with pytest.raises(OpInterceptError, match="free space: ") as caught:
        watch()
    assert str(caught.value) == (
        "compiled kernels need a writable folder with free space: [Errno 28] No space left on "
        f"device: '{builds.cache}'; set TORCH_EXTENSIONS_DIR to one, or use engine=\"kernel\", which does the same in "
        "Python"
    )
    assert builds.left() == ["lock"]


def test_a_cache_that_cannot_be_written_to_is_named(builds: Builds) -> None:
    builds.cache.parent.write_text("a file")
    with pytest.raises(OpInterceptError, match=r"a writable folder .*: .*Not a directory: '.*a cache.*'; set TORCH"):
        watch()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("echo a.cpp:1:2: error: wrong; echo more", "a.cpp:1:2: error: wrong"),
        ("echo ld: cannot find -lc10; echo", "ld: cannot find -lc10"),
        ("true", "ended with 1"),
    ],
)
def test_a_compiler_that_fails_is_quoted_in_one_line(says: str, reason: str, builds: Builds) -> None:
    builds.compiler.write_text(f"#!/bin/sh\n{says}\nexit 1\n")
    with pytest.raises(OpInterceptError, match=refused(reason)) as caught:
        watch()
    assert "\n" not in str(caught.value)


@needs_compiler
def test_a_library_that_does_not_load_is_named(no_cache: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "empty.cpp"
    source.touch()
    no_cache.setattr(build, "SOURCES", [source])
    with pytest.raises(OpInterceptError, match=r"cannot be loaded: .*PyInit_.*; remove '.*\.so' to build"):
        watch()


MODULE = """
#include <Python.h>
#include <c10/macros/Macros.h>

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "empty"};

PyMODINIT_FUNC PyInit_opintercept_compiled() {
    return PyModule_Create(&module);
}
"""


@needs_compiler
def test_paths_may_have_spaces(no_cache: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "torch").symlink_to(Path(torch.__file__).parent)
    no_cache.setattr(torch, "__file__", str(folder / "torch" / "__init__.py"))
    source = folder / "a source.cpp"
    source.write_text(MODULE)
    no_cache.setattr(build, "SOURCES", [source])
    no_cache.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    assert build.load_library(build.built_library()).__name__ == "empty"
