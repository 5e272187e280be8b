"""Snapshots of a test's calls: JSON files in a folder beside the test.

Invariant: a file does not depend on the machine or the device, and is always replaced as a whole.
Must not import torch.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from opintercept._core.record import CallRecord

FOLDER = "__opcalls__"
_FIELDS = ("phase", "module", "op", "lhs", "rhs", "output")
_MOST_LINES = 100  # of a diff

Entry = dict[str, str | None]


class Snapshots:
    """The snapshots of one test, while it runs."""

    def __init__(self, file: Path, test: str, update: bool) -> None:
        self._folder = file.parent / FOLDER / file.stem
        self._test = test  # its name within the file, `"TestModel::test_step[cpu]"`
        self._update = update  # whether to write the files instead of comparing
        self._unnamed = 0

    def mismatch(self, records: Iterable[CallRecord], name: str | None) -> str | None:
        """Compare the calls with the file, or write it. Return what is wrong, or None.

        The name tells several snapshots of one test apart. Without names they are numbered.
        """
        if name is None:
            self._unnamed += 1
            name = str(self._unnamed) if self._unnamed > 1 else ""
        path = self._folder / f"{_file_name(self._test)}{'.' if name else ''}{_file_name(name)}.json"
        entries = [_entry(record) for record in records]
        if self._update:
            _write(path, self._test, entries)
            return None
        shown = os.path.relpath(path)
        if not path.exists():
            return f"no snapshot {shown}; write it with --opintercept-update, check it, and keep it beside the test"
        try:
            expected = _read(path, self._test)
        except ValueError as error:
            return f"cannot read the snapshot {shown}: {error}; fix it, or write it again with --opintercept-update"
        if expected == entries:
            return None
        before, after = [*map(_line, expected)], [*map(_line, entries)]
        lines = list(difflib.unified_diff(before, after, shown, "this run", lineterm="", n=2))
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
        what = "the calls differ from the snapshot; if that is intended, run with --opintercept-update"
        return "\n".join([what, *lines])


def _entry(record: CallRecord) -> Entry:
    """Return what is the same on every machine: no device, strides, line or time."""
    output = next((meta for meta in record.outputs if meta is not None), None)
    operands = {
        role: None if t is None else f"{t.dtype}{list(t.shape)}"
        for role, t in (("lhs", record.lhs), ("rhs", record.rhs), ("output", output))
    }
    # torch picks the attention kernel by device, and its name says which.
    op = re.sub(r"^aten::_scaled_dot_product_\w+?(_backward)?$", r"aten::scaled_dot_product_attention\1", record.op)
    return {"phase": record.phase, "module": record.module, "op": op, **operands}


def _line(entry: Entry) -> str:
    module = "?" if entry["module"] is None else entry["module"] or "-"
    operands = " @ ".join(t for t in (entry["lhs"], entry["rhs"]) if t is not None)
    return f"{entry['phase']} {module} {entry['op']} {operands} -> {entry['output']}"


def _file_name(test: str) -> str:
    """Return the test's name in characters that every file system takes; a hash stands for what is left out."""
    plain = re.sub(r"[^\w.,=+\[\]-]+", "_", test.replace("::", "."))[:120]
    return plain if plain == test.replace("::", ".") else f"{plain}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"


def _read(path: Path, test: str) -> list[Entry]:
    """Return the entries of a file, which `_write` must have written for this test."""
    found: Any = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict) or found.keys() != {"test", "calls"} or not isinstance(found["calls"], list):
        raise ValueError('it is not an object with "test" and "calls"')
    if found["test"] != test:
        raise ValueError(f'it belongs to "{found["test"]}", whose file has the same name')
    for number, call in enumerate(found["calls"]):
        if not isinstance(call, dict) or call.keys() != set(_FIELDS):
            raise ValueError(f"call {number} must have the fields {', '.join(_FIELDS)}, got {call!r}")
    return found["calls"]


def _write(path: Path, test: str, entries: list[Entry]) -> None:
    """Write each call on its own line, which makes a readable diff."""
    calls = ",\n".join(json.dumps(entry) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may run the same test at once, so each writes a file of its own first.
    partial = path.with_name(f".{os.getpid()}.tmp")
    partial.write_text(f'{{"test": {json.dumps(test)}, "calls": [\n{calls}\n]}}\n', "utf-8")
    os.replace(partial, path)
