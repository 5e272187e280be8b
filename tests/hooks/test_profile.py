"""`Profile`: counts, work, totals by module and phase, and the audit of precisions."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devices import no_waits
from models import MODELS, inputs_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from opintercept import hooks, intercept
from opintercept.testing.plugin import OpCalls


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


def profiled(steps: int = 1) -> hooks.Profile:
    profile = hooks.Profile()
    net = Net()
    with intercept(profile):
        for _ in range(steps):
            net(torch.ones(2, 8)).sum().backward()
    return profile


def test_rows_are_by_module_operator_shape_dtype_and_phase() -> None:
    rows = profiled(steps=3).rows()
    assert {(r.module, r.op, r.shape, r.dtype, r.phase, r.calls, r.flops) for r in rows} == {
        ("body.0", "aten::addmm", "[2, 8] @ [8, 16]", "float32", "forward", 3, 3 * 512),
        ("body.2", "aten::addmm", "[2, 16] @ [16, 8]", "float32", "forward", 3, 3 * 512),
        ("head", "aten::addmm", "[2, 8] @ [8, 4]", "float32", "forward", 3, 3 * 128),
        ("head", "aten::mm", "[2, 4] @ [4, 8]", "float32", "backward", 3, 3 * 128),
        ("head", "aten::mm", "[4, 2] @ [2, 8]", "float32", "backward", 3, 3 * 128),
        ("body.2", "aten::mm", "[2, 8] @ [8, 16]", "float32", "backward", 3, 3 * 512),
        ("body.2", "aten::mm", "[8, 2] @ [2, 16]", "float32", "backward", 3, 3 * 512),
        ("body.0", "aten::mm", "[16, 2] @ [2, 8]", "float32", "backward", 3, 3 * 512),
    }
    for row in rows:
        assert row.seconds > 0
        assert row.flops is not None
        assert row.flops_per_second == row.flops / row.seconds
        assert row.bytes is not None
        assert row.intensity == row.flops / row.bytes
        assert row.precision == torch.get_float32_matmul_precision()


def test_an_operator_without_a_formula_shows_the_bytes_that_it_moves() -> None:
    profile = hooks.Profile()
    with intercept(profile, ops=("relu", "normal_", "view", "add_")):
        x = torch.randn(2, 8).relu().view(16)
        x += x.view(16)
    rows = [(row.op, row.shape, row.dtype, row.flops, row.bytes) for row in profile.rows()]
    assert rows == [
        ("aten::normal_", "[2, 8]", "float32", None, 64),
        ("aten::relu", "[2, 8]", "float32", None, 128),
        ("aten::view", "[16]", "float32", None, 0),
        ("aten::add_", "[16]", "float32", None, 192),
    ]
    assert all(line.endswith("B/s       ?") for line in str(profile).splitlines()[1:]), str(profile)


def test_totals_are_those_of_the_calls_in_a_module_and_its_submodules(op_calls: OpCalls) -> None:
    profile = profiled(steps=2)
    modules, phases = profile.by_module(), profile.by_phase()
    assert set(modules) == {"", "body", "body.0", "body.2", "head"}
    assert modules[""].seconds == pytest.approx(phases["forward"].seconds + phases["backward"].seconds)
    assert (modules[""].calls, modules[""].flops) == (op_calls.count, op_calls.flops)
    for name in ("body", "body.0", "body.2", "head"):
        inside = op_calls.filter(module=f"{name}*")
        assert (modules[name].calls, modules[name].flops) == (inside.count, inside.flops)
    for phase, total in phases.items():
        op_calls.expect(phase=phase, count=total.calls, max_flops=total.flops)


def test_opaque_operators_have_their_own_work() -> None:
    profile = hooks.Profile()
    q = torch.randn(1, 2, 8, 4)
    lstm = nn.LSTM(6, 5)
    with intercept(profile) as interceptor, torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        lstm(torch.randn(3, 2, 6))
    flops = {row.op: row.flops for row in profile.rows()}
    assert flops["aten::_scaled_dot_product_flash_attention_for_cpu"] == 2 * 2 * (2 * 8 * 8 * 4)
    assert flops["aten::mkldnn_rnn_layer"] == 2 * 3 * 2 * (4 * 5) * (6 + 5)
    assert sum(interceptor.opaque.values()) == 2


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_work_equals_what_the_flop_counter_counts(name: str) -> None:
    torch.manual_seed(3)
    model = MODELS[name]().train()
    inputs = inputs_of(model)

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            model(**inputs).loss.backward()

    profile = hooks.Profile()
    with intercept(profile):
        step()
    with FlopCounterMode(display=False) as counter:
        step()
    counted = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items() if "conv" not in str(op)}
    ours: dict[str, int] = {}
    for row in profile.rows():
        short = row.op.replace("::", ".")
        ours[short] = ours.get(short, 0) + (row.flops or 0)
    assert {op: flops for op, flops in ours.items() if op in counted} == counted
    assert sum(ours.values()) >= sum(counted.values())


def test_audit_finds_each_layer_outside_autocast() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cast, self.kept, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.cast(x)
            with torch.autocast("cpu", enabled=False):
                return self.other(self.kept(x.float()))

    net, profile = Half(), hooks.Profile()
    with intercept(profile):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(torch.randn(2, 8)).sum()
        loss.backward()
    assert profile.audit() == [
        f"{name}: aten::addmm ran in float32 while autocast cast others to bfloat16" for name in ("kept", "other")
    ]
    (row,) = (r for r in profile.rows() if (r.module, r.phase) == ("cast", "forward"))
    assert (row.dtype, row.autocast) == ("bfloat16", "bfloat16")


def test_audit_finds_a_backward_pass_in_another_dtype() -> None:
    class Coarse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return (grad.half() @ b.half().T).float(), (a.half().T @ grad.half()).float()

    coarse: Callable[..., Any] = Coarse.apply

    class Net(nn.Module):
        def forward(self, a: torch.Tensor) -> Any:
            return coarse(a, a)

    profile = hooks.Profile()
    with intercept(profile):
        Net()(torch.randn(3, 3, requires_grad=True)).sum().backward()
    assert profile.audit() == ["Net: forward in float32, backward in float16"]


def test_audit_of_a_consistent_run_is_empty() -> None:
    assert profiled().audit() == []


def test_the_table_has_one_line_per_row_slowest_first() -> None:
    profile = profiled()
    head, *lines = str(profile).splitlines()
    words = "module op shape dtype phase calls MFLOP MB ms share GFLOP/s FLOP/B"
    assert " ".join(head.split()) == words
    assert len(lines) == len(profile.rows())
    slowest = max(profile.rows(), key=lambda row: row.seconds)
    assert lines[0].split()[0] == slowest.module


def test_csv_has_every_row(tmp_path: Path) -> None:
    profile = profiled()
    profile.to_csv(tmp_path / "profile.csv")
    with open(tmp_path / "profile.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["module"], r["op"], int(r["flops"])) for r in rows] == [
        (r.module, r.op, r.flops) for r in profile.rows()
    ]


def test_a_failing_call_leaves_no_event_behind() -> None:
    profile = hooks.Profile()
    with intercept(profile), pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    assert profile.rows() == []
    assert not len(profile._started)


def take_for_cuda(monkeypatch: pytest.MonkeyPatch, *idle: bool) -> None:
    """Let calls run on a device that takes 2 ms for each, and that has done all before at some of them."""
    queries = iter(idle)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 2.0, query=lambda: next(queries)
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)


def test_a_call_without_a_left_operand_has_the_devices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of torch.compile have none, and lists neither."""
    take_for_cuda(monkeypatch, False)
    profile, a = hooks.Profile(), torch.ones(2, 2)
    with intercept(profile, ops=("_foreach_neg",), engine="mode"):
        torch._foreach_neg([a])
    assert [row.seconds for row in profile.rows()] == [0.002]


