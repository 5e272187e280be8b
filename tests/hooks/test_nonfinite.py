"""`NonFinite` finds the call that makes a NaN, and not those that pass it on."""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import interrupts
import minilm
import numpy as np
import pytest
import torch
from compiler import BELOW, ENGINES, LEVELS
from hypothesis import given
from hypothesis import strategies as st
from native import reading
from processes import run_python
from torch import Tensor, nn

from opintercept import NonFiniteError, OpCall, OpInterceptError, OpInterceptWarning, hooks, intercept
from opintercept.hooks import nonfinite as module
from opintercept.hooks.nonfinite import ValueRange

pytestmark = pytest.mark.slow

NAN, INF = math.nan, math.inf


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `check_every` put off the checks of calls on the host, as it does those of calls on a device."""
    monkeypatch.setattr(module, "ON_HOST", ())
    monkeypatch.delattr(hooks.NonFinite, "work")  # kernels in C++ leave calls on a device to the hook


@pytest.fixture(autouse=True)
def put_off(request: pytest.FixtureRequest) -> None:
    """Put the checks off in tests that give `check_every` several values."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("every", 1) > 1:
        request.getfixturevalue("as_on_a_device")


def three_layers(broken: int | None = None, weight: float = 3e38) -> nn.Sequential:
    """Three linear layers, one of which may have a weight that makes its output overflow."""
    layers: list[Any] = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)]
    if broken is not None:
        nn.init.constant_(layers[broken].weight, weight)
        nn.init.constant_(layers[broken].bias, 0.0)
    nn.init.constant_(layers[0].bias, 9.0)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("engine", LEVELS)
def test_the_layer_that_overflows_is_found_once_its_inf_becomes_nan(engine: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteError, match=r"Inf is made by .* in module '2' .*from finite operands") as caught:
        with intercept(hooks.NonFinite(), **engine):
            three_layers(broken=2)(torch.ones(2, 4))
    assert "it became NaN on the way to" in str(caught.value)
    assert "in module '4'" in str(caught.value)
    assert "rhs in [3e+38, 3e+38]" in str(caught.value)
    assert "float32 holds 3.403e+38" in str(caught.value)
    assert isinstance(caught.value, ArithmeticError)
    assert isinstance(caught.value, OpInterceptError)


def test_an_overflow_is_found_at_once_with_inf() -> None:
    with pytest.raises(NonFiniteError, match="Inf is made by aten::addmm in module '2'") as caught:
        with intercept(hooks.NonFinite(inf=True)):
            three_layers(broken=2)(torch.ones(2, 4))
    assert "it became" not in str(caught.value)


def test_nothing_is_found_if_all_values_are_finite() -> None:
    nonfinite = hooks.NonFinite(inf=True)
    with intercept(nonfinite):
        three_layers()(torch.ones(2, 4)).sum().backward()
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)
    assert str(nonfinite) == 'no watched call made a value that is not finite; ops="all" watches every operator'
    with intercept(nonfinite, ops="all"):
        three_layers()(torch.ones(2, 4))
    assert str(nonfinite) == "no watched call made a value that is not finite"


def test_a_nan_that_comes_in_is_reported_as_such_and_then_only_counted() -> None:
    nonfinite = hooks.NonFinite(action="record")
    x = torch.ones(2, 4)
    x[0, 1] = NAN
    with intercept(nonfinite):
        three_layers()(x)
    (finding,) = nonfinite.findings
    assert (finding.kind, finding.record.module, finding.record.index) == ("came in", "0", 0)
    assert nonfinite.passed_on == 2
    assert "NaN comes into aten::addmm in module '0'" in str(finding)
    assert "through lhs; no call seen before made it" in str(finding)


def test_a_second_origin_is_found_among_calls_that_pass_on() -> None:
    nonfinite = hooks.NonFinite(action="record", inf=True)
    with intercept(nonfinite):
        bad = torch.full((1, 2), 2e38) @ torch.full((2, 2), 1.0)
        bad @ torch.ones(2, 2)
        torch.bmm(torch.full((1, 1, 1), 3e38), torch.full((1, 1, 1), 2.0))
    assert [(f.record.op, f.kind) for f in nonfinite.findings] == [("aten::mm", "made"), ("aten::bmm", "made")]
    assert nonfinite.passed_on == 1


