"""`Reference`: its figures, the forms of matmul that it computes again, and those that it leaves out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import interrupts
import minilm
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_calls import call_of, product_of
from processes import run_python
from torch import nn
from torch.nn import functional as F

from opintercept import OpInterceptError, OpInterceptWarning, hooks, intercept
from opintercept._core.call import OpCall
from opintercept._values import errors

pytestmark = pytest.mark.slow

SHORT = torch.bfloat16


def measured(program: Callable[[], Any], level: Any = "dispatch", engine: Any = "auto", **options: Any) -> Any:
    """Run a program under the hook and return the hook."""
    reference = hooks.Reference(**options)
    with intercept(reference, level=level, engine=engine):
        program()
    return reference


def row_for(output: torch.Tensor, exact: torch.Tensor) -> hooks.ReferenceRow:
    """The figures of an output against a given reference."""

    class Given(hooks.Reference):
        def _again(self, call: OpCall, saved: Any) -> tuple[Any, Any]:
            return call.output, exact

    hook = Given()
    hook.post(product_of(output))
    assert hook.skipped == {}
    [row] = hook.rows()
    return row


def ulp(value: float, dtype: torch.dtype) -> float:
    """An ULP by its definition: 2 ** (max(exponent, smallest exponent) - precision + 1)."""
    info = torch.finfo(dtype)
    power = math.ldexp(0.5, math.frexp(abs(value))[1]) if value else 0.0
    return max(power, info.smallest_normal) * info.eps


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_figures_are_those_of_their_definitions(data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]), "dtype")
    size = data.draw(st.integers(1, 6), "size")
    # All dtypes can hold these values; the reference has more digits than the output.
    number = st.floats(-60000, 60000).map(lambda x: x if abs(x) > 1e-30 else 0.0) | st.sampled_from([0.0, 1.0, -2.0])
    exact = torch.tensor(data.draw(st.lists(number, min_size=size, max_size=size), "reference"), dtype=torch.float64)
    noise = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 1e-3, -0.3]), min_size=size, max_size=size), "noise"),
        dtype=torch.float64,
    )
    output = (exact * (1 + noise)).to(dtype)
    row = row_for(output.view(1, -1), exact.view(1, -1))
    y, r = output.double().tolist(), exact.tolist()
    errors = [abs(a - b) for a, b in zip(y, r, strict=True)]
    assert row.max_absolute == max(errors)
    assert row.max_relative == max(e and (e / abs(b) if b else math.inf) for e, b in zip(errors, r, strict=True))
    assert row.max_ulp == max(e / ulp(b, dtype) for e, b in zip(errors, r, strict=True))
    assert row.nonfinite == 0
    norm_y, norm_r, norm_e = (math.hypot(*values) for values in (y, r, errors))
    if norm_e == 0:
        assert row.snr == math.inf
    elif norm_r == 0:
        assert row.snr == -math.inf
    else:
        assert row.snr == pytest.approx(20 * math.log10(norm_r / norm_e), rel=1e-9, abs=1e-9)
    if norm_y and norm_r:
        cosine = math.fsum(a / norm_y * (b / norm_r) for a, b in zip(y, r, strict=True))
        assert row.cosine == pytest.approx(cosine, abs=1e-14)
        assert -1 <= row.cosine <= 1
    else:
        assert row.cosine == float(norm_y == norm_r)
    assert row.dtype == str(dtype).removeprefix("torch.")


def test_ulp_at_the_edges() -> None:
    # One ULP of float32 is 2**-23 at 1, half of that below 1, and 2**-149 from the smallest normal down to zero.
    for value, unit in ((1.0, 2**-23), (1 - 2**-24, 2**-24), (2**-126, 2**-149), (2**-140, 2**-149), (0.0, 2**-149)):
        row = row_for(torch.tensor([[value + 3 * unit]], dtype=torch.float64).float(), torch.tensor([[value]]).double())
        assert row.max_ulp == 3, value


def test_float8_has_ulps_too() -> None:
    # e4m3 has 3 bits after the point, so an ULP is 1 / 8 at 1, and 2**-9 for subnormals.
    for value, other, units in ((1.0, 1.25, 2), (0.0, 2**-8, 2), (64.0, 72.0, 1)):
        row = row_for(torch.tensor([[other]]).to(torch.float8_e4m3fn), torch.tensor([[value]]).double())
        assert row.max_ulp == units


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("output", "exact", "nonfinite"),
    [
        ([NAN, 1.5], [NAN, 1.0], 0),
        ([INF, 1.5], [INF, 1.0], 0),
        ([-INF, 1.5], [-INF, 1.0], 0),
        ([INF, 1.5], [-INF, 1.0], 1),
        ([INF, 1.5], [1e6, 1.0], 1),
        ([2.0, 1.5], [INF, 1.0], 1),
        ([NAN, 1.5], [2.0, 1.0], 1),
        ([NAN, NAN], [INF, 1.0], 2),
        ([2.0, 1.5], [NAN, 1.0], 1),
    ],
    ids=str,
)
def test_nan_and_infinity_either_agree_or_are_infinitely_wrong(
    output: list[float], exact: list[float], nonfinite: int
) -> None:
    row = row_for(torch.tensor([output]), torch.tensor([exact], dtype=torch.float64))
    assert row.nonfinite == nonfinite
    if nonfinite:
        assert (row.max_absolute, row.max_relative, row.max_ulp, row.snr) == (INF, INF, INF, -INF)
        assert row.cosine == 1.0  # of the elements that are finite in both
    else:
        assert (row.max_absolute, row.max_relative, row.max_ulp) == (0.5, 0.5, 2**22)
        assert row.snr == pytest.approx(20 * math.log10(2))


@pytest.mark.parametrize(
    ("output", "exact", "figures"),
    [
        ([0.0, 0.0], [0.0, 0.0], (0.0, 0.0, 0.0, 1.0, INF)),
        ([0.5, 0.0], [0.0, 0.0], (0.5, INF, 0.5 * 2.0**149, 0.0, -INF)),
        ([0.0, 0.0], [0.5, 0.0], (0.5, 1.0, 2.0**23, 0.0, 0.0)),
        ([1.0, 0.0], [1.0, 0.0], (0.0, 0.0, 0.0, 1.0, INF)),
        ([1.0, 0.5], [1.0, 0.0], (0.5, INF, 0.5 * 2.0**149, 1 / math.hypot(1, 0.5), 20 * math.log10(2))),
        ([-1.0, 0.0], [1.0, 0.0], (2.0, 2.0, 2.0**24, -1.0, -20 * math.log10(2))),
        ([], [], (0.0, 0.0, 0.0, 1.0, INF)),
    ],
    ids=["zeros", "not zero", "zero", "right", "one not zero", "negated", "empty"],
)
def test_zero_references(output: list[float], exact: list[float], figures: tuple[float, ...]) -> None:
    row = row_for(torch.tensor(output).view(1, -1), torch.tensor(exact, dtype=torch.float64).view(1, -1))
    got = (row.max_absolute, row.max_relative, row.max_ulp, row.cosine, row.snr)
    assert got == pytest.approx(figures, rel=1e-15)


def test_complex_elements_are_measured_by_their_modulus() -> None:
    row = row_for(torch.tensor([[3 + 4j, 0j]]), torch.tensor([[3 + 0j, 0j]], dtype=torch.complex128))
    assert (row.max_absolute, row.max_relative, row.max_ulp) == (4.0, 4 / 3, 4 / 2**-22)
    assert row.cosine == pytest.approx(3 / 5)
    assert row.snr == pytest.approx(20 * math.log10(3 / 4))


def test_squares_may_leave_the_range_of_float64() -> None:
    for factor in (1e200, 1e-200):
        exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64) * factor
        row = row_for(exact * torch.tensor([1.5, 1.0]).double(), exact)
        assert row.snr == pytest.approx(20 * math.log10(5 / 1.5))
        assert row.cosine == pytest.approx((4.5 * 3 + 16) / (math.hypot(4.5, 4) * 5))


def test_a_tiny_angle_is_not_lost() -> None:
    exact = torch.randn(1, 1000, dtype=torch.float64)
    tangent = torch.randn(1, 1000, dtype=torch.float64)
    tangent -= exact * (exact @ tangent.T) / (exact @ exact.T)
    angle = 1e-7
    row = row_for(exact + angle * tangent / tangent.norm() * exact.norm(), exact)
    assert 1 - row.cosine == pytest.approx(angle**2 / 2, rel=0.05)  # this is 45 units of 2**-53


def test_outputs_compared_in_pieces_give_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.randn(7, 5, dtype=torch.float64)
    exact[3, 3] = NAN
    output = exact.float() + torch.rand(7, 5)
    whole = row_for(output, exact)
    for size in (1, 4, 34, 35):
        monkeypatch.setattr(errors, "PIECE", size)
        row = row_for(output, exact)
        for figure in ("max_absolute", "max_relative", "max_ulp"):
            assert getattr(row, figure) == getattr(whole, figure)
        # Sums of 35 squares in another order.
        assert (row.snr, row.cosine) == pytest.approx((whole.snr, whole.cosine), rel=1e-13)
    assert whole.nonfinite == 0


def matrix(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * (torch.rand(tensor.shape) < 0.5)).to_sparse()


def aliased_out() -> None:
    bias = matrix(3, 3)
    torch.addmm(bias, matrix(3, 4), matrix(4, 3), out=bias)


def aliased_view() -> None:
    bias = matrix(3, 3)
    torch.addmm(bias.view(3, 3), matrix(3, 4), matrix(4, 3), out=bias)


attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention

FORMS: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.mm(matrix(3, 4), matrix(4, 5)),
    "mm out": lambda: torch.mm(matrix(3, 4), matrix(4, 5), out=torch.empty(3, 5)),
    "mm empty out": lambda: torch.mm(matrix(3, 4), matrix(4, 5), out=torch.empty(0)),
    "addmm": lambda: torch.addmm(matrix(5), matrix(3, 4), matrix(4, 5), beta=0.5, alpha=-2),
    "addmm no bias": lambda: torch.addmm(torch.full((5,), NAN), matrix(3, 4), matrix(4, 5), beta=0),
    "addmm out": lambda: torch.addmm(matrix(5), matrix(3, 4), matrix(4, 5), beta=3, out=matrix(3, 5)),
    "addmm aliased out": aliased_out,
    "addmm out aliased by a view": aliased_view,
    "addmm_": lambda: matrix(3, 5).addmm_(matrix(3, 4), matrix(4, 5), beta=0.5, alpha=-2),
    "addmm_ on a view": lambda: matrix(5, 3).t().addmm_(matrix(3, 4), matrix(4, 5)),
    "activation": lambda: torch._addmm_activation(matrix(5), matrix(3, 4), matrix(4, 5), use_gelu=True),
    "bmm": lambda: torch.bmm(matrix(2, 3, 4), matrix(2, 4, 5)),
    "bmm out": lambda: torch.bmm(matrix(2, 3, 4), matrix(2, 4, 5), out=matrix(2, 3, 5)),
    "baddbmm": lambda: torch.baddbmm(matrix(2, 3, 5), matrix(2, 3, 4), matrix(2, 4, 5), beta=0.5, alpha=-2),
    "baddbmm_": lambda: matrix(2, 3, 5).baddbmm_(matrix(2, 3, 4), matrix(2, 4, 5), beta=0.5),
    "addbmm": lambda: torch.addbmm(matrix(3, 5), matrix(2, 3, 4), matrix(2, 4, 5), alpha=-2),
    "addbmm_": lambda: matrix(3, 5).addbmm_(matrix(2, 3, 4), matrix(2, 4, 5), alpha=-2),
    "mv": lambda: torch.mv(matrix(3, 4), matrix(4)),
    "addmv": lambda: torch.addmv(matrix(3), matrix(3, 4), matrix(4), beta=2),
    "addmv_": lambda: matrix(3).addmv_(matrix(3, 4), matrix(4), beta=2),
    "dot": lambda: torch.dot(matrix(40), matrix(40)),
    "complex": lambda: torch.mm(matrix(3, 4, dtype=torch.complex64), matrix(4, 5, dtype=torch.complex64)),
    "vdot": lambda: torch.vdot(matrix(9, dtype=torch.complex64), matrix(9, dtype=torch.complex64)),
    "conjugated": lambda: torch.mm(matrix(3, 4, dtype=torch.complex64), matrix(5, 4, dtype=torch.complex64).mH),
    "negated": lambda: torch.mm(matrix(3, 4), matrix(4, 5, dtype=torch.complex64).conj().imag),
    "transposed": lambda: torch.mm(matrix(4, 3).t(), matrix(8, 9)[::2, ::3]),
    "expanded": lambda: torch.bmm(matrix(1, 3, 4).expand(2, 3, 4), matrix(2, 4, 5)),
    "sparse": lambda: torch.mm(sparse(matrix(3, 4)), matrix(4, 5)),
    "sparse csr": lambda: torch.mm(sparse(matrix(3, 4)).to_sparse_csr(), matrix(4, 5)),
    "sparse by sparse": lambda: torch.sparse.mm(sparse(matrix(3, 4)), sparse(matrix(4, 5))),
    "sparse addmm": lambda: torch.sparse.addmm(matrix(3, 5), sparse(matrix(3, 4)), matrix(4, 5), beta=2),
    "sspaddmm": lambda: torch.sspaddmm(sparse(matrix(3, 5)), sparse(matrix(3, 4)), matrix(4, 5)),
    "hspmm": lambda: torch.hspmm(sparse(matrix(3, 4)), matrix(4, 5)),
    "sampled": lambda: torch.sparse.sampled_addmm(sparse(matrix(3, 5)).to_sparse_csr(), matrix(3, 4), matrix(4, 5)),
    "sparse reduce": lambda: torch.sparse.mm(sparse(matrix(3, 4)).to_sparse_csr(), matrix(4, 5), "mean"),
    "linear": lambda: F.linear(matrix(2, 3, 4), matrix(5, 4), matrix(5)),
    "einsum": lambda: torch.einsum("bij,bkj->bik", matrix(2, 3, 4), matrix(2, 5, 4)),
    "tensordot": lambda: torch.tensordot(matrix(2, 3, 4), matrix(3, 4, 5), dims=2),
    "matrix power": lambda: torch.linalg.matrix_power(matrix(3, 3), 3),
    "bilinear": lambda: F.bilinear(matrix(2, 3), matrix(2, 4), matrix(5, 3, 4)),
    "cdist": lambda: torch.cdist(matrix(30, 4), matrix(30, 4), compute_mode="use_mm_for_euclid_dist"),
    "attention": lambda: attend(*(matrix(1, 2, 3, 4) for _ in range(3))),
    "causal": lambda: attend(*(matrix(1, 2, 3, 4) for _ in range(3)), is_causal=True),
    "masked": lambda: attend(
        *(matrix(1, 2, 3, 4) for _ in range(3)), torch.tensor([[True, False, True]] * 3), scale=2.0
    ),
    "grouped heads": lambda: F.scaled_dot_product_attention(
        matrix(2, 6, 3, 4), matrix(2, 2, 5, 4), matrix(2, 2, 5, 4), enable_gqa=True
    ),
    "math attention": lambda: attend(*(matrix(3, 4) for _ in range(3))),
}
if hasattr(torch, "_foreach_mm"):  # came with torch 2.13
    FORMS["foreach"] = lambda: torch._foreach_mm([matrix(3, 4), matrix(2, 3)], [matrix(4, 5), matrix(3, 3)])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", ["kernel", "mode", "function", "inference"])
def test_every_form_has_a_reference(name: str, way: str) -> None:
    level = "function" if way == "function" else "dispatch"
    engine = "mode" if way in ("mode", "inference") else "auto"
    with torch.inference_mode(way == "inference"):
        if way == "inference" and name == "addmm_ on a view":
            pytest.skip("torch forbids it")
        reference = measured(FORMS[name], level, engine)
        again = measured(FORMS[name], level, engine, dtype=torch.float32)
    assert reference.skipped == {}
    assert len(reference.rows()) >= 1
    for row in reference.rows():
        assert row.nonfinite == 0
        # A few float32 roundings of 2**-24 each; wrong operands would give about 0.
        assert row.snr > 115, row
        assert row.phase == "forward"
    assert again.rows() == []
    assert {reason.rpartition(": ")[2] for reason in again.skipped} <= {"already float32", "already complex64"}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", ["dispatch", "function"])
def test_a_changed_output_is_far_from_its_reference(name: str, level: Any) -> None:
    # The counterpart of the test above: an output that a hook has changed is far from its reference.
    def double(call: OpCall) -> Any:
        outputs = call.output if isinstance(call.output, (list, tuple)) else [call.output]
        changed = [o * 2 if isinstance(o, torch.Tensor) and o.layout == torch.strided else o for o in outputs]
        return type(call.output)(changed) if isinstance(call.output, (list, tuple)) else changed[0]

    if "sparse by" in name or name in ("sspaddmm", "hspmm", "sampled"):
        pytest.skip("its output is sparse")
    reference = hooks.Reference()
    with intercept([double, reference], level=level):
        FORMS[name]()
    for row in reference.rows():
        assert row.snr == pytest.approx(0, abs=0.1)
        assert row.max_relative == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_rounding_is_half_an_ulp(dtype: torch.dtype) -> None:
    a, b = torch.rand(64, 64).to(dtype), torch.rand(64, 64).to(dtype)
    out: dict[str, torch.Tensor] = {}
    reference = measured(lambda: out.update(y=a @ b))
    [row] = reference.rows()
    exact = a.double() @ b.double()
    error = (out["y"].double() - exact).abs()
    assert row.max_absolute == error.max().item()
    assert row.max_relative == (error / exact.abs()).max().item()
    # Nothing cancels, so float32 sums are off by at most 64 * 2**-24, then rounded once to 11 bits or fewer.
    assert 0.45 < row.max_ulp <= 0.51
    assert (row.op, row.shape, row.dtype) == ("aten::mm", "[64, 64] @ [64, 64]", str(dtype).removeprefix("torch."))
    [rough] = measured(lambda: a @ b, dtype=torch.float32).rows()
    assert rough.snr == pytest.approx(row.snr, abs=0.1)


def test_backward_has_references_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.first(x).relu())

    reference = measured(lambda: Net()(matrix(2, 8)).sum().backward())
    assert [(row.phase, row.module) for row in reference.rows()] == [
        ("forward", "first"),
        ("forward", "second"),
        ("backward", "second"),
        ("backward", "second"),
        ("backward", "first"),
    ]
    assert all(row.snr > 120 for row in reference.rows())
    assert reference.rows()[0].source is not None


@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "grouped", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_of_attention(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    from opintercept._values import attention

    if kind == "long":
        monkeypatch.setattr(attention, "PIECE", 100)  # pieces of about two rows
    heads = 2 if kind == "grouped" else 6
    q, k, v = (matrix(2, h, s, 16).to(dtype).requires_grad_() for h, s in ((6, 9), (heads, 11), (heads, 11)))
    options: dict[str, Any] = {"scale": 0.3, "is_causal": kind == "causal", "enable_gqa": kind == "grouped"}
    if kind == "masked":
        options["attn_mask"] = matrix(9, 11).to(dtype)
    upstream = matrix(2, 6, 9, 16).to(dtype)
    reference = measured(lambda: F.scaled_dot_product_attention(q, k, v, **options).backward(upstream))
    assert reference.skipped == {}
    forward, backward = reference.rows()
    op = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert (forward.op, backward.op) == (op, f"{op}_backward")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    for row in (forward, backward):
        assert row.snr > (120 if dtype == torch.float32 else 45)


def test_gradients_that_are_not_needed_are_left_out() -> None:
    q, k = matrix(1, 2, 3, 4).requires_grad_(), matrix(1, 2, 3, 4)
    reference = measured(lambda: F.scaled_dot_product_attention(q, k, k).sum().backward())
    assert len(reference.rows()) == 2
    assert all(row.snr > 120 for row in reference.rows())


def test_scaled_products() -> None:
    a, b = matrix(16, 32).to(torch.float8_e4m3fn), matrix(48, 32).to(torch.float8_e4m3fn).t()
    given = (a, b, torch.tensor(0.3), torch.tensor(2.0))
    different: list[dict[str, Any]] = [{}, {"bias": matrix(48)}, {"out": torch.empty(16, 48)}]
    for options in different:
        reference = measured(partial(torch._scaled_mm, *given, out_dtype=torch.float32, **options))
        assert reference.skipped == {}
        [row] = reference.rows()
        assert row.snr > 120
    [row] = measured(lambda: torch._scaled_mm(*given, out_dtype=torch.bfloat16)).rows()
    assert 45 < row.snr < 70
    one = torch.tensor(1.0)
    reference = measured(lambda: torch._scaled_mm(*given, scale_result=one, out_dtype=torch.float8_e4m3fn))
    assert reference.skipped == {"aten::_scaled_mm: devices apply scale_result in different ways": 1}


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_scales_of_rows_and_columns_and_of_blocks(second: bool, blocks: bool) -> None:
    # Some versions of torch and some devices have no kernel for these.
    a, b = matrix(16, 32).to(torch.float8_e4m3fn), matrix(48, 32).to(torch.float8_e4m3fn).t()
    scale_a, scale_b = torch.rand(16, 1 + blocks), torch.rand(1 + blocks, 48)
    func = torch.ops.aten._scaled_mm_v2.default if second else torch.ops.aten._scaled_mm.default
    recipe = [2 if blocks else 1]
    scales = ([scale_a], recipe, [], [scale_b], recipe, [], None, None) if second else (scale_a, scale_b)
    call = call_of(func, a, b, *scales)
    call.output = (a.float() * scale_a[:, :1]) @ (b.float() * scale_b[:1])
    hook = hooks.Reference()
    hook.post(call)
    if blocks:
        assert hook.skipped == {f"{call.op}: it has a scale for each block": 1}
    else:
        assert hook.skipped == {}
        assert hook.rows()[0].snr > 120


@pytest.mark.parametrize(
    ("lhs", "rhs", "ends"),
    [
        ((3, 5, 8), (3, 8, 16), None),
        ((12, 8), (3, 8, 16), [4, 4, 12]),
        ((16, 8), (3, 8, 16), [4, 4, 12]),
        ((3, 5, 8), (8, 16), [4, 8, 16]),
        ((8, 16), (16, 8), [4, 8, 16]),
    ],
    ids=["batches", "rows", "fewer rows", "columns", "inner"],
)
def test_grouped_products(lhs: tuple[int, ...], rhs: tuple[int, ...], ends: list[int] | None) -> None:
    a, b = torch.rand(lhs).bfloat16(), torch.rand(rhs).bfloat16()
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    reference = measured(lambda: F.grouped_mm(a, b, offs=offs))
    assert reference.skipped == {}
    [row] = reference.rows()
    assert row.max_ulp <= 0.51  # nothing cancels


@pytest.mark.parametrize("out", [False, True])
def test_out_dtype_does_not_change_the_reference(out: bool) -> None:
    # Only CUDA has kernels for these overloads.
    a, b = matrix(8, 16).bfloat16(), matrix(16, 8).bfloat16()
    product = a.float() @ b.float()
    func = torch.ops.aten.mm.dtype_out if out else torch.ops.aten.mm.dtype
    kwargs = {"out": product} if out else {}
    call = call_of(func, a, b, torch.float32, **kwargs)
    hook = hooks.Reference()
    hook.pre(call)
    call.output = product
    hook.post(call)
    assert hook.skipped == {}
    [row] = hook.rows()
    assert row.dtype == "float32"
    assert row.snr > 120


EIGHT = torch.ones(32, 32, dtype=torch.int8)
UNDECLARED = "it has no reference; register_op(reference=...) declares one"
SKIPPED: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "integers": (lambda: torch.ones(2, 2).long() @ torch.ones(2, 2).long(), "aten::mm: integers do not round", {}),
    "int8": (lambda: torch._int_mm(EIGHT, EIGHT), "aten::_int_mm: integers do not round", {}),
    "float64": (lambda: matrix(2, 2).double() @ matrix(2, 2).double(), "aten::mm: already float64", {}),
    "complex128": (
        lambda: torch.eye(2).to(torch.complex128) @ torch.eye(2).to(torch.complex128),
        "aten::mm: already complex128",
        {},
    ),
    "LSTM": (lambda: nn.LSTM(4, 4)(matrix(2, 1, 4)), f"aten::mkldnn_rnn_layer: {UNDECLARED}", {}),
    "packed": (
        lambda: torch._weight_int8pack_mm(matrix(32, 32).bfloat16(), EIGHT, torch.ones(32).bfloat16()),
        f"aten::_weight_int8pack_mm: {UNDECLARED}",
        {},
    ),
    "pinv": (
        lambda: torch.linalg.pinv(matrix(4, 4)),
        "torch.linalg.pinv: the dtype decides which singular values it drops",
        {"level": "function"},
    ),
    "no such device": (
        lambda: matrix(2, 2) @ matrix(2, 2),
        "aten::mm: PyTorch is not linked with support for xla devices",
        {"device": "xla"},
    ),
    "own dtype, on the CPU already": (
        lambda: matrix(2, 2) @ matrix(2, 2),
        "aten::mm: already float32",
        {"dtype": None, "device": "cpu"},
    ),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_calls_without_a_reference_are_counted(name: str) -> None:
    program, reason, options = SKIPPED[name]
    reference = measured(lambda: (program(), program()), **options)
    assert reference.rows() == []
    assert reference.skipped == {reason: 2}
    assert str(reference).splitlines()[-1] == f"skipped 2 {reason}"


def test_dropout_is_skipped_and_the_random_state_untouched() -> None:
    x = matrix(1, 2, 3, 4)
    plain: Any = torch.manual_seed(7) and F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    state = torch.get_rng_state()
    torch.manual_seed(7)
    outputs = []
    reference = measured(
        lambda: outputs.append(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)), level="function"
    )
    assert torch.equal(outputs[0], plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert reference.skipped == {"torch.nn.functional.scaled_dot_product_attention: dropout draws at random": 1}


def test_other_operators_are_counted() -> None:
    reference = hooks.Reference()
    with intercept(reference, ops="all"):
        matrix(2, 2).relu()
    assert reference.rows() == []
    assert set(reference.skipped) >= {"aten::relu: it is not a matmul"}


def test_vmap_is_counted_at_function_level() -> None:
    reference = measured(lambda: torch.vmap(torch.mm)(matrix(2, 3, 3), matrix(2, 3, 3)), level="function")
    assert reference.rows() == []
    [(reason, count)] = reference.skipped.items()
    assert (reason.startswith("torch.mm: "), count) == (True, 1)


def test_calls_are_skipped_if_torch_may_round_float32_operands() -> None:
    a = matrix(4, 4).bfloat16()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        reference = measured(lambda: a @ a, dtype=torch.float32)
        assert len(measured(lambda: a @ a).rows()) == 1
    finally:
        torch.set_float32_matmul_precision(before)
    assert reference.skipped == {
        "aten::mm: torch may round float32 operands; see torch.set_float32_matmul_precision": 1
    }


def test_an_overwritten_operand_that_a_later_hook_replaces_is_counted() -> None:
    class Replace:
        def pre(self, call: OpCall) -> Any:
            return tuple(a.clone() for a in call.args), call.kwargs

    reference, x = hooks.Reference(), matrix(3, 3)
    with intercept([reference, Replace()]):
        x.addmm_(matrix(3, 3), matrix(3, 3))
        torch.mm(x, x)
    assert reference.skipped == {"aten::addmm_: its operands were overwritten before they could be copied": 1}
    assert [row.op for row in reference.rows()] == ["aten::mm"]
    first = hooks.Reference()
    with intercept([Replace(), first]):
        x.addmm_(matrix(3, 3), matrix(3, 3))
    assert first.rows()[0].snr > 120
    assert not len(reference._saved)
    assert not len(first._saved)


def test_a_failing_call_leaves_no_copies_behind() -> None:
    reference = hooks.Reference()
    with intercept(reference), pytest.raises(RuntimeError, match="cannot be multiplied"):
        matrix(3, 3).addmm_(matrix(3, 2), matrix(3, 3))
    assert not len(reference._saved)
    assert reference.rows() == []


def test_rounding_of_the_operands_does_not_count() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rough, self.fine = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.rough(x)
            return self.fine(x.float())

    rows = {row.module: row for row in measured(lambda: Net()(matrix(4, 32))).rows()}
    assert rows["rough"].snr < 60
    assert rows["fine"].snr > 120


class Shortened(nn.Module):
    """A linear layer that computes in bfloat16."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short: torch.Tensor = self.layer.to(SHORT)(x.to(SHORT))
        return short.float()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("layer", ["h.0.attn.c_proj", "h.1.mlp.c_fc"])
