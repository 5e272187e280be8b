"""The kernels that check products on devices, run on the host, find what torch's operators do."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import fake_cuda
import fake_devices
import pytest
import torch
from compiler import needs_compiler
from torch import Tensor, nn

from opintercept import OpCall, hooks, intercept
from opintercept._values import on_device
from opintercept.hooks.checksum import arithmetic as sums
from opintercept.hooks.checksum.launches import Weights
from opintercept.hooks.checksum.products import Product
from opintercept.hooks.checksum.suspects import SCREEN

pytestmark = [pytest.mark.slow, needs_compiler]
SIGMA = 6.0
SHARE = SCREEN * SIGMA


def sign(column: int) -> int:
    """`device/checksum.h:sign_of`."""
    mixed = (column * 0x9E3779B1 + 0x7F4A7C15) % 2**32
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B % 2**32
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
    return 1 - 2 * (mixed >> 31)


@pytest.fixture(autouse=True)
def _on_host() -> Iterator[None]:
    with fake_devices.on_fake_devices():
        yield


def launches() -> int:
    return fake_cuda.driver().fake_count(b"cuLaunchKernel")  # type: ignore[no-any-return]


KINDS: dict[str, Any] = {
    "normal": torch.randn,
    "positive": torch.rand,
    "constant": lambda *shape: torch.full(shape, 0.375),
    "sparse": lambda *shape: torch.randn(shape) * (torch.rand(shape) > 0.8),
    "badly scaled": lambda *shape: torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-3, 3),
}
LAYOUTS: dict[str, Any] = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "batch inside": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2),
}


def matrix(rng: random.Random, *shape: int) -> Tensor:
    return KINDS[rng.choice([*KINDS])](*shape)  # type: ignore[no-any-return]


def laid_out(rng: random.Random, x: Tensor) -> Tensor:
    return LAYOUTS[rng.choice([*LAYOUTS])](x)  # type: ignore[no-any-return]


def drawn(rng: random.Random) -> tuple[Product, Tensor, bool]:
    """A product, its output, and whether that has an element that is far off."""
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    batch, n = rng.choice([(), (), (1,), (3,)]), rng.choice([1, 3, 17, 100, 300, 1000])
    m, k = rng.choice([1, 2, 31, 33, 70]), rng.choice([1, 5, 40, 200, 700])
    lhs, rhs = (laid_out(rng, matrix(rng, *batch, *shape).to(dtype)) for shape in ((m, k), (k, n)))
    alpha, beta = (1, 1) if rng.random() < 0.6 else (rng.choice([0.5, -2, 3]), rng.choice([1, 0.5, -1]))
    shapes: list[tuple[int, ...]] = [(n,), (1, n), (1,), (m, n), (m, 1), (*batch, m, n)]
    bias = matrix(rng, *rng.choice(shapes)).to(dtype) if rng.random() < 0.5 else None
    output = alpha * (lhs.double() @ rhs.double()) + (0 if bias is None else beta * bias.double())
    wrong = rng.random() < 0.5
    if wrong:
        place, most = rng.randrange(output.numel()), float(output.abs().nan_to_num(0, 0, 0).max()) + 1
        output.view(-1)[place] += rng.choice([most, -10 * most, math.nan, math.inf])
    product = Product(lhs, rhs, lambda output: output, bias=bias, alpha=alpha, beta=beta)
    return product, laid_out(rng, output.to(dtype)), wrong


def scores_of(product: Product, output: Tensor, deviation: float) -> Tensor:
    """How suspect the rows are, in float64."""
    lhs, rhs = product.lhs.double(), product.rhs.double()
    k, n = rhs.shape[-2:]
    scale: Any = 1 if product.rows is None else product.rows.double()
    if product.columns is not None:
        rhs = rhs * product.columns
    groups, wide = sums.groups_of(product, False), sums.wide_dtype(product, False)
    places, signs = torch.arange(n), torch.zeros(n, groups, dtype=torch.float64)
    signs[places, places // -(-n // groups)] = torch.tensor([float(sign(column)) for column in range(n)]).double()
    inner = rhs @ signs
    middle = lhs @ inner
    lengths = lhs.norm(dim=-1, keepdim=True) * inner.norm(dim=-2, keepdim=True)
    left = float(middle.abs().sum() / lengths.sum()) if middle.any() else 0.0
    if not (lhs.dim() == 2 and groups == 1 and len(lhs) >= sums.MANY):
        left += 1 / math.sqrt(k * middle.numel())
    expected = middle * product.alpha * scale
    smooth = lengths * left * abs(product.alpha) * scale + torch.finfo(wide).tiny / sums.unit(wide) * (k + 2)
    if product.bias is not None:
        bias = product.bias.double().expand(output.shape)
        expected = expected + product.beta * (bias @ signs)
        smooth = smooth + abs(product.beta) * (bias.square() @ signs.square()).sqrt()
    relative = (output.double() @ signs - expected) / torch.hypot(expected, smooth)
    return sums.Screen(relative, relative, deviation).rows().nan_to_num(math.inf, math.inf)


TERMS = "got", "value", "size", "square", "cut", "parts", "bias", "lost", "most"


def assert_found(product: Product, output: Tensor, weights: Weights, units: sums.Units) -> bool:
    """Compare what the kernels find with what torch's operators do. Returns whether the row is wrong."""
    begun = weights.begin(product)
    assert begun is not None
    launched = begun.finish(output, SHARE)
    assert launched is not None
    worst, flat, _, _, height = launched.check.found()
    deviation, limit = launched.kind[:2]
    scores = scores_of(product, output, deviation)
    most = float(scores.max())
    noise = 2 * deviation + 1e-3 * most  # of float32
    assert height == product.lhs.shape[-2]
    assert worst == most or abs(worst - most) <= noise
    assert float(scores[flat]) == most or float(scores[flat]) >= most - noise
    suspect = launched.suspect()
    assert (suspect is not None) == (not worst <= limit)
    if suspect is None:
        return False
    if not ((scores - limit).abs() < noise).any():
        assert suspect.suspected == int((~(scores <= limit)).sum())
    batch, row = divmod(flat, height)
    place = None if product.lhs.dim() == 2 else torch.tensor([batch])
    expected = sums.terms_of(product, output, units, place, torch.tensor([row]))
    assert expected.size is not None
    largest = float(expected.size.nan_to_num(0, 0, 0).max())
    for name in TERMS:
        one, other = getattr(suspect.terms, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if other is not None:
            other = other.double().expand_as(one)
            torch.testing.assert_close(one.double(), other, rtol=1e-9, atol=1e-9 * largest, equal_nan=True)
    verdicts = [float(sums.judge(terms, SIGMA).verdict(SIGMA)[0]) > 1 for terms in (suspect.terms, expected)]
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


@pytest.mark.parametrize("seed", range(120))
def test_a_product_is_checked_as_by_torchs_operators(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    product, output, wrong = drawn(rng)
    units = sums.units_of(product, output.dtype)
    if rng.random() < 0.5:  # as on tensor cores
        is_single = output.dtype is torch.float32
        units = units._replace(operands=2.0**-11, cuts=is_single, partial=0.0 if is_single else units.output)
        monkeypatch.setattr(sums, "units_of", lambda *_: units)
    weights = Weights()
    found = [assert_found(product, output, weights, units) for _ in range(3)]  # then what is remembered of rhs
    finite = all(bool(each.isfinite().all()) for each in product.tensors)
    if finite and bool((product.lhs.double() @ product.rhs.double()).to(output.dtype).isfinite().all()):
        assert found == [wrong] * 3 or not wrong
        assert wrong or found == [False] * 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
def test_float8_products_have_their_scales(dtype: torch.dtype, by_row: bool) -> None:
    torch.manual_seed(0)
    lhs, rhs = torch.randn(40, 256).to(dtype), torch.randn(200, 256).to(dtype).mT
    rows, columns = torch.rand((40, 1) if by_row else (1, 1)), torch.rand((1, 200) if by_row else (1, 1))
    output = ((lhs.double() * rows) @ (rhs.double() * columns)).bfloat16()
    product = Product(lhs, rhs, lambda output: output, rows=rows, columns=columns)
    units = sums.units_of(product, output.dtype)
    assert not assert_found(product, output, Weights(), units)
    output[3, 7] += 100
    assert assert_found(product, output, Weights(), units)


class Hit:
    """Changes an element of each output."""

    def post(self, call: OpCall) -> None:
        call.output.view(-1)[call.index] += 50


def found_in(program: Any) -> list[Any]:
    checksum = hooks.Checksum(action="record")
    with torch.no_grad(), intercept([Hit(), checksum], engine="kernel"):
        program()
    return [(each.record.index, each.position, each.suspected, each.got) for each in checksum.findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_findings_are_those_of_torchs_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48).to(dtype), torch.randn(33, 64).to(dtype)
    a, b = torch.randn(3, 8, 40).to(dtype), torch.randn(3, 40, 20).to(dtype)

    def program() -> None:
        for _ in range(3):
            layer(x)
        torch.bmm(a, b)
        torch.baddbmm(b[:, :1], b.mT, b, alpha=0.5, beta=3)
        torch.mv(x.mT, x[:, 0])
        torch.addmm(x, x[:, :33], x, out=torch.empty_like(x))
        x.clone().addmm_(x[:, :33], x)

    launches()
    found = found_in(program)
    assert 3 * 8 < launches() <= 4 * 8
    monkeypatch.setattr(on_device, "DEVICE", "none")
    expected = found_in(program)
    assert len(expected) == 8
    assert found == expected
    assert launches() == 0


def test_a_weight_is_read_again_once_it_has_changed() -> None:
    weight, x, weights = nn.Parameter(torch.randn(64, 48)), torch.randn(9, 64), Weights()

    def read() -> int:
        launches()
        begun = weights.begin(Product(x, weight, lambda output: output))
        assert begun is not None
        return launches()

    assert [read() for _ in range(3)] == [2, 1, 1]
    with torch.no_grad():
        weight.mul_(2)
    assert [read(), read()] == [2, 1]


def test_a_weight_that_has_changed_without_a_version_is_no_finding_and_read_again() -> None:
    weight, x, weights = nn.Parameter(torch.randn(64, 48)), torch.randn(9, 64), Weights()

    def suspect() -> bool:
        product = Product(x, weight, lambda output: output)
        return assert_found_suspect(product, (x @ weight).detach(), weights)

    assert not suspect()
    weight.data.mul_(2)
    assert suspect()
    assert not suspect()


def assert_found_suspect(product: Product, output: Tensor, weights: Weights) -> bool:
    begun = weights.begin(product)
    assert begun is not None
    launched = begun.finish(output, SHARE)
    assert launched is not None
    suspect = launched.suspect()
    if suspect is not None:
        assert float(sums.judge(suspect.terms, SIGMA).verdict(SIGMA)[0]) <= 1
    return suspect is not None


@pytest.mark.parametrize("make", [
    lambda: (torch.ones(4, 4, dtype=torch.complex64),) * 2,
    lambda: (torch.ones(4, 4, dtype=torch.int8),) * 2,
    lambda: (torch.eye(4).to_sparse(), torch.eye(4)),
    lambda: (torch.ones(4, 4), torch.ones(4, 4, dtype=torch.complex64).conj().imag),
], ids=["complex", "integers", "sparse", "negative"])  # fmt: skip
def test_what_the_kernels_do_not_know_is_left_to_torchs_operators(make: Any) -> None:
    lhs, rhs = make()
    launches()
    assert Weights().begin(Product(lhs, rhs, lambda output: output)) is None
    assert launches() == 0


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemAlloc", "cuMemHostAlloc"])
def test_a_launch_that_fails_leaves_the_product_to_torchs_operators(name: str) -> None:
    a = torch.randn(8, 8)
    for times in (1, 2, 3, 4):
        checksum = hooks.Checksum(action="record")
        fake_cuda.driver().fake_fail(name.encode(), times)
        with intercept([Hit(), checksum], engine="kernel"):
            for _ in range(3):
                a @ a
        assert (checksum.checked, len(checksum.findings)) == (3, 3)


def test_a_device_that_fails_is_not_waited_for() -> None:
    fake_cuda.behave(late=True)
    begun = Weights().begin(Product(torch.ones(4, 4), torch.ones(4, 4), lambda output: output))
    assert begun is not None
    launched = begun.finish(torch.full((4, 4), 5.0), SHARE)
    assert launched is not None
    fake_cuda.behave(late=True, lost=True)
    with pytest.raises(RuntimeError, match="the device has failed before it could check a product"):
        launched.suspect()