def test_the_backward_pass_is_checked_too() -> None:
    x = torch.full((1, 2), 3e38)
    w = torch.full((2, 1), 1e-38, requires_grad=True)
    with pytest.raises(NonFiniteError, match=r"Inf is made by aten::mm in .* call 1 \(backward\)"):
        with intercept(hooks.NonFinite(inf=True)):
            ((x @ w) * 9.0).sum().backward()


@pytest.mark.parametrize("every", [1, 3, 100])
def test_deferred_checks_find_the_same(every: int) -> None:
    nonfinite = hooks.NonFinite(action="record", check_every=every)
    model = three_layers(broken=0)
    with intercept(nonfinite):
        model(torch.ones(2, 4)).sum().backward()
    first = nonfinite.findings[0]
    assert (first.record.module, first.kind, first.record.index) == ("0", "made", 0)
    assert tuple(first.operands["rhs"]) == pytest.approx((3e38, 3e38))


@pytest.mark.usefixtures("as_on_a_device")
def test_a_deferred_check_raises_when_the_block_ends_and_finds_all() -> None:
    with pytest.raises(NonFiniteError, match="aten::addmm in module '2'"):
        with intercept(nonfinite := hooks.NonFinite(check_every=1000, inf=True)):
            three_layers(broken=2)(torch.ones(2, 4))
            torch.bmm(torch.full((1, 1, 1), 3e38), torch.full((1, 1, 1), 2.0))
    assert [finding.record.op for finding in nonfinite.findings] == ["aten::addmm", "aten::bmm"]


@pytest.mark.parametrize("engine", LEVELS)
def test_the_host_is_checked_at_once(engine: dict[str, Any]) -> None:
    reached = []
    with pytest.raises(NonFiniteError, match="Inf is made by"):
        with intercept(hooks.NonFinite(check_every=1000, inf=True), **engine):
            three_layers(broken=2)(torch.ones(2, 4))
            reached.append(True)
    assert not reached


