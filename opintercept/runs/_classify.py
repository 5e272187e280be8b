"""Of which kind each pair of calls is: whether its difference is made there, changed from outside, or inherited.

Invariant: no operand counts as changed if a differing call before it can explain the change; memory is tens of bytes
for each call. Must not import torch.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from opintercept.runs._pairing import PAIRINGS, Index, Pairs, module_name, operator_name, outcome
from opintercept.runs._totals import Totals
from opintercept.runs.codec import StoredCall, is_output
from opintercept.runs.comparer import Comparer
from opintercept.runs.difference import (
    KINDS,
    CallDifference,
    Kind,
    ModuleDifference,
    RoleDifference,
    order,
)

# Runs of 0.1 recorded all operands of these operators; of others they left out masks, scales and states.
_COMPLETE = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}
_COMPLETE |= {"linear", "matmul", "inner", "tensordot", "__matmul__", "__rmatmul__", "__imatmul__"}
_CHANCES = ("dropout_p", "dropout")
_MOST_HISTORIES = 1 << 16
_AGREE = ("equal", "not compared")

# A set of operands is a number: the sum of these. All tensors without a role of their own count as one operand.
_OPERANDS = {"lhs": 1, "rhs": 2, "bias": 4, "value": 8}
_OTHERS = 16


def _operand(role: str) -> int:
    return 0 if is_output(role) else _OPERANDS.get(role, _OTHERS)


def _is_random(call: StoredCall) -> bool:
    """Whether the call draws random numbers, of which nothing is recorded."""
    given = call.arguments or {}
    if given.get("train") is False or given.get("training") is False:
        return False
    names = ("p", *_CHANCES) if "dropout" in call.record.op else _CHANCES
    return any(isinstance(given.get(name), (int, float)) and given[name] > 0 for name in names)


class _History:
    """What the differing calls of one module of A, paired with one of B, have in common.

    Attributes:
        calls: How many calls differ.
        same: In how many of them each operand is bit for bit the same as in the first.
        varies: Whether the output changes from call to call.
    """

    __slots__ = ("_hashes", "_output", "calls", "same", "varies")

    def __init__(self) -> None:
        self.calls = 0
        self.same: Counter[int] = Counter()
        self.varies = False
        self._hashes: dict[int, Any] = {}
        self._output: tuple[str | None, str | None] | None = None

    def add(self, roles: tuple[RoleDifference, ...]) -> None:
        """Add a call that differs."""
        self.calls += 1
        others: list[Any] = []
        for role in roles:
            x, y = role.a_values, role.b_values
            if x is None or y is None or x.hash is None or y.hash is None:
                continue
            pair = (x.hash, y.hash)
            if role.role == "output":
                self._output = self._output or pair
                self.varies |= pair[0] != self._output[0] and pair[1] != self._output[1]
            elif role.equal is False and role.role in _OPERANDS:
                self._compare(_OPERANDS[role.role], pair)
            elif role.equal is False and not is_output(role.role):
                others += (role.role, *pair)
        if others:
            self._compare(_OTHERS, hash(tuple(others)))

    def _compare(self, operand: int, hashed: Any) -> None:
        self.same[operand] += self._hashes.setdefault(operand, hashed) == hashed


@dataclass(slots=True)
class _ModuleCounts:
    """The calls of one module in one phase."""

    first: int  # the first that differs
    calls: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    relative: float = -1.0


class ProcessPair:
    """A process of the first run and its counterpart in the second. Numbers are those of calls in the index `a`.

    Args:
        a: The calls of the first process.
        b: The calls of the second process.
        read_a: Reads a call of the first process by its position.
        read_b: Reads a call of the second process.
        ranks: The ranks of both.
        comparer: Compares two calls.
    """

    def __init__(
        self,
        a: Index,
        b: Index,
        read_a: Callable[[int], StoredCall],
        read_b: Callable[[int], StoredCall],
        ranks: tuple[int, int],
        comparer: Comparer,
    ) -> None:
        self._a, self._b = a, b
        self._read_a, self._read_b = read_a, read_b
        self._ranks = ranks
        self._comparer = comparer
        self._pairs = Pairs(a, b)
        # Of each pair: what it would be if no operand differed, as an index into KINDS, which operands differ, and
        # which of these no differing call explains.
        self._own_kind = array("B", bytes(len(a)))
        self._differing = array("B", bytes(len(a)))
        self._changed = array("B", bytes(len(a)))
        self._relative = array("d", [-1.0]) * len(a)
        self._histories: dict[tuple[int, int], _History] = {}

    def compare(self, total: Totals) -> None:
        """Compare all pairs, then add to `total` what kind each is of."""
        a, b, pairs = self._a, self._b, self._pairs
        for number, other in enumerate(pairs.of_a):
            if other < 0:
                continue
            if a.whole[number] == b.whole[other]:
                by, metadata = Index.BY[min(a.by[number], b.by[other])], False
                self._own_kind[number] = KINDS.index("not compared" if by == "nothing" else "equal")
            else:
                by, metadata = self._compare_pair(number, other)
            if a.chosen[number]:
                total.pairs += 1
                total.pairings[PAIRINGS[pairs.how[number]]] += 1
                total.metadata += metadata
                if not self._differs(number):
                    total.by[by] += 1
        self._find_changed()
        total.add_unmatched("a", self._ranks[0], a, pairs.of_a, self._read_a)
        total.add_unmatched("b", self._ranks[1], b, pairs.of_b, self._read_b)
        self._add_to(total)

    def _read(self, number: int) -> tuple[StoredCall, StoredCall, tuple[RoleDifference, ...]]:
        a = self._read_a(self._a.position[number])
        b = self._read_b(self._b.position[self._pairs.of_a[number]])
        return a, b, self._comparer.roles(a, b)

    def _compare_pair(self, number: int, other: int) -> tuple[str, bool]:
        """Compare two calls of which not everything is equal.

        Returns:
            By what they are equal, if they are, and whether they differ in a shape or dtype.
        """
        a, b, roles = self._read(number)
        differing, metadata = 0, False
        output_differs, compared = outcome(a.error) != outcome(b.error), True
        unclear = output_differs or _is_unclear(a, b)
        weakest = "hash"
        for role in roles:
            if role.a is not None and role.b is not None:
                metadata |= role.a.shape != role.b.shape or role.a.dtype != role.b.dtype
            if is_output(role.role):
                output_differs |= role.equal is False
                if role.role == "output" and role.equal is None and role.a is not None and role.b is not None:
                    compared = False
                self._relative[number] = max(self._relative[number], order(role.relative))
            elif role.equal is None:
                unclear = True
            elif not role.equal:
                differing |= _operand(role.role)
            if role.by != "hash" and role.equal:
                weakest = "statistics" if "statistics" in (weakest, role.by) else str(role.by)
        own_kind: Kind = "equal" if compared else "not compared"
        if self._comparer.arguments(a, b):
            own_kind = "changed argument"
        elif output_differs:
            own_kind = "unclear" if unclear else "added"
        self._own_kind[number], self._differing[number] = KINDS.index(own_kind), differing
        if self._differs(number):
            self._remember(number, other, roles)
        return weakest if compared else "nothing", metadata

    def _differs(self, number: int) -> bool:
        return bool(self._differing[number]) or KINDS[self._own_kind[number]] not in _AGREE

    def _remember(self, number: int, other: int, roles: tuple[RoleDifference, ...]) -> None:
        """Keep what `_find_changed` needs of a pair that differs."""
        for role in roles:
            if role.equal is not False:
                continue
            only_one = role.a is None or role.b is None  # which no value of another call explains
            for meta, index in ((role.a, self._a), (role.b, self._b)):
                is_parameter = meta is not None and meta.requires_grad and index.only_looks
                if only_one or is_parameter:
                    self._changed[number] |= _operand(role.role)
        key = self._a.key[number], self._b.key[other]
        if key not in self._histories and len(self._histories) < _MOST_HISTORIES:
            self._histories[key] = _History()
        if (history := self._histories.get(key)) is not None:
            history.add(roles)

    def _find_changed(self) -> None:
        """Leave in `_changed` the operands of each call that no differing call before it explains."""
        a, b, of_a = self._a, self._b, self._pairs.of_a
        calls: Counter[tuple[int, int]] = Counter()
        for number, other in enumerate(of_a):
            if other >= 0 and (key := (a.key[number], b.key[other])) in self._histories:
                calls[key] += 1
        # Operands that are the same in every call of a module, while all outputs that differed before it varied.
        constant: dict[tuple[int, int], int] = {}
        differed, varied = False, True
        for number, other in enumerate(of_a):
            if other < 0 or not self._differs(number):
                continue
            key = a.key[number], b.key[other]
            if key not in constant:
                history = self._histories.get(key)
                constant[key] = 0
                if history is not None and varied and calls[key] > 1:
                    constant[key] = sum(operand for operand, same in history.same.items() if same == calls[key])
                varied = varied and history is not None and history.varies
            differing = self._differing[number]
            self._changed[number] = differing & (constant[key] | self._changed[number]) if differed else differing
            differed = True

    def _kind(self, number: int) -> Kind:
        own_kind = KINDS[self._own_kind[number]]
        if own_kind == "changed argument":
            return own_kind
        if self._changed[number]:
            return "changed operand"
        return "inherited" if self._differing[number] else own_kind

    def _module_key(self, number: int) -> int:
        return hash((self._a.module[number], self._b.module[self._pairs.of_a[number]], self._a.phase[number]))

    def _chosen(self) -> Iterator[int]:
        return (number for number, other in enumerate(self._pairs.of_a) if other >= 0 and self._a.chosen[number])

    def _add_to(self, total: Totals) -> None:
        modules: dict[int, _ModuleCounts] = {}
        more_modules: set[int] = set()
        first = -1
        worst: list[tuple[float, int]] = []
        for number in self._chosen():
            kind = self._kind(number)
            total.kinds[kind] += 1
            if kind in _AGREE:
                continue
            if first < 0:
                first = number
            key = self._module_key(number)
            if key not in modules:
                if len(modules) < total.limit:
                    modules[key] = _ModuleCounts(number)
                else:
                    more_modules.add(key)
            entry = (self._relative[number], -number)
            if len(worst) < total.worst_limit:
                heapq.heappush(worst, entry)
            elif entry > worst[0]:
                heapq.heapreplace(worst, entry)
        for number in self._chosen():  # again: calls before the first that differs count too
            if counts := modules.get(self._module_key(number)):
                counts.calls += 1
                counts.kinds[self._kind(number)] += 1
                counts.relative = max(counts.relative, self._relative[number])
        if first >= 0:
            of_a, of_b = self._pairs.of_a, self._pairs.of_b
            before = (
                sum(1 for number in range(first) if of_a[number] < 0),
                sum(1 for number in range(of_a[first]) if of_b[number] < 0),
            )
            total.add_first(self._call(first), before)
        total.modules_in_all += len(modules) + len(more_modules)
        total.add_rows(
            [(relative, self._call(-number, slim=True)) for relative, number in worst],
            [self._module(counts) for counts in modules.values()],
        )

    def _module(self, counts: _ModuleCounts) -> tuple[tuple[int, int, int], ModuleDifference]:
        call = self._read_a(self._a.position[counts.first])
        other = self._read_b(self._b.position[self._pairs.of_a[counts.first]])
        return call.place, ModuleDifference(
            ranks=self._ranks,
            module=module_name(call.record.module),
            other=module_name(other.record.module),
            phase=call.record.phase,
            calls=counts.calls,
            kinds={kind: counts.kinds[kind] for kind in KINDS if counts.kinds[kind]},
            relative=counts.relative if counts.relative >= 0 else None,
            index=call.record.index,
        )

    def _call(self, number: int, slim: bool = False) -> CallDifference:
        a, b, roles = self._read(number)
        changed = self._changed[number]
        names = [role for role, operand in _OPERANDS.items() if changed & operand]
        if changed & _OTHERS:
            differing = [role for role in roles if role.equal is False and _operand(role.role) == _OTHERS]
            in_one = [role for role in differing if role.a is None or role.b is None]
            names += [role.role for role in in_one or differing]
        arguments = self._comparer.arguments(a, b)
        if slim:
            a, b = replace(a, given=None), replace(b, given=None)
        pairing = PAIRINGS[self._pairs.how[number]]
        return CallDifference(self._kind(number), pairing, tuple(names), arguments, a, b, roles)


def _is_unclear(a: StoredCall, b: StoredCall) -> bool:
    """Whether an output can differ although all recorded operands are equal."""
    if a.arguments is None or b.arguments is None:
        return not {operator_name(a.record.op), operator_name(b.record.op)} <= _COMPLETE
    return _is_random(a) or _is_random(b)
