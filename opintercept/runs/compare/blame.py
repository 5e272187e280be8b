"""Classifies each pair: the call adds the difference, got a changed operand, or inherits it.

Invariant: no operand counts as changed if an earlier differing call can explain the change. Memory is some tens of
bytes for each call. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opintercept.runs.compare.columns import OPERANDS, OTHERS, Compared, RuleTable, operand
from opintercept.runs.compare.difference import KINDS, CallDifference, ModuleDifference, RoleDifference, order
from opintercept.runs.compare.histories import Differing, Histories
from opintercept.runs.compare.index import Index, Pairs
from opintercept.runs.compare.pairing import PAIRINGS, fingerprint, module_name, operator_name, outcome
from opintercept.runs.compare.totals import DiffTotals
from opintercept.runs.compare.values import Comparer
from opintercept.runs.store.codec import StoredCall, is_output
from opintercept.runs.store.columns import CHUNK, FIGURES, SLOTS, Array, Arrays

# Runs of 0.1 recorded all operands of these operators; of others they left out masks, scales and states.
_COMPLETE = {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"}
_COMPLETE |= {"linear", "matmul", "inner", "tensordot", "__matmul__", "__rmatmul__", "__imatmul__"}
_CHANCES = ("dropout_p", "dropout")
_BY = ("nothing", "statistics", "hash", "tensors", "sample", "metadata")  # the first three as `pairing.BY`
_HASHES = tuple(f"{slot}_hash" for slot in SLOTS)
_EQUAL, _ADDED, _ARGUMENT, _OPERAND, _INHERITED, _UNCLEAR, _NOT_COMPARED = range(len(KINDS))


def _is_random(call: StoredCall) -> bool:
    """Whether the call draws random numbers, of which nothing is recorded."""
    given = call.arguments or {}
    if given.get("train") is False or given.get("training") is False:
        return False
    names = ("p", *_CHANCES) if "dropout" in call.record.op else _CHANCES
    return any(isinstance(given.get(name), (int, float)) and given[name] > 0 for name in names)


class _PairTable:
    """The pairs of one chunk, and the verdicts on them.

    Attributes:
        numbers: The calls of the first run.
        others: Their counterparts.
        a: Columns of the first.
        b: Columns of the second.
        own_kind: What each pair would be if no operand differed, as an index into `KINDS`.
        by: By what it is equal, as an index into `_BY`.
        metadata: Whether it differs in a shape or dtype.
        differing: Which operands differ.
        changed: Those that no call before can explain.
        relative: The relative error of the output; -1 if unknown.
        more: A hash of the other tensors that differ; 0 for none.
    """

    def __init__(self, numbers: Array, others: Array, a: Arrays, b: Arrays) -> None:
        self.numbers, self.others, self.a, self.b = numbers, others, a, b
        size = len(numbers)
        self.own_kind, self.by = np.full(size, _EQUAL, np.uint8), np.full(size, 2, np.uint8)
        self.metadata = np.zeros(size, bool)
        self.differing, self.changed = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        self.relative = np.full(size, -1.0)
        self.more = np.zeros(size, np.uint64)

    @property
    def differs(self) -> Array:
        """Which pairs differ."""
        return np.asarray((self.differing > 0) | ((self.own_kind != _EQUAL) & (self.own_kind != _NOT_COMPARED)))


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
        self._rules = RuleTable(comparer, signatures, _is_unclear, (a.is_inference, b.is_inference))
        # As in `_PairTable`, of each call of A; and a number for the modules of each pair.
        self._own_kind = np.zeros(len(a), np.uint8)
        self._differing = np.zeros(len(a), np.uint8)
        self._changed = np.zeros(len(a), np.uint8)
        self._relative = np.full(len(a), -1.0)
        self._keys = np.full(len(a), -1, np.int32)
        self._key_numbers: dict[int, int] = {}
        self._histories = Histories()

    def compare(self, total: DiffTotals) -> None:
        """Compare all pairs, classify them, and add them to `total`."""
        for start in range(0, len(self._a), CHUNK):
            numbers = np.arange(start, min(start + CHUNK, len(self._a)))
            numbers = numbers[self._pairs.of_a[numbers] >= 0]
            if len(numbers):
                self._compare_chunk(numbers, total)
        self._find_changed()
        total.add_unmatched("a", self._ranks[0], self._a, self._pairs.of_a)
        total.add_unmatched("b", self._ranks[1], self._b, self._pairs.of_b)
        self._add_to(total)

    def _compare_chunk(self, numbers: Array, total: DiffTotals) -> None:
        a, b = self._a, self._b
        others = self._pairs.of_a[numbers].astype(np.int64)
        names = (*_HASHES, "has_more", "has_tensors", "has_error")
        rows = _PairTable(numbers, others, a.columns.gather(numbers, names), b.columns.gather(others, names))
        kind_a, kind_b = a.kind[numbers], b.kind[others]
        rows.by = np.minimum(a.by[kind_a], b.by[kind_b]).astype(np.uint8)
        rows.own_kind[rows.by == 0] = _NOT_COMPARED
        codes = (a.key[kind_a].astype(np.int64) << 32) | b.key[kind_b]
        known, inverse = np.unique(codes, return_inverse=True)
        ids = [self._key_numbers.setdefault(code, len(self._key_numbers)) for code in known.tolist()]
        self._keys[numbers] = np.array(ids, np.int32)[inverse]
        left = np.flatnonzero(~self._same(rows, a.fingerprint[kind_a] == b.fingerprint[kind_b]))
        if len(left):
            self._compare_rows(rows, left, self._rules.numbers(a.signature[kind_a[left]], b.signature[kind_b[left]]))
            self._remember(rows)
        self._own_kind[numbers], self._differing[numbers] = rows.own_kind, rows.differing
        self._changed[numbers], self._relative[numbers] = rows.changed, rows.relative
        chosen = a.chosen(numbers)
        total.pairs += int(chosen.sum())
        total.metadata += int((rows.metadata & chosen).sum())
        for how, count in enumerate(np.bincount(self._pairs.how[numbers[chosen]]).tolist()):
            total.pairings[PAIRINGS[how]] += count
        for by, count in enumerate(np.bincount(rows.by[chosen & ~rows.differs]).tolist()):
            if count:
                total.by[_BY[by]] += count

    def _same(self, rows: _PairTable, signatures: Array) -> Array:
        """Find pairs that are equal in all that is compared. It may miss some, which are then compared one by one."""
        same = signatures & ~rows.a["has_error"] & ~rows.b["has_error"] & (rows.a["has_more"] == rows.b["has_more"])
        for name in _HASHES:
            same &= rows.a[name] == rows.b[name]
        a, b = self._a, self._b
        unhashed = np.flatnonzero(same & a.unhashed[a.kind[rows.numbers]])
        if len(unhashed):
            names = [f"{slot}_{name}" for slot in SLOTS for name in ("nan", "inf", *FIGURES)]
            x, y = a.columns.gather(rows.numbers[unhashed], names), b.columns.gather(rows.others[unhashed], names)
            for name in names:
                same[unhashed] &= (x[name] == y[name]) | ((x[name] != x[name]) & (y[name] != y[name]))
        more = np.flatnonzero(same & rows.a["has_more"])
        if len(more):
            pairs = zip(a.columns.texts(rows.numbers[more]), b.columns.texts(rows.others[more]), strict=True)
            same[more] = [one.more == other.more for one, other in pairs]
        return np.asarray(same)

    def _compare_rows(self, rows: _PairTable, left: Array, rules: Array) -> None:
        table = self._rules.table()
        slow = (table["slow"][rules] > 0) | rows.a["has_error"][left] | rows.b["has_error"][left]
        if self._comparer.reads_tensors:
            slow |= rows.a["has_tensors"][left] & rows.b["has_tensors"][left]
        fast = left[~slow]
        if len(fast):
            rules = rules[~slow]
            used = [slot for slot in SLOTS if table[f"{slot}_valued"][rules].any()]
            names = [f"{slot}_{name}" for slot in used for name in ("nan", "inf", *FIGURES)]
            a = self._a.columns.gather(rows.numbers[fast], names)
            b = self._b.columns.gather(rows.others[fast], names)
            a |= {name: rows.a[name][fast] for name in _HASHES}
            b |= {name: rows.b[name][fast] for name in _HASHES}
            found = Compared(self._comparer, table, rules, used, a, b)
            rows.differing[fast], rows.changed[fast] = found.differing, found.changed
            rows.relative[fast] = found.relative
            rows.metadata[fast] = table["metadata"][rules] > 0
            made = np.where(found.unclear, _UNCLEAR, _ADDED)
            own = np.where(found.output_differs, made, np.where(found.uncompared, _NOT_COMPARED, _EQUAL))
            rows.own_kind[fast] = np.where(table["argument"][rules] > 0, _ARGUMENT, own)
            rows.by[fast] = np.where(found.uncompared, 0, np.where(found.by_statistics, 1, 2))
        one_by_one = left[slow]
        pairs = self._calls(rows.numbers[one_by_one], rows.others[one_by_one])
        for row, (one, other) in zip(one_by_one.tolist(), pairs, strict=True):
            if fingerprint(one)[1] != fingerprint(other)[1]:
                self._compare_calls(rows, row, one, other)

    def _calls(self, numbers: Array, others: Array, *, given: bool = False) -> Iterator[tuple[StoredCall, StoredCall]]:
        a, b = self._a.columns, self._b.columns
        return zip(a.calls_at(numbers, given=given), b.calls_at(others, given=given), strict=True)

    def _compare_calls(self, rows: _PairTable, row: int, a: StoredCall, b: StoredCall) -> None:
        """Compare two calls that differ in something which columns do not hold."""
        roles = self._comparer.roles(a, b)
        differing, changed, relative, metadata = 0, 0, -1.0, False
        output_differs, compared = outcome(a.error) != outcome(b.error), True
        unclear = output_differs or _is_unclear(a, b)
        weakest = "hash"
        others: list[int | str] = []
        for role in roles:
            only_one = role.a is None or role.b is None
            if role.a is not None and role.b is not None:
                metadata |= role.a.shape != role.b.shape or role.a.dtype != role.b.dtype
            if is_output(role.role):
                output_differs |= role.equal is False
                if role.role == "output" and role.equal is None and not only_one:
                    compared = False
                relative = max(relative, order(role.relative))
            elif role.equal is None:
                unclear = True
            elif not role.equal:
                differing |= operand(role.role)
                # No value of another call explains an operand that only one of them has, nor a parameter.
                if only_one or self._is_parameter(role):
                    changed |= operand(role.role)
                x, y = role.a_values, role.b_values
                if role.role not in OPERANDS and x is not None and y is not None and x.hash and y.hash:
                    others += (role.role, x.hash, y.hash)
            if role.by != "hash" and role.equal:
                weakest = "statistics" if "statistics" in (weakest, role.by) else str(role.by)
        own_kind = _EQUAL if compared else _NOT_COMPARED
        if self._comparer.arguments(a, b):
            own_kind = _ARGUMENT
        elif output_differs:
            own_kind = _UNCLEAR if unclear else _ADDED
        rows.own_kind[row], rows.differing[row], rows.changed[row] = own_kind, differing, changed
        rows.relative[row], rows.metadata[row] = relative, metadata
        rows.by[row] = _BY.index(weakest) if compared else 0
        if others:
            rows.more[row] = hash(tuple(others)) & 0xFFFFFFFFFFFFFFFE | 1

    def _is_parameter(self, role: RoleDifference) -> bool:
        sides = ((role.a, self._a), (role.b, self._b))
        return any(meta is not None and meta.requires_grad and index.is_inference for meta, index in sides)

    def _remember(self, rows: _PairTable) -> None:
        """Keep what `_find_changed` needs of the pairs that differ."""
        which = rows.differs
        a, b = ({slot: side[f"{slot}_hash"][which] for slot in SLOTS} for side in (rows.a, rows.b))
        keys = self._keys[rows.numbers[which]]
        self._histories.add(Differing(keys, a, b, rows.differing[which], rows.more[which]))

    def _find_changed(self) -> None:
        """Set `_changed` to the operands of each call that no earlier differing call explains."""
        own = self._own_kind
        differs = np.flatnonzero((self._differing > 0) | ((own != _EQUAL) & (own != _NOT_COMPARED)))
        if not len(differs):
            return
        calls = np.bincount(self._keys[self._keys >= 0], minlength=len(self._key_numbers))
        keys, firsts = np.unique(self._keys[differs], return_index=True)
        in_order = keys[np.argsort(firsts)].tolist()
        constant = np.zeros(len(calls), np.uint8)
        for key, operands in self._histories.constant(in_order, calls).items():
            constant[key] = operands
        differing = self._differing[differs]
        self._changed[differs] = differing & (constant[self._keys[differs]] | self._changed[differs])
        self._changed[differs[0]] = differing[0]

    def _kinds(self) -> Array:
        kinds = np.where(self._differing > 0, np.uint8(_INHERITED), self._own_kind)
        kinds = np.where(self._changed > 0, np.uint8(_OPERAND), kinds)
        return np.where(self._own_kind == _ARGUMENT, np.uint8(_ARGUMENT), kinds)

    def _add_to(self, total: DiffTotals) -> None:
        a, b, of_a, of_b = self._a, self._b, self._pairs.of_a, self._pairs.of_b
        chosen = np.flatnonzero(of_a >= 0).astype(np.int32)
        chosen = chosen[a.chosen(chosen)]
        kinds = self._kinds()[chosen]
        for kind, count in enumerate(np.bincount(kinds, minlength=len(KINDS)).tolist()):
            total.kinds[KINDS[kind]] += count
        differs = (kinds != _EQUAL) & (kinds != _NOT_COMPARED)
        differing = chosen[differs]
        if total.watch is not None:
            total.watch(a, chosen, self._relative[chosen], differs, self._ranks)
        if not len(differing):
            return
        first = int(differing[0])
        modules, firsts = self._modules(differing)
        # Calls before the first that differs count, too.
        module_of = np.full(len(self._key_numbers), -1)
        shown = {module: place for place, module in enumerate(modules[: total.limit])}
        for code, key in self._key_numbers.items():
            module_of[key] = shown.get(self._module_code(code), -1)
        of_module = module_of[self._keys[chosen]]
        counted = of_module >= 0
        counts = np.bincount(of_module[counted] * len(KINDS) + kinds[counted], minlength=len(shown) * len(KINDS))
        relative = np.full(len(shown), -1.0)
        np.maximum.at(relative, of_module[counted], self._relative[chosen[counted]])
        before = int((of_a[:first] < 0).sum()), int((of_b[: of_a[first]] < 0).sum())
        total.add_first(self._call(first), before)
        total.modules_in_all += len(modules)
        rows = []
        places = a.columns.gather(firsts[: len(shown)], ("step", "index"))
        for place, number in enumerate(firsts[: len(shown)].tolist()):
            per_kind = counts[place * len(KINDS) : (place + 1) * len(KINDS)].tolist()
            call_site = a.columns.call_site(int(a.call_site[a.kind[number]]))
            other = b.columns.call_site(int(b.call_site[b.kind[of_a[number]]]))
            step, index = int(places["step"][place]), int(places["index"][place])
            row = ModuleDifference(
                ranks=self._ranks,
                module=module_name(call_site.module),
                other=module_name(other.module),
                phase=call_site.phase,
                calls=sum(per_kind),
                kinds={kind: count for kind, count in zip(KINDS, per_kind, strict=True) if count},
                relative=float(relative[place]) if relative[place] >= 0 else None,
                index=index,
            )
            rows.append(((step, index, self._ranks[0]), row))
        total.add_rows(self._worst(differing, total.worst_limit), rows)

    def _module_code(self, code: int) -> int:
        """A number for the modules and the phase of a pair, of which `code` has the keys."""
        return self._module_codes[code]

    def _modules(self, differing: Array) -> tuple[list[int], Array]:
        """The modules with a pair that differs, in the order of the first, and these."""
        a, b = self._a, self._b
        of_key_a = dict(zip(a.key.tolist(), zip(a.module.tolist(), a.phase.tolist(), strict=True), strict=True))
        of_key_b = dict(zip(b.key.tolist(), b.module.tolist(), strict=True))
        numbers: dict[tuple[int, int, int], int] = {}
        self._module_codes: dict[int, int] = {}
        module_of = np.zeros(len(self._key_numbers), np.int64)
        for code, key in self._key_numbers.items():
            module, phase = of_key_a[code >> 32]
            number = numbers.setdefault((module, of_key_b[code & 0xFFFFFFFF], phase), len(numbers))
            module_of[key] = self._module_codes[code] = number
        found, firsts = np.unique(module_of[self._keys[differing]], return_index=True)
        in_order = np.argsort(firsts)
        return found[in_order].tolist(), differing[firsts[in_order]]

    def _worst(self, differing: Array, limit: int) -> list[tuple[float, CallDifference]]:
        relative = self._relative[differing]
        if len(relative) > limit:
            least = np.partition(relative, len(relative) - limit)[len(relative) - limit]
            above = np.flatnonzero(relative > least)
            which = np.r_[above, np.flatnonzero(relative == least)[: limit - len(above)]]
            differing, relative = differing[which], relative[which]
        in_order = np.lexsort((differing, -relative))
        numbers = differing[in_order]
        calls = self._calls(numbers, self._pairs.of_a[numbers].astype(np.int64))
        return [
            (float(self._relative[number]), self._difference(int(number), one, other))
            for number, (one, other) in zip(numbers.tolist(), calls, strict=True)
        ]

    def _call(self, number: int) -> CallDifference:
        ((a, b),) = self._calls(np.array([number]), self._pairs.of_a[[number]].astype(np.int64), given=True)
        return self._difference(number, a, b)

    def _difference(self, number: int, a: StoredCall, b: StoredCall) -> CallDifference:
        roles = self._comparer.roles(a, b)
        changed = int(self._changed[number])
        names = [role for role, operand_ in OPERANDS.items() if changed & operand_]
        if changed & OTHERS:
            differing = [role for role in roles if role.equal is False and operand(role.role) == OTHERS]
            in_one = [role for role in differing if role.a is None or role.b is None]
            names += [role.role for role in in_one or differing]
        arguments = self._comparer.arguments(a, b)
        kind = KINDS[int(self._kind_of(number))]
        pairing = PAIRINGS[int(self._pairs.how[number])]
        return CallDifference(kind, pairing, tuple(names), arguments, a, b, roles)

    def _kind_of(self, number: int) -> int:
        if self._own_kind[number] == _ARGUMENT:
            return _ARGUMENT
        if self._changed[number]:
            return _OPERAND
        return _INHERITED if self._differing[number] else int(self._own_kind[number])


def _is_unclear(a: StoredCall, b: StoredCall) -> bool:
    """Return whether an output can differ although all recorded operands are equal."""
    if a.arguments is None or b.arguments is None:
        return not {operator_name(a.record.op), operator_name(b.record.op)} <= _COMPLETE
    return _is_random(a) or _is_random(b)
