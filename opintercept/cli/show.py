"""`opintercept show`: what a recorded run consists of, as text, JSON or CSV.

Invariant: calls are read one at a time, and of what grows with them no more is kept than is shown.
Must not import torch.
"""

from __future__ import annotations

import argparse
import csv
import fnmatch
import heapq
import io
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from opintercept._call import CallRecord, Phase
from opintercept._errors import OpInterceptError
from opintercept._table import aligned, amount, duration, printable
from opintercept.cli import count, steps
from opintercept.runs.store import Run, RunInfo, StoredCall, open_run

_KEYS = ("module", "op", "phase", "shape", "dtype", "step", "rank", "source")
_SORTS = ("time", "flops", "rate", "calls", "nonfinite", "max", "min", "index", "module", "op")
_ROWS = 40  # of a text, unless asked for more
_GROUPS = 100_000  # of a run that is out to fill the memory; further ones are added up in one
_WIDTH = 60
_BATCH = 100  # rows of a text that are laid out together

Row = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--calls", action="store_true", help="a row a call, in the order in which they ended")
    parser.add_argument(
        "--by",
        type=_keys,
        default=_KEYS[:3],
        metavar="KEYS",
        help=f"add calls up that agree in these, of {','.join(_KEYS)} (default module,op,phase)",
    )
    parser.add_argument("--op", action="append", help="only this operator, mm or aten::mm; repeat it for several")
    parser.add_argument("--module", metavar="GLOB", help="only calls in modules of such a name: 'encoder.*'")
    parser.add_argument("--phase", choices=get_args(Phase), help="only calls of this pass")
    parser.add_argument("--step", metavar="A:B", type=steps, help="only step A, or steps A to B - 1")
    parser.add_argument("--rank", type=int, help="only the calls of this process")
    parser.add_argument("--nonfinite", action="store_true", help="only calls with NaN or Inf in an operand or output")
    parser.add_argument("--sort", choices=_SORTS, help="the largest first; the smallest for min, index and names")
    parser.add_argument("--limit", metavar="N", type=_limit, default=0, help=f"rows, or all (default {_ROWS} in text)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, numbers that are not finite as null")
    form.add_argument("--csv", action="store_true", help="print CSV")


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(text.split(",")))
    if unknown := [key for key in keys if key not in _KEYS]:
        raise argparse.ArgumentTypeError(f"must be of {','.join(_KEYS)}, got {unknown[0]!r}")
    return keys


def _limit(text: str) -> int | None:
    return None if text == "all" else count(text)


def command(arguments: argparse.Namespace) -> int:
    """Print."""
    run = open_run(arguments.run)
    if arguments.rank is not None and arguments.rank not in run.ranks:
        raise OpInterceptError(f"--rank must be one of {_ranks(run)}, got {arguments.rank}")
    if arguments.nonfinite and all(info.tensors == "none" for info in run.infos.values()):
        raise OpInterceptError("--nonfinite needs the statistics of tensors, got a run without; record one with them")
    if arguments.limit == 0:
        arguments.limit = None if arguments.json or arguments.csv else _ROWS
    if arguments.calls and arguments.sort and arguments.limit is None:
        raise OpInterceptError("--sort of calls needs a --limit, got none; all are in the order in which they ended")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what the terminal's encoding has not
    try:
        _show_calls(run, arguments) if arguments.calls else _show_groups(run, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, and there must be something to flush to at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _ranks(run: Run) -> str:
    return ", ".join(map(str, run.ranks[:16])) + (", ..." if len(run.ranks) > 16 else "")


def _filter(arguments: argparse.Namespace) -> Callable[[StoredCall], bool]:
    module = None if arguments.module is None else re.compile(fnmatch.translate(arguments.module)).fullmatch
    chosen = arguments

    def admits(call: StoredCall) -> bool:
        record = call.record
        return (
            (chosen.phase is None or record.phase == chosen.phase)
            and (chosen.op is None or record.op in chosen.op or _short(record.op) in chosen.op)
            and (chosen.step is None or record.step in chosen.step)
            and (module is None or (record.module is not None and module(record.module) is not None))
            and (not chosen.nonfinite or not _finite(call))
        )

    return admits


def _short(op: str) -> str:
    return op.rpartition("::")[2].rpartition(".")[2]


def _finite(call: StoredCall) -> bool:
    return all(values.finite for values in call.values.values())


class _Sum:
    """What is added up of calls."""

    __slots__ = ("calls", "counted", "flops", "max", "min", "nonfinite", "raised", "seconds")

    def __init__(self) -> None:
        self.calls = self.flops = self.nonfinite = self.raised = 0
        self.counted = False  # whether there is a formula for the FLOP of any
        self.seconds = 0.0
        self.min: float | None = None
        self.max: float | None = None

    def add(self, call: StoredCall) -> None:
        record, output = call.record, call.values.get("output")
        self.calls += 1
        if record.flops is not None:
            self.flops += record.flops
            self.counted = True
        self.seconds += record.elapsed or 0.0
        self.nonfinite += not _finite(call)
        self.raised += call.error is not None
        if output is not None and output.min is not None and output.max is not None:
            self.min = output.min if self.min is None else min(self.min, output.min)
            self.max = output.max if self.max is None else max(self.max, output.max)

    def row(self, key: Iterable[tuple[str, Any]]) -> Row:
        own = {name: getattr(self, name) for name in ("calls", "flops", "seconds", "nonfinite", "raised", "min", "max")}
        own |= {} if self.counted else {"flops": None}
        return {**dict(key), **own, "flops_per_second": _rate(own["flops"], self.seconds)}

    def __str__(self) -> str:
        text = f"{self.calls:,} {'call' if self.calls == 1 else 'calls'}, {amount(self.flops, 'FLOP')}"
        text += f", {duration(self.seconds)} in them"
        return f"{text}, {self.nonfinite:,} not finite, {self.raised:,} that raised"


def _rate(flops: int | None, seconds: float | None) -> float | None:
    return flops / seconds if flops and seconds and seconds > 0 else None


def _show_groups(run: Run, arguments: argparse.Namespace) -> None:
    total, chosen = _Sum(), _Sum()
    groups: dict[tuple[Any, ...], _Sum] = {}
    admits = _filter(arguments)
    others = tuple(None if key in ("step", "rank") else "(others)" for key in arguments.by)
    for call in run.calls(arguments.rank):
        total.add(call)
        if not admits(call):
            continue
        chosen.add(call)
        key = tuple(_key(call, name) for name in arguments.by)
        group = groups.get(key)
        if group is None:
            key = key if len(groups) < _GROUPS else others
            group = groups.setdefault(key, _Sum())
        group.add(call)
    rows = [group.row(zip(arguments.by, key, strict=True)) for key, group in groups.items()]
    for row in rows:
        row["share"] = row["seconds"] / chosen.seconds if chosen.seconds > 0 else None
    shown = _sorted(rows, arguments.sort or "time", arguments.limit)
    if arguments.json:
        sums = {"calls": total.row(()), "chosen": chosen.row(())}
        print(json.dumps(_plain({"run": _about(run), **sums, "rows": shown}), indent=1, allow_nan=False))
    elif arguments.csv:
        _write_csv(shown, [*arguments.by, *_Sum().row(()), "share"])
    else:
        for name, text in _overview(run, total):
            print(f"{name:9} {text}")
        if chosen.calls != total.calls:
            print(f"{'chosen':9} {chosen}")
        if shown:
            print()
            print(_group_table(shown, arguments.by, values=any(i.tensors != "none" for i in run.infos.values())))
        if len(shown) < len(rows):
            print(f"... and {len(rows) - len(shown)} rows more, which --limit all shows")


def _key(call: StoredCall, name: str) -> Any:
    record = call.record
    if name == "rank":
        return call.rank
    if name == "shape":
        return _shape(record)
    if name == "dtype":
        return _dtype(record)
    value = getattr(record, name)
    return value[:200] if isinstance(value, str) else value


def _shape(record: CallRecord) -> str:
    if record.gemm is not None:
        return str(record.gemm)
    return "" if record.lhs is None else str(list(record.lhs.shape))


def _dtype(record: CallRecord) -> str:
    return ", ".join(dict.fromkeys(t.dtype[:50] for t in (record.lhs, record.rhs) if t is not None))


def _sorted(rows: Iterable[Row], sort: str, limit: int | None) -> list[Row]:
    """The first rows of that order; what has no value comes last."""
    name = {"time": "seconds", "rate": "flops_per_second"}.get(sort, sort)
    up = sort in ("min", "index", "module", "op")

    def place(row: Row) -> tuple[bool, Any]:
        value = row.get(name)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return True, 0
        return False, value if up else -value

    return sorted(rows, key=place) if limit is None else heapq.nsmallest(limit, rows, key=place)


def _show_calls(run: Run, arguments: argparse.Namespace) -> None:
    calls = filter(_filter(arguments), run.calls(arguments.rank))
    rows: Iterator[Row] = ({**_call_row(call), "call": call} for call in calls)
    if arguments.sort:
        rows = iter(_sorted(rows, arguments.sort, arguments.limit))
    shown = itertools.islice(rows, arguments.limit)
    if arguments.json:
        print(f'{{"run": {json.dumps(_plain(_about(run)), allow_nan=False)},\n"calls": [', end="")
        for number, row in enumerate(shown):
            print(",\n" if number else "\n", end="")
            print(json.dumps(_plain(_call_json(row["call"])), allow_nan=False), end="")
        print("\n]}")
    elif arguments.csv:
        _write_csv(shown, _CALL_COLUMNS)
    else:
        while batch := list(itertools.islice(shown, _BATCH)):
            print(_call_table(batch, ranks=len(run.ranks) > 1))
        if next(rows, None) is not None:
            print("... and more, which --limit all shows")


def _call_row(call: StoredCall) -> Row:
    record, output = call.record, call.values.get("output")
    values = {} if output is None else output.as_dict()
    return {
        "rank": call.rank,
        "index": record.index,
        "step": record.step,
        "phase": record.phase,
        "module": record.module,
        "source": record.source,
        "op": record.op,
        "shape": _shape(record),
        "dtype": _dtype(record),
        "flops": record.flops,
        "bytes": record.bytes,
        "seconds": record.elapsed,
        "flops_per_second": _rate(record.flops, record.elapsed),
        "forward": record.forward,
        "grad_of": record.grad_of,
        "nonfinite": sum(v.nan + v.inf for v in call.values.values()),
        "hash": values.get("hash"),
        "nan": values.get("nan"),
        "inf": values.get("inf"),
        "min": values.get("min"),
        "max": values.get("max"),
        "mean": values.get("mean"),
        "rms": values.get("rms"),
        "error": call.error,
    }


_CALL_COLUMNS = (
    *("rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds"),
    *(
        "flops_per_second",
        "forward",
        "grad_of",
        "nonfinite",
        "hash",
        "nan",
        "inf",
        "min",
        "max",
        "mean",
        "rms",
        "error",
    ),
)


def _call_json(call: StoredCall) -> Row:
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}


