"""`opintercept run` as a user sees it: each program is compared with a plain run of it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from compiler import needs_compiler
from processes import Program, for_torchrun, run_python

from opintercept import hooks, runs
from opintercept._core.text import amount
from opintercept.cli.run.hooks import HOOKS

pytestmark = pytest.mark.slow

OURS = ("-m", "opintercept", "run")
# What the console script does, whose own folder is sys.path[0].
SCRIPT = ("-c", "import sys; sys.argv[0] = 'opintercept'; from opintercept.cli import main; sys.exit(main())", "run")
SUMMARY = re.compile(r"^opintercept: (?P<calls>[\d,]+) calls?, (?P<flop>\S+ \w*FLOP)", re.MULTILINE)
FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")


_started: list[subprocess.Popen[str] | Program] = []


@pytest.fixture(autouse=True)
def kill_started_programs() -> Iterator[None]:
    """End the programs of a test with it, even if it fails."""
    yield
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()


def start(folder: Path, *arguments: str, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    piped: dict[str, object] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, *arguments], cwd=folder, text=True, env=environment, **(piped | options)
    )
    _started.append(process)
    return process  # type: ignore[no-any-return]


def fork(folder: Path, *arguments: str) -> Program:
    """Start a program where torch is imported already, which saves seconds."""
    process = Program(arguments, cwd=folder)
    _started.append(process)
    return process


def ends(process: subprocess.Popen[str] | Program, stdin: str = "") -> tuple[int, str, str]:
    if isinstance(process, Program):
        return process.wait(), process.stdout, process.stderr
    out, err = process.communicate(stdin, timeout=300)
    return process.returncode, out, err


def watch(folder: Path, *arguments: str, status: int = 0) -> tuple[str, str]:
    """Watch a program that ends with this status, and return what it prints on stdout and stderr."""
    got, out, err = ends(fork(folder, *OURS, *arguments))
    assert got == status, err
    return out, err


def no_address(text: str) -> str:
    return re.sub("0x[0-9a-f]+", "0x", text)


def script(folder: Path, program: str, name: str = "script.py") -> str:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(textwrap.dedent(program), encoding="utf-8")
    return name


def beside(folder: Path, *arguments: str, ours: Sequence[str] = OURS, stdin: str = "") -> tuple[int, str, str]:
    """Check that a quiet run gives what a plain run gives, and return it."""
    plain = start(folder, *arguments)
    watched = start(folder, *ours, "-q", *arguments)
    expected, got = ends(plain, stdin), ends(watched, stdin)
    assert no_address(str(got)) == no_address(str(expected))
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
    "raises an error of ours": "from opintercept import HookError\nraise HookError('mine')",
    "interrupts itself": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass",
    "raises KeyboardInterrupt": "raise KeyboardInterrupt",
    "raises KeyboardInterrupt in a call": "def f():\n    raise KeyboardInterrupt('x')\nf()",
    "syntax error": "def f(:\n    pass",
    "syntax error at run time": "compile('1 +', 'there', 'exec')",
    "its own excepthook": "import sys, traceback\n"
    "sys.excepthook = lambda *e: print('HOOK', ''.join(traceback.format_exception(*e)))\n"
    "1 / 0",
    "atexit": "import atexit\natexit.register(print, 'one')\natexit.register(print, 'two')\n1 / 0",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "warns": "import warnings\nwarnings.warn('old', DeprecationWarning)\nwarnings.warn('odd')",
}


@pytest.mark.parametrize("name", ENDS)
def test_run_ends_as_a_plain_run(name: str, tmp_path: Path) -> None:
    beside(tmp_path, script(tmp_path, ENDS[name]))


@pytest.mark.parametrize("name", ["raises", "exit 3", "raises KeyboardInterrupt", "syntax error"])
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
    print(sorted(vars(main)), type(__builtins__), __annotations__, Point.__annotations__)
    print((lambda: 0).__code__.co_filename)
    print(sys.flags, Path.cwd())
"""


