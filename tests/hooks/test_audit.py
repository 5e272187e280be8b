"""`Audit` against what runs in each program, and how it reads kernels of a device from events that are made here."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
import sysconfig
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler import BELOW_FUNCTIONS, needs_compiler, needs_ninja, with_pybind
from processes import run_python
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from opintercept import OpInterceptError, hooks, intercept
from opintercept._engines.profiled.records import COLLECTING, Unseen, read

# A kernel that no operator holds: it takes addresses.
FOREIGN = """
#include <Python.h>
static PyObject* scale(PyObject*, PyObject* args) {
  Py_ssize_t from, to, count;
  if (!PyArg_ParseTuple(args, "nnn", &from, &to, &count)) return nullptr;
  for (Py_ssize_t i = 0; i < count; i++) ((float*)to)[i] = 2 * ((float*)from)[i];
  Py_RETURN_NONE;
}
static PyMethodDef methods[] = {{"scale", scale, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "foreign", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_foreign() { return PyModule_Create(&module); }
"""


def audited(program: Callable[[], object], ops: Any = "all", **options: Any) -> hooks.Audit:
    """What an audit says of a program that has run before."""
    program()
    audit = hooks.Audit()
    with intercept(audit, ops=ops, **options):
        program()
    return audit


def names(audit: hooks.Audit) -> dict[str, int]:
    return {row.name: row.launches for row in audit.rows()}


def check_sum(audit: hooks.Audit) -> None:
    assert audit.share is not None
    outside = sum(row.seconds for row in audit.rows())
    assert audit.share * audit.seconds + outside == pytest.approx(audit.seconds, rel=1e-9)  # sums of floats


def step() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model(torch.randn(2, 8)).sum().backward()


@pytest.mark.parametrize("options", BELOW_FUNCTIONS)
def test_all_that_computes_in_a_training_step_is_seen(options: dict[str, Any]) -> None:
    audit = audited(step, **options)
    check_sum(audit)
    # What makes memory without writing to it, and what kernels in Python leave out.
    assert names(audit).keys() <= {"aten::empty", "aten::empty_strided", "aten::detach", "aten::to"}
    assert audit.calls > 20


def test_operators_that_a_block_does_not_watch_are_listed_with_their_launches() -> None:
    x = torch.ones(20, 20)

    def program() -> None:
        for _ in range(5):
            (x @ x).mul(x)
        nn.functional.linear(x, x).cumsum(0)  # `linear` is counted by its parts, of which `t` has parts, too

    audit = audited(program, "matmul")
    check_sum(audit)
    assert audit.calls == 6
    assert names(audit).items() >= {"aten::mul": 5, "aten::cumsum": 1}.items()
    views = {"aten::t", "aten::to", "aten::transpose", "aten::as_strided"}
    assert names(audit).keys() <= {"aten::mul", "aten::cumsum"} | views
    assert {(row.kind, row.within) for row in audit.rows()} == {("operator", "")}
    whole = audited(program)
    assert names(whole) == {}
    assert whole.share == 1.0


def test_operators_under_vmap_count_by_what_runs_in_their_place() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def program() -> None:
        torch.func.vmap(torch.func.grad(lambda x: net(x).sum()))(torch.ones(5, 4))

    audit = audited(program)
    check_sum(audit)
    assert names(audit).keys().isdisjoint(["aten::mm", "aten::tanh", "aten::tanh_backward", "aten::unsqueeze"])
    products = audited(program, ops="matmul")
    check_sum(products)
    assert "aten::mm" not in names(products)
    assert names(products)["aten::tanh"] > 0  # no other operator has run in its place that was seen


def test_the_collector_of_garbage_is_no_part_of_an_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    host, _, compiling = read([Event(0, 100, "aten::mul"), Event(10, 80, COLLECTING)], False)
    assert (host.rest, compiling) == ({Unseen("aten::mul", "operator", ""): (1, 20)}, 0)
    marked: list[str] = []

    def listed(events: Any, *others: Any) -> Any:
        marked.extend(event.name() for event in events)
        return read(events, *others)

    monkeypatch.setattr("opintercept._engines.profiled.profiler.read", listed)
    with intercept(hooks.Audit()):
        gc.collect()
    assert COLLECTING in marked
    assert not any("opintercept" in getattr(each, "__module__", "") for each in gc.callbacks)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.cpp").write_text(FOREIGN)
    include = sysconfig.get_path("include", "posix_prefix")
    built = folder / "foreign.so"
    options = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    command = ["c++", "-O1", "-shared", "-fPIC", f"-I{include}", *options, "-o", str(built)]
    with_torch = [f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed" if not options else "", "-lc10"]
    subprocess.run([*command, str(folder / "foreign.cpp"), *filter(None, with_torch)], check=True)
    spec = importlib.util.spec_from_file_location("foreign", built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_compiler
def test_a_kernel_that_is_no_operator_is_named(foreign: Any) -> None:
    x, y = torch.ones(300, 300), torch.empty(300, 300)

    def program() -> None:
        for _ in range(3):
            foreign.scale(x.data_ptr(), y.data_ptr(), x.numel())
        y.add(x)

    audit = audited(program)
    check_sum(audit)
    (row,) = audit.rows()
    assert (row.name, row.kind, row.launches) == ("foreign.scale", "function", 3)
    assert "foreign.scale" in str(audit)
    assert audit.calls == 1


@needs_compiler
def test_a_function_whose_module_is_no_name_is_called_as_ever(foreign: Any) -> None:
    x, y, named = torch.ones(100), torch.empty(100), foreign.scale.__module__
    try:
        for module in (foreign, ["foreign"], 3):  # the first is what psutil writes
            foreign.scale.__module__ = module
            audit = audited(lambda: foreign.scale(x.data_ptr(), y.data_ptr(), 100))
            assert names(audit).get("foreign.scale") == (1 if module is foreign else None)
    finally:
        foreign.scale.__module__ = named
    assert y.sum() == 200


@needs_compiler
@needs_ninja
@pytest.mark.slow
def test_a_kernel_of_pybind_is_named_without_the_operators_inside() -> None:
    module = with_pybind()
    audit = audited(lambda: module.twice(torch.ones(100, 100)))
    check_sum(audit)
    assert names(audit).pop("with_pybind.twice") == 1
    assert "aten::mul" not in names(audit)  # which was seen


@pytest.fixture
def compiled() -> Iterator[Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        yield torch.compile(lambda x: (x @ x).relu().exp().sum(0))
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.slow
def test_generated_kernels_are_seen_or_named(compiled: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(30, 30)
    missed = audited(lambda: compiled(x), "matmul")
    check_sum(missed)
    assert [count for name, count in names(missed).items() if name.startswith("inductor::cpp_fused_")] == [1]
    whole = audited(lambda: compiled(x))
    check_sum(whole)
    assert names(whole).keys() <= {"aten::empty", "aten::empty_strided"}


@needs_compiler
@pytest.mark.slow
def test_what_compiling_computes_is_left_out(compiled: Callable[[Tensor], Tensor]) -> None:
    audit = hooks.Audit()
    with intercept(audit, ops="all"):
        compiled(torch.rand(30, 30))
    check_sum(audit)
    assert names(audit).keys() <= {"aten::empty", "aten::empty_strided", "aten::detach"}
    assert "in which torch.compile compiled" in str(audit)


def test_steps_choose_what_is_looked_at() -> None:
    audit = hooks.Audit(steps=1)
    x = torch.ones(8, 8)
    with intercept(audit) as block:
        for number in range(3):
            for _ in range(number + 1):
                x.mul(x)
            x @ x
            block.step()
    assert names(audit) == {"aten::mul": 2}
    assert audit.calls == 1


def test_an_audit_ends_after_so_many_calls_and_says_so() -> None:
    audit = hooks.Audit(max_calls=3)
    x = torch.ones(8, 8)
    with intercept(audit):
        for _ in range(5):
            x @ x
            x.mul(x)
    assert names(audit) == {"aten::mul": 2}
    assert "looked at the first 3 calls only" in str(audit)
    assert not torch._C._autograd._profiler_enabled()


def test_a_call_that_raises_is_seen_and_hides_nothing_after_it() -> None:
    x = torch.ones(8, 8)

    def program() -> None:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(x, torch.ones(3, 3))
        x.mul(x)

    audit = audited(program, "matmul")
    assert audit.calls == 1
    assert names(audit)["aten::mul"] == 1


def test_what_other_hooks_run_in_an_operator_does_not_count() -> None:
    x = torch.ones(8, 8)
    audit = hooks.Audit()
    with intercept([hooks.Reference(), audit, lambda call: call.output.cumsum(0)]):
        x @ x
    assert names(audit) == {}
    assert audit.share == 1.0


def test_other_threads_are_looked_at_where_the_block_is() -> None:
    x = torch.ones(8, 8)

    def other() -> None:
        (x @ x).mul(x)

    found = []
    choices: tuple[Any, ...] = ("current", "all")
    for everywhere in choices:
        audit = hooks.Audit(threads=everywhere)
        with intercept(audit, engine="kernel", threads=everywhere):
            x @ x
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            x.mul(x)
        found.append((audit.calls, names(audit)))
    assert found == [(1, {"aten::mul": 1}), (2, {"aten::mul": 2})]


def test_a_profile_function_of_the_program_stays_and_is_told() -> None:
    events = 0

    def own(*_: object) -> None:
        nonlocal events
        events += 1

    audit = hooks.Audit()
    sys.setprofile(own)
    try:
        with intercept(audit):
            torch.ones(2, 2) @ torch.ones(2, 2)
        kept = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert kept is own
    assert events > 0
    assert "functions in C were not looked at" in str(audit)
    audited(step)
    assert sys.getprofile() is None


def test_a_profiler_of_the_program_is_not_joined() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(OpInterceptError, match="profiler must be free"), intercept(hooks.Audit()):
            pass
    audited(step)


def test_nothing_that_ran_is_said_to_be_nothing() -> None:
    audit = hooks.Audit()
    with intercept(audit):
        pass
    assert audit.share is None
    assert audit.rows() == []
    assert str(audit) == "nothing ran in a kernel or an operator, and 0 calls were seen"


def test_an_audit_changes_no_bit() -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1)
        model(torch.randn(3, 2, 16)).square().mean().backward()
        return [each.grad for each in model.parameters() if each.grad is not None]

    plain = train()
    with intercept(hooks.Audit(), ops="all"):
        seen = train()
    assert all(map(torch.equal, plain, seen))


@dataclass
class Event:
    """An event as torch's profiler has it, of a host or of a device."""

    at: int
    taken: int
    called: str
    correlation: int = 0
    linked: int = 0
    device: bool = False
    annotation: bool = False

    def start_ns(self) -> int:
        return self.at

    def duration_ns(self) -> int:
        return self.taken

    def name(self) -> str:
        return self.called

    def overload_name(self) -> str:
        return ""

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def device_type(self) -> Any:
        return DeviceType.CUDA if self.device else DeviceType.CPU

    def device_resource_id(self) -> int:
        return 7

    def is_user_annotation(self) -> bool:
        return self.annotation


def on_device(taken: int, name: str, correlation: int, linked: int = 0) -> Event:
    return Event(10_000 + correlation, taken, name, correlation, linked, device=True)


HOST = [
    Event(0, 100, "aten::linear", 1),
    Event(10, 80, "aten::addmm", 2),
    Event(20, 60, "opintercept saw aten::addmm", 3),
    Event(30, 5, "cudaLaunchKernel", 901),
    Event(85, 2, "cudaLaunchKernel", 902),  # of a hook, in the operator after the mark
    Event(200, 50, "aten::mul", 4),
    Event(210, 5, "cudaLaunchKernel", 903),
    Event(300, 50, "opintercept called ext.scale", 5),
    Event(310, 5, "cuLaunchKernelEx", 904),
    Event(400, 5, "cudaLaunchKernel", 905),
    Event(500, 9, "cudaGraphLaunch", 906),
]


@pytest.mark.parametrize("by_link", [True, False])
@pytest.mark.parametrize("replays", [True, False])
def test_kernels_of_a_device_are_known_by_what_launched_them(by_link: bool, replays: bool) -> None:
    def link(number: int) -> int:
        return number if by_link else 0

    devices = [
        on_device(1000, "gemm", 901, link(3)),
        on_device(1, "of_a_hook", 902, link(2)),
        on_device(20, "mul_kernel", 903, link(4)),
        on_device(300, "scale_kernel", 904, link(5)),
        on_device(40, "Memcpy DtoH (Device -> Pageable)", 905),
        on_device(5000, "in_graph", 906),
        Event(0, 999, "opintercept saw aten::addmm", 3, 3, device=True, annotation=True),
    ]
    _, ran, compiling = read([*HOST, *devices], replays)
    rest = {
        Unseen("mul_kernel", "kernel", "aten::mul"): (1, 20),
        Unseen("scale_kernel", "kernel", "ext.scale"): (1, 300),
        Unseen("Memcpy DtoH (Device -> Pageable)", "copy", ""): (1, 40),
    }
    in_graph = {Unseen("in_graph", "kernel", ""): (1, 5000)}
    assert (ran.seen, ran.replayed, compiling) == (1000, 5000 * replays, 0)
    assert ran.rest == (rest if replays else rest | in_graph)
    assert ran.total == 6360


def test_an_audit_with_a_fork_in_the_middle_ends_cleanly() -> None:
    program = """
        import os, torch
        from opintercept import hooks, intercept
        audit = hooks.Audit()
        with intercept(audit, ops="all"):
            with torch.inference_mode():
                torch.ones(4, 4) @ torch.ones(4, 4)
            child = os.fork()
            if child == 0:
                torch.ones(4, 4) @ torch.ones(4, 4)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        assert audit.share > 0
    """
    run_python("-c", textwrap.dedent(program), check=True)
