"""`Comparer`: what the signatures of two calls say of their operands and arguments, and how far tensors are apart.

Invariant: a verdict rests on what both runs recorded; what either left out is no difference. Must not import
numpy, which compares values in `tolerance`. Imports torch only if both runs have tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from opintercept._core.tensors import TensorMeta
from opintercept._ops.scratch import FOR_PROGRAM, LIKE, OVERWRITES, PADDED, SCRATCH, UNREAD, VIEWS, torchs_name
from opintercept.runs.compare.difference import NOT_RECORDED, By
from opintercept.runs.compare.pairing import metas
from opintercept.runs.program.names import operator_name
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.run import Run

_WITH_METADATA = ("lhs", "rhs", "bias")  # every run records shape and dtype of these
# A run on another device, or in another dtype, has to differ in these arguments.
_DTYPES = ("dtype", "out_dtype")
_CHANCES = ("dropout_p", "dropout")


class Basis(NamedTuple):
    """What the signatures of two calls say of an operand or output; `equal` and `by` count unless values decide."""

    role: str
    a: TensorMeta | None
    b: TensorMeta | None
    equal: bool | None = None
    by: By | None = None
    valued: bool = False  # values decide: both runs have them
    hashed: bool = False  # equal hashes show that the values are equal
    differs: bool = False  # values that are not known to be equal count as different
    same_shape: bool = False  # but for flattened dimensions
    same_count: bool = False

    @property
    def only_one(self) -> bool:
        """Whether only one of the calls has it."""
        return self.a is None or self.b is None


class TensorErrors(NamedTuple):
    """How far a tensor of one run is from that of the other, as in `RoleDifference`."""

    by: By  # `"tensors"`, or `"sample"` if only some values were recorded
    max_absolute: float
    max_relative: float
    max_ulp: float | None
    cosine: float


class Comparer:
    """Compares a call of one run with a call of another, as `diff` does, and keeps nothing of them."""

    def __init__(self, a: Run, b: Run, rtol: float = 0.0, atol: float = 0.0, tensors: bool = True) -> None:
        self.a, self.b = a, b
        self.rtol, self.atol = rtol, atol
        self.tolerant = bool(rtol or atol)
        self.reads_tensors = tensors

    def arguments(self, a: StoredCall, b: StoredCall) -> tuple[tuple[str, Any, Any], ...]:
        """The arguments other than tensors that differ: name, value in `a`, value in `b`."""
        one, other = a.arguments or {}, b.arguments or {}
        same_func = a.record.func == b.record.func
        found = []
        for name in dict.fromkeys((*one, *other)):
            if name == "device" or (name in _DTYPES and self.tolerant):
                continue
            if name in one and name in other:
                x, y = one[name], other[name]
                # Another kernel for the same job may compute what this one is given.
                if not self._equal_arguments(x, y) and (same_func or (x is not None and y is not None)):
                    found.append((name, x, y))
            elif same_func and one and other:
                x, y = one.get(name, NOT_RECORDED), other.get(name, NOT_RECORDED)
                without = b if name in one else a
                if (x is None or y is None) and not any(role.partition("[")[0] == name for role in metas(without)):
                    found.append((name, x, y))
        return tuple(found)

    def _equal_arguments(self, x: Any, y: Any) -> bool:
        numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (x, y))
        if numbers and self.tolerant:
            return bool(abs(x - y) <= self.atol + self.rtol * abs(x))
        return bool(x == y)

    def bases(self, a: StoredCall, b: StoredCall) -> Iterator[Basis]:
        """The operands and outputs to compare, except those that one run did not record.

        Of statistics, only their counts and whether there are hashes is read.
        """
        metas_a, metas_b = metas(a), metas(b)
        same_operator = operator_name(a.record.op) == operator_name(b.record.op)
        for role in metas_a | metas_b:
            one, other = metas_a.get(role), metas_b.get(role)
            only_one = one is None or other is None
            if any(_means_nothing(role, call) for call in (a, b)):
                continue
            arguments = (a if one is None else b).arguments or {}
            if only_one and not (role in _WITH_METADATA or is_output(role) or role.partition("[")[0] in arguments):
                continue  # one run may only not have recorded its values
            if role not in ("lhs", "rhs", "output") and only_one and not same_operator:
                continue  # mm and an addition stand for addmm; another attention returns other logarithms of sums
            if role.startswith("output.") and one is not None and "int" in one.dtype:
                continue  # seed and offset of an attention's dropout, which mean nothing without dropout
            basis = self._basis(Basis(role, one, other), a, b, same_operator)
            name = torchs_name(a.record.op) if is_output(role) and same_operator else ""
            if name in VIEWS or (name in UNREAD and basis.equal is None):
                basis = Basis(role, one, other, True, "metadata")  # a view of what differs adds nothing to it
            yield basis

    def _basis(self, bare: Basis, a: StoredCall, b: StoredCall, same_operator: bool) -> Basis:
        role, one, other, *_ = bare
        x, y = a.values.get(role), b.values.get(role)
        if one is None or other is None:
            # Only one call has it. A call that raised has no output, which the comparison of errors covers.
            raised = is_output(role) and (a.error or b.error)
            return bare._replace(equal=None if raised else False, by="metadata")
        if role == "output" and not same_operator and (a.record.bias is None) != (b.record.bias is None):
            return bare  # one output includes the bias, the other does not
        same_shape = (
            one.shape == other.shape
            or (  # but for leading dimensions that one may have flattened
                math.prod(one.shape) == math.prod(other.shape) and one.shape[-1:] == other.shape[-1:]
            )
        )
        if not same_shape and (same_operator or sorted(one.shape) != sorted(other.shape)):
            return bare._replace(equal=False, by="metadata")
        same_dtype = one.dtype == other.dtype
        if x is None or y is None:
            return bare._replace(equal=False, by="metadata") if not self.tolerant and not same_dtype else bare
        hashed = x.hash is not None and y.hash is not None and same_shape
        differs = not self.tolerant and (not same_dtype or hashed)
        return Basis(role, one, other, None, None, True, hashed and same_dtype, differs, same_shape, x.count == y.count)

    def errors(self, role: str, a: StoredCall, b: StoredCall) -> TensorErrors | None:
        """The errors of the recorded values; None if they are missing, or cannot be compared."""
        names = a.tensors.get(role), b.tensors.get(role)
        if not self.reads_tensors or names[0] is None or names[1] is None:
            return None
        is_sample = names[0].endswith(".sample")
        if is_sample != names[1].endswith(".sample"):
            return None  # a sample is comparable with one of the same places only
        from opintercept._values.errors import between

        try:
            x, y = self.a.tensor(a, role), self.b.tensor(b, role)
            if x is None or y is None or not 0 < x.numel() == y.numel() or x.is_complex() != y.is_complex():
                return None
            found = between(y, x)
        except (RuntimeError, TypeError):
            return None  # the file is lost, or does not hold what the call says; or a dtype cannot be widened
        floating = all(each.is_floating_point() or each.is_complex() for each in (x, y))
        by: By = "sample" if is_sample else "tensors"
        return TensorErrors(by, found.absolute, found.relative, found.ulp if floating else None, found.cosine)


def is_random(call: StoredCall) -> bool:
    """Whether a call draws random numbers, of which nothing is recorded."""
    given = call.arguments or {}
    if given.get("train") is False or given.get("training") is False:
        return False
    names = ("p", *_CHANCES) if "dropout" in call.record.op else _CHANCES
    return any(isinstance(given.get(name), (int, float)) and given[name] > 0 for name in names)


def _means_nothing(role: str, call: StoredCall) -> bool:
    """Return whether a tensor's values do not matter: scratch memory, or an operand that is not read."""
    if is_output(role):
        place = role.removeprefix("output.")
        return place.isdecimal() and int(place) >= FOR_PROGRAM.get(call.record.op, math.inf)
    name = role.partition("[")[0]
    op = call.record.op
    return name in SCRATCH or (name, op) in PADDED or (name == "self" and not _reads_self(call))


def _reads_self(call: StoredCall) -> bool:
    name = torchs_name(call.record.op)
    is_given = name == "bernoulli" and ("p" in call.values or "p" in (call.arguments or {}))
    return not (is_given or name in OVERWRITES or name in LIKE)
