"""`RunRecorder` as a program uses it: what it writes is what ran, and the program is not disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from programs import PROGRAMS, Program
from torch import Tensor, nn

from opintercept import OpInterceptError, OpInterceptWarning, hooks, intercept, runs
from opintercept.runs import StoredCall, open_run, writer
from opintercept.runs import recorder as run_recorder

ALL = ("none", "stats", "sample", "full")


def calls_of(path: Path) -> list[StoredCall]:
    return list(open_run(path).calls())


def no_writer() -> bool:
    return not any(isinstance(thread, writer.Writer) for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert no_writer()


def same(one: Tensor, other: Tensor) -> bool:
    """To the bit, whatever the strides."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor: Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def run_script(code: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """In a Python of its own, whose start takes seconds."""
    head = "import os, sys, time, torch\nfrom opintercept import hooks, intercept, runs\n"
    command = [sys.executable, "-c", head + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def run_forked(program: Callable[[], Any]) -> int:
    """In a child; the exit status as a shell has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if not child:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            program()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


# What is written


@pytest.mark.parametrize("tensors", ["none", "sample"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_records_are_those_of_recorder(program: Program, tensors: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    function, inputs = program.make(), program.inputs()
    with program.context():
        expected = function(*[t.clone() for t in inputs])
        torch.manual_seed(3)
        expected = function(*[t.clone() for t in inputs])
        recorder = hooks.Recorder()
        torch.manual_seed(3)
        with intercept([recorder, runs.RunRecorder(tmp_path / "run", tensors)]):
            output = function(*inputs)
    stored = calls_of(tmp_path / "run")
    assert [call.record for call in stored] == recorder.records
    assert raw(output) == raw(expected)
    if tensors == "none":
        assert not any(call.values or call.tensors for call in stored)
    else:
        assert all("output" in call.values for call in stored)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_full_brings_back_what_each_operand_was_before_the_call(program: Program, tmp_path: Path) -> None:
    class Copies:
        def __init__(self) -> None:
            self.of: dict[tuple[int, str], Tensor] = {}

        def pre(self, call: Any) -> None:
            for role, tensor in call.tensors.items():
                self.keep(call, role, tensor)

        def post(self, call: Any) -> None:
            outputs = call.output if isinstance(call.output, (tuple, list)) else [call.output]
            for place, output in enumerate(outputs):
                self.keep(call, f"output.{place}" if place else "output", output)

        def keep(self, call: Any, role: str, tensor: Any) -> None:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                self.of[call.index, role] = tensor.detach().resolve_conj().resolve_neg().clone()

    copies = Copies()
    function, inputs = program.make(), program.inputs()
    with program.context(), intercept([copies, runs.RunRecorder(tmp_path / "run", "full")]):
        function(*inputs)
    run = open_run(tmp_path / "run")
    seen = {}
    for call in run.calls():
        for role in call.tensors:
            seen[call.record.index, role] = run.tensor(call, role)
    assert seen.keys() == copies.of.keys()
    for key, tensor in seen.items():
        assert same(tensor, copies.of[key]), key


def test_in_place_and_out_forms_have_the_values_before_the_operator(tmp_path: Path) -> None:
    lhs, rhs = torch.full((2, 2), 3.0), torch.eye(2)
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.ones(2, 2).addmm_(lhs, rhs)
        torch.ones(1, 2, 2).baddbmm_(lhs[None], rhs[None])
        out = torch.zeros(2, 2)
        torch.mm(lhs, rhs, out=out)
        both = torch.ones(2, 2)
        torch.addmm(both, lhs, rhs, out=both)
        torch.addmm(out, out, rhs, out=torch.empty(0))
    run = open_run(tmp_path / "run")
    found = [{role: value.max for role, value in call.values.items()} for call in run.calls()]
    assert found == [
        {"lhs": 3.0, "rhs": 1.0, "bias": 1.0, "output": 4.0},
        {"lhs": 3.0, "rhs": 1.0, "bias": 1.0, "output": 4.0},
        {"lhs": 3.0, "rhs": 1.0, "output": 3.0},
        {"lhs": 3.0, "rhs": 1.0, "bias": 1.0, "output": 4.0},
        {"lhs": 3.0, "rhs": 1.0, "bias": 3.0, "output": 6.0},
    ]
    for call, largest in zip(run.calls(), found, strict=True):
        for role in call.tensors:
            tensor = run.tensor(call, role)
            assert tensor is not None
            assert tensor.max() == largest[role]


def test_calls_that_raise_are_there_with_their_operands(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    failed, fine = calls_of(tmp_path / "run")
    assert failed.error is not None
    # torch 2.15 names the operator: "mm: mat1 and mat2 ..."
    assert re.search(r"RuntimeError: (mm: )?mat1 and mat2 shapes cannot be multiplied \(2x3 and 2x3\)", failed.error)
    assert (set(failed.values), failed.record.output, failed.record.elapsed) == ({"lhs", "rhs"}, None, None)
    assert failed.given is not None
    assert (fine.error, fine.record.index) == (None, 1)


def test_each_of_several_outputs_has_a_role(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 4, 8)
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        F.scaled_dot_product_attention(q, q, q)
        if hasattr(torch, "_foreach_mm"):
            torch._foreach_mm([torch.eye(2)] * 150, [torch.eye(2)] * 150)
    run = open_run(tmp_path / "run")
    attention, *rest = run.calls()
    assert {"output", "output.1"} <= set(attention.values)
    assert attention.values["output.1"].count == 8
    for call in rest:  # more than has roles
        assert len(call.record.output) == 150  # type: ignore[arg-type]
        assert "output.98" in call.values


def test_steps_phases_and_links_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    recorder = hooks.Recorder()
    with intercept([recorder, runs.RunRecorder(tmp_path / "run")]) as block:
        for _ in range(3):
            model(torch.randn(5, 4)).sum().backward()
            block.step()
    records = [call.record for call in calls_of(tmp_path / "run")]
    assert records == recorder.records
    assert {record.step for record in records} == {0, 1, 2}
    assert {record.phase for record in records} == {"forward", "backward"}
    assert any(record.forward is not None and record.grad_of == "rhs" for record in records)


def test_function_level_is_recorded_with_no_graph_of_its_own(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    with intercept(runs.RunRecorder(tmp_path / "run", "full"), level="function"):
        product = F.linear(torch.ones(2, 4), weight)
        product.sum().backward()
    run = open_run(tmp_path / "run")
    call, *_ = run.calls()
    assert call.record.op == "torch.nn.functional.linear"
    stored = run.tensor(call, "rhs")
    assert stored is not None
    assert same(stored, weight)
    assert torch.equal(weight.grad, torch.ones(2, 3).T @ torch.ones(2, 4))  # type: ignore[arg-type]


def test_samples_are_at_the_same_places_in_every_run(tmp_path: Path) -> None:
    values = torch.arange(1000.0).reshape(10, 100)
    found = []
    for name in ("a", "b"):
        with intercept(runs.RunRecorder(tmp_path / name, "sample", sample=16)):
            torch.mm(values if name == "a" else values.T.contiguous().T, torch.ones(100, 2))
        run = open_run(tmp_path / name)
        (call,) = run.calls()
        found.append(run.tensor(call, "lhs"))
        small = run.tensor(call, "output")
        assert small is not None
        assert small.shape == (16,)
    first, second = found
    assert first is not None
    assert second is not None
    assert first.shape == (16,)
    assert torch.equal(first, second)
    assert len(first.unique()) > 8


def test_each_content_is_stored_once(tmp_path: Path) -> None:
    weight, inputs = torch.randn(32, 32), torch.randn(8, 32)
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    for _ in range(2):
        with intercept(recorder):
            for _ in range(20):
                inputs.clone() @ weight
                inputs @ weight.t().contiguous().t()
                time.sleep(0)
    run = open_run(tmp_path / "run")
    assert len(calls_of(tmp_path / "run")) == 80
    names = {name for call in run.calls() for name in call.tensors.values()}
    assert len(names) == 3
    stored = sum(path.stat().st_size for path in (tmp_path / "run/tensors").iterdir())
    assert stored < 4 * (32 * 32 + 2 * 8 * 32) + 2000


def test_full_holds_all_that_the_call_was_given(tmp_path: Path) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        expected = torch.addmm(torch.ones(5), a, b, beta=0.5, alpha=2)
        q = torch.randn(1, 1, 4, 8)
        mask = torch.zeros(4, 4).tril()
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        a.t().conj() @ b[:3]
    run = open_run(tmp_path / "run")
    for call in run.calls():
        assert call.given is not None
    call = next(run.calls())
    assert call.given is not None

    def value(plain: Any) -> Any:
        return run.load(0, plain["tensor"]) if isinstance(plain, dict) else plain

    args = [value(plain) for plain in call.given["args"]]
    kwargs = {name: value(plain) for name, plain in call.given["kwargs"].items()}
    assert torch.equal(torch.addmm(*args, **kwargs), expected)


@pytest.mark.parametrize("tensors", ALL)
def test_every_argument_that_is_no_tensor_is_recorded_by_name(tensors: Any, tmp_path: Path) -> None:
    q = torch.randn(1, 2, 4, 8)
    with intercept(runs.RunRecorder(tmp_path / "run", tensors)):
        torch.mm(torch.eye(3), torch.eye(3))
        for _ in range(2):
            torch.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5), beta=0.5)
        torch.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5), alpha=-math.inf, beta=math.nan)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        F.scaled_dot_product_attention(q, q, q, scale=0.5)
    found = [call.arguments for call in calls_of(tmp_path / "run")]
    attention = {"dropout_p": 0.0, "attn_mask": None}
    assert found == [
        {},
        {"beta": 0.5, "alpha": 1},
        {"beta": 0.5, "alpha": 1},
        {"beta": "nan", "alpha": "-inf"},
        attention | {"is_causal": True, "scale": None},
        attention | {"is_causal": False, "scale": 0.5},
    ]


def test_arguments_of_a_function_are_recorded_with_those_that_have_no_tensor(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    with intercept(runs.RunRecorder(tmp_path / "run", "none"), level="function", ops="all"):
        F.linear(x, torch.ones(4, 3))
        torch.full((2, 3), 1j, dtype=torch.complex64, device="cpu")
        F.layer_norm(x, [3])
    of = {call.record.op.rpartition(".")[2]: call.arguments for call in calls_of(tmp_path / "run")}
    assert of["linear"] == {"bias": None}
    assert of["layer_norm"] == {"normalized_shape": [3], "weight": None, "bias": None, "eps": 1e-05}
    if "full" in of:  # factories take no tensor, and are seen by some versions of torch alone
        assert of["full"]["dtype"] == "torch.complex64"


def test_what_has_no_plain_form_is_left_out_of_the_arguments() -> None:
    class Call:
        options: ClassVar[dict[str, Any]] = {
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "layout": torch.strided,
            "value": 1 + 2j,
            "list": [1, (2.5, None), math.inf],
            "function": print,
            "generator": torch.Generator(),
            "mixed": [1, print],
            "big": 2**70,
            "long": [0] * 2000,
            "deep": [[[[0]]]],
        }

    assert json.loads(run_recorder._options(Call())) == {  # type: ignore[arg-type]
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "layout": "torch.strided",
        "value": "(1+2j)",
        "list": [1, [2.5, None], "inf"],
    }


def test_tensors_that_are_no_operands_are_recorded_by_name(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 4, 8)
    mask = torch.full((4, 4), -math.inf).triu(1)
    lstm = nn.LSTM(3, 5)
    state = (torch.ones(1, 2, 5), torch.full((1, 2, 5), 2.0))
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        lstm(torch.randn(4, 2, 3), state)
    run = open_run(tmp_path / "run")
    attention, recurrent = run.calls()
    assert attention.arguments == {"dropout_p": 0.0, "is_causal": False, "scale": None}
    assert (attention.values["attn_mask"].inf, attention.values["attn_mask"].nan) == (6, 0)
    stored = run.tensor(attention, "attn_mask")
    assert stored is not None
    assert same(stored, mask)
    # With MKL-DNN `hx_` and `cx_`, without a list `hx`.
    states = {name: value.max for name, value in recurrent.values.items() if name.startswith(("hx", "cx"))}
    assert sorted(str(value) for value in states.values()) == ["1.0", "2.0"]
    assert set(states) <= set(recurrent.tensors)


@pytest.mark.parametrize("tensors", ["stats", "sample"])
def test_a_mask_is_recorded_as_operands_are(tensors: Any, tmp_path: Path) -> None:
    q, mask = torch.randn(1, 2, 4, 8), torch.ones(4, 4, dtype=torch.bool).tril()
    with intercept(runs.RunRecorder(tmp_path / "run", tensors)):
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask.logical_not())
    masked, unmasked = calls_of(tmp_path / "run")
    assert masked.values["attn_mask"].hash != unmasked.values["attn_mask"].hash
    assert ("attn_mask" in masked.tensors) == (tensors == "sample")


# The program is not disturbed


def train(steps: int = 3) -> tuple[list[Tensor], Tensor, list[int]]:
    """Everything that recording could change."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.Dropout(0.2),
        nn.TransformerEncoderLayer(32, 2, 32, 0.1, batch_first=True),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = []
    for _ in range(steps):
        optimizer.zero_grad()
        output = model(torch.randn(4, 6, 16))
        output.square().mean().backward()
        kept += [output.detach().clone()] + [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    kept += [p.detach().clone() for p in model.parameters()]
    return kept, torch.get_rng_state(), [p._version for p in model.parameters()]


@pytest.mark.parametrize("tensors", ALL)
def test_training_is_the_same_to_the_bit(tensors: Any, tmp_path: Path) -> None:
    expected, state, versions = train()
    table = torch._C._dispatch_dump_table("aten::mm")
    with intercept(runs.RunRecorder(tmp_path / "run", tensors)):
        got, got_state, got_versions = train()
        assert torch._C._dispatch_dump_table("aten::mm") != table
        assert not no_writer()
    assert torch._C._dispatch_dump_table("aten::mm") == table
    assert torch.equal(state, got_state)
    assert versions == got_versions
    assert len(expected) == len(got)
    assert all(map(same, expected, got))


def test_the_dispatch_table_is_clean_after_an_exit_beside_a_living_writer(tmp_path: Path) -> None:
    # The first block's exit hooks may run before or after its kernels go; this one's thread is alive for sure.
    table = torch._C._dispatch_dump_table("aten::mm")
    recorder = runs.RunRecorder(tmp_path / "run")
    recorder.enter()
    try:
        with intercept(hooks.Recorder()):
            torch.eye(2) @ torch.eye(2)
        assert torch._C._dispatch_dump_table("aten::mm") == table
    finally:
        recorder.exit()


@pytest.mark.parametrize("tensors", ALL)
def test_gradients_are_stolen_not_copied(tensors: Any, tmp_path: Path) -> None:
    class Addresses:
        def __init__(self) -> None:
            self.of: set[int] = set()

        def post(self, call: Any) -> None:
            if call.phase == "backward":
                self.of.add(call.output.data_ptr())

    weight = torch.randn(64, 64, requires_grad=True)
    addresses = Addresses()
    with intercept([addresses, runs.RunRecorder(tmp_path / "run", tensors)]):
        torch.mm(weight, torch.randn(64, 8)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() in addresses.of


@pytest.mark.parametrize("tensors", ALL)
def test_no_tensor_is_kept_alive(tensors: Any, tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", tensors)):
        lhs, rhs = torch.randn(16, 16), torch.randn(16, 16)
        product = lhs @ rhs
        gone = [weakref.ref(tensor) for tensor in (lhs, rhs, product)]
        del lhs, rhs, product
        assert [ref() for ref in gone] == [None] * 3


def sparse() -> Tensor:
    return torch.eye(4).to_sparse() @ torch.randn(4, 4)


def quantized() -> Tensor:
    packed = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), None)
    x = torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.quint8)
    return torch.ops.quantized.linear(x, packed, 0.1, 0).dequantize()


def nested() -> Tensor:
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    return torch.matmul(parts, torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(3, 2)])).to_padded_tensor(0.0)


def jagged() -> Tensor:
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    return F.linear(parts, torch.ones(5, 3)).to_padded_tensor(0.0)


def fake() -> None:
    with torch._subclasses.FakeTensorMode():
        torch.ones(2, 3) @ torch.ones(3, 2)


def meta() -> None:
    torch.ones(2, 3, device="meta") @ torch.ones(3, 2, device="meta")


def mapped() -> Tensor:
    return torch.func.vmap(lambda v: v @ torch.ones(70, 70))(torch.randn(5, 70))


def transformed() -> Tensor:
    weight = torch.ones(4, 4)
    return torch.func.grad(lambda v: (v @ weight).sum())(torch.randn(3, 4))


def hessian() -> Tensor:
    return torch.func.hessian(lambda v: (v @ torch.ones(4, 4) @ v).sum())(torch.randn(4))


class Wrapper(torch.Tensor):
    """A subclass with every default."""


ODD: dict[str, Callable[[], Any]] = {
    "sparse": sparse,
    "quantized": quantized,
    "nested": nested,
    "jagged": jagged,
    "fake": fake,
    "meta": meta,
    "vmap": mapped,
    "grad": transformed,
    "hessian": hessian,
    "subclass": lambda: torch.ones(3, 3).as_subclass(Wrapper) @ torch.ones(3, 3),
    "parameter": lambda: nn.Parameter(torch.ones(3, 3)) @ torch.ones(3, 3),
    "empty": lambda: torch.ones(0, 3) @ torch.ones(3, 2),
    "inner empty": lambda: torch.ones(2, 0) @ torch.ones(0, 2),
    "0-dim": lambda: torch.dot(torch.ones(3), torch.ones(3)),
    "0-dim double": lambda: torch.dot(torch.ones(3).double(), torch.ones(3).double()),
    "complex": lambda: torch.vdot(torch.ones(3) * 1j, torch.ones(3) * 2j),
    "conj": lambda: torch.randn(3, 3, dtype=torch.complex64).conj() @ torch.randn(3, 3, dtype=torch.complex64).mH,
    "neg": lambda: torch.randn(3, 3, dtype=torch.complex64).conj().imag @ torch.randn(3, 3),
    "int": lambda: torch.ones(3, 3, dtype=torch.int64) @ torch.ones(3, 3, dtype=torch.int64),
    "uint8": lambda: torch.ones(3, 3, dtype=torch.uint8) @ torch.ones(3, 3, dtype=torch.uint8),
    "bool": lambda: torch.addmm(torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2)) > 1,
    "half": lambda: torch.full((3, 3), 6e4).half() @ torch.full((3, 3), 6e4).half(),
    "expanded": lambda: torch.ones(1, 1).expand(70, 70) @ torch.ones(70).expand(70, 70),
    "one of stride": lambda: torch.arange(8.0).double()[::2].view(4, 1)[:1] @ torch.ones(1, 1).double(),
    "tall": lambda: torch.ones(70000, 1) @ torch.ones(1, 1),
    "wide": lambda: torch.ones(1, 1) @ torch.ones(1, 70000),
    "inference": lambda: torch.inference_mode()(lambda: torch.ones(70, 70) @ torch.ones(70, 70))(),
    "not finite": lambda: torch.full((3, 3), float("inf")) @ torch.full((3, 3), float("nan")),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning", "ignore:.*quantized:UserWarning")
@pytest.mark.parametrize("tensors", ["sample", "full"])
@pytest.mark.parametrize("level", ["dispatch", "function", "mode"])
@pytest.mark.parametrize("odd", ODD)
def test_no_tensor_is_too_odd(odd: str, level: str, tensors: Any, tmp_path: Path) -> None:
    expected = ODD[odd]()
    options: dict[str, Any] = {"engine": "mode"} if level == "mode" else {"level": level}
    recorder = hooks.Recorder()
    with intercept([recorder, runs.RunRecorder(tmp_path / "run", tensors)], **options):
        torch.manual_seed(0)
        got = ODD[odd]()
    assert type(got) is type(expected)
    stored = calls_of(tmp_path / "run")
    assert [call.record for call in stored] == recorder.records
    with intercept(runs.RunRecorder(tmp_path / "after", "full")):  # nothing that an odd tensor left is used
        torch.ones(3, 4) @ torch.ones(4, 4)
    (after,) = calls_of(tmp_path / "after")
    assert after.values["lhs"].hash is not None
    assert after.tensors.keys() == {"lhs", "rhs", "output"}


def distributed() -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    lhs = DTensor.from_local(torch.ones(70, 70), mesh, [Shard(0)])
    rhs = DTensor.from_local(torch.ones(70, 70), mesh, [Replicate()])
    return (lhs @ rhs).to_local()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without it")
@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_distributed_tensors_are_no_obstacle(level: Any, tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        recorder = hooks.Recorder()
        with intercept([recorder, runs.RunRecorder(tmp_path / "run", "full")], level=level):
            assert torch.equal(distributed(), torch.full((70, 70), 70.0))
    finally:
        torch.distributed.destroy_process_group()
    with intercept(()):
        pass  # the kernels may go, gloo's threads are gone
    stored = calls_of(tmp_path / "run")
    assert [call.record for call in stored] == recorder.records
    assert stored


class Broken(torch.Tensor):
    """Refuses everything but matrix products."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("aminmax", "view", "clone", "contiguous", "sum"):
            raise AssertionError("mine")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_that_refuses_is_recorded_without_values(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full"), level="function"):
        torch.ones(70, 70).as_subclass(Broken) @ torch.ones(70, 70)
    (call,) = calls_of(tmp_path / "run")
    assert "rhs" in call.values


def test_a_filter_chooses_what_is_recorded(tmp_path: Path) -> None:
    with intercept(hooks.when(runs.RunRecorder(tmp_path / "run", "full"), op="bmm")):
        torch.eye(2) @ torch.eye(2)
        out = torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        out.baddbmm_(out, out)
        with pytest.raises(RuntimeError, match="size"):
            torch.bmm(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    assert [(call.record.op, call.error is None) for call in calls_of(tmp_path / "run")] == [
        ("aten::bmm", True),
        ("aten::bmm", False),
    ]


def test_compiled_graphs_are_recorded(tmp_path: Path) -> None:
    with torch._inductor.config.patch(compile_threads=1):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, y: torch.relu(x @ y) @ y)
        x, y = torch.randn(8, 8), torch.randn(8, 8)
        expected = compiled(x, y)
        with intercept(runs.RunRecorder(tmp_path / "run", "full")):
            got = compiled(x, y)
    assert torch.equal(expected, got)
    assert len(calls_of(tmp_path / "run")) == 2


def test_default_device_and_dtype_change_nothing(tmp_path: Path) -> None:
    x, y = torch.ones(70, 70), torch.ones(70, 70)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with intercept(runs.RunRecorder(tmp_path / "run", "sample")):
            x @ y
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    (call,) = calls_of(tmp_path / "run")
    assert call.values["output"].max == 70


# Blocks, threads, processes


def test_a_recorder_goes_on_in_its_run(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    block = intercept(recorder)
    for number in range(3):
        with block:
            torch.full((2, 2), number + 1.0) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    found = list(run.calls())
    assert [call.record.index for call in found] == [0, 1, 2]
    for number, call in enumerate(found):
        stored = run.tensor(call, "lhs")
        assert stored is not None
        assert stored[0, 0] == number + 1


def test_one_recorder_in_two_interceptors_at_once(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder, ops="mm"):
        with intercept(recorder, ops="bmm"):
            torch.eye(2) @ torch.eye(2)
            torch.bmm(torch.ones(1, 2, 2), torch.ones(1, 2, 2))
        torch.eye(2) @ torch.eye(2)
    assert [call.record.op for call in calls_of(tmp_path / "run")] == ["aten::mm", "aten::bmm", "aten::mm"]


def test_nested_interceptors_each_write_their_run(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "a", "full")):
        with intercept(runs.RunRecorder(tmp_path / "b", "full")):
            torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / "a")) == len(calls_of(tmp_path / "b")) == 1


