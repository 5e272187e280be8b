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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opintercept._call import CallRecord
from opintercept._errors import OpInterceptError, OpInterceptWarning
from opintercept._table import aligned, printable
from opintercept.runs.store import Values

_NAMES = 2000  # that are kept to be suggested
_LONGEST = 120  # of those
_CLOSE = 3
_LEAST = 10  # characters that a cut cell keeps


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


def nearest(given: str, names: Sequence[str] | dict[str, None]) -> list[str]:
    """The names that one has probably meant, at most three."""
    plain = re.sub(r"[*?\[\]]+", "", given)[:_LONGEST].lower().strip(".")
    lower = {name.lower(): name for name in reversed(list(names))}
    found = [lower[name] for name in difflib.get_close_matches(plain, lower, _CLOSE, 0.6)]
    longer = (name for key, name in lower.items() if plain and (plain in key) and name not in found)
    found += sorted(longer, key=lambda name: (len(name), name))
    return found[:_CLOSE]


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


def fitted(table: Sequence[Sequence[str]], left: int, last: Sequence[int] = (), indent: str = "") -> str:
    """A table in columns, as wide as the terminal: text is cut in the middle, and numbers never.

    Args:
        table: The rows, the first of which is the head.
        left: Columns of text, which come first.
        last: Those of them that are cut last: the names of modules.
        indent: What each line begins with.
    """
    most = width()
    lines = aligned(table if most is None else _fit(table, left, last, most - len(indent)), left)
    return lines if not indent else "\n".join(f"{indent}{line}" for line in lines.splitlines())


def _fit(table: Sequence[Sequence[str]], left: int, last: Sequence[int], most: int) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    over = sum(widths) + 2 * (len(widths) - 1) - most
    for columns in ([n for n in range(left) if n not in last], list(last)):
        while over > 0 and (wide := [n for n in columns if widths[n] > _LEAST]):
            widest = max(wide, key=lambda n: widths[n])
            widths[widest] -= 1
            over -= 1
    return [[_cut(cell, widths[n]) if n < left else cell for n, cell in enumerate(row)] for row in table]


def _cut(text: str, most: int) -> str:
    """Keep both ends: those of `encoder.layers.11.attention.query` say most."""
    if len(text) <= most:
        return text
    end = (most - 3) * 2 // 3
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"
