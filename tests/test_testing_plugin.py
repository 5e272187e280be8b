"""The pytest plugin: what `op_calls` records and says, snapshots, the marker, reports, and what it leaves behind.

Inner runs share this process where they can: importing torch takes longer than all that they test.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from opintercept import CallRecord, TensorMeta, hooks, intercept
from opintercept.hooks._values import all_finite
from opintercept.testing.calls import OpCalls as EagerOpCalls
from opintercept.testing.plugin import OpCalls
from opintercept.testing.snapshot import FOLDER, Snapshots, _file_name, _read, _write

ROOT = Path(__file__).parent.parent

asks_xdist = pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="needs pytest-xdist")
asks_asyncio = pytest.mark.skipif(importlib.util.find_spec("pytest_asyncio") is None, reason="needs pytest-asyncio")

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run inner tests in this process, without plugins that have a say in how tests run."""

    def run_inner(*options: str, **files: str) -> pytest.RunResult:
        pytester.makepyfile(**files)
        return pytester.runpytest_inprocess("-p", "no:randomly", "-p", "no:xdist", "-p", "no:asyncio", *options)

    return run_inner


def meta(*shape: int, dtype: str = "float32", device: str = "cpu") -> TensorMeta:
    return TensorMeta(shape, dtype, device, None, False)


def record(op: str = "mm", phase: Any = "forward", dtype: str = "float32", index: int = 0, **fields: Any) -> CallRecord:
    square = meta(2, 2, dtype=dtype)
    fields = {"lhs": square, "rhs": square, "output": square, "module": "", "flops": 16, **fields}
    for name in ("source", "forward", "grad_of", "bias", "gemm", "bytes", "autocast", "elapsed"):
        fields.setdefault(name, None)
    return CallRecord(index, 0, f"aten::{op}", op, phase, opaque=False, **fields)


def three_calls() -> OpCalls:
    return OpCalls([record(), record("bmm", index=1), record(phase="backward", dtype="bfloat16", index=2)])


# The sequence.


def test_calls_are_a_sequence_that_follows_the_list() -> None:
    records = [record(index=0)]
    calls = OpCalls(records)
    records.append(record("bmm", index=1))
    assert len(calls) == calls.count == 2
    assert calls[1] is calls[-1] is records[1]
    assert calls[:1] == [records[0]]
    assert list(calls) == records
    assert list(reversed(calls)) == records[::-1]
    assert records[0] in calls
    with pytest.raises(IndexError, match="list index out of range"):
        _ = calls[2]


def test_calls_add_up() -> None:
    calls = OpCalls(
        [
            record(module="b", lhs=meta(2, 2, dtype="float16")),
            record(module=None, flops=None, rhs=None),
            record(module="a"),
            record(module="b"),
        ]
    )
    assert calls.flops == 48
    assert calls.dtypes == {"float16", "float32"}
    assert calls.modules == ["b", None, "a"]
    assert repr(calls) == "<OpCalls: 4 calls, 48 FLOP>"
    assert (OpCalls([]).flops, OpCalls([]).dtypes, OpCalls([]).modules) == (0, set(), [])


def test_clear_forgets_and_goes_on(op_calls: OpCalls) -> None:
    torch.mm(torch.ones(2, 2), torch.full((2, 2), torch.nan))
    op_calls.clear()
    op_calls.expect(count=0)
    torch.mv(torch.ones(2, 2), torch.ones(2))
    op_calls.expect(count=1, op="mv", finite=True)


def test_the_class_is_loaded_when_it_is_asked_for() -> None:
    assert OpCalls is EagerOpCalls
    import opintercept.testing.plugin as plugin

    with pytest.raises(AttributeError, match=r"^module 'opintercept\.testing\.plugin' has no attribute 'OpCallz'$"):
        _ = plugin.OpCallz


def test_the_table_has_a_row_for_calls_that_agree_in_everything_it_shows() -> None:
    calls = [record(index=i, module="encoder", source="model.py:42 in forward") for i in range(3)]
    calls += [record("bmm", "backward", rhs=meta(2, 2, dtype="int8"), module=None), record(rhs=None, lhs=meta(3))]
    assert OpCalls(calls).table().splitlines() == [
        "phase     module   op   shapes           dtype          line                    calls",
        "forward   encoder  mm   [2, 2] @ [2, 2]  float32        model.py:42 in forward      3",
        "backward  ?        bmm  [2, 2] @ [2, 2]  float32, int8  ?                           1",
        "forward   -        mm   [3]              float32        ?                           1",
    ]
    assert OpCalls([]).table() == ""


# Filters: those of `when`, with the same verdicts.


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        self.head = torch.nn.Linear(4, 2, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).bfloat16())


ONE_FILTER = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["mm", "aten::addmm", "bmm", ("mm", "addmm")]),
        "module": st.sampled_from(["body.*", "head", "", "*", re.compile(r"body\.\d"), str.isalpha]),
        "phase": st.sampled_from(["forward", "backward", "recompute"]),
        "dtype": st.sampled_from([torch.float32, "bfloat16"]),
        "min_numel": st.integers(1, 40),
        "every": st.integers(1, 3),
        "first": st.integers(1, 3),
        "steps": st.sampled_from([0, 1, range(2)]),
        "predicate": st.just(lambda call: call.index % 2 == 0),
    },
)


@given(ONE_FILTER)
def test_filter_chooses_the_calls_that_when_does(filters: dict[str, Any]) -> None:
    live, everything = hooks.Recorder(), hooks.Recorder()
    net = Net()
    with intercept([everything, hooks.when(live, **filters)]):
        net(torch.ones(3, 4)).sum().backward()
    assert list(OpCalls(everything.records).filter(**filters)) == live.records


def test_filter_can_be_chained_and_stays_as_it_was(op_calls: OpCalls) -> None:
    net = Net()
    net(torch.ones(3, 4)).sum().backward()
    forward = op_calls.filter(phase="forward")
    assert forward.filter(dtype="bfloat16").modules == ["head"]
    net(torch.ones(3, 4))
    assert (forward.count, op_calls.filter(phase="forward").count) == (3, 6)
    forward.clear()
    assert (forward.count, op_calls.filter(phase="forward").count) == (0, 6)