def test_threads_of_one_block_lose_no_call(tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run", "full"), threads="all")

    def work(number: int) -> None:
        for i in range(200):
            torch.full((2, 2), number * 1000.0 + i) @ torch.eye(2)

    with block:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = open_run(tmp_path / "run")
    found = list(run.calls())
    assert sorted(call.record.index for call in found) == list(range(800))
    firsts = sorted(call.values["lhs"].max or 0.0 for call in found)
    assert firsts == sorted(number * 1000.0 + i for number in range(4) for i in range(200))
    for call in found[::50]:
        stored = run.tensor(call, "lhs")
        assert stored is not None
        assert stored[0, 0] == call.values["lhs"].max


def test_threads_with_blocks_of_their_own(tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run"))
    barrier = threading.Barrier(3)

    def work() -> None:
        with block:
            barrier.wait()
            for _ in range(100):
                torch.eye(2) @ torch.eye(2)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls_of(tmp_path / "run")) == 300
    with intercept(()):
        pass  # the kernels may go, the threads are gone


def test_decorated_generators_and_coroutines(tmp_path: Path) -> None:
    @intercept(runs.RunRecorder(tmp_path / "generator"))
    def generate() -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.eye(2) @ torch.eye(2)

    for _ in generate():
        torch.eye(3) @ torch.eye(3)  # not in its body

    @intercept(runs.RunRecorder(tmp_path / "async"))
    async def work() -> None:
        torch.eye(2) @ torch.eye(2)
        await asyncio.sleep(0)
        torch.eye(2) @ torch.eye(2)

    async def main() -> None:
        await asyncio.gather(work(), work())

    asyncio.run(main())
    for name, count in (("generator", 3), ("async", 4)):
        found = calls_of(tmp_path / name)
        assert [call.values["lhs"].count for call in found] == [4] * count


def test_a_signals_handler_may_run_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CALLS", 4)
    handled = []

    def handler(number: int, frame: Any) -> None:
        handled.append(torch.eye(2) @ torch.eye(2))

    old = signal.signal(signal.SIGALRM, handler)
    try:
        with intercept(runs.RunRecorder(tmp_path / "run", "none")):
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            end, made = time.monotonic() + 1.0, 0
            while time.monotonic() < end:
                torch.eye(2) @ torch.eye(2)
                made += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert len(handled) > 50
    assert made <= len(calls_of(tmp_path / "run")) <= made + len(handled)  # those that a hook was interrupted for, not


@forks
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_childs_calls_are_not_written(end: str, tmp_path: Path) -> None:
    if end == "sys.exit(0)":  # with exit handlers, which the child has from its parent
        program = f"""
recorder = runs.RunRecorder({str(tmp_path / "run")!r}, "full")
with intercept(recorder):
    torch.full((2, 2), 1.0) @ torch.eye(2)
    pid = os.fork()
    if not pid:
        torch.full((2, 2), 9.0) @ torch.eye(2)
        with intercept(recorder):
            torch.full((2, 2), 9.0) @ torch.eye(2)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    torch.full((2, 2), 2.0) @ torch.eye(2)
"""
        run_script(program)
    else:
        recorder = runs.RunRecorder(tmp_path / "run", "full")

        def child() -> None:
            assert recorder._writer is not None
            waiting = list(recorder._writer._waiting)
            torch.full((2, 2), 9.0) @ torch.eye(2)
            with intercept(recorder):
                torch.full((2, 2), 9.0) @ torch.eye(2)
            assert recorder._writer._waiting == waiting  # nobody is there to take them

        with intercept(recorder):
            torch.full((2, 2), 1.0) @ torch.eye(2)
            assert run_forked(child) == 0
            torch.full((2, 2), 2.0) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    assert [call.values["lhs"].max for call in run.calls()] == [1.0, 2.0]


@forks
def test_a_child_may_have_a_recorder_of_its_own(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")

    def child() -> None:
        with intercept(recorder):
            torch.ones(2, 2) @ torch.eye(2)

    assert run_forked(child) == 0
    assert len(calls_of(tmp_path / "run")) == 1


def test_ranks_write_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        with intercept(runs.RunRecorder(tmp_path / "run")):
            torch.full((2, 2), float(rank)) @ torch.eye(2)
    run = open_run(tmp_path / "run")
    assert run.ranks == (0, 1)
    assert [run.infos[rank].world_size for rank in run.ranks] == [2, 2]
    assert [call.values["lhs"].max for call in run.calls()] == [0.0, 1.0]
    assert [call.rank for call in run.calls(1)] == [1]


def record(
    monkeypatch: pytest.MonkeyPatch, path: Path, value: float, ranks: Any, world_size: int, **options: Any
) -> None:
    """Record a product of this value by these ranks of so many, one after the other."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in ranks:
        monkeypatch.setenv("RANK", str(rank))
        with intercept(runs.RunRecorder(path, "full", **options)):
            torch.full((2, 2), value) @ torch.eye(2)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


FILES = ["calls.jsonl", "run.json", "tensors/00000000.safetensors"]


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (4, 2), (2, 4)], ids=str)
def test_a_run_of_other_ranks_is_replaced_whole(
    old: int, new: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(old), old)
    record(monkeypatch, tmp_path, 2.0, reversed(range(new)), new, overwrite=True)
    run = open_run(tmp_path)
    assert run.ranks == tuple(range(new))
    assert [call.values["lhs"].max for call in run.calls()] == [2.0] * new
    parts = [f"rank{rank}/" for rank in range(new)] if new > 1 else [""]
    assert files_in(tmp_path) == [f"{part}{name}" for part in parts for name in FILES]


@pytest.mark.parametrize(("old", "rank"), [(1, 0), (1, 1), (4, 0), (4, 1)], ids=str)
def test_no_rank_adds_to_a_run_that_is_there(
    old: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(old)[-1:], old)
    later = files_in(tmp_path)
    with pytest.raises(ValueError, match=r"path must not have a run in it, got .*; name another folder, or pass"):
        record(monkeypatch, tmp_path, 2.0, [rank], 2)
    assert files_in(tmp_path) == later


def test_a_rank_that_comes_first_has_replaced_a_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, [0], 1)
    (tmp_path / "notes.txt").write_text("mine")
    record(monkeypatch, tmp_path, 2.0, [1], 2, overwrite=True)
    assert [call.values["lhs"].max for call in calls_of(tmp_path)] == [2.0]
    assert files_in(tmp_path) == ["notes.txt", *(f"rank1/{name}" for name in FILES)]


def test_ranks_of_a_run_before_are_left_out_where_no_new_one_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, 1.0, range(4), 4)
    with monkeypatch.context() as later:
        later.setattr("time.strftime", lambda form: "2126-01-01T00:00:00+0000")
        record(monkeypatch, tmp_path, 2.0, [1], 2, overwrite=True)
    with pytest.warns(OpInterceptWarning, match=r"ranks 0 in .* are of an older run, of 4 processes instead of 2"):
        run = open_run(tmp_path)
    assert [call.values["lhs"].max for call in run.calls()] == [2.0]
    assert run.ranks == (1,)


def test_no_rank_replaces_what_another_program_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1}')
    with pytest.raises(OpInterceptError, match="what is overwritten must be a run, got other files in"):
        record(monkeypatch, tmp_path, 2.0, [0], 2, overwrite=True)
    assert files_in(tmp_path) == ["run.json"]


def test_no_rank_deletes_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, tmp_path / "elsewhere", 1.0, [0], 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/rank7").symlink_to(tmp_path / "elsewhere")
    record(monkeypatch, tmp_path / "run", 2.0, [0, 1], 2, overwrite=True)
    assert open_run(tmp_path / "run").ranks == (0, 1)
    assert files_in(tmp_path / "elsewhere") == FILES


@pytest.mark.parametrize("rank", ["", "-1", "x", "²"])
def test_odd_ranks_in_the_environment_are_none(rank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.eye(2) @ torch.eye(2)
    assert open_run(tmp_path / "run").ranks == (0,)


# One recorder at a time


def starts_at_once(make: Callable[[], Any], number: int, answers: Path, *, threads: bool) -> list[str]:
    """What each of several simultaneous starts comes to; who runs goes on until all others have been refused."""

    def attempt(tell: Callable[[str], Any]) -> None:
        try:
            recorder = make()
            while time.time() < begin:
                pass
            recorder.enter()
        except (ValueError, OpInterceptError) as refused:
            (answers / str(threading.get_native_id())).touch()
            tell(str(refused))
            return
        while len(list(answers.iterdir())) < number - 1 and time.time() < begin + 20:
            time.sleep(0.01)
        recorder.exit()
        tell("ran")

    answers.mkdir()
    begin = time.time() + 0.05
    told: list[str] = []
    if threads:
        running = [threading.Thread(target=attempt, args=(told.append,)) for _ in range(number)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return told
    pipes = []
    for _ in range(number):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            try:
                attempt(lambda text, writing=writing: os.write(writing, text.encode()))  # type: ignore[misc]
            finally:
                os._exit(0)
        os.close(writing)
        pipes.append((child, reading))
    for child, reading in pipes:
        os.waitpid(child, 0)
        told.append(os.read(reading, 4096).decode())
        os.close(reading)
    return told


REFUSED = (
    r"path must be written by one recorder at a time, got .* writes; name another folder"
    r"|path must not have a run in it, got .*; name another folder, or pass overwrite=True"
)


@forks
@pytest.mark.parametrize("before", ["nothing", "a run", "a run of a process that was killed"])
@pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])
def test_of_simultaneous_starts_one_runs_and_the_others_are_refused(threads: bool, before: str, tmp_path: Path) -> None:
    for turn in range(10):
        path = tmp_path / str(turn)

        def is_killed(path: Path = path) -> None:
            runs.RunRecorder(path).enter()
            os.kill(os.getpid(), signal.SIGKILL)

        if before == "a run":
            with intercept(runs.RunRecorder(path)):
                pass
        elif before != "nothing":
            assert run_forked(is_killed) == -signal.SIGKILL
            assert (path / "recording.lock").exists()

        def make(path: Path = path) -> runs.RunRecorder:
            return runs.RunRecorder(path, overwrite=before != "nothing")

        told = starts_at_once(make, 3, tmp_path / f"answers{turn}", threads=threads)
        assert sorted(text == "ran" for text in told) == [False, False, True]
        for text in told:
            assert text == "ran" or re.fullmatch(REFUSED, text)
        assert open_run(path).info.finished
        assert sorted(entry.name for entry in path.iterdir()) == ["calls.jsonl", "run.json"]


def test_a_folder_that_is_written_to_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.eye(2) @ torch.eye(2)
        with pytest.raises(OpInterceptError, match=REFUSED):
            runs.RunRecorder(tmp_path / "run", overwrite=True).enter()
        with monkeypatch.context() as ranks:  # one of several processes would take it for an older run
            ranks.setenv("RANK", "1")
            ranks.setenv("WORLD_SIZE", "2")
            with pytest.raises(OpInterceptError, match=REFUSED):
                runs.RunRecorder(tmp_path / "run", overwrite=True).enter()
        torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / "run")) == 2
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        pass
    assert calls_of(tmp_path / "run") == []


def claim_elsewhere(folder: Path) -> None:
    """As a recorder on another machine has left it, which may or may not go on."""
    folder.mkdir(exist_ok=True)
    (folder / "recording.lock").write_text('{"pid": 1, "host": "elsewhere", "began": "1", "token": "x", "space": ""}')


def test_a_recorder_on_another_machine_is_ended_only_if_asked(tmp_path: Path) -> None:
    claim_elsewhere(tmp_path)
    with pytest.raises(OpInterceptError, match=r"to which process 1 on 'elsewhere' writes; .* if that has ended"):
        runs.RunRecorder(tmp_path).enter()
    with intercept(runs.RunRecorder(tmp_path, overwrite=True)):
        torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path)) == 1


def test_a_recorder_that_is_ended_from_elsewhere_says_so_and_leaves_the_folder_alone(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    with pytest.warns(OpInterceptWarning, match=r"has stopped after 0 calls: the folder was deleted or taken over by"):
        with intercept(recorder):
            writer.remove_run(tmp_path / "run", claimed=True)
            claim_elsewhere(tmp_path / "run")
            (tmp_path / "run/run.json").write_text("another's")
            torch.eye(2) @ torch.eye(2)
    with intercept(recorder):  # it has stopped for good
        torch.eye(2) @ torch.eye(2)
    assert files_in(tmp_path / "run") == ["recording.lock", "run.json"]
    assert (tmp_path / "run/run.json").read_text() == "another's"


@pytest.mark.parametrize("what", ["tensors", ".", "calls.jsonl"])
def test_files_that_are_deleted_during_the_run_are_told(what: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.warns(OpInterceptWarning, match=r"has stopped after 1 calls: .* (was|were) deleted"):
        with intercept(runs.RunRecorder(path, "full")):
            torch.eye(2) @ torch.eye(2)
            while not (path / "calls.jsonl").stat().st_size:
                time.sleep(0.05)
            (path if what == "." else path / what).rename(tmp_path / "gone")
            torch.eye(3) @ torch.eye(3)
    if what != ".":
        assert not open_run(path).info.finished
    assert not (path / "recording.lock").exists()


def test_a_recorder_does_not_go_on_in_the_run_of_another(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run")
    with intercept(recorder):
        torch.eye(2) @ torch.eye(2)
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        pass
    with pytest.raises(OpInterceptError, match="path must hold the run that this recorder has begun, got another or"):
        with intercept(recorder):
            pytest.fail("entered")


@pytest.mark.parametrize("missing", ["numpy", "safetensors.torch"])
@pytest.mark.parametrize("options", [{"tensors": "sample"}, {"tensors": "full"}, {"flight": 3}], ids=str)
def test_tensors_are_not_kept_without_what_stores_them(
    options: dict[str, Any], missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    needs = f"keeping tensors needs {missing.partition('.')[0]}, got none; "
    with pytest.raises(ImportError, match=rf"{needs}pip install 'opintercept\[cli\]'"):
        runs.RunRecorder(tmp_path / "run", **options)
    with intercept(runs.RunRecorder(tmp_path / "run")):
        torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / "run")) == 1


# Folders


@pytest.mark.parametrize("name", ["run", "a b", "ü\n%s{}", "deep/er/run", "-rf", "rank0"])
def test_any_name_will_do(name: str, tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / name)):
        torch.eye(2) @ torch.eye(2)
    assert len(calls_of(tmp_path / name)) == 1


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.eye(2) @ torch.eye(2)
    with pytest.raises(ValueError, match=r"path must not have a run in it, got .*run'; name another folder, or pass"):
        runs.RunRecorder(tmp_path / "run")
    later = runs.RunRecorder(tmp_path / "other")
    with intercept(runs.RunRecorder(tmp_path / "other")):
        pass
    with pytest.raises(ValueError, match="path must not have a run in it"):
        with intercept(later):
            pytest.fail("entered")
    (tmp_path / "run/notes.txt").write_text("mine")
    (tmp_path / "run/tensors/mine.safetensors").write_text("mine")
    again = runs.RunRecorder(tmp_path / "run", "none", overwrite=True)
    assert len(calls_of(tmp_path / "run")) == 1  # until it is entered
    for _ in range(2):
        with intercept(again):
            torch.eye(3) @ torch.eye(3)
    assert [call.values for call in calls_of(tmp_path / "run")] == [{}, {}]
    assert sorted(path.name for path in (tmp_path / "run").rglob("*") if path.is_file()) == [
        "calls.jsonl",
        "mine.safetensors",
        "notes.txt",
        "run.json",
    ]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_is_left_alone(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/calls.csv").write_text("mine")
    with pytest.raises(ValueError, match="path must be a new or an empty folder, or a run, got"):
        runs.RunRecorder(tmp_path / "run", overwrite=overwrite)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["calls.csv"]


def test_the_run_json_of_another_program_is_left_alone(tmp_path: Path) -> None:
    for name in ("run.json", "tensors/00000000.safetensors", "calls.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"schema": 1}')
    with pytest.raises(OpInterceptError, match="what is overwritten must be a run, got other files in"):
        with intercept(runs.RunRecorder(tmp_path, overwrite=True)):
            pytest.fail("entered")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "full")):
        torch.eye(2) @ torch.eye(2)
    (tmp_path / "run/tensors").rename(tmp_path / "elsewhere")
    (tmp_path / "run/tensors").symlink_to(tmp_path / "elsewhere")
    with intercept(runs.RunRecorder(tmp_path / "run", overwrite=True)):
        pass
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["00000000.safetensors"]


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"tensors": "all"}, ValueError, "tensors must be one of 'none', 'stats', 'sample', 'full', got 'all'"),
        ({"sample": 0}, ValueError, "sample must be a whole number of at least 1, got 0"),
        ({"flight": 1.5}, ValueError, "flight must be a whole number of at least 1, got 1.5"),
        ({"max_bytes": -1}, ValueError, "max_bytes must be a whole number of at least 1, got -1"),
    ],
    ids=["tensors", "sample", "flight", "max_bytes"],
)
def test_wrong_options_are_refused_before_anything_is_made(
    options: dict[str, Any], kind: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=match):
        runs.RunRecorder(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_an_error_on_entry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = runs.RunRecorder(tmp_path / "file/run")
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        with intercept(recorder):
            pytest.fail("entered")


def test_run_json_says_how_it_was_made(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "sample")):
        during = open_run(tmp_path / "run").info
    after = open_run(tmp_path / "run").info
    assert (during.finished, after.finished) == (False, True)
    assert after.argv == tuple(sys.argv)
    assert after.tensors == "sample"
    assert after.versions["torch"] == torch.__version__
    assert after.flags["float32_matmul_precision"] == torch.get_float32_matmul_precision()


# The end


def test_max_bytes_is_kept_with_one_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with intercept(runs.RunRecorder(tmp_path / "run", "full", max_bytes=100_000)):
            for _ in range(100):
                torch.randn(32, 32) @ torch.randn(32, 32)
    messages = [str(w.message) for w in caught if w.category is OpInterceptWarning]
    assert len(messages) == 1
    assert "has stopped after" in messages[0]
    assert "max_bytes=100000" in messages[0]
    assert 50_000 < sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 100_000
    run = open_run(tmp_path / "run")
    assert not run.info.finished
    for call in run.calls():
        assert run.tensor(call, "output") is not None


@forks
def test_a_full_disk_stops_the_recording_and_not_the_program(tmp_path: Path) -> None:
    def child() -> None:
        # No file may grow beyond that, which fails like a full disk does.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with intercept(runs.RunRecorder(tmp_path / "run", "none")):
                for i in range(3000):
                    torch.eye(2) @ torch.eye(2)
                    if i % 512 == 511:
                        time.sleep(0.02)
        (tmp_path / "told").write_text("\n".join(str(warning.message) for warning in caught))

    assert run_forked(child) == 0
    found = calls_of(tmp_path / "run")  # whole lines, no warning
    assert [call.record.index for call in found] == list(range(len(found)))
    assert 100 < len(found) < 3000
    (told,) = (tmp_path / "told").read_text().splitlines()
    assert f"has stopped after {len(found)} calls: OSError: [Errno 27] File too large" in told


@pytest.mark.parametrize("fails", ["_save", "_append"])
def test_a_disk_that_fails_is_told_once(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", "full")
    with intercept(recorder):
        torch.eye(2) @ torch.eye(2)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer.Writer, fails, full)
    with pytest.warns(OpInterceptWarning, match=r"has stopped after 1 calls: OSError: \[Errno 28\] No space") as caught:
        for _ in range(3):
            with intercept(recorder):
                torch.eye(3) @ torch.eye(3)
    assert len(caught) == 1
    monkeypatch.undo()
    assert len(calls_of(tmp_path / "run")) == 1
    assert not open_run(tmp_path / "run").info.finished


@forks
def test_a_killed_program_leaves_all_but_the_last_interval(tmp_path: Path) -> None:
    def child() -> None:
        with intercept(runs.RunRecorder(tmp_path / "run", "full")):
            for wait in (1.7, 0.0):
                for i in range(100):
                    torch.full((2, 2), float(i)) @ torch.eye(2)
                time.sleep(wait)
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(child) == -signal.SIGKILL
    run = open_run(tmp_path / "run")
    assert not run.info.finished
    found = list(run.calls())
    assert len(found) >= 100
    for call in found:
        stored = run.tensor(call, "lhs")
        assert stored is not None
        assert stored[0, 0] == float(call.record.index % 100)


@forks
def test_a_program_killed_at_any_time_can_be_read(tmp_path: Path) -> None:
    for name in range(8):

        def child(path: Path = tmp_path / str(name)) -> None:
            writer._INTERVAL = 0.001
            with intercept(runs.RunRecorder(path, "full")):
                while True:
                    torch.randn(8, 8) @ torch.eye(8)

        pid = os.fork()
        if not pid:
            child()
        time.sleep(0.2 + 0.03 * name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        run = open_run(tmp_path / str(name))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OpInterceptWarning)  # a torn line
            found = list(run.calls())
        assert found
        for call in found:
            for role in call.tensors:
                assert run.tensor(call, role) is not None


ENDS: dict[str, tuple[Callable[[], Any], int]] = {
    "sys.exit": (lambda: sys.exit(3), 3),
    "an exception": (lambda: [].pop(), 1),
    "an interrupt": (lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(5)), 130),
}


@forks
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_inside_the_block(end: str, tmp_path: Path) -> None:
    program, status = ENDS[end]

    def child() -> None:
        with intercept(runs.RunRecorder(tmp_path / "run")):
            torch.eye(2) @ torch.eye(2)
            program()

    assert run_forked(child) == status
    assert open_run(tmp_path / "run").info.finished
    assert len(calls_of(tmp_path / "run")) == 1


def test_a_block_that_is_never_left_is_written_at_the_end(tmp_path: Path) -> None:
    code = f"""
import atexit
block = intercept(runs.RunRecorder({str(tmp_path / "run")!r}))
def last():
    torch.eye(3) @ torch.eye(3)
atexit.register(last)  # runs after the recorder's own
block.__enter__()
torch.eye(2) @ torch.eye(2)
atexit.register(last)
"""
    done = run_script(code)
    assert done.stderr == ""
    assert open_run(tmp_path / "run").info.finished
    assert [call.values["lhs"].count for call in calls_of(tmp_path / "run")] == [4, 9]


def test_an_interrupt_while_the_rest_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = writer.Writer._write

    def slow(self: Any, batch: Any) -> None:
        time.sleep(0.3)
        write(self, batch)

    monkeypatch.setattr(writer.Writer, "_write", slow)
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    recorder = runs.RunRecorder(tmp_path / "run")
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            with intercept(recorder):
                torch.eye(2) @ torch.eye(2)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    recorder._stop()  # as at the end of the program
    assert open_run(tmp_path / "run").info.finished
    assert len(calls_of(tmp_path / "run")) == 1


def test_a_slow_disk_makes_the_program_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CALLS", 8)
    write, most = writer.Writer._write, []

    def slow(self: Any, batch: Any) -> None:
        time.sleep(0.05)
        most.append(len(self._waiting))
        write(self, batch)

    monkeypatch.setattr(writer.Writer, "_write", slow)
    started = time.monotonic()
    with intercept(runs.RunRecorder(tmp_path / "run"), threads="all"):
        threads = [threading.Thread(target=lambda: [torch.eye(2) @ torch.eye(2) for _ in range(150)]) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert time.monotonic() - started > 0.5
    assert max(most) <= 8 * writer._QUEUED
    assert len(calls_of(tmp_path / "run")) == 450


# Interrupts


@pytest.mark.parametrize("tensors", ["stats", "full"])
def test_an_interrupt_inside_the_recorder_mixes_no_calls(tensors: Any, tmp_path: Path) -> None:
    interrupts = pytest.importorskip("interrupts")

    def program() -> None:
        for size in range(2, 6):
            lhs = torch.full((size, size), float(size))
            torch.addmm(torch.full((size,), 100.0 * size), lhs, torch.eye(size), alpha=size)
            lhs.addmm_(torch.eye(size), torch.eye(size), beta=size)

    recorder = runs.RunRecorder(tmp_path / "run", tensors)
    assert interrupts.interrupt(recorder, program, lambda: None) > 0
    assert not len(recorder._before)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    for call in run.calls():
        assert call.record.rhs is not None
        size = call.record.rhs.shape[0]
        in_place = call.record.func == "aten.addmm_.default"
        assert call.arguments == ({"beta": size, "alpha": 1} if in_place else {"beta": 1, "alpha": size})
        found = {role: values.max for role, values in call.values.items()}
        if in_place:
            assert found == {"lhs": 1.0, "rhs": 1.0, "bias": size, "output": size**2 + 1.0}
        else:
            assert found == {"lhs": size, "rhs": 1.0, "bias": 100.0 * size, "output": 100.0 * size + size**2}
        for role in call.tensors:
            stored = run.tensor(call, role)
            assert stored is not None
            assert stored.max() == found[role]


# Flight recorder


def test_flight_writes_nothing_where_all_goes_well(tmp_path: Path) -> None:
    recorder = runs.RunRecorder(tmp_path / "run", flight=3)
    with intercept(recorder):
        torch.eye(2) @ torch.eye(2)
        with contextlib.suppress(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)
    try:
        raise ValueError("before")
    except ValueError:
        with intercept(recorder):
            torch.eye(2) @ torch.eye(2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tensors", ALL)
def test_flight_writes_the_last_calls_and_the_operands_of_the_one_that_raised(tensors: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with intercept(runs.RunRecorder(tmp_path / "run", tensors, flight=3)):
            for _ in range(10):
                torch.eye(2) @ torch.eye(2)
            torch.full((200, 3), 7.0) @ torch.full((2, 3), 5.0)
    run = open_run(tmp_path / "run")
    assert run.info.finished
    *before, failed = run.calls()
    assert [call.record.index for call in before] == [8, 9]
    assert failed.error is not None
    lhs, rhs = run.tensor(failed, "lhs"), run.tensor(failed, "rhs")
    assert lhs is not None
    assert rhs is not None
    assert torch.equal(lhs, torch.full((200, 3), 7.0))
    assert torch.equal(rhs, torch.full((2, 3), 5.0))
    assert failed.given is not None


@pytest.mark.parametrize("kind", ["block", "decorator", "generator", "coroutine"])
def test_flight_is_written_however_the_block_is_left(kind: str, tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run", flight=2))

    def fail() -> None:
        torch.eye(2) @ torch.eye(2)
        raise ValueError("mine")

    def run() -> None:
        if kind == "block":
            with block:
                fail()
        elif kind == "decorator":
            block(fail)()
        elif kind == "generator":

            @block
            def generate() -> Iterator[None]:
                fail()
                yield

            next(generate())
        else:

            @block
            async def work() -> None:
                fail()

            asyncio.run(work())

    with pytest.raises(ValueError, match="mine"):
        try:
            raise KeyError("before")
        except KeyError:
            run()
    assert len(calls_of(tmp_path / "run")) == 1
