"""Compares two processes, and classifies each pair: it adds its difference, has a changed operand, or inherits it.

Where the judge of `why` has compared what two runs come to, its answer decides.

Invariant: no operand counts as changed if an earlier differing call can explain the change. Memory grows with the
modules, not with the pairs. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from opintercept._core.record import CallRecord
from opintercept.runs.compare.difference import KINDS, Absent, CallDifference, ModuleDifference, RoleDifference
from opintercept.runs.compare.judged import decides, judged, story, unjudged
from opintercept.runs.compare.operands import Comparer, TensorErrors
from opintercept.runs.compare.pairing import BY, PAIRINGS, Ids, outcome
from opintercept.runs.compare.pairs import PHASES, Index, Pairs, PairWindow
from opintercept.runs.compare.tolerance import (
    OPERANDS,
    OTHERS,
    Compared,
    Rule,
    Rules,
    Side,
    columns_of,
    hashes_decide,
    operand,
    role_differences,
)
from opintercept.runs.compare.totals import (
    ADDED,
    ARGUMENT,
    EQUAL,
    INHERITED,
    NEVER,
    NOT_COMPARED,
    OPERAND,
    ROW,
    UNCLEAR,
    DiffTotals,
    ProcessTotals,
    differ,
)
from opintercept.runs.program.names import first_models, module_name
from opintercept.runs.store.codec import StoredCall
from opintercept.runs.store.columns import FIGURES, ROLES, SLOTS, Array, Arrays, Columns
from opintercept.runs.store.run import Run
from opintercept.runs.sums import CodeNumbers, starts_of
from opintercept.runs.why.answer import Answer

_BATCH = 256  # calls that are read whole together
_PIECE = 1 << 14  # calls whose statistics are read together
_HASHES = tuple(f"{slot}_hash" for slot in SLOTS)
_NAMES = (*_HASHES, "has_more", "has_tensors", "has_error", "elapsed")


class ProcessPair:
    """A process of the first run and its counterpart in the second."""

    def __init__(self, a: Index, b: Index, ranks: tuple[int, int], comparer: Comparer) -> None:
        self._a, self._b = a, b
        self._ranks = ranks
        self._comparer = comparer
        self._pairs = Pairs(a, b)
        self._rules = Rules(comparer, (a.columns, b.columns), (a.is_inference, b.is_inference))
        self._kinds, self._keys = CodeNumbers(), CodeNumbers()
        # For each pair of kinds the number of its pair of keys, whether it has the same fingerprints, by what it is
        # equal, as an index into `BY`, whether some tensors have no hash, and the number of its rule.
        self._of_kinds = np.zeros((5, 0), np.int64)
        self._modules = np.zeros((0, 3), np.int64)  # for each pair of keys the modules of both, and the phase

    def compare(self, total: DiffTotals) -> None:
        """Compare all pairs, classify them, and add them to `total`."""
        if len(self._a) != len(self._b):  # not all calls can pair in order
            for _ in self._pairs.windows():
                pass
            self._pairs.settled()
        runs = self._comparer.a, self._comparer.b
        sides = self._a.columns, self._b.columns
        total.judged = unjudged(*runs, sides) if self._comparer.reads_tensors else "values were not read"
        while True:
            self._totals = ProcessTotals(total.worst_limit)
            self._differing = [np.zeros(0, ROW)]  # all pairs that are not known to be equal, if they may be judged
            self._shown: list[tuple[Array, Array]] = []
            for window in self._pairs.windows(_NAMES):
                self._compare_window(window, total)
            if self._pairs.settled():
                break
        alone_a, alone_b = self._pairs.unmatched
        total.add_unmatched(("a", self._a, alone_a), ("b", self._b, alone_b))
        differing = np.concatenate(self._differing)
        if not total.judged and (len(differing) or len(alone_a) or len(alone_b)):
            total.judged = judged(*runs)
        self._add_to(total, np.sort(differing, order="a") if decides(total.judged) else None)

    def _compare_window(self, rows: PairWindow, total: DiffTotals) -> None:
        kinds, new = self._kinds.of((rows.a["kind"] << 32) | rows.b["kind"])
        if len(new):
            self._learn(rows.a["kind"][new], rows.b["kind"][new])
        chosen = self._a.chosen(rows.numbers, rows.a["kind"])
        for times, side in zip(self._totals.elapsed, rows[3:], strict=True):
            times.append(side["elapsed"][chosen].sum())  # NaN if one is unknown
        found = self._found = np.zeros(len(kinds), ROW)
        found["a"], found["b"], found["how"], found["relative"] = rows.numbers, rows.others, rows.how, -1.0
        found["key"], alike, found["by"], unhashed, rule = self._of_kinds[:, kinds]
        found["kind"] = np.where(found["by"] == BY.index("nothing"), NOT_COMPARED, EQUAL)
        left = np.flatnonzero(~self._same(rows, alike > 0, unhashed > 0))
        if len(left):
            self._compare(rows, left, rule)
        self._totals.add(found, chosen, self._modules[:, 2] == PHASES.index("backward"))
        if not total.judged:
            self._differing.append(found[found["kind"] != EQUAL])
        if total.watch is not None:
            shown = found[chosen & differ(found["kind"])]
            self._shown.append((shown["a"], shown["relative"]))

    def _learn(self, kind_a: Array, kind_b: Array) -> None:
        """Add pairs of kinds."""
        a, b = self._a.kinds[kind_a], self._b.kinds[kind_b]
        keys, new = self._keys.of((a["key"] << 32) | b["key"])
        modules = np.stack([a["module"][new], b["module"][new], a["phase"][new]], axis=1)
        self._modules = np.vstack([self._modules, modules])
        alike, by = a["fingerprint"] == b["fingerprint"], np.minimum(a["by"], b["by"])
        rules = self._rules.numbers(a["signature"], b["signature"])
        self._of_kinds = np.hstack([self._of_kinds, np.stack([keys, alike, by, a["unhashed"], rules])])

    def _compare(self, rows: PairWindow, places: Array, rule: Array) -> None:
        """Compare the pairs at some places of a window, by the numbers of their rules."""
        rules, which = self._rules.of(rule[places])
        in_texts = np.array([any(known.bases.keys() - slots.keys() for slots in known.slots) for known in rules], bool)
        flags = [side[f"has_{name}"][places] for side in rows[3:] for name in ("more", "error")]
        whole = in_texts[which] | np.any(flags, axis=0)
        if self._comparer.reads_tensors:
            whole |= rows.a["has_tensors"][places] & rows.b["has_tensors"][places]
        for which_rows, size, compare in (~whole, _PIECE, self._compare_columns), (whole, _BATCH, self._compare_calls):
            some = places[which_rows]
            for start in range(0, len(some), size):
                piece = some[start : start + size]
                compare(rows.take(piece), piece, *self._rules.of(rule[piece]))

    def _same(self, rows: PairWindow, same: Array, unhashed: Array) -> Array:
        """Find pairs that are equal in all that is compared. It may miss some, which are then compared."""
        for name in (*_HASHES, "has_more", "has_error"):
            same &= rows.a[name] == rows.b[name]
        a, b = self._a, self._b
        some = np.flatnonzero(same & unhashed)
        if len(some):
            names = [f"{slot}_{name}" for slot in SLOTS for name in ("nan", "inf", *FIGURES)]
            x, y = a.columns.gather(rows.numbers[some], names), b.columns.gather(rows.others[some], names)
            for name in names:
                same[some] &= (x[name] == y[name]) | ((x[name] != x[name]) & (y[name] != y[name]))
        texts = np.flatnonzero(same & (rows.a["has_more"] | rows.a["has_error"]))
        if len(texts):
            pairs = zip(a.columns.texts(rows.numbers[texts]), b.columns.texts(rows.others[texts]), strict=True)
            same[texts] = [x.more == y.more and outcome(x.error) == outcome(y.error) for x, y in pairs]
        return np.asarray(same)

    def _compare_columns(self, rows: PairWindow, places: Array, rules: list[Rule], which: Array) -> None:
        """Compare pairs of which columns have all that is compared."""
        roles = dict.fromkeys(role for rule in rules for role in rule.bases)
        hashed = {role for role in roles if hashes_decide(rules, role)}

        def side(number: int, columns: Columns, calls: Array, known: Arrays) -> Side:
            of_roles = {role: [ROLES.get(rule.slots[number].get(role, "")) for rule in rules] for role in roles}
            slots = {slot for role in roles.keys() - hashed for slot in filter(None, of_roles[role])}
            names = [f"{slot}_{name}" for slot in slots for name in ("nan", "inf", *FIGURES)]
            read = known | columns.gather(calls, names)

            def of(role: str, at: Array) -> Arrays:
                used = [*dict.fromkeys(filter(None, of_roles[role]))]
                place = np.array([used.index(slot or used[0]) for slot in of_roles[role]])[which[at]]
                names = ("hash",) if role in hashed else ("hash", "nan", "inf", *FIGURES)
                return {name: np.choose(place, [read[f"{slot}_{name}"][at] for slot in used]) for name in names}

            return of

        sides = (side(0, self._a.columns, rows.numbers, rows.a), side(1, self._b.columns, rows.others, rows.b))
        self._keep(places, Compared(self._comparer, rules, which, *sides))

    def _compare_calls(self, rows: PairWindow, places: Array, rules: list[Rule], which: Array) -> None:
        """Compare pairs that have errors, tensors, or values in no column."""
        calls, others = zip(*self._calls(rows.numbers, rows.others), strict=True)

        def side(calls: tuple[StoredCall, ...]) -> Side:
            return lambda role, at: columns_of([calls[row].values[role] for row in at.tolist()])

        def errors(role: str, row: int) -> TensorErrors | None:
            return self._comparer.errors(role, calls[row], others[row])

        found = Compared(self._comparer, rules, which, side(calls), side(others), errors)
        apart = np.array([outcome(a.error) != outcome(b.error) for a, b in zip(calls, others, strict=True)], bool)
        found.output_differs |= apart
        found.unclear |= apart
        self._keep(places, found)

    def _keep(self, places: Array, found: Compared) -> None:
        kind = np.where(found.output_differs, np.where(found.unclear, UNCLEAR, ADDED), EQUAL)
        kind = np.where(found.uncompared & ~found.output_differs, NOT_COMPARED, kind)
        kind = np.where(found.differing > 0, np.where(found.changed > 0, OPERAND, INHERITED), kind)
        self._found["kind"][places] = np.where(found.argument, ARGUMENT, kind)
        self._found["by"][places] = np.where(found.uncompared, BY.index("nothing"), found.by)
        for name in ("differing", "changed", "relative", "metadata"):
            self._found[name][places] = getattr(found, name)

    def _calls(self, numbers: Array, others: Array, *, given: bool = False) -> Iterator[tuple[StoredCall, StoredCall]]:
        a, b = self._a.columns, self._b.columns
        return zip(a.calls_at(numbers, given=given), b.calls_at(others, given=given), strict=True)

    def _add_to(self, total: DiffTotals, differing: Array | None) -> None:
        """Add what was found; if it was judged, `differing` has all pairs that are not known to be equal."""
        totals = self._totals
        keys = totals.keys
        if not len(keys):
            return
        if differing is not None:
            blamed = self._judge(differing, total.judged)
        else:
            totals.settle()
            blamed = keys["first"]
        total.pairs += int(totals.how.sum())
        total.metadata += totals.metadata
        total.pairings.update(_counted(PAIRINGS, totals.how))
        total.by.update(_counted(BY, totals.by))
        total.kinds.update(_counted(KINDS, totals.counts.sum(0)))
        for of_run, times in zip(total.elapsed, totals.elapsed, strict=True):
            of_run.extend(times)
        if total.watch is not None and self._shown:
            total.watch(self._a, *map(np.concatenate, zip(*self._shown, strict=True)))
        if (blamed["a"] < NEVER).any():
            self._add_first(blamed[np.argmin(blamed["a"])], total)
        module_of = np.unique(self._modules, axis=0, return_inverse=True)[1].reshape(-1)
        order = np.lexsort((keys["first"]["a"], module_of))
        starts = starts_of(module_of[order])
        firsts = keys["first"][order[starts]]
        found = np.argsort(firsts["a"])[: int((firsts["a"] < NEVER).sum())]
        total.modules_in_all += len(found)
        if not len(found):
            return
        found = found[: total.limit]
        counts, relative = np.add.reduceat(totals.counts[order], starts), keys["relative"][order]
        figures = counts[found], np.maximum.reduceat(relative, starts)[found]
        worst = [(float(row["relative"]), self._difference(row, *pair)) for row, pair in self._pairs_of(totals.worst)]
        total.add_rows(worst, list(self._module_rows(firsts[found], *figures)))

    def _judge(self, differing: Array, answer: Answer | str) -> Array:
        """Set kinds, counts and first calls by what the judge says, and return the pairs that it blames."""
        assert isinstance(answer, Answer)
        a = self._a
        read = a.gather(differing["a"], ("index",))
        at = (chunk["index"][a.kinds["product"][chunk["kind"]]] for _, chunk in a.chunks(("index",)))
        begins = next((int(each[0]) for each in at if len(each)), 0)
        blamed = story(differing, read["index"], begins, answer)
        chosen = a.chosen(differing["a"], read["kind"])
        self._totals.replace(differing, chosen)
        return differing[chosen & (blamed if (blamed & chosen).any() else differing["kind"] == INHERITED)]

    def _pairs_of(self, rows: Array, *, given: bool = False) -> Iterator[tuple[Any, tuple[StoredCall, StoredCall]]]:
        return zip(rows, self._calls(rows["a"], rows["b"], given=given), strict=True)

    def _add_first(self, first: Any, total: DiffTotals) -> None:
        ((_, pair),) = self._pairs_of(first[None], given=True)
        alone_a, alone_b = (
            int(np.searchsorted(each, number))
            for each, number in zip(self._pairs.unmatched, (first["a"], first["b"]), strict=True)
        )
        optimizer = not alone_a + alone_b and self._by_optimizer(first)
        total.add_first(self._difference(first, *pair), (alone_a, alone_b), optimizer)

    def _by_optimizer(self, first: Any) -> bool:
        """Whether a weight differs although it was equal in an earlier call, and all gradients before are equal."""
        begins = self._totals.keys["begins"]
        return bool(
            first["a"] == self._totals.first["a"][0]
            and first["changed"]
            and not first["changed"] & OPERANDS["lhs"]
            and begins[first["key"]] < first["a"]
            and (begins[self._modules[:, 2] == PHASES.index("backward")] < first["a"]).any()
            and self._totals.uncompared > first["a"]
        )

    def _module_rows(
        self, firsts: Array, counts: Array, relative: Array
    ) -> Iterator[tuple[tuple[int, int, int], ModuleDifference]]:
        for (_, (a, b)), of_kinds, size in zip(self._pairs_of(firsts), counts.tolist(), relative.tolist(), strict=True):
            kinds = {kind: count for kind, count in zip(KINDS, of_kinds, strict=True) if count}
            names = module_name(a.record.module), module_name(b.record.module), a.record.phase
            known = size if size >= 0 else None
            yield a.place, ModuleDifference(self._ranks, *names, sum(of_kinds), kinds, known, a.record.index)

    def _difference(self, row: Any, a: StoredCall, b: StoredCall) -> CallDifference:
        roles = role_differences(self._comparer, a, b)
        arguments = self._comparer.arguments(a, b)
        pairing, names = PAIRINGS[row["how"]], tuple(_names(row, roles))
        return CallDifference(KINDS[row["kind"]], pairing, names, arguments, a, b, roles)


def _names(row: Any, roles: Sequence[RoleDifference]) -> list[str]:
    """The operands of a pair that differ and that no call before explains."""
    changed = int(row["changed"])
    names = [role for role, operand_ in OPERANDS.items() if changed & operand_]
    if changed & OTHERS:
        differing = [role for role in roles if role.equal is False and operand(role.role) == OTHERS]
        in_one = [role for role in differing if role.a is None or role.b is None]
        names += [role.role for role in in_one or differing]
    return names


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
            a.model, b.model = first_models(a.names, b.names) or ("", "")
            ProcessPair(a, b, total.ranks[-1], comparer).compare(total)
            return
        if not any(sizes):
            return
    sides: tuple[Literal["a", "b"], ...] = ("a", "b")
    for side, index, other, others in zip(sides, (a, b), (b, a), reversed(sizes), strict=True):
        if index is not None and len(index):
            total.add_unmatched((side, index, range(len(index))))
        else:
            there = other if index is None else index
            assert there is not None
            total.absent.append(Absent(side, there.columns.rank, index is not None, others))
