"""Tables as text and as CSV, and numbers and text for people to read.

Must not import torch, so that a run can be shown without it.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

CELL = 120
"""The most characters of a table's cell. The names of real modules are shorter."""
# A spreadsheet runs text that begins with one of these as a formula (OWASP, CSV injection). The last four are
# full-width forms.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")


def aligned(table: Sequence[Sequence[str]], left: int) -> str:
    """Return a table as lines of text, with its columns aligned.

    Long cells lose their middle, and control characters become escapes.

    Args:
        table: Rows of cells, all of the same length. The first row is the head.
        left: How many columns are aligned to the left. The others are aligned to the right.
    """
    table = [[printable(cell, CELL) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def write_csv(path: str | PathLike[str], head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a head and rows as CSV, each cell as `csv_cell` returns it.

    If anything fails, the file at `path` stays as it was.
    """
    partial = f"{os.fspath(path)}.partial"
    try:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(map(csv_cell, head))
            writer.writerows(map(csv_cell, row) for row in rows)
        os.replace(partial, path)
    except BaseException:
        if os.path.exists(partial):
            os.remove(partial)
        raise


def csv_cell(value: Any) -> Any:
    """Return a value that a spreadsheet shows and does not run, and that UTF-8 can encode.

    Text that would be a formula gets a leading `'`. Lone surrogates and control characters other than newlines become
    escapes. Numbers stay as they are, also as text.

    Example:
        >>> [csv_cell(value) for value in ("encoder.0", "=1+1", "-1.5", -1.5)]
        ['encoder.0', "'=1+1", '-1.5', -1.5]
    """
    if not isinstance(value, str):
        return value
    safe = "\n".join(map(printable, value.split("\n")))
    if not value.startswith(_FORMULA):
        return safe
    try:
        float(value)
    except ValueError:
        return f"'{safe}"
    return safe


def amount(value: float, unit: str) -> str:
    """Write a number with an SI prefix: `1.5 MFLOP`."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while abs(value) >= 1000 and len(prefixes) > 1:
        value /= 1000
        del prefixes[0]
    return f"{value:.4g} {prefixes[0]}{unit}"


def number(value: float | None, unit: float) -> str:
    """Write a number in a unit: `1,234.50`, or `?` if it is not known."""
    return "?" if value is None else f"{value / unit:,.2f}"


def work_text(flops: int | None, size: int | None) -> str:
    """Write work in MFLOP, or for operators without a formula for it the bytes that they move: `1.28 kB`."""
    return number(flops, 1e6) if flops is not None or size is None else amount(size, "B")


def rate_text(flops: int | None, size: int | None, seconds: float | None) -> str:
    """Write work per second in GFLOP/s, or for operators without a formula bytes: `1.28 GB/s`."""
    if not seconds or (flops is None and size is None):
        return "?"
    return number(flops / seconds, 1e9) if flops is not None else amount((size or 0) / seconds, "B/s")


def duration(seconds: float) -> str:
    """Write a time: `2.500 s`, `12.300 ms`."""
    return f"{seconds:,.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def counted(number: int, noun: str) -> str:
    """Write a count: `1 call`, `2,000 calls`, `2 processes`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def printable(text: str, most: int | None = None) -> str:
    """Return text that is safe on a terminal: control characters become escapes.

    Args:
        text: Any text.
        most: How many characters to keep; a longer text loses its middle. None keeps all.
    """
    if most is not None and len(text) > most:
        text = f"{text[: most // 2 - 1]}...{text[len(text) - most + most // 2 + 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def listed(items: Sequence[object], most: int = 16) -> str:
    """Join the first `most` items by commas, with `...` for the rest."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def short_name(op: str) -> str:
    """Return an operator's name without its namespace: `"mm"` of `"aten::mm"`, `"mul"` of `"package.module:mul"`."""
    return op.rpartition(":")[2].rpartition(".")[2]