def test_a_planted_cast_is_found_in_a_model(layer: str, training: bool) -> None:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train(training)
    parent, _, name = f"transformer.{layer}".rpartition(".")
    setattr(model.get_submodule(parent), name, Shortened(model.get_submodule(f"transformer.{layer}")))
    tokens = torch.randint(0, 50, (2, 12))
    reference = hooks.Reference()
    with intercept(reference):
        loss = model(tokens, labels=tokens).loss
        if training:
            loss.backward()
    worst = reference.worst(3 if training else 1)
    assert {row.module for row in worst} == {f"transformer.{layer}.layer"}
    assert {row.phase for row in worst} == ({"forward", "backward"} if training else {"forward"})
    assert all(row.snr < 65 for row in worst)
    others = [row for row in reference.rows() if row not in worst]
    assert len(others) >= 10
    assert all(row.snr > 115 for row in others)


def test_a_planted_cast_is_found_in_a_pretrained_model() -> None:
    model, tokenizer = minilm.load()
    inputs = tokenizer(["see every matmul", "and change not a single bit of it"], padding=True, return_tensors="pt")
    layer = model.encoder.layer[3].intermediate
    layer.dense = Shortened(layer.dense)
    reference, weights = hooks.Reference(), hooks.AttentionWeights()
    with torch.no_grad(), intercept([reference, weights]):
        model(**inputs)
    assert reference.skipped == weights.skipped == {}
    worst, *others = reference.worst(99)
    assert worst.module == "encoder.layer.3.intermediate.dense.layer"
    assert worst.snr < 60
    assert len(others) == 6 * 7  # four projections, the attention and two linear layers in each, and the pooler
    assert all(row.snr > 115 for row in others)
    assert len(weights["encoder.layer.*"]) == 6


