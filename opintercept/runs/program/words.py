"""How results write a module, an operator, a number, and how much is not finite. Must not import torch."""

from __future__ import annotations

from opintercept._core.text import printable
from opintercept._values.stats import Values
from opintercept.runs.program.names import module_name

WIDTH = 60  # characters of a name or a value


def module_text(name: str | None) -> str:
    """Write the name of a module without wrappers."""
    return "(unknown module)" if name is None else printable(module_name(name) or "(outermost)", WIDTH)


def short_op(op: str) -> str:
    """Write an operator without `aten::`."""
    return printable(op.removeprefix("aten::"), WIDTH)


def number_text(value: float | None) -> str:
    """Write a number with three digits, and `-` for None."""
    return "-" if value is None else "0" if value == 0 else f"{value:.3g}"


def nonfinite(values: Values | None) -> str:
    """Count what is not finite, `"3 NaN and 1 Inf of 16"`; empty if everything is."""
    if values is None or values.finite:
        return ""
    counts = [f"{count:,} {name}" for count, name in ((values.nan, "NaN"), (values.inf, "Inf")) if count]
    return f"{' and '.join(counts)} of {values.count:,}"
