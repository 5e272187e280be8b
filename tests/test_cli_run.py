"""`opintercept run`, as a user sees it: each program beside a plain run of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from opintercept import runs

OURS = ("-m", "opintercept", "run")
# As the console script does, which has its own folder in sys.path[0].
SCRIPT = ("-c", "import sys; sys.argv[0] = 'opintercept'; from opintercept.cli import main; sys.exit(main())", "run")
SUMMARY = re.compile(r"^opintercept: (?P<calls>[\d,]+) calls?, (?P<flop>\S+ \w*FLOP)", re.MULTILINE)
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")


def start(folder: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    piped: dict[str, object] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, *arguments], cwd=folder, text=True, env=environment, **(piped | options)
    )


def ends(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


def script(folder: Path, program: str, name: str = "script.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(program), encoding="utf-8")
    return name


def beside(
    folder: Path, *arguments: str, options: Sequence[str] = (), ours: Sequence[str] = OURS, stdin: str = ""
) -> tuple[int, str, str]:
    """What a quiet run gives, which is what a plain one does."""
    plain = start(folder, *arguments)
    watched = start(folder, *ours, "-q", *options, *arguments)
    expected, got = ends(plain, stdin), ends(watched, stdin)
    assert got == expected
    return got


ENDS = {
    "falls off": "print('done')",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit None": "import sys; sys.exit()",
    "exit text": "import sys; sys.exit('no data')",
    "exit True": "raise SystemExit(True)",
    "exit in a finally": "try:\n    1 / 0\nfinally:\n    raise SystemExit(4)",
    "os._exit": "import os; print('x', flush=True); os._exit(7)",
    "abort": "import os; os.abort()",
    "raises": "def f():\n    1 / 0\n\nf()",
    "raises from": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('bad') from error",
    "raises meanwhile": "try:\n    {}['a']\nexcept KeyError:\n    [][0]",
    "raises a group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "raises with a note": "e = ValueError('x')\ne.add_note('a note')\nraise e",
    "raises what the command line knows": "raise ImportError(\"pip install 'opintercept[cli]'\")",
    "raises our own": "from opintercept import HookError\nraise HookError('mine')",
    "interrupts itself": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises KeyboardInterrupt in a call": "def f():\n    raise KeyboardInterrupt('x')\nf()",
    "no syntax": "def f(:\n    pass",
    "no syntax at run time": "compile('1 +', 'there', 'exec')",
    "its own excepthook": "import sys, traceback\n"
    "sys.excepthook = lambda *e: print('HOOK', ''.join(traceback.format_exception(*e)))\n"
    "1 / 0",
    "an excepthook that fails": "import sys\nsys.excepthook = 3\n1 / 0",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\n1 / 0",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "warns": "import warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('odd')",
}


@pytest.mark.parametrize("name", ENDS)
def test_run_ends_as_a_plain_run(name: str, tmp_path: Path) -> None:
    beside(tmp_path, script(tmp_path, ENDS[name]))


@pytest.mark.parametrize("name", ["raises", "exit 3", "raises KeyboardInterrupt", "no syntax"])
def test_run_by_the_console_script_ends_as_a_plain_run(name: str, tmp_path: Path) -> None:
    beside(tmp_path, script(tmp_path, ENDS[name]), ours=SCRIPT)


def test_run_module_raises_as_a_plain_run(tmp_path: Path) -> None:
    script(tmp_path, ENDS["raises"], "mod.py")
    assert "runpy" in beside(tmp_path, "-m", "mod")[2]


SEEN = """
    import json, sys
    from pathlib import Path

    class Point:
        x: int = 0

    def spec(module):
        return None if module is None else (module.name, module.origin, module.parent)

    main = sys.modules["__main__"]
    assert main.__dict__ is globals()
    print(sys.argv, sys.path, __name__, __file__, __package__, __cached__, spec(__spec__), type(__loader__), __doc__)
    print(sorted(vars(main)), type(__builtins__), __annotations__, Point.__annotations__, (lambda: 0).__code__.co_filename)
    print(sys.flags, Path.cwd())