@pytest.mark.parametrize("ours", [OURS, SCRIPT], ids=["module", "console script"])
@pytest.mark.parametrize("name", ["script.py", "sub/script.py", "./sub/../script.py", "link.py"])
def test_a_script_sees_what_it_sees_in_a_plain_run(name: str, ours: Sequence[str], tmp_path: Path) -> None:
    for place in ("script.py", "sub/script.py"):
        script(tmp_path, SEEN, place)
    (tmp_path / "link.py").symlink_to("sub/script.py")
    out = beside(tmp_path, name, "a", "--e", "--out", "b", "-q", "--", "-m", "--help", ours=ours)[1]
    assert f"['{name}', 'a', '--e', '--out', 'b', '-q', '--', '-m', '--help']" in out


def test_run_keeps_sys_path_for_absolute_and_safe_paths(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("text", [b"# coding: latin-1\nprint('\xe4')", b"\xef\xbb\xbfprint('\xc3\xa4')"])
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


def test_the_program_reads_stdin(tmp_path: Path) -> None:
    program = "import sys\nprint(input())\nprint(sys.stdin.read().upper())\ninput()"
    assert "TWO" in beside(tmp_path, script(tmp_path, program), stdin="one\ntwo\nthree\n")[1]


@FORKS
def test_a_forked_child_exits_without_a_report(tmp_path: Path) -> None:
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
    # Only the parent prints a report.
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


def test_torch_is_not_imported_for_a_program_without_it(tmp_path: Path) -> None:
    program = """
        import importlib.util, sys
        found = importlib.util.find_spec("torch")
        print(found is not None, type(found.loader).__name__, "torch" in sys.modules)
    """
    name = script(tmp_path, program)
    assert beside(tmp_path, name)[1] == "True SourceFileLoader False\n"
    assert ends(start(tmp_path, *OURS, name))[2] == NOTHING


NOTHING = "opintercept: nothing to show, since the program did not import torch\n"


def test_a_program_may_replace_or_close_its_streams(tmp_path: Path) -> None:
    name = script(tmp_path, "import io, sys\nsys.stdout = sys.stderr = io.StringIO()")
    assert ends(start(tmp_path, *OURS, name)) == (0, "", NOTHING)
    name = script(tmp_path, "import sys\nsys.stdout.close()\nsys.stderr.close()")
    assert ends(start(tmp_path, *OURS, name)) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no program given; use `opintercept run script.py`"),
        (["missing.py"], "cannot read the script 'missing.py'"),
        (["--overwrite", "script.py"], "--overwrite needs --out FOLDER"),
        (["--tensors", "full", "script.py"], "--tensors needs --out FOLDER, the folder to record to"),
        (["--every-steps", "3", "script.py"], "--every-steps needs --out FOLDER"),
        (["--max-bytes", "3M", "script.py"], "--max-bytes needs --out FOLDER"),
        (["--flight", "3", "script.py"], "--flight needs --out FOLDER"),
        (["--flight", "0", "script.py"], "must be a whole number of at least 1, got '0'"),
        (["--steps", "a:3", "script.py"], "must be a step or a range of steps such as 0:100, got 'a:3'"),
        (["--hooks", "profile,noise", "script.py"], "got 'noise'; a hook that needs arguments"),
        (["--hooks", "fly", "script.py"], "must be some of profile,nonfinite,stats,"),
        (["--fly", "script.py"], "unrecognized arguments: --fly"),
    ],
)
def test_bad_options_exit_with_2_before_the_program_runs(arguments: list[str], message: str, tmp_path: Path) -> None:
    script(tmp_path, "print('ran')")
    status, out, err = ends(start(tmp_path, *OURS, *arguments))
    assert (status, out) == (2, "")
    assert message in err


TRAIN = """
    import atexit, threading
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer, other = torch.optim.AdamW(model[0].parameters()), torch.optim.SGD(model[2].parameters())
    for step in range(5):
        loss = model(torch.randn(2, 8)).sum()
        loss.backward()
        optimizer.step()
        other.step()
    print("loss", loss.item(), torch.rand(()).item())
    threading.Timer(0.2, lambda: torch.ones(3, 3) @ torch.ones(3, 3)).start()
    atexit.register(lambda: torch.ones(3) @ torch.ones(3))
"""