def test_worst_sorts_by_the_measure() -> None:
    reference = measured(lambda: [torch.mm(matrix(8, 8).to(d), matrix(8, 8).to(d)) for d in (SHORT, torch.float32)] * 2)
    rows = reference.rows()
    assert [row.index for row in rows] == [0, 1]
    for by in ("snr", "cosine", "max_ulp", "max_relative", "max_absolute"):
        figures = [getattr(row, by) for row in reference.worst(by=by)]
        assert figures == sorted(figures, reverse=by.startswith("max"))
    assert reference.worst(1) == [rows[0]]
    assert len(reference.worst(99)) == 2
    with pytest.raises(ValueError, match=r"^by must be one of 'snr', .*, got 'ulp'$"):
        reference.worst(by="ulp")
    with pytest.raises(ValueError, match=r"^n must be a whole number of at least 1, got 0$"):
        reference.worst(0)
    reference.clear()
    assert (reference.rows(), reference.skipped) == ([], {})


def test_the_table_has_the_worst_calls_and_says_how_many_there_are() -> None:
    reference = measured(lambda: [torch.mm(matrix(4, 4), matrix(4, 4)) for _ in range(25)])
    head, *lines = str(reference).splitlines()
    words = "module op shape dtype phase call absolute relative ULP 1 - cosine SNR/dB"
    assert " ".join(head.split()) == words
    assert len(lines) == 21
    assert lines[-1] == "and 5 calls with smaller errors"
    assert [line.split()[-1] for line in lines[:-1]] == [f"{row.snr:.1f}" for row in reference.worst(20)]


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"max_relative": 1e-6}, r"max_relative=1e-06, got 0\.00\d+"),
        ({"max_ulp": 0.25}, r"max_ulp=0\.25, got 0\.\d+"),
        ({"min_snr": 100}, r"min_snr=100, got 5\d\.\d+"),
    ],
    ids=str,
)
@pytest.mark.parametrize("action", ["raise", "warn"])
def test_limits_raise_or_warn(limits: dict[str, Any], told: str, action: Any) -> None:
    layer = nn.Linear(16, 16).to(SHORT)
    x = matrix(4, 16).to(SHORT)
    message = (
        rf"^the output of aten::addmm violates {told} for bfloat16 \[4, 16\] @ \[16, 16\] in call 0 "
        r"\(forward\) in Linear at test_reference.py:\d+ in test_limits_raise_or_warn(\n|$)"
    )
    reference = hooks.Reference(**limits, action=action)
    expected: Any = (
        pytest.raises(OpInterceptError, match=message)
        if action == "raise"
        else pytest.warns(OpInterceptWarning, match=message)
    )
    with expected, intercept(reference):
        layer(x)
    assert len(reference.rows()) == 1
    within = hooks.Reference(max_relative=math.inf, max_ulp=2, min_snr=30, action=action)
    with warnings.catch_warnings(), intercept(within):
        layer(x)


