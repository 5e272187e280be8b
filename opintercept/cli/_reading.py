"""What `show`, `diff` and `report` share: filters that know a misspelt name, plain warnings, tables that fit.

Invariant: whatever a run has in it, what is kept here of names is bounded.
Must not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._record import CallRecord
from opintercept._text import aligned, printable
from opintercept.runs.store import Values

_NAMES = 2000  # that are kept to be suggested
_LONGEST = 120  # of those
_CLOSE, _SUGGESTED = 0.6, 3  # difflib's own
_LEAST, _READABLE = 10, 32  # characters that a cut cell keeps, and a name for which other columns make way


class Names:
    """Filters by module and operator that notice when they match nothing at all.

    Args:
        module: A pattern of modules' names as in `fnmatch`, or None for all.
        ops: Operators, `"mm"` or `"aten::mm"`, or None for all.
        named: What a module is called, which may differ from what its record has.
        short: An operator's short name.
    """

    def __init__(
        self,
        module: str | None,
        ops: Sequence[str] | None,
        named: Callable[[str | None], str | None],
        short: Callable[[str], str],
    ) -> None:
        self._module, self._ops = module, ops
        self._named, self._short = named, short
        self._matches = None if module is None else re.compile(fnmatch.translate(module)).fullmatch
        self._modules: dict[str, None] = {}
        self._short_ops: dict[str, None] = {}
        self._found_module, self._found_ops = module is None, set(ops or ())

    def __call__(self, record: CallRecord) -> bool:
        """Whether a call is asked for."""
        admitted = True
        if self._matches is not None:
            name = self._named(record.module)
            admitted = name is not None and self._matches(name) is not None
            self._found_module |= admitted
            if not self._found_module and name:
                _keep(self._modules, name)
        if self._ops is not None:
            short = self._short(record.op)
            asked = {record.op, short}.intersection(self._ops)
            self._found_ops -= asked
            admitted = admitted and bool(asked)
            if self._found_ops:
                _keep(self._short_ops, short)
        return admitted

    def check(self, of: str) -> None:
        """Refuse a name that no call has.

        Args:
            of: What has been read, as it is called in the error.

        Raises:
            OpInterceptError: A name matches nothing; it says which names come close.
        """
        if not self._found_module and self._module is not None:
            _refuse("--module", "a module", self._module, self._modules, of)
        for op in self._ops or ():
            if op in self._found_ops:
                _refuse("--op", "an operator", op, self._short_ops, of)


def _keep(names: dict[str, None], name: str) -> None:
    if len(names) < _NAMES:
        names[name[:_LONGEST]] = None


def _refuse(option: str, what: str, given: str, names: dict[str, None], of: str) -> None:
    close = [f"'{printable(name)}'" for name in nearest(given, names)]
    hint = f"did you mean {' or '.join(close)}?" if close else "`opintercept show` lists them"
    raise OpInterceptError(f"{option} must match {what} of {of}, got '{printable(given, 200)}'; {hint}")


def nearest(given: str, names: Iterable[str]) -> list[str]:
    """The names, or the pattern, that one has probably meant, at most three."""
    names = list(names)
    found = [f"{given}.*"] if any(name.startswith(f"{given}.") for name in names) else []
    plain = re.sub(r"[*?\[\]]+", "", given)[:_LONGEST].lower().strip(".")
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(plain)
    scores: dict[str, float] = {}
    for name in names:
        matcher.set_seq1(name.lower())
        if plain and plain in name.lower():
            scores[name] = 1.0
        elif min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= _CLOSE and matcher.ratio() >= _CLOSE:
            scores[name] = matcher.ratio()
    found += sorted(scores, key=lambda name: -scores[name])
    return found[:_SUGGESTED]


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Print our own warnings as one line on stderr each, without the line of ours that gave them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", OpInterceptWarning)
        show, told = warnings.showwarning, set()

        def tell(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, OpInterceptWarning):
                show(message, category, *where, **more)
            elif str(message) not in told:  # a run that is read twice has not two torn lines
                told.add(str(message))
                print(f"opintercept {command}: warning: {printable(str(message))}", file=sys.stderr)

        warnings.showwarning = tell
        yield


@contextmanager
def output() -> Iterator[None]:
    """Print to stdout whatever its encoding, and to a reader that may leave early."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name may have what the terminal's encoding has not
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # there must be something to flush to at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def nonfinite(values: Values | None) -> str:
    """How many NaN and Inf there are of how many values, `"3 NaN and 1 Inf of 16"`; empty where all are finite."""
    if values is None or values.finite:
        return ""
    counts = [f"{count:,} {name}" for count, name in ((values.nan, "NaN"), (values.inf, "Inf")) if count]
    return f"{' and '.join(counts)} of {values.count:,}"


def width() -> int | None:
    """Columns of the terminal, or what COLUMNS says; None where neither tells, as in a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def fitted(
    table: Sequence[Sequence[str]],
    left: int,
    last: Sequence[str] = (),
    spare: Sequence[str] = (),
    indent: str = "",
) -> str:
    """A table in columns, as wide as the terminal: text is cut in the middle, and numbers never.

    Args:
        table: The rows, the first of which is the head.
        left: Columns of text, which come first.
        last: Heads of those that are cut last: the names of modules.
        spare: Heads of those that are left out where cutting does not do, the first of them first.
        indent: What each line begins with.
    """
    most = width()
    rows = [list(row) for row in table]
    if most is not None:
        left -= _leave_out(rows, left, last, spare, most - len(indent))
        _shorten(rows, left, last, most - len(indent))
    return "\n".join(f"{indent}{line}" for line in aligned(rows, left).splitlines())


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _leave_out(rows: list[list[str]], left: int, last: Sequence[str], spare: Sequence[str], most: int) -> int:
    """Leave columns out until the others fit once they are cut; returns how many of the `left` ones are gone."""
    gone = 0
    for head in spare:
        most_cut = [_READABLE if name in last else _LEAST for name in rows[0][: left - gone]]
        sizes = _widths(rows)
        least = [*map(min, sizes, most_cut), *sizes[left - gone :]]
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
        while over > 0 and (wide := [n for n in columns if widths[n] > _LEAST]):
            widths[max(wide, key=lambda n: widths[n])] -= 1
            over -= 1
    for row in rows:
        row[:left] = map(_cut, row[:left], widths)


def _cut(text: str, most: int) -> str:
    """Shorten the parts of a name, `e.l.11.attention.query`, whose numbers and last part say most; then the middle."""
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
