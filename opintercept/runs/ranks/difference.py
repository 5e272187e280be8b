"""`RankDifference`: the result of `diff_ranks`, which prints itself, and the findings in it.

Must not import torch or numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from opintercept._core.record import Plain
from opintercept._core.tables import Cells, Marked, Page, Part
from opintercept._core.text import counted, listed, printable
from opintercept._kit.findings import CallFinding
from opintercept._ranks.expectations import Group, named_ranks, who_diverged
from opintercept.runs.program.words import WIDTH, module_text, short_op
from opintercept.runs.store.run import RunHead

_MOST_GROUPS = 4  # of ranks that are shown
What = Literal["weight", "operand", "calls", "order", "outlier", "not finite"]


@dataclass(frozen=True, slots=True)
class RankFinding(Plain, CallFinding):
    """A divergence of ranks that should agree.

    Attributes:
        what: `"weight"` and `"operand"`: its hash differs between ranks on which it was equal before, or, for a weight,
            from most ranks when it first appears. `"calls"`: ranks make different numbers of calls in a step.
            `"order"`: they make the same calls in another order. `"outlier"`: the output of a rank is far smaller or
            larger than those of the others. `"not finite"`: a rank has NaN or infinities where most have none.
        parts: The ranks that agree, the largest group first. The ranks of an outlier come last.
        step: The step in which they first diverge.
        rank: A rank that made the call; one that diverged if it did.
        index: `CallRecord.index` of the call on that rank.
        module: The module's name; None if it is unknown.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        source: The program's line.
        operand: `"lhs"`, `"rhs"`, `"bias"` or `"value"`, or `"output"`; None for calls and their order.
        numbers: What the parts have: their numbers of calls, or the root mean square or the largest magnitude of an
            output, that of the median rank first. Empty for hashes, order, and what is not finite.
        statistic: `"rms"` or `"max"` for an outlier, else None.
        times: In how many calls, or steps for calls and their order, this was found. A hash is not expected to be equal
            again once it has diverged.
    """

    what: What
    parts: tuple[Group, ...]
    step: int
    rank: int
    index: int
    module: str | None
    op: str
    phase: str
    source: str | None
    operand: str | None
    numbers: tuple[float, ...]
    statistic: str | None
    times: int

    @property
    def majority(self) -> bool:
        """Whether the largest group has more than half of the ranks, so that the others are in the wrong."""
        return 2 * len(self.parts[0]) > sum(map(len, self.parts))

    @property
    def odd(self) -> Group:
        """The ranks in the wrong; all if there is no majority."""
        return tuple(sorted(rank for part in self.parts[self.majority :] for rank in part))

    def __str__(self) -> str:
        step = f"at step {self.step}"
        diverged = who_diverged(self.parts)
        if self.what in ("weight", "operand"):
            return f"{diverged} {step}, in the {self.what} {self.operand}"
        if self.what == "calls":
            made = [
                f"{named_ranks(part)} {'makes' if len(part) == 1 else 'make'} {counted(int(number), 'call')}"
                for part, number in zip(self.parts, self.numbers, strict=True)
            ]
            return f"{' and '.join(made)} {step}"
        if self.what == "order":
            return f"{diverged} {step}: the same calls in another order, from this one on"
        who = named_ranks(self.parts[-1])
        if self.what == "not finite":
            has = "has" if len(self.parts[-1]) == 1 else "have"
            others = "has" if len(self.parts[0]) == 1 else "have"
            return f"{who} {has} NaN or Inf {step} where {named_ranks(self.parts[0])} {others} none"
        usual, value = self.numbers
        figure = "root mean square" if self.statistic == "rms" else "largest magnitude"
        return f"{who} is an outlier {step}: the output's {figure} is {value:.3g}, and {usual:.3g} on the median rank"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, with `odd` and `majority`."""
        return {"ranks": list(self.odd), "majority": self.majority} | Plain.as_dict(self)


