"""`Print`: one readable line a call."""

from __future__ import annotations

import sys
from typing import TextIO

from opintercept._call import OpCall
from opintercept._text import printable
from opintercept.hooks._values import first_output, summarize


class Print:
    """Prints a line for every call: number, pass, operator, shapes, module, and the output's range and moments.

    Reads the values, and so waits for the device at each call: for looking, not for leaving on.

    Args:
        file: Where to; standard output as it is when the line is printed, if None.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> with intercept(hooks.Print()):
        ...     _ = torch.ones(2, 3) @ torch.ones(3, 4)
        0 forward aten::mm float32[2, 3] @ float32[3, 4] -> float32[2, 4] | min 3 max 3 mean 3 std 0
    """

    reads = ("module", "record")

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def post(self, call: OpCall) -> None:
        """Print the line."""
        summary = summarize(first_output(call.output))
        values = f" | {summary}" if summary is not None else ""
        module = f" in {printable(call.module, 200)}" if call.module else ""
        line = f"{call.index} {call.phase} {call.record()}{module}{values}\n"
        # In one piece, so that an interrupt, or another thread, leaves no half line.
        print(line, end="", file=sys.stdout if self.file is None else self.file)