def test_time_of_a_device_that_waits_for_the_host_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_cuda(monkeypatch, True, False, False)
    profile, a, b = hooks.Profile(), torch.ones(2, 2), torch.ones(3, 3)
    with intercept(profile, engine="mode"):  # kernels in C++ know that these are on the CPU
        a @ a, a @ a, b @ b
        lines = str(profile).splitlines()
    assert [(row.calls, row.idle, row.seconds) for row in profile.rows()] == [(2, 1, 0.004), (1, 0, 0.002)]
    assert profile.by_phase()["forward"].idle == 1
    assert ["<=4.00" in line for line in lines] == [False, True, False]
    assert [">=" in line for line in lines] == [False, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_time_on_cuda_is_the_devices_and_no_call_waits() -> None:
    profile = hooks.Profile()
    a = torch.randn(512, 512, device="cuda")
    torch.mm(a, a)
    with no_waits(), intercept(profile):
        for _ in range(10):
            torch.mm(a, a)
    (row,) = profile.rows()
    assert row.calls == 10
    assert 0 < row.seconds < 1


def test_newer_precision_settings_are_read_beside_the_old_flags() -> None:
    onednn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, onednn.matmul)
    before = [backend.fp32_precision for backend in backends]
    profile = hooks.Profile()
    x = torch.ones(2, 2)
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        onednn.matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        with intercept(profile):
            x @ x
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value
    with intercept(profile):
        x @ x
    assert [row.precision for row in profile.rows()] == ["bf16", torch.get_float32_matmul_precision()]
