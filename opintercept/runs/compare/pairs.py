"""`Index` and `Pairs`: pair each call of one run with its counterpart in another.

Invariant: memory holds some calls at a time, and tables of those only whose keys do not pair in order. Every step takes
about linear time, except for one that has a budget. Needs numpy. Must not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, NamedTuple, get_args

import numpy as np

from opintercept._core.record import CallRecord, Phase
from opintercept.runs.compare.pairing import PAIRINGS, Ids, family, fingerprint
from opintercept.runs.program.names import is_plain, module_name, operator_name
from opintercept.runs.store.columns import Array, Arrays, Columns
from opintercept.runs.sums import KindNumbers, ordinals, starts_of

_BUDGET = 5_000_000  # comparisons of equal elements that difflib may make for a pair of runs: about five seconds
_MOST_CHANGED = 1 << 17  # changed calls that are held in memory to find shuffled ones
_WAITING = 1 << 16  # calls that wait for a counterpart; when there are more, their keys do not pair in order
PHASES = get_args(Phase)
_HASHES = ("lhs_hash", "rhs_hash", "bias_hash")
_ODD = np.uint64(0x9E3779B97F4A7C15)
KIND = np.dtype(
    [
        ("key", "i8"),  # module, operator, phase and `grad_of`
        ("loose", "i8"),  # module, phase and family
        ("module", "i8"),
        ("phase", "u1"),  # an index into `PHASES`
        ("shape", "i8"),  # phase, family and the GEMM; without one the operands' shapes, or that of the output
        ("rows", "i8"),  # in no module, the same without the number of rows; 0 in one, whose name is enough
        ("signature", "i8"),
        ("call_site", "i8"),
        ("fingerprint", "i8"),  # everything that is compared except for values
        ("by", "i8"),  # what there is of the outputs' values, as an index into `pairing.BY`
        ("unhashed", "?"),  # whether some tensors have no hash
        ("chosen", "?"),  # whether the caller selects it by what it is
        ("product", "?"),
    ]
)
"""What an index has for each kind: numbers that are equal for equal things."""


class Index:
    """The calls of one process, in the order in which they ended.

    Args:
        columns: The calls.
        ids: Numbers for equal things, shared with the other run's index.
        select: Which calls the caller asks for. If it has an attribute `by_name` that is true, it is called once for
            each kind.

    Attributes:
        model: The class of the model whose modules have plain names, which they get (see `first_models`).
        kinds: The distinct (call site, signature) pairs that have been read.
        names: The names of the modules.
        is_inference: Whether the process trains nothing: no backward pass, no left operand that requires a gradient.
    """

    def __init__(self, columns: Columns, ids: Ids, select: Callable[[CallRecord], bool] | None) -> None:
        self.columns, self.model = columns, ""
        call_sites = [columns.call_site(number) for number in range(columns.call_sites)]
        self.names = {name for each in call_sites if (name := module_name(each.module))}
        operands = (columns.signature(number).record.lhs for number in columns.used)
        self.is_inference = all(each.phase == "forward" for each in call_sites) and not any(
            lhs is not None and lhs.requires_grad for lhs in operands
        )
        self._ids = ids
        self._numbers = KindNumbers(columns)
        self._of_signatures: dict[int, tuple[int, int, bool]] = {}  # fingerprint, by, unhashed
        by_name = select is not None and getattr(select, "by_name", False)
        self._select = select if by_name else None
        self._chosen: Array | None = None
        if select is not None and not by_name:
            self._chosen = np.fromiter((select(call.record) for call in columns.calls()), bool, len(columns))
        self.kinds = np.zeros(0, KIND)

    def __len__(self) -> int:
        return len(self.columns)

    def _kind(self, call_site_number: int, signature_number: int) -> tuple[int, ...]:
        """The numbers of a kind, as `KIND` has them."""
        call_site, signature = self.columns.call_site(call_site_number), self.columns.signature(signature_number)
        record, phase, ids = signature.record, call_site.phase, self._ids
        lhs, rhs = record.lhs, record.rhs
        operands: tuple[Any, ...] = (lhs and lhs.shape, rhs and rhs.shape)
        if record.gemm is not None:
            operands = record.gemm[:4]
        elif lhs is None and rhs is None:
            operands = tuple(meta and meta.shape for meta in record.outputs[:1])
        module, kin = module_name(call_site.module), family(record)
        if self.model and module and is_plain(module):
            module = f"{self.model}.{module}"
        if signature_number not in self._of_signatures:
            unhashed = not all(hashed for _, hashed in signature.roles.values())
            self._of_signatures[signature_number] = *fingerprint(signature.template), unhashed
        return (
            ids("key", module, operator_name(record.op), phase, call_site.grad_of),
            ids("loose", module, phase, kin),
            ids("module", module),
            PHASES.index(phase),
            ids("shape", phase, kin, operands),
            ids("rows", phase, kin, *_without_rows(operands)) if module in ("", None) else 0,
            signature_number,
            call_site_number,
            *self._of_signatures[signature_number],
            self._select is None or self._select(signature.record_at(call_site)),
            record.gemm is not None,
        )

    def _with_kinds(self, chunk: Arrays) -> Arrays:
        chunk["kind"], new = self._numbers.of(chunk)
        del chunk["site"], chunk["look"]
        if new:
            self.kinds = np.append(self.kinds, np.array([self._kind(*each) for each in new], KIND))
        return chunk

    def chunks(self, names: Sequence[str]) -> Iterator[tuple[int, Arrays]]:
        """Columns of all calls and their kinds, piece by piece, each with the number of its first call."""
        for start, chunk in self.columns.chunks(("site", "look", *names)):
            yield start, self._with_kinds(chunk)

    def gather(self, numbers: Array, names: Sequence[str] = ()) -> Arrays:
        """Columns of some calls and their kinds."""
        return self._with_kinds(self.columns.gather(numbers, ("site", "look", *names)))

    def chosen(self, numbers: Array, kinds: Array) -> Array:
        """Return which of these calls the caller selects."""
        return np.asarray(self.kinds["chosen"][kinds] if self._chosen is None else self._chosen[numbers])

    def inputs(self, chunk: Arrays) -> Array:
        """Shapes and hashes of the first operands; 0 if no hash is recorded."""
        return mixed(self.kinds["shape"][chunk["kind"]], *(chunk[name] for name in _HASHES))


def mixed(first: Array, *hashes: Array) -> Array:
    """A number for each row of hashes, 0 if all of them are."""
    found, known = first.astype(np.uint64) * _ODD, np.zeros(len(first), bool)
    for digits in hashes:
        found = (found ^ digits) * _ODD
        found ^= found >> np.uint64(29)
        known |= digits != 0
    return np.where(known, found | np.uint64(1), np.uint64(0)).view(np.int64)


def _without_rows(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """What calls in no module have in common if only their number of rows differs."""
    if shape and isinstance(shape[0], int):  # of a GEMM
        return shape[:1] + shape[2:]
    return tuple(each[1:] if each and len(each) > 1 else each for each in shape)


class PairWindow(NamedTuple):
    """Some pairs: the numbers of their calls, how they are paired, and columns of both, the kinds included."""

    numbers: Array
    others: Array
    how: Array  # an index into `PAIRINGS`, see `CallDifference.pairing`
    a: Arrays
    b: Arrays

    def take(self, which: Array) -> PairWindow:
        """Return the pairs at some places, in their order."""
        if len(which) == len(self.numbers):
            return self
        a, b = ({name: column[which] for name, column in side.items()} for side in (self.a, self.b))
        return PairWindow(self.numbers[which], self.others[which], self.how[which], a, b)


class _Changed:
    """Finds keys of which a call of A has the first operands of another call of B, as shuffled ones have.

    It keeps the operands of calls where they changed; of very many, those whose hash ends with enough zeros.
    """

    def __init__(self) -> None:
        self.keys: set[int] = set()  # those that do not pair in order
        self._kept = [np.zeros((2, 0), np.uint64), np.zeros((2, 0), np.uint64)]  # hashes and keys, of A and of B
        self._zeros = np.uint64(0)

    def add(self, keys: Array, own: Array, others: Array) -> None:
        """Add calls."""
        keys = keys.view(np.uint64)
        for side, inputs in enumerate((own.view(np.uint64), others.view(np.uint64))):
            some = (inputs != 0) & ((inputs & self._zeros) == 0)  # 0 is not known
            new = np.stack([inputs ^ keys * _ODD, keys])[:, some]  # the same operands of other keys differ
            self._kept[side] = np.hstack([self._kept[side], new])
        while max(kept.shape[1] for kept in self._kept) > _MOST_CHANGED:
            self._zeros = self._zeros * np.uint64(2) + np.uint64(1)
            ends = [(kept[0] ^ kept[1] * _ODD) & self._zeros for kept in self._kept]
            self._kept = [kept[:, end == 0] for kept, end in zip(self._kept, ends, strict=True)]

    def apart(self) -> Array:
        """The keys that do not pair in order."""
        (own, keys), (others, _) = self._kept
        self.keys.update(keys[np.isin(own, others)].tolist())
        return np.array(sorted(self.keys), np.int64)


class _ApartCalls:
    """Those calls of an index whose keys do not pair in order."""

    def __init__(self, index: Index, keys: Array) -> None:
        self._index = index
        parts: list[tuple[Array, ...]] = [(np.empty(0, np.int32), *np.empty((3, 0), np.int64))]
        for start, chunk in index.chunks(("step", *_HASHES)) if len(keys) else ():
            at = np.flatnonzero(np.isin(index.kinds["key"], keys)[chunk["kind"]])
            kinds = chunk["kind"].astype(np.int32)[at]
            parts.append(((at + start).astype(np.int32), kinds, index.inputs(chunk)[at], chunk["step"][at]))
        self.numbers, self.kind, self.inputs, self.steps = map(np.concatenate, zip(*parts, strict=True))

    def of_kinds(self, name: str, places: Any) -> Array:
        """What an index has for each kind, of some calls."""
        return np.asarray(self._index.kinds[name][self.kind[places]])

    def _read(self, places: Array, names: Sequence[str]) -> Arrays:
        return self._index.columns.gather(self.numbers[places].astype(np.int64), names)

    def signs(self, name: str, places: Array) -> Array:
        """Numbers by which calls are told apart, with their shapes; 0 for one that has none."""
        shapes = self.of_kinds("shape", places)
        if name == "inputs":
            return self.inputs[places]
        if name == "early":  # before the first product, as where weights are made
            return places < np.argmax(self.products)
        if name == "weights":  # hashes of the right operand and the bias
            read = self._read(places, _HASHES[1:])
            return np.where(read["rhs_hash"] == 0, 0, mixed(shapes, read["rhs_hash"], read["bias_hash"]))
        if name == "sizes":  # of the two operands, in steps of 2 %
            figures = self._read(places, ("lhs_rms", "rhs_rms"))
            with np.errstate(divide="ignore", invalid="ignore"):
                sizes = np.sort(np.log(list(figures.values())), axis=0)
                known = mixed(shapes, *np.rint(sizes * 50).astype(np.int64).view(np.uint64))
            return np.where(np.isfinite(sizes).all(0), known, 0)
        return self.of_kinds(name, places)

    @property
    def products(self) -> Array:
        """Which of them are products of a forward pass."""
        kinds = self._index.kinds
        return np.asarray((kinds["product"] & (kinds["phase"] == PHASES.index("forward")))[self.kind])

    def batches(self) -> tuple[Array, Array]:
        """The hashes of what products multiply with weights, of which each occurs once, and their steps."""
        places = np.flatnonzero(self.products)
        read = self._read(places, ("lhs_hash",))["lhs_hash"]
        hashes, at, counts = np.unique(read, return_index=True, return_counts=True)
        once = (counts == 1) & (hashes != 0)
        return hashes[once], self.steps[places[at[once]]]


class Pairs:
    """The counterparts of the calls of two indexes.

    Most calls pair with that of the same key and ordinal, and are found as both runs are read side by side. Of keys
    that have other numbers of calls, other shapes or shuffled calls, tables are made. As that shows at the end only,
    `windows` has to be read again unless `settled` is true then.
    """

    def __init__(self, a: Index, b: Index) -> None:
        self._a, self._b = a, b
        self._budget = _BUDGET
        self._changed: _Changed | None = _Changed()
        self._tabulate(np.empty(0, np.int64))

    @property
    def unmatched(self) -> tuple[Array, Array]:
        """The numbers of the calls without a counterpart."""
        return self._in_a.numbers[self._of_a < 0], self._in_b.numbers[self._alone_b]

    def settled(self) -> bool:
        """Whether the pairs that were read are right; if not, they will be so the next time."""
        if self._changed is None:
            return True
        keys, self._changed = self._changed.apart(), None
        self._tabulate(keys)
        if self._resumed:  # no call pairs in order
            self._tabulate(np.unique(np.append(self._a.kinds["key"], self._b.kinds["key"])))
        return not len(keys)

    def windows(self, names: Sequence[str] = ()) -> Iterator[PairWindow]:
        """The pairs some at a time, with columns of both calls; those of each key in their order."""
        sides, names = (self._a, self._b), tuple(dict.fromkeys((*_HASHES, *names)))
        none = np.empty((2, 0), np.int64)
        waiting = [none, none]  # numbers and keys of calls whose counterpart has not come yet
        for chunks in zip_longest(*(side.chunks(names) for side in sides)):
            new = [none if each is None else self._in_order(s, *each) for s, each in zip(sides, chunks, strict=True)]
            chunk_a, chunk_b = (each and each[1] for each in chunks)
            in_step = not waiting[0].size and not waiting[1].size and np.array_equal(new[0], new[1])
            if chunk_a and chunk_b and in_step and len(chunk_a["kind"]) == len(chunk_b["kind"]) == new[0].shape[1]:
                window = PairWindow(new[0][0], new[1][0], np.zeros(new[0].shape[1], np.uint8), chunk_a, chunk_b)
            else:
                both = [np.hstack(each) for each in zip(waiting, new, strict=True)]
                at = _by_turns(*(keys for _, keys in both))
                numbers, others = (each[0, places] for each, places in zip(both, at, strict=True))
                waiting = [np.delete(each, places, 1) for each, places in zip(both, at, strict=True)]
                how = np.zeros(len(numbers), np.uint8)
                if chunks[0] and chunk_a:
                    first, end = chunks[0][0], chunks[0][0] + len(chunk_a["kind"])
                    more = slice(*np.searchsorted(self._in_a.numbers, [first, end]).tolist())
                    paired = np.flatnonzero(self._of_a[more] >= 0) + more.start
                    numbers = np.r_[numbers, self._in_a.numbers[paired]]
                    others = np.r_[others, self._in_b.numbers[self._of_a[paired]]]
                    how = np.r_[how, self._how[paired]]
                order = np.argsort(numbers)
                numbers, others = numbers[order], others[order]
                window = PairWindow(
                    numbers, others, how[order], *map(Index.gather, sides, (numbers, others), (names,) * 2)
                )
            if len(window.numbers):
                self._judge(window)
                yield window
            if sum(each.shape[1] for each in waiting) > _WAITING and self._changed is not None:
                waiting = self._note_apart(waiting)
        self._note_apart(waiting)

    def _note_apart(self, waiting: list[Array]) -> list[Array]:
        if self._changed is not None:
            self._changed.keys.update(*(keys.tolist() for _, keys in waiting))
        return [each[:, :0] for each in waiting]

    def _in_order(self, index: Index, start: int, chunk: Arrays) -> Array:
        """The numbers and keys of those calls of a chunk that may pair by key and ordinal."""
        keys = index.kinds["key"][chunk["kind"]]
        found = np.stack([np.arange(start, start + len(keys)), keys])
        return found[:, ~np.isin(keys, self._apart)] if len(self._apart) else found

    def _judge(self, window: PairWindow) -> None:
        """Note the keys that do not pair in order."""
        if self._changed is None:
            return
        a, b = self._a, self._b
        keys, shapes = (a.kinds[name][window.a["kind"]] for name in ("key", "shape"))
        self._changed.keys.update(keys[shapes != b.kinds["shape"][window.b["kind"]]].tolist())
        rows = np.flatnonzero(np.any([window.a[name] != window.b[name] for name in _HASHES], axis=0))
        own, others = ({name: each[name][rows] for name in ("kind", *_HASHES)} for each in window[3:])
        if len(rows):
            self._changed.add(keys[rows], a.inputs(own), b.inputs(others))

    def _tabulate(self, keys: Array) -> None:
        """Pair the calls of some keys by tables: calls with the same operands, then in the order of steps and shapes.

        Calls are aligned as a sequence if the runs have different numbers of them, or other shapes.
        """
        self._apart = keys
        a, b = self._in_a, self._in_b = _ApartCalls(self._a, keys), _ApartCalls(self._b, keys)
        self._of_a, self._alone_b = np.full(len(a.numbers), -1, np.int32), np.ones(len(b.numbers), bool)
        self._how = np.zeros(len(a.numbers), np.uint8)
        later = _begun_later(a, b)
        self._resumed = later != 0
        b.steps = b.steps + later
        for how, name in ((0, "key"), (2, "loose"), (3, "phase")):
            groups_a, groups_b = _groups(a, name, self._of_a < 0), _groups(b, name, self._alone_b)
            for key, in_a in groups_a.items():
                if (in_b := groups_b.get(key)) is not None:
                    self._pair(in_a, in_b, how)

    def _pair(self, in_a: Array, in_b: Array, how: int) -> None:
        a, b = self._in_a, self._in_b
        renamed = PAIRINGS[how] == "shape"
        same_length = how == 0 and not self._resumed and len(in_a) == len(in_b)
        if same_length and np.array_equal(a.of_kinds("shape", in_a), b.of_kinds("shape", in_b)):
            changed = a.inputs[in_a] != b.inputs[in_b]
            own, others = a.inputs[in_a[changed]], b.inputs[in_b[changed]]
            if not np.isin(own, others[others != 0]).any():  # else calls are shuffled
                self._join(in_a, in_b, how)
                return
        left = in_a, in_b
        # Calls with the same operands are the same wherever they stand; with the same weight, the module is the same.
        passes = _RENAMED if renamed else _OTHERS if how else _NAMED
        if self._resumed:
            passes = (*(each for each in passes if "steps" in each[0]), *_EARLY)
        for names, aligned in passes:
            find = self._in_stretches if aligned else _by_turns
            at = find(_signs(a, left[0], names), _signs(b, left[1], names))
            self._join(left[0][at[0]], left[1][at[1]], how or 1)
            left = in_a[self._of_a[in_a] < 0], in_b[self._alone_b[in_b]]
            if not (len(left[0]) and len(left[1])):
                return
        if not renamed and not self._resumed and len(left[0]) == len(left[1]):
            like = a.of_kinds("rows", left[0]) == b.of_kinds("rows", left[1])
            self._join(left[0][like], left[1][like], how or 1)

    def _join(self, in_a: Array, in_b: Array, how: int) -> None:
        if PAIRINGS[how] == "shape":  # two modules may be one under two names, unless both runs have either
            one, other = self._in_a.of_kinds("module", in_a), self._in_b.of_kinds("module", in_b)
            may = (one == other) | ~np.isin(one, self._b.kinds["module"]) | ~np.isin(other, self._a.kinds["module"])
            in_a, in_b = in_a[may], in_b[may]
        self._of_a[in_a], self._alone_b[in_b], self._how[in_a] = in_b, False, how

    def _in_stretches(self, signs_a: Array, signs_b: Array) -> list[Array]:
        """The places of the longest stretches of equal signs; by turns if finding these would take too long."""
        start = _alike(signs_a, signs_b)
        end = _alike(signs_a[start:][::-1], signs_b[start:][::-1])
        middle = [signs[start : len(signs) - end] for signs in (signs_a, signs_b)]
        in_a, in_b = (each.tolist() for each in middle)
        counts = Counter(in_b)
        # difflib looks at each pair of equal elements at each level of its recursion, which can be 20 deep.
        alike = sum(counts[sign] for sign in in_a)
        work = 20 * alike + len(in_a) + len(in_b) if alike else 0
        if work > self._budget:
            found = _by_turns(*middle)
        else:
            self._budget -= work
            blocks = SequenceMatcher(None, in_a, in_b, autojunk=False).get_matching_blocks() if alike else ()
            spans = [np.add.outer(each[:2], np.arange(each[2])) for each in blocks]
            found = [*np.hstack([np.empty((2, 0), np.int64), *spans])]
        sides = zip(found, (signs_a, signs_b), strict=True)
        return [np.r_[:start, start + at, len(signs) - end : len(signs)] for at, signs in sides]


# The numbers by which calls are told apart, the surest first, and whether calls are aligned in their order.
_Signs = tuple[tuple[tuple[str, ...], bool], ...]
_BY_ORDER: _Signs = ((("fingerprint", "steps"), True), (("shape", "steps"), True), (("shape",), True))
_NAMED: _Signs = ((("inputs", "steps"), False), (("inputs",), False), *_BY_ORDER)
_EARLY: _Signs = tuple((("early", name), False) for name in ("fingerprint", "shape"))
_OTHERS: _Signs = (*_NAMED[:2], (("weights", "steps"), False), (("sizes", "steps"), False), *_BY_ORDER[1:])
_RENAMED: _Signs = ((("weights", "steps"), False), (("weights",), False), (("sizes", "steps"), False), *_BY_ORDER[1:])


def _signs(table: _ApartCalls, places: Array, names: Sequence[str]) -> Array:
    """Numbers that tell calls apart; 0 where the first of what they are made of is not known."""
    first, *more = (table.steps[places] if name == "steps" else table.signs(name, places) for name in names)
    return mixed(*more, first.astype(np.uint64)) if more else first


def _begun_later(a: _ApartCalls, b: _ApartCalls) -> int:
    """By how many steps A is ahead where both multiply the same, as where B resumes what A does as a whole."""
    (in_a, steps_a), (in_b, steps_b) = a.batches(), b.batches()
    _, at_a, at_b = np.intersect1d(in_a, in_b, assume_unique=True, return_indices=True)
    found, counts = np.unique(steps_a[at_a] - steps_b[at_b], return_counts=True)
    return int(found[np.argmax(counts)]) if 2 * counts.max(initial=0) > counts.sum() else 0


def _groups(table: _ApartCalls, name: str, alone: Array) -> dict[int, Array]:
    """The calls without a counterpart that share a number, by that number, in the order of their first calls."""
    places = np.flatnonzero(alone)
    groups = table.of_kinds(name, places)
    order = np.argsort(groups, kind="stable")
    starts = starts_of(groups[order])
    made = np.split(places[order].astype(np.int32), starts[1:])
    return {int(groups[order[start]]): made[n] for n, start in sorted(enumerate(starts), key=lambda e: order[e[1]])}


def _by_turns(signs_a: Array, signs_b: Array) -> list[Array]:
    """The places of the first call with a sign in A and in B, then those of the second in both; 0 is not a sign."""
    places, turns = list[Array](), list[Array]()
    for signs in (signs_a, signs_b):
        places.append(np.flatnonzero(signs))
        own = signs[places[-1]]
        turns.append(mixed(ordinals(own), own.astype(np.uint64)))
    _, *found = np.intersect1d(turns[0], turns[1], assume_unique=True, return_indices=True)
    return [each[at] for each, at in zip(places, found, strict=True)]


def _alike(a: Array, b: Array) -> int:
    """How many elements are the same until two differ."""
    size = min(len(a), len(b))
    return int(np.argmin(np.append(a[:size] == b[:size], False)))
