"""A run, or two, as one page that opens offline: values over modules and steps, GEMMs, histograms, divergence.

Invariant: nothing that a run says reaches the page but as JSON in a block that no browser executes; `report.js` puts it
in as text. However long a run is, memory and the page stay bounded, and the page says what it leaves out.
Must not import torch, except where a run has tensors.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from opintercept._errors import OpInterceptError
from opintercept._text import printable
from opintercept.runs.codec import StoredCall, Values, is_output
from opintercept.runs.comparer import Comparer
from opintercept.runs.diff import compare_runs
from opintercept.runs.difference import NOT_RECORDED, CallDifference, Kind
from opintercept.runs.store import Run

if TYPE_CHECKING:
    import torch

# What a page holds at most. Steps are put together, two and two, until the map fits.
MODULES = 400
COLUMNS = 200
CELLS = 20_000
ROWS_ADDED_UP = 10_000
ROWS = 1000
NAME = 200
# Modules and passes whose tensors are read, samples that make one histogram, and bytes of a tensor and of all of them.
HISTOGRAMS = 120
SAMPLES = 8
TENSOR = 1 << 26
TENSORS = 1 << 30
BINS = 60
WORST = 10
WORST_FIRST: tuple[Kind, ...] = ("added", "changed argument", "changed operand", "unclear", "inherited")
PHASES = ("forward", "backward", "recompute")
ROLES = ("output", "lhs", "rhs", "bias")
NAMED = 16  # operands, arguments and processes that a sentence names


def write(path: str | os.PathLike[str], run: Run, other: Run | None = None) -> None:
    """Write the page; whatever fails on the way, `path` is whole or as it was.

    Args:
        path: Of the page, a plain file or none yet.
        run: The run.
        other: One to compare it with.

    Raises:
        OpInterceptError: The file cannot be written.
        ImportError: plotly is not installed, or safetensors and a run has tensors.

    Example:
        >>> import os, tempfile, torch
        >>> from opintercept import intercept, runs
        >>> from opintercept.runs import report
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run")):
        ...         _ = torch.nn.Linear(3, 2)(torch.zeros(4, 3))
        ...     report.write(f"{folder}/page.html", runs.open_run(f"{folder}/run"))
        ...     sorted(os.listdir(folder))
        ['page.html', 'run']
    """
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OpInterceptError(f"a page must go to a plain file, got {os.fspath(path)!r}")
    text = page(run, other)
    partial = f"{target}.partial"
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(partial, target)
    except OSError as failed:
        raise OpInterceptError(f"a page must go where it can be written, got {os.fspath(path)!r}: {failed}") from failed
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def page(run: Run, other: Run | None = None) -> str:
    """The page as text; about 5 MB, most of it plotly.

    Args:
        run: The run.
        other: One to compare it with.

    Raises:
        ImportError: plotly is not installed, or safetensors and a run has tensors.
    """
    plotly = _plotly()
    shown, modules = _read(run)
    data: dict[str, Any] = {"runs": [shown], "parting": None}
    if other is not None:
        data = {"runs": [shown, summary(other)], "parting": _parting(run, other, modules)}
    files = resources.files("opintercept.runs")
    script = files.joinpath("report.js").read_text("utf-8")
    parts = {
        "policy": _policy(plotly, script),
        "plotly": plotly,
        "data": _in_script(data),
        "script": script,
    }
    # In one pass over our own text, so that nothing that is put in is searched for places to put more in.
    template = files.joinpath("report.html").read_text("utf-8")
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], template)


def _plotly() -> str:
    try:
        source = importlib.import_module("plotly.offline").get_plotlyjs()
    except ImportError as missing:
        raise ImportError("a report needs plotly, got none; pip install 'opintercept[cli]'") from missing
    # A byte order mark or a line end of another system would give the text another hash in the browser.
    return str(source).replace("\r\n", "\n").replace("\r", "\n")


def _policy(*scripts: str) -> str:
    """A content security policy that runs these scripts and no other, and fetches nothing."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _in_script(plain: Any) -> str:
    """JSON that no HTML parser takes for markup; in ASCII, so that no character means anything to it."""
    text = json.dumps(plain, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def summary(run: Run) -> dict[str, Any]:
    """What a page says of one run, as plain data; the calls are read once."""
    return _read(run)[0]


def _read(run: Run) -> tuple[dict[str, Any], dict[str | None, int]]:
    """The summary, and the row of each module in its map."""
    heat, gemms, samples, totals = _Heat(), _Gemms(), _Samples(), _Totals()
    for call in run.calls():
        totals.add(call)
        row = heat.add(call)
        gemms.add(call)
        if row is not None:
            samples.add(row, call)
    info = run.info
    shown = {
        "path": _shown(str(run.path)),
        "about": {
            "command": _shown(" ".join(info.argv), 4 * NAME),
            "started": _shown(info.started),
            "tensors": info.tensors,
            "processes": f"{len(run.ranks)} of {info.world_size}",
            "finished": all(each.finished for each in run.infos.values()),
            "versions": _pairs(info.versions.items()),
            "devices": [_shown(name) for name in info.devices[:64]],
            "flags": _pairs(info.flags.items()),
        },
        "totals": totals.as_dict() | {"modules": len(heat.modules), "more_modules": heat.calls_left_out > 0},
        "heat": heat.as_dict(),
        "gemms": gemms.as_dict(),
        "histograms": samples.as_dict(run),
    }
    return shown, heat.modules


def _parting(a: Run, b: Run, rows: dict[str | None, int]) -> dict[str, Any]:
    """Where two runs part, as plain data; `rows` are those of the first run's map."""
    try:
        found = compare_runs(a, b, Comparer(a, b), len(PHASES) * MODULES, WORST)
    except OpInterceptError as failed:
        return {"failed": _shown(str(failed), 4 * NAME)}
    worst: dict[tuple[int, str], list[Any]] = {}
    left_out = found.modules_in_all - len(found.modules)
    for each in found.modules:  # one for each pair of processes
        row = rows.get(each.module)
        if row is None:
            left_out += 1
            continue
        kind = next(kind for kind in WORST_FIRST if each.kinds.get(kind))
        point = [
            row,
            each.phase,
            kind,
            each.calls,
            sum(each.kinds.get(kind, 0) for kind in WORST_FIRST),
            _size(each.relative),
        ]
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
        "settings": [[_shown(text) for text in setting] for setting in found.settings[:64]],
        "first": found.first and (_pair(found.first) | {"row": rows.get(found.first.a.record.module)}),
        "worst": [_pair(each) for each in found.worst[:WORST]],
        "modules": list(worst.values()),
        "left_out": left_out,
    }


