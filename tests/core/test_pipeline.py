"""The hook loop, with plain Python objects instead of tensors and operators."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from opintercept import HookError, OpCall, OpInterceptWarning
from opintercept._core.hook import Handle, check_hook
from opintercept._core.pipeline import Pipeline, run


class Spec:
    """What the pipeline asks of an operator's row in the table. `written` says to which of its arguments it writes."""

    name = "test::op"
    opaque = False

    def __init__(self, written: Callable[..., list[Any]] = lambda func, args, kwargs: []) -> None:
        self.written = written
        self.returned = written

    def operand(self, role: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def gemm(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...
    def flops(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...


class FakeTensor:
    """A list of values that looks like a tensor."""

    requires_grad = False
    layout = "strided"
    device = "cpu"
    is_nested = False

    def __init__(self, values: list[float], dtype: str = "float32") -> None:
        self.values = values
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.values),)

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def numel(self) -> int:
        return len(self.values)

    def element_size(self) -> int:
        return 1

    def data_ptr(self) -> int:
        return id(self.values)

    def copy_(self, other: FakeTensor) -> None:
        self.values[:] = other.values


def add(a: float, b: float = 0) -> float:
    return a + b


PLAIN: Any = Spec()


def call(*pipelines: Pipeline, function: Any, args: tuple[Any, ...] = (), spec: Any = PLAIN) -> Any:
    """Run an operator that computes `function`."""
    return run(pipelines, spec, function, "forward", lambda head, *args: function(*args), None, args, {})


def call_add(*pipelines: Pipeline, function: Any = add, spec: Any = PLAIN) -> Any:
    return call(*pipelines, function=function, args=(1, 2), spec=spec)


def test_run_without_hooks_returns_what_the_operator_returns() -> None:
    assert call_add(Pipeline([])) == 3


def test_run_passes_the_head_only_to_the_operator() -> None:
    seen: list[Any] = []
    pipeline = Pipeline([lambda call: seen.append(call.args)])
    assert run((pipeline,), PLAIN, add, "forward", lambda *a: a, "head", (1,), {}) == ("head", 1)
    assert seen == [(1,)]


def test_hooks_run_in_registration_order() -> None:
    log: list[str] = []

    def named(name: str) -> Any:
        return SimpleNamespace(pre=lambda call: log.append(f"pre {name}"), post=lambda call: log.append(f"post {name}"))

    pipeline = Pipeline([named("a"), named("b")])
    pipeline.register(named("c"))
    call_add(pipeline)
    assert log == ["pre a", "pre b", "pre c", "post a", "post b", "post c"]


def test_a_hook_may_be_a_bound_method_a_lambda_or_an_object() -> None:
    log: list[Any] = []

    class Keeper:
        def keep(self, call: OpCall) -> None:
            log.append(("bound", call.output))

        def post(self, call: OpCall) -> None:
            log.append(("object", call.output))

    keeper = Keeper()
    call_add(Pipeline([keeper.keep, lambda call: log.append(("lambda", call.output)), keeper]))
    assert log == [("bound", 3), ("lambda", 3), ("object", 3)]


def test_a_callable_object_with_a_post_method_is_not_called_itself() -> None:
    class Both:
        def __call__(self, call: OpCall) -> None:
            raise AssertionError

        def post(self, call: OpCall) -> None:
            pass

    assert call_add(Pipeline([Both()])) == 3


def test_calls_are_numbered_from_zero_in_each_pipeline() -> None:
    indices: dict[str, list[int]] = {"a": [], "b": []}
    a = Pipeline([lambda call: indices["a"].append(call.index)])
    b = Pipeline([lambda call: indices["b"].append(call.index)])
    call_add(a)
    call_add(a, b)
    assert indices == {"a": [0, 1], "b": [0]}


def test_a_call_has_its_step() -> None:
    steps: list[int] = []
    pipeline = Pipeline([lambda call: steps.append(call.step)])
    call_add(pipeline)
    pipeline.steps += 1
    call_add(pipeline)
    assert steps == [0, 1]


def test_elapsed_is_none_before_and_seconds_after() -> None:
    seen: list[Any] = []
    hook = SimpleNamespace(pre=lambda call: seen.append(call.elapsed), post=lambda call: seen.append(call.elapsed))
    call_add(Pipeline([hook]))
    assert seen[0] is None
    assert 0 <= seen[1] < 1


def test_pre_replaces_the_inputs_for_later_hooks_and_the_operator() -> None:
    seen: list[Any] = []
    first = SimpleNamespace(pre=lambda call: ((10, 20), {}))
    second = SimpleNamespace(pre=lambda call: seen.append(call.args), post=lambda call: seen.append(call.args))
    assert call_add(Pipeline([first, second])) == 30
    assert seen == [(10, 20), (10, 20)]


def test_pre_of_a_later_pipeline_shows_in_the_calls_of_the_earlier() -> None:
    seen: list[Any] = []
    watching = Pipeline([lambda call: seen.append(call.args)])
    changing = Pipeline([SimpleNamespace(pre=lambda call: ((5, 6), {}))])
    assert call_add(watching, changing) == 11
    assert seen == [(5, 6)]


@pytest.mark.parametrize("inputs", [5, (1, 2), ((1, 2),), ((1, 2), {}, 3), ([1], [2])], ids=repr)
def test_pre_that_returns_anything_else_is_refused(inputs: Any) -> None:
    with pytest.raises(HookError, match=r"a pre hook must return None or \(args, kwargs\)"):
        call_add(Pipeline([SimpleNamespace(pre=lambda call: inputs)]))


def test_post_at_function_level_returns_its_replacement() -> None:
    old, new = FakeTensor([1.0]), FakeTensor([2.0])
    assert call(Pipeline([lambda call: new], level="function"), function=lambda: old) is new
    assert old.values == [1.0]


def test_post_at_dispatch_level_copies_into_the_output() -> None:
    old, new = FakeTensor([1.0]), FakeTensor([2.0])
    assert call(Pipeline([lambda call: new]), function=lambda: old) is old
    assert old.values == [2.0]


def test_post_in_place_at_function_level_copies_into_the_tensor_of_the_program() -> None:
    mine, new = FakeTensor([1.0]), FakeTensor([2.0])
    pipeline = Pipeline([lambda call: new], level="function")
    spec = Spec(lambda func, args, kwargs: [mine])
    assert call(pipeline, function=lambda x: x, args=(mine,), spec=spec) is mine
    assert mine.values == [2.0]


def test_pre_in_place_copies_the_result_into_the_tensor_of_the_program() -> None:
    mine, other = FakeTensor([1.0]), FakeTensor([5.0])
    pipeline = Pipeline([SimpleNamespace(pre=lambda call: ((other,), {}))])
    spec = Spec(lambda func, args, kwargs: [args[0]])
    assert call(pipeline, function=lambda x: x, args=(mine,), spec=spec) is mine
    assert mine.values == [5.0]


def test_a_later_hook_sees_the_replaced_output() -> None:
    seen: list[Any] = []
    new = FakeTensor([2.0])
    pipeline = Pipeline([lambda call: new, lambda call: seen.append(call.output)], level="function")
    call(pipeline, function=lambda: FakeTensor([1.0]))
    assert seen == [new]


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (FakeTensor([1.0, 2.0]), r"must have the shape of the operator's, float32\[1\]@?\w*, got float32\[2\]"),
        (FakeTensor([1.0], "float64"), r"must have the dtype of the operator's, float32\[1\], got float64\[1\]"),
        (3, r"must return None or an output like float32\[1\], got 3"),
    ],
    ids=["shape", "dtype", "no tensor"],
)
def test_post_with_a_replacement_of_another_kind_is_refused(replacement: Any, message: str) -> None:
    with pytest.raises(HookError, match=message):
        call(Pipeline([lambda call: replacement]), function=lambda: FakeTensor([1.0]))


