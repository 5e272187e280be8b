"""`Frames`, `Page` and `Table`: results as data frames, as text and in notebooks.

Invariant: neither pandas nor polars is imported before somebody asks for a frame. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from html import escape
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

from opintercept._core.errors import needs
from opintercept._core.text import CELL, aligned, printable

_STYLE = (
    "<style>.opintercept td, .opintercept th {text-align: right; font-variant-numeric: tabular-nums}"
    ".opintercept .text {text-align: left}</style>"
)
_BAR = "rgba(90, 140, 230, 0.35)"  # readable on light and on dark


class Cells(NamedTuple):
    """What a table shows.

    Attributes:
        head: The names of the columns.
        rows: The cells, as many in each row as the head has.
        left: How many columns hold text; the others hold numbers.
        notes: Lines below the table.
        shares: The columns that hold shares such as `"12.5%"`, which notebooks draw as bars.
        last: The columns of text that a narrow terminal shortens last: names of modules.
        spare: The columns that a narrow terminal leaves out, in this order.
        short: The head for a narrow terminal, if it differs.
        indent: What each line of text begins with.
    """

    head: list[str]
    rows: list[list[str]]
    left: int
    notes: Sequence[str] = ()
    shares: tuple[str, ...] = ()
    last: Sequence[str] = ()
    spare: Sequence[str] = ()
    short: Sequence[str] = ()
    indent: str = ""

    def text(self) -> str:
        """The table with aligned columns."""
        lines = aligned([self.head, *self.rows], left=self.left).splitlines()
        return "\n".join([*(f"{self.indent}{line}" for line in lines), *self.notes])

    def html(self) -> str:
        """The table for a notebook."""
        shares = {self.head.index(name) for name in self.shares if name in self.head}

        def cell(kind: str, place: int, text: str) -> str:
            attributes = ' class="text"' if place < self.left else ""
            if kind == "td" and place in shares and text:
                attributes = f' style="background: linear-gradient(to right, {_BAR} {text}, transparent {text})"'
            return f"<{kind}{attributes}>{escape(printable(text, CELL))}</{kind}>"

        def line(kind: str, texts: list[str]) -> str:
            return f"<tr>{''.join(cell(kind, place, text) for place, text in enumerate(texts))}</tr>"

        body = "".join(line("td", row) for row in self.rows)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        head = f"<thead>{line('th', self.head)}</thead>"
        return f'{_STYLE}<table class="opintercept">{head}<tbody>{body}</tbody></table>{notes}'


Mark = Literal["head", "right", "warning", "wrong"]
"""Why a line stands out: it is the head of a table, or says what is right or wrong."""


class Marked(str):
    """A line that a terminal shows in a colour."""

    mark: Mark

    def __new__(cls, text: str, mark: Mark) -> Marked:
        """Mark a line."""
        line = super().__new__(cls, text)
        line.mark = mark
        return line


Part = str | Cells
"""A line of a page, or a table on it."""


def _library(name: str, method: str) -> Any:
    try:
        return import_module(name)
    except ImportError as missing:
        raise needs(f"{method}()", name) from missing


class Frames:
    """Results that can be had as a data frame."""

    __slots__ = ()

    def _columns(self) -> Mapping[str, Any]:
        """The columns of the frame, by name: lists, or arrays of numpy."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame` with a column for each attribute of a row.

        Raises:
            ImportError: pandas is not installed.
        """
        return _library("pandas", "to_pandas").DataFrame(self._columns())

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame` with a column for each attribute of a row.

        Raises:
            ImportError: polars is not installed.
        """
        return _library("polars", "to_polars").DataFrame(self._columns(), strict=False)


class Held:
    """What `repr` shows in place of an address: the class, and what `_held` says.

    An error message may show a hook while calls run, so `_held` waits neither for calls that kernels have noted nor for
    a device.
    """

    __slots__ = ()

    def _held(self) -> str:
        """What the object holds, or how it was made."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._held()})"


class Shown(Held):
    """What IPython shows as the text that `print` does, and not as an address."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


class Page(Shown):
    """Results that `print` shows as lines and tables, and so does a notebook cell that ends with them."""

    __slots__ = ()

    def parts(self) -> Iterable[Part]:
        """What `print` shows, from top to bottom."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(part.text() if isinstance(part, Cells) else part for part in self.parts())

    def _repr_html_(self) -> str:
        return "".join(
            part.html() if isinstance(part, Cells) else f'<pre style="margin: 0">{escape(part)}</pre>'
            for part in self.parts()
        )


class Table(Frames, Page):
    """Results with rows, which are shown as a table."""

    __slots__ = ()

    _row: ClassVar[type]
    """The dataclass of the rows."""

    def rows(self) -> Sequence[Any]:
        """The rows."""
        raise NotImplementedError

    def _cells(self) -> Cells:
        """What the table shows."""
        raise NotImplementedError

    def parts(self) -> Iterable[Part]:
        """The table."""
        return [self._cells()]

    def _columns(self) -> Mapping[str, Any]:
        rows = self.rows()
        return {field.name: [getattr(row, field.name) for row in rows] for field in fields(self._row)}
