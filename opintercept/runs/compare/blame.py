"""Classifies each pair: the call adds the difference, got a changed operand, or inherits it.

Invariant: no operand counts as changed if an earlier differing call can explain the change. Memory is some tens of
bytes for each call. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from opintercept.runs.compare.columns import (
    OPERANDS,
    OTHERS,
    Compared,
    Rule,
    Rules,
    Side,
    columns_of,
    operand,
    role_differences,
)
from opintercept.runs.compare.difference import KINDS, CallDifference, ModuleDifference
from opintercept.runs.compare.histories import Differing, Histories
from opintercept.runs.compare.index import Index, Pairs
from opintercept.runs.compare.pairing import BY, PAIRINGS, module_name, outcome
from opintercept.runs.compare.totals import DiffTotals
from opintercept.runs.compare.values import Comparer, TensorErrors
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import CHUNK, FIGURES, ROLES, SLOTS, Array, Arrays

_BATCH = 256  # calls that are read whole together
_HASHES = tuple(f"{slot}_hash" for slot in SLOTS)
_EQUAL, _ADDED, _ARGUMENT, _OPERAND, _INHERITED, _UNCLEAR, _NOT_COMPARED = range(len(KINDS))


class _Rows(NamedTuple):
    """Some pairs.

    Attributes:
        numbers: The calls of the first run.
        others: Their counterparts.
        a: Hashes of the first, and which texts they have.
        b: The same of the second.
    """

    numbers: Array
    others: Array
    a: Arrays
    b: Arrays

    def take(self, which: Array) -> _Rows:
        """Return the pairs at some places."""
        a, b = ({name: column[which] for name, column in side.items()} for side in (self.a, self.b))
        return _Rows(self.numbers[which], self.others[which], a, b)


class ProcessPair:
    """A process of the first run and its counterpart in the second. Numbers are those of calls in the index `a`.

    Args:
        a: The calls of the first process.
        b: The calls of the second process.
        ranks: The ranks of both.
        comparer: Compares two calls.
    """

    def __init__(self, a: Index, b: Index, ranks: tuple[int, int], comparer: Comparer) -> None:
        self._a, self._b = a, b
        self._ranks = ranks
        self._comparer = comparer
        self._pairs = Pairs(a, b)
        a.forget_inputs()
        b.forget_inputs()
        signatures = (
            lambda number: a.columns.signature(number).template,
            lambda number: b.columns.signature(number).template,
        )
        self._rules = Rules(comparer, signatures, (a.is_inference, b.is_inference))
        # Of each call of A: what it would be if no operand differed, as an index into `KINDS`, which operands differ,
        # those that no call before can explain, by what it is equal, as an index into `BY`, whether a shape or dtype
        # differs, the relative error of the output, -1 if unknown, and a number for the keys of the pair.
        self._own_kind, self._differing, self._changed, self._by = np.zeros((4, len(a)), np.uint8)
        self._metadata = np.zeros(len(a), bool)
        self._relative = np.full(len(a), -1.0)
        self._keys = np.full(len(a), -1, np.int32)
        self._key_numbers: dict[int, int] = {}
        self._modules: list[tuple[int, int, int]] = []  # for each such number the modules of both, and the phase
        self._histories = Histories()

    def compare(self, total: DiffTotals) -> None:
        """Compare all pairs, classify them, and add them to `total`."""
        for start in range(0, len(self._a), CHUNK):
            numbers = np.arange(start, min(start + CHUNK, len(self._a)))
            numbers = numbers[self._pairs.of_a[numbers] >= 0]
            if len(numbers):
                self._compare_chunk(numbers)
        self._find_changed()
        total.add_unmatched("a", self._ranks[0], self._a, self._pairs.of_a)
        total.add_unmatched("b", self._ranks[1], self._b, self._pairs.of_b)
        self._add_to(total)

    def _compare_chunk(self, numbers: Array) -> None:
        a, b = self._a, self._b
        others = self._pairs.of_a[numbers].astype(np.int64)
        names = (*_HASHES, "has_more", "has_tensors", "has_error")
        rows = _Rows(numbers, others, a.columns.gather(numbers, names), b.columns.gather(others, names))
        kind_a, kind_b = a.kind[numbers], b.kind[others]
        self._by[numbers] = by = np.minimum(a.by[kind_a], b.by[kind_b])
        self._own_kind[numbers] = np.where(by == BY.index("nothing"), _NOT_COMPARED, _EQUAL)
        codes, firsts, inverse = np.unique(
            (a.key[kind_a] << 32) | b.key[kind_b], return_index=True, return_inverse=True
        )
        for code, one, other in zip(codes.tolist(), kind_a[firsts], kind_b[firsts], strict=True):
            if code not in self._key_numbers:
                self._key_numbers[code] = len(self._key_numbers)
                self._modules.append((a.module[one], b.module[other], a.phase[one]))
        self._keys[numbers] = np.array([self._key_numbers[code] for code in codes.tolist()], np.int32)[inverse]
        left = rows.take(~self._same(rows, a.fingerprint[kind_a] == b.fingerprint[kind_b]))
        if not len(left.numbers):
            return
        rules, which = self._rules_of(left)
        in_texts = np.array([not rule.bases.keys() <= ROLES.keys() for rule in rules], bool)[which]
        whole = in_texts | left.a["has_error"] | left.b["has_error"]
        if self._comparer.reads_tensors:
            whole |= left.a["has_tensors"] & left.b["has_tensors"]
        if not whole.all():
            self._compare_columns(left.take(~whole))
        one_by_one = np.flatnonzero(whole)
        for start in range(0, len(one_by_one), _BATCH):
            self._compare_calls(left.take(one_by_one[start : start + _BATCH]))

    def _same(self, rows: _Rows, signatures: Array) -> Array:
        """Find pairs that are equal in all that is compared. It may miss some, which are then compared."""
        same = signatures.copy()
        for name in (*_HASHES, "has_more", "has_error"):
            same &= rows.a[name] == rows.b[name]
        a, b = self._a, self._b
        unhashed = np.flatnonzero(same & a.unhashed[a.kind[rows.numbers]])
        if len(unhashed):
            names = [f"{slot}_{name}" for slot in SLOTS for name in ("nan", "inf", *FIGURES)]
            x, y = a.columns.gather(rows.numbers[unhashed], names), b.columns.gather(rows.others[unhashed], names)
            for name in names:
                same[unhashed] &= (x[name] == y[name]) | ((x[name] != x[name]) & (y[name] != y[name]))
        texts = np.flatnonzero(same & (rows.a["has_more"] | rows.a["has_error"]))
        if len(texts):
            pairs = zip(a.columns.texts(rows.numbers[texts]), b.columns.texts(rows.others[texts]), strict=True)
            same[texts] = [x.more == y.more and outcome(x.error) == outcome(y.error) for x, y in pairs]
        return np.asarray(same)

    def _rules_of(self, rows: _Rows) -> tuple[list[Rule], Array]:
        a, b = self._a, self._b
        return self._rules.of(a.signature[a.kind[rows.numbers]], b.signature[b.kind[rows.others]])

    def _compare_columns(self, rows: _Rows) -> None:
        """Compare pairs of which columns have all that is compared."""
        rules, which = self._rules_of(rows)
        slots = [ROLES[role] for role in dict.fromkeys(role for rule in rules for role in rule.bases)]
        names = [f"{slot}_{name}" for slot in slots for name in ("nan", "inf", *FIGURES)]
        read = self._a.columns.gather(rows.numbers, names), self._b.columns.gather(rows.others, names)

        def side(columns: Arrays) -> Side:
            names = ("hash", "nan", "inf", *FIGURES)
            return lambda role, at: {name: columns[f"{ROLES[role]}_{name}"][at] for name in names}

        sides = side(rows.a | read[0]), side(rows.b | read[1])
        self._keep(rows, Compared(self._comparer, rules, which, *sides))

    def _compare_calls(self, rows: _Rows) -> None:
        """Compare pairs that have errors, tensors, or values in no column."""
        rules, which = self._rules_of(rows)
        calls, others = zip(*self._calls(rows.numbers), strict=True)

        def side(calls: tuple[StoredCall, ...]) -> Side:
            return lambda role, at: columns_of([calls[row].values[role] for row in at.tolist()])

        def errors(role: str, row: int) -> TensorErrors | None:
            return self._comparer.errors(role, calls[row], others[row])

        found = Compared(self._comparer, rules, which, side(calls), side(others), errors)
        apart = np.array([outcome(a.error) != outcome(b.error) for a, b in zip(calls, others, strict=True)], bool)
        found.output_differs |= apart
        found.unclear |= apart
        self._keep(rows, found)

    def _keep(self, rows: _Rows, found: Compared) -> None:
        numbers = rows.numbers
        made = np.where(found.unclear, _UNCLEAR, _ADDED)
        own = np.where(found.output_differs, made, np.where(found.uncompared, _NOT_COMPARED, _EQUAL))
        self._own_kind[numbers] = own = np.where(found.argument, _ARGUMENT, own)
        self._differing[numbers], self._changed[numbers] = found.differing, found.changed
        self._relative[numbers], self._metadata[numbers] = found.relative, found.metadata
        self._by[numbers] = np.where(found.uncompared, BY.index("nothing"), found.by)
        differs = (found.differing > 0) | _differ(own)
        of = rows.take(differs)
        a, b = ({slot: side[f"{slot}_hash"] for slot in SLOTS} for side in (of.a, of.b))
        self._histories.add(Differing(self._keys[of.numbers], a, b, found.differing[differs], found.others[differs]))

    def _calls(self, numbers: Array, *, given: bool = False) -> Iterator[tuple[StoredCall, StoredCall]]:
        others = self._pairs.of_a[numbers].astype(np.int64)
        a, b = self._a.columns, self._b.columns
        return zip(a.calls_at(numbers, given=given), b.calls_at(others, given=given), strict=True)

    def _kinds(self, numbers: Any = ...) -> Any:
        """The kinds of some calls, or of one."""
        own = self._own_kind[numbers]
        kinds = np.where(self._differing[numbers] > 0, np.uint8(_INHERITED), own)
        kinds = np.where(self._changed[numbers] > 0, np.uint8(_OPERAND), kinds)
        return np.where(own == _ARGUMENT, np.uint8(_ARGUMENT), kinds)

    def _find_changed(self) -> None:
        """Set `_changed` to the operands of each call that no earlier differing call explains."""
        differs = np.flatnonzero(_differ(self._kinds()))
        if not len(differs):
            return
        calls = np.bincount(self._keys[self._keys >= 0], minlength=len(self._key_numbers))
        keys, firsts = np.unique(self._keys[differs], return_index=True)
        constant = np.zeros(len(calls), np.uint8)
        for key, operands in self._histories.constant(keys[np.argsort(firsts)].tolist(), calls).items():
            constant[key] = operands
        differing = self._differing[differs]
        self._changed[differs] = differing & (constant[self._keys[differs]] | self._changed[differs])
        self._changed[differs[0]] = differing[0]

    def _add_to(self, total: DiffTotals) -> None:
        a, b, of_a, of_b = self._a, self._b, self._pairs.of_a, self._pairs.of_b
        chosen = np.flatnonzero(of_a >= 0)
        chosen = chosen[a.chosen(chosen)]
        kinds = self._kinds(chosen)
        differs = _differ(kinds)
        total.pairs += len(chosen)
        total.metadata += int(self._metadata[chosen].sum())
        total.pairings.update(_counted(PAIRINGS, self._pairs.how[chosen]))
        total.by.update(_counted(BY, self._by[chosen[~differs]]))
        total.kinds.update(_counted(KINDS, kinds))
        if total.watch is not None:
            total.watch(a, chosen, self._relative[chosen], differs, self._ranks)
        if not differs.any():
            return
        differing = chosen[differs]
        first = int(differing[0])
        ((one, other),) = self._calls(differing[:1], given=True)
        total.add_first(self._difference(first, one, other), (_alone(of_a[:first]), _alone(of_b[: of_a[first]])))
        _, module_of = np.unique(np.array(self._modules), axis=0, return_inverse=True)
        modules = module_of.reshape(-1)[self._keys[chosen]]
        found, firsts = np.unique(modules[differs], return_index=True)
        total.modules_in_all += len(found)
        in_order = np.argsort(firsts)[: total.limit]
        place = np.full(len(module_of), -1)
        place[found[in_order]] = np.arange(len(in_order))
        # Calls before the first that differs count, too.
        of_rows = place[modules]
        shown = of_rows >= 0
        counts = np.bincount(of_rows[shown] * len(KINDS) + kinds[shown], minlength=len(in_order) * len(KINDS))
        relative = np.full(len(in_order), -1.0)
        np.maximum.at(relative, of_rows[shown], self._relative[chosen[shown]])
        firsts = differing[firsts[in_order]]
        columns = a.columns.gather(firsts, ("step", "index"))
        rows = []
        for number, size, of_kinds, step, index in zip(
            firsts.tolist(),
            relative.tolist(),
            counts.reshape(-1, len(KINDS)).tolist(),
            columns["step"].tolist(),
            columns["index"].tolist(),
            strict=True,
        ):
            call_site = a.columns.call_site(int(a.call_site[a.kind[number]]))
            counterpart = b.columns.call_site(int(b.call_site[b.kind[of_a[number]]]))
            row = ModuleDifference(
                ranks=self._ranks,
                module=module_name(call_site.module),
                other=module_name(counterpart.module),
                phase=call_site.phase,
                calls=sum(of_kinds),
                kinds={kind: count for kind, count in zip(KINDS, of_kinds, strict=True) if count},
                relative=size if size >= 0 else None,
                index=index,
            )
            rows.append(((step, index, self._ranks[0]), row))
        total.add_rows(self._worst(differing, total.worst_limit), rows)

    def _worst(self, differing: Array, limit: int) -> list[tuple[float, CallDifference]]:
        relative = self._relative[differing]
        if len(relative) > limit:
            least = np.partition(relative, len(relative) - limit)[len(relative) - limit]
            above = np.flatnonzero(relative > least)
            which = np.r_[above, np.flatnonzero(relative == least)[: limit - len(above)]]
            differing, relative = differing[which], relative[which]
        in_order = np.lexsort((differing, -relative))
        numbers = differing[in_order]
        return [
            (float(self._relative[number]), self._difference(number, one, other))
            for number, (one, other) in zip(numbers.tolist(), self._calls(numbers), strict=True)
        ]

    def _difference(self, number: int, a: StoredCall, b: StoredCall) -> CallDifference:
        roles = role_differences(self._comparer, a, b)
        changed = int(self._changed[number])
        names = [role for role, operand_ in OPERANDS.items() if changed & operand_]
        if changed & OTHERS:
            differing = [role for role in roles if role.equal is False and operand(role.role) == OTHERS]
            in_one = [role for role in differing if role.a is None or role.b is None]
            names += [role.role for role in in_one or differing]
        arguments = self._comparer.arguments(a, b)
        kind, pairing = KINDS[self._kinds(number)], PAIRINGS[self._pairs.how[number]]
        return CallDifference(kind, pairing, tuple(names), arguments, a, b, roles)


def _differ(kinds: Array) -> Array:
    return np.asarray((kinds != _EQUAL) & (kinds != _NOT_COMPARED))


def _alone(counterparts: Array) -> int:
    return int((counterparts < 0).sum())


def _counted(names: Sequence[str], numbers: Array) -> dict[Any, int]:
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    return {name: count for name, count in zip(names, counts, strict=True) if count}
