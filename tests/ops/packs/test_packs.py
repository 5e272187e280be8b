"""Loading packs, and how their rows give way to what the program declares."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import run_threads

from opintercept import OpInterceptWarning, hooks, intercept, register_op
from opintercept._ops import packs
from opintercept._ops.register import offer_ops

LIBRARY = torch.library.Library("pack_tests", "DEF")
FOLDER = Path(packs.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("_"))


def define(name: str, schema: str = "(Tensor a, Tensor b) -> Tensor") -> str:
    """Define an operator that multiplies, and return its name."""
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, torch.matmul, "CPU")
    return f"pack_tests::{name}"


def called(name: str) -> list[Any]:
    """The records of one call of an operator."""
    with intercept(recorder := hooks.Recorder()):
        getattr(torch.ops.pack_tests, name.partition("::")[2])(torch.ones(2, 3), torch.ones(3, 4))
    return recorder.records


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Add a pack for a namespace of the same name."""
    monkeypatch.setattr(packs, "__path__", [*packs.__path__, str(tmp_path)])
    before = set(sys.modules)

    def add(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(packs.PACKS, name, name)

    yield add
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_a_pack_is_loaded_once_when_its_namespace_is_there(pack: Callable[[str, str], None]) -> None:
    pack("once", "import sys\nsys.packs_loaded = getattr(sys, 'packs_loaded', 0) + 1")
    packs.load({"aten", "prim", "someone"})
    assert not hasattr(sys, "packs_loaded")
    packs.load({"aten", "once"})
    packs.load(["once"])
    assert sys.packs_loaded == 1  # type: ignore[attr-defined]
    del sys.packs_loaded  # type: ignore[attr-defined]


def test_threads_that_load_at_the_same_time_load_once(pack: Callable[[str, str], None]) -> None:
    pack("slowly", "import sys, time\ntime.sleep(0.05)\nsys.packs_loaded = getattr(sys, 'packs_loaded', 0) + 1")
    seen: list[int] = []

    def load() -> None:
        packs.load({"slowly"})
        seen.append(sys.packs_loaded)  # type: ignore[attr-defined]

    run_threads(*[load] * 4)
    assert seen == [1, 1, 1, 1]
    del sys.packs_loaded  # type: ignore[attr-defined]


def test_a_pack_that_cannot_be_imported_warns_once(pack: Callable[[str, str], None]) -> None:
    pack("broken", "1 / 0")
    name = define("beside_a_broken_pack")
    offer_ops(name, "lhs:a rhs:b")
    with pytest.warns(
        OpInterceptWarning, match=r"operators of broken, .* \(ZeroDivisionError: division by zero\)"
    ) as told:
        packs.load({"broken"})
        packs.load({"broken", "aten"})
    assert len(told) == 1
    assert told[0].filename == __file__
    assert [record.op for record in called(name)] == [name]


def test_the_row_of_a_pack_is_like_a_registration() -> None:
    name = define("offered")
    assert [record.op for record in called(name)] == ["aten::mm"]
    offer_ops(name, "lhs:a rhs:b scale:b", family="attention")
    (call,) = called(name)
    assert (call.op, call.flops, call.opaque) == (name, 48, True)


def test_a_registration_of_the_program_wins_over_a_later_pack() -> None:
    name = define("declared_first")
    with register_op(name, lhs="a", rhs="b", flops=lambda **_: 7):
        offer_ops(name, "lhs:a rhs:b")
        assert [record.flops for record in called(name)] == [7]
        with pytest.raises(ValueError, match=r"declared once, got pack_tests::declared_first again; call remove\(\)"):
            register_op(name, lhs="a", rhs="b")
    assert [record.flops for record in called(name)] == [48]


def test_a_registration_of_the_program_replaces_the_row_of_a_pack_until_it_is_removed() -> None:
    name = define("declared_later")
    offer_ops(name, "lhs:a rhs:b")
    registration = register_op(name, lhs="a", rhs="b", flops=lambda **_: 7)
    assert [record.flops for record in called(name)] == [7]
    registration.remove()
    registration.remove()
    assert [record.flops for record in called(name)] == [48]
    with register_op(f"{name}.default", lhs="a", rhs="b", flops=lambda **_: 9):
        assert [record.flops for record in called(name)] == [9]
    assert [record.flops for record in called(name)] == [48]


def test_a_pack_leaves_torchs_own_rows_alone() -> None:
    offer_ops("aten::mm", "lhs:mat2 rhs:self", flops=lambda **_: 7)
    with intercept(recorder := hooks.Recorder()):
        torch.ones(2, 3) @ torch.ones(3, 4)
    assert [record.flops for record in recorder.records] == [48]
    with pytest.raises(ValueError, match="torch's own table has it"):
        register_op("aten::mm", lhs="self", rhs="mat2")


def test_a_row_that_does_not_fit_the_library_warns_and_is_left_out() -> None:
    name = define("other_version")
    with pytest.warns(
        OpInterceptWarning, match=r"rhs must be an argument of .* which has a, b; got 'w', which opinter"
    ):
        offer_ops(name, "lhs:a rhs:w")
    assert [record.op for record in called(name)] == ["aten::mm"]
    offer_ops(name, "lhs:a rhs:b bias:bias scale:a_scale scale:b_scale")  # these come and go
    assert [record.op for record in called(name)] == [name]


def test_a_formula_that_cannot_tell_says_so_without_a_warning() -> None:
    name = define("ragged")

    def unknown(**_: Any) -> int:
        raise NotImplementedError

    offer_ops(name, "lhs:a rhs:b", flops=unknown)
    assert [record.flops for record in called(name)] == [None]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pack_imports_torch_and_this_package_only(path: Path) -> None:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module))
    roots = {name.partition(".")[0] for name in found}
    assert roots - sys.stdlib_module_names <= {"torch", "opintercept"}


def test_every_pack_has_a_namespace_and_every_namespace_a_pack() -> None:
    assert {path.stem for path in FILES} == {*packs.PACKS.values(), *packs.MODULES.values()}
