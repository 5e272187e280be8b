"""Hooks report of calls that kernels have noted what they report of calls that they have seen, in the same order."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_attentions
import pytest
import torch
from compiler import needs_compiler
from nets import Block, Model
from threads import run_threads
from torch import nn
from torch.utils._pytree import tree_map_only

from opintercept import CallRecord, NonFiniteError, OpCall, OpInterceptWarning, hooks, intercept, register_op, runs
from opintercept._core import noted as _rows
from opintercept._core.in_kernel import Found, Work
from opintercept._core.record import PendingRecord

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("values_in_cpp")]
MOST = 2048  # rows that a ring holds
X = torch.ones(2, 2)
STRESS = float(os.environ.get("OPINTERCEPT_STRESS", "2"))  # seconds for what only shows among many repetitions


def multiply(times: int) -> None:
    """Make calls that look alike and come from one place, all but the first of which can be noted."""
    for _ in range(times):
        torch.mm(X, X)


def timeless(records: list[CallRecord]) -> list[CallRecord]:
    return [dataclasses.replace(record, started=0, elapsed=0.0) for record in records]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 3, 3, 1, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def program(engine: Any, *watching: Any, **options: Any) -> Any:
    """Train, infer and take steps, with operators that kernels note and others."""
    torch.manual_seed(1)
    model, attention = Model(), Attention()
    inputs, sequence = torch.randn(2, 4), torch.randn(2, 3, 8)
    out = torch.empty(2, 2)
    with intercept(watching, engine=engine, **options) as interceptor:
        for _ in range(4):
            (model(inputs) + model(inputs)).sum().backward()
            with torch.no_grad():
                attention(sequence)
            attention(sequence).sum().backward()
            with torch.autocast("cpu", torch.bfloat16):
                model(inputs).float().sum().backward()
            torch.mm(X, X, out=out)
            torch.mm(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
            torch.einsum("ij,jk", X, X)
            interceptor.step()
    return interceptor


def test_recorders_have_equal_records(shown: Counter[str]) -> None:
    seen, noted = hooks.Recorder(), hooks.Recorder()
    one = program("kernel", seen)
    shown.clear()
    other = program("compiled", noted)
    assert timeless(noted.records) == timeless(seen.records)
    assert all(record.elapsed is not None and record.elapsed > 0 for record in noted.records)
    assert one.watcher.pipeline.calls == other.watcher.pipeline.calls
    assert one.opaque == other.opaque
    assert shown["aten::mm"] < sum(record.op == "aten::mm" for record in noted.records)


@pytest.mark.parametrize("options", [{}, {"for_dtype": torch.float8_e4m3fn}, {"histogram": True}], ids=repr)
def test_stats_have_equal_rows(options: dict[str, Any]) -> None:
    seen, noted = (hooks.Stats(("lhs", "rhs", "bias", "output"), **options) for _ in range(2))
    program("kernel", seen)
    program("compiled", noted)
    assert noted.rows() == seen.rows()
    assert noted.skipped == seen.skipped


def test_profiles_have_equal_rows() -> None:
    def rows(engine: str) -> list[Any]:
        profile = hooks.Profile()
        program(engine, profile)
        return [dataclasses.replace(row, seconds=0.0) for row in profile.rows()]

    assert rows("compiled") == rows("kernel")


def test_a_profile_tells_in_which_precision_each_call_ran() -> None:
    profile = hooks.Profile()
    with intercept(profile, engine="compiled"):
        for precision in ("highest", "high", "highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            X @ X
            X @ X
    torch.set_float32_matmul_precision("highest")
    assert {row.precision: row.calls for row in profile.rows()} == {"highest": 4, "high": 2, "medium": 2}


@pytest.mark.parametrize("tensors", ["none", "stats"])
def test_runs_have_equal_calls(tmp_path: Path, tensors: Any) -> None:
    def calls(engine: str) -> list[Any]:
        program(engine, runs.RunRecorder(tmp_path / engine, tensors))
        found = runs.open_run(tmp_path / engine).calls()
        return [dataclasses.replace(call, record=timeless([call.record])[0]) for call in found]

    assert calls("compiled") == calls("kernel")


@pytest.mark.parametrize("ops", ["matmul", "all"])
def test_calls_that_are_taken_together_add_up_to_the_last_bit(ops: str) -> None:
    def rows(*beside: Any) -> list[Any]:
        torch.manual_seed(3)
        model, values = Model(), torch.randn(40, 2, 4)
        values[7, 1, 2], values[30, 0, 0], values[11] = torch.nan, torch.inf, 1e-30
        stats = hooks.Stats(("lhs", "rhs", "output"), for_dtype=torch.float8_e4m3fn)
        with intercept([stats, *beside], ops=ops, engine="compiled"):
            for number, each in enumerate(values):
                model(each).sum().backward()
                if number % 9 == 0:
                    stats.rows()
        return stats.rows()

    assert repr(rows()) == repr(rows(Noting(lambda note: None)))  # repr, since NaN is not equal to itself


@pytest.mark.parametrize("kind", [hooks.Stats, hooks.Profile])
def test_hooks_take_noted_calls_together(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "noted", None)
    hook = kind()
    with intercept([hook, hooks.Recorder()], engine="compiled"):
        multiply(3 * MOST)
    assert [row.calls for row in hook.rows()] == [3 * MOST]


def test_every_hook_gets_its_rows_beside_others() -> None:
    alone, beside, stats = hooks.Recorder(), hooks.Recorder(), hooks.Stats(for_dtype=torch.float16)
    program("kernel", alone)
    program("compiled", hooks.NonFinite(), beside, hooks.Profile(), stats)
    assert timeless(beside.records) == timeless(alone.records)
    assert sum(row.calls for row in stats.rows()) == len(beside.records)


def test_a_call_that_is_known_never_becomes_python(shown: Counter[str]) -> None:
    watching = (hooks.Recorder(), hooks.Stats(("lhs", "output")), hooks.Profile(), hooks.NonFinite())
    with torch.no_grad(), intercept(watching, engine="compiled"):
        multiply(100)
    assert shown == {"aten::mm": 1}


def test_what_is_meant_for_devices_costs_nothing_on_the_host(shown: Counter[str]) -> None:
    with intercept(hooks.NonFinite(check_every=1000), engine="compiled"):
        multiply(100)
    assert not shown


@pytest.mark.parametrize("watching", [(), (hooks.Recorder,), (hooks.Stats,), (hooks.NonFinite, hooks.Profile)])
def test_calls_that_write_or_differ_in_a_fraction_only_never_become_python(
    shown: Counter[str], watching: tuple[Any, ...]
) -> None:
    x, out = torch.ones(3), torch.empty(3)
    with intercept([make() for make in watching], ops="all", engine="compiled") as interceptor:
        for step in range(5):
            if step == 2:
                shown.clear()
            for _ in range(2):
                x.mul_(1 + step / 100).add(step / 7)
                torch.mul(x, 0.5 + step, out=out)
                torch._foreach_mul_([x, out], [1 / (step + 3), 2.0])
                x.view(3, 1)
        calls = interceptor.watcher.pipeline.calls
    assert not shown
    assert calls == 5 * 2 * 5


def test_backward_calls_that_are_known_never_become_python(shown: Counter[str]) -> None:
    model, recorder = Block(), hooks.Recorder()
    with intercept(recorder, engine="compiled"):
        for _ in range(20):
            model(torch.ones(4, 4)).sum().backward()
    forward = {record.index: record for record in recorder.records if record.phase == "forward"}
    for record in recorder.records:
        if record.phase == "backward" and record.forward is not None:
            assert record.module == forward[record.forward].module
    assert shown.total() < len(recorder.records) / 4


@pytest.mark.parametrize("kind", gpu_attentions.KERNELS)
def test_attentions_of_gpus_never_become_python(kind: str, shown: Counter[str], tmp_path: Path) -> None:
    """They return up to nine results, some of them undefined, some whole numbers, and a state of random numbers."""
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))

    def records(engine: Any) -> list[CallRecord]:
        recorder = hooks.Recorder()
        watching: list[Any] = [recorder, hooks.Profile(), runs.RunRecorder(tmp_path / engine, "none")]
        with gpu_attentions.on_the_host(), intercept(watching, engine=engine):
            for step in range(5):
                if step == 2:
                    shown.clear()
                gpu_attentions.attention(kind, q, k, v).sum().backward()
        assert [call.record for call in runs.open_run(tmp_path / engine).calls()] == recorder.records
        return timeless(recorder.records)

    seen = records("kernel")
    assert shown.total() == 6
    assert records("compiled") == seen
    assert not shown
    ends = "", "_backward"
    assert [each.op for each in seen] == [f"aten::_scaled_dot_product_{kind}_attention{end}" for end in ends] * 5
    assert {each.flops is not None and each.opaque for each in seen} == {True}


def test_a_generator_does_not_bring_a_call_to_python(shown: Counter[str]) -> None:
    recorder, x = hooks.Recorder(), torch.empty(3)
    with intercept(recorder, ops="random", engine="compiled"):
        for turn in range(4):
            if turn == 2:
                shown.clear()
            x.normal_(generator=torch.Generator())
            torch.bernoulli(torch.ones(3), generator=torch.Generator())
    assert not shown
    assert [record.op for record in recorder.records] == ["aten::normal_", "aten::bernoulli"] * 4


@pytest.mark.parametrize("columns", [61, 67])
def test_no_block_sees_the_operators_by_which_kernels_prepare_a_check(columns: int) -> None:
    recorder = hooks.Recorder()
    with intercept([hooks.Checksum(), recorder], ops="all", engine="compiled"):
        for _ in range(3):
            torch.ones(2, 3) @ torch.ones(3, columns)  # as many as no product before has had
    assert {record.op for record in recorder.records} == {"aten::fill_", "aten::mm"}


@pytest.mark.parametrize("engine", ["kernel", "compiled"])
def test_what_a_kernel_in_python_raises_reaches_the_program(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise KeyError("mine")

    monkeypatch.setitem(gpu_attentions.KERNELS, "flash", (refuse, refuse))
    x, found = torch.ones(1, 1, 2, 2), list[BaseException]()
    raised: list[BaseException] = []

    class Watch(hooks.Recorder):
        def work(self) -> Work:
            return Work()

        def error(self, call: OpCall, exception: BaseException) -> None:
            found.append(exception)

    with gpu_attentions.on_the_host(), intercept(Watch(), engine=engine):
        for _ in range(3):
            with pytest.raises(KeyError, match="mine") as caught:
                gpu_attentions.attention("flash", x, x, x)
            raised.append(caught.value)
    assert len(raised) == 3
    assert all(map(lambda one, other: one is other, raised, found))


@pytest.mark.parametrize("hook", [lambda call: None, hooks.when(hooks.Stats(), op="aten::mm")], ids=["lambda", "when"])
def test_a_hook_that_must_see_calls_sees_each(shown: Counter[str], hook: Any) -> None:
    with intercept([hooks.Recorder(), hook], engine="compiled"):
        X @ X
        X @ X
    assert shown == {"aten::mm": 2}


def test_a_subclass_of_a_hook_sees_each_call() -> None:
    class Doubled(hooks.Recorder):
        def post(self, call: OpCall) -> None:
            super().post(call)
            super().post(call)

    doubled = Doubled()
    with intercept(doubled, engine="compiled"):
        X @ X
        X @ X
    assert len(doubled.records) == 4


def test_rows_beyond_the_ring_reach_the_hooks() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled"):
        multiply(3 * MOST)
        assert repr(recorder) == f"Recorder({5 * MOST // 2 + 1:,} records)"  # told without a question
    assert [record.index for record in recorder.records] == list(range(3 * MOST))


@pytest.mark.parametrize("step", [lambda x: torch.mm(x, x), lambda x: x.add_(0)], ids=["new", "overwritten"])
def test_calls_beyond_a_ring_that_nobody_empties_are_recorded_once(step: Callable[..., Any], tmp_path: Path) -> None:
    telling, go_on = threading.Event(), threading.Event()

    def tell_and_wait(note: PendingRecord) -> None:
        if note.index == 1:
            telling.set()
            go_on.wait(30)

    slow, path, x = Noting(tell_and_wait), tmp_path / "run", torch.ones(2, 2)
    with intercept([slow, runs.RunRecorder(path)], ops=("mm", "add_"), engine="compiled"):
        for _ in range(2):
            step(x)
        teller = threading.Thread(target=lambda: slow.records)
        teller.start()
        assert telling.wait(10)
        for _ in range(MOST + 1):
            step(x)
        go_on.set()
        teller.join()
    recorded = [call.record.index for call in runs.open_run(path).calls()]
    assert sorted(recorded) == sorted(record.index for record in slow.records) == list(range(MOST + 3))


def test_records_can_be_read_inside_a_block() -> None:
    recorder, stats = hooks.Recorder(), hooks.Stats()
    with intercept([recorder, stats], engine="compiled"):
        for calls in range(1, 5):
            torch.mm(X, X)
            assert len(recorder.records) == calls
            assert stats.rows()[0].calls == calls


def test_a_step_belongs_to_the_calls_after_it() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled") as interceptor:
        for _ in range(3):
            torch.mm(X, X)
            interceptor.step()
            torch.mm(X, X)
    assert [record.step for record in recorder.records] == [0, 1, 1, 2, 2, 3]


def test_a_hook_that_comes_later_gets_the_calls_from_then_on() -> None:
    first, second = hooks.Recorder(), hooks.Stats()
    with intercept(first, engine="compiled") as interceptor:
        torch.mm(X, X)
        torch.mm(X, X)
        handle = interceptor.register(second)
        torch.mm(X, X)
        handle.remove()
        torch.mm(X, X)
        torch.mm(X, X)
    assert len(first.records) == 5
    assert second.rows()[0].calls == 1


def test_nonfinite_raises_at_the_call_that_makes_the_value() -> None:
    watch, recorder = hooks.NonFinite(), hooks.Recorder()
    reached = []
    with pytest.raises(NonFiniteError, match="made by aten::mm"), intercept([watch, recorder], engine="compiled"):
        for scale in (1.0, 2.0, float("inf"), 3.0):
            reached.append(scale)
            torch.mm(torch.tensor([[scale, -scale]]), torch.ones(2, 1))
    assert reached == [1.0, 2.0, float("inf")]
    assert [record.index for record in recorder.records] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("inf", [False, True])
def test_nonfinite_has_equal_findings(dtype: torch.dtype, inf: bool) -> None:
    def findings(engine: Any) -> list[Any]:
        watch = hooks.NonFinite(action="record", inf=inf)
        with intercept(watch, engine=engine):
            for value in (1.0, float("inf"), 2.0, float("nan"), 3e38):
                x = torch.full((2, 2), value, dtype=dtype)
                torch.mm(x, x)
                torch.addmm(x, torch.ones(2, 2, dtype=dtype), x)
        found = [dataclasses.replace(each.record, started=0, elapsed=0.0, source=None) for each in watch.findings]
        return [*found, [(each.kind, str(each.output), each.bad) for each in watch.findings], watch.passed_on]

    assert findings("compiled") == findings("kernel")


def test_a_call_that_raises_reaches_error_hooks_and_program(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "stats")
    with intercept(recorder, engine="compiled"):
        torch.mm(X, X)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be multiplied") as failure:
                torch.mm(X, torch.ones(3, 2))
        torch.mm(X, X)
    assert failure.type is RuntimeError
    found = [(call.record.index, call.error) for call in runs.open_run(tmp_path / "run").calls()]
    assert [index for index, _ in found] == [0, 1, 2, 3]
    assert [error is None for _, error in found] == [True, False, False, True]


class Noting(hooks.Recorder):
    """Does something before it keeps a row."""

    def __init__(self, first: Callable[[PendingRecord], object]) -> None:
        super().__init__()
        self.first = first

    def work(self) -> Work:
        return Work()

    def noted(self, note: PendingRecord, values: Mapping[str, Found], learned: Any) -> None:
        self.first(note)
        super().noted(note, values, learned)


def fail_at_the_third(note: PendingRecord) -> None:
    if note.index == 2:
        raise ValueError("the third")


def failing() -> Noting:
    return Noting(fail_at_the_third)


def test_a_hook_that_fails_with_a_row_says_which() -> None:
    with pytest.raises(ValueError, match="the third") as failure, intercept(failing(), engine="compiled"):
        multiply(4)
    assert "call 2 (forward): aten::mm" in failure.value.__notes__[0]


@pytest.mark.parametrize("failing_hooks", [1, 2])
def test_hooks_that_fail_with_a_row_are_switched_off(failing_hooks: int) -> None:
    off, other = [failing() for _ in range(failing_hooks)], hooks.Recorder()
    with (
        pytest.warns(OpInterceptWarning, match="switched off a hook that raised ValueError: the third"),
        intercept([*off, other], engine="compiled", on_error="warn"),
    ):
        multiply(6)
    assert [[record.index for record in each.records] for each in off] == [[0, 1]] * failing_hooks
    assert [record.index for record in other.records] == list(range(6))


def test_several_blocks_note_the_same_call() -> None:
    outer, inner, seen = hooks.Recorder(), hooks.Recorder(), []
    with intercept(outer, engine="compiled"):
        torch.mm(X, X)
        with intercept(inner, engine="compiled"):
            multiply(3)
            with intercept(lambda call: seen.append(call.index), engine="compiled"):
                torch.mm(X, X)
    assert [record.index for record in outer.records] == [0, 1, 2, 3, 4]
    assert [record.index for record in inner.records] == [0, 1, 2, 3]
    assert seen == [0]


def test_threads_note_in_their_own_blocks_and_in_one_for_all() -> None:
    everything = hooks.Recorder()
    own: list[hooks.Recorder] = []

    def work() -> None:
        mine = hooks.Recorder()
        own.append(mine)
        with intercept(mine, engine="compiled"):
            multiply(200)

    with intercept(everything, engine="compiled", threads="all"):
        run_threads(*[work] * 8)
    assert [len(mine.records) for mine in own] == [200] * 8
    assert sorted(record.index for record in everything.records) == list(range(1600))


@pytest.mark.parametrize("engine", ["kernel", "compiled"])
def test_each_call_tells_its_time_and_its_thread(engine: Any) -> None:
    recorder = hooks.Recorder()

    def work() -> None:
        native.append(threading.get_native_id())
        for _ in range(3):
            times.append(time.time_ns())
            X @ X
        times.append(time.time_ns())

    times: list[int] = []
    native: list[int] = []
    with intercept(recorder, engine=engine, threads="all"):
        run_threads(work)
        work()
    assert [record.thread for record in recorder.records] == [native[0]] * 3 + [native[1]] * 3
    assert native[0] != native[1] == threading.get_native_id()
    for number, record in enumerate(recorder.records):
        before, after = times[number + number // 3 :][:2]
        assert record.started is not None
        assert before <= record.started <= after


def test_a_forked_child_has_what_its_parent_had() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled"):
        multiply(3)
        child = os.fork()
        if not child:
            torch.mm(X, X)  # outside of the block, which is the parent's
            os._exit(len(recorder.records))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        torch.mm(X, X)
    assert len(recorder.records) == 4


def test_a_hook_that_fails_before_a_fork_fails_after_it() -> None:
    with pytest.raises(ValueError, match="the third"), intercept(failing(), engine="compiled"):
        multiply(4)
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        torch.mm(X, X)


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    def threads() -> set[int | None]:
        recorder = hooks.Recorder()
        with intercept(recorder, engine="compiled"):
            multiply(3)
        return {record.thread for record in recorder.records}

    assert threads() == {os.getpid()}
    child = os.fork()
    if not child:
        os._exit(threads() != {os.getpid()})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_module_that_gets_the_address_of_another_gets_its_own_name() -> None:
    recorder = hooks.Recorder()
    names = []
    with torch.no_grad(), intercept(recorder, engine="compiled"):
        for turn in range(30):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) if turn % 2 else nn.Linear(2, 2)
            model(X)
            model(X)
            names.append([record.module for record in recorder.records])
            recorder.records.clear()
            del model
            gc.collect()
    assert names[1::2] == [["0", "1"] * 2] * 15
    assert names[0::2] == [["Linear"] * 2] * 15


def test_nothing_is_kept_alive_by_the_rows() -> None:
    model, hook = Block(), hooks.Recorder()
    interceptor = intercept(hook, engine="compiled")
    with interceptor:
        for _ in range(3):
            model(torch.ones(4, 4))
    kept: list[Any] = [weakref.ref(model), weakref.ref(interceptor.watcher.pipeline), weakref.ref(hook)]
    del model, hook, interceptor
    torch.mm(X, X)
    assert [reference() for reference in kept] == [None, None, None]


def test_a_program_with_ever_new_shapes_and_places_is_noted_right() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled"):
        for size in range(1, 5000):
            torch.mm(torch.ones(1, size), torch.ones(size, 1))
    assert [record.gemm.k for record in recorder.records if record.gemm] == list(range(1, 5000))


def test_a_table_that_changes_in_a_block_changes_what_is_noted() -> None:
    recorder = hooks.Recorder()
    torch.library.define("rows::square", "(Tensor x) -> Tensor")
    with intercept(recorder, engine="compiled"):
        torch.mm(X, X)
        register_op("rows::square", lhs="x", rhs="x")
        torch.mm(X, X)
    assert timeless(recorder.records)[0].gemm == timeless(recorder.records)[1].gemm


def test_work_that_differs_is_left_to_python() -> None:
    both = _rows._together([Work(target=(1.0, 2.0)), Work(target=(1.0, 3.0))])  # noqa: SLF001
    assert both is None
    together = _rows._together([Work(reads=("output",)), Work(False, ("lhs",), finite=True)])  # noqa: SLF001
    assert together == Work(True, ("lhs", "output"), finite=True)


def test_a_reader_inside_a_hook_finds_all_calls_before(shown: Counter[str]) -> None:
    recorder, counts = hooks.Recorder(), list[int]()
    with intercept([recorder, Noting(lambda note: counts.append(len(recorder.records)))], engine="compiled"):
        multiply(4)
    assert counts[-1] == 4


@pytest.mark.parametrize(
    ("ops", "functions"),
    [("matmul", (torch.dot, torch.vdot)), (("aten::add.Tensor", "aten::sub.Tensor"), (torch.add, torch.sub))],
    ids=["dot", "add"],
)
def test_operators_with_arguments_alike_keep_their_names(ops: Any, functions: tuple[Any, ...]) -> None:
    x, profile, recorder = torch.ones(3), hooks.Profile(), hooks.Recorder()
    with intercept([recorder, profile], ops=ops, engine="compiled"):
        for _ in range(3):
            for function in functions:
                function(x, x)
    names = [f"aten::{function.__name__}" for function in functions]
    assert [record.op for record in recorder.records] == names * 3
    assert {row.op: row.calls for row in profile.rows()} == dict.fromkeys(names, 3)


def test_threads_that_make_and_drop_modules_are_noted_right() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled", threads="all"):
        run_threads(*[lambda: nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()] * 8, seconds=STRESS)
    forward = {record.index: record for record in recorder.records if record.phase == "forward"}
    assert sorted(record.index for record in recorder.records) == list(range(len(recorder.records)))
    assert {record.op for record in recorder.records} == {"aten::addmm", "aten::mm"}
    for record in recorder.records:
        assert (record.module or "").startswith("Linear")
        if record.phase == "backward":
            assert record.forward is not None
            assert record.module == forward[record.forward].module
            assert record.thread == forward[record.forward].thread


def test_hooks_come_and_go_while_threads_run() -> None:
    linear, profile, came = nn.Linear(4, 4), hooks.Profile(), []
    with intercept(profile, engine="compiled", threads="all") as interceptor:

        def come_and_go() -> None:
            came.append(hooks.Recorder())
            interceptor.register(came[-1]).remove()

        run_threads(*[lambda: linear(torch.randn(2, 4))] * 8, come_and_go, seconds=STRESS)
        calls = interceptor.watcher.pipeline.calls
    assert sum(row.calls for row in profile.rows()) == calls
    for recorder in came:
        assert all(record.op == "aten::addmm" for record in recorder.records)


def test_a_reader_waits_for_a_thread_that_tells_of_a_row() -> None:
    telling, go_on = threading.Event(), threading.Event()

    def tell_and_wait(note: PendingRecord) -> None:
        telling.set()
        go_on.wait(10)

    slow = Noting(tell_and_wait)
    with intercept(slow, engine="compiled"):
        torch.mm(X, X)
        torch.mm(X, X)
        teller = threading.Thread(target=lambda: slow.records)
        teller.start()
        assert telling.wait(10)
        threading.Timer(0.1, go_on.set).start()
        assert len(slow.records) == 2
        teller.join()


def test_a_reader_does_not_wait_for_ever_for_a_hook_that_waits_for_it() -> None:
    lock, telling = threading.Lock(), threading.Event()

    def wait_for_the_lock(note: PendingRecord) -> None:
        telling.set()
        with lock:
            pass

    locks = Noting(wait_for_the_lock)
    with intercept(locks, engine="compiled"):
        torch.mm(X, X)
        torch.mm(X, X)
        with lock:
            teller = threading.Thread(target=lambda: locks.records)
            teller.start()
            assert telling.wait(10)
            assert len(locks.records) == 1
        teller.join()
        assert len(locks.records) == 2


def test_an_interrupt_of_a_reader_leaves_no_lock() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled") as interceptor:
        torch.mm(X, X)
        torch.mm(X, X)
        queue = interceptor.watcher.pipeline.queue
        assert queue is not None
        queue._lock.acquire()  # noqa: SLF001 as an interrupt leaves it
        assert len(recorder.records) == 2
        torch.mm(X, X)
        found: list[int] = []
        run_threads(lambda: found.append(len(recorder.records)))
        assert found == [3]


def test_an_operator_that_raises_counts_its_operands() -> None:
    def rows(engine: Any) -> list[Any]:
        stats = hooks.Stats(of="lhs")
        with intercept(stats, engine=engine):
            for _ in range(3):
                torch.mm(X, X)
                with pytest.raises(RuntimeError, match="cannot be multiplied"):
                    torch.mm(X, torch.ones(3, 2))
        return stats.rows()

    assert rows("compiled") == rows("kernel")
    assert rows("compiled")[0].calls == 6


def test_a_line_has_no_values_that_another_hook_has_read(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "none", flight=9)
    with intercept([recorder, hooks.Stats()], engine="compiled"):
        multiply(3)
        assert [call.values for call in runs.open_run(tmp_path / "run").calls()] == [{}, {}, {}]


def test_a_call_that_is_shown_late_tells_when_it_started() -> None:
    recorder, delay = hooks.Recorder(), 0.3
    with intercept([recorder, Noting(lambda note: time.sleep(delay))], engine="compiled"):
        torch.mm(X, X)
        torch.mm(X, X)  # the other hook is told of this one before the next is shown
        before = time.time_ns()
        torch.mm(torch.ones(1, 2), X)
        assert time.time_ns() - before > delay * 1e9
    started = recorder.records[2].started
    assert started is not None
    assert 0 <= started - before < delay * 1e9 / 2


def test_a_hook_that_fails_with_a_row_keeps_nothing_of_the_program() -> None:
    def program() -> weakref.ref[Any]:
        module = nn.Linear(2, 2)
        for _ in range(5):
            module(X)
        recorder.records  # noqa: B018
        return weakref.ref(module)

    recorder = hooks.Recorder()
    with (
        pytest.warns(OpInterceptWarning, match="switched off"),
        intercept([recorder, failing()], engine="compiled", on_error="warn"),
    ):
        gc.disable()
        try:
            assert program()() is None
        finally:
            gc.enable()


def test_inner_steps_are_not_seen_in_threads_that_have_entered_nothing() -> None:
    recorder = hooks.Recorder()
    with intercept(recorder, engine="compiled", threads="all"):
        run_threads(lambda: torch.addbmm(X, torch.ones(3, 2, 2), torch.ones(3, 2, 2)))
    assert [record.op for record in recorder.records] == ["aten::addbmm"]


@pytest.mark.parametrize("engine", ["kernel", "compiled"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda x: torch.mm(x.to(torch.complex64), x.to(torch.complex64)), id="complex"),
        pytest.param(
            lambda x: torch._foreach_mm([x], [x]),
            id="list",
            marks=pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="_foreach_mm came with torch 2.13"),
        ),
    ],
)
def test_nonfinite_looks_at_every_kind_of_output(engine: Any, program: Callable[[torch.Tensor], Any]) -> None:
    search = hooks.NonFinite(action="record")
    with intercept(search, engine=engine):
        for value in (1.0, 1.0, float("nan")):
            program(torch.full((9, 9), value))
    assert [finding.record.index for finding in search.findings] == [2]


def test_pauses_and_inner_blocks_of_other_engines_are_kept() -> None:
    recorder, inner = hooks.Recorder(), hooks.Recorder()
    with intercept(recorder, engine="compiled") as interceptor:
        torch.mm(X, X)
        with interceptor.paused():
            torch.mm(X, X)
        with intercept(inner, engine="mode"):
            torch.mm(X, X)
            torch.mm(X, X)
        torch.mm(X, X)
    assert len(recorder.records) == 4
    assert len(inner.records) == 2
    with intercept(recorder, engine="compiled"):
        torch.mm(X, X)
        torch.mm(X, X)
    assert len(recorder.records) == 6


def test_in_place_operators_without_outputs_are_read(tmp_path: Path) -> None:
    values, stats = [torch.full((2, 2), 8.0), torch.full((3,), 8.0)], hooks.Stats()
    for watching in (stats, runs.RunRecorder(tmp_path)):
        with intercept(watching, ops="all", engine="compiled"):
            for _ in range(3):
                torch._foreach_mul_(values, 0.5)
    assert [(row.calls, row.count, row.min, row.max) for row in stats.rows()] == [(3, 12, 1.0, 4.0)]
    assert [call.values["output"].max for call in runs.open_run(tmp_path).calls()] == [0.5, 0.25, 0.125]


class Wrapper(torch.Tensor):
    """Keeps a tensor and hands on each operator."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Wrapper, lambda each: each.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapper, func(*args, **kwargs))