def _about(run: Run) -> Row:
    return {"path": str(run.path), "ranks": {str(rank): info.as_dict() for rank, info in run.infos.items()}}


def _plain(value: Any) -> Any:
    """With null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _write_csv(rows: Iterable[Row], columns: Iterable[str]) -> None:
    columns = tuple(columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(printable(cell) if isinstance(cell := row[name], str) else cell for name in columns)


def _overview(run: Run, total: _Sum) -> Iterator[tuple[str, str]]:
    infos = list(run.infos.values())
    info = infos[0]
    unfinished = [str(rank) for rank, info in run.infos.items() if not info.finished]
    state = "finished"
    if unfinished:
        of = f" (ranks {', '.join(unfinished[:16])})" if len(infos) > 1 else ""
        state = f"not finished{of}: it still runs, or was killed"
    world = f"; {len(infos)} of {info.world_size} ranks" if max(info.world_size, len(infos)) > 1 else ""
    yield "run", f"{_cell(run.path, 200)}: {state}{world}"
    yield "started", _cell(info.started)
    yield "command", _cell(" ".join(info.argv), 200)
    yield "versions", _pairs(info, "versions", " ")
    yield "devices", _cell(", ".join(info.devices), 200) or "the CPU"
    yield "flags", _pairs(info, "flags", "=")
    yield "tensors", info.tensors
    yield "calls", str(total)


def _pairs(info: RunInfo, name: str, between: str) -> str:
    pairs = itertools.islice(getattr(info, name).items(), 64)
    return ", ".join(f"{_cell(key)}{between}{_cell(value)}" for key, value in pairs)


def _cell(value: Any, most: int = _WIDTH) -> str:
    return printable(str(value), most)


def _group_table(rows: list[Row], keys: tuple[str, ...], *, values: bool) -> str:
    raised = any(row["raised"] for row in rows)
    head = [*keys, "calls", "MFLOP", "ms", "share", "GFLOP/s"]
    head += ["not finite", "min", "max"] * values + ["raised"] * raised
    table = [head]
    for row in rows:
        cells = [_name(name, row[name]) for name in keys]
        cells += [f"{row['calls']:,}", _number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        cells += ["" if row["share"] is None else f"{row['share']:.1%}", _number(row["flops_per_second"], 1e9)]
        cells += [f"{row['nonfinite']:,}", _value(row["min"]), _value(row["max"])] * values
        cells += [f"{row['raised']:,}"] * raised
        table.append(cells)
    return aligned(table, left=len(keys))


def _call_table(rows: list[Row], *, ranks: bool) -> str:
    values = any(row["min"] is not None or row["nan"] for row in rows)
    names = (*["rank"] * ranks, "index", "step", "phase", "module", "op", "shape", "dtype")
    table = [[*names, "MFLOP", "ms", *("nan", "inf", "min", "max", "mean") * values, ""]]
    for row in rows:
        cells = [_name(name, row[name]) for name in names]
        cells += [_number(row["flops"], 1e6), _number(row["seconds"], 1e-3)]
        if values:
            cells += ["" if row[name] is None else f"{row[name]:,}" for name in ("nan", "inf")]
            cells += [_value(row[name]) for name in ("min", "max", "mean")]
        table.append([*cells, "" if row["error"] is None else _cell(row["error"], 100)])
    return aligned(table, left=len(names))


def _name(column: str, value: Any) -> str:
    if value is None:
        return "?"
    if column == "module":
        return _cell(value) or "-"
    return _cell(value.removeprefix("aten::") if column == "op" else value)


def _number(value: float | None, unit: float) -> str:
    return "?" if value is None else f"{value / unit:,.2f}"


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
