"""`RankDifference`: the result of `diff_ranks`, and the findings in it. Must not import torch or numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from opintercept._core.record import plain
from opintercept._ranks.expectations import Group

What = Literal["weight", "operand", "calls", "order", "outlier", "not finite"]


@dataclass(frozen=True, slots=True)
class RankFinding:
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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, with `odd` and `majority`."""
        found: dict[str, Any] = plain(self)
        return {"ranks": list(self.odd), "majority": self.majority} | found


@dataclass(frozen=True, slots=True)
class RankDifference:
    """The result of `diff_ranks`.

    Attributes:
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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, in which floats can be infinite."""
        found: dict[str, Any] = {"equal": self.equal} | {name: getattr(self, name) for name in self.__slots__}
        found["unfinished"] = [{"rank": rank, "step": step} for rank, step in self.unfinished.items()]
        found["shared"] = [{"groups": [list(group) for group in groups], "weights": n} for groups, n in self.shared]
        found["findings"] = [finding.as_dict() for finding in self.findings]
        return found