def test_filter_refuses_what_when_refuses(op_calls: OpCalls) -> None:
    with pytest.raises(ValueError, match=r"^phase must be one of 'forward', 'backward', 'recompute', got 'again'$"):
        op_calls.filter(phase="again")
    with pytest.raises(TypeError, match="unexpected keyword argument 'ops'"):
        op_calls.filter(ops="mm")  # type: ignore[call-arg]


# Expectations.


@pytest.mark.parametrize(
    "expectation",
    [
        {},
        {"count": 3},
        {"max_count": 3},
        {"max_count": 9},
        {"op": "mm", "count": 2},
        {"op": "aten::mm", "count": 2},
        {"op": ("mm", "bmm"), "count": 3},
        {"op": iter(["mm", "bmm"]), "count": 3},
        {"phase": "backward", "count": 1},
        {"op": "mm", "phase": "backward", "count": 1, "dtype": torch.bfloat16},
        {"op": "mm", "phase": "forward", "dtype": "float32"},
        {"op": "m", "count": 0},
        {"op": "addmm", "count": 0, "dtype": torch.float64},
        {"op": "addmm", "max_flops": 0},
        {"module": "*", "count": 3},
        {"module": "a", "max_count": 0},
        {"max_flops": 48},
        {"shapes": ((2, 2), (2, 2))},
        {"shapes": ([2, None], torch.Size([2, 2]))},
        {"shapes": [((2, 2), (2, 2))] * 3},
        {"op": "dot", "shapes": [], "count": 0},
        {"predicate": lambda call: call.flops == 16},
        {"finite": True},
    ],
    ids=lambda expectation: ", ".join(f"{key}={value}" for key, value in expectation.items())[:50] or "nothing",
)
def test_expectations_that_hold(expectation: dict[str, Any]) -> None:
    three_calls().expect(**expectation)


BACKWARD = r"\n  2 backward aten::mm bfloat16\[2, 2\] @ bfloat16\[2, 2\] -> bfloat16\[2, 2\] in - \(None\)"


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        ({"count": 2}, r"expected 2 matmul calls, got 3"),
        ({"count": 0}, r"expected 0 matmul calls, got 3"),
        ({"count": 1, "op": "addmm"}, r"expected 1 addmm call, got 0"),
        ({"op": "bmm", "count": 2}, r"expected 2 bmm calls, got 1\n  1 forward aten::bmm .*"),
        ({"op": ("mm", "bmm"), "count": 2}, r"expected 2 mm or bmm calls, got 3"),
        ({"max_count": 2}, r"expected at most 2 matmul calls, got 3"),
        ({"max_count": 1, "op": "mm"}, rf"expected at most 1 mm call, got 2\n  0 .*{BACKWARD}"),
        ({"phase": "backward", "count": 2}, rf"expected 2 backward matmul calls, got 1{BACKWARD}"),
        ({"module": "enc.*", "count": 2}, r"expected 2 matmul calls in enc\.\*, got 0"),
        ({"module": re.compile("[ab]")}, r"expected at least 1 matmul call in \[ab\], got 0"),
        ({"op": "bmmm", "dtype": torch.float32}, r"expected at least 1 bmmm call, got 0"),
        (
            {"dtype": torch.float32},
            rf"expected float32 operands in every matmul call, not so in 1 of 3:{BACKWARD}",
        ),
        (
            {"dtype": "bfloat16", "op": "mm"},
            r"expected bfloat16 operands in every mm call, not so in 1 of 2:\n  0 forward .*",
        ),
        (
            {"max_flops": 47},
            r"expected at most 47 FLOP in 3 matmul calls, got 48; the largest:\n  0 .*\n  1 .*\n  2 .*",
        ),
        (
            {"shapes": ((2, None), (2, 3)), "phase": "backward"},
            rf"expected \[2, \*\] @ \[2, 3\] in every backward matmul call, not so in 1 of 1:{BACKWARD}",
        ),
        (
            {"shapes": [((2, 2), (2, 2)), ((2, 2), None), ((2,), (2, 2))]},
            rf"expected other shapes in 2 of 3 matmul calls:\n  1 .*, expected \[2, 2\]{BACKWARD}, expected \[2\] @ "
            r"\[2, 2\]",
        ),
        (
            {"shapes": [((2, 2), (2, 2))]},
            r"expected 1 matmul call, one for each pair of shapes, got 3",
        ),
        (
            {"predicate": lambda call: call.phase == "forward"},
            rf"expected <lambda> to hold in every matmul call, not so in 1 of 3:{BACKWARD}",
        ),
        ({"count": 2, "max_flops": 32}, r"expected 2 .*\nexpected at most 32 FLOP .*\n  0 .*\n  1 .*\n  2 .*"),
    ],
)
def test_expectations_that_fail(expectation: dict[str, Any], message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"^{message}\nwhat ran: 3 calls, 48 FLOP\nphase ") as failure:
        three_calls().expect(**expectation)
    assert str(failure.value).endswith(three_calls().table())


def test_work_that_is_not_known_is_not_under_a_limit() -> None:
    calls = OpCalls([record(flops=None)])
    with pytest.raises(pytest.fail.Exception, match=r"^expected a known amount of work in every matmul call, not so"):
        calls.expect(max_flops=10**9)


def test_the_failure_of_an_idle_test_says_that_nothing_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^expected 1 matmul call, got 0\nwhat ran: 0 calls, 0 FLOP$"):
        OpCalls([]).expect(count=1)


def test_a_failure_of_a_part_shows_all_that_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match="what ran: 3 calls"):
        three_calls().filter(phase="backward").expect(count=2)


def test_a_failure_of_many_calls_is_cut_short() -> None:
    calls = OpCalls([record(index=i, module=f"layers.{i}") for i in range(100)])
    with pytest.raises(pytest.fail.Exception, match=r"\n  \.\.\. 90 more\nwhat ran: 100 calls") as failure:
        calls.expect(dtype="float64")
    assert str(failure.value).endswith("\n... 60 more rows")
    assert len(calls.table().splitlines()) == 101


