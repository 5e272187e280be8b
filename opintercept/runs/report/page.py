"""Writes one run, or two, as an HTML page that opens offline; `panels` has what it shows of each run.

Invariant: texts of a run reach the page only as JSON, in a block that no browser executes, and the scripts show them
as text. However long a run is, memory and the page stay bounded. Must not import torch, except to read tensors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from importlib import resources
from typing import Any

from opintercept._core.errors import OpInterceptError
from opintercept.runs.compare.diff import compare_runs
from opintercept.runs.compare.difference import Kind
from opintercept.runs.compare.operands import Comparer
from opintercept.runs.compare.pairs import PHASES
from opintercept.runs.report.drift import Drift
from opintercept.runs.report.panels import CELLS, MODULES, NAME, HeatMap, panels_of, part_of, shown_text
from opintercept.runs.store.files import replaced
from opintercept.runs.store.run import Run

SCRIPTS = "plots modules parts state commands maps overview heat matmuls outputs divergence page"
WORST_FIRST: tuple[Kind, ...] = ("added", "changed argument", "changed operand", "unclear", "inherited", "rounding")


def write(path: str | os.PathLike[str], run: Run, other: Run | None = None) -> None:
    """Write the page, which compares the run with the other. If that fails, `path` stays as it was."""
    save(path, page(run, other))


def save(path: str | os.PathLike[str], text: str) -> None:
    """Write a page. If that fails, `path` stays as it was."""
    with replaced(path, "the page") as partial, open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)


def page(run: Run, other: Run | None = None) -> str:
    """The page as text: less than 2 MB, most of which are the compressed statistics."""
    cells = CELLS if other is None else CELLS // 2
    shown, heat = panels_of(run, cells)
    data: dict[str, Any] = {"runs": [shown], "divergence": None}
    if other is not None:
        shown_of_other, _ = panels_of(other, cells)
        run.close()
        other.close()
        data = {"runs": [shown, shown_of_other], "divergence": divergence(run, other, heat)}
    return filled("report", "page", SCRIPTS, data)


def filled(command: str, name: str, scripts: str, data: Any) -> str:
    """The page of a command: the frame with a body, the files of its scripts, and plain data."""
    files = resources.files("opintercept.runs.report").joinpath("web")
    frame, body, style, *texts = (
        files.joinpath(each).read_text("utf-8")
        for each in ("frame.html", f"{name}.html", "style.css", *(f"{each}.js" for each in scripts.split()))
    )
    parts = {"command": command, "body": body, "policy": _policy(*texts), "style": style, "data": _packed(data)}
    parts["scripts"] = "".join(f"<script>{text}</script>\n" for text in texts)
    # One pass over the frame: what is put in is not searched for further marks.
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], frame)


def _policy(*scripts: str) -> str:
    """A content security policy that runs only these scripts and fetches nothing."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def _packed(plain: Any) -> str:
    """JSON, compressed and in letters that an HTML parser cannot take for markup."""
    text = json.dumps(plain, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode())).decode()


def divergence(a: Run, b: Run, heat: HeatMap) -> dict[str, Any]:
    """Where two runs diverge, as plain data: what `diff` prints, and marks for the first run's map `heat`."""
    drift, rows = Drift(heat), heat.modules
    try:
        found = compare_runs(a, b, Comparer(a, b), len(PHASES) * MODULES, 1, watch=drift.add)
    except OpInterceptError as failed:
        return {"failed": shown_text(str(failed), 4 * NAME)}
    marks: dict[tuple[int, str], Kind] = {}
    for each in found.modules:  # one for each pair of processes
        if (row := rows.get(each.module)) is not None:
            kinds = [*each.kinds, marks.get((row, each.phase), WORST_FIRST[-1])]
            marks[row, each.phase] = next(kind for kind in WORST_FIRST if kind in kinds)
    first = found.first and found.first.a.record
    return {
        "parts": [part_of(part) for part in found.parts()],
        "first": first and {"row": rows.get(first.module), "phase": first.phase},
        "modules": [[*place, kind] for place, kind in marks.items()],
        "drift": drift.as_dict(),
    }
