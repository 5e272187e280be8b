"""`Log`: calls as records of the `logging` module."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch

from opintercept._call import OpCall
from opintercept._checks import check_choice, check_count
from opintercept.hooks._values import first_output, sample, summarize

Values = Literal["none", "stats", "sample"]


class Log:
    """Logs every call. The log record has the `CallRecord` as `record.call` and the values as `record.values`.

    Both are plain data, so a `logging.handlers.QueueHandler` can hand them to another thread or process,
    and a slow file does not hold up the program.

    Args:
        logger: The logger or its name.
        level: The level to log at; a call that the logger would drop costs next to nothing.
        values: `"none"`: shapes only. `"stats"`: range and moments of the output. `"sample"`: `size` random
            values of it. The last two read the values, and so wait for the device.
        size: How many values a sample has.
        seed: Seeds the sample's own generator; torch's global one is never drawn from.

    Raises:
        TypeError: A logger or a level of another type.
        ValueError: An unknown `values`, or a size below 1.
    """

    reads = ("record",)

    def __init__(
        self,
        logger: logging.Logger | str = "opintercept",
        *,
        level: int = logging.INFO,
        values: Values = "none",
        size: int = 8,
        seed: int = 0,
    ) -> None:
        check_choice("values", values, get_args(Values))
        check_count("size", size)
        if not isinstance(level, int):
            raise TypeError(f"level must be a number, logging.INFO say, got {level!r}")
        if not isinstance(logger, (logging.Logger, str)):
            raise TypeError(f"logger must be a logging.Logger or its name, got {logger!r}")
        self.logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self.level = level
        self.values = values
        self.size = size
        self._generator = torch.Generator().manual_seed(seed)

    def post(self, call: OpCall) -> None:
        """Log the call."""
        if not self.logger.isEnabledFor(self.level):
            return
        output = first_output(call.output)
        read: dict[str, float] | list[float] | None = None
        shown = ""
        if self.values == "stats" and (summary := summarize(output)) is not None:
            read, shown = summary._asdict(), f" | {summary}"
        elif self.values == "sample":
            read = sample(output, self.size, self._generator)
            shown = f" | sample {' '.join(f'{value:.3g}' for value in read)}"
        record = call.record()
        self.logger.log(
            self.level,
            "%d %s %s%s",
            call.index,
            call.phase,
            record,
            shown,
            extra={"call": record, "values": read},
        )
