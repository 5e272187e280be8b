"""`OpCalls`: the sequence, its filters, its expectations and their failures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_calls import Net, meta, record, three_calls

from opintercept import hooks, intercept
from opintercept._values.read import all_finite
from opintercept.testing.calls import OpCalls as EagerOpCalls
from opintercept.testing.plugin import OpCalls

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


def test_clear_forgets_earlier_calls_only(op_calls: OpCalls) -> None:
    torch.mm(torch.ones(2, 2), torch.full((2, 2), torch.nan))
    op_calls.clear()
    op_calls.expect(count=0)
    torch.mv(torch.ones(2, 2), torch.ones(2))
    op_calls.expect(count=1, op="mv", finite=True)


def test_the_plugin_loads_opcalls_on_first_use() -> None:
    assert OpCalls is EagerOpCalls
    import opintercept.testing.plugin as plugin

    with pytest.raises(AttributeError, match=r"^module 'opintercept\.testing\.plugin' has no attribute 'OpCallz'$"):
        _ = plugin.OpCallz


def test_calls_that_look_alike_share_a_row_of_the_table() -> None:
    calls = [record(index=i, module="encoder", source="model.py:42 in forward") for i in range(3)]
    calls += [record("bmm", "backward", rhs=meta(2, 2, dtype="int8"), module=None), record(rhs=None, lhs=meta(3))]
    assert OpCalls(calls).table().splitlines() == [
        "phase     module   op   shapes           dtype          line                    calls",
        "forward   encoder  mm   [2, 2] @ [2, 2]  float32        model.py:42 in forward      3",
        "backward  ?        bmm  [2, 2] @ [2, 2]  float32, int8  ?                           1",
        "forward   -        mm   [3]              float32        ?                           1",
    ]
    assert OpCalls([]).table() == ""


# Filters, which choose the same calls as `when`.

ONE_FILTER = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["mm", "aten::addmm", "bmm", ("mm", "addmm")]),
        "module": st.sampled_from(["body.*", "head", "", "*", re.compile(r"body\.\d"), str.isalpha]),
        "phase": st.sampled_from(["forward", "backward", "recompute"]),
        "dtype": st.sampled_from([torch.float32, "bfloat16"]),
        "min_numel": st.integers(1, 40),
        "every_calls": st.integers(1, 3),
        "first": st.integers(1, 3),
        "steps": st.sampled_from([0, 1, range(2)]),
        "predicate": st.just(lambda call: call.index % 2 == 0),
    },
)


@given(ONE_FILTER)
def test_filter_chooses_the_same_calls_as_when(filters: dict[str, Any]) -> None:
    live, everything = hooks.Recorder(), hooks.Recorder()
    net = Net()
    with intercept([everything, hooks.when(live, **filters)]):
        net(torch.ones(3, 4)).sum().backward()
    assert list(OpCalls(everything.records).filter(**filters)) == live.records


def test_filters_chain_and_do_not_grow(op_calls: OpCalls) -> None:
    net = Net()
    net(torch.ones(3, 4)).sum().backward()
    forward = op_calls.filter(phase="forward")
    assert forward.filter(dtype="bfloat16").modules == ["head"]
    net(torch.ones(3, 4))
    assert (forward.count, op_calls.filter(phase="forward").count) == (3, 6)
    forward.clear()
    assert (forward.count, op_calls.filter(phase="forward").count) == (0, 6)


def test_filter_refuses_the_arguments_that_when_refuses(op_calls: OpCalls) -> None:
    with pytest.raises(ValueError, match=r"^phase must be one of 'forward', 'backward', 'recompute', got 'again'$"):
        op_calls.filter(phase="again")
    with pytest.raises(TypeError, match="unexpected keyword argument 'ops'"):
        op_calls.filter(ops="mm")  # type: ignore[call-arg]


# Expectations.


def described(option: tuple[str, Any]) -> str:
    """An option for a parameter's id, the same in every process, as pytest-xdist needs it."""
    name, value = option
    return f"{name}={type(value).__name__ if callable(value) or isinstance(value, Iterator) else value}"


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
    ids=lambda expectation: ", ".join(map(described, expectation.items()))[:50] or "nothing",
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
            rf"expected every matmul call to have float32 operands, but 1 of 3 does not:{BACKWARD}",
        ),
        (
            {"dtype": "bfloat16", "op": "mm"},
            r"expected every mm call to have bfloat16 operands, but 1 of 2 does not:\n  0 forward .*",
        ),
        (
            {"max_flops": 47},
            r"expected at most 47 FLOP in 3 matmul calls, got 48, the largest first:\n  0 .*\n  1 .*\n  2 .*",
        ),
        (
            {"shapes": ((2, None), (2, 3)), "phase": "backward"},
            rf"expected every backward matmul call to multiply \[2, \*\] @ \[2, 3\], but 1 of 1 does not:{BACKWARD}",
        ),
        (
            {"shapes": [((2, 2), (2, 2)), ((2, 2), None), ((2,), (2, 2))]},
            rf"expected other shapes in 2 of 3 matmul calls:\n  1 .*, expected \[2, 2\]{BACKWARD}, expected \[2\] @ "
            r"\[2, 2\]",
        ),
        ({"shapes": [((2, 2), (2, 2))]}, r"expected 1 matmul call, one for each pair of shapes, got 3"),
        (
            {"predicate": lambda call: call.phase == "forward"},
            rf"expected every matmul call to satisfy <lambda>, but 1 of 3 does not:{BACKWARD}",
        ),
        ({"count": 2, "max_flops": 32}, r"expected 2 .*\nexpected at most 32 FLOP .*\n  0 .*\n  1 .*\n  2 .*"),
    ],
)
def test_expectations_that_fail(expectation: dict[str, Any], message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"^{message}\nwhat ran: 3 calls, 48 FLOP\nphase ") as failure:
        three_calls().expect(**expectation)
    assert str(failure.value).endswith(three_calls().table())