def test_a_training_run_is_reported_on_stderr_and_recorded(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN)
    plain, watched = fork(tmp_path, name), start(tmp_path, *OURS, "--out", "run", "--limit", "3", name)
    (status, out, err), expected = ends(watched), ends(plain)
    assert (status, out, "") == expected
    lines = err.splitlines()
    # 5 steps of 2 products forward and 3 backward, and those of the thread and at exit.
    assert re.fullmatch(r"opintercept: 27 calls, 9.02 kFLOP, 0 not finite, \S+ ms in total", lines[0])
    assert lines[1].split()[:6] == ["module", "op", "shape", "dtype", "phase", "calls"]
    assert len(lines[2:5]) == 3
    assert lines[5] == "... and 4 more; --limit 7 shows them"
    assert lines[6:8] == [
        "no watched call made a value that is not finite; only matmul, convolution were watched",
        "to watch every operator: opintercept run --stop --ops all script.py",
    ]
    (recorded,) = lines[8:]
    folder = re.escape(str(tmp_path / "run"))
    assert re.fullmatch(
        rf"recorded 27 calls, [\d.]+ kB, in {folder}; to look at it: opintercept show {folder}", recorded
    )
    run = runs.open_run(tmp_path / "run")
    assert run.info.argv == ("script.py",)
    assert run.info.finished
    calls = list(run.calls())
    assert [call.record.step for call in calls[:25]] == sorted([*range(5)] * 5)
    assert len(calls) == 27
    assert all(call.values["output"].finite for call in calls)
    assert {call.record.source.split(" in ")[0] for call in calls if call.record.source} >= {"script.py:9"}


LOG = """
    import sys, torch
    x = torch.ones(2, 2, requires_grad=True)
    loss = (x @ x).sum() + torch.log(torch.tensor(float(sys.argv[1])))
    loss.backward()
"""


@pytest.mark.parametrize("ops", ["all", "all,-view"])
def test_nothing_is_left_to_watch_where_all_that_makes_values_was_watched(ops: str, tmp_path: Path) -> None:
    err = watch(tmp_path, "--stop", "--ops", ops, script(tmp_path, LOG), "1")[1]
    assert err.splitlines()[-1] == "no watched call made a value that is not finite"


@pytest.mark.parametrize(
    ("options", "ops"),
    [
        ([], "matmul, convolution"),
        (["--ops", "mm"], "mm"),
        (["--module", "*", "--steps", "0:9"], "matmul, convolution (--module, --steps)"),
    ],
)
def test_a_nan_of_an_unwatched_operator_is_found_by_the_printed_command(
    options: list[str], ops: str, tmp_path: Path
) -> None:
    name = script(tmp_path, LOG)
    *_, said, command = watch(tmp_path, "--stop", *options, name, "-1")[1].splitlines()
    assert said == f"no watched call made a value that is not finite; only {ops} were watched"
    head, _, words = command.partition(": opintercept run ")
    assert head == "to watch every operator"
    _, err = watch(tmp_path, *shlex.split(words), status=1)
    assert "NaN is made by aten::log in no module (script.py:4 in <module>), step 0" in err
    _, err = watch(tmp_path, *shlex.split(words)[:-1], "1")
    assert err.splitlines()[-1] == "no watched call made a value that is not finite"


@needs_compiler
def test_compiled_kernels_search_all_operators_for_nan(tmp_path: Path) -> None:
    name = script(tmp_path, LOG)
    made = "NaN is made by aten::log in no module (script.py:4 in <module>), step 0"
    _, err = watch(tmp_path, "--engine", "compiled", "--out", "run", name, "-1")
    assert made in err
    assert [call.record.op for call in runs.open_run(tmp_path / "run").calls()] == ["aten::mm"] * 3
    assert (found := SUMMARY.search(err)) is not None
    assert int(found["calls"]) == 3
    assert f"opintercept.Stopped: {made}" in watch(tmp_path, "--engine", "compiled", "--stop", name, "-1", status=1)[1]
    _, err = watch(tmp_path, "--engine", "compiled", "--stop", name, "1")
    assert err.splitlines()[-1] == "no watched call made a value that is not finite"


