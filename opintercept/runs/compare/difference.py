"""`Difference`: the result of `diff`, and the dataclasses in it. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from opintercept._core.record import plain
from opintercept._core.tables import Cells, Table
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import counted
from opintercept._values.stats import Values
from opintercept.runs.compare.pairing import Pairing
from opintercept.runs.store.codec import StoredCall, is_output

Kind = Literal["equal", "added", "changed argument", "changed operand", "inherited", "unclear", "not compared"]
KINDS: tuple[Kind, ...] = (
    "equal",
    "added",
    "changed argument",
    "changed operand",
    "inherited",
    "unclear",
    "not compared",
)
By = Literal["hash", "tensors", "sample", "statistics", "metadata"]
# Stands for an argument that is a tensor without values, or that has no plain form.
NOT_RECORDED = "(not recorded)"


class Plain:
    """A dataclass with `as_dict`."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        found: dict[str, Any] = plain(self)
        return found


@dataclass(frozen=True, slots=True)
class RoleDifference(Plain):
    """One operand or output of two calls.

    Attributes:
        role: `"lhs"`, `"rhs"`, `"bias"`, `"value"` (of an attention), `"output"`, `"output.1"`, ..., or the name of
            a parameter: `"attn_mask"`, `"weights[0]"`.
        equal: Whether it is equal in both runs, within the tolerance if there is one. None if that is unknown.
        by: What `equal` rests on: `"hash"`, all values (`"tensors"`), some values (`"sample"`), `"statistics"`, or
            `"metadata"`: the shape, the dtype, or that only one of the calls has it. None if `equal` is.
        a: Its shape and dtype in the first run; None if the call has none. Runs do not record the shape of a `"value"`
            and neither shape nor dtype of other parameters: those have one dimension here, and no dtype.
        b: Its shape and dtype in the second run.
        a_values: Statistics and hash in the first run.
        b_values: Statistics and hash in the second run.
        max_absolute: `max(abs(b - a))`. With `"sample"` and `"statistics"`, a lower bound: no mean, extremum or root
            mean square differs by more than the values do. Infinite if different elements are NaN or infinite, which
            their counts show even if a sample has none. None if unknown, as for different shapes.
        relative: `max_absolute` divided by the largest finite modulus in the first run.
        max_relative: `max(abs(b - a) / abs(a))`, element by element. Known from tensors and samples only, as are the
            next two.
        max_ulp: The largest error in units in the last place of the coarser dtype; see `hooks.reference.ReferenceRow`.
        cosine: The cosine similarity.
    """

    role: str
    equal: bool | None
    by: By | None
    a: TensorMeta | None
    b: TensorMeta | None
    a_values: Values | None
    b_values: Values | None
    max_absolute: float | None = None
    relative: float | None = None
    max_relative: float | None = None
    max_ulp: float | None = None
    cosine: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        found = Plain.as_dict(self)
        for name in ("a", "b"):
            meta: TensorMeta | None = getattr(self, name)
            found[name] = meta and {"shape": list(meta.shape), "dtype": meta.dtype, "device": meta.device}
        return found


def order(relative: float | None) -> float:
    """Return a relative error as a sort key; an unknown one is the smallest."""
    return -1.0 if relative is None or math.isnan(relative) else relative


@dataclass(frozen=True, slots=True)
class CallDifference:
    """Two calls that were compared.

    Attributes:
        kind: `"equal"`. `"added"`: the operands are equal and the output differs. `"changed argument"`: an argument
            that is not a tensor differs. `"changed operand"`: an operand differs, and no differing call before
            explains it. `"inherited"`: an operand differs that can come from a differing call before. `"unclear"`: the
            recorded operands are equal and the output differs, but the operator draws random numbers, or the run of an
            older version did not record all operands, or one call raised. `"not compared"`: no recorded values show
            whether the outputs are equal.
        pairing: Why the two belong together: the same module, operator and phase, and among those the same
            `"ordinal"`; or the same place in an aligned `"sequence"`; the same module and phase but another operator
            of the `"family"`; the same `"shape"` and order in a module of another name.
        changed: The operands that differ and that no differing call before explains.
        arguments: The arguments that differ: name, value in the first run, value in the second. `"(not recorded)"`
            stands for a tensor whose values were not recorded, and for an argument that has no plain form.
        a: The call of the first run.
        b: The call of the second run.
        roles: Operands and outputs.
    """

    kind: Kind
    pairing: Pairing
    changed: tuple[str, ...]
    arguments: tuple[tuple[str, Any, Any], ...]
    a: StoredCall
    b: StoredCall
    roles: tuple[RoleDifference, ...]

    @property
    def output(self) -> RoleDifference | None:
        """The output that differs most, or the first."""
        outputs = [role for role in self.roles if is_output(role.role)]
        return max(outputs, key=lambda role: order(role.relative), default=None)

    @property
    def operands(self) -> tuple[RoleDifference, ...]:
        """The operands, and other tensors that are arguments."""
        return tuple(role for role in self.roles if not is_output(role.role))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return {
            "kind": self.kind,
            "pairing": self.pairing,
            "changed": list(self.changed),
            "arguments": [list(argument) for argument in self.arguments],
            "a": identity(self.a),
            "b": identity(self.b),
            "roles": [role.as_dict() for role in self.roles],
        }


