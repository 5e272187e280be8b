"""`RunRecorder` does not disturb the program: results, memory and odd tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded import ALL, calls_of, no_writer, same
from torch import Tensor, nn

from opintercept import hooks, intercept, runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_writer_left")]


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


def test_the_dispatch_table_is_clean_after_a_block_whose_writer_still_runs(tmp_path: Path) -> None:
    # The exit hooks of the first block may run before or after its kernels go. This writer's thread still runs.
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


def quantized() -> Any:
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


def mapped() -> Any:
    return torch.func.vmap(lambda v: v @ torch.ones(70, 70))(torch.randn(5, 70))


def transformed() -> Any:
    weight = torch.ones(4, 4)
    return torch.func.grad(lambda v: (v @ weight).sum())(torch.randn(3, 4))


def hessian() -> Any:
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
def test_odd_tensors_are_recorded(odd: str, level: str, tensors: Any, tmp_path: Path) -> None:
    expected = ODD[odd]()
    options: dict[str, Any] = {"engine": "mode"} if level == "mode" else {"level": level}
    recorder = hooks.Recorder()
    with intercept([recorder, runs.RunRecorder(tmp_path / "run", tensors)], **options):
        torch.manual_seed(0)
        got = ODD[odd]()
    assert type(got) is type(expected)
    stored = calls_of(tmp_path / "run")
    assert [call.record for call in stored] == recorder.records
    with intercept(runs.RunRecorder(tmp_path / "after", "full")):  # it reuses nothing of an odd tensor
        torch.ones(3, 4) @ torch.ones(4, 4)
    (after,) = calls_of(tmp_path / "after")
    assert after.values["lhs"].hash is not None
    assert after.tensors.keys() == {"lhs", "rhs", "output"}


def distributed() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))
    lhs: Any = DTensor.from_local(torch.ones(70, 70), mesh, [Shard(0)])
    rhs = DTensor.from_local(torch.ones(70, 70), mesh, [Replicate()])
    return (lhs @ rhs).to_local()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without it")
@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_distributed_tensors_are_recorded(level: Any, tmp_path: Path) -> None:
    store = torch._C._distributed_c10d.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        recorder = hooks.Recorder()
        with intercept([recorder, runs.RunRecorder(tmp_path / "run", "full")], level=level):
            assert torch.equal(distributed(), torch.full((70, 70), 70.0))
    finally:
        torch.distributed.destroy_process_group()
    with intercept(()):
        pass  # gloo's threads have ended, so the kernels can be removed
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
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


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


@pytest.mark.slow
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
