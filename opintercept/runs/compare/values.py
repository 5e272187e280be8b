"""`Comparer`: compares two calls, their arguments and each operand and output, by hash, tensors or statistics.

Invariant: a verdict rests on what both runs recorded; what either left out is no difference.
Imports torch only if both runs have tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from opintercept._core.errors import OpInterceptError
from opintercept._core.tensors import TensorMeta
from opintercept._core.text import short_name
from opintercept._ops.scratch import FOR_PROGRAM, OVERWRITES, SCRATCH, UNWRITTEN
from opintercept._values.stats import Values
from opintercept.runs.compare.difference import NOT_RECORDED, By, RoleDifference
from opintercept.runs.compare.pairing import metas, operator_name
from opintercept.runs.store.codec import MAX_ROLES, StoredCall, is_output
from opintercept.runs.store.run import Run

if TYPE_CHECKING:
    import torch

MAX_TENSOR = 1 << 30  # bytes of a tensor that is read

_WITH_METADATA = ("lhs", "rhs", "bias")  # every run records shape and dtype of these
# A run on another device, or in another dtype, has to differ in these arguments.
_DTYPES = ("dtype", "out_dtype")
# Means and root mean squares are floating-point sums, whose last digits depend on the order in memory.
SUM_ERROR = 1e-6


class Verdict(NamedTuple):
    """The verdict on an operand or output without its values, as in `RoleDifference`."""

    equal: bool | None
    by: By | None


class Basis(NamedTuple):
    """What is known of an operand or output of which both runs have statistics.

    Attributes:
        same_shape: Whether the shapes are equal, but for flattened dimensions.
        same_dtype: Whether the dtypes are.
        hashed: Whether hashes can show that the values are equal.
        differs: Whether values that are not known to be equal count as different.
        same_count: Whether there are as many values.
    """

    same_shape: bool
    same_dtype: bool
    hashed: bool
    differs: bool
    same_count: bool


_Figures = tuple[float, float | None, float | None, float | None]  # absolute and relative error, ulp, cosine


class Comparer:
    """Compares a call of one run with a call of another, and keeps nothing of them.

    Args:
        a: The run that the other is measured against.
        b: The other run.
        rtol: As for `diff`.
        atol: As for `diff`.
        tensors: Whether to read the tensors of calls that differ.

    Attributes:
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        reads_tensors: Whether tensors are read.
    """

    def __init__(self, a: Run, b: Run, rtol: float = 0.0, atol: float = 0.0, tensors: bool = True) -> None:
        self._a, self._b = a, b
        self.rtol, self.atol = rtol, atol
        self._exact = not (rtol or atol)
        self.reads_tensors = tensors

    def arguments(self, a: StoredCall, b: StoredCall) -> tuple[tuple[str, Any, Any], ...]:
        """The arguments other than tensors that differ: name, value in `a`, value in `b`."""
        one, other = a.arguments, b.arguments
        if one is None or other is None:
            return ()  # a run of 0.1 has none
        same_func = a.record.func == b.record.func
        found = []
        for name in dict.fromkeys((*one, *other)):
            if name == "device" or (name in _DTYPES and not self._exact):
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
        if numbers and not self._exact:
            return bool(abs(x - y) <= self.atol + self.rtol * abs(x))
        return bool(x == y)

    def roles(self, a: StoredCall, b: StoredCall) -> tuple[RoleDifference, ...]:
        """Compare the operands and outputs, except those that one run did not record."""
        return tuple(self._role(*basis, a, b) for basis in self.bases(a, b))

    def bases(
        self, a: StoredCall, b: StoredCall
    ) -> Iterator[tuple[str, TensorMeta | None, TensorMeta | None, Basis | Verdict]]:
        """The operands and outputs to compare, and on what the verdict rests: on the signatures of both calls.

        Of statistics, only their counts and whether there are hashes is read.
        """
        metas_a, metas_b = metas(a), metas(b)
        same_operator = operator_name(a.record.op) == operator_name(b.record.op)
        for role in metas_a | metas_b:
            one, other = metas_a.get(role), metas_b.get(role)
            if any(_means_nothing(role, call) for call in (a, b)):
                continue
            if (one is None or other is None) and role not in _WITH_METADATA and not is_output(role):
                # One run may only not have recorded its values.
                arguments = (a if one is None else b).arguments
                if arguments is None or role.partition("[")[0] not in arguments:
                    continue
            if role not in ("lhs", "rhs", "output") and (one is None or other is None) and not same_operator:
                continue  # mm and an addition stand for addmm; another attention returns other logarithms of sums
            if role.startswith("output.") and one is not None and "int" in one.dtype:
                continue  # seed and offset of an attention's dropout, which mean nothing without dropout
            basis = self._basis(role, one, other, a, b, same_operator)
            if role == "output" and isinstance(basis, Basis) and short_name(a.record.op) in UNWRITTEN:
                basis = Verdict(True, "metadata")
            yield role, one, other, basis

    def _basis(
        self,
        role: str,
        one: TensorMeta | None,
        other: TensorMeta | None,
        a: StoredCall,
        b: StoredCall,
        same_operator: bool,
    ) -> Basis | Verdict:
        x, y = a.values.get(role), b.values.get(role)
        if one is None or other is None:
            # Only one call has it. A call that raised has no output, which the comparison of errors covers.
            return Verdict(None if a.error or b.error else False, "metadata")
        if role == "output" and not same_operator and (a.record.bias is None) != (b.record.bias is None):
            return Verdict(None, None)  # one output includes the bias, the other does not
        same_shape = _same_but_flattened(one.shape, other.shape)
        if not same_shape and (same_operator or sorted(one.shape) != sorted(other.shape)):
            return Verdict(False, "metadata")
        same_dtype = one.dtype == other.dtype
        if x is None or y is None:
            return Verdict(False, "metadata") if self._exact and not same_dtype else Verdict(None, None)
        hashed = x.hash is not None and y.hash is not None and same_shape
        differs = self._exact and (not same_dtype or hashed)
        return Basis(same_shape, same_dtype, hashed, differs, x.count == y.count)

    def _role(
        self,
        role: str,
        one: TensorMeta | None,
        other: TensorMeta | None,
        basis: Basis | Verdict,
        a: StoredCall,
        b: StoredCall,
    ) -> RoleDifference:
        x, y = a.values.get(role), b.values.get(role)

        def difference(equal: bool | None, by: By | None, *figures: float | None) -> RoleDifference:
            return RoleDifference(role, equal, by, one, other, x, y, *figures)

        if isinstance(basis, Verdict) or x is None or y is None:
            assert isinstance(basis, Verdict)
            return difference(*basis)
        same_shape, same_dtype, hashed, differs, _ = basis
        if same_shape and same_dtype and _same_hash(x, y):
            return difference(True, "hash", 0.0, 0.0)
        by: By
        figures = self._by_tensors(role, a, b) if same_shape else None
        if figures is None:
            bound, by = _least_error(x, y), "statistics"
            if bound is None:
                return difference(False, "metadata") if differs else difference(None, None)
            figures = (bound, None, None, None)
        elif (x.nan, x.inf) != (y.nan, y.inf) and x.count == y.count:
            figures, by = (math.inf, None, None, None), "statistics"  # the others are figures of finite values
        else:
            by = "sample" if a.tensors[role].endswith(".sample") else "tensors"
            if by == "sample" and (bound := _least_error(x, y)) is not None:
                figures = (max(figures[0], bound), *figures[1:])
        absolute, peak = figures[0], _peak(x)
        relative = 0.0 if not absolute else absolute / peak if peak else math.inf
        if not differs:
            equal = absolute <= self.atol + self.rtol * peak
            return difference(equal, by, absolute, relative, *figures[1:])
        if hashed and same_dtype and by == "statistics":
            by = "hash"
        return difference(False, by, absolute, relative, *figures[1:])

    def _by_tensors(self, role: str, a: StoredCall, b: StoredCall) -> _Figures | None:
        """The errors of the recorded values; None if they are missing, or cannot be compared."""
        names = a.tensors.get(role), b.tensors.get(role)
        if not self.reads_tensors or names[0] is None or names[1] is None:
            return None
        if names[0].endswith(".sample") != names[1].endswith(".sample"):
            return None  # a sample is comparable with one of the same places only
        try:
            x, y = self._a.tensor(a, role, MAX_TENSOR), self._b.tensor(b, role, MAX_TENSOR)
        except OpInterceptError:
            return None  # the file is lost, or does not hold what the call says
        if x is None or y is None or x.numel() != y.numel() or not x.numel():
            return None
        return _errors(x, y)


def _means_nothing(role: str, call: StoredCall) -> bool:
    """Return whether a tensor's values do not matter: scratch memory, or an operand that is only overwritten."""
    if is_output(role):
        place = role.removeprefix("output.")
        return place.isdecimal() and int(place) >= FOR_PROGRAM.get(call.record.op, MAX_ROLES)
    name = role.partition("[")[0]
    return name in SCRATCH or (name == "self" and short_name(call.record.op) in OVERWRITES)


