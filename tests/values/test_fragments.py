"""Generated kernels against the operators that they stand for: wrong ones are named, and no others.

A wrong kernel is made by a change of the text that Inductor generates, before it is loaded.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import pytest
import sampled
import torch
from compiler import needs_compiler
from planted import compiled_in, replaced
from torch import Tensor, nn
from torch.nn import functional as F

from opintercept import intercept
from opintercept._ops.fragment import Fragment, FragmentNode, HeldNode, NotTold, Ref
from opintercept._values import fragments
from opintercept._values.fragments import as_held, judge
from opintercept.hooks import Reference, ReferenceRow

compiles = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec..:FutureWarning"),
]
aten = torch.ops.aten


class Net(nn.Module):
    """Pointwise operators, norms, a softmax and lookups, between products, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.one, self.two, self.three = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 20)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + F.gelu(self.one(self.norm(x)))
        scores = self.two(x) @ x.mT
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        x = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ x
        return F.silu(self.three(x)) * 0.5


IDS = torch.randint(0, 20, (3, 16), generator=torch.Generator().manual_seed(0))


def held(dtype: torch.dtype, plant: Callable[[str], str], trains: bool = True) -> Reference:
    """What `Reference` says of a step whose graphs are compiled in its block, with what is planted into their text."""
    torch.manual_seed(0)
    reference = Reference()
    with compiled_in(plant):
        net: Any = torch.compile(Net().to(dtype))
        with intercept(reference, ops="all"), torch.set_grad_enabled(trains):
            out = net(IDS)
            if trains:
                out.sum().backward()
    return reference