@pytest.mark.parametrize(
    ("expectation", "error", "message"),
    [
        ({"count": -1}, ValueError, r"^count must be a whole number of at least 0, got -1$"),
        ({"max_count": 1.5}, ValueError, r"^max_count must be a whole number of at least 0, got 1\.5$"),
        ({"max_flops": "9"}, ValueError, r"^max_flops must be a whole number of at least 0, got '9'$"),
        (
            {"dtype": float},
            TypeError,
            r"^dtype must be a torch\.dtype or its name, 'bfloat16' say, got <class 'float'>$",
        ),
        ({"dtype": "bf16"}, TypeError, r"^dtype must be a torch\.dtype or its name, 'bfloat16' say, got 'bf16'$"),
        ({"phase": "again"}, ValueError, r"^phase must be one of"),
        ({"op": 3}, TypeError, r"^op must be the name of an operator"),
        ({"module": 3}, TypeError, r"^module must be a glob"),
        ({"predicate": True}, TypeError, r"^predicate must be callable, got True$"),
        ({"shapes": (2, 2)}, TypeError, r"^shapes must be those of the left and the right operand, .*, got \(2, 2\)$"),
        ({"shapes": "[2, 2] @ [2, 2]"}, TypeError, r"^shapes must be those of .*, got '\[2, 2\] @ \[2, 2\]'$"),
        ({"shapes": [((2, 2), (2, 2)), (2, 2)]}, TypeError, r"^shapes must be those of "),
        ({"shapes": 3}, TypeError, r"^shapes must be those of .*, got 3$"),
    ],
)
def test_expectations_that_make_no_sense(
    expectation: dict[str, Any], error: type[Exception], message: str, op_calls: OpCalls
) -> None:
    with pytest.raises(error, match=message):
        op_calls.expect(**expectation)


@pytest.mark.parametrize("level", ["dispatch", "function"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.complex64], ids=str)
def test_finite_finds_the_calls_whose_output_is_not(
    op_calls: OpCalls, level: Any, value: float, dtype: torch.dtype
) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with op_calls.block(level=level) as calls:
        torch.mm(x, x)
        torch.mm(x, torch.full_like(x, value))
        torch.mm(x, x)
    assert op_calls.count == 3
    calls.filter(first=1).expect(finite=True)
    with pytest.raises(
        pytest.fail.Exception, match=r"^expected a finite output in every matmul call, not so in 1 of 3:\n  1 forward "
    ):
        calls.expect(finite=True)


def test_finite_passes_outputs_that_have_no_values(op_calls: OpCalls) -> None:
    with op_calls.block(level="function") as calls:
        torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"))
        torch.vmap(torch.mv, in_dims=(None, 0))(torch.ones(2, 2), torch.full((3, 2), torch.nan))
        torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8))
    calls.expect(count=3, finite=True)


def test_finite_looks_at_the_result_and_not_at_what_else_an_operator_returns(op_calls: OpCalls) -> None:
    lstm = torch.nn.LSTM(3, 2)
    with torch.no_grad():
        output, (_, cell) = lstm(torch.ones(4, 1, 3), (torch.zeros(1, 1, 2), torch.full((1, 1, 2), torch.inf)))
    assert output.isfinite().all()
    assert not cell.isfinite().any()
    op_calls.expect(finite=True)


NAN_AND_ONE = torch.tensor([[torch.nan, 0], [0, 1]])


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        (NAN_AND_ONE, False),
        (NAN_AND_ONE.nan_to_num(), True),
        (NAN_AND_ONE.to_sparse(), False),
        (torch.eye(2).to_sparse(), True),
        (NAN_AND_ONE.to(torch.float8_e5m2), False),
        (NAN_AND_ONE.to(torch.float8_e4m3fn), False),
        (torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.tensor([1, 2]), True),
        (torch.tensor([1j, torch.inf]), False),
        (torch.empty(0), True),
        (torch.ones(2, device="meta"), None),
        (None, None),
    ],
)
def test_whether_a_tensor_is_finite(tensor: Any, finite: bool | None) -> None:
    found = all_finite(tensor)
    assert (None if found is None else bool(found)) is finite


def test_the_fixture_sees_this_tests_matmuls(op_calls: OpCalls) -> None:
    torch.bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4))
    op_calls.expect(op="bmm", phase="forward", dtype=torch.float32, count=1, shapes=((5, 2, 3), (5, 3, 4)))
    assert op_calls[0].flops == op_calls.flops == 2 * 5 * 2 * 4 * 3


def test_the_fixture_and_blocks_within_all_see(op_calls: OpCalls) -> None:
    recorder = hooks.Recorder()
    with intercept(recorder), op_calls.block() as calls:
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    torch.mv(torch.ones(2, 3), torch.ones(3))
    assert [call.op for call in recorder.records] == [call.op for call in calls] == ["aten::mm"]
    assert [call.op for call in op_calls] == ["aten::mm", "aten::mv"]


def test_a_block_has_the_options_that_it_is_given(op_calls: OpCalls) -> None:
    seen: list[str] = []
    with op_calls.block(level="function", ops=["linear"], hooks=[lambda call: seen.append(call.op)]) as calls:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    assert [call.op for call in calls] == seen == ["torch.nn.functional.linear"]
    with op_calls.block(ops="all", hooks=lambda call: seen.append(call.op)) as calls:
        _ = torch.ones(2) + 1
    assert [call.op for call in calls] == seen[1:]
    assert "aten::add" in seen


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"levels": "function"}, TypeError, r"^options must be among level, ops, engine, finite, hooks, got levels$"),
        ({"finite": 1}, TypeError, r"^finite must be True or False, got 1$"),
        ({"level": "both"}, ValueError, r"^level must be one of 'function', 'dispatch', got 'both'$"),
        ({"hooks": [hooks.Recorder]}, TypeError, r"^a hook must be an instance, got the class Recorder"),
        ({"hooks": 3}, TypeError, r"^a hook must be callable or have one of"),
    ],
)
def test_a_block_refuses_wrong_options(
    op_calls: OpCalls, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message), op_calls.block(**options):
        pytest.fail("entered")


