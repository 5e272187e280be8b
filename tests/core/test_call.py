"""What hooks can read of a call while it runs, and the record that they can keep."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from made_calls import call_of
from nets import record as records_of
from programs import ENGINES
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from opintercept import Gemm, OpCall, OpInterceptError, TensorMeta, hooks, intercept
from opintercept._core.tensors import describe, nbytes
from opintercept._origin.autocast import autocast_below

each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def nested(layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)


def test_attributes_before_and_after_the_operator_runs() -> None:
    lhs, rhs = torch.ones(2, 3), torch.ones(3, 4)
    seen: list[str] = []

    class Look:
        def pre(self, call: OpCall) -> None:
            assert call.output is None
            assert call.elapsed is None
            seen.append("pre")

        def post(self, call: OpCall) -> None:
            assert call.output.shape == (2, 4)
            assert isinstance(call.elapsed, float)
            assert call.elapsed > 0
            assert (call.op, call.func) == ("aten::mm", torch.ops.aten.mm.default)
            assert (call.phase, call.index, call.step, call.opaque) == ("forward", 0, 0, False)
            assert call.args[0] is call.lhs is lhs
            assert call.args[1] is call.rhs is rhs
            assert call.bias is None
            assert call.kwargs == {}
            assert call.gemm == Gemm(1, 2, 4, 3, ("float32", "float32"), (False, False))
            assert call.flops == 48
            assert call.bytes == 4 * (6 + 12 + 8)
            seen.append("post")

    with intercept(Look()):
        torch.mm(lhs, rhs)
    assert seen == ["pre", "post"]


A, B, C = torch.full((2, 2), 2.0), torch.full((2, 2), 3.0), torch.full((2, 2), 5.0)
OTHER = torch.full((2, 2), 7.0)
Q = torch.ones(2, 3, 5, 8)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: torch.mm(A, B), OTHER @ B),
        (lambda: torch.mm(A, mat2=B), OTHER @ B),
        (lambda: torch.mm(input=A, mat2=B), OTHER @ B),
        (lambda: torch.mm(A, A), OTHER @ A),
        (lambda: torch.addmm(C, A, B, alpha=2), C + 2 * (OTHER @ B)),
        (lambda: C.clone().addmm_(A, B), C + OTHER @ B),
        (lambda: torch.mm(A, B, out=torch.empty(2, 2)), OTHER @ B),
        (lambda: torch.einsum("ij,jk->ik", A, B), OTHER @ B),
        (lambda: torch.einsum("ij,jk->ik", [A, B]), OTHER @ B),
        (lambda: torch.nn.functional.linear(A, B, C[0]), OTHER @ B + C[0]),
    ],
    ids=["mm", "keyword", "keywords", "twice", "bias", "in place", "out", "einsum", "list", "linear"],
)
@each_engine
def test_an_operand_is_replaced_by_its_role(
    run: Callable[[], torch.Tensor], expected: torch.Tensor, engine: dict[str, Any]
) -> None:
    with intercept(SimpleNamespace(pre=lambda call: call.replace(lhs=OTHER.view(call.lhs.shape))), **engine):
        product = run()
    assert torch.equal(product, expected)


def test_several_operands_are_replaced_at_once() -> None:
    call = call_of(torch.ops.aten.addmm.default, C, A, B, beta=2)
    assert call.replace(rhs=OTHER, bias=A, lhs=B) == ((A, B, OTHER), {"beta": 2})
    assert call.replace() == ((C, A, B), {"beta": 2})
    assert call.args == (C, A, B)


def test_an_operand_is_replaced_under_the_keyword_that_passed_it() -> None:
    func = torch.ops.aten.mm.default
    assert call_of(func, self=A, mat2=B).replace(lhs=OTHER, rhs=A) == ((), {"self": OTHER, "mat2": A})
    assert call_of(func, input=A, mat2=B).replace(lhs=OTHER) == ((), {"input": OTHER, "mat2": B})


@pytest.mark.parametrize("sequence", [list, tuple])
def test_an_operand_in_einsums_list_is_replaced(sequence: Any) -> None:
    operands = sequence((A, B))
    (equation, replaced), _ = call_of(torch.einsum, "ij,jk->ik", operands).replace(rhs=OTHER)
    assert equation == "ij,jk->ik"
    assert type(replaced) is sequence
    assert replaced[0] is A
    assert replaced[1] is OTHER
    assert operands[1] is B


@pytest.mark.parametrize(
    ("call", "role", "message"),
    [
        (
            call_of(torch.ops.aten.mm.default, A, B),
            "bias",
            "a tensor can be replaced, got None as the bias of aten::mm",
        ),
        (call_of(torch.ops.aten.relu.default, A), "lhs", "a tensor can be replaced, got None as the lhs of aten::relu"),
        (
            call_of(torch.ops.aten._grouped_mm.default, [A, A], [B, B]),
            "rhs",
            r"a tensor can be replaced, got \[float32\[2, 2\], float32\[2, 2\]\] as the rhs of aten::_grouped_mm",
        ),
    ],
    ids=["no bias", "no matmul", "a list"],
)
def test_replace_refuses_a_role_without_a_tensor(call: OpCall, role: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call.replace(**{role: OTHER})


def test_only_operands_can_be_replaced() -> None:
    with pytest.raises(TypeError, match="replace takes lhs=, rhs= and bias=, got output="):
        call_of(torch.ops.aten.mm.default, A, B).replace(output=OTHER)


@each_engine
def test_conjugate_operands_are_resolved(engine: dict[str, Any]) -> None:
    lhs, rhs = torch.tensor([[1 + 2j, 3 - 1j]]), torch.tensor([[2 - 5j], [1j]])
    seen: list[Any] = []
    with intercept(
        lambda call: seen.extend((call.lhs, call.rhs)), ops=["mm"] if "level" not in engine else [torch.mm], **engine
    ):
        product = torch.mm(lhs.conj(), rhs.conj())
    seen_lhs, seen_rhs = seen
    assert not seen_lhs.is_conj()
    assert not seen_rhs.is_conj()
    assert torch.equal(seen_lhs, torch.tensor([[1 - 2j, 3 + 1j]]))
    assert torch.equal(seen_rhs, torch.tensor([[2 + 5j], [-1j]]))
    assert torch.equal(product, torch.tensor([[(1 - 2j) * (2 + 5j) + (3 + 1j) * -1j]]))


@each_engine
def test_hooks_that_read_no_values_copy_no_operand(engine: dict[str, Any]) -> None:
    # At function level, resolving an operand would also add a node to autograd's graph.
    lhs, rhs = (torch.randn(3, 3, dtype=torch.complex64, requires_grad=True).conj() for _ in range(2))
    recorder = hooks.Recorder()
    looking: list[Any] = [recorder, hooks.Profile(), hooks.when(print, dtype="float32", min_numel=100)]
    found = []
    for watch in (nullcontext(), intercept(looking, **engine)):
        number = torch._C._autograd._get_sequence_nr()
        with watch, profile(activities=[ProfilerActivity.CPU]) as profiler:
            torch.mm(lhs, rhs)
        copies = [event.name for event in profiler.events() if event.name in ("aten::resolve_conj", "aten::clone")]
        found.append((sorted(copies), torch._C._autograd._get_sequence_nr() - number))
    assert found[0] == found[1]
    assert recorder.records[0].lhs is not None
    assert recorder.records[0].lhs.stride == lhs.stride()


def test_recording_a_linear_adds_no_node_to_the_graph_of_autograd() -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    start = torch._C._autograd._get_sequence_nr()
    F.linear(torch.ones(2), weight)
    end = torch._C._autograd._get_sequence_nr()
    (record,) = records_of(lambda: F.linear(torch.ones(2), weight), level="function")
    assert torch._C._autograd._get_sequence_nr() - end == end - start
    assert record.gemm == Gemm(1, 1, 3, 2, ("float32", "float32"), (False, True))


def test_negative_views_are_resolved() -> None:
    lhs = torch.tensor([[1 + 2j, 3 - 1j]]).conj().imag
    assert lhs.is_neg()
    resolved = call_of(torch.ops.aten.mm.default, lhs, torch.ones(2, 1)).lhs
    assert resolved is not None
    assert not resolved.is_neg()
    assert torch.equal(resolved, torch.tensor([[-2.0, 1.0]]))


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4)), 4 * (6 + 12 + 8)),
        (lambda: torch.mm(torch.ones(2, 3).bfloat16(), torch.ones(3, 4).bfloat16()), 2 * (6 + 12 + 8)),
        (lambda: torch.addmm(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4)), 4 * (4 + 6 + 12 + 8)),
        (lambda: torch._int_mm(torch.ones(32, 16).char(), torch.ones(16, 8).char()), 512 + 128 + 4 * 256),
        (lambda: torch.mm(torch.ones(0, 3), torch.ones(3, 4)), 4 * 12),
        (lambda: torch.sparse.mm(torch.eye(2).to_sparse(), torch.ones(2, 2)), None),
    ],
    ids=["float32", "bfloat16", "bias", "int8 to int32", "empty", "sparse"],
)
def test_bytes_count_operands_and_output(function: Callable[[], Any], size: int | None) -> None:
    [record] = records_of(function)
    assert record.bytes == size


def test_bytes_do_not_depend_on_which_call_of_that_shape_was_the_first() -> None:
    x, y = torch.ones(5, 5), torch.ones(5, 5)
    records = records_of(lambda: [torch.mm(x, rhs) for rhs in (x, y, x)])
    assert [record.bytes for record in records] == [3 * 4 * 25] * 3


@pytest.mark.skipif(not hasattr(torch, "_foreach_mm"), reason="_foreach_mm came with torch 2.13")
def test_bytes_of_lists_count_every_tensor() -> None:
    lists = [torch.ones(2, 3), torch.ones(5, 6)], [torch.ones(3, 4), torch.ones(6, 7)]
    call = call_of(torch.ops.aten._foreach_mm.default, *lists)
    call.output = [torch.ones(2, 4), torch.ones(5, 7)]
    assert call.bytes == 4 * (6 + 30 + 12 + 42 + 8 + 35)


def test_a_record_survives_json() -> None:
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    [record] = records_of(lambda: F.linear(x, w, torch.ones(4)))
    plain = json.loads(json.dumps(record.as_dict()))
    assert plain.pop("elapsed") == record.elapsed
    assert plain.pop("started") == record.started
    assert plain.pop("thread") == threading.get_native_id()
    assert plain.pop("source").startswith("test_call.py:")
    assert plain == {
        "index": 0,
        "step": 0,
        "op": "aten::addmm",
        "func": "aten.addmm.default",
        "phase": "forward",
        "module": "",
        "forward": None,
        "grad_of": None,
        "lhs": {"shape": [2, 3], "dtype": "float32", "device": "cpu", "stride": [3, 1], "requires_grad": True},
        "rhs": {"shape": [3, 4], "dtype": "float32", "device": "cpu", "stride": [1, 3], "requires_grad": False},
        "bias": {"shape": [4], "dtype": "float32", "device": "cpu", "stride": [1], "requires_grad": False},
        "output": {"shape": [2, 4], "dtype": "float32", "device": "cpu", "stride": [4, 1], "requires_grad": False},
        "gemm": {"batch": 1, "m": 2, "n": 4, "k": 3, "dtypes": ["float32", "float32"], "transposes": [False, True]},
        "flops": 48,
        "bytes": 4 * (6 + 12 + 4 + 8),
        "autocast": None,
        "opaque": False,
        "ops": None,
        "replayed": None,
    }


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.scaled_dot_product_attention(Q, Q, Q),
        lambda: torch.sparse.mm(torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
        lambda: torch.einsum("ij,jk,kl->il", torch.ones(2, 3), torch.ones(3, 4), torch.ones(4, 5)),
        lambda: torch.nn.LSTM(4, 6)(torch.ones(5, 3, 4)),
        lambda: F.linear(nested(), torch.ones(4, 3)),
        lambda: F.linear(nested(torch.jagged), torch.ones(4, 3)),
        lambda: torch.mm(torch.ones(2, 3, device="meta"), torch.ones(3, 4, device="meta")),
        lambda: torch.vmap(torch.mm)(torch.ones(5, 2, 3), torch.ones(5, 3, 4)),
    ],
    ids=["attention", "sparse", "einsum of three", "lstm", "nested", "jagged", "meta", "vmap"],
)
@each_engine
def test_any_record_can_be_written_as_json(function: Callable[[], Any], engine: dict[str, Any]) -> None:
    for record in records_of(function, **engine):
        plain = record.as_dict()
        read = json.loads(json.dumps(plain))
        assert read.keys() == plain.keys()
        assert (read["op"], read["flops"], read["bytes"]) == (record.op, record.flops, record.bytes)
        assert str(record).startswith(record.op)


def test_a_record_of_several_outputs_has_them_all() -> None:
    [record] = records_of(lambda: F.scaled_dot_product_attention(Q, Q, Q))
    assert isinstance(record.output, tuple)
    assert [meta and meta.shape for meta in record.output] == [(2, 3, 5, 8), (2, 3, 5)]
    plain = dataclasses.replace(record, output=(record.lhs, None)).as_dict()
    assert plain["output"] == (plain["lhs"], None)
    assert record.opaque
    assert str(record) == (
        "aten::_scaled_dot_product_flash_attention_for_cpu float32[2, 3, 5, 8] @ float32[2, 3, 5, 8]"
        " -> float32[2, 3, 5, 8], float32[2, 3, 5]"
    )


def test_a_record_is_plain_frozen_data() -> None:
    [record] = records_of(lambda: torch.addmm(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4)))
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert hash(record) == hash(copy.deepcopy(record))
    assert str(record) == "aten::addmm float32[2, 3] @ float32[3, 4] + float32[4] -> float32[2, 4]"
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'op'"):
        record.op = "aten::mm"  # type: ignore[misc]


def test_the_func_of_a_record_is_the_overload_or_the_public_name() -> None:
    out = torch.empty(2, 4)
    operands = torch.ones(2, 3), torch.ones(3, 4)
    assert records_of(lambda: torch.mm(*operands, out=out))[0].func == "aten.mm.out"
    assert records_of(lambda: torch.mm(*operands), level="function")[0].func == "torch.mm"


@pytest.mark.parametrize(
    ("tensor", "meta", "text"),
    [
        (torch.ones(2, 3), TensorMeta((2, 3), "float32", "cpu", (3, 1), False), "float32[2, 3]"),
        (torch.ones(3, 2).t(), TensorMeta((2, 3), "float32", "cpu", (1, 2), False), "float32[2, 3]"),
        (torch.ones(()), TensorMeta((), "float32", "cpu", (), False), "float32[]"),
        (torch.ones(2, requires_grad=True), TensorMeta((2,), "float32", "cpu", (1,), True), "float32[2]"),
        (torch.ones(2, device="meta"), TensorMeta((2,), "float32", "meta", (1,), False), "float32[2]@meta"),
        (torch.eye(2).to_sparse(), TensorMeta((2, 2), "float32", "cpu", None, False), "float32[2, 2]"),
        (torch.eye(2).to_sparse_csr(), TensorMeta((2, 2), "float32", "cpu", None, False), "float32[2, 2]"),
        (torch.ones(2, 2).to_mkldnn(), TensorMeta((2, 2), "float32", "cpu", None, False), "float32[2, 2]"),
        (nested(), TensorMeta((2, -1, 3), "float32", "cpu", None, False), "float32[2, -1, 3]"),
        (nested(torch.jagged), TensorMeta((2, -1, 3), "float32", "cpu", None, False), "float32[2, -1, 3]"),
        (
            torch.ones(2).to(torch.float8_e4m3fn),
            TensorMeta((2,), "float8_e4m3fn", "cpu", (1,), False),
            "float8_e4m3fn[2]",
        ),
    ],
    ids=["plain", "transposed", "scalar", "grad", "meta", "coo", "csr", "mkldnn", "nested", "jagged", "float8"],
)
def test_tensor_meta(tensor: torch.Tensor, meta: TensorMeta, text: str) -> None:
    assert TensorMeta.of(tensor) == meta
    assert str(meta) == describe(tensor) == text


@pytest.mark.parametrize("value", [None, 3, "x", [torch.ones(2)], torch.float32], ids=repr)
def test_tensor_meta_of_another_value_is_none(value: Any) -> None:
    assert TensorMeta.of(value) is None
    assert nbytes(value) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("x", "'x'"),
        (None, "None"),
        ([], "[]"),
        ([torch.ones(2), 1], "[float32[2], 1]"),
        ((1, (2, [torch.ones(1)])), "[1, [2, [float32[1]]]]"),
        (list(range(5)), "[0, 1, 2, 3, ...]"),
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 59, f"'{'x' * 56}..."),
    ],
    ids=["number", "string", "none", "empty", "list", "inner lists", "long list", "60 characters", "61 characters"],
)
def test_describe(value: Any, text: str) -> None:
    assert describe(value) == text


def test_a_call_is_written_with_its_arguments() -> None:
    call = call_of(torch.ops.aten.mm.out, torch.ones(2, 3), torch.ones(3, 4), out=torch.empty(2, 4))
    assert str(call) == "aten::mm(float32[2, 3], float32[3, 4], float32[2, 4])"
    assert repr(call) == "<OpCall 0: aten::mm(float32[2, 3], float32[3, 4], float32[2, 4])>"


@pytest.mark.parametrize(
    ("gemm", "text"),
    [
        (Gemm(1, 2, 4, 3, ("float32",) * 2, (False, False)), "[2, 3] @ [3, 4]"),
        (Gemm(5, 2, 4, 3, ("float32",) * 2, (False, True)), "5x[2, 3] @ [3, 4]"),
        (Gemm(0, 2, 4, 3, ("float32",) * 2, (False, True)), "0x[2, 3] @ [3, 4]"),
    ],
    ids=["one", "batch", "empty batch"],
)
def test_a_gemm_is_written_as_a_product(gemm: Gemm, text: str) -> None:
    assert str(gemm) == text


def autocasts(function: Callable[[], Any], **options: Any) -> list[torch.dtype | None]:
    seen: list[torch.dtype | None] = []
    with intercept(lambda call: seen.append(call.autocast), **options):
        function()
    return seen


def product(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))


def test_an_interrupt_leaves_the_depth_of_autocast_as_it_was() -> None:
    call = call_of(torch.ops.aten.mm.default, torch.ones(2, 2), torch.ones(2, 2))
    left = 0  # instructions until the interrupt

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code is not autocast_below.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (left := left - 1) < 0:
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    for steps in range(1000):
        left = steps
        sys.settrace(interrupt)
        try:
            autocast_below(call)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(before)
        depth = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        assert depth == 0
    assert 5 < steps < 999


@each_engine
def test_autocast_inside_and_outside(engine: dict[str, Any]) -> None:
    assert autocasts(product, **engine) == [None]
    assert autocasts(lambda: product(torch.bfloat16), **engine) == [None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocasts(product, **engine) == [torch.bfloat16]
        with torch.autocast("cpu", enabled=False):
            assert autocasts(product, **engine) == [None]
        with torch.autocast("cpu", dtype=torch.float16):
            assert autocasts(product, **engine) == [torch.float16]
        assert autocasts(product, **engine) == [torch.bfloat16]
    assert autocasts(product, **engine) == [None]


def test_autocast_is_in_the_record_by_name() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [record] = records_of(product)
    assert record.autocast == "bfloat16"
    assert record.lhs is not None
    assert record.lhs.dtype == "bfloat16"


def test_disabled_autocast_is_none_for_operands_of_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
        assert autocasts(lambda: product(torch.bfloat16), level="function") == [None]


@pytest.mark.parametrize("engine", ["kernel", "mode"])
def test_autocast_is_none_for_an_operator_that_it_leaves_alone(engine: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocasts(lambda: product(torch.float64), engine=engine) == [None]
        vector = torch.mv(torch.ones(2, 2), torch.ones(2))
        assert vector.dtype == torch.float32
        assert autocasts(lambda: torch.mv(torch.ones(2, 2), torch.ones(2)), engine=engine) == [None]


def refuse_live_state(call: OpCall) -> None:
    for what, read in {"autocast": lambda: call.autocast, "record": call.record}.items():
        message = rf"{what} can only be read while the operator runs, .* call\.record"
        with pytest.raises(OpInterceptError, match=message):
            read()


@each_engine
def test_a_call_that_is_over_refuses_what_it_can_no_longer_read(engine: dict[str, Any]) -> None:
    kept: list[OpCall] = []
    with intercept(kept.append, **engine):
        torch.mm(torch.ones(2, 3), torch.ones(3, 4))
    [call] = kept
    refuse_live_state(call)
    assert call.gemm is not None
    assert call.gemm[:4] == (1, 2, 4, 3)
    assert (call.flops, call.bytes, call.phase, call.index, call.step) == (48, 104, "forward", 0, 0)
    assert call.lhs is call.args[0]
    assert torch.equal(call.output, torch.full((2, 4), 3.0))


def test_the_phase_of_a_kept_call_is_still_that_of_its_pass() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    kept: list[OpCall] = []
    with intercept(kept.append):
        (x @ torch.ones(3, 4)).sum().backward()
    assert [call.phase for call in kept] == ["forward", "backward"]


def test_a_call_that_an_error_hook_kept_is_over_too() -> None:
    kept: list[OpCall] = []

    class Keep:
        def error(self, call: OpCall, exception: BaseException) -> None:
            assert call.autocast is None
            kept.append(call)

    with intercept(Keep()), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    [call] = kept
    refuse_live_state(call)


def test_a_call_whose_hook_raised_is_over_too() -> None:
    kept: list[OpCall] = []

    def fail(call: OpCall) -> None:
        kept.append(call)
        raise ValueError("mine")

    with intercept(fail), pytest.raises(ValueError, match=r"^mine"):
        product()
    [call] = kept
    refuse_live_state(call)


def arguments_of(function: Callable[[], Any], **options: Any) -> tuple[list[str], dict[str, Any]]:
    """The names of the tensors of the only call, and its other arguments."""
    seen: list[tuple[list[str], dict[str, Any]]] = []
    with intercept(lambda call: seen.append((list(call.tensors), call.options)), **options):
        function()
    (found,) = seen
    return found


@each_engine
def test_tensors_are_named_by_role_and_the_rest_by_parameter(engine: dict[str, Any]) -> None:
    x = torch.ones(1, 1, 4, 8)
    mask = torch.zeros(4, 4)
    tensors, options = arguments_of(
        lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask, scale=0.5), **engine
    )
    assert tensors == ["lhs", "rhs", "value", "attn_mask"]
    assert options["scale"] == 0.5
    assert options["is_causal"] is False
    assert options["dropout_p"] == 0.0


@each_engine
def test_options_have_defaults(engine: dict[str, Any]) -> None:
    x = torch.ones(2, 2)
    found = arguments_of(lambda: torch.addmm(x, x, x, alpha=2), **engine)
    assert found == (["bias", "lhs", "rhs"], {"beta": 1, "alpha": 2})


def test_tensors_leave_out_those_that_are_only_written() -> None:
    x, out = torch.ones(2, 2), torch.empty(2, 2)
    assert arguments_of(lambda: torch.mm(x, x, out=out))[0] == ["lhs", "rhs"]
    assert arguments_of(lambda: out.addmm_(x, x))[0] == ["bias", "lhs", "rhs"]


def test_tensors_of_an_lstm_include_its_state() -> None:
    lstm = torch.nn.LSTM(3, 3)
    names, _ = arguments_of(lambda: lstm(torch.ones(2, 1, 3), (torch.ones(1, 1, 3), torch.ones(1, 1, 3))))
    assert {"lhs", "rhs", "hx_", "cx_"} <= set(names)


def test_names_of_tensors_in_lists_have_their_position() -> None:
    x = torch.ones(2, 2)
    names, _ = arguments_of(lambda: torch.linalg.multi_dot([x, x.clone(), x.clone()]), level="function")
    assert len(names) == 3
    names, _ = arguments_of(lambda: torch.einsum("ij,jk->ik", [x, x.clone()]), level="function")
    assert names == ["lhs", "rhs"]
