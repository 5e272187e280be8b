"""Ready-made hooks, the pytest fixture and `diff` on registered operators: one of each kind that libraries define."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from opintercept import OpCall, OpInterceptWarning, hooks, intercept, register_op, runs
from opintercept.cli import main
from opintercept.testing.plugin import OpCalls

LIBRARY = torch.library.Library("hooked_tests", "DEF")
LIBRARY.define("coded(Tensor x, Tensor codes, Tensor scale) -> Tensor")
LIBRARY.define("writing(Tensor! y, Tensor x, Tensor w) -> ()")
SCALE = torch.tensor(0.25)


@torch.library.custom_op("hooked_tests::plain", mutates_args=())
def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


def write(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    y.copy_(x @ w.T)


LIBRARY.impl("coded", lambda x, codes, scale: x @ (codes * scale).T, "CPU")
LIBRARY.impl("writing", write, "CPU")


@dataclass
class Operator:
    """One that computes `x @ w.T`.

    Attributes:
        name: Its name.
        run: Runs it. A weight that is quantised is `w / SCALE`, and what it writes to holds NaN before.
        reference: What it is registered with as its reference.
        operands: The bytes of x, w, its scale and the product for an x of [2, 3] and a w of [4, 3].
    """

    name: str
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    reference: Callable[..., Any]
    operands: int = (6 + 12 + 8) * 4


def run_writing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.full((x.shape[0], w.shape[0]), torch.nan)
    assert torch.ops.hooked_tests.writing(y, x, w) is None
    return y


OPERATORS: dict[str, tuple[Operator, dict[str, Any]]] = {
    "custom_op": (Operator("hooked_tests::plain", plain, lambda x, w: x @ w.T), {"rhs": "w"}),
    "quantised": (
        Operator(
            "hooked_tests::coded",
            lambda x, w: torch.ops.hooked_tests.coded(x, (w / SCALE).to(torch.int8), SCALE),
            lambda x, codes, scale: x @ (codes * scale).T,
            (6 + 8 + 1) * 4 + 12,
        ),
        {"rhs": "codes", "scales": "scale", "dequantize": lambda codes, scale, **_: codes * scale},
    ),
    "writing": (Operator("hooked_tests::writing", run_writing, write), {"rhs": "w"}),
}
X, W = torch.tensor([[1.0, 2.0, 3.0], [-4.0, 5.0, 6.0]]), torch.arange(12.0).reshape(4, 3)


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Iterator[Operator]:
    """An operator while it is registered."""
    operator, roles = OPERATORS[request.param]
    with register_op(operator.name, lhs="x", layout="nk", reference=operator.reference, **roles):
        yield operator


def test_stats_read_operands_and_output(operator: Operator) -> None:
    with intercept(stats := hooks.Stats(of=("lhs", "rhs", "output"))):
        operator.run(X, W)
    rows = {row.operand: (row.min, row.max, row.count) for row in stats.rows()}
    assert rows == {"lhs": (-4.0, 6.0, 6), "rhs": (0.0, 11.0, 12), "output": (8.0, 80.0, 8)}


def test_nonfinite_finds_the_operator_that_overflows(operator: Operator) -> None:
    search = hooks.NonFinite(inf=True, action="record")
    with intercept(search):
        operator.run(X * 1e38, W)
    (found,) = search.findings
    assert (found.kind, found.record.op) == ("made", operator.name)
    search = hooks.NonFinite(action="record")
    with intercept(search):
        operator.run(X * torch.nan, W)
    (found,) = search.findings
    assert (found.kind, found.bad) == ("came in", ("lhs",))


def test_capture_copies_operands_and_output(operator: Operator) -> None:
    with intercept(capture := hooks.Capture(of=("lhs", "rhs", "output"))):
        product = operator.run(X, W)
    assert [entry.op for entry in capture.entries] == [operator.name] * 3
    for entry, expected in zip(capture.entries, (X, W, product), strict=True):
        assert torch.equal(entry.tensor, expected)
    assert torch.equal(product, X @ W.T)


def test_reference_runs_what_was_declared(operator: Operator) -> None:
    with intercept(reference := hooks.Reference()):
        product = operator.run(X / 3, W)
    (row,) = reference.rows()
    assert (row.op, row.shape, row.dtype, row.nonfinite) == (operator.name, "[2, 3] @ [3, 4]", "float32", 0)
    assert row.max_absolute == float((product - (X / 3).double() @ W.double().T).abs().max()) > 0


def test_profile_counts_flops_and_bytes(operator: Operator) -> None:
    with intercept(profile := hooks.Profile()):
        operator.run(X, W)
        operator.run(X, W)
    (row,) = profile.rows()
    assert (row.op, row.shape, row.calls) == (operator.name, "[2, 3] @ [3, 4]", 2)
    assert (row.flops, row.bytes) == (2 * 48, 2 * operator.operands)


def test_fake_quantize_rounds_the_lhs(operator: Operator) -> None:
    x = X / 7
    seen: list[Any] = []
    with intercept([hooks.FakeQuantize(of="lhs", per="channel"), lambda call: seen.append(call.lhs)]):
        product = operator.run(x, W)
    scale = x.abs().amax(1, keepdim=True) / 127
    rounded = (x / scale).round() * scale
    assert torch.equal(seen[0], rounded)
    assert torch.equal(product, rounded @ W.T)
    assert not torch.equal(product, x @ W.T)


def test_an_output_may_be_replaced(operator: Operator) -> None:
    with intercept(lambda call: call.output + 1):
        product = operator.run(X, W)
    assert torch.equal(product, X @ W.T + 1)


def test_the_pytest_fixture_sees_it(operator: Operator, op_calls: OpCalls) -> None:
    operator.run(X, W)
    op_calls.expect(op=operator.name, phase="forward", count=1, shapes=((2, 3), (4, 3)), finite=True)
    assert [call.op for call in op_calls] == [operator.name]
    assert op_calls.flops == 48
    with pytest.raises(pytest.fail.Exception, match=operator.name):
        op_calls.expect(count=0)


def test_diff_finds_the_weight_that_changed(
    operator: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, w in (("a", W), ("again", W), ("b", W * 2)):
        with intercept(runs.RunRecorder(tmp_path / name)):
            operator.run(X, W)
            operator.run(X, w)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "again")]) == 0
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    printed = capsys.readouterr().out
    assert f"call 1 of A and 1 of B, step 0, forward: {operator.name}" in printed
    assert "changed operand: rhs differs, and no earlier difference explains it" in printed


def test_what_an_operator_writes_its_result_to_is_no_operand() -> None:
    seen: list[list[str]] = []

    def look(call: OpCall) -> None:
        seen.append(list(call.tensors))

    with register_op("hooked_tests::writing", lhs="x", rhs="w", layout="nk"), intercept(look):
        run_writing(X, W)
    # If the program says what it is, the operator may add to it.
    with register_op("hooked_tests::writing", lhs="x", rhs="w", bias="y", layout="nk"), intercept(look):
        run_writing(X, W)
    assert seen == [["lhs", "rhs"], ["bias", "lhs", "rhs"]]


@pytest.mark.parametrize(
    ("computed", "reason"),
    [
        (lambda x, w: (x @ w.T, x), "its reference computes another number of tensors"),
        (lambda x, w: None, "its reference computes another number of tensors"),
        (lambda x, w: x, "its reference has another shape"),
    ],
    ids=["two tensors", "nothing", "another shape"],
)
def test_a_reference_that_computes_nonsense_is_listed(computed: Callable[..., Any], reason: str) -> None:
    with register_op(plain, lhs="x", rhs="w", layout="nk", reference=computed):
        with intercept(reference := hooks.Reference()):
            plain(X, W)
    assert reference.rows() == []
    assert reference.skipped == {f"hooked_tests::plain: {reason}": 1}


def test_codes_without_dequantize_are_called_codes() -> None:
    search = hooks.NonFinite(action="warn")
    with register_op("hooked_tests::coded", lhs="x", rhs="codes", scales="scale", layout="nk"), intercept(search):
        with pytest.warns(OpInterceptWarning, match="hooked_tests::coded"):
            torch.ops.hooked_tests.coded(X, W.to(torch.int8), SCALE * torch.inf)
    (found,) = search.findings
    assert found.bad == ("scale",)