def test_limits_hold_in_backward_and_for_values_that_are_not_finite() -> None:
    big = torch.full((4, 4), 200.0, dtype=torch.float16, requires_grad=True)
    with intercept(hooks.Reference(min_snr=-1000)), pytest.raises(OpInterceptError, match=r"got -inf .* \(backward\)"):
        torch.mm(big, torch.eye(4, dtype=torch.float16)).backward(torch.full((4, 4), 60000, dtype=torch.float16) * 1)
        torch.mm(torch.eye(4, dtype=torch.float16).requires_grad_(), big).backward(
            torch.full((4, 4), 60000.0, dtype=torch.float16)
        )


def test_references_at_function_level_have_no_graph_and_no_autocast() -> None:
    x = matrix(8, 8).requires_grad_()
    with torch.autocast("cpu", SHORT):
        reference = measured(lambda: torch.mm(x, x), level="function")
        short = measured(lambda: torch.mm(x, x), level="function", dtype=torch.float32, device="cpu")
    # The operands are those before autocast, so the error includes their rounding.
    assert reference.rows()[0].snr < 60
    assert short.skipped == {"torch.mm: already float32": 1}
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"dtype": SHORT}, ValueError, r"dtype must be torch.float64, torch.float32 or None, got torch.bfloat16"),
        ({"dtype": None}, ValueError, "a reference needs another dtype or device than the call; give .*"),
        ({"device": "meta"}, ValueError, "device='meta' holds no values; use device='cpu'"),
        ({"max_ulp": "1"}, TypeError, "max_ulp must be a number, got '1'"),
        ({"min_snr": True}, TypeError, "min_snr must be a number, got True"),
        ({"max_relative": -1}, ValueError, "max_relative must not be NaN or negative, got -1"),
        ({"max_ulp": NAN}, ValueError, "max_ulp must not be NaN or negative, got nan"),
        ({"min_snr": NAN}, ValueError, "min_snr must not be NaN, got nan"),
        ({"action": "record"}, ValueError, "action must be one of 'raise', 'warn', got 'record'"),
    ],
    ids=str,
)
def test_misuse_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        hooks.Reference(**given)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cpu"])
def test_references_of_cuda(device: str | None) -> None:
    reference = hooks.Reference(device=device)
    q, k = (torch.randn(2, 4, 64, 32, device="cuda", dtype=SHORT, requires_grad=True) for _ in range(2))
    a = torch.randn(64, 64, device="cuda")
    with intercept(reference):
        torch.mm(a, a)
        F.scaled_dot_product_attention(q, k, k, is_causal=True).sum().backward()
    assert reference.skipped == {}
    exact, *short = reference.rows()
    assert exact.snr > 120
    assert len(short) == 2
    assert all(row.snr > 40 for row in short)
    graph = torch.cuda.CUDAGraph()
    with intercept(reference), torch.cuda.graph(graph):
        torch.mm(a, a)
    assert reference.skipped == {"aten::mm: a CUDA graph is being captured, so no value can be read": 1}


