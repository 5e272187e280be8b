"""Blocks in the tasks of an event loop: each task sees its own calls, and those of what it starts."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sampled
import torch
from compiler import ALL_ENGINES, COMPILED, LEVELS
from threads import run_threads

from opintercept import OpCall, OpInterceptError, hooks, intercept
from opintercept._engines import kernels, scope


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    end = time.monotonic() + 10
    while kernels.KERNELS.installed and time.monotonic() < end:  # a pool's threads are on their way out
        with intercept():
            pass
        time.sleep(0.01)
    assert scope.current().blocks == ()
    assert scope.state.in_tasks == set()
    assert scope.state.everywhere.blocks == ()
    assert not kernels.KERNELS.users


def product(rows: int) -> None:
    """A product that tells by its shape who ran it."""
    torch.ones(rows, 3) @ torch.ones(3, 2)


def rows_of(recorder: hooks.Recorder) -> list[int]:
    return [record.lhs.shape[0] for record in recorder.records if record.lhs is not None]


def gathered(*tasks: Coroutine[Any, Any, Any]) -> list[Any]:
    """What tasks of one event loop return."""

    async def main() -> list[Any]:
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


async def watched(rows: int, turns: int = 3, **options: Any) -> list[int]:
    """Hold a block over awaits; what it has seen."""
    recorder = hooks.Recorder()
    with intercept(recorder, **options):
        for _ in range(turns):
            product(rows)
            await asyncio.sleep(0)
    return rows_of(recorder)


@pytest.mark.parametrize("options", LEVELS)
def test_tasks_see_their_own_calls_through_gather(options: dict[str, Any]) -> None:
    found = gathered(*(watched(rows, rows, **options) for rows in range(1, 8)))
    assert found == [[rows] * rows for rows in range(1, 8)]


@pytest.mark.parametrize("options", LEVELS)
def test_a_task_without_a_block_is_seen_by_none(options: dict[str, Any]) -> None:
    async def unwatched() -> None:
        for _ in range(5):
            product(99)
            await asyncio.sleep(0)

    seen, _ = gathered(watched(1, **options), unwatched())
    assert seen == [1] * 3


@pytest.mark.parametrize("options", LEVELS)
def test_what_a_task_starts_inside_its_block_belongs_to_it(options: dict[str, Any]) -> None:
    async def part(rows: int) -> None:
        await asyncio.sleep(0)
        product(rows)

    async def main() -> tuple[list[int], list[int]]:
        recorder = hooks.Recorder()
        with intercept(recorder, **options):
            other = asyncio.create_task(watched(7, **options))
            async with asyncio.TaskGroup() as group:
                group.create_task(part(1))
                group.create_task(part(2))
            return rows_of(recorder), await other

    outer, inner = asyncio.run(main())
    assert inner == [7] * 3
    assert sorted(rows for rows in outer if rows != 7) == [1, 2]


def test_to_thread_carries_the_block_of_its_task() -> None:
    async def main() -> list[int]:
        recorder = hooks.Recorder()

        async def held() -> None:
            with intercept(recorder):
                await asyncio.to_thread(product, 1)
                await asyncio.sleep(0)
                await asyncio.to_thread(product, 2)

        await asyncio.gather(held(), asyncio.to_thread(product, 98))
        await asyncio.to_thread(product, 99)  # by the same thread of the pool
        return rows_of(recorder)

    assert asyncio.run(main()) == [1, 2]


def test_a_task_that_outlives_the_block_it_was_started_in_is_seen_no_longer() -> None:
    recorder = hooks.Recorder()

    async def late(left: asyncio.Event) -> None:
        product(1)
        await left.wait()
        product(2)

    async def main() -> None:
        left = asyncio.Event()
        with intercept(recorder):
            task = asyncio.create_task(late(left))
            await asyncio.sleep(0)
        left.set()
        await task

    asyncio.run(main())
    assert rows_of(recorder) == [1]


@pytest.mark.parametrize("options", LEVELS)
def test_a_block_around_the_loop_sees_every_task(options: dict[str, Any]) -> None:
    recorder = hooks.Recorder()
    runner = asyncio.Runner()
    runner.get_loop()  # its context is copied before the block is entered
    try:
        with intercept(recorder, **options):

            async def main() -> None:
                await asyncio.gather(watched(1, 2, **options), watched(2, 2, **options))

            runner.run(main())
    finally:
        runner.close()
    assert sorted(rows_of(recorder)) == [1, 1, 2, 2]


@pytest.mark.parametrize("options", LEVELS)
def test_a_cancelled_task_leaves_its_block(options: dict[str, Any]) -> None:
    recorder = hooks.Recorder()

    async def held() -> None:
        with intercept(recorder, **options):
            try:
                await asyncio.sleep(60)
            finally:
                product(1)

    async def main() -> None:
        tasks = [asyncio.create_task(held()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        product(99)

    asyncio.run(main())
    assert rows_of(recorder) == [1] * 3


def test_an_async_context_manager_may_hold_a_block() -> None:
    @asynccontextmanager
    async def recording() -> AsyncIterator[hooks.Recorder]:
        recorder = hooks.Recorder()
        with intercept(recorder):
            yield recorder

    async def request(rows: int) -> list[int]:
        async with recording() as recorder:
            product(rows)
            await asyncio.sleep(0)
            await asyncio.to_thread(product, rows)
        return rows_of(recorder)

    assert gathered(*map(request, range(1, 5))) == [[rows] * 2 for rows in range(1, 5)]


def test_backward_in_a_task_is_that_task_s() -> None:
    async def train(rows: int) -> list[tuple[str, Any]]:
        recorder = hooks.Recorder()
        weight = torch.ones(3, 2, requires_grad=True)
        with intercept(recorder):
            loss = (torch.ones(rows, 3) @ weight).sum()
            await asyncio.sleep(0)
            loss.backward()
            await asyncio.sleep(0)
        return [(record.phase, record.forward) for record in recorder.records]

    assert gathered(*map(train, range(2, 6))) == [[("forward", None), ("backward", 0)]] * 4


def test_a_pause_is_its_task_s() -> None:
    async def main() -> list[int]:
        recorder = hooks.Recorder()
        interceptor = intercept(recorder)

        async def paused() -> None:
            with interceptor.paused():
                await asyncio.sleep(0)
                product(99)
                await asyncio.sleep(0)

        async def seen() -> None:
            for _ in range(4):
                product(1)
                await asyncio.sleep(0)

        with interceptor:
            await asyncio.gather(paused(), seen())
        return rows_of(recorder)

    assert asyncio.run(main()) == [1] * 4


def test_one_interceptor_in_many_tasks_is_one() -> None:
    recorder = hooks.Recorder()
    interceptor = intercept(recorder)

    async def held(rows: int) -> None:
        with interceptor:
            product(rows)
            await asyncio.sleep(0)
            product(rows)

    async def main() -> None:
        await asyncio.gather(*map(held, range(1, 5)))
        product(99)

    asyncio.run(main())
    assert sorted(rows_of(recorder)) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_blocks_of_one_task_are_left_in_order() -> None:
    async def main() -> None:
        first, second = intercept(), intercept()
        first.__enter__()
        second.__enter__()
        with pytest.raises(OpInterceptError, match="left in the reverse of the order"):
            first.__exit__(None, None, None)
        second.__exit__(None, None, None)

    asyncio.run(main())


def test_a_block_for_all_threads_in_a_task_sees_every_task() -> None:
    recorder = hooks.Recorder()

    async def main() -> None:
        with intercept(recorder, threads="all"):
            await asyncio.gather(watched(1, 2), watched(2, 1))
            with ThreadPoolExecutor(1) as pool:
                pool.submit(product, 3).result()
        product(99)

    asyncio.run(main())
    assert sorted(rows_of(recorder)) == [1, 1, 2, 3]


def test_a_context_that_was_copied_elsewhere_carries_the_block_until_it_is_left() -> None:
    recorder = hooks.Recorder()
    copies: list[contextvars.Context] = []

    async def main() -> None:
        with intercept(recorder):
            copies.append(contextvars.copy_context())
            await asyncio.to_thread(run_threads, lambda: copies[0].run(product, 1))
        run_threads(lambda: copies[0].run(product, 99))

    asyncio.run(main())
    assert rows_of(recorder) == [1]


def test_anyio_carries_blocks_too() -> None:
    anyio = pytest.importorskip("anyio")

    async def request(rows: int, found: dict[int, list[int]]) -> None:
        recorder = hooks.Recorder()
        with intercept(recorder):
            await anyio.sleep(0)
            await anyio.to_thread.run_sync(product, rows)
            product(rows)
        found[rows] = rows_of(recorder)

    async def main() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async with anyio.create_task_group() as group:
            for rows in range(1, 6):
                group.start_soon(request, rows, found)
        return found

    assert anyio.run(main) == {rows: [rows] * 2 for rows in range(1, 6)}


@pytest.mark.parametrize("options", ALL_ENGINES)
def test_greenlets_that_interleave_hold_blocks_of_their_own(options: dict[str, Any]) -> None:
    greenlet = pytest.importorskip("greenlet")
    found: dict[int, list[int]] = {}

    def work(rows: int) -> None:
        recorder = hooks.Recorder()
        with intercept(recorder, **options) as watch:
            product(rows)
            greenlet.getcurrent().parent.switch()
            with watch.paused():
                greenlet.getcurrent().parent.switch()
                product(99)
            product(rows)
        found[rows] = rows_of(recorder)

    outer = hooks.Recorder()
    with intercept(outer, **options):  # of the thread, so that it sees all of them
        workers = [greenlet.greenlet(work) for _ in range(3)]
        for number, each in enumerate(workers, 1):
            each.switch(number)
        product(50)
        for _ in range(2):
            for each in workers:
                each.switch()
    assert found == {rows: [rows] * 2 for rows in (1, 2, 3)}
    assert rows_of(outer) == [1, 2, 3, 50, 99, 1, 99, 2, 99, 3]
    assert greenlet.gettrace() is None


def test_a_greenlet_that_is_given_the_context_of_a_block_is_seen_there() -> None:
    greenlet = pytest.importorskip("greenlet")
    found: list[list[int]] = []

    def spawn(function: Callable[[], Any]) -> None:
        child = greenlet.greenlet(function)
        child.gr_context = contextvars.copy_context()  # as gevent does
        child.switch()

    def work() -> None:
        recorder = hooks.Recorder()
        with intercept(recorder):
            spawn(lambda: product(2))
            greenlet.greenlet(lambda: product(99)).switch()
        found.append(rows_of(recorder))

    greenlet.greenlet(work).switch()
    assert found == [[2]]


@pytest.mark.parametrize("options", ALL_ENGINES)
@pytest.mark.parametrize("seed", range(5))
def test_each_greenlet_sees_its_own_calls_whatever_they_do(seed: int, options: dict[str, Any]) -> None:
    """Greenlets that nest blocks, pause them, fail in them and switch in hooks, in an order drawn at random."""
    greenlet = pytest.importorskip("greenlet")
    by_kernels = options.get("engine") != "mode" and "level" not in options
    draw, main = random.Random(seed), greenlet.getcurrent()
    workers: list[Any] = []

    def switch() -> None:
        alive = [each for each in workers if not each.dead and each is not greenlet.getcurrent()]
        if alive and draw.random() < 0.5:
            draw.choice(alive).switch()

    def multiply(rows: int, seeing: list[list[int]]) -> None:
        for expected in seeing:
            expected.append(rows)
        product(rows)

    def act(rows: int, seeing: list[list[int]], depth: int) -> None:
        for _ in range(draw.randint(2, 5)):
            kind = draw.choice(("multiply", "switch", "block", "pause", "fail"))
            if kind == "multiply" or depth == 3:
                multiply(rows, seeing)
            elif kind == "switch":
                switch()
            elif kind == "block":
                seen, expected = [], []  # type: ignore[var-annotated]

                def hook(call: OpCall, seen: list[int] = seen) -> None:
                    seen.append(call.output.shape[0])
                    if by_kernels:  # torch takes a mode off its thread's stack while a hook of it runs
                        switch()
                    product(999)

                with intercept(hook, **options) as watch:
                    act(rows, [*seeing, expected], depth + 1)
                    with watch.paused():
                        act(rows, seeing, depth + 1)
                checks.append((rows, seen, expected))
            elif kind == "fail":
                with contextlib.suppress(ZeroDivisionError), intercept(hooks.Recorder(), **options):
                    multiply(rows, seeing)
                    switch()
                    raise ZeroDivisionError

    checks: list[tuple[int, list[int], list[int]]] = []
    for rows in range(1, 6):
        workers.append(greenlet.greenlet(functools.partial(act, rows, [], 0)))
    while alive := [each for each in workers if not each.dead]:
        draw.choice(alive).switch()
    assert greenlet.getcurrent() is main
    assert checks
    assert [(rows, seen) for rows, seen, _ in checks] == [(rows, expected) for rows, _, expected in checks]
    assert greenlet.gettrace() is None


@pytest.mark.parametrize("options", [{}, COMPILED])
def test_other_greenlets_are_seen_while_a_hook_has_switched_away(options: dict[str, Any]) -> None:
    greenlet = pytest.importorskip("greenlet")
    seen: list[int] = []
    main = greenlet.getcurrent()

    def work() -> None:
        while True:
            product(2)
            main.switch()

    other = greenlet.greenlet(work)

    def hook(call: OpCall) -> None:
        seen.append(call.output.shape[0])
        if call.output.shape[0] == 1:
            other.switch()
            product(99)  # the hook's own, which is never seen

    with intercept(hook, **options):
        product(1)
        other.switch()
        product(1)
    other.switch()
    assert seen == [1, 2, 2, 1, 2]
    assert greenlet.gettrace() is None


@pytest.mark.parametrize("seed", range(sampled.fewer(2, 1)))
@pytest.mark.slow
def test_a_thousand_tasks_with_random_awaits_and_cancellations_see_exactly_their_own_calls(seed: int) -> None:
    choose = random.Random(seed)
    tasks = 1000
    made: list[int] = [0] * tasks  # products that each task ran in its block
    seen: list[hooks.Recorder] = [hooks.Recorder() for _ in range(tasks)]

    async def one(number: int) -> None:
        rows = number + 1
        await asyncio.sleep(choose.random() / 100)
        product(rows)  # outside
        options: dict[str, Any] = choose.choice([{}, {}, {}, {"level": "function"}, {"engine": "mode"}])
        with intercept(seen[number], **options):
            for _ in range(choose.randrange(5)):
                product(rows)
                made[number] += 1
                step: Callable[[], Coroutine[Any, Any, Any]] = choose.choice(
                    [lambda: asyncio.sleep(0), lambda: asyncio.sleep(choose.random() / 100)]
                )
                await step()
                if choose.random() < 0.1:
                    await asyncio.to_thread(product, rows)
                    made[number] += options == {}  # modes are bound to a thread
        product(rows)

    async def main() -> None:
        running = [asyncio.create_task(one(number)) for number in range(tasks)]
        for task in running:
            if choose.random() < 0.1:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(main())
    for number, recorder in enumerate(seen):
        assert set(rows_of(recorder)) <= {number + 1}
        # A task that was cancelled while its thread still worked cannot know of that product.
        assert len(recorder.records) - made[number] in (0, 1)
