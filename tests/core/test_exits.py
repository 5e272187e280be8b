"""With blocks that leave nothing behind: interrupts, exceptions from elsewhere, deep stacks, signals, other threads."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch
from compiler import COMPILED, needs_compiler
from interrupts import needs_timer
from processes import run_python
from recorded import TABLES
from threads import run_threads

from opintercept import OpCall, OpInterceptError, intercept, register_op, runs
from opintercept._blocks import outside
from opintercept._engines import dispatch_mode, kernels, patched_functions, quiet, scope
from opintercept.runs.record import writer
from opintercept.runs.store.flight import FLIGHT

# How many interrupts each test delivers. 10,000 make a thorough run, which takes some minutes for each kind of block.
NUMBER = int(os.environ.get("OPINTERCEPT_INTERRUPTS", 0)) or sampled.fewer(150, 15)

# How many it delivers for each engine, kind of block and mode of a recorder.
MOST = NUMBER if "OPINTERCEPT_INTERRUPTS" in os.environ else sampled.fewer(20, 3)

# How many frames fewer there are below a program each time that it runs on a full stack.
STEP = 2 if sampled.on else 1

# How long signals come, each while a block is entered.
SECONDS = sampled.fewer(3, 1)

# An interrupt between `open` and `with` leaves an open file, in Python's own library too. An interrupt in a callback of
# the garbage collector is lost, and Hypothesis leaves such a callback behind.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ENGINES: dict[str, dict[str, Any]] = {
    "kernel": {"engine": "kernel"},
    "mode": {"engine": "mode"},
    "function": {"level": "function"},
    "compiled": {"engine": "compiled"},
}
EVERY: dict[str, dict[str, Any]] = {
    "every": {"ops": "all", "engine": "kernel"},
    "every compiled": {"ops": "all", "engine": "compiled"},
}
A = torch.ones(4, 4)


def square(a: torch.Tensor) -> torch.Tensor:
    return a @ a


@pytest.fixture(autouse=True, scope="module")
def declared() -> Iterator[None]:
    """Declare `square`, so that blocks replace it."""
    with register_op(square, lhs="a", rhs="a"):
        yield


class Framed:
    """A hook that counts its enters and exits."""

    def __init__(self) -> None:
        self.depth = 0

    def enter(self) -> None:
        self.depth += 1

    def exit(self) -> None:
        self.depth -= 1

    def post(self, call: OpCall) -> None: ...


class Program:
    """A small program that enters and leaves blocks in one way, with checks of what it leaves behind."""

    def __init__(self, kind: str) -> None:
        self.hook = Framed()
        self.outer = intercept(self.hook, **(ENGINES | EVERY).get(kind, {}))
        self.inner = intercept(self.hook, engine="mode")
        self.above = intercept(self.hook, level="function")
        self.run: Callable[[], None] = getattr(self, f"run_{kind}", self.run_function)
        self.decorated = self.outer(lambda: A @ A)
        self.generator = self.outer(self.generate)
        self.run()
        self.before = self.state()

    def run_function(self) -> None:
        self.decorated()

    def run_nested(self) -> None:
        with self.outer, self.inner:
            with self.above, self.outer:
                A @ A

    def run_pause(self) -> None:
        with self.outer:
            with self.outer.paused():
                A @ A

    def run_generator(self) -> None:
        for _ in self.generator():
            A @ A

    def run_patched(self) -> None:
        with self.outer:
            square(A)

    @staticmethod
    def generate() -> Generator[None, None, None]:
        A @ A
        yield
        A @ A

    def state(self) -> dict[str, Any]:
        pipelines = [each.watcher.pipeline for each in (self.outer, self.inner, self.above)]
        flags = torch.utils._python_dispatch
        return {
            "hook": self.hook.depth,
            "pipelines": [len(p._entered_by) + len(p._inside) for p in pipelines],
            "blocks": (scope.current().blocks, scope.current().hidden),
            "everywhere": scope.state.everywhere.blocks,
            "in tasks": len(scope.state.in_tasks),
            "kernels": (len(kernels.KERNELS.users), len(kernels.KERNELS.installed)),
            "patches": [(len(p._users), len(p._in_place)) for p in (outside.PATCHES, patched_functions.PATCHES)],
            "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
            "keys": [keys().raw_repr() for keys in KEYS],
            "active": len(dispatch_mode._active),
            "flags": (flags._is_in_torch_dispatch_mode, flags._is_in_non_infra_torch_dispatch_mode),
            "tables": [torch._C._dispatch_dump_table(f"aten::{name}") for name in ("mm", "bmm", "addmm", "add.Tensor")],
        }

    def check(self) -> None:
        assert self.state() == self.before
        self.run()
        assert self.state() == self.before


KEYS = (torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set)
KINDS: list[Any] = ["kernel", "mode", "function", "pause", "nested", "generator", "patched", "every"]
KINDS += [pytest.param(kind, marks=needs_compiler) for kind in ("compiled", "every compiled")]


def seconds_of(run: Callable[[], None], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - started) / times


def interrupted(run: Callable[[], None], check: Callable[[], None], lasts: float, number: int, seconds: float) -> int:
    """Interrupt a program that lasts so many seconds at random moments, check what each leaves, and return how many.

    That is `number`, or less if it takes more than `seconds`.
    """
    draw, delivered = random.Random(0), 0
    end = time.monotonic() + seconds
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while delivered < number and time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, draw.uniform(0, 1.2 * lasts)))
                for _ in range(5):  # and not for ever: Python loses one that comes in a callback of a weak reference
                    run()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                delivered += 1
            check()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return delivered


@needs_timer
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_leaves_nothing_behind(kind: str) -> None:
    program = Program(kind)
    lasts = seconds_of(program.run, 20)
    assert interrupted(program.run, program.check, lasts, NUMBER, 20 + NUMBER / 20) > NUMBER / 4


RECORDERS: dict[str, dict[str, Any]] = {mode: {"tensors": mode} for mode in ("none", "stats", "sample", "full")}
RECORDERS |= {f"flight {mode}": {"flight": 8} | options for mode, options in RECORDERS.items()}


class Recording:
    """A small program that records a run, in a block of one kind."""

    def __init__(self, engine: str, kind: str, recorder: str, path: Path) -> None:
        self.path = path
        self.recorder: dict[str, Any] = {"path": path, "overwrite": True} | RECORDERS[recorder]
        self.options = ENGINES[engine]
        self.body: Callable[[Any], None] = getattr(self, kind)
        self.run()
        self.left = self.state()

    def run(self) -> None:
        self.body(runs.RunRecorder(**self.recorder))

    def plain(self, recorder: runs.RunRecorder) -> None:
        with intercept(recorder, **self.options):
            A @ A

    def again(self, recorder: runs.RunRecorder) -> None:
        interceptor = intercept(recorder, **self.options)
        for _ in range(2):
            with interceptor:
                A @ A

    def nested(self, recorder: runs.RunRecorder) -> None:
        with intercept(recorder, **self.options), intercept([Framed(), recorder], **self.options):
            A @ A

    def pause(self, recorder: runs.RunRecorder) -> None:
        with intercept(recorder, **self.options) as interceptor, interceptor.paused():
            A @ A

    def generator(self, recorder: runs.RunRecorder) -> None:
        for _ in intercept(recorder, **self.options)(Program.generate)():
            A @ A

    def check(self) -> None:
        assert self.state() == self.left

    def state(self) -> dict[str, Any]:
        return {
            "blocks": (scope.current().blocks, scope.state.everywhere.blocks),
            "kernels": (len(kernels.KERNELS.users), len(kernels.KERNELS.installed)),
            "threads": [thread.name for thread in threading.enumerate() if isinstance(thread, writer.Writer)],
            "descriptors": [os.path.exists(f"/proc/self/fd/{number}") for number in range(100)],
            "files": sorted({"recording.lock", *FLIGHT, "run.json.part"}.intersection(os.listdir(self.path.parent)))
            + [path.name for path in self.path.glob("*") if path.name not in (*TABLES, "tensors")],
        }


BLOCKS = ("plain", "again", "nested", "pause", "generator")
# With `--sampled` each pair of an engine, a block and a recorder is there, but not all three in each combination.
COMBINATIONS = [
    pytest.param(engine, kind, recorder, marks=needs_compiler if engine == "compiled" else ())
    for (e, engine), (k, kind), (r, recorder) in itertools.product(*map(enumerate, (ENGINES, BLOCKS, RECORDERS)))
    if (k + r) % len(ENGINES) == e or not sampled.on
]


@needs_timer
@pytest.mark.parametrize(("engine", "kind", "recorder"), COMBINATIONS)
def test_an_interrupt_of_a_recording_leaves_nothing_behind(
    engine: str, kind: str, recorder: str, tmp_path: Path
) -> None:
    program = Recording(engine, kind, recorder, tmp_path / "run")
    lasts = seconds_of(program.run, 5)
    assert interrupted(program.run, program.check, lasts, MOST, 20 + MOST / 5) > MOST / 4
    program.run()
    program.check()


class Elsewhere(Exception):
    """What another thread raises in this one."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_from_another_thread_leaves_nothing_behind(kind: str) -> None:
    program, draw, delivered = Program(kind), random.Random(0), 0
    lasts = seconds_of(program.run, 20)
    go, thrown, done = threading.Event(), threading.Event(), threading.Event()
    here = threading.get_ident()

    def throw() -> None:
        while True:
            go.wait()
            go.clear()
            if done.is_set():
                return
            time.sleep(draw.uniform(0, 1.2 * lasts))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(here), ctypes.py_object(Elsewhere))
            thrown.set()

    thread = threading.Thread(target=throw)
    setattr(thread, quiet.RUNS_NO_OPERATOR, True)  # and so keeps no kernels in
    thread.start()
    end = time.monotonic() + 20 + NUMBER / 20
    try:
        while delivered < NUMBER and time.monotonic() < end:
            thrown.clear()
            try:
                go.set()
                while not thrown.is_set():
                    program.run()
                program.run()  # and not for ever: Python loses an exception that comes in a callback
            except Elsewhere:
                delivered += 1
            program.check()
    finally:
        done.set()
        go.set()
        thread.join()
    assert delivered > NUMBER / 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_stack_leaves_nothing_behind(kind: str) -> None:
    program = Program(kind)

    def deep(frames: int) -> None:
        if frames:
            deep(frames - 1)
        else:
            program.run()

    limit, refused, ran = sys.getrecursionlimit(), 0, 0
    sys.setrecursionlimit(400)
    try:
        for frames in itertools.count(400, -STEP):
            try:
                deep(frames)
                ran += 1
            except RecursionError:
                refused += 1
            if kind not in ("nested", *EVERY) or frames % 4 == 0:
                program.check()
            if ran == 25 // STEP:  # with fewer frames below it, the program does the same
                break
    finally:
        sys.setrecursionlimit(limit)
    assert refused > 0


