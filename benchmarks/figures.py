"""The figures of the pages: tables in benchmarks/README.md, and the places that quote them.

Invariant: `quoted` finds each figure that a page quotes, so a measurement is written by `write` alone, and nothing is
copied by hand. A table quotes the suites that the last `python -m benchmarks SUITE ...` before it names: its heads are
programs, and its rows begin with configurations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from benchmarks._timing import Row

SUITES = ("operators", "models", "every", "recording", "reading")
ROOT = Path(__file__).parents[1]
TABLES = "benchmarks/README.md"
BEGIN, END = "<!-- figures, by `python -m benchmarks --pages` -->\n", "<!-- end of figures -->\n"

Figures = dict[tuple[str, str, str], str]
"""Texts of ratios, by suite, program and configuration."""

_LLAMA, _MINILM = "Llama, 4 layers of width 64, forward", "MiniLM, 8 sentences"
_ADD, _BLOCK = "add 8x8, unwatched", "entering and leaving a block, milliseconds"
# By page: the words before a figure in a sentence, and which one it is.
SENTENCES: dict[str, dict[str, tuple[str, str, str]]] = {
    "README.md": {
        "under an empty mode an `add` takes": ("operators", _ADD, "empty TorchDispatchMode"),
        "and a small Llama": ("models", _LLAMA, "empty TorchDispatchMode"),
        "Here they take": ("operators", _ADD, "compiled kernels, no-op hook"),
        "times as long and": ("models", _LLAMA, "compiled kernels, no-op hook"),
    },
    "docs/cost.md": {
        "installs the kernels for what it watches, which takes": (
            "every",
            _BLOCK,
            'kernels in Python, ops="matmul": in',
        )
    },
    "docs/alternatives.md": {},
    "docs/checksum.md": {
        "with 8 sentences then takes": ("models", _MINILM, "compiled kernels, Checksum"),
        "and one call in a hundred": ("models", _MINILM, "compiled kernels, Checksum of one call in 100"),
    },
}


class _Cell(NamedTuple):
    line: int
    column: int
    suites: Sequence[str]
    program: str
    configuration: str
    text: str


def markdown(found: Iterable[Row]) -> str:
    """A table for each suite: a row for each configuration, and a column for each program."""
    parts = []
    for suite, rows in groupby(found, lambda row: row.suite):
        cells: dict[str, dict[str, str]] = {}
        programs: dict[str, Row] = {}
        for row in rows:
            first = programs.setdefault(row.program, row)
            name, bound = row.configuration, ""
            if row.bound is not None:
                alone = name.removesuffix(f" / {first.configuration}").partition(" / a ")[0]
                name = alone if row.program in cells.get(alone, {}) else name
                bound = f" ≤ {row.bound:g}" if row.ratio <= row.bound else f" > {row.bound:g}, the bound"
            base = row is first and math.isclose(row.ratio, 1, rel_tol=1e-6)
            cells.setdefault(name, {})[row.program] = (_time(row.seconds) if base else _ratio(row.ratio)) + bound
        lines = [f"`python -m benchmarks {suite}`:", ""]
        lines += [_line(["", *programs]), "|---" * (len(programs) + 1) + "|"]
        lines += [_line([name, *(texts.get(each, "") for each in programs)]) for name, texts in cells.items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(cells: Iterable[str]) -> str:
    return "|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""])


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def _time(seconds: float) -> str:
    unit, size = next((each for each in (("s", 1.0), ("ms", 1e-3)) if seconds >= each[1]), ("us", 1e-6))
    return f"{seconds / size:.3g} {unit}"


def _cells(text: str) -> Iterator[_Cell]:
    """The cells of the tables of a page, apart from those of its heads."""
    suites: Sequence[str] = ()
    heads: Sequence[str] = ()
    for number, line in enumerate(text.splitlines()):
        for named in re.findall(r"`python -m benchmarks ((?:\w+ ?)+)[^`]*`", line):
            suites = named.split()
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if row and heads:
            for column, (head, cell) in enumerate(zip(heads[1:], row[1:], strict=False), 1):
                yield _Cell(number, column, suites, head, row[0].replace("`", ""), cell)
        heads = (heads or row) if row else ()


def figures(text: str) -> Figures:
    """The figures of the tables of benchmarks/README.md."""
    measured = text[text.index(BEGIN) : text.index(END)]
    return {
        (suite, cell.program, cell.configuration): re.sub(r" [≤>].*", "", cell.text)
        for cell in _cells(measured)
        for suite in cell.suites
        if cell.text and not cell.text.startswith("-")
    }


def quoted(page: str, text: str, known: Figures) -> tuple[str, int]:
    """The text of a page with the figures that it quotes, and how many these are."""
    lines, count = text.splitlines(keepends=True), 0
    programs = {key[:2] for key in known}
    for cell in _cells(text):
        suite = next((each for each in cell.suites if (each, cell.program) in programs), None)
        if cell.text and suite is not None and not cell.text.startswith("-"):
            parts = lines[cell.line].split("|")
            parts[cell.column + 1] = f" {known[suite, cell.program, cell.configuration]} "
            lines[cell.line], count = "|".join(parts), count + 1
    text = "".join(lines)
    for words, key in SENTENCES[page].items():
        pattern = r"(" + words.replace(" ", r"\s+") + r"\s+)\d+(?:\.\d+)?"
        text, times = re.subn(pattern, lambda match, key=key: match[1] + known[key], text)  # type: ignore[misc]
        assert times == 1, f"{page} must say {words!r} before a figure once, found {times}"
        count += times
    return text, count


def write(found: Iterable[Row], about: str) -> None:
    """Write the tables into benchmarks/README.md, and the figures that other pages quote into these."""
    path = ROOT / TABLES
    text = path.read_text("utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{about}\n\n{markdown(found)}\n{END}{after}", "utf-8")
    known = figures(path.read_text("utf-8"))
    for page in SENTENCES:
        of = ROOT / page
        of.write_text(quoted(page, of.read_text("utf-8"), known)[0], "utf-8")