SCALED = """
    import torch
    torch.manual_seed(0)
    model, scaler = torch.nn.Linear(4, 1), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(12):
        with torch.autocast("cpu", torch.float16):
            loss = model(100 * torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(scaler.get_scale() < 2.0**20)
"""


def test_a_gradient_that_a_scaler_discards_does_not_stop_a_program(tmp_path: Path) -> None:
    out, err = watch(tmp_path, "--stop", script(tmp_path, SCALED))
    assert out == "True\n"
    found = re.search(r"opintercept: 24 calls, .* (\d+) not finite", err)
    assert found is not None, err
    assert err.splitlines()[-4:] == [
        "no other watched call made a value that is not finite; only matmul, convolution were watched",
        f"{found[1]} calls with gradients that a GradScaler discards, the first:",
        "  aten::mm in module 'Linear' (script.py:8 in <module>), step 0, call 1 (backward)",
        "to watch every operator: opintercept run --stop --ops all script.py",
    ]


FAILS = """
    import torch

    def multiply(a, b):
        return a @ b

    try:
        multiply(torch.ones(2, 3), torch.ones(4, 5))
    except RuntimeError as error:
        torch.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(7, 5))
"""


@pytest.mark.parametrize(
    "options",
    [[], ["--engine", "mode"], pytest.param(["--engine", "compiled"], marks=needs_compiler), ["--level", "function"]],
    ids=" ".join,
)
def test_a_failing_operator_prints_the_traceback_of_a_plain_run(tmp_path: Path, options: list[str]) -> None:
    name = script(tmp_path, FAILS)
    plain, ours = fork(tmp_path, name), fork(tmp_path, *OURS, "-q", *options, name)
    expected = ends(plain)
    assert "shapes cannot be multiplied" in expected[2]
    assert ends(ours) == expected


def test_run_watches_matmuls_and_convolutions(tmp_path: Path) -> None:
    program = """
        import torch
        data, weight = torch.ones(1, 2, 4, 4), torch.ones(3, 2, 3, 3, requires_grad=True)
        (torch.conv2d(data, weight).reshape(3, 4) @ torch.ones(4, 1)).sum().backward()
        """
    name = script(tmp_path, program)
    convolution, product = 2 * 4 * 3 * 18, 2 * 3 * 4
    for options, calls, flop in (
        ((), 4, 2 * convolution + 2 * product),
        (("--ops", "matmul"), 2, 2 * product),
        (("--ops", "convolution"), 2, 2 * convolution),
        (("--ops", "mm,convolution_backward"), 3, convolution + 2 * product),
    ):
        _, err = watch(tmp_path, *options, name)
        found = SUMMARY.search(err)
        assert found is not None, err
        assert (int(found["calls"]), found["flop"]) == (calls, amount(flop, "FLOP"))


def test_options_that_need_torch_to_check_exit_with_2_at_its_import(tmp_path: Path) -> None:
    name = script(tmp_path, "print('before', flush=True)\nimport torch\nprint('after')")
    status, out, err = ends(start(tmp_path, *OURS, "--ops", "mm,qqqq", name))
    assert (status, out) == (2, "before\n")
    message = "opintercept run: ops must be names of operators, got unknown op 'qqqq'; see torch.ops for .*\n"
    assert re.fullmatch(message, err)


