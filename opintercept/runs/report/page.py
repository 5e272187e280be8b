"""Writes one run, or two, as an HTML page that opens offline; `panels` has what it shows of each run.

Invariant: texts of a run reach the page only as JSON, in a block that no browser executes, and the scripts show them
as text. However long a run is, memory and the page stay bounded. Must not import torch, except to read tensors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import zlib
from importlib import resources
from typing import Any

from opintercept._core.errors import OpInterceptError
from opintercept.runs.compare.diff import compare_runs
from opintercept.runs.compare.difference import NOT_RECORDED, CallDifference, Kind
from opintercept.runs.compare.index import PHASES
from opintercept.runs.compare.values import Comparer
from opintercept.runs.report.drift import Drift
from opintercept.runs.report.panels import (
    CELLS,
    MODULES,
    NAME,
    NAMED,
    PAIRS,
    HeatMap,
    about,
    panels_of,
    rounded,
    shown_text,
)
from opintercept.runs.store.files import replaced
from opintercept.runs.store.run import Run

SCRIPTS = "plots modules parts state commands maps overview heat matmuls outputs divergence page"
WORST = 10
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
    """Where two runs diverge, as plain data; `heat` is the first run's map."""
    drift, rows = Drift(heat), heat.modules
    try:
        found = compare_runs(a, b, Comparer(a, b), len(PHASES) * MODULES, WORST, watch=drift.add)
    except OpInterceptError as failed:
        return {"failed": shown_text(str(failed), 4 * NAME)}
    worst: dict[tuple[int, str], list[Any]] = {}
    left_out = found.modules_in_all - len(found.modules)
    for each in found.modules:  # one for each pair of processes
        row = rows.get(each.module)
        if row is None:
            left_out += 1
            continue
        kind = next(kind for kind in WORST_FIRST if each.kinds.get(kind))
        differ = sum(each.kinds.get(kind, 0) for kind in WORST_FIRST)
        point = [row, each.phase, kind, each.calls, differ, _size(each.relative)]
        known = worst.setdefault((row, each.phase), point)
        if _known(each.relative) > _known(known[5]):
            worst[row, each.phase] = point
    return {
        "equal": found.equal,
        "calls": list(found.calls),
        "pairs": found.pairs,
        "kinds": dict(found.kinds),
        "unmatched": list(found.unmatched_calls),
        "absent": [[each.run.upper(), each.rank, each.empty, each.calls] for each in found.absent[:NAMED]],
        "absent_in_all": len(found.absent),
        "before": list(found.before),
        "settings": [[shown_text(text) for text in setting] for setting in found.settings[:PAIRS]],
        "first": found.first and (_pair(found.first) | {"row": rows.get(found.first.a.record.module)}),
        "worst": [_pair(each) for each in found.worst[:WORST]],
        "modules": list(worst.values()),
        "drift": drift.as_dict(),
        "left_out": left_out,
    }


def _pair(pair: CallDifference) -> dict[str, Any]:
    output = pair.output
    return about(pair.a) | {
        "other_index": pair.b.record.index,
        "kind": pair.kind,
        "changed": list(pair.changed[:NAMED]),
        "arguments": [
            [shown_text(name), *(shown_text(value if value == NOT_RECORDED else repr(value)) for value in values)]
            for name, *values in pair.arguments[:NAMED]
        ],
        "nonfinite": [
            [role.role, *([values.nan, values.inf] if values else [0, 0] for values in (role.a_values, role.b_values))]
            for role in pair.roles
            if not all(values is None or values.finite for values in (role.a_values, role.b_values))
        ][:NAMED],
        "by": None if output is None else output.by,
        "relative": None if output is None else _size(output.relative),
        "absolute": None if output is None else _size(output.max_absolute),
    }


def _size(value: float | None) -> float | str | None:
    """An error as JSON."""
    return "inf" if value is not None and not math.isfinite(value) else rounded(value)


def _known(size: float | str | None) -> float:
    return -1.0 if size is None else float(size)