def test_an_exit_that_is_interrupted_at_its_first_instruction_leaves_the_block() -> None:
    hook = Framed()
    struck: list[str] = []

    def strike(frame: Any, event: str, argument: object) -> None:
        if (
            event == "call"
            and frame.f_code.co_name == "leave"
            and frame.f_globals["__name__"] == "opintercept._core.exits"
        ):
            sys.settrace(None)
            struck.append(event)
            raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            with intercept(hook):
                sys.settrace(strike)
    finally:
        sys.settrace(before)
    assert struck == ["call"]
    assert hook.depth == 0
    assert scope.current().blocks == ()
    assert not kernels.KERNELS.installed


def test_an_exit_stack_leaves_the_blocks_that_it_has_entered() -> None:
    hook = Framed()
    interceptor = intercept(hook)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interceptor)
        stack.enter_context(interceptor)
        assert hook.depth == 1
        assert len(scope.current().blocks) == 2
    assert hook.depth == 0
    assert scope.current().blocks == ()


def test_an_exit_leaves_the_block_of_its_own_with_statement() -> None:
    interceptor = intercept()
    first = interceptor.__exit__
    interceptor.__enter__()
    second = interceptor.__exit__
    interceptor.__enter__()
    with pytest.raises(OpInterceptError, match="but 1 entered later than this one are still active"):
        first(None, None, None)
    assert len(scope.current().blocks) == 1
    second(None, None, None)
    assert scope.current().blocks == ()
    with pytest.raises(OpInterceptError, match="has not entered the block or has left it"):
        second(None, None, None)


