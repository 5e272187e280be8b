"""Snapshots of the calls that a test made: JSON files in a folder beside the test.

Invariant: nothing in a file depends on the machine or the device, and a file is replaced whole.
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

from opintercept._record import CallRecord

FOLDER = "__opcalls__"
_FIELDS = ("phase", "module", "op", "lhs", "rhs", "output")
_MOST_LINES = 100  # of a difference

Entry = dict[str, str | None]


class Snapshots:
    """The snapshots of one test, while it runs.

    Args:
        file: The test's file.
        test: What names the test within it, `"TestModel::test_step[cpu]"`.
        update: Write the files instead of comparing.
    """

    def __init__(self, file: Path, test: str, update: bool) -> None:
        self._folder = file.parent / FOLDER / file.stem
        self._test = test
        self._update = update
        self._unnamed = 0

    def mismatch(self, records: Iterable[CallRecord], name: str | None) -> str | None:
        """Compare with the file, or write it; return what is wrong, None if nothing is.

        Args:
            records: What ran.
            name: Tells the snapshots of a test apart; without one they are numbered.
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
            return f"no snapshot {shown}; write it with --opintercept-update, look at it, and keep it beside the test"
        try:
            expected = _read(path, self._test)
        except ValueError as error:
            return f"the snapshot {shown} cannot be read: {error}; mend it, or write it anew with --opintercept-update"
        if expected == entries:
            return None
        lines = list(
            difflib.unified_diff([*map(_line, expected)], [*map(_line, entries)], shown, "this run", lineterm="", n=2)
        )
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
        return "\n".join(
            ["the calls are not those of the snapshot; if that is meant, run with --opintercept-update", *lines]
        )


def _entry(record: CallRecord) -> Entry:
    """What of a call is the same on every machine: no device, stride, line or time."""
    output = record.output[0] if isinstance(record.output, tuple) else record.output
    operands = {
        role: None if t is None else f"{t.dtype}{list(t.shape)}"
        for role, t in (("lhs", record.lhs), ("rhs", record.rhs), ("output", output))
    }
    # Torch picks the attention kernel by device, and its name says which.
    op = re.sub(r"^aten::_scaled_dot_product_\w+?(_backward)?$", r"aten::scaled_dot_product_attention\1", record.op)
    return {"phase": record.phase, "module": record.module, "op": op, **operands}


def _line(entry: Entry) -> str:
    module = "?" if entry["module"] is None else entry["module"] or "-"
    operands = " @ ".join(t for t in (entry["lhs"], entry["rhs"]) if t is not None)
    return f"{entry['phase']} {module} {entry['op']} {operands} -> {entry['output']}"


def _file_name(test: str) -> str:
    """The test's name as far as every file system takes it, told apart by a hash where that is not all of it."""
    plain = re.sub(r"[^\w.,=+\[\]-]+", "_", test.replace("::", "."))[:120]
    return plain if plain == test.replace("::", ".") else f"{plain}-{hashlib.sha256(test.encode()).hexdigest()[:8]}"


def _read(path: Path, test: str) -> list[Entry]:
    """The entries of a file.

    Raises:
        ValueError: It is not what `_write` writes, or another test's.
    """
    found: Any = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict) or found.keys() != {"test", "calls"} or not isinstance(found["calls"], list):
        raise ValueError('it must be an object with "test" and "calls"')
    if found["test"] != test:
        raise ValueError(f'it belongs to "{found["test"]}", whose file has the same name')
    for number, call in enumerate(found["calls"]):
        if not isinstance(call, dict) or call.keys() != set(_FIELDS):
            raise ValueError(f"call {number} must have {', '.join(_FIELDS)}, got {call!r}")
    return found["calls"]


def _write(path: Path, test: str, entries: list[Entry]) -> None:
    """Write one call a line, for the sake of whoever reads the difference in a review."""
    calls = ",\n".join(json.dumps(entry) for entry in entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes may run the same test at once; each has a file of its own until it is whole.
    partial = path.with_name(f".{os.getpid()}.tmp")
    partial.write_text(f'{{"test": {json.dumps(test)}, "calls": [\n{calls}\n]}}\n', "utf-8")
    os.replace(partial, path)