@pytest.mark.parametrize(
    ("options", "op", "why"),
    [
        (
            {},
            "matmul",
            "which is taken apart before dispatch level can see it; name 'mm', 'addmm', 'bmm', 'mv' and 'dot' instead, "
            "leave op out for the whole family, or use level='function'",
        ),
        (
            {},
            "linear",
            "which is taken apart before dispatch level can see it; name 'mm', 'addmm', 'bmm', 'mv' and 'dot' instead, "
            "or use level='function'",
        ),
        (
            {},
            "scaled_dot_product_attention",
            "which is taken apart before dispatch level can see it; name '_scaled_dot_product_flash_attention' and its "
            "like, or 'bmm' for the math path instead, or use level='function'",
        ),
        ({}, "adddmm", "an unknown name; did you mean 'addmm' or 'addmm_'"),
        ({}, "no_such_operator::at_all", "an unknown name; see torch.ops for the names there are"),
        ({}, "mm.out", "but calls are named without the overload, 'mm'"),
        ({}, "torch.nn.functional.linear", "which is a function; use level='function'"),
        ({}, "softmax", "which is not watched; name it in ops="),
        ({}, "opintercept_tests::plugin_double", "which is not watched; name it in ops="),
        ({}, "plugin_double", "which is not watched; name it in ops="),
        (
            {},
            "linalg_pinv",
            "of which the kernel engine sees the products that it runs, one by one; use engine='mode' for the whole",
        ),
        (
            {},
            "cond",
            "of which the kernel engine sees the products that it runs, one by one; use engine='mode' for the whole",
        ),
        ({"ops": ["mv"]}, "mm", "which is not watched; name it in ops="),
        ({"engine": "mode"}, "adddmm", "an unknown name; did you mean 'addmm' or 'addmm_'"),
        ({"engine": "mode", "ops": "all"}, "adddmm", "an unknown name; did you mean 'addmm' or 'addmm_'"),
        ({"level": "function"}, "liner", "an unknown name; did you mean 'linear' or 'inner' or 'bilinear'"),
        (
            {"level": "function", "ops": "all"},
            "liner",
            "an unknown name; did you mean 'linear' or 'inner' or 'bilinear'",
        ),
        ({"level": "function"}, "softmax", "which is not watched; name it in ops="),
        ({"level": "function", "ops": ["linear"]}, "mm", "which is not watched; name it in ops="),
    ],
)
def test_a_name_that_no_call_can_have_is_refused(op_calls: OpCalls, options: Any, op: str, why: str) -> None:
    @torch.library.custom_op("opintercept_tests::plugin_double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    text = re.escape(f"op must name operators that these calls can have, got {op!r}, {why}")
    with op_calls.block(**options) as calls:
        pass
    with pytest.raises(ValueError, match=f"^{text}"):
        calls.expect(op=op, count=0)
    with pytest.raises(ValueError, match=f"^{text}"):
        calls.filter(op=iter([op]))
    with pytest.raises(ValueError, match=f"^{text}"):
        calls.filter(phase="forward").expect(op=["mm", op] if "ops" not in options else op, count=0)


@pytest.mark.parametrize(
    ("options", "ops"),
    [
        # The last one only where a device has it.
        ({}, ["mm", "aten::mm", "addmm_", "_scaled_dot_product_flash_attention", "_cudnn_rnn"]),
        ({"ops": ["mv", "opintercept_tests::plugin_double"]}, ["mv", "plugin_double"]),
        ({"ops": "mm.out"}, ["mm"]),
        ({"ops": "quantized::linear"}, ["linear", "quantized::linear"]),
        ({"engine": "mode"}, ["mm", "matmul", "linear", "linalg_pinv", "cond", "higher_order::cond"]),
        ({"ops": "all"}, ["mm", "matmul", "softmax", "plugin_double", "opintercept_tests::plugin_double", "cond"]),
        ({"level": "function"}, ["linear", "torch.nn.functional.linear", "matmul", "__matmul__", "mm", "aten::mm"]),
        ({"level": "function", "ops": [torch.nn.functional.softmax]}, ["softmax", "torch.nn.functional.softmax"]),
        ({"level": "function", "ops": "all"}, ["softmax", "torch.nn.functional.softmax", "relu", "aten::mm"]),
    ],
)
def test_a_name_that_a_call_can_have_is_taken(op_calls: OpCalls, options: Any, ops: list[str]) -> None:
    @torch.library.custom_op("opintercept_tests::plugin_double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with op_calls.block(**options) as calls:
        pass
    calls.expect(op=ops, count=0)
    assert calls.filter(op=ops).count == 0


def test_the_mode_engine_sees_composites_whole_in_inference_mode(op_calls: OpCalls) -> None:
    with op_calls.block(engine="mode") as calls, torch.inference_mode():
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    calls.expect(op="linear", count=1)


def test_a_wider_fixture_has_calls_of_its_own(op_calls_factory: Any, op_calls: OpCalls) -> None:
    with op_calls_factory(ops="bmm") as calls:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
    calls.expect(op="bmm", count=1)
    calls.expect(count=1)
    op_calls.expect(count=2)


# Snapshots.


@pytest.fixture
def snapshots(tmp_path: Path) -> Callable[..., Snapshots]:
    def of(update: bool = False, test: str = "TestNet::test_step[cpu]") -> Snapshots:
        return Snapshots(tmp_path / "test_net.py", test, update)

    return of


def test_a_snapshot_is_a_readable_file_beside_the_test(tmp_path: Path, snapshots: Callable[..., Snapshots]) -> None:
    records = [
        record("addmm", module="net.0", lhs=meta(2, 8, dtype="bfloat16"), rhs=meta(8, 4), output=meta(2, 4)),
        record("mkldnn_rnn_layer", "backward", module=None, rhs=None, output=(meta(3), meta(2))),
    ]
    assert snapshots(update=True).mismatch(records, None) is None
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file == tmp_path / FOLDER / "test_net" / "TestNet.test_step[cpu].json"
    assert json.loads(file.read_text()) == {
        "test": "TestNet::test_step[cpu]",
        "calls": [
            {
                **{"phase": "forward", "module": "net.0", "op": "aten::addmm"},
                **{"lhs": "bfloat16[2, 8]", "rhs": "float32[8, 4]", "output": "float32[2, 4]"},
            },
            {
                **{"phase": "backward", "module": None, "op": "aten::mkldnn_rnn_layer"},
                **{"lhs": "float32[2, 2]", "rhs": None, "output": "float32[3]"},
            },
        ],
    }
    assert len(file.read_text().splitlines()) == 4  # one a call, so that a review shows calls
    assert snapshots().mismatch(records, None) is None


def test_a_snapshot_holds_for_other_devices_lines_and_times(snapshots: Callable[..., Snapshots]) -> None:
    attention = "_scaled_dot_product_{}"
    here = [record(attention.format(f"flash_attention_for_cpu{end}")) for end in ("", "_backward")]
    assert snapshots(update=True).mismatch(here, None) is None
    cuda = meta(2, 2, device="cuda:0")
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"):
        there = [
            dataclasses.replace(
                record(attention.format(f"{kernel}{end}"), index=7, output=(cuda, cuda)),
                **{"lhs": cuda, "rhs": cuda, "source": "b.py:3 in f", "elapsed": 1.0, "flops": 1, "step": 2},
            )
            for end in ("", "_backward")
        ]
        assert snapshots().mismatch(there, None) is None
    assert snapshots().mismatch(there[::-1], None) is not None
    assert snapshots().mismatch([record(attention.format("attention_math"))] * 2, None) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"op": "aten::bmm"},
        {"phase": "backward"},
        {"module": "a"},
        {"lhs": meta(3, 2)},
        {"rhs": meta(2, 2, dtype="float64")},
        {"output": meta(2, 1)},
        {"rhs": None},
    ],
    ids=str,
)
def test_a_snapshot_sees_every_change_of_what_it_holds(change: Any, snapshots: Callable[..., Snapshots]) -> None:
    assert snapshots(update=True).mismatch([record(), record()], None) is None
    text = snapshots().mismatch([record(), dataclasses.replace(record(), **change)], None)
    assert text is not None
    lines = text.splitlines()
    assert lines[0] == "the calls are not those of the snapshot; if that is meant, run with --opintercept-update"
    assert lines[1].startswith("--- ")
    assert lines[1].endswith("TestNet.test_step[cpu].json")
    assert lines[2] == "+++ this run"
    assert lines[4:6] == [
        " forward - aten::mm float32[2, 2] @ float32[2, 2] -> float32[2, 2]",
        "-forward - aten::mm float32[2, 2] @ float32[2, 2] -> float32[2, 2]",
    ]
    assert len(lines) == 7
    assert lines[6].startswith("+")


