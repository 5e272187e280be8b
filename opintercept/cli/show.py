"""`opintercept show`: what a recorded run consists of, as text, JSON or CSV.

Invariant: calls are read piece by piece and not kept. Sorting keeps only keys and places in the file.
Must not import torch.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from opintercept._errors import OpInterceptError
from opintercept._record import CallRecord
from opintercept._text import amount, counted, csv_cell, duration, printable, short_name
from opintercept.cli._filters import NameFilter
from opintercept.cli._options import add_module_and_phase, add_op, count, steps
from opintercept.cli._output import finite_json, fitted, listed, nonfinite, plain_warnings, safe_stdout
from opintercept.runs._columns import Array, Arrays, Columns
from opintercept.runs._groups import COUNTS, Grouping, Kinds, ends_of, first_output, joined
from opintercept.runs._groups import nonfinite as not_finite
from opintercept.runs.codec import StoredCall, Values, is_output
from opintercept.runs.compaction import open_compacted
from opintercept.runs.store import Run, RunInfo

_KEYS = ("module", "op", "phase", "shape", "dtype", "step", "rank", "source")
_SORTS = ("time", "flops", "rate", "calls", "nonfinite", "max", "min", "index", "module", "op")
_ROWS = 40  # of text, by default
# A run may be made to fill the memory: beyond this many groups, or bytes of their keys, the rest share one group.
MAX_GROUPS = 100_000
MAX_KEYS_SIZE = 1 << 27
_WIDTH = 60
_LONGEST = 200  # characters of a key
_BATCH = 100  # rows of text that are laid out together
MAX_OPEN = 256  # files that are open at once

Row = dict[str, Any]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--calls", action="store_true", help="show a row for each call, in the order the calls ended")
    parser.add_argument(
        "--by",
        type=_keys,
        default=_KEYS[:3],
        metavar="KEYS",
        help=f"group calls that share these keys, out of {','.join(_KEYS)} (default module,op,phase)",
    )
    add_op(parser, "show")
    add_module_and_phase(parser, "show")
    parser.add_argument("--step", metavar="A:B", type=steps, help="show only step A, or steps A to B - 1")
    parser.add_argument("--rank", type=int, help="show only the calls of this process")
    parser.add_argument(
        "--nonfinite", action="store_true", help="show only calls with NaN or Inf in an operand or output"
    )
    parser.add_argument(
        "--sort", choices=_SORTS, help="show the largest first, or the smallest for min, index and names"
    )
    parser.add_argument(
        "--limit", metavar="N", type=_limit, default=0, help=f"number of rows, or all (default {_ROWS} in text)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON, with null for numbers that are not finite")
    form.add_argument("--csv", action="store_true", help="print CSV")


def _keys(text: str) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(text.split(",")))
    if unknown := [key for key in keys if key not in _KEYS]:
        raise argparse.ArgumentTypeError(f"unknown key {unknown[0]!r}; choose from {','.join(_KEYS)}")
    return keys


def _limit(text: str) -> int | None:
    return None if text == "all" else count(text)


def command(arguments: argparse.Namespace) -> int:
    """Print groups of calls, or single calls."""
    with plain_warnings("show"):
        run = open_compacted(arguments.run)
    if arguments.rank is not None and arguments.rank not in run.ranks:
        raise OpInterceptError(f"--rank must be one of {listed(run.ranks)}, got {arguments.rank}")
    if arguments.nonfinite and all(info.tensors == "none" for info in run.infos.values()):
        raise OpInterceptError("--nonfinite needs statistics, but this run was recorded with --tensors none")
    if arguments.limit == 0:
        arguments.limit = None if arguments.json or arguments.csv else _ROWS
    if arguments.calls and arguments.sort and arguments.limit is None:
        raise OpInterceptError("--calls with --sort needs a --limit, since every call might not fit into memory")
    names = NameFilter(arguments.module, arguments.op, lambda name: name, short_name)
    with safe_stdout(), plain_warnings("show"):
        _show_calls(run, arguments, names) if arguments.calls else _show_groups(run, arguments, names)
    return 0


def _filter(arguments: argparse.Namespace, names: NameFilter) -> Callable[[StoredCall], bool]:
    chosen = arguments

    def admits(call: StoredCall) -> bool:
        record = call.record
        return (
            names(record)
            and (chosen.phase is None or record.phase == chosen.phase)
            and (chosen.step is None or record.step in chosen.step)
            and (not chosen.nonfinite or not _finite(call))
        )

    return admits


def _finite(call: StoredCall) -> bool:
    return all(values.finite for values in call.values.values())


class _Sum:
    """Totals over calls."""

    __slots__ = ("calls", "counted", "flops", "max", "min", "nonfinite", "raised", "seconds")

    def __init__(self) -> None:
        self.calls = self.flops = self.nonfinite = self.raised = 0
        self.counted = False  # whether the FLOP of any call is known
        self.seconds = 0.0
        self.min: float | None = None
        self.max: float | None = None

    def add(self, calls: int, flops: int | None, seconds: float, nonfinite: int, raised: int) -> None:
        """Add calls that look alike, each of so many FLOP."""
        self.calls += calls
        if flops is not None:
            self.flops += flops * calls
            self.counted = True
        self.seconds += seconds
        self.nonfinite += nonfinite
        self.raised += raised

    def stretch(self, low: float, high: float) -> None:
        """Add the range of outputs."""
        if not math.isnan(low) and not math.isnan(high):
            self.min = low if self.min is None else min(self.min, low)
            self.max = high if self.max is None else max(self.max, high)

    def row(self, key: Iterable[tuple[str, Any]]) -> Row:
        own = {name: getattr(self, name) for name in ("calls", "flops", "seconds", "nonfinite", "raised", "min", "max")}
        own |= {} if self.counted else {"flops": None}
        return {**dict(key), **own, "flops_per_second": _rate(own["flops"], self.seconds)}

    def __str__(self) -> str:
        text = f"{counted(self.calls, 'call')}, {amount(self.flops, 'FLOP')}, {duration(self.seconds)} in total"
        return f"{text}, {self.nonfinite:,} not finite, {self.raised:,} raised"


def _rate(flops: int | None, seconds: float | None) -> float | None:
    return flops / seconds if flops and seconds and seconds > 0 else None


class _Groups:
    """Calls that share the keys, added up."""

    def __init__(self, arguments: argparse.Namespace, names: NameFilter) -> None:
        self.total, self.chosen, self.first = _Sum(), _Sum(), _First()
        self.groups: dict[tuple[Any, ...], _Sum] = {}
        self._arguments, self._names = arguments, names
        self._others = tuple(None if key in ("step", "rank") else "(others)" for key in arguments.by)
        self._size = 0

    def add(self, columns: Columns) -> None:
        """Add the calls of a process."""
        arguments = self._arguments
        kinds = Kinds(columns)
        admitted: list[bool] = []
        slots: list[str | None] = []
        keys: list[tuple[Any, ...]] = []
        for start, chunk in columns.chunks(_SUMMED):
            of = kinds.of(chunk)
            for kind in range(len(admitted), len(kinds)):
                site, look = kinds[kind]
                record = look.record_at(site)
                admitted.append(self._names(record) and arguments.phase in (None, record.phase))
                slots.append(first_output(look))
                keys.append(tuple(None if key == "step" else _key(record, columns.rank, key) for key in arguments.by))
            bad = not_finite(columns, start, chunk)
            self._find_first(columns, start, chunk, bad)
            rows = np.array(admitted, bool)[of]
            if arguments.step is not None:
                rows &= (chunk["step"] >= arguments.step.start) & (chunk["step"] < arguments.step.stop)
            if arguments.nonfinite:
                rows &= bad
            codes = of.astype(np.int64) * 2 + rows
            if "step" in arguments.by:  # those of calls that are not admitted do not matter
                codes = joined(codes, np.where(rows, chunk["step"], 0))
            groups = Grouping(codes)
            seconds = groups.sum(np.where(np.isnan(chunk["elapsed"]), 0.0, chunk["elapsed"])).tolist()
            sums = zip(seconds, groups.sum(bad).tolist(), groups.sum(chunk["has_error"]).tolist(), strict=True)
            low, high = (ends.tolist() for ends in ends_of(groups, chunk, of, slots))
            for place, (first, calls, (elapsed, not_finite_, raised)) in enumerate(
                zip(groups.firsts.tolist(), groups.counts.tolist(), sums, strict=True)
            ):
                kind = int(of[first])
                _, look = kinds[kind]
                added = (calls, look.record.flops, elapsed, int(not_finite_), int(raised))
                self.total.add(*added)
                if not rows[first]:
                    continue
                self.chosen.add(*added)
                group = self._group(keys[kind], int(chunk["step"][first]))
                group.add(*added)
                group.stretch(low[place], high[place])

    def _group(self, key: tuple[Any, ...], step: int) -> _Sum:
        if "step" in self._arguments.by:
            key = tuple(step if name == "step" else part for name, part in zip(self._arguments.by, key, strict=True))
        group = self.groups.get(key)
        if group is None:
            self._size += sum(map(sys.getsizeof, key))
            key = key if len(self.groups) < MAX_GROUPS and self._size < MAX_KEYS_SIZE else self._others
            group = self.groups.setdefault(key, _Sum())
        return group

    def _find_first(self, columns: Columns, start: int, chunk: Arrays, bad: Array) -> None:
        if not bad.any():
            return
        rows = np.flatnonzero(bad)
        made = not_finite(columns, start, chunk, outputs=True)[rows]
        row = rows[np.lexsort((chunk["index"][rows], chunk["step"][rows], ~made))[0]]
        (call,) = columns.calls_at(np.array([start + row]), given=False)
        self.first.add(call)


_SUMMED = ("index", "step", "site", "look", "elapsed", "has_error", "has_more", *COUNTS)
_SUMMED += ("output_min", "output_max", "output1_min", "output1_max")


def _show_groups(run: Run, arguments: argparse.Namespace, names: NameFilter) -> None:
    found = _Groups(arguments, names)
    for rank in run.ranks if arguments.rank is None else (arguments.rank,):
        found.add(run.columns(rank))
    total, chosen, first, groups = found.total, found.chosen, found.first, found.groups
    names.check(_cell(run.path, _LONGEST))

    def row(key: tuple[Any, ...]) -> Row:
        made = groups[key].row(zip(arguments.by, key, strict=True))
        return made | {"share": made["seconds"] / chosen.seconds if chosen.seconds > 0 else None}

    keys = _sorted(groups, row, arguments.sort or "time", arguments.limit)
    shown = map(row, keys)
    if arguments.json:
        sums = {"calls": total.row(()), "chosen": chosen.row(()), "first_nonfinite": first.as_dict()}
        _write_json({"run": _about(run), **sums}, "rows", shown)
    elif arguments.csv:
        _write_csv(shown, [*arguments.by, *_Sum().row(()), "share"])
    else:
        for name, text in _overview(run, total):
            print(f"{name:9} {text}")
        if first.call is not None:
            print(f"nonfinite {first}")
        if chosen.calls != total.calls:
            print(f"{'chosen':9} {chosen}")
        if keys:
            print()
            values = any(info.tensors != "none" for info in run.infos.values())
            print(_group_table(list(shown), arguments.by, values=values))
        if len(keys) < len(groups):
            print(f"... and {len(groups) - len(keys)} more rows; --limit all shows them")


class _First:
    """The first call whose output has NaN or Inf; without one, the first call whose operands do."""

    def __init__(self) -> None:
        self.call: StoredCall | None = None
        self._made = False

    def add(self, call: StoredCall) -> None:
        if _finite(call):
            return
        made = any(is_output(role) and not values.finite for role, values in call.values.items())
        if self.call is None or (not made, call.place) < (not self._made, self.call.place):
            self.call, self._made = call, made

    def _counts(self, *, outputs: bool) -> list[str]:
        assert self.call is not None
        found = ((role, nonfinite(v)) for role, v in self.call.values.items() if is_output(role) is outputs)
        return [f"{role} ({counts})" for role, counts in found if counts][:16]

    def __str__(self) -> str:
        call = self.call
        assert call is not None
        record = call.record
        text = f"first in call {record.index}, step {record.step}, rank {call.rank}, {record.phase}: "
        text += f"{_name('op', record.op)} in {_name('module', record.module)}"
        text += f" at {_cell(record.source)}" if record.source is not None else ""
        outputs, operands = self._counts(outputs=True), self._counts(outputs=False)
        if outputs:
            text += f"; {', '.join(outputs)}"
        if operands:
            return f"{text}; already in {', '.join(operands)}"
        known = any(not is_output(role) for role in call.values)
        return f"{text}; its operands are {'finite' if known else 'not recorded'}"

    def as_dict(self) -> Row | None:
        if self.call is None:
            return None
        record = self.call.record
        row = {name: getattr(record, name) for name in ("index", "step", "phase", "module", "source", "op")}
        values = {
            role: {"nan": v.nan, "inf": v.inf, "count": v.count} for role, v in self.call.values.items() if not v.finite
        }
        return {"rank": self.call.rank, **row, "values": values}


def _key(record: CallRecord, rank: int, name: str) -> Any:
    if name == "rank":
        return rank
    if name == "shape":
        return _shape(record)
    if name == "dtype":
        return _dtype(record)
    value = getattr(record, name)
    return value[:_LONGEST] if isinstance(value, str) else value


def _first_output(call: StoredCall) -> Values | None:
    return next((values for role, values in call.values.items() if is_output(role)), None)


def _shape(record: CallRecord) -> str:
    if record.gemm is not None:
        return str(record.gemm)
    return "" if record.lhs is None else str(list(record.lhs.shape))[:_LONGEST]


def _dtype(record: CallRecord) -> str:
    return ", ".join(dict.fromkeys(t.dtype[:50] for t in (record.lhs, record.rhs) if t is not None))


def _sorted(keys: Iterable[Any], row: Callable[[Any], Row], sort: str, limit: int | None) -> list[Any]:
    """Return the first keys in the order of their rows, which are not kept; rows without a value come last."""
    by = {"time": "seconds", "rate": "flops_per_second"}.get(sort, sort)
    up = sort in ("min", "index", "module", "op")

    def place(key: Any) -> Any:
        made = row(key)
        value = made.get(by)
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return True, 0
        if by == "index":
            return False, (made["step"], value)
        return False, value[:_LONGEST] if isinstance(value, str) else value if up else -value

    return sorted(keys, key=place) if limit is None else heapq.nsmallest(limit, keys, key=place)


def _located(run: Run, arguments: argparse.Namespace, names: NameFilter) -> Iterator[tuple[int, int, StoredCall]]:
    """Yield rank, place and call of those that the filters admit; several processes are merged by step and index."""
    admits = _filter(arguments, names)

    def of(rank: int) -> Iterator[tuple[int, int, StoredCall]]:
        return ((rank, position, call) for position, call in run.located(rank) if admits(call))

    ranks = run.ranks if arguments.rank is None else (arguments.rank,)
    if len(ranks) > MAX_OPEN:
        return itertools.chain.from_iterable(map(of, ranks))
    return heapq.merge(*map(of, ranks), key=lambda entry: entry[2].place)


def _in_order(run: Run, arguments: argparse.Namespace, names: NameFilter) -> Iterator[StoredCall]:
    located = _located(run, arguments, names)
    if not arguments.sort:
        yield from (call for _, _, call in located)
        return
    calls: dict[tuple[int, int], Row] = {}  # only the current one

    def places() -> Iterator[tuple[int, int]]:
        for rank, position, call in located:
            calls.clear()
            calls[rank, position] = _call_row(call)
            yield rank, position

    chosen = _sorted(places(), lambda place: calls[place], arguments.sort, arguments.limit)
    with ExitStack() as files:
        readers: dict[int, Callable[[int], StoredCall]] = {}
        for rank, position in chosen:
            if rank not in readers:
                if len(readers) == MAX_OPEN:
                    files.close()
                    readers.clear()
                readers[rank] = files.enter_context(run.reader(rank))
            yield readers[rank](position)


def _show_calls(run: Run, arguments: argparse.Namespace, names: NameFilter) -> None:
    calls = _in_order(run, arguments, names)
    # Wait for the first call, or the end of the run, before printing anything.
    first = next(calls, None)
    if first is None:
        names.check(_cell(run.path, _LONGEST))
    calls = itertools.chain(() if first is None else (first,), calls)
    del first
    shown = itertools.islice(calls, arguments.limit)
    if arguments.json:
        _write_json({"run": _about(run)}, "calls", map(_call_json, shown))
    elif arguments.csv:
        _write_csv(map(_call_row, shown), _CALL_COLUMNS)
    else:
        while batch := list(itertools.islice(map(_call_row, shown), _BATCH)):
            print(_call_table(batch, ranks=len(run.ranks) > 1))
    more = next(calls, None) is not None
    if more and not (arguments.json or arguments.csv):
        print("... and more; --limit all shows them")
    if not more:  # the filters have seen every call
        names.check(_cell(run.path, _LONGEST))


def _write_json(head: Row, name: str, rows: Iterable[Row]) -> None:
    """Print the head, then the rows one by one: there may be many."""
    print(f'{json.dumps(finite_json(head), allow_nan=False)[:-1]},\n"{name}": [', end="")
    for number, row in enumerate(rows):
        print(",\n" if number else "\n", end="")
        print(json.dumps(finite_json(row), allow_nan=False), end="")
    print("\n]}")


def _call_row(call: StoredCall) -> Row:
    record, output = call.record, _first_output(call)
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
    "rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds",
    "flops_per_second", "forward", "grad_of", "nonfinite", "hash", "nan", "inf", "min", "max", "mean", "rms", "error",
)  # fmt: skip


def _call_json(call: StoredCall) -> Row:
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}


def _about(run: Run) -> Row:
    return {"path": str(run.path), "ranks": {str(rank): info.as_dict() for rank, info in run.infos.items()}}


def _write_csv(rows: Iterable[Row], columns: Iterable[str]) -> None:
    columns = tuple(columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(csv_cell(row[name]) for name in columns)


def _overview(run: Run, total: _Sum) -> Iterator[tuple[str, str]]:
    infos = list(run.infos.values())
    info = infos[0]
    unfinished = [rank for rank, info in run.infos.items() if not info.finished]
    state = "finished"
    if unfinished:
        which = f" (ranks {listed(unfinished)})" if len(infos) > 1 else ""
        state = f"not finished{which}: still running, or killed"
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
    return fitted(table, left=len(keys), last=["module"], spare=["max", "min", "GFLOP/s", "MFLOP"])


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
    return fitted(table, left=len(names), last=["module"], spare=["mean", "max", "min", "dtype", "MFLOP"])


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