def identity(call: StoredCall) -> dict[str, Any]:
    """Return what identifies a call, as plain data."""
    record = call.record
    names = ("index", "step", "op", "phase", "module", "source", "grad_of")
    return {"rank": call.rank} | {name: getattr(record, name) for name in names} | {"error": call.error}


@dataclass(frozen=True, slots=True)
class ModuleDifference(Plain):
    """The calls of a module in one phase.

    Attributes:
        ranks: The ranks of the two processes, in the first and the second run.
        module: The module's name in the first run; None if it is unknown.
        other: Its name in the second run.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        calls: How many calls have a counterpart.
        kinds: How many of these are of each kind.
        relative: The largest `RoleDifference.relative` of an output; None if none is known.
        index: `CallRecord.index` of the first call that differs, in the first run.
    """

    ranks: tuple[int, int]
    module: str | None
    other: str | None
    phase: str
    calls: int
    kinds: dict[Kind, int]
    relative: float | None
    index: int


@dataclass(frozen=True, slots=True)
class Unmatched(Plain):
    """Calls of one run that have no counterpart in the other, and share everything up to `grad_of`.

    Attributes:
        run: `"a"` or `"b"`.
        rank: The rank of the process.
        module: The module's name.
        op: The operator.
        phase: `"forward"`, `"backward"` or `"recompute"`.
        grad_of: In backward, the operand whose gradient is computed.
        calls: How many calls they are.
        index: `CallRecord.index` of the first.
    """

    run: Literal["a", "b"]
    rank: int
    module: str | None
    op: str
    phase: str
    grad_of: str | None
    calls: int
    index: int


@dataclass(frozen=True, slots=True)
class Absent(Plain):
    """A process of which only one of the runs has calls.

    Attributes:
        run: The run without them, `"a"` or `"b"`.
        rank: The rank of the process.
        empty: Whether that run has a folder for the process, without calls.
        calls: How many calls of the process the other run has.
    """

    run: Literal["a", "b"]
    rank: int
    empty: bool
    calls: int


_MODULE = ("module", "other", "phase", "calls", "relative", "index")


@dataclass(frozen=True, slots=True)
class Difference(Table):
    """The result of `diff`. Its table and its data frame have a row for each module that differs.

    Attributes:
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
        first: The first differing call in the order of the first run; with several processes, the one with the
            smallest step and index. None if all are equal.
        before: How many calls before `first` have no counterpart, in each run: their effects were not compared.
        worst: The calls with the largest `relative` of an output, largest first; without `StoredCall.given`.
        modules: The modules with a differing call, in the order in which they first differ.
        modules_in_all: How many such modules there are; `modules` has at most `limit`.
        unmatched: The calls without a counterpart.
        unmatched_calls: How many calls these are, in each run.
    """

    settings: tuple[tuple[str, str, str], ...]
    ranks: tuple[tuple[int, int], ...]
    absent: tuple[Absent, ...]
    calls: tuple[int, int]
    pairs: int
    kinds: dict[Kind, int]
    by: dict[str, int]
    pairings: dict[Pairing, int]
    metadata: int
    first: CallDifference | None
    before: tuple[int, int]
    worst: tuple[CallDifference, ...]
    modules: tuple[ModuleDifference, ...]
    modules_in_all: int
    unmatched: tuple[Unmatched, ...]
    unmatched_calls: tuple[int, int]

    def rows(self) -> tuple[ModuleDifference, ...]:
        """The modules that differ."""
        return self.modules

    def _columns(self) -> Mapping[str, Any]:
        plain = {name: [getattr(row, name) for row in self.modules] for name in _MODULE}
        ranks = {f"rank_{side}": [row.ranks[n] for row in self.modules] for n, side in enumerate("ab")}
        return ranks | plain | {kind: [row.kinds.get(kind, 0) for row in self.modules] for kind in KINDS}

    def _cells(self) -> Cells:
        columns = self._columns()
        kinds = [kind for kind in KINDS if any(columns[kind])]
        rows = [
            [
                row.module or ("(unknown)" if row.module is None else "(outermost)"),
                row.phase,
                f"{row.index}",
                f"{row.calls:,}",
                *(f"{row.kinds[kind]:,}" if kind in row.kinds else "" for kind in kinds),
                "" if row.relative is None else f"{row.relative:.2g}",
            ]
            for row in self.modules
        ]
        left_out = self.modules_in_all - len(self.modules)
        notes = [f"{self.pairs:,} calls compared" + (f": {self.verdict}" if self.equal else "")]
        if left_out:
            notes.append(f"and {counted(left_out, 'more module')}; a larger limit= has them")
        return Cells(["module", "phase", "first", "calls", *kinds, "max abs / max |A|"], rows, 2, notes)

    @property
    def equal(self) -> bool:
        """Whether no call differs, each has a counterpart, and both runs have the same processes."""
        return self.first is None and not any(self.unmatched_calls) and not self.absent

    @property
    def verdict(self) -> str:
        """The value of `equal` in words, limited to what was compared."""
        uncompared = self.kinds.get("not compared", 0)
        if self.pairs == uncompared:
            return "no values were compared"
        return "no call differs" if not uncompared else "no call whose values were compared differs"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, in which floats can be infinite or NaN."""
        found: dict[str, Any] = {"equal": self.equal} | {name: getattr(self, name) for name in self.__slots__}
        found["first"] = self.first and self.first.as_dict()
        found["worst"] = [call.as_dict() for call in self.worst]
        for name in ("absent", "modules", "unmatched"):
            found[name] = [row.as_dict() for row in found[name]]
        return found
