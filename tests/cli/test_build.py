"""`opintercept build` and `opintercept info`."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from builds import MODULE, Builds, fake_builds
from compiler import needs_compiler
from native import fresh_look, run_python

import opintercept
from opintercept._native import build
from opintercept.cli import main
from opintercept.cli.build import worth_it

pytestmark = pytest.mark.slow

ENVIRONMENT = f"torch {torch.__version__} and Python {platform.python_version()}"


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    with fake_builds(tmp_path) as found:
        yield found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that a failing build writes to stderr."""
    assert main(["build", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@needs_compiler
def test_a_build_says_what_it_does_and_where_the_library_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "module.cpp"
    source.write_text(MODULE)
    monkeypatch.setattr(build, "SOURCES", [source])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    last = 'engine="auto" takes it, and hooks read values in C++; `opintercept info` says so at any time'
    with fresh_look():
        assert main(["build"]) == 0
        begins, ends, *more = capsys.readouterr().out.splitlines()
        assert begins == f"building the compiled engine for {ENVIRONMENT}, which takes about a minute"
        assert re.fullmatch(rf"built in \d+ s: {re.escape(str(build.cached_library()))}", ends)
        assert more == [last]
    with fresh_look():
        assert main(["build"]) == 0
        there = f"already built for {ENVIRONMENT}: {build.cached_library()}"
        assert capsys.readouterr().out.splitlines() == [there, last]


@pytest.mark.parametrize(("calls", "seconds", "told"), [(1001, 0.25, True), (999, 0.25, False)])
def test_a_build_is_advised_where_it_saves_a_tenth(calls: int, seconds: float, told: bool, builds: Builds) -> None:
    lines = list(worth_it(calls, seconds))
    saved = "compiled kernels would have saved at least 25.025 ms of 250.000 ms; to build them, in about a minute: "
    assert lines == [f"{saved}opintercept build"] * told


def test_a_run_of_many_small_calls_ends_with_that_advice(tmp_path: Path) -> None:
    program = "import time\ntime.monotonic = lambda: 0.0\nimport torch\ntorch.ones(2, 2) @ torch.ones(2, 2)\n"
    (tmp_path / "small.py").write_text(program)
    code = "from opintercept.cli import main; main(['run', 'small.py'])"
    *_, last = run_python(code, sys.executable, tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert last.startswith(
        "compiled kernels would have saved at least 0.025 ms of 0.000 ms; to build them, in about a "
    )


def test_a_build_without_a_compiler_is_refused_in_one_line(builds: Builds, capsys: pytest.CaptureFixture[str]) -> None:
    builds.compiler.unlink()
    assert refused(capsys) == (
        "opintercept build: compiled kernels need a C++ compiler and the headers of Python and torch: "
        f"[Errno 2] No such file or directory: '{builds.compiler}'; set CXX to a compiler, or use engine=\"kernel\", "
        "which does the same in Python"
    )


@pytest.mark.parametrize("options", [(), ("--into", "a cache/wheel")], ids=["cache", "wheel"])
def test_a_build_without_write_access_is_refused_in_one_line(
    options: tuple[str, ...], builds: Builds, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builds.cache.parent.write_text("a file")
    monkeypatch.chdir(builds.folder)
    line = refused(capsys, *options)
    assert re.match(
        r"opintercept build: compiled kernels need a writable folder .*: \[Errno 20\] Not a directory: ", line
    )


def test_a_library_that_does_not_load_is_named_with_the_remedy(
    builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    path = build.built_library()
    assert refused(capsys).endswith(f"; remove {str(path)!r} and run `opintercept build`")


def test_what_a_wheel_needs_is_one_library_for_every_processor_of_this_kind(
    builds: Builds, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builds.add_vectorized()
    monkeypatch.setattr(build, "SETS", {"DEFAULT": [], "AVX2": ["-mavx2"], "AVX512": ["-mavx512f"]})
    folder = builds.folder / "for a wheel"
    assert main(["build", "--into", str(folder)]) == 0
    library = folder / build.packaged_library().name
    assert re.fullmatch(
        rf"built for {re.escape(ENVIRONMENT)} in \d+ s: {re.escape(str(library))}\n", capsys.readouterr().out
    )
    for capability in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert build.is_whole(folder / build.packaged_library().name)
    assert len(list(folder.iterdir())) == 2  # with its checksum
    assert len(builds.compilers()) == 2 + 3 + 1  # the sources that need no vectors, the one that does, and the link


def test_info_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert capsys.readouterr().out == f"{opintercept.info()}\n"


def test_the_line_that_the_readme_shows_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_python("import opintercept; print(opintercept.info())", OPINTERCEPT_COMPILED="0")
    assert [line.split("  ")[0] for line in lines] == [
        "opintercept",
        'engine="auto"',
        "library",
        "calls",
        "values",
        "on devices",
    ]
