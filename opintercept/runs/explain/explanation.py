"""`Explanation`: the result of `explain`, which prints itself, and its rows. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from opintercept._core.record import Plain
from opintercept._core.tables import Cells, Marked, Part, Table
from opintercept._core.text import printable
from opintercept.runs.compare.words import WIDTH, module_text, short_op
from opintercept.runs.store.run import RunHead

ShareBy = Literal["call", "module", "op", "line", "dtype"]
BY: tuple[ShareBy, ...] = get_args(ShareBy)
REMAINDER = "not explained: higher orders of the differences, and what no call records"


@dataclass(frozen=True, slots=True)
class Share(Plain):
    """What one call, weight or input has to do with the difference, or several that were added up.

    Attributes:
        share: Its part of the difference; NaN if there is no difference.
        cost: How much of the loss's difference it makes.
        index: The index of A's call; None for several.
        op: Its operator; None for several.
        module: Its module.
        source: Its line.
        cause: What it is: another argument or operator, a changed weight or input, rounding in a dtype.
        dtype: The coarser dtype of both runs.
        roundings: The largest difference of an element, in units of the rounding that it may have. None for several.
        calls: How many rows it adds up.
        confirmed: What A's loss changes by if only this is put into its program; None if that was not tried.
    """

    share: float
    cost: float
    index: int | None
    op: str | None
    module: str | None
    source: str | None
    cause: str
    dtype: str | None
    roundings: float | None = None
    calls: int = 1
    confirmed: float | None = None


@dataclass(frozen=True, slots=True)
class OutputDistance(Plain):
    """How far B's output of a call is from A's, whatever has made it so.

    Attributes:
        index: The index of A's call.
        op: Its operator.
        module: Its module.
        dtype: The coarsest dtype that outputs up to this one have in either run: what has rounded the error.
        relative: The norm of B - A by the norm of A; infinite if only A is zero.
        roundings: The same in unit roundoffs of the dtype.
    """

    index: int
    op: str
    module: str | None
    dtype: str
    relative: float
    roundings: float


@dataclass(frozen=True, slots=True)
class Explanation(Plain, Table):
    """The result of `explain`. Its table and its data frame have a row for each share.

    Attributes:
        a: The first run.
        b: The second run.
        loss: What is explained, in words.
        losses: The loss of each run.
        by: What the rows are.
        all: The shares of all calls, in A's order.
        confirmed: What was tried, by the `key_of` rows.
        notes: What could not be compared, in words.
        path: How far outputs are apart, call by call in A's order: where the error comes in, grows and dies.
    """

    a: RunHead = field(compare=False)
    b: RunHead = field(compare=False)
    loss: str
    losses: tuple[float, float]
    by: ShareBy
    all: tuple[Share, ...] = field(repr=False)
    confirmed: Mapping[Any, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    path: tuple[OutputDistance, ...] = field(default=(), repr=False)

    _row: ClassVar[type] = Share

    @property
    def difference(self) -> float:
        """The loss of B minus that of A."""
        return self.losses[1] - self.losses[0]

    @property
    def explained(self) -> float:
        """The sum of all costs."""
        return sum(each.cost for each in self.all)

    @property
    def remainder(self) -> float:
        """What the costs leave of the difference."""
        return self.difference - self.explained

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.all

    def rows(self) -> tuple[Share, ...]:
        """The shares, folded as `by` says, the largest first."""
        found = [
            replace(_folded(group), confirmed=self.confirmed.get(key))
            for key, group in groups(self.all, self.by).items()
        ]
        return tuple(sorted(found, key=lambda each: -abs(each.cost)))

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain data."""
        figures = {"losses": list(self.losses), "difference": self.difference, "explained": self.explained}
        return {
            "a": self.a.as_dict(),
            "b": self.b.as_dict(),
            "loss": self.loss,
            **figures,
            "remainder": self.remainder,
            "by": self.by,
            "rows": [each.as_dict() for each in self.rows()],
            "notes": list(self.notes),
        }

    def parts(self) -> Iterator[Part]:
        """What `print` shows: the losses, how much is explained, and the shares."""
        yield from (f"A  {self.a}", f"B  {self.b}", "")
        before, after = self.losses
        yield f"{self.loss}: {before:.9g} in A, {after:.9g} in B, a difference of {self.difference:.4g}"
        if self.equal:
            yield Marked("no call, weight or input differs", "right")
        else:
            yield f"explained: {self.explained:.4g}{_of(self.explained, self.difference)}"
            yield from self.doubts()
            yield from ("", self._cells())
        yield from self.notes

    def doubts(self) -> Iterator[Marked]:
        """Say where the sum of the rows means little."""
        moduli = sum(abs(each.cost) for each in self.all)
        if moduli > 10 * abs(self.difference) and moduli:
            yield Marked(
                f"costs of both signs cancel: their moduli add up to {moduli:.3g}, {_times(moduli, self.difference)} "
                "the difference, so single rows say more than their sum",
                "warning",
            )
        if abs(self.remainder) > 0.1 * abs(self.difference):
            yield Marked(
                "more than a tenth is not explained: the loss is far from smooth between the runs; "
                "`--confirm` measures rows one by one",
                "warning",
            )

    def _cells(self) -> Cells:
        rows = self.rows()
        tried = any(each.confirmed is not None for each in rows)
        head = {"call": ["module", "operator", "what it is"], "op": ["operator"]}.get(self.by, [self.by])
        lines = [
            [*self._names(each), f"{each.cost:+.3g}", *self._tried(each, tried), _percent(each.share)] for each in rows
        ]
        share = self.remainder / self.difference if self.difference else math.nan
        blank = [""] * (len(head) - 1)
        lines.append(["not explained", *blank, f"{self.remainder:+.3g}", *([""] * tried), _percent(share)])
        left, last = len(head), (head[0], "what it is")
        return Cells([*head, "cost", *["confirmed"] * tried, "share"], lines, left=left, shares=("share",), last=last)

    def _names(self, row: Share) -> list[str]:
        if self.by == "call":
            return [module_text(row.module), short_op(row.op or ""), printable(row.cause, 2 * WIDTH)]
        name = {"module": module_text(row.module), "op": short_op(row.op or ""), "line": row.source, "dtype": row.dtype}
        return [printable(name[self.by] or "", WIDTH)]

    def _tried(self, row: Share, tried: bool) -> list[str]:
        return ["" if row.confirmed is None else f"{row.confirmed:+.3g}"] if tried else []


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share + 0.0:.1f}%".replace("-0.0%", "0.0%")


def _of(part: float, whole: float) -> str:
    return f", {100 * part / whole:.1f} % of it" if whole else ""


def _times(part: float, whole: float) -> str:
    return f"{part / abs(whole):.3g} times" if whole else "but not"


def groups(shares: Sequence[Share], by: ShareBy) -> dict[Any, list[Share]]:
    """The shares of each row, by what they have in common."""
    found: dict[Any, list[Share]] = {}
    for place, each in enumerate(shares):
        key = {"call": place, "module": each.module, "op": each.op, "line": each.source, "dtype": each.dtype}[by]
        found.setdefault(key, []).append(each)
    return found


def _folded(group: Sequence[Share]) -> Share:
    """Shares added up."""
    if len(group) == 1:
        return group[0]
    return Share(
        share=sum(each.share for each in group),
        cost=sum(each.cost for each in group),
        index=None,
        op=_common([each.op for each in group]),
        module=_common([each.module for each in group]),
        source=_common([each.source for each in group]),
        cause=max(group, key=lambda each: abs(each.cost)).cause,
        dtype=_common([each.dtype for each in group]),
        calls=len(group),
    )


def _common(values: Sequence[str | None]) -> str | None:
    return values[0] if len(set(values)) == 1 else None