@pytest.mark.parametrize("program", [lambda x: x @ x, lambda x: torch.mm(x, x, out=x.clone())], ids=["product", "out"])
def test_check_every_runs_no_more_operators_on_the_host(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(every: int) -> int:
        passes = Mock(wraps=torch.aminmax)
        monkeypatch.setattr(torch, "aminmax", passes)
        with intercept(hooks.NonFinite(check_every=every)):
            for _ in range(5):
                program(torch.eye(3))
        return int(passes.call_count)

    assert read(1000) == read(1)


@pytest.mark.usefixtures("as_on_a_device")
def test_the_programs_own_exception_is_not_replaced_by_a_late_finding() -> None:
    with pytest.raises(KeyError, match="mine") as caught, pytest.warns(OpInterceptWarning, match="is made by"):
        with intercept(hooks.NonFinite(check_every=1000)):
            three_layers(broken=2)(torch.ones(2, 4))
            raise KeyError("mine")
    assert caught.value.args == ("mine",)


def test_warn_warns_once_per_module_and_goes_on() -> None:
    model = three_layers(broken=2)
    with pytest.warns(OpInterceptWarning, match="in module '2'") as caught:
        with intercept(hooks.NonFinite(action="warn", inf=True)):
            for _ in range(3):
                model(torch.ones(2, 4))
    assert len(caught) == 1


def test_breakpoint_stops_in_a_frame_that_has_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def stop() -> None:
        frame = sys._getframe(1)
        while "call" not in frame.f_locals:
            assert frame.f_back is not None
            frame = frame.f_back
        seen.append(frame.f_locals["call"].op)

    monkeypatch.setattr(sys, "breakpointhook", stop)
    with intercept(hooks.NonFinite(action="breakpoint", inf=True)):
        torch.full((1, 2), 3e38) @ torch.ones(2, 1)
    assert seen == ["aten::mm"]


def test_a_function_gets_each_finding_and_may_end_the_program() -> None:
    told: list[Any] = []
    nonfinite = hooks.NonFinite(action=told.append, inf=True)
    with intercept(nonfinite):
        three_layers(broken=2)(torch.ones(2, 4))
    assert told == nonfinite.findings
    assert len(told) > 0

    def leave(finding: Any) -> None:
        raise SystemExit(str(finding))

    with pytest.raises(SystemExit, match="Inf is made by aten::addmm in module '2'"):
        with intercept(hooks.NonFinite(action=leave, inf=True), on_error="warn"):
            three_layers(broken=2)(torch.ones(2, 4))


@pytest.mark.parametrize("allow", ["2", "[2-9]", lambda name: name == "2"], ids=["name", "glob", "test"])
def test_allowed_modules_may_make_any_value(allow: Any) -> None:
    nonfinite = hooks.NonFinite(inf=True, action="record", allow=allow)
    with intercept(nonfinite):
        three_layers(broken=2)(torch.ones(2, 4))
    assert [(f.record.module, f.kind) for f in nonfinite.findings] in ([("4", "came in")], [])


def test_a_mask_of_minus_inf_is_no_finding() -> None:
    nonfinite = hooks.NonFinite()
    q = torch.randn(2, 4, 8)
    mask = torch.full((4, 4), -INF).triu(1)
    with intercept(nonfinite):
        torch.baddbmm(mask.expand(2, 4, 4), q, q.mT).softmax(-1) @ q
    assert nonfinite.findings == []


@pytest.mark.parametrize("engine", ENGINES[2:])
def test_kernels_show_no_inf_of_the_host_and_judge_it_before_a_nan(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, size = Mock(wraps=hooks.NonFinite.post), float(torch.tensor(1e38))
    monkeypatch.setattr(hooks.NonFinite, "post", lambda self, call: shown(self, call))
    nonfinite = hooks.NonFinite(action="record")
    x, diagonal = torch.full((2, 2), size), torch.eye(2).bool()
    with reading(True), intercept(nonfinite, ops="all", engine=engine):
        for _ in range(40):
            x.masked_fill(diagonal, -INF)
            x * 4
        assert nonfinite._infs._made  # not all wait until the block ends
        large = x * 4
        x.mul_(4)
        assert not shown.called
        _ = x - large
    (finding,) = nonfinite.findings
    assert finding.record.op == "aten::mul_"
    assert finding.seen_at is not None
    assert finding.seen_at.op == "aten::sub"
    assert finding.operands["self"] == (size, size)  # as it was before
    assert shown.call_count == 1


def test_an_overwritten_operand_is_judged_by_its_old_values() -> None:
    nonfinite = hooks.NonFinite(action="record", inf=True)
    c = torch.zeros(1, 1)
    with intercept(nonfinite):
        c.addmm_(torch.full((1, 2), 3e38), torch.ones(2, 1))  # made here, though c is not finite afterwards
        c.addmm_(torch.ones(1, 2), torch.ones(2, 1))  # came in through c
    assert [f.kind for f in nonfinite.findings] == ["made"]
    assert nonfinite.findings[0].operands["bias"] == (0.0, 0.0)
    assert nonfinite.passed_on == 1


@pytest.mark.slow
def test_save_writes_a_script_that_reproduces_it(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"to run it again: python .*call-0\.py") as caught:
        with intercept(hooks.NonFinite(inf=True, save=tmp_path / "found")):
            torch.addmm(torch.zeros(3), torch.full((2, 4), 3e38).T.contiguous().T, torch.ones(4, 3), beta=2, alpha=0.5)
    script = str(caught.value).rpartition("python ")[2]
    done = run_python(script, check=True)
    assert done.stdout == "torch.float32 [2, 3] NaN 0 Inf 6\n"
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["call-0.py", "call-0.safetensors"]


def test_save_keeps_the_old_values_of_an_overwritten_operand(tmp_path: Path) -> None:
    c = torch.full((1, 1), 5.0)
    nonfinite = hooks.NonFinite(inf=True, action="record", save=tmp_path)
    with intercept(nonfinite):
        c.addmm_(torch.full((1, 2), 3e38), torch.ones(2, 1))
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "call-0.safetensors")
    assert next(iter(stored.values())).flatten().tolist() == [5.0]


def test_if_save_cannot_write_the_finding_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nonfinite = hooks.NonFinite(inf=True, save=tmp_path / "file")
    message = r"Inf is made by aten::mm[^$]*it could not be saved: FileExistsError: .*file"
    with pytest.raises(NonFiniteError, match=message), intercept(nonfinite):
        torch.full((1, 2), 3e38).mm(torch.ones(2, 1))
    [finding] = nonfinite.findings
    assert finding.saved is None
    assert finding.unsaved is not None
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("written", ["safetensors", "script"])
def test_a_disk_that_fills_up_loses_no_finding_and_leaves_no_partial_file(
    tmp_path: Path, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if written == "safetensors":
        monkeypatch.setattr("safetensors.torch.save_file", fail)
    else:
        monkeypatch.setattr("builtins.open", fail)
    nonfinite = hooks.NonFinite(inf=True, action="record", save=tmp_path)
    with intercept(nonfinite):
        torch.full((1, 2), 3e38).mm(torch.ones(2, 1))
    monkeypatch.undo()
    [finding] = nonfinite.findings
    assert finding.unsaved == "OSError: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "explode"}, "action must be one of 'raise', 'warn', 'record', 'breakpoint', got 'explode'"),
        ({"check_every": 0}, "check_every must be a whole number of at least 1, got 0"),
        ({"check_every": 1.5}, "check_every must be a whole number of at least 1, got 1.5"),
        ({"check_every": 2, "save": "x"}, "save needs check_every=1, got check_every=2"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hooks.NonFinite(**options)
    with pytest.raises(TypeError, match="module must be a glob"):
        hooks.NonFinite(allow=3)  # type: ignore[arg-type]


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -2.5, NAN, INF, -INF]), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]),
    inf=st.booleans(),
)
def test_findings_agree_with_isfinite(values: list[float], dtype: torch.dtype, inf: bool) -> None:
    lhs = torch.tensor(values, dtype=torch.float64).reshape(2, 3).to(dtype)
    rhs = torch.eye(3, dtype=dtype)
    nonfinite = hooks.NonFinite(action="record", inf=inf)
    with intercept(nonfinite):
        output = lhs @ rhs
    bad = bool(output.isnan().any()) or (inf and bool(output.isinf().any()))
    assert len(nonfinite.findings) == bad
    # A call makes a NaN if only an Inf comes in, as in Inf * 0.
    came_in = bool(lhs.isnan().any()) or not bool(output.isnan().any())
    assert all(finding.kind == ("came in" if came_in else "made") for finding in nonfinite.findings)


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch._int_mm(torch.ones(32, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int8)),
        lambda: torch.mm(torch.ones(0, 3), torch.ones(3, 0)),
        lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 3)),
        lambda: torch.mm(torch.ones(3, 3, device="meta"), torch.ones(3, 3, device="meta")),
        lambda: torch.vmap(torch.mv, in_dims=(None, 0))(torch.ones(3, 3), torch.ones(2, 3)),
        lambda: torch.randn(3, 3, dtype=torch.complex64) @ torch.randn(3, 3, dtype=torch.complex64).mH,
    ],
    ids=["int8", "empty", "sparse", "meta", "vmap", "conj"],
)
@pytest.mark.parametrize("engine", LEVELS)
@pytest.mark.parametrize("every", [1, 5])
def test_exotic_tensors_pass(program: Any, engine: dict[str, Any], every: int) -> None:
    nonfinite = hooks.NonFinite(inf=True, check_every=every)
    with intercept(nonfinite, **engine):
        program()
    assert nonfinite.findings == []