@pytest.mark.parametrize("collected", [False, True], ids=["closed", "collected"])
@pytest.mark.parametrize("options", [{}, COMPILED])
def test_a_generator_that_ends_in_another_thread_leaves_its_block(options: dict[str, Any], collected: bool) -> None:
    hook, seen = Framed(), list[Any]()

    def generate() -> Iterator[int]:
        with intercept([hook, seen.append], **options):
            yield 1

    running = [generate()]
    next(running[0])
    run_threads(running.clear if collected else running[0].close)  # type: ignore[attr-defined]
    A @ A
    assert seen == []
    assert hook.depth == 0
    assert scope.current().blocks == ()
    with intercept():
        pass
    assert not kernels.KERNELS.installed


@pytest.mark.parametrize("options", [{"engine": "mode"}, {"level": "function"}], ids=["mode", "function"])
def test_a_generator_with_a_mode_that_is_closed_in_another_thread_sees_no_more(options: dict[str, Any]) -> None:
    seen: list[Any] = []

    def generate() -> Iterator[int]:
        with intercept(seen.append, **options):
            yield 1

    running = generate()
    next(running)
    with pytest.raises(OpInterceptError, match="the block was left in another thread"):
        run_threads(running.close)  # type: ignore[attr-defined]
    A @ A
    assert seen == []
    with intercept(**options):  # takes the mode out, which another thread cannot do
        pass
    assert (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()) == (0, 0)


