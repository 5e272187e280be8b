"""`fitted`: lays out a table no wider than the terminal.

Invariant: text is shortened, and numbers never are. Must not import torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from opintercept._core.tables import Cells
from opintercept._core.text import aligned
from opintercept.cli.terminal.style import styled

_WIDE = 120  # columns of a terminal that has room for whole heads
_SHORTEST = 10  # characters that a shortened cell keeps
_READABLE = 32  # characters of a module name for which other columns are left out


def width() -> int | None:
    """Return the columns of the terminal, or of COLUMNS; None if neither is known, as when writing to a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fitted(table: Cells, limit: int | None = None) -> str:
    """Lay out a table no wider than the terminal. Text is shortened in the middle; numbers never are."""
    most, left = width(), table.left
    head = table.short if table.short and (most or _WIDE) < _WIDE else table.head
    rows = [[*head], *([*row] for row in table.rows[:limit])]
    if most is not None:
        left -= _leave_out(rows, left, table.last, table.spare, most - len(table.indent))
        _shorten(rows, left, table.last, most - len(table.indent))
    names, *lines = aligned(rows, left).splitlines()
    more = len(table.rows) - len(lines)
    notes = [f"... and {more:,} more; a larger limit shows them"] if more else table.notes
    notes = [note.replace("a larger limit", "a larger --limit") for note in notes]  # in Python it is limit=
    return "\n".join([*(f"{table.indent}{line}" for line in (styled(names, "head"), *lines)), *notes])


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _leave_out(rows: list[list[str]], left: int, last: Sequence[str], spare: Sequence[str], most: int) -> int:
    """Remove spare columns until the shortened rest fits; return how many of the `left` columns were removed."""
    gone = 0
    for head in spare:
        enough = [_READABLE if name in last else _SHORTEST for name in rows[0][: left - gone]]
        sizes = _widths(rows)
        least = [*map(min, sizes, enough), *sizes[left - gone :]]
        if sum(least) + 2 * (len(least) - 1) <= most:
            break
        if head in rows[0]:
            place = rows[0].index(head)
            gone += place < left - gone
            for row in rows:
                del row[place]
    return gone


def _shorten(rows: list[list[str]], left: int, last: Sequence[str], most: int) -> None:
    widths = _widths(rows)
    over = sum(widths) + 2 * (len(widths) - 1) - most
    for columns in ([n for n in range(left) if rows[0][n] not in last], [n for n in range(left) if rows[0][n] in last]):
        while over > 0 and (wide := [n for n in columns if widths[n] > _SHORTEST]):
            widths[max(wide, key=lambda n: widths[n])] -= 1
            over -= 1
    for row in rows:
        row[:left] = map(_shortened, row[:left], widths)


def _shortened(text: str, most: int) -> str:
    """Shorten the parts of a name to their initials, `e.l.11.attention.query`, and if need be cut out the middle.

    Numbers and the last part stay, since they say most.
    """
    if len(text) <= most:
        return text
    parts = text.split(".")
    if " " not in text:
        for place, part in enumerate(parts[:-1]):
            if not part.isdecimal():
                parts[place] = part[:1]
            if len(".".join(parts)) <= most:
                break
    text = ".".join(parts)
    if len(text) <= most:
        return text
    end = (most - 3) * 2 // 3
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"