def test_a_program_may_use_intercept_itself(tmp_path: Path) -> None:
    program = """
        import os, threading
        os.environ["OMP_NUM_THREADS"] = "3"

        def late():
            import torch

        thread = threading.Thread(target=late)
        thread.start()
        thread.join()
        import torch
        from opintercept import hooks, intercept

        print(torch.get_num_threads())
        recorder = hooks.Recorder()
        with intercept(recorder):
            torch.ones(2, 3) @ torch.ones(3, 4)
            if os.fork() == 0:
                torch.ones(2, 3) @ torch.ones(3, 4)
                raise SystemExit
            os.wait()
        print([(str(record), record.source) for record in recorder.records])
        forgotten = intercept(hooks.NonFinite())
        forgotten.__enter__()
        torch.full((2, 2), float("inf")) @ torch.eye(2)
    """
    name = script(tmp_path, program)
    plain, watched = start(tmp_path, name), start(tmp_path, *OURS, "-q", name)
    expected, got = ends(plain), ends(watched)
    assert got[:2] == expected[:2]
    # The traceback of a hook shows the frames that lead to it, here through our second interceptor.
    inside = re.compile(r'  File "[^"]*_core/pipeline.py".*\n    .*\n.*\^\n')
    assert no_address(inside.sub("", got[2])) == no_address(inside.sub("", expected[2]))
    assert "in post" in got[2]
    assert "NonFiniteError: NaN is made by aten::mm in no module (script.py:25" in got[2]


WAITS = """
    import os, signal, sys, time
    import torch

    torch.ones(2, 3) @ torch.full((3, 4), float("nan"))
    while not os.path.getsize(sys.argv[1] + "/calls.bin"):  # it is written once a second
        time.sleep(0.05)
    print("ready", flush=True)
    signal.pause()
"""


@FORKS
def test_a_signal_ends_the_program_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    name = script(tmp_path, WAITS)
    processes = {n: fork(tmp_path, *OURS, "--out", f"run{n}", name, f"run{n}") for n in (signal.SIGINT, signal.SIGTERM)}
    for number, process in processes.items():
        process.says("ready\n")
        time.sleep(0.3)  # until it pauses: a traceback marks what part of a line it was in
        process.kill(number)
        status, _, err = ends(process)
        assert status == -number
        run = runs.open_run(tmp_path / f"run{number}")
        (call,) = run.calls()
        assert call.values["output"].nan == 8
        assert run.info.finished is (number == signal.SIGINT)
        if number == signal.SIGTERM:
            assert err == ""
            continue
        where = f'  File "{tmp_path / name}", line 9, in <module>\n    signal.pause()\n'
        assert err.startswith(f"Traceback (most recent call last):\n{where}KeyboardInterrupt\nopintercept: 1 call,")
        assert (
            "NaN comes into aten::mm in no module (script.py:5 in <module>), step 0, call 0 (forward), through rhs"
            in err
        )


def test_filters_choose_what_is_shown_and_recorded(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN)
    filters = ["--steps", "1:3", "--phase", "backward", "--module", "2*", "--ops", "mm,addmm", "--hooks", "stats"]
    _, err = watch(tmp_path, *filters, "--out", "run", "--tensors", "none", name)
    assert err.startswith("opintercept: 4 calls, ")
    assert re.search(r"^2 +mm +output +backward +4 ", err, re.MULTILINE)
    run = runs.open_run(tmp_path / "run")
    assert [(c.record.step, c.record.module, dict(c.values)) for c in run.calls()] == [
        (step, "2", {}) for step in (1, 1, 2, 2)
    ]


def test_every_hook_that_needs_no_arguments_can_be_shown(tmp_path: Path) -> None:
    made = []
    for name in hooks.__all__:
        with contextlib.suppress(TypeError):
            made += [name] if hasattr(getattr(hooks, name)(), "reads") else []
    assert sorted(made) == sorted(HOOKS)
    names = [re.sub("(?<!^)([A-Z])", r"_\1", name).lower() for name in HOOKS if name != "NonFinite"]
    _, err = watch(tmp_path, "--hooks", ",".join(names), "--hooks", "NonFinite", script(tmp_path, TRAIN))
    assert "stopped" not in err
    assert re.search(r"^module +op +operand +phase +calls ", err, re.MULTILINE)  # of Stats
    assert re.search(r"^2 +aten::mm +\d+ +\w+ +\[\d", err, re.MULTILINE)  # of Gradients
    assert "nothing compared: torch.distributed is not initialised" in err