def test_parts_of_a_tuple_are_replaced_one_by_one() -> None:
    out, lse = FakeTensor([1.0]), FakeTensor([2.0])
    pipeline = Pipeline([lambda call: (FakeTensor([3.0]), call.output[1])])
    assert call(pipeline, function=lambda: (out, lse)) == (out, lse)
    assert (out.values, lse.values) == ([3.0], [2.0])


def test_a_tuple_of_another_length_is_refused() -> None:
    pipeline = Pipeline([lambda call: (call.output[0],)])
    with pytest.raises(HookError, match="a replacement output must be a tuple of 2 parts like the operator's"):
        call(pipeline, function=lambda: (FakeTensor([1.0]), FakeTensor([2.0])))


def fail(*_: Any) -> None:
    raise ZeroDivisionError("in the hook")


def test_a_hook_that_raises_says_where_in_a_note() -> None:
    with pytest.raises(ZeroDivisionError, match=r"^in the hook") as caught:
        call_add(Pipeline([fail]))
    (note,) = caught.value.__notes__
    assert note.startswith("opintercept: raised by post hook <function fail")
    assert note.endswith("on call 0 (forward): test::op(1, 2)")


@pytest.mark.parametrize("phase", ["pre", "post"])
def test_on_error_warn_switches_the_hook_off_with_one_warning(phase: str) -> None:
    calls = itertools.count()

    def failing(call: OpCall) -> None:
        next(calls)
        fail()

    seen: list[int] = []
    pipeline = Pipeline([SimpleNamespace(**{phase: failing}), lambda call: seen.append(call.index)], on_error="warn")
    with pytest.warns(OpInterceptWarning, match=f"switched off a hook that raised ZeroDivisionError.*{phase} hook"):
        assert call_add(pipeline) == 3
    with warnings.catch_warnings(action="error"):
        assert call_add(pipeline) == 3
    assert next(calls) == 1
    assert seen == [0, 1]


