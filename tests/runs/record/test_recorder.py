"""What `RunRecorder` writes of each call, and what it writes with `flight`."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import PROGRAMS, Program
from recorded import ALL, calls_of, raw, record, run_script, same, tensor_of
from torch import Tensor, nn

from opintercept import hooks, intercept, runs
from opintercept.runs import open_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_writer_left")]


# What is written


@pytest.mark.parametrize("tensors", ["none", "sample"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_records_equal_those_of_recorder(program: Program, tensors: Any, tmp_path: Path) -> None:
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
def test_full_keeps_each_operand_as_it_was_before_the_call(program: Program, tmp_path: Path) -> None:
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
    seen: dict[tuple[int, str], Any] = {}
    for call in run.calls():
        for role in call.tensors:
            seen[call.record.index, role] = run.tensor(call, role)
    assert seen.keys() == copies.of.keys()
    for key, tensor in seen.items():
        assert same(tensor, copies.of[key]), key


def test_in_place_and_out_forms_have_the_values_from_before_the_operator(tmp_path: Path) -> None:
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
            assert tensor_of(run, call, role).max() == largest[role]


def test_calls_that_raise_are_recorded_with_their_operands(tmp_path: Path) -> None:
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
    for call in rest:  # there are more outputs than roles
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
    assert same(tensor_of(run, call, "rhs"), weight)
    assert torch.equal(weight.grad, torch.ones(2, 3).T @ torch.ones(2, 4))  # type: ignore[arg-type]


def test_an_argument_that_is_called_tensor_is_recorded(tmp_path: Path) -> None:
    weight = torch.empty(3, 4)
    with intercept(runs.RunRecorder(tmp_path / "run", "full"), level="function", ops="all"):
        torch.nn.init.kaiming_uniform_(weight)
    (call,) = calls_of(tmp_path / "run")
    assert call.given is not None
    assert {"tensor", "shape"} <= call.given["kwargs"]["tensor"].keys()


def test_samples_are_at_the_same_places_in_every_run(tmp_path: Path) -> None:
    values = torch.arange(1000.0).reshape(10, 100)
    found = []
    for name in ("a", "b"):
        with intercept(runs.RunRecorder(tmp_path / name, "sample", sample=16)):
            torch.mm(values if name == "a" else values.T.contiguous().T, torch.ones(100, 2))
        run = open_run(tmp_path / name)
        (call,) = run.calls()
        found.append(tensor_of(run, call))
        assert tensor_of(run, call, "output").shape == (16,)
    first, second = found
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


def test_full_keeps_all_arguments_of_the_call(tmp_path: Path) -> None:
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
def test_every_argument_other_than_a_tensor_is_recorded_by_name(tensors: Any, tmp_path: Path) -> None:
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


def test_arguments_of_a_function_are_recorded_at_function_level(tmp_path: Path) -> None:
    x = torch.ones(2, 3)
    with intercept(runs.RunRecorder(tmp_path / "run", "none"), level="function", ops="all"):
        F.linear(x, torch.ones(4, 3))
        torch.full((2, 3), 1j, dtype=torch.complex64, device="cpu")
        F.layer_norm(x, [3])
    of: dict[str, Any]
    of = {call.record.op.rpartition(".")[2]: call.arguments for call in calls_of(tmp_path / "run")}
    assert of["linear"] == {"bias": None}
    assert of["layer_norm"] == {"normalized_shape": [3], "weight": None, "bias": None, "eps": 1e-05}
    if "full" in of:  # only some versions of torch show factories, which take no tensor
        assert of["full"]["dtype"] == "torch.complex64"


@pytest.mark.parametrize("tensors", ["none", "stats", "full"])
def test_a_storage_among_the_arguments_is_not_looked_through(
    tensors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Weights that are loaded from a file are set to parts of one storage, a sequence of all bytes of the file.
    storage = torch.ones(256).untyped_storage()
    looked: list[Any] = []
    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", lambda *given: looked.append(given))
    with intercept([runs.RunRecorder(tmp_path, tensors), hooks.Recorder()], ops="all"):
        torch.empty(0).set_(storage)
    assert [call.record.op for call in open_run(tmp_path).calls()] == ["aten::set_"]
    assert not looked


def test_tensors_besides_the_operands_are_recorded_by_name(tmp_path: Path) -> None:
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
    assert same(tensor_of(run, attention, "attn_mask"), mask)
    # `hx_` and `cx_` with MKL-DNN, without it a list `hx`.
    states = {name: value.max for name, value in recurrent.values.items() if name.startswith(("hx", "cx"))}
    assert sorted(str(value) for value in states.values()) == ["1.0", "2.0"]
    assert set(states) <= set(recurrent.tensors)


def test_recording_needs_numpy() -> None:
    done = run_script(
        "sys.modules['numpy'] = None\ntry:\n    runs.RunRecorder\nexcept ImportError as missing:\n    print(missing)\n"
    )
    assert done.stdout == "RunRecorder needs numpy; pip install 'opintercept[cli]'\n"


@pytest.mark.parametrize("options", [{"tensors": "sample"}, {"tensors": "full"}, {"flight": 3}], ids=str)
def test_keeping_tensors_needs_safetensors(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"keeping tensors needs safetensors; pip install 'opintercept\[cli\]'"):
        runs.RunRecorder(tmp_path / "run", **options)
    record(tmp_path / "run")
    assert len(calls_of(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensors": "all"}, "tensors must be one of 'none', 'stats', 'sample', 'full', got 'all'"),
        ({"sample": 0}, "sample must be a whole number of at least 1, got 0"),
        ({"flight": 1.5}, "flight must be a whole number of at least 1, got 1.5"),
        ({"max_bytes": -1}, "max_bytes must be a whole number of at least 1, got -1"),
    ],
    ids=["tensors", "sample", "flight", "max_bytes"],
)
def test_wrong_options_are_refused_before_anything_is_made(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        runs.RunRecorder(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_run_json_says_how_it_was_made(tmp_path: Path) -> None:
    with intercept(runs.RunRecorder(tmp_path / "run", "sample")):
        during = open_run(tmp_path / "run").info
    after = open_run(tmp_path / "run").info
    assert (during.finished, after.finished) == (False, True)
    assert after.argv == tuple(sys.argv)
    assert after.tensors == "sample"
    assert after.versions["torch"] == torch.__version__
    assert after.flags["float32_matmul_precision"] == torch.get_float32_matmul_precision()


# Flight recorder


def test_run_json_has_the_settings_with_which_the_calls_were_made(tmp_path: Path) -> None:
    try:
        with intercept(runs.RunRecorder(tmp_path / "run")):  # as under `opintercept run`: before the program sets them
            torch.use_deterministic_algorithms(True)
            torch.eye(2) @ torch.eye(2)
            torch.use_deterministic_algorithms(False)
            torch.eye(3) @ torch.eye(3)
    finally:
        torch.use_deterministic_algorithms(False)
    run = open_run(tmp_path / "run")
    assert run.info.flags["deterministic_algorithms"] == "True"
    assert run.info.finished


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
    assert torch.equal(tensor_of(run, failed), torch.full((200, 3), 7.0))
    assert torch.equal(tensor_of(run, failed, "rhs"), torch.full((2, 3), 5.0))
    assert failed.given is not None


@pytest.mark.parametrize("kind", ["block", "decorator", "generator", "coroutine"])
def test_flight_is_written_however_the_block_is_left(kind: str, tmp_path: Path) -> None:
    block = intercept(runs.RunRecorder(tmp_path / "run", flight=2))

    def fail() -> None:
        torch.eye(2) @ torch.eye(2)
        raise ValueError("mine")

    def in_block() -> None:
        with block:
            fail()

    @block
    def generate() -> Iterator[None]:
        fail()
        yield

    @block
    async def work() -> None:
        fail()

    ways: dict[str, Callable[[], Any]] = {
        "block": in_block,
        "decorator": block(fail),
        "generator": lambda: next(generate()),
        "coroutine": lambda: asyncio.run(work()),
    }
    with pytest.raises(ValueError, match="mine"):
        try:
            raise KeyError("before")
        except KeyError:
            ways[kind]()
    assert len(calls_of(tmp_path / "run")) == 1


@pytest.mark.parametrize("tensors", ["full", "sample"])
def test_tensors_that_there_is_no_memory_to_copy_are_left_out(
    tensors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.ones(4, 4), torch.full((4, 4), 2.0)
    clone = Tensor.clone

    def refused(tensor: Tensor, **options: Any) -> Tensor:
        if tensor.numel() == x.numel():
            raise torch.OutOfMemoryError("none left")
        return clone(tensor, **options)

    text = "^RunRecorder leaves out tensors for which the device has no memory left; record fewer calls, or tensors="
    with (
        pytest.warns(match=text) as told,
        intercept(recorder := runs.RunRecorder(tmp_path / "run", tensors, sample=64)),
    ):
        monkeypatch.setattr(Tensor, "clone", refused)
        torch.mm(x, x[:, :3])
        x.addmm_(y, y)
        monkeypatch.undo()
        torch.mm(x, x)
    assert len(told) == 1
    first, second, last = open_run(recorder.path).calls()
    assert ([*first.tensors], [*second.tensors]) == (["rhs", "output"], [])
    assert (first.given, second.given) == (None, None)
    assert ({*second.values}, {*last.tensors}) == ({"lhs", "rhs", "output"}, {"lhs", "rhs", "output"})


# What is large


def test_of_many_equal_numbers_one_is_stored(tmp_path: Path) -> None:
    signs = torch.zeros(1 << 17)
    signs[5] = -0.0
    with intercept(runs.RunRecorder(tmp_path / "run", "full"), ops="all"):
        torch.full((1 << 10, 1 << 8), 0.5).sum()
        signs.sum()
    run = open_run(tmp_path / "run")
    first, second = (call for call in run.calls() if call.record.op == "aten::sum")
    assert same(tensor_of(run, first, "self"), torch.full((1 << 10, 1 << 8), 0.5))
    assert same(tensor_of(run, second, "self"), signs)
    stored = sum(file.stat().st_size for file in (tmp_path / "run" / "tensors").iterdir())
    assert 4 << 17 < stored < 5 << 17
    assert run.kept(0, first.tensors["self"]) == (1 << 18, "F32")


def test_views_of_what_is_large_store_nothing(tmp_path: Path) -> None:
    large = torch.randn(1 << 23)
    with intercept(runs.RunRecorder(tmp_path / "run", "full"), ops="all"):
        large.view(2, -1)[1, :4].sin()
    calls = {call.record.op: call for call in calls_of(tmp_path / "run")}
    assert calls["aten::view"].given is None
    assert calls["aten::sin"].given is not None
    assert sum(file.stat().st_size for file in (tmp_path / "run" / "tensors").iterdir()) < 1 << 16
