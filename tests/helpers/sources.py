"""The source files of the package, for tests of how they are laid out."""

from __future__ import annotations

from pathlib import Path

import opintercept

PACKAGE = Path(opintercept.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def file_of(module: str) -> str:
    """The file of the package that a module, or a public name of the package, is in."""
    parts = module.split(".")[1:]
    if len(parts) == 1:
        parts = (opintercept._HOMES.get(parts[0]) or parts[0]).split(".")
    path = "/".join(parts)
    return f"{path}.py" if f"{path}.py" in SOURCES else f"{path}/__init__.py".lstrip("/")


def private(name: str) -> bool:
    """Whether a name has one leading underscore."""
    return name.startswith("_") and not name.startswith("__")