def test_on_error_warn_covers_a_bad_replacement() -> None:
    pipeline = Pipeline([lambda call: FakeTensor([1.0, 2.0])], on_error="warn")
    out = FakeTensor([1.0])
    with pytest.warns(OpInterceptWarning, match="switched off a hook that raised HookError"):
        assert call(pipeline, function=lambda: out) is out


def test_on_error_warn_lets_a_keyboard_interrupt_through() -> None:
    def interrupt(call: OpCall) -> None:
        raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        call_add(Pipeline([interrupt], on_error="warn"))


def test_error_hooks_see_the_exception_and_the_program_gets_it_untouched() -> None:
    error = ValueError("of the program")
    seen: list[Any] = []

    def broken(a: Any, b: Any) -> None:
        raise error

    hook = SimpleNamespace(error=lambda call, exception: seen.append((call.index, call.output, exception)))
    with pytest.raises(ValueError, match=r"^of the program$") as caught:
        call_add(Pipeline([hook]), function=broken)
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert seen == [(0, None, error)]


def test_a_failing_error_hook_does_not_hide_the_exception_of_the_program() -> None:
    def broken(a: Any, b: Any) -> None:
        raise ValueError("of the program")

    with (
        pytest.warns(OpInterceptWarning, match="switched off an error hook that raised ZeroDivisionError"),
        pytest.raises(ValueError, match="of the program"),
    ):
        call_add(Pipeline([SimpleNamespace(error=fail)]), function=broken)


def test_a_handle_removes_its_own_registration_once() -> None:
    seen: list[int] = []

    def hook(call: OpCall) -> None:
        seen.append(call.index)

    pipeline = Pipeline([hook])
    handle = pipeline.register(hook)
    call_add(pipeline)
    handle.remove()
    handle.remove()
    call_add(pipeline)
    assert seen == [0, 0, 1]


def test_a_handle_is_a_context_manager() -> None:
    seen: list[int] = []
    pipeline = Pipeline([])
    with pipeline.register(lambda call: seen.append(call.index)) as handle:
        assert isinstance(handle, Handle)
        call_add(pipeline)
    call_add(pipeline)
    assert seen == [0]


def test_a_hook_removed_by_another_is_not_called_again_in_the_same_call() -> None:
    seen: list[str] = []
    pipeline = Pipeline([])
    handles: list[Handle] = []

    def first(call: OpCall) -> None:
        seen.append("first")
        handles[1].remove()

    handles += [pipeline.register(first), pipeline.register(lambda call: seen.append("second"))]
    call_add(pipeline)
    assert seen == ["first"]


