"""`Checksum`: right products pass, wrong ones are found and named."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checksum_figures
import pytest
import sampled
import tensor_cores
import torch
from devices import no_waits
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_python
from torch import Tensor, nn

from opintercept import OpCall, OpInterceptError, OpInterceptWarning, hooks, intercept, register_op

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def check(program: Callable[[], Any], level: Any = "dispatch", first: Any = (), **options: Any) -> hooks.Checksum:
    """Run a program under a hook that records, and other hooks before it; return the hook."""
    checksum = hooks.Checksum(action="record", **options)
    with intercept([*first, checksum], level=level):
        program()
    return checksum


class Alter:
    """Changes the output of a call, or whatever a function makes of it."""

    reads = ()

    def __init__(self, change: Callable[[Tensor], Any], index: int = 0) -> None:
        self.change, self.index = change, index

    def post(self, call: OpCall) -> Tensor | None:
        if call.index != self.index:
            return None
        changed: Tensor = call.output.clone()
        self.change(changed)
        return changed


def products(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((17, 40), (40, 23), (17, 23)))
    aaa, bbb, ccc = (t.expand(3, *t.shape) * torch.arange(1, 4).view(3, 1, 1).to(dtype) for t in (a, b, c))
    u, v = a[0], b[:, 0]
    return {
        "mm": lambda: torch.mm(a, b),
        "transposed": lambda: torch.mm(a.mT.contiguous().mT, b.mT.contiguous().mT),
        "mm out=": lambda: torch.mm(a, b, out=torch.empty_like(c)),
        "addmm": lambda: torch.addmm(c, a, b, alpha=2, beta=3),
        "addmm row": lambda: torch.addmm(c[0], a, b),
        "addmm number": lambda: torch.addmm(c[0, 0], a, b, beta=0.5),
        "addmm column": lambda: torch.addmm(c[:, :1], a, b, beta=2),
        "addmm nothing": lambda: torch.addmm(torch.full_like(c, torch.nan), a, b, beta=0),
        "addmm_": lambda: c.clone().addmm_(a, b, beta=2),
        "addmm out=": lambda: torch.addmm(c, a, b, out=c.clone()),
        "bmm": lambda: torch.bmm(aaa, bbb),
        "baddbmm": lambda: torch.baddbmm(ccc, aaa, bbb, alpha=0.5),
        "baddbmm_": lambda: ccc.clone().baddbmm_(aaa, bbb),
        "addbmm": lambda: torch.addbmm(c, aaa, bbb, beta=0.5),
        "mv": lambda: torch.mv(a, v),
        "addmv": lambda: torch.addmv(c[:, 0], a, v, alpha=2),
        "addmv_": lambda: c[:, 0].clone().addmv_(a, v, beta=3),
        "dot": lambda: torch.dot(u, v),
        "vdot": lambda: torch.vdot(u, v),
        "matmul": lambda: aaa @ b,
        "matmul of batches": lambda: aaa.unsqueeze(1) @ bbb,
        "vector matmul": lambda: u @ bbb,
        "linear": lambda: nn.functional.linear(aaa, b.mT, c[0]),
        "linear of a vector": lambda: nn.functional.linear(u, b.mT, c[0]),
        "inner": lambda: torch.inner(aaa, b.mT),
        "tensordot": lambda: torch.tensordot(aaa, bbb, dims=([2, 0], [1, 0])),
        "tensordot of one": lambda: torch.tensordot(aaa, b, dims=1),
        "vecdot": lambda: torch.linalg.vecdot(aaa, aaa + 1, dim=1),
        "einsum": lambda: torch.einsum("bik,bkj->jbi", aaa, bbb),
        "einsum without an arrow": lambda: torch.einsum("ik,kj", a, b),
        "conjugate": lambda: a.conj() @ b,
    }


@pytest.mark.parametrize("level", ["function", "dispatch"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_right_products_pass_and_wrong_ones_are_found(dtype: torch.dtype, level: Any) -> None:
    programs = products(dtype)
    if level == "dispatch":
        del programs["vecdot"]  # an elementwise product there
    for name, program in programs.items():
        right = check(program, level)
        assert right.findings == [], name
        assert right.skipped == {}, name
        assert right.checked >= 1, name

    def double_one(output: Tensor) -> None:
        place = torch.unravel_index(output.abs().argmax(), output.shape)
        output[place] *= 2

    for name, program in programs.items():
        (finding, *_) = check(program, level, [Alter(double_one)]).findings
        assert finding.record.index == 0, name
        assert finding.residual > finding.bound, name


def test_a_finding_names_the_call_and_the_element() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20))

    altered = Alter(lambda output: output[3, 7].add_(0.01), index=1)
    checksum = check(lambda: model(torch.randn(8, 40)).sum().backward(), first=[altered])
    (found,) = checksum.findings
    assert (found.record.module, found.record.phase, found.record.index) == ("2", "forward", 1)
    assert found.record.source is not None
    assert found.record.source.startswith("test_checksum.py")
    assert (found.position, found.rows, found.suspected) == ((3, 7), (3,), 1)
    assert isinstance(found.got, float)
    assert isinstance(found.exact, float)
    assert found.got - found.exact == pytest.approx(0.01, rel=1e-3)
    assert (found.changed, found.repeats) == ((), False)
    assert checksum.checked == 5


@pytest.mark.parametrize("role", ["lhs", "rhs"])
@pytest.mark.parametrize("operator", ["mm", "mv", "bmm"])
def test_an_operand_that_changes_before_the_product_is_named(role: str, operator: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(12, 20), torch.randn(20, 9)
    checksum = hooks.Checksum(action="record")
    flip = hooks.BitFlip(of=role, bits=-1, seed=3)
    with intercept([checksum, flip]):
        if operator == "bmm":
            torch.bmm(a.expand(2, 12, 20), b.expand(2, 20, 9))
        else:
            a @ b if operator == "mm" else a @ b[:, 0]
    (found,) = checksum.findings
    assert found.changed == (role,)
    assert found.repeats is True


def test_memory_that_is_overwritten_between_the_checksum_and_the_product_is_named() -> None:
    a, b = torch.randn(12, 20), torch.randn(20, 9)

    class Overwrite:
        reads = ()

        def pre(self, call: OpCall) -> None:
            a[4, 5] += 1

    checksum = hooks.Checksum(action="record")
    with intercept([checksum, Overwrite()]):
        a @ b
    (found,) = checksum.findings
    assert found.changed == ("lhs",)
    assert found.rows == ()  # by now the product is right for what is in memory
    assert "changed since its checksum was taken: lhs" in str(found)


def test_a_product_that_is_written_over_its_own_operand_is_found() -> None:
    x = torch.randn(600, 600)  # some processors multiply smaller matrices in one piece, and right
    checksum = check(lambda: torch.addmm(x, x, x, out=x))  # torch does not refuse this, and reads what it has written
    (found,) = checksum.findings
    assert found.suspected > 1


def test_raise_stops_the_program_and_warn_warns_once() -> None:
    a = torch.ones(8, 8)

    def nine(index: int) -> Alter:
        return Alter(lambda output: output[0, 0].fill_(9), index)

    with pytest.raises(OpInterceptError, match=r"element \[0, 0\] is 9 and should be 8"):
        with intercept([nine(0), hooks.Checksum()]):
            a @ a
    checksum = hooks.Checksum(action="warn")
    with pytest.warns(OpInterceptWarning, match="wrong product of aten::mm") as warned:
        with intercept([nine(0), nine(1), checksum]):
            for _ in range(2):
                a @ a
    assert (len(warned), len(checksum.findings)) == (1, 2)


@pytest.mark.slow
def test_save_writes_a_script_that_runs_the_product_again(tmp_path: Path) -> None:
    product = lambda: torch.ones(3, 2).addmm_(torch.ones(3, 4), torch.ones(4, 2))  # noqa: E731
    (found,) = check(product, first=[hooks.BitFlip(bits=30)], save=tmp_path).findings
    assert found.saved is not None
    done = run_python(found.saved, check=True)
    assert done.stdout == "torch.float32 [3, 2] NaN 0 Inf 0\n"


def test_a_wrong_backward_with_a_right_forward_is_named() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return torch.mm(grads[0], w.mT), torch.mm(x.mT, grads[0])

    class Scale:
        """A backend whose second product of the backward pass is off by a thousandth."""

        reads = ()

        def post(self, call: OpCall) -> Tensor | None:
            return call.output * 1.001 if call.phase == "backward" and call.index == 2 else None

    multiply: Any = Wrong.apply
    torch.manual_seed(0)
    x, w = torch.randn(64, 48, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    (found,) = check(lambda: multiply(x, w).square().sum().backward(), first=[Scale()]).findings
    assert (found.record.phase, found.record.index) == ("backward", 2)
    assert found.suspected == 48


def test_a_custom_kernel_that_transposes_wrongly_is_found() -> None:
    @torch.library.custom_op("checksum_tests::linear", mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight  # and not its transpose

    x, weight = torch.randn(8, 16), torch.randn(16, 16)
    with register_op(linear, lhs="x", rhs="weight", layout="nk"):
        checksum = check(lambda: linear(x, weight))
    found = next(each for each in checksum.findings if each.record.op == "checksum_tests::linear")
    assert (found.suspected, found.repeats) == (8, True)
    assert "the kernel is wrong" in str(found)


def test_a_kernel_with_a_stale_copy_of_its_weight_is_found() -> None:
    packed: dict[int, Tensor] = {}

    @torch.library.custom_op("checksum_tests::packed", mutates_args=())
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        copy = packed.setdefault(weight.data_ptr(), weight.clone())
        return x @ copy

    x, weight = torch.randn(8, 16), nn.Parameter(torch.randn(16, 12))
    with register_op(linear, lhs="x", rhs="weight"), torch.no_grad():
        checksum = hooks.Checksum(action="record")
        with intercept(checksum):
            linear(x, weight)
            assert checksum.findings == []
            weight[3] *= 1.5
            linear(x, weight)
    (found,) = checksum.findings
    assert (found.record.op, found.record.index) == ("checksum_tests::packed", 1)


def test_a_registered_operator_with_an_argument_of_unknown_meaning_is_left_out() -> None:
    @torch.library.custom_op("checksum_tests::scaled", mutates_args=())
    def scaled(x: Tensor, weight: Tensor, scale: float) -> Tensor:
        return x @ weight * scale

    with register_op(scaled, lhs="x", rhs="weight"):
        checksum = check(lambda: scaled(torch.ones(2, 3), torch.ones(3, 4), 0.5))
    (reason,) = (reason for reason in checksum.skipped if "scaled" in reason)
    assert "its argument scale" in reason
    assert checksum.findings == []


@pytest.mark.parametrize("in_place", ["by torch", "through data"])
def test_a_weight_that_changes_is_noticed(in_place: str) -> None:
    layer, x = nn.Linear(64, 48), torch.randn(16, 64)
    checksum = hooks.Checksum()
    with intercept(checksum), torch.no_grad():
        for _ in range(3):
            layer(x)
            if in_place == "by torch":
                layer.weight.mul_(1.5)
            else:
                layer.weight.data.mul_(1.5)  # which does not count in the version
    assert (checksum.checked, checksum.findings) == (3, [])


def test_a_weight_that_is_hit_in_memory_is_named() -> None:
    layer, x = nn.Linear(64, 48), torch.randn(16, 64)
    checksum = hooks.Checksum(action="record")
    with intercept(checksum), torch.no_grad():
        layer(x)
        layer.weight.data[5, 6] = 100.0
        layer(x)
        layer(x)
    (found,) = checksum.findings
    assert (found.record.index, found.changed) == (1, ("rhs",))


def test_the_checksums_of_weights_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    from opintercept.hooks.checksum import arithmetic

    read: list[torch.Size] = []
    sign_sums = arithmetic.sign_sums

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        read.append(x.shape)
        return sign_sums(x, *args, **kwargs)

    monkeypatch.setattr(arithmetic, "sign_sums", spy)
    layer, x = nn.Linear(30, 20), torch.randn(5, 30)
    with intercept(hooks.Checksum(), engine="mode"), torch.no_grad():
        for _ in range(3):
            layer(x)
    assert read.count(torch.Size([30, 20])) == 1
    assert read.count(torch.Size([5, 20])) == 3


@pytest.mark.parametrize("alpha", [1e-3, 1, 1e3])
def test_the_first_row_of_a_weight_does_not_make_later_ones_suspect(
    alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    bias, looked = torch.randn(16), []
    monkeypatch.setattr("opintercept.hooks.checksum.checksum.look", lambda *given: looked.append(given))

    def program() -> None:
        with torch.no_grad():
            for _ in range(100):
                weight = nn.Parameter(torch.randn(16, 16))
                torch.addmm(bias, torch.randn(1, 16), weight, alpha=alpha)
                for _ in range(10):
                    torch.addmm(bias, torch.randn(1, 16), weight)

    assert check(program).checked == 1100
    assert looked == []


def test_every_checks_that_share_of_the_calls_of_a_loop_in_turn() -> None:
    modules = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))
    checked: set[str] = set()

    class PendingRecord:
        reads = ("module",)

        def post(self, call: OpCall) -> None:
            if checksum.checked > before[0]:
                checked.add(str(call.module))
            before[0] = checksum.checked

    before = [0]
    checksum = hooks.Checksum(every_calls=10)
    with intercept([checksum, PendingRecord()]), torch.no_grad():
        for _ in range(100):
            for module in modules:
                module(torch.ones(2, 4))
    assert checksum.checked == pytest.approx(100, abs=2)
    assert len(checked) == 10


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_values_that_are_not_finite_or_overflow_raise_no_alarm(value: float) -> None:
    a = torch.randn(40, 50)
    a[3, 4] = value
    checksum = check(lambda: (a @ a.mT, a.half() @ a.half().mT, a.bfloat16() @ a.bfloat16().mT))
    assert checksum.findings == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_are_rounded_before_they_are_added_raise_no_alarm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)

    def program() -> None:
        for _ in range(200):
            a, x, y = torch.randn(8, 48).to(dtype).t(), torch.randn(8).to(dtype), torch.randn(48).to(dtype)
            torch.addmv(y, a, x)
            torch.addmv(y, a, x, alpha=0.3, beta=1.7)
            torch.addmv(y, a, x, alpha=6e-8, beta=0)
            nn.functional.linear(x.expand(2, 3, 8), a, y)
            torch.sparse.mm(a.to_sparse(), x.unsqueeze(1))
            torch.sparse.addmm(y.unsqueeze(1), (a * 1e-4).to_sparse(), 1e4 * x.unsqueeze(1), alpha=1e-3, beta=0)

    assert check(program, level="function").findings == []
    assert check(program).findings == []


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("alpha", [0, 1e-45, 1e-30, 1e30, 1e38])
def test_an_overflow_that_alpha_brings_back_or_makes_raises_no_alarm(alpha: float, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((6, 12), (12, 20), (6, 20)))
    a[1:4] = largest / torch.tensor([[1], [2], [1e4]])

    def program() -> None:
        torch.addmm(c, a, b, alpha=alpha)
        torch.addmm(c, a, b, alpha=alpha, beta=1e30)
        torch.addbmm(c, a.expand(2, 6, 12), b.expand(2, 12, 20), alpha=alpha)
        if dtype != torch.float16 or alpha < 1:  # float16 cannot hold the others
            torch.addmv(c[:, 0], a, b[:, 0], alpha=alpha)

    assert check(program).findings == []


def test_an_autocast_that_overflows_raises_no_alarm() -> None:
    x, layer = torch.tensor([[1e6, -1e6, 1e-9, 1e-7]]).bfloat16(), nn.Linear(4, 3)

    def program() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            layer(x)
            layer(x[:, 2:].repeat(1, 2))

    assert check(program, level="function").findings == []


def test_a_nan_that_the_operands_do_not_explain_is_found() -> None:
    a = torch.randn(40, 50)
    a[3, 4] = float("inf")

    altered = Alter(lambda output: output[7, 8].fill_(torch.nan))
    checksum = check(lambda: a @ torch.randn(50, 60), first=[altered])
    assert [found.position for found in checksum.findings] == [(7, 8)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8], ids=str)
def test_integers_must_be_equal(dtype: torch.dtype) -> None:
    a, b = (torch.randint(0, 100, shape).to(dtype) for shape in ((20, 30), (30, 10)))

    def program() -> None:
        a @ b
        torch.addmm(torch.ones(20, 10).to(dtype), a, b, alpha=3)
        if dtype is torch.int8:
            torch._int_mm(a, b)

    assert check(program).findings == []

    (found,) = check(lambda: a @ b, first=[Alter(lambda output: output[2, 3].add_(1))]).findings
    assert (found.position, found.bound) == ((2, 3), 0.0)


@pytest.mark.skipif(
    not hasattr(torch, "_foreach_mm"), reason="a scale for each row on the CPU, like _foreach_mm, came with torch 2.13"
)
def test_scaled_and_grouped_products_and_lists_of_products_are_checked() -> None:
    a, b = torch.randn(32, 64).to(torch.float8_e4m3fn), torch.randn(48, 64).to(torch.float8_e4m3fn).mT
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(2, 16, 8).bfloat16()

    def program() -> None:
        torch._scaled_mm(a, b, torch.tensor(0.5), torch.tensor(3.0), out_dtype=torch.bfloat16)
        torch._scaled_mm(a, b, torch.rand(32, 1) + 1, torch.rand(1, 48) + 1, out_dtype=torch.bfloat16)
        torch._grouped_mm(x, w, offs=torch.tensor([8, 32], dtype=torch.int32))
        torch._foreach_mm([torch.randn(3, 4), torch.randn(5, 6)], [torch.randn(4, 5), torch.randn(6, 7)])

    checksum = check(program)
    assert (checksum.findings, checksum.skipped) == ([], {})
    assert checksum.checked >= 6

    wrong = check(program, first=[Alter(lambda output: output.mul_(2), index) for index in (0, 1)])
    assert [found.record.index for found in wrong.findings] == [0, 1]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_operands_are_checked(layout: torch.layout) -> None:
    eye = torch.eye(20) * torch.arange(20.0)
    sparse = eye.to_sparse() if layout == torch.sparse_coo else eye.to_sparse_csr()
    dense = torch.randn(20, 30)
    checksum = check(lambda: (sparse @ dense, torch.sparse.addmm(dense, sparse, dense)))
    assert checksum.findings == []
    assert checksum.checked == 2

    wrong = check(lambda: sparse @ dense, first=[Alter(lambda output: output[4, 5].add_(1))])
    assert [found.position for found in wrong.findings] == [(4, 5)]


@settings(max_examples=150)
@given(st.data())
def test_a_flipped_exponent_bit_is_found_in_any_product(data: st.DataObject) -> None:
    m, n, k = (data.draw(st.integers(1, 40)) for _ in range(3))
    seed = data.draw(st.integers(0, 2**32))
    dtype, bits = data.draw(st.sampled_from([(torch.float32, range(24, 32)), (torch.bfloat16, range(13, 15))]))
    torch.manual_seed(seed)
    a, b = torch.rand(m, k) + 0.5, torch.rand(k, n) + 0.5  # all elements of a row are of one size
    a, b = a.to(dtype), b.to(dtype)
    flip = hooks.BitFlip(bits=bits, seed=seed)
    checksum = check(lambda: torch.mm(a, b), first=[flip])
    assert [found.position for found in checksum.findings] == [flip.log[0].position]


def test_an_empty_product_and_one_under_a_transform_are_left_out() -> None:
    checksum = check(lambda: (torch.ones(0, 3) @ torch.ones(3, 2), torch.ones(2, 0) @ torch.ones(0, 2)))
    assert checksum.checked == 0
    checksum = check(lambda: torch.func.vmap(torch.mm)(torch.ones(2, 3, 3), torch.ones(2, 3, 3)))
    assert checksum.findings == []


def test_autocast_at_function_level_raises_no_alarm() -> None:
    a = torch.randn(64, 80)

    def program() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.linear(a, a), a @ a.mT

    checksum = check(program, "function")
    assert (checksum.checked, checksum.findings) == (2, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sigma": 0}, "sigma must be a positive number, got 0"),
        ({"action": "stop"}, "action must be one of 'raise', 'warn', 'record', got 'stop'"),
        ({"every_calls": 0}, "every_calls must be a whole number of at least 1, got 0"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hooks.Checksum(**options)


def test_estimated_errors_are_those_of_reference() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).bfloat16()
    checksum, reference = hooks.Checksum(estimate=True), hooks.Reference()
    with intercept([checksum, reference]):
        model(torch.randn(200, 64).bfloat16()).square().mean().backward()
    estimated = {row.module: row.relative for row in checksum.errors() if row.phase == "forward"}
    exact = {row.module: 10 ** (-row.snr / 20) for row in reference.rows() if row.phase == "forward"}
    assert estimated.keys() == exact.keys()
    for key, value in estimated.items():
        assert value == pytest.approx(exact[key], rel=0.2)  # the estimate is a sample of 200 rows in 4 to 8 groups
    assert "relative error" in str(checksum)


class Blocks(nn.Module):
    """Two blocks whose products a checkpoint repeats in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for layer in (self.first, self.second):
            x = checkpoint(lambda x, layer=layer: layer(layer(x).relu()).relu(), x, use_reentrant=False)
        return x


