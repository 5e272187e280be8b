"""Sources that Inductor generates for a GPU, forward and backward, with templates: what is read of each kernel.

`gpu_sources.txt` has wrappers of torch 2.13, one after the other. Of the kernels' bodies it has the arguments that they
load, store and add to. Those tell what an argument is, whatever its name and the metadata say.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from opintercept._origin.wrappers import Definition, WrapperSource, definitions_of, ops_in

_KERNEL = r"^(triton_\w+) = async_compile"


@cache
def sources() -> dict[str, str]:
    parts = re.split(r"^# ---- (\w+)\n", Path(__file__).with_name("gpu_sources.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@cache
def read(name: str) -> tuple[WrapperSource, dict[str, Definition]]:
    return WrapperSource(sources()[name], "key"), definitions_of(ast.parse(sources()[name]))


NAMES = sorted(sources())


def test_there_are_sources_of_each_kind() -> None:
    kernels = [kernel for text in sources().values() for kernel in re.findall(_KERNEL, text, re.MULTILINE)]
    assert len(kernels) >= 60
    kinds = {kernel.split("_")[1] for kernel in kernels}
    assert kinds == {"poi", "red", "per", "tem", "for"}
    assert sum(name.endswith("_backward") for name in NAMES) >= 12


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_is_found(name: str) -> None:
    source, definitions = read(name)
    text = sources()[name]
    launched = [
        (number, found[1])
        for number, line in enumerate(text.splitlines(), 1)
        if (found := re.match(r" +(triton_\w+)\.run\(", line))
    ]
    assert launched
    kernels = [(line, kernel._schema.name.removeprefix("inductor::")) for line, kernel in source.launches.items()]
    assert kernels == launched
    assert sorted(definitions) == sorted(re.findall(_KERNEL, text, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_what_the_bodies_do_with_them(name: str) -> None:
    source, definitions = read(name)
    for kernel in source.launches.values():
        body = definitions[kernel._schema.name.removeprefix("inductor::")].source
        template = "_tem_" in kernel._schema.name
        for argument in kernel._schema.arguments:
            loads = re.search(rf"tl\.(?:load|atomic_\w+)\({argument.name}\)", body) is not None
            stores = re.search(rf"tl\.(?:store|atomic_\w+)\({argument.name}\)", body) is not None
            if template and argument.name.startswith("arg_"):
                loads = True  # by a name of the template's own
            assert (argument.part == "number") is not (loads or stores), argument
            assert (argument.part in ("out", "in_out")) is stores, argument
            if loads:  # and if it does not, it may keep some of what was there
                assert argument.part in ("in", "in_out"), argument


@pytest.mark.parametrize("name", NAMES)
def test_what_is_overwritten_is_read_before(name: str) -> None:
    """The same variable is passed twice where the program writes in place."""
    source, _ = read(name)
    lines = sources()[name].splitlines()
    for number, kernel in source.launches.items():
        passed = re.findall(r"[\w.]+", lines[number - 1].partition(".run(")[2].partition("stream=")[0])
        arguments = dict(zip([argument.name for argument in kernel._schema.arguments], passed, strict=False))
        written = {arguments[each.name] for each in kernel._schema.arguments if each.part in ("out", "in_out")}
        twice = {
            each.name for each in kernel._schema.arguments if each.part == "in" and arguments[each.name] in written
        }
        assert {each.name for each in kernel._schema.arguments if each.overwritten} == twice
        assert twice <= kernel.updated


def test_some_kernels_write_in_place() -> None:
    found = [name for name in NAMES for kernel in read(name)[0].launches.values() if _overwritten(kernel)]
    assert {"adam", "in_place"} <= set(found)


def _overwritten(kernel: object) -> bool:
    return any(argument.overwritten for argument in kernel._schema.arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_operators_are_those_of_the_fragments(name: str) -> None:
    source, _ = read(name)
    text = sources()[name]
    fragments = dict(
        reversed(pair) for pair in re.findall(r"# Graph fragment:\n((?:#   .*\n)*)(triton_\w+) = async_compile", text)
    )
    for kernel in source.launches.values():
        short = kernel._schema.name.removeprefix("inductor::")
        if short not in fragments:  # launched before, where it stands for other nodes; one of several kernels in one
            continue
        nodes = re.findall(r"call_function\[target=torch\.ops\.(\w+)\.(\w+)", fragments.pop(short))
        assert set(kernel.ops) == {f"{space}::{packet}" for space, packet in nodes}
        assert set(ops_in(short)) <= set(kernel.ops)


@pytest.mark.parametrize("name", NAMES)
def test_templates_multiply_and_others_do_not(name: str) -> None:
    for kernel in read(name)[0].launches.values():
        template = "_tem_" in kernel._schema.name
        assert kernel.multiplies is template


def test_the_products_of_templates_have_their_operands() -> None:
    (kernel,) = read("mm")[0].launches.values()
    assert {role: name for role, (_, name) in kernel.row.roles.items()} == {"lhs": "arg_A", "rhs": "arg_B"}
    assert kernel.row.family == "fused"
