"""The families of `ops=`: each engine sees what their names say, and no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiler import ALL_ENGINES
from seen import Seen
from torch import nn

from opintercept import intercept
from opintercept._engines import foreign, kernels
from opintercept._ops.families import FAMILIES, belongs


def program() -> None:
    """Runs operators of every family, one after the other."""
    torch.manual_seed(3)
    x = torch.randn(2, 4)
    weight = nn.Parameter(torch.randn(4, 4))
    tokens = F.embedding(torch.tensor([1, 0]), weight)
    y = F.linear(F.layer_norm(x + tokens, (4,)), weight)
    y = F.dropout(F.gelu(y).softmax(-1), 0.5).unsqueeze(0).clone()
    y.mean().backward()
    torch._foreach_add_([x, x.clone()], 1)


@pytest.mark.parametrize("options", ALL_ENGINES)
@pytest.mark.parametrize(
    ("ops", "below", "functions"),
    [
        (("matmul", "norm"), "native_layer_norm mm native_layer_norm_backward", "layer_norm linear"),
        ("activation", "gelu gelu_backward", "gelu"),
        ("softmax", "_softmax _softmax_backward_data", "softmax"),
        ("reduction", "mean", "mean"),
        ("embedding", "embedding embedding_dense_backward", "embedding"),
        ("optimizer", "_foreach_add_", ""),
        ("copy", "clone copy_", "clone"),
    ],
    ids=str,
)
def test_a_family_is_what_its_name_says(ops: Any, below: str, functions: str, options: dict[str, Any]) -> None:
    seen = Seen()
    with intercept(seen, ops=ops, **options):
        program()
    names = {name.rstrip("'") for name in seen}
    assert names - {"copy_"} == set((functions if "level" in options else below).split()) - {"copy_"}


@pytest.mark.parametrize("options", ALL_ENGINES)
def test_wider_families_by_tags_and_schemas(options: dict[str, Any]) -> None:
    if "level" in options:
        pytest.skip("functions of torch have no tags")
    found = {}
    for family in ("elementwise", "random", "view"):
        seen = Seen()
        with intercept(seen, ops=family, **options):
            program()
        found[family] = {name.rstrip("'") for name in seen}
    assert {"add", "gelu", "mul"} <= found["elementwise"]
    assert not {"mm", "mean", "t"} & found["elementwise"]
    assert found["random"] <= {"normal_", "randn", "bernoulli_", "native_dropout"}
    assert found["random"]
    assert {"t", "unsqueeze", "expand"} <= found["view"]
    assert not {"clone", "mm", "copy_", "add"} & found["view"]


@pytest.mark.parametrize("options", ALL_ENGINES[:3])
def test_a_family_is_left_out_of_all_others(options: dict[str, Any]) -> None:
    def names(*ops: str) -> list[str]:
        seen = Seen()
        with intercept(seen, ops=ops, **options):
            program()
        return [name.rstrip("'") for name in seen]

    views = set(names("view"))
    assert [name for name in names("all") if name not in views] == names("all", "-view")
    assert set(names("norm", "softmax", "-softmax")) == set(names("norm"))


def test_everything_belongs_to_torch_or_to_a_loaded_library() -> None:
    everything = kernels.KernelEngine("kernel").everything()
    loaded = {name.partition("::")[0] for name in everything if not foreign.is_torchs(name)}
    assert all(hasattr(torch.ops, space) for space in loaded)
    assert len(everything) > 2000
    known = set(torch._C._dispatch_get_all_op_names())
    assert set(everything) <= known
    composite, dense = (
        {name for key in keys for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
        for keys in (("CompositeImplicitAutograd",), ("CPU", "CUDA"))
    )
    assert set(everything).isdisjoint(composite - dense)
    assert not [name for name in everything if name.startswith(("profiler::", "aten::lift_fresh"))]


@pytest.mark.parametrize("activation", ["silu", "mish"])
def test_a_backward_that_other_devices_take_apart_is_shown(activation: str) -> None:
    seen: list[str] = []
    x = torch.ones(3, requires_grad=True)
    with intercept(lambda call: seen.append(call.op), ops="all"):
        getattr(torch.nn.functional, activation)(x).sum().backward()
    assert f"aten::{activation}_backward" in seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_operators(family: str) -> None:
    keys = intercept(ops=family).watcher.keys
    assert keys is not None
    assert len(keys) > 5
    assert not belongs("aten::of_a_later_torch", lambda: None, family)