def test_a_product_that_a_checkpoint_repeats_differently_is_named() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(8, 16)

    class Nudge:
        """Moves one element by one ulp, which no checksum sees."""

        reads = ("module",)

        def post(self, call: OpCall) -> Tensor | None:
            if call.phase != "recompute" or call.module != "first":
                return None
            output = call.output.clone()
            output[0, 0] = torch.nextafter(output[0, 0], torch.tensor(9.0))
            return output  # type: ignore[no-any-return]

    checksum = hooks.Checksum(action="record", recompute=True)
    with intercept(checksum):
        for _ in range(2):
            model(x).sum().backward()
    assert checksum.findings == []
    with intercept([Nudge(), checksum]):
        model(x).sum().backward()
    found = checksum.findings[0]
    assert (found.record.module, found.record.phase, found.twin) == ("first", "recompute", 0)
    assert "it repeats call 0 from the same operands, and its output differs" in str(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_call_waits_for_a_device(dtype: torch.dtype) -> None:
    a, b = torch.randn(64, 128, device="cuda", dtype=dtype), torch.randn(128, 32, device="cuda", dtype=dtype)
    hook = hooks.Checksum(action="record")

    with intercept(hook):
        a @ b  # moves the signs to the device
    with intercept([Alter(lambda output: output[5, 6].fill_(1e4)), hook]) as watch:
        with no_waits():
            a @ b
            a.expand(3, 64, 128) @ b.expand(3, 128, 32)
        assert hook.findings == []
        watch.step()
        a @ b  # the first call of the next step reads the verdicts
        (found,) = hook.findings
    assert (found.record.index, found.position, found.repeats) == (0, (5, 6), None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bits", "least"), [("float32", (20, 23, 30, 31), 0.99), ("bfloat16", (8, 12, 15), 0.95)]
)
@pytest.mark.parametrize("role", ["output", "lhs", "rhs"])
def test_flipped_bits_in_a_training_step_are_found(role: str, dtype: str, bits: Any, least: float) -> None:
    if sampled.on and (role == "rhs") != (dtype == "bfloat16"):
        pytest.skip("sampled")
    step = checksum_figures.llama_step(getattr(torch, dtype))
    found = checksum_figures.flips(step, role, bits, 15)
    assert sum(tally.elsewhere for tally in found.values()) == 0
    visible = sum(tally.visible for tally in found.values())
    assert visible > 30
    # One more may be missed than the share allows, since this is a sample.
    assert sum(tally.visible_found for tally in found.values()) >= least * visible - 1


@pytest.mark.slow
def test_random_products_of_every_kind_raise_no_alarm() -> None:
    for kind, checksum in checksum_figures.alarms(30, 256).items():
        assert checksum.findings == [], kind
        assert checksum.rows > 500
        assert checksum.skipped == {}


def computed(way: str, program: Callable[[], Any], *others: Any) -> hooks.Checksum:
    """Check a program whose products tensor cores compute, and that other hooks change then."""
    _, flags, multiply = tensor_cores.ARITHMETIC[way]
    with tensor_cores.settings("cpu", **flags):
        return check(program, first=[tensor_cores.Computed(multiply), *others])


@pytest.mark.slow
@pytest.mark.parametrize("way", tensor_cores.ARITHMETIC)
def test_what_tensor_cores_round_is_no_error(way: str) -> None:
    torch.manual_seed(0)
    dtype = tensor_cores.ARITHMETIC[way][0]
    # With 3 columns all signs are equal, so that errors that are alike add up in the checksum.
    sizes = [
        *checksum_figures.sizes(256, sampled.fewer(6, 2)),
        (1456, 16, 70),
        (9, 3, 2000),
        (16, 32, 2048),
        (64, 200, 301),
    ]
    for kind, make in checksum_figures.KINDS.items():
        for m, n, k in sizes:
            a, b, bias = (make(*size).to(dtype) for size in ((m, k), (k, n), (1, n)))
            turned = partial(torch.mm, a, b.mT.contiguous().mT)
            found = [
                each
                for program in (turned, partial(torch.addmm, bias[0], a, b))
                for each in computed(way, program).findings
            ]
            assert [str(each) for each in found if not each.flags] == [], (kind, m, n, k)
            assert not any(abs(each.got) < math.inf for each in found), (kind, m, n, k)


@pytest.mark.slow
@pytest.mark.parametrize("way", tensor_cores.ARITHMETIC)
def test_errors_beside_what_tensor_cores_round_are_found(way: str) -> None:
    dtype, found = tensor_cores.ARITHMETIC[way][0], 0

    def swap(output: Tensor) -> None:
        output[[3, 20]] = output[[20, 3]]

    def empty(output: Tensor) -> None:
        output[16:32, 16:32] = 0

    def double(output: Tensor) -> None:
        output.view(-1)[output.abs().argmax()] *= 2

    for seed in range(5):
        torch.manual_seed(seed)
        a, b = torch.randn(40, 300).to(dtype), torch.randn(300, 50).to(dtype)
        for change in (swap, empty, double):
            found += len(computed(way, partial(torch.mm, a, b), Alter(change)).findings)
    assert found == 15


def test_parts_that_are_all_rounded_in_one_direction_are_no_error() -> None:
    pair = torch.full((32,), 16.0)
    pair[15], pair[31] = 16.875, 17.125  # parts of 256.875 and -257.125, which bfloat16 rounds to 256 and -258
    pair[16:] *= -1
    a, b = torch.ones(4, 512, dtype=torch.bfloat16), pair.repeat(16).bfloat16().expand(3, 512).mT
    tiny = torch.full((4, 512), 2.0**-15, dtype=torch.float16)  # parts of 2**-26, which float16 rounds to 0
    for way, lhs, rhs, exact, got in (
        ("bfloat16 in 32 parts", a, b, -4.0, -32.0),
        ("float16 in 32 parts", tiny, tiny[:3].mT, 2.0**-21, 0.0),
    ):
        _, flags, multiply = tensor_cores.ARITHMETIC[way]
        assert set((lhs.double() @ rhs.double()).view(-1).tolist()) == {exact}
        assert set(multiply(lhs, rhs).view(-1).tolist()) == {got}
        with tensor_cores.settings("cpu", **flags):
            found = check(partial(torch.mm, lhs, rhs), first=[tensor_cores.Computed(multiply)], sigma=1)
        assert found.findings == []


def test_sums_of_parts_that_overflow_in_float16_are_told_with_the_setting_that_lets_them() -> None:
    a = torch.full((4, 64), 100.0, dtype=torch.float16)
    b = torch.full((64, 40), 100.0, dtype=torch.float16)
    b[32:] *= -1
    (found,) = computed("float16 in 2 parts", lambda: a @ b).findings
    assert (str(found.got), found.exact) == ("nan", 0)
    assert found.flags == ("allow_fp16_reduced_precision_reduction",)
    assert str(found).splitlines()[-3:-1] == [
        "  it may have overflowed on the way, since the device may add up in float16; to forbid that:",
        "  torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    ]
    (found,) = computed("float16 in 2 parts", lambda: a @ b, Alter(lambda y: y.fill_(3000.0))).findings
    assert found.flags == ()  # it is finite
    (found,) = computed("float16 in 2 parts", lambda: (a / 10) @ b, Alter(lambda y: y.fill_(torch.nan))).findings
    assert found.flags == ()  # no sum overflows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_a_setting_forbids_is_an_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    way = f"{str(dtype).removeprefix('torch.')} in 7 parts"
    name = f"allow_{'fp16' if dtype is torch.float16 else 'bf16'}_reduced_precision_reduction"
    a, b = checksum_figures.KINDS["sorted"](16, 2048).to(dtype), checksum_figures.KINDS["sorted"](2048, 32).to(dtype)
    assert computed(way, lambda: a @ b).findings == []
    for forbidden in (False, (False, False)):
        with tensor_cores.settings(**{name: forbidden}):
            assert computed(way, lambda: a @ b).findings != []
    with tensor_cores.settings():  # the CPU keeps its own bounds
        assert check(lambda: a @ b, first=[tensor_cores.Computed(tensor_cores.ARITHMETIC[way][2])]).findings != []


def test_the_settings_of_a_device_are_nothing_to_the_cpu() -> None:
    found = []
    allow = {f"allow_{dtype}_reduced_precision_reduction": True for dtype in ("fp16", "bf16")}
    for flags in ({}, allow, {"fp32_precision": "tf32"}, {"allow_fp16_accumulation": True}):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64):
            torch.manual_seed(0)
            a, b = torch.randn(40, 300).to(dtype), torch.randn(300, 50).to(dtype)
            with tensor_cores.settings(**flags):
                (error,) = check(partial(torch.mm, a, b), first=[Alter(lambda output: output[3, 4].add_(5))]).findings
            found.append((dtype, error.residual, error.bound, error.flags))
    assert found[4:8] == found[:4] == found[8:12] == found[12:]


def test_what_tensor_cores_round_under_autocast_is_no_error_at_function_level() -> None:
    torch.manual_seed(0)
    a, b = checksum_figures.KINDS["sorted"](16, 2048).float(), checksum_figures.KINDS["sorted"](2048, 32).float()

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return tensor_cores.ARITHMETIC["bfloat16 in 7 parts"][2](a.bfloat16(), b.bfloat16())

    with tensor_cores.settings("cpu"), torch.autocast("cpu", torch.bfloat16):
        checked = check(lambda: torch.mm(a, b), "function", [tensor_cores.Computed(multiply)])
        assert (checked.checked, checked.findings) == (1, [])
        with tensor_cores.settings(allow_bf16_reduced_precision_reduction=False):
            assert check(lambda: torch.mm(a, b), "function", [tensor_cores.Computed(multiply)]).findings != []