def test_an_audit_says_which_share_was_seen_and_names_the_rest(tmp_path: Path) -> None:
    program = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 8)).cumsum(0).sum().backward()
            optimizer.step()
        print(model.weight.sum().item())
    """
    name = script(tmp_path, program)
    plain = ends(fork(tmp_path, name))[1]
    out, err = watch(tmp_path, "--audit", name)
    assert out == plain
    share = re.search(r"^([\d.]+)% of [\d.]+ ms in operators on the CPU lies inside \d+ seen calls$", err, re.MULTILINE)
    assert share is not None
    assert float(share[1]) > 50
    assert "cumsum" not in err
    _, err = watch(tmp_path, "--audit", "--steps", "1:3", "--ops", "matmul", name)
    assert "lies inside 4 seen calls" in err
    assert re.search(r"^aten::cumsum +operator +4 ", err, re.MULTILINE)


@pytest.mark.parametrize("option", [["--out", "a"], ["--stop"], ["--hooks", "stats"], ["--module", "a"], ["--quiet"]])
def test_an_audit_runs_alone(tmp_path: Path, option: list[str]) -> None:
    _, err = watch(tmp_path, "--audit", *option, script(tmp_path, "import torch"), status=2)
    assert f"--audit looks at all calls and runs no other hook; leave out {option[0]}" in err


def test_git_does_not_see_a_run(tmp_path: Path) -> None:
    name = script(tmp_path, "import torch\ntorch.ones(2, 2) @ torch.ones(2, 2)")
    for options in (), ("--overwrite",):
        watch(tmp_path, "--out", "runs/a", *options, name)
        assert (tmp_path / "runs" / "a" / ".gitignore").read_text() == "*\n"
    watch(tmp_path, "--out", "unmade", "--flight", "3", name)
    assert not list((tmp_path / "unmade").glob("*"))


def test_flight_records_the_last_calls_of_a_program_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    program = """
        import sys, torch
        for n in range(1, 9):
            torch.ones(2, n) @ torch.ones(n, 2)
        if sys.argv[1:]:
            sys.exit(0)
        torch.ones(2, 3) @ torch.ones(4, 5)
    """
    name = script(tmp_path, program)
    _, err = watch(tmp_path, "--out", "fails", "--flight", "3", name, status=1)
    assert "8 calls, 288 FLOP, 1 raised" in err
    calls = list(runs.open_run(tmp_path / "fails").calls())
    assert [call.record.lhs.shape[1] for call in calls if call.record.lhs] == [7, 8, 3]
    # torch 2.15 names the operator: "mm: mat1 and mat2 ..."
    assert re.match("RuntimeError: (mm: )?mat1 and mat2 shapes", calls[-1].error or "")
    _, err = watch(tmp_path, "--out", "ends", "--flight", "3", name, "well")
    assert err.splitlines()[-1] == "nothing recorded: the program did not fail"
    assert not (tmp_path / "ends").exists()


def test_a_run_is_overwritten_only_on_request(tmp_path: Path) -> None:
    name = script(tmp_path, "import torch\ntorch.ones(2, 3) @ torch.ones(3, 2)")
    watch(tmp_path, "--out", "replaced", name)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "run.json").write_text("{}")
    _, err = watch(tmp_path, "--out", "kept", name, status=2)
    assert "already holds a run" in err
    assert "name another folder, or add --overwrite\n" in err
    assert (tmp_path / "kept" / "run.json").read_text() == "{}"
    watch(tmp_path, "--out", "replaced", "--overwrite", name)
    assert len(list(runs.open_run(tmp_path / "replaced").calls())) == 1


def test_recording_statistics_needs_no_extra_and_recording_values_names_it(tmp_path: Path) -> None:
    for name in ("rich", "safetensors"):
        script(tmp_path, f"raise ModuleNotFoundError('no {name} here', name='{name}')", f"{name}.py")
    name = script(tmp_path, "import torch\ntorch.ones(2, 3) @ torch.ones(3, 2)")
    _, err = watch(tmp_path, "--out", "stats", name)
    assert err.startswith("opintercept: 1 call, 24 FLOP, 0 not finite")
    _, err = watch(tmp_path, "--out", "full", "--tensors", "full", name, status=2)
    assert "pip install 'opintercept[cli]'" in err
    assert not (tmp_path / "full").exists()
    status, out, _ = ends(fork(tmp_path, "-m", "opintercept", "show", "stats"))
    assert status == 0
    assert "calls     1 call, 24 FLOP" in out


def test_every_records_every_nth_step_and_reports_all(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN)
    _, err = watch(tmp_path, "--out", "every", "--every-steps", "2", name)
    assert err.startswith("opintercept: 27 calls, ")
    assert {call.record.step for call in runs.open_run(tmp_path / "every").calls()} == {0, 2, 4}
    both = ("--out", "both", "--every-steps", "2", "--steps", "1:5", "--tensors", "none")
    _, err = watch(tmp_path, *both, name)
    assert err.startswith("opintercept: 20 calls, ")
    steps = [call.record.step for call in runs.open_run(tmp_path / "both").calls()]
    assert steps == [1] * 5 + [3] * 5


def test_max_bytes_ends_the_recording_but_not_the_program(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN)
    plain, watched = fork(tmp_path, name), fork(tmp_path, *OURS, "--out", "run", "--max-bytes", "9k", name)
    expected, (status, out, err) = ends(plain), ends(watched)
    assert (status, out) == expected[:2]
    assert "stopped recording to " in err
    assert "max_bytes=9000" in err
    assert 5000 < sum(path.stat().st_size for path in (tmp_path / "run").iterdir()) <= 9000
    assert not runs.open_run(tmp_path / "run").info.finished


SWALLOWS = """
    import torch

    def step(number):
        try:
            return torch.ones(2, 3) @ torch.full((3, 2), float("nan") if number > 2 else 1.0)
        except Exception:
            print("went on")

    try:
        for number in range(9):
            step(number)
    finally:
        print("saved")
    print("end")
