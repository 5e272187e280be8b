"""`Alignment`: the result of `align`, which prints itself, and the dataclasses in it. Must not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from opintercept._core.record import Plain
from opintercept._core.tables import Cells, Marked, Part, Table
from opintercept._core.text import counted, listed, printable
from opintercept.runs.compare.pairing import module_name, operator_name
from opintercept.runs.compare.words import WIDTH
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.run import RunHead

AlignedKind = Literal["equal", "close", "added", "changed operand", "changed argument", "inherited", "not compared"]
CAUSES: tuple[AlignedKind, ...] = ("changed operand", "changed argument", "added")
By = Literal["rows", "parts", "permuted", "values", "sum", "neighbours"]
_BY: dict[By, str] = {
    "rows": "by equal rows of the weights",
    "parts": "by parts of these rows",
    "permuted": "by rows whose elements are permuted",
    "values": "by rows with close values",
    "sum": "as parts of a sum or of an attention",
    "neighbours": "by what stands before and after",
}
_MOST_CALLS = 4  # of B that one row names
_MOST_REASONS = 20
_MOST_OPERATORS = 12  # between two calls that one line names


@dataclass(frozen=True, slots=True)
class Aligned(Plain):
    """A matmul of the first run, and the calls of the second that compute the same.

    Attributes:
        a: The call of the first run.
        b: The calls of the second: several if the weight is split there.
        by: How they were joined: the `"rows"` of their weights are equal; `"parts"` of rows are, since processes share
            the layer; the rows are equal but their elements `"permuted"`; the `"values"` of the rows are close, as
            after quantising; they are close once a low-rank product is added, or the call is a part of what the other
            run computes as one: a `"sum"`; or they are `"neighbours"`, between the same two other pairs.
        rows: How many rows of A's weight were found; 0 if it has no weight.
        of: How many rows it has.
        kind: `"equal"`: the outputs are equal. `"close"`: they differ by no more than rounding. `"added"`: one of the
            calls is further from the float64 result of its own operands than rounding can move it. `"changed operand"`:
            an operand differs by more than rounding, and nothing before explains it; of an input, the cause lies
            between the matmul before and this one. `"changed argument"`: the operands of an attention agree, and
            its scale, mask, dropout or the order of heads does not. `"inherited"`: the outputs differ, and a pair
            before is the cause. `"not compared"`: not all values of the outputs have a counterpart.
        changed: The operands or arguments that differ: `"lhs"`, the input; `"rhs"`, rows of the weight; `"bias"`; of
            an attention `"q"`, `"k"`, `"v"`, `"heads"`, `"scale"`, `"attn_mask"`, `"is_causal"` or `"dropout_p"`.
        arguments: Those that are numbers or flags, each with its value in A and in B.
        changed_rows: The first rows of A's weight that differ by more than rounding.
        nearest: For each of them, the row of B's weight that is nearest to it, and its distance relative to the row.
        after: The module of the matmul before, and
        between: the operators of A between it and this call, if the run has all operators, and
        lines: their lines.
        causes: The single edits of these by which A computes what B does.
        tried: How many edits were tried; 0 if A was not replayed.
        complete: Whether these were all; False if the search stopped at a limit of what it may compute.
        weight: The largest relative error of a row of the weight.
        lhs: That of a row of the input, `norm(b - a) / norm(a)`.
        output: That of a row of the output.
        max_absolute: The largest modulus of a difference of outputs.
        rounding_a: How far A's output is from that of its operands in float64, in units of the rounding that it may
            have; above 1 is more than rounding. None if it is no plain product or attention.
        rounding_b: The largest such number of B's calls.
        reason: Why the outputs are not compared.
    """

    a: StoredCall
    b: tuple[StoredCall, ...]
    by: By
    rows: int
    of: int
    kind: AlignedKind
    changed: tuple[str, ...] = ()
    arguments: tuple[tuple[str, Any, Any], ...] = ()
    changed_rows: tuple[int, ...] = ()
    nearest: tuple[tuple[int, float], ...] = ()
    after: str | None = None
    between: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    tried: int = 0
    complete: bool = True
    weight: float | None = None
    lhs: float | None = None
    output: float | None = None
    max_absolute: float | None = None
    rounding_a: float | None = None
    rounding_b: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Apart(Plain):
    """A call that was not joined.

    Attributes:
        run: `"a"` or `"b"`.
        call: The call.
        reason: Why.
    """

    run: Literal["a", "b"]
    call: StoredCall
    reason: str


_PAIR = ("by", "rows", "of", "kind", "weight", "lhs", "output", "max_absolute", "rounding_a", "rounding_b", "reason")


@dataclass(frozen=True, slots=True)
class Alignment(Plain, Table):
    """The result of `align`. Its table and its data frame have a row for each pair.

    Attributes:
        a: The first run.
        b: The second run.
        calls: How many forward calls each run has.
        joined_b: How many of those of the second are joined.
        pairs: What is joined, in the order of the first run.
        apart: The calls that are not joined.
        first: The first pair whose kind is `"changed operand"` or `"added"`; None if there is none.
        notes: What could not be computed, in words.
    """

    a: RunHead = field(compare=False)
    b: RunHead = field(compare=False)
    calls: tuple[int, int]
    joined_b: int
    pairs: tuple[Aligned, ...]
    apart: tuple[Apart, ...]
    first: Aligned | None
    notes: tuple[str, ...] = ()

    def rows(self) -> tuple[Aligned, ...]:
        """The pairs."""
        return self.pairs

    def _columns(self) -> Mapping[str, Any]:
        a = [pair.a.record for pair in self.pairs]
        modules = [", ".join(dict.fromkeys(call.record.module or "-" for call in pair.b)) for pair in self.pairs]
        names = {"module": [record.module for record in a], "op": [record.op for record in a], "other": modules}
        return names | {name: [getattr(pair, name) for pair in self.pairs] for name in _PAIR}

    @property
    def equal(self) -> bool:
        """Whether nothing differs by more than rounding, and joined calls show it: none is left out after the last."""
        last: dict[tuple[str, int], int] = {}
        for pair in self.pairs:
            for run, call in (("a", pair.a), *(("b", call) for call in pair.b)):
                compared = call.record.index if pair.kind != "not compared" else -1
                last[run, call.rank] = max(last.get((run, call.rank), -1), compared)
        after = [each for each in self.apart if each.call.record.index > last.get((each.run, each.call.rank), -1)]
        return self.first is None and not after

    def parts(self) -> Iterator[Part]:
        """What `print` shows: how calls were joined, the first divergence, the pairs, and what was not joined."""
        yield from (f"A  {self.a}", f"B  {self.b}", "", *self._counts())
        if self.first is not None:
            yield from ("", *self._first_divergence(self.first))
        yield from ("", self._cells())
        if self.apart:
            yield from ("", *self._not_joined())
        yield from self.notes

    def _counts(self) -> Iterator[str]:
        of_a, of_b = self.calls
        how = Counter(pair.by for pair in self.pairs)
        kinds = Counter(pair.kind for pair in self.pairs)
        joined = f"{len(self.pairs):,} of {counted(of_a, 'forward call')} of A, {self.joined_b:,} of {of_b:,} of B"
        yield f"joined: {joined}: {', '.join(f'{count:,} {_BY[by]}' for by, count in how.items())}"
        yield f"compared: {', '.join(f'{count:,} {kind}' for kind, count in kinds.items())}"
        if self.first is None and any(kind != "not compared" for kind in kinds):
            yield Marked("no difference above rounding in any joined call", "right")

    def _first_divergence(self, pair: Aligned) -> Iterator[str]:
        record = pair.a.record
        where = " and ".join(f"call {each.record.index} in {_module(each)}" for each in pair.b[:_MOST_CALLS])
        call = f"call {record.index} of A, step {record.step}: {operator_name(record.op)} in {_module(pair.a)}"
        yield Marked(f"first divergence: {call} against {where} of B", "wrong")
        if record.source is not None:
            yield f"  at {printable(record.source, WIDTH)}"
        yield from (f"  {line}" for line in _causes(pair))
        if pair.output is not None:
            largest = _number(pair.max_absolute)
            yield f"  output: a row differs by up to {_number(pair.output)} of its norm, max |b - a| {largest}"

    def _cells(self) -> Cells:
        rows = []
        for pair in self.pairs:
            numbers = (_number(value) for value in (pair.weight, pair.lhs, pair.output))
            others = listed(list(dict.fromkeys(map(_module, pair.b))), _MOST_CALLS)
            of = f"{pair.rows} of {pair.of}" if pair.of else ""
            rows.append([_module(pair.a), others, pair.by, of, *numbers, pair.kind])
        head = ["A", "B", "joined by", "rows", "weight", "input", "output", ""]
        return Cells(head, rows, left=3, last=("A", "B"), spare=("rows", "weight", "input"))

    def _not_joined(self) -> Iterator[str]:
        counts = Counter((each.run, each.reason) for each in self.apart)
        examples = {(each.run, each.reason): each.call for each in reversed(self.apart)}
        for (run, reason), count in list(counts.items())[:_MOST_REASONS]:
            call = examples[run, reason]
            first = f"call {call.record.index}, {operator_name(call.record.op)} in {_module(call)}"
            calls = f"{counted(count, 'call')} of {run.upper()}"
            yield f"not joined: {calls}, the first of them {first}: {printable(reason, 4 * WIDTH)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            "a": self.a.as_dict(),
            "b": self.b.as_dict(),
            "calls": list(self.calls),
            "joined": [len(self.pairs), self.joined_b],
            "first": self.first and self.first.as_dict(),
            "pairs": [pair.as_dict() for pair in self.pairs],
            "apart": [each.as_dict() for each in self.apart],
            "notes": list(self.notes),
        }


def _causes(pair: Aligned) -> Iterator[str]:
    """What makes a pair the first divergence."""
    if "rhs" in pair.changed:
        rows = f"{'row' if len(pair.changed_rows) == 1 else 'rows'} {listed(pair.changed_rows, _MOST_CALLS)}"
        yield f"changed operand: {rows} of the weight, by up to {_number(pair.weight)} of a row"
        places = [f"row {row} (by {_number(far)})" for row, far in pair.nearest]
        yield from [f"  nearest in B: {listed(places, _MOST_CALLS)}"] if places else ()
    if "bias" in pair.changed:
        yield "changed operand: the bias"
    operands = [name for name in pair.changed if name in ("lhs", "q", "k", "v")]
    if operands:
        same = [name for name in ("q", "k", "v") if name not in operands and "lhs" not in operands]
        names = "the input differs" if "lhs" in operands else _verb(operands, "differs", "differ")
        rest = f" ({_verb(same, 'does', 'do')} not)" if same else ""
        error = f" by {_number(pair.lhs)}" if pair.lhs is not None else ""
        yield f"changed operand: {names}{rest}{error}, more than rounding: the cause lies {_where(pair)}"
    if "heads" in pair.changed:
        yield f"changed argument: heads do not belong to each other as in A: the cause lies {_where(pair)}"
    if pair.between:
        yield f"  what A computes there: {listed(pair.between, _MOST_OPERATORS)}"
    if pair.lines:
        yield f"  at {printable(listed(pair.lines, _MOST_CALLS), 4 * WIDTH)}"
    yield from (f"  B computes the same if {cause}" for cause in pair.causes)
    if pair.tried and not pair.causes and pair.complete:
        yield f"  none of {counted(pair.tried, 'edit')} that were tried makes A compute what B does"
    if not pair.complete:
        yield f"  the search for edits stopped at its limit, after {counted(pair.tried, 'edit')}"
    for name, one, other in pair.arguments:
        values = " differs" if one is None and other is None else f": {_value(one)} in A, {_value(other)} in B"
        yield f"changed argument: {name}{values}"
    if pair.kind == "added":
        for name, rounding in (("A", pair.rounding_a), ("B", pair.rounding_b)):
            if rounding is not None and rounding > 1:
                yield f"added: the call in {name} is wrong by {_number(rounding)} times what rounding allows"


def _where(pair: Aligned) -> str:
    return "before it" if pair.after is None else f"between {printable(pair.after, 3 * WIDTH)} and this call"


def _verb(names: list[str], one: str, several: str) -> str:
    """`"q differs"`, `"q and k differ"`."""
    return f"{names[0]} {one}" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} {several}"


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _module(call: StoredCall) -> str:
    name = printable(module_name(call.record.module) or "-", WIDTH)
    return f"{name} (rank {call.rank})" if call.rank else name


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
