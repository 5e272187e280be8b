"""Recorded calls that run again: only operators on the list, only with arguments that fit, and never without bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hostile_calls
import pytest
import sampled
import torch
from made_runs import plain, rewrite
from processes import run_python

from opintercept import OpInterceptError, intercept, runs
from opintercept.runs.program import again, operators
from opintercept.runs.replay import replay
from opintercept.runs.report import page

CPU = torch.device("cpu")


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    operator = again.operator_of(f"aten::{name.partition('.')[0]}", f"aten.{name}")
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    again.check_size(operator, args, kwargs, again.room(tensors))
    return again.run(operator, args, kwargs)


X, G = torch.randn(1, 4, 4), torch.randn(1, 2, 2)
POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)


@pytest.mark.parametrize("index", [16, 100_000, 1 << 40, -1, -(1 << 63)])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("max_pool2d_with_indices_backward.default", lambda i: (G, X, *POOL, i.view(1, 2, 2))),
        ("embedding_dense_backward.default", lambda i: (torch.ones(4, 3), i, 16, -1, False)),
        ("nll_loss_backward.default", lambda i: (G.view(4), torch.ones(4, 16), i, None, 0, -100, torch.tensor(1.0))),
        ("nll_loss_forward.default", lambda i: (torch.ones(4, 16), i, None, 0, -100)),
    ],
)
def test_an_index_outside_of_a_tensor_is_refused(
    name: str, arguments: Callable[[torch.Tensor], tuple[Any, ...]], index: int
) -> None:
    indices = torch.tensor([0, 3, 15, 7])
    assert torch.is_tensor(called(name, *arguments(indices))) or "forward" in name
    indices[2] = index
    with pytest.raises(again.NotRunError, match=r"must not be called with these arguments: each index must fit"):
        called(name, *arguments(indices))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "from_file.default",
            "set_.source_Tensor",
            "as_strided.default",
            "empty.memory_format",
            "_local_scalar_dense",
        ),
        *("_index_put_impl_.default", "special_legendre_polynomial_p.default", "_nnpack_spatial_convolution.default"),
        *(
            "native_dropout.default",
            "add.out",
            "sum.DimnameList_out",
            "remainder.int",
            "mul.left_t",
            "mvlgamma.default",
        ),
    ],
)
def test_an_operator_that_is_not_on_the_list_is_not_called(name: str) -> None:
    with pytest.raises(again.NotRunError, match=r"is not on the list of operators that may run again"):
        called(name)


def test_what_changes_a_list_in_place_is_computed_by_what_returns_it() -> None:
    operator = again.operator_of("aten::_foreach_mul_", "aten._foreach_mul_.Scalar")
    given = [torch.ones(2), torch.ones(3)]
    made = again.run(operator, (given, 3.0), {})
    assert [each.tolist() for each in made] == [[3.0] * 2, [3.0] * 3]
    assert [each.tolist() for each in given] == [[1.0] * 2, [1.0] * 3]


@pytest.mark.parametrize("name", ["torch.__path__", "torch.__dict__", "torch.nn.functional.__builtins__"])
def test_what_is_no_function_is_not_called(name: str) -> None:
    with pytest.raises(again.NotRunError, match="is not on the list of operators that may run again"):
        again.operator_of(name, name)


def test_a_quotient_that_fits_is_computed() -> None:
    operator = again.operator_of("torch.div", "torch.div")
    given = (torch.tensor([-9, 7]), torch.tensor([2, -1])), {"rounding_mode": "trunc"}
    again.check_size(operator, *given, most=100)
    assert again.run(operator, *given).tolist() == [-4, -7]


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "message"),
    [
        ("repeat.default", (X, [1 << 12, 1 << 12, 1]), {}, r"would make 268,435,456 numbers, far more than"),
        ("zeros.default", ([1 << 40],), {}, r"would have \d+ bytes, more than the limit"),
        ("arange.default", (1e18,), {}, r"would have \d+ bytes, more than the limit"),
        ("repeat_interleave.Tensor", (torch.tensor([1 << 60, -5]),), {}, r"repeats must fit"),
        ("repeat_interleave.Tensor", (torch.full((9,), 1 << 62),), {}, r"repeats must fit"),
        ("bincount.default", (torch.tensor([1 << 50]),), {}, r"each index must fit"),
        ("masked_select.default", (torch.ones(1 << 14, 1), torch.ones(1 << 13) > 0), {}, r"the shape of mask must fit"),
        ("_safe_softmax.default", (X, -1, 64), {}, r"dtype of .* must be a dtype, got 64"),
        ("clone.default", (X,), {"memory_format": 77}, r"memory_format of .* must be a memory_format, got 77"),
        ("div.Tensor_mode", (*torch.tensor([-(1 << 63), -1]),), {"rounding_mode": "trunc"}, r"other must fit"),
        ("_fft_r2c.default", (X, [-2], 0, True), {}, r"each size must fit"),
        ("_scaled_dot_product_attention_math.default", (torch.ones(1, 1, 1 << 14, 1),) * 3, {}, r"number of scores"),
        (
            "convolution.default",
            (torch.ones(1, 1, 2000, 2000), torch.ones(1, 1, 999, 999), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            {},
            r"the size of the kernel must fit",
        ),
    ],
)  # fmt: skip
def test_what_has_no_bounds_is_refused(name: str, args: Any, kwargs: Mapping[str, Any], message: str) -> None:
    with pytest.raises(again.NotRunError, match=message):
        called(name, *args, **kwargs)


@pytest.mark.parametrize("constant", ["bits8", "sparse_coo", "quint8", "load", "jit"])
def test_a_constant_that_is_no_plain_dtype_is_refused(constant: str) -> None:
    assert again.argument({"torch": "float64"}, "dtype", lambda plain, name: None, CPU) is torch.float64
    with pytest.raises(again.NotRunError, match=r"a recorded argument must be a tensor, a number or a dtype, got"):
        again.argument({"torch": constant}, "dtype", lambda plain, name: None, CPU)


def hostile(folder: Path, op: str, args: list[Any], scale: float, outputs: list[Any] | None = None) -> runs.Run:
    """A run of which somebody has edited one call: `"@x"` stands for the tensor x, and so on."""
    torch.manual_seed(0)
    tensors = {"x": torch.randn(4, 4) * scale, "g": G, "x3": X, "i": torch.full((1, 2, 2), 1 << 40)}
    tensors |= {"n": torch.full((4, 4), float(1 << 60))}
    with intercept(runs.RunRecorder(folder, "full"), ops="all"):
        for each in tensors.values():
            each.clone()
        tensors["x"].neg().mean()
    calls = plain(runs.open_run(folder))
    clones = (call["given"]["args"][0] for call in calls if call["op"] == "aten::clone")
    known = dict(zip((f"@{name}" for name in tensors), clones, strict=True))
    neg = next(call for call in calls if call["op"] == "aten::neg")
    changed = [
        known[each] if isinstance(each, str) else {"list": each} if isinstance(each, list) else each for each in args
    ]
    given = neg["given"] | {"args": changed} | ({} if outputs is None else {"outputs": outputs})
    neg |= {"op": f"aten::{op}", "func": f"aten.{op}.default", "given": given, "arguments": {}}
    return rewrite(folder, calls)


HOSTILE: dict[str, tuple[str, list[Any], list[Any] | None, str]] = {
    "index": ("max_pool2d_with_indices_backward", ["@g", "@x3", *POOL, "@i"], None, "must not be called with these"),
    "degree": ("special_legendre_polynomial_p", ["@x", "@n"], None, "not on the list of operators that may run again"),
    "size": ("repeat", ["@x", [1 << 12, 1 << 12]], [None], "far more than the run has of the call"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_every_comparison_says_what_it_does_not_compute(name: str, tmp_path: Path) -> None:
    op, args, outputs, why = HOSTILE[name]
    a, b = (hostile(tmp_path / folder, op, args, scale, outputs) for folder, scale in (("a", 1.0), ("b", 1.001)))
    assert not runs.why(a, b).equal
    assert not runs.diff(a, b).equal
    page.write(tmp_path / "page.html", a, b)
    one = next(call for call in a.calls() if call.record.op == f"aten::{op}")
    with pytest.raises(OpInterceptError, match=why):
        replay(a, one.record.index)


@pytest.mark.slow
def test_valid_calls_are_not_refused() -> None:
    every, calls = hostile_calls.listed(), hostile_calls.valid_calls()
    assert len(every.keys() & calls.keys()) > 150
    for name in every.keys() & calls.keys():
        for given in calls[name]:
            assert hostile_calls.attempt(every[name], given, double=False, derived=False) == "computed", name
            assert not hostile_calls.attempt(every[name], given, double=True, derived=True).startswith("refused"), name


def test_every_check_and_every_name_belongs_to_an_operator() -> None:
    names = {operators.listed(operator.func) for operator in hostile_calls.listed().values() if operator.schema}
    assert names == operators.NAMES
    assert operators.CHECKS.keys() <= operators.NAMES


@pytest.mark.slow
def test_no_hostile_call_ends_hangs_or_fills_its_process() -> None:
    names = [name for name in hostile_calls.listed() if sampled.picks(name, of=24)]
    count = str(sampled.fewer(200, most=20))
    # In a process of its own: what this one has in memory would count for each that it forks.
    done = run_python(hostile_calls.__file__, "--count", count, *names, timeout=3600)
    assert done.returncode == 0, done.stderr
    assert "ends: {}; 0 operators above" in done.stdout, done.stdout