@needs_timer
@pytest.mark.parametrize("options", ["", 'engine="mode"', 'level="function"'])
def test_a_signal_handler_may_enter_a_block_while_another_is_entered(options: str) -> None:
    program = f"""
        import signal, time, torch
        from opintercept import intercept
        A = torch.ones(4, 4)
        outer, inner = intercept(lambda call: None, {options}), intercept(lambda call: None, {options})
        handled = 0
        def handle(number, frame):
            global handled
            handled += 1
            with inner:
                A @ A
            signal.setitimer(signal.ITIMER_REAL, 0.0011)  # once: on a slow machine handlers would pile up
        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.0011)
        end = time.monotonic() + {SECONDS}
        while time.monotonic() < end:
            with outer:
                A @ A
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert handled > {10 * SECONDS}, handled
        from opintercept._engines import kernels, scope
        assert not kernels.KERNELS.installed and not kernels.KERNELS.users and scope.current().blocks == ()
        print("ended")
        """
    done = run_python("-c", textwrap.dedent(program))
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-4000:]


def test_installing_kernels_again_causes_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with intercept(), intercept():
                A @ A


# What a program may leave suspended inside a block when it ends, which Python closes while it frees modules.
SUSPENDED = {
    "a generator": """
def body():
    with watched:
        yield torch.eye(2) @ torch.eye(2)
held = body()
next(held)
""",
    "a decorated generator": """
@watched
def body():
    try:
        while True:
            yield torch.eye(2) @ torch.eye(2)
    finally:
        torch.eye(2) @ torch.eye(2)
held = body()
next(held)
""",
    "a context manager": """
@contextlib.contextmanager
def body():
    with watched:
        yield
held = body()
held.__enter__()
torch.eye(2) @ torch.eye(2)
""",
    "a task": """
async def body():
    with watched:
        torch.eye(2) @ torch.eye(2)
        await asyncio.sleep(9)
held = asyncio.new_event_loop()
task = held.create_task(body())
held.run_until_complete(asyncio.sleep(0.01))
""",
    "a decorated task": """
@watched
async def body():
    torch.eye(2) @ torch.eye(2)
    await asyncio.sleep(9)
held = asyncio.new_event_loop()
task = held.create_task(body())
held.run_until_complete(asyncio.sleep(0.01))
""",
    "a generator of another thread": """
def body():
    with watched:
        yield torch.eye(2) @ torch.eye(2)
held = body()
thread = threading.Thread(target=next, args=[held])
thread.start()
thread.join()
""",
}


