"""`frame_of` and `write_parquet`: the calls of a run for other programs, as a data frame, or as Parquet with DuckDB.

Needs numpy. Must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opintercept._core.errors import OpInterceptError, needs
from opintercept._core.record import CallRecord
from opintercept.runs.store.columns import MORE, PLACES, VALUES, Columns
from opintercept.runs.store.records import FIGURES, IN_TEXT, RARE, SLOTS, Array, Arrays

Run = Any  # a `Run`, whose file imports this one
ROWS = 1 << 20  # of a file
_UNKNOWN = ("forward", "started", "thread")
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
    parts = [_frame(run.columns(rank), slots) for rank in run.ranks]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    # polars keeps an array of objects as it is, and makes a column of texts or numbers of a list.
    return {name: column.tolist() if column.dtype == object else column for name, column in joined.items()}


def _used_slots(run: Run) -> list[str]:
    """The slots of the tensors of which any call has statistics."""
    processes = map(run.columns, run.ranks)
    every = (columns.signature(number) for columns in processes for number in range(columns.signatures))
    roles = {role for signature in every for role in signature.slots.values()}
    return [slot for slot, role in SLOTS.items() if role in roles]


def _frame(columns: Columns, slots: list[str]) -> Arrays:
    figures = [f"{slot}_{name}" for slot in slots for name in ("hash", "nan", "inf", *FIGURES)]
    read = columns.read((*PLACES, *MORE, *figures), 0, len(columns))
    call_site, signature = read.pop("site"), read.pop("look")
    made: Arrays = {"rank": np.full(len(columns), columns.rank), "index": read["index"], "step": read["step"]}
    for numbers, table in ((call_site, _call_site_table(columns)), (signature, _signature_table(columns))):
        made |= {name: column[numbers] for name, column in table.items() if name not in ("site", "look")}
    started = read["started"].astype("datetime64[ns]")
    started[read["started"] < 0] = np.datetime64("NaT", "ns")
    made |= {"forward": read["forward"], "started": started, "thread": read["thread"], "elapsed": read["elapsed"]}
    made |= {name: read[name] for name in MORE} | _texts_of(columns, 0, len(columns))
    return made | {name: read[name] for name in figures}


def _call_site_table(columns: Columns) -> Arrays:
    """The fields of each call site, and its number `site`."""
    found = [columns.call_site(number) for number in range(columns.call_sites)]
    return {"site": np.arange(len(found))} | {
        name: _objects([getattr(each, name) for each in found]) for name in _CALL_SITE
    }


def _signature_table(columns: Columns) -> Arrays:
    """The fields of each signature, operands and output as text, and its number `look`."""
    known = [columns.signature(number) for number in range(columns.signatures)]
    made: Arrays = {"look": np.arange(len(known))}
    for names, read in ((_SIGNATURE, getattr), (_TENSORS, _text), (_GEMM, _size)):
        made |= {name: _objects([read(found.record, name) for found in known]) for name in names}
    return made


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
                shared = {"sites": _call_site_table(columns), "signatures": _signature_table(columns)}
                for start in range(0, len(columns), ROWS):
                    end = min(start + ROWS, len(columns))
                    calls = columns.read((*PLACES, *MORE, *VALUES), start, end) | _texts_of(columns, start, end)
                    calls |= {"rank": np.full(end - start, rank), "call": np.arange(start, end)}
                    file = path / f"rank{rank}-{start // ROWS:05d}.parquet"
                    _write(connection, file, shared | {"calls": calls}, slots)
                    written += end - start
    except (OSError, duckdb.Error) as failed:
        raise OpInterceptError(f"cannot write Parquet to {str(path)!r}: {failed}") from failed
    return written


def _write(connection: Any, file: Path, tables: Mapping[str, Arrays], slots: Sequence[str]) -> None:
    for name, table in tables.items():
        connection.register(name, table)
    own = ["rank", "index", "step", *(f"sites.{name}" for name in tables["sites"] if name != "site")]
    own += [f"signatures.{name}" for name in tables["signatures"] if name != "look"]
    own += [f"nullif({name}, -1) AS {name}{'_ns' * (name == 'started')}" for name in _UNKNOWN]
    own += [
        "nullif(elapsed, 'nan') AS elapsed",
        *MORE,
        "error",
        *(f"{name}::BIGINT AS {name}" if name in RARE else name for name in IN_TEXT),
    ]
    own += [
        f"nullif({name}, {0 if name.endswith('_hash') else repr('nan')}) AS {name}"
        if name.rpartition("_")[2] not in ("nan", "inf")
        else name
        for name in VALUES
        if name.rpartition("_")[0] in slots
    ]
    target = str(file.absolute()).replace("'", "''")
    connection.execute(
        f"COPY (SELECT {', '.join(own)} FROM calls JOIN sites USING (site) JOIN signatures USING (look) ORDER BY call) "
        f"TO '{target}' (FORMAT parquet, COMPRESSION zstd)"
    )