def _pair(pair: CallDifference) -> dict[str, Any]:
    record, output = pair.a.record, pair.output
    return {
        "index": record.index,
        "other_index": pair.b.record.index,
        "rank": pair.a.rank,
        "step": record.step,
        "op": _shown(record.op.removeprefix("aten::")),
        "phase": record.phase,
        "module": _module(record.module),
        "source": _shown(record.source or ""),
        "kind": pair.kind,
        "changed": list(pair.changed[:NAMED]),
        "arguments": [
            [_shown(name), *(_shown(value if value == NOT_RECORDED else repr(value)) for value in values)]
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
    """An error as JSON has it."""
    return "inf" if value is not None and not math.isfinite(value) else _number(value)


def _known(size: float | str | None) -> float:
    return -1.0 if size is None else float(size)


def _pairs(items: Iterable[tuple[str, str]]) -> list[list[str]]:
    return [[_shown(key), _shown(value)] for key, value in list(items)[:64]]


def _shown(text: str, most: int = NAME) -> str:
    return printable(text, most)


def _ends(text: str) -> str:
    """All of a long name that `_shown` may show."""
    return text if len(text) <= 2 * NAME else f"{text[:NAME]}{text[-NAME:]}"


def _module(name: str | None) -> str:
    return "(not attributed)" if name is None else _shown(name) or "(outside of modules)"


def _number(value: float | None) -> float | None:
    """Four digits, which is what a picture shows; None for what JSON cannot say."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def _seconds(call: StoredCall) -> float:
    elapsed = call.record.elapsed
    return elapsed if elapsed is not None and 0.0 <= elapsed < math.inf else 0.0


class _Totals:
    """Counts over all calls, and the first output that is not finite, by step and index over all processes."""

    def __init__(self) -> None:
        self.calls = self.flops = self.errors = self.nonfinite = 0
        self.seconds = 0.0
        self.steps = (0, 0)
        self.first: dict[str, Any] | None = None
        self.first_place = (0, 0, 0)

    def add(self, call: StoredCall) -> None:
        record = call.record
        self.steps = (
            (min(self.steps[0], record.step), max(self.steps[1], record.step)) if self.calls else (record.step,) * 2
        )
        self.calls += 1
        self.flops += record.flops or 0
        self.seconds += _seconds(call)
        self.errors += call.error is not None
        output = call.values.get("output")
        if output is None or output.finite:
            return
        self.nonfinite += 1
        if self.first is None or call.place < self.first_place:
            operands = {role: values for role, values in call.values.items() if not is_output(role)}
            self.first_place = call.place
            self.first = {
                "index": record.index,
                "rank": call.rank,
                "step": record.step,
                "op": _shown(record.op.removeprefix("aten::")),
                "phase": record.phase,
                "module": _module(record.module),
                "source": _shown(record.source or ""),
                "nan": output.nan,
                "inf": output.inf,
                "count": output.count,
                "from": [role for role, v in operands.items() if not v.finite][:NAMED] if operands else None,
            }

    def as_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "flops": self.flops,
            "seconds": self.seconds,
            "errors": self.errors,
            "nonfinite": self.nonfinite,
            "steps": list(self.steps),
            "first": self.first,
        }


class _Moments:
    """What `Values` of several tensors come to together."""

    __slots__ = ("count", "finite", "inf", "max", "min", "nan", "square", "sum")

    def __init__(self) -> None:
        self.count = self.nan = self.inf = self.finite = 0
        self.sum = self.square = 0.0
        self.min, self.max = math.inf, -math.inf

    def add(self, values: Values) -> None:
        self.count += values.count
        self.nan += values.nan
        self.inf += values.inf
        if values.mean is None or values.rms is None or values.min is None or values.max is None:
            return
        finite = max(values.count - values.nan - values.inf, 0)
        self.finite += finite
        self.sum += values.mean * finite
        self.square += values.rms * values.rms * finite
        self.min, self.max = min(self.min, values.min), max(self.max, values.max)

    def merge(self, other: _Moments) -> None:
        for name in ("count", "nan", "inf", "finite", "sum", "square"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.min, self.max = min(self.min, other.min), max(self.max, other.max)

    def as_list(self) -> list[Any]:
        known = self.finite > 0
        mean = self.sum / self.finite if known else None
        # A hostile run's mean square can be anything.
        square = self.square / self.finite if known else -1.0
        return [
            self.count,
            self.nan,
            self.inf,
            *map(_number, (self.min, self.max, mean, math.sqrt(square) if square >= 0.0 else None)),
        ]


class _Cell:
    """The calls of one module in one pass in the steps of one column."""

    __slots__ = ("calls", "flops", "roles", "seconds")

    def __init__(self) -> None:
        self.calls = self.flops = 0
        self.seconds = 0.0
        self.roles: dict[str, _Moments] = {}

    def add(self, call: StoredCall) -> None:
        self.calls += 1
        self.flops += call.record.flops or 0
        self.seconds += _seconds(call)
        for role, values in call.values.items():
            if role in ROLES:
                self.roles.setdefault(role, _Moments()).add(values)

    def merge(self, other: _Cell) -> None:
        self.calls += other.calls
        self.flops += other.flops
        self.seconds += other.seconds
        for role, moments in other.roles.items():
            self.roles.setdefault(role, _Moments()).merge(moments)


class _Heat:
    """Modules, in the order in which they first came up, by steps; as many steps to a column as it takes to fit."""

    def __init__(self) -> None:
        self.modules: dict[str | None, int] = {}
        self.calls_left_out = 0
        self.width = 1
        self.cells: dict[tuple[str, int, int], _Cell] = {}
        self.columns: set[int] = set()

    def add(self, call: StoredCall) -> int | None:
        """Add a call and return the row of its module; None for one that has no place."""
        record = call.record
        row = self.modules.get(record.module)
        if row is None:
            if len(self.modules) == MODULES:
                self.calls_left_out += 1
                return None
            row = self.modules[record.module] = len(self.modules)
        key = (record.phase, row, record.step // self.width)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = _Cell()
            self.columns.add(key[2])
        cell.add(call)
        while len(self.columns) > COLUMNS or (len(self.cells) > CELLS and len(self.columns) > 1):
            self._halve()
        return row

    def _halve(self) -> None:
        self.width *= 2
        cells, self.cells = self.cells, {}
        for (phase, row, column), cell in cells.items():
            known = self.cells.setdefault((phase, row, column // 2), cell)
            if known is not cell:
                known.merge(cell)
        self.columns = {column // 2 for column in self.columns}

    def as_dict(self) -> dict[str, Any]:
        columns = {column: number for number, column in enumerate(sorted(self.columns))}
        roles = [role for role in ROLES if any(role in cell.roles for cell in self.cells.values())]
        phases: dict[str, list[Any]] = defaultdict(list)
        for (phase, row, column), cell in self.cells.items():
            moments = [cell.roles[role].as_list() if role in cell.roles else 0 for role in roles]
            phases[phase].append([row, columns[column], cell.calls, cell.flops, _number(cell.seconds), *moments])
        return {
            "modules": [_module(name) for name in self.modules],
            "steps": [column * self.width for column in columns],
            "width": self.width,
            "roles": roles,
            "phases": {phase: phases[phase] for phase in PHASES if phase in phases},
            "left_out": self.calls_left_out,
        }


class _Row:
    __slots__ = ("bytes", "calls", "flops", "seconds")

    def __init__(self) -> None:
        self.calls = 0
        self.flops: int | None = 0
        self.bytes: int | None = 0
        self.seconds = 0.0

    def add(self, calls: int, flops: int | None, size: int | None, seconds: float) -> None:
        self.calls += calls
        self.flops = None if flops is None or self.flops is None else self.flops + flops
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.seconds += seconds


class _Gemms:
    """Calls, work and time by operator, pass, group of modules, shape, dtype and kind of device."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, ...], _Row] = {}
        self.rest, self.rest_rows = _Row(), 0

    def add(self, call: StoredCall) -> None:
        record = call.record
        lhs, gemm = record.lhs, record.gemm
        dtypes = gemm.dtypes if gemm is not None else () if lhs is None else (lhs.dtype,)
        module = re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", record.module or "") if record.module is not None else "\0"
        shape = str(gemm) if gemm is not None else "" if lhs is None else str(list(lhs.shape))
        device = "" if lhs is None else lhs.device.partition(":")[0]
        texts = (
            record.op.removeprefix("aten::"),
            record.phase,
            module,
            shape,
            ", ".join(dict.fromkeys(dtypes)),
            device,
        )
        key = tuple(map(_ends, texts))
        row = self.rows.get(key)
        if row is None:
            if len(self.rows) == ROWS_ADDED_UP:
                row = self.rest
            else:
                row = self.rows[key] = _Row()
        row.add(1, record.flops, record.bytes, _seconds(call))

    def as_dict(self) -> dict[str, Any]:
        rows = sorted(self.rows.items(), key=lambda item: (-item[1].seconds, -(item[1].flops or 0)))
        rest = _Row()
        for row in (self.rest, *(row for _, row in rows[ROWS:])):
            rest.add(row.calls, row.flops, row.bytes, row.seconds)
        return {
            "rows": [[*self._names(key), *_work(row)] for key, row in rows[:ROWS]],
            "rest": _work(rest) if rest.calls else None,
        }

    @staticmethod
    def _names(key: tuple[str, ...]) -> Iterator[str]:
        op, phase, module, shape, dtype, device = key
        yield _shown(op)
        yield phase
        yield _module(None if module == "\0" else module)
        yield from map(_shown, (shape, dtype, device))


def _work(row: _Row) -> list[Any]:
    return [row.calls, row.flops, row.bytes, _number(row.seconds)]


_Sample = tuple[int, int, str]  # rank, step, and the tensor's name


class _Samples:
    """Where the tensors of the histograms are: the first and the last outputs of each module in each pass."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, int], tuple[list[_Sample], deque[_Sample]]] = {}
        self.left_out: set[tuple[str, int]] = set()
        self.sampled = False

    def add(self, row: int, call: StoredCall) -> None:
        name = call.tensors.get("output")
        if name is None:
            return
        key = (call.record.phase, row)
        if key not in self.calls:
            if len(self.calls) == HISTOGRAMS:
                self.left_out.add(key)  # of at most MODULES rows
                return
            self.calls[key] = ([], deque())
        # A sample is too small for a histogram of its own.
        sampled = name.endswith(".sample")
        self.sampled |= sampled
        first, last = self.calls[key]
        sample = (call.rank, call.record.step, name)
        if len(first) < (SAMPLES if sampled else 1):
            first.append(sample)
            return
        last.append(sample)
        if len(last) > len(first):
            last.popleft()

    def as_dict(self, run: Run) -> dict[str, Any]:
        left, shown, unread = TENSORS, [], 0
        for (phase, row), ends in self.calls.items():
            drawn, read = [], []
            for samples in ends:
                tensors = []
                for rank, _, name in samples:
                    try:
                        tensor = run.load(rank, name, min(left, TENSOR))
                    except OpInterceptError:
                        unread += 1
                    else:
                        left -= tensor.nbytes
                        tensors.append(tensor)
                if tensors:
                    steps = [step for _, step, _ in samples]
                    drawn.append({"steps": [min(steps), max(steps)], "calls": len(tensors)})
                    read.append(tensors)
            if drawn:
                edges, histograms = _histograms(read)
                for one, histogram in zip(drawn, histograms, strict=True):
                    one |= histogram
                shown.append({"module": row, "phase": phase, "edges": edges, "drawn": drawn})
        return {"shown": shown, "unread": unread, "left_out": len(self.left_out), "sampled": self.sampled}


def _histograms(groups: Sequence[Sequence[torch.Tensor]]) -> tuple[list[float], list[dict[str, Any]]]:
    """Of each group over the same bins: smallest and largest edge, and counts."""
    import torch

    finite, counts = [], []
    for group in groups:
        # In float64, which holds what every other dtype does; moduli of complex numbers.
        values = torch.cat([(t.abs() if t.is_complex() else t).reshape(-1).double() for t in group])
        finite.append(values[values.isfinite()])
        counts.append(values.numel())
    known = torch.cat(finite)
    low, high = (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)
    bins = min(BINS, max(10, math.isqrt(max(counts))))
    if not (low < high and math.isfinite(high - low)):
        bins = 1
    return [low, high], [
        {
            "count": count,
            "nonfinite": count - values.numel(),
            "counts": torch.histc(values, bins, low, high).long().tolist() if bins > 1 else [values.numel()],
        }
        for values, count in zip(finite, counts, strict=True)
    ]
