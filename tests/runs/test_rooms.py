"""The rooms inside `runs/`: each imports only from those before it, for type checkers and in functions too."""

from __future__ import annotations

import re
from pathlib import Path

import opintercept

RUNS = Path(opintercept.__file__).parent / "runs"
ROOMS = ("store", "record", "sums", "compare", "ranks", "align", "report", "replay", "trace", "patch")
IMPORT = re.compile(r"^ *(?:from|import) opintercept\.runs(?:\.(\w+)| import (\w+))", re.MULTILINE)


def upward(room: str, source: str) -> list[str]:
    """The rooms that a file imports from although they come after its own, or are none."""
    before = ROOMS[: ROOMS.index(room) + 1]
    found = (match[1] or match[2] for match in IMPORT.finditer(re.sub(r"^ *>>>.*", "", source, flags=re.MULTILINE)))
    return [name for name in found if name not in before]


def test_rooms_import_only_from_those_before_them() -> None:
    files = [path for path in sorted(RUNS.rglob("*.py")) if path != RUNS / "__init__.py"]
    rooms = {path: path.relative_to(RUNS).parts[0].removesuffix(".py") for path in files}
    assert set(rooms.values()) == set(ROOMS)
    wrong = {path.name: found for path in files if (found := upward(rooms[path], path.read_text("utf-8")))}
    assert wrong == {}


def test_an_upward_import_is_found_wherever_it_stands() -> None:
    hidden = "if TYPE_CHECKING:\n    from opintercept.runs.record.writer import Writer\n"
    assert upward("store", hidden) == ["record"]
    assert upward("compare", "def f():\n    from opintercept.runs import ranks\n") == ["ranks"]
    assert upward("report", hidden) == []
