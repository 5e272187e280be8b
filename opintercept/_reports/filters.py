"""`Choice`, what a report is asked for, and filters by module and operator, which report a name that matches no call.

Invariant: a filter keeps a bounded number of names, however many a run has. Must not import torch.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opintercept._core.errors import OpInterceptError
from opintercept._core.record import CallRecord
from opintercept._core.text import printable

_NAMES = 2000  # kept for suggestions
_LONGEST = 120  # characters of a kept name


@dataclass(frozen=True, slots=True)
class Choice:
    """Which calls a report is about, how it groups and orders them, and how many rows it has."""

    module: str | None = None  # a pattern of module names as in `fnmatch`
    op: Sequence[str] | None = None  # "mm" or "aten::mm"
    phase: str | None = None
    steps: range | None = None
    rank: int | None = None
    nonfinite: bool = False  # only calls with NaN or Inf
    by: tuple[str, ...] = ()  # the keys of groups
    sort: str | None = None  # what decides the order; None for that of the report
    limit: int | None = None  # the most rows


class NameFilter:
    """Choose calls by module, operator and phase, as `Choice` has them, and notice a name that matches nothing at all.

    `named` returns the name to match, given the module of a record, and `short` the short name of an operator.
    """

    by_name = True  # see `runs.compare.pairs.Index`

    def __init__(
        self,
        module: str | None,
        ops: Sequence[str] | None,
        phase: str | None,
        named: Callable[[str | None], str | None],
        short: Callable[[str], str],
    ) -> None:
        self._module, self._ops, self._phase = module, ops, phase
        self._named, self._short = named, short
        self._matches = None if module is None else re.compile(fnmatch.translate(module)).fullmatch
        self._modules: dict[str, None] = {}
        self._short_ops: dict[str, None] = {}
        self._found_module, self._missing_ops = module is None, set(ops or ())

    def __call__(self, record: CallRecord) -> bool:
        """Return whether the filters admit a call."""
        admitted = True
        if self._matches is not None:
            name = self._named(record.module)
            admitted = name is not None and self._matches(name) is not None
            self._found_module |= admitted
            if not self._found_module and name:
                _keep(self._modules, name)
        if self._ops is not None:
            short = self._short(record.op)
            found = {record.op, short}.intersection(self._ops)
            self._missing_ops -= found
            admitted = admitted and bool(found)
            if self._missing_ops:
                _keep(self._short_ops, short)
        return admitted and self._phase in (None, record.phase)

    def check(self, source: str) -> None:
        """Refuse a filter that no call of the source has matched, with similar names."""
        if not self._found_module and self._module is not None:
            _refuse("--module", "module", self._module, self._modules, source)
        for op in self._ops or ():
            if op in self._missing_ops:
                _refuse("--op", "operator", op, self._short_ops, source)


def _keep(names: dict[str, None], name: str) -> None:
    if len(names) < _NAMES:
        names[name[:_LONGEST]] = None


def _refuse(option: str, kind: str, given: str, names: dict[str, None], source: str) -> None:
    close = [f"'{printable(name)}'" for name in nearest(given, names)]
    hint = f"did you mean {' or '.join(close)}?" if close else "`opintercept show` lists them"
    raise OpInterceptError(f"{option} '{printable(given, 200)}' matches no {kind} of {source}; {hint}")


def nearest(given: str, names: Iterable[str]) -> list[str]:
    """Return the names, or the pattern, that were probably meant: at most three."""
    lower = {name.lower(): name for name in names}
    found = [f"{given}.*"] if any(name.startswith(f"{given}.") for name in lower.values()) else []
    if plain := re.sub(r"[*?\[\]]+", "", given)[:_LONGEST].lower().strip("."):
        found += [name for low, name in lower.items() if plain in low]
        found += [lower[low] for low in difflib.get_close_matches(plain, lower)]
    return list(dict.fromkeys(found))[:3]
