"""Products that compiled kernels check for `Checksum`, without Python until one is suspect."""

from __future__ import annotations

import copy
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compiler import needs_compiler
from threads import run_threads
from torch import Tensor, nn

from opintercept import OpCall, OpInterceptError, hooks, intercept
from opintercept.hooks.checksum import arithmetic as sums

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("values_in_cpp")]


class Watched(hooks.Checksum):
    """Counts the calls that Python checks."""

    in_python = 0

    def pre(self, call: OpCall) -> None:
        self.in_python += 1
        super().pre(call)

    work = hooks.Checksum.work  # which does not hold for subclasses


@contextmanager
def other_mm(mm: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Replace the kernel of `aten::mm` on the CPU, which Checksum itself calls with float64."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            library.impl("mm", mm, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


def right(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


@contextmanager
def checked(**options: Any) -> Iterator[Watched]:
    checksum = Watched(action="record", **options)
    with intercept(checksum, engine="compiled"):
        yield checksum


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_products_need_no_python(dtype: torch.dtype, exact: bool) -> None:
    a, b, c = (torch.randn(shape).to(dtype) for shape in ((17, 400), (400, 230), (17, 230)))
    aaa, bbb = a.expand(3, 17, 400), torch.stack([b, 2 * b, -b])
    with checked(exact=exact) as checksum:
        torch.mm(a, b)
        torch.mm(a.mT.contiguous().mT, b.mT.contiguous().mT)
        torch.mm(a[::2, ::2], b[::2, ::2])
        torch.mm(a[:1], b[:, :1])
        torch.addmm(c, a, b, alpha=2, beta=3)
        torch.addmm(c[0], a, b, alpha=-0.5)
        torch.addmm(torch.full_like(c, torch.nan), a, b, beta=0)
        torch.bmm(aaa, bbb)
        torch.bmm(aaa[:, :1], bbb[..., :1])
    assert (checksum.findings, checksum.in_python) == ([], 0)
    assert (checksum.checked, checksum.rows) == (9, 17 * 5 + 9 + 1 + 3 * 17 + 3)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_other_forms_are_checked_in_python() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with checked() as checksum:
        torch.addmm(a[:, :1], a, b)
        torch.baddbmm(*(torch.stack([x, 2 * x]) for x in (a, a, b)))
        torch.mv(a, b[0])
        torch.mm(a, b[:, :1])
        torch.mm(a, b, out=torch.empty(8, 8))
        torch.mm(a.int(), b.int())
        torch.mm(a.to(torch.complex64), b.to(torch.complex64))
        torch.mm(a.to_sparse_csr(), b)
    assert (checksum.findings, checksum.in_python, checksum.checked) == ([], 8, 8)


def test_calls_that_cannot_be_checked_are_counted_without_python() -> None:
    q = torch.randn(1, 2, 8, 16)

    def body() -> None:
        for _ in range(5):
            nn.functional.scaled_dot_product_attention(q, q, q)

    plain = hooks.Checksum()
    with checked() as checksum:
        body()
    with intercept(plain, engine="mode"):
        body()
    assert checksum.skipped == plain.skipped
    assert sum(checksum.skipped.values()) == 5
    assert checksum.in_python == 1  # what a row says of such calls is learned there
    checksum.clear()
    assert (checksum.skipped, checksum.checked, checksum.rows) == ({}, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("remembered", [False, True])
def test_a_kernel_that_computes_a_wrong_element_is_named(dtype: torch.dtype, remembered: bool) -> None:
    a, b = torch.randn(33, 64).to(dtype), torch.randn(64, 48).to(dtype)
    if remembered:
        b = nn.Parameter(b)
    calls = []

    def mm(x: Tensor, y: Tensor) -> Tensor:
        found = right(x, y)
        calls.append(x)
        if len(calls) == 3:
            found[7, 9] += 8
        return found

    with other_mm(mm), checked() as checksum, torch.no_grad():
        for _ in range(4):
            torch.mm(a, b)
    (found,) = checksum.findings
    assert (found.record.index, found.position, found.rows) == (2, (7, 9), (7,))
    assert (found.changed, found.repeats) == ((), False)
    assert checksum.in_python == 1
    assert checksum.checked == 4


@pytest.mark.parametrize("role", ["lhs", "rhs"])
def test_an_operand_that_changes_before_it_is_read_is_named(role: str) -> None:
    a, b = torch.randn(33, 64), torch.randn(64, 48)

    def mm(x: Tensor, y: Tensor) -> Tensor:
        if x.dtype is torch.float32:
            (x if role == "lhs" else y).data[3, 4] = 50.0
        return right(x, y)

    with other_mm(mm), checked() as checksum:
        torch.mm(a, b)
    (found,) = checksum.findings
    assert role in found.changed


def test_a_wrong_product_of_a_backward_pass_raises_with_its_place() -> None:
    layer = nn.Linear(16, 24, bias=False)
    x = torch.randn(8, 16, requires_grad=True)
    backward: list[Tensor] = []

    def mm(a: Tensor, b: Tensor) -> Tensor:
        wrong = bool(backward) and a.shape == (8, 24) and a.dtype is torch.float32
        return right(a, b) * (1.001 if wrong else 1.0)

    with other_mm(mm), intercept(hooks.Checksum(), engine="compiled"):
        backward.append(layer(x).sum())
        with pytest.raises(OpInterceptError, match=r"aten::mm.*backward|backward.*aten::mm"):
            backward[0].backward()


@pytest.mark.parametrize("in_place", ["by torch", "through data"])
def test_a_weight_that_changes_is_noticed(in_place: str) -> None:
    layer, x = nn.Linear(64, 48), torch.randn(16, 64)
    with checked() as checksum, torch.no_grad():
        for _ in range(4):
            layer(x)
            (layer.weight if in_place == "by torch" else layer.weight.data).mul_(1.5)
    assert (checksum.checked, checksum.findings) == (4, [])
    assert checksum.in_python == (0 if in_place == "by torch" else 2)  # it is remembered again after each


def test_a_weight_at_the_address_of_another_is_not_taken_for_it() -> None:
    x = torch.randn(16, 64)
    with checked() as checksum, torch.no_grad():
        for seed in range(200):
            torch.manual_seed(seed)
            weight = nn.Parameter(torch.randn(64, 48))
            torch.mm(x, weight)
            del weight
    assert (checksum.findings, checksum.in_python, checksum.checked) == ([], 0, 200)


@pytest.mark.parametrize("other", [hooks.Recorder, hooks.Stats, hooks.Profile, hooks.NonFinite])
def test_a_known_weight_meets_new_shapes_beside_other_hooks(other: Callable[[], Any]) -> None:
    layer, checksum = nn.Linear(16, 16), hooks.Checksum()
    with torch.no_grad(), intercept([other(), checksum], engine="compiled"):
        for rows in (8, 8, 3, 3, 5, 8):
            layer(torch.randn(rows, 16))
    assert checksum.checked == 6


def test_a_product_whose_weight_python_remembers_may_be_suspect() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    checksum = Watched(action="record")
    with torch.no_grad(), intercept(checksum, engine="mode"):
        layer(x)
    with intercept(checksum, engine="compiled"), torch.no_grad():
        layer(x)
        for _ in range(3):
            layer.weight.data.mul_(1.5)  # which a kernel cannot know
            layer(x)
    assert (checksum.findings, checksum.in_python, checksum.checked) == ([], 1 + 2, 1 + 4)


@pytest.mark.parametrize("alpha", [1e-3, 1, 1e3])
def test_the_first_row_of_a_weight_does_not_make_later_ones_suspect(alpha: float) -> None:
    torch.manual_seed(0)
    bias, weights = torch.randn(16), [nn.Parameter(torch.randn(16, 16)) for _ in range(100)]
    with checked() as checksum, torch.no_grad():
        for weight in weights:
            torch.addmm(bias, torch.randn(1, 16), weight, alpha=alpha)
            for _ in range(20):
                torch.addmm(bias, torch.randn(1, 16), weight)
    assert (checksum.findings, checksum.in_python, checksum.checked) == ([], 0, 2100)


def test_every_checks_a_share_of_the_calls() -> None:
    a = torch.randn(8, 8)
    with checked(every_calls=10) as checksum:
        for _ in range(1000):
            torch.mm(a, a)
    assert checksum.checked == 100
    assert checksum.in_python == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_values_that_are_not_finite_or_overflow_raise_no_alarm(value: float) -> None:
    a, b = torch.randn(6, 12), torch.randn(12, 20)
    a[1, 2] = b[3, 4] = value
    with checked() as checksum:
        torch.mm(a, b)
    assert checksum.findings == []


def test_it_runs_beside_other_hooks_and_in_several_threads() -> None:
    a = torch.randn(32, 32)
    checksum, recorder = hooks.Checksum(), hooks.Recorder()

    def body() -> None:
        for _ in range(200):
            torch.mm(a, a)

    every: list[Any] = [checksum, recorder, hooks.NonFinite(), hooks.Stats()]
    with intercept(every, engine="compiled", threads="all"):
        run_threads(*[body] * 4)
    assert (checksum.checked, checksum.rows, len(recorder.records)) == (800, 800 * 32, 800)


def test_a_call_for_which_there_is_no_room_is_counted() -> None:
    a = torch.randn(32, 32)
    checksum, recorder = hooks.Checksum(), hooks.Recorder()
    interceptor = intercept([checksum, recorder], engine="compiled", threads="all")

    def body() -> None:
        for _ in range(2050):  # two more than there is room for
            torch.mm(a, a)

    with interceptor:
        torch.mm(a, a)
        queue = interceptor.watcher.pipeline.queue
        assert queue is not None
        with queue._lock:
            queue._notifier = threading.get_ident()  # as if this thread was notifying: the others leave their calls
            run_threads(body)
            queue._notifier = None
    assert (checksum.checked, checksum.rows, len(recorder.records)) == (2051, 2051 * 32, 2051)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_checks_its_own_calls() -> None:
    a = torch.randn(8, 8)
    checksum = hooks.Checksum()
    with intercept(checksum, engine="compiled"):
        torch.mm(a, a)
        child = os.fork()
        if not child:  # in which no block of the parent is active
            with intercept(checksum, engine="compiled"):
                torch.mm(a, a)
            os._exit(checksum.checked)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert checksum.checked == 1


def test_a_copy_takes_over_what_kernels_have_counted() -> None:
    a = torch.randn(8, 8)
    checksum = hooks.Checksum()
    with intercept(checksum, engine="compiled"):
        torch.mm(a, a)
        twin = copy.copy(checksum)
        torch.mm(a, a)
    assert (twin.checked, twin.rows) == (1, 8)
    assert (checksum.checked, checksum.rows) == (2, 16)


def test_two_checksums_in_one_block_each_see_all_calls() -> None:
    a = torch.randn(8, 8)
    both = [hooks.Checksum(), hooks.Checksum(sigma=8.0)]
    with intercept(both, engine="compiled"):
        torch.mm(a, a)
    assert [each.checked for each in both] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_suspect_what_python_suspects(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(40, 300).to(dtype), torch.randn(300, 200).to(dtype), torch.randn(200).to(dtype)
    size = float(torch.finfo(dtype).eps) * 17
    for part in (0.01, 0.1, 1.0, 10.0, 100.0):

        def mm(x: Tensor, y: Tensor, part: float = part) -> Tensor:
            found = right(x, y)
            found[5, 6] += part * size
            return found

        with other_mm(mm):
            with checked() as by_kernel:
                torch.mm(a, b)
            screened: list[float] = []
            real = sums.screen

            def screen(*given: Any, real: Any = real, screened: list[float] = screened) -> sums.Screen:
                seen: sums.Screen = real(*given)
                screened.append(float(seen.worst()))
                return seen

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sums, "screen", screen)
                with intercept(hooks.Checksum(action="record"), engine="mode"):
                    torch.mm(a, b)
        if not 4.4 < screened[0] < 4.6:
            assert by_kernel.in_python == (screened[0] > 4.5), (part, screened)
    with checked() as checksum:
        torch.addmm(c, a, b)
    assert not checksum.findings


def test_a_forked_child_has_the_counts_of_its_parent() -> None:
    checksum = hooks.Checksum(action="record")
    x = torch.ones(3, 3)
    with intercept(checksum, engine="compiled"):
        for _ in range(3):
            x @ x
            torch._addmm_activation(x, x, x)
        told = checksum.checked, checksum.rows, checksum.skipped
        assert (told[0], sum(told[2].values())) == (3, 3)
        child = os.fork()
        if not child:
            os._exit((checksum.checked, checksum.rows, checksum.skipped) != told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "skipped 3 aten::_addmm_activation" in str(checksum)
