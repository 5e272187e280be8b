"""`Scalars`: writes the statistics of each step to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from opintercept._core.call import OpCall
from opintercept._core.checks import check_count, renamed
from opintercept._core.errors import OpInterceptError
from opintercept._core.tables import Held
from opintercept.hooks.stats import Stats, StatsRow

_VALUES = tuple(name for name in StatsRow.__slots__ if name not in ("module", "op", "operand", "phase"))


class Scalars(Held):
    """Writes the statistics of each step under names such as `encoder.0/mm/output/forward/std`.

    A name is `module/op/operand/phase/value`. The module is `-` for calls outside all modules and `unknown` if it is
    not known, since MLflow does not accept `?` in a name. A step ends with the interceptor's `step()`, or with the
    block. Scalars calls the first of these methods that the writer has:
    `add_scalar(tag, value, step)`, as TensorBoard's `SummaryWriter`; `log_metrics(dict, step=)`, as `mlflow`;
    `log(dict, step=)`, as a W&B run.

    Args:
        writer: The writer. Scalars does not close it.
        of: Which tensors to look at, as for `Stats`, which does the work.
        values: Any of the numbers in a `StatsRow`.
        for_dtype: As for `Stats`; the values `"underflow"` and `"overflow"` need it.
        every_steps: Write once every this many steps, for all calls of these steps.

    Raises:
        TypeError: The writer has none of these methods, or `for_dtype` is not a signed floating-point dtype.
        ValueError: An operand or value is unknown, or `every_steps` is below 1.
        OpInterceptError: At the end of a step, if the writer has been closed.

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

    reads = Stats.reads

    @renamed(every="every_steps")
    def __init__(
        self,
        writer: Any,
        of: str | Iterable[str] = ("output",),
        values: Iterable[str] = ("mean", "std", "absmax"),
        *,
        for_dtype: torch.dtype | None = None,
        every_steps: int = 1,
    ) -> None:
        check_count("every_steps", every_steps)
        self._values = tuple(values)
        if isinstance(values, str) or not self._values or any(value not in _VALUES for value in self._values):
            raise ValueError(f"values must be one or more of {', '.join(_VALUES)}, got {values!r}")
        if for_dtype is None and not {"underflow", "overflow"}.isdisjoint(self._values):
            raise ValueError(f"underflow and overflow need for_dtype, got values={self._values!r} without it")
        self._writer = writer
        self._write = _method(writer)
        self._every_steps = every_steps
        self._stats = Stats(of, for_dtype=for_dtype)
        self._steps = 0  # how many have ended since the first that has not been written
        self._last: int | None = None  # the step of the last call that has not been written
        self._lock = threading.RLock()  # reentrant, since the writer may make matmuls and so call the hook
        if hasattr(self._stats, "pre"):
            self.pre = self._pre

    def _held(self) -> str:
        return f"{type(self._writer).__name__}, values={self._values!r}"

    def _pre(self, call: OpCall) -> None:
        self._last = call.step
        self._stats.pre(call)

    def post(self, call: OpCall) -> None:
        """Add the call."""
        self._last = call.step
        self._stats.post(call)

    def end_step(self) -> None:
        """Write the step that has ended, once `every_steps` steps have."""
        with self._lock:
            self._steps += self._last is not None
            if self._steps >= self._every_steps:
                self.exit()

    def exit(self) -> None:
        """Write the last step."""
        with self._lock:
            if self._last is not None:
                self._write_steps(self._last)

    def _write_steps(self, last: int) -> None:
        # A closed SummaryWriter would silently open another file.
        if getattr(self._writer, "all_writers", self) is None:
            raise OpInterceptError(f"the writer {self._writer!r} of Scalars is closed; close it after the block")
        found = {}
        rows, self._steps, self._last = self._stats.step(), 0, None
        for row in rows:
            module = "unknown" if row.module is None else row.module or "-"
            head = f"{module}/{row.op.removeprefix('aten::')}"
            for value in self._values:
                number = getattr(row, value)
                if number is not None:
                    found[f"{head}/{row.operand}/{row.phase}/{value}"] = number
        if found:
            self._write(found, last)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"Scalars cannot be copied or pickled, since it writes to an open {self._writer!r}; "
            "make another one with its own writer"
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
