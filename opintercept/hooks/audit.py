"""`Audit`: says which share of a program's time lies inside the calls that a block sees, and names the rest.

Others measure, torch's profiler and Python's; the hook puts a mark around each call that it sees.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count
from opintercept._core.record import PendingRecord
from opintercept._core.tables import Cells, Part, Table
from opintercept._core.text import counted, duration, number
from opintercept._engines.profiled.profiler import Profiler
from opintercept._engines.profiled.records import Ran
from opintercept._kit.copyable import Copyable
from opintercept._kit.per_call import PerCall


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What ran outside of the calls that were seen.

    Attributes:
        name: The kernel, the operator, or the function in C.
        kind: `"kernel"` or `"copy"` on a device; `"operator"` or `"function"` on the CPU.
        within: The operator or function that launched a kernel, which was not seen either; empty if there is none.
        launches: How often it ran.
        seconds: Its time: that of a kernel, or what the host spent in the operator or function itself.
    """

    name: str
    kind: str
    within: str
    launches: int
    seconds: float


class Audit(Copyable, Table):
    """Says which share of the time in kernels lies inside calls that the block sees, and lists the rest by name.

    It runs torch's profiler beside the block. On a GPU it adds up kernels and copies, by what launched them. If none
    ran there, it adds up operators on the CPU, and functions in C of extensions that were built with torch. An
    operator that torch takes apart is counted by its parts. What torch.compile does to compile is left out, and the
    collector of garbage. Give it a block without other hooks, and `ops="all"` unless the question is another one.

    Args:
        steps: The steps to look at, counted from the first one in the block; all of them if left out.
        max_calls: After how many calls to look no further: a profile takes about a kilobyte for each.
        threads: As of `intercept`.

    Raises:
        ValueError: `threads` is unknown, or `max_calls` is below 1.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> audit = hooks.Audit()
        >>> with intercept(audit):
        ...     x = torch.ones(64, 64)
        ...     _ = (x @ x).cumsum(0)
        >>> [(row.name, row.kind, row.launches) for row in audit.rows() if "sum" in row.name]
        [('aten::cumsum', 'operator', 1)]
        >>> 0 < audit.share < 1
        True
    """

    reads = ()
    fresh: ClassVar = {"_lock": threading.RLock, "_marks": PerCall, "_profiler": lambda: None}
    _row = AuditRow

    def __init__(
        self,
        *,
        steps: int | Container[int] | None = None,
        max_calls: int = 20_000,
        threads: Literal["current", "all"] = "current",
    ) -> None:
        check_choice("threads", threads, get_args(Literal["current", "all"]))
        check_count("max_calls", max_calls)
        self._steps: Container[int] | None = (steps,) if isinstance(steps, int) else steps
        self._max_calls = max_calls
        self._everywhere = threads == "all"
        self._lock = threading.RLock()
        self._marks: PerCall[Any] = PerCall()
        self._profiler: Profiler | None = None
        self._step = self._calls = self._replayed = self._compiling = 0
        self._on_host, self._on_devices = Ran(), Ran()
        self._functions = True

    def enter(self) -> None:
        """Begin, if the first step is one to look at."""
        self._step = 0
        self._turn()

    def end_step(self) -> None:
        """Begin or end with a step."""
        self._step += 1
        self._turn()

    def exit(self) -> None:
        """End."""
        self._stop()

    def pre(self, call: OpCall) -> None:
        """Begin a mark."""
        profiler = self._profiler
        if profiler is not None:
            mark = profiler.mark(call.op)
            self._marks.put(call, mark)
            mark.__enter__()

    def post(self, call: OpCall) -> None:
        """End the mark."""
        self._end(call)

    def error(self, call: OpCall, exception: BaseException) -> None:
        """End the mark of a call that raised."""
        self._end(call)

    def replayed(self, note: PendingRecord, values: Any) -> None:
        """Count a call of a CUDA graph."""
        self._replayed += self._profiler is not None

    def _end(self, call: OpCall) -> None:
        mark = self._marks.take(call)
        if mark is None:
            return
        mark.__exit__(None, None, None)
        with self._lock:
            self._calls += 1
        if self._calls >= self._max_calls:
            self._turn()

    def _turn(self) -> None:
        """Look, or look no further."""
        wanted = self._calls < self._max_calls and (self._steps is None or self._step in self._steps)
        if not wanted:
            self._stop()
        elif self._profiler is None:
            profiler = Profiler(self._everywhere)
            self._functions &= profiler.start()
            self._profiler = profiler

    def _stop(self) -> None:
        profiler = self._profiler
        if profiler is None or profiler.thread != threading.get_ident():  # torch ends it in the thread that began it
            return
        self._profiler = None
        on_host, on_devices, compiling = profiler.stop(self._replayed > 0)
        self._on_host.join(on_host)
        self._on_devices.join(on_devices)
        self._compiling += compiling

    @property
    def _ran(self) -> Ran:
        return self._on_devices if self._on_devices.total else self._on_host

    @property
    def calls(self) -> int:
        """How many calls were seen."""
        return self._calls

    @property
    def seconds(self) -> float:
        """The whole time in kernels, or in operators of the CPU."""
        return self._ran.total / 1e9

    @property
    def share(self) -> float | None:
        """Which part of it lies inside calls that were seen, from 0 to 1; None if nothing ran.

        Kernels of a CUDA graph that was captured in the block belong to it.
        """
        ran = self._ran
        return (ran.seen + ran.replayed) / ran.total if ran.total else None

    def rows(self) -> list[AuditRow]:
        """What ran outside, longest first."""
        rest = self._ran.rest.items()
        rows = [AuditRow(*key, launches, nanoseconds / 1e9) for key, (launches, nanoseconds) in rest]
        return sorted(rows, key=lambda row: -row.seconds)

    def _held(self) -> str:
        return counted(self._calls, "call")

    def parts(self) -> list[Part]:
        """A sentence, and the table of what ran outside."""
        ran, share = self._ran, self.share
        if share is None:
            return [f"nothing ran in a kernel or an operator, and {counted(self._calls, 'call')} were seen"]
        where = "in kernels of devices" if ran is self._on_devices else "in operators on the CPU"
        text = f"{share:.1%} of {duration(ran.total / 1e9)} {where} lies inside {counted(self._calls, 'seen call')}"
        if ran.replayed:
            text += f", {ran.replayed / ran.total:.1%} in CUDA graphs that were seen captured"
        notes = [] if self._functions else ["Python's profile function was in use: functions in C were not looked at"]
        if self._compiling:
            notes.append(f"left out: {duration(self._compiling / 1e9)} in which torch.compile compiled")
        if self._calls >= self._max_calls:
            notes.append(f"looked at the first {counted(self._calls, 'call')} only")
        return [text, *([self._cells()] if ran.rest else []), *notes]

    def _cells(self) -> Cells:
        total = self.seconds or 1.0
        cells = [
            [row.name, row.kind, row.within, str(row.launches), number(row.seconds, 1e-3), f"{row.seconds / total:.1%}"]
            for row in self.rows()
        ]
        return Cells(["not seen", "kind", "within", "launches", "ms", "share"], cells, left=3, shares=("share",))