"""


@pytest.mark.parametrize("ours", [OURS, SCRIPT], ids=["module", "console script"])
@pytest.mark.parametrize("name", ["script.py", "sub/script.py", "./sub/../script.py", "link.py"])
def test_a_script_sees_what_it_sees_in_a_plain_run(name: str, ours: Sequence[str], tmp_path: Path) -> None:
    for place in ("script.py", "sub/script.py"):
        script(tmp_path, SEEN, place)
    (tmp_path / "link.py").symlink_to("sub/script.py")
    out = beside(tmp_path, name, "a", "--out", "b", "-q", "--", "-m", "--help", ours=ours)[1]
    assert f"['{name}', 'a', '--out', 'b', '-q', '--', '-m', '--help']" in out


def test_an_absolute_path_and_a_safe_path(tmp_path: Path) -> None:
    name = script(tmp_path, SEEN, "sub/script.py")
    beside(tmp_path, str(tmp_path / name))
    plain, watched = start(tmp_path, "-P", name), start(tmp_path, "-P", *OURS, "-q", name)
    assert ends(plain) == ends(watched)


@pytest.mark.parametrize("module", ["mod", "pack", "pack.inner", "pack.none", "nothing", "pack.empty"])
def test_a_module_sees_what_it_sees_in_a_plain_run(module: str, tmp_path: Path) -> None:
    script(tmp_path, SEEN, "mod.py")
    script(tmp_path, "print('init')", "pack/__init__.py")
    script(tmp_path, SEEN, "pack/__main__.py")
    script(tmp_path, "from . import other\n" + textwrap.dedent(SEEN), "pack/inner.py")
    script(tmp_path, "print(__name__)", "pack/other.py")
    (tmp_path / "pack" / "empty").mkdir()
    beside(tmp_path, "-m", module, "--out", "x")


def test_a_folder_and_an_archive_run_their_main(tmp_path: Path) -> None:
    script(tmp_path, SEEN, "app/__main__.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(tmp_path / "app" / "__main__.py", "__main__.py")
    for name in ("app", "app.zip"):
        assert "__main__" in beside(tmp_path, name, "1")[1]


@pytest.mark.parametrize("text", [b"# coding: latin-1\nprint('\xe4')", b"\xef\xbb\xbfprint('\xc3\xa4')", b"x = '\xe4'"])
def test_source_is_decoded_as_python_does(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_bytes(text)
    beside(tmp_path, "script.py")


def test_a_program_has_its_main_module(tmp_path: Path) -> None:
    program = """
        import dataclasses, inspect, pickle, sys, typing

        @dataclasses.dataclass
        class Point:
            x: int
            y: "list[Point]"

        if __name__ == "__main__":
            import __main__
            point = Point(1, [Point(2, [])])
            print(pickle.loads(pickle.dumps(point)) == point, pickle.dumps(Point))
            print(inspect.getsource(Point), inspect.getmodule(Point), typing.get_type_hints(Point))
            print(__main__.Point is Point, sys.modules["__main__"] is __main__)
    """
    assert "True True" in beside(tmp_path, script(tmp_path, program))[1]


@FORKS
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_finds_the_main_module(method: str, tmp_path: Path) -> None:
    program = f"""
        import multiprocessing, os, sys

        class Box:
            def __init__(self, value): self.value = value

        def work(box):
            return Box(box.value + 1)

        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            with context.Pool(1) as pool:
                print([box.value for box in pool.map(work, [Box(1), Box(2)])], sys.argv)
    """
    assert "[2, 3]" in beside(tmp_path, script(tmp_path, program), "x")[1]
    beside(tmp_path, "-m", "script", "x")


def test_stdin_is_the_programs(tmp_path: Path) -> None:
    program = "import sys\nprint(input())\nprint(sys.stdin.read().upper())\ninput()"
    assert "TWO" in beside(tmp_path, script(tmp_path, program), stdin="one\ntwo\nthree\n")[1]


@FORKS
def test_a_forked_child_ends_by_itself(tmp_path: Path) -> None:
    program = """
        import os, sys
        child = os.fork()
        if not child:
            print("child", flush=True)
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if not os.fork():
            1 / 0
        os.wait()
    """
    name = script(tmp_path, program)
    beside(tmp_path, name)
    # Only the parent tells what it has seen.
    assert ends(start(tmp_path, *OURS, name))[2].count("opintercept: ") == 1


def test_asyncio_and_threads_that_outlive_the_program(tmp_path: Path) -> None:
    program = """
        import asyncio, atexit, threading, time

        async def main():
            await asyncio.sleep(0.01)
            print("ran")

        def late():
            time.sleep(0.2)
            print("late")

        atexit.register(print, "at exit")
        threading.Thread(target=late).start()
        asyncio.run(main())
        print("end of main")
    """
    assert beside(tmp_path, script(tmp_path, program))[1] == "ran\nend of main\nlate\nat exit\n"


def test_a_program_without_torch_gets_none(tmp_path: Path) -> None:
    program = """
        import importlib.util, sys
        found = importlib.util.find_spec("torch")
        print(found is not None, type(found.loader).__name__, "torch" in sys.modules)
    """
    name = script(tmp_path, program)
    assert beside(tmp_path, name)[1] == "True SourceFileLoader False\n"
    assert ends(start(tmp_path, *OURS, name))[2] == (
        "opintercept: nothing to see, the program's process has not imported torch\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run needs a program, got none"),
        (["missing.py"], "a script must be a file that can be read, got 'missing.py'"),
        (["--overwrite", "script.py"], "--overwrite is about a recording, got no --out"),
        (["--flight", "3", "script.py"], "--flight is about a recording, got no --out"),
        (["--flight", "0", "script.py"], "must be a whole number of at least 1, got '0'"),
        (["--steps", "a:3", "script.py"], "must be a step, or a range of steps as in 0:100, got 'a:3'"),
        (["--hooks", "fly", "script.py"], "invalid choice: 'fly'"),
        (["--fly", "script.py"], "unrecognized arguments: --fly"),
    ],
)
def test_bad_options_exit_with_2_before_the_program_runs(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    script(tmp_path, "print('ran')")
    status, out, err = ends(start(tmp_path, *OURS, *arguments))
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "mm,nope"], "unknown op 'nope'"),
        (["--ops", "all", "--engine", "kernel"], "the kernel engine needs a finite set of ops"),
        (["--level", "function", "--threads", "all"], 'threads="all" needs the kernel engine'),
    ],
)
def test_what_only_torch_can_refuse_exits_with_2_where_it_is_imported(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    name = script(tmp_path, "print('before', flush=True)\nimport torch\nprint('after')")
    status, out, err = ends(start(tmp_path, *OURS, *arguments, name))
    assert (status, out) == (2, "before\n")
    assert err.startswith("opintercept run: ")
    assert message in err
    assert len(err.splitlines()) == 1
