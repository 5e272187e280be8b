"""The fixture `op_calls`: what it records, what it says when a test fails, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opintercept import CallRecord, TensorMeta, hooks, intercept
from opintercept.pytest_plugin import OpCalls

INNER_TESTS = """
import pytest
import torch

BEFORE = torch._C._dispatch_dump_table("aten::mm")


def test_records_grow_while_the_test_runs(op_calls):
    assert len(op_calls) == 0
    x = torch.ones(2, 3, requires_grad=True)
    y = x @ torch.ones(3, 4)
    assert [call.op for call in op_calls] == ["aten::mm"]
    y.sum().backward()
    assert [call.phase for call in op_calls] == ["forward", "backward"]
    assert op_calls[0].gemm[:4] == (1, 2, 4, 3)
    assert [call.index for call in op_calls[1:]] == [1]
    op_calls.expect(op="mm", count=2, max_count=2, dtype=torch.float32)


def test_each_test_starts_from_nothing(op_calls):
    assert len(op_calls) == 0
    op_calls.expect(count=0)


def test_fails_by_expectation(op_calls):
    torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    op_calls.expect(op="bmm", count=3)


def test_fails_by_an_error_of_its_own(op_calls):
    torch.mm(torch.ones(2, 3), torch.ones(2, 3))


def test_torch_is_clean_after_failures():
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_fails_in_a_fixture_that_was_set_up_later(op_calls, broken):
    raise AssertionError("never runs")


@pytest.fixture
def broken(op_calls):
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    raise ValueError("broken fixture")


def test_torch_is_clean_after_a_broken_fixture():
    assert torch._C._dispatch_dump_table("aten::mm") == BEFORE


def test_the_fixture_changes_the_table_meanwhile(op_calls):
    assert torch._C._dispatch_dump_table("aten::mm") != BEFORE
"""


def record(op: str = "mm", phase: Any = "forward", dtype: str = "float32", index: int = 0) -> CallRecord:
    meta = TensorMeta((2, 2), dtype, "cpu", (2, 1), False)
    nothing: dict[str, Any] = {"gemm": None, "flops": None, "bytes": None, "autocast": None, "elapsed": None}
    nothing |= {"module": "", "source": None, "forward": None, "grad_of": None, "bias": None}
    tensors = {"lhs": meta, "rhs": meta, "output": meta}
    return CallRecord(index, 0, f"aten::{op}", op, phase, opaque=False, **tensors, **nothing)


def test_the_fixture_in_tests_that_pass_and_fail(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(INNER_TESTS)
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(passed=5, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        [
            '*op_calls.expect(op="bmm", count=3)*',
            "E*Failed: expected 3 bmm calls, got 0; what ran:",
            "E*0 forward aten::mm float32?2, 3? @ float32?3, 4? -> float32?2, 4?",
        ]
    )
    result.stdout.fnmatch_lines(["E*RuntimeError: *mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"])
    result.stdout.fnmatch_lines(["E*ValueError: broken fixture"])
    result.stdout.no_fnmatch_line("*pytest_plugin.py:*")  # the traceback ends in the test


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


def test_records_are_a_sequence_that_follows_the_list() -> None:
    records = [record(index=0)]
    calls = OpCalls(records)
    records.append(record("bmm", index=1))
    assert len(calls) == 2
    assert calls[1] is calls[-1] is records[1]
    assert calls[:1] == [records[0]]
    assert list(calls) == records
    assert records[0] in calls
    with pytest.raises(IndexError, match="list index out of range"):
        _ = calls[2]


@pytest.mark.parametrize(
    "expectation",
    [
        {},
        {"count": 3},
        {"max_count": 3},
        {"max_count": 9},
        {"op": "mm", "count": 2},
        {"op": "aten::mm", "count": 2},
        {"phase": "backward", "count": 1},
        {"op": "mm", "phase": "backward", "count": 1, "dtype": torch.bfloat16},
        {"op": "mm", "phase": "forward", "dtype": "float32"},
        {"op": "m", "count": 0},
        {"op": "addmm", "count": 0},
    ],
    ids=lambda expectation: ", ".join(f"{key}={value}" for key, value in expectation.items()) or "nothing",
)
def test_expectations_that_hold(expectation: dict[str, Any]) -> None:
    OpCalls([record(), record("bmm"), record(phase="backward", dtype="bfloat16")]).expect(**expectation)


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        ({"count": 2}, r"^expected 2 matmul calls, got 3; what ran:\n  0 forward aten::mm float32\[2, 2\] @ "),
        ({"count": 0}, r"^expected 0 matmul calls, got 3;"),
        ({"op": "bmm", "count": 2}, r"^expected 2 bmm calls, got 1;"),
        ({"max_count": 2}, r"^expected at most 2 matmul calls, got 3;"),
        ({"max_count": 0, "op": "mm"}, r"^expected at most 0 mm calls, got 2;"),
        ({"phase": "backward", "count": 2}, r"^expected 2 backward calls, got 1;"),
        ({"phase": "backward", "op": "mm", "max_count": 0}, r"^expected at most 0 backward mm calls, got 1;"),
        (
            {"dtype": torch.float32},
            r"^expected float32 operands in matmul calls, got others in 1 of 3, first in aten::mm bfloat16\[2, 2\] @",
        ),
        ({"dtype": "bfloat16", "op": "mm"}, r"^expected bfloat16 operands in mm calls, got others in 1 of 2, "),
    ],
    ids=["count", "none", "op", "max", "none of an op", "phase", "phase and op", "dtype", "dtype of an op"],
)
def test_expectations_that_fail(expectation: dict[str, Any], message: str) -> None:
    calls = OpCalls([record(), record("bmm", index=1), record(phase="backward", dtype="bfloat16", index=2)])
    with pytest.raises(pytest.fail.Exception, match=message) as failure:
        calls.expect(**expectation)
    lines = str(failure.value).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["0", "1", "2"]


def test_the_failure_of_an_idle_test_says_that_nothing_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^expected 1 matmul calls, got 0; what ran:\n  nothing$"):
        OpCalls([]).expect(count=1)


def test_the_fixture_sees_this_tests_matmuls(op_calls: OpCalls) -> None:
    torch.bmm(torch.ones(5, 2, 3), torch.ones(5, 3, 4))
    op_calls.expect(op="bmm", phase="forward", dtype=torch.float32, count=1)
    assert op_calls[0].flops == 2 * 5 * 2 * 4 * 3


def test_the_fixture_and_a_block_within_both_see(op_calls: OpCalls) -> None:
    recorder = hooks.Recorder()
    with intercept(recorder):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    torch.mv(torch.ones(2, 3), torch.ones(3))
    assert [call.op for call in recorder.records] == ["aten::mm"]
    assert [call.op for call in op_calls] == ["aten::mm", "aten::mv"]
