"""`Alignment`: the result of `align`, and the dataclasses in it. Must not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from opintercept._core.tables import Cells, Table
from opintercept.runs.compare.difference import Plain, identity
from opintercept.runs.store.codec import StoredCall

AlignedKind = Literal["equal", "close", "added", "changed operand", "inherited", "not compared"]
CAUSES: tuple[AlignedKind, ...] = ("changed operand", "added")
By = Literal["rows", "parts", "permuted", "values", "sum", "neighbours"]


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
        kind: `"equal"`: the outputs are equal. `"changed operand"`: the weight or the bias differs by more than other
            weights of these dtypes do; or the input differs by far more than all matmuls before, so that the
            cause lies between two matmuls. `"added"`: one of the matmuls is wrong by more than the rounding of its
            own operands; or the outputs of neighbours differ by far more than all matmuls before. `"inherited"`: the
            outputs differ, and a pair before is of one of these two kinds. `"close"`: they differ, and none is.
            `"not compared"`: not all values of the outputs have a counterpart.
        changed: The operands that `"changed operand"` means.
        changed_rows: The first rows of A's weight that differ by more than other weights do.
        weight: The largest relative error of a row of the weight.
        lhs: The relative error of the input, `norm(b - a) / norm(a)`.
        output: That of the output.
        max_absolute: The largest modulus of a difference of outputs.
        rounding_a: How far A's output is from the product of its operands in float64, in units of the rounding that it
            may have; above 16 is more than rounding. None if it is no plain product.
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
    changed_rows: tuple[int, ...] = ()
    weight: float | None = None
    lhs: float | None = None
    output: float | None = None
    max_absolute: float | None = None
    rounding_a: float | None = None
    rounding_b: float | None = None
    reason: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return plain | {"a": identity(self.a), "b": [identity(call) for call in self.b]}


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

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {"run": self.run, "call": identity(self.call), "reason": self.reason}


_PAIR = ("by", "rows", "of", "kind", "weight", "lhs", "output", "max_absolute", "rounding_a", "rounding_b", "reason")


@dataclass(frozen=True, slots=True)
class Alignment(Plain, Table):
    """The result of `align`. Its table and its data frame have a row for each pair.

    Attributes:
        calls: How many forward calls each run has.
        joined_b: How many of those of the second are joined.
        pairs: What is joined, in the order of the first run.
        apart: The calls that are not joined.
        first: The first pair whose kind is `"changed operand"` or `"added"`; None if there is none.
    """

    calls: tuple[int, int]
    joined_b: int
    pairs: tuple[Aligned, ...]
    apart: tuple[Apart, ...]
    first: Aligned | None

    def rows(self) -> tuple[Aligned, ...]:
        """The pairs."""
        return self.pairs

    def _columns(self) -> Mapping[str, Any]:
        a = [pair.a.record for pair in self.pairs]
        modules = [", ".join(dict.fromkeys(call.record.module or "-" for call in pair.b)) for pair in self.pairs]
        names = {"module": [record.module for record in a], "op": [record.op for record in a], "other": modules}
        return names | {name: [getattr(pair, name) for pair in self.pairs] for name in _PAIR}

    def _cells(self) -> Cells:
        columns = self._columns()
        left = ["module", "other", "by", "kind"]
        right = ["rows", "of", "weight", "output"]
        rows = [
            [*map(str, texts), *("" if n is None else f"{n:.3g}" for n in numbers)]
            for texts, numbers in zip(
                zip(*(columns[name] for name in left), strict=True),
                zip(*(columns[name] for name in right), strict=True),
                strict=True,
            )
        ]
        joined = ((len(self.pairs), self.calls[0], "A"), (self.joined_b, self.calls[1], "B"))
        notes = [f"joined: {' and '.join(f'{some:,} of {all_:,} calls of {run}' for some, all_, run in joined)}"]
        return Cells([*left, *right], rows, len(left), notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            "calls": list(self.calls),
            "joined": [len(self.pairs), self.joined_b],
            "first": self.first and self.first.as_dict(),
            "pairs": [pair.as_dict() for pair in self.pairs],
            "apart": [each.as_dict() for each in self.apart],
        }