def test_on_warn_it_is_switched_off_after_it_raised() -> None:
    with pytest.warns(OpInterceptWarning, match="switched off a hook that raised NonFiniteError"):
        with intercept(hooks.NonFinite(), on_error="warn"):
            three_layers(broken=2)(torch.ones(2, 4))


def test_a_planted_overflow_is_found_in_a_pretrained_model() -> None:
    model, tokenizer = minilm.load()
    inputs = tokenizer(["see every matmul", "and change not a single bit of it"], padding=True, return_tensors="pt")
    nonfinite = hooks.NonFinite()
    with torch.no_grad(), intercept(nonfinite):
        model(**inputs)
    assert nonfinite.findings == []
    model.encoder.layer[3].output.dense.weight.data[7] = 3e38
    with torch.no_grad(), pytest.raises(NonFiniteError, match=r"in module 'encoder\.layer\.3\.output\.dense'"):
        with intercept(nonfinite):
            model(**{name: tensor.repeat(4, 1) for name, tensor in inputs.items()})


@pytest.mark.parametrize("engine", BELOW)
def test_the_backward_of_an_attention_is_not_blamed_for_what_its_forward_made(engine: dict[str, Any]) -> None:
    x, lse = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3)
    nonfinite = hooks.NonFinite(action="record")
    with intercept(nonfinite, **engine):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(x, x, x, x, x * NAN, lse, 0.0, False)
    assert [(finding.kind, finding.bad) for finding in nonfinite.findings] == [("came in", ("out",))]


