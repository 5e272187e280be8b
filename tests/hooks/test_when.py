"""`when`: which calls pass, and that the hook otherwise behaves as before."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_calls import call_of
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import OpCall, OpInterceptWarning, hooks, intercept
from opintercept._kit.filter import MOST_NAMES, CallFilter


def mm(size: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.mm(torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype))


def mv() -> torch.Tensor:
    return torch.mv(torch.ones(2, 2), torch.ones(2))


def bmm() -> torch.Tensor:
    return torch.bmm(torch.ones(2, 2, 2), torch.ones(2, 2, 2))


def passed(program: Callable[[], Any], level: Any = "dispatch", **filters: Any) -> list[int]:
    """The indexes of the calls of `program` that pass the filters."""
    recorder = hooks.Recorder()
    with intercept(hooks.when(recorder, **filters), level=level):
        program()
    return [record.index for record in recorder.records]


def mixed() -> None:
    mm()
    mv()
    bmm()
    mm()


def functions() -> None:
    x = torch.ones(2, 2)
    F.linear(x, x)
    torch.matmul(x, x)
    _ = x @ x
    torch.linalg.matmul(x, x)
    torch.mm(x, x)


def trained() -> None:
    x = torch.ones(3, 3, requires_grad=True)
    mm(3)
    (x @ torch.ones(3, 3)).sum().backward()
    torch.mv(x.detach(), torch.ones(3))


def of_dtypes() -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64):
        mm(dtype=dtype)


def of_sizes() -> None:
    mv()
    torch.mm(torch.ones(1, 3), torch.ones(3, 3))


def seven() -> None:
    for _ in range(7):
        mm()


def alternating() -> None:
    for _ in range(4):
        mm()
        mv()


FUNCTION: dict[str, Any] = {"level": "function"}
FILTERS: list[tuple[Callable[[], None], dict[str, Any], list[int]]] = [
    (mixed, {"op": "mm"}, [0, 3]),
    (mixed, {"op": "aten::mm"}, [0, 3]),
    (mixed, {"op": ("mm", "mv")}, [0, 1, 3]),
    (mixed, {"op": ["aten::mv", "bmm"]}, [1, 2]),
    (mixed, {"op": {"mm"}}, [0, 3]),
    (mixed, {"op": (name for name in ("mv", "mv"))}, [1]),
    (mixed, {"op": "dot"}, []),
    (mixed, {"op": "m"}, []),  # a part of a name
    (mixed, {"op": "addmm"}, []),  # a longer name
    (functions, FUNCTION | {"op": "linear"}, [0]),
    (functions, FUNCTION | {"op": "torch.nn.functional.linear"}, [0]),
    (functions, FUNCTION | {"op": "torch.linear"}, []),  # of another module
    (functions, FUNCTION | {"op": "matmul"}, [1, 2, 3]),
    (functions, FUNCTION | {"op": "torch.matmul"}, [1]),
    (functions, FUNCTION | {"op": "torch.Tensor.matmul"}, [2]),
    (functions, FUNCTION | {"op": "mm"}, [4]),
    (trained, {"phase": "forward"}, [0, 1, 3]),
    (trained, {"phase": "backward"}, [2]),
    (trained, {"op": "mm", "phase": "forward", "dtype": torch.float32, "min_numel": 9, "steps": 0}, [0, 1]),
    (trained, {"op": "mm", "phase": "backward", "min_numel": 9}, [2]),
    (trained, {"op": "mv", "phase": "backward"}, []),
    (of_dtypes, {"dtype": torch.float64}, [1]),
    (of_dtypes, {"dtype": "float64"}, [1]),
    (of_dtypes, {"dtype": "torch.float64"}, [1]),
    (of_sizes, {"min_numel": 1}, [0, 1]),
    (of_sizes, {"min_numel": 4}, [0, 1]),
    (of_sizes, {"min_numel": 5}, [1]),
    (of_sizes, {"min_numel": 9}, [1]),
    (of_sizes, {"min_numel": 10}, []),
    (seven, {}, [0, 1, 2, 3, 4, 5, 6]),
    (seven, {"every_calls": 1}, [0, 1, 2, 3, 4, 5, 6]),
    (seven, {"every_calls": 3}, [0, 3, 6]),
    (seven, {"first": 2}, [0, 1]),
    (seven, {"every_calls": 3, "first": 2}, [0, 3]),
    (seven, {"every_calls": 9}, [0]),
    (seven, {"first": 9}, [0, 1, 2, 3, 4, 5, 6]),
    # Those that pass the other filters are counted.
    (alternating, {"op": "mv", "every_calls": 2}, [1, 5]),
    (alternating, {"op": "mv", "first": 3}, [1, 3, 5]),
    (alternating, {"predicate": lambda call: call.index >= 2, "every_calls": 2, "first": 2}, [2, 4]),
]


@pytest.mark.parametrize(("program", "filters", "indexes"), FILTERS)
def test_filters_choose_calls(program: Callable[[], None], filters: dict[str, Any], indexes: list[int]) -> None:
    assert passed(program, **filters) == indexes


def test_the_dtype_may_be_that_of_the_right_operand() -> None:
    operands = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int8)
    call = call_of(torch.ops.aten.mm.default, *operands)
    seen: list[Any] = []
    hook: Any = hooks.when(seen.append, dtype=torch.int8)
    hook.post(call)
    assert len(seen) == 1


def test_counters_go_on_in_the_next_block() -> None:
    recorder = hooks.Recorder()
    hook = hooks.when(recorder, first=3)
    for _ in range(2):
        with intercept(hook):
            mm()
            mm()
    assert len(recorder.records) == 3


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [1]), (range(1, 3), [1, 2]), ({0, 3}, [0, 3]), ([], []), (range(2, 100, 2), [2])],
    ids=["number", "range", "set", "none", "stride"],
)
def test_steps(steps: Any, expected: list[int]) -> None:
    recorder = hooks.Recorder()
    with intercept(hooks.when(recorder, steps=steps)) as interceptor:
        for _ in range(4):
            mm()
            interceptor.step()
    assert [record.step for record in recorder.records] == expected


def test_the_predicate_gets_only_calls_that_pass_the_cheaper_filters() -> None:
    asked: list[int] = []

    def predicate(call: OpCall) -> bool:
        asked.append(call.index)
        return call.lhs is not None and call.lhs.shape[0] == 3

    def program() -> None:
        mv()
        mm(2)
        mm(3)

    assert passed(program, op="mm", predicate=predicate) == [2]
    assert asked == [1, 2]


class Both:
    """Keeps the calls that each of its methods gets, and counts the blocks that it leaves."""

    def __init__(self) -> None:
        self.pres: list[int] = []
        self.posts: list[int] = []
        self.errors: list[int] = []
        self.enters = self.exits = 0

    def pre(self, call: OpCall) -> Any:
        self.pres.append(call.index)

    def post(self, call: OpCall) -> Any:
        self.posts.append(call.index)

    def error(self, call: OpCall, exception: BaseException) -> None:
        self.errors.append(call.index)

    def enter(self) -> None:
        self.enters += 1

    def exit(self) -> None:
        self.exits += 1


def test_pre_and_post_share_one_verdict() -> None:
    hook, asked = Both(), []

    def predicate(call: OpCall) -> bool:
        asked.append(call.index)
        return len(asked) % 2 == 1  # asked a second time, it would answer the opposite

    with intercept(hooks.when(hook, predicate=predicate)):
        for _ in range(5):
            mm()
    assert hook.pres == hook.posts == [0, 2, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_the_verdict_holds_if_pre_changes_the_operands() -> None:
    class Widen(Both):
        def pre(self, call: OpCall) -> Any:
            super().pre(call)
            return [value.double() for value in call.args], call.kwargs

    hook = Widen()
    with intercept(hooks.when(hook, dtype=torch.float32), level="function"):
        mm()
        mm(dtype=torch.float64)
    assert hook.pres == hook.posts == [0]


def test_the_verdict_holds_for_error() -> None:
    hook = Both()
    with intercept(hooks.when(hook, every_calls=2)):
        for _ in range(4):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert hook.pres == hook.errors == [0, 2]
    assert hook.posts == []


def test_one_hook_in_two_filters_gets_a_verdict_from_each() -> None:
    recorder = hooks.Recorder()
    with intercept([hooks.when(recorder, op="mm"), hooks.when(recorder, op="mv")]):
        mixed()
    assert [record.op for record in recorder.records] == ["aten::mm", "aten::mv", "aten::mm"]


def test_nested_filters_both_apply_and_the_inner_one_counts_what_the_outer_one_passes() -> None:
    recorder = hooks.Recorder()
    with intercept(hooks.when(hooks.when(recorder, every_calls=2), every_calls=3)):
        for _ in range(13):
            mm()
    assert [record.index for record in recorder.records] == [0, 6, 12]


def test_two_interceptors_with_one_filter_count_together() -> None:
    recorder = hooks.Recorder()
    hook = hooks.when(recorder, first=3)
    with intercept(hook), intercept(hook):
        mm()
        mm()
    assert len(recorder.records) == 3


def test_replaced_operands_and_outputs_pass() -> None:
    class Change:
        def pre(self, call: OpCall) -> tuple[Any, Any]:
            return (-call.args[0], call.args[1]), call.kwargs

        def post(self, call: OpCall) -> Any:
            return call.output * 2

    with intercept(hooks.when(Change(), op="mm", first=1)):
        products = mm(), mm(), mv()
    for product, expected in zip(products, (-4.0, 2.0, 2.0), strict=True):
        assert torch.equal(product, torch.full_like(product, expected))


def only(*names: str) -> Any:
    """A hook that has only these methods."""
    return type("Only", (), {name: (lambda self, *args: None) for name in names})()


@pytest.mark.parametrize(
    "names",
    [("pre",), ("post",), ("error",), ("pre", "post"), ("enter", "exit"), ("post", "exit"), ("pre", "enter")],
    ids=" ".join,
)
def test_the_filtered_hook_has_the_methods_of_the_hook_and_no_others(names: tuple[str, ...]) -> None:
    hook = hooks.when(only(*names), first=1)
    every = ("pre", "post", "error", "enter", "exit", "backward")
    assert [name for name in every if hasattr(hook, name)] == [name for name in every if name in names]


def test_a_callable_is_a_post_hook() -> None:
    hook = hooks.when(lambda call: None)
    assert [name for name in ("pre", "post", "error") if hasattr(hook, name)] == ["post"]


def test_enter_and_exit_are_not_filtered() -> None:
    hook = Both()
    with intercept(hooks.when(hook, op="dot")):
        mm()
        assert (hook.enters, hook.exits) == (1, 0)
    assert (hook.enters, hook.exits, hook.posts) == (1, 1, [])


def test_a_callable_with_enter_sees_the_same_calls_with_and_without_a_filter() -> None:
    class Hook:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, call: OpCall) -> None:
            self.calls += 1

        def enter(self) -> None: ...

    plain, filtered = Hook(), Hook()
    with intercept([plain, hooks.when(filtered)]):
        mm()
    assert plain.calls == filtered.calls


def test_a_filtered_hook_with_backward_is_refused_at_dispatch_level_too() -> None:
    with pytest.raises(ValueError, match="a hook with a backward method works at function level"):
        intercept(hooks.when(only("backward", "post")))


def test_a_filtered_hook_declares_the_levels_of_the_hook() -> None:
    hook = only("post")
    hook.levels = ("dispatch",)
    with intercept(hooks.when(hook)):
        torch.ones(2, 2) @ torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"when\(.*\) works at level='dispatch' only, got level='function'"):
        intercept(hooks.when(hook), level="function")


def test_the_repr_shows_the_hook() -> None:
    class Hook:
        def post(self, call: OpCall) -> None: ...

        def __repr__(self) -> str:
            return "Hook()"

    assert repr(hooks.when(hooks.when(Hook(), first=1), op="mm")) == "when(when(Hook()))"


@pytest.mark.parametrize(
    ("hook", "filters", "error", "message"),
    [
        (3, {}, TypeError, "when needs a hook, got 3"),
        (None, {}, TypeError, "when needs a hook, got None"),
        (hooks.Recorder, {}, TypeError, "when needs a hook, got <class .*Recorder'>"),
        (print, {"predicate": True}, TypeError, "predicate must be callable, got True"),
        (print, {"phase": "x"}, ValueError, "phase must be one of 'forward', 'backward', 'recompute', got 'x'"),
        (
            print,
            {"module": 3},
            TypeError,
            "module must be a glob, a compiled pattern or a predicate of the name, got 3",
        ),
        (print, {"every_calls": 0}, ValueError, "every_calls must be a whole number of at least 1, got 0"),
        (print, {"every_calls": 1.5}, ValueError, r"every_calls must be a whole number of at least 1, got 1\.5"),
        (print, {"first": 0}, ValueError, "first must be a whole number of at least 1, got 0"),
        (print, {"first": "3"}, ValueError, "first must be a whole number of at least 1, got '3'"),
        (print, {"min_numel": 0}, ValueError, "min_numel must be a whole number of at least 1, got 0"),
        (print, {"op": 3}, TypeError, "op must be .*, got 3"),
        (print, {"op": torch.ops.aten.mm}, TypeError, "op must be .*, got <OpOverloadPacket.*"),
        (print, {"op": [torch.mm]}, TypeError, r"op must be .*, got \[<built-in method mm.*"),
        (print, {"dtype": float}, TypeError, "dtype must be .*, got <class 'float'>"),
        (print, {"steps": 2.5}, TypeError, r"steps must be .*, got 2\.5"),
        (print, {"steps": "12"}, TypeError, "steps must be .*, got '12'"),
        (print, {"steps": iter([1])}, TypeError, "steps must be .*, got <list_iterator.*"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    hook: Any, filters: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        hooks.when(hook, **filters)


# Modules that do not exist


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.output = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.output(self.attention(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def encode() -> None:
    Encoder()(torch.ones(1, 2))


def warned(caught: pytest.WarningsRecorder) -> list[str]:
    return [str(warning.message) for warning in caught if warning.category is OpInterceptWarning]


@pytest.mark.parametrize(
    ("module", "shown", "advice"),
    [
        ("layers.*.atention", "'layers.*.atention'", "did you mean 'layers.1.attention' or 'layers.0.attention'"),
        ("layers.?", "'layers.?'", "did you mean 'layers.?.*'"),
        ("*.2.*", "'*.2.*'", "calls come from 'layers.0.attention', 'layers.0.output', 'layers.1.attention', ..."),
        ("1.attention", "'1.attention'", "did you mean '*.1.attention'"),
        ("[01]", "'[01]'", "did you mean '*.[01].*'"),
        (re.compile("attention"), "re.compile('attention')", "it must match the whole of 'layers.0.attention'"),
        (re.compile("layers.[01].atention"), "re.compile('layers.[01].atention')", "did you mean 'layers.1.attention'"),
    ],
    ids=["misspelt", "outside", "unlike", "inside", "middle", "part", "pattern"],
)
def test_a_module_that_makes_no_call_warns_with_a_suggestion(module: Any, shown: str, advice: str) -> None:
    text = f"^no call so far comes from a module that matches module={re.escape(shown)}; {re.escape(advice)}"
    with pytest.warns(OpInterceptWarning, match=text):
        assert passed(encode, module=module) == []


def test_a_module_that_makes_no_call_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    hook = Both()
    filtered = hooks.when(hook, module="layers.2.*")
    for _ in range(3):
        with intercept(filtered), intercept(filtered):
            encode()
    assert len(warned(recwarn)) == 1
    assert hook.exits == 6


def test_a_module_that_has_matched_once_does_not_warn() -> None:
    hook = hooks.when(hooks.Recorder(), module="layers.1.output")
    with intercept(hook):
        encode()
    with intercept(hook):
        nn.Sequential(nn.Linear(2, 2))(torch.ones(1, 2))


def test_calls_without_a_known_module_do_not_warn() -> None:
    output = Encoder()(torch.ones(1, 2)).sum()  # outside the block, so that nothing is known about its backward pass
    hook = Both()
    with intercept([hook, hooks.when(hooks.Recorder(), module="typo")]):
        output.backward()
    assert len(hook.posts) == 7


def nothing() -> None: ...


def in_turn(*programs: Callable[[], Any]) -> None:
    for program in programs:
        program()


@pytest.mark.parametrize(
    ("program", "filters"),
    [
        (nothing, {"module": "typo"}),
        (encode, {"module": "typo", "op": "bmm"}),
        (encode, {"module": "typo", "phase": "backward"}),
        (encode, {"module": "typo", "steps": 1}),
        (encode, {"module": "typo", "dtype": torch.float64}),
        (encode, {"module": "typo", "min_numel": 5}),
        (lambda: in_turn(encode, mm), {"module": "layers.*", "op": "mm"}),
        (lambda: in_turn(mm, encode), {"module": "layers.*", "op": "mm"}),
        (encode, {"module": "*.output", "predicate": lambda call: False}),
        (encode, {"module": lambda name: False}),
        (encode, {"module": ""}),
        (encode, {"module": "[!l]*"}),
        (encode, {"module": re.compile("(?!layers).*")}),
    ],
    ids=[
        *("no call", "op", "phase", "steps", "dtype", "min_numel", "op after", "op before", "predicate", "test"),
        *("outermost", "not", "not in re"),
    ],
)
def test_a_module_that_need_not_match_does_not_warn(program: Any, filters: dict[str, Any]) -> None:
    assert passed(program, **filters) == []  # warnings are errors


def test_a_filter_does_not_warn_about_calls_that_an_outer_filter_kept_from_it() -> None:
    hook = Both()
    with intercept(hooks.when(hooks.when(hooks.when(hook, module="layers.0.*"), first=9), module="layers.1.*")):
        encode()
    assert hook.exits == 1


def test_a_module_that_makes_no_call_hides_no_exception() -> None:
    with pytest.raises(KeyError, match="mine") as caught, intercept(hooks.when(Both(), module="atention")):
        encode()
        raise KeyError("mine")
    (note,) = caught.value.__notes__
    assert "matches module='atention'; did you mean 'layers." in note


def test_if_warnings_are_errors_the_next_block_still_works() -> None:
    hook = Both()
    interceptor = intercept(hooks.when(hook, module="atention"))
    message = "no call so far comes from a module that matches module='atention'"
    with pytest.raises(OpInterceptWarning, match=message), interceptor:
        encode()
    with interceptor:
        encode()
    assert hook.exits == 2


def test_an_error_of_the_hooks_exit_comes_before_the_warning() -> None:
    class Fails(Both):
        def exit(self) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), intercept(hooks.when(Fails(), module="atention")):
        encode()


def test_the_warning_names_the_line_of_the_block() -> None:
    with pytest.warns(OpInterceptWarning, match="atention") as caught:
        with intercept(hooks.when(Both(), module="atention")):
            encode()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("kept", [True, False])
def test_names_are_kept_up_to_a_limit(kept: bool) -> None:
    filters = CallFilter(module="typo")
    assert filters.watch_names()
    names = [f"layers.{number}" for number in range(MOST_NAMES)]
    names.insert(0 if kept else MOST_NAMES, "typos")
    for name in names:
        call: Any = SimpleNamespace(aliases=(name,))
        assert not filters.admits(call)
    assert ("did you mean 'typos'" in str(filters.unmatched())) is kept