def test_a_long_difference_is_cut_short(snapshots: Callable[..., Snapshots]) -> None:
    snapshots(update=True).mismatch([record()] * 300, None)
    text = snapshots().mismatch([record("bmm")] * 300, None)
    assert text is not None
    assert text.endswith("\n... 503 more lines")


def test_the_snapshots_of_a_test_are_numbered_or_named(tmp_path: Path, snapshots: Callable[..., Snapshots]) -> None:
    updating = snapshots(update=True, test="test_a")
    for name in (None, None, "warm", None):
        updating.mismatch([record()], name)
    names = sorted(path.name for path in (tmp_path / FOLDER / "test_net").iterdir())
    assert names == ["test_a.2.json", "test_a.3.json", "test_a.json", "test_a.warm.json"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", r"Expecting value: line 1 column 1 \(char 0\)"),
        ("<<<<<<< HEAD\n", "Expecting value"),
        ("[]", 'it must be an object with "test" and "calls"'),
        ('{"test": "t", "calls": 3}', 'it must be an object with "test" and "calls"'),
        ('{"test": "t"}', 'it must be an object with "test" and "calls"'),
        ('{"test": "T", "calls": []}', 'it belongs to "T", whose file has the same name'),
        ('{"test": "t", "calls": [3]}', "call 0 must have phase, module, op, lhs, rhs, output, got 3"),
        ('{"test": "t", "calls": [{"op": "mm"}]}', r"call 0 must have .*, got {'op': 'mm'}"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_corrupt_snapshot_says_so(
    content: str | bytes, problem: str, tmp_path: Path, snapshots: Callable[..., Snapshots]
) -> None:
    file = tmp_path / FOLDER / "test_net" / "t.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = snapshots(test="t").mismatch([record()], None)
    assert text is not None
    assert re.search(
        rf"^the snapshot .*t\.json cannot be read: {problem}.*; mend it, or write it anew with --opintercept-update$",
        text,
    )
    assert snapshots(update=True, test="t").mismatch([record()], None) is None
    assert snapshots(test="t").mismatch([record()], None) is None


def test_a_missing_snapshot_says_what_to_do(snapshots: Callable[..., Snapshots]) -> None:
    text = snapshots(test="t").mismatch([record()], None)
    assert text is not None
    assert re.search(
        r"^no snapshot .*t\.json; write it with --opintercept-update, look at it, and keep it beside the test$", text
    )


@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
@example(["test_a[x/y]", "test_a[x y]"])
@example(["test_a" * 50, "test_a" * 51])
def test_different_tests_have_different_files_that_any_file_system_takes(tests: list[str]) -> None:
    names = [_file_name(test) for test in tests]
    assert all(re.fullmatch(r"[\w.,=+\[\]-]{1,129}", name) for name in names)
    if "::" not in "".join(tests):  # written as a dot, the only thing that two names may share
        assert names[0] != names[1]


@given(st.lists(st.tuples(*[st.none() | st.text()] * 6)), st.text())
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], test: str) -> None:
    path = tmp_path_factory.mktemp("snapshot") / "deep" / "t.json"
    entries = [dict(zip(("phase", "module", "op", "lhs", "rhs", "output"), row, strict=True)) for row in rows]
    _write(path, test, entries)
    assert _read(path, test) == entries
    assert [file.name for file in path.parent.iterdir()] == ["t.json"]


def test_calls_of_no_fixture_have_no_snapshot() -> None:
    with pytest.raises(TypeError, match="match_snapshot must be called on the calls of a fixture"):
        three_calls().match_snapshot()


def test_the_matmuls_of_a_step_are_those_of_the_snapshot(op_calls: OpCalls) -> None:
    Net()(torch.ones(3, 4)).sum().backward()
    op_calls.match_snapshot()
    op_calls.filter(phase="forward").match_snapshot("forward")


# Inner runs.