@interrupts.needs_timer
@pytest.mark.parametrize("every", [1, 3])
def test_interrupts_leave_no_state_behind(every: int) -> None:
    model = three_layers(broken=2)
    nonfinite = hooks.NonFinite(action="record", inf=True, check_every=every)

    def program() -> None:
        model(torch.ones(2, 4)).sum().backward()
        total = torch.zeros(2, 2)
        for _ in range(3):
            total.addmm_(torch.ones(2, 3), torch.ones(3, 2))

    def check() -> None:
        assert not len(nonfinite._before)
        for finding in nonfinite.findings:
            record = finding.record
            assert (record.op, record.module) in (("aten::addmm", "2"), ("aten::addmm", "4"), ("aten::mm", "4"))
            assert record.module != "2" or tuple(finding.operands["rhs"]) == pytest.approx((3e38, 3e38))

    assert interrupts.interrupt(nonfinite, program, check) > 0
    assert nonfinite.findings


def test_a_call_that_another_hook_stops_leaves_no_state_behind() -> None:
    class Refuses:
        def pre(self, call: OpCall) -> None:
            raise LookupError("mine")

    nonfinite = hooks.NonFinite()
    with intercept([nonfinite, Refuses()]):
        with pytest.raises(LookupError, match="mine"):
            torch.zeros(2, 2).addmm_(torch.ones(2, 3), torch.ones(3, 2))
        assert not len(nonfinite._before)


def searched(program: Any, *, inf: bool = False, every: int = 1, **options: Any) -> hooks.NonFinite:
    """The hook after a program that ran under it."""
    nonfinite = hooks.NonFinite(action="record", inf=inf, check_every=every)
    with intercept(nonfinite, **options), torch.no_grad():
        program()
    return nonfinite


def found(program: Any, *, inf: bool = False, every: int = 1, **options: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """The findings in a program: operators without their namespace, kinds, and what was not finite."""
    findings = searched(program, inf=inf, every=every, **options).findings
    return [(f.record.op.rpartition(":")[2].rpartition(".")[2], f.kind, f.bad) for f in findings]


def nan_of(*shape: int) -> Tensor:
    """A tensor of NaN, made outside torch."""
    return torch.from_numpy(np.full(shape, NAN, np.float32))


def filled(tensor: Tensor, value: float) -> Tensor:
    """The tensor, with other values written to its memory outside torch."""
    tensor.detach().numpy().fill(value)
    return tensor


EVERY = pytest.mark.parametrize("every", [1, 3])
ALL = pytest.mark.parametrize("options", [{}, {"level": "function"}], ids=["dispatch", "function"])


@EVERY
@ALL
def test_views_pass_on_and_the_call_that_reads_one_is_named(every: int, options: dict[str, Any]) -> None:
    def program() -> None:
        x = nan_of(2, 6)
        view = x.view(3, 4).unsqueeze(0).detach()
        view = view.transpose(1, 2)[0].reshape(4, 3).expand(4, 3).squeeze().permute(1, 0)
        view.narrow(0, 0, 2).split(1)[0].exp()

    assert found(program, every=every, ops="all", **options) == [("exp", "came in", ("self",))]


@EVERY
@ALL
def test_allocating_memory_makes_no_finding(every: int, options: dict[str, Any]) -> None:
    def program() -> None:
        for make in (
            lambda x: torch.empty(64, 64),
            lambda x: torch.empty_like(x),
            lambda x: x.new_empty(64, 64),
            lambda x: torch.empty_strided((64, 64), (64, 1)),
            lambda x: torch.empty(0).resize_(64, 64),
            lambda x: torch.empty(64, 64).normal_(),
            lambda x: filled(torch.empty(64, 64), NAN).fill_(1.0),
            lambda x: filled(torch.empty(64, 64), NAN).copy_(x),
            lambda x: filled(torch.empty(64, 64), NAN).zero_(),
            lambda x: torch.add(x, x, out=filled(torch.empty(64, 64), NAN)),
        ):
            make(torch.from_numpy(np.ones((64, 64), np.float32)))

    assert found(program, every=every, ops="all", **options) == []


def test_uninitialised_memory_that_holds_nan_is_no_finding() -> None:
    # Torch fills it with NaN, so that people find code that reads it.
    torch.use_deterministic_algorithms(True)
    try:
        makers: list[Any] = [
            lambda: torch.empty(3),
            lambda: torch.empty_strided((3,), (1,)),
            lambda: torch.ones(0).resize_(3),
            lambda: torch.empty_like(torch.ones(3)),
        ]
        for make in makers:
            held: list[Tensor] = []
            assert found(lambda make=make, held=held: held.append(make()), ops="all") == []
            assert held[0].isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


@EVERY
def test_a_nan_can_come_in_through_a_number(every: int) -> None:
    programs: dict[str, Any] = {
        "fill_ value": lambda x: torch.full((3,), NAN),  # which choose a device, and then run this
        "masked_fill value": lambda x: x.masked_fill(x > 0, NAN),
        "mul other": lambda x: torch.ops.aten.mul.Scalar(x, NAN),
        "_foreach_add_ scalar": lambda x: torch._foreach_add_([x, x], NAN),
        "_foreach_mul scalars": lambda x: torch._foreach_mul([x, x], [1.0, NAN]),
    }
    for named, program in programs.items():
        op, name = named.split()
        bad = found(lambda program=program: program(torch.ones(3)), every=every, ops="all")
        assert bad[0] == (op, "came in", (name,))
    nonfinite = hooks.NonFinite()
    with pytest.raises(NonFiniteError, match=r"NaN comes into aten::fill_ in .*, through value=nan\n") as caught:
        with intercept(nonfinite, ops="all"):
            torch.full((3,), NAN)
    assert "no call seen before" not in str(caught.value)


@EVERY
@ALL
def test_an_operation_without_a_defined_result_makes_a_nan(every: int, options: dict[str, Any]) -> None:
    def minus(x: Tensor) -> Tensor:
        return filled(torch.empty_like(x), -1.0)

    for op in ("log", "sqrt"):
        program = lambda op=op: getattr(torch, op)(minus(torch.ones(3)))  # noqa: E731
        assert found(program, every=every, ops="all", **options) == [(op, "made", ())]
    zero = torch.zeros(3)
    assert found(lambda: zero / zero, every=every, ops="all", **options) == [("div", "made", ())]
    assert found(lambda: zero.div_(zero), every=every, ops="all", **options)[0] == ("div_", "made", ())


@EVERY
def test_an_inf_that_no_call_made_is_reported_at_the_call_that_turns_it_into_nan(every: int) -> None:
    query = torch.ones(1, 2, 3, 8)
    mask = torch.zeros(3, 3)
    mask[1] = -INF  # a query that sees no key
    scores = torch.ones(2, 3, 3)

    def eager() -> None:
        ((scores + mask).softmax(-1)) @ torch.ones(2, 3, 8)

    assert found(eager, every=every, ops="all") == [("_softmax", "made", ("self",))]
    assert found(eager, every=every) == [("bmm", "came in", ("lhs",))]

    def fused() -> None:  # torch returns zeros, and a log-sum-exp of -inf
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)

    assert found(fused, every=every, ops="all") == found(fused, every=every) == []
    assert found(fused, every=every, inf=True) == []
    hidden = (torch.ones(1, 1, 3, 3) * mask).isfinite().logical_and(mask.isfinite())
    boolean = lambda: torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=hidden)  # noqa: E731
    assert found(boolean, every=every, inf=True) == []
    infinite = torch.full((1, 2), INF)
    assert found(lambda: infinite @ torch.zeros(2, 1), every=every) == [("mm", "made", ("lhs",))]
    text = str(searched(lambda: infinite @ torch.zeros(2, 1)))
    assert "NaN is made by aten::mm in no module" in text
    assert "from Inf in lhs\n" in text


