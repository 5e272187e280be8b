"""The library of a process: what `engine="auto"` finds, and what it does where there is nothing to find."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builds import Builds, fake_builds
from compiler import needs_compiler
from native import fresh_look, run_python
from native import library as real_library

from opintercept import OpInterceptError, hooks, info, intercept
from opintercept._engines import compiled
from opintercept._engines.choose import choose
from opintercept._native import build, library

pytestmark = pytest.mark.slow


@pytest.fixture
def builds(tmp_path: Path) -> Iterator[Builds]:
    with fake_builds(tmp_path) as found:
        yield found


def chosen() -> str:
    """The engine that `engine="auto"` takes."""
    return choose("dispatch", "auto", "current").name


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def run_program() -> None:
    """Use what looks for the library: an interceptor, and a hook that reads values."""
    with intercept([hooks.Stats(), recorder := hooks.Recorder()]):
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert len(recorder.records) == 1


def test_without_a_library_kernels_run_in_python_and_nothing_is_built(
    builds: Builds, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "opintercept")
    run_program()
    run_program()
    assert chosen() == "kernel"
    assert not builds.log.exists()
    assert not builds.cache.parent.exists()
    reason = f"no library has been built for torch {torch.__version__} and Python "
    (line,) = said(caplog)
    assert line.startswith(f"opintercept: kernels run in Python and hooks use torch's operators, since {reason}")
    assert line.endswith("; `opintercept build` builds it")
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert info().reason.startswith(reason)


def test_without_a_compiler_nothing_is_missed(builds: Builds, caplog: pytest.LogCaptureFixture) -> None:
    builds.compiler.unlink()
    run_program()
    assert (chosen(), said(caplog)) == ("kernel", [])


@pytest.mark.parametrize("command", ["no-such-compiler", "'unbalanced"])
def test_a_compiler_that_cannot_be_called_is_no_error(command: str, builds: Builds) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", command)
        run_program()
        assert chosen() == "kernel"


def test_a_cache_that_cannot_be_read_is_no_error(builds: Builds) -> None:
    builds.cache.parent.write_text("a file")
    run_program()
    assert chosen() == "kernel"


def test_without_a_home_folder_there_is_no_library(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr(Path, "expanduser", no_home)
    run_program()
    assert info().reason == "no library can be looked for: Could not determine home directory."
    assert info().cache is None


def test_a_build_in_another_process_is_not_waited_for(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as builder:
        builds.wait_for(2)
        run_program()
        assert chosen() == "kernel"
        assert info().reason.startswith("no library has been built")
        builds.held.unlink()
        assert builder.wait(timeout=60) == 0


def test_a_build_in_another_thread_is_not_waited_for(builds: Builds) -> None:
    builds.held.touch()
    failed = list[BaseException]()

    def need() -> None:
        try:
            library.need()
        except OpInterceptError as error:  # what the compiler makes is no library
            failed.append(error)

    thread = threading.Thread(target=need)
    thread.start()
    builds.wait_for(2)
    assert chosen() == "kernel"
    builds.held.unlink()
    thread.join()
    assert "cannot be loaded" in str(failed[0])


def test_what_an_interrupted_build_leaves_is_not_taken(builds: Builds) -> None:
    builds.held.touch()
    with builds.start() as interrupted:
        builds.wait_for(2)
        interrupted.kill()
    assert "building" in builds.left()
    run_program()
    assert chosen() == "kernel"
    assert info().reason.startswith("no library has been built")


@pytest.mark.parametrize("version", ["+cpu", "+cu129", "+cu130", ""])
def test_the_builds_of_one_commit_of_torch_share_a_library(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = build.library_name()
    monkeypatch.setattr("torch.__version__", torch.__version__.partition("+")[0] + version)
    assert build.library_name() == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch.__version__", "2.99.0+cpu"),
        ("torch.version.git_version", "0123456"),
        ("torch.version.hip", "7.0"),
        ("sysconfig.get_config_var", lambda name: "cpython-399"),
    ],
)
def test_a_library_for_another_torch_or_python_is_not_taken(
    name: str, value: Any, builds: Builds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.built_library()
    monkeypatch.setattr(name, value)
    run_program()
    assert chosen() == "kernel"
    environment = rf"torch {re.escape(torch.__version__)} and Python 3\.\d+\.\d+"
    pattern = rf"no library in {re.escape(str(builds.cache))} was built for {environment}, this kind of processor"
    assert re.match(pattern, info().reason)
    assert said(caplog) == []


def test_without_the_gil_a_block_is_refused_and_no_library_is_loaded(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.built_library()  # one that would not load
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    said = "opintercept needs the GIL, and this free-threaded Python runs without it; start it with PYTHON_GIL=1"
    for engine in ("auto", "kernel", "compiled", "mode"):
        with pytest.raises(OpInterceptError, match=f"^{said}$"):
            intercept((), engine=engine)
    assert (info().reason, library.find().broken) == (said, False)


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "no library"])
def test_a_library_that_does_not_work_is_named_once(
    damaged: bool, builds: Builds, caplog: pytest.LogCaptureFixture
) -> None:
    path = build.built_library()
    if damaged:
        path.write_bytes(b"")
    run_program()
    run_program()
    assert chosen() == "kernel"
    (line,) = said(caplog)
    wrong = f"'{path}' is damaged; run" if damaged else f"cannot be loaded: {path}: "
    assert wrong in line
    assert line.endswith("`opintercept build`")
    assert len(builds.compilers()) == 3  # as built above


def test_a_library_that_cannot_be_set_up_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(module: Any) -> None:
        raise AttributeError("no such thing")

    with fresh_look():
        monkeypatch.setattr(compiled, "loaded", None)
        monkeypatch.setattr(compiled, "Extension", fails)
        monkeypatch.setattr(library, "known", library.Library(object(), Path("somewhere")))
        monkeypatch.setattr("opintercept._native.values.adopt", lambda module: None)
        assert [chosen(), chosen(), info().engine] == ["kernel"] * 3
    (line,) = said(caplog)
    assert line.endswith("since the compiled kernels cannot be set up: no such thing")


def test_the_library_is_looked_for_once_in_a_process(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, is_whole = list[str](), build.is_whole

    def look(path: Path) -> bool:
        looks.append(path.name)
        return is_whole(path)

    monkeypatch.setattr(build, "is_whole", look)
    for _ in range(3):
        run_program()
    assert len(looks) == 2  # in the package and in the cache
    build.built_library()
    looks.clear()
    assert chosen() == "kernel"
    assert looks == []


def test_nothing_is_looked_for_where_the_environment_forbids_it(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.built_library()
    monkeypatch.setenv(library.SWITCH, "0")
    monkeypatch.setattr(build, "library_name", None)  # may not be called
    assert chosen() == "kernel"
    assert info().reason == "OPINTERCEPT_COMPILED=0 is set"


def test_a_look_that_is_interrupted_is_repeated(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    build.built_library()
    whole = build.is_whole

    def interrupted(path: Path) -> bool:
        monkeypatch.setattr(build, "is_whole", whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "is_whole", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        chosen()
    assert "cannot be loaded" in library.find().reason


def test_a_signal_handler_may_enter_a_block_during_the_look(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build.is_whole

    def interrupted(path: Path) -> bool:
        monkeypatch.setattr(build, "is_whole", whole)
        signal.raise_signal(signal.SIGUSR1)
        return whole(path)

    before = signal.signal(signal.SIGUSR1, lambda *_: run_program())
    try:
        monkeypatch.setattr(build, "is_whole", interrupted)
        run_program()
    finally:
        signal.signal(signal.SIGUSR1, before)


FORK = """
import os, signal, threading
from opintercept._native import library
locked = threading.Event()
def hold():
    with library.lock:
        locked.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
