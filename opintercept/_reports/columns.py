"""The columns of `opintercept show --calls`, and what JSON says of a call. Must not import torch."""

from __future__ import annotations

from opintercept._reports.sums import Row, dtype_of, rate, shape_of
from opintercept._values.stats import Values
from opintercept.runs.store.codec import StoredCall, is_output

_FIGURES = ("hash", "nan", "inf", "min", "max", "mean", "rms")  # of the first output
CALL_COLUMNS = (
    "rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds",
    "flops_per_second", "forward", "grad_of", "nonfinite", *_FIGURES, "error",
)  # fmt: skip


def call_row(call: StoredCall) -> Row:
    """Return the values of the columns for a call."""
    record = call.record
    output: Values | None = next((values for role, values in call.values.items() if is_output(role)), None)
    row = {
        "rank": call.rank,
        "shape": shape_of(record),
        "dtype": dtype_of(record),
        "seconds": record.elapsed,
        "flops_per_second": rate(record.flops, record.elapsed),
        "nonfinite": sum(values.nan + values.inf for values in call.values.values()),
        "error": call.error,
        **({} if output is None else output.as_dict()),
    }
    return {name: row.get(name) if name in row or name in _FIGURES else getattr(record, name) for name in CALL_COLUMNS}


def call_json(call: StoredCall) -> Row:
    """Return a call as plain data, with the statistics of all its tensors."""
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}
