"""`Recorder`: keeps a summary of every call and no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from opintercept._core.call import OpCall
from opintercept._core.in_kernel import Chunk, Found, Work
from opintercept._core.pipeline import flush
from opintercept._core.record import CallRecord, PendingRecord
from opintercept._core.tables import Frames, Held
from opintercept._core.text import counted


class Recorder(Held, Frames):
    """Keeps the `call.record()` of every call in `records`, in the order in which the calls ended.

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
        self._notes: deque[PendingRecord | tuple[Chunk, int]] = deque()  # or a number of a chunk's first row

    def post(self, call: OpCall) -> None:
        """Note what the call's record needs; `records` builds it later."""
        self._notes.append(call.note())

    def work(self) -> Work:
        """A row is all that a record takes."""
        return Work(keeps=True)

    def learn(self, call: OpCall) -> bool:
        """There is nothing to learn."""
        return True

    def noted(self, note: PendingRecord, values: Mapping[str, Found], learned: bool) -> None:
        """Keep the note of a call that a kernel has noted."""
        self._notes.append(note)

    def keep(self, calls: Chunk, number: int) -> None:
        """Keep calls that kernels have noted."""
        self._notes.append((calls, 0))

    def replayed(self, note: PendingRecord, values: Sequence[Any]) -> None:
        """Keep the note of a call that a CUDA graph repeats."""
        self._notes.append(note)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_records": list(self.records), "_notes": deque()}

    def _held(self) -> str:
        noted = sum(1 if isinstance(n, PendingRecord) else n[0].size() - n[1] for n in tuple(self._notes))
        return counted(len(self._records) + noted, "record")

    def _columns(self) -> dict[str, list[Any]]:
        records = self.records
        names = [field.name for field in fields(CallRecord)]
        return {name: [_plain(getattr(record, name)) for record in records] for name in names}

    @property
    def records(self) -> list[CallRecord]:
        """The records so far, in a list that you may sort and clear."""
        flush()
        while True:
            try:
                note = self._notes.popleft()
            except IndexError:  # no note is left, or another thread took the last one
                return self._records
            if not isinstance(note, PendingRecord):
                chunk, number = note
                if number + 1 < chunk.size():
                    self._notes.appendleft((chunk, number + 1))
                note = PendingRecord(*chunk.row(number)[0])
            self._records.append(note.record())


def _plain(value: Any) -> Any:
    """What a column of a data frame holds of a field: tensors and tuples as text."""
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)