@dataclass(frozen=True, slots=True)
class RankDifference(Plain, Page):
    """The result of `diff_ranks`.

    Attributes:
        run: The run.
        ranks: The ranks that were compared.
        missing: Ranks of the run that recorded no call.
        unfinished: The last step of each rank that did not finish; its calls are counted up to that step.
        calls: How many calls were compared, of all ranks.
        steps: The first and the last step.
        shared: The groups of ranks that should have equal weights, each with the number of places of such weights.
        unshared: How many places of weights are on several ranks and equal on no two of them, as sharded weights are.
        findings: What diverged: the first one first. At most `limit`.
        found: How many findings there are.
        outliers: Whether statistics were compared, which takes three ranks.
    """

    run: RunHead = field(compare=False)
    ranks: Group
    missing: Group
    unfinished: dict[int, int]
    calls: int
    steps: tuple[int, int]
    shared: tuple[tuple[tuple[Group, ...], int], ...]
    unshared: int
    findings: tuple[RankFinding, ...]
    found: int
    outliers: bool

    @property
    def first(self) -> RankFinding | None:
        """What diverged first; None if nothing did. What follows may come from it."""
        return self.findings[0] if self.findings else None

    @property
    def equal(self) -> bool:
        """Whether nothing diverged and no rank is missing."""
        return not self.findings and not self.missing

    def parts(self) -> Iterator[Part]:
        """What `print` shows: what was compared, what diverged first, and what followed."""
        first, last = self.steps
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        yield from (str(self.run), "", f"{counted(len(self.ranks), 'rank')}, {counted(self.calls, 'call')} in {steps}")
        yield from self._shared_weights()
        if not self.outliers:
            yield "statistics were not compared: two ranks have no majority that says which of them is the outlier"
        if self.missing:
            yield f"{named_ranks(self.missing)} {'has' if len(self.missing) == 1 else 'have'} no calls"
        if self.unfinished:
            where = listed([f"rank {rank} in step {step}" for rank, step in self.unfinished.items()], 8)
            yield f"not finished, as after a kill: {where}; what follows there was not counted"
        if self.first is None:
            yield Marked("nothing diverged in what recorded calls read", "right")
        else:
            yield ""
            yield from self._first_diverged(self.first)
        if self.found > 1:
            yield from ("", f"{counted(self.found, 'finding')}, of which the later ones may come from the first:")
            yield self._divergences()

    def _shared_weights(self) -> Iterator[str]:
        for groups, number in self.shared[:_MOST_GROUPS]:
            shown = " and on ".join(named_ranks(group) for group in groups[:_MOST_GROUPS])
            more = "" if len(groups) <= _MOST_GROUPS else f" and {len(groups) - _MOST_GROUPS} more groups"
            yield f"{counted(number, 'weight')} should be equal on {shown}{more}"
        if len(self.shared) > _MOST_GROUPS:
            yield f"... and weights on {len(self.shared) - _MOST_GROUPS:,} other groups of ranks"
        if not self.shared:
            yield "no weight is equal on several ranks when it first appears, so none is compared"

    def _first_diverged(self, first: RankFinding) -> Iterator[str]:
        yield Marked(f"first: {first}", "wrong")
        call = f"call {first.index} of rank {first.rank}"
        yield f"  {call}, {first.phase}: {short_op(first.op)} in {module_text(first.module)}"
        if first.source is not None:
            yield f"  at {printable(first.source, WIDTH)}"
        if not first.majority:
            yield "  no majority of ranks agrees, which would say which of them are wrong"

    def _divergences(self) -> Cells:
        rows = [
            [
                module_text(finding.module),
                finding.phase,
                short_op(finding.op),
                finding.operand or "-",
                finding.what,
                str(finding.step),
                named_ranks(finding.odd).partition(" ")[2],
                str(finding.times),
            ]
            for finding in self.findings
        ]
        head = ["module", "pass", "operator", "operand", "what", "step", "ranks", "times"]
        more = self.found - len(self.findings)
        notes = [f"... and {more:,} more; a larger limit shows them"] if more else []
        return Cells(head, rows, 5, notes, last=("module",), spare=("operator",))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, in which floats can be infinite."""
        unfinished = [{"rank": rank, "step": step} for rank, step in self.unfinished.items()]
        shared = [{"groups": [list(group) for group in groups], "weights": number} for groups, number in self.shared]
        return {"equal": self.equal} | Plain.as_dict(self) | {"unfinished": unfinished, "shared": shared}
