"""`intercept` as a block and as a decorator: nesting, threads, processes, coroutines, and every wrong use."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import inspect
import multiprocessing
import os
import pickle
import textwrap
import threading
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import ALL_ENGINES
from processes import run_python
from threads import run_threads

from opintercept import HookError, Interceptor, OpCall, OpInterceptError, OpInterceptWarning, intercept
from opintercept._engines import kernels, scope

A = torch.randn(4, 4)


class Seen(list[str]):
    """A hook that keeps the operators' names."""

    def post(self, call: OpCall) -> None:
        self.append(call.op.rpartition("::")[2].rpartition(".")[2])


class Framed:
    """A hook that notes when its blocks begin and end."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def enter(self) -> None:
        self.log.append("enter")

    def post(self, call: OpCall) -> None: ...

    def exit(self) -> None:
        self.log.append("exit")


def multiply() -> torch.Tensor:
    return torch.mm(A, A)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_block_sees_what_runs_inside_and_nothing_else(engine: dict[str, Any]) -> None:
    seen = Seen()
    multiply()
    with intercept(seen, **engine) as interceptor:
        assert isinstance(interceptor, Interceptor)
        multiply()
    multiply()
    assert seen == ["mm"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_an_interceptor_is_reusable_and_counts_on(engine: dict[str, Any]) -> None:
    indices: list[int] = []
    interceptor = intercept(lambda call: indices.append(call.index), **engine)
    for _ in range(2):
        with interceptor:
            multiply()
    assert indices == [0, 1]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_recursion_counts_a_call_once(engine: dict[str, Any]) -> None:
    seen = Seen()
    interceptor = intercept(seen, **engine)

    @interceptor
    def recurse(depth: int) -> None:
        multiply()
        if depth:
            recurse(depth - 1)

    recurse(2)
    assert seen == ["mm"] * 3


@pytest.mark.parametrize("inner", ALL_ENGINES)
@pytest.mark.parametrize("outer", ALL_ENGINES)
def test_nested_interceptors_each_see_each_call_once(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    first, second = Seen(), Seen()
    with intercept(first, **outer):
        multiply()
        with intercept(second, **inner):
            multiply()
        multiply()
    assert first == ["mm"] * 3
    assert second == ["mm"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_nested_interceptors_run_in_the_order_they_were_entered(engine: dict[str, Any]) -> None:
    log: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def pre(self, call: OpCall) -> None:
            log.append(f"pre {self.name} {call.index}")

        def post(self, call: OpCall) -> None:
            log.append(f"post {self.name} {call.index}")

    with intercept(Named("a"), **engine):
        multiply()
        log.clear()
        with intercept(Named("b"), **engine):
            multiply()
    assert log == ["pre a 1", "pre b 0", "post a 1", "post b 0"]


def test_interceptors_do_not_hide_inner_steps_from_each_other() -> None:
    # addbmm runs addmm_ inside: whoever watches addbmm does not see that, whoever does not watch it does.
    batch = torch.randn(2, 4, 4)
    outer, inner, both = Seen(), Seen(), Seen()
    with intercept(inner, ops=["addmm", "addmm_"]), intercept(outer, ops="addbmm"), intercept(both):
        torch.addbmm(A, batch, batch)
    assert outer == ["addbmm"]
    assert both == ["addbmm"]
    alone = Seen()
    with intercept(alone, ops=["addmm", "addmm_"]):
        torch.addbmm(A, batch, batch)
    assert inner == alone
    assert alone


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_operators_of_a_hook_are_seen_by_no_interceptor(engine: dict[str, Any]) -> None:
    seen: dict[str, Seen] = {"kernel": Seen(), "mode": Seen(), "function": Seen()}

    def multiplies(call: OpCall) -> None:
        x = torch.randn(3, 3, requires_grad=True)
        out = torch.nn.functional.linear(x, x)
        if out.requires_grad:  # only above autograd
            out.sum().backward()

    with (
        intercept(seen["kernel"]),
        intercept(seen["mode"], engine="mode"),
        intercept(seen["function"], level="function"),
        intercept(multiplies, **engine),
    ):
        multiply()
    assert seen == {"kernel": ["mm"], "mode": ["mm"], "function": ["mm"]}


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_hook_may_enter_an_interceptor_which_sees_nothing(engine: dict[str, Any]) -> None:
    inner = Seen()

    def enters(call: OpCall) -> None:
        with intercept(inner, **engine):
            multiply()

    with intercept(enters, **engine):
        multiply()
    assert inner == []


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_paused_sees_nothing_and_other_interceptors_everything(engine: dict[str, Any]) -> None:
    seen, other = Seen(), Seen()
    with intercept(other, **engine), intercept(seen, **engine) as interceptor:
        with interceptor.paused():
            multiply()
        multiply()
    assert seen == ["mm"]
    assert other == ["mm"] * 2


def test_step_numbers_the_calls() -> None:
    steps: list[int] = []
    with intercept(lambda call: steps.append(call.step)) as interceptor:
        for _ in range(3):
            multiply()
            interceptor.step()
    assert steps == [0, 1, 2]


def test_step_takes_the_number_of_the_step_that_begins() -> None:
    steps: list[int] = []
    interceptor = intercept(lambda call: steps.append(call.step))
    interceptor.step(40)
    with interceptor:
        for number in (None, 50, 0):
            multiply()
            interceptor.step(number)
        multiply()
    assert steps == [40, 41, 50, 0]
    with pytest.raises(ValueError, match="number must be a whole number of at least 0, got -1"):
        interceptor.step(-1)


def test_register_in_a_block_takes_part_and_its_handle_ends_it() -> None:
    seen = Seen()
    with intercept() as interceptor:
        multiply()
        with interceptor.register(seen):
            multiply()
        multiply()
    assert seen == ["mm"]


def test_opaque_names_what_was_seen_but_not_into() -> None:
    q = torch.randn(1, 2, 3, 4)
    with intercept() as interceptor:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        multiply()
    assert interceptor.opaque == {"aten::_scaled_dot_product_flash_attention_for_cpu": 1}


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_an_exception_of_the_program_gets_through_and_restores(engine: dict[str, Any]) -> None:
    seen = Seen()
    with pytest.raises(KeyError, match="mine"), intercept(seen, **engine):
        raise KeyError("mine")
    multiply()
    assert seen == []


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_an_exception_of_the_operator_keeps_its_type_and_text(engine: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as plain:
        torch.mm(A, torch.randn(3, 3))
    errors: list[BaseException] = []

    class Errors:
        def error(self, call: OpCall, exception: BaseException) -> None:
            errors.append(exception)

    with (
        pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as caught,
        intercept(Errors(), **engine),
    ):
        torch.mm(A, torch.randn(3, 3))
    assert str(caught.value) == str(plain.value)
    assert [str(error) for error in errors] == [str(plain.value)]


class Fails:
    """A hook that raises in one phase, and keeps those of its calls."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.calls: list[str] = []

    def post(self, call: OpCall) -> None:
        self.calls.append(call.phase)
        if call.phase == self.phase:
            raise LookupError("in the hook")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("engine", ALL_ENGINES[:3])
