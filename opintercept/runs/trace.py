"""`trace`: writes a run as a trace in Chrome's JSON format, which Perfetto and chrome://tracing show.

Invariant: in each thread, two slices lie one in the other or beside each other; viewers refuse all else.
Needs numpy. Must not import torch.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from opintercept._core.errors import OpInterceptError
from opintercept._values.stats import Values
from opintercept.runs.program.names import module_name
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import CHUNK, Array, Columns, in_steps
from opintercept.runs.store.files import replaced
from opintercept.runs.store.run import Run
from opintercept.runs.store.texts import compact

_PLACES = ("step", "index", "thread", "started", "elapsed", "forward", "site")
_LONGEST = 10**15  # nanoseconds of a call, in a hostile run

Event = dict[str, Any]


def write(
    path: str | os.PathLike[str], run: Run, *, steps: range | None = None, profile: str | os.PathLike[str] | None = None
) -> int:
    """Write a run as a trace. If that fails, `path` stays as it was.

    Each rank is a process and each thread a track, on which calls lie in slices of their modules, phase and step.
    Arrows lead from forward calls to their backward calls. Times are those of the host: on a device, an operator only
    queues its work.

    Args:
        path: The trace; it is compressed if the name ends with `.gz`.
        run: The run.
        steps: Which steps to write; all by default. A call takes about 800 bytes, and 100 if compressed.
        profile: A trace that `torch.profiler` has exported from the same program, to which the run is added.

    Returns:
        How many calls were written.

    Raises:
        OpInterceptError: The calls of the run have no times, `profile` is not a trace, or the file cannot be written.
        ImportError: numpy is not installed.

    Example:
        >>> import json, tempfile, torch
        >>> from opintercept import intercept, runs
        >>> from opintercept.runs import trace
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with intercept(runs.RunRecorder(f"{folder}/run")):
        ...         _ = torch.nn.Sequential(torch.nn.Linear(3, 2))(torch.zeros(4, 3))
        ...     trace.write(f"{folder}/trace.json", runs.open_run(f"{folder}/run"))
        ...     with open(f"{folder}/trace.json") as file:
        ...         [event["name"] for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
        1
        ['step 0', 'forward', '0', 'aten::addmm']
    """
    whole = {} if profile is None else _profile(Path(profile))
    events = whole.pop("traceEvents", [])
    base = whole.get("baseTimeNanoseconds", 0) if profile is not None else _first_start(run, steps)
    pids = [event["pid"] for event in events if isinstance(event, dict) and isinstance(event.get("pid"), int)]
    first = max(pids, default=0) + 1
    with replaced(path, "the trace") as partial, _opened(partial, os.fspath(path).endswith(".gz")) as file:
        file.write(f'{compact(whole | {"displayTimeUnit": "ns", "baseTimeNanoseconds": base})[:-1]},"traceEvents":[\n')
        calls, before = 0, ""
        for event in events:
            file.write(f"{before}{compact(event)}")
            before = ",\n"
        for pid, rank in enumerate(run.ranks, first):
            process = _Process(rank, run.columns(rank), steps)  # one at a time, since they may be large
            calls += len(process.numbers)
            for event in process.events(pid, base, run):
                file.write(f"{before}{compact(event)}")
                before = ",\n"
        file.write("\n]}\n")
    return calls


def _opened(path: str, compressed: bool) -> TextIO:
    if compressed:
        return gzip.open(path, "wt", compresslevel=6, encoding="ascii")
    return open(path, "w", encoding="ascii")  # noqa: SIM115  the caller closes it


def _profile(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        found = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        if isinstance(found["traceEvents"], list) and isinstance(found.get("baseTimeNanoseconds", 0), int):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    raise OpInterceptError(
        f"{str(path)!r} must be a trace in JSON; write one with prof.export_chrome_trace(...) of torch.profiler"
    )


def _first_start(run: Run, steps: range | None) -> int:
    processes = map(run.columns, run.ranks)
    chunks = (chunk for each in processes for _, chunk in each.chunks(("step", "started"), steps=steps))
    times = (chunk["started"][in_steps(chunk["step"], steps)] for chunk in chunks)
    return min((int(each.min()) for each in times if len(each)), default=0)


class _Slice(NamedTuple):
    """A step, a phase or a module on the track of a thread."""

    thread: int
    name: str
    whole: str | None  # the module's whole name
    start: int
    end: int


class _Process:
    """The calls of a process, thread by thread and by the time at which they started."""

    def __init__(self, rank: int, columns: Columns, steps: range | None) -> None:
        self._rank, self._columns = rank, columns
        read = columns.read(_PLACES, 0, len(columns))
        numbers = np.flatnonzero(in_steps(read["step"], steps))
        starts, threads = read["started"][numbers], read["thread"][numbers]
        if (starts < 0).any():
            raise OpInterceptError("the calls of the run have no times; record it again with this version")
        length = np.nan_to_num(read["elapsed"][numbers].astype(np.float64) * 1e9)
        ends = starts + np.clip(length, 0, _LONGEST).astype(np.int64)
        order = np.lexsort((-ends, starts, threads))
        self.numbers = numbers[order]
        self._read = {name: column[self.numbers] for name, column in read.items()}
        self.threads = self._read["thread"]
        self.starts, self.ends = _apart(self.threads, starts[order], ends[order])

    def events(self, pid: int, base: int, run: Run) -> Iterator[Event]:
        """The events of the process. Slices come before those that lie in them."""
        info = run.infos[self._rank]
        name = f"opintercept {run.title(self._rank)}: {' '.join(info.argv)}"[:200]
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for thread in np.unique(self.threads).tolist():
            yield {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": f"thread {thread}"}}

        def slice_at(at: tuple[int, int, int], name: str, cat: str, args: dict[str, Any]) -> Event:
            thread, start, end = at
            times = {"ts": (start - base) / 1000, "dur": (end - start) / 1000}  # microseconds
            return {"ph": "X", "pid": pid, "tid": thread, "name": name, "cat": cat, **times, "args": args}

        for each in self._slices():
            known = {"module": each.whole} if each.whole else {}
            yield slice_at((each.thread, each.start, each.end), each.name, "module" if known else "step", known)
        places = zip(self.threads.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)
        for call, at in zip(self._calls(), places, strict=True):
            yield slice_at(at, call.record.op, call.record.phase, _arguments(call))
        yield from self._arrows(pid, base)

    def _calls(self) -> Iterator[StoredCall]:
        for start in range(0, len(self.numbers), CHUNK):
            yield from self._columns.calls_at(self.numbers[start : start + CHUNK], given=False)

    def _slices(self) -> Iterable[_Slice]:
        """Steps, phases and modules, each from its first call to the last before one of another."""
        made: list[_Slice] = []
        opened: list[int] = []  # places in `made`
        path: tuple[str, ...] = ()
        paths: dict[int, tuple[str, ...]] = {}
        last, last_thread = 0, None
        columns = (
            each.tolist() for each in (self.threads, self.starts, self.ends, self._read["step"], self._read["site"])
        )
        for thread, start, end, step, call_site in zip(*columns, strict=True):
            if thread == last_thread and start < last:
                continue  # inside another call
            if call_site not in paths:
                found = self._columns.call_site(call_site)
                module = module_name(found.module)
                paths[call_site] = (found.phase, *(module.split(".") if module else ()))
            now = (f"step {step}", *paths[call_site])
            same = 0
            if thread == last_thread:
                same = next((n for n, pair in enumerate(zip(path, now, strict=False)) if pair[0] != pair[1]), len(now))
                same = min(same, len(path))
            for place in opened[same:]:
                made[place] = made[place]._replace(end=last)
            del opened[same:]
            for depth in range(same, len(now)):
                opened.append(len(made))
                whole = ".".join(now[2 : depth + 1]) or None
                made.append(_Slice(thread, now[depth], whole, start, end))
            path, last, last_thread = now, end, thread
        for place in opened:
            made[place] = made[place]._replace(end=last)
        return made

    def _arrows(self, pid: int, base: int) -> Iterator[Event]:
        """From each forward call to its backward calls; an arrow holds on to the slice around its point."""
        middles = self.starts + (self.ends - self.starts) // 2
        index, forward = (self._read[name].tolist() for name in ("index", "forward"))
        places = {each: place for place, each in reversed([*enumerate(index)])}
        for number, of in enumerate(forward):
            if of in places:  # it is a backward call, and the other is of a step that was chosen
                name = {"pid": pid, "name": "backward", "cat": "backward", "id": f"{pid}.{index[number]}"}
                for mark, at in (({"ph": "s"}, places[of]), ({"ph": "f", "bp": "e"}, number)):
                    yield mark | name | {"tid": int(self.threads[at]), "ts": (int(middles[at]) - base) / 1000}


def _apart(threads: Array, starts: Array, ends: Array) -> tuple[Array, Array]:
    """Trim times that overlap in part, as they may, since two clocks measure start and duration."""
    new_starts, new_ends = [], []
    opened: list[int] = []
    last_thread = None
    for thread, start, end in zip(threads.tolist(), starts.tolist(), ends.tolist(), strict=True):
        if thread != last_thread:
            opened, last_thread = [], thread
        while opened and (opened[-1] <= start or opened[-1] < end):
            start = max(start, opened.pop())
        end = max(start, end)
        opened.append(end)
        new_starts.append(start)
        new_ends.append(end)
    return np.array(new_starts, np.int64), np.array(new_ends, np.int64)


def _arguments(call: StoredCall) -> dict[str, Any]:
    record = call.record
    found: dict[str, Any] = {"module": module_name(record.module), "source": record.source}
    found |= {"index": record.index, "step": record.step, "forward": record.forward, "grad_of": record.grad_of}
    found |= {role: str(meta) for role in ("lhs", "rhs", "bias") if (meta := getattr(record, role)) is not None}
    found["output"] = ", ".join(str(meta) for meta in record.outputs if meta is not None) or None
    found["product"] = None if record.gemm is None else str(record.gemm)
    found |= {"autocast": record.autocast, "FLOP": record.flops, "bytes": record.bytes, "error": call.error}
    if record.flops and record.elapsed and math.isfinite(rate := record.flops / record.elapsed / 1e9):
        found["GFLOP/s"] = round(rate, 3)
    found |= {f"{role} values": _figures(values) for role, values in call.values.items() if is_output(role)}
    return {name: value for name, value in found.items() if value is not None}


def _figures(values: Values) -> str:
    known = {name: getattr(values, name) for name in ("min", "max", "mean", "rms")}
    text = " ".join(f"{name} {value:.4g}" for name, value in known.items() if value is not None)
    bad = " ".join(f"{name} {count}" for name, count in (("nan", values.nan), ("inf", values.inf)) if count)
    return f"{text} {bad}".strip()