@pytest.mark.parametrize("ops", ["matmul", "all"])
def test_calls_inside_a_wrapper_have_their_modules_in_backward(ops: str) -> None:
    inner = nn.Linear(4, 4)
    inner.weight = nn.Parameter(Wrapper(inner.weight.detach()))
    layer = nn.Sequential(inner)

    def records(*more: Any) -> list[CallRecord]:
        recorder = hooks.Recorder()
        layer.zero_grad()
        with intercept([recorder, *more], ops=ops, engine="compiled"):
            for _ in range(3):
                layer(torch.ones(3, 4)).sum().backward()
        return timeless(recorder.records)

    noted = records()
    assert noted == records(lambda call: None)
    assert {each.module for each in noted if each.op == "aten::mm" and each.phase == "backward"} == {"0"}


def test_what_fake_tensors_are_made_of_is_not_recorded(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    compiled = torch.compile(lambda x: (x @ weight).relu(), backend="aot_eager", dynamic=True)
    with intercept(runs.RunRecorder(tmp_path), ops="all", engine="compiled"):
        for rows in (2, 3):
            compiled(torch.ones(rows, 4))
    calls = [call.record for call in runs.open_run(tmp_path).calls()]
    assert [each.op for each in calls if each.gemm] == ["aten::mm"] * 2
    assert not any("meta" in str(each) for each in calls)
