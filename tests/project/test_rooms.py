"""Which rooms the package has, and which file may import which."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from sources import PACKAGE, SOURCES, file_of, private

# A file imports from its own room and from those before it, also inside functions and for annotations.
ROOMS = {
    "": "_core _ops _origin _native _values _ranks _kit _engines _blocks hooks runs _reports integrations testing cli",
    "runs": "store record sums program replay why compare ranks report trace patch",
}
MOST_ROOMS = 17
MOST_FILES = 20  # directly in a folder
SAME_BY_DESIGN = {"InterceptCallback"}  # the callback of each trainer, which guides name alike


def imports_of(source: str) -> set[str]:
    """The files of the package that a file imports, wherever it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(name if file_of(name) in SOURCES else str(node.module) for name in inner)
    return {file_of(name) for name in names if name.partition(".")[0] == "opintercept"}


def upward(name: str, source: str) -> list[str]:
    """The files that a file imports although they are in a later room."""
    found = set()
    for parent, order in ROOMS.items():
        places = {room: number for number, room in enumerate(order.split())}
        for other in imports_of(source):
            ours, theirs = (places.get(room_in(parent, each)) for each in (name, other))
            if ours is not None and theirs is not None and theirs > ours:
                found.add(other)
    return sorted(found)


def room_in(parent: str, name: str) -> str:
    """The room in `parent` that a file is in; empty if it is elsewhere, or in no room there."""
    if parent and not name.startswith(f"{parent}/"):
        return ""
    return name.removeprefix(f"{parent}/").partition("/")[0].removesuffix(".py")


def from_outside(name: str, source: str) -> list[str]:
    """The files with a leading underscore that a file of another folder imports."""
    folder = name.rpartition("/")[0]
    return sorted(o for o in imports_of(source) if private(Path(o).name) and o.rpartition("/")[0] != folder)


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Files of which each imports the next, and the last one the first; empty if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_folder_at_the_top_is_a_room() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ROOMS[""].split())
    assert len(folders) <= MOST_ROOMS
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "_child.py", "py.typed"}


def test_no_folder_has_too_many_files() -> None:
    files = Counter(path.parent for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_files_import_from_earlier_rooms() -> None:
    assert {name: found for name, source in SOURCES.items() if (found := upward(name, source))} == {}


def test_nobody_imports_a_private_file_of_another_folder() -> None:
    assert {name: found for name, source in SOURCES.items() if (found := from_outside(name, source))} == {}


def test_no_files_import_each_other() -> None:
    assert circle({name: imports_of(source) - {name} for name, source in SOURCES.items()}) == []


def test_no_two_classes_share_a_name() -> None:
    homes = defaultdict(list)
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(name)
    shared = {name: files for name, files in homes.items() if len(files) > 1 and name not in SAME_BY_DESIGN}
    assert shared == {}


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("_core/call.py", "from opintercept._ops.op import Op", ["_ops/op.py"]),
        ("_ops/op.py", "from opintercept._origin import origin", ["_origin/origin.py"]),
        ("_blocks/intercept.py", "import opintercept.hooks.log", ["hooks/log.py"]),
        ("_engines/kernels.py", "from opintercept import intercept", ["_blocks/intercept.py"]),
        ("_core/call.py", "if TYPE_CHECKING:\n    from opintercept._ops.op import Op", ["_ops/op.py"]),
        ("_core/call.py", "def f():\n    from opintercept import hooks", ["hooks/__init__.py"]),
        ("runs/store/run.py", "from opintercept.runs.sums import Grouping", ["runs/sums.py"]),
        ("runs/store/run.py", "from opintercept.runs.store.codec import StoredCall", []),
        ("hooks/log.py", "from opintercept.hooks.print import Print", []),
        ("_origin/names.py", "from opintercept._core.errors import HookError\nimport json", []),
    ],
    ids=["from", "package", "import", "public name", "typing", "function", "subroom", "own subroom", "own", "earlier"],
)
def test_the_check_of_rooms_finds_what_it_should(name: str, source: str, found: list[str]) -> None:
    assert upward(name, source) == found


def test_the_check_of_private_files_finds_what_it_should() -> None:
    source = "from opintercept._ops.packs._formulas import rows"
    assert from_outside("_ops/packs/vllm.py", source) == []
    assert from_outside("_ops/table.py", source) == ["_ops/packs/_formulas.py"]


def test_the_check_of_circles_finds_one() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