@pytest.mark.slow
def test_the_newer_precision_settings_raise_no_error() -> None:
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("this torch does not have them")
    # In processes of their own, since torch has no way back to what a setting was before.
    script = """
import os, torch
from opintercept import hooks, intercept
for backend, setting in ("mkldnn.matmul", "bf16"), ("cuda.matmul", "tf32"), ("", "tf32"), ("", "ieee"):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    owner = torch.backends
    for name in filter(None, backend.split(".")):
        owner = getattr(owner, name)
    owner.fp32_precision = setting
    reference = hooks.Reference(torch.float32)
    with intercept(reference):
        torch.ones(3, 3, dtype=torch.bfloat16) @ torch.ones(3, 3, dtype=torch.bfloat16)
    print(f"{backend} {setting}:", *(reason.partition(";")[0] for reason in reference.skipped), len(reference.rows()))
    break
"""
    done = run_python("-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "mkldnn.matmul bf16: aten::mm: torch may round float32 operands 0",
        "cuda.matmul tf32: 1",
        " tf32: aten::mm: torch may round float32 operands 0",
        " ieee: 1",
    ]


def test_tensors_without_values_are_counted_at_function_level() -> None:
    def program() -> None:
        torch.func.grad(lambda x: torch.mm(x, matrix(3, 3)).sum())(matrix(3, 3))
        torch.mm(torch.ones(2, 2, device="meta"), torch.ones(2, 2, device="meta"))

    reference = measured(program, level="function")
    assert reference.rows() == []
    assert sum(reference.skipped.values()) == 2


@interrupts.needs_timer
def test_after_interrupts_each_row_belongs_to_its_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    reference = hooks.Reference()
    shapes = {"0": "[2, 3] @ [3, 4]", "1": "[2, 4] @ [4, 5]", "": "[3, 3] @ [3, 3]"}

    def program() -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))
            torch.zeros(3, 3).addmm_(torch.ones(3, 3), torch.ones(3, 3))

    def check() -> None:
        assert not len(reference._saved)
        for row in reference.rows():
            assert row.module is not None
            assert row.shape == shapes[row.module]
            assert row.snr > 100

    assert interrupts.interrupt(reference, program, check) > 0
    assert reference.rows()


def test_a_call_whose_operand_there_is_no_memory_to_copy_has_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, x = hooks.Reference(), torch.ones(3, 3)
    with intercept(reference):
        monkeypatch.setattr(torch.Tensor, "clone", Mock(side_effect=torch.OutOfMemoryError("no room is left")))
        x.addmm_(x, x)
        monkeypatch.undo()
        x.addmm_(x, x)
    assert reference.skipped == {"aten::addmm_: no room is left": 1}
    assert [(row.index, row.max_ulp) for row in reference.rows()] == [(1, 0)]