def kernels(reference: Reference) -> list[ReferenceRow]:
    return [row for row in reference.rows() if row.excess is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trains", [False, True])
class TestHealthy:
    pytestmark = compiles

    def test_no_kernel_is_accused(self, dtype: torch.dtype, trains: bool) -> None:
        if sampled.on and trains == (dtype is torch.float32):
            pytest.skip("sampled")
        reference = held(dtype, str, trains)
        assert reference.wrong == []
        assert len(kernels(reference)) >= (8 if trains else 4)


BOTH = (torch.float32, torch.bfloat16)
# What is planted, the operator whose kernel has it, and what its line says.
PLANTED: list[tuple[str, str, str, str, str, tuple[torch.dtype, ...]]] = [
    ("divisor", r"static_cast<float>\(32\.0\)", "static_cast<float>(31.0)", "native_layer_norm", "self.norm", BOTH),
    ("epsilon", r"1e-05", "1e-01", "native_layer_norm", "self.norm", BOTH),
    ("difference", r"= tmp0 - tmp2;", "= tmp0 + tmp2;", "native_layer_norm", "self.norm", (torch.float32,)),
    ("row", r"32L\*tmp0", "32L*(tmp0/2)", "embedding", "self.embed", (torch.float32,)),
    ("constant", r"0\.7071067811865476", "0.8071067811865476", "gelu", "F.gelu", BOTH),
    ("half", r"static_cast<float>\(0\.5\)", "static_cast<float>(0.6)", "gelu", "F.gelu", BOTH),
    ("mask", r"tmp(\d) <= tmp(\d)", r"tmp\1 < tmp\2", "_softmax", "softmax", BOTH),
    ("exponent", r"tmp0\.neg\(\);", "tmp0;", "silu", "F.silu", (torch.float32,)),
    ("gradient", r"= tmp8 - tmp1;", "= tmp8 + tmp1;", "silu_backward", "F.silu", (torch.float32,)),
    ("density", r"0\.3989422804014327", "0.4989422804014327", "gelu_backward", "F.gelu", BOTH),
    ("square", r"static_cast<float>\(-0\.5\)", "static_cast<float>(-0.4)", "gelu_backward", "F.gelu", BOTH),
    ("sum", r"tmp1\.neg\(\)", "tmp1", "_softmax_backward_data", "softmax", (torch.float32,)),
]
CASES = [(dtype, *case[:5]) for case in PLANTED for dtype in case[5]]
# With `--sampled` one fault is planted into the kernel of each operator.
CHOSEN = sampled.picks_of_each({f"{case[1]}-{case[0]}": case[4] for case in CASES}, 8)
CASES = [case for case in CASES if f"{case[1]}-{case[0]}" in CHOSEN]


@pytest.mark.parametrize(
    ("dtype", "name", "pattern", "by", "op", "code"), CASES, ids=[f"{case[1]}-{case[0]}" for case in CASES]
)
class TestPlanted:
    pytestmark = compiles

    def test_the_wrong_kernel_is_named_and_no_other(
        self, dtype: torch.dtype, name: str, pattern: str, by: str, op: str, code: str
    ) -> None:
        reference = held(dtype, replaced(pattern, by))
        wrong = reference.wrong
        assert {row.op for row in wrong} == {wrong[0].op}
        assert f"aten::{op}" in (wrong[0].ops or ())
        lines = linecache.getlines(__file__)
        numbers = [int(number) for number in re.findall(r"\b\d+(?=[, ])", wrong[0].source or "")]
        assert any(code in lines[number - 1] for number in numbers), wrong[0].source
        assert f"call {wrong[0].index} is wrong: {wrong[0].op}, which stands for" in str(reference)


def node(func: Any, *args: Any, made: torch.dtype = torch.float32, **kwargs: Any) -> Callable[[str], FragmentNode]:
    return lambda name: FragmentNode(name, func, args, kwargs, made)


def fragment(made: str, shape: tuple[int, ...], **nodes: Callable[[str], FragmentNode]) -> Fragment:
    """A fragment with the operands `x` and the output `made`, both of this shape."""
    strides = tuple(torch.empty(shape).stride())
    all_ = {"x": FragmentNode("x", None, dtype=torch.float32)} | {name: make(name) for name, make in nodes.items()}
    return Fragment(all_, {0: HeldNode("x", shape, strides)}, {1: HeldNode(made, shape, strides)}, {}, frozenset())


def judged(whole: Fragment, x: Tensor, output: Tensor) -> float | str:
    """The excess of an output, or why it is left out."""
    found, left_out = judge(whole, [x, output], [x, output])
    return found[0].excess if found else left_out[1]


X = torch.linspace(-2, 2, 64).reshape(4, 16)
ROUNDED = fragment(
    "low",
    (4, 16),
    half=node(aten._to_copy.default, Ref("x"), dtype=torch.bfloat16, made=torch.bfloat16),
    low=node(aten.mul.Tensor, Ref("half"), 3.0, made=torch.bfloat16),
)


def test_a_kernel_may_round_between_operators_or_not() -> None:
    for output in (X.bfloat16() * 3.0, (X * 3.0).bfloat16()):
        assert 0 <= judged(ROUNDED, X, output) < 1  # type: ignore[operator]
    assert judged(ROUNDED, X, X.bfloat16() * 3.2) > 1  # type: ignore[operator]


def test_one_wrong_element_is_enough() -> None:
    whole = fragment("y", (4, 16), y=node(aten.exp.default, Ref("x")))
    right = X.exp()
    assert judged(whole, X, right) < 1  # type: ignore[operator]
    right[2, 3] *= 1 + 1e-4
    assert judged(whole, X, right) > 1  # type: ignore[operator]
    right[2, 3] = torch.nan
    assert judged(whole, X, right) == float("inf")


@pytest.mark.parametrize(
    ("written", "deviation"),
    [
        (torch.nan, "NaN where its operators give 1.17"),
        (-torch.inf, "-inf where its operators give 1.17"),
        (1.5, r"off by [\d.e+]+ times what rounding explains"),
    ],
)
def test_a_deviation_is_told_as_a_user_would_read_it(written: float, deviation: str) -> None:
    whole = fragment("y", (4, 16), y=node(aten.exp.default, Ref("x")))
    output = X.exp()
    output[2, 2] = written
    (found,), _ = judge(whole, [X, output], [X, output])
    assert re.fullmatch(deviation, found.deviation)


def test_a_wrong_truth_is_told_with_the_right_one() -> None:
    whole = fragment("z", (4, 16), z=node(aten.gt.Scalar, Ref("x"), 0.0, made=torch.bool))
    output = X > 0
    output[3, 5] = False
    (found,), _ = judge(whole, [X, output], [X, output])
    assert found.deviation == "False where its operators give True"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (node(aten.bernoulli.p, Ref("x"), 0.5), "draws at random"),
        (node(aten.as_strided.default, Ref("x"), [4, 16], [16, 1]), "no function of values"),
        (node(aten.relu_.default, Ref("x")), "writes to its argument"),
        (node(aten.mul.Tensor, Ref("x"), Ref("z")), "'z', which is no operand"),
        (node(aten.sum.dim_IntList, Ref("x"), [0]), "another shape"),
    ],
)
def test_what_cannot_be_held_is_left_out_with_a_reason(make: Callable[[str], FragmentNode], reason: str) -> None:
    assert reason in str(judged(fragment("y", (4, 16), y=make), X, X.clone()))