def test_with_all_operators_an_overflow_does_not_explain_a_nan_from_elsewhere() -> None:
    def program() -> None:
        torch.zeros(3).log()  # -inf, but harmless
        torch.mm(nan_of(2, 2), torch.ones(2, 2))

    assert found(program, ops="all") == [("mm", "came in", ("lhs",))]


@EVERY
def test_in_place_and_out_forms_are_judged_by_the_old_values(every: int) -> None:
    one = torch.ones(2, 2)

    def bad(program: Any, **options: Any) -> Any:
        return found(program, every=every, ops="all", **options)[:1]

    assert bad(lambda: nan_of(2, 2).add_(one)) == [("add_", "came in", ("self",))]
    assert bad(lambda: torch.zeros(2, 2).div_(torch.zeros(2, 2))) == [("div_", "made", ())]
    # A view of what is overwritten is overwritten too.
    x = torch.zeros(2, 2)
    assert bad(lambda: x.div_(x.view(4).view(2, 2))) == [("div_", "made", ())]
    assert bad(lambda: torch.div(one * 0, one * 0, out=nan_of(2, 2))) == [("div", "made", ())]
    assert bad(lambda: torch.mm(one, one, out=nan_of(2, 2))) == []
    assert bad(lambda: torch._foreach_div_([torch.zeros(2), one], [torch.zeros(2), one])) == [
        ("_foreach_div_", "made", ())
    ]
    assert bad(lambda: torch._foreach_add([one, nan_of(2, 2)], 1.0)) == [("_foreach_add", "came in", ("self[1]",))]
    assert bad(lambda: torch.cat([one, nan_of(2, 2)])) == [("cat", "came in", ("tensors[1]",))]