BODY = """
import pytest
import torch

BEFORE = torch._C._dispatch_dump_table("aten::mm")


def mm():
    return torch.mm(torch.ones(2, 3), torch.ones(3, 4))


@pytest.fixture
def model():
    mm()
    yield
    mm()


@pytest.fixture
def broken(op_calls):
    mm()
    raise ValueError("broken fixture")


@pytest.fixture
def looks_back(op_calls):
    yield
    op_calls.expect(count=2)


def test_only_the_body_is_seen(op_calls, model, looks_back):
    assert len(op_calls) == 0
    x = torch.ones(2, 3, requires_grad=True)
    y = x @ torch.ones(3, 4)
    assert [call.op for call in op_calls] == ["aten::mm"]
    y.sum().backward()
    assert [call.phase for call in op_calls] == ["forward", "backward"]
    op_calls.expect(op="mm", count=2, max_count=2, dtype=torch.float32)


def test_whatever_the_order_of_fixtures(model, op_calls):
    op_calls.expect(count=0)
    mm()
    op_calls.expect(count=1)


def test_fails_by_expectation(op_calls):
    mm()
    op_calls.expect(op="bmm", count=3)


def test_fails_by_an_error_of_its_own(op_calls):
    mm()
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_fails_in_its_teardown(looks_back):
    mm()


def test_fails_in_a_fixture_that_was_set_up_later(op_calls, broken):
    raise AssertionError("never runs")


def test_torch_is_clean_after_failures():
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_the_body_changes_the_table(op_calls):
    assert torch._C._dispatch_dump_table("aten::mm") != BEFORE


def test_the_fixture_may_be_asked_for_late(request):
    mm()
    op_calls = request.getfixturevalue("op_calls")
    mm()
    op_calls.expect(count=1)
"""


def test_the_body_and_only_the_body_is_seen(run: Run) -> None:
    result = run(test_body=BODY)
    result.assert_outcomes(passed=6, failed=2, errors=2)
    result.stdout.fnmatch_lines(
        [
            '>*op_calls.expect(op="bmm", count=3)',
            "E*Failed: expected 3 bmm calls, got 0",
            "E*what ran: 1 call, 48 FLOP",
            "E*phase * module * op * shapes * dtype * line * calls",
            "E*forward * - * mm * [[]2, 3] @ [[]3, 4] * float32 * test_body.py:8 in mm * 1",
            "*test_body.py:*: Failed",
        ]
    )
    result.stdout.fnmatch_lines(["E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"])
    result.stdout.fnmatch_lines(["E*Failed: expected 2 matmul calls, got 1", "E*ValueError: broken fixture"])
    # One for the error, none where the failure has the table already.
    sections = [line for line in result.outlines if line.strip("-") == " matmuls "]
    assert len(sections) == 1
    result.stdout.fnmatch_lines(["*- matmuls -*", "what ran: 1 call, 48 FLOP", "phase *", "forward * mm *"])
    for file in ("testing/calls", "_pipeline", "kernels"):  # the traceback ends in the test
        result.stdout.no_fnmatch_line(f"*{file}.py:*")


MARKED = """
import pytest
import torch

from opintercept import hooks

pytestmark = pytest.mark.opintercept(level="function")
recorder = hooks.Recorder()


def linear():
    return torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4))


def test_module_marker(op_calls):
    with op_calls.block() as calls:
        linear()
    op_calls.expect(op="linear", count=1)
    calls.expect(op="linear", count=1)


@pytest.mark.opintercept(level="dispatch")
class TestMarked:
    def test_class_marker(self, op_calls):
        linear()
        op_calls.expect(op="addmm", count=1)
        with op_calls.block(level="function") as calls:
            linear()
        calls.expect(op="linear")

    @pytest.mark.opintercept(engine="mode", ops="all")
    def test_the_closest_wins_argument_by_argument(self, op_calls):
        linear()
        op_calls.expect(op="addmm", count=1)
        op_calls.expect(op="ones", count=3)

    @pytest.mark.opintercept(ops=["mv"])
    def test_ops(self, op_calls):
        linear()
        op_calls.expect(count=0)

    @pytest.mark.opintercept(hooks=[recorder])
    def test_hooks_without_the_fixture(self):
        linear()
        assert [call.op for call in recorder.records] == ["aten::addmm"]

    def test_fails_without_the_fixture(self):
        linear()
        assert False

    @pytest.mark.opintercept(levels="function")
    def test_unknown_argument(self):
        pass

    @pytest.mark.opintercept("function")
    def test_positional_argument(self):
        pass

    @pytest.mark.opintercept(level="both")
    def test_unknown_level(self):
        pass

    @pytest.mark.opintercept(ops=["bmmm"])
    def test_unknown_operator(self, op_calls):
        pass

    @pytest.mark.opintercept(hooks=[hooks.Recorder])
    def test_no_hook(self):
        pass

    @pytest.mark.opintercept(finite="yes")
    def test_no_flag(self):
        pass
"""


def test_the_marker_and_its_mistakes(run: Run) -> None:
    result = run("--strict-markers", test_marked=MARKED)
    result.assert_outcomes(passed=5, failed=1, errors=6)
    result.stdout.fnmatch_lines(
        [
            "marker opintercept: options must be among level, ops, engine, finite, hooks, got levels",
            "marker opintercept: arguments must be named, got ('function',)",
            "marker opintercept: level must be one of 'function', 'dispatch', got 'both'",
            "marker opintercept: *'bmmm'*",
            "marker opintercept: a hook must be an instance, got the class Recorder; pass Recorder(...)",
            "marker opintercept: finite must be True or False, got 'yes'",
            "*test_fails_without_the_fixture*",
            "*- matmuls -*",
            "what ran: 1 call, 48 FLOP",
        ]
    )


