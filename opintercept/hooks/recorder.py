"""`Recorder`: keeps a summary of every call, and no tensor."""

from __future__ import annotations

from opintercept._call import CallRecord, OpCall


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

    Attributes:
        records: The records; a list to read, sort and clear as any other.
    """

    def __init__(self) -> None:
        self.records: list[CallRecord] = []

    def post(self, call: OpCall) -> None:
        """Keep the call's record."""
        self.records.append(call.record())
