"""How the kernels in C++ are built, and what is said where they cannot be."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import FAKE_COMPILER, MODULE, Builds, fake_builds
from compiler import needs_compiler
from native import fresh_look

from opintercept import OpInterceptError, intercept
from opintercept._blocks.intercept import Interceptor
from opintercept._engines import compiled, kernels
from opintercept._native import build

pytestmark = pytest.mark.slow


def _version(*parts: Any) -> Any:
    """As `sys.version_info`."""
    return type("version_info", (tuple,), {"releaselevel": parts[3]})(parts)


def watch() -> Interceptor:
    return intercept((), engine="compiled")


def test_the_sources_are_shipped_beside_the_module() -> None:
    package = importlib.resources.files("opintercept")
    folders = [package.joinpath(name) for name in ("_engines/compiled", "_native", "_native/device", "_native/vectors")]
    files = [file.name for folder in folders for file in folder.iterdir() if file.name.endswith((".cpp", ".h"))]
    assert {"kernels.cpp", "record.cpp", "stack.cpp", "values.cpp", "read_values.cpp"} <= set(files)
    assert sorted(path.name for path in (*build.SOURCES, *build.HEADERS)) == sorted(files)


@pytest.fixture
def no_cache(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Build as on a machine that never has."""
    with fresh_look() as patch:
        patch.setattr(compiled, "loaded", None)
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        yield patch


def refused(reason: str) -> str:
    return rf'a C\+\+ compiler and the headers .*: .*{reason}.*; set CXX to a compiler, or use engine="kernel"'


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


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    # Not by `monkeypatch`, which would be undone last, and set CXX again as a test found it.
    with fake_builds(tmp_path) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "loaded", None)
        yield found


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
    library = build.cached_library()
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


def runs_on(group: int) -> bool:
    """Whether a process of a group runs; one that has ended stays until the system's first process asks for it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == group and state != "Z":
                return True
    return False


def test_a_build_that_is_interrupted_stops_its_compilers(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as interrupted:
        builds.wait_for(2)
        interrupted.kill(signal.SIGINT)
        interrupted.wait(timeout=20)
    assert interrupted.stderr.rstrip().endswith("KeyboardInterrupt")
    end = time.monotonic() + 10
    while any(map(runs_on, builds.compilers())):
        assert time.monotonic() < end, "a compiler runs on"
        time.sleep(0.01)
    assert builds.left() == ["lock"]


def test_a_second_process_waits_for_a_build_and_says_so(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as first:
        builds.wait_for(2)
        with builds.start() as second:
            waiting = f"opintercept: waiting for process {first.pid}, which builds the compiled kernels in "
            second.says(waiting)
            builds.held.unlink()
    assert (first.stdout, first.stderr) == ("made\n", "")
    assert (second.stdout, second.stderr) == ("made\n", f"{waiting}{builds.cache}\n")
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
        ("torch.compiled_with_cxx11_abi", lambda: None),
        ("sys.version_info", _version(3, 10, 0, "final")),
        ("sys.version_info", _version(*sys.version_info[:3], "candidate")),
        ("platform.machine", lambda: "riscv64"),
        ("sysconfig.get_config_var", lambda name: "cpython-311d"),
        ("opintercept._native.build.COMPILE", ["-O3"]),
        ("opintercept._native.build.LINK", ["-g"]),
        ("opintercept._native.build.SETS", {"DEFAULT": ["-march=native"]}),
    ],
)
def test_each_environment_has_a_build_of_its_own(
    name: str, value: Any, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = build.library_name()
    assert build.library_name() == named
    monkeypatch.setattr(name, value)
    assert build.library_name() != named


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.__file__", "/of/another/environment/torch/__init__.py"),
        ("sys.version_info", _version(*sys.version_info[:2], 99, "final")),
        ("sys.version", f"{platform.python_version()} (main, Jan 1 2020, 00:00:00) [GCC 9]"),
    ],
)
def test_environments_with_the_same_torch_and_python_share_a_build(
    name: str, value: Any, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = build.library_name()
    monkeypatch.setattr(name, value)
    assert build.library_name() == named


def test_processors_with_other_vector_instructions_share_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set[Any]()
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        names.add(build.library_name())
    assert len(names) == 1


def test_what_fewer_processors_can_run_is_linked_later(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    """The linker keeps the first of several functions of one name."""
    builds.add_vectorized()
    builds.compiler.write_text(f'{FAKE_COMPILER}echo "$@" >> "$here/commands"\n')
    monkeypatch.setattr(build, "SETS", {"DEFAULT": [], "AVX2": ["-mavx2"], "AVX512": ["-mavx512f"]})
    build.built_library()
    commands = [line.split() for line in (builds.folder / "commands").read_text().splitlines()]
    objects = ["one.o", "two.o", "loops-DEFAULT.o", "loops-AVX2.o", "loops-AVX512.o"]
    assert commands[-1][:5] == objects
    flags = {command[-1]: command for command in commands[:-1]}
    assert set(flags) == set(objects)
    assert [name for name in objects if "-mavx2" in flags[name]] == ["loops-AVX2.o"]
    assert [name for name in objects if "-DCPU_CAPABILITY=AVX512" in flags[name]] == ["loops-AVX512.o"]


def test_each_source_and_header_has_a_build_of_its_own(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [build.library_name()]
    builds.sources[0].write_text("// changed\n")
    names.append(build.library_name())
    header = builds.folder / "shared.h"
    header.touch()
    monkeypatch.setattr(build, "HEADERS", [header])
    names.append(build.library_name())
    header.write_text("// changed\n")
    names.append(build.library_name())
    assert len(set(names)) == 4


def test_a_library_stays_when_its_compiler_is_upgraded_or_removed(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.built_library()
    builds.compiler.write_text(f"{FAKE_COMPILER}# a newer version\n")
    assert build.built_library() == library
    builds.compiler.unlink()
    assert build.built_library() == library
    monkeypatch.setenv("CXX", "another-compiler")
    assert build.built_library() == library
    assert len(builds.compilers()) == 3  # two sources and the library, once


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
    assert (process.stdout, process.stderr) == ("made\n", "")
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
    with pytest.raises(OpInterceptError, match=r"cannot be loaded: .*PyInit_.*; remove '.*\.so' and run `opin"):
        watch()


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
