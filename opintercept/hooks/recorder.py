"""`Recorder`: keeps a summary of every call, and no tensor."""

from __future__ import annotations

from collections import deque

from opintercept._call import OpCall
from opintercept._record import CallRecord, Note


class Recorder:
    """Keeps `call.record()` of every call in `records`, in the order in which the calls ended.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> recorder = hooks.Recorder()
        >>> with intercept(recorder):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        >>> [(record.op, record.flops) for record in recorder.records]
        [('aten::mm', 48)]
    """

    reads = ("record",)

    def __init__(self) -> None:
        self._records: list[CallRecord] = []
        self._notes: deque[Note] = deque()

    def post(self, call: OpCall) -> None:
        """Keep what the call's record needs."""
        self._notes.append(call.note())

    @property
    def records(self) -> list[CallRecord]:
        """The records so far; a list to read, sort and clear as any other."""
        while True:
            try:
                note = self._notes.popleft()
            except IndexError:  # none is left, or another thread has taken it
                return self._records
            try:
                record = note.record()
            except BaseException:
                self._notes.appendleft(note)
                raise
            self._records.append(record)