@EVERY
@pytest.mark.parametrize("options", LEVELS)
def test_a_bias_that_is_not_read_is_not_blamed(every: int, options: dict[str, Any]) -> None:
    big = torch.full((2, 2), INF)
    assert found(lambda: torch.addmm(nan_of(2, 2), torch.ones(2, 2), big, beta=0), every=every, **options) == []
    program = lambda: torch.addmm(nan_of(2, 2), torch.zeros(2, 2), big, beta=0)  # noqa: E731
    assert found(program, every=every, **options) == [("addmm", "made", ("rhs",))]


@EVERY
@pytest.mark.parametrize("engine", LEVELS)
def test_exotic_operands_are_read(every: int, engine: dict[str, Any]) -> None:
    sparse = torch.eye(3).to_sparse()
    sparse._values()[1] = NAN
    by_sparse = found(lambda: torch.sparse.mm(sparse, torch.ones(3, 2)), every=every, **engine)
    assert by_sparse[0][1:] == ("came in", ("lhs",))
    compressed = torch.eye(3).to_sparse_csr()
    compressed.values()[1] = NAN
    assert found(lambda: compressed @ torch.ones(3, 2), every=every, **engine)[0][1] == "came in"
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), nan_of(4, 3)], layout=layout)
        program = lambda nested=nested: torch.nn.functional.linear(nested, torch.ones(2, 3))  # noqa: E731
        assert found(program, every=every, **engine)[0][1] == "came in"


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch 2.11 warns though they are on
def test_a_sparse_operand_is_not_made_dense() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0], [0]]), torch.tensor([NAN]), (10**7, 10**7), check_invariants=True
    )
    assert found(lambda: torch.mv(sparse, torch.ones(10**7)))[0] == ("mv", "came in", ("lhs",))


@pytest.mark.filterwarnings("ignore")
@EVERY
def test_a_packed_weight_is_read_where_torch_unpacks_it(every: int) -> None:
    layer = nn.Linear(4, 4)
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer))
    x = torch.ones(2, 4)
    assert found(lambda: quantized(x), every=every) == []
    assert layer.bias is not None
    layer.bias.data[1] = NAN
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer))
    [(op, kind, bad)] = found(lambda: quantized(x), every=every)
    assert (op, kind, bad) == ("linear_dynamic", "came in", ("W_prepack[1]",))


def test_a_weight_that_cannot_be_read_is_not_blamed() -> None:
    record = searched(lambda: torch.full((1, 2), INF) @ torch.zeros(2, 1)).findings[0].record
    finding = hooks.Finding(record, "came in", ValueRange(NAN, NAN), {}, unread=("weight",))
    assert "it may have come in through weight, not readable" in str(finding)
    assert "weight could not be read" in str(finding)


@pytest.mark.parametrize("options", [*LEVELS, {"ops": "all"}])
def test_a_finding_names_the_step(options: dict[str, Any]) -> None:
    nonfinite = hooks.NonFinite()
    with pytest.raises(NonFiniteError, match=r", step 2, call \d+ \(forward\), through"):
        with intercept(nonfinite, **options) as interceptor:
            for step in range(3):
                x = nan_of(2, 4) if step == 2 else torch.ones(2, 4)
                three_layers()(x)
                interceptor.step()


SCALED = [*BELOW, pytest.param({"ops": "all"}, id="all")]


def of_halves(*layers: nn.Module) -> tuple[nn.Sequential, Tensor]:
    """A model whose gradients in float16 overflow at a scale of 2**24, and what goes into it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 1)), torch.randn(32, 8) * 4


def train(model: nn.Module, x: Tensor, scaler: torch.amp.GradScaler, interceptor: Any, steps: int) -> None:
    """Train as torch's guide to mixed precision does, with two passes a step."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        for part in x.chunk(2):
            with torch.autocast("cpu", torch.float16):
                loss = model(part).float().square().mean()
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        interceptor.step()


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("options", SCALED)
@pytest.mark.parametrize("wrap", [None, True, False], ids=["plain", "reentrant", "checkpoint"])
@EVERY
def test_gradients_that_a_scaler_discards_are_no_finding(
    options: dict[str, Any], wrap: bool | None, every: int
) -> None:
    model, x = of_halves(nn.ReLU())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    nonfinite = hooks.NonFinite(inf=True, check_every=every)
    with intercept(nonfinite, **options) as interceptor:
        train(model if wrap is None else Checkpointed(model, wrap), x, scaler, interceptor, steps=12)
    assert scaler.get_scale() < 2.0**20
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)
    assert nonfinite.discarded > 0
    said, count, first = str(nonfinite).splitlines()
    assert said.startswith("no other watched call made a value that is not finite")
    assert count == f"{nonfinite.discarded} calls with gradients that a GradScaler discards, the first:"
    assert ", step 0, call " in first
    assert first.endswith(" (backward)")


