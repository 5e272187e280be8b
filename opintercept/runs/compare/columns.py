"""`RuleTable`: compares the columns of calls, by a rule for each pair of signatures.

Invariant: the verdicts are those of `Comparer.roles`, which also decides what the signatures alone decide, and what
the columns lack. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from opintercept.runs.compare.values import SUM_ERROR, Basis, Comparer
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import FIGURES, ROLES, SLOTS, Array, Arrays

# A set of operands is a number: the sum of these. All tensors without a role of their own count as one operand.
OPERANDS = {"lhs": 1, "rhs": 2, "bias": 4, "value": 8, "attn_mask": 16, "grad_out": 32, "logsumexp": 64}
OTHERS = 128
_SLOTS = tuple(SLOTS)


def operand(role: str) -> int:
    """The number of an operand; 0 for an output."""
    return 0 if is_output(role) else OPERANDS.get(role, OTHERS)


class SignaturePair(NamedTuple):
    """The part of a comparison that the signatures of two calls decide.

    Attributes:
        slow: Whether some tensors have statistics that are in no column.
        metadata: Whether they differ in a shape or dtype.
        argument: Whether they differ in an argument that is not a tensor.
        unclear: Whether an output can differ although all recorded operands are equal.
        differing: The operands that differ.
        changed: Those of them that only one of the calls has, or that are parameters.
        adds: Whether an output differs.
        uncompared: Whether nothing shows whether the outputs are equal.
        bases: What is to be compared in each slot.
        alone: Which slots belong to parameters, so that a difference counts as changed.
    """

    slow: bool
    metadata: bool
    argument: bool
    unclear: bool
    differing: int
    changed: int
    adds: bool
    uncompared: bool
    bases: dict[str, Basis]
    alone: frozenset[str]


class RuleTable:
    """The rules for the calls of two processes, one for each pair of signatures.

    Args:
        comparer: Compares two calls.
        signatures: For each process, a function that returns a call with the signature of a number.
        is_unclear: Whether an output can differ although all recorded operands are equal.
        only_looks: Whether a process trains nothing, for each.
    """

    def __init__(
        self,
        comparer: Comparer,
        signatures: tuple[Callable[[int], StoredCall], Callable[[int], StoredCall]],
        is_unclear: Callable[[StoredCall, StoredCall], bool],
        is_inference: tuple[bool, bool],
    ) -> None:
        self._comparer, self._signatures, self._is_unclear, self._is_inference = (
            comparer,
            signatures,
            is_unclear,
            is_inference,
        )
        self._numbers: dict[tuple[int, int], int] = {}
        self._rules: list[tuple[int, ...]] = []
        self._table: Arrays | None = None

    def numbers(self, signature_a: Array, signature_b: Array) -> Array:
        """The rule of each pair of signatures."""
        codes, inverse = np.unique((signature_a.astype(np.int64) << 32) | signature_b, return_inverse=True)
        return np.array([self._number(code >> 32, code & 0xFFFFFFFF) for code in codes.tolist()], np.int32)[inverse]

    def _number(self, signature_a: int, signature_b: int) -> int:
        known = self._numbers.get((signature_a, signature_b))
        if known is None:
            known = self._numbers[signature_a, signature_b] = len(self._rules)
            self._rules.append(_packed(self._rule(self._signatures[0](signature_a), self._signatures[1](signature_b))))
            self._table = None
        return known

    def table(self) -> Arrays:
        """The fields of the rules, by number."""
        if self._table is None:
            self._table = dict(zip(_PACKED, np.array(self._rules, np.int64).reshape(-1, len(_PACKED)).T, strict=True))
        return self._table

    def _rule(self, a: StoredCall, b: StoredCall) -> SignaturePair:
        slow = metadata = adds = uncompared = False
        unclear = self._is_unclear(a, b)
        differing = changed = 0
        bases: dict[str, Basis] = {}
        alone = set()
        for role, one, other, basis in self._comparer.bases(a, b):
            if one is not None and other is not None:
                metadata |= one.shape != other.shape or one.dtype != other.dtype
            only_one = one is None or other is None
            sides = zip((one, other), self._is_inference, strict=True)
            is_parameter = any(meta is not None and meta.requires_grad and inference for meta, inference in sides)
            if isinstance(basis, Basis):
                if role not in ROLES:
                    slow = True
                    continue
                bases[ROLES[role]] = basis
                if is_parameter:
                    alone.add(ROLES[role])
            elif is_output(role):
                adds |= basis.equal is False
                uncompared |= role == "output" and basis.equal is None and not only_one
            elif basis.equal is None:
                unclear = True
            elif not basis.equal:
                differing |= operand(role)
                changed |= operand(role) if only_one or is_parameter else 0
        argument = bool(self._comparer.arguments(a, b))
        return SignaturePair(
            slow, metadata, argument, unclear, differing, changed, adds, uncompared, bases, frozenset(alone)
        )


_FLAGS = SignaturePair._fields[:8]
_BITS = Basis._fields
_PACKED = (*_FLAGS, *(f"{slot}_{bit}" for slot in _SLOTS for bit in ("valued", "alone", *_BITS)))


def _packed(rule: SignaturePair) -> tuple[int, ...]:
    row = [int(getattr(rule, name)) for name in _FLAGS]
    for slot in _SLOTS:
        basis = rule.bases.get(slot)
        row += [basis is not None, slot in rule.alone, *(map(int, basis) if basis else [0] * len(_BITS))]
    return tuple(row)


class Compared:
    """Compares the calls of a chunk by their columns. Rows with slow rules are undefined.

    Args:
        comparer: Has the tolerances.
        table: The fields of the rules.
        rules: The rule of each row.
        slots: Those that any of the rules compares.
        a: Columns of the first calls.
        b: Columns of their counterparts.

    Attributes:
        differing: The operands that differ.
        changed: Those that are parameters, or that only one of the calls has.
        output_differs: Which rows have an output that differs.
        uncompared: Where nothing shows whether the outputs are equal.
        unclear: Where an output can differ although all recorded operands are equal.
        by_statistics: Where a tensor is equal, judged by statistics.
        relative: The largest relative error of an output; -1 if unknown.
    """

    def __init__(
        self, comparer: Comparer, table: Arrays, rules: Array, slots: Sequence[str], a: Arrays, b: Arrays
    ) -> None:
        fields = {name: table[name][rules] for name in _FLAGS}
        self.differing, self.changed = fields["differing"].astype(np.uint8), fields["changed"].astype(np.uint8)
        self.output_differs, self.uncompared = fields["adds"] > 0, fields["uncompared"] > 0
        self.unclear = fields["unclear"] > 0
        self.by_statistics = np.zeros(len(rules), bool)
        self.relative = np.full(len(rules), -1.0)
        for slot in slots:
            basis = {bit: table[f"{slot}_{bit}"][rules] > 0 for bit in _SLOT_BITS}
            self._compare(slot, SLOTS[slot], comparer, basis, a, b)

    def _compare(self, slot: str, role: str, comparer: Comparer, basis: Arrays, a: Arrays, b: Arrays) -> None:
        valued = basis["valued"]
        x, y = ({name: side[f"{slot}_{name}"] for name in ("hash", "nan", "inf", *FIGURES)} for side in (a, b))
        same = basis["hashed"] & basis["same_dtype"] & basis["same_count"] & (x["hash"] == y["hash"])
        absolute, unknown = least_errors(x, y, basis["same_count"])
        peaks = peak(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = np.where(absolute == 0, 0.0, np.where(peaks > 0, absolute / peaks, np.inf))
            within = absolute <= comparer.atol + comparer.rtol * peaks
        differs = basis["differs"]
        equal = same | (~differs & ~unknown & within)
        unequal = valued & ~same & np.where(unknown, differs, differs | ~within)
        neither = valued & ~equal & ~unequal
        if operand(role):
            self.differing |= np.where(unequal, operand(role), 0).astype(np.uint8)
            self.changed |= np.where(unequal & basis["alone"], operand(role), 0).astype(np.uint8)
            self.unclear |= neither
        else:
            self.output_differs |= unequal
            if role == "output":
                self.uncompared |= neither
            known = valued & (same | ~unknown)
            size = np.where(same, 0.0, relative)
            self.relative = np.where(known, np.maximum(self.relative, size), self.relative)
        self.by_statistics |= valued & equal & ~same


_SLOT_BITS = ("valued", "alone", *_BITS)


def least_errors(x: Arrays, y: Arrays, same_count: Array) -> tuple[Array, Array]:
    """Lower bounds of the maximal absolute error, by statistics, and where they give none: `comparer` for columns."""
    sum_error = SUM_ERROR * np.maximum(peak(x), peak(y))
    bound = np.zeros(len(same_count))
    unknown = np.zeros(len(same_count), bool)
    with np.errstate(invalid="ignore"):
        for name in FIGURES:
            lacks_x, lacks_y = np.isnan(x[name]), np.isnan(y[name])
            unknown |= lacks_x != lacks_y
            gap = np.abs(x[name] - y[name])
            gap = np.where(np.isnan(gap), np.where(lacks_x | lacks_y, 0.0, np.inf), gap)
            bound = np.maximum(bound, np.where(gap <= (sum_error if name in ("mean", "rms") else 0.0), 0.0, gap))
    other = (x["nan"] != y["nan"]) | (x["inf"] != y["inf"]) | ~same_count
    return np.where(other, np.inf, bound), np.where(other, ~same_count, unknown)


def peak(x: Arrays) -> Array:
    """The largest finite modulus."""
    ends = [np.where(np.isfinite(x[name]), np.abs(x[name]), 0.0) for name in ("min", "max")]
    return np.maximum(*ends)
