"""`Print`: prints one line for each call."""

from __future__ import annotations

import sys
from typing import TextIO

from opintercept._core.call import OpCall
from opintercept._core.tables import Held
from opintercept._core.text import printable
from opintercept._values.read import first_output
from opintercept._values.sums import summarize


class Print(Held):
    """Prints one line for each call: index, phase, operator, shapes, module, and the output's range and moments.

    Of a copy between devices, the line says from where it comes.

    Print reads the values and so waits for the device at every call. Use it to look around, not in production.

    Args:
        file: Where to print; None means whatever `sys.stdout` is at the time.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> with intercept(hooks.Print()):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        0 forward aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4] | min 3 max 3 mean 3 std 0
    """

    reads = ("record",)

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def post(self, call: OpCall) -> None:
        """Print the line."""
        output = first_output(call.output)
        summary = summarize(output)
        values = f" | {summary}" if summary is not None else ""
        record = call.record()
        module = f" in {printable(record.module, 200)}" if record.module else ""
        there = [t.device for t in call.tensors.values() if t.device != output.device] if _copies(call) else []
        source = f" from {there[0]}" if there else ""
        line = f"{call.index} {call.phase} {record}{source}{module}{values}\n"
        # One write, so that neither an interrupt nor another thread can split the line.
        print(line, end="", file=sys.stdout if self.file is None else self.file)


def _copies(call: OpCall) -> bool:
    return call.op in ("aten::copy_", "aten::_to_copy")