CASES = '''
import unittest

import pytest
import torch


def double(x):
    """Multiply.

    >>> import torch
    >>> op_calls = getfixture("op_calls")
    >>> double(torch.ones(2, 2)).sum().item()
    8.0
    >>> op_calls.expect(op="mm", count=1)
    """
    return x @ (torch.eye(2) * 2)


@pytest.mark.opintercept(level="function")
class Case(unittest.TestCase):
    def setUp(self):
        double(torch.ones(2, 2))

    def test_has_the_calls(self):
        double(torch.ones(2, 2))
        self.op_calls.expect(op="matmul", count=2)

    @pytest.mark.opintercept(level="dispatch")
    def test_fails(self):
        self.assertEqual(self.op_calls.filter(op="mm").count, 2)

    def test_fails_by_expectation(self):
        self.op_calls.expect(max_count=0)

    def test_fails_in_an_operator(self):
        double(torch.ones(2, 3))


class Plain(unittest.TestCase):
    def test_has_none_without_the_marker(self):
        double(torch.ones(2, 2))
        self.assertFalse(hasattr(self, "op_calls"))


class Async(unittest.IsolatedAsyncioTestCase):
    @pytest.mark.opintercept
    async def test_async_case(self):
        double(torch.ones(2, 2))
        self.op_calls.expect(op="mm", count=1)


@pytest.fixture(scope="module")
def trained(op_calls_factory):
    with op_calls_factory(level="function") as calls:
        double(torch.ones(2, 2))
    return calls


@pytest.fixture(scope="class")
def open_all_along(op_calls_factory):
    with op_calls_factory() as calls:
        yield calls
    assert calls.count == 3


def test_calls_of_a_module_fixture(trained):
    trained.expect(op="matmul", count=1)


class TestTogether:
    def test_one(self, open_all_along, trained, op_calls):
        double(torch.ones(2, 2))
        open_all_along.expect(count=1)
        trained.expect(count=1)
        op_calls.expect(count=1)

    def test_two(self, open_all_along):
        double(double(torch.ones(2, 2)))
        open_all_along.expect(count=3)
        open_all_along.match_snapshot()
'''


def test_test_cases_doctests_and_wider_fixtures(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--doctest-modules", "--opintercept-update", test_cases=CASES)
    result.assert_outcomes(passed=7, failed=3)
    result.stdout.no_fnmatch_line("*_pipeline.py:*")
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: 1 != 2",
            "*- matmuls -*",
            "what ran: 1 call, 16 FLOP",
            "E*Failed: expected at most 0 matmul calls, got 1",
            "E*torch.Tensor.matmul*",
            "E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x2)",
        ]
    )
    (snapshot,) = (pytester.path / FOLDER).rglob("*.json")
    assert snapshot.relative_to(pytester.path).as_posix() == f"{FOLDER}/test_cases/TestTogether.test_two.json"


LEAKS = """
import threading

import pytest
import torch

from opintercept import hooks, intercept
from opintercept._engines import unseen

left = []


class Hook:
    def post(self, call): ...
    def exit(self): left.append("hook")


@pytest.fixture
def outer():
    with intercept(hooks.Recorder()) as interceptor:
        yield interceptor


@pytest.fixture
def forgets():
    intercept(Hook()).__enter__()


@pytest.fixture
def inside_of_itself(request):
    request.getfixturevalue("wider")


@pytest.fixture(scope="module")
def wider():
    with intercept(Hook()):
        yield


def test_leaks_a_block():
    intercept([Hook(), hooks.Print()]).__enter__()


@pytest.mark.parametrize("options", [{"level": "function"}, {"engine": "mode"}, {"threads": "all"}], ids=str)
def test_leaks(options, outer, op_calls):
    intercept(print, **options).__enter__()


def test_leaks_a_pause(outer):
    outer.paused().__enter__()


def test_leaks_from_another_thread():
    block = intercept(Hook(), threads="all")
    thread = threading.Thread(target=block.__enter__)
    thread.start()
    thread.join()


def test_leaks_and_fails(op_calls):
    intercept(Hook()).__enter__()
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_leaves_by_a_fixture(forgets):
    pass


def test_a_wider_fixture_may_stay(inside_of_itself):
    pass


def test_nothing_else_stays(op_calls):
    assert left == ["hook"] * 4
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    op_calls.expect(count=1)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert len(unseen._users) == 2  # the block of `wider` and that of this test
"""


def test_a_forgotten_block_is_reported_where_it_was_forgotten(run: Run) -> None:
    result = run(test_leaks=LEAKS)
    result.assert_outcomes(passed=3, failed=7, errors=1)
    what = "every block must be left, got {} still active; use a with statement (the plugin has left it now)"
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaves_by_a_fixture*",
            f"fixture forgets: {what.format('intercept(Hook)')}",
            "*test_leaks_a_block*",
            what.format("intercept(Hook, Print)"),
            *[line for _ in range(3) for line in ("*test_leaks[[]*", what.format("intercept(print)"))],
            "*test_leaks_a_pause*",
            what.format("intercept(Recorder).paused()"),
            "*test_leaks_from_another_thread*",
            what.format("intercept(Hook)"),
            "*test_leaks_and_fails*",
            "E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
            f"E*{what.format('intercept(Hook)')}",
        ]
    )


COUNTED = """
import pytest
import torch


@pytest.mark.parametrize("size", [2, 20])
def test_size(size):
    for _ in range(3):
        torch.mm(torch.ones(size, size), torch.ones(size, size))


def test_idle():
    pass


def test_function_level(op_calls):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2)) @ torch.ones(2, 2)
    op_calls.match_snapshot()
    op_calls.clear()
"""


def test_a_summary_of_the_run(run: Run, pytester: pytest.Pytester) -> None:
    result = run("--opintercept", "--opintercept-update", "--junitxml=run.xml", test_counted=COUNTED)
    result.assert_outcomes(passed=4)
    lines = [line.split() for line in result.outlines]
    start = next(i for i, line in enumerate(result.outlines) if re.fullmatch(r"=+ matmuls =+", line))
    assert lines[start + 1] == ["calls", "FLOP", "ms", "of", "test", "test"]
    rows = {line[-1]: line for line in lines[start + 2 : start + 5]}
    assert {name: row[:2] for name, row in rows.items()} == {
        "test_counted.py::test_size[2]": ["3", "48"],
        "test_counted.py::test_size[20]": ["3", "48,000"],
        "test_counted.py::test_function_level": ["2", "32"],
    }
    times = [float(row[2]) for row in lines[start + 2 : start + 5]]
    assert times == sorted(times, reverse=True)
    assert lines[start + 5][:2] == ["8", "48,080"]
    assert lines[start + 5][3:] == ["3", "tests", "with", "matmuls"]
    assert '<property name="matmul_flops" value="48000" />' in (pytester.path / "run.xml").read_text()


def test_a_long_summary_is_cut_short(run: Run) -> None:
    many = COUNTED.replace("[2, 20]", "range(1, 31)")
    result = run("--opintercept", "--opintercept-update", test_counted=many)
    result.stdout.fnmatch_lines(["... 11 more tests, shown with -v", "*31 tests with matmuls"])
    assert sum("%  test_counted.py::" in line for line in result.outlines) == 20
    result = run("--opintercept", "-v", test_counted=many)
    result.stdout.no_fnmatch_line("*more tests*")
    assert sum("%  test_counted.py::" in line for line in result.outlines) == 31