def test_what_hangs_on_last_bits_is_left_out() -> None:
    y = node(aten.mul.Tensor, Ref("x"), 1.5)
    rounded = fragment("z", (4, 16), y=y, z=node(aten.floor.default, Ref("y")))
    assert "last bits" in str(judged(rounded, X, (X * 1.5).floor()))
    given = fragment("z", (4, 16), z=node(aten.floor.default, Ref("x")))
    assert judged(given, X, X.floor()) == 0


def test_products_that_torch_may_round_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fragment("y", (4, 4), y=node(aten.mm.default, Ref("x"), Ref("x")))
    x = X[:, :4].contiguous()
    assert judged(whole, x, x @ x) < 1  # type: ignore[operator]
    monkeypatch.setattr(fragments, "product_precision", lambda device: "tf32")
    assert "may round float32 operands" in str(judged(whole, x, x @ x))


def test_a_comparison_that_no_rounding_decides_is_held() -> None:
    y = node(aten.mul.Tensor, Ref("x"), 1.5)
    zero = node(aten.gt.Scalar, Ref("y"), 0.0, made=torch.bool)
    chosen = node(aten.where.self, Ref("c"), Ref("y"), Ref("x"))
    whole = fragment("z", (4, 16), y=y, c=zero, z=chosen)
    assert judged(whole, X, torch.where(X > 0, X * 1.5, X)) < 1  # type: ignore[operator]
    assert judged(whole, X, torch.where(X > 0, X, X * 1.5)) > 1  # type: ignore[operator]
    close = X.clone()
    close[0, 0] = 0.0
    assert "last bits" in str(judged(whole, close, close))


def test_a_partial_operand_is_not_guessed() -> None:
    whole = fragment("z", (4, 16), y=node(aten.exp.default, Ref("x")), z=node(aten.neg.default, Ref("y")))
    assert judged(whole, X, -X.exp()) < 1  # type: ignore[operator]
    assert "no operator of the graph" in str(judged(whole._replace(unclear=frozenset(("y",))), X, -X.exp()))


def test_memory_is_read_as_the_graph_lays_it_out() -> None:
    held = HeldNode("x", (2, 3), (1, 2))
    x = torch.arange(6.0)
    assert torch.equal(as_held(x, held), x.as_strided((2, 3), (1, 2)))  # type: ignore[arg-type]
    assert as_held(x[:4], held) is None
    assert as_held(x[::2], HeldNode("x", (3,), (1,))) is None
    assert as_held(3, held) is None


def test_needed_nodes_come_in_order_and_stop_at_what_is_known() -> None:
    whole = fragment("z", (4, 16), y=node(aten.exp.default, Ref("x")), z=node(aten.neg.default, Ref("y")))
    assert [each.name for each in whole.needed("z", {"x"})] == ["y", "z"]
    assert [each.name for each in whole.needed("z", {"y"})] == ["z"]
    with pytest.raises(NotTold, match="'x', which is no operand"):
        whole.needed("z", ())