def test_a_hook_registered_by_another_takes_part_from_the_next_call() -> None:
    seen: list[int] = []
    pipeline = Pipeline([])

    def first(call: OpCall) -> None:
        if call.index == 0:
            pipeline.register(lambda call: seen.append(call.index))

    pipeline.register(first)
    call_add(pipeline)
    call_add(pipeline)
    assert seen == [1]


class Lifecycle:
    """A hook that logs its enter and exit."""

    def __init__(self, log: list[str], name: str = "", *, fails: str = "") -> None:
        self.log, self.name, self.fails = log, name, fails

    def _note(self, what: str) -> None:
        self.log.append(f"{what}{self.name}")
        if self.fails == what:
            fail()

    def post(self, call: OpCall) -> None:
        pass

    def enter(self) -> None:
        self._note("enter")

    def exit(self) -> None:
        self._note("exit")


def test_enter_and_exit_run_for_the_first_block_in_and_the_last_out() -> None:
    log: list[str] = []
    pipeline = Pipeline([Lifecycle(log)])
    pipeline.enter("one")
    pipeline.enter("another")
    pipeline.exit("one", None)
    assert log == ["enter"]
    pipeline.exit("another", None)
    assert log == ["enter", "exit"]
    pipeline.exit("another", None)  # as after an interrupt
    assert log == ["enter", "exit"]


def test_a_failing_enter_exits_the_hooks_before_it() -> None:
    log: list[str] = []
    pipeline = Pipeline([Lifecycle(log, " a"), Lifecycle(log, " b", fails="enter")])
    with pytest.raises(ZeroDivisionError, match="in the hook") as caught:
        pipeline.enter("block")
    assert "raised by the enter of hook" in caught.value.__notes__[0]
    pipeline.exit("block", caught.value)
    assert log == ["enter a", "enter b", "exit a"]


def test_the_other_hooks_exit_after_one_fails_to() -> None:
    log: list[str] = []
    pipeline = Pipeline([Lifecycle(log, " a", fails="exit"), Lifecycle(log, " b")])
    pipeline.enter("block")
    with pytest.raises(ZeroDivisionError, match="in the hook"):
        pipeline.exit("block", None)
    assert log == ["enter a", "enter b", "exit a", "exit b"]


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
def test_the_other_hooks_exit_after_one_ends_the_program(leaving: type[BaseException]) -> None:
    log: list[str] = []

    class Leaves(Lifecycle):
        def exit(self) -> None:
            super().exit()
            raise leaving("on exit")

    pipeline = Pipeline([Leaves(log, " a"), Lifecycle(log, " b", fails="exit")], on_error="warn")
    pipeline.enter("block")
    with pytest.raises(leaving, match="on exit"):
        pipeline.exit("block", ValueError())
    assert log == ["enter a", "enter b", "exit a", "exit b"]


def test_an_exit_that_is_interrupted_before_it_begins_runs_again() -> None:
    log: list[str] = []

    class Interrupted(Lifecycle):
        def exit(self) -> None:
            super().exit()

    pipeline = Pipeline([Interrupted(log)])
    pipeline.enter("block")

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is Interrupted.exit.__code__:
            sys.settrace(None)
            raise KeyboardInterrupt

    sys.settrace(interrupt)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        pipeline.exit("block", None)
    assert log == ["enter", "exit"]


def test_a_failing_exit_is_a_warning_when_the_program_has_failed() -> None:
    pipeline = Pipeline([Lifecycle([], fails="exit")])
    pipeline.enter("block")
    with pytest.warns(OpInterceptWarning, match="a hook failed on exit: ZeroDivisionError"):
        pipeline.exit("block", ValueError())


def test_a_hook_registered_or_removed_in_a_block_enters_and_exits_there() -> None:
    log: list[str] = []
    pipeline = Pipeline([])
    pipeline.enter("block")
    handle = pipeline.register(Lifecycle(log))
    assert log == ["enter"]
    handle.remove()
    assert log == ["enter", "exit"]
    pipeline.exit("block", None)
    assert log == ["enter", "exit"]