"""


@pytest.mark.parametrize("options", [[], ["-q"], ["--hooks", "profile"], ["--steps", "0"]], ids=" ".join)
def test_stop_ends_the_program_at_the_first_nan(options: list[str], tmp_path: Path) -> None:
    name = script(tmp_path, SWALLOWS)
    out, err = watch(tmp_path, "--stop", "--out", "run", *options, name, status=1)
    assert out == "saved\n"
    trace, _, rest = err.partition("opintercept.Stopped: ")
    assert trace.startswith("Traceback (most recent call last):\n")
    assert re.findall(r"line (\d+), in (\S+)", trace) == [("12", "<module>"), ("6", "step")]
    assert re.match(r"NaN comes into aten::mm in no module \(script.py:6 in step\),.* call 3 \(forward\)", rest)
    run = runs.open_run(tmp_path / "run")
    assert run.info.finished
    assert [call.values["output"].nan for call in run.calls()] == [0, 0, 0, 4]


def test_stop_changes_nothing_if_everything_is_finite(tmp_path: Path) -> None:
    name = script(tmp_path, TRAIN)
    assert ends(fork(tmp_path, *OURS, "-q", "--stop", name)) == ends(fork(tmp_path, name))


def test_stop_works_in_the_backward_pass_and_in_threads(tmp_path: Path) -> None:
    backward = """
        import torch
        x = torch.zeros(2, 2, requires_grad=True)
        (x @ torch.zeros(2, 2)).sqrt().sum().backward()  # infinite times 0
        torch.eye(2) @ torch.eye(2)
        print("end")
    """
    thread = """
        import threading, torch
        thread = threading.Thread(target=lambda: torch.full((2, 2), float("nan")) @ torch.eye(2))
        thread.start()
        thread.join()
        print("joined")
        torch.eye(2) @ torch.eye(2)
        print("end")
    """
    for program, expected in ((backward, ""), (thread, "joined\n")):
        out, err = watch(tmp_path, "-q", "--stop", script(tmp_path, program), status=1)
        assert out == expected
        assert "opintercept.Stopped: NaN " in err


@FORKS
def test_a_terminal_shows_a_line_of_progress_and_removes_it(tmp_path: Path) -> None:
    import pty

    program = """
        import sys, time, torch
        for _ in range(10):
            torch.ones(2, 3) @ torch.ones(3, 2)
            time.sleep(0.1)
        raise ValueError("the end")
    """
    name = script(tmp_path, program)
    leader, follower = pty.openpty()
    process = start(tmp_path, *OURS, name, stderr=follower)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the error that a closed terminal gives
        while part := os.read(leader, 1024):
            shown += part
    os.close(leader)
    assert ends(process)[:2] == (1, "")
    parts = shown.decode().replace("\r\n", "\n").split("\r\x1b[K")
    lines = [part for part in parts if re.fullmatch(r"opintercept: \d+ calls?, \d+ FLOP, 0 not finite", part)]
    assert 2 <= len(lines) <= 5
    assert parts[len(lines) + 1].startswith("Traceback (most recent call last):\n")
    assert "opintercept: 10 calls, 240 FLOP, 0 not finite, " in parts[-1]


def test_a_filter_that_matches_nothing_warns_once_even_if_warnings_are_errors(tmp_path: Path) -> None:
    program = """
        import sys, warnings, torch
        warnings.simplefilter(sys.argv[1])
        torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 2))
    """
    name = script(tmp_path, program)
    for action in ("default", "error"):
        _, err = watch(tmp_path, "--module", "1*", name, action)
        assert err.count("matches module='1*'; calls come from '0'") == 1
        assert "Traceback" not in err
        assert "opintercept: 0 calls, " in err


def test_the_thread_that_writes_has_ended_before_the_last_wait_for_threads(tmp_path: Path) -> None:
    program = """
        import threading
        import torch
        from opintercept._engines import scope

        wait = scope.let_threads_end

        def told():
            print([each.name for each in threading.enumerate() if each.name.startswith("opintercept writes")])
            wait()

        scope.let_threads_end = told
        torch.ones(2, 2) @ torch.ones(2, 2)
    """
    name = script(tmp_path, program)
    done = run_python(*OURS, "--out", "run", name, cwd=tmp_path, check=True)
    assert done.stdout == "[]\n"


def test_each_rank_records_a_folder_and_rank_0_reports(tmp_path: Path) -> None:
    program = """
        import os, torch
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        for _ in range(1 + rank):
            torch.ones(2, 3) @ torch.ones(3, 2)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    """
    name = script(tmp_path, program)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = os.environ | for_torchrun(tmp_path)
    err = run_python(*torchrun, *OURS, "--out", "run", name, cwd=tmp_path, env=environment, check=True).stderr
    (shown,) = [line for line in err.splitlines() if line.startswith("opintercept: ")]
    assert shown.startswith("opintercept: 1 call, 24 FLOP, 0 not finite, ")
    run = runs.open_run(tmp_path / "run")
    assert {rank: len(list(run.calls(rank))) for rank in run.ranks} == {0: 1, 1: 2}
    assert all(info.finished for info in run.infos.values())


@pytest.mark.parametrize("name", ["intercept", "hooks.Recorder", "runs.RunRecorder"])
def test_a_program_may_import_torch_by_a_name_of_ours(name: str, tmp_path: Path) -> None:
    program = f"""
        from opintercept import hooks, runs
        import opintercept
        found = opintercept.{name}
        import torch
        torch.ones(2, 3) @ torch.ones(3, 4)
        print(found.__name__)
    """
    status, out, err = ends(start(tmp_path, *OURS, script(tmp_path, program)))
    assert (status, out) == (0, f"{name.rpartition('.')[2]}\n")
    assert err.startswith("opintercept: 1 call, ")
