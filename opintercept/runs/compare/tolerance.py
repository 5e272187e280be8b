"""The one comparer of values: it compares columns of statistics and hashes, of which a single call has one row.

`Rules` keeps what the signatures of two calls decide, `Compared` adds it to what the values say, and `role_differences`
gives the details of one pair. Invariant: a bound of an error is never larger than the error.
Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from opintercept._ops.scratch import FILLS, torchs_name
from opintercept._ops.slots import slots_of
from opintercept._values.stats import Values
from opintercept.runs.compare.difference import RoleDifference
from opintercept.runs.compare.operands import Basis, Comparer, TensorErrors, is_random
from opintercept.runs.compare.pairing import BY
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import FIGURES, Array, Arrays, Columns
from opintercept.runs.sums import CodeNumbers

# A set of operands is a number: the sum of these. All tensors without a role of their own count as one operand.
OPERANDS = {"lhs": 1, "rhs": 2, "bias": 4, "value": 8, "attn_mask": 16, "grad_out": 32, "logsumexp": 64}
OTHERS = 128
# Means and root mean squares are floating-point sums, whose last digits depend on the order in memory.
SUM_ERROR = 1e-6

_BITS = ("valued", "hashed", "differs", "same_shape", "same_count")
_NOTHING, _STATISTICS, _METADATA, _HASH = (BY.index(by) for by in ("nothing", "statistics", "metadata", "hash"))
_NO_BASIS = Basis("", None, None)
_DETAILS = ("max_relative", "max_ulp", "cosine")  # what only tensors show


def operand(role: str) -> int:
    """The number of an operand; 0 for an output."""
    return 0 if is_output(role) else OPERANDS.get(role, OTHERS)


class Verdicts(NamedTuple):
    """The verdicts on one operand or output of several pairs, as in `RoleDifference`; NaN for unknown errors."""

    equal: Array
    differs: Array  # where it is neither, nothing shows it
    close: Array  # where only a tolerance makes it equal
    by: Array  # as an index into `BY`
    absolute: Array  # or a lower bound
    relative: Array
    details: Arrays  # `_DETAILS` of tensors that were read


def verdicts(
    comparer: Comparer,
    basis: Arrays,
    x: Arrays,
    y: Arrays,
    pairs: Array,
    errors: Callable[[int], TensorErrors | None] | None,
) -> Verdicts:
    """Compare an operand or output; `errors` reads the tensors of a pair where neither hashes nor counts decide."""
    same = basis["hashed"] & basis["same_count"] & (x["hash"] == y["hash"])
    uneven = (x["nan"] != y["nan"]) | (x["inf"] != y["inf"])
    bound, unknown = _least_errors(x, y)
    absolute, unknown = np.where(uneven, np.inf, bound), np.where(uneven, False, unknown) | ~basis["same_count"]
    absolute[same], unknown[same] = 0.0, False
    by = np.where(same, _HASH, np.where(unknown, np.where(basis["differs"], _METADATA, _NOTHING), _STATISTICS))
    details = {name: np.full(len(same), np.nan) for name in _DETAILS}
    if errors is not None:
        # Tensors have only errors of finite values; counts show that others differ.
        for row in np.flatnonzero(~same & basis["same_shape"] & ~(uneven & basis["same_count"])).tolist():
            if (found := errors(int(pairs[row]))) is None:
                continue
            bounded = found.by == "sample" and not unknown[row]
            absolute[row] = max(found.max_absolute, absolute[row]) if bounded else found.max_absolute
            unknown[row], by[row] = False, BY.index(found.by)
            for name, column in details.items():
                value = getattr(found, name)
                column[row] = np.nan if value is None else value
    peaks = _peaks(x)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        relative = np.where(absolute == 0, 0.0, np.where(peaks > 0, absolute / peaks, np.inf))
        within = absolute <= comparer.atol + comparer.rtol * peaks
    equal = same | (~basis["differs"] & ~unknown & within)
    differs = ~same & np.where(unknown, basis["differs"], basis["differs"] | ~within)
    by[differs & basis["differs"] & basis["hashed"] & (by == _STATISTICS)] = _HASH
    absolute[unknown], relative[unknown] = np.nan, np.nan
    close = equal & ~same & comparer.tolerant & (basis["hashed"] | (absolute > 0))
    return Verdicts(equal, differs, close, by, absolute, relative, details)


def _least_errors(x: Arrays, y: Arrays) -> tuple[Array, Array]:
    """Lower bounds of the maximal absolute error, by statistics, and where they give none."""
    sum_error = SUM_ERROR * np.maximum(_peaks(x), _peaks(y))
    bound, unknown = np.zeros(len(sum_error)), np.zeros(len(sum_error), bool)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in FIGURES:
            lacks_x, lacks_y = np.isnan(x[name]), np.isnan(y[name])
            unknown |= lacks_x != lacks_y
            gap = np.abs(x[name] - y[name])
            gap = np.where(np.isnan(gap), np.where(lacks_x | lacks_y, 0.0, np.inf), gap)
            bound = np.maximum(bound, np.where(gap <= (sum_error if name in ("mean", "rms") else 0.0), 0.0, gap))
    return bound, unknown


def _peaks(x: Arrays) -> Array:
    """The largest finite modulus."""
    ends = [np.where(np.isfinite(x[name]), np.abs(x[name]), 0.0) for name in ("min", "max")]
    return np.maximum(*ends)


def columns_of(values: Sequence[Values]) -> Arrays:
    """Statistics of calls as columns."""
    made = {"hash": np.array([int(each.hash or "0", 16) for each in values], np.uint64)}
    made |= {name: np.array([getattr(each, name) for each in values], np.int64) for name in ("nan", "inf")}
    return made | {name: np.array([getattr(each, name) for each in values], np.float64) for name in FIGURES}


def role_differences(comparer: Comparer, a: StoredCall, b: StoredCall) -> tuple[RoleDifference, ...]:
    """The operands and outputs of two calls, except those that one run did not record."""
    return tuple(_role_difference(comparer, basis, a, b) for basis in comparer.bases(a, b))


def _role_difference(comparer: Comparer, basis: Basis, a: StoredCall, b: StoredCall) -> RoleDifference:
    role, x, y = basis.role, a.values.get(basis.role), b.values.get(basis.role)
    known: dict[str, Any] = {"equal": basis.equal, "by": basis.by}
    if basis.valued and x is not None and y is not None:
        bits = {name: np.array([getattr(basis, name)]) for name in _BITS}
        sides = columns_of([x]), columns_of([y])
        found = verdicts(comparer, bits, *sides, np.zeros(1, int), lambda _: comparer.errors(role, a, b))
        known = {"equal": bool(found.equal[0]) if found.equal[0] or found.differs[0] else None}
        known["by"] = None if found.by[0] == _NOTHING else BY[found.by[0]]
        errors = {"max_absolute": found.absolute, "relative": found.relative} | found.details
        known |= {name: None if np.isnan(column[0]) else float(column[0]) for name, column in errors.items()}
    return RoleDifference(role=role, a=basis.a, b=basis.b, a_values=x, b_values=y, **known)


class Rule(NamedTuple):
    """What the signatures of two calls decide."""

    metadata: bool  # they differ in a shape or dtype
    argument: bool  # they differ in an argument that is not a tensor
    unclear: bool  # an output can differ although all recorded operands are equal
    output_differs: bool
    uncompared: bool  # nothing shows whether the outputs are equal
    fills: bool  # where outputs are equal, it has overwritten what differed in `self`
    differing: int  # the operands that differ
    changed: int  # those of them that only one of the calls has, or that are parameters
    by: int  # what the verdicts of equal operands and outputs rest on, as an index into `BY`
    bases: Mapping[str, Basis]  # the operands and outputs that values decide
    slots: tuple[Mapping[str, str], Mapping[str, str]]  # where records of both calls have them
    parameters: frozenset[str]  # those of them that are parameters, so that a difference counts as changed


_DECIDED = Rule._fields.index("bases")  # how many fields a pair takes from its rule as they are


class Rules:
    """The rules for the calls of two processes, one for each pair of signatures, of which calls are made."""

    def __init__(self, comparer: Comparer, sides: tuple[Columns, Columns], is_inference: tuple[bool, bool]) -> None:
        self._comparer, self._sides, self._is_inference = comparer, sides, is_inference
        self._numbers = CodeNumbers()
        self._known: dict[int, Rule] = {}

    def numbers(self, signature_a: Array, signature_b: Array) -> Array:
        """The numbers of some pairs of signatures."""
        return self._numbers.of((signature_a << 32) | signature_b)[0]

    def of(self, numbers: Array) -> tuple[list[Rule], Array]:
        """The rules of some pairs of signatures, by their numbers, and which of them each pair has."""
        counts = np.bincount(numbers)
        used = np.flatnonzero(counts)
        counts[used] = np.arange(len(used))
        for number in used.tolist():
            if number not in self._known:
                both = zip(self._sides, divmod(int(self._numbers.codes()[number]), 1 << 32), strict=True)
                self._known[number] = self._rule(*(side.signature(each).template for side, each in both))
        return [self._known[number] for number in used.tolist()], counts[numbers]

    def _rule(self, a: StoredCall, b: StoredCall) -> Rule:
        metadata = output_differs = uncompared = False
        unclear, by = is_random(a) or is_random(b), _HASH
        differing = changed = 0
        bases: dict[str, Basis] = {}
        parameters = set()
        for basis in self._comparer.bases(a, b):
            role, one, other = basis.role, basis.a, basis.b
            if one is not None and other is not None:
                metadata |= one.shape != other.shape or one.dtype != other.dtype
            sides = zip((one, other), self._is_inference, strict=True)
            is_parameter = any(meta is not None and meta.requires_grad and inference for meta, inference in sides)
            if basis.valued:
                bases[role] = basis
                if is_parameter:
                    parameters.add(role)
            elif basis.equal:
                by = _METADATA
            elif is_output(role):
                output_differs |= basis.equal is False
                uncompared |= role == "output" and basis.equal is None and not basis.only_one
            elif basis.equal is None:
                unclear = True
            else:
                differing |= operand(role)
                # No value of another call explains an operand that only one of them has, nor a parameter.
                changed |= operand(role) if basis.only_one or is_parameter else 0
        argument = bool(self._comparer.arguments(a, b))
        fills = all(torchs_name(call.record.op) in FILLS for call in (a, b))
        found = metadata, argument, unclear, output_differs, uncompared, fills, differing, changed, by
        return Rule(*found, bases, (slots_of(a.values), slots_of(b.values)), frozenset(parameters))


def hashes_decide(rules: Sequence[Rule], role: str) -> bool:
    """Whether only hashes matter of an operand: what has other values differs, by however little."""
    return operand(role) > 0 and all(rule.bases[role].differs for rule in rules if role in rule.bases)


# Takes a role and the numbers of some rows, and returns the columns of these; only hashes where these decide.
Side = Callable[[str, Array], Arrays]
# Takes a role and the number of a row, and reads the tensors.
Errors = Callable[[str, int], TensorErrors | None]


class Compared:
    """Compares pairs of calls, of which each has the rule at its place in `which`.

    Attributes:
        metadata, argument, unclear, output_differs, uncompared, fills, differing, changed: As in `Rule`.
        by: Of what makes the pairs equal, what shows least, as an index into `BY`.
        relative: The largest relative error of an output; -1 if unknown.
    """

    def __init__(
        self, comparer: Comparer, rules: Sequence[Rule], which: Array, a: Side, b: Side, errors: Errors | None = None
    ) -> None:
        fields = [np.array(column)[which] for column in list(zip(*rules, strict=True))[:_DECIDED]]
        self.metadata, self.argument, self.unclear, self.output_differs, self.uncompared, self.fills, *numbers = fields
        self.differing, self.changed, self.by = (column.astype(np.uint8) for column in numbers)
        self.relative = np.full(len(which), -1.0)
        for role in sorted(dict.fromkeys(role for rule in rules for role in rule.bases), key=operand):  # outputs first
            bases = [rule.bases.get(role, _NO_BASIS) for rule in rules]
            rows = np.flatnonzero(np.array([basis.valued for basis in bases])[which])
            if not len(rows):
                continue
            basis = {name: np.array([getattr(each, name) for each in bases])[which[rows]] for name in _BITS}
            parameters = np.array([role in rule.parameters for rule in rules])[which[rows]]
            x, y = a(role, rows), b(role, rows)
            if hashes_decide(rules, role):
                differs = ~(basis["hashed"] & basis["same_count"] & (x["hash"] == y["hash"]))
            else:
                read = None if errors is None else partial(errors, role)
                found = verdicts(comparer, basis, x, y, rows, read)
                self._add(role, rows, found)
                differs = found.differs
            if role == "self":
                differs = differs & ~(self.fills[rows] & ~self.output_differs[rows] & ~self.uncompared[rows])
            if number := operand(role):
                self.differing[rows[differs]] |= number
                self.changed[rows[differs & parameters]] |= number

    def _add(self, role: str, rows: Array, found: Verdicts) -> None:
        neither = ~found.equal & ~found.differs
        if operand(role):
            self.unclear[rows] |= neither | found.close
        else:
            self.output_differs[rows] |= found.differs
            if role == "output":
                self.uncompared[rows] |= neither
            self.relative[rows] = np.fmax(self.relative[rows], found.relative)
        self.by[rows] = np.where(found.equal, np.minimum(self.by[rows], found.by), self.by[rows])
