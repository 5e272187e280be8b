"""Two runs compared: where they differ, what is inherited and what is added, and runs with false content."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import minilm
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from made_runs import ATTENTION, attention, call, chain, change_records, kinds, peak_memory, ranked, values, write
from recorded import run_of
from torch._inductor import config as inductor

from opintercept import OpInterceptError, intercept, runs
from opintercept.runs.compare.difference import Absent

pytestmark = pytest.mark.slow

# Untyped: many attributes of a difference can be None, and each test knows which are not.
diff: Callable[..., Any] = runs.diff


def test_runs_of_the_same_values_are_equal(compare: Any) -> None:
    found = compare(chain("a", "b", "c"), chain("a", "b", "c"))
    assert found.equal
    assert (found.first, found.kinds, found.by, found.pairings) == (None, {"equal": 3}, {"hash": 3}, {"ordinal": 3})
    assert (found.modules, found.worst, found.unmatched, found.settings, found.before) == ((), (), (), (), (0, 0))


def test_a_changed_weight_is_the_first_divergence_and_the_rest_inherits(compare: Any) -> None:
    found = compare(chain("a", "b", "c", "d"), chain("a", "b", "c", "d", of="b"))
    assert not found.equal
    assert (found.first.kind, found.first.changed, found.first.a.record.module) == ("changed operand", ("rhs",), "b")
    assert [role.equal for role in found.first.roles] == [True, False, False]
    assert kinds(found) == {"b": {"changed operand": 1}, "c": {"inherited": 1}, "d": {"inherited": 1}}
    assert found.kinds == {"equal": 1, "changed operand": 1, "inherited": 2}


def test_the_first_selected_call_is_found_although_its_module_differs_before(compare: Any) -> None:
    a, b = ([call("a", f"x{step}{mark}", "w", f"y{step}{mark}", step=step) for step in range(4)] for mark in ("", "'"))
    assert compare(a, b, select=lambda record: record.step > 1).first.a.record.step == 2


def test_an_output_that_differs_for_equal_operands_is_added_there(compare: Any) -> None:
    a, b = chain("a", "b", "c"), chain("a", "b", "c")
    b[1]["values"]["output"] = values("other")
    b[2]["values"]["lhs"] = values("another")
    found = compare(a, b)
    assert kinds(found) == {"b": {"added": 1}, "c": {"inherited": 1}}
    assert found.first.changed == ()


def test_a_second_source_is_added_although_the_first_came_before(compare: Any) -> None:
    a, b = chain("a", "b", "c"), chain("a", "b", "c")
    for number in (0, 2):
        b[number]["values"]["output"] = values("other")
    assert kinds(compare(a, b)) == {"a": {"added": 1}, "c": {"added": 1}}


def test_a_parameter_that_differs_later_is_changed_too(compare: Any) -> None:
    a = [call(module, f"x{module}", f"w{module}", f"y{module}", grad=(False, True)) for module in "abc"]
    b = [call(module, f"x{module}'", f"w{module}'", f"y{module}'", grad=(False, True)) for module in "abc"]
    b[0]["values"]["lhs"] = values("xa")
    found = compare(a, b)
    assert found.kinds == {"changed operand": 3}
    assert [set(entry.changed) for entry in found.worst] == [{"rhs"}] * 3
    # In training, the later ones may come from the optimizer's step.
    for lines in (a, b):
        lines.append(call("a", "g", "xa", "dw", phase="backward", grad_of="rhs", forward=0))
    assert compare(a, b).kinds == {"equal": 1, "changed operand": 1, "inherited": 2}


def test_an_activation_that_requires_a_gradient_is_not_a_parameter(compare: Any) -> None:
    a = [call(module, f"x{module}", f"w{module}", f"y{module}", grad=(module != "a", True)) for module in "abc"]
    b = [call(module, f"x{module}", f"w{module}'", f"y{module}'", grad=(module != "a", True)) for module in "abc"]
    assert compare(a, b).kinds == {"changed operand": 1, "inherited": 2}


def test_an_operand_that_occurs_once_may_come_from_an_earlier_difference(compare: Any) -> None:
    def program(prime: str) -> list[dict[str, Any]]:
        calls = [call("a", f"x{n}", f"w{prime}", f"y{n}{prime}", grad=(True, True)) for n in range(2)]
        return [*calls, call("c", "x", f"v{prime}", f"y{prime}", grad=(True, True))]

    assert kinds(compare(program(""), program("'"))) == {
        "a": {"changed operand": 1, "inherited": 1},
        "c": {"inherited": 1},
    }


def test_a_weight_that_training_changes_is_inherited(compare: Any) -> None:
    a = [
        call(module, f"x{step}{module}", f"w{step}{module}", f"y{step}{module}") for step in range(3) for module in "ab"
    ]
    b = [call(m, f"x{s}{m}", f"w{s}{m}{chr(39) * bool(s)}", f"y{s}{m}'") for s in range(3) for m in "ab"]
    found = compare(a, b)
    assert found.first.kind == "added"
    assert found.kinds == {"added": 2, "inherited": 4}


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("is_causal", True, False),
        ("scale", None, 0.5),
        ("scale", 0.25, 0.5),
        ("dropout_p", 0.0, 0.1),
        ("dropout_p", 0.1, 0.2),
        ("beta", [1, 2], [1, 3]),
        ("beta", 1.0, "nan"),
    ],
    ids=str,
)
def test_an_argument_that_differs_is_named(compare: Any, name: str, one: Any, other: Any) -> None:
    a, b = ([*chain("a"), *attention({name: value}, output)] for value, output in ((one, "y"), (other, "y'")))
    found = compare(a, b)
    assert found.kinds == {"equal": 1, "changed argument": 1}
    assert (found.first.kind, found.first.arguments, found.first.changed) == (
        "changed argument",
        ((name, one, other),),
        (),
    )
    assert found.as_dict()["first"]["arguments"] == ((name, one, other),)
    assert not compare(a, b, rtol=0.1, atol=0.01).equal
    # It may have made no difference yet.
    b[1]["values"]["output"] = a[1]["values"]["output"]
    assert compare(a, b).kinds == {"equal": 1, "changed argument": 1}


def test_an_argument_that_differs_is_named_beside_a_changed_operand(compare: Any) -> None:
    b = attention({"is_causal": False}, "y'")
    b[0]["values"]["rhs"] = values("k'")
    found = compare(attention(), b)
    assert (found.first.kind, found.first.changed) == ("changed argument", ("rhs",))
    # Later calls inherit the difference.
    found = compare([*attention(), *chain("a")], [*b, call("a", "x0'", "wa", "y0'")])
    assert kinds(found)["a"] == {"inherited": 1}


def test_with_all_arguments_recorded_an_output_that_differs_is_added(compare: Any) -> None:
    assert compare(attention(), attention(output="y'")).first.kind == "added"
    # Random numbers are not recorded.
    random = {"dropout_p": 0.1}
    assert compare(attention(random), attention(random, "y'")).first.kind == "unclear"


def test_a_tolerance_applies_to_arguments_too(compare: Any) -> None:
    a, b = attention({"scale": 0.5}), attention({"scale": 0.5001})
    assert compare(a, b).first.arguments == (("scale", 0.5, 0.5001),)
    assert compare(a, b, rtol=1e-3).equal
    a, b = ([call("a", "x", "w", "y", arguments={"out_dtype": dtype})] for dtype in ("torch.float32", "torch.bfloat16"))
    assert not compare(a, b).equal
    assert compare(a, b, rtol=1e-3).equal


def test_another_kernel_need_not_have_the_same_arguments(compare: Any) -> None:
    a = [call("attn", "q", "k", "y", op=ATTENTION, arguments={"is_causal": True, "scale": None, "device": "cpu"})]
    kernel = "aten::_scaled_dot_product_efficient_attention"
    given = {"is_causal": True, "scale": 0.5, "compute_log_sumexp": False, "device": "cuda:0"}
    b = [call("attn", "q", "k", "y", op=kernel, arguments=given)]
    assert compare(a, b).equal
    b[0]["arguments"]["is_causal"] = False
    assert compare(a, b).first.arguments == (("is_causal", True, False),)


def test_a_mask_that_differs_is_a_changed_operand(compare: Any) -> None:
    found = compare(attention(attn_mask="m"), attention(output="y'", attn_mask="m'"))
    assert (found.first.kind, found.first.changed, found.first.arguments) == ("changed operand", ("attn_mask",), ())
    role = next(role for role in found.first.operands if role.role == "attn_mask")
    assert (role.equal, role.by, role.a.shape) == (False, "hash", (16,))


def test_a_mask_that_one_run_has_is_a_changed_operand_whatever_came_before(compare: Any) -> None:
    found = compare([*chain("a"), *attention(attn_mask="m")], [*chain("a", of="a"), *attention(output="y'")])
    assert kinds(found) == {"a": {"changed operand": 1}, "attn": {"changed operand": 1}}
    last = next(pair for pair in found.worst if pair.a.record.module == "attn")
    assert (last.changed, last.arguments) == (("attn_mask",), ())


def test_a_state_that_differs_is_inherited_or_changed(compare: Any) -> None:
    def program(prime: str, first: str = "", steps: int = 2) -> list[dict[str, Any]]:
        calls = []
        for step in range(steps):
            calls.append(call("a", f"x{step}", "w", f"y{step}{first}", step=step))
            states = {"hx_": f"h{prime}", "weights[0]": "w0"}
            arguments = {"batch_first": False, "num_layers": 1}
            calls.append(call("rnn", "i", "w", f"o{step}{prime}", more=states, arguments=arguments, op="aten::lstm"))
        return calls

    found = compare(program(""), program("'"))
    assert kinds(found) == {"rnn": {"changed operand": 1, "inherited": 1}}
    assert found.first.changed == ("hx_",)
    assert kinds(compare(program("", steps=1), program("'", "'", steps=1)))["rnn"] == {"inherited": 1}


@pytest.mark.parametrize("role", ["philox_seed", "rng_state", "workspace", "reserve", "weight_buf"])
def test_random_numbers_and_memory_of_a_kernel_make_no_difference(role: str, compare: Any) -> None:
    more: Any = ({role: "s"}, {role: "t"})
    assert compare(attention(**more[0]), attention(**more[1])).equal


@pytest.mark.parametrize(
    ("op", "role", "equal"),
    [
        ("efficient_attention", "output.1", True),
        ("efficient_attention_backward", "logsumexp", True),
        ("flash_attention_for_cpu_backward", "logsumexp", False),
    ],
)
def test_padding_that_a_kernel_does_not_write_makes_no_difference(
    op: str, role: str, equal: bool, compare: Any
) -> None:
    a, b = (
        [call("attn", "q", "k", "y", op=f"aten::_scaled_dot_product_{op}", more={role: name})] for name in ("s", "t")
    )
    assert compare(a, b).equal is equal


def test_two_equal_runs_of_an_lstm_and_of_unwritten_memory_are_equal(tmp_path: Path) -> None:
    model, x = torch.nn.LSTM(8, 16), torch.ones(5, 3, 8)
    log_probs, targets = torch.randn(4, 1, 5).log_softmax(-1).requires_grad_(), torch.tensor([[1, 2]])
    lengths = torch.tensor([4]), torch.tensor([2])
    for name, value in (("a", 1.0), ("b", 2.0)):
        dirty = [torch.full((size,), value) for size in (4, 100, 5 * 7, 3 * 16, 28_672) for _ in range(8)]
        del dirty
        with intercept(runs.RunRecorder(tmp_path / name), ops="all"):
            out, _ = model(x)
            (out.sum() + torch.nn.functional.ctc_loss(log_probs, targets, *lengths)).backward()
            out.new_empty(5, 7).zero_()
            torch.empty(100)
        model.zero_grad()
        log_probs.grad = None
    found = diff(runs.open_run(tmp_path / "a"), runs.open_run(tmp_path / "b"))
    assert (found.equal, found.modules) == (True, ())


def test_unwritten_memory_of_another_shape_differs(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 4)):
        with intercept(runs.RunRecorder(tmp_path / name), ops="all"):
            torch.ones(1).new_empty_strided((size,), (1,))
    found = diff(runs.open_run(tmp_path / "a"), runs.open_run(tmp_path / "b"))
    assert (found.equal, found.unmatched_calls) == (False, (1, 1))


def test_a_call_that_raised_in_one_run_differs(compare: Any) -> None:
    raised = call("a", "x", "w", None, error="RuntimeError: no memory at 0x12")
    found = compare([raised], chain("a"))
    assert found.kinds == {"changed operand": 1}
    same = compare([raised], [raised | {"error": "RuntimeError: no memory at 0x34"}])
    assert same.equal
    other = compare([raised], [call("a", "x", "w", "y")])
    assert (other.first.kind, other.first.a.error) == ("unclear", raised["error"])


def test_an_operand_that_one_call_lacks_differs_although_one_of_them_raised(compare: Any) -> None:
    raised = call("a", "x", "w", None, bias="b", op="aten::addmm", error="RuntimeError: no memory")
    found = compare([raised], [call("a", "x", "w", "y", op="aten::addmm")])
    assert (found.first.kind, found.first.changed) == ("changed operand", ("bias",))
    assert {role.role: role.equal for role in found.first.roles} == {
        "lhs": True,
        "rhs": True,
        "bias": False,
        "output": None,
    }


def test_without_values_no_call_counts_as_equal(compare: Any) -> None:
    a = [call("a", "x", "w", "y", kept=False)]
    found = compare(a, a)
    assert found.equal
    assert (found.kinds, found.by) == ({"not compared": 1}, {"nothing": 1})
    shorter = compare(a, [call("a", "x", "w", "y", kept=False, shape=[2, 4])])
    assert (shorter.first.kind, shorter.metadata) == ("changed operand", 1)
    assert compare(a, [call("a", "x", "w", "y")]).kinds == {"not compared": 1}


def test_without_hashes_statistics_decide(compare: Any) -> None:
    def sparse(rms: float) -> list[dict[str, Any]]:
        x = values("x", hashed=False)
        return [call("a", x, "w", x | {"rms": x["rms"] * rms})]

    # Floating-point sums of equal values can differ in their last digits.
    for rms in (1, 1 + 1e-9):
        found = compare(sparse(1), sparse(rms))
        assert (found.kinds, found.by) == ({"equal": 1}, {"statistics": 1})
    far = sparse(1)
    far[0]["values"]["output"]["max"] *= 1 + 1e-9
    assert compare(sparse(1), far).kinds == {"added": 1}
    found = compare(sparse(1), sparse(1.5))
    assert found.kinds == {"added": 1}
    output = found.first.output
    assert (output.equal, output.by) == (False, "statistics")
    assert output.max_absolute == output.a_values.rms * 0.5
    assert output.relative == output.max_absolute / output.a_values.max


@pytest.mark.parametrize(
    ("change", "absolute"),
    [({"nan": 1}, math.inf), ({"inf": 2}, math.inf), ({"max": 3.0}, 1.0), ({"min": None, "max": None}, None)],
    ids=str,
)
def test_statistics_bound_the_error_from_below(compare: Any, change: dict[str, Any], absolute: float | None) -> None:
    y = {"hash": "0" * 16, "count": 16, "nan": 0, "inf": 0, "min": -1.0, "max": 2.0, "mean": 0.5, "rms": 1.0}
    found = compare([call("a", "x", "w", y)], [call("a", "x", "w", y | change | {"hash": "1" * 16})])
    assert found.first.kind == "added"
    assert found.first.output.max_absolute == absolute


def test_a_tolerance_makes_dtypes_comparable(compare: Any) -> None:
    near = values("y") | {"hash": "0" * 16, "max": values("y")["max"] * (1 + 2**-9)}
    a, b = [call("a", "x", "w", "y")], [call("a", "x", "w", near, dtype="bfloat16")]
    assert compare(a, b).first.changed == ("lhs", "rhs")
    found = compare(a, b, rtol=2**-8)
    assert found.equal
    assert (found.by, found.metadata) == ({"statistics": 1}, 1)
    assert compare(a, b, rtol=2**-10).first.kind == "added"
    assert compare(a, b, atol=0.1).equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": -1}, r"rtol must be a number of at least 0, got -1"),
        ({"atol": math.inf}, r"atol must be a number of at least 0, got inf"),
        ({"rtol": "1"}, r"rtol must be a number of at least 0, got '1'"),
        ({"limit": 0}, r"limit must be a whole number of at least 1, got 0"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(compare: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(chain("a"), chain("a"), **options)


def test_runs_without_a_common_call_cannot_be_compared(compare: Any) -> None:
    other = [call("b", "x", "w", "y", shape=[2, 4], phase="backward")]
    with pytest.raises(
        OpInterceptError, match=r"the runs have no calls in common: 1 call in .*, 1 in .*; if their modules"
    ):
        compare(chain("a"), other)
    with pytest.raises(OpInterceptError, match=r"calls in common: 0 calls in .*, 0 in "):
        compare([], [])


def test_seeds_that_an_attention_returns_make_no_difference(compare: Any) -> None:
    a, b = (
        [call("attn", "q", "k", "y", op="aten::_scaled_dot_product_flash_attention", more={"output.1": seed})]
        for seed in ("seed", "another seed")
    )
    for line in (*a, *b):
        line["output"] = [line["output"], line["output"] | {"dtype": "uint64"}]
    assert compare(a, b).equal


def test_one_process_is_compared_with_each_of_several(tmp_path: Path) -> None:
    one = write(tmp_path / "one", chain("a", "b"))
    for rank in range(2):
        write(tmp_path / "two" / f"rank{rank}", chain("a", "b", of="b" * rank), rank=rank, world_size=2)
    two = runs.open_run(tmp_path / "two")
    found = diff(one, two)
    assert (found.ranks, found.calls, found.pairs) == (((0, 0), (0, 1)), (4, 4), 4)
    assert (found.first.b.rank, [row.ranks for row in found.modules]) == (1, [(0, 1)])
    assert ("world size", "1", "2") in found.settings
    assert diff(two, one).ranks == ((0, 0), (1, 0))
    assert diff(two, two).equal


def test_a_rank_that_only_one_run_has_is_a_difference(tmp_path: Path) -> None:
    same = chain("a", "b")
    four = ranked(tmp_path / "four", same, same, same, same)
    two = ranked(tmp_path / "two", same, same, None, None)
    found = diff(four, two)
    assert not found.equal
    assert (found.first, found.ranks, found.calls) == (None, ((0, 0), (1, 1)), (8, 4))
    assert found.absent == (Absent("b", 2, False, 2), Absent("b", 3, False, 2))
    assert {(row.run, row.rank, row.module) for row in found.unmatched} == {("a", r, m) for r in (2, 3) for m in "ab"}
    assert json.loads(json.dumps(found.as_dict()))["absent"][0] == {"run": "b", "rank": 2, "empty": False, "calls": 2}
    assert [each.run for each in diff(two, four).absent] == ["a", "a"]
    assert diff(two, two).equal
    # The one folder that is left is still that of one of several processes.
    one = ranked(tmp_path / "one", same, None, world_size=2)
    assert diff(ranked(tmp_path / "pair", same, same), one).absent == (Absent("b", 1, False, 2),)


@pytest.mark.parametrize("written", [True, False], ids=["empty file", "no file"])
def test_a_rank_without_calls_is_a_difference(tmp_path: Path, written: bool) -> None:
    same = chain("a", "b")
    full, empty = ranked(tmp_path / "full", same, same), ranked(tmp_path / "empty", same, [])
    if not written:
        (tmp_path / "empty" / "rank1" / "calls.bin").unlink()
    sides: list[tuple[Any, Literal["a", "b"]]] = [(diff(full, empty), "b"), (diff(empty, full), "a")]
    for found, side in sides:
        assert not found.equal
        assert found.absent == (Absent(side, 1, True, 2),)
        assert sum(found.unmatched_calls) == 2
    # Neither run has calls of it, as when only one process is recorded.
    assert diff(empty, empty).equal


def test_the_first_divergence_of_several_processes_is_that_of_the_first_step(tmp_path: Path) -> None:
    def program(rank: int, broken_from: int, prime: str) -> list[dict[str, Any]]:
        """16 calls in each step."""
        calls = []
        for index in range(64):
            mark = prime if index >= broken_from else ""
            calls.append(call(f"m{index % 16}", f"x{rank}{index}", "w", f"y{rank}{index}{mark}", step=index // 16))
        return calls

    a = ranked(tmp_path / "a", program(0, 99, "'"), program(1, 99, "'"))
    b = ranked(tmp_path / "b", program(0, 48, "'"), program(1, 32, "'"))
    found = diff(a, b, limit=4)
    first = found.first
    assert first is not None
    assert (first.a.rank, first.a.record.step, first.a.record.index, first.kind) == (1, 2, 32, "added")
    assert [(row.ranks, row.index) for row in found.modules] == [((1, 1), index) for index in (32, 33, 34, 35)]
    assert found.modules_in_all == 32


def test_the_batch_of_a_rank_may_be_smaller(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [call(m, f"x{m}", f"w{m}", f"y{m}", shape=[8, 4]) for m in "aab"])
    two = write(tmp_path / "two", [call(m, f"x{m}'", f"w{m}", f"y{m}'", shape=[4, 4]) for m in "aab"])
    assert diff(one, two).pairs == 3


def test_settings_that_differ_are_listed_flags_first(tmp_path: Path) -> None:
    a = write(tmp_path / "a", chain("a"), versions={"torch": "2.12"}, flags={"threads": "1"})
    flags, argv = {"threads": "2", "tf32": "True"}, ["train.py", "--fast"]
    b = write(tmp_path / "b", chain("a"), argv=argv, versions={"torch": "2.13"}, flags=flags)
    assert diff(a, b).settings == (
        ("flag threads", "1", "2"),
        ("flag tf32", "", "True"),
        ("version of torch", "2.12", "2.13"),
        ("argv", "train.py", "train.py --fast"),
    )


def test_rows_are_cut_and_counted(compare: Any) -> None:
    modules = [f"m{n}" for n in range(6)]
    found = compare([*chain(*modules), *chain("gone", "away")], chain(*modules, of="m0"), limit=2)
    assert (len(found.modules), found.modules_in_all, len(found.worst)) == (2, 6, 2)
    assert (len(found.unmatched), found.unmatched_calls) == (2, (2, 0))
    assert [row.module for row in found.modules] == ["m0", "m1"]


def test_calls_that_select_leaves_out_are_compared_but_not_reported(compare: Any) -> None:
    found = compare(chain("a", "b", "c"), chain("a", "b", "c", of="a"), select=lambda record: record.module == "c")
    assert (found.pairs, found.kinds, found.first.a.record.module) == (1, {"inherited": 1}, "c")


def test_a_difference_is_plain_data(compare: Any) -> None:
    found = compare(chain("a", "b"), [*chain("a", "b", of="b"), call("c", "x", "w", "y")])
    plain = json.loads(json.dumps(found.as_dict()))
    assert plain["equal"] is False
    assert plain["first"]["changed"] == ["rhs"]
    assert plain["first"]["a"] == {
        "rank": 0,
        "index": 1,
        "step": 0,
        "op": "aten::mm",
        "phase": "forward",
        "module": "b",
        "source": "train.py:7 in forward",
        "grad_of": None,
        "error": None,
    }
    assert plain["unmatched"][0]["run"] == "b"
    assert plain["modules"][0]["kinds"] == {"changed operand": 1}


def test_diff_takes_tens_of_bytes_of_memory_for_each_call(tmp_path: Path) -> None:
    def peak(calls: int) -> int:
        for mark in "ab":
            made = [call("a", n, "w", f"{n}{mark * (n > 10)}") for n in range(calls)]
            write(tmp_path / f"{calls}{mark}", made)
        a, b = (runs.open_run(tmp_path / f"{calls}{mark}") for mark in "ab")
        found = []
        size = peak_memory(lambda: found.append(diff(a, b, limit=10)))
        assert found[0].kinds == {"equal": 11, "added": calls - 11}
        return size

    peak(100)  # caches
    # Columns are read in pieces of 65,536 calls, of which each has a kilobyte; here both runs are one piece.
    assert (peak(1200) - peak(400)) / 800 < 3000


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:skipped ")
def test_any_two_runs_give_an_answer_or_an_error(tmp_path: Path, data: Any) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for name in "ab":
        write(folder / name, chain("a", "b", "a", of=data.draw(st.sampled_from(["", "a", "b"]))))
        change_records(folder / name, data.draw)
    try:
        found = diff(*(runs.open_run(folder / name) for name in "ab"), rtol=data.draw(st.sampled_from([0.0, 0.1])))
    except OpInterceptError as error:
        assert re.search("calls in common|has no text of a call", str(error))  # noqa: PT017 - either is right
    else:
        assert sum(found.kinds.values()) == found.pairs
        json.dumps(found.as_dict())


@pytest.mark.parametrize("tensors", ["stats", "sample", "full"])
def test_errors_are_those_of_the_tensors(tmp_path: Path, tensors: Any) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 6), torch.randn(6, 7)
    other = w + torch.randn(6, 7) * 1e-3
    a, b = (run_of(tmp_path / name, partial(torch.mm, x, w), tensors) for name, w in (("a", w), ("b", other)))
    found = diff(a, b)
    assert found.first.changed == ("rhs",)
    for role, one, two in (("rhs", w, other), ("output", x @ w, x @ other)):
        (got,) = (entry for entry in found.first.roles if entry.role == role)
        gap = (one.double() - two.double()).abs()
        if tensors == "stats":
            assert got.by == "hash"
            assert 0 < got.max_absolute <= gap.max()
            assert got.cosine is got.max_ulp is got.max_relative is None
            continue
        assert got.by == {"full": "tensors", "sample": "sample"}[tensors]  # of all values, which are fewer than 64
        assert got.max_absolute == gap.max()
        assert got.relative == gap.max() / one.double().abs().max()
        assert got.max_relative == (gap / one.double().abs()).max()
        assert got.cosine == pytest.approx(torch.cosine_similarity(one.flatten(), two.flatten(), 0).item(), abs=1e-6)
        assert got.max_ulp > 1
    assert diff(a, b, tensors=False).first.output.by == "hash"
    assert diff(a, b, rtol=1e-2).equal
    assert diff(a, a).equal


@pytest.mark.parametrize("tensors", ["stats", "sample", "full"])
@pytest.mark.parametrize("rtol", [0.0, 1e-3])
def test_nan_is_a_difference_whatever_else_was_recorded(tmp_path: Path, tensors: str, rtol: float) -> None:
    x, w = torch.randn(50, 60), torch.randn(60, 70)
    broken = w.clone()
    broken[1, :60] = math.nan  # so few that a sample can miss them
    a = run_of(tmp_path / "a", lambda: x @ w, tensors)
    b = run_of(tmp_path / "b", lambda: x @ broken, tensors)
    found = diff(a, b, rtol=rtol)
    assert found.first is not None
    assert (found.first.kind, found.first.changed) == ("changed operand", ("rhs",))
    for role in found.first.roles[1:]:
        assert (role.max_absolute, role.relative, role.cosine, role.max_ulp) == (math.inf, math.inf, None, None)
        assert role.a_values is not None
        assert role.b_values is not None
        assert (role.a_values.nan, role.b_values.nan) == (0, 60 if role.role == "rhs" else 3000)


def test_a_sample_bounds_an_error_from_below_as_statistics_do(tmp_path: Path) -> None:
    x, ones = torch.ones(100, 100), torch.ones(1, 100)
    far = x.clone()
    far[17, 23] = 1e4
    a, b = (run_of(tmp_path / n, partial(torch.mm, ones, w), "sample") for n, w in (("a", x), ("b", far)))
    rhs = next(role for role in diff(a, b).first.roles if role.role == "rhs")
    assert (rhs.by, rhs.max_absolute) == ("sample", 9999.0)


def test_the_ulp_is_that_of_the_coarser_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 6), torch.randn(6, 7)
    a = run_of(tmp_path / "a", lambda: x @ w, "full")
    b = run_of(tmp_path / "b", lambda: x.bfloat16() @ w.bfloat16(), "full")
    for one, two in ((a, b), (b, a)):
        found = diff(one, two)
        assert [entry.equal for entry in found.worst[0].roles] == [False] * 3
        # Rounding to bfloat16 is off by half a unit at most, and by one if the exact value is in the next binade.
        assert 0.4 < next(entry.max_ulp for entry in found.worst[0].roles if entry.role == "lhs") <= 1
        assert diff(one, two, rtol=2**-6).equal


def test_without_its_tensor_files_a_run_is_compared_by_statistics(tmp_path: Path) -> None:
    x = torch.ones(4, 4)
    a, b = (run_of(tmp_path / n, partial(torch.mm, x, x * f), "full") for n, f in (("a", 1.0), ("b", 2.0)))
    for path in (tmp_path / "b" / "tensors").iterdir():
        path.write_bytes(b"no tensors")
    output = diff(a, b).first.output
    assert (output.equal, output.by, output.max_absolute, output.cosine) == (False, "hash", 4.0, None)


def test_integers_have_no_ulp(tmp_path: Path) -> None:
    x = torch.ones(4, 4, dtype=torch.int32)
    a, b = (run_of(tmp_path / n, partial(torch.mm, x, x * f), "full") for n, f in (("a", 1), ("b", 2)))
    output = diff(a, b).first.output
    assert (output.max_absolute, output.relative, output.max_ulp, output.cosine) == (4.0, 1.0, None, 1.0)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.GELU(),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 16, bias=False),
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
    )


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_eager_and_compiled_runs_have_the_same_calls(tmp_path: Path, training: bool) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    weights = torch.arange(16.0)  # the gradient of the plain sum of a LayerNorm is only rounding errors

    def step(model: Any) -> None:
        for _ in range(2):
            if training:
                model(x).square().mul(weights).sum().backward()
            else:
                with torch.no_grad():
                    model(x)

    a = run_of(tmp_path / "a", lambda: step(net().train(training)))
    with inductor.patch(compile_threads=1):
        b = run_of(tmp_path / "b", lambda: step(torch.compile(net().train(training))))
    found = diff(a, b, rtol=1e-5, limit=1000)
    assert found.equal, found
    assert found.pairs == found.calls[0] == found.calls[1] > 10
    # Compiled calls have the names of the modules, but in backward no `grad_of`.
    assert found.pairings == ({"ordinal": 16, "family": 22} if training else {"ordinal": 16})
    exact = diff(a, b, limit=1000)
    assert not exact.equal
    changed: Any = net().train(training)
    changed[3].weight.data = changed[3].weight.data.bfloat16().float()
    with inductor.patch(compile_threads=1):
        c = run_of(tmp_path / "c", lambda: step(torch.compile(changed)))
    found = diff(a, c, rtol=1e-5, limit=1000)
    assert (found.first.a.record.module, found.first.kind, found.first.changed) == ("3", "changed operand", ("rhs",))
    assert "added" not in found.kinds


SENTENCES = [
    f"{subject} {verb} {when}."
    for subject in ("A cat", "The river", "Nobody", "My aunt", "This engine")
    for verb in ("sings", "waits", "turns", "rests", "counts")
    for when in ("today", "in the rain")
]


def encode(model: Any, tokenizer: Any) -> None:
    with torch.no_grad():
        for start in range(0, len(SENTENCES), 10):
            model(**tokenizer(SENTENCES[start : start + 10], padding="max_length", max_length=12, return_tensors="pt"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_of_a_pretrained_model_that_is_rounded_is_named(tmp_path: Path, compiled: bool) -> None:
    model, tokenizer = minilm.load()
    assert len(SENTENCES) == 50
    a = run_of(tmp_path / "a", lambda: encode(model, tokenizer))
    layer = "encoder.layer.3"
    for parameter in model.get_submodule(layer).parameters():
        parameter.data = parameter.data.bfloat16().float()
    with inductor.patch(compile_threads=1):
        b = run_of(tmp_path / "b", lambda: encode(torch.compile(model) if compiled else model, tokenizer))
    started = time.perf_counter()
    found = diff(a, b, rtol=1e-5 if compiled else 0.0)
    assert time.perf_counter() - started < 10
    assert found.pairs == found.calls[0] == found.calls[1] == 5 * 43
    assert found.first.a.record.module == f"{layer}.attention.self.query"
    assert (found.first.kind, found.first.changed, found.before) == ("changed operand", ("rhs", "bias"), (0, 0))
    rows = {row.module: row.kinds for row in found.modules}
    assert min(rows) >= layer
    for module, found_kinds in rows.items():
        own = module.startswith(layer) and module != f"{layer}.attention.self"
        assert found_kinds == {"changed operand" if own else "inherited": 5}, module


Q = torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(6, 6, dtype=torch.bool).tril()


def attend(**options: Any) -> Callable[[], Any]:
    return lambda: torch.nn.functional.scaled_dot_product_attention(Q, Q, Q, **options)


def add(**options: Any) -> Callable[[], Any]:
    return lambda: torch.addmm(torch.ones(8), Q[0, 0], torch.ones(8, 8), **options)


def recur(state: float, cell: float = 0.0) -> Callable[[], Any]:
    def program() -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            torch.nn.LSTM(8, 8)(Q[0], (torch.full((1, 6, 8), state), torch.full((1, 6, 8), cell)))

    return program


@pytest.mark.parametrize("tensors", ["none", "stats", "full"])
@pytest.mark.parametrize(
    ("a", "b", "argument"),
    [
        (attend(is_causal=True), attend(), ("is_causal", True, False)),
        (attend(), attend(scale=0.5), ("scale", None, 0.5)),
        (attend(scale=0.25), attend(scale=0.5), ("scale", 0.25, 0.5)),
        (add(), add(alpha=2), ("alpha", 1, 2)),
        (add(beta=0.5), add(beta=math.nan), ("beta", 0.5, "nan")),
    ],
    ids=["causal", "scale", "another scale", "alpha", "beta"],
)
def test_a_changed_argument_of_a_program_is_named(
    tmp_path: Path, a: Any, b: Any, argument: tuple[str, Any, Any], tensors: str
) -> None:
    one, other = run_of(tmp_path / "a", a, tensors), run_of(tmp_path / "b", b, tensors)
    first = diff(one, other).first
    assert first is not None
    assert (first.kind, first.arguments, first.changed) == ("changed argument", (argument,), ())
    assert diff(one, one).equal


@pytest.mark.parametrize("tensors", ["stats", "full"])
@pytest.mark.parametrize(
    ("a", "b", "operand"),
    [
        (attend(attn_mask=MASK), attend(attn_mask=MASK.logical_not()), "attn_mask"),
        (attend(), attend(attn_mask=MASK), "attn_mask"),
        (attend(attn_mask=MASK), attend(), "attn_mask"),
        (recur(0.0), recur(0.5), "hx"),
        (recur(0.0), recur(0.0, 0.5), "cx"),
    ],
    ids=["mask", "new mask", "lost mask", "state", "cell"],
)
def test_a_changed_mask_or_state_of_a_program_is_named(
    tmp_path: Path, a: Any, b: Any, operand: str, tensors: str
) -> None:
    one, other = run_of(tmp_path / "a", a, tensors), run_of(tmp_path / "b", b, tensors)
    first = diff(one, other).first
    assert first is not None
    assert (first.kind, first.arguments) == ("changed operand", ())
    (name,) = first.changed
    # Without MKL-DNN both states of an LSTM are in one list.
    assert name.startswith(operand) or (operand == "cx" and name == "hx[1]")
    assert diff(one, one).equal


def test_a_mask_of_a_run_without_values_is_named_if_one_run_has_it(tmp_path: Path) -> None:
    one, other = (run_of(tmp_path / n, attend(attn_mask=m), "none") for n, m in (("a", None), ("b", MASK)))
    first = diff(one, other).first
    assert first is not None
    assert first.arguments == (("attn_mask", None, "(not recorded)"),)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [call("a", "x", "w", "y")])
    with pytest.raises(TypeError, match=r"b must be a run, got 'runs/b'; open its folder with runs\.open_run"):
        runs.diff(run, "runs/b")  # type: ignore[arg-type]


def test_operands_that_are_others_are_said_to_be_perhaps_of_other_calls(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y, z = torch.randn(3, 4, 4)

    def made(name: str, *products: tuple[torch.Tensor, torch.Tensor]) -> runs.Run:
        with intercept(runs.RunRecorder(tmp_path / name)):
            for one, other in products:
                one @ other
        return runs.open_run(tmp_path / name)

    a, same, more = made("a", (x, y)), made("same", (z, y)), made("more", (z, z), (y, x))
    said = "they may not belong together: `opintercept why A B` joins calls by their values"
    assert (diff(a, more).first.pairing, said in str(diff(a, more))) == ("sequence", True)
    assert (diff(a, same).first.pairing, said in str(diff(a, same))) == ("ordinal", False)