def test_unknown_flops_exceed_every_limit() -> None:
    calls = OpCalls([record(flops=None)])
    with pytest.raises(
        pytest.fail.Exception, match=r"^expected every matmul call to have a known number of FLOP, but 1 of 1 does not"
    ):
        calls.expect(max_flops=10**9)


def test_a_failure_says_that_nothing_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"^expected 1 matmul call, got 0\nwhat ran: 0 calls, 0 FLOP$"):
        OpCalls([]).expect(count=1)


def test_a_failure_of_filtered_calls_shows_everything_that_ran() -> None:
    with pytest.raises(pytest.fail.Exception, match="what ran: 3 calls"):
        three_calls().filter(phase="backward").expect(count=2)


def test_a_failure_of_many_calls_is_truncated() -> None:
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
            r"^dtype must be a torch\.dtype or its name, such as 'bfloat16', got <class 'float'>$",
        ),
        ({"dtype": "bf16"}, TypeError, r"^dtype must be a torch\.dtype or its name, such as 'bfloat16', got 'bf16'$"),
        ({"phase": "again"}, ValueError, r"^phase must be one of"),
        ({"op": 3}, TypeError, r"^op must be one or more names of operators"),
        ({"module": 3}, TypeError, r"^module must be a glob"),
        ({"predicate": True}, TypeError, r"^predicate must be callable, got True$"),
        (
            {"shapes": (2, 2)},
            TypeError,
            r"^shapes must be a pair for the left and the right operand, .*, got \(2, 2\)$",
        ),
        ({"shapes": "[2, 2] @ [2, 2]"}, TypeError, r"^shapes must be a pair .*, got '\[2, 2\] @ \[2, 2\]'$"),
        ({"shapes": [((2, 2), (2, 2)), (2, 2)]}, TypeError, r"^shapes must be a pair "),
        ({"shapes": 3}, TypeError, r"^shapes must be a pair .*, got 3$"),
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
def test_finite_finds_outputs_with_nan_or_inf(op_calls: OpCalls, level: Any, value: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    with op_calls.block(level=level) as calls:
        torch.mm(x, x)
        torch.mm(x, torch.full_like(x, value))
        torch.mm(x, x)
    assert op_calls.count == 3
    calls.filter(first=1).expect(finite=True)
    with pytest.raises(
        pytest.fail.Exception,
        match=r"^expected every matmul call to have a finite output, but 1 of 3 does not:\n  1 forward ",
    ):
        calls.expect(finite=True)


def test_finite_passes_outputs_without_values(op_calls: OpCalls) -> None:
    with op_calls.block(level="function") as calls:
        torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"))
        torch.vmap(torch.mv, in_dims=(None, 0))(torch.ones(2, 2), torch.full((3, 2), torch.nan))
        torch._int_mm(torch.ones(32, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8))
    calls.expect(count=3, finite=True)


def test_finite_checks_only_the_first_output_of_an_operator(op_calls: OpCalls) -> None:
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
def test_all_finite(tensor: Any, finite: bool | None) -> None:
    found = all_finite(tensor)
    assert (None if found is None else bool(found)) is finite


@torch.library.custom_op("opintercept_tests::plugin_double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


PARTS = "dispatch level sees only its parts; name"
PRODUCTS = f"{PARTS} 'mm', 'addmm', 'bmm', 'mv' and 'dot' instead,"
UNWATCHED = "it is not watched; name it in ops="
WHOLE = "the kernel engine sees the products that it runs; use engine='mode' to see it whole"
LINEAR = "there is no such operator; did you mean 'linear' or 'inner' or 'bilinear'"
ADDMM = "there is no such operator; did you mean 'addmm' or 'addmm_'"


@pytest.mark.parametrize(
    ("options", "op", "why"),
    [
        ({}, "matmul", f"{PRODUCTS} leave op out for the whole family, or use level='function'"),
        ({}, "linear", f"{PRODUCTS} or use level='function'"),
        (
            {},
            "scaled_dot_product_attention",
            f"{PARTS} '_scaled_dot_product_flash_attention' and its like, or 'bmm' for the math path instead, "
            "or use level='function'",
        ),
        ({}, "adddmm", ADDMM),
        ({}, "no_such_operator::at_all", "there is no such operator; see torch.ops for all names"),
        ({}, "mm.out", "calls are named without the overload, 'mm'"),
        ({}, "torch.nn.functional.linear", "it is a function; use level='function'"),
        ({}, "softmax", UNWATCHED),
        ({}, "opintercept_tests::plugin_double", UNWATCHED),
        ({}, "plugin_double", UNWATCHED),
        ({}, "linalg_pinv", WHOLE),
        ({}, "cond", WHOLE),
        ({"ops": ["mv"]}, "mm", UNWATCHED),
        ({"engine": "mode"}, "adddmm", ADDMM),
        ({"engine": "mode", "ops": "all"}, "adddmm", ADDMM),
        ({"level": "function"}, "liner", LINEAR),
        ({"level": "function", "ops": "all"}, "liner", LINEAR),
        ({"level": "function"}, "softmax", UNWATCHED),
        ({"level": "function", "ops": ["linear"]}, "mm", UNWATCHED),
    ],
)
def test_an_operator_that_no_call_can_be_is_refused(op_calls: OpCalls, options: Any, op: str, why: str) -> None:
    text = re.escape(f"no call can have op={op!r}: {why}")
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
        # The last one needs a CUDA device.
        ({}, ["mm", "aten::mm", "addmm_", "_scaled_dot_product_flash_attention", "_cudnn_rnn"]),
        ({"ops": ["mv", "opintercept_tests::plugin_double"]}, ["mv", "plugin_double"]),
        ({"ops": "mm.out"}, ["mm"]),
        ({"ops": "quantized::linear"}, ["linear", "quantized::linear"]),
        ({"engine": "mode"}, ["mm", "matmul", "linear", "linalg_pinv", "cond", "higher_order::cond"]),
        (
            {"engine": "mode", "ops": "all"},
            ["mm", "matmul", "softmax", "plugin_double", "opintercept_tests::plugin_double", "cond"],
        ),
        ({"level": "function"}, ["linear", "torch.nn.functional.linear", "matmul", "__matmul__", "mm", "aten::mm"]),
        ({"level": "function", "ops": [torch.nn.functional.softmax]}, ["softmax", "torch.nn.functional.softmax"]),
        ({"level": "function", "ops": "all"}, ["softmax", "torch.nn.functional.softmax", "relu", "aten::mm"]),
    ],
)
def test_an_operator_that_a_call_can_be_is_accepted(op_calls: OpCalls, options: Any, ops: list[str]) -> None:
    with op_calls.block(**options) as calls:
        pass
    calls.expect(op=ops, count=0)
    assert calls.filter(op=ops).count == 0


def test_the_mode_engine_sees_composites_whole_in_inference_mode(op_calls: OpCalls) -> None:
    with op_calls.block(engine="mode") as calls, torch.inference_mode():
        torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
    calls.expect(op="linear", count=1)


def test_finite_flags_are_read_only_when_expected(op_calls: OpCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_flag(flag: torch.Tensor) -> bool:
        read.append(1)
        return flag.item() != 0

    read: list[int] = []
    monkeypatch.setattr(torch.Tensor, "__bool__", read_flag)
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    op_calls.expect(count=1)
    assert read == []
    op_calls.expect(finite=True)
    assert read == [1]