def _errors(x: torch.Tensor, y: torch.Tensor) -> _Figures | None:
    import torch

    from opintercept._values.errors import Errors

    try:
        floating = all(t.is_floating_point() or t.is_complex() for t in (x, y))
        if not floating:
            x, y = x.to(torch.float64), y.to(torch.float64)
        elif x.is_complex() != y.is_complex():
            return None
        coarser = max(x.dtype, y.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        errors = Errors()
        errors.add(y, x, coarser)
    except (RuntimeError, TypeError):  # a dtype that cannot be widened
        return None
    return errors.absolute, errors.relative, errors.ulp if floating else None, errors.cosine


def _least_error(x: Values, y: Values) -> float | None:
    """A lower bound of the maximal absolute error, by statistics; None if they give none."""
    if (x.nan, x.inf, x.count) != (y.nan, y.inf, y.count):
        return math.inf if x.count == y.count else None
    sum_error = SUM_ERROR * max(_peak(x), _peak(y))
    gaps = []
    for one, other, error in (
        (x.min, y.min, 0.0),
        (x.max, y.max, 0.0),
        (x.mean, y.mean, sum_error),
        (x.rms, y.rms, sum_error),
    ):
        if one is None or other is None:
            if (one is None) != (other is None):
                return None
            continue
        gap = abs(one - other)
        gaps.append(math.inf if math.isnan(gap) else 0.0 if gap <= error else gap)
    return max(gaps, default=0.0)


def _same_hash(x: Values | None, y: Values | None) -> bool:
    return x is not None and y is not None and x.hash is not None and (x.hash, x.count) == (y.hash, y.count)


def _peak(values: Values) -> float:
    """The largest finite modulus."""
    ends = [abs(end) for end in (values.min, values.max) if end is not None and math.isfinite(end)]
    return max(ends, default=0.0)


def _same_but_flattened(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two shapes are equal, except that one may have flattened leading dimensions of the other."""
    return one == other or (math.prod(one) == math.prod(other) and one[-1:] == other[-1:] and min(one, default=0) >= 0)