class Log(nn.Module):
    """Makes NaN where no product sees it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x.square().mean() * 0 - 1) + x


class Nan(nn.Module):
    """Makes NaN in the backward pass only: 0 / 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).sqrt() * 0


@pytest.mark.parametrize("options", [{"ops": "all"}, {"ops": "all", "engine": "mode"}], ids=["kernel", "mode"])
def test_the_scaler_of_another_training_may_be_freed_at_any_time(options: dict[str, Any]) -> None:
    model, x = of_halves()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**24) for _ in range(2))
    with intercept(nonfinite := hooks.NonFinite(), **options):
        with torch.autocast("cpu", torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        del other
        gc.collect()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert nonfinite.discarded
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)


@pytest.mark.parametrize("options", SCALED)
def test_a_loss_that_is_nan_is_not_left_to_a_scaler(options: dict[str, Any]) -> None:
    model, x = of_halves()
    scaler = torch.amp.GradScaler("cpu")
    expected = "NaN is made by aten::log" if "ops" in options else "NaN comes into aten::mm in module '0.1'"
    with pytest.raises(NonFiniteError, match=rf"{expected}.*, step 0, call"):
        with intercept(hooks.NonFinite(), **options) as interceptor:
            train(nn.Sequential(model, Log()), x, scaler, interceptor, steps=1)


@pytest.mark.parametrize("options", SCALED)
def test_a_nan_in_forward_is_not_left_to_a_scaler(options: dict[str, Any]) -> None:
    model, x = of_halves()
    bad, scaler = nan_of(32, 8), torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with intercept(nonfinite := hooks.NonFinite(), **options) as interceptor:
        train(model, x, scaler, interceptor, steps=2)
        assert nonfinite.discarded
        with pytest.raises(NonFiniteError, match=r"NaN comes into aten::\S+ in .*, step 2, call \d+ \(forward\)"):
            train(model, bad, scaler, interceptor, steps=1)


@pytest.mark.parametrize("options", SCALED)
def test_a_nan_that_stays_when_the_scale_has_fallen_is_named(options: dict[str, Any]) -> None:
    model, x = of_halves(Nan())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    nonfinite = hooks.NonFinite()
    with pytest.raises(NonFiniteError, match=r"NaN .*, step 2, call \d+ \(backward\)"):
        with intercept(nonfinite, **options) as interceptor:
            train(model, x, scaler, interceptor, steps=3)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("options", SCALED)
@pytest.mark.parametrize("of", ["another training", "no training"])
def test_a_loss_that_no_scaler_has_scaled_is_not_left_to_one(options: dict[str, Any], of: str) -> None:
    gc.collect()  # scalers of other tests
    model, x = of_halves(Nan())
    other, y = of_halves()
    scaler = torch.amp.GradScaler("cpu", enabled=of == "another training")
    with intercept(hooks.Recorder()) as interceptor:
        train(other, y, scaler, interceptor, steps=1)
    with (
        pytest.raises(NonFiniteError, match=r"NaN .*, step 0, call \d+ \(backward\)"),
        intercept(hooks.NonFinite(), **options),
    ):
        loss = model(x).square().mean()
        (loss if of == "another training" else scaler.scale(loss * 2)).backward()


def test_a_call_whose_operand_there_is_no_memory_to_copy_is_found_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, x = hooks.NonFinite(action="record", save=tmp_path), torch.full((3, 3), torch.nan)
    with intercept(search):
        monkeypatch.setattr(Tensor, "clone", Mock(side_effect=torch.OutOfMemoryError))
        torch.zeros(3, 3).addmm_(x, x)
        monkeypatch.undo()
    (finding,) = search.findings
    assert finding.saved is None
    assert finding.unsaved == "the device had no memory left for a copy of what the call overwrites"
    assert list(tmp_path.iterdir()) == []