def test_a_hook_that_raises_stops_the_program_with_a_note(engine: dict[str, Any], phase: str) -> None:
    w = A.clone().requires_grad_()
    with pytest.raises(LookupError, match="in the hook") as caught, intercept(Fails(phase), **engine):
        torch.mm(w, A).sum().backward()
    assert f"({phase}): aten::mm(float32[4, 4], float32[4, 4])" in caught.value.__notes__[0]
    torch.mm(w, A).sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize("when", ["pre", "post"])
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_type_error_of_a_hook_gets_through_an_operator_that_would_swallow_it(
    engine: dict[str, Any], when: str
) -> None:
    calls = []

    def fails(call: OpCall) -> None:
        calls.append(call)
        raise TypeError("in the hook")

    hook = type("Fails", (), {when: staticmethod(fails)})()
    with (
        pytest.raises(HookError, match=rf"a hook raised TypeError: in the hook; in {when} hook .*mm|matmul") as caught,
        intercept(hook, **engine),
    ):
        A @ A
    assert str(caught.value.__cause__) == "in the hook"
    assert len(calls) == 1


@pytest.mark.parametrize(("phase", "calls"), [("forward", ["forward"]), ("backward", ["forward", "backward"])])
@pytest.mark.parametrize("engine", ALL_ENGINES[:3])
def test_a_hook_that_raises_is_switched_off_on_warn(engine: dict[str, Any], phase: str, calls: list[str]) -> None:
    w, fails = A.clone().requires_grad_(), Fails(phase)
    with (
        pytest.warns(OpInterceptWarning, match="switched off a hook that raised LookupError: in the hook"),
        intercept(fails, on_error="warn", **engine),
    ):
        torch.mm(w, A).sum().backward()
        torch.mm(w, A)
    assert fails.calls == calls
    assert w.grad is not None


