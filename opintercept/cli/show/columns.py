"""The columns of `opintercept show --calls`, and what JSON says of a call. Must not import torch."""

from __future__ import annotations

from opintercept._values.stats import Values
from opintercept.cli.show.sums import Row, dtype_of, rate, shape_of
from opintercept.runs.store.codec import StoredCall, is_output


def _first_output(call: StoredCall) -> Values | None:
    return next((values for role, values in call.values.items() if is_output(role)), None)


def call_row(call: StoredCall) -> Row:
    """Return the values of the columns for a call."""
    record, output = call.record, _first_output(call)
    values = {} if output is None else output.as_dict()
    return {
        "rank": call.rank,
        "index": record.index,
        "step": record.step,
        "phase": record.phase,
        "module": record.module,
        "source": record.source,
        "op": record.op,
        "shape": shape_of(record),
        "dtype": dtype_of(record),
        "flops": record.flops,
        "bytes": record.bytes,
        "seconds": record.elapsed,
        "flops_per_second": rate(record.flops, record.elapsed),
        "forward": record.forward,
        "grad_of": record.grad_of,
        "nonfinite": sum(v.nan + v.inf for v in call.values.values()),
        "hash": values.get("hash"),
        "nan": values.get("nan"),
        "inf": values.get("inf"),
        "min": values.get("min"),
        "max": values.get("max"),
        "mean": values.get("mean"),
        "rms": values.get("rms"),
        "error": call.error,
    }


CALL_COLUMNS = (
    "rank", "index", "step", "phase", "module", "source", "op", "shape", "dtype", "flops", "bytes", "seconds",
    "flops_per_second", "forward", "grad_of", "nonfinite", "hash", "nan", "inf", "min", "max", "mean", "rms", "error",
)  # fmt: skip


def call_json(call: StoredCall) -> Row:
    """Return a call as plain data, with the statistics of all its tensors."""
    values = {role: value.as_dict() for role, value in call.values.items()}
    return {"rank": call.rank, **call.record.as_dict(), "values": values, "error": call.error}
