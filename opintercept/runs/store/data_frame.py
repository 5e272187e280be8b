"""Makes the columns of a data frame from the calls of a run. Needs numpy. Must not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.store.columns import MORE, PLACES, Columns
from opintercept.runs.store.records import FIGURES, IN_TEXT, SLOTS, Array, Arrays

_CALL_SITE = ("module", "source", "phase", "grad_of")
_SIGNATURE = ("op", "func", "autocast", "flops", "bytes", "opaque")
_TENSORS = ("lhs", "rhs", "bias", "output")
_GEMM = ("batch", "m", "n", "k")


def frame_of(processes: Sequence[Columns]) -> dict[str, Any]:
    """Return the columns, with a row for each call, process by process.

    `started` is a time. `forward` and `thread` are -1 where there is none, and figures NaN. The statistics are those of
    all tensors of which any call has some: of `add(self, other)`, those of `self` are at `lhs` (`_ops.slots`).
    """
    slots = used_slots(processes)
    parts = [_frame(columns, slots) for columns in processes]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
    # polars keeps an array of objects as it is, and makes a column of texts or numbers of a list.
    return {name: column.tolist() if column.dtype == object else column for name, column in joined.items()}


def used_slots(processes: Sequence[Columns]) -> list[str]:
    """The slots of the tensors of which any call has statistics."""
    every = (columns.signature(number) for columns in processes for number in range(columns.signatures))
    roles = {role for signature in every for role in signature.slots.values()}
    return [slot for slot, role in SLOTS.items() if role in roles]


def _frame(columns: Columns, slots: list[str]) -> Arrays:
    figures = [f"{slot}_{name}" for slot in slots for name in ("hash", "nan", "inf", *FIGURES)]
    read = columns.read((*PLACES, *MORE, *figures), 0, len(columns))
    call_site, signature = read.pop("site"), read.pop("look")
    made: Arrays = {"rank": np.full(len(columns), columns.rank), "index": read["index"], "step": read["step"]}
    for numbers, table in ((call_site, call_site_table(columns)), (signature, signature_table(columns))):
        made |= {name: column[numbers] for name, column in table.items() if name not in ("site", "look")}
    started = read["started"].astype("datetime64[ns]")
    started[read["started"] < 0] = np.datetime64("NaT")
    made |= {"forward": read["forward"], "started": started, "thread": read["thread"], "elapsed": read["elapsed"]}
    made |= {name: read[name] for name in MORE} | texts_of(columns, 0, len(columns))
    return made | {name: read[name] for name in figures}


def call_site_table(columns: Columns) -> Arrays:
    """The fields of each call site, and its number `site`."""
    found = [columns.call_site(number) for number in range(columns.call_sites)]
    return {"site": np.arange(len(found))} | {
        name: _objects([getattr(each, name) for each in found]) for name in _CALL_SITE
    }


def signature_table(columns: Columns) -> Arrays:
    """The fields of each signature, operands and output as text, and its number `look`."""
    known = [columns.signature(number) for number in range(columns.signatures)]
    made: Arrays = {"look": np.arange(len(known))}
    for names, read in ((_SIGNATURE, getattr), (_TENSORS, _text), (_GEMM, _size)):
        made |= {name: _objects([read(found.record, name) for found in known]) for name in names}
    return made


def texts_of(columns: Columns, first: int, end: int) -> Arrays:
    """What calls raised, and their further fields that are no numbers; None where there is nothing."""
    said = {name: np.full(end - first, None, object) for name in ("error", *IN_TEXT)}
    has = columns.read(("has_error", "has_own"), first, end)
    numbers = np.flatnonzero(has["has_error"] | has["has_own"])
    for number, texts in zip(numbers.tolist(), columns.texts(numbers + first), strict=True):
        for name, value in {"error": texts.error, **texts.own}.items():
            said[name][number] = value
    return said


def _objects(values: list[Any]) -> Array:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def _text(record: CallRecord, name: str) -> str | None:
    found = getattr(record, name)
    metas = found if isinstance(found, tuple) else (found,)
    return ", ".join(str(meta) for meta in metas if meta is not None) or None


def _size(record: CallRecord, name: str) -> int | None:
    return None if record.gemm is None else int(getattr(record.gemm, name))