def test_enter_and_exit_of_hooks_frame_the_blocks() -> None:
    framed = Framed()
    interceptor = intercept(framed)
    with interceptor, interceptor:
        framed.log.append("body")
    assert framed.log == ["enter", "body", "exit"]


def test_a_failing_enter_leaves_nothing_behind() -> None:
    class Failing:
        def enter(self) -> None:
            raise LookupError("enter")

    failing: Any = Failing()
    interceptor = intercept(failing)
    with pytest.raises(LookupError, match="enter"):
        interceptor.__enter__()
    assert scope.current().blocks == ()


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_decorated_function_keeps_its_name_arguments_and_result(engine: dict[str, Any]) -> None:
    seen = Seen()

    @intercept(seen, **engine)
    def work(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        """Doc."""
        for _ in range(times):
            x = torch.mm(x, A)
        return x

    assert torch.equal(work(A, times=2), torch.mm(torch.mm(A, A), A))
    assert (work.__name__, work.__doc__) == ("work", "Doc.")
    assert seen == ["mm"] * 2


def test_a_decorated_method_gets_its_instance() -> None:
    seen = Seen()

    class Model:
        size = 4

        @intercept(seen)
        def work(self) -> int:
            multiply()
            return self.size

    assert Model().work() == 4
    assert seen == ["mm"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_decorated_generator_is_seen_only_while_its_body_runs(engine: dict[str, Any]) -> None:
    seen, framed = Seen(), Framed()

    @intercept([seen, framed], **engine)
    def generate() -> Generator[int, str, str]:
        multiply()
        got = yield 1
        multiply()
        try:
            yield 2
        except LookupError:
            multiply()
            got += " caught"
        return got

    assert inspect.isgeneratorfunction(generate)
    running = generate()
    assert next(running) == 1
    torch.bmm(A[None], A[None])
    assert running.send("sent") == 2
    torch.bmm(A[None], A[None])
    with pytest.raises(StopIteration, match="sent caught"):
        running.throw(LookupError())
    assert seen == ["mm"] * 3
    assert framed.log == ["enter", "exit"]


def test_a_decorated_generator_that_is_closed_early_cleans_up_under_interception() -> None:
    seen = Seen()

    @intercept(seen)
    def generate() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            multiply()

    running = generate()
    next(running)
    multiply()
    running.close()
    assert seen == ["mm"]
    assert scope.current().blocks == ()


def test_decorated_coroutines_that_interleave_see_their_own_body_only() -> None:
    first, second = Seen(), Seen()

    @intercept(first)
    async def one() -> str:
        for _ in range(3):
            torch.mm(A, A)
            await asyncio.sleep(0)
        return "one"

    @intercept(second)
    async def two() -> str:
        for _ in range(2):
            torch.bmm(A[None], A[None])
            await asyncio.sleep(0)
        return "two"

    async def main() -> list[str]:
        return list(await asyncio.gather(one(), two()))

    assert inspect.iscoroutinefunction(one)
    assert asyncio.run(main()) == ["one", "two"]
    assert first == ["mm"] * 3
    assert second == ["bmm"] * 2


def test_a_decorated_coroutine_that_is_cancelled_leaves_nothing_behind() -> None:
    seen = Seen()

    @intercept(seen)
    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            multiply()

    async def main() -> None:
        task = asyncio.create_task(waits())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError, match=r"^$"):
            await task

    asyncio.run(main())
    assert seen == ["mm"]
    assert scope.current().blocks == ()


def test_a_decorated_async_generator_passes_values_exceptions_and_its_end() -> None:
    seen = Seen()

    @intercept(seen)
    async def generate() -> AsyncGenerator[str, str]:
        multiply()
        got = yield "first"
        await asyncio.sleep(0)
        multiply()
        try:
            yield got
        except LookupError:
            multiply()
            yield "caught"

    async def main() -> list[str]:
        running = generate()
        items = [await running.asend(None)]  # type: ignore[arg-type]
        multiply()
        items.append(await running.asend("sent"))
        items.append(await running.athrow(LookupError()))
        await running.aclose()
        return items

    assert inspect.isasyncgenfunction(generate)
    assert asyncio.run(main()) == ["first", "sent", "caught"]
    assert seen == ["mm"] * 3


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_other_threads_are_not_seen(engine: dict[str, Any]) -> None:
    seen = Seen()
    with warnings.catch_warnings(record=True) as told, intercept(seen, **engine):
        warnings.simplefilter("always")
        run_threads(multiply)
    assert seen == []
    # Torch's modes are bound to a thread, and notice nothing of what others run.
    expected = engine.get("engine") != "mode" and engine.get("level") != "function"
    assert [str(warning.message) for warning in told] == [
        "a block saw no call, but other threads ran watched operators 1 times meanwhile; use "
        'intercept(..., threads="all") to see them'
    ] * expected


def test_a_block_that_has_seen_a_call_does_not_warn_of_other_threads() -> None:
    with intercept(Seen()):
        multiply()
        run_threads(multiply)


def test_all_threads_are_seen_on_request() -> None:
    seen = Seen()
    with intercept(seen, threads="all"):
        run_threads(multiply)
        multiply()
    run_threads(multiply)
    assert seen == ["mm"] * 2


def test_all_threads_and_one_thread_run_in_the_order_they_were_entered() -> None:
    log: list[str] = []
    with (
        intercept(lambda call: log.append("own first")),
        intercept(lambda call: log.append("all"), threads="all"),
        intercept(lambda call: log.append("own last")),
    ):
        multiply()
    assert log == ["own first", "all", "own last"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_one_interceptor_in_eight_threads_loses_no_call(engine: dict[str, Any]) -> None:
    indices: list[int] = []
    interceptor = intercept(lambda call: indices.append(call.index), **engine)

    def work() -> None:
        for _ in range(50):
            with interceptor:
                assert torch.equal(multiply(), expected)

    expected = multiply()
    with intercept(ops="mm"):  # keeps the kernels in place while threads come and go
        run_threads(*[work] * 8)
    assert sorted(indices) == list(range(400))


def test_kernels_stay_while_another_thread_works_and_go_at_a_later_exit() -> None:
    stop, started = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        while not stop.is_set():
            multiply()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    with intercept():
        pass
    installed = set(kernels.KERNELS.installed)
    stop.set()
    thread.join()
    assert installed
    with intercept():
        pass
    assert not kernels.KERNELS.installed


def test_kernels_go_beside_the_monitor_of_tqdm() -> None:
    class Monitor(threading.Thread):
        __module__ = "tqdm._monitor"

    stop = threading.Event()
    monitor = Monitor(target=stop.wait)
    monitor.start()
    with intercept():
        pass
    installed = set(kernels.KERNELS.installed)
    stop.set()
    monitor.join()
    assert not installed


BESIDE_C_THREADS = """
    import concurrent.futures, torch
    from opintercept import intercept
    q = torch.linalg.qr(torch.randn(200, 200))[0]
    pool = concurrent.futures.ThreadPoolExecutor(2)
    futures = [pool.submit(torch.linalg.matrix_power, q, 1500) for _ in range(2)]
    while not all(future.done() for future in futures):
        with intercept(lambda call: None, ops=["mm", "bmm"]):
            pass
    for future in futures:
        future.result()
"""

BESIDE_FORKED_TASKS = """
    import torch
    from opintercept import intercept
    @torch.jit.script
    def body(x, n: int):
        for _ in range(n):
            x = torch.mm(x, x) * 0.5
        return x
    @torch.jit.script
    def launch(x, n: int):
        return torch.jit.fork(body, x, n)
    for _ in range(10):
        with intercept(lambda call: None):
            future = launch(torch.eye(3), 4000)
        future.wait()
"""


@pytest.mark.parametrize("script", [BESIDE_C_THREADS, BESIDE_FORKED_TASKS], ids=["pool", "torch.jit.fork"])
@pytest.mark.slow
def test_kernels_do_not_go_under_the_feet_of_a_thread_without_frames_of_its_own(script: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"  # torch.jit.script wants to read its source
    file.write_text(textwrap.dedent(script))
    done = run_python("-W", "ignore", file)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_leaving_out_of_order_is_an_error_and_takes_the_right_block_out(engine: dict[str, Any]) -> None:
    first, second = Seen(), Seen()
    a, b = intercept(first, **engine), intercept(second, **engine)
    a.__enter__()
    b.__enter__()
    with pytest.raises(OpInterceptError, match="blocks must be left in the reverse of the order"):
        a.__exit__(None, None, None)
    multiply()
    b.__exit__(None, None, None)
    multiply()
    assert first == []
    assert second == ["mm"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_leaving_from_another_thread_is_an_error_and_changes_nothing(engine: dict[str, Any]) -> None:
    seen = Seen()
    with intercept(seen, **engine) as interceptor:
        with pytest.raises(OpInterceptError, match="a block must be left in the thread that entered it"):
            run_threads(lambda: interceptor.__exit__(None, None, None))
        multiply()
    assert seen == ["mm"]


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_leaving_twice_is_an_error(engine: dict[str, Any]) -> None:
    interceptor = intercept(**engine)
    with interceptor:
        pass
    with pytest.raises(OpInterceptError, match="a block must be left in the thread that entered it"):
        interceptor.__exit__(None, None, None)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_hook_cannot_leave_the_block_that_it_runs_in(engine: dict[str, Any]) -> None:
    interceptor = intercept(**engine)
    interceptor.register(lambda call: interceptor.__exit__(None, None, None))
    with pytest.raises(OpInterceptError, match="not inside a hook"), interceptor:
        multiply()


def test_a_torch_mode_left_out_of_order_is_named_and_stays() -> None:
    class Mine(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    interceptor = intercept(engine="mode")
    interceptor.__enter__()
    mine: Any = Mine()  # type: ignore[no-untyped-call]
    mine.__enter__()
    with pytest.raises(OpInterceptError, match=r"modes that were entered later are still active: \['Mine'\]"):
        interceptor.__exit__(None, None, None)
    assert list(map(id, torch.utils._python_dispatch._get_current_dispatch_mode_stack())) == [id(mine)]
    mine.__exit__(None, None, None)


def test_a_torch_mode_that_popped_ours_is_reported() -> None:
    class Mine(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mine: Any = Mine()
    mine.__enter__()
    interceptor = intercept(level="function")
    interceptor.__enter__()
    mine.__exit__(None, None, None)  # torch pops the top, which is ours
    with pytest.raises(OpInterceptError, match=r"the stack is \['Mine'\]; another mode was left out of order"):
        interceptor.__exit__(None, None, None)
    torch.overrides._pop_mode()


@pytest.mark.parametrize("engine", [*ALL_ENGINES, pytest.param({"threads": "all"}, id="all")])
def test_a_forked_child_does_not_run_the_hooks_of_its_parent(engine: dict[str, Any]) -> None:
    seen = Seen()
    read, write = os.pipe()
    with intercept(seen, **engine):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                own = Seen()
                multiply()
                with intercept(own):
                    multiply()
                status = 0 if (list(seen), list(own)) == ([], ["mm"]) else 2
            finally:
                os._exit(status)
        os.close(read)
        os.close(write)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        multiply()
    assert seen == ["mm"]


def test_a_forked_child_may_leave_the_block_of_its_parent() -> None:
    framed = Framed()

    def child() -> None:
        interceptor.__exit__(None, None, None)
        os._exit(0 if framed.log == ["enter"] else 3)

    with intercept(framed) as interceptor:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
    assert process.exitcode == 0
    assert framed.log == ["enter", "exit"]


@pytest.mark.parametrize("way", ["pass", "sys.exit(0)", "raise SystemExit(0)"], ids=["end", "sys.exit", "raise"])
@pytest.mark.slow
def test_the_interpreter_may_end_inside_a_block(way: str) -> None:
    script = f"""
        import sys, torch
        from opintercept import intercept
        interceptor = intercept(print)
        interceptor.__enter__()
        {way}
    """
    done = run_python("-c", textwrap.dedent(script))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ops": ["mn"]}, ValueError, r"got unknown op 'mn'; did you mean 'mv' or 'mm'"),
        ({"ops": "linear"}, ValueError, "aten::linear is taken apart before dispatch level can see it; watch 'mm'"),
        ({"ops": ["empty"]}, ValueError, r"aten::empty.\w+ already has a kernel .*use engine='mode'"),
        ({"level": "kernel"}, ValueError, "level must be one of 'function', 'dispatch', got 'kernel'"),
        ({"engine": "fast"}, ValueError, "engine must be one of 'auto', 'kernel', 'mode', 'compiled', got 'fast'"),
        ({"threads": 8}, ValueError, "threads must be one of 'current', 'all', got 8"),
        ({"on_error": "ignore"}, ValueError, "on_error must be one of 'raise', 'warn', got 'ignore'"),
        ({"ops": "-view"}, ValueError, "ops must name at least one operator, got '-view'"),
        ({"ops": ("all", "-views")}, ValueError, "ops can leave out families, got '-views'; did you mean 'view'"),
        ({"level": "function", "engine": "kernel"}, ValueError, "function level has one engine"),
        ({"level": "function", "threads": "all"}, ValueError, 'threads="all" needs the kernel engine'),
        ({"engine": "mode", "threads": "all"}, ValueError, 'threads="all" needs the kernel engine'),
        ({"hooks": 5}, TypeError, "a hook must be callable or have one of"),
        ({"hooks": [print, 5]}, TypeError, "a hook must be callable or have one of .*, got 5"),
        ({"hooks": Seen}, TypeError, "a hook must be an instance, got the class Seen"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_misuse_is_refused_before_any_state_changes(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        intercept(**arguments)
    assert not kernels.KERNELS.installed


@pytest.mark.parametrize("arguments", [(), (1,), (print, 2)], ids=["none", "one", "two"])
def test_a_forgotten_bracket_is_refused_whatever_the_function_takes(arguments: tuple[Any, ...]) -> None:
    @intercept
    def step(*given: Any) -> None: ...

    with pytest.raises(TypeError, match=r"write @intercept\(\.\.\.\), with brackets, above a function"):
        step(*arguments)
    with pytest.raises(TypeError, match=r"with brackets, above a function"):
        step(print, option=1)  # type: ignore[arg-type]


def test_a_class_is_refused() -> None:
    with pytest.raises(TypeError, match="an interceptor decorates functions, got <class"):
        intercept()(Seen)


@pytest.mark.parametrize(
    ("engine", "name", "message"),
    [
        (
            {},
            "_dispatch_keyset_full_after",
            r"the (kernel|compiled) engine needs torch._C._dispatch_keyset_full_after, .*use engine=\"",
        ),
        ({}, "_stash_obj_in_tls", r"the (kernel|compiled) engine needs torch._C._stash_obj_in_tls, which torch 2"),
        ({"engine": "mode"}, "_pop_torch_dispatch_stack", r"the mode engine needs .*engine=\"kernel\""),
        ({"level": "function"}, "_get_function_stack_at", r"the function engine .*level=\"dispatch\""),
    ],
    ids=["kernel", "scope", "mode", "function"],
)
def test_a_torch_without_the_private_api_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], name: str, message: str
) -> None:
    monkeypatch.setitem(intercept(**engine).watcher.engine.needs, f"torch._C.{name}", None)
    with pytest.raises(OpInterceptError, match=message):
        intercept(**engine)


def test_a_kernel_of_other_code_is_not_bypassed() -> None:
    with intercept() as outer:
        pass
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    theirs = torch.library.Library("aten", "IMPL")

    def kernel(keyset: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return torch.ops.aten.mm.default.redispatch(keyset & after, x, y) * 2

    theirs.impl("mm", kernel, "BackendSelect", with_keyset=True)
    try:
        with pytest.raises(OpInterceptError, match=r"got kernels of other code for aten::mm; use engine=\""):
            outer.__enter__()
        assert torch.equal(torch.mm(A, A), (A @ A))
    finally:
        theirs._destroy()


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_block_cannot_be_left_from_within_backward(engine: dict[str, Any]) -> None:
    interceptor = intercept(**engine)
    with interceptor:
        x = A.clone().requires_grad_() * 1.0
        x.register_hook(lambda grad: interceptor.__exit__(None, None, None))
        with pytest.raises(OpInterceptError, match="a block must be left in the same backward pass"):
            x.sum().backward()


def test_an_inner_block_does_not_show_the_inner_steps_to_the_outer() -> None:
    seen: list[str] = []
    for inner in (contextlib.nullcontext, lambda: intercept(engine="mode")):
        with intercept(lambda call: seen.append(call.op), engine="mode", ops="all"):
            INNER.append(inner)
            torch.ops.opintercept_intercept_tests.body(A)
        assert seen == ["opintercept_intercept_tests::body"]
        seen.clear()


INNER: list[Any] = []


@torch.library.custom_op("opintercept_intercept_tests::body", mutates_args=())
def body(x: torch.Tensor) -> torch.Tensor:
    with INNER.pop()():
        return torch.mm(x, x)


def test_a_block_leaves_no_garbage() -> None:
    gc.collect()
    gc.disable()
    try:
        weak = []
        for engine in ({}, {"engine": "mode"}, {"level": "function"}):
            hook = Seen()
            weak.append(weakref.ref(hook))
            with intercept(hook, **engine):  # type: ignore[arg-type]
                multiply()
            del hook
        assert [reference() for reference in weak] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["copy", "deep", "pickle"]
)
@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_copy_is_an_interceptor_of_its_own(engine: dict[str, Any], again: Callable[[Any], Any]) -> None:
    hook = Seen()
    ops: Any = "matmul" if engine.get("level") == "function" else [torch.ops.aten.mm, torch.ops.aten.bmm.out]
    first = intercept(hook, ops=ops, **engine)
    with first:
        second = again(first)
        with second:
            multiply()
        torch.bmm(A[None], A[None])
    (copied,) = second.watcher.pipeline.hooks
    assert (copied is hook) is (again is copy.copy)
    assert len(hook) == (1 if again is not copy.copy else 2) + (ops == "matmul")
    assert len(copied) == (len(hook) if again is copy.copy else 1)


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_nested_tensors_that_a_hook_hands_back_are_the_operator_s(engine: dict[str, Any]) -> None:
    class Same:
        def pre(self, call: OpCall) -> Any:
            return call.args, call.kwargs

    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    plain = torch.nn.functional.linear(parts, torch.ones(5, 3))
    with intercept(Same(), **engine):
        seen = torch.nn.functional.linear(parts, torch.ones(5, 3))
    assert all(map(torch.equal, seen.unbind(), plain.unbind()))


class WithoutDtype(torch.Tensor):
    @property
    def dtype(self) -> Any:  # type: ignore[override]
        raise LookupError("no dtype")


@pytest.mark.parametrize("engine", ALL_ENGINES)
def test_a_subclass_whose_attributes_raise_computes_as_before(engine: dict[str, Any]) -> None:
    records: list[str] = []

    class Looks:
        def pre(self, call: OpCall) -> Any:
            return call.args, call.kwargs

        def post(self, call: OpCall) -> None:
            records.append(str(call.record()))

    tensor = A.as_subclass(WithoutDtype)
    with intercept(Looks(), **engine):
        output = torch.mm(tensor, tensor)
    assert output.as_subclass(torch.Tensor).equal(torch.mm(A, A))
    assert len(records) == 1
    assert "mm ?[4, 4] @ ?[4, 4]" in records[0]
