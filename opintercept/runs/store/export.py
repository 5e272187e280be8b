"""`frame_of` and `write_parquet`: the calls of a run for other programs, as a data frame, or as Parquet with DuckDB.

Needs numpy. Must not import torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.record import CallRecord
from opintercept._native.layout import FIGURES, RARE, SLOTS
from opintercept.runs.store.columns import MORE, PLACES, Columns
from opintercept.runs.store.records import IN_TEXT, Array, Arrays

Run = Any  # a `Run`, whose file imports this one
ROWS = 1 << 20  # of a file
_CALL_SITE = ("module", "source", "phase", "grad_of")
_SIGNATURE = ("op", "func", "autocast", "flops", "bytes", "opaque")
_TENSORS = ("lhs", "rhs", "bias", "output")
_GEMM = ("batch", "m", "n", "k")


def frame_of(run: Run) -> dict[str, Any]:
    """Return the columns, with a row for each call, process by process.

    `started` is a time. `forward` and `thread` are -1 where there is none, and figures NaN. The statistics are those of
    all tensors of which any call has some: of `add(self, other)`, those of `self` are at `lhs` (`_ops.slots`).
    """
    slots = _used_slots(run)
    parts = [_frame(columns, slots, 0, len(columns)) for columns in map(run.columns, run.ranks)]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # polars keeps an array of objects as it is, and makes a column of texts or numbers of a list.
    return {name: column.tolist() if column.dtype == object else column for name, column in joined.items()}


def _used_slots(run: Run) -> list[str]:
    """The slots of the tensors of which any call has statistics."""
    processes = map(run.columns, run.ranks)
    every = (columns.signature(number) for columns in processes for number in range(columns.signatures))
    roles = {role for signature in every for role in signature.slots.values()}
    return [slot for slot, role in SLOTS.items() if role in roles]


def _frame(columns: Columns, slots: list[str], first: int, end: int) -> Arrays:
    """The columns of some calls."""
    figures = [f"{slot}_{name}" for slot in slots for name in ("hash", "nan", "inf", *FIGURES)]
    read = columns.read((*PLACES, *MORE, *figures), first, end)
    made: Arrays = {"rank": np.full(end - first, columns.rank), "index": read["index"], "step": read["step"]}
    call_sites = [columns.call_site(number) for number in range(columns.call_sites)]
    made |= {name: _objects([getattr(each, name) for each in call_sites])[read["site"]] for name in _CALL_SITE}
    records = [columns.signature(number).record for number in range(columns.signatures)]
    for names, field in ((_SIGNATURE, getattr), (_TENSORS, _text), (_GEMM, _size)):
        made |= {name: _objects([field(each, name) for each in records])[read["look"]] for name in names}
    started = read["started"].astype("datetime64[ns]")
    started[read["started"] < 0] = np.datetime64("NaT", "ns")
    made |= {"forward": read["forward"], "started": started, "thread": read["thread"], "elapsed": read["elapsed"]}
    made |= {name: read[name] for name in MORE} | _texts_of(columns, first, end)
    return made | {name: read[name] for name in figures}


def _texts_of(columns: Columns, first: int, end: int) -> Arrays:
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


def write_parquet(run: Run, folder: str | os.PathLike[str]) -> int:
    """Write a row for each call to a new folder, with the columns of `run.to_pandas()`, and return how many there are.

    Each rank has a file or several. `started_ns` counts from 1970.
    """
    try:
        import duckdb
    except ImportError as missing:
        raise needs("Parquet", "duckdb", "'opintercept[cli]'") from missing
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise OpInterceptError(f"Parquet needs a new folder, or an empty one, got {str(path)!r}")
        written, slots = 0, _used_slots(run)
        with duckdb.connect(":memory:") as connection:
            for rank in run.ranks:
                columns = run.columns(rank)
                for start in range(0, len(columns), ROWS):
                    end = min(start + ROWS, len(columns))
                    frame = _frame(columns, slots, start, end)
                    target = str((path / f"rank{rank}-{start // ROWS:05d}.parquet").absolute()).replace("'", "''")
                    connection.register("frame", frame)
                    select = f"SELECT {', '.join(map(_selected, frame))} FROM frame"
                    connection.execute(f"COPY ({select}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
                    written += end - start
    except (OSError, duckdb.Error) as failed:
        raise OpInterceptError(f"cannot write Parquet to {str(path)!r}: {failed}") from failed
    return written


def _selected(name: str) -> str:
    """A column in SQL, with NULL for what is not known."""
    if name == "started":
        return "epoch_ns(started) AS started_ns"
    if name in RARE:
        return f"{name}::BIGINT AS {name}"
    unknown = dict.fromkeys(FIGURES, "'nan'") | {"hash": "0", "elapsed": "'nan'", "forward": "-1", "thread": "-1"}
    end = name.rpartition("_")[2]
    return f"nullif({name}, {unknown[end]}) AS {name}" if end in unknown else name
