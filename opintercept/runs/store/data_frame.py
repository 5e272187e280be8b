"""Makes the columns of a data frame from the calls of a run. Needs numpy. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.store.columns import FIGURES, PLACES, SLOTS, Array, Arrays, CallSignature, Columns

_CALL_SITE = ("module", "source", "phase", "grad_of")
_SIGNATURE = ("op", "func", "autocast", "flops", "bytes", "opaque")
_TENSORS = ("lhs", "rhs", "bias", "output")
_GEMM = ("batch", "m", "n", "k")


def frame_of(processes: Sequence[Columns]) -> dict[str, Any]:
    """Return the columns, with a row for each call, process by process.

    `started` is a time. `forward` and `thread` are -1 where there is none, and figures NaN. The statistics are those of
    all tensors of which any call has some.
    """
    signatures = [[columns.signature(number) for number in range(columns.signatures)] for columns in processes]
    roles = {role for known in signatures for signature in known for role in signature.roles}
    slots = [slot for slot, role in SLOTS.items() if role in roles]
    parts = [_frame(columns, known, slots) for columns, known in zip(processes, signatures, strict=True)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    # polars keeps an array of objects as it is, and makes a column of texts or numbers of a list.
    return {name: column.tolist() if column.dtype == object else column for name, column in joined.items()}


def _frame(columns: Columns, signatures: list[CallSignature], slots: list[str]) -> Arrays:
    figures = [f"{slot}_{name}" for slot in slots for name in ("hash", "nan", "inf", *FIGURES)]
    read = columns.read((*PLACES, "has_error", *figures), 0, len(columns))
    call_site, signature = read.pop("site"), read.pop("look")
    call_sites = [columns.call_site(number) for number in range(columns.call_sites)]
    errors = np.full(len(columns), None, object)
    raised = np.flatnonzero(read.pop("has_error"))
    errors[raised] = [texts.error for texts in columns.texts(raised)]
    made: Arrays = {"rank": np.full(len(columns), columns.rank), "index": read["index"], "step": read["step"]}
    made |= {name: _each(call_site, (getattr(found, name) for found in call_sites)) for name in _CALL_SITE}
    made |= {name: _each(signature, (getattr(found.record, name) for found in signatures)) for name in _SIGNATURE}
    made |= {name: _each(signature, (_text(found.record, name) for found in signatures)) for name in _TENSORS}
    made |= {name: _each(signature, (_size(found.record, name) for found in signatures)) for name in _GEMM}
    started = read["started"].astype("datetime64[ns]")
    started[read["started"] < 0] = np.datetime64("NaT")
    made |= {"forward": read["forward"], "started": started, "thread": read["thread"], "elapsed": read["elapsed"]}
    return made | {"error": errors} | {name: read[name] for name in figures}


def _each(numbers: Array, values: Iterable[Any]) -> Array:
    """Repeats a signature's field for each of its calls."""
    listed = list(values)
    shared = np.empty(len(listed), object)
    shared[:] = listed
    return shared[numbers]


def _text(record: CallRecord, name: str) -> str | None:
    found = getattr(record, name)
    metas = found if isinstance(found, tuple) else (found,)
    return ", ".join(str(meta) for meta in metas if meta is not None) or None


def _size(record: CallRecord, name: str) -> int | None:
    return None if record.gemm is None else int(getattr(record.gemm, name))