@pytest.mark.parametrize("what", SUSPENDED)
@pytest.mark.parametrize("options", ["", "engine='mode'", "ops='all'"])
def test_what_is_suspended_inside_a_block_ends_with_the_program(what: str, options: str, tmp_path: Path) -> None:
    program = f"""
import asyncio, contextlib, threading, torch
from opintercept import hooks, intercept, runs
class Ends:
    def post(self, call):
        pass
    def exit(self):
        print("left")
flight = runs.RunRecorder({str(tmp_path / "flight")!r}, flight=9)
recorder = runs.RunRecorder({str(tmp_path / "run")!r})
watched = intercept([hooks.Recorder(), recorder, flight, Ends()], {options})
{SUSPENDED[what]}
"""
    done = run_python("-c", program, timeout=60)
    assert (done.returncode, done.stdout) == (0, "left\n"), done.stderr
    told = [line for line in done.stderr.splitlines() if not line.startswith(("Task was destroyed", "task: <Task"))]
    assert told == []
    run = runs.open_run(tmp_path / "run")
    assert run.info.finished
    assert sum(call.record.op == "aten::mm" for call in run.calls()) == 1
    if "mode" not in options or "thread" not in what:  # that mode is on the stack of a thread that is gone
        assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_forked_child_leaves_no_block_of_its_parent() -> None:
    program = """
import os, torch
from opintercept import intercept
class Ends:
    def post(self, call):
        pass
    def exit(self):
        print("left by", "the parent" if os.getpid() == parent else "the child", flush=True)
parent = os.getpid()
block = intercept(Ends())
block.__enter__()
if not (child := os.fork()):
    raise SystemExit
os.waitpid(child, 0)
"""
    assert run_python("-c", program).stdout == "left by the parent\n"


@pytest.mark.parametrize("options", ["", "engine='mode'", "level='function'", "ops='all'"])
def test_a_forked_child_leaves_the_block_that_it_was_forked_in(options: str) -> None:
    program = f"""
import os, sys, torch
from opintercept import hooks, intercept
recorder = hooks.Recorder()
with intercept(recorder, {options}):
    child = os.fork()
torch.eye(2) @ torch.eye(2)
stacks = torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
if child:
    os.waitpid(child, 0)
print(stacks, len(recorder.records), flush=True)
"""
    assert run_python("-c", program).stdout == "(0, 0) 0\n" * 2


def test_a_generator_that_the_collector_closes_stops_no_thread_that_enters_a_block() -> None:
    program = f"""
import faulthandler, gc, sys, threading, time, torch
from opintercept import intercept
faulthandler.dump_traceback_later(60, exit=True)
sys.setswitchinterval(1e-6)
sys.unraisablehook = lambda told: None  # a block that another one was entered after is left out of order
watched, end = intercept(lambda call: None), time.monotonic() + {SECONDS}
class Cycle:
    pass
def suspended():
    with watched:
        yield
def cycles():
    while time.monotonic() < end:
        cycle = Cycle()
        cycle.itself, cycle.held = cycle, suspended()
        next(cycle.held)
def blocks(**options):
    mine = intercept(lambda call: None, **options)
    while time.monotonic() < end:
        with mine:
            pass
gc.set_threshold(3)
threads = [threading.Thread(target=cycles), threading.Thread(target=blocks)]
threads += [threading.Thread(target=blocks, kwargs={{"threads": "all"}}) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ended")
"""
    assert run_python("-c", program).stdout == "ended\n"
