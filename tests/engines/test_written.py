"""What Triton kernels stand for by the text above them: the same as by Inductor's graph, or nothing.

`gpu_fragments.txt` has wrappers for an H200 that torch 2.11 and 2.15 generate, and what the graph tells of each launch;
`tests/programs/gpu_fragments.py` makes them anew.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from same_fragment import outputs_of

from opintercept._engines.inductor import written
from opintercept._ops.fragment import Fragment, Ref
from opintercept._origin.wrappers import WrapperSource
from opintercept._values.fragments import judge

importlib.import_module("torch._inductor.inductor_prims")  # some nodes call them

NOTHING: dict[str, Any] = {"given": {}, "made": {}, "nodes": []}


@cache
def sources() -> dict[str, tuple[str, list[Any]]]:
    text = Path(__file__).with_name("gpu_fragments.txt").read_text()
    parts = re.findall(r"^# ---- (\w+)\n(.*?)^# graph: (.*?)\n", text, re.MULTILINE | re.DOTALL)
    return {name: (code, json.loads(graph)) for name, code, graph in parts}


def told(text: str) -> list[Fragment | None]:
    """What the launches of a wrapper stand for, in order."""
    source = WrapperSource(text, "key")
    found = written.told(source)
    return [found.get(line) for line in source.launches]


def outputs(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What each output of each launch is, by the text and by the graph."""
    text, graph = sources()[name]
    for fragment, plain in zip(told(text), graph, strict=True):
        yield outputs_of((fragment and fragment.as_plain()) or NOTHING), outputs_of(plain or NOTHING)


@pytest.mark.parametrize("name", sorted(sources()))
def test_a_text_tells_what_the_graph_does_or_nothing(name: str) -> None:
    for by_text, by_graph in outputs(name):
        assert by_text.items() <= by_graph.items()


def test_most_outputs_are_told() -> None:
    assert len(sources()) >= 30
    assert sum(name.split("_of_")[0].endswith("backward") for name in sources()) >= 10
    pairs = [pair for name in sources() for pair in outputs(name)]
    assert sum(bool(by_text) for by_text, _ in pairs) >= 60
    told, known = (sum(len(pair[number]) for pair in pairs) for number in (0, 1))
    assert (told, known) == (85, 94)


def softmax() -> str:
    return sources()["softmax_inference_of_2_15"][0]


def test_a_kernel_is_held_by_its_text() -> None:
    (fragment,) = told(softmax())
    assert fragment is not None
    bias = torch.linspace(-1, 1, 16)
    product = torch.linspace(2, 9, 1024).reshape(64, 16)
    right = (product + bias).log().relu().softmax(-1)
    before: list[Any] = [product, bias, 64, 16]
    (judged,), _ = judge(fragment, before, [right, *before[1:]])
    assert judged.excess < 1
    right[3, 4] *= 1.001
    (judged,), _ = judge(fragment, before, [right, *before[1:]])
    assert judged.excess > 1
    assert judged.node.op == "aten::div"


def changed(text: str, pattern: str, by: str) -> str:
    found, count = re.subn(pattern, by, text)
    assert count
    return found


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"    tmp\d+ = tl.load\(in_out_ptr0\)\n", ""),  # nothing says when it is read
        (r"(?m)^#   %\w+ : \[num_users.*\n", "#   what is this\n"),
        (r"(?m)^#   return .*\n", ""),
        (r"#   return %\w+,", "#   return %other,%another,"),
        (r'%arg2_1 : Tensor "f32\[16\]', '%arg2_1 : Tensor "f32[17]'),
        (r"PlaceHolder\[target=arg2_1\]", "Holder[target=arg2_1]"),
        (r"torch\.ops\.aten\.relu\.default", "torch.ops.aten.no_such_operator.default"),
        (r"args = \(%log,\)", "args = (%log, what)"),
        (r"args = \(%log,\)", "args = (%log, it's)"),
        (r"buf3 = buf0; del buf0", "buf3 = buf0"),  # another name of what the product has written
    ],
)
def test_what_does_not_agree_is_not_told(pattern: str, by: str) -> None:
    (fragment,) = told(changed(softmax(), pattern, by))
    assert fragment is None or not (fragment.as_plain() or NOTHING)["made"]


def test_the_same_kernel_stands_for_the_same_if_its_arguments_lie_alike() -> None:
    text = sources()["layers_inference_of_2_15"][0]
    found = told(text)
    names = [kernel._schema.name for kernel in WrapperSource(text, "key").launches.values()]
    assert len(set(names)) < len(names)
    first = dict(reversed([*zip(names, found, strict=True)]))
    assert all(fragment is first[name] is not None for name, fragment in zip(names, found, strict=True))
    other = changed(text, r"(buf\w+ = empty_strided_cuda\(\(16, 64\)), \(64, 1\)", r"\1, (1, 16)")
    assert told(other).count(None) > 0


def test_what_is_written_in_place_is_left_out() -> None:
    text = changed(softmax(), r"extern_kernels\.(\w+)\((.*)\)", r"extern_kernels.\1(\2); aten.mul_.Scalar(buf0, 2)")
    (fragment,) = told(text)
    assert fragment is None or not fragment.given.keys() & {0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(%x, [-1], True)", (Ref("x"), [-1], True)),
        ("(%x, 1e-05, -inf)", (Ref("x"), 1e-05, float("-inf"))),
        ("([%x, %y], 0)", ([Ref("x"), Ref("y")], 0)),
        ("{dtype: torch.float32, pin: False}", {"dtype": torch.float32, "pin": False}),
        ("([], (1,), None)", ([], (1,), None)),
    ],
)
def test_arguments_are_read_as_they_are_written(text: str, value: Any) -> None:
    assert written._ArgumentText(text).value() == value


@pytest.mark.parametrize("text", ["(%x", "(%x %y)", "(torch.sum,)", "(1,) 2", "('x',)", "{1: 2}", "(1j,)"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises((ValueError, IndexError)):
        written._ArgumentText(text).value()


def test_a_wrapper_is_read_only_if_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WrapperSource(softmax(), "key")
    asked: list[WrapperSource] = []

    def tell(source: WrapperSource) -> dict[int, Fragment]:
        asked.append(source)
        return {}

    monkeypatch.setattr(written, "told", tell)
    written.offer(source)
    (kernel,) = source.launches.values()
    assert asked == []
    assert kernel.fragment is None
    assert kernel.fragment is None
    assert asked == [source]