locked.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    library.find()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_a_look_in_the_parent(tmp_path: Path) -> None:
    assert run_python(FORK, TORCH_EXTENSIONS_DIR=str(tmp_path)) == ["7"]


# Eight threads watch 50 products each.
PROGRAM = """
import logging, sys, threading
logging.basicConfig(level="INFO", format="%(message)s")
import torch
from opintercept import hooks, info, intercept
from opintercept._native import library
assert library.known is None, "looked for at import"
seen, start = [], threading.Barrier(8)
def work():
    start.wait()
    for _ in range(50):
        with intercept([recorder := hooks.Recorder(), stats := hooks.Stats()]) as interceptor:
            torch.ones(2, 3) @ torch.ones(3, 4)
        seen.append((interceptor.watcher.engine.name, len(recorder.records), recorder.records[0].module))
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(seen) == 400
print(*sorted(set(seen)), info().engine, info().values, info().library)
"""


@needs_compiler
def test_the_library_is_taken_by_threads_that_begin_at_once(tmp_path: Path) -> None:
    real_library()
    path = build.cached_library()
    assert run_python(PROGRAM, CXX=os.environ.get("CXX", "")) == [f"('compiled', 1, '') compiled True {path}"]
    assert run_python(PROGRAM, TORCH_EXTENSIONS_DIR=str(tmp_path))[0] == "('kernel', 1, '') kernel False None"


def test_engine_and_hooks_name_a_broken_library_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "opintercept" / build.cached_library().name
    path.parent.mkdir()
    path.write_text("no library")
    build.checksum_file(path).write_text("")
    ran, *said = run_python(PROGRAM, TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert ran == "('kernel', 1, '') kernel False None"
    assert len(said) == 1
    assert f"{str(path)!r} is damaged; run `opintercept build`" in said[0]


@needs_compiler
def test_the_library_may_lie_in_a_folder_with_a_space_that_is_read_only(tmp_path: Path) -> None:
    real_library()
    path = build.cached_library()
    folder = tmp_path / "with a space" / "opintercept"
    folder.mkdir(parents=True)
    for file in (path, build.checksum_file(path)):
        shutil.copy(file, folder)
    folder.chmod(0o500)
    expected = f"('compiled', 1, '') compiled True {folder / path.name}"
    assert run_python(PROGRAM, TORCH_EXTENSIONS_DIR=str(folder.parent)) == [expected]
    folder.chmod(0o700)


@needs_compiler
def test_a_library_that_a_block_builds_is_taken_from_then_on(tmp_path: Path) -> None:
    real_library()
    code = (
        "from opintercept import info, intercept\n"
        "from opintercept._native import build, library\n"
        "library.known = library.Library(None, reason='not yet')\n"
        "print(info().engine)\nintercept(engine='compiled')\nprint(info().engine)"
    )
    assert run_python(code) == ["kernel", "compiled"]
