"""Threads, forks and the end of the process: no call is lost, no wrong kernel is called, nothing stays behind."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import programs
import pytest
import sampled
import torch
from compiler import BUILDS
from processes import run_python
from threads import run_threads

from opintercept import OpCall, intercept
from opintercept._engines import kernels, scope

pytestmark = pytest.mark.slow

THREADS, ROUNDS = 8, sampled.fewer(500, 200)

ENGINES = programs.ENGINES | ({"compiled": {"engine": "compiled"}} if BUILDS else {})

A, B, C = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
BATCH = torch.randn(2, 4, 4)

# A call of the wrong kernel gives a result other than that of EXPECTED, or raises.
PRODUCTS: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: torch.mm(A, B),
    "addmm": lambda: torch.addmm(C, A, B),
    "bmm": lambda: torch.bmm(BATCH, BATCH),
    "mv": lambda: torch.mv(A, B[:, 0]),
    "dot": lambda: torch.dot(A[0], B[:, 0]),
}
EXPECTED = {name: product() for name, product in PRODUCTS.items()}
# Torch frees the Python object of an operator, which it still uses, if several threads under dispatch modes make it at
# once. An operator that was used before is safe.
torch.ops.aten.equal.default  # noqa: B018


def multiply(name: str) -> None:
    assert torch.equal(PRODUCTS[name](), EXPECTED[name])


class Seen(list[tuple[str, int, int]]):
    """A hook that keeps operator, thread and index of every call."""

    def post(self, call: OpCall) -> None:
        self.append((call.op.rpartition("::")[2].rpartition(".")[2], threading.get_ident(), call.index))

    def by_op(self) -> Counter[str]:
        return Counter(op for op, _, _ in self)

    def by_thread(self) -> Counter[int]:
        return Counter(thread for _, thread, _ in self)

    def indices(self) -> list[int]:
        return sorted(index for _, _, index in self)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Switch threads a hundred times as often as Python does, and check afterwards that the kernels can be removed."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
    assert scope.state.everywhere.blocks == ()
    assert not kernels.KERNELS.users

    def gone() -> bool:  # the last thread may still be ending
        with intercept(ops="mm"):
            pass
        return not kernels.KERNELS.installed

    wait_for(gone)


@pytest.mark.parametrize("mix", [*ENGINES, "all of them"])
def test_eight_threads_enter_shared_interceptors_and_their_own(mix: str) -> None:
    engines = [mix if mix in ENGINES else list(ENGINES)[number % len(ENGINES)] for number in range(THREADS)]
    shared_seen = {engine: Seen() for engine in engines}
    shared = {engine: intercept(seen, **ENGINES[engine]) for engine, seen in shared_seen.items()}
    own_seen = [Seen() for _ in engines]
    # The first thread to watch an operator installs its kernel while the others multiply.
    names = [list(PRODUCTS)[number % len(PRODUCTS)] for number in range(THREADS)]

    def work(number: int) -> None:
        engine, name = engines[number], names[number]
        own = intercept(own_seen[number], ops=name, **ENGINES[engine])
        for _ in range(ROUNDS):
            multiply("mm")  # not seen
            with shared[engine]:
                multiply("mm")
                with own:
                    multiply(name)
            multiply(name)  # not seen

    run_threads(*(partial(work, number) for number in range(THREADS)))
    for name, seen in zip(names, own_seen, strict=True):
        assert seen.by_op() == {name: ROUNDS}
        assert len(seen.by_thread()) == 1
        assert seen.indices() == list(range(ROUNDS))
    for engine, seen in shared_seen.items():
        here = [name for name, other in zip(names, engines, strict=True) if other == engine]
        assert seen.by_op() == Counter({name: here.count(name) * ROUNDS for name in here}) + Counter(
            {"mm": len(here) * ROUNDS}
        )
        assert set(seen.by_thread().values()) == {2 * ROUNDS}
        assert seen.indices() == list(range(2 * ROUNDS * len(here)))


def test_an_interceptor_of_all_threads_loses_nothing_while_others_come_and_go() -> None:
    everything, shared = Seen(), Seen()
    watched = intercept(shared, threads="all")
    own_seen = [Seen() for _ in range(THREADS)]

    def work(number: int) -> None:
        own = intercept(own_seen[number])
        for _ in range(ROUNDS // 4):
            with watched:  # sees the other seven threads too
                multiply("mm")
            with own:
                multiply("bmm")
            multiply("dot")

    with intercept(everything, threads="all"):
        run_threads(*(partial(work, number) for number in range(THREADS)))
    each = ROUNDS // 4
    assert everything.by_op() == dict.fromkeys(("mm", "bmm", "dot"), each * THREADS)
    assert everything.indices() == list(range(3 * each * THREADS))
    assert all(seen.by_op() == {"bmm": each} for seen in own_seen)
    assert shared.by_op()["mm"] == each * THREADS
    assert shared.indices() == list(range(len(shared)))


def test_threads_all_sees_a_thread_that_had_a_block_of_its_own_before() -> None:
    before, entered = threading.Event(), threading.Event()
    seen = Seen()

    def work() -> None:
        with intercept(ops="mm"):
            multiply("mm")
        before.set()
        entered.wait()
        multiply("mm")

    def enter() -> None:
        before.wait()
        with intercept(seen, threads="all"):
            entered.set()
            wait_for(lambda: len(seen) == 1)

    run_threads(work, enter)


def test_blocks_of_one_operator_come_and_go_beside_threads_that_multiply() -> None:
    # torch would call a freed kernel if one were removed while another thread runs operators.
    stop = threading.Event()

    def multiply_on() -> None:
        while not stop.is_set():
            for name in PRODUCTS:
                multiply(name)

    def come_and_go() -> None:
        try:
            for number in range(ROUNDS):
                name = list(PRODUCTS)[number % len(PRODUCTS)]
                seen = Seen()
                with intercept(seen, ops=name):
                    multiply(name)
                assert seen.by_op() == {name: 1}
        finally:
            stop.set()

    run_threads(come_and_go, *[multiply_on] * 3)


def test_blocks_come_and_go_beside_threads_that_start_and_end() -> None:
    done: list[int] = []

    def has_run(count: int) -> bool:
        return len(done) == count

    def short() -> None:
        multiply("mm")
        multiply("bmm")
        done.append(1)

    for number in range(ROUNDS // 4):
        # Not with the threading module, which waits until the new thread runs.
        _thread.start_new_thread(short, ())
        with intercept(ops=("mm", "bmm")):
            multiply("mm")
        if number % 8 == 7:
            wait_for(partial(has_run, number + 1))


def test_threads_that_end_while_a_block_looks_at_them_do_no_harm() -> None:
    code = """
        import _thread, sys, torch
        from opintercept import intercept
        sys.setswitchinterval(1e-6)  # threads start and end between any two instructions
        x = torch.ones(2, 2)
        for _ in range(500):
            for _ in range(20):
                _thread.start_new_thread(int, ())
            with intercept(ops="mm"):
                x @ x
        print("done")
        """
    done = run_python("-c", textwrap.dedent(code), timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("engine", ENGINES)
def test_exceptions_in_threads_stay_in_their_thread(engine: str) -> None:
    seen, errors = Seen(), []

    class Fails(ValueError):
        pass

    class Judge:
        def post(self, call: OpCall) -> None:
            if call.args[0].shape == (4, 5):
                raise Fails("a hook's")

        def error(self, call: OpCall, exception: BaseException) -> None:
            errors.append(type(exception))

    interceptor = intercept([seen, Judge()], **ENGINES[engine])

    def work(number: int) -> None:
        for _ in range(ROUNDS // 4):
            if number % 4 == 0:
                with interceptor:
                    multiply("mm")
            elif number % 4 == 1:
                with pytest.raises(Fails, match="a hook's"), interceptor:
                    torch.mm(B, B.t())
            elif number % 4 == 2:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), interceptor:  # the operator's
                    torch.mm(A, A)
            else:
                with pytest.raises(KeyError, match="the program's"), interceptor:
                    multiply("mm")
                    raise KeyError("the program's")
            multiply("mm")  # not seen

    run_threads(*(partial(work, number) for number in range(THREADS)))
    assert seen.by_op() == {"mm": THREADS * 3 // 4 * (ROUNDS // 4)}
    assert errors == [RuntimeError] * (THREADS // 4) * (ROUNDS // 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_decorated_function_in_eight_threads(engine: str) -> None:
    seen = Seen()

    @intercept(seen, **ENGINES[engine])
    def step(depth: int) -> int:
        multiply("mm")
        return 1 + step(depth - 1) if depth else 1

    @intercept(seen, **ENGINES[engine])
    def produce(count: int) -> Iterator[int]:
        for number in range(count):
            multiply("mm")
            yield number

    def work() -> None:
        for _ in range(ROUNDS // 10):
            assert step(2) == 3
            multiply("mm")  # not seen
            for _number in produce(3):
                multiply("mm")  # the caller's, not seen

    run_threads(*[work] * THREADS)
    assert set(seen.by_thread().values()) == {6 * (ROUNDS // 10)}
    assert len(seen) == 6 * (ROUNDS // 10) * THREADS


@pytest.mark.parametrize("options", [*ENGINES.values(), {"threads": "all"}], ids=[*ENGINES, "all threads"])
def test_a_pause_holds_only_in_its_thread(options: dict[str, Any]) -> None:
    seen = Seen()
    interceptor = intercept(seen, **options)

    def work(number: int) -> None:
        for _ in range(ROUNDS // 4):
            with interceptor if "threads" not in options else nullcontext():
                multiply("mm")
                if number % 2:
                    with interceptor.paused():
                        multiply("mm")

    with interceptor:
        run_threads(*(partial(work, number) for number in range(THREADS)))
    assert seen.by_op() == {"mm": THREADS * (ROUNDS // 4)}


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_registered_in_threads_see_exactly_what_runs_until_their_removal(engine: str) -> None:
    always = Seen()
    interceptor = intercept(always, **ENGINES[engine])

    def work() -> None:
        here = threading.get_ident()
        for _ in range(ROUNDS // 8):
            with interceptor:
                multiply("mm")
                seen = Seen()
                with interceptor.register(seen):
                    multiply("mm")
                    multiply("mm")
                multiply("mm")
            assert seen.by_thread()[here] == 2

    run_threads(*[work] * THREADS)
    assert set(always.by_thread().values()) == {4 * (ROUNDS // 8)}
    assert always.indices() == list(range(len(always)))


def test_hooks_enter_with_the_first_thread_and_exit_with_the_last() -> None:
    inside, most, total = 0, 0, 0

    class Framed:
        def enter(self) -> None:
            nonlocal inside, most, total
            inside += 1
            total += 1
            most = max(most, inside)

        def post(self, call: OpCall) -> None:
            assert inside == 1

        def exit(self) -> None:
            nonlocal inside
            inside -= 1

    interceptor = intercept(Framed())

    def work() -> None:
        for _ in range(ROUNDS // 4):
            with interceptor:
                multiply("mm")

    run_threads(*[work] * THREADS)
    assert (inside, most) == (0, 1)
    assert total > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_forked_beside_busy_threads_keeps_working(engine: str) -> None:
    stop = threading.Event()
    shared = intercept(Seen(), **ENGINES[engine])

    def work() -> None:
        while not stop.is_set():
            with shared:
                multiply("mm")

    def fork() -> None:
        try:
            for _ in range(10):
                with shared:
                    check_child()
        finally:
            stop.set()

    def check_child() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks beside threads
            child = os.fork()
        if child == 0:
            status = 1
            try:
                own = Seen()
                multiply("mm")
                with intercept(own, **ENGINES[engine]), shared:
                    multiply("mm")
                status = 0 if own.by_op() == {"mm": 1} else 2
            finally:
                os._exit(status)
        statuses: list[int] = []

        def ended() -> bool:
            pid, code = os.waitpid(child, os.WNOHANG)
            statuses.append(code)
            return pid != 0

        try:
            wait_for(ended)
        except AssertionError:
            os.kill(child, signal.SIGKILL)  # it waits for a lock that a thread of its parent had
            os.waitpid(child, 0)
            raise
        assert os.waitstatus_to_exitcode(statuses[-1]) == 0

    run_threads(fork, *[work] * 4)


# Each begins with `import torch; from opintercept import intercept`.
ENDINGS = {
    # The threads wait: one that multiplies while the interpreter ends aborts the process, even without opintercept.
    "daemons that wait in a block": """
        import threading, time
        ready = threading.Barrier(5)
        def wait(options):
            with intercept(lambda call: None, **options):
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
                ready.wait()
                time.sleep(60)
        def wait_in_a_hook():
            def hook(call):
                ready.wait()
                time.sleep(60)
            with intercept(hook):
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        for options in {}, {"engine": "mode"}, {"level": "function"}:
            threading.Thread(target=wait, args=(options,), daemon=True).start()
        threading.Thread(target=wait_in_a_hook, daemon=True).start()
        ready.wait()
        time.sleep(0.2)  # until they sleep
    """,
    "threads that outlive the main one": """
        import atexit, threading, time
        seen = []
        interceptor = intercept(lambda call: seen.append(call.op), threads="all")
        def work():
            for _ in range(200):
                with interceptor:
                    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
                time.sleep(0.0005)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        def check():
            assert len(seen) >= 800, len(seen)
            with interceptor:
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        atexit.register(check)
        interceptor.__enter__()
    """,
    "a pool that is still there": """
        import concurrent.futures
        pool = concurrent.futures.ThreadPoolExecutor(4)
        with intercept(lambda call: None, threads="all"):
            list(pool.map(lambda _: torch.mm(torch.ones(2, 2), torch.ones(2, 2)), range(100)))
    """,
    "os._exit": """
        import os, threading
        def work():
            while True:
                torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        with intercept(lambda call: None, threads="all"):
            threading.Thread(target=work, daemon=True).start()
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            os._exit(0)
    """,
    "a child that exits as usual": """
        import os, sys, threading
        def work():
            with intercept(print):
                child = os.fork()
                if child == 0:
                    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
                    sys.exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for engine in "kernel", "mode":
            with intercept(print, engine=engine):
                work()
    """,
    "the thread that started it ends first": """
        import _thread, time
        worked = []
        def work():
            interceptor = intercept(lambda call: None)
            interceptor.__enter__()
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            worked.append(interceptor)
        for _ in range(20):
            _thread.start_new_thread(work, ())
        # A thread that is in an operator at the end aborts the process, even without opintercept.
        while len(worked) < 20:
            time.sleep(0.01)
    """,
}


@pytest.mark.parametrize("script", ENDINGS.values(), ids=ENDINGS)
def test_the_process_ends_without_an_error(script: str) -> None:
    script = f"import torch\nfrom opintercept import intercept\n{textwrap.dedent(script)}"
    done = run_python("-c", script, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
