"""`Scalars`: statistics of every step as curves in TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opintercept._call import OpCall
from opintercept._checks import check_count
from opintercept._errors import OpInterceptError
from opintercept.hooks.stats import Stats, StatsRow

_VALUES = tuple(name for name in StatsRow.__slots__ if name not in ("module", "op", "operand", "phase"))


class Scalars:
    """Writes statistics of each step under `module/op/operand/phase/value`, `encoder.0/mm/output/forward/std`.

    The module is `-` outside of all and `unknown` where it cannot be told: MLflow takes no `?` in a name.
    A step ends when the interceptor's `step()` has been called and the next call comes, and when the block is left.
    What is behind `writer` is told by what it can do: `add_scalar(tag, value, step)` as of TensorBoard's
    `SummaryWriter`, `log(dict, step=)` as of a run of W&B, `log_metrics(dict, step=)` as of `mlflow`.

    Args:
        writer: Where to; stays open.
        of: As of `Stats`, which does the work.
        values: Any of the numbers of a `StatsRow`.
        for_dtype: As of `Stats`; the values `"underflow"` and `"overflow"` need it.
        every: Write once in so many steps, for all that came in them.

    Raises:
        TypeError: The writer can do none of that, or `for_dtype` is none.
        ValueError: An unknown operand or value, or `every` below 1.
        OpInterceptError: On writing, if the writer has been closed.

    Example:
        >>> import torch
        >>> from opintercept import hooks, intercept
        >>> class Run:
        ...     def log(self, values, step):
        ...         print(step, values)
        >>> with intercept(hooks.Scalars(Run(), values=["mean"])) as interceptor:
        ...     for scale in (1, 2):
        ...         _ = torch.ones(2, 2) @ torch.ones(2, 2) * scale
        ...         interceptor.step()
        0 {'-/mm/output/forward/mean': 2.0}
        1 {'-/mm/output/forward/mean': 2.0}
    """

    reads = ("module",)

    def __init__(
        self,
        writer: Any,
        of: str | Iterable[str] = ("output",),
        values: Iterable[str] = ("mean", "std", "absmax"),
        *,
        for_dtype: torch.dtype | None = None,
        every: int = 1,
    ) -> None:
        check_count("every", every)
        self._values = tuple(values)
        if isinstance(values, str) or not self._values or any(value not in _VALUES for value in self._values):
            raise ValueError(f"values must be some of {', '.join(_VALUES)}, got {values!r}")
        if for_dtype is None and not {"underflow", "overflow"}.isdisjoint(self._values):
            raise ValueError(f"underflow and overflow need for_dtype, got values={self._values!r} without it")
        self._writer = writer
        self._write = _method(writer)
        self._every = every
        self._stats = Stats(of, for_dtype=for_dtype)
        self._first: int | None = None  # step of what has not been written
        self._last = 0
        self._lock = threading.RLock()  # the writer may multiply, and so come back
        if hasattr(self._stats, "pre"):
            self.pre = self._pre

    def _pre(self, call: OpCall) -> None:
        self._turn(call.step)
        self._stats.pre(call)

    def post(self, call: OpCall) -> None:
        """Add the call, after writing what is due."""
        self._turn(call.step)
        self._stats.post(call)

    def _turn(self, step: int) -> None:
        with self._lock:
            if self._first is None:
                self._first = step
            elif step - self._first >= self._every:
                rows, last, self._first = self._ended(), self._last, step
                self._send(rows, last)
            self._last = step

    def exit(self) -> None:
        """Write what is left."""
        with self._lock:
            if self._first is not None:
                rows, last, self._first = self._ended(), self._last, None
                self._send(rows, last)

    def _ended(self) -> list[StatsRow]:
        # A closed SummaryWriter would open another file without a word.
        if getattr(self._writer, "all_writers", self) is None:
            raise OpInterceptError(f"the writer of Scalars must be open, got {self._writer!r} closed; close it later")
        return self._stats.step()

    def _send(self, rows: list[StatsRow], step: int) -> None:
        found = {}
        for row in rows:
            module = "unknown" if row.module is None else row.module or "-"
            head = f"{module}/{row.op.removeprefix('aten::')}"
            for value in self._values:
                number = getattr(row, value)
                if number is not None:
                    found[f"{head}/{row.operand}/{row.phase}/{value}"] = number
        if found:
            self._write(found, step)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"Scalars cannot be copied or pickled, since its writer {self._writer!r} stays open; "
            "make another one with a writer of its own"
        )


def _method(writer: Any) -> Callable[[dict[str, float], int], None]:
    if callable(add_scalar := getattr(writer, "add_scalar", None)):

        def write(values: dict[str, float], step: int) -> None:
            for tag, value in values.items():
                add_scalar(tag, value, step)

        return write
    for name in ("log_metrics", "log"):
        if callable(log := getattr(writer, name, None)):
            return lambda values, step: log(values, step=step)
    raise TypeError(f"a writer must have add_scalar, log or log_metrics, got {writer!r}")
