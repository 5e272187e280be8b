"""`Tally`: counts the calls of `opintercept run`, and shows the counts on a terminal while the program runs.

Must not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from opintercept._core.in_kernel import CallKind, Chunk, Work
from opintercept._core.text import amount, counted
from opintercept.cli.terminal.progress import EVERY, StatusLine

if TYPE_CHECKING:
    from opintercept._core.call import OpCall
    from opintercept._core.record import PendingRecord


class Tally:
    """Counts calls, and shows the counts on a terminal while the program runs."""

    reads = ()

    def __init__(self, nonfinite: Any, stderr: TextIO, visible: bool) -> None:
        self.calls = 0
        self.failed = 0
        self.flops = 0
        self.seconds = 0.0
        self._lock = threading.RLock()
        self.first: Callable[[], None] | None = None  # is called once, at the first call
        self._nonfinite = nonfinite
        self.line = StatusLine(stderr, EVERY, visible)

    def post(self, call: OpCall) -> None:
        """Count the call."""
        self._add(self.learn(call), call.elapsed)

    def work(self) -> Work:
        """Kernels note the calls."""
        return Work(keeps=True)

    def learn(self, call: OpCall) -> int:
        """The floating-point operations of all calls that look like this one."""
        first, self.first = self.first, None
        if first is not None:
            first()
        return call.summary.flops or 0

    def noted(self, note: PendingRecord, values: Any, learned: int) -> None:
        """Count a call that a kernel has noted."""
        self._add(learned, note.elapsed)

    def keep(self, calls: Chunk, number: int) -> None:
        """Count calls that kernels have noted."""
        for kind in map(CallKind._make, calls.kinds(number)):
            self._add(kind.learned, kind.elapsed, kind.calls)

    def _add(self, flops: int, seconds: float | None, calls: int = 1) -> None:
        with self._lock:
            self.calls += calls
            self.flops += flops * calls
            self.seconds += seconds or 0.0
        self.line.show(lambda: f"opintercept: {self}")

    def error(self, call: OpCall, exception: BaseException) -> None:
        """Count a call that raised."""
        self.learn(call)
        with self._lock:
            self.failed += 1

    def __str__(self) -> str:
        text = f"{counted(self.calls, 'call')}, {amount(self.flops, 'FLOP')}"
        if self.failed:
            text += f", {self.failed:,} raised"
        return text if self._nonfinite is None else f"{text}, {self.not_finite:,} not finite"

    @property
    def not_finite(self) -> int:
        """How many calls had NaN or infinities, as far as these are searched for."""
        search = self._nonfinite
        return 0 if search is None else len(search.findings) + search.passed_on + search.discarded
