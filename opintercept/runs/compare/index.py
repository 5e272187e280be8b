"""`Index` and `Pairs`: pair each call of one run with its counterpart in another.

Invariant: a pair of calls costs some thirty bytes of memory, and every step takes about linear time, except for one
that has a budget. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import get_args

import numpy as np

from opintercept._core.record import CallRecord, Phase
from opintercept.runs.compare.columns import mixed
from opintercept.runs.compare.pairing import PAIRINGS, Ids, family, fingerprint, is_plain, module_name, operator_name
from opintercept.runs.store.columns import CHUNK, Array, Columns
from opintercept.runs.sums import KindNumbers, starts_of

_BUDGET = 5_000_000  # comparisons of equal elements that difflib may make for a pair of runs: about five seconds
_SOME = 10_000  # changed calls that are looked at to find shuffled ones
PHASES = get_args(Phase)
_HASHES = ("lhs_hash", "rhs_hash", "bias_hash")


class Index:
    """The calls of one process, in the order in which they ended.

    A kind is a distinct (call site, signature) pair. `key`, `loose`, `module`, `phase`, `shape`, `signature`,
    `call_site`, `fingerprint`, `by` and `unhashed` have an entry for each kind; `kind` and `inputs` have one for each
    call.

    Args:
        columns: The calls.
        ids: Numbers for equal things, shared with the other run's index.
        select: Which calls the caller asks for. If it has an attribute `by_name` that is true, it is called once for
            each kind.

    Attributes:
        inputs: Shapes and hashes of the first operands; 0 if no hash is recorded.
        key: Module, operator, phase and `grad_of`.
        loose: Module, phase and family.
        shape: Phase, family and the GEMM, or the operands' shapes if there is no GEMM.
        fingerprint: Everything that is compared except for values.
        by: What there is of the outputs' values, as an index into `pairing.BY`.
        unhashed: Whether some tensors have no hash.
        is_inference: Whether the process trains nothing: no backward pass, no left operand that requires a gradient.
    """

    def __init__(self, columns: Columns, ids: Ids, select: Callable[[CallRecord], bool] | None) -> None:
        self.columns = columns
        self.kind, self.inputs = np.empty(len(columns), np.uint16), np.empty(len(columns), np.int64)
        self.is_inference = True
        self._ids = ids
        self._names: list[tuple[str | None, str, str, str, str | None]] = []  # of each kind; the family comes second
        self._numbers: list[tuple[int, ...]] = []  # shape, signature, call site, fingerprint, by, unhashed, chosen
        self._of_signatures: dict[int, tuple[int, int, bool]] = {}  # fingerprint, by, unhashed
        by_name = select is not None and getattr(select, "by_name", False)
        kinds = KindNumbers(columns)
        starts, steps = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for start, chunk in columns.chunks(("site", "look", "step", *_HASHES)):
            found, new = kinds.of(chunk)
            for call_site, signature in new:
                self._add(call_site, signature, select if by_name else None)
            if len(self._numbers) > 1 << 16:
                self.kind = self.kind.astype(np.int32, copy=False)
            shapes = np.array([numbers[0] for numbers in self._numbers], np.uint64)[found]
            self.kind[start : start + len(found)] = found
            self.inputs[start : start + len(found)] = mixed(shapes, *(chunk[name] for name in _HASHES))
            new_steps = starts_of(chunk["step"])
            starts.append(new_steps + start)
            steps.append(chunk["step"][new_steps])
        self._starts, self._steps = np.concatenate(starts), np.concatenate(steps)  # of stretches of calls of one step
        fixed = np.array(self._numbers, np.int64).reshape(-1, 7).T
        self.shape, self.signature, self.call_site, self.fingerprint, self.by, unhashed, chosen = fixed
        self.unhashed, self._chosen_kinds = unhashed > 0, chosen > 0
        self._chosen: Array | None = None
        if select is not None and not by_name:
            self._chosen = np.fromiter((select(call.record) for call in columns.calls()), bool, len(columns))
        self.number("")

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def names(self) -> set[str]:
        """The names of the modules."""
        return {module for module, *_ in self._names if module}

    def _add(self, call_site_number: int, signature_number: int, select: Callable[[CallRecord], bool] | None) -> None:
        """Add a kind."""
        call_site, signature = self.columns.call_site(call_site_number), self.columns.signature(signature_number)
        record, phase = signature.record, call_site.phase
        lhs, rhs = record.lhs, record.rhs
        if phase != "forward" or (lhs is not None and lhs.requires_grad):
            self.is_inference = False
        operands = (lhs and lhs.shape, rhs and rhs.shape) if record.gemm is None else record.gemm[:4]
        names = module_name(call_site.module), family(record), operator_name(record.op), phase, call_site.grad_of
        self._names.append(names)
        if signature_number not in self._of_signatures:
            unhashed = not all(hashed for _, hashed in signature.roles.values())
            self._of_signatures[signature_number] = *fingerprint(signature.template), unhashed
        chosen = select is None or select(signature.record_at(call_site))
        shape = self._ids("shape", phase, family(record), operands)
        of_signature = self._of_signatures[signature_number]
        self._numbers.append((shape, signature_number, call_site_number, *of_signature, chosen))

    def number(self, model: str) -> None:
        """Number keys, families and modules, with the class of a model (see `first_models`) before plain names."""
        ids = self._ids
        found = []
        for module, kin, op, phase, grad_of in self._names:
            if model and module and is_plain(module):
                module = f"{model}.{module}"
            key, loose = ids("key", module, op, phase, grad_of), ids("loose", module, phase, kin)
            found.append((key, loose, ids("module", module), PHASES.index(phase)))
        self.key, self.loose, self.module, phases = np.array(found, np.int64).reshape(-1, 4).T
        self.phase = phases.astype(np.uint8)

    def chosen(self, numbers: Array) -> Array:
        """Return which of these calls the caller selects."""
        if self._chosen is not None:
            return np.asarray(self._chosen[numbers])
        return np.asarray(self._chosen_kinds[self.kind[numbers]])

    def weights(self, numbers: Array) -> list[int]:
        """Shape, and hashes of the right operand and the bias; 0 if no hash is recorded."""
        read = self.columns.gather(numbers, _HASHES[1:])
        known = mixed(self.shape[self.kind[numbers]].astype(np.uint64), read["rhs_hash"], read["bias_hash"])
        return np.where(read["rhs_hash"] == 0, 0, known).tolist()  # type: ignore[no-any-return]

    def steps(self, numbers: Array) -> Array:
        """The steps."""
        return np.asarray(self._steps[np.searchsorted(self._starts, numbers, "right") - 1])


class Pairs:
    """The counterparts of the calls of two indexes.

    Attributes:
        of_a: For each call of A, the number of its counterpart in B; -1 if it has none.
        alone_b: Whether each call of B has none.
        how: How each call of A was paired, as an index into `PAIRINGS`, see `CallDifference.pairing`. Calls are aligned
            as a sequence if the runs have different numbers of them, or other shapes.
    """

    def __init__(self, a: Index, b: Index) -> None:
        self.of_a, self.alone_b = np.full(len(a), -1, np.int32), np.ones(len(b), bool)
        self.how = np.zeros(len(a), np.uint8)
        self._a, self._b = a, b
        self._budget = _BUDGET
        self._modules = set(a.module.tolist()), set(b.module.tolist())
        for how, name in ((0, "key"), (2, "loose"), (3, "phase")):
            groups_a, groups_b = _groups(a, name, self.of_a < 0), _groups(b, name, self.alone_b)
            for key, in_a in groups_a.items():
                if (in_b := groups_b.get(key)) is not None:
                    self._pair(in_a, in_b, how)

    def _pair(self, in_a: Array, in_b: Array, how: int) -> None:
        a, b = self._a, self._b
        renamed = PAIRINGS[how] == "shape"
        pairs = [(in_a[start : start + CHUNK], in_b[start : start + CHUNK]) for start in range(0, len(in_a), CHUNK)]
        same_length = not renamed and len(in_a) == len(in_b)
        if same_length and all(np.array_equal(a.shape[a.kind[i]], b.shape[b.kind[j]]) for i, j in pairs):
            # Some changed calls are enough to see whether calls are shuffled.
            changed = [np.flatnonzero(a.inputs[i] != b.inputs[j])[:_SOME] for i, j in pairs]
            own = np.concatenate([a.inputs[i[some]] for (i, _), some in zip(pairs, changed, strict=True)])[:_SOME]
            others = np.concatenate([b.inputs[j[some]] for (_, j), some in zip(pairs, changed, strict=True)])[:_SOME]
            if {*own.tolist()}.isdisjoint({*others.tolist()} - {0}):
                self.of_a[in_a], self.alone_b[in_b], self.how[in_a] = in_b, False, how
                return
        how = how or 1
        # Calls with the same operands are the same wherever they stand; with the same weight, the module is the same.
        known = (a.weights(in_a), b.weights(in_b)) if renamed else (a.inputs[in_a].tolist(), b.inputs[in_b].tolist())
        self._join(_by_turns(in_a.tolist(), in_b.tolist(), *known), how)
        for signs in (_steps, _shapes):
            in_a, in_b = in_a[self.of_a[in_a] < 0], in_b[self.alone_b[in_b]]
            if len(in_a) and len(in_b):
                self._join(self._in_order(in_a.tolist(), in_b.tolist(), signs(a, in_a), signs(b, in_b)), how)
        in_a, in_b = in_a[self.of_a[in_a] < 0], in_b[self.alone_b[in_b]]
        if len(in_a) == len(in_b) and not renamed:
            self._join(zip(in_a.tolist(), in_b.tolist(), strict=True), how)

    def _join(self, pairs: Iterable[tuple[int, int]], how: int) -> None:
        for i, j in pairs:
            if PAIRINGS[how] != "shape" or self._may_be_renamed(i, j):
                self.of_a[i], self.alone_b[j], self.how[i] = j, False, how

    def _may_be_renamed(self, i: int, j: int) -> bool:
        """Return whether two modules may be one under two names: a module that both runs have is not."""
        in_a, in_b = self._a.module[self._a.kind[i]], self._b.module[self._b.kind[j]]
        return bool(in_a == in_b or in_a not in self._modules[1] or in_b not in self._modules[0])

    def _in_order(
        self, in_a: list[int], in_b: list[int], signs_a: Sequence[Hashable], signs_b: Sequence[Hashable]
    ) -> Iterator[tuple[int, int]]:
        """Pairs in the longest stretches of equal signs; by turns if finding these would take too long."""
        start, end_a, end_b = 0, len(in_a), len(in_b)
        while start < min(end_a, end_b) and signs_a[start] == signs_b[start]:
            yield in_a[start], in_b[start]
            start += 1
        while min(end_a, end_b) > start and signs_a[end_a - 1] == signs_b[end_b - 1]:
            end_a, end_b = end_a - 1, end_b - 1
            yield in_a[end_a], in_b[end_b]
        in_a, in_b = in_a[start:end_a], in_b[start:end_b]
        middle_a, middle_b = signs_a[start:end_a], signs_b[start:end_b]
        counts: dict[Hashable, int] = defaultdict(int)
        for sign in middle_b:
            counts[sign] += 1
        alike = sum(counts.get(sign, 0) for sign in middle_a)
        if not alike:
            return
        # difflib looks at each pair of equal elements at each level of its recursion, which can be 20 deep.
        work = 20 * alike + len(middle_a) + len(middle_b)
        if work > self._budget:
            yield from _by_turns(in_a, in_b, middle_a, middle_b)
            return
        self._budget -= work
        for first_a, first_b, size in SequenceMatcher(None, middle_a, middle_b, autojunk=False).get_matching_blocks():
            yield from zip(in_a[first_a : first_a + size], in_b[first_b : first_b + size], strict=True)


def _steps(index: Index, numbers: Array) -> list[Hashable]:
    """The steps together with the shapes."""
    return list(zip(_shapes(index, numbers), index.steps(numbers).tolist(), strict=True))


def _shapes(index: Index, numbers: Array) -> list[Hashable]:
    return index.shape[index.kind[numbers]].tolist()  # type: ignore[no-any-return]


def _groups(index: Index, name: str, alone: Array) -> dict[int, Array]:
    """The calls without a counterpart that share a number, by that number, in the order of their first calls."""
    keys, of_kinds = np.unique(getattr(index, name), return_inverse=True)
    chunks = [slice(start, start + CHUNK) for start in range(0, len(alone), CHUNK)]
    sizes = np.zeros(len(keys), np.int64)
    for chunk in chunks:
        sizes += np.bincount(of_kinds[index.kind[chunk][alone[chunk]]], minlength=len(keys))
    ends = np.cumsum(sizes)
    numbers, free = np.empty(sizes.sum(), np.int32), ends - sizes
    for chunk in chunks:
        some = np.flatnonzero(alone[chunk]) + chunk.start
        groups = of_kinds[index.kind[some]]
        order = np.argsort(groups, kind="stable")
        starts = starts_of(groups[order])
        found, counts = groups[order[starts]], np.diff(np.r_[starts, len(order)])
        numbers[np.repeat(free[found] - starts, counts) + np.arange(len(order))] = some[order]
        free[found] += counts
    made = zip(keys.tolist(), np.split(numbers, ends[:-1]), strict=True)
    return dict(sorted(((key, group) for key, group in made if len(group)), key=lambda each: int(each[1][0])))


def _by_turns(
    in_a: list[int], in_b: list[int], signs_a: Sequence[Hashable], signs_b: Sequence[Hashable]
) -> Iterator[tuple[int, int]]:
    """The first call with a sign in A and the first in B, then the second and the second; 0 is not a sign."""
    places: dict[Hashable, list[int]] = defaultdict(list)
    for j, sign in zip(reversed(in_b), reversed(signs_b), strict=True):
        if sign:
            places[sign].append(j)
    for i, sign in zip(in_a, signs_a, strict=True):
        if places.get(sign):
            yield i, places[sign].pop()