def test_without_options_nothing_is_printed(run: Run) -> None:
    result = run("--opintercept-update", test_counted=COUNTED)
    result.assert_outcomes(passed=4)
    result.stdout.no_fnmatch_line("*matmuls*")


NAN = """
import pytest
import torch


def scale(x):
    return torch.mm(x, torch.full((2, 2), 3e38)) - torch.mm(x, torch.full((2, 2), 3e38))


def forward(x):
    x = torch.mm(x, torch.tensor([[float("nan"), 1], [1, 1]]).nan_to_num(nan=3e38))
    x = torch.mm(x, torch.tensor([[1.0, 1], [-1, -1]]) * 3e38)  # inf - inf
    return torch.mm(x, x)


def test_nan():
    forward(torch.ones(2, 2))


def test_sound():
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.opintercept(finite=False)
def test_means_it():
    forward(torch.ones(2, 2))


@pytest.mark.opintercept(finite=True)
def test_marked():
    forward(torch.ones(2, 2))
"""


@pytest.mark.parametrize(("options", "failed"), [((), 1), (("--opintercept-finite",), 2)], ids=["marker", "option"])
def test_the_origin_of_a_nan_is_where_a_test_fails(run: Run, options: tuple[str, ...], failed: int) -> None:
    result = run(*options, test_nan=NAN)
    result.assert_outcomes(passed=4 - failed, failed=failed)
    result.stdout.fnmatch_lines([">*# inf - inf", "E*NonFiniteError: *"])
    result.stdout.fnmatch_lines(["*test_marked*", "*- matmuls -*", "what ran: 2 calls, 32 FLOP"])


ASYNC = """
import asyncio

import pytest
import torch


async def mm():
    await asyncio.sleep(0)
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2))


@pytest.mark.asyncio
async def test_tasks(op_calls):
    await asyncio.gather(mm(), mm())
    op_calls.expect(op="mm", count=2)
    with op_calls.block() as calls:
        await mm()
    calls.expect(count=1)


@pytest.mark.asyncio
async def test_fails(op_calls):
    await mm()
    op_calls.expect(count=2)


@pytest.mark.asyncio
@pytest.mark.opintercept(level="function")
async def test_marker():
    await mm()
    raise ValueError
"""


@asks_asyncio
def test_async_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_async=ASYNC)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    result = pytester.runpytest_inprocess("-p", "no:xdist")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["E*Failed: expected 2 matmul calls, got 1", "E*ValueError", "*- matmuls -*"])


XDIST = """
import pytest
import torch

BEFORE = torch._C._dispatch_dump_table("aten::mm")


@pytest.fixture(autouse=True)
def clean():
    yield
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE


@pytest.mark.parametrize("size", range(1, 5))
def test_size(op_calls, size):
    torch.mm(torch.ones(size, 2), torch.ones(2, 2, requires_grad=True)).sum().backward()
    op_calls.match_snapshot()


def test_fails(op_calls):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert False
"""


@asks_xdist
def test_workers_report_and_write_snapshots(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_xdist=XDIST)
    options = ("-n2", "--opintercept", "--opintercept-update", "-p", "no:asyncio")
    result = pytester.runpytest_subprocess(*options)
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*- matmuls -*", "what ran: 1 call, 16 FLOP"])
    result.stdout.fnmatch_lines(["       9 *5 tests with matmuls"])
    folder = pytester.path / FOLDER / "test_xdist"
    assert sorted(path.name for path in folder.iterdir()) == [f"test_size[{size}].json" for size in range(1, 5)]
    (folder / "test_size[2].json").write_text((folder / "test_size[3].json").read_text().replace("[3]", "[2]"))
    (folder / "test_size[3].json").unlink()
    (folder / "test_size[4].json").write_text("<<<<<<< HEAD")
    result = run(test_xdist=XDIST)
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "E *-forward - aten::mm float32[[]3, 2] @ float32[[]2, 2] -> float32[[]3, 2]",
            "E *+forward - aten::mm float32[[]2, 2] @ float32[[]2, 2] -> float32[[]2, 2]",
            "E *no snapshot __opcalls__/test_xdist/test_size[[]3].json; write it with *",
            "E *test_size[[]4].json cannot be read: Expecting value*",
        ]
    )


def test_the_plugin_can_be_switched_off(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_without_the_plugin_nothing_is_loaded():
            assert not any(name.startswith("opintercept") for name in sys.modules)
            assert "torch" not in sys.modules

        def test_without_the_plugin_there_is_no_fixture(op_calls):
            raise AssertionError("never runs")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:opintercept")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["E*fixture 'op_calls' not found"])


def test_a_run_that_uses_nothing_of_it_loads_nothing_but_the_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        import pytest

        @pytest.fixture
        def fixture():
            yield

        def test_what_is_loaded(fixture):
            loaded = {name for name in sys.modules if name.partition(".")[0] in ("opintercept", "torch", "numpy")}
            assert loaded == {"opintercept", "opintercept.testing.plugin"}
        """
    )
    pytester.runpytest_subprocess("-p", "no:anyio").assert_outcomes(passed=1)


def test_the_first_test_of_the_readme_fails_readably_when_the_model_changes(run: Run) -> None:
    readme = (ROOT / "README.md").read_text()
    _, section = readme.split("\n## Tests\n")
    code, shown = re.findall(r"^```\w+\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    code = f"import torch\n{code}"
    run(test_step=code).assert_outcomes(passed=1)
    result = run(test_step=code.replace("nn.Linear(16, 4))", "nn.Linear(16, 4), nn.Linear(4, 4))"))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([re.sub(r"([\[?*])", r"[\1]", line) for line in shown.splitlines()])


def test_a_finite_flag_is_read_only_when_asked_for(op_calls: OpCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: bool(read.append(1)) or self.item() != 0)
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    op_calls.expect(count=1)
    assert read == []
    op_calls.expect(finite=True)
    assert read == [1]


def test_the_body_of_another_thread_is_not_seen(op_calls: OpCalls) -> None:
    thread = threading.Thread(target=lambda: torch.mm(torch.ones(2, 2), torch.ones(2, 2)))
    thread.start()
    thread.join()
    op_calls.expect(count=0)