def test_opaque_operators_are_counted() -> None:
    class Opaque(Spec):
        opaque = True

    pipeline = Pipeline([])
    call_add(pipeline, spec=Opaque())
    call_add(pipeline)
    assert pipeline.opaque == {"test::op": 1}


INVALID: dict[str, tuple[Any, type[Exception]]] = {
    r"a hook must be an instance, got the class Lifecycle; pass Lifecycle\(\.\.\.\)": (Lifecycle, TypeError),
    "a hook must be callable or have one of pre, post, error, backward, enter, exit, got 5": (5, TypeError),
    "a hook must be callable or have one of .*, got 'print'": ("print", TypeError),
    "a hook must be callable or have one of .*, got namespace": (SimpleNamespace(post=3), TypeError),
    "a hook with a backward method works at function level only, got .* for": (
        SimpleNamespace(backward=print),
        ValueError,
    ),
    r"namespace\(.*\) works at level='function' only, got level='dispatch'": (
        SimpleNamespace(post=print, levels=("function",)),
        ValueError,
    ),
    "reads of a hook must be some of 'module', 'source', .*, got 'src' on namespace": (
        SimpleNamespace(post=print, reads=("module", "src")),
        ValueError,
    ),
    "levels of a hook must be some of 'function', 'dispatch', got 'kernel' on": (
        SimpleNamespace(post=print, levels=["kernel"]),
        ValueError,
    ),
    r"reads of a hook must be a collection, got 'module' on .*; write reads = \('module',\)": (
        SimpleNamespace(post=print, reads="module"),
        TypeError,
    ),
    r"levels of a hook must be a collection, got 'dispatch' on .*; write levels = \('dispatch',\)": (
        SimpleNamespace(post=print, levels="dispatch"),
        TypeError,
    ),
    "reads of a hook must be a collection, got 5 on": (SimpleNamespace(post=print, reads=5), TypeError),
}


@pytest.mark.parametrize("message", INVALID)
def test_an_invalid_hook_is_refused(message: str) -> None:
    hook, error = INVALID[message]
    with pytest.raises(error, match=message):
        check_hook(hook, "dispatch")


def test_freed_pipelines_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    remembered: list[weakref.ref[Pipeline]] = []  # those of other tests may live on
    monkeypatch.setattr("opintercept._core.pipeline._pipelines", remembered)
    monkeypatch.setattr("opintercept._core.pipeline._look_through_at", 64)
    for _ in range(1000):
        Pipeline(())
    kept = [Pipeline(()) for _ in range(100)]
    assert {id(pipeline) for pipeline in kept} <= {id(reference()) for reference in remembered}
    assert len(remembered) < 400


class Stepping:
    """Counts the ends of steps."""

    reads = ()

    def __init__(self, fails: bool = False) -> None:
        self.steps, self.fails = 0, fails

    def pre(self, call: OpCall) -> None: ...

    def end_step(self) -> None:
        self.steps += 1
        if self.fails:
            raise KeyError("no step")


def test_hooks_that_have_entered_are_told_of_the_end_of_a_step() -> None:
    hook = Stepping()
    pipeline = Pipeline([hook])
    pipeline.next_step()
    pipeline.enter(pipeline)
    pipeline.next_step()
    pipeline.exit(pipeline, None)
    pipeline.next_step()
    assert (hook.steps, pipeline.steps) == (1, 3)


def test_a_hook_that_fails_at_the_end_of_a_step_raises_or_is_switched_off() -> None:
    pipeline = Pipeline([Stepping(fails=True)])
    pipeline.enter(pipeline)
    with pytest.raises(KeyError, match="no step") as raised:
        pipeline.next_step()
    assert "raised by the end_step of hook" in raised.value.__notes__[0]
    last = Stepping()
    pipeline = Pipeline([Stepping(fails=True), last], on_error="warn")
    pipeline.enter(pipeline)
    with pytest.warns(OpInterceptWarning, match="switched off a hook that raised KeyError"):
        pipeline.next_step()
    assert (pipeline.hooks, last.steps) == ((last,), 1)
