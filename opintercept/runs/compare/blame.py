"""Compares two processes, and classifies each pair: it adds its difference, has a changed operand, or inherits it.

What is reported of runs with values is decided by computing it.

Invariant: no operand counts as changed if an earlier differing call can explain the change. Memory is some thirty bytes
for each pair: what is kept of all of them has the smallest dtypes, and wider arrays have a chunk of them.
Needs numpy. Must not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from opintercept._core.record import CallRecord
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
from opintercept.runs.compare.difference import (
    KINDS,
    Absent,
    CallDifference,
    Computed,
    ModuleDifference,
    RoleDifference,
    order,
)
from opintercept.runs.compare.histories import Histories
from opintercept.runs.compare.index import PHASES, Index, Pairs
from opintercept.runs.compare.pairing import BY, PAIRINGS, Ids, first_models, module_name, outcome
from opintercept.runs.compare.totals import DiffTotals
from opintercept.runs.compare.values import Comparer, TensorErrors
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import CHUNK, FIGURES, ROLES, SLOTS, Array, Arrays, Columns
from opintercept.runs.store.run import Run
from opintercept.runs.sums import CodeNumbers

_BATCH = 256  # calls that are read whole together
_PIECE = 1 << 14  # calls whose statistics are read together
_HASHES = tuple(f"{slot}_hash" for slot in SLOTS)
_EQUAL, _ADDED, _ARGUMENT, _OPERAND, _INHERITED, _ROUNDING, _UNCLEAR, _NOT_COMPARED = range(len(KINDS))
_ROUNDED = 8.0  # unit roundoffs that operators between two calls may put into an operand
_AMPLIFIED = 1e3  # times the largest difference before it, a weight's difference does not come from that
_LEAST = 1e-7  # the largest difference before it is taken for no less, beside the largest modulus
_WORK = 2e11  # floating-point operations of the calls that are searched for a cause: about a minute of one core


class _Rows(NamedTuple):
    """Some pairs: the numbers of their calls, their hashes, and which texts they have."""

    numbers: Array
    others: Array
    a: Arrays
    b: Arrays

    def take(self, which: Array) -> _Rows:
        """Return the pairs at some places."""
        a, b = ({name: column[which] for name, column in side.items()} for side in (self.a, self.b))
        return _Rows(self.numbers[which], self.others[which], a, b)


class ProcessPair:
    """A process of the first run and its counterpart in the second. Numbers are those of calls in the index `a`."""

    def __init__(self, a: Index, b: Index, ranks: tuple[int, int], comparer: Comparer) -> None:
        self._a, self._b = a, b
        self._ranks = ranks
        self._comparer = comparer
        self._pairs = Pairs(a, b)
        a.inputs = b.inputs = np.empty(0, np.int64)
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
        self._key_numbers = CodeNumbers()
        # For each such number the modules of both and the phase, how many pairs have it, and the first that differs.
        self._modules: list[tuple[int, int, int]] = []
        self._sizes = np.zeros(0, np.int64)
        self._firsts: dict[int, int] = {}  # in their order
        self._histories = Histories()
        self.elapsed: tuple[list[float], list[float]] = ([], [])  # host times of the calls in A and B
        self._decided: dict[int, tuple[int, Computed | str]] = {}  # the kinds of calls that were computed again

    def compare(self, total: DiffTotals) -> None:
        """Compare all pairs, classify them, and add them to `total`."""
        for numbers in self._chunks():
            self._compare_chunk(numbers)
            keys = self._keys[numbers]
            differs = np.flatnonzero(_differ(self._kinds(numbers)))
            for at in differs[np.sort(np.unique(keys[differs], return_index=True)[1])].tolist():
                self._firsts.setdefault(int(keys[at]), int(numbers[at]))
        if self._firsts:
            self._find_changed()
        total.add_unmatched("a", self._ranks[0], self._a, self._pairs.of_a < 0)
        total.add_unmatched("b", self._ranks[1], self._b, self._pairs.alone_b)
        self._add_to(total)

    def _chunks(self) -> Iterator[Array]:
        """The calls with a counterpart, some at a time."""
        for start in range(0, len(self._a), CHUNK):
            numbers = np.flatnonzero(self._pairs.of_a[start : start + CHUNK] >= 0) + start
            if len(numbers):
                yield numbers

    def _compare_chunk(self, numbers: Array) -> None:
        a, b = self._a, self._b
        others = self._pairs.of_a[numbers].astype(np.int64)
        names = (*_HASHES, "has_more", "has_tensors", "has_error", "elapsed")
        rows = _Rows(numbers, others, a.columns.gather(numbers, names), b.columns.gather(others, names))
        chosen = a.chosen(numbers)
        for times, side in zip(self.elapsed, rows[2:], strict=True):
            times.append(side.pop("elapsed")[chosen].sum())  # NaN if one is unknown
        kind_a, kind_b = a.kind[numbers], b.kind[others]
        self._by[numbers] = by = np.minimum(a.by[kind_a], b.by[kind_b])
        self._own_kind[numbers] = np.where(by == BY.index("nothing"), _NOT_COMPARED, _EQUAL)
        keys, new = self._key_numbers.of((a.key[kind_a] << 32) | b.key[kind_b])
        self._modules += zip(a.module[kind_a[new]], b.module[kind_b[new]], a.phase[kind_a[new]], strict=True)
        self._keys[numbers] = keys
        sizes = np.bincount(keys, minlength=len(self._modules))
        self._sizes = np.pad(self._sizes, (0, len(new))) + sizes
        left = rows.take(~self._same(rows, a.fingerprint[kind_a] == b.fingerprint[kind_b]))
        if not len(left.numbers):
            return
        rules, which = self._rules_of(left)
        in_texts = np.array([any(rule.bases.keys() - slots.keys() for slots in rule.slots) for rule in rules], bool)
        whole = in_texts[which] | np.any([side[f"has_{name}"] for side in left[2:] for name in ("more", "error")], 0)
        if self._comparer.reads_tensors:
            whole |= left.a["has_tensors"] & left.b["has_tensors"]
        for which_rows, size, compare in (~whole, _PIECE, self._compare_columns), (whole, _BATCH, self._compare_calls):
            places = np.flatnonzero(which_rows)
            for start in range(0, len(places), size):
                compare(left.take(places[start : start + size]))

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
        roles = dict.fromkeys(role for rule in rules for role in rule.bases)

        def side(number: int, columns: Columns, calls: Array, known: Arrays) -> Side:
            of_roles = {role: [ROLES.get(rule.slots[number].get(role, "")) for rule in rules] for role in roles}
            slots = dict.fromkeys(slot for found in of_roles.values() for slot in found if slot is not None)
            names = [f"{slot}_{name}" for slot in slots for name in ("nan", "inf", *FIGURES)]
            read = known | columns.gather(calls, names)

            def of(role: str, at: Array) -> Arrays:
                found, made = of_roles[role], {}
                for name in ("hash", "nan", "inf", *FIGURES):
                    used = [slot for slot in dict.fromkeys(found) if slot is not None]
                    made[name] = read[f"{used[0]}_{name}"][at]
                    for slot in used[1:]:
                        there = np.array([each == slot for each in found])[which[at]]
                        made[name] = np.where(there, read[f"{slot}_{name}"][at], made[name])
                return made

            return of

        sides = (side(0, self._a.columns, rows.numbers, rows.a), side(1, self._b.columns, rows.others, rows.b))
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
        self._histories.add(self._keys[of.numbers], of.a, of.b, found.differing[differs], found.others[differs])

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
        constant = self._histories.constant([*self._firsts], self._sizes)
        for numbers in self._chunks():
            self._changed[numbers] |= self._differing[numbers] & constant[self._keys[numbers]]
        first = min(self._firsts.values())
        self._changed[first] = self._differing[first]

    def _add_to(self, total: DiffTotals) -> None:
        a, pairs = self._a, self._pairs
        modules, module_of = np.unique(np.array(self._modules).reshape(-1, 3), axis=0, return_inverse=True)
        module_of = module_of.reshape(-1)
        by, counts = np.zeros(len(BY), np.int64), np.zeros((len(modules), len(KINDS)), np.int64)
        relative, firsts = np.full(len(modules), -1.0), np.full(len(modules), len(a))
        worst = np.empty(0, np.int64)
        for numbers in self._chunks():
            numbers = numbers[a.chosen(numbers)]
            kinds, module = self._kinds(numbers), module_of[self._keys[numbers]]
            differs = _differ(kinds)
            total.pairs += len(numbers)
            total.metadata += int(self._metadata[numbers].sum())
            total.pairings.update(_counted(PAIRINGS, np.bincount(pairs.how[numbers], minlength=len(PAIRINGS))))
            by += np.bincount(self._by[numbers[~differs]], minlength=len(BY))
            counts += np.bincount(module * len(KINDS) + kinds, minlength=counts.size).reshape(counts.shape)
            np.maximum.at(relative, module, self._relative[numbers])
            np.minimum.at(firsts, module[differs], numbers[differs])
            worst = self._worst(np.r_[worst, numbers[differs]], total.worst_limit)
        total.by.update(_counted(BY, by))
        for of_run, times in zip(total.elapsed, self.elapsed, strict=True):
            of_run.extend(times)
        found = np.flatnonzero(firsts < len(a))
        found = found[np.argsort(firsts[found])]
        first = self._first(np.r_[firsts[found][: total.limit], worst]) if len(found) else -1
        for number, (kind, _) in self._decided.items():
            np.add.at(counts, (module_of[self._keys[number]], [int(self._kinds(number)), kind]), [-1, 1])
        total.kinds.update(_counted(KINDS, counts.sum(0)))
        if total.watch is not None:
            chosen = np.flatnonzero(pairs.of_a >= 0)
            chosen = chosen[a.chosen(chosen)]
            total.watch(a, chosen, self._relative[chosen], _differ(self._kinds(chosen)), self._ranks)
        if first < 0:
            return
        ((one, other),) = self._calls(np.array([first]), given=True)
        before = int((pairs.of_a[:first] < 0).sum()), int(pairs.alone_b[: pairs.of_a[first]].sum())
        optimizer = not any(before) and first == min(self._firsts.values()) and self._by_optimizer(first)
        total.add_first(self._difference(first, one, other), before, optimizer)
        total.modules_in_all += len(found)
        found = found[: total.limit]
        differences = [
            (float(self._relative[number]), self._difference(number, one, other))
            for number, (one, other) in zip(worst.tolist(), self._calls(worst), strict=True)
        ]
        total.add_rows(differences, self._module_rows(firsts[found], counts[found], relative[found]))

    def _first(self, reported: Array) -> int:
        """Compute what will be reported, and find the first call whose difference rounding does not explain."""
        firsts = np.array(sorted(self._firsts.values()))
        firsts = firsts[self._a.chosen(firsts)]
        work = 0.0
        first, *others = (int(number) for number in firsts)
        if not self._comparer.computes:
            return first
        for number in (first, *others):
            work += self._decide(number)
            if (is_cause := self._decided[number][0] not in (_INHERITED, _ROUNDING)) or work > _WORK:
                break
        for each in reported.tolist():
            if work < 4 * _WORK:
                work += self._decide(each)
            self._decided.setdefault(each, (int(self._kinds(each)), "other calls took long to compute"))
        return number if is_cause else first

    def _decide(self, number: int) -> float:
        """Compute a pair of calls again, and decide what kind it is of; return how much work that was."""
        if number in self._decided:
            return 0.0
        ((a, b),) = self._calls(np.array([number]), given=True)
        found, kind = self._comparer.computed(a, b), int(self._kinds(number))
        if isinstance(found, Computed) and kind != _ARGUMENT:
            if max(found.added_a, found.added_b) > 1:
                kind = _ADDED
            elif kind == _OPERAND:
                kind = _ROUNDING if self._is_rounded(number, a, b, found) else _OPERAND
            elif kind in (_ADDED, _UNCLEAR):
                kind = _INHERITED if any(found.operands.values()) else _ROUNDING
            elif kind == _INHERITED and self._unexplained(number, a, b):
                kind = _OPERAND
        self._decided[number] = kind, found
        return float(a.record.flops or 10 * sum(values.count for values in a.values.values()))

    def _is_rounded(self, number: int, a: StoredCall, b: StoredCall, found: Computed) -> bool:
        """Whether the changed operands differ by rounding alone, and not in dtype unless there is a tolerance."""
        roles = {role.role: role for role in role_differences(self._comparer, a, b)}
        changed = [roles[name] for name in self._names(number, [*roles.values()])]
        return all(
            found.operands.get(role.role, math.inf) <= _ROUNDED
            and (self._comparer.tolerant or (role.a and role.a.dtype) == (role.b and role.b.dtype))
            for role in changed
        )

    def _unexplained(self, number: int, a: StoredCall, b: StoredCall) -> int:
        """Count weights as changed that differ by far more than all calls before, in a first forward pass."""
        before = self._relative[:number]
        if self._a.phase[self._a.kind[: number + 1]].any() or not np.isfinite(before).all():
            return 0
        limit = _AMPLIFIED * max(float(before.max(initial=0.0)), _LEAST)
        for role in role_differences(self._comparer, a, b):
            if role.role in ("rhs", "bias") and role.equal is False and order(role.relative) > limit:
                self._changed[number] |= operand(role.role)
        return int(self._changed[number])

    def _by_optimizer(self, first: int) -> bool:
        """Whether a weight differs although it was equal in an earlier call, and all gradients before are equal."""
        backward = self._a.phase[self._a.kind[:first]] == PHASES.index("backward")
        changed = self._changed[first]
        return bool(
            changed
            and not changed & OPERANDS["lhs"]
            and (self._keys[:first] == self._keys[first]).any()
            and backward.any()
            and not (self._own_kind[:first][backward] == _NOT_COMPARED).any()
        )

    def _module_rows(
        self, firsts: Array, counts: Array, relative: Array
    ) -> list[tuple[tuple[int, int, int], ModuleDifference]]:
        a, b = self._a, self._b
        of_rows = (firsts, relative, counts, a.steps(firsts), a.columns.gather(firsts, ("index",))["index"])
        rows = []
        for number, size, of_kinds, step, index in zip(*(each.tolist() for each in of_rows), strict=True):
            call_site = a.columns.call_site(int(a.call_site[a.kind[number]]))
            counterpart = b.columns.call_site(int(b.call_site[b.kind[self._pairs.of_a[number]]]))
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
        return rows

    def _worst(self, numbers: Array, limit: int) -> Array:
        """Those of these calls, in their order, that have the largest errors, the largest first."""
        relative = self._relative[numbers]
        if len(numbers) > limit:
            least = np.partition(relative, len(relative) - limit)[len(relative) - limit]
            numbers, relative = numbers[relative >= least], relative[relative >= least]
        return np.asarray(numbers[np.lexsort((numbers, -relative))][:limit])

    def _difference(self, number: int, a: StoredCall, b: StoredCall) -> CallDifference:
        roles = role_differences(self._comparer, a, b)
        names = self._names(number, roles)
        arguments = self._comparer.arguments(a, b)
        kind, found = self._decided.get(number) or (int(self._kinds(number)), self._comparer.computed(a, b))
        pairing = PAIRINGS[self._pairs.how[number]]
        return CallDifference(KINDS[kind], pairing, tuple(names), arguments, a, b, roles, found)

    def _names(self, number: int, roles: Sequence[RoleDifference]) -> list[str]:
        """The operands that differ and that no call before explains."""
        changed = int(self._changed[number])
        names = [role for role, operand_ in OPERANDS.items() if changed & operand_]
        if changed & OTHERS:
            differing = [role for role in roles if role.equal is False and operand(role.role) == OTHERS]
            in_one = [role for role in differing if role.a is None or role.b is None]
            names += [role.role for role in in_one or differing]
        return names


def _differ(kinds: Array) -> Array:
    return np.asarray((kinds != _EQUAL) & (kinds != _NOT_COMPARED))


def _counted(names: Sequence[str], counts: Array) -> dict[Any, int]:
    return {name: count for name, count in zip(names, counts.tolist(), strict=True) if count}


def compare_ranks(
    total: DiffTotals,
    run_a: Run,
    rank_a: int | None,
    run_b: Run,
    rank_b: int | None,
    comparer: Comparer,
    select: Callable[[CallRecord], bool] | None,
) -> None:
    """Compare a process of each run; None stands for one that the run does not have."""
    ids = Ids()
    a, b = (
        None if rank is None else Index(run.columns(rank), ids, select)
        for run, rank in ((run_a, rank_a), (run_b, rank_b))
    )
    sizes = [0 if index is None else len(index) for index in (a, b)]
    total.calls = [before + size for before, size in zip(total.calls, sizes, strict=True)]
    if a is not None and b is not None:
        total.ranks.append((a.columns.rank, b.columns.rank))
        if all(sizes):
            if (models := first_models(a.names, b.names)) is not None:
                a.number(models[0])
                b.number(models[1])
            ProcessPair(a, b, total.ranks[-1], comparer).compare(total)
            return
        if not any(sizes):
            return
    sides: tuple[Literal["a", "b"], ...] = ("a", "b")
    for side, index, other, others in zip(sides, (a, b), (b, a), reversed(sizes), strict=True):
        if index is not None and len(index):
            total.add_unmatched(side, index.columns.rank, index, np.ones(len(index), bool))
        else:
            there = other if index is None else index
            assert there is not None
            total.absent.append(Absent(side, there.columns.rank, index is not None, others))
