"""`Log`: logs calls with the `logging` module."""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_choice, check_count
from opintercept._core.tables import Held
from opintercept._values.read import first_output, sample
from opintercept._values.sums import summarize

Values = Literal["none", "stats", "sample"]

_FIGURES = ("min", "max", "mean", "std", "nonfinite")


class Log(Held):
    """Logs every call. The log record holds the `CallRecord` in `record.call` and the values in `record.values`.

    Both are plain data. A `logging.handlers.QueueHandler` can hand them to another thread or process, so that a
    slow file does not hold up the program.

    Args:
        logger: A logger or its name.
        level: The level to log at. If the logger would drop the message, the call costs next to nothing.
        values: `"none"` logs shapes only, `"stats"` adds the range and moments of the output, and `"sample"` adds
            `size` random values of it. The last two read the values and so wait for the device.
        size: How many values a sample has.
        seed: Seeds the sample's own generator. Log never draws from torch's global one.

    Raises:
        TypeError: `logger` is neither a logger nor a name, or `level` is not a number.
        ValueError: `values` is unknown, or `size` is below 1.
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
            raise TypeError(f"level must be a number such as logging.INFO, got {level!r}")
        if not isinstance(logger, (logging.Logger, str)):
            raise TypeError(f"logger must be a logging.Logger or its name, got {logger!r}")
        self.logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self.level = level
        self.values = values
        self.size = size
        self._generator = torch.Generator().manual_seed(seed)

    def _held(self) -> str:
        return f"{self.logger.name!r}, values={self.values!r}"

    def post(self, call: OpCall) -> None:
        """Log the call."""
        if not self.logger.isEnabledFor(self.level):
            return
        output = first_output(call.output)
        read: dict[str, float] | list[float] | None = None
        shown = ""
        if self.values == "stats" and (summary := summarize(output)) is not None:
            read, shown = {name: getattr(summary, name) for name in _FIGURES}, f" | {summary}"
        elif self.values == "sample":
            read = sample(output, self.size, self._generator)
            shown = f" | sample {' '.join(f'{value:.3g}' for value in read)}"
        record = call.record()
        self.logger.log(
            self.level, "%d %s %s%s", call.index, call.phase, record, shown, extra={"call": record, "values": read}
        )
