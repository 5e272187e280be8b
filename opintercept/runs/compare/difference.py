"""The rows of a comparison of two runs: calls, modules and processes that differ. Must not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from opintercept._core.record import Plain
from opintercept._core.tensors import TensorMeta
from opintercept._values.stats import Values
from opintercept.runs.compare.pairing import Pairing
from opintercept.runs.store.codec import StoredCall, is_output

Kind = Literal[
    "equal", "added", "changed argument", "changed operand", "inherited", "rounding", "unclear", "not compared"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
By = Literal["hash", "tensors", "sample", "statistics", "metadata"]
# Stands for an argument that is a tensor without values, or that has no plain form.
NOT_RECORDED = "(not recorded)"


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
class CallDifference(Plain):
    """Two calls that were compared.

    Attributes:
        kind: `"equal"`. `"added"`: the operands are equal and the output differs. `"changed argument"`: an argument
            that is not a tensor differs. `"changed operand"`: an operand differs, and no differing call before explains
            it. `"inherited"`: an operand differs that can come from a differing call before. `"rounding"`: the two
            differ, and the judge of `why` finds that nothing comes of it but rounding. `"unclear"`: the recorded
            operands are equal and the output differs, but the operator draws random numbers, the run of an older
            version did not record all operands, one call raised, or only a tolerance makes the operands equal.
            `"not compared"`: no recorded values show whether the outputs are equal.
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
