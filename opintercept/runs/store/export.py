"""`write_parquet`: writes the calls of a run for other programs, as Parquet, with DuckDB. Must not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opintercept._core.errors import OpInterceptError, needs
from opintercept.runs.store.columns import MORE, PLACES, VALUES, Arrays
from opintercept.runs.store.data_frame import call_site_table, signature_table, texts_of, used_slots
from opintercept.runs.store.records import IN_TEXT
from opintercept.runs.store.run import Run

ROWS = 1 << 20  # of a file
_UNKNOWN = ("forward", "started", "thread")


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
        written, slots = 0, used_slots([run.columns(rank) for rank in run.ranks])
        with duckdb.connect(":memory:") as connection:
            for rank in run.ranks:
                columns = run.columns(rank)
                shared = {"sites": call_site_table(columns), "signatures": signature_table(columns)}
                for start in range(0, len(columns), ROWS):
                    end = min(start + ROWS, len(columns))
                    calls = columns.read((*PLACES, *MORE, *VALUES), start, end) | texts_of(columns, start, end)
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
    own += ["nullif(elapsed, 'nan') AS elapsed", *MORE, "error", *IN_TEXT]
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
