"""Output of commands: tables as wide as the terminal, JSON without NaN, one line for each warning.

Must not import torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opintercept._core.errors import OpInterceptWarning
from opintercept._core.tables import Cells, Marked, Part
from opintercept._core.text import aligned, printable
from opintercept.cli.terminal.progress import hide
from opintercept.cli.terminal.style import styled

if TYPE_CHECKING:
    from opintercept.runs import Alignment, Difference, Explanation, RankDifference
    from opintercept.runs.replay import Replay

    Result = Difference | RankDifference | Alignment | Explanation | Replay

_WIDE = 120  # columns of a terminal that has room for whole heads
_SHORTEST = 10  # characters that a shortened cell keeps
_READABLE = 32  # characters of a module name for which other columns are left out


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Print each of our own warnings once, as one line on stderr and without our line of code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", OpInterceptWarning)
        # torch warns when it is imported without numpy, which no command needs from torch.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        show, printed = warnings.showwarning, set()

        def show_once(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, OpInterceptWarning):
                show(message, category, *where, **more)
            elif str(message) not in printed:  # reading a run twice repeats its warnings
                printed.add(str(message))
                hide()
                warning = styled("warning:", "warning", sys.stderr)
                print(f"opintercept {command}: {warning} {printable(str(message))}", file=sys.stderr)

        warnings.showwarning = show_once
        yield


@contextmanager
def safe_stdout() -> Iterator[None]:
    """Print to a stdout of any encoding, and stop quietly if its reader goes away."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a name
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the interpreter flushes stdout once more at exit, which must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def can_print(text: str) -> bool:
    """Whether the encoding of stdout has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def finite_json(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return [finite_json(item) for item in value] if isinstance(value, (list, tuple)) else value


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
    return "\n".join([*(f"{table.indent}{line}" for line in (styled(names, "head"), *lines)), *notes])


def print_parts(parts: Iterable[Part], limit: int | None = None) -> None:
    """Print lines, marked ones in colour, and tables of at most so many rows."""
    for part in parts:
        if isinstance(part, Cells):
            print(fitted(part, limit))
        else:
            print(styled(part, part.mark) if isinstance(part, Marked) else part)


def print_result(found: Result, as_json: bool, limit: int | None = None) -> int:
    """Print a result with tables of at most so many rows, or as JSON; return the exit status."""
    if as_json:
        print(json.dumps(finite_json(found.as_dict()), indent=1, allow_nan=False))
    else:
        print_parts(found.parts(), limit)
    return 0 if found.equal else 1


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
