"""Generated kernels are calls: each launch is seen, as what it is, and nothing else changes.

The graphs are compiled once for all tests, since a compiler takes seconds for each.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opintercept import OpCall, intercept
from opintercept._engines import inductor
from opintercept.hooks import Capture, NonFinite, Print, Profile, Recorder, Stats, when
from opintercept.runs import RunRecorder, open_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.log(self.a(x).abs())
        y = y.relu() + 1
        return torch.softmax(self.b(y), -1)


def lowered(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b).log()


X = torch.linspace(-1, 1, 32).reshape(4, 8)
ONE, OTHER = torch.full((2, 1, 16), 0.5), torch.full((2, 16, 8), 0.25)
FORWARD = ["inductor::cpp_fused_abs_add_log_relu_0", "inductor::cpp_fused__softmax_1"]


@pytest.fixture(scope="module", autouse=True)
def compilers() -> Iterator[set[str]]:
    """The names of the wrappers that other files compiled."""
    try:
        torch._inductor.cpp_builder.get_cpp_compiler()
    except torch._inductor.exc.InvalidCxxCompiler:
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    # Without the thread pool, which would keep kernels installed, and without graphs of an older version of this file.
    with torch._inductor.config.patch(compile_threads=1, fx_graph_cache=False):
        yield {module.__name__ for module in wrappers()}
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def net(compilers: set[str]) -> Any:
    torch.manual_seed(0)
    compiled = torch.compile(Net())
    compiled(X).sum().backward()
    return compiled


@pytest.fixture(scope="module")
def product(compilers: set[str]) -> Callable[[Tensor, Tensor], Tensor]:
    compiled = torch.compile(lowered, dynamic=True)
    compiled(ONE, OTHER)
    return compiled


def wrappers() -> list[Any]:
    return [module for name, module in sys.modules.items() if name.startswith("torch._inductor.runtime.compile_tasks.")]


def kernels() -> dict[tuple[int, str], Any]:
    return {
        (id(module), name): value
        for module in wrappers()
        for name, value in vars(module).items()
        if name.startswith("cpp_fused")
    }


def step(net: Any) -> tuple[Tensor, ...]:
    net.zero_grad()
    out = net(X)
    out.sum().backward()
    return out.detach(), *(parameter.grad for parameter in net.parameters())


@pytest.mark.parametrize("engine", ["kernel", "mode"])
def test_each_launch_is_a_call_and_changes_nothing(compilers: set[str], net: Any, engine: Any) -> None:
    before, plain = kernels(), step(net)
    recorder = Recorder()
    with intercept(recorder, ops="all", engine=engine):
        seen = step(net)
    assert all(map(torch.equal, plain, seen))
    assert kernels() == before
    launched = [r for r in recorder.records if r.ops is not None]
    assert [r.op for r in launched if r.phase == "forward"] == FORWARD
    # Counted in the generated source: every kernel that `call` launches, forward and backward.
    own = [module for module in wrappers() if module.__name__ not in compilers]
    texts = [Path(module.__file__).read_text().partition("def call(")[2] for module in own]
    of_net = [text for text in texts if "cpp_fused_abs_add_log_relu_0(" in text or "threshold_backward" in text]
    assert len(launched) == sum(len(re.findall(r"^ +cpp_fused\w+\(", text, re.MULTILINE)) for text in of_net)


def test_a_call_has_what_its_kernel_computes_with_modules_and_lines(net: Any) -> None:
    first = Net.forward.__code__.co_firstlineno
    calls: list[tuple[str, Any]] = []

    def note(call: OpCall) -> None:
        if call.ops is not None:
            calls.append((call.phase, (call.ops, call.module, call.source, call.parts)))

    with intercept(note, ops="all"):
        step(net)
    ops, module, source, parts = calls[0][1]
    assert ops == ("aten::abs", "aten::add", "aten::log", "aten::relu")
    assert (module, source) == ("Net", f"test_inductor.py:{first + 1}, {first + 2} in forward")
    assert [(part.op, part.module) for part in parts] == [
        (f"aten::{name}", "Net") for name in ("abs", "log", "relu", "add")
    ]
    assert [part.source for part in parts] == [f"test_inductor.py:{first + line} in forward" for line in (1, 1, 2, 2)]
    ops, module, source, parts = calls[1][1]
    assert (ops, module, source) == (("aten::_softmax",), "Net", f"test_inductor.py:{first + 3} in forward")
    assert {part.op for part in parts} >= {"aten::amax", "aten::exp", "aten::div"}
    backward = [call for phase, call in calls if phase == "backward"]
    assert backward
    lines = {f"test_inductor.py:{first + line} in forward" for line in (1, 2, 3)}
    assert {part.source for _, _, _, parts in backward for part in parts} == lines
    assert {module for _, module, _, _ in backward} == {"Net"}


def test_arguments_have_the_kernels_names(net: Any) -> None:
    seen: list[Any] = []
    with intercept(lambda call: seen.append((dict(call.tensors), call.written, call.output)), ops="log"):
        step(net)
    tensors, written, output = seen[0]
    assert list(tensors) == ["in_ptr0"]
    assert [output] == written
    assert torch.equal(output, tensors["in_ptr0"].abs().log().relu() + 1)


def test_an_updated_argument_is_read_before_and_returned(net: Any) -> None:
    read: list[Any] = []

    class Hook:
        def pre(self, call: OpCall) -> None:
            if call.ops and "threshold_backward" in call.op:
                read.append({name: tensor.clone() for name, tensor in call.tensors.items()})

        def post(self, call: OpCall) -> None:
            if call.ops and "threshold_backward" in call.op:
                read.append(dict(call.tensors))
                assert any(call.tensors["in_out_ptr0"] is each for each in call.written)

    with intercept(Hook(), ops="all"):
        step(net)
    before, after = read
    assert not torch.equal(before["in_out_ptr0"], after["in_out_ptr0"])


@pytest.mark.parametrize(
    ("ops", "names"),
    [
        ("matmul", []),
        (("log",), FORWARD[:1]),
        ("softmax", FORWARD[1:]),
        ("activation", FORWARD[:1]),
        (("all", "-softmax"), FORWARD[:1]),
        (("all", "-softmax", "-activation", "-elementwise"), []),
    ],
)
def test_ops_selects_kernels_that_hold_an_operator(net: Any, ops: Any, names: list[str]) -> None:
    recorder = Recorder()
    with torch.no_grad(), intercept(recorder, ops=ops):
        net(X)
    with_grad = Recorder()
    with intercept(with_grad, ops=ops):
        net(X)
    assert [r.op for r in with_grad.records if r.ops is not None] == names


def test_a_product_that_is_lowered_is_a_matmul(product: Any) -> None:
    recorder = Recorder()
    with intercept(recorder) as block:
        product(ONE, OTHER)
        product(ONE.repeat(3, 1, 1), OTHER.repeat(3, 1, 1))
    first, second = recorder.records
    assert first.op == "inductor::cpp_fused_bmm_log_0"
    assert first.gemm is not None
    assert (first.gemm[:4], first.flops) == ((2, 1, 8, 16), 2 * 2 * 8 * 16)
    assert second.gemm is not None
    assert second.gemm[:4] == (6, 1, 8, 16)
    assert block.opaque == {}


def test_ready_made_hooks_see_kernels(net: Any, tmp_path: Any) -> None:
    profile, stats, capture = Profile(), Stats(), Capture("output")
    printed = StringIO()
    hooks = [
        profile,
        stats,
        when(capture, op="log"),
        Print(file=printed),
        RunRecorder(tmp_path / "run", tensors="stats"),
    ]
    with intercept(hooks, ops="all"):
        net(X)
    assert FORWARD[0] in printed.getvalue()
    (row,) = [row for row in profile.rows() if row.op == FORWARD[0]]
    assert (row.calls, row.bytes, row.module) == (1, 2 * 4 * 8 * 4, "Net")
    assert [row.nan for row in stats.rows() if row.op == FORWARD[0]] == [0]
    assert [entry.op for entry in capture.entries] == FORWARD[:1]
    (stored,) = [call for call in open_run(tmp_path / "run").calls() if call.record.op == FORWARD[0]]
    assert stored.record.ops == ("aten::abs", "aten::add", "aten::log", "aten::relu")
    assert set(stored.values) == {"in_ptr0", "output"}


def test_the_maker_of_a_nan_is_named_with_its_operators(product: Any) -> None:
    check = NonFinite(action="record")
    with intercept(check, ops="all"):
        product(-ONE, OTHER)
    (finding,) = check.findings
    assert (finding.kind, finding.record.op) == ("made", "inductor::cpp_fused_bmm_log_0")
    assert finding.record.source == f"test_inductor.py:{lowered.__code__.co_firstlineno + 1} in lowered"
    assert "it stands for aten::bmm, aten::log" in str(finding)


def test_a_nan_that_is_written_over_its_operand_is_made_there() -> None:
    compiled, check = torch.compile(lambda x: x.sub_(2).log_()), NonFinite(action="record")
    with intercept(check, ops="all"):
        for value in (3.0, 3.5, 1.0):
            compiled(torch.full((4, 8), value))
    (finding,) = check.findings
    assert (finding.kind, finding.record.op) == ("made", "inductor::cpp_fused_copy__log_sub_0")
    assert finding.operands["in_ptr0"] == (1.0, 1.0)


def test_graphs_that_are_compiled_inside_a_block_are_seen() -> None:
    def shifted(x: Tensor) -> Tensor:
        return x.tanh() + 3

    compiled, recorder = torch.compile(shifted), Recorder()
    before = kernels()
    with intercept(recorder, ops="all"):
        compiled(X)
        compiled(X)
    assert [r.op for r in recorder.records if r.ops is not None] == ["inductor::cpp_fused_add_tanh_0"] * 2
    after = kernels()
    assert {key: after[key] for key in before} == before
    assert all(type(kernel).__name__ == "builtin_function_or_method" for kernel in after.values())


def test_what_inductor_times_while_it_compiles_is_no_call_of_the_program() -> None:
    options: Any = {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
    linear, recorder = nn.Linear(48, 32), Recorder()
    compiled = torch.compile(lambda x: linear(x).relu(), options=options)
    with torch.no_grad(), intercept(recorder, ops="all"):
        compiled(torch.ones(40, 48))
        once = len(recorder.records)
        compiled(torch.ones(40, 48))
    assert len(recorder.records) == 2 * once


def test_the_module_of_a_single_kernel_stays_as_it_is() -> None:
    """Inductor takes the kernel from there for a wrapper, or times it, and reads its attributes."""
    text = "class Kernel:\n    def run(self):\n        return 1\n\n\ntriton_poi_fused_add_0 = Kernel()\n"
    with intercept(Recorder(), ops="all") as block:
        for more in ("", "def call(args):\n    pass\n\n\ndef benchmark_all_configs(args):\n    pass\n"):
            kernel: Any = torch._inductor.codecache.PyCodeCache.load(text + more).triton_poi_fused_add_0
            assert kernel.run.__self__ is kernel
            assert kernel.run() == 1
    assert block.opaque == {}


def test_an_exception_in_the_middle_leaves_wrappers_as_they_were(net: Any) -> None:
    before = kernels()

    def fail(call: OpCall) -> None:
        if call.op == FORWARD[1]:
            raise KeyboardInterrupt("in the middle")

    with pytest.raises(KeyboardInterrupt, match="in the middle"), intercept(fail, ops="all"):
        net(X)
    assert kernels() == before
    assert not inductor.PATCHES._in_place
    step(net)


def test_blocks_that_overlap_in_threads_see_their_own(net: Any) -> None:
    before = kernels()
    entered, left = threading.Barrier(2), threading.Barrier(2)
    seen: dict[int, list[str]] = {0: [], 1: []}

    def work(number: int) -> None:
        recorder = Recorder()
        with intercept(recorder, ops="all"):
            entered.wait()
            for _ in range(number + 1):
                net(X)
            if number:
                left.wait()
        if not number:
            left.wait()
        seen[number] = [r.op for r in recorder.records if r.ops is not None]

    threads = [threading.Thread(target=work, args=(number,)) for number in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with intercept(Recorder()):
        pass  # kernels go with the last block that a quiet process leaves
    assert seen == {0: FORWARD, 1: FORWARD * 2}
    assert kernels() == before


def test_nested_blocks_and_pauses(net: Any) -> None:
    outer, inner = Recorder(), Recorder()
    with intercept(outer, ops="all") as block:
        with intercept(inner, ops="log"):
            net(X)
        with block.paused():
            net(X)
    assert [r.op for r in outer.records if r.ops is not None] == FORWARD
    assert [r.op for r in inner.records if r.ops is not None] == FORWARD[:1]


def test_nothing_is_compiled_for_a_block(net: Any, product: Any) -> None:
    with torch.compiler.set_stance("fail_on_recompile"), intercept(Recorder(), ops="all"):
        step(net)
        product(ONE, OTHER)
    with torch.compiler.set_stance("fail_on_recompile"):
        step(net)
