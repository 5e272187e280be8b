"""What Python and C++ share of records: the header that is compiled into the library."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiler import needs_compiler

from opintercept._core.in_kernel import ROLES
from opintercept._native import build, layout
from opintercept.runs.store.records import CALL, TENSOR


@pytest.mark.parametrize(("name", "kind"), [("StoredCall", CALL), ("StoredTensor", TENSOR)], ids=["call", "tensor"])
def test_the_header_has_the_fields_of_a_record_in_their_order(name: str, kind: np.dtype[np.void]) -> None:
    found = re.search(rf"struct {name} {{\n(.*?)}};", layout.header(), re.DOTALL)
    assert found is not None
    text = found[1].replace("rows[ROLES]", f"rows[{len(ROLES)}]")
    members = re.findall(r"(\w+?)(\d*)(?:_t)? (\w+)(?:\[(\d+)\])?;", text)
    sizes = [(field, (int(bits) // 8 if bits else 8) * int(count or 1)) for _, bits, field, count in members]
    own = [(field, kind[field].itemsize) for field in kind.names or () if field not in layout.SLOTS]
    slots = [kind[field].itemsize for field in kind.names or () if field in layout.SLOTS]
    assert [each for each in sizes if each[0] != "rows"] == own
    assert dict(sizes).get("rows", 0) == sum(slots)


def test_roles_and_their_places_are_those_of_python() -> None:
    numbers = dict(re.findall(r"constexpr size_t (\w+) = (\d+);", layout.header()))
    assert {name: int(number) for name, number in numbers.items()} == {
        "ROLES": len(ROLES),
        "VALUE": ROLES.index("value"),
        "OUTPUT": ROLES.index("output"),
        "AFTER_OUTPUTS": ROLES.index("attn_mask"),
    }


def test_a_field_more_makes_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    monkeypatch.setattr(layout, "CALL", [*layout.CALL, ("more", "<i8")])
    assert build.library_name() != before


@needs_compiler
@pytest.mark.parametrize("format", ["<i8", "<f8", "|i1", "|u1"])
def test_a_field_more_has_the_place_that_the_compiler_gives_it(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layout.FORMATS, "more", format)
    monkeypatch.setattr(layout, "CALL", layout._call())
    kind: Any = np.dtype(layout.CALL)
    first = next(iter(layout.SLOTS))
    members = {name: name for name in kind.names if name not in (*layout.SLOTS, "pad")} | {first: "rows"}
    assert "more" in members
    places = "".join(
        f"static_assert(offsetof(opintercept::StoredCall, {member}) == {kind.fields[name][1]});\n"
        for name, member in members.items()
    )
    source = tmp_path / "layout.cpp"
    source.write_text(layout.header().replace("#pragma once", "") + places)
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    done = subprocess.run([*compiler, "-std=c++20", "-fsyntax-only", str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
