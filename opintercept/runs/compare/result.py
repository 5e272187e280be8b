"""`Difference`: the result of `diff`, which prints itself. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from opintercept._core.record import Plain
from opintercept._core.tables import Marked, Part, Table
from opintercept._core.text import duration, listed, printable
from opintercept.runs.compare.difference import KINDS, Absent, CallDifference, Kind, ModuleDifference, Unmatched
from opintercept.runs.compare.pairing import Pairing
from opintercept.runs.compare.text import (
    absent_lines,
    first_parts,
    hint,
    modules_table,
    settings_table,
    unmatched_table,
)
from opintercept.runs.store.run import RunHead
from opintercept.runs.why.answer import Answer

_MODULE = ("module", "other", "phase", "calls", "relative", "index")
_PAIRED = {"sequence": "by alignment", "family": "with another operator", "shape": "under another module name"}


@dataclass(frozen=True, slots=True)
class Difference(Plain, Table):
    """The result of `diff`. Its data frame has a row for each module that differs.

    Attributes:
        a: The first run.
        b: The second run.
        settings: In what the descriptions of the two runs differ: name, value in the first, value in the second; flags
            first.
        ranks: The processes that were compared with each other.
        absent: The processes that were not compared, as one of the runs has no calls of them.
        calls: How many calls of these processes the first and the second run have.
        pairs: How many calls were compared.
        kinds: How many of these are of each kind.
        by: How many equal calls are known to be equal by what: `"hash"`, `"statistics"`, and so on as in
            `RoleDifference.by`; calls that were not compared count under `"nothing"`.
        pairings: How many were paired in each way.
        metadata: How many differ in a shape or dtype.
        judged: What the judge of `why` says, where both runs have all values, are not too large, and differ; else why
            it was not asked, in words, or nothing if nothing differs.
        first: The first differing call in the order of the first run; with several processes, the one with the
            smallest step and index. Of runs that were judged, the first that stands for a cause. None if all are equal,
            or differ by no more than rounding, and if nothing that was blamed has a counterpart.
        before: How many calls before `first` have no counterpart, in each run: their effects were not compared.
        optimizer: Whether a weight of `first` was equal in an earlier call, as were all gradients since, so that the
            optimizer, or what else has written to the weight, makes the difference.
        elapsed: The host times of the calls that were compared, in seconds, in each run; None if one is unknown.
        worst: The calls with the largest `relative` of an output, largest first; without `StoredCall.given`.
        modules: The modules with a differing call, in the order in which they first differ.
        modules_in_all: How many such modules there are; `modules` has at most `limit`.
        unmatched: The calls without a counterpart.
        unmatched_calls: How many calls these are, in each run.
        fused: How many calls of each run are kernels that torch.compile has generated, or operators of which such
            kernels of the other run are made. The judge alone compares them.
    """

    a: RunHead = field(compare=False)
    b: RunHead = field(compare=False)
    settings: tuple[tuple[str, str, str], ...]
    ranks: tuple[tuple[int, int], ...]
    absent: tuple[Absent, ...]
    calls: tuple[int, int]
    pairs: int
    kinds: dict[Kind, int]
    by: dict[str, int]
    pairings: dict[Pairing, int]
    metadata: int
    judged: Answer | str
    first: CallDifference | None
    before: tuple[int, int]
    optimizer: bool
    elapsed: tuple[float | None, float | None]
    worst: tuple[CallDifference, ...]
    modules: tuple[ModuleDifference, ...]
    modules_in_all: int
    unmatched: tuple[Unmatched, ...]
    unmatched_calls: tuple[int, int]
    fused: tuple[int, int]

    def rows(self) -> tuple[ModuleDifference, ...]:
        """The modules that differ."""
        return self.modules

    def _columns(self) -> Mapping[str, Any]:
        plain = {name: [getattr(row, name) for row in self.modules] for name in _MODULE}
        ranks = {f"rank_{side}": [row.ranks[n] for row in self.modules] for n, side in enumerate("ab")}
        return ranks | plain | {kind: [row.kinds.get(kind, 0) for row in self.modules] for kind in KINDS}

    def parts(self) -> Iterator[Part]:
        """What `print` shows: the answer of the judge, counts, the first divergence, and the modules that differ."""
        if isinstance(self.judged, Answer):
            yield from (Marked(self.judged.sentence, "right" if self.equal else "wrong"), "")
        yield from (f"A  {self.a}", f"B  {self.b}")
        if self.settings:
            yield from ("", settings_table(self.settings))
        if self.ranks not in ((), ((0, 0),)):
            what = "processes" if self.a.titles or self.b.titles else "ranks"
            titles = self.a.titles, self.b.titles
            named = [[of.get(rank, rank) for of, rank in zip(titles, pair, strict=True)] for pair in self.ranks]
            shown = listed([f"{a} with {b}" for a, b in named], 8)
            yield from ("", f"{what} compared, A with B: {printable(shown)}")
        yield ""
        yield from absent_lines(self.absent, self.a, self.b)
        yield from self._counts()
        if self.first is not None:
            yield from ("", *first_parts(self.first, self.before, self.unmatched, self.optimizer))
        if self.modules and not self._is_rounding:
            yield from ("", modules_table(self.modules, self.modules_in_all, ranks=len(self.ranks) > 1))
        if self.unmatched and not self._is_rounding:
            yield from ("", unmatched_table(self.unmatched))
        times = [duration(seconds) for seconds in self.elapsed if seconds]
        if len(times) == 2:
            yield from ("", f"host time of the calls compared: {times[0]} in A, {times[1]} in B")
        if not self.equal:
            yield from ("", *hint(self.judged, self.a, self.b))

    def _counts(self) -> Iterator[str]:
        a, b = self.calls
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.kinds.items())
        yield f"{a:,} calls in A, {b:,} in B, {self.pairs:,} compared: {kinds or 'none'}"
        weak = [f"{self.by[by]:,} by {by}" for by in ("statistics", "sample", "tensors", "metadata") if self.by.get(by)]
        if weak:
            yield f"judged equal without a hash of all bits: {', '.join(weak)}"
        if self.kinds.get("not compared"):
            yield "not compared: nothing but shapes and dtypes was recorded that could be compared"
        if self.metadata:
            yield f"{self.metadata:,} have operands or outputs whose shape or dtype differs"
        if other := [f"{number:,} {_PAIRED[how]}" for how, number in self.pairings.items() if how != "ordinal"]:
            yield f"paired {', '.join(other)}"
        if any(self.unmatched_calls):
            yield f"without a counterpart: {self.unmatched_calls[0]:,} of A, {self.unmatched_calls[1]:,} of B"
        if any(self.fused):
            how = "compared as one program" if isinstance(self.judged, Answer) else "not compared"
            yield f"generated kernels, and what they stand for: {self.fused[0]:,} of A, {self.fused[1]:,} of B, {how}"
        if self.equal:
            compared = self.pairs > self.kinds.get("not compared", 0)
            yield Marked(self.verdict, "right") if compared else self.verdict

    @property
    def _is_rounding(self) -> bool:
        """Whether the judge says that nothing differs by more than rounding."""
        return isinstance(self.judged, Answer) and self.judged.equal

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding, if that was judged.

        Else, whether no call differs, each has a counterpart, and both runs have the same processes.
        """
        return not self.absent and (
            self._is_rounding or (self.first is None and not any((*self.unmatched_calls, *self.fused)))
        )

    @property
    def verdict(self) -> str:
        """The value of `equal` in words, limited to what was compared."""
        uncompared = self.kinds.get("not compared", 0)
        if self._is_rounding:
            return "what differs is rounding"
        if self.pairs == uncompared:
            return "no values were compared"
        exact = ": all are equal bit for bit" if self.by.keys() <= {"hash", "metadata"} else ""
        return f"no call differs{exact}" if not uncompared else "no call whose values were compared differs"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, in which floats can be infinite or NaN."""
        return {"equal": self.equal} | Plain.as_dict(self)
