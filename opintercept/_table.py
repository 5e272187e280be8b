"""Tables in text, in columns, and in CSV; imports nothing of torch, so that a run is shown without it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any


def aligned(table: Sequence[Sequence[str]], left: int) -> str:
    """Lay a table out in columns, the first row its head: `left` columns to the left, the rest to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def write_csv(path: str | PathLike[str], head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a header line and the rows; whatever fails on the way, `path` is whole or as it was."""
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise
